"""Laws of replicas that are sharded and synchronize periodically: by whole replicas, zero3 and closed forms."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from point_checks import assert_same_as_unfolded
from searching import InThisProcess, fullest, searched
from strategies import device_type, loaded_of, scenario_of, star, tiny_model

import gssim
from gssim.errors import UserError
from gssim.planner import Batches, candidates
from gssim.planner.bounds import Bounds
from gssim.result import Result, chrome_trace
from gssim.scenario import SearchSpace
from gssim.simulation import record_steady_step, simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
METHODS = ("local_sgd", "diloco", "streaming_diloco", "sparse_loco")
SIZE = 4 * tiny_model().elements
WAITED_FOR = {"fragments": 1, "delay_steps": 0, "local_ratio": 0.0}


def simulated(method="diloco", *, ranks=4, cluster=None, run=None, batch=8, unfolded=False, **plan):
    scenario = scenario_of(
        cluster or star(ranks, bandwidth=1e5),
        {"method": method, "dp_shard": 2, "sync_every_steps": 4} | plan,
        run={"steps": 12} | (run or {}),
        global_batch_size=batch,
    )
    return simulate(loaded_of(scenario), unfolded=unfolded)


def result_of(*arguments, **settings):
    return simulated(*arguments, **settings).result


def zero3(*, ranks=2, cluster=None, batch=4, **plan):
    scenario = scenario_of(cluster or star(ranks, bandwidth=1e5), {"method": "zero3"} | plan, global_batch_size=batch)
    return simulate(loaded_of(scenario)).result


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (2, 4), (3, 2)])
def test_a_rank_sends_a_ring_of_its_shard_to_other_replicas(replicas, shards):
    result = result_of(ranks=replicas * shards, dp_shard=shards, batch=24)
    assert result.periods.outer_bytes == SIZE
    assert result.periods.outer_bytes_sent == pytest.approx(2 * (replicas - 1) / replicas * SIZE / shards)
    inside = {tuple(range(first, first + shards)) for first in range(0, replicas * shards, shards)}
    across = {tuple(range(place, replicas * shards, shards)) for place in range(shards)}
    groups = {(entry.kind, entry.group) for entry in result.collectives}
    assert groups == {(kind, group) for kind in ("all-gather", "reduce-scatter") for group in inside} | {
        ("all-reduce", group) for group in across
    }


def test_messages_are_whole_blocks_and_chunks_of_a_shard():
    shard = SIZE // 4 // 2
    result = result_of(outer={"precision": "int8"})
    assert result.periods.outer_bytes == 2 * 2 * -(-shard // 1024) * (1024 + 4)
    options = {"chunk_elements": 10, "chunk_entries": 6, "precision": "fp32"}
    result = result_of("sparse_loco", sparse_outer=options)
    assert result.periods.outer_bytes == 2 * 2 * 8 * -(-(-(-shard // 10) * (2 * 6 + 4 * 6)) // 8)
    assert result.ranks[0].peak_by_category_bytes["residuals"] == 4 * 10 * -(-shard // 10)


@pytest.mark.parametrize("method", METHODS)
def test_an_inner_step_is_zero3_on_the_ranks_of_a_replica(method):
    alone, result = zero3(), result_of(method, streaming=WAITED_FOR) if "stream" in method else result_of(method)
    assert result.periods.inner_step_time_s == pytest.approx(alone.step_time_s)
    inside = [entry for entry in result.collectives if entry.group in ((0, 1), (2, 3))]
    steps = 4 if method == "streaming_diloco" else 1  # whose program is of a period
    assert sorted((e.kind, e.bytes, e.count) for e in inside if e.group == (0, 1)) == sorted(
        (e.kind, e.bytes, steps * e.count) for e in alone.collectives
    )
    mean_outer = result.periods.outer_bytes_sent / 4
    assert result.ranks[0].bytes_sent == pytest.approx(alone.ranks[0].bytes_sent + mean_outer)
    (link,) = (each for each in result.links if each.name == "d0 -> sw")
    assert link.bytes == pytest.approx(result.ranks[0].bytes_sent)
    assert link.utilisation_ratio == pytest.approx(link.bytes / 1e5 / result.step_time_s)


@pytest.mark.parametrize("method", METHODS)
def test_state_is_sharded_and_so_are_the_copies_of_the_outer_optimizer(method):
    whole = result_of(method, dp_shard=1).ranks[0].peak_by_category_bytes
    held = result_of(method).ranks[0].peak_by_category_bytes
    for category in ("parameters", "outer_parameters", "outer_momentum"):
        assert held.get(category) == (whole[category] / 2 if category in whole else None)
    assert held["optimizer"] == zero3().ranks[0].peak_by_category_bytes["optimizer"]


def test_one_fragment_that_is_waited_for_is_diloco():
    plain, result = result_of("diloco"), result_of("streaming_diloco", streaming=WAITED_FOR)
    assert result.step_time_s == pytest.approx(plain.step_time_s)
    assert result.periods.outer_bytes == plain.periods.outer_bytes
    assert result.periods.outer_bytes_sent == pytest.approx(plain.periods.outer_bytes_sent)
    assert result.ranks[0].peak_by_category_bytes == plain.ranks[0].peak_by_category_bytes


def test_a_fragment_travels_behind_the_steps_that_follow():
    """On links for which an exchange is longer than the collectives inside, but shorter than a step."""
    types = {"fast": device_type(kind="cuda")}
    cluster = star(4, types=types, bandwidth=1e4, backend="nccl")
    waited, behind = (
        result_of("streaming_diloco", cluster=cluster, streaming={"fragments": 2, "delay_steps": steps})
        for steps in (0, 1)
    )
    assert behind.step_time_s < waited.step_time_s
    assert behind.periods.outer_bytes_sent == pytest.approx(waited.periods.outer_bytes_sent)


def test_one_replica_is_zero3():
    alone, result = zero3(ranks=4, batch=8), result_of(dp_shard=4)
    assert result.step_time_s == pytest.approx(alone.step_time_s)
    assert result.collectives == alone.collectives
    assert result.ranks[0].peak_by_category_bytes == alone.ranks[0].peak_by_category_bytes
    assert result.periods.outer_bytes == 0


def test_replicas_of_unequal_batches_wait_for_each_other_once_a_period():
    cluster = star(4, bandwidth=1e9)
    result = result_of(cluster=cluster, batch=16, shares={"batch": [0.375, 0.375, 0.125, 0.125]})
    slow, fast = (zero3(cluster=star(2, bandwidth=1e9), batch=batch).step_time_s for batch in (12, 4))
    assert result.periods.inner_step_time_s == pytest.approx((slow + fast) / 2)
    assert result.step_time_s == pytest.approx(slow, rel=0.02)
    waits = {rank: each.phases_s["exposed_communication"] for each in result.ranks for rank in each.ranks}
    assert waits[2] - waits[0] == pytest.approx(slow - fast, rel=0.02)


def test_a_slow_rank_slows_its_own_replica_alone():
    slow = {"slowdowns": [{"rank": 1, "first_step": 5, "steps": 1, "compute_ratio": 2}], "warmup_steps": 0}
    cluster = star(4, bandwidth=1e9)
    plain, result = result_of(cluster=cluster), result_of(cluster=cluster, run=slow)
    more = [now - before for now, before in zip(result.step_times_s, times_of(plain), strict=True)]
    inner_s = plain.periods.inner_step_time_s
    assert more[5] == pytest.approx(inner_s / 2, rel=0.02)  # two of four ranks take twice as long
    assert more[7] == pytest.approx(inner_s / 2, rel=0.02)  # the others wait
    assert all(abs(each) < 0.01 * inner_s for step, each in enumerate(more) if step not in (5, 7))


def times_of(result):
    periods = result.periods
    return [periods.inner_step_time_s if step % 4 else periods.outer_step_time_s for step in range(1, 13)]


UNEVEN = {"ranks": 6, "dp_shard": 3, "batch": 12}


@pytest.mark.parametrize("method", METHODS)
def test_uneven_shards_are_exchanged_as_they_are(method):
    """The third rank has 4 of 16 rows, and none of 4 rows."""
    streaming = {"streaming": {"fragments": 2, "delay_steps": 1}} if method == "streaming_diloco" else {}
    folded, unfolded = (result_of(method, unfolded=each, **UNEVEN, **streaming) for each in (False, True))
    assert_same_as_unfolded(folded, unfolded)
    sent = {entry.group: 0 for entry in folded.collectives if entry.group[-1] - entry.group[0] == 3}
    for entry in folded.collectives:
        if entry.group in sent:
            sent[entry.group] += entry.bytes * entry.count
    if method != "sparse_loco":
        assert sent == {(0, 3): 4 * 68, (1, 4): 4 * 68, (2, 5): 4 * 32}
    assert folded.periods.outer_bytes == sum(sent.values())


def test_a_trace_shows_the_collectives_of_an_inner_step():
    shown = simulated()
    labels = [span.label for span in record_steady_step(shown).spans if span.rank == 0]
    assert labels[0] == "inner steps 2"
    assert "all-gather h.0 (inner step)" in labels
    assert "outer step bucket 0" in labels
    json.loads(chrome_trace(record_steady_step(shown), shown.result))


WHOLE = {"parameters": "replicated", "gradients": "periodic", "optimizer_state": "replicated"}
SHARDED = {"parameters": "sharded", "gradients": "reduce-scatter", "optimizer_state": "sharded"}
REFUSED = {
    "plan.tp = 2: method 'diloco' rounds changes": {"tp": 2, "ranks": 8, "outer": {"precision": "int8"}},
    "plan.pp = 2: cannot run yet with method 'diloco'": {"pp": 2, "ranks": 8},
    "plan.cp = 2: cannot run yet with method 'diloco'": {"cp": 2, "ranks": 8},
    "plan.ep = 2: cannot run yet with method 'diloco'": {"ep": 2},
    "plan.offload = 'parameters': cannot run with method 'diloco'": {"offload": "parameters"},
    "plan.gradients = 'periodic': cannot run": WHOLE | {"dp_shard": 2},
    "plan.gradients = 'reduce-scatter': cannot run": SHARDED | {"dp_shard": 1},
    "divide": {"dp_shard": 3},
    "do not meet in every step": {"shares": {"replan": True}},
    "has no samples": {"shares": {"batch": [0.5, 0.25, 0.25, 0.0]}},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_combined_is_refused_in_a_line(reason):
    with pytest.raises(UserError) as error:
        result_of(**REFUSED[reason])
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


WORKLOADS = {
    "workload.optimizer = 'muon': it orthogonalises whole matrices, and plan.dp_shard = 2": ["optimizer=muon"],
    "workload.frozen: cannot run yet with method 'diloco'": ["frozen=['tokens']"],
}


@pytest.mark.parametrize("reason", WORKLOADS)
def test_workloads_that_cannot_be_combined_are_refused_in_a_line(reason):
    changes = [f"workload.{each}" for each in WORKLOADS[reason]]
    plan = ["plan.method=diloco", "plan.dp_shard=2", "cluster=clusters/lab-4-hosts.toml"]
    with pytest.raises(UserError) as error:
        gssim.load(SCENARIOS / "demo.toml", [*plan, *changes])
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_whole_replicas_stay_the_same_question():
    absent, one = (
        scenario_of(star(4), {"method": "diloco"} | plan, run={"steps": 12}) for plan in ({}, {"dp_shard": 1})
    )
    assert absent.scenario_id == one.scenario_id
    sharded = scenario_of(star(4), {"method": "diloco", "dp_shard": 2}, run={"steps": 12})
    assert sharded.scenario_id != one.scenario_id
    assert asdict(sharded.policies) | {"dp_shard": 1, "dp_replicate": 4} != asdict(one.policies)


def test_a_batch_is_divided_among_the_ranks_of_all_replicas():
    assert scenario_of(star(4), {"method": "diloco", "dp_shard": 2}, run={"steps": 12}).batch_sizes == (2, 2, 2, 2)


@pytest.mark.parametrize("method", METHODS)
def test_a_search_shards_replicas_where_whole_ones_do_not_fit(method):
    types = {"fast": device_type(memory_bytes=whole_bytes(method) - 400)}
    plan = {"method": method, "sync_every_steps": 5}
    loaded = loaded_of(scenario_of(star(4, types=types), plan, run={"steps": 12}))
    space = {"methods": (method,), "micro_batches": (1,), "recompute": ("none",), "batch": ("even",)}
    best = searched(loaded, **space)[0].best
    assert {(each.candidate.plan.dp_shard, each.candidate.plan.sync_every_steps) for each in best} == {(2, 5)}
    bounds, workers = Bounds(loaded.scenario), InThisProcess(loaded)
    for each in candidates(loaded.scenario, SearchSpace(**space), Batches(bounds)):
        answer = workers.answer_of(each.plan)
        if isinstance(answer, Result):
            bound = bounds.closer(each.plan, bounds.of(each.plan))
            assert bound.time_s <= answer.step_time_s * (1 + 1e-9)
            assert bound.full_ratio <= fullest(loaded, answer) * (1 + 1e-9)


def whole_bytes(method):
    (held,) = result_of(method, dp_shard=1).ranks
    return int(held.peak_allocated_bytes)


def test_sharded_replicas_of_8_billion_parameters_fit_devices_that_whole_ones_do_not():
    small = ["workload.global_batch_size=32", "plan.micro_batches=1", "plan.recompute=full"]
    whole = ["plan.dp_shard=1", "workload.reduce_precision=bf16"]
    scenario = gssim.load(SCENARIOS / "llama3-8b-diloco.toml", small)
    elements = scenario.workload.model.elements
    result = gssim.simulate(scenario)
    assert result.fits
    held = result.ranks[0].peak_by_category_bytes
    state = 4 * elements / 8  # parameters, two moments, outer parameters and their momentum, each
    assert held["parameters"] == pytest.approx(state, rel=1e-3)
    assert held["optimizer"] == pytest.approx(2 * state, rel=1e-3)
    assert held["outer_parameters"] + held["outer_momentum"] == pytest.approx(2 * state, rel=1e-3)
    assert result.periods.outer_bytes_sent == pytest.approx(3 * elements / 8 * 1028 / 1024, rel=1e-3)
    result = gssim.simulate(gssim.load(SCENARIOS / "llama3-8b-diloco.toml", [*small, *whole]))
    assert not result.fits
    remedy = next(each for each in result.remedies if "dp_shard" in each.change)
    assert (remedy.change, remedy.fits) == ("plan.dp_shard=8", True)
