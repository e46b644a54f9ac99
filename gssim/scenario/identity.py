"""Identity of scenarios and calibrations: digests of canonical plain data, which join predictions and measurements.

[Note: canonical data] Tables are dumped field by field, with sorted keys and exact numbers. Fields that have their
default are left out, so a key that is added later changes no id if its default is the previous behaviour. All fields
are part of an identity unless they are listed here as left out. If a default changes, or a field gets another meaning,
`VERSION` must change: `tests/golden/test_identity.py` holds all defaults. Large parts that many scenarios share are
represented by their digests.
"""

import hashlib
import json
from collections.abc import Hashable
from typing import Any, NamedTuple

from gssim.cluster import Cluster, Conditions
from gssim.cluster.topology import structure_of
from gssim.execution.cache import Same, Shared, cached_by_identity
from gssim.plan import Plan, Policies, Push
from gssim.scenario.run import Run
from gssim.units import adapter
from gssim.workload import Model, Workload
from gssim.workload.gradient_statistics import GradientStatistics
from gssim.workload.layer import ONE_SAMPLE, OPERAND_CASTS, SEVERAL_SAMPLES, without_mark
from gssim.workload.model import LAYER_LISTS, OWN_LAYERS, FusedKernels

VERSION = 1
"""Version of the canonical data."""

POLICIES = (
    *("partition", "parameters", "gradients", "gradient_sync", "optimizer_state"),
    *("dp_replicate", "dp_shard", "tp", "pp", "exchange", "publish_overlaps"),
)
"""Resolved policies that are part of the identity. All others follow from the method."""
AS_RESOLVED = {*POLICIES, "cp", "compress", "sync_every_steps", "ranks", "push", "stages", "shares"}
"""Keys of a plan that count by what they resolve to, however that was written."""
UNASKED_OF_MODEL = {
    *("source", "name", *LAYER_LISTS, "whole_layers", "expert_tensor_ranks", "adapted", "autocast", "uncut_reason"),
    *("unstaged_reason", "partly_trained", "other_precisions", OWN_LAYERS, "traced_one_sample"),
    *("fused_kernels", "runs_fused_kernels"),
}
"""Fields of a model that follow from its module, or only name it. Some fields of its layers count: `LAYER_FIELDS`."""
LAYER_FIELDS = {
    *("name", "modules", "block", "parameters", "buffers", "saved_bytes", "output_bytes"),
    *("forward_flop", "forward_bytes", "forward_operations"),
    *("backward_flop", "backward_bytes", "backward_operations"),
}
"""Traced fields of a layer that tell models apart; the others follow from the same module."""


class ScenarioParts(NamedTuple):
    """A scenario's tables, and the values to which its plan resolves."""

    name: str
    question: str
    cluster: Cluster
    workload: Workload
    plan: Plan
    network: Conditions
    run: Run
    policies: Policies
    push: Push
    batch_sizes: tuple[int, ...]
    """Samples of each rank in one step."""
    shard_shares: tuple[float, ...]
    """Fraction of the sharded state that each rank owns."""
    owned_layers: tuple[tuple[int, int], ...]
    """Half-open ranges of layers whose weight gradients each rank computes, if ranks divide these."""
    stage_sizes: list[int]
    """Number of layers of each stage of a pipeline."""


def canonical(scenario: ScenarioParts, shared: Shared) -> dict[str, Any]:
    """Return the question that a scenario asks as canonical data: workload, resolved plan, cluster structure, run.

    It does not contain rates and costs of devices and links, names, paths, data sets, or the search. See [Note:
    canonical data]; `shared`: cache of the parts that scenarios have in common.
    """
    workload, plan, policies, cluster = scenario.workload, scenario.plan, scenario.policies, scenario.cluster
    ranks, model = policies.ranks, workload.model
    unasked = {"model", "gradients", "data"}
    if workload.reduce_precision == workload.precision or policies.gradients == "push":  # the same as an absent key
        unasked.add("reduce_precision")
    shares: dict[str, Any] = {"batch": scenario.batch_sizes, "shards": scenario.shard_shares}
    if policies.partition == "weight-gradient":
        shares["layers"] = scenario.owned_layers
    if plan.shares.replan:
        shares["replanning"] = _fields(plan.shares.replanning)

    return {
        "version": VERSION,
        "workload": _fields(workload, leave_out=unasked) | {"model": _model_digest(model)},
        "plan": _fields(plan, leave_out=AS_RESOLVED) | {"publish": _fields(plan.publish, leave_out={"overlap"})},
        "policies": {name: getattr(policies, name) for name in POLICIES}
        | ({"compress": policies.compress} if policies.compress else {})
        | ({"cp": policies.cp} if policies.cp > 1 else {})
        | ({"sync_every_steps": policies.sync_every_steps} if policies.sync_every_steps else {}),
        "push": _fields(scenario.push),
        "shares": shares,
        "stages": scenario.stage_sizes,
        "cluster": _structure_digest(cluster, ranks, shared),
        "network": _fields(scenario.network),
        "run": _fields(scenario.run, leave_out={"evaluate_every_steps"}),  # evaluations change no step
    }


MOST_MODELS = 32
"""Number of models whose digests, and whose plain data, a process caches: large models take longer to dump than most
scenarios to simulate. The models themselves are cached by `loading`."""


@cached_by_identity(maxsize=MOST_MODELS)
def _model_digest(asked: Model) -> str:
    """Return the digest of a model without its name, its source, and what follows from its module."""
    model = asked.in_file_precision
    layers = [_dumped(layer, include=LAYER_FIELDS) for layer in model.layers]
    for layer in layers:  # marks of buffers, those of one sample, and copies of operands follow from the module
        layer["buffers"] = [
            without_mark(text.removesuffix(SEVERAL_SAMPLES))
            for text in layer["buffers"]
            if not text.endswith(ONE_SAMPLE) and f" {OPERAND_CASTS} " not in text
        ]
    return _digest(_fields(model, leave_out=UNASKED_OF_MODEL) | {"layers": layers})


def scenario_id(scenario: ScenarioParts, shared: Shared) -> str:
    """Return the identity of a scenario: the digest of its canonical data."""
    key = (
        *_tables(scenario),
        _structure_digest(scenario.cluster, scenario.policies.ranks, shared),
        scenario.batch_sizes,
        scenario.shard_shares,
        scenario.owned_layers,
        tuple(scenario.stage_sizes),
    )
    return shared.once("scenario id", key, lambda: _digest(canonical(scenario, shared)))


def _tables(scenario: ScenarioParts) -> tuple[Hashable, ...]:
    """Return a key of a scenario's tables (by identity) without the cluster, and of its resolved plan."""
    tables = (scenario.workload, scenario.plan, scenario.network, scenario.run)
    return (*map(Same, tables), scenario.policies)


def _structure_digest(cluster: Cluster, ranks: int, shared: Shared) -> str:
    return shared.once("identity of structure", (Same(cluster), ranks), lambda: _digest(_structure(cluster, ranks)))


@cached_by_identity(maxsize=8)  # as many as `loading` keeps; to dump a large file takes longer than most simulations
def _statistics_digest(gradients: GradientStatistics) -> str:
    return _digest(_fields(gradients.transfer or gradients))


def calibration_id(cluster: Cluster, gradients: GradientStatistics | None, shared: Shared) -> str:
    """Return the identity of the numbers on which a prediction is based: rates, profiles and statistics."""

    def digest() -> str:
        return _digest(
            {
                "version": VERSION,
                "cluster": shared.once("identity of cluster", Same(cluster), lambda: _digest(_fields(cluster))),
                "gradients": gradients and _statistics_digest(gradients),
            }
        )

    return shared.once("calibration", (Same(cluster), Same(gradients)), digest)


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


# The whole scenario, as a Result stores it ----------------------------------------------------------------------------


def resolved(scenario: ScenarioParts, shared: Shared) -> dict[str, Any]:
    """Return the whole scenario as plain data, as the Result stores it; it must not be changed.

    Empty tables and lists (network conditions, slow-downs, rebalancing) are left out.
    """
    cluster = scenario.cluster
    head = {
        "name": scenario.name,
        "question": scenario.question,
        "cluster": shared.once("plain cluster", Same(cluster), lambda: _dumped(cluster)),
    }
    return head | shared.once("plain tables", _tables(scenario), lambda: _resolved_tables(scenario))


LEFT_OUT_UNSET: dict[str, tuple[str, ...]] = {
    "workload": (
        *("map_precision", "gradient_precision", "reduce_precision", "loss_scale", "clip_norm", "adapters", "frozen"),
        *("autocast", "tf32", "expert_load", "expert_routing"),
    ),
    "plan": (
        *("ranks", "zero1_implementation", "zero2_implementation", "receive_buffers", "offload", "compress"),
        *("embedding_parallel", "loss_parallel", "sync_every_steps", "sequence_parallel", "gathered_inputs"),
        *("tp_overlap", "async_input_gradients", "context_overlap", "cp", "ep", "etp"),
    ),
    "run": ("evaluate_every_steps", "extrapolate_micro_batches", "slowdowns"),
}
"""By table of a scenario: keys that a Result's copy of the scenario leaves out where they have their default."""


def layers_id(stored: object) -> str:
    """Return the digest of a model as a Result stores it, with all traced layers that its plan can need.

    A `scenario_id` leaves out what a trace may find otherwise in the same module, so that measurements are joined with
    predictions of any trace; predictions themselves depend on it.
    """
    return _digest(stored)


_layers_id = cached_by_identity(maxsize=MOST_MODELS)(layers_id)


def layers_id_of(scenario: ScenarioParts) -> str:
    """Return the `layers_id` that the scenario's Result has."""
    return _layers_id(_stored_model(scenario))


def _stored_model(scenario: ScenarioParts) -> Any:
    """Return a scenario's model as plain data, without what its plan does not use."""
    model, policies = scenario.workload.model, scenario.policies
    unused = {"uncut_reason", "unstaged_reason", "adapted", "autocast", "partly_trained", "other_precisions"}
    unused |= set() if model.traced_autocast else {"traced_autocast"}
    unused |= set() if model.whole_layers else {"whole_layers"}
    unused |= set() if policies.sequence_parallel else {"sequence_layers"}
    unused |= set() if policies.ep > 1 else {"expert_layers", "expert_tensor_ranks"}
    unused |= set() if policies.ep > 1 and policies.tp > 1 else {"expert_sequence_layers"}
    unused |= set() if policies.cp > 1 else {"context_layers"}
    return _plain_model(model, frozenset(unused))


def _resolved_tables(scenario: ScenarioParts) -> dict[str, Any]:
    """Return the tables of a scenario besides the cluster as plain data."""
    plan, run = scenario.plan, scenario.run
    data: dict[str, Any] = {
        "workload": {"model": _stored_model(scenario)} | _dumped(scenario.workload, exclude={"model"}),
        "plan": _dumped(plan),
        "network": _dumped(scenario.network),
        "run": _dumped(run),
    }
    for name, keys in LEFT_OUT_UNSET.items():
        set_keys = _fields(getattr(scenario, name), leave_out={"model"})
        for key in keys:
            if key not in set_keys:
                del data[name][key]
    for table, key, is_absent in (
        (data, "network", not scenario.network),
        (data["plan"]["shares"], "replanning", not plan.shares.replan),
        (data["plan"], "powersgd", scenario.policies.compressor != "powersgd"),
        (data["plan"], "topk", scenario.policies.compressor != "topk"),
        (data["plan"]["outer"], "precision", plan.outer.precision == "fp32"),
        (data["plan"], "outer", scenario.policies.outer_optimizer != "nesterov"),
        (data["plan"], "streaming", not scenario.policies.in_fragments),
        (data["plan"], "sparse_outer", scenario.policies.outer_optimizer != "sparse"),
    ):
        if is_absent:
            del table[key]
    return data


@cached_by_identity(maxsize=MOST_MODELS)
def _plain_model(model: Model, unused: frozenset[str]) -> Any:
    excluded: dict[str, Any] = {**dict.fromkeys(unused, True), "fused_kernels": _unstored(model.fused_kernels)}
    own = model.in_file_precision
    if own is not model:  # these layers are stored too, as identities are those of them
        excluded[OWN_LAYERS] = {**excluded, "fused_kernels": _unstored(own.fused_kernels)}
    return _dumped(model, exclude=excluded)


def _unstored(fused: FusedKernels | None) -> Any:
    """Return what a Result leaves out of a model's layers of GPUs: all but that these run the model's own."""
    return fused is None or bool(fused.layers) or {"autocast": True, "other_precisions": True}


def _dumped(value: object, **options: Any) -> Any:
    """Return a value as plain data, as files hold it."""
    kind: Any = type(value)
    return adapter(kind).dump_python(value, mode="json", **options)


def _fields(value: object, *, leave_out: set[str] | None = None) -> dict[str, Any]:
    """Return the fields of a table that differ from their defaults; see [Note: canonical data]."""
    data: dict[str, Any] = _dumped(value, exclude=leave_out, exclude_defaults=True)
    return data


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
