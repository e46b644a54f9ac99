"""What error feedback makes of thresholds, several at once, beside a training that goes on regardless."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gsreal.gradient_sharding.thresholds import TINY
from gsreal.statistics.sketches import BLOCKS, summed
from gssim.gradients import HELD_LEVELS


@dataclass
class Reached:
    """How many elements of each block reach thresholds; or of several gradients, added up."""

    sent: np.ndarray
    """By threshold and block."""
    held: np.ndarray
    """By threshold, level (`HELD_LEVELS`) and block."""
    relative: np.ndarray
    """By whether there is error feedback, multiple and block."""

    def __add__(self, other: "Reached") -> "Reached":
        """Return both added up."""
        return Reached(self.sent + other.sent, self.held + other.held, self.relative + other.relative)


class Feedback:
    """What was not sent of one tensor, under each of several thresholds, and of several multiples of the mean."""

    def __init__(self, thresholds: Sequence[float], multiples: Sequence[float] = ()) -> None:
        self.thresholds, self.multiples = thresholds, multiples
        self.residuals: list[Tensor] = []

    def reached(self, values: Tensor) -> Reached:
        """Return how many elements reach the thresholds if these values were to be sent now."""
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
        """Send what reaches each threshold of these values and what is left of earlier ones; keep the rest."""
        flat = values.detach().reshape(-1).float()
        held = [flat + residual for residual in self._residuals(flat)]
        self.residuals = [
            each.mul_(each.abs() < threshold) for each, threshold in zip(held, self._thresholds(held), strict=True)
        ]

    def _thresholds(self, held: Sequence[Tensor]) -> list[float]:
        return [*self.thresholds, *self._of_means(held[len(self.thresholds) :])]

    def _of_means(self, held: Sequence[Tensor]) -> list[float]:
        """Return every multiple of the mean magnitude of its tensor; of zeros, what no zero reaches."""
        means = [float(each.abs().mean()) for each in held]
        return [max(TINY, multiple * mean) for multiple, mean in zip(self.multiples, means, strict=True)]

    def _residuals(self, flat: Tensor) -> list[Tensor]:
        if not self.residuals:
            self.residuals = [torch.zeros_like(flat) for _ in (*self.thresholds, *self.multiples)]
        return self.residuals
