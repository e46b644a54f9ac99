"""Comparison of predictions with measurements of the same scenario: errors of time, memory and communication.

Results are joined by scenario id. Every error ratio is predicted / measured - 1: positive where the prediction is too
large. Where a scenario was measured several times, its step time is the median of the repeats; all other figures are
those of the repeat nearest to it.

Two naive predictions serve as baselines. Both use the compute time and bytes of the simulated Result, and leave out all
that needs a simulation: waiting, overlap, and the cost of links and messages beside their bytes.

The noise of a measurement bounds the errors that can be distinguished. That of a repeated run is taken from the
repeats; that of a single run from the two halves of its steps, which show the machine's drift within a run only: it is
a lower bound, since runs differ by more.

The effect of a threshold is its speed-up and change of loss relative to dense training. The dense run has the same
workload and steps, is of the same group of a sweep, and has no threshold; of several, it is the one of the same method.
The control is the run in which nothing is pushed (`plan.push.threshold = inf`).
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import polars as pl

from analysis.compare.groups import groups_of
from analysis.compare.table import (
    ResultFile,
    devices_by_rank,
    method_of,
    name_of,
    peaks_by_rank,
    result_table,
    short_ids,
    sweep_group,
    threshold_of,
    threshold_words,
    told_apart,
)
from gssim.cluster import Cluster
from gssim.errors import UserError
from gssim.execution import SHOWN, code_digest, package_digest
from gssim.plan import METHODS
from gssim.result import (
    BUSY_RATIO,
    COMPUTE_PHASES,
    DRIFT_RATIO,
    EXPOSED_COPIES,
    PHASES,
    UPDATE_PHASES,
    Collective,
    Result,
)
from gssim.units import validated

COMPUTED = (*COMPUTE_PHASES, *UPDATE_PHASES)


@dataclass(frozen=True)
class Naive:
    """Step times in s of the two naive predictions."""

    compute_s: float
    """Forward, backward and optimizer of the slowest rank, without any communication."""
    link_s: float | None
    """`compute_s`, then all bytes of the busiest rank over the cluster's slowest link; None where either is unknown."""


def naive(predicted: Result) -> Naive:
    """Return the naive predictions that correspond to a simulated Result."""
    compute_s = max((sum(rank.phases_s.get(phase, 0.0) for phase in COMPUTED) for rank in predicted.ranks), default=0.0)
    busiest = [size for rank in predicted.ranks for size in (rank.bytes_sent, rank.bytes_received) if size is not None]
    if not busiest:
        return Naive(compute_s, None)
    if max(busiest) == 0:
        return Naive(compute_s, compute_s)
    slowest = slowest_link_bytes_per_s(predicted.scenario)
    return Naive(compute_s, None if slowest is None else compute_s + max(busiest) / slowest)


def slowest_link_bytes_per_s(scenario: dict[str, Any]) -> float | None:
    """Return the rate of the slowest link of a resolved scenario's cluster; None where it has no links."""
    try:
        wiring = validated(Cluster, scenario["cluster"], file="scenario.cluster").wiring
    except (KeyError, UserError):
        return None  # a Result of another version: only its cluster cannot be read
    return float(wiring.bandwidth_bytes_per_s.min()) if wiring.links else None


FEWEST_STEPS = 4
"""Fewest steps of a single run for which the noise is estimated, from its two halves."""


def repeat_of(result: Result) -> int:
    """Return the number of a Result among the repeats of its scenario (`provenance.repeat`); 0 without repeats."""
    repeat = result.provenance.get("repeat", 0)
    return repeat if isinstance(repeat, int) else 0


def step_time_of(repeats: Sequence[Result]) -> float:
    """Return the median step time of the repeats of a scenario, in s."""
    return median(result.step_time_s for result in repeats)


def typical_repeat(repeats: Sequence[Result]) -> int:
    """Return the index of the repeat whose step time is nearest to the median; of several, the first."""
    middle_s = step_time_of(repeats)
    return min(range(len(repeats)), key=lambda i: abs(repeats[i].step_time_s - middle_s))


def noise_ratio_of(repeats: Sequence[Result]) -> float | None:
    """Return half the range of the repeats' step times over their median; of a single run, of its halves' medians.

    None where a single run has fewer than `FEWEST_STEPS` steps.
    """
    if len(repeats) > 1:
        return half_range_ratio([result.step_time_s for result in repeats])
    steps_s = repeats[0].step_times_s
    if len(steps_s) < FEWEST_STEPS:
        return None
    half = len(steps_s) // 2
    return half_range_ratio([median(steps_s[:half]), median(steps_s[-half:])])


def half_range_ratio(times_s: Sequence[float]) -> float | None:
    """Return (largest - smallest) / 2 over the median.

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
    f"{EXPOSED_COPIES}_measured_s",
    "calibration_id_predicted",
    "calibration_id_measured",
)
"""The columns of comparison.csv, in order."""
PERIODIC_STEPS = ("inner", "begin", "outer")
"""Kinds of steps of runs that synchronize periodically: each is compared with its own kind."""
PERIODIC_COLUMNS = tuple(
    f"{kind}_step_{what}" for kind in PERIODIC_STEPS for what in ("predicted_s", "measured_s", "error_ratio")
)
"""Further columns, where a comparison has such runs."""

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
    f"{EXPOSED_COPIES}_measured_s": pl.Float64,
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


PERIOD_COLUMNS = {f"{kind}_step_{side}_s": pl.Float64 for kind in PERIODIC_STEPS for side in ("predicted", "measured")}


@dataclass(frozen=True)
class Pair:
    """A prediction and the measurements of the same scenario."""

    predicted: ResultFile
    repeats: tuple[ResultFile, ...]
    """All measurements, at least one, in the order of their repeats."""

    @property
    def measured(self) -> ResultFile:
        """The representative measurement: the repeat nearest to the median step time."""
        return self.repeats[typical_repeat(self.measurements)]

    @property
    def measurements(self) -> list[Result]:
        """The Results of all measurements."""
        return [file.result for file in self.repeats]


@dataclass(frozen=True)
class Joined:
    """Pairs of predictions and measurements, and the Results that are in no pair."""

    pairs: tuple[Pair, ...]
    unmatched: tuple[ResultFile, ...]
    """Results without a counterpart."""
    superseded: tuple[tuple[ResultFile, ResultFile], ...]
    """(older, newer) files of the same scenario and source; the newer one is used."""


def join(files: Iterable[ResultFile]) -> Joined:
    """Return simulated and measured results joined by scenario id, those of a sweep within their group.

    Measurements that differ in `provenance.repeat` are repeats. Of several files of one repeat, or of one prediction,
    the newest is used. Raises UserError where prediction and measurement are of different devices.
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
    # pairs of one scenario file, run with several overrides, get names of their own
    results = [pair.predicted.result for pair in pairs]
    names = told_apart(
        [name_of(result) for result in results],
        [method_of(result) for result in results],
        threshold_words(map(threshold_of, results)),
        short_ids([result.scenario_id for result in results]),
    )
    named = tuple(
        pair
        if name == name_of(pair.predicted.result)
        else Pair(_renamed(pair.predicted, name), tuple(_renamed(file, name) for file in pair.repeats))
        for pair, name in zip(pairs, names, strict=True)
    )
    return Joined(named, tuple(unmatched), tuple(superseded))


def _renamed(file: ResultFile, name: str) -> ResultFile:
    return replace(file, result=replace(file.result, scenario={**file.result.scenario, "name": name}))


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
    """Return one row per pair, with `COLUMNS`, and `PERIODIC_COLUMNS` where a run has periods, sorted by name.

    Peak memory is compared rank by rank; the row reports the rank (`peak_rank`) with the largest relative error, not
    the rank that needs most.
    """
    predicted = _side([pair.predicted.result for pair in pairs], "predicted")
    measured = _side([pair.measured.result for pair in pairs], "measured")
    structure = pl.DataFrame([_structure(pair) for pair in pairs], schema=STRUCTURE_COLUMNS)
    naive_times = [naive(pair.predicted.result) for pair in pairs]
    repeats = pl.DataFrame(
        {
            "group": groups_of([pair.predicted.result for pair in pairs]),
            "repeats": [len(pair.repeats) for pair in pairs],
            "noise_ratio": [noise_ratio_of(pair.measurements) for pair in pairs],
            f"{EXPOSED_COPIES}_measured_s": [pair.measured.result.phases_s.get(EXPOSED_COPIES) for pair in pairs],
            "median_s": [step_time_of(pair.measurements) for pair in pairs],
            "naive_compute_s": [times.compute_s for times in naive_times],
            "naive_link_s": [times.link_s for times in naive_times],
        },
        schema=REPEAT_COLUMNS,
    )
    common = ("scenario_id", "name", "method", "threshold", "device", "ranks")
    return (
        pl.concat(
            [measured, predicted.drop(common), structure, repeats, _effects(pairs), _periods(pairs)], how="horizontal"
        )
        .with_columns(pl.col("median_s").alias("step_time_measured_s"))
        .with_columns(
            _error_ratio("step_time_predicted_s", "step_time_measured_s").alias("step_time_error_ratio"),
            _error_ratio("peak_predicted_bytes", "peak_measured_bytes").alias("peak_error_ratio"),
            *(
                _error_ratio(f"{kind}_step_predicted_s", f"{kind}_step_measured_s").alias(f"{kind}_step_error_ratio")
                for kind in PERIODIC_STEPS
            ),
            _error_ratio("naive_compute_s", "step_time_measured_s").alias("naive_compute_error_ratio"),
            _error_ratio("naive_link_s", "step_time_measured_s").alias("naive_link_error_ratio"),
            _ratio(
                pl.col("exposed_communication_predicted_s") - pl.col("exposed_communication_measured_s"),
                "step_time_measured_s",
            ).alias("exposed_communication_error_of_step_ratio"),
        )
        .sort("name", "threshold", "scenario_id")
        .select(*COLUMNS, *(PERIODIC_COLUMNS if any(pair.predicted.result.periods for pair in pairs) else ()))
    )


def _side(results: Sequence[Result], side: str) -> pl.DataFrame:
    """Return one row per Result of one side (`predicted` or `measured`), with the side in the names of its columns."""
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
    """Return the effect of the threshold relative to dense training, a row for each pair; nulls without a threshold."""
    pair_effects = effects(pairs)
    rows = [
        (effect.dense, effect.speed_up_predicted_ratio, effect.speed_up_measured_ratio, effect.loss_change_ratio)
        if effect
        else (None,) * len(EFFECT_COLUMNS)
        for effect in pair_effects
    ]
    return pl.DataFrame(rows, schema=EFFECT_COLUMNS, orient="row")


def _periods(pairs: Sequence[Pair]) -> pl.DataFrame:
    """Return the times of each kind of step, a row for each pair; nulls where ranks synchronize in every step.

    Several measurements give their median.
    """
    rows = []
    for pair in pairs:
        ours, theirs = pair.predicted.result.periods, [each.periods for each in pair.measurements]
        row: dict[str, float | None] = {}
        for kind in PERIODIC_STEPS:
            name = f"{kind}_step_time_s"
            known = [getattr(each, name) for each in theirs if each is not None and getattr(each, name) is not None]
            row[f"{kind}_step_predicted_s"] = getattr(ours, name, None)
            row[f"{kind}_step_measured_s"] = median(known) if known else None
        rows.append(row)
    return pl.DataFrame(rows, schema=PERIOD_COLUMNS)


def _error_ratio(predicted: str, measured: str) -> pl.Expr:
    """Return predicted / measured - 1, null where the measured value is 0."""
    return _ratio(pl.col(predicted), measured) - 1


def _ratio(value: pl.Expr, to: str) -> pl.Expr:
    return pl.when(pl.col(to) != 0).then(value / pl.col(to))


def _structure(pair: Pair) -> dict[str, Any]:
    """Return the columns that need the whole Results: memory of the worst-predicted rank, and the collectives."""
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
    """Return the rank with the largest |predicted / measured - 1|, the lowest of several; None without measured peaks.

    >>> worst_rank({0: 100.0, 1: 30.0}, {0: 101.0, 1: 40.0})
    1
    """
    ranks = [rank for rank in sorted(measured) if measured[rank] > 0]
    return max(ranks, key=lambda rank: abs(predicted[rank] / measured[rank] - 1), default=None)


def collectives_difference(predicted: Iterable[Collective], measured: Iterable[Collective]) -> list[str]:
    """Return a sentence for each collective that only one side has; empty where the multisets are equal."""
    ours, theirs = Counter(entry.key for entry in predicted), Counter(entry.key for entry in measured)
    return [
        f"only {side}: {count} x {kind} of {size} bytes among ranks {' '.join(map(str, group))}"
        for side, rest in (("predicted", ours - theirs), ("measured", theirs - ours))
        for kind, group, size, count in sorted(rest.elements())
    ]


def payload_error_ratio(predicted: Sequence[Collective], measured: Sequence[Collective]) -> float | None:
    """Return predicted / measured - 1 of the bytes of data-dependent messages; None where there are none.

    An entry is data-dependent where either side has `payload_bytes`; the other side then counts the full tensors.
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
    """The median absolute error of a quantity over `n` scenarios."""

    what: str
    error_ratio: float
    n: int


def medians(comparison: pl.DataFrame) -> list[Median]:
    """Return the median of |error| of each quantity, over the scenarios that have one."""
    results = []
    for what, column in (
        ("step time", "step_time_error_ratio"),
        *((f"{kind} step time", f"{kind}_step_error_ratio") for kind in PERIODIC_STEPS),
        ("peak memory", "peak_error_ratio"),
        ("payload", "payload_error_ratio"),
    ):
        if column not in comparison.columns:
            continue
        median = comparison[column].abs().median()
        if isinstance(median, float):
            results.append(Median(what, median, comparison[column].count()))
    return results


# Effects of thresholds ------------------------------------------------------------------------------------------------

LAST_STEPS_RATIO = 0.2
"""A run's last loss is the mean over this fraction of its last steps, since single batches differ in difficulty."""


@dataclass(frozen=True)
class Effect:
    """Effect of a threshold: speed relative to the dense run, and relative change of its loss."""

    dense: str
    """The name of the dense run."""
    speed_up_measured_ratio: float
    speed_up_predicted_ratio: float
    loss_change_ratio: float | None
    """Relative change of the mean loss of the last steps; None where a run has no losses."""


def effects(pairs: Sequence[Pair]) -> list[Effect | None]:
    """Return the effect of each thresholded run; None for others, and without a dense run of the same training."""
    dense: dict[str, list[Pair]] = defaultdict(list)
    """The runs that exchange all gradients in every step, by training."""
    for pair in pairs:
        real = pair.measured.result
        method = METHODS.get(method_of(real))
        if not is_thresholded(real) and (method is None or method.exchanges_all_gradients):
            dense[_training_key(real)].append(pair)
    return [
        _effect(pair, dense[_training_key(pair.measured.result)]) if is_thresholded(pair.measured.result) else None
        for pair in pairs
    ]


def _effect(pair: Pair, same: Sequence[Pair]) -> Effect | None:
    """Return the effect of a run against a dense one of the same training, preferably of the same method."""
    real = pair.measured.result

    def distance(other: Pair) -> tuple[bool, str]:
        return method_of(other.measured.result) != method_of(real), name_of(other.measured.result)

    dense = min(same, key=distance, default=None)
    if dense is None:
        return None
    return Effect(
        dense=name_of(dense.measured.result),
        speed_up_measured_ratio=step_time_of(dense.measurements) / step_time_of(pair.measurements),
        speed_up_predicted_ratio=dense.predicted.result.step_time_s / pair.predicted.result.step_time_s,
        loss_change_ratio=_change(last_loss(real), last_loss(dense.measured.result)),
    )


def is_thresholded(result: Result) -> bool:
    """Return whether a threshold decides what is pushed or published."""
    return threshold_of(result) is not None or _table(result, "publish").get("threshold") is not None


def last_loss(result: Result) -> float | None:
    """Return the mean loss of a run's last steps; None where it has none."""
    count = max(1, round(LAST_STEPS_RATIO * len(result.loss)))
    return fmean(result.loss[-count:]) if result.loss else None


def _training_key(result: Result) -> str:
    """Return a key of all that determines a dense training and its step time, except for the method."""
    scenario, plan = result.scenario, result.scenario["plan"]
    parts = [scenario.get(key) for key in ("workload", "run", "network")]
    parts += [plan.get(key) for key in ("shares", "micro_batches", "recompute")]
    return json.dumps([*parts, devices_by_rank(result), sweep_group(result)], sort_keys=True, default=str)


def _table(result: Result, key: str) -> dict[str, Any]:
    table = result.scenario["plan"].get(key)
    return table if isinstance(table, dict) else {}


def _change(loss: float | None, dense: float | None) -> float | None:
    return None if loss is None or not dense else loss / dense - 1


# Versions -------------------------------------------------------------------------------------------------------------

MOST_NAMES = 3


def differences(pairs: Sequence[Pair]) -> list[str]:
    """Return a sentence for each circumstance that makes figures doubtful: other code, or a machine with other work.

    No Result is left out for it: a changed line need not change a figure.
    """
    predicted = [pair.predicted for pair in pairs]
    measured = [file for pair in pairs for file in pair.repeats]
    sentences = [
        *_of_other_code(predicted, "code", code_digest(), "predicted", "another gssim", "predict again"),
        *_of_other_code(
            [file for file in measured if "ingested" not in file.result.provenance],  # by the user's own program
            "gsreal",
            package_digest("gsreal"),
            "measured",
            "another gsreal",
            "run it again, with --again if a sweep or a study made it",
        ),
    ]
    sentences += doubts(measured)
    versions = Counter(str(file.result.provenance.get("torch", "not stated")) for file in measured)
    if len(versions) > 1:
        counts = ", ".join(f"{version} ({count})" for version, count in versions.most_common())
        sentences.append(f"measured with several versions of torch: {counts}")
    return sentences


def doubts(measured: Sequence[ResultFile]) -> list[str]:
    """Return a sentence on measurements beside other work, and on those of a machine that was faster or slower."""
    sentences = []
    busy = [
        f"{name_of(file.result)} ({file.result.provenance['core_wait_ratio']:.0%})"
        for file in measured
        if file.result.provenance.get("core_wait_ratio", 0.0) > BUSY_RATIO
    ]
    if busy:
        sentences.append(
            f"measured while ranks waited for cores that other work used (part of the time): {_listed(busy)}"
        )
    drifted = [
        f"{name_of(file.result)} ({file.result.provenance['device_speed_ratio']:.0%})"
        for file in measured
        if abs(file.result.provenance.get("device_speed_ratio", 1.0) - 1) > DRIFT_RATIO
    ]
    if drifted:
        sentences.append(
            "measured when the machine multiplied matrices faster or slower than its devices' file states; predicted "
            f"compute may be off by as much (speed of what is stated): {_listed(drifted)}"
        )
    return sentences


MOST_DOUBTED = 12


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - MOST_DOUBTED} more" if len(names) > MOST_DOUBTED else ""
    return f"{'; '.join(names[:MOST_DOUBTED])}{more}"


def _of_other_code(files: Sequence[ResultFile], key: str, digest: str, done: str, other: str, advice: str) -> list[str]:
    """Return a sentence on the files whose code digest differs or is missing; nothing where there are none."""
    names = [name_of(file.result) for file in files if file.result.provenance.get(key) != digest[:SHOWN]]
    if not names:
        return []
    shown = list(dict.fromkeys(names))
    more = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
    listed = f"{', '.join(shown[:MOST_NAMES])}{more}"
    return [f"{len(names)} of {len(files)} {done} with {other} than this one, or one not stated ({listed}); {advice}"]
