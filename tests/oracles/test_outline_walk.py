"""Pipelines walked chunk by chunk come to exactly what they come to task by task."""

from collections import Counter
from pathlib import Path

import pytest
from strategies import star

from gssim.collectives import Communication
from gssim.engine import Machine, machine
from gssim.engine.outline_walk import OutlineWalk
from gssim.network import Network
from gssim.program import Outline, Program, Task, TaskId, passes
from gssim.program.task import Collectives, Issue, collective_task
from gssim.scenario import load_scenario
from gssim.simulation import simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SERVERS = (
    'cluster={{name="gpus", backend="nccl", source="made", device_types={{gpu="a100-sxm-80", old="v100-sxm2-32"}}, '
    'topology={{kind="servers", servers=[{servers}], fabric={{kind="leaf-spine", servers_per_leaf=1, spines=2}}}}}}'
)
SERVER = '{{count={count}, device="{device}", devices={devices}, inside="nvswitch", inside_link="nvlink3-a100", '
SERVER += 'nics={devices}, nic_link="ib-hdr-200", pcie_link="pcie4x16"}}'
RING = (
    'cluster={name="ring", backend="nccl", source="made", device_types={gpu="a100-sxm-80"}, topology={kind="ring", '
    'devices=[{device="gpu", count=8}], link={bandwidth_bytes_per_s="1 Gb/s", latency_s="10 us", source="made"}}}'
)


def cluster(*servers):
    """Return the setting of a cluster of servers (count, device, devices in each)."""
    texts = [SERVER.format(count=count, device=device, devices=devices) for count, device, devices in servers]
    return SERVERS.format(servers=", ".join(texts))


PAIRS = cluster((4, "gpu", 2))
"""Tensor groups of two have a server of their own, which no other traffic crosses."""
QUADS = cluster((2, "gpu", 4))
"""Two stages share a server, and its switch."""
UNEQUAL = cluster((2, "gpu", 2), (2, "old", 2))


def outcome(changes):
    simulated = simulate(load_scenario(SCENARIOS / "gpt-pipeline.toml", changes))
    return simulated, simulated.result.to_dict(), set(simulated.spans)


def both_ways(changes, monkeypatch):
    """Return what a scenario comes to chunk by chunk, and task by task."""
    chunks = outcome(changes)
    monkeypatch.setattr(machine, "can_walk_outlines", lambda _machine: False)
    tasks = outcome(changes)
    assert chunks[0].typical.machine.outline_walk is not None
    assert tasks[0].typical.machine.outline_walk is None
    program = chunks[0].typical.machine.program
    by_parts = Counter(each for each, count in program.exchanges for _ in range(count))
    assert by_parts == Counter(program.communications.values()), "counted by parts, and one by one"
    return chunks, tasks


def assert_equal(found, expected, path="", *, exactly=True):
    """Compare two results; times by phase are sums in another order."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_equal(found[key], value, f"{path}.{key}", exactly=exactly)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, value in enumerate(expected):
            assert_equal(found[number], value, f"{path}[{number}]", exactly=exactly)
    elif isinstance(expected, float) and (not exactly or any(e in path for e in ("phases_s", "energy", "bytes"))):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-15), path
    else:
        assert found == expected, path


EIGHT = cluster((8, "gpu", 2))
"""Tensor groups of two have a server of their own; of four replicas, only two are at the ends of a ring or a tree."""
NARROW = cluster((16, "gpu", 2)).replace(
    "servers_per_leaf=1, spines=2", "servers_per_leaf=6, spines=1, oversubscription=4"
)
"""Messages of some replicas share a narrow link between leaf switches, those of others have none to cross."""
MANY = ("plan.micro_batches=4", "workload.global_batch_size=16")
THREE = ("plan.method=ddp", "plan.tp=2", "plan.pp=2", "plan.dp_replicate=2", *MANY)
FOUR = (*THREE, "plan.dp_replicate=4", "workload.global_batch_size=32")
TWO = ("plan.method=ddp", "plan.pp=4", "plan.dp_replicate=2", *MANY)

PUSHED = ("plan.method=gs", "plan.pp=4", "plan.dp_shard=2", *MANY)

THRESHOLDED = ("plan.push.threshold=1e-3", 'workload.gradients="gradients/gpt-byte-1m.json"')


def combined(*changes):
    """Return changes, each of which other cases have, as a slow case."""
    return pytest.param(changes, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "changes",
    [
        (PAIRS, *THREE),
        combined(PAIRS, *THREE, "plan.schedule=gpipe", "plan.overlap=false"),
        (PAIRS, *THREE, "plan.schedule=interleaved", "plan.overlap=false", "plan.recompute=selective"),
        combined(PAIRS, *THREE, "plan.method=zero1", "plan.recompute=full"),
        (PAIRS, *THREE, "plan.method=zero1", "plan.zero1_implementation=deepspeed", "plan.overlap=false"),
        (PAIRS, *THREE, "plan.sequence_parallel=true"),
        combined(PAIRS, *THREE, "workload.clip_norm=1.0"),
        combined(PAIRS, *THREE, "plan.method=zero1", "workload.clip_norm=1.0", "plan.sequence_parallel=true"),
        combined(PAIRS, *THREE, "workload.precision=bf16", "workload.reduce_precision=fp32", "plan.overlap=false"),
        (PAIRS, *THREE, "workload.precision=fp16", "workload.loss_scale=dynamic"),
        combined(PAIRS, "plan.tp=2", "plan.pp=4", "plan.micro_batches=8", "workload.global_batch_size=16"),
        combined(QUADS, *THREE),
        combined(QUADS, "plan.tp=2", "plan.pp=4", "plan.micro_batches=8", "workload.global_batch_size=16"),
        combined(RING, *THREE),
        (RING, *TWO),
        (UNEQUAL, *THREE),
        combined(UNEQUAL, *TWO),
        # the first stage ends before the last one, and gathers its parameters meanwhile
        (PAIRS, "plan.method=fsdp", "plan.pp=2", "plan.dp_shard=4", *MANY, "workload.clip_norm=1.0"),
        combined(UNEQUAL, "plan.method=zero2", "plan.pp=4", "plan.dp_shard=2", *MANY, "workload.clip_norm=1.0"),
        (PAIRS, "plan.pp=2", "plan.micro_batches=2", "plan.ranks=2", "workload.global_batch_size=8"),
        (
            PAIRS,
            "plan.method=pipeline",
            "plan.pp=2",
            "plan.ranks=2",
            "plan.schedule=interleaved_zero_bubble",
            "plan.micro_batches=6",
            "workload.global_batch_size=12",
        ),
        (
            PAIRS,
            "plan.method=ddp",
            "plan.pp=4",
            "plan.dp_replicate=2",
            "plan.micro_batches=4",
            "workload.clip_norm=1.0",
        ),
        (
            PAIRS,
            *THREE,
            'network.traffic=[{between=["server0/gpu0", "server1/gpu0"], bytes_per_s="5 GB/s"}]',
        ),
        (EIGHT, *FOUR, "plan.overlap=false"),
        combined(EIGHT, *FOUR, "plan.method=zero1"),
        combined(NARROW, *FOUR, "plan.pp=4", "plan.overlap=false"),
    ],
)
def test_chunk_by_chunk_as_task_by_task(changes, monkeypatch):
    (chunks, result, spans), (tasks, expected, single_spans) = both_ways(changes, monkeypatch)
    vectorised = tasks.typical.machine.vectorised
    repeats = chunks.typical.machine.outline_walk.repeated_s is not None or (vectorised and vectorised.repeats)
    exactly = not repeats  # else steps are multiples of the first
    assert_equal(chunks.typical.ends_s, tasks.typical.ends_s, exactly=exactly)
    assert_equal(result, expected, exactly=exactly)
    assert spans == single_spans


@pytest.mark.parametrize(
    ("changes", "is_repeated"),
    [
        ((), True),
        (("plan.method=zero1",), True),
        (("workload.clip_norm=1.0",), False),  # all update at once; the last stage, which has more, ends last
    ],
    ids=str,
)
def test_a_step_of_which_only_waiting_begins_before_the_latest_end_is_repeated(changes, is_repeated):
    walk = simulate(
        load_scenario(SCENARIOS / "gpt-pipeline.toml", (PAIRS, *THREE, *changes))
    ).typical.machine.outline_walk
    assert (walk.repeated_s is not None) is is_repeated


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ((EIGHT, *FOUR), 2),  # one of each stage
        ((NARROW, *FOUR, "plan.pp=4", "plan.overlap=false"), 16),  # messages of merged classes did not end together
        (
            (
                EIGHT,
                *FOUR,
                "plan.overlap=false",
                'network.traffic=[{between=["server0/gpu0", "server4/gpu0"], bytes_per_s="15 GB/s"}]',
            ),
            12,
        ),
    ],
    ids=["alike", "narrow", "traffic"],
)
def test_classes_that_do_the_same_at_the_same_times_are_walked_as_one(changes, ranks, monkeypatch):
    (chunks, result, spans), (tasks, expected, single_spans) = both_ways(changes, monkeypatch)
    found = chunks.typical.machine
    assert len(found.outline_walk.ranks) == ranks
    assert len(found.classes) == max(ranks, 4)
    assert chunks.typical.ends_s == tasks.typical.ends_s
    assert_equal(result, expected)
    assert spans == single_spans


def unmerged(walk, steps, **_settings):
    return OutlineWalk(walk, steps, merges_classes=False)


@pytest.mark.parametrize(
    ("changes", "classes", "ranks"),
    [
        ((EIGHT, *FOUR), 8, 2),  # one of each stage
        ((EIGHT, *FOUR, "workload.clip_norm=1.0"), 8, 2),  # no step is the same as the first
        ((EIGHT, *FOUR, "plan.schedule=interleaved", "plan.overlap=false"), 8, 2),
        ((UNEQUAL, *TWO), 8, 4),
        (
            (EIGHT, "plan.tp=2", "plan.pp=2", "plan.cp=2", "plan.dp_replicate=2", "workload.global_batch_size=16"),
            8,
            2,
        ),
        ((NARROW, *FOUR, "plan.pp=4"), 16, 16),  # messages of merged classes did not end together
    ],
    ids=["alike", "clipped", "interleaved", "unequal", "sequences", "narrow"],
)
def test_owners_of_different_tensors_are_walked_as_one_until_their_updates(changes, classes, ranks, monkeypatch):
    changes = (*changes, "plan.method=zero1")
    chunks, result, spans = outcome(changes)
    found = chunks.typical.machine
    assert (len(found.classes), len(found.outline_walk.ranks)) == (classes, ranks)
    monkeypatch.setattr(machine, "OutlineWalk", unmerged)
    alone, expected, single_spans = outcome(changes)
    assert len(alone.typical.machine.outline_walk.ranks) == classes
    assert chunks.typical.ends_s == alone.typical.ends_s
    assert result == expected  # times by phase too
    assert spans == single_spans


PAIR = TaskId("all-reduce", layer="pair")
OWN_UPDATE = TaskId("optimizer")
WORK, SUM = TaskId("forward"), TaskId("all-reduce", layer="all")


EVERY = Communication("all-reduce", (0, 1, 2, 3), 8.0)


def of_owner(update_s, *after, host_s=None):
    """Return the tasks of one of two owners among four ranks, whose updates take different times."""
    issue = None if host_s is None else Issue(host_s, goes_on=True)
    return Outline(
        [
            Task(WORK, "forward", duration_s=1.0, issue=None if host_s is None else Issue(0.5, goes_on=False)),
            collective_task(SUM, Communication("all-reduce", (0, 1, 2, 3), 8.0)),
            Task(OWN_UPDATE, "optimizer", duration_s=update_s, issue=issue),
            *after,
        ]
    )


TOGETHER = collective_task(PAIR, Communication("all-reduce", (0, 1), 8.0, beside=((2, 3),)))
APART = collective_task(PAIR, Communication("all-reduce", (0, 2), 8.0, beside=((1, 3),)))
BESIDE = collective_task(
    PAIR, Communication("all-reduce", (0, 1), 8.0, beside=((2, 3),)), "communication", after=(OWN_UPDATE,)
)
LAST = Task(TaskId("parameters", "wait"), "exposed_communication", after=(PAIR,))
SHORT, MORE = (
    Task(TaskId("clip", part=part), "optimizer", duration_s=own_s) for part, own_s in enumerate((1e-6, 0.25))
)


@pytest.mark.parametrize(
    ("after", "host_s", "ranks"),
    [
        ((TOGETHER,), (None, None), 1),
        ((MORE, TOGETHER, MORE), (None, None), 1),
        ((BESIDE, LAST), (None, None), 1),
        ((BESIDE, SHORT, LAST, MORE), (None, None), 1),
        ((BESIDE, MORE, LAST), (None, None), 2),  # the collective ends before the compute beside it
        ((APART,), (None, None), 2),
        ((), (None, None), 2),  # the step ends at different times
        ((TOGETHER, MORE), (4.0, 5.0), 1),
        ((TOGETHER,), (None, 5.0), 2),
    ],
)
def test_tasks_of_different_lengths_have_their_own_times_up_to_a_collective_of_all(after, host_s, ranks, monkeypatch):
    tasks = tuple(
        of_owner(update_s, *after, host_s=issued_s) for update_s, issued_s in zip((2.0, 3.0), host_s, strict=True)
    )
    program = Program(tasks, Collectives(tasks), ({}, {}), roles=(0, 1, 0, 1))
    chunks, alone, by_task = (Machine(star(4, backend="nccl"), program, outlined=each) for each in (True, True, False))
    chunks.run(3)
    monkeypatch.setattr(machine, "OutlineWalk", unmerged)
    alone.run(3)
    by_task.run(3)
    assert len(chunks.outline_walk.ranks) == ranks
    assert chunks.ends_s == alone.ends_s
    assert_equal(chunks.ends_s, by_task.ends_s, exactly=False)  # repeated steps are multiples of the first
    for step in range(3):
        step_ends_s = [[0.0, *ends_s][step : step + 2] for ends_s in chunks.ends_s]
        assert chunks.outline_walk.phases(step_ends_s, step) == alone.outline_walk.phases(step_ends_s, step)


DIVIDED = "plan.sequence_parallel=true"
PARTED = ("plan.method=ddp", "plan.tp=2", "plan.pp=2", "plan.cp=2", *MANY)
"""Ranks with parts of the same sequences are on two servers: they exchange keys over links that messages cross too."""


@pytest.mark.parametrize(
    "changes",
    [
        (PAIRS, *PARTED, "plan.overlap=false"),
        (PAIRS, *PARTED, DIVIDED, "plan.tp_overlap=true", "plan.context_exchange=gather", "plan.recompute=full"),
        (PAIRS, *PARTED, DIVIDED, "plan.method=zero1", "plan.context_exchange=ring"),
        combined(PAIRS, *PARTED, DIVIDED, "plan.tp_overlap=true", "plan.context_exchange=ring"),
        combined(PAIRS, *PARTED, "plan.context_exchange=ring", "plan.context_overlap=false"),
        combined(EIGHT, *PARTED, "plan.dp_replicate=2", "workload.global_batch_size=32", "plan.method=zero1"),
        combined(QUADS, *PARTED, DIVIDED, "plan.context_exchange=ring"),  # taken apart: they share their server
        combined(RING, *PARTED, DIVIDED, "plan.context_exchange=gather"),  # taken apart
    ],
)
def test_chunks_with_exchanges_over_links_that_messages_cross(changes, monkeypatch):
    (_, result, _), (_, expected, _) = both_ways(changes, monkeypatch)
    assert_equal(result, expected, exactly=False)


def test_between_such_exchanges_collectives_of_tensor_groups_are_priced(monkeypatch):
    started = []
    start = OutlineWalk._start

    def listed(walk, joint, streams, start_s):
        started.extend(each.communication for each in joint.instances)
        start(walk, joint, streams, start_s)

    monkeypatch.setattr(OutlineWalk, "_start", listed)
    simulate(load_scenario(SCENARIOS / "gpt-pipeline.toml", (PAIRS, *PARTED, "plan.overlap=false")))
    assert {tuple(each.group) for each in started if each.kind == "all-to-all"} == {(0, 2), (4, 6)}
    assert [each.kind for each in started if tuple(each.group) == (0, 1)] == []


@pytest.mark.parametrize(
    "changes",
    [
        (PAIRS, *THREE, DIVIDED, "plan.gathered_inputs=gathered-again", "plan.recompute=selective"),
        (PAIRS, *THREE, DIVIDED, "plan.tp_overlap=true"),
        combined(PAIRS, *THREE, DIVIDED, "plan.tp_overlap=true", "plan.gathered_inputs=gathered-again"),
        combined(PAIRS, *THREE, DIVIDED, "plan.tp_overlap=true", "plan.schedule=interleaved", "plan.recompute=full"),
        combined(QUADS, *THREE, DIVIDED, "plan.tp_overlap=true"),  # taken apart
        (RING, *THREE, DIVIDED, "plan.tp_overlap=true"),  # taken apart
        (PAIRS, *PUSHED),
        combined(UNEQUAL, *PUSHED),
        combined(PAIRS, *PUSHED, "plan.pp=2", "plan.dp_shard=4", "plan.schedule=interleaved", "plan.recompute=full"),
        (RING, *PUSHED, "plan.recompute=selective", "plan.overlap=false"),
        (PAIRS, *PUSHED, "plan.shares.shards=[0.3, 0.7]"),
        (UNEQUAL, *PUSHED, "plan.pp=2", "plan.dp_shard=4", *THRESHOLDED),
    ],
)
def test_chunks_with_collectives_beside_their_tasks(changes, monkeypatch):
    (_, result, _), (_, expected, _) = both_ways(changes, monkeypatch)
    assert_equal(result, expected, exactly=False)


def test_collectives_that_take_no_time_follow_one_another_however_many_there_are():
    """An all-reduce among one rank ends as it begins: each began the next one inside its own end."""
    alone = Communication("all-reduce", (0,), 8.0)
    tasks = (Outline([collective_task(TaskId("all-reduce", part=part), alone) for part in range(2000)]),)
    found = Machine(star(1, backend="nccl"), Program(tasks, Collectives(tasks), ({},)))
    found.run(2)
    assert found.outline_walk is not None
    assert found.ends_s == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "changes",
    [
        (EIGHT, *FOUR, "plan.overlap=false"),
        (NARROW, *FOUR, "plan.dp_replicate=8", "workload.global_batch_size=64", "plan.overlap=false"),
    ],
    ids=["alike", "narrow"],
)
def test_messages_of_merged_classes_are_carried_as_one_while_nothing_else_crosses_their_links(changes, monkeypatch):
    started: list[object] = []
    start = Network.start_joint
    monkeypatch.setattr(Network, "start_joint", lambda *each, **named: (started.append(each), start(*each, **named)))
    together, result, spans = outcome(changes)
    assert started
    monkeypatch.setattr(Network, "joint", lambda *_: None)
    started.clear()
    apart, expected, single_spans = outcome(changes)
    assert not started
    assert together.typical.ends_s == apart.typical.ends_s
    assert result == expected
    assert spans == single_spans


def test_ranks_of_a_stage_that_differ_in_their_updates_have_one_schedule(monkeypatch):
    changes = (PAIRS, *THREE, "plan.method=zero1", "plan.overlap=false")
    program = simulate(load_scenario(SCENARIOS / "gpt-pipeline.toml", changes)).typical.machine.program
    schedules = {id(tasks.schedule) for tasks in program.tasks}
    assert len(schedules) == 2 < len(program.tasks)
    outline = passes._outline
    monkeypatch.setattr(  # each for itself
        passes,
        "_outline",
        lambda low, rank, _, named, *, chunked: outline(low, rank, passes._Alike(), named, chunked=chunked),
    )
    alone = simulate(load_scenario(SCENARIOS / "gpt-pipeline.toml", changes)).typical.machine.program
    assert len({id(tasks.schedule) for tasks in alone.tasks}) == len(alone.tasks)
    assert [list(tasks) for tasks in program.tasks] == [list(tasks) for tasks in alone.tasks]


def test_roles_with_one_schedule_may_wait_for_different_parts_of_it():
    """Operations of a schedule are written once, but each has a slot only for those that wait for it."""
    first, second = (collective_task(TaskId("all-reduce", layer=name), EVERY, "communication") for name in "ab")
    schedule = (Task(WORK, "forward", duration_s=1.0), first, second)
    tasks = tuple(
        Outline([Task(OWN_UPDATE, "optimizer", duration_s=own_s, after=(each.id,))], schedule=schedule)
        for own_s, each in ((2.0, first), (3.0, second))
    )
    program = Program(tasks, Collectives(tasks), ({}, {}), roles=(0, 1, 0, 1))
    chunks, by_task = (Machine(star(4, backend="nccl"), program, outlined=each) for each in (True, False))
    chunks.run(3)
    by_task.run(3)
    assert_equal(chunks.ends_s, by_task.ends_s, exactly=False)
