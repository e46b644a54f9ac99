"""Search of a folder for the contents of a report: Results, comparison and sweep tables, studies, traces."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from analysis.compare.comparison import COLUMNS, Joined, compare, doubts, join
from analysis.compare.groups import group_table
from analysis.compare.rivals import COLUMNS as RIVAL_COLUMNS
from analysis.compare.rivals import rival_table
from analysis.compare.table import ResultFile, find_results
from analysis.compare.timeline import Step, read_step
from analysis.sweep_tables import SweepTable, is_table, read_table, table_from, table_of_search
from gssim.errors import UserError
from gssim.execution.files import check_text_name, number_in, read_json, read_rows, read_text
from gssim.result import EXPOSED_COPIES, PHASES, SCHEMA, Result
from gssim.units import validated

FEWEST_PREDICTIONS = 2
"""Fewest predictions without measurements that are reported as a sweep."""
MOST_TIMELINES = 4


@dataclass(frozen=True)
class Comparison:
    """The tables of a comparison, and its Results where the folder has them."""

    place: str
    table: pl.DataFrame
    groups: pl.DataFrame
    rivals: pl.DataFrame
    predicted: tuple[Result, ...] = ()
    measured: tuple[Result, ...] = ()
    doubts: tuple[str, ...] = ()
    """Reasons to doubt measurements: other work on the machine, or a change of its speed."""


@dataclass(frozen=True)
class Training:
    """The output of `analysis convergence`: table, findings and pictures of a study."""

    place: str
    rows: tuple[dict[str, str], ...]
    findings: tuple[str, ...]
    pictures: tuple[Path, ...]
    budgets: tuple[str, ...] = ()
    """Budgets at which losses are compared (equal samples, bytes, time), of a study with `together = true`."""


@dataclass(frozen=True)
class Overlay:
    """The traces of one step, predicted and measured."""

    name: str
    predicted: Step
    measured: Step
    files: tuple[str, str]


@dataclass(frozen=True)
class Contents:
    """The files of a folder that a report shows, by kind."""

    comparisons: tuple[Comparison, ...]
    sweeps: tuple[SweepTable, ...]
    studies: tuple[Training, ...]
    overlays: tuple[Overlay, ...]
    only_predicted: tuple[ResultFile, ...]
    only_measured: tuple[ResultFile, ...]


def contents_of(folder: Path) -> Contents:
    """Return the contents of a folder and its subfolders; raise UserError where it is missing or has none."""
    if not folder.is_dir():
        file = folder.is_file()
        raise UserError(
            f"{folder}: is a file; give its folder, {folder.parent}" if file else f"{folder}: no such folder"
        )
    joined = join(find_results([folder]).files)
    predicted = tuple(file for file in joined.unmatched if file.result.source == "simulated")
    # of a table in two files (Parquet and CSV), only the Parquet file
    tables = [path for path in sorted(folder.rglob("*.parquet")) if path.is_file()]
    tables += [path for path in sorted(folder.rglob("*.csv")) if not path.with_suffix(".parquet").is_file()]
    sweeps = [read_table(path) for path in tables if is_table(path)]
    for path in sorted(folder.rglob("*.json")):
        try:
            data = read_json(path)
        except UserError:  # no JSON: find_results has judged it
            continue
        if (plans := _plans_in(path, data)) is not None:
            sweeps.append(plans)
    if len(predicted) >= FEWEST_PREDICTIONS and not joined.pairs and not sweeps and all(map(_is_whole, predicted)):
        sweeps.append(table_from(predicted, name=folder.name))
    contents = Contents(
        comparisons=tuple(_comparisons(folder, joined)),
        sweeps=tuple(sweeps),
        studies=tuple(_studies(folder)),
        overlays=tuple(_overlays(folder)),
        only_predicted=predicted,
        only_measured=tuple(file for file in joined.unmatched if file.result.source == "measured"),
    )
    if not any((contents.comparisons, contents.sweeps, contents.studies, contents.overlays, joined.unmatched)):
        raise UserError(
            f"{folder}: nothing to report: no Results, no table of `gssim sweep`, no comparison.csv, no convergence.csv"
        )
    return contents


def read_points(path: Path) -> SweepTable:
    """Return the points of a sweep's table, or the plans that `gssim search --json` printed into a file."""
    if path.suffix != ".json":
        return read_table(path)
    plans = _plans_in(path, read_json(path))
    if plans is None:
        raise UserError(f"{path}: no plans of a search; `gssim search --json` prints them")
    return plans


def _plans_in(path: Path, data: object) -> SweepTable | None:
    """Return the plans of a search in a file's JSON; None if it is anything else."""
    if not isinstance(data, list) or not data:
        return None
    for each in data:
        provenance = each.get("provenance") if isinstance(each, dict) else None
        search = provenance.get("search") if isinstance(provenance, dict) else None
        if not isinstance(search, dict) or "plan" not in search or each.get("schema") != SCHEMA:
            return None
    results = [validated(Result, each, file=f"{path}: [{number}]") for number, each in enumerate(data)]
    files = [ResultFile(path, 0, result) for result in results]
    return table_of_search(files, name=path.stem) if all(map(_is_whole, files)) else None


def _is_whole(file: ResultFile) -> bool:
    """Return whether a Result has the names and phases that a sweep's table needs."""
    scenario = file.result.scenario
    tables = scenario.get("cluster"), (scenario.get("workload") or {}).get("model")
    named = all(isinstance(table, dict) and "name" in table for table in tables)
    return named and set(PHASES) <= file.result.phases_s.keys()


def _comparisons(folder: Path, joined: Joined) -> Iterable[Comparison]:
    """Yield the comparison of the Results or, where none of them match, the comparisons that were written as CSV."""
    if joined.pairs:
        table = compare(joined.pairs)
        yield Comparison(
            place=folder.name,
            table=table,
            groups=group_table(table),
            rivals=rival_table(joined.pairs),
            predicted=tuple(pair.predicted.result for pair in joined.pairs),
            measured=tuple(result for pair in joined.pairs for result in pair.measurements),
            doubts=tuple(doubts([file for pair in joined.pairs for file in pair.repeats])),
        )
        return
    for path in sorted(folder.rglob("comparison.csv")):
        table = _typed(path, dict.fromkeys(COLUMNS, None))
        rivals = path.with_name("gs_against_dense.csv")
        yield Comparison(
            place=str(path.relative_to(folder)),
            table=table,
            groups=group_table(table),
            rivals=_typed(rivals, RIVAL_COLUMNS) if rivals.is_file() else pl.DataFrame(schema=RIVAL_COLUMNS),
        )


TEXT = {"scenario_id", "name", "method", "group", "device", "speed_up_over", "collectives_difference"}
TEXT |= {"calibration_id_predicted", "calibration_id_measured"}
LATER = {f"{EXPOSED_COPIES}_measured_s"}
"""Columns that tables of earlier versions lack."""
COUNTS = {"repeats", "ranks", "peak_rank"}
FLAGS = {"collectives_equal", "fits_predicted", "fits_measured"}
FILLED = FLAGS | {"scenario_id", "name", "method", "group", "repeats", "ranks"}
FILLED |= {"step_time_predicted_s", "step_time_measured_s"}
"""Columns that have no empty cell."""


def _typed(path: Path, schema: Mapping[str, Any]) -> pl.DataFrame:
    """Return a table of `analysis compare` with typed columns; raise UserError for any other file."""
    types = {
        name: kind
        or (pl.String if name in TEXT else pl.Int64 if name in COUNTS else pl.Boolean if name in FLAGS else pl.Float64)
        for name, kind in schema.items()
    }
    check_text_name(path)
    try:
        names = set(pl.scan_csv(path, infer_schema=False).collect_schema().names())
        missing = sorted(schema.keys() - names - LATER)
        if missing:
            raise UserError(f"{path}: no column '{missing[0]}': not a table of this version's `analysis compare`")
        later = [pl.lit(None, dtype=types[name]).alias(name) for name in sorted(LATER & schema.keys() - names)]
        table = pl.read_csv(path, schema_overrides=types).with_columns(later).select(list(schema))
        empty = [name for name in schema if name in FILLED and table[name].has_nulls()]
        if empty:
            raise UserError(f"{path}: {empty[0]}: an empty cell: not a table of `analysis compare`")
        return table
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{path}: cannot be read as a table: {str(error).splitlines()[0]}") from None


NUMBERS_OF_STUDIES = (
    *("push_density", "loss_mean", "step_time_mean_s"),
    *(f"{name}{end}" for name in ("loss_change", "speed_up") for end in ("", "_low", "_high", "_mean")),
)


def _studies(folder: Path) -> Iterable[Training]:
    for path in sorted(folder.rglob("convergence.csv")):
        names, rows = read_rows(path, ("variant",), "a table of `analysis convergence`")
        budgets = tuple(match[1] for name in names if (match := re.fullmatch(r"loss \((.+)\)", name)))
        if "loss_mean" not in names and not budgets:
            raise UserError(f"{path}: not a table of `analysis convergence`: no column 'loss_mean'")
        if not rows:
            raise UserError(f"{path}: not a table of `analysis convergence`: no rows")
        for row in rows:
            for column in (*NUMBERS_OF_STUDIES, *(name for name in names if name.endswith(")"))):
                number_in(row, column, path)
        file = path.with_name("findings.txt")
        findings = tuple(read_text(file).splitlines()) if file.is_file() else ()
        place = path.parent.name if path.parent == folder else str(path.parent.relative_to(folder))
        pictures = [*path.parent.glob("fastest_to_equal_loss.png"), *sorted(path.parent.glob("loss_*.png"))]
        yield Training(place, tuple(rows), findings, tuple(pictures), budgets)


def _overlays(folder: Path) -> Iterable[Overlay]:
    """Yield pairs of traces of one scenario, predicted and measured."""
    sides: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.rglob("*.json")):
        trace = _trace_key(path)
        if trace is not None:
            sides.setdefault(trace[0], {}).setdefault(trace[1], path)
    pairs = [(each["simulated"], each["measured"]) for each in sides.values() if len(each) > 1]
    for ours, theirs in pairs[:MOST_TIMELINES]:
        yield Overlay(theirs.stem.partition(".")[0], read_step(ours), read_step(theirs), (ours.name, theirs.name))


def _trace_key(path: Path) -> tuple[str, str] | None:
    """Return (scenario_id, source) of a trace; None for any other file."""
    try:
        data = read_json(path)
    except UserError:
        return None
    if not isinstance(data, dict) or "traceEvents" not in data or not isinstance(data.get("otherData"), dict):
        return None
    key = data["otherData"].get("scenario_id"), data["otherData"].get("source")
    return (str(key[0]), str(key[1])) if None not in key else None
