from dataclasses import replace

import pytest
import simpy
from strategies import cluster_of, star

from gssim.network import Network, graph_of, max_min_rates
from gssim.units import UserError


def transfers(cluster, *messages):
    """Return when each (source, target, bytes, start) has arrived, and the network."""
    env = simpy.Environment()
    network = Network(env, cluster)
    ended = {}

    def send(number, source, target, size, start_s):
        yield env.timeout(start_s)
        yield from network.transfer(source, target, size)
        ended[number] = env.now

    for number, message in enumerate(messages):
        env.process(send(number, *message))
    env.run()
    return [ended[number] for number in range(len(messages))], network


def test_a_link_without_a_direction_goes_both_ways_at_full_rate():
    graph = graph_of(cluster_of([("d0", "d1")], devices=2, bandwidth=5.0))
    assert {(a, b): data["bandwidth"] for a, b, data in graph.edges(data=True)} == {
        ("d0", "d1"): 5.0,
        ("d1", "d0"): 5.0,
    }
    directed = graph_of(cluster_of([("d0", "d1")], devices=2, directed=True))
    assert list(directed.edges) == [("d0", "d1")]


def test_parallel_links_add_up():
    assert (
        graph_of(cluster_of([("d0", "d1"), ("d1", "d0")], devices=2, bandwidth=5.0)).edges["d0", "d1"]["bandwidth"]
        == 10
    )


def test_two_flows_share_a_link_and_the_one_that_stays_speeds_up():
    ended, _ = transfers(cluster_of([("d0", "d1")], devices=2, bandwidth=10.0), (0, 1, 100, 0), (0, 1, 20, 0))
    assert ended == pytest.approx([12.0, 4.0])


def test_a_flow_that_comes_later_takes_its_share_from_then_on():
    ended, _ = transfers(cluster_of([("d0", "d1")], devices=2, bandwidth=10.0), (0, 1, 100, 0), (0, 1, 20, 8))
    assert ended == pytest.approx([12.0, 12.0])


def test_opposite_directions_do_not_share():
    ended, _ = transfers(cluster_of([("d0", "d1")], devices=2, bandwidth=10.0), (0, 1, 100, 0), (1, 0, 100, 0))
    assert ended == pytest.approx([10.0, 10.0])


def test_a_flow_that_is_held_up_elsewhere_leaves_its_share_to_others():
    cluster = star(4, bandwidth=10.0)
    slow = replace(cluster.links[1], bandwidth_bytes_per_s=2.0)
    cluster = replace(cluster, links=(cluster.links[0], slow, *cluster.links[2:]))
    ended, _ = transfers(cluster, (0, 1, 20, 0), (0, 2, 80, 0))
    assert ended == pytest.approx([10.0, 10.0])


def test_latencies_of_a_path_add_up_before_its_bytes_flow():
    ended, network = transfers(star(2, bandwidth=10.0, latency_s=0.5), (0, 1, 100, 0), (0, 1, 0, 3))
    assert ended == pytest.approx([11.0, 4.0])
    assert network.carried == {("d0", "sw"): 100, ("sw", "d0"): 0, ("d1", "sw"): 0, ("sw", "d1"): 100}


def test_a_message_takes_the_path_of_least_latency():
    cluster = cluster_of([("d0", "d2"), ("d0", "d1"), ("d1", "d2")], devices=3, latency_s=1.0)
    detour = replace(cluster, links=(replace(cluster.links[0], latency_s=5.0), *cluster.links[1:]))
    assert Network(simpy.Environment(), cluster).path(0, 2)[0] == (("d0", "d2"),)
    assert Network(simpy.Environment(), detour).path(0, 2) == ((("d0", "d1"), ("d1", "d2")), 2.0)


def test_without_latencies_a_message_takes_the_path_of_fewest_links():
    cluster = cluster_of([("d0", "d1"), ("d1", "d2"), ("d0", "d2")], devices=3)
    assert Network(simpy.Environment(), cluster).path(0, 2)[0] == (("d0", "d2"),)


def test_devices_that_no_links_connect_are_the_users_to_mend():
    with pytest.raises(UserError, match="no path of links from d0 to d1"):
        transfers(cluster_of([], devices=2), (0, 1, 1, 0))


def test_a_factor_occupies_the_link_longer_without_carrying_more():
    env = simpy.Environment()
    network = Network(env, cluster_of([("d0", "d1")], devices=2, bandwidth=10.0))
    env.process(network.transfer(0, 1, 100.0, factor=1.5))
    env.run()
    assert env.now == pytest.approx(15.0)
    assert network.carried["d0", "d1"] == 100


def test_the_textbook_example_of_max_min_fairness():
    # four flows: three on a link of 1, one of them also on a link of 2 with the fourth
    paths = {0: [("a", "b")], 1: [("a", "b")], 2: [("a", "b"), ("b", "c")], 3: [("b", "c")]}
    rates = max_min_rates(paths, {("a", "b"): 1.0, ("b", "c"): 2.0})
    assert rates == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3, 3: 5 / 3})
