"""Fields of a row: numbers that may be missing, or be written for people."""

from collections.abc import Mapping
from math import isfinite

from analysis.literature.runs import SkippedError
from gssim.plan import MethodName


def number(record: Mapping[str, str], key: str) -> float | None:
    """Return a number, or None where the field is empty or no number; commas between thousands are passed over.

    >>> number({"a": "2.5", "b": "?"}, "a"), number({"a": "2.5", "b": "?"}, "b"), number({"a": "1,024"}, "a")
    (2.5, None, 1024.0)
    """
    try:
        value = float(record.get(key, "").replace(",", ""))
    except ValueError:
        return None
    return value if isfinite(value) else None


def positive(record: Mapping[str, str], key: str) -> float | None:
    """Return a number above 0, or None: a time or a memory that was measured."""
    value = number(record, key)
    return value if value is not None and value > 0 else None


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


def micro_batches_of(global_batch: int, dp: int, micro_batch: int) -> int:
    """Return how many micro-batches each replica has; raise SkippedError where they do not come out even."""
    return divided(divided(global_batch, dp, "samples"), micro_batch, "micro-batches")


def method_of(data: int, tp: int, pp: int, replicas: MethodName = "ddp") -> MethodName:
    """Return the method of a plan, `replicas` where there are several that share the data.

    >>> method_of(8, 1, 1), method_of(1, 2, 4), method_of(1, 2, 1), method_of(1, 1, 1)
    ('ddp', 'pipeline', 'tensor', 'single')
    """
    if data > 1:
        return replicas
    return "pipeline" if pp > 1 else "tensor" if tp > 1 else "single"


def padded(vocabulary: int, tp: int) -> int:
    """Return the rows of an embedding that Megatron cuts among `tp` ranks: multiples of 128 for each.

    Source: Megatron-LM, vocab_size_with_padding, with make-vocab-size-divisible-by = 128.

    >>> padded(50257, 1), padded(50257, 4)
    (50304, 50688)
    """
    return -(-vocabulary // (128 * tp)) * 128 * tp
