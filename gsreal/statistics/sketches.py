"""Sketches of tensors by block, and counts over thresholds with error feedback, which do not affect the training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsreal.gradient_sharding.thresholds import TINY
from gssim.workload.gradient_statistics import HELD_LEVELS, SKETCH_EDGES

BLOCKS = 12
"""Blocks of a tensor: query, key and value have four each, as has every third."""
PARTITIONS = (1, 2, 3, 4, 6, BLOCKS)
ALIKE = 2.0
"""Blocks whose mean magnitudes differ by at most this factor are merged."""
SMALL = 0.01
"""Tensors with at most this fraction of the model's elements are a single block."""
NEARLY_ALL = 0.99
"""Edges that more than this fraction of the nonzero elements reach are left out."""


class BlockSketches:
    """Sums over the blocks of one tensor at one step, of all the gradients that are added."""

    def __init__(self) -> None:
        self.elements: Any = 0
        self.sums: Any = 0
        self.squares: Any = 0
        self.reached: Any = 0

    def add(self, gradient: Tensor) -> None:
        """Add a gradient's elements."""
        magnitudes = gradient.detach().abs().reshape(-1).double()
        below = torch.bucketize(magnitudes, torch.tensor(SKETCH_EDGES, dtype=torch.float64), right=True)
        counts = [torch.bincount(block, minlength=len(SKETCH_EDGES) + 1) for block in in_blocks(below)]
        reached = torch.stack(counts).flip(1).cumsum(1).flip(1).numpy()
        self.elements, self.reached = self.elements + reached[:, 0], self.reached + reached[:, 1:]
        self.sums, self.squares = self.sums + summed(magnitudes), self.squares + summed(magnitudes.square())

    def totals(self, blocks: slice) -> np.ndarray:
        """Return mean and mean square magnitude of some of the blocks together.

        And the fraction that reaches each edge.
        """
        totals = [self.sums[blocks].sum(), self.squares[blocks].sum(), *self.reached[blocks].sum(0)]
        return np.array(totals) / max(1, int(self.elements[blocks].sum()))

    @property
    def means(self) -> np.ndarray:
        """Mean magnitude of every block."""
        return np.asarray(self.sums / np.maximum(1, self.elements))


def typical(courses: Sequence[np.ndarray]) -> np.ndarray:
    """Return the median over courses, element by element.

    A course's gradients are sometimes several times as large for a step, which would dominate a mean.

    >>> typical([np.array([each, 0.0]) for each in (0.1, 0.4, 9.0, 0.2)]).round(3).tolist()
    [0.3, 0.0]
    """
    return np.asarray(np.median(np.array(courses), axis=0))


def sketch(courses: Sequence[BlockSketches], blocks: slice) -> dict[str, Any]:
    """Return the typical sketch of some of the blocks together."""
    mean, square, *reached = typical([each.totals(blocks) for each in courses])
    ratios = np.array(reached)
    first = max(0, int((ratios >= NEARLY_ALL * ratios[0]).sum()) - 1)
    last = max(first + 1, int((ratios > 0).sum()))
    return {
        "mean": rounded(mean),
        "rms": rounded(math.sqrt(square)),
        "first_edge": first,
        "tail_ratios": [rounded(float(ratio), 3) for ratio in ratios[first:last]],
    }


def starts(elements: int) -> list[int]:
    """Return the start of each block of a tensor: blocks are of equal size, or nearly."""
    return [-(-elements * i // BLOCKS) for i in range(BLOCKS)]


def in_blocks(flat: Tensor) -> list[Tensor]:
    """Return the blocks of a flat tensor."""
    return list(flat.tensor_split(starts(len(flat))[1:]))


def summed(values: Tensor) -> np.ndarray:
    """Return the sum of the values in each block, or the number of true ones."""
    if len(values) < BLOCKS:  # some blocks are empty
        return np.array([float(block.sum()) for block in in_blocks(values)])
    kind = np.int64 if values.dtype == torch.bool else np.float64
    return np.add.reduceat(values.numpy(), starts(len(values)), dtype=kind).astype(np.float64)


def partition(means: Sequence[np.ndarray], *, small: bool) -> tuple[slice, ...]:
    """Return the fewest parts of equal size that consist of similar blocks; `means`: of every block at every step.

    Which owner has which part of a small tensor matters little: it is one part.
    """
    for count in PARTITIONS[:1] if small else PARTITIONS:
        size = BLOCKS // count
        parts = [[each[i * size : (i + 1) * size] for each in means] for i in range(count)]
        if all(_alike(part) for steps in parts for part in steps):
            break
    return tuple(slice(i * size, (i + 1) * size) for i in range(count))


def _alike(means: np.ndarray) -> bool:
    return bool(means.max() <= ALIKE * means.min())


def rounded(value: float, digits: int = 4) -> float:
    """Return the value to a few significant digits."""
    return float(f"{value:.{digits}g}")


@dataclass
class Reached:
    """Numbers of elements of each block that reach thresholds, for one gradient or the sum of several."""

    sent: np.ndarray
    """By threshold and block."""
    held: np.ndarray
    """By threshold, level (`HELD_LEVELS`) and block."""
    relative: np.ndarray
    """By whether there is error feedback, multiple and block."""

    def __add__(self, other: "Reached") -> "Reached":
        """Return the sum of both."""
        return Reached(self.sent + other.sent, self.held + other.held, self.relative + other.relative)


class Feedback:
    """Residuals of one tensor, under each of several thresholds, and of several multiples of the mean."""

    def __init__(self, thresholds: Sequence[float], multiples: Sequence[float] = ()) -> None:
        self.thresholds, self.multiples = thresholds, multiples
        self.residuals: list[Tensor] = []

    def reached(self, values: Tensor) -> Reached:
        """Return the number of elements that reach the thresholds if these values were sent now."""
        flat = values.detach().reshape(-1).float()
        held = [(flat + residual).abs() for residual in self._residuals(flat)]
        pairs, absolute = list(zip(held, self._thresholds(held), strict=True)), len(self.thresholds)
        sent = [summed(each >= threshold) for each, threshold in pairs]
        levels = [summed(each >= level * threshold) for each, threshold in pairs[:absolute] for level in HELD_LEVELS]
        magnitudes = flat.abs()
        plain = [summed(magnitudes >= threshold) for threshold in self._of_means([magnitudes] * len(self.multiples))]
        return Reached(
            sent=np.array(sent[:absolute]).reshape(-1, BLOCKS),
            held=np.array(levels).reshape(-1, len(HELD_LEVELS), BLOCKS),
            relative=np.array([plain, sent[absolute:]]).reshape(2, -1, BLOCKS),
        )

    def add(self, values: Tensor) -> None:
        """Add values to the residuals, send what reaches each threshold, and keep the rest."""
        flat = values.detach().reshape(-1).float()
        values_held = [flat + residual for residual in self._residuals(flat)]
        self.residuals = [
            each.mul_(each.abs() < threshold)
            for each, threshold in zip(values_held, self._thresholds(values_held), strict=True)
        ]

    def _thresholds(self, held: Sequence[Tensor]) -> list[float]:
        return [*self.thresholds, *self._of_means(held[len(self.thresholds) :])]

    def _of_means(self, held: Sequence[Tensor]) -> list[float]:
        """Return every multiple of the mean magnitude of its tensor.

        If all are zeros, a threshold that no zero reaches.
        """
        means = [float(each.abs().mean()) for each in held]
        return [max(TINY, multiple * mean) for multiple, mean in zip(self.multiples, means, strict=True)]

    def _residuals(self, flat: Tensor) -> list[Tensor]:
        if not self.residuals:
            self.residuals = [torch.zeros_like(flat) for _ in (*self.thresholds, *self.multiples)]
        return self.residuals
