"""Table of a study's variants: density, bytes, held-out loss, step time, and their changes from both controls."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from analysis.study.study import Study, Trained
from gssim.execution.files import as_text_cell
from gssim.result import Collective, Result

# Paired statistics over seeds -----------------------------------------------------------------------------------------

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a figure over a few seeds."""

    mean: float
    sd: float
    """Standard deviation over seeds (n - 1)."""
    n: int


@dataclass(frozen=True)
class Effect:
    """The mean of paired differences (or ratios), with its confidence interval."""

    mean: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, sd=1.0, n=3)
    """
    return Spread(fmean(values), stdev(values) if len(values) > 1 else math.nan, len(values))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Effect:
    """Return values - reference, pair by pair: the mean, and its 95 % interval by Student's t distribution.

    A seed affects both values of a pair (same initial parameters, same batches), so that differences vary less than the
    figures themselves. Assumes normal differences. Source: Student 1908, "The probable error of a mean".

    >>> effect = paired_difference([2.0, 3.5, 4.5], [1.0, 2.0, 3.0])
    >>> round(effect.mean, 3), round(effect.low, 3), round(effect.high, 3)
    (1.333, 0.616, 2.05)
    """
    from scipy.special import stdtrit  # the quantile of t(degrees of freedom); scipy.stats takes a second to import

    differences = [a - b for a, b in zip(values, reference, strict=True)]
    change = spread(differences)
    half = float(stdtrit(change.n - 1, (1 + CONFIDENCE) / 2)) * change.sd / math.sqrt(change.n)
    return Effect(change.mean, change.mean - half, change.mean + half, change.n)


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> Effect:
    """Return values / reference, pair by pair: the geometric mean, and its interval from that of the logarithms.

    >>> paired_ratio([2.0, 2.0], [1.0, 1.0])
    Effect(mean=2.0, low=2.0, high=2.0, n=2)
    """
    logs = paired_difference([math.log(value) for value in values], [math.log(value) for value in reference])
    return Effect(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.n)


# Rows ----------------------------------------------------------------------------------------------------------------

SENT_ONCE = ("all-to-all-v", "send")
"""Kinds of collectives whose bytes are sent once. Those of an all-reduce are sent 2 (ranks - 1) times, of others ranks
- 1 times.
"""


@dataclass(frozen=True)
class Row:
    """A variant of a study: means over its seeds, and paired differences from the controls."""

    name: str
    control: bool
    threshold: float | None
    kind: str
    rules: str
    """Settings of the push without its threshold; rows with equal settings are joined by a line."""
    samples: int
    """Samples of the whole training."""
    density: float | None
    """Fraction of the off-shard gradient elements that were pushed; None without a threshold."""
    densities: tuple[float, ...]
    """Density by step."""
    sent_bytes: float
    """Bytes that a rank sends in a step, gradients and parameters together."""
    loss: Spread
    """Loss on held-out data after the last step, in nats."""
    loss_change: Effect | None
    """Change from the loss of dense; None for dense itself."""
    loss_over_silent: Effect | None
    """Change from the loss of the control that pushes nothing."""
    accuracy: Spread | None
    """Fraction of held-out samples that are classified correctly."""
    accuracy_change: Effect | None
    curve: tuple[tuple[int, float], ...]
    """Held-out loss by step."""
    step_time_s: Spread
    speed_up: Effect | None
    """Samples per second relative to dense."""
    predicted_s: dict[str, float]
    """Predicted step time by network."""
    predicted_speed_ups: dict[str, float]
    """Predicted samples per second relative to dense, by network."""


def rows_of(study: Study, trained: Sequence[Trained]) -> list[Row]:
    """Return a row for each variant, in the study's order."""
    by_name = {each.variant.name: each for each in trained}
    return [_row(each, by_name[study.dense], by_name[study.silent]) for each in trained]


def _row(each: Trained, dense: Trained, silent: Trained) -> Row:
    losses, times = _each(each, _loss), _each(each, lambda result: result.step_time_s)
    accuracies = _accuracies(each)
    densities = [result.density.push for result in each.results if result.density.push is not None]
    of_steps = [result.density.push_by_step for result in each.results]
    evaluations = zip(*(result.evaluation for result in each.results), strict=True)
    plan, run = each.results[0].scenario["plan"], each.results[0].scenario["run"]
    steps = run["steps"] + run["warmup_steps"]
    is_dense = each is dense
    predicted_s = {name: result.step_time_s for name, result in each.predictions.items()}
    return Row(
        name=each.variant.name,
        control=each.variant.control,
        threshold=None if plan["push"]["threshold"] is None else float(plan["push"]["threshold"]),
        kind=plan["push"]["kind"],
        rules=json.dumps({key: value for key, value in plan["push"].items() if key != "threshold"}),
        samples=steps * _batch(each),
        density=fmean(densities) if densities else None,
        densities=tuple(map(fmean, zip(*of_steps, strict=True))) if densities else (),
        sent_bytes=fmean(map(sent_bytes, each.results)),
        loss=spread(losses),
        loss_change=None if is_dense else paired_difference(losses, _each(dense, _loss)),
        loss_over_silent=None if each is silent else paired_difference(losses, _each(silent, _loss)),
        accuracy=spread(accuracies) if accuracies else None,
        accuracy_change=None if is_dense or not accuracies else paired_difference(accuracies, _accuracies(dense)),
        curve=tuple((seeds[0].step, fmean(one.loss for one in seeds)) for seeds in evaluations),
        step_time_s=spread(times),
        speed_up=None if is_dense else paired_ratio(_each(each, _speed), _each(dense, _speed)),
        predicted_s=predicted_s,
        predicted_speed_ups={
            name: _batch(each) / time_s * dense.predictions[name].step_time_s / _batch(dense)
            for name, time_s in predicted_s.items()
        },
    )


def _each(trained: Trained, of: Callable[[Result], float]) -> list[float]:
    return [of(result) for result in trained.results]


def _batch(trained: Trained) -> int:
    return int(trained.results[0].scenario["workload"]["global_batch_size"])


def _speed(result: Result) -> float:
    return float(result.scenario["workload"]["global_batch_size"]) / result.step_time_s


def _loss(result: Result) -> float:
    return result.evaluation[-1].loss


def _accuracies(trained: Trained) -> list[float]:
    accuracies = [result.evaluation[-1].accuracy_ratio for result in trained.results]
    return [each for each in accuracies if each is not None]


def sent_bytes(result: Result) -> float:
    """Return the bytes that a rank sends in a step, mean over ranks, from the calls of the process group.

    Assumes rings for reduce-scatter, all-gather and all-reduce, and direct messages otherwise; data-dependent messages
    were counted as they were sent. Where ranks synchronize periodically, collectives are those of an outer step, of
    which inner steps have only those inside replicas; if fragments are synchronized, those of a whole period.
    """
    ranks = sum(entry.count for entry in result.ranks)
    return sum(total_sent_bytes(entry) / _steps_of(entry, result) for entry in result.collectives) / ranks


def _steps_of(entry: Collective, result: Result) -> int:
    """Return the number of training steps for which the Result lists a collective's calls: those of a whole period, if
    ranks synchronize periodically and the collective is between replicas.
    """
    if result.periods is None:
        return 1
    plan = result.scenario["plan"]
    replica_size = (plan.get("dp_shard") or 1) * (plan.get("tp") or 1)  # ranks of a replica follow each other
    inside = entry.group[0] // replica_size == entry.group[-1] // replica_size
    return 1 if inside and not result.periods.begin_steps else result.periods.every_steps


def total_sent_bytes(entry: Collective) -> float:
    """Return the bytes that all ranks of a collective's group send in a step.

    >>> total_sent_bytes(Collective(kind="all-reduce", group=(0, 1), bytes=100, count=2))
    400
    """
    if entry.payload_bytes is not None:
        return entry.payload_bytes
    others = len(entry.group) - 1
    copies = 1 if entry.kind in SENT_ONCE else 2 * others if entry.kind == "all-reduce" else others
    return entry.count * entry.bytes * copies


def write_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, a line for each variant; intervals are of 95 %."""
    return csv_of_lines([_line(row) for row in rows])


def csv_of_lines(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return lines (at least one, all of the same keys) as CSV; no spreadsheet treats a text in it as a formula.

    >>> csv_of_lines([{"variant": "=1+1", "seeds": 5}]).splitlines()
    ['variant,seeds', "'=1+1,5"]
    """
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({key: as_text_cell(value) if isinstance(value, str) else value for key, value in line.items()})
    return stream.getvalue()


def _line(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {
        "variant": row.name,
        "control": row.control,
        "threshold": row.threshold,
        "kind": row.kind,
        "seeds": row.loss.n,
        "samples": row.samples,
        "push_density": row.density,
        "push_density_first_step": row.densities[0] if row.densities else None,
        "push_density_last_step": row.densities[-1] if row.densities else None,
        "sent_bytes": row.sent_bytes,
        "loss_mean": row.loss.mean,
        "loss_sd": row.loss.sd,
        **_interval("loss_change", row.loss_change),
        **_interval("loss_over_silent", row.loss_over_silent),
        "accuracy_mean_ratio": row.accuracy.mean if row.accuracy else None,
        "accuracy_sd_ratio": row.accuracy.sd if row.accuracy else None,
        **_interval("accuracy_change", row.accuracy_change),
        "step_time_mean_s": row.step_time_s.mean,
        "step_time_sd_s": row.step_time_s.sd,
        **_interval("speed_up", row.speed_up),
    }
    for name, time_s in row.predicted_s.items():
        line[f"step_time_predicted_s ({name})"] = time_s
        line[f"speed_up_predicted ({name})"] = row.predicted_speed_ups[name]
    return line


def _interval(name: str, effect: Effect | None) -> dict[str, float | None]:
    values = (effect.mean, effect.low, effect.high) if effect else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))
