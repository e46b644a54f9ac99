"""Measurements of a real run: spans on a clock, exact peak bytes, and every collective of the process group."""

from gsreal.measure.collectives import CollectiveRecorder, Seen, collectives_of
from gsreal.measure.memory import MemoryCounter, counting_allocator
from gsreal.measure.step import RankStep, Timeline, middle_step, rank_step, step_of

__all__ = [
    "CollectiveRecorder",
    "MemoryCounter",
    "RankStep",
    "Seen",
    "Timeline",
    "collectives_of",
    "counting_allocator",
    "middle_step",
    "rank_step",
    "step_of",
]
