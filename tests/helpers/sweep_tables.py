"""Tables of sweeps, made up: what their charts and the report are tested with."""

from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from analysis.sweep_tables import BANDWIDTH, THRESHOLD, SweepTable, read_table
from gssim.result import CATEGORIES, PHASES
from gssim.sweeps import columns_of, table_of, write_table

LINK = f"cluster.topology.link.{BANDWIDTH}"
AXES: dict[str, Any] = {THRESHOLD: float, LINK: float}
DENSITIES = {1e-4: 0.5, 1e-3: 0.1, 1e-2: 0.002, inf: 0.0}
GIB = 2.0**30


def make_row(method: str, threshold: float | None = None, bandwidth: float = 1e9, **changes: Any) -> dict[str, Any]:
    """Return a point: compute takes 0.1 s, a threshold 0.01 s; sent are 1e8 bytes, of which a threshold drops some."""
    density = None if threshold is None else DENSITIES[threshold]
    wait_s = 1e8 / bandwidth * (1.0 if density is None else 0.5 + density)
    variant = method if threshold is None else f"{method}-{threshold:g}"
    phases_s = dict.fromkeys(PHASES, 0.0) | {"forward": 0.03, "backward": 0.07, "exposed_communication": wait_s}
    phases_s["compression"] = 0.0 if density is None else 0.01
    categories = dict.fromkeys(CATEGORIES, 0.0) | {"parameters": 2 * GIB, "activations": 5 * GIB}
    categories["optimizer"] = {"ddp": 4.0, "zero2": 1.0}.get(method, 2.0) * GIB
    used = sum(categories.values())
    row = {
        "point": f"{bandwidth:g}--{variant}",
        "group": "g",
        "variant": variant,
        THRESHOLD: threshold,
        LINK: bandwidth,
        "status": "fits",
        "scenario_id": "5" * 16,
        "calibration_id": "c" * 16,
        "method": method,
        "cluster": "pair",
        "model": "gpt",
        "ranks": 2,
        "step_time_s": sum(phases_s.values()),
        "throughput_samples_per_s": 32 / sum(phases_s.values()),
        **{f"{phase}_s": time_s for phase, time_s in phases_s.items()},
        "push_density_ratio": density,
        "peak_allocated_bytes": used,
        "peak_reserved_bytes": used + GIB,
        "tightest_rank": 0,
        "tightest_device": "gpu",
        "margin_bytes": 3 * GIB,
        **{f"tightest_{category}_bytes": size for category, size in categories.items()},
        "tightest_outside_bytes": GIB,
        "capacity_bytes": used + 5 * GIB,
        "slowest_link": "gpu0 -> switch",
        "slowest_link_utilisation_ratio": 0.8,
        "cost_usd_per_step": 1e-4 * sum(phases_s.values()),
    }
    if changes.get("step_time_s"):  # of as many samples
        row["throughput_samples_per_s"] = 32 / changes["step_time_s"]
    return row | changes


def grid(bandwidths: tuple[float, ...] = (1e8, 1e9, 1e10), *, control: bool = True) -> list[dict[str, Any]]:
    """Return dense plans and thresholds on several bandwidths."""
    plans = [("ddp", None), ("zero2", None), ("gs", None), *(("gs", threshold) for threshold in DENSITIES)]
    found = [make_row(method, threshold, rate) for rate, (method, threshold) in product(bandwidths, plans)]
    return [row for row in found if control or row[THRESHOLD] != inf]


def write(rows: list[dict[str, Any]], file: Path, axes: dict[str, Any] | None = None, **metadata: str) -> Path:
    """Write a table as `gssim sweep` does; return the file."""
    columns = columns_of(AXES if axes is None else axes)
    about = {"question": "Who is fastest on which network?", "sweep": "made-up.toml", **metadata}
    write_table(table_of(rows, columns), file, metadata=about)
    return file


def made(rows: list[dict[str, Any]], folder: Path, axes: dict[str, Any] | None = None) -> SweepTable:
    """Return a table as it is read."""
    return read_table(write(rows, folder / "table.parquet", axes))
