"""What each rank does in one step, in order: tasks lowered from a scenario in passes, one pass per policy.

Tasks are known by their label, unique within a rank and the same as in a real run's trace. A task of the compute
stream runs after the one before it; `after` names tasks of other streams that it waits for as well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gssim import costs, density, shares
from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.gradients import GradientStatistics
from gssim.memory import (
    NOTHING,
    Event,
    Footprint,
    activation_timeline,
    bytes_of,
    footprint,
    gradient_events,
    input_bytes,
    optimizer_state_bytes,
    optimizer_temporary_bytes,
    scratch_bytes,
    with_scratch,
)
from gssim.plan import assign_buckets, bucket_limits
from gssim.scenario import Scenario, value_bytes
from gssim.workload import LayerInstance, Parameter, gradient_order, unrolled

COUNT_BYTES = 8
"""A thresholded push first tells each owner how many entries come, as one int64."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that a rank does: compute for `duration_s`, or take part in `communication`."""

    label: str
    phase: str
    stream: str = "compute"
    duration_s: float = 0.0
    communication: str | None = None
    after: tuple[str, ...] = ()
    need: Footprint = NOTHING


@dataclass(frozen=True)
class Program:
    """One step of every rank, the collectives that its tasks name, and what each rank holds all the time."""

    tasks: tuple[tuple[Task, ...], ...]
    communications: dict[str, Communication]
    persistent: tuple[dict[str, float], ...]
    push_density: float | None = None


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together, in the order in which they become ready."""

    index: int
    members: tuple[tuple[LayerInstance, Parameter], ...]

    @property
    def elements(self) -> int:
        """Number of gradient elements."""
        return sum(parameter.elements for _, parameter in self.members)

    def place(self, member: int) -> tuple[int, int]:
        """Return (layer, position) of the backward at which the given member is ready."""
        instance, parameter = self.members[member]
        return instance.index + parameter.ready.layer_offset, parameter.ready.position

    @property
    def complete(self) -> tuple[int, int]:
        """Where in the backward the last member is ready: (layer, position)."""
        return self.place(-1)

    @property
    def started(self) -> tuple[int, int]:
        """Where in the backward the first member is ready."""
        return self.place(0)


@dataclass(frozen=True)
class Lowering:
    """A scenario with what every pass needs of it, and the collectives found so far."""

    scenario: Scenario
    statistics: GradientStatistics | None
    step: int
    communications: dict[str, Communication] = field(default_factory=dict)

    @cached_property
    def layers(self) -> tuple[LayerInstance, ...]:
        """The unrolled model."""
        return unrolled(self.scenario.workload.model)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.scenario.ranks))

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return self.scenario.batch_sizes

    @cached_property
    def shard_shares(self) -> tuple[float, ...]:
        """Share of each rank in the sharded state."""
        return self.scenario.shard_shares

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of one element."""
        return value_bytes(self.scenario.workload)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Gradient buckets by PyTorch's rule, in the order in which they are complete."""
        order = gradient_order(self.layers)
        members = [(self.layers[i], self.layers[i].layer.parameters[j]) for i, j in order]
        first, cap = bucket_limits(self.scenario.plan, self.scenario.policies)
        sizes = [parameter.elements * self.value_bytes for _, parameter in members]
        found = assign_buckets(sizes, first_bytes=first, cap_bytes=cap)
        return tuple(Bucket(i, tuple(members[p] for p in positions)) for i, positions in enumerate(found))

    def device(self, rank: int) -> DeviceType:
        """Return the device type of a rank."""
        return self.scenario.cluster.type_of(rank)


def lower(scenario: Scenario, statistics: GradientStatistics | None = None, *, step: int = 0) -> Program:
    """Return the program of one training step; `step` (from the first) matters where the push is thresholded."""
    low = Lowering(scenario, statistics, step)
    policies = scenario.policies
    communicate: dict[str, Callable[[Lowering, int, list[Task]], list[Task]]] = {
        "local": _keep_gradients,
        "all-reduce": _all_reduce_gradients,
        "reduce-scatter": _reduce_scatter_gradients,
        "push": _push_gradients,
    }
    ranks = []
    for rank in low.group:
        tasks = _compute(low, rank, cuts=_cuts(low, policies.gradients))
        tasks = communicate[policies.gradients](low, rank, tasks)
        if policies.parameters == "gathered":
            tasks = _gather_parameters(low, rank, tasks)
        ranks.append(tuple(_optimize(low, rank, tasks)))
    return Program(
        tasks=tuple(ranks),
        communications=low.communications,
        persistent=tuple(_persistent(low, rank) for rank in low.group),
        push_density=_mean_density(low) if scenario.plan.push.threshold is not None else None,
    )


# Compute -------------------------------------------------------------------------------------------------------------


def _cuts(low: Lowering, gradients: str) -> dict[int, list[int]]:
    """Return positions at which a layer's backward is cut in parts: where a bucket becomes complete inside it."""
    cuts: dict[int, list[int]] = {}
    if gradients in ("all-reduce", "push"):
        for bucket in low.buckets:
            layer, position = bucket.complete
            cuts.setdefault(layer, []).append(position)
    return cuts


def backward_label(layer: LayerInstance, part: int) -> str:
    """Return the label of a part of a layer's backward; a layer that is not cut has part 0 alone."""
    return f"backward {layer.module}" + (f" part {part}" if part else "")


def _compute(low: Lowering, rank: int, *, cuts: dict[int, list[int]]) -> list[Task]:
    """Return the forward of every layer and the backward in reverse, with their memory."""
    policies = low.scenario.policies
    freed_when_ready = policies.gradients in ("all-reduce", "push")
    workload = low.scenario.workload
    samples = low.batch_sizes[rank]
    timeline = activation_timeline(low.layers, batch_size=samples, sequence_length=workload.sequence_length or 1)
    always_kept = gradient_events(low.layers, value_bytes=low.value_bytes, freed_when_ready=False)
    gradients = gradient_events(low.layers, value_bytes=low.value_bytes, freed_when_ready=freed_when_ready)
    hook_s = low.device(rank).gradient_hook_s if freed_when_ready else 0.0
    tasks = []
    for instance in low.layers:
        events = timeline.at(instance.index, "f")
        tasks.append(
            Task(
                f"forward {instance.module}",
                "forward",
                duration_s=_layer_s(low, rank, instance, "f"),
                need=with_scratch(footprint(events), _scratch(low, rank, instance, "f", events)),
            )
        )
    for instance in reversed(low.layers):
        place = (instance.index, "b")
        events = [*timeline.at(*place), *gradients.get(place, ())]
        scratch = _scratch(low, rank, instance, "b", [*timeline.at(*place), *always_kept.get(place, ())])
        duration_s = _layer_s(low, rank, instance, "b") + hook_s * len(instance.layer.parameters)
        tasks.extend(_parts(instance, events, scratch, duration_s, cuts.get(instance.index, [])))
    end = footprint(timeline.end)
    tasks.append(Task("backward end", "backward", need=end))
    return tasks


def _layer_s(low: Lowering, rank: int, instance: LayerInstance, phase: str) -> float:
    samples = low.batch_sizes[rank]
    return costs.layer_time_s(low.device(rank), low.scenario.workload, instance.layer, phase=phase, batch_size=samples)


def _scratch(low: Lowering, rank: int, instance: LayerInstance, phase: str, events: Sequence[Event]) -> float:
    workload, samples = low.scenario.workload, low.batch_sizes[rank]
    return scratch_bytes(low.device(rank), workload, instance, phase=phase, batch_size=samples, traced=events)


def _parts(
    instance: LayerInstance, events: Sequence[Event], scratch: float, duration_s: float, cuts: Sequence[int]
) -> list[Task]:
    """Return a layer's backward cut after the given positions; time is shared out by operations."""
    last = max((event.position for event in events), default=0)
    ends = sorted({min(cut, last) for cut in cuts} | {last})
    parts = []
    before = -1
    for part, end in enumerate(ends):
        inside = [event for event in events if before < event.position <= end]
        parts.append(
            Task(
                backward_label(instance, part),
                "backward",
                duration_s=duration_s * (end - before) / (last + 1),
                need=with_scratch(footprint(inside), scratch),
            )
        )
        before = end
    return parts


def _part_at(low: Lowering, tasks: Sequence[Task], place: tuple[int, int]) -> int:
    """Return the index of the task in which the backward reaches `place` (layer, position)."""
    layer, position = place
    instance = low.layers[layer]
    cuts = sorted({bucket.complete[1] for bucket in low.buckets if bucket.complete[0] == layer})
    part = sum(1 for cut in cuts if cut < position)
    labels = [task.label for task in tasks]
    while backward_label(instance, part) not in labels:
        part -= 1
    return labels.index(backward_label(instance, part))


def _insert_after(tasks: list[Task], index: int, new: Sequence[Task]) -> None:
    """Insert tasks after a part of the backward, and after what was inserted there before."""
    end = index + 1
    while end < len(tasks) and not tasks[end].label.startswith("backward "):
        end += 1
    tasks[end:end] = list(new)


# Gradients -----------------------------------------------------------------------------------------------------------


def _keep_gradients(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    return tasks


def _all_reduce_gradients(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """DDP: each bucket is all-reduced once complete, behind the rest of the backward; backward ends when all are."""
    device = low.device(rank)
    labels = []
    for bucket in low.buckets:
        size = bucket.elements * low.value_bytes
        name = f"all-reduce bucket {bucket.index}"
        low.communications[name] = Communication("all-reduce", low.group, size)
        index = _part_at(low, tasks, bucket.complete)
        copied = replace(tasks[index], duration_s=tasks[index].duration_s + costs.copy_time_s(device, size))
        tasks[index] = copied
        stream = "communication" if low.scenario.plan.overlap else "compute"
        task = Task(name, "exposed_communication", stream, communication=name, after=(copied.label,))
        _insert_after(tasks, index, [task])
        labels.append(name)
    for number, size in enumerate(low.scenario.workload.model.buffer_bytes):
        name = f"broadcast buffers {number}"
        low.communications[name] = Communication("broadcast", low.group, size)
        tasks.insert(number, Task(name, "exposed_communication", communication=name))
    tasks.append(Task("wait for all-reduce", "exposed_communication", after=tuple(labels)))
    return tasks


@dataclass(frozen=True)
class Unit:
    """Layers that FSDP2 shards together: a block, or all that is no block (the root)."""

    name: str
    layers: tuple[LayerInstance, ...]
    ranks: int
    value_bytes: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the unit."""
        return tuple(parameter for instance in self.layers for parameter in instance.layer.parameters)

    @property
    def padded_bytes(self) -> int:
        """Bytes of the gathered parameters: each padded in its first dimension to a multiple of the ranks."""
        return self.ranks * sum(self.shard_elements) * self.value_bytes

    @property
    def shard_elements(self) -> tuple[int, ...]:
        """Elements of each parameter on one rank, padding included (torch.chunk on dim 0)."""
        found = []
        for parameter in self.parameters:
            rows = parameter.shape[0] if parameter.shape else 1
            found.append(math.ceil(rows / self.ranks) * (parameter.elements // rows))
        return tuple(found)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients."""
        return sum(parameter.elements for parameter in self.parameters) * self.value_bytes

    def own_elements(self, rank: int) -> tuple[int, ...]:
        """Return elements of each parameter on `rank`, padding left out."""
        found = []
        for parameter in self.parameters:
            rows = parameter.shape[0] if parameter.shape else 1
            chunk = math.ceil(rows / self.ranks)
            held = max(0, min(chunk, rows - rank * chunk))
            found.append(held * (parameter.elements // rows))
        return tuple(found)


def units(low: Lowering) -> tuple[Unit, ...]:
    """Return FSDP2's units in the order in which they are gathered: the root first, then each block."""
    blocks = [instance for instance in low.layers if instance.layer.block]
    root = tuple(instance for instance in low.layers if not instance.layer.block)
    made = [("root", root), *((instance.module, (instance,)) for instance in blocks)]
    return tuple(
        Unit(name, layers, len(low.group), low.value_bytes)
        for name, layers in made
        if any(instance.layer.parameters for instance in layers)
    )


def _reduce_scatter_gradients(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """FSDP2 on a unit's last gradient: parameters freed, gradients copied into one buffer, that reduce-scattered.

    The buffer of one unit is held until the next unit's backward is done (torch 2.13, comm_ctx.reduce_scatter_states).
    """
    device = low.device(rank)
    labels = [task.label for task in tasks]
    held = 0.0
    waiting = []
    for unit in sorted(units(low), key=lambda unit: -min(i.index for i in unit.layers) if unit.name != "root" else 1):
        name = f"reduce-scatter {unit.name}"
        low.communications[name] = Communication("reduce-scatter", low.group, unit.padded_bytes)
        copy = Task(
            f"copy in {name}",
            "backward",
            duration_s=costs.sharded_unit_time_s(
                device, phase="b", tensors=len(unit.parameters), copied_bytes=unit.padded_bytes
            ),
            need=footprint(
                [
                    Event(0, -unit.padded_bytes, "gathered_parameters"),
                    Event(1, -held, "communication"),
                    Event(2, unit.padded_bytes, "communication"),
                    Event(3, -unit.gradient_bytes, "gradients"),
                    Event(4, unit.padded_bytes / unit.ranks, "gradients"),
                ]
            ),
        )
        new = [copy, Task(name, "exposed_communication", communication=name)]
        held = float(unit.padded_bytes)
        if unit.name == "root":
            waiting = new
            continue
        index = labels.index(backward_label(unit.layers[0], 0))
        _insert_after(tasks, index, new)
        labels = [task.label for task in tasks]
    free = Task("backward callback", "backward", need=footprint([Event(0, -held, "communication")]))
    return [*tasks, *waiting, free]


def _gather_parameters(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """FSDP2 with reshard_after_forward=False: each unit is gathered before its first forward and kept.

    A gather's flat buffer is held until the next unit's gather is done, or the forward is.
    """
    device = low.device(rank)
    held = 0.0
    for unit in units(low):
        name = f"all-gather {unit.name}"
        low.communications[name] = Communication("all-gather", low.group, unit.padded_bytes)
        size = float(unit.padded_bytes)
        new = [
            Task(name, "exposed_communication", communication=name, need=footprint([Event(0, size, "communication")])),
            Task(
                f"copy out {name}",
                "forward",
                duration_s=costs.sharded_unit_time_s(
                    device, phase="f", tensors=len(unit.parameters), copied_bytes=unit.padded_bytes
                ),
                need=footprint([Event(0, -held, "communication"), Event(1, size, "gathered_parameters")]),
            ),
        ]
        held = size
        first = low.layers[0] if unit.name == "root" else unit.layers[0]
        index = next(i for i, task in enumerate(tasks) if task.label == f"forward {first.module}")
        tasks[index:index] = new
    end = next(i for i, task in enumerate(tasks) if task.label == f"forward {low.layers[-1].module}")
    tasks[end:end] = [Task("forward end", "forward", need=footprint([Event(0, -held, "communication")]))]
    return tasks


# Push ----------------------------------------------------------------------------------------------------------------


def _push_gradients(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """GS: a complete bucket is cut by owner, thresholded, packed and sent to the owners, one at a time.

    The bucket's buffer lives from its first gradient until it is sent; the owner adds what arrives to its own range.
    """
    previous: list[Task] = []
    for bucket in low.buckets:
        start = _part_at(low, tasks, bucket.started)
        tasks[start] = _with_bucket_buffer(tasks[start], bucket.elements * low.value_bytes)
        index = _part_at(low, tasks, bucket.complete)
        push, drain = _push_bucket(low, rank, bucket)
        _insert_after(tasks, index, [*previous, *push])
        previous = drain
    return [*tasks, *previous]


def _with_bucket_buffer(task: Task, size: float) -> Task:
    """Return the task in which a bucket's first gradient becomes ready, with the bucket's buffer allocated."""
    peak, kept = dict(task.need.peak), dict(task.need.kept)
    for sizes in (peak, kept):
        sizes["buckets"] = sizes.get("buckets", 0.0) + size
    return replace(task, need=Footprint(bytes_of(peak), bytes_of(kept)))


def _push_bucket(low: Lowering, rank: int, bucket: Bucket) -> tuple[list[Task], list[Task]]:
    """Return the tasks that send a bucket off, and those that take in what arrives."""
    device, push = low.device(rank), low.scenario.plan.push
    thresholded = push.threshold is not None
    name = f"push bucket {bucket.index}"
    matrix, entries = _push_matrix(low, bucket)
    dense = bucket.elements * low.value_bytes
    low.communications[name] = Communication(
        "all-to-all-v", low.group, (len(low.group) - 1) * dense, pair_bytes=matrix, data_dependent=thresholded
    )
    own = shares.split(bucket.elements, low.shard_shares)[rank]
    own_bytes = own * low.value_bytes
    sent_bytes, received_bytes = sum(matrix[rank]), sum(row[rank] for row in matrix)
    sent, received = sum(entries[rank]), sum(row[rank] for row in entries)
    prepare_s = costs.copy_time_s(device, dense + own_bytes)
    if thresholded:
        prepare_s += costs.threshold_time_s(device, elements=bucket.elements - own, sent=sent)
    prepare = Task(
        f"threshold bucket {bucket.index}",
        "compression",
        duration_s=prepare_s,
        need=_prepare_need(bucket.elements - own, own_bytes, sent_bytes, thresholded, low.value_bytes, dense),
    )
    tasks = [prepare]
    if thresholded:
        tasks.append(_count_exchange(low, bucket))
    stream = "communication" if low.scenario.plan.overlap else "compute"
    incoming = footprint([Event(0, received_bytes, "communication")])
    after = (tasks[-1].label,)
    tasks.append(Task(name, "exposed_communication", stream, communication=name, after=after, need=incoming))
    outgoing = sent_bytes if thresholded else dense
    release = [Event(0, -received_bytes, "communication")]
    release.append(Event(0, -outgoing, "communication" if thresholded else "buckets"))
    if thresholded:
        add_s = costs.scatter_time_s(device, received=received)
    else:
        add_s = costs.copy_time_s(device, 1.5 * received_bytes)
    drain = Task(f"add bucket {bucket.index}", "compression", duration_s=add_s, after=(name,), need=footprint(release))
    return tasks, [drain]


def _prepare_need(
    looked_at: int, own_bytes: float, sent_bytes: float, thresholded: bool, value_bytes: int, dense: float
) -> Footprint:
    """Return the memory of thresholding: magnitudes and a mask of all that may be sent, then indices and values."""
    events = [Event(0, own_bytes, "gradients")]
    if thresholded:
        magnitudes, mask = float(looked_at * value_bytes), float(looked_at)
        entries = sent_bytes / (value_bytes + costs.INDEX_BYTES)
        events += [
            Event(1, magnitudes, "temporaries"),
            Event(2, mask, "temporaries"),
            Event(3, -magnitudes, "temporaries"),
            Event(4, 8 * entries, "temporaries"),
            Event(5, -mask, "temporaries"),
            Event(6, sent_bytes, "communication"),
            Event(7, -8 * entries, "temporaries"),
            Event(8, -dense, "buckets"),
        ]
    return footprint(events)


def _count_exchange(low: Lowering, bucket: Bucket) -> Task:
    name = f"counts bucket {bucket.index}"
    members = len(low.group)
    row = (float(COUNT_BYTES),) * members
    matrix = tuple(tuple(0.0 if i == j else size for j, size in enumerate(row)) for i in range(members))
    size = members * (members - 1) * COUNT_BYTES
    low.communications[name] = Communication("all-to-all-v", low.group, size, pair_bytes=matrix)
    return Task(name, "exposed_communication", communication=name)


def _push_matrix(low: Lowering, bucket: Bucket) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """Return bytes and entries that each rank sends to each owner for a bucket."""
    push = low.scenario.plan.push
    ranges = shares.ranges(bucket.elements, low.shard_shares)
    sizes, entries = [], []
    for rank in low.group:
        row_sizes, row_entries = [], []
        for owner, (first, last) in enumerate(ranges):
            elements = float(last - first) if owner != rank else 0.0
            sent = sum(n * d for n, d in _densities(low, bucket, rank, first, last)) if elements else 0.0
            row_entries.append(sent)
            size = elements * low.value_bytes
            if push.threshold is not None:
                size = density.message_bytes(
                    elements=elements,
                    sent=sent,
                    value_bytes=low.value_bytes,
                    index_bytes=costs.INDEX_BYTES,
                    encoding=push.encoding,
                )
            row_sizes.append(size)
        sizes.append(tuple(row_sizes))
        entries.append(tuple(row_entries))
    return tuple(sizes), tuple(entries)


def _densities(low: Lowering, bucket: Bucket, rank: int, first: int, last: int) -> list[tuple[int, float]]:
    """Return (elements, density) of each parameter's part in the range [first, last) of the bucket."""
    threshold = low.scenario.plan.push.threshold
    found = []
    start = 0
    for instance, parameter in bucket.members:
        end = start + parameter.elements
        inside = min(end, last) - max(start, first)
        if inside > 0:
            ratio = 1.0
            if threshold is not None and threshold > 0:
                assert low.statistics is not None  # loading demands them
                name = parameter.name.replace("{}", instance.module)
                ratio = density.push_density(
                    low.statistics,
                    samples=low.batch_sizes[rank],
                    tensor=name,
                    step=low.step,
                    threshold=threshold,
                )
            found.append((inside, ratio))
        start = end
    return found


def _mean_density(low: Lowering) -> float:
    """Return the fraction of off-shard elements that all ranks send in this step."""
    sent = offered = 0.0
    for bucket in low.buckets:
        _, entries = _push_matrix(low, bucket)
        sent += sum(map(sum, entries))
        offered += (len(low.group) - 1) * bucket.elements
    return sent / offered if offered else 0.0


# Optimizer and publish -----------------------------------------------------------------------------------------------


def _optimize(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """Update what the rank owns; then, where replicas are kept and states sharded, publish it."""
    workload, device = low.scenario.workload, low.device(rank)
    owned = _owned_tensors(low, rank)
    elements = sum(owned)
    sharded = low.scenario.policies.parameters == "gathered"
    temporary = optimizer_temporary_bytes(
        workload.optimizer, tensor_elements=owned, value_bytes=low.value_bytes, kind=device.kind
    )
    events = [Event(0, temporary, "temporaries"), Event(1, -temporary, "temporaries")]
    events.append(Event(2, -_gradient_bytes_at_end(low, rank), "gradients"))
    duration_s = costs.optimizer_time_s(
        device, workload.optimizer, elements=elements, tensors=len(owned), sharded_tensors=sharded
    )
    update = Task("optimizer", "optimizer", duration_s=duration_s, need=footprint(events))
    publishes = low.scenario.policies.gradients == "push"
    return [*tasks, update, *(_publish(low) if publishes else [])]


def _publish(low: Lowering) -> list[Task]:
    """GS: updated parameters go round a ring into everybody's flat replica, bucket by bucket."""
    tasks = []
    for bucket in low.buckets:
        name = f"publish bucket {bucket.index}"
        parts = tuple(n * low.value_bytes for n in shares.split(bucket.elements, low.shard_shares))
        low.communications[name] = Communication("all-gather-v", low.group, sum(parts), part_bytes=parts)
        tasks.append(Task(name, "exposed_communication", communication=name))
    return tasks


def _owned_tensors(low: Lowering, rank: int) -> list[int]:
    """Return the elements of every tensor that the rank's optimizer updates."""
    gradients = low.scenario.policies.gradients
    if gradients == "push":
        return [shares.split(bucket.elements, low.shard_shares)[rank] for bucket in low.buckets]
    if gradients == "reduce-scatter":
        return [elements for unit in units(low) for elements in unit.own_elements(rank)]
    return [parameter.elements for instance in low.layers for parameter in instance.layer.parameters]


def _gradient_bytes_at_end(low: Lowering, rank: int) -> float:
    """Return the bytes of gradients that live until the optimizer is done (DDP's are views of its buckets)."""
    gradients = low.scenario.policies.gradients
    if gradients == "all-reduce":
        return 0.0
    if gradients == "reduce-scatter":
        return sum(unit.padded_bytes / unit.ranks for unit in units(low))
    return float(sum(_owned_tensors(low, rank)) * low.value_bytes)


def _persistent(low: Lowering, rank: int) -> dict[str, float]:
    """Return what the rank holds all the time, by category."""
    workload, policies = low.scenario.workload, low.scenario.policies
    owned = _owned_tensors(low, rank)
    total = sum(parameter.elements for instance in low.layers for parameter in instance.layer.parameters)
    parameters = float(total * low.value_bytes)
    if policies.parameters != "replicated":
        parameters = sum(unit.padded_bytes / unit.ranks for unit in units(low))
    held = {
        "parameters": parameters,
        "buffers": float(sum(workload.model.buffer_bytes)),
        "optimizer": optimizer_state_bytes(
            workload.optimizer, elements=sum(owned), tensors=len(owned), value_bytes=low.value_bytes
        ),
        "input": input_bytes(
            workload.model, batch_size=low.batch_sizes[rank], sequence_length=workload.sequence_length
        ),
    }
    if policies.gradients == "all-reduce":
        held["buckets"] = total * low.value_bytes
    return held
