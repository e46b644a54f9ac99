"""Profiles of a model's layers: time of each layer alone and beside busy neighbours, jitter, and kernel workspace."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.calibrate.bench import (
    Bench,
    Settings,
    batch_of,
    elapsed_s,
    hold_device,
    middle_batch_size,
    now,
    step_marks,
    trained,
    update,
)
from gsreal.calibrate.kernel_workspace import layer_scratch
from gsreal.measure import MemoryCounter
from gsreal.methods.blocks import compile_blocks
from gsreal.model_files.build import DTYPES, logits_of, loss_of, module_on
from gsreal.model_files.step import layer_boundaries
from gsreal.run.rank import gather_json
from gssim.scenario import load_model
from gssim.workload import Model, unrolled
from gssim.workload.model import with_fused_kernels

PAUSE_ROUNDS = 5
"""Rounds of pauses in each round of the layers."""
PAUSES_S = (0.005, 0.02, 0.1)
"""Pauses before a timed step: waits for messages are of such lengths."""
STEPS_PER_ROUND = 6


def profile_model(bench: Bench, model: Model, counter: MemoryCounter) -> tuple[dict[str, Any], tuple[float, float]]:
    """Return (profile, (step jitter, task jitter)) of a model's layers.

    The profile is of a device alone, and of its slow-down beside busy neighbours.
    """
    dtype = DTYPES[bench.settings.precision]
    module, optimizer, names = trained(bench, model)
    batches = {b: batch_of(bench, model, b) for b in bench.settings.batch_sizes}
    middle = middle_batch_size(bench)
    times, together = _in_turns(bench, module, optimizer, names, batches)
    excess, peaks = None, {}
    scratch: dict[str, dict[str, Any]] = defaultdict(dict)
    if bench.settings.lasting:
        excess = bench.alone(partial(_pause_excess, bench, module, optimizer, batches[min(batches)]))
        for b, batch in batches.items():
            peaks[b] = bench.alone(partial(_layer_peaks, module, names, batch, counter)) or {}
    if bench.settings.lasting and counter.method == "allocator":
        as_run = with_fused_kernels(model) if bench.device.type == "cuda" else model
        own = partial(layer_scratch, as_run, batches, counter, dtype, rank=bench.rank, ranks=bench.ranks)
        for some in gather_json(bench.together(own)):
            for name, variants in some.items():
                scratch[name] |= variants
    lateness = _lateness(bench, together[middle])
    if bench.rank:
        return {}, (0.0, 0.0)
    profile = _profile(model, bench.settings, times, peaks, scratch)
    if excess:
        profile["pause_excess_s"] = excess
    profile["neighbour_slowdown_ratio"] = _ratio(times, together, bench.ranks)
    return profile, _jitter(times, lateness)


@contextmanager
def trained_between(bench: Bench) -> Iterator[None]:
    """Run a forward and backward of the first model, if any, before each measurement of `bench.cold_time_s` inside.

    How cold the caches are for the optimizer's states depends on the memory traffic of the rest of the step.
    """
    before = bench.displace
    if bench.settings.models:
        model = load_model(Path(bench.settings.models[0]))
        module = module_on(bench.device, bench.settings.precision, model.module, where=model.name)
        compile_blocks(model, module)
        inputs, targets = batch_of(bench, model, middle_batch_size(bench))
        bench.displace = lambda: loss_of(logits_of(module(inputs)), targets).backward()
    try:
        yield
    finally:
        bench.displace = before


@dataclass(frozen=True)
class _Step:
    """One profiled step: seconds by (layer, phase), and by phase of an adjacent step without hooks."""

    seconds: dict[tuple[int, str], float]
    unobserved: dict[str, float]
    lasted_s: float
    """Wall-clock time of an unobserved step: with the bursts of a slowed-down device's sleep."""
    elapsed_device_s: float
    """Time of an unobserved step by the device's clock; a GPU's has its waits for the host in it."""
    host: dict[tuple[int, str], float] = field(default_factory=dict)
    """On a GPU: seconds of the host by (layer, phase)."""
    unobserved_host: dict[str, float] = field(default_factory=dict)
    """On a GPU: seconds of the host by phase of an adjacent step without hooks."""

    @property
    def unobserved_s(self) -> float:
        """Seconds of the step without hooks."""
        return sum(self.unobserved.values())

    def observed_s(self, phase: str, *, on_host: bool = False) -> float:
        """Seconds of a phase of the observed step: longer than the unobserved one's by the cost of the hooks."""
        return sum(seconds for (_, each), seconds in (self.host if on_host else self.seconds).items() if each == phase)


def neighbour_slowdown(bench: Bench, model: Model) -> float:
    """Return a model's step time while all ranks compute, over that while one rank does; at least 1."""
    module, optimizer, names = trained(bench, model)
    middle = middle_batch_size(bench)
    batches = {middle: batch_of(bench, model, middle)}
    return _ratio(*_in_turns(bench, module, optimizer, names, batches), bench.ranks)


def _in_turns(
    bench: Bench,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: list[str],
    batches: dict[int, tuple[Tensor, Tensor]],
) -> tuple[dict[int, list[_Step]], dict[int, list[_Step]]]:
    """Return the steps of each batch size on one rank alone, and of the middle one on all ranks together."""
    times: dict[int, list[_Step]] = defaultdict(list)
    together: dict[int, list[_Step]] = defaultdict(list)
    for _ in range(bench.settings.rounds):
        for batch_size, batch in batches.items():
            some_steps = partial(_profile_steps, bench, module, optimizer, names, batch, STEPS_PER_ROUND)
            times[batch_size] += bench.alone(some_steps) or []
            if bench.ranks > 1 and batch_size == middle_batch_size(bench):
                together[batch_size] += bench.together(partial(some_steps, together=True))
    return times, together


def _profile_steps(
    bench: Bench,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: list[str],
    batch: tuple[Tensor, Tensor],
    steps: int,
    *,
    together: bool = False,
) -> list[_Step]:
    """Return `steps` profiled steps, after one for warm-up; an optimizer step lies between.

    `together`: all ranks take part, and begin each step at the same time, as in training.
    """
    if bench.device.type == "cuda":
        return _profile_gpu_steps(bench, module, optimizer, names, batch, steps, together=together)
    steps_done = []
    for step in range(steps + 1):
        seconds = _observed(bench, module, names, batch)
        update(bench, optimizer)
        if together:
            dist.barrier()
        start_s = time.perf_counter()
        unobserved = _by_phase(step_marks(bench, module, batch))
        lasted_s = time.perf_counter() - start_s
        update(bench, optimizer)
        if step >= 1:
            steps_done.append(_Step(seconds, unobserved, lasted_s, sum(unobserved.values())))
    return steps_done


HEAD_START_RATIO = 1.5
"""Time for which a GPU is held, over the time that the host took to issue a step."""


def _profile_gpu_steps(
    bench: Bench,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: list[str],
    batch: tuple[Tensor, Tensor],
    steps: int,
    *,
    together: bool,
) -> list[_Step]:
    """Return the same on a GPU, where the host's time to issue operations and the device's to run them are separate.

    The host issues the operations of a small model more slowly than the device runs them, and those of a large model
    far ahead. The device's own time is measured on steps that the host issued while the device was held. `together`:
    the device is not held, because ranks that share a GPU would hold up each other.
    """
    steps_done = []
    for step in range(steps + 1):
        host, unobserved_host, seconds, unobserved = {}, {}, {}, {}
        if not together:
            host = _observed(bench, module, names, batch, on_host=True)
            update(bench, optimizer)
            unobserved_host = _by_phase(step_marks(bench, module, batch, on_host=True))
            update(bench, optimizer)
            head_start_s = HEAD_START_RATIO * sum(host.values())
            hold_device(head_start_s)
            seconds = _observed(bench, module, names, batch)
            update(bench, optimizer)
            hold_device(head_start_s)
            unobserved = _by_phase(step_marks(bench, module, batch))
            update(bench, optimizer)
        else:
            dist.barrier()
        start_s = time.perf_counter()
        elapsed_device_s = sum(_by_phase(step_marks(bench, module, batch)).values())
        lasted_s = time.perf_counter() - start_s
        update(bench, optimizer)
        if step >= 1:
            steps_done.append(_Step(seconds, unobserved, lasted_s, elapsed_device_s, host, unobserved_host))
    return steps_done


def _by_phase(marks: dict[str, tuple[Any, Any]]) -> dict[str, float]:
    return {phase: elapsed_s(*each) for phase, each in marks.items()}


def _pause_excess(
    bench: Bench, module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    """Return the additional time of a step's compute after pauses.

    Zero for a GPU, whose caches hold little between steps.

    It is a few milliseconds, whatever the batch and wherever in the step the pause is (measured): for a small batch,
    that is the largest part of the step. Pauses alternate: slow periods of the machine affect all of them equally.
    """
    if bench.device.type == "cuda":
        return {}
    times: dict[float, list[float]] = defaultdict(list)
    for _ in range(PAUSE_ROUNDS * bench.settings.rounds + 1):
        for pause_s in (0.0, *PAUSES_S):
            time.sleep(pause_s)
            marks = step_marks(bench, module, batch)
            times[pause_s].append(sum(elapsed_s(*each) for each in marks.values()))
            update(bench, optimizer)
    middles = {pause_s: statistics.median(values) for pause_s, values in times.items()}
    excess = [max(0.0, middles[pause_s] - middles[0.0]) for pause_s in PAUSES_S]
    return {"sizes": list(PAUSES_S), "values": list(accumulate(excess, max))}


def _observed(
    bench: Bench, module: nn.Module, names: list[str], batch: tuple[Tensor, Tensor], *, on_host: bool = False
) -> dict[tuple[int, str], float]:
    """Return the seconds of every (layer, phase) of one forward and backward, on the device or its host."""
    entered: list[tuple[tuple[int, str], Any]] = []
    device = torch.device("cpu") if on_host else bench.device

    def enter(layer: int, phase: str) -> None:
        entered.append(((layer, phase), now(device)))

    with layer_boundaries(module, names, enter=enter) as out:
        began = now(device)
        loss = loss_of(out(logits_of(module(batch[0]))), batch[1])
        enter(len(names), "b")
        loss.backward()
        ended = now(device)
    bench.finish()
    entered[0] = (entered[0][0], began)
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for (place, start), end in zip(entered, [*(mark for _, mark in entered[1:]), ended], strict=True):
        seconds[place] += elapsed_s(start, end)
    return seconds


def _layer_peaks(
    module: nn.Module, names: list[str], batch: tuple[Tensor, Tensor], counter: MemoryCounter
) -> dict[tuple[int, str], float]:
    """Return the peak bytes of each layer's phase, above those allocated when it began."""
    if counter.method == "dispatch":
        return {}
    peaks: dict[tuple[int, str], float] = {}
    current: list[Any] = [None, 0]

    def enter(layer: int | None, phase: str) -> None:
        if current[0] is not None:
            peaks[current[0]] = max(peaks.get(current[0], 0.0), counter.peak() - current[1])
        current[:] = [(layer, phase), counter.alive()]
        counter.reset()

    module.zero_grad(set_to_none=True)
    with layer_boundaries(module, names, enter=enter) as out:
        loss = loss_of(out(logits_of(module(batch[0]))), batch[1])
        enter(len(names), "b")
        loss.backward()
        enter(None, "")
    module.zero_grad(set_to_none=True)
    return peaks


def _profile(
    model: Model,
    settings: Settings,
    times: dict[int, list[_Step]],
    peaks: dict[int, dict[tuple[int, str], float]],
    scratch: dict[str, Any],
) -> dict[str, Any]:
    """Return the profile by layer entry of the model file: median times; workspace, or if unknown, peaks."""
    members: dict[str, list[int]] = defaultdict(list)
    for instance in unrolled(model):
        members[instance.layer.name].append(instance.index)
    sizes = sorted(times)
    layers: dict[str, Any] = {}
    for name, indices in members.items():
        entry = {}
        for phase, key in (("f", "forward"), ("b", "backward")):
            entry[f"{key}_s"] = {"sizes": sizes, "values": [_layer_s(times[b], indices, phase) for b in sizes]}
            if all(step.host for b in sizes for step in times[b]):
                values = [_layer_s(times[b], indices, phase, on_host=True) for b in sizes]
                entry[f"{key}_host_s"] = {"sizes": sizes, "values": values}
            if name in scratch:
                entry["scratch_bytes"] = scratch[name]
            elif all(peaks.get(b) for b in sizes):
                workspaces = [max(peaks[b].get((i, phase), 0.0) for i in indices) for b in sizes]
                entry[f"{key}_peak_bytes"] = {"sizes": sizes, "values": workspaces}
        layers[name] = entry
    profile: dict[str, Any] = {"model": model.name, "precision": settings.precision, "layers": layers}
    if model.input.kind == "tokens":
        profile["sequence_length"] = settings.sequence_length
    return profile


def layer_operation_s(model: Model, profile: dict[str, Any], batch_size: int) -> float:
    """Return the host's time to issue an operation of a GPU's step: of the profile's layers, over their operations."""
    host_s, operations = 0.0, 0
    for layer in model.layers:
        measured = profile["layers"][layer.name]
        for phase, count in (("forward", layer.forward_operations), ("backward", layer.backward_operations)):
            curve = measured[f"{phase}_host_s"]
            host_s += layer.repeats * curve["values"][curve["sizes"].index(batch_size)]
            operations += layer.repeats * count
    return host_s / operations


def _layer_s(steps: list[_Step], indices: Sequence[int], phase: str, *, on_host: bool = False) -> float:
    """Return the median time of a phase of one of these layers, on the device or to issue it on the host.

    Hooks at every layer make it longer: it is scaled by the time of the whole phase without them over that with them,
    which were measured in turns.
    """
    layer_s = statistics.median(
        statistics.fmean((step.host if on_host else step.seconds).get((i, phase), 0.0) for i in indices)
        for step in steps
    )
    unobserved_s = statistics.median((step.unobserved_host if on_host else step.unobserved)[phase] for step in steps)
    return layer_s * unobserved_s / statistics.median(step.observed_s(phase, on_host=on_host) for step in steps)


def _spread(values: Sequence[float]) -> float:
    """Return a robust coefficient of variation from one step to the next, which excludes slow drifts of the machine.

    For independent normal values the median distance of neighbours is 0.6745 * sqrt(2) standard deviations.
    """
    distances = [abs(right - left) for left, right in pairwise(values)]
    middle = statistics.median(values)
    return statistics.median(distances) / (0.6745 * 2**0.5) / middle if middle > 0 else 0.0


def _lateness(bench: Bench, steps: list[_Step]) -> float | None:
    """Return the standard deviation between ranks with equal work, step by step, over the step time.

    Two ranks with independent variations of s differ by sqrt(2) s; the median distance is 0.6745 of that.
    """
    if bench.ranks == 1:
        return None
    times = gather_json([step.lasted_s for step in steps])
    distances = [abs(a - b) / ((a + b) / 2) for other in times[1:] for a, b in zip(times[0], other, strict=True)]
    return statistics.median(distances) / (0.6745 * 2**0.5)


def _jitter(times: dict[int, list[_Step]], lateness: float | None) -> tuple[float, float]:
    """Return (step, task) jitter: the part of a step's variation common to all its layers, and each layer's own.

    var(step) = shared^2 T^2 + own^2 sum(t_i^2), with own from the layers' variation less the shared part, and the
    step's from the distance between ranks, if there are several.
    """
    shared, own = [], []
    for steps in times.values():
        totals = [step.elapsed_device_s for step in steps]
        middle = {place: statistics.median(step.seconds[place] for step in steps) for place in steps[0].seconds}
        total = sum(middle.values())
        weights = {place: value / total for place, value in middle.items() if value > 0.02 * total}
        task = statistics.median(_spread([step.seconds[place] for step in steps]) for place in weights)
        spread = _spread(totals)
        square = sum(weight**2 for weight in weights.values())
        own_variance = max(0.0, (task**2 - spread**2) / (1 - square))
        step_variance = (spread if lateness is None else lateness) ** 2
        own.append(own_variance**0.5)
        shared.append(max(0.0, step_variance - own_variance * square) ** 0.5)
    return statistics.median(shared), statistics.median(own)


def _ratio(times: dict[int, list[_Step]], together: dict[int, list[_Step]], ranks: int) -> float:
    """Return a step's time beside busy neighbours over its time alone, at least 1: the median over batch sizes.

    For ranks that share a GPU, it is the ratio to the device's own time, and at most their number, as if they took
    turns. If the host is the slower one, the true ratio may be smaller.
    """
    ratios = [
        statistics.median(step.elapsed_device_s for step in together[b])
        / statistics.median(step.unobserved_s for step in steps)
        for b, steps in times.items()
        if steps and together.get(b)
    ]
    most = float(ranks) if any(step.host for steps in times.values() for step in steps) else math.inf
    return min(most, max(1.0, statistics.median(ratios))) if ratios else 1.0
