"""Trains a model as Gradient Sharding does, with every rank's gradient computed in turn on one device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from gsreal.gradient_sharding.master import MasterCopy, master_type
from gsreal.gradient_sharding.messages import Scratch, Thresholds
from gsreal.measure import Timeline
from gsreal.methods.optimizers import make_optimizer
from gsreal.model_files.build import autocast, logits_of, loss_of
from gsreal.run.feed import Feed
from gsreal.run.worker import build
from gssim.plan import Push, assign_buckets, bucket_limits, ranges
from gssim.scenario import Scenario, single_device
from gssim.workload import gradient_order, unrolled

CPU = torch.device("cpu")
Gradients = dict[str, Tensor]
"""Gradients by parameter name."""


class Replica:
    """The scenario's model on one device, trained by the gradients that all ranks would send under a push policy."""

    def __init__(self, scenario: Scenario, push: Push, device: torch.device = CPU) -> None:
        self.scenario, self.push, self.device = scenario, push, device
        self.module = build(single_device(scenario), Timeline(0, device), device).module
        self.parameters = dict(self.module.named_parameters())
        self.optimizer = make_optimizer(scenario.workload, self.module.parameters(), device)
        self.feeds = {
            rank: Feed(scenario, rank, device) for rank in range(scenario.ranks) if scenario.batch_sizes[rank]
        }
        """Only of ranks that have samples: others have no gradient."""
        self.owners = _owners(scenario, self.module, device)
        self.residuals: dict[tuple[int, str], Tensor] = {}
        self.thresholds: dict[tuple[int, str], Thresholds] = {}
        largest = max(parameter.numel() for parameter in self.parameters.values())
        self.scratch = Scratch(0, largest, torch.float32, device)
        self.sent_elements = self.offered_elements = 0
        """In the latest step: elements that ranks sent to other owners, and all elements that these own."""

    def gradients(self, batch: int, rank: int) -> tuple[Gradients, float]:
        """Return one rank's mean gradient over its own rows of a step's batch, and its weight in that step."""
        inputs, targets, weights = self.feeds[rank].at(batch)
        self.module.zero_grad(set_to_none=True)
        with autocast(self.scenario.workload.autocast):
            loss = loss_of(logits_of(self.module(inputs)), targets)
        loss.backward()
        gradients_by_name = {}
        for name, parameter in self.parameters.items():
            gradients_by_name[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return gradients_by_name, weights.ranks[rank]

    def step(self, step: int, see: Callable[[int, Gradients], None]) -> None:
        """Train one step; `see` is called with every rank's gradients."""
        self.sent_elements = self.offered_elements = 0
        contributions = []
        for rank in self.feeds:
            gradients, weight = self.gradients(step, rank)
            see(rank, gradients)
            if self.push.threshold:
                gradients = {name: self._sent(step, rank, name, gradient) for name, gradient in gradients.items()}
            contributions.append((rank, weight, gradients))
        divides = self.push.aggregate == "received-weight"
        for name, parameter in self.parameters.items():
            contributions_of = [(rank, weight, gradients[name]) for rank, weight, gradients in contributions]
            parameter.grad = self._added(name, contributions_of, divided=divides and self._selects(step))
        self.optimizer.step()

    def _selects(self, step: int) -> bool:
        """Return whether a step pushes by a threshold: not during the warm-up."""
        return bool(self.push.threshold) and step >= self.push.warmup_steps

    def _added(self, name: str, contributions: list[tuple[int, float, Tensor]], *, divided: bool) -> Tensor:
        """Return the owners' sums of all contributions: their own first, then the others' by rank."""
        owners = self.owners[name]
        total, received = torch.zeros_like(contributions[0][2]), torch.zeros_like(contributions[0][2])
        for rank, weight, gradient in contributions:
            own = owners == rank
            total[own] = gradient[own] * weight
            received[own] = weight
        for rank, weight, gradient in contributions:
            others = gradient * (owners != rank)
            total.add_(others, alpha=weight)
            received.add_((others != 0).to(received.dtype), alpha=weight)
        return torch.where(received > 0, total / received, total) if divided else total

    def _sent(self, step: int, rank: int, name: str, gradient: Tensor) -> Tensor:
        """Return a rank's gradient as the owners receive it: 0 for unsent elements, and its own range in any case."""
        assert self.push.threshold is not None
        if self.push.error_feedback and (rank, name) in self.residuals:
            gradient = gradient + self.residuals[rank, name]
        threshold = self._threshold(step, rank, name, gradient) if self._selects(step) else 0.0
        reached, own = gradient.abs() >= threshold, self.owners[name] == rank
        sent = own | reached
        self.sent_elements += int((reached & ~own).sum())
        self.offered_elements += int((~own).sum())
        if self.push.error_feedback:
            residual_dtype = (
                torch.bfloat16 if self.push.error_feedback_precision == "bf16" else master_type(gradient.dtype)
            )
            self.residuals[rank, name] = (gradient * ~sent).to(residual_dtype)
        return gradient * sent

    def _threshold(self, step: int, rank: int, name: str, accumulated: Tensor) -> float:
        """Return the threshold for a rank's accumulated gradient of a tensor, computed by the library itself."""
        flat, owners = accumulated.reshape(-1), self.owners[name].reshape(-1)
        own = slice(*(int(torch.searchsorted(owners, float(rank), side=side)) for side in ("left", "right")))

        def pieces(first: int, last: int) -> list[Tensor]:
            if self.push.kind == "target-density":
                return [flat[a:b] for a, b in ((first, own.start), (own.stop, last)) if a < b]
            cuts = sorted({first, last, own.start, own.stop})
            return [flat[a:b] for a, b in pairwise(cuts)]

        if (rank, name) not in self.thresholds:
            self.thresholds[rank, name] = Thresholds(self.push, [slice(0, len(flat))])
        ((_, threshold),) = self.thresholds[rank, name].find(pieces, self.scratch, step=step - self.push.warmup_steps)
        return threshold

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Compute gradients without affecting the training, for the duration of the context.

        Random states and buffers (running means) are restored.
        """
        before = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]
        with torch.random.fork_rng(devices=[] if self.device.type == "cpu" else [self.device]):
            yield
        for buffer, value in before:
            buffer.detach().copy_(value)

    def masters(self) -> Gradients:
        """Return the tensors that the optimizer updates, by the name of the parameter."""
        if isinstance(self.optimizer, MasterCopy):
            of = {id(parameter): master for parameter, master in self.optimizer.pairs()}
            return {name: of[id(parameter)] for name, parameter in self.parameters.items()}
        return dict(self.parameters)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread for the duration of the context.

    The number of threads of a sum decides its last digits, which training amplifies; MKL may choose fewer of them. So
    the same training gives the same statistics, on a machine of any size under any load.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def buckets_of(scenario: Scenario, named: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of the parameters of every bucket, in the order in which gradients become ready."""
    layers = unrolled(scenario.workload.model)
    order = [layers[i].parameter_names[j] for i, j in gradient_order(layers)]
    first, cap = bucket_limits(scenario.plan, scenario.policies)
    sizes = [named[name].numel() * named[name].element_size() for name in order]
    return [[order[i] for i in members] for members in assign_buckets(sizes, first_bytes=first, cap_bytes=cap)]


def _owners(scenario: Scenario, module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return the owning rank of every element, by parameter name."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    owner_of = {}
    for names in buckets_of(scenario, named):
        elements = [named[name].numel() for name in names]
        flat = torch.cat(
            [
                torch.full((last - start,), float(rank), device=device)
                for rank, (start, last) in enumerate(ranges(sum(elements), scenario.shard_shares))
            ]
        )
        for name, part in zip(names, flat.split(elements), strict=True):
            owner_of[name] = part.view(named[name].shape)
    return owner_of
