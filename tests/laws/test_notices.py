"""Notices of receives: no byte of a message over gloo leaves before its sender knows that a receive is posted.

The oracle goes message by message: one leaves when it is posted, the notice of its receive has come, and the link is
free.
"""

import math
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cluster_of, communicated, communication_time_s, device_type, loaded_of, scenario_of, star
from tasks import other, program_with, task_of

from gssim.cluster.cluster import BackendCost
from gssim.collectives import Communication
from gssim.collectives.algorithms import SEGMENT_BYTES
from gssim.engine import Machine
from gssim.program import Task
from gssim.simulation import simulate

RANKS = st.integers(2, 8)
LATENCIES = st.floats(1e-5, 1e-1)
RATES = st.floats(1e6, 1e9)


def took_s(kind: str, ranks: int, size: float, rate: float, latency_s: float, *, carried_as: str = "") -> float:
    """Return what a collective takes around a switch, `latency_s` from rank to rank."""
    group = (0, 1) if kind == "send" else tuple(range(ranks))
    cluster = star(ranks, bandwidth=rate, latency_s=latency_s / 2)
    return communication_time_s(cluster, Communication(kind, group, size, carried_as=carried_as))


def ring_s(messages: int, transfer_s: float, latency_s: float, *, under_way: int, ahead: bool = False) -> float:
    """Return when the last of a ring's messages has come; all ranks do the same, each to the next.

    A message is posted, and its receive is, when the one `under_way` before it has come: `ahead`, its receive was
    posted one earlier still.
    """
    come_s: list[float] = []
    for i in range(messages):
        posted_s = come_s[i - under_way] if i >= under_way else 0.0
        receive_s = (come_s[i - under_way - 1] if i > under_way else 0.0) if ahead else posted_s
        left_s = max(posted_s, receive_s + latency_s, come_s[-1] - latency_s if come_s else 0.0)
        come_s.append(left_s + latency_s + transfer_s)
    return come_s[-1]


# One message ---------------------------------------------------------------------------------------------------------


@given(st.floats(1, 1e8), RATES, LATENCIES)
def test_a_message_for_which_both_ends_come_at_once_takes_two_latencies_and_nccls_takes_one(size, rate, latency_s):
    assert took_s("send", 2, size, rate, latency_s) == pytest.approx(2 * latency_s + size / rate, rel=1e-9)
    nccl = star(2, bandwidth=rate, latency_s=latency_s / 2, backend="nccl")
    assert communication_time_s(nccl, Communication("send", (0, 1), size)) == pytest.approx(latency_s + size / rate)


@given(st.floats(0, 1e-1))
def test_what_a_message_takes_beside_its_path_is_taken_by_its_notice_too(message_s):
    cost = BackendCost(message_s=message_s, source="assumed")
    cluster = star(2, bandwidth=1e6, latency_s=1e-3, backend_cost=cost)
    simulated_s = communication_time_s(cluster, Communication("send", (0, 1), 1e3))
    assert simulated_s == pytest.approx(2 * (2e-3 + message_s) + 1e-3, rel=1e-9)


@given(st.floats(0, 1), st.floats(0, 1), RATES, LATENCIES)
def test_a_message_comes_a_latency_after_both_its_send_and_the_notice_of_its_receive(sent_s, posted_s, rate, latency_s):
    cluster = star(2, bandwidth=rate, latency_s=latency_s / 2)
    roles = tuple(
        (
            task_of("compute", "forward", duration_s=until_s),
            task_of("x", "exposed_communication", communication="x"),
        )
        for until_s in (sent_s, posted_s)
    )
    message = {"x": Communication("send", (0, 1), 1e5)}
    machine = Machine(cluster, program_with(roles, message, ({}, {}), roles=(0, 1)))
    machine.run(1)
    expected_s = max(sent_s, posted_s + latency_s) + latency_s + 1e5 / rate
    assert machine.env.now == pytest.approx(expected_s, rel=1e-6)


def test_a_stage_that_waits_for_the_one_before_has_posted_its_receive():
    steps_s = []
    for latency_s in (0.0, 0.02):
        cluster = star(2, bandwidth=1e15, latency_s=latency_s / 2)
        plan = {"method": "pipeline", "pp": 2, "micro_batches": 1}
        steps_s.append(simulate(loaded_of(scenario_of(cluster, plan, optimizer="sgd"))).result.step_time_s)
    assert steps_s[1] - steps_s[0] == pytest.approx(2 * 0.02, rel=1e-6)  # an activation, and its gradient


@given(st.floats(0, 0.5), st.booleans(), RATES, LATENCIES)
def test_a_notice_goes_behind_the_bytes_of_a_message_that_has_left_before_it(late_s, sends_first, rate, latency_s):
    """Rank 0 hands a message over and waits for one; rank 1 comes later, and hands over the same in either order.

    Where its own goes first, rank 0's receive is known there, and its bytes leave, before it posts its receive: its
    notice follows them. Measured in the lab: a step of a pipeline of two ranks over 100 Mbit/s, whose sends and
    receives torch posts together, took 344 ms; messages that pass each other would make it 270.
    """
    size, late_s = 1e5, late_s + 2 * latency_s
    cluster = star(2, bandwidth=rate, latency_s=latency_s / 2)

    def tasks(rank: int) -> tuple[Task, ...]:
        posted = [task_of(f"{n}", "idle", stream=n, communication=n, after=("begin",)) for n in ("up", "down")]
        order = posted if rank == 0 or not sends_first else posted[::-1]
        begin = task_of("begin", "forward", duration_s=late_s * rank)
        # what is handed over second is so a moment later, as posting takes time
        second = replace(order[1], after=(other("between"),))
        return begin, order[0], task_of("between", "forward", duration_s=1e-7), second

    messages = {"up": Communication("send", (0, 1), size), "down": Communication("send", (1, 0), size)}
    machine = Machine(cluster, program_with((tasks(0), tasks(1)), messages, ({}, {}), roles=(0, 1)))
    machine.run(1)
    transfer_s = latency_s + size / rate
    one_by_one_s, passing_s = late_s + 2 * transfer_s, late_s + latency_s + transfer_s
    assert machine.env.now == pytest.approx(one_by_one_s if sends_first else passing_s, rel=1e-3)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_gloo_reduces_two_buckets_at_once(backend):
    """Measured in the lab: two all-reduces of 1.2 and 2.4 MB between two ranks, 10 ms apart at 100 Mbit/s, took 330 ms
    at once, and 139 and 235 alone.
    """
    latency_s = 100.0
    cluster = star(2, bandwidth=1e15, latency_s=latency_s / 2, backend=backend)
    plan = {"method": "ddp", "bucket_bytes": 1}
    result = simulate(loaded_of(scenario_of(cluster, plan, optimizer="sgd"))).result
    buckets = sum(each.count for each in result.collectives)
    one_s = communication_time_s(cluster, Communication("all-reduce", (0, 1), 4.0))
    rounds = math.ceil(buckets / 2) if backend == "gloo" else buckets
    assert buckets > 2
    assert result.phases_s["exposed_communication"] == pytest.approx(rounds * one_s, rel=1e-2)


# Collectives ---------------------------------------------------------------------------------------------------------


@given(RANKS, st.floats(1e3, 1e8), RATES, LATENCIES)
def test_the_halves_of_gloos_all_gather_hide_each_others_latencies(ranks, size, rate, latency_s):
    messages = 2 * (ranks - 1)
    expected_s = ring_s(messages, size / ranks / 2 / rate, latency_s, under_way=2)
    assert took_s("all-gather", ranks, size, rate, latency_s) == pytest.approx(expected_s, rel=1e-6)


@given(st.integers(3, 8), st.floats(1e3, 1e8), RATES, LATENCIES)
def test_gloos_all_reduce_goes_round_twice_in_segments_two_of_which_are_under_way(ranks, size, rate, latency_s):
    segments = max(2, math.ceil(size / ranks / SEGMENT_BYTES))
    if (ranks - 1) * segments % 2:
        return  # the last message is no pair's
    transfer_s = size / ranks / segments / rate
    expected_s = 2 * ring_s((ranks - 1) * segments, transfer_s, latency_s, under_way=2)
    assert took_s("all-reduce", ranks, size, rate, latency_s) == pytest.approx(expected_s, rel=1e-6)
    assert took_s("reduce-scatter", ranks, size, rate, latency_s) == pytest.approx(expected_s, rel=1e-6)


def test_between_two_ranks_notices_wait_behind_segments_that_go_the_other_way():
    """Measured in the lab: 100 Mbit/s, 20 ms one way, 8 MiB: 852 ms, of which the bytes take 671."""
    rate, latency_s = 100e6 / 8, 20e-3
    small_s, large_s = (took_s("all-reduce", 2, mib * 2**20, rate, latency_s) for mib in (4, 8))
    assert small_s == pytest.approx(4 * latency_s + 4 * 2**20 / rate, rel=1e-6)
    assert large_s == pytest.approx(8 * latency_s + 8 * 2**20 / rate, rel=1e-6)
    assert large_s == pytest.approx(0.852, rel=0.03)


@given(RANKS, st.floats(1e3, 1e6), RATES, LATENCIES)
def test_rings_of_messages_post_their_receives_ahead(ranks, size, rate, latency_s):
    transfer_s = size / ranks / rate
    expected_s = ring_s(ranks - 1, transfer_s, latency_s, under_way=1, ahead=True)
    assert expected_s == pytest.approx(ranks * latency_s + (ranks - 1) * transfer_s)
    for kind in ("all-gather", "reduce-scatter"):
        assert took_s(kind, ranks, size, rate, latency_s, carried_as=f"{kind}-v") == pytest.approx(expected_s, rel=1e-6)


@given(RANKS, RATES, LATENCIES)
def test_parts_of_unequal_sizes_do_as_well(ranks, rate, latency_s):
    parts = (3e5, *(1e3 * i for i in range(1, ranks)))
    cluster = star(ranks, bandwidth=rate, latency_s=latency_s / 2)
    gathered = Communication("all-gather-v", tuple(range(ranks)), sum(parts), part_bytes=parts)
    expected_s = ranks * latency_s + (ranks - 1) * 3e5 / rate
    assert communication_time_s(cluster, gathered) == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize(("ranks", "sizes", "latencies"), [(2, 1, 2), (3, 2, 2), (4, 3, 3), (8, 6, 4)])
def test_gloos_broadcast_sends_to_all_children_at_once_and_they_have_posted_long_before(ranks, sizes, latencies):
    """Measured with four ranks: three times the bytes over the root's link, not two."""
    simulated_s = took_s("broadcast", ranks, 1e6, 1e6, 1e-2)
    assert simulated_s == pytest.approx(sizes + latencies * 1e-2, rel=1e-9)


# Laws ----------------------------------------------------------------------------------------------------------------

KINDS = st.sampled_from(["all-reduce", "all-gather", "reduce-scatter", "broadcast", "send"])


@given(KINDS, RANKS, st.floats(1, 1e8), RATES, st.floats(0.01, 1), LATENCIES, st.floats(1, 10))
def test_a_slower_or_a_later_link_is_never_faster(kind, ranks, size, rate, ratio, latency_s, later):
    base_s = took_s(kind, ranks, size, rate, latency_s) * (1 - 1e-9)
    assert took_s(kind, ranks, size, rate * ratio, latency_s) >= base_s
    assert took_s(kind, ranks, size, rate, latency_s * later) >= base_s


@pytest.mark.parametrize("method", ["ddp", "zero2", "gs"])
def test_ranks_that_come_late_to_a_collective_find_no_notice_of_their_own_receive(method):
    """Every rank both sends and receives: the last one's receive is posted when it comes."""
    slow = device_type(peak_flop_per_s={"fp32": 5e8})
    cluster = star(2, types={"fast": device_type(), "slow": slow}, type_names=["fast", "slow"], latency_s=1e-2)
    near = replace(cluster, links=tuple(replace(link, latency_s=0.0) for link in cluster.links))
    plan = {"method": method, "overlap": False}
    late_s, base_s = (simulate(loaded_of(scenario_of(each, plan))).result.step_time_s for each in (cluster, near))
    waits = (late_s - base_s) / 2e-2
    assert waits == pytest.approx(round(waits), rel=1e-6)
    assert round(waits) % 2 == 0
    assert round(waits) >= 4


# All pairs ------------------------------------------------------------------------------------------------------------


@given(st.data(), RATES, LATENCIES)
def test_messages_of_an_all_to_all_begin_pair_by_pair_and_a_later_rank_sends_before_its_notice(data, rate, latency_s):
    """Every pair has a link of its own. A rank sends to those after it, nearest first, and receives from those before.

    Where the later rank of a pair finds the other's notice, and its send precedes its receive, the other's message
    follows its own, with the notice. A rank leaves with the last that it receives.
    """
    ranks = data.draw(st.integers(2, 5))
    pairs = list(permutations(range(ranks), 2))
    sizes = {pair: data.draw(st.sampled_from([1e3, 1e5, 3e6])) for pair in pairs}
    there_s = [data.draw(st.sampled_from([0.0, 0.003, 0.02, 1.0])) * (1 + rank / 8) for rank in range(ranks)]
    wires = [(f"d{a}", f"d{b}") for a, b in pairs if a < b]
    cluster = cluster_of(wires, devices=ranks, bandwidth=rate, latency_s=latency_s)
    matrix = [[sizes.get((source, target), 0.0) for target in range(ranks)] for source in range(ranks)]
    exchange = Communication(
        "all-to-all-v", tuple(range(ranks)), sum(sizes.values()), pair_bytes=matrix, carried_as="all-to-all"
    )
    tasks = [
        (task_of("begin", "forward", duration_s=at_s), task_of("x", "exposed_communication", communication="x"))
        for at_s in there_s
    ]
    machine = Machine(cluster, program_with(tasks, {"x": exchange}, [{}] * ranks, roles=tuple(range(ranks))))
    machine.run(1)

    def received_s(source: int, target: int) -> float:
        takes_s = latency_s + sizes[source, target] / rate
        notice_is_there = there_s[target] >= there_s[source] + latency_s
        if notice_is_there and (source - target) % ranks <= (target - source) % ranks:
            return received_s(target, source) + takes_s
        return max(there_s[source], there_s[target] + latency_s) + takes_s

    for rank in range(ranks):
        last_s = max(received_s(other, rank) for other in range(ranks) if other != rank)
        assert machine.ends_s[rank] == [pytest.approx(last_s, rel=1e-6)], rank


def test_an_all_to_all_of_ranks_that_come_one_after_another_takes_both_ways_in_turn():
    """Measured in the lab, two ranks at 100 Mbit/s, 515 and 271 kB: 62 ms, not the 41 of both ways at once."""
    sizes, rate, late_s = (271_000.0, 515_000.0), 12.5e6, 6e-3
    cluster = star(2, bandwidth=rate, latency_s=1e-4)
    exchange = Communication(
        "all-to-all-v", (0, 1), sum(sizes), pair_bytes=[[0.0, sizes[0]], [sizes[1], 0.0]], carried_as="all-to-all"
    )
    for late in (0, 1):
        tasks = [
            (
                task_of("begin", "forward", duration_s=late_s if rank == late else 0.0),
                task_of("x", "exposed_communication", communication="x"),
            )
            for rank in range(2)
        ]
        machine = Machine(cluster, program_with(tasks, {"x": exchange}, [{}, {}], roles=(0, 1)))
        machine.run(1)
        ends_s = [ends[0] - late_s for ends in machine.ends_s]
        assert ends_s[late] == pytest.approx(sum(sizes) / rate, rel=0.02)
        assert ends_s[1 - late] == pytest.approx(sizes[late] / rate, rel=0.02)


@given(st.floats(1e3, 1e7), st.floats(1e-10, 1e-7), LATENCIES)
def test_ranks_handle_the_bytes_of_an_all_to_all_once_they_have_come(size, byte_s, latency_s):
    """Latencies hid the processors' time where ranks were simulated apart, and not where they were taken together."""
    cost = BackendCost(processor_byte_s={"default": byte_s}, source="test")
    cluster = star(2, bandwidth=1e15, latency_s=latency_s / 2, backend_cost=cost)
    exchange = Communication("all-to-all", (0, 1), 2 * size)
    for unfolded in (False, True):  # each rank sends and receives `size` bytes
        machine = communicated(cluster, exchange, unfolded=unfolded)
        assert machine.env.now == pytest.approx(2 * latency_s + 2 * size * byte_s, rel=1e-5), unfolded
