"""Measured rates of matrix products and attention by their shapes, and of memory: SimuMax's tables of one machine.

One table (`profiles/simumax_b200_ops.csv` of the reference figures) gives each kernel's FLOP/s over a stated peak, the
other (`simumax_b200_bandwidth.csv`) the rate over a stated one of kernels that stream memory, and what each call of
these takes in addition. They are looked for in the folder GSSIM_REFERENCE, else in `shared/reference` beside the
project or a folder that it is in; without them, kernels have the device's own rate. A product whose shape is not in the
table has that of the nearest one of its layout; attention that of the nearest number of heads and length.
"""

import csv
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Literal

Layout = Literal["TN", "NN", "NT"]
"""Layouts of a linear layer's products: forward, gradient of the input, of the weight (added to one in float)."""
Shape = tuple[float, ...]
TABLES = {"b200": "simumax_b200_ops.csv"}
"""Files of the folder `profiles`, by machine."""


@dataclass(frozen=True)
class KernelUse:
    """What the rates of kernels depend on beside the model: the machine, the micro-batch, and the device's own rate."""

    machine: str
    micro_batch: int
    device_flop_per_s: float
    """Rate at which the device is taken to do all FLOP; FLOP of a kernel with another rate are scaled in proportion."""
    device_bytes_per_s: float
    """The same for streamed bytes."""
    expert_ranks: int = 1
    """Ranks that divide experts."""


@dataclass(frozen=True)
class Kernels:
    """Rates in FLOP/s by shape: products by layout as (m, k, n), attention by pass as (heads, key heads, length)."""

    products: Mapping[str, Mapping[Shape, float]]
    attention: Mapping[str, Mapping[Shape, float]]
    grouped: Mapping[str, Mapping[Shape, float]]
    """Products of experts by stage (fwd, bwd_grad_act, bwd_grad_w) as (experts, rows of each, outputs, inputs)."""
    streaming: Mapping[str, tuple[float, float]]
    """(Bytes per second, seconds of a call in addition) by kind of kernel that streams memory."""

    def product_flop_per_s(self, layout: Layout, m: int, k: int, n: int) -> float | None:
        """Return the rate of a product of matrices (m x k) and (k x n); None where the table has none of its layout."""
        return _nearest(self.products.get(layout, {}), (m, k, n))

    def attention_flop_per_s(
        self, phase: str, heads: int, kv_heads: int, length: int, *, widths: tuple[int, int] | None = None
    ) -> float | None:
        """Return the rate of causal attention whose FLOP are counted without its mask; None where there is none.

        `phase`: f or b. `widths`: of a head's keys and of its values, where they differ.
        """
        of_widths = phase if widths is None else f"{phase} {widths[0]} {widths[1]}"
        return _nearest(self.attention.get(of_widths, {}), (heads, kv_heads, length))

    def grouped_flop_per_s(self, stage: str, size: Shape) -> float | None:
        """Return the rate of products of experts; None where the table has none of that stage."""
        return _nearest(self.grouped.get(stage, {}), size)


def _nearest(rates: Mapping[Shape, float], shape: Shape) -> float | None:
    """Return the rate of the shape that is nearest in the logarithms of its sizes.

    >>> _nearest({(1024, 64): 1.0, (4096, 64): 2.0}, (3000, 60))
    2.0
    """
    if shape in rates or not rates:
        return rates.get(shape)
    return rates[min(rates, key=lambda known: sum(log(a / b) ** 2 for a, b in zip(known, shape, strict=True)))]


def table_path(machine: str) -> Path | None:
    """Return the file of a machine's operators, or None where the reference figures are not there."""
    stated = os.environ.get("GSSIM_REFERENCE")
    beside = [folder / "shared" / "reference" for folder in Path(__file__).resolve().parents[3:]]
    paths = [folder / "profiles" / TABLES[machine] for folder in ([Path(stated)] if stated else beside)]
    return next((path for path in paths if path.is_file()), None)


@cache
def kernels_of(machine: str) -> Kernels | None:
    """Return a machine's measured kernels; None where its table is not there."""
    path = table_path(machine)
    return read_kernels(path) if path else None


def read_kernels(path: Path) -> Kernels:
    """Return the kernels in a table with the columns op, shape, tflops_peak and efficiency.

    Kernels that only move memory are in a second file, `..._bandwidth.csv` beside `..._ops.csv`: for each kind, the
    columns name, efficient_factor, gbps (rate) and latency_us (time of a call).
    """
    products: dict[str, dict[Shape, float]] = {}
    attention: dict[str, dict[Shape, float]] = {}
    grouped: dict[str, dict[Shape, float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sizes = dict(re.findall(r"(\w+)=(\w+)", row["shape"]))
            rate = float(row["tflops_peak"]) * 1e12 * float(row["efficiency"])
            # a weight's gradient is added to one in float, as Megatron-LM does it
            added = sizes.get("layout") != "NT" or sizes.get("out_dtype") == "fp32"
            if row["op"] == "matmul" and sizes.get("b") == "1" and added and rate > 0:
                shape = tuple(float(sizes[key]) for key in ("m", "k", "n"))
                products.setdefault(sizes["layout"], {}).setdefault(shape, rate)
            elif row["op"] in ("sdp_fwd", "sdp_bwd") and sizes:
                shape = tuple(float(sizes[key]) for key in ("head_num", "kv_head_num", "seq_len"))
                phase, widths = row["op"][4], (sizes["qk_head_dim"], sizes["v_head_dim"])
                phase += "" if widths[0] == widths[1] else f" {widths[0]} {widths[1]}"
                attention.setdefault(phase, {}).setdefault(shape, rate)
            elif row["op"] == "group_matmul" and sizes.get("main_grad_dtype") == "fp32" and rate > 0:
                shape = tuple(float(sizes[key]) for key in ("ng", "M", "N", "K"))
                grouped.setdefault(sizes["stage"], {}).setdefault(shape, rate)
    streaming: dict[str, tuple[float, float]] = {}
    beside = path.with_name(path.name.replace("_ops.", "_bandwidth."))
    if beside != path and beside.is_file():
        with beside.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["gbps"]:
                    rate = float(row["efficient_factor"]) * float(row["gbps"]) * 1e9
                    streaming[row["name"]] = rate, float(row["latency_us"]) * 1e-6
    return Kernels(products, attention, grouped, streaming)
