"""Which thresholds a study of their price allows: those whose change of the last loss is within what the user allows.

A study's table has a row for each variant that was trained (`analysis convergence` writes one). It says the threshold
and its kind, but not what else a variant changed: of several with the same threshold the worst counts.
"""

import math
from pathlib import Path

from gssim.reading import read_rows
from gssim.units import UserError

COLUMNS = ("control", "threshold", "kind", "loss_change_high")


def loss_changes(file: Path, kind: str) -> dict[float, float]:
    """Return by how many nats each threshold of a kind raises the last loss, by the upper end of its interval.

    Controls, and variants of which no interval is known, are left out. Raises UserError where the file is none.
    """
    found: dict[float, float] = {}
    for number, row in enumerate(read_rows(file, COLUMNS, "a table of a study")[1], start=2):
        if row["control"] == "True" or row["kind"] != kind or not row["loss_change_high"]:
            continue
        try:
            threshold, change = float(row["threshold"]), float(row["loss_change_high"])
        except ValueError:
            threshold = change = math.nan
        if not (threshold >= 0 and math.isfinite(change)):
            said = f"{row['threshold']!r}, {row['loss_change_high']!r}"
            raise UserError(f"{file}: line {number}: threshold, loss_change_high = {said}: no numbers")
        found[threshold] = max(change, found.get(threshold, -math.inf))
    return found


def allowed(
    file: Path, kind: str, *, most_loss_change: float, thresholds: tuple[float, ...], own: float | None, scenario: str
) -> tuple[float, ...]:
    """Return the thresholds that may be searched: those asked for, or else all of the study, within the bound.

    `own`: that of the scenario's plan, which its other plans push by as well. Raises UserError, in the name of the file
    `scenario`, where the study has not measured one that is asked for.
    """
    changes = loss_changes(file, kind)
    known = ", ".join(f"{each:g}" for each in sorted(changes)) or "none"
    for key, values in (("search.thresholds", thresholds), ("plan.push.threshold", () if own is None else (own,))):
        for value in values:
            if value not in changes:
                raise UserError(f"{scenario}: {key}: {value:g} ({kind}) is not in {file}; it has: {known}")
    if own is not None and changes[own] > most_loss_change:
        raise UserError(
            f"{scenario}: plan.push.threshold = {own:g}: changes the last loss by up to {changes[own]:.3g} nats in "
            f"{file}, and search.most_loss_change allows {most_loss_change:g}"
        )
    return tuple(each for each in thresholds or sorted(changes) if changes[each] <= most_loss_change)
