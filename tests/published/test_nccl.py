import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import communicated

from gssim.cluster import GENERATIONS, NcclTuning
from gssim.collectives import Communication
from gssim.collectives.nccl import Group, fit, ring_packing, times, ways
from gssim.engine import Scheduler
from gssim.network import Router
from gssim.scenario import load_cluster

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"

KINDS = ["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "send", "all-to-all"]
RING_SIMPLE = ("ring", "simple")
NODE = Group(ranks=8, bandwidth_bytes_per_s=300e9)
TWO_NODES = Group(ranks=16, nodes=2, bandwidth_bytes_per_s=300e9, network_bytes_per_s=25e9)

groups = st.builds(
    lambda nodes, per_node, rate, network, nvls: Group(
        ranks=nodes * per_node,
        nodes=nodes,
        bandwidth_bytes_per_s=rate,
        network_bytes_per_s=network,
        nvls=nvls,
    ),
    nodes=st.integers(1, 6),
    per_node=st.integers(1, 8),
    rate=st.floats(1e9, 1e12),
    network=st.floats(1e8, 1e11),
    nvls=st.booleans(),
).filter(lambda group: group.ranks > 1)
tunings = st.builds(
    lambda name, latency_s, hops, pipeline_s: replace(
        GENERATIONS[name], latency_s=latency_s, simple_hop_ratio=hops, pipeline_latency_s=pipeline_s
    ),
    name=st.sampled_from(sorted(GENERATIONS)),
    latency_s=st.floats(0, 1e-3),
    hops=st.floats(0.1, 20),
    pipeline_s=st.floats(0, 1e-4),
)
sizes = st.floats(1, 1e11)


def test_the_defaults_are_the_published_formulas():
    """Eight A100, by hand: ring LL 6.6 + 14 * 0.6 us, ring Simple 8.4 + 14 * 3.4 us and 2 * 7/8 bytes at 240 GB/s."""
    small, large = times(NcclTuning(), "all-reduce", 0, NODE), times(NcclTuning(), "all-reduce", 2**30, NODE)
    assert (small.algorithm, small.protocol) == ("ring", "ll")
    assert small.time_s == pytest.approx(15.0e-6)
    assert (large.algorithm, large.protocol) == ("ring", "simple")
    assert large.latency_s == pytest.approx(56.0e-6)
    assert large.time_s == pytest.approx(56.0e-6 + 1.75 * 2**30 / 240e9)


def test_low_latency_is_bound_by_the_gpu_not_by_its_links():
    """LL moves 87.7 GB/s through an A100, however fast its links: 1.75 * 256 KiB / 87.7 GB/s."""
    for rate in (300e9, 900e9):
        choice = times(NcclTuning(), "all-reduce", 2**18, replace(NODE, bandwidth_bytes_per_s=rate))
        assert choice.protocol == "ll"
        assert choice.time_s == pytest.approx(15.0e-6 + 1.75 * 2**18 / 87.7e9)


def test_a_tree_across_two_nodes_sends_every_byte_once():
    """Tree on 2 x 8: 8.4 + 2 * (7 * 4 + 14) us, and each of eight network parts carries an eighth, at 0.92 * 0.96."""
    choice = times(NcclTuning(), "all-reduce", 2**33, TWO_NODES)
    assert (choice.algorithm, choice.protocol) == ("tree", "simple")
    assert choice.latency_s == pytest.approx(92.4e-6)
    assert choice.network_bytes == 2**30
    assert choice.network_bandwidth_ratio == pytest.approx(0.92 * 0.96)


def test_only_a_large_all_reduce_ring_across_nodes_has_the_plateau():
    """Beyond 64 bytes a channel and rank, 64 * 16 * 6 here, the ring's 8.4 + 2 * 5 * 14 us count 1.4 times."""
    wide = Group(ranks=6, nodes=6, bandwidth_bytes_per_s=300e9, network_bytes_per_s=25e9)
    no_tree = {"ll_nodes_bytes_per_s": 1.0, "simple_hop_ratio": 1.0}
    gathered = [times(replace(NcclTuning(), **no_tree), "all-gather", size, wide).latency_s for size in (6143, 6145)]
    assert gathered == pytest.approx([78.4e-6, 78.4e-6])
    ring = next(way for way in ways(NcclTuning(), "all-reduce", wide) if (way.algorithm, way.protocol) == RING_SIMPLE)
    assert ring.latency_s(np.array([6143.0, 6144.0])) == pytest.approx([148.4e-6, 1.4 * 148.4e-6])


def test_in_switch_reduction_needs_a_switch_that_can_and_enough_ranks():
    hopper, node = GENERATIONS["hopper"], replace(NODE, bandwidth_bytes_per_s=450e9, nvls=True)
    assert times(hopper, "all-reduce", 2**30, node).algorithm == "nvls"
    assert times(hopper, "all-gather", 2**30, node).algorithm == "ring"
    assert times(hopper, "all-reduce", 2**30, replace(node, ranks=4)).algorithm == "ring"
    assert times(hopper, "all-reduce", 2**30, replace(node, nvls=False)).algorithm == "ring"
    assert times(GENERATIONS["ampere"], "all-reduce", 2**30, node).algorithm == "ring"
    in_switch = times(hopper, "all-reduce", 2**30, node)
    assert in_switch.node_bytes == 1.125 * 2**30
    assert in_switch.bandwidth_ratio == pytest.approx(0.85 * 0.8)


@pytest.mark.parametrize(
    ("kind", "share"),
    [("all-reduce", 1.75), ("all-gather", 0.875), ("reduce-scatter", 0.875), ("broadcast", 1), ("all-to-all", 0.875)],
)
def test_large_messages_move_the_bytes_of_their_algorithm(kind, share):
    choice = times(NcclTuning(), kind, 2**34, NODE)
    assert choice.node_bytes == share * 2**34
    assert choice.time_s == pytest.approx(share * 2**34 / 240e9, rel=1e-2)


def test_a_send_crosses_what_lies_between():
    near, far = replace(NODE, ranks=2), replace(TWO_NODES, ranks=2)
    assert times(NcclTuning(), "send", 2**30, near).node_bytes == 2**30
    assert times(NcclTuning(), "send", 2**30, far).network_bytes == 2**30
    assert times(NcclTuning(), "send", 2**30, far).node_bytes == 0


def test_a_lone_rank_needs_no_time():
    assert times(NcclTuning(), "all-reduce", 2**30, replace(NODE, ranks=1)).time_s == 0


def test_chunk_pipelining_adds_twice_the_root_of_latency_times_transfer():
    piped = times(NcclTuning(pipeline_latency_s=1e-6), "all-reduce", 2**30, NODE)
    plain = times(NcclTuning(), "all-reduce", 2**30, NODE)
    transfer_s = 1.75 * 2**30 / 240e9
    assert piped.time_s - plain.time_s == pytest.approx(2 * math.sqrt(1e-6 * transfer_s))


@given(tuning=tunings, kind=st.sampled_from(KINDS), size=sizes, group=groups)
def test_time_is_latency_and_the_slower_transfer(tuning, kind, size, group):
    choice = times(tuning, kind, size, group)
    assert choice.latency_s >= 0
    assert 0 < choice.bandwidth_ratio <= 1
    assert 0 < choice.network_bandwidth_ratio <= 1
    node_s = choice.node_bytes / (group.bandwidth_bytes_per_s * choice.bandwidth_ratio)
    network_s = choice.network_bytes / (group.network_bytes_per_s * choice.network_bandwidth_ratio)
    assert choice.time_s == pytest.approx(choice.latency_s + max(node_s, network_s))


@given(tuning=tunings, kind=st.sampled_from(KINDS), size=sizes, more=st.floats(1, 100), group=groups)
def test_larger_messages_are_never_faster(tuning, kind, size, more, group):
    assert times(tuning, kind, size * more, group).time_s >= times(tuning, kind, size, group).time_s * (1 - 1e-12)


@given(tuning=tunings, kind=st.sampled_from(KINDS), size=sizes, more=st.floats(1, 100), group=groups)
def test_more_bandwidth_is_never_slower(tuning, kind, size, more, group):
    faster = replace(
        group,
        bandwidth_bytes_per_s=group.bandwidth_bytes_per_s * more,
        network_bytes_per_s=group.network_bytes_per_s * more,
    )
    assert times(tuning, kind, size, faster).time_s <= times(tuning, kind, size, group).time_s * (1 + 1e-12)


def test_what_is_no_collective_is_refused():
    with pytest.raises(ValueError, match="allowed: all-reduce"):
        times(NcclTuning(), "gossip", 1, NODE)
    with pytest.raises(ValueError, match="negative"):
        times(NcclTuning(), "all-reduce", -1, NODE)
    with pytest.raises(ValueError, match="network_bytes_per_s"):
        Group(ranks=16, nodes=2, bandwidth_bytes_per_s=300e9)
    with pytest.raises(ValueError, match="nodes"):
        Group(ranks=2, nodes=3, bandwidth_bytes_per_s=300e9, network_bytes_per_s=1e9)


PLANTED_IN = [
    (NODE, "bandwidth_ratio"),
    (replace(NODE, ranks=2), "bandwidth_ratio"),
    (replace(TWO_NODES, bandwidth_bytes_per_s=900e9), "network_bandwidth_ratio"),
]
PLANTED_TIMES = [(1e-6, 1.0, 0.0), (2e-5, 0.5, 2e-6), (1e-4, 3.0, 1e-5)]
PLANTED_RATIOS = [0.5, 0.75, 0.95]


@pytest.mark.parametrize(
    ("group", "name", "latency_s", "hops", "pipeline_s", "ratio"),
    [  # all pairs of a group, times and a ratio are quick
        pytest.param(*PLANTED_IN[i], *PLANTED_TIMES[j], ratio, marks=[pytest.mark.slow] if (i + j + k) % 3 else [])
        for i in range(3)
        for j in range(3)
        for k, ratio in enumerate(PLANTED_RATIOS)
    ],
)
def test_fit_recovers_what_was_planted(group, name, latency_s, hops, pipeline_s, ratio):
    ratios = {name: ratio}
    planted = NcclTuning(latency_s=latency_s, simple_hop_ratio=hops, pipeline_latency_s=pipeline_s, **ratios)
    table = [(2.0**k, times(planted, "all-reduce", 2.0**k, group).time_s) for k in range(3, 34)]
    found = fit(table[::2], group, start=NcclTuning())
    wrong = [abs(times(found, "all-reduce", size, group).time_s / time_s - 1) for size, time_s in table]
    assert sum(wrong) / len(wrong) < 0.02
    # not closer: LL128, at 0.92 of the rate, can stand in for the Simple protocol
    assert getattr(found, name) == pytest.approx(ratio, rel=0.1)


def test_fit_finds_a_network_slower_than_the_links_that_hid_it_at_the_start():
    planted = NcclTuning(network_bandwidth_ratio=0.4)
    table = [(2.0**k, times(planted, "all-reduce", 2.0**k, TWO_NODES).time_s) for k in range(10, 34)]
    assert fit(table, TWO_NODES, start=NcclTuning()).network_bandwidth_ratio == pytest.approx(0.4, rel=0.05)


def test_fit_is_deterministic_and_blind_to_order_and_empty_rows():
    table = [(2.0**k, times(NcclTuning(latency_s=3e-5), "all-reduce", 2.0**k, NODE).time_s) for k in range(10, 31)]
    assert fit(table, NODE) == fit([*table[::-1], (0.0, 1e-5), (8.0, 0.0)], NODE)


def test_fit_shrugs_at_an_outlier():
    planted = NcclTuning(latency_s=3e-5, bandwidth_ratio=0.7)
    table = [(2.0**k, times(planted, "all-reduce", 2.0**k, NODE).time_s) for k in range(20, 32)]
    table[5] = (table[5][0], table[5][1] * 4)
    assert fit(table, NODE, start=NcclTuning()).bandwidth_ratio == pytest.approx(0.7, rel=0.05)


def test_fit_needs_four_sizes():
    with pytest.raises(ValueError, match="four sizes"):
        fit([(2**20, 1e-4), (2**20, 1e-4), (2**21, 1e-4), (2**22, 1e-4)], NODE)


# NVLinks between the V100 of a DGX-1V (DGX-1 system architecture white paper, figure 4): every GPU has six
DGX1V = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
]


def part(gpus):
    return [[DGX1V[i][j] * 25e9 for j in gpus] for i in gpus]


def check_packing(rates):
    """Every ring passes all GPUs once, and no link carries more than it can."""
    rings = ring_packing(rates)
    load = {}
    for order, rate in rings:
        assert sorted(order) == list(range(len(rates)))
        assert rate > 0
        for link in zip(order, [*order[1:], order[0]], strict=True):
            load[link] = load.get(link, 0.0) + rate
    assert all(total <= rates[i][j] * (1 + 1e-6) for (i, j), total in load.items())
    return sum(rate for _, rate in rings)


def test_a_dgx1v_packs_all_six_links_of_every_gpu():
    assert check_packing(part(range(8))) == pytest.approx(6 * 25e9)


def test_pairs_of_a_dgx1v_have_one_link_or_two():
    assert ring_packing(part([0, 1])) == [((0, 1), 25e9)]
    assert ring_packing(part([0, 3])) == [((0, 1), 50e9)]
    with pytest.raises(ValueError, match="no ring"):
        ring_packing(part([0, 5]))


def test_four_gpus_of_a_dgx1v_leave_links_idle():
    """In a half, 0-1-2-3 have 4, 4, 5 and 5 links to each other: no more than four rings pass GPU 0."""
    assert check_packing(part([0, 1, 2, 3])) == pytest.approx(4 * 25e9)


def test_links_of_unequal_directions_and_equal_ones():
    assert ring_packing([[0, 10.0], [20.0, 0]]) == [((0, 1), 10.0)]
    assert check_packing([[0 if i == j else 7.0 for j in range(5)] for i in range(5)]) == pytest.approx(28.0)


@given(scale=st.floats(1e-3, 1e12))
def test_packing_scales_with_the_rates(scale):
    total = sum(rate for _, rate in ring_packing([[DGX1V[i][j] * scale for j in range(4)] for i in range(4)]))
    assert total == pytest.approx(4 * scale)


@pytest.mark.parametrize("rates", [[[0.0]], [[0, 1.0]], [[0, -1.0], [1.0, 0]], [[1.0] * 9] * 9])
def test_what_is_no_matrix_of_links_is_refused(rates):
    with pytest.raises(ValueError, match="links"):
        ring_packing(rates)


@pytest.mark.parametrize(
    ("kind", "size_bytes"),
    [("all-reduce", 2**27), ("all-reduce", 2**30)]  # in rings: trees of smaller ones overlap their links by themselves
    + [(kind, size) for kind in ("all-gather", "reduce-scatter") for size in (2**18, 2**22, 2**30)],
)
def test_a_simulated_collective_takes_what_the_tuner_expects_within_nodes_and_across(kind, size_bytes):
    """LL is bound by a GPU's stores, whatever its links are: then a slower network than these is not slowed down too.

    2 nodes of 8 H100, 512 KiB: 28 us inside, 17 us across.
    """
    cluster = load_cluster(SCENARIOS / "clusters/two-dgx-h100.toml")
    scheduler = Scheduler(cluster, Router(cluster.wiring), len(cluster.devices))
    communication = Communication(kind, tuple(range(16)), size_bytes)
    expected = times(cluster.nccl, kind, size_bytes, scheduler.nccl_group(communication.group))
    assert communicated(cluster, communication).ends_s[0][-1] == pytest.approx(expected.time_s, rel=1e-3)
