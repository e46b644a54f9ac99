"""The update of what a rank owns, its publication, and what the rank holds all the time.

Of which tensors it is made what a rank holds all the time.
"""

from collections.abc import Callable, Mapping, Sequence

from gssim import collectives, cost
from gssim.collectives import Communication
from gssim.memory import Event, footprint, input_bytes
from gssim.program.lowering import Lowering
from gssim.program.messages import held_for_thresholds
from gssim.program.publish import publish
from gssim.program.sharded import owned_rows, units
from gssim.program.task import Task
from gssim.scenario import native_tensors
from gssim.workload import (
    COUNTS_STEPS,
    VALUES_KEPT,
    implementation_on,
    optimizer_state_bytes,
    optimizer_temporary_bytes,
)

Tensors = dict[str, tuple[float, ...]]
"""Bytes of tensors, by category."""
LT_WORKSPACE_BYTES = 2**20
"""What torch gives cuBLASLt where nobody asks for another size (CUBLASLT_WORKSPACE_SIZE), and keeps."""


def persistent_tensors(low: Lowering, rank: int, held: Mapping[str, float]) -> Tensors:
    """Return the tensors of what a rank holds all the time (`held`), by category, each in the order of making.

    Of a category that is not known in more detail, one. Adam's step counters are on the host but where it is fused.
    """
    owned = owned_tensors(low, rank)
    workload = low.scenario.workload
    counters = workload.optimizer in COUNTS_STEPS
    fused = implementation_on(low.device(rank).kind, workload.optimizer_implementation) == "fused"
    on_device = [4.0] * len(owned) if counters and fused else []
    on_host = 4.0 * len(owned) if counters and not fused else 0.0
    values = VALUES_KEPT[workload.optimizer]
    each: dict[str, Callable[[], Sequence[float]]] = {  # each is worked out only where the rank holds some
        "parameters": lambda: _parameters(low, owned),
        "master_copy": lambda: [elements * low.master_bytes for elements in owned],
        "buckets": lambda: [bucket.elements * low.value_bytes for bucket in low.buckets],
        "buffers": lambda: workload.model.buffer_bytes,
        "workspace": lambda: workspaces(held["workspace"]),
        "optimizer": lambda: [elements * low.master_bytes for elements in owned for _ in range(values)] + on_device,
    }
    return {
        category: _parts(size - (on_host if category == "optimizer" else 0.0), each.get(category, tuple)())
        for category, size in held.items()
        if size
    }


def workspaces(size_bytes: float) -> tuple[float, ...]:
    """Return what libraries keep of the allocator's memory: cuBLAS's workspace of each of two threads, and cuBLASLt's.

    That of the thread that runs the forward comes first, that of the backward last. Too little for them is one.
    Source: torch 2.11, aten/src/ATen/cuda/CublasHandlePool.cpp: one workspace for each handle and stream.

    >>> [size / 2**20 for size in workspaces(65 * 2**20)]
    [32.0, 1.0, 32.0]
    """
    each = (size_bytes - LT_WORKSPACE_BYTES) / 2
    return (each, float(LT_WORKSPACE_BYTES), each) if each >= LT_WORKSPACE_BYTES else (size_bytes,)


def _parameters(low: Lowering, owned: Sequence[int]) -> Sequence[float]:
    """Return the bytes of the tensors that parameters are in: their own, GS's flat replicas, or shards."""
    pushes = low.policies.gradients == "push"
    if holds_shards(low):
        if pushes:
            return [elements * low.master_bytes for elements in owned]
        return [elements * low.master_bytes for unit in units(low) for elements in unit.shard_elements]
    if pushes:
        return [bucket.elements * low.value_bytes for bucket in low.buckets]
    if low.flat_part:
        return [low.flat_part * len(low.group) * low.value_bytes]
    return [parameter.elements * low.value_bytes for _, parameter in low.parameters]


def _parts(size: float, parts: Sequence[float]) -> tuple[float, ...]:
    """Return parts that add up to `size`, whatever is missing as one more.

    >>> _parts(10.0, [4.0, 4.0]), _parts(7.0, [4.0, 4.0])
    ((4.0, 4.0, 2.0), (4.0, 3.0))
    """
    found = []
    left = size
    for part in parts:
        part = min(part, left)
        if part > 0:
            found.append(float(part))
        left -= part
    return (*found, float(left)) if left > 0 else tuple(found)


def optimize(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """Update what the rank owns; then, where replicas are kept and states sharded, publish it."""
    workload, device = low.scenario.workload, low.device(rank)
    owned = owned_tensors(low, rank)
    elements = sum(owned)
    temporary = optimizer_temporary_bytes(
        workload.optimizer,
        implementation=implementation_on(device.kind, workload.optimizer_implementation),
        tensor_elements=owned,
        value_bytes=low.master_bytes,
        weight_decay=workload.weight_decay,
    )
    cast = float(elements * low.master_bytes) if _casts_gradients(low) else 0.0
    whole = tuple(float(n * low.master_bytes) for n in owned)
    each = whole if temporary == sum(whole) else ()  # for all tensors at once, or one after another
    events = [Event(0, cast, "temporaries", whole), Event(1, temporary, "temporaries", each)]
    events += [Event(2, -temporary, "temporaries", each), Event(3, -cast, "temporaries", whole)]
    events.append(Event(4, -_gradient_bytes_at_end(low, rank), "gradients", _gradients_at_end(low, rank)))
    duration_s = cost.optimizer_time_s(
        device, workload, elements=elements, tensors=len(owned), sharded_tensors=_native_tensors(low, len(owned))
    )
    if not holds_shards(low):  # else what was updated is cast to the parameters as they are gathered
        duration_s += cost.master_copy_time_s(
            device, workload, elements=elements, tensors=len(owned), casts=1 + _casts_gradients(low)
        )
    if low.flat_part and not low.has_master_copy:  # gradients are copied to the part, and the part to the parameters
        duration_s += 2 * cost.copy_time_s(device, elements * low.master_bytes)
    update = Task("optimizer", "optimizer", duration_s=duration_s, need=footprint(events))
    if low.policies.gradients == "push":
        return publish(low, rank, tasks, update)
    return [*tasks, update, *_published(low)]


def _native_tensors(low: Lowering, owned: int) -> int:
    """Return how many of the tensors that a rank updates are DTensors: all where FSDP2 shards, else cut maps."""
    if low.policies.gradients == "reduce-scatter":
        return owned
    return native_tensors(low.scenario.workload.model) if low.policies.cuts_natively else 0


def _casts_gradients(low: Lowering) -> bool:
    """Return whether the optimizer copies gradients into its own precision; where they are sharded, they are in it."""
    return bool(low.flat_part) or (low.has_master_copy and low.policies.gradients in ("local", "all-reduce"))


def holds_shards(low: Lowering) -> bool:
    """Return whether parameters are sharded at rest; of what is pushed, a rank alone keeps the whole."""
    pushes = low.policies.gradients == "push"
    return low.policies.parameters != "replicated" and (not pushes or len(low.group) > 1)


def _published(low: Lowering) -> Sequence[Task]:
    """Return the tasks that bring what was updated to all replicas."""
    key = "publish"
    if key not in low.found:
        whole = _publish_layers(low) if low.deals_out_layers else []
        gathered = _gather_parts(low) if low.flat_part else whole
        low.found[key] = _broadcast(low) if low.deals_out_tensors else gathered
    tasks: Sequence[Task] = low.found[key]
    return tasks


def _broadcast(low: Lowering) -> list[Task]:
    """ZeRO-1: every tensor is broadcast by its owner, rank after rank; the step ends when all are there.

    ZeroRedundancyOptimizer hands all of them over and then waits; the backend takes them in that order, as many at once
    as it has threads for.
    """
    handed = Task("hand over parameters", "idle")
    at_once = collectives.at_once(low.scenario.cluster.backend)
    tasks: list[Task] = []
    for root, owned in enumerate(low.owned_parameters):
        for position in owned:
            instance, parameter = low.parameters[position]
            name = f"broadcast parameters {parameter.name.replace('{}', instance.module)}"
            size = parameter.elements * low.value_bytes
            low.communications[name] = Communication("broadcast", low.group, size, root=root)
            stream = f"communication {len(tasks) % at_once}" if at_once > 1 else "communication"
            tasks.append(Task(name, "exposed_communication", stream, communication=name, after=(handed.label,)))
    return [handed, *tasks, Task("wait for parameters", "exposed_communication", after=tuple(t.label for t in tasks))]


GATHERED_ELEMENTS = 500_000_000
"""DeepSpeed's `allgather_bucket_size`."""


def _gather_parts(low: Lowering) -> list[Task]:
    """DeepSpeed's ZeRO-1: everybody's part goes into the flat buffer of all, bucket by bucket, one after another.

    Source: DeepSpeed, runtime/utils.py, `all_gather_dp_groups`.
    """
    ranks, part = len(low.group), low.flat_part
    if ranks == 1:
        return []
    count = max(1, part * ranks // GATHERED_ELEMENTS)
    size = part // count // 2 * 2
    tasks = []
    for number in range(count):
        elements = size if number < count - 1 else part - size * (count - 1)
        name = f"all-gather parameters {number}"
        low.communications[name] = Communication("all-gather", low.group, ranks * elements * low.value_bytes)
        tasks.append(Task(name, "exposed_communication", communication=name))
    return tasks


def _publish_layers(low: Lowering) -> list[Task]:
    """Weight gradients dealt out: everybody's updated layers go round a ring into the flat replica, all at once."""
    name = "publish"
    parts = tuple(float(sum(_elements(low, *layers)) * low.value_bytes) for layers in low.owned_ranges)
    low.communications[name] = Communication("all-gather-v", low.group, sum(parts), part_bytes=parts)
    return [Task(name, "exposed_communication", communication=name)]


def _elements(low: Lowering, first: int, last: int) -> list[int]:
    """Return the elements of every parameter of a range of layers."""
    return [parameter.elements for instance in low.layers[first:last] for parameter in instance.layer.parameters]


def owned_tensors(low: Lowering, rank: int) -> Sequence[int]:
    """Return the elements of every tensor that the rank's optimizer updates."""
    gradients = low.scenario.policies.gradients
    if gradients == "push":
        return [low.pushed_elements(bucket, rank) for bucket in low.buckets]
    if gradients == "reduce-scatter":
        return owned_rows(low, rank)
    if low.flat_part:
        return [low.flat_part]
    if low.deals_out_tensors:
        return low.owned_elements(rank)
    if low.deals_out_layers:
        return _elements(low, *low.owned_ranges[rank])
    return [parameter.elements for _, parameter in low.parameters]


def _gradient_bytes_at_end(low: Lowering, rank: int) -> float:
    """Return the bytes of gradients that live until the optimizer is done."""
    return sum(_gradients_at_end(low, rank))


def _gradients_at_end(low: Lowering, rank: int) -> tuple[float, ...]:
    """Return the bytes of each gradient that lives until the optimizer is done (DDP's are views of its buckets).

    A shard's are in the precision of its optimizer: owners add up in that, FSDP2 casts what it has reduced, all of a
    unit's in one.
    """
    gradients = low.scenario.policies.gradients
    if gradients == "all-reduce":
        return ()
    if gradients == "reduce-scatter":
        return tuple(float(unit.shard_bytes) for unit in units(low))
    value_bytes = low.master_bytes if gradients == "push" else low.value_bytes
    return tuple(float(elements * value_bytes) for elements in owned_tensors(low, rank))


def persistent(low: Lowering, rank: int) -> dict[str, float]:
    """Return what the rank holds all the time, by category."""
    workload, policies = low.scenario.workload, low.scenario.policies
    owned = owned_tensors(low, rank)
    total = sum(parameter.elements for _, parameter in low.parameters)
    if low.flat_part:
        total = low.flat_part * len(low.group)
    parameters = float(total * low.value_bytes)
    if holds_shards(low):  # these are the master copy
        pushes = policies.gradients == "push"
        parameters = sum(owned) * low.master_bytes if pushes else sum(unit.shard_bytes for unit in units(low))
    held = {
        "parameters": parameters,
        "workspace": low.device(rank).workspace_bytes,
        "buffers": float(sum(workload.model.buffer_bytes)),
        "optimizer": optimizer_state_bytes(
            workload.optimizer, elements=sum(owned), tensors=len(owned), value_bytes=low.master_bytes
        ),
        "input": input_bytes(
            workload.model,
            batch_size=low.batch_sizes[rank],
            sequence_length=workload.sequence_length,
            value_bytes=low.value_bytes,
        ),
    }
    if (low.has_master_copy and not holds_shards(low)) or low.thresholds_publish or low.flat_part:
        held["master_copy"] = float(sum(owned) * low.master_bytes)
    if policies.gradients == "all-reduce":
        held["buckets"] = sum(bucket.elements for bucket in low.buckets) * low.value_bytes
    held |= held_for_thresholds(low, rank)
    return held
