"""Periodic synchronization of replicas' parameters: local SGD; outer steps of DiLoCo, streamed or not, and SparseLoCo.

What happens in an outer step, and in which order, is in [Note: periods] of `gssim.program.periodic`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gsreal.gradient_sharding.master import MasterCopy, master_type
from gsreal.measure import Timeline
from gsreal.methods.meshes import process_group
from gssim.plan import REPLICA_AXES
from gssim.plan.buckets import fragments_of
from gssim.plan.plan import (
    INT8_BLOCK_ELEMENTS,
    INT8_SCALE_BYTES,
    SparseOuter,
    chunks_of,
    int8_blocks,
    sparse_message_bytes,
)
from gssim.scenario import Scenario
from gssim.workload import unrolled

LARGEST = 127
"""Largest integer of a quantized change; -128 is not used."""


class Exchange(NamedTuple):
    """A bucket's exchange in flight."""

    work: dist.Work
    own: Tensor
    """What this rank sends."""
    received: Tensor
    """Tensor in which the sum, or all ranks' messages, arrive."""
    began: Any
    """Timeline mark of its beginning."""


class Synchronization:
    """Counts the steps of a training, and synchronizes the parameters after some of them (a collective).

    All parameters are synchronized after every n-th step. If the plan cuts them into fragments, each fragment has a
    step of its own, and its exchange overlaps with the following steps. If replicas are divided, a rank synchronizes
    its shards or slices (local tensors of DTensors) with `group`, the ranks that hold the same ones; None: all ranks
    hold all parameters.
    """

    def __init__(
        self,
        scenario: Scenario,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        timeline: Timeline,
        *,
        rank: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        plan, policies = scenario.plan, scenario.policies
        self.group = group
        self.same_slice = dist.group.WORLD
        """Ranks that hold the same slice of the model, and so the same module buffers."""
        self.first_rank = policies.mesh.group(rank, *REPLICA_AXES)[0]
        """The first of them."""
        if policies.tp > 1 and any(True for _ in module.buffers()):
            self.same_slice = process_group(policies.mesh, rank, *REPLICA_AXES)
        self.every = policies.sync_every_steps or 1
        self.steps = 0
        self.module, self.optimizer, self.timeline = module, optimizer, timeline
        own_samples = sum(scenario.batch_sizes[each] for each in policies.replica_of(rank))
        self.weight = own_samples / sum(scenario.batch_sizes)
        """Fraction of the batch that this rank's replica trains on."""
        self.alone = policies.dp_replicate == 1
        kind = None if self.alone else policies.outer_optimizer
        self.outer = plan.outer if kind == "nesterov" else None
        self.sparse = plan.sparse_outer if kind == "sparse" else None
        self.gathers = self.sparse is not None or (self.outer is not None and self.outer.precision == "int8")
        """Whether ranks all-gather messages of bytes instead of all-reducing tensors."""
        self.in_fragments = policies.in_fragments
        self.local_ratio = plan.streaming.local_ratio if policies.in_fragments else 0.0
        """Weight of a rank's own parameters in those after a synchronization."""
        layers = [each.index for each in unrolled(scenario.workload.model) for _ in each.layer.parameters]
        own = [_local(each) for each in module.parameters()]
        sizes = [each.numel() * master_type(each.dtype).itemsize for each in own]
        fragments = fragments_of(plan, policies, layers=layers, sizes_bytes=sizes)
        self.buckets = [bucket for fragment in fragments for bucket in fragment.buckets]
        """Positions of the tensors of every bucket, in the module's order."""
        numbered = enumerate(self.buckets)
        self.schedule = [
            (
                fragment.begin_step,
                fragment.end_step,
                [number for number, bucket in islice(numbered, len(fragment.buckets)) if any(sizes[i] for i in bucket)],
            )
            for fragment in fragments
        ]
        """For every fragment: the steps of a period, from 1, that begin and end its exchange, and its buckets of which
        this rank has a part.
        """
        buckets = self._values() if kind else []
        self.outer_parameters = [torch.cat([each.reshape(-1) for each in bucket]) for bucket in buckets]
        """Parameters after the last synchronization, by bucket; empty without an outer optimizer."""
        self.momentum = [torch.zeros_like(each) for each in self.outer_parameters] if self.outer else []
        self.unsent = [_chunks(self.sparse, each) for each in self.outer_parameters] if self.sparse else []
        """Changes that this rank has not sent yet, by bucket, in whole chunks."""
        self.in_flight: dict[int, Exchange] = {}
        """Exchanges in flight, by bucket."""

    @property
    def state(self) -> list[Tensor]:
        """Tensors that are kept between steps."""
        return [*self.outer_parameters, *self.momentum, *self.unsent]

    @property
    def measured_steps(self) -> int:
        """Number of steps at the end of a period that exchange everything and reach the peak memory: one, or all."""
        return self.every if self.in_fragments else 1

    def _values(self) -> list[list[Tensor]]:
        """Return the tensors to synchronize, by bucket: parameters, or their master copies."""
        values = [_local(parameter) for parameter in self.module.parameters()]
        if isinstance(self.optimizer, MasterCopy):
            masters = {id(parameter): _local(master) for parameter, master in self.optimizer.pairs()}
            values = [masters[id(parameter)] for parameter in self.module.parameters()]
        return [[values[position] for position in bucket] for bucket in self.buckets]

    @contextmanager
    def from_step(self, step: int) -> Iterator[None]:
        """Count steps from `step` on inside the context, so that measurements can repeat steps of any kind.

        Exchanges in flight are dropped; none of them may belong to the repeated steps.
        """
        self.finish()
        self.in_flight.clear()
        before, self.steps = self.steps, step
        yield
        self.steps = before

    def finish(self) -> None:
        """Wait for exchanges in flight, whose sums are used in a later step."""
        for each in self.in_flight.values():
            each.work.wait()

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step; begin and end the exchanges that are due after it."""
        self.steps += 1
        begun, ended = self.due()
        for number in begun:
            self._begin(number)
            if number in ended:
                self._end(number, f"outer step bucket {number}", waits_only=False)
        for number in ended:
            if number in self.in_flight:
                self._end(number, f"wait for outer step bucket {number}", waits_only=True)
        if ended and isinstance(self.optimizer, MasterCopy):
            parameters = list(self.module.parameters())
            positions = chain.from_iterable(self.buckets[number] for number in ended)
            self.optimizer.publish([parameters[position] for position in positions])
        if not self.alone and self.steps % self.every == 0:
            self._broadcast_buffers()

    def _begin(self, number: int) -> None:
        """Begin the exchange of a bucket."""
        own = self.offered(number)
        began, received = self.timeline.mark(), own
        if self.gathers:
            received = own.new_empty(dist.get_world_size(self.group) * own.numel())
            work = dist.all_gather_into_tensor(received, own, group=self.group, async_op=True)
        else:
            work = dist.all_reduce(own, group=self.group, async_op=True)
        assert work is not None
        self.in_flight[number] = Exchange(work, own, received, began)

    def _end(self, number: int, label: str, *, waits_only: bool) -> None:
        """Wait for the exchange of a bucket, and take its result.

        `waits_only`: the span with that label covers the wait alone, not the whole exchange.
        """
        exchange = self.in_flight.pop(number)
        began = self.timeline.mark() if waits_only else exchange.began
        exchange.work.wait()
        self.timeline.between(label, "exposed_communication", began, group=self.group or dist.group.WORLD)
        received = exchange.received
        del exchange  # frees what this rank sent before the result is used
        self.take(number, received)

    def due(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the buckets whose exchange begins, and whose ends, after the step that was counted last."""
        step = (self.steps - 1) % self.every + 1
        schedule = () if self.alone else self.schedule
        begun, ended = (
            [number for *steps, numbers in schedule if steps[place] == step for number in numbers] for place in (0, 1)
        )
        return begun, ended

    @torch.no_grad()
    def offered(self, number: int) -> Tensor:
        """Return what a rank adds to the sum of a bucket: its weighted parameters, or their weighted change.

        Where messages are gathered, it is the message that this rank sends.
        """
        bucket = self._values()[number]
        with self.timeline.span(f"copy in outer step bucket {number}", "optimizer"):
            flat = torch.cat([each.reshape(-1) for each in bucket])
            if self.outer_parameters:
                torch.sub(self.outer_parameters[number], flat, out=flat)
            flat.mul_(self.weight)
            if self.sparse:
                unsent, elements = self.unsent[number], flat.numel()
                unsent.view(-1)[:elements].mul_(self.sparse.decay).add_(flat)
                del flat
                message = send_largest(self.sparse, unsent)
                unsent.view(-1)[elements:].zero_()  # else rounding errors in the padding would grow
                return message
            return quantize(flat) if self.gathers else flat

    @torch.no_grad()
    def take(self, number: int, flat: Tensor) -> None:
        """Replace a bucket's tensors by the sum, or by the outer parameters after the outer optimizer's step.

        Where messages are gathered, `flat` holds those of all ranks.
        """
        bucket = self._values()[number]
        with self.timeline.span(f"copy out outer step bucket {number}", "optimizer"):
            if self.sparse:
                parameters = self.outer_parameters[number]
                flat = sum_of_largest(self.sparse, flat, like=parameters)
                flat = parameters.add_(flat, alpha=-self.sparse.learning_rate)
            elif self.gathers:
                flat = sum_of_quantized(flat, like=self.outer_parameters[number])
            if self.outer:
                momentum, parameters = self.momentum[number], self.outer_parameters[number]
                momentum.mul_(self.outer.momentum).add_(flat)
                flat.add_(momentum, alpha=self.outer.momentum)
                flat = parameters.add_(flat, alpha=-self.outer.learning_rate)
            parts = flat.split([each.numel() for each in bucket])
            for each, part in zip(bucket, parts, strict=True):
                if self.local_ratio:
                    each.lerp_(part.view_as(each), 1 - self.local_ratio)
                else:
                    each.copy_(part.view_as(each))

    def _broadcast_buffers(self) -> None:
        """Replace the module's buffers by the first rank's, those of a data type together."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for number, buffers in enumerate(by_type.values()):
            with self.timeline.span(f"broadcast buffers {number}", "exposed_communication", self.same_slice):
                flat = torch.cat([each.reshape(-1) for each in buffers])
                dist.broadcast(flat, src=self.first_rank, group=self.same_slice)
                for each, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    each.copy_(part.view_as(each))


def _local(parameter: Tensor) -> Tensor:
    """Return a parameter, or this rank's shard of it, detached from autograd."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def quantize(flat: Tensor) -> Tensor:
    """Return a message of bytes: 8-bit integers in whole blocks, then the scales of these; see `Outer.precision`."""
    blocks = int8_blocks(flat.numel())
    padded = flat.new_zeros(blocks, INT8_BLOCK_ELEMENTS)
    padded.view(-1)[: flat.numel()] = flat
    message = torch.empty(blocks * (INT8_BLOCK_ELEMENTS + INT8_SCALE_BYTES), dtype=torch.uint8, device=flat.device)
    integers, scales = _parts(message)
    scales.copy_(torch.linalg.vector_norm(padded, float("inf"), dim=1) / LARGEST)
    padded.div_(scales.clamp_min(torch.finfo(scales.dtype).tiny).to(padded.dtype)[:, None]).round_()
    integers.copy_(padded.clamp_(-LARGEST, LARGEST))
    return message


def sum_of_quantized(messages: Tensor, *, like: Tensor) -> Tensor:
    """Return the sum of all ranks' messages, one rank after another, as a tensor like `like`."""
    each = int8_blocks(like.numel()) * (INT8_BLOCK_ELEMENTS + INT8_SCALE_BYTES)
    total = like.new_zeros(int8_blocks(like.numel()), INT8_BLOCK_ELEMENTS)
    for message in messages.split(each):
        integers, scales = _parts(message)
        total.addcmul_(integers.to(total.dtype), scales.to(total.dtype)[:, None])
    return total.view(-1)[: like.numel()]


def _chunks(options: SparseOuter, like: Tensor) -> Tensor:
    """Return zeros for the elements of a tensor like `like`, in whole chunks: (chunks, elements of a chunk)."""
    return like.new_zeros(chunks_of(options, like.numel()), options.chunk_elements)


def send_largest(options: SparseOuter, unsent: Tensor) -> Tensor:
    """Return a message with the largest changes of every chunk; the values it encodes are subtracted from `unsent`.

    See `SparseOuter` for its contents, and `_read` for their order.
    """
    places = unsent.abs().topk(options.chunk_entries, sorted=False).indices
    values = unsent.gather(1, places)
    message = torch.empty(
        sparse_message_bytes(options, unsent.numel(), unsent.itemsize), dtype=torch.uint8, device=unsent.device
    )
    indices, kept, magnitudes = _sections(options, message, unsent)
    indices.copy_(places)
    if magnitudes is None:
        kept.copy_(values)
    else:
        sizes = values.abs()
        large = sizes > sizes.mean(1, keepdim=True)
        for column, chosen in enumerate((~large, large)):
            magnitudes[:, column] = (sizes * chosen).sum(1) / chosen.sum(1).clamp_min(1)
        codes = nn.functional.pad((values < 0) + 2 * large.to(torch.uint8), (0, -options.chunk_entries % 4))
        kept.copy_((codes.view(len(codes), -1, 4) << _places(codes)).sum(-1))
    places, values = _read(options, message, unsent)
    unsent.scatter_add_(1, places, values.neg_())
    return message


def sum_of_largest(options: SparseOuter, messages: Tensor, *, like: Tensor) -> Tensor:
    """Return the sum of all ranks' messages, added in the order of ranks, as a flat tensor as large as `like`."""
    total = _chunks(options, like)
    for message in messages.split(sparse_message_bytes(options, like.numel(), like.itemsize)):
        total.scatter_add_(1, *_read(options, message, like))
    return total.view(-1)[: like.numel()]


def _read(options: SparseOuter, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values in a message: (chunks, entries of a chunk)."""
    indices, kept, magnitudes = _sections(options, message, like)
    if magnitudes is None:
        return indices.long(), kept.clone()
    codes = (kept[..., None] >> _places(kept)).view(len(kept), -1)[:, : options.chunk_entries] & 3
    values = magnitudes.to(like.dtype).gather(1, (codes >> 1).long())
    return indices.long(), values.mul_(1 - 2 * (codes & 1).to(like.dtype))


def _places(codes: Tensor) -> Tensor:
    """Return the bits at which the four codes of a byte begin."""
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)


def _sections(options: SparseOuter, message: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return views of a message, by chunk: indices; values, or codes and their two magnitudes.

    The widest numbers lie first, so that all are aligned.
    """
    chunks, entries = chunks_of(options, like.numel()), options.chunk_entries
    coded = options.precision == "int2"
    widths = (8, 2 * entries, -(-entries // 4)) if coded else (entries * like.itemsize, 2 * entries, 0)
    sizes = [width * chunks for width in widths]
    wide, indices, codes = (part.view(chunks, -1) for part in message[: sum(sizes)].split(sizes))
    if coded:
        return indices.view(torch.int16), codes, wide.view(torch.float32)
    return indices.view(torch.int16), wide.view(like.dtype), None


def _parts(message: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a message: integers (blocks, elements of a block) and scales (blocks)."""
    blocks = message.numel() // (INT8_BLOCK_ELEMENTS + INT8_SCALE_BYTES)
    elements = blocks * INT8_BLOCK_ELEMENTS
    return message[:elements].view(torch.int8).view(blocks, -1), message[elements:].view(torch.float32)
