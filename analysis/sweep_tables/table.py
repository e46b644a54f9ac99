"""Reader of a sweep's table (Parquet or CSV): its question, the keys that vary, and a row for each point."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import polars as pl

from analysis.compare.table import ResultFile, name_of, sweep_group, threshold_of
from gssim.errors import UserError
from gssim.execution.files import of_text_cell
from gssim.result import Result
from gssim.scenario.sweep import SEPARATOR
from gssim.sweeps import POINT_COLUMNS, RESULT_COLUMNS, columns_of, files_of, kind_of, outcome, table_of

THRESHOLD = "plan.push.threshold"
METHOD = "plan.method"
BANDWIDTH = "bandwidth_bytes_per_s"
"""Suffix of the axes that are bandwidths."""
FITS = "fits"
NOT_FITTING = "does not fit"

Row = dict[str, Any]


@dataclass(frozen=True)
class SweepTable:
    """All points of a sweep."""

    name: str
    """Name of the file, without its suffix."""
    question: str
    axes: tuple[str, ...]
    """Full key paths that vary, in the order of the columns."""
    rows: tuple[Row, ...]
    sweep: str = ""
    """Name of the sweep's file; empty where the table does not state it."""

    @property
    def answered(self) -> list[Row]:
        """The rows with a prediction, which are neither invalid nor failed."""
        return [row for row in self.rows if row["status"] in (FITS, NOT_FITTING)]

    @property
    def fitting(self) -> list[Row]:
        """The rows whose plan fits every device."""
        return [row for row in self.rows if row["status"] == FITS]


def is_table(path: Path) -> bool:
    """Return whether a file has the columns of a sweep's table."""
    try:
        columns = _columns(path)
    except (OSError, UserError, pl.exceptions.PolarsError):
        return False
    return _missing(columns) is None


def read_table(path: Path) -> SweepTable:
    """Return the sweep's table in a Parquet or CSV file; raise UserError for any other file.

    The question of a CSV table is taken from the Parquet file beside it, if there is one.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        columns = _columns(path)
        missing = _missing(columns)
        if missing is not None:
            raise UserError(f"{path}: not a sweep's table: no column '{missing}'; `gssim sweep --out FILE` writes one")
        frame = _in_types(pl.read_parquet(path) if path.suffix == ".parquet" else _read_csv(path))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{path}: cannot be read as a table: {str(error).splitlines()[0]}") from None
    axes = tuple(column for column in columns if column not in (*POINT_COLUMNS, *RESULT_COLUMNS))
    nested = [name for name, kind in frame.schema.items() if kind.is_nested() or kind == pl.Object]
    if nested:
        raise UserError(f"{path}: {nested[0]}: holds tables or lists; a sweep's table holds numbers and texts")
    rows = tuple(_checked(row, path) for row in frame.iter_rows(named=True))
    if not rows:
        raise UserError(f"{path}: a table without points")
    try:
        metadata = dict(pl.read_parquet_metadata(files_of(path)[0]))
    except (OSError, pl.exceptions.PolarsError):  # only a CSV file
        metadata = {}
    return SweepTable(path.stem, metadata.get("question", ""), axes, rows, metadata.get("sweep", ""))


def table_from(files: Sequence[ResultFile], *, name: str) -> SweepTable:
    """Return predictions as a table, whose only axis is the threshold (where any prediction has one)."""
    results = [file.result for file in files]
    rows = [_row(result) for result in results]
    thresholds = [row[THRESHOLD] for row in rows]
    axes = (THRESHOLD,) if any(each is not None for each in thresholds) else ()
    columns = columns_of({key: kind_of(thresholds) for key in axes})
    questions = list(dict.fromkeys(str(result.scenario.get("question") or "") for result in results))
    frame = table_of(rows, columns)
    return SweepTable(name, questions[0] if len(questions) == 1 else "", axes, tuple(frame.iter_rows(named=True)))


def _row(result: Result) -> Row:
    name = name_of(result)
    threshold = threshold_of(result)
    return {
        "point": name,
        "group": sweep_group(result),
        "variant": name.partition(SEPARATOR)[2] or name,
        THRESHOLD: None if threshold is None else float(threshold),
        **outcome(result),
    }


def _columns(path: Path) -> list[str]:
    frame = pl.scan_parquet(path) if path.suffix == ".parquet" else pl.scan_csv(path, infer_schema=False)
    return frame.collect_schema().names()


def _missing(columns: Sequence[str]) -> str | None:
    return next((column for column in (*POINT_COLUMNS, *NEEDED) if column not in columns), None)


NEEDED = ("status", "method", "cluster", "model", "ranks", "step_time_s", "peak_allocated_bytes", "push_density_ratio")


def _read_csv(path: Path) -> pl.DataFrame:
    """Return the columns of a CSV file in the types of the table; types of the axes are inferred."""
    types: dict[Any, Any] = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}
    known = {name: types[kind] for name, kind in (POINT_COLUMNS | RESULT_COLUMNS).items()}
    columns = _columns(path)
    return pl.read_csv(
        path, schema_overrides={name: known[name] for name in columns if name in known}, infer_schema_length=None
    )


def _in_types(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a table with its known columns cast to their types; raise PolarsError where a value does not fit."""
    types: dict[Any, Any] = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}
    known = {name: types[kind] for name, kind in (POINT_COLUMNS | RESULT_COLUMNS).items() if name in frame.columns}
    texts = [name for name, kind in frame.schema.items() if kind == pl.String and name not in known]
    cast = frame.with_columns(pl.col(name).cast(kind, strict=True) for name, kind in known.items())
    texts += [name for name, kind in known.items() if kind == pl.String]
    return cast.with_columns(
        pl.Series(name, [each and of_text_cell(each) for each in cast[name]], dtype=pl.String) for name in texts
    )


def _checked(row: Row, path: Path) -> Row:
    """Return the row; raise UserError where it lacks values that charts need, or has invalid ones."""
    for column, value in row.items():
        if isinstance(value, float) and column in RESULT_COLUMNS and not isfinite(value):
            raise UserError(f"{path}: {row['point']}: {column} = {value}: must be finite")
    for column in POINT_COLUMNS:
        if row[column] is None and column != "variant":
            raise UserError(f"{path}: {column}: a row has none")
    if row["status"] in (FITS, NOT_FITTING):
        for column in ("step_time_s", "peak_allocated_bytes"):
            value = row[column]
            if value is None or not 0 <= value < inf:
                raise UserError(f"{path}: {row['point']}: {column} = {value}: must be finite and not negative")
    return row


# What a point is -----------------------------------------------------------------------------------------------------


def is_dense(row: Row) -> bool:
    """Return whether the point has no threshold, neither of push nor of publish."""
    return row["push_density_ratio"] is None and row.get("publish_density_ratio") is None


def is_control(row: Row) -> bool:
    """Return whether the point is a control, in which nothing is pushed."""
    return row.get(THRESHOLD) == inf or row["push_density_ratio"] == 0


def peak_bytes(row: Row) -> float:
    """Return the largest peak of a rank: reserved bytes or, where unknown, allocated bytes."""
    reserved = row.get("peak_reserved_bytes")
    return float(row["peak_allocated_bytes"] if reserved is None else reserved)
