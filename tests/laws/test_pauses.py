"""Compute after a pause: caches no longer hold what it works with."""

from dataclasses import replace
from pathlib import Path

import pytest

from gssim.cluster import Curve
from gssim.scenario import load_scenario
from gssim.simulation import simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
EXCESS_S = 4e-3
AFTER_ANY = Curve(sizes=(1e-9, 2e-9), values=(EXCESS_S, EXCESS_S))
SLOWLY = Curve(sizes=(1e3, 2e3), values=(1.0, 2.0))


def predicted(excess, *overrides):
    loaded = load_scenario(SCENARIOS / "lab-2-hosts.toml", ["run.steps=4", *overrides])
    cluster = loaded.scenario.cluster
    types = {
        name: replace(
            kind,
            step_jitter_ratio=0.0,
            task_jitter_ratio=0.0,
            profiles=tuple(replace(profile, pause_excess_s=excess) for profile in kind.profiles),
        )
        for name, kind in cluster.device_types.items()
    }
    changed = replace(loaded.scenario, cluster=replace(cluster, device_types=types))
    return simulate(replace(loaded, scenario=changed)).result


def compute_s(result):
    return sum(result.phases_s[phase] for phase in ("forward", "backward"))


@pytest.mark.parametrize("overrides", [(), ("plan.micro_batches=4",), ("plan.recompute=full",)], ids=" ".join)
def test_a_device_that_never_waits_stays_warm(overrides):
    warm, cold = (predicted(excess, "plan.method=single", *overrides) for excess in (None, AFTER_ANY))
    assert cold.step_time_s == pytest.approx(warm.step_time_s, rel=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_pause_a_step_adds_its_excess_once_and_the_forward_pays_it(micro_batches):
    """The wait for messages comes after the last backward; what comes first after it fills the caches for all."""
    words = ("plan.method=ddp", f"plan.micro_batches={micro_batches}")
    warm, cold = (predicted(excess, *words) for excess in (None, AFTER_ANY))
    assert cold.phases_s["forward"] == pytest.approx(warm.phases_s["forward"] + EXCESS_S, rel=0.01)
    assert cold.phases_s["backward"] == pytest.approx(warm.phases_s["backward"], rel=0.01)
    assert cold.phases_s["optimizer"] == pytest.approx(warm.phases_s["optimizer"], rel=1e-9)


def test_each_of_several_pauses_adds_its_own():
    """Sharded parameters are waited for layer by layer."""
    warm, cold = (predicted(excess, "plan.method=zero3") for excess in (None, AFTER_ANY))
    assert compute_s(cold) > compute_s(warm) + 2 * EXCESS_S


def test_nothing_takes_more_than_twice_its_time():
    """The rest of a pause delays the next task, by no more than the longest pause adds."""
    endless = Curve(sizes=(1e-9, 2e-9), values=(1e3, 1e3))
    warm, cold = (predicted(excess, "plan.method=ddp", "plan.overlap=false") for excess in (None, endless))
    assert compute_s(cold) == pytest.approx(2 * compute_s(warm), rel=0.02)


def test_what_a_pause_adds_follows_its_length():
    """At the same bandwidth ten times slower, the wait is about ten times as long, and so is what it adds."""
    added = []
    for ratio in (1.0, 0.1):
        fault = f'network.faults=[{{between=["device0", "switch"], bandwidth_ratio={ratio}}}]'
        words = ("plan.method=ddp", *([fault] if ratio < 1 else []))
        warm, slow = (predicted(excess, *words) for excess in (None, SLOWLY))
        waited_s = warm.step_time_s - sum(
            seconds for phase, seconds in warm.phases_s.items() if phase not in ("exposed_communication", "idle")
        )
        added.append((slow.phases_s["forward"] - warm.phases_s["forward"]) / (waited_s / 1e3))
    assert added == pytest.approx([1.0, 1.0], rel=0.05)
