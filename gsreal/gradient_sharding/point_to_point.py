"""Collectives built of point-to-point messages: uneven all-to-all, ring all-gather and ring reduce-scatter.

gloo lacks them or implements them inefficiently. Receives are posted before sends: otherwise gloo's notification that a
receive is ready is queued behind payload to the same peer, which wastes up to 40 % of a link. `announce` names the
logical collective that messages belong to, so that an observer of the process group can attribute them: the entry is
the same as that of the corresponding stock collective, whatever the implementation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HOST_BACKENDS = ("gloo", "mpi")
"""Backends whose exchanges run on the host, which waits for them, with tagged messages."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that carries a device's tensors in a group.

    A group may have several, by device (`init_process_group()` without a name). Raises ValueError if none carries such
    tensors.
    """
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":") for pair in config.split(","))
    if device.type not in backends:
        raise ValueError(f"the process group ({config}) cannot carry tensors that are on '{device.type}'")
    return backends[device.type]


def is_staged(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether messages of a device's tensors are staged in host memory: gloo takes no other."""
    return device.type != "cpu" and backend_of(group, device) in HOST_BACKENDS


def runs_on_device(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's exchanges run in the device's streams, so that the host need not wait for them."""
    return device.type != "cpu" and not is_staged(group, device)


@dataclass(frozen=True)
class LogicalCollective:
    """A collective made of point-to-point messages: its kind, group and this rank's part of its size."""

    kind: str
    group: tuple[int, ...]
    declared_bytes: int
    """all-gather: the full output; reduce-scatter: the full input.

    All-to-all-v: the bytes this rank would send densely.
    """
    data_dependent: bool
    kept_bytes: int = 0
    """This rank's part for itself, which one call of the backend includes, but does not send."""


observers: list[Callable[[LogicalCollective | None], None]] = []
"""Called with a LogicalCollective when one starts to post its messages, and with None when it has posted them."""


@contextmanager
def announce(entry: LogicalCollective) -> Iterator[None]:
    """Announce to the observers that the messages posted inside belong to one logical collective."""
    for observe in observers:
        observe(entry)
    try:
        yield
    finally:
        for observe in observers:
            observe(None)


class Pending:
    """Messages in flight. `wait` returns once all have been sent and received."""

    def __init__(self, works: list[dist.Work], kept: list[Tensor], staged: list[tuple[Tensor, Tensor]]) -> None:
        self._works, self._kept, self._staged = works, kept, staged
        self.batch: list[dist.P2POp] = []
        """Receives that are posted together with the sends."""

    def add(self, work: dist.Work | None, host: Tensor, *, target: Tensor | None = None) -> None:
        """Add a message to wait for; if `target` is another tensor than `host`, the received `host` is copied to it."""
        if work is not None:
            self._works.append(work)
        self._kept.append(host)
        if target is not None and target is not host:
            self._staged.append((target, host))

    def add_batch(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        """Add a batch of messages to wait for."""
        self._works.extend(works)
        self._kept.extend(tensors)

    def end(self) -> None:
        """Block until every message is done."""
        for work in self._works:
            work.wait()
        self._works = []

    def wait(self) -> None:
        """Block until every message is done, then release the buffers."""
        self.end()
        for target, host in self._staged:
            target.copy_(host, non_blocking=True)  # torch reuses pinned memory after the copy alone
        self._kept, self._staged = [], []


def all_to_all_v(
    sends: Sequence[Tensor | None],
    receives: Sequence[Tensor | None],
    *,
    group: dist.ProcessGroup,
    declared_bytes: int,
    data_dependent: bool = False,
    point_to_point: bool = True,
    tag: int = 0,
) -> Pending:
    """Send `sends[i]` to the group's i-th rank and receive `receives[i]` from it; None and empty ones are left out.

    Both ends must agree on every size. Returns immediately; wait on the result. If not `point_to_point`, the backend's
    `all_to_all_single` carries them, from and to a flat copy. `tag`: of the messages; see `protocol`.
    """
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    with announce(LogicalCollective("all-to-all-v", ranks, declared_bytes, data_dependent)):
        if not point_to_point:
            return _all_to_all_single(sends, receives, group)
        sends, receives = ([t if t is not None and t.numel() else None for t in each] for each in (sends, receives))
        return _post_to_others(sends, receives, group, tag)


def _post_to_others(
    sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], group: dist.ProcessGroup, tag: int
) -> Pending:
    """Post this rank's messages to and from all other ranks of the group; lists are indexed by rank of the group.

    The first message goes to the next rank, and the first receive is from the one before, so that no rank gets all of
    the first messages. None: no message.
    """
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    others = [(rank + k) % len(ranks) for k in range(1, len(ranks))]
    incoming = [(ranks[i], tensor) for i in reversed(others) if (tensor := receives[i]) is not None]
    outgoing = [(ranks[i], tensor) for i in others if (tensor := sends[i]) is not None]
    return _post(incoming, outgoing, group, tag)


def _all_to_all_single(
    sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], group: dist.ProcessGroup
) -> Pending:
    """Post all messages as one call of the backend, as bytes."""
    own = dist.get_rank(group)
    device = next((t.device for t in (*sends, *receives) if t is not None), torch.device("cpu"))
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    outgoing, incoming = (
        [t.view(torch.uint8) if t is not None and i != own else nothing for i, t in enumerate(each)]
        for each in (sends, receives)
    )
    received, sent = ([part.numel() for part in each] for each in (incoming, outgoing))
    transport = torch.device("cpu") if is_staged(group, device) else device
    send_buffer = torch.cat(outgoing).to(transport)
    receive_buffer = torch.empty(sum(received), dtype=torch.uint8, device=transport)
    pending = Pending([], [], [])
    pending.add(
        dist.all_to_all_single(receive_buffer, send_buffer, received, sent, group=group, async_op=True), send_buffer
    )
    for target, part in zip(incoming, receive_buffer.split(received), strict=True):
        pending.add(None, part, target=target)
    return pending


Ranges = Sequence[tuple[int, int]]
"""Half-open range (first, end) that each rank of a group owns in a flat tensor."""


def all_gather_v(flat: Tensor, ranges: Ranges, *, group: dist.ProcessGroup, tag: int = 0) -> None:
    """Fill `flat` in place on every rank: the i-th rank of the group owns `flat[ranges[i][0]:ranges[i][1]]`.

    A ring: every link carries all parts but one, whatever the shares. Returns when this rank's copy is complete.
    """
    with announce(_collective_over("all-gather-v", flat, group)):
        _ring_all_gather([flat[slice(*places)] for places in ranges], group, tag)


def all_gather_messages(
    messages: Sequence[Tensor], *, group: dist.ProcessGroup, declared_bytes: int, tag: int = 0
) -> int:
    """All-gather one message per rank of the group: the i-th rank's is `messages[i]`, on other ranks a buffer for it.

    All ranks must agree on every size; `declared_bytes`: total size of all messages if they were dense. Returns the
    bytes that this rank sent, once it has received all messages.

    Messages travel around a ring, as in `all_gather_v`. In total that is as many bytes as if every owner sent its
    message to each rank; but then the owner's link would carry the message (ranks - 1) times, while a link of the ring
    carries each message at most once.
    """
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    with announce(LogicalCollective("all-gather-v", ranks, declared_bytes, data_dependent=True)):
        _ring_all_gather(messages, group, tag)
    following = (dist.get_rank(group) + 1) % len(ranks)
    return sum(each.numel() * each.element_size() for i, each in enumerate(messages) if i != following)


def post_all_gather(
    messages: Sequence[Tensor],
    *,
    group: dist.ProcessGroup,
    declared_bytes: int,
    data_dependent: bool = False,
    tag: int = 0,
) -> Pending:
    """Start to all-gather one message per rank, as `all_gather_messages` does, without forwarding.

    Each rank sends its own message directly to every other, so that none has to forward messages during compute.
    Returns immediately.
    """
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    with announce(LogicalCollective("all-gather-v", ranks, declared_bytes, data_dependent)):
        return _post_to_others([messages[dist.get_rank(group)]] * len(ranks), messages, group, tag)


def all_gather_by_broadcasts(flat: Tensor, ranges: Ranges, *, group: dist.ProcessGroup) -> None:
    """All-gather uneven ranges as `all_gather_v` does, by one broadcast of the backend for each owner's range.

    No backend all-gathers uneven parts in every case: gloo refuses parts of unequal sizes.
    """
    ranks = dist.get_process_group_ranks(group)
    parts = [(rank, flat[slice(*places)]) for rank, places in zip(ranks, ranges, strict=True)]
    works = [dist.broadcast(part, rank, group=group, async_op=True) for rank, part in parts if part.numel()]
    for work in works:
        if work is not None:
            work.wait()


def all_gather_into_tensor(output: Tensor, own: Tensor, *, group: dist.ProcessGroup, tag: int = 0) -> None:
    """Do what `dist.all_gather_into_tensor` does, by a ring that receives every part in place.

    Allocates no buffer; copies nothing if `own` is this rank's part of `output` already.
    """
    ranges = _even_ranges(output, group)
    part = output.view(-1)[slice(*ranges[dist.get_rank(group)])]
    if part.data_ptr() != own.data_ptr():
        part.copy_(own.reshape(-1))
    with announce(_collective_over("all-gather", output, group)):
        _ring_all_gather([output.view(-1)[slice(*places)] for places in ranges], group, tag)


def all_gather_directly(output: Tensor, own: Tensor, *, group: dist.ProcessGroup, tag: int = 0) -> Pending:
    """Do what `dist.all_gather_into_tensor` does, by a message to each other rank; allocates no buffer.

    Returns immediately; wait on the result.
    """
    parts = [output.view(-1)[slice(*places)] for places in _even_ranges(output, group)]
    filled = parts[dist.get_rank(group)].copy_(own.reshape(-1))
    with announce(_collective_over("all-gather", output, group)):
        return _post_to_others([filled] * len(parts), parts, group, tag)


def reduce_scatter_v(own: Tensor, flat: Tensor, ranges: Ranges, *, group: dist.ProcessGroup, tag: int = 0) -> None:
    """Fill `own` with the sum over all ranks of the part of `flat` that this rank owns.

    `flat` is used as working memory: its content is lost.
    """
    with announce(_collective_over("reduce-scatter-v", flat, group)):
        _ring_reduce_scatter(own, flat, ranges, group, tag)


def reduce_scatter_tensor(own: Tensor, flat: Tensor, *, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Do what `dist.reduce_scatter_tensor` does, by a ring: gloo's own moves as many bytes as an all-reduce.

    `flat` is used as working memory: its content is lost. Among more than two ranks, allocates a buffer of one part.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"a ring of messages can sum and average, but not {op}")
    with announce(_collective_over("reduce-scatter", flat, group)):
        _ring_reduce_scatter(own.view(-1), flat.view(-1), _even_ranges(flat, group), group, tag=0)
    if op == dist.ReduceOp.AVG:
        own.div_(dist.get_world_size(group))


Waiting = Callable[[], AbstractContextManager[object]]
"""Makes the context in which a rank waits for messages, such as a span that records the time."""


def all_gather_in_turn(every: Tensor, *, group: dist.ProcessGroup, waiting: Waiting = nullcontext) -> Iterator[int]:
    """All-gather by a ring, and yield the index of each rank's part as soon as it is here, this rank's own first.

    `every`: the parts of all ranks along its first dimension, of which this rank has filled its own. What the caller
    does with a part overlaps with the message that passes it on, and with the one that brings the next. The caller
    takes all parts, and begins no other collective meanwhile.
    """
    with announce(_collective_over("all-gather", every, group)):
        yield from _ring_gathered(every.unbind(0), group, 0, waiting)


def reduce_scatter_in_turn(
    part: Callable[[int], Tensor], *, group: dist.ProcessGroup, waiting: Waiting = nullcontext
) -> Tensor:
    """Return the sum over all ranks of the part for this rank, whose terms are computed while partial sums travel.

    `part(i)` returns, as a new contiguous tensor, this rank's term of the part for the group's i-th rank; it begins no
    other collective. A ring: while a rank computes its term of the next part, it sends the partial sum of the last one
    and receives that of the next.
    """
    ranks = dist.get_process_group_ranks(group)
    members, rank = len(ranks), dist.get_rank(group)
    sender, receiver = ranks[(rank + 1) % members], ranks[(rank - 1) % members]
    own = part((rank + 1) % members)
    entry = LogicalCollective("reduce-scatter", tuple(sorted(ranks)), members * own.nbytes, data_dependent=False)
    with announce(entry):
        for step in range(members - 1):
            received = torch.empty_like(own)
            pending = _post_receives([(sender, received)], group, 0)
            _post_sends([(receiver, own)], pending, group, 0)
            own = part((rank + 2 + step) % members)
            with waiting():
                pending.wait()
            own.add_(received)
    return own


def _collective_over(kind: str, flat: Tensor, group: dist.ProcessGroup) -> LogicalCollective:
    """Return the collective whose size is all of `flat`."""
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    return LogicalCollective(kind, ranks, flat.numel() * flat.element_size(), data_dependent=False)


def _even_ranges(flat: Tensor, group: dist.ProcessGroup) -> Ranges:
    """Return equal ranges of a tensor; raise ValueError if it cannot be divided."""
    members = dist.get_world_size(group)
    part, left = divmod(flat.numel(), members)
    if left:
        raise ValueError(f"{flat.numel()} elements cannot be divided evenly among {members} ranks")
    return [(i * part, (i + 1) * part) for i in range(members)]


def _ring_all_gather(parts: Sequence[Tensor], group: dist.ProcessGroup, tag: int) -> None:
    """Pass every part (the i-th rank's is `parts[i]`) to the next rank, until all ranks have all parts.

    All receives are posted first: each has a buffer of its own.
    """
    for _ in _ring_gathered(parts, group, tag, nullcontext):
        pass


def _ring_gathered(parts: Sequence[Tensor], group: dist.ProcessGroup, tag: int, waiting: Waiting) -> Iterator[int]:
    """Yield the index of each part as soon as this rank has it, while the ring passes it on."""
    ranks = dist.get_process_group_ranks(group)
    members, rank = len(ranks), dist.get_rank(group)
    sender, receiver = ranks[(rank - 1) % members], ranks[(rank + 1) % members]
    receives = [
        _post_receives([(sender, parts[(rank - step - 1) % members])], group, tag) for step in range(members - 1)
    ]
    for step, pending in enumerate(receives):
        _post_sends([(receiver, parts[(rank - step) % members])], pending, group, tag)
        yield (rank - step) % members
        with waiting():
            pending.wait()
    yield (rank + 1) % members


def _ring_reduce_scatter(own: Tensor, flat: Tensor, ranges: Ranges, group: dist.ProcessGroup, tag: int) -> None:
    """Pass every part around the ring towards its owner, each rank adding its own values.

    A part is sent in two halves, each with a buffer of its own: while one is added, the other is in flight. In the last
    step the own part is received directly into `own`, so that two ranks need no buffer. If `own` is large enough, it
    also receives every other earlier part, so that receives are posted one step in advance.
    """
    ranks = dist.get_process_group_ranks(group)
    members, rank = len(ranks), dist.get_rank(group)
    sender, receiver = ranks[(rank + 1) % members], ranks[(rank - 1) % members]
    mine = flat[slice(*ranges[rank])]
    if members == 1:
        own.copy_(mine)
        return
    passing = [_halves(flat[slice(*ranges[(rank + 1 + step) % members])]) for step in range(members - 1)]
    buffers, ahead = _receive_buffers(passing, own)
    pending: dict[tuple[int, int], Pending] = {}

    def receive(step: int, half: int) -> None:
        if step < len(buffers):
            pending[step, half] = _post_receives([(sender, buffers[step][half])], group, tag)

    for step, half in product(range(1 + ahead), HALVES):
        receive(step, half)
    for step, half in product(range(members - 1), HALVES):
        if step:
            pending.pop((step - 1, half)).wait()
            passing[step][half].add_(buffers[step - 1][half])
            receive(step + ahead, half)
        _post_sends([(receiver, passing[step][half])], pending[step, half], group, tag)
    for half in HALVES:
        pending[members - 2, half].wait()
        buffers[-1][half].add_(_halves(mine)[half])


Halves = tuple[Tensor, Tensor]


def _receive_buffers(passing: Sequence[Halves], own: Tensor) -> tuple[list[Halves], int]:
    """Return the receive buffers of each step of a ring, and the number of steps by which receives are posted ahead.

    `passing`: the tensors sent in every step, to which those received in the step before are added.
    """
    owned = _halves(own)
    buffers = [own.new_empty(max((part[half].numel() for part in passing[1:]), default=0)) for half in HALVES]
    into_own = range(len(passing) - 3, -1, -2)
    ahead = all(passing[step + 1][half].numel() <= owned[half].numel() for step in into_own for half in HALVES)
    receive_buffers = []
    for step, (first, second) in enumerate(passing[1:]):
        chosen = owned if ahead and step in into_own else buffers
        receive_buffers.append((chosen[0][: first.numel()], chosen[1][: second.numel()]))
    return [*receive_buffers, owned], int(ahead)


HALVES = (0, 1)
WHOLE_BYTES = 2**20
"""Parts of at most this size are not halved: another message costs more than the overlap gains."""


def _halves(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return a part in two halves, the second empty if the part is small."""
    end = part.numel() // 2 if part.numel() * part.element_size() > WHOLE_BYTES else part.numel()
    return part[:end], part[end:]


Messages = Sequence[tuple[int, Tensor]]
"""(Peer, tensor) of each message."""


def _post(incoming: Messages, outgoing: Messages, group: dist.ProcessGroup, tag: int) -> Pending:
    """Post all receives, then all sends; empty ones are left out."""
    pending = _post_receives(incoming, group, tag)
    _post_sends(outgoing, pending, group, tag)
    return pending


def _post_receives(incoming: Messages, group: dist.ProcessGroup, tag: int) -> Pending:
    """Post receives; return the messages to wait for. Those of a device's backend are posted with the matching sends.

    gloo takes host memory: device tensors are staged.
    """
    pending, messages = Pending([], [], []), [message for message in incoming if message[1].numel()]
    if messages and runs_on_device(group, messages[0][1].device):
        pending.batch = [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in messages]
        return pending
    for peer, tensor in messages:
        host = tensor if tensor.device.type == "cpu" else _host_buffer(tensor)
        pending.add(dist.irecv(host, peer, group=group, tag=tag), host, target=tensor)
    return pending


def _host_buffer(tensor: Tensor) -> Tensor:
    """Return a buffer in the host's memory for a tensor of a device: pinned, so that copies take its full rate."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _post_sends(outgoing: Messages, pending: Pending, group: dist.ProcessGroup, tag: int) -> None:
    """Post sends, and add them to `pending`.

    nccl takes them and the receives as one batch: its kernels run one after another, and could otherwise deadlock. It
    has no tags.
    """
    messages = [message for message in outgoing if message[1].numel()]
    if pending.batch or (messages and runs_on_device(group, messages[0][1].device)):
        batch = [*pending.batch, *(dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in messages)]
        pending.batch = []
        works = dist.batch_isend_irecv(batch) if batch else []
        pending.add_batch(works, [operation.tensor for operation in batch])
        return
    for peer, tensor in messages:
        host = tensor if tensor.device.type == "cpu" else _host_buffer(tensor).copy_(tensor)
        pending.add(dist.isend(host, peer, group=group, tag=tag), host)
