"""Hosts that plan their compute together come, in every digit, to what a process for each task comes to."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from strategies import device_type, machine_for, star
from tasks import task_of

from gssim.cluster.contention import communicating_excess
from gssim.collectives import Communication
from gssim.engine import machine, state
from gssim.engine.host import Host
from gssim.network import Clock
from gssim.result import Span, typical_phases
from gssim.result.result import phases_of
from gssim.scenario import load_scenario
from gssim.simulation import simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


class HostOfProcesses(Host):
    """A host on which each task waits by itself for its end, or for the next change of the load."""

    def __init__(self, env, *settings, **further):
        super().__init__(env, *settings, **further)
        self.changed = env.event()

    def _change(self):
        if self.changed.callbacks:
            self.changed.succeed()
            self.changed = self.env.event()

    def compute(self, rank_class, alone_s, device, *, refill_s=0.0):
        if alone_s <= 0:
            return
        self.computing[rank_class] = self.computing.get(rank_class, 0) + 1
        self._change()
        remaining_s, ended = alone_s, False
        while not ended:
            slowdown = 1 + (device.neighbour_slowdown_ratio - 1) * self._others(rank_class, self._computing())
            if self.communicating[rank_class]:
                slowdown *= 1 + communicating_excess(device, *self._load(rank_class))
            began_s, end = self.env.now, self.env.timeout(remaining_s * slowdown)
            yield self._first_of(end, self.changed)
            remaining_s = max(0.0, remaining_s - (self.env.now - began_s) / slowdown)
            ended = end.processed
        self.computing[rank_class] -= 1
        if not self.computing[rank_class]:
            del self.computing[rank_class]
        self._change()

    def _first_of(self, *events):
        woken = self.env.event()
        for event in events:
            event.callbacks.append(lambda _event: None if woken.triggered else woken.succeed())
        return woken


def both(monkeypatch, outcome):
    """Return an outcome as it is, and as SimPy's own clock and a process for each task make it."""
    together = outcome()
    with monkeypatch.context() as patched:
        patched.setattr(state, "Host", HostOfProcesses)
        patched.setattr(Clock, "run", simpy.Environment.run)
        patched.setattr(machine, "DRAWN_TOGETHER", 1)
        return together, outcome()


KIND = "cluster.device_types.intel-r-xeon-r-processor-core"
EVEN = (f"{KIND}.step_jitter_ratio=0", f"{KIND}.task_jitter_ratio=0")
WIDE = (f"{KIND}.task_jitter_ratio=0.8", f"{KIND}.neighbour_slowdown_ratio=1.5")


@pytest.mark.parametrize(
    "changes",
    [
        ("plan.method=pipeline", "plan.micro_batches=8", "plan.schedule=1f1b"),
        ("plan.method=ddp",),
        ("plan.method=zero2", *WIDE),
        ("plan.method=gs", "plan.push.threshold=1e-3"),
        ("plan.method=fsdp", *EVEN),
        ("run.slowdowns=[{rank=1, first_step=10, steps=5, compute_ratio=3}]", "plan.method=ddp"),
        ("network.faults=[{between=['device0', 'device1'], bandwidth_ratio=0.5}]", "plan.method=ddp"),
    ],
    ids=["pipeline", "ddp", "zero2-wide", "thresholds", "even", "slow-down", "fault"],
)
def test_compute_that_is_planned_together_takes_what_each_takes_alone(changes, monkeypatch):
    loaded = load_scenario(SCENARIOS / "demo.toml", list(changes))

    def outcome():
        simulated = simulate(loaded)
        return simulated.result.to_json(), simulated.spans, simulated.typical.machine.is_coupled

    together, alone = both(monkeypatch, outcome)
    assert together == alone
    assert together[2]


@given(st.data())
def test_neighbours_with_any_tasks_take_what_each_takes_alone(data):
    """Durations are few and simple, so that many events coincide."""
    ranks, steps = data.draw(st.integers(2, 4)), 2
    ratios = st.sampled_from([1.0, 1.25, 1.5])
    kind = device_type(
        neighbour_slowdown_ratio=data.draw(ratios),
        communicating_slowdown_ratio=data.draw(ratios),
        task_jitter_ratio=data.draw(st.sampled_from([0.0, 0.2])),
    )
    durations = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 1e-17]), min_size=1, max_size=4)

    def tasks():
        first, second, beside = (data.draw(durations) for _ in range(3))
        meet = task_of("x", "exposed_communication", "communication", communication="x", after=("a 0",))
        compute = [task_of(f"a {i}", "forward", duration_s=each) for i, each in enumerate(first)]
        more = [task_of(f"b {i}", "backward", "replication", duration_s=each) for i, each in enumerate(beside)]
        last = [task_of(f"c {i}", "backward", duration_s=each) for i, each in enumerate(second)]
        return [*compute, meet, *more, *last, task_of("end", "optimizer", duration_s=0.25, after=("x",))]

    lists = [tasks() for _ in range(ranks)]
    everyone = {"x": Communication("all-reduce", tuple(range(ranks)), 1000)}

    apart = star(ranks, bandwidth=1e3, types={"fast": kind})
    cluster = replace(apart, devices=tuple(replace(device, host="one") for device in apart.devices))

    def outcome():
        found = machine_for(cluster, *lists, communications=everyone)
        found.run(steps)
        return found.ends_s, found.recorded

    with pytest.MonkeyPatch.context() as patched:
        together, alone = both(patched, outcome)
    assert together == alone


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12))
def test_phases_of_a_step_need_only_the_spans_of_the_step(drawn):
    """`typical_phases` finds them by bisection, also where they nest, or span several steps."""
    spans = [Span(0, "compute", f"{i}", "forward", begin, begin + length) for i, (begin, length) in enumerate(drawn)]
    for start, end in pairwise([0.0, 7.0, 15.0, 21.0, 45.0]):
        phases = phases_of(spans, start_s=start, end_s=end)
        scale = (end - start) / sum(phases.values())
        assert typical_phases(spans, [start, end]) == {name: value * scale for name, value in phases.items()}


def test_variates_that_are_drawn_together_are_those_drawn_one_by_one():
    one_by_one, together = np.random.default_rng([3, 5]), machine._variates([3, 5])
    assert [next(together) for _ in range(200)] == [float(one_by_one.standard_normal()) for _ in range(200)]
