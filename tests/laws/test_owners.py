"""Shard shares by memory and by cost: feasible, as good as any, and the same whatever the units and names."""

from dataclasses import astuple, replace
from itertools import product

import numpy as np
import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import cluster_of, device_type, tiny_model

from gssim.cluster import Cluster
from gssim.errors import UserError
from gssim.plan.shard_sizing import InfeasibleError, OwnerTimes, cost_shares, memory_shares, owner_time_s
from gssim.scenario import Loaded, Scenario, check
from gssim.scenario.ownership import USABLE_RATIO, activation_bytes, held_bytes, owned_bytes, rank_rates
from gssim.simulation import simulate
from gssim.units import validated

ROOMS = st.lists(st.tuples(st.floats(1, 100), st.floats(0, 1)), min_size=1, max_size=6)
"""(Capacity, part of it that is held anyway) of every rank."""


def fullness(capacity, held, whole, shares):
    return max((h + s * whole) / c for c, h, s in zip(capacity, held, shares, strict=True))


def room_of(rooms, part):
    """Return capacity, held, and a whole that takes `part` of what is left."""
    capacity, held = [c for c, _ in rooms], [c * used for c, used in rooms]
    whole = part * (sum(capacity) - sum(held))
    assume(whole > 1e-3)
    return capacity, held, whole


@given(ROOMS, st.floats(0.01, 1 - 1e-6))
def test_shares_by_memory_fit_wherever_any_do(rooms, part):
    capacity, held, whole = room_of(rooms, part)
    shares = memory_shares(capacity_bytes=capacity, held_bytes=held, whole_bytes=whole)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0
    assert fullness(capacity, held, whole, shares) <= 1 + 1e-6


@given(ROOMS, st.floats(0.01, 0.99))
def test_by_memory_no_rank_that_takes_a_share_is_fuller_than_another(rooms, part):
    """So no other shares lower the maximum: what the fullest rank gave up, an equally full one would take."""
    capacity, held, whole = room_of(rooms, part)
    shares = memory_shares(capacity_bytes=capacity, held_bytes=held, whole_bytes=whole)
    levels = [(h + s * whole) / c for c, h, s in zip(capacity, held, shares, strict=True)]
    taking = [level for level, share in zip(levels, shares, strict=True) if share > 1e-6]
    assert max(taking) <= min(levels) + 1e-4 * max(1.0, whole / min(capacity))


@given(ROOMS, st.floats(0.01, 0.99), st.floats(0.1, 1e12), st.randoms())
def test_by_memory_neither_units_nor_the_order_of_ranks_matter(rooms, part, unit, random):
    capacity, held, whole = room_of(rooms, part)
    shares = memory_shares(capacity_bytes=capacity, held_bytes=held, whole_bytes=whole)
    order = list(range(len(rooms)))
    random.shuffle(order)
    other = memory_shares(
        capacity_bytes=[unit * capacity[i] for i in order],
        held_bytes=[unit * held[i] for i in order],
        whole_bytes=unit * whole,
    )
    assert other == pytest.approx([shares[i] for i in order], abs=1e-7)


@given(ROOMS, st.floats(1.001, 9))
def test_by_memory_what_does_not_fit_is_refused_with_the_excess(rooms, part):
    capacity, held, whole = room_of(rooms, part)
    with pytest.raises(InfeasibleError) as error:
        memory_shares(capacity_bytes=capacity, held_bytes=held, whole_bytes=whole)
    assert error.value.rank is None
    assert error.value.excess_bytes == pytest.approx(whole + sum(held) - sum(capacity))


def test_by_memory_a_rank_that_is_too_full_already_is_named():
    with pytest.raises(InfeasibleError) as error:
        memory_shares(capacity_bytes=[10, 10, 10], held_bytes=[1, 13, 1], whole_bytes=5)
    assert (error.value.rank, error.value.excess_bytes) == (1, 3)


SECONDS = st.floats(0.01, 10)


def times_of(ranks):
    return st.builds(OwnerTimes, *[st.tuples(*[SECONDS] * ranks)] * 5)


@st.composite
def owner_cases(draw):
    """Return the times of a few ranks, and limits on their shares that leave room."""
    ranks = draw(st.integers(1, 4))
    most = draw(st.tuples(*[st.floats(0.05, 1.5)] * ranks))
    assume(sum(min(1.0, each) for each in most) > 1.001)
    return draw(times_of(ranks)), most


@settings(max_examples=examples(40), deadline=None)
@given(owner_cases())
def test_no_other_shares_within_the_limits_cost_less(case):
    times, most = case
    shares = cost_shares(times, most=most)
    assert sum(shares) == pytest.approx(1)
    assert all(-1e-9 <= share <= limit + 1e-6 for share, limit in zip(shares, most, strict=True))
    grid = 12
    others = [
        tuple(n / grid for n in parts)
        for parts in product(range(grid + 1), repeat=len(most))
        if sum(parts) == grid and all(n / grid <= limit for n, limit in zip(parts, most, strict=True))
    ]
    least_s = min((owner_time_s(times, each) for each in others), default=np.inf)
    assert owner_time_s(times, shares) <= least_s * (1 + 1e-6)


@settings(max_examples=examples(20), deadline=None)
@given(owner_cases(), st.floats(1e-6, 1e6), st.integers(0, 3))
def test_by_cost_neither_the_unit_of_time_nor_where_the_ring_begins_matters(case, unit, turn):
    times, most = case

    def turned(values):
        return tuple(unit * each for each in np.roll(values, turn))

    other = OwnerTimes(*map(turned, astuple(times)))
    found = cost_shares(other, most=tuple(np.roll(most, turn)))
    expected_s = unit * owner_time_s(times, cost_shares(times, most=most))
    assert owner_time_s(other, found) == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_by_cost_equal_ranks_own_equal_shares(ranks):
    times = OwnerTimes(*[(0.5,) * ranks] * 5)
    assert cost_shares(times, most=(1.0,) * ranks) == pytest.approx([1 / ranks] * ranks)


def test_by_cost_a_rank_that_updates_slowly_owns_less_until_its_messages_cost_more():
    equal = (1.0, 1.0)
    slow = OwnerTimes(equal, equal, (9.0, 1.0), equal, equal)
    share = cost_shares(slow, most=(1.0, 1.0))[0]
    assert share == pytest.approx(0.1)  # each updates as long: 9 s = 1 - s; less would cost the links more
    assert cost_shares(replace(slow, update_s=(1.2, 1.0)), most=(1.0, 1.0))[0] == pytest.approx(0.5)


def test_by_cost_limits_that_sum_to_less_than_the_whole_are_refused():
    with pytest.raises(InfeasibleError):
        cost_shares(OwnerTimes(*[(1.0, 1.0)] * 5), most=(0.5, 0.4))


# Of scenarios --------------------------------------------------------------------------------------------------------

TYPES = {"large": device_type(memory_bytes=9000), "small": device_type(memory_bytes=7500)}
UNEQUAL = cluster_of([("d0", "sw"), ("d1", "sw")], devices=2, types=TYPES, type_names=["large", "small"])


def owning(policy, cluster=UNEQUAL):
    data = {"name": "made", "cluster": cluster, "plan": {"method": "gs", "shares": {"shards": policy}}}
    data["workload"] = {"model": tiny_model(), "global_batch_size": 8, "sequence_length": 4}
    return validated(Scenario, data, file="test")


def test_a_rank_of_more_memory_owns_more_by_memory_and_both_are_as_full():
    scenario = owning("memory")
    check(scenario, file="test")
    types = [scenario.cluster.type_of(rank) for rank in range(2)]
    workload, plan, policies = scenario.workload, scenario.plan, scenario.policies
    whole = owned_bytes(workload, plan, policies)
    levels = [
        (held_bytes(d, workload, plan, policies, samples=n) + s * whole) / d.memory_bytes
        for d, n, s in zip(types, scenario.batch_sizes, scenario.shard_shares, strict=True)
    ]
    assert scenario.shard_shares[0] > scenario.shard_shares[1]
    assert scenario.shard_shares[1] == 0 or levels[0] == pytest.approx(levels[1], rel=1e-6)
    assert max(levels) <= USABLE_RATIO
    assert [entry.shard_share for entry in simulate(Loaded(file="test", scenario=scenario)).result.ranks] == list(
        scenario.shard_shares
    )


@pytest.mark.parametrize("policy", ["memory", "cost"])
def test_what_fits_on_no_device_is_refused_in_one_line_with_its_name_and_the_excess(policy):
    small = {"fast": device_type(memory_bytes=3000.0)}
    cluster = cluster_of([("d0", "sw"), ("d1", "sw")], devices=2, types=small)
    with pytest.raises(
        UserError, match=r"^test: plan.shares.shards = '\w+': device 'd\d' .* [KM]iB more than it may"
    ) as said:
        check(owning(policy, cluster), file="test")
    assert "or method 'gs_z3' need less" in str(said.value)
    scenario = owning(policy)
    held = [
        held_bytes(scenario.cluster.type_of(r), scenario.workload, scenario.plan, scenario.policies, samples=4)
        for r in range(2)
    ]
    tight = {"fast": device_type(memory_bytes=(max(held) + 100.0) / USABLE_RATIO)}
    cluster = cluster_of([("d0", "sw"), ("d1", "sw")], devices=2, types=tight)
    with pytest.raises(UserError, match=r"has the least room, 100 B, and all together lack"):
        check(owning(policy, cluster), file="test")


def test_the_method_that_a_plan_has_is_no_advice():
    cluster = cluster_of([("d0", "sw"), ("d1", "sw")], devices=2, types={"fast": device_type(memory_bytes=3000.0)})
    scenario = owning("memory", cluster)
    with pytest.raises(UserError, match="need less") as said:
        check(replace(scenario, plan=replace(scenario.plan, method="gs_z3")), file="test")
    assert "method" not in str(said.value)


def test_by_cost_the_share_of_a_rank_stops_at_what_its_memory_takes():
    roomy = owning("cost", cluster_of([("d0", "sw"), ("d1", "sw")], devices=2))
    assert roomy.shard_shares == (0.5, 0.5)
    whole = owned_bytes(roomy.workload, roomy.plan, roomy.policies)
    held = held_bytes(roomy.cluster.type_of(0), roomy.workload, roomy.plan, roomy.policies, samples=4)
    types = {"wide": device_type(), "tight": device_type(memory_bytes=(held + 0.2 * whole) / USABLE_RATIO)}
    tight = cluster_of([("d0", "sw"), ("d1", "sw")], devices=2, types=types, type_names=["wide", "tight"])
    assert owning("cost", tight).shard_shares == pytest.approx([0.8, 0.2], abs=1e-6)


def test_checkpointed_blocks_need_less_and_samples_need_in_proportion():
    scenario = owning("memory")
    workload = scenario.workload
    plan = scenario.plan
    assert activation_bytes(workload, plan, samples=8) == pytest.approx(
        2 * activation_bytes(workload, plan, samples=4), rel=0.01
    )
    full = replace(plan, recompute="full")
    assert activation_bytes(workload, full, samples=4) <= activation_bytes(workload, plan, samples=4)


def test_ranks_of_a_host_share_its_way_out():
    """Two hosts of two devices each, behind one link a host: half of it each, for two thirds of what they send."""
    links = [("a0", "sa"), ("a1", "sa"), ("b0", "sb"), ("b1", "sb")]
    data = {
        "name": "two hosts", "backend": "gloo", "source": "test", "switches": ["sa", "sb"],
        "device_types": {"fast": device_type()},
        "devices": [{"name": n, "type": "fast", "host": n[0]} for n in ("a0", "a1", "b0", "b1")],
        "links": [
            {"between": list(ends), "bandwidth_bytes_per_s": rate, "latency_s": 0, "source": "t"}
            for ends, rate in [*((ends, 100.0) for ends in links), (("sa", "sb"), 30.0)]
        ],
    }  # fmt: skip
    cluster = validated(Cluster, data, file="test")
    out, come = rank_rates(cluster.wiring, (0, 1, 2, 3), ("a", "a", "b", "b"))
    assert out == come == pytest.approx([30 / 2 / (2 / 3)] * 4)
    alone, _ = rank_rates(cluster.wiring, (0, 1, 2, 3), ("a", "a", "a", "a"))
    assert alone == (100.0,) * 4


def test_shares_of_ranks_that_differ_by_less_than_the_solver_resolves_are_even():
    """The second programme asks for the cost of the first one, which the solver has to 1e-7 only."""
    link_s = (3.6794846347485896e-05,) * 5
    update_s = (0.002108545558081598,) * 2 + (0.002108539641569873,) * 2 + (0.0021085316886737537,)
    shares = cost_shares(OwnerTimes(link_s, link_s, update_s, link_s, link_s), most=(1.0,) * 5)
    assert shares == pytest.approx([0.2] * 5, abs=1e-5)
