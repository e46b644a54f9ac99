"""The order of exchanges that all ranks must keep to: tags by kind, step, push and bucket, and what a mistake costs.

A message that is received in place of another one corrupts what is trained. Backends of the host (gloo) match messages
by tag, so that a rank that is elsewhere is waited for until the group's timeout, and the error says what was awaited.
nccl matches messages by order alone: there parameters are published in a communicator of their own, in which no push
can be met, and counts of entries bear the tag in their upper bits.

Reasons for exchanges that end in a time-out: what was called here, and that all ranks must call it.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.gradient_sharding.point_to_point import HOST_BACKENDS

BROKEN = re.compile(r"tim(e|ed)[ -]?out|connection (closed|reset|refused)|broken pipe|pair closure", re.IGNORECASE)
"""What backends say of peers that did not come within the group's time-out, or that have gone."""


@contextmanager
def every_rank(call: str) -> Iterator[None]:
    """Say of an exchange inside that fails for lack of a peer which call it belongs to, and who must make it.

    Where such calls are made inside each other, it is the outermost: what the user's own code has called.
    """
    try:
        yield
    except RuntimeError as error:
        reason = error.reason if isinstance(error, NoPeerError) else str(error).partition("\n")[0]
        if not isinstance(error, NoPeerError) and BROKEN.search(str(error)) is None:
            raise
        raise NoPeerError(call, reason) from error


class NoPeerError(RuntimeError):
    """Another rank did not take part in an exchange."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(
            f"{call}: every rank of the group must do this, as often and in the same order; another one did not within "
            f"the group's time-out, or has ended ({reason})"
        )
        self.reason = reason


def called_by_torchs_state_dict() -> bool:
    """Return whether a method of an optimizer was called by `torch.distributed.checkpoint.state_dict`.

    That names tensors of param_groups by the model's parameters, and makes state by a step.
    """
    frame = sys._getframe(1).f_back
    for _ in range(4):  # steps are wrapped by torch's profiler and by `no_grad`
        if frame is None:
            break
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = frame.f_back
    return False


class Kind(IntEnum):
    """What a message is part of."""

    PUSH_COUNTS = 1
    PUSH = 2
    PUBLISH_COUNTS = 3
    PUBLISH = 4
    REDUCE_IN_NODE = 5
    PUBLISH_IN_NODE = 6
    GATHER = 7


BUCKET_BITS, PUSH_BITS, STEP_BITS = 14, 6, 6
COUNT_BITS = 34
"""Of a 64-bit count; the others hold its tag. More entries than an index of 32 bits has fit."""


class Protocol:
    """Where this rank is in the order of exchanges: how many steps it has made, and pushes since the last one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps = 0
        self.pushes = 0
        """Backwards whose gradients were pushed since the last step."""
        self.failed = ""
        """The exchange that failed, if one has: nothing can be exchanged after that."""

    def tag(self, kind: Kind, bucket: int = 0) -> int:
        """Return what marks messages of this kind, of now. Steps, pushes and buckets are counted round."""
        found = int(kind)
        for number, bits in ((self.steps, STEP_BITS), (self.pushes, PUSH_BITS), (bucket, BUCKET_BITS)):
            found = found << bits | number % 2**bits
        return found

    def end_step(self) -> None:
        """Note that a step was made."""
        self.steps, self.pushes = self.steps + 1, 0

    def check(self) -> None:
        """Raise RuntimeError where an exchange has failed, or there is no process group any more."""
        if not dist.is_initialized():
            raise RuntimeError("the process group was destroyed; make the last step before destroy_process_group")
        if self.failed:
            raise RuntimeError(f"rank {self.rank}: the {self.failed} has failed; nothing can be exchanged any more")

    @contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        """Say of an exchange that fails inside what it was, and refuse every one after that."""
        self.check()
        try:
            yield
        except RuntimeError as error:
            self.failed = f"{name} in step {self.steps}"
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RuntimeError(
                f"rank {self.rank}: the {self.failed} (pushes since the last step: {self.pushes}) failed: {reason}. "
                "Where no rank has died, they are not at the same place: all must make as many steps, and between "
                "two steps as many backwards outside no_sync"
            ) from error


def with_tag(counts: Sequence[int], tags: Sequence[int]) -> list[int]:
    """Return counts of entries that bear tags in their upper bits.

    >>> without_tag(with_tag([5, 0], [7, 7]), [7, 7])
    [5, 0]
    """
    return [tag << COUNT_BITS | count for count, tag in zip(counts, tags, strict=True)]


def without_tag(counts: Sequence[int], tags: Sequence[int]) -> list[int]:
    """Return the counts that came; raise RuntimeError where one bears another tag."""
    for count, tag in zip(counts, tags, strict=True):
        if count >> COUNT_BITS != tag:
            raise RuntimeError(f"a count of {_said(count >> COUNT_BITS)} came in place of {_said(tag)}")
    return [count % 2**COUNT_BITS for count in counts]


def _said(tag: int) -> str:
    """Return a tag in words.

    >>> protocol = Protocol(rank=0)
    >>> _said(protocol.tag(Kind.PUSH_COUNTS, bucket=3))
    'PUSH_COUNTS of bucket 3 in step 0 after 0 pushes'
    """
    numbers = []
    for bits in (BUCKET_BITS, PUSH_BITS, STEP_BITS):
        tag, number = divmod(tag, 2**bits)
        numbers.append(number)
    kind = Kind(tag).name if tag in Kind.__members__.values() else "something else"
    return f"{kind} of bucket {numbers[0]} in step {numbers[2]} after {numbers[1]} pushes"


def own_communicator(group: dist.ProcessGroup, backend: str, device: torch.device) -> dist.ProcessGroup:
    """Return a group of the same ranks whose messages cannot meet the other's (a collective of the group's ranks).

    It has the same time-out, and is the same group where the backend's messages have tags. `device`: of the tensors
    that are sent.
    """
    if backend in HOST_BACKENDS or dist.get_world_size(group) == 1:
        return group
    found = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=dist.get_backend_config(group),
        timeout=group._get_backend(device).options._timeout,  # torch has no public way to ask for it
        use_local_synchronization=True,
    )
    assert isinstance(found, dist.ProcessGroup)
    return found


AllReduce = Callable[[Tensor, Any], None]
"""Puts all ranks' values of a tensor together, by an operation."""
DIGEST_BYTES = 7
"""Of a digest: an integer that has 64 bits and a sign."""
SHOWN_DIFFERENCES = 5


def check_alike(
    described: Mapping[str, str], ranks: Sequence[int], rank: int, all_reduce: AllReduce, device: torch.device
) -> None:
    """Raise ValueError on all ranks, with names, where what must be equal on all of them is not (a collective).

    Costs an all-reduce of two integers; where they differ, all descriptions are exchanged. `described`: what every
    rank has, by name. `device`: of the tensors that are all-reduced.
    """
    text = json.dumps(described).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:DIGEST_BYTES])
    extremes = torch.tensor([digest, -digest], device=device)
    all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest = extremes.tolist()
    if largest == -smallest:
        return
    length = torch.tensor(len(text), device=device)
    all_reduce(length, dist.ReduceOp.MAX)
    texts = torch.zeros(len(ranks), int(length), dtype=torch.int32, device=device)
    texts[ranks.index(rank), : len(text)] = torch.tensor(list(text), dtype=torch.int32, device=device)
    all_reduce(texts, dist.ReduceOp.SUM)
    first, *others = [json.loads(bytes(row).rstrip(b"\0")) for row in texts.tolist()]
    found = [
        f"{name}: {other.get(name, 'nothing')} on rank {at}, {first.get(name, 'nothing')} on rank {ranks[0]}"
        for at, other in zip(ranks[1:], others, strict=True)
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    more = f"; and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
    raise ValueError(f"ranks differ in what must be equal on all: {'; '.join(found[:SHOWN_DIFFERENCES])}{more}")
