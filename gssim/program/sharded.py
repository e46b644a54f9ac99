"""FSDP2's units: parameters gathered, gradients reduce-scattered.

[Note: order] What FSDP2 does for a unit hangs on hooks, so its order is that of torch 2.13's source, folder
torch/distributed/fsdp/_fully_shard. Forward: the root is gathered first, each block before its own forward. Backward,
where blocks were freed after their forward: the hook on a unit's output takes the gathered parameters, then issues the
gather of the unit that comes next (FSDPParamGroup.pre_backward, _backward_prefetch); the root's own hook, on the
logits, issues the last block's. The root is kept from forward to backward (FSDPState._lazy_init), and its gradients
come last, from the callback at the end of the backward.

[Note: replicas] On a mesh of two axes (HSDP), a unit's shards of gradients, once reduce-scattered over `dp_shard`, are
all-reduced over `dp_replicate` (_fsdp_collectives.foreach_reduce). What is all-reduced stays until the callback at the
end of the backward (FSDPParamGroup._all_reduce_state, finalize_backward): the first micro-batch keeps it as gradient
anyway, those of later ones are added to that and stay beside it, and so does what is then cast to another precision. On
nccl the all-reduces have a communicator and a stream of their own; nothing waits for them but that callback.

[Note: streams] On nccl, collectives run beside the compute, in the order in which the host issues them: gathers and
reduce-scatters share one communicator, which runs one at a time. Events hold them back as in wait_for_unshard and
post_backward: a gather waits until the parameters of the unit before the last have been copied out (so at most two
flat buffers live), a reduce-scatter until its gradients are copied in, and the next copy-in until it is over. The host
is taken to run ahead of the device. Memory is booked on the compute stream, where the host takes and returns it: that
is the order in which torch.cuda.max_memory_allocated counts. FSDP2 on a CPU blocks in every collective.

FSDP2's units: layers that are gathered and reduced together, and how their parameters are cut among the ranks.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gssim import collectives, cost
from gssim.collectives import Communication
from gssim.memory import NOTHING, Event, Footprint, footprint
from gssim.program.compute import backward_begin, backward_label
from gssim.program.lowering import Lowering
from gssim.program.task import MicroBatch, Task
from gssim.workload import LayerInstance, Parameter


@dataclass(frozen=True)
class Tensors:
    """The parameters of a unit, and how they are cut among the ranks; repeated blocks share one."""

    parameters: tuple[Parameter, ...]
    ranks: int
    value_bytes: int
    master_bytes: int
    """Bytes of an element of a shard: FSDP2 keeps it, and its gradient, in the precision of the optimizer."""

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(Rows, elements of a row) of each parameter; a scalar has one row."""
        rows = [parameter.shape[0] if parameter.shape else 1 for parameter in self.parameters]
        return tuple((n, parameter.elements // n) for n, parameter in zip(rows, self.parameters, strict=True))

    @cached_property
    def shard_elements(self) -> tuple[int, ...]:
        """Elements of each parameter on one rank, padding included (torch.chunk on dim 0)."""
        return tuple(math.ceil(rows / self.ranks) * each for rows, each in self.rows)

    @cached_property
    def padded_bytes(self) -> int:
        """Bytes of the gathered parameters: each padded in its first dimension to a multiple of the ranks."""
        return self.ranks * sum(self.shard_elements) * self.value_bytes

    @cached_property
    def padded_tensors(self) -> tuple[float, ...]:
        """The same of each of them."""
        return tuple(float(self.ranks * elements * self.value_bytes) for elements in self.shard_elements)

    @cached_property
    def gradient_tensors(self) -> tuple[float, ...]:
        """Bytes of each unsharded gradient."""
        return tuple(float(rows * each * self.value_bytes) for rows, each in self.rows)

    @cached_property
    def uneven_bytes(self) -> int:
        """Bytes of those of the gathered parameters that have padding."""
        pairs = zip(self.rows, self.shard_elements, strict=True)
        return self.ranks * sum(elements for (rows, _), elements in pairs if rows % self.ranks) * self.value_bytes

    @cached_property
    def shard_bytes(self) -> int:
        """Bytes of the parameters, or of their gradients, that one rank keeps, padding included."""
        return sum(self.shard_elements) * self.master_bytes

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients."""
        return sum(rows * each for rows, each in self.rows) * self.value_bytes

    def own_elements(self, position: int) -> tuple[int, ...]:
        """Return elements of each parameter on the group's rank at `position`, padding left out."""
        found = []
        for rows, each in self.rows:
            chunk = math.ceil(rows / self.ranks)
            found.append(max(0, min(chunk, rows - position * chunk)) * each)
        return tuple(found)


@dataclass(frozen=True)
class Unit:
    """Layers that FSDP2 shards together: a block, or all that is no block (the root)."""

    name: str
    layers: tuple[LayerInstance, ...]
    tensors: Tensors

    @property
    def ranks(self) -> int:
        """Number of ranks that share the unit."""
        return self.tensors.ranks

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the unit."""
        return self.tensors.parameters

    @property
    def shard_elements(self) -> tuple[int, ...]:
        """Elements of each parameter on one rank, padding included."""
        return self.tensors.shard_elements

    def gathered(self, position: int, *, sign: int) -> Event:
        """Return where the parameters that were copied out of a gather are taken (`sign` 1), or given back (-1)."""
        return Event(position, sign * self.padded_bytes, "gathered_parameters", self.tensors.padded_tensors)

    @property
    def padded_bytes(self) -> int:
        """Bytes of the gathered parameters, padding included."""
        return self.tensors.padded_bytes

    @property
    def uneven_bytes(self) -> int:
        """Bytes of those of the gathered parameters that have padding."""
        return self.tensors.uneven_bytes

    @property
    def flat_bytes(self) -> int:
        """Bytes of the buffer into which the unit is gathered; a rank alone copies its parameters without one."""
        return self.padded_bytes if self.ranks > 1 else 0

    @property
    def shard_bytes(self) -> int:
        """Bytes of the parameters, or of their gradients, that one rank keeps."""
        return self.tensors.shard_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's part of what travels."""
        return self.padded_bytes // self.ranks

    @property
    def casts(self) -> bool:
        """Whether what travels is of another precision than what is kept."""
        return self.tensors.value_bytes != self.tensors.master_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients."""
        return self.tensors.gradient_bytes

    def own_elements(self, position: int) -> tuple[int, ...]:
        """Return elements of each parameter on the group's rank at `position`, padding left out."""
        return self.tensors.own_elements(position)

    @property
    def is_root(self) -> bool:
        """Whether this is what no block holds."""
        return not self.layers[0].layer.block


def units(low: Lowering) -> tuple[Unit, ...]:
    """Return FSDP2's units in the order in which they are gathered: the root first, then each block."""
    ranks, sizes = low.shards, (low.value_bytes, low.master_bytes)
    root = tuple(instance for instance in low.layers if not instance.layer.block)
    whole = tuple(parameter for instance in root for parameter in instance.layer.parameters)
    found = [Unit("root", root, Tensors(whole, ranks, *sizes))] if whole else []
    repeated: dict[int, Tensors] = {}
    for instance in low.layers:
        layer = instance.layer
        if layer.block and layer.parameters:
            if id(layer) not in repeated:
                repeated[id(layer)] = Tensors(layer.parameters, ranks, *sizes)
            found.append(Unit(instance.module, (instance,), repeated[id(layer)]))
    return tuple(found)


def owned_rows(low: Lowering, rank: int) -> list[int]:
    """Return the elements that `rank` keeps of each parameter, in the model's order, which is the optimizer's."""
    position = low.shard_position(rank)
    key = ("owned rows", position)
    if key not in low.found:
        own: dict[int, int] = {}
        for unit in units(low):
            own |= zip(map(id, unit.parameters), unit.own_elements(position), strict=True)
        low.found[key] = [own[id(parameter)] for _, parameter in low.parameters]
    found: list[int] = low.found[key]
    return found


GATHER, REDUCE = "all-gather", "reduce-scatter"
"""The streams on which FSDP2 takes the memory that a unit is gathered into, and that of its reduced gradients.
(foreach_all_gather, foreach_reduce; all else is taken on the stream that computes.)"""
STAGED = 1
"""What a collective copies, told by this number from its tensors, which may be as large."""

Places = Mapping[str, Sequence[Task]]
"""Tasks to insert, by the label of the task that they stand beside."""


def inserted(tasks: Sequence[Task], *, before: Places, behind: Places) -> list[Task]:
    """Return `tasks` with those of `before` and `behind` beside the tasks that they name."""
    found: list[Task] = []
    for task in tasks:
        found.extend(before.get(task.label, ()))
        found.append(task)
        found.extend(behind.get(task.label, ()))
    return found


@lru_cache(maxsize=1024)
def _need(*events: Event) -> Footprint:
    """Return the footprint of events; repeated blocks ask for the same one."""
    return footprint(events)


def _exchange(low: Lowering, kind: str, size_bytes: float) -> Communication:
    """Return a collective of those that share a unit, by the backend or by a ring of point-to-point messages."""
    carried_as = f"{kind}-v" if low.policies.point_to_point else ""
    return low.communication(kind, "dp_shard", size_bytes, carried_as=carried_as)


def _staging(low: Lowering, rank: int, communication: Communication, position: int) -> list[Event]:
    """Return what is held beside its tensors while a collective runs, on its stream, from `position` on."""
    kind, stream = low.device(rank).kind, communication.kind
    size = collectives.staging_bytes(communication, low.scenario.cluster.backend, kind=kind)
    changes = enumerate((size, -size), start=position)
    return [Event(place, each, "communication", number=STAGED, stream=stream) for place, each in changes]


# Gradients -----------------------------------------------------------------------------------------------------------


def reduce_scatter_gradients(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """FSDP2 on a unit's last gradient: parameters freed, gradients copied into one buffer, that reduce-scattered.

    The buffer of one unit is held until the next unit's backward is done (comm_ctx.reduce_scatter_states). Where
    gradients do not leave yet, the parameters are freed all the same (FSDPParamGroup.post_backward). Then, where there
    are replicas, what was scattered is all-reduced; see [Note: replicas].
    """
    behind: dict[str, list[Task]] = defaultdict(list)
    before: Unit | None = None
    end: list[Task] = []
    for unit in sorted(units(low), key=lambda unit: (unit.is_root, -unit.layers[0].index)):
        new = _reduce_scatter(low, rank, unit, before, micro_batch) if micro_batch.leaves else [_reshard(unit)]
        if unit.is_root:
            end = new
        else:
            behind[backward_label(unit.layers[0], 0)] = new
        before = unit
    return [*inserted(tasks, before={}, behind=behind), *end, _callback(low, before, micro_batch)]


def _callback(low: Lowering, last: Unit | None, micro_batch: MicroBatch) -> Task:
    """Return the end of the backward: the last unit's collectives are waited for, and all buffers are given back."""
    if last is None or not micro_batch.leaves:
        return Task("backward callback", "backward")
    events = [Event(0, -last.padded_bytes, "communication")]
    if low.replicates:
        events += [_all_reduced_freed(unit, micro_batch) for unit in units(low)]
    names = [_reduce_name(last)] if last.ranks > 1 else []
    names += [_all_reduce_name(last)] if low.replicates else []
    return Task("backward callback", "backward", after=tuple(names) if low.overlaps else (), need=_need(*events))


def _all_reduced_freed(unit: Unit, micro_batch: MicroBatch) -> Event:
    """Return the end of what was all-reduced of a unit; a cast has its gradient apart, else it may be that itself."""
    if unit.casts:
        return Event(0, -unit.chunk_bytes, "communication")
    return Event(0, -_added_bytes(unit, micro_batch), "gradients")


def _added_bytes(unit: Unit, micro_batch: MicroBatch) -> float:
    """Return the bytes of a unit's gradients that are added to those of the micro-batches before."""
    return unit.shard_bytes if micro_batch.left and not micro_batch.first else 0


def _all_reduce_name(unit: Unit) -> str:
    return f"all-reduce {unit.name}"


def _reshard(unit: Unit) -> Task:
    """Return the freeing of a unit's parameters after its backward."""
    return Task(f"free {unit.name} backward", "backward", need=_need(unit.gathered(0, sign=-1)))


def _reduce_name(unit: Unit) -> str:
    return f"reduce-scatter {unit.name}"


def _reduce_scatter(low: Lowering, rank: int, unit: Unit, before: Unit | None, micro_batch: MicroBatch) -> list[Task]:
    """Return what happens once a unit's gradients are all there; `before` is the unit whose turn came before it.

    The sum of the shard's gradients is kept; in later micro-batches it is added to what is there, and given back: at
    once, or where it is what was all-reduced by the callback at the end of the backward.
    """
    name, overlaps = _reduce_name(unit), low.overlaps
    stays = low.replicates and not unit.casts
    added = Event(7, 0 if stays else -_added_bytes(unit, micro_batch), "gradients")
    copy = Task(
        f"copy in {name}",
        "backward",
        duration_s=cost.sharded_unit_time_s(
            low.device(rank), phase="b", tensors=len(unit.parameters), copied_bytes=unit.padded_bytes
        ),
        after=(_reduce_name(before),) if before and overlaps and unit.ranks > 1 else (),
        need=_need(
            unit.gathered(0, sign=-1),
            Event(1, -before.padded_bytes if before else 0, "communication"),
            Event(2, unit.padded_bytes, "communication"),
            *_padding(low, rank, unit, position=3),
            Event(5, -unit.gradient_bytes, "gradients", unit.tensors.gradient_tensors),
            Event(6, unit.chunk_bytes, "communication" if unit.casts else "gradients", stream=REDUCE),
            *([added] if (overlaps or unit.ranks == 1) and not unit.casts else []),
        ),
    )
    tasks = [copy]
    if unit.ranks > 1:
        communication = low.communications[name] = _exchange(low, "reduce-scatter", unit.padded_bytes)
        need = NOTHING if overlaps else _need(*_staging(low, rank, communication, 0), *([] if unit.casts else [added]))
        tasks.append(_beside(name, copy.label, "communication", need) if overlaps else _blocking(name, need))
    if low.replicates:
        all_reduce, before_it = _all_reduce_name(unit), tasks[-1].label
        low.communications[all_reduce] = low.communication("all-reduce", "dp_replicate", unit.chunk_bytes)
        beside = _beside(all_reduce, before_it, "replication", NOTHING)
        tasks.append(beside if overlaps else _blocking(all_reduce, NOTHING))
    return [*tasks, *_cast(low, rank, unit, f"cast {name}", added)]


def _padding(low: Lowering, rank: int, unit: Unit, *, position: int) -> list[Event]:
    """Return the padded copies that a CPU makes of gradients as it copies them in; a CUDA kernel pads as it goes.

    Source: torch 2.13, aten/src/ATen/native/TensorShape.cpp, _chunk_cat and _pad_chunk; they are all made first.
    """
    size = unit.uneven_bytes if low.device(rank).kind == "cpu" else 0
    return [Event(position, size, "temporaries"), Event(position + 1, -size, "temporaries")]


def _beside(name: str, after: str, stream: str, need: Footprint) -> Task:
    """Return a collective that runs beside the compute."""
    return Task(name, "exposed_communication", stream, communication=name, after=(after,), need=need)


def _blocking(name: str, need: Footprint) -> Task:
    """Return a collective that blocks the compute."""
    return Task(name, "exposed_communication", communication=name, need=need)


def _cast(low: Lowering, rank: int, unit: Unit, name: str, added: Event) -> list[Task]:
    """Return the cast of what was reduced to the precision of the shard (foreach_reduce), if it is another.

    Where collectives overlap, it runs behind the collective and beside the compute, but its memory is taken, and the
    reduced gradients' given back, when the host issues both. `added`: where it is added to what is there.
    """
    if not unit.casts:
        return []
    freed = [] if low.replicates else [Event(1, -unit.chunk_bytes, "communication")]
    need = _need(Event(0, unit.shard_bytes, "gradients", stream=REDUCE), *freed, added)
    duration_s = cost.master_copy_time_s(
        low.device(rank), low.scenario.workload, elements=sum(unit.shard_elements), tensors=1, casts=1
    )
    if not low.overlaps:
        return [Task(name, "backward", duration_s=duration_s, need=need)]
    stream = "replication" if low.replicates else "communication"
    return [Task(f"issue {name}", "backward", need=need), Task(name, "backward", stream, duration_s=duration_s)]


# Parameters ----------------------------------------------------------------------------------------------------------


def keep_parameters(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """Leave the tasks as they are: every rank holds all parameters."""
    return tasks


def gather_parameters(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """FSDP2 with reshard_after_forward=False: each unit is gathered before its first forward and kept."""
    before = _gather_forward(low, rank)
    return inserted(_begun(low, tasks), before=before, behind={})


def gather_parameters_twice(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """FSDP2 with its default reshard_after_forward: each block is freed after its forward, and gathered once more."""
    before = {**_gather_forward(low, rank), **_gather_backward(low, rank)}
    behind = {
        f"forward {unit.layers[0].module}": [
            Task(f"free {unit.name}", "forward", need=_need(unit.gathered(0, sign=-1)))
        ]
        for unit in units(low)
        if not unit.is_root
    }
    return inserted(_begun(low, tasks), before=before, behind=behind)


FORWARD_BEGIN = "forward begin"


def _begun(low: Lowering, tasks: Sequence[Task]) -> list[Task]:
    """Return tasks with a mark of the step's beginning, where other streams must wait for it."""
    return [Task(FORWARD_BEGIN, "forward"), *tasks] if low.overlaps else list(tasks)


def _gather_name(unit: Unit, phase: str) -> str:
    return f"all-gather {unit.name}" + (" backward" if phase == "backward" else "")


def _gather(low: Lowering, rank: int, unit: Unit, phase: str, after: tuple[str, ...]) -> list[Task]:
    """Return the gather of a unit into a flat buffer that it leaves behind; `after` is what it waits for on nccl.

    A shard of another precision is first cast, to a copy that is held until the gather is done (on nccl: issued).
    """
    if unit.ranks == 1:
        return []
    name = _gather_name(unit, phase)
    communication = low.communications[name] = _exchange(low, "all-gather", unit.padded_bytes)
    copy_bytes = unit.chunk_bytes if unit.casts else 0
    flat = [Event(i, size, "communication", stream=GATHER) for i, size in enumerate((copy_bytes, unit.flat_bytes))]
    cast_s = cost.master_copy_time_s(
        low.device(rank), low.scenario.workload, elements=sum(unit.shard_elements), tensors=1, casts=1
    )
    if low.overlaps:
        issued = _need(*flat, Event(2, -copy_bytes, "communication"))
        cast = [Task(f"cast {name}", phase, "communication", duration_s=cast_s, after=after)] if unit.casts else []
        gather = Task(name, "exposed_communication", "communication", communication=name, after=after)
        return [Task(f"issue {name}", phase, need=issued), *cast, gather]
    need = _need(*flat, *_staging(low, rank, communication, 2), Event(3, -copy_bytes, "communication"))
    tasks = [Task(f"cast {name}", phase, duration_s=cast_s)] if unit.casts else []
    return [*tasks, Task(name, "exposed_communication", communication=name, need=need)]


def _copy_out(low: Lowering, rank: int, unit: Unit, phase: str, freed_bytes: int) -> Task:
    """Return the copy of a unit's parameters out of its flat buffer; then a buffer of `freed_bytes` is given back."""
    name = _gather_name(unit, phase)
    return Task(
        f"copy out {name}",
        phase,
        duration_s=cost.sharded_unit_time_s(
            low.device(rank), phase="f", tensors=len(unit.parameters), copied_bytes=unit.padded_bytes
        ),
        after=(name,) if low.overlaps and unit.ranks > 1 else (),
        need=_need(
            unit.gathered(0, sign=1),
            *_alone(unit),
            Event(2, -freed_bytes, "communication"),
        ),
    )


def _alone(unit: Unit) -> list[Event]:
    """Return what a rank alone holds while it copies parameters of another precision: its last one's cast."""
    size = unit.shard_elements[-1] * unit.tensors.value_bytes if unit.ranks == 1 and unit.casts else 0
    return [Event(0, size, "communication"), Event(1, -size, "communication")]


def _gather_forward(low: Lowering, rank: int) -> dict[str, list[Task]]:
    """Return each unit's gather, by the forward that it comes before.

    A flat buffer is held until the next unit's copy-out is done (comm_ctx.all_gather_state; wait_for_unshard drops it
    before that copy, but its own variable prev_all_gather_state lives on), or the forward is.
    """
    before: dict[str, list[Task]] = defaultdict(list)
    found = units(low)
    held = 0
    for number, unit in enumerate(found):
        after = (f"copy out {_gather_name(found[number - 2], 'forward')}",) if number > 1 else ()
        copy = _copy_out(low, rank, unit, "forward", held)
        first = low.layers[0] if unit.is_root else unit.layers[0]
        start = () if number else (FORWARD_BEGIN,)
        before[f"forward {first.module}"] += [*_gather(low, rank, unit, "forward", after or start), copy]
        held = unit.flat_bytes
    end = Task("forward end", "forward", need=_need(Event(0, -held, "communication")))
    before[f"forward {low.layers[-1].module}"].append(end)
    return before


def _gather_backward(low: Lowering, rank: int) -> dict[str, list[Task]]:
    """Return each block's second gather, by the backward that it comes before; see [Note: order].

    A checkpointed block is run again inside its backward, beneath FSDP2's hooks: nothing is gathered for that.
    """
    before: dict[str, list[Task]] = defaultdict(list)
    found = units(low)
    blocks = [unit for unit in reversed(found) if not unit.is_root]
    if not blocks:
        return before
    last_copy = (f"copy out {_gather_name(blocks[0], 'forward')}",)
    issuer = low.layers[-2] if found[0].is_root else blocks[0].layers[0]
    before[backward_begin(low, issuer)] += _gather(low, rank, blocks[0], "backward", last_copy)
    for number, unit in enumerate(blocks):
        copy = _copy_out(low, rank, unit, "backward", unit.flat_bytes)
        new = [copy]
        if number + 1 < len(blocks):
            new += _gather(low, rank, blocks[number + 1], "backward", (copy.label,))
        before[backward_begin(low, unit.layers[0])] += new
    return before
