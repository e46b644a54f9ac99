"""The engine: programs in simulated time, on SimPy or by a vectorised walk that is proven equal."""

from gssim.engine.collective_instances import Meeting, router_of, scheduler_of
from gssim.engine.host import Host, Load
from gssim.engine.machine import SMALLEST_JITTER, DeadlockError, Machine
from gssim.engine.memory_tracker import Memory, Recorded
from gssim.engine.selection import Scheduled, Scheduler
from gssim.engine.symmetry import RankClass, is_jittery

__all__ = [
    "SMALLEST_JITTER",
    "DeadlockError",
    "Host",
    "Load",
    "Machine",
    "Meeting",
    "Memory",
    "RankClass",
    "Recorded",
    "Scheduled",
    "Scheduler",
    "is_jittery",
    "router_of",
    "scheduler_of",
]
