"""Interface of data sources: a rank's rows of a step's batch, and the number of loss terms of any rows."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from torch import Tensor

from gssim.units import Ints

IGNORED = -100
"""Target that the loss leaves out (torch's cross_entropy default)."""


class Source(Protocol):
    """Training data as a function of seed, step and rows alone, so that ranks need not communicate about data."""

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these rows of the step's batch; no other rows are read."""

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return the number of loss terms of each of these parts of the batch; nothing is read."""


def sizes_of(rows: Sequence[slice]) -> list[int]:
    """Return the number of rows of each slice.

    >>> sizes_of([slice(0, 3), slice(3, 3)])
    [3, 0]
    """
    return [each.stop - each.start for each in rows]


def samples_at(count: int, *, seed: int, step: int, batch_size: int, rows: slice) -> Ints:
    """Return the indices, out of `count` samples, of a step's rows.

    Every epoch is a shuffle of all samples; a batch may begin in one epoch and end in the next.
    """
    places = step * batch_size + np.arange(rows.start, rows.stop)
    epochs, within = np.divmod(places, count)
    samples = np.empty(len(places), dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        samples[here] = _shuffle(count, seed, int(epoch))[within[here]]
    return samples


@lru_cache(maxsize=2)
def _shuffle(count: int, seed: int, epoch: int) -> Ints:
    """Return an epoch's order of all samples; two are cached, for a batch in both."""
    return np.random.default_rng([seed, epoch]).permutation(count)
