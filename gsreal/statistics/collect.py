"""Collects gradient statistics by real training: sketches of |g| per rank, and densities under thresholds."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gsreal.machine import provenance
from gsreal.statistics.records import MULTIPLES, Books
from gsreal.statistics.training import Gradients, Replica, one_thread
from gssim.errors import UserError
from gssim.execution.files import write_text
from gssim.plan import Push
from gssim.scenario import Scenario
from gssim.units import validated
from gssim.workload.gradient_statistics import GradientStatistics

EVERY = 10
COURSES = 8
"""Trainings of which the median is taken. A step of one run sends a fifth more or less than that of another; the median
of this many differs by less than a tenth.
"""
BATCHES = 2
BYTES_OF_ELEMENT = 200
"""Bytes of memory for each element of a model, in fp32: residuals under some 35 thresholds, gradients, training."""
APART = 1_000_003
"""Distance between the seeds of two courses: far from the seeds of other runs, which are to be predicted."""


def sampled_steps(steps: int, *, first: int = 0, every: int = EVERY) -> tuple[int, ...]:
    """Return the sampled steps: the first after the warm-up, the last, and others.

    Each is half as far again from the start as the one before, but at most `every` steps after it.

    Gradients change fastest at the start, whatever the run's length: when only its first and last step were sampled,
    the densities of a run of 8 steps were predicted up to 2.5 times too high. With a warm-up the first is step 1, and
    runs with shorter warm-ups use the same statistics.

    >>> sampled_steps(45, first=5)
    (1, 2, 3, 5, 8, 12, 18, 27, 37, 44)
    >>> sampled_steps(8)
    (0, 1, 2, 3, 5, 7)
    """
    first, last = min(first, steps - 1), steps - 1
    sampled, step = {first, last}, min(first, 1)
    while step < last:
        sampled.add(step)
        step += min(every, max(1, (1 + step) // 2))
    return tuple(sorted(sampled))


def take_statistics(
    scenario: Scenario,
    thresholds: Sequence[float] = (),
    *,
    every: int = EVERY,
    courses: int = COURSES,
    batches: int = BATCHES,
    magnitudes_only: bool = False,
) -> GradientStatistics:
    """Return the statistics of training over the run's steps, warm-up included: densely, and under thresholds.

    Every rank's gradient is computed in turn from its own rows. The model is trained by the gradients that reach the
    owners: all of a rank's own range, and elements of the others that reach the threshold; with error feedback, the
    residual is added first. This is repeated in several courses, the first with the run's seed, and the statistics are
    their medians: initial weights, and the effects of single batches, are random and no property of the training. At
    each sampled step, gradients of several batches are taken. Training runs on `fastest_device`. `thresholds`: in
    addition to 0. `magnitudes_only`: error feedback, relative thresholds and publications are left out, which take most
    of the time.
    """
    if scenario.policies.cp > 1:
        raise UserError(
            f"{scenario.name}: plan.cp = {scenario.policies.cp}: gradients are taken of whole sequences, which predict "
            "those of parts with as many tokens; set plan.cp = 1"
        )
    steps = scenario.run.warmup_steps + scenario.run.steps
    sampled = sampled_steps(steps, first=scenario.run.warmup_steps, every=every)
    dense = replace(scenario.plan.push, kind="absolute", threshold=None)
    device = fastest_device(scenario)
    with one_thread():
        replica = Replica(scenario, dense, device)
        sizes = {name: parameter.numel() for name, parameter in replica.parameters.items()}
        push_grid, publish_grid = ((), ()) if magnitudes_only else _grids(replica)
        multiples = () if magnitudes_only else MULTIPLES

        def trained(push: Push, publish: Sequence[float] = ()) -> Books:
            """Return the records of all courses of training under one push policy, each from new weights."""
            books = Books(
                scenario,
                push,
                sampled,
                sizes,
                batches=batches,
                push_grid=push_grid if push.error_feedback or not push.threshold else (),
                publish_grid=publish,
                multiples=multiples,
            )
            feedback = " with error feedback" if push.error_feedback else ""
            how = f"under the threshold {push.threshold:g}{feedback}" if push.threshold else "densely"
            for course in range(courses):
                print(f"gsreal: training {how}, course {course + 1} of {courses}", file=sys.stderr, flush=True)
                run = replace(scenario.run, seed=scenario.run.seed + course * APART)
                replica = Replica(replace(scenario, run=run), push, device)
                books.begin()
                for step in range(books.steps):
                    books.train(replica, step)
            return books

        of_dense = trained(dense, publish_grid)
        traces = of_dense.traces()
        for threshold in filter(None, thresholds):
            for error_feedback in (False, True):
                traces += trained(replace(dense, threshold=threshold, error_feedback=error_feedback)).traces()
    workload = scenario.workload
    settings = ("precision", "optimizer", "learning_rate", "global_batch_size", "sequence_length")
    data = {
        "model": workload.model.name,
        **{key: getattr(workload, key) for key in settings},
        "seed": scenario.run.seed,
        "source": _source(scenario, device, courses),
        "steps": steps,
        "sampled_steps": sampled,
        "first_step": min(dense.warmup_steps, steps - 1),
        "feedback_thresholds": push_grid,
        "multiples": multiples,
        "publish_thresholds": publish_grid,
        "traces": traces,
        "changes": {name: book.trace() for name, book in of_dense.changes.items()},
    }
    return validated(GradientStatistics, data, file="gsreal gradients")


def _source(scenario: Scenario, device: torch.device, courses: int) -> str:
    """Return when, with what and on what statistics were taken, in words."""
    measured = provenance(device)
    words = [
        f"measured {measured['date']} by gsreal gradients",
        f"torch {measured['torch']}",
        f"{scenario.ranks} ranks",
        f"{courses} course{'s' if courses > 1 else ''}",
    ]
    return ", ".join([*words, f"on {measured['gpu']}"] if device.type == "cuda" else words)


def fastest_device(scenario: Scenario) -> torch.device:
    """Return the device on which a scenario is trained for its statistics: a GPU or the CPU.

    A GPU if the cluster's devices are GPUs, this machine has one, and its free memory holds the residuals of every
    element under each threshold that is looked at.
    """
    if scenario.cluster.type_of(0).kind != "cuda" or not torch.cuda.is_available():
        return torch.device("cpu")
    needed_bytes = BYTES_OF_ELEMENT * scenario.workload.model.elements
    return torch.device("cuda" if needed_bytes < torch.cuda.mem_get_info()[0] else "cpu")


def _grids(replica: Replica) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return two thresholds per decade for feedback and publishing, over a wide range around one step's magnitudes.

    Gradients are often largest at first, and changes grow with momentum.
    """
    gradients: Gradients = {}

    def see(rank: int, found: Gradients) -> None:
        gradients.update({name: gradient.detach().clone() for name, gradient in found.items()})

    before = {name: master.detach().clone() for name, master in replica.masters().items()}
    replica.step(0, see)
    changes = {name: master - before[name] for name, master in replica.masters().items()}
    return _half_decades(gradients, 1 / 50, 100), _half_decades(changes, 1 / 30, 300)


def _half_decades(tensors: Gradients, low: float, high: float) -> tuple[float, ...]:
    """Return 10^(k/2) from `low` to `high` times the median magnitude of the nonzero elements."""
    magnitudes = torch.cat([tensor.detach().abs().reshape(-1).double() for tensor in tensors.values()]).cpu().numpy()
    middle = float(np.median(magnitudes[magnitudes > 0])) if magnitudes.any() else 1.0
    first, last = (round(2 * math.log10(middle * factor)) for factor in (low, high))
    return tuple(float(f"{10 ** (k / 2):.4g}") for k in range(first, last + 1))


def write_statistics(path: Path, statistics: GradientStatistics) -> None:
    """Write the statistics as JSON atomically, a line for each parameter."""
    rows = asdict(statistics)
    traces = []
    for trace in rows.pop("traces"):
        tensors = _lines(trace.pop("tensors"))
        fields = [f"{json.dumps(name)}: {_json(value)}" for name, value in trace.items()]
        traces.append("  {" + ", ".join([*fields, f'"tensors": {tensors}']) + "}")
    changes = rows.pop("changes")
    lines = [f" {json.dumps(name)}: {_json(value)}" for name, value in rows.items()]
    lines += [' "traces": [\n' + ",\n".join(traces) + "\n ]", ' "changes": ' + _lines(changes)]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _lines(tensors: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f"   {json.dumps(name)}: {_json(value)}" for name, value in tensors.items()) + "\n  }"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
