"""Densities over a run: a target and what it comes to; what ranks send where steps differ."""

import pytest
from strategies import PARAMETERS, exponential_statistics, exponential_tensor, loaded_of, scenario_of, star

from gssim.simulation import simulate
from gssim.terminal import print_result
from gssim.workload.gradient_statistics import RankTrace


@pytest.mark.parametrize(("steps", "said"), [(32, "every 32 steps (plan.push.reestimate_steps) and stay"), (1, None)])
def test_people_hear_which_density_is_predicted_beside_its_target_and_why(steps, said, capsys):
    push = {"threshold": 0.05, "kind": "target-density", "reestimate_steps": steps}
    run = {"steps": 6, "warmup_steps": 1}
    scenario = scenario_of(star(2), {"method": "gs", "push": push}, run=run)
    shrinking = RankTrace(samples=4, tensors=dict.fromkeys(PARAMETERS, exponential_tensor(1e-3, 3e-4)))
    result = simulate(loaded_of(scenario, exponential_statistics(traces=(shrinking,)))).result
    print_result(result)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"target density 0.05: {result.density.push:.4g} predicted" in shown
    assert (abs(result.density.push / 0.05 - 1) < 0.05) is (said is None)
    assert said is None or said in shown


def test_ranks_send_in_the_mean_what_collectives_carry_in_the_mean():
    """The step of the median payload, which is simulated, carries less than the mean of steps that shrink."""
    plan = {"method": "gs", "push": {"threshold": 1e-3}, "publish": {"threshold": 1e-4}}
    shrinking = RankTrace(samples=4, tensors=dict.fromkeys(PARAMETERS, exponential_tensor(3e-3, 1e-4)))
    scenario = scenario_of(star(2), plan, run={"steps": 8, "warmup_steps": 0})
    result = simulate(loaded_of(scenario, exponential_statistics(traces=(shrinking,)))).result
    carried = sum(each.payload_bytes for each in result.collectives if each.payload_bytes is not None)
    counts = sum(each.bytes * each.count for each in result.collectives if each.payload_bytes is None)
    sent = sum(each.count * each.bytes_sent for each in result.ranks)
    received = sum(each.count * each.bytes_received for each in result.ranks)
    assert carried < sent == pytest.approx(received)
    assert sent - carried == pytest.approx(counts, rel=0.5)  # who sends how much: each rank's own part stays with it
