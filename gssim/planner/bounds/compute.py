"""Lower bounds of compute time: ranks at their devices' own speed, and the fill and drain of pipelines."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from gssim.cluster import DeviceType
from gssim.cost import accumulation_time_s, layer_time_s
from gssim.engine import SMALLEST_JITTER, is_jittery
from gssim.plan import Plan, Policies, splitting
from gssim.plan.pipeline_schedule import INTERLEAVED
from gssim.planner.bounds.parts import ModelParts, Part
from gssim.scenario import layer_profile
from gssim.units import Recompute
from gssim.workload import Layer


def least_jitter_ratio(device: DeviceType) -> float:
    """Return the least random factor on a device's compute time; in the lab, of compute without its sleeps."""
    if not is_jittery(device):
        return 1.0
    return SMALLEST_JITTER * (device.lab.cpu_share_ratio if device.lab else 1.0)


def least_step_jitter_ratio(devices: Iterable[DeviceType]) -> float:
    """Return the least random factor on the time of a step of these devices.

    It also applies to steps that are limited only by links: they may end a little earlier or later than the step
    before.
    """
    return min(map(least_jitter_ratio, devices))


class ComputeBounds:
    """Lower bounds of the compute time of ranks."""

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts

    def busy_s(self, plan: Plan, policies: Policies, sizes: Sequence[int], *, issued: bool = True) -> list[float]:
        """Return the least compute time of each rank; see [Note: bounds] in `gssim.planner.bounds.bounds`.

        Not `issued`: without the host's time to launch a layer that collectives split, which passes while the device
        waits for these.
        """
        if policies.partition == "weight-gradient" or plan.shares.replan:
            return [0.0] * policies.ranks
        kinds, parts = list(zip(self.parts.alike(policies), sizes, strict=True)), self.parts.parts(plan, policies)
        found: dict[tuple[int, int], float] = {}
        for rank, samples in dict.fromkeys(kinds):
            part, counts = parts[rank], Counter(splitting.split(samples, splitting.even(plan.micro_batches)))
            found[rank, samples] = self.parts.attended_ratio(policies, rank) * sum(
                counts[size] * self.micro_batch_s(rank, size, plan.recompute, part, issued=issued)
                for size in set(counts)
                if size
            )
            if samples >= plan.micro_batches:
                found[rank, samples] += (plan.micro_batches - 1) * self.accumulation_s(policies, rank, part)
        return [found[kind] for kind in kinds]

    def accumulation_s(self, policies: Policies, rank: int, part: Part) -> float:
        """Return the least time in which a rank adds the gradients of a micro-batch to those of earlier ones; 0 if none
        is known. See [Note: accumulation] in `gssim.program.compute`.
        """
        workload, sends_every = self.parts.workload, policies.gradient_sync == "micro-batch"
        partly = workload.frozen is not None or workload.adapters is not None  # some layers may have no gradients
        divided = policies.tp * policies.cp * policies.ep > 1
        in_buffer = policies.zero1_implementation == "megatron"
        is_cast = policies.gradients == "reduce-scatter" and self.parts.reduced != self.parts.value
        if sends_every or partly or divided or in_buffer or is_cast or policies.partition != "data":
            return 0.0
        device = self.parts.types[rank]
        return least_jitter_ratio(device) * self.parts.once(
            ("accumulation", part, self.parts.names[rank]),
            lambda: sum(
                accumulation_time_s(
                    device, instance.layer.elements * self.parts.value, tensors=len(instance.layer.parameters)
                )
                for instance in part.layers
            ),
        )

    def micro_batch_s(
        self, rank: int, samples: int, recompute: Recompute, part: Part | None = None, *, issued: bool = True
    ) -> float:
        """Return the time of one micro-batch, forward and backward, through (a part of) the model on a rank's device.

        Devices with random speed may be faster by the machine's least random factor; the result does not include that.
        `issued`: as of `busy_s`.
        """
        run = part or self.parts.whole
        device = self.parts.types[rank]
        return (
            least_jitter_ratio(device)
            * run.ratio
            * self.parts.once(
                ("time", run, self.parts.names[rank], samples, recompute, issued),
                lambda: sum(
                    sum(self._phases_s(device, instance.layer, whole, samples, recompute, run.positions, issued))
                    for instance, whole in zip(run.layers, run.wholes, strict=True)
                ),
            )
        )

    def _phases_s(
        self,
        device: DeviceType,
        layer: Layer,
        whole: Layer | None,
        samples: int,
        recompute: Recompute,
        positions: int | None,
        issued: bool = True,
    ) -> list[float]:
        """Return the times of a layer's forward, of its backward, and of its recomputation if it is checkpointed."""

        def found() -> list[float]:
            phases = ["f", "b", *(["r"] if recompute != "none" and layer.is_recomputed else [])]
            workload = self.parts.workload
            # a host that issues ahead does not bound the time of a single layer
            bounds = device.layer_operation_s is None and (issued or not layer.reductions)
            is_profiled = layer_profile(device, workload, whole or layer) is not None
            settings: dict[str, Any] = {"whole": whole, "positions": positions, "issued": bounds or is_profiled}
            cost = partial(layer_time_s, device, workload, layer, batch_size=samples, **settings)
            return [cost(phase=phase, recompute=recompute) for phase in phases]

        return self.parts.once(("layer", id(layer), id(device), samples, recompute, positions, issued), found)

    def passes_s(
        self, rank: int, samples: int, recompute: Recompute, part: Part, *, issued: bool = True
    ) -> tuple[float, float]:
        """Return forward and backward time of a micro-batch through a part of the model; see `micro_batch_s`."""
        device = self.parts.types[rank]

        def found() -> tuple[float, float]:
            phases_s = [
                self._phases_s(device, instance.layer, whole, samples, recompute, part.positions, issued)
                for instance, whole in zip(part.layers, part.wholes, strict=True)
            ]
            return sum(forward_s for forward_s, *_ in phases_s), sum(sum(others_s) for _, *others_s in phases_s)

        key = ("passes", part, self.parts.names[rank], samples, recompute, issued)
        forward_s, backward_s = self.parts.once(key, found)
        ratio = least_jitter_ratio(device) * part.ratio
        return ratio * forward_s, ratio * backward_s

    def bubble_s(self, plan: Plan, policies: Policies, busy_s: Sequence[float]) -> float:
        """Return the least time of a pipeline with one stage per rank, including fill and drain.

        A stage begins once its first micro-batch has passed forward through the stages before it, and those end once
        its last one has passed backward through them. So the bound is its own compute plus one micro-batch of all
        stages before it.
        """
        mesh = policies.mesh
        if mesh.pp == 1 or len(self.parts.stages(plan, policies)) > mesh.pp or plan.schedule in INTERLEAVED:
            return 0.0
        found = 0.0
        stride = mesh.ranks // mesh.pp
        for first in range(stride):
            column = busy_s[first::stride]
            found = max([found, *(own + sum(column[:i]) / plan.micro_batches for i, own in enumerate(column))])
        return found
