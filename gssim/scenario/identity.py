"""Who a question is: digests and plain data of scenarios, put together from parts that many have in common."""

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
from gssim.plan import Plan, Publish
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
"""Of a layer: files traced before these were kept ask the same question."""


def resolved(scenario: "Scenario", shared: Shared) -> dict[str, Any]:
    """Return the whole scenario as plain data, as the Result keeps it; nobody may change it."""
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
    if scenario.plan.zero1_implementation == "torch":
        del data["plan"]["zero1_implementation"]
    return data


KEYS = ("name", "question", "cluster", "workload", "plan", "network", "run")
"""Of a scenario, in the order in which the Result has them."""


def scenario_id(scenario: "Scenario", shared: Shared) -> str:
    """Return the identity of a question: workload, resolved plan, structure of the cluster; no rates, files, names."""
    policies, cluster = scenario.policies, scenario.cluster
    plan = _said(scenario.plan, publish_overlaps=policies.publish_overlaps)
    plan["push"] = _plain(scenario.push)
    if policies.pp > 1:
        plan["stages"] = [len(stage) for stage in scenario.stages]
    replan = scenario.plan.shares.replan
    plan["shares"] = {"batch": scenario.batch_sizes, "shards": scenario.shard_shares, "replan": replan}
    if policies.partition == "weight-gradient":
        plan["shares"]["layers"] = scenario.owned_layers
    ranks = scenario.ranks
    question = {
        "workload": _workload(scenario.workload, shared),
        "plan": _text(plan),
        "policies": _text(repr(policies)),
        "cluster": shared.once("structure", (Same(cluster), ranks), lambda: _text(_structure(cluster, ranks))),
        "run": _text(_run(scenario)),
    }
    if policies.exchange != ("point-to-point" if policies.gradients == "push" else "backend"):
        question["exchange"] = _text(policies.exchange)  # the only ways that there were keep their identity
    if scenario.network:
        question["network"] = _text(_plain(scenario.network))
    return _digest(_joined(question))


def calibration_id(cluster: Cluster, gradients: GradientStatistics | None, shared: Shared) -> str:
    """Return the identity of the numbers that a prediction rests on: rates, profiles and statistics."""

    def found() -> str:
        parts = {
            "cluster": shared.once("calibrated cluster", Same(cluster), lambda: _text(_plain(cluster))),
            "gradients": shared.once("gradients as text", Same(gradients), lambda: _text(_plain(gradients) or None)),
        }
        return _digest(_joined(parts))

    return shared.once("calibration", (Same(cluster), Same(gradients)), found)


def _workload(workload: Workload, shared: Shared) -> str:
    """Return a workload, without what asks no other question, as JSON."""
    data: dict[str, Any] = _plain(workload, leave_out={"model", "gradients", "data"})
    if data["optimizer_implementation"] == "default":
        del data["optimizer_implementation"]  # what earlier results mean by saying nothing
    model = shared.once("question of model", Same(workload.model), lambda: _text(_model(workload.model)))
    return _joined({key: _text(value) for key, value in data.items()} | {"model": model})


def _model(model: Model) -> dict[str, Any]:
    data: dict[str, Any] = _plain(model)
    for key in ("source", "name", "sliced_layers"):  # the last follows from the module too
        del data[key]
    data["input"] = {key: value for key, value in data["input"].items() if value is not None}
    for layer in data["layers"]:
        dropped = ("recompute_", "selective_", *FOLLOWS_FROM_THE_MODULE)
        for key in [key for key in layer if key.startswith(dropped)]:
            del layer[key]  # follows from the module; files traced before it was kept ask the same question
    return data


def _run(scenario: "Scenario") -> dict[str, Any]:
    """Return the run, and what decides on shares in it; what is not there makes no other question."""
    run: dict[str, Any] = _plain(scenario.run)
    del run["evaluate_every_steps"]  # it changes neither the steps nor what they cost
    if not scenario.run.slowdowns:
        del run["slowdowns"]
    if scenario.plan.shares.replan:
        run["replanning"] = _plain(scenario.plan.shares.replanning)
    return run


def _said(plan: Plan, *, publish_overlaps: bool) -> dict[str, Any]:
    """Return a plan as plain data, without what earlier results mean by saying nothing: that nothing overlaps, too."""
    data: dict[str, Any] = _plain(plan)
    del data["exchange"], data["ranks"]  # the resolved plan has the number of ranks
    if plan.zero1_implementation == "torch":
        del data["zero1_implementation"]
    usual: dict[str, Any] = _plain(Publish())
    said = data["publish"] | {"overlap": publish_overlaps or None}
    data["publish"] = {key: value for key, value in said.items() if key == "threshold" or value != usual[key]}
    return data


def _structure(cluster: Cluster, ranks: int) -> dict[str, Any]:
    """Return the cluster's wiring with every name replaced by its position; of a topology, what it says of wiring."""
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
    """Return what files say as plain data."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json", exclude=leave_out)


def _text(data: object) -> str:
    return json.dumps(data, sort_keys=True)


def _joined(texts: Mapping[str, str]) -> str:
    """Return a table whose values are JSON already.

    >>> _joined({"b": "[1, 2]", "a": "null"}) == json.dumps({"a": None, "b": [1, 2]}, sort_keys=True)
    True
    """
    return "{" + ", ".join(f"{json.dumps(key)}: {texts[key]}" for key in sorted(texts)) + "}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
