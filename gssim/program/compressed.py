"""Compressed reductions of data parallelism's buckets: PowerSGD's low-rank factors, or the largest gradients (top-k).

[Note: compressors] A communication hook of DistributedDataParallel runs on each complete bucket, on the thread or
stream of the backward, so nothing else computes meanwhile. Its collectives overlap with the rest of the backward.
Everything that depends on their results is computed after the backward, for all buckets in two rounds, in the order of
the buckets. Without overlap each bucket is finished before the backward goes on.

powersgd, for matrices M of a bucket, W ranks:
    compress:    M += error; error = M; the other tensors / W are copied together; Q is orthogonalized; P = M Q
    all-reduces: of the other tensors, and of all P together
    factor:      the other tensors are copied back; P is orthogonalized; Q = M^T P, or as it is where P's column is zero
    all-reduce:  of all Q together
    decompress:  Q /= W; M = P Q^T; error -= M
This is the arithmetic of torch's powerSGD_hook (2.13, distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py; Vogels et
al. 2019, arXiv:1905.13727). torch's callbacks wait for further all-reduces in the threads that reduce, so on gloo
several buckets in flight could deadlock. Other differences: all factors are orthogonalized by modified Gram-Schmidt
(torch uses QR for some ranks); errors are kept for matrices only, and in place; P is not kept; empty collectives are
not sent; a matrix without gradients for a step keeps its Q (a Q of zeros would send nothing ever after; torch divides
by zero).

topk, for a bucket of n elements, k of them the largest:
    compress:     error += bucket; its k largest magnitudes are found; their values / W are copied, and cleared in error
    all-gathers:  of values, and of 32-bit indices
    decompress:   the bucket is cleared; every rank's entries are added to it, one rank after another
(Aji and Heafield 2017, arXiv:1704.05021, with a threshold for each bucket.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from gssim import cost
from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.memory import Event, footprint
from gssim.plan import INDEX_BYTES, largest_count
from gssim.plan.plan import low_rank_of
from gssim.program.lowering import Lowering, once_a_run
from gssim.program.task import Bucket, Task, TaskId, collective_task

HALF_BYTES = 2
"""Bytes of an element in bf16 and fp16."""
FOUND_INDEX_BYTES = 8
"""An index as torch.topk returns it."""


@dataclass(frozen=True)
class LowRank:
    """Tensors of a bucket under PowerSGD."""

    matrices: tuple[tuple[int, int, int], ...]
    """Rows, columns and rank of each tensor that is compressed."""
    others: tuple[int, ...]
    """Elements of each other tensor."""

    @property
    def elements(self) -> int:
        """Elements of all matrices."""
        return sum(rows * columns for rows, columns, _ in self.matrices)

    @property
    def left(self) -> int:
        """Elements of all factors P."""
        return sum(rows * rank for rows, _, rank in self.matrices)

    @property
    def right(self) -> int:
        """Elements of all factors Q."""
        return sum(columns * rank for _, columns, rank in self.matrices)


def compress_bucket(low: Lowering, device: DeviceType, bucket: Bucket) -> tuple[list[Task], list[Task], list[Task]]:
    """Return the tasks of a bucket's hook, and those of both rounds after the backward; see [Note: compressors]."""
    if low.policies.compressor == "topk":
        return _send_largest(low, device, bucket)
    return _send_factors(low, device, bucket)


@once_a_run
def compressor_tensors(low: Lowering) -> dict[str, list[float]]:
    """Return the bytes of each bucket's persistent compressor tensors (those kept between steps), by category."""
    plan, kept = low.scenario.plan, {}
    if low.policies.compressor == "topk" and plan.topk.error_feedback:
        kept["residuals"] = [bucket.elements for bucket in low.buckets]
    if low.policies.compressor == "powersgd":
        factors = _low_rank(low)
        if plan.powersgd.error_feedback:
            kept["residuals"] = [each.elements for each in factors if each.matrices]
        if plan.powersgd.warm_start:
            kept["low_rank_factors"] = [each.right for each in factors if each.matrices]
    return {name: [float(elements * low.value_bytes) for elements in sizes] for name, sizes in kept.items()}


@once_a_run
def _low_rank(low: Lowering) -> tuple[LowRank, ...]:
    """Return the tensors of every bucket under PowerSGD."""
    options, result = low.scenario.plan.powersgd, []
    for bucket in low.buckets:
        tensors = [(low_rank_of(options, parameter.shape), parameter.elements) for _, parameter in bucket.members]
        matrices = tuple(matrix for matrix, _ in tensors if matrix is not None)
        result.append(LowRank(matrices, tuple(elements for matrix, elements in tensors if matrix is None)))
    return tuple(result)


def _send_factors(low: Lowering, device: DeviceType, bucket: Bucket) -> tuple[list[Task], list[Task], list[Task]]:
    options, value, precision = low.scenario.plan.powersgd, low.value_bytes, low.scenario.workload.precision
    tensors = _low_rank(low)[bucket.index]
    others, count = sum(tensors.others), len(tensors.matrices)
    pass_s, call_s = value / device.memory_bandwidth_bytes_per_s, device.operation_overhead_s

    begin_s = factor_s = end_s = 0.0
    if others and not count:  # the bucket has no matrix: it is divided and reduced in place
        begin_s += 2 * others * pass_s + call_s
    elif others:
        begin_s += 4 * others * pass_s + 2 * call_s
        factor_s += 2 * others * pass_s + len(tensors.others) * call_s
    if count and options.error_feedback:
        calls = count if device.kind == "cpu" else 1  # torch's functions on lists are one kernel on a GPU
        begin_s += 5 * tensors.elements * pass_s + 2 * calls * call_s
        end_s += 3 * tensors.elements * pass_s + calls * call_s
    if count and not options.warm_start:
        begin_s += tensors.right * pass_s + call_s
    for rows, columns, rank in tensors.matrices:
        project_s, low_rank_factor_s, restore_s = (
            cost.low_rank_product_time_s(
                device, product, rows=rows, columns=columns, rank=rank, value=value, precision=precision
            )
            for product in cost.LOW_RANK_PRODUCTS
        )
        begin_s += cost.orthogonalization_time_s(device, rows=columns, rank=rank, value=value) + project_s
        factor_s += cost.orthogonalization_time_s(device, rows=rows, rank=rank, value=value) + low_rank_factor_s
        factor_s += (rows + 2 * columns) * rank * pass_s + 2 * call_s  # columns of zeros in P keep those of Q
        end_s += restore_s
    if count:
        end_s += 2 * tensors.right * pass_s + call_s

    rest = float(others * value) if count else 0.0
    left, right = float(tensors.left * value), 0.0 if options.warm_start else float(tensors.right * value)
    compress = _compression_task(TaskId("compress", bucket=bucket.index), begin_s, rest, right, left)
    sums = [
        _collective(low, "all-reduce", name, elements * value, after=compress, number=2 * bucket.index + place)
        for place, (name, elements) in enumerate((("rest", others), ("P", tensors.left)))
        if elements
    ]
    waits = _wait_tasks(low, sums)
    if not count:
        return [compress, *sums], waits, []
    factor = _compression_task(TaskId("factor", bucket=bucket.index), factor_s, -rest)
    total = _collective(low, "all-reduce", "Q", tensors.right * value, after=factor, number=bucket.index)
    decompress = _compression_task(TaskId("decompress", bucket=bucket.index), end_s, -right, -left)
    return [compress, *sums], [*waits, factor, total], [*_wait_tasks(low, [total]), decompress]


def _send_largest(low: Lowering, device: DeviceType, bucket: Bucket) -> tuple[list[Task], list[Task], list[Task]]:
    options, value, ranks = low.scenario.plan.topk, low.value_bytes, len(low.group)
    entries = largest_count(options, bucket.elements)
    size = float(bucket.elements * value)
    begin_s = cost.largest_time_s(device, elements=bucket.elements, entries=entries, value=value)
    if options.error_feedback:
        begin_s += cost.residual_time_s(device, elements=bucket.elements, value=value, kept=value)
    end_s = cost.copy_time_s(device, size) / 2 + device.operation_overhead_s  # to set the buffer to zero
    end_s += ranks * cost.unpack_time_s(device, encoding="coo", elements=bucket.elements, entries=entries, value=value)
    sent = [float(entries * each) for each in (value, INDEX_BYTES)]
    received = [ranks * each for each in sent]
    found = float(entries * (value + FOUND_INDEX_BYTES))
    compress = Task(TaskId("compress", bucket=bucket.index), "compression", duration_s=begin_s)
    gathers = [
        _collective(low, "all-gather", name, each, after=compress, number=2 * bucket.index + place)
        for place, (name, each) in enumerate(zip(("values", "indices"), received, strict=True))
    ]
    staged = [low.staging(device, gather.exchange) for gather in gathers if gather.exchange is not None]
    # each gather is posted with a flat copy of its output, and the values' are still under way when the indices' are
    posted = [change._replace(position=5) for change in chain(*staged)]
    compress = replace(
        compress,
        need=footprint(
            [
                Event(0, size, "temporaries"),  # magnitudes
                Event(1, found, "temporaries"),
                Event(1, -size, "temporaries"),
                Event(1, -sent[0], "temporaries"),
                *(Event(2, each, "communication") for each in sent),
                Event(3, sent[0] - found, "temporaries"),
                *(Event(4, each, "communication") for each in received),
                *posted,
            ]
        ),
    )
    if not low.scenario.plan.overlap:  # both are posted before either is done; with overlap each has its own stream
        staged[0] = (*staged[0], *staged[1])
    gathers = [replace(gather, need=footprint(need)) for gather, need in zip(gathers, staged, strict=True)]
    decompress = _compression_task(
        TaskId("decompress", bucket=bucket.index), end_s, *(-each for each in (*sent, *received))
    )
    return [compress, *gathers], [*_wait_tasks(low, gathers), decompress], []


def _compression_task(name: TaskId, duration_s: float, *changes_bytes: float) -> Task:
    """Return a task of the compute stream that allocates or releases messages."""
    need = footprint([Event(0, size, "communication") for size in changes_bytes if size])
    return Task(name, "compression", duration_s=duration_s, need=need)


def _collective(
    low: Lowering, kind: Literal["all-reduce", "all-gather"], what: str, size: float, *, after: Task, number: int
) -> Task:
    """Return a collective, on the communication stream if the plan overlaps it, else on the compute stream."""
    stream = low.communication_stream(number) if low.scenario.plan.overlap else "compute"
    name = TaskId(kind, layer=what, bucket=after.id.bucket)
    half = low.scenario.workload.precision if kind == "all-reduce" and low.value_bytes == HALF_BYTES else ""
    return collective_task(name, Communication(kind, low.group, size, half_precision=half), stream, after=(after.id,))


def _wait_tasks(low: Lowering, collectives: Sequence[Task]) -> list[Task]:
    """Return the task that waits for collectives of another stream."""
    if not low.scenario.plan.overlap:
        return []
    wait = collectives[-1].id.serving("wait")
    return [Task(wait, "exposed_communication", after=tuple(task.id for task in collectives))]
