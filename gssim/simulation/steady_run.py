"""Execution of a program until it is steady, and what ranks do in its steady steps: times, phases, and spans."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from gssim.engine import Machine, RecordingTracker, TaskSpan, is_jittery
from gssim.execution.cache import Shared
from gssim.plan.buckets import fragment_steps
from gssim.program import Program
from gssim.result import WAITING_PHASES, typical_phases
from gssim.scenario import Scenario
from gssim.scenario.device_rates import with_profile_slowdowns
from gssim.simulation.footprint import SIZE_DIGITS
from gssim.units import Floats

STEADY_STEPS = 2
"""Simulated steps. All ranks start the first together; the second is usually in the steady state: see
`run_until_steady`."""
MOST_STEPS = 16
"""Most simulated steps. If the offsets between ranks still change by then, the mean of the last half counts."""
SETTLED = 1e-9
"""Largest change of the ranks' offsets over a step, as a fraction of the step, that counts as steady."""
JITTERY_STEPS = 1 + 40
"""Simulated steps if device speeds vary randomly (drawn from the run's seed); their median counts."""


@dataclass(frozen=True)
class SteadyRun:
    """A simulated run in its steady state."""

    scenario: Scenario
    machine: Machine
    first: int
    """Index, among the machine's steps, of the last step before the counted ones."""
    ends_s: tuple[tuple[float, ...], ...]
    """For each class of ranks, the end time of step `first` and of each counted step."""
    times_s: tuple[float, ...]
    """Durations of the counted steps."""
    jittery: bool

    @cached_property
    def time_s(self) -> float:
        """Duration of a step: the median of the counted ones if device speeds vary randomly, else their mean."""
        return median(self.times_s) if self.jittery else fmean(self.times_s)

    @property
    def number(self) -> int:
        """Index, among the machine's steps, of the step just before the one of median length."""
        ordered = sorted(range(len(self.times_s)), key=lambda step: (self.times_s[step], step))
        return self.first + ordered[(len(ordered) - 1) // 2]

    @property
    def start_s(self) -> float:
        """Time at which the last rank begins the step of median length."""
        return max(ends[self.number - self.first] for ends in self.ends_s)


class TooSlowError(Exception):
    """A run was ended early, as its typical step takes `time_s` or longer, which its caller does not want to know."""

    def __init__(self, time_s: float) -> None:
        super().__init__(f"a step takes {time_s} s or longer")
        self.time_s = time_s


class _Watch:
    """Ends a run of steps with jitter as soon as half of them show that their median is not wanted."""

    def __init__(self, steps: int, is_too_slow: Callable[[float], bool]) -> None:
        self.steps, self.is_too_slow = steps, is_too_slow
        self.least_s = 0.0
        """Lower bound of the median step's time."""
        self._seen = steps // 2  # with fewer, it may be anything

    def __call__(self, ends_s: Sequence[Sequence[float]]) -> bool:
        """Return whether the steps that all ranks have ended suffice; see `Stop` in `gssim.engine.machine`."""
        ended = min(map(len, ends_s))
        if not self._seen < ended <= self.steps:  # a step that is run beyond those does not count
            return False
        self._seen = ended
        latest_s = [max(ends[step] for ends in ends_s) for step in range(ended)]
        self.least_s = median([*(end - start for start, end in pairwise(latest_s)), *[0.0] * (self.steps - ended)])
        return self.is_too_slow(self.least_s)


def run_until_steady(
    scenario: Scenario,
    program: Program,
    unfolded: bool,
    shared: Shared,
    *,
    recorded: bool = False,
    replicas: int = 1,
    peaks: bool = True,
    is_too_slow: Callable[[float], bool] | None = None,
) -> SteadyRun:
    """Run a program until it is steady: the offsets between the ranks' step ends no longer change.

    All ranks begin together, but some end the step earlier than others, so the next step differs. Steps are run until
    the offsets settle. One more is run if the beginning of the next step affects the end of a step: if published
    parameters are in flight, or if ranks that end early slow down others on their host. `replicas`: number of replicas,
    each of consecutive ranks, that do not communicate within a step; offsets are then compared only inside each
    replica. `peaks`: whether memory peaks are needed. `is_too_slow`: whether a step of at least so many seconds is not
    wanted; if the steps so far show that it is as long, TooSlowError is raised.
    """
    cluster = with_profile_slowdowns(scenario.cluster, scenario.workload)
    types = {device.type for device in cluster.devices[: scenario.ranks]}
    jittery = any(is_jittery(cluster.device_types[name]) for name in types)
    steps = JITTERY_STEPS if jittery else STEADY_STEPS
    while True:
        machine = Machine(
            cluster, program, conditions=scenario.network, seed=scenario.run.seed, unfolded=unfolded, shared=shared
        )
        if recorded:
            machine.memory = [
                RecordingTracker(memory.current, partial(getattr, machine.env, "now")) for memory in machine.memory
            ]
        more = scenario.policies.publish_overlaps or (machine.is_coupled and not jittery)
        watch = _Watch(steps, is_too_slow) if jittery and is_too_slow is not None else None
        machine.run(steps + more, peaks=peaks, stop=watch)
        if watch is not None and machine.is_stopped:
            raise TooSlowError(watch.least_s)
        if jittery:  # the median over many steps hardly depends on the last one
            return _counted_run(scenario, machine, 0, steps, jittery=True)
        ends_s = np.array([ends[steps - 2 : steps] for ends in machine.ends_s])
        if replicas > 1:
            ends_s = ends_s[machine.class_of_rank].reshape(replicas, -1, 2).swapaxes(0, 1)
        latest_s = ends_s.max(axis=0)
        moved_s = np.abs(np.diff(ends_s - latest_s)).max()
        if moved_s <= SETTLED * np.diff(latest_s).min():
            return _counted_run(scenario, machine, steps - 2, steps)
        if steps >= MOST_STEPS:
            return _counted_run(scenario, machine, steps // 2 - 1, steps)
        steps *= 2


def _counted_run(scenario: Scenario, machine: Machine, first: int, last: int, *, jittery: bool = False) -> SteadyRun:
    """Return a run in which the steps after step `first`, up to step `last - 1`, are counted."""
    ends_s = tuple(tuple(ends[first:last]) for ends in machine.ends_s)
    latest = [max(ends) for ends in zip(*ends_s, strict=True)]
    return SteadyRun(scenario, machine, first, ends_s, tuple(end - start for start, end in pairwise(latest)), jittery)


def settled_phases(steady: SteadyRun) -> list[dict[str, float]]:
    """Return each class's seconds per phase in its typical step, adjusted so that all classes' steps are equally long.

    Steps with jitter stay as they are, and so do those with which a period ends, which `periodic_result` adds up.
    """
    phases, policies = phases_of(steady), steady.scenario.policies
    if steady.jittery:
        return phases
    if not policies.sync_every_steps:
        return [_adjust_waiting(each, steady.time_s) for each in phases]
    if not policies.in_fragments:
        return phases
    waits_s = [max(0.0, steady.time_s - sum(each.values())) for each in phases]  # as in `times_of_steps`
    return [
        each | {"exposed_communication": each["exposed_communication"] + wait_s}
        for each, wait_s in zip(phases, waits_s, strict=True)
    ]


def mean_phases(steady: SteadyRun, phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds per phase of a mean rank, given those of each class; they add up to the step.

    Their sum may differ from the step time, because ranks have their median steps at different times.
    """
    counts = [len(rank_class.members) for rank_class in steady.machine.classes]
    phases_s = {name: fmean([phase[name] for phase in phases], counts) for name in phases[0]}
    total_s = sum(phases_s.values())
    return {name: value * steady.time_s / total_s for name, value in phases_s.items()} if total_s else phases_s


def phases_of(steady: SteadyRun) -> list[dict[str, float]]:
    """Return each class's seconds per phase in its typical step."""
    ends_s, walk = steady.ends_s, steady.machine.outline_walk or steady.machine.vectorised
    if walk is not None and len(ends_s[0]) == STEADY_STEPS:
        return walk.phases(ends_s, steady.first + 1)
    spans = _spans_by_rank(steady.machine)
    return [typical_phases(spans[each.representative], ends_s[each.index]) for each in steady.machine.classes]


def _spans_by_rank(
    machine: Machine, counts: Callable[[TaskSpan], bool] = lambda span: True
) -> Mapping[int, Sequence[TaskSpan]]:
    """Return the spans that count of each class, by its first rank."""
    spans: dict[int, list[TaskSpan]] = defaultdict(list)
    for span in filter(counts, machine.task_spans):
        spans[span.rank].append(span)
    return spans


UNSETTLED = 1e-9
"""Relative difference beyond which a rank's second step counts as unequal to the steady step of all ranks."""


def _adjust_waiting(phases: dict[str, float], step_time_s: float) -> dict[str, float]:
    """Return a rank's phases, with waiting adjusted so that they add up to the steady step, equally long for all ranks.

    If offsets between ranks never settle, the median step of some ranks is shorter or longer than the mean step of all.
    """
    missing_s = step_time_s - sum(phases.values())
    waiting_s = sum(phases[name] for name in WAITING_PHASES)
    if abs(missing_s) <= UNSETTLED * step_time_s or waiting_s + missing_s < 0:
        return phases
    if not waiting_s:
        return phases | {"idle": missing_s}
    return phases | {name: phases[name] * (1 + missing_s / waiting_s) for name in WAITING_PHASES}


def times_in(steady: SteadyRun, phases: Collection[str]) -> Floats:
    """Return the seconds that each rank spends in some phases, by steady step and rank."""
    spans = _spans_by_rank(steady.machine, lambda span: span.phase in phases and span.stream == "compute")
    times_s = np.zeros((len(steady.times_s), steady.scenario.ranks))
    for rank_class in steady.machine.classes:
        ends_s = np.array(steady.ends_s[rank_class.index])
        own_spans = spans[rank_class.representative]
        which = np.searchsorted(ends_s, [span.end_s for span in own_spans], side="left") - 1
        lengths_s = np.array([span.end_s - span.start_s for span in own_spans])
        for number in range(len(times_s)):
            times_s[number, rank_class.members] = lengths_s[which == number].sum()
    return times_s


def times_of_steps(steady: SteadyRun) -> Floats:
    """Return, for every step of a steady period, its mean time over ranks (mean or median over the counted periods).

    A faster rank gains on the others from period to period, until it is so far ahead that it waits for their exchanges.
    If that takes more periods than are simulated, the missing wait is added to the steps that end an exchange, because
    in the steady state all ranks' periods are equally long.
    """
    scenario, every = steady.scenario, steady.scenario.policies.sync_every_steps or 1
    outer = [end - 1 for _, end in fragment_steps(scenario.plan, scenario.policies)]
    spans = _spans_by_rank(steady.machine, lambda span: span.stream == "compute")
    sum_s = np.zeros(every)
    for each in steady.machine.classes:
        own_spans, ends_s = spans[each.representative], np.array(steady.ends_s[each.index])
        span_ends_s = np.array([span.end_s for span in own_spans])
        periods = np.searchsorted(ends_s, span_ends_s, side="left") - 1
        steps = np.array([span.task.step or every for span in own_spans])
        times_s = np.zeros((len(steady.times_s), every))
        for number, own_s in enumerate(times_s):
            is_counted = periods == number
            latest_s = np.full(every + 1, ends_s[number])
            np.maximum.at(latest_s, steps[is_counted], span_ends_s[is_counted])
            latest_s[-1] = ends_s[number + 1]
            own_s += np.diff(np.maximum.accumulate(latest_s))
        if steady.jittery:
            sum_s += len(each.members) * np.median(times_s, axis=0)
            continue
        mean_s = times_s.mean(axis=0)
        mean_s[outer] += max(0.0, steady.time_s - mean_s.sum()) / len(outer)
        sum_s += len(each.members) * mean_s
    return sum_s / scenario.ranks


def outer_bytes_sent(steady: SteadyRun) -> float:
    """Return the bytes that a rank sends to other replicas in a period, for the rank that sends the most."""
    sent = steady.machine.sent_across(steady.scenario.policies.replica_size) / steady.machine.steps
    return round(float(sent.max()), SIZE_DIGITS)
