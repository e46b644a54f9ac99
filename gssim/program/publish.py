"""Gradient Sharding: updated parameters on their way back from the owners to every replica.

[Note: publish beside the forward] Where publishing overlaps, a step begins with it: the parameters that the step before
updated are sent bucket by bucket, last bucket first, as gradients are complete from the last layer on, and the first
layer of the forward to read a bucket waits for it. A GPU does all of that in a stream beside its compute's, by rings as
ever. On a CPU there is none: messages are posted and left to gloo's threads, and as nobody passes on what is to go on
by itself, every owner sends its own to everybody; what was packed is put where it belongs when it is waited for.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gssim import collectives
from gssim.collectives import Communication
from gssim.memory import Event, footprint
from gssim.program.bucket import Bucket
from gssim.program.lowering import Lowering
from gssim.program.messages import to_everybody
from gssim.program.published import message_bytes, prepared, put, received_bytes
from gssim.program.push import across
from gssim.program.sharded import inserted
from gssim.program.slices import phase_label
from gssim.program.task import Task


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
