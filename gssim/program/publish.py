"""Gradient Sharding: updated parameters on their way back from the owners to every replica.

[Note: publish beside the forward] Where publishing overlaps, a step begins with it: the parameters that the step before
updated are sent bucket by bucket, last bucket first, as gradients are complete from the last layer on, and the first
layer of the forward to read a bucket waits for it. A GPU does all of that in a stream beside its compute's, by rings as
ever. On a CPU there is none: messages are posted and left to gloo's threads, and as nobody passes on what is to go on
by itself, every owner sends its own to everybody; what was packed is put where it belongs when it is waited for.

Gradient Sharding: what a threshold makes of the updated parameters that owners publish.

[Note: thresholded publish] An owner updates a master copy of its range, in any precision, and publishes what of it is
at least the threshold away from what it published last; the rest stays in that difference, and goes with a later step
(gradient-sharding A.3, step 5). First all buckets are thresholded and packed, then the ranks tell each other once how
many entries each sends of each bucket, then bucket after bucket goes round a ring: messages to everybody take as many
bytes by any way, but a ring loads no link with more than all messages but one, whatever the shares. What goes densely
is sent from the replica, and received in it. With two levels the threshold is for what goes across nodes; in the node
everything goes densely, as links there are fast.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gssim import collectives, cost, sparsity
from gssim.cache import Same
from gssim.cluster import DeviceType
from gssim.collectives import Communication, summed_without
from gssim.memory import Event, footprint
from gssim.plan import absolute_threshold, encodings
from gssim.program.lowering import Lowering
from gssim.program.messages import MOST_DENSITIES, Piece, pieces_of, to_everybody
from gssim.program.push import COUNT_BYTES, across
from gssim.program.sharded import inserted
from gssim.program.task import Bucket, Task
from gssim.program.tensor_slices import phase_label

PLACE_BYTES = 8
"""torch lists places as int64."""


@dataclass(frozen=True)
class Message:
    """What an owner publishes of a bucket."""

    elements: int
    """That it owns."""
    entries: float
    """That it sends."""
    size_bytes: float
    encoding: str

    @property
    def buffer_bytes(self) -> float:
        """Bytes of the buffer that it is in: none densely, as that is sent from the replica, and received in it."""
        return 0.0 if self.encoding == "dense" else self.size_bytes


def messages_of(low: Lowering, bucket: Bucket, place: int) -> tuple[Message, ...]:
    """Return the message of the owner on every node, at a place."""
    key = ("messages", bucket.index, place)
    if key not in low.found:
        ratios = _ratios(low) if low.scenario.plan.publish.selects else None
        low.found[key] = tuple(_message(low, pieces, ratios) for pieces in pieces_of(low, bucket, place))
    found: tuple[Message, ...] = low.found[key]
    return found


def message_bytes(low: Lowering, bucket: Bucket, rank: int) -> tuple[float, ...]:
    """Return the bytes of the message of every owner in a rank's push group."""
    return tuple(message.size_bytes for message in messages_of(low, bucket, low.place(rank)))


def _message(low: Lowering, pieces: Sequence[Piece], ratios: Mapping[str, sparsity.Ratios] | None) -> Message:
    """Return the message of an owner of some pieces; `ratios`: what of them is published, absent: all."""
    elements = sum(piece[0] for piece in pieces)
    entries = sum(n * ratios[tensor].over(begin, end) if ratios else n for n, tensor, begin, end in pieces)
    sizes = {"entries": entries, "elements": float(elements)}
    kind = encodings.chosen(low.scenario.plan.publish.encoding, **sizes, value_bytes=low.value_bytes)
    size = encodings.message_bytes(kind, **sizes, value_bytes=low.value_bytes)
    return Message(elements, entries, size, kind)


def _ratios(low: Lowering) -> Mapping[str, sparsity.Ratios]:
    """Return what is published of each tensor in this step."""
    statistics, workload = low.statistics, low.scenario.workload
    assert statistics is not None  # loading demands them
    threshold = absolute_threshold(low.scenario.plan.publish, workload.learning_rate)
    rules = replace(low.scenario.plan.publish, kind="absolute", threshold=threshold)

    def found() -> Mapping[str, sparsity.Ratios]:
        names = {p.name.replace("{}", instance.module) for instance, p in low.parameters}
        return {name: sparsity.publish_ratios(statistics, rules, tensor=name, step=low.step) for name in names}

    key = (Same(statistics), Same(workload.model), rules, low.step)
    return low.shared.once("densities of publications", key, found, most=MOST_DENSITIES)


def prepared(low: Lowering, rank: int, order: Sequence[Bucket]) -> list[Task]:
    """Return the tasks that threshold and pack every bucket, and the exchange of counts."""
    name, axis = "counts publish", low.policies.push_axis
    parts = (len(order) * COUNT_BYTES,) * low.nodes
    settings: dict[str, Any] = {"part_bytes": parts, "carried_as": "all-gather-v"}
    low.communications[name] = low.communication("all-gather", axis, sum(parts), **settings)
    counts = Task(name, "exposed_communication", communication=name)
    return [*(_prepare(low, rank, bucket) for bucket in order), counts]


def _prepare(low: Lowering, rank: int, bucket: Bucket) -> Task:
    """Return the task that finds what of the own range is published, brings it to the replica, and packs it.

    Distances are found in scratch; what is published is read from the master, and written to the replica.
    """
    device, message = low.device(rank), messages_of(low, bucket, low.place(rank))[low.node(rank)]
    duration_s = cost.copy_time_s(device, message.elements * (low.value_bytes + low.master_bytes))
    duration_s += cost.select_time_s(device, elements=message.elements, parts=1, value=low.value_bytes)
    if message.encoding != "dense":
        duration_s += cost.pack_time_s(
            device,
            encoding=message.encoding,
            elements=message.elements,
            entries=message.entries,
            value=low.value_bytes,
            clears=False,
        )
    need = footprint([Event(0, message.buffer_bytes, "communication")])
    return Task(f"threshold publish bucket {bucket.index}", "compression", duration_s=duration_s, need=need)


def received_bytes(low: Lowering, bucket: Bucket, rank: int) -> float:
    """Return the bytes of the buffers that others' messages come in."""
    key = ("received", bucket.index, low.place(rank))
    if key not in low.found:
        low.found[key] = np.array([each.buffer_bytes for each in messages_of(low, bucket, low.place(rank))])
    return summed_without(low.found[key], low.node(rank))


def put(low: Lowering, rank: int, bucket: Bucket) -> Task:
    """Return the task that brings what was received of a bucket to the replica, and gives all messages back.

    torch writes at places that are int64: those of COO are cast, on a CPU in chunks.
    """
    device, own = low.device(rank), low.node(rank)
    messages = messages_of(low, bucket, low.place(rank))
    most = encodings.CHUNK_ELEMENTS if device.kind == "cpu" else math.inf
    others = (*messages[:own], *messages[own + 1 :])
    places = max((min(each.entries, most) for each in others if each.encoding == "coo"), default=0.0)
    given_back = received_bytes(low, bucket, rank) + messages[own].buffer_bytes
    cast = [Event(0, PLACE_BYTES * places, "temporaries"), Event(1, -PLACE_BYTES * places, "temporaries")]
    need = footprint([*cast, Event(2, -given_back, "communication")])
    key = ("put", bucket.index, low.place(rank), low.scenario.cluster.devices[rank].type)
    if key not in low.found:
        low.found[key] = np.array([_put_s(low, device, each) for each in messages])
    put_s = summed_without(low.found[key], own)
    return Task(f"put publish bucket {bucket.index}", "compression", duration_s=put_s, need=need)


def _put_s(low: Lowering, device: DeviceType, message: Message) -> float:
    """Return the time to bring one message to the replica; what goes densely is received there."""
    if message.encoding == "dense":
        return 0.0
    return cost.unpack_time_s(
        device,
        encoding=message.encoding,
        elements=message.elements,
        entries=message.entries,
        value=low.value_bytes,
    )


def published_density(low: Lowering) -> float:
    """Return the fraction of their elements that all owners publish in this step."""
    found = [m for bucket in low.buckets for place in range(low.places) for m in messages_of(low, bucket, place)]
    elements = sum(message.elements for message in found)
    return sum(message.entries for message in found) / elements if elements else 0.0


def publish(low: Lowering, rank: int, tasks: Sequence[Task], update: Task) -> list[Task]:
    """Return a rank's step: its other tasks, the update, and what brings the updated parameters to all replicas."""
    if low.policies.parameters != "replicated":
        return [*tasks, update]
    key = ("publish", rank if low.thresholds_publish else low.place(rank))
    if key not in low.found:
        low.found[key] = _published(low, rank)
    begun: Sequence[Task]
    taken: Mapping[str, Sequence[Task]]
    begun, taken = low.found[key]
    if not low.policies.publish_overlaps:
        return [*tasks, update, *begun]
    return [*_after_update(low, begun), *inserted(tasks, before=taken, behind={}), update]


PUBLISH_BEGIN = "publish begin"


def _after_update(low: Lowering, begun: Sequence[Task]) -> list[Task]:
    """Return the tasks that publish, behind a mark of the step's beginning: what they send was updated just before.

    On a CPU the compute itself posts the messages.
    """
    if _posts(low) or not begun:
        return list(begun)
    first, *others = begun
    return [Task(PUBLISH_BEGIN, "forward"), replace(first, after=(*first.after, PUBLISH_BEGIN)), *others]


def _published(low: Lowering, rank: int) -> tuple[list[Task], dict[str, list[Task]]]:
    """Return the tasks that publish, and those that wait for it, by the forward that they come before."""
    overlaps = low.policies.publish_overlaps
    order = low.buckets[::-1] if overlaps else low.buckets
    begun = prepared(low, rank, order) if low.thresholds_publish else []
    taken: dict[str, list[Task]] = defaultdict(list)
    for bucket in order:
        exchanges = _exchanges(low, rank, bucket)
        begun += exchanges
        if overlaps:
            taken[_first_reader(low, bucket)] += _taken(low, rank, bucket, exchanges)
    return begun, taken


def _first_reader(low: Lowering, bucket: Bucket) -> str:
    """Return the label of the first forward that reads a bucket."""
    layer = min((instance for instance, _ in bucket.members), key=lambda instance: instance.index)
    return phase_label("f", layer, 0) + low.micro_batches[0].suffix


def _taken(low: Lowering, rank: int, bucket: Bucket, exchanges: Sequence[Task]) -> list[Task]:
    """Return what waits for a bucket whose exchanges have begun."""
    after = tuple(task.label for task in exchanges if task.stream == "communication")
    if low.thresholds_publish and _posts(low):
        return [replace(put(low, rank, bucket), after=after)]
    return [Task(f"take publish bucket {bucket.index}", "forward", after=after)]


def _exchanges(low: Lowering, rank: int, bucket: Bucket) -> list[Task]:
    """Return the tasks that bring a bucket to all: across nodes, then, with all of the rank's place, in the node."""
    label = f"publish bucket {bucket.index}"
    if not low.policies.point_to_point:
        return _beside(low, _broadcast_parts(low, bucket, label))
    tasks = []
    if low.nodes > 1 or low.places == 1:
        tasks += _across(low, rank, bucket, label)
    if low.places > 1:
        label = f"{label} in the node"
        parts = tuple(n * low.value_bytes for n in low.division(bucket).places)
        low.communications[label] = low.communication("all-gather-v", "dp_shard", sum(parts), part_bytes=parts)
        tasks.append(Task(label, "exposed_communication", communication=label))
    return _beside(low, tasks)


def _posts(low: Lowering) -> bool:
    """Return whether messages are posted, to be waited for later; see [Note: publish beside the forward]."""
    return low.policies.publish_overlaps and low.scenario.cluster.backend == "gloo"


def _beside(low: Lowering, tasks: list[Task]) -> list[Task]:
    """Return tasks on the stream beside the compute, if publishing overlaps: all but the posting of messages."""
    if not low.policies.publish_overlaps:
        return tasks
    return [replace(task, stream="communication") if task.communication or not _posts(low) else task for task in tasks]


def _across(low: Lowering, rank: int, bucket: Bucket, label: str) -> list[Task]:
    """Return the exchange of a bucket in the push group, round a ring or posted; messages are put after a ring."""
    owned, thresholded = low.division(bucket).owned[low.place(rank)], low.thresholds_publish
    dense = tuple(n * low.value_bytes for n in owned)
    parts = message_bytes(low, bucket, rank) if thresholded else dense
    carried: dict[str, Any] = {"part_bytes": parts}
    if _posts(low):
        carried = {"pair_bytes": to_everybody(parts, 1), "carried_as": "all-to-all-v"}
    name = across(low, bucket, rank, label, "all-gather-v", sum(dense), data_dependent=thresholded, **carried)
    received = received_bytes(low, bucket, rank) if thresholded else 0.0
    need = footprint([Event(0, received, "communication")])
    if not _posts(low):
        ring = Task(label, "exposed_communication", communication=name, need=need)
        return [ring, put(low, rank, bucket)] if thresholded else [ring]
    others, own = len(parts) - 1, parts[low.node(rank)]
    posting_s = collectives.posting_s(low.scenario.cluster, low.device(rank), others * own, others)
    begin = Task(f"begin {label}", "exposed_communication", need=need)  # messages go as they are posted
    post = Task(f"post {label}", "exposed_communication", duration_s=posting_s)
    return [begin, post, Task(label, "exposed_communication", communication=name, after=(begin.label,))]


def _broadcast_parts(low: Lowering, bucket: Bucket, name: str) -> list[Task]:
    """GS by the backend's collectives: every owner broadcasts its part of a bucket; they are taken in that order."""
    tasks = []
    for rank, elements in enumerate(low.division(bucket).owned[0]):
        if elements:
            part = f"{name} part {rank}"
            low.communications[part] = Communication("broadcast", low.group, elements * low.value_bytes, root=rank)
            tasks.append(Task(part, "exposed_communication", communication=part))
    return tasks
