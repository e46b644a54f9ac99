"""Periodic synchronization of replicated parameters: local SGD, and DiLoCo's outer Nesterov step.

What happens in an outer step, and in which order, is in [Note: periods] of `gssim.program.periodic`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.gradient_sharding.master import MasterCopy, master_type
from gsreal.measure import Timeline
from gsreal.methods.training import Training, make_optimizer
from gssim.plan import INT8_BLOCK_ELEMENTS, INT8_SCALE_BYTES, assign_buckets, int8_blocks
from gssim.scenario import Scenario

LARGEST = 127
"""Largest integer of a quantized change; -128 is not used."""


def synchronize_periodically(
    scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device
) -> Training:
    """Train apart with an optimizer on every rank, and synchronize the parameters every few steps."""
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    # 0: every rank trains on the mean of its own loss
    return Training(
        module,
        optimizer,
        timeline,
        scale=0.0,
        periods=Synchronization(scenario, module, optimizer, timeline, rank=dist.get_rank()),
    )


class Synchronization:
    """Counts the steps of a training, and ends every n-th of them with a synchronization (a collective)."""

    def __init__(
        self,
        scenario: Scenario,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        timeline: Timeline,
        *,
        rank: int,
    ) -> None:
        self.every = scenario.policies.sync_every_steps or 1
        self.steps = 0
        self.module, self.optimizer, self.timeline = module, optimizer, timeline
        self.weight = scenario.batch_sizes[rank] / sum(scenario.batch_sizes) if scenario.ranks > 1 else 1.0
        self.alone = scenario.ranks == 1
        self.outer = scenario.plan.outer if scenario.policies.outer_optimizer and not self.alone else None
        self.quantized = self.outer is not None and self.outer.precision == "int8"
        """Whether ranks gather each other's messages, of bytes, instead of adding up tensors."""
        tensors = list(module.parameters())
        sizes = [each.numel() * master_type(each.dtype).itemsize for each in tensors]
        cap = scenario.plan.bucket_bytes
        self.buckets = assign_buckets(sizes, first_bytes=cap, cap_bytes=cap)
        buckets = self._values() if self.outer else []
        self.outer_parameters = [torch.cat([each.reshape(-1) for each in bucket]) for bucket in buckets]
        """Parameters after the last synchronization, by bucket; empty without an outer optimizer."""
        self.momentum = [torch.zeros_like(each) for each in self.outer_parameters]

    @property
    def state(self) -> list[Tensor]:
        """Tensors that are kept between steps."""
        return [*self.outer_parameters, *self.momentum]

    def _values(self) -> list[list[Tensor]]:
        """Return what is synchronized of every bucket: parameters, or their master copies."""
        values = [parameter.detach() for parameter in self.module.parameters()]
        if isinstance(self.optimizer, MasterCopy):
            masters = {id(parameter): master.detach() for parameter, master in self.optimizer.pairs()}
            values = [masters[id(parameter)] for parameter in self.module.parameters()]
        return [[values[position] for position in bucket] for bucket in self.buckets]

    @contextmanager
    def from_step(self, step: int) -> Iterator[None]:
        """Number the steps inside from `step` on: measurements repeat steps of either kind."""
        before, self.steps = self.steps, step
        yield
        self.steps = before

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step; synchronize where it is an outer one."""
        self.steps += 1
        numbers = self.due()
        if not numbers:
            return
        for number in numbers:
            flat = self.offered(number)
            with self.timeline.span(f"outer step bucket {number}", "exposed_communication", dist.group.WORLD):
                if self.quantized:
                    own, flat = flat, flat.new_empty(dist.get_world_size() * flat.numel())
                    dist.all_gather_into_tensor(flat, own)
                    del own
                else:
                    dist.all_reduce(flat)
            self.take(number, flat)
            del flat  # before the next bucket's, or both would be held at once
        if isinstance(self.optimizer, MasterCopy):
            self.optimizer.publish()
        self._broadcast_buffers()

    def due(self) -> Sequence[int]:
        """Return the buckets that are synchronized after the step that was counted last; none after an inner one."""
        return () if self.alone or self.steps % self.every else range(len(self.buckets))

    @torch.no_grad()
    def offered(self, number: int) -> Tensor:
        """Return what a rank adds to the sum of a bucket: its weighted parameters, or their weighted change.

        Quantized: the message that it sends.
        """
        bucket = self._values()[number]
        with self.timeline.span(f"copy in outer step bucket {number}", "optimizer"):
            flat = torch.cat([each.reshape(-1) for each in bucket])
            if self.outer:
                torch.sub(self.outer_parameters[number], flat, out=flat)
            flat.mul_(self.weight)
            return quantize(flat) if self.quantized else flat

    @torch.no_grad()
    def take(self, number: int, flat: Tensor) -> None:
        """Replace a bucket's tensors by the sum, or by the outer parameters after the outer optimizer's step.

        Quantized: `flat` holds the messages of all ranks.
        """
        bucket = self._values()[number]
        with self.timeline.span(f"copy out outer step bucket {number}", "optimizer"):
            if self.quantized:
                flat = sum_of_quantized(flat, like=self.outer_parameters[number])
            if self.outer:
                momentum, parameters = self.momentum[number], self.outer_parameters[number]
                momentum.mul_(self.outer.momentum).add_(flat)
                flat.add_(momentum, alpha=self.outer.momentum)
                flat = parameters.add_(flat, alpha=-self.outer.learning_rate)
            parts = flat.split([each.numel() for each in bucket])
            for each, part in zip(bucket, parts, strict=True):
                each.copy_(part.view_as(each))

    def _broadcast_buffers(self) -> None:
        """Replace the module's buffers by the first rank's, those of a data type together."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for number, buffers in enumerate(by_type.values()):
            with self.timeline.span(f"broadcast buffers {number}", "exposed_communication", dist.group.WORLD):
                flat = torch.cat([each.reshape(-1) for each in buffers])
                dist.broadcast(flat, src=0)
                for each, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    each.copy_(part.view_as(each))


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


def _parts(message: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a message: integers (blocks, elements of a block) and scales (blocks)."""
    blocks = message.numel() // (INT8_BLOCK_ELEMENTS + INT8_SCALE_BYTES)
    elements = blocks * INT8_BLOCK_ELEMENTS
    return message[:elements].view(torch.int8).view(blocks, -1), message[elements:].view(torch.float32)
