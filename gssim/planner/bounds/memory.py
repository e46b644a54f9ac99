"""How much memory ranks need at least."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import ceil, prod

from gssim.memory import Timeline, activation_timeline, as_traced, input_bytes, recomputed_buffers
from gssim.plan import Plan, Policies, splitting
from gssim.planner.bounds.parts import Part, Parts
from gssim.units import PRECISION_BYTES
from gssim.workload import LayerInstance, optimizer_state_bytes

LARGEST_REPLAYED = 8
"""Samples up to which activations are followed buffer by buffer, at powers of two."""


class Memory:
    """Bounds of what ranks hold."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def full_ratio(self, plan: Plan, policies: Policies, sizes: Sequence[int]) -> float:
        """Return how full the fullest device is at least."""
        kinds = {(self.parts.names[rank], n, self._owned(plan, policies, rank)): rank for rank, n in enumerate(sizes)}
        if policies.pp > 1 or policies.slices == "shares":
            kinds = {(self.parts.names[rank], n, float(rank)): rank for rank, n in enumerate(sizes)}
        return max(
            self.held_bytes(plan, policies, rank, samples=n) / self.parts.types[rank].memory_bytes
            for (_, n, _), rank in kinds.items()
        )

    def room(self, plan: Plan, policies: Policies, rank: int, ratio: float) -> int:
        """Return for how many samples a part of a rank's memory has room at most."""
        part, owned = self.parts.part(plan, policies, rank), self._owned(plan, policies, rank)
        memory = (policies.parameters, policies.gradients, policies.gradient_sync, part.key, owned)
        key = ("room", self.parts.names[rank], memory, plan.micro_batches, plan.recompute, ratio)
        room = ratio * self.parts.types[rank].memory_bytes

        def too_many(samples: int) -> bool:
            return self.held_bytes(plan, policies, rank, samples=samples) > room

        total = self.parts.workload.global_batch_size
        return self.parts.once(key, lambda: bisect_left(range(total + 1), True, lo=1, key=too_many) - 1)

    def held_bytes(self, plan: Plan, policies: Policies, rank: int, *, samples: int) -> float:
        """Return what a rank holds at least, of its whole device, with so many samples."""
        device = self.parts.types[rank]
        always = device.context_bytes + device.workspace_bytes
        if policies.partition == "weight-gradient" or not samples:
            return always
        part, owned = self.parts.part(plan, policies, rank), self._owned(plan, policies, rank)
        first, *others = splitting.split(samples, splitting.even(plan.micro_batches))
        peak = self._passing(plan, policies, part, first)
        if others:  # which find gradients of those before them
            gradients = self._gradients(policies, part, owned)
            peak = max(peak, gradients + self._passing(plan, policies, part, max(others)))
        always += self._communicators(policies) * device.communicator_bytes
        return always + self._kept(policies, part, owned, samples) + peak

    def _communicators(self, policies: Policies) -> int:
        """Return in how many groups a rank communicates at least."""
        if self.parts.scenario.cluster.backend != "nccl" or policies.pp > 1:
            return 0
        return sum(size > 1 for size in (policies.dp_replicate, policies.dp_shard, policies.tp))

    def _kept(self, policies: Policies, part: Part, owned: float, samples: int) -> float:
        """Return what a rank holds all the time: parameters, optimizer states, buckets and its batch."""
        workload, value, master = self.parts.workload, self.parts.value, self.parts.master
        elements, replicated = part.elements, policies.parameters == "replicated"
        kept = elements * value if replicated else owned * value
        if policies.gradients == "all-reduce":
            kept += elements * value
        if replicated and master > value:
            kept += owned * master
        kept += optimizer_state_bytes(workload.optimizer, elements=int(owned), tensors=0, value_bytes=master)
        if policies.pp > 1:
            return kept
        length = workload.sequence_length
        return kept + input_bytes(self.parts.model, batch_size=samples, sequence_length=length, value_bytes=value)

    def _gradients(self, policies: Policies, part: Part, owned: float) -> float:
        """Return what a later micro-batch finds of gradients; those to be all-reduced are in buckets as well."""
        if policies.pp > 1:
            return 0.0
        if policies.gradient_sync == "step" or policies.gradients in ("local", "all-reduce"):
            return part.elements * self.parts.value
        return owned * self.parts.value

    def _passing(self, plan: Plan, policies: Policies, part: Part, samples: int) -> float:
        """Return the most that comes and goes in a micro-batch, or 0 where that is not known.

        That is activations, temporaries, and the parameters that are gathered for them.
        """
        if not samples or policies.pp > 1:
            return 0.0
        gathers = policies.parameters if policies.dp_shard > 1 else "replicated"
        key = ("passing", part.key, gathers, plan.recompute, samples)
        return self.parts.once(key, lambda: self._most_bytes(part, gathers, plan.recompute, samples))

    def _most_bytes(self, part: Part, gathers: str, recompute: str, samples: int) -> float:
        if samples <= 2:
            return self._peak_bytes(part, gathers, recompute, samples)
        # what is held at each moment grows linearly with the samples: the most of it lies above its chords, prolonged
        second = min(1 << (samples.bit_length() - 1), LARGEST_REPLAYED)
        first = second // 2
        low, high = (self._peak_bytes(part, gathers, recompute, each) for each in (first, second))
        return high + (high - low) / (second - first) * (samples - second)

    def _peak_bytes(self, part: Part, gathers: str, recompute: str, samples: int) -> float:
        held = self.parts.once(
            ("activations", part.key, recompute, samples),
            lambda: _held_bytes(part.layers, self._timeline(part, recompute, samples)),
        )
        gathered = self.parts.once(("gathered", part.key, gathers), lambda: _gathered_elements(part, gathers))
        return self.parts.once(
            ("peak", part.key, gathers, recompute, samples),
            lambda: max(a + self.parts.value * b for a, b in zip(held, gathered, strict=True)),
        )

    def _timeline(self, part: Part, recompute: str, samples: int) -> Timeline:
        lives = as_traced if recompute == "none" else partial(recomputed_buffers, selective=recompute == "selective")
        return activation_timeline(
            part.layers,
            batch_size=samples,
            sequence_length=self.parts.workload.sequence_length or 1,
            scale=self.parts.value / PRECISION_BYTES[self.parts.model.traced_precision],
            lives=lives,
        )

    def _owned(self, plan: Plan, policies: Policies, rank: int) -> float:
        """Return how many elements a rank updates at least."""
        part = self.parts.part(plan, policies, rank)
        if policies.optimizer_state == "replicated":
            return part.elements
        if policies.pp > 1 or policies.partition == "weight-gradient":
            return 0.0
        place = policies.data_rank(rank)
        if policies.gradients == "all-reduce":
            ranks = policies.data_ranks
            if plan.zero1_implementation == "deepspeed":
                return part.elements / ranks
            return self.parts.once(("dealt", part.key, ranks), lambda: _dealt(part, ranks))[place]
        if policies.gradients == "reduce-scatter":
            ranks = policies.dp_shard
            return self.parts.once(("chunks", part.key, ranks), lambda: _chunks(part, ranks))[place % ranks]
        rule = plan.shares.shards
        if rule in ("memory", "cost"):  # as much as suits it
            return 0.0
        return self.parts.once(("shards", rule, policies.mesh, part.key), lambda: self._pushed_to(plan, part))[rank]

    def _pushed_to(self, plan: Plan, part: Part) -> list[float]:
        """Return the elements of each owner's share, less what is lost as shares are rounded.

        They are in every bucket, of which there is one for each tensor at most; where there are places in nodes, what
        falls to these is rounded before.
        """
        scenario = self.parts.with_plan(plan)
        buckets = sum(len(instance.layer.parameters) for instance in part.layers)
        lost = buckets * (1 if scenario.policies.push_axis == "dp_shard" else 2)
        return [max(0.0, share * part.elements - lost) for share in scenario.shard_shares]


def _dealt(part: Part, ranks: int) -> list[float]:
    """Return the elements of the tensors that each rank updates, where whole tensors are dealt out (ZeRO-1)."""
    sizes = [parameter.elements for instance in part.layers for parameter in instance.layer.parameters]
    return [float(sum(sizes[i] for i in own)) for own in splitting.greedy(sizes, ranks)]


def _chunks(part: Part, ranks: int) -> list[float]:
    """Return the elements of each rank's shard, of parameters cut by their first dimension (FSDP2)."""
    found = [0.0] * ranks
    for instance in part.layers:
        for parameter in instance.layer.parameters:
            rows, row = (parameter.shape[0], prod(parameter.shape[1:])) if parameter.shape else (1, 1)
            chunk = ceil(rows / ranks)
            for rank in range(ranks):
                found[rank] += min(max(rows - rank * chunk, 0), chunk) * row
    return found


def _places(layers: Sequence[LayerInstance]) -> list[tuple[int, str]]:
    """Return the phases of layers in their order: forward; in reverse forward again (if checkpointed) and backward."""
    forward = [(place, "f") for place in range(len(layers))]
    return forward + [(place, phase) for place in reversed(range(len(layers))) for phase in ("r", "b")]


def _held_bytes(layers: Sequence[LayerInstance], timeline: Timeline) -> list[float]:
    """Return the most that is held in each phase of the layers, in their order."""
    held, found = 0.0, []
    for place, phase in _places(layers):
        peak = held
        for event in sorted(timeline.at(layers[place].index, phase), key=lambda e: (e.position, e.size_bytes < 0)):
            held += event.size_bytes
            peak = max(peak, held)
        found.append(peak)
    return found


def _gathered_elements(part: Part, gathers: str) -> list[float]:
    """Return the parameters that are gathered at least in each phase of the layers, in their order.

    What is no block stays gathered for all of them. A block is there in its own, and where it is kept in between, from
    its forward to its backward.
    """
    layers = [instance.layer for instance in part.layers]
    own = [float(layer.elements) if layer.block else 0.0 for layer in layers]
    root = float(sum(layer.elements for layer in layers if not layer.block))
    kept = list(accumulate(own)) if gathers == "gathered" else own
    return [0.0 if gathers == "replicated" else root + kept[place] for place, _ in _places(part.layers)]
