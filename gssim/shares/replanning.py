"""Batch shares that follow the ranks' pace at run time: a pure controller, the same in a real run and a simulated one.

After every step all ranks know how long each has computed. [Note: replanning] With x the seconds per sample of a rank:

    mean        <- mean + w * (x - mean)                       what it is expected to take (EWMA, weight w)
    up, down    <- max(0, up + log(x / reference) - log r), and the same with reference / x       (CUSUM)

`reference` is the median of the first `minimum_steps` observations since the batch was last divided: in these nothing
is decided. A rank whose `up` or `down` exceeds `drift_limit` has drifted: from then on, its mean is that of what was
seen since that began. Changes below the ratio r = `drift_ratio` never add up to anything, so that bounded noise changes
nothing; one by a factor f counts after drift_limit / log(f / r) steps, rounded up: 3 for 2 and the defaults (one more
where noise hides it). Where a rank has drifted, or the slowest needs r times as long as the fastest once the reference
is known, the batch is divided anew, if the slowest rank is expected to gain at least `hysteresis_ratio`.

Source: EWMA and CUSUM: Page 1954, "Continuous inspection schemes"; gradient-sharding.md C.2-5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gssim.plan import Replanning
from gssim.shares.division import balance_batch


@dataclass(frozen=True, slots=True)
class _Excess:
    """How far observations have been beyond noise, added up since they last were not, and their mean since then."""

    total: float = 0.0
    sum_s: float = 0.0
    count: int = 0

    def after(self, sample_s: float, excess: float) -> "_Excess":
        total = self.total + excess
        return _Excess(total, self.sum_s + sample_s, self.count + 1) if total > 0 else _Excess()


@dataclass(frozen=True, slots=True)
class _Pace:
    """What is known of a rank, in seconds per sample."""

    reference_s: float
    mean_s: float
    up: _Excess = _Excess()
    down: _Excess = _Excess()

    def after(self, sample_s: float, settings: Replanning) -> "_Pace":
        mean_s = self.mean_s + settings.ewma_weight * (sample_s - self.mean_s)
        change, noise = math.log(sample_s / self.reference_s), math.log(settings.drift_ratio)
        up, down = self.up.after(sample_s, change - noise), self.down.after(sample_s, -change - noise)
        return _Pace(self.reference_s, mean_s, up, down)

    def drifted(self, limit: float) -> "_Pace | None":
        """Return the pace since the drift that is seen, or None where none is."""
        for seen in (self.up, self.down):
            if seen.total > limit:
                since_s = seen.sum_s / seen.count
                return _Pace(since_s, since_s)
        return None


@dataclass(frozen=True, slots=True)
class Watch:
    """What the controller knows: how the batch is divided, and the ranks' paces once there is a reference."""

    batch: tuple[int, ...]
    """Samples of each rank."""
    first: tuple[tuple[float, ...], ...] = ()
    """Seconds per sample of every rank, in the steps since the batch was divided so; until there are enough."""
    paces: tuple[_Pace, ...] = ()


def observe(
    watch: Watch, compute_s: Sequence[float], settings: Replanning, *, least: int = 1, most: Sequence[int] | None = None
) -> Watch:
    """Return what is known after a step in which the ranks computed `compute_s`; its `batch` is that of the next step.

    Every rank keeps `least` samples, so that its pace stays known, and gets at most `most[i]`. Assumes that a rank's
    time is proportional to its samples: what it is not shows in the next reference.

    >>> watch = Watch(batch=(4, 4))
    >>> for _ in range(5):
    ...     watch = observe(watch, (3.0, 1.0), Replanning())
    >>> watch.batch
    (2, 6)
    """
    sample_s = tuple(seconds / samples for seconds, samples in zip(compute_s, watch.batch, strict=True))
    if not watch.paces:
        return _with_reference(replace(watch, first=(*watch.first, sample_s)), settings, least, most)
    paces = [pace.after(x, settings) for pace, x in zip(watch.paces, sample_s, strict=True)]
    drifted = [pace.drifted(settings.drift_limit) for pace in paces]
    watch = replace(watch, paces=tuple(new or pace for new, pace in zip(drifted, paces, strict=True)))
    return _divided(watch, settings, least, most) if any(drifted) else watch


def _with_reference(watch: Watch, settings: Replanning, least: int, most: Sequence[int] | None) -> Watch:
    """Set the reference once there are observations enough; divide anew where the ranks are far from equally fast."""
    if len(watch.first) < settings.minimum_steps:
        return watch
    medians = [median(each) for each in zip(*watch.first, strict=True)]
    watch = replace(watch, first=(), paces=tuple(_Pace(each, each) for each in medians))
    times_s = _times_s(watch.batch, watch.paces)
    uneven = max(times_s) >= settings.drift_ratio * min(times_s)
    return _divided(watch, settings, least, most) if uneven else watch


def _divided(watch: Watch, settings: Replanning, least: int, most: Sequence[int] | None) -> Watch:
    """Divide the batch by the ranks' paces, if the slowest gains enough; what is known of them then begins anew."""
    sample_s = [pace.mean_s for pace in watch.paces]
    batch = balance_batch(sum(watch.batch), sample_s=sample_s, fixed_s=[0.0] * len(sample_s), least=least, most=most)
    gain_ratio = 1 - max(_times_s(batch, watch.paces)) / max(_times_s(watch.batch, watch.paces))
    return Watch(batch) if batch != watch.batch and gain_ratio >= settings.hysteresis_ratio else watch


def _times_s(batch: Sequence[int], paces: Sequence[_Pace]) -> list[float]:
    return [samples * pace.mean_s for samples, pace in zip(batch, paces, strict=True)]
