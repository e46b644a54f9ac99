"""Devices of the lab that share a core slow each other down, and no others."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from strategies import cluster_of, device_type, machine_for, star
from test_machine import together, work

from gssim.cluster import contention_groups
from gssim.cluster.cluster import Emulation
from gssim.cluster.contention import core_shares, dealt
from gssim.collectives import Communication
from gssim.engine import Machine
from gssim.engine.host import Load
from gssim.engine.shared_core import LEAST_SLEEP_S, MOST_CREDIT_S, TURN_S, SharedCore
from gssim.network import Clock
from gssim.planner.bounds.compute import least_jitter_ratio
from gssim.scenario import load_scenario
from gssim.scenario.device_rates import with_profile_slowdowns
from gssim.simulation import simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


def lab(*shares: float, cores: int | None = 2, ratio: float = 1.5, jitter: float = 0.0):
    """Return a cluster of such parts of cores, each a host of its own."""
    types = {
        f"{share:g}": device_type(
            neighbour_slowdown_ratio=ratio,
            task_jitter_ratio=jitter,
            lab={"cpu_share_ratio": share, **({"cores": cores} if cores else {})},
        )
        for share in shares
    }
    links = [(f"d{i}", "sw") for i in range(len(shares))]
    return cluster_of(links, devices=len(shares), types=types, type_names=[f"{share:g}" for share in shares])


def ends_s(cluster, *alone_s: float) -> list[float]:
    """Return when each device ends that computes for so long alone."""
    machine = machine_for(cluster, *[[work("w", seconds)] if seconds else [] for seconds in alone_s])
    machine.run(1)
    return [ends[0] if ends else 0.0 for ends in machine.ends_s]


@given(st.lists(st.sampled_from([0.2, 0.4, 0.8]), min_size=1, max_size=6), st.integers(1, 4))
def test_a_device_is_dealt_to_a_core_that_has_most_left(shares, cores):
    found = dealt(shares, cores)
    loads = [sum(s for s, c in zip(shares, found, strict=True) if c == core) for core in range(cores)]
    assert all(0 <= core < cores for core in found)
    assert max(loads) - min(loads) <= max(shares) + 1e-9  # else the last dealt to the fullest lay better elsewhere


def test_devices_are_neighbours_on_a_core_though_each_is_a_host():
    assert contention_groups(lab(0.8, 0.4, 0.2)) == ("core 0", "core 1", "core 1")
    assert core_shares(lab(0.8, 0.4, 0.2)) == (0.8, 0.4, 0.2)


def test_where_it_is_not_known_how_many_cores_there_are_hosts_are_neighbourhoods():
    cluster = lab(0.4, 0.4, 0.4, 0.4, cores=None)
    assert contention_groups(cluster) == tuple(device.host for device in cluster.devices)
    assert core_shares(cluster) is None
    assert ends_s(cluster, 1.0, 1.0, 1.0, 1.0) == pytest.approx([1.0] * 4)


def test_two_alike_on_a_core_slow_each_other_by_the_ratio_while_both_compute():
    # d0 and d2 share a core, and so do d1 and d3: until 1.5 s, the shorter's end; the longer has 2 s left
    assert ends_s(lab(0.4, 0.4, 0.4, 0.4), 1.0, 1.0, 3.0, 0.0) == pytest.approx([1.5, 1.0, 3.5, 0.0])


def test_three_alike_of_which_two_share_a_core():
    assert ends_s(lab(0.4, 0.4, 0.4), 1.0, 1.0, 1.0) == pytest.approx([1.5, 1.0, 1.5])


def test_a_neighbour_with_half_the_share_comes_between_every_other_turn():
    # 0.8 alone; 0.4 loses half of what an equal one would cost it, 0.2 no more than that
    whole, half, quarter = ends_s(lab(0.8, 0.4, 0.2), 1.0, 10.0, 1.5)
    assert whole == pytest.approx(1.0)
    assert quarter == pytest.approx(1.5 * 1.5)
    assert half == pytest.approx(2.25 + (10 - 2.25 / 1.25))


def test_more_than_two_on_a_core_are_no_worse_than_between_every_turn():
    assert ends_s(lab(0.2, 0.2, 0.2, 0.2, cores=1), 1.0, 1.0, 1.0, 1.0) == pytest.approx([1.5] * 4)


def test_devices_that_are_whole_cores_have_no_neighbours():
    assert ends_s(lab(1.0, 1.0), 1.0, 1.0) == pytest.approx([1.0, 1.0])


def test_a_model_has_a_ratio_of_its_own_and_others_the_devices():
    scenario = load_scenario(SCENARIOS / "lab-2-hosts.toml", []).scenario
    (name, kind), *_ = ((n, k) for n, k in scenario.cluster.device_types.items() if k.profiles)
    ours = [replace(p, neighbour_slowdown_ratio=1.25) for p in kind.profiles if p.model == scenario.workload.model.name]
    others = [
        replace(p, neighbour_slowdown_ratio=1.75) for p in kind.profiles if p.model != scenario.workload.model.name
    ]
    changed = replace(kind, neighbour_slowdown_ratio=1.1, profiles=(*others, *ours))
    cluster = replace(scenario.cluster, device_types={name: changed})
    assert with_profile_slowdowns(cluster, scenario.workload).device_types[name].neighbour_slowdown_ratio == 1.25
    bare = replace(cluster, device_types={name: replace(changed, profiles=tuple(others))})
    assert with_profile_slowdowns(bare, scenario.workload) is bare


NEXT_TO_NONE = 1e-12
"""Jitter with which devices of the lab compute in turns, and which changes no time that is compared."""


def test_the_turns_are_those_of_the_throttle():
    throttle = (SCENARIOS.parent / "gsreal/lab/throttle.cpp").read_text(encoding="utf-8")
    constants = {
        name: int(value.replace("'", ""))
        for name, value in re.findall(r"constexpr long long (\w+) = ([\d']+);", throttle)
    }
    assert constants["kPeriod"] == pytest.approx(TURN_S * 1e9)
    assert constants["kLeastSleep"] == pytest.approx(LEAST_SLEEP_S * 1e9)
    assert constants["kMostCredit"] == pytest.approx(MOST_CREDIT_S * 1e9)


@pytest.mark.parametrize("share", [0.8, 0.4, 0.2])
def test_a_device_that_computes_in_turns_has_its_share_of_a_core_to_within_a_sleep(share):
    (end_s,) = ends_s(lab(share, jitter=NEXT_TO_NONE), 1.0)
    assert end_s == pytest.approx(1.0, abs=TURN_S * (1 / share - 1))


def test_less_than_a_turn_takes_its_cpu_time_or_a_sleep_more():
    taken_s = set()
    for seed in range(40):
        program = machine_for(lab(0.4, jitter=NEXT_TO_NONE), [work("w", 0.001)]).program
        machine = Machine(lab(0.4, jitter=NEXT_TO_NONE), program, seed=seed)
        machine.run(1)
        taken_s.add(round(machine.env.now, 9))
    assert taken_s == {0.0004, 0.0019}  # the thread computes for 0.4 ms; its sleep is 1.5 ms
    assert least_jitter_ratio(lab(0.4, jitter=NEXT_TO_NONE).type_of(0)) * 0.001 <= min(taken_s)


def test_in_turns_two_alike_slow_each_other_by_the_ratio():
    first, _, third, _ = ends_s(lab(0.4, 0.4, 0.4, 0.4, jitter=NEXT_TO_NONE), 1.0, 1.0, 3.0, 0.0)
    assert (first, third) == pytest.approx((1.5, 3.5), rel=0.01)


def test_in_turns_a_neighbour_with_a_quarter_of_the_share_comes_between_every_fourth():
    fast, slow = ends_s(lab(0.6, 0.15, cores=1, jitter=NEXT_TO_NONE), 2.0, 1.0)
    assert slow == pytest.approx(1.5, rel=0.02)
    assert fast == pytest.approx(2.0 + 1.5 / 12, rel=0.02)  # a third of every fourth turn, until the slow one ends


@pytest.mark.parametrize(("share", "cores"), [(0.4, 4), (0.4, 2), (0.2, 4)])
def test_ranks_that_meet_after_every_piece_wait_for_each_others_sleeps(share, cores):
    """Each piece ends up to a sleep apart: of two that are evenly spread in it, the later is a sixth of it late."""
    meetings, piece_s = 400, 0.0032  # no multiple of a turn's time
    cluster = lab(share, share, cores=cores, ratio=1.0, jitter=NEXT_TO_NONE)
    names = [f"x{n}" for n in range(meetings)]
    tasks = [task for name in names for task in (work(f"w {name}", piece_s), together(name))]
    communications = {name: Communication("all-reduce", (0, 1), 1) for name in names}
    met = machine_for(cluster, tasks, tasks, communications=communications)
    met.run(1)
    alone = machine_for(lab(share, share, cores=cores, ratio=1.0), tasks, tasks, communications=communications)
    alone.run(1)
    late_s = (met.env.now - alone.env.now) / meetings
    sleep_s = TURN_S * (1 / share - 1)
    assert 0.08 * sleep_s < late_s < 0.35 * sleep_s


@pytest.mark.parametrize(("refill_s", "took_s"), [(0.0, 0.0008), (0.0002, 0.0009), (0.001, 0.0009)])
def test_after_a_pause_in_which_another_computed_the_caches_are_refilled_once(refill_s, took_s):
    """Beside a neighbour that halves the speed, half of a turn refills the caches, but no longer than they are used."""
    env = Clock()
    core = SharedCore(env, {0: 1, 1: 1}, core_share={0: 0.5, 1: 0.5}, seed=0)
    core._computed_s.update({0: 0.0, 1: 0.0})
    device = lab(0.5, ratio=2.0).type_of(0)

    def one_after_the_other():
        yield from core.compute(1, 0.0002, device)
        began_s = env.now
        yield from core.compute(0, 0.0008 + refill_s, device, refill_s=refill_s)  # less than a turn: no sleep
        return env.now - began_s

    assert env.run(env.process(one_after_the_other())) == pytest.approx(took_s, abs=1e-8)


@pytest.mark.parametrize(("cores", "slower"), [(2, True), (4, False)])
def test_four_hosts_compute_slower_on_two_cores_than_on_four(cores, slower):
    def compute_s(ratio: float) -> float:
        loaded = load_scenario(
            SCENARIOS / "demo.toml", [f"cluster={SCENARIOS}/clusters/lab-4-hosts.toml", "plan.method=ddp"]
        )
        types = {
            name: replace(
                kind,
                step_jitter_ratio=0.0,
                task_jitter_ratio=0.0,
                communicating_slowdown_ratio=1.0,
                lab=Emulation(cpu_share_ratio=0.4, cores=cores),
                profiles=tuple(
                    replace(each, neighbour_slowdown_ratio=ratio, pause_excess_s=None) for each in kind.profiles
                ),
            )
            for name, kind in loaded.scenario.cluster.device_types.items()
        }
        cluster = replace(loaded.scenario.cluster, device_types=types)
        found = simulate(replace(loaded, scenario=replace(loaded.scenario, cluster=cluster))).result
        return sum(found.phases_s[phase] for phase in ("forward", "backward"))

    assert compute_s(1.25) == pytest.approx(compute_s(1.0) * (1.25 if slower else 1.0), rel=1e-6)


def test_hosts_that_are_no_lab_keep_their_law():
    cluster = star(2, types={"fast": device_type(neighbour_slowdown_ratio=2.0)})
    assert contention_groups(cluster) == ("host0", "host1")


def test_calibration_gives_each_model_what_was_measured_of_it():
    from gsreal.lab.calibration import crowd_size, set_communication_slowdown, set_core_slowdown

    data = {
        "neighbour_slowdown_ratio": 1.01,
        "profiles": [{"model": "a", "neighbour_slowdown_ratio": 1.02}, {"model": "b"}],
    }
    set_core_slowdown(data, {"a": 1.1, "b": 1.3})
    assert [each["neighbour_slowdown_ratio"] for each in (data, *data["profiles"])] == pytest.approx([1.2, 1.1, 1.3])
    set_core_slowdown(data, {})  # nothing shares its core
    assert not [each for each in (data, *data["profiles"]) if "neighbour_slowdown_ratio" in each]
    set_communication_slowdown(data, {"a": [(8.0, 0.5), (2.0, 0.25)], "b": [(2.0, 0.5), (8.0, 0.25)]})
    first, second = (each["communicating_excess_ratio"] for each in data["profiles"])
    assert first == {"sizes": [2.0, 8.0], "values": [0.25, 0.5]}
    assert second == {"sizes": [2.0, 8.0], "values": [0.375, 0.375]}  # that more bytes take less is chance
    assert [crowd_size(share) for share in (1.0, 0.6, 0.5, 0.4, 0.1)] == [0, 0, 3, 4, 4]


class Queued(SharedCore):
    """The same core, with every turn asked for: SimPy's own resource says who is next."""

    def __init__(self, env, members, **options):
        super().__init__(env, members, **options)
        self._resource, self._requests = simpy.Resource(env), {}

    def _begins_turn_at_once(self):
        return False

    def _request_turn(self):
        request = self._resource.request()
        self._requests[self.env.active_process] = request
        return request

    def _end_turn(self):
        self._resource.release(self._requests.pop(self.env.active_process))


@given(
    st.lists(st.sampled_from([0.2, 0.25, 0.4, 0.5]), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0005, 0.001, 0.0031, 0.02])), min_size=1, max_size=8),
    st.integers(0, 3),
)
def test_turns_come_in_the_order_of_a_resource_of_simpy(shares, computes, seed):
    """Several streams of a device, and several devices, ask for the core at the same instants, and communicate."""
    device = replace(lab(0.4).type_of(0), communicating_slowdown_ratio=1.25)

    def ends(kind):
        env, found = Clock(), []
        core = kind(env, dict.fromkeys(range(len(shares)), 1), core_share=dict(enumerate(shares)), seed=seed)

        begin = env.timeout(0.002)

        def stream(number, index, alone_s):
            yield begin
            for change in (+1, -1, +1):
                yield from core.compute(index, alone_s, device)
                found.append((number, env.now))
                core.communicate(index, Load(1.0, 0.0), change)

        def loaded():
            yield begin  # as they ask for their first turns, which are slower if it does so before they begin
            core.communicate(0, Load(0.5, 0.0), +1)

        for number, (index, alone_s) in enumerate(computes):
            env.process(stream(number, index % len(shares), alone_s))
        env.process(loaded())
        env.run()
        return found

    assert ends(SharedCore) == ends(Queued)
