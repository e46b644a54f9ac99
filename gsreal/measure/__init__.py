"""Measurements of a real run: spans on a clock, exact peak bytes, and every collective of the process group."""

from typing import TYPE_CHECKING, Any

from gsreal.measure.memory import MemoryCounter, counting_allocator, wait_for_release
from gsreal.measure.step import RankStep, Timeline, combine_ranks, median_step, step_of_rank

if TYPE_CHECKING:
    from gsreal.measure.collectives import CollectiveRecorder, ObservedCollective, collectives_of

__all__ = [
    "CollectiveRecorder",
    "MemoryCounter",
    "ObservedCollective",
    "RankStep",
    "Timeline",
    "collectives_of",
    "combine_ranks",
    "counting_allocator",
    "median_step",
    "step_of_rank",
    "wait_for_release",
]


def __getattr__(name: str) -> Any:
    """Return a name of the module that records collectives, which is imported when first needed.

    It imports DTensor, and with it sympy, which would take a fifth of the time of a command until its ranks start.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gsreal.measure import collectives

    return getattr(collectives, name)
