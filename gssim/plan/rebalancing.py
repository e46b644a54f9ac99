"""Shares that follow the ranks' pace at run time: a pure controller, the same in a real run and a simulated one.

After every step all ranks know how long each has computed. [Note: replanning] With x the seconds per sample of a rank:

    mean        <- mean + w * (x - mean)                       what it is expected to take (EWMA, weight w)
    up, down    <- max(0, up + log(x / reference) - log r), and the same with reference / x       (CUSUM)

`reference` is the median of the first `minimum_steps` observations since the last drift or division: in these nothing
is decided. A rank whose `up` or `down` exceeds `drift_limit` has drifted: its mean is then that of what was seen
since that began. Changes below the ratio r = `drift_ratio` never add up to anything, so that bounded noise changes
nothing; one by a factor f counts after drift_limit / log(f / r) steps, rounded up: 3 for 2 and the defaults (one more
where noise hides it). Where a rank has drifted, or the slowest needs r times as long as the fastest once the reference
is known, the batch is divided anew, if the slowest rank is expected to gain at least `hysteresis_ratio`. Shards that
are shared out by cost change their owners once a reference is known, where moving what these hold pays.

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
    settled: bool = False
    """Whether the reference was set after the last step: the time to think about what is dear to change."""


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
    watch = replace(watch, settled=False)
    if not watch.paces:
        return _with_reference(replace(watch, first=(*watch.first, sample_s)), settings, least, most)
    paces = [pace.after(x, settings) for pace, x in zip(watch.paces, sample_s, strict=True)]
    drifted = [pace.drifted(settings.drift_limit) for pace in paces]
    watch = replace(watch, paces=tuple(new or pace for new, pace in zip(drifted, paces, strict=True)))
    return Watch(_divided(watch, settings, least, most)) if any(drifted) else watch


def _with_reference(watch: Watch, settings: Replanning, least: int, most: Sequence[int] | None) -> Watch:
    """Set the reference once there are observations enough; divide anew where the ranks are far from equally fast."""
    if len(watch.first) < settings.minimum_steps:
        return watch
    medians = [median(each) for each in zip(*watch.first, strict=True)]
    watch = Watch(watch.batch, paces=tuple(_Pace(each, each) for each in medians), settled=True)
    times_s = _times_s(watch.batch, watch.paces)
    uneven = max(times_s) >= settings.drift_ratio * min(times_s)
    batch = _divided(watch, settings, least, most) if uneven else watch.batch
    return watch if batch == watch.batch else Watch(batch, settled=True)


def _divided(watch: Watch, settings: Replanning, least: int, most: Sequence[int] | None) -> tuple[int, ...]:
    """Return the batch divided by the ranks' paces, or as it is where the slowest would not gain enough."""
    sample_s = [pace.mean_s for pace in watch.paces]
    batch = balance_batch(sum(watch.batch), sample_s=sample_s, fixed_s=[0.0] * len(sample_s), least=least, most=most)
    gain_ratio = 1 - max(_times_s(batch, watch.paces)) / max(_times_s(watch.batch, watch.paces))
    return batch if gain_ratio >= settings.hysteresis_ratio else watch.batch


def worth_moving(
    times: OwnerTimes,
    held: Sequence[float],
    *,
    most: tuple[float, ...],
    moving: tuple[Sequence[float], Sequence[float]],
    steps: int,
    settings: Replanning,
) -> tuple[float, ...] | None:
    """Return the shard shares to change to, or None where what `held` has is as good or moving does not pay.

    `times`: with updates as measured; `moving`: what it would take each rank to send, and to receive, the state of all
    parameters; `steps`: for which the shares are expected to hold. It pays where the steps gain more than the move
    takes, and the part of a step that depends on the shares at least `hysteresis_ratio` of itself.
    """
    better = cost_shares(times, most=most)
    now_s, then_s = owner_time_s(times, held), owner_time_s(times, better)
    move_s = 0.0
    for gone, come, out_s, in_s in zip(*_moved(held, better), *moving, strict=True):
        move_s = max(move_s, gone * out_s, come * in_s)
    gains = now_s - then_s >= settings.hysteresis_ratio * now_s
    return better if gains and steps * (now_s - then_s) > move_s else None


def _moved(before: Sequence[float], after: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return which fraction of all parameters leaves each rank, and comes to it: owners' ranges follow one another."""
    old, new = (list(pairwise(accumulate(each, initial=0.0))) for each in (before, after))
    stays = [max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(old, new, strict=True)]
    return [n - s for n, s in zip(before, stays, strict=True)], [n - s for n, s in zip(after, stays, strict=True)]


def _times_s(batch: Sequence[int], paces: Sequence[_Pace]) -> list[float]:
    return [samples * pace.mean_s for samples, pace in zip(batch, paces, strict=True)]
