"""A sweep's table, made: every point is a row, also one that does not fit, is no scenario, or fails."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gssim.chunks import Fault, answers, by_likeness
from gssim.files import locked, remove_partial
from gssim.inputs import Fingerprints, digest_of, packed
from gssim.parts import Parts, parts_folder
from gssim.predictions import predicted
from gssim.shared import Shared
from gssim.sweep import Point, Sweep, axis_keys
from gssim.table import (
    POINT_COLUMNS,
    Kind,
    Row,
    Status,
    columns_of,
    files_of,
    kind_of,
    lock_of,
    made_before,
    outcome,
    table_of,
    without_outcome,
    write_table,
)
from gssim.units import MistakenNameError, RunFailedError, UserError
from gssim.workers import Workers

if TYPE_CHECKING:
    import polars

SLICE = 10_000
"""Rows that are in memory at once, as such, when the table is made."""


def tabulate(
    points: Sequence[Point],
    *,
    sweep: Sweep,
    file: Path,
    out: Path,
    workers: AbstractContextManager[Workers],
    elsewhere: bool = False,
    again: bool = False,
    told: Callable[[int, int], None] = lambda done, points: None,
) -> "polars.DataFrame":
    """Return the table of the sweep in `file`, after it is written to `out`, Parquet and CSV.

    Rows are kept beside it as they end, until the table is whole; what a run before this one kept is taken up where all
    that it was made from is as it was, and so is a whole table; `again`: neither. `elsewhere`: the workers do not see
    this machine's files.
    Raises UserError where no point can be simulated, one names what there is not, or another process writes there.
    """
    with locked(lock_of(out), place=str(out)):
        return _tabulated(points, sweep, file, out, workers, elsewhere=elsewhere, again=again, told=told)


def _tabulated(
    points: Sequence[Point],
    sweep: Sweep,
    file: Path,
    out: Path,
    workers: AbstractContextManager[Workers],
    *,
    elsewhere: bool,
    again: bool,
    told: Callable[[int, int], None],
) -> "polars.DataFrame":
    """Return the table, after it is written; see `tabulate`."""
    fingerprints = list(map(Fingerprints().of_point, points))
    metadata = {"question": sweep.question, "sweep": file.name, "made_from": digest_of(fingerprints)}
    whole = None if again else made_before(out, metadata)
    if whole is not None and "failed" not in whole["status"]:  # what failed is tried again
        Parts(parts_folder(out), ()).remove()  # of a run that was killed before it had removed them
        for each in files_of(out):
            remove_partial(each)
        told(len(points), len(points))
        return whole
    parts = Parts(parts_folder(out), set(fingerprints))
    if again:
        parts.remove()
        parts = Parts(parts.folder, ())
    try:
        missing = [place for place in by_likeness(points) if fingerprints[place] not in parts]
        told(len(points) - len(missing), len(points))
        _check_first_ones(points, file)
        if missing:
            with workers as found:
                for place, row in _rows(points, missing, found, file, elsewhere=elsewhere):
                    parts.keep(fingerprints[place], row)
                    told(len(parts), len(points))
        table = _table(points, fingerprints, parts, axis_keys(sweep))
    finally:
        parts.close()
    _check_some(table, file)
    write_table(table, out, metadata=metadata)
    parts.remove()
    return table


def row_of(point: Point, shared: Shared) -> Row:
    """Return what a point's prediction says; raise UserError or RunFailedError where it has none."""
    return outcome(predicted(point, shared, spread=False))  # which a table does not show


def _check_first_ones(points: Sequence[Point], file: Path) -> None:
    """Raise UserError for a key or file that there is not, before all of a group's points tell the same."""
    shared = Shared()
    for point in {(point.group, point.variant): point for point in reversed(points)}.values():
        try:
            point.load(shared=shared)
        except MistakenNameError as error:
            raise _mistaken(point, error, file) from None
        except UserError:
            continue  # a row tells it


def _mistaken(point: Point, error: Fault, file: Path) -> UserError:
    return UserError(f"{file}: {point.name}: {error}")


def _rows(
    points: Sequence[Point], places: Sequence[int], workers: Workers, file: Path, *, elsewhere: bool
) -> Iterator[tuple[int, Row]]:
    """Yield rows by the places of their points, as they end."""
    files = packed(points[place] for place in places) if elsewhere else None
    for place, made in answers(points, places, row_of, workers, files=files):
        if isinstance(made, MistakenNameError):
            raise _mistaken(points[place], made, file)
        if isinstance(made, Fault):
            status: Status = "failed" if isinstance(made, RunFailedError) else "invalid"
            yield place, without_outcome(status, str(made).removeprefix(f"{points[place].file}: "))
        else:
            yield place, made


def _table(
    points: Sequence[Point], fingerprints: Sequence[str], parts: Parts, keys: Sequence[str]
) -> "polars.DataFrame":
    """Return rows in the order of points, with what is known of the points themselves."""
    kinds: dict[str, Kind] = {key: kind_of([point.values[i] for point in points]) for i, key in enumerate(keys)}
    columns = columns_of(kinds)
    rows = (_of_point(point, keys, kinds) | row for point, row in zip(points, parts.rows(fingerprints), strict=True))
    table = table_of(islice(rows, SLICE), columns)
    while (more := table_of(islice(rows, SLICE), columns)).height:
        table.extend(more)
    return table


def _of_point(point: Point, keys: Sequence[str], kinds: dict[str, Kind]) -> Row:
    values = {
        key: value if value is None or kinds[key] is not str else str(value)
        for key, value in zip(keys, point.values, strict=True)
    }
    return dict(zip(POINT_COLUMNS, (point.name, point.group, point.variant), strict=True)) | values


def _check_some(table: "polars.DataFrame", file: Path) -> None:
    """Raise UserError where every point is invalid: then the sweep is."""
    wrong = [reason for status, reason in zip(table["status"], table["reason"], strict=True) if status == "invalid"]
    if len(wrong) == table.height:
        more = f" (and {len(wrong) - 1} more points)" if len(wrong) > 1 else ""
        raise UserError(f"{file}: no point is valid: {table['point'][0]}: {wrong[0]}{more}")
