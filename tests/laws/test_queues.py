"""Laws of queues in the network: where notices wait for other ranks' data, and what that costs a ring."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cluster_of, communication_time_s

from gssim.cluster import Cluster, Link
from gssim.collectives import Communication, Hops
from gssim.network import Router, queued_ratio

FAST, SLOW = 1e9, 1e8
SIZE = 2.4e6  # whose parts go in no more than two messages


def wired(rates: dict[tuple[str, str], float], *, devices: int, switches: tuple[str, ...], **changes: Any) -> Cluster:
    """Return devices and switches with links of their own rates."""
    links = tuple(
        Link(between=ends, bandwidth_bytes_per_s=rate, latency_s=0.0, source="assumed") for ends, rate in rates.items()
    )
    return replace(cluster_of([], devices=devices, **changes), switches=switches, links=links)


def star(*rates: float, **changes: Any) -> Cluster:
    """Return devices around a switch, each with a link of its own rate."""
    links = {(f"d{i}", "sw"): rate for i, rate in enumerate(rates)}
    return wired(links, devices=len(rates), switches=("sw",), **changes)


def sites(trunk: float) -> Cluster:
    """Return two switches with two devices each, and a trunk between them."""
    ports = {("d0", "s0"): FAST, ("d1", "s0"): FAST, ("d2", "s1"): FAST, ("d3", "s1"): FAST}
    return wired(ports | {("s0", "s1"): trunk}, devices=4, switches=("s0", "s1"))


def ring(members: int) -> Hops:
    """Return the hops of a ring over all devices."""
    return Hops.of([(i, (i + 1) % members, 1.0) for i in range(members)])


def queued(cluster: Cluster) -> float:
    return queued_ratio(Router(cluster.wiring), ring(len(cluster.devices)))


@pytest.mark.parametrize("cluster", [star(FAST, FAST, SLOW), star(FAST, SLOW, FAST, SLOW), sites(SLOW)])
def test_behind_a_slow_link_of_a_switch_notices_wait_for_what_fast_ports_have_sent_ahead(cluster):
    assert queued(cluster) == pytest.approx(1 - SLOW / FAST)


@given(st.integers(3, 6), st.floats(1e6, 1e10), st.floats(0.0, 1.0))
def test_ports_faster_by_a_little_queue_as_little_data(members, rate, added_ratio):
    rates = [rate] * (members - 1) + [rate * (1 + added_ratio)]
    assert queued(star(*rates)) == pytest.approx(1 - 1 / (1 + added_ratio), abs=1e-12)


def test_a_trunk_that_is_no_slower_than_the_ports_has_no_queue():
    assert queued(sites(FAST)) == queued(sites(2 * FAST)) == 0


def test_a_hop_that_is_less_busy_makes_up_for_its_notices_waiting():
    # device 2 receives at 0.5 of the others' rate and sends at 0.8 of it: notices to it wait 0.5
    rates = {("d0", "sw"): FAST, ("d1", "sw"): FAST}
    cluster = wired(rates, devices=3, switches=("sw",))
    ways = (("d2", "sw", 0.8 * FAST), ("sw", "d2", 0.5 * FAST))
    links = tuple(
        Link(between=(a, b), bandwidth_bytes_per_s=rate, latency_s=0.0, directed=True, source="assumed")
        for a, b, rate in ways
    )
    assert queued(replace(cluster, links=cluster.links + links)) == pytest.approx(0.5 - (1 - 0.5 / 0.8))


def test_a_queue_that_no_notice_of_a_hop_as_slow_must_pass_holds_up_nothing():
    # one message, to the slow device: its notice goes the other way
    assert queued_ratio(Router(star(FAST, FAST, SLOW).wiring), Hops.of([(0, 2, 1.0)])) == 0


@pytest.mark.parametrize("members", [3, 4, 6])
def test_a_ring_that_passes_a_queue_takes_almost_one_message_longer(members):
    # 2 (n - 1) steps of two messages each
    cluster = star(*[FAST] * (members - 1), SLOW)
    message_s = SIZE / members / 2 / SLOW
    found_s = communication_time_s(cluster, Communication("all-reduce", tuple(range(members)), SIZE))
    assert found_s == pytest.approx((4 * (members - 1) + 1 - SLOW / FAST) * message_s, rel=1e-9)


def test_nccl_has_no_notices():
    cluster = star(FAST, FAST, SLOW, backend="nccl")
    found_s = communication_time_s(cluster, Communication("all-reduce", (0, 1, 2), SIZE))
    assert found_s == pytest.approx(4 / 3 * SIZE / SLOW, rel=1e-9)
