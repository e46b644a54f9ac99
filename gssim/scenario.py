"""The question: Cluster x Workload x Plan and a run's length, loaded from one TOML file and checked whole."""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gssim import shares
from gssim.cluster import Cluster, DeviceType, LayerProfile
from gssim.conditions import Conditions, applied, ends_of
from gssim.gradients import GradientStatistics, read_gradients
from gssim.plan import Plan, Policies, refuse_what_cannot_run, resolve
from gssim.topology import structure_of
from gssim.units import PRECISION_BYTES, Count, PositiveInt, Precision, UserError, spec, validated
from gssim.workload import Layer, Model, TokenInput, Workload, unrolled


@spec
class Run:
    """How long to train, and from which seed."""

    steps: PositiveInt = 20
    """Steps that count, after the warm-up."""
    warmup_steps: Count = 5
    seed: Count = 0


@spec
class Scenario:
    """A question: this workload, divided by this plan, on this cluster."""

    name: str
    question: str = ""
    cluster: Cluster
    workload: Workload
    plan: Plan
    network: Conditions = field(default_factory=Conditions)
    """Faults and other traffic (simulated)."""
    run: Run = field(default_factory=Run)

    @property
    def policies(self) -> Policies:
        """The plan with every policy resolved."""
        return resolve(self.plan, devices=len(self.cluster.devices))

    @property
    def ranks(self) -> int:
        """Number of ranks; rank i runs on the cluster's i-th device."""
        return self.policies.ranks

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of each rank in one step."""
        wanted, total = self.plan.shares.batch, self.workload.global_batch_size
        if wanted == "throughput":
            costs = self._sample_costs()
            return shares.balance_batch(total, sample_s=[c[1] for c in costs], fixed_s=[c[0] for c in costs])
        return shares.split(total, shares.even(self.ranks) if isinstance(wanted, str) else wanted)

    @property
    def shard_shares(self) -> tuple[float, ...]:
        """Fraction of the sharded state that each rank owns."""
        wanted = self.plan.shares.shards
        if wanted == "compute":
            costs = self._sample_costs()
            return shares.proportional([1 / each for _, each in costs])
        return shares.even(self.ranks) if isinstance(wanted, str) else shares.proportional(wanted)

    def _sample_costs(self) -> list[tuple[float, float]]:
        """Return (fixed_s, sample_s) of each rank."""
        types = [device.type for device in self.cluster.devices[: self.ranks]]
        by_type = {name: sample_costs(self.cluster.device_types[name], self.workload) for name in set(types)}
        return [by_type[name] for name in types]

    def resolved(self) -> dict[str, Any]:
        """Return the whole scenario as plain data, as the Result keeps it."""
        data: dict[str, Any] = _adapter(Scenario).dump_python(self, mode="json")
        if not self.network:
            del data["network"]
        return data

    @property
    def scenario_id(self) -> str:
        """Identity of the question: workload, resolved plan, structure of the cluster; no rates, files or names."""
        workload = _adapter(Workload).dump_python(self.workload, mode="json")
        for key in ("gradients", "data"):
            del workload[key]
        for key in ("source", "name"):
            del workload["model"][key]
        for layer in workload["model"]["layers"]:
            for key in ("recompute_flop", "recompute_bytes", "recompute_operations"):
                del layer[key]  # follows from the module; files traced before it was kept ask the same question
        plan = _adapter(Plan).dump_python(self.plan, mode="json")
        plan["shares"] = {"batch": self.batch_sizes, "shards": self.shard_shares, "replan": self.plan.shares.replan}
        question = {
            "workload": workload,
            "plan": plan,
            "policies": repr(self.policies),
            "cluster": _structure(self.cluster, self.ranks),
            "run": _adapter(Run).dump_python(self.run, mode="json"),
        }
        if self.network:
            question["network"] = _adapter(Conditions).dump_python(self.network, mode="json")
        return _digest(question)


@spec
class Loaded:
    """A scenario with what its files said beside it."""

    file: str
    scenario: Scenario
    gradients: GradientStatistics | None = None

    @property
    def statistics_needed(self) -> bool:
        """Whether messages depend on the data, so that a prediction needs gradient statistics."""
        return bool(self.scenario.plan.push.threshold)

    @property
    def calibration_id(self) -> str:
        """Identity of the numbers that a prediction rests on: rates, profiles and statistics."""
        cluster = _adapter(Cluster).dump_python(self.scenario.cluster, mode="json")
        statistics = _adapter(GradientStatistics).dump_python(self.gradients, mode="json") if self.gradients else None
        return _digest({"cluster": cluster, "gradients": statistics})


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


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


def sample_costs(device: DeviceType, workload: Workload) -> tuple[float, float]:
    """Return (fixed_s, sample_s) of a step on `device`: from its profile of the model, else from its achieved FLOP/s.

    It ranks devices by measured or stated throughput for the share policies; it is no prediction of a step.
    """
    for profile in device.profiles:
        fits = profile.model == workload.model.name and profile.precision == workload.precision
        if fits and profile.sequence_length in (None, workload.sequence_length):
            curves = [
                (entry.repeats, curve)
                for entry in workload.model.layers
                if entry.name in profile.layers
                for curve in (profile.layers[entry.name].forward_s, profile.layers[entry.name].backward_s)
            ]
            largest = max((curve.sizes[-1] for _, curve in curves), default=0)
            if largest:
                return 0.0, sum(n * curve.at(largest) for n, curve in curves) / largest
    flop = sum(_training_flop(layer, workload.sequence_length or 1) for layer in workload.model.layers)
    return 0.0, flop / (peak_flop_per_s(device, workload.precision) * device.efficiency_ratio)


def layer_profile(device: DeviceType, workload: Workload, layer: Layer) -> LayerProfile | None:
    """Return the measured cost of `layer` on `device` at this precision and sequence length, if there is one."""
    for profile in device.profiles:
        same = profile.model == workload.model.name and profile.precision == workload.precision
        if same and profile.sequence_length in (None, workload.sequence_length) and layer.name in profile.layers:
            return profile.layers[layer.name]
    return None


def peak_flop_per_s(device: DeviceType, precision: Precision) -> float:
    """Return the device's peak; raise UserError where it is needed (no profile covers a layer) but not stated."""
    peak = device.peak_flop_per_s.get(precision)
    if peak is None:
        stated = ", ".join(device.peak_flop_per_s) or "none"
        raise UserError(
            f"cluster: device_types: no peak_flop_per_s.{precision} on a {device.kind} device "
            f"(stated: {stated}), nor a profile of every layer at this precision and sequence length"
        )
    return peak


def _training_flop(layer: Layer, sequence_length: int) -> int:
    one_sample = {"b": 1, "s": sequence_length}
    return layer.repeats * (layer.forward_flop.at(**one_sample) + layer.backward_flop.at(**one_sample))


# Loading -------------------------------------------------------------------------------------------------------------


def load_scenario(path: Path, overrides: Sequence[str] = (), *, gradients_needed: bool = True) -> Loaded:
    """Return the scenario in the TOML file `path`, with `overrides` like `plan.push.threshold=1e-3` applied.

    Files that it names are looked up beside it, files that an override names first from the working directory.
    Raises UserError (one line: file, key path, value, what is allowed) for whatever the user can mend.
    """
    text, data = read_toml(path)
    data.setdefault("name", path.stem)
    data.setdefault("question", _first_comment(text))
    folders = {"": path.parent}
    for override in overrides:
        key = _apply(data, override)
        folders[key] = Path()
    file = str(path)
    data["cluster"] = _part(data, "cluster", Cluster, file, folders)
    workload = data.get("workload")
    if isinstance(workload, dict):
        workload["model"] = _part(workload, "model", Model, file, folders, "workload.")
    scenario = validated(Scenario, data, file=file)
    check(scenario, file=file)
    statistics = _statistics(scenario, file, folders) if gradients_needed else None
    return Loaded(file=file, scenario=scenario, gradients=statistics)


def load_model(path: Path) -> Model:
    """Return the model in the TOML file `path`."""
    return validated(Model, read_toml(path)[1], file=str(path))


def load_cluster(path: Path) -> Cluster:
    """Return the cluster in the TOML file `path`."""
    return validated(Cluster, read_toml(path)[1], file=str(path))


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text and the parsed content of a TOML file; raise UserError where there is none or it is broken."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _first_comment(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _apply(data: dict[str, Any], override: str) -> str:
    """Set `a.b.c=value` in `data`; return the key path. The value is TOML, or a bare string."""
    key, separator, value = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise UserError(f"--set {override}: must be KEY=VALUE, such as plan.push.threshold=1e-3")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    table = data
    *parents, last = key.split(".")
    for i, part in enumerate(parents):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: {'.'.join(parents[: i + 1])} names a file or a value, not a table")
    table[last] = parsed
    return key


def _part(
    data: dict[str, Any], key: str, cls: type[object], file: str, folders: dict[str, Path], under: str = ""
) -> object:
    """Return what is at `key`: the table given inline, or what is in the file that it names, checked as a `cls`."""
    value = data.get(key)
    if value is None:
        raise UserError(f"{file}: {under}{key}: missing; name a file or give the table")
    if not isinstance(value, str):
        return value
    found = _find(value, f"{under}{key}", file, folders)
    return validated(cls, read_toml(found)[1], file=str(found))


def _find(name: str, key: str, file: str, folders: dict[str, Path]) -> Path:
    candidates = [folder / name for folder in (folders.get(key), folders[""]) if folder is not None]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    folder = candidates[-1].parent
    known = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    close = difflib.get_close_matches(Path(name).name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UserError(f"{file}: {key} = '{name}': no such file{hint}")


def _statistics(scenario: Scenario, file: str, folders: dict[str, Path]) -> GradientStatistics | None:
    if not scenario.plan.push.threshold:
        return None
    name = scenario.workload.gradients
    if name is None:
        raise UserError(
            f"{file}: workload.gradients: missing; plan.push.threshold needs the model's gradient statistics "
            "(write them with `gsreal gradients`)"
        )
    statistics = read_gradients(_find(name, "workload.gradients", file, folders))
    _check_statistics(scenario, statistics, file, name)
    return statistics


def _check_statistics(scenario: Scenario, statistics: GradientStatistics, file: str, name: str) -> None:
    workload, run = scenario.workload, scenario.run
    for key, ours, theirs in (
        ("model", workload.model.name, statistics.model),
        ("optimizer", workload.optimizer, statistics.optimizer),
        ("learning_rate", workload.learning_rate, statistics.learning_rate),
        ("global_batch_size", workload.global_batch_size, statistics.global_batch_size),
        ("sequence_length", workload.sequence_length, statistics.sequence_length),
    ):
        if ours != theirs:
            raise UserError(f"{file}: workload.gradients = '{name}': was taken with {key} = {theirs!r}, not {ours!r}")
    if statistics.steps < run.warmup_steps + run.steps:
        raise UserError(
            f"{file}: workload.gradients = '{name}': covers {statistics.steps} steps, "
            f"but the run has {run.warmup_steps + run.steps} (run.warmup_steps + run.steps)"
        )
    names = {name for layer in unrolled(workload.model) for name in layer.parameter_names}
    missing = sorted({name for trace in statistics.traces for name in names - set(trace.tensors)})
    if missing:
        raise UserError(f"{file}: workload.gradients = '{name}': lacks the parameter {missing[0]}")


# Checking ------------------------------------------------------------------------------------------------------------


def check(scenario: Scenario, *, file: str) -> None:
    """Raise UserError where workload, plan and cluster do not go together."""
    policies = scenario.policies
    _check_push(scenario.plan, policies, file)
    refuse_what_cannot_run(scenario.plan, policies, file=file)
    _check_ranks(scenario, policies, file)
    if scenario.workload.precision == "bf16":
        raise UserError(f"{file}: workload.precision = 'bf16': cannot run yet; allowed today: fp32, fp64")
    _check_shares(scenario, policies, file)
    if scenario.network:
        _check_conditions(scenario, file)


def _check_conditions(scenario: Scenario, file: str) -> None:
    try:
        ends_of(applied(scenario.cluster.wiring, scenario.network), scenario.network)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _check_ranks(scenario: Scenario, policies: Policies, file: str) -> None:
    devices = len(scenario.cluster.devices)
    if policies.ranks > devices:
        raise UserError(f"{file}: plan: needs {policies.ranks} ranks, but the cluster has {devices} devices")
    if scenario.plan.method == "single" and policies.ranks != 1:
        raise UserError(f"{file}: plan.method = 'single': takes one rank, but the mesh axes make {policies.ranks}")
    axis = {"all-reduce": "dp_replicate", "reduce-scatter": "dp_shard", "push": "dp_shard"}.get(policies.gradients)
    for name in ("dp_replicate", "dp_shard"):
        if axis and name != axis and getattr(policies, name) > 1:
            raise UserError(
                f"{file}: plan.{name} = {getattr(policies, name)}: method '{scenario.plan.method}' uses {axis}"
            )


def _check_push(plan: Plan, policies: Policies, file: str) -> None:
    if policies.gradients == "push":
        return
    default = Plan(method=plan.method).push
    for key in ("threshold", "kind", "error_feedback", "aggregate", "encoding", "warmup_steps"):
        value = getattr(plan.push, key)
        if value != getattr(default, key):
            raise UserError(
                f"{file}: plan.push.{key} = {value!r}: method '{plan.method}' pushes no gradients; "
                "allowed with gs, gs_z3, gs_hier"
            )
    if plan.publish.threshold is not None:
        raise UserError(f"{file}: plan.publish.threshold: method '{plan.method}' publishes no parameters")


def _check_shares(scenario: Scenario, policies: Policies, file: str) -> None:
    rules, total, ranks = scenario.plan.shares, scenario.workload.global_batch_size, policies.data_ranks
    for name, wanted in (("batch", rules.batch), ("shards", rules.shards)):
        if isinstance(wanted, str):
            continue
        if len(wanted) != ranks:
            raise UserError(f"{file}: plan.shares.{name}: {len(wanted)} shares for {ranks} ranks; give one per rank")
        if abs(sum(wanted) - 1) > 1e-6:
            raise UserError(f"{file}: plan.shares.{name} = {list(wanted)}: sums to {sum(wanted):.6g}, must sum to 1")
    _check_batch(rules.batch, total, ranks, file)
    if rules.shards != "even" and policies.gradients != "push":
        raise UserError(
            f"{file}: plan.shares.shards = {rules.shards!r}: method '{scenario.plan.method}' cannot shard unevenly; "
            "allowed: 'even'"
        )


def _check_batch(wanted: object, total: int, ranks: int, file: str) -> None:
    if wanted == "even" and total % ranks:
        raise UserError(
            f"{file}: workload.global_batch_size = {total}: cannot be divided evenly among {ranks} ranks; "
            "set plan.shares.batch or another size"
        )
    if isinstance(wanted, tuple):
        broken = [share for share in wanted if abs(share * total - round(share * total)) > 1e-6]
        if broken:
            raise UserError(
                f"{file}: plan.shares.batch = {list(wanted)}: {broken[0]} of global_batch_size = {total} "
                "is no whole number of samples"
            )


def value_bytes(workload: Workload) -> int:
    """Return the bytes of one parameter, gradient or activation element."""
    return PRECISION_BYTES[workload.precision]


def single_device(scenario: Scenario) -> Scenario:
    """Return the same training on one device: the reference that every method must equal."""
    return replace(scenario, plan=Plan(method="single"))


def takes_tokens(model: Model) -> bool:
    """Return whether the model reads tokens (else images)."""
    return isinstance(model.input, TokenInput)
