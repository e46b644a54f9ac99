"""Branch and bound: simulates plans in the order of their lower bounds, until none can improve the results."""

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush, heapreplace
from typing import Any

from gssim.errors import RunFailedError, UserError
from gssim.execution import Workers, worker_state
from gssim.execution.cache import Shared
from gssim.execution.garbage import no_collection
from gssim.plan import Plan
from gssim.planner.bounds import Bound, LoweredBounds
from gssim.planner.candidates import Candidate, RefusedPlans
from gssim.planner.objectives import FRONT_RATIO, Limits, objective_of
from gssim.planner.reasons import full_ratio
from gssim.result import Result
from gssim.scenario import Loaded, Objective, load_scenario
from gssim.scenario.scenario import Source
from gssim.simulation import Simulated, TooSlowError, push_density, simulate, with_spread_and_band


@dataclass(frozen=True)
class TooSparse:
    """Answer for a plan that pushes less than the search allows, which was not simulated."""

    density: float


Answer = Result | Bound | TooSparse | UserError | RunFailedError
"""Answer for a plan: its simulated Result, its bound (which rules it out), its density, the error that refuses it, or a
failure (a deadlock is a bug of the simulator, not of the plan).
"""
COSTLY_TASKS = 20_000
"""Number of tasks over all roles above which simulating a program takes much longer than lowering it."""


@dataclass(frozen=True)
class Request:
    """A plan to be simulated by a worker, unless its bound already shows that it cannot improve the results."""

    source: Source | None
    """The scenario that is searched."""
    override: str
    """Sets the plan."""
    bound: Bound
    """Lower bound of the plan, as known so far."""
    limits: Limits
    """What the plan must beat."""


def answer_of(request: Request) -> Answer:
    """Return a worker's answer for a plan: its Result, its bound, its density, or the error for which it is refused."""
    assert request.source is not None
    shared: Shared = worker_state()
    try:
        overrides = [*request.source.overrides, request.override]
        loaded = load_scenario(request.source.path, overrides, shared=shared)
        return predict_or_bound(loaded, request.bound, request.limits, shared)
    except (UserError, RunFailedError) as error:
        return error


def predict_or_bound(loaded: Loaded, known: Bound, limits: Limits, shared: Shared) -> Result | Bound | TooSparse:
    """Return the Result of a scenario, or its bound alone, or its density alone.

    Its bound, if that rules the plan out, or if the plan takes long to simulate and another one's bound is lower. Its
    density, if that is too low.

    `known`: the plan's bound so far; it includes the fill and drain of a pipeline, which the program's bounds do not.
    """
    with no_collection():
        if limits.least_density is not None:
            density = push_density(loaded, shared)
            if density is not None and density < limits.least_density:
                return TooSparse(density)
        if not LoweredBounds.apply_to(loaded):
            return _with_range(loaded, simulate(loaded, shared=shared, spread=False, banded=False), limits, shared)
        bounds = LoweredBounds(loaded, limits.objective, shared)
        bound = bounds.allocated_bound().with_(known)
        for closer in (bounds.with_shared_links, partial(bounds.with_allocator_overhead, rule_out=limits.rule_out)):
            if limits.rule_out(bound):
                return bound
            bound = closer(bound)
        if limits.rule_out(bound) or (bounds.tasks > COSTLY_TASKS and bound.objective > limits.next_objective):
            return bound

        def bound_of(time_s: float) -> Bound:
            return bound.with_(bounds.of_time(time_s, bound.full_ratio))

        try:
            simulated = simulate(
                loaded,
                shared=shared,
                spread=False,
                banded=False,
                is_too_slow=lambda time_s: limits.rule_out(bound_of(time_s)),
            )
        except TooSlowError as error:
            return bound_of(error.time_s)
        return _with_range(loaded, simulated, limits, shared)


def _with_range(loaded: Loaded, simulated: Simulated, limits: Limits, shared: Shared) -> Result:
    """Return a prediction; a thresholded plan that may be shown has `step_time_p10_s` and a band, which take further
    simulations.
    """
    if not loaded.statistics_needed:
        return simulated.result
    result, types = simulated.result, loaded.scenario.cluster.device_types
    full = full_ratio(result, {name: device.memory_bytes for name, device in types.items()})
    bound = Bound(result.step_time_s, objective_of(result, limits.objective), full if result.fits else math.inf)
    return result if limits.rule_out(bound) else with_spread_and_band(loaded, simulated, shared).result


@dataclass(frozen=True)
class Outcome:
    """A simulated plan that fits and meets the conditions of the search."""

    candidate: Candidate
    result: Result
    objective: float
    full_ratio: float
    """Fraction of memory used on the fullest device."""

    @property
    def point(self) -> tuple[float, float]:
        """Step time and fraction of memory used on the fullest device."""
        return self.result.step_time_s, self.full_ratio

    @property
    def order(self) -> tuple[float, int]:
        """Sort key; better plans come first."""
        return self.objective, self.candidate.index


@dataclass(frozen=True)
class RankedSet:
    """The best plans that satisfy a predicate."""

    name: str
    count: int
    holds: Callable[[Candidate], bool]

    def best(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the best of them, in order; of plans that resolve to the same scenario, only the first."""
        ordered = sorted((each for each in outcomes if self.holds(each.candidate)), key=lambda o: o.order)
        different = {each.result.scenario_id: each for each in reversed(ordered)}
        return [each for each in ordered if different[each.result.scenario_id] is each][: self.count]

    def limit(self, outcomes: Sequence[Outcome]) -> tuple[float, float]:
        """Return the `order` below which a plan is among the best: that of the last of them, if there are enough."""
        best = self.best(outcomes)
        return best[-1].order if len(best) == self.count else (math.inf, math.inf)


def front(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the Pareto front: plans for which no other is both faster and uses less memory, the fastest first.

    Plans that take more than `FRONT_RATIO` times as long as the fastest are left out.
    """
    front_plans: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda o: (o.result.step_time_s, o.full_ratio, o.candidate.index)):
        if front_plans and outcome.result.step_time_s > FRONT_RATIO * front_plans[0].result.step_time_s:
            break
        if not front_plans or outcome.full_ratio < front_plans[-1].full_ratio:
            front_plans.append(outcome)
    return front_plans


@dataclass
class Exploration:
    """Progress of a search."""

    outcomes: list[Outcome] = field(default_factory=list)
    simulated: int = 0
    refused: int = 0
    """Number of plans that cannot run."""
    left_out: RefusedPlans = field(default_factory=RefusedPlans)
    """Refused plans with their reasons, and combinations of the space that are not valid plans."""
    too_large: int = 0
    """Number of simulated plans that do not fit."""
    unwanted: int = 0
    """Number of plans whose push density is below the wanted one."""
    ruled_out: int = 0
    """Number of plans ruled out by a bound."""
    left: int = 0
    """Number of plans that might be better but were not simulated before the search ended."""
    front: tuple[tuple[float, float], ...] = ()
    """Points (time, memory) of the plans on the front, the fastest first."""
    _limits: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Limits of sets of plans by name, until an outcome is added."""

    def limit(self, ranked: RankedSet) -> tuple[float, float]:
        """Return the sort key that a plan must be below to be among the best of a set."""
        if ranked.name not in self._limits:
            self._limits[ranked.name] = ranked.limit(self.outcomes)
        return self._limits[ranked.name]

    def refuse(self, candidate: Candidate, error: UserError) -> None:
        """Count a plan that cannot run."""
        self.refused += 1
        self.left_out.add(str(error), candidate.plan.method)

    def add(self, outcome: Outcome) -> None:
        """Add a plan that fits and meets the conditions."""
        self.outcomes.append(outcome)
        self._limits.clear()
        self.front = tuple(each.point for each in front(self.outcomes))


@dataclass(frozen=True, order=True)
class Waiting:
    """A plan in the queue; the most promising plan compares as the least."""

    is_later: bool
    """Whether the plan pushes by a threshold: the others go first, see `Queue`."""
    objective: float
    index: int
    bound: Bound = field(compare=False)
    candidate: Candidate = field(compare=False)
    is_close: bool = field(compare=False)
    """Whether the bound includes communication."""
    is_lowered: bool = field(compare=False, default=False)
    """Whether the bound is that of the lowered plan, the tightest one."""


def _is_thresholded(candidate: Candidate) -> bool:
    return candidate.plan.push.threshold is not None


class Queue:
    """Priority queue of plans to simulate: the scenario's own plan first, the others by lower bound.

    Plans that push by a threshold follow those that do not: they are many times as many, take longest to simulate, and
    have the lowest bounds, as little can be pushed. A search that is ended early has then compared the dense plans.
    """

    def __init__(self, closer: Callable[[Plan, Bound], Bound]) -> None:
        self._heap: list[Waiting] = []
        self._closer = closer

    def add(self, bound: Bound, candidate: Candidate) -> None:
        """Add a plan with the bound that its plan alone gives."""
        is_own = candidate.index == 0
        later, least = (False, -math.inf) if is_own else (_is_thresholded(candidate), bound.objective)
        heappush(self._heap, Waiting(later, least, candidate.index, bound, candidate, False))

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Waiting]:
        """Iterate over them, in no order."""
        return iter(self._heap)

    def next(self, rule_out: Callable[[Candidate, Bound], bool]) -> tuple[Waiting | None, int]:
        """Remove and return the most promising plan that is not ruled out, and the number of plans ruled out."""
        ruled_out = sum(self.look_ahead(rule_out, plans=1))
        return heappop(self._heap) if self._heap else None, ruled_out

    def wait(self, candidate: Candidate, bound: Bound) -> None:
        """Put a plan that takes long to simulate back into the queue, with its tightest bound."""
        later = _is_thresholded(candidate)
        heappush(self._heap, Waiting(later, bound.objective, candidate.index, bound, candidate, True, True))

    def next_objective(self) -> float:
        """Return the least lower bound of the objective among the plans in the queue; infinite if it is empty."""
        return self._heap[0].objective if self._heap else math.inf

    def look_ahead(self, rule_out: Callable[[Candidate, Bound], bool], *, plans: int) -> Generator[int, None, None]:
        """Tighten bounds until that number of the most promising plans are not ruled out.

        Yields 1 for each plan that is ruled out, and 0 for each bound that is tightened, which takes some time: the
        caller may stop there. The queue must not be used before the iterator ends or is closed.
        """
        ahead: list[Waiting] = []
        try:
            while self._heap and len(ahead) < plans:
                first = self._heap[0]
                if rule_out(first.candidate, first.bound):
                    heappop(self._heap)
                    yield 1
                elif first.is_close or first.index == 0:
                    ahead.append(heappop(self._heap))
                else:
                    bound = self._closer(first.candidate.plan, first.bound)
                    heapreplace(self._heap, replace(first, objective=bound.objective, bound=bound, is_close=True))
                    yield 0
        finally:
            for each in ahead:
                heappush(self._heap, each)


def limits_of(candidate: Candidate, wanted: Sequence[RankedSet], found: Exploration, objective: Objective) -> Limits:
    """Return the limits that a plan must beat, given the results so far."""
    order = max(found.limit(each) for each in wanted if each.holds(candidate))
    return Limits(objective, candidate.index, order, found.front)


class Explorer:
    """Lets workers judge plans, the most promising first; `found` always has the best so far.

    Which plans are simulated depends on when they are added, and on the speed of the processes; the best plans and the
    front do not.
    """

    def __init__(
        self,
        wanted: Sequence[RankedSet],
        closer: Callable[[Plan, Bound], Bound],
        judge: Callable[[Candidate, Answer, Exploration], Outcome | None],
        found: Exploration,
        *,
        source: Source | None = None,
        objective: Objective = "step-time",
        least_density: float | None = None,
        until_s: float = math.inf,
    ) -> None:
        """`source`: what the workers load. `least_density`: see `Limits`. `until_s`: value of `time.monotonic` after
        which no plan is started.
        """
        self.queue, self.plans = Queue(closer), 0
        self.wanted, self.judge, self.found = wanted, judge, found
        self.source, self.objective, self.until_s = source, objective, until_s
        self.least_density = least_density
        self._in_progress: dict[Any, Candidate] = {}

    def add(self, bound: Bound, candidate: Candidate) -> None:
        """Add a plan to be judged."""
        self.queue.add(bound, candidate)
        self.plans += 1

    def rule_out(self, candidate: Candidate, bound: Bound) -> bool:
        """Return whether a plan with this bound cannot improve the results so far."""
        return limits_of(candidate, self.wanted, self.found, self.objective).rule_out(bound)

    def advance(self, workers: Workers) -> None:
        """Take the answers that are ready and hand out plans, without waiting; one worker stays idle, as the caller is
        busy.
        """
        self._take(workers, workers.ended(list(self._in_progress), within_s=0.0))
        if time.monotonic() <= self.until_s:
            self._hand_out(workers, max(1, workers.at_a_time - 1))

    def run(self, workers: Workers, on_progress: Callable[[int, int], None]) -> None:
        """Judge all plans that were added; `on_progress` is called with (plans done, total)."""
        try:
            while self.queue or self._in_progress:
                late = time.monotonic() > self.until_s
                if not late:
                    self._hand_out(workers, workers.at_a_time)
                on_progress(self.plans - len(self.queue) - len(self._in_progress), self.plans)
                if not self._in_progress:
                    break
                if not late:
                    self._look_ahead(workers)
                self._take(workers, workers.ended(list(self._in_progress)))
        finally:
            self.leave()

    def leave(self) -> None:
        """Count the plans that are left open: at an interrupt too, when some are being simulated."""
        waiting = sum(not self.rule_out(each.candidate, each.bound) for each in self.queue)
        self.found.left = waiting + len(self._in_progress)

    def _look_ahead(self, workers: Workers) -> None:
        """Tighten the bounds of the plans that are handed out next, until a worker ends: idle ones would wait for them.

        Dozens of bounds may have to be tightened between two plans that are worth simulating.
        """
        with closing(self.queue.look_ahead(self.rule_out, plans=2 * workers.at_a_time)) as ahead:
            for ruled_out in ahead:
                self.found.ruled_out += ruled_out
                if not ruled_out and workers.ended(list(self._in_progress), within_s=0.0):
                    break

    def _hand_out(self, workers: Workers, most: int) -> None:
        """Hand out the most promising plans, so that up to `most` are being judged."""
        while self.queue and len(self._in_progress) < most:
            first, ruled_out = self.queue.next(self.rule_out)
            self.found.ruled_out += ruled_out
            if first is not None:
                limits = limits_of(first.candidate, self.wanted, self.found, self.objective)
                least = math.inf if first.is_lowered else self.queue.next_objective()
                limits = replace(limits, next_objective=least, least_density=self.least_density)
                request = Request(self.source, first.candidate.override, first.bound, limits)
                self._in_progress[workers.submit(answer_of, request)] = first.candidate

    def _take(self, workers: Workers, ended: Iterable[Any]) -> None:
        """Take the answers of plans that are judged."""
        for each in ended:
            candidate, answer = self._in_progress.pop(each), workers.answer(each)
            if isinstance(answer, Bound) and not self.rule_out(candidate, answer):
                self.queue.wait(candidate, answer)
                continue
            outcome = self.judge(candidate, answer, self.found)
            if outcome is not None:
                self.found.add(outcome)
