"""Laws of a message over gloo: posted, carried and received at once; neither link nor processor is ever outrun."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_runs import HELPERS, SCENARIOS
from strategies import cluster_of, communication_time_s, device_type, loaded_of, scenario_of, star

from gssim import collectives
from gssim.cluster import Curve
from gssim.cluster.cluster import BackendCost
from gssim.collectives import Communication
from gssim.engine import Host, Load
from gssim.network import Clock
from gssim.result import Result
from gssim.scenario import load_scenario
from gssim.simulation import simulate

COST = BackendCost(
    overhead_s={"default": 2e-5},
    posting_s=1e-5,
    posting_byte_s=4e-8,
    processor_byte_s={"default": 5e-8, "send": 1e-7},
    source="assumed",
)
RATES = st.floats(1e3, 1e12)
PUSHED_BYTES = 672
"""Bytes of the tiny model's push: half of it from each of two ranks to the other, and as much back."""


def exchange(size: float, back: float | None = None) -> Communication:
    """Return an exchange of two ranks: `size` from the first, `back` from the second."""
    pairs = ((0.0, size), (size if back is None else back, 0.0))
    return Communication("all-to-all-v", (0, 1), sum(map(sum, pairs)), pair_bytes=pairs)


def exchange_s(rate: float, message: Communication, cost: BackendCost = COST, latency_s: float = 1e-3) -> float:
    return communication_time_s(star(2, bandwidth=rate, latency_s=latency_s / 2, backend_cost=cost), message)


def trained(rate: float, *, cost: BackendCost = COST, **plan: Any) -> Result:
    """Return a step of the tiny model on two ranks behind links of a rate, in bytes per second."""
    cluster = star(2, bandwidth=rate, latency_s=1e-5, backend_cost=cost)
    scenario = scenario_of(cluster, {"method": "gs"} | plan)
    return simulate(loaded_of(scenario)).result


# One message ---------------------------------------------------------------------------------------------------------


@given(RATES, st.floats(1, 1e9), st.floats(0, 1e9))
def test_an_exchange_takes_as_long_as_its_busiest_link_or_the_processors_whichever_is_longer(rate, size, back):
    wire_s, processor_s = max(size, back) / rate, (size + back) * 5e-8
    expected = 2e-5 + 2e-3 + max(wire_s, processor_s)  # a notice, and a message
    assert exchange_s(rate, exchange(size, back)) == pytest.approx(expected, rel=1e-6)


@given(RATES, st.floats(0.01, 1), st.floats(1, 1e9))
def test_a_slower_link_never_makes_an_exchange_faster(rate, ratio, size):
    assert exchange_s(rate * ratio, exchange(size)) >= exchange_s(rate, exchange(size)) * (1 - 1e-9)


@given(st.floats(1, 1e9))
def test_on_slow_links_only_bytes_and_latency_count_on_fast_ones_only_processors(size):
    bare = replace(COST, overhead_s={})
    slow_s, fast_s = (exchange_s(rate, exchange(size), bare) for rate in (1e3, 1e15))
    assert slow_s == pytest.approx(2e-3 + size / 1e3, rel=1e-9)
    assert fast_s == pytest.approx(2e-3 + 2 * size * 5e-8, rel=1e-9)


def test_a_message_one_way_keeps_each_end_busy_with_its_own_side_alone():
    cluster = star(2, bandwidth=1e15, latency_s=0.0, backend_cost=replace(COST, overhead_s={}))
    assert communication_time_s(cluster, Communication("send", (0, 1), 1e6)) == pytest.approx(1e6 * 1e-7)


def test_of_three_ranks_the_one_that_sends_and_receives_most_counts():
    pairs = ((0.0, 3e6, 1e6), (0.0, 0.0, 0.0), (2e6, 0.0, 0.0))
    cluster = star(3, bandwidth=1e15, latency_s=0.0, backend_cost=replace(COST, overhead_s={}))
    message = Communication("all-to-all-v", (0, 1, 2), 6e6, pair_bytes=pairs)
    assert communication_time_s(cluster, message) == pytest.approx(6e6 * 5e-8)


# Posting -------------------------------------------------------------------------------------------------------------


def test_posting_takes_no_more_bytes_than_the_sockets_do():
    limited = star(2, backend_cost=replace(COST, posting_limit_bytes=1e6))
    assert posting_s(limited, 0) == 0
    assert posting_s(limited, 5e5) == pytest.approx(1e-5 + 5e5 * 4e-8)
    assert posting_s(limited, 1e6) == posting_s(limited, 1e9) == pytest.approx(1e-5 + 1e6 * 4e-8)
    assert posting_s(limited, 1e9, 3) == pytest.approx(1e-5 + 3e6 * 4e-8)  # each peer has a socket of its own
    assert posting_s(star(2, backend_cost=COST), 1e9) == pytest.approx(1e-5 + 1e9 * 4e-8)


def test_each_message_more_takes_its_own_time_and_a_slow_device_more_of_it():
    cluster = star(4, backend_cost=replace(COST, posting_message_s=2e-6))
    assert posting_s(cluster, 1.0, 3) == pytest.approx(1e-5 + 2 * 2e-6 + 4e-8)
    slow = {"fast": device_type(posting={"exchange_s": 5e-5, "message_s": 1e-5})}
    cluster = star(4, types=slow, backend_cost=replace(COST, posting_message_s=2e-6))
    assert posting_s(cluster, 1.0, 3) == pytest.approx(5e-5 + 2 * 1e-5 + 4e-8)


def posting_s(cluster, size_bytes, messages=1):
    return collectives.posting_s(cluster, cluster.type_of(0), size_bytes, messages)


def test_what_the_network_carries_while_it_is_posted_is_not_waited_for_again():
    """One bucket that nothing hides: the step grows by the longer of posting and transfer, not by both."""
    free = BackendCost(source="assumed")
    posting = replace(free, posting_byte_s=1e-5)
    base_s = trained(1e15, cost=free).step_time_s
    posted_s = PUSHED_BYTES / 2 * 1e-5  # to the other rank, half of the gradients
    at_half, at_twice = PUSHED_BYTES / 2 / (posted_s / 2), PUSHED_BYTES / 2 / (posted_s * 2)
    publish_s = posted_s / 2, posted_s * 2  # a ring that blocks: the link's time
    for rate, pushed_s, published_s in ((at_half, posted_s, publish_s[0]), (at_twice, 2 * posted_s, publish_s[1])):
        step_s = trained(rate, cost=posting).step_time_s
        assert step_s == pytest.approx(base_s + pushed_s + published_s, rel=1e-2)


def test_where_nothing_overlaps_posting_is_part_of_the_exchange():
    without = replace(COST, posting_s=0.0, posting_byte_s=0.0)
    assert trained(1e6, overlap=False).step_time_s == trained(1e6, cost=without, overlap=False).step_time_s


# Training ------------------------------------------------------------------------------------------------------------

PLANS = [
    {},
    {"overlap": False},
    {"push": {"threshold": 1e-3}},
    {"exchange": "backend"},
    {"publish": {"overlap": True}},
    {"method": "gs_z3"},
    {"method": "zero2"},
    {"method": "pipeline", "pp": 2, "micro_batches": 2},
    {"method": "ddp"},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_slower_link_never_makes_a_step_faster_and_no_link_is_used_beyond_all_of_it(plan):
    results = [trained(rate, **plan) for rate in (1e12, 1e8, 3e6, 1e6, 3e5, 1e5, 3e4, 1e4, 1e3)]
    times = [result.step_time_s for result in results]
    assert all(later >= sooner * (1 - 1e-6) for sooner, later in pairwise(times))
    assert max(link.utilisation_ratio for result in results for link in result.links) <= 1 + 1e-9


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_on_slow_links_a_step_is_the_bytes_of_its_busiest_link(plan):
    result = trained(1.0, **plan)
    if plan.get("exchange") == "backend" or "pp" in plan:  # broadcasts, and messages that wait for each other
        sent = [link.bytes for link in result.links if link.name.startswith("d")]
        assert max(sent) <= result.step_time_s <= 1.02 * sum(sent)
        return
    assert result.step_time_s == pytest.approx(max(link.bytes for link in result.links), rel=0.02)


@pytest.mark.parametrize(
    "method", ["gs", "ddp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gs_z3", "zero2", "zero3"))]
)
def test_the_measured_machine_with_a_thousandth_of_its_link_goes_at_the_links_pace(method):
    fault = 'network.faults=[{between=["device0", "device1"], bandwidth_ratio=0.001}]'
    loaded = load_scenario(SCENARIOS / "demo.toml", [f"plan.method={method}", "run.steps=5", fault])
    result = simulate(loaded).result
    busiest = max(result.links, key=lambda link: link.bytes)
    assert 0.9 < busiest.utilisation_ratio <= 1
    rate = loaded.scenario.cluster.links[0].bandwidth_bytes_per_s / 1000
    assert result.step_time_s >= busiest.bytes / rate


# Beside compute ------------------------------------------------------------------------------------------------------


HALVED = star(1, types={"fast": device_type(communicating_slowdown_ratio=2.0)}).type_of(0)


def computed_s(*busy_shares: float, rates: tuple[float, ...] = (), device=HALVED) -> float:
    """Return what a second of compute takes, slowed to half by communication that keeps its processor busy."""
    env = Clock()
    host = Host(env, 1, {0: 1}, coupled=True)
    for load in (*(Load(share, 0.0) for share in busy_shares), *(Load(1.0, rate) for rate in rates)):
        host.communicate(0, load, +1)
    env.run(until=env.process(each for each in host.compute(0, 1.0, device)))
    return float(env.now)


def test_communication_slows_compute_by_as_much_as_it_keeps_the_processor_busy():
    assert [computed_s(), computed_s(0.0), computed_s(0.25), computed_s(1.0)] == [1.0, 1.0, 1.25, 2.0]
    assert computed_s(0.5, 0.25) == 1.75
    assert computed_s(1.0, 1.0) == 2.0  # no more than all of it


def test_where_it_was_measured_rate_by_rate_the_bytes_decide():
    curve = Curve(sizes=(10.0, 30.0), values=(0.25, 0.5))
    device = replace(HALVED, communicating_excess_ratio=curve)
    assert computed_s(0.5, device=device) == 1.0  # no bytes
    assert [computed_s(rates=(rate,), device=device) for rate in (4.0, 10.0, 20.0)] == [1.1, 1.25, 1.375]
    assert computed_s(rates=(10.0, 10.0), device=device) == 1.375
    assert computed_s(rates=(1e9,), device=device) == 1.5  # beyond what was measured, no more


def test_what_has_ended_slows_nothing():
    env = Clock()
    host = Host(env, 1, {0: 1}, coupled=True)
    for change in (+1, +1, -1, -1):
        host.communicate(0, Load(0.3, 1.0), change)
    env.run(until=env.process(each for each in host.compute(0, 1.0, HALVED)))
    assert env.now == 1.0


def test_a_transfer_over_a_slow_link_hardly_slows_the_compute_that_hides_it():
    """The processors' part of it is the same whatever the link, so the slow-down nearly is, while all is hidden."""
    kind = device_type(communicating_slowdown_ratio=1.5)
    cost = replace(COST, overhead_s={}, posting_s=0.0, posting_byte_s=0.0)
    added = []
    for rate in (1e7, 1e6):
        cluster = star(2, bandwidth=rate, latency_s=0.0, types={"fast": kind}, backend_cost=cost)
        plain = star(2, bandwidth=rate, latency_s=0.0, backend_cost=cost)
        plan = {"method": "gs", "first_bucket_bytes": 80, "bucket_bytes": 80}
        slowed, alone = (simulate(loaded_of(scenario_of(each, plan))).result for each in (cluster, plain))
        added.append(slowed.phases_s["backward"] - alone.phases_s["backward"])
    assert 0 < added[0] <= added[1] <= 1.5 * added[0]  # where it lasts longer, more of it is beside compute


# Calibration ---------------------------------------------------------------------------------------------------------


def measured_lines(ranks: int) -> Any:
    """Return made-up lines for every kind that is measured."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.calibrate.communication import Line, shapes

    kinds = sorted(shapes(ranks))
    return {kind: Line(1e-3 + 2e-4 * i, 1e-9 + 3e-10 * i) for i, kind in enumerate(kinds)}


def as_measured(kind: str, ranks: int, size: float) -> Communication:
    """Return the collective that a benchmark carries out on all ranks."""
    if kind == "send":
        return Communication(kind, (0, 1), size)
    if kind.startswith("all-to-all"):  # to the next rank
        pairs = tuple(tuple(size if j == (i + 1) % ranks else 0.0 for j in range(ranks)) for i in range(ranks))
        return Communication("all-to-all-v", range(ranks), ranks * size, pair_bytes=pairs, carried_as=kind)
    parts = (size / ranks,) * ranks if kind.endswith("-v") else ()
    kind, _, half_precision = kind.partition(" ")
    return Communication(kind, range(ranks), size, part_bytes=parts, half_precision=half_precision)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_was_measured_is_what_is_predicted_of_the_same_collectives(ranks):
    lines = measured_lines(ranks)
    from gsreal.calibrate.communication import costs_of

    costs = costs_of(lines, ranks)
    link = {"bandwidth": costs.pop("bandwidth_bytes_per_s"), "latency_s": costs.pop("latency_s")}
    pairs = [(f"d{i}", f"d{j}") for i in range(ranks) for j in range(i)]
    cluster = cluster_of(pairs, devices=ranks, backend_cost=BackendCost(**costs, source="test"), **link)
    for kind, line in lines.items():
        hides = ranks > 2 and kind.split()[0] in (
            "all-reduce",
            "reduce-scatter",
            "all-gather",
        )  # latencies
        for size in (1e-3 * ranks, 1e6 * ranks)[: 1 if hides else 2]:
            predicted_s = communication_time_s(cluster, as_measured(kind, ranks, size))
            assert predicted_s == pytest.approx(line.fixed_s + line.byte_s * size, rel=1e-6), kind


@pytest.mark.parametrize(
    ("in_turn_s", "queued_s", "saving_s", "occupied_s"),
    [
        (5e-4 + 8 * 1e-4, 5e-4 + 16 * 4e-5, 4e-4, 4e-5 - 4.096e-6),
        (5e-4 + 8 * 1e-4, None, 4e-4, None),
        (5e-4 + 8 * 1e-4, 5e-4 + 16 * 2e-4, 4e-4, 1e-4),  # occupied for longer than it takes: noise
        (5e-4 + 8 * 6e-4, 4e-4, 0.0, 0.0),  # longer than after compute, or nothing in a queue: noise
    ],
)
def test_sequences_and_queues_of_collectives_say_what_one_saves_that_follows(in_turn_s, queued_s, saving_s, occupied_s):
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.calibrate.communication import FollowingTimes, Line, following_of

    found = following_of({"broadcast": FollowingTimes(5e-4, in_turn_s, queued_s)}, {"broadcast": Line(5e-4, 1e-9)})
    assert found["following_saving_s"]["broadcast"] == pytest.approx(saving_s)
    assert found["queued_s"].get("broadcast") == (None if occupied_s is None else pytest.approx(occupied_s))


@pytest.mark.real
@pytest.mark.slow
def test_a_calibration_of_messages_says_all_that_a_cluster_file_needs(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.calibrate.communication import OVERFLOWING_BYTES, POSTED_BYTES, shapes
    from gsreal.run.launch import launch

    out = tmp_path / "found.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(p for p in (str(HELPERS), os.environ.get("PYTHONPATH")) if p))
        launch("posting_ranks", [str(out)], ranks=2)
    found = json.loads(out.read_text(encoding="utf-8"))
    (small_bytes, small_s), (large_bytes, large_s) = found.pop("all_reduces")
    assert (small_bytes, large_bytes) == (2**10, 2**20)
    assert 0 < small_s < large_s
    rate, latency_s = found.pop("bandwidth_bytes_per_s"), found.pop("latency_s")
    cost = BackendCost(**found, source="test")
    assert set(cost.processor_byte_s) == {*shapes(2), "default"}
    assert set(cost.overhead_s) == set(shapes(2))
    assert min(cost.processor_byte_s.values()) > 0 < latency_s
    assert set(cost.following_saving_s) == set(shapes(2)) - {"send", "all-to-all", "all-reduce bf16", "all-reduce fp16"}
    assert set(cost.queued_s) == {"broadcast", "all-reduce", "reduce-scatter", "all-gather", "all-to-all-v"}
    assert cost.posting_s > 0 < cost.posting_byte_s
    assert POSTED_BYTES[-1] <= (cost.posting_limit_bytes or 0.0) <= OVERFLOWING_BYTES
    assert all(
        1 / rate <= shape.handled / shape.carried * cost.processor_byte_s[kind] * (1 + 1e-9)
        for kind, shape in shapes(2).items()
    )  # no kind outran the link
