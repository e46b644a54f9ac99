"""The update of what a rank owns, its publication, and what the rank holds all the time."""

from collections.abc import Sequence

from gssim import costs
from gssim.collectives import Communication
from gssim.memory import (
    Event,
    footprint,
    input_bytes,
)
from gssim.optimizers import implementation_on, optimizer_state_bytes, optimizer_temporary_bytes
from gssim.program.lowering import Bucket, Lowering
from gssim.program.messages import held_for_thresholds
from gssim.program.push import across
from gssim.program.task import Task
from gssim.program.units import owned_rows, units


def optimize(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """Update what the rank owns; then, where replicas are kept and states sharded, publish it."""
    workload, device = low.scenario.workload, low.device(rank)
    owned = _owned_tensors(low, rank)
    elements = sum(owned)
    sharded = low.policies.gradients == "reduce-scatter"  # these are DTensors
    temporary = optimizer_temporary_bytes(
        workload.optimizer,
        implementation=implementation_on(device.kind, workload.optimizer_implementation),
        tensor_elements=owned,
        value_bytes=low.master_bytes,
        weight_decay=workload.weight_decay,
    )
    cast = float(elements * low.master_bytes) if _casts_gradients(low) else 0.0
    events = [Event(0, cast, "temporaries"), Event(1, temporary, "temporaries")]
    events += [Event(2, -temporary, "temporaries"), Event(3, -cast, "temporaries")]
    events.append(Event(4, -_gradient_bytes_at_end(low, rank), "gradients"))
    duration_s = costs.optimizer_time_s(
        device, workload, elements=elements, tensors=len(owned), sharded_tensors=sharded
    )
    if not sharded:  # what was updated is copied to the parameters, which FSDP2 does as it gathers them
        duration_s += costs.master_copy_time_s(
            device, workload, elements=elements, tensors=len(owned), casts=1 + _casts_gradients(low)
        )
    update = Task("optimizer", "optimizer", duration_s=duration_s, need=footprint(events))
    return [*tasks, update, *_published(low, rank)]


def _casts_gradients(low: Lowering) -> bool:
    """Return whether the optimizer casts all gradients to its own precision; where they are sharded, they are in it."""
    return low.has_master_copy and low.policies.gradients in ("local", "all-reduce")


def _published(low: Lowering, rank: int) -> Sequence[Task]:
    """Return the tasks that bring what was updated to all replicas."""
    key = ("publish", low.place(rank))
    if key not in low.found:
        pushes = low.policies.gradients == "push" and low.policies.parameters == "replicated"
        whole = _publish_layers(low) if low.deals_out_layers else []
        low.found[key] = _publish(low, rank) if pushes else _broadcast(low) if low.deals_out_tensors else whole
    tasks: Sequence[Task] = low.found[key]
    return tasks


def _broadcast(low: Lowering) -> list[Task]:
    """ZeRO-1: every tensor is broadcast by its owner, rank after rank; the step ends when all are there.

    ZeroRedundancyOptimizer hands all of them over and then waits; backends take them in that order. Nothing else is
    left to do, so that they block the compute.
    """
    tasks = []
    for root, owned in enumerate(low.owned_parameters):
        for position in owned:
            instance, parameter = low.parameters[position]
            name = f"broadcast parameters {parameter.name.replace('{}', instance.module)}"
            size = parameter.elements * low.value_bytes
            low.communications[name] = Communication("broadcast", low.group, size, root=root)
            tasks.append(Task(name, "exposed_communication", communication=name))
    return tasks


def _publish(low: Lowering, rank: int) -> list[Task]:
    """GS: updated parameters go round a ring into everybody's flat replica, bucket by bucket.

    On two levels they go round the push group first, then, with all of the rank's place, round the node.
    """
    tasks = []
    for bucket in low.buckets:
        division = low.division(bucket)
        label = f"publish bucket {bucket.index}"
        if not low.policies.point_to_point:
            tasks += _broadcast_parts(low, bucket, label)
            continue
        if low.nodes > 1 or low.places == 1:
            parts = tuple(n * low.value_bytes for n in division.owned[low.place(rank)])
            name = across(low, bucket, rank, label, "all-gather-v", sum(parts), part_bytes=parts)
            tasks.append(Task(label, "exposed_communication", communication=name))
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


def _publish_layers(low: Lowering) -> list[Task]:
    """Weight gradients dealt out: everybody's updated layers go round a ring into the flat replica, all at once."""
    name = "publish"
    parts = tuple(float(sum(_elements(low, *layers)) * low.value_bytes) for layers in low.owned_ranges)
    low.communications[name] = Communication("all-gather-v", low.group, sum(parts), part_bytes=parts)
    return [Task(name, "exposed_communication", communication=name)]


def _elements(low: Lowering, first: int, last: int) -> list[int]:
    """Return the elements of every parameter of a range of layers."""
    return [parameter.elements for instance in low.layers[first:last] for parameter in instance.layer.parameters]


def _owned_tensors(low: Lowering, rank: int) -> Sequence[int]:
    """Return the elements of every tensor that the rank's optimizer updates."""
    gradients = low.scenario.policies.gradients
    if gradients == "push":
        return [low.pushed_elements(bucket, rank) for bucket in low.buckets]
    if gradients == "reduce-scatter":
        return owned_rows(low, rank)
    if low.deals_out_tensors:
        return low.owned_elements(rank)
    if low.deals_out_layers:
        return _elements(low, *low.owned_ranges[rank])
    return [parameter.elements for _, parameter in low.parameters]


def _gradient_bytes_at_end(low: Lowering, rank: int) -> float:
    """Return the bytes of gradients that live until the optimizer is done (DDP's are views of its buckets).

    A shard's are in the precision of its optimizer: owners add up in that, FSDP2 casts what it has reduced.
    """
    gradients = low.scenario.policies.gradients
    if gradients == "all-reduce":
        return 0.0
    if gradients == "reduce-scatter":
        return sum(unit.shard_bytes for unit in units(low))
    value_bytes = low.master_bytes if gradients == "push" else low.value_bytes
    return float(sum(_owned_tensors(low, rank)) * value_bytes)


def persistent(low: Lowering, rank: int) -> dict[str, float]:
    """Return what the rank holds all the time, by category."""
    workload, policies = low.scenario.workload, low.scenario.policies
    owned = _owned_tensors(low, rank)
    total = sum(parameter.elements for _, parameter in low.parameters)
    parameters = float(total * low.value_bytes)
    if policies.parameters != "replicated":
        pushes = policies.gradients == "push"
        parameters = sum(owned) * low.value_bytes if pushes else sum(unit.shard_bytes for unit in units(low))
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
    if low.has_master_copy and (policies.parameters == "replicated" or policies.gradients == "push"):
        held["master_copy"] = float(sum(owned) * low.master_bytes)  # FSDP2's sharded parameters are the master copy
    if policies.gradients == "all-reduce":
        held["buckets"] = total * low.value_bytes
    held |= held_for_thresholds(low, rank)
    return held
