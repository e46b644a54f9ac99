"""Process of one rank of a real run, started by torchrun: builds, trains, measures; rank 0 writes the Result."""

import json
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from gsreal.gradient_sharding import GradientSharding, Sent
from gsreal.machine import device_name, settle
from gsreal.measure import MemoryCounter, RankStep, Timeline, combine_ranks, median_step, step_of_rank
from gsreal.measure.collectives import CollectiveRecorder, ObservedCollective
from gsreal.methods.apply import prepare
from gsreal.methods.blocks import compile_blocks
from gsreal.methods.training import Training, Weights
from gsreal.model_files.build import module_on
from gsreal.run.checkpoint import Checkpoints, Progress
from gsreal.run.checks import check_module
from gsreal.run.feed import Feed
from gsreal.run.nodes import check_nodes
from gsreal.run.progress import note_progress
from gsreal.run.rank import gather_json, join, run_on_rank
from gsreal.run.rank_speed import device_speed_ratio
from gsreal.run.report import RankReport, RunRecorder, outer_steps, result_of
from gssim.execution.files import write_text
from gssim.result import Span, chrome_trace, typical_phases
from gssim.scenario import Loaded, Scenario, load_scenario


def main(scenario_file: str, overrides: str, out: str, trace: str, folder: str, every: str) -> None:
    """Run one rank.

    `overrides`: a JSON list; `trace`, `folder`: empty if no spans or checkpoints are to be written.
    """
    warnings.filterwarnings("ignore")
    loaded = load_scenario(Path(scenario_file), json.loads(overrides), gradients_needed=False)
    checkpoints = Checkpoints(Path(folder), int(every)) if folder else None
    run(loaded, out=Path(out), trace=Path(trace) if trace else None, checkpoints=checkpoints)


def run(loaded: Loaded, *, out: Path, trace: Path | None, checkpoints: Checkpoints | None = None) -> None:
    """Train the scenario on this rank; on rank 0 write its Result to `out` and the spans to `trace`.

    With checkpoints, it resumes from the last one.
    """
    scenario = loaded.scenario
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    join(scenario.cluster.backend)
    device = settle(scenario.cluster, local_rank)
    check_nodes(scenario.cluster, device, where=loaded.file)
    report = measure(scenario, rank, device, checkpoints, traced=trace is not None)
    plain = gather_json(asdict(report))
    if rank == 0:
        reports: list[Any] = TypeAdapter(list[RankReport]).validate_python(plain)
        result = result_of(loaded, reports, device)
        write_text(out, result.to_json())
        if trace is not None:
            write_text(trace, chrome_trace(combine_ranks([each.step for each in reports]), result))


def measure(
    scenario: Scenario,
    rank: int,
    device: torch.device,
    checkpoints: Checkpoints | None = None,
    *,
    traced: bool = False,
) -> RankReport:
    """Return the measurements of training the scenario on this rank: of timed steps, then of memory and traffic.

    `traced`: with the spans of one of the timed steps.
    """
    note_progress("it builds the model")
    counter = MemoryCounter(device)
    training = build(scenario, Timeline(rank, device), device)
    feed = Feed(scenario, rank, device)
    course = RunRecorder(scenario, training, rank, device)
    resumed = checkpoints.resume(scenario, training) if checkpoints else Progress()
    if training.rebalancer is not None:
        feed.divide(training.rebalancer.state.samples)
    speed_ratio = partial(device_speed_ratio, scenario.cluster, rank, device, steps=scenario.run.steps)
    speed_before = None if scenario.cluster.type_of(rank).lab else speed_ratio()
    losses = _timed_steps(training, feed, course, resumed, checkpoints)
    core_wait_ratio = course.core_wait.ratio()
    speeds = [each for each in (speed_before, speed_ratio()) if each is not None]
    spans, ends_s = training.timeline.read()
    phases_s = _phases(scenario, spans, ends_s)
    sent, steps = _sent(training), len(ends_s) - 1
    pushed, published = ((each.entries, each.offered) for each in sent.values())
    payloads = {kind: [size / steps for size in each.by_bucket] for kind, each in sent.items()}
    allocated, reserved = _peak(training, feed, counter)
    step = _step(training, feed, counter, ends_s) if traced else None
    seen = _collectives(training, feed, payloads)
    return RankReport(
        device=device_name(device),
        ends_s=ends_s,
        phases_s=phases_s,
        step=step,
        losses=losses,
        losses_before=resumed.losses,
        pushed_by_step=course.pushed_by_step,
        carried_by_step=course.carried.by_step,
        evaluations=course.evaluations,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        seen=seen,
        divisions=training.rebalancer.state.divisions if training.rebalancer else (),
        pushed=pushed,
        published=published,
        memory_counter=counter.method,
        core_wait_ratio=core_wait_ratio,
        device_speed_ratio=fmean(speeds) if speeds else None,
    )


def _phases(scenario: Scenario, spans: list[Span], ends_s: list[float]) -> dict[str, float]:
    """Return the seconds of each phase in a typical step; in a run of periods, in the mean step of a typical period.

    That period has typical inner steps and a typical outer one; if fragments are synchronized, it has a typical step
    for each place in the period.
    """
    outer = outer_steps(scenario, len(ends_s) - 1)
    if outer is None or all(outer):
        return typical_phases(spans, ends_s)
    every, counted = scenario.policies.sync_every_steps or 1, range(len(outer))
    if scenario.policies.in_fragments:
        steps = [typical_phases(spans, ends_s, [n % every == place for n in counted]) for place in range(every)]
        return {name: sum(each[name] for each in steps) / every for name in steps[0]}
    inner_s, outer_s = (typical_phases(spans, ends_s, [each is kind for each in outer]) for kind in (False, True))
    return {name: ((every - 1) * inner_s[name] + outer_s[name]) / every for name in inner_s}


def _synchronizing(training: Training, steps: int) -> AbstractContextManager[None]:
    """Return a context in which the last of `steps` steps is an outer one, if the run has periods."""
    return training.periods.from_step(training.periods.every - steps) if training.periods else nullcontext()


def synchronized_step(training: Training, inputs: Tensor, targets: Tensor, weights: Weights, rank: int) -> None:
    """Train one more step; in a run of periods, an outer one, or a whole period if fragments are synchronized."""
    steps = training.periods.measured_steps if training.periods else 1
    with _synchronizing(training, steps):
        for _ in range(steps):
            training.step(inputs, targets, weights, rank)


def build(scenario: Scenario, timeline: Timeline, device: torch.device) -> Training:
    """Return the scenario's module, the same on every rank, prepared for its plan."""
    torch.manual_seed(scenario.run.seed)
    module = module_on(device, scenario.workload.precision, scenario.workload.model.module, where="workload.model")
    torch.backends.cuda.matmul.allow_tf32 = scenario.workload.tf32
    check_module(scenario, module)
    module.train()
    compile_blocks(scenario.workload.model, module)  # before blocks are wrapped, sharded and checkpointed
    return prepare(scenario, module, timeline, device)


def _sharding(training: Training) -> GradientSharding | None:
    return training.optimizer if isinstance(training.optimizer, GradientSharding) else None


SENT_KINDS = ("all-to-all-v", "all-gather-v")
"""Kinds of collectives of pushes and thresholded publishes."""


def _sent(training: Training) -> dict[str, Sent]:
    """Return the counts of this rank's pushes and publishes since the last reset, by kind of collective."""
    sharding = _sharding(training)
    sent = (sharding.sent, sharding.published) if sharding else (Sent(), Sent())
    return dict(zip(SENT_KINDS, sent, strict=True))


def _timed_steps(
    training: Training, feed: Feed, course: RunRecorder, resumed: Progress, checkpoints: Checkpoints | None
) -> list[float]:
    """Train warm-up and timed steps from the resumed step on; return this rank's part of the losses after the warm-up.

    After a resume, as many steps as the warm-up has are untimed, as long as some are left. A step that follows a save
    includes the save's duration.
    """
    run, rank, sharding = feed.scenario.run, feed.rank, _sharding(training)
    losses: list[Tensor] = []
    steps = range(resumed.step, run.warmup_steps + run.steps)
    feed.prepare(steps)
    dist.barrier()
    for step in steps:
        if step == min(resumed.step + run.warmup_steps, steps.stop - 1):
            training.timeline.restart()
            course.restart()
            if sharding:
                sharding.reset_counts()
        inputs, targets, weights = feed.at(step)
        training.slow_down(run.slowed(step - run.warmup_steps).get(rank, 1.0))
        loss = training.step(inputs, targets, weights, rank)
        _rebalance(training, feed, step - run.warmup_steps)
        if step >= run.warmup_steps:
            own = weights.ranks[rank] / feed.copies  # so that all ranks' parts add up to the loss
            losses.append(loss * own if own else torch.zeros(()))  # no samples: its mean is NaN
        course.note(step)
        if checkpoints and checkpoints.is_due(step + 1, steps.stop):
            checkpoints.save(feed.scenario, training, step=step + 1, losses=losses_so_far(resumed, losses, rank))
        note_progress(f"step {step + 1} done")
        done, total = step + 1, steps.stop
        if rank == 0 and (done == total or done % max(1, total // 10) == 0):
            print(f"gsreal: step {done} of {total}", file=sys.stderr, flush=True)
    training.slow_down(1.0)
    return [float(loss) for loss in losses]


def losses_so_far(resumed: Progress, losses: Sequence[Tensor], rank: int) -> list[float]:
    """Return this rank's part of all losses; those from before the resume are on the first rank."""
    before = resumed.losses if rank == 0 else (0.0,) * len(resumed.losses)
    return [*before, *(float(loss) for loss in losses)]


def _rebalance(training: Training, feed: Feed, step: int) -> None:
    """Rebalance batch and shards after a step, if they follow the rank speeds, and these have changed enough."""
    if training.rebalancer is None:
        return
    owned = training.rebalancer.state.shard_shares
    division = training.rebalancer.rebalance(step)
    if division is None:
        return
    feed.divide(division.samples)
    sharding = _sharding(training)
    if sharding and division.shard_shares != owned:
        sharding.reshard(division.shard_shares)


def _peak(training: Training, feed: Feed, counter: MemoryCounter) -> tuple[int, int | None]:
    """Return (allocated, reserved) peak bytes: medians of three more steps, or periods if their steps differ.

    gloo's threads may hold a buffer a moment longer than the call that used it, so that single steps vary.
    """
    peaks = []
    sharding = _sharding(training)
    for step in range(3):
        inputs, targets, weights = feed.at(step)
        tensors = [*training.module.parameters(), *training.module.buffers(), inputs, targets]
        tensors += _state_of(training)  # its keys are the master copies
        tensors += [
            value for state in _state_of(training).values() for value in state.values() if torch.is_tensor(value)
        ]
        tensors += training.periods.state if training.periods else []
        tensors += training.compressor.state if training.compressor else []
        tensors += [*sharding.pusher.persistent_tensors, *sharding.publisher.persistent_tensors] if sharding else []
        peaks.append(
            counter.peak_of(partial(synchronized_step, training, inputs, targets, weights, feed.rank), tensors)
        )
        note_progress(f"step {step + 1} of those for memory done")
    reserved = [peak for _, peak in peaks if peak is not None]
    return sorted(peak for peak, _ in peaks)[1], sorted(reserved)[1] if reserved else None


def _state_of(training: Training) -> dict[Any, dict[str, Any]]:
    optimizer = training.optimizer
    if isinstance(optimizer, GradientSharding):
        return dict(optimizer.optimizer.state)
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)  # ZeRO's own part is in an inner optimizer
    return dict(inner.state)


def _collectives(training: Training, feed: Feed, payloads: dict[str, list[float]]) -> list[ObservedCollective]:
    """Return the collectives that one more step submits to the process group.

    `payloads`: by kind, the mean bytes of the timed steps for each bucket. That step checks the sharding's own counts
    of bytes sent against those of the process group: they must be equal.
    """
    sharding = _sharding(training)
    if sharding:
        sharding.reset_counts()
    inputs, targets, weights = feed.at(2)
    with CollectiveRecorder() as recorder:
        synchronized_step(training, inputs, targets, weights, feed.rank)
    training.finish()
    for kind, sent in _sent(training).items():
        dependent = [entry for entry in recorder.seen if entry.data_dependent and entry.kind == kind]
        if dependent and sharding:
            _set_payloads(dependent, sent.by_bucket, payloads[kind])
    return recorder.seen


def _set_payloads(dependent: list[ObservedCollective], counted: list[int], payloads: list[float]) -> None:
    """Set the payloads of one step's entries, which go through the buckets in turn, to the mean over timed steps.

    `counted`: bytes that were sent in this step, by bucket.
    """
    buckets = len(counted)
    seen = [sum(entry.sent_bytes for entry in dependent[i::buckets]) for i in range(buckets)]
    if seen != counted:
        raise RuntimeError(f"sent {counted} bytes, but the process group saw {dependent}")
    for number, entry in enumerate(dependent):  # a push for each bucket in each micro-batch that pushes
        entry.sent_bytes = payloads[number % buckets] * buckets / len(dependent)


def _step(training: Training, feed: Feed, counter: MemoryCounter, ends_s: list[float]) -> RankStep:
    """Return a timed step of median length, with the memory of one more.

    In a run of periods, these are an inner step and the outer one after it; if fragments are synchronized, the last
    whole period.
    """
    scenario = feed.scenario
    inputs, targets, weights = feed.at(1)
    outer = outer_steps(scenario, len(ends_s) - 1)
    number, steps = median_step(ends_s, outer), 1
    if outer is not None and scenario.policies.in_fragments:
        last = max(n for n, each in enumerate(outer) if each)
        steps = min(scenario.policies.sync_every_steps or 1, last + 1)
        number = last + 1 - steps
    elif outer is not None and number > 0 and not outer[number - 1]:
        number, steps = number - 1, 2

    def again() -> None:
        for _ in range(steps):
            training.step(inputs, targets, weights, feed.rank)

    with _synchronizing(training, steps):
        return step_of_rank(
            training.timeline, number, device=device_name(counter.device), counter=counter, again=again, steps=steps
        )


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
