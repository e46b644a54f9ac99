"""Laws: what must hold for every cluster and plan."""

import math
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    by_link,
    by_rank,
    bytes_by_rank,
    clusters,
    collectives_on,
    communicated,
    communication_time_s,
    compositions,
    device_type,
    expected_by_link,
    exponential_statistics,
    fabrics,
    loaded_of,
    machine_of,
    scenario_of,
    scenarios,
    stages_of,
    star,
)

from gssim.cluster import Cluster
from gssim.collectives import BACKEND_ALGORITHMS, Communication, Stage
from gssim.engine import MemoryTracker
from gssim.network import limited_rates
from gssim.result import PHASES
from gssim.scenario import Scenario
from gssim.simulation import simulate

LINKS = 12


@st.composite
def sharings(draw, *, loads=(1.0, 1.0, 1.0, 0.5, 1 / 3, 2.0, 3.0)):
    """Draw sessions on up to four links each, what they take of each for every byte, and the links' capacities."""
    paths = draw(
        st.lists(st.lists(st.integers(0, LINKS - 1), min_size=1, max_size=4, unique=True), min_size=1, max_size=12)
    )
    session = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    link = np.array([each for path in paths for each in path])
    load = np.array(draw(st.lists(st.sampled_from(loads), min_size=len(link), max_size=len(link))))
    capacity = np.array(draw(st.lists(st.floats(1e-3, 1e12), min_size=LINKS, max_size=LINKS)))
    return session, link, load, capacity, len(paths)


def rates_of(sharing):
    session, link, load, capacity, sessions = sharing
    return limited_rates(session, link, load, capacity, sessions=sessions)[0]


# Max-min fairness ----------------------------------------------------------------------------------------------------


@given(sharings())
def test_no_link_carries_more_than_its_capacity(sharing):
    session, link, load, capacity, _ = sharing
    used = np.bincount(link, weights=load * rates_of(sharing)[session], minlength=LINKS)
    assert (used <= capacity * (1 + 1e-9)).all()


@given(sharings())
def test_every_flow_has_a_full_link_on_which_no_flow_is_faster(sharing):
    session, link, load, capacity, sessions = sharing
    rates = rates_of(sharing)
    assert rates.shape == (sessions,)
    assert (rates > 0).all()
    used = np.bincount(link, weights=load * rates[session], minlength=LINKS)
    for each in range(sessions):
        assert any(
            used[place] >= capacity[place] * (1 - 1e-9)
            and (rates[session[link == place]] <= rates[each] * (1 + 1e-9)).all()
            for place in link[session == each]
        )


@given(sharings(), st.floats(1e-3, 1e3))
def test_fair_rates_scale_with_the_capacities(sharing, k):
    session, link, load, capacity, sessions = sharing
    scaled = limited_rates(session, link, load, k * capacity, sessions=sessions)[0]
    assert scaled == pytest.approx(k * rates_of(sharing), rel=1e-9)


@given(sharings(), st.floats(1e-3, 1e3))
def test_what_loads_all_links_more_is_slower_by_as_much(sharing, k):
    session, link, load, capacity, sessions = sharing
    loaded = limited_rates(session, link, k * load, capacity, sessions=sessions)[0]
    assert loaded == pytest.approx(rates_of(sharing) / k, rel=1e-9)


@given(sharings(), st.randoms(use_true_random=False))
def test_fair_rates_do_not_depend_on_the_order_of_flows_links_or_entries(sharing, random):
    session, link, load, capacity, sessions = sharing
    entries, flows, places = (np.array(random.sample(range(n), n)) for n in (len(link), sessions, LINKS))
    shuffled = np.empty(LINKS)
    shuffled[places] = capacity
    rates = limited_rates(flows[session[entries]], places[link[entries]], load[entries], shuffled, sessions=sessions)[0]
    assert rates[flows] == pytest.approx(rates_of(sharing), rel=1e-9)


@given(sharings(), st.integers(0, 11))
def test_equal_flows_taken_together_with_their_number_as_load_have_the_same_rate(sharing, which):
    """Folding replaces three equal flows by one that loads its links three times as much."""
    session, link, load, capacity, sessions = sharing
    which %= sessions
    mine = session == which
    thrice = limited_rates(
        np.r_[session, np.full(mine.sum(), sessions), np.full(mine.sum(), sessions + 1)],
        np.r_[link, link[mine], link[mine]],
        np.r_[load, load[mine], load[mine]],
        capacity,
        sessions=sessions + 2,
    )[0]
    together = limited_rates(session, link, np.where(mine, 3 * load, load), capacity, sessions=sessions)[0]
    assert thrice[:sessions] == pytest.approx(together, rel=1e-9)
    assert thrice[[sessions, sessions + 1]] == pytest.approx([thrice[which]] * 2, rel=1e-9)


@given(st.floats(1, 1e9), st.floats(1e3, 1e9), st.floats(1, 100), st.floats(0, 1e-2))
def test_more_bandwidth_is_never_slower_for_a_single_flow(size, bandwidth, more, latency_s):
    message = Communication("all-to-all-v", (0, 1), int(size), pair_bytes=((0.0, size), (0.0, 0.0)))
    slow = communication_time_s(star(2, bandwidth=bandwidth, latency_s=latency_s), message)
    fast = communication_time_s(star(2, bandwidth=bandwidth * more, latency_s=latency_s), message)
    assert fast <= slow * (1 + 1e-9)
    assert slow == pytest.approx(size / bandwidth + 4 * latency_s, rel=1e-9, abs=1e-11)  # a notice, a message


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(1, 1e7)), min_size=1, max_size=8))
def test_no_message_beats_its_lone_time_and_no_link_its_busy_time(messages):
    matrix = [[0.0] * 4 for _ in range(4)]
    for source, target, size in messages:
        if source != target:
            matrix[source][target] += size
    everything = Communication("all-to-all-v", (0, 1, 2, 3), 0, pair_bytes=tuple(map(tuple, matrix)))
    time_s = communication_time_s(star(4, bandwidth=1e6, latency_s=0.0), everything)
    busiest = max([sum(row) for row in matrix] + [sum(row[j] for row in matrix) for j in range(4)])
    assert time_s >= busiest / 1e6 * (1 - 1e-9)
    assert time_s <= sum(map(sum, matrix)) / 1e6 * (1 + 1e-9)


# Time ----------------------------------------------------------------------------------------------------------------


def slower(cluster: Cluster, k: float) -> Cluster:
    """Return the cluster with all rates divided by k and all fixed times multiplied by k.

    Its algorithms are named, as NCCL's tuner would choose by constants of its own.
    """
    types = {
        name: replace(
            kind,
            peak_flop_per_s={precision: rate / k for precision, rate in kind.peak_flop_per_s.items()},
            memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s / k,
            operation_overhead_s=kind.operation_overhead_s * k,
            gradient_hook_s=kind.gradient_hook_s * k,
        )
        for name, kind in cluster.device_types.items()
    }
    links = tuple(
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / k, latency_s=link.latency_s * k)
        for link in cluster.links
    )
    return replace(cluster, device_types=types, links=links, algorithms=BACKEND_ALGORITHMS[cluster.backend])


@given(scenarios(), st.sampled_from([1 / 1024, 0.1, 3.0, 1e5]))
def test_all_times_scale_by_k_when_all_rates_are_divided_and_fixed_times_multiplied(scenario, k):
    before, after = (
        simulate(loaded_of(replace(scenario, cluster=slower(scenario.cluster, by)))).result for by in (1.0, k)
    )
    assert after.step_time_s == pytest.approx(k * before.step_time_s, rel=1e-6)
    scaled = {phase: k * seconds for phase, seconds in before.phases_s.items()}
    assert after.phases_s == pytest.approx(scaled, rel=1e-6, abs=1e-6 * after.step_time_s)
    assert after.collectives == before.collectives


@given(scenarios())
def test_phases_sum_to_the_step_on_every_rank(scenario):
    result = simulate(loaded_of(scenario)).result
    assert sum(result.phases_s.values()) == pytest.approx(result.step_time_s, rel=1e-9)
    for ranks in result.ranks:
        assert tuple(ranks.phases_s) == PHASES
        assert min(ranks.phases_s.values()) >= 0
        assert sum(ranks.phases_s.values()) == pytest.approx(result.step_time_s, rel=1e-9)


@given(scenarios())
def test_the_second_simulated_step_is_like_every_later_one(scenario):
    machine, _ = machine_of(scenario, steps=6)
    for ends in machine.ends_s:
        lengths = [b - a for a, b in pairwise(ends[:5])]  # what the last step publishes meets no further step
        assert lengths == pytest.approx([lengths[0]] * len(lengths), rel=1e-9)


@given(scenarios())
def test_a_step_takes_at_least_each_ranks_own_compute(scenario):
    machine, program = machine_of(scenario, steps=2)
    for role, ends in zip(program.role_of, by_rank(machine, machine.ends_s), strict=True):
        alone_s = sum(task.duration_s for task in program.tasks[role] if task.communication is None)
        assert ends[1] - ends[0] >= alone_s * (1 - 1e-9)


@given(scenarios())
def test_overlap_is_never_slower_where_communication_does_not_slow_compute(scenario):
    types = {name: replace(k, communicating_slowdown_ratio=1.0) for name, k in scenario.cluster.device_types.items()}
    calm = replace(scenario, cluster=replace(scenario.cluster, device_types=types))
    times = [
        simulate(loaded_of(replace(calm, plan=replace(calm.plan, overlap=overlap)))).result.step_time_s
        for overlap in (True, False)
    ]
    assert times[0] <= times[1] * (1 + 1e-9)


# Bytes ---------------------------------------------------------------------------------------------------------------


@given(scenarios())
def test_every_link_of_a_path_carries_exactly_what_the_stages_send(scenario):
    machine, _ = machine_of(scenario, steps=1)
    stages = stages_of(machine)
    assert list(by_link(machine.network).values()) == pytest.approx(expected_by_link(machine.network.wiring, stages))
    sent, received = bytes_by_rank(machine)
    assert sent == pytest.approx(sum((sent_by(stage, scenario.ranks) for stage in stages), np.zeros(scenario.ranks)))
    assert sum(sent) == pytest.approx(sum(received))


def sent_by(stage: Stage, ranks: int) -> np.ndarray:
    """Return what each rank sends in a stage."""
    return stage.size_bytes * np.bincount(stage.hops.source, weights=stage.hops.weight, minlength=ranks)


@given(scenarios())
def test_around_one_switch_uplinks_carry_what_ranks_send_and_downlinks_what_they_receive(scenario):
    cluster = star(len(scenario.cluster.devices), backend=scenario.cluster.backend)
    machine, _ = machine_of(replace(scenario, cluster=cluster), steps=1)
    carried = by_link(machine.network)
    sent, received = bytes_by_rank(machine)
    for rank in range(scenario.ranks):
        assert carried[f"d{rank}", "sw"] == pytest.approx(sent[rank])
        assert carried["sw", f"d{rank}"] == pytest.approx(received[rank])


@settings(max_examples=examples(200))
@given(st.data())
def test_bytes_are_conserved_on_every_link_by_every_algorithm_on_every_network(data):
    cluster, communication = data.draw(collectives_on(data.draw(fabrics())))
    machine = communicated(cluster, communication)
    wiring, stages = machine.network.wiring, stages_of(machine)
    carried = np.array(list(by_link(machine.network).values()))
    ranks = len(cluster.devices)
    sent = sum((sent_by(stage, ranks) for stage in stages), np.zeros(ranks))
    received = sum(
        (
            stage.size_bytes * np.bincount(stage.hops.target, weights=stage.hops.weight, minlength=ranks)
            for stage in stages
        ),
        np.zeros(ranks),
    )
    assert carried == pytest.approx(np.array(expected_by_link(wiring, stages)), rel=1e-9, abs=1e-6)
    out = np.bincount(wiring.source, weights=carried, minlength=wiring.nodes)
    into = np.bincount(wiring.target, weights=carried, minlength=wiring.nodes)
    # what a device passes on for others comes in and goes out again; a switch keeps nothing
    assert (out - into)[:ranks] == pytest.approx(sent - received, rel=1e-9, abs=1e-6)
    assert (out - into)[ranks:] == pytest.approx(
        np.zeros(wiring.nodes - ranks), abs=1e-6 * max(1.0, carried.max(initial=0.0))
    )
    assert (out[:ranks] >= sent * (1 - 1e-9)).all()
    assert (into[:ranks] >= received * (1 - 1e-9)).all()


@given(scenarios())
def test_no_link_is_used_more_than_all_the_time(scenario):
    result = simulate(loaded_of(scenario)).result
    wiring = scenario.cluster.wiring
    assert len(result.links) == wiring.links
    for link, capacity in zip(result.links, wiring.bandwidth_bytes_per_s.tolist(), strict=True):
        assert link.bytes <= capacity * result.step_time_s * (1 + 1e-9)
        assert link.utilisation_ratio == pytest.approx(link.bytes / capacity / result.step_time_s, rel=1e-9)


@settings(max_examples=examples(20))
@given(scenarios(methods=("gs",)))
def test_a_lower_threshold_never_sends_less(scenario):
    found = []
    for threshold in (1e-4, 1e-3, 1e-2):
        push = replace(scenario.plan.push, threshold=threshold)
        result = simulate(loaded_of(replace(scenario, plan=replace(scenario.plan, push=push)))).result
        found.append((result.density.push, sum(c.payload_bytes or 0 for c in result.collectives)))
    for (density, payload), (higher_density, higher_payload) in pairwise(found):
        assert higher_density <= density + 1e-12
        assert higher_payload <= payload * (1 + 1e-9)


# Memory --------------------------------------------------------------------------------------------------------------


def assert_memory_returns(scenario: Scenario) -> None:
    """Run steps one after another; nothing may be freed twice, and each step must leave what it found."""
    original = MemoryTracker.end

    def checked(memory, stream):
        original(memory, stream)
        below = {category: size for category, size in memory.current.items() if size < -1e-6}
        assert not below, f"more freed than held: {below}"

    for steps in (1, 2):
        with patch.object(MemoryTracker, "end", checked):
            machine, program = machine_of(scenario, steps=steps)
        assert sum(len(each.members) for each in machine.classes) == scenario.ranks
        for role, memory in zip(machine.roles, machine.memory, strict=True):
            left = {category: size for category, size in memory.current.items() if abs(size) > 1e-6}
            assert left == pytest.approx({c: size for c, size in program.persistent[role].items() if size})
            assert memory.peak_bytes >= sum(program.persistent[role].values())
            assert sum(memory.peak.values()) == pytest.approx(memory.peak_bytes)


@settings(max_examples=examples(150))
@given(scenarios())
def test_every_step_leaves_the_memory_as_it_found_it(scenario):
    assert_memory_returns(scenario)


@pytest.mark.parametrize(
    ("bucket_bytes", "ranks"),
    [
        pytest.param(size, ranks, marks=[] if (place, ranks) in ((0, 2), (1, 4), (2, 1)) else pytest.mark.slow)
        for place, size in enumerate((1, 80, 25 * 2**20))
        for ranks in (1, 2, 3, 4)
    ],
)
@pytest.mark.parametrize(
    "plan",
    [
        {"method": "ddp"},
        {"method": "zero1"},
        {"method": "zero2"},
        {"method": "gs"},
        {"method": "gs", "push": {"threshold": 0.0}},
        {"method": "gs", "push": {"threshold": 1e-3}},
        {"method": "gs", "push": {"threshold": 1e-3}, "overlap": False},
    ],
    ids=str,
)
def test_every_method_leaves_the_memory_as_it_found_it(plan, bucket_bytes, ranks):
    batch = {1: (1.0,), 2: (0.75, 0.25), 3: (0.5, 0.25, 0.25), 4: (0.5, 0.25, 0.125, 0.125)}[ranks]
    shares = {"batch": batch} | ({"shards": tuple(reversed(batch))} if plan["method"] == "gs" else {})
    first = {"first_bucket_bytes": bucket_bytes} if plan["method"] == "gs" else {}
    assert_memory_returns(scenario_of(star(ranks), plan | first | {"bucket_bytes": bucket_bytes, "shares": shares}))


@given(scenarios(methods=("ddp", "zero1", "zero2", "gs")))
def test_all_ranks_together_hold_every_parameter_and_its_optimizer_state(scenario):
    _, program = machine_of(scenario)
    total = scenario.workload.model.elements * 4
    values = {"sgd": 0, "sgd-momentum": 1, "adamw": 2}[scenario.workload.optimizer]
    held_by = [program.persistent[role] for role in program.role_of]
    assert sum(held["parameters"] for held in held_by) >= total
    assert sum(held.get("optimizer", 0) for held in held_by) >= values * total


# Names and order -----------------------------------------------------------------------------------------------------


@given(scenarios(), st.permutations(["u", "v", "w", "x", "y"]))
def test_renaming_devices_and_switches_changes_nothing(scenario, letters):
    names = {f"d{i}": letters[i] for i in range(4)} | {"sw": letters[4]}
    cluster = scenario.cluster
    renamed = replace(
        cluster,
        devices=tuple(replace(d, name=names[d.name], host="at " + names[d.name]) for d in cluster.devices),
        switches=tuple(names[s] for s in cluster.switches),
        links=tuple(replace(link, between=tuple(names[end] for end in link.between)) for link in cluster.links),
    )
    before = simulate(loaded_of(scenario)).result
    after = simulate(loaded_of(replace(scenario, cluster=renamed))).result
    assert after.step_time_s == pytest.approx(before.step_time_s, rel=1e-9)
    assert after.collectives == before.collectives
    assert after.scenario_id == before.scenario_id


@settings(max_examples=examples(25))
@given(st.permutations([0, 1, 2, 3]), st.sampled_from(["ddp", "zero2", "gs"]), st.booleans())
def test_exchanging_equal_ranks_changes_nothing(order, method, in_a_row):
    links = [(f"d{i}", "sw") for i in (order if in_a_row else range(4))]
    settings_ = {"types": {"fast": device_type()}, "latency_s": 1e-4}
    before = simulate(loaded_of(scenario_of(star(4, **settings_), {"method": method}))).result
    cluster = star(4, **settings_)
    shuffled = replace(
        cluster,
        devices=tuple(cluster.devices[i] for i in order),
        links=tuple(replace(cluster.links[0], between=link) for link in links),
    )
    after = simulate(loaded_of(scenario_of(shuffled, {"method": method}))).result
    assert after.step_time_s == pytest.approx(before.step_time_s, rel=1e-9)
    assert [c.key for c in after.collectives] == [c.key for c in before.collectives]
    assert len(after.ranks) == len(before.ranks) == 1


@given(st.data(), st.permutations([0, 1, 2]))
def test_ranks_of_unequal_work_may_stand_in_any_order_around_a_switch(data, order):
    batch = data.draw(compositions(total=8, parts=3, least=1))
    types = {"one": device_type(), "two": device_type(peak_flop_per_s={"fp32": 3e8})}
    names = ["one", "two", "one"]
    times = []
    for places in ((0, 1, 2), order):
        cluster = star(3, types=types, type_names=[names[i] for i in places])
        shares = {"batch": tuple(batch[i] / 8 for i in places)}
        times.append(simulate(loaded_of(scenario_of(cluster, {"method": "ddp", "shares": shares}))).result.step_time_s)
    assert times[1] == pytest.approx(times[0], rel=1e-9)


@settings(max_examples=examples(20))
@given(scenarios())
def test_the_same_scenario_twice_gives_the_same_bytes(scenario):
    first, second = (simulate(loaded_of(scenario)).result.to_json() for _ in range(2))
    assert first == second


@given(clusters(devices=3), st.floats(1e-5, 1e-1))
def test_the_realised_density_is_the_tail_of_the_measured_distribution(cluster, threshold):
    scenario = scenario_of(
        cluster, {"method": "gs", "push": {"threshold": threshold}, "shares": {"batch": "throughput"}}
    )
    result = simulate(loaded_of(scenario, exponential_statistics(rms=1e-3))).result
    exact = math.exp(-math.sqrt(2) * threshold / 1e-3)
    busy = sum(samples > 0 for samples in scenario.batch_sizes) / 3
    assert result.density.push == pytest.approx(exact * busy, abs=0.006)  # of interpolation
