"""Expert parallelism: all-to-alls of routed rows among the ranks that divide the experts of a layer.

Before a layer's experts run, each rank tells the others how many rows it sends to each of their experts (`counts`),
then sends the rows (`dispatch`); their results come back (`combine`). The backward combines and dispatches gradients.
The compute stream waits for each, as the next operation needs it. With balanced load, a rank sends

    tokens * experts_per_token * width * bytes * (ep - 1) / ep

in each dispatch and each combine (Rajbhandari et al. 2022, DeepSpeed-MoE, arXiv:2201.05596, section 5.2). With uneven
load the ranks of the fullest experts receive, process and send back the most, and the others wait for them.

DistributedDataParallel reduces the gradients of all other parameters, in buckets, over all data ranks. Gradients of
experts are all-reduced over the ranks that hold the same experts, each on its own and without a copy to a bucket; they
too are divided by the number of data ranks. As with buckets, they are cast for that to `workload.reduce_precision`, or
to the precision of `plan.compress`, and back. Megatron-LM's distributed optimizer keeps them in a buffer of their own,
which is reduce-scattered over these ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gssim.collectives import Communication, Pairs
from gssim.memory import footprint
from gssim.program.compressed import HALF_BYTES
from gssim.program.lowering import Lowering, once_a_run
from gssim.program.task import PASSES, Bucket, Operation, Task, TaskId, collective_task
from gssim.scenario import rows_by_rank
from gssim.units import PRECISION_BYTES, Precision
from gssim.workload import LayerInstance, Reduction

OPERATIONS: Mapping[str, Operation] = {
    "counts": "count-rows",
    "dispatch": "dispatch",
    "combine": "combine",
}
"""Operation of a task, by the kind of exchange in the layer's trace."""


def expert_exchange(
    low: Lowering, rank: int, instance: LayerInstance, reduction: Reduction, phase: str, samples: int
) -> Task:
    """Return the task of an all-to-all of a layer with divided experts; `samples`: of each rank."""
    own = TaskId(OPERATIONS[reduction.kind], layer=instance.module, during=PASSES[phase])
    exchange = _exchange(low, instance.module, reduction.kind, reduction.size_bytes.at(b=1, s=1), samples)
    staged = low.staging(low.device(rank), exchange)
    return collective_task(own, exchange, need=footprint(staged))


@once_a_run
def _exchange(low: Lowering, module: str, kind: str, size: int, samples: int) -> Communication:
    """Return an all-to-all of every group of ranks that divide experts; `size`: bytes of a row, or of the counts."""
    if kind == "counts":
        return count_exchange(low.expert_groups, size)
    instance = next(each for each in low.whole_expert_layers if each.module == module)
    rows = rows_by_rank(low.scenario.workload, low.policies, instance)
    sent = [samples * count * low.traced_scale * size for count in rows]
    return row_exchange(low.expert_groups, kind, sent)


def count_exchange(groups: Sequence[Sequence[int]], size_bytes: float) -> Communication:
    """Return the all-to-all of the numbers of rows, in every group of ranks that divide experts."""
    return Communication.among(groups, "all-to-all", float(size_bytes))


def row_exchange(groups: Sequence[Sequence[int]], kind: str, sent: Sequence[float]) -> Communication:
    """Return a dispatch or combine in every group; `sent`: the bytes of the rows that each rank sends to each place."""
    pairs = Pairs([tuple(sent)], (0,) * len(sent))  # all send as much to a rank
    if kind == "combine" and len(set(sent)) > 1:
        pairs = Pairs([(each,) * len(sent) for each in sent], tuple(range(len(sent))))
    size_bytes = len(sent) * sum(sent)
    settings: dict[str, Any] = {"pair_bytes": pairs, "data_dependent": True, "carried_as": "all-to-all"}
    return Communication.among(groups, "all-to-all-v", size_bytes, **settings)


def expert_reductions(low: Lowering, precision: Precision) -> list[tuple[Bucket, Communication | None]]:
    """Return each bucket of gradients of experts with its reduction; None where no other rank holds the same experts.

    These are no buckets of DistributedDataParallel's: a rank that holds its experts alone has nothing to cast.
    """
    groups = low.expert_replicas
    if len(groups[0]) == 1:
        return [(bucket, None) for bucket in low.expert_buckets]
    kind, value_bytes = "reduce-scatter" if low.has_one_gradient_buffer else "all-reduce", PRECISION_BYTES[precision]
    summed = precision if value_bytes == HALF_BYTES else ""
    return [
        (each, Communication.among(groups, kind, each.elements * value_bytes, half_precision=summed))
        for each in low.expert_buckets
    ]
