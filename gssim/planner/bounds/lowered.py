"""Lower bounds of a lowered program: each rank's tasks are followed alone, as if all its peers were always ready.

[Note: lowered] Suppose that a rank never waits for its peers, and that its collectives have all links to themselves.
Then it ends its step no later than in reality, as other ranks can only delay or lengthen its tasks. (Tasks of other
streams that precede a wait for the step's compute may have run in the step before.) In the steady state, links carry
during one step as many bytes as a step sends.

[Note: shared links] Groups of equal ranks, such as those of all tensor slices, carry out a collective at the same time.
The simulation has one instance for them, whose flows share links. To bound such an instance, all instances must be
arranged; that is done only for plans that no other bound rules out.

[Note: followed] The step of a pipeline's first stage lasts until the last gradient has come back through all others.
So the messages of such a rank's pipeline are followed through the tasks of all of its ranks. Nothing is known of when
the others began their steps: they may have done any of their tasks before, until they receive a message of this step.

If only the compute stream allocates memory, the allocated memory is that of its tasks in order, exactly as in a
simulation.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.engine import MEMORY_STEPS, Machine, allocates_beside_compute, memory_after
from gssim.execution.cache import Shared
from gssim.planner.bounds.collectives import CollectiveBounds
from gssim.planner.bounds.compute import least_jitter_ratio, least_step_jitter_ratio
from gssim.program import (
    Chunk,
    MessageName,
    Name,
    Part,
    Posted,
    Program,
    Task,
    TaskId,
    name_of,
    parts_of,
    template_tasks,
)
from gssim.result import WAITING_PHASES
from gssim.scenario import Scenario
from gssim.simulation import outside_bytes

Alone = Callable[[int, Communication], float]
"""Least seconds that a collective takes for the ranks of a role, once all of its members have arrived."""


def step_time_s(scenario: Scenario, program: Program, collectives: CollectiveBounds) -> float:
    """Return the least step time; see [Note: lowered] and [Note: followed]."""

    def alone_s(role: int, communication: Communication) -> float:
        return collectives.alone_s(communication, program.role_of.index(role))

    links_s = float(collectives.links_s(program.exchanges).max(initial=0.0))
    return least_step_jitter_ratio(_devices(scenario)) * max(links_s, _longest_step_s(scenario, program, alone_s))


def step_time_on_shared_links_s(
    scenario: Scenario, program: Program, collectives: CollectiveBounds, shared: Shared
) -> float:
    """Return the least step time if equal groups share one instance and so their links; see [Note: shared links].

    It is 0 if no collective takes longer for that: then `step_time_s` is as close.
    """
    machine = Machine(scenario.cluster, program, conditions=scenario.network, shared=shared)
    known: dict[int, float] = {}

    def of_roles(communication: Communication) -> dict[int, float]:
        found: dict[int, float] = {}
        for instance in machine.arranged.of(communication):
            if id(instance) not in known:
                known[id(instance)] = collectives.of_way(instance.schedule).alone_s
            for each in instance.classes:
                alone_s, role = known[id(instance)], machine.roles[each.index]
                if instance.pairs:  # see [Note: received] in `collectives`
                    own = [stage for (_, target, _), stage in instance.pairs.items() if target == each.index]
                    alone_s = collectives.received_s(instance.schedule, own)
                found[role] = min(alone_s, found.get(role, math.inf))
        return found

    alone = {id(each): of_roles(each) for each, _ in program.exchanges}
    """By `id` of the collective, and role."""

    def alone_s(role: int, communication: Communication) -> float:
        if id(communication) not in alone:
            alone[id(communication)] = of_roles(communication)
        return alone[id(communication)][role]

    def is_longer(communication: Communication) -> bool:
        times_s = alone[id(communication)].items()
        return any(s > collectives.alone_s(communication, program.role_of.index(role)) for role, s in times_s)

    if not any(is_longer(each) for each, _ in program.exchanges):
        return 0.0
    return least_step_jitter_ratio(_devices(scenario)) * _longest_step_s(scenario, program, alone_s)


def _devices(scenario: Scenario) -> list[DeviceType]:
    return [scenario.cluster.type_of(rank) for rank in range(scenario.ranks)]


NO_NUMBER = -1


class _Operation(NamedTuple):
    """A task, or several in a row."""

    number: int
    """Number of the last task among the rank's; `NO_NUMBER`: none waits for it."""
    duration_s: float
    after: Sequence[int] = ()
    """Numbers of the operations that must end first."""
    message: TaskId | MessageName | None = None
    """The message between two ranks that it sends or receives."""
    sends: bool = False


Streams = Mapping[str, Sequence[_Operation]]
"""The operations of each stream of a role."""


class _Row(NamedTuple):
    """An operation whose duration is not known yet; the other fields are the operation's."""

    number: int
    work: Sequence["Work"]
    after: Sequence[int] = ()
    message: TaskId | MessageName | None = None
    sends: bool = False


Rows = Mapping[str, Sequence[_Row]]
"""The rows of each stream of a role, or of a template."""
Work = float | Communication | Rows
"""What a part of a row does: a task of so many seconds, a collective, or all of a template."""


def _longest_step_s(scenario: Scenario, program: Program, alone_s: Alone) -> float:
    """Return the least time that the step of some role takes."""
    roles = [_operations(rows, partial(alone_s, role), {}) for role, rows in enumerate(program.once(_rows_of_roles))]
    mesh = scenario.policies.mesh
    first_ranks = [rank for rank in range(mesh.ranks) if mesh.place(rank).pp == 0] if mesh.pp > 1 else []
    pipelines = {tuple(program.role_of[each] for each in mesh.group(rank, "pp")) for rank in first_ranks}
    others = set(range(len(roles))) - {first for first, *_ in pipelines}
    return max(_step_of_first_s([roles[each] for each in several]) for several in (*pipelines, *zip(others)))


def _operations(rows: Rows, alone_s: Callable[[Communication], float], known: dict[int, float]) -> Streams:
    """Return rows as operations; `known`: seconds of collectives and templates by `id`, as micro-batches share them."""

    def time_s(work: Work) -> float:
        if isinstance(work, (float, int)):
            return work
        if id(work) not in known:
            known[id(work)] = (
                alone_s(work)
                if isinstance(work, Communication)
                else _step_of_first_s([_operations(work, alone_s, known)])
            )
        return known[id(work)]

    return {
        stream: [
            _Operation(number, sum(map(time_s, work)), after, message, sends)
            for number, work, after, message, sends in several
        ]
        for stream, several in rows.items()
    }


def _rows_of_roles(program: Program) -> list[Rows]:
    """Return the rows of every role of a program; the same whatever its collectives take."""
    exchanges: dict[TaskId | MessageName, Communication] = {}
    return [_rows(tasks, exchanges) for tasks in program.tasks]


def _rows(tasks: Sequence[Task], exchanges: dict[TaskId | MessageName, Communication]) -> Rows:
    """Return the rows of a role's tasks; each template is followed once, and tasks in a row between which nothing else
    matters are one row.

    `exchanges`: the collectives of the tasks of earlier roles, to which those of this role are added.
    """
    streams: dict[str, list[_Row]] = defaultdict(list)
    templates: dict[int, Rows] = {}
    parts = parts_of(tasks)
    numbers = _awaited(parts)
    ends = set(numbers.values())
    latest: dict[str, list[Work]] = {}
    """By stream: its latest tasks, which belong to no row yet."""
    for number, part in enumerate(parts):
        after: Sequence[int] = ()
        message, sends = None, False
        work: Work
        if isinstance(part, Chunk):
            stream, template = "compute", part.template
            if id(template) not in templates:
                templates[id(template)] = _rows(template.tasks, exchanges)
            work = templates[id(template)]
        else:
            stream, work, name = part.stream, part.duration_s, part.communication
            sends = isinstance(part, Posted) and part.route.sends
            if name is not None and part.exchange is not None:
                work = exchange = exchanges.setdefault(name, part.exchange)
                message = name if exchange.kind == "send" else None
                sends = sends or (isinstance(part, Task) and part.id.action == "send")
            # tasks inside chunks have no number; only the bound is less tight if one waits for these
            after = [numbers[each] for each in part.after if each in numbers] if part.after else ()
        before = latest.pop(stream, [])
        if after or message is not None:
            streams[stream] += [
                *([_Row(NO_NUMBER, before)] if before else []),
                _Row(number, [work], after, message, sends),
            ]
        elif number in ends:
            streams[stream].append(_Row(number, [*before, work]))
        else:
            before.append(work)
            latest[stream] = before
    for stream, before in latest.items():
        streams[stream].append(_Row(NO_NUMBER, before))
    return streams


def _awaited(parts: Sequence[Part]) -> dict[Name, int]:
    """Return the numbers of the parts for which others wait, or for whose last task."""
    waiting = [part.after for part in parts if not isinstance(part, Chunk) and part.after]
    awaited: set[Name] = set(chain.from_iterable(waiting))
    numbers: dict[Name, int] = {}
    for number, part in enumerate(parts if awaited else ()):
        if (name := name_of(part)) in awaited:
            numbers[name] = number
        if isinstance(part, Chunk) and part.last in awaited:
            numbers[part.last] = number
    return numbers


def _step_of_first_s(ranks: Sequence[Streams]) -> float:
    """Return the least time from the beginning of the first rank's step to the end of its compute stream.

    Messages between these ranks are followed; see [Note: followed].

    >>> work, sent = _Operation(0, 2.0), TaskId("gradient", stage=1)
    >>> _step_of_first_s([{"compute": [work, _Operation(2, 1.0, [1])], "communication": [_Operation(1, 4.0, [0])]}])
    7.0
    >>> receives = {"compute": [work, _Operation(2, 1.0, [1])], "receive": [_Operation(1, 4.0, [0], sent)]}
    >>> _step_of_first_s([receives, {"compute": [_Operation(0, 9.0, (), sent, sends=True)]}])
    7.0
    """
    followed = {each.message for streams in ranks for several in streams.values() for each in several if each.sends}
    sent_s: dict[TaskId | MessageName, float] = {}
    progress = [
        _Progress(operations, ends_s, -math.inf if place or name != "compute" else 0.0)
        for place, streams in enumerate(ranks)
        for ends_s in [dict[int, float]()]
        for name, operations in streams.items()
    ]
    moved = True
    while moved:
        moved = False
        for stream in progress:
            operations, ends_s, place, now_s = stream.operations, stream.ends_s, stream.place, stream.now_s
            while place < len(operations):
                number, duration_s, after, message, sends = operations[place]
                try:
                    for each in after:
                        now_s = max(now_s, ends_s[each])
                except KeyError:  # it has not ended yet
                    break
                if message is not None:
                    if sends:
                        sent_s[message] = now_s
                    elif message in followed:
                        if message not in sent_s:
                            break
                        now_s = max(now_s, sent_s[message])
                now_s = ends_s[number] = now_s + duration_s
                place += 1
            moved |= place > stream.place
            stream.place, stream.now_s = place, now_s
    own = ranks[0].get("compute")
    return max([0.0, *(stream.now_s for stream in progress if stream.operations is own)])


@dataclass(eq=False, slots=True)
class _Progress:
    """How far a rank's stream has come."""

    operations: Sequence[_Operation]
    ends_s: dict[int, float]
    """Ends of the rank's operations."""
    now_s: float
    place: int = 0


def peaks(program: Program) -> list[tuple[int, Mapping[str, float]]] | None:
    """Return the first rank of each role and its memory peak by category, if peaks do not depend on timing.

    That is so if only compute streams allocate and free memory; if others do, None.
    """
    roles = range(len(program.tasks))
    if any(program.once(allocates_beside_compute, role) for role in roles):
        return None
    return [(program.role_of.index(role), program.once(memory_after, role, MEMORY_STEPS).peak) for role in roles]


def full_ratio(scenario: Scenario, program: Program, peak_of: Sequence[tuple[int, Mapping[str, float]]]) -> float:
    """Return a lower bound of the fraction of memory used on the fullest device, from allocated memory and memory
    outside the allocator.
    """
    found = 0.0
    for rank, peak in peak_of:
        device = scenario.cluster.type_of(rank)
        outside = outside_bytes(device, scenario, program, rank)
        found = max(found, (sum(peak.values()) + sum(outside.values())) / device.memory_bytes)
    return found


def busy_s(scenario: Scenario, program: Program) -> list[float]:
    """Return the least compute time of each rank, without what it does for communication: it counts as waiting."""
    by_role = [
        sum(
            task.duration_s
            for task in template_tasks(tasks)
            if task.stream == "compute" and task.communication is None and task.phase not in WAITING_PHASES
        )
        for tasks in program.tasks
    ]
    chances = [least_jitter_ratio(scenario.cluster.type_of(rank)) for rank in range(len(program.role_of))]
    return [chance * by_role[role] for chance, role in zip(chances, program.role_of, strict=True)]
