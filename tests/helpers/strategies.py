"""Small clusters, models and scenarios made by hand, and hypothesis strategies over them."""

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
from hypothesis import strategies as st
from tasks import program_with, task_of

from gssim.cluster import Cluster
from gssim.cluster.topology import Wiring
from gssim.collectives import Communication, Stage
from gssim.collectives.algorithms import ALGORITHMS, algorithms_for
from gssim.engine import Machine, Scheduler
from gssim.network import Network, Router
from gssim.program import Program, Task, lower
from gssim.scenario import Loaded, Scenario, check
from gssim.units import validated
from gssim.workload import Model, unrolled
from gssim.workload.gradient_statistics import (
    SKETCH_EDGES,
    BlockTrace,
    ChangeTrace,
    FeedbackDensity,
    GradientStatistics,
    RankTrace,
    RelativeDensity,
    Sketch,
    TensorTrace,
)

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


@cache  # most tests of the simulator ask for it
def tiny_model() -> Model:
    """Return the hand-made model."""
    return validated(Model, tomllib.loads(MODEL_TOML), file="tiny.toml")


def device_type(**changes: Any) -> dict[str, Any]:
    """Return a device type: 1 GFLOP/s, 1 GB/s, 1 GiB, no overheads."""
    return {
        "kind": "cpu",
        "memory_bytes": 2**30,
        "peak_flop_per_s": {"fp32": 1e9, "fp64": 5e8, "bf16": 2e9},
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


def topology(kind: str, *, bandwidth: float = 1e6, latency_s: float = 0.0, **settings: Any) -> dict[str, Any]:
    """Return a topology of `fast` devices as a cluster file states it; `count`: number of these devices."""
    count = settings.pop("count", None)
    if count is not None:
        settings["devices"] = [{"device": "fast", "count": count}]
    return {"kind": kind, "link": link_type(bandwidth, latency_s)} | settings


def link_type(bandwidth: float, latency_s: float = 0.0) -> dict[str, Any]:
    """Return a kind of link."""
    return {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency_s, "source": "assumed"}


def built(topology: dict[str, Any], *, types: dict[str, dict[str, Any]] | None = None, **changes: Any) -> Cluster:
    """Return a cluster of a topology."""
    data = {
        "name": "made",
        "backend": "gloo",
        "device_types": types or {"fast": device_type()},
        "topology": topology,
        "source": "made by hand",
    }
    return validated(Cluster, data | changes, file="cluster")


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


FEEDBACK_GRID = tuple(10 ** (-5 + k / 2) for k in range(7))
MULTIPLES = tuple(2 ** (k / 2) for k in range(-3, 5))


def exponential_tensor(*rms: float) -> TensorTrace:
    """Return a gradient with P(|g| >= t) = exp(-sqrt(2) t / rms), by sampled step.

    Under error feedback an element gathers mean magnitudes until they reach the threshold: 1 / (1 + t / mean) are sent,
    and as many where another threshold was until then; 1 / (1 + a) reach the multiple a of the mean.
    """
    means = [each / math.sqrt(2) for each in rms]
    sketches = tuple(
        Sketch(mean=mean, rms=each, tail_ratios=tuple(math.exp(-edge / mean) if mean else 0.0 for edge in SKETCH_EDGES))
        for each, mean in zip(rms, means, strict=True)
    )
    feedback = tuple(
        FeedbackDensity(
            sent_ratios=tuple(mean / (mean + t) for t in FEEDBACK_GRID),
        )
        for mean in means
    )
    shares = RelativeDensity(
        sent_ratios=tuple(math.exp(-multiple) for multiple in MULTIPLES),
        feedback_ratios=tuple(1 / (1 + multiple) for multiple in MULTIPLES),
    )
    relative = (shares,) * len(rms)
    return TensorTrace(blocks=(BlockTrace(sketches=sketches, feedback=feedback, relative=relative),))


def exponential_statistics(
    *, rms: float = 1e-3, steps: int = 8, samples: tuple[int, ...] = (4,), **changes: Any
) -> GradientStatistics:
    """Return statistics in which every |g| is exponentially distributed; see `exponential_tensor`.

    At a threshold t, the fraction 1 / (1 + t / rms) of published changes is sent.
    """
    tensor = exponential_tensor(rms, rms)
    published = tuple(rms / (rms + t) for t in FEEDBACK_GRID)
    given: dict[str, Any] = {
        "model": "tiny",
        "precision": "fp32",
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "global_batch_size": 8,
        "sequence_length": 4,
        "seed": 0,
        "steps": steps,
        "sampled_steps": (0, 4),
        "feedback_thresholds": FEEDBACK_GRID,
        "multiples": MULTIPLES,
        "publish_thresholds": FEEDBACK_GRID,
        "traces": tuple(RankTrace(samples=n, tensors=dict.fromkeys(PARAMETERS, tensor)) for n in samples),
        "changes": dict.fromkeys(PARAMETERS, ChangeTrace(blocks=((published, published),))),
        "source": "made by hand",
    }
    return GradientStatistics(**(given | changes))


def loaded_of(scenario: Scenario, gradients: GradientStatistics | None = None) -> Loaded:
    """Return the scenario as loading would, with gradient statistics where a threshold needs them."""
    needed = scenario.push.selects
    return Loaded(file="made", scenario=scenario, gradients=gradients or (_usual_statistics() if needed else None))


@cache
def _usual_statistics() -> GradientStatistics:
    return exponential_statistics()


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
    scenario: Scenario, *, steps: int = 1, gradients: GradientStatistics | None = None, unfolded: bool = False
) -> tuple[Machine, Program]:
    """Return the machine after `steps` steps of the scenario, and its program."""
    program = lower(scenario, loaded_of(scenario, gradients).gradients, step=1, unfolded=unfolded)
    machine = Machine(scenario.cluster, program, unfolded=unfolded)
    machine.run(steps)
    return machine, program


def machine_for(
    cluster: Cluster, *tasks: list[Task], communications: dict[str, Communication] | None = None
) -> Machine:
    """Return a machine that is about to run the given tasks, one list for each rank."""
    program = program_with(tasks, communications or {}, ({} for _ in tasks))
    return Machine(cluster, program)


def communicated(cluster: Cluster, *communications: Communication, unfolded: bool = False) -> Machine:
    """Return the machine after the collectives, one after another, on an otherwise idle cluster; equal ranks folded."""
    names = {f"c{i}": each for i, each in enumerate(communications)}
    ranks = range(len(cluster.devices))
    member_of = [tuple(name for name, each in names.items() if rank in each.group) for rank in ranks]
    roles = list(dict.fromkeys(member_of))
    tasks = [[task_of(name, "exposed_communication", communication=name) for name in role] for role in roles]
    numbers = tuple(roles.index(names_of_rank) for names_of_rank in member_of)
    machine = Machine(cluster, program_with(tasks, names, ({} for _ in roles), roles=numbers), unfolded=unfolded)
    machine.run(1)
    return machine


def communication_time_s(cluster: Cluster, *communications: Communication) -> float:
    """Return the simulated time of collectives, one after another, on an otherwise idle cluster."""
    return float(communicated(cluster, *communications).env.now)


def by_rank(machine: Machine, values: Sequence[Any]) -> list[Any]:
    """Return what a machine keeps by class for every rank."""
    found: list[Any] = [None] * len(machine.program.role_of)
    for each in machine.classes:
        for rank in each.members:
            found[rank] = values[each.index]
    return found


def bytes_by_rank(machine: Machine) -> tuple[list[float], list[float]]:
    """Return what every rank has sent, and received."""
    sent, received = machine.carried_by_rank()
    return sent.tolist(), received.tolist()


def by_link(network: Network) -> dict[tuple[str, str], float]:
    """Return what every link carried, by the names of its ends."""
    wiring, classes = network.wiring, network.folded.link_class
    return {
        (wiring.names[wiring.source[link]], wiring.names[wiring.target[link]]): float(network.carried[each])
        if each >= 0
        else 0.0
        for link, each in enumerate(classes.tolist())
    }


def stages_of(machine: Machine) -> list[Stage]:
    """Return the stages of everything that a machine communicates in a step."""
    return [stage for each in machine.schedules.values() for stage in each.stages]


def graph_of(wiring: Wiring) -> "nx.DiGraph[int]":
    """Return the wiring as a graph for networkx."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(wiring.names)))
    columns = zip(wiring.source.tolist(), wiring.target.tolist(), wiring.latency_s.tolist(), strict=True)
    for link, (source, target, latency_s) in enumerate(columns):
        graph.add_edge(source, target, link=link, latency_s=latency_s)
    return graph


def routed(graph: "nx.DiGraph[int]", source: int, target: int) -> tuple[dict[int, float], float]:
    """Return the share of a message that crosses each link, and its latency: what a router should find.

    Messages take the paths of fewest links and, among those, of least latency; all such paths share equally.
    """
    paths = [[graph.edges[edge] for edge in pairwise(path)] for path in nx.all_shortest_paths(graph, source, target)]
    late = [sum(edge["latency_s"] for edge in path) for path in paths]
    best = [path for path, latency_s in zip(paths, late, strict=True) if latency_s <= min(late) * (1 + 1e-9)]
    shares: dict[int, float] = defaultdict(float)
    for path in best:
        for edge in path:
            shares[edge["link"]] += 1 / len(best)
    return dict(shares), min(late)


def expected_by_link(wiring: Wiring, stages: Iterable[Stage]) -> list[float]:
    """Return what every link must carry: each hop's bytes over its own paths, added up one by one."""
    graph = graph_of(wiring)
    found = [0.0] * wiring.links
    paths: dict[tuple[int, int], dict[int, float]] = {}
    for stage in stages:
        hops = stage.hops
        for source, target, weight in zip(
            hops.source.tolist(), hops.target.tolist(), hops.weight.tolist(), strict=True
        ):
            if (source, target) not in paths:
                paths[source, target] = routed(graph, source, target)[0]
            for link, share in paths[source, target].items():
                found[link] += share * weight * stage.size_bytes
    return found


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
            peak_flop_per_s={"fp32": draw(st.sampled_from([2e8, 1e9, 3e9])), "fp64": 1e8, "bf16": 4e8},
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
def scenarios(draw: st.DrawFn, *, methods: tuple[str, ...] = ("single", "ddp", "zero1", "zero2", "gs")) -> Scenario:
    """Draw a scenario that both executors can run: 1 to 4 unequal ranks, uneven shares, any bucket size."""
    method = draw(st.sampled_from(methods))
    devices = draw(st.integers(1, 4))
    ranks = 1 if method == "single" else devices
    batch = draw(compositions(total=8, parts=ranks, least=draw(st.sampled_from([0, 1]))))
    plan: dict[str, Any] = {
        "method": method,
        "overlap": draw(st.booleans()),
        "exchange": draw(st.sampled_from([None, "backend"])),
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


BANDWIDTHS = (1e5, 1e6, 2.5e7)
LATENCIES_S = (0.0, 1e-5, 1e-4)


@st.composite
def unequal_types(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Draw two device types, by the names `one` and `two`; at times they are equal."""
    slowdown = st.sampled_from([1.0, 1.0, 1.25, 2.0])
    return {
        name: device_type(
            kind=draw(st.sampled_from(["cpu", "cuda"])),
            peak_flop_per_s={"fp32": draw(st.sampled_from([2e8, 1e9])), "fp64": 1e8},
            operation_overhead_s=draw(st.sampled_from([0.0, 1e-5])),
            communicating_slowdown_ratio=draw(slowdown),
            neighbour_slowdown_ratio=draw(slowdown),
        )
        for name in ("one", "two")
    }


@st.composite
def _links(draw: st.DrawFn, *, bandwidths: Sequence[float] = BANDWIDTHS) -> dict[str, Any]:
    return link_type(draw(st.sampled_from(bandwidths)), draw(st.sampled_from(LATENCIES_S)))


@st.composite
def _device_groups(draw: st.DrawFn, most: int) -> list[dict[str, Any]]:
    count = draw(st.integers(1, most))
    first = draw(st.integers(1, count))
    groups = [{"device": draw(st.sampled_from(["one", "two"])), "count": first}]
    return groups + ([{"device": "two", "count": count - first}] if count > first else [])


@st.composite
def _servers(draw: st.DrawFn, most: int) -> dict[str, Any]:
    """Draw servers of unequal size, make and number, and the fabric between them."""
    nics = draw(st.sampled_from([1, 2]))
    groups: list[dict[str, Any]] = []
    left = most
    for device in draw(st.sampled_from([["one"], ["one", "two"], ["two", "one", "two"]])):
        devices = draw(st.sampled_from([size for size in (1, 2, 4) if size <= left and size % nics == 0] or [0]))
        if not devices:
            break
        count = draw(st.integers(1, min(3, left // devices)))
        left -= devices * count
        inside = draw(st.sampled_from(["nvswitch", "pcie", "none"]))
        group = {"count": count, "device": device, "devices": devices, "inside": inside, "nics": nics}
        group |= {"nic_link": draw(_links()), "pcie_link": draw(_links())}
        groups.append(group | ({"inside_link": draw(_links())} if inside != "none" else {}))
    fabric: dict[str, Any] = {"kind": "switch"}
    if draw(st.booleans()):
        fabric = {
            "kind": "leaf-spine",
            "servers_per_leaf": draw(st.integers(1, 3)),
            "spines": draw(st.integers(1, 3)),
            "rails": draw(st.booleans()),
            "oversubscription": draw(st.sampled_from([1.0, 2.0])),
            "hop_latency_s": draw(st.sampled_from(LATENCIES_S)),
        }
    return {"kind": "servers", "servers": groups, "fabric": fabric}


@st.composite
def _topologies(draw: st.DrawFn, most: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(["ring", "fully-connected", "switch", "torus", "servers", "servers"]))
    if kind == "servers":
        return draw(_servers(most))
    if kind == "torus":
        shapes = [((4,), None), ((2, 2), (1, 2)), ((3, 3), None), ((2, 2, 2), (2, 2, 1)), ((4, 2), (2, 2))]
        shape, hosts = draw(st.sampled_from([each for each in shapes if math.prod(each[0]) <= most]))
        found = {"kind": kind, "device": "one", "shape": shape, "link": draw(_links())}
        return found | ({"host_shape": hosts} if hosts else {})
    return {
        "kind": kind,
        "devices": draw(_device_groups(most)),
        "devices_per_host": draw(st.integers(1, 3)),
        "link": draw(_links()),
    }


@st.composite
def _graphs(draw: st.DrawFn, most: int) -> dict[str, Any]:
    """Draw devices and switches, a tree of links that joins them, and more links at random; hosts of any size."""
    devices = draw(st.integers(1, most))
    names = [f"d{i}" for i in range(devices)] + [f"s{i}" for i in range(draw(st.integers(0, 2)))]
    places = range(len(names))
    pairs = [(draw(st.integers(0, place - 1)), place) for place in places[1:]]
    if len(names) > 2:
        pairs += draw(st.lists(st.tuples(st.sampled_from(places), st.sampled_from(places)), max_size=6))
    types = draw(st.lists(st.sampled_from(["one", "two"]), min_size=devices, max_size=devices))
    hosts = draw(st.lists(st.integers(0, 2), min_size=devices, max_size=devices))
    rates = draw(st.sampled_from([BANDWIDTHS, BANDWIDTHS[1:2]]))
    return {
        "devices": [{"name": names[i], "type": types[i], "host": f"host{hosts[i]}"} for i in range(devices)],
        "switches": names[devices:],
        "links": [{"between": (names[a], names[b])} | draw(_links(bandwidths=rates)) for a, b in pairs if a != b],
    }


@st.composite
def fabrics(draw: st.DrawFn, *, most: int = 9) -> Cluster:
    """Draw a cluster of up to `most` devices wired in any way: a topology, or explicit links; hosts of several."""
    wired = draw(_graphs(most)) if draw(st.integers(0, 2)) == 0 else {"topology": draw(_topologies(most))}
    data = {
        "name": "made",
        "backend": draw(st.sampled_from(["gloo", "nccl"])),
        "device_types": draw(unequal_types()),
        "source": "made by hand",
    }
    return validated(Cluster, data | wired, file="cluster")


def fitting_algorithms(cluster: Cluster, communication: Communication) -> list[str]:
    """Return the algorithms that can carry out a collective."""
    scheduler = Scheduler(cluster, Router(cluster.wiring), len(cluster.devices))
    members = scheduler.members(communication.group)
    found = []
    for name in algorithms_for(communication.kind):
        try:
            ALGORITHMS[name, communication.kind](members, communication)
        except ValueError:
            continue  # this group has not the shape that the algorithm needs
        found.append(name)
    return found


def communication_of(
    kind: str, group: Sequence[int], size: int, *, parts: Sequence[int] = (), pairs: Sequence[Sequence[int]] = ()
) -> Communication:
    """Return a collective; without `parts` or `pairs`, its uneven forms are even."""
    n = len(group)
    if kind.endswith(("gather-v", "scatter-v")):
        part_bytes = tuple(parts or (size // n,) * n)
        return Communication(kind, tuple(group), sum(part_bytes), part_bytes=part_bytes)
    if kind == "all-to-all-v":
        pair_bytes = tuple(map(tuple, pairs)) or ((size // n,) * n,) * n
        return Communication(kind, tuple(group), size, pair_bytes=pair_bytes)
    return Communication(kind, tuple(group), size)


KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "broadcast",
    "reduce",
    "all-to-all",
    "send",
    "all-gather-v",
    "reduce-scatter-v",
    "all-to-all-v",
)
"""Kinds of collectives that have algorithms."""


@st.composite
def collectives_on(draw: st.DrawFn, cluster: Cluster) -> tuple[Cluster, Communication]:
    """Draw a collective of any kind over some ranks, and the cluster with any algorithm that fits, or none named."""
    ranks = len(cluster.devices)
    kind = draw(st.sampled_from([kind for kind in KINDS if kind != "send" or ranks > 1]))
    n = 2 if kind == "send" else draw(st.sampled_from([ranks, draw(st.integers(1, ranks))]))
    group = tuple(sorted(draw(st.permutations(range(ranks)))[:n]))
    size = st.sampled_from([0, 1, 1000, 2**20])
    parts = draw(st.lists(size, min_size=n, max_size=n))
    pairs = draw(st.lists(st.lists(size, min_size=n, max_size=n), min_size=n, max_size=n))
    communication = communication_of(kind, group, draw(size), parts=parts, pairs=pairs)
    if kind in ("broadcast", "reduce"):
        communication = replace(communication, root=draw(st.integers(0, n - 1)))
    names = fitting_algorithms(cluster, communication)
    named = draw(st.sampled_from([None, "best", *names]))
    return (replace(cluster, algorithms={kind: named}) if named else cluster), communication


@st.composite
def wired_scenarios(draw: st.DrawFn, *, methods: tuple[str, ...], most: int = 9) -> Scenario:
    """Draw a plan on a cluster wired in any way, every rank taking part; shares even, or uneven in steps."""
    cluster = draw(fabrics(most=most))
    ranks = len(cluster.devices)
    method = draw(st.sampled_from(methods))
    plan: dict[str, Any] = {
        "method": method,
        "overlap": draw(st.booleans()),
        "exchange": draw(st.sampled_from([None, "backend"])),
        "bucket_bytes": draw(st.sampled_from([64, 100, 300, 25 * 2**20])),
    }
    batch = 2 * ranks
    if draw(st.booleans()):
        samples = draw(compositions(total=batch, parts=ranks, least=draw(st.sampled_from([0, 1]))))
        plan["shares"] = {"batch": tuple(each / batch for each in samples)}
    if method == "gs":
        plan["first_bucket_bytes"] = draw(st.sampled_from([1, 100, 2**20]))
        if draw(st.booleans()):
            shards = draw(st.lists(st.sampled_from([0, 1, 1, 2]), min_size=ranks, max_size=ranks).filter(any))
            plan.setdefault("shares", {})["shards"] = tuple(each / sum(shards) for each in shards)
        threshold = draw(st.sampled_from([None, None, 0.0, 1e-3]))
        plan["push"] = {"threshold": threshold, "encoding": draw(st.sampled_from(["auto", "coo"]))}
    if draw(st.booleans()) and method == "ddp":
        names = [*fitting_algorithms(cluster, Communication("all-reduce", range(ranks), 1000)), "best"]
        cluster = replace(cluster, algorithms={"all-reduce": draw(st.sampled_from(names))})
    optimizer = draw(st.sampled_from(["sgd", "adamw"]))
    run = {"steps": 2, "warmup_steps": 1}
    return scenario_of(cluster, plan, run=run, optimizer=optimizer, global_batch_size=batch)
