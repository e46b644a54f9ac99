"""Time of each method to an equal loss, by network, by how unequal the devices are, and by model.

[Note: equal loss] A study's trainings say how many steps each variant needs; a simulation says how long a step takes on
each network. For each seed, the equal loss is the loss that dense training has after a third of its steps. The other
variants have three times as many steps to reach it; a variant that does not reach it needs infinite time. Steps are
read from held-out losses, interpolated linearly between evaluations. Assumptions: the steps that a variant needs depend
neither on the network nor on how samples are divided among the ranks, and thresholded variants push the same fraction
of the gradients everywhere.

[Note: further models] A larger model is not trained. The ratio of a variant's steps to dense's is taken from the
study's trainings, under the assumption that it does not depend on the model. The assumption can only hold for the same
fraction of the gradients, not for the same threshold: gradients of a larger model are smaller, and fewer of them would
reach it. So the variant's push gets a target density, the one that was counted in its trainings; its threshold follows
the model's own gradients. A relative threshold of a publish stays: its unit is the learning rate, which is about a step
of Adam's. The fraction that is published is predicted from statistics transferred from the family, with their band. A
variant that does not fit in the devices' memory never reaches the loss.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from statistics import fmean

from analysis.study.rivals import Course, dense_ratio
from analysis.study.rows import csv_of_lines, paired_ratio
from analysis.study.study import (
    LEAST_DENSITY,
    Elsewhere,
    FurtherModel,
    LoadedStudy,
    Map,
    on_network,
    say,
)
from analysis.sweep_tables import bit_rate
from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.plan import splitting
from gssim.result import Result
from gssim.scenario import Scenario
from gssim.scenario.overrides import as_overrides
from gssim.simulation import simulate
from gssim.units import human_seconds

EQUAL_LOSS_RATIO = 1 / 3
"""Fraction of dense's steps after which its loss is the equal loss."""


@dataclass(frozen=True)
class MapPoint:
    """One model on one network and one set of devices, with the time of every variant to the equal loss."""

    model: str
    bandwidth_bytes_per_s: float
    latency_s: float
    slow_ratio: float
    step_time_s: Mapping[str, float]
    """Predicted step time, by variant."""
    times_s: Mapping[str, tuple[float, ...]]
    """Time to the equal loss, by variant and seed; infinite if it is not reached, or the variant does not fit."""
    step_time_band_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Ends of the step time's band, for variants with transferred gradient statistics."""
    unfit: frozenset[str] = frozenset()
    """Variants for which the devices' memory does not suffice."""

    def at_end(self, *, high: bool) -> "MapPoint":
        """Return the point if step times are at the lower (or `high`: the upper) end of their bands."""
        of_step = {name: ends[high] for name, ends in self.step_time_band_s.items()}
        times_s = {
            name: tuple(each * of_step[name] / self.step_time_s[name] for each in self.times_s[name])
            for name in of_step
        }
        return replace(
            self, step_time_s={**self.step_time_s, **of_step}, times_s={**self.times_s, **times_s}, step_time_band_s={}
        )

    @property
    def fastest(self) -> str:
        """Variant with the least time (geometric mean over the seeds); controls count."""
        return min(self.times_s, key=lambda name: fmean(map(math.log, self.times_s[name])))

    def over_fastest(self, name: str) -> float:
        """Return a variant's time over that of the fastest: geometric mean over the seeds."""
        if math.inf in self.times_s[name]:
            return math.inf
        return paired_ratio(self.times_s[name], self.times_s[self.fastest]).mean

    def is_level(self, name: str) -> bool:
        """Return whether the paired 95 % interval of that ratio includes 1."""
        return (
            math.isfinite(self.over_fastest(name))
            and not paired_ratio(self.times_s[name], self.times_s[self.fastest]).low > 1
        )


def steps_to(loss: float, steps: Sequence[int], losses: Sequence[float]) -> float:
    """Return the step at which a held-out loss is first reached, linear between evaluations; infinite if it is not.

    >>> steps_to(2.5, [0, 10, 20], [4.0, 3.0, 2.0])
    15.0
    """
    if losses[0] <= loss:
        return float(steps[0])
    for (first, high), (second, low) in pairwise(zip(steps, losses, strict=True)):
        if low <= loss:
            return first + (second - first) * (high - loss) / (high - low)
    return math.inf


def steps_to_equal_loss(courses: Sequence[Course], dense: str) -> dict[str, tuple[float, ...]]:
    """Return the steps that each variant needs to the equal loss, by seed; infinite where it does not reach it.

    Raises UserError where dense has not learned anything until then.
    """
    control = next(each for each in courses if each.variant.name == dense)
    equal = control.at(EQUAL_LOSS_RATIO * control.last)
    if any(loss >= losses[0] for loss, losses in zip(equal, control.losses, strict=True)):
        raise UserError(
            f"map: the loss of '{dense}' is not below the first one after a third of its steps; "
            "allowed: a training that learns; run.steps or workload.learning_rate may be too small"
        )
    return {
        each.variant.name: tuple(
            steps_to(loss, each.steps, losses) for loss, losses in zip(equal, each.losses, strict=True)
        )
        for each in courses
    }


def map_points(loaded: LoadedStudy, courses: Sequence[Course], inputs: tuple[str, ...], asked: Map) -> list[MapPoint]:
    """Return every combination of the map's values; see [Note: equal loss] and [Note: further models].

    `inputs`: overrides that name the gradient statistics of the study's own model.
    """
    steps = steps_to_equal_loss(courses, loaded.study.dense)
    networks = [
        Elsewhere(name=f"{bandwidth}, {latency}", bandwidth_bytes_per_s=bandwidth, latency_s=latency)
        for latency in asked.latency_s
        for bandwidth in asked.bandwidth_bytes_per_s
    ]
    points: list[MapPoint] = []
    for model in (None, *asked.models):
        overrides = {
            each.variant.name: inputs if model is None else carried_over(each, model, loaded.study.silent)
            for each in courses
        }
        for slow_ratio in asked.slow_ratio:
            points += _points_of(loaded, model, overrides, networks, slow_ratio, steps)
    return points


def carried_over(course: Course, model: FurtherModel, silent: str) -> tuple[str, ...]:
    """Return the overrides that predict a variant for a further model; see [Note: further models]."""
    overrides = ('workload.gradients="transferred"', *as_overrides(model.set))
    if course.density is None or course.variant.name == silent:
        return overrides
    target = float(f"{max(course.density, LEAST_DENSITY):.3g}")
    return (*overrides, "plan.push.kind=target-density", f"plan.push.threshold={target!r}")


def _points_of(
    loaded: LoadedStudy,
    model: FurtherModel | None,
    overrides: Mapping[str, tuple[str, ...]],
    networks: Sequence[Elsewhere],
    slow_ratio: float,
    steps: Mapping[str, tuple[float, ...]],
) -> list[MapPoint]:
    """Return the points of one model and one set of devices; `overrides`: by variant, `steps`: to the equal loss."""
    study, seed = loaded.study, loaded.study.seeds[0]
    name = model.name if model else loaded.load(study.variants[0], seed=seed).scenario.workload.model.name
    on_devices = f"{len(study.variants)} variants on {len(networks)} networks"
    say(f"predicts {on_devices}: {name}, last rank {slow_ratio:g} times slow")
    results: dict[str, list[Result]] = {}
    dense_ratios: dict[str, float] = {}
    for variant in study.variants:
        extra = overrides[variant.name]
        unequal = _with_slow_rank(loaded.load(variant, seed=seed, extra=extra).scenario, slow_ratio)
        here = loaded.load(variant, seed=seed, extra=(*extra, *unequal), predicts=True)
        dense_ratios[variant.name] = dense_ratio(here.scenario)
        shared = Shared()
        results[variant.name] = [
            simulate(on_network(here, each), shared=shared, spread=False, banded=model is not None).result
            for each in networks
        ]
    points = []
    for place, network in enumerate(networks):
        own = {variant.name: results[variant.name][place] for variant in study.variants}
        unfit = frozenset(each for each, result in own.items() if not result.fits)
        dense_s = own[study.dense].step_time_s
        step_time_s = {
            each: result.step_time_s + (dense_s - result.step_time_s) * dense_ratios[each]
            for each, result in own.items()
        }
        times_s = {
            each: tuple(math.inf if each in unfit else n * of_step for n in steps[each])
            for each, of_step in step_time_s.items()
        }
        if all(math.inf in each for each in times_s.values()):
            raise UserError(
                f"map: {name}: no variant that fits gets to the equal loss; needed: devices with more memory"
            )
        bands_s = {
            each: (result.band.step_time_low_s, result.band.step_time_high_s)
            for each, result in own.items()
            if result.band is not None
        }
        points.append(
            MapPoint(
                name, network.bandwidth_bytes_per_s, network.latency_s, slow_ratio, step_time_s, times_s, bands_s, unfit
            )
        )
    return points


def _with_slow_rank(scenario: Scenario, slow_ratio: float) -> tuple[str, ...]:
    """Return overrides that make the last rank `slow_ratio` times as slow, with a batch in proportion to its speed."""
    if slow_ratio == 1:
        return ()
    last, total = scenario.ranks - 1, scenario.workload.global_batch_size
    sample_s = [1.0] * last + [slow_ratio]
    samples = splitting.balance_batch(total, sample_s=sample_s, least=1)
    slow = f"run.slowdowns=[{{rank={last}, first_step=0, compute_ratio={slow_ratio}}}]"
    return slow, f"plan.shares.batch={[each / total for each in samples]}"


# Read-outs -----------------------------------------------------------------------------------------------------------


def pushed_variants(courses: Sequence[Course], silent: str) -> list[str]:
    """Return the names of the variants of thresholded Gradient Sharding, without the control that pushes nothing."""
    return [each.variant.name for each in courses if each.density is not None and each.variant.name != silent]


def map_findings(points: Sequence[MapPoint], ours: Sequence[str]) -> list[str]:
    """Return sentences on which variants are fastest where, and how near the best of `ours` (thresholded) comes."""
    sentences = []
    own = points[0].model
    further = list(dict.fromkeys(point.model for point in points if point.model != own))
    for (model, slow_ratio), group in groupby(points, key=lambda point: (point.model, point.slow_ratio)):
        of_devices = list(group)
        devices = "equal devices" if slow_ratio == 1 else f"one device {slow_ratio:g} times slower than the others"
        where = f"{model}, with {devices}" if further else f"With {devices}"
        counts = Counter(point.fastest for point in of_devices).most_common()
        fastest = ", ".join(f"'{name}' on {count}" for name, count in counts)
        sentences.append(f"{where}, fastest to the equal loss on {len(of_devices)} networks: {fastest}")
        if unfit := sorted(set[str]().union(*(point.unfit for point in of_devices))):
            sentences.append(f"{where}, these do not fit in the devices' memory: {', '.join(unfit)}")
        if ours:
            sentences.append(_ours(of_devices, ours, f"{model}, {devices}" if further else devices))
    if further:
        sentences.append(
            f"Not trained: {', '.join(further)}; that a method needs so many times dense's steps is assumed, as for "
            f"{own}, of thresholded pushes at the density that was counted there"
        )
    return sentences


def _ours(points: Sequence[MapPoint], ours: Sequence[str], where: str) -> str:
    """Return a sentence on what the best of `ours` reaches on the networks of one model and one set of devices."""

    def near(points: Sequence[MapPoint]) -> int:
        return sum(any(point.is_level(name) for name in ours) for point in points)

    ratios = [min(point.over_fastest(name) for name in ours) for point in points]
    worst = points[ratios.index(max(ratios))]
    at = f"the most at {bit_rate(worst.bandwidth_bytes_per_s)} and {human_seconds(worst.latency_s)}"
    longer = f"its best variant takes {min(ratios):.2f} to {max(ratios):.2f} times as long as the fastest, {at}"
    if math.inf in ratios:  # reached or not, it is the same steps everywhere
        longer = "no variant of it reaches that loss from every seed"
        if all(name in worst.unfit for name in ours):
            longer = "no variant of it fits"
    band = ""
    if any(point.step_time_band_s for point in points):
        least, most = (near([point.at_end(high=high) for point in points]) for high in (True, False))
        band = f" ({least} to {most} by the band of transferred gradient statistics)"
    first = f"fastest, or not significantly slower, on {near(points)} of these{band}"
    return f"Thresholded Gradient Sharding with {where}: {first}; {longer}"


def write_map(points: Sequence[MapPoint]) -> str:
    """Return a line for every point and variant as CSV; times are empty where the equal loss is not reached."""
    lines = []
    for point in points:
        for name, times_s in point.times_s.items():
            low_s, high_s = point.step_time_band_s.get(name, (None, None))
            reached = math.inf not in times_s
            lines.append(
                {
                    "model": point.model,
                    "slow_ratio": point.slow_ratio,
                    "bandwidth_bytes_per_s": point.bandwidth_bytes_per_s,
                    "latency_s": point.latency_s,
                    "variant": name,
                    "fits": name not in point.unfit,
                    "step_time_s": point.step_time_s[name],
                    "step_time_low_s": low_s,
                    "step_time_high_s": high_s,
                    "time_s": f"{math.exp(fmean(map(math.log, times_s))):.6g}" if reached else None,
                    "time_ratio": f"{point.over_fastest(name):.4f}" if reached else None,
                    "is_fastest": name == point.fastest,
                    "is_level": point.is_level(name),
                }
            )
    return csv_of_lines(lines)
