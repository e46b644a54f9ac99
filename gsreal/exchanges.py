"""Point-to-point exchanges that gloo lacks or does badly: uneven all-to-all and uneven all-gather.

Receives are posted before sends: gloo's note that a receive is ready travels behind payload that is already queued to
the same peer, which wastes up to 40 % of a link otherwise. What a logical collective is made of is announced with
`logical`, so that an observer of the process group can tell its messages from others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Logical:
    """A collective made of point-to-point messages: its kind, group and this rank's part of its size."""

    kind: str
    group: tuple[int, ...]
    declared_bytes: int
    """all-gather-v: the full output; all-to-all-v: what this rank would send densely."""
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
) -> Pending:
    """Send `sends[i]` to the group's i-th rank and receive `receives[i]` from it; None and empty ones are left out.

    Both ends must agree on every size. Returns at once; wait on what it returns.
    """
    rank, ranks = dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    others = [(rank + k) % len(ranks) for k in range(1, len(ranks))]
    with logical(Logical("all-to-all-v", tuple(sorted(ranks)), declared_bytes, data_dependent)):
        incoming = [
            (ranks[i], tensor) for i in reversed(others) if (tensor := receives[i]) is not None and tensor.numel()
        ]
        outgoing = [(ranks[i], tensor) for i in others if (tensor := sends[i]) is not None and tensor.numel()]
        return _post(incoming, outgoing, group)


def all_gather_v(flat: Tensor, ranges: Sequence[tuple[int, int]], *, group: dist.ProcessGroup) -> None:
    """Fill `flat` in place on every rank: the i-th rank of the group owns `flat[ranges[i][0]:ranges[i][1]]`.

    A ring: every link carries all but one part, whatever the shares. Returns when this rank's copy is complete.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    members, rank = len(ranks), dist.get_rank(group)
    full_bytes = flat.numel() * flat.element_size()
    with logical(Logical("all-gather-v", tuple(sorted(ranks)), full_bytes, data_dependent=False)):
        for step in range(members - 1):
            mine, theirs = ranges[(rank - step) % members], ranges[(rank - step - 1) % members]
            incoming = [(ranks[(rank - 1) % members], flat[slice(*theirs)])]
            outgoing = [(ranks[(rank + 1) % members], flat[slice(*mine)])]
            _post(incoming, outgoing, group).wait()


def _post(
    incoming: Sequence[tuple[int, Tensor]], outgoing: Sequence[tuple[int, Tensor]], group: dist.ProcessGroup
) -> Pending:
    """Post all receives, then all sends; empty ones are left out. gloo takes host memory: device tensors are staged."""
    incoming, outgoing = ([(peer, t) for peer, t in messages if t.numel()] for messages in (incoming, outgoing))
    if dist.get_backend(group) == "nccl":
        operations = [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in incoming]
        operations += [dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in outgoing]
        batch = dist.batch_isend_irecv(operations) if operations else []
        return Pending(batch, [tensor for _, tensor in (*incoming, *outgoing)], [])
    works: list[dist.Work | None] = []
    kept, staged = [], []
    for peer, tensor in incoming:
        host = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_cuda else tensor
        if host is not tensor:
            staged.append((tensor, host))
        works.append(dist.irecv(host, peer, group=group))
        kept.append(host)
    for peer, tensor in outgoing:
        host = tensor.cpu() if tensor.is_cuda else tensor
        works.append(dist.isend(host, peer, group=group))
        kept.append(host)
    return Pending([work for work in works if work is not None], kept, staged)
