"""Limits on sizes: one table, checked before anything of that size is built; `--no-limits` lifts them all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

LIMITS: dict[str, tuple[int, str]] = {
    "devices": (2**18, "devices of a cluster"),
    "links": (2**22, "directed links of a cluster; a fully connected one of n devices has n * (n - 1)"),
    "switches": (2**18, "switches, network cards and other nodes of a cluster that are no devices"),
    "samples": (2**24, "samples of a step (workload.global_batch_size)"),
    "sequence_length": (2**24, "tokens of a sample"),
    "layers": (10_000, "layers of a model, repetitions one by one"),
    "tensors": (200_000, "parameters of a model as tensors, repetitions one by one"),
    "elements": (10**14, "elements of a model's parameters"),
    "layer_passes": (2**18, "micro-batches times layers of a step"),
    "steps": (10**6, "steps of a run, the warm-up included"),
    "distinct_steps": (20_000, "steps of a run whose messages depend on the data: each is lowered by itself"),
    "points": (10**6, "points of a sweep, and values of an axis, before any is left out"),
    "file_bytes": (2**28, "bytes of a file that is read whole"),
    "expanded_bytes": (2**34, "bytes that a compressed file (.gz, .xz) expands to"),
}
"""By name: the largest allowed size, and its meaning."""
LIFTED = "GSSIM_NO_LIMITS"
"""Environment variable that passes `--no-limits` on to child processes."""


def excess(name: str, size: int) -> str | None:
    """Return the error message for a `size` over a limit; None where it is not, or limits are lifted.

    >>> excess("devices", 8), excess("devices", 10**7)
    (None, '10,000,000 devices: at most 262,144 are allowed (--no-limits lifts this)')
    """
    most = LIMITS[name][0]
    if size <= most or LIFTED in os.environ:
        return None
    words = name.replace("_", " ")
    many = f"{size:,}" if size < 10**18 else f"more than {10**18:,}"
    return f"{many} {words}: at most {most:,} are allowed (--no-limits lifts this)"


def lift() -> None:
    """Lift all limits, in this process and those that it starts, until `restored` ends."""
    os.environ[LIFTED] = "1"


@contextmanager
def restored() -> Iterator[None]:
    """Restore the limits afterwards."""
    before = LIFTED in os.environ
    try:
        yield
    finally:
        if not before:
            os.environ.pop(LIFTED, None)
