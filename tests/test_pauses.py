"""Compute after a pause: caches no longer hold what it works with."""

from dataclasses import replace
from pathlib import Path

import pytest

from gssim.cluster import Curve
from gssim.scenario import load_scenario
from gssim.simulate import simulate

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
NEVER_WARM = {phase: Curve(sizes=(1e-6, 2e-6), values=(0.5, 0.5)) for phase in ("forward", "backward")}
SLOWLY = {phase: Curve(sizes=(1e3, 2e3), values=(1.0, 2.0)) for phase in ("forward", "backward")}


def predicted(excess, *overrides):
    loaded = load_scenario(SCENARIOS / "lab-2-hosts.toml", ["run.steps=4", *overrides])
    cluster = loaded.scenario.cluster
    types = {
        name: replace(
            kind,
            step_jitter_ratio=0.0,
            task_jitter_ratio=0.0,
            profiles=tuple(replace(profile, pause_excess_ratio=excess) for profile in kind.profiles),
        )
        for name, kind in cluster.device_types.items()
    }
    changed = replace(loaded.scenario, cluster=replace(cluster, device_types=types))
    return simulate(replace(loaded, scenario=changed)).result


@pytest.mark.parametrize("overrides", [(), ("plan.micro_batches=4",), ("plan.recompute=full",)], ids=" ".join)
def test_a_device_that_never_waits_stays_warm(overrides):
    warm, cold = (predicted(excess, "plan.method=single", *overrides) for excess in ({}, NEVER_WARM))
    assert cold.step_time_s == pytest.approx(warm.step_time_s, rel=1e-12)


def test_after_a_pause_every_piece_takes_longer_once():
    """Forward and backward wait for messages once a step: each of their pieces finds its caches empty."""
    warm, cold = (predicted(excess, "plan.method=ddp", "plan.overlap=false") for excess in ({}, NEVER_WARM))
    for phase in ("forward", "backward"):
        assert cold.phases_s[phase] == pytest.approx(1.5 * warm.phases_s[phase], rel=0.1)
    assert cold.phases_s["optimizer"] == pytest.approx(warm.phases_s["optimizer"], rel=1e-9)


def test_micro_batches_keep_each_other_warm():
    """What one has just used is there for the next: the wait comes once a step, for all of them."""
    words = ("plan.method=ddp", "plan.micro_batches=4")
    warm, cold = (predicted(excess, *words) for excess in ({}, NEVER_WARM))
    assert warm.phases_s["forward"] * 1.1 < cold.phases_s["forward"] < warm.phases_s["forward"] * 1.2


def test_what_a_pause_adds_follows_its_length():
    """At the same bandwidth ten times slower, the wait is about ten times as long, and so is what it adds."""
    added = []
    for ratio in (1.0, 0.1):
        fault = f'network.faults=[{{between=["device0", "switch"], bandwidth_ratio={ratio}}}]'
        words = ("plan.method=ddp", *([fault] if ratio < 1 else []))
        warm, slow = (predicted(excess, *words) for excess in ({}, SLOWLY))
        forward_s, waited_s = (
            warm.phases_s["forward"],
            warm.step_time_s
            - sum(
                seconds for phase, seconds in warm.phases_s.items() if phase not in ("exposed_communication", "idle")
            ),
        )
        added.append((slow.phases_s["forward"] - forward_s) / (forward_s * waited_s / 1e3))
    assert added == pytest.approx([1.0, 1.0], rel=0.05)
