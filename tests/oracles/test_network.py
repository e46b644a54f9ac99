from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import by_link, cluster_of, star

from gssim.cluster import Cluster
from gssim.collectives import Hops, Stage
from gssim.engine.rendezvous import carry_prepared
from gssim.errors import UserError
from gssim.network import Clock, Network, Pace, Router, limited_rates
from gssim.network.folding import _pattern, _refined, _traffic, codes


def message(source: int, target: int, size: float) -> Stage:
    return Stage(Hops.of([(source, target, 1.0)]), size, coupled=False)


def network_of(env: Clock, cluster: Cluster, *stages: Stage) -> Network:
    return Network(env, Router(cluster.wiring), stages)


def transfers(cluster, *messages):
    """Return when each (source, target, bytes, start) has arrived, and the network."""
    env = Clock()
    stages = [message(*each[:3]) for each in messages]
    network = network_of(env, cluster, *stages)
    ended = {}

    def send(number, stage, start_s):
        yield env.timeout(start_s)
        yield from network.carry(stage)
        ended[number] = env.now

    for number, (stage, each) in enumerate(zip(stages, messages, strict=True)):
        env.process(send(number, stage, each[3]))
    env.run()
    return [ended[number] for number in range(len(messages))], network


def rates_between(cluster) -> dict[tuple[str, str], float]:
    wiring = cluster.wiring
    ends = zip(wiring.source.tolist(), wiring.target.tolist(), strict=True)
    return {
        (wiring.names[a], wiring.names[b]): rate
        for (a, b), rate in zip(ends, wiring.bandwidth_bytes_per_s.tolist(), strict=True)
    }


def test_a_link_without_a_direction_goes_both_ways_at_full_rate():
    both = cluster_of([("d0", "d1")], devices=2, bandwidth=5.0)
    assert rates_between(both) == {("d0", "d1"): 5.0, ("d1", "d0"): 5.0}
    directed = cluster_of([("d0", "d1")], devices=2, bandwidth=5.0, directed=True)
    assert rates_between(directed) == {("d0", "d1"): 5.0}


def test_parallel_links_add_up():
    assert rates_between(cluster_of([("d0", "d1"), ("d1", "d0")], devices=2, bandwidth=5.0))["d0", "d1"] == 10


def test_two_flows_share_a_link_and_the_one_that_stays_speeds_up():
    ended, _ = transfers(cluster_of([("d0", "d1")], devices=2, bandwidth=10.0), (0, 1, 100, 0), (0, 1, 20, 0))
    assert ended == pytest.approx([12.0, 4.0])


def test_a_flow_that_comes_later_takes_its_share_from_then_on():
    ended, _ = transfers(cluster_of([("d0", "d1")], devices=2, bandwidth=10.0), (0, 1, 100, 0), (0, 1, 20, 8))
    assert ended == pytest.approx([12.0, 12.0])


def test_a_flow_may_begin_in_the_moment_in_which_another_ends():
    cluster = cluster_of([("d0", "d1")], devices=2, bandwidth=10.0)
    ended, _ = transfers(cluster, (0, 1, 100, 0), (0, 1, 20, 10), (0, 1, 30, 12))
    assert ended == pytest.approx([10.0, 12.0, 15.0])


def test_ends_handle_messages_one_after_another_whether_they_are_prepared_or_not():
    """Two messages of 10 bytes on one link: it takes a second for each half, and a processor four for each of them."""
    stage, pace = message(0, 1, 10.0), Pace(processor_s=4.0)

    def ended_s(start):
        env = Clock()
        network, times_s = network_of(env, cluster_of([("d0", "d1")], devices=2, bandwidth=10.0), stage), []
        for delay_s in (0.0, 1.0):
            env.process(start(network, delay_s, lambda: times_s.append(env.now)))
        env.run()
        return times_s

    def carried(network, delay_s, ended):
        yield network.env.timeout(delay_s)
        yield from network.carry(stage, pace)
        ended()

    def prepared(network, delay_s, ended):
        yield network.env.timeout(delay_s)
        machine = SimpleNamespace(env=network.env, network=network)
        network.env.at = lambda time_s: network.env.timeout(time_s - network.env.now)
        carry_prepared(machine, network.prepared(stage, pace), 0.0, ended)

    assert ended_s(carried) == ended_s(prepared) == pytest.approx([4.0, 8.0])


def test_transfers_on_links_of_their_own_end_in_the_order_in_which_they_begin():
    """A pipeline's rank that exchanges two messages posts the next ones in that order, and one of gloo's notices goes
    behind a message that was posted before it.
    """
    env = Clock()
    stages = [message(0, 1, 100.0), message(1, 0, 100.0)]
    network = network_of(env, cluster_of([("d0", "d1")], devices=2, bandwidth=10.0), *stages)
    ended: list[Stage] = []

    def carry(stage: Stage):
        yield from network.carry(stage)
        ended.append(stage)

    for stage in stages:
        env.process(carry(stage))
    env.run()
    assert env.now == pytest.approx(10.0)
    assert ended == stages


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
    assert by_link(network) == {("d0", "sw"): 100, ("sw", "d0"): 0, ("d1", "sw"): 0, ("sw", "d1"): 100}


def test_a_message_takes_the_path_of_fewest_links_however_late():
    cluster = cluster_of([("d0", "d2"), ("d0", "d1"), ("d1", "d2")], devices=3, latency_s=1.0)
    slow = replace(cluster, links=(replace(cluster.links[0], latency_s=5.0), *cluster.links[1:]))
    ended, network = transfers(slow, (0, 2, 0, 0))
    assert ended == [5.0]
    assert all(bytes_ == 0 for bytes_ in by_link(network).values())


def test_of_paths_with_as_many_links_a_message_takes_those_of_least_latency():
    around = [("d0", "d1"), ("d1", "d3"), ("d0", "d2"), ("d2", "d3")]
    cluster = cluster_of(around, devices=4, latency_s=1.0, bandwidth=10.0)
    ended, network = transfers(cluster, (0, 3, 100, 0))
    assert ended == [2.0 + 5.0]  # half of it on each side
    assert by_link(network)["d0", "d1"] == by_link(network)["d2", "d3"] == 50
    nearer = replace(cluster, links=(*cluster.links[:3], replace(cluster.links[3], latency_s=0.5)))
    ended, network = transfers(nearer, (0, 3, 100, 0))
    assert ended == [1.5 + 10.0]
    assert by_link(network)["d0", "d1"] == 0


def test_devices_that_no_links_connect_are_the_users_to_mend():
    with pytest.raises(UserError, match="no path of links from d0 to d1"):
        transfers(cluster_of([], devices=2), (0, 1, 1, 0))


def test_a_factor_occupies_the_link_longer_without_carrying_more():
    env = Clock()
    stage = message(0, 1, 100.0)
    network = network_of(env, cluster_of([("d0", "d1")], devices=2, bandwidth=10.0), stage)
    env.process(network.carry(stage, Pace(factor=1.5)))
    env.run()
    assert env.now == pytest.approx(15.0)
    assert by_link(network)["d0", "d1"] == 100
    assert network.alone_s(stage, Pace(factor=1.5)) == pytest.approx(15.0)


@pytest.mark.parametrize("notices", [True, False])
def test_messages_over_one_connection_go_one_after_another(notices: bool):
    """gloo hands a connection the bytes of one message after another's; NCCL's kernels share the link.

    Measured in the lab: eight broadcasts of 256 KiB between two ranks, two at once, 10 ms apart at 100 Mbit/s, took 202
    ms, of which their bytes take 170; pairs that share the link make it 250.
    """
    env = Clock()
    stages = [message(0, 1, 100.0), message(0, 1, 50.0)]
    stages[1] = replace(stages[1], hops=stages[0].hops)
    network = network_of(env, cluster_of([("d0", "d1")], devices=2, bandwidth=10.0, latency_s=3.0), *stages)
    ends_s = []

    def carry(stage: Stage):
        yield from network.carry(stage, Pace(notices=notices))
        ends_s.append(env.now)

    for stage in stages:
        env.process(carry(stage))
    env.run()
    assert ends_s == pytest.approx([6 + 10, 6 + 15] if notices else [3 + 10, 3 + 15])


def test_notices_go_behind_the_bytes_that_two_ranks_exchange_already():
    """Measured in the lab: DDP's two buckets between two ranks, 10 ms apart, took 396 ms a step; 383 with notices that
    overtake, 421 with one bucket after the other.
    """
    env = Clock()
    both_ways = Stage(Hops.of([(0, 1, 1.0), (1, 0, 1.0)]), 100.0)
    later = replace(both_ways, size_bytes=50.0)
    network = network_of(env, cluster_of([("d0", "d1")], devices=2, bandwidth=10.0, latency_s=3.0), both_ways)
    ends_s = []

    def carry(stage: Stage, start_s: float):
        yield env.timeout(start_s)
        yield from network.carry(stage, Pace(notices=True))
        ends_s.append(env.now)

    env.process(carry(both_ways, 0.0))
    env.process(carry(later, 8.0))
    env.run()
    first_s = 6 + 10
    assert ends_s == pytest.approx([first_s, first_s + 6 + 5])


def test_a_latency_that_is_counted_elsewhere_does_not_count_twice():
    env = Clock()
    stage = message(0, 1, 100.0)
    network = network_of(env, cluster_of([("d0", "d1")], devices=2, bandwidth=10.0, latency_s=3.0), stage)
    env.process(network.carry(stage, Pace(latency=False)))
    env.run()
    assert env.now == network.alone_s(stage, Pace(latency=False)) == 10.0
    assert network.alone_s(stage) == 13.0


def test_hops_that_keep_pace_are_as_slow_as_the_slowest_and_take_their_mean_latency():
    cluster = cluster_of([("d0", "d1"), ("d1", "d2"), ("d2", "d0")], devices=3, bandwidth=10.0, latency_s=1.0)
    slow = replace(cluster.links[1], bandwidth_bytes_per_s=2.0, latency_s=4.0)
    cluster = replace(cluster, links=(cluster.links[0], slow, cluster.links[2]))
    stage = Stage(Hops.of([(0, 1, 1.0), (1, 2, 1.0), (2, 0, 1.0)]), 20.0, steps=3)
    env = Clock()
    network = network_of(env, cluster, stage)
    env.process(network.carry(stage))
    env.run()
    assert env.now == pytest.approx(3 * 2.0 + 20.0 / 2.0)
    assert {ends: size for ends, size in by_link(network).items() if size} == {
        ("d0", "d1"): 20.0,
        ("d1", "d2"): 20.0,
        ("d2", "d0"): 20.0,
    }


def test_the_textbook_example_of_max_min_fairness():
    # four flows: three on a link of 1, one of them also on a link of 2 with the fourth
    session, link = np.array([0, 1, 2, 2, 3]), np.array([0, 0, 0, 1, 1])
    rates = limited_rates(session, link, np.ones(5), np.array([1.0, 2.0]), sessions=4)[0]
    assert rates == pytest.approx([1 / 3, 1 / 3, 1 / 3, 5 / 3])


def test_a_session_that_loads_a_link_twice_gets_half_of_what_a_plain_one_would():
    rates = limited_rates(np.array([0]), np.array([0]), np.array([2.0]), np.array([10.0]), sessions=1)[0]
    assert rates.tolist() == [5.0]
    # rates are equal, not what they take of the link
    rates = limited_rates(np.array([0, 1]), np.array([0, 0]), np.array([3.0, 1.0]), np.array([8.0]), sessions=2)[0]
    assert rates.tolist() == [2.0, 2.0]


@given(st.data())
def test_flows_that_end_leave_the_rates_of_those_that_they_did_not_limit(data):
    links, flows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    paths = data.draw(st.lists(st.sets(st.integers(0, links - 1), min_size=1), min_size=flows, max_size=flows))
    capacity = np.array(data.draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 10.0]), min_size=links, max_size=links)))
    session, link = (
        np.array(each) for each in zip(*((s, place) for s, p in enumerate(paths) for place in p), strict=True)
    )
    rates, limit = limited_rates(session, link, np.ones(len(link)), capacity, sessions=flows)
    assert all(place in path for place, path in zip(limit.tolist(), paths, strict=True))
    gone = data.draw(st.integers(0, flows - 1))
    left = session != gone
    after = limited_rates(session[left], link[left], np.ones(left.sum()), capacity, sessions=flows)[0]
    stay = [s for s in range(flows) if s != gone]
    if not set(limit[stay].tolist()) & paths[gone]:
        assert after[stay] == pytest.approx(rates[stay], rel=1e-12)


def test_a_session_on_no_link_is_held_up_by_nothing():
    rates = limited_rates(np.array([1]), np.array([0]), np.array([1.0]), np.array([8.0]), sessions=2)[0]
    assert rates.tolist() == [np.inf, 8.0]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(1, 1e3), st.floats(0, 20)), max_size=10))
def test_only_what_is_touched_is_shared_anew_and_that_is_as_good_as_all(messages):
    """A star and a line that share no link."""
    links = [*((f"d{i}", "sw") for i in range(3)), ("d3", "d4"), ("d4", "d5")]
    cluster = cluster_of(links, devices=6, bandwidth=10.0)
    inside = [each for each in messages if each[0] != each[1] and (each[0] < 3) == (each[1] < 3)]
    partly, _ = transfers(cluster, *inside)
    with patch.object(
        Network, "_touching", lambda self, one: [one, *(each for each in self.active if each is not one)]
    ):
        whole, _ = transfers(cluster, *inside)
    assert partly == pytest.approx(whole, rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.sampled_from([0, 2]), st.floats(1, 1e12), st.floats(0, 1e6)), min_size=1, max_size=8))
def test_a_session_alone_ends_when_and_as_it_does_where_rates_are_shared(messages):
    cluster = cluster_of([("d0", "d1"), ("d2", "d3")], devices=4, bandwidth=7e9)
    inside = [(first, first + 1, size, start_s) for first, size, start_s in messages]
    found = transfers(cluster, *inside)[0]
    with patch.object(Network, "_go_alone", lambda self, transfer: self._share([transfer])):
        assert found == transfers(cluster, *inside)[0], "to the last digit"


def test_flows_on_other_links_are_not_shared_anew():
    cluster = cluster_of([("d0", "d1"), ("d2", "d3")], devices=4, bandwidth=10.0)
    solved = []
    share, go_alone = Network._share, Network._go_alone

    def shared(self, found):
        solved.append([sorted(transfer.links) for transfer in found])
        share(self, found)

    def alone(self, transfer):
        solved.append([sorted(transfer.links)])
        go_alone(self, transfer)

    with patch.object(Network, "_share", shared), patch.object(Network, "_go_alone", alone):
        ended, _ = transfers(cluster, (0, 1, 100, 0), (2, 3, 50, 1), (0, 1, 20, 2))
    assert ended == pytest.approx([12.0, 6.0, 6.0])
    assert [len(each) for each in solved] == [1, 1, 2, 1]
    (first,), (second,) = solved[:2]
    assert not set(first) & set(second)


@given(
    st.lists(st.integers(0, 5000), min_size=12, max_size=12),
    st.sampled_from([1e4, 7e6]),
    st.sampled_from([0.0, 1e-2, 1e3]),
)
def test_the_time_of_unequal_messages_on_idle_links_is_that_by_the_clock(sizes, factor, latency_s):
    """Four ranks on a switch, one of whose links is slower: rates are proportional to what links carry.

    With latencies, of which one link has half, messages begin at three times.
    """
    pairs = [(source, target) for source in range(4) for target in range(4) if source != target]
    messages = [(*pair, float(size)) for pair, size in zip(pairs, sizes, strict=True)]
    stage = Stage(Hops.of(messages), factor, coupled=False)
    for bandwidth in (70.0, 21.0):
        cluster = star(4, bandwidth=bandwidth, latency_s=latency_s)
        first, *rest = cluster.links
        slow = replace(first, bandwidth_bytes_per_s=bandwidth / 7, latency_s=latency_s / 2)
        network = network_of(Clock(), replace(cluster, links=(slow, *rest)), stage)
        by_clock_s = pytest.approx(network.alone_s(stage), rel=1e-12)
        prepared = network.prepared(stage, Pace())
        assert (prepared is None) == bool(latency_s)
        if prepared is not None:
            assert network.on_idle_links_s(prepared) == by_clock_s
        assert network.stage_on_idle_links_s(stage, Pace()) == by_clock_s


@given(st.lists(st.sampled_from([0.0, 1.0, 1.0 + 1e-14, 1.0 + 1e-9, 3e5, 1e-30]), max_size=12))
def test_codes_of_runs_are_those_of_the_values_one_by_one(values):
    mantissa, exponent = np.frexp(np.array(values))
    rounded = np.ldexp(np.round(mantissa * 2.0**40), exponent - 40)
    assert codes(np.array(values)).tolist() == np.unique(rounded, return_inverse=True)[1].tolist()


pairs = st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from([0.5, 1.0, 3.0])).filter(lambda e: e[0] != e[1])


@given(
    st.lists(st.tuples(st.lists(pairs, max_size=5, unique_by=lambda e: e[:2]), st.booleans()), min_size=1, max_size=4)
)
def test_traffic_of_several_sets_of_hops_at_once_is_that_of_each_alone(hop_sets):
    router = Router(star(5).wiring)
    patterns = [_pattern(router, Hops.of(hops), coupled) for hops, coupled in hop_sets]
    links, colours = _refined(patterns, router.wiring.bandwidth_bytes_per_s)
    representative = np.zeros(len(links), dtype=bool)
    representative[np.unique(links, return_index=True)[1]] = True
    at_once = _traffic(patterns, colours, links, representative)
    for pattern, colour, one in zip(patterns, colours, at_once, strict=True):
        (alone,) = _traffic([pattern], [colour], links, representative)
        assert (one.carried_link.tolist(), one.carried.tolist()) == (
            alone.carried_link.tolist(),
            alone.carried.tolist(),
        )
        for a, b in zip(one.groups, alone.groups, strict=True):
            for field in fields(a):
                assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name


LEAF = [(f"d{source}", "sw") for source in range(5)] + [("sw", f"d{target}") for target in range(5, 10)]
"""Links from five senders to a switch, and from there to five receivers."""


@given(st.data())
def test_equal_sessions_end_together_as_each_for_itself_whatever_crosses_their_links(data):
    """Some of the sessions share a receiver; other messages come and go at any time, at the same instants too."""
    cluster = cluster_of(LEAF, devices=10, bandwidth=8.0, directed=True)
    targets = data.draw(st.lists(st.integers(5, 9), min_size=2, max_size=5))
    equal = [message(source, target, 16.0) for source, target in enumerate(targets)]
    times_s = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 4.0])
    starts_s = data.draw(st.lists(times_s, min_size=1, max_size=2, unique=True))
    ends = st.tuples(st.integers(0, 4), st.integers(5, 9), st.sampled_from([4.0, 16.0, 20.0]), times_s)
    others = [(message(source, target, size), at_s) for source, target, size, at_s in data.draw(st.lists(ends))]

    def ended_s(*, jointly):
        env = Clock()
        network = network_of(env, cluster, *equal, *(stage for stage, _ in others))
        several = [network.prepared(stage, Pace()) for stage in equal]
        joint, log = network.joint(several), []

        def start(at_s):
            yield env.timeout(at_s)
            if jointly and joint is not None:
                network.start_joint(joint, lambda number: log.extend([("equal", env.now)] * number))
            else:
                for each in several:
                    network.start(each, lambda: log.append(("equal", env.now)))

        def send(number, stage, at_s):
            yield env.timeout(at_s)
            network.start(network.prepared(stage, Pace()), lambda: log.append((number, env.now)))

        for at_s in starts_s:
            env.process(start(at_s))
        for number, (stage, at_s) in enumerate(others):
            env.process(send(number, stage, at_s))
        env.run()
        return joint, log

    (joint, together), (_, apart) = ended_s(jointly=True), ended_s(jointly=False)
    assert together == apart  # in this order, at exactly these times
    assert joint is not None or len(set(targets)) < len(targets)
