"""Lower bounds of the memory of ranks, by plan: persistent state, gradients, activations and gathered parameters."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from math import ceil, prod

from gssim.collectives import Communication
from gssim.execution.cache import Same
from gssim.memory import (
    Event,
    Lives,
    Timeline,
    activation_timeline,
    input_bytes,
    recomputation_begin,
    recomputed_buffers,
    traced_buffers,
)
from gssim.plan import Plan, Policies, splitting
from gssim.plan.pipeline_schedule import INTERLEAVED, schedule
from gssim.planner.bounds.parts import ModelParts, Part
from gssim.program.experts import OPERATIONS, count_exchange, row_exchange
from gssim.program.stage_boundary import Stage, stage_timeline, stages_of
from gssim.program.tensor_slices import reductions_in
from gssim.scenario import (
    divided_expert_layers,
    held_experts,
    held_layers,
    held_slice,
    rows_by_rank,
    schedule_of,
)
from gssim.scenario.scenario import sequence_positions
from gssim.units import PRECISION_BYTES, Recompute
from gssim.workload import Buffer, Layer, LayerInstance, state_element_bytes, unrolled
from gssim.workload.optimizers import is_matrix

MAX_REPLAYED_SAMPLES = 8
"""Largest number of samples at which activations are followed buffer by buffer; only powers of two are."""


class MemoryBounds:
    """Lower bounds of the memory of ranks."""

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts

    def full_ratio(self, plan: Plan, policies: Policies, sizes: Sequence[int]) -> float:
        """Return a lower bound of the fraction of memory used on the fullest device."""
        kinds, parts = zip(self._kinds(plan, policies), sizes, strict=True), self.parts.parts(plan, policies)
        return max(
            self._needed(plan, policies, rank, parts[rank], owned)(n) / self.parts.types[rank].memory_bytes
            for (rank, owned), n in dict.fromkeys(kinds)
        )

    def most_samples(self, plan: Plan, policies: Policies, ratios: Sequence[float]) -> list[list[int]]:
        """Return, for each of several fractions of memory, the most samples with which each rank fits it."""
        kinds, parts = self._kinds(plan, policies), self.parts.parts(plan, policies)
        needed = {
            (rank, owned): self._needed(plan, policies, rank, parts[rank], owned)
            for rank, owned in dict.fromkeys(kinds)
        }
        found = [
            {kind: self._most_samples(kind[0], of_kind, ratio) for kind, of_kind in needed.items()} for ratio in ratios
        ]
        return [[of_ratio[kind] for kind in kinds] for of_ratio in found]

    def _kinds(self, plan: Plan, policies: Policies) -> list[tuple[int, float]]:
        """Return for each rank a rank with the same part of the model, and how many elements it updates itself."""
        sizes = self.parts.batch_sizes(plan, policies) if policies.pp > 1 else ()  # which decide where stages are cut
        key = ("kinds", Same(policies), plan.micro_batches, plan.shares.shards, sizes)
        return self.parts.once(key, lambda: self._found_kinds(plan, policies))

    def _found_kinds(self, plan: Plan, policies: Policies) -> list[tuple[int, float]]:
        alike = self.parts.alike(policies)
        if policies.pp > 1 or policies.ep > 1:  # for these, owned elements are known only for the representative rank
            owned = {rank: self._owned(plan, policies, rank) for rank in set(alike)}
            return [(rank, owned[rank]) for rank in alike]
        return [(first, self._owned(plan, policies, rank)) for rank, first in enumerate(alike)]

    def _most_samples(self, rank: int, needed: Callable[[int], float], ratio: float) -> int:
        """Return the most samples that fit a fraction of a rank's memory; `needed`: the rank's, from `_needed`."""
        room, total = ratio * self.parts.types[rank].memory_bytes, self.parts.workload.global_batch_size

        def most() -> int:
            if needed(total) <= room:
                return total
            return bisect_left(range(total + 1), True, lo=1, key=lambda samples: needed(samples) > room) - 1

        return self.parts.once(("room", Same(needed), ratio), most)

    def _needed(self, plan: Plan, policies: Policies, rank: int, part: Part, owned: float) -> Callable[[int], float]:
        """Return the function that gives the least bytes that a rank needs for a number of samples.

        There is one function for all plans in which the rank needs as much; it remembers its values.
        """
        key = (
            "needed",
            self.parts.names[rank],
            Same(policies),
            part,
            owned,
            plan.offload,
            plan.micro_batches,
            plan.recompute,
        )
        return self.parts.once(key, lambda: cache(self._least_bytes(plan, policies, rank, part, owned)))

    def _least_bytes(
        self, plan: Plan, policies: Policies, rank: int, part: Part, owned: float
    ) -> Callable[[int], float]:
        device, micro_batches = self.parts.types[rank], plan.micro_batches
        idle = device.context_bytes + device.workspace_bytes
        if policies.partition == "weight-gradient":
            return lambda samples: idle
        always = idle + self._communicators(policies) * device.communicator_bytes
        offload = None if device.kind == "cpu" else plan.offload  # a CPU is its own host
        persistent = self._persistent_bytes(policies, part, owned, offload)
        value, sharded = self._gradients(policies, 0.0 if plan.offload else owned)
        held = value * part.elements + sharded
        transient = cache(partial(self._transient_bytes, plan, policies, part))  # depends on the largest micro-batch

        def least_bytes(samples: int) -> float:
            if not samples:
                return idle
            whole, extra = divmod(samples, micro_batches)  # the first `extra` micro-batches have a sample more
            peak = transient(whole + (extra > 0))
            if micro_batches > 1:  # later micro-batches start with the gradients of earlier ones
                largest, last = whole + (extra > 1), whole
                between = micro_batches > 2
                if policies.gradients in ("local", "periodic"):
                    between, last = True, 0
                if policies.gradient_sync == "micro-batch":
                    between, last = False, largest
                if between:
                    peak = max(peak, held + transient(largest))
                # as they are reduced, layer by layer, gradients may be freed
                peak = max(peak, sharded + transient(last, unreduced_value=value))
            return always + (persistent + self._batch_bytes(policies, samples)) + peak

        return least_bytes

    def stages_full_ratio(self, plan: Plan, policies: Policies, sizes: Sequence[int]) -> float:
        """Return a lower bound of the fraction of memory used on the fullest device of a pipeline; 0 if none is known.

        While one micro-batch goes forward or backward, a rank holds the activations of all micro-batches in flight and,
        from its first backward on, the accumulated gradients. `full_ratio`, by which batches are split, counts neither,
        nor communicators of pipelines.
        """
        if policies.pp == 1 or not has_equal_slices(policies):
            return 0.0
        if len(self.parts.stages(plan, policies)) > policies.pp or plan.schedule in INTERLEAVED:
            return 0.0
        try:
            in_flight = self._in_flight(plan, policies)
        except ValueError:  # the schedule is impossible; the plan is refused when it is loaded
            return 0.0
        kinds: dict[tuple[str, int, int, int, float], int] = {}
        for rank, samples in enumerate(sizes):
            place, experts = policies.mesh.place(rank).pp, self.parts.expert_position(policies, rank)
            owned = self._owned_of_stage(self.stage_on_rank(plan, policies, rank)[0], plan, policies, rank)
            kinds.setdefault((self.parts.names[rank], place, experts, samples, owned), rank)
        found = 0.0
        for (_, place, _, samples, owned), rank in kinds.items():
            device = self.parts.types[rank]
            part, stage = self.stage_on_rank(plan, policies, rank)
            kept, forward, backward = self._stage_activations(stage, plan.recompute, samples // plan.micro_batches)
            if policies.parameters == "gathered" and policies.shards > 1:
                backward += part.elements * self.parts.value
            gradients = part.elements * min(self.parts.value, self.parts.reduced)
            if policies.zero1_implementation == "megatron":
                gradients = 0.0  # gradients are in the buckets, which are counted
            first, later = in_flight[place]
            peak = (first - 1) * kept + max(forward, backward)
            if later:
                peak = max(peak, (later - 1) * kept + backward + gradients)
            offload = None if device.kind == "cpu" else plan.offload  # a CPU is its own host
            always = device.context_bytes + device.workspace_bytes
            always += self._stage_communicators(policies, part, place) * device.communicator_bytes
            always += self._persistent_bytes(policies, part, owned, offload)
            always += self._received_bytes(plan, stage, samples // plan.micro_batches, first)
            found = max(found, (always + peak) / device.memory_bytes)
        return found

    def _in_flight(self, plan: Plan, policies: Policies) -> list[tuple[int, int]]:
        """Return, for each place of a pipeline, two numbers of micro-batches in flight: at its first backward, and the
        largest at any of the backwards between the first and the last (0 if there is none).
        """
        ranks, count = policies.pp, plan.micro_batches
        name = schedule_of(plan, ranks)

        def found() -> list[tuple[int, int]]:
            result = []
            for actions in schedule(name, ranks=ranks, stages=ranks, micro_batches=count):
                now, at_backwards = 0, []
                for action in actions:
                    if action.kind == "backward":
                        at_backwards.append(now)
                    now += {"forward": 1, "backward": -1}.get(action.kind, 0)
                result.append((at_backwards[0], max(at_backwards[1:-1], default=0)))
            return result

        return self.parts.once(("in flight", name, ranks, count), found)

    def stage_on_rank(self, plan: Plan, policies: Policies, rank: int) -> tuple[Part, Stage]:
        """Return a rank's stage of a pipeline, as the first rank of each tensor group holds it."""
        cut, experts = self.parts.stages(plan, policies), self.parts.expert_position(policies, rank)
        ends = tuple((stage[0].index, stage[-1].index, len(stage)) for stage in cut)
        positions = sequence_positions(policies, self.parts.workload)
        key = ("held", ends, self.parts.slices_key(plan, policies), positions, policies.ep, experts)

        def held() -> list[tuple[Part, Stage]]:
            layers, scenario = cut, self.parts.with_plan(plan)
            if policies.ep > 1:
                layers = held_layers(held_experts(scenario, experts, 0), scenario.stage_ranges)
            elif policies.tp > 1:
                layers = held_layers(unrolled(held_slice(scenario, 0)), scenario.stage_ranges)
            divided = policies.tp > 1 or policies.ep > 1
            found = []
            for stage in stages_of(layers):
                whole = [self.parts.layers[each.index].layer if divided else None for each in stage.layers]
                found.append((Part(stage.layers, tuple(whole)), stage))
            return found

        return self.parts.once(key, held)[policies.mesh.place(rank).pp]

    def _owned_of_stage(self, part: Part, plan: Plan, policies: Policies, rank: int) -> float:
        """Return a lower bound of the number of elements of its stage that a rank updates."""
        if policies.ep > 1 and policies.optimizer_state != "replicated":  # experts are owned by others than the rest
            return 0.0
        return self._owned_of(part, plan, policies, rank)

    def output_bytes(self, plan: Plan, policies: Policies, samples: int) -> list[float]:
        """Return the bytes that each pipeline stage but the last sends forward for `samples` samples."""
        length = self.parts.workload.sequence_length or 1
        stride = policies.ranks // policies.pp
        stages = [self.stage_on_rank(plan, policies, place * stride)[1] for place in range(policies.pp - 1)]
        return [self._scale * stage.output_bytes.at(b=samples, s=length) for stage in stages]

    def sums(
        self, plan: Plan, policies: Policies, rank: int, phase: str, samples: int
    ) -> Mapping[tuple[str, float], int]:
        """Return the collectives over tensor slices for which a rank waits in a phase, counted by kind and bytes.

        `phase`: `f` (forward), `b` (backward), or `r` (recomputed forward).
        """
        part, stage = self.stage_on_rank(plan, policies, rank)
        length = self.parts.workload.sequence_length or 1

        def found() -> Counter[tuple[str, float]]:
            return Counter(
                (each.kind, each.bytes_at(b=samples, s=length, scale=self._scale))
                for instance in stage.layers
                if phase != "r" or instance.layer.is_recomputed
                for each in reductions_in(instance.layer, phase, plan.recompute)
                if each.kind in ("all-reduce", "all-gather", "reduce-scatter")
            )

        return self.parts.once(("sums", part, phase, plan.recompute, samples), found)

    def exchanges(
        self, plan: Plan, policies: Policies, rank: int, phase: str, samples: int
    ) -> Mapping[Communication, int]:
        """Return the exchanges of rows of experts for which a rank waits in a phase; arguments as of `sums`."""
        part, stage = self.stage_on_rank(plan, policies, rank)
        group = policies.mesh.expert_group(rank)

        def found() -> Counter[Communication]:
            counted: Counter[Communication] = Counter()
            for instance in (
                stage.layers if phase != "r" else [each for each in stage.layers if each.layer.is_recomputed]
            ):
                rows: Sequence[float] | None = None
                for each in reductions_in(instance.layer, phase, plan.recompute):
                    if each.kind not in OPERATIONS:
                        continue
                    size_bytes = each.size_bytes.at(b=1, s=1)
                    if each.kind == "counts":
                        counted[count_exchange([group], size_bytes)] += 1
                        continue
                    rows = rows or self._rows(policies, instance.module)
                    sent = [samples * count * self._scale * size_bytes for count in rows]
                    counted[row_exchange([group], each.kind, sent)] += 1
            return counted

        return self.parts.once(("exchanges", part, group, phase, plan.recompute, samples), found)

    def _rows(self, policies: Policies, module: str) -> Sequence[float]:
        """Return the rows that one sample of each rank sends to each rank's experts in a layer."""
        model = self.parts.model

        def whole() -> dict[str, LayerInstance]:
            layers = unrolled(replace(model, layers=divided_expert_layers(model, policies)))
            return {each.module: each for each in layers if each.layer.experts_per_token}

        instance = self.parts.once(("whole experts", policies.mesh), whole)[module]
        return rows_by_rank(self.parts.workload, policies, instance)

    def _received_bytes(self, plan: Plan, stage: Stage, samples: int, in_flight: int) -> float:
        """Return the bytes of a stage's receive buffers; see `plan.receive_buffers`."""
        few = plan.receive_buffers == "in-flight"
        sizes = []
        if stage.received is not None:
            sizes.append((stage.received, in_flight if few else plan.micro_batches))
        if stage.after is not None:
            sizes.append((stage.output_bytes, 1 if few else plan.micro_batches))
        length = self.parts.workload.sequence_length or 1
        return self._scale * sum(count * size.at(b=samples, s=length) for size, count in sizes)

    @property
    def _scale(self) -> float:
        """Bytes of an element relative to the precision of the trace."""
        return self.parts.value / PRECISION_BYTES[self.parts.model.traced_precision]

    def _stage_activations(self, stage: Stage, recompute: Recompute, samples: int) -> tuple[float, float, float]:
        """Return the activations that a micro-batch holds between its forward and backward, and the peaks of both
        passes.

        The schedule keeps a stage's output until the end of its backward.
        """

        def found() -> tuple[float, float, float]:
            timeline = stage_timeline(
                stage,
                batch_size=samples,
                sequence_length=self.parts.workload.sequence_length or 1,
                scale=self._scale,
                lives=self._lives(recompute),
            )
            layers = [replace(instance, index=number) for number, instance in enumerate(stage.layers)]
            peaks = _held_bytes(layers, timeline)
            kept = sum(event.size_bytes for number in range(len(layers)) for event in timeline.at(number, "f"))
            return kept, max(peaks[: len(layers)]), max(peaks[len(layers) :])

        return self.parts.once(("stage activations", stage.structure_key, recompute, samples), found)

    def _lives(self, recompute: Recompute) -> Lives:
        """Return the function that gives the lifetimes of a layer's buffers under a recomputation.

        They depend neither on the samples nor on the plan: each is computed once for layers between the same others.
        """
        if recompute == "none":
            return traced_buffers

        def recomputed(layer: Layer, before: Layer | None, following: Sequence[Layer]) -> Sequence[Buffer]:
            key = ("lives", recompute, Same(layer), Same(before), *map(Same, following))
            return self.parts.once(key, lambda: recomputed_buffers(layer, before, following, recompute=recompute))

        return recomputed

    def _communicators(self, policies: Policies) -> int:
        """Return a lower bound of a rank's number of communicators."""
        if self.parts.scenario.cluster.backend != "nccl" or policies.pp > 1:
            return 0
        return sum(size > 1 for size in (policies.dp_replicate, policies.dp_shard, policies.cp, policies.tp))

    def _stage_communicators(self, policies: Policies, part: Part, place: int) -> int:
        """Return a lower bound of a pipeline rank's number of communicators: one for each neighbour, and for each data
        axis if all of its stage is trained; `place`: the rank's place in the pipeline.
        """
        workload = self.parts.workload
        if self.parts.scenario.cluster.backend != "nccl":
            return 0
        neighbours = (place > 0) + (place < policies.pp - 1)
        if not part.elements or workload.frozen is not None or workload.adapters is not None:
            return neighbours
        return neighbours + (policies.dp_replicate > 1) + (policies.dp_shard > 1)

    def _persistent_bytes(self, policies: Policies, part: Part, owned: float, offload: str | None) -> float:
        """Return persistent memory: parameters, optimizer states and buckets, without what is offloaded."""
        workload, value, master = self.parts.workload, self.parts.value, self.parts.master
        elements, replicated = part.elements, policies.parameters == "replicated"
        kept = elements * value if replicated else owned * value
        if offload == "parameters":
            kept = 0.0
        # gradients of divided experts are not in buckets, and no bucket exists all the time where gradients are freed
        if policies.gradients == "all-reduce" and not policies.frees_gradients:
            kept += (elements - part.expert_elements * (policies.ep > 1)) * value
        if offload is None:
            kept += owned * master if replicated and master > value else 0.0
            precision = workload.optimizer_state_precision
            kept += int(owned) * state_element_bytes(workload.optimizer, value_bytes=master, precision=precision)
        return kept

    def _batch_bytes(self, policies: Policies, samples: int) -> float:
        """Return the bytes of a rank's batch; 0 in pipelines, of which not every stage has it."""
        if policies.pp > 1:
            return 0.0
        length, value = -(-(self.parts.workload.sequence_length or 0) // policies.cp), self.parts.value
        return input_bytes(self.parts.model, batch_size=samples, sequence_length=length, value_bytes=value)

    def _gradients(self, policies: Policies, owned: float) -> tuple[int, float]:
        """Return the bytes per element of gradients that later micro-batches start with, and the bytes of a rank's
        shards.

        Gradients that are to be all-reduced are in buckets as well, and only there once they were reduced before.
        """
        if policies.pp > 1 or policies.zero1_implementation == "megatron":
            return 0, 0.0
        if policies.gradient_sync == "step" or policies.gradients == "local":
            return min(self.parts.value, self.parts.reduced), 0.0
        if policies.gradients == "all-reduce" and not policies.frees_gradients:
            return 0, 0.0
        return 0, owned * self.parts.value

    def _transient_bytes(
        self, plan: Plan, policies: Policies, part: Part, samples: int, *, unreduced_value: int = 0
    ) -> float:
        """Return the transient peak of a micro-batch, or 0 if it is not known.

        It consists of activations, temporaries, the parameters gathered meanwhile, and unreduced gradients of
        `unreduced_value` bytes per element.
        """
        if not samples or policies.pp > 1:
            return 0.0
        gathers = policies.parameters if policies.shards > 1 else "replicated"
        key = ("passing", part, gathers, plan.recompute, samples, unreduced_value)
        held = gathers, unreduced_value
        return self.parts.once(key, lambda: self._extrapolated_peak(part, held, plan.recompute, samples))

    def _extrapolated_peak(self, part: Part, held: tuple[str, int], recompute: Recompute, samples: int) -> float:
        if samples <= 2:
            return self._peak_bytes(part, held, recompute, samples)
        # memory at each moment is linear in the samples, so the peak is convex, and lies above an extended chord
        second = min(1 << (samples.bit_length() - 1), MAX_REPLAYED_SAMPLES)
        first = second // 2
        low, high = (self._peak_bytes(part, held, recompute, each) for each in (first, second))
        return high + (high - low) / (second - first) * (samples - second)

    def _peak_bytes(self, part: Part, held_beside: tuple[str, int], recompute: Recompute, samples: int) -> float:
        """Return the transient peak of a micro-batch; `held_beside`: how parameters are gathered (see
        `_gathered_elements`), and the bytes per element of gradients that are not reduced yet.
        """
        gathers, unreduced_value = held_beside
        held = self.parts.once(
            ("activations", part, recompute, samples),
            lambda: _held_bytes(part.layers, self._timeline(part, recompute, samples)),
        )
        gathered = self.parts.once(("gathered", part, gathers), lambda: _gathered_elements(part, gathers))
        unreduced = self.parts.once(("unreduced", part), lambda: _unreduced_elements(part))
        return self.parts.once(
            ("peak", part, gathers, recompute, samples, unreduced_value),
            lambda: max(
                a + self.parts.value * b + unreduced_value * c
                for a, b, c in zip(held, gathered, unreduced, strict=True)
            ),
        )

    def _timeline(self, part: Part, recompute: Recompute, samples: int) -> Timeline:
        return activation_timeline(
            part.layers,
            batch_size=samples,
            sequence_length=self.parts.workload.sequence_length or 1,
            scale=self._scale,
            lives=self._lives(recompute),
        )

    def _owned(self, plan: Plan, policies: Policies, rank: int) -> float:
        """Return a lower bound of the number of elements that a rank updates."""
        part = self.parts.part(plan, policies, rank)
        is_known = policies.pp == 1 and policies.partition != "weight-gradient" and policies.ep == 1
        if policies.optimizer_state != "replicated" and not is_known:
            return 0.0  # experts are owned by others than the rest
        return self._owned_of(part, plan, policies, rank)

    def _owned_of(self, part: Part, plan: Plan, policies: Policies, rank: int) -> float:
        """Return the number of elements of its part, or of its stage, that a rank updates."""
        if policies.optimizer_state == "replicated":
            return part.elements
        place, ranks = rank // policies.tp % policies.replica_ranks, policies.replica_ranks
        if policies.gradients == "reduce-scatter":
            ranks = policies.shards
            return self.parts.once(("chunks", part, ranks), lambda: _fsdp_chunks(part, ranks))[place % ranks]
        if policies.gradients == "push":
            return self._pushed_share(plan, policies, part, rank)
        if policies.zero1_implementation != "torch":
            return 0.0 if self.parts.workload.optimizer == "muon" else part.elements / ranks
        return self.parts.once(("dealt", part, ranks), lambda: self._tensor_owners(part, ranks))[place]

    def _tensor_owners(self, part: Part, ranks: int) -> list[float]:
        """Return the elements of the tensors that each rank updates, where whole tensors are assigned (ZeRO-1)."""
        members = [(instance.layer, each) for instance in part.layers for each in instance.layer.parameters]
        sizes = [parameter.elements for _, parameter in members]
        by_muon = self.parts.workload.optimizer == "muon"
        groups = [int(not (by_muon and is_matrix(layer, parameter))) for layer, parameter in members]
        return [float(sum(sizes[i] for i in own)) for own in splitting.greedy(sizes, ranks, groups)]

    def _pushed_share(self, plan: Plan, policies: Policies, part: Part, rank: int) -> float:
        """Return a lower bound of the number of elements of a part that are pushed to a rank."""
        rule = plan.shares.shards
        if rule in ("memory", "cost"):  # any size is possible
            return 0.0
        key = ("shards", rule, policies.mesh, plan.micro_batches, part)  # a rate is of a micro-batch's samples
        return self.parts.once(key, lambda: self._push_shards(plan, part))[rank]

    def _push_shards(self, plan: Plan, part: Part) -> list[float]:
        """Return the elements of each owner's shard, minus the most that rounding may lose.

        Every bucket is rounded, and there is at most one bucket per tensor. With places in nodes, the place's part of a
        bucket is rounded first.
        """
        scenario = self.parts.with_plan(plan)
        buckets = sum(len(instance.layer.parameters) for instance in part.layers)
        lost = buckets * (1 if scenario.policies.push_axis == "dp_shard" else 2)
        return [max(0.0, share * part.elements - lost) for share in scenario.shard_shares]


def has_equal_slices(policies: Policies) -> bool:
    """Return whether a stage is sliced evenly (if at all), and sequences are not divided."""
    return policies.slices != "shares" and policies.cp == 1


def _fsdp_chunks(part: Part, ranks: int) -> list[float]:
    """Return the elements of each rank's shard if parameters are cut along their first dimension (FSDP2)."""
    elements = [0.0] * ranks
    for instance in part.layers:
        for parameter in instance.layer.parameters:
            rows, row = (parameter.shape[0], prod(parameter.shape[1:])) if parameter.shape else (1, 1)
            chunk = ceil(rows / ranks)
            for rank in range(ranks):
                elements[rank] += min(max(rows - rank * chunk, 0), chunk) * row
    return elements


def _phases_in_order(layers: Sequence[LayerInstance]) -> list[tuple[int, str]]:
    """Return the phases of layers in order: all forwards; then, in reverse order, recomputation and backward."""
    forward = [(place, "f") for place in range(len(layers))]
    return forward + [(place, phase) for place in reversed(range(len(layers))) for phase in ("r", "b")]


def _held_bytes(layers: Sequence[LayerInstance], timeline: Timeline) -> list[float]:
    """Return the peak of bytes in each phase of the layers, in the order of `_phases_in_order`.

    The part of a backward that comes before the recomputation counts with the recomputation.
    """

    def order(event: Event) -> tuple[float, bool]:
        return event.position, event.size_bytes < 0 and not event.early

    held, found = 0.0, []
    for place, phase in _phases_in_order(layers):
        instance, peak = layers[place], held
        events = sorted(timeline.at(instance.index, phase), key=order)
        if phase in ("r", "b") and (begin := recomputation_begin(instance.layer)) > 0:
            backward = sorted(timeline.at(instance.index, "b"), key=order)
            first = bisect_left(backward, begin, key=lambda event: event.position)
            events = [*backward[:first], *events] if phase == "r" else backward[first:]
        for event in events:
            held += event.size_bytes
            peak = max(peak, held)
        found.append(peak)
    return found


def _gathered_elements(part: Part, gathers: str) -> list[float]:
    """Return a lower bound of the number of gathered parameters in each phase of the layers, in order.

    Layers outside blocks stay gathered throughout. A block is gathered in its own phases; if it is kept in between,
    from its forward to its backward.
    """
    layers = [instance.layer for instance in part.layers]
    own = [float(layer.elements) if layer.block else 0.0 for layer in layers]
    root = float(sum(layer.elements for layer in layers if not layer.block))
    kept = list(accumulate(own)) if gathers == "gathered" else own
    return [0.0 if gathers == "replicated" else root + kept[place] for place, _ in _phases_in_order(part.layers)]


def _unreduced_elements(part: Part) -> list[float]:
    """Return a lower bound of the number of unreduced gradients of earlier micro-batches, in each phase of the layers
    of the last micro-batch, in order.

    The gradients of a layer may be reduced and freed in its backward.
    """
    before = list(accumulate((float(each.layer.elements) for each in part.layers), initial=0.0))
    ends = {"f": before[-1:] * len(part.layers), "r": before[1:], "b": before}
    return [ends[phase][place] for place, phase in _phases_in_order(part.layers)]
