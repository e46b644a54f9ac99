"""Collectives over gloo that start as soon as another has ended: what they save, and what a queue of them takes.

The oracle of two streams goes collective by collective: each waits on its own, and then for the processor.
"""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import communicated, communication_time_s, loaded_of, scenario_of, star
from tasks import program_with, task_of

from gssim.cluster.cluster import BackendCost
from gssim.collectives import Communication
from gssim.engine import Machine
from gssim.simulation import simulate

OVERHEAD_S, LATENCY_S = 1e-3, 2e-4
SIZE, BYTE_S = 1e5, 1e-9
KINDS = ("broadcast", "all-reduce", "reduce-scatter", "all-gather", "all-gather-v")


def cluster_with(saving_s: float = 0.0, queued_s: float = 0.0, *, ranks: int = 2, backend: str = "gloo"):
    cost = BackendCost(
        overhead_s={"default": OVERHEAD_S},
        processor_byte_s={"default": BYTE_S},
        following_saving_s={"default": saving_s} if saving_s else {},
        queued_s={"default": queued_s} if queued_s else {},
        source="test",
    )
    return star(ranks, bandwidth=1e12, latency_s=LATENCY_S / 2, backend=backend, backend_cost=cost)


def collective(kind: str, ranks: int = 2) -> Communication:
    parts = (SIZE / ranks,) * ranks if kind.endswith("-v") else ()
    return Communication(kind, tuple(range(ranks)), SIZE, part_bytes=parts)


def queue_s(cluster, kind: str, streams: int, count: int) -> float:
    """Return the time until collectives that are posted at once, on streams in turn, have all ended."""
    names = [f"c{i}" for i in range(count)]
    tasks = [
        *(task_of(name, "idle", f"communication {i % streams}", communication=name) for i, name in enumerate(names)),
        task_of("wait", "exposed_communication", after=names),
    ]
    machine = Machine(cluster, program_with([tasks], dict.fromkeys(names, collective(kind)), [{}], roles=(0, 0)))
    machine.run(1)
    return machine.ends_s[0][-1]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_collective_after_another_saves_the_same_and_the_first_nothing(kind, ranks):
    several = [collective(kind, ranks)] * 3
    one_s = communication_time_s(cluster_with(ranks=ranks), several[0])
    for queued_s in (0.0, 1e-4):
        cluster = cluster_with(9e-4, queued_s, ranks=ranks)
        assert communication_time_s(cluster, several[0]) == pytest.approx(one_s, rel=1e-9)
        assert communication_time_s(cluster, *several) == pytest.approx(one_s + 2 * (one_s - 9e-4), rel=1e-9)
        assert communicated(cluster, *several, unfolded=True).env.now == pytest.approx(3 * one_s - 1.8e-3, rel=1e-9)


def test_nothing_is_saved_beyond_the_time_before_the_bytes():
    one_s = communication_time_s(cluster_with(), collective("broadcast"))
    bytes_s = SIZE * BYTE_S
    both_s = communication_time_s(cluster_with(1.0), *[collective("broadcast")] * 2)
    assert both_s == pytest.approx(one_s + bytes_s, rel=1e-9)


@pytest.mark.parametrize("kind", ["all-to-all", "send"])
def test_messages_that_start_pair_by_pair_save_nothing(kind):
    pair = Communication(kind, (0, 1), SIZE)
    one_s, two_s = (communication_time_s(cluster_with(9e-4, 1e-4), *[pair] * count) for count in (1, 2))
    assert two_s == pytest.approx(2 * one_s, rel=1e-9)


def test_over_nccl_nothing_is_saved():
    several = [collective("broadcast")] * 2
    plain, other = cluster_with(backend="nccl"), cluster_with(9e-4, 1e-4, backend="nccl")
    assert communication_time_s(other, *several) == communication_time_s(plain, *several)


@pytest.mark.parametrize(("before_s", "saves"), [(0.0, True), (1e-3, False)])
def test_after_compute_caches_are_cold_again(before_s, saves):
    tasks = [
        task_of("x", "exposed_communication", communication="x"),
        task_of("between", "forward", duration_s=before_s),
        task_of("y", "exposed_communication", communication="y"),
    ]
    exchanges = {"x": collective("broadcast"), "y": collective("broadcast")}
    ends_s = []
    for saving_s in (0.0, 9e-4):
        machine = Machine(cluster_with(saving_s), program_with([tasks], exchanges, [{}], roles=(0, 0)))
        machine.run(1)
        ends_s.append(machine.ends_s[0][-1])
    assert ends_s[0] - ends_s[1] == pytest.approx(9e-4 if saves else 0.0, abs=1e-12)


@given(st.floats(0, 1.3e-3), st.floats(0, 1e-4), st.integers(1, 2), st.integers(1, 12))
def test_a_queue_proceeds_at_the_pace_of_its_waits_or_of_the_processor(saving_s, queued_s, streams, count):
    """Before its bytes, a broadcast between two ranks has its overhead and two latencies, of the notice and its own."""
    before_s, bytes_s = OVERHEAD_S + 2 * LATENCY_S, SIZE * BYTE_S
    ended_s, free_s = [0.0] * streams, 0.0
    for number in range(count):
        stream = number % streams
        follows = number >= streams
        waits_s = max(0.0, before_s - saving_s - queued_s) if follows else before_s
        free_s = max(free_s, ended_s[stream] + waits_s) + bytes_s + (queued_s if follows else 0.0)
        ended_s[stream] = free_s
    found_s = queue_s(cluster_with(saving_s, queued_s), "broadcast", streams, count)
    assert found_s == pytest.approx(max(ended_s), rel=1e-9)


def test_zero1_broadcasts_are_a_queue_and_a_step_without_one_stays_as_it_was():
    def step_s(method: str, saving_s: float) -> float:
        plan = {"method": method, "overlap": False} if method == "ddp" else {"method": method}
        return simulate(loaded_of(scenario_of(cluster_with(saving_s), plan))).result.step_time_s

    zero1 = [step_s("zero1", saving_s) for saving_s in (0.0, 3e-4, 6e-4)]
    assert all(longer > shorter for longer, shorter in pairwise(zero1))
    assert step_s("zero2", 9e-4) == step_s("zero2", 0.0)
