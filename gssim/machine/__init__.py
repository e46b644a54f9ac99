"""Who waits for whom: streams of ranks, hosts whose devices slow each other down, and collectives as rendezvous.

State changes only here and in `network`, inside the SimPy environment.
"""

from gssim.machine.classes import RankClass, is_jittery, rank_classes
from gssim.machine.machine import DeadlockError, Machine

__all__ = ["DeadlockError", "Machine", "RankClass", "is_jittery", "rank_classes"]
