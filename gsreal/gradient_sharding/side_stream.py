"""Work on a CUDA side stream that overlaps compute, and the observer callback for spans of a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist


class Observer(Protocol):
    """Called with a label and a phase; the context manager it returns is entered for the duration of that span."""

    def __call__(
        self, label: str, phase: str, *, group: dist.ProcessGroup | None = None
    ) -> AbstractContextManager[None]:
        """Return the span's context manager; `group`: the ranks of its exchange, if it is one."""


def no_observer(label: str, phase: str, *, group: dist.ProcessGroup | None = None) -> AbstractContextManager[None]:
    """Return a context manager that records nothing."""
    return nullcontext()


class SideStream:
    """Runs work concurrently with compute: on a CUDA device in a stream of its own; else immediately.

    Tensors that the work reads and writes must not change until it has been waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        """Start the work once the compute issued so far is done.

        Return a function that makes later compute wait for it.
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
    """No operation: the work is done already."""
