"""Topologies: how many links of which bandwidth, what is refused; every shipped cluster file holds together."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from strategies import cluster_of, device_type, scenario_of

from gssim.cluster import Cluster
from gssim.cluster.topology import Torus, build, structure_of, wiring_of_links
from gssim.cluster.topology.kinds import Topology
from gssim.errors import UserError
from gssim.scenario import load_cluster
from gssim.units import validated

CLUSTERS = Path(__file__).parent.parent.parent / "scenarios" / "clusters"
LINK = {"bandwidth_bytes_per_s": 12.0, "latency_s": 2.0, "source": "example"}
SERVER = {
    "count": 1,
    "device": "fast",
    "devices": 8,
    "inside": "nvswitch",
    "inside_link": LINK | {"bandwidth_bytes_per_s": 100.0},
    "nics": 8,
    "nic_link": LINK,
    "pcie_link": LINK | {"bandwidth_bytes_per_s": 20.0},
}
LEAF_SPINE = {"kind": "leaf-spine", "servers_per_leaf": 2, "spines": 2}


def cluster_with(topology, **changes) -> Cluster:
    data = {
        "name": "built",
        "backend": "nccl",
        "device_types": {"fast": device_type(), "slow": device_type(kind="cuda")},
        "topology": topology,
        "source": "made by hand for the tests",
    }
    return validated(Cluster, data | changes, file="c.toml")


def simple(kind, count, **changes):
    return {"kind": kind, "devices": [{"device": "fast", "count": count}], "link": LINK} | changes


def servers(*groups, **fabric):
    return {"kind": "servers", "servers": [SERVER | group for group in groups], **fabric}


def torus(*shape, **changes):
    return {"kind": "torus", "device": "fast", "shape": shape, "link": LINK} | changes


def graph_of(cluster):
    wiring = cluster.wiring
    graph = nx.DiGraph()
    graph.add_nodes_from(wiring.names)
    for a, b, bandwidth, latency_s in zip(
        wiring.source, wiring.target, wiring.bandwidth_bytes_per_s, wiring.latency_s, strict=True
    ):
        assert not graph.has_edge(wiring.names[a], wiring.names[b])
        graph.add_edge(wiring.names[a], wiring.names[b], bandwidth=float(bandwidth), latency_s=float(latency_s))
    return graph


def out_degrees(cluster):
    return Counter(dict(graph_of(cluster).out_degree()).values())


# Laws of every wiring ------------------------------------------------------------------------------------------------

ALL = {
    "ring": simple("ring", 5),
    "fully-connected": simple("fully-connected", 5),
    "switch": simple("switch", 5),
    "torus": torus(3, 4),
    "nvswitch": servers({"host_memory": True}),
    "memory links": servers({"host_memory": True, "devices_per_memory_link": 2}),
    "pcie": servers({"inside": "pcie", "nics": 2, "host_memory": True}),
    "cube-mesh": servers({"inside": "cube-mesh", "nics": 4}),
    "leaf-spine": servers({"count": 5}, {"count": 2, "nics": 4, "inside": "pcie"}, fabric=LEAF_SPINE),
    "rails": servers({"count": 5}, fabric=LEAF_SPINE | {"rails": True}),
    "sites": {
        "kind": "sites",
        "link": LINK | {"latency_s": 1000.0},
        "sites": [
            {"name": "a", "topology": servers({"count": 3}, fabric=LEAF_SPINE)},
            {"name": "b", "topology": simple("switch", 3)},
            {"name": "c", "topology": simple("switch", 2)},
        ],
    },
}


@pytest.mark.parametrize("topology", ALL.values(), ids=ALL)
def test_every_link_has_its_way_back_and_every_device_reaches_every_other(topology):
    cluster = cluster_with(topology)
    graph = graph_of(cluster)
    assert all(graph.edges[a, b] == graph.edges[b, a] for a, b in graph.edges)
    assert nx.is_strongly_connected(graph)
    assert all(rates["bandwidth"] > 0 for _, _, rates in graph.edges(data=True))
    assert cluster.wiring.names == (*(device.name for device in cluster.devices), *cluster.switches)
    assert len(set(cluster.wiring.names)) == cluster.wiring.nodes
    assert cluster.wiring.links == graph.number_of_edges()


@pytest.mark.parametrize("topology", ALL.values(), ids=ALL)
def test_a_cluster_written_down_and_read_again_is_the_same_and_names_no_devices(topology):
    cluster = cluster_with(topology)
    data = TypeAdapter(Cluster).dump_python(cluster, mode="json")
    assert not data.keys() & {"devices", "switches", "links"}
    again = validated(Cluster, json.loads(json.dumps(data)), file="again")
    assert again == cluster
    assert again.wiring is cluster.wiring
    assert replace(cluster, name="other").devices == cluster.devices


def test_the_arrays_of_a_wiring_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        cluster_with(simple("ring", 3)).wiring.bandwidth_bytes_per_s[0] = 1.0


# Simple kinds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "links"), [(1, 0), (2, 2), (3, 6), (8, 16)])
def test_a_ring_links_each_device_to_two_others(count, links):
    cluster = cluster_with(simple("ring", count))
    assert cluster.wiring.links == links
    assert set(out_degrees(cluster)) == {min(2, count - 1)}


@given(st.integers(1, 12))
def test_a_complete_graph_links_each_device_to_all_others(count):
    assert out_degrees(cluster_with(simple("fully-connected", count))) == {count - 1: count}


def test_half_of_the_latency_is_on_either_side_of_a_switch():
    graph = graph_of(cluster_with(simple("switch", 4)))
    assert nx.shortest_path_length(graph, "device0", "device3", weight="latency_s") == LINK["latency_s"]
    assert graph.degree("switch") == 8


def test_groups_follow_each_other_in_rank_order_and_share_hosts():
    groups = [{"device": "fast", "count": 3}, {"device": "slow", "count": 1}]
    cluster = cluster_with(simple("switch", 1, devices=groups, devices_per_host=2))
    assert [(d.type, d.host) for d in cluster.devices] == [
        ("fast", "host0"),
        ("fast", "host0"),
        ("fast", "host1"),
        ("slow", "host1"),
    ]
    assert cluster.type_of(3).kind == "cuda"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_a_torus_has_two_neighbours_along_each_dimension_but_one_along_a_dimension_of_two(shape):
    degree = sum(min(2, n - 1) for n in shape)
    assert out_degrees(cluster_with(torus(*shape))) == {degree: int(np.prod(shape))}


def test_a_torus_closes_on_itself():
    graph = graph_of(cluster_with(torus(4, 3)))
    assert graph.has_edge("chip0.1", "chip3.1")
    assert graph.has_edge("chip2.2", "chip2.0")
    assert not graph.has_edge("chip0.0", "chip2.0")
    # twice the links across the middle of the longer dimension: those between the halves, and those around
    assert sum(a.startswith(("chip0", "chip1")) and b.startswith(("chip2", "chip3")) for a, b in graph.edges) == 6


def test_hosts_of_a_torus_are_blocks():
    cluster = cluster_with(torus(4, 4, host_shape=[2, 2]))
    hosts = {device.name: device.host for device in cluster.devices}
    assert hosts["chip0.0"] == hosts["chip1.1"] != hosts["chip1.2"]
    assert set(Counter(hosts.values()).values()) == {4}


# Servers -------------------------------------------------------------------------------------------------------------


def test_an_nvswitch_server_joins_its_gpus_by_the_switch_and_each_to_its_own_card():
    graph = graph_of(cluster_with(servers({})))
    assert nx.shortest_path(graph, "server0/gpu1", "server0/gpu6", weight="latency_s")[1] == "server0/nvswitch"
    assert graph.edges["server0/gpu1", "server0/nvswitch"] == {"bandwidth": 100.0, "latency_s": 1.0}
    assert graph.edges["server0/gpu1", "server0/nic1"] == {"bandwidth": 20.0, "latency_s": 1.0}
    assert graph.number_of_edges() == 2 * 16


def test_fewer_cards_are_shared_evenly_by_neighbours():
    graph = graph_of(cluster_with(servers({"nics": 2})))
    users = [sorted(graph.predecessors(f"server0/nic{k}")) for k in (0, 1)]
    assert users == [[f"server0/gpu{i}" for i in range(4)], [f"server0/gpu{i}" for i in range(4, 8)]]


def test_a_pcie_server_reaches_its_cards_and_its_memory_through_pcie():
    graph = graph_of(cluster_with(servers({"inside": "pcie", "nics": 1, "host_memory": True})))
    assert set(graph.successors("server0/pcie")) == {
        *(f"server0/gpu{i}" for i in range(8)),
        "server0/nic0",
        "server0/memory",
    }


def test_each_gpu_of_a_dgx_1v_has_six_nvlinks_and_the_mesh_is_that_of_its_white_paper():
    bare = {"nics": 0, "nic_link": None, "pcie_link": None}
    graph = graph_of(cluster_with(servers({"inside": "cube-mesh", "inside_link": LINK} | bare)))
    links = {(int(a[-1]), int(b[-1])): rates["bandwidth"] / (12.0 / 6) for a, b, rates in graph.edges(data=True)}
    assert all(sum(n for (a, _), n in links.items() if a == gpu) == 6 for gpu in range(8))
    assert Counter(links.values()) == {1.0: 16, 2.0: 16}
    # the rows of GPU 0 and GPU 5 in what `nvidia-smi topo -m` prints on a DGX-1V; others are two hops away
    assert {b: n for (a, b), n in links.items() if a == 0} == {1: 1, 2: 1, 3: 2, 4: 2}
    assert {b: n for (a, b), n in links.items() if a == 5} == {1: 2, 4: 1, 6: 2, 7: 1}
    assert nx.diameter(graph) == 2


# Fabrics -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("oversubscription", [1, 2, 4])
@pytest.mark.parametrize("spines", [1, 3])
def test_a_leaf_has_up_what_it_has_down_divided_by_the_oversubscription(oversubscription, spines):
    fabric = LEAF_SPINE | {"oversubscription": oversubscription, "spines": spines}
    graph = graph_of(cluster_with(servers({"count": 3}, {"count": 1, "nics": 4}, fabric=fabric)))
    down = {"leaf0": 2 * 8 * 12.0, "leaf1": 8 * 12.0 + 4 * 12.0}
    for leaf, bandwidth in down.items():
        up = [graph.edges[leaf, f"spine{i}"]["bandwidth"] for i in range(spines)]
        assert sum(up) == pytest.approx(bandwidth / oversubscription)
        assert len(set(up)) == 1


@pytest.mark.parametrize("oversubscription", [1, 4])
def test_the_bandwidth_between_halves_of_a_fat_tree_is_its_cards_divided_by_the_oversubscription(oversubscription):
    fabric = LEAF_SPINE | {"oversubscription": oversubscription}
    graph = graph_of(cluster_with(servers({"count": 4}, fabric=fabric)))
    for side, ends in (("left", (0, 1)), ("right", (2, 3))):
        for server in ends:
            for gpu in range(8):
                edge = (f"server{server}/gpu{gpu}", side)
                graph.add_edge(*edge, bandwidth=float("inf"))
                graph.add_edge(*edge[::-1], bandwidth=float("inf"))
    most, _ = nx.maximum_flow(graph, "left", "right", capacity="bandwidth")
    assert most == pytest.approx(2 * 8 * 12.0 / oversubscription)


def test_card_k_of_every_server_of_a_group_is_on_rail_k():
    cluster = cluster_with(servers({"count": 5}, fabric=LEAF_SPINE | {"rails": True}))
    graph = graph_of(cluster)
    assert sum(name.startswith("leaf") for name in cluster.switches) == 3 * 8
    for server in range(5):
        for k in range(8):
            assert graph.has_edge(f"server{server}/nic{k}", f"leaf{server // 2 * 8 + k}")


def test_rails_without_spines_meet_inside_the_servers():
    graph = graph_of(cluster_with(servers({"count": 2}, fabric=LEAF_SPINE | {"spines": 0, "rails": True})))
    path = nx.shortest_path(graph, "server0/gpu0", "server1/gpu3", weight="latency_s")
    assert any("nvswitch" in name for name in path)


def test_all_cards_go_to_a_single_switch():
    graph = graph_of(cluster_with(servers({"count": 3}, {"count": 1, "nics": 2}, fabric={"kind": "switch"})))
    assert graph.out_degree("switch") == 3 * 8 + 2


def test_unequal_servers_keep_their_own_rates():
    fast_card = {"nic_link": LINK | {"bandwidth_bytes_per_s": 48.0}, "device": "slow", "devices": 4, "nics": 4}
    cluster = cluster_with(servers({"count": 2}, fast_card | {"count": 3}, fabric=LEAF_SPINE))
    graph = graph_of(cluster)
    assert Counter(device.type for device in cluster.devices) == {"fast": 16, "slow": 12}
    assert graph.edges["server0/nic0", "leaf0"]["bandwidth"] == 12.0
    assert graph.edges["server4/nic3", "leaf2"]["bandwidth"] == 48.0
    assert cluster.devices[16].host == "server2"


def test_sites_are_linked_by_their_gateways_only():
    cluster = cluster_with(ALL["sites"])
    graph = graph_of(cluster)
    across = {frozenset((a, b)) for a, b in graph.edges if a.split("/")[0] != b.split("/")[0]}
    assert across == {frozenset((f"{a}/gateway", f"{b}/gateway")) for a, b in (("a", "b"), ("a", "c"), ("b", "c"))}
    assert graph.edges["a/gateway", "b/gateway"] == {"bandwidth": 12.0, "latency_s": 1000.0}
    assert set(graph.successors("a/gateway")) == {"a/spine0", "a/spine1", "b/gateway", "c/gateway"}
    inside = graph_of(cluster_with(ALL["sites"]["sites"][0]["topology"]))
    for a, b in inside.edges:
        assert graph.edges[f"a/{a}", f"a/{b}"] == inside.edges[a, b]


# Explicit links ------------------------------------------------------------------------------------------------------


def test_parallel_links_add_up_and_a_message_takes_the_quickest():
    def link(*between, bandwidth, latency_s, directed=False):
        return SimpleNamespace(between=between, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s, directed=directed)

    links = [
        link("a", "b", bandwidth=1.0, latency_s=3.0),
        link("b", "a", bandwidth=2.0, latency_s=2.0),
        link("b", "c", bandwidth=4.0, latency_s=1.0, directed=True),
    ]
    wiring = wiring_of_links(("a", "b", "c"), links)
    rows = zip(wiring.source, wiring.target, wiring.bandwidth_bytes_per_s, wiring.latency_s, strict=True)
    assert list(rows) == [(0, 1, 3.0, 2.0), (1, 0, 3.0, 2.0), (1, 2, 4.0, 1.0)]


def test_a_cluster_without_links_has_a_wiring_without_links():
    wiring = cluster_of([], devices=1).wiring
    assert (wiring.nodes, wiring.links) == (1, 0)


def test_equal_explicit_clusters_share_one_wiring():
    assert cluster_of([("d0", "d1")], devices=2).wiring is cluster_of([("d0", "d1")], devices=2).wiring


# Refusals ------------------------------------------------------------------------------------------------------------

KINDS = [get_args(kind.__annotations__["kind"])[0] for kind in get_args(get_args(Topology)[0])]
REFUSED = [
    (simple("star", 3), "c.toml: topology.kind = "),
    (simple("star", 3), f"topology.kind = 'star': allowed: {', '.join(KINDS)}"),
    (simple("ring", 0), "topology.devices[0].count = 0: "),
    (simple("ring", 3, links=1), "topology.links: unknown key; did you mean link? allowed: kind, devices,"),
    (simple("ring", 3, link="nvlink9-h100"), "topology.link = 'nvlink9-h100': there is no preset"),
    (simple("ring", 3, link="nvlink9-h100"), "did you mean nvlink4-h100? allowed: nvlink1-p100, "),
    (simple("ring", 3, link={**LINK, "latency_s": "3 parsec"}), "topology.link.latency_s = '3 parsec': "),
    (simple("ring", 3, devices=[{"device": "quick", "count": 1}]), "unknown type 'quick'; allowed: fast, slow"),
    (torus(), "at least one dimension is needed"),
    (torus(4, 4, host_shape=[3, 2]), "host_shape = [3, 2]: does not tile shape = [4, 4]"),
    (servers(), "topology.servers = []: at least one is needed"),
    (servers({"count": 2}), "fabric: missing; 2 servers need one"),
    (servers({"inside": "none"}), "inside_link: none is used with 'none'"),
    (servers({"inside_link": None}), "inside_link: missing with 'nvswitch'"),
    (servers({"inside": "cube-mesh", "devices": 4, "nics": 4}), "devices = 4: a cube-mesh joins 8"),
    (servers({"nics": 3}), "nics = 3: cannot be shared evenly by 8 devices"),
    (servers({"nics": 0}), "nic_link: not used; leave it out"),
    (servers({"nic_link": None}), "nic_link: missing"),
    (servers({"pcie_link": None}), "pcie_link: missing"),
    (servers({"nics": 0, "nic_link": None, "pcie_link": None}, fabric={"kind": "switch"}), "cannot reach the fabric"),
    (servers({"count": 3}, fabric=LEAF_SPINE | {"spines": 0}), "fabric.spines = 0: the leafs would not be connected"),
    (servers({}, {"nics": 4}, fabric=LEAF_SPINE | {"rails": True}), "[4, 8] nics; rails need equally many"),
    (servers({}, fabric=LEAF_SPINE | {"oversubscription": 0}), "topology.fabric.oversubscription = 0: "),
    (servers({}, fabric={"kind": "mesh"}), "topology.fabric.kind = 'mesh': allowed: switch, leaf-spine"),
    (servers({"gpus": 3}), "topology.servers[0].gpus: unknown key; "),
    (ALL["sites"] | {"sites": ALL["sites"]["sites"][:1]}, "at least two with different names are needed"),
    (
        ALL["sites"] | {"sites": [{"name": "a", "topology": simple("ring", 3)}]},
        "topology.sites[0].topology.kind = 'ring': allowed: switch, servers",
    ),
    (ALL["sites"] | {"sites": [{"name": "a", "topology": servers({})}]}, "topology.fabric: missing"),
]  # fmt: skip


@pytest.mark.parametrize(("topology", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_does_not_fit_is_refused_in_one_line(topology, message):
    with pytest.raises(UserError) as error:
        cluster_with(topology)
    assert str(error.value).startswith("c.toml: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("devices", [{"name": "a", "type": "fast", "host": "h"}]),
        ("switches", ["a"]),
        ("links", [LINK | {"between": ["a", "b"]}]),
    ],
)
def test_a_topology_stands_for_devices_switches_and_links(key, value):
    with pytest.raises(UserError, match=rf"c\.toml: {key}( = .*)?: given by the topology"):
        cluster_with(simple("ring", 3), **{key: value})


# Identity ------------------------------------------------------------------------------------------------------------


def scenario_id(topology, **changes):
    cluster = cluster_with(topology, **changes)
    return scenario_of(cluster, {"method": "ddp", "ranks": 2, "dp_replicate": 2}).scenario_id


def test_the_identity_knows_wiring_but_no_rates_or_names():
    base = servers({"count": 4}, fabric=LEAF_SPINE)
    faster = {"nic_link": "ib-hdr-200", "inside_link": LINK | {"latency_s": 9.0, "source": "else"}}
    same = servers({"count": 4} | faster, fabric=LEAF_SPINE | {"oversubscription": 4, "hop_latency_s": 1.0})
    renamed = {"device_types": {"quick": device_type()}, "name": "other", "source": "else"}
    assert scenario_id(base) == scenario_id(same)
    assert scenario_id(base) == scenario_id(servers({"count": 4, "device": "quick"}, fabric=LEAF_SPINE), **renamed)
    for other in (
        servers({"count": 4}, fabric=LEAF_SPINE | {"rails": True}),
        servers({"count": 4, "nics": 4}, fabric=LEAF_SPINE),
        servers({"count": 2}, {"count": 2, "device": "slow"}, fabric=LEAF_SPINE),
        servers({"count": 4, "device": "slow"}, fabric=LEAF_SPINE),
        simple("ring", 32),
    ):
        assert scenario_id(other) != scenario_id(base)


def test_the_structure_of_sites_keeps_no_link():
    text = json.dumps(structure_of(cluster_with(ALL["sites"]).topology))
    assert "link" not in text
    assert "latency" not in text


# Shipped files -------------------------------------------------------------------------------------------------------

SHIPPED = {
    "ring-8": (8, 16),
    "fully-connected-8": (8, 56),
    "switch-8": (8, 16),
    "dgx-a100": (8, 2 * (8 + 8 + 8 + 8 + 4)),  # two GPUs share a path to the host's memory
    "dgx-h100": (8, 2 * (8 + 8 + 8 + 8)),
    "dgx-1v": (8, 2 * (16 + 8)),
    "two-dgx-h100": (16, 2 * (3 * 16 + 8 * 2)),
    "leaf-spine-64": (64, 2 * (3 * 64 + 4 * 2)),
    "rail-optimised-128": (128, 2 * (3 * 128 + 8 * 4)),
    "tpu-v2-8": (4, 8),
    "tpu-v2-pod": (256, 4 * 256),
    "torus-4x4x4": (64, 6 * 64),
    "four-h100-sites": (32, 2 * (3 * 32 + 4 + 6)),
    "two-sites": (32, 2 * (3 * 16 + 2 * (16 + 8 + 4) + 3)),
    "unequal-1024": (1024, 2 * (3 * 640 + 48 * (16 + 8 + 4) + 8 * 4)),
    "unequal-8192": (8192, 2 * (3 * 5120 + 384 * (16 + 8 + 4) + 64 * 32)),
    "gpus-65536": (65536, 2 * (3 * 65536 + 2048 * 8)),
}


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_cluster_file_holds_together(path):
    assert path.read_text().startswith("# ") or path.stem == "four-unequal-gpus"
    cluster = load_cluster(path)
    assert cluster.wiring.nodes == len(cluster.devices) + len(cluster.switches)
    if path.stem in SHIPPED:
        assert (len(cluster.devices), cluster.wiring.links) == SHIPPED[path.stem]


def test_every_built_kind_is_shipped():
    assert SHIPPED.keys() <= {path.stem for path in CLUSTERS.glob("*.toml")}


def test_a_topology_is_built_once():
    topology = load_cluster(CLUSTERS / "dgx-a100.toml").topology
    assert build(topology) is build(load_cluster(CLUSTERS / "dgx-a100.toml").topology)


def test_dimensions_of_a_torus_may_have_links_of_their_own():
    link = {"latency_s": 0, "source": "made"}
    wide, narrow = ({**link, "bandwidth_bytes_per_s": rate} for rate in (4e9, 1e9))
    table = {"kind": "torus", "device": "a", "shape": [2, 3], "dimension_links": [wide, narrow]}
    wiring = build(TypeAdapter(Torus).validate_python(table)).wiring
    rates = {
        (a, b): rate for a, b, rate in zip(wiring.source, wiring.target, wiring.bandwidth_bytes_per_s, strict=True)
    }
    assert rates[0, 3] == 4e9
    assert rates[0, 1] == rates[0, 2] == 1e9


@pytest.mark.parametrize(
    ("links", "message"),
    [({}, "either this or dimension_links"), ({"dimension_links": ["ici-v2"]}, "2 dimensions, but 1 links")],
)
def test_a_torus_needs_one_link_for_all_or_one_for_each_dimension(links, message):
    with pytest.raises(ValueError, match=message):
        TypeAdapter(Torus).validate_python({"kind": "torus", "device": "a", "shape": [2, 2], **links})
