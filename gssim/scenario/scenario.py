"""The scenario: cluster, workload, plan and run length, with everything that follows from them before a simulation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import AfterValidator

from gssim.cluster import Cluster, Conditions, DeviceType
from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.plan import METHODS, REPLICA_AXES, Plan, Policies, Push, resolve, resolved_push, splitting
from gssim.result import Result
from gssim.scenario.device_rates import model_flop_utilisation
from gssim.scenario.expert_load import layers_of_own_experts, on_context_parts, routes_parts
from gssim.scenario.identity import ScenarioParts, calibration_id, layers_id_of, resolved, scenario_id
from gssim.scenario.layer_costs import sample_cost_s
from gssim.scenario.overrides import overrides_of
from gssim.scenario.ownership import (
    all_owners,
    better_shard_shares,
    owned_shares,
    owners_of_stages,
    sample_room,
)
from gssim.scenario.run import Run
from gssim.scenario.search_space import SearchSpace
from gssim.scenario.stages import cut_layers, held_layers
from gssim.units import shown_value, spec_with_memory
from gssim.workload import LayerInstance, Workload, unrolled
from gssim.workload.gradient_statistics import GradientStatistics

LONGEST_NAME = 200
"""Longest name of a scenario, in bytes: file systems allow 255, and the Result's file name adds identity and source."""

SHARES_SUM_TO = 1e-6
"""By how much the sum of shard shares may differ from 1, as they are rounded."""


def _valid_name(name: str) -> str:
    if not name or "/" in name or not name.isprintable():
        raise ValueError("files are named after it: at least one character, all printable, none of them '/'")
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(
            f"files are named after it: at most {LONGEST_NAME} bytes are allowed, it has {len(name.encode())}"
        )
    return name


@dataclass(frozen=True)
class Source:
    """The file from which a scenario was loaded, or the tables that replace it, and the overrides of its keys."""

    path: Path
    overrides: tuple[str, ...]
    tables: Mapping[str, Any] | None = None
    """Keys and values in the form of a file, if there is no file; `path` then says where named files are."""
    load: Callable[["Source"], "Scenario"] = field(kw_only=True, repr=False, compare=False)
    """Function that loads a scenario from such a source."""


def sequence_positions(policies: Policies, workload: Workload) -> int | None:
    """Return how many positions of each sequence a rank has; None if sequences are not divided among ranks."""
    length = workload.sequence_length or 0
    if policies.cp > 1:
        return length // policies.cp
    return length // policies.tp if policies.sequence_parallel else None


def _check_shares(samples: Sequence[int], shards: Sequence[float], *, ranks: int, total: int) -> None:
    """Raise UserError where these are no samples and shard shares of so many ranks and so many samples."""
    for name, values in (("samples", samples), ("shards", shards)):
        if len(values) != ranks:
            raise UserError(f"{name} = {shown_value(values)}: {len(values)} of them for {ranks} ranks; give as many")
    if not all(isinstance(each, Integral) and each >= 0 for each in samples):
        raise UserError(f"samples = {shown_value(samples)}: must be whole numbers of at least 0")
    if sum(samples) != total:
        raise UserError(
            f"samples = {shown_value(samples)}: sum to {sum(samples)}, workload.global_batch_size is {total}"
        )
    if not (all(0 <= each <= 1 for each in shards) and abs(sum(shards) - 1) < SHARES_SUM_TO):
        raise UserError(f"shards = {shown_value(shards)}: must be from 0 to 1 and sum to 1")


@spec_with_memory
class Scenario:
    """A workload, parallelized by a plan, on a cluster, for a run of some steps."""

    name: Annotated[str, AfterValidator(_valid_name)]
    """Name of the scenario; files of results are named after it."""
    question: str = ""
    """The question that the scenario answers; by default the comment on the file's first line."""
    cluster: Cluster
    """A cluster file, or its table."""
    workload: Workload
    """Model, batch and optimizer."""
    plan: Plan
    """Parallelization of the workload."""
    network: Conditions = Conditions()
    """Link faults and background traffic (simulated)."""
    run: Run = Run()
    """Run length, seed and disturbances."""
    search: SearchSpace = SearchSpace()
    """The plans that `gssim search` explores; not part of the scenario's identity."""

    def __repr__(self) -> str:
        """Return one short line: all values, those of the model file included, are megabytes."""
        workload = self.workload
        return (
            f"<Scenario {self.name!r}: {self.plan.method} on {len(self.cluster.devices)} devices of "
            f"{self.cluster.name!r}, {workload.model.name}, {workload.global_batch_size} samples>"
        )

    def __hash__(self) -> int:
        """Return a hash by identity of the scenario, so that it can be a key: fields hold tables, which have none."""
        return hash(self.scenario_id)

    @cached_property
    def source(self) -> Source | None:
        """The file from which it was loaded; None if it was made in code. (Loading fills it in.)"""
        return None

    def with_(self, changes: Mapping[str, Any] | Sequence[str]) -> "Scenario":
        """Return the scenario with changes to its keys, such as `{"plan.method": "zero2"}`, validated like a file.

        Raises UserError for an unknown key or a bad value, and for a scenario that was not loaded from a file.
        """
        source = self.source
        if source is None:
            raise UserError(f"{self.name}: was not loaded from a file; change what gssim.load returns")
        return source.load(replace(source, overrides=(*source.overrides, *overrides_of(changes))))

    def model_flop_utilisation(self, step_time_s: float) -> float | None:
        """Return the fraction of its devices' peak rates that the model's FLOP reach in a step of this time (MFU).

        The model's FLOP are three times those of its forward, whatever is recomputed. None on CPUs, and where some
        layers are frozen or have adapters.
        """
        return model_flop_utilisation(self.cluster, self.workload, ranks=self.ranks, step_time_s=step_time_s)

    @cached_property
    def policies(self) -> Policies:
        """The plan with every policy resolved."""
        devices, backend = self.cluster.devices, self.cluster.backend
        hosts = [device.host for device in devices] if METHODS[self.plan.method].two_levels else ()
        return resolve(self.plan, devices=len(devices), hosts=hosts, backend=backend)

    @cached_property
    def push(self) -> Push:
        """The push options, with the default that depends on the optimizer filled in."""
        return resolved_push(self.plan.push, sgd=self.workload.optimizer.startswith("sgd"))

    @cached_property
    def ranks(self) -> int:
        """Number of ranks; rank i runs on the cluster's i-th device."""
        return self.policies.ranks

    @cached_property
    def idle_devices(self) -> tuple[str, ...]:
        """Names of the cluster's devices without a rank."""
        return tuple(device.name for device in self.cluster.devices[self.ranks :])

    @property
    def attention_of_cpu(self) -> str | None:
        """Warning if attention on GPUs or TPUs is predicted as a CPU runs it, with more time and memory; else None."""
        model, cluster = self.workload.model, self.cluster
        kinds = {cluster.device_types[device.type].kind for device in cluster.devices}
        if kinds == {"cpu"} or not model.has_unfused_attention or model.runs_fused_kernels:
            return None
        if model.fused_kernels is not None and not model.fused_kernels.layers:
            return None
        if "cuda" not in kinds:
            return (
                f"memory and time may be too large: the attention of '{model.name}' is predicted as a CPU runs it, "
                "which keeps the scores of all pairs of tokens, and masks of dropout in their precision; what XLA "
                "keeps is not modelled"
            )
        if model.fused_kernels is None:
            return (
                f"memory and time on GPUs may be predicted too large: the attention of '{model.name}' (workload.model) "
                "is traced as a CPU runs it, which saves the scores of all pairs of tokens; "
                "`gsreal trace FILE --out NEW` traces it as GPUs run it too"
            )
        why = "beside devices of another kind" if len(kinds) > 1 else "in a scenario that gssim.load has not made"
        return (
            f"memory and time on GPUs are predicted too large: {why}, the attention of '{model.name}' is predicted on "
            "all as a CPU runs it, which saves the scores of all pairs of tokens"
        )

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of each rank in one step; equal for ranks that share a replica or its gradients."""
        policies, parts = self.policies, self.data_batch_sizes
        return parts if policies.ranks == len(parts) else tuple(parts[policies.data_rank(r)] for r in range(self.ranks))

    @cached_property
    def data_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each part into which the data axes divide a step's batch."""
        wanted, total, policies = self.plan.shares.batch, self.workload.global_batch_size, self.policies
        if wanted == "throughput":
            slowest_s = [0.0] * policies.data_ranks  # cost of the slowest rank of each replica
            for rank, cost_s in enumerate(self._sample_costs_s):
                part = policies.data_rank(rank)
                slowest_s[part] = max(slowest_s[part], cost_s)
            return splitting.balance_batch(total, sample_s=slowest_s)
        return splitting.split(total, splitting.even(policies.data_ranks) if isinstance(wanted, str) else wanted)

    def with_shares(self, samples: Sequence[int], shards: Sequence[float]) -> "Scenario":
        """Return the same scenario with this batch split and these shard shares, both by rank.

        Ranks whose samples or shares differ from the plan's must each have a part of the batch, as replanning requires.

        Raises:
            UserError: these are no shares of these ranks: another number of them, samples that are not whole numbers or
                not those of the batch, shards that are not parts of a whole.
        """
        if (tuple(samples), tuple(shards)) == (self.batch_sizes, self.shard_shares):
            return self  # if ranks hold slices or layers, shares by rank are not shares by part of the batch
        total, rules = self.workload.global_batch_size, self.plan.shares
        _check_shares(samples, shards, ranks=self.ranks, total=total)
        shard_rule = rules.shards if rules.shards == "even" else tuple(shards)
        rules = replace(rules, batch=tuple(n / total for n in samples), shards=shard_rule)
        return replace(self, plan=replace(self.plan, shares=rules))

    def moved_shards(
        self, *, samples: Sequence[int], owned: Sequence[float], update_s: Sequence[float | None], steps: int
    ) -> tuple[float, ...] | None:
        """Return better shard shares for the rest of a run, or None; see `better_shard_shares`.

        Parameters that are sharded at rest stay with their owners; replicated parameters allow optimizer state to move.
        """
        if self.plan.shares.shards != "cost" or self.policies.parameters != "replicated":
            return None
        return better_shard_shares(
            self.cluster,
            self.workload,
            self.plan,
            self.policies,
            batch_sizes=samples,
            owned=owned,
            update_s=update_s,
            steps=steps,
        )

    @cached_property
    def most_samples(self) -> tuple[int, ...]:
        """Largest number of samples that each rank may get at run time: what its memory allows, at least its present
        number.
        """
        sizes = self.batch_sizes
        room = sample_room(self.cluster, self.workload, self.plan, self.policies, self.shard_shares)
        return tuple(map(max, sizes, room))

    @cached_property
    def shard_shares(self) -> tuple[float, ...]:
        """Fraction of the sharded state that each rank owns, among the ranks that share a part of the model.

        If blocks are cut among ranks by shares, each rank's fraction of the blocks.
        """
        policies, mesh = self.policies, self.policies.mesh
        if policies.partition == "weight-gradient":
            sizes = [instance.layer.elements for instance in unrolled(self.workload.model)]
            return tuple(sum(sizes[slice(*layers)]) / sum(sizes) for layers in self.owned_layers)
        if mesh.tp == mesh.ranks > 1 and policies.gradients != "push":
            return self.slice_shares
        if policies.slices == "shares":  # the shares size the slices
            return splitting.even(mesh.replica_ranks) * (mesh.ranks // mesh.replica_ranks)
        return self._wanted_shards

    @cached_property
    def owned_layers(self) -> tuple[tuple[int, int], ...]:
        """Half-open range of the layers whose weight gradients each rank computes, if ranks divide these.

        Ranges are of whole layers, in the model's order, as close to the shares as possible. A rank's backward ends at
        the first of its own layers, so only the owner of the model's first layers runs all of it; if tensors were
        assigned one by one, all ranks would. If shares follow the devices' speeds, the fastest rank gets the first
        layers, else rank 0.
        """
        ranks = range(self.ranks)
        if self.plan.shares.shards == "compute":
            order = sorted(ranks, key=lambda rank: self._sample_costs_s[rank])
        else:
            order = list(ranks)
        wanted = self._wanted_shards
        sizes = tuple(instance.layer.elements for instance in unrolled(self.workload.model))
        layer_ranges = splitting.contiguous(sizes, tuple(wanted[rank] for rank in order))
        return tuple(layers for _, layers in sorted(zip(order, layer_ranges, strict=True)))

    @cached_property
    def _wanted_shards(self) -> tuple[float, ...]:
        wanted, mesh = self.plan.shares.shards, self.policies.mesh
        if wanted == "compute":
            return self._by_part([1 / sample_s for sample_s in self._sample_costs_s])
        if wanted in ("memory", "cost"):
            return self._owned_shares()
        if isinstance(wanted, str):
            return splitting.even(mesh.replica_ranks) * (mesh.ranks // mesh.replica_ranks)
        shares = splitting.proportional(wanted)
        return tuple(shares[mesh.replica_rank(rank)] for rank in range(mesh.ranks))

    def _owned_shares(self) -> tuple[float, ...]:
        """Return the shares by memory or cost, over all ranks or over those of each stage."""
        policies, shares = self.policies, [0.0] * self.ranks
        parts = (
            owners_of_stages(self.workload, self.plan, policies, self.stages)
            if policies.pp > 1
            else [all_owners(self.workload, policies)]
        )
        for owners in parts:
            own = owned_shares(self.cluster, owners, self.plan, policies, self.batch_sizes)
            for rank, share in zip(owners.ranks, own, strict=True):
                shares[rank] = share
        return tuple(shares)

    def _by_part(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Return shares proportional to the ranks' weights, among the ranks that share a part of the model."""
        mesh = self.policies.mesh
        shares = [0.0] * mesh.ranks
        if mesh.data_ranks == mesh.ranks:
            return splitting.proportional(weights)
        for first in range(mesh.ranks):
            if mesh.data_rank(first) == 0:  # the first rank of its group
                ranks = mesh.group(first, *REPLICA_AXES)
                for rank, share in zip(ranks, splitting.proportional([weights[rank] for rank in ranks]), strict=True):
                    shares[rank] = share
        return tuple(shares)

    @property
    def cuts_natively(self) -> bool:
        """Whether DTensor cuts the blocks' linear maps; not where some have adapters or are frozen, nor where sums of
        gradients overlap with products.
        """
        own = self.workload.adapters, self.workload.frozen
        return self.policies.cuts_natively and own == (None, None) and not self.plan.async_input_gradients

    @property
    def multiplies_in_ring(self) -> bool:
        """Whether exchanges beside products (`plan.tp_overlap`) are rings of messages of this project's own, on gloo.

        Everything that differs from the prediction on nccl depends on it: the layers' buffers (see
        `gssim.scenario.overlapped_maps`), the carrying of an exchange by a ring of point-to-point messages instead
        of the backend's collective, and no memory outside the allocator. Kinds, sizes and numbers of the collectives,
        and the products beside them, are the same.
        """
        return self.plan.tp_overlap and self.cluster.backend == "gloo"

    @cached_property
    def stage_ranges(self) -> tuple[range, ...]:
        """Range of the layer numbers of each pipeline stage.

        Raises UserError if the plan's stages do not fit the model.
        """
        mesh = self.policies.mesh
        types: list[dict[str, DeviceType]] = [{} for _ in range(mesh.pp)]
        for rank in range(mesh.ranks):
            types[mesh.place(rank).pp][self.cluster.devices[rank].type] = self.cluster.type_of(rank)
        samples = max(1, max(self.data_batch_sizes) // self.plan.micro_batches)
        return cut_layers(self.plan, self.workload, types, samples=samples)

    @cached_property
    def stages(self) -> tuple[tuple[LayerInstance, ...], ...]:
        """Layers of each pipeline stage; stage i is on the ranks whose pp coordinate is i modulo the size of that axis.

        Raises UserError if the plan's stages do not fit the model.
        """
        policies, workload = self.policies, self.workload
        layers = unrolled(workload.model)
        if policies.ep > 1 and not routes_parts(workload.model, policies):
            layers = on_context_parts(workload, policies, layers_of_own_experts(workload, policies, 0))
        return held_layers(layers, self.stage_ranges)

    @cached_property
    def slice_shares(self) -> tuple[float, ...]:
        """Share of the group's cut blocks that the rank at each position of a tensor group holds."""
        wanted, policies = self.plan.shares.shards, self.policies
        if policies.slices != "shares" or wanted == "even":
            return splitting.even(policies.tp)
        if isinstance(wanted, str):
            costs = self._sample_costs_s  # at each position, the slowest rank counts
            return splitting.proportional([1 / max(costs[place :: policies.tp]) for place in range(policies.tp)])
        return splitting.proportional(wanted)

    @cached_property
    def sequence_positions(self) -> int | None:
        """How many positions of each sequence a rank has; None if sequences are not divided among ranks."""
        return sequence_positions(self.policies, self.workload)

    @cached_property
    def _sample_costs_s(self) -> list[float]:
        """Time of a sample on each rank's device, at an even share of a micro-batch; see `sample_cost_s`."""
        types = [device.type for device in self.cluster.devices[: self.ranks]]
        known, workload = self.cluster.device_types, self.workload
        samples = max(1, workload.global_batch_size / (self.policies.data_ranks * self.plan.micro_batches))
        by_type = {name: sample_cost_s(known[name], workload, samples, name=name) for name in dict.fromkeys(types)}
        return [by_type[name] for name in types]

    def resolved(self, shared: Shared | None = None) -> dict[str, Any]:
        """Return the whole scenario as plain data, as the Result stores it; it must not be changed."""
        return resolved(self._parts(), shared or Shared())

    @cached_property
    def scenario_id(self) -> str:
        """Identity of the scenario, of workload, resolved plan and cluster, without rates, files or names."""
        return self.identity(Shared())

    def identity(self, shared: Shared) -> str:
        """Return the `scenario_id`; `shared`: cache of the parts that scenarios have in common."""
        return scenario_id(self._parts(), shared)

    def layers_id(self) -> str:
        """Return the digest of the model's traced layers, which tell predictions apart but not scenarios."""
        return layers_id_of(self._parts())

    def _parts(self) -> ScenarioParts:
        policies = self.policies
        return ScenarioParts(
            name=self.name,
            question=self.question,
            cluster=self.cluster,
            workload=self.workload,
            plan=self.plan,
            network=self.network,
            run=self.run,
            policies=policies,
            push=self.push,
            batch_sizes=self.batch_sizes,
            shard_shares=self.shard_shares,
            owned_layers=self.owned_layers if policies.partition == "weight-gradient" else (),
            stage_sizes=[len(stage) for stage in self.stages] if policies.pp > 1 else [],
        )


@spec_with_memory
class Loaded:
    """A scenario with the file that it was loaded from and its gradient statistics."""

    file: str
    scenario: Scenario
    gradients: GradientStatistics | None = None

    @property
    def statistics_needed(self) -> bool:
        """Whether message sizes depend on the data; a prediction then needs gradient statistics."""
        return self.scenario.plan.sends_by_data

    @cached_property
    def calibration_id(self) -> str:
        """Identity of the numbers on which a prediction is based: rates, profiles and statistics."""
        return self.calibration(Shared())

    def calibration(self, shared: Shared) -> str:
        """Return the `calibration_id`; `shared`: cache of the parts that scenarios have in common."""
        return calibration_id(self.scenario.cluster, self.gradients, shared)

    def measured(
        self,
        times_s: Sequence[float],
        phases_s: Mapping[str, float],
        *,
        step_time_s: float | None = None,
        **found: Any,
    ) -> Result:
        """Return the Result of a measurement of this scenario.

        `times_s`: every timed step; their median is the step time unless `step_time_s` is given. `phases_s`: means over
        ranks. Ranks have their median steps at different times, so the phases are scaled by step_time_s /
        sum(phases_s). `found`: further fields of the Result, which depend on how it was measured.
        """
        step_time_s = median(times_s) if step_time_s is None else step_time_s
        scale = step_time_s / sum(phases_s.values())
        return Result(
            source="measured",
            scenario_id=self.scenario.scenario_id,
            calibration_id=self.calibration_id,
            scenario=self.scenario.resolved(),
            step_time_s=step_time_s,
            step_time_p10_s=sorted(times_s)[len(times_s) // 10],
            step_times_s=tuple(times_s),
            phases_s={name: value * scale for name, value in phases_s.items()},
            fits=True,
            throughput_samples_per_s=self.scenario.workload.global_batch_size / step_time_s,
            idle_devices=self.scenario.idle_devices,
            **found,
        )


def single_device(scenario: Scenario) -> Scenario:
    """Return the same training on one device: the reference to which all methods must be equal."""
    workload = scenario.workload
    if workload.reduce_precision is not None:
        workload = replace(workload, reduce_precision=None)
    return replace(scenario, plan=Plan(method="single"), workload=workload)
