"""Gradient clipping and the division of scaled gradients: passes over them, and sums where ranks hold different ones.

[Note: clipping] torch.nn.utils.clip_grad_norm_ reads every gradient for its norm, and multiplies every gradient by
min(1, max_norm / norm), whether or not that is one. Replicas have equal gradients, so that each computes the norm by
itself. Where gradients are sharded, or stages hold other layers, norms are summed as squares: FSDP2's are DTensors:
the norms of all tensors, in the gradients' precision, are all-reduced over the shards as one vector (seen with torch
2.13); Gradient Sharding and the stages of a pipeline sum squares in fp64. Ranks that synchronize periodically clip by
the norm of their own gradients. A tied parameter counts once. Tensor-parallel ranks hold slices of some gradients, and
the whole of others, which the first of them counts (Megatron-LM, core/optimizer/clip_grads.py): they, and then the
shards of each, sum squares in fp64. So do ranks that divide experts and hold the whole of all else: where these are
tensor groups, one sum is of slices too, which the first group counts. Where all else is sharded too, each rank's shards
are summed over all of them at once (torch adds up no norms of several meshes).

[Note: loss scaling] A training in fp16 multiplies its loss by `workload.loss_scale`. Before the update one pass reads
and writes the gradients (torch._amp_foreach_non_finite_check_and_unscale_): it divides the fp32 gradients of shards,
and only checks those in fp16, which are divided once they are cast for the master copy (another pass over these). The
flag of an infinite gradient is all-reduced along every axis whose ranks hold different gradients (as in FSDP's
ShardedGradScaler). Steps that are skipped are not predicted.
"""

from collections.abc import Iterator, Sequence

from gssim import cost
from gssim.collectives import Communication
from gssim.program.lowering import Lowering
from gssim.program.offload import gradient_device
from gssim.program.task import Task, TaskId, collective_task
from gssim.program.tensor_slices import sum_over_slices
from gssim.scenario import tied_parameters

SQUARES_BYTES = 8
"""Bytes of a sum of squares in fp64."""
NORM, CLIP = TaskId("gradient-norm"), TaskId("clip")
FLAG_BYTES = 4
"""Bytes of the flag of an infinite gradient: an fp32 number."""


def clip_gradients(low: Lowering, rank: int, owned: Sequence[int], replicas: Sequence[Sequence[int]]) -> list[Task]:
    """Return the tasks that clip a rank's gradients before its update; see [Note: clipping].

    `owned`: elements of each tensor that the rank's optimizer updates. `replicas`: of a pipeline, the ranks of every
    replica, by position on the axis pp.
    """
    if low.scenario.workload.clip_norm is None:
        return []
    device = gradient_device(low, rank)
    whole = low.policies.gradients in ("local", "periodic", "all-reduce") and not low.flat_part
    tensors = [parameter.elements for _, parameter in low.parameters] if whole else list(owned)
    value_bytes = low.value_bytes if whole else low.master_bytes
    pass_s = cost.gradient_pass_s(device, elements=sum(tensors), tensors=len(tensors), value_bytes=value_bytes)
    norm = Task(NORM, "optimizer", duration_s=pass_s)
    scale = Task(CLIP, "optimizer", duration_s=2 * pass_s)  # reads and writes
    return [norm, *_sums(low, rank, replicas), scale]


def unscale_gradients(
    low: Lowering, rank: int, owned: Sequence[int], replicas: Sequence[Sequence[int]]
) -> Sequence[Task]:
    """Return the tasks that check a rank's scaled gradients, and divide them where they are the optimizer's own.

    Parameters: as of `clip_gradients`; see [Note: loss scaling].
    """
    if low.scenario.workload.loss_scale is None:
        return []
    device, policies = gradient_device(low, rank), low.policies
    shards = policies.gradients == "reduce-scatter" or bool(low.flat_part)
    tensors = list(owned) if shards else [parameter.elements for _, parameter in low.parameters]
    value_bytes = low.master_bytes if shards else low.value_bytes
    moved = (value_bytes, value_bytes)
    duration_s = cost.moving_time_s(device, value_bytes=moved, elements=sum(tensors), tensors=len(tensors))
    tasks = [Task(TaskId("unscale"), "optimizer", duration_s=duration_s)]
    own = TaskId("all-reduce", layer="infinite gradients")
    if policies.gradients == "reduce-scatter" and policies.shards > 1:
        tasks.append(collective_task(own, low.communication("all-reduce", "dp_shard", FLAG_BYTES)))
    elif low.flat_part and len(low.group) > 1:
        tasks.append(collective_task(own, Communication("all-reduce", low.group, FLAG_BYTES)))
    elif policies.ep > 1 and not low.flat_part:
        tasks.append(_over_experts(low, own._replace(layer="infinite gradients of experts"), FLAG_BYTES))
    if policies.tp > 1:
        of_slices = own._replace(layer="infinite gradients of slices")
        tasks.append(sum_over_slices(low, rank, of_slices, FLAG_BYTES))
    if replicas:
        first, *others = replicas
        exchange = Communication("all-reduce", tuple(first), FLAG_BYTES, beside=tuple(map(tuple, others)))
        tasks.append(collective_task(own._replace(layer="infinite gradients of the stages"), exchange))
    return tasks


def divides_master_gradients(low: Lowering) -> bool:
    """Return whether the optimizer divides gradients that it has cast for its master copy; see [Note: loss scaling]."""
    shards = low.policies.gradients == "reduce-scatter" or bool(low.flat_part)
    return low.scenario.workload.loss_scale is not None and not shards and low.has_master_copy


def _sums(low: Lowering, rank: int, replicas: Sequence[Sequence[int]]) -> Iterator[Task]:
    """Yield the all-reduces over ranks that hold different gradients."""
    policies = low.policies
    # ranks that divide experts are whole tensor groups: one sum is over both
    of_shards = policies.gradients == "reduce-scatter" and policies.shards > 1
    with_experts = policies.ep > 1 and not of_shards and not low.flat_part
    if policies.tp > 1 and not with_experts:
        yield sum_over_slices(low, rank, _sum_id("of slices"), SQUARES_BYTES)
    if of_shards:
        in_fp64 = policies.tp > 1 or policies.ep > 1
        size = SQUARES_BYTES if in_fp64 else low.master_bytes * _counted_tensors(low, rank)
        yield collective_task(_sum_id(), low.communication("all-reduce", "dp_shard", size))
    elif policies.gradients == "push" and len(low.group) > 1:
        for axis in (policies.push_axis, *(["dp_shard"] if low.places > 1 else [])):
            if len(low.groups_along(axis)[0]) > 1:
                own = _sum_id("" if axis == policies.push_axis else "in the node")
                yield collective_task(own, low.communication("all-reduce", axis, SQUARES_BYTES))
    elif low.flat_part and len(low.group) > 1:
        yield collective_task(_sum_id(), Communication("all-reduce", low.group, low.master_bytes))
        if low.policies.ep > 1:  # an optimizer of their own has a norm of its own
            yield collective_task(_sum_id("of experts"), Communication("all-reduce", low.group, low.master_bytes))
    elif policies.ep > 1:
        yield _over_experts(low, _sum_id("of experts"), SQUARES_BYTES)
    if replicas:
        first, *others = replicas
        exchange = Communication("all-reduce", tuple(first), SQUARES_BYTES, beside=tuple(map(tuple, others)))
        yield collective_task(_sum_id("of the stages"), exchange)


def _over_experts(low: Lowering, name: TaskId, size_bytes: float) -> Task:
    """Return an all-reduce over the ranks that divide experts among them, and hold all else whole."""
    group, *beside = low.expert_groups
    return collective_task(name, Communication("all-reduce", group, size_bytes, beside=tuple(beside)))


def _counted_tensors(low: Lowering, rank: int) -> int:
    """Return the number of a rank's parameters, without copies of tied ones that an earlier stage holds."""
    count = len(low.parameters)
    if low.stages:
        pp, place = low.policies.pp, low.policies.mesh.place(rank).pp
        for tied in tied_parameters(low.whole_layers, low.scenario.stage_ranges):
            places = {stage % pp for stage in tied.stages}
            count -= place in places and place != tied.stages[0] % pp
    return count


def _sum_id(of: str = "") -> TaskId:
    return TaskId("all-reduce", layer=f"gradient norm {of}".strip())
