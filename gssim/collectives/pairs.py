"""What each of many sends to each other, where most of them send the same: it grows with members, not with pairs."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gssim.units import Floats, Ints


class Pairs(Sequence[tuple[float, ...]]):
    """A matrix of bytes from the i-th to the j-th member, by rows; nobody sends to itself.

    `rows`: what each kind of sender has for every member, itself included, where it counts as nothing. `kinds`: the
    number of each sender's row. Sums are taken in the order of members, to the last digit as those of the rows are.

    >>> pairs = Pairs(rows=[(1.0, 2.0, 4.0)], kinds=(0, 0, 0))
    >>> list(pairs)
    [(0.0, 2.0, 4.0), (1.0, 0.0, 4.0), (1.0, 2.0, 0.0)]
    >>> pairs.sent, pairs.received, pairs.total
    ((6.0, 5.0, 3.0), (2.0, 4.0, 8.0), 14.0)
    """

    def __init__(self, rows: Sequence[Sequence[float]], kinds: Sequence[int]) -> None:
        self.rows, self.kinds = rows, kinds

    def __len__(self) -> int:
        """Return how many members there are."""
        return len(self.kinds)

    def __getitem__(self, member: Any) -> Any:
        """Return what a member sends to each."""
        if isinstance(member, slice):
            return [self[each] for each in range(*member.indices(len(self)))]
        own, row = range(len(self))[member], self.rows[self.kinds[member]]
        return (*row[:own], 0.0, *row[own + 1 :])

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        """Give the rows."""
        return (self[member] for member in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether the rows are equal."""
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        """Return the same for equal rows."""
        return hash(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        """Return the matrix; always a new one."""
        matrix: Floats = np.array(self.rows, dtype=float)[np.array(self.kinds)]
        np.fill_diagonal(matrix, 0.0)
        return matrix

    @cached_property
    def sent(self) -> tuple[float, ...]:
        """What each member sends in all."""
        rows, kinds = np.array(self.rows, dtype=float), np.array(self.kinds)
        found = np.zeros(len(kinds))
        for kind, row in enumerate(rows):
            members = np.flatnonzero(kinds == kind)
            runs = np.cumsum(np.r_[0, row[1:] != row[:-1]])[members]  # to leave out one of a run or another is the same
            _, first, run = np.unique(runs, return_index=True, return_inverse=True)
            found[members] = _sums_without(np.tile(row, (len(first), 1)), members[first])[run]
        return tuple(found.tolist())

    @cached_property
    def received(self) -> tuple[float, ...]:
        """What each member receives in all."""
        rows, kinds = np.array(self.rows, dtype=float), np.array(self.kinds)
        runs = np.cumsum(np.r_[0, kinds[1:] != kinds[:-1]])
        columns = np.column_stack([runs, rows.T])
        _, first, like = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        return tuple(_sums_without(rows[kinds][:, first].T, first)[like.ravel()].tolist())

    @cached_property
    def total(self) -> float:
        """What all send."""
        return sum(self.sent)


def _sums_without(rows: Floats, own: Ints) -> Floats:
    """Return the sum of each row without its own element."""
    kept = rows.copy()
    kept[np.arange(len(own)), own] = 0.0
    sums: Floats = np.cumsum(kept, axis=1)[:, -1]
    return sums


def summed_without(terms: Floats, own: int, *, width: int = 1, first: float = 0.0) -> float:
    """Return the sum of `first` and all terms but the `own`-th `width` of them, taken one after another.

    >>> summed_without(np.array([1.0, 2.0, 4.0, 8.0]), 1, width=2, first=16.0)
    19.0
    """
    kept = np.concatenate([[first], terms])
    kept[1 + own * width : 1 + (own + 1) * width] = 0.0
    return float(np.cumsum(kept)[-1])
