"""Ring attention: keys and values rotate among context-parallel ranks, and each attends to a block at a time.

With `plan.context_exchange = "gather"` they are all-gathered instead, at once, while a rank attends to its own. With
`plan.context_overlap = false` each exchange is waited for as soon as it has begun.

In the forward, a rank sends the keys and values that it has to the next rank while it attends to them. It merges the
block's output into its own by the log-sum-exp of both (Liu et al. 2023, Ring Attention, arXiv:2310.01889). In the
backward, keys and values rotate again, and their gradients follow one block behind: each rank adds its own, and a last
shift brings them home. A block's gradients are exact given the output and log-sum-exp of the whole row (Dao 2023,
FlashAttention-2, arXiv:2307.08691, algorithm 2). Which positions a rank has, and which blocks it computes:
`gssim.plan.context_blocks`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.gradient_sharding.point_to_point import all_gather_directly, all_to_all_v
from gsreal.measure import Timeline
from gssim.errors import UserError
from gssim.plan import Block, ring_blocks

_forward: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KEYS, GRADIENTS = 1, 2
"""Tags of messages."""


class Arrival(Protocol):
    """A tensor on its way."""

    def wait(self) -> None:
        """Block until it has arrived, and this rank's own tensor was sent."""
        ...


class Ring(NamedTuple):
    """The ranks that divide sequences, as a ring; `shift` sends a tensor to the next and receives one like it."""

    ranks: int
    rank: int
    zigzag: bool
    overlaps: bool
    """Whether a block is attended to during an exchange; else each is waited for at once."""
    shift: Callable[[Tensor, Tensor, int], Arrival]
    gather: Callable[[Tensor, Tensor], Arrival] | None
    """Fills its first argument with the second of every rank; None: keys and values rotate."""
    number: int
    """Its place in `_RINGS`."""

    def blocks(self, *, causal: bool) -> tuple[Block | None, ...]:
        """Return the blocks of this rank, in their order."""
        return ring_blocks(self.rank, ranks=self.ranks, causal=causal, zigzag=self.zigzag)

    def room(self, own: Tensor) -> Tensor | None:
        """Return memory for the keys and values of all ranks, if these are gathered; `own`: this rank's."""
        return own.new_empty((self.ranks, *own.shape)) if self.gather else None

    def pass_on(self, step: int, held: Tensor, own: Tensor, every: Tensor | None) -> tuple[Tensor, Arrival | None]:
        """Return the keys and values of the next step, and their arrival, unless they are there, as always without
        overlap.

        `held`: this step's. `every`: those of all ranks, from `room`.
        """
        if step + 1 == self.ranks:
            return held, None
        if every is not None and self.gather is not None:
            arrival = self.gather(every, own) if step == 0 else None
            received = every[(self.rank - step - 1) % self.ranks]
        else:
            received = torch.empty_like(own)
            arrival = self.shift(held, received, KEYS)
        if arrival is None or self.overlaps:
            return received, arrival
        arrival.wait()
        return received, None


def _parts(block: Block, queries: int, keys: int) -> tuple[slice, slice]:
    """Return the queries and keys of a block."""
    return slice(block.first_half * queries // 2, queries), slice(0, block.key_halves * keys // 2)


_RINGS: list[Ring] = []
"""All rings of this process, by number: arguments of a torch operation are numbers and tensors alone."""


def _attend(query: Tensor, own: Tensor, ring: int, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return a rank's output and log-sum-exp; `own`: its keys and values, `ring`: the number of the ring."""
    held, every = own, _RINGS[ring].room(own)
    for step, block in enumerate(_RINGS[ring].blocks(causal=causal)):
        received, arrival = _RINGS[ring].pass_on(step, held, own, every)
        if step == 0:
            assert block is not None  # a rank's own positions see each other
            out, sums = _forward(query, *held, 0.0, block.causal, scale=scale)
        elif block is not None:
            rows, seen = _parts(block, query.shape[2], own.shape[3])
            _merge(out[:, :, rows], sums[:, :, rows], *_forward(query[:, :, rows], *held[..., seen, :], scale=scale))
        if arrival is not None:
            arrival.wait()
        held = received
    return out, sums


_LIBRARY = torch.library.Library("gsreal", "FRAGMENT")
_LIBRARY.define(
    "ring_attention(Tensor query, Tensor keys_values, int ring, bool causal, float? scale) -> (Tensor, Tensor)"
)
_LIBRARY.impl("ring_attention", _attend, "CPU")
RING_ATTENTION: Any = torch.ops.gsreal.ring_attention.default
"""The forward as one operation, whose outputs selective checkpointing can keep: nothing is then sent again."""


class RingAttention(torch.autograd.Function):
    """Attention of a rank's queries (batch, heads, positions, width) to the keys and values of all ranks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, causal: bool, scale: float | None) -> Tensor:
        """Return the output, shaped as `q`; keys and values may have fewer heads."""
        query, own = q.clone(memory_format=torch.contiguous_format), torch.stack((k, v))
        ctx.ring, ctx.causal, ctx.scale = ring, causal, scale
        out, sums = RING_ATTENTION(query, own, ring.number, causal, scale)
        ctx.save_for_backward(query, own, out, sums)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        query, own, out, sums = ctx.saved_tensors
        ring, (of_out,) = ctx.ring, gradients
        held, arriving, returning = own, own, None
        every = ring.room(own)
        of_query: Tensor | None = None
        travelling: Tensor | None
        for step, block in enumerate(ring.blocks(causal=ctx.causal)):
            received, arrival = ring.pass_on(step, held, own, every)
            of_block: tuple[Tensor, ...] = ()
            whole: tuple[Tensor, ...] = ()
            if block is not None:
                rows, seen = _parts(block, query.shape[2], own.shape[3])
                whole = of_out[:, :, rows], query[:, :, rows], *held[..., seen, :], out[:, :, rows], sums[:, :, rows]
                of_block = _backward(*whole, 0.0, block.causal, scale=ctx.scale)
                of_query = of_block[0] if of_query is None else of_query
                if step:
                    of_query[:, :, rows].add_(of_block[0])
            if returning is not None:
                returning.wait()
            if step == 0:
                travelling = torch.stack(of_block[1:])
            else:
                travelling = arriving
                if block is not None:  # no loop: its variable would keep a gradient alive until the next block's
                    travelling[0, :, :, seen].add_(of_block[1])
                    travelling[1, :, :, seen].add_(of_block[2])
            of_block = whole = ()
            arriving = torch.empty_like(own)
            returning = ring.shift(travelling, arriving, GRADIENTS)
            if not ring.overlaps:
                returning.wait()
                returning = travelling = None  # what was sent is freed
            if arrival is not None:
                arrival.wait()
            held = received
        if returning is not None:
            returning.wait()
        return of_query, arriving[0], arriving[1], None, None, None


def _merge(out: Tensor, sums: Tensor, block_out: Tensor, block_sums: Tensor) -> None:
    """Merge the output and the log-sum-exp of a block into those of the blocks before it."""
    both = torch.logaddexp(sums, block_sums)
    out.mul_((sums - both).exp_().to(out.dtype).unsqueeze(-1))
    out.add_(block_out.mul_((block_sums - both).exp_().to(out.dtype).unsqueeze(-1)))
    sums.copy_(both)


def observed_ring(group: dist.ProcessGroup, timeline: Timeline, *, zigzag: bool, gathers: bool, overlaps: bool) -> Ring:
    """Return the ranks of a group as a ring, whose waits are recorded as spans.

    `gathers`: whether keys and values are gathered at once; `overlaps`: as of `Ring`.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    class Waiting:
        def __init__(self, arrival: Arrival, name: str) -> None:
            self.arrival, self.name = arrival, name

        def wait(self) -> None:
            with timeline.span(self.name, "exposed_communication", group):
                self.arrival.wait()

    def shift(sent: Tensor, received: Tensor, tag: int) -> Arrival:
        sends: list[Tensor | None] = [None] * ranks
        receives: list[Tensor | None] = [None] * ranks
        sends[(rank + 1) % ranks], receives[(rank - 1) % ranks] = sent, received
        return Waiting(all_to_all_v(sends, receives, group=group, declared_bytes=sent.nbytes, tag=tag), "rotate")

    def gather(every: Tensor, own: Tensor) -> Arrival:
        return Waiting(all_gather_directly(every, own, group=group, tag=KEYS), "all-gather keys")

    _RINGS.append(Ring(ranks, rank, zigzag, overlaps, shift, gather if gathers else None, number=len(_RINGS)))
    return _RINGS[-1]


def attend_in_ring(ring: Ring, query: Tensor, key: Tensor, value: Tensor, *others: Any, **settings: Any) -> Tensor:
    """Return the attention of torch's scaled_dot_product_attention, to the keys and values of all ranks.

    In its memory the heads of one position lie side by side, as the following linear map reads them: the map needs no
    copy, and what the attention wrote is freed here where no backward needs it, whatever variables the module has.
    """
    names = ("attn_mask", "dropout_p", "is_causal")
    settings = dict(zip(names, others, strict=False)) | settings
    if settings.get("attn_mask") is not None or query.shape[2] != key.shape[2]:
        raise UserError(
            "plan.cp: attention with a mask, or from one sequence to another, cannot be divided among ranks"
        )
    if settings.get("dropout_p"):
        raise UserError(
            "plan.context_exchange: an attention with dropout cannot run in blocks yet; allowed: 'all-to-all'"
        )
    if query.device.type != "cpu":
        raise UserError("plan.context_exchange: blocks run on CPUs only yet; allowed on GPUs: 'all-to-all'")
    output: Tensor = RingAttention.apply(
        query, key, value, ring, bool(settings.get("is_causal")), settings.get("scale")
    )
    return output.transpose(1, 2).contiguous().transpose(1, 2)
