"""Streams that go ahead of the clock.

[Note: ahead] Between two collectives a rank is alone with its device: nothing that others do changes when its tasks
end. Where that is so (devices of a host do not slow each other down, nothing varies by chance or after pauses), its
streams do not wait for the clock after each task, but keep a time of their own, and meet the clock again where they
meet others: a collective is joined at the very moment. A task that others of the rank wait for tells when it ends as
soon as that is known. Memory is then added up in the order of the compute stream, which must be the only one that takes
any.
"""

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from gssim.engine.memory_tracker import Recorded
from gssim.engine.symmetry import is_jittery
from gssim.program import Task

if TYPE_CHECKING:
    from gssim.engine.machine import Machine


def may_go_ahead(machine: "Machine", index: int) -> bool:
    """Return whether a class's streams may go ahead of the clock; see [Note: ahead]."""
    tasks = machine.program.tasks[machine.roles[index]]
    beside = any((task.need.peak_bytes or task.need.kept) and task.stream != "compute" for task in tasks)
    return is_alone(machine, index) and not beside


def is_alone(machine: "Machine", index: int) -> bool:
    """Return whether nothing changes the times of a class's tasks between two collectives."""
    alone = not machine.hosts[machine.classes[index].host].coupled and not is_jittery(machine.devices[index])
    alone = alone and not isinstance(machine.memory[index], Recorded)  # which asks the clock when things are held
    return alone and not _remembers_pauses(machine)[machine.roles[index]]


def _remembers_pauses(machine: "Machine") -> list[bool]:
    """Return, by role, whether pauses change how long its tasks take."""
    tasks = machine.program.tasks
    return machine.program.once("pauses", lambda: [any(task.after_pauses for task in each) for each in tasks])


def ahead(machine: "Machine", index: int, stream: str, steps: int) -> Generator[Any, Any, None]:
    """Carry out a stream's tasks on a clock of its own; see [Note: ahead]."""
    tasks, env, now_s = machine.tasks_of(index, stream), machine.env, machine.env.now
    for step in range(steps):
        for task in tasks:
            if task.after:
                now_s = yield from _awaited(machine, index, stream, step, task, now_s)
            began_s, now_s = now_s, now_s + task.duration_s
            if task.issue is not None:
                now_s = max(now_s, machine.issued_s(index, task.issue, began_s))
            if task.communication is not None:
                yield from machine.until(began_s)
                yield from machine.communicate(index, stream, step, task)
                now_s = env.now
            if now_s > began_s:
                machine.note_span(index, stream, task.label, task.phase, began_s, now_s)
            finished = machine.finished.get((index, step, task.label))
            if finished is not None:
                finished.succeed(now_s)
        if stream == "compute":
            machine.ends_s[index].append(now_s)
    if stream == "compute":
        _hold(machine, index, steps)
    yield from machine.until(now_s)


def _awaited(
    machine: "Machine", index: int, stream: str, step: int, task: Task, now_s: float
) -> Generator[Any, Any, float]:
    """Wait until it is known when the tasks end that come before this one on other streams; return when it can."""
    events = [machine.finished[index, step, label] for label in task.after]
    pending = [event for event in events if not event.triggered]
    if pending:
        machine.waiting[index, stream] = (task, None)
        yield machine.env.all_of(pending) if len(pending) > 1 else pending[0]
        del machine.waiting[index, stream]
    ends_s: list[Any] = [event.value for event in events]
    latest_s = max(ends_s)
    if latest_s <= now_s:
        return now_s
    if stream == "compute":
        late = [label for label, end_s in zip(task.after, ends_s, strict=True) if end_s > now_s]
        machine.note_wait(index, stream, task, late[-1], now_s, latest_s)
    return float(latest_s)


def _hold(machine: "Machine", index: int, steps: int) -> None:
    """Take and give back the memory of all tasks, in their order: always the same, whenever they are done."""
    tasks = machine.tasks_of(index, "compute") * steps
    machine.memory[index] = machine.program.once(
        ("held", machine.roles[index], steps), partial(machine.memory[index].through, tasks)
    )
