"""Laws of periodic synchronization: local SGD, DiLoCo and SparseLoCo by closed forms, and what they refuse."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from strategies import built, device_type, loaded_of, scenario_of, star, tiny_model, topology

from analysis.compare.comparison import PERIODIC_COLUMNS, compare, join
from analysis.compare.table import ResultFile
from analysis.compare.timeline import read_step
from analysis.study.rows import sent_bytes
from gssim.errors import UserError
from gssim.result import chrome_trace
from gssim.simulation import record_steady_step, simulate

BANDWIDTH = 1e5
METHODS = ("local_sgd", "diloco")


def simulated(method, *, cluster=None, run=None, precision="fp32", unfolded=False, **plan):
    scenario = scenario_of(
        cluster or star(2, bandwidth=BANDWIDTH),
        {"method": method} | plan,
        precision=precision,
        run={"steps": 12} | (run or {}),
    )
    return simulate(loaded_of(scenario), unfolded=unfolded)


def result_of(method, **settings):
    return simulated(method, **settings).result


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_mean_step_carries_an_all_reduce_of_the_parameters_over_the_steps_of_a_period(method, every):
    ddp, result = result_of("ddp"), result_of(method, sync_every_steps=every)
    assert result.ranks[0].bytes_sent == pytest.approx(ddp.ranks[0].bytes_sent / every)
    assert result.periods.outer_bytes_sent == pytest.approx(ddp.ranks[0].bytes_sent)
    assert result.periods.outer_bytes == 4 * tiny_model().elements
    carried = {link.name: link.bytes for link in ddp.links}
    assert {link.name: every * link.bytes for link in result.links} == pytest.approx(carried)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_outer_step_is_an_inner_one_and_a_ring_over_the_links(method, ranks):
    """If the network takes all the time, each link carries 2 (n - 1) / n of the bytes."""
    bandwidth, size = 10.0, 4 * tiny_model().elements
    result = result_of(method, cluster=star(ranks, bandwidth=bandwidth), sync_every_steps=3)
    ring_s = 2 * (ranks - 1) / ranks * size / bandwidth
    periods = result.periods
    assert periods.outer_step_time_s - periods.inner_step_time_s == pytest.approx(ring_s, rel=1e-2)
    assert result.step_time_s == pytest.approx((2 * periods.inner_step_time_s + periods.outer_step_time_s) / 3)
    assert sum(result.phases_s.values()) == pytest.approx(result.step_time_s)
    for each in result.ranks:
        assert sum(each.phases_s.values()) == pytest.approx(result.step_time_s)


@pytest.mark.parametrize("ranks", [2, 4])
def test_8_bit_changes_are_gathered_from_all_ranks(ranks):
    """Each rank sends its integers, in whole blocks of 1024, and a scale of 4 bytes a block, to all others."""
    blocks = -(-tiny_model().elements // 1024)
    result = result_of("diloco", cluster=star(ranks, bandwidth=BANDWIDTH), outer={"precision": "int8"})
    assert result.periods.outer_bytes == ranks * blocks * (1024 + 4)
    assert result.periods.outer_bytes_sent == pytest.approx((ranks - 1) * blocks * (1024 + 4))
    plain = result_of("diloco", cluster=star(ranks, bandwidth=BANDWIDTH))
    assert result.scenario_id != plain.scenario_id
    kept = plain.ranks[0].peak_by_category_bytes
    assert result.ranks[0].peak_by_category_bytes["outer_momentum"] == kept["outer_momentum"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("precision", "chunk_bytes"), [("int2", 2 * 6 + 2 + 8), ("fp32", 2 * 6 + 4 * 6)])
def test_the_largest_changes_of_every_chunk_are_gathered_from_all_ranks(ranks, precision, chunk_bytes):
    """Six entries of each 10: an index of 16 bits, and 2 bits (and two fp32 magnitudes a chunk) or an fp32 value."""
    chunks = -(-tiny_model().elements // 10)
    options = {"chunk_elements": 10, "chunk_entries": 6, "precision": precision}
    cluster = star(ranks, bandwidth=BANDWIDTH)
    result = result_of("sparse_loco", cluster=cluster, sparse_outer=options)
    message = 8 * math.ceil(chunks * chunk_bytes / 8)
    assert result.periods.outer_bytes == ranks * message
    assert result.periods.outer_bytes_sent == pytest.approx((ranks - 1) * message)
    assert {entry.kind for entry in result.collectives} == {"all-gather"}


def test_what_is_not_sent_takes_whole_chunks_of_memory():
    held = result_of("sparse_loco").ranks[0].peak_by_category_bytes
    assert held["outer_parameters"] == 4 * tiny_model().elements
    assert held["residuals"] == 4 * 4096 * math.ceil(tiny_model().elements / 4096)
    assert "outer_momentum" not in held


def test_more_entries_take_longer():
    times_s = [
        result_of("sparse_loco", sparse_outer={"chunk_elements": 64, "chunk_entries": entries}).step_time_s
        for entries in (1, 8, 64)
    ]
    assert times_s == sorted(set(times_s))


@pytest.mark.parametrize("method", METHODS)
def test_an_inner_step_is_one_device_on_its_samples(method):
    alone = simulate(loaded_of(scenario_of(star(1), {"method": "single"}, global_batch_size=4))).result
    assert result_of(method).periods.inner_step_time_s == pytest.approx(alone.step_time_s)


def test_the_outer_optimizer_keeps_two_copies_of_the_parameters():
    local, diloco = (result_of(method).ranks[0].peak_by_category_bytes for method in METHODS)
    size = 4 * tiny_model().elements
    assert {name: diloco[name] for name in diloco if name not in local} == {
        "outer_parameters": size,
        "outer_momentum": size,
    }


@pytest.mark.parametrize(
    ("per_host", "more"),
    [(2, {}), (1, {"lab": {"cpu_share_ratio": 0.5, "cores": 1}})],
    ids=["devices-of-a-host", "devices-of-a-core"],
)
def test_an_outer_step_beside_neighbours_is_as_long_after_any_number_of_inner_ones(per_host, more):
    """Inner steps, whose time has what neighbours add to it, were slowed down once more before an outer one."""
    slow = {"fast": device_type(neighbour_slowdown_ratio=1.5, **more)}
    cluster = built(topology("switch", count=2, devices_per_host=per_host, bandwidth=1e12), types=slow)
    short, long = (result_of("local_sgd", cluster=cluster, sync_every_steps=every).periods for every in (2, 9))
    assert long.inner_step_time_s == pytest.approx(short.inner_step_time_s)
    assert long.outer_step_time_s == pytest.approx(short.outer_step_time_s)
    assert long.outer_step_time_s == pytest.approx(long.inner_step_time_s, rel=1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_of_unequal_batches_wait_for_each_other_once_a_period(method):
    shares = {"shares": {"batch": [0.75, 0.25]}, "sync_every_steps": 4}
    cluster = star(2, bandwidth=1e12)
    result = result_of(method, cluster=cluster, **shares)
    slow = simulate(loaded_of(scenario_of(star(1), {"method": "single"}, global_batch_size=6))).result.step_time_s
    fast = simulate(loaded_of(scenario_of(star(1), {"method": "single"}, global_batch_size=2))).result.step_time_s
    assert result.periods.inner_step_time_s == pytest.approx((slow + fast) / 2)
    assert result.step_time_s == pytest.approx(slow, rel=0.05)
    waits = {rank: each.phases_s["exposed_communication"] for each in result.ranks for rank in each.ranks}
    assert waits[1] - waits[0] == pytest.approx(slow - fast, rel=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_a_slow_step_lengthens_its_own_period_alone(method):
    """Rank 0 is twice as slow in one step: the others wait for it in the outer step of that period."""
    slow = {"slowdowns": [{"rank": 0, "first_step": 5, "steps": 1, "compute_ratio": 2}], "warmup_steps": 0}
    cluster = star(2, bandwidth=1e12)
    plain = result_of(method, cluster=cluster, sync_every_steps=4)
    result = result_of(method, cluster=cluster, sync_every_steps=4, run=slow)
    inner_s, outer_s = plain.periods.inner_step_time_s, plain.periods.outer_step_time_s
    expected = [outer_s if (step + 1) % 4 == 0 else inner_s for step in range(12)]
    expected[5] += inner_s / 2  # the mean of both ranks
    expected[7] += inner_s / 2  # the other rank's wait
    assert result.step_times_s == pytest.approx(expected, rel=1e-6)
    assert result.step_time_s == pytest.approx(plain.step_time_s)


@pytest.mark.parametrize("method", METHODS)
def test_a_trace_shows_an_inner_and_an_outer_step(method):
    spans = record_steady_step(simulated(method, sync_every_steps=4)).spans
    labels = [span.label for span in spans if span.rank == 0]
    assert labels[0] == "inner steps 2"
    assert sum("(inner step)" in label for label in labels) > 1
    assert "outer step bucket 0" in labels
    forwards = [label for label in labels if label.startswith("forward")]
    assert 2 * sum("(inner step)" in label for label in forwards) == len(forwards)


@pytest.mark.parametrize(
    "slowdowns", [(), ({"rank": 1, "first_step": 6, "compute_ratio": 3.0},)], ids=["equal", "slow"]
)
@pytest.mark.parametrize("method", [*METHODS, "streaming_diloco", "ddp"])
def test_a_step_that_is_read_from_a_trace_is_as_long_as_what_the_trace_shows(tmp_path, method, slowdowns):
    periods = {} if method == "ddp" else {"sync_every_steps": 4}
    found = simulated(method, run={"slowdowns": slowdowns}, **periods)
    step = record_steady_step(found)
    (tmp_path / "trace.json").write_text(chrome_trace(step, found.result))
    read = read_step(tmp_path / "trace.json")
    assert read.time_s == pytest.approx(max(end_s for _, end_s in step.bounds_s.values()), rel=1e-5)
    assert max(block.end_s for lane in read.lanes for block in lane.blocks) == pytest.approx(read.time_s, rel=1e-3)


@pytest.mark.parametrize(
    "plan",
    [
        *({"method": method} for method in ("ddp", "zero1", "zero2", "zero3", "gs")),
        *({"method": method, "sync_every_steps": 4} for method in ("local_sgd", "streaming_diloco", "sparse_loco")),
        *({"method": "diloco", "sync_every_steps": every, "dp_shard": 2} for every in (1, 3)),
        {"method": "streaming_diloco", "sync_every_steps": 4, "dp_shard": 2},
    ],
    ids=lambda plan: "-".join(map(str, plan.values())),
)
def test_bytes_that_a_study_counts_from_calls_are_those_that_links_carry_in_a_mean_step(plan):
    found = simulated(plan["method"], cluster=star(4), **{key: each for key, each in plan.items() if key != "method"})
    carried_bytes = sum(each.count * each.bytes_sent for each in found.result.ranks) / 4
    assert sent_bytes(found.result) == pytest.approx(carried_bytes)


REFUSED = {
    "sync_every_steps = 4: method 'ddp' synchronizes in every step": {"method": "ddp", "sync_every_steps": 4},
    "plan.outer: method 'local_sgd' has no such outer optimizer": {"method": "local_sgd", "outer": {"momentum": 0.5}},
    "plan.outer: method 'sparse_loco' has no such": {"method": "sparse_loco", "outer": {"momentum": 0.5}},
    "plan.sparse_outer: method 'diloco' has no such": {"method": "diloco", "sparse_outer": {"decay": 0.5}},
    "chunk_entries = 64: a chunk has 8 elements": {"method": "sparse_loco", "sparse_outer": {"chunk_elements": 8}},
    "plan.tp = 2: method 'diloco' rounds changes": {"method": "diloco", "tp": 2, "outer": {"precision": "int8"}},
    "plan.tp = 2: method 'sparse_loco' rounds changes": {"method": "sparse_loco", "tp": 2},
    "plan.cp = 2: cannot run yet": {"method": "diloco", "cp": 2},
    "plan.pp = 2: cannot run yet": {"method": "diloco", "pp": 2},
    "run.steps = 12: fewer than the 13 steps": {"method": "diloco", "sync_every_steps": 13},
    "do not meet in every step": {"method": "local_sgd", "shares": {"replan": True}},
    "pushes no gradients": {"method": "local_sgd", "push": {"threshold": 1e-3}},
    "has no samples": {"method": "local_sgd", "shares": {"batch": [1.0, 0.0]}},
    "'periodic' with local_sgd, diloco": {"method": "ddp", "gradients": "periodic"},
    "no buckets are all-reduced": {"method": "diloco", "compress": "bf16"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_combined_is_refused_in_a_line(reason):
    with pytest.raises(UserError) as error:
        result_of(**REFUSED[reason])
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_the_length_of_a_period_and_the_outer_optimizer_are_part_of_the_question():
    ids = {
        scenario_of(star(2), {"method": method} | plan, run={"steps": 12}).scenario_id
        for method in METHODS
        for plan in ({}, {"sync_every_steps": 8}, {"sync_every_steps": 4})
    }
    assert len(ids) == 4  # 8 is the default
    momentum = scenario_of(star(2), {"method": "diloco", "outer": {"momentum": 0.5}}, run={"steps": 12}).scenario_id
    assert momentum not in ids
    assert math.isfinite(result_of("diloco", outer={"momentum": 0.5}).step_time_s)


def test_inner_steps_are_compared_with_inner_ones_and_outer_with_outer():
    predicted = result_of("diloco", sync_every_steps=4)
    periods = predicted.periods
    slower = replace(
        periods,
        inner_step_time_s=2 * periods.inner_step_time_s,
        outer_step_time_s=4 * periods.outer_step_time_s,
    )
    measured = replace(predicted, source="measured", periods=slower)
    files = [ResultFile(Path(f"{i}.json"), i, each) for i, each in enumerate((predicted, measured))]
    row = compare(join(files).pairs).row(0, named=True)
    assert row["inner_step_error_ratio"] == pytest.approx(-0.5)
    assert row["outer_step_error_ratio"] == pytest.approx(-0.75)
    others = [replace(file, result=replace(file.result, periods=None)) for file in files]
    assert not set(PERIODIC_COLUMNS) & set(compare(join(others).pairs).columns)


def test_steps_that_begin_an_exchange_are_compared_with_such():
    predicted = result_of("streaming_diloco", sync_every_steps=8, streaming={"fragments": 2, "delay_steps": 2})
    periods = predicted.periods
    measured = replace(
        predicted, source="measured", periods=replace(periods, begin_step_time_s=2 * periods.begin_step_time_s)
    )
    files = [ResultFile(Path(f"{i}.json"), i, each) for i, each in enumerate((predicted, measured))]
    row = compare(join(files).pairs).row(0, named=True)
    assert row["begin_step_error_ratio"] == pytest.approx(-0.5)
    assert row["outer_step_error_ratio"] == pytest.approx(0.0)


def test_a_result_without_periods_says_nothing_of_them():
    assert "periods" not in result_of("ddp").to_dict()
    assert result_of("diloco").to_dict()["periods"]["every_steps"] == 8
