"""Message tags and checks that keep the exchanges of all ranks in the same order.

A message received in place of another one corrupts the training. Tags encode kind, model, step, push and bucket. Host
backends (gloo) match messages by tag, so that a mismatch ends in the group's timeout with an error that names the
expected message. nccl matches messages by order alone: parameters are therefore published in a communicator of their
own, in which no push can be matched, and counts of entries carry the tag in their upper bits.

`collective_call` explains timeouts: it names the call, and that all ranks must make it.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.gradient_sharding.point_to_point import HOST_BACKENDS

BROKEN = re.compile(r"tim(e|ed)[ -]?out|connection (closed|reset|refused)|broken pipe|pair closure", re.IGNORECASE)
"""Backend messages for peers that did not arrive within the group's timeout, or that have ended."""


@contextmanager
def collective_call(call: str) -> Iterator[None]:
    """Name the call, and that every rank must make it.

    In the error of an exchange inside that fails for lack of a peer.

    In nested calls the outermost is named: the one in the user's own code.
    """
    try:
        yield
    except RuntimeError as error:
        reason = error.reason if isinstance(error, PeerError) else str(error).partition("\n")[0]
        if not isinstance(error, PeerError) and BROKEN.search(str(error)) is None:
            raise
        raise PeerError(call, reason) from error


class PeerError(RuntimeError):
    """Another rank did not take part in an exchange."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(
            f"{call}: every rank of the group must make this call, equally often and in the same order; another "
            f"rank did not within the group's timeout, or has ended ({reason})"
        )
        self.reason = reason


def called_by_torch_state_dict() -> bool:
    """Return whether a method of an optimizer was called by `torch.distributed.checkpoint.state_dict`.

    That module names tensors of param_groups by the model's parameters, and creates state by a step.
    """
    frame = sys._getframe(1).f_back
    for _ in range(7):  # steps are wrapped by torch's profiler, by `no_grad`, and by what keeps Dynamo out of them
        if frame is None:
            break
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = frame.f_back
    return False


class MessageKind(IntEnum):
    """Purpose of a message."""

    PUSH_COUNTS = 1
    PUSH = 2
    PUBLISH_COUNTS = 3
    PUBLISH = 4
    REDUCE_INTRA_NODE = 5
    PUBLISH_INTRA_NODE = 6
    GATHER = 7


BUCKET_BITS, PUSH_BITS, STEP_BITS, MODEL_BITS = 14, 4, 6, 2
MODELS: Counter[tuple[int, ...]] = Counter()
"""Models that this process has trained so far, by the ranks that train them."""
COUNT_BITS = 34
"""Bits for the count in a 64-bit integer.

The others hold its tag. Exceeds the entries that an index of 32 bits allows.
"""


class ExchangeProtocol:
    """Sequence number of a rank's exchanges: its steps so far, and pushes since the last step."""

    def __init__(self, rank: int, ranks: tuple[int, ...], groups: Collection[dist.ProcessGroup] = ()) -> None:
        """`ranks`: all that train the model; the count of their models is part of all tags. `groups`: theirs."""
        self.rank, self.groups = rank, groups
        self.process = os.getpid()
        self.model = MODELS[ranks]
        """Number of the model, set by the first rank: equal models are not to be exchanged for one another."""
        MODELS[ranks] += 1
        self.steps = 0
        self.pushes = 0
        """Backwards whose gradients were pushed since the last step."""
        self.failed = ""
        """The exchange that failed, if any: further exchanges are refused."""

    def tag(self, kind: MessageKind, bucket: int = 0) -> int:
        """Return the current tag of messages of this kind. Models, steps, pushes and buckets wrap around."""
        tag = int(kind)
        numbers = (self.model, self.steps, self.pushes, bucket)
        for number, bits in zip(numbers, (MODEL_BITS, STEP_BITS, PUSH_BITS, BUCKET_BITS), strict=True):
            tag = tag << bits | number % 2**bits
        return tag

    def end_step(self) -> None:
        """Count a step."""
        self.steps, self.pushes = self.steps + 1, 0

    def check(self) -> None:
        """Raise RuntimeError if an exchange has failed, the process group was destroyed, or this is another process."""
        if os.getpid() != self.process:
            raise RuntimeError(
                "this process was forked from the rank that called shard_gradients, and must not use its connections: "
                "train in that one, or call init_process_group and shard_gradients here"
            )
        if not dist.is_initialized() or any(is_destroyed(group) for group in self.groups):
            raise RuntimeError("the process group was destroyed; make the last step before destroy_process_group")
        if self.failed:
            raise RuntimeError(f"rank {self.rank}: the {self.failed} has failed; no further exchange is possible")

    @contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        """Name the exchange in the error if it fails, and refuse all later ones."""
        self.check()
        try:
            yield
        except RuntimeError as error:
            self.failed = f"{name} in step {self.steps}"
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RuntimeError(
                f"rank {self.rank}: the {self.failed} (pushes since the last step: {self.pushes}) failed: {reason}. "
                "If no rank has died, the ranks are out of step: all must make equally many steps, and between "
                "two steps equally many backwards outside no_sync"
            ) from error


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Return whether `destroy_process_group` has destroyed a group of this process, by itself or with all others."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return True
    return False


def pack_tags(counts: Sequence[int], tags: Sequence[int]) -> list[int]:
    """Return counts of entries with tags in their upper bits.

    >>> unpack_tags(pack_tags([5, 0], [7, 7]), [7, 7])
    [5, 0]
    """
    return [tag << COUNT_BITS | count for count, tag in zip(counts, tags, strict=True)]


def unpack_tags(counts: Sequence[int], tags: Sequence[int]) -> list[int]:
    """Return the received counts; raise RuntimeError if one carries another tag."""
    for count, tag in zip(counts, tags, strict=True):
        if count >> COUNT_BITS != tag:
            raise RuntimeError(f"a count of {_tag_text(count >> COUNT_BITS)} was received instead of {_tag_text(tag)}")
    return [count % 2**COUNT_BITS for count in counts]


def _tag_text(tag: int) -> str:
    """Return a tag as text.

    >>> protocol = ExchangeProtocol(rank=0, ranks=(0, 1))
    >>> _tag_text(protocol.tag(MessageKind.PUSH_COUNTS, bucket=3))
    'PUSH_COUNTS of model 0, bucket 3 in step 0 after 0 pushes'
    """
    numbers = []
    for bits in (BUCKET_BITS, PUSH_BITS, STEP_BITS, MODEL_BITS):
        tag, number = divmod(tag, 2**bits)
        numbers.append(number)
    kind = MessageKind(tag).name if tag in MessageKind.__members__.values() else "something else"
    return f"{kind} of model {numbers[3]}, bucket {numbers[0]} in step {numbers[2]} after {numbers[1]} pushes"


def separate_communicator(group: dist.ProcessGroup, backend: str, device: torch.device) -> dist.ProcessGroup:
    """Return a group of the same ranks whose messages cannot be matched with the other's (a collective of its ranks).

    It has the same timeout. Backends that tag messages need none: the group itself is returned. `device`: of the
    tensors that are sent.
    """
    if backend in HOST_BACKENDS or dist.get_world_size(group) == 1:
        return group
    communicator = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=dist.get_backend_config(group),
        timeout=group._get_backend(device).options._timeout,  # torch has no public way to ask for it
        use_local_synchronization=True,
    )
    assert isinstance(communicator, dist.ProcessGroup)
    return communicator


AllReduce = Callable[[Tensor, Any], None]
"""All-reduces a tensor over all ranks in place, with an operation."""
DIGEST_BYTES = 7
"""Bytes of the digest used: it must fit a signed 64-bit integer."""
SHOWN_DIFFERENCES = 5


def check_equal_on_all_ranks(
    described: Mapping[str, str], ranks: Sequence[int], rank: int, all_reduce: AllReduce, device: torch.device
) -> None:
    """Raise ValueError on all ranks, naming the differences, if `described` is not equal on all of them (a collective).

    Costs an all-reduce of two integers; only if they differ are all descriptions exchanged. `described`: each rank's
    values by name. `device`: of the tensors that are all-reduced.
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
    differences = [
        f"{name}: {other.get(name, 'nothing')} on rank {at}, {first.get(name, 'nothing')} on rank {ranks[0]}"
        for at, other in zip(ranks[1:], others, strict=True)
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    more = f"; and {len(differences) - SHOWN_DIFFERENCES} more" if len(differences) > SHOWN_DIFFERENCES else ""
    raise ValueError(
        f"ranks differ in values that must be equal on all: {'; '.join(differences[:SHOWN_DIFFERENCES])}{more}"
    )
