"""Measures the exact peak of the bytes that tensors use."""

import ctypes
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsreal.compiled import compiled

RELEASE_S = 0.05
"""Longest time that `wait_for_release` waits: many times what a thread of gloo takes if other processes delay it."""
PAUSE_S = 1e-5
_counting = False
"""Whether a peak is counted just now, by any counter: the allocator is the process's."""


@contextmanager
def counting() -> Iterator[None]:
    """Count a peak in the body: `wait_for_release` waits there alone, so that no timed step does."""
    global _counting
    before, _counting = _counting, True
    try:
        yield
    finally:
        _counting = before


def wait_for_release(tensor: Tensor, *, holders: int = 1) -> None:
    """Within `counting`, block until gloo's worker thread has released a CPU tensor that a finished collective filled.

    That thread first wakes the thread that waits for the collective, and then drops its own references to inputs and
    outputs (ProcessGroupGloo.cpp, runLoop). If it is preempted in between, memory that the plan has released stays
    allocated, and the step's peak is higher by one buffer than another step's. `holders`: number of references that
    others have.
    """
    if not _counting or tensor.device.type != "cpu":
        return
    counted: Any = tensor  # torch's stubs leave the method out
    deadline_s = time.monotonic() + RELEASE_S
    while counted._use_count() > holders and time.monotonic() < deadline_s:
        time.sleep(PAUSE_S)


class MemoryCounter:
    """Bytes used by tensors: `start` before the model is created, then `reset` and `peak` around a step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tracker: _StorageTracker | None = None
        self._library = counting_allocator() if device.type == "cpu" else None
        if self._library is not None:
            self._library.gsreal_install()
        self._base = self._library.gsreal_alive_bytes() if self._library is not None else 0

    @property
    def method(self) -> str:
        """Method of counting: `allocator` is exact, `dispatch` leaves out the kernels' own allocations."""
        if self.device.type == "cuda":
            return "cuda"
        return "allocator" if self._library is not None else "dispatch"

    def alive(self) -> int:
        """Return the bytes that are allocated now (not for `dispatch`)."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated()
        return self._library.gsreal_alive_bytes() - self._base if self._library is not None else 0

    def reset(self) -> None:
        """Start a new peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif self._library is not None:
            self._library.gsreal_reset_peak()

    def peak(self) -> int:
        """Return the most bytes allocated at once since `reset` (not for `dispatch`)."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return self._library.gsreal_peak_bytes() - self._base if self._library is not None else 0

    def peak_of(self, step: Callable[[], object], kept: Sequence[Tensor]) -> tuple[int, int | None]:
        """Return (allocated, reserved) peak bytes of one step; `kept`: the tensors allocated before it."""
        if self.method == "dispatch":
            tracker = _StorageTracker(kept)
            with tracker:
                step()
            return tracker.peak_bytes, None
        self.reset()
        with counting():
            step()
        reserved = torch.cuda.max_memory_reserved() if self.device.type == "cuda" else None
        return self.peak(), reserved


@cache
def counting_allocator() -> ctypes.CDLL | None:
    """Return the counting CPU allocator, compiled on first use and cached; None without a compiler."""
    torch_folder = Path(torch.__file__).parent
    flags = ["-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    library = compiled(Path(__file__).with_name("allocator.cpp"), flags, version=torch.__version__)
    if library is None:
        return None
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:
        return None
    for name in ("gsreal_alive_bytes", "gsreal_peak_bytes"):
        getattr(loaded, name).restype = ctypes.c_longlong
    return loaded


class _StorageTracker(TorchDispatchMode):
    """Counts the storages that operations return: exact but for kernel workspace. Used without a compiler."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.alive_bytes = self.peak_bytes = 0
        for tensor in kept:
            self._born(tensor)

    def _born(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.alive_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.alive_bytes -= self.alive.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._born(tensor)
        return result
