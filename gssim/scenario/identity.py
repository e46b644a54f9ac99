"""Identities of scenarios and calibrations: digests of plain data, assembled from parts that many have in common."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from gssim.cache import Same, Shared
from gssim.cluster import Cluster
from gssim.cluster.topology import structure_of
from gssim.gradient_statistics import GradientStatistics
from gssim.plan import ABSENT_AT_DEFAULT, Plan, Publish
from gssim.workload import Model, Workload

if TYPE_CHECKING:
    from gssim.scenario.scenario import Scenario

FOLLOWS_FROM_THE_MODULE = (
    "units",
    "reductions",
    "linear",
    "untrained_buffers",
    "frozen",
    "deepest",
    "forward_streamed_bytes",
    "backward_streamed_bytes",
)
"""Fields of a layer that follow from its module: files traced before these existed have the same identity."""


def resolved(scenario: "Scenario", shared: Shared) -> dict[str, Any]:
    """Return the whole scenario as plain data, as the Result stores it; it must not be changed."""
    cluster, model = scenario.cluster, scenario.workload.model
    parts: dict[str, Any] = _plain(scenario, leave_out={"cluster": True, "search": True, "workload": {"model"}})
    workload = {"model": shared.once("plain model", Same(model), lambda: _plain(model))} | parts["workload"]
    clusters = {"cluster": shared.once("plain cluster", Same(cluster), lambda: _plain(cluster))}
    data = {key: ({**parts, **clusters, "workload": workload})[key] for key in KEYS}
    if not scenario.network:
        del data["network"]
    if scenario.run.evaluate_every_steps is None:
        del data["run"]["evaluate_every_steps"]
    if not scenario.run.slowdowns:
        del data["run"]["slowdowns"]
    if not scenario.plan.shares.replan:
        del data["plan"]["shares"]["replanning"]
    if scenario.plan.ranks is None:
        del data["plan"]["ranks"]
    return data | {"plan": _without_new_defaults(scenario.plan, data["plan"])}


KEYS = ("name", "question", "cluster", "workload", "plan", "network", "run")
"""Keys of a scenario, in the order of the Result."""


def scenario_id(scenario: "Scenario", shared: Shared) -> str:
    """Return the identity of a scenario: workload, resolved plan, cluster structure; no rates, files, names."""
    policies, cluster = scenario.policies, scenario.cluster
    plan = _identity_of_plan(scenario.plan, publish_overlaps=policies.publish_overlaps)
    plan["push"] = _plain(scenario.push)
    if policies.pp > 1:
        plan["stages"] = [len(stage) for stage in scenario.stages]
    replan = scenario.plan.shares.replan
    plan["shares"] = {"batch": scenario.batch_sizes, "shards": scenario.shard_shares, "replan": replan}
    if policies.partition == "weight-gradient":
        plan["shares"]["layers"] = scenario.owned_layers
    ranks = scenario.ranks
    question = {
        "workload": _identity_of_workload(scenario.workload, shared),
        "plan": _text(plan),
        "policies": _text(repr(policies)),
        "cluster": shared.once("structure", (Same(cluster), ranks), lambda: _text(_structure(cluster, ranks))),
        "run": _text(_identity_of_run(scenario)),
    }
    if policies.exchange != ("point-to-point" if policies.gradients == "push" else "backend"):
        question["exchange"] = _text(policies.exchange)  # the former fixed exchanges keep their identity
    if scenario.network:
        question["network"] = _text(_plain(scenario.network))
    return _digest(_joined(question))


def calibration_id(cluster: Cluster, gradients: GradientStatistics | None, shared: Shared) -> str:
    """Return the identity of the numbers that a prediction is based on: rates, profiles and statistics."""

    def digest() -> str:
        parts = {
            "cluster": shared.once("calibrated cluster", Same(cluster), lambda: _text(_plain(cluster))),
            "gradients": shared.once("gradients as text", Same(gradients), lambda: _text(_plain(gradients) or None)),
        }
        return _digest(_joined(parts))

    return shared.once("calibration", (Same(cluster), Same(gradients)), digest)


def _identity_of_workload(workload: Workload, shared: Shared) -> str:
    """Return the fields of a workload that are part of its identity, as JSON."""
    data: dict[str, Any] = _plain(workload, leave_out={"model", "gradients", "data"})
    if data["optimizer_implementation"] == "default":
        del data["optimizer_implementation"]  # absent from the identities of earlier results
    model = shared.once("question of model", Same(workload.model), lambda: _text(_identity_of_model(workload.model)))
    return _joined({key: _text(value) for key, value in data.items()} | {"model": model})


def _identity_of_model(model: Model) -> dict[str, Any]:
    """Return the fields of a model that are part of its identity."""
    data: dict[str, Any] = _plain(model)
    for key in ("source", "name", "sliced_layers"):  # the last follows from the module
        del data[key]
    data["input"] = {key: value for key, value in data["input"].items() if value is not None}
    for layer in data["layers"]:
        dropped = ("recompute_", "selective_", *FOLLOWS_FROM_THE_MODULE)
        for key in [key for key in layer if key.startswith(dropped)]:
            del layer[key]  # follows from the module; absent from files that were traced earlier
    return data


def _identity_of_run(scenario: "Scenario") -> dict[str, Any]:
    """Return the fields of the run, and of rebalancing in it, that are part of the identity."""
    run: dict[str, Any] = _plain(scenario.run)
    del run["evaluate_every_steps"]  # it changes neither the steps nor what they cost
    if not scenario.run.slowdowns:
        del run["slowdowns"]
    if scenario.plan.shares.replan:
        run["replanning"] = _plain(scenario.plan.shares.replanning)
    return run


def _identity_of_plan(plan: Plan, *, publish_overlaps: bool) -> dict[str, Any]:
    """Return a plan as plain data, without the defaults that are absent from the identities of earlier results."""
    data: dict[str, Any] = _plain(plan)
    del data["exchange"], data["ranks"]  # the resolved plan has the number of ranks
    data = _without_new_defaults(plan, data)
    default: dict[str, Any] = _plain(Publish())
    publish = data["publish"] | {"overlap": publish_overlaps or None}
    data["publish"] = {key: value for key, value in publish.items() if key == "threshold" or value != default[key]}
    return data


def _without_new_defaults(plan: Plan, data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's plain data without the keys of `ABSENT_AT_DEFAULT` that are at their default."""
    default = Plan(method=plan.method)
    unset = {key for key in ABSENT_AT_DEFAULT if getattr(plan, key) == getattr(default, key)}
    return {key: value for key, value in data.items() if key not in unset}


def _structure(cluster: Cluster, ranks: int) -> dict[str, Any]:
    """Return the cluster's wiring with every name replaced by its position; of a topology, its structure."""
    if cluster.topology is not None:
        used = dict.fromkeys(device.type for device in cluster.devices)
        kinds = [cluster.device_types[name].kind for name in used]
        topology = structure_of(cluster.topology)
        return {"backend": cluster.backend, "kinds": kinds, "topology": topology, "ranks": ranks}
    hosts = list(dict.fromkeys(device.host for device in cluster.devices))
    types = list(dict.fromkeys(device.type for device in cluster.devices))
    place = {name: i for i, name in enumerate([*(d.name for d in cluster.devices), *cluster.switches])}
    devices = [
        (types.index(device.type), cluster.device_types[device.type].kind, hosts.index(device.host))
        for device in cluster.devices
    ]
    ends = [(tuple(place[end] for end in link.between), link.directed) for link in cluster.links]
    edges = sorted((pair if directed else tuple(sorted(pair)), directed) for pair, directed in ends)
    return {"backend": cluster.backend, "devices": devices, "edges": edges, "ranks": ranks}


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _plain(value: object, *, leave_out: Any = None) -> Any:
    """Return a value as plain data, as files hold it."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json", exclude=leave_out)


def _text(data: object) -> str:
    return json.dumps(data, sort_keys=True)


def _joined(texts: Mapping[str, str]) -> str:
    """Return a table, given as JSON texts of its values, as JSON.

    >>> _joined({"b": "[1, 2]", "a": "null"}) == json.dumps({"a": None, "b": [1, 2]}, sort_keys=True)
    True
    """
    return "{" + ", ".join(f"{json.dumps(key)}: {texts[key]}" for key in sorted(texts)) + "}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
