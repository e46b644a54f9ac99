"""Gradient statistics by training for real: per-parameter sketches of |g| as every rank would see them."""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gsreal.build import loss_of
from gsreal.machine import provenance
from gsreal.measure import Timeline
from gsreal.methods import make_optimizer
from gsreal.worker import Feed, build
from gssim.gradients import SKETCH_EDGES, GradientStatistics
from gssim.plan import assign_buckets, bucket_limits
from gssim.result import write_text
from gssim.scenario import Scenario, single_device
from gssim.shares import ranges
from gssim.units import validated
from gssim.workload import gradient_order, unrolled

_EDGES = np.array(SKETCH_EDGES)


def sampled_steps(steps: int) -> tuple[int, ...]:
    """Return the steps at which sketches are taken: all of the first four, then ever fewer, and the last.

    >>> sampled_steps(20)
    (0, 1, 2, 3, 4, 6, 8, 10, 13, 17, 19)
    """
    found, step = set(), 0.0
    while step < steps:
        found.add(int(step))
        step += 1 if step < 4 else max(2.0, step // 3)
    return tuple(sorted(found | {steps - 1}))


def take_statistics(scenario: Scenario, thresholds: Sequence[float]) -> GradientStatistics:
    """Return the statistics of training over the run's steps, warm-up included, once under each threshold.

    Every rank's gradient is computed in turn from its own rows; what reaches the owners trains the model: all of a
    rank's own range, and what is at least the threshold of the others (0: everything).
    """
    steps = scenario.run.warmup_steps + scenario.run.steps
    sampled = sampled_steps(steps)
    traces = []
    for threshold in thresholds:
        print(f"gsreal: training under the threshold {threshold:g}", file=sys.stderr, flush=True)
        with _one_thread():
            books = _train(scenario, threshold, sampled)
        traces += [
            {
                "samples": samples,
                "threshold": threshold,
                "tensors": {name: {"rms": book.rms, "tail_ratios": book.tails} for name, book in tensors.items()},
            }
            for samples, tensors in sorted(books.items())
        ]
    return _statistics(scenario, sampled, traces)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread while the context lasts.

    How many threads share a sum decides its last digits, which training makes much of; MKL takes fewer of them where it
    sees fit. So the same training gives the same statistics, on a machine of any size under any load.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(scenario: Scenario, threshold: float, sampled: Sequence[int]) -> "dict[int, dict[str, _Book]]":
    """Return the books of one training run, by samples of a rank and by parameter."""
    device = torch.device("cpu")
    module = build(single_device(scenario), Timeline(0, device), device).module
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    feeds = [Feed(scenario, rank, device) for rank in range(scenario.ranks)]
    owners = _owners(scenario, module) if threshold else {}
    steps = scenario.run.warmup_steps + scenario.run.steps
    books: dict[int, dict[str, _Book]] = defaultdict(lambda: defaultdict(_Book))
    for step in range(steps):
        total: dict[str, Tensor] = {}
        sketches: dict[tuple[int, str], list[tuple[float, np.ndarray | None]]] = defaultdict(list)
        for rank, feed in enumerate(feeds):
            if not scenario.batch_sizes[rank]:
                continue  # no samples, no gradient
            weight = _backward(module, feed, step, rank)
            for name, parameter in module.named_parameters():
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                sketches[scenario.batch_sizes[rank], name].append(_sketch(gradient, with_tail=step in sampled))
                if threshold:
                    gradient = gradient * ((owners[name] == rank) | (gradient.abs() >= threshold))
                total[name] = total.get(name, 0) + weight * gradient
        for (samples, name), found in sketches.items():
            books[samples][name].add(found)
        for name, parameter in module.named_parameters():
            parameter.grad = total[name]
        optimizer.step()
        if (step + 1) % max(1, steps // 5) == 0:
            print(f"gsreal: step {step + 1} of {steps}", file=sys.stderr, flush=True)
    return books


def _owners(scenario: Scenario, module: nn.Module) -> dict[str, Tensor]:
    """Return the owning rank of every element, by parameter name."""
    layers = unrolled(scenario.workload.model)
    named = dict(module.named_parameters())
    order = [layers[i].parameter_names[j] for i, j in gradient_order(layers)]
    first, cap = bucket_limits(scenario.plan, scenario.policies)
    sizes = [named[name].numel() * named[name].element_size() for name in order]
    found = {}
    for members in assign_buckets(sizes, first_bytes=first, cap_bytes=cap):
        elements = [named[order[i]].numel() for i in members]
        flat = torch.cat(
            [
                torch.full((last - start,), float(rank))
                for rank, (start, last) in enumerate(ranges(sum(elements), scenario.shard_shares))
            ]
        )
        for i, part in zip(members, flat.split(elements), strict=True):
            found[order[i]] = part.view(named[order[i]].shape)
    return found


class _Book:
    """One parameter's rms by step and tails by sampled step."""

    def __init__(self) -> None:
        self.rms: list[float] = []
        self.tails: list[list[float]] = []

    def add(self, found: list[tuple[float, np.ndarray | None]]) -> None:
        """Add a step: the mean over the ranks that have the same number of samples."""
        self.rms.append(_rounded(math.sqrt(float(np.mean([rms**2 for rms, _ in found])))))
        tails = [tail for _, tail in found if tail is not None]
        if tails:
            self.tails.append([_rounded(float(value)) for value in np.mean(tails, axis=0)])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _backward(module: nn.Module, feed: Feed, step: int, rank: int) -> float:
    """Compute one rank's mean gradient; return its weight in the step."""
    inputs, targets, weights = feed.at(step)
    module.zero_grad(set_to_none=True)
    loss_of(module(inputs), targets).backward()
    return weights.ranks[rank]


def _sketch(gradient: Tensor, *, with_tail: bool) -> tuple[float, np.ndarray | None]:
    """Return (rms, fraction of elements of at least each edge times the rms)."""
    magnitudes = gradient.detach().abs().double().reshape(-1).numpy()
    rms = float(np.sqrt(np.mean(magnitudes**2)))
    if not with_tail:
        return rms, None
    if rms == 0:
        return rms, np.zeros(len(_EDGES))
    ordered = np.sort(magnitudes)
    below = np.searchsorted(ordered, _EDGES * rms, side="left")
    return rms, 1 - below / len(ordered)


def _statistics(scenario: Scenario, sampled: tuple[int, ...], traces: list[dict[str, Any]]) -> GradientStatistics:
    workload = scenario.workload
    made = provenance(torch.device("cpu"))
    data: dict[str, Any] = {
        "model": workload.model.name,
        "precision": workload.precision,
        "optimizer": workload.optimizer,
        "learning_rate": workload.learning_rate,
        "global_batch_size": workload.global_batch_size,
        "sequence_length": workload.sequence_length,
        "seed": scenario.run.seed,
        "sampled_steps": sampled,
        "traces": traces,
        "source": f"measured {made['date']} by gsreal gradients, torch {made['torch']}, {scenario.ranks} ranks",
    }
    return validated(GradientStatistics, data, file="gsreal gradients")


def write_statistics(path: Path, statistics: GradientStatistics) -> None:
    """Write the statistics as JSON, a line for each parameter, or nothing."""
    head = {name: getattr(statistics, name) for name in statistics.__dataclass_fields__ if name != "traces"}
    traces = []
    for trace in statistics.traces:
        rows = [
            f"   {json.dumps(name)}: {json.dumps({'rms': book.rms, 'tail_ratios': book.tail_ratios})}"
            for name, book in trace.tensors.items()
        ]
        traces.append(
            f'  {{"samples": {trace.samples}, "threshold": {trace.threshold}, "tensors": {{\n'
            + ",\n".join(rows)
            + "\n  }}"
        )
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    write_text(path, "{\n" + ",\n".join(lines) + ',\n "traces": [\n' + ",\n".join(traces) + "\n ]\n}\n")
