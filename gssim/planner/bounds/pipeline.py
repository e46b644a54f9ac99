"""Lower bound of a pipeline's step time, from the order in which its stages compute.

[Note: round trip] A stage computes its forwards and backwards in the order of the schedule; backwards of later
micro-batches also add up gradients. None of them begins before the message that it needs has arrived; a message takes
no less than alone on idle links. The first stage's next step begins after its last backward. So a step takes at least
the time from the first stage's first forward to its last backward. If stages are sliced, links carry the sums over
slices as well.
"""

from collections.abc import Sequence
from functools import partial

from gssim.collectives import Communication
from gssim.plan import Plan, Policies
from gssim.plan.pipeline_schedule import INTERLEAVED, schedule
from gssim.planner.bounds.compute import ComputeBounds, least_step_jitter_ratio
from gssim.planner.bounds.memory import MemoryBounds, has_equal_slices
from gssim.planner.bounds.parts import ModelParts
from gssim.planner.bounds.traffic import TrafficBounds
from gssim.scenario import schedule_of

Computes = tuple[tuple[str, int], ...]
"""Forwards and backwards of a stage in order, each as (kind, micro-batch)."""
Sums = tuple[tuple[Communication, int], ...]
"""Distinct collectives, each with how often it occurs."""


class PipelineBounds:
    """Lower bounds of pipelines with one stage per rank."""

    def __init__(self, parts: ModelParts, compute: ComputeBounds, memory: MemoryBounds, traffic: TrafficBounds) -> None:
        self.parts, self.compute, self.memory, self.traffic = parts, compute, memory, traffic

    def least_s(self, plan: Plan, policies: Policies, sizes: Sequence[int]) -> float:
        """Return a lower bound of a pipeline's step time; 0 if none is known. See [Note: round trip].

        `sizes`: samples of each rank.
        """
        mesh = policies.mesh
        if mesh.pp == 1 or plan.shares.replan or not has_equal_slices(policies):
            return 0.0
        if policies.gradients == "push" and mesh.tp > 1:  # the plan is refused when it is loaded
            return 0.0
        name = schedule_of(plan, mesh.pp)
        if len(self.parts.stages(plan, policies)) > mesh.pp or name in INTERLEAVED:
            return 0.0
        try:  # forwards and backwards of each stage, in order
            orders: tuple[Computes, ...] = self.parts.once(
                ("computes", name, mesh.pp, plan.micro_batches),
                lambda: tuple(
                    tuple((each.kind, each.micro_batch) for each in actions if each.kind in ("forward", "backward"))
                    for actions in schedule(name, ranks=mesh.pp, stages=mesh.pp, micro_batches=plan.micro_batches)
                ),
            )
        except ValueError:  # the plan is refused when it is loaded
            return 0.0
        found, stride = self._links_s(plan, policies, sizes), mesh.ranks // mesh.pp
        for first in range(0, stride, mesh.tp):  # the first rank of each tensor group, which holds the first slice
            ranks = range(first, mesh.ranks, stride)
            samples = sizes[first] // plan.micro_batches
            passes_s = tuple(self._passes_s(plan, policies, rank, samples) for rank in ranks)
            messages_s = self._messages_s(plan, policies, ranks, samples)
            added_s = tuple(self._accumulation_s(plan, policies, rank) if samples else 0.0 for rank in ranks)
            key = ("round trip", name, plan.micro_batches, passes_s, messages_s, added_s)
            found = max(found, self.parts.once(key, partial(round_trip_s, orders, passes_s, messages_s, added_s)))
        return found

    def _passes_s(self, plan: Plan, policies: Policies, rank: int, samples: int) -> tuple[float, float]:
        """Return lower bounds of the time of a micro-batch forward, and backward, through a rank's stage.

        Each is the stage's compute, and the sums over tensor slices and exchanges of rows of experts, for which the
        device waits; its host does not.
        """
        if policies.tp > 1:
            part, _ = self.memory.stage_on_rank(plan, policies, rank)
        else:
            part = self.parts.part(plan, policies, rank)
        attended = self.parts.attended_ratio(policies, rank)
        issued_s, own_s = (
            [attended * pass_s for pass_s in self.compute.passes_s(rank, samples, plan.recompute, part, issued=issued)]
            for issued in (True, False)
        )
        collectives, chance = (
            self.traffic.collectives(plan, policies),
            least_step_jitter_ratio(self.parts.types[: policies.ranks]),
        )
        forward_s, backward_s = (
            max(least_s, pass_s + chance * sum(count * collectives.alone_s(each, rank) for each, count in sums))
            for least_s, pass_s, sums in zip(issued_s, own_s, self._waits(plan, policies, rank, samples), strict=True)
        )
        return forward_s, backward_s

    def _accumulation_s(self, plan: Plan, policies: Policies, rank: int) -> float:
        """Return the least time by which a rank's later backwards are longer than its first; 0 if it is not known."""
        return self.compute.accumulation_s(policies, rank, self.parts.part(plan, policies, rank))

    def _waits(self, plan: Plan, policies: Policies, rank: int, samples: int) -> tuple[Sums, Sums]:
        """Return what a rank's stage waits for in a micro-batch's forward and backward, beside its messages."""
        workload, sums = self.parts.workload, self._sums(plan, policies, rank, samples)
        partly = workload.frozen is not None or workload.adapters is not None  # some layers may have no backward
        if policies.ep == 1 or partly:
            return sums
        phases = (("f",), ("b", "r") if plan.recompute != "none" else ("b",))
        rows = [
            tuple(
                each for phase in pass_ for each in self.memory.exchanges(plan, policies, rank, phase, samples).items()
            )
            for pass_ in phases
        ]
        return (*sums[0], *rows[0]), (*sums[1], *rows[1])

    def _sums(self, plan: Plan, policies: Policies, rank: int, samples: int) -> tuple[Sums, Sums]:
        """Return a micro-batch's sums over the slices of a rank's stage, in the forward and in the backward."""
        workload = self.parts.workload
        partly = workload.frozen is not None or workload.adapters is not None  # some layers may have no backward
        # sums that run beside products may cost nothing
        if policies.tp == 1 or partly or plan.tp_overlap or plan.async_input_gradients:
            return (), ()
        group = policies.mesh.group(rank, "tp")

        def in_phase(phase: str) -> Sums:
            sums = self.memory.sums(plan, policies, rank, phase, samples)
            return tuple((Communication(kind, group, size), count) for (kind, size), count in sums.items())

        return in_phase("f"), (*in_phase("b"), *(in_phase("r") if plan.recompute != "none" else ()))

    def _links_s(self, plan: Plan, policies: Policies, sizes: Sequence[int]) -> float:
        """Return the time for which the busiest link carries the sums over slices."""
        if policies.tp == 1:
            return 0.0
        sums = [
            (each, plan.micro_batches * count)
            for rank in range(0, policies.ranks, policies.tp)
            for several in self._sums(plan, policies, rank, sizes[rank] // plan.micro_batches)
            for each, count in several
        ]
        links_s = self.traffic.collectives(plan, policies).links_s(sums)
        return least_step_jitter_ratio(self.parts.types[: policies.ranks]) * float(links_s.max(initial=0.0))

    def _messages_s(
        self, plan: Plan, policies: Policies, ranks: Sequence[int], samples: int
    ) -> tuple[tuple[float, float], ...]:
        """Return lower bounds of the time of a message from each stage but the last to the next, and of one back."""
        collectives, chance = (
            self.traffic.collectives(plan, policies),
            least_step_jitter_ratio(self.parts.types[: policies.ranks]),
        )
        return tuple(
            (
                chance * collectives.alone_s(Communication("send", (source, target), size), source),
                chance * collectives.alone_s(Communication("send", (target, source), size), target),
            )
            for source, target, size in zip(
                ranks[:-1], ranks[1:], self.memory.output_bytes(plan, policies, samples), strict=True
            )
        )


def round_trip_s(
    orders: Sequence[Computes],
    passes_s: Sequence[tuple[float, float]],
    messages_s: Sequence[tuple[float, float]],
    added_s: Sequence[float],
) -> float:
    """Return the time from the first stage's first forward to its last backward.

    Args:
            orders: the forwards and backwards of each stage.
            passes_s: for each stage, the times of a forward and of a backward.
            messages_s: for each stage but the last, the times of a message to the next stage, and of one back.
            added_s: for each stage, by how much the backwards of all micro-batches but the first are longer.

    >>> order = (("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1))
    >>> round_trip_s([order, order], [(1.0, 2.0), (1.0, 2.0)], [(0.25, 0.25)], [0.0, 0.0])
    9.5
    >>> round_trip_s([order, order], [(1.0, 2.0), (1.0, 2.0)], [(0.25, 0.25)], [0.5, 0.25])
    10.25
    """
    last = len(orders) - 1
    ends_s: dict[tuple[int, str, int], float] = {}
    now_s, places = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            place = places[stage]
            for kind, micro_batch in order[place:]:
                forward = kind == "forward"
                if stage != (0 if forward else last):
                    beside = stage - 1 if forward else stage + 1
                    sent_s = ends_s.get((beside, kind, micro_batch))
                    if sent_s is None:
                        break
                    arrived_s = sent_s + (messages_s[beside][0] if forward else messages_s[stage][1])
                    now_s[stage] = max(now_s[stage], arrived_s)
                now_s[stage] += passes_s[stage][0 if forward else 1]
                if not forward and micro_batch > 0:
                    now_s[stage] += added_s[stage]
                ends_s[stage, kind, micro_batch] = now_s[stage]
                place += 1
            moved |= place > places[stage]
            places[stage] = place
    return now_s[0]
