"""How long ranks compute at least, alone at their devices' own pace; and how pipelines fill and drain."""

from collections.abc import Hashable, Sequence
from functools import partial

from gssim.cluster import DeviceType
from gssim.cost import layer_time_s
from gssim.engine import SMALLEST_JITTER
from gssim.plan import Plan, Policies, splitting
from gssim.planner.bounds.parts import Part, Parts
from gssim.workload import Layer


def chance_of(device: DeviceType) -> float:
    """Return the least factor by which chance changes what a device computes."""
    return SMALLEST_JITTER if device.step_jitter_ratio or device.task_jitter_ratio else 1.0


class Compute:
    """Bounds of what ranks compute."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def busy_s(self, plan: Plan, policies: Policies, sizes: Sequence[int]) -> list[float]:
        """Return how long each rank computes at least; see [Note: bounds]."""
        if policies.partition == "weight-gradient" or plan.shares.replan:
            return [0.0] * policies.ranks
        found: dict[Hashable, float] = {}
        busy_s = []
        for rank, samples in enumerate(sizes):
            part = self.parts.part(plan, policies, rank)
            key = (part.key, self.parts.names[rank], samples)
            if key not in found:
                parts = splitting.split(samples, splitting.even(plan.micro_batches))
                found[key] = sum(
                    parts.count(size) * self.micro_batch_s(rank, size, plan.recompute, part)
                    for size in set(parts)
                    if size
                )
            busy_s.append(found[key])
        return busy_s

    def micro_batch_s(self, rank: int, samples: int, recompute: str, part: Part | None = None) -> float:
        """Return the time of one micro-batch, forward and backward, through (a part of) the model on a rank's device.

        By chance, devices that vary may be faster than they are, but no more than the machine lets them.
        """
        run = part or self.parts.whole
        device = self.parts.types[rank]
        return (
            chance_of(device)
            * run.ratio
            * self.parts.once(
                ("time", run.key, self.parts.names[rank], samples, recompute),
                lambda: sum(
                    self._layer_s(device, instance.layer, whole, samples, recompute)
                    for instance, whole in zip(run.layers, run.wholes, strict=True)
                ),
            )
        )

    def _layer_s(self, device: DeviceType, layer: Layer, whole: Layer | None, samples: int, recompute: str) -> float:
        """Return the time of a layer's forward and backward, and of its forward again where it is checkpointed."""

        def found() -> float:
            phases = ["f", "b", *(["r"] if recompute != "none" and layer.block else [])]
            selective = recompute == "selective"
            cost = partial(layer_time_s, device, self.parts.workload, layer, batch_size=samples, whole=whole)
            return sum(cost(phase=phase, selective=selective) for phase in phases)

        return self.parts.once(("layer", id(layer), id(device), samples, recompute), found)

    def bubble_s(self, plan: Plan, policies: Policies, busy_s: Sequence[float]) -> float:
        """Return how long a pipeline of one stage a rank takes: what comes before a stage can begin, and after it ends.

        A stage begins when its first micro-batch has been forward through those before it, and these end when its last
        has been backward through them: all it does itself, and one micro-batch of all before it.
        """
        mesh = policies.mesh
        if mesh.pp == 1 or len(self.parts.stages(plan, policies)) > mesh.pp:
            return 0.0
        found = 0.0
        stride = mesh.ranks // mesh.pp
        for first in range(stride):
            column = busy_s[first::stride]
            found = max([found, *(own + sum(column[:i]) / plan.micro_batches for i, own in enumerate(column))])
        return found
