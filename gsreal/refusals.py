"""What can be simulated but not executed yet: refused before any rank starts."""

from gssim.scenario import Scenario
from gssim.units import UserError


def check_plan(scenario: Scenario, *, where: str) -> None:
    """Raise UserError where the plan is one that only the simulator can carry out; `where` names the file."""
    policies = scenario.policies
    if policies.gradients != "push":
        return
    if policies.parameters != "replicated":
        raise UserError(
            f"{where}: plan.parameters = '{policies.parameters}' with pushed gradients (method "
            f"'{scenario.plan.method}'): can only be simulated yet; gsreal pushes where every rank keeps all parameters"
        )
    if policies.push_axis == "dp_replicate":
        raise UserError(
            f"{where}: plan.method = '{scenario.plan.method}': can only be simulated yet; gsreal pushes among "
            "all ranks, not across nodes alone (method 'gs')"
        )
