"""What each rank does in one step, in order: tasks lowered from a scenario in passes, one pass per policy.

Tasks are known by their label, unique within a rank and the same as in a real run's trace. A task of the compute
stream runs after the one before it; `after` names tasks of other streams that it waits for as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from gssim.collectives import Communication
from gssim.gradients import GradientStatistics
from gssim.mesh import DATA_AXES
from gssim.program.borders import stages_of
from gssim.program.compute import compute
from gssim.program.flat import gather_flat_parameters, gather_flat_parameters_twice, push_units
from gssim.program.lowering import Bucket, Lowering, MicroBatch
from gssim.program.messages import mean_density
from gssim.program.optimizer import optimize, persistent
from gssim.program.paces import share_compute_times, slowed_down
from gssim.program.pipeline import held_by_stages, pipeline
from gssim.program.published import published_density
from gssim.program.push import push_gradients
from gssim.program.replicated import all_reduce_gradients, keep_gradients
from gssim.program.sharded import (
    gather_parameters,
    gather_parameters_twice,
    keep_parameters,
    reduce_scatter_gradients,
)
from gssim.program.task import Program, Task
from gssim.program.tensors import Tensors, persistent_tensors
from gssim.program.units import Unit, units
from gssim.scenario import Scenario
from gssim.slices import held_model, units_held
from gssim.workload import LayerInstance, unrolled

__all__ = ["Bucket", "Lowering", "Program", "Task", "Unit", "lower", "units"]


Pass = Callable[[Lowering, int, list[Task], MicroBatch], list[Task]]
COMMUNICATE: dict[tuple[str, bool], Pass] = {
    ("local", False): keep_gradients,
    ("all-reduce", False): all_reduce_gradients,
    ("reduce-scatter", True): reduce_scatter_gradients,
    ("push", False): push_gradients,
    ("push", True): push_units,
}
"""By what happens to gradients, and whether parameters are sharded."""
HOLD: dict[tuple[str, bool], Callable[[Lowering, int, list[Task]], list[Task]]] = {
    ("replicated", False): keep_parameters,
    ("replicated", True): keep_parameters,
    ("gathered", False): gather_parameters,
    ("gathered", True): gather_flat_parameters,
    ("sharded", False): gather_parameters_twice,
    ("sharded", True): gather_flat_parameters_twice,
}
"""By how parameters are held, and whether gradients are pushed."""


def lower(
    scenario: Scenario,
    statistics: GradientStatistics | None = None,
    *,
    step: int = 0,
    unfolded: bool = False,
    slowed: Mapping[int, float] | None = None,
) -> Program:
    """Return the program of one training step; `step` (from the first) matters where push or publish are thresholded.

    `unfolded`: every rank has a role of its own. `slowed`: by rank, how much longer it computes and updates.
    """
    slowed = slowed or {}
    communications: dict[str, Communication] = {}
    tasks: list[tuple[Task, ...]] = []
    held: list[dict[str, float]] = []
    tensors: list[Callable[[], Tensors]] = []
    roles = np.zeros(scenario.ranks, np.int64)
    copies = scenario.policies.tp if not unfolded and not slowed and _slices_are_alike(scenario) else 1
    parts = list(_parts_of_the_model(scenario, statistics, step, scenario.policies.tp // copies, slowed))
    for low in parts:
        found, representatives = low.roles(unfolded=unfolded)
        for copy in range(copies):
            roles[np.array(low.group) + copy] = found + len(tasks)
        alike: dict[tuple[object, ...], list[Task]] = {}
        for rank in representatives:
            found_tasks = _tasks(low, rank, alike)
            tasks.append(tuple(_named(low, found_tasks, communications, alone=len(parts) == 1, copies=copies)))
            held.append(persistent(low, rank) | (held_by_stages(low, rank) if low.stages else {}))
            tensors.append(partial(persistent_tensors, low, rank, held[-1]))
    return Program(
        tasks=tuple(tasks),
        communications=communications,
        persistent=tuple(held),
        push_density=mean_density(parts[0]) if scenario.plan.push.threshold is not None else None,
        publish_density=published_density(parts[0]) if parts[0].thresholds_publish else None,
        roles=tuple(roles.tolist()),
        tensors=tuple(tensors),
    )


def _slices_are_alike(scenario: Scenario) -> bool:
    """Return whether all ranks of each tensor group hold as much, on devices of one type: one then stands for all."""
    ranks, types = scenario.policies.tp, [device.type for device in scenario.cluster.devices[: scenario.ranks]]
    sliced = scenario.workload.model.sliced_layers if ranks > 1 else ()
    same = all(len(set(units_held(layer.units, scenario.slice_shares))) == 1 for layer in sliced if layer.units)
    return ranks > 1 and same and all(len(set(types[i : i + ranks])) == 1 for i in range(0, len(types), ranks))


def _parts_of_the_model(
    scenario: Scenario, statistics: GradientStatistics | None, step: int, slices: int, slowed: Mapping[int, float]
) -> Iterator[Lowering]:
    """Give a lowering for each part of the model: the ranks that hold the same part share one. Of slices, the first."""
    mesh = scenario.policies.mesh
    by_part = [stages_of(_held_stages(scenario, part)) if mesh.pp > 1 else () for part in range(slices)]
    for place in range(mesh.pp):
        for part, stages in enumerate(by_part):
            group = mesh.group(place * mesh.data_ranks * mesh.tp + part, *DATA_AXES)
            yield Lowering(
                scenario,
                statistics,
                step,
                group,
                stages=stages[place :: mesh.pp],
                all_stages=stages,
                tensor_part=part,
                slowed=slowed,
            )


def _held_stages(scenario: Scenario, part: int) -> Sequence[Sequence[LayerInstance]]:
    """Return the layers of every stage of a pipeline; where blocks are cut, as the ranks with that part hold them."""
    if scenario.policies.tp == 1:
        return scenario.stages
    held = unrolled(held_model(scenario.workload.model, scenario.slice_shares, part))
    return [[held[instance.index] for instance in stage] for stage in scenario.stages]


def _tasks(low: Lowering, rank: int, alike: dict[tuple[object, ...], list[Task]]) -> list[Task]:
    """Return a rank's step; `alike`: what ranks have done that compute alike, who may still own unequal shards."""
    if low.stages:
        return optimize(low, rank, pipeline(low, rank, partial(_micro_batch, rank=rank, alike=alike)))
    kind = _kind(low, rank)
    if kind not in alike:
        found = (_micro_batch(low, micro_batch, rank=rank, alike=alike) for micro_batch in low.micro_batches)
        alike[kind] = [task for tasks in found for task in tasks]
    tasks = slowed_down(optimize(low, rank, alike[kind]), low.slowed.get(rank, 1.0))
    return [*tasks, *share_compute_times(low)]


def _kind(low: Lowering, rank: int) -> tuple[object, ...]:
    """Return what tells ranks apart that do not compute alike."""
    own = low.owned_ranges[rank] if low.deals_out_layers else low.scenario.policies.gradients == "push" and rank
    stages = tuple(stage.number for stage in low.stages)
    return (low.scenario.cluster.devices[rank].type, low.batch_sizes[rank], own, stages)


def _micro_batch(
    low: Lowering, micro_batch: MicroBatch, *, rank: int, alike: dict[tuple[object, ...], list[Task]]
) -> list[Task]:
    """Return a micro-batch of a rank's step: the passes, one after another."""
    policies, kind = low.scenario.policies, _kind(low, rank)
    whole = (kind, micro_batch)
    if whole not in alike:
        pushes, sharded = policies.gradients == "push", policies.parameters != "replicated"
        alone = pushes and low.push.selects and micro_batch.index  # what is sent differs
        key = (kind, low.samples(rank, micro_batch), micro_batch.first, micro_batch.leaves, alone)
        if key not in alike:
            found = compute(low, rank, micro_batch)
            found = COMMUNICATE[policies.gradients, sharded](low, rank, found, micro_batch)
            alike[key] = HOLD[policies.parameters, pushes](low, rank, found)
        alike[whole] = _suffixed(low, alike[key], micro_batch.suffix)
    return alike[whole]


def _suffixed(low: Lowering, tasks: list[Task], suffix: str) -> list[Task]:
    """Return the tasks of a micro-batch with its suffix on every label, and on the collectives that they name."""
    if not suffix:
        return tasks
    found = []
    for task in tasks:
        name = task.communication and task.communication + suffix
        if name and task.communication:
            low.communications[name] = low.communications[task.communication]
        after = tuple(label + suffix for label in task.after)
        found.append(replace(task, label=task.label + suffix, communication=name, after=after))
    return found


def _named(
    low: Lowering, tasks: list[Task], communications: dict[str, Communication], *, alone: bool, copies: int
) -> list[Task]:
    """Return tasks whose collectives bear names that tell groups apart, and note these collectives.

    `alone`: there is one group only, so that their labels do. `copies`: how many slices of the model do the same.
    """
    found = []
    for task in tasks:
        if task.communication is None:
            found.append(task)
            continue
        communication = low.communications[task.communication]
        name = task.communication if alone else f"{task.communication} of {_ranks_text(communication.group)}"
        if name not in communications:
            communications[name] = _in_every_slice(communication, low.policies.tp, copies)
        found.append(task if alone else replace(task, communication=name))
    return found


def _in_every_slice(communication: Communication, slices: int, copies: int) -> Communication:
    """Return a collective of ranks that hold the same slice, carried out by those of every other slice as well."""
    if copies == 1 or len({rank % slices for rank in communication.group}) > 1:
        return communication
    groups = [tuple(rank + copy for rank in group) for copy in range(copies) for group in communication.groups]
    return replace(communication, beside=tuple(groups[1:]))


def _ranks_text(group: Sequence[int]) -> str:
    if isinstance(group, range) and len(group) > 2:
        return f"ranks {group[0]}-{group[-1]}" + (f" by {group.step}" if group.step > 1 else "")
    return f"ranks {', '.join(map(str, group))}"
