"""Garbage collection of whole processes: rare, as they have many objects, and few of these are garbage in cycles."""

import atexit
import gc

OBJECTS_PER_COLLECTION = 2**20
"""Number of new objects after which a process of gssim looks for garbage: about 100 MB. Few of the objects that work
leaves behind are in cycles, and most others are cached or live as long as the process: with the usual threshold, an
eighth of a search would be spent on looking through them, and of `gssim run` more.
"""


def end_without_collection() -> None:
    """Let the process end without looking for garbage, several times and in all modules: its memory is freed anyway.

    It would take half a second with torch, as much after a simulation of 1,024 devices.
    """
    atexit.register(gc.freeze)
