"""Point-to-point exchanges that gloo lacks or does badly: uneven all-to-all, ring all-gather and ring reduce-scatter.

Receives are posted before sends: gloo's note that a receive is ready travels behind payload that is already queued to
the same peer, which wastes up to 40 % of a link otherwise. What a logical collective is made of is announced with
`logical`, so that an observer of the process group can tell its messages from others: it is the same entry as that of
the stock collective in its place, however it is carried out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HOST_BACKENDS = ("gloo", "mpi")
"""Those whose exchanges the host makes and waits for, by messages that have tags."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that carries a device's tensors in a group.

    A group may have several, by device (`init_process_group()` without a name). Raises ValueError where none carries
    such tensors.
    """
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":") for pair in config.split(","))
    if device.type not in backends:
        raise ValueError(f"the process group ({config}) cannot carry tensors that are on '{device.type}'")
    return backends[device.type]


def is_staged(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether messages of a device's tensors go through the host's memory: gloo takes no other."""
    return device.type != "cpu" and backend_of(group, device) in HOST_BACKENDS


def runs_on_device(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's exchanges are work of the device's streams, for which the host need not wait."""
    return device.type != "cpu" and not is_staged(group, device)


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
        self.batch: list[dist.P2POp] = []
        """Receives that are posted with the sends."""

    def add(self, work: dist.Work | None, host: Tensor, *, target: Tensor | None = None) -> None:
        """Wait for one more message as well; what comes into `host` is copied to `target` where that is another."""
        if work is not None:
            self._works.append(work)
        self._kept.append(host)
        if target is not None and target is not host:
            self._staged.append((target, host))

    def add_batch(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        """Wait for a batch of messages as well."""
        self._works.extend(works)
        self._kept.extend(tensors)

    def end(self) -> None:
        """Block until every message is done."""
        for work in self._works:
            work.wait()
        self._works = []

    def wait(self) -> None:
        """Block until every message is done, then let go of the buffers."""
        self.end()
        for target, host in self._staged:
            target.copy_(host)
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

    Both ends must agree on every size. Returns at once; wait on what it returns. Where not `point_to_point`, the
    backend's `all_to_all_single` carries them, from and to a flat copy. `tag`: of the messages; see `protocol`.
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
    carried_on = torch.device("cpu") if is_staged(group, device) else device
    gone = torch.cat(outgoing).to(carried_on)
    come = torch.empty(sum(received), dtype=torch.uint8, device=carried_on)
    pending = Pending([], [], [])
    pending.add(dist.all_to_all_single(come, gone, received, sent, group=group, async_op=True), gone)
    for target, part in zip(incoming, come.split(received), strict=True):
        pending.add(None, part, target=target)
    return pending


Ranges = Sequence[tuple[int, int]]
"""(First, end) of what each rank of a group owns in a flat tensor."""


def all_gather_v(flat: Tensor, ranges: Ranges, *, group: dist.ProcessGroup, tag: int = 0) -> None:
    """Fill `flat` in place on every rank: the i-th rank of the group owns `flat[ranges[i][0]:ranges[i][1]]`.

    A ring: every link carries all but one part, whatever the shares. Returns when this rank's copy is complete.
    """
    with logical(_whole("all-gather-v", flat, group)):
        _gather_round_ring([flat[slice(*places)] for places in ranges], group, tag)


def all_gather_messages(
    messages: Sequence[Tensor], *, group: dist.ProcessGroup, declared_bytes: int, tag: int = 0
) -> int:
    """Bring the message of every rank of the group to all: the i-th's is `messages[i]`, elsewhere a buffer for it.

    All ranks must agree on every size; `declared_bytes`: of all of them, were they dense. A ring, as `all_gather_v`:
    messages to everybody take as many bytes in any order, but passed on they load no link with more than all of them
    but one, where an owner that sent its own to each would send it (ranks - 1) times. Returns the bytes that this rank
    sent, once all have come.
    """
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    with logical(Logical("all-gather-v", ranks, declared_bytes, data_dependent=True)):
        _gather_round_ring(messages, group, tag)
    following = (dist.get_rank(group) + 1) % len(ranks)
    return sum(each.numel() * each.element_size() for i, each in enumerate(messages) if i != following)


def post_to_all(
    messages: Sequence[Tensor],
    *,
    group: dist.ProcessGroup,
    declared_bytes: int,
    data_dependent: bool = False,
    tag: int = 0,
) -> Pending:
    """Begin to bring the message of every rank of the group to all, as `all_gather_messages` does, in one go.

    Each rank sends its own to everybody, so that nobody has anything to pass on while it computes. Returns at once.
    """
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    others = [(rank + k) % len(ranks) for k in range(1, len(ranks))]
    with logical(Logical("all-gather-v", tuple(sorted(ranks)), declared_bytes, data_dependent)):
        incoming = [(ranks[i], messages[i]) for i in reversed(others)]
        outgoing = [(ranks[i], messages[rank]) for i in others]
        return _post(incoming, outgoing, group, tag)


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


def all_gather_into_tensor(output: Tensor, own: Tensor, *, group: dist.ProcessGroup, tag: int = 0) -> None:
    """Do what `dist.all_gather_into_tensor` does, by a ring that writes every part where it belongs.

    No buffer is taken; nothing is copied where `own` is this rank's part of `output` already.
    """
    ranges = _even(output, group)
    part = output.view(-1)[slice(*ranges[dist.get_rank(group)])]
    if part.data_ptr() != own.data_ptr():
        part.copy_(own.reshape(-1))
    with logical(_whole("all-gather", output, group)):
        _gather_round_ring([output.view(-1)[slice(*places)] for places in ranges], group, tag)


def reduce_scatter_v(
    own: Tensor, flat: Tensor, ranges: Ranges, *, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM, tag: int = 0
) -> None:
    """Fill `own` with the sum (or the average) over all ranks of the part of `flat` that this rank owns.

    `flat` serves as working space: its content is lost.
    """
    _check(op)
    with logical(_whole("reduce-scatter-v", flat, group)):
        _reduce_round_ring(own, flat, ranges, group, tag)
    _average(own, op, group)


def reduce_scatter_tensor(own: Tensor, flat: Tensor, *, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Do what `dist.reduce_scatter_tensor` does, by a ring: gloo's own moves an all-reduce's bytes.

    `flat` serves as working space: its content is lost. Among more than two ranks, takes a buffer of one part.
    """
    _check(op)
    with logical(_whole("reduce-scatter", flat, group)):
        _reduce_round_ring(own.view(-1), flat.view(-1), _even(flat, group), group, tag=0)
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


def _gather_round_ring(parts: Sequence[Tensor], group: dist.ProcessGroup, tag: int) -> None:
    """Pass every part, of the i-th rank `parts[i]`, on to the next rank, until all have all.

    All receives are posted at first: each has a place of its own.
    """
    ranks = dist.get_process_group_ranks(group)
    members, rank = len(ranks), dist.get_rank(group)
    before, after = ranks[(rank - 1) % members], ranks[(rank + 1) % members]
    coming = [_receiving([(before, parts[(rank - step - 1) % members])], group, tag) for step in range(members - 1)]
    for step, pending in enumerate(coming):
        _send([(after, parts[(rank - step) % members])], pending, group, tag)
        pending.wait()


def _reduce_round_ring(own: Tensor, flat: Tensor, ranges: Ranges, group: dist.ProcessGroup, tag: int) -> None:
    """Pass every part round towards its owner, each rank adding its own to it.

    A part goes in two halves, each with a buffer of its own: while one is added, the other is under way. In the last
    step the own part comes, straight into `own`, so that two ranks need no buffer. Where `own` is large enough, every
    other part before that comes into it too, so that receives are posted one step ahead.
    """
    ranks = dist.get_process_group_ranks(group)
    members, rank = len(ranks), dist.get_rank(group)
    above, below = ranks[(rank + 1) % members], ranks[(rank - 1) % members]
    mine = flat[slice(*ranges[rank])]
    if members == 1:
        own.copy_(mine)
        return
    passing = [_halves(flat[slice(*ranges[(rank + 1 + step) % members])]) for step in range(members - 1)]
    places, ahead = _arrivals(passing, own)
    coming: dict[tuple[int, int], Pending] = {}

    def receive(step: int, half: int) -> None:
        if step < len(places):
            coming[step, half] = _receiving([(above, places[step][half])], group, tag)

    for step, half in product(range(1 + ahead), HALVES):
        receive(step, half)
    for step, half in product(range(members - 1), HALVES):
        if step:
            coming.pop((step - 1, half)).wait()
            passing[step][half].add_(places[step - 1][half])
            receive(step + ahead, half)
        _send([(below, passing[step][half])], coming[step, half], group, tag)
    for half in HALVES:
        coming[members - 2, half].wait()
        places[-1][half].add_(_halves(mine)[half])


Halves = tuple[Tensor, Tensor]


def _arrivals(passing: Sequence[Halves], own: Tensor) -> tuple[list[Halves], int]:
    """Return where what comes in every step of such a ring is received, and how many steps ahead that may be posted.

    `passing`: what is sent in every step, to which what came in the step before is added.
    """
    owned = _halves(own)
    buffers = [own.new_empty(max((part[half].numel() for part in passing[1:]), default=0)) for half in HALVES]
    into_own = range(len(passing) - 3, -1, -2)
    ahead = all(passing[step + 1][half].numel() <= owned[half].numel() for step in into_own for half in HALVES)
    places = []
    for step, (first, second) in enumerate(passing[1:]):
        there = owned if ahead and step in into_own else buffers
        places.append((there[0][: first.numel()], there[1][: second.numel()]))
    return [*places, owned], int(ahead)


HALVES = (0, 1)
WHOLE_BYTES = 2**20
"""Parts of at most this are not halved: a further message costs more than what it hides."""


def _halves(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return a part in two, the second empty where the part is small."""
    end = part.numel() // 2 if part.numel() * part.element_size() > WHOLE_BYTES else part.numel()
    return part[:end], part[end:]


Messages = Sequence[tuple[int, Tensor]]
"""(Peer, tensor) of each."""


def _post(incoming: Messages, outgoing: Messages, group: dist.ProcessGroup, tag: int) -> Pending:
    """Post all receives, then all sends; empty ones are left out."""
    pending = _receiving(incoming, group, tag)
    _send(outgoing, pending, group, tag)
    return pending


def _receiving(incoming: Messages, group: dist.ProcessGroup, tag: int) -> Pending:
    """Post receives; return what to wait for. Those of a device's backend wait for the sends that go with them.

    gloo takes host memory: device tensors are staged.
    """
    pending, some = Pending([], [], []), [message for message in incoming if message[1].numel()]
    if some and runs_on_device(group, some[0][1].device):
        pending.batch = [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in some]
        return pending
    for peer, tensor in some:
        host = tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape, dtype=tensor.dtype)
        pending.add(dist.irecv(host, peer, group=group, tag=tag), host, target=tensor)
    return pending


def _send(outgoing: Messages, pending: Pending, group: dist.ProcessGroup, tag: int) -> None:
    """Post sends, for `pending` to wait for as well.

    nccl takes them and the receives as one batch: its kernels run one after another, and could wait for each other. It
    knows no tags.
    """
    some = [message for message in outgoing if message[1].numel()]
    if pending.batch or (some and runs_on_device(group, some[0][1].device)):
        batch = [*pending.batch, *(dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in some)]
        pending.batch = []
        works = dist.batch_isend_irecv(batch) if batch else []
        pending.add_batch(works, [operation.tensor for operation in batch])
        return
    for peer, tensor in some:
        host = tensor.cpu()
        pending.add(dist.isend(host, peer, group=group, tag=tag), host)
