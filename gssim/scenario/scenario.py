"""The question, with who it is: Cluster x Workload x Plan and a run's length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from gssim.cache import Shared
from gssim.cluster import Cluster, Conditions, DeviceType
from gssim.gradient_statistics import GradientStatistics
from gssim.limits import excess
from gssim.plan import DATA_AXES, METHODS, Plan, Policies, Push, resolve, resolved_push, splitting
from gssim.scenario.device_rates import sample_costs
from gssim.scenario.identity import calibration_id, resolved, scenario_id
from gssim.scenario.ownership import owned_shares, sample_room, shares_worth_moving_to
from gssim.scenario.search_space import SearchSpace
from gssim.scenario.stages import cut_layers
from gssim.units import RANGES, Count, PositiveInt, TimeRatio, spec, spec_with_memory
from gssim.workload import LayerInstance, Workload, unrolled


@spec
class SlowDown:
    """A rank that computes slower than its device for a while."""

    rank: Count
    """Which."""
    first_step: Count
    """Of the steps that count, from 0."""
    steps: PositiveInt | None = None
    """How many; absent: to the end of the run."""
    compute_ratio: TimeRatio
    """Time of its forwards, backwards and updates over that without. (In a real run it does as much more work.)"""

    def covers(self, step: int) -> bool:
        """Return whether the rank is slow in a step."""
        return self.first_step <= step and (self.steps is None or step < self.first_step + self.steps)


@spec
class Run:
    """How long to train, and from which seed."""

    steps: PositiveInt = 20
    """Steps that count, after the warm-up."""
    warmup_steps: Count = 5
    """Before the steps that count."""
    seed: Count = 0
    """Of parameters, batches and chance."""
    evaluate_every_steps: PositiveInt | None = None
    """How often, counted from the warm-up's end, the model is evaluated on held-out data, and after the last step
    (real runs); absent: never."""
    slowdowns: tuple[SlowDown, ...] = ()
    """Ranks that are slower than their devices for a while, in both worlds."""

    def __post_init__(self) -> None:
        """Refuse more steps than are allowed, and slow-downs of one rank that come to more than one may be."""
        if (why := excess("steps", self.warmup_steps + self.steps)) is not None:
            raise ValueError(f"steps, warmup_steps: {why}")
        for each in self.slowdowns:
            ratio = self.slowed(each.first_step)[each.rank]
            if ratio > RANGES["ratio of times"][1]:
                raise ValueError(f"slowdowns: together rank {each.rank} takes {ratio:g} times as long in a step")

    def slowed(self, step: int) -> dict[int, float]:
        """Return the ranks that are slow in a step (of those that count, from 0), and by how much."""
        found: dict[int, float] = {}
        for each in self.slowdowns:
            if each.covers(step):
                found[each.rank] = found.get(each.rank, 1.0) * each.compute_ratio
        return found


LONGEST_NAME = 200
"""Bytes of a scenario's name: file systems take 255, and a Result's file says its question and source too."""


def _for_files(name: str) -> str:
    if not name or "/" in name or not name.isprintable():
        raise ValueError("files are named after it: at least one character, all printable, none of them '/'")
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(
            f"files are named after it: at most {LONGEST_NAME} bytes are allowed, it has {len(name.encode())}"
        )
    return name


@dataclass(frozen=True)
class Source:
    """The file that a scenario was loaded from, and what overrode its keys."""

    path: Path
    overrides: tuple[str, ...]


@spec_with_memory
class Scenario:
    """A question: this workload, divided by this plan, on this cluster."""

    name: Annotated[str, AfterValidator(_for_files)]
    """Files of results are named after it."""
    question: str = ""
    """What it answers; the first line's comment."""
    cluster: Cluster
    """A cluster file, or its table."""
    workload: Workload
    """What is trained."""
    plan: Plan
    """How it is divided."""
    network: Conditions = field(default_factory=Conditions)
    """Faults and other traffic (simulated)."""
    run: Run = field(default_factory=Run)
    """How long."""
    search: SearchSpace = field(default_factory=SearchSpace)
    """Which other plans `gssim search` looks through; it makes no other question."""

    @cached_property
    def source(self) -> Source | None:
        """The file that it was loaded from; None where it was made in code. (Loading fills it in.)"""
        return None

    def with_(self, changes: Mapping[str, Any] | Sequence[str]) -> "Scenario":
        """Return the scenario with changes to its keys, such as `{"plan.method": "zero2"}`, validated like a file.

        Raises UserError for an unknown key or a bad value, and for a scenario that was not loaded from a file.
        """
        from gssim.scenario.loading import changed

        return changed(self, changes)

    @cached_property
    def policies(self) -> Policies:
        """The plan with every policy resolved."""
        devices, backend = self.cluster.devices, self.cluster.backend
        hosts = [device.host for device in devices] if METHODS[self.plan.method].two_levels else ()
        return resolve(self.plan, devices=len(devices), hosts=hosts, backend=backend)

    @cached_property
    def push(self) -> Push:
        """How gradients are pushed, with what follows from the optimizer filled in."""
        return resolved_push(self.plan.push, sgd=self.workload.optimizer.startswith("sgd"))

    @cached_property
    def ranks(self) -> int:
        """Number of ranks; rank i runs on the cluster's i-th device."""
        return self.policies.ranks

    @cached_property
    def idle_devices(self) -> tuple[str, ...]:
        """Names of the cluster's devices that no rank runs on."""
        return tuple(device.name for device in self.cluster.devices[self.ranks :])

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of each rank in one step; the ranks that share a replica, or its gradients, take the same ones."""
        policies, parts = self.policies, self.data_batch_sizes
        return parts if policies.ranks == len(parts) else tuple(parts[policies.data_rank(r)] for r in range(self.ranks))

    @cached_property
    def data_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each part into which the data axes divide a step's batch."""
        wanted, total, policies = self.plan.shares.batch, self.workload.global_batch_size, self.policies
        if wanted == "throughput":
            costs = self._sample_costs()
            slowest = [(0.0, 0.0)] * policies.data_ranks  # of the ranks that hold parts of one replica
            for rank, cost in enumerate(costs):
                part = policies.data_rank(rank)
                slowest[part] = max(slowest[part], cost, key=lambda c: c[1])
            return splitting.balance_batch(total, sample_s=[c[1] for c in slowest], fixed_s=[c[0] for c in slowest])
        return splitting.split(total, splitting.even(policies.data_ranks) if isinstance(wanted, str) else wanted)

    def with_shares(self, samples: Sequence[int], shards: Sequence[float]) -> "Scenario":
        """Return the same with the batch divided so, and shards of these shares: both by rank.

        Ranks that differ in them from what the plan says have parts of the batch of their own, as replanning needs it.
        """
        if (tuple(samples), tuple(shards)) == (self.batch_sizes, self.shard_shares):
            return self  # shares by rank are none by part of the batch where ranks have slices or layers of a model
        total, rules = self.workload.global_batch_size, self.plan.shares
        kept = rules.shards if rules.shards == "even" else tuple(shards)
        rules = replace(rules, batch=tuple(n / total for n in samples), shards=kept)
        return replace(self, plan=replace(self.plan, shares=rules))

    def moved_shards(
        self, *, samples: Sequence[int], owned: Sequence[float], update_s: Sequence[float | None], steps: int
    ) -> tuple[float, ...] | None:
        """Return the shard shares to change to in the middle of a run, or None; see `shares_worth_moving_to`.

        Parameters that are sharded at rest stay with their owners: only of replicas nothing but states must move.
        """
        if self.plan.shares.shards != "cost" or self.policies.parameters != "replicated":
            return None
        return shares_worth_moving_to(
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
        """How many samples each rank may be given at run time: as its memory allows, and no fewer than it has."""
        sizes = self.batch_sizes
        room = sample_room(self.cluster, self.workload, self.plan, self.policies, self.shard_shares)
        return tuple(map(max, sizes, room))

    @cached_property
    def shard_shares(self) -> tuple[float, ...]:
        """Fraction of the sharded state that each rank owns, among those that hold the same part of the model.

        Where blocks are cut among ranks: each one's fraction of them.
        """
        policies, mesh = self.policies, self.policies.mesh
        if policies.partition == "weight-gradient":
            sizes = [instance.layer.elements for instance in unrolled(self.workload.model)]
            return tuple(sum(sizes[slice(*layers)]) / sum(sizes) for layers in self.owned_layers)
        if mesh.tp == mesh.ranks > 1:
            return self.slice_shares
        if policies.slices == "shares":  # they say how blocks are cut
            return splitting.even(mesh.data_ranks) * (mesh.ranks // mesh.data_ranks)
        return self._wanted_shards

    @cached_property
    def owned_layers(self) -> tuple[tuple[int, int], ...]:
        """Half-open range of the layers whose weight gradients each rank makes, where these are dealt out.

        Whole layers, in the model's order, as many as come nearest to the shares: a rank's backward ends at the first
        of its own, so that only the rank that owns the model's first layers goes all the way down; were tensors dealt
        out here and there, all would. Where shares follow the devices' speeds these are the fastest's, else rank 0's.
        """
        ranks = range(self.ranks)
        if self.plan.shares.shards == "compute":
            costs = [each for _, each in self._sample_costs()]
            order = sorted(ranks, key=lambda rank: costs[rank])
        else:
            order = list(ranks)
        wanted = self._wanted_shards
        sizes = tuple(instance.layer.elements for instance in unrolled(self.workload.model))
        found = splitting.contiguous(sizes, tuple(wanted[rank] for rank in order))
        return tuple(layers for _, layers in sorted(zip(order, found, strict=True)))

    @cached_property
    def _wanted_shards(self) -> tuple[float, ...]:
        wanted, mesh = self.plan.shares.shards, self.policies.mesh
        if wanted == "compute":
            return self._by_part([1 / each for _, each in self._sample_costs()])
        if wanted in ("memory", "cost"):
            return owned_shares(self.cluster, self.workload, self.plan, self.policies, self.batch_sizes)
        if isinstance(wanted, str):
            return splitting.even(mesh.data_ranks) * (mesh.ranks // mesh.data_ranks)
        found = splitting.proportional(wanted)
        return tuple(found[mesh.data_rank(rank)] for rank in range(mesh.ranks))

    def _by_part(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Return shares in proportion to weights by rank, among those that hold the same part of the model."""
        mesh = self.policies.mesh
        found = [0.0] * mesh.ranks
        if mesh.data_ranks == mesh.ranks:
            return splitting.proportional(weights)
        for part in range(mesh.ranks):
            if mesh.data_rank(part) == 0:  # the first of those that hold it
                ranks = mesh.group(part, *DATA_AXES)
                for rank, share in zip(ranks, splitting.proportional([weights[rank] for rank in ranks]), strict=True):
                    found[rank] = share
        return tuple(found)

    @cached_property
    def stages(self) -> tuple[tuple[LayerInstance, ...], ...]:
        """The layers of each stage of the pipeline; stage i is on the ranks whose place on the axis pp is i, and round.

        Raises UserError where the plan's stages do not fit the model.
        """
        mesh = self.policies.mesh
        types: list[list[DeviceType]] = [[] for _ in range(mesh.pp)]
        for rank in range(mesh.ranks):
            types[mesh.place(rank).pp].append(self.cluster.type_of(rank))
        samples = max(1, max(self.data_batch_sizes) // self.plan.micro_batches)
        return cut_layers(self.plan, self.workload, types, samples=samples)

    @cached_property
    def slice_shares(self) -> tuple[float, ...]:
        """Share of each rank of a tensor group, by position, in the blocks that they cut among them."""
        wanted, policies = self.plan.shares.shards, self.policies
        if policies.slices != "shares" or wanted == "even":
            return splitting.even(policies.tp)
        if isinstance(wanted, str):
            costs = [each for _, each in self._sample_costs()]  # the slowest rank of each position counts
            return splitting.proportional([1 / max(costs[place :: policies.tp]) for place in range(policies.tp)])
        return splitting.proportional(wanted)

    def _sample_costs(self) -> list[tuple[float, float]]:
        """Return (fixed_s, sample_s) of each rank."""
        types = [device.type for device in self.cluster.devices[: self.ranks]]
        by_type = {name: sample_costs(self.cluster.device_types[name], self.workload) for name in set(types)}
        return [by_type[name] for name in types]

    def resolved(self, shared: Shared | None = None) -> dict[str, Any]:
        """Return the whole scenario as plain data, as the Result keeps it; nobody may change it."""
        return resolved(self, shared or Shared())

    @cached_property
    def scenario_id(self) -> str:
        """Identity of the question: workload, resolved plan, structure of the cluster; no rates, files or names."""
        return self.identity(Shared())

    def identity(self, shared: Shared) -> str:
        """Return the `scenario_id`; `shared`: what it has in common with that of others."""
        return scenario_id(self, shared)


@spec_with_memory
class Loaded:
    """A scenario with what its files said beside it."""

    file: str
    scenario: Scenario
    gradients: GradientStatistics | None = None

    @property
    def statistics_needed(self) -> bool:
        """Whether messages depend on the data, so that a prediction needs gradient statistics."""
        return self.scenario.plan.sends_by_data

    @cached_property
    def calibration_id(self) -> str:
        """Identity of the numbers that a prediction rests on: rates, profiles and statistics."""
        return self.calibration(Shared())

    def calibration(self, shared: Shared) -> str:
        """Return the `calibration_id`; `shared`: what it has in common with that of others."""
        return calibration_id(self.scenario.cluster, self.gradients, shared)


def single_device(scenario: Scenario) -> Scenario:
    """Return the same training on one device: the reference that every method must equal."""
    return replace(scenario, plan=Plan(method="single"))
