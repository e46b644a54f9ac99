"""Blocks cut among the ranks of a tensor group: their sums over the ranks, put where they happen.

torch's functional all-reduce copies its input and sums the copies (the copy is traced as the layer's own buffer); the
rank waits for the sum at once, as what comes next needs it. On nccl too it is the compute stream that waits. What a
host adds to a plain call of the collective counts before each sum, and what DTensor takes for itself in each layer.
"""

from collections.abc import Sequence

from gssim import cost
from gssim.collectives import Communication
from gssim.memory import last_saved
from gssim.program.lowering import Lowering
from gssim.program.task import Task
from gssim.scenario import Scenario
from gssim.workload import Layer, LayerInstance, Reduction


def phase_label(phase: str, layer: LayerInstance, part: int) -> str:
    """Return the label of a part of a layer's forward (`f`), that run again (`r`), or backward (`b`)."""
    name = {"f": "forward", "r": "recompute", "b": "backward"}[phase]
    return f"{name} {layer.module}" + (f" part {part}" if part else "")


def _reductions(layer: Layer, phase: str) -> list[Reduction]:
    """Return the sums over ranks in a phase; a forward that is run again stops once all is saved."""
    traced = "f" if phase == "r" else phase
    stop = last_saved(layer) if phase == "r" else None
    found = [each for each in layer.reductions if each.moment.phase == traced]
    return [each for each in found if stop is None or each.moment.position <= stop]


def cut_after(layer: Layer, phase: str) -> tuple[int, ...]:
    """Return the positions after which the ranks sum, so that a layer's phase is in parts there."""
    return tuple(each.moment.position for each in _reductions(layer, phase))


def reduced(
    low: Lowering,
    rank: int,
    instance: LayerInstance,
    phase: str,
    parts: Sequence[Task],
    ends: Sequence[int],
    samples: int,
) -> list[Task]:
    """Return the parts of a layer's phase with the all-reduces among them; `ends`: the last position of each part."""
    waiting = list(enumerate(_reductions(instance.layer, phase)))
    if not waiting:
        return list(parts)
    group, *beside = _tensor_groups(low, rank)
    device = low.device(rank)
    of_samples = "" if len(beside) + 1 == len(low.group) else f" of {low.batch_sizes[rank]} samples"
    found: list[Task] = []
    for part, end in zip(parts, ends, strict=True):
        found.append(part)
        while waiting and waiting[0][1].moment.position <= end:
            number, each = waiting.pop(0)
            # not the part's own number: ranks that hold other slices may cut elsewhere too, where buckets are complete
            name = f"all-reduce {phase_label(phase, instance, number)}{of_samples}"
            size = _sum_bytes(low, each, samples)
            low.communications[name] = Communication("all-reduce", group, size, beside=tuple(beside))
            if device.kind == "cpu" and (host_s := cost.cut_sum_time_s(device, sum_bytes=size)):
                found.append(Task(f"issue {name}", "exposed_communication", duration_s=host_s))
            found.append(Task(name, "exposed_communication", communication=name))
    return found


def _sum_bytes(low: Lowering, each: Reduction, samples: int) -> float:
    shape = {"b": samples, "s": low.scenario.workload.sequence_length or 1}
    return low.traced_scale * each.size_bytes.at(**shape)


def _is_native(low: Lowering, layer: Layer) -> bool:
    """Return whether a layer is cut by DTensor."""
    return bool(layer.linear and layer.reductions) and low.policies.cuts_natively


def with_host_time(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, *, alone_s: float
) -> float:
    """Return the time of a layer's phase that takes `alone_s`, with what the host adds to it where the layer is cut.

    That is DTensor's own time for each pair of maps that it cuts, of which each has one sum in the forward. A GPU waits
    for sums while the host issues what comes next, so that the host's time for them counts here too; on a CPU it is
    that of a task before the sum.
    """
    layer, device = instance.layer, low.device(rank)
    if not layer.reductions:
        return alone_s
    host_s = 0.0
    if _is_native(low, layer):
        pairs = sum(each.moment.phase == "f" for each in layer.reductions)
        size = _sum_bytes(low, layer.reductions[0], samples)
        host_s += cost.cut_pairs_time_s(device, phase=phase, pairs=pairs, sum_bytes=size)
    if device.kind != "cpu":
        sizes = [_sum_bytes(low, each, samples) for each in _reductions(layer, phase)]
        host_s += sum(cost.cut_sum_time_s(device, sum_bytes=size) for size in sizes)
    operations = layer.backward_operations if phase == "b" else layer.forward_operations
    return cost.with_host_time_s(device, alone_s, host_s=host_s, operations=operations)


def uncounted(scenario: Scenario) -> tuple[str, ...]:
    """Return what of a plan's host time is not known, and counts as 0: why, in words."""
    if scenario.policies.tp == 1:
        return ()
    kinds = dict.fromkeys(scenario.cluster.devices[rank].type for rank in range(scenario.ranks))
    missing = [name for name in kinds if scenario.cluster.device_types[name].cut_block is None]
    found = [f"host time in cut blocks: device_types.{name}.cut_block is not measured" for name in missing]
    blocks = [layer for layer in scenario.workload.model.sliced_layers if layer.reductions]
    if scenario.policies.cuts_natively and any(layer.linear is None for layer in blocks):
        found.append("DTensor's host time: the model file does not tell whether it cuts the blocks (`gsreal trace`)")
    return tuple(found)


def _tensor_groups(low: Lowering, rank: int) -> list[Sequence[int]]:
    """Return the groups that share blocks, of all ranks of the lowering that take as many samples as this one."""
    key = ("tensor groups", low.batch_sizes[rank])
    if key not in low.found:
        mesh, samples = low.scenario.policies.mesh, low.batch_sizes
        alike = [each for each in low.group if samples[each] == samples[rank]]
        low.found[key] = [mesh.group(each, "tp") for each in alike]
    found: list[Sequence[int]] = low.found[key]
    return found
