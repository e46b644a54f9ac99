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
    waiting = _reductions(instance.layer, phase)
    if not waiting:
        return list(parts)
    group, found = low.scenario.policies.mesh.group(rank, "tp"), []
    shape = {"b": samples, "s": low.scenario.workload.sequence_length or 1}
    for part, end in zip(parts, ends, strict=True):
        found.append(part)
        for each in [each for each in waiting if each.moment.position <= end]:
            waiting.remove(each)
            name = f"all-reduce {part.label}"
            size = low.traced_scale * each.size_bytes.at(**shape)
            low.communications[name] = Communication("all-reduce", group, size)
            found.append(Task(name, "exposed_communication", communication=name))
    return found
