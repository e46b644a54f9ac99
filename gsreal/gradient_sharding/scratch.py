"""Memory that entries are found in: taken once, and used by every push."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gsreal.gradient_sharding.bucket import Bucket
from gssim.encodings import scratch_elements


class Scratch:
    """Flags for a message of at most `part` elements, and magnitudes for a chunk of it, in at least fp32."""

    def __init__(self, part: int, bucket: int, dtype: torch.dtype, device: torch.device) -> None:
        flags, magnitudes = scratch_elements(part, bucket, chunked=device.type == "cpu")
        self.flags = torch.empty(flags, dtype=torch.bool, device=device)
        self.magnitudes = torch.empty(magnitudes, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def chunks(self, elements: int, first: int = 0) -> Iterator[tuple[int, int]]:
        """Give the half-open ranges in which [first, elements) is gone through."""
        size = self.magnitudes.numel()
        for start in range(first, elements, max(1, size)):
            yield start, min(elements, start + size)

    def cast_to(self, dtype: torch.dtype, part: Tensor) -> Tensor:
        """Return a chunk in a type: as it is where it has it, else in the place of the magnitudes, whose type it is."""
        return part if part.dtype == dtype else self.magnitudes[: part.numel()].copy_(part)

    def add(self, target: Tensor, source: Tensor, factor: float = 1.0) -> None:
        """Add `factor` times a tensor to another, which may be of higher precision."""
        if source.dtype == target.dtype:
            target.add_(source, alpha=factor)
            return
        for first, last in self.chunks(target.numel()):
            target[first:last].add_(self.cast_to(target.dtype, source[first:last]), alpha=factor)


def scratches(buckets: Sequence[Bucket]) -> dict[torch.dtype, Scratch]:
    """Return what it takes to find and pack messages of these buckets, for each of their types."""
    found = {}
    for dtype in dict.fromkeys(bucket.flat.dtype for bucket in buckets):
        alike = [bucket for bucket in buckets if bucket.flat.dtype == dtype]
        part = max(last - first for bucket in alike for first, last in bucket.ranges)
        largest = max(bucket.elements for bucket in alike)
        found[dtype] = Scratch(part, largest, dtype, alike[0].flat.device)
    return found


def count(flags: Tensor) -> int:
    """Return how many flags are set; on a CPU by numpy, which is several times as fast."""
    return int(np.count_nonzero(flags.numpy())) if is_on_host(flags) else int(flags.count_nonzero())


def is_on_host(tensor: Tensor) -> bool:
    """Return whether numpy can look at a tensor."""
    return tensor.device.type == "cpu"


def listed(flags: Tensor, entries: int | None = None) -> Tensor:
    """Return the places of the flags that are set, as int64; numpy's list takes a chunk's worth of the host's memory.

    torch's goes by a branch for each element, which costs several times as much where many are set. `entries`: how many
    are set, where that is known: then a device need not be waited for.
    """
    if is_on_host(flags):
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return (flags.nonzero() if entries is None else torch.nonzero_static(flags, size=entries)).view(-1)
