"""Lower bounds of a lowered program: each rank's tasks are followed alone, as if all its peers were always ready.

[Note: lowered] Suppose that a rank never waits for its peers, and that its collectives have all links to themselves.
Then it ends its step no later than in reality, as other ranks can only delay or lengthen its tasks. (Tasks of other
streams that precede a wait for the step's compute may have run in the step before.) In the steady state, links carry
during one step as many bytes as a step sends.

[Note: met] Groups of equal ranks, such as those of all tensor slices, carry out a collective at the same time. The
simulation has one instance for them, whose flows share links. To bound such an instance, all instances must be
arranged; that is done only for plans that no other bound rules out.

If only the compute stream allocates memory, the allocated memory is that of its tasks in order, exactly as in a
simulation.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gssim.engine import MEMORY_STEPS, Machine, allocates_beside_compute, memory_after
from gssim.execution.cache import Shared
from gssim.planner.bounds.collectives import CollectiveBounds
from gssim.planner.bounds.compute import chance_of
from gssim.program import Program, Task, TaskId
from gssim.result import WAITING_PHASES
from gssim.scenario import Scenario
from gssim.simulation import outside_bytes


def step_time_s(scenario: Scenario, program: Program, collectives: CollectiveBounds) -> float:
    """Return the least step time; see [Note: lowered]."""
    found = float(collectives.links_s(program.exchanges).max(initial=0.0))
    for role, tasks in enumerate(program.tasks):
        alone_s = _alone_s(program, tasks, program.role_of.index(role), collectives)
        found = max(found, role_time_s(tasks, alone_s))
    return least_chance(scenario) * found


def met_step_time_s(scenario: Scenario, program: Program, collectives: CollectiveBounds, shared: Shared) -> float:
    """Return the least step time if equal groups share one instance and so their links; see [Note: met]."""
    machine = Machine(scenario.cluster, program, conditions=scenario.network, shared=shared)
    alone_s: list[dict[TaskId, float]] = [{} for _ in machine.classes]
    known: dict[tuple[int, int], float] = {}
    for collective, instances in machine.instances.items():
        for number, instance in enumerate(instances):
            key = (id(program.communications[collective]), number)
            if key not in known:
                known[key] = collectives.of_way(instance.schedule).alone_s
            for each in instance.classes:
                alone_s[each.index][collective] = known[key]
                if instance.pairs:  # see [Note: received] in `collectives`
                    own = [stage for (_, target, _), stage in instance.pairs.items() if target == each.index]
                    alone_s[each.index][collective] = collectives.received_s(instance.schedule, own)
    return least_chance(scenario) * max(
        role_time_s(program.tasks[role], own_s) for role, own_s in zip(machine.roles, alone_s, strict=True)
    )


def least_chance(scenario: Scenario) -> float:
    """Return the least random factor on a step's time.

    It also applies to steps that are limited only by links: they may end a little earlier or later than the step
    before.
    """
    return min(chance_of(scenario.cluster.type_of(rank)) for rank in range(scenario.ranks))


def _alone_s(program: Program, tasks: Sequence[Task], rank: int, collectives: CollectiveBounds) -> dict[TaskId, float]:
    """Return the least time of each collective in which a rank takes part."""
    found: dict[TaskId, float] = {}
    known: dict[int, float] = {}  # equal micro-batches share their collectives
    for task in tasks:
        name = task.communication
        if name is not None and name not in found:
            communication = program.communications[name]
            if id(communication) not in known:
                known[id(communication)] = collectives.alone_s(communication, rank)
            found[name] = known[id(communication)]
    return found


def role_time_s(tasks: Sequence[Task], alone_s: Mapping[TaskId, float]) -> float:
    """Return the end of a rank's compute stream if its collectives take the given times.

    >>> work = Task(TaskId("forward"), "forward", duration_s=2.0)
    >>> sum_up = TaskId("all-reduce", bucket=0)
    >>> send = Task(sum_up, "exposed_communication", "communication", communication=sum_up, after=(work.id,))
    >>> beside = Task(TaskId("backward"), "backward", duration_s=1.0)
    >>> end = Task(TaskId("backward-end"), "backward", after=(sum_up,))
    >>> role_time_s([work, send, beside, end], {sum_up: 4.0})
    6.0
    """
    streams: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        streams[task.stream].append(task)
    awaited = {each for task in tasks for each in task.after}
    ends_s: dict[TaskId, float] = {}
    now_s = {name: 0.0 if name == "compute" else -math.inf for name in streams}
    next_of = dict.fromkeys(streams, 0)
    moved = True
    while moved:
        moved = False
        for name, own in streams.items():
            place, end_s = next_of[name], now_s[name]
            while place < len(own):
                task = own[place]
                if task.after:
                    if any(each not in ends_s for each in task.after):
                        break
                    end_s = max(end_s, max(ends_s[each] for each in task.after))
                end_s += task.duration_s if task.communication is None else alone_s[task.communication]
                if task.id in awaited:
                    ends_s[task.id] = end_s
                place += 1
            moved |= place > next_of[name]
            next_of[name], now_s[name] = place, end_s
    return max(0.0, now_s.get("compute", 0.0))


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
            for task in tasks
            if task.stream == "compute" and task.communication is None and task.phase not in WAITING_PHASES
        )
        for tasks in program.tasks
    ]
    chances = [chance_of(scenario.cluster.type_of(rank)) for rank in range(len(program.role_of))]
    return [chance * by_role[role] for chance, role in zip(chances, program.role_of, strict=True)]
