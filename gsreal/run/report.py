"""Measurements of each rank of a real run, step by step, and the Result that combines them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import fmean, median

import torch

from gsreal.gradient_sharding import GradientSharding
from gsreal.lab.verify import InterfaceBytes
from gsreal.machine import CoreWait, provenance
from gsreal.measure import RankStep
from gsreal.measure.collectives import ObservedCollective, collectives_of
from gsreal.methods.training import Training
from gsreal.run.feed import HeldOut
from gssim.errors import UserError
from gssim.plan.buckets import fragment_steps
from gssim.result import Collective, Density, Division, Evaluation, Periods, RankClass, Result, fragment_periods
from gssim.scenario import Loaded, Scenario


class RunRecorder:
    """Records of one rank, taken after every step; `evaluations` are the same on all ranks."""

    def __init__(self, scenario: Scenario, training: Training, rank: int, device: torch.device) -> None:
        self.run, self.training = scenario.run, training
        self.every = self.run.evaluate_every_steps
        self.held_out = HeldOut(scenario, rank, device) if self.every else None
        self.evaluations: list[Evaluation] = []
        self.carried = InterfaceBytes()
        self.core_wait = CoreWait()
        self.restart()

    def restart(self) -> None:
        """Reset the counts of pushed entries, of carried bytes, and of waiting for a core."""
        self._pushed = [(0, 0)]
        self.carried.restart()
        self.core_wait.restart()

    def note(self, step: int) -> None:
        """Record a step, counted from 0 with the warm-up's; evaluates (a collective) if the run says so."""
        done = step + 1 - self.run.warmup_steps
        if done <= 0:
            return
        optimizer = self.training.optimizer
        if isinstance(optimizer, GradientSharding):
            self._pushed.append((optimizer.sent.entries, optimizer.sent.offered))
        else:
            self._pushed.append((0, 0))
        self.carried.note(last=done == self.run.steps)
        if self.held_out and self.every and (done == self.run.steps or done % self.every == 0):
            with self.training.timeline.pause(), self.carried.left_out():
                self.training.finish()
                self.evaluations.append(self.held_out.evaluate(self.training.module, step=step + 1))

    @property
    def pushed_by_step(self) -> list[tuple[int, int]]:
        """By timed step: gradient entries that this rank sent to other owners, and all that it could have sent."""
        return [(now[0] - before[0], now[1] - before[1]) for before, now in pairwise(self._pushed)]


def density_by_step(ranks: Sequence[Sequence[tuple[int, int]]], threshold: float | None) -> tuple[float, ...]:
    """Return the fraction of entries that all ranks sent, by step; empty if nothing is thresholded.

    >>> density_by_step([[(1, 4), (2, 4)], [(1, 4), (0, 4)]], threshold=0.1)
    (0.25, 0.25)
    """
    steps = [tuple(map(sum, zip(*step, strict=True))) for step in zip(*ranks, strict=True)]
    if threshold is None or not any(offered for _, offered in steps):
        return ()
    return tuple(sent / offered if offered else 0.0 for sent, offered in steps)


def refuse_divergence(losses: Sequence[float], evaluations: Sequence[Evaluation]) -> None:
    """Raise UserError if a loss is not finite: JSON cannot represent it, and the training is useless."""
    if all(map(isfinite, (*losses, *(each.loss for each in evaluations)))):
        return
    first = next((step for step, loss in enumerate(losses, start=1) if not isfinite(loss)), len(losses))
    raise UserError(
        f"workload.learning_rate: training diverged: after {first} timed steps the loss is not finite; "
        "allowed: a rate at which it falls"
    )


@dataclass
class RankReport:
    """The measurements that one rank sends to the first, which makes a Result of them all."""

    device: str
    ends_s: list[float]
    phases_s: dict[str, float]
    step: RankStep | None
    """One step, if a trace is asked for."""
    losses: list[float]
    """This rank's part of the losses since the training began, or was resumed."""
    losses_before: tuple[float, ...]
    """All ranks' losses before that."""
    pushed_by_step: list[tuple[int, int]]
    """Entries sent and offered."""
    carried_by_step: tuple[float, float] | None
    """Bytes that its device sent and received per step; None outside the lab, where they are not counted."""
    evaluations: list[Evaluation]
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    seen: list[ObservedCollective]
    divisions: tuple[Division, ...]
    pushed: tuple[int, int]
    """Entries sent and offered in the timed steps."""
    published: tuple[int, int]
    memory_counter: str
    core_wait_ratio: float | None
    """Fraction of the timed steps that its main thread could run, but waited for a core; None where it is unknown."""
    device_speed_ratio: float | None
    """Speed of its emulated device after the run over the one that the device's file states; None outside the lab."""


def outer_steps(scenario: Scenario, counted: int) -> list[bool] | None:
    """Return whether each of the last `counted` steps of a run ends with a synchronization; None without periods."""
    every, last = scenario.policies.sync_every_steps, scenario.run.warmup_steps + scenario.run.steps
    return None if every is None else [step % every == 0 for step in range(last - counted + 1, last + 1)]


def _periods(
    scenario: Scenario, times_s: Sequence[float], collectives: Sequence[Collective], sent: Sequence[float | None]
) -> Periods | None:
    """Return the times of inner and outer steps, and the bytes of a period; None without periods.

    `sent`: bytes that each rank's device sent in a mean step, if they are counted; if ranks divide replicas, most of
    these bytes stay inside a replica.
    """
    outer = outer_steps(scenario, len(times_s))
    if outer is None:
        return None
    every = scenario.policies.sync_every_steps or 1
    known = [each for each in sent if each is not None and not scenario.policies.divides_replicas]
    joining = (each for each in collectives if scenario.policies.joins_replicas(each.group))
    outer_bytes = float(sum(each.bytes * each.count for each in joining))
    if scenario.policies.in_fragments:
        return fragment_periods(
            times_s,
            last=scenario.run.warmup_steps + scenario.run.steps,
            every=every,
            fragments=fragment_steps(scenario.plan, scenario.policies),
            outer_bytes=outer_bytes,
            outer_bytes_sent=max(known) * every if known else None,
        )
    inner_s, outer_s = ([s for s, each in zip(times_s, outer, strict=True) if each is kind] for kind in (False, True))
    return Periods(
        every_steps=every,
        inner_step_time_s=median(inner_s) if inner_s else None,
        outer_step_time_s=median(outer_s),
        outer_bytes=outer_bytes,
        outer_bytes_sent=max(known) * len(times_s) / sum(outer) if known else None,
    )


def result_of(loaded: Loaded, reports: list[RankReport], device: torch.device) -> Result:
    """Return the Result of all ranks' reports."""
    scenario = loaded.scenario
    rank_times = [[end - start for start, end in pairwise(report.ends_s)] for report in reports]
    times = [fmean(step) for step in zip(*rank_times, strict=True)]
    collectives = collectives_of([report.seen for report in reports])
    sent = [report.carried_by_step[0] if report.carried_by_step else None for report in reports]
    periods = _periods(scenario, times, collectives, sent)
    step_time_s = None if periods is None else periods.step_time_s
    total, divisions = scenario.workload.global_batch_size, reports[0].divisions
    samples = divisions[-1].samples if divisions else scenario.batch_sizes
    shard_shares = divisions[-1].shard_shares if divisions else scenario.shard_shares
    ranks = tuple(
        RankClass(
            ranks=(rank,),
            count=1,
            device=report.device,
            peak_allocated_bytes=float(report.peak_allocated_bytes),
            peak_reserved_bytes=None if report.peak_reserved_bytes is None else float(report.peak_reserved_bytes),
            peak_by_category_bytes={},
            phases_s=report.phases_s,
            bytes_sent=report.carried_by_step[0] if report.carried_by_step else None,
            bytes_received=report.carried_by_step[1] if report.carried_by_step else None,
            batch_share=samples[rank] / total,
            shard_share=shard_shares[rank],
        )
        for rank, report in enumerate(reports)
    )
    loss = (
        *reports[0].losses_before,
        *(sum(losses) for losses in zip(*(report.losses for report in reports), strict=True)),
    )
    refuse_divergence(loss, reports[0].evaluations)
    phases_s = {name: fmean(report.phases_s[name] for report in reports) for name in reports[0].phases_s}
    return loaded.measured(
        times,
        phases_s,
        step_time_s=step_time_s,
        density=Density(
            push=_density([report.pushed for report in reports], scenario.plan.push.threshold),
            publish=_density([report.published for report in reports], scenario.plan.publish.threshold),
            push_by_step=density_by_step([report.pushed_by_step for report in reports], scenario.plan.push.threshold),
        ),
        periods=periods,
        collectives=collectives,
        ranks=ranks,
        loss=loss,
        evaluation=tuple(reports[0].evaluations),
        divisions=divisions,
        provenance={
            **provenance(device),
            "backend": scenario.cluster.backend,
            "memory_counter": reports[0].memory_counter,
            "seed": scenario.run.seed,
            **core_wait(reports),
            **device_speed(reports),
        },
    )


def core_wait(reports: Sequence[RankReport]) -> dict[str, float]:
    """Return `core_wait_ratio`, the largest of all ranks, for the provenance; nothing where it is unknown."""
    ratios = [report.core_wait_ratio for report in reports if report.core_wait_ratio is not None]
    return {"core_wait_ratio": round(max(ratios), 4)} if ratios else {}


def device_speed(reports: Sequence[RankReport]) -> dict[str, float]:
    """Return `device_speed_ratio`, the mean of all ranks, for the provenance; nothing where it is unknown."""
    ratios = [report.device_speed_ratio for report in reports if report.device_speed_ratio is not None]
    return {"device_speed_ratio": round(fmean(ratios), 4)} if ratios else {}


def _density(ranks: Sequence[tuple[int, int]], threshold: float | None) -> float | None:
    """Return the fraction of entries that all ranks sent, 0 where no other rank owns any; None without a threshold.

    >>> _density([(1, 4), (0, 4)], 0.1), _density([(0, 0)], 0.1), _density([(0, 0)], None)
    (0.125, 0.0, None)
    """
    sent, offered = map(sum, zip(*ranks, strict=True))
    if threshold is None:
        return None
    return sent / offered if offered else 0.0
