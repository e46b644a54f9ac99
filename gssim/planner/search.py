"""Search for the best plans for a scenario's cluster and model: enumerate, bound, simulate, explain.

Every plan of the space gets lower bounds of its step time and memory ([Note: bounds] in `bounds`). The most promising
plans are simulated first. A plan is never simulated if its bound shows that it can be neither among the best nor on the
front of time and memory. The result is the same as if every plan were simulated.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gssim.errors import RunFailedError, UserError
from gssim.execution import Workers
from gssim.execution.cache import Shared
from gssim.execution.garbage import no_collection
from gssim.plan import METHODS
from gssim.plan.shard_sizing import import_solver
from gssim.planner.advice import with_suggested_changes
from gssim.planner.batches import PLAN, Batches
from gssim.planner.bounds import Bound, Bounds
from gssim.planner.candidates import Candidate, RefusedPlans, allowed_thresholds, candidates
from gssim.planner.explore import Answer, Exploration, Explorer, Outcome, RankedSet, TooSparse, front
from gssim.planner.objectives import objective_of
from gssim.planner.reasons import full_ratio, reason, why_worse
from gssim.result import Result
from gssim.scenario import Loaded, SearchSpace, check
from gssim.simulation import simulate

MAX_TRIED = 50
"""Most plans that are tried until one can run."""
BEGIN_S, LOOK_S = 0.05, 0.005
"""Seconds after which the enumeration of plans looks whether a worker is idle: at first, and then each time. The first
plans are hardly the best, but else the worker would be idle. (The scenario's own plan, which is compared with the best
in any case, is handed out at once.)
"""


@dataclass(frozen=True)
class Counterpart:
    """A plan with which the best is compared."""

    name: str
    candidate: Candidate
    result: Result | None
    """Result of the plan; None if it cannot run."""
    refusal: str = ""
    """Reason why it cannot run."""


OWN = "the scenario's own plan"


def counterparts(
    loaded: Loaded, best: Candidate, shared: Shared, known: Mapping[str, Result]
) -> tuple[Counterpart, ...]:
    """Return the best plan with even shares, and the best plan with shares proportional to compute.

    `known`: Results of plans that have been simulated, by scenario_id.
    """
    even = {"batch": "even", "shards": "even"}
    compute = {"batch": "throughput", "shards": "compute" if METHODS[best.plan.method].is_gradient_sharding else "even"}

    def with_shares(name: str, rules: dict[str, str]) -> Counterpart:
        table = {**best.table, "shares": rules}
        return _simulated(loaded, name, Candidate(best.index, table, PLAN.validate_python(table)), shared, known)

    return (
        with_shares("the first with even shares", even),
        with_shares("the first with shares proportional to compute", compute),
    )


def _simulated(
    loaded: Loaded, name: str, candidate: Candidate, shared: Shared, known: Mapping[str, Result]
) -> Counterpart:
    try:
        changed = _with_plan(loaded, candidate)
        # plans with thresholds were simulated without `step_time_p10_s` and without their band
        same = None if changed.statistics_needed else known.get(changed.scenario.identity(shared))
        return Counterpart(name, candidate, same or simulate(changed, shared=shared).result)
    except UserError as error:
        return Counterpart(name, candidate, None, str(error).removeprefix(f"{loaded.file}: "))


def nearest(loaded: Loaded, bounded: Iterable[tuple[Bound, Candidate]]) -> tuple[Candidate, Result] | None:
    """Return the plan whose memory bound is the lowest, and its Result with suggested changes.

    None if no plan can run, whatever the memory.
    """
    order = sorted(bounded, key=lambda entry: (entry[0].full_ratio, entry[0].time_s, entry[1].index))
    for _, candidate in order[:MAX_TRIED]:
        try:
            changed = _with_plan(loaded, candidate)
            shared = Shared()
            return candidate, with_suggested_changes(changed, simulate(changed, shared=shared).result, shared=shared)
        except UserError:
            continue
    return None


def _with_plan(loaded: Loaded, candidate: Candidate) -> Loaded:
    """Return the scenario with another plan; raise UserError if that cannot run."""
    scenario = replace(loaded.scenario, plan=candidate.plan)
    check(scenario, file=loaded.file)
    return replace(loaded, scenario=scenario, gradients=loaded.gradients if scenario.plan.sends_by_data else None)


RIVALS: dict[str, Callable[[Candidate], bool]] = {
    OWN: lambda each: each.index == 0,
    "best with even shares": lambda each: each.plan.shares.batch == each.plan.shares.shards == "even",
    "best with shares proportional to compute": lambda each: (
        each.plan.shares.shards == "compute" and each.plan.shares.batch == "throughput"
    ),
}
"""Conditions that select the plans with which the best is compared. The last is Gradient Sharding as in its paper."""


@dataclass(frozen=True)
class Found:
    """Results of a search, final or so far."""

    space: SearchSpace
    best: tuple[Outcome, ...]
    """The best plans, in the order of the objective."""
    front: tuple[Outcome, ...]
    """The plans on the front of time and memory, the fastest first."""
    rivals: tuple[tuple[str, Outcome | None], ...]
    """Plans with which the best is compared, by name; None: no such plan fits."""
    counts: Exploration
    plans: int
    counterparts: tuple[Counterpart, ...] = ()
    """The best plan with other shares; empty if the search was interrupted."""
    nearest: tuple[Candidate, Result] | None = None
    """If no plan fits: the one that needs the least memory, and its Result with suggested changes."""

    def results(self) -> list[Result]:
        """Return the best plans' Results in order, then the others on the front.

        `provenance.search` has each plan's rank (None for the others), whether it is on the front, the plan as `--set`
        takes it, how full its fullest device is, and its bottleneck. The first also has comparisons, and the plans of
        the space that were left out.
        """
        others = [each for each in self.front if each not in self.best]
        ranked = [*enumerate(self.best, start=1), *((None, each) for each in others)]
        return [self._with_rank(each, rank) for rank, each in ranked]

    def comparisons(self, best: Outcome) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield comparisons with the best plan by name: the other plan, its objective, why it is worse, if known."""
        told = {each.name for each in self.counterparts}
        for name, rival in self.rivals:
            if name in told:
                continue
            if rival is None:
                yield name, {"why": "none so far that fits" if self.counts.left else "none fits"}
            else:
                yield name, _comparison(best, rival.candidate, rival.result, rival.objective)
        for each in self.counterparts:
            if each.result is None:
                yield each.name, {"plan": each.candidate.override, "why": f"cannot run: {each.refusal}"}
            else:
                value = objective_of(each.result, self.space.objective)
                same = each.result.scenario_id == best.result.scenario_id and each.name != OWN
                found = _comparison(best, each.candidate, each.result, value)
                yield each.name, found | ({"why": "the same: these shares are its own"} if same else {})

    def _with_rank(self, outcome: Outcome, rank: int | None) -> Result:
        place: dict[str, Any] = {
            "rank": rank,
            "objective": self.space.objective,
            "on_front": outcome in self.front,
            "plan": outcome.candidate.override,
            "full_ratio": outcome.full_ratio,
            "why": reason(outcome.result),
        }
        if rank == 1:
            place["others"] = {name: said for name, said in self.comparisons(outcome)}
            place["left_out"] = self.counts.left_out.rows()
        return replace(outcome.result, provenance=outcome.result.provenance | {"search": place})


def _comparison(best: Outcome, candidate: Candidate, other: Result, objective: float) -> dict[str, Any]:
    """Return how much worse a plan is than the best, and why."""
    if other.scenario_id == best.result.scenario_id:
        return {"plan": candidate.override, "why": "it is the first"}
    return {
        "plan": candidate.override,
        "step_time_s": other.step_time_s if other.fits else None,
        "more_ratio": objective / best.objective - 1 if other.fits and best.objective else None,
        "why": why_worse(best.result, other),
    }


class Search:
    """A running search: `found` returns its results at any time."""

    def __init__(self, loaded: Loaded, space: SearchSpace, top: int) -> None:
        """Raise UserError if the objective (without known prices or powers), or the density of thresholds, cannot be
        predicted.
        """
        if loaded.scenario.run.extrapolate_micro_batches:
            raise UserError(
                f"{loaded.file}: run.extrapolate_micro_batches = true: a search bounds and compares whole steps; "
                "allowed: false"
            )
        needed = {"step-time": (), "cost": ("price_usd_per_h",), "energy": ("busy_power_w", "idle_power_w")}
        for name, device in loaded.scenario.cluster.device_types.items():
            for key in needed[space.objective]:
                if getattr(device, key) is None:
                    raise UserError(
                        f"{loaded.file}: search.objective = '{space.objective}': cluster.device_types.{name}.{key} is "
                        "not known; set it, or allowed: step-time"
                    )
        space = _with_allowed_thresholds(loaded, space)
        _check_statistics(loaded, space)
        self.loaded, self.space, self.top = loaded, space, top
        self.bounds = Bounds(loaded.scenario, space.objective)
        self.counts = Exploration(left_out=RefusedPlans(loaded.file))
        self.bounded: list[tuple[Bound, Candidate]] = []
        self.plans = 0
        self.own: list[Candidate] = []
        """The scenario's own plan, as one element, once `prepare` has run."""
        types = {device.type for device in loaded.scenario.cluster.devices}
        if "cost" in space.shards and len(types) > 1:  # processes are forked later
            import_solver()
        wanted = [RankedSet("best", top, lambda each: True)]
        wanted += [RankedSet(name, 1, holds) for name, holds in RIVALS.items()]
        self.explorer = Explorer(
            wanted,
            self.bounds.closer,
            partial(_outcome_of, loaded=loaded, space=space),
            self.counts,
            source=loaded.scenario.source,
            objective=space.objective,
            least_density=space.least_density,
            until_s=time.monotonic() + space.seconds if space.seconds else math.inf,
        )
        self.counterparts: tuple[Counterpart, ...] = ()
        self.nearest: tuple[Candidate, Result] | None = None

    def prepare(self, workers: Workers | None = None) -> None:
        """Enumerate the plans and their lower bounds; `workers` judge the most promising ones meanwhile, and have begun
        when this ends.
        """
        look_s = time.monotonic() + BEGIN_S
        try:
            with no_collection():
                for each in candidates(self.loaded.scenario, self.space, Batches(self.bounds), self.counts.left_out):
                    self.plans += 1
                    self.own = self.own or [each]
                    try:
                        bound = self.bounds.of(each.plan)
                    except UserError as error:
                        self.counts.refuse(each, error)
                        continue
                    self.bounded.append((bound, each))
                    self.explorer.add(bound, each)
                    if workers is not None and (each.index == 0 or time.monotonic() > look_s):
                        self.explorer.advance(workers)
                        look_s = time.monotonic() + (LOOK_S if each.index else BEGIN_S)
                if workers is not None:
                    self.explorer.advance(workers)
        except KeyboardInterrupt:
            self.explorer.leave()
            raise

    def run(self, workers: Workers, on_progress: Callable[[int, int], None] = lambda done, plans: None) -> None:
        """Judge the prepared plans; `on_progress` is called with (plans done, total)."""
        with no_collection():
            self.explorer.run(workers, on_progress)
        best = self.found().best
        if best:
            self.counterparts = self._counterparts(best[0].candidate)
        elif not self.counts.left:
            self.nearest = nearest(self.loaded, self.bounded)

    def _counterparts(self, best: Candidate) -> tuple[Counterpart, ...]:
        """Return the best plan with other shares, and the scenario's own if it does not fit."""
        shared = Shared()
        known = {each.result.scenario_id: each.result for each in self.counts.outcomes}
        found = counterparts(self.loaded, best, shared, known)
        if any(each.candidate.index == 0 for each in self.counts.outcomes):
            return found
        return (*(_simulated(self.loaded, OWN, each, shared, {}) for each in self.own), *found)

    def found(self) -> Found:
        """Return the results so far."""
        outcomes = self.counts.outcomes
        best, *kinds = self.explorer.wanted
        rivals = [kind for kind in kinds if any(kind.holds(each) for _, each in self.bounded)]
        return Found(
            space=self.space,
            best=tuple(best.best(outcomes)),
            front=tuple(front(outcomes)),
            rivals=tuple((each.name, next(iter(each.best(outcomes)), None)) for each in rivals),
            counts=self.counts,
            plans=self.plans,
            counterparts=self.counterparts,
            nearest=self.nearest,
        )


def _with_allowed_thresholds(loaded: Loaded, space: SearchSpace) -> SearchSpace:
    """Return the space with only those thresholds that its study allows, if it names a study."""
    if space.study is None or space.most_loss_change is None:
        return space
    push = loaded.scenario.plan.push
    found = allowed_thresholds(
        Path(space.study),
        push.kind,
        most_loss_change=space.most_loss_change,
        thresholds=space.thresholds,
        own=push.threshold,
        scenario=loaded.file,
    )
    return replace(space, thresholds=found)


def _check_statistics(loaded: Loaded, space: SearchSpace) -> None:
    """Raise UserError where thresholds are searched without gradient statistics."""
    if space.searches_thresholds and loaded.scenario.workload.gradients is None:
        key = "least_density" if space.least_density is not None else "most_loss_change"
        raise UserError(
            f"{loaded.file}: search.{key} = {getattr(space, key):g}: workload.gradients is missing; densities "
            "are predicted from gradient statistics (write them with `gsreal gradients`, or say 'transferred' to take "
            "those of the model's family)"
        )


def _outcome_of(
    candidate: Candidate, answer: Answer, found: Exploration, *, loaded: Loaded, space: SearchSpace
) -> Outcome | None:
    """Return the outcome of a simulated plan, if it fits and meets the conditions; count it in any case."""
    if isinstance(answer, UserError):
        found.refuse(candidate, answer)
        return None
    if isinstance(answer, RunFailedError):
        raise RunFailedError(f"{loaded.file}: {candidate.override}: {answer}")
    if isinstance(answer, Bound):
        found.ruled_out += answer.full_ratio <= 1
        found.too_large += answer.full_ratio > 1
        return None
    if isinstance(answer, TooSparse):
        found.unwanted += 1
        return None
    found.simulated += 1
    if not answer.fits:
        found.too_large += 1
        return None
    density = answer.density.push
    if space.least_density is not None and density is not None and density < space.least_density:
        found.unwanted += 1
        return None
    objective = objective_of(answer, space.objective)
    types = loaded.scenario.cluster.device_types
    full = full_ratio(answer, {name: device.memory_bytes for name, device in types.items()})
    return Outcome(candidate, answer, objective, full)
