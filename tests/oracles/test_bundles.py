"""Bundles: many messages taken together load links as each of them alone does, summed."""

from unittest.mock import patch

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fabrics
from test_routes import wiring_of, wirings

from gssim.collectives import Exchange, Hops, Members
from gssim.errors import UserError
from gssim.network import Router, bundles
from gssim.network.blocks import biconnected_components


@pytest.fixture(autouse=True)
def _few_targets_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "TARGETS_AT_ONCE", 2)


def assert_bundled(wiring, hops: Hops) -> None:
    """Check loads by group and link, and the latency of each hop, against every hop's own path."""
    router = Router(wiring)
    paths = bundles.paths_of(wiring, bundles.adjacency(wiring.target, wiring.nodes), hops)
    mine = bundles.carried(wiring, paths, hops.weight)
    other = router._summed(hops)
    assert mine.group.tolist() == other.group.tolist()
    assert mine.link.tolist() == other.link.tolist()
    assert mine.load == pytest.approx(other.load, rel=1e-12)
    assert mine.latency_s == pytest.approx(other.latency_s, rel=1e-12, abs=1e-18)
    with patch("gssim.network.routes.is_worthwhile", return_value=False):
        router.bundle_ahead([Hops(hops.target, hops.source, hops.weight, hops.group), hops])
    ahead = router.bundle(hops)
    for name in ("group", "link", "load", "latency_s"):
        assert getattr(ahead, name).tolist() == getattr(other, name).tolist()


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).filter(lambda ends: ends[0] != ends[1])))
def test_blocks_are_those_of_networkx_in_its_order(edges):
    graph = nx.Graph()
    graph.add_node(12)
    graph.add_edges_from(edges)
    found = biconnected_components({node: list(graph[node]) for node in graph})
    assert [set(nodes) for nodes in found] == list(nx.biconnected_components(graph))


@given(wirings(), st.data())
def test_links_carry_what_all_the_messages_put_on_them(wiring, data):
    nodes = range(wiring.nodes)
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(nodes), st.sampled_from(nodes)), min_size=1, max_size=30))
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(pairs), max_size=len(pairs)))
    assert_bundled(wiring, Hops.of([(a, b, w) for (a, b), w in zip(pairs, weights, strict=True)]))


@given(fabrics())
def test_an_exchange_among_all_devices_of_any_topology_is_that_of_all_its_pairs(cluster):
    ranks = range(len(cluster.devices))
    pairs = [(i, j, 1.0 + j) for i in ranks for j in ranks if i != j]
    if pairs:
        assert_bundled(cluster.wiring, Hops.of(pairs))


@given(wirings(), st.integers(2, 3))
def test_groups_are_told_apart(wiring, groups):
    members = [[i for i in range(wiring.nodes) if i % groups == group] for group in range(groups)]
    pairs = [(i, j, g) for g, group in enumerate(members) for i in group for j in group if i != j]
    if {g for _, _, g in pairs} == set(range(groups)):
        source, target, group = map(np.array, zip(*pairs, strict=True))
        assert_bundled(wiring, Hops(source, target, np.ones(len(pairs)), group))


def test_a_pair_that_no_path_connects_is_named():
    wiring = wiring_of(4, [(0, 1), (1, 0), (2, 3), (3, 2)], [1.0] * 4)
    with pytest.raises(UserError, match="no path of links from n1 to n3"):
        bundles.paths_of(wiring, bundles.adjacency(wiring.target, 4), Hops.of([(0, 1, 1.0), (1, 3, 1.0), (2, 3, 1.0)]))


def star(devices: int):
    """Return a wiring of so many devices round a switch."""
    links = [(i, devices) for i in range(devices)] + [(devices, i) for i in range(devices)]
    return wiring_of(devices + 1, links, [1.0] * len(links))


def test_the_router_bundles_where_each_target_gets_many_messages_and_else_follows_each():
    exchange = Hops.of([(i, j, 1.0) for i in range(64) for j in range(64) if i != j])
    ring = Hops.of([(i, (i + 1) % 600, 1.0) for i in range(600)])
    assert bundles.is_worthwhile(star(64), exchange)
    assert not bundles.is_worthwhile(star(600), ring)
    assert Router(star(64)).bundle(exchange).load.tolist() == [63.0] * 128
    assert Router(star(600)).bundle(ring).load.tolist() == [1.0] * 1200


def test_latencies_of_many_messages_to_each_target_need_no_search_of_each_ones_path(monkeypatch):
    exchange = Hops.of([(i, j, 1.0) for i in range(64) for j in range(64) if i != j])
    ring = Hops.of([(i, (i + 1) % 600, 1.0) for i in range(600)])
    assert Router(star(600)).latencies_s(ring).tolist() == [2.0] * 600
    monkeypatch.setattr(Router, "_search", None)
    assert Router(star(64)).latencies_s(exchange).tolist() == [2.0] * 64 * 63


def assert_exchanged(wiring, ranks: list[int], kinds: int, spread: float = 0.5) -> None:
    """Check an exchange told by kinds of senders against every pair's own path."""
    count, router = len(ranks), Router(wiring)
    rows = np.array([[1.0 + kind + spread * j for j in range(count)] for kind in range(kinds)])
    rows[:, 1] = 0.0  # an owner of nothing
    told = Exchange(Members(np.array(ranks), np.array(ranks)), rows, np.arange(count) % kinds)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    assert list(zip(told.source.tolist(), told.target.tolist(), strict=True)) == [
        (ranks[i], ranks[j]) for i, j in pairs
    ]
    assert told.weight.tolist() == [rows[i % kinds, j] for i, j in pairs]
    plain = Hops(told.source, told.target, told.weight)
    mine, other = router.bundle(told), router._summed(plain)
    assert mine.link.tolist() == other.link.tolist()
    assert mine.load == pytest.approx(other.load, rel=1e-12)
    for floor_s in (0.0, 1e-6):
        mean_s = np.average(np.maximum(0.0, other.latency_s - floor_s), weights=plain.weight)
        assert router.latency_beyond_s(told, floor_s) == pytest.approx(float(mean_s), rel=1e-12, abs=1e-18)
    for ours, theirs in zip(told.carried_by_rank(wiring.nodes), plain.carried_by_rank(wiring.nodes), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert (told.count, told.heaviest) == (plain.count, plain.weight.max())
    assert told.most_handled == pytest.approx(plain.most_handled, rel=1e-12)


@given(fabrics(), st.integers(1, 3))
def test_an_exchange_told_by_kinds_of_senders_is_that_of_all_its_pairs(cluster, kinds):
    if len(cluster.devices) > 1:
        assert_exchanged(cluster.wiring, list(range(len(cluster.devices))), kinds)


@given(wirings(), st.integers(1, 3), st.data())
def test_an_exchange_among_any_nodes_of_any_links_is_that_of_all_its_pairs(wiring, kinds, data):
    nodes = st.sampled_from(range(wiring.nodes))
    assert_exchanged(wiring, data.draw(st.lists(nodes, min_size=2, unique=True)), kinds)


@given(fabrics(), st.integers(1, 2))
def test_an_exchange_in_several_groups_is_that_of_each(cluster, kinds):
    count = len(cluster.devices) // 2
    if count < 2:
        return
    router, groups = Router(cluster.wiring), np.arange(2 * count).reshape(count, 2).T
    rows = np.array([[1.0 + kind + 0.5 * j for j in range(count)] for kind in range(kinds)])
    one = Exchange(Members(groups[0], groups[0]), rows, np.arange(count) % kinds)
    told, plain = one.in_groups(tuple(Members(group, group) for group in groups)), one.in_every(groups)
    assert (told.count, told.most_handled) == (plain.count, pytest.approx(plain.most_handled, rel=1e-12))
    for name in ("source", "target", "weight", "group"):
        assert getattr(told, name).tolist() == getattr(plain, name).tolist()
    mine, other = router.bundle(told), router._summed(plain)
    assert (mine.group.tolist(), mine.link.tolist()) == (other.group.tolist(), other.link.tolist())
    assert mine.load == pytest.approx(other.load, rel=1e-12)
    mean_s = [np.average(other.latency_s[plain.group == k], weights=plain.weight[plain.group == k]) for k in (0, 1)]
    assert mine.latency_s == pytest.approx(mean_s, rel=1e-12, abs=1e-18)
    for ours, theirs in zip(*(each.carried_by_rank(2 * count) for each in (told, plain)), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


@given(st.data())
def test_an_exchange_over_blocks_in_a_tree_is_that_of_all_its_pairs(data):
    """Cycles that share a node each with one before, some with chords: their nodes are the ports of several blocks."""
    edges, nodes = [], 1
    for _ in range(data.draw(st.integers(1, 4))):
        size, shared = data.draw(st.integers(1, 4)), data.draw(st.integers(0, nodes - 1))
        cycle = [shared, *range(nodes, nodes + size)]
        edges += [(a, b) for a, b in zip(cycle, [*cycle[1:], shared], strict=True)]
        edges += [(b, a) for a, b in edges[-len(cycle) :] if data.draw(st.booleans())]
        edges += [(cycle[0], cycle[-2])] if size > 2 and data.draw(st.booleans()) else []
        nodes += size
    edges = list(dict.fromkeys(edges))
    latencies_s = data.draw(st.lists(st.sampled_from([1e-7, 1e-6, 3e-6]), min_size=len(edges), max_size=len(edges)))
    order = data.draw(st.permutations(range(nodes)))
    ranks = data.draw(st.lists(st.sampled_from(range(nodes)), min_size=2, unique=True))
    assert_exchanged(wiring_of(nodes, [(order[a], order[b]) for a, b in edges], latencies_s), ranks, 2)


@pytest.mark.parametrize(
    ("edges", "named"),
    [
        ([(0, 1), (1, 0), (2, 3), (3, 2)], "from n0 to n2"),  # no links between two parts
        ([(0, 1), (1, 2), (2, 0), (2, 3)], "from n3 to n0"),  # links in one direction only
    ],
)
def test_members_of_an_exchange_that_no_path_connects_are_named(edges, named):
    told = Exchange(Members(np.arange(4), np.arange(4)), np.ones((1, 4)), np.zeros(4, np.int64))
    with pytest.raises(UserError, match=f"no path of links {named}"):
        Router(wiring_of(4, edges, [1.0] * 4)).bundle(told)


def test_loads_of_an_exchange_on_equal_links_are_equal_to_the_last_digit():
    """Otherwise rounding would make equal links differ, and the network would not fold."""
    members = Members(np.arange(64), np.arange(64))
    told = Exchange(members, np.full((1, 64), 0.1), np.zeros(64, np.int64))
    into_switch, out_of_it = Router(star(64)).bundle(told).load.reshape(2, 64)
    assert len(set(into_switch.tolist())) == len(set(out_of_it.tolist())) == 1
