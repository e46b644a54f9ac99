"""Finds whether the second step of a vectorised walk repeats the first, so that it need not be walked.

[Note: equal steps] All ranks begin the first step together; the second, each as it ends the first. Suppose that in the
second step all collectives end as long after the latest end of the first as they ended after the first's beginning, but
for those whose duration does not depend on other traffic, which end that long after their last arrival. Then the times
of all tasks follow. If thereby the last member of every other collective arrives as long after that end as it did in
the first step, and no collective of the first step is under way any longer, then what was supposed is so: these
collectives start when they did, on links that carry the same, and so end when they did. If moreover each stream ends
the step as it ended the first, all further steps are as the second. Most are, because ranks that end early wait for the
others in one of their first collectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import numpy as np

from gssim.engine.task_groups import Ranks, TaskShape
from gssim.program import TaskId
from gssim.units import Floats, Ints


@dataclass(frozen=True, eq=False)
class StepTimes:
    """Times of the second step's tasks since the latest end of the first step, by task and rank."""

    began_s: Floats
    ended_s: Floats
    wait_s: Floats
    """As of `Ranks`."""
    awaited: Ints


@dataclass(frozen=True, eq=False)
class RepeatedStep:
    """The steps after the first."""

    step_s: float
    times: Sequence[StepTimes]
    """Of each task group's ranks."""


@dataclass(frozen=True, eq=False)
class _Order:
    """Dependencies between the tasks of a task group, by place in its sequence of tasks."""

    after: Sequence[Sequence[int]]
    """For each task, the tasks of other streams that it waits for."""
    last_use: Sequence[int]
    """For each task, the last task that waits for it; -1: none."""
    first_of_stream: Mapping[str, int]
    last_of_stream: Mapping[str, int]
    joins: Mapping[TaskId, int]
    """The task that joins each collective."""


class CollectivesOfStep(Protocol):
    """Delays of a step's collectives, in seconds, and the instances that ranks join."""

    def instance_of(self, ranks: Ranks, name: TaskId) -> Ints:
        """Return the number of the instance that each rank of a task group joins."""

    def delays_s(self, name: TaskId) -> Floats | None:
        """Return the delays of each instance, by delay and instance; None if they depend on other traffic."""

    def count(self, name: TaskId) -> int:
        """Return the number of instances."""


def repeated_step(every: Sequence[Ranks], collectives: CollectivesOfStep) -> RepeatedStep | None:
    """Return the steps after the first, once all ranks have ended the first one; None if they have to be walked."""
    orders = [order for ranks in every if (order := ranks.task_group.shape.once(_order_of)) is not None]
    if len(orders) < len(every):
        return None
    groups = list(zip(every, orders, strict=True))
    step_s = max(float(ranks.ended_s[0, order.last_of_stream["compute"]].max()) for ranks, order in groups)
    latest_s = [ranks.ended_s[0, place].max() for ranks, order in groups for place in order.last_of_stream.values()]
    if max(latest_s) > step_s:
        return None
    moved_ends_s: dict[TaskId, Floats] = {}
    """By collective of known duration that ends at other times than in the first step: these, by instance."""
    for _ in range(MOST_ROUNDS):
        times: list[StepTimes] = []
        moved: dict[TaskId, None] = {}
        for ranks, order in groups:
            ends_s = {
                order.joins[name]: end_s[collectives.instance_of(ranks, name)]
                for name, end_s in moved_ends_s.items()
                if name in order.joins
            }
            found = _second_step(ranks, order, step_s, ends_s)
            changed = (found.began_s != ranks.began_s[0]).any(axis=1).tolist()
            moved |= dict.fromkeys(name for name, place in order.joins.items() if changed[place])
            times.append(found)
        ends_s_of: dict[TaskId, Floats] = {}
        for name in moved:
            first_s, second_s = _latest_arrivals(name, groups, times, collectives)
            delays_s = collectives.delays_s(name)
            if delays_s is not None:
                ends_s_of[name] = reduce(np.add, delays_s, second_s)
            elif not np.array_equal(first_s, second_s):
                return None
        if ends_s_of.keys() == moved_ends_s.keys() and all(
            np.array_equal(end_s, moved_ends_s[name]) for name, end_s in ends_s_of.items()
        ):
            ends_alike = all(
                np.array_equal(found.ended_s[place], ranks.ended_s[0, place])
                for (ranks, order), found in zip(groups, times, strict=True)
                for place in order.last_of_stream.values()
            )
            return RepeatedStep(step_s, times) if ends_alike else None
        moved_ends_s = ends_s_of
    return None


MOST_ROUNDS = 8
"""Largest number of times that the second step is computed, each with the collectives' ends that follow from the one
before."""


def _latest_arrivals(
    name: TaskId,
    groups: Sequence[tuple[Ranks, _Order]],
    times: Sequence[StepTimes],
    collectives: CollectivesOfStep,
) -> tuple[Floats, Floats]:
    """Return when the last rank arrives at each instance of a collective, in the first and in the second step.

    In seconds of simulated time, by number of the instance.
    """
    first_s, second_s = np.full((2, collectives.count(name)), -np.inf)
    for (ranks, order), found in zip(groups, times, strict=True):
        place = order.joins.get(name)
        if place is not None:
            numbers = collectives.instance_of(ranks, name)
            np.maximum.at(first_s, numbers, ranks.began_s[0, place])
            np.maximum.at(second_s, numbers, found.began_s[place])
    return first_s, second_s


def _order_of(shape: TaskShape) -> _Order | None:
    """Return the order of a group's tasks; None if it is another, or begins on the host with the step before."""
    after = [[shape.place_of[each] for each in several] for several in shape.after]
    if any(each >= place for place, several in enumerate(after) for each in several):
        return None
    issued = [place for place, goes_on in enumerate(shape.goes_on) if goes_on is not None]
    if any(shape.stream_of[place] != "compute" for place in issued) or any(
        shape.goes_on[place] for place in issued[:1]
    ):
        return None
    last_use = [-1] * len(after)
    for place, several in enumerate(after):
        for each in several:
            last_use[each] = place
    return _Order(
        after,
        last_use,
        {stream: place for place, stream in reversed(list(enumerate(shape.stream_of)))},
        {stream: place for place, stream in enumerate(shape.stream_of)},
        {name: place for place, name in enumerate(shape.joined) if name is not None},
    )


def _second_step(ranks: Ranks, order: _Order, step_s: float, moved_ends_s: Mapping[int, Floats]) -> StepTimes:
    """Return the times of the second step, given the tasks that join collectives which do not end as in the first one.

    Once every stream goes on as it did in the first step, the rest of the step is that of the first.
    """
    tasks, first_s = ranks.task_group.tasks, ranks.ended_s[0]
    times = StepTimes(ranks.began_s[0].copy(), first_s.copy(), ranks.wait_s[0].copy(), ranks.awaited[0].copy())
    now_s = {stream: first_s[place] - step_s for stream, place in order.last_of_stream.items()}
    issued_s, first_issued_s = np.zeros((2, len(ranks.classes)))
    differing: dict[str, bool] = dict.fromkeys(now_s, True)
    """Whether a stream's latest task ends otherwise than in the first step."""
    host_differs = False
    """Whether the host has issued the latest task at another time than in the first step."""
    differs_until = max(moved_ends_s, default=-1)
    """The last task that joins a collective, or waits for a task, that ends otherwise."""
    for place, task in enumerate(tasks):
        began_s = now_s[task.stream]
        if order.after[place]:
            ends_s = times.ended_s[order.after[place]]
            latest_s = ends_s.max(axis=0)
            waits = latest_s > began_s
            if task.stream == "compute":
                late = len(ends_s) - 1 - np.argmax(np.greater(ends_s[::-1], began_s), axis=0)
                times.wait_s[place], times.awaited[place] = began_s, np.where(waits, late, -1)
            began_s = np.where(waits, latest_s, began_s)
        times.began_s[place] = began_s
        if task.communication is None:
            ended_s = began_s + ranks.duration_s[place] if ranks.takes_time[place] else began_s
            if task.issue is not None:  # as in `MachineState.issued_s`
                host_s = ranks.task_group.host_s[place, ranks.columns]
                issued_s = (issued_s if task.issue.goes_on else began_s) + host_s
                first_issued_s = (first_issued_s if task.issue.goes_on else ranks.began_s[0, place]) + host_s
                host_differs = bool((issued_s != first_issued_s).any())
                ended_s = np.maximum(ended_s, issued_s)
            times.ended_s[place] = ended_s
        elif place in moved_ends_s:
            times.ended_s[place] = moved_ends_s[place]
        now_s[task.stream] = times.ended_s[place]
        differing[task.stream] = bool((times.ended_s[place] != first_s[place]).any())
        if differing[task.stream]:
            differs_until = max(differs_until, order.last_use[place])
        elif (
            place >= differs_until
            and not host_differs
            and not any(
                differs and (order.first_of_stream[stream] <= place or not order.after[order.first_of_stream[stream]])
                for stream, differs in differing.items()
            )
        ):
            return times
    return times
