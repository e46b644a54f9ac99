"""Densities over a run: a target and what it comes to; what ranks send where steps differ."""

from dataclasses import replace

import pytest
from strategies import PARAMETERS, exponential_statistics, exponential_tensor, loaded_of, scenario_of, star

from gssim.simulation import simulate
from gssim.terminal import print_result
from gssim.workload.gradient_statistics import RankTrace, Sketch


@pytest.mark.parametrize("zeros", [False, True])
def test_people_hear_which_density_is_predicted_beside_its_target_and_why(zeros, capsys):
    push = {"threshold": 0.05, "kind": "target-density"}
    run = {"steps": 6, "warmup_steps": 1}
    scenario = scenario_of(star(2), {"method": "gs", "push": push}, run=run)
    tensor = exponential_tensor(1e-3, 3e-4)
    few = Sketch(mean=1e-3, rms=1e-3, tail_ratios=(0.02,) * 20)
    if zeros:
        tensor = replace(tensor, blocks=tuple(replace(each, sketches=(few, few)) for each in tensor.blocks))
    trace = RankTrace(samples=4, tensors=dict.fromkeys(PARAMETERS, tensor))
    result = simulate(loaded_of(scenario, exponential_statistics(traces=(trace,)))).result
    print_result(result)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"target density 0.05: {result.density.push:.4g} predicted" in shown
    assert result.density.push == pytest.approx(0.02 if zeros else 0.05, rel=1e-3)
    assert ("zeros are never sent" in shown) is zeros


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
