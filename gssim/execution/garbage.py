"""Garbage collection while commands work: rare or none, as few of their many objects are garbage in cycles."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS_PER_COLLECTION = 2**20
"""Number of new objects after which a process of gssim looks for garbage: about 100 MB. Few of the objects that work
leaves behind are in cycles, and most others are cached or live as long as the process: with the usual threshold, an
eighth of a search would be spent on looking through them, and of `gssim run` more.
"""


def end_without_collection() -> None:
    """Leave out the collections with which Python ends a process, as its memory is freed anyway.

    They would take half a second in a process with torch, or after a simulation of 1,024 devices.
    """
    atexit.register(gc.freeze)


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend garbage collection: the objects of a simulation live as long as it does."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
