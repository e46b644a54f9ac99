"""Tasks and collectives of programs written by hand, named by their labels; and those of lowered programs by label."""

from collections.abc import Iterable, Mapping
from typing import Any

from gssim.collectives import Communication
from gssim.program import Program, Task, TaskId


def other(label: str) -> TaskId:
    """Return an identity with any label."""
    return TaskId("other", layer=label)


def task_of(
    label: str,
    phase: str,
    stream: str = "compute",
    *,
    communication: str | None = None,
    after: Iterable[str] = (),
    **rest: Any,
) -> Task:
    """Return a task; its collective and the tasks that it waits for are named by their labels."""
    joined = None if communication is None else other(communication)
    return Task(other(label), phase, stream, communication=joined, after=tuple(map(other, after)), **rest)


def program_with(
    tasks: Iterable[Iterable[Task]], communications: Mapping[str, Communication], persistent: Any, **rest: Any
) -> Program:
    """Return a program whose collectives are named by their labels."""
    by_role = tuple(tuple(each) for each in tasks)
    return Program(by_role, {other(name): each for name, each in communications.items()}, tuple(persistent), **rest)


def labels_of(ids: Iterable[TaskId]) -> tuple[str, ...]:
    """Return the labels of tasks."""
    return tuple(each.label for each in ids)


def communications_by_label(program: Program) -> dict[str, Communication]:
    """Return a program's collectives by label."""
    return {each.label: communication for each, communication in program.communications.items()}
