"""Expert parallelism of a real run: experts divided among ranks, forced loads, and the reduction of experts' gradients.

The exchanges themselves are in `gsreal.methods.experts`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gsreal.measure import Timeline
from gsreal.methods.compressed import cast_type
from gsreal.methods.experts import PARAMETERS, GroupExchange, experts_of, replace_experts, trained_experts
from gsreal.methods.meshes import DIVIDED, REPLICAS, expert_mesh
from gsreal.methods.tensor_slices import Slice, mark
from gssim.plan import position_ranges
from gssim.scenario import Scenario, parts_routed_apart
from gssim.scenario.expert_load import expert_rows, routed_experts
from gssim.workload import Workload, unrolled


def divide_experts(scenario: Scenario, module: nn.Module, timeline: Timeline, group: dist.ProcessGroup) -> None:
    """Leave in each layer of routed experts only this rank's part of them; see [Note: expert parallelism] in `experts`.

    `group`: the ranks that divide them.
    """
    position, ranks = dist.get_rank(group), dist.get_world_size(group)
    for layer, inner in _with_layers(scenario.workload, module):
        experts = inner.gate_up_proj.shape[0]
        own = range(position * experts // ranks, (position + 1) * experts // ranks)
        replace_experts(inner, own, GroupExchange(group, timeline, layer))
        for name in PARAMETERS:
            mark(inner, name, Slice(0, experts, ((own.start, own.stop),)), group)


def _with_layers(workload: Workload, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each module of routed experts after the path of the layer that it is part of."""
    layers = [each.module for each in unrolled(workload.model) if each.layer.modules]
    for path, inner in experts_of(module):
        yield max((name for name in layers if f"{path}.".startswith(f"{name}.")), key=len), inner


def load_experts(scenario: Scenario, module: nn.Module) -> None:
    """Let each token take the experts that `workload.expert_load` gives it, if the workload asks for that."""
    workload = scenario.workload
    if workload.expert_routing != "load":
        return
    for layer, inner in _with_layers(workload, module):
        inner.register_forward_pre_hook(_Routing(scenario, layer, inner.gate_up_proj.shape[0]))


class _Routing:
    """Replaces the experts that a router chose by those of a load, the same for each sample.

    Of divided sequences, those of the rank's own positions; but where ranks divide experts too, each part is routed as
    if it were a sample, so that all ranks send alike: see [Note: loads] in `gssim.scenario.expert_load`.
    """

    def __init__(self, scenario: Scenario, layer: str, experts: int) -> None:
        self.workload, self.layer, self.experts = scenario.workload, layer, experts
        length, policies = self.workload.sequence_length or 1, scenario.policies
        self.tokens = length // parts_routed_apart(self.workload.model, policies)
        self.ranges: tuple[tuple[int, int], ...] = ((0, self.tokens),)
        if policies.cp > 1 and policies.ep == 1:
            place = policies.mesh.place(dist.get_rank()).cp
            self.ranges = position_ranges(length, ranks=policies.cp, rank=place, zigzag=policies.zigzag)
        self._of_sample: Tensor | None = None

    def __call__(self, _module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, index, weights = args
        if self._of_sample is None or self._of_sample.device != index.device:
            sizes = {"tokens": self.tokens, "experts": self.experts, "chosen": index.shape[1]}
            chosen = routed_experts(expert_rows(self.workload, self.layer, **sizes), self.tokens)
            own = [chosen[position] for first, last in self.ranges for position in range(first, last)]
            self._of_sample = torch.tensor(own, dtype=index.dtype, device=index.device)
        return x, self._of_sample.repeat(len(index) // len(self._of_sample), 1), weights


def divided_experts(
    scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device
) -> "ExpertGradients | ShardedExpertGradients | None":
    """Divide a module's experts among ranks; return what reduces their gradients, None if these are pushed."""
    policies, mesh = scenario.policies, expert_mesh(scenario.policies, device)
    divide_experts(scenario, module, timeline, mesh[DIVIDED].get_group())
    if policies.gradients == "reduce-scatter":
        return ShardedExpertGradients(module, policies.mesh.expert_stride)
    if policies.gradients == "push":  # they have owners of their own: see `gsreal.methods.gradient_sharding`
        return None
    options: dict[str, Any] = {"ranks": policies.replica_ranks, "overlap": scenario.plan.overlap}
    return ExpertGradients(module, mesh[REPLICAS].get_group(), timeline, cast_to=cast_type(scenario), **options)


class ExpertGradients:
    """Reduction of the gradients of divided experts over the ranks that hold the same ones.

    As DistributedDataParallel: each is divided by the number of all `ranks` whose gradients that takes the mean of, and
    all-reduced as soon as it is complete, in the last micro-batch; with `overlap`, the backward goes on meanwhile. With
    `cast_to`, a copy in that precision is divided and summed, and the sum is cast back, as torch's hooks that compress
    buckets do.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        timeline: Timeline,
        *,
        ranks: int,
        overlap: bool,
        cast_to: torch.dtype | None,
    ) -> None:
        self.group, self.timeline, self.ranks, self.overlap = group, timeline, ranks, overlap
        self.leaves = True
        self._pending: list[torch.futures.Future[Any]] = []
        self.names = trained_experts(module)
        self._alone = dist.get_world_size(group) == 1
        self._cast_to = None if self._alone else cast_to
        for name in self.names:
            module.get_parameter(name).register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter: Tensor) -> None:
        if not self.leaves:
            return
        assert parameter.grad is not None
        if self._alone:
            parameter.grad.div_(self.ranks)
            return
        pending = self._all_reduce(parameter.grad)
        if self.overlap:
            self._pending.append(pending)
            return
        with self.timeline.span("all-reduce of experts", "exposed_communication", self.group):
            pending.wait()

    def _all_reduce(self, gradient: Tensor) -> torch.futures.Future[Any]:
        """Begin to reduce a gradient; return what to wait for."""
        if self._cast_to is None:
            return self._begin(gradient.div_(self.ranks))
        with self.timeline.span("compress gradient of experts", "compression"):
            pending = self._begin(gradient.to(self._cast_to).div_(self.ranks))
        return pending.then(lambda summed: gradient.copy_(summed.value()[0]))

    def _begin(self, tensor: Tensor) -> torch.futures.Future[Any]:
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work.get_future()

    def divide(self) -> None:
        """Leave gradients as they are: they are divided as they become complete."""

    def wait(self) -> None:
        """Wait until all gradients are reduced."""
        for pending in self._pending:
            pending.wait()
        self._pending = []


class ShardedExpertGradients:
    """Division of the gradients of experts of which FSDP2 takes the mean over the ranks that hold the same ones.

    All others are means over `ranks` times as many.
    """

    leaves = True

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self.ranks = ranks
        self.names = trained_experts(module)
        self.module = module

    def wait(self) -> None:
        """Return at once: FSDP2 waits for its reductions itself."""

    def divide(self) -> None:
        """Divide the sums of all micro-batches before the update."""
        for name in self.names:
            gradient = self.module.get_parameter(name).grad
            if gradient is not None:
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).div_(self.ranks)
