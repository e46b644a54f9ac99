"""Devices of the lab that share a core slow each other down, and no others."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cluster_of, device_type, machine_for, star
from test_machine import work

from gssim.cluster import contention_groups
from gssim.cluster.cluster import Emulation
from gssim.cluster.contention import core_shares, dealt
from gssim.scenario import load_scenario
from gssim.scenario.device_rates import with_profile_slowdowns
from gssim.simulation import simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


def lab(*shares: float, cores: int | None = 2, ratio: float = 1.5):
    """Return a cluster of such parts of cores, each a host of its own."""
    types = {
        f"{share:g}": device_type(
            neighbour_slowdown_ratio=ratio, lab={"cpu_share_ratio": share, **({"cores": cores} if cores else {})}
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
