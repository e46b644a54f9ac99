"""Which of a sweep's points are there: those that `keep` and `skip` leave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gssim.scenario import load_scenario
from gssim.shared import Shared
from gssim.sweep.axes import is_rate, shown
from gssim.sweep.conditions import Condition, condition
from gssim.units import UserError

OF_THE_CLUSTER = ("ranks", "devices")
"""Facts for which a point's scenario must be loaded."""
FACTS = ("group", "variant", *OF_THE_CLUSTER)
DECIDING = ("cluster", "workload.model", "workload.global_batch_size", "plan.method", "plan.dp_", "plan.tp", "plan.pp")
"""How the keys begin that decide how many ranks there are, in a scenario that is one without the others too."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true of a point beside what it sets."""

    group: str
    variant: str | None
    file: Path
    overrides: tuple[str, ...]
    shared: Shared

    def sizes(self) -> dict[str, int] | None:
        """Return the point's ranks and devices; None where it is no scenario."""
        deciding = tuple(e for e in self.overrides if e.startswith(DECIDING) and not is_rate(e.partition("=")[0]))
        found = self.shared.once("sizes", (self.file, deciding), lambda: self._sizes(deciding), most=4096)
        return found if found is not None else self._sizes(self.overrides)

    def _sizes(self, overrides: Sequence[str]) -> dict[str, int] | None:
        try:
            found = load_scenario(self.file, overrides, gradients_needed=False, shared=self.shared).scenario
            return {"ranks": found.ranks, "devices": len(found.cluster.devices)}
        except UserError:
            return None


class Choice:
    """Conditions on points."""

    def __init__(self, keep: Sequence[str], skip: Sequence[str], file: Path) -> None:
        self.keep, self.skip = tuple(map(condition, keep)), tuple(map(condition, skip))
        self.file = file

    def takes(self, values: Mapping[str, Any], facts: Facts) -> bool:
        """Return whether a point is there; raise UserError where a condition names what no point has.

        A point that is no scenario is not judged by facts that it does not have: it stays, and tells why.
        """
        for each, wanted in (*((each, True) for each in self.keep), *((each, False) for each in self.skip)):
            known = self._known(each, values, facts)
            if known is not None and self._holds(each, known) != wanted:
                return False
        return True

    def _holds(self, each: Condition, known: Mapping[str, Any]) -> bool:
        try:
            return each.holds(known)
        except UserError as error:
            raise UserError(f"{self.file}: {error}") from None

    def _known(self, each: Condition, values: Mapping[str, Any], facts: Facts) -> dict[str, Any] | None:
        """Return what a condition names of a point; None where it is not to be known."""
        known: dict[str, Any] = {key: shown(key, values[key]) for key in each.names if key in values}
        known |= {name: getattr(facts, name) for name in ("group", "variant") if name in each.names}
        if not each.names.isdisjoint(OF_THE_CLUSTER):
            sizes = facts.sizes()
            if sizes is None:
                return None
            known |= sizes
        return known
