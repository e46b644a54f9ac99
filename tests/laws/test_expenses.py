"""Price and energy of a step: energy lies between all devices idle and all computing, in proportion to their times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import device_type, loaded_of, scenario_of, star

from gssim.result import PHASES, RankClass
from gssim.scenario import Scenario
from gssim.simulation import energy_j, simulate

POWERED = {"fast": device_type(busy_power_w="300 W", idle_power_w="0.1 kW")}


def rank_class(count: int = 1, device: str = "fast", **phases_s: float) -> RankClass:
    return RankClass(
        ranks=tuple(range(count)),
        count=count,
        device=device,
        peak_allocated_bytes=0.0,
        peak_by_category_bytes={},
        phases_s=dict.fromkeys(PHASES, 0.0) | phases_s,
        batch_share=1.0,
        shard_share=1.0,
    )


def two_ranks(**types) -> Scenario:
    return scenario_of(star(2, types=types or POWERED), {"method": "ddp"})


def test_a_device_that_computes_takes_its_busy_power_and_one_that_waits_its_idle_power():
    scenario = two_ranks()
    assert energy_j(scenario, 2.0, [rank_class(forward=2.0)]) == pytest.approx(600.0)
    assert energy_j(scenario, 2.0, [rank_class(exposed_communication=1.0, idle=1.0)]) == pytest.approx(200.0)
    assert energy_j(scenario, 2.0, [rank_class(3, optimizer=1.0, idle=1.0)]) == pytest.approx(3 * 400.0)


@given(st.lists(st.floats(0, 1), min_size=6, max_size=6), st.integers(1, 100))
def test_energy_lies_between_that_of_waiting_and_that_of_computing(times_s, count):
    found = energy_j(two_ranks(), 1.0, [rank_class(count, **dict(zip(PHASES, times_s, strict=True)))])
    assert 100.0 * count * (1 - 1e-9) <= found <= 300.0 * count * (1 + 1e-9)


def test_a_result_has_the_energy_of_all_its_devices_and_none_where_a_power_is_not_known():
    result = simulate(loaded_of(two_ranks())).result
    assert 200 * result.step_time_s < result.energy_j_per_step < 600 * result.step_time_s
    half = {"fast": device_type(busy_power_w=300.0)}
    assert simulate(loaded_of(two_ranks(**half))).result.energy_j_per_step is None
