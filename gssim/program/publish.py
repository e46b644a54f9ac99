"""Publication of updated parameters in Gradient Sharding: from their owners to every replica, dense or thresholded.

[Note: publish beside the forward] Where publishing overlaps, a step begins with the publication of the parameters that
the previous step updated. They are sent bucket by bucket, last bucket first, since gradients are complete from the last
layer on. The first layer of the forward that reads a bucket waits for it. On a GPU all of this runs on a stream beside
the compute, by rings as usual. A CPU has no such stream: messages are posted and left to gloo's threads. No rank would
forward a ring's messages in the meantime, so every owner sends its own directly to all others. Packed messages are
unpacked when they are waited for.

[Note: thresholded publish] An owner updates a master copy of its range, in any precision. It publishes the values that
differ by at least the threshold from those published last; smaller differences accumulate for a later step. First all
buckets are thresholded and packed. Then the ranks exchange, once, how many entries each sends of each bucket. Then
bucket after bucket is all-gathered by a ring. An all-to-all broadcast sends as many bytes by any route, but on a ring
no link carries more than all messages but one, whatever the shard sizes. Dense messages are sent from the replica and
received in it, without buffers. With two levels the threshold applies across nodes; within a node everything is dense,
as links there are fast.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gssim import collectives, cost, sparsity
from gssim.collectives import Communication, sums_of_others
from gssim.execution.cache import Same
from gssim.memory import Event, Footprint, footprint
from gssim.plan import absolute_threshold, encodings
from gssim.program.compute import forward_id
from gssim.program.lowering import Lowering, once_a_run, once_a_step
from gssim.program.messages import (
    MAX_CACHED_DENSITIES,
    Messages,
    bucket_kind,
    by_parameter,
    dense_bytes,
    first_of_kinds,
    messages_of,
    owned_pieces,
    to_all,
)
from gssim.program.push import COUNT_BYTES, exchange_in_node, push_group_collective
from gssim.program.sharded import insert_beside
from gssim.program.task import Bucket, Task, TaskId, collective_task
from gssim.units import Floats

INDEX_BYTES = 8
"""Bytes of an index in torch's indexing functions: an int64."""
DENSE = encodings.ENCODINGS.index("dense")


@once_a_step
def published(low: Lowering, place: int) -> Messages:
    """Return the messages of the owners at a place, by kind of bucket and run of owners; see `OwnedPieces`."""
    pieces, rules = owned_pieces(low, place), low.scenario.plan.publish
    entries = pieces.entries(publish_ratios(low)) if rules.selects else pieces.elements_owned
    return messages_of(low, rules.encoding, pieces.elements_owned, entries)


@once_a_step
def message_bytes(low: Lowering, kind: int, place: int) -> tuple[float, ...]:
    """Return the size of the message that each node's owner at `place` publishes of a bucket of some kind."""
    return tuple(published(low, place).size_bytes[kind][owned_pieces(low, place).runs].tolist())


@once_a_step
def published_bytes(low: Lowering, place: int) -> list[float]:
    """Return the payload of each bucket's thresholded publication among the ranks at a place, in bytes."""
    pieces = owned_pieces(low, place)
    sizes = published(low, place).size_bytes[pieces.kinds] @ pieces.members
    payloads: list[float] = ((low.nodes - 1) * sizes).tolist()
    return payloads


@once_a_step
def _buffers(low: Lowering, place: int) -> tuple[Floats, Floats]:
    """Return the buffer of an owner's message, and the buffers of all other owners' messages, in bytes.

    Both by kind of bucket and run of owners. A dense message has no buffer: it is sent from the replica and received in
    it.
    """
    messages = published(low, place)
    buffers = np.where(messages.encoding == DENSE, 0.0, messages.size_bytes)
    return buffers, sums_of_others(buffers, owned_pieces(low, place).members)


def publish_ratios(low: Lowering) -> Mapping[str, sparsity.Ratios]:
    """Return the published fraction of each tensor in this step."""
    statistics, workload = low.statistics, low.scenario.workload
    assert statistics is not None  # loading demands them
    threshold = absolute_threshold(low.scenario.plan.publish, workload.learning_rate)
    rules = replace(low.scenario.plan.publish, kind="absolute", threshold=threshold)

    def ratios_of(name: str) -> sparsity.Ratios:
        return sparsity.publish_ratios(statistics, rules, tensor=name, step=step)

    step = min(low.step, statistics.sampled_steps[-1])  # after the last sampled step, densities are constant
    key = (Same(statistics), Same(workload.model), rules, step)
    return low.shared.once(
        "densities of publications", key, lambda: by_parameter(low, ratios_of), most=MAX_CACHED_DENSITIES
    )


def threshold_and_pack(low: Lowering, rank: int, order: Sequence[Bucket]) -> list[Task]:
    """Return the tasks that threshold and pack every bucket, and the exchanges of counts, one of all their owners."""
    tasks = []
    for bucket in order:
        owners = low.owning(bucket)
        duration_s, need = _thresholding(owners, rank, bucket_kind(owners, bucket))
        own_id = _publish_id(bucket).serving("threshold")
        tasks.append(Task(own_id, "compression", duration_s=duration_s, need=need))
    several = len({bucket.of_experts for bucket in order}) > 1
    for number, of_experts in enumerate(dict.fromkeys(bucket.of_experts for bucket in order)):
        own = [bucket for bucket in order if bucket.of_experts == of_experts]
        owners = low.owning(own[0])
        parts = (len(own) * COUNT_BYTES,) * owners.nodes
        settings: dict[str, Any] = {"part_bytes": parts, "carried_as": "all-gather-v"}
        exchange = Communication.among(owners.push_groups, "all-gather", sum(parts), **settings)
        tasks.append(collective_task(TaskId("publish", "counts", part=number if several else None), exchange))
    return tasks


@once_a_step
def _thresholding(low: Lowering, rank: int, kind: int) -> tuple[float, Footprint]:
    """Return the seconds and the memory of thresholding and packing a bucket of a kind of the rank's own shard.

    Differences are computed in scratch. Published values are read from the master copy and written to the replica.
    """
    device, (_, buffer_bytes, _, packing_s) = low.device(rank), _of_rank(low, rank)
    elements = low.pushed_elements(first_of_kinds(low)[kind], rank)
    duration_s = cost.copy_time_s(device, elements * (low.value_bytes + low.master_bytes))
    duration_s += cost.select_time_s(device, elements=float(elements), parts=1, value=low.value_bytes)
    duration_s += packing_s[kind]
    return duration_s, footprint([Event(0, buffer_bytes[kind], "communication")])


def _publish_id(bucket: Bucket) -> TaskId:
    return TaskId("publish", bucket=bucket.index)


@once_a_step
def _of_rank(low: Lowering, rank: int) -> tuple[list[float], ...]:
    """Return four lists by kind of bucket: the bytes of others' message buffers and of the rank's own, the seconds to
    write others' messages to the replica, and the seconds to pack the rank's own.
    """
    place, device_type = low.place(rank), low.device_type(rank)
    (buffers, others), messages = _buffers(low, place), published(low, place)
    run = int(owned_pieces(low, place).runs[low.node(rank)])
    device, own = low.scenario.cluster.device_types[device_type], slice(run, run + 1)
    mine = Messages(
        messages.encoding[:, own], messages.elements[:, own], messages.entries[:, own], messages.size_bytes[:, own]
    )
    packing_s = mine.priced(partial(cost.pack_time_s, device, value=low.value_bytes, clears=False))
    packing_s = np.where((mine.encoding != DENSE) & (mine.elements > 0), packing_s, 0.0)
    others_s = _unpacking_s(low, place, device_type)
    columns = (others[:, run], buffers[:, run], others_s[:, run], packing_s[:, 0])
    return tuple(column.tolist() for column in columns)


@once_a_step
def _unpacking_s(low: Lowering, place: int, device_type: str) -> Floats:
    """Return the seconds a device takes to write all other owners' messages to the replica, by kind of bucket and run
    of owners.

    Dense messages take none, as they are received in the replica.
    """
    device, messages = low.scenario.cluster.device_types[device_type], published(low, place)
    times_s = messages.priced(partial(cost.unpack_time_s, device, value=low.value_bytes))
    times_s = np.where((messages.encoding != DENSE) & (messages.elements > 0), times_s, 0.0)
    return sums_of_others(times_s, owned_pieces(low, place).members)


def unpack(low: Lowering, rank: int, bucket: Bucket) -> Task:
    """Return the task that writes the received messages of a bucket to the replica, and frees all messages."""
    duration_s, need = _unpacking(low, rank, bucket_kind(low, bucket))
    return Task(_publish_id(bucket).serving("put"), "compression", duration_s=duration_s, need=need)


@once_a_step
def _unpacking(low: Lowering, rank: int, kind: int) -> tuple[float, Footprint]:
    """Return the time and the memory to write the messages that a rank receives for a bucket into its replica.

    `kind`: of the bucket; equal buckets have one kind.

    torch writes at int64 indices. COO indices are cast to them, on a CPU in chunks; the indices of a bitmap are listed
    first, on a CPU by numpy.
    """
    device, place = low.device(rank), low.place(rank)
    messages, pieces = published(low, place), owned_pieces(low, place)
    on_cpu, encoding = device.kind == "cpu", messages.encoding[kind]
    most = encodings.CHUNK_ELEMENTS if on_cpu else math.inf
    indexed = encoding == encodings.ENCODINGS.index("coo") if on_cpu else encoding != DENSE
    own = pieces.runs[low.node(rank)]
    indexed[own] &= pieces.members[own] > 1
    places = min(float(messages.entries[kind].max(where=indexed, initial=0.0)), most)
    others_bytes, own_bytes, unpack_s, _ = _of_rank(low, rank)
    given_back = others_bytes[kind] + own_bytes[kind]
    stream = _side_stream(low, rank)
    cast = [
        Event(0, INDEX_BYTES * places, "temporaries", stream=stream),
        Event(1, -INDEX_BYTES * places, "temporaries"),
    ]
    return unpack_s[kind], footprint([*cast, Event(2, -given_back, "communication")])


def mean_publish_density(low: Lowering) -> float:
    """Return the fraction of all owned elements that owners publish in this step."""
    entries = elements = 0.0
    for owners in low.all_owners:
        for place in range(owners.places) if owners.nodes > 1 or not owners.of_experts else ():
            messages, pieces = published(owners, place), owned_pieces(owners, place)
            entries += float((messages.entries[pieces.kinds] * pieces.members).sum())
            elements += float((messages.elements[pieces.kinds] * pieces.members).sum())
    return entries / elements if elements else 0.0


def publish(low: Lowering, rank: int, tasks: Sequence[Task], update: Task) -> list[Task]:
    """Return a rank's whole step: its other tasks, the update, and the publication of parameters to replicas."""
    if low.policies.parameters != "replicated":
        return [*tasks, update]
    sends: Sequence[Task]
    alike = low.first_of_places  # what they publish is equal in all steps
    if low.thresholds_publish:
        sends, waits = _tasks_of_step(low, rank)
    else:
        sends, waits = _tasks_of_every_step(low, alike[low.position(rank) % len(alike)])
    if not _overlaps(low):
        return [*tasks, update, *sends]
    if sends and not _posts_messages(low):  # where messages are posted, the compute stream of the CPU does that
        first, *others = sends
        first = replace(first, after=(*first.after, PUBLISH_BEGIN))
        sends = [Task(PUBLISH_BEGIN, "forward"), first, *others]
    return [*sends, *insert_beside(tasks, before=waits, behind={}), update]


PUBLISH_BEGIN = TaskId("publish-begin")
"""Marker of the beginning of a step that first publishes the update of the step before."""


def _publish_tasks(low: Lowering, rank: int) -> tuple[list[Task], dict[TaskId, list[Task]]]:
    """Return the tasks that publish, and the tasks that wait for them, keyed by the forward that they precede."""
    overlaps = _overlaps(low)
    buckets = [bucket for bucket in low.buckets if low.publishes(bucket)]
    order = buckets[::-1] if overlaps else buckets
    sends = threshold_and_pack(low, rank, order) if low.thresholds_publish else []
    waits: dict[TaskId, list[Task]] = defaultdict(list)
    for bucket in order:
        exchanges = _bucket_exchanges(low.owning(bucket), rank, bucket)
        sends += exchanges
        if overlaps:
            first_reader = min((instance for instance, _ in bucket.members), key=lambda instance: instance.index)
            reader = forward_id(first_reader).at(micro_batch=low.micro_batches[0].number)
            after = tuple(task.id for task in exchanges if task.stream == "communication")
            if low.thresholds_publish and _posts_messages(low):
                waits[reader].append(replace(unpack(low.owning(bucket), rank, bucket), after=after))
            else:
                waits[reader].append(Task(_publish_id(bucket).serving("take"), "forward", after=after))
    return sends, waits


_tasks_of_step = once_a_step(_publish_tasks)
"""What has changed in a step is published."""
_tasks_of_every_step = once_a_run(_publish_tasks)
"""Everything is published, in each step alike."""


def _bucket_exchanges(low: Lowering, rank: int, bucket: Bucket) -> list[Task]:
    """Return the tasks that publish a bucket: first across nodes, then all of the place's part within the node."""
    tasks = []
    if not low.policies.point_to_point:  # the backend's collectives: owners broadcast their parts, in rank order
        for root, elements in enumerate(low.division(bucket).owned[0]):
            if elements:
                size_bytes = elements * low.value_bytes
                exchange = Communication.among(low.push_groups, "broadcast", size_bytes, root=root)
                tasks.append(collective_task(TaskId("publish", bucket=bucket.index, part=root), exchange))
        return _on_communication_stream(low, tasks)
    if low.nodes > 1 or low.places == 1:
        tasks += _exchange_across_nodes(low, rank, bucket)
    elif low.thresholds_publish:  # what was packed, for nobody, is freed
        tasks.append(unpack(low, rank, bucket))
    if low.reduces_in_nodes:
        exchange = exchange_in_node(low, "all-gather-v", dense_bytes(low, low.division(bucket).places))
        tasks.append(collective_task(TaskId("publish-in-node", bucket=bucket.index), exchange))
    return _on_communication_stream(low, tasks)


def _overlaps(low: Lowering) -> bool:
    """Return whether the next forward begins before published parameters have arrived.

    This excludes GPUs on gloo: messages are copied through host memory, which the host waits for.
    """
    return low.policies.publish_overlaps and not low.sends_from_host(low.device(low.group[0]))


def _side_stream(low: Lowering, rank: int) -> str:
    """Return the stream on which others' messages are received and unpacked; on a GPU with overlap, a separate one."""
    return "publish" if low.policies.publish_overlaps and low.device(rank).kind == "cuda" else ""


def _posts_messages(low: Lowering) -> bool:
    """Return whether messages are posted now and waited for later; see [Note: publish beside the forward]."""
    return _overlaps(low) and low.scenario.cluster.backend == "gloo"


def _on_communication_stream(low: Lowering, tasks: list[Task]) -> list[Task]:
    """Return the tasks, moved to the communication stream if publishing overlaps; those that post messages stay."""
    if not _overlaps(low):
        return tasks
    return [
        replace(task, stream="communication") if task.communication or not _posts_messages(low) else task
        for task in tasks
    ]


def _exchange_across_nodes(low: Lowering, rank: int, bucket: Bucket) -> list[Task]:
    """Return the exchange of a bucket in the push group: posted messages, or a ring followed by unpacking."""
    own, place = _publish_id(bucket), low.place(rank)
    communication, exchange = _exchange_of_bucket(low, bucket.index, place)
    need = _receiving(low, rank, bucket_kind(low, bucket))
    if not _posts_messages(low):
        ring = collective_task(own, exchange, communication=communication, need=need)
        return [ring, unpack(low, rank, bucket)] if low.thresholds_publish else [ring]
    parts = _part_bytes(low, bucket, place)
    others, own_bytes = len(parts) - 1, parts[low.node(rank)]
    posting_s = collectives.posting_s(low.scenario.cluster, low.device(rank), others * own_bytes, others)
    begin = Task(own.serving("begin"), "exposed_communication", need=need)  # messages start as soon as they are posted
    post = Task(own.serving("post"), "exposed_communication", duration_s=posting_s)
    return [begin, post, collective_task(own, exchange, communication=communication, after=(begin.id,))]


@once_a_step
def _exchange_of_bucket(low: Lowering, number: int, place: int) -> tuple[TaskId, Communication]:
    """Return the exchange by which the owners at a place publish the bucket with an index, with its identity."""
    bucket = low.buckets[number]
    parts = _part_bytes(low, bucket, place)
    carried: dict[str, Any] = {"part_bytes": parts}
    if _posts_messages(low):
        carried = {"pair_bytes": to_all(parts, 1), "carried_as": "all-to-all-v"}
    return push_group_collective(
        low,
        bucket,
        low.group[place],
        _publish_id(bucket),
        "all-gather-v",
        low.division(bucket).places[place] * low.value_bytes,
        data_dependent=low.thresholds_publish,
        **carried,
    )


def _part_bytes(low: Lowering, bucket: Bucket, place: int) -> tuple[float, ...]:
    """Return the size of the message that each node's owner at a place publishes of a bucket."""
    if low.thresholds_publish:
        return message_bytes(low, bucket_kind(low, bucket), place)
    return dense_bytes(low, low.division(bucket).owned[place])


@once_a_step
def _receiving(low: Lowering, rank: int, kind: int) -> Footprint:
    """Return the memory of the rank's receive buffers for the messages of all other owners, of a bucket of a kind."""
    received_bytes = _of_rank(low, rank)[0][kind] if low.thresholds_publish else 0.0
    return footprint([Event(0, received_bytes, "communication", stream=_side_stream(low, rank))])
