"""What a step costs, in money and in energy: of the devices that take part, whatever they wait for."""

from collections import Counter
from collections.abc import Sequence

from gssim.result import RankClass
from gssim.scenario import Scenario

WAITING_PHASES = ("exposed_communication", "idle")
"""In which a device takes the power that it takes while it waits; in all others it computes."""


def cost_usd(scenario: Scenario, step_time_s: float) -> float | None:
    """Return the price of all devices for the time of a step; None where one's is not known."""
    counts = Counter(device.type for device in scenario.cluster.devices[: scenario.ranks])
    prices = {name: scenario.cluster.device_types[name].price_usd_per_h for name in counts}
    known = [price * counts[name] for name, price in prices.items() if price is not None]
    return sum(known) * step_time_s / 3600 if len(known) == len(prices) else None


def energy_j(scenario: Scenario, step_time_s: float, ranks: Sequence[RankClass]) -> float | None:
    """Return what all devices take in a step, without hosts and network; None where one's power is not known.

        E = T * sum over ranks of (idle power + (busy power - idle power) * part of the step in which it computes)

    Assumes the same power for whatever is computed: a data sheet's is the most. Nodes with eight H100 took at most
    0.82 of theirs in training (Latif et al. 2024, arXiv:2412.08602).
    """
    power_w = 0.0
    for each in ranks:
        device = scenario.cluster.device_types[each.device]
        if device.busy_power_w is None or device.idle_power_w is None:
            return None
        whole_s = sum(each.phases_s.values())
        waits_s = sum(each.phases_s[name] for name in WAITING_PHASES)
        busy_ratio = 1 - waits_s / whole_s if whole_s else 0.0
        power_w += each.count * (device.idle_power_w + (device.busy_power_w - device.idle_power_w) * busy_ratio)
    return power_w * step_time_s
