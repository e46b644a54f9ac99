"""Which magnitude an element must have to be sent: given, or found for each tensor from what a rank has accumulated."""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gsreal.gradient_sharding.messages import Scratch, is_on_host
from gssim.plan import SAMPLE_ELEMENTS, Push

Pieces = Callable[[int, int], list[Tensor]]
"""Returns what is accumulated in a half-open range of a bucket, in pieces that follow one another."""
Part = tuple[slice, float]
"""A range, and its threshold."""


class Thresholds:
    """The thresholds of a bucket's tensors."""

    def __init__(self, push: Push, places: Sequence[slice]) -> None:
        self.push, self.places = push, places
        """Where each tensor is in the bucket."""
        self.estimated: list[float] | None = None
        """For a target density: by tensor, as last estimated."""

    def find(self, pieces: Pieces, scratch: Scratch, *, step: int, scale: float = 1.0) -> list[Part]:
        """Return parts of the bucket, in order, with their thresholds; `step`: from the first thresholded one.

        `scale`: what all that is accumulated was multiplied by. Estimates are kept without it.
        """
        assert self.push.threshold is not None
        if self.push.kind == "absolute":
            return [(slice(self.places[0].start, self.places[-1].stop), self.push.threshold * scale)]
        if self.push.kind == "relative":
            means = mean_magnitudes([pieces(place.start, place.stop) for place in self.places])
            found = [_no_zeros(self.push.threshold * mean) if self.push.threshold else 0.0 for mean in means]
        else:
            if self.estimated is None or step % self.push.reestimate_steps == 0:
                self.estimated = [
                    quantile(pieces(place.start, place.stop), self.push.threshold, scratch) / scale
                    for place in self.places
                ]
            found = [estimate * scale for estimate in self.estimated]
        return list(zip(self.places, found, strict=True))


def _no_zeros(threshold: float) -> float:
    """Return a threshold that no zero reaches, though all of a tensor may be zeros."""
    return threshold if math.isnan(threshold) else max(threshold, TINY)


TINY = float(torch.finfo(torch.float32).tiny)


def mean_magnitudes(tensors: Sequence[Sequence[Tensor]]) -> list[float]:
    """Return the mean magnitude of each tensor, given in pieces."""
    flat = [piece for pieces in tensors for piece in pieces]
    if not flat:
        return [0.0] * len(tensors)
    norms = torch.stack([torch.linalg.vector_norm(piece, 1, dtype=_at_least_fp32(piece)) for piece in flat])
    totals = iter(norms.tolist())  # the device is waited for once
    return [sum(next(totals) for _ in pieces) / max(1, sum(piece.numel() for piece in pieces)) for pieces in tensors]


def _at_least_fp32(piece: Tensor) -> torch.dtype:
    return torch.promote_types(piece.dtype, torch.float32)


def quantile(pieces: Sequence[Tensor], density: float, scratch: Scratch) -> float:
    """Return the magnitude that the fraction `density` of a tensor reaches, and at least one of its elements.

    Of a large tensor, it is estimated from elements at equal distances, wherever the tensor is cut in pieces; their
    number S gives the fraction a relative standard error of sqrt((1 - density) / (density * S)).
    """
    if density >= 1:
        return 0.0
    elements = sum(piece.numel() for piece in pieces)
    room = min(SAMPLE_ELEMENTS, scratch.magnitudes.numel())
    distance = _distance(math.ceil(elements / room)) if elements > room else 1
    start = taken = 0
    for piece in pieces:
        picked = piece[(-start) % distance :: distance]
        scratch.magnitudes[taken : taken + picked.numel()].copy_(picked)
        start, taken = start + piece.numel(), taken + picked.numel()
    sample = scratch.magnitudes[:taken].abs_()
    return _no_zeros(_kth_largest(sample, max(1, round(density * taken)))) if taken else math.inf


def _distance(least: int) -> int:
    """Return the least number from `least` on that has no factor in common with the usual lengths of rows.

    Every third element of kernels of 3 x 3 would be of the same column, which may be the one with the smallest.
    """
    return next(distance for distance in itertools.count(least) if math.gcd(distance, 2 * 3 * 5 * 7) == 1)


def _kth_largest(sample: Tensor, k: int) -> float:
    """Return the k-th largest of a sample, which is put in another order."""
    if not is_on_host(sample):
        return float(sample.kthvalue(sample.numel() - k + 1).values)
    values = sample.numpy()
    values.partition(len(values) - k)
    return float(values[len(values) - k])


def within(parts: Sequence[Part], first: int, last: int) -> list[Part]:
    """Return what of the parts is in [first, last), counted from there."""
    inside = [(slice(max(part.start, first), min(part.stop, last)), threshold) for part, threshold in parts]
    return [(slice(p.start - first, p.stop - first), threshold) for p, threshold in inside if p.start < p.stop]


def mark(gradient: Tensor, parts: Sequence[Part], scratch: Scratch) -> Tensor:
    """Return a flag for every element of a message's range: whether it is in a part and not below its threshold.

    What is no number is below none: it is sent, so that its owner sees it.
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
