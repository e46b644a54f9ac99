"""Predicted beside measured: join by scenario id, then the errors of time, memory and what was communicated.

Every error ratio is predicted / measured - 1: positive where the prediction is too large. Where a scenario was measured
several times, its step time is the median of the repeats; all else is of the repeat nearest to that.

Naive predictions that ours must beat: what anybody would reckon on the back of an envelope.

Both take what the simulated Result says of compute and bytes, and leave out what a simulation is for: who waits for
whom, what links and messages cost beside their bytes, and what overlaps.

How much a measurement varies when nothing was changed: the noise floor, under which no error can be told.

A run that was repeated has its noise from the repeats. One that was not has it from its own steps, in halves: what the
machine drifts within a run. Runs differ by more than that, so the noise of a run alone is a lower bound.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import polars as pl

from analysis.compare.groups import group_of
from analysis.compare.table import ResultFile, devices_by_rank, peaks_by_rank, result_table, sweep_group
from analysis.compare.thresholds import effects
from gssim.cluster import Cluster
from gssim.errors import UserError
from gssim.result import COMPUTE_PHASES, PHASES, UPDATE_PHASES, Collective, RankClass, Result
from gssim.units import validated

COMPUTED = (*COMPUTE_PHASES, *UPDATE_PHASES)


@dataclass(frozen=True)
class Naive:
    """Step times in s that two naive predictions give."""

    compute_s: float
    """Of the slowest rank: forward, backward and optimizer, as if nothing were sent."""
    link_s: float | None
    """The same, then all bytes of the busiest rank over the cluster's slowest link; None where either is unknown."""


def naive(predicted: Result) -> Naive:
    """Return the naive predictions of what a simulated Result predicts."""
    compute_s = max((_compute_s(rank) for rank in predicted.ranks), default=0.0)
    busiest = [size for rank in predicted.ranks for size in (rank.bytes_sent, rank.bytes_received) if size is not None]
    if not busiest:
        return Naive(compute_s, None)
    if max(busiest) == 0:
        return Naive(compute_s, compute_s)
    slowest = slowest_link_bytes_per_s(predicted.scenario)
    return Naive(compute_s, None if slowest is None else compute_s + max(busiest) / slowest)


def _compute_s(rank: RankClass) -> float:
    return sum(rank.phases_s.get(phase, 0.0) for phase in COMPUTED)


def slowest_link_bytes_per_s(scenario: dict[str, Any]) -> float | None:
    """Return the rate of the slowest link of a resolved scenario's cluster; None where it has no links."""
    try:
        wiring = validated(Cluster, scenario["cluster"], file="scenario.cluster").wiring
    except (KeyError, UserError):
        return None  # a Result of another version: its cluster cannot be read, all else can
    return float(wiring.bandwidth_bytes_per_s.min()) if wiring.links else None


FEWEST_STEPS = 4
"""Of a run alone, of which half are in each half."""


def repeat_of(result: Result) -> int:
    """Return which repeat of its scenario a Result is (`provenance.repeat`); 0 where nothing was repeated."""
    repeat = result.provenance.get("repeat", 0)
    return repeat if isinstance(repeat, int) else 0


def step_time_of(repeats: Sequence[Result]) -> float:
    """Return the step time of a scenario that was measured several times, in s: the median of the repeats'."""
    return median(result.step_time_s for result in repeats)


def typical_repeat(repeats: Sequence[Result]) -> int:
    """Return the index of the repeat whose step time is nearest to the median, the first of several."""
    middle_s = step_time_of(repeats)
    return min(range(len(repeats)), key=lambda i: abs(repeats[i].step_time_s - middle_s))


def noise_ratio_of(repeats: Sequence[Result]) -> float | None:
    """Return half the range of the repeats' step times over their median; of one run alone, of its halves' medians.

    None where a run alone has fewer than `FEWEST_STEPS` steps.
    """
    if len(repeats) > 1:
        return half_range_ratio([result.step_time_s for result in repeats])
    steps_s = repeats[0].step_times_s
    if len(steps_s) < FEWEST_STEPS:
        return None
    half = len(steps_s) // 2
    return half_range_ratio([median(steps_s[:half]), median(steps_s[-half:])])


def half_range_ratio(times_s: Sequence[float]) -> float | None:
    """Return (largest - smallest) / 2 over the median: all times lie about within the median ± so much of it.

    >>> half_range_ratio([0.9, 1.0, 1.3])
    0.2
    """
    middle_s = median(times_s)
    return (max(times_s) - min(times_s)) / 2 / middle_s if middle_s > 0 else None


COLUMNS = (
    "scenario_id",
    "name",
    "method",
    "threshold",
    "step_time_predicted_s",
    "step_time_measured_s",
    "step_time_error_ratio",
    "peak_predicted_bytes",
    "peak_measured_bytes",
    "peak_error_ratio",
    "collectives_equal",
    "payload_error_ratio",
    "peak_rank",
    "collectives_difference",
    "group",
    "repeats",
    "noise_ratio",
    "naive_compute_s",
    "naive_compute_error_ratio",
    "naive_link_s",
    "naive_link_error_ratio",
    "exposed_communication_error_of_step_ratio",
    "step_time_p10_predicted_s",
    "step_time_p10_measured_s",
    "device",
    "ranks",
    "fits_predicted",
    "fits_measured",
    "push_density_predicted",
    "push_density_measured",
    "publish_density_predicted",
    "publish_density_measured",
    "speed_up_over",
    "speed_up_predicted_ratio",
    "speed_up_measured_ratio",
    "loss_change_measured_ratio",
    *(f"{phase}_{side}_s" for phase in PHASES for side in ("predicted", "measured")),
    "calibration_id_predicted",
    "calibration_id_measured",
)
"""The columns of comparison.csv, in order."""

STRUCTURE_COLUMNS = {
    "peak_rank": pl.Int64,
    "peak_predicted_bytes": pl.Float64,
    "peak_measured_bytes": pl.Float64,
    "collectives_equal": pl.Boolean,
    "collectives_difference": pl.String,
    "payload_error_ratio": pl.Float64,
}

REPEAT_COLUMNS = {
    "group": pl.String,
    "repeats": pl.Int64,
    "noise_ratio": pl.Float64,
    "median_s": pl.Float64,
    "naive_compute_s": pl.Float64,
    "naive_link_s": pl.Float64,
}

EFFECT_COLUMNS = {
    "speed_up_over": pl.String,
    "speed_up_predicted_ratio": pl.Float64,
    "speed_up_measured_ratio": pl.Float64,
    "loss_change_measured_ratio": pl.Float64,
}


@dataclass(frozen=True)
class Pair:
    """A prediction and the measurements of the same scenario."""

    predicted: ResultFile
    repeats: tuple[ResultFile, ...]
    """All measurements, at least one, in the order of their repeats."""

    @property
    def measured(self) -> ResultFile:
        """The measurement that stands for all: of the repeats the one nearest to their median step time."""
        return self.repeats[typical_repeat(self.measurements)]

    @property
    def measurements(self) -> list[Result]:
        """The Results of all measurements."""
        return [file.result for file in self.repeats]


@dataclass(frozen=True)
class Joined:
    """What joined, and what did not."""

    pairs: tuple[Pair, ...]
    unmatched: tuple[ResultFile, ...]
    """Results of which the other side is missing."""
    superseded: tuple[tuple[ResultFile, ResultFile], ...]
    """(older, newer) files of the same scenario and source; the newer one counts."""


def join(files: Iterable[ResultFile]) -> Joined:
    """Return simulated and measured results joined by scenario id, those of a sweep within their group.

    Measurements that differ in `provenance.repeat` are repeats; of several of one repeat, and of several predictions,
    the newest counts.

    Raises UserError where a prediction for one device would meet a run on another.
    """
    predictions: dict[tuple[str, str], dict[int, ResultFile]] = defaultdict(dict)
    measurements: dict[tuple[str, str], dict[int, ResultFile]] = defaultdict(dict)
    superseded = []
    for file in sorted(files, key=lambda file: (file.modified_ns, str(file.path))):
        side = predictions if file.result.source == "simulated" else measurements
        repeats, repeat = side[file.result.scenario_id, sweep_group(file.result)], repeat_of(file.result)
        if repeat in repeats:
            superseded.append((repeats[repeat], file))
        repeats[repeat] = file
    pairs: list[Pair] = []
    unmatched: list[ResultFile] = []
    for key in sorted(predictions.keys() | measurements.keys()):
        predicted = predictions[key].get(0)
        measured = tuple(file for _, file in sorted(measurements[key].items(), key=lambda item: item[0]))
        if predicted and measured:
            for file in measured:
                _check_devices(predicted, file)
            pairs.append(Pair(predicted, measured))
        else:
            unmatched.extend((predicted, *measured) if predicted else measured)
    return Joined(tuple(pairs), tuple(unmatched), tuple(superseded))


def _check_devices(predicted: ResultFile, measured: ResultFile) -> None:
    ours, theirs = devices_by_rank(predicted.result), devices_by_rank(measured.result)
    for rank in sorted(ours.keys() | theirs.keys()):
        if ours.get(rank) != theirs.get(rank):
            raise UserError(
                f"{predicted.path}: predicts {_device(ours, rank)} for rank {rank}, "
                f"but {measured.path} was measured with {_device(theirs, rank)}; "
                "predict again for the measured devices (gssim run SCENARIO --set cluster=FILE) or leave one file out"
            )


def _device(devices: dict[int, str], rank: int) -> str:
    return f"device '{devices[rank]}'" if rank in devices else "no device"


def compare(pairs: Sequence[Pair]) -> pl.DataFrame:
    """Return one row per pair, with the columns of `COLUMNS`, sorted by name.

    Peak memory is compared rank by rank; the row reports the rank (`peak_rank`) whose prediction is furthest off in
    proportion to what was measured, not the rank that needs most.
    """
    predicted = _side([pair.predicted.result for pair in pairs], "predicted")
    measured = _side([pair.measured.result for pair in pairs], "measured")
    structure = pl.DataFrame([_structure(pair) for pair in pairs], schema=STRUCTURE_COLUMNS)
    repeats = pl.DataFrame([_repeats(pair) for pair in pairs], schema=REPEAT_COLUMNS)
    twice = ("scenario_id", "name", "method", "threshold", "device", "ranks")
    return (
        pl.concat([measured, predicted.drop(twice), structure, repeats, _effects(pairs)], how="horizontal")
        .with_columns(pl.col("median_s").alias("step_time_measured_s"))
        .with_columns(
            _error_ratio("step_time_predicted_s", "step_time_measured_s").alias("step_time_error_ratio"),
            _error_ratio("peak_predicted_bytes", "peak_measured_bytes").alias("peak_error_ratio"),
            _error_ratio("naive_compute_s", "step_time_measured_s").alias("naive_compute_error_ratio"),
            _error_ratio("naive_link_s", "step_time_measured_s").alias("naive_link_error_ratio"),
            _ratio(
                pl.col("exposed_communication_predicted_s") - pl.col("exposed_communication_measured_s"),
                "step_time_measured_s",
            ).alias("exposed_communication_error_of_step_ratio"),
        )
        .sort("name", "threshold", "scenario_id")
        .select(COLUMNS)
    )


def _repeats(pair: Pair) -> dict[str, Any]:
    """Return what the repeats of a measurement say together, and the naive predictions of the same."""
    guess = naive(pair.predicted.result)
    return {
        "group": group_of(pair.predicted.result),
        "repeats": len(pair.repeats),
        "noise_ratio": noise_ratio_of(pair.measurements),
        "median_s": step_time_of(pair.measurements),
        "naive_compute_s": guess.compute_s,
        "naive_link_s": guess.link_s,
    }


def _side(results: Sequence[Result], side: str) -> pl.DataFrame:
    """Return one row per result of one side, phases as columns, its columns named after the side."""
    phases = pl.DataFrame(
        [{f"{phase}_{side}_s": result.phases_s.get(phase) for phase in PHASES} for result in results],
        schema={f"{phase}_{side}_s": pl.Float64 for phase in PHASES},
    )
    named = {
        "step_time_s": f"step_time_{side}_s",
        "step_time_p10_s": f"step_time_p10_{side}_s",
        "fits": f"fits_{side}",
        "push_density": f"push_density_{side}",
        "publish_density": f"publish_density_{side}",
        "calibration_id": f"calibration_id_{side}",
    }
    rows = result_table(results).select("scenario_id", "name", "method", "threshold", "device", "ranks", *named)
    return pl.concat([rows.rename(named), phases], how="horizontal")


def _effects(pairs: Sequence[Pair]) -> pl.DataFrame:
    """Return what thresholds changed beside dense training, a row for each pair; nulls where nothing is thresholded."""
    found = effects([pair.measured.result for pair in pairs], [pair.predicted.result for pair in pairs])
    rows = [
        (each.dense, each.speed_up_predicted_ratio, each.speed_up_measured_ratio, each.loss_change_ratio)
        if each
        else (None,) * len(EFFECT_COLUMNS)
        for each in found
    ]
    return pl.DataFrame(rows, schema=EFFECT_COLUMNS, orient="row")


def _error_ratio(predicted: str, measured: str) -> pl.Expr:
    """Return predicted / measured - 1, null where nothing was measured."""
    return _ratio(pl.col(predicted), measured) - 1


def _ratio(value: pl.Expr, to: str) -> pl.Expr:
    return pl.when(pl.col(to) != 0).then(value / pl.col(to))


def _structure(pair: Pair) -> dict[str, Any]:
    """Return what needs the whole Results, not their rows: the worst rank's memory and the collectives."""
    predicted, measured = pair.predicted.result, pair.measured.result
    ours, theirs = peaks_by_rank(predicted), peaks_by_rank(measured)
    rank = worst_rank(ours, theirs)
    difference = collectives_difference(predicted.collectives, measured.collectives)
    return {
        "peak_rank": rank,
        "peak_predicted_bytes": None if rank is None else ours[rank],
        "peak_measured_bytes": None if rank is None else theirs[rank],
        "collectives_equal": not difference,
        "collectives_difference": "; ".join(difference) or None,
        "payload_error_ratio": payload_error_ratio(predicted.collectives, measured.collectives),
    }


def worst_rank(predicted: dict[int, float], measured: dict[int, float]) -> int | None:
    """Return the rank with the largest |predicted / measured - 1|, the lowest such rank; None where none can be told.

    >>> worst_rank({0: 100.0, 1: 30.0}, {0: 101.0, 1: 40.0})
    1
    """
    ranks = [rank for rank in sorted(measured) if measured[rank] > 0]
    return max(ranks, key=lambda rank: abs(predicted[rank] / measured[rank] - 1), default=None)


def collectives_difference(predicted: Iterable[Collective], measured: Iterable[Collective]) -> list[str]:
    """Return what stands on one side only, one sentence an entry; empty where the multisets are equal (rung a)."""
    ours, theirs = Counter(entry.key for entry in predicted), Counter(entry.key for entry in measured)
    return [
        f"only {side}: {count} x {kind} of {size} bytes among ranks {' '.join(map(str, group))}"
        for side, rest in (("predicted", ours - theirs), ("measured", theirs - ours))
        for kind, group, size, count in sorted(rest.elements())
    ]


def payload_error_ratio(predicted: Sequence[Collective], measured: Sequence[Collective]) -> float | None:
    """Return predicted / measured - 1 of what data-dependent messages carried; None where there are none.

    An entry is data-dependent where either side says so; the side that does not carried the full tensors.
    """
    kinds = {_kind(entry) for entry in (*predicted, *measured) if entry.payload_bytes is not None}
    carried = sum(_carried_bytes(entry) for entry in measured if _kind(entry) in kinds)
    expected = sum(_carried_bytes(entry) for entry in predicted if _kind(entry) in kinds)
    return expected / carried - 1 if carried else None


def _kind(entry: Collective) -> tuple[str, tuple[int, ...], int]:
    return (entry.kind, entry.group, entry.bytes)


def _carried_bytes(entry: Collective) -> float:
    return float(entry.bytes * entry.count) if entry.payload_bytes is None else entry.payload_bytes


@dataclass(frozen=True)
class Median:
    """The median size of an error over `n` scenarios."""

    what: str
    error_ratio: float
    n: int


def medians(comparison: pl.DataFrame) -> list[Median]:
    """Return the median of |error| of each quantity, over the scenarios that have one."""
    found = []
    for what, column in (
        ("step time", "step_time_error_ratio"),
        ("peak memory", "peak_error_ratio"),
        ("payload", "payload_error_ratio"),
    ):
        median = comparison[column].abs().median()
        if isinstance(median, float):
            found.append(Median(what, median, comparison[column].count()))
    return found
