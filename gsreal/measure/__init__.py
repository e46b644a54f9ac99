"""Measurements of a real run: spans on a clock, exact peak bytes, and every collective of the process group."""

from gsreal.measure.collectives import CollectiveRecorder, ObservedCollective, collectives_of
from gsreal.measure.memory import MemoryCounter, counting_allocator
from gsreal.measure.step import RankStep, Timeline, combine_ranks, median_step, step_of_rank

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
]
