"""Pipeline parallelism by torch.distributed.pipelining: a module cut into stages on several ranks, and their schedule.

A module that supports this has a method `keep_layers(names)`, which removes all layers but those of the given paths,
and a forward that runs the remaining layers; an `nn.Sequential` and a Hugging Face model need neither. Parameters keep
their names. Stages may be replicated by DDP, or sharded; ranks may cut their blocks, and divide their sequences. Every
copy of a tied parameter gets the sum of all copies' gradients; see [Note: tied] in `gssim.scenario.stages`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _batch_p2p, _wait_batch_p2p
from torch.distributed.tensor import DTensor

from gsreal.gradient_sharding import GradientSharding
from gsreal.gradient_sharding.sharded_parameters import units_of
from gsreal.measure import Timeline
from gsreal.methods.blocks import checkpoint_block
from gsreal.methods.context_parallel import context_exchange, divide_context
from gsreal.methods.data_parallel import cast_all_reduce, fully_shard_module, leave_experts, sharded_optimizer
from gsreal.methods.expert_parallel import ExpertGradients, ShardedExpertGradients, divided_experts, load_experts
from gsreal.methods.gradient_sharding import pushing_optimizer
from gsreal.methods.mapped import Mapped
from gsreal.methods.meshes import device_mesh, process_group
from gsreal.methods.optimizers import make_optimizer, mark_matrices
from gsreal.methods.stage_modules import stage_module, tied_names
from gsreal.methods.tensor_slices import (
    PartialGradients,
    end_of_parts,
    partial_gradients,
    slice_blocks,
)
from gsreal.methods.training import Training, Weights, own_part, weighted
from gsreal.methods.vocabulary_parallel import Loss, divide_vocabulary
from gsreal.model_files.build import autocast, loss_of
from gssim.plan import DDP_BUCKET_BYTES, MIB, REPLICA_AXES
from gssim.plan.pipeline_schedule import SPLITTING, schedule
from gssim.scenario import Scenario, held_experts, held_layers, held_slice, of_no_sample, schedule_of, tied_parameters
from gssim.workload import LayerInstance, unrolled


class StageModules(nn.Module):
    """The pipeline stages on this rank."""

    def __init__(self, stages: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.group = group


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole; a sharded one is gathered (a collective over its shards)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


__all__ = ["StageModules", "pipeline_stages"]


class ObservedStage(PipelineStage):
    """A stage that records spans of its compute; the rest of a step is waiting for adjacent stages."""

    def observe(
        self,
        timeline: Timeline,
        last_gradient: list[Any],
        replicas: dist.ProcessGroup | None,
        sharding: GradientSharding | None,
        experts: ExpertGradients | ShardedExpertGradients | None,
        precision: str | None,
        *,
        pushes_last: bool,
        splits: bool,
    ) -> None:
        """Start recording; `last_gradient`: DDP's mark of the last gradient hook in a backward.

        `sharding`: pushes gradients in the backward of the last micro-batch, or, if `pushes_last`, after the schedule,
        when all stages of the rank are done and the gradients of tied parameters are summed over their copies.
        `experts`: reduces the gradients of divided experts in that backward. `precision`: torch.autocast's in forwards,
        if the workload has it. `splits`: whether backwards are split.
        """
        self.precision, self.splits = precision, splits
        self.timeline, self.last_gradient, self.replicas = timeline, last_gradient, replicas
        self.sharding, self.experts, self.pushes_last = sharding, experts, pushes_last
        self.peers = self.group or dist.group.WORLD

    def _compute_outputs(self, *args: Any, module: nn.Module, **settings: Any) -> Any:
        """Infer shapes before the first step, without DDP, which would otherwise expect gradients in any backward."""
        inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        with autocast(self.precision, self.device.type):
            outputs = inner(*args, **settings)
        self._free_parameters()
        return outputs

    def _free_parameters(self) -> None:
        """Free what the inference of shapes has gathered: no gradient arrives in it that would end its backward."""
        for unit in units_of(self.submod):
            unit.free()

    def _compute_input_grads(self, *args: Any, **settings: Any) -> tuple[Tensor | None, ...]:
        """Return contiguous gradients of a stage's input, from which torch infers the receive buffers of other stages.

        torch takes them from `torch.autograd.grad`, which leaves them in the memory order of the layer's backward. If
        the layer permutes dimensions, as ConvNeXt's norms over channels do, that order is not contiguous, and gloo
        refuses to receive into such a buffer.
        """
        gradients = _contiguous(super()._compute_input_grads(*args, **settings))
        self._free_parameters()
        return gradients

    def backward_maybe_with_nosync(self, *args: Any, **settings: Any) -> Any:
        """Run the module's backward, or a part of a split one, and return contiguous gradients of its input."""
        gradients, groups = super().backward_maybe_with_nosync(*args, **settings)
        return _contiguous(gradients), groups

    def forward_maybe_with_nosync(self, *args: Any, **settings: Any) -> Any:
        """Run the module's forward. Where backwards are split, an output that is a view becomes a tensor of its own
        that shares the view's memory: torch detaches outputs in place after the first part of a split backward, which
        it refuses for views (_backward.stage_backward_input).
        """
        output = super().forward_maybe_with_nosync(*args, **settings)
        is_view = self.splits and isinstance(output, Tensor) and output._is_view()
        return Mapped.apply(output, Tensor.detach, lambda gradient: gradient) if is_view else output

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **settings: Any) -> Any:
        """Run the forward of a micro-batch."""
        label = f"forward stage {self.stage_index} micro-batch {fwd_chunk_id}"
        with self.timeline.span(label, "forward", self.peers), autocast(self.precision, self.device.type):
            return super().forward_one_chunk(fwd_chunk_id, *args, **settings)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **settings: Any) -> None:
        """Run the backward of a micro-batch, or its first part; in that of the last, DDP all-reduces, or Gradient
        Sharding pushes.
        """
        self.last_gradient.clear()
        keeps = self.pushes_last or not settings.get("last_backward", False)
        if self.experts is not None:
            self.experts.leaves = settings.get("last_backward", False)
        label = f"backward stage {self.stage_index} micro-batch {bwd_chunk_id}"
        with (
            self.timeline.span(label, "backward", self.peers),
            self.sharding.no_sync() if self.sharding is not None and keeps else nullcontext(),
        ):
            super().backward_one_chunk(bwd_chunk_id, *args, **settings)
            if self.experts is not None:
                self.experts.wait()
        if self.last_gradient:
            self.timeline.between(
                "wait for all-reduce", "exposed_communication", self.last_gradient[0], group=self.replicas
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second part of a micro-batch's split backward; gradients leave after the schedule."""
        label = f"backward weights stage {self.stage_index} micro-batch {bwd_chunk_id}"
        with (
            self.timeline.span(label, "backward", self.peers),
            self.sharding.no_sync() if self.sharding is not None else nullcontext(),
        ):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)


def _contiguous(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return gradients as contiguous tensors, which gloo can send; what is no tensor is unchanged."""
    return tuple(each.contiguous() if isinstance(each, Tensor) else each for each in gradients)


class ScheduleOfActions(PipelineScheduleSingle):
    """Runs the actions that `gssim.plan.pipeline_schedule` lists for a stage, where torch lacks the schedule."""

    def __init__(self, stage: PipelineStage, count: int, name: str, **settings: Any) -> None:
        super().__init__(stage, count, **settings)
        stages = stage.num_stages
        self.actions = schedule(name, ranks=stages, stages=stages, micro_batches=count)[stage.stage_index]

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run one step on the given micro-batches."""
        stage, last = self._stage, self._n_microbatches - 1
        arguments, keywords = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arguments[0], keywords[0], target_mbs[0] if target_mbs else None, loss_kwargs)
        operations = {
            ("receive", "activation"): stage.get_fwd_recv_ops,
            ("send", "activation"): stage.get_fwd_send_ops,
            ("receive", "gradient"): stage.get_bwd_recv_ops,
            ("send", "gradient"): stage.get_bwd_send_ops,
        }
        posted: list[dist.Work] = []
        for action in self.actions:
            number = action.micro_batch
            if action.kind == "forward":
                output = stage.forward_one_chunk(
                    number, arguments[number], keywords[number], save_forward_output=return_outputs
                )
                self._maybe_compute_loss(stage, output, target_mbs, number, loss_kwargs)
                del output  # the stage keeps what the backward needs
            elif action.kind == "backward":
                stage.backward_one_chunk(number, loss=self._maybe_get_loss(stage, number), last_backward=number == last)
            elif action.kind == "wait":
                _wait_batch_p2p(posted)
                posted.clear()
            elif action.kind in ("send", "receive"):
                (message,) = action.messages
                posted += _batch_p2p(operations[action.kind, message.kind](message.micro_batch))
        self._update_losses(stage, losses)
        stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)


@dataclass
class Losses:
    """The loss function of a schedule: micro-batches arrive in order, and may have unequal weights."""

    stage: PipelineStage
    timeline: Timeline
    precision: str | None = None
    """Precision of torch.autocast, if the workload has it."""
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of
    """Returns the mean loss of logits and targets."""
    factors: tuple[float, ...] = ()
    """Factor on each micro-batch's mean loss before its backward."""
    means: list[Tensor] = field(default_factory=list)

    def begin(self, factors: tuple[float, ...]) -> None:
        """Start a step."""
        self.factors, self.means = factors, []

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's part of the step's loss."""
        with self.timeline.span("forward loss", "forward"):
            with autocast(self.precision, output.device.type):
                loss = self.loss(output, targets)
            if not self.stage.fwd_cache:  # before the first step, torch infers shapes
                return loss
            factor = self.factors[len(self.means)]
            self.means.append(loss.detach())
            return weighted(loss, factor)


class TiedCopy(NamedTuple):
    """This rank's copy of a parameter that layers of several stages use, and the ranks that hold one."""

    name: str
    parameter: nn.Parameter
    group: dist.ProcessGroup
    first: bool
    """Whether it is on the first of the stages that hold one."""


def tied_copies(
    scenario: Scenario, modules: Sequence[nn.Module], names: Mapping[str, frozenset[str]]
) -> list[TiedCopy]:
    """Return this rank's copies of tied parameters (a collective over all ranks, which creates their groups).

    `names`: all names in the model of each tied parameter.
    """
    mesh, copies = scenario.policies.mesh, []
    own = {name.removeprefix("module."): p for module in modules for name, p in module.named_parameters()}
    for tied in tied_parameters(unrolled(scenario.workload.model), scenario.stage_ranges):
        places = sorted({stage % mesh.pp for stage in tied.stages})
        group = process_group(mesh, dist.get_rank(), "pp", places=places) if len(places) > 1 else None
        held = [own[name] for name in names.get(tied.name, ()) if name in own]
        if group is not None and held:
            first = mesh.place(dist.get_rank()).pp == tied.stages[0] % mesh.pp
            copies.append(TiedCopy(tied.name, held[0], group, first))
    return copies


@dataclass
class PipelineTraining(Training):
    """Training on a rank of a pipeline: a step runs the schedule."""

    run: Callable[..., Any] = print
    losses: Losses | None = None
    copies: Sequence[TiedCopy] = ()
    pushes_last: bool = False
    """Whether gradients are pushed after the schedule, where they are pushed at all."""
    losses_at: Sequence[int] = ()
    """Ranks that compute the losses of the replicas of this rank's stage, in the replicas' order."""

    @property
    def _counted_elsewhere(self) -> set[nn.Parameter]:
        """Copies of tied parameters whose gradients an earlier stage counts."""
        return {copy.parameter for copy in self.copies if not copy.first}

    def clip_pushed_gradients(self, optimizer: GradientSharding, norm: float) -> None:
        """Scale what owners have received down to a norm of at most `norm` over all stages."""
        assert isinstance(self.module, StageModules)
        optimizer.clip_grad_norm_(norm, stages=self.module.group, copies=self._counted_elsewhere)

    def clip_gradients(self, norm: float) -> None:
        """Scale the gradients of all stages down to a norm of at most `norm`; tied parameters count once."""
        assert isinstance(self.module, StageModules)
        again = self._counted_elsewhere
        gradients = {p: p.grad for p in self.module.parameters() if p.grad is not None}
        device = next(iter(gradients.values())).device
        counted = {p: gradient for p, gradient in gradients.items() if p not in again}
        if self.norm_groups is None:
            own = self._total_norm(counted.values())  # zero if the stages hold nothing but tied copies
            squares = whole(own).to(device=device, dtype=torch.float64).square()
        else:
            squares = self._squares_over_groups(counted, device)
        with self.timeline.span("all-reduce gradient norm of the stages", "exposed_communication", self.module.group):
            dist.all_reduce(squares, group=self.module.group)
        self._scale_down(list(gradients.values()), norm, squares.sqrt())

    def _sum_copies(self) -> None:
        """Replace the gradients of tied parameters by their sums over the copies; keep no reference to them."""
        for copy in self.copies:
            assert copy.parameter.grad is not None
            own = own_part(copy.parameter.grad)
            if own.numel():  # all copies have equal shards
                with self.timeline.span(f"all-reduce {copy.name}", "exposed_communication", copy.group):
                    dist.all_reduce(own, group=copy.group)

    def step(self, inputs: Tensor, targets: Tensor, weights: Weights, rank: int) -> Tensor:
        """Train on one batch. Returns the mean loss on ranks of the last stage, 0 on others."""
        assert self.losses is not None
        scale = self.scale * weights.ranks[rank] if self.scale else 1.0
        if isinstance(self.optimizer, GradientSharding):  # the owner weighs each rank's mean
            pushed = weights.pushed
            self.optimizer.weights = tuple(pushed[each] for each in self.losses_at)
            scale = weights.ranks[rank] / pushed[rank] if pushed[rank] else 1.0
        scale *= self.begin_scaled_step()
        self.losses.begin(tuple(scale * weight for weight in weights.micro_batches))
        arguments = (inputs,) if inputs.numel() else ()
        with self.timeline.span("wait for neighbours", "exposed_communication"):
            self.run(*arguments, target=targets if targets.numel() else None, return_outputs=False)
        self._sum_copies()
        if self.pushes_last and isinstance(self.optimizer, GradientSharding):
            self.optimizer.push()  # before owners' gradients are summed over tensor-parallel ranks
        self._update()
        self.timeline.end_step()
        means = self.losses.means
        parts = [weight * mean for weight, mean in zip(weights.micro_batches, means, strict=False)]
        return torch.stack(parts).sum() if parts else torch.zeros(())


def pipeline_stages(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Keep this rank's stages of the module, replicated by DDP if the plan says so, and schedule them."""
    mesh, rank, stages = scenario.policies.mesh, dist.get_rank(), scenario.stages
    aliases = tied_names(module)
    end = _end_of_parts(scenario, module)
    group = process_group(mesh, rank, "pp")
    assert group is not None
    numbers = range(mesh.place(rank).pp, len(stages), mesh.pp)
    last_gradient: list[Any] = []
    modules = _stage_modules(scenario, module, numbers, timeline, device, end=end)
    divided, loss = _slice_stages(scenario, dict(zip(numbers, modules, strict=True)), end, timeline, device)
    experts: list[ExpertGradients | ShardedExpertGradients | None] = []
    for part in modules:
        load_experts(scenario, part)
        experts.append(divided_experts(scenario, part, timeline, device) if scenario.policies.ep > 1 else None)
        mark_matrices(scenario.workload, part)  # copying or dividing a parameter creates a new one
    is_replicated = scenario.policies.gradients == "all-reduce"
    replicas = process_group(mesh, rank, *REPLICA_AXES) if is_replicated else None
    if scenario.policies.gradients == "reduce-scatter":
        for number, part in zip(numbers, modules, strict=True):
            inner = dict(part.named_modules())
            blocks = [inner[instance.module] for instance in stages[number] if instance.layer.block]
            fully_shard_module(scenario, part, blocks, timeline, device)
    if replicas is not None:
        modules = [_in_ddp(scenario, part, replicas, timeline, last_gradient) for part in modules]
    observed = [
        ObservedStage(part, i, len(stages), device, group=group) for i, part in zip(numbers, modules, strict=True)
    ]
    own_stages = StageModules(modules, group)
    pushed = _pushed_layers(scenario)
    held = [instance for number in numbers for instance in pushed[number]]
    layers = [replace(instance, index=i) for i, instance in enumerate(held)]
    optimizer = _optimizer(scenario, own_stages, layers, aliases, timeline, device, replicas)
    sharding = optimizer if isinstance(optimizer, GradientSharding) else None
    copies = tied_copies(scenario, modules, aliases)
    splits = schedule_of(scenario.plan, mesh.pp) in SPLITTING
    pushes_last = bool(copies) or len(modules) > 1 or splits
    for stage, of_stage in zip(observed, experts, strict=True):
        precision = scenario.workload.autocast
        stage.observe(
            timeline, last_gradient, replicas, sharding, of_stage, precision, pushes_last=pushes_last, splits=splits
        )
    losses = Losses(observed[-1], timeline, scenario.workload.autocast, loss)
    shards_experts = scenario.policies.ep > 1 and scenario.policies.gradients == "reduce-scatter"
    return PipelineTraining(
        own_stages,
        optimizer,
        timeline,
        scale=0.0 if sharding else float(mesh.replica_ranks),
        last_gradient=last_gradient,
        run=_schedule(scenario, observed, losses).step,
        losses=losses,
        copies=copies,
        pushes_last=pushes_last,
        experts=ShardedExpertGradients(own_stages, mesh.expert_stride) if shards_experts else None,
        partial_gradients=divided,
        losses_at=[mesh.group(each, "pp")[-1] for each in mesh.group(rank, *REPLICA_AXES)],
    )


def _end_of_parts(scenario: Scenario, module: nn.Module) -> str | None:
    """Return the path in the whole module at whose output parts of sequences are gathered; None: they are whole."""
    if not scenario.policies.sequence_parallel:
        return None
    order = [instance for instance in unrolled(scenario.workload.model) if instance.layer.modules]
    blocks = [instance.module for instance in order if instance.layer.block]
    return end_of_parts([instance.module for instance in order], blocks, module)


def _takes_parts(scenario: Scenario, stage: Sequence[LayerInstance], end: str | None) -> bool:
    """Return whether a stage is given parts of sequences: it begins after the first block, but not after `end`.

    `end`: see `_end_of_parts`.
    """
    if end is None:
        return False
    places = {instance.module: instance.index for instance in unrolled(scenario.workload.model)}
    first_block = next(each.index for each in unrolled(scenario.workload.model) if each.layer.block)
    first = next(instance.index for instance in stage if not of_no_sample(instance.layer))
    return first_block < first <= places[end]


def _stage_modules(
    scenario: Scenario, module: nn.Module, numbers: range, timeline: Timeline, device: torch.device, *, end: str | None
) -> list[nn.Module]:
    """Return the rank's stages of a module, with sequences divided and blocks checkpointed if the plan says so.

    `end`: see `_end_of_parts`.
    """
    policies, model, recompute = scenario.policies, scenario.workload.model, scenario.plan.recompute
    exchange = context_exchange(policies, timeline, device) if policies.cp > 1 else None
    modules = []
    for number in numbers:
        layers = scenario.stages[number]
        parts = policies.tp if _takes_parts(scenario, layers, end) else 1
        part = stage_module(module, layers, shared=number != numbers[-1], model=model, sequence_parts=parts)
        inner = dict(part.named_modules())
        blocks = [inner[instance.module] for instance in layers if instance.layer.block]
        if exchange is not None:  # inside of checkpoints: a recomputation exchanges again
            divide_context(part, blocks, exchange, sequence_parts=parts)
        if recompute != "none":
            for block in blocks:
                checkpoint_block(block, recompute)
        modules.append(part)
    return modules


def _slice_stages(
    scenario: Scenario, stages: Mapping[int, nn.Module], end: str | None, timeline: Timeline, device: torch.device
) -> tuple[PartialGradients | None, Loss]:
    """Reduce a rank's stages, by number, to its slices, if tensor-parallel ranks cut blocks.

    `end`: see `_end_of_parts`. Returns the gradients to be summed before each update, and the stages' loss.
    """
    loss: Loss = loss_of
    if scenario.policies.tp == 1:
        return None, loss
    mesh = device_mesh(scenario.policies.mesh, device)["tp"]
    places: list[tuple[nn.Module, str]] = []
    for number, part in stages.items():
        places += slice_blocks(scenario, part, timeline, mesh, layers=scenario.stages[number], end=end)
        is_last = number == len(scenario.stages) - 1
        loss = divide_vocabulary(scenario, part, timeline, mesh, first=number == 0, last=is_last)
    return partial_gradients(scenario, places, timeline, mesh), loss


def _pushed_layers(scenario: Scenario) -> Sequence[Sequence[LayerInstance]]:
    """Return the layers of each stage, with their gradients in the order in which a rank computes them.

    That order differs for slices of layers, and for parts of sequences.
    """
    if scenario.policies.cp == scenario.policies.tp == 1 or scenario.policies.gradients != "push":
        return scenario.stages
    divides_experts = scenario.policies.tp > 1 and scenario.policies.ep > 1  # cut blocks then have other layers
    held = held_experts(scenario, 0, 0) if divides_experts else unrolled(held_slice(scenario, 0))
    return held_layers(held, scenario.stage_ranges)


def _optimizer(
    scenario: Scenario,
    stages: StageModules,
    layers: Sequence[LayerInstance],
    aliases: Mapping[str, frozenset[str]],
    timeline: Timeline,
    device: torch.device,
    replicas: dist.ProcessGroup | None,
) -> torch.optim.Optimizer | GradientSharding:
    """Return the optimizer of a rank's stages.

    `layers`: those of its stages. `aliases`: all names of tied parameters.
    """
    policies = scenario.policies
    if policies.gradients == "push":
        (*others, module) = stages.stages
        if not others:
            return pushing_optimizer(scenario, module, layers, timeline, device, aliases)
        own = [(name, name.split(".", 2)[2]) for name, _ in stages.named_parameters()]  # stages.0.NAME
        names = [name for layer in layers for name in layer.parameter_names]
        known = {name: frozenset(mine for mine, its in own if its in aliases.get(name, [name])) for name in names}
        return pushing_optimizer(scenario, stages, layers, timeline, device, known)
    if policies.gradients == "all-reduce" and policies.optimizer_state == "sharded":
        return sharded_optimizer(scenario, stages, timeline, device, replicas)
    return make_optimizer(scenario.workload, stages.parameters(), device)


def _schedule(scenario: Scenario, stages: list[ObservedStage], losses: Losses) -> Any:
    """Return the schedule over this rank's stages; only the losses scale gradients."""
    settings: dict[str, Any] = {"loss_fn": losses, "scale_grads": False}
    count, name = scenario.plan.micro_batches, schedule_of(scenario.plan, scenario.policies.pp)
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), count, **settings)
    if name == "interleaved_zero_bubble":
        return ScheduleInterleavedZeroBubble(list(stages), count, **settings)
    if name == "deepspeed":
        return ScheduleOfActions(stages[0], count, name, **settings)
    return {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stages[0], count, **settings)


def _in_ddp(
    scenario: Scenario, module: nn.Module, group: dist.ProcessGroup, timeline: Timeline, last_gradient: list[Any]
) -> nn.Module:
    """Return a stage's module in DDP; PipelineStage synchronises gradients in the backward of the last micro-batch."""

    def note(_parameter: Tensor) -> None:
        if wrapped.require_backward_grad_sync:
            last_gradient[:] = [timeline.mark()]

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note)
    cap = scenario.plan.bucket_bytes
    options: dict[str, Any] = {} if cap == DDP_BUCKET_BYTES else {"bucket_cap_mb": cap / MIB}
    leave_experts(scenario, module)
    wrapped = nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True, **options)
    cast_all_reduce(scenario, wrapped, group, timeline)
    return wrapped
