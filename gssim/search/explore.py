"""Best first: plans are simulated in the order of what they can reach, until none that is left can be wanted."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gssim.result import Result
from gssim.search.bounds import Bound
from gssim.search.candidates import Candidate
from gssim.search.workers import Answer, Workers

FRONT_RATIO = 1.5
"""Nobody trains so much longer to save memory that nothing else wants."""


@dataclass(frozen=True)
class Outcome:
    """A plan that fits and is wanted, simulated."""

    candidate: Candidate
    result: Result
    objective: float
    full_ratio: float
    """What is taken of the memory of the device that is fullest."""

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
        """Return the best of those, in order."""
        return sorted((each for each in outcomes if self.holds(each.candidate)), key=lambda o: o.order)[: self.count]

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


def can_be_on_front(bound: Bound, outcomes: Sequence[Outcome]) -> bool:
    """Return whether a plan with such a bound may be on the front: nothing found is better than its bound in both."""
    if outcomes and bound.time_s > FRONT_RATIO * outcomes[0].result.step_time_s:
        return False
    return not any(
        each.result.step_time_s <= bound.time_s
        and each.full_ratio <= bound.full_ratio
        and (each.result.step_time_s < bound.time_s or each.full_ratio < bound.full_ratio)
        for each in outcomes
    )


@dataclass
class Exploration:
    """How far a search is."""

    outcomes: list[Outcome] = field(default_factory=list)
    simulated: int = 0
    refused: int = 0
    """Plans that cannot run."""
    too_large: int = 0
    """Plans that were simulated and do not fit."""
    unwanted: int = 0
    """Plans that push too little."""
    ruled_out: int = 0
    """By a bound."""
    left: int = 0
    """Plans that may be better and were not simulated: the search was ended before."""


class Limits:
    """What a plan must beat, as of the outcomes that there are."""

    def __init__(self, wanted: Sequence[Wanted], outcomes: Sequence[Outcome]) -> None:
        self.front = front(outcomes)
        self.wanted = [(each.holds, each.limit(outcomes)) for each in wanted]

    def rule_out(self, candidate: Candidate, bound: Bound) -> bool:
        """Return whether a plan with such a bound fits nowhere, or can be neither on the front nor among the best."""
        if bound.full_ratio > 1:
            return True
        order = (bound.objective, candidate.index)
        may_be_best = any(order < limit and holds(candidate) for holds, limit in self.wanted)
        return not may_be_best and not can_be_on_front(bound, self.front)


def explore(
    ordered: Sequence[tuple[Bound, Candidate]],
    wanted: Sequence[Wanted],
    workers: Workers,
    judge: Callable[[Candidate, Answer, Exploration], Outcome | None],
    found: Exploration,
    *,
    told: Callable[[int, int], None] = lambda done, plans: None,
    until_s: float = math.inf,
) -> None:
    """Simulate what can be wanted of plans in the order given, into `found`, which always has the best so far.

    Which plans are simulated hangs on how fast they are; which are the best, and on the front, does not. `until_s`: of
    `time.monotonic`, after which none is begun.
    """
    waiting = deque(ordered)
    limits = Limits(wanted, found.outcomes)
    handed: dict[int, Candidate] = {}
    while waiting or handed:
        late = time.monotonic() > until_s
        while waiting and workers.idle and not late:
            bound, candidate = waiting.popleft()
            if limits.rule_out(candidate, bound):
                found.ruled_out += 1
                continue
            handed[candidate.index] = candidate
            workers.begin(candidate.index, candidate.override)
        told(len(ordered) - len(waiting) - len(handed), len(ordered))
        if not handed:
            break
        for number, answer in workers.ended():
            outcome = judge(handed.pop(number), answer, found)
            if outcome is not None:
                found.outcomes.append(outcome)
                limits = Limits(wanted, found.outcomes)
    found.left += sum(not limits.rule_out(candidate, bound) for bound, candidate in waiting)
