"""The table of a sweep: one row per point, in the order of points, as Parquet and CSV with units in column names.

A row has its point, the values of the axes, and the outcome of its Result or the reason why there is none. Equal rows
give byte-identical files. Parquet and CSV have the same columns; Parquet also describes the table in its metadata.
"""

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gssim.errors import UserError
from gssim.execution.files import as_text_cell, check_place, check_text_name, write_files
from gssim.result import CATEGORIES, PHASES, RankClass, Result, busiest_link
from gssim.result.result import imported_polars
from gssim.units import human_bytes

if TYPE_CHECKING:
    import polars

SCHEMA: Literal["gssim.table/1"] = "gssim.table/1"

TABLES = (".parquet", ".csv")
"""Suffixes of a table's two files."""
Status = Literal["fits", "does not fit", "invalid", "failed"]
"""`invalid`: plan, workload and cluster do not go together; `failed`: the simulation did not end, which is a bug."""
Row = dict[str, Any]
"""Values by column; missing values are None."""
Kind = type[str] | type[int] | type[float] | type[bool]

POINT_COLUMNS: dict[str, Kind] = {"point": str, "group": str, "variant": str}
"""Columns before those of the axes; an axis's column has the axis's full key as its name."""
RESULT_COLUMNS: dict[str, Kind] = {
    "status": str,
    "reason": str,  # why it does not fit, is invalid or failed
    "scenario_id": str,
    "calibration_id": str,
    "method": str,
    "cluster": str,  # its name
    "model": str,
    "global_batch_size": int,
    "sequence_length": int,  # tokens; null for images
    "ranks": int,
    "idle_devices": int,  # devices of the cluster that no rank runs on
    "step_time_s": float,
    "throughput_samples_per_s": float,
    **{f"{phase}_s": float for phase in PHASES},  # mean over ranks; their sum is step_time_s
    "imbalance_s": float,  # of exposed_communication_s: waiting for ranks that compute longer, however fast the network
    "push_density_ratio": float,
    "publish_density_ratio": float,
    "bytes_sent_per_step": float,  # by all ranks
    "peak_allocated_bytes": float,  # of the rank that needs most
    "peak_reserved_bytes": float,  # the same; null where even the allocated bytes do not fit
    "tightest_rank": int,  # whose device has least to spare
    "tightest_device": str,
    "margin_bytes": float,  # its free memory; negative where it does not fit
    **{f"tightest_{category}_bytes": float for category in CATEGORIES},  # at its peak
    "tightest_outside_bytes": float,  # beside the allocator: context, communicators
    "capacity_bytes": float,  # all of its device's memory
    "slowest_link": str,  # the busiest link: the bottleneck of communication
    "slowest_link_utilisation_ratio": float,
    "cost_usd_per_step": float,
    "energy_j_per_step": float,
    # ends of the bands of predictions whose gradient statistics were transferred from other models; else null
    "push_density_low_ratio": float,
    "push_density_high_ratio": float,
    "step_time_low_s": float,
    "step_time_high_s": float,
    "bytes_sent_low_per_step": float,
    "bytes_sent_high_per_step": float,
}
"""Outcome of a point. If it is invalid or failed, all columns after `reason` are null."""


def columns_of(axes: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return all columns of the table of points that differ in these keys.

    >>> list(columns_of({"plan.push.threshold": float, "cluster": str}))[:5]
    ['point', 'group', 'variant', 'plan.push.threshold', 'status']
    """
    return POINT_COLUMNS | {key: kind for key, kind in axes.items() if key not in RESULT_COLUMNS} | RESULT_COLUMNS


def outcome(result: Result) -> Row:
    """Return the outcome of a prediction, with the columns of `RESULT_COLUMNS`."""
    needed, missing, workload = _memory(result), result.does_not_fit, result.scenario["workload"]
    of_host = " of its host's memory" if missing is not None and missing.memory == "host" else ""
    busiest = busiest_link(result)
    return {
        "status": "fits" if result.fits else "does not fit",
        "reason": missing
        and f"rank {missing.rank} lacks {human_bytes(missing.excess_bytes)}{of_host}; "
        f"largest at the peak: {missing.category}",
        "scenario_id": result.scenario_id,
        "calibration_id": result.calibration_id,
        "method": result.scenario["plan"]["method"],
        "cluster": result.scenario["cluster"]["name"],
        "model": workload["model"]["name"],
        "global_batch_size": workload.get("global_batch_size"),
        "sequence_length": workload.get("sequence_length"),
        "ranks": sum(each.count for each in result.ranks),
        "idle_devices": len(result.idle_devices),
        "step_time_s": result.step_time_s,
        "throughput_samples_per_s": result.throughput_samples_per_s,
        **{f"{phase}_s": result.phases_s[phase] for phase in PHASES},
        "imbalance_s": result.imbalance_s(),
        "push_density_ratio": result.density.push,
        "publish_density_ratio": result.density.publish,
        "bytes_sent_per_step": sum(each.count * (each.bytes_sent or 0.0) for each in result.ranks),
        **needed,
        "slowest_link": busiest and busiest.name,
        "slowest_link_utilisation_ratio": busiest and busiest.utilisation_ratio,
        "cost_usd_per_step": result.cost_usd_per_step,
        "energy_j_per_step": result.energy_j_per_step,
        "push_density_low_ratio": result.density.push_low,
        "push_density_high_ratio": result.density.push_high,
        "step_time_low_s": result.band and result.band.step_time_low_s,
        "step_time_high_s": result.band and result.band.step_time_high_s,
        "bytes_sent_low_per_step": result.band and result.band.bytes_sent_low,
        "bytes_sent_high_per_step": result.band and result.band.bytes_sent_high,
    }


def _memory(result: Result) -> Row:
    """Return the memory peaks, and the rank with the least memory to spare."""
    reserved = [each.peak_reserved_bytes for each in result.ranks if each.peak_reserved_bytes is not None]
    memory: Row = {
        "peak_allocated_bytes": max(each.peak_allocated_bytes for each in result.ranks),
        "peak_reserved_bytes": max(reserved) if len(reserved) == len(result.ranks) else None,
    }
    least = result.margin
    if least is None:
        return memory
    tightest = class_of(result.ranks, least.rank)
    by_category = {
        f"tightest_{category}_bytes": tightest.peak_by_category_bytes.get(category, 0.0) for category in CATEGORIES
    }
    return memory | {
        "tightest_rank": least.rank,
        "tightest_device": tightest.device,
        "margin_bytes": least.margin_bytes,
        **by_category,
        "tightest_outside_bytes": sum(tightest.outside_bytes.values()),
        "capacity_bytes": least.memory_bytes,
    }


def class_of(ranks: Iterable[RankClass], rank: int) -> RankClass:
    """Return the entry of equal ranks to which a rank belongs, which must be in one of them."""
    return next(each for each in ranks if rank in each.ranks)


def without_outcome(status: Status, reason: str) -> Row:
    """Return the row of a point without a prediction."""
    return {"status": status, "reason": reason}


CSV_DIGEST = "csv_sha256"
"""Metadata key of the Parquet file: digest of the CSV file written with it."""


def check_table_place(file: Path) -> None:
    """Raise UserError if the table cannot be written; called before the work starts.

    A table is two files, of which the user names one. The other one is only replaced if it is a table too.
    """
    imported_polars()
    check_text_name(file)
    files = files_of(file)
    for each in files:
        check_place(each)
    if not any(map(_is_table, files)):
        for each in files:
            if each != file and each.is_file():
                raise UserError(f"{each}: is no table of gssim's, and --out {file} would replace it: name another file")


def lock_of(file: Path) -> Path:
    """Return the lock file of a table; the process that writes the table or its rows holds it.

    >>> str(lock_of(Path("out/table.csv")))
    'out/table.parquet.lock'
    """
    parquet = files_of(file)[0]
    return parquet.with_name(f"{parquet.name}.lock")


def points_in(file: Path) -> list[str]:
    """Return the names of the points of an existing table, from either of its files; empty if there is none."""
    polars = imported_polars()
    parquet, csv = files_of(file)
    for path, read in ((parquet, polars.read_parquet), (csv, polars.read_csv)):
        with suppress(*_read_errors()):
            if _is_table(path):
                return list(read(path, columns=["point"])["point"])
    return []


def _is_table(path: Path) -> bool:
    """Return whether a file begins like a table of gssim."""
    polars = imported_polars()
    try:
        if path.suffix == ".parquet":
            return str(polars.read_parquet_metadata(path).get("schema", "")).startswith("gssim.table/")
        with path.open("rb") as stream:
            return stream.readline(1000).startswith(",".join(POINT_COLUMNS).encode())
    except _read_errors():
        return False


def _read_errors() -> tuple[type[BaseException], ...]:
    """Return polars' exceptions for a damaged file; its panic is not an `Exception`."""
    exceptions = imported_polars().exceptions
    return (OSError, exceptions.PolarsError, exceptions.PanicException)


def files_of(file: Path) -> tuple[Path, Path]:
    """Return the two files of a table, Parquet and CSV, given either of them.

    >>> [str(each) for each in files_of(Path("out/table.csv"))]
    ['out/table.parquet', 'out/table.csv']
    """
    return file.with_suffix(".parquet"), file.with_suffix(".csv")


def table_of(rows: Iterable[Row], columns: Mapping[str, Kind]) -> "polars.DataFrame":
    """Return rows as a data frame; missing values are null."""
    pl = imported_polars()
    types: dict[Kind, Any] = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}
    by_column: dict[str, list[Any]] = {name: [] for name in columns}
    for row in rows:
        for name, values in by_column.items():
            values.append(row.get(name))
    table: polars.DataFrame = pl.DataFrame(by_column, schema={name: types[kind] for name, kind in columns.items()})
    return table


def write_table(table: "polars.DataFrame", file: Path, *, metadata: Mapping[str, str]) -> None:
    """Write the table's two files, both or none; the Parquet file has the metadata and the digest of the CSV file.

    Raises UserError if they cannot be written.
    """
    write_files(_contents(table, file, metadata))


def _contents(table: "polars.DataFrame", file: Path, metadata: Mapping[str, str]) -> dict[Path, bytes]:
    """Return the bytes of a table's two files."""
    parquet, csv = files_of(file)
    text, content = csv_of(table).encode(), io.BytesIO()
    twin = hashlib.sha256(text).hexdigest()
    table.write_parquet(content, metadata={"schema": SCHEMA, **metadata, CSV_DIGEST: twin})
    return {parquet: content.getvalue(), csv: text}


def csv_of(table: "polars.DataFrame") -> str:
    """Return a table as CSV, in which no cell is a formula; see `gssim.execution.files`."""
    pl = imported_polars()
    cells = {
        name: [each and as_text_cell(each) for each in table[name]]
        for name, kind in table.schema.items()
        if kind == pl.String
    }
    text: str = table.with_columns(pl.Series(name, texts, dtype=pl.String) for name, texts in cells.items()).write_csv()
    return text


def existing_table(file: Path, metadata: Mapping[str, str]) -> "polars.DataFrame | None":
    """Return the existing table if it was written with this metadata; None if there is none, or it is damaged.

    The Parquet file must reproduce the CSV file that was written with it. If one of the two files on disk differs,
    because it was damaged or the writer was killed before the second was in place, both are written again.
    """
    try:
        stored = imported_polars().read_parquet_metadata(files_of(file)[0])
        if any(stored.get(key) != value for key, value in metadata.items()):
            return None
        table: polars.DataFrame = imported_polars().read_parquet(files_of(file)[0])
        contents = _contents(table, file, metadata)
    except _read_errors():
        return None
    csv = files_of(file)[1]
    if stored.get(CSV_DIGEST) != hashlib.sha256(contents[csv]).hexdigest():
        return None
    if any(not path.is_file() or path.read_bytes() != content for path, content in contents.items()):
        write_files(contents)
    return table


def kind_of(values: Sequence[Any]) -> Kind:
    """Return the type of a column with these values. Missing values have no type; integers beyond 64 bits are texts.

    >>> kind_of([1, 2.5, None]), kind_of(["gs", 1]), kind_of([True, False]), kind_of([1, 2**63])
    (<class 'float'>, <class 'str'>, <class 'bool'>, <class 'str'>)
    """
    kinds = {type(value) for value in values if value is not None}
    if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values):
        return str
    if kinds <= {int, float} and kinds:
        return float if float in kinds else int
    return bool if kinds == {bool} else str
