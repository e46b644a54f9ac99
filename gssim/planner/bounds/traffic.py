"""Lower bounds of the communication time of a step: for one rank that never waits, and for the links.

[Note: traffic] Communication depends on the method, the mesh and the shard sizes, hardly on compute. So one rank is
lowered, with at most two micro-batches. If gradients are sent in each micro-batch, every further one sends the same as
the second; otherwise further ones are not counted. Sums over tensor slices, and rows of the experts that tensor ranks
divide, grow with samples; they are counted as for two micro-batches, since many small sums take no less. A plan with
thresholds is lowered without them, and thresholded collectives are not counted at all. The rest is the same for any
data and thresholds.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gssim.collectives import Communication
from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.plan import Plan, Policies
from gssim.plan.plan import ShareRules
from gssim.planner.bounds.collectives import CollectiveBounds
from gssim.planner.bounds.compute import least_step_jitter_ratio
from gssim.planner.bounds.parts import ModelParts
from gssim.program import Steps, Task
from gssim.program.experts import OPERATIONS
from gssim.scenario import Scenario
from gssim.units import Floats

MICRO_BATCHES = 2
MAX_RANKS = 256
"""With more ranks, collectives are not bounded: that would take longer than it saves."""


@dataclass(frozen=True)
class BusyTimes:
    """Busy times of streams and links through collectives."""

    streams_s: Mapping[str, float]
    """Seconds for each stream of the first rank."""
    links_s: Floats


class TrafficBounds:
    """Lower bounds of communication time."""

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts
        self.shared = Shared()
        self.by_ranks: dict[int, CollectiveBounds] = {}

    def least_s(self, plan: Plan, policies: Policies, *, busy_s: float = 0.0) -> float:
        """Return the lower bound of a step's time that follows from its communication; see [Note: traffic].

        `busy_s`: lower bound of the first rank's compute time, which is added to blocking communication; see
        `ComputeBounds.busy_s`, without what hosts launch beside this.
        """
        unlike = plan.shares.replan or policies.in_fragments  # steps differ
        if policies.ranks == 1 or policies.pp > 1 or policies.ranks > MAX_RANKS or unlike:
            return 0.0
        if plan.offload is not None and self.parts.scenario.cluster.host is None:
            return 0.0  # the plan is refused when it is loaded
        try:
            plain = self._canonical_plan(plan, policies)
        except UserError:  # the plan is refused when it is loaded
            return 0.0
        # kinds of collectives whose size depends on thresholds
        pushes = {"all-to-all-v"} if plan.push.selects else set()
        left_out = frozenset(pushes | ({"all-gather-v", "broadcast"} if plan.publish.selects else set()))
        whole, later = self.parts.once(("traffic", plain, left_out), lambda: self._busy_times(plain, left_out))
        more = plan.micro_batches - plain.micro_batches
        links_s = float((whole.links_s + more * later.links_s).max(initial=0.0))
        streams_s = {name: s + more * later.streams_s.get(name, 0.0) for name, s in whole.streams_s.items()}
        chance = least_step_jitter_ratio(self.parts.types[: policies.ranks])
        return max(chance * max(links_s, *streams_s.values(), 0.0), busy_s + chance * streams_s.get("compute", 0.0))

    def collectives(self, plan: Plan, policies: Policies) -> CollectiveBounds:
        """Return the bounds of collectives among the plan's number of ranks."""
        if policies.ranks not in self.by_ranks:
            self.by_ranks[policies.ranks] = CollectiveBounds(self.parts.with_plan(plan), self.shared)
        return self.by_ranks[policies.ranks]

    def _canonical_plan(self, plan: Plan, policies: Policies) -> Plan:
        """Return a plan with the same collectives; many plans share one such plan."""
        rule, batch = plan.shares.shards, plan.shares.batch if policies.tp > 1 else "even"
        if policies.slices == "shares":
            rule = self.parts.with_plan(plan).slice_shares
        elif rule in ("memory", "cost") or (rule == "compute" and policies.gradients == "push"):
            # the last are by rates at the plan's own micro-batches
            rule = tuple(self.parts.with_plan(plan).shard_shares[:: policies.tp])
        if batch == "throughput":
            total = self.parts.workload.global_batch_size
            batch = tuple(samples / total for samples in self.parts.batch_sizes(plan, policies))
        return replace(
            plan,
            micro_batches=min(plan.micro_batches, MICRO_BATCHES),
            recompute="none",
            shares=ShareRules(batch=batch, shards=rule),
            push=replace(plan.push, threshold=None),
            publish=replace(plan.publish, threshold=None),
            dp_replicate=policies.dp_replicate,
            dp_shard=policies.dp_shard,
        )

    def _busy_times(self, plain: Plan, left_out: Collection[str]) -> tuple[BusyTimes, BusyTimes]:
        """Return the busy times of a step with the plan's micro-batches, and those of every further micro-batch.

        `left_out`: kinds of collectives that are not counted.
        """
        scenario = self._scenario(plain)
        ranks = scenario.ranks
        self.collectives(plain, scenario.policies)
        tasks, communications = Steps(scenario, shared=self.shared).first_rank()
        named = [(task, communications[task.communication]) for task in tasks if task.communication is not None]
        sent = [(task, each) for task, each in named if each.kind not in left_out]
        policies = scenario.policies
        later = [
            (task, each)
            for task, each in sent
            if policies.gradient_sync == "micro-batch"
            and task.id.micro_batch == MICRO_BATCHES - 1
            and not (  # slices, and rows of experts: as many bytes in all, however many micro-batches
                policies.tp > 1
                and (task.id.op in OPERATIONS.values() or len({policies.data_rank(rank) for rank in each.group}) == 1)
            )
        ]
        return self._busy_times_of(sent, ranks), self._busy_times_of(later, ranks)

    def _scenario(self, plain: Plan) -> Scenario:
        """Return the scenario with that plan. If samples do not matter, its batch is one that divides evenly."""
        scenario = self.parts.with_plan(plain)
        if plain.tp > 1:
            return scenario
        samples = plain.micro_batches * scenario.policies.data_ranks
        return replace(scenario, workload=replace(scenario.workload, global_batch_size=samples))

    def _busy_times_of(self, sent: Sequence[tuple[Task, Communication]], ranks: int) -> BusyTimes:
        collectives = self.by_ranks[ranks]
        streams_s: dict[str, float] = defaultdict(float)
        alone_s: dict[int, float] = {}
        """By `id` of the collective: tasks share most of them, and comparing them takes long."""
        for task, communication in sent:
            if id(communication) not in alone_s:
                alone_s[id(communication)] = collectives.alone_s(communication, 0)
            streams_s[task.stream] += alone_s[id(communication)]
        return BusyTimes(streams_s, collectives.links_s(Counter(communication for _, communication in sent).items()))
