"""Forward and backward of every layer, with their memory: the first pass, which all others add to."""

from collections.abc import Sequence
from functools import partial

from gssim import costs
from gssim.memory import (
    Event,
    Lives,
    Timeline,
    activation_timeline,
    as_traced,
    footprint,
    gradient_events,
    scratch_bytes,
    with_scratch,
)
from gssim.program.lowering import Lowering
from gssim.program.task import Task
from gssim.recompute import CPU_RANDOM_STATE_BYTES, recomputed_buffers
from gssim.units import PRECISION_BYTES
from gssim.workload import LayerInstance

PHASE_NAMES = {"f": "forward", "r": "backward"}
"""The phase of a step in which a layer's forward runs: the first time, and again."""


def cuts(low: Lowering, gradients: str) -> dict[int, list[int]]:
    """Return positions at which a layer's backward is cut in parts: where a bucket becomes complete inside it."""
    found: dict[int, list[int]] = {}
    if gradients in ("all-reduce", "push"):
        for bucket in low.buckets:
            layer, position = bucket.complete
            found.setdefault(layer, []).append(position)
    return found


def backward_label(layer: LayerInstance, part: int) -> str:
    """Return the label of a part of a layer's backward; a layer that is not cut has part 0 alone."""
    return f"backward {layer.module}" + (f" part {part}" if part else "")


def recompute_label(layer: LayerInstance) -> str:
    """Return the label of a checkpointed layer's forward where it is run again for the backward."""
    return f"recompute {layer.module}"


def backward_begin(low: Lowering, layer: LayerInstance) -> str:
    """Return the label of the first task of a layer's backward."""
    return recompute_label(layer) if low.recomputes and layer.layer.block else backward_label(layer, 0)


def compute(low: Lowering, rank: int, *, cut_at: dict[int, list[int]]) -> list[Task]:
    """Return the forward of every layer and the backward in reverse, with their memory."""
    policies = low.scenario.policies
    freed_when_ready = policies.gradients in ("all-reduce", "push")
    own = low.layers_of(rank)
    traced = _timeline(low, rank, low.layers, as_traced)
    timeline = traced
    if low.recomputes or own.layers is not low.layers:
        timeline = _timeline(low, rank, own.layers, _checkpointed(low, rank) if low.recomputes else as_traced)
    always_kept = gradient_events(low.layers, value_bytes=low.value_bytes, freed_when_ready=False)
    gradients = gradient_events(own.layers, value_bytes=low.value_bytes, freed_when_ready=freed_when_ready)
    hook_s = low.device(rank).gradient_hook_s if freed_when_ready else 0.0
    once: dict[tuple[object, ...], list[Task]] = {}

    def alike(instance: LayerInstance, phase: str, events: Sequence[Event], kept: Sequence[Event]) -> list[Task]:
        """Return the tasks of a layer's phase; those of a layer with the very same events are made once."""
        cut = tuple(cut_at.get(instance.index, ())) if phase == "b" else ()
        key = (phase, id(instance.layer), cut, *map(id, events))
        if key not in once:
            scratch = _scratch(low, rank, instance, phase, kept)
            duration_s = _layer_s(low, rank, instance, phase)
            if phase != "b":
                need = with_scratch(footprint(events), scratch)
                once[key] = [Task("", PHASE_NAMES[phase], duration_s=duration_s, need=need)]
            else:
                hooks_s = hook_s * len(instance.layer.parameters)
                once[key] = _parts(instance, events, scratch, duration_s + hooks_s, cut)
        return once[key]

    tasks = []
    for instance in own.layers:
        (task,) = alike(instance, "f", timeline.at(instance.index, "f"), traced.at(instance.index, "f"))
        tasks.append(_named(task, f"forward {instance.module}"))
    for instance in reversed(own.layers[own.deepest :]):
        if low.recomputes and instance.layer.block:
            (task,) = alike(instance, "r", timeline.at(instance.index, "r"), traced.at(instance.index, "f"))
            tasks.append(_named(task, recompute_label(instance)))
        place = (instance.index, "b")
        events = [*timeline.at(*place), *gradients.get(place, ())]
        kept = [*traced.at(*place), *always_kept.get(place, ())]
        parts = alike(instance, "b", events, kept)
        tasks.extend(_named(task, backward_label(instance, part)) for part, task in enumerate(parts))
    end = footprint(timeline.end)
    tasks.append(Task("backward end", "backward", need=end))
    return tasks


def _timeline(low: Lowering, rank: int, layers: Sequence[LayerInstance], lives: Lives) -> Timeline:
    return activation_timeline(
        layers,
        batch_size=low.batch_sizes[rank],
        sequence_length=low.scenario.workload.sequence_length or 1,
        scale=_scale(low),
        lives=lives,
    )


def _scale(low: Lowering) -> float:
    """Return the bytes of an element over those of the traced precision."""
    return low.value_bytes / PRECISION_BYTES[low.scenario.workload.model.traced_precision]


def _checkpointed(low: Lowering, rank: int) -> Lives:
    """Return what checkpointing makes of a layer's buffers on the rank's device."""
    state = CPU_RANDOM_STATE_BYTES if low.device(rank).kind == "cpu" else 0  # a GPU's is kept in the host's memory
    unscaled = round(state / _scale(low))  # bytes, whatever the precision
    return partial(recomputed_buffers, random_state_bytes=unscaled)


def _named(task: Task, label: str) -> Task:
    return Task(label, task.phase, duration_s=task.duration_s, need=task.need)


def _layer_s(low: Lowering, rank: int, instance: LayerInstance, phase: str) -> float:
    samples, whole = low.batch_sizes[rank], low.layers[instance.index].layer
    return costs.layer_time_s(
        low.device(rank), low.scenario.workload, instance.layer, phase=phase, batch_size=samples, whole=whole
    )


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


def part_at(low: Lowering, tasks: Sequence[Task], place: tuple[int, int]) -> int:
    """Return the index of the task in which the backward reaches `place` (layer, position)."""
    layer, position = place
    instance = low.layers[layer]
    cuts = sorted({bucket.complete[1] for bucket in low.buckets if bucket.complete[0] == layer})
    part = sum(1 for cut in cuts if cut < position)
    labels = [task.label for task in tasks]
    while backward_label(instance, part) not in labels:
        part -= 1
    return labels.index(backward_label(instance, part))


def insert_after(tasks: list[Task], index: int, new: Sequence[Task]) -> None:
    """Insert tasks after a part of the backward, and after what was inserted there before."""
    end = index + 1
    while end < len(tasks) and not tasks[end].label.startswith(("backward ", "recompute ")):
        end += 1
    tasks[end:end] = list(new)
