"""A sweep's table (Parquet or CSV): its question, the keys that vary, a row for each point; plans by setting.

Points are grouped into plans by setting (cluster, model, batch, ...): labels, Pareto fronts, fastest plans. The columns
that distinguish settings and plans are those that vary and do not follow from others.

A thresholded plan trains with other gradients than a dense one, so the two are not simply ranked: they have separate
fronts, and a speed-up over dense training is always given with its density. Methods that compress gradients (PowerSGD,
top-k) or synchronize only every few steps (local SGD, DiLoCo, ...) train otherwise too: they are not dense plans.

Of many settings, `representative` selects a few in which every value of every column appears.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import tomli

from analysis.compare.table import ResultFile, name_of, sweep_group, threshold_of
from gssim.errors import UserError
from gssim.execution.files import check_text_name, of_text_cell
from gssim.plan import METHODS
from gssim.plan.plan import in_words
from gssim.planner import PLAN as PLAN_TABLE
from gssim.result import Result
from gssim.scenario.sweep import SEPARATOR
from gssim.sweeps import POINT_COLUMNS, RESULT_COLUMNS, columns_of, files_of, kind_of, outcome, table_of
from gssim.units import human_bytes, human_seconds

THRESHOLD = "plan.push.threshold"
METHOD = "plan.method"
SAMPLES, TOKENS = "workload.global_batch_size", "workload.sequence_length"
"""Keys that change what a step does: step times are compared among points that have them in common, axes or not."""
BANDWIDTH = "bandwidth_bytes_per_s"
"""Suffix of the axes that are bandwidths."""
FITS = "fits"
NOT_FITTING = "does not fit"

Row = dict[str, Any]


@dataclass(frozen=True)
class SweepTable:
    """A table with a row for each point of a sweep, as charts read it."""

    name: str
    """Name of the file, without its suffix."""
    question: str
    axes: tuple[str, ...]
    """Full key paths that vary, in the order of the columns."""
    rows: tuple[Row, ...]
    sweep: str = ""
    """Name of the sweep's file; empty where the table does not state it."""
    command: tuple[str, ...] = ()
    """Words before a point's name of the command that predicts it; empty: that of its sweep, if it is known."""

    @property
    def kind(self) -> str:
        """Origin of the points: `sweep`; or `search`, each of whose plans has its own command."""
        return "search" if self.command else "sweep"

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
    if path.is_dir():
        reason = "is a folder; give a table, which `gssim sweep SWEEP --out FILE.parquet` writes"
        raise UserError(f"{path}: {reason}, or show a folder's Results by `python -m analysis report {path}`")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        columns = _columns(path)
        missing = _missing(columns)
        if missing is not None:
            raise UserError(f"{path}: not a sweep's table: no column '{missing}'; `gssim sweep --out FILE` writes one")
        if path.suffix == ".parquet":
            frame = _in_types(pl.read_parquet(path))
        else:  # types of the axes are inferred
            known = {name: kind for name, kind in _column_types().items() if name in columns}
            frame = _in_types(pl.read_csv(path, schema_overrides=known, infer_schema_length=None))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{path}: cannot be read as a table: {str(error).splitlines()[0]}") from None
    axes = tuple(column for column in columns if column not in (*POINT_COLUMNS, *RESULT_COLUMNS))
    nested = [name for name, kind in frame.schema.items() if kind.is_nested() or kind == pl.Object]
    if nested:
        raise UserError(f"{path}: {nested[0]}: holds tables or lists; a sweep's table holds numbers and texts")
    rows = tuple(_with_samples(_checked(row, path)) for row in frame.iter_rows(named=True))
    if not rows:
        raise UserError(f"{path}: a table without points")
    try:
        metadata = dict(pl.read_parquet_metadata(files_of(path)[0]))
    except (OSError, pl.exceptions.PolarsError):  # a CSV file alone, which has no metadata
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
    whole = tuple(_with_samples(row) for row in frame.iter_rows(named=True))
    return SweepTable(name, questions[0] if len(questions) == 1 else "", axes, whole)


def table_of_search(files: Sequence[ResultFile], *, name: str) -> SweepTable:
    """Return the plans that `gssim search --json` found as a table.

    Points are named by their `--set` options; variants, whose names charts show, as the search prints them.
    """
    table = table_from(files, name=name)
    plans = [str(file.result.provenance["search"]["plan"]) for file in files]
    names = [in_words(PLAN_TABLE.validate_python(tomli.loads(plan)["plan"])) for plan in plans]
    # shares that were given by number may be equal in words
    names = [f"{name} ({n})" if (n := names[:i].count(name) + 1) > 1 else name for i, name in enumerate(names)]
    rows = tuple(
        row | {"point": plan, "variant": name} for row, plan, name in zip(table.rows, plans, names, strict=True)
    )
    scenario = f"{name_of(files[0].result)}.toml"
    shipped = SCENARIOS / scenario
    return replace(table, rows=rows, command=("gssim", "run", str(shipped if shipped.is_file() else scenario), "--set"))


SCENARIOS = Path("scenarios")
"""Folder of the shipped scenarios, for the command that predicts a plan again."""


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


def _with_samples(row: Row) -> Row:
    """Return the row with the batch and sequence length of a step, which a variant or a group may have changed.

    An older table has no column of them: samples are then those of the step's rate.
    """
    samples, rate, step_time_s = row["global_batch_size"], row["throughput_samples_per_s"], row["step_time_s"]
    if samples is None and rate is not None and step_time_s is not None:
        samples = round(rate * step_time_s)
    return {SAMPLES: samples, TOKENS: row["sequence_length"], **row}


def _columns(path: Path) -> list[str]:
    check_text_name(path)
    frame = pl.scan_parquet(path) if path.suffix == ".parquet" else pl.scan_csv(path, infer_schema=False)
    return frame.collect_schema().names()


def _missing(columns: Sequence[str]) -> str | None:
    return next((column for column in (*POINT_COLUMNS, *NEEDED) if column not in columns), None)


NEEDED = (
    *("status", "method", "cluster", "model", "ranks", "step_time_s", "throughput_samples_per_s"),
    *("peak_allocated_bytes", "push_density_ratio"),
)


def _column_types() -> dict[str, Any]:
    types: dict[Any, Any] = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}
    return {name: types[kind] for name, kind in (POINT_COLUMNS | RESULT_COLUMNS).items()}


def _in_types(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a table with its known columns cast to their types, and empty columns for those of a Result that it lacks.

    Raises PolarsError where a value does not fit.
    """
    known = _column_types()
    frame = frame.with_columns(pl.lit(None).alias(name) for name in known if name not in frame.columns)
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
    if row["status"] in (FITS, NOT_FITTING):  # the row of a prediction
        for column, least in ANSWERED.items():
            value = row[column]
            if value is None or not least <= value < inf:
                raise UserError(f"{path}: {row['point']}: {column} = {value}: must be finite and at least {least}")
        lacking = [column for column in OF_A_DEVICE if row[column] is None]
        if lacking and len(lacking) < len(OF_A_DEVICE):
            raise UserError(
                f"{path}: {row['point']}: {lacking[0]}: missing, though others of {', '.join(OF_A_DEVICE)} are not"
            )
    return row


OF_A_DEVICE = ("capacity_bytes", "margin_bytes", "tightest_device")
"""Columns on the memory of the device that has least to spare: all or none have a value."""
ANSWERED = {"ranks": 1, "step_time_s": 0, "throughput_samples_per_s": 0, "peak_allocated_bytes": 0}
"""Columns of a prediction that must have a value, and the least one."""


# What a point is -----------------------------------------------------------------------------------------------------


def is_thresholded(row: Row) -> bool:
    """Return whether the point has a threshold, of push or of publish."""
    return row["push_density_ratio"] is not None or row.get("publish_density_ratio") is not None


def is_compressed(row: Row) -> bool:
    """Return whether the point's method compresses gradients, or synchronizes only every few steps."""
    method = METHODS.get(row["method"])
    return method is not None and not method.exchanges_all_gradients


def is_dense(row: Row) -> bool:
    """Return whether all gradients are exchanged in every step."""
    return not is_thresholded(row) and not is_compressed(row)


def is_control(row: Row) -> bool:
    """Return whether the point is a control, in which nothing is pushed."""
    return row.get(THRESHOLD) == inf or row["push_density_ratio"] == 0


def peak_bytes(row: Row) -> float:
    """Return the largest peak of a rank: reserved bytes or, where unknown, allocated bytes."""
    reserved = row.get("peak_reserved_bytes")
    return float(row["peak_allocated_bytes"] if reserved is None else reserved)


# Plans and settings ---------------------------------------------------------------------------------------------------

PLAN = "plan."

Place = tuple[object, ...]
"""Values of the columns that identify a setting (or a plan)."""


@dataclass(frozen=True)
class Layout:
    """The columns that identify settings, and those that identify plans within a setting, without the threshold."""

    settings: tuple[str, ...]
    plans: tuple[str, ...]

    def setting_of(self, row: Row) -> Place:
        """Return the values of a point in the columns of `settings`."""
        return tuple(row[column] for column in self.settings)

    def plan_of(self, row: Row) -> Place:
        """Return the plan of a point, whatever its threshold."""
        return tuple(row[column] for column in self.plans)

    def setting_label(self, place: Place) -> str:
        """Return the label of a setting; empty where there is only one. Keys that its cluster lacks are left out.

        >>> Layout(("cluster.topology.servers.0.count", "cluster.topology.link.latency_s"), ()).setting_label((4, None))
        '4 servers'
        """
        known = [(column, value) for column, value in zip(self.settings, place, strict=True) if value is not None]
        return ", ".join(shown(column, value) for column, value in known)

    def plan_label(self, place: Place) -> str:
        """Return the label of a plan: its method and other distinguishing values."""
        named = dict(zip(self.plans, place, strict=True))
        if "variant" in named:
            return str(named["variant"])
        return ", ".join(shown(column, value) for column, value in named.items())


def layout_of(table: SweepTable, *, without: Sequence[str] = ()) -> Layout:
    """Return the layout of the predicted points of a table; `without`: columns that are the axis of a chart."""
    rows = table.answered
    axes = [axis for axis in table.axes if not axis.startswith(PLAN)]
    workload = [column for column in (SAMPLES, TOKENS) if column not in axes]
    candidates = [column for column in (*axes, "group", "cluster", "model", *workload) if column not in without]
    settings = distinguishing_columns(rows, candidates)
    # labels need the group where groups differ in the keys that they have: four servers belong to one cluster in one
    # group, and to another in the next
    has_gaps = any({row.get(column) is None for row in rows} == {True, False} for column in settings)
    if "group" not in settings and _varies(rows, "group") and has_gaps and follows(rows, settings, "group"):
        settings.insert(0, "group")
    policies = [axis for axis in table.axes if axis.startswith(PLAN) and axis not in (THRESHOLD, METHOD, *without)]
    # an axis that goes with one of a setting, as micro-batches with a number of servers, makes no plan of its own
    places = [axis for axis in (*settings, *without) if axis in table.axes]
    plans = ["method", *(axis for axis in policies if _varies(rows, axis) and not follows(rows, places, axis))]
    apart = [*settings, *without, *plans, *([THRESHOLD] if THRESHOLD in table.axes else [])]
    if not follows(rows, apart, "point"):
        plans.append("variant")
    return Layout(tuple(settings), tuple(plans))


def distinguishing_columns(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    """Return the columns that vary, without those whose value follows from the others."""
    kept: list[str] = []
    for column in columns:
        if _varies(rows, column) and not follows(rows, kept, column):
            kept.append(column)
    # an earlier column may follow from later ones: a group determines its rates and latencies
    for column in list(kept):
        rest = [other for other in kept if other != column]
        if rest and not column.endswith(BANDWIDTH) and follows(rows, rest, column):
            kept = rest
    return kept


def _varies(rows: Sequence[Row], column: str) -> bool:
    return len({row.get(column) for row in rows}) > 1


def follows(rows: Iterable[Row], columns: Sequence[str], column: str) -> bool:
    """Return whether `column` is a function of `columns`: rows that are equal in these are equal in it."""
    values: dict[Place, object] = {}
    return all(
        values.setdefault(tuple(row.get(each) for each in columns), row.get(column)) == row.get(column) for row in rows
    )


def by_setting(rows: Iterable[Row], layout: Layout) -> dict[Place, list[Row]]:
    """Return rows by setting, in the order in which settings first appear."""
    grouped: dict[Place, list[Row]] = {}
    for row in rows:
        grouped.setdefault(layout.setting_of(row), []).append(row)
    return grouped


def by_plan(rows: Iterable[Row], layout: Layout) -> dict[Place, list[Row]]:
    """Return rows by plan, in the order in which plans first appear."""
    grouped: dict[Place, list[Row]] = {}
    for row in rows:
        grouped.setdefault(layout.plan_of(row), []).append(row)
    return grouped


def family(name: object) -> str:
    """Return a name without its numbers, the same for clusters of one kind and different sizes.

    >>> family("a100-leaf-spine-64"), family("1,024 GPUs in a ring")
    ('a100-leaf-spine', 'GPUs in a ring')
    """
    words = re.split(r"[\s-]+", re.sub(r"(?<![A-Za-z\d,.])\d[\d,.]*(x\d+)*(?![A-Za-z\d])", " ", str(name)))
    return ("-" if "-" in str(name) and " " not in str(name) else " ").join(word for word in words if word)


UNCLEAR = frozenset(
    ("none", "full", "selective", "every-second-product", "auto", "even", "throughput", "compute", "memory", "cost")
)
"""Values that several keys may have, and that are therefore shown with the key's last word."""


def shown(column: str, value: object) -> str:
    """Return a column's value as text, with the last word of its key where the value alone is unclear.

    >>> shown("cluster.topology.link.bandwidth_bytes_per_s", 1.25e8), shown("plan.micro_batches", 4)
    ('1 Gbit/s', 'micro_batches 4')
    >>> shown("cluster.topology.devices.0.count", 8), shown("cluster.topology.sites.1.topology.servers.0.count", 2)
    ('8 devices', '2 servers (site 1)')
    >>> shown("cluster.topology.link.latency_s", 0.01), shown("cluster.topology.servers.0.count", 1)
    ('latency 10 ms', '1 server')
    >>> shown("plan.recompute", "none"), shown("plan.overlap", False), shown("workload.precision", "bf16")
    ('recompute none', 'overlap false', 'bf16')
    """
    word = column.rpartition(".")[2]
    if value is None:
        return "default" if column.startswith(PLAN) else "none"
    if isinstance(value, bool):
        return f"{word} {str(value).lower()}"
    if not isinstance(value, (int, float)):
        return f"{word} {value}" if value in UNCLEAR and column.startswith((PLAN, "workload.")) else str(value)
    counted = re.search(r"(?:\.sites\.(\d+)\..*)?\.(devices|servers)\.\d+\.count$", column)
    if counted:
        things = counted[2] if value != 1 else counted[2].removesuffix("s")
        return f"{value:g} {things}" + (f" (site {counted[1]})" if counted[1] else "")
    if word.endswith("bytes_per_s"):
        return bit_rate(value)
    if word.endswith("_bytes"):
        return f"{word.removesuffix('_bytes')} {human_bytes(value)}"
    if word.endswith("_s"):
        return f"{word.removesuffix('_s')} {human_seconds(value)}".replace(".00 ", " ")
    return f"{word} {value:g}"


def bit_rate(bytes_per_s: float) -> str:
    """Return a link's rate as text, in bits per second.

    >>> bit_rate(1.25e7), bit_rate(3e11)
    ('100 Mbit/s', '2.4 Tbit/s')
    """
    bits = 8 * bytes_per_s
    unit, factor = next(
        ((unit, factor) for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)) if bits >= factor),
        ("kbit/s", 1e3),
    )
    return f"{bits / factor:.3g} {unit}"


def front(rows: Sequence[Row], x: Callable[[Row], float], y: Callable[[Row], float]) -> list[Row]:
    """Return the Pareto front (both axes: less is better), by ascending x; of equal rows the first.

    >>> [row["n"] for row in front([{"n": 1}, {"n": 2}], lambda row: row["n"], lambda row: row["n"])]
    [1]
    """
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (x(row), y(row))):
        if not best or y(row) < y(best[-1]):
            best.append(row)
    return best


def fastest(rows: Iterable[Row]) -> Row | None:
    """Return the row with the shortest step; None where there is none."""
    return min(rows, key=lambda row: row["step_time_s"], default=None)


@dataclass(frozen=True)
class Winner:
    """The fastest thresholded plan and the fastest dense plan of one setting."""

    thresholded: Row
    dense: Row

    @property
    def speed_up_ratio(self) -> float:
        """Speed of the thresholded plan relative to the dense one; above 1 the thresholded one is faster."""
        return float(self.dense["step_time_s"] / self.thresholded["step_time_s"])


def winner(rows: Sequence[Row], threshold: float) -> Winner | None:
    """Return the fastest plans with this threshold and without any, of one setting; None where one is missing."""
    return _fastest_pair(rows, [row for row in rows if is_thresholded(row) and row.get(THRESHOLD) == threshold])


def best_gain(rows: Sequence[Row]) -> Winner | None:
    """Return the fastest thresholded plan that is no control, and the fastest dense plan, of one setting."""
    return _fastest_pair(rows, [row for row in rows if is_thresholded(row) and not is_control(row)])


def _fastest_pair(rows: Sequence[Row], thresholded: Sequence[Row]) -> Winner | None:
    sparse, dense = fastest(thresholded), fastest(row for row in rows if is_dense(row))
    return Winner(sparse, dense) if sparse is not None and dense is not None else None


def thresholds(rows: Iterable[Row]) -> list[float]:
    """Return the thresholds of thresholded rows, ascending."""
    return sorted({row[THRESHOLD] for row in rows if is_thresholded(row) and row.get(THRESHOLD) is not None})


T = TypeVar("T")
FAR = 8.0
"""Distance of the ends of a column of numbers; similarity falls to 1/e at distance 1."""


def evenly_spaced(values: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the values, evenly spaced and with both ends.

    >>> evenly_spaced([0, 1, 2, 3, 4, 5, 6], 3), evenly_spaced("ab", 3)
    ([0, 3, 6], ['a', 'b'])
    """
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / max(1, most - 1)
    return [values[round(i * step)] for i in range(most)]


def representative(places: Sequence[Place], most: int) -> list[Place]:
    """Return at most `most` places, in their order, which cover the values of every column.

    Places are of one kind where they have equal names and the same keys (None: a missing key). The first place is taken
    first. Each next one is of the kind that was taken least so far and, among those, least similar to the places taken.
    Numbers are compared by their rank, so that ends and middle of a column appear.

    >>> representative([("ring", 1), ("ring", 2), ("ring", 4), ("star", 1), ("star", 4)], 2)
    [('ring', 1), ('star', 4)]
    """
    if len(places) <= most:
        return list(places)
    columns = [_coordinates(values) for values in zip(*places, strict=True)]
    kinds = [tuple(0.0 if isinstance(each, float) else each for each in place) for place in zip(*columns, strict=True)]
    taken_of, likeness = Counter[Place](), [0.0] * len(places)
    left, taken = list(range(len(places))), list[int]()
    while len(taken) < most:
        new = min(left, key=lambda i: (taken_of[kinds[i]], round(likeness[i], 9)))
        left.remove(new)
        taken.append(new)
        taken_of[kinds[new]] += 1
        for i in left:
            for column in columns:
                one, other = column[i], column[new]
                if isinstance(one, float) and isinstance(other, float):
                    likeness[i] += exp(-abs(one - other))
                else:
                    likeness[i] += one is not None and one == other
    return [places[i] for i in sorted(taken)]


Coordinate = float | str | None


def _coordinates(values: Sequence[object]) -> list[Coordinate]:
    """Return a coordinate for each value: numbers by their rank, from 0 to `FAR`; other values as text."""
    numbers = sorted({value for value in values if isinstance(value, (int, float))})
    rank = {number: FAR * i / max(1, len(numbers) - 1) for i, number in enumerate(numbers)}
    return [
        None if value is None else rank[value] if isinstance(value, (int, float)) else str(value) for value in values
    ]
