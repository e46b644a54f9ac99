"""Table of Gradient Sharding against its dense rivals, DDP and ZeRO-2, of the same group.

A rival trains the same model on the same data and devices. Of several (another batch split, micro-batches or
recomputation) it is the one whose plan differs least. Step times alone are no comparison of trainings, so the table
also has the densities of push and publish and the change of loss; the control is the run in which nothing is pushed.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import inf

import polars as pl

from analysis.compare.comparison import Pair, last_loss, noise_ratio_of, step_time_of
from analysis.compare.groups import groups_of
from analysis.compare.table import devices_by_rank, method_of, name_of, threshold_of
from gssim.plan import METHODS
from gssim.result import Result

GRADIENT_SHARDING = tuple(name for name, method in METHODS.items() if method.is_gradient_sharding)
DENSE = ("ddp", "zero2")
COMPARED_KEYS = ("shares", "micro_batches", "recompute")
"""Keys of a plan in which a rival should be equal, but need not be."""

COLUMNS = {
    "group": pl.String,
    "name": pl.String,
    "scenario_id": pl.String,
    "method": pl.String,
    "threshold": pl.Float64,
    "control": pl.Boolean,
    "rival_method": pl.String,
    "rival": pl.String,
    "step_time_ratio_predicted": pl.Float64,
    "step_time_ratio_measured": pl.Float64,
    "noise_ratio": pl.Float64,
    "push_density_predicted": pl.Float64,
    "push_density_measured": pl.Float64,
    "publish_density_predicted": pl.Float64,
    "publish_density_measured": pl.Float64,
    "loss_change_measured_ratio": pl.Float64,
}
"""The columns of gs_against_dense.csv, in order. Ratios are of a step's time to the rival's: below 1, GS is faster."""


def rival_table(pairs: Sequence[Pair]) -> pl.DataFrame:
    """Return a row for each Gradient Sharding scenario and each of its dense rivals that was measured too."""
    trainings: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    groups = groups_of([pair.predicted.result for pair in pairs])
    for pair, group in zip(pairs, groups, strict=True):
        trainings[group, _training_key(pair.predicted.result)].append(pair)

    def distance(rival: Pair, ours: Pair) -> tuple[int, str]:
        plan, other = ours.predicted.result.scenario["plan"], rival.predicted.result.scenario["plan"]
        return sum(other.get(key) != plan.get(key) for key in COMPARED_KEYS), name_of(rival.predicted.result)

    rows = [
        # the rival whose plan differs in the fewest keys; of several, the first by name
        _row(group, pair, min(rivals, key=partial(distance, ours=pair)))
        for (group, _), same in trainings.items()
        for pair in same
        if method_of(pair.predicted.result) in GRADIENT_SHARDING
        for method in DENSE
        if (rivals := [rival for rival in same if method_of(rival.predicted.result) == method])
    ]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row").sort("group", "name", "scenario_id", "rival_method")


def _training_key(result: Result) -> str:
    """Return a key of the training and its devices, without gradient statistics, which only predictions have."""
    workload = {key: value for key, value in result.scenario.get("workload", {}).items() if key != "gradients"}
    parts = [workload, result.scenario.get("run"), result.scenario.get("network"), devices_by_rank(result)]
    return json.dumps(parts, sort_keys=True, default=str)


def _row(group: str, pair: Pair, rival: Pair) -> tuple[object, ...]:
    predicted, measured = pair.predicted.result, pair.measured.result
    noise = [noise_ratio_of(each.measurements) for each in (pair, rival)]
    losses = last_loss(measured), last_loss(rival.measured.result)
    threshold = threshold_of(predicted)
    return (
        group,
        name_of(predicted),
        predicted.scenario_id,
        method_of(predicted),
        threshold,
        threshold == inf,
        method_of(rival.predicted.result),
        name_of(rival.predicted.result),
        predicted.step_time_s / rival.predicted.result.step_time_s,
        step_time_of(pair.measurements) / step_time_of(rival.measurements),
        sum(each or 0.0 for each in noise),
        predicted.density.push,
        measured.density.push,
        predicted.density.publish,
        measured.density.publish,
        losses[0] / losses[1] - 1 if losses[0] is not None and losses[1] else None,
    )
