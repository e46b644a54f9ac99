"""Plans for comparison with the best one: the same plan with other batch splits and shard sizes, and the nearest plan
to fitting.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gssim.cache import Shared
from gssim.errors import UserError
from gssim.plan import METHODS
from gssim.planner.advice import with_suggested_changes
from gssim.planner.batches import PLAN
from gssim.planner.bounds import Bound
from gssim.planner.candidates import Candidate
from gssim.result import Result
from gssim.scenario import Loaded, check
from gssim.simulation import simulate

MAX_TRIED = 50
"""Number of plans tried until one can run."""


@dataclass(frozen=True)
class Counterpart:
    """A plan with which the best is compared."""

    name: str
    candidate: Candidate
    result: Result | None
    """None where it cannot run."""
    refusal: str = ""
    """Reason why it cannot run."""


OWN = "the scenario's own plan"


def own_plan(loaded: Loaded, own: Candidate, shared: Shared) -> Counterpart:
    """Return the scenario's own plan, where it is not among those that fit."""
    return _simulated(loaded, OWN, own, shared)


def counterparts(loaded: Loaded, best: Candidate, shared: Shared) -> tuple[Counterpart, ...]:
    """Return the best plan with even shares, and with shares in proportion to compute."""
    even = {"batch": "even", "shards": "even"}
    compute = {"batch": "throughput", "shards": "compute" if METHODS[best.plan.method].is_gradient_sharding else "even"}
    return (
        _with_shares(loaded, best, "the first with even shares", even, shared),
        _with_shares(loaded, best, "the first with shares proportional to compute", compute, shared),
    )


def _with_shares(loaded: Loaded, best: Candidate, name: str, rules: dict[str, str], shared: Shared) -> Counterpart:
    table = {**best.table, "shares": rules}
    return _simulated(loaded, name, Candidate(best.index, table, PLAN.validate_python(table)), shared)


def _simulated(loaded: Loaded, name: str, candidate: Candidate, shared: Shared) -> Counterpart:
    try:
        return Counterpart(name, candidate, simulate(_with_plan(loaded, candidate), shared=shared).result)
    except UserError as error:
        return Counterpart(name, candidate, None, str(error).removeprefix(f"{loaded.file}: "))


def nearest(loaded: Loaded, bounded: Iterable[tuple[Bound, Candidate]]) -> tuple[Candidate, Result] | None:
    """Return the plan with the least memory by its bound, and its Result with suggested changes.

    None where no plan can run whatever the memory.
    """
    order = sorted(bounded, key=lambda entry: (entry[0].full_ratio, entry[0].time_s, entry[1].index))
    for _, candidate in order[:MAX_TRIED]:
        try:
            changed = _with_plan(loaded, candidate)
            return candidate, with_suggested_changes(changed, simulate(changed).result)
        except UserError:
            continue
    return None


def _with_plan(loaded: Loaded, candidate: Candidate) -> Loaded:
    """Return the scenario with another plan; raise UserError where it cannot run."""
    scenario = replace(loaded.scenario, plan=candidate.plan)
    check(scenario, file=loaded.file)
    return replace(loaded, scenario=scenario, gradients=loaded.gradients if scenario.plan.sends_by_data else None)
