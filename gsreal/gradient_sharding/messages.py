"""A thresholded message: the values that go to an owner and their places in its range, as bytes.

Densely, it is the owner's whole range with zeros where nothing is sent; else values and int32 indices (COO), the wider
of them first, so that both are aligned. Both ends decide alike from the number of entries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

INDEX_BYTES = 4


@dataclass(frozen=True)
class Encoding:
    """How messages are written: `coo`, `dense`, or `auto`, whichever of them has fewer bytes."""

    kind: str
    dtype: torch.dtype

    def is_dense(self, entries: int, elements: int) -> bool:
        """Return whether a message of `entries` out of `elements` goes densely."""
        if self.kind != "auto":
            return self.kind == "dense"
        return self._sparse_bytes(entries) >= elements * self.dtype.itemsize

    def _sparse_bytes(self, entries: int) -> int:
        return entries * (self.dtype.itemsize + INDEX_BYTES)

    def pack(self, part: Tensor, mask: Tensor) -> tuple[Tensor, int]:
        """Return the message of the elements of `part` where `mask` is true, and their number."""
        entries = int(mask.count_nonzero())
        if self.is_dense(entries, part.numel()):
            return torch.where(mask, part, part.new_zeros(())), entries
        index = mask.nonzero().view(-1)
        del mask
        message = self._sparse(entries, part.device)
        values, places = self._views(message, entries)
        torch.index_select(part, 0, index, out=values)
        places.copy_(index)
        return message, entries

    def empty(self, entries: int | None, elements: int, device: torch.device) -> Tensor:
        """Return a buffer for a message of `entries` out of `elements` (None: all of them, not thresholded)."""
        if entries is None or self.is_dense(entries, elements):
            return torch.empty(elements, dtype=self.dtype, device=device)
        return self._sparse(entries, device)

    def add(self, gradient: Tensor, message: Tensor, entries: int | None, weight: float) -> None:
        """Add a message's values, times `weight`, to an owner's gradient in the owner's precision."""
        if entries is None or self.is_dense(entries, gradient.numel()):
            gradient.add_(message.to(gradient.dtype), alpha=weight)
            return
        values, index = self._views(message, entries)
        gradient.index_add_(0, index, values.to(gradient.dtype), alpha=weight)

    def _sparse(self, entries: int, device: torch.device) -> Tensor:
        return torch.empty(self._sparse_bytes(entries), dtype=torch.uint8, device=device)

    def _views(self, message: Tensor, entries: int) -> tuple[Tensor, Tensor]:
        """Return the values and the indices in a sparse message."""
        values, indices = self.dtype.itemsize * entries, INDEX_BYTES * entries
        if self.dtype.itemsize >= INDEX_BYTES:
            return message[:values].view(self.dtype), message[values:].view(torch.int32)
        return message[indices:].view(self.dtype), message[:indices].view(torch.int32)
