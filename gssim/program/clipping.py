"""Gradient clipping and unscaling: passes over a rank's gradients, and all-reduces where ranks hold different ones.

[Note: clipping] torch.nn.utils.clip_grad_norm_ reads every gradient for its norm, and multiplies every gradient by
min(1, max_norm / norm), whether or not that is one. Replicas have equal gradients, so each computes the norm by itself.
Ranks that hold different gradients (shards, or the layers of different stages) combine their norms:

- FSDP2's gradients are DTensors. The norms of all tensors, in the gradients' precision, are all-reduced over the shards
  as one vector (seen with torch 2.13).
- Gradient Sharding and pipeline stages sum squares in fp64.
- Ranks that synchronize periodically clip by the norm of their own gradients and communicate nothing.
- Tensor-parallel ranks hold slices of some gradients and full copies of others. Only the first of them counts the
  copies (Megatron-LM, core/optimizer/clip_grads.py). The tensor ranks sum squares in fp64, and then the shards of each.
- Expert-parallel ranks hold all parameters but the experts as full copies, and also sum squares in fp64. Where they are
  whole tensor groups, one sum covers slices and experts, and only the first tensor group counts the copies. Where the
  other parameters are sharded too, the squares of each rank's shards are summed over all ranks at once (torch does not
  add up norms of several meshes).

A tied parameter counts once.

[Note: loss scaling] A training in fp16 multiplies its loss by `workload.loss_scale`. Before the update one pass reads
and writes the gradients (torch._amp_foreach_non_finite_check_and_unscale_). It divides gradients that are in fp32:
those of shards, and those that replicas keep so (`workload.gradient_precision`). Gradients in fp16 are only checked in
this pass: they are divided in another one, after the cast for the master copy. That division also clips them, so their
clipping is only the norm (as in DeepSpeed's unscale_and_clip_grads, which combines both factors).
The flag of an infinite gradient is all-reduced along every axis whose ranks hold different gradients (as in FSDP's
ShardedGradScaler). Owners of pushed gradients agree among all replicas, as for the norm. A pushing rank compares
scaled gradients with the threshold times the factor, so that what is sent does not depend on it; an element that is
not finite is sent, for its owner to find. Skipped steps are not predicted.
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

    `owned`: elements of each tensor that the rank's optimizer updates. `replicas`: for a pipeline, the ranks of every
    replica, in order of their pp coordinate.
    """
    if low.scenario.workload.clip_norm is None:
        return []
    device = gradient_device(low, rank)
    whole = low.policies.gradients in ("local", "periodic", "all-reduce") and not low.flat_part
    tensors = [parameter.elements for _, parameter in low.parameters] if whole else list(owned)
    value_bytes = low.kept_value_bytes if whole else low.master_bytes
    pass_s = cost.gradient_pass_s(device, elements=sum(tensors), tensors=len(tensors), value_bytes=value_bytes)
    norm = Task(NORM, "optimizer", duration_s=pass_s)
    tasks = [norm, *_sums(low, rank, replicas)]
    if not divides_master_gradients(low):
        tasks.append(Task(CLIP, "optimizer", duration_s=2 * pass_s))  # reads every gradient and writes it
    return tasks


def unscale_gradients(
    low: Lowering, rank: int, owned: Sequence[int], replicas: Sequence[Sequence[int]]
) -> Sequence[Task]:
    """Return the pass that checks a rank's gradients for infinities (and divides shards), and all-reduces of the flag.

    The parameters are those of `clip_gradients`; see [Note: loss scaling].
    """
    if low.scenario.workload.loss_scale is None:
        return []
    device, policies = gradient_device(low, rank), low.policies
    shards = policies.gradients in ("reduce-scatter", "push") or bool(low.flat_part)
    tensors = list(owned) if shards else [parameter.elements for _, parameter in low.parameters]
    value_bytes = low.master_bytes if shards else low.kept_value_bytes
    # reads and writes
    pass_s = cost.gradient_pass_s(device, elements=sum(tensors), tensors=len(tensors), value_bytes=2 * value_bytes)
    tasks = [Task(TaskId("unscale"), "optimizer", duration_s=pass_s)]
    own = TaskId("all-reduce", layer="infinite gradients")
    if policies.gradients == "reduce-scatter" and policies.shards > 1:
        tasks.append(collective_task(own, low.communication("all-reduce", "dp_shard", FLAG_BYTES)))
    elif policies.gradients == "push":
        tasks += _over_owners(low, own, FLAG_BYTES)
    elif low.flat_part and len(low.group) > 1:
        tasks.append(collective_task(own, Communication("all-reduce", low.group, FLAG_BYTES)))
        if policies.ep > 1:  # experts have an optimizer, and so a flag, of their own
            of_experts = own._replace(layer="infinite gradients of experts")
            tasks.append(collective_task(of_experts, Communication("all-reduce", low.group, FLAG_BYTES)))
    elif policies.ep > 1 and not low.flat_part:
        tasks.append(_over_experts(low, own._replace(layer="infinite gradients of experts"), FLAG_BYTES))
    if policies.tp > 1:
        of_slices = own._replace(layer="infinite gradients of slices")
        tasks.append(sum_over_slices(low, rank, of_slices, FLAG_BYTES))
    if replicas:
        exchange = Communication.among(map(tuple, replicas), "all-reduce", FLAG_BYTES)
        tasks.append(collective_task(own._replace(layer="infinite gradients of the stages"), exchange))
    return tasks


def divides_master_gradients(low: Lowering) -> bool:
    """Return whether the optimizer divides gradients that it has cast for its master copy; see [Note: loss scaling]."""
    shards = low.policies.gradients in ("reduce-scatter", "push") or bool(low.flat_part)
    return low.scenario.workload.loss_scale is not None and not shards and low.casts_gradients


def _sums(low: Lowering, rank: int, replicas: Sequence[Sequence[int]]) -> Iterator[Task]:
    """Yield the all-reduces over ranks that hold different gradients."""
    policies = low.policies
    # expert-parallel groups consist of whole tensor groups: one all-reduce sums over both
    of_shards = policies.gradients == "reduce-scatter" and policies.shards > 1
    with_experts = policies.ep > 1 and not of_shards and not low.flat_part
    if policies.tp > 1 and not with_experts:
        yield sum_over_slices(low, rank, _sum_id("of slices"), SQUARES_BYTES)
    if of_shards:
        in_fp64 = policies.tp > 1 or policies.ep > 1
        size = SQUARES_BYTES if in_fp64 else low.master_bytes * _counted_tensors(low, rank)
        yield collective_task(_sum_id(), low.communication("all-reduce", "dp_shard", size))
    elif policies.gradients == "push":
        yield from _over_owners(low, _sum_id(), SQUARES_BYTES)
    elif low.flat_part and len(low.group) > 1:
        yield collective_task(_sum_id(), Communication("all-reduce", low.group, low.master_bytes))
        if low.policies.ep > 1:  # experts have an optimizer, and so a norm, of their own
            yield collective_task(_sum_id("of experts"), Communication("all-reduce", low.group, low.master_bytes))
    elif policies.ep > 1:
        yield _over_experts(low, _sum_id("of experts"), SQUARES_BYTES)
    if replicas:
        exchange = Communication.among(map(tuple, replicas), "all-reduce", SQUARES_BYTES)
        yield collective_task(_sum_id("of the stages"), exchange)


def _over_owners(low: Lowering, name: TaskId, size_bytes: float) -> Iterator[Task]:
    """Yield all-reduces over the owners of pushed gradients: across nodes, then inside each, if both have several."""
    if len(low.group) == 1:
        return
    for axis in (low.policies.push_axis, *(["dp_shard"] if low.places > 1 else [])):
        if len(low.groups_along(axis)[0]) > 1:
            place = "" if axis == low.policies.push_axis else "in the node"
            own = name._replace(layer=f"{name.layer} {place}".strip())
            yield collective_task(own, low.communication("all-reduce", axis, size_bytes))


def _over_experts(low: Lowering, name: TaskId, size_bytes: float) -> Task:
    """Return an all-reduce over the ranks that divide the experts and hold full copies of everything else."""
    return collective_task(name, Communication.among(low.expert_groups, "all-reduce", size_bytes))


def _counted_tensors(low: Lowering, rank: int) -> int:
    """Return the number of a rank's parameter tensors, not counting tied copies that an earlier stage also holds."""
    count = len(low.parameters)
    if low.stages:
        pp, place = low.policies.pp, low.policies.mesh.place(rank).pp
        for tied in tied_parameters(low.whole_layers, low.scenario.stage_ranges):
            places = {stage % pp for stage in tied.stages}
            count -= place in places and place != tied.stages[0] % pp
    return count


def _sum_id(of: str = "") -> TaskId:
    return TaskId("all-reduce", layer=f"gradient norm {of}".strip())
