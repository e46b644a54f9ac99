"""Gathers of updated parameters beside the next step's forwards: Megatron-LM's --overlap-param-gather.

Buckets are those of the reduction. Modules of a block wait for their own buckets, while here a block is one layer: it
waits for its first bucket when it begins, and the layer after it for the others. Divided experts, whose buckets are
gathered among other ranks, are one bucket here.

[Note: gathers of stages] What a stage gathers, and when, depends on the schedule. With one stage a rank, the pre-hook
of a stage's first forward begins the gather (as without stages), and so only when activations have arrived: the host
synchronizes with the device after it has received them. A first rank gathers bucket by bucket beside its forward. The
parameters of any later stage are one bucket, whose gather nothing hides, and which the next stage waits for as well:
the gathers of all stages but the first follow one another. Without overlap, stages gather at the same time. With
virtual stages (`interleaved`) gathers are aligned across the ranks of a pipeline: those of a rank's first two stages
begin with the step, before activations arrive, and those of a further stage when the pipeline's first rank comes to its
stage before that. Only the very first stage has several buckets; all begin together, that of the last layers first.

Source: Megatron-LM, core/distributed/param_and_grad_buffer.py (finish_param_sync), distributed_data_parallel.py
(start_param_sync; bucket_size), core/pipeline_parallel/p2p_communication.py (batch_p2p_sync), schedules.py
(param_sync_func), training/training.py and arguments.py (align_param_gather, which virtual stages alone keep).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gssim.collectives import Communication
from gssim.plan import Action
from gssim.program.lowering import Lowering
from gssim.program.task import Bucket, Task, TaskId, collective_task

Waits = Mapping[TaskId, Sequence[Task]]
"""Tasks to insert before others, by the identity of the task that they precede."""


class _Gather(NamedTuple):
    first_read: int
    """Index of the first layer that reads what is gathered."""
    issue: Task
    own: Task
    take: Task


def gather_before_reads(low: Lowering, forwards: Sequence[TaskId], *, at_once: bool = False) -> Waits:
    """Return the tasks that precede forwards: issues of gathers, the gathers, and waits for them.

    The first layer that reads a bucket waits for it, and the gather of the next bucket is issued then; the first gather
    is issued when the first forward begins. `forwards`: identity of every layer's first forward. `at_once`: all
    buckets are gathered as one.
    """
    before: dict[TaskId, list[Task]] = defaultdict(list)
    for gathers in _gathers_in_bucket_order(low, at_once=at_once):
        issued_at, latest = 0, None
        for each in _in_order_of_reads(gathers):
            index = each.first_read
            before[forwards[index if latest is None else issued_at]] += [each.issue, each.own]
            before[_waiting_forward(forwards, index, latest)].append(each.take)
            issued_at = latest = index
    return before


def gather_ahead(low: Lowering, forwards: Sequence[TaskId], *, at_once: bool) -> tuple[Sequence[Task], Waits]:
    """Return the issues and gathers of all buckets, in the buckets' order, and the waits for them before forwards.

    `forwards`, `at_once`: as in `gather_before_reads`.
    """
    begun: list[Task] = []
    before: dict[TaskId, list[Task]] = defaultdict(list)
    for gathers in _gathers_in_bucket_order(low, at_once=at_once):
        begun += [task for each in gathers for task in (each.issue, each.own)]
        latest = None
        for each in _in_order_of_reads(gathers):
            before[_waiting_forward(forwards, each.first_read, latest)].append(each.take)
            latest = each.first_read
    return begun, before


def _in_order_of_reads(gathers: Sequence[_Gather]) -> list[_Gather]:
    """Return gathers by the first layer that reads them; of a layer's, the last bucket comes first."""
    return sorted(reversed(gathers), key=lambda gather: gather.first_read)


def _waiting_forward(forwards: Sequence[TaskId], index: int, latest: int | None) -> TaskId:
    """Return the forward that waits for a bucket of layer `index`; `latest`: layer of the bucket before it, or None.

    Of two buckets that one layer reads, the next layer's forward waits for the second.
    """
    return forwards[min(index + (index == latest), len(forwards) - 1)]


def _gathers_in_bucket_order(low: Lowering, *, at_once: bool) -> list[list[_Gather]]:
    """Return the gathers among the ranks that hold equal layers, and those of divided experts, in buckets' order."""
    chains = []
    for buckets, groups in ((low.buckets, [low.group]), (low.expert_buckets, low.expert_replicas)):
        if len(groups[0]) > 1 and buckets:
            parts = [tuple(buckets)] if at_once else [(bucket,) for bucket in buckets]
            chains.append([_gather(low, part, groups) for part in parts])
    return chains


def _gather(low: Lowering, buckets: Sequence[Bucket], groups: Sequence[Sequence[int]]) -> _Gather:
    own = TaskId("all-gather-parameters", bucket=buckets[0].index)
    elements = sum(bucket.elements for bucket in buckets)
    exchange = Communication.among(groups, "all-gather", elements * low.value_bytes)
    issue = Task(own.serving("issue"), "forward")
    return _Gather(
        min(instance.index for bucket in buckets for instance, _ in bucket.members),
        issue,
        collective_task(own, exchange, "communication", after=(issue.id,)),
        Task(own.serving("take"), "forward", after=(own,)),
    )


def aligned_starts(actions: Sequence[Action], place: int) -> list[tuple[int, int]]:
    """Return the stages of a rank in order, each with the number of the compute before which its gather begins.

    `actions`: the rank's schedule, whose forwards and backwards are counted from 0; `place`: the rank's position in the
    pipeline. 0 is the begin of the step, before the rank waits for activations. See [Note: gathers of stages].

    >>> from gssim.plan.pipeline_schedule import schedule
    >>> each = schedule("interleaved", ranks=2, stages=8, micro_batches=4)
    >>> [aligned_starts(each[place], place) for place in range(2)]
    [[(0, 0), (2, 0), (4, 2), (6, 4)], [(1, 0), (3, 0), (5, 1), (7, 3)]]
    """
    computes = [action for action in actions if action.kind in ("forward", "backward")]
    forwards = [number for number, action in enumerate(computes) if action.kind == "forward"]
    stages = [computes[number].stage for number in forwards]
    order = list(dict.fromkeys(stages))
    starts = [0, 0, *(forwards[stages.index(before) - place] for before in order[1:])]
    return list(zip(order, starts, strict=False))
