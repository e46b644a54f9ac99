"""What no run of a lowered program can be better than: followed rank by rank, as if all others were always there.

[Note: lowered] A rank that never waits for its peers, and whose collectives have all links to themselves, ends its step
no later than it really does: whatever others do, tasks only begin later and take longer. What other streams do before
they wait for the step's compute may have been done in the step before. In the steady state links carry as much in the
time of a step as a step sends.

[Note: met] Groups whose ranks are alike, such as those of every slice, carry out a collective at the same time: the
simulation has them meet as one, and their flows share links. What they then take at least all together is known once it
is arranged who meets whom, which is done for what nothing else rules out.

What is allocated is what tasks of the compute stream hold, one after another, where no other stream holds any: exactly
what a simulation finds.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gssim.cache import Shared
from gssim.engine import Machine, MemoryTracker
from gssim.planner.bounds.collectives import Collectives
from gssim.planner.bounds.compute import chance_of
from gssim.program import Program, Task
from gssim.scenario import Scenario
from gssim.simulation import outside_bytes

STEPS = 2
"""That are added up of memory: what the first leaves is there in the second."""


def step_time_s(scenario: Scenario, program: Program, collectives: Collectives) -> float:
    """Return what a step takes at least; see [Note: lowered]."""
    found = float(collectives.links_s(program.communications.values()).max(initial=0.0))
    for role, tasks in enumerate(program.tasks):
        alone_s = _alone_s(program, tasks, program.role_of.index(role), collectives)
        found = max(found, role_time_s(tasks, alone_s))
    return least_chance(scenario) * found


def met_step_time_s(scenario: Scenario, program: Program, collectives: Collectives, shared: Shared) -> float:
    """Return what a step takes at least, where groups that are alike meet as one; see [Note: met]."""
    machine = Machine(scenario.cluster, program, conditions=scenario.network, shared=shared)
    alone_s: list[dict[str, float]] = [{} for _ in machine.classes]
    known: dict[tuple[int, int], float] = {}
    for label, meetings in machine.instances.items():
        for number, meeting in enumerate(meetings):
            key = (id(program.communications[label]), number)
            if key not in known:
                known[key] = collectives.of_way(meeting.schedule).alone_s
            for each in meeting.classes:
                alone_s[each.index][label] = known[key]
    return least_chance(scenario) * max(
        role_time_s(program.tasks[role], own_s) for role, own_s in zip(machine.roles, alone_s, strict=True)
    )


def least_chance(scenario: Scenario) -> float:
    """Return the least factor by which chance changes what a step takes.

    Also of steps that only links hold up: they end a little earlier or later than the one before.
    """
    return min(chance_of(scenario.cluster.type_of(rank)) for rank in range(scenario.ranks))


def _alone_s(program: Program, tasks: Sequence[Task], rank: int, collectives: Collectives) -> dict[str, float]:
    """Return how long each collective of a rank takes at least."""
    found: dict[str, float] = {}
    known: dict[int, float] = {}  # equal micro-batches share their collectives
    for task in tasks:
        name = task.communication
        if name is not None and name not in found:
            communication = program.communications[name]
            if id(communication) not in known:
                known[id(communication)] = collectives.alone_s(communication, rank)
            found[name] = known[id(communication)]
    return found


def role_time_s(tasks: Sequence[Task], alone_s: Mapping[str, float]) -> float:
    """Return when a rank's compute stream is through, where collectives take so long.

    >>> work = Task("a", "forward", duration_s=2.0)
    >>> send = Task("s", "exposed_communication", "communication", communication="c", after=("a",))
    >>> beside, end = Task("b", "backward", duration_s=1.0), Task("e", "backward", after=("s",))
    >>> role_time_s([work, send, beside, end], {"c": 4.0})
    6.0
    """
    streams: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        streams[task.stream].append(task)
    awaited = {label for task in tasks for label in task.after}
    ends_s: dict[str, float] = {}
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
                    if any(label not in ends_s for label in task.after):
                        break
                    end_s = max(end_s, max(ends_s[label] for label in task.after))
                end_s += task.duration_s if task.communication is None else alone_s[task.communication]
                if task.label in awaited:
                    ends_s[task.label] = end_s
                place += 1
            moved |= place > next_of[name]
            next_of[name], now_s[name] = place, end_s
    return max(0.0, now_s.get("compute", 0.0))


def peaks(program: Program) -> list[tuple[int, Mapping[str, float]]] | None:
    """Return the first rank of each role and the most that it holds, by category, where that hangs on no clock.

    That is where its compute stream alone takes and gives back memory; None where others do as well.
    """
    found: list[tuple[int, Mapping[str, float]]] = []
    for role, tasks in enumerate(program.tasks):
        if any(task.need.peak or task.need.kept for task in tasks if task.stream != "compute"):
            return None
        own = [task for task in tasks if task.stream == "compute"]
        memory = MemoryTracker(dict(program.persistent[role])).after_tasks(own * STEPS)
        found.append((program.role_of.index(role), memory.peak))
    return found


def full_ratio(scenario: Scenario, program: Program, peak_of: Sequence[tuple[int, Mapping[str, float]]]) -> float:
    """Return how full the fullest device is at least, by what is allocated and what is outside of the allocator."""
    found = 0.0
    for rank, peak in peak_of:
        device = scenario.cluster.type_of(rank)
        outside = outside_bytes(device, scenario, program, rank)
        found = max(found, (sum(peak.values()) + sum(outside.values())) / device.memory_bytes)
    return found


def busy_s(scenario: Scenario, program: Program) -> list[float]:
    """Return how long each rank computes at least."""
    by_role = [
        sum(task.duration_s for task in tasks if task.stream == "compute" and task.communication is None)
        for tasks in program.tasks
    ]
    chances = [chance_of(scenario.cluster.type_of(rank)) for rank in range(len(program.role_of))]
    return [chance * by_role[role] for chance, role in zip(chances, program.role_of, strict=True)]
