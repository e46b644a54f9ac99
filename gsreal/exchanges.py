"""Point-to-point exchanges that gloo lacks or does badly: uneven all-to-all, ring all-gather and ring reduce-scatter.

Receives are posted before sends: gloo's note that a receive is ready travels behind payload that is already queued to
the same peer, which wastes up to 40 % of a link otherwise. What a logical collective is made of is announced with
`logical`, so that an observer of the process group can tell its messages from others: it is the same entry as that of
the stock collective in its place, however it is carried out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Logical:
    """A collective made of point-to-point messages: its kind, group and this rank's part of its size."""

    kind: str
    group: tuple[int, ...]
    declared_bytes: int
    """all-gather: the full output; reduce-scatter: the full input; all-to-all-v: what this rank would send densely."""
    data_dependent: bool


observers: list[Callable[[Logical | None], None]] = []
"""Called with a Logical when one begins to post its messages, and with None when it has posted them."""


@contextmanager
def logical(entry: Logical) -> Iterator[None]:
    """Announce to the observers that the messages posted inside belong to one logical collective."""
    for observe in observers:
        observe(entry)
    try:
        yield
    finally:
        for observe in observers:
            observe(None)


class Pending:
    """Messages under way. `wait` returns once all have been sent and received."""

    def __init__(self, works: list[dist.Work], kept: list[Tensor], staged: list[tuple[Tensor, Tensor]]) -> None:
        self._works, self._kept, self._staged = works, kept, staged

    def add(self, work: dist.Work | None, host: Tensor, *, target: Tensor | None = None) -> None:
        """Wait for one more message as well; what comes into `host` is copied to `target` where that is another."""
        if work is not None:
            self._works.append(work)
        self._kept.append(host)
        if target is not None and target is not host:
            self._staged.append((target, host))

    def wait(self) -> None:
        """Block until every message is done, then let go of the buffers."""
        for work in self._works:
            work.wait()
        for target, host in self._staged:
            target.copy_(host)
        self._works, self._kept, self._staged = [], [], []


def all_to_all_v(
    sends: Sequence[Tensor | None],
    receives: Sequence[Tensor | None],
    *,
    group: dist.ProcessGroup,
    declared_bytes: int,
    data_dependent: bool = False,
    point_to_point: bool = True,
) -> Pending:
    """Send `sends[i]` to the group's i-th rank and receive `receives[i]` from it; None and empty ones are left out.

    Both ends must agree on every size. Returns at once; wait on what it returns. Where not `point_to_point`, the
    backend's `all_to_all_single` carries them, from and to a flat copy.
    """
    rank, ranks = dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    others = [(rank + k) % len(ranks) for k in range(1, len(ranks))]
    with logical(Logical("all-to-all-v", tuple(sorted(ranks)), declared_bytes, data_dependent)):
        if not point_to_point:
            return _all_to_all_single(sends, receives, group)
        incoming = [
            (ranks[i], tensor) for i in reversed(others) if (tensor := receives[i]) is not None and tensor.numel()
        ]
        outgoing = [(ranks[i], tensor) for i in others if (tensor := sends[i]) is not None and tensor.numel()]
        return _post(incoming, outgoing, group)


def _all_to_all_single(
    sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], group: dist.ProcessGroup
) -> Pending:
    """Post all messages as one call of the backend, as bytes."""
    own = dist.get_rank(group)
    outgoing, incoming = (
        [
            t.view(torch.uint8) if t is not None and i != own else torch.empty(0, dtype=torch.uint8)
            for i, t in enumerate(each)
        ]
        for each in (sends, receives)
    )
    received, sent = ([part.numel() for part in each] for each in (incoming, outgoing))
    device = next((t.device for t in (*sends, *receives) if t is not None), torch.device("cpu"))
    gone = torch.cat([part.to(device) for part in outgoing])
    come = torch.empty(sum(received), dtype=torch.uint8, device=device)
    pending = Pending([], [], [])
    pending.add(dist.all_to_all_single(come, gone, received, sent, group=group, async_op=True), gone)
    for target, part in zip(incoming, come.split(received), strict=True):
        pending.add(None, part, target=target)
    return pending


Ranges = Sequence[tuple[int, int]]
"""(First, end) of what each rank of a group owns in a flat tensor."""


def all_gather_v(flat: Tensor, ranges: Ranges, *, group: dist.ProcessGroup) -> None:
    """Fill `flat` in place on every rank: the i-th rank of the group owns `flat[ranges[i][0]:ranges[i][1]]`.

    A ring: every link carries all but one part, whatever the shares. Returns when this rank's copy is complete.
    """
    with logical(_whole("all-gather-v", flat, group)):
        _gather_round_ring([flat[slice(*places)] for places in ranges], group)


def all_gather_messages(messages: Sequence[Tensor], *, group: dist.ProcessGroup, declared_bytes: int) -> int:
    """Bring the message of every rank of the group to all: the i-th's is `messages[i]`, elsewhere a buffer for it.

    All ranks must agree on every size; `declared_bytes`: of all of them, were they dense. A ring, as `all_gather_v`:
    messages to everybody take as many bytes in any order, but passed on they load no link with more than all of them
    but one, where an owner that sent its own to each would send it (ranks - 1) times. Returns the bytes that this rank
    sent, once all have come.
    """
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    with logical(Logical("all-gather-v", ranks, declared_bytes, data_dependent=True)):
        _gather_round_ring(messages, group)
    following = (dist.get_rank(group) + 1) % len(ranks)
    return sum(each.numel() * each.element_size() for i, each in enumerate(messages) if i != following)


def post_to_all(
    messages: Sequence[Tensor], *, group: dist.ProcessGroup, declared_bytes: int, data_dependent: bool = False
) -> Pending:
    """Begin to bring the message of every rank of the group to all, as `all_gather_messages` does, in one go.

    Each rank sends its own to everybody, so that nobody has anything to pass on while it computes. Returns at once.
    """
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    others = [(rank + k) % len(ranks) for k in range(1, len(ranks))]
    with logical(Logical("all-gather-v", tuple(sorted(ranks)), declared_bytes, data_dependent)):
        incoming = [(ranks[i], messages[i]) for i in reversed(others)]
        outgoing = [(ranks[i], messages[rank]) for i in others]
        return _post(incoming, outgoing, group)


def broadcast_parts(flat: Tensor, ranges: Ranges, *, group: dist.ProcessGroup) -> None:
    """Do what `all_gather_v` does by the backend's broadcasts, one of each owner's part.

    No backend gathers unevenly in every case: gloo refuses parts of unequal sizes.
    """
    ranks = dist.get_process_group_ranks(group)
    parts = [(rank, flat[slice(*places)]) for rank, places in zip(ranks, ranges, strict=True)]
    works = [dist.broadcast(part, rank, group=group, async_op=True) for rank, part in parts if part.numel()]
    for work in works:
        if work is not None:
            work.wait()


def all_gather_into_tensor(output: Tensor, own: Tensor, *, group: dist.ProcessGroup) -> None:
    """Do what `dist.all_gather_into_tensor` does, by a ring that writes every part where it belongs.

    No buffer is taken; nothing is copied where `own` is this rank's part of `output` already.
    """
    ranges = _even(output, group)
    part = output.view(-1)[slice(*ranges[dist.get_rank(group)])]
    if part.data_ptr() != own.data_ptr():
        part.copy_(own.reshape(-1))
    with logical(_whole("all-gather", output, group)):
        _gather_round_ring([output.view(-1)[slice(*places)] for places in ranges], group)


def reduce_scatter_v(
    own: Tensor, flat: Tensor, ranges: Ranges, *, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM
) -> None:
    """Fill `own` with the sum (or the average) over all ranks of the part of `flat` that this rank owns.

    `flat` serves as working space: its content is lost.
    """
    _check(op)
    with logical(_whole("reduce-scatter-v", flat, group)):
        _reduce_round_ring(own, flat, ranges, group)
    _average(own, op, group)


def reduce_scatter_tensor(own: Tensor, flat: Tensor, *, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Do what `dist.reduce_scatter_tensor` does, by a ring: gloo's own moves an all-reduce's bytes.

    `flat` serves as working space: its content is lost. Among more than two ranks, takes a buffer of one part.
    """
    _check(op)
    with logical(_whole("reduce-scatter", flat, group)):
        _reduce_round_ring(own.view(-1), flat.view(-1), _even(flat, group), group)
    _average(own, op, group)


def _whole(kind: str, flat: Tensor, group: dist.ProcessGroup) -> Logical:
    """Return the collective that has all of `flat` for its size."""
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    return Logical(kind, ranks, flat.numel() * flat.element_size(), data_dependent=False)


def _even(flat: Tensor, group: dist.ProcessGroup) -> Ranges:
    """Return equal ranges of a tensor; raise ValueError where it cannot be divided."""
    members = dist.get_world_size(group)
    part, left = divmod(flat.numel(), members)
    if left:
        raise ValueError(f"{flat.numel()} elements cannot be divided evenly among {members} ranks")
    return [(i * part, (i + 1) * part) for i in range(members)]


def _check(op: Any) -> None:
    """Raise ValueError for anything but sums and averages."""
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"a ring of messages can sum and average, but not {op}")


def _average(own: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Make an average of a sum where `op` says so."""
    if op == dist.ReduceOp.AVG:
        own.div_(dist.get_world_size(group))


def _gather_round_ring(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Pass every part, of the i-th rank `parts[i]`, on to the next rank, until all have all."""
    ranks = dist.get_process_group_ranks(group)
    members, rank = len(ranks), dist.get_rank(group)
    for step in range(members - 1):
        mine, theirs = parts[(rank - step) % members], parts[(rank - step - 1) % members]
        incoming = [(ranks[(rank - 1) % members], theirs)]
        outgoing = [(ranks[(rank + 1) % members], mine)]
        _post(incoming, outgoing, group).wait()


def _reduce_round_ring(own: Tensor, flat: Tensor, ranges: Ranges, group: dist.ProcessGroup) -> None:
    """Pass every part round towards its owner, each rank adding its own to it.

    A part goes in two halves, each with a buffer of its own: while one is added, the other is under way. In the last
    step the own part comes, straight into `own`, so that two ranks need no buffer.
    """
    ranks = dist.get_process_group_ranks(group)
    members, rank = len(ranks), dist.get_rank(group)
    above, below = ranks[(rank + 1) % members], ranks[(rank - 1) % members]
    mine = flat[slice(*ranges[rank])]
    if members == 1:
        own.copy_(mine)
        return
    passing = [_halves(flat[slice(*ranges[(rank + 1 + step) % members])]) for step in range(members - 1)]
    buffers = [flat.new_empty(max((part[half].numel() for part in passing[1:]), default=0)) for half in HALVES]

    def arriving(step: int, half: int) -> Tensor:
        return _halves(own)[half] if step == members - 2 else buffers[half][: passing[step + 1][half].numel()]

    def messages(step: int, half: int) -> tuple[Messages, Messages]:
        return [(above, arriving(step, half))], [(below, passing[step][half])]

    pending = _post_each([messages(0, half) for half in HALVES], group)
    for step in range(1, members - 1):
        for half in HALVES:
            pending[half].wait()
            passing[step][half].add_(arriving(step - 1, half))
            pending[half] = _post(*messages(step, half), group)
    for half in HALVES:
        pending[half].wait()
        _halves(own)[half].add_(_halves(mine)[half])


HALVES = (0, 1)
WHOLE_BYTES = 2**20
"""Parts of at most this are not halved: a further message costs more than what it hides."""


def _halves(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return a part in two, the second empty where the part is small."""
    end = part.numel() // 2 if part.numel() * part.element_size() > WHOLE_BYTES else part.numel()
    return part[:end], part[end:]


Messages = Sequence[tuple[int, Tensor]]
"""(Peer, tensor) of each."""


def _post(incoming: Messages, outgoing: Messages, group: dist.ProcessGroup) -> Pending:
    """Post all receives, then all sends; empty ones are left out."""
    return _post_each([(incoming, outgoing)], group)[0]


def _post_each(exchanges: Sequence[tuple[Messages, Messages]], group: dist.ProcessGroup) -> list[Pending]:
    """Post the receives of all exchanges, then the sends of all; return what to wait for of each.

    gloo takes host memory: device tensors are staged. nccl takes all of them as one batch, or they could deadlock.
    """
    exchanges = [
        ([m for m in incoming if m[1].numel()], [m for m in outgoing if m[1].numel()])
        for incoming, outgoing in exchanges
    ]
    if dist.get_backend(group) == "nccl":
        return _post_batch(exchanges, group)
    pending = [Pending([], [], []) for _ in exchanges]
    for each, (incoming, _) in zip(pending, exchanges, strict=True):
        for peer, tensor in incoming:
            host = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_cuda else tensor
            each.add(dist.irecv(host, peer, group=group), host, target=tensor)
    for each, (_, outgoing) in zip(pending, exchanges, strict=True):
        for peer, tensor in outgoing:
            host = tensor.cpu() if tensor.is_cuda else tensor
            each.add(dist.isend(host, peer, group=group), host)
    return pending


def _post_batch(exchanges: Sequence[tuple[Messages, Messages]], group: dist.ProcessGroup) -> list[Pending]:
    """Post all receives and sends at once."""
    operations = [dist.P2POp(dist.irecv, tensor, peer, group) for incoming, _ in exchanges for peer, tensor in incoming]
    operations += [
        dist.P2POp(dist.isend, tensor, peer, group) for _, outgoing in exchanges for peer, tensor in outgoing
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return [Pending(works, [tensor for _, tensor in (*incoming, *outgoing)], []) for incoming, outgoing in exchanges]
