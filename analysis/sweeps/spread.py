"""Which few of many settings are shown: such that each value of each column appears, and not only the first ones."""

from collections import Counter
from collections.abc import Sequence
from math import exp
from typing import TypeVar

from analysis.sweeps.settings import Place

T = TypeVar("T")
FAR = 8.0
"""How far apart the ends of a column of numbers are, where values 1 apart are hardly alike."""


def evenly(values: Sequence[T], most: int) -> list[T]:
    """Return so many of the values, evenly apart and both ends among them; all, where there are no more.

    >>> evenly([0, 1, 2, 3, 4, 5, 6], 3), evenly("ab", 3)
    ([0, 3, 6], ['a', 'b'])
    """
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / max(1, most - 1)
    return [values[round(i * step)] for i in range(most)]


def spread(places: Sequence[Place], most: int) -> list[Place]:
    """Return so many places, in their order, that are spread over the values of every column.

    Places are of one kind where they have the same names and the same keys (None: a key that a place does not have).
    Beginning with the first place, the next is of a kind that was taken least, and of these the one whose values are
    the least like those that were taken: numbers by their rank, so that ends and middle of a column appear.

    >>> spread([("ring", 1), ("ring", 2), ("ring", 4), ("star", 1), ("star", 4)], 2)
    [('ring', 1), ('star', 4)]
    """
    if len(places) <= most:
        return list(places)
    columns = [_coordinates(values) for values in zip(*places, strict=True)]
    kinds = [tuple(0.0 if isinstance(each, float) else each for each in place) for place in zip(*columns, strict=True)]
    taken_of, likeness = Counter[Place](), [0.0] * len(places)
    left, taken = list(range(len(places))), list[int]()
    while len(taken) < most:
        new = min(left, key=lambda i: (taken_of[kinds[i]], round(likeness[i], 9)))
        left.remove(new)
        taken.append(new)
        taken_of[kinds[new]] += 1
        for i in left:
            likeness[i] += sum(_likeness(column[i], column[new]) for column in columns)
    return [places[i] for i in sorted(taken)]


Coordinate = float | str | None


def _coordinates(values: Sequence[object]) -> list[Coordinate]:
    """Return where each value stands: numbers by their rank, from 0 to `FAR`; other values are unlike one another."""
    numbers = sorted({value for value in values if isinstance(value, (int, float))})
    rank = {number: FAR * i / max(1, len(numbers) - 1) for i, number in enumerate(numbers)}
    return [
        None if value is None else rank[value] if isinstance(value, (int, float)) else str(value) for value in values
    ]


def _likeness(one: Coordinate, other: Coordinate) -> float:
    """Return how alike two values are, from 0 to 1."""
    if isinstance(one, float) and isinstance(other, float):
        return exp(-abs(one - other))
    return float(one is not None and one == other)
