"""Lowers a scenario to the program of a training step: composes the passes that produce each rank's tasks.

One pass per policy: forward and backward (`compute`), reduction of gradients, holding of parameters, update and
publish, pipeline schedule. Tasks are identified by their label, which is unique within a rank and the same as in a real
run's trace. A task of the compute stream runs after the one before it; `after` names tasks of other streams that it
waits for as well.

`lowering_key` is the cache key of a program: scenarios that agree in all that lowering reads have equal programs.
"""

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from gssim.cache import Same, Shared
from gssim.cluster import Cluster, DeviceType
from gssim.collectives import Communication
from gssim.plan import DATA_AXES
from gssim.program.compute import compute
from gssim.program.equal_messages import message_classes
from gssim.program.flat_units import gather_flat_parameters, gather_flat_parameters_twice, push_units
from gssim.program.lowering import Lowering
from gssim.program.messages import mean_push_density
from gssim.program.optimizer import Tensors, optimize, persistent_bytes, persistent_tensors
from gssim.program.pipeline import pipeline, stage_buffers
from gssim.program.publish import mean_publish_density
from gssim.program.push import push_gradients
from gssim.program.replicated import all_reduce_gradients, keep_gradients
from gssim.program.sharded import (
    gather_parameters,
    gather_parameters_twice,
    keep_parameters,
    reduce_scatter_gradients,
)
from gssim.program.stage_boundary import stages_of
from gssim.program.task import MicroBatch, Program, Task
from gssim.result import COMPUTE_PHASES, UPDATE_PHASES
from gssim.scenario import Scenario, model_slice, units_of_ranks
from gssim.workload import LayerInstance, unrolled
from gssim.workload.gradient_statistics import GradientStatistics

NOT_READ = frozenset({"model", "gradients", "data"})
"""Fields of a workload that lowering does not read, and the model, which is compared by identity."""

_DEVICE_TYPES: TypeAdapter[Mapping[str, DeviceType]] = TypeAdapter(Mapping[str, DeviceType])


def lowering_key(scenario: Scenario, statistics: GradientStatistics | None, shared: Shared) -> tuple[Hashable, ...]:
    """Return a key that is equal for scenarios with equal programs.

    Of the cluster it holds only the devices and the backend's costs. Wiring counts only where shard sizes are derived
    from it, and these are in the key.
    """
    cluster, workload, ranks = scenario.cluster, scenario.workload, scenario.ranks
    return (
        shared.once("devices", (Same(cluster), ranks), lambda: _devices(cluster, ranks)),
        cluster.backend,
        Same(workload.model),
        tuple(getattr(workload, field.name) for field in fields(workload) if field.name not in NOT_READ),
        scenario.plan,
        scenario.policies,
        scenario.batch_sizes,
        scenario.shard_shares,
        (scenario.run.steps, scenario.run.warmup_steps),
        Same(statistics),
    )


def _devices(cluster: Cluster, ranks: int) -> str:
    """Return the device types of the first ranks and the costs of the backend as text, comparable across clusters."""
    kinds = [device.type for device in cluster.devices[:ranks]]
    used = {name: cluster.device_types[name] for name in dict.fromkeys(kinds)}
    costs = cluster.backend_cost
    plain = TypeAdapter(type(costs)).dump_python(costs, mode="json") if costs else None
    return json.dumps([kinds, _DEVICE_TYPES.dump_python(used, mode="json"), plain])


Pass = Callable[[Lowering, int, list[Task], MicroBatch], list[Task]]
REDUCE_GRADIENTS: dict[tuple[str, bool], Pass] = {
    ("local", False): keep_gradients,
    ("all-reduce", False): all_reduce_gradients,
    ("reduce-scatter", True): reduce_scatter_gradients,
    ("push", False): push_gradients,
    ("push", True): push_units,
}
"""Pass that reduces gradients, by gradient policy and whether parameters are sharded."""
HOLD_PARAMETERS: dict[tuple[str, bool], Callable[[Lowering, int, list[Task]], list[Task]]] = {
    ("replicated", False): keep_parameters,
    ("replicated", True): keep_parameters,
    ("gathered", False): gather_parameters,
    ("gathered", True): gather_flat_parameters,
    ("sharded", False): gather_parameters_twice,
    ("sharded", True): gather_flat_parameters_twice,
}
"""Pass that keeps or gathers parameters, by parameter policy and whether gradients are pushed."""


@dataclass(frozen=True)
class StepTraffic:
    """Data-dependent traffic and densities of one step."""

    payload_bytes: Mapping[str, float]
    """Payload of each uneven collective, by name."""
    whole_bytes: float
    """Sum over all data-dependent collectives."""
    push_density: float | None
    publish_density: float | None


class Steps:
    """Programs of a run's steps, lowered on first use; everything that is equal in all steps is computed once.

    `unfolded`: every rank has a role of its own. `slowed`: compute and update time of a rank over that of its device,
    by rank. `shared`: cache shared with other scenarios.
    """

    def __init__(
        self,
        scenario: Scenario,
        statistics: GradientStatistics | None = None,
        *,
        unfolded: bool = False,
        slowed: Mapping[int, float] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.scenario, self.unfolded, slowed = scenario, unfolded, slowed or {}
        alike = not unfolded and not slowed and _slices_are_equal(scenario)
        self._copies = scenario.policies.tp if alike else 1
        """Number of slices of the model that one lowering stands for."""
        run_memo: dict[object, Any] = {}
        self._lowerings = [
            replace(low, shared=shared or Shared(), run_memo=run_memo)
            for low in _lowerings(scenario, statistics, 0, scenario.policies.tp // self._copies, slowed)
        ]
        self._programs: dict[int, Program] = {}
        self._traffic: dict[int, StepTraffic] = {}

    def program(self, step: int) -> Program:
        """Return the program of a step (counted from 0); steps differ only where push or publish are thresholded."""
        if step not in self._programs:
            self._programs[step] = self._program([low.at_step(step) for low in self._lowerings])
        return self._programs[step]

    def traffic(self, step: int) -> StepTraffic:
        """Return the traffic of a step without lowering its whole program.

        The first rank of each place in a node takes part in every collective.
        """
        if step not in self._traffic:
            lowerings = [low.at_step(step) for low in self._lowerings]
            communications: dict[str, Communication] = {}
            if step in self._programs:
                communications = self._programs[step].communications
            else:
                for low in lowerings:
                    self._tasks(low, low.group[: low.places], communications)
            uneven = [(name, each) for name, each in communications.items() if each.pair_bytes or each.part_bytes]
            payloads = {name: each.payload_bytes for name, each in uneven}
            self._traffic[step] = StepTraffic(
                payloads,
                sum(payloads[name] for name, each in uneven if each.data_dependent),
                _push_density(lowerings[0]),
                _publish_density(lowerings[0]),
            )
        return self._traffic[step]

    def first_rank(self, step: int = 0) -> tuple[tuple[Task, ...], Mapping[str, Communication]]:
        """Return the tasks of the first rank alone, and the collectives that they name."""
        low = self._lowerings[0].at_step(step)
        communications: dict[str, Communication] = {}
        (tasks,) = self._tasks(low, low.group[:1], communications)
        return tasks, communications

    def _program(self, lowerings: Sequence[Lowering]) -> Program:
        communications: dict[str, Communication] = {}
        tasks: list[tuple[Task, ...]] = []
        persistent: list[dict[str, float]] = []
        tensors: list[Callable[[], Tensors]] = []
        roles = np.zeros(self.scenario.ranks, np.int64)
        for low in lowerings:
            message_class = message_classes(low) if low.sends_by_data and not self.unfolded else None
            role_of_rank, representatives = low.roles(unfolded=self.unfolded, by_data=message_class)
            for copy in range(self._copies):
                roles[np.array(low.group) + copy] = role_of_rank + len(tasks)
            tasks += self._tasks(low, representatives, communications)
            for rank in representatives:
                persistent.append(persistent_bytes(low, rank) | (stage_buffers(low, rank) if low.stages else {}))
                tensors.append(partial(persistent_tensors, low, rank, persistent[-1]))
        return Program(
            tasks=tuple(tasks),
            communications=communications,
            persistent=tuple(persistent),
            push_density=_push_density(lowerings[0]),
            publish_density=_publish_density(lowerings[0]),
            roles=tuple(roles.tolist()),
            tensors=tuple(tensors),
        )

    def _tasks(
        self, low: Lowering, ranks: Sequence[int], communications: dict[str, Communication]
    ) -> list[tuple[Task, ...]]:
        """Return the tasks of some ranks, and record the collectives that they name in `communications`."""
        alike: dict[tuple[object, ...], list[Task]] = {}
        alone = len(self._lowerings) == 1
        return [
            tuple(_with_group_names(low, _tasks(low, rank, alike), communications, alone=alone, copies=self._copies))
            for rank in ranks
        ]


def _push_density(low: Lowering) -> float | None:
    return mean_push_density(low) if low.scenario.plan.push.threshold is not None else None


def _publish_density(low: Lowering) -> float | None:
    return mean_publish_density(low) if low.thresholds_publish else None


def lower(
    scenario: Scenario,
    statistics: GradientStatistics | None = None,
    *,
    step: int = 0,
    unfolded: bool = False,
    slowed: Mapping[int, float] | None = None,
) -> Program:
    """Return the program of one training step; see `Steps`."""
    return Steps(scenario, statistics, unfolded=unfolded, slowed=slowed).program(step)


def _slices_are_equal(scenario: Scenario) -> bool:
    """Return whether the ranks of each tensor group hold equal slices on devices of one type, so that one stands for
    all.
    """
    ranks, types = scenario.policies.tp, [device.type for device in scenario.cluster.devices[: scenario.ranks]]
    sliced = scenario.workload.model.sliced_layers if ranks > 1 else ()
    same = all(len(set(units_of_ranks(layer.units, scenario.slice_shares))) == 1 for layer in sliced if layer.units)
    return ranks > 1 and same and all(len(set(types[i : i + ranks])) == 1 for i in range(0, len(types), ranks))


def _lowerings(
    scenario: Scenario, statistics: GradientStatistics | None, step: int, slices: int, slowed: Mapping[int, float]
) -> Iterator[Lowering]:
    """Yield a lowering for each part of the model, shared by the ranks that hold it; of tensor slices, the first
    `slices`.
    """
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
    """Return the layers of every stage of a pipeline; where blocks are sliced, as held by the ranks with that slice."""
    if scenario.policies.tp == 1:
        return scenario.stages
    held = unrolled(model_slice(scenario.workload.model, scenario.slice_shares, part))
    return [[held[instance.index] for instance in stage] for stage in scenario.stages]


def _tasks(low: Lowering, rank: int, alike: dict[tuple[object, ...], list[Task]]) -> list[Task]:
    """Return the tasks of a rank's step; `alike` caches those of ranks that compute the same, by key."""
    if low.stages:
        return optimize(low, rank, pipeline(low, rank, partial(_micro_batch, rank=rank, alike=alike)))
    kind = _compute_key(low, rank)
    if kind not in alike:
        micro_batches = (_micro_batch(low, micro_batch, rank=rank, alike=alike) for micro_batch in low.micro_batches)
        alike[kind] = [task for tasks in micro_batches for task in tasks]
    tasks, ratio = optimize(low, rank, alike[kind]), low.slowed.get(rank, 1.0)
    if ratio != 1:
        tasks = [replace(t, duration_s=ratio * t.duration_s) if t.phase in SLOWED_PHASES else t for t in tasks]
    return [*tasks, *_share_compute_times(low)]


SLOWED_PHASES = (*COMPUTE_PHASES, *UPDATE_PHASES)
"""Phases whose tasks take longer on a slow rank."""
REPORTED_BYTES = 16
"""Each rank reports two float64: the seconds of its forward and backward, and those of its update."""


def _share_compute_times(low: Lowering) -> list[Task]:
    """Return the all-gather of compute times that ends a step whose batch split and shard sizes are rebalanced."""
    if not low.scenario.plan.shares.replan:
        return []
    name = "share compute times"
    low.communications[name] = Communication("all-gather", low.group, REPORTED_BYTES * len(low.group))
    return [Task(name, "exposed_communication", communication=name)]


def _compute_key(low: Lowering, rank: int) -> tuple[object, ...]:
    """Return a key that is equal for ranks whose forward, backward and communication tasks are equal."""
    own = low.owned_ranges[rank] if low.assigns_layers else low.scenario.policies.gradients == "push" and rank
    stages = tuple(stage.number for stage in low.stages)
    return (low.scenario.cluster.devices[rank].type, low.batch_sizes[rank], own, stages)


def _micro_batch(
    low: Lowering, micro_batch: MicroBatch, *, rank: int, alike: dict[tuple[object, ...], list[Task]]
) -> list[Task]:
    """Return the tasks of one micro-batch of a rank: all passes but the update."""
    policies, kind = low.scenario.policies, _compute_key(low, rank)
    full_key = (kind, micro_batch)
    if full_key not in alike:
        pushes, sharded = policies.gradients == "push", policies.parameters != "replicated"
        unique_messages = pushes and low.push.selects and micro_batch.index  # each micro-batch sends other entries
        key = (kind, low.samples(rank, micro_batch), micro_batch.first, micro_batch.sends_gradients, unique_messages)
        if key not in alike:
            new_tasks = _forward_and_backward(low, rank, micro_batch)
            new_tasks = REDUCE_GRADIENTS[policies.gradients, sharded](low, rank, new_tasks, micro_batch)
            alike[key] = HOLD_PARAMETERS[policies.parameters, pushes](low, rank, new_tasks)
        alike[full_key] = _with_suffix(low, alike[key], micro_batch.suffix)
    return alike[full_key]


def _forward_and_backward(low: Lowering, rank: int, micro_batch: MicroBatch) -> list[Task]:
    """Return forward and backward of a micro-batch, cached over ranks and steps."""
    if low.policies.tp > 1:  # not cached: `compute` records the sums over ranks as a side effect
        return compute(low, rank, micro_batch)
    own = low.owned_ranges[rank] if low.assigns_layers else ()
    settings = (low.samples(rank, micro_batch), micro_batch.accumulates, micro_batch.sends_gradients)
    stages = tuple(stage.number for stage in low.stages)
    key = ("computed", low.scenario.cluster.devices[rank].type, own, stages, *settings)
    if key not in low.run_memo:
        low.run_memo[key] = compute(low, rank, micro_batch)
    return list(low.run_memo[key])


def _with_suffix(low: Lowering, tasks: list[Task], suffix: str) -> list[Task]:
    """Return tasks with `suffix` on every label, dependency and collective name."""
    if not suffix:
        return tasks
    renamed = []
    for task in tasks:
        name = task.communication and task.communication + suffix
        if name and task.communication:
            low.communications[name] = low.communications[task.communication]
        after = tuple(label + suffix for label in task.after)
        renamed.append(task.renamed(task.label + suffix, name, after))
    return renamed


def _with_group_names(
    low: Lowering, tasks: list[Task], communications: dict[str, Communication], *, alone: bool, copies: int
) -> list[Task]:
    """Return tasks whose collectives have names that are unique over all groups, and record these collectives.

    `alone`: there is one group only, so that labels are unique already. `copies`: number of equal slices of the model.
    """
    renamed = []
    for task in tasks:
        if task.communication is None:
            renamed.append(task)
            continue
        communication = low.communications[task.communication]
        name = task.communication if alone else f"{task.communication} of {_ranks_text(communication.group)}"
        if name not in communications:
            communications[name] = _with_copies(communication, low.policies.tp, copies)
        renamed.append(task if alone else task.renamed(task.label, name, task.after))
    return renamed


def _with_copies(communication: Communication, slices: int, copies: int) -> Communication:
    """Return a collective of ranks that hold one slice, repeated for the ranks of every other equal slice."""
    if copies == 1 or len({rank % slices for rank in communication.group}) > 1:
        return communication
    groups = [tuple(rank + copy for rank in group) for copy in range(copies) for group in communication.groups]
    return replace(communication, beside=tuple(groups[1:]))


def _ranks_text(group: Sequence[int]) -> str:
    if isinstance(group, range) and len(group) > 2:
        return f"ranks {group[0]}-{group[-1]}" + (f" by {group.step}" if group.step > 1 else "")
    return f"ranks {', '.join(map(str, group))}"
