"""Laws of the lab's shaped links: bytes are through sooner than over a wire, by a bucket of tokens at most."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import communication_time_s, device_type, star

from gssim.cluster import Cluster
from gssim.cluster.cluster import BackendCost
from gssim.cluster.lab_links import burst_bytes, group_bytes, head_start_s
from gssim.collectives import Communication

RATES = st.floats(1e5, 1e9)


def pair(rate: float, latency_s: float = 1e-3, *, shaped: bool = True, message_s: float = 0.0) -> Cluster:
    """Return two devices on a switch, of the lab or not."""
    kind = device_type(**({"lab": {"cpu_share_ratio": 0.5}} if shaped else {}))
    cluster = star(2, types={"fast": kind}, bandwidth=rate, latency_s=latency_s / 2)
    return replace(cluster, backend_cost=BackendCost(message_s=message_s, source="test"))


def send_s(cluster: Cluster, size: float) -> float:
    return communication_time_s(cluster, Communication("send", (0, 1), size))


@given(RATES)
def test_a_bucket_lets_groups_through_until_its_tokens_are_gone(rate):
    group = group_bytes(rate)
    passed = head_start_s(rate, group) * rate
    assert burst_bytes(rate) < passed + 1e-6 <= burst_bytes(rate) + group + 1e-6
    assert passed % group == pytest.approx(0, abs=1e-3) or passed % group == pytest.approx(group, abs=1e-3)


@given(RATES, st.floats(1, 1e8))
def test_a_message_over_a_shaped_link_is_earlier_than_over_a_wire_by_the_head_start_and_no_more(rate, size):
    shaped_s, wire_s = send_s(pair(rate), size), send_s(pair(rate, shaped=False), size)
    assert wire_s == pytest.approx(2e-3 + size / rate)
    assert shaped_s == pytest.approx(max(2e-3, wire_s - head_start_s(rate, group_bytes(rate))))


def test_a_pause_within_a_collective_is_made_up_for_where_it_is_no_longer_than_a_burst():
    # parts go round a ring of four: three steps, of which the first waits for a notice too
    def gathered_s(latency_s: float, *, shaped: bool) -> float:
        kind = device_type(**({"lab": {"cpu_share_ratio": 0.2}} if shaped else {}))
        cluster = star(4, types={"fast": kind}, bandwidth=12.5e6, latency_s=latency_s / 2)
        return communication_time_s(cluster, Communication("all-gather-v", (0, 1, 2, 3), 4e6, part_bytes=(1e6,) * 4))

    ahead_s = head_start_s(12.5e6, group_bytes(12.5e6))
    for latency_s in (0.1e-3, 10e-3):
        saved_s = gathered_s(latency_s, shaped=False) - gathered_s(latency_s, shaped=True)
        assert saved_s == pytest.approx(ahead_s + 2 * min(latency_s, ahead_s), rel=1e-6)


def test_without_any_latency_the_transfer_itself_is_shorter():
    rate = 12.5e6
    assert send_s(pair(rate, 0.0), 1e6) == pytest.approx(1e6 / rate - head_start_s(rate, group_bytes(rate)))
    assert send_s(pair(rate, 0.0), 100) == pytest.approx(0.0, abs=1e-12)
