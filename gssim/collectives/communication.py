"""The description of one collective: kind, group of ranks, size, and the parts or pairs of uneven ones.

Matrices of bytes between all pairs of members are stored as one row per kind of sender. Memory then grows with the
number of members, not of pairs: most members of a large group send the same, so a few rows represent all senders.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from gssim.collectives.stage import Hops, Members
from gssim.units import Floats, Ints, kinds_of_rows


class Pairs(Sequence[tuple[float, ...]]):
    """A matrix of bytes from the i-th to the j-th member, by rows, with a zero diagonal.

    `rows`: for each kind of sender, the bytes for every member (the sender's own entry is ignored). `kinds`: index of
    each sender's row. Sums are taken in the order of members, and equal those of the full rows bit for bit. `columns`:
    for each receiver, its index in the rows, if many receivers get the same bytes; sums are then column values times
    their number of members.

    >>> pairs = Pairs(rows=[(1.0, 2.0, 4.0)], kinds=(0, 0, 0))
    >>> list(pairs)
    [(0.0, 2.0, 4.0), (1.0, 0.0, 4.0), (1.0, 2.0, 0.0)]
    >>> pairs.sent, pairs.received, pairs.total
    ((6.0, 5.0, 3.0), (2.0, 4.0, 8.0), 14.0)
    >>> list(Pairs(rows=[(1.0, 2.0)], kinds=(0, 0, 0), columns=np.array([0, 0, 1])))
    [(0.0, 1.0, 2.0), (1.0, 0.0, 2.0), (1.0, 1.0, 0.0)]
    """

    def __init__(
        self, rows: Sequence[Sequence[float]] | Floats, kinds: Sequence[int] | Ints, columns: Ints | None = None
    ) -> None:
        self.rows, self.kinds, self.columns = rows, kinds, columns

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, member: Any) -> Any:
        """Return the bytes that a member sends to each member."""
        if isinstance(member, slice):
            return [self[index] for index in range(*member.indices(len(self)))]
        own = range(len(self))[member]
        row = self.row(own)
        return (*row[:own], 0.0, *row[own + 1 :])

    def row(self, member: int) -> Sequence[float]:
        """Return the row of a member's kind: the bytes that such a member sends to each."""
        row = self.rows[self.kinds[member]]
        if self.columns is None:
            return row
        bytes_of_member: list[float] = np.asarray(row)[self.columns].tolist()
        return bytes_of_member

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        return (self[member] for member in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pairs):
            return isinstance(other, Sequence) and tuple(self) == tuple(other)
        if self is other or len(self) != len(other):
            return self is other
        (rows, kinds), (other_rows, other_kinds) = self.arrays, other.arrays
        alike, first = kinds_of_rows(np.column_stack([kinds, other_kinds]))
        differs = rows[kinds[first]] != other_rows[other_kinds[first]]
        members = np.arange(len(kinds))
        return bool((differs.sum(axis=1)[alike] == differs[alike, members]).all())  # but for a sender's own entry

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        """Return the matrix, as a new array."""
        rows, kinds = self.arrays
        matrix: Floats = rows[kinds]
        np.fill_diagonal(matrix, 0.0)
        return matrix

    @cached_property
    def arrays(self) -> tuple[Floats, Ints]:
        """The rows (expanded to one column per member) and the kinds as arrays, which must not be changed."""
        rows = np.array(self.rows, dtype=float)
        return rows if self.columns is None else rows[:, self.columns], np.array(self.kinds)

    @cached_property
    def _by_column(self) -> tuple[Floats, Ints, Ints, Ints]:
        """If `columns` are given: the rows, the kinds, and how many members each column and each kind has."""
        assert self.columns is not None
        rows, kinds = np.asarray(self.rows, dtype=float), np.asarray(self.kinds)
        by_column, by_kind = (
            np.bincount(each, minlength=count) for each, count in zip((self.columns, kinds), rows.T.shape, strict=True)
        )
        return rows, kinds, by_column, by_kind

    @cached_property
    def sent(self) -> tuple[float, ...]:
        """Total bytes that each member sends."""
        if self.columns is not None:
            rows, kinds, members, _ = self._by_column
            by_column: list[float] = sums_of_others(rows, members)[kinds, self.columns].tolist()
            return tuple(by_column)
        rows, kinds = self.arrays
        sums = np.zeros(len(kinds))
        for kind, row in enumerate(rows):
            members = np.flatnonzero(kinds == kind)
            run = np.cumsum(row[1:] != row[:-1])  # within a run of equals, any may be left out
            run = np.concatenate([np.zeros(1, np.int64), run])[members]
            begins = np.ones(len(members), dtype=bool)
            begins[1:] = run[1:] != run[:-1]
            some = _sums_without(partial(_repeated, row), members[begins], len(row))
            sums[members] = some[np.cumsum(begins) - 1]
        return tuple(sums.tolist())

    @cached_property
    def most_sent(self) -> float:
        """Bytes sent by the member that sends the most."""
        if self.columns is None:
            return max(self.sent)
        rows, kinds, members, _ = self._by_column
        return float(sums_of_others(rows, members)[kinds, self.columns].max())

    @cached_property
    def received(self) -> tuple[float, ...]:
        """Total bytes that each member receives."""
        if self.columns is not None:
            by_column: list[float] = self._received_by_column[self._by_column[1], self.columns].tolist()
            return tuple(by_column)
        rows, kinds = self.arrays
        runs = np.cumsum(np.r_[0, kinds[1:] != kinds[:-1]])
        like, first = kinds_of_rows(np.column_stack([runs, rows.T]))
        sums = _sums_without(lambda some: rows[:, some][kinds].T, first, len(kinds))
        return tuple(sums[like].tolist())

    @property
    def _received_by_column(self) -> Floats:
        """Total bytes that a member of each kind and column receives."""
        rows, _, _, senders = self._by_column
        others: Floats = (senders - np.eye(len(senders))) @ rows
        return others

    @cached_property
    def kind_count(self) -> int:
        """Number of kinds of senders."""
        return len(np.unique(np.asarray(self.kinds)))

    @cached_property
    def most(self) -> float:
        """Most bytes of any pair."""
        return most_of(*self.arrays)

    @cached_property
    def total(self) -> float:
        """Total bytes of all pairs."""
        if self.columns is not None:
            rows, kinds, _, _ = self._by_column
            members = np.bincount(kinds * rows.shape[1] + self.columns, minlength=rows.size).reshape(rows.shape)
            return float((members * self._received_by_column).sum())
        rows, kinds = self.arrays
        others = np.bincount(kinds, minlength=len(rows))[:, None] - (kinds == np.arange(len(rows))[:, None])
        return float((others * rows).sum(axis=0).sum())


class Exchange(Hops):
    """Hops between all pairs of members, stored by kind of sender; arrays over single pairs are made on demand."""

    def __init__(self, members: Members, rows: Floats, kinds: Ints, beside: tuple[Members, ...] = ()) -> None:
        for name, value in (("members", members), ("rows", rows), ("kinds", kinds), ("beside", beside)):
            object.__setattr__(self, name, value)

    members: Members
    beside: tuple[Members, ...]
    """Other groups that carry out the same exchange at once."""
    rows: Floats
    """For each kind of sender, the weight of its hop to every member, per byte of the stage's size."""
    kinds: Ints

    @property
    def groups(self) -> tuple[Members, ...]:
        """All groups."""
        return (self.members, *self.beside)

    def in_groups(self, groups: tuple[Members, ...]) -> "Exchange":
        """Return this exchange as each of several groups carries it out, independently of the others."""
        return Exchange(groups[0], self.rows, self.kinds, groups[1:])

    @property
    def count(self) -> int:
        """Number of hops."""
        return len(self.groups) * len(self.kinds) * (len(self.kinds) - 1)

    @property
    def elements(self) -> int:
        """Number of stored values."""
        return self.rows.size + len(self.kinds)

    @cached_property
    def _apart(self) -> tuple[Ints, Ints]:
        """For each hop of one group, the positions of its sender and its receiver."""
        sender, receiver = np.nonzero(~np.eye(len(self.kinds), dtype=bool))
        return sender, receiver

    @cached_property
    def source(self) -> Ints:
        """Rank that sends, by hop."""
        return np.concatenate([members.ranks[self._apart[0]] for members in self.groups])

    @cached_property
    def target(self) -> Ints:
        """Rank that receives, by hop."""
        return np.concatenate([members.ranks[self._apart[1]] for members in self.groups])

    @cached_property
    def weight(self) -> Floats:
        """Bytes carried for each byte of the stage's size, by hop."""
        return np.tile(self.rows[self.kinds][self._apart], len(self.groups))

    @cached_property
    def group(self) -> Ints | None:
        """Index of a hop's group."""
        return np.repeat(np.arange(len(self.groups)), len(self._apart[0])) if self.beside else None

    @cached_property
    def most_handled(self) -> float:
        """Bytes that the busiest rank sends and receives, per byte of the stage's size."""
        sent, received = self.carried_by_rank(int(max(members.ranks.max() for members in self.groups)) + 1)
        return float((sent + received).max())

    def weighted(self, columns: Floats) -> float:
        """Return the sum over a group's hops of weight times value; `columns`: values by kind of sender and target."""
        return float((self.rows * columns).sum())

    @cached_property
    def heaviest(self) -> float:
        """The largest weight."""
        return most_of(self.rows, self.kinds)

    @property
    def weight_in_all(self) -> float:
        """The sum of all weights in a group."""
        counts = np.bincount(self.kinds, minlength=len(self.rows))
        own = self.rows[self.kinds, np.arange(len(self.kinds))].sum()
        return float((self.rows.sum(axis=1) * counts).sum() - own)

    def carried_by_rank(self, ranks: int) -> tuple[Floats, Floats]:
        """Return the bytes that each rank sends and receives for each byte of the size."""
        own = self.rows[self.kinds, np.arange(len(self.kinds))]
        counts = np.bincount(self.kinds, minlength=len(self.rows))
        sent, received = np.zeros((2, ranks))
        for members in self.groups:
            sent[members.ranks] = self.rows.sum(axis=1)[self.kinds] - own
            received[members.ranks] = counts @ self.rows - own
        return sent, received


def most_of(rows: Floats, kinds: Ints) -> float:
    """Return the largest value of any pair of different members; `rows` are by kind of sender and receiver."""
    largest = 0.0
    for kind, count in enumerate(np.bincount(kinds, minlength=len(rows)).tolist()):
        if count:
            row = rows[kind] if count > 1 else np.delete(rows[kind], np.flatnonzero(kinds == kind))
            largest = max(largest, float(row.max(initial=0.0)))
    return largest


def sums_of_others(values: Floats, members: Ints | None = None) -> Floats:
    """Return, for each value of the last axis, the sum of all others; the same to the last digit for equal values.

    `members`: how many members have each value; None: one each. The others of a member include those with its value.

    >>> rows = np.array([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]])
    >>> sums_of_others(rows).tolist(), sums_of_others(rows, np.array([3, 1, 1])).tolist()
    ([[6.0, 5.0, 3.0], [2.0, 2.0, 2.0]], [[8.0, 7.0, 5.0], [4.0, 4.0, 4.0]])
    """
    counted = values if members is None else values * members
    totals = counted.sum(axis=-1, keepdims=True)
    others: Floats = totals - values
    *row, own = np.nonzero(values > totals / 2)  # at most one value per row, and a single member has it
    rows = counted[tuple(row)]
    rows[np.arange(len(own)), own] = 0.0
    others[(*row, own)] = rows.sum(axis=-1)
    return others


def _repeated(row: Floats, some: Ints) -> Floats:
    return np.tile(row, (len(some), 1))


AT_ONCE = 2**22
"""Largest number of values summed in one array: those of all pairs of many members would not fit into memory."""


def _sums_without(rows: Callable[[Ints], Floats], own: Ints, length: int) -> Floats:
    """Return, for each index in `own`, the sum of its row without that element; `rows` returns rows of indices."""
    sums = np.zeros(len(own))
    some = max(1, AT_ONCE // max(1, length))
    for begin in range(0, len(own), some):
        part = own[begin : begin + some]
        kept = np.ascontiguousarray(rows(part))
        kept[np.arange(len(part)), part] = 0.0
        sums[begin : begin + some] = np.cumsum(kept, axis=1)[:, -1]
    return sums


TO_HOST, FROM_HOST = "copy-to-host", "copy-from-host"
COPIES = (TO_HOST, FROM_HOST)
"""Copies between a rank's device and the memory of its host. They cross links like messages, but are no collectives:
each rank is a group of its own."""


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective: kind, group and size, and for uneven collectives the sizes of parts or pairs."""

    kind: str
    """A collective, such as `all-reduce`, or `all-gather-v` of unequal parts; a `send`; or one of `COPIES`."""
    group: Sequence[int]
    """Sorted ranks, as a tuple or range; of a send, the sender comes first."""
    size_bytes: float
    """Size of the full tensor, as in `result.Collective.bytes`; of an all-to-all, the size of each rank's input."""
    pair_bytes: Sequence[Sequence[float]] = ()
    """all-to-all-v: bytes from the i-th to the j-th member of the group."""
    part_bytes: tuple[float, ...] = ()
    """all-gather-v and reduce-scatter-v: bytes that each member owns."""
    data_dependent: bool = False
    root: int = 0
    """Position in the group of the root of a broadcast or reduce."""
    beside: tuple[Sequence[int], ...] = ()
    """Other groups of the same size, each of which carries out the same collective: those along an axis of a mesh."""
    carried_as: str = ""
    """Kind by which the algorithm and costs are looked up, if not `kind`: an all-gather made of point-to-point messages
    is an all-gather-v to the network, and a push by the backend's own collective is an all-to-all."""

    at_once: int = 1
    """How many groups, this one included, carry out such a collective at once, each with bytes of its own."""

    half_precision: str = ""
    """bf16 or fp16, if elements of that precision are summed, as their additions may have costs of their own;
    else ''.
    """

    def __hash__(self) -> int:
        """Return the hash of some fields, for speed: there may be many groups beside the first."""
        return hash((self.kind, self.group, self.size_bytes, self.root))

    @classmethod
    def among(cls, groups: Iterable[Sequence[int]], kind: str, size_bytes: float, **settings: Any) -> "Communication":
        """Return a collective that each of several groups carries out; `settings`: further fields."""
        group, *beside = groups
        return cls(kind, group, size_bytes, beside=tuple(beside), **settings)

    def of_groups(self, group: Sequence[int], *beside: Sequence[int]) -> "Communication":
        """Return the same collective of other groups (`dataclasses.replace` takes three times as long).

        >>> Communication("all-reduce", range(2), 8.0, data_dependent=True).of_groups((0, 2), (1, 3))
        Communication(kind='all-reduce', group=(0, 2), size_bytes=8.0, pair_bytes=(), part_bytes=(), \
data_dependent=True, root=0, beside=((1, 3),), carried_as='', at_once=1, half_precision='')
        """
        return Communication(
            self.kind,
            group,
            self.size_bytes,
            self.pair_bytes,
            self.part_bytes,
            self.data_dependent,
            self.root,
            beside,
            self.carried_as,
            self.at_once,
            self.half_precision,
        )

    @property
    def groups(self) -> tuple[Sequence[int], ...]:
        """All groups, each with a collective of its own."""
        return (self.group, *self.beside)

    @property
    def carried_kind(self) -> str:
        """Kind by which its algorithm and costs are looked up."""
        return self.carried_as or self.kind

    @property
    def payload_bytes(self) -> float:
        """Bytes that all members send in total: for an all-to-all-v the sum over pairs, for an all-gather-v each part
        times the number of members that receive it.
        """
        pairs = self.pair_bytes
        whole = pairs.total if isinstance(pairs, Pairs) else sum(map(sum, pairs))
        return whole + (len(self.group) - 1) * sum(self.part_bytes)

    @property
    def most_sent_bytes(self) -> float:
        """Bytes sent in an all-to-all-v by the member that sends the most."""
        pairs = self.pair_bytes
        return pairs.most_sent if isinstance(pairs, Pairs) else max(map(sum, pairs))
