"""Runs on every rank of a test: several cases one after another in one process group; rank 0 writes what they showed.

Arguments: a JSON file of cases {name: {"overrides": [...], "scenario": FILE, "plant": bool, "onednn": bool,
"same_peak_ratio": number}} and the file to write. `onednn`: false where products must take no scratch: in 16 bits
oneDNN's kernels copy matrices to layouts of their own, which depend on the shape and the processor, and which only a
profile of the processor tells. `same_peak_ratio`: relative difference up to which peaks of steps count as equal, where
what is sent varies.
"""

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_training import cases_in, from_all_ranks, full_parameters, largest_difference, meet, write_found
from torch.distributed.tensor import DTensor

from gsreal.measure import MemoryCounter, Timeline
from gsreal.measure.collectives import CollectiveRecorder, collectives_of
from gsreal.methods.training import LossScaler, Training
from gsreal.run.feed import Feed
from gsreal.run.rank import run_on_rank
from gsreal.run.worker import build, synchronized_step
from gssim.execution.cache import Shared
from gssim.scenario import load_scenario, single_device

SHARED = Shared()
"""Models and clusters that cases have in common."""
STEPS = 5
FEWEST_PEAKS, MOST_PEAKS, SEEN = 3, 18, 3
"""A step's peak varies upwards: gloo's threads may hold a buffer a moment longer than the call that used it. Steps are
counted until each rank has seen its least peak this often. Where a router chooses among divided experts, rows differ
from step to step: no peak comes twice, none is predicted, and the fewest steps are counted."""
SAME_PEAK = 1e-5
"""Relative difference up to which peaks count as equal: one batch in ten does without a few bytes."""
CLEAN_STEPS, MOST_SKIPPED = 2, 24
"""Steps in a row that a dynamic factor of the loss skips none of, before peaks count, and most steps until then: the
first one makes what later ones find."""
SETTLED_READINGS, MOST_READINGS, READING_S = 10, 200, 0.003
"""Equal readings in a row that show that nothing is under way any more, most readings, and seconds between them."""


def main(cases_file: str, out: str) -> None:
    counter = MemoryCounter(torch.device("cpu"))
    meet()
    found = {}
    for name, case in cases_in(cases_file).items():
        with torch.backends.mkldnn.flags(enabled=case.get("onednn", True)):
            found[name] = run_case(case, counter)
    write_found(found, out)


def settled_bytes(counter: MemoryCounter) -> int:
    """Return the bytes that are alive when gloo's threads have let go of the last collective's buffers.

    One that is still held would be taken for what an earlier case left, and be missing from all peaks. On cores that
    other ranks use, a thread may have to wait before it lets go.
    """
    gc.collect()
    dist.barrier()
    readings = [counter.alive()]
    while len(readings) < SETTLED_READINGS or (
        len(readings) < MOST_READINGS and len(set(readings[-SETTLED_READINGS:])) > 1
    ):
        time.sleep(READING_S)
        readings.append(counter.alive())
    return readings[-1]


def run_case(case: dict[str, Any], counter: MemoryCounter) -> dict[str, Any]:
    file = Path(case["scenario"])
    scenario = load_scenario(file, case["overrides"], gradients_needed=False, shared=SHARED).scenario
    device, rank = torch.device("cpu"), dist.get_rank()
    counter._base += settled_bytes(counter)  # what earlier cases left (caches) is not this one's
    timeline = Timeline(rank, device)
    training = build(scenario, timeline, device)
    training.slow_down(scenario.run.slowed(0).get(rank, 1.0))
    feed = Feed(scenario, rank, device)

    losses: list[float] = []
    peaks: list[int] = []
    same = case.get("same_peak_ratio", SAME_PEAK)

    def peak_of(step: int) -> int:
        inputs, targets, weights = feed.at(step)

        def train() -> None:
            loss = training.step(inputs, targets, weights, rank)
            own = weights.ranks[rank] / feed.copies  # so that all ranks' parts add up to the loss
            losses.append(float(loss) * own if own else 0.0)

        return counter.peak_of(train, [])[0]

    def peak_of_period(step: int) -> int:
        """Return the peak of an outer step, or a period, in which all is synchronized: then most is held."""
        return counter.peak_of(lambda: synchronized_step(training, *feed.at(step), rank), [])[0]

    record = Record(timeline)
    early = all_steps_are_alike(case, scenario.policies.publish_overlaps, training)
    for step in range(STEPS):
        with record if early and step == STEPS - 1 else nullcontext():
            peaks.append(peak_of(step))
    peaks = peaks[2:]  # the first steps make what later ones find
    parts = from_all_ranks(losses)
    if training.periods is not None:  # ranks' parameters are equal after a synchronization
        peak_of = peak_of_period
        peak_of(STEPS)
        peaks = []
    if training.compressor is not None:  # what it keeps is made in the first steps that it compresses
        peaks = []
    training.finish()
    parameters = full_parameters(training.module)
    held = sum(p.numel() * p.element_size() for p in parameters.values())  # these copies are not the step's
    if scenario.policies.publish_overlaps:
        peak_of(STEPS)  # no step but this one begins with nothing under way
    peaks = without_skipped_steps(peaks, training.scaler, peak_of)
    most = most_peaks(scenario)
    while len(peaks) < FEWEST_PEAKS or (len(peaks) < most and not all_agree(least_was_seen(peaks, same))):
        peaks.append(peak_of(STEPS + len(peaks)) - held)
    if not early:
        with record:
            synchronized_step(training, *feed.at(STEPS + len(peaks)), rank)
            plant(case)
        training.finish()
    seen = from_all_ranks(record.seen)
    all_peaks = from_all_ranks((min(peaks), statistics.median_low(peaks), sorted(set(peaks))))
    difference, size, ratio = against_single_device(scenario, parameters) if rank == 0 else (0.0, 0.0, 0.0)
    return {
        "losses": [sum(each) for each in zip(*parts, strict=True)],
        "losses_alone": references[single_device(scenario).scenario_id][2] if rank == 0 else [],
        "samples": [rows.stop - rows.start for rows in feed.rows],
        "difference": difference,
        "largest_parameter": size,
        "difference_ratio": ratio,
        "replicas_equal": replicas_equal(training, parameters, scenario.policies.replica_size),
        "collectives": [list(entry.key) for entry in collectives_of(seen)],
        "payloads": [entry.payload_bytes for entry in collectives_of(seen)],
        "peaks": [least for least, _, _ in all_peaks],
        "usual_peaks": [usual for _, usual, _ in all_peaks],
        "peaks_of_steps": [different for _, _, different in all_peaks],
        "labels": record.labels,
        "dtensors": sum(isinstance(parameter, DTensor) for parameter in training.module.parameters()),
    }


def plant(case: dict[str, Any]) -> None:
    """Send what no prediction knows of, where a case asks for it."""
    if case.get("plant"):
        dist.all_reduce(torch.ones(7))


def most_peaks(scenario: Any) -> int:
    """Return the most peaks to count: the fewest, where a router chooses among divided experts."""
    by_router = scenario.policies.ep > 1 and scenario.workload.expert_routing == "router"
    return FEWEST_PEAKS if by_router else MOST_PEAKS


class Record(CollectiveRecorder):
    """What is sent in its context, and the labels of the spans that end there."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.labels: list[str] = []
        self._timeline, self._before = timeline, 0

    def __enter__(self) -> "Record":
        self._before = self._timeline.spans_so_far
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.labels = [mark.label for mark in self._timeline.marks_since(self._before)]


def replicas_equal(training: Training, parameters: dict[str, torch.Tensor], replica_size: int) -> bool:
    """Return whether replicas hold the same parameters: float sums differ by the order of addition alone."""
    replicated: dict[Any, torch.Tensor] = {**parameters}
    shards = 1
    if training.periods is not None and training.periods.in_fragments:  # ranks' own parameters are mixed with these
        replicated, shards = dict(enumerate(training.periods.outer_parameters)), replica_size
    sums = from_all_ranks({name: float(p.double().sum()) for name, p in replicated.items()})
    return all(each == sums[place % shards] for place, each in enumerate(sums))


def all_steps_are_alike(case: dict[str, Any], publish_overlaps: bool, training: Training) -> bool:
    """Return whether the last of the first steps does and holds what later ones do.

    Then its collectives are recorded while its peak is counted, and no further step is needed for them. In other cases
    the first steps skip updates or synchronizations, leave work for later ones, or vary in what they send.
    """
    late = case.get("plant") or case.get("same_peak_ratio", SAME_PEAK) != SAME_PEAK
    scaled = training.scaler is not None and training.scaler.dynamic
    varied = training.rebalancer is not None or training.compressor is not None
    return not (late or scaled or varied or publish_overlaps or training.periods is not None)


def against_single_device(scenario: Any, parameters: dict[str, torch.Tensor]) -> tuple[float, float, float]:
    """Return how far parameters are from those of the same training on one device.

    The largest difference, the largest of those parameters, and the norm of the difference over that of the training.
    """
    single = single_device(scenario)
    if single.scenario_id not in references:
        references[single.scenario_id] = trained_alone(single)
    before, reference, _ = references[single.scenario_id]
    assert set(reference) == set(parameters)
    parameters = {name: p.to(reference[name].dtype) for name, p in parameters.items()}  # FSDP2 holds the master copy
    difference = largest_difference(parameters, reference)
    away = sum(float((parameters[name] - p).double().square().sum()) for name, p in reference.items())
    trained = sum(float((p - before[name]).double().square().sum()) for name, p in reference.items())
    # a short run in fp16 may skip all steps of one device, until its loss is scaled low enough
    ratio = (away / trained) ** 0.5 if trained else (0.0 if away == 0 else math.inf)
    return difference, max(float(p.abs().max()) for p in reference.values()), ratio


references: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]] = {}
"""Results of `trained_alone`, by workload: methods of one workload share the single-device training."""


def trained_alone(single: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Return all parameters before and after the first steps on one device, and these steps' losses.

    Operations run one by one there, though the model be compiled.
    """
    device = torch.device("cpu")
    model = replace(single.workload.model, compiled=False, compiled_recompute="none")
    workload = replace(single.workload, model=model)
    training = build(replace(single, workload=workload), Timeline(0, device), device)
    feed = Feed(single, 0, device)
    before = full_parameters(training.module)
    batches = (feed.at(step) for step in range(STEPS))
    losses = [float(training.step(inputs, targets, weights, 0)) for inputs, targets, weights in batches]
    return before, full_parameters(training.module), losses


def without_skipped_steps(peaks: list[int], scaler: LossScaler | None, train: Callable[[int], object]) -> list[int]:
    """Return the peaks, none where a dynamic factor of the loss was still falling: then train until it has settled.

    A step that is skipped because gradients are infinite makes no optimizer state.
    """
    if scaler is None or not scaler.dynamic:
        return peaks
    for step in range(STEPS, STEPS + MOST_SKIPPED):
        if scaler.clean_steps >= CLEAN_STEPS:
            break
        train(step)
    return []


def least_was_seen(peaks: list[int], same_ratio: float) -> bool:
    """Return whether the least of a rank's peaks was seen often enough."""
    return sum(peak <= min(peaks) * (1 + same_ratio) for peak in peaks) >= SEEN


def all_agree(mine: bool) -> bool:
    """Return whether `mine` is true on every rank."""
    votes = torch.tensor(int(mine))
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
