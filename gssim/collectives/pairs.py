"""What each of many sends to each other, where most of them send the same: it grows with members, not with pairs."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from gssim.collectives.stage import Hops
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
            found[members] = _sums_without(partial(_repeated, row), members[first], len(row))[run]
        return tuple(found.tolist())

    @cached_property
    def received(self) -> tuple[float, ...]:
        """What each member receives in all."""
        rows, kinds = np.array(self.rows, dtype=float), np.array(self.kinds)
        runs = np.cumsum(np.r_[0, kinds[1:] != kinds[:-1]])
        columns = np.column_stack([runs, rows.T])
        _, first, like = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        sums = _sums_without(lambda some: rows[:, some][kinds].T, first, len(kinds))
        return tuple(sums[like.ravel()].tolist())

    @cached_property
    def kind_count(self) -> int:
        """How many kinds of senders there are."""
        return len(set(self.kinds))

    @cached_property
    def most(self) -> float:
        """The most that anybody sends to anybody else."""
        rows, kinds = np.array(self.rows, dtype=float), np.array(self.kinds)
        found = []
        for kind in set(self.kinds):
            members = np.flatnonzero(kinds == kind)
            row = rows[kind] if len(members) > 1 else np.delete(rows[kind], members)
            found.append(float(row.max(initial=0.0)))
        return max(found, default=0.0)

    @cached_property
    def total(self) -> float:
        """What all send."""
        return sum(self.sent)


class Exchange(Hops):
    """Everybody sends to everybody, most of them the same: told by the senders' kinds, and not pair by pair.

    What it is of single pairs is made only where somebody asks.
    """

    def __init__(self, every: Hops, ranks: Ints, rows: Floats, kinds: Ints) -> None:
        for name, value in (("every", every), ("ranks", ranks), ("rows", rows), ("kinds", kinds)):
            object.__setattr__(self, name, value)

    every: Hops
    """A hop for every ordered pair, each of weight 1."""
    ranks: Ints
    """Of the members."""
    rows: Floats
    """What each kind of sender has for every member, for each byte of the stage's size."""
    kinds: Ints

    @property
    def count(self) -> int:
        """How many hops there are."""
        return len(self.ranks) * (len(self.ranks) - 1)

    @property
    def elements(self) -> int:
        """How many numbers it takes to tell them."""
        return self.rows.size + len(self.kinds)

    @cached_property
    def source(self) -> Ints:
        """Rank that sends, by hop."""
        return self.every.source

    @cached_property
    def target(self) -> Ints:
        """Rank that receives, by hop."""
        return self.every.target

    @cached_property
    def weight(self) -> Floats:
        """Bytes carried for each byte of the stage's size, by hop."""
        members = len(self.ranks)
        return self.rows[self.kinds][~np.eye(members, dtype=bool)]

    def weighted(self, columns: Floats) -> float:
        """Return the sum over all hops of weight times what `columns` has, by kind and target, of all senders."""
        return float((self.rows * columns).sum())

    @cached_property
    def heaviest(self) -> float:
        """The largest weight."""
        return Pairs(self.rows.tolist(), self.kinds.tolist()).most

    @property
    def weight_in_all(self) -> float:
        """The sum of all weights."""
        counts = np.bincount(self.kinds, minlength=len(self.rows))
        own = self.rows[self.kinds, np.arange(len(self.kinds))].sum()
        return float((self.rows.sum(axis=1) * counts).sum() - own)

    def carried_by_rank(self, ranks: int) -> tuple[Floats, Floats]:
        """Return what each rank sends and receives for each byte of the size."""
        own = self.rows[self.kinds, np.arange(len(self.kinds))]
        counts = np.bincount(self.kinds, minlength=len(self.rows))
        sent, received = np.zeros((2, ranks))
        sent[self.ranks] = self.rows.sum(axis=1)[self.kinds] - own
        received[self.ranks] = counts @ self.rows - own
        return sent, received


def _repeated(row: Floats, some: Ints) -> Floats:
    return np.tile(row, (len(some), 1))


AT_ONCE = 2**22
"""Numbers that are summed together: those of all pairs of many members would not fit into memory."""


def _sums_without(rows: Callable[[Ints], Floats], own: Ints, length: int) -> Floats:
    """Return the sum of a row for each of `own` without that element; `rows` makes those of some of them."""
    sums = np.zeros(len(own))
    some = max(1, AT_ONCE // max(1, length))
    for begin in range(0, len(own), some):
        part = own[begin : begin + some]
        kept = np.ascontiguousarray(rows(part))
        kept[np.arange(len(part)), part] = 0.0
        sums[begin : begin + some] = np.cumsum(kept, axis=1)[:, -1]
    return sums


def summed_without(terms: Floats, own: int, *, width: int = 1, first: float = 0.0) -> float:
    """Return the sum of `first` and all terms but the `own`-th `width` of them, taken one after another.

    >>> summed_without(np.array([1.0, 2.0, 4.0, 8.0]), 1, width=2, first=16.0)
    19.0
    """
    kept = np.concatenate([[first], terms])
    kept[1 + own * width : 1 + (own + 1) * width] = 0.0
    return float(np.cumsum(kept)[-1])
