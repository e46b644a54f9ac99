"""Gradient clipping: the norm of all gradients, an all-reduce where ranks hold different ones, and the scaling.

[Note: clipping] torch.nn.utils.clip_grad_norm_ reads every gradient for its norm, and multiplies every gradient by
min(1, max_norm / norm), whether or not that is one. Replicas have equal gradients, so that each computes the norm by
itself. Where gradients are sharded, or stages hold other layers, norms are summed as squares: FSDP2's are DTensors:
the norms of all tensors, in the gradients' precision, are all-reduced over the shards as one vector (seen with torch
2.13); Gradient Sharding and the stages of a pipeline sum squares in fp64. Ranks that synchronize periodically clip by
the norm of their own gradients. A tied parameter counts once.
"""

from collections.abc import Iterator, Sequence

from gssim import cost
from gssim.collectives import Communication
from gssim.program.lowering import Lowering
from gssim.program.task import Task, TaskId, collective_task

SQUARES_BYTES = 8
"""Bytes of a sum of squares in fp64."""
NORM, CLIP = TaskId("gradient-norm"), TaskId("clip")


def clip_gradients(low: Lowering, rank: int, owned: Sequence[int], replicas: Sequence[Sequence[int]]) -> list[Task]:
    """Return the tasks that clip a rank's gradients before its update; see [Note: clipping].

    `owned`: elements of each tensor that the rank's optimizer updates. `replicas`: of a pipeline, the ranks of every
    replica, by position on the axis pp.
    """
    if low.scenario.workload.clip_norm is None:
        return []
    device = low.device(rank)
    whole = low.policies.gradients in ("local", "periodic", "all-reduce") and not low.flat_part
    tensors = [parameter.elements for _, parameter in low.parameters] if whole else list(owned)
    value_bytes = low.value_bytes if whole else low.master_bytes
    pass_s = cost.gradient_pass_s(device, elements=sum(tensors), tensors=len(tensors), value_bytes=value_bytes)
    norm = Task(NORM, "optimizer", duration_s=pass_s)
    scale = Task(CLIP, "optimizer", duration_s=2 * pass_s)  # reads and writes
    return [norm, *_sums(low, replicas), scale]


def _sums(low: Lowering, replicas: Sequence[Sequence[int]]) -> Iterator[Task]:
    """Yield the all-reduces over ranks that hold different gradients."""
    policies = low.policies
    if policies.gradients == "reduce-scatter" and policies.dp_shard > 1:
        size = low.master_bytes * len(low.parameters)
        yield collective_task(_sum_id(), low.communication("all-reduce", "dp_shard", size))
    elif policies.gradients == "push" and len(low.group) > 1:
        for axis in (policies.push_axis, *(["dp_shard"] if low.places > 1 else [])):
            if len(low.groups_along(axis)[0]) > 1:
                own = _sum_id("" if axis == policies.push_axis else "in the node")
                yield collective_task(own, low.communication("all-reduce", axis, SQUARES_BYTES))
    elif low.flat_part and len(low.group) > 1:
        yield collective_task(_sum_id(), Communication("all-reduce", low.group, low.master_bytes))
    if replicas:
        first, *others = replicas
        exchange = Communication("all-reduce", tuple(first), SQUARES_BYTES, beside=tuple(map(tuple, others)))
        yield collective_task(_sum_id("of the stages"), exchange)


def _sum_id(of: str = "") -> TaskId:
    return TaskId("all-reduce", layer=f"gradient norm {of}".strip())
