"""What error feedback makes of thresholds, several at once, beside a training that goes on regardless."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gsreal.statistics.sketches import BLOCKS, summed


class Feedback:
    """What was not sent of one tensor, under each of several thresholds."""

    def __init__(self, thresholds: Sequence[float]) -> None:
        self.thresholds = thresholds
        self.residuals: list[Tensor] = []

    def reached(self, values: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return (elements sent, sum of magnitudes) by threshold and block, if these values were to be sent now."""
        flat = values.detach().reshape(-1).float()
        held = [(flat + residual).abs() for residual in self._residuals(flat)]
        sent = [summed(each >= threshold) for each, threshold in zip(held, self.thresholds, strict=True)]
        return _table(sent), _table([summed(each) for each in held])

    def add(self, values: Tensor) -> None:
        """Send what reaches each threshold of these values and what is left of earlier ones; keep the rest."""
        flat = values.detach().reshape(-1).float()
        for residual, threshold in zip(self._residuals(flat), self.thresholds, strict=True):
            residual += flat
            residual[residual.abs() >= threshold] = 0

    def _residuals(self, flat: Tensor) -> list[Tensor]:
        if not self.residuals:
            self.residuals = [torch.zeros_like(flat) for _ in self.thresholds]
        return self.residuals


def _table(rows: list[np.ndarray]) -> np.ndarray:
    return np.array(rows).reshape(-1, BLOCKS)
