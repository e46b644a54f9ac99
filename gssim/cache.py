"""What several questions have in common, worked out once: files, models, wirings, programs.

A sweep's points differ in a key or two. One `Shared` lives as long as a process answers points, and is handed to
`load_scenario` and `simulate`; without one, each call has its own. What it keeps are answers of pure functions, each
under all that it follows from, so that no answer hangs on what was asked before.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar, cast

T = TypeVar("T")

MOST_KEPT = 64
"""Answers of each kind; beyond that, the one that was not asked for longest goes."""


MOST_LARGE = 2**22
"""Elements of large answers, all together: they take some 50 bytes each, so that all take 200 MB at most."""


@dataclass(frozen=True, eq=False, slots=True)
class Same:
    """A value as part of a key: equal to itself alone, for what is large and never changes.

    >>> first, second = [1], [1]
    >>> Same(first) == Same(first), Same(first) == Same(second)
    (True, False)
    """

    value: object
    """Kept, so that nothing else ever has its identity."""

    def __eq__(self, other: object) -> bool:
        """Return whether both are of the very same value."""
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        """Return the same for the same value."""
        return id(self.value)


class Recent:
    """The latest answers that together weigh no more than so much, and the last one whatever it weighs.

    >>> recent = Recent(most=10)
    >>> [recent.once(n, lambda n=n: print("working") or n, weight=lambda n: n) for n in (6, 5, 6, 6)]
    working
    working
    working
    [6, 5, 6, 6]
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self._weight = 0

    def once(self, key: Hashable, make: Callable[[], T], *, weight: Callable[[T], int]) -> T:
        """Return what `make` returns, which is called if this key is not kept; see `Shared.once`."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return cast(T, self._kept[key][0])
        found = make()
        self._kept[key] = (found, weight(found))
        self._weight += weight(found)
        while self._weight > self.most and len(self._kept) > 1:
            _, (_, gone) = self._kept.popitem(last=False)
            self._weight -= gone
        return found


class Shared:
    """Answers of pure functions, by kind and key.

    >>> shared = Shared()
    >>> [shared.once("square", n, lambda n=n: print("working") or n * n) for n in (3, 3)]
    working
    [9, 9]
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self.large = Recent(MOST_LARGE)
        """What takes memory by the number of its elements, of which its weight is."""
        self._kept: dict[str, OrderedDict[Hashable, object]] = {}

    def once(self, kind: str, key: Hashable, make: Callable[[], T], *, most: int | None = None) -> T:
        """Return what `make` returns, which is called if this key is new; `most`: of this kind, in place of the usual.

        What it raises is not kept. `key` must hold all that the answer follows from, and nobody may change the answer.
        """
        kept = self._kept.setdefault(kind, OrderedDict())
        if key in kept:
            kept.move_to_end(key)
            return cast(T, kept[key])
        found = make()
        kept[key] = found
        while len(kept) > (self.most if most is None else most):
            kept.popitem(last=False)
        return found
