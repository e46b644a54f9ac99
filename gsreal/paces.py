"""The ranks' paces in a real run: slow ranks made so on purpose, and batches that follow what all have measured."""

import time

import torch
import torch.distributed as dist

from gsreal.measure import Timeline
from gssim import shares
from gssim.result import COMPUTE_PHASES, BatchDivision
from gssim.scenario import Scenario

WORK = 64
"""Side of the matrices that a slow rank multiplies."""


def slow_down(timeline: Timeline, since: int, phase: str, *, ratio: float, device: torch.device) -> None:
    """Work on until what was computed in a phase since a mark has taken `ratio` times as long (waits do not count).

    An emulation of a slower device: the work comes after what it prolongs, in one piece.
    """
    if ratio == 1:
        return
    extra_s = (ratio - 1) * timeline.phases_since(since)[phase]
    with timeline.span(f"slowed down {phase} (emulated)", phase):
        end_s = time.perf_counter() + extra_s
        matrix = torch.ones(WORK, WORK, device=device)
        while time.perf_counter() < end_s:
            matrix @ matrix
            if device.type == "cuda":
                torch.cuda.synchronize(device)


class Follower:
    """Divides the batch by the ranks' paces: all ranks tell their times, and the controller decides alike on each."""

    def __init__(self, scenario: Scenario, device: torch.device) -> None:
        self.rules, self.least = scenario.plan.shares.replanning, scenario.plan.micro_batches
        self.most, self.device = scenario.most_samples, device
        self.watch = shares.Watch(scenario.batch_sizes)
        self.compute_s: tuple[float, ...] = ()
        """Of every rank, in the last step."""
        self.divisions: list[BatchDivision] = []

    def share(self, timeline: Timeline) -> None:
        """Tell all ranks how long this one has computed since its last step's end, and learn the same of them."""
        phases = timeline.phases_since(timeline.step_mark)
        with timeline.span("share compute times", "exposed_communication"):
            own = torch.tensor([sum(phases[name] for name in COMPUTE_PHASES)], dtype=torch.float64, device=self.device)
            found = own.new_empty(dist.get_world_size())
            dist.all_gather_into_tensor(found, own)
            self.compute_s = tuple(found.tolist())

    def divided(self, step: int) -> tuple[int, ...] | None:
        """Return how the batch is divided from the step after `step` on, where that is new."""
        before = self.watch.batch
        self.watch = shares.observe(self.watch, self.compute_s, self.rules, least=self.least, most=self.most)
        if self.watch.batch == before:
            return None
        self.divisions.append(BatchDivision(first_step=step + 1, samples=self.watch.batch))
        return self.watch.batch
