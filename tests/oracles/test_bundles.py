"""Bundles: many messages taken together load links as each of them alone does, summed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fabrics
from test_routes import wiring_of, wirings

from gssim.collectives import Exchange, Hops
from gssim.errors import UserError
from gssim.network import Router, bundles


@pytest.fixture(autouse=True)
def _few_targets_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "TARGETS_AT_ONCE", 2)


def assert_bundled(wiring, hops: Hops) -> None:
    """Check loads by group and link, and the latency of each hop, against every hop's own path."""
    router = Router(wiring)
    mine = bundles.bundled(wiring, bundles.adjacency(wiring.target, wiring.nodes), hops)
    other = router._summed(hops)
    assert mine.group.tolist() == other.group.tolist()
    assert mine.link.tolist() == other.link.tolist()
    assert mine.load == pytest.approx(other.load, rel=1e-12)
    assert mine.latency_s == pytest.approx(other.latency_s, rel=1e-12, abs=1e-18)


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
        bundles.bundled(wiring, bundles.adjacency(wiring.target, 4), Hops.of([(0, 1, 1.0), (1, 3, 1.0), (2, 3, 1.0)]))


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


@given(fabrics(), st.integers(1, 3))
def test_an_exchange_told_by_kinds_of_senders_is_that_of_all_its_pairs(cluster, kinds):
    count = len(cluster.devices)
    if count < 2:
        return
    router = Router(cluster.wiring)
    every = Hops.of([(i, j, 1.0) for i in range(count) for j in range(count) if i != j])
    rows = np.array([[1.0 + kind + 0.5 * j for j in range(count)] for kind in range(kinds)])
    told = Exchange(every, np.arange(count), rows, np.arange(count) % kinds)
    plain = Hops(every.source, every.target, told.weight)
    mine, other = router.bundle(told), router._summed(plain)
    assert mine.link.tolist() == other.link.tolist()
    assert mine.load == pytest.approx(other.load, rel=1e-12)
    assert router.latency_beyond_s(told, 1e-6) == pytest.approx(
        float(np.average(np.maximum(0.0, other.latency_s - 1e-6), weights=plain.weight)), rel=1e-12, abs=1e-18
    )
    for ours, theirs in zip(told.carried_by_rank(count), plain.carried_by_rank(count), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert (told.count, told.heaviest) == (plain.count, plain.weight.max())
