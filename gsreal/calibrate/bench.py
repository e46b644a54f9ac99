"""Benchmark context of one rank (device, timing, turns with the other ranks), and steps of a model for benchmarks."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.lab.throttle import device_time_s
from gsreal.machine import settle
from gsreal.methods.optimizers import make_optimizer
from gsreal.model_files.build import DTYPES, build_module, logits_of, loss_of, random_batch
from gsreal.run.progress import note_progress
from gsreal.run.rank import join
from gssim.cluster import Cluster, Device, DeviceType
from gssim.units import validated
from gssim.workload import Model, Workload, unrolled

DISPLACED_BYTES = 2**26


@dataclass(frozen=True)
class Settings:
    """Arguments of `gsreal calibrate`."""

    models: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    sequence_length: int
    precision: str
    kind: str
    only: Literal["", "layers", "neighbours", "communication"] = ""
    """Measure only the models' layers, or only their slow-down while all ranks compute or communicate."""


class Bench:
    """One rank's benchmark context: its device, and the other ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        join("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = settle(_bare_cluster(settings, self.ranks), self.rank)
        self._measurements = 0
        self._touched: torch.Tensor | None = None
        self.displace: Callable[[], object] = self._touch
        """Fills the caches with other data before the next measurement."""

    def alone(self, measure: Callable[[], Any]) -> Any:
        """Return the result of `measure` on rank 0, while the others wait; None on other ranks."""
        dist.barrier()
        self._note()
        result = measure() if self.rank == 0 else None
        dist.barrier()
        return result

    def together(self, measure: Callable[[], Any]) -> Any:
        """Return the result of `measure` on this rank, while every other rank measures too."""
        dist.barrier()
        self._note()
        result = measure()
        dist.barrier()
        return result

    def _note(self) -> None:
        self._measurements += 1
        note_progress(f"measurement {self._measurements} begun")

    def mean_over_ranks(self, value: float) -> float:
        """Return the mean of all ranks' values (a collective)."""
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.ranks

    def finish(self) -> None:
        """Synchronise with the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time_s(self, call: Callable[[], object], *, repeats: int = 15, warmups: int = 3) -> float:
        """Return the median device time of a call; in the lab, waiting for other ranks does not count."""
        for _ in range(warmups):
            call()
        times = []
        for _ in range(repeats):
            self.finish()
            began = device_time_s()
            call()
            self.finish()
            times.append(device_time_s() - began)
        return statistics.median(times)

    def cold_time_s(self, call: Callable[[], object], *, repeats: int = 9) -> float:
        """Return the median time of a call with cold caches, as after a backward."""
        times = []
        for _ in range(repeats):
            self.displace()
            times.append(self.time_s(call, repeats=1, warmups=0))
        return statistics.median(times)

    def _touch(self) -> None:
        """Read and write as much memory as the step of a small model does."""
        if self._touched is None:
            self._touched = torch.ones(DISPLACED_BYTES // 4, device=self.device)
        self._touched.add_(1.0)

    def say(self, what: str) -> None:
        """Show progress."""
        if self.rank == 0:
            print(f"gsreal: calibrating {what}", file=sys.stderr, flush=True)


def _bare_cluster(settings: Settings, ranks: int) -> Cluster:
    """Return the cluster that defines the pinning of ranks, before anything is measured."""
    nothing = DeviceType(
        kind=settings.kind,  # type: ignore[arg-type]
        memory_bytes=1,
        peak_flop_per_s={},
        memory_bandwidth_bytes_per_s=1,
        source="not measured yet",
    )
    devices = tuple(Device(name=f"{rank}", type="device", host="this") for rank in range(ranks))
    return Cluster(
        name="this machine",
        backend="gloo",
        device_types={"device": nothing},
        devices=devices,
        cores_per_rank=1 if settings.kind == "cpu" else 0,
        source="not measured yet",
    )


def optimizer_alone(name: str, parameters: Any, device: torch.device) -> torch.optim.Optimizer:
    """Return an optimizer as for a workload with an optimizer of that name."""
    module = {"factory": "torch.nn.Identity"}
    source = {"kind": "image", "shape": (1, 8, 8), "classes": 10}
    model = {"name": "none", "source": "none", "module": module, "input": source}
    data = {"model": {**model, "traced_batch_sizes": (1,), "layers": ()}, "global_batch_size": 1, "optimizer": name}
    return make_optimizer(validated(Workload, data, file="gsreal calibrate"), parameters, device)


def trained(bench: Bench, model: Model) -> tuple[nn.Module, torch.optim.Optimizer, list[str]]:
    """Return the model as for training, its optimizer, and the names of the modules that are its layers."""
    module = build_module(model.module, where=model.name).to(bench.device, DTYPES[bench.settings.precision])
    module.train()
    names = [instance.layer.modules[instance.repetition] for instance in unrolled(model) if instance.layer.modules]
    return module, optimizer_alone("adamw", module.parameters(), bench.device), names


def middle_batch_size(bench: Bench) -> int:
    """Return the representative batch size."""
    return sorted(bench.settings.batch_sizes)[len(bench.settings.batch_sizes) // 2]


def batch_of(bench: Bench, model: Model, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return a batch of this size and its targets, on the device."""
    sequence_length = bench.settings.sequence_length if model.input.kind == "tokens" else 1
    inputs, targets = random_batch(model, batch_size, sequence_length, DTYPES[bench.settings.precision])
    return inputs.to(bench.device), targets.to(bench.device)


def step_marks(bench: Bench, module: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Any, Any]]:
    """Return (start, end) marks of a forward and of its backward without hooks."""
    began = now(bench.device)
    loss = loss_of(logits_of(module(batch[0])), batch[1])
    turned = now(bench.device)
    loss.backward()
    ended = now(bench.device)
    bench.finish()
    return {"f": (began, turned), "b": (turned, ended)}


def update(bench: Bench, optimizer: torch.optim.Optimizer) -> None:
    """Run the optimizer's step, and wait until it is done."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    bench.finish()


def now(device: torch.device) -> Any:
    """Return a mark of the device's time: seconds, or a GPU's event."""
    if device.type != "cuda":
        return device_time_s()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_s(start: Any, end: Any) -> float:
    """Return the seconds between two marks."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
