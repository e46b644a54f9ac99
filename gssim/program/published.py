"""Gradient Sharding: what a threshold makes of the updated parameters that owners publish.

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
from gssim.memory import Event, footprint
from gssim.plan import absolute_threshold
from gssim.program.lowering import Bucket, Lowering
from gssim.program.push import COUNT_BYTES, TORCH_INDEX_BYTES
from gssim.program.task import Task
from gssim.workload import LayerInstance, Parameter


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


def message_bytes(low: Lowering, bucket: Bucket, rank: int) -> tuple[float, ...]:
    """Return the bytes of the message of every owner in a rank's push group."""
    return tuple(message.size_bytes for message in _messages(low, bucket, low.place(rank)))


def _message(low: Lowering, bucket: Bucket, first: int, last: int) -> Message:
    elements = last - first
    entries = sum(_entries(low, *part) for part in bucket.inside(first, last))
    encoding, value_bytes, index_bytes = low.scenario.plan.publish.encoding, low.value_bytes, costs.INDEX_BYTES
    size = density.message_bytes(
        elements=elements, sent=entries, value_bytes=value_bytes, index_bytes=index_bytes, encoding=encoding
    )
    is_dense = density.is_dense(
        elements=elements, sent=entries, value_bytes=value_bytes, index_bytes=index_bytes, encoding=encoding
    )
    return Message(elements, entries, size, is_dense)


def _entries(low: Lowering, instance: LayerInstance, parameter: Parameter, first: int, last: int) -> float:
    """Return how many elements of a range of a parameter are published in this step."""
    rules, workload = low.scenario.plan.publish, low.scenario.workload
    if not rules.threshold:
        return last - first
    threshold = absolute_threshold(rules, workload.learning_rate)
    assert low.statistics is not None  # loading demands them
    part = density.publish_density(
        low.statistics,
        replace(rules, kind="absolute", threshold=threshold),
        tensor=parameter.name.replace("{}", instance.module),
        step=low.step,
        first=first / parameter.elements,
        last=last / parameter.elements,
    )
    return part * (last - first)


def prepared(low: Lowering, rank: int, order: Sequence[Bucket]) -> list[Task]:
    """Return the tasks that threshold and pack every bucket, and the exchange of counts."""
    name, axis = "counts publish", low.policies.push_axis
    size = len(order) * low.nodes * COUNT_BYTES
    low.communications[name] = low.communication("all-gather", axis, size, carried_as="all-gather-v")
    counts = Task(name, "exposed_communication", communication=name)
    return [*(_prepare(low, rank, bucket) for bucket in order), counts]


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


def received_bytes(low: Lowering, bucket: Bucket, rank: int) -> float:
    """Return the bytes of the buffers that others' messages come in."""
    return sum(message.buffer_bytes for message in _others(low, bucket, rank))


def put(low: Lowering, rank: int, bucket: Bucket) -> Task:
    """Return the task that brings what was received of a bucket to the replica, and gives all messages back.

    Each has its indices as int64 while it is put.
    """
    others, own = _others(low, bucket, rank), _messages(low, bucket, low.place(rank))[low.node(rank)]
    entries = [each.entries for each in others if not each.is_dense]
    indices = TORCH_INDEX_BYTES * max(entries, default=0.0)
    given_back = received_bytes(low, bucket, rank) + own.buffer_bytes
    events = [Event(0, indices, "temporaries"), Event(1, -indices, "temporaries")]
    need = footprint([*events, Event(2, -given_back, "communication")])
    put_s = costs.scatter_time_s(low.device(rank), received=sum(entries)) if entries else 0.0
    return Task(f"put publish bucket {bucket.index}", "compression", duration_s=put_s, need=need)


def _others(low: Lowering, bucket: Bucket, rank: int) -> list[Message]:
    own = low.node(rank)
    return [each for node, each in enumerate(_messages(low, bucket, low.place(rank))) if node != own]


def published_density(low: Lowering) -> float:
    """Return the fraction of their elements that all owners publish in this step."""
    found = [m for bucket in low.buckets for place in range(low.places) for m in _messages(low, bucket, place)]
    elements = sum(message.elements for message in found)
    return sum(message.entries for message in found) / elements if elements else 0.0
