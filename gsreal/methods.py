"""A plan applied to a real module with what PyTorch has for it: one function per combination of policies."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gsreal.build import logits_of, loss_of
from gsreal.gradient_sharding import GradientSharding, shard_gradients
from gsreal.measure import Timeline
from gssim.plan import DDP_BUCKET_BYTES, MIB
from gssim.scenario import Scenario
from gssim.workload import Model, Workload, gradient_order, unrolled


@dataclass
class Training:
    """A module made ready for a plan: `step` trains it once on this rank's rows."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | GradientSharding
    timeline: Timeline
    scale: float
    """Factor on the weighted loss before backward: the ranks, where a wrapper averages over them; 0: leave the rank's
    mean as it is (the owner weighs it)."""
    last_gradient: list[Any]
    """DDP: the mark of the last gradient hook in this backward."""

    def step(self, inputs: Tensor, targets: Tensor, weights: Sequence[float], rank: int) -> Tensor:
        """Train on one batch; `weights`: every rank's part of the step's loss terms. Returns this rank's mean loss."""
        timeline = self.timeline
        if isinstance(self.optimizer, GradientSharding):
            self.optimizer.weights = tuple(weights)
        self.last_gradient.clear()
        with timeline.span("forward", "forward"):
            loss = loss_of(logits_of(self.module(inputs)), targets)
        factor = self.scale * weights[rank] if self.scale else 1.0
        with timeline.span("backward", "backward"):
            (loss if factor == 1 else loss * factor).backward()
        if self.last_gradient:
            timeline.between("wait for all-reduce", "exposed_communication", self.last_gradient[0])
        self._update()
        timeline.end_step()
        return loss.detach()

    def _update(self) -> None:
        if isinstance(self.optimizer, GradientSharding):
            self.optimizer.step()  # it observes its own parts
            return
        with self.timeline.span("optimizer", "optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def prepare(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Return the module made ready for the scenario's plan on this rank."""
    policies = scenario.policies
    if scenario.plan.recompute == "full":
        checkpoint_blocks(scenario.workload.model, module)
    apply = APPLY[policies.parameters, policies.gradients]
    return apply(scenario, module, timeline, device)


def optimizer_of(workload: Workload, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the workload's kind of optimizer and its settings: torch's default form for the device.

    One tensor at a time on a CPU, all together on a GPU.
    """
    settings = {"lr": workload.learning_rate, "weight_decay": workload.weight_decay, "foreach": device.type == "cuda"}
    if workload.optimizer == "adamw":
        return torch.optim.AdamW, settings
    momentum = workload.momentum if workload.optimizer == "sgd-momentum" else 0.0
    return torch.optim.SGD, settings | {"momentum": momentum}


def checkpoint_blocks(model: Model, module: nn.Module) -> None:
    """Run every block of the module under torch's checkpoint, with its default settings (it keeps random states).

    The blocks' own forward is replaced: wrappers come around it, as they should, and parameters keep their names.
    """
    for block in _blocks(model, module):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _blocks(model: Model, module: nn.Module) -> list[nn.Module]:
    inner = dict(module.named_modules())
    return [inner[layer.module] for layer in unrolled(model) if layer.layer.block]


def make_optimizer(
    workload: Workload, parameters: Sequence[nn.Parameter] | Any, device: torch.device
) -> torch.optim.Optimizer:
    """Return the workload's optimizer over the parameters."""
    kind, settings = optimizer_of(workload, device)
    return kind(parameters, **settings)


def _single(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    return Training(module, optimizer, timeline, scale=1.0, last_gradient=[])


def _ddp(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """DistributedDataParallel with its gradients as views of its buckets; its optimizer whole, or dealt out."""
    last: list[Any] = []

    def note(_parameter: Tensor) -> None:
        last[:] = [timeline.mark()]

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    cap = scenario.plan.bucket_bytes
    options: dict[str, Any] = {} if cap == DDP_BUCKET_BYTES else {"bucket_cap_mb": cap / MIB}
    wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
    make = _dealt_out_optimizer if scenario.policies.optimizer_state == "sharded" else _whole_optimizer
    optimizer = make(scenario.workload, wrapped, timeline, device)
    return Training(wrapped, optimizer, timeline, scale=float(scenario.ranks), last_gradient=last)


def _whole_optimizer(
    workload: Workload, module: nn.Module, timeline: Timeline, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters."""
    return make_optimizer(workload, module.parameters(), device)


def _dealt_out_optimizer(
    workload: Workload, module: nn.Module, timeline: Timeline, device: torch.device
) -> torch.optim.Optimizer:
    """Return ZeroRedundancyOptimizer: each rank updates its own tensors, then broadcasts them one by one."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class ObservedZeroRedundancyOptimizer(ZeroRedundancyOptimizer):
        def _sync_params(self) -> None:
            with timeline.span("broadcast parameters", "exposed_communication"):
                super()._sync_params()  # type: ignore[misc]

    kind, settings = optimizer_of(workload, device)
    return ObservedZeroRedundancyOptimizer(module.parameters(), kind, **settings)


def _fully_shard(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """FSDP2 on each block and on the root; parameters kept from forward to backward where they are `gathered`.

    Where they are `sharded`, by torch's default: each block is freed after its forward, the root is not.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class ObservedAllGather(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with timeline.span("all-gather", "exposed_communication"):
                return super().__call__(*args, **kwargs)

    class ObservedReduceScatter(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with timeline.span("reduce-scatter", "exposed_communication"):
                return super().__call__(*args, **kwargs)

    mesh = init_device_mesh(device.type, (scenario.ranks,))
    reshard_after_forward = False if scenario.policies.parameters == "gathered" else None
    for part in [*_blocks(scenario.workload.model, module), module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(ObservedAllGather())
            part.set_custom_reduce_scatter(ObservedReduceScatter())
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    return Training(module, optimizer, timeline, scale=float(scenario.ranks), last_gradient=[])


def _gs(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Gradient Sharding with the plan's shares and threshold; buckets in the traced order of gradients."""
    plan = scenario.plan
    layers = unrolled(scenario.workload.model)
    order = [layers[i].parameter_names[j] for i, j in gradient_order(layers)]
    optimizer = shard_gradients(
        module,
        lambda shards: make_optimizer(scenario.workload, shards, device),
        shard_shares=scenario.shard_shares,
        threshold=plan.push.threshold,
        encoding=plan.push.encoding,
        bucket_bytes=plan.bucket_bytes,
        first_bucket_bytes=plan.first_bucket_bytes,
        parameter_order=order,
        observe=timeline.span,
    )
    return Training(module, optimizer, timeline, scale=0.0, last_gradient=[])


Apply = Callable[[Scenario, nn.Module, Timeline, torch.device], Training]
APPLY: dict[tuple[str, str], Apply] = {
    ("replicated", "local"): _single,
    ("replicated", "all-reduce"): _ddp,
    ("gathered", "reduce-scatter"): _fully_shard,
    ("sharded", "reduce-scatter"): _fully_shard,
    ("replicated", "push"): _gs,
}


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter whole, by name; sharded ones are gathered (a collective)."""
    found = {}
    for name, parameter in module.named_parameters():
        tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name.removeprefix("module.")] = tensor.detach().clone()
    return found


def no_grad_barrier() -> None:
    """Wait for all ranks."""
    with torch.no_grad() if dist.is_initialized() else nullcontext():
        if dist.is_initialized():
            dist.barrier()
