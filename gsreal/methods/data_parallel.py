"""Data parallelism: a single device, DistributedDataParallel with or without ZeRO-1, FSDP2, periodic means."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import _compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gsreal.gradient_sharding.master import master_type
from gsreal.gradient_sharding.point_to_point import all_gather_into_tensor, reduce_scatter_tensor
from gsreal.measure import Timeline
from gsreal.methods.blocks import blocks_of
from gsreal.methods.compressed import cast_type, compressor_of
from gsreal.methods.experts import PARAMETERS, experts_of, trained_experts
from gsreal.methods.meshes import REPLICAS, data_group, data_mesh, expert_mesh, shard_mesh
from gsreal.methods.optimizers import groups_of, make_optimizer, replica_optimizer_of
from gsreal.methods.periodic import Synchronization
from gsreal.methods.training import Training
from gsreal.model_files.build import DTYPES
from gssim.errors import UserError
from gssim.plan import DDP_BUCKET_BYTES, MIB, Policies
from gssim.plan.splitting import shards_inside_experts
from gssim.scenario import Scenario, has_master_copy
from gssim.workload import Workload


def train_single_device(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Train on a single device, without communication."""
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    return Training(module, optimizer, timeline, scale=1.0)


def synchronize_periodically(
    scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device
) -> Training:
    """Train apart with an optimizer on every rank, and synchronize the parameters every few steps."""
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    same_slice = data_group(scenario.policies, device, "dp_replicate")
    periods = Synchronization(scenario, module, optimizer, timeline, rank=dist.get_rank(), group=same_slice)
    # 0: every rank trains on the mean of its own loss
    return Training(
        module,
        optimizer,
        timeline,
        scale=0.0,
        periods=periods,
    )


def all_reduce_gradients(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Train with DistributedDataParallel, gradients as views of its buckets.

    Its optimizer state replicated, or sharded. If the plan compresses gradients, buckets are all-reduced by torch's own
    hook for the format, or reduced by this project's own for PowerSGD and top-k. If the plan disables overlap, each
    bucket's reduction is awaited as soon as it starts.
    """
    last: list[Any] = []
    seen: set[Tensor] = set()

    def note(parameter: Tensor) -> None:
        if wrapped.require_backward_grad_sync:
            last[:] = [timeline.mark()]
            seen.add(parameter)
            if len(seen) == len(handles):  # it is the last one, here and in every other backward: the rest cost time
                for each in seen - {parameter}:
                    handles.pop(each).remove()
                seen.clear()

    handles: dict[Tensor, Any] = {p: p.register_post_accumulate_grad_hook(note) for p in trained_parameters(module)}
    cap = scenario.plan.bucket_bytes
    options: dict[str, Any] = {} if cap == DDP_BUCKET_BYTES else {"bucket_cap_mb": cap / MIB}
    options["process_group"] = data_group(scenario.policies, device, "dp_replicate")
    leave_experts(scenario, module)
    wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
    replicas = options["process_group"] or dist.group.WORLD
    assert replicas is not None
    compressor = compressor_of(scenario, replicas, timeline)
    if compressor:
        wrapped.register_comm_hook(None, compressor.hook)
    elif not cast_all_reduce(scenario, wrapped, replicas, timeline) and not scenario.plan.overlap:
        wrapped.register_comm_hook(None, _blocking_all_reduce(replicas, timeline))
    if scenario.policies.optimizer_state == "sharded":
        optimizer = sharded_optimizer(scenario, wrapped.module, timeline, device, wrapped.process_group)
    else:
        optimizer = make_optimizer(scenario.workload, wrapped.parameters(), device)

    def syncing(leaves: bool) -> AbstractContextManager[None]:
        return nullcontext() if leaves else wrapped.no_sync()

    return Training(
        wrapped,
        optimizer,
        timeline,
        scale=float(scenario.policies.replica_ranks),  # DDP itself takes the mean, and so do torch's hooks and ours
        last_gradient=last,
        replicas=replicas,
        compressor=compressor,
        sync_each=scenario.policies.gradient_sync == "micro-batch",
        syncing=syncing,
    )


def leave_experts(scenario: Scenario, module: nn.Module) -> None:
    """Let DistributedDataParallel leave gradients of divided experts alone: they are reduced over fewer ranks.

    See `gsreal.methods.expert_parallel.ExpertGradients`.
    """
    if scenario.policies.ep > 1:
        apart = [f"{path}.{name}" for path, _ in experts_of(module) for name in PARAMETERS]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, apart)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the module's parameters that are not frozen."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


Hook = Callable[[object, Any], torch.futures.Future[Tensor]]


def cast_all_reduce(
    scenario: Scenario,
    wrapped: nn.parallel.DistributedDataParallel,
    replicas: dist.ProcessGroup,
    timeline: Timeline,
) -> bool:
    """Register a hook that all-reduces buckets in another precision, if the scenario asks for it; return whether.

    As torch's bf16_compress_hook and fp16_compress_hook do, it casts a bucket, divides it by the number of replicas,
    all-reduces it and casts it back; it also records these spans.
    """
    dtype = cast_type(scenario)
    if dtype is None:
        return False

    # DDP reads these annotations
    def compressed(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        with timeline.span(f"compress bucket {bucket.index()}", "compression"):
            pending = _compress_hook(dtype, replicas, bucket)
        if not scenario.plan.overlap:
            with timeline.span(f"all-reduce bucket {bucket.index()}", "exposed_communication", replicas):
                pending.wait()
        return pending

    wrapped.register_comm_hook(None, compressed)
    return True


def _blocking_all_reduce(group: dist.ProcessGroup, timeline: Timeline) -> Hook:
    """Return a DistributedDataParallel hook that all-reduces a bucket's mean before the backward continues.

    A bucket may hold the mean of earlier micro-batches, equal on all ranks, beside a rank's own gradients: a mean keeps
    it as it is, a sum would count it once a rank.
    """

    # DDP reads these annotations
    def averaged(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        with timeline.span(f"all-reduce bucket {bucket.index()}", "exposed_communication", group):
            work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
            assert work is not None
            work.wait()
        return work.get_future().then(lambda done: done.value()[0])

    return averaged


class ChainedOptimizer(torch.optim.Optimizer):
    """Steps optimizers of different parameters one after another."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> Any:
        """Take a step of each."""
        assert closure is None
        for each in self.optimizers:
            each.step()
            self.state.update(getattr(each, "optim", each).state)  # ZeRO's own part is in an optimizer inside


def sharded_optimizer(
    scenario: Scenario,
    module: nn.Module,
    timeline: Timeline,
    device: torch.device,
    replicas: dist.ProcessGroup | None,
) -> torch.optim.Optimizer:
    """Return the optimizer whose state replicas shard; that of divided experts those that hold the same ones."""
    workload, policies = scenario.workload, scenario.policies
    apart = [module.get_parameter(name) for name in trained_experts(module)] if policies.ep > 1 else []
    own = {id(parameter) for parameter in apart}
    shared = [parameter for parameter in trained_parameters(module) if id(parameter) not in own]
    dense = shard_optimizer_state(workload, shared, timeline, device, group=replicas)
    if not apart:
        return dense
    group = expert_mesh(policies, device)[REPLICAS].get_group()
    if group.size() == 1:
        return ChainedOptimizer([dense, make_optimizer(workload, apart, device)])
    return ChainedOptimizer([dense, shard_optimizer_state(workload, apart, timeline, device, group=group)])


def shard_optimizer_state(
    workload: Workload,
    parameters: Sequence[nn.Parameter],
    timeline: Timeline,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """Return ZeroRedundancyOptimizer: each rank of the group updates its own tensors, then broadcasts them one by one.

    The group is everybody by default.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class ObservedZeroRedundancyOptimizer(ZeroRedundancyOptimizer):
        def _sync_params(self) -> None:
            with timeline.span("broadcast parameters", "exposed_communication", group or dist.group.WORLD):
                super()._sync_params()  # type: ignore[misc]

    kind, settings = replica_optimizer_of(workload, device)
    groups = groups_of(workload, parameters)
    return ObservedZeroRedundancyOptimizer(groups, kind, process_group=group, **settings)


def fully_shard_parameters(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Apply FSDP2 to each block and to the root; with `gathered`, parameters stay gathered from forward to backward.

    With `sharded`, torch's default: each block is freed after its forward, the root is not. On a mesh of two axes
    (HSDP), shards of gradients are all-reduced over `dp_replicate` after their reduce-scatter. FSDP2's hooks implement
    the plan's exchange; on a CPU it calls them on the computing thread, so that both ways block. With a master copy,
    the shards are the master: they are cast to the workload's precision when gathered, and gradients are reduced in
    that precision, or in `workload.reduce_precision`, and cast back. Replicas that synchronize periodically have meshes
    of their own.
    """
    from torch.distributed.fsdp import FSDPModule

    fully_shard_module(scenario, module, blocks_of(scenario.workload.model, module), timeline, device)
    updating = torch.device("cpu") if scenario.plan.offload else device
    optimizer = make_optimizer(scenario.workload, module.parameters(), updating)

    @contextmanager
    def syncing(leaves: bool) -> Iterator[None]:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(leaves)
        yield

    policies, rank = scenario.policies, dist.get_rank()
    training = Training(
        module,
        optimizer,
        timeline,
        scale=float(policies.replica_ranks),
        sync_each=policies.gradient_sync == "micro-batch",
        syncing=syncing,
    )
    if policies.shards_replicas:
        training.scale = float(policies.shards)
        training.replica = policies.replica_of(rank)[:: policies.tp]  # tensor-parallel ranks have the same samples
        same_shard = shard_mesh(policies, device)["dp_replicate"].get_group()
        training.periods = Synchronization(scenario, module, optimizer, timeline, rank=rank, group=same_shard)
    return training


def fully_shard_module(
    scenario: Scenario, module: nn.Module, blocks: Sequence[nn.Module], timeline: Timeline, device: torch.device
) -> None:
    """Apply FSDP2 to blocks of a module and to the module around them, as the scenario's policies say."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    workload = scenario.workload
    reduced = None if workload.reduce_precision is None else DTYPES[workload.reduce_precision]
    precision = MixedPrecisionPolicy(reduce_dtype=reduced)
    if has_master_copy(workload):
        precision = MixedPrecisionPolicy(param_dtype=DTYPES[workload.precision], reduce_dtype=reduced)
        _cast_to_master(module)
    mesh, of_experts = _mesh(scenario.policies, device), _expert_placement(scenario.policies, module, device)
    offload = OffloadPolicy()
    if scenario.plan.offload == "parameters":  # memory can be pinned for an accelerator only
        offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    reshard_after_forward = False if scenario.policies.parameters == "gathered" else None
    for part in [*blocks, module]:
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
            shard_placement_fn=of_experts,
        )
    replicas = mesh.get_group(0) if mesh.ndim > 1 else None
    _observe(module, timeline, point_to_point=scenario.policies.point_to_point, replicas=replicas)


def _cast_to_master(module: nn.Module) -> None:
    """Cast all parameters, but no buffer, to the type in which they are updated.

    A DTensor does not take another type's data: it is replaced.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            kind = master_type(parameter.dtype)
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(kind)
                continue
            if parameter not in replaced:
                replaced[parameter] = nn.Parameter(parameter.detach().to(kind), requires_grad=parameter.requires_grad)
            part.register_parameter(name, replaced[parameter])


def _observe(
    module: nn.Module, timeline: Timeline, *, point_to_point: bool, replicas: dist.ProcessGroup | None
) -> None:
    """Make FSDP2's units use the plan's exchange, and record its duration."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    scattered: list[Any] = []

    class ObservedAllGather(DefaultAllGather):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            with timeline.span("all-gather", "exposed_communication", group):
                if point_to_point:
                    all_gather_into_tensor(output_tensor, input_tensor, group=group)
                    return None
                return super().__call__(output_tensor, input_tensor, group, async_op)

    class ObservedReduceScatter(DefaultReduceScatter):
        def __call__(  # type: ignore[override]  # FSDP2 takes None as well: the base's base says so
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
        ) -> dist.Work | None:
            work = None
            with timeline.span("reduce-scatter", "exposed_communication", group):
                if point_to_point:
                    reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op)
                else:
                    work = super().__call__(output_tensor, input_tensor, group, op, async_op)
            scattered[:] = [timeline.mark()]
            return work

    def all_reduced(_gradients: Tensor) -> None:
        if scattered:  # without shards there is no reduce-scatter to begin from
            timeline.between("all-reduce", "exposed_communication", scattered[0], group=replicas)

    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    for group in chain.from_iterable(_groups_of(unit) for unit in units):
        # not by the units' own methods: a block with divided experts has two groups
        group._all_gather_comm, group._reduce_scatter_comm = ObservedAllGather(), ObservedReduceScatter()
        if replicas is not None:
            group._all_reduce_hook = all_reduced


def _groups_of(unit: Any) -> list[Any]:
    """Return FSDP2's groups of parameters in a unit, of which torch before 2.13 has at most one."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _expert_placement(
    policies: Policies, module: nn.Module, device: torch.device
) -> Callable[[nn.Parameter], Any] | None:
    """Return the function by which FSDP2 shards divided experts among the ranks that hold the same ones."""
    if policies.ep == 1:
        return None
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    except ImportError:
        raise UserError(
            f"plan.ep = {policies.ep}: FSDP2 of torch {torch.__version__} cannot shard experts among fewer ranks than "
            "the rest: it can be predicted, but not run; use torch 2.13 or later, or a method without shards"
        ) from None

    mesh = expert_mesh(policies, device)
    shared = FSDPMeshInfo(mesh[REPLICAS], shard_mesh_dim=0)
    if policies.dp_replicate > 1:
        shared = HSDPMeshInfo(mesh["dp_replicate", REPLICAS], shard_mesh_dim=1, replicate_mesh_dim=0)
    places: dict[int, Any] = {}
    for _, inner in experts_of(module):
        parameters = [getattr(inner, name) for name in PARAMETERS]
        inside = shards_inside_experts([each.shape for each in parameters], replicas=shared.shard_mesh_size)
        places |= {id(each): ShardPlacementResult(Shard(1) if inside else None, shared) for each in parameters}
    return lambda parameter: places.get(id(parameter))


def _mesh(policies: Policies, device: torch.device) -> DeviceMesh:
    """Return the ranks that reduce their gradients together, on one axis, or on two if shards are replicated."""
    if policies.shards_replicas:
        return shard_mesh(policies, device)["dp_shard"]
    if policies.dp_replicate == 1:
        return data_mesh(policies, device, "dp_shard")
    return shard_mesh(policies, device)
