"""How long a step's collectives take at least: of a rank that waits for nobody, and of the links that carry them.

[Note: traffic] What is sent hangs on the method, the mesh and who owns what, hardly on how ranks compute. So one rank
is lowered, with two micro-batches at most: where gradients leave in each, the second has what every further one has,
too; else no more is counted. Sums over tensor slices grow with samples: they are counted as they are in two
micro-batches, for many small ones take no less. Of a plan with thresholds it is the one without that is lowered, and
what the thresholds hold back is not counted at all: the rest is the same, whatever the data and the thresholds.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gssim.cache import Shared
from gssim.collectives import Communication
from gssim.errors import UserError
from gssim.plan import Plan, Policies, ShareRules
from gssim.planner.bounds.collectives import Collectives
from gssim.planner.bounds.lowered import least_chance
from gssim.planner.bounds.parts import Parts
from gssim.program import MicroBatch, Steps, Task
from gssim.scenario import Scenario
from gssim.units import Floats

MICRO_BATCHES = 2
LATER = MicroBatch(1, MICRO_BATCHES, sends_gradients=True, sent_before=True).suffix
MOST_RANKS = 256
"""Of more ranks, collectives are not looked at: it would take longer than it saves."""


@dataclass(frozen=True)
class Sums:
    """How long streams and links are busy with collectives."""

    streams_s: Mapping[str, float]
    """By stream of the first rank."""
    links_s: Floats


class Traffic:
    """Bounds of what collectives take."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.shared = Shared()
        self.by_ranks: dict[int, Collectives] = {}

    def least_s(self, plan: Plan, policies: Policies, *, busy_s: float = 0.0) -> float:
        """Return how long a step is at least, for what is sent in it; see [Note: traffic].

        `busy_s`: what the first rank computes at least, beside what blocks it.
        """
        unlike = plan.shares.replan  # from step to step
        if policies.ranks == 1 or policies.pp > 1 or policies.ranks > MOST_RANKS or unlike:
            return 0.0
        try:
            plain = self._plain(plan, policies)
        except UserError:  # it is refused where it is loaded
            return 0.0
        left_out = _by_data(plan)
        whole, later = self.parts.once(("traffic", plain, left_out), lambda: self._sums(plain, left_out))
        more = plan.micro_batches - plain.micro_batches
        links_s = float((whole.links_s + more * later.links_s).max(initial=0.0))
        streams_s = {name: s + more * later.streams_s.get(name, 0.0) for name, s in whole.streams_s.items()}
        chance = least_chance(self.parts.with_plan(plan))
        return max(chance * max(links_s, *streams_s.values(), 0.0), busy_s + chance * streams_s.get("compute", 0.0))

    def _plain(self, plan: Plan, policies: Policies) -> Plan:
        """Return a plan with the same collectives, as many others have them."""
        rule, batch = plan.shares.shards, plan.shares.batch if policies.tp > 1 else "even"
        if rule in ("memory", "cost"):
            rule = tuple(self.parts.with_plan(plan).shard_shares)
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

    def _sums(self, plain: Plan, left_out: Collection[str]) -> tuple[Sums, Sums]:
        """Return what a step with so many micro-batches takes, and what every further one does.

        `left_out`: kinds of collectives that are not counted.
        """
        scenario = self._scenario(plain)
        ranks = scenario.ranks
        if ranks not in self.by_ranks:
            self.by_ranks[ranks] = Collectives(scenario, self.shared)
        tasks, communications = Steps(scenario).first_rank()
        named = [(task, communications[task.communication]) for task in tasks if task.communication is not None]
        sent = [(task, each) for task, each in named if each.kind not in left_out]
        later = [(task, each) for task, each in sent if _is_again(task, scenario) and not _is_of_slices(each, scenario)]
        return self._sums_of(sent, ranks), self._sums_of(later, ranks)

    def _scenario(self, plain: Plan) -> Scenario:
        """Return the scenario with that plan; where samples do not matter, of a batch that can be divided evenly."""
        scenario = self.parts.with_plan(plain)
        if plain.tp > 1:
            return scenario
        samples = plain.micro_batches * scenario.policies.data_ranks
        return replace(scenario, workload=replace(scenario.workload, global_batch_size=samples))

    def _sums_of(self, sent: Sequence[tuple[Task, Communication]], ranks: int) -> Sums:
        collectives = self.by_ranks[ranks]
        streams_s: dict[str, float] = defaultdict(float)
        for task, communication in sent:
            streams_s[task.stream] += collectives.alone_s(communication, 0)
        return Sums(streams_s, collectives.links_s(communication for _, communication in sent))


def _by_data(plan: Plan) -> frozenset[str]:
    """Return the kinds of the collectives of which thresholds decide what they carry."""
    pushes = ("all-to-all-v",) if plan.push.selects else ()
    publishes = ("all-gather-v", "broadcast") if plan.publish.selects else ()
    return frozenset((*pushes, *publishes))


def _is_again(task: Task, scenario: Scenario) -> bool:
    """Return whether a task is of the second micro-batch, and every further one has such a one, too."""
    return scenario.policies.gradient_sync == "micro-batch" and task.label.endswith(LATER)


def _is_of_slices(communication: Communication, scenario: Scenario) -> bool:
    """Return whether a collective is among the ranks that hold slices of the same blocks."""
    policies = scenario.policies
    return policies.tp > 1 and len({policies.data_rank(rank) for rank in communication.group}) == 1
