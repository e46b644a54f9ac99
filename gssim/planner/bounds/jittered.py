"""Lower bounds of the median step of devices whose speed varies randomly, from the variates that a simulation draws.

[Note: drawn] A rank draws the random factors of its compute one after another, from a seed of its own, so that they are
known before anything is simulated. Let a rank's own step be the time of its tasks with their factors, if nothing else
slows them down and its peers are always ready. A step begins when the last rank ends the
previous one, and ends when the last rank ends it. The rank that was last in the previous one begins this one no
earlier, and takes its own step at least. So a step is no shorter than the shortest of all ranks' own steps, and the
median step is no shorter than the median of these. If other streams than that of the compute draw factors too, or
devices share cores, the order of the draws depends on times, and there is no bound.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gssim.cluster import DeviceType
from gssim.cluster.contention import core_shares
from gssim.collectives import Communication
from gssim.engine import SMALLEST_JITTER, is_jittery
from gssim.planner.bounds.collectives import CollectiveBounds
from gssim.program import Program, Task
from gssim.scenario import Scenario
from gssim.simulation import JITTERY_STEPS
from gssim.units import Floats


class _Run(NamedTuple):
    """Consecutive tasks of a stream: only the first one waits for others, and others wait only for the last one."""

    number: int | None
    """Number of the last task, if others wait for it."""
    computes: slice
    """Indices in `_Role.durations_s` of its tasks that draw a factor."""
    exchanges: Sequence[Communication]
    after: Sequence[int]
    """Numbers of the tasks that the first one waits for."""


class _Role(NamedTuple):
    """The tasks of ranks that run the same program, as runs in each stream."""

    durations_s: Floats
    """Of each task that draws a factor, in the order of the draws."""
    streams: Mapping[str, Sequence[_Run]]


def median_step_s(scenario: Scenario, program: Program, collectives: CollectiveBounds) -> float:
    """Return a lower bound of the median step, in seconds; 0 if none is known. See [Note: drawn]."""
    cluster = scenario.cluster
    devices = [cluster.type_of(rank) for rank in range(len(program.role_of))]
    if not any(map(is_jittery, devices)) or core_shares(cluster) is not None:
        return 0.0
    roles = program.once(_roles)
    if None in roles:
        return 0.0
    least_s = np.full(JITTERY_STEPS - 1, np.inf)
    for rank, (device, number) in enumerate(zip(devices, program.role_of, strict=True)):
        role = roles[number]
        assert role is not None
        computed_s = _compute_before_s(device, (scenario.run.seed, rank), role.durations_s)

        def alone_s(communication: Communication, rank: int = rank) -> float:
            return collectives.alone_s(communication, rank)

        np.minimum(least_s, _steps_s(role.streams, computed_s, alone_s), out=least_s)
    return float(np.median(least_s))


def _compute_before_s(device: DeviceType, seed: Sequence[int], durations_s: Floats) -> Floats:
    """Return the seconds of compute before each task of each counted step: an array (tasks + 1, steps).

    Its last row is the compute of all tasks. The factors are those of `Machine`: one of the step, if the steps vary,
    then one of each task, if the tasks vary.
    """
    of_step, of_task = device.step_jitter_ratio, device.task_jitter_ratio
    draws = bool(of_step) + (len(durations_s) if of_task else 0)
    variates = np.random.default_rng(seed).standard_normal((JITTERY_STEPS, draws))[1:]
    factors = np.ones((JITTERY_STEPS - 1, len(durations_s)))
    if of_step:
        factors *= 1 + of_step * variates[:, :1]
    if of_task:
        factors += of_task * variates[:, bool(of_step) :]
    if is_jittery(device):
        np.maximum(factors, SMALLEST_JITTER, out=factors)
    computed_s = np.zeros((len(durations_s) + 1, JITTERY_STEPS - 1))
    np.cumsum(durations_s[:, None] * factors.T, axis=0, out=computed_s[1:])
    return computed_s


def _roles(program: Program) -> list[_Role | None]:
    """Return the tasks of every role; None where the order of the draws is not known."""
    exchanges: dict[Any, Communication] = {}
    return [_role(tasks, exchanges) for tasks in program.tasks]


def _role(tasks: Sequence[Task], exchanges: dict[Any, Communication]) -> _Role | None:
    """Return the tasks of a role; `exchanges`: the collectives of earlier roles, to which those of this are added."""
    awaited = set(chain.from_iterable(task.after for task in tasks))
    numbers = {task.id: number for number, task in enumerate(tasks) if task.id in awaited}
    durations_s: list[float] = []
    streams: dict[str, list[_Run]] = defaultdict(list)
    latest: dict[str, tuple[int, list[Communication], Sequence[int]]] = {}
    """By stream: its latest tasks, which belong to no run yet: their first draw, collectives, and what they await."""
    for task in tasks:
        if task.after or task.stream not in latest:
            if task.stream in latest:
                begin, joined, after = latest[task.stream]
                streams[task.stream].append(_Run(None, slice(begin, len(durations_s)), joined, after))
            latest[task.stream] = len(durations_s), [], [numbers[each] for each in task.after if each in numbers]
        begin, joined, after = latest[task.stream]
        if task.communication is not None:
            if task.exchange is not None:
                joined.append(exchanges.setdefault(task.communication, task.exchange))
        elif task.duration_s > 0 or task.issue is not None:
            if task.stream != "compute" or task.id.step is not None or task.id.op == "inner-steps":
                return None
            durations_s.append(task.duration_s)
        if task.id in numbers:
            del latest[task.stream]
            streams[task.stream].append(_Run(numbers[task.id], slice(begin, len(durations_s)), joined, after))
    for stream, (begin, joined, after) in latest.items():
        streams[stream].append(_Run(None, slice(begin, len(durations_s)), joined, after))
    return _Role(np.array(durations_s), streams)


def _steps_s(
    streams: Mapping[str, Sequence[_Run]], computed_s: Floats, alone_s: Callable[[Communication], float]
) -> Floats:
    """Return the least seconds of each step, from its beginning to the end of its compute stream.

    `computed_s`: see `_compute_before_s`. `alone_s`: returns a lower bound of the seconds of a collective.
    Tasks of other streams that wait for none of the step's compute may have run in the step before.
    """
    ends_s: dict[int, Any] = {}
    now_s: dict[str, Any] = {stream: 0.0 if stream == "compute" else -np.inf for stream in streams}
    places = dict.fromkeys(streams, 0)
    moved = True
    while moved:
        moved = False
        for stream, runs in streams.items():
            while places[stream] < len(runs):
                number, computes, exchanges, after = runs[places[stream]]
                if not all([each in ends_s for each in after]):
                    break
                end_s = now_s[stream]
                for each in after:
                    end_s = np.maximum(end_s, ends_s[each])
                if computes.stop > computes.start and stream == "compute":
                    end_s = end_s + (computed_s[computes.stop] - computed_s[computes.start])
                for communication in exchanges:
                    end_s = end_s + alone_s(communication)
                if number is not None:
                    ends_s[number] = end_s
                now_s[stream] = end_s
                places[stream] += 1
                moved = True
    return np.broadcast_to(np.asarray(now_s.get("compute", 0.0), dtype=float), JITTERY_STEPS - 1)
