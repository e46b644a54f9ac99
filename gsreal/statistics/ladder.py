"""Ladders of small models of a family, each trained for gradient statistics that transfer to models of other sizes.

A rung differs from the family's first one in width, depth, batch, sequence, learning rate or optimizer. The last rungs
are held back: no law is fitted to them, and the errors of densities that are predicted for them are the family's.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from gsreal.data.bundled import standard_library_bytes
from gsreal.model_files.request import Request, traced_model
from gsreal.model_files.trace import write_model
from gsreal.statistics.collect import take_statistics, write_statistics
from gssim.errors import UserError
from gssim.execution.files import scratch_folder, write_text
from gssim.scenario import load_scenario
from gssim.workload import Model
from gssim.workload.gradient_family import (
    WINDOWS,
    Family,
    RowFrequencies,
    Rung,
    predicted_ratios,
    reaching,
    with_errors,
)
from gssim.workload.gradient_rungs import placed, rung_of, sizes_of
from gssim.workload.gradient_statistics import read_gradients

STEPS = 40
COURSES = 1


@dataclass(frozen=True)
class Training:
    """One training of a ladder: what differs from the family's first rung."""

    name: str
    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the workload."""
    steps: int = STEPS
    courses: int = COURSES
    whole: bool = False
    """Whether error feedback, relative thresholds and publications are looked at too."""
    held_back: bool = False


@dataclass(frozen=True)
class Ladder:
    """A family of models and its rungs."""

    model: str
    """Factory or Hugging Face architecture, as `gsreal trace` takes it."""
    arguments: Mapping[str, Any]
    workload: Mapping[str, Any]
    rungs: tuple[Training, ...]
    vocabulary: int | None = 256
    task: str = "next-token"
    image: str | None = None


def _decoder(width: int, layers: int) -> dict[str, Any]:
    return {"width": width, "heads": max(2, width // 32), "layers": layers}


def _llama(width: int, layers: int) -> dict[str, Any]:
    heads = max(2, width // 32)
    sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2)}


def _transformer_rungs(sizes: Any) -> tuple[Training, ...]:
    return (
        Training("first", courses=2, whole=True),
        Training("width-32", sizes(32, 4)),
        Training("width-128", sizes(128, 4)),
        Training("depth-2", sizes(64, 2)),
        Training("depth-8", sizes(64, 8)),
        Training("rate-low", workload={"learning_rate": 2e-4}),
        Training("rate-high", workload={"learning_rate": 3e-3}),
        Training("batch-64", workload={"global_batch_size": 64}),
        Training("sequence-16", workload={"sequence_length": 16}),
        Training("sequence-256", workload={"sequence_length": 256}),
        Training("sgd", whole=True, workload={"optimizer": "sgd-momentum", "learning_rate": 3e-2}),
        Training(
            "mixed",
            sizes(96, 6),
            {"global_batch_size": 32, "sequence_length": 32, "learning_rate": 5e-4},
            held_back=True,
        ),
        Training("largest", sizes(256, 6), {"learning_rate": 5e-4}, steps=20, held_back=True),
    )


TOKENS = {"global_batch_size": 16, "sequence_length": 64, "optimizer": "adamw", "learning_rate": 1e-3}
LADDERS: Mapping[str, Ladder] = {
    "gpt": Ladder("gsreal.models.gpt", _decoder(64, 4), TOKENS, _transformer_rungs(_decoder)),
    "llama": Ladder(
        "hf:llama",
        _llama(64, 4) | {"vocab_size": 256, "max_position_embeddings": 256, "use_cache": False},
        TOKENS,
        _transformer_rungs(_llama),
    ),
    "bert": Ladder(
        "gsreal.models.bert",
        _decoder(64, 4),
        TOKENS,
        _transformer_rungs(_decoder),
        vocabulary=257,
        task="masked-token",
    ),
    "resnet": Ladder(
        "gsreal.models.resnet",
        {"widths": [16, 32, 64], "blocks": 2},
        {"global_batch_size": 32, "optimizer": "sgd-momentum", "learning_rate": 1e-2},
        (
            Training("first", courses=2, whole=True),
            Training("width-8", {"widths": [8, 16, 32]}),
            Training("width-32", {"widths": [32, 64, 128]}),
            Training("depth-1", {"blocks": 1}),
            Training("depth-4", {"blocks": 4}),
            Training("rate-low", workload={"learning_rate": 1e-3}),
            Training("rate-high", workload={"learning_rate": 5e-2}),
            Training("batch-128", workload={"global_batch_size": 128}),
            Training("adamw", whole=True, workload={"optimizer": "adamw", "learning_rate": 1e-3}),
            Training(
                "mixed",
                {"widths": [24, 48, 96], "blocks": 3},
                {"global_batch_size": 64, "learning_rate": 3e-3},
                held_back=True,
            ),
            Training("largest", {"widths": [64, 128, 256]}, {"learning_rate": 3e-3}, steps=20, held_back=True),
        ),
        vocabulary=None,
        task="classification",
        image="1x8x8",
    ),
}


SHAPE_STEPS = (0, 5, STEPS - 1)
"""Steps at which shapes are kept; every step that is sampled between them has a scale."""
EXPONENTS = {"learning rate": (0.5, 0.75, 1.0), "width": (0.0, 0.25, 0.5, 0.75, 1.0), "layers": (0.0, 0.25)}
"""Exponents of a step's progress that are tried."""


def take_family(family: str, folder: Path) -> Family:
    """Return a family: its ladder is trained, statistics of each rung are written to `folder` or read from there."""
    if family not in LADDERS:
        raise UserError(f"--ladder {family}: no such family; allowed: {', '.join(sorted(LADDERS))}")
    folder.mkdir(parents=True, exist_ok=True)
    ladder, rungs = LADDERS[family], []
    multiples: tuple[float, ...] = ()
    sources: set[str] = set()
    for rung in ladder.rungs:
        file, model = folder / f"{family}.{rung.name}.json", _traced(ladder, family, rung)
        if not file.exists():
            print(f"gsreal: ladder {family}: {rung.name}", file=sys.stderr, flush=True)
            with scratch_folder("gsreal-run-") as scratch:
                write_model(Path(scratch, "model.toml"), model)
                tables = {
                    "name": f"ladder: {model.name}",
                    "cluster": PAIR,
                    "workload": {"model": "model.toml", "precision": "fp32", **ladder.workload, **rung.workload},
                    "plan": {"method": "gs"},
                    "run": {"steps": rung.steps, "warmup_steps": 0, "seed": 0},
                }
                scenario = load_scenario(Path(scratch, "ladder.toml"), tables=tables, gradients_needed=False).scenario
                taken = take_statistics(scenario, courses=rung.courses, magnitudes_only=not rung.whole)
            write_statistics(file, taken)
        statistics = read_gradients(file)
        width, layers = sizes_of(model)
        steps = SHAPE_STEPS if rung.whole else ()
        multiples, sources = multiples or statistics.multiples, sources | {statistics.source.partition(" by ")[0]}
        rungs.append(
            rung_of(
                statistics,
                placed(model),
                name=rung.name,
                width=width,
                layers=layers,
                held_back=rung.held_back,
                shape_steps=steps,
            )
        )
    source = f"{len(rungs)} trainings, {', '.join(sorted(sources))} by gsreal gradients --ladder {family}"
    return fitted_family(family, rungs, multiples, source=source)


def fitted_family(family: str, rungs: Sequence[Rung], multiples: Sequence[float], *, source: str) -> Family:
    """Return the family of these rungs with the exponents of progress that predict them best, and its errors."""
    vocabulary = LADDERS[family].vocabulary
    rows = None
    if vocabulary is not None:
        counts = np.bincount(standard_library_bytes(), minlength=256)
        rows = RowFrequencies(vocabulary=vocabulary, squares=float(f"{np.square(counts / counts.sum()).sum():.4g}"))
    candidates = [
        Family(
            family=family,
            source=source,
            shape_steps=SHAPE_STEPS,
            multiples=tuple(multiples),
            progress=dict(zip(EXPONENTS, exponents, strict=True)),
            rows=rows,
            rungs=tuple(rungs),
        )
        for exponents in product(*EXPONENTS.values())
    ]

    def misfit(candidate: Family) -> float:
        """Return the mean square of the logarithms of predicted over measured thresholds, of the fitted rungs."""
        law = candidate.law
        errors = [
            np.log(reaching(predicted_ratios(candidate, law, rung, window)) / np.array(rung.thresholds[window]))
            for rung in rungs
            if not rung.shapes and not rung.held_back
            for window in WINDOWS
        ]
        return float(np.mean(np.square(errors)))

    return with_errors(min(candidates, key=misfit))


def write_family(path: Path, family: Family) -> None:
    """Write the family as JSON atomically, a line for each role of each rung."""
    data = asdict(family)
    for rung in data["rungs"]:
        rung["shapes"] = {key: {n: v for n, v in shape.items() if v} for key, shape in rung["shapes"].items()}
    text = json.dumps(data, separators=(",", ":"))
    write_text(path, re.sub(r'("[a-z]+/[a-z.]+":[\[{])', r"\n\1", text).replace('{"name"', '\n{"name"') + "\n")


def _traced(ladder: Ladder, family: str, rung: Training) -> Model:
    """Return the model of a rung, with its layers."""
    arguments = {**ladder.arguments, **rung.model}
    request = Request(
        model=ladder.model,
        arguments=tuple(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in arguments.items()
        ),
        name=f"{family}-{rung.name}",
        vocabulary=ladder.vocabulary,
        maximum_sequence_length=256,
        image=ladder.image,
        classes=10 if ladder.image else None,
        sequence_length={**ladder.workload, **rung.workload}.get("sequence_length"),
        task="next-token" if ladder.image else ladder.task,
    )
    return traced_model(request)


PAIR: Mapping[str, Any] = {
    "name": "two ranks, one after another on this machine",
    "backend": "gloo",
    "source": "none: gradients do not depend on it",
    "devices": [{"name": f"rank{n}", "type": "core", "host": "this"} for n in range(2)],
    "device_types": {
        "core": {
            "kind": "cpu",
            "memory_bytes": 1e10,
            "memory_bandwidth_bytes_per_s": 1e10,
            "peak_flop_per_s": {"fp32": 1e11},
            "source": "none",
        }
    },
    "links": [{"between": ["rank0", "rank1"], "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6, "source": "none"}],
}
