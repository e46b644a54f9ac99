"""Fit of NCCL's constants to a table of nccl-tests."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gssim.cluster import GENERATIONS, Array, Kind, NcclTuning
from gssim.collectives.nccl.times import Group, ways

# Fitted constants: (name, lower bound, upper bound, step size).
_Constant = tuple[str, float, float, float]
_BOUNDS: tuple[_Constant, ...] = (
    ("latency_s", 0.0, 0.1, 1e-5),
    ("simple_hop_ratio", 0.1, 100.0, 1.0),
    ("pipeline_latency_s", 0.0, 1e-3, 2e-6),
)
# Latency, hop ratio; pipeline latency, factor of the bandwidth ratio: a fast network is hidden behind the links
_STARTS = tuple(
    (*hops, *rest)
    for hops in ((1e-5, 1.0), (5e-5, 0.3), (1e-4, 8.0))
    for rest in ((1e-6, 1.0), (2e-5, 1.0), (1e-6, 0.4))
)
# Weights of the prior (the start values) relative to one point's relative error. They decide only what the table does
# not determine: above all, with a single number of ranks, how a latency is split between `latency_s` and the hops.
_PRIOR_WEIGHT = 0.001
_HOP_PRIOR_WEIGHT = 0.02


def fit(
    table: Iterable[tuple[float, float]],
    group: Group,
    *,
    kind: Kind = "all-reduce",
    start: NcclTuning | None = None,
) -> NcclTuning:
    """Return `start` with four constants fitted to (size in bytes, time in seconds) of `kind` between `group`.

    The four are `latency_s`, `simple_hop_ratio`, `pipeline_latency_s`, and `bandwidth_ratio` (with several nodes
    `network_bandwidth_ratio`). The fit minimises squared relative errors, with a soft loss beyond 10 % (robust to
    outliers), in which each of many sizes of one octave counts less. It runs from a few fixed starts, so equal tables
    give equal constants. `start` (of `GENERATIONS`; Ampere by default) has all other constants. Raises ValueError for
    fewer than four sizes.

    >>> from gssim.collectives.nccl.times import times
    >>> wires = Group(ranks=8, bandwidth_bytes_per_s=300e9)
    >>> true = NcclTuning(latency_s=2e-5, bandwidth_ratio=0.7)
    >>> table = [(2.0**k, times(true, "all-reduce", 2.0**k, wires).time_s) for k in range(10, 31)]
    >>> round(fit(table, wires, start=NcclTuning()).bandwidth_ratio, 2)
    0.7
    """
    sizes, measured_s = _columns(table)
    weights = _octave_weights(sizes)
    start = start or GENERATIONS["ampere"]
    ratio = "network_bandwidth_ratio" if group.nodes > 1 else "bandwidth_ratio"
    constants = (*_BOUNDS, (ratio, 0.01, 1.0, 0.1))
    origin = np.array([getattr(start, name) for name, *_ in constants])
    scale = np.array([step for *_, step in constants])

    def tuned(values: Array) -> NcclTuning:
        moved: dict[str, Any] = {name: float(x) for (name, *_), x in zip(constants, values, strict=True)}
        return replace(start, **moved)

    def residuals(values: Array) -> Array:
        predicted_s = np.min([way.time_s(sizes) for way in ways(tuned(values), kind, group)], axis=0)
        prior = _PRIOR_WEIGHT * math.sqrt(len(sizes)) * (values - origin) / scale
        prior[1] = _HOP_PRIOR_WEIGHT * math.sqrt(len(sizes)) * math.log(values[1] / origin[1])
        return np.concatenate([weights * (predicted_s / measured_s - 1), prior])

    return tuned(_least(residuals, origin, constants, scale))


def _columns(table: Iterable[tuple[float, float]]) -> tuple[Array, Array]:
    """Return sizes and times of a table, sorted, without rows that lack either."""
    rows = sorted((size, time_s) for size, time_s in table if size > 0 and time_s > 0)
    if len({size for size, _ in rows}) < 4:
        raise ValueError(f"table: has {len(rows)} usable rows, but four constants need four sizes")
    columns = np.array(rows, dtype=np.float64)
    return columns[:, 0], columns[:, 1]


def _octave_weights(sizes: Array) -> Array:
    """Return square roots of weights under which an octave of sizes with c rows counts as sqrt(c) rows; mean 1.

    A table with a row per MiB has a thousand large messages and a handful of small ones. Equal weights for all rows, or
    for all octaves, would fit one end badly.
    """
    octaves = np.floor(np.log2(sizes))
    _, place, counts = np.unique(octaves, return_inverse=True, return_counts=True)
    weights = counts[place] ** -0.5
    return np.asarray(np.sqrt(weights / weights.mean()), dtype=np.float64)


def _least(residuals: Callable[[Array], Array], origin: Array, constants: Sequence[_Constant], scale: Array) -> Array:
    """Return the values with the least cost over all fixed starts, each within its bounds."""
    from scipy.optimize import least_squares  # lazy: keeps `import gssim` fast

    lower = np.array([low for _, low, _, _ in constants])
    upper = np.array([high for _, _, high, _ in constants])
    best, least = origin, math.inf
    for *values, factor in _STARTS:
        first = np.array([*values, factor * origin[3]])
        solution = least_squares(
            residuals,
            np.clip(first, lower + 1e-9, upper - 1e-9),
            bounds=(lower, upper),
            x_scale=scale,
            diff_step=np.full(4, 1e-4),
            loss="soft_l1",
            f_scale=0.1,
            max_nfev=200,
        )
        if solution.cost < least:
            best, least = solution.x, solution.cost
    return np.asarray(best, dtype=np.float64)
