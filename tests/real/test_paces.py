"""Slow ranks made on purpose, and what a rank tells of its own work: waits for others are no part of it."""

import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from gsreal.measure import Timeline  # noqa: E402
from gsreal.run.rank_speed import SlowDevice, multiply_matrices  # noqa: E402

CPU = torch.device("cpu")
TICK_S = 1e-5


class Clock:
    """A clock that goes on by a tick whenever it is looked at."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", found)
    return found


def started() -> Timeline:
    timeline = Timeline(0, CPU)
    timeline.restart()
    return timeline


def about(seconds: float):
    return pytest.approx(seconds, abs=20 * TICK_S)


def test_waits_inside_a_phase_are_not_the_ranks_own_work(clock):
    timeline = started()
    with timeline.span("backward", "backward"):
        clock.spend(0.02)
        with timeline.span("wait", "exposed_communication"):
            clock.spend(0.04)
    found = timeline.phases_since(timeline.step_mark)
    assert found["backward"] == about(0.02)
    assert found["exposed_communication"] == about(0.04)
    timeline.end_step()
    assert sum(timeline.phases_since(timeline.step_mark).values()) == 0  # a new step, of which nothing is known
    with timeline.span("forward", "forward"):
        clock.spend(0.01)
    found = timeline.phases_since(timeline.step_mark)
    assert (found["forward"], found["backward"]) == (about(0.01), 0)


@pytest.mark.parametrize("units", [1, 4])
def test_a_slow_device_takes_as_much_longer_as_is_said_and_works_before_the_phase(clock, units):
    timeline = started()
    slow = SlowDevice(timeline, CPU)
    taken = []
    for ratio, samples in ((1.0, units), (3.0, units), (3.0, 2 * units), (1.0, units)):
        slow.ratio = ratio
        with slow.phase("forward", samples), timeline.span("forward", "forward"):
            clock.spend(0.01 * samples / units)
            with timeline.span("wait", "exposed_communication"):
                clock.spend(0.5)
        taken.append(timeline.phases_since(timeline.step_mark)["forward"])
        timeline.end_step()
    assert taken == [about(each) for each in (0.01, 0.03, 0.06, 0.01)]
    spans, _ = timeline.read()
    labels = [span.label for span in spans if span.phase == "forward"]
    late = "slowed down forward (emulated)"
    assert labels == ["forward", late, "forward", late, "forward", "forward"]


def test_work_takes_the_time_that_it_is_given(clock):
    began_s = clock.now_s
    multiply_matrices(0.02, CPU)
    assert clock.now_s - began_s == about(0.02)
