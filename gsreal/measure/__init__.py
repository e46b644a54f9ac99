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
    """Return what records collectives, imported when it is first needed: commands that start ranks record none.

    It imports DTensor, and with it sympy, which takes a fifth of the time until a command starts its ranks.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gsreal.measure import collectives

    return getattr(collectives, name)
