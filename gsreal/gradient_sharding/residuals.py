"""Error feedback: what a rank has not sent of a bucket is kept, and added to what it finds there next."""

from itertools import pairwise

import torch
from torch import Tensor

from gsreal.gradient_sharding.bucket import ABSENT, Bucket
from gsreal.gradient_sharding.scratch import Scratch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Residual:
    """What a rank has kept of a bucket: a value for every element that another rank owns.

    It is in the unit of the rank's mean gradient, which its owner multiplies by the rank's weight: where that weight
    has changed, what is kept is scaled, so that it counts as it would have done.
    """

    def __init__(self, elements: int, own: slice, dtype: torch.dtype, device: torch.device) -> None:
        self.elements, self.own = elements, own
        self.values = torch.full((elements - (own.stop - own.start),), ABSENT, dtype=dtype, device=device)
        """Nothing kept is a negative zero: added to an absent gradient, it leaves it absent."""
        self.weight = 0.0
        """What the rank's gradients counted when this was kept."""
        self.owed: Tensor | None = None
        """What was kept of the own range while others owned it."""

    def part(self, first: int, last: int) -> Tensor:
        """Return what is kept of a range that another rank owns."""
        shift = 0 if last <= self.own.start else self.own.stop - self.own.start
        return self.values[first - shift : last - shift]

    @property
    def places(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What others own: half-open ranges before the own one and after it."""
        return (0, self.own.start), (self.own.stop, self.elements)

    def accumulates(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of a type are added to what is kept; else it to them, whichever is more precise."""
        return torch.promote_types(dtype, self.values.dtype) == self.values.dtype

    def reshard(self, own: slice) -> None:
        """Keep the same where the rank now owns another range: what it owns itself goes into its next gradient."""
        whole = self.values.new_full((self.elements,), ABSENT)
        for first, last in self.places:
            whole[first:last] = self.part(first, last)
        if self.owed is not None:
            whole[self.own] = self.owed
        self.own, self.owed = own, whole[own].clone()
        self.values = torch.cat([whole[: own.start], whole[own.stop :]])

    def pay(self, gradient: Tensor, weight: float) -> None:
        """Add to a bucket's gradient what was kept of the own range while others owned it."""
        if self.owed is not None:
            gradient[self.own].add_(self.owed.to(gradient.dtype), alpha=self._ratio(weight))
            self.owed = None

    def _ratio(self, weight: float) -> float:
        return self.weight / weight if self.weight else 1.0

    def accumulate(self, gradient: Tensor, weight: float, scratch: Scratch) -> None:
        """Add a bucket's gradient and what is kept: here, or in the gradient where that is more precise."""
        ratio = self._ratio(weight)
        self.weight = weight
        here = self.accumulates(gradient.dtype)
        if here and ratio != 1:
            self.values.mul_(ratio)
        for first, last in self.places:
            kept, new = self.part(first, last), gradient[first:last]
            if here:
                scratch.add(kept, new)
            else:
                scratch.add(new, kept, ratio)

    def keep(self, gradient: Tensor) -> None:
        """Keep what is left of an accumulated gradient from which entries were taken."""
        for first, last in self.places:
            self.part(first, last).copy_(gradient[first:last])

    def drop_broken(self) -> None:
        """Forget what is not finite, so that a step with broken gradients does not last."""
        self.values.nan_to_num_(nan=ABSENT, posinf=ABSENT, neginf=ABSENT)


class Accumulated:
    """A bucket's gradient with what was kept of it added: where it is, and how it is left."""

    def __init__(self, bucket: Bucket, residual: Residual | None) -> None:
        self.bucket, self.residual = bucket, residual
        self.elsewhere = residual is not None and residual.accumulates(bucket.flat.dtype)
        """Whether others' ranges are accumulated in what is kept, not in the bucket."""

    def part(self, first: int, last: int) -> Tensor:
        """Return a range that another rank owns."""
        if self.elsewhere and self.residual is not None:
            return self.residual.part(first, last)
        assert self.bucket.gradient is not None
        return self.bucket.gradient[first:last]

    def pieces(self, first: int, last: int) -> list[Tensor]:
        """Return a range of the bucket, in pieces where the own range cuts it."""
        assert self.bucket.gradient is not None
        own = self.bucket.own
        cuts = sorted({first, last, *(end for end in (own.start, own.stop) if first < end < last)})
        return [self.bucket.gradient[a:b] if own.start <= a < own.stop else self.part(a, b) for a, b in pairwise(cuts)]

    def release(self) -> None:
        """Give the bucket back if others' ranges are elsewhere: the own range is taken, and nothing else is needed."""
        if self.elsewhere:
            self.bucket.gradient = None

    def finish(self) -> None:
        """Keep what is left once all messages are packed, and give the bucket back."""
        if self.residual is not None and not self.elsewhere:
            assert self.bucket.gradient is not None
            self.residual.keep(self.bucket.gradient)
        self.bucket.gradient = None
