"""The fast path of one rank: between collectives, streams compute their own times, without a SimPy event per task.

[Note: fast path] Between two collectives, no other rank changes when a rank's tasks end. This holds if devices of a
host do not slow each other down, and if nothing varies randomly or after pauses. A rank's streams then do not wait for
the clock after each task, but keep a time of their own. They synchronise with the clock where they meet other ranks: a
collective is joined at its exact time. A task on which other streams of the rank depend reports its end as soon as that
is known. Memory is added up in the order of the compute stream, which must be the only stream that allocates.
"""

from collections.abc import Generator
from typing import Any

from gssim.engine.memory_tracker import RecordingTracker, allocates_beside_compute, memory_after
from gssim.engine.rendezvous import RunningCollectives
from gssim.engine.state import MachineState, StreamTask
from gssim.engine.symmetry import is_jittery
from gssim.program import Program, distinct_tasks


def can_run_ahead(machine: MachineState, index: int) -> bool:
    """Return whether a class's streams can use the fast path; see [Note: fast path]."""
    beside = machine.program.once(allocates_beside_compute, machine.roles[index])
    return is_independent(machine, index) and not beside


def is_independent(machine: MachineState, index: int) -> bool:
    """Return whether nothing outside a class affects its task times between two collectives."""
    if machine.hosts[machine.classes[index].host].coupled or is_jittery(machine.devices[index]):
        return False
    if isinstance(machine.memory[index], RecordingTracker):  # logs memory by the simulated clock
        return False
    return not machine.program.once(_is_slowed_by_pauses, machine.roles[index])


def are_independent(machine: MachineState) -> bool:
    """Return whether `is_independent` holds for all classes; each device type and role is looked at once."""
    jittery = any(is_jittery(device) for device in {id(device): device for device in machine.devices}.values())
    if machine.is_coupled or jittery or any(isinstance(memory, RecordingTracker) for memory in machine.memory):
        return False
    return not machine.program.once(_are_slowed_by_pauses)


def _are_slowed_by_pauses(program: Program) -> bool:
    return any(_is_slowed_by_pauses(program, role) for role in range(len(program.tasks)))


def _is_slowed_by_pauses(program: Program, role: int) -> bool:
    return any(task.after_pauses for task in distinct_tasks(program.tasks[role]))


def run_ahead(
    machine: MachineState, running: RunningCollectives, index: int, stream: str, steps: int
) -> Generator[Any, Any, None]:
    """Execute a stream's tasks on a clock of its own, ahead of the simulated clock; see [Note: fast path]."""
    tasks, env, now_s = machine.tasks_of(index, stream), machine.env, machine.env.now
    for step in range(steps):
        for each in tasks:
            task = each.task
            if each.after:
                now_s = yield from _dependencies_end(machine, index, stream, step, each, now_s)
            began_s, now_s = now_s, now_s + task.duration_s
            if task.issue is not None:
                now_s = max(now_s, machine.issued_s(index, task.issue, began_s))
            if task.communication is not None:
                yield from machine.until(began_s)
                yield from running.join(index, stream, step, task)
                now_s = env.now
            if now_s > began_s:
                machine.record_span(index, task, began_s, now_s)
            machine.finish(index, step, each, now_s)
        if stream == "compute":
            machine.ends_s[index].append(now_s)
    if stream == "compute":  # memory is added up in task order, whenever the tasks end
        machine.memory[index] = machine.program.once(memory_after, machine.roles[index], steps)
    yield from machine.until(now_s)


def _dependencies_end(
    machine: MachineState, index: int, stream: str, step: int, task: StreamTask, now_s: float
) -> Generator[Any, Any, float]:
    """Wait until the ends of the dependencies on other streams are known; return the earliest time to start."""
    events = [machine.finished[index, step, each] for each in task.after]
    yield from machine.ends_of(index, stream, step, task)
    ends_s: list[Any] = [event.value for event in events]
    latest_s = max(ends_s)
    if latest_s <= now_s:
        return now_s
    if stream == "compute":
        late = [each for each, end_s in zip(task.task.after, ends_s, strict=True) if end_s > now_s]
        machine.record_span(index, task.task, now_s, latest_s, awaited=late[-1])
    return float(latest_s)
