"""Thresholds of a push: a given magnitude, or one computed per tensor from the accumulated gradient."""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gsreal.gradient_sharding.messages import Scratch, is_on_host
from gssim.plan import SAMPLE_ELEMENTS, Push

Pieces = Callable[[int, int], list[Tensor]]
"""Returns the accumulated gradient of a half-open range of a bucket, in consecutive pieces."""
ThresholdedRange = tuple[slice, float]
"""A range, and its threshold."""


class Thresholds:
    """The thresholds of a bucket's tensors."""

    def __init__(self, push: Push, places: Sequence[slice]) -> None:
        self.push, self.places = push, places
        """Range of each tensor in the bucket."""
        self.estimated: list[float] | None = None
        """For a target density: the last estimate of each tensor."""

    def find(self, pieces: Pieces, scratch: Scratch, *, step: int, scale: float = 1.0) -> list[ThresholdedRange]:
        """Return ranges of the bucket, in order, with their thresholds; `step`: counted from the first thresholded one.

        `scale`: factor of all accumulated values (the loss scale). Estimates are stored without it.
        """
        assert self.push.threshold is not None
        if self.push.kind == "absolute":
            return [(slice(self.places[0].start, self.places[-1].stop), self.push.threshold * scale)]
        if self.push.kind == "relative":
            means = mean_magnitudes([pieces(place.start, place.stop) for place in self.places])
            thresholds = [_above_zero(self.push.threshold * mean) if self.push.threshold else 0.0 for mean in means]
        else:
            if self.estimated is None or step % self.push.reestimate_steps == 0:
                self.estimated = [
                    quantile(pieces(place.start, place.stop), self.push.threshold, scratch) / scale
                    for place in self.places
                ]
            thresholds = [estimate * scale for estimate in self.estimated]
        return list(zip(self.places, thresholds, strict=True))


def _above_zero(threshold: float) -> float:
    """Return a threshold that zeros never reach, even if all of a tensor are zeros."""
    return threshold if math.isnan(threshold) else max(threshold, TINY)


TINY = float(torch.finfo(torch.float32).tiny)


def mean_magnitudes(tensors: Sequence[Sequence[Tensor]]) -> list[float]:
    """Return the mean magnitude of each tensor, given in pieces."""
    flat = [piece for pieces in tensors for piece in pieces]
    if not flat:
        return [0.0] * len(tensors)
    norms = torch.stack(
        [torch.linalg.vector_norm(piece, 1, dtype=torch.promote_types(piece.dtype, torch.float32)) for piece in flat]
    )
    totals = iter(norms.tolist())  # the device is waited for once
    return [sum(next(totals) for _ in pieces) / max(1, sum(piece.numel() for piece in pieces)) for pieces in tensors]


def quantile(pieces: Sequence[Tensor], density: float, scratch: Scratch) -> float:
    """Return the magnitude that the fraction `density` of a tensor reaches, and at least one of its elements.

    For a large tensor it is estimated from equidistant elements, wherever the tensor is cut in pieces; their number S
    gives the fraction a relative standard error of sqrt((1 - density) / (density * S)).
    """
    if density >= 1:
        return 0.0
    elements = sum(piece.numel() for piece in pieces)
    room = min(SAMPLE_ELEMENTS, scratch.magnitudes.numel())
    distance = _sampling_stride(math.ceil(elements / room)) if elements > room else 1
    start = taken = 0
    for piece in pieces:
        picked = piece[(-start) % distance :: distance]
        scratch.magnitudes[taken : taken + picked.numel()].copy_(picked)
        start, taken = start + piece.numel(), taken + picked.numel()
    sample = scratch.magnitudes[:taken].abs_()
    return _above_zero(_kth_largest(sample, max(1, round(density * taken)))) if taken else math.inf


def _sampling_stride(least: int) -> int:
    """Return the smallest number from `least` on that is coprime to the usual lengths of rows.

    Every third element of 3 x 3 kernels would be of the same column, which may be the one with the smallest values.
    """
    return next(distance for distance in itertools.count(least) if math.gcd(distance, 2 * 3 * 5 * 7) == 1)


def _kth_largest(sample: Tensor, k: int) -> float:
    """Return the k-th largest of a sample, which is reordered in place."""
    if not is_on_host(sample):
        return float(sample.kthvalue(sample.numel() - k + 1).values)
    values = sample.numpy()
    values.partition(len(values) - k)
    return float(values[len(values) - k])


def clip_ranges(parts: Sequence[ThresholdedRange], first: int, last: int) -> list[ThresholdedRange]:
    """Return the ranges clipped to [first, last), relative to `first`."""
    inside = [(slice(max(part.start, first), min(part.stop, last)), threshold) for part, threshold in parts]
    return [(slice(p.start - first, p.stop - first), threshold) for p, threshold in inside if p.start < p.stop]


def mark(gradient: Tensor, parts: Sequence[ThresholdedRange], scratch: Scratch) -> Tensor:
    """Return a flag for every element of a message's range: whether it is in a range and not below its threshold.

    NaN is below no threshold: it is sent, so that its owner detects it.
    """
    flags = scratch.flags[: gradient.numel()]
    if not parts:
        return flags.fill_(False)
    for part, threshold in parts:
        for first, last in scratch.chunks(part.stop, part.start):
            here, magnitudes = gradient[first:last], scratch.magnitudes[: last - first]
            if here.dtype == magnitudes.dtype:
                torch.abs(here, out=magnitudes)
            else:
                magnitudes.copy_(here).abs_()
            torch.lt(magnitudes, threshold, out=flags[first:last])
            flags[first:last].logical_not_()
    return flags
