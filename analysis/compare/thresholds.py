"""Effect of a threshold relative to dense training: speed-up and change of loss.

The dense run has the same workload and steps, is of the same group of a sweep, and has no threshold; of several, it is
the one of the same method. The control is the run in which nothing is pushed (`plan.push.threshold = inf`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from analysis.compare.table import devices_by_rank, method_of, name_of, sweep_group, threshold_of
from gssim.result import Result

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


def effects(measured: Sequence[Result], predicted: Sequence[Result]) -> list[Effect | None]:
    """Return the effect of each thresholded run; None for others, and without a dense run of the same training.

    `measured` and `predicted` are of the same scenarios, in the same order.
    """
    pairs = list(zip(measured, predicted, strict=True))
    return [_effect(pair, pairs) if is_thresholded(pair[0]) else None for pair in pairs]


def _effect(pair: tuple[Result, Result], pairs: Sequence[tuple[Result, Result]]) -> Effect | None:
    real, simulated = pair
    same = [other for other in pairs if not is_thresholded(other[0]) and _training_key(other[0]) == _training_key(real)]
    dense = min(same, key=lambda other: (method_of(other[0]) != method_of(real), name_of(other[0])), default=None)
    if dense is None:
        return None
    return Effect(
        dense=name_of(dense[0]),
        speed_up_measured_ratio=dense[0].step_time_s / real.step_time_s,
        speed_up_predicted_ratio=dense[1].step_time_s / simulated.step_time_s,
        loss_change_ratio=_change(last_loss(real), last_loss(dense[0])),
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
