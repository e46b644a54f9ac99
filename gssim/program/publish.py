"""Gradient Sharding: updated parameters on their way back from the owners to every replica.

[Note: thresholded publish] An owner updates a master copy of its range, in any precision, and publishes what of it is
at least the threshold away from what it published last; the rest stays in that difference, and goes with a later step
(gradient-sharding A.3, step 5). First all buckets are thresholded and packed, then the ranks tell each other once how
many entries each sends of each bucket, then bucket after bucket goes round a ring: messages to everybody take as many
bytes by any way, but a ring loads no link with more than all messages but one, whatever the shares. What goes densely
is sent from the replica, and received in it. With two levels the threshold is for what goes across nodes; in the node
everything goes densely, as links there are fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gssim import costs, density
from gssim.collectives import Communication
from gssim.memory import Event, footprint
from gssim.program.lowering import Bucket, Lowering
from gssim.program.push import COUNT_BYTES, TORCH_INDEX_BYTES, across
from gssim.program.task import Task
from gssim.workload import LayerInstance, Parameter


def publish(low: Lowering, rank: int) -> Sequence[Task]:
    """Return the tasks by which updated parameters go round a ring into everybody's flat replica, bucket by bucket.

    On two levels they go round the push group first, then, with all of the rank's place, round the node.
    """
    if low.policies.parameters != "replicated":
        return []
    key = ("publish", rank if low.sends_by_data else low.place(rank))
    if key not in low.found:
        low.found[key] = [*_prepared(low, rank), *(task for b in low.buckets for task in _publish_bucket(low, rank, b))]
    tasks: Sequence[Task] = low.found[key]
    return tasks


def _publish_bucket(low: Lowering, rank: int, bucket: Bucket) -> list[Task]:
    division = low.division(bucket)
    label = f"publish bucket {bucket.index}"
    if not low.policies.point_to_point:
        return _broadcast_parts(low, bucket, label)
    tasks = []
    if low.nodes > 1 or low.places == 1:
        dense = tuple(n * low.value_bytes for n in division.owned[low.place(rank)])
        thresholded = low.thresholds_publish
        parts = _message_bytes(low, bucket, rank) if thresholded else dense
        settings = {"part_bytes": parts, "data_dependent": thresholded}
        name = across(low, bucket, rank, label, "all-gather-v", sum(dense), **settings)
        tasks += _put(low, rank, bucket, Task(label, "exposed_communication", communication=name))
    if low.places > 1:
        label = f"{label} in the node"
        parts = tuple(n * low.value_bytes for n in division.places)
        low.communications[label] = low.communication("all-gather-v", "dp_shard", sum(parts), part_bytes=parts)
        tasks.append(Task(label, "exposed_communication", communication=label))
    return tasks


def _broadcast_parts(low: Lowering, bucket: Bucket, name: str) -> list[Task]:
    """GS by the backend's collectives: every owner broadcasts its part of a bucket; they are taken in that order."""
    tasks = []
    for rank, elements in enumerate(low.division(bucket).owned[0]):
        if elements:
            part = f"{name} part {rank}"
            low.communications[part] = Communication("broadcast", low.group, elements * low.value_bytes, root=rank)
            tasks.append(Task(part, "exposed_communication", communication=part))
    return tasks


# With a threshold; see [Note: thresholded publish] --------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """What an owner publishes of a bucket."""

    elements: int
    """That it owns."""
    entries: float
    """That it sends."""
    size_bytes: float
    is_dense: bool
    """It is sent from the replica, and received in it, without a buffer."""

    @property
    def buffer_bytes(self) -> float:
        """Bytes of the buffer that it is in."""
        return 0.0 if self.is_dense else self.size_bytes


def _messages(low: Lowering, bucket: Bucket, place: int) -> tuple[Message, ...]:
    """Return the message of the owner on every node, at a place."""
    key = ("messages", bucket.index, place)
    if key not in low.found:
        low.found[key] = tuple(_message(low, bucket, *owned) for owned in low.division(bucket).ranges(place))
    found: tuple[Message, ...] = low.found[key]
    return found


def _message_bytes(low: Lowering, bucket: Bucket, rank: int) -> tuple[float, ...]:
    return tuple(message.size_bytes for message in _messages(low, bucket, low.place(rank)))


def _message(low: Lowering, bucket: Bucket, first: int, last: int) -> Message:
    elements = last - first
    entries = sum(_entries(low, *part) for part in bucket.inside(first, last))
    sizes = {"elements": elements, "sent": entries}
    form = {"value_bytes": low.value_bytes, "index_bytes": costs.INDEX_BYTES}
    encoding = low.scenario.plan.publish.encoding
    size = density.message_bytes(**sizes, **form, encoding=encoding)
    return Message(elements, entries, size, is_dense=density.is_dense(**sizes, **form, encoding=encoding))


def _entries(low: Lowering, instance: LayerInstance, parameter: Parameter, first: int, last: int) -> float:
    """Return how many elements of a range of a parameter are published in this step."""
    rules = low.scenario.plan.publish
    if not rules.threshold:
        return last - first
    assert low.statistics is not None  # loading demands them
    part = density.publish_density(
        low.statistics,
        rules,
        tensor=parameter.name.replace("{}", instance.module),
        step=low.step,
        first=first / parameter.elements,
        last=last / parameter.elements,
    )
    return part * (last - first)


def _prepared(low: Lowering, rank: int) -> list[Task]:
    """Return the tasks that threshold and pack every bucket, and the exchange of counts."""
    if not low.thresholds_publish:
        return []
    name, axis = "counts publish", low.policies.push_axis
    size = len(low.buckets) * low.nodes * COUNT_BYTES
    low.communications[name] = low.communication("all-gather", axis, size, carried_as="all-gather-v")
    prepared = [_prepare(low, rank, bucket) for bucket in low.buckets]
    return [*prepared, Task(name, "exposed_communication", communication=name)]


def _prepare(low: Lowering, rank: int, bucket: Bucket) -> Task:
    """Return the task that finds what of the own range is published, brings it to the replica, and packs it.

    It takes the distances of master and replica in the master's precision, then a mask; the master in the replica's
    precision, where that is another; indices as int64, and the message.
    """
    device, message = low.device(rank), _messages(low, bucket, low.place(rank))[low.node(rank)]
    distances, mask = float(message.elements * low.master_bytes), float(message.elements)
    cast = float(message.elements * low.value_bytes) if low.has_master_copy else 0.0
    indices = 0.0 if message.is_dense else TORCH_INDEX_BYTES * message.entries
    steps = (distances, mask, -distances, cast, -cast, indices, message.buffer_bytes, -indices, -mask)
    kinds = ["communication" if i == 6 else "temporaries" for i in range(len(steps))]
    need = footprint(Event(i, size, kind) for i, (size, kind) in enumerate(zip(steps, kinds, strict=True)))
    compared_s = costs.copy_time_s(device, 2 * distances + 1.5 * message.elements * low.value_bytes)
    threshold_s = costs.threshold_time_s(device, elements=message.elements, sent=message.entries)
    label = f"threshold publish bucket {bucket.index}"
    return Task(label, "compression", duration_s=compared_s + threshold_s, need=need)


def _put(low: Lowering, rank: int, bucket: Bucket, exchange: Task) -> list[Task]:
    """Return the exchange of a bucket's messages and the task that brings those of others to the replica.

    Each has its indices as int64 while it is put; all are given back together, the own one as well.
    """
    if not low.thresholds_publish:
        return [exchange]
    messages = _messages(low, bucket, low.place(rank))
    others = [each for node, each in enumerate(messages) if node != low.node(rank) and not each.is_dense]
    received = sum(each.size_bytes for each in others)
    indices = TORCH_INDEX_BYTES * max((each.entries for each in others), default=0.0)
    own = messages[low.node(rank)].buffer_bytes
    events = [Event(0, indices, "temporaries"), Event(1, -indices, "temporaries")]
    put_s = costs.scatter_time_s(low.device(rank), received=sum(each.entries for each in others)) if others else 0.0
    return [
        replace(exchange, need=footprint([Event(0, received, "communication")])),
        Task(
            f"put {exchange.label}",
            "compression",
            duration_s=put_s,
            need=footprint([*events, Event(2, -received - own, "communication")]),
        ),
    ]


def published_density(low: Lowering) -> float:
    """Return the fraction of their elements that all owners publish in this step."""
    found = [m for bucket in low.buckets for place in range(low.places) for m in _messages(low, bucket, place)]
    elements = sum(message.elements for message in found)
    return sum(message.entries for message in found) / elements if elements else 0.0
