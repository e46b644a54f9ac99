"""Rank speeds in a real run: emulated slow ranks, and shares that follow the measured speeds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import torch
import torch.distributed as dist

from gsreal.machine import MATRIX_SIDE
from gsreal.measure import Timeline
from gssim.cluster import Cluster, DeviceType
from gssim.plan.rebalancing import Watch
from gssim.result import COMPUTE_PHASES, UPDATE_PHASES, Division
from gssim.scenario import Scenario, after_step, begin

WORK = 64
"""Size of the square matrices that a slow rank multiplies."""
LAB_PRODUCTS, LAB_WARM_UPS = 15, 3
"""Number of timed products for an emulated device's speed, and of untimed ones before: a core that has waited is at
first faster than its share.
"""
CORE_PRODUCTS, CORE_WARM_UPS = 5, 1
"""The same for a calibrated CPU, which has whole cores."""
LEAST_STEPS = 8
"""Fewest timed steps after which the speed of a calibrated CPU is measured: a shorter run is a test or a trial."""


def device_speed_ratio(cluster: Cluster, rank: int, device: torch.device, *, steps: int) -> float | None:
    """Return the rate of a large matrix product over the one that the cluster states for the rank's device.

    Measured are emulated devices, and CPUs with a profile after at least `LEAST_STEPS` steps; None for all others.
    A machine that others share may compute faster or slower than when its devices were calibrated, and predictions are
    then off by as much in their compute, whatever the plan. All ranks call it: calibrated CPUs are measured in turn, as
    in a calibration, but emulated devices at once.
    """
    if device.type != "cpu":
        return None
    types = [cluster.type_of(each) for each in range(dist.get_world_size())]
    stated = types[rank]
    if any(each.lab for each in types):
        return _speed_ratio(stated, LAB_PRODUCTS, LAB_WARM_UPS) if stated.lab else None
    if steps < LEAST_STEPS:
        return None
    ratio = None
    for turn in range(len(types)):
        if turn == rank and stated.profiles:
            ratio = _speed_ratio(stated, CORE_PRODUCTS, CORE_WARM_UPS)
        dist.barrier()
    return ratio


def _speed_ratio(stated: DeviceType, products: int, warm_ups: int) -> float | None:
    stated_flop_per_s = stated.peak_flop_per_s.get("fp32")
    if stated_flop_per_s is None:
        return None
    a, b = torch.randn(2, MATRIX_SIDE, MATRIX_SIDE)
    product, times_s = torch.empty_like(a), []
    for _ in range(warm_ups + products):
        began_s = time.perf_counter()
        torch.mm(a, b, out=product)
        times_s.append(time.perf_counter() - began_s)
    return 2 * MATRIX_SIDE**3 / median(times_s[warm_ups:]) / stated_flop_per_s


@dataclass
class SlowDevice:
    """Emulates a device slower by `ratio`: the rank computes longer.

    The extra time of a phase is computed from the mean of its last durations, and spent before the phase. So the
    phase's messages are late, as a slower device's are, and waiting for other ranks does not count.
    """

    timeline: Timeline
    device: torch.device
    ratio: float = 1.0
    own_s: dict[str, float] = field(default_factory=dict)
    """Running mean of each phase's seconds per unit at full speed."""

    @contextmanager
    def phase(self, phase: str, units: int = 1) -> Iterator[None]:
        """Make the phase inside take as long as on the slow device; `units`: samples, or 1."""
        before_s = self.own_s.get(phase)
        if self.ratio > 1 and before_s is not None:
            with self.timeline.span(f"slowed down {phase} (emulated)", phase):
                multiply_matrices((self.ratio - 1) * before_s * units, self.device)
        since = self.timeline.spans_so_far
        yield
        taken_s = self.timeline.phases_since(since)[phase] / max(1, units)
        self.own_s[phase] = taken_s if before_s is None else (before_s + taken_s) / 2


def multiply_matrices(seconds: float, device: torch.device) -> None:
    """Keep a device busy with matrix products for this many seconds."""
    end_s = time.perf_counter() + seconds
    matrix = torch.ones(WORK, WORK, device=device)
    while time.perf_counter() < end_s:
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Rebalancer:
    """Rebalances batch and shards by rank speeds.

    All ranks exchange their times, and the controller makes the same decision on each.
    """

    def __init__(self, scenario: Scenario, device: torch.device) -> None:
        self.state, self.device = begin(scenario), device
        self.compute_s: tuple[float, ...] = ()
        self.update_s: tuple[float, ...] = ()
        """Time of every rank's update in the last step."""

    def exchange_times(self, timeline: Timeline) -> None:
        """Gather from all ranks the seconds of compute and of updates since the end of the last step (a collective)."""
        phases = timeline.phases_since(timeline.step_mark)
        with timeline.span("share compute times", "exposed_communication", dist.group.WORLD):
            mine = [sum(phases[name] for name in names) for names in (COMPUTE_PHASES, UPDATE_PHASES)]
            own = torch.tensor(mine, dtype=torch.float64, device=self.device)
            gathered = own.new_empty(len(mine) * dist.get_world_size())
            dist.all_gather_into_tensor(gathered, own)
            self.compute_s, self.update_s = (tuple(each) for each in gathered.view(-1, len(mine)).T.tolist())

    @property
    def next_shares(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Samples of each rank in the next step, and the fraction of the parameters that each rank owns."""
        return self.state.samples, self.state.shard_shares

    def restore(self, step: int, samples: tuple[int, ...], shard_shares: tuple[float, ...]) -> None:
        """Restore batch split and shard sizes of a checkpoint, for steps from `step` on; speeds are measured anew."""
        if (samples, shard_shares) == self.next_shares:
            return
        most = tuple(map(max, self.state.most_samples, samples))
        division = Division(first_step=step, samples=samples, shard_shares=shard_shares)
        self.state = replace(
            self.state,
            watch=Watch(samples),
            shard_shares=shard_shares,
            most_samples=most,
            divisions=(division,),
        )

    def rebalance(self, step: int) -> Division | None:
        """Rebalance after a step; return the division that applies from the next step on, None if it stays the same."""
        known = len(self.state.divisions)
        self.state = after_step(self.state, step=step, compute_s=self.compute_s, update_s=self.update_s)
        new = self.state.divisions[known:]
        return new[0] if new else None
