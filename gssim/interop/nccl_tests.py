"""Measured all-reduces of nccl-tests, to which the NCCL constants of a cluster are fitted."""

import csv
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gssim.cluster import GENERATIONS, Cluster
from gssim.collectives.nccl import fit, times
from gssim.engine.selection import Scheduler
from gssim.errors import UserError, one_line
from gssim.interop.reading import read_bounded
from gssim.network import Router

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
FITTED = ("latency_s", "simple_hop_ratio", "pipeline_latency_s")
"""Fitted constants, besides the ratio of achieved to wire rate: the network's if there are several nodes."""


@dataclass(frozen=True)
class NcclTable:
    """Out-of-place times of all-reduces over all ranks, by size."""

    file: str
    rows: tuple[tuple[float, float], ...]
    """(bytes, seconds)."""
    ranks: int | None
    """Number of ranks that the file lists; None if it lists none."""


def nccl_table(path: Path) -> NcclTable:
    """Return the table of a log of nccl-tests' `all_reduce_perf`, or of a CSV file.

    A CSV file has a column of bytes (`size`, `size_bytes`, `size(B)`) and one whose name begins with `time` and ends in
    its unit: `time_us`, `time(ns)`. Raises UserError for other files, logs of other collectives, and for fewer than
    four sizes.
    """
    text = read_bounded(path)
    if re.search(r"^#\s+size\s+count\s+type", text, re.MULTILINE):
        rows = _rows_of_log(text, str(path))
    else:
        rows = _rows_of_csv(text, str(path))
    if len({size for size, _ in rows}) < 4:
        raise UserError(f"{path}: {len(rows)} sizes with a time: four constants need at least four")
    listed = set(re.findall(r"^#\s+Rank\s+(\d+)\s", text, re.MULTILINE))
    return NcclTable(path.name, tuple(rows), len(listed) or None)


def _rows_of_log(text: str, file: str) -> list[tuple[float, float]]:
    """Return sizes and times of a log's lines, such as `1048576 262144 float sum -1 92.8 11.3 19.8 0 ...`.

    Logs of old releases have no column `root`. Those of all collectives look alike: all-gathers and broadcasts have no
    reduction, reductions to one rank have that as their root, and reduce-scatters and all-gathers reach less on the bus
    than the algorithm, all-reduces of several ranks never.
    """
    root = r"(-?\d+)\s+" if re.search(r"^#\s+size\s+count\s+type.*\broot\b", text, re.MULTILINE) else "()"
    number = r"([0-9.]+)\s+"
    line = re.compile(rf"^\s*(\d+)\s+\d+\s+\S+\s+(\S+)\s+{root}{number}{number}([0-9.]+)", re.MULTILINE)
    rows = [row for row in line.findall(text) if float(row[0]) and float(row[3])]
    rates = [(float(algorithm), float(bus)) for *_, algorithm, bus in rows]
    on_bus = [bus / algorithm for algorithm, bus in rates if bus and algorithm >= LEAST_GB_PER_S]
    rootless = all(root in ("", "-1") for _, _, root, *_ in rows)
    if any(reduction == "none" for _, reduction, *_ in rows) or not rootless or min(on_bus, default=1.0) < LEAST_BUS:
        raise UserError(f"{file}: is a log of another collective; a log of nccl-tests' all_reduce_perf is needed")
    return [(float(size), float(time_us) * 1e-6) for size, _, _, time_us, *_ in rows]


MOST_BYTES, MOST_S = 2**60, 1e6
"""Limits of a CSV file's sizes and times: beyond them they are in another unit, or wrong."""
LEAST_GB_PER_S = 0.5
"""Least rate whose two decimals in a log say how much less the bus reaches."""
LEAST_BUS = 0.95
"""A log in which the bus reaches a smaller part of the algorithm's rate is not of all-reduces, whose part is 2(n-1)/n;
that of reduce-scatters and all-gathers is (n-1)/n."""


def _rows_of_csv(text: str, file: str) -> list[tuple[float, float]]:
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    header = next(csv.reader(line for _, line in lines), [])
    in_bytes = re.compile(r"size(\W*_?\(?(b|bytes?)\)?)?")  # a size in MB is decimal to some, binary to others
    size = next((i for i, name in enumerate(header) if in_bytes.fullmatch(name.strip().lower())), None)
    units = [re.fullmatch(r"time\W*_?\(?(ns|us|ms|s)\)?", name.strip().lower()) for name in header]
    time = next((i for i, match in enumerate(units) if match), None)
    if size is None or time is None:
        columns = one_line(", ".join(header), 60)
        raise UserError(
            f"{file}: columns {columns!r}: no log of nccl-tests' all_reduce_perf, and no CSV file with columns `size` "
            "or `size_bytes`, and `time_us`, `time_ns`, `time_ms` or `time_s`"
        )
    unit = units[time]
    assert unit is not None
    rows = []
    for number, line in lines[1:]:
        row = next(csv.reader([line]), [])
        where = f"{file}: line {number}: {one_line(','.join(row), 60)!r}"
        try:
            rows.append((float(row[size]), float(row[time]) * SECONDS[unit[1]]))
        except (ValueError, IndexError):
            raise UserError(f"{where}: size and time are numbers") from None
        if not (0 <= rows[-1][0] < MOST_BYTES and 0 <= rows[-1][1] < MOST_S):
            raise UserError(f"{where}: sizes are from 0 to 2^60 bytes, times from 0 to {MOST_S:g} s")
    return [row for row in rows if all(row)]  # a log's row of 0 bytes has no time to fit


def fitted_constants(cluster: Cluster, table: NcclTable, generation: str) -> tuple[dict[str, Any], str]:
    """Return the cluster file's `nccl` table with constants fitted to measurements, and a note of how well they fit.

    `generation`: has the NCCL constants that are not fitted. Raises UserError if the cluster has fewer devices than the
    table has ranks, or one.
    """
    ranks = table.ranks or len(cluster.devices)
    if not 2 <= ranks <= len(cluster.devices):
        raise UserError(
            f"{table.file}: {ranks} ranks: the cluster has {len(cluster.devices)} devices; allowed: 2 to that "
            "(a log has a line '# Rank ...' for each)"
        )
    group = Scheduler(cluster, Router(cluster.wiring), ranks).nccl_group(tuple(range(ranks)))
    tuning = fit(table.rows, group, start=GENERATIONS[generation])
    ratio = "network_bandwidth_ratio" if group.nodes > 1 else "bandwidth_ratio"
    constants = {name: float(f"{getattr(tuning, name):.4g}") for name in (*FITTED, ratio)}
    errors = [abs(times(tuning, "all-reduce", size, group).time_s / seconds - 1) for size, seconds in table.rows]
    middle, worst = statistics.median(errors), max(errors)
    measured = f"{len(table.rows)} all-reduces of {ranks} ranks in {table.file}"
    note = f"nccl: to {measured}: error {middle:.1%} in the median, {worst:.1%} at most"
    return {"generation": generation, **constants}, note
