"""The plans of a search's space, as the scenario file would have them.

Plans of a search's space that cannot run: how many, of which methods, and why.

Which thresholds a study of their price allows: those whose change of the last loss is within what the user allows.

A study's table has a row for each variant that was trained (`analysis convergence` writes one). It says the threshold
and its kind, but not what else a variant changed: of several with the same threshold the worst counts.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from gssim.errors import UserError
from gssim.files import read_rows
from gssim.plan import METHODS, Plan
from gssim.planner.batches import PLAN, Batches
from gssim.scenario import Scenario, SearchSpace, check, toml

NUMBER = re.compile(r"\d[\d.]*")


@dataclass
class _Group:
    reason: str
    """Of the first of them; the others' differ in numbers."""
    plans: int = 0
    methods: dict[str, None] = field(default_factory=dict)


class LeftOut:
    """Plans that were refused, by reason: those whose reasons differ in numbers alone are told together."""

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
        """How many in all."""
        return sum(group.plans for group in self._groups.values())

    def rows(self) -> list[Mapping[str, Any]]:
        """Return number, methods and reason of each group, the largest first, as a Result's provenance has them."""
        groups = sorted(self._groups.values(), key=lambda group: -group.plans)
        return [{"plans": each.plans, "methods": list(each.methods), "reason": each.reason} for each in groups]

    def lines(self) -> list[str]:
        """Return the same for people."""
        return [
            f"left out: {each['plans']:,} ({', '.join(each['methods'])}): {each['reason']}"
            if each["plans"]
            else f"not searched: {each['reason']}"
            for each in self.rows()
        ]


COLUMNS = ("control", "threshold", "kind", "loss_change_high")


def loss_changes(file: Path, kind: str) -> dict[float, float]:
    """Return by how many nats each threshold of a kind raises the last loss, by the upper end of its interval.

    Controls, and variants of which no interval is known, are left out. Raises UserError where the file is none.
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


def allowed(
    file: Path, kind: str, *, most_loss_change: float, thresholds: tuple[float, ...], own: float | None, scenario: str
) -> tuple[float, ...]:
    """Return the thresholds that may be searched: those asked for, or else all of the study, within the bound.

    `own`: that of the scenario's plan, which its other plans push by as well. Raises UserError, in the name of the file
    `scenario`, where the study has not measured one that is asked for.
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
"""Searched where a least density alone is given, without thresholds: two a decade."""
KEPT = ("bucket_bytes", "first_bucket_bytes", "overlap", "prefetch")
"""Keys of the scenario's own plan that each of its candidates has too, where they are set."""


@dataclass(frozen=True)
class Candidate:
    """A plan that may be the best."""

    index: int
    """Of equally good ones the first counts."""
    table: Mapping[str, Any]
    """As the scenario's file would have it."""
    plan: Plan

    @property
    def override(self) -> str:
        """The plan as `--set` takes it."""
        return f"plan={toml(dict(self.table))}"


class Axes(NamedTuple):
    """Sizes of a plan's mesh."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """How many devices they take."""
        return prod(self)

    @property
    def parts(self) -> int:
        """How many parts the batch is divided into."""
        return self.dp_replicate * self.dp_shard


def candidates(
    scenario: Scenario, space: SearchSpace, batches: Batches, left_out: LeftOut | None = None
) -> Iterator[Candidate]:
    """Give every plan of the space, the scenario's own first; what cannot run is among them.

    `left_out` hears which combinations of the space make no plan.
    """
    left_out = left_out or LeftOut()
    yield Candidate(0, _plan_table(scenario.plan), scenario.plan)
    kept = _kept(scenario.plan)
    seen = {_sized(scenario.plan, batches)}
    for table in _tables(scenario, space, batches, left_out):
        whole = kept | _push_table(scenario.plan, table) | table
        if table["method"] == "zero1" and scenario.plan.zero1_implementation != "torch":
            whole["zero1_implementation"] = scenario.plan.zero1_implementation
        plan = PLAN.validate_python(whole)
        if (sized := _sized(plan, batches)) not in seen:
            seen.add(sized)
            yield Candidate(len(seen) - 1, whole, plan)


def _sized(plan: Plan, batches: Batches) -> Plan:
    """Return a plan with its axes sized, as those are that are made here; as it is where that cannot be."""
    try:
        policies = batches.bounds.parts.policies(plan)
    except UserError:
        return plan
    mesh = policies.mesh
    data = replace(plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
    return replace(data, ranks=mesh.ranks, tp=mesh.tp, pp=mesh.pp)


def _plan_table(plan: Plan) -> dict[str, Any]:
    """Return what is set of a plan."""
    data: dict[str, Any] = PLAN.dump_python(plan, mode="json", exclude_defaults=True, exclude_none=True)
    return data


def _kept(plan: Plan) -> dict[str, Any]:
    return {key: value for key, value in _plan_table(plan).items() if key in KEPT}


def _push_table(plan: Plan, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the scenario's own plan pushes and publishes, for a method that does."""
    if METHODS[table["method"]].gradients != "push":
        return {}
    own = _plan_table(plan)
    push = own.get("push", {}) | table.get("push", {})
    publish = own.get("publish") if METHODS[table["method"]].parameters == "replicated" else None
    found = {"push": push} if push else {}
    return found | ({"publish": publish} if publish else {})


def _tables(scenario: Scenario, space: SearchSpace, batches: Batches, left_out: LeftOut) -> Iterator[dict[str, Any]]:
    """Give the plans of the space as tables, devices by devices, method by method."""
    counts = device_counts(scenario, space)
    for key, wanted in (("tp", space.tp), ("pp", space.pp)):
        for size in wanted or ():
            if not any(count % size == 0 for count in counts):
                numbers = ", ".join(map(str, counts))
                left_out.add(f"search.{key} = {size}: does not divide any number of devices ({numbers})", "all", 0)
    for place, count in enumerate(counts):
        for method in space.methods:
            if method == "single" and place:  # once
                continue
            for axes in _meshes(scenario, space, method, count):
                yield from _of_mesh(scenario, space, batches, method, axes, left_out)


def device_counts(scenario: Scenario, space: SearchSpace) -> list[int]:
    """Return how many devices are used: all that the scenario's own plan may take first."""
    hosts = [device.host for device in scenario.cluster.devices[: scenario.plan.ranks]]
    if space.devices is not None:
        return sorted({min(count, len(hosts)) for count in space.devices}, reverse=True)
    ends = [i for i in range(1, len(hosts)) if hosts[i] != hosts[i - 1]]
    return [len(hosts), *(reversed(ends) if len(ends) <= MOST_HOSTS else ())]


MOST_HOSTS = 8
"""Of more hosts, all are used unless the user says how many devices."""


def _meshes(scenario: Scenario, space: SearchSpace, method: str, count: int) -> Iterator[Axes]:
    """Give the meshes of `count` devices that suit a method."""
    if method == "single":
        yield Axes()
    elif method == "gs_wgrad":
        if count > 1:
            yield Axes(dp_shard=count)
    else:
        tps = _sizes(space.tp, count, _largest_host(scenario, count))
        for tp, pp in product(tps, _sizes(space.pp, count, count) if METHODS[method].in_pipelines else [1]):
            if count % (tp * pp) == 0:
                yield from _data_axes(method, count // (tp * pp), tp, pp)


def _data_axes(method: str, data: int, tp: int, pp: int) -> Iterator[Axes]:
    """Give the meshes of a method with `data` parts of the batch, tensor groups and stages of the sizes given."""
    if METHODS[method].two_levels:
        yield from (Axes(data // inner, inner, tp, pp) for inner in _divisors(data) if 1 < inner < data)
    elif (axis := METHODS[method].axis) in ("tp", "pp"):
        if data == 1 and (pp if axis == "pp" else tp) > 1:
            yield Axes(tp=tp, pp=pp)
    elif data > 1:
        yield Axes(data, 1, tp, pp) if axis == "dp_replicate" else Axes(1, data, tp, pp)


def _sizes(wanted: Sequence[int] | None, count: int, most: int) -> list[int]:
    return [size for size in (wanted if wanted is not None else _divisors(count)) if count % size == 0 and size <= most]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _largest_host(scenario: Scenario, count: int) -> int:
    hosts = [device.host for device in scenario.cluster.devices[:count]]
    return max(map(hosts.count, set(hosts)))


def _of_mesh(
    scenario: Scenario, space: SearchSpace, batches: Batches, method: str, axes: Axes, left_out: LeftOut
) -> Iterator[dict[str, Any]]:
    """Give the plans of a method on a mesh."""
    total = scenario.workload.global_batch_size
    mesh = {name: size for name, size in axes._asdict().items() if size > 1 or name in ("dp_replicate", "dp_shard")}
    if axes.ranks < len(scenario.cluster.devices) and method != "single":
        mesh["ranks"] = axes.ranks
    parts = 1 if method == "gs_wgrad" else axes.parts
    shards = (
        [each for each in space.shards if _may_own(scenario, method, axes, each)]
        if METHODS[method].is_gradient_sharding
        else ["even"]
    )
    recomputes = space.recompute if method != "gs_wgrad" else [each for each in space.recompute if each == "none"]
    rules = space.batch if parts > 1 else ("even",)
    divided = list(product(shards, _pushes(scenario, space, method)))
    for micro_batches in _micro_batches(space, total, parts):
        same = {"method": method, **mesh, "micro_batches": micro_batches}
        reason = _refusal(scenario, same) if method == "gs_wgrad" else batches.refusal(same)
        if reason is not None:
            left_out.add(reason, method, len(recomputes) * len(divided) * len(rules))
            continue
        for recompute, (owned, push) in product(recomputes, divided):
            table = same | {"recompute": recompute} | ({"push": push} if push else {})
            found = list(batches.shares(table, owned, rules))
            if not found:
                each = f"give each of {parts} parts samples for {micro_batches} equal micro-batches"
                left_out.add(f"no division of the batch of {total} would {each}, within memory", method, len(rules))
            for batch in found:
                yield table | {"shares": {"batch": batch, "shards": owned}}


def _refusal(scenario: Scenario, table: Mapping[str, Any]) -> str | None:
    """Return why a plan cannot run; None: it can."""
    try:
        check(replace(scenario, plan=PLAN.validate_python(table)), file="search")
    except UserError as error:
        return str(error).removeprefix("search: ")
    return None


def _may_own(scenario: Scenario, method: str, axes: Axes, rule: str) -> bool:
    """Return whether a method's shards can follow a rule, and it makes a difference."""
    if rule == "even":
        return True
    if rule == "compute":
        return len({device.type for device in scenario.cluster.devices[: axes.ranks]}) > 1
    owners = METHODS[method].gradients == "push" and axes.tp == 1
    return owners and (not METHODS[method].two_levels or rule == "memory")


def _micro_batches(space: SearchSpace, total: int, parts: int) -> Sequence[int]:
    if space.micro_batches is not None:
        return space.micro_batches
    most = max(1, total // parts)
    return [1 << power for power in range(most.bit_length()) if 1 << power <= min(most, MOST_MICRO_BATCHES)]


MOST_MICRO_BATCHES = 32
"""Searched where the user does not say how many: more seldom pay, and take long to simulate."""


def _pushes(scenario: Scenario, space: SearchSpace, method: str) -> list[dict[str, Any]]:
    """Return what of the push is searched: the scenario's own, and thresholds where their effect is bounded."""
    if METHODS[method].gradients != "push" or not space.searches_thresholds:
        return [{}]
    usual = USUAL_THRESHOLDS if space.study is None else ()
    return [{}, *({"threshold": value} for value in space.thresholds or usual)]
