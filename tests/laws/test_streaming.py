"""Laws of Streaming DiLoCo: by DiLoCo where all is synchronized at once, by closed forms, and what it refuses."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from strategies import device_type, loaded_of, scenario_of, star, tiny_model

from gssim.errors import UserError
from gssim.plan import METHODS
from gssim.plan.buckets import fragments_of
from gssim.result import chrome_trace
from gssim.scenario import load_model
from gssim.simulation import record_steady_step, simulate

SIZE = 4 * tiny_model().elements
WAITED_FOR = {"fragments": 1, "delay_steps": 0, "local_ratio": 0.0}


def simulated(*, cluster=None, run=None, unfolded=False, precision="fp32", batch=8, method="streaming_diloco", **plan):
    scenario = scenario_of(
        cluster or star(2, bandwidth=1e5),
        {"method": method, "sync_every_steps": 4} | plan,
        run={"steps": 12} | (run or {}),
        precision=precision,
        global_batch_size=batch,
    )
    return simulate(loaded_of(scenario), unfolded=unfolded)


def result_of(**settings):
    return simulated(**settings).result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("outer", [{}, {"precision": "int8"}])
def test_one_fragment_that_is_waited_for_is_diloco(precision, ranks, outer):
    settings = {"cluster": star(ranks, bandwidth=1e5), "precision": precision, "outer": outer, "batch": 12}
    plain, result = result_of(method="diloco", **settings), result_of(streaming=WAITED_FOR, **settings)
    assert result.step_time_s == pytest.approx(plain.step_time_s)
    assert result.phases_s == pytest.approx(plain.phases_s)
    assert result.collectives == plain.collectives
    assert result.ranks[0].peak_allocated_bytes == plain.ranks[0].peak_allocated_bytes
    assert result.ranks[0].peak_by_category_bytes == plain.ranks[0].peak_by_category_bytes
    assert result.ranks[0].bytes_sent == pytest.approx(plain.ranks[0].bytes_sent)
    for name in ("inner_step_time_s", "outer_step_time_s", "outer_bytes", "outer_bytes_sent"):
        assert getattr(result.periods, name) == pytest.approx(getattr(plain.periods, name))


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [40, 10**6])
def test_ranks_wait_for_what_the_steps_behind_an_exchange_leave_of_it(delay, bucket_bytes):
    """A ring over the links takes 2 (n - 1) / n of the bytes; several buckets in flight share the links."""
    inner_s = result_of(method="diloco").periods.inner_step_time_s
    ring_s = 2.5 * inner_s
    cluster = star(2, bandwidth=SIZE / ring_s)
    streaming = WAITED_FOR | {"delay_steps": delay}
    result = result_of(cluster=cluster, streaming=streaming, bucket_bytes=bucket_bytes)
    waited_s = max(0.0, ring_s - delay * inner_s) / 4
    assert result.phases_s["exposed_communication"] == pytest.approx(waited_s, rel=0.02, abs=1e-3 * inner_s)
    fast = result_of(cluster=star(2, bandwidth=1e12), streaming=streaming, bucket_bytes=bucket_bytes)
    assert result.step_time_s - fast.step_time_s == pytest.approx(waited_s, rel=0.02, abs=1e-3 * inner_s)


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_a_period_carries_all_parameters_once_however_they_are_cut(fragments):
    result = result_of(streaming={"fragments": fragments, "delay_steps": 0}, sync_every_steps=6)
    plain = result_of(method="diloco", sync_every_steps=6)
    assert result.periods.outer_bytes == plain.periods.outer_bytes == SIZE
    assert result.ranks[0].bytes_sent == pytest.approx(plain.ranks[0].bytes_sent)
    assert len(result.periods.outer_steps) == fragments
    assert sum(entry.count for entry in result.collectives) == fragments
    assert sum(result.phases_s.values()) == pytest.approx(result.step_time_s)


def test_fragments_are_layers_in_turn_and_synchronized_one_after_another():
    scenario = scenario_of(
        star(2),
        {"method": "streaming_diloco", "sync_every_steps": 11, "bucket_bytes": 8}
        | {"streaming": {"fragments": 3, "delay_steps": 2}},
        run={"steps": 11},
    )
    found = fragments_of(
        scenario.plan, scenario.policies, layers=[0, 0, 1, 2, 3, 4, 4], sizes_bytes=[4, 4, 8, 8, 8, 4, 4]
    )
    assert [(each.begin_step, each.end_step, each.buckets) for each in found] == [
        (1, 3, ((0, 1), (4,))),
        (5, 7, ((2,), (5, 6))),
        (9, 11, ((3,),)),
    ]


def test_a_fragment_in_flight_is_held_beside_the_steps_behind_it():
    plan = {"streaming": {"fragments": 1, "delay_steps": 1}}
    behind, waited = result_of(**plan).ranks[0], result_of(streaming=WAITED_FOR).ranks[0]
    assert behind.peak_by_category_bytes["communication"] == SIZE
    assert (
        behind.peak_allocated_bytes
        == waited.peak_allocated_bytes - waited.peak_by_category_bytes.get("communication", 0.0) + SIZE
    )
    for name in ("outer_parameters", "outer_momentum"):
        assert behind.peak_by_category_bytes[name] == SIZE


def test_gloos_own_buffer_of_a_gather_is_held_as_long_as_the_gather_takes():
    """It is as large as what is gathered. A step that ends after the gather holds it no more at its peak."""
    plan = {"streaming": {"fragments": 1, "delay_steps": 1}, "outer": {"precision": "int8"}}
    kinds = {"bandwidth": 1e13, "latency_s": 0.0}, {"bandwidth": 10.0}
    fast, slow = (result_of(cluster=star(2, **links), batch=512, **plan) for links in kinds)
    (gathered_bytes,) = {entry.key[2] for entry in slow.collectives if entry.key[0] == "all-gather"}
    peaks = [each.ranks[0].peak_allocated_bytes for each in (fast, slow)]
    assert peaks[1] == peaks[0] + gathered_bytes


def test_an_exchange_slows_down_the_steps_behind_it():
    """Steps that overlap an exchange take twice as long on a device that then computes at half its speed."""
    inner_s = result_of(method="diloco").periods.inner_step_time_s
    types = {"slow": device_type(communicating_slowdown_ratio=2.0)}
    cluster = star(2, bandwidth=SIZE / (10 * inner_s), types=types, type_names=["slow", "slow"])
    streaming = {"fragments": 1, "delay_steps": 2, "local_ratio": 0.0}
    found = simulated(cluster=cluster, streaming=streaming)
    spans = [span for span in found.spans if span.rank == 0 and span.stream == "compute" and span.phase == "forward"]
    length_s = {step: sum(s.end_s - s.start_s for s in spans if s.label.endswith(f"step {step}")) for step in (1, 3, 4)}
    assert length_s[3] == pytest.approx(2 * length_s[1])
    assert length_s[4] == pytest.approx(2 * length_s[1])


def test_unequal_ranks_wait_for_each_other_once_a_fragment():
    shares = {"shares": {"batch": [0.75, 0.25]}}
    cluster = star(2, bandwidth=1e12)
    result = result_of(cluster=cluster, **shares)
    slow = simulate(loaded_of(scenario_of(star(1), {"method": "single"}, global_batch_size=6))).result.step_time_s
    fast = simulate(loaded_of(scenario_of(star(1), {"method": "single"}, global_batch_size=2))).result.step_time_s
    assert result.step_time_s == pytest.approx(slow, rel=0.05)
    waits = {rank: each.phases_s["exposed_communication"] for each in result.ranks for rank in each.ranks}
    assert waits[1] - waits[0] == pytest.approx(slow - fast, rel=0.05)


def test_a_rank_that_is_a_little_faster_waits_in_the_long_run():
    """It gains on the other for many periods before it does: an exchange may be two steps late until then."""
    types = {"slow": device_type(), "fast": device_type(peak_flop_per_s={"fp32": 1.002e9})}
    streaming = {"fragments": 1, "delay_steps": 2}
    both, slow = (
        result_of(cluster=star(2, bandwidth=1e12, types=types, type_names=["slow", other]), streaming=streaming)
        for other in ("fast", "slow")
    )
    assert both.step_time_s == pytest.approx(slow.step_time_s)
    for each in both.ranks:
        assert sum(each.phases_s.values()) == pytest.approx(both.step_time_s)
    waits = {rank: each.phases_s["exposed_communication"] for each in both.ranks for rank in each.ranks}
    assert waits[0] < waits[1] < 0.01 * both.step_time_s


def test_a_slow_step_lengthens_its_own_period_alone():
    slow = {"slowdowns": [{"rank": 0, "first_step": 4, "steps": 1, "compute_ratio": 2}], "warmup_steps": 0}
    cluster = star(2, bandwidth=1e12)
    plain, result = result_of(cluster=cluster), result_of(cluster=cluster, run=slow)
    begin_s, inner_s, outer_s = (getattr(plain.periods, f"{name}_step_time_s") for name in ("begin", "inner", "outer"))
    assert inner_s is None  # two fragments begin and end in four steps
    expected = [outer_s if (step + 1) % 2 == 0 else begin_s for step in range(12)]
    longer = [seen - usual for seen, usual in zip(result.step_times_s, expected, strict=True)]
    assert [step for step, more_s in enumerate(longer) if abs(more_s) > 0.01 * begin_s] == [4, 5]
    assert sum(longer) == pytest.approx(begin_s, rel=0.05)  # one rank is slow, the other waits for it
    assert result.step_time_s == pytest.approx(plain.step_time_s, rel=1e-2)


def test_a_run_may_end_within_a_period():
    whole, more = result_of(run={"steps": 12, "warmup_steps": 0}), result_of(run={"steps": 14, "warmup_steps": 3})
    assert more.step_time_s == pytest.approx(whole.step_time_s)
    for name, value in asdict(whole.periods).items():
        assert getattr(more.periods, name) == (value if name.endswith("steps") else pytest.approx(value))
    slow = {"slowdowns": [{"rank": 0, "first_step": 0, "compute_ratio": 2}], "warmup_steps": 0}
    cluster = star(2, bandwidth=1e12)
    whole, more = (result_of(cluster=cluster, run={"steps": steps} | slow) for steps in (4, 6))
    assert more.phases_s == pytest.approx(whole.phases_s)


@pytest.mark.parametrize("settings", [{}, {"streaming": {"fragments": 2, "delay_steps": 0}}, {"bucket_bytes": 100}])
def test_a_folded_period_is_the_unfolded_one(settings):
    types = {"fast": device_type(), "slow": device_type(memory_bandwidth_bytes_per_s=1e8)}
    unequal = star(3, bandwidth=1e5, types=types, type_names=["fast", "slow", "fast"])
    for cluster in (star(4, bandwidth=1e5), unequal):
        folded, unfolded = (result_of(cluster=cluster, unfolded=each, batch=12, **settings) for each in (False, True))
        assert folded.step_time_s == pytest.approx(unfolded.step_time_s)
        assert folded.phases_s == pytest.approx(unfolded.phases_s)
        assert folded.collectives == unfolded.collectives


def test_a_trace_shows_a_whole_period():
    found = simulated(bucket_bytes=100)
    shown = record_steady_step(found)
    spans, about = shown.spans, json.loads(chrome_trace(shown, found.result))["otherData"]
    assert about["step_time_s"] == pytest.approx(4 * found.result.step_time_s)
    assert about["step_time_s"] == pytest.approx(max(end for _, end in shown.bounds_s.values()))
    labels = [span.label for span in spans if span.rank == 0]
    assert {f"optimizer step {step}" for step in range(1, 5)} <= set(labels)
    assert "outer step bucket 0" in labels
    assert "copy in outer step bucket 0 step 1" in labels
    assert "copy out outer step bucket 0 step 2" in labels
    behind = next(span for span in spans if span.label == "outer step bucket 0" and span.rank == 0)
    assert behind.stream.startswith("communication")
    second = [s for s in spans if s.rank == 0 and s.stream == "compute" and s.label.endswith("step 2")]
    assert any(s.phase == "forward" and s.start_s < behind.end_s and s.end_s > behind.start_s for s in second)


def test_a_slow_rank_of_a_cut_replica_is_slow_alone():
    model = load_model(Path(__file__).resolve().parents[2] / "scenarios/models/gpt-byte-150k.toml")
    slow = {"slowdowns": [{"rank": 1, "first_step": 0, "compute_ratio": 2}], "steps": 4, "warmup_steps": 0}
    plan = {"method": "streaming_diloco", "tp": 2, "sync_every_steps": 4}
    scenario = scenario_of(star(4), plan, run=slow, model=model, sequence_length=8, global_batch_size=4)
    folded, unfolded = (simulate(loaded_of(scenario), unfolded=each).result for each in (False, True))
    assert folded.phases_s == pytest.approx(unfolded.phases_s)
    forward_s = {rank: each.phases_s["forward"] for each in folded.ranks for rank in each.ranks}
    assert forward_s[1] == pytest.approx(2 * forward_s[0])
    assert forward_s[0] == pytest.approx(forward_s[2]) == pytest.approx(forward_s[3])


REFUSED = {
    "plan.streaming: method 'diloco' synchronizes no fragments; allowed with streaming_diloco": {
        "method": "diloco",
        "streaming": {"fragments": 3},
    },
    "plan.streaming.fragments = 5: each is synchronized in a step of its own, and a period has 4 steps": {
        "streaming": {"fragments": 5, "delay_steps": 0}
    },
    "plan.streaming.delay_steps = 2: 2 fragments are synchronized in 4 steps": {"streaming": {"delay_steps": 2}},
    "plan.overlap = False: exchanges go on behind 1 steps": {"overlap": False},
    "none of which is cut; allowed: at most": {
        "streaming": {"fragments": 12, "delay_steps": 0},
        "sync_every_steps": 12,
    },
    "plan.sparse_outer: method 'streaming_diloco' has no such": {"sparse_outer": {"decay": 0.5}},
    "run.steps = 12: fewer than the 13 steps": {"sync_every_steps": 13},
    "plan.tp = 2: method 'streaming_diloco' rounds changes": {"tp": 2, "outer": {"precision": "int8"}},
    "plan.cp = 2: cannot run yet": {"cp": 2},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_is_refused_in_a_line(reason):
    with pytest.raises(UserError) as error:
        result_of(**REFUSED[reason])
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_fragments_are_part_of_the_question():
    plans = (
        {},
        {"streaming": {"fragments": 2, "delay_steps": 1, "local_ratio": 0.5}},
        {"streaming": {"delay_steps": 0}},
        {"streaming": {"fragments": 3}},
        {"streaming": {"local_ratio": 0.0}},
        {"outer": {"momentum": 0.5}},
        {"method": "diloco"},
    )
    results = [result_of(**plan, sync_every_steps=8) for plan in plans]
    assert len({result.scenario_id for result in results}) == len(plans) - 1  # the second names the defaults
    said = results[0].to_dict()
    assert said["scenario"]["plan"]["streaming"] == {"fragments": 2, "delay_steps": 1, "local_ratio": 0.5}
    assert said["periods"]["begin_steps"] == [3, 7]
    assert said["periods"]["outer_steps"] == [4, 8]
    plain = results[-1].to_dict()
    assert "streaming" not in plain["scenario"]["plan"]
    assert not {"begin_steps", "outer_steps", "begin_step_time_s"} & set(plain["periods"])
    assert METHODS["streaming_diloco"].in_fragments
