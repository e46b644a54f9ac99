"""Who waits for whom: streams of ranks, hosts whose devices slow each other down, and collectives as rendezvous.

State changes only here and in `network`, inside the SimPy environment.
"""

from gssim.machine.classes import Classes, RankClass, classes_of, is_jittery
from gssim.machine.machine import DeadlockError, Machine
from gssim.machine.meetings import Meeting

__all__ = ["Classes", "DeadlockError", "Machine", "Meeting", "RankClass", "classes_of", "is_jittery"]
