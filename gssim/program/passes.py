"""What each rank does in one step, in order: tasks lowered from a scenario in passes, one pass per policy.

Tasks are known by their label, unique within a rank and the same as in a real run's trace. A task of the compute
stream runs after the one before it; `after` names tasks of other streams that it waits for as well.

Which scenarios have the same programs: those that agree in all that lowering reads.
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
from gssim.gradient_statistics import GradientStatistics
from gssim.plan import DATA_AXES
from gssim.program.compute import compute
from gssim.program.equal_messages import neighbours
from gssim.program.flat_units import gather_flat_parameters, gather_flat_parameters_twice, push_units
from gssim.program.lowering import Lowering
from gssim.program.messages import mean_density
from gssim.program.optimizer import Tensors, optimize, persistent, persistent_tensors
from gssim.program.pipeline import held_by_stages, pipeline
from gssim.program.publish import published_density
from gssim.program.push import push_gradients
from gssim.program.rank_speed import share_compute_times, slowed_down
from gssim.program.replicated import all_reduce_gradients, keep_gradients
from gssim.program.sharded import (
    gather_parameters,
    gather_parameters_twice,
    keep_parameters,
    reduce_scatter_gradients,
)
from gssim.program.stage_boundary import stages_of
from gssim.program.task import MicroBatch, Program, Task
from gssim.scenario import Scenario, model_slice, units_of_ranks
from gssim.workload import LayerInstance, unrolled

NOT_READ = frozenset({"model", "gradients", "data"})
"""Of a workload: what is not lowered, and the model, which is known by being the same."""

_DEVICE_TYPES: TypeAdapter[Mapping[str, DeviceType]] = TypeAdapter(Mapping[str, DeviceType])


def what_lowering_reads(
    scenario: Scenario, statistics: GradientStatistics | None, shared: Shared
) -> tuple[Hashable, ...]:
    """Return a key that is equal where programs are: of the cluster nothing but devices and the backend's costs.

    How it is wired counts only where shares follow from that, which are in it.
    """
    cluster, workload, ranks = scenario.cluster, scenario.workload, scenario.ranks
    return (
        shared.once("devices", (Same(cluster), ranks), lambda: _devices(cluster, ranks)),
        cluster.backend,
        Same(workload.model),
        tuple(getattr(workload, each.name) for each in fields(workload) if each.name not in NOT_READ),
        scenario.plan,
        scenario.policies,
        scenario.batch_sizes,
        scenario.shard_shares,
        (scenario.run.steps, scenario.run.warmup_steps),
        Same(statistics),
    )


def _devices(cluster: Cluster, ranks: int) -> str:
    """Return what the first devices are, and what the backend costs, as text: equal in other clusters, too."""
    kinds = [device.type for device in cluster.devices[:ranks]]
    used = {name: cluster.device_types[name] for name in dict.fromkeys(kinds)}
    costs = cluster.backend_cost
    plain = TypeAdapter(type(costs)).dump_python(costs, mode="json") if costs else None
    return json.dumps([kinds, _DEVICE_TYPES.dump_python(used, mode="json"), plain])


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


@dataclass(frozen=True)
class Sent:
    """What a step sends, where it may depend on the data."""

    payload_bytes: Mapping[str, float]
    """By collective, of those that are uneven."""
    whole_bytes: float
    """Of those that depend on the data, all together."""
    push_density: float | None
    publish_density: float | None


class Steps:
    """The programs of a run's steps, each made when it is first asked for: what is the same in all of them, once.

    `unfolded`: every rank has a role of its own. `slowed`: by rank, how much longer it computes and updates. `shared`:
    what other scenarios have in common with this one.
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
        alike = not unfolded and not slowed and _slices_are_alike(scenario)
        self._copies = scenario.policies.tp if alike else 1
        """How many slices of the model do the same."""
        every_step: dict[object, Any] = {}
        self._parts = [
            replace(low, shared=shared or Shared(), every_step=every_step)
            for low in _parts_of_the_model(scenario, statistics, 0, scenario.policies.tp // self._copies, slowed)
        ]
        self._programs: dict[int, Program] = {}
        self._sent: dict[int, Sent] = {}

    def program(self, step: int) -> Program:
        """Return the program of a step (from the first); which one matters where push or publish are thresholded."""
        if step not in self._programs:
            self._programs[step] = self._program([low.at_step(step) for low in self._parts])
        return self._programs[step]

    def sent(self, step: int) -> Sent:
        """Return what a step sends, without its program: the first rank of each place in a node takes part in all."""
        if step not in self._sent:
            parts = [low.at_step(step) for low in self._parts]
            communications: dict[str, Communication] = {}
            if step in self._programs:
                communications = self._programs[step].communications
            else:
                for low in parts:
                    self._tasks(low, low.group[: low.places], communications)
            self._sent[step] = _sent(parts[0], communications)
        return self._sent[step]

    def first_rank(self, step: int = 0) -> tuple[tuple[Task, ...], Mapping[str, Communication]]:
        """Return the tasks of the first rank alone, and the collectives that they name."""
        low = self._parts[0].at_step(step)
        communications: dict[str, Communication] = {}
        (tasks,) = self._tasks(low, low.group[:1], communications)
        return tasks, communications

    def _program(self, parts: Sequence[Lowering]) -> Program:
        communications: dict[str, Communication] = {}
        tasks: list[tuple[Task, ...]] = []
        held: list[dict[str, float]] = []
        tensors: list[Callable[[], Tensors]] = []
        roles = np.zeros(self.scenario.ranks, np.int64)
        for low in parts:
            by_data = neighbours(low) if low.sends_by_data and not self.unfolded else None
            found, representatives = low.roles(unfolded=self.unfolded, by_data=by_data)
            for copy in range(self._copies):
                roles[np.array(low.group) + copy] = found + len(tasks)
            tasks += self._tasks(low, representatives, communications)
            for rank in representatives:
                held.append(persistent(low, rank) | (held_by_stages(low, rank) if low.stages else {}))
                tensors.append(partial(persistent_tensors, low, rank, held[-1]))
        return Program(
            tasks=tuple(tasks),
            communications=communications,
            persistent=tuple(held),
            push_density=_push_density(parts[0]),
            publish_density=_publish_density(parts[0]),
            roles=tuple(roles.tolist()),
            tensors=tuple(tensors),
        )

    def _tasks(
        self, low: Lowering, ranks: Sequence[int], communications: dict[str, Communication]
    ) -> list[tuple[Task, ...]]:
        """Return the tasks of some ranks, and note the collectives that they name."""
        alike: dict[tuple[object, ...], list[Task]] = {}
        alone = len(self._parts) == 1
        return [
            tuple(_named(low, _tasks(low, rank, alike), communications, alone=alone, copies=self._copies))
            for rank in ranks
        ]


def _sent(low: Lowering, communications: Mapping[str, Communication]) -> Sent:
    uneven = {name: each for name, each in communications.items() if each.pair_bytes or each.part_bytes}
    payloads = {name: each.payload_bytes for name, each in uneven.items()}
    return Sent(
        payloads,
        sum(payloads[name] for name, each in uneven.items() if each.data_dependent),
        _push_density(low),
        _publish_density(low),
    )


def _push_density(low: Lowering) -> float | None:
    return mean_density(low) if low.scenario.plan.push.threshold is not None else None


def _publish_density(low: Lowering) -> float | None:
    return published_density(low) if low.thresholds_publish else None


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


def _slices_are_alike(scenario: Scenario) -> bool:
    """Return whether all ranks of each tensor group hold as much, on devices of one type: one then stands for all."""
    ranks, types = scenario.policies.tp, [device.type for device in scenario.cluster.devices[: scenario.ranks]]
    sliced = scenario.workload.model.sliced_layers if ranks > 1 else ()
    same = all(len(set(units_of_ranks(layer.units, scenario.slice_shares))) == 1 for layer in sliced if layer.units)
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
    held = unrolled(model_slice(scenario.workload.model, scenario.slice_shares, part))
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
            found = _computed(low, rank, micro_batch)
            found = COMMUNICATE[policies.gradients, sharded](low, rank, found, micro_batch)
            alike[key] = HOLD[policies.parameters, pushes](low, rank, found)
        alike[whole] = _suffixed(low, alike[key], micro_batch.suffix)
    return alike[whole]


def _computed(low: Lowering, rank: int, micro_batch: MicroBatch) -> list[Task]:
    """Return forward and backward of a micro-batch; ranks that do the same share them, in all steps."""
    if low.policies.tp > 1:  # the sums over ranks are noted as they are found
        return compute(low, rank, micro_batch)
    own = low.owned_ranges[rank] if low.deals_out_layers else ()
    how = (low.samples(rank, micro_batch), micro_batch.accumulates, micro_batch.leaves)
    stages = tuple(stage.number for stage in low.stages)
    key = ("computed", low.scenario.cluster.devices[rank].type, own, stages, *how)
    if key not in low.every_step:
        low.every_step[key] = compute(low, rank, micro_batch)
    return list(low.every_step[key])


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
        found.append(task.renamed(task.label + suffix, name, after))
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
        found.append(task if alone else task.renamed(task.label, name, task.after))
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
