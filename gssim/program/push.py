"""Gradient Sharding: gradients pushed to the owners of their shards."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gssim import collectives, costs, density
from gssim.collectives import Communication
from gssim.memory import (
    Event,
    Footprint,
    footprint,
)
from gssim.program.compute import insert_after, part_at
from gssim.program.lowering import Bucket, Lowering, MicroBatch
from gssim.program.task import Task

COUNT_BYTES = 8
"""A thresholded push first tells each owner how many entries come, as one int64."""
TORCH_INDEX_BYTES = 8
"""torch lists indices as int64 before they are shortened."""


def push_gradients(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """GS: a complete bucket is cut by owner, thresholded, packed and sent to the owners, one at a time.

    The bucket's buffer lives from its first gradient until it is sent; the owner adds what arrives to its own range.
    Where nodes have several places, it is reduce-scattered in the node first, and what follows is of the rank's place.
    """
    if not micro_batch.leaves:
        return tasks
    draining: list[Task] = []
    waiting: tuple[list[Task], list[Task]] = ([], [])
    for bucket in low.buckets:
        index = part_at(low, tasks, bucket.complete)
        collect_s = costs.copy_time_s(low.device(rank), bucket.elements * low.value_bytes)
        tasks[index] = replace(tasks[index], duration_s=tasks[index].duration_s + collect_s)
        reduce, push, drain = sent_off(low, rank, bucket, micro_batch, tasks[index].label)
        if reduce and low.overlaps:  # what is reduced beside the compute is taken up once the next bucket is complete
            insert_after(tasks, index, [*draining, *waiting[0], *reduce])
            draining, waiting = waiting[1], (push, drain)
        else:
            insert_after(tasks, index, [*draining, *reduce, *push])
            draining = drain
    return [*tasks, *draining, *waiting[0], *waiting[1]]


def sent_off(
    low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch, ready: str
) -> tuple[list[Task], list[Task], list[Task]]:
    """Return the tasks that reduce a complete bucket in the node, that push it, and that take in what arrives.

    `ready`: the label of the task with which it is complete.
    """
    reduce = _reduce_in_node(low, rank, bucket, ready) if low.places > 1 else []
    after = (reduce[-1].label,) if reduce and low.overlaps else ()
    push, drain = _push_bucket(low, rank, bucket, micro_batch, after)
    return reduce, push, drain


def _reduce_in_node(low: Lowering, rank: int, bucket: Bucket, ready: str) -> list[Task]:
    """Return the reduce-scatter of a bucket inside the node; see [Note: hierarchy] in `division`.

    It leaves the part of the rank's place in a buffer of its own. It is a ring of messages: what is passed on, all but
    the first part sent and the own, comes into a buffer as large as the largest of these.
    """
    name = f"reduce-scatter bucket {bucket.index}"
    parts = tuple(n * low.value_bytes for n in low.division(bucket).places)
    low.communications[name] = low.communication("reduce-scatter-v", "dp_shard", sum(parts), part_bytes=parts)
    place, whole = low.place(rank), float(sum(parts))
    staged = float(max((parts[(place + step) % low.places] for step in range(2, low.places)), default=0))
    events = [Event(0, float(parts[place]), "buckets"), Event(1, staged, "communication")]
    events.append(Event(2, -staged, "communication"))
    if low.overlaps:
        issue = Task(f"issue {name}", "backward", need=footprint(events))
        return [issue, Task(name, "exposed_communication", "communication", communication=name, after=(issue.label,))]
    need = footprint([*events, Event(3, -whole, "buckets")])
    return [Task(name, "exposed_communication", communication=name, need=need)]


def _push_bucket(
    low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch, after: tuple[str, ...]
) -> tuple[list[Task], list[Task]]:
    """Return the tasks that send a bucket off, and those that take in what arrives; `after` is what they wait for."""
    thresholded = low.scenario.plan.push.threshold is not None
    matrix, entries = _push_matrix(low, bucket, micro_batch, low.place(rank))
    own = low.node(rank)
    messages = list(zip(matrix[own], entries[own], strict=True))
    tasks = [_prepare(low, rank, bucket, micro_batch, messages, after)]
    offered = low.division(bucket).places[low.place(rank)] * low.value_bytes
    if low.nodes == 1:  # nothing is left to push
        release = [] if thresholded else [Event(0, -float(offered), "buckets")]
        return [*tasks, Task(f"free bucket {bucket.index}", "compression", need=footprint(release))], []
    label = f"push bucket {bucket.index}"
    size = (low.nodes - 1) * offered
    carried_as = _carried_as(low)
    name = across(
        low,
        bucket,
        rank,
        label,
        "all-to-all-v",
        size,
        pair_bytes=matrix,
        data_dependent=thresholded,
        carried_as=carried_as,
    )
    sent_bytes, received_bytes = sum(matrix[own]), sum(row[own] for row in matrix)
    if thresholded:
        tasks += _count_exchange(low, bucket)
    packed = Event(0, -sent_bytes, "communication") if thresholded else Event(0, -float(offered), "buckets")
    cast_bytes = _largest_cast(low, bucket, rank, [row[own] for row in entries])
    posted, released = _exchange_events(low, packed, cast_bytes, sent_bytes, received_bytes)
    posting_s = _posting_s(low, rank, sent_bytes)
    tasks.append(Task(f"post {label}", "exposed_communication", duration_s=posting_s, need=footprint(posted)))
    stream = "communication" if low.scenario.plan.overlap else "compute"
    tasks.append(Task(label, "exposed_communication", stream, communication=name, after=(tasks[-1].label,)))
    if thresholded:
        add_s = costs.scatter_time_s(low.device(rank), received=sum(row[own] for row in entries))
    else:
        add_s = costs.copy_time_s(low.device(rank), 1.5 * received_bytes)  # read both, write one
    if not low.policies.point_to_point:
        add_s += costs.copy_time_s(low.device(rank), received_bytes)
    add = f"add bucket {bucket.index}"
    return tasks, [Task(add, "compression", duration_s=add_s, after=(label,), need=footprint(released))]


def across(low: Lowering, bucket: Bucket, rank: int, label: str, kind: str, size_bytes: float, **parts: Any) -> str:
    """Note a collective of the rank's push group, and of those whose places are divided as its own; return its name.

    What a threshold makes of a place is like no other.
    """
    place, owned = low.place(rank), low.division(bucket).owned
    unique = bool(low.scenario.plan.push.threshold)
    alike = [place] if unique else [other for other in range(low.places) if owned[other] == owned[place]]
    name = label if len(alike) == low.places else f"{label} of place {alike[0]}"
    group, *beside = (low.push_groups[each] for each in alike)
    low.communications[name] = Communication(kind, group, size_bytes, beside=tuple(beside), **parts)
    return name


def _carried_as(low: Lowering) -> str:
    """Return the kind of call that carries an uneven exchange, where it is not made of messages."""
    return "" if low.policies.point_to_point else "all-to-all"


def _exchange_events(
    low: Lowering, packed: Event, cast_bytes: float, sent_bytes: float, received_bytes: float
) -> tuple[list[Event], list[Event]]:
    """Return what is taken and given back when a push is posted, and when it has come and is added.

    `packed` gives back what the messages are in, once these are done; what was received goes once it is added, one
    contribution after another, each cast to the owner's precision. The backend's own call has the messages in a flat
    copy, and brings what comes in another, until it is waited for.
    """
    cast = [Event(1, cast_bytes, "temporaries"), Event(2, -cast_bytes, "temporaries")]
    if low.policies.point_to_point:
        came = [packed, *cast, Event(3, -received_bytes, "communication")]
        return [Event(0, received_bytes, "communication")], came
    size = 2 * received_bytes + sent_bytes
    return [Event(0, size, "communication"), packed], [*cast, Event(3, -size, "communication")]


def _posting_s(low: Lowering, rank: int, sent_bytes: float) -> float:
    """Return the time to hand messages over; the backend's call takes them from a flat copy, in its own thread."""
    if low.policies.point_to_point:
        return collectives.posting_s(low.scenario.cluster, sent_bytes)
    return costs.copy_time_s(low.device(rank), sent_bytes)


def _largest_cast(low: Lowering, bucket: Bucket, rank: int, entries: Sequence[float]) -> float:
    """Return the bytes of the largest contribution in the owner's precision, which it is added in, if it is another."""
    if not low.has_master_copy:
        return 0.0
    own = low.pushed_elements(bucket, rank)
    others = [sent for sender, sent in enumerate(entries) if sender != low.node(rank)]
    return low.master_bytes * max((own if _is_dense(low, own, sent) else sent for sent in others), default=0)


def _prepare(
    low: Lowering,
    rank: int,
    bucket: Bucket,
    micro_batch: MicroBatch,
    messages: Sequence[tuple[float, float]],
    after: tuple[str, ...],
) -> Task:
    """Return the task that takes the own gradient and thresholds and packs the rest."""
    device = low.device(rank)
    own = low.pushed_elements(bucket, rank)
    duration_s = costs.copy_time_s(device, own * low.master_bytes)
    if low.scenario.plan.push.threshold is not None:
        sent = sum(entries for _, entries in messages)
        offered = low.division(bucket).places[low.place(rank)] - own
        duration_s += costs.threshold_time_s(device, elements=offered, sent=sent) if offered else 0.0
    need = _prepare_need(low, rank, bucket, micro_batch, messages)
    return Task(f"threshold bucket {bucket.index}", "compression", duration_s=duration_s, after=after, need=need)


def _prepare_need(
    low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch, messages: Sequence[tuple[float, float]]
) -> Footprint:
    """Return the memory of taking the own gradient and, owner by owner, thresholding and packing what is sent.

    For each message: magnitudes, a mask, then (unless the message is dense) indices as int64, and the message.
    `messages`: (bytes, entries) for each owner. Where the bucket was reduced beside the compute, it is given back now.
    """
    sizes, own = low.division(bucket).owned[low.place(rank)], low.node(rank)
    whole, mine = float(bucket.elements * low.value_bytes), float(sizes[own] * low.master_bytes)
    # later pushes of a step add to the gradient that the first one left
    events = [Event(0, mine, "gradients")]
    if not _is_first_push(micro_batch):
        events = [Event(0, mine, "temporaries"), Event(0, -mine, "temporaries")] if low.has_master_copy else []
    if low.places > 1 and low.overlaps:
        events.insert(0, Event(-1, -whole, "buckets"))
    if low.scenario.plan.push.threshold is None:
        return footprint(events)
    for owner, (message_bytes, entries) in enumerate(messages):
        if owner == own:
            continue
        magnitudes, mask = float(sizes[owner] * low.value_bytes), float(sizes[owner])
        indices = 0.0 if _is_dense(low, sizes[owner], entries) else float(TORCH_INDEX_BYTES * entries)
        start = len(events)
        steps = (magnitudes, mask, -magnitudes, indices, -mask if indices else 0.0, message_bytes, -indices)
        events += [Event(start + i, size, "communication" if i == 5 else "temporaries") for i, size in enumerate(steps)]
        if not indices:
            events.append(Event(start + 7, -mask, "temporaries"))
    events.append(Event(len(events) + 8, -float(sum(sizes) * low.value_bytes), "buckets"))
    return footprint(events)


def _is_first_push(micro_batch: MicroBatch) -> bool:
    return micro_batch.first or not micro_batch.left


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
    members = low.nodes
    row = (float(COUNT_BYTES),) * members
    matrix = tuple(tuple(0.0 if i == j else size for j, size in enumerate(row)) for i in range(members))
    size = members * (members - 1) * COUNT_BYTES
    axis, carried_as = low.policies.push_axis, _carried_as(low)
    low.communications[name] = low.communication("all-to-all-v", axis, size, pair_bytes=matrix, carried_as=carried_as)
    posting_s = _posting_s(low, low.group[0], (members - 1) * COUNT_BYTES)
    post = Task(f"post {name}", "exposed_communication", duration_s=posting_s)
    return [post, Task(name, "exposed_communication", communication=name)]


Matrix = tuple[tuple[float, ...], ...]


def _push_matrix(low: Lowering, bucket: Bucket, micro_batch: MicroBatch, place: int) -> tuple[Matrix, Matrix]:
    """Return bytes and entries that each node's rank at a place sends to each owner for a bucket."""
    unique = bool(low.scenario.plan.push.threshold)
    key = ("push", bucket.index, place, micro_batch) if unique else ("push", low.division(bucket).owned[place])
    if key not in low.found:
        low.found[key] = _new_push_matrix(low, bucket, micro_batch, place)
    found: tuple[Matrix, Matrix] = low.found[key]
    return found


def _new_push_matrix(low: Lowering, bucket: Bucket, micro_batch: MicroBatch, place: int) -> tuple[Matrix, Matrix]:
    push = low.scenario.plan.push
    if push.threshold is None:
        owned = low.division(bucket).owned[place]
        return _everybodys(owned, low.value_bytes), _everybodys(owned, 1)
    ranges = low.division(bucket).ranges(place)
    sizes, entries = [], []
    for sender in range(low.nodes):
        row_sizes, row_entries = [], []
        for owner, (first, last) in enumerate(ranges):
            elements = float(last - first) if owner != sender else 0.0
            densities = _densities(low, bucket, micro_batch, sender, first, last) if elements else []
            sent = sum(n * d for n, d in densities)
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
    row = tuple(float(factor * elements) for elements in owned)
    return tuple((*row[:rank], 0.0, *row[rank + 1 :]) for rank in range(len(row)))


def _densities(
    low: Lowering, bucket: Bucket, micro_batch: MicroBatch, node: int, first: int, last: int
) -> list[tuple[int, float]]:
    """Return (elements, density) of each parameter's part in the range [first, last) of the bucket."""
    threshold = low.scenario.plan.push.threshold
    samples, part = _samples(low, micro_batch, node) if threshold else (0, 1.0)
    found = []
    start = 0
    for instance, parameter in bucket.members:
        end = start + parameter.elements
        inside = min(end, last) - max(start, first)
        if inside > 0:
            ratio = 1.0
            if threshold:
                assert low.statistics is not None  # loading demands them
                name = parameter.name.replace("{}", instance.module)
                ratio = density.push_density(
                    low.statistics,
                    samples=samples,
                    tensor=name,
                    step=low.step,
                    threshold=threshold / part if part else math.inf,
                )
            found.append((inside, ratio))
        start = end
    return found


def _samples(low: Lowering, micro_batch: MicroBatch, node: int) -> tuple[int, float]:
    """Return the samples that a node's gradient is a mean over, and which part of the node's mean that is.

    Where every micro-batch is pushed, what is thresholded is its part of the mean over the whole step's samples.
    """
    ranks = low.group[node * low.places : (node + 1) * low.places]
    whole = sum(low.batch_sizes[rank] for rank in ranks)
    samples = sum(low.samples(rank, micro_batch) for rank in ranks) if micro_batch.left else whole
    return samples, samples / whole if whole else 0.0


def mean_density(low: Lowering) -> float:
    """Return the fraction of elements owned on other nodes that all ranks send in this step."""
    sent = offered = 0.0
    for micro_batch in (each for each in low.micro_batches if each.leaves):
        for bucket in low.buckets:
            entries = [_push_matrix(low, bucket, micro_batch, place)[1] for place in range(low.places)]
            sent += sum(sum(map(sum, each)) for each in entries)
            offered += (low.nodes - 1) * bucket.elements
    return sent / offered if offered else 0.0
