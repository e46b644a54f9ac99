"""Steps of a model as benchmarks take them."""

from typing import Any

import torch
from torch import Tensor, nn

from gsreal.benchmarks.bench import Bench, optimizer_alone
from gsreal.build import DTYPES, build_module, logits_of, loss_of, random_batch
from gsreal.lab.throttle import device_time_s
from gssim.workload import Model, unrolled


def trained(bench: Bench, model: Model) -> tuple[nn.Module, torch.optim.Optimizer, list[str]]:
    """Return the model as it is trained, its optimizer, and the names of the modules that are its layers."""
    module = build_module(model.module, where=model.name).to(bench.device, DTYPES[bench.settings.precision])
    module.train()
    names = [instance.layer.modules[instance.repetition] for instance in unrolled(model) if instance.layer.modules]
    return module, optimizer_alone("adamw", module.parameters(), bench.device), names


def middle_batch_size(bench: Bench) -> int:
    """Return the batch size that stands for the others."""
    return sorted(bench.settings.batch_sizes)[len(bench.settings.batch_sizes) // 2]


def batch_of(bench: Bench, model: Model, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return a batch of so many samples and its targets, on the device."""
    sequence_length = bench.settings.sequence_length if model.input.kind == "tokens" else 1
    inputs, targets = random_batch(model, batch_size, sequence_length, DTYPES[bench.settings.precision])
    return inputs.to(bench.device), targets.to(bench.device)


def step_marks(bench: Bench, module: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Any, Any]]:
    """Return (start, end) marks of a forward and of its backward in which nothing is observed."""
    began = now(bench.device)
    loss = loss_of(logits_of(module(batch[0])), batch[1])
    turned = now(bench.device)
    loss.backward()
    ended = now(bench.device)
    bench.finish()
    return {"f": (began, turned), "b": (turned, ended)}


def update(bench: Bench, optimizer: torch.optim.Optimizer) -> None:
    """Take the optimizer's step, and wait until it is done."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    bench.finish()


def now(device: torch.device) -> Any:
    """Return a mark of the time as the device lives it: seconds, or a GPU's event."""
    if device.type != "cuda":
        return device_time_s()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_s(start: Any, end: Any) -> float:
    """Return the seconds between two marks."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
