"""What each rank of a real run measured, and the Result that all of them make."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import torch

from gsreal.course import density_by_step, refuse_divergence
from gsreal.machine import provenance
from gsreal.measure import RankStep, Seen, collectives_of
from gssim.result import (
    Density,
    Division,
    Evaluation,
    RankClass,
    Result,
)
from gssim.scenario import Loaded


@dataclass
class RankReport:
    """What one rank measured."""

    device: str
    ends_s: list[float]
    phases_s: dict[str, float]
    step: RankStep | None
    """One step, where a trace is asked for."""
    losses: list[float]
    """This rank's part of the losses since the training began, or was resumed."""
    losses_before: tuple[float, ...]
    """All ranks' losses before that."""
    pushed_by_step: list[tuple[int, int]]
    """Entries sent and offered."""
    carried_by_step: tuple[float, float] | None
    """Bytes that its device sent and received in a step, where they are counted: in the lab."""
    evaluations: list[Evaluation]
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    seen: list[Seen]
    divisions: tuple[Division, ...]
    pushed: tuple[int, int]
    """Entries sent and offered in the timed steps."""
    published: tuple[int, int]
    memory_counter: str


def result_of(loaded: Loaded, reports: list[RankReport], device: torch.device) -> Result:
    """Return the Result of all ranks' reports."""
    scenario = loaded.scenario
    rank_times = [[end - start for start, end in pairwise(report.ends_s)] for report in reports]
    times = [fmean(step) for step in zip(*rank_times, strict=True)]
    step_time_s = median(times)
    total, divisions = scenario.workload.global_batch_size, reports[0].divisions
    samples = divisions[-1].samples if divisions else scenario.batch_sizes
    shard_shares = divisions[-1].shard_shares if divisions else scenario.shard_shares
    ranks = tuple(
        RankClass(
            ranks=(rank,),
            count=1,
            device=report.device,
            peak_allocated_bytes=report.peak_allocated_bytes,
            peak_reserved_bytes=report.peak_reserved_bytes,
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
    scale = step_time_s / sum(phases_s.values())  # ranks have their median steps at different times
    return Result(
        source="measured",
        scenario_id=scenario.scenario_id,
        calibration_id=loaded.calibration_id,
        scenario=scenario.resolved(),
        step_time_s=step_time_s,
        step_time_p10_s=sorted(times)[len(times) // 10],
        step_times_s=tuple(times),
        phases_s={name: value * scale for name, value in phases_s.items()},
        fits=True,
        throughput_samples_per_s=total / step_time_s,
        density=Density(
            push=_density([report.pushed for report in reports], scenario.plan.push.threshold),
            publish=_density([report.published for report in reports], scenario.plan.publish.threshold),
            push_by_step=density_by_step([report.pushed_by_step for report in reports], scenario.plan.push.threshold),
        ),
        collectives=collectives_of([report.seen for report in reports]),
        ranks=ranks,
        idle_devices=scenario.idle_devices,
        loss=loss,
        evaluation=tuple(reports[0].evaluations),
        divisions=divisions,
        provenance={
            **provenance(device),
            "backend": scenario.cluster.backend,
            "memory_counter": reports[0].memory_counter,
            "seed": scenario.run.seed,
        },
    )


def _density(ranks: Sequence[tuple[int, int]], threshold: float | None) -> float | None:
    """Return the part of what all ranks could send that they sent; None where nothing is thresholded."""
    sent, offered = map(sum, zip(*ranks, strict=True))
    return sent / offered if threshold is not None and offered else None
