"""Fields of a row: numbers that may be missing."""

from collections.abc import Mapping
from math import isfinite

from analysis.published.runs import SkippedError


def number(record: Mapping[str, str], key: str) -> float | None:
    """Return a number, or None where the field is empty or no number.

    >>> number({"a": "2.5", "b": "?"}, "a"), number({"a": "2.5", "b": "?"}, "b")
    (2.5, None)
    """
    try:
        value = float(record.get(key, ""))
    except ValueError:
        return None
    return value if isfinite(value) else None


def count(record: Mapping[str, str], key: str) -> int | None:
    """Return a whole number of at least 1, or None."""
    value = number(record, key)
    return int(value) if value is not None and value >= 1 and value == int(value) else None


def needed(record: Mapping[str, str], key: str) -> int:
    """Return a whole number; raise SkippedError where there is none."""
    value = count(record, key)
    if value is None:
        raise SkippedError(f"the row does not say {key}")
    return value


def divided(total: int, parts: int, what: str) -> int:
    """Return a part of what is divided evenly; raise SkippedError where it cannot be."""
    if total % parts:
        raise SkippedError(f"{what} do not divide evenly")
    return total // parts
