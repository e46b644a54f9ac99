"""Small clusters, models and scenarios made by hand, and hypothesis strategies over them."""

import json
import math
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from gssim.cluster import Cluster
from gssim.collectives import Communication
from gssim.gradients import SKETCH_EDGES, GradientStatistics, RankTrace, TensorTrace
from gssim.machine import Machine
from gssim.program import Program, Task, lower
from gssim.scenario import Loaded, Scenario, check
from gssim.units import validated
from gssim.workload import Model, unrolled

# Embedding, a block that is repeated, a head, and the loss, which is outside any module. Width 4, vocabulary 16, fp32.
MODEL_TOML = """
name = "tiny"
source = "made by hand for the tests"
traced_batch_sizes = [1, 2]
module = { factory = "nowhere.tiny" }
input = { kind = "tokens", vocabulary = 16, maximum_sequence_length = 64 }

[[layers]]
name = "embedding"
modules = ["embedding"]
parameters = ["{}.weight 16x4 b0 b3"]
forward_flop = 0
backward_flop = 0
forward_bytes = "32000*b*s"
backward_bytes = "64000*b*s"
saved_bytes = 0
output_bytes = "16*b*s"
forward_operations = 1
backward_operations = 2
buffers = ["f0 b2@+1 activations 16*b*s"]

[[layers]]
name = "h"
modules = ["h.0", "h.1"]
block = true
parameters = ["{}.weight 4x4 b0 b1", "{}.bias 4 b0 b1"]
forward_flop = "1000000*b*s"
backward_flop = "2000000*b*s"
forward_bytes = "1000*b*s"
backward_bytes = "2000*b*s"
saved_bytes = "16*b*s"
output_bytes = "16*b*s"
forward_operations = 3
backward_operations = 6
buffers = ["f0 f1 temporaries 8*b*s", "f0 b2@+1 activations 16*b*s", "b0 b3@-1 temporaries 16*b*s"]

[[layers]]
name = "head"
modules = ["head"]
parameters = ["{}.weight 16x4 b0 b1"]
forward_flop = "500000*b*s"
backward_flop = "1000000*b*s"
forward_bytes = "1000*b*s"
backward_bytes = "2000*b*s"
saved_bytes = "16*b*s"
output_bytes = "64*b*s"
forward_operations = 1
backward_operations = 2
buffers = ["f0 b2@+1 activations 64*b*s", "b0 b3@-1 temporaries 16*b*s"]

[[layers]]
name = "loss"
modules = []
forward_flop = 0
backward_flop = 0
forward_bytes = "1000*b*s"
backward_bytes = "1000*b*s"
saved_bytes = "64*b*s"
output_bytes = 4
forward_operations = 2
backward_operations = 2
buffers = ["f0 end activations 4", "f0 b1 activations 64*b*s", "b0 b3@-1 temporaries 64*b*s"]
"""

PAIR_TOML = """
name = "pair"
backend = "gloo"
source = "made by hand for the tests"

[device_types.fast]
kind = "cpu"
memory_bytes = "1 GiB"
peak_flop_per_s = { fp32 = "1 GFLOP/s" }
memory_bandwidth_bytes_per_s = "1 GB/s"
source = "assumed"

[[devices]]
name = "a"
type = "fast"
host = "a"

[[devices]]
name = "b"
type = "fast"
host = "b"

[[links]]
between = ["a", "b"]
bandwidth_bytes_per_s = "1 MB/s"
latency_s = "10 us"
source = "assumed"
"""

SCENARIO_TOML = """# On two equal hosts, does anything beat all-reduce?
cluster = "pair.toml"

[workload]
model = "tiny.toml"
gradients = "tiny.json"
global_batch_size = 8
sequence_length = 4

[plan]
method = "ddp"

[run]
steps = 4
warmup_steps = 1
"""

PARAMETERS = ("embedding.weight", "h.0.weight", "h.0.bias", "h.1.weight", "h.1.bias", "head.weight")
PARAMETER_BYTES = 4 * (64 + 2 * (16 + 4) + 64)


def tiny_model() -> Model:
    """Return the hand-made model."""
    return validated(Model, tomllib.loads(MODEL_TOML), file="tiny.toml")


def device_type(**changes: Any) -> dict[str, Any]:
    """Return a device type: 1 GFLOP/s, 1 GB/s, 1 GiB, no overheads."""
    return {
        "kind": "cpu",
        "memory_bytes": 2**30,
        "peak_flop_per_s": {"fp32": 1e9, "fp64": 5e8},
        "memory_bandwidth_bytes_per_s": 1e9,
        "source": "assumed",
    } | changes


def cluster_of(
    links: list[tuple[str, str]],
    *,
    devices: int,
    types: dict[str, dict[str, Any]] | None = None,
    type_names: list[str] | None = None,
    bandwidth: float = 1e6,
    latency_s: float = 0.0,
    directed: bool = False,
    **changes: Any,
) -> Cluster:
    """Return a cluster of devices d0, d1, ... on hosts of their own, and switch `sw` where a link names it."""
    kinds = types or {"fast": device_type()}
    names = type_names or [next(iter(kinds))] * devices
    data = {
        "name": "made",
        "backend": "gloo",
        "device_types": kinds,
        "devices": [{"name": f"d{i}", "type": names[i], "host": f"host{i}"} for i in range(devices)],
        "switches": ["sw"] if any("sw" in link for link in links) else [],
        "links": [
            {
                "between": link,
                "bandwidth_bytes_per_s": bandwidth,
                "latency_s": latency_s,
                "directed": directed,
                "source": "assumed",
            }
            for link in links
        ],
        "source": "made by hand",
    }
    return validated(Cluster, data | changes, file="cluster")


def star(devices: int, **settings: Any) -> Cluster:
    """Return devices around one switch."""
    return cluster_of([(f"d{i}", "sw") for i in range(devices)], devices=devices, **settings)


def ring(devices: int, **settings: Any) -> Cluster:
    """Return devices in a ring, each linked to the next, without a switch."""
    pairs = [(f"d{i}", f"d{(i + 1) % devices}") for i in range(devices)]
    if devices == 2 and not settings.get("directed"):
        pairs = pairs[:1]
    return cluster_of(pairs, devices=devices, **settings)


def scenario_of(
    cluster: Cluster, plan: dict[str, Any], *, run: dict[str, Any] | None = None, **workload: Any
) -> Scenario:
    """Return a checked scenario that trains the tiny model."""
    data = {
        "name": "made",
        "cluster": cluster,
        "workload": {"model": tiny_model(), "global_batch_size": 8, "sequence_length": 4} | workload,
        "plan": plan,
        "run": {"steps": 4, "warmup_steps": 1} | (run or {}),
    }
    scenario = validated(Scenario, data, file="made")
    check(scenario, file="made")
    return scenario


def exponential_statistics(
    *, rms: float = 1e-3, steps: int = 8, samples: tuple[int, ...] = (4,), **changes: Any
) -> GradientStatistics:
    """Return statistics in which every |g| is exponentially distributed: P(|g| >= t) = exp(-sqrt(2) t / rms)."""
    tail = tuple(math.exp(-math.sqrt(2) * edge) for edge in SKETCH_EDGES)
    tensor = TensorTrace(rms=(rms,) * steps, tail_ratios=(tail, tail))
    given: dict[str, Any] = {
        "model": "tiny",
        "precision": "fp32",
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "global_batch_size": 8,
        "sequence_length": 4,
        "seed": 0,
        "sampled_steps": (0, 4),
        "traces": tuple(RankTrace(samples=n, tensors=dict.fromkeys(PARAMETERS, tensor)) for n in samples),
        "source": "made by hand",
    }
    return GradientStatistics(**(given | changes))


def loaded_of(scenario: Scenario, gradients: GradientStatistics | None = None) -> Loaded:
    """Return the scenario as loading would, with gradient statistics where a threshold needs them."""
    needed = bool(scenario.plan.push.threshold)
    return Loaded(file="made", scenario=scenario, gradients=gradients or (exponential_statistics() if needed else None))


def write_files(
    folder: Path, *, scenario: str = SCENARIO_TOML, cluster: str = PAIR_TOML, model: str = MODEL_TOML
) -> Path:
    """Write scenario, cluster, model and statistics into `folder`; return the scenario's path."""
    folder.mkdir(exist_ok=True)
    (folder / "scenario.toml").write_text(scenario)
    (folder / "pair.toml").write_text(cluster)
    (folder / "tiny.toml").write_text(model)
    (folder / "tiny.json").write_text(json.dumps(asdict(exponential_statistics())))
    return folder / "scenario.toml"


def machine_of(
    scenario: Scenario, *, steps: int = 1, gradients: GradientStatistics | None = None
) -> tuple[Machine, Program]:
    """Return the machine after `steps` steps of the scenario, and its program."""
    program = lower(scenario, loaded_of(scenario, gradients).gradients, step=1)
    machine = Machine(scenario.cluster, program)
    machine.run(steps)
    return machine, program


def machine_for(
    cluster: Cluster, *tasks: list[Task], communications: dict[str, Communication] | None = None
) -> Machine:
    """Return a machine that is about to run the given tasks, one list for each rank."""
    program = Program(tuple(map(tuple, tasks)), communications or {}, tuple({} for _ in tasks))
    return Machine(cluster, program)


def communication_time_s(cluster: Cluster, communication: Communication) -> float:
    """Return the simulated time of one collective on an otherwise idle cluster."""
    tasks = [
        [Task("it", "exposed_communication", communication="it")] if rank in communication.group else []
        for rank in range(len(cluster.devices))
    ]
    machine = machine_for(cluster, *tasks, communications={"it": communication})
    machine.run(1)
    return float(machine.env.now)


def layer_labels(model: Model) -> list[str]:
    """Return the names of the unrolled layers."""
    return [layer.module for layer in unrolled(model)]


def with_plan(scenario: Scenario, **changes: Any) -> Scenario:
    """Return the scenario with some of the plan's settings changed."""
    return replace(scenario, plan=replace(scenario.plan, **changes))


# Strategies ----------------------------------------------------------------------------------------------------------


@st.composite
def compositions(draw: st.DrawFn, *, total: int, parts: int, least: int = 0) -> tuple[int, ...]:
    """Draw whole numbers, each at least `least`, that sum to `total`."""
    free = total - parts * least
    cuts = sorted(draw(st.lists(st.integers(0, free), min_size=parts - 1, max_size=parts - 1)))
    return tuple(b - a + least for a, b in zip([0, *cuts], [*cuts, free], strict=True))


@st.composite
def clusters(draw: st.DrawFn, *, devices: int) -> Cluster:
    """Draw a star or ring of unequal devices."""
    slowdown = st.sampled_from([1.0, 1.25, 2.0])
    types = {
        name: device_type(
            kind=draw(st.sampled_from(["cpu", "cuda"])),
            peak_flop_per_s={"fp32": draw(st.sampled_from([2e8, 1e9, 3e9])), "fp64": 1e8},
            operation_overhead_s=draw(st.sampled_from([0.0, 1e-5])),
            communicating_slowdown_ratio=draw(slowdown),
            neighbour_slowdown_ratio=draw(slowdown),
            gradient_hook_s=draw(st.sampled_from([0.0, 1e-5])),
        )
        for name in ("one", "two")
    }
    return draw(st.sampled_from([star, ring] if devices > 1 else [star]))(
        devices,
        types=types,
        type_names=draw(st.lists(st.sampled_from(["one", "two"]), min_size=devices, max_size=devices)),
        bandwidth=draw(st.sampled_from([1e5, 1e6, 2.5e7])),
        latency_s=draw(st.sampled_from([0.0, 1e-4])),
        backend=draw(st.sampled_from(["gloo", "nccl"])),
    )


@st.composite
def scenarios(draw: st.DrawFn, *, methods: tuple[str, ...] = ("single", "ddp", "zero2", "gs")) -> Scenario:
    """Draw a scenario that both executors can run: 1 to 4 unequal ranks, uneven shares, any bucket size."""
    method = draw(st.sampled_from(methods))
    devices = draw(st.integers(1, 4))
    ranks = 1 if method == "single" else devices
    batch = draw(compositions(total=8, parts=ranks, least=draw(st.sampled_from([0, 1]))))
    plan: dict[str, Any] = {
        "method": method,
        "overlap": draw(st.booleans()),
        "bucket_bytes": draw(st.sampled_from([1, 64, 100, 300, 25 * 2**20])),
        "shares": {"batch": tuple(samples / 8 for samples in batch)},
    }
    if method == "gs":
        shards = draw(compositions(total=16, parts=ranks))
        plan["shares"]["shards"] = tuple(part / 16 for part in shards)
        plan["first_bucket_bytes"] = draw(st.sampled_from([1, 100, 2**20]))
        plan["push"] = {
            "threshold": draw(st.sampled_from([None, 0.0, 1e-4, 1e-3, 1.0])),
            "encoding": draw(st.sampled_from(["auto", "coo", "dense"])),
        }
    workload = {"optimizer": draw(st.sampled_from(["sgd", "sgd-momentum", "adamw"])), "precision": "fp32"}
    return scenario_of(draw(clusters(devices=devices)), plan, **workload)
