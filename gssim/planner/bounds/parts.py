"""The part of the model and of the batch that each rank runs under a plan; all bounds share it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar

from gssim.errors import UserError
from gssim.execution.cache import NOT_KEPT, Same
from gssim.plan import Plan, Policies, resolve, ring_blocks, splitting
from gssim.scenario import (
    Scenario,
    divided_expert_layers,
    held_experts,
    held_layers,
    held_slice,
    master_bytes,
    reduce_precision,
    value_bytes,
)
from gssim.scenario.checks import check_adapters
from gssim.scenario.context_slices import uncombined_reason
from gssim.scenario.scenario import sequence_positions
from gssim.scenario.stages import stage_cut_error
from gssim.scenario.tensor_slices import Slicing, model_slice
from gssim.units import PRECISION_BYTES
from gssim.workload import Layer, LayerInstance, TokenInput, unrolled

T = TypeVar("T")

NOT_RESOLVED = frozenset({"micro_batches", "recompute", "shares", "push", "offload"})
"""Keys of a plan in which the candidates of a mesh differ, and on which its policies do not depend."""
_resolved_keys = attrgetter(*(each.name for each in fields(Plan) if each.name not in NOT_RESOLVED))


@dataclass(frozen=True, eq=False)
class Part:
    """The part of the model that a rank runs. There is one object for each part, and caches use it as their key."""

    layers: tuple[LayerInstance, ...]
    wholes: tuple[Layer | None, ...]
    """For each layer that is a slice, the whole layer; else None."""
    ratio: float = 1.0
    """Lower bound of the fraction of these layers that a rank runs and holds."""
    positions: int | None = None
    """Number of positions of each sequence on which the layers run, if context-parallel ranks divide sequences."""

    @cached_property
    def elements(self) -> float:
        """Number of parameter elements."""
        return self.ratio * sum(instance.layer.elements for instance in self.layers)

    @cached_property
    def expert_elements(self) -> float:
        """Number of elements that belong to the rank's experts, if ranks divide experts."""
        return float(sum(p.elements for instance in self.layers for p in instance.layer.parameters if p.of_experts))


class ModelParts:
    """Parts of one workload on one cluster by plan; values shared by many plans are computed once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.model, self.workload = scenario.workload.model, scenario.workload
        self.names = [device.type for device in scenario.cluster.devices]
        self.hosts = [device.host for device in scenario.cluster.devices]
        self.types = [scenario.cluster.device_types[name] for name in self.names]
        self.value, self.master = value_bytes(scenario.workload), master_bytes(scenario.workload)
        self.reduced = PRECISION_BYTES[reduce_precision(scenario.workload)]
        self.layers = unrolled(self.model)
        adapted = self.model.whole_layers  # measured profiles are of layers without adapters, with none frozen
        self.traced = unrolled(replace(self.model, layers=adapted)) if adapted else self.layers
        self.whole = Part(self.layers, self._wholes(self.layers))
        self._fields = {each.name: getattr(scenario, each.name) for each in fields(scenario)}
        self._memo: dict[Hashable, Any] = {}

    def _wholes(self, held: Sequence[LayerInstance]) -> tuple[Layer | None, ...]:
        """Return, for each of these layers, the whole model's layer, which profiles are of; None if it is the same."""
        whole = [self.traced[instance.index].layer for instance in held]
        return tuple(None if each is i.layer else each for each, i in zip(whole, held, strict=True))

    def policies(self, plan: Plan) -> Policies:
        """Return the plan with every policy resolved; raise UserError if it does not suit the devices."""

        def found() -> Policies:
            return resolve(plan, devices=len(self.names), hosts=self.hosts, backend=self.scenario.cluster.backend)

        return self.once(("policies", _resolved_keys(plan)), found)

    def batch_sizes(self, plan: Plan, policies: Policies) -> tuple[int, ...]:
        """Return the number of samples in each data rank's part of the batch."""
        rule, total = plan.shares.batch, self.workload.global_batch_size
        if not isinstance(rule, str):
            return tuple(round(share * total) for share in rule)
        key = ("sizes", rule, policies.mesh, policies.partition, plan.micro_batches)  # rates are of a micro-batch
        return self.once(key, lambda: self.with_plan(plan).data_batch_sizes)

    def with_plan(self, plan: Plan) -> Scenario:
        """Return the scenario with another plan, which is valid: nothing is validated again."""
        changed: Scenario = object.__new__(Scenario)
        vars(changed).update(self._fields, plan=plan)
        return changed

    def part(self, plan: Plan, policies: Policies, rank: int) -> Part:
        """Return the part of a rank; raise UserError if the model cannot be cut in that way."""
        if policies.tp > 1 and policies.ep == 1:
            self._check_slices(policies.tp)
        if policies.tp > 1 and self.workload.adapters is not None:  # not all slices of layers with adapters are traced
            check_adapters(self.with_plan(plan), policies, "workload.adapters")
        self._check_expert_parts(policies)
        if policies.pp > 1:
            place, experts = policies.mesh.place(rank).pp, self.expert_position(policies, rank)
            cut = self._cut_key(plan, policies)
            own_key = ("part", cut, self.slices_key(plan, policies), policies.ep, experts, place)
            return self.once(own_key, lambda: self._stage_part(plan, policies, place, experts))
        if policies.ep > 1:
            return self._with_experts(plan, policies, policies.mesh.expert_position(rank))
        if policies.cp > 1:
            return self._in_context(plan, policies)
        if policies.tp == 1:
            return self.whole
        parts = self._slice_shares(plan, policies)
        position = rank % policies.tp if policies.slices == "shares" else 0
        positions = sequence_positions(policies, self.workload)
        slicing = Slicing.of(self.with_plan(plan))
        held = partial(model_slice, self.model, parts, position, slicing, positions=positions)
        return self.once(("slice", parts, position, positions, slicing), lambda: self._of_traced(unrolled(held())))

    def parts(self, plan: Plan, policies: Policies) -> Sequence[Part]:
        """Return the part of each rank; raise UserError if the model cannot be cut in that way.

        `policies`: the plan's, from `policies`.
        """
        sizes = self.batch_sizes(plan, policies) if policies.pp > 1 else ()  # which decide where stages are cut
        key = ("parts", Same(policies), plan.micro_batches, plan.shares.shards, sizes)

        def found() -> Sequence[Part]:
            alike = self.alike(policies)
            of_rank = {rank: self.part(plan, policies, rank) for rank in dict.fromkeys(alike)}
            return [of_rank[rank] for rank in alike]

        return self.once(key, found)

    def alike(self, policies: Policies) -> tuple[int, ...]:
        """Return, for each rank, the lowest rank that does the same: it is on the same type of device, and has the same
        part of the model and of the attention.
        """

        def found() -> tuple[int, ...]:
            mesh, kinds, first = policies.mesh, list[Hashable](), dict[Hashable, int]()
            for rank in range(policies.ranks):
                slice_of = rank % mesh.tp if policies.slices == "shares" else 0
                experts, attended = self.expert_position(policies, rank), self.attended_ratio(policies, rank)
                kinds.append((self.names[rank], mesh.place(rank).pp, slice_of, experts, attended))
                first.setdefault(kinds[-1], rank)
            return tuple(first[kind] for kind in kinds)

        return self.once(("alike", Same(policies)), found)

    def attended_ratio(self, policies: Policies, rank: int) -> float:
        """Return a lower bound of a rank's compute, as a fraction of that with an equal part of the attention.

        The first ranks of a plain division attend to fewer positions, in proportion if attention were all they do.
        """
        source = self.model.input
        if not policies.ring or policies.zigzag or not isinstance(source, TokenInput) or source.task != "next-token":
            return 1.0
        blocks = ring_blocks(policies.mesh.place(rank).cp, ranks=policies.cp, causal=True, zigzag=False)
        return min(1.0, sum(block.work for block in blocks if block) / (policies.cp / 2))

    def expert_position(self, policies: Policies, rank: int) -> int:
        """Return a rank's position among those that divide experts; 0 if none do."""
        return policies.mesh.expert_position(rank) if policies.ep > 1 else 0

    def _stage_part(self, plan: Plan, policies: Policies, place: int, experts: int) -> Part:
        """Return what ranks at a place of a pipeline hold; `experts`: see `expert_position`."""
        stages = self.stages(plan, policies)[place :: policies.pp]
        cut = tuple((stage[-1].index, len(stage)) for stage in stages)
        held: tuple[Hashable, ...] = ("stages", cut, self.slices_key(plan, policies), policies.ep, experts)
        positions = sequence_positions(policies, self.workload) if policies.cp > 1 else None
        if policies.cp == policies.ep == 1:
            # layers with a copy of a tied parameter, or without a backward, are otherwise as measured
            layers = tuple(instance for stage in stages for instance in stage)
            return self.once(held, lambda: Part(layers, self._wholes(layers), 1 / policies.tp))

        def cut_part() -> Part:
            of_experts = policies.ep > 1
            whole = self._with_experts(plan, policies, experts) if of_experts else self._in_context(plan, policies)
            every = held_layers(whole.layers, self.with_plan(plan).stage_ranges)
            own = tuple(instance for stage in every[place :: policies.pp] for instance in stage)
            return Part(own, tuple(self.traced[each.index].layer for each in own), positions=positions)

        return self.once(held, cut_part)

    def slices_key(self, plan: Plan, policies: Policies) -> Hashable:
        """Return everything that layers of tensor ranks, and on parts of sequences, depend on, but the own place."""
        slices = policies.tp, policies.sequence_parallel, plan.gathered_inputs
        beside = plan.async_input_gradients, plan.tp_overlap
        return (*slices, *beside, plan.embedding_parallel, plan.loss_parallel, self._context(plan, policies))

    def _context(self, plan: Plan, policies: Policies) -> Hashable:
        """Return everything that layers on parts of sequences depend on; None if sequences are not divided."""
        if policies.cp == 1:
            return None
        slices = policies.sequence_parallel, plan.gathered_inputs, plan.embedding_parallel, plan.loss_parallel
        beside = plan.async_input_gradients, plan.tp_overlap
        return ("context", beside, sequence_positions(policies, self.workload), policies.ring, policies.tp, slices)

    def _in_context(self, plan: Plan, policies: Policies) -> Part:
        """Return the layers of all stages on a rank's part of the sequences."""

        def found() -> Part:
            if not self.model.context_layers:
                raise UserError("the model is not traced on parts of sequences")
            if policies.tp > 1:
                parallel = policies.sequence_parallel
                self._check_context(self.model.sequence_layers if parallel else self.model.sliced_layers)
            layers = unrolled(held_slice(self.with_plan(plan), 0))
            return self._of_traced(layers, sequence_positions(policies, self.workload))

        return self.once(self._context(plan, policies), found)

    def _of_traced(self, layers: tuple[LayerInstance, ...], positions: int | None = None) -> Part:
        """Return layers of which each is a part of a traced one."""
        return Part(layers, tuple(instance.layer for instance in self.traced), positions=positions)

    def _check_slices(self, ranks: int) -> None:
        """Raise UserError if the model's blocks cannot be cut among this number of ranks."""
        if not self.model.sliced_layers:
            why = f": {self.model.uncut_reason}" if self.model.uncut_reason else ""
            raise UserError(f"the model does not say how its blocks are cut{why}")
        if any(layer.units and layer.units < ranks for layer in self.model.sliced_layers):
            raise UserError("there are fewer units than ranks")

    def _check_context(self, cut: Sequence[Layer]) -> None:
        """Raise UserError if layers with parts of blocks are not known on parts of sequences."""
        if (why := uncombined_reason(self.model, cut)) is not None:
            raise UserError(f"the model {why}")

    def _check_expert_parts(self, policies: Policies) -> None:
        """Raise UserError if ranks cannot divide experts so, or experts are not known on parts of sequences."""
        if policies.gradients == "reduce-scatter" and policies.shards % policies.mesh.expert_stride:
            raise UserError(f"{policies.ep} ranks cannot divide the experts among the {policies.shards} of a replica")
        for layer in divided_expert_layers(self.model, policies) if policies.ep > 1 else ():
            if (layer.routed_experts or 0) % policies.ep:
                raise UserError(f"{policies.ep} ranks cannot divide the {layer.routed_experts} experts of {layer.name}")
        if policies.ep == 1 or policies.cp == 1:
            return
        if not self.model.context_layers:
            raise UserError("the model is not traced on parts of sequences")
        self._check_context(self.model.expert_layers)

    def _with_experts(self, plan: Plan, policies: Policies, position: int) -> Part:
        """Return the layers of all stages with the experts of a position among the ranks that divide them."""
        key = ("experts", policies.ep, position, self.slices_key(plan, policies))

        def found() -> Part:
            divided = divided_expert_layers(self.model, policies)
            if not divided:
                raise UserError("the model has no layers with divided experts")
            if any(layer.units and layer.units % policies.tp for layer in divided):
                raise UserError("tensor ranks do not divide the units of blocks")
            positions = sequence_positions(policies, self.workload) if policies.cp > 1 else None
            return self._of_traced(held_experts(self.with_plan(plan), position, 0), positions)

        return self.once(key, found)

    def _slice_shares(self, plan: Plan, policies: Policies) -> tuple[float, ...]:
        if policies.slices != "shares":
            return splitting.even(policies.tp)
        key = ("slice shares", plan.shares.shards, policies.mesh, plan.micro_batches)
        return self.once(key, lambda: self.with_plan(plan).slice_shares)

    def stages(self, plan: Plan, policies: Policies) -> tuple[tuple[LayerInstance, ...], ...]:
        """Return the layers of every stage of a pipeline; raise UserError if the model cannot be cut in that way."""

        def cut() -> tuple[tuple[tuple[LayerInstance, ...], ...], str | None]:
            scenario = self.with_plan(plan)
            ranges = scenario.stage_ranges
            key = ("cut", ranges, Same(policies) if policies.ep > 1 else None)
            return self.once(key, lambda: (scenario.stages, stage_cut_error(self.layers, ranges)))

        stages, reason = self.once(self._cut_key(plan, policies), cut)
        if reason:
            raise UserError(f"the model is no chain that can be cut: {reason}")
        return stages

    def _cut_key(self, plan: Plan, policies: Policies) -> Hashable:
        """Return everything that the cut of a pipeline into stages depends on."""
        sizes = self.batch_sizes(plan, policies)
        return ("stages", plan.stages, plan.schedule, plan.micro_batches, policies.mesh, policies.ring, sizes)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of `make`, computed once per key."""
        found: T = self._memo.get(key, NOT_KEPT)
        if found is NOT_KEPT:
            found = self._memo[key] = make()
        return found
