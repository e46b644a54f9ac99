"""What a real run shows: spans on a clock, exact peak bytes, and every collective as the process group sees it."""

import ctypes
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsreal.compiled import compiled
from gsreal.exchanges import Logical, observers
from gssim.result import PHASES, Collective, Span, merge_collectives, phases_of

# Time ----------------------------------------------------------------------------------------------------------------


class Timeline:
    """Spans of one rank: wall-clock on the CPU, events on a CUDA stream."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.cuda = rank, device.type == "cuda"
        self._marks: list[tuple[str, str, str, Any, Any]] = []
        self._ends: list[Any] = []
        self._pauses: list[tuple[Any, Any]] = []
        self.step_mark = 0
        """How many spans there were when the step began: what `phases_since` takes."""

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, label: str, phase: str) -> Iterator[None]:
        """Record what goes on inside as a span of the compute stream."""
        began = self._now()
        yield
        self._marks.append(("compute", label, phase, began, self._now()))

    def mark(self) -> Any:
        """Return the present, for `between`."""
        return self._now()

    def between(self, label: str, phase: str, began: Any, ended: Any | None = None) -> None:
        """Record a span from a mark until now or until another mark."""
        self._marks.append(("compute", label, phase, began, ended if ended is not None else self._now()))

    def restart(self) -> None:
        """Forget all spans; the first step that counts begins now."""
        self._marks, self._ends, self._pauses, self.step_mark = [], [self._now()], [], 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what goes on inside, between two steps: its spans, and the time that it takes."""
        marks, began = len(self._marks), self._now()
        yield
        del self._marks[marks:]
        self._pauses.append((began, self._now()))

    def end_step(self) -> None:
        """Note the end of a step."""
        self._ends.append(self._now())
        self.step_mark = len(self._marks)

    @property
    def spans_so_far(self) -> int:
        """How many spans have ended: what `phases_since` takes."""
        return len(self._marks)

    def phases_since(self, mark: int) -> dict[str, float]:
        """Return the seconds of each phase in the spans that have ended since there were `mark`; waits for a GPU."""
        marks = self._marks[mark:]
        if self.cuda:
            torch.cuda.synchronize()
        if not marks:
            return dict.fromkeys(PHASES, 0.0)
        zero = marks[0][3]
        times = [(self._since(zero, began), self._since(zero, ended)) for _, _, _, began, ended in marks]
        spans = [
            Span(self.rank, stream, label, phase, began_s, ended_s)
            for (stream, label, phase, _, _), (began_s, ended_s) in zip(marks, times, strict=True)
        ]
        return phases_of(spans, start_s=min(began for began, _ in times), end_s=max(ended for _, ended in times))

    def read(self) -> tuple[list[Span], list[float]]:
        """Return all spans and ends of steps since `restart`, in seconds from it; the first end is its own."""
        if self.cuda:
            torch.cuda.synchronize()
        zero = self._ends[0]
        pauses = [(self._since(zero, began), self._since(zero, ended)) for began, ended in self._pauses]

        def at(mark: Any) -> float:
            time_s = self._since(zero, mark)
            return time_s - sum(ended - began for began, ended in pauses if ended <= time_s)

        spans = [
            Span(self.rank, stream, label, phase, at(began), at(ended))
            for stream, label, phase, began, ended in self._marks
        ]
        return spans, [at(end) for end in self._ends]

    def _since(self, zero: Any, mark: Any) -> float:
        return zero.elapsed_time(mark) / 1e3 if self.cuda else mark - zero


# Memory --------------------------------------------------------------------------------------------------------------


class MemoryCounter:
    """Bytes that tensors take: `start` before the model is made, then `reset` and `peak` around a step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tracker: _StorageTracker | None = None
        self._library = counting_allocator() if device.type == "cpu" else None
        if self._library is not None:
            self._library.gsreal_install()
        self._base = self._library.gsreal_alive_bytes() if self._library is not None else 0

    @property
    def method(self) -> str:
        """How bytes are counted: `allocator` is exact, `dispatch` leaves out what kernels allocate for themselves."""
        if self.device.type == "cuda":
            return "cuda"
        return "allocator" if self._library is not None else "dispatch"

    def alive(self) -> int:
        """Return the bytes that are alive now (not for `dispatch`)."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated()
        return self._library.gsreal_alive_bytes() - self._base if self._library is not None else 0

    def reset(self) -> None:
        """Begin a new peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif self._library is not None:
            self._library.gsreal_reset_peak()

    def peak(self) -> int:
        """Return the most bytes alive since `reset` (not for `dispatch`)."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return self._library.gsreal_peak_bytes() - self._base if self._library is not None else 0

    def peak_of(self, step: Callable[[], object], kept: Sequence[Tensor]) -> tuple[int, int | None]:
        """Return (allocated, reserved) peak bytes of one step; `kept`: the tensors alive before it."""
        if self.method == "dispatch":
            tracker = _StorageTracker(kept)
            with tracker:
                step()
            return tracker.peak_bytes, None
        self.reset()
        step()
        reserved = torch.cuda.max_memory_reserved() if self.device.type == "cuda" else None
        return self.peak(), reserved


@cache
def counting_allocator() -> ctypes.CDLL | None:
    """Return the counting CPU allocator, compiled on first use and kept for later; None where nothing compiles it."""
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
    """Counts the storages that operations return: exact but for kernel scratch. Used where nothing compiles."""

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


# Collectives ---------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """One collective that this rank handed to the process group."""

    kind: str
    group: tuple[int, ...]
    size_bytes: int
    data_dependent: bool = False
    sent_bytes: float = 0
    """By its point-to-point messages, or the one call of the backend, that carry it out."""


KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all-to-all",
    "allgather_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "allreduce_coalesced_": "all-reduce",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
}
FUNCTIONAL_KINDS = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast": "broadcast",
}
"""torch's functional collectives, which DTensor uses: they call the process group beneath the dispatcher."""
LARGER_SIDE = ("all-gather", "reduce-scatter", "gather", "scatter", "all-to-all")
"""Kinds whose size is that of the larger of their two tensors: output or input."""


class CollectiveRecorder(TorchDispatchMode):
    """Records what reaches the process group: every collective and message of this rank, whoever sent it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self._logical: Seen | None = None

    def __enter__(self) -> "CollectiveRecorder":
        observers.append(self._observe)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        observers.remove(self._observe)

    def _observe(self, entry: Logical | None) -> None:
        if entry is None:
            self._logical = None
            return
        self._logical = Seen(entry.kind, entry.group, entry.declared_bytes, entry.data_dependent)
        self.seen.append(self._logical)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it will come back with what it does on this rank
        if func.namespace == "c10d":
            self._record(func._schema.name.removeprefix("c10d::"), args)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self._record_functional(func._schema.name.removeprefix("_c10d_functional::"), args, result)
        return result

    def _record_functional(self, name: str, args: Sequence[Any], result: Any) -> None:
        if name not in FUNCTIONAL_KINDS:
            return  # waiting, and wrapping what is waited for
        sizes = [sum(t.numel() * t.element_size() for t in tree_leaves(each)) for each in (args[0], result)]
        self.seen.append(Seen(FUNCTIONAL_KINDS[name], _functional_group(args), max(sizes)))

    def _record(self, name: str, args: Sequence[Any]) -> None:
        tensors = [tree_leaves(arg) for arg in args]
        sizes = [sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor)) for leaves in tensors]
        if name == "send":
            self._sent(sizes[0], _ends_of(args))
        elif name == "alltoall_base_" and self._logical is not None:
            self._logical.sent_bytes += sizes[1]
        elif name not in ("recv_", "recv_any_source_"):
            kind = KINDS.get(name, name)
            size = max(sizes) if kind in LARGER_SIDE else sizes[0]
            self.seen.append(Seen(kind, _group_of(args), 0 if kind == "barrier" else size))

    def _sent(self, size: int, group: tuple[int, ...]) -> None:
        if self._logical is not None:
            self._logical.sent_bytes += size
        else:
            self.seen.append(Seen("send", group, size))


def _group_of(args: Sequence[Any]) -> tuple[int, ...]:
    group = _process_group(args)
    return tuple(sorted(dist.get_process_group_ranks(group))) if group is not None else ()


def _ends_of(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks between which a message goes: this one, and the one whose place in the group it names."""
    group = _process_group(args)
    places = [arg for arg in args if isinstance(arg, int)]
    return tuple(sorted((dist.get_rank(), dist.get_process_group_ranks(group)[places[0]])))


def _process_group(args: Sequence[Any]) -> dist.ProcessGroup | None:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            with suppress(RuntimeError):
                return dist.ProcessGroup.unbox(arg)
    return None


def _functional_group(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks of the group that a functional collective names, or hands over."""
    from torch._C._distributed_c10d import _resolve_process_group

    group = args[-1] if not isinstance(args[-1], str) else _resolve_process_group(args[-1])  # type: ignore[arg-type]
    return tuple(sorted(dist.get_process_group_ranks(group)))


@dataclass
class _Merged:
    size_bytes: int = 0
    payload_bytes: float = 0
    members: set[int] = field(default_factory=set)
    data_dependent: bool = False


def collectives_of(seen_by_rank: Sequence[Sequence[Seen]]) -> tuple[Collective, ...]:
    """Return what all ranks saw as logical collectives, each counted once.

    The k-th entry of a kind and group on one rank is the k-th on the others. Sizes of all-to-all-v and plain sends add
    up over ranks; all others must be equal everywhere, and are entries of their own where they are not.
    """
    merged: dict[tuple[str, tuple[int, ...], int, int], _Merged] = defaultdict(_Merged)
    for rank, seen in enumerate(seen_by_rank):
        ordinals: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        for entry in seen:
            place = (entry.kind, entry.group)
            adds_up = entry.kind == "all-to-all-v"
            distinct = 0 if adds_up else entry.size_bytes
            if entry.kind == "send":
                distinct = rank + 1  # each rank's own
            target = merged[(*place, ordinals[place], distinct)]
            ordinals[place] += 1
            target.size_bytes = target.size_bytes + entry.size_bytes if adds_up else entry.size_bytes
            target.payload_bytes += entry.sent_bytes
            target.data_dependent |= entry.data_dependent
            target.members.add(rank)
    return merge_collectives(
        Collective(
            kind=kind,
            group=group,
            bytes=entry.size_bytes,
            count=1,
            payload_bytes=float(entry.payload_bytes) if entry.data_dependent else None,
        )
        for (kind, group, _, _), entry in merged.items()
    )
