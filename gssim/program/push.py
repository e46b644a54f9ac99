"""Push of Gradient Sharding: gradients are thresholded, packed and sent to their shards' owners, which add them."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gssim import collectives, cost
from gssim.collectives import Communication
from gssim.execution.cache import Same
from gssim.memory import NOTHING, Event, Footprint, footprint
from gssim.plan import encodings
from gssim.program.compute import BackwardParts, hook_time_s
from gssim.program.lowering import ComputeKind, Lowering, once_a_run, once_a_step
from gssim.program.messages import (
    OthersOf,
    accumulates_in_residual,
    bucket_kind,
    dense_bytes,
    first_of_kinds,
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
    collecting, places = _collecting(low, low.compute_kind(rank, micro_batch))
    parts = collecting.without_inserted()
    *pushes, rest = _pushes_by_bucket(low, rank, micro_batch)
    for place, push in zip(places, pushes, strict=True):
        parts.insert_after(place, push)
    return [*parts.all_tasks(), *rest]


@once_a_run
def _collecting(low: Lowering, kind: ComputeKind) -> tuple[BackwardParts, Sequence[int]]:
    """Return the backward of ranks of a kind, with the time to copy gradients into buckets, and the index of the part
    that completes each bucket.
    """
    parts, device = BackwardParts(low.computed[kind]), low.scenario.cluster.device_types[kind.device_type]
    places = [parts.at(low, bucket.complete) for bucket in low.buckets]
    for place, bucket in zip(places, low.buckets, strict=True):
        parts.lengthen(place, cost.copy_time_s(device, bucket.elements * low.value_bytes))
    return parts, places


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
    pushes = _pushes_by_bucket(low, rank, micro_batch)
    return [*tasks, *chain.from_iterable(pushes)]


def _pushes_by_bucket(low: Lowering, rank: int, micro_batch: MicroBatch) -> list[list[Task]]:
    """Return the tasks to insert where each bucket is complete, in the order of buckets, and last those at the end.

    A push is waited for when the next one begins.
    """
    draining: list[Task] = []
    pending: tuple[list[Task], list[Task]] = ([], [])
    behind = []
    for reduce, push, drain in send_buckets(low, rank, micro_batch):
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


_BucketTasks = tuple[list[Task], list[Task], list[Task]]


def send_buckets(low: Lowering, rank: int, micro_batch: MicroBatch) -> list[_BucketTasks]:
    """Return three lists for each complete bucket: its reduction within the node, its push, and the addition at the
    owner.

    Ranks that send and receive the same of a bucket share these tasks.
    """
    all_owners = [(each, _sent_buckets(each, each.place(rank), micro_batch)) for each in low.all_owners]
    costs: dict[int, _Costs] = {}
    found = []
    for bucket in low.buckets:
        owners, sent = all_owners[-1 if bucket.of_experts else 0]
        own = sent[bucket.index]
        if own.kind not in costs:  # no kind has buckets of several owners
            costs[own.kind] = _costs(owners, rank, own.kind, micro_batch)
        found.append(own.tasks(costs[own.kind]))
    return found


@dataclass(frozen=True, eq=False)
class _Costs:
    """Seconds and memory of a rank's tasks for a bucket; buckets of one kind have the same."""

    threshold_s: float
    threshold: Footprint
    post_s: float
    post: Footprint
    """Memory of posting the messages; of freeing the bucket, where there are none."""
    push: Footprint
    add_s: float
    add: Footprint


@once_a_step
def _costs(low: Lowering, rank: int, kind: int, micro_batch: MicroBatch) -> _Costs:
    """Return a rank's costs of the buckets of a kind: one object for all ranks that send and receive the same of it."""
    bucket = first_of_kinds(low)[kind]
    known: dict[Hashable, _Costs] = low.step_cache.setdefault("costs of pushes", {})
    key = (kind, micro_batch, *_what_counts(low, rank, bucket, micro_batch))
    if key not in known:
        known[key] = _new_costs(low, rank, bucket, micro_batch)
    return known[key]


def _what_counts(low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch) -> Iterator[Hashable]:
    """Yield everything that a rank's costs of a bucket depend on."""
    place, node = low.place(rank), low.node(rank)
    yield from (low.device_type(rank), low.batch_sizes[rank] > 0, place)
    yield low.pushed_elements(bucket, rank)
    if is_thresholded(low):
        sizes = push_sizes(low, micro_batch, place)
        yield from (int(sizes.classes[node]), int(sizes.alike[bucket_kind(low, bucket), sizes.runs[node]]))


def _new_costs(low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch) -> _Costs:
    thresholded, device, place = is_thresholded(low), low.device(rank), low.place(rank)
    threshold_s = cost.copy_time_s(device, low.pushed_elements(bucket, rank) * low.master_bytes)
    if thresholded:
        threshold_s += _threshold_s(low, rank, bucket, micro_batch)
    threshold = _threshold_memory(low, rank, bucket, micro_batch)
    offered = low.division(bucket).places[place] * low.value_bytes
    if low.nodes == 1:  # nothing is left to push
        release = [] if thresholded else [Event(0, -float(offered), "buckets")]
        return _Costs(threshold_s, threshold, 0.0, footprint(release), NOTHING, 0.0, NOTHING)
    if thresholded:
        kind, amounts = bucket_kind(low, bucket), _amounts(low, rank, micro_batch)
        sent_bytes, received_bytes = amounts.sent_bytes[kind], amounts.received_bytes[kind]
    else:
        matrix, own = push_matrix(low, bucket, micro_batch, place), low.node(rank)
        sent_bytes, received_bytes = matrix.sent[own], matrix.received[own]
    packed = Event(0, -sent_bytes, "communication") if thresholded else Event(0, -float(offered), "buckets")
    adding = _accumulation_memory(low, bucket, rank, micro_batch)
    staged = low.sends_from_host(device)
    posted, sent, released = _exchange_memory(low, packed, adding, sent_bytes, received_bytes, staged=staged)
    if not low.policies.point_to_point:  # the backend's all-to-all posts from a flat copy, in its own thread
        post_s = cost.copy_time_s(device, sent_bytes)
    elif low.scenario.plan.overlap:
        post_s = collectives.posting_s(low.scenario.cluster, device, sent_bytes, low.nodes - 1)
    else:  # posting is part of the exchange's own time
        post_s = 0.0
    push = NOTHING if low.scenario.plan.overlap else footprint(sent)
    add_s = _add_s(low, bucket, rank, micro_batch, received_bytes)
    return _Costs(threshold_s, threshold, post_s, footprint(posted), push, add_s, footprint(released))


class _SentBucket:
    """What the ranks at a place have in common as they send a bucket: everything but times and memory."""

    def __init__(self, low: Lowering, number: int, place: int, micro_batch: MicroBatch) -> None:
        self.kind, self.names = bucket_kind(low, low.buckets[number]), _names(low, number)
        self.reduce = _reduce_scatter_in_node(low, number, place) if low.reduces_in_nodes else []
        self.after = (self.reduce[-1].id,) if self.reduce and low.overlaps else ()
        self.stays = low.nodes == 1
        self._known: dict[_Costs, _BucketTasks] = {}
        if self.stays:
            return
        communication, exchange = _exchange_of_bucket(low, number, place, micro_batch)
        self.counts = [collective_task(self.names.counts, _counts(low))] if is_thresholded(low) else []
        stream, begun = "compute", self.names.post
        if low.scenario.plan.overlap:  # messages start as they are posted, the backend's call after its flat copy
            last = self.names.counts if self.counts else self.names.threshold
            stream, begun = "communication", last if low.policies.point_to_point else self.names.post
        self.push = collective_task(self.names.push, exchange, stream, communication=communication, after=(begun,))

    def tasks(self, costs: "_Costs") -> _BucketTasks:
        """Return the tasks of ranks with certain costs; see `send_buckets`."""
        if costs not in self._known:
            self._known[costs] = self._new_tasks(costs)
        return self._known[costs]

    def _new_tasks(self, costs: "_Costs") -> _BucketTasks:
        names = self.names
        threshold = Task(
            names.threshold, "compression", "compute", costs.threshold_s, None, self.after, costs.threshold
        )
        if self.stays:  # nothing is left to push
            return self.reduce, [threshold, Task(names.free, "compression", need=costs.post)], []
        post = Task(names.post, "exposed_communication", "compute", costs.post_s, None, (), costs.post)
        push = self.push if costs.push is NOTHING else replace(self.push, need=costs.push)
        add = Task(names.add, "compression", "compute", costs.add_s, None, (names.push,), costs.add)
        return self.reduce, [threshold, *self.counts, post, push], [add]


@once_a_step
def _sent_buckets(low: Lowering, place: int, micro_batch: MicroBatch) -> Mapping[int, _SentBucket]:
    """Return what the ranks at a place have in common as they send each of these owners' buckets, by its index."""
    own = [bucket.index for bucket in low.buckets if bucket.of_experts == low.of_experts]
    return {number: _SentBucket(low, number, place, micro_batch) for number in own}


class _Names(NamedTuple):
    """Identities of the tasks that send a bucket, shared by all ranks: the same objects are compared fast."""

    threshold: TaskId
    counts: TaskId
    """Of the task that tells every owner how many entries will come; it posts the messages and waits for them."""
    free: TaskId
    post: TaskId
    push: TaskId
    add: TaskId


@once_a_run
def _names(_low: Lowering, number: int) -> _Names:
    push = TaskId("push", bucket=number)
    return _Names(
        TaskId("threshold", bucket=number),
        TaskId("counts", bucket=number),
        TaskId("free", bucket=number),
        push.serving("post"),
        push,
        TaskId("add", bucket=number),
    )


@once_a_step
def _exchange_of_bucket(
    low: Lowering, number: int, place: int, micro_batch: MicroBatch
) -> tuple[TaskId, Communication]:
    """Return the exchange (and its identity) by which the ranks at a place push a bucket to its owners."""
    bucket = low.buckets[number]
    return push_group_collective(
        low,
        bucket,
        low.group[place],
        _names(low, number).push,
        "all-to-all-v",
        (low.nodes - 1) * low.division(bucket).places[place] * low.value_bytes,
        pair_bytes=push_matrix(low, bucket, micro_batch, place),
        data_dependent=is_thresholded(low),
        carried_as=_carried_as(low),
    )


@once_a_run
def _reduce_scatter_in_node(low: Lowering, number: int, place: int) -> list[Task]:
    """Return the reduce-scatter of a bucket within the node; see [Note: hierarchy] in `gssim.plan.buckets`.

    The part of the rank's place ends up in a buffer of its own. Forwarded parts are received in another buffer, as
    large as the largest of them.
    """
    own, bucket = TaskId("reduce-scatter", bucket=number), low.buckets[number]
    parts = dense_bytes(low, low.division(bucket).places)
    exchange = exchange_in_node(low, "reduce-scatter-v", parts)
    whole = float(sum(parts))
    staged = float(low.forwarded_elements(bucket, place) * low.value_bytes)
    events = [Event(0, float(parts[place]), "buckets"), Event(1, staged, "communication")]
    events.append(Event(2, -staged, "communication"))
    if low.overlaps:
        issue = Task(own.serving("issue"), "backward", need=footprint(events))
        return [issue, collective_task(own, exchange, "communication", after=(issue.id,))]
    return [collective_task(own, exchange, need=footprint([*events, Event(3, -whole, "buckets")]))]


@once_a_run
def exchange_in_node(low: Lowering, kind: str, part_bytes: tuple[int, ...]) -> Communication:
    """Return the dense exchange of a bucket's parts within every node; buckets of equal sizes share it."""
    return low.communication(kind, "dp_shard", sum(part_bytes), part_bytes=part_bytes)


@dataclass(frozen=True, eq=False)
class _Amounts:
    """Bytes and seconds of a rank's thresholded pushes, by kind of bucket."""

    sent_bytes: Sequence[float]
    received_bytes: Sequence[float]
    select_s: Sequence[float]
    """Seconds to select and pack the entries for all other owners."""
    add_s: Sequence[float]
    """Seconds to add the messages of all other ranks, and their weights."""


@once_a_step
def _amounts(low: Lowering, rank: int, micro_batch: MicroBatch) -> _Amounts:
    place, node, device_type = low.place(rank), low.node(rank), low.device_type(rank)
    sizes = push_sizes(low, micro_batch, place)
    select_s = _selecting_s(low, micro_batch, place, device_type)
    add_s = _adding_s(low, micro_batch, place, device_type)
    columns = (sizes.sent_bytes, sizes.received_bytes, select_s, add_s)
    return _Amounts(*(sizes.of_node(column, node) for column in columns))


@once_a_step
def _selecting_s(low: Lowering, micro_batch: MicroBatch, place: int, device_type: str) -> Floats:
    """Return the seconds that a rank takes to select and pack entries for all other owners, by kind of bucket and of
    node.

    This includes clearing the sent entries in the residual, if there is one.
    """
    sizes, device = push_sizes(low, micro_batch, place), low.scenario.cluster.device_types[device_type]
    messages, value = sizes.messages, low.value_bytes
    times_s = cost.select_time_s(device, elements=messages.elements, parts=sizes.parts[:, None], value=value)
    times_s = times_s + messages.priced(
        partial(cost.pack_time_s, device, value=value, clears=bool(low.push.error_feedback))
    )
    return sizes.to_others(np.where(messages.elements > 0, times_s, 0.0))


@once_a_step
def _adding_s(low: Lowering, micro_batch: MicroBatch, place: int, device_type: str) -> Floats:
    """Return the seconds a rank takes to add all others' messages and their weights, by kind of bucket and of node."""
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
    add_s += _amounts(low, rank, micro_batch).add_s[bucket_kind(low, bucket)]
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
    (name,) = UNEVEN & parts.keys()
    sizes = Same(parts.pop(name))
    return own, _in_push_groups(low, kind, tuple(alike), size_bytes, name, sizes, **parts)


UNEVEN = frozenset({"pair_bytes", "part_bytes"})
"""Fields of a collective that hold the sizes of its messages, of which an uneven one has one."""


@once_a_step
def _in_push_groups(
    low: Lowering, /, kind: str, places: tuple[int, ...], size_bytes: float, name: str, sizes: Same, **settings: Any
) -> Communication:
    """Return one object for all owners: uneven exchanges are told apart by object identity."""
    groups = [low.push_groups[each] for each in places]
    at_once = low.places if low.sends_by_data else 1
    uneven: dict[str, Any] = {name: sizes.value}
    return Communication.among(groups, kind, size_bytes, at_once=at_once, **uneven, **settings)


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
    Where there is nothing to send, the bucket is freed as it is posted.
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
        if not sent_bytes:  # the rank owns all: no message keeps its bucket once `push` returns
            freed = [packed._replace(position=1)]
            at_post, at_end = (freed, []) if low.scenario.plan.overlap else ([], freed)
            return [received, *at_post], at_end, [*adding, dropped]
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
    return total_s + _amounts(low, rank, micro_batch).select_s[bucket_kind(low, bucket)]


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
    sent_bytes = _amounts(low, rank, micro_batch).sent_bytes[bucket_kind(low, bucket)]
    events.append(Event(2, sent_bytes, "communication", messages))
    released = 1 if accumulates_in_residual(low) and low.batch_sizes[rank] > 0 else 3
    events.append(Event(released, -float(low.division(bucket).places[place] * low.value_bytes), "buckets"))
    return footprint(events)


def _is_first_push(micro_batch: MicroBatch) -> bool:
    return micro_batch.first or not micro_batch.sent_before


@once_a_run
def _counts(low: Lowering) -> Communication:
    size = low.nodes * (low.nodes - 1) * COUNT_BYTES
    matrix = matrix_to_all(low, (COUNT_BYTES,) * low.nodes, 1)
    settings: dict[str, Any] = {"pair_bytes": matrix, "carried_as": _carried_as(low), "at_once": low.places}
    return Communication.among(low.push_groups, "all-to-all-v", size, **settings)
