"""Measurements of a real run: spans on a clock, exact peak bytes, and every collective of the process group.

`collectives` is imported by its own name: it needs DTensor, and with it sympy, which would take a fifth of the time of
a command until its ranks start.
"""

from gsreal.measure.memory import MemoryCounter, counting_allocator, wait_for_release
from gsreal.measure.step import RankStep, Timeline, combine_ranks, median_step, step_of_rank

__all__ = [
    "MemoryCounter",
    "RankStep",
    "Timeline",
    "combine_ranks",
    "counting_allocator",
    "median_step",
    "step_of_rank",
    "wait_for_release",
]
