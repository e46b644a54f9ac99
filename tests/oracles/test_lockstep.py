"""Ranks carried out together, as vectors of times, come to what each comes to alone."""

import gc
import json
from itertools import combinations
from pathlib import Path
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import machine_for, star
from tasks import program_with, task_of

from gssim.collectives import Communication
from gssim.engine import DeadlockError, machine, vectorised_walk
from gssim.engine.rendezvous import joins_all_in_turn, joins_in_turn
from gssim.engine.task_groups import TaskShape
from gssim.execution.cache import Shared
from gssim.program import Issue, Task
from gssim.scenario import load_scenario
from gssim.simulation import simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
GPUS = (
    'cluster={{name="gpus", backend="nccl", source="made", device_types={{gpu="a100-sxm-80", old="v100-sxm2-32"}}, '
    'topology={{kind="{kind}", devices=[{{device="gpu", count=4}}, {{device="old", count=4}}], devices_per_host=2, '
    'link={{bandwidth_bytes_per_s="{rate} Gb/s", latency_s="10 us", source="made"}}}}}}'
)


def outcome(changes):
    simulated = simulate(load_scenario(SCENARIOS / "demo.toml", changes))
    return simulated.result.to_json(), set(simulated.spans), simulated.typical.machine


ROUNDING = {"rel": 1e-13, "abs": 1e-15}
"""Tolerance: times of many unequal messages on idle links are simulated for one size, and multiplied."""


def leaves(data):
    for each in data.values() if isinstance(data, dict) else data:
        if isinstance(each, dict | list | tuple):
            yield from leaves(each)
        else:
            yield each


def values_of(result, spans):
    """Every text, count and quantity of an outcome, in order."""
    in_order = sorted(spans, key=lambda span: (*span[:4], round(span.start_s, 9)))
    return [*leaves(json.loads(result)), *leaves(in_order)]


def assert_equal_but_for_rounding(one, other):
    for ours, theirs in zip(values_of(*one[:2]), values_of(*other[:2]), strict=True):
        assert ours == (pytest.approx(theirs, **ROUNDING) if isinstance(theirs, float) else theirs)


CHANGES = [
    (),
    ("plan.publish.threshold=1e-4",),
    ("plan.method=gs_z3", "plan.micro_batches=2"),
    ("plan.method=gs_hier", "plan.shares.shards=compute"),
    ("plan.overlap=false", "plan.push.error_feedback=true", "plan.push.aggregate=received-weight"),
]
KINDS = ["switch", "ring"]
QUICK = (("switch", 3),)
"""Servers of unequal shards; other plans are slow."""


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(kind, changes, marks=[] if (kind, place) in QUICK else [pytest.mark.slow])
        for place, changes in enumerate(CHANGES)
        for kind in KINDS
    ],
)
def test_together_they_do_what_each_does_alone(kind, changes, monkeypatch):
    asked = [GPUS.format(kind=kind, rate=1), "plan.push.threshold=1e-3", *changes]
    together = outcome(asked)
    monkeypatch.setattr(machine, "MIN_CLASSES_VECTORISED", 1000)
    alone = outcome(asked)
    assert together[2].vectorised is not None
    if kind == "switch" and not changes:  # its messages are of many sizes
        assert all(together[2].vectorised.delays_s(name) is not None for name in together[2].instances)
    assert alone[2].vectorised is None
    assert len(alone[2].classes) > 2
    assert_equal_but_for_rounding(together, alone)


SERVERS = (
    'cluster={name="servers", backend="nccl", nccl="hopper", source="made", '
    'device_types={gpu="h100-sxm", old="a100-sxm-80"}, topology={kind="servers", '
    'servers=[{count=2, device="gpu", devices=2, inside="nvswitch", inside_link="nvlink4-h100", nics=1, '
    'nic_link="ib-ndr-400", pcie_link="pcie5x16"}, {count=2, device="old", devices=2, inside="nvswitch", '
    'inside_link="nvlink3-a100", nics=1, nic_link="ib-ndr-400", pcie_link="pcie4x16"}], fabric={kind="switch"}}}'
)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        *(
            pytest.param((each,), marks=pytest.mark.slow)
            for each in ("plan.publish.threshold=1e-4", "plan.overlap=false")
        ),
    ],
)
def test_collectives_inside_nodes_end_ahead_of_the_clock_when_they_would_by_it(changes, monkeypatch):
    monkeypatch.setattr(vectorised_walk, "repeated_step", lambda *_: None)  # which is equal but for rounding
    asked = [SERVERS, "plan.method=gs_hier", "plan.push.threshold=1e-3", *changes]
    ahead = outcome(asked)
    walk = ahead[2].vectorised
    known = {name.op for name in ahead[2].instances if walk.delays_s(name) is not None}
    assert known == {"reduce-scatter", "publish-in-node"}
    monkeypatch.setattr(machine, "MIN_CLASSES_VECTORISED", 1000)
    by_clock = outcome(asked)
    assert by_clock[2].vectorised is None
    assert ahead[:2] == by_clock[:2]
    assert ahead[2].carried_by_rank()[0].tolist() == by_clock[2].carried_by_rank()[0].tolist()


@pytest.mark.parametrize(
    ("changes", "repeats"),
    [
        (("plan.method=gs_hier",), True),  # collectives inside servers that end early begin early in the second step
        pytest.param(("plan.method=gs", "plan.micro_batches=2"), True, marks=pytest.mark.slow),
        # some parameters are still being published when the step ends
        pytest.param(("plan.method=gs", "plan.publish.threshold=1e-4"), False, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_repeats_the_first_is_as_if_it_were_walked(changes, repeats, monkeypatch):
    asked = [SERVERS, "plan.push.threshold=1e-3", *changes]
    repeated = outcome(asked)
    monkeypatch.setattr(vectorised_walk, "repeated_step", lambda *_: None)
    walked = outcome(asked)
    assert repeated[2].vectorised.repeats is repeats
    assert not walked[2].vectorised.repeats
    assert_equal_but_for_rounding(repeated, walked)
    for ours, theirs in zip(repeated[2].carried_by_rank(), walked[2].carried_by_rank(), strict=True):
        assert ours.tolist() == pytest.approx(theirs.tolist())
    assert repeated[2].network.carried.tolist() == pytest.approx(walked[2].network.carried.tolist())


@pytest.mark.parametrize(
    ("tail_s", "repeats"),
    [((0.0, 0.5, 1.0), True), ((1.0, 0.5, 0.0), False)],
    ids=["the last wait", "the last come early"],
)
def test_a_step_is_walked_if_ranks_that_ended_early_let_others_begin_earlier(tail_s, repeats):
    """The rank that works longest before the collective is the latest in the second step only if it ends the latest."""

    def tasks(rank):
        meet = task_of("x", "exposed_communication", communication="x")
        work = task_of("work", "forward", duration_s=1.0 + rank)
        return [work, meet, task_of("tail", "backward", duration_s=tail_s[rank])]

    everyone = {"x": Communication("all-reduce", (0, 1, 2), 1000)}
    found = machine_for(star(3, backend="nccl"), *map(tasks, range(3)), communications=everyone)
    found.run(3)
    assert found.vectorised.repeats is repeats
    first_s, second_s, third_s = (max(ends) for ends in zip(*found.ends_s, strict=True))
    assert third_s - second_s == pytest.approx(second_s - first_s)
    assert second_s - first_s == pytest.approx(first_s - (0.0 if repeats else 1.0))


def test_a_host_that_issues_earlier_in_the_second_step_is_walked():
    """Its rank waits in the collective as in the first step, but what it has issued meanwhile ends earlier."""

    def tasks(rank):
        begin = task_of("begin", "forward", duration_s=1.0 + rank, issue=Issue(0.5, goes_on=False))
        meet = task_of("x", "exposed_communication", communication="x")
        work = task_of("work", "backward", duration_s=0.25, issue=Issue(8.0, goes_on=True))
        return [begin, meet, work, task_of("tail", "backward", duration_s=float(rank))]

    everyone = {"x": Communication("all-reduce", (0, 1, 2), 1000)}
    found = machine_for(star(3, backend="nccl"), *map(tasks, range(3)), communications=everyone)
    found.run(2)
    assert found.vectorised is not None
    assert [ends[0] for ends in found.ends_s] == [8.5, 9.5, 10.5]
    assert [ends[1] for ends in found.ends_s] == pytest.approx([17.0, 19.0, 21.0])


def test_what_has_begun_in_the_instant_in_which_the_first_step_ends_is_counted_once(monkeypatch):
    """Ranks 0 and 1 begin their second step while ranks 2 and 3 still end a collective of no bytes, at that instant."""

    def meet(label, stream="compute"):
        return task_of(label, "exposed_communication", stream, communication=label)

    first = [meet("x"), meet("beside x", "replication")]
    second = [meet("y"), meet("beside y", "replication"), meet("none")]
    sizes = {"x": 1000.0, "beside x": 1000.0, "y": 1000.0, "beside y": 1000.0, "none": 0.0}
    groups = {name: (0, 1) if name in ("x", "beside x") else (2, 3) for name in sizes}
    exchanges = {name: Communication("all-reduce", groups[name], size) for name, size in sizes.items()}

    def outcome():
        program = program_with([first, first, second, second], exchanges, ({} for _ in range(4)))
        found = machine.Machine(star(4, backend="nccl"), program, unfolded=True)
        found.run(3)
        return found.vectorised, found.network.carried.tolist(), found.carried_by_rank(), found.ends_s

    together = outcome()
    monkeypatch.setattr(machine, "MIN_CLASSES_VECTORISED", 1000)
    alone = outcome()
    assert together[0] is not None
    assert alone[0] is None
    assert together[1] == pytest.approx(alone[1])
    assert [each.tolist() for each in together[2]] == [each.tolist() for each in alone[2]]
    assert [list(each) for each in together[3]] == [pytest.approx(each) for each in alone[3]]


@pytest.mark.parametrize(
    ("second_after", "next_after", "in_turn"),
    [(("x",), ("y",), True), ((), ("y",), False), (("x",), (), False)],
    ids=["each waits", "the second overlaps", "the next step's first overlaps"],
)
def test_collectives_of_two_streams_are_in_turn_where_each_waits_for_the_one_before(second_after, next_after, in_turn):
    """Collective x overlaps compute, y is on a third stream: the next step's x starts once its own compute allows."""

    def meet(label, stream, after):
        return task_of(label, "exposed_communication", stream, communication=label, after=after)

    begin = task_of("begin", "forward", duration_s=1.0)
    end = task_of("end", "backward", duration_s=1.0, after=next_after)
    tasks = (begin, meet("x", "communication", ("begin",)), meet("y", "replication", second_after), end)
    shape = TaskShape(tasks)
    names = frozenset(task.communication for task in tasks if task.communication is not None)
    assert joins_in_turn(shape, names) is in_turn
    assert joins_in_turn(shape, names - {tasks[2].communication})
    assert joins_all_in_turn(shape) is in_turn


@given(st.data())
def test_where_all_collectives_are_in_turn_so_are_any_two(data):
    streams = data.draw(st.lists(st.sampled_from(("compute", "communication", "replication")), max_size=7))
    tasks: list[Task] = []
    for place, stream in enumerate(streams):
        labels = data.draw(st.sets(st.sampled_from([f"task {i}" for i in range(len(streams))]), max_size=2))
        joins = data.draw(st.booleans())
        name = f"task {place}"
        tasks.append(task_of(name, "idle", stream, communication=name if joins else None, after=tuple(sorted(labels))))
    shape = TaskShape(tasks)
    names = [task.communication for task in tasks if task.communication is not None]
    if joins_all_in_turn(shape):
        assert all(joins_in_turn(shape, frozenset(pair)) for pair in combinations(names, 2))


def test_hosts_issue_for_unequal_ranks_as_for_each_alone(monkeypatch):
    def tasks(rank):
        """Half of the pieces are issued more slowly than they are computed; unequally so on every rank."""
        issued = (Issue(0.7 * rank, goes_on=False), Issue(1.0, goes_on=True), None, Issue(2.5 - rank, goes_on=True))
        work = [
            task_of(f"work {i}", "forward", duration_s=0.5 + 0.25 * i * rank, issue=each)
            for i, each in enumerate(issued)
        ]
        meet = task_of("x", "exposed_communication", "communication", communication="x", after=("work 1",))
        return [
            *work,
            meet,
            task_of("end", "backward", duration_s=0.125, after=("x",), issue=Issue(rank, goes_on=True)),
        ]

    everyone = {"x": Communication("all-reduce", (0, 1, 2), 1000)}

    def outcome():
        found = machine_for(star(3, backend="nccl"), *map(tasks, range(3)), communications=everyone)
        found.run(2)
        return found.vectorised, [list(each) for each in found.ends_s], set(found.spans)

    together = outcome()
    monkeypatch.setattr(machine, "MIN_CLASSES_VECTORISED", 1000)
    alone = outcome()
    assert together[0] is not None
    assert alone[0] is None
    assert together[1:] == alone[1:]
    assert len({ends[0] for ends in alone[1]}) == 3


def test_who_waits_for_ever_is_told():
    def meet(label, **settings):
        return task_of(label, "exposed_communication", communication=label, **settings)

    everyone = {label: Communication("all-reduce", (0, 1, 2), 1000) for label in "xy"}
    first, second = [meet("x"), meet("y")], [task_of("work", "forward", duration_s=1.0), meet("x"), meet("y")]
    with pytest.raises(DeadlockError) as error:
        machine_for(star(3), first, second, first[::-1], communications=everyone).run(1)
    told = "rank 0 (compute) at 'x', for rank 2; rank 1 (compute) at 'x', for rank 2; rank 2 (compute) at 'y', for rank"
    assert str(error.value) == f"deadlock: {told} 0, 1"


def test_who_waits_for_a_task_of_its_own_that_never_comes_is_told():
    early = task_of("early", "forward", duration_s=1.0, after=("late",))
    late = task_of("late", "exposed_communication", "communication", communication="late", after=("early",))
    alone = {"late": Communication("all-reduce", (0,), 8)}
    lists = [
        [early, late],
        [task_of("a", "forward", duration_s=1.0)],
        [task_of("b", "forward", duration_s=1.0)],
    ]
    with pytest.raises(DeadlockError, match=r"rank 0 \(communication\) at 'late', after 'early'"):
        machine_for(star(3), *lists, communications=alone).run(1)


PIPELINE = [
    "plan.method=pipeline",
    "plan.ranks=4",
    "plan.pp=4",
    "plan.micro_batches=8",
    GPUS.format(kind="switch", rate=100),
]
THRESHOLDED = [GPUS.format(kind="switch", rate=100), "plan.method=gs", "plan.push.threshold=1e-3"]


@pytest.mark.parametrize(
    ("changes", "walk"),
    [(THRESHOLDED, "vectorised"), (PIPELINE, "outline_walk"), (["plan.method=ddp"], None)],
    ids=["vectorised", "outline", "by-task"],
)
def test_a_machine_is_freed_as_soon_as_nobody_needs_it(changes, walk):
    """While points are simulated, the garbage collector, which alone frees reference cycles, is off."""
    shared = Shared()
    loaded = load_scenario(SCENARIOS / "demo.toml", changes, shared=shared)
    gc.disable()
    try:
        simulated = simulate(loaded, shared=shared)
        walks = {name: getattr(simulated.typical.machine, name) for name in ("vectorised", "outline_walk")}
        assert [name for name, each in walks.items() if each is not None] == ([walk] if walk else [])
        freed = [ref(simulated.typical.machine)]
        freed += [ref(each) for each in getattr(walks.pop("outline_walk"), "ranks", ())]
        del simulated, walks
        assert not any([each() for each in freed])
    finally:
        gc.enable()
