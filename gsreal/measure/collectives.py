"""Records every collective and message of a rank, as the process group receives it."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsreal.gradient_sharding.point_to_point import LogicalCollective, observers
from gssim.result import Collective, merge_collectives
from gssim.result.result import LARGER_SIDE


@dataclass
class ObservedCollective:
    """One collective that this rank submitted to the process group."""

    kind: str
    group: tuple[int, ...]
    size_bytes: int
    data_dependent: bool = False
    sent_bytes: float = 0
    """Bytes of its point-to-point messages, or of the one call of the backend that implements it."""


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
"""torch's functional collectives, which DTensor uses: they call the process group below the dispatcher."""


class CollectiveRecorder(TorchDispatchMode):
    """Dispatch mode that records every collective and message of this rank, whoever sent it."""

    supports_higher_order_operators = True
    """Compiled blocks run such operations to keep the state of random numbers for their recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ObservedCollective] = []
        self._logical: ObservedCollective | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled blocks, which contain no collectives, run as without it."""
        return True

    def __enter__(self) -> "CollectiveRecorder":
        observers.append(self._observe)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        observers.remove(self._observe)

    def _observe(self, entry: LogicalCollective | None) -> None:
        if entry is None:
            self._logical = None
            return
        self._logical = ObservedCollective(
            entry.kind, entry.group, entry.declared_bytes, entry.data_dependent, -entry.kept_bytes
        )
        self.seen.append(self._logical)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it dispatches again with its local operations
        if func.namespace == "c10d":
            self._record(func._schema.name.removeprefix("c10d::"), args)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self._record_functional(func._schema.name.removeprefix("_c10d_functional::"), args, result)
        return result

    def _record_functional(self, name: str, args: Sequence[Any], result: Any) -> None:
        if name not in FUNCTIONAL_KINDS:
            return  # waits and wrappers
        from torch._C._distributed_c10d import _resolve_process_group

        sizes = [sum(t.numel() * t.element_size() for t in tree_leaves(each)) for each in (args[0], result)]
        group = _resolve_process_group(args[-1]) if isinstance(args[-1], str) else args[-1]  # type: ignore[arg-type]
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        self.seen.append(ObservedCollective(FUNCTIONAL_KINDS[name], ranks, max(sizes)))

    def _record(self, name: str, args: Sequence[Any]) -> None:
        tensors = [tree_leaves(arg) for arg in args]
        sizes = [sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor)) for leaves in tensors]
        group: dist.ProcessGroup | None = None
        for arg in args:
            if isinstance(arg, torch.ScriptObject):  # c10d's operations take their process group as one
                with suppress(RuntimeError):
                    group = dist.ProcessGroup.unbox(arg)
                    break
        if self._logical is not None and name in ("send", "alltoall_base_"):
            self._logical.sent_bytes += sizes[0 if name == "send" else 1]
        elif name == "send":
            to = next(arg for arg in args if isinstance(arg, int))  # the receiver's index in the group
            receiver = dist.get_process_group_ranks(group)[to]
            self.seen.append(ObservedCollective("send", tuple(sorted((dist.get_rank(), receiver))), sizes[0]))
        elif name not in ("recv_", "recv_any_source_"):
            kind = KINDS.get(name, name)
            size = max(sizes) if kind in LARGER_SIDE else sizes[0]
            ranks = tuple(sorted(dist.get_process_group_ranks(group))) if group is not None else ()
            self.seen.append(ObservedCollective(kind, ranks, 0 if kind == "barrier" else size))


@dataclass
class _Merged:
    size_bytes: int = 0
    payload_bytes: float = 0
    members: set[int] = field(default_factory=set)
    data_dependent: bool = False


def collectives_of(observed_by_rank: Sequence[Sequence[ObservedCollective]]) -> tuple[Collective, ...]:
    """Return all ranks' logical collectives, each counted once.

    The k-th entry of a kind and group on one rank is the k-th on the others. Sizes of all-to-all-v and plain sends are
    summed over ranks; all others must be equal on every rank, and are separate entries otherwise.
    """
    merged: dict[tuple[str, tuple[int, ...], int, int], _Merged] = defaultdict(_Merged)
    for rank, seen in enumerate(observed_by_rank):
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
