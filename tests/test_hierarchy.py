"""Two levels of data parallelism (hsdp, gs_hier), and Gradient Sharding with parameters sharded at rest (gs_z3)."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    PARAMETER_BYTES,
    built,
    cluster_of,
    compositions,
    fabrics,
    link_type,
    loaded_of,
    scenario_of,
    star,
)
from test_folding import assert_folding_changes_nothing

from gsreal.refusals import check_plan
from gssim.cluster import Cluster
from gssim.plan import Plan, resolve
from gssim.result import Result
from gssim.scenario import Scenario
from gssim.simulate import simulate
from gssim.units import UserError

ELEMENTS = PARAMETER_BYTES // 4
ROOT, BLOCK = 128, 20
"""Elements of the tiny model's root and of each of its two blocks."""


def grid(method: str, nodes: int, devices: int, *, cluster: Cluster | None = None, **plan: Any) -> Scenario:
    """Return a scenario on nodes of so many devices each."""
    sizes = {"dp_replicate": nodes, "dp_shard": devices}
    return scenario_of(cluster or servers(nodes, devices), {"method": method} | sizes | plan, optimizer="sgd")


def servers(count: int, devices: int, **changes: Any) -> Cluster:
    """Return servers whose devices have a card each, all behind one switch."""
    kind = {"count": count, "device": "fast", "devices": devices, "nics": devices, "nic_link": link_type(1e6)}
    inside = {"inside": "nvswitch", "inside_link": link_type(1e7), "pcie_link": link_type(1e7)}
    return built({"kind": "servers", "servers": [kind | inside], "fabric": {"kind": "switch"}}, **changes)


def result_of(scenario: Scenario) -> Result:
    return simulate(loaded_of(scenario)).result


def entries(result: Result) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [(each.kind, each.group, each.bytes, each.count) for each in result.collectives]


# The plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hsdp", "gs_hier"])
def test_axes_that_nobody_sizes_are_the_devices_of_a_host_and_the_hosts(method):
    policies = resolve(Plan(method=method), devices=6, hosts=["a", "a", "b", "b", "c", "c"])
    assert (policies.dp_replicate, policies.dp_shard) == (3, 2)
    found = scenario_of(servers(2, 4), {"method": method}).policies
    assert (found.dp_replicate, found.dp_shard) == (2, 4)


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "a", "b"]])
def test_hosts_that_are_not_alike_need_sizes(hosts):
    with pytest.raises(UserError, match=r"hosts have .* set plan\.dp_replicate and plan\.dp_shard"):
        resolve(Plan(method="hsdp"), devices=len(hosts), hosts=hosts)


def test_one_size_alone_is_not_enough():
    with pytest.raises(UserError, match=r"plan\.dp_replicate: missing; beside plan\.dp_shard = 2"):
        resolve(Plan(method="gs_hier", dp_shard=2), devices=4, hosts=["a", "a", "b", "b"])


@pytest.mark.parametrize(("method", "key"), [("gs_hier", "plan.method"), ("gs_z3", "plan.parameters")])
def test_what_can_only_be_simulated_is_refused_before_ranks_start(method, key):
    with pytest.raises(UserError, match=rf"^f: {key} = .*can only be simulated yet; gsreal pushes"):
        check_plan(scenario_of(star(4), {"method": method, "dp_replicate": 1, "dp_shard": 4}), where="f")
    for executed in ("gs", "zero3"):
        check_plan(scenario_of(star(4), {"method": executed}), where="f")


# Groups that are alike -----------------------------------------------------------------------------------------------


@st.composite
def equals(draw: st.DrawFn) -> Cluster:
    """Draw equal devices behind one switch or two, some of whose links are slower or longer than the others."""
    devices = draw(st.sampled_from([4, 6, 8]))
    pairs = [(f"d{i}", "sw" if i % 2 else draw(st.sampled_from(["sw", "other"]))) for i in range(devices)]
    cluster = cluster_of([*pairs, ("sw", "other")], devices=devices, switches=["sw", "other"], bandwidth=1e6)
    changes = st.sampled_from([{"bandwidth_bytes_per_s": 2.5e5}, {"latency_s": 5e-4}])
    odd = draw(st.dictionaries(st.integers(0, devices - 1), changes, max_size=3))
    links = tuple(replace(link, **odd.get(i, {})) for i, link in enumerate(cluster.links))
    return replace(cluster, links=links, backend=draw(st.sampled_from(["gloo", "nccl"])))


@st.composite
def grids(draw: st.DrawFn, *, methods: tuple[str, ...]) -> Scenario:
    """Draw a plan on two axes, on a cluster wired in any way; shares even, or uneven in steps."""
    cluster = draw(st.one_of(equals(), equals(), fabrics(most=8)))
    nodes = draw(st.integers(1, len(cluster.devices) // 2 or 1))
    devices = len(cluster.devices) // nodes
    ranks, method = nodes * devices, draw(st.sampled_from(methods))
    plan: dict[str, Any] = {
        "method": method,
        "overlap": draw(st.booleans()),
        "bucket_bytes": draw(st.sampled_from([64, 100, 300, 25 * 2**20])),
        "recompute": draw(st.sampled_from(["none", "full"])),
        "micro_batches": draw(st.sampled_from([1, 1, 2])),
        "gradient_sync": draw(st.sampled_from(["step", "micro-batch"])),
        "parameters": draw(st.sampled_from(["gathered", "sharded"])) if method in ("hsdp", "gs_z3") else None,
    }
    plan |= {"dp_shard": ranks} if method == "gs_z3" else {"dp_replicate": nodes, "dp_shard": devices}
    samples = draw(compositions(total=3 * ranks, parts=ranks, least=2)) if draw(st.booleans()) else (3,) * ranks
    plan["shares"] = {"batch": tuple(each / (3 * ranks) for each in samples)}
    if method != "hsdp":
        shards = draw(st.lists(st.sampled_from([0, 1, 1, 2]), min_size=ranks, max_size=ranks).filter(any))
        if draw(st.booleans()):
            plan["shares"]["shards"] = tuple(each / sum(shards) for each in shards)
        plan["push"] = {"threshold": draw(st.sampled_from([None, None, 0.0, 1e-3]))}
    run = {"steps": 2, "warmup_steps": 1}
    optimizer = draw(st.sampled_from(["sgd", "adamw"]))
    return scenario_of(cluster, plan, run=run, optimizer=optimizer, global_batch_size=3 * ranks)


@pytest.mark.parametrize("method", ["hsdp", "gs_hier", "gs_z3"])
@settings(max_examples=int(__import__("os").environ.get("EX", "60")))
@given(st.data())
def test_folding_changes_nothing_whatever_the_cluster_and_plan(method, data):
    assert_folding_changes_nothing(data.draw(grids(methods=(method,))))
