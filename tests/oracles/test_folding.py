"""Folding: equivalent ranks and links are simulated once, and no result changes."""

from dataclasses import replace

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from point_checks import RELATIVE, assert_same_as_unfolded
from strategies import (
    built,
    by_link,
    by_rank,
    bytes_by_rank,
    collectives_on,
    communicated,
    device_type,
    fabrics,
    link_type,
    loaded_of,
    machine_of,
    scenario_of,
    star,
    topology,
    wired_scenarios,
)

from gssim.collectives import Communication
from gssim.scenario import Scenario
from gssim.simulation import simulate


def assert_folding_changes_nothing(scenario: Scenario) -> None:
    assert_same_as_unfolded(*(simulate(loaded_of(scenario), unfolded=each).result for each in (False, True)))


@pytest.mark.parametrize(
    "method", ["ddp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("zero1", "zero2")), "zero3", "gs"]
)
@settings(max_examples=examples(20))
@given(st.data())
def test_folding_changes_nothing_whatever_the_cluster_and_plan(method, data):
    scenario = data.draw(wired_scenarios(methods=(method,)))
    recompute = data.draw(st.sampled_from(["none", "full"]))
    assert_folding_changes_nothing(replace(scenario, plan=replace(scenario.plan, recompute=recompute)))


def test_the_root_of_a_broadcast_sends_and_the_last_rank_only_receives():
    machine = communicated(star(4), Communication("broadcast", range(4), 1000))
    assert bytes_by_rank(machine) == ([2000, 1000, 0, 0], [0, 1000, 1000, 1000])
    machine = communicated(star(4), Communication("broadcast", range(4), 1000, root=2))
    assert bytes_by_rank(machine) == ([0, 0, 2000, 1000], [1000, 1000, 0, 1000])


@settings(max_examples=examples(150))
@given(st.data())
def test_one_collective_folded_takes_as_long_and_loads_every_link_as_unfolded(data):
    cluster, communication = data.draw(collectives_on(data.draw(fabrics())))
    folded, unfolded = (communicated(cluster, communication, unfolded=each) for each in (False, True))
    assert folded.env.now == pytest.approx(unfolded.env.now, rel=RELATIVE)
    assert by_link(folded.network) == pytest.approx(by_link(unfolded.network), rel=RELATIVE, abs=1e-6)


def test_latencies_hidden_by_messages_in_flight_do_not_depend_on_groups_that_share_links():
    plan = {"method": "hsdp", "dp_replicate": 3, "dp_shard": 2, "exchange": "backend"}
    scenario = scenario_of(built(topology("ring", count=6, latency_s=1e-3)), plan, global_batch_size=6)
    assert_folding_changes_nothing(scenario)


def classes_of(scenario: Scenario) -> tuple[int, int, int]:
    """Return how many classes of ranks, links, and sessions a simulation keeps."""
    machine, _ = machine_of(scenario)
    folded = machine.network.folded
    sessions = sum(len(group.unit_bytes) for each in folded.traffic.values() for group in each.groups)
    return len(machine.classes), len(folded.capacity), sessions


def servers(*groups: dict, fabric: dict | None = None) -> dict:
    """Return eight-device servers with NVSwitch and a card for every device."""
    usual = {
        "count": 4,
        "device": "fast",
        "devices": 8,
        "inside": "nvswitch",
        "inside_link": link_type(1e9, 3e-6),
        "nics": 8,
        "nic_link": link_type(1e8, 5e-6),
        "pcie_link": link_type(3e8, 2e-6),
    }
    return {"kind": "servers", "servers": [usual | each for each in groups], "fabric": fabric or {"kind": "switch"}}


SYMMETRIC = {
    "switch": topology("switch", count=256, devices_per_host=8, latency_s=1e-5),
    "ring": topology("ring", count=256, devices_per_host=8, latency_s=1e-5),
    "torus": topology("torus", device="fast", shape=(8, 8, 4), host_shape=(2, 2, 1), latency_s=1e-5),
    "servers": servers({"count": 32}),
    "leaf-spine": servers({"count": 32}, fabric={"kind": "leaf-spine", "servers_per_leaf": 4, "spines": 4}),
    "rails": servers({"count": 32}, fabric={"kind": "leaf-spine", "servers_per_leaf": 4, "spines": 4, "rails": True}),
}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("name", SYMMETRIC)
def test_256_equal_ranks_in_a_symmetric_network_are_a_few_classes(name, backend):
    coupled = {"fast": device_type(neighbour_slowdown_ratio=1.5, communicating_slowdown_ratio=1.25)}
    cluster = built(SYMMETRIC[name], types=coupled, backend=backend)
    ranks, links, sessions = classes_of(scenario_of(cluster, {"method": "ddp"}, global_batch_size=256))
    assert len(cluster.devices) == 256
    assert ranks == 1
    assert links <= 24
    assert sessions <= 4


def test_every_pair_of_64_devices_around_a_switch_is_one_flow_and_one_link():
    cluster = built(topology("switch", count=64), algorithms={"all-reduce": "direct"})
    assert classes_of(scenario_of(cluster, {"method": "ddp"}, global_batch_size=64)) == (1, 1, 1)


def test_two_kinds_of_servers_are_two_classes_of_ranks():
    types = {"fast": device_type(), "slow": device_type(peak_flop_per_s={"fp32": 1e8})}
    cluster = built(servers({"count": 3}, {"count": 5, "device": "slow"}), types=types, backend="nccl")
    ranks, links, _ = classes_of(scenario_of(cluster, {"method": "ddp"}, global_batch_size=64))
    assert ranks == 2
    assert links < 30


def test_unfolded_every_rank_link_and_flow_stands_for_itself():
    cluster = built(topology("switch", count=8), algorithms={"all-reduce": "direct"})
    scenario = scenario_of(cluster, {"method": "ddp"})
    machine, _ = machine_of(scenario, unfolded=True)
    assert [each.members.tolist() for each in machine.classes] == [[rank] for rank in range(8)]
    assert len(machine.network.folded.capacity) == cluster.wiring.links
    sessions = [len(g.unit_bytes) for each in machine.network.folded.traffic.values() for g in each.groups]
    assert sessions == [56]


def test_one_slower_link_is_a_class_of_its_own_in_both_directions_and_the_others_stay_together():
    cluster = replace(star(8), algorithms={"all-reduce": "direct"})
    slow = replace(cluster.links[3], bandwidth_bytes_per_s=5e5)
    cluster = replace(cluster, links=(*cluster.links[:3], slow, *cluster.links[4:]))
    machine = communicated(cluster, Communication("all-reduce", range(8), 8000))
    _, sizes = np.unique(machine.network.folded.link_class, return_counts=True)
    assert sorted(sizes.tolist()) == [2, 14]
    assert machine.env.now == pytest.approx(2 * 7 * 1000 / 5e5)


def test_one_later_link_tells_its_flows_apart_though_all_are_as_fast():
    cluster = replace(star(4, latency_s=1.0, backend="nccl"), algorithms={"all-to-all": "direct"})
    late = replace(cluster.links[3], latency_s=5.0)
    cluster = replace(cluster, links=(*cluster.links[:3], late))
    both = [communicated(cluster, Communication("all-to-all", range(4), 4e6), unfolded=each) for each in (False, True)]
    # two of three messages of a port begin at 2 s and share it for 4 s; what is left shares it with the third, from 6 s
    assert [machine.env.now for machine in both] == pytest.approx([9.0, 9.0])
    sessions = [len(g.unit_bytes) for each in both[0].network.folded.traffic.values() for g in each.groups]
    assert sessions == [1, 1]


def test_classes_that_meet_on_a_host_slow_each_other_though_their_first_members_are_on_different_ones():
    types = {"one": device_type(), "two": device_type(neighbour_slowdown_ratio=1.25)}
    cluster = star(4, types=types, type_names=["one", "two", "two", "one"])
    hosts = ("a", "b", "a", "b")
    devices = tuple(replace(each, host=host) for each, host in zip(cluster.devices, hosts, strict=True))
    assert_folding_changes_nothing(scenario_of(replace(cluster, devices=devices), {"method": "ddp"}))


@given(fabrics())
def test_ranks_of_a_class_have_equal_types_and_their_hosts_as_many_of_every_class(cluster):
    machine = communicated(cluster, Communication("all-reduce", range(len(cluster.devices)), 1000))
    of_rank = by_rank(machine, list(range(len(machine.classes))))
    assert sorted(rank for each in machine.classes for rank in each.members.tolist()) == list(range(len(of_rank)))
    for each in machine.classes:
        assert each.on_host <= len(each.members)
        assert each.host in {cluster.devices[rank].host for rank in each.members.tolist()}
