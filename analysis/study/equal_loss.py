"""Time of each method to an equal loss, by network and by how unequal the devices are.

[Note: equal loss] A study's trainings say how many steps each variant needs; a simulation says how long a step takes on
each network. For each seed, the equal loss is the one that dense training has after a third of its steps, which leaves
the others three times as many steps to get there; one that does not needs infinite time. Steps are read from held-out
losses, linear between evaluations. Assumptions: the steps that a variant needs depend neither on the network nor on how
samples are divided among the ranks, and thresholded variants push the same fraction of the gradients everywhere.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from analysis.study.rivals import Course, dense_first, dense_ratio
from analysis.study.rows import paired_ratio
from analysis.study.study import Elsewhere, LoadedStudy, Map, on_network, say
from analysis.sweep_tables import bit_rate
from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.plan import splitting
from gssim.scenario import Scenario
from gssim.simulation import simulate
from gssim.units import human_seconds

EQUAL_LOSS_RATIO = 1 / 3
"""Fraction of dense's steps after which its loss is the one that all are compared at."""


@dataclass(frozen=True)
class MapPoint:
    """One network and one set of devices, with the time of every variant to the equal loss."""

    bandwidth_bytes_per_s: float
    latency_s: float
    slow_ratio: float
    step_time_s: Mapping[str, float]
    """Predicted, by variant."""
    times_s: Mapping[str, tuple[float, ...]]
    """To the equal loss, by variant and seed."""

    @property
    def fastest(self) -> str:
        """Variant of the least geometric mean over the seeds; controls count."""
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
    """Return the steps that each variant needs from every seed to the equal loss; infinite where it does not get there.

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
    """Return every combination of the map's values; see [Note: equal loss].

    `inputs`: overrides that name the gradient statistics.
    """
    study = loaded.study
    steps = steps_to_equal_loss(courses, study.dense)
    networks = [
        Elsewhere(name=f"{bandwidth}, {latency}", bandwidth_bytes_per_s=bandwidth, latency_s=latency)
        for latency in asked.latency_s
        for bandwidth in asked.bandwidth_bytes_per_s
    ]
    points = []
    for slow_ratio in asked.slow_ratio:
        say(f"predicts {len(study.variants)} variants on {len(networks)} networks, last rank {slow_ratio:g} times slow")
        step_time_s: dict[str, dict[str, float]] = {}
        for variant in dense_first(study):
            scenario = loaded.load(variant, seed=study.seeds[0]).scenario
            unequal = _with_slow_rank(scenario, slow_ratio)
            here = loaded.load(variant, seed=study.seeds[0], extra=(*inputs, *unequal), predicts=True)
            ratio = dense_ratio(here.scenario)
            shared = Shared()
            times = {
                each.name: simulate(
                    on_network(here, each), shared=shared, spread=False, banded=False
                ).result.step_time_s
                for each in networks
            }
            dense = step_time_s.get(study.dense, times)
            step_time_s[variant.name] = {name: s + (dense[name] - s) * ratio for name, s in times.items()}
        for each in networks:
            of_step = {variant.name: step_time_s[variant.name][each.name] for variant in study.variants}
            times_s = {name: tuple(n * step_s for n in steps[name]) for name, step_s in of_step.items()}
            points.append(MapPoint(each.bandwidth_bytes_per_s, each.latency_s, slow_ratio, of_step, times_s))
    return points


def _with_slow_rank(scenario: Scenario, slow_ratio: float) -> tuple[str, ...]:
    """Return overrides with which the last rank takes so many times as long for a sample, and has as much fewer."""
    if slow_ratio == 1:
        return ()
    last, total = scenario.ranks - 1, scenario.workload.global_batch_size
    sample_s = [1.0] * last + [slow_ratio]
    samples = splitting.balance_batch(total, sample_s=sample_s, fixed_s=[0.0] * len(sample_s), least=1)
    slow = f"run.slowdowns=[{{rank={last}, first_step=0, compute_ratio={slow_ratio}}}]"
    return slow, f"plan.shares.batch={[each / total for each in samples]}"


# Read-outs -----------------------------------------------------------------------------------------------------------


def pushed_variants(courses: Sequence[Course], silent: str) -> list[str]:
    """Return the names of the variants of thresholded Gradient Sharding, the control that pushes nothing left out."""
    return [each.variant.name for each in courses if each.density is not None and each.variant.name != silent]


def map_findings(points: Sequence[MapPoint], ours: Sequence[str]) -> list[str]:
    """Return in sentences which variants are fastest where, and what `ours`, thresholded variants, reach."""
    said = []
    for slow_ratio in sorted({point.slow_ratio for point in points}):
        of_ratio = [point for point in points if point.slow_ratio == slow_ratio]
        devices = "equal devices" if slow_ratio == 1 else f"one device {slow_ratio:g} times slower than the others"
        counts = Counter(point.fastest for point in of_ratio).most_common()
        fastest = ", ".join(f"'{name}' on {count}" for name, count in counts)
        said.append(f"With {devices}, fastest to the equal loss on {len(of_ratio)} networks: {fastest}")
        if not ours:
            continue
        level = [point for point in of_ratio if any(point.is_level(name) for name in ours)]
        ratios = [min(point.over_fastest(name) for name in ours) for point in of_ratio]
        worst = of_ratio[ratios.index(max(ratios))]
        where = f"the most at {bit_rate(worst.bandwidth_bytes_per_s)} and {human_seconds(worst.latency_s)}"
        longer = f"its best variant takes {min(ratios):.2f} to {max(ratios):.2f} times as long as the fastest, {where}"
        if math.inf in ratios:  # reached or not, it is the same steps everywhere
            longer = "no variant of it reaches that loss from every seed"
        near = f"fastest or not told from it on {len(level)} of these"
        said.append(f"Thresholded Gradient Sharding with {devices}: {near}; {longer}")
    return said


def write_map(points: Sequence[MapPoint]) -> str:
    """Return a line for every point and variant as CSV; times are empty where the equal loss is not reached."""
    stream = io.StringIO()
    head = ["slow_ratio", "bandwidth_bytes_per_s", "latency_s", "variant", "step_time_s", "time_s", "time_ratio"]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*head, "is_fastest", "is_level"])
    for point in points:
        for name, times_s in point.times_s.items():
            where = [point.slow_ratio, point.bandwidth_bytes_per_s, point.latency_s, name, point.step_time_s[name]]
            figures: list[str | None] = [None, None]
            if math.inf not in times_s:
                figures = [f"{math.exp(fmean(map(math.log, times_s))):.6g}", f"{point.over_fastest(name):.4f}"]
            writer.writerow([*where, *figures, name == point.fastest, point.is_level(name)])
    return stream.getvalue()
