"""Gradient statistics by training for real: per-parameter sketches of |g| as every rank would see them."""

import json
import math
import sys
from collections import defaultdict
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
from gssim.result import write_text
from gssim.scenario import Scenario, single_device
from gssim.units import validated

_EDGES = np.array(SKETCH_EDGES)


def sampled_steps(steps: int) -> tuple[int, ...]:
    """Return the steps at which sketches are taken: all of the first ten, then ever fewer, and the last.

    >>> sampled_steps(20)
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 19)
    """
    found, step = set(), 0.0
    while step < steps:
        found.add(int(step))
        step += max(1.0, step // 5)
    return tuple(sorted(found | {steps - 1}))


def take_statistics(scenario: Scenario) -> GradientStatistics:
    """Return the statistics of dense training over the run's steps, warm-up included.

    Every rank's gradient is computed in turn from its own rows; what they make together trains the model.
    """
    device = torch.device("cpu")
    training = build(single_device(scenario), Timeline(0, device), device)
    module = training.module
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    feeds = [Feed(scenario, rank, device) for rank in range(scenario.ranks)]
    steps = scenario.run.warmup_steps + scenario.run.steps
    sampled = sampled_steps(steps)
    books: dict[int, dict[str, _Book]] = defaultdict(lambda: defaultdict(_Book))
    for step in range(steps):
        mean: dict[str, Tensor] = {}
        sketches: dict[tuple[int, str], list[tuple[float, np.ndarray | None]]] = defaultdict(list)
        for rank, feed in enumerate(feeds):
            weight = _backward(module, feed, step, rank)
            for name, parameter in module.named_parameters():
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                sketches[scenario.batch_sizes[rank], name].append(_sketch(gradient, with_tail=step in sampled))
                mean[name] = mean.get(name, 0) + weight * gradient
        for (samples, name), found in sketches.items():
            books[samples][name].add(found)
        for name, parameter in module.named_parameters():
            parameter.grad = mean[name]
        optimizer.step()
        if step % max(1, steps // 10) == 0:
            print(f"gsreal: step {step + 1} of {steps}", file=sys.stderr, flush=True)
    return _statistics(scenario, sampled, books)


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
    return float(f"{value:.5g}")


def _backward(module: nn.Module, feed: Feed, step: int, rank: int) -> float:
    """Compute one rank's mean gradient; return its weight in the step."""
    inputs, targets, weights = feed.at(step)
    module.zero_grad(set_to_none=True)
    loss_of(module(inputs), targets).backward()
    return weights[rank]


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


def _statistics(
    scenario: Scenario, sampled: tuple[int, ...], books: dict[int, dict[str, _Book]]
) -> GradientStatistics:
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
        "traces": [
            {
                "samples": samples,
                "tensors": {name: {"rms": book.rms, "tail_ratios": book.tails} for name, book in tensors.items()},
            }
            for samples, tensors in sorted(books.items())
        ],
        "source": f"measured {made['date']} by gsreal gradients, torch {made['torch']}, dense training",
    }
    return validated(GradientStatistics, data, file="gsreal gradients")


def write_statistics(path: Path, statistics: GradientStatistics) -> None:
    """Write the statistics as JSON, a line for each parameter, or nothing."""
    head = {
        name: getattr(statistics, name)
        for name in statistics.__dataclass_fields__  # type: ignore[attr-defined]
        if name != "traces"
    }
    traces = []
    for trace in statistics.traces:
        rows = [
            f"   {json.dumps(name)}: {json.dumps({'rms': book.rms, 'tail_ratios': book.tail_ratios})}"
            for name, book in trace.tensors.items()
        ]
        traces.append(f'  {{"samples": {trace.samples}, "tensors": {{\n' + ",\n".join(rows) + "\n  }}")
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    write_text(path, "{\n" + ",\n".join(lines) + ',\n "traces": [\n' + ",\n".join(traces) + "\n ]\n}\n")
