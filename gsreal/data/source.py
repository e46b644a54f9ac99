"""What every source of data offers: a rank's rows of a step's batch, and how many loss terms any rows have."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from torch import Tensor

from gssim.units import Ints

IGNORED = -100
"""Target that the loss leaves out (torch's cross_entropy default)."""


class Source(Protocol):
    """Data as training takes them: a function of seed, step and rows alone, so that no rank talks about data."""

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these rows of the step's batch; no other rows are read."""

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return over how many targets the loss of each of these parts of the batch is a mean; nothing is read."""


def sizes_of(rows: Sequence[slice]) -> list[int]:
    """Return how many rows each slice has.

    >>> sizes_of([slice(0, 3), slice(3, 3)])
    [3, 0]
    """
    return [each.stop - each.start for each in rows]


def samples_at(count: int, *, seed: int, step: int, batch_size: int, rows: slice) -> Ints:
    """Return which of `count` samples the rows of a step are: every epoch is a shuffle of all, and none is cut off.

    A batch may begin in one epoch and end in the next.
    """
    places = step * batch_size + np.arange(rows.start, rows.stop)
    epochs, within = np.divmod(places, count)
    found = np.empty(len(places), dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = _shuffle(count, seed, int(epoch))[within[here]]
    return found


@lru_cache(maxsize=2)
def _shuffle(count: int, seed: int, epoch: int) -> Ints:
    return np.random.default_rng([seed, epoch]).permutation(count)
