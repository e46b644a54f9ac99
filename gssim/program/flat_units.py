"""Gradient Sharding with parameters sharded at rest: flat units gathered just in time, whose gradients are pushed.

[Note: flat units] The units are FSDP2's: a block, or everything outside blocks (the root); see `sharded`. Each is one
flat tensor, cut by the ranks' shard sizes without padding, and gathered into a flat buffer of which its parameters are
views. A shard is kept in the optimizer's precision only, and cast as it is copied into that buffer. The root stays
gathered from forward to backward, and so do blocks where the plan says so; otherwise a block is freed after its forward
and gathered again. Once a unit's backward is done, its gradients are collected in one bucket, which is pushed to the
owners. The root's bucket is pushed last, even where it is complete long before (where nothing below the blocks is
trained). Nothing is published, since the next gather distributes the updated parameters. Parameters that are not
trained have no owner, and are whole on every rank. Where collectives overlap with compute, the gather of a unit is
issued when the unit before it is consumed, so that at most two blocks are gathered at a time; otherwise just before its
use. Experts that ranks divide are a unit of their own in each block, owned by the ranks that hold the same experts.
This unit is gathered after the rest of the block; it is freed and pushed as soon as its gradients are complete, inside
the block's backward. A rank that alone holds experts keeps them whole. Of N elements a rank owns the fraction s; p is
the bytes of a value, w(d) those of a pushed one. Bytes per rank:

    sent and received:  2pN + w(d)N, each (M-1)/M with even shares, but for the root, which is gathered once
    held:               (parameter + optimizer state + gradient) * sN in the optimizer's precision, and the root and
                        two blocks gathered

[Note: flat units in stages] In a pipeline, too, every forward and every backward of a micro-batch gathers each block
and frees it. The root stays gathered from a forward to the next backward of the stage, of whichever micro-batch, and is
freed once that backward has its gradients. A forward after it gathers the root again; so does a backward that follows
another backward, by the hook on the stage's output. Blocks that stay gathered until the backward are as the root.
Gradients are added up, and pushed in the last backward.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gssim import cost
from gssim.collectives import Communication
from gssim.memory import Event, footprint
from gssim.program.compute import BackwardParts, backward_begin, beside_host, forward_id, pass_ends
from gssim.program.lowering import Lowering, once_a_run
from gssim.program.push import push_group_collective, send_buckets
from gssim.program.sharded import Gathered, gather_id, insert_beside
from gssim.program.task import Bucket, MicroBatch, Task, TaskId, collective_task
from gssim.workload import LayerInstance


@dataclass(frozen=True)
class FlatUnit:
    """Layers whose parameters are one flat tensor, and whose gradients are pushed in one bucket."""

    name: str
    layers: tuple[LayerInstance, ...]
    bucket: Bucket
    size_bytes: float
    """Size of all its parameters."""

    def __hash__(self) -> int:
        """Return equal hashes for equal units: units are parts of keys, and hashing all of their layers takes long."""
        return hash(self.name)

    @property
    def is_root(self) -> bool:
        """Whether it consists of the layers outside blocks."""
        return not self.layers[0].layer.block


@once_a_run
def flat_units(low: Lowering) -> tuple[FlatUnit, ...]:
    """Return the units in the order in which gradients are complete: each block from the last on, then the root."""
    flat = []
    root = tuple(instance for instance in low.layers if not instance.layer.block)
    for bucket in low.buckets:
        first = bucket.members[0][0]
        layers = (first,) if first.layer.block else root
        name = first.module if first.layer.block else "root"
        name += " (experts)" if bucket.of_experts else ""
        flat.append(FlatUnit(name, layers, bucket, float(bucket.elements * low.value_bytes)))
    return tuple(flat)


# Gradients -----------------------------------------------------------------------------------------------------------


def push_units(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """Pass of GS with sharded parameters: after each unit's backward, free parameters, collect and push gradients."""
    after_task: dict[TaskId, list[Task]] = defaultdict(list)
    end: list[Task] = []
    draining: list[Task] = []
    ends = pass_ends(tasks, "backward")
    trained = [instance for instance in low.layers if instance.layer.parameters]
    last = next((instance for instance in trained if not instance.layer.block), None)
    lowest = last if last is not trained[0] else None
    parts = BackwardParts(tasks)
    sent = send_buckets(low, rank, micro_batch) if micro_batch.sends_gradients else []
    for unit in flat_units(low):
        collect = _end_of_backward(low, low.device_type(rank), unit, leaves=micro_batch.sends_gradients)
        new = [collect]
        of_experts = unit.bucket.of_experts
        if lowest is not None and unit.is_root and not of_experts:  # its last gradient comes before those of the blocks
            after_task[ends[lowest.module]] = new
            new = []
        if micro_batch.sends_gradients:
            _, push, drain = sent[unit.bucket.index]
            new = [*new, *draining, *push]  # gradients are collected while the push before may still be in flight
            draining = drain
        if unit.bucket.of_experts:  # pushed inside the backward of its block
            after_task[parts.tasks[parts.at(low, unit.bucket.complete)].id] += new
        elif unit.is_root:
            end = new
        else:
            after_task[ends[unit.layers[0].module]] += new
    return [*insert_beside(tasks, before={}, behind=after_task), *end, *draining]


@once_a_run
def _end_of_backward(low: Lowering, device_type: str, unit: FlatUnit, *, leaves: bool) -> Task:
    """Return the end of a unit's backward: parameters are freed; gradients to be sent are copied into a bucket."""
    gathered = unit.size_bytes if low.owning(unit.bucket).nodes > 1 else 0.0
    events = [Event(0, -gathered, "gathered_parameters")]
    if not leaves:
        return Task(TaskId("free", layer=unit.name, during="backward"), "backward", need=footprint(events))
    tensors = tuple(float(parameter.elements * low.value_bytes) for _, parameter in unit.bucket.members)
    events += [Event(1, unit.size_bytes, "buckets"), Event(2, -unit.size_bytes, "gradients", tensors)]
    device = low.scenario.cluster.device_types[device_type]
    copy_s = cost.copy_time_s(device, unit.size_bytes)
    collect = TaskId("collect", bucket=unit.bucket.index)
    host_s = cost.unit_host_s(device.flat_unit, phase="b", tensors=len(unit.bucket.members))
    return Task(collect, "backward", need=footprint(events), **beside_host(low, device, device_s=copy_s, host_s=host_s))


# Parameters ----------------------------------------------------------------------------------------------------------


Use = tuple[FlatUnit, TaskId]
"""A unit, and the task that needs its gathered parameters."""


def gather_flat_parameters(
    low: Lowering, rank: int, tasks: list[Task], *, twice: bool, gathered: Gathered | None = None
) -> list[Task]:
    """Pass of GS with sharded parameters: gather each unit before its first forward, and keep it for the backward; or,
    if `twice`, free each block after its forward and gather it again for its backward.

    `gathered`: in a pipeline's stage, the units that are gathered when the forward, or the backward, begins.
    """
    ends = pass_ends(tasks, "forward")
    block_ends = tuple(ends[unit.layers[0].module] for unit in _gathered_units(low) if not unit.is_root)
    before, behind = _gathers(low, rank, block_ends, twice=twice, gathered=gathered)
    return insert_beside(tasks, before=before, behind=behind)


@once_a_run
def _gathered_units(low: Lowering) -> Sequence[FlatUnit]:
    """Return the units that are gathered: a rank keeps what it owns whole."""
    return [unit for unit in flat_units(low) if low.owning(unit.bucket).nodes > 1]


@once_a_run
def _gathers(
    low: Lowering, rank: int, block_ends: Sequence[TaskId], *, twice: bool, gathered: Gathered | None
) -> tuple[dict[TaskId, list[Task]], dict[TaskId, list[Task]]]:
    """Return what `gather_flat_parameters` inserts before and after tasks: the same in all steps, under all thresholds.

    `block_ends`: the last task of the forward of each block that is gathered.
    """
    units = _gathered_units(low)
    if not units:
        return {}, {}
    now = gathered or Gathered()
    root, blocks = [u for u in units if u.is_root], [u for u in units if not u.is_root]
    first = forward_id(low.layers[0])
    uses = [] if now.root else [(unit, first) for unit in reversed(root)]
    uses += [] if now.before_forward else [(block, forward_id(block.layers[0])) for block in reversed(blocks)]
    before = _just_in_time(low, rank, uses, "forward", first)
    behind: dict[TaskId, list[Task]] = defaultdict(list)
    has_loss = not low.stages or low.stages[0].after is None
    # the root's hook is on the input of the loss, or on the output of a stage
    issuer = backward_begin(low, low.layers[-2] if root and has_loss else low.layers[-1])
    again = [] if gathered is None or now.root else [(unit, issuer) for unit in root]
    of_blocks = [(block, backward_begin(low, block.layers[0])) for block in blocks]
    if not (twice or (gathered is not None and not now.before_backward)):
        of_blocks = []
    ends_in_block = blocks and blocks[0].layers[0].index == len(low.layers) - 1
    # a stage's output that is a block's has the block's hook first
    uses = [*of_blocks[:1], *again, *of_blocks[1:]] if ends_in_block else [*again, *of_blocks]
    for use, new in _just_in_time(low, rank, uses, "backward", issuer).items():
        before[use] += new
    if twice:
        for block, end in zip(blocks, block_ends, strict=True):
            freed = footprint([Event(0, -block.size_bytes, "gathered_parameters")])
            behind[end].append(Task(TaskId("free", layer=block.name), "forward", need=freed))
    return before, behind


def _just_in_time(low: Lowering, rank: int, uses: Sequence[Use], phase: str, begin: TaskId) -> dict[TaskId, list[Task]]:
    """Return the gathers of units, keyed by the task before which each is issued; `begin` is the phase's first task.

    Where collectives overlap, the first gather is issued at `begin`, and each later one when the unit before it is
    consumed.
    """
    before: dict[TaskId, list[Task]] = defaultdict(list)
    for number, (unit, use) in enumerate(uses):
        owners = low.owning(unit.bucket)
        owned = owners.pushed_elements(unit.bucket, rank)
        gather = _gather(low, low.device_type(rank), unit, phase, owners.place(rank), owned)
        if not low.overlaps:
            before[use] += gather
            continue
        before[uses[number - 1][1] if number else begin] += gather
        before[use].append(Task(gather[-1].id.serving("take"), phase, after=(gather[-1].id,)))
    return before


@once_a_run
def _gather(low: Lowering, device_type: str, unit: FlatUnit, phase: str, place: int, owned: int) -> list[Task]:
    """Return the tasks that gather a unit on the rank at `place` among its owners, which owns `owned` of its elements.

    The rank casts its shard into a new flat buffer; all shards are all-gathered.
    """
    own, device = gather_id(unit.name, phase), low.scenario.cluster.device_types[device_type]
    communication, exchange = _all_gather(low.owning(unit.bucket), unit, phase, place)
    moved_bytes = owned * (low.master_bytes + low.value_bytes) / 2  # one read, the other written
    copy_s = cost.copy_time_s(device, moved_bytes)
    need = footprint([Event(0, unit.size_bytes, "gathered_parameters")])
    host_s = cost.unit_host_s(device.flat_unit, phase="f", tensors=len(unit.bucket.members))
    host_s = host_s if phase == "forward" else 0.0  # the backward's profile already includes its own gather
    issue = Task(own.serving("issue"), phase, need=need, **beside_host(low, device, device_s=copy_s, host_s=host_s))
    if not low.overlaps:
        return [issue, collective_task(own, exchange, communication=communication)]
    return [
        issue,
        collective_task(own, exchange, "communication", communication=communication, after=(issue.id,)),
    ]


@once_a_run
def _all_gather(owners: Lowering, unit: FlatUnit, phase: str, place: int) -> tuple[TaskId, Communication]:
    """Return the all-gather of a unit by its owners at a place; and its identity."""
    parts = tuple(float(n * owners.value_bytes) for n in owners.division(unit.bucket).owned[place])
    own, rank = gather_id(unit.name, phase), owners.group[place]
    return push_group_collective(owners, unit.bucket, rank, own, "all-gather-v", unit.size_bytes, part_bytes=parts)
