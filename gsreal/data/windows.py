"""Windows of one long stream of tokens: for predicting the next token, or masked ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gsreal.data.source import IGNORED, sizes_of
from gssim.units import Ints

MASKED_RATIO = 0.15
"""BERT's fraction of masked tokens (Devlin et al. 2018, section 3.1)."""


@dataclass(frozen=True)
class Windows:
    """Windows of `length` tokens and the one after them, every start as likely as any other."""

    tokens: NDArray[np.unsignedinteger]
    """The stream; may be a mapped file: only what is drawn is read."""
    length: int
    batch_size: int
    mask: int | None
    """The token that stands for masked ones; None: the next token is predicted."""

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return token ids and targets of these rows."""
        starts, masked = self._draw(seed, step)
        windows = self.tokens[starts[rows, None] + np.arange(self.length + 1)].astype(np.int64)
        tokens = windows[:, :-1].copy()
        if masked is None:
            return torch.from_numpy(tokens), torch.from_numpy(windows[:, 1:].copy())
        hidden = masked[rows]
        inputs, targets = np.where(hidden, self.mask, tokens), np.where(hidden, tokens, IGNORED)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return how many tokens each part predicts."""
        if self.mask is None:
            return [size * self.length for size in sizes_of(rows)]
        _, masked = self._draw(seed, step)
        assert masked is not None  # there is a mask
        return [int(masked[each].sum()) for each in rows]

    def _draw(self, seed: int, step: int) -> tuple[Ints, NDArray[np.bool_] | None]:
        """Return where every row of the step's batch starts, and which of its tokens are masked."""
        random = np.random.default_rng([seed, step])
        starts = random.integers(0, len(self.tokens) - self.length, self.batch_size)
        if self.mask is None:
            return starts, None
        masked = random.random((self.batch_size, self.length)) < MASKED_RATIO
        masked[:, 0] = True  # every sample has a loss term
        return starts, masked
