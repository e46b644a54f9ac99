"""The best plans for a scenario's cluster and model: searched, bounded, simulated, explained.

Every plan of the space gets lower bounds of its step's time and memory ([Note: bounds] in `bounds`). The most promising
are simulated first; what cannot be among the best by its bound, nor on the front of time and memory, never is. What is
found is what simulating every plan would find.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from gssim.result import Result
from gssim.scenario import Loaded
from gssim.search.batches import Batches
from gssim.search.bounds import Bound, Bounds
from gssim.search.candidates import Candidate, candidates
from gssim.search.explore import Exploration, Outcome, Queue, Wanted, explore, front
from gssim.search.reasons import full_ratio, reason
from gssim.search.workers import Answer, Workers, searchers
from gssim.space import SearchSpace
from gssim.units import RunFailedError, UserError

__all__ = ["Found", "Outcome", "Search", "searchers"]

RIVALS: dict[str, Callable[[Candidate], bool]] = {
    "the scenario's own plan": lambda each: each.index == 0,
    "best with even shares": lambda each: each.plan.shares.batch == each.plan.shares.shards == "even",
    "best with shares proportional to compute": lambda each: (
        each.plan.shares.shards == "compute" and each.plan.shares.batch == "throughput"
    ),
}
"""What the best plan is compared with. The last is Gradient Sharding as its paper has it."""


@dataclass(frozen=True)
class Found:
    """What a search came to, or has come to so far."""

    space: SearchSpace
    best: tuple[Outcome, ...]
    """In order of the objective."""
    front: tuple[Outcome, ...]
    """Of time and memory, the fastest first."""
    rivals: tuple[tuple[str, Outcome | None], ...]
    """What the best is compared with, by name; None: no such plan fits."""
    counts: Exploration
    plans: int

    def results(self) -> list[Result]:
        """Return the best plans' Results in order, then those of the others on the front.

        `provenance.search` tells each one's rank (None of the others), whether it is on the front, its plan as `--set`
        takes it, how full its fullest device is, and why it takes as long as it does.
        """
        others = [each for each in self.front if each not in self.best]
        ranked = [*enumerate(self.best, start=1), *((None, each) for each in others)]
        return [self._placed(each, rank) for rank, each in ranked]

    def _placed(self, outcome: Outcome, rank: int | None) -> Result:
        place = {
            "rank": rank,
            "objective": self.space.objective,
            "on_front": outcome in self.front,
            "plan": outcome.candidate.override,
            "full_ratio": outcome.full_ratio,
            "why": reason(outcome.result),
        }
        return replace(outcome.result, provenance=outcome.result.provenance | {"search": place})


class Search:
    """A search under way: `found` is what it has come to, whenever it is asked."""

    def __init__(self, loaded: Loaded, space: SearchSpace, top: int) -> None:
        """Raise UserError where the objective, or what thresholds leave, cannot be known."""
        _check_objective(loaded, space)
        _check_statistics(loaded, space)
        self.loaded, self.space, self.top = loaded, space, top
        self.bounds = Bounds(loaded.scenario, space.objective)
        self.counts = Exploration()
        self.bounded: list[tuple[Bound, Candidate]] = []
        self.wanted: list[Wanted] = []
        self.plans = 0

    def prepare(self) -> None:
        """Make the plans, with what each is at least."""
        for each in candidates(self.loaded.scenario, self.space, Batches(self.bounds)):
            self.plans += 1
            try:
                self.bounded.append((self.bounds.of(each.plan), each))
            except UserError:
                self.counts.refused += 1
        there = {name for name, holds in RIVALS.items() if any(holds(each) for _, each in self.bounded)}
        self.wanted = [Wanted("best", self.top, lambda each: True)]
        self.wanted += [Wanted(name, 1, holds) for name, holds in RIVALS.items() if name in there]

    def run(self, workers: Workers, told: Callable[[int, int], None] = lambda done, plans: None) -> None:
        """Simulate what can be wanted; `told` hears (plans done with, of how many)."""
        until_s = time.monotonic() + self.space.seconds if self.space.seconds else math.inf
        self.prepare()
        judge = partial(_judged, loaded=self.loaded, space=self.space)
        queue = Queue(self.bounded, self.bounds.closer)
        objective = self.space.objective
        explore(queue, self.wanted, workers, judge, self.counts, objective=objective, told=told, until_s=until_s)

    def found(self) -> Found:
        """Return the best so far."""
        outcomes = self.counts.outcomes
        best, *rivals = self.wanted or [Wanted("best", self.top, lambda each: True)]
        return Found(
            space=self.space,
            best=tuple(best.best(outcomes)),
            front=tuple(front(outcomes)),
            rivals=tuple((each.name, next(iter(each.best(outcomes)), None)) for each in rivals),
            counts=self.counts,
            plans=self.plans,
        )


def _check_objective(loaded: Loaded, space: SearchSpace) -> None:
    """Raise UserError for an objective that needs a price or power that is not known."""
    needed = {"step-time": (), "cost": ("price_usd_per_h",), "energy": ("busy_power_w", "idle_power_w")}
    for name, device in loaded.scenario.cluster.device_types.items():
        for key in needed[space.objective]:
            if getattr(device, key) is None:
                raise UserError(
                    f"{loaded.file}: search.objective = '{space.objective}': cluster.device_types.{name}.{key} is not "
                    "known; set it, or allowed: step-time"
                )


def _check_statistics(loaded: Loaded, space: SearchSpace) -> None:
    """Raise UserError where thresholds are searched and nothing tells what they leave."""
    if space.least_density is not None and loaded.scenario.workload.gradients is None:
        raise UserError(
            f"{loaded.file}: search.least_density = {space.least_density:g}: workload.gradients is missing; densities "
            "are predicted from gradient statistics (write them with `gsreal gradients`)"
        )


def _judged(
    candidate: Candidate, answer: Answer, found: Exploration, *, loaded: Loaded, space: SearchSpace
) -> Outcome | None:
    """Return what becomes of a plan that was simulated, if it fits and is wanted; count it in any case."""
    if isinstance(answer, UserError):
        found.refused += 1
        return None
    if isinstance(answer, RunFailedError):
        raise RunFailedError(f"{loaded.file}: {candidate.override}: {answer}")
    if isinstance(answer, Bound):
        found.ruled_out += answer.full_ratio <= 1
        found.too_large += answer.full_ratio > 1
        return None
    found.simulated += 1
    if not answer.fits:
        found.too_large += 1
        return None
    density = answer.density.push
    if space.least_density is not None and density is not None and density < space.least_density:
        found.unwanted += 1
        return None
    values = {"step-time": answer.step_time_s, "cost": answer.cost_usd_per_step, "energy": answer.energy_j_per_step}
    objective = values[space.objective]
    assert objective is not None
    types = loaded.scenario.cluster.device_types
    full = full_ratio(answer, {name: device.memory_bytes for name, device in types.items()})
    return Outcome(candidate, answer, objective, full)
