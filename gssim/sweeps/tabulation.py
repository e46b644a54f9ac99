"""Makes the table of a sweep: predicts every point as a row, and stores finished rows until the table is complete.

Rows of an unfinished table are stored in a folder beside it as they become available. The next run reuses them, and
they are removed when the table is complete. Only one run at a time writes: it holds the table's lock.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gssim.errors import MistakenNameError, RunFailedError, UserError
from gssim.execution import RecordStore, Workers
from gssim.execution.cache import Shared
from gssim.execution.files import locked, remove_partial
from gssim.scenario.sweep import Point, Sweep, axis_keys
from gssim.sweeps.inputs import Fingerprints, digest_of, packed
from gssim.sweeps.predictions import Fault, answers, by_likeness, predicted
from gssim.sweeps.table import (
    POINT_COLUMNS,
    Kind,
    Row,
    Status,
    columns_of,
    existing_table,
    files_of,
    kind_of,
    lock_of,
    outcome,
    table_of,
    without_outcome,
    write_table,
)

if TYPE_CHECKING:
    import polars


def parts_folder(file: Path) -> Path:
    """Return the folder in which the rows of a table are stored until the table is complete.

    >>> str(parts_folder(Path("out/table.csv")))
    'out/table.parquet.parts'
    """
    parquet = files_of(file)[0]
    return parquet.with_name(f"{parquet.name}.parts")


ROWS_IN_MEMORY = 10_000
"""Number of rows that are converted to the table at once."""


def tabulate(
    points: Sequence[Point],
    *,
    sweep: Sweep,
    file: Path,
    out: Path,
    workers: AbstractContextManager[Workers],
    again: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, points: None,
) -> "polars.DataFrame":
    """Return the table of the sweep in `file`, after writing it to `out` as Parquet and CSV.

    Rows are stored beside it until the table is complete. Rows of an earlier run, or a complete table, are reused if
    all their inputs are unchanged, unless `again`. Raises UserError if no point can be simulated, if one names a
    missing file or key, or if another process writes there.
    """
    with locked(lock_of(out), place=str(out)):
        fingerprints = list(map(Fingerprints().of_point, points))
        metadata = {"question": sweep.question, "sweep": file.name, "made_from": digest_of(fingerprints)}
        whole = None if again else existing_table(out, metadata)
        if whole is not None and "failed" not in whole["status"]:  # failed points are tried again
            RecordStore(parts_folder(out), ()).remove()  # rows left by a run that was killed
            for each in files_of(out):
                remove_partial(each)
            on_progress(len(points), len(points))
            return whole
        parts = RecordStore(parts_folder(out), set(fingerprints))
        if again:
            parts.remove()
            parts = RecordStore(parts.folder, ())
        try:
            missing = [place for place in by_likeness(points) if fingerprints[place] not in parts]
            on_progress(len(points) - len(missing), len(points))
            _check_names(points, file)
            if missing:
                with workers as pool:
                    for place, row in _rows(points, missing, pool, file):
                        parts.keep(fingerprints[place], row)
                        on_progress(len(parts), len(points))
            table = _table(points, fingerprints, parts, axis_keys(sweep))
        finally:
            parts.close()
        wrong = [reason for status, reason in zip(table["status"], table["reason"], strict=True) if status == "invalid"]
        if len(wrong) == table.height:  # then the sweep itself is invalid
            more = f" (and {len(wrong) - 1} more points)" if len(wrong) > 1 else ""
            raise UserError(f"{file}: no point is valid: {table['point'][0]}: {wrong[0]}{more}")
        write_table(table, out, metadata=metadata)
        parts.remove()
        return table


def row_of(point: Point, shared: Shared) -> Row:
    """Return the outcome of a point's prediction; raise UserError or RunFailedError without one."""
    return outcome(predicted(point, shared, spread=False, listed=False))  # which the table does not show


def _check_names(points: Sequence[Point], file: Path) -> None:
    """Raise UserError for a missing key or file in the first point of a group, since all its points would report it."""
    shared = Shared()
    for point in {(point.group, point.variant): point for point in reversed(points)}.values():
        try:
            point.load(shared=shared)
        except MistakenNameError as error:
            raise _mistaken(point, error, file) from None
        except UserError:
            continue  # the point's row will report it


def _mistaken(point: Point, error: Fault, file: Path) -> UserError:
    return UserError(f"{file}: {point.name}: {error}")


def _rows(points: Sequence[Point], places: Sequence[int], workers: Workers, file: Path) -> Iterator[tuple[int, Row]]:
    """Yield rows as they become available, each with the index of its point."""
    files = packed(points[place] for place in places) if workers.is_remote else None
    for place, made in answers(points, places, row_of, workers, files=files):
        if isinstance(made, MistakenNameError):
            raise _mistaken(points[place], made, file)
        if isinstance(made, Fault):
            status: Status = "failed" if isinstance(made, RunFailedError) else "invalid"
            yield place, without_outcome(status, str(made).removeprefix(f"{points[place].file}: "))
        else:
            yield place, made


def _table(
    points: Sequence[Point], fingerprints: Sequence[str], parts: RecordStore, keys: Sequence[str]
) -> "polars.DataFrame":
    """Return rows in the order of points, with the columns of the points themselves."""
    kinds: dict[str, Kind] = {key: kind_of([point.values[i] for point in points]) for i, key in enumerate(keys)}
    columns = columns_of(kinds)

    def point_row(point: Point) -> Row:
        values = {
            key: value if value is None or kinds[key] is not str else str(value)
            for key, value in zip(keys, point.values, strict=True)
        }
        return dict(zip(POINT_COLUMNS, (point.name, point.group, point.variant), strict=True)) | values

    rows = (point_row(point) | row for point, row in zip(points, parts.records(fingerprints), strict=True))
    table = table_of(islice(rows, ROWS_IN_MEMORY), columns)
    while (more := table_of(islice(rows, ROWS_IN_MEMORY), columns)).height:
        table.extend(more)
    return table
