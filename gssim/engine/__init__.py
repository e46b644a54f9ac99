"""Executes programs in simulated time, on SimPy or by walks that are proven equal to it."""

from gssim.engine.collective_instances import CollectiveInstance, router_of, scheduler_of
from gssim.engine.host import Host, Load
from gssim.engine.machine import SMALLEST_JITTER, DeadlockError, Machine
from gssim.engine.memory_tracker import (
    MEMORY_STEPS,
    MemoryTracker,
    RecordingTracker,
    allocates_beside_compute,
    memory_after,
)
from gssim.engine.selection import CollectiveSchedule, Scheduler
from gssim.engine.state import TaskSpan
from gssim.engine.symmetry import RankClass, is_jittery
