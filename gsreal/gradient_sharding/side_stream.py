"""What goes on beside the compute.

Who watches the parts of a step go on.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Observer = Callable[[str, str], AbstractContextManager[None]]
"""Called with a label and a phase; what it returns is entered while that goes on."""


def unobserved(label: str, phase: str) -> AbstractContextManager[None]:
    """Watch nothing."""
    return nullcontext()


class Lane:
    """Work handed over while the compute goes on: on a CUDA device it has a stream of its own; else it is done at once.

    What the work reads and writes must stay as it is until it is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        """Begin once what the compute has been given so far is done.

        Returns what to call so that all that the compute is given from then on waits for the work.
        """
        if self._stream is None:
            work()
            return _nothing
        compute = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        return lambda: compute.wait_event(done)


def _nothing() -> None:
    """Wait for nothing."""
