"""Lowers each layer's forward and backward to tasks with their memory. This pass comes first; all others extend it."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import floor
from typing import Any, Literal, NamedTuple

from gssim import cost
from gssim.cluster import DeviceType
from gssim.execution.cache import Same
from gssim.memory import (
    CPU_RANDOM_STATE_BYTES,
    LAST,
    Event,
    Lives,
    Timeline,
    activation_timeline,
    footprint,
    gradient_events,
    recomputation_begin,
    recomputed_buffers,
    split_backward_buffers,
    traced_buffers,
    with_scratch,
)
from gssim.program.kernel_workspace import scratch_events
from gssim.program.lowering import Lowering, once_a_run
from gssim.program.stage_boundary import stage_timeline
from gssim.program.task import BACKWARD, PASSES, Issue, MicroBatch, Task, TaskId
from gssim.program.tensor_slices import (
    SLICE_COLLECTIVES,
    await_positions,
    copied_positions,
    slicing_host_s,
    sum_positions,
    with_all_reduces,
    with_host_time,
)
from gssim.scenario.device_rates import has_host_times, layer_profile, pause_excess
from gssim.workload import Layer, LayerInstance

PHASE_NAMES = {"f": "forward", "r": "backward", "b": "backward", "i": "backward", "w": "backward"}
"""Phase of a step in which forward (f), recomputation (r) and backward (b; its parts: i, w) of a layer are counted."""


def backward_split_positions(low: Lowering, micro_batch: MicroBatch) -> dict[int, list[int]]:
    """Return, by layer index, the positions inside its backward at which a gradient bucket becomes complete.

    The backward is lowered to one task for each part between these positions. Empty where nothing is sent or freed
    before a layer's backward ends.
    """
    frees_units = low.policies.gradients == "push" and low.policies.parameters != "replicated"
    return _completions(low) if frees_units or _copies_into_buckets(low, micro_batch) else {}


@once_a_run
def _completions(low: Lowering) -> dict[int, list[int]]:
    """Return, by layer, the positions in its backward at which buckets are complete.

    Left out are the units of sharded parameters, which are complete after whole layers; but not units of experts that
    ranks divide.
    """
    positions: dict[int, list[int]] = {}
    divided = low.expert_buckets if len(low.expert_replicas[0]) > 1 else ()
    buckets = low.buckets
    if low.policies.gradients == "push" and low.policies.parameters != "replicated":
        buckets = tuple(bucket for bucket in low.buckets if bucket.of_experts)
    for bucket in (*buckets, *divided):
        layer, position = bucket.complete
        positions.setdefault(layer, []).append(position)
    return positions


def _copies_into_buckets(low: Lowering, micro_batch: MicroBatch) -> bool:
    """Return whether gradients are copied into buckets, and then freed, as soon as they are ready."""
    policies = low.policies
    return (
        micro_batch.sends_gradients
        and policies.parameters == "replicated"
        and policies.gradients in ("all-reduce", "push")
        and not low.reduces_after_backward
    )


def _bucket_events(low: Lowering, micro_batch: MicroBatch) -> dict[tuple[int, str], list[Event]]:
    """Return the allocations of buckets that do not exist all through the run.

    Those of pushed gradients are allocated with their first gradient, and freed once sent. DeepSpeed's buffers exist
    from the begin of the first backward, or of every one that is reduced, to the end of one that is; in a pipeline,
    while gradients are reduced.
    """
    events: dict[tuple[int, str], list[Event]] = {}
    if low.frees_gradients and (micro_batch.first or micro_batch.sent_before) and not low.stages:
        events[low.layers[-1].index, "b"] = [Event(0, low.freed_buffers_bytes, "buckets")]
    pushed = low.policies.gradients == "push" and _copies_into_buckets(low, micro_batch)
    for bucket in low.buckets if pushed else ():
        layer, position = bucket.started
        size = float(bucket.elements * low.value_bytes)
        events.setdefault((layer, "b"), []).append(Event(position, size, "buckets"))
    return events


def forward_id(layer: LayerInstance) -> TaskId:
    """Return the identity of the first part of a layer's forward."""
    return TaskId("forward", layer=layer.module)


def backward_id(layer: LayerInstance, part: int = 0) -> TaskId:
    """Return the identity of a part of a layer's backward; an unsplit layer has only part 0."""
    return TaskId("backward", layer=layer.module, part=part or None)


def pass_ends(tasks: Sequence[Task], name: Literal["forward", "backward"]) -> dict[str, TaskId]:
    """Return the last task of each layer's forward or backward, by module.

    The last task is a part of that pass, or a collective of a sliced block that follows its last part.
    """
    return {
        task.id.layer: task.id
        for task in tasks
        if task.id.op == name or (task.id.during == name and task.id.op in SLICE_COLLECTIVES)
    }


def _recomputation_begin(low: Lowering, layer: Layer) -> float:
    """Return the place in a layer's backward before which its forward runs again; -0.5 too if it does not."""
    return recomputation_begin(layer) if low.recomputes and layer.is_recomputed else -0.5


def _backward_cuts(low: Lowering, layer: Layer, completions: Sequence[int]) -> tuple[float, ...]:
    """Return the places at which a layer's backward is split, other than those of its collectives.

    `completions`: positions at which buckets become complete.
    """
    begin = _recomputation_begin(low, layer)
    return (*completions, begin) if begin > 0 else tuple(completions)


def backward_begin(low: Lowering, layer: LayerInstance) -> TaskId:
    """Return the identity of the first task of a layer's backward."""
    again = low.recomputes and layer.layer.is_recomputed and _recomputation_begin(low, layer.layer) < 0
    return TaskId("recompute", layer=layer.module) if again else backward_id(layer)


def compute(low: Lowering, rank: int, micro_batch: MicroBatch) -> list[Task]:
    """Return forward of every layer and backward in reverse order, with their memory, for one micro-batch.

    A split backward comes in its two parts, the second in the order of the layers; see [Note: zero bubble] in
    `gssim.plan.pipeline_schedule`.

    [Note: accumulation] Where an earlier micro-batch left whole gradients, autograd adds each new gradient to the
    existing one and frees the new one at once. Where gradients are then copied into buckets, the sum is freed as well.
    Where one pushed its gradients, an empty sparse tensor stands for each until a hook, after the first new gradient,
    removes them. Autograd adds that one out of place: the sum is allocated before the new gradient is freed
    (torch/csrc/autograd/functions/accumulate_grad.h).
    """
    samples, own = low.samples(rank, micro_batch), low.layers_of(rank)
    shared_layers = own.layers if low.policies.ep > 1 else low.layers
    traced = timeline = _timeline(low, samples, shared_layers, traced_buffers)
    if low.splits_backward:  # without recomputation, or layers of the rank's own
        timeline = _timeline(low, samples, own.layers, split_backward_buffers)
    elif low.recomputes or own.layers is not shared_layers:
        timeline = _timeline(low, samples, own.layers, _checkpointed(low, rank) if low.recomputes else traced_buffers)

    in_buckets = _copies_into_buckets(low, micro_batch)
    autograd_adds = micro_batch.accumulates and not low.casts_units  # FSDP2 itself adds up gradients that it casts
    given_back = autograd_adds + in_buckets
    of_experts = given_back if low.policies.gradients == "push" else int(autograd_adds)  # else no bucket takes them
    copies_first = low.adds_to_pushed(micro_batch)
    gradients: Mapping[tuple[int, str], Sequence[Event]] = {}
    if low.has_one_gradient_buffer:  # the matrix product itself accumulates into the buffer
        autograd_adds = False
    elif own.layers is low.layers:
        gradients = _gradient_events(low, given_back, of_experts, copies_first)
    else:
        gradients = gradient_events(
            own.layers,
            value_bytes=low.value_bytes,
            given_back=given_back,
            given_back_of_experts=of_experts,
            copies_first=copies_first,
        )
    always_kept = _gradient_events(low, 0, 0, False)
    buckets = _bucket_events(low, micro_batch)

    hook_s = hook_time_s(low, rank) if in_buckets else 0.0
    of_phase = _PhaseTasks(
        low, rank, samples, backward_split_positions(low, micro_batch), autograd_adds=autograd_adds, hook_s=hook_s
    )
    tasks = []
    for instance in own.layers:
        tasks += of_phase(instance, "f", timeline.at(instance.index, "f"), traced.at(instance.index, "f"))
    for instance in reversed(own.layers) if low.splits_backward else ():
        events = timeline.at(instance.index, "i")
        tasks += of_phase(instance, "i", events, events)
    for instance in own.layers if low.splits_backward else ():
        events = [*timeline.at(instance.index, "w"), *gradients.get((instance.index, "w"), ())]
        tasks += of_phase(instance, "w", events, events)
    for instance in () if low.splits_backward else reversed(own.layers[own.deepest :]):
        place = (instance.index, "b")
        events = [*timeline.at(*place), *gradients.get(place, ()), *buckets.get(place, ())]
        kept = [*traced.at(*place), *always_kept.get(place, ())]
        first, rest = of_phase.around_recomputation(instance, events, kept)
        again: Sequence[Task] = ()
        if low.recomputes and instance.layer.is_recomputed:
            again = of_phase(instance, "r", timeline.at(instance.index, "r"), traced.at(instance.index, "f"))
        tasks += _order_host_issues(first, again, rest) if first else [*again, *rest]
    tasks.append(Task(TaskId("backward-end"), "backward", need=footprint(timeline.end)))
    return tasks


def _order_host_issues(first: Sequence[Task], again: Sequence[Task], rest: Sequence[Task]) -> list[Task]:
    """Return the tasks of a recomputed block's backward in order: `first`, the second forward (`again`), `rest`.

    The host issues the second forward right after `first`, and `rest` right after the second forward. Where a task's
    duration includes the host's time (it has no `issue`), the host goes on when that task ends.
    """

    def following(tasks: Sequence[Task], goes_on: bool) -> list[Task]:
        place = next((i for i, task in enumerate(tasks) if task.issue is not None), len(tasks))
        issued = [
            replace(task, issue=Issue(task.issue.host_s, goes_on)) for task in tasks[place : place + 1] if task.issue
        ]
        return [*tasks[:place], *issued, *tasks[place + 1 :]]

    is_ahead = any(task.issue is not None and task.issue.goes_on for task in first[:1])
    issues_first, issues_again = (any(task.issue is not None for task in tasks) for tasks in (first, again))
    return [*first, *following(again, is_ahead or issues_first), *following(rest, is_ahead or issues_again)]


class _PhaseTasks:
    """Makes the tasks of a layer's phase on a rank in a micro-batch; layers with identical events share them."""

    def __init__(
        self,
        low: Lowering,
        rank: int,
        samples: int,
        cut_at: Mapping[int, Sequence[int]],
        *,
        autograd_adds: bool,
        hook_s: float,
    ) -> None:
        self.low, self.rank, self.samples = low, rank, samples
        self.cut_at = cut_at
        """Positions at which backwards are split, by layer."""
        self.autograd_adds, self.hook_s = autograd_adds, hook_s
        self.excess = pause_excess(low.device(rank), low.scenario.workload)
        self.once: dict[tuple[object, ...], tuple[list[Task], list[float]]] = {}

    def __call__(
        self, instance: LayerInstance, phase: str, events: Sequence[Event], kept: Sequence[Event]
    ) -> list[Task]:
        """Return the tasks of a phase with these events; `kept`: events of buffers that outlive the phase."""
        return self._tasks(instance, phase, events, kept)[0]

    def around_recomputation(
        self, instance: LayerInstance, events: Sequence[Event], kept: Sequence[Event]
    ) -> tuple[list[Task], list[Task]]:
        """Return the tasks of a backward before the layer's forward runs again, and those after; arguments as above."""
        tasks, ends = self._tasks(instance, "b", events, kept)
        begin = _recomputation_begin(self.low, instance.layer)
        parts_before = sum(end <= begin for end in ends)

        def is_after(task: Task) -> bool:
            # an exchange that overlaps with a product is a part of that operation, which needs what was saved
            return task.stream == "slices" or (task.id.op == "backward" and (task.id.part or 0) >= parts_before)

        place = next((i for i, task in enumerate(tasks) if is_after(task)), len(tasks))
        return tasks[:place], tasks[place:]

    def _tasks(
        self, instance: LayerInstance, phase: str, events: Sequence[Event], kept: Sequence[Event]
    ) -> tuple[list[Task], list[float]]:
        """Return the tasks of a phase, and the place at which each of its parts ends."""
        low, layer = self.low, instance.layer
        sums = sum_positions(layer, phase, low.scenario.plan.recompute)
        own = _backward_cuts(low, layer, self.cut_at.get(instance.index, ())) if phase == "b" else ()
        cut = (*own, *sums, *await_positions(layer, phase))
        key = (phase, id(layer), instance.index == 0, cut, *map(id, events))
        if key not in self.once:
            self.once[key] = self._parts(instance, phase, events, kept, cut)
        parts, ends = self.once[key]
        named = [
            Task(
                TaskId(PASSES[phase], layer=instance.module, part=part or None),
                task.phase,
                duration_s=task.duration_s,
                need=task.need,
                issue=task.issue,
            )
            for part, task in enumerate(parts)
        ]
        summed = with_all_reduces(low, self.rank, instance, phase, named, ends, self.samples)
        if self.excess:
            summed = [replace(task, after_pauses=self.excess) for task in summed]
        return summed, ends

    def _parts(
        self,
        instance: LayerInstance,
        phase: str,
        events: Sequence[Event],
        kept: Sequence[Event],
        cut: Sequence[float],
    ) -> tuple[list[Task], list[float]]:
        """Return the parts of a phase that is split at the places `cut`, and the place at which each ends."""
        low, rank, layer = self.low, self.rank, instance.layer
        taken, scratch = scratch_events(low, rank, instance, phase, self.samples, kept)
        events = _delay_releases(events, copied_positions(layer, phase, low.scenario.plan.recompute))
        last = max((event.position for event in events), default=0)
        ends = sorted({min(position, last) for position in cut} | {last})
        timing = _timing(low, rank, instance, phase, self.samples, hook_s=self.hook_s)
        if phase in ("b", "w") and self.autograd_adds:
            size, tensors = layer.elements * low.value_bytes, len(layer.parameters)
            added_s = cost.accumulation_time_s(low.device(rank), size, tensors=tensors)
            timing = timing._replace(device_s=timing.device_s + added_s)
        parts = _split(phase, [*events, *taken], scratch, timing.device_s, ends)
        if not timing.host_s:
            return parts, ends
        timed: list[Task] = []
        for task, share in zip(parts, _operation_shares(events, ends), strict=True):
            issue = Issue(timing.host_s * share, goes_on=timing.is_ahead or bool(timed))
            timed.append(replace(task, duration_s=timing.device_s * share, issue=issue))
        return timed, ends


@once_a_run
def _gradient_events(
    low: Lowering, given_back: int, of_experts: int, copies_first: bool
) -> Mapping[tuple[int, str], Sequence[Event]]:
    """Return the allocations and releases of the gradients of all layers; see `gradient_events`."""
    return gradient_events(
        low.layers,
        value_bytes=low.value_bytes,
        given_back=given_back,
        given_back_of_experts=of_experts,
        copies_first=copies_first,
        split=low.splits_backward,
    )


def _timeline(low: Lowering, samples: int, layers: Sequence[LayerInstance], lives: Lives) -> Timeline:
    length, scale = low.scenario.workload.sequence_length or 1, low.traced_scale

    def new_timeline() -> Timeline:
        return activation_timeline(layers, batch_size=samples, sequence_length=length, scale=scale, lives=lives)

    if not low.stages:
        return (
            _cached_timeline(low, (samples, length, scale), lives, new_timeline)
            if layers is low.layers and low.policies.ep == 1
            else new_timeline()
        )
    (stage,) = low.stages
    if layers is not low.layers:  # the rank's experts have other loads than the first rank's
        own = zip(stage.layers, layers, strict=True)
        stage = replace(stage, layers=tuple(replace(instance, layer=each.layer) for instance, each in own))
    is_leaf = not low.reduces_after_schedule
    return low.shared.once(
        "timelines of stages",
        (stage.structure_key, samples, length, scale, _settings(lives), is_leaf),
        lambda: stage_timeline(
            stage, batch_size=samples, sequence_length=length, scale=scale, lives=lives, input_is_leaf=is_leaf
        ),
    )


def _settings(lives: Lives) -> tuple[tuple[str, object], ...]:
    """Return the settings of a function of lifetimes, as a part of a key; () of `traced_buffers`."""
    if lives is split_backward_buffers:
        return (("backward", "split"),)
    return tuple(sorted(lives.keywords.items())) if isinstance(lives, partial) else ()


def _cached_timeline(
    low: Lowering, size: tuple[int, int, float], lives: Lives, make: Callable[[], Timeline]
) -> Timeline:
    """Return the timeline of the layers that all ranks with this part of the model run, cached over plans."""
    positions = low.scenario.sequence_positions
    plan, policies = low.scenario.plan, low.policies
    vocabulary = plan.embedding_parallel, plan.loss_parallel, low.value_bytes
    beside = plan.async_input_gradients, low.scenario.multiplies_in_ring
    how = policies.sequence_parallel, plan.gathered_inputs, beside, policies.ring
    slices = (low.scenario.slice_shares, low.tensor_part, positions, how, vocabulary) if low.divides_layers else ()
    key = (Same(low.scenario.workload.model), slices, size, _settings(lives))
    return low.shared.once("timeline", key, make)


def _checkpointed(low: Lowering, rank: int) -> Lives:
    """Return the buffer lifetimes of a layer under activation checkpointing on the rank's device."""
    state = CPU_RANDOM_STATE_BYTES if low.device(rank).kind == "cpu" else 0  # a GPU's is kept in the host's memory
    unscaled = round(state / low.traced_scale)  # bytes, whatever the precision
    casts = low.scenario.workload.autocast is not None
    return partial(
        recomputed_buffers, recompute=low.scenario.plan.recompute, random_state_bytes=unscaled, autocast=casts
    )


def _layer_s(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, *, issued: bool = True
) -> float:
    return cost.layer_time_s(
        low.device(rank),
        low.scenario.workload,
        instance.layer,
        phase=phase,
        batch_size=samples,
        recompute=low.scenario.plan.recompute,
        whole=low.whole_layer(instance),
        positions=low.scenario.sequence_positions if low.policies.cp > 1 else None,
        issued=issued,
    )


def hook_time_s(low: Lowering, rank: int) -> float:
    """Return the host time, in seconds, of the autograd hook that collects one gradient."""
    device = low.device(rank)
    own = device.replica_hook_s if low.policies.gradients == "all-reduce" else None
    return device.gradient_hook_s if own is None else own


class _Timing(NamedTuple):
    """Time of a layer's phase on the device, and the host's time to issue it if parts may wait for that."""

    device_s: float
    host_s: float = 0.0
    is_ahead: bool = False
    """Whether the host issues it right after what it issued before, ahead of the device."""


def _timing(low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, *, hook_s: float) -> _Timing:
    """Return the times of a phase; `hook_s`: the host's time of the hook that collects a gradient.

    On a GPU, device and host times may be profiled separately. Otherwise the device time includes the host's, unless
    the phase is split by collectives that the device waits for.
    """
    device, workload, recompute = low.device(rank), low.scenario.workload, low.scenario.plan.recompute
    hooks_s = hook_s * len(instance.layer.parameters) if phase == "b" else 0.0
    if phase == "f" and instance.index == 0 and low.policies.gradients == "all-reduce":
        hooks_s += device.replica_forward_s or 0.0  # DDP's forward, around the model's
    whole = low.whole_layer(instance) or instance.layer
    is_profiled = layer_profile(device, workload, whole) is not None
    sums = len(sum_positions(instance.layer, phase, recompute))
    measured_host_s = cost.measured_issue_s(
        device,
        workload,
        whole if is_profiled else instance.layer,  # a profile is of the whole layer
        phase=phase,
        batch_size=samples,
        sums=sums,
        recompute=recompute,
    )
    layer_s = _layer_s(low, rank, instance, phase, samples, issued=is_profiled or measured_host_s is None)
    if measured_host_s is not None:
        host_s = measured_host_s + slicing_host_s(low, rank, instance, phase, samples) + hooks_s
        return _Timing(layer_s, host_s, is_ahead=True)
    both_s = with_host_time(low, rank, instance, phase, samples, alone_s=layer_s) + hooks_s
    host_s = cost.issue_time_s(device, workload, instance.layer, phase=phase, sums=sums, recompute=recompute)
    if not sums or not host_s:
        return _Timing(both_s)
    device_s = _layer_s(low, rank, instance, phase, samples, issued=False)
    if host_s <= device_s:
        return _Timing(both_s)
    return _Timing(both_s - layer_s + device_s, host_s)


def beside_host(low: Lowering, device: DeviceType, *, device_s: float, host_s: float) -> dict[str, Any]:
    """Return the duration of work that takes `device_s` on a device and `host_s` on its host, as fields of a task.

    The host of a GPU issues it ahead, if the profile has separate host times. Otherwise the two run one after the
    other.
    """
    if has_host_times(device, low.scenario.workload):
        return {"duration_s": device_s, "issue": Issue(host_s, goes_on=True)}
    return {"duration_s": host_s + device_s}


def _operation_shares(events: Sequence[Event], ends: Sequence[float]) -> list[float]:
    """Return the fraction of a phase's operations in each part; one that only marks the phase's end adds none."""
    before = floor(ends[-2]) if len(ends) > 1 else -1
    last = max([before + 1, *(event.position for event in events if event.position < LAST)])
    bounds = (-1, *map(floor, ends[:-1]), last)
    return [(end - before) / (bounds[-1] + 1) for before, end in pairwise(bounds)]


def _delay_releases(events: Sequence[Event], positions: Collection[int]) -> Sequence[Event]:
    """Return a phase's memory events; what is freed at the position of a collective is freed half a position later.

    The backend may copy what a collective sends, and its caller holds that until the collective returns.
    """
    last = max((event.position for event in events), default=0)
    after = {position for position in positions if position < last}
    held = [event for event in events if event.size_bytes < 0 and event.position in after]
    if not held:
        return events
    released = [event._replace(position=event.position + 0.5) for event in held]
    others = [event for event in events if not (event.size_bytes < 0 and event.position in after)]
    return [*released, *others]


def _split(phase: str, events: Sequence[Event], scratch: float, duration_s: float, ends: Sequence[float]) -> list[Task]:
    """Return a layer's phase as parts that end at the given places; its time is divided by number of operations.

    `scratch`: workspace in bytes that each part allocates at an unknown moment.
    """
    parts = []
    inside: list[list[Event]] = [[] for _ in ends]
    for event in events:
        inside[bisect_left(ends, event.position, hi=len(ends) - 1)].append(event)
    before: float = -1
    for end, own in zip(ends, inside, strict=True):
        parts.append(
            Task(
                TaskId(PASSES[phase]),
                PHASE_NAMES[phase],
                duration_s=duration_s * (floor(end) - floor(before)) / (ends[-1] + 1) if len(ends) > 1 else duration_s,
                need=with_scratch(footprint(own), scratch),
            )
        )
        before = end
    return parts


class BackwardParts:
    """The parts of the backward in a micro-batch's list of tasks; other tasks are inserted after them."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self._index = {task.id: index for index, task in enumerate(tasks) if task.id.op == "backward"}
        self._behind: dict[int, list[Task]] = defaultdict(list)

    def without_inserted(self) -> "BackwardParts":
        """Return the same parts, before any tasks were inserted."""
        other = copy(self)
        other._behind = defaultdict(list)
        return other

    def at(self, low: Lowering, place: tuple[int, int]) -> int:
        """Return the index of the task in which the backward reaches `place` (layer, position).

        The lowering is an argument because it caches such parts: a reference to it would form a cycle, in which all
        tasks stay until a garbage collection.
        """
        layer, position = place
        instance = low.layers[layer]
        own = _backward_cuts(low, instance.layer, _completions(low).get(layer, ()))
        cuts = {
            *own,
            *sum_positions(instance.layer, "b", "none"),
            *await_positions(instance.layer, "b"),
        }
        part = sum(1 for cut in cuts if cut < position)
        while backward_id(instance, part) not in self._index:
            part -= 1
        return self._index[backward_id(instance, part)]

    def lengthen(self, index: int, duration_s: float) -> TaskId:
        """Let the task at an index take longer; return its identity."""
        task = self.tasks[index]
        self.tasks[index] = replace(task, duration_s=task.duration_s + duration_s)
        return task.id

    def insert_after(self, index: int, new: Sequence[Task]) -> None:
        """Insert tasks after a part of the backward, its collectives over ranks, and tasks inserted there before."""
        self._behind[index] += new

    def all_tasks(self) -> list[Task]:
        """Return all tasks."""
        merged: list[Task] = []
        pending: list[Task] = []
        for index, task in enumerate(self.tasks):
            if pending and task.id.op in BACKWARD:
                merged += pending
                pending = []
            merged.append(task)
            pending += self._behind.get(index, ())
        return merged + pending
