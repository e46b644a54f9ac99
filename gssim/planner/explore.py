"""Best first: plans are simulated in the order of what they can reach, until none that is left can be wanted."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace

from gssim.errors import UserError
from gssim.plan import Plan
from gssim.planner.bounds import Bound
from gssim.planner.candidates import Candidate, LeftOut
from gssim.planner.objectives import FRONT_RATIO, Limits
from gssim.planner.workers import Answer, Workers
from gssim.result import Result
from gssim.scenario import Objective


@dataclass(frozen=True)
class Outcome:
    """A plan that fits and is wanted, simulated."""

    candidate: Candidate
    result: Result
    objective: float
    full_ratio: float
    """What is taken of the memory of the device that is fullest."""

    @property
    def point(self) -> tuple[float, float]:
        """Its time and how full the fullest device is."""
        return self.result.step_time_s, self.full_ratio

    @property
    def order(self) -> tuple[float, int]:
        """The better one is less."""
        return self.objective, self.candidate.index


@dataclass(frozen=True)
class Wanted:
    """The best plans of some kind."""

    name: str
    count: int
    holds: Callable[[Candidate], bool]

    def best(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the best of those, in order; of plans that come to the same shares, the first."""
        ordered = sorted((each for each in outcomes if self.holds(each.candidate)), key=lambda o: o.order)
        different = {each.result.scenario_id: each for each in reversed(ordered)}
        return [each for each in ordered if different[each.result.scenario_id] is each][: self.count]

    def limit(self, outcomes: Sequence[Outcome]) -> tuple[float, float]:
        """Return what a plan must be before in order, to be among the best."""
        best = self.best(outcomes)
        return best[-1].order if len(best) == self.count else (math.inf, math.inf)


def front(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the plans than which none is both faster and leaves more memory, the fastest first.

    Those that take more than `FRONT_RATIO` times the fastest's time are left out.
    """
    found: list[Outcome] = []
    for each in sorted(outcomes, key=lambda o: (o.result.step_time_s, o.full_ratio, o.candidate.index)):
        if found and each.result.step_time_s > FRONT_RATIO * found[0].result.step_time_s:
            break
        if not found or each.full_ratio < found[-1].full_ratio:
            found.append(each)
    return found


@dataclass
class Exploration:
    """How far a search is."""

    outcomes: list[Outcome] = field(default_factory=list)
    simulated: int = 0
    refused: int = 0
    """Plans that cannot run."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """The same with their reasons, and what of the space makes no plan at all."""
    too_large: int = 0
    """Plans that were simulated and do not fit."""
    unwanted: int = 0
    """Plans that push too little."""
    ruled_out: int = 0
    """By a bound."""
    left: int = 0
    """Plans that may be better and were not simulated: the search was ended before."""
    front: tuple[tuple[float, float], ...] = ()
    """Times and how full the fullest device is, of the plans on the front, the fastest first."""

    def refuse(self, candidate: Candidate, error: UserError) -> None:
        """Count a plan that cannot run."""
        self.refused += 1
        self.left_out.add(str(error), candidate.plan.method)

    def add(self, outcome: Outcome) -> None:
        """Take up a plan that fits and is wanted."""
        self.outcomes.append(outcome)
        self.front = tuple(each.point for each in front(self.outcomes))


@dataclass(frozen=True, order=True)
class Waiting:
    """A plan that may be wanted; the most promising is the least."""

    objective: float
    index: int
    bound: Bound = field(compare=False)
    candidate: Candidate = field(compare=False)
    is_close: bool = field(compare=False)
    """Whether the bound has what the plan sends in it."""
    is_lowered: bool = field(compare=False, default=False)
    """Whether it is that of the lowered plan: there is none closer."""


class Queue:
    """Plans that wait to be simulated, the scenario's own first, then by what they can reach."""

    def __init__(self, plans: Iterable[tuple[Bound, Candidate]], closer: Callable[[Plan, Bound], Bound]) -> None:
        entries = [(Waiting(bound.objective, each.index, bound, each, False)) for bound, each in plans]
        self._heap = [replace(each, objective=-math.inf) if each.index == 0 else each for each in entries]
        heapify(self._heap)
        self._closer = closer

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Waiting]:
        """Give them, in no order."""
        return iter(self._heap)

    def next(self, rule_out: Callable[[Candidate, Bound], bool]) -> tuple[Waiting | None, int]:
        """Return the most promising plan that nothing rules out, which waits no longer, and how many were ruled out."""
        ruled_out = self.look_ahead(rule_out)
        return heappop(self._heap) if self._heap else None, ruled_out

    def wait(self, candidate: Candidate, bound: Bound) -> None:
        """Take a plan back which takes long to simulate, with its closest bound."""
        heappush(self._heap, Waiting(bound.objective, candidate.index, bound, candidate, True, True))

    def next_objective(self) -> float:
        """Return the least that a plan can reach of those that wait."""
        return self._heap[0].objective if self._heap else math.inf

    def look_ahead(self, rule_out: Callable[[Candidate, Bound], bool]) -> int:
        """Find the most promising plan that nothing rules out, which comes next then; return how many were."""
        ruled_out = 0
        while self._heap:
            first = self._heap[0]
            if rule_out(first.candidate, first.bound):
                heappop(self._heap)
                ruled_out += 1
            elif first.is_close or first.index == 0:
                break
            else:
                bound = self._closer(first.candidate.plan, first.bound)
                heapreplace(self._heap, Waiting(bound.objective, first.index, bound, first.candidate, True))
        return ruled_out


def limits_of(candidate: Candidate, wanted: Sequence[Wanted], found: Exploration, objective: Objective) -> Limits:
    """Return what a plan must beat, as of what has been found."""
    order = max(each.limit(found.outcomes) for each in wanted if each.holds(candidate))
    return Limits(objective, candidate.index, order, found.front)


def explore(
    queue: Queue,
    wanted: Sequence[Wanted],
    workers: Workers,
    judge: Callable[[Candidate, Answer, Exploration], Outcome | None],
    found: Exploration,
    *,
    objective: Objective = "step-time",
    told: Callable[[int, int], None] = lambda done, plans: None,
    until_s: float = math.inf,
) -> None:
    """Simulate what can be wanted, the most promising first, into `found`, which always has the best so far.

    Which plans are simulated hangs on how fast they are; which are the best, and on the front, does not. `until_s`: of
    `time.monotonic`, after which none is begun.
    """

    def rule_out(candidate: Candidate, bound: Bound) -> bool:
        return limits_of(candidate, wanted, found, objective).rule_out(bound)

    plans = len(queue)
    handed: dict[int, Candidate] = {}
    while queue or handed:
        late = time.monotonic() > until_s
        while queue and workers.idle and not late:
            first, ruled_out = queue.next(rule_out)
            found.ruled_out += ruled_out
            if first is not None:
                handed[first.index] = first.candidate
                limits = limits_of(first.candidate, wanted, found, objective)
                least = math.inf if first.is_lowered else queue.next_objective()
                workers.begin(first.index, first.candidate.override, replace(limits, next_objective=least))
        told(plans - len(queue) - len(handed), plans)
        if not handed:
            break
        if not late:
            found.ruled_out += queue.look_ahead(rule_out)  # which would else be done while processes wait for a plan
        for number, answer in workers.ended():
            candidate = handed.pop(number)
            if isinstance(answer, Bound) and not rule_out(candidate, answer):
                queue.wait(candidate, answer)
                continue
            outcome = judge(candidate, answer, found)
            if outcome is not None:
                found.add(outcome)
    found.left += sum(not rule_out(each.candidate, each.bound) for each in queue)
