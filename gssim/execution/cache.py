"""Caches of results that many scenarios share: parsed files, models, wirings, programs.

The points of a sweep differ in a key or two. A process that predicts points has one `Shared` for all of them, and
passes it to `load_scenario` and `simulate`; without one, each call has a cache of its own. Only pure functions are
cached, under keys that contain all of their inputs, so no result depends on the order of calls.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NOT_KEPT: Any = object()
"""What a lookup gives if there is no value. One lookup, not two: hashing and comparing keys takes long."""

MOST_KEPT = 64
"""Number of cached values of each kind; beyond it, the least recently used value is dropped."""


MOST_LARGE = 2**22
"""Largest total number of elements of all large values, of about 50 bytes each: at most 200 MB."""


@dataclass(frozen=True, eq=False, slots=True)
class Same:
    """An object as part of a key, compared by identity, for large values that never change.

    >>> first, second = [1], [1]
    >>> Same(first) == Same(first), Same(first) == Same(second)
    (True, False)
    """

    value: object
    """The object itself. Holding it ensures that no other object can get its identity."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Hashed:
    """A value as part of a key, whose hash is computed only once: a tuple computes its own each time.

    >>> Hashed((1, 2)) == Hashed((1, 2)), Hashed((1, 2)) == Hashed((1, 3))
    (True, False)
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: Hashable) -> None:
        self.value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Hashed) and self._hash == other._hash and self.value == other.value

    def __hash__(self) -> int:
        return self._hash


class Source:
    """A base of objects that never change, from which functions compute values: each once, and kept as long as it.

    >>> class Numbers(Source):
    ...     values = (1, 2)
    >>> def total(numbers: Numbers, times: int) -> int:
    ...     print("adding")
    ...     return times * sum(numbers.values)
    >>> numbers = Numbers()
    >>> numbers.once(total, 3), numbers.once(total, 3)
    adding
    (9, 9)
    """

    @cached_property
    def _values(self) -> dict[Hashable, Any]:
        return {}

    def once(self, function: Callable[Concatenate[Self, P], T], *arguments: P.args, **_none: P.kwargs) -> T:
        """Return a function's value for this object and further arguments."""
        key = (function, arguments)
        if key not in self._values:
            self._values[key] = function(self, *arguments, **_none)
        found: T = self._values[key]
        return found


class Recent:
    """A least-recently-used cache with limited total weight; the latest value is kept whatever its weight.

    >>> recent = Recent(most=10)
    >>> [recent.once(n, lambda n=n: print("working") or n, weight=lambda n: n) for n in (6, 5, 6, 6)]
    working
    working
    working
    [6, 5, 6, 6]
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._weight = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def once(self, key: Hashable, make: Callable[[], T], *, weight: Callable[[T], int]) -> T:
        """Return the cached value of a key, or else compute it with `make`; see `Shared.once`."""
        known = self._kept.get(key)
        if known is not None:
            self._kept.move_to_end(key)
            stored: T = known[0]
            return stored
        value = make()
        self.keep(key, value, weight=weight(value))
        return value

    def keep(self, key: Hashable, value: object, *, weight: int) -> None:
        """Cache the value of a key that has none yet."""
        self._kept[key] = (value, weight)
        self._weight += weight
        while self._weight > self.most and len(self._kept) > 1:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._weight -= dropped


class Shared:
    """Least-recently-used caches of pure functions, by kind and key.

    >>> shared = Shared()
    >>> [shared.once("square", n, lambda n=n: print("working") or n * n) for n in (3, 3)]
    working
    [9, 9]
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self.large = Recent(MOST_LARGE)
        """Cache for values whose memory is proportional to their number of elements, which is used as their weight."""
        self._kept: defaultdict[str, OrderedDict[Hashable, Any]] = defaultdict(OrderedDict)

    def once(self, kind: str, key: Hashable, make: Callable[[], T], *, most: int | None = None) -> T:
        """Return the cached value of a key, or else compute it with `make`; `most`: number of values of this kind to
        keep.

        Exceptions are not cached. `key` must contain all inputs of the function, and the value must not be changed.
        """
        kept = self._kept[kind]
        stored: T = kept.get(key, NOT_KEPT)
        if stored is not NOT_KEPT:
            kept.move_to_end(key)
            return stored
        value = make()
        kept[key] = value
        while len(kept) > (self.most if most is None else most):
            kept.popitem(last=False)
        return value

    def clear(self) -> None:
        """Drop all values. (Some refer to this cache: without this, only a garbage collection would free them.)"""
        self._kept.clear()
        self.large = Recent(MOST_LARGE)


def cached_by_identity(maxsize: int, *, objects: int = 1) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that caches a function's latest `maxsize` results.

    Its first `objects` arguments are compared by identity, for which they must never change; this is for values that
    take long to hash. The others are compared by value. All are given by position.

    >>> @cached_by_identity(maxsize=8)
    ... def total(values: list[int], times: int) -> int:
    ...     print("adding")
    ...     return times * sum(values)
    >>> numbers = [1, 2]
    >>> total(numbers, 3), total(numbers, 3), total([1, 2], 3)
    adding
    adding
    (9, 9, 9)
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @lru_cache(maxsize=maxsize)
        def cached(*key: Any) -> T:
            of_values: Callable[..., T] = function
            return of_values(*(each.value for each in key[:objects]), *key[objects:])

        @wraps(function)
        def looked_up(*arguments: P.args, **named: P.kwargs) -> T:
            if named:
                raise TypeError(f"{function.__name__}: takes arguments by position, not {', '.join(named)}")
            return cached(*map(Same, arguments[:objects]), *arguments[objects:])

        return looked_up

    return decorated
