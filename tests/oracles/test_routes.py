"""Routes: what the router finds is what networkx finds, path by path."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import built, cluster_of, fabrics, graph_of, link_type, routed

from gssim.cluster.topology import Wiring
from gssim.errors import UserError
from gssim.network import Router, routes


def wiring_of(nodes: int, edges: list[tuple[int, int]], latencies_s: list[float]) -> Wiring:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return Wiring(
        tuple(f"n{i}" for i in range(nodes)),
        ends[:, 0].copy(),
        ends[:, 1].copy(),
        np.ones(len(edges)),
        np.array(latencies_s, dtype=float),
    )


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    """Draw directed links at random over a cycle, so that everybody reaches everybody, some pairs in many ways."""
    nodes = draw(st.integers(2, 12))
    cycle = [(i, (i + 1) % nodes) for i in range(nodes)]
    pairs = [(i, j) for i in range(nodes) for j in range(nodes) if i != j]
    more = draw(st.lists(st.sampled_from(pairs), max_size=4 * nodes, unique=True))
    edges = list(dict.fromkeys([*cycle, *more]))
    latencies = st.sampled_from(draw(st.sampled_from([[0.0], [1e-6], [1e-6, 2e-6], [0.0, 1e-6, 2e-6, 5e-3]])))
    late = draw(st.lists(latencies, min_size=len(edges), max_size=len(edges)))
    return wiring_of(nodes, edges, late)


def assert_routed(wiring: Wiring, source: list[int], target: list[int]) -> None:
    """Check links, shares and latency of every pair, in the order in which pairs are given."""
    found = Router(wiring).incidence(np.array(source), np.array(target))
    graph = graph_of(wiring)
    assert (np.diff(found.flow) >= 0).all()
    for pair, ends in enumerate(zip(source, target, strict=True)):
        mine = found.flow == pair
        shares, latency_s = routed(graph, *ends)
        links = found.link[mine].tolist()
        assert len(set(links)) == len(links)
        assert dict(zip(links, found.share[mine].tolist(), strict=True)) == pytest.approx(shares, rel=1e-9)
        assert found.latency_s[pair] == pytest.approx(latency_s, rel=1e-9, abs=1e-18)


@given(wirings())
def test_all_pairs_take_the_links_and_shares_of_all_equal_shortest_paths(wiring):
    pairs = [(i, j) for i in range(wiring.nodes) for j in range(wiring.nodes) if i != j]
    assert_routed(wiring, *map(list, zip(*pairs, strict=True)))


@given(wirings(), st.data())
def test_pairs_may_come_in_any_order_and_more_than_once(wiring, data):
    node = st.integers(0, wiring.nodes - 1)
    pairs = data.draw(st.lists(st.tuples(node, node).filter(lambda p: p[0] != p[1]), min_size=1, max_size=8))
    assert_routed(wiring, *map(list, zip(*(pairs + pairs[:2]), strict=True)))


@given(wirings(), st.data())
def test_pairs_that_were_searched_ahead_have_the_same_paths_entry_by_entry(wiring, data):
    node = st.integers(0, wiring.nodes - 1)
    ahead, asked = (np.array(data.draw(st.lists(st.tuples(node, node), min_size=1, max_size=8))).T for _ in range(2))
    router = Router(wiring)
    router.search_ahead(*ahead)
    assert_as_alone(router, [ahead, asked, asked[:, :0]])


def assert_as_alone(router: Router, asked: list[np.ndarray]) -> None:
    """Check that a router finds, for one set of pairs after another, what a new one finds for each, entry by entry."""
    for source, target in asked:
        found, expected = router.incidence(source, target), Router(router.wiring).incidence(source, target)
        for name in ("flow", "link", "share", "latency_s"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("most", [0, 6, 100])
@given(wirings(), st.data())
def test_paths_that_a_router_remembers_are_those_of_a_new_one(most, wiring, data):
    node = st.integers(0, wiring.nodes - 1)
    pairs = st.lists(st.tuples(node, node), max_size=8).map(lambda some: np.array(some, np.int64).reshape(-1, 2).T)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "MOST_RECENT_PAIRS", most)
        patch.setattr(routes, "MOST_LATEST_PAIRS", 4)
        assert_as_alone(Router(wiring), data.draw(st.lists(pairs, max_size=6)))


def test_broadcasts_from_several_roots_search_the_paths_that_they_share_only_once(monkeypatch):
    nodes, searched, search = 8, [], Router._search

    def counted(router, source, target):
        searched.extend(zip(source.tolist(), target.tolist(), strict=True))
        return search(router, source, target)

    monkeypatch.setattr(Router, "_search", counted)
    ring = [(i, (i + 1) % nodes) for i in range(nodes)]
    router = Router(wiring_of(nodes, ring, [1.0] * nodes))
    for root in range(nodes):
        router.incidence(*np.array([pair for pair in ring if pair[1] != root]).T)
    assert sorted(searched) == sorted(ring)


@given(fabrics())
def test_devices_of_every_topology_reach_each_other_by_equal_shortest_paths(cluster):
    ranks = range(len(cluster.devices))
    pairs = [(i, j) for i in ranks for j in ranks if i != j]
    if pairs:
        assert_routed(cluster.wiring, *map(list, zip(*pairs, strict=True)))


@given(wirings())
def test_what_leaves_the_source_is_what_arrives_and_what_enters_a_node_leaves_it(wiring):
    pairs = [(i, j) for i in range(wiring.nodes) for j in range(wiring.nodes) if i != j]
    found = Router(wiring).incidence(*map(np.array, zip(*pairs, strict=True)))
    for pair, (source, target) in enumerate(pairs):
        mine = found.flow == pair
        net = np.zeros(wiring.nodes)
        np.add.at(net, wiring.source[found.link[mine]], found.share[mine])
        np.subtract.at(net, wiring.target[found.link[mine]], found.share[mine])
        expected = np.zeros(wiring.nodes)
        expected[source], expected[target] = 1.0, -1.0
        assert net == pytest.approx(expected, abs=1e-12)


def test_a_message_to_oneself_takes_no_link_and_no_time():
    wiring = wiring_of(2, [(0, 1), (1, 0)], [1.0, 1.0])
    found = Router(wiring).incidence(np.array([1, 0]), np.array([1, 1]))
    assert found.flow.tolist() == [1]
    assert found.latency_s.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("edges", [[], [(0, 1)], [(0, 1), (1, 0), (2, 3), (3, 2)], [(0, 1), (1, 2), (2, 0), (3, 2)]])
def test_a_pair_that_no_path_connects_is_named(edges):
    wiring = wiring_of(4, edges, [1.0] * len(edges))
    with pytest.raises(UserError, match="no path of links from n1 to n3"):
        Router(wiring).incidence(np.array([1]), np.array([3]))


def test_a_link_of_one_direction_is_no_way_back():
    wiring = cluster_of([("d0", "d1")], devices=2, directed=True).wiring
    assert Router(wiring).incidence(np.array([0]), np.array([1])).share.tolist() == [1.0]
    with pytest.raises(UserError, match="no path of links from d1 to d0"):
        Router(wiring).incidence(np.array([1]), np.array([0]))


@pytest.mark.parametrize("spines", [1, 2, 3, 8])
def test_servers_under_different_leafs_use_all_spines_alike(spines):
    cluster = built(
        {
            "kind": "servers",
            "servers": [
                {
                    "count": 4,
                    "device": "fast",
                    "devices": 1,
                    "nics": 1,
                    "nic_link": link_type(1.0),
                    "pcie_link": link_type(2.0),
                }
            ],
            "fabric": {"kind": "leaf-spine", "servers_per_leaf": 2, "spines": spines},
        }
    )
    wiring = cluster.wiring
    found = Router(wiring).incidence(np.array([0, 0]), np.array([1, 2]))
    beside, across = ([found.link[found.flow == flow], found.share[found.flow == flow]] for flow in (0, 1))
    assert beside[1].tolist() == [1.0] * 4  # up to the one leaf, and down
    touches_spine = np.array(
        ["spine" in wiring.names[wiring.source[link]] + wiring.names[wiring.target[link]] for link in across[0]]
    )
    assert across[1][touches_spine] == pytest.approx([1 / spines] * 2 * spines)
    assert across[1][~touches_spine].tolist() == [1.0] * 4


def test_few_new_pairs_do_not_copy_all_that_a_router_remembers(monkeypatch):
    nodes, copied, joined = 40, [], routes._Known.joined

    def counted(known, other):
        copied.append(len(known.pairs) + len(other.pairs))
        return joined(known, other)

    monkeypatch.setattr(routes._Known, "joined", counted)
    monkeypatch.setattr(routes, "MOST_LATEST_PAIRS", 16)
    ring = [(i, (i + 1) % nodes) for i in range(nodes)]
    router = Router(wiring_of(nodes, ring, [1.0] * nodes))
    pairs = np.array([(a, b) for a in range(nodes) for b in range(nodes) if a != b][:640])
    for source, target in pairs:
        router.incidence(np.array([source]), np.array([target]))
    assert sum(copied) < len(pairs) ** 2 / 8
