"""Gradient Sharding: gradients pushed to the owners of their shards."""

from collections.abc import Sequence
from dataclasses import replace

from gssim import collectives, costs, density, shares
from gssim.collectives import Communication
from gssim.memory import (
    Event,
    Footprint,
    bytes_of,
    footprint,
)
from gssim.program.compute import insert_after, part_at
from gssim.program.lowering import Bucket, Lowering
from gssim.program.task import Task

COUNT_BYTES = 8
"""A thresholded push first tells each owner how many entries come, as one int64."""
TORCH_INDEX_BYTES = 8
"""torch lists indices as int64 before they are shortened."""


def push_gradients(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """GS: a complete bucket is cut by owner, thresholded, packed and sent to the owners, one at a time.

    The bucket's buffer lives from its first gradient until it is sent; the owner adds what arrives to its own range.
    """
    previous: list[Task] = []
    for bucket in low.buckets:
        start = part_at(low, tasks, bucket.started)
        tasks[start] = _with_bucket_buffer(tasks[start], bucket.elements * low.value_bytes)
        index = part_at(low, tasks, bucket.complete)
        collect_s = costs.copy_time_s(low.device(rank), bucket.elements * low.value_bytes)
        tasks[index] = replace(tasks[index], duration_s=tasks[index].duration_s + collect_s)
        push, drain = _push_bucket(low, rank, bucket)
        insert_after(tasks, index, [*previous, *push])
        previous = drain
    return [*tasks, *previous]


def _with_bucket_buffer(task: Task, size: float) -> Task:
    """Return the task in which a bucket's first gradient becomes ready, with the bucket's buffer allocated."""
    peak, kept = dict(task.need.peak), dict(task.need.kept)
    for sizes in (peak, kept):
        sizes["buckets"] = sizes.get("buckets", 0.0) + size
    return replace(task, need=Footprint(bytes_of(peak), bytes_of(kept)))


def _push_bucket(low: Lowering, rank: int, bucket: Bucket) -> tuple[list[Task], list[Task]]:
    """Return the tasks that send a bucket off, and those that take in what arrives."""
    thresholded = low.scenario.plan.push.threshold is not None
    name = f"push bucket {bucket.index}"
    matrix, entries = _push_matrix(low, bucket)
    dense = bucket.elements * low.value_bytes
    low.communications[name] = Communication(
        "all-to-all-v", low.group, (len(low.group) - 1) * dense, pair_bytes=matrix, data_dependent=thresholded
    )
    sent_bytes, received_bytes = sum(matrix[rank]), sum(row[rank] for row in matrix)
    tasks = [_prepare(low, rank, bucket, list(zip(matrix[rank], entries[rank], strict=True)))]
    if thresholded:
        tasks += _count_exchange(low, bucket)
    posting_s = collectives.posting_s(low.scenario.cluster, sent_bytes)
    incoming = footprint([Event(0, received_bytes, "communication")])
    tasks.append(Task(f"post {name}", "exposed_communication", duration_s=posting_s, need=incoming))
    stream = "communication" if low.scenario.plan.overlap else "compute"
    tasks.append(Task(name, "exposed_communication", stream, communication=name, after=(tasks[-1].label,)))
    cast = _largest_cast(low, bucket, rank, [row[rank] for row in entries])
    # what was sent is given back once the messages are done, what was received once it is added
    release = [Event(0, -sent_bytes, "communication") if thresholded else Event(0, -dense, "buckets")]
    release += [Event(1, cast, "temporaries"), Event(2, -cast, "temporaries")]
    release.append(Event(3, -received_bytes, "communication"))
    if thresholded:
        add_s = costs.scatter_time_s(low.device(rank), received=sum(row[rank] for row in entries))
    else:
        add_s = costs.copy_time_s(low.device(rank), 1.5 * received_bytes)  # read both, write one
    drain = Task(f"add bucket {bucket.index}", "compression", duration_s=add_s, after=(name,), need=footprint(release))
    return tasks, [drain]


def _largest_cast(low: Lowering, bucket: Bucket, rank: int, entries: Sequence[float]) -> float:
    """Return the bytes of the largest contribution in the owner's precision, which it is added in, if it is another."""
    if not low.has_master_copy:
        return 0.0
    own = shares.split(bucket.elements, low.shard_shares)[rank]
    others = [sent for sender, sent in enumerate(entries) if sender != rank]
    return low.master_bytes * max((own if _is_dense(low, own, sent) else sent for sent in others), default=0)


def _prepare(low: Lowering, rank: int, bucket: Bucket, messages: Sequence[tuple[float, float]]) -> Task:
    """Return the task that takes the own gradient and thresholds and packs the rest."""
    device = low.device(rank)
    own = shares.split(bucket.elements, low.shard_shares)[rank]
    duration_s = costs.copy_time_s(device, own * low.master_bytes)
    if low.scenario.plan.push.threshold is not None:
        sent = sum(entries for _, entries in messages)
        duration_s += costs.threshold_time_s(device, elements=bucket.elements - own, sent=sent)
    need = _prepare_need(low, rank, bucket, messages)
    return Task(f"threshold bucket {bucket.index}", "compression", duration_s=duration_s, need=need)


def _prepare_need(low: Lowering, rank: int, bucket: Bucket, messages: Sequence[tuple[float, float]]) -> Footprint:
    """Return the memory of taking the own gradient and, owner by owner, thresholding and packing what is sent.

    For each message: magnitudes, a mask, then (unless the message is dense) indices as int64, and the message.
    `messages`: (bytes, entries) for each owner.
    """
    sizes = shares.split(bucket.elements, low.shard_shares)
    events = [Event(0, float(sizes[rank] * low.master_bytes), "gradients")]
    if low.scenario.plan.push.threshold is None:
        return footprint(events)
    for owner, (message_bytes, entries) in enumerate(messages):
        if owner == rank:
            continue
        magnitudes, mask = float(sizes[owner] * low.value_bytes), float(sizes[owner])
        indices = 0.0 if _is_dense(low, sizes[owner], entries) else float(TORCH_INDEX_BYTES * entries)
        start = len(events)
        steps = (magnitudes, mask, -magnitudes, indices, -mask if indices else 0.0, message_bytes, -indices)
        events += [Event(start + i, size, "communication" if i == 5 else "temporaries") for i, size in enumerate(steps)]
        if not indices:
            events.append(Event(start + 7, -mask, "temporaries"))
    events.append(Event(len(events) + 8, -float(bucket.elements * low.value_bytes), "buckets"))
    return footprint(events)


def _is_dense(low: Lowering, elements: float, sent: float) -> bool:
    return density.is_dense(
        elements=elements,
        sent=sent,
        value_bytes=low.value_bytes,
        index_bytes=costs.INDEX_BYTES,
        encoding=low.scenario.plan.push.encoding,
    )


def _count_exchange(low: Lowering, bucket: Bucket) -> list[Task]:
    """Return the tasks that tell every owner how many entries come: posted, then waited for."""
    name = f"counts bucket {bucket.index}"
    members = len(low.group)
    row = (float(COUNT_BYTES),) * members
    matrix = tuple(tuple(0.0 if i == j else size for j, size in enumerate(row)) for i in range(members))
    size = members * (members - 1) * COUNT_BYTES
    low.communications[name] = Communication("all-to-all-v", low.group, size, pair_bytes=matrix)
    posting_s = collectives.posting_s(low.scenario.cluster, (members - 1) * COUNT_BYTES)
    post = Task(f"post {name}", "exposed_communication", duration_s=posting_s)
    return [post, Task(name, "exposed_communication", communication=name)]


Matrix = tuple[tuple[float, ...], ...]


def _push_matrix(low: Lowering, bucket: Bucket) -> tuple[Matrix, Matrix]:
    """Return bytes and entries that each rank sends to each owner for a bucket."""
    key = ("push", bucket.index)
    if key not in low.found:
        low.found[key] = _new_push_matrix(low, bucket)
    found: tuple[Matrix, Matrix] = low.found[key]
    return found


def _new_push_matrix(low: Lowering, bucket: Bucket) -> tuple[Matrix, Matrix]:
    push = low.scenario.plan.push
    ranges = shares.ranges(bucket.elements, low.shard_shares)
    if push.threshold is None:
        owned = [float(last - first) for first, last in ranges]
        return _everybodys(owned, low.value_bytes), _everybodys(owned, 1)
    sizes, entries = [], []
    for rank in low.group:
        row_sizes, row_entries = [], []
        for owner, (first, last) in enumerate(ranges):
            elements = float(last - first) if owner != rank else 0.0
            sent = sum(n * d for n, d in _densities(low, bucket, rank, first, last)) if elements else 0.0
            row_entries.append(sent)
            size = density.message_bytes(
                elements=elements,
                sent=sent,
                value_bytes=low.value_bytes,
                index_bytes=costs.INDEX_BYTES,
                encoding=push.encoding,
            )
            row_sizes.append(size)
        sizes.append(tuple(row_sizes))
        entries.append(tuple(row_entries))
    return tuple(sizes), tuple(entries)


def _everybodys(owned: Sequence[float], factor: int) -> Matrix:
    """Return what each rank sends where all send all: every owner's part, but nothing to itself."""
    row = tuple(factor * elements for elements in owned)
    return tuple((*row[:rank], 0.0, *row[rank + 1 :]) for rank in range(len(row)))


def _densities(low: Lowering, bucket: Bucket, rank: int, first: int, last: int) -> list[tuple[int, float]]:
    """Return (elements, density) of each parameter's part in the range [first, last) of the bucket."""
    threshold = low.scenario.plan.push.threshold
    found = []
    start = 0
    for instance, parameter in bucket.members:
        end = start + parameter.elements
        inside = min(end, last) - max(start, first)
        if inside > 0:
            ratio = 1.0
            if threshold is not None and threshold > 0:
                assert low.statistics is not None  # loading demands them
                name = parameter.name.replace("{}", instance.module)
                ratio = density.push_density(
                    low.statistics,
                    samples=low.batch_sizes[rank],
                    tensor=name,
                    step=low.step,
                    threshold=threshold,
                )
            found.append((inside, ratio))
        start = end
    return found


def mean_density(low: Lowering) -> float:
    """Return the fraction of off-shard elements that all ranks send in this step."""
    sent = offered = 0.0
    for bucket in low.buckets:
        _, entries = _push_matrix(low, bucket)
        sent += sum(map(sum, entries))
        offered += (len(low.group) - 1) * bucket.elements
    return sent / offered if offered else 0.0
