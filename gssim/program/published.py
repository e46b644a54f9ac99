"""Gradient Sharding: what a threshold makes of the updated parameters that owners publish.

[Note: thresholded publish] An owner updates a master copy of its range, in any precision, and publishes what of it is
at least the threshold away from what it published last; the rest stays in that difference, and goes with a later step
(gradient-sharding A.3, step 5). First all buckets are thresholded and packed, then the ranks tell each other once how
many entries each sends of each bucket, then bucket after bucket goes round a ring: messages to everybody take as many
bytes by any way, but a ring loads no link with more than all messages but one, whatever the shares. What goes densely
is sent from the replica, and received in it. With two levels the threshold is for what goes across nodes; in the node
everything goes densely, as links there are fast.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gssim import costs, density, encodings
from gssim.cluster import DeviceType
from gssim.collectives import summed_without
from gssim.memory import Event, footprint
from gssim.plan import absolute_threshold
from gssim.program.bucket import Bucket
from gssim.program.lowering import Lowering
from gssim.program.messages import MOST_DENSITIES, Piece, pieces_of
from gssim.program.push import COUNT_BYTES
from gssim.program.task import Task
from gssim.shared import Same

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


def _message(low: Lowering, pieces: Sequence[Piece], ratios: Mapping[str, density.Ratios] | None) -> Message:
    """Return the message of an owner of some pieces; `ratios`: what of them is published, absent: all."""
    elements = sum(piece[0] for piece in pieces)
    entries = sum(n * ratios[tensor].over(begin, end) if ratios else n for n, tensor, begin, end in pieces)
    sizes = {"entries": entries, "elements": float(elements)}
    kind = encodings.chosen(low.scenario.plan.publish.encoding, **sizes, value_bytes=low.value_bytes)
    size = encodings.message_bytes(kind, **sizes, value_bytes=low.value_bytes)
    return Message(elements, entries, size, kind)


def _ratios(low: Lowering) -> Mapping[str, density.Ratios]:
    """Return what is published of each tensor in this step."""
    statistics, workload = low.statistics, low.scenario.workload
    assert statistics is not None  # loading demands them
    threshold = absolute_threshold(low.scenario.plan.publish, workload.learning_rate)
    rules = replace(low.scenario.plan.publish, kind="absolute", threshold=threshold)

    def found() -> Mapping[str, density.Ratios]:
        names = {p.name.replace("{}", instance.module) for instance, p in low.parameters}
        return {name: density.publish_ratios(statistics, rules, tensor=name, step=low.step) for name in names}

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
    duration_s = costs.copy_time_s(device, message.elements * (low.value_bytes + low.master_bytes))
    duration_s += costs.select_time_s(device, elements=message.elements, parts=1, value=low.value_bytes)
    if message.encoding != "dense":
        duration_s += costs.pack_time_s(
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
    return costs.unpack_time_s(
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
