"""Work on a CUDA side stream that overlaps compute, and the observer callback for spans of a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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

    Tensors that the work reads and writes must not change until it has been waited for. The stream is one of the
    tensors' device, which need not be the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        """Start the work once the compute issued so far is done.

        Return a function that makes later compute wait for it, and keeps what the work refers to until then: the memory
        of a message that compute has packed would else be used for its next tensors while it is being sent.
        """
        if self._stream is None:
            work()
            return _nothing
        compute = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        return partial(_wait, compute, done, work)


def _wait(compute: torch.cuda.Stream, done: torch.cuda.Event, _work: object) -> None:
    """Make the stream that began the work wait for it, which takes back the memory that it lent, and the current one.

    They may differ: autograd runs hooks in the forward's stream, and what follows a backward in its caller's.
    """
    compute.wait_event(done)
    now = torch.cuda.current_stream(compute.device)
    if now != compute:
        now.wait_event(done)


def _nothing() -> None:
    """No operation: the work is done already."""
