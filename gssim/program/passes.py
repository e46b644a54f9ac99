"""Lowers a scenario to the program of a training step: composes the passes that produce each rank's tasks.

There is one pass per policy: forward and backward (`compute`), reduction of gradients, holding of parameters, update
and publish, pipeline schedule. Each task has an identity (`TaskId`) that is unique within its rank; its label is the
same as in a real run's trace. A task of the compute stream runs after the previous task of that stream; `after` names
tasks of other streams that it also waits for.

`lowering_key` is the cache key of a program: scenarios that agree in everything that lowering reads have equal
programs.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from gssim.cluster import Cluster, DeviceType
from gssim.collectives import Communication
from gssim.execution.cache import Same, Shared
from gssim.plan import REPLICA_AXES
from gssim.plan.plan import ShareRules
from gssim.program.collective_names import Named
from gssim.program.compute import compute
from gssim.program.equal_messages import message_classes
from gssim.program.flat_units import gather_flat_parameters, push_units
from gssim.program.lowering import Lowering, layer_groups, once_a_run
from gssim.program.messages import in_order, is_thresholded, mean_push_density, push_totals, sent_ratios
from gssim.program.optimizer import Tensors, optimize, persistent_bytes, persistent_tensors
from gssim.program.pipeline import Scheduled, pipeline, replicas_of, stage_buffers
from gssim.program.publish import mean_publish_density, publish_ratios, published_bytes
from gssim.program.push import estimates_thresholds, push_gradients
from gssim.program.replicated import all_reduce_gradients, keep_gradients
from gssim.program.ring import gathering_exchange, ring_exchange
from gssim.program.sharded import (
    Gathered,
    gather_parameters,
    keep_parameters,
    reduce_scatter_gradients,
    run_stage,
)
from gssim.program.stage_boundary import Stage, stages_of
from gssim.program.task import (
    ELEMENTS_PER_TASK,
    Collectives,
    Issue,
    MicroBatch,
    Outline,
    Parts,
    Program,
    Task,
    TaskId,
    collective_task,
    tasks_of,
    with_ids,
)
from gssim.program.tensor_slices import CONTEXT_OPERATIONS
from gssim.result import COMPUTE_PHASES, UPDATE_PHASES
from gssim.scenario import (
    Scenario,
    divided_entries,
    held_experts,
    held_layers,
    held_slice,
    routes_parts,
    rows_of_ranks,
    units_of_ranks,
)
from gssim.workload import LayerInstance, unrolled
from gssim.workload.gradient_statistics import GradientStatistics

NOT_READ = frozenset({"model", "gradients", "data"})
"""Fields of a workload that are not part of `lowering_key`: lowering does not read them, or they are compared by
identity (the model)."""

_DEVICE_TYPES: TypeAdapter[Mapping[str, DeviceType]] = TypeAdapter(Mapping[str, DeviceType])


def lowering_key(
    scenario: Scenario,
    statistics: GradientStatistics | None,
    shared: Shared,
    *,
    any_count: bool = False,
    any_shares: bool = False,
    any_threshold: bool = False,
) -> tuple[Hashable, ...]:
    """Return a cache key that is equal for scenarios with equal programs.

    Of the cluster, the key holds only the devices and the backend's costs. Wiring affects a program only through shard
    sizes that are derived from it, and these are in the key. `any_count`: the key does not hold the number of
    micro-batches, nor the samples; `any_shares`: nor the sizes of the ranks' parts of the batch, and of their shards;
    `any_threshold`: nor the values of the thresholds of pushes and publications.
    """
    cluster, workload, plan, ranks = scenario.cluster, scenario.workload, scenario.plan, scenario.ranks
    not_read = NOT_READ | {"global_batch_size"} if any_count else NOT_READ
    unasked: dict[str, Any] = {"micro_batches": 1} if any_count else {}
    unasked |= {"shares": ShareRules()} if any_shares else {}
    if any_threshold:
        selecting = {name: each for name, each in (("push", plan.push), ("publish", plan.publish)) if each.selects}
        unasked |= {name: replace(each, threshold=0.5) for name, each in selecting.items()}
    return (
        shared.once("devices", (Same(cluster), ranks), lambda: _devices(cluster, ranks)),
        cluster.backend,
        Same(workload.model),
        tuple(getattr(workload, field.name) for field in fields(workload) if field.name not in not_read),
        replace(plan, **unasked) if unasked else plan,
        scenario.policies,
        () if any_count else scenario.batch_sizes,
        () if any_shares else scenario.shard_shares,
        (scenario.run.steps, scenario.run.warmup_steps),
        Same(statistics),
        (cluster.host, tuple(device.host for device in cluster.devices[:ranks])) if plan.offload else None,
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
    ("periodic", False): keep_gradients,
    ("all-reduce", False): all_reduce_gradients,
    ("reduce-scatter", True): reduce_scatter_gradients,
    ("push", False): push_gradients,
    ("push", True): push_units,
}
"""Pass that reduces gradients, by gradient policy and whether parameters are sharded."""
HOLD_PARAMETERS: dict[tuple[str, bool], Callable[[Lowering, int, list[Task]], list[Task]]] = {
    ("replicated", False): keep_parameters,
    ("replicated", True): keep_parameters,
    ("gathered", False): partial(gather_parameters, twice=False),
    ("gathered", True): partial(gather_flat_parameters, twice=False),
    ("sharded", False): partial(gather_parameters, twice=True),
    ("sharded", True): partial(gather_flat_parameters, twice=True),
}
"""Pass that keeps or gathers parameters, by parameter policy and whether gradients are pushed."""


@dataclass(frozen=True)
class StepTraffic:
    """Traffic and densities of one step, as far as they depend on the data."""

    payload_bytes: Mapping[TaskId, float]
    """Payload of each uneven collective, in bytes."""
    whole_bytes: float
    """Sum of the payloads of all data-dependent collectives."""
    push_density: float | None
    publish_density: float | None


class Steps:
    """Programs of a run's steps, lowered on first use. Whatever is equal in all steps is computed once.

    `unfolded`: give every rank a role of its own. `slowed`: a rank's compute and update time relative to its device's,
    by rank. `slowed_steps`: the same for each step of a period, where a program covers a whole period. `shared`: a
    cache shared with other scenarios. `for_memory`: the programs have only what decides the ranks' memory, without
    the messages between pipeline stages; they cannot be simulated.
    """

    def __init__(
        self,
        scenario: Scenario,
        statistics: GradientStatistics | None = None,
        *,
        unfolded: bool = False,
        slowed: Mapping[int, float] | None = None,
        slowed_steps: Sequence[Mapping[int, float]] = (),
        shared: Shared | None = None,
        for_memory: bool = False,
    ) -> None:
        self.scenario, self.unfolded, slowed = scenario, unfolded, slowed or {}
        alike = not (unfolded or slowed or any(slowed_steps)) and _slices_are_equal(scenario)
        self._copies = scenario.policies.tp if alike else 1
        """Number of tensor slices that one lowering represents."""
        shared = shared or Shared()
        self._lowerings = [
            replace(low, shared=shared, slowed_steps=slowed_steps, for_memory=for_memory)
            for low in _lowerings(scenario, statistics, 0, scenario.policies.tp // self._copies, slowed, shared)
        ]
        self._forget()

    def _forget(self) -> None:
        """Drop the programs and traffic of all steps."""
        self._programs: dict[int, Program] = {}
        self._traffic: dict[int, StepTraffic] = {}
        self._first_equal: dict[tuple[Hashable, ...], int] = {}
        """First requested step with each `step_key`."""
        self._equal: dict[int, int] = {}
        """For each requested step, the first one with an equal program."""
        self._latest: tuple[int, Sequence[Lowering]] | None = None
        """The step requested last, and its lowerings with their cached values."""
        self._sent_bytes: dict[int, float] = {}
        self._uneven: dict[bool, tuple[Mapping[TaskId, float], AbstractSet[TaskId]]] = {}
        """For steps with or without thresholding: payloads of the uneven collectives, and which depend on the data."""

    def under(self, scenario: Scenario, statistics: GradientStatistics | None) -> "Steps":
        """Return the steps of a scenario that differs, in what lowering reads, only in thresholds or statistics.

        They share all cached values that depend on neither.
        """
        other = copy(self)
        other.scenario, other._lowerings = scenario, [low.under(scenario, statistics) for low in self._lowerings]
        other._forget()
        return other

    def program(self, step: int) -> Program:
        """Return the program of a step; steps are counted from 0 and include the warm-up.

        Steps differ only where push or publish are thresholded, or where parameters are synchronized periodically.
        Where fragments are synchronized, the program is that of a whole period, whatever the step.
        """
        first = self.first_equal(step)
        if first not in self._programs:
            self._programs[first] = self._program(self._at(first))
        return self._programs[first]

    def first_equal(self, step: int) -> int:
        """Return the first of the steps requested so far whose program equals that of this step."""
        if step not in self._equal:
            key = tuple(part for low in self._at(step) for part in step_key(low))
            self._equal[step] = self._first_equal.setdefault(key, step)
        return self._equal[step]

    def _at(self, step: int) -> Sequence[Lowering]:
        """Return the lowerings of all parts of the model at a step; those of the latest step are kept."""
        if self._latest is None or self._latest[0] != step:
            self._latest = step, [low.at_step(step) for low in self._lowerings]
        return self._latest[1]

    def sent_bytes(self, step: int) -> float:
        """Return the bytes that a step sends in data-dependent collectives, summed over all of them."""
        step = self.first_equal(step)
        if step not in self._sent_bytes:
            several = len(self._lowerings) > 1
            self._sent_bytes[step] = self.traffic(step).whole_bytes if several else _sent_bytes(self._at(step)[0])
        return self._sent_bytes[step]

    def push_density(self, step: int) -> float | None:
        """Return the fraction of the gradients that a step pushes; None if the plan has no threshold."""
        self.sent_bytes(step)  # which finds most of it, and is asked for of every step that is simulated
        step = self.first_equal(step)
        return self._traffic[step].push_density if step in self._traffic else _push_density(self._at(step))

    def traffic(self, step: int) -> StepTraffic:
        """Return the traffic of a step without lowering its whole program.

        Lowering the first rank of each place in a node is enough: every collective has one of them as a member.
        """
        step = self.first_equal(step)
        if step not in self._traffic:
            lowerings = self._at(step)
            communications: Mapping[TaskId, Communication] | None = None
            if step in self._programs:
                communications = self._programs[step].uneven
            elif len(lowerings) > 1 or not self._knows_uneven(is_thresholded(lowerings[0])):
                by_rank = [tasks for low in lowerings for tasks in self._tasks(low, low.first_of_places)]
                communications = Collectives(by_rank)
            if communications is not None:
                uneven = {name: each for name, each in communications.items() if each.pair_bytes or each.part_bytes}
                dependent: AbstractSet[TaskId] = {name for name, each in uneven.items() if each.data_dependent}
                payloads = {name: each.payload_bytes for name, each in uneven.items()}
                self._uneven.setdefault(is_thresholded(lowerings[0]), (payloads, dependent))
            else:  # the collectives of an earlier step, with the data-dependent payloads of this one
                same, dependent = self._uneven[is_thresholded(lowerings[0])]
                by_data = (name for name in same if name.op in SENT_BY_DATA and name in dependent)
                payloads = {**same, **_data_payloads(lowerings[0], by_data)}
            self._traffic[step] = StepTraffic(
                payloads,
                sum(payloads[name] for name in payloads if name in dependent),
                _push_density(lowerings),
                _publish_density(lowerings),
            )
        return self._traffic[step]

    def _knows_uneven(self, thresholded: bool) -> bool:
        """Return whether the uneven collectives are known for steps with (or without) thresholding."""
        for step in () if thresholded in self._uneven else tuple(self._programs):
            if is_thresholded(self._lowerings[0].at_step(step)) == thresholded:
                self.traffic(step)
        return thresholded in self._uneven

    def first_rank(self, step: int = 0) -> tuple[Sequence[Task], Mapping[TaskId, Communication]]:
        """Return the tasks of the first rank only, and the collectives in which it takes part."""
        low = self._lowerings[0].at_step(step)
        (tasks,) = self._tasks(low, low.group[:1])
        return tasks, Collectives([tasks])

    def _program(self, lowerings: Sequence[Lowering]) -> Program:
        tasks: list[Sequence[Task]] = []
        persistent: list[dict[str, float]] = []
        on_host: list[dict[str, float]] = []
        tensors: list[Callable[[], Tensors]] = []
        roles = np.zeros(self.scenario.ranks, np.int64)
        for low in lowerings:
            differ = low.sends_by_data or low.compares_by_tensor
            message_class = message_classes(low) if differ and not self.unfolded else None
            role_of_rank, representatives = low.roles(unfolded=self.unfolded, by_data=message_class)
            for number in range(self._copies):
                roles[np.array(low.group) + number] = role_of_rank + len(tasks)
            tasks += self._tasks(low, representatives)
            for rank in representatives:
                on_device, host = persistent_bytes(low, rank)
                persistent.append(on_device | (stage_buffers(low, rank) if low.stages else {}))
                on_host.append(host)
                tensors.append(partial(persistent_tensors, low, rank, persistent[-1]))
        return Program(
            tasks=tuple(tasks),
            communications=Collectives(tasks),
            persistent=tuple(persistent),
            push_density=_push_density(lowerings),
            publish_density=_publish_density(lowerings),
            on_host=tuple(on_host) if any(on_host) else (),
            roles=tuple(roles.tolist()),
            tensors=tuple(tensors),
        )

    def _tasks(self, low: Lowering, ranks: Sequence[int]) -> list[Sequence[Task]]:
        """Return the tasks of the given ranks. Those of pipelines are outlines, except where the ranks of a tensor
        group have different tasks, or where ranks push gradients.
        """
        alike, parts_of_model = _Alike(), low.policies.tp
        chunked = not self.unfolded and (parts_of_model == 1 or self._copies == parts_of_model)
        named = self._named(low)
        if not low.stages:
            return [_tasks(low, rank, alike, named) for rank in ranks]
        outlines = [_outline(low, rank, alike, named, chunked=chunked) for rank in ranks]
        return [outline if chunked else tuple(tasks_of(outline.parts)) for outline in outlines]

    def _named(self, low: Lowering) -> Named:
        """Return the names of collectives; programs that differ in their number of micro-batches share them."""

        def new() -> Named:
            return Named(low.policies.tp, self._copies, several=len(self._lowerings) > 1)

        if not low.stages or low.policies.gradients == "push":  # whose messages differ from step to step
            return new()
        key = (_first_of_any_count(self.scenario, low.shared), self._copies, len(self._lowerings) > 1)
        return low.shared.once("names of collectives", key, new, most=MOST_NAMED)


MOST_NAMED = 4
"""Number of scenarios whose names of collectives are kept, for other numbers of micro-batches."""


def step_key(low: Lowering) -> tuple[Hashable, ...]:
    """Return a key of a step: densities, and work of some steps only. Steps with equal keys have equal programs."""
    thresholded, ratios = is_thresholded(low), None
    if thresholded and low.push.selects and low.sends_by_data:
        sending = [each for each in low.micro_batches if each.sends_gradients]
        ratios = tuple(sent_ratios(owners, each) for owners, each in product(low.all_owners, sending))
    return (
        thresholded,
        ratios,
        in_order(low, publish_ratios(low)) if low.scenario.plan.publish.selects and low.sends_by_data else None,
        estimates_thresholds(low),
        low.synchronizes,
    )


SENT_BY_DATA = ("push", "publish")
"""Operations whose payload differs from step to step. Expert load is the same in all steps of a prediction."""


def _data_payloads(low: Lowering, names: Iterable[TaskId]) -> Mapping[TaskId, float]:
    """Return the payloads of pushes and publications in this step, as their `Communication`s would have them."""
    found: dict[TaskId, float] = {}
    of_buckets: dict[tuple[str, int | None, int | None, bool], Sequence[float]] = {}
    for name in names:
        bucket = low.buckets[name.bucket or 0]
        key = (name.op, name.micro_batch, name.place, bucket.of_experts)
        if key not in of_buckets:
            owners, place = low.owning(bucket), name.place or 0
            if name.op == "publish":
                of_buckets[key] = published_bytes(owners, place)
            else:
                (micro_batch,) = (each for each in low.micro_batches if each.number == name.micro_batch)
                of_buckets[key] = push_totals(owners, micro_batch, place).payload_bytes.tolist()
        found[name] = of_buckets[key][bucket.index]
    return found


def _sent_bytes(low: Lowering) -> float:
    """Return the sum of the payloads of a step's thresholded pushes and publications."""
    whole = 0.0
    for owners in low.all_owners:
        places = range(owners.places)
        if is_thresholded(low) and low.sends_by_data:
            sending = [each for each in low.micro_batches if each.sends_gradients]
            pushes = (push_totals(owners, each, place) for each in sending for place in places)
            whole += sum(float(each.payload_bytes.sum()) for each in pushes)
        if low.thresholds_publish:
            whole += sum(published_bytes(owners, place)[bucket.index] for bucket in low.buckets for place in places)
    return whole


def _push_density(lowerings: Sequence[Lowering]) -> float | None:
    is_asked = lowerings[0].scenario.plan.push.threshold is not None
    return _mean_over_stages(lowerings, mean_push_density) if is_asked else None


def _publish_density(lowerings: Sequence[Lowering]) -> float | None:
    return _mean_over_stages(lowerings, mean_publish_density) if lowerings[0].thresholds_publish else None


def _mean_over_stages(lowerings: Sequence[Lowering], density: Callable[[Lowering], float]) -> float:
    """Return the mean density over all elements; pipeline stages are weighted by their number of elements."""
    if not lowerings[0].stages:
        return density(lowerings[0])
    elements = [sum(bucket.elements for bucket in low.buckets) for low in lowerings]
    return sum(density(low) * n for low, n in zip(lowerings, elements, strict=True)) / sum(elements)


def lower(
    scenario: Scenario,
    statistics: GradientStatistics | None = None,
    *,
    step: int = 0,
    unfolded: bool = False,
    slowed: Mapping[int, float] | None = None,
    shared: Shared | None = None,
) -> Program:
    """Return the program of one training step; see `Steps`."""
    return Steps(scenario, statistics, unfolded=unfolded, slowed=slowed, shared=shared).program(step)


def _slices_are_equal(scenario: Scenario) -> bool:
    """Return whether the ranks of every tensor group hold equal slices on devices of one type, so that one rank can
    represent them all.
    """
    ranks, types = scenario.policies.tp, [device.type for device in scenario.cluster.devices[: scenario.ranks]]
    sliced = scenario.workload.model.sliced_layers if ranks > 1 else ()
    same = all(len(set(units_of_ranks(layer.units, scenario.slice_shares))) == 1 for layer in sliced if layer.units)
    for entries in divided_entries(scenario.plan, scenario.workload.model) if ranks > 1 else ():
        same = same and len(set(units_of_ranks(entries, scenario.slice_shares))) == 1
    if scenario.policies.ep > 1 and scenario.policies.etp is not None:  # tensor ranks may hold different experts
        same = same and len(set(rows_of_ranks(scenario.workload, scenario.policies))) == 1
    return ranks > 1 and same and all(len(set(types[i : i + ranks])) == 1 for i in range(0, len(types), ranks))


def _lowerings(
    scenario: Scenario,
    statistics: GradientStatistics | None,
    step: int,
    slices: int,
    slowed: Mapping[int, float],
    shared: Shared,
) -> Iterator[Lowering]:
    """Yield a lowering for each part of the model, shared by the ranks that hold it; only for the first `slices` tensor
    slices.
    """
    mesh = scenario.policies.mesh
    by_part = [_stages(scenario, part, shared) if mesh.pp > 1 else () for part in range(slices)]
    for place in range(mesh.pp):
        for part, stages in enumerate(by_part):
            group = mesh.group(place * mesh.replica_ranks * mesh.tp + part, *REPLICA_AXES)
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


def _stages(scenario: Scenario, part: int, shared: Shared) -> tuple[Stage, ...]:
    """Return the stages as a rank with tensor slice `part` holds them; any number of micro-batches shares them."""
    if scenario.policies.ep > 1:  # the rows of experts depend on the samples
        return stages_of(_held_stages(scenario, part))
    key = (_first_of_any_count(scenario, shared), part, scenario.stage_ranges)
    return shared.once("pipeline stages", key, lambda: stages_of(_held_stages(scenario, part)))


def _held_stages(scenario: Scenario, part: int) -> Sequence[Sequence[LayerInstance]]:
    """Return the layers of every pipeline stage as a rank with tensor slice `part` holds them."""
    if routes_parts(scenario.workload.model, scenario.policies):
        return held_layers(held_experts(scenario, 0, part), scenario.stage_ranges)
    if (scenario.policies.tp == 1 and scenario.policies.cp == 1) or scenario.policies.ep > 1:
        return scenario.stages
    return held_layers(unrolled(held_slice(scenario, part)), scenario.stage_ranges)


def _tasks(low: Lowering, rank: int, alike: "_Alike", named: Named) -> tuple[Task, ...]:
    """Return the tasks of a step of a rank that holds the whole depth of the model.

    Where fragments are synchronized, the tasks are those of a whole period. A fragment's exchange continues from one
    step to the next, so its identity has no step.
    """
    tasks: list[Task] = []
    if low.policies.in_fragments:
        for step in range(low.policies.sync_every_steps or 1):
            tasks += with_ids(_step_tasks(low.at_step(step), rank, alike), partial(TaskId.in_step, step=step + 1))
    else:
        tasks = _step_tasks(low, rank, alike)
    return tuple(map(named.task, tasks)) if named.changes else tuple(tasks)


def _outline(low: Lowering, rank: int, alike: "_Alike", named: Named, *, chunked: bool) -> Outline:
    """Return the tasks of a rank of a pipeline; `chunked`: as parts of an outline.

    The ranks of a stage differ in their update only (ZeRO-1), unless each has shards or messages of its own.
    """
    differ = low.reduces_after_schedule or low.policies.gradients == "push"
    kind = (_rank_kind(low, rank), low.slowed.get(rank), rank if differ else None)
    if kind not in alike.pipelines:
        stage_tasks = partial(_unnumbered, rank=rank, alike=alike)
        before, after = pipeline(low, rank, stage_tasks, named, chunked=chunked)
        alike.pipelines[kind] = Scheduled(Parts([*_load_batch(low, rank), *before]), after)
    scheduled, replicas = alike.pipelines[kind], replicas_of(low, low.batch_sizes[rank])
    update = map(named.task, optimize(low, rank, [], replicas=replicas))
    return Outline([*update, *scheduled.after_update], schedule=scheduled.before_update)


def _step_tasks(low: Lowering, rank: int, alike: "_Alike") -> list[Task]:
    """Return the tasks of a rank's step where the rank holds the whole depth of the model (no pipeline)."""
    kind = _rank_kind(low, rank)
    if kind not in alike.steps:
        alike.steps[kind] = []
        for micro_batch in low.micro_batches:
            if (kind, micro_batch) not in alike.micro_batches:
                own = _unnumbered(low, micro_batch, rank=rank, alike=alike)
                if micro_batch.number is not None:
                    own = with_ids(own, partial(TaskId.at, micro_batch=micro_batch.number))
                alike.micro_batches[kind, micro_batch] = own
            alike.steps[kind] += alike.micro_batches[kind, micro_batch]
    tasks, ratio = [*_load_batch(low, rank), *optimize(low, rank, alike.steps[kind])], low.slowed.get(rank, 1.0)
    if ratio != 1:
        tasks = [_slowed(task, ratio) if task.phase in SLOWED_PHASES else task for task in tasks]
    if low.scenario.plan.shares.replan:  # the batch split and the shard sizes follow the compute times
        exchange = Communication("all-gather", low.group, REPORTED_BYTES * len(low.group))
        tasks = [*tasks, collective_task(TaskId("share-compute-times"), exchange)]
    return [*_with_host_waits(tasks)] if low.scenario.cluster.backend == "gloo" else [*tasks]


def _slowed(task: Task, ratio: float) -> Task:
    """Return a task of a slow rank, whose host is as much slower as its device."""
    issue = task.issue and replace(task.issue, host_s=ratio * task.issue.host_s)
    return replace(task, duration_s=ratio * task.duration_s, issue=issue)


def _load_batch(low: Lowering, rank: int) -> list[Task]:
    """Return what the training loop does in a step besides forward, backward and update, where that is measured."""
    device = low.device(rank)
    if device.step_host_s is None:
        return []
    if device.kind == "cuda":
        return [Task(TaskId("load-batch"), "idle", issue=Issue(device.step_host_s, goes_on=True))]
    return [Task(TaskId("load-batch"), "idle", duration_s=device.step_host_s)]


def _with_host_waits(tasks: Sequence[Task]) -> list[Task]:
    """Return a rank's tasks with the host's waits for gloo: whatever follows an exchange is issued only after it.

    Pushed gradients are copied to host memory, which the host waits for as well. An exchange at the end of a step
    delays the first task of the next step.
    """
    compute = [task for task in tasks if task.stream == "compute"]
    issued = [place for place, task in enumerate(compute) if task.issue is not None]
    if not issued:
        return [*tasks]
    waits = any(map(_blocks_host, compute[issued[-1] + 1 :]))
    found = []
    for task in tasks:
        if task.stream == "compute":
            waits = waits or _blocks_host(task)
            if task.issue is not None:
                task = replace(task, issue=replace(task.issue, goes_on=task.issue.goes_on and not waits))
                waits = False
        found.append(task)
    return found


def _blocks_host(task: Task) -> bool:
    return task.communication is not None or bool(task.after) or task.phase in HOLDING_PHASES


HOLDING_PHASES = ("compression", "exposed_communication")
"""Phases in which the host handles gloo messages, and meanwhile waits for the device."""
SLOWED_PHASES = (*COMPUTE_PHASES, *UPDATE_PHASES)
"""Phases whose tasks take longer on a slow rank."""
REPORTED_BYTES = 16
"""Bytes that each rank reports: two float64, the seconds of its forward and backward, and of its update."""


class _RankKind(NamedTuple):
    """Everything that a rank's tasks before the update depend on. Ranks of equal kind have equal tasks."""

    device_type: str
    batch_size: int
    own_layers: tuple[int, int] | None
    """The range of layers that the rank owns, where layers are assigned to ranks."""
    pushes: int | None
    """The rank itself if it pushes gradients, since its messages are then its own; else None."""
    stages: tuple[int, ...]
    expert_position: int
    """First expert-parallel position whose experts receive as many rows as the rank's."""
    ring_position: int
    """Position of the rank in its attention ring, since the blocks of attention differ by position."""


@once_a_run
def _rank_kind(low: Lowering, rank: int) -> _RankKind:
    return _RankKind(
        low.device_type(rank),
        low.batch_sizes[rank],
        low.owned_ranges[rank] if low.assigns_layers else None,
        rank if low.policies.gradients == "push" else None,
        tuple(stage.number for stage in low.stages),
        low.expert_position(rank),
        low.ring_position(rank),
    )


class _MicroBatchKind(NamedTuple):
    """Key of a micro-batch: those with equal keys have equal tasks, but for their number."""

    rank: _RankKind
    samples: int
    first: bool
    sends_gradients: bool
    own_messages: int
    """Index of the micro-batch if each micro-batch sends different entries; else 0."""
    last: bool
    """Whether it is the last one, if that matters."""
    gathered: Gathered | None
    """Which sharded parameters of a pipeline stage are already gathered; None without stages."""


@dataclass(frozen=True)
class _Alike:
    """Cache of a step's tasks, which ranks with equal tasks share."""

    steps: dict[_RankKind, list[Task]] = field(default_factory=dict)
    """All tasks before the update."""
    micro_batches: dict[tuple[_RankKind, MicroBatch], Sequence[Task]] = field(default_factory=dict)
    pipelines: dict[Hashable, Scheduled] = field(default_factory=dict)
    """What the ranks of a pipeline do but for their updates."""
    unnumbered: dict[_MicroBatchKind, Sequence[Task]] = field(default_factory=dict)
    """Tasks of micro-batches, without the micro-batch's number in their identities."""


def _unnumbered(
    low: Lowering, micro_batch: MicroBatch, gathered: Gathered | None = None, *, rank: int, alike: _Alike
) -> Sequence[Task]:
    """Return a micro-batch's tasks without its number: all passes but the update, for a rank or one of its stages.

    Equal kinds get the same object.
    """
    policies = low.scenario.policies
    kind = _MicroBatchKind(
        _rank_kind(low, rank),
        low.samples(rank, micro_batch),
        micro_batch.first,
        micro_batch.sends_gradients,
        micro_batch.index if policies.gradients == "push" and low.push.selects else 0,
        micro_batch.last and low.offload is not None and low.frees_gradients,
        gathered,
    )
    if kind not in alike.unnumbered:
        made = partial(_all_passes, low, rank, micro_batch, gathered)
        if low.shares_stages:
            like = kind._replace(rank=kind.rank._replace(batch_size=0))
            scenario = _first_of_any_count(low.scenario, low.shared)
            key = ("micro-batch of a stage", scenario, low.tensor_part, like, low.slowed.get(rank))
            alike.unnumbered[kind] = low.shared.large.once(
                key, made, weight=lambda tasks: ELEMENTS_PER_TASK * len(tasks)
            )
        else:
            alike.unnumbered[kind] = made()
    return alike.unnumbered[kind]


def _all_passes(low: Lowering, rank: int, micro_batch: MicroBatch, gathered: Gathered | None) -> Sequence[Task]:
    """Return the tasks of all passes but the update."""
    policies = low.scenario.policies
    computed = low.compute_kind(rank, micro_batch)
    if computed not in low.computed:
        if low.stages and low.policies.ep == 1:  # with experts, equal layers may exchange different numbers of rows
            low.computed[computed] = _tasks_of_equal_stage(low, rank, micro_batch)
        else:
            low.computed[computed] = _tasks_of_any_batch_split(low, rank, micro_batch)
    tasks = list(low.computed[computed])
    pushes, sharded = policies.gradients == "push", policies.parameters != "replicated"
    if gathered is not None and pushes:
        tasks = push_units(low, rank, tasks, micro_batch)
        return gather_flat_parameters(low, rank, tasks, twice=policies.parameters == "sharded", gathered=gathered)
    if gathered is not None:
        return run_stage(low, rank, tasks, micro_batch, gathered)
    tasks = REDUCE_GRADIENTS[policies.gradients, sharded](low, rank, tasks, micro_batch)
    return HOLD_PARAMETERS[policies.parameters, pushes](low, rank, tasks)


def _tasks_of_any_batch_split(low: Lowering, rank: int, micro_batch: MicroBatch) -> Sequence[Task]:
    """Return forward and backward of the whole depth of the model; plans share them that differ only in how the batch,
    or the state, is divided among ranks, which decides how many samples a rank has, but not what it does with them.
    """
    if low.stages or low.divides_layers or low.assigns_layers or low.policies.ep > 1:  # shares cut layers, or exchanges
        return compute(low, rank, micro_batch)
    first = _first_of_any_count(low.scenario, low.shared, any_shares=True)
    key = (first, low.compute_kind(rank, micro_batch)._replace(batch_size=0))
    return low.shared.once("computed", key, lambda: compute(low, rank, micro_batch))


def _tasks_of_equal_stage(low: Lowering, rank: int, micro_batch: MicroBatch) -> Sequence[Task]:
    """Return forward and backward of a stage, copied from an equal stage and renamed to this stage's layers.

    Two stages are equal if their layers are equal one by one, if the layers next to them are (see [Note: stage
    boundaries] in `stage_boundary`), and if the whole-model layers that they are parts of are equal. Their tensor
    groups carry out equal collectives. Programs that differ in their number of micro-batches share them: a prediction
    that extrapolates lowers four.
    """
    (stage,) = low.stages
    whole_layers = tuple(Same(low.whole_layer(each)) for each in low.layers)
    kind, scenario = low.compute_kind(rank, micro_batch), Same(low.scenario)
    if len(set(low.batch_sizes)) == 1:  # so that the groups are the same, however many samples that are
        kind, scenario = kind._replace(batch_size=0), _first_of_any_count(low.scenario, low.shared)
    key = (scenario, low.tensor_part, kind, whole_layers, stage.structure_key, low.slowed.get(rank))
    names = tuple(each.module for each in low.layers)
    first, tasks = low.shared.once("stages", key, lambda: (names, compute(low, rank, micro_batch)))
    if first == names:
        return tasks
    return low.shared.large.once(
        ("renamed stage", key, stage.number),
        lambda: _rename_to_stage(low, rank, tasks, dict(zip(first, names, strict=True))),
        weight=lambda renamed: ELEMENTS_PER_TASK * len(renamed),
    )


def _first_of_any_count(scenario: Scenario, shared: Shared, *, any_shares: bool = False) -> Same:
    """Return the first scenario that differs only in its number of micro-batches, or also in its `any_shares`."""
    of_any = f"of any {'shares' if any_shares else 'count'}"

    def first() -> Same:
        key = lowering_key(scenario, None, shared, any_count=True, any_shares=any_shares)
        return shared.once(f"first {of_any}", key, lambda: Same(scenario))

    return shared.once(f"scenarios {of_any}", Same(scenario), first)


def _rename_to_stage(low: Lowering, rank: int, tasks: Sequence[Task], own: Mapping[str, str]) -> Sequence[Task]:
    """Return the tasks of an equal stage with this stage's layers and groups; `own`: its layers' names, by theirs."""
    exchanges: dict[int, Communication] = {}
    result: list[Task] = []
    for task in tasks:
        exchange = task.exchange
        if exchange is not None:
            if id(exchange) not in exchanges:
                exchanges[id(exchange)] = _own_exchange(low, rank, task, exchange)
            exchange = exchanges[id(exchange)]
        joined = None if task.communication is None else _rename_layer(task.communication, own)
        after = tuple(_rename_layer(each, own) for each in task.after)
        result.append(task.renamed(_rename_layer(task.id, own), joined, after, exchange))
    return result


def _own_exchange(low: Lowering, rank: int, task: Task, exchange: Communication) -> Communication:
    """Return the collective of an equal stage's task, with the groups of this rank."""
    samples = low.batch_sizes[rank]
    if task.id.op in ("rotate", "gather-keys"):
        made = ring_exchange if task.id.op == "rotate" else gathering_exchange
        return made(low, samples, exchange.size_bytes)
    group, *groups = layer_groups(low, samples, "cp" if task.id.op in CONTEXT_OPERATIONS else "tp")
    return exchange.of_groups(group, *groups)


def _rename_layer(name: TaskId, layers: Mapping[str, str]) -> TaskId:
    """Return an identity with the layer renamed."""
    return name.of_layer(layers[name.layer]) if name.layer in layers else name
