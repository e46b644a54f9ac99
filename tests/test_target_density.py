"""What a push with a target density comes to is said, and why it is another density."""

import pytest
from strategies import PARAMETERS, exponential_statistics, exponential_tensor, loaded_of, scenario_of, star

from gssim.console import print_result
from gssim.gradients import RankTrace
from gssim.simulate import simulate


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
