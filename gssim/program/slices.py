"""Blocks cut among the ranks of a tensor group: their sums over the ranks, put where they happen.

torch's functional all-reduce copies its input and sums the copies (the copy is traced as the layer's own buffer); the
rank waits for the sum at once, as what comes next needs it. On nccl too it is the compute stream that waits.
"""

from collections.abc import Sequence

from gssim.collectives import Communication
from gssim.program.lowering import Lowering
from gssim.program.task import Task
from gssim.recompute import last_saved
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
    of_samples = "" if len(beside) + 1 == len(low.group) else f" of {low.batch_sizes[rank]} samples"
    found: list[Task] = []
    shape = {"b": samples, "s": low.scenario.workload.sequence_length or 1}
    for part, end in zip(parts, ends, strict=True):
        found.append(part)
        while waiting and waiting[0][1].moment.position <= end:
            number, each = waiting.pop(0)
            # not the part's own number: ranks that hold other slices may cut elsewhere too, where buckets are complete
            name = f"all-reduce {phase_label(phase, instance, number)}{of_samples}"
            size = low.traced_scale * each.size_bytes.at(**shape)
            low.communications[name] = Communication("all-reduce", group, size, beside=tuple(beside))
            found.append(Task(name, "exposed_communication", communication=name))
    return found


def _tensor_groups(low: Lowering, rank: int) -> list[Sequence[int]]:
    """Return the groups that share blocks, of all ranks of the lowering that take as many samples as this one."""
    key = ("tensor groups", low.batch_sizes[rank])
    if key not in low.found:
        mesh, samples = low.scenario.policies.mesh, low.batch_sizes
        alike = [each for each in low.group if samples[each] == samples[rank]]
        low.found[key] = [mesh.group(each, "tp") for each in alike]
    found: list[Sequence[int]] = low.found[key]
    return found
