"""Enumerates the candidate plans of a search space, and counts refused plans by reason.

Thresholds of a study: with `search.study`, only those thresholds are searched whose change of the final loss is within
the user's limit. The study's table has a row for each trained variant (`analysis convergence` writes one), with its
threshold and kind but no other settings. If several variants have the same threshold, the worst one counts.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from gssim.errors import UserError
from gssim.execution.files import read_rows
from gssim.plan import METHODS, REPLICA_AXES, Mesh, Plan
from gssim.plan.mesh import AXES
from gssim.planner.batches import PLAN, Batches
from gssim.scenario import Scenario, SearchSpace
from gssim.scenario.overrides import toml
from gssim.scenario.ownership import rank_rates

NUMBER = re.compile(r"\d[\d.]*")


@dataclass
class _Group:
    reason: str
    """Reason of the group's first plan; those of the others differ only in numbers."""
    plans: int = 0
    methods: dict[str, None] = field(default_factory=dict)


class RefusedPlans:
    """Refused plans, counted by reason; reasons that differ only in numbers are counted together."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        self._groups: dict[str, _Group] = {}

    def add(self, reason: str, method: str, plans: int = 1) -> None:
        """Count plans of a method that are refused for a reason."""
        reason = reason.removeprefix(f"{self.file}: ")
        group = self._groups.setdefault(NUMBER.sub("#", reason), _Group(reason))
        group.plans += plans
        group.methods[method] = None

    @property
    def plans(self) -> int:
        """Total number of refused plans."""
        return sum(group.plans for group in self._groups.values())

    def rows(self) -> list[Mapping[str, Any]]:
        """Return count, methods and reason of each group, the largest first, as in a Result's provenance."""
        groups = sorted(self._groups.values(), key=lambda group: -group.plans)
        return [{"plans": each.plans, "methods": list(each.methods), "reason": each.reason} for each in groups]

    def lines(self) -> list[str]:
        """Return the rows as text."""
        return [
            f"left out: {each['plans']:,} ({', '.join(each['methods'])}): {each['reason']}"
            if each["plans"]
            else f"not searched: {each['reason']}"
            for each in self.rows()
        ]


COLUMNS = ("control", "threshold", "kind", "loss_change_high")


def loss_changes(file: Path, kind: str) -> dict[float, float]:
    """Return by how many nats each threshold of a kind raises the final loss: the upper end of its interval.

    Controls, and variants without a known interval, are left out. Raises UserError if the file is not a study's table.
    """
    found: dict[float, float] = {}
    for number, row in enumerate(read_rows(file, COLUMNS, "a table of a study")[1], start=2):
        if row["control"] == "True" or row["kind"] != kind or not row["loss_change_high"]:
            continue
        try:
            threshold, change = float(row["threshold"]), float(row["loss_change_high"])
        except ValueError:
            threshold = change = math.nan
        if not (threshold >= 0 and math.isfinite(change)):
            said = f"{row['threshold']!r}, {row['loss_change_high']!r}"
            raise UserError(f"{file}: line {number}: threshold, loss_change_high = {said}: no numbers")
        found[threshold] = max(change, found.get(threshold, -math.inf))
    return found


def allowed_thresholds(
    file: Path, kind: str, *, most_loss_change: float, thresholds: tuple[float, ...], own: float | None, scenario: str
) -> tuple[float, ...]:
    """Return the thresholds that may be searched: of those asked for (or of all in the study), those within the bound.

    `own`: threshold of the scenario's plan, with which its other plans push as well. Raises UserError, in the name of
    the file `scenario`, if a threshold that is asked for is not in the study.
    """
    changes = loss_changes(file, kind)
    known = ", ".join(f"{each:g}" for each in sorted(changes)) or "none"
    for key, values in (("search.thresholds", thresholds), ("plan.push.threshold", () if own is None else (own,))):
        for value in values:
            if value not in changes:
                raise UserError(f"{scenario}: {key}: {value:g} ({kind}) is not in {file}; it has: {known}")
    if own is not None and changes[own] > most_loss_change:
        raise UserError(
            f"{scenario}: plan.push.threshold = {own:g}: changes the last loss by up to {changes[own]:.3g} nats in "
            f"{file}, and search.most_loss_change allows {most_loss_change:g}"
        )
    return tuple(each for each in thresholds or sorted(changes) if changes[each] <= most_loss_change)


USUAL_THRESHOLDS = tuple(float(f"{digit}e{power}") for power in range(-7, -1) for digit in (1, 3))
"""Thresholds that are searched if only a least density is given: two per decade."""
KEPT_KEYS = ("bucket_bytes", "first_bucket_bytes", "overlap")
"""Keys that every candidate takes over from the scenario's own plan, if they are set."""
OF_TENSOR_RANKS = (
    "sequence_parallel",
    "gathered_inputs",
    "tp_overlap",
    "async_input_gradients",
    "embedding_parallel",
    "loss_parallel",
)
"""Keys that candidates with tensor-parallel ranks take over from the scenario's own plan."""
OF_SEQUENCE_PARTS = ("gathered_inputs", "tp_overlap")
"""Those of `OF_TENSOR_RANKS` that only candidates with sequence parallelism take over."""
OF_CONTEXT_RANKS = ("context_exchange", "context_split", "context_overlap")
"""Keys that candidates with context-parallel ranks take over."""
OF_STAGES = ("receive_buffers",)
"""Keys that pipelines take over, besides the schedule."""
OF_EXPERT_RANKS = ("etp",)
"""Keys that candidates with expert-parallel ranks take over."""
OF_OWN_METHOD = ("parameters", "gradients", "optimizer_state", "partition", "gradient_sync", "compress", "exchange")
"""Policies with which the scenario's own plan overrides its method; candidates of other methods do not take them
over."""


@dataclass(frozen=True)
class Candidate:
    """A plan that may be the best."""

    index: int
    """Position in the enumeration; of equally good plans, the one with the lowest index is preferred."""
    table: Mapping[str, Any]
    """The plan's table, as in a scenario file."""
    plan: Plan

    @property
    def override(self) -> str:
        """The plan in the form that `--set` takes."""
        return f"plan={toml(dict(self.table))}"


class Axes(NamedTuple):
    """Sizes of a plan's mesh."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return prod(self)

    @property
    def parts(self) -> int:
        """Number of parts of the batch."""
        return self.dp_replicate * self.dp_shard


def candidates(
    scenario: Scenario, space: SearchSpace, batches: Batches, left_out: RefusedPlans | None = None
) -> Iterator[Candidate]:
    """Yield every plan of the space, the scenario's own first, including plans that cannot run.

    `left_out` counts the combinations of the space that are not valid plans.
    """
    left_out = left_out or RefusedPlans()
    yield Candidate(0, _plan_table(scenario.plan), scenario.plan)
    own = _plan_table(scenario.plan)
    kept = {key: value for key, value in own.items() if key in KEPT_KEYS}
    seen = {_resolved_key(scenario.plan, batches)}
    for table in _tables(scenario, space, batches, left_out):
        whole = kept | _push_table(own, table) | table
        for key in ("zero1_implementation", "zero2_implementation"):
            if key.startswith(table["method"]) and getattr(scenario.plan, key) != "torch":
                whole[key] = getattr(scenario.plan, key)
        if whole.get("zero1_implementation") == "megatron" and scenario.plan.publish.overlap:
            whole["publish"] = {"overlap": True}
        kind = METHODS[table["method"]]  # settings that only some methods have are taken over if this one has them
        of_methods = {
            "sync_every_steps": kind.sync_every_steps,
            "outer": kind.outer_optimizer == "nesterov",
            "streaming": kind.in_fragments,
            "sparse_outer": kind.outer_optimizer == "sparse",
            "powersgd": kind.compressor == "powersgd",
            "topk": kind.compressor == "topk",
            **dict.fromkeys(OF_OWN_METHOD, table["method"] == scenario.plan.method),
        }
        whole |= {key: own[key] for key, is_of_method in of_methods.items() if is_of_method and key in own}
        of_axes = {"tp": OF_TENSOR_RANKS, "cp": OF_CONTEXT_RANKS, "pp": OF_STAGES, "ep": OF_EXPERT_RANKS}
        for axis, keys in of_axes.items():
            if axis in table:
                whole |= {key: own[key] for key in keys if key in own and key not in table}
        if not whole.get("sequence_parallel"):
            whole = {key: value for key, value in whole.items() if key not in OF_SEQUENCE_PARTS}
        plan = PLAN.validate_python(whole)
        if (alike := _resolved_key(plan, batches)) not in seen:
            seen.add(alike)
            yield Candidate(len(seen) - 1, whole, plan)


SIZED = ("ranks", *AXES)
"""Keys of a plan that are filled up where it leaves them out."""
_sizes_of, _rest_of = attrgetter(*SIZED), attrgetter(*(each.name for each in fields(Plan) if each.name not in SIZED))


def _resolved_key(plan: Plan, batches: Batches) -> Hashable:
    """Return a key that is equal for plans that resolve to the same: the resolved sizes of all axes, and all other keys
    as they are set.
    """
    try:
        sizes = _sizes_of(batches.bounds.parts.policies(plan).mesh)
    except UserError:  # it is refused later
        sizes = _sizes_of(plan)
    return sizes, _rest_of(plan)


def _plan_table(plan: Plan) -> dict[str, Any]:
    """Return the keys of a plan that are set."""
    data: dict[str, Any] = PLAN.dump_python(plan, mode="json", exclude_defaults=True, exclude_none=True)
    return data


def _push_table(own: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the push and publish settings of the scenario's own plan, a table, that a method can have."""
    if METHODS[table["method"]].gradients != "push":
        return {}
    push = own.get("push", {}) | table.get("push", {})
    publish = own.get("publish") if METHODS[table["method"]].parameters == "replicated" else None
    found = {"push": push} if push else {}
    return found | ({"publish": publish} if publish else {})


def _tables(
    scenario: Scenario, space: SearchSpace, batches: Batches, left_out: RefusedPlans
) -> Iterator[dict[str, Any]]:
    """Yield the plans of the space as tables, by number of devices and method."""
    counts = device_counts(scenario, space)
    for key, wanted in (("tp", space.tp), ("pp", space.pp), ("cp", space.cp), ("ep", space.ep)):
        for size in wanted or ():
            if not any(count % size == 0 for count in counts):
                numbers = ", ".join(map(str, counts))
                left_out.add(f"search.{key} = {size}: does not divide any number of devices ({numbers})", "all", 0)
    on_devices = False
    for place, count in enumerate(counts):
        for method in space.methods:
            if method == "single" and place:  # only once
                continue
            for axes in _meshes(scenario, space, method, count):
                on_devices = True
                yield from _plans_of_mesh(scenario, space, batches, method, axes, left_out)
    if not on_devices:
        left_out.add("no plan of the search fits the number of devices: only the scenario's own is shown", "all", 0)


def device_counts(scenario: Scenario, space: SearchSpace) -> list[int]:
    """Return the numbers of devices to search, the largest first: by default whole hosts of the scenario's plan."""
    hosts = [device.host for device in scenario.cluster.devices[: scenario.plan.ranks]]
    if space.devices is not None:
        return sorted({min(count, len(hosts)) for count in space.devices}, reverse=True)
    ends = [i for i in range(1, len(hosts)) if hosts[i] != hosts[i - 1]]
    return [len(hosts), *(reversed(ends) if len(ends) <= MAX_HOSTS else ())]


MAX_HOSTS = 8
"""If there are more hosts, all are used, unless the user gives numbers of devices."""


def _meshes(scenario: Scenario, space: SearchSpace, method: str, count: int) -> Iterator[Axes]:
    """Yield the meshes of `count` devices that suit a method."""
    if method == "single":
        yield Axes()
    elif method == "gs_wgrad":
        if count > 1:
            yield Axes(dp_shard=count)
    else:
        hosts = Counter(device.host for device in scenario.cluster.devices[:count])
        tps = _sizes(space.tp, count, max(hosts.values()))
        pps = _sizes(space.pp, count, count) if METHODS[method].in_pipelines else [1]
        cps = _sizes(space.cp or _own_or_one(scenario.plan.cp), count, count)
        for cp, tp, pp in product(cps, tps, pps):
            if count % (cp * tp * pp) == 0:
                yield from _data_axes(method, count // (cp * tp * pp), cp, tp, pp)


def _own_or_one(own: int) -> tuple[int, ...]:
    return (1, own) if own > 1 else (1,)


def _expert_ranks(scenario: Scenario) -> tuple[int, ...]:
    """Return the expert-parallel sizes to search if the user names none: the plan's own, and the size of a host."""
    hosts = Counter(device.host for device in scenario.cluster.devices)
    divisible = any(layer.experts_per_token for layer in scenario.workload.model.expert_layers)
    of_host = (max(hosts.values()),) if divisible else ()
    return tuple(dict.fromkeys((*_own_or_one(scenario.plan.ep), *of_host)))


def _data_axes(method: str, data: int, cp: int, tp: int, pp: int) -> Iterator[Axes]:
    """Yield the meshes of a method with `data` parts of the batch and the given sizes of the other axes."""
    inner_sizes = [size for size in _divisors(data) if 1 < size < data]
    if METHODS[method].two_levels:
        yield from (Axes(data // inner, inner, cp, tp, pp) for inner in inner_sizes)
    elif (axis := METHODS[method].axis) in ("tp", "pp"):
        if data == 1 and (pp if axis == "pp" else tp) > 1:
            yield Axes(cp=cp, tp=tp, pp=pp)
    elif data * cp > 1:
        yield Axes(data, 1, cp, tp, pp) if axis == "dp_replicate" else Axes(1, data, cp, tp, pp)
        if METHODS[method].sync_every_steps:  # replicas may be sharded
            yield from (Axes(data // inner, inner, cp, tp, pp) for inner in inner_sizes)


def _sizes(wanted: Sequence[int] | None, count: int, most: int) -> list[int]:
    return [size for size in (wanted if wanted is not None else _divisors(count)) if count % size == 0 and size <= most]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _plans_of_mesh(
    scenario: Scenario, space: SearchSpace, batches: Batches, method: str, axes: Axes, left_out: RefusedPlans
) -> Iterator[dict[str, Any]]:
    """Yield the plans of a method on a mesh."""
    total = scenario.workload.global_batch_size
    mesh = {name: size for name, size in axes._asdict().items() if size > 1 or name in ("dp_replicate", "dp_shard")}
    if axes.ranks < len(scenario.cluster.devices) and method != "single":
        mesh["ranks"] = axes.ranks
    parts = 1 if method == "gs_wgrad" else axes.parts
    shards = (
        [each for each in space.shards if _rule_applies(scenario, method, axes, each)]
        if METHODS[method].is_gradient_sharding
        else ["even"]
    )
    whole = METHODS[method].slices != "shares"  # otherwise rules determine the sizes of tensor slices
    even_rules = _rules_like_even(scenario, axes, shards) if "even" in shards and whole else set()
    rules = space.batch if parts > 1 else ("even",)
    pushes: list[dict[str, Any]] = [{}]  # as in the scenario; and with thresholds, if their effect is bounded
    if METHODS[method].gradients == "push" and space.searches_thresholds:
        thresholds = space.thresholds or (USUAL_THRESHOLDS if space.study is None else ())
        pushes += ({"threshold": value} for value in thresholds)
    shard_options = list(product(shards, pushes))
    most = min(max(1, total // parts), MAX_MICRO_BATCHES)
    powers_of_two = [1 << power for power in range(most.bit_length())]
    ways_of_experts = _ways_of_experts(scenario, space, axes)
    micro_batch_counts = powers_of_two if space.micro_batches is None else space.micro_batches
    for experts, ways, micro_batches in product(
        ways_of_experts, _ways_of_axes(scenario, space, axes), micro_batch_counts
    ):
        base = {"method": method, **mesh, "micro_batches": micro_batches} | experts | ways
        reason = batches.refusal(base)
        if reason is not None:
            left_out.add(reason, method, len(space.recompute) * len(shard_options) * len(rules))
            continue
        offloads = space.offload or (scenario.plan.offload or "none",)
        for recompute, offload, (owned, push) in product(space.recompute, offloads, shard_options):
            table = base | {"recompute": recompute} | ({"push": push} if push else {})
            table |= {"offload": offload} if offload != "none" else {}
            splits = list(batches.shares(table, owned, rules))
            if not splits:
                each = f"give each of {parts} parts samples for {micro_batches} equal micro-batches"
                left_out.add(f"no division of the batch of {total} would {each}, within memory", method, len(rules))
            for batch in splits:
                if owned not in even_rules or batch != "even":
                    yield table | {"shares": {"batch": batch, "shards": owned}}


def _ways_of_experts(scenario: Scenario, space: SearchSpace, axes: Axes) -> list[dict[str, Any]]:
    """Return the divisions of routed experts to try on a mesh, as keys of a plan.

    If the mesh's tensor ranks are not the number for which the experts are cut, they divide the experts too, in the
    only possible way: each routes the tokens of its part of a sequence.
    """
    alike = axes.parts * axes.cp  # ranks that hold the same part of the model
    model, wanted = scenario.workload.model, space.ep or _expert_ranks(scenario)
    if axes.tp == 1 or not model.expert_sequence_layers:
        return [{"ep": ep} if ep > 1 else {} for ep in _sizes(wanted, alike, alike)]
    in_parts: dict[str, Any] = {"etp": 1} | ({} if space.sequence_parallel else {"sequence_parallel": True})
    sizes = [ep for ep in _sizes(wanted, alike * axes.tp, alike * axes.tp) if ep == 1 or ep % axes.tp == 0]
    return [{"ep": ep} | in_parts if ep > 1 else {} for ep in sizes]


def _ways_of_axes(scenario: Scenario, space: SearchSpace, axes: Axes) -> list[dict[str, Any]]:
    """Return the pipeline schedules and divisions of sequences to try on a mesh, as keys of a plan."""
    own = scenario.plan
    schedules = (space.schedules or (own.schedule,)) if axes.pp > 1 else ()
    ways: list[dict[str, Any]] = [{"schedule": each} for each in schedules if each is not None] or [{}]
    if axes.tp == 1:
        return ways
    # where nothing is said, it is false
    divided = [
        {"sequence_parallel": each} if each or own.sequence_parallel else {}
        for each in space.sequence_parallel or (own.sequence_parallel,)
    ]
    return [way | each for way in ways for each in divided]


def _rule_applies(scenario: Scenario, method: str, axes: Axes, rule: str) -> bool:
    """Return whether a method's shards can follow a rule, and whether that makes a difference."""
    if rule == "even":
        return True
    if rule == "compute":
        return len({device.type for device in scenario.cluster.devices[: axes.ranks]}) > 1
    owners = METHODS[method].gradients == "push" and axes.tp == 1
    return owners and (not METHODS[method].two_levels or rule == "memory")


def _rules_like_even(scenario: Scenario, axes: Axes, rules: Sequence[str]) -> set[str]:
    """Return the rules of shard sizes that have the same result as `even`, if batches are even.

    A rule gives ranks with the same part of the model equal shards if their devices are equal, and the rule `cost` if
    these also send and receive at equal rates.
    """
    cluster, mesh = scenario.cluster, Mesh(**axes._asdict())
    groups = {tuple(mesh.group(rank, *REPLICA_AXES)) for rank in range(mesh.ranks)}
    if any(len({cluster.devices[rank].type for rank in group}) > 1 for group in groups):
        return set()
    found = {rule for rule in rules if rule in ("compute", "memory")}
    if "cost" in rules:
        hosts = {group: tuple(cluster.devices[rank].host for rank in group) for group in groups}
        rates = (rank_rates(cluster.wiring, group, hosts[group]) for group in groups)
        if all(len(set(way)) == 1 for both in rates for way in both):
            found.add("cost")
    return found


MAX_MICRO_BATCHES = 32
"""Largest number of micro-batches that is searched by default: more rarely pay off, and take long to simulate."""
