"""Push of Gradient Sharding: gradients are thresholded, packed and sent to their shards' owners, which add them."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from gssim import collectives, cost
from gssim.collectives import Communication
from gssim.execution.cache import Same
from gssim.memory import Event, Footprint, footprint
from gssim.plan import encodings
from gssim.program.compute import BackwardParts, hook_time_s
from gssim.program.lowering import Lowering, once_a_run, once_a_step
from gssim.program.messages import (
    OthersOf,
    accumulates_in_residual,
    dense_bytes,
    is_thresholded,
    matrix_to_all,
    push_matrix,
    push_sizes,
    residual_elements,
    residual_value_bytes,
)
from gssim.program.task import Bucket, MicroBatch, Task, TaskId, collective_task
from gssim.units import Floats

COUNT_BYTES = 8
"""Bytes of a count: before a thresholded push, each owner receives the number of entries to come, as one int64."""


def push_gradients(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """GS: a complete bucket is cut by owner, thresholded, packed and sent to the owners, one bucket at a time.

    The bucket's buffer lives from its first gradient until it is sent. The owner adds received messages to its own
    range. Where nodes have several places, the bucket is first reduce-scattered within the node, and each rank pushes
    only its place's part.
    """
    if not micro_batch.sends_gradients:
        return tasks
    parts = BackwardParts(low, tasks)
    places = [parts.at(bucket.complete) for bucket in low.buckets]
    for place, bucket in zip(places, low.buckets, strict=True):
        parts.lengthen(place, cost.copy_time_s(low.device(rank), bucket.elements * low.value_bytes))
    *pushes, rest = _in_turn(low, rank, micro_batch)
    for place, push in zip(places, pushes, strict=True):
        parts.insert_after(place, push)
    return [*parts.merged(), *rest]


def push_accumulated(low: Lowering, rank: int, micro_batch: MicroBatch) -> list[Task]:
    """Push, after the step's last backward (that of `micro_batch`), the gradients that accumulated in all backwards.

    First all gradients are copied into their buckets, then the buckets are pushed as in a backward.
    """
    tasks = []
    for bucket in low.buckets:
        tensors = tuple(float(parameter.elements * low.value_bytes) for _, parameter in bucket.members)
        size = float(bucket.elements * low.value_bytes)
        moved = [Event(0, size, "buckets"), Event(1, -size, "gradients", tensors)]
        moving_s = cost.copy_time_s(low.device(rank), size) + len(tensors) * hook_time_s(low, rank)
        name = TaskId("collect", bucket=bucket.index)
        tasks.append(Task(name, "idle", duration_s=moving_s, need=footprint(moved)))
    pushes = _in_turn(low, rank, micro_batch)
    return [*tasks, *chain.from_iterable(pushes)]


def _in_turn(low: Lowering, rank: int, micro_batch: MicroBatch) -> list[list[Task]]:
    """Return the tasks that follow each bucket's completion, and those after the last bucket's.

    A push is waited for when the next one begins.
    """
    draining: list[Task] = []
    pending: tuple[list[Task], list[Task]] = ([], [])
    behind = []
    for bucket in low.buckets:
        reduce, push, drain = send_bucket(low, rank, bucket, micro_batch)
        before: list[Task] = []
        if pending[0]:  # a bucket reduced beside the compute is pushed once the next one is complete
            before, draining, pending = [*draining, *pending[0]], pending[1], ([], [])
        if reduce and low.overlaps:
            behind.append([*before, *reduce])
            pending = push, drain
        else:
            behind.append([*before, *reduce, *draining, *push])
            draining = drain
    return [*behind, [*draining, *pending[0], *pending[1]]]


def send_bucket(
    low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch
) -> tuple[list[Task], list[Task], list[Task]]:
    """Return three lists for a complete bucket: its reduction within the node, its push, and the addition at the owner.

    Ranks that send and receive the same of a bucket share these tasks.
    """
    low = low.owning(bucket)
    kind = (bucket.index, micro_batch, *_bucket_kind(low, rank, bucket, micro_batch))
    sent = _sent_buckets(low)
    if kind not in sent:
        sent[kind] = _send_bucket(low, rank, bucket, micro_batch)
    return sent[kind]


_BucketTasks = tuple[list[Task], list[Task], list[Task]]


@once_a_step
def _sent_buckets(_low: Lowering) -> dict[Hashable, _BucketTasks]:
    """Return the step's cache of the tasks of buckets (empty at first)."""
    return {}


def _bucket_kind(low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch) -> Iterator[Hashable]:
    """Yield everything that a rank's tasks for a bucket depend on."""
    place, node = low.place(rank), low.node(rank)
    yield from (low.scenario.cluster.devices[rank].type, low.batch_sizes[rank] > 0, place)
    yield low.pushed_elements(bucket, rank)
    if is_thresholded(low):
        sizes = push_sizes(low, micro_batch, place)
        yield from (int(sizes.classes[node]), int(sizes.alike[bucket.index, sizes.runs[node]]))


def _send_bucket(low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch) -> _BucketTasks:
    reduce = _reduce_scatter_in_node(low, bucket.index, low.place(rank)) if low.reduces_in_nodes else []
    after = (reduce[-1].id,) if reduce and low.overlaps else ()
    push, drain = _push_bucket(low, rank, bucket, micro_batch, after)
    return reduce, push, drain


@once_a_run
def _reduce_scatter_in_node(low: Lowering, number: int, place: int) -> list[Task]:
    """Return the reduce-scatter of a bucket within the node; see [Note: hierarchy] in `gssim.plan.buckets`.

    The part of the rank's place ends up in a buffer of its own. Forwarded parts are received in another buffer, as
    large as the largest of them.
    """
    own, bucket = TaskId("reduce-scatter", bucket=number), low.buckets[number]
    parts = dense_bytes(low, low.division(bucket).places)
    exchange = low.communication("reduce-scatter-v", "dp_shard", sum(parts), part_bytes=parts)
    whole = float(sum(parts))
    staged = float(low.forwarded_elements(bucket, place) * low.value_bytes)
    events = [Event(0, float(parts[place]), "buckets"), Event(1, staged, "communication")]
    events.append(Event(2, -staged, "communication"))
    if low.overlaps:
        issue = Task(own.serving("issue"), "backward", need=footprint(events))
        return [issue, collective_task(own, exchange, "communication", after=(issue.id,))]
    return [collective_task(own, exchange, need=footprint([*events, Event(3, -whole, "buckets")]))]


def _push_bucket(
    low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch, after: tuple[TaskId, ...]
) -> tuple[list[Task], list[Task]]:
    """Return the tasks that send a bucket, and those that add received messages; `after`: tasks before the push."""
    thresholded = is_thresholded(low)
    matrix = push_matrix(low, bucket, micro_batch, low.place(rank))
    own = low.node(rank)
    tasks = [_threshold_bucket(low, rank, bucket, micro_batch, after)]
    offered = low.division(bucket).places[low.place(rank)] * low.value_bytes
    if low.nodes == 1:  # nothing is left to push
        release = [] if thresholded else [Event(0, -float(offered), "buckets")]
        return [*tasks, Task(TaskId("free", bucket=bucket.index), "compression", need=footprint(release))], []
    push = TaskId("push", bucket=bucket.index)
    size = (low.nodes - 1) * offered
    carried_as = _carried_as(low)
    communication, exchange = push_group_collective(
        low,
        bucket,
        rank,
        push,
        "all-to-all-v",
        size,
        pair_bytes=matrix,
        data_dependent=thresholded,
        carried_as=carried_as,
    )
    if thresholded:
        amounts = _amounts(low, rank, micro_batch)
        sent_bytes, received_bytes = amounts.sent_bytes[bucket.index], amounts.received_bytes[bucket.index]
        tasks.append(_count_exchange(low, bucket.index))
    else:
        sent_bytes, received_bytes = matrix.sent[own], matrix.received[own]
    packed = Event(0, -sent_bytes, "communication") if thresholded else Event(0, -float(offered), "buckets")
    adding = _accumulation_memory(low, bucket, rank, micro_batch)
    staged = low.sends_from_host(low.device(rank))
    posted, sent, released = _exchange_memory(low, packed, adding, sent_bytes, received_bytes, staged=staged)
    ready = tasks[-1].id
    if not low.policies.point_to_point:  # the backend's all-to-all posts from a flat copy, in its own thread
        posting_s = cost.copy_time_s(low.device(rank), sent_bytes)
    elif low.scenario.plan.overlap:
        posting_s = collectives.posting_s(low.scenario.cluster, low.device(rank), sent_bytes, low.nodes - 1)
    else:  # posting is part of the exchange's own time
        posting_s = 0.0
    post = Task(push.serving("post"), "exposed_communication", duration_s=posting_s, need=footprint(posted))
    tasks.append(post)
    if low.scenario.plan.overlap:  # messages start as they are posted, the backend's call after its flat copy
        begun = (ready if low.policies.point_to_point else post.id,)
        tasks.append(collective_task(push, exchange, "communication", communication=communication, after=begun))
    else:
        after = (post.id,)
        tasks.append(collective_task(push, exchange, communication=communication, after=after, need=footprint(sent)))
    add_s = _add_s(low, bucket, rank, micro_batch, received_bytes)
    add = TaskId("add", bucket=bucket.index)
    return tasks, [Task(add, "compression", duration_s=add_s, after=(push,), need=footprint(released))]


@dataclass(frozen=True, eq=False)
class _Amounts:
    """Bytes and seconds of a rank's thresholded pushes, by bucket."""

    sent_bytes: Sequence[float]
    received_bytes: Sequence[float]
    select_s: Sequence[float]
    """Seconds to select and pack the entries for all other owners."""
    add_s: Sequence[float]
    """Seconds to add the messages of all other ranks, and their weights."""


@once_a_step
def _amounts(low: Lowering, rank: int, micro_batch: MicroBatch) -> _Amounts:
    place, node, device_type = low.place(rank), low.node(rank), low.scenario.cluster.devices[rank].type
    sizes = push_sizes(low, micro_batch, place)
    select_s = _selecting_s(low, micro_batch, place, device_type)
    add_s = _adding_s(low, micro_batch, place, device_type)
    columns = (sizes.sent_bytes, sizes.received_bytes, select_s, add_s)
    return _Amounts(*(sizes.of_node(column, node) for column in columns))


@once_a_step
def _selecting_s(low: Lowering, micro_batch: MicroBatch, place: int, device_type: str) -> Floats:
    """Return the seconds that a rank takes to select and pack entries for all other owners, by bucket and kind of node.

    This includes clearing the sent entries in the residual, if there is one.
    """
    sizes, device = push_sizes(low, micro_batch, place), low.scenario.cluster.device_types[device_type]
    messages, value = sizes.messages, low.value_bytes
    parts = [len(bucket.members) if low.push.kind != "absolute" else 1 for bucket in low.buckets]
    times_s = cost.select_time_s(
        device, elements=messages.elements, parts=np.array(parts, dtype=float)[:, None, None], value=value
    )
    times_s = times_s + messages.priced(
        partial(cost.pack_time_s, device, value=value, clears=bool(low.push.error_feedback))
    )
    return sizes.to_others(np.where(messages.elements > 0, times_s, 0.0))


@once_a_step
def _adding_s(low: Lowering, micro_batch: MicroBatch, place: int, device_type: str) -> Floats:
    """Return the seconds a rank takes to add all others' messages and their weights, by bucket and kind of node."""
    sizes, device = push_sizes(low, micro_batch, place), low.scenario.cluster.device_types[device_type]
    messages = sizes.messages
    times_s = messages.priced(partial(cost.unpack_time_s, device, value=low.value_bytes))
    times_s = np.where(messages.elements > 0, times_s, 0.0)
    if _normalises_by_weight(low):
        times_s = times_s + messages.priced(partial(cost.weight_time_s, device))
    return sizes.from_others(times_s)


def _add_s(low: Lowering, bucket: Bucket, rank: int, micro_batch: MicroBatch, received_bytes: float) -> float:
    """Return the seconds to add the messages from all nodes, and to normalise the sum if the plan says so."""
    device, own = low.device(rank), low.pushed_elements(bucket, rank)
    add_s = 0.0 if low.policies.point_to_point else cost.copy_time_s(device, received_bytes)
    if not is_thresholded(low):
        return add_s + cost.copy_time_s(device, 1.5 * received_bytes)  # read both, write one
    add_s += _amounts(low, rank, micro_batch).add_s[bucket.index]
    return add_s + cost.division_time_s(device, size_bytes=own * low.master_bytes) * _normalises_by_weight(low)


def _normalises_by_weight(low: Lowering) -> bool:
    """Return whether owners divide gradients by the received weight."""
    return low.nodes > 1 and is_thresholded(low) and low.push.aggregate == "received-weight"


def push_group_collective(
    low: Lowering, bucket: Bucket, rank: int, task: TaskId, kind: str, size_bytes: float, **parts: Any
) -> tuple[TaskId, Communication]:
    """Return the identity and the collective of the rank's push group; places with equal divisions share the
    collective.

    With thresholds, no two places are equal.
    """
    place, owned = low.place(rank), low.division(bucket).owned
    alike = [place] if low.sends_by_data else [other for other in range(low.places) if owned[other] == owned[place]]
    own = task if len(alike) == low.places else task._replace(place=alike[0])
    if "pair_bytes" in parts:
        matrix = parts.pop("pair_bytes")
        return own, _exchange_in_groups(low, kind, tuple(alike), size_bytes, Same(matrix), **parts)
    return own, _in_push_groups(low, kind, alike, size_bytes, **parts)


@once_a_step
def _exchange_in_groups(
    low: Lowering, /, kind: str, places: tuple[int, ...], size_bytes: float, matrix: Same, **parts: Any
) -> Communication:
    """Return one object for all owners: uneven exchanges are told apart by object identity."""
    return _in_push_groups(low, kind, places, size_bytes, pair_bytes=matrix.value, **parts)


def _in_push_groups(low: Lowering, kind: str, places: Sequence[int], size_bytes: float, **parts: Any) -> Communication:
    group, *beside = (low.push_groups[each] for each in places)
    at_once = low.places if low.sends_by_data else 1
    return Communication(kind, group, size_bytes, beside=tuple(beside), at_once=at_once, **parts)


def _carried_as(low: Lowering) -> str:
    """Return the backend call that carries an uneven exchange; empty if it is made of point-to-point messages."""
    return "" if low.policies.point_to_point else "all-to-all"


def _exchange_memory(
    low: Lowering,
    packed: Event,
    adding: Sequence[Event],
    sent_bytes: float,
    received_bytes: float,
    *,
    staged: bool,
) -> tuple[list[Event], list[Event], list[Event]]:
    """Return the memory events of posting a push, of its end where nothing overlaps with it, and of its addition.

    `packed` frees the send buffer once the messages are sent, or, where they are `staged` in host memory, once they
    are copied there; receive buffers are freed once their messages are added. The backend's all-to-all holds a flat
    copy of the sent messages and another of the received ones until it is waited for, on the host if staged.
    """
    received, dropped = Event(0, received_bytes, "communication"), Event(5, -received_bytes, "communication")
    copies = 0.0 if low.policies.point_to_point else received_bytes + sent_bytes
    if staged:
        flat_bytes = sent_bytes if copies else 0.0
        flat = [Event(1, flat_bytes, "communication"), Event(2, -flat_bytes, "communication")]
        freed = [packed._replace(position=3)]  # `push` holds the messages until it returns
        at_post, at_end = (freed, []) if low.scenario.plan.overlap else ([], freed)
        return [received, *flat, *at_post], at_end, [*adding, dropped]
    if not copies:
        return [received], [], [packed, *adding, dropped]
    posted = [Event(0, copies + received_bytes, "communication"), packed]
    return posted, [], [Event(0, -copies, "communication"), *adding, dropped]


def _accumulation_memory(low: Lowering, bucket: Bucket, rank: int, micro_batch: MicroBatch) -> list[Event]:
    """Return the memory events of an owner that adds received messages to its range.

    Dense messages are cast to the owner's precision one after another, thresholded ones chunk by chunk, in scratch.
    Normalising by weight needs a weight for every element, and a separate sum if the step's earlier pushes are
    excluded.
    """
    own = float(low.pushed_elements(bucket, rank) * low.master_bytes)
    if not is_thresholded(low):
        cast = own if low.has_master_copy and low.nodes > 1 else 0.0
        return [Event(1, cast, "temporaries"), Event(2, -cast, "temporaries")]
    if not _normalises_by_weight(low):
        return []
    total = 0.0 if _is_first_push(micro_batch) else own
    return [Event(1, own, "temporaries"), Event(4, -own - total, "temporaries")]


def _threshold_bucket(
    low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch, after: tuple[TaskId, ...]
) -> Task:
    """Return the task that copies the rank's own part of the gradient, and thresholds and packs the others'."""
    duration_s = cost.copy_time_s(low.device(rank), low.pushed_elements(bucket, rank) * low.master_bytes)
    if is_thresholded(low):
        duration_s += _threshold_s(low, rank, bucket, micro_batch)
    need = _threshold_memory(low, rank, bucket, micro_batch)
    threshold = TaskId("threshold", bucket=bucket.index)
    return Task(threshold, "compression", duration_s=duration_s, after=after, need=need)


def _threshold_s(low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch) -> float:
    """Return the seconds to add residuals, to estimate thresholds, and to select and pack the others' entries."""
    device, push = low.device(rank), low.push
    residuals = residual_elements(low, bucket, rank)
    total_s = (
        cost.residual_time_s(device, elements=residuals, value=low.value_bytes, kept=residual_value_bytes(low))
        if residuals
        else 0.0
    )
    if push.kind == "relative":
        elements = low.division(bucket).places[low.place(rank)]
        total_s += cost.mean_time_s(device, elements=elements, tensors=len(bucket.members), value=low.value_bytes)
    elif push.kind == "target-density":
        samples = [min(parameter.elements, encodings.SAMPLE_ELEMENTS) for _, parameter in bucket.members]
        if not estimates_thresholds(low) and push.threshold:
            samples = [encodings.followed_elements(push.threshold, bucket.elements)]
        total_s += cost.estimate_time_s(device, samples=sum(samples), tensors=len(bucket.members))
    return total_s + _amounts(low, rank, micro_batch).select_s[bucket.index]


def estimates_thresholds(low: Lowering) -> bool:
    """Return whether this step estimates the thresholds for a target density anew instead of only scaling them."""
    push = low.push
    return push.kind == "target-density" and not (low.step - push.warmup_steps) % push.reestimate_steps


def _threshold_memory(low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch) -> Footprint:
    """Return the memory of copying the rank's own gradient, and of thresholding and packing messages owner by owner.

    Entries are selected in persistent scratch, so only the messages are new. The bucket is freed when all messages are
    packed, or earlier if the gradients for other owners were added to residuals. A bucket that was reduced beside the
    compute is freed, whole, at this point.
    """
    whole = float(bucket.elements * low.value_bytes)
    mine = float(low.pushed_elements(bucket, rank) * low.master_bytes)
    # later pushes of a step add to the gradient that the first push left
    events = [Event(0, mine, "gradients")]
    if not _is_first_push(micro_batch):
        copied = mine if low.has_master_copy or _normalises_by_weight(low) else 0.0
        events = [Event(0, copied, "temporaries")]
        if not _normalises_by_weight(low):
            events.append(Event(0, -copied, "temporaries"))
    if low.reduces_in_nodes and low.overlaps:
        events.insert(0, Event(-1, -whole, "buckets"))
    if not is_thresholded(low):
        return footprint(events)
    place = low.place(rank)
    messages = OthersOf(push_matrix(low, bucket, micro_batch, place), low.node(rank))
    sent_bytes = _amounts(low, rank, micro_batch).sent_bytes[bucket.index]
    events.append(Event(2, sent_bytes, "communication", messages))
    released = 1 if accumulates_in_residual(low) and low.batch_sizes[rank] > 0 else 3
    events.append(Event(released, -float(low.division(bucket).places[place] * low.value_bytes), "buckets"))
    return footprint(events)


def _is_first_push(micro_batch: MicroBatch) -> bool:
    return micro_batch.first or not micro_batch.sent_before


@once_a_run
def _count_exchange(low: Lowering, bucket: int) -> Task:
    """Return the task that tells every owner how many entries will come; it posts the messages and waits for them."""
    size = low.nodes * (low.nodes - 1) * COUNT_BYTES
    matrix = matrix_to_all(low, (COUNT_BYTES,) * low.nodes, 1)
    settings: dict[str, Any] = {"pair_bytes": matrix, "carried_as": _carried_as(low), "at_once": low.places}
    exchange = among_owners(low, "all-to-all-v", size, **settings)
    return collective_task(TaskId("counts", bucket=bucket), exchange)


def among_owners(low: Lowering, kind: str, size_bytes: float, **settings: Any) -> Communication:
    """Return a collective that the owners at each place carry out on their own."""
    group, *beside = low.push_groups
    return Communication(kind, group, size_bytes, beside=tuple(beside), **settings)
