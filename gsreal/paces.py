"""The ranks' paces in a real run: slow ranks made so on purpose, and shares that follow what all have measured."""

import time

import torch
import torch.distributed as dist

from gsreal.measure import Timeline
from gssim.result import COMPUTE_PHASES, UPDATE_PHASES, Division
from gssim.scenario import Scenario, after_step, begin

WORK = 64
"""Side of the matrices that a slow rank multiplies."""


def slow_down(timeline: Timeline, since: int, phase: str, *, ratio: float, device: torch.device) -> None:
    """Work on until what was done in a phase since a mark has taken `ratio` times as long (waits do not count).

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
    """Divides batch and shards by the ranks' paces: all tell their times, and the controller decides alike on each."""

    def __init__(self, scenario: Scenario, device: torch.device) -> None:
        self.following, self.device = begin(scenario), device
        self.compute_s: tuple[float, ...] = ()
        self.update_s: tuple[float, ...] = ()
        """Of every rank, in the last step."""

    def share(self, timeline: Timeline) -> None:
        """Tell all ranks how long this one has worked since its last step's end, and learn the same of them."""
        phases = timeline.phases_since(timeline.step_mark)
        with timeline.span("share compute times", "exposed_communication"):
            mine = [sum(phases[name] for name in names) for names in (COMPUTE_PHASES, UPDATE_PHASES)]
            own = torch.tensor(mine, dtype=torch.float64, device=self.device)
            found = own.new_empty(len(mine) * dist.get_world_size())
            dist.all_gather_into_tensor(found, own)
            self.compute_s, self.update_s = (tuple(each) for each in found.view(-1, len(mine)).T.tolist())

    def follow(self, step: int) -> Division | None:
        """Return the new division from the step after `step` on, if there is one."""
        known = len(self.following.divisions)
        self.following = after_step(self.following, step=step, compute_s=self.compute_s, update_s=self.update_s)
        new = self.following.divisions[known:]
        return new[0] if new else None
