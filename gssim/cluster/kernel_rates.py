"""Measured rates of matrix products and attention by their sizes, which models without a profile are predicted from."""

from collections.abc import Sequence
from itertools import pairwise, product
from math import exp, log
from typing import Literal

from gssim.units import PositiveFloat, Precision, spec

ProductKind = Literal["forward", "input_gradient", "weight_gradient"]


def _place(sizes: Sequence[float], size: float) -> tuple[int, float]:
    """Return the index of the interval of `sizes` that holds `size`, and the place in it (0 to 1, in logarithms)."""
    within = min(max(size, sizes[0]), sizes[-1])
    index = next((i for i, (_, right) in enumerate(pairwise(sizes)) if within <= right), 0)
    if len(sizes) == 1:
        return 0, 0.0
    left, right = sizes[index], sizes[index + 1]
    return index, log(within / left) / log(right / left)


def _increasing(sizes: Sequence[float]) -> bool:
    return bool(sizes) and all(left < right for left, right in pairwise(sizes))


@spec
class ProductRates:
    """FLOP/s of one of a linear layer's three products, by its numbers of tokens m, inputs k and outputs n."""

    sizes: tuple[PositiveFloat, ...]
    """Sizes in increasing order, used for m, for k and for n."""
    flop_per_s: tuple[PositiveFloat, ...]
    """Rate of every combination (m, k, n); n varies fastest, then k."""
    odd_ratio: PositiveFloat = 1.0
    """Rate if the number of outputs or inputs is odd, relative to even numbers: in 16 bits, kernels are slower for
    matrices whose rows do not begin at multiples of 16 bytes."""

    def __post_init__(self) -> None:
        """Refuse rates that are not a function of the sizes."""
        if not _increasing(self.sizes) or len(self.flop_per_s) != len(self.sizes) ** 3:
            raise ValueError("sizes must increase, and flop_per_s must have one rate for each combination (m, k, n)")

    def at(self, m: float, k: float, n: float) -> float:
        """Return the FLOP/s of a product of (m, k) and (k, n), interpolated linearly in logarithms of sizes and rates.

        Above the largest size the rate stays constant. Below the smallest size the time does, as the kernel does not
        fill the device.

        >>> rates = ProductRates(sizes=(10.0, 1000.0), flop_per_s=(1.0, 1.0, 1.0, 1.0, 100.0, 100.0, 100.0, 100.0))
        >>> [round(rates.at(m, 10, 10), 9) for m in (100, 10**6, 1)]
        [10.0, 100.0, 0.1]
        """
        places = [_place(self.sizes, size) for size in (m, k, n)]
        count, last = len(self.sizes), len(self.sizes) - 1
        logarithm = 0.0
        for corner in product((0, 1), repeat=3):
            weight, index = 1.0, 0
            for (left, fraction), side in zip(places, corner, strict=True):
                weight *= fraction if side else 1 - fraction
                index = index * count + min(left + side, last)
            logarithm += weight * log(self.flop_per_s[index]) if weight else 0.0
        rate = exp(logarithm)
        for size in (m, k, n):
            rate *= min(1.0, size / self.sizes[0])
        return rate * self.odd_ratio if n % 2 or k % 2 else rate


@spec
class AttentionRates:
    """FLOP/s of fused attention by sequence length; FLOP are counted as if all positions attended to all."""

    head_width: PositiveFloat
    """Elements of a head's queries."""
    lengths: tuple[PositiveFloat, ...]
    """Increasing lengths."""
    causal_forward: tuple[PositiveFloat, ...]
    """Rate of the forward with a causal mask, at each length. Only about half of the counted FLOP are computed."""
    causal_backward: tuple[PositiveFloat, ...]
    """Rate of the causal backward, which recomputes the scores: 2.5 times the forward's FLOP are counted."""
    forward: tuple[PositiveFloat, ...]
    """Rate of the forward without a mask, at each length."""
    backward: tuple[PositiveFloat, ...]
    """Rate of the backward without a mask, at each length."""

    def __post_init__(self) -> None:
        """Refuse rates that are not a function of the length."""
        curves = (self.causal_forward, self.causal_backward, self.forward, self.backward)
        if not _increasing(self.lengths) or any(len(curve) != len(self.lengths) for curve in curves):
            raise ValueError("lengths must increase, and there must be one rate for each length")

    def at(self, length: float, *, backward: bool, causal: bool) -> float:
        """Return the FLOP/s at a length, interpolated linearly in logarithms; constant beyond the measured lengths.

        >>> others = {name: (7.0, 7.0) for name in ("causal_backward", "forward", "backward")}
        >>> rates = AttentionRates(head_width=64, lengths=(1.0, 100.0), causal_forward=(1.0, 100.0), **others)
        >>> round(rates.at(10, backward=False, causal=True), 9), rates.at(10**4, backward=True, causal=False)
        (10.0, 7.0)
        """
        mask = "causal_" if causal else ""
        curve: tuple[float, ...] = getattr(self, f"{mask}backward" if backward else f"{mask}forward")
        left, fraction = _place(self.lengths, length)
        right = min(left + 1, len(curve) - 1)
        return float(curve[left] ** (1 - fraction) * curve[right] ** fraction)


@spec
class KernelRates:
    """Rates of the kernels that do a model's FLOP, at one precision."""

    precision: Precision
    """Precision of the operands."""
    products: dict[ProductKind, ProductRates]
    """Rates of a linear layer's three products: forward, gradient of the input, and gradient of the weight."""
    attention: tuple[AttentionRates, ...] = ()
    """Rates of attention, one table for each measured head width."""

    def __post_init__(self) -> None:
        """Refuse products of which one is missing."""
        if set(self.products) != {"forward", "input_gradient", "weight_gradient"}:
            raise ValueError("products must be forward, input_gradient and weight_gradient")

    def attention_flop_per_s(self, head_width: float | None, length: float, *, backward: bool, causal: bool) -> float:
        """Return the rate of attention for the measured head width that is nearest; for an unknown width, the first
        one.

        Raises IndexError if no attention was measured.
        """
        nearest = min(
            range(len(self.attention)),
            key=lambda i: abs(log(self.attention[i].head_width / head_width)) if head_width else i,
            default=0,
        )
        return self.attention[nearest].at(length, backward=backward, causal=causal)
