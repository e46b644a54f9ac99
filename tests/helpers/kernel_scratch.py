"""Workspaces of the kernels of a model's layers, measured on this machine, as a profile for predictions of peaks.

Convolutions, and products in bf16, take other kernels on other processors: without a profile they hold more than is
predicted. In fp64 convolutions write every patch out, whatever the processor.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gssim.execution.files import write_text
from gssim.scenario import load_model

MODELS = Path(__file__).resolve().parent.parent.parent / "scenarios/models"
MODEL = MODELS / "resnet-digits.toml"


@cache
def measured_scratch(
    precision: str, name: str = MODEL.stem, length: int | None = None, folder: Path = MODELS
) -> dict[str, dict[str, list[str]]]:
    """Return the scratch of every layer by the way it is run; skips where bytes cannot be counted exactly.

    `length`: of sequences, where the model's inputs are tokens; `folder`: of the model file.

    Processes that run tests side by side find what one of them has measured.
    """
    file = Path(os.environ["GSREAL_TESTS_SHARED"], f"scratch-{name}-{precision}-{length}.json")
    if not file.exists():
        write_text(file, json.dumps(_measured(precision, folder / f"{name}.toml", length)))
    found: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _measured(precision: str, path: Path, length: int | None) -> dict[str, dict[str, list[str]]]:
    import torch

    from gsreal.calibrate.kernel_workspace import layer_scratch
    from gsreal.measure import MemoryCounter
    from gsreal.model_files.build import DTYPES, example_batch

    counter = MemoryCounter(torch.device("cpu"))
    if counter.method != "allocator":
        pytest.skip("needs a C++ compiler to count bytes exactly")
    model, threads, dtype = load_model(path), torch.get_num_threads(), DTYPES[precision]
    batches = {}
    for samples in (1, 2, 3, 6, 12):
        inputs, targets = example_batch(model, batch_size=samples, sequence_length=length)
        batches[samples] = (inputs if length else inputs.to(dtype), targets)
    torch.set_num_threads(1)  # as ranks have
    try:
        return layer_scratch(model, batches, counter, dtype)
    finally:
        torch.set_num_threads(threads)


def scratch_profile(precision: str, name: str = MODEL.stem, length: int | None = None, folder: Path = MODELS) -> str:
    """Return what sets the profile of a cluster's device type `cpu`: layers that take no time, with their scratch."""
    flat = {"sizes": [1.0], "values": [0.0]}
    layers = {
        layer: {"forward_s": flat, "backward_s": flat, "scratch_bytes": ways}
        for layer, ways in measured_scratch(precision, name, length, folder).items()
    }
    profile = {"model": name, "precision": precision, "layers": layers}
    if length:
        profile["sequence_length"] = length
    return f"cluster.device_types.cpu.profiles=[{_inline(profile)}]"


def _inline(value: Any) -> str:
    """Return a value as TOML on one line: JSON but for the keys."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
