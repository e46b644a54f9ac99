"""Rebalancing of batch and shards at run time by the ranks' speeds: a pure controller, shared by both executors.

After every step all ranks know each other's compute time. [Note: replanning] With x the seconds per sample of a rank:

    mean        <- mean + w * (x - mean)                       its expected value (EWMA, weight w)
    up, down    <- max(0, up + log(x / reference) - log r), and the same with reference / x       (CUSUM)

`reference` is the median of the first `minimum_steps` observations since the last drift or batch split, during which
nothing is decided. A rank whose `up` or `down` exceeds `drift_limit` has drifted: its mean is then that of the
observations since the drift began. Changes below the ratio r = `drift_ratio` never accumulate, so that bounded noise
changes nothing; a change by a factor f is detected after drift_limit / log(f / r) steps, rounded up: 3 for 2 and the
defaults (one more where noise hides it). Where a rank has drifted, or the slowest needs r times as long as the fastest
once the reference is known, the batch is split again, if the slowest rank is expected to gain at least
`hysteresis_ratio`. Shards that are sized by cost change their owners once a reference is known, where moving their
state pays.

Source: EWMA and CUSUM: Page 1954, "Continuous inspection schemes".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median

from gssim.plan.plan import Replanning
from gssim.plan.shard_sizing import OwnerTimes, cost_shares, owner_time_s
from gssim.plan.splitting import balance_batch


@dataclass(frozen=True, slots=True)
class _Excess:
    """One side of a CUSUM: the accumulated excess over noise, and the observations since it was last zero."""

    total: float = 0.0
    sum_s: float = 0.0
    count: int = 0

    def after(self, sample_s: float, excess: float) -> "_Excess":
        total = self.total + excess
        return _Excess(total, self.sum_s + sample_s, self.count + 1) if total > 0 else _Excess()


@dataclass(frozen=True, slots=True)
class _RankSpeed:
    """The estimated speed of a rank, in seconds per sample."""

    reference_s: float
    mean_s: float
    up: _Excess = _Excess()
    down: _Excess = _Excess()

    def after(self, sample_s: float, settings: Replanning) -> "_RankSpeed":
        mean_s = self.mean_s + settings.ewma_weight * (sample_s - self.mean_s)
        change, noise = math.log(sample_s / self.reference_s), math.log(settings.drift_ratio)
        up, down = self.up.after(sample_s, change - noise), self.down.after(sample_s, -change - noise)
        return _RankSpeed(self.reference_s, mean_s, up, down)

    def drifted(self, limit: float) -> "_RankSpeed | None":
        """Return the speed since the drift began, or None where there is no drift."""
        for side in (self.up, self.down):
            if side.total > limit:
                since_s = side.sum_s / side.count
                return _RankSpeed(since_s, since_s)
        return None


@dataclass(frozen=True, slots=True)
class Watch:
    """State of the controller: the batch split, and the ranks' speeds once there is a reference."""

    batch: tuple[int, ...]
    """Samples of each rank."""
    first: tuple[tuple[float, ...], ...] = ()
    """Seconds per sample of every rank in the steps since the last batch split, until there are `minimum_steps`."""
    speeds: tuple[_RankSpeed, ...] = ()
    settled: bool = False
    """Whether the reference was set after the last step: the moment to consider changes that are expensive."""


def observe(
    watch: Watch, compute_s: Sequence[float], settings: Replanning, *, least: int = 1, most: Sequence[int] | None = None
) -> Watch:
    """Return the state after a step in which the ranks computed for `compute_s`; its `batch` is the next step's.

    Every rank keeps `least` samples, so that its speed stays observable, and gets at most `most[i]`. Assumes that a
    rank's time is proportional to its samples: deviations show in the next reference.

    >>> watch = Watch(batch=(4, 4))
    >>> for _ in range(5):
    ...     watch = observe(watch, (3.0, 1.0), Replanning())
    >>> watch.batch
    (2, 6)
    """
    sample_s = tuple(seconds / samples for seconds, samples in zip(compute_s, watch.batch, strict=True))
    watch = replace(watch, settled=False)
    if not watch.speeds:
        return _with_reference(replace(watch, first=(*watch.first, sample_s)), settings, least, most)
    speeds = [speed.after(x, settings) for speed, x in zip(watch.speeds, sample_s, strict=True)]
    drifted = [speed.drifted(settings.drift_limit) for speed in speeds]
    watch = replace(watch, speeds=tuple(new or speed for new, speed in zip(drifted, speeds, strict=True)))
    return Watch(_rebalanced(watch, settings, least, most)) if any(drifted) else watch


def _with_reference(watch: Watch, settings: Replanning, least: int, most: Sequence[int] | None) -> Watch:
    """Set the reference once there are enough observations; split the batch again where the ranks differ too much."""
    if len(watch.first) < settings.minimum_steps:
        return watch
    medians = [median(observations) for observations in zip(*watch.first, strict=True)]
    watch = Watch(watch.batch, speeds=tuple(_RankSpeed(each_s, each_s) for each_s in medians), settled=True)
    times_s = _times_s(watch.batch, watch.speeds)
    uneven = max(times_s) >= settings.drift_ratio * min(times_s)
    batch = _rebalanced(watch, settings, least, most) if uneven else watch.batch
    return watch if batch == watch.batch else Watch(batch, settled=True)


def _rebalanced(watch: Watch, settings: Replanning, least: int, most: Sequence[int] | None) -> tuple[int, ...]:
    """Return the batch split by the ranks' speeds, or the present one where the slowest would not gain enough."""
    sample_s = [speed.mean_s for speed in watch.speeds]
    batch = balance_batch(sum(watch.batch), sample_s=sample_s, least=least, most=most)
    gain_ratio = 1 - max(_times_s(batch, watch.speeds)) / max(_times_s(watch.batch, watch.speeds))
    return batch if gain_ratio >= settings.hysteresis_ratio else watch.batch


def worth_moving(
    times: OwnerTimes,
    owned: Sequence[float],
    *,
    most: tuple[float, ...],
    moving: tuple[Sequence[float], Sequence[float]],
    steps: int,
    settings: Replanning,
) -> tuple[float, ...] | None:
    """Return the better shard shares, or None where `owned`, the present ones, are as good or moving does not pay.

    `times`: with updates as measured; `moving`: each rank's time to send, and to receive, the state of all parameters;
    `steps`: the number of steps for which the shares are expected to stay. Moving pays where the steps gain more than
    the move costs, and the part of a step that depends on the shares at least `hysteresis_ratio` of itself.
    """
    better = cost_shares(times, most=most)
    now_s, then_s = owner_time_s(times, owned), owner_time_s(times, better)
    move_s = 0.0
    # owners' ranges follow one another: what a rank's old and new range have in common stays
    ranges = (pairwise(accumulate(shares, initial=0.0)) for shares in (owned, better))
    for old, new, before, after, out_s, in_s in zip(*ranges, owned, better, *moving, strict=True):
        stays = max(0.0, min(old[1], new[1]) - max(old[0], new[0]))
        move_s = max(move_s, (before - stays) * out_s, (after - stays) * in_s)
    gains = now_s - then_s >= settings.hysteresis_ratio * now_s
    return better if gains and steps * (now_s - then_s) > move_s else None


def _times_s(batch: Sequence[int], speeds: Sequence[_RankSpeed]) -> list[float]:
    return [samples * speed.mean_s for samples, speed in zip(batch, speeds, strict=True)]
