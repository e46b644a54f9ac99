"""Thresholded messages: which gradients reach a threshold, and their values and indices for an owner, as bytes.

Dense: the owner's whole range with zeros for elements that are not sent. COO: values and int32 indices, the wider of
them first, so that both are aligned. Bitmap: values, then a bit for every element of the range. Both ends derive the
encoding from the number of entries: see `gssim.plan.encodings`.

`Scratch` is the memory in which entries are searched: allocated once, and shared by all pushes.
A threshold is a given magnitude, or computed for each tensor from the accumulated gradient.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gsreal.gradient_sharding.bucket import ABSENT, Bucket
from gssim.plan import INDEX_BYTES, SAMPLE_ELEMENTS, Push, encodings, scratch_elements


class Scratch:
    """Flags for a message of at most `part` elements, and magnitudes for a chunk of it, in at least fp32."""

    def __init__(self, part: int, bucket: int, dtype: torch.dtype, device: torch.device) -> None:
        flags, magnitudes = scratch_elements(part, bucket, chunked=device.type == "cpu")
        self.flags = torch.empty(flags, dtype=torch.bool, device=device)
        self.magnitudes = torch.empty(magnitudes, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def chunks(self, elements: int, first: int = 0) -> Iterator[tuple[int, int]]:
        """Give the half-open chunks in which [first, elements) is processed."""
        size = self.magnitudes.numel()
        for start in range(first, elements, max(1, size)):
            yield start, min(elements, start + size)

    def cast_to(self, dtype: torch.dtype, part: Tensor) -> Tensor:
        """Return a chunk in a type.

        The chunk itself if it has that type, else a copy in `magnitudes`, whose elements are at least as wide.
        """
        return part if part.dtype == dtype else self.magnitudes.view(dtype)[: part.numel()].copy_(part)

    def add(self, target: Tensor, source: Tensor, factor: float = 1.0) -> None:
        """Add `factor` times a tensor to another, which may be of higher precision."""
        if source.dtype == target.dtype:
            target.add_(source, alpha=factor)
            return
        for first, last in self.chunks(target.numel()):
            target[first:last].add_(self.cast_to(target.dtype, source[first:last]), alpha=factor)


def scratch_by_dtype(buckets: Sequence[Bucket]) -> dict[torch.dtype, Scratch]:
    """Return the scratch memory to find and pack messages of these buckets, for each of their data types."""
    scratch_of = {}
    for dtype in dict.fromkeys(bucket.flat.dtype for bucket in buckets):
        alike = [bucket for bucket in buckets if bucket.flat.dtype == dtype]
        part = max(last - first for bucket in alike for first, last in bucket.ranges)
        largest = max(bucket.elements for bucket in alike)
        scratch_of[dtype] = Scratch(part, largest, dtype, alike[0].flat.device)
    return scratch_of


def count(flags: Tensor) -> int:
    """Return the number of set flags; on a CPU by numpy, which is several times as fast.

    On a GPU torch 2.11's `count_nonzero` compares them first, with a result of their size.
    """
    return int(np.count_nonzero(flags.numpy())) if is_on_host(flags) else int(flags.sum())


def is_on_host(tensor: Tensor) -> bool:
    """Return whether numpy can view a tensor."""
    return tensor.device.type == "cpu"


def flagged_indices(flags: Tensor, entries: int | None = None) -> Tensor:
    """Return the indices of the set flags, as int64; numpy's list takes a chunk's worth of host memory.

    torch's branches on each element, which costs several times as much if many are set. `entries`: number of set flags,
    if known: then no synchronisation with the device is needed.
    """
    if is_on_host(flags):
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return (flags.nonzero() if entries is None else torch.nonzero_static(flags, size=entries)).view(-1)


GATHER_BITS = 0x0102040810204080
"""Multiplier of a word of eight byte flags: the product's highest byte is these flags as bits, the first the lowest."""


@dataclass(frozen=True)
class Encoding:
    """Encoding of messages: `coo`, `bitmap`, `dense`, or `auto`, whichever of them takes the fewest bytes."""

    kind: str
    dtype: torch.dtype
    scratch: Scratch

    def choose(self, entries: int, elements: int) -> str:
        """Return the encoding of a message of `entries` out of `elements`."""
        return encodings.chosen(self.kind, entries=entries, elements=elements, value_bytes=self.dtype.itemsize)

    def empty(self, entries: int, elements: int, device: torch.device) -> Tensor:
        """Return a buffer for a message of `entries` out of `elements`."""
        kind = self.choose(entries, elements)
        if kind == "dense":
            return torch.empty(elements, dtype=self.dtype, device=device)
        size = encodings.message_bytes(kind, entries=entries, elements=elements, value_bytes=self.dtype.itemsize)
        return torch.empty(int(size), dtype=torch.uint8, device=device)

    # Sending ---------------------------------------------------------------------------------------------------------

    def pack(
        self, part: Tensor, flags: Tensor, *, entries: int | None = None, clear: bool = False
    ) -> tuple[Tensor, int]:
        """Return the message of the elements of `part` whose `flags` are set, and their number.

        `entries`: that number, if known. `clear`: set these elements of `part` to negative zeros. Overwrites the flags.
        """
        entries = count(flags) if entries is None else entries
        message = self.empty(entries, part.numel(), part.device)
        kind = self.choose(entries, part.numel())
        if kind == "dense":
            self._fill_dense(message, part, flags, clear)
            return message, entries
        values, places = self._views(message, entries, kind)
        taken = 0
        for first, last in self.scratch.chunks(part.numel()):
            here = flagged_indices(flags[first:last], entries if last - first == part.numel() else None)
            self._copy_values(part[first:last], here, values[taken : taken + here.numel()], clear)
            if kind == "coo":
                places[taken : taken + here.numel()].copy_(here.add_(first))
            else:
                _write_bits(places[first // 8 : -(-last // 8)], flags[first:last])
            taken += here.numel()
        return message, entries

    def _fill_dense(self, message: Tensor, part: Tensor, flags: Tensor, clear: bool) -> None:
        for first, last in self.scratch.chunks(part.numel()):
            sent = self.scratch.magnitudes[: last - first].copy_(part[first:last])
            sent.masked_fill_(flags[first:last].logical_not_(), ABSENT)  # elements that no rank sends stay absent
            message[first:last].copy_(sent)
            if clear:  # rounding of a sum of higher precision is not kept
                rest = part[first:last].sub_(sent if part.dtype == sent.dtype else message[first:last])
                rest.masked_fill_(torch.eq(rest, 0, out=flags[first:last]), ABSENT)

    def _copy_values(self, part: Tensor, places: Tensor, values: Tensor, clear: bool) -> None:
        """Copy the elements at `places`."""
        if part.dtype == values.dtype:
            torch.index_select(part, 0, places, out=values)
        else:
            values.copy_(torch.index_select(part, 0, places, out=self.scratch.magnitudes[: places.numel()]))
        if clear:
            part.index_fill_(0, places, ABSENT)

    # Receiving -------------------------------------------------------------------------------------------------------

    def add(
        self, gradient: Tensor, message: Tensor, entries: int, weight: float, received: Tensor | None = None
    ) -> None:
        """Add a message's values, times `weight`, to an owner's gradient in the owner's precision.

        `received`: accumulates `weight` for every element that has a value in the message.
        """
        elements = gradient.numel()
        if self.choose(entries, elements) == "dense":
            self.scratch.add(gradient, message, weight)
            if received is not None:
                self._note_values(message, entries, weight, received)
            return
        for places, values, first, last in self._entries(message, entries, elements):
            gradient[first:last].index_add_(0, places, self.scratch.cast_to(gradient.dtype, values), alpha=weight)
            if received is not None:
                one = received.new_ones(()).expand(places.numel())
                received[first:last].index_add_(0, places, one, alpha=weight)

    def overwrite(self, values: Tensor, message: Tensor, entries: int) -> None:
        """Overwrite the elements of `values` that a sparse message holds (a dense one is received in place)."""
        for places, new, first, last in self._entries(message, entries, values.numel()):
            values[first:last].index_copy_(0, places.long(), new)

    def _note_values(self, message: Tensor, entries: int, weight: float, received: Tensor) -> None:
        """Add `weight` for each value of a dense message: unless all were sent, a zero stands for an unsent element."""
        if entries == message.numel():
            received.add_(weight)
            return
        for first, last in self.scratch.chunks(message.numel()):
            came = torch.ne(message[first:last], 0, out=self.scratch.flags[: last - first])
            received[first:last].add_(self.scratch.magnitudes[: last - first].copy_(came), alpha=weight)

    def _entries(self, message: Tensor, entries: int, elements: int) -> Iterator[tuple[Tensor, Tensor, int, int]]:
        """Give (places, values) of a sparse message, and the range that the places are relative to, chunk by chunk."""
        kind = self.choose(entries, elements)
        values, places = self._views(message, entries, kind)
        if kind == "coo":
            for first, last in self.scratch.chunks(entries):
                yield places[first:last], values[first:last], 0, elements
            return
        taken = 0
        for first, last in self.scratch.chunks(elements):
            flags = self._read_bits(places[first // 8 : -(-last // 8)])[: last - first]
            here = flagged_indices(flags, entries if last - first == elements else None)
            yield here, values[taken : taken + here.numel()], first, last
            taken += here.numel()

    def _read_bits(self, bits: Tensor) -> Tensor:
        """Return a flag for every bit, the lowest of a byte first."""
        codes = self.scratch.magnitudes.view(torch.int32)[: bits.numel()].copy_(bits)
        flags = self.scratch.flags[: 8 * bits.numel()]
        torch.index_select(_flags_of_bytes(bits.device), 0, codes, out=flags.view(torch.int64))
        return flags

    def _views(self, message: Tensor, entries: int, kind: str) -> tuple[Tensor, Tensor]:
        """Return the values of a sparse message, and its indices or bits."""
        values = self.dtype.itemsize * entries
        if kind == "bitmap":
            return message[:values].view(self.dtype), message[values:]
        indices = INDEX_BYTES * entries
        if self.dtype.itemsize >= INDEX_BYTES:
            return message[:values].view(self.dtype), message[values:].view(torch.int32)
        return message[indices:].view(self.dtype), message[:indices].view(torch.int32)


def _write_bits(bits: Tensor, flags: Tensor) -> None:
    """Write flags as bits, the first the lowest of a byte; overwrites the flags."""
    whole = flags.numel() // 8
    words = flags[: 8 * whole].view(torch.int64)
    bits[:whole].copy_(words.mul_(GATHER_BITS).bitwise_right_shift_(56))  # a byte keeps the lowest bits of a word
    if whole < bits.numel():
        _write_bits(bits[whole:], pad(flags[8 * whole :], (0, 8 * bits.numel() - flags.numel())))


@cache
def _flags_of_bytes(device: torch.device) -> Tensor:
    """Return the lookup table from a byte to its eight bits, as byte flags in one word."""
    words = [sum((code >> bit & 1) << 8 * bit for bit in range(8)) for code in range(256)]
    return torch.tensor(words, device=device)


Pieces = Callable[[int, int], list[Tensor]]
"""Returns the accumulated gradient of a half-open range of a bucket, or what other ranks own of it, in pieces."""
ThresholdedRange = tuple[slice, float]
"""A range, and its threshold."""


class Thresholds:
    """The thresholds of a bucket's tensors.

    For a target density each tensor's is estimated every few steps. Gradients drift in between, so in every other step
    all are scaled by one factor, with which a sample of the bucket reaches the target: counts of earlier steps would
    tell of a jump only after it was sent, and residuals answer to a changed threshold with a delay.
    """

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
            means = mean_magnitudes([pieces(place.start, place.stop) for place in self.places], scratch)
            thresholds = [_above_zero(self.push.threshold * mean) if self.push.threshold else 0.0 for mean in means]
        elif self.estimated is None or step % self.push.reestimate_steps == 0:
            tensors = [pieces(place.start, place.stop) for place in self.places]
            thresholds = [quantile(tensor, self.push.threshold, scratch) for tensor in tensors]
            # NaN, or infinities that are not those of tensors without elements, are of no use for the next steps
            broken = any(
                not math.isfinite(each) and any(piece.numel() for piece in tensor)
                for each, tensor in zip(thresholds, tensors, strict=True)
            )
            self.estimated = None if broken else [each / scale if each > TINY else each for each in thresholds]
        else:
            factor = scale * self._drift(pieces, scratch, step=step, scale=scale)
            thresholds = [estimate * factor for estimate in self.estimated]
        return list(zip(self.places, thresholds, strict=True))

    def _drift(self, pieces: Pieces, scratch: Scratch, *, step: int, scale: float) -> float:
        """Return the factor of the estimates with which the target fraction of a sample of the bucket reaches them.

        The sample has equidistant elements, other ones in each step. Tensors that are all zeros, or were, and empty
        ones keep their thresholds.
        """
        assert self.push.threshold is not None
        assert self.estimated is not None
        pairs = zip(self.places, self.estimated, strict=True)
        followed = [
            (pieces(place.start, place.stop), estimate) for place, estimate in pairs if TINY < estimate < math.inf
        ]
        elements = sum(piece.numel() for parts, _ in followed for piece in parts)
        room = min(encodings.followed_elements(self.push.threshold, elements), scratch.magnitudes.numel())
        if not room:
            return 1.0
        distance = _sampling_stride(math.ceil(elements / room)) if elements > room else 1
        start, taken = step * MIXING % distance, 0
        for parts, estimate in followed:
            first = taken
            for piece in parts:
                picked = piece[start::distance]
                scratch.magnitudes[taken : taken + picked.numel()].copy_(picked)
                start, taken = (start - piece.numel()) % distance, taken + picked.numel()
            scratch.magnitudes[first:taken].mul_(1 / (estimate * scale))
        sample = scratch.magnitudes[:taken].abs_()
        factor = _kth_largest(sample, max(1, round(self.push.threshold * taken))) if taken else 1.0
        return factor if math.isnan(factor) else max(factor, TINY)


MIXING = 7919
"""A prime: samples of consecutive steps begin at elements that lie far from each other."""


def _above_zero(threshold: float) -> float:
    """Return a threshold that zeros never reach, even if all of a tensor are zeros."""
    return threshold if math.isnan(threshold) else max(threshold, TINY)


TINY = float(torch.finfo(torch.float32).tiny)


def mean_magnitudes(tensors: Sequence[Sequence[Tensor]], scratch: Scratch) -> list[float]:
    """Return the mean magnitude of each tensor, given in pieces.

    On a CPU, torch's norm would copy a whole 16-bit piece to fp32; here its chunks are cast in `scratch`, in turn.
    """
    wide = scratch.magnitudes.dtype
    parts: list[list[Tensor]] = [[] for _ in tensors]
    for chunks, pieces in zip(parts, tensors, strict=True):
        for piece in pieces:
            is_cast = is_on_host(piece) and piece.dtype != wide
            places = scratch.chunks(piece.numel()) if is_cast else [(0, piece.numel())]
            chunks += [piece[first:last] for first, last in places]
    flat = [part for each in parts for part in each]
    if not flat:
        return [0.0] * len(tensors)
    cast = (scratch.cast_to(wide, part) if is_on_host(part) else part for part in flat)
    norms = torch.stack([torch.linalg.vector_norm(part, 1, dtype=wide) for part in cast])
    totals = iter(norms.tolist())  # the device is waited for once
    return [sum(next(totals) for _ in each) / max(1, sum(part.numel() for part in each)) for each in parts]


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
