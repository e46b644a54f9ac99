"""Micro-benchmarks of one machine: every rank of `gsreal calibrate` runs this; rank 0 writes what was measured.

Nothing here trains a scenario: single operations, one layer after another, one collective after another. Ranks that are
not measured wait in a barrier, so that "alone" is alone and "together" is every rank at once.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.build import DTYPES, build_module, example_batch, logits_of, loss_of
from gsreal.exchanges import all_gather_v, all_to_all_v
from gsreal.gradient_sharding import shard_gradients
from gsreal.layers import layer_boundaries
from gsreal.machine import device_name, provenance, settle
from gsreal.measure import MemoryCounter
from gsreal.methods import make_optimizer
from gsreal.worker import note_failure
from gssim.cluster import Cluster, Device, DeviceType
from gssim.result import write_text
from gssim.scenario import load_model
from gssim.shares import even, ranges
from gssim.workload import Model, Workload, unrolled

PROFILE_STEPS = 24
EXCHANGE_BYTES = tuple(2**k for k in (12, 14, 16, 18, 20, 22))
OPTIMIZER_ELEMENTS = (2**14, 2**17, 2**20, 2**22, 2**24)
COMPRESSION_ELEMENTS = 2**20


@dataclass(frozen=True)
class Settings:
    """What `gsreal calibrate` was asked for."""

    models: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    sequence_length: int
    precision: str
    kind: str


class Bench:
    """One rank's place in the benchmarks: its device, and who else is there."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = settle(_bare_cluster(settings, self.ranks), self.rank)

    def alone(self, measure: Callable[[], Any]) -> Any:
        """Return what `measure` returns on rank 0, while the others wait; None elsewhere."""
        dist.barrier()
        found = measure() if self.rank == 0 else None
        dist.barrier()
        return found

    def together(self, measure: Callable[[], Any]) -> Any:
        """Return what `measure` returns here, while every other rank measures too."""
        dist.barrier()
        found = measure()
        dist.barrier()
        return found

    def finish(self) -> None:
        """Wait until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time_s(self, call: Callable[[], object], *, repeats: int = 15, warmups: int = 3) -> float:
        """Return the median time of a call."""
        for _ in range(warmups):
            call()
        times = []
        for _ in range(repeats):
            self.finish()
            began = time.perf_counter()
            call()
            self.finish()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def say(self, what: str) -> None:
        """Show progress."""
        if self.rank == 0:
            print(f"gsreal: calibrating {what}", file=sys.stderr, flush=True)


def _bare_cluster(settings: Settings, ranks: int) -> Cluster:
    """Return the cluster that says how ranks are pinned, before anything is measured."""
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


def main(arguments: Sequence[str]) -> None:
    """Run on one rank: SETTINGS-JSON OUT-FILE."""
    settings = Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(arguments[0]).items()})
    dist.init_process_group("gloo")
    try:
        measured = run(settings)
        if dist.get_rank() == 0:
            write_text(Path(arguments[1]), json.dumps(measured))
    except Exception as error:
        note_failure(error)
        raise
    finally:
        dist.destroy_process_group()


def run(settings: Settings) -> dict[str, Any]:
    """Return all measurements of this machine, as plain data."""
    counter = MemoryCounter(torch.device(settings.kind))
    bench = Bench(settings)
    bench.say("arithmetic and memory")
    found: dict[str, Any] = {"device": bench.alone(lambda: device_rates(bench))}
    bench.say("optimizers")
    found["optimizers"] = bench.alone(lambda: {name: optimizer_cost(bench, name) for name in OPTIMIZERS})
    bench.say("thresholding")
    found["compression"] = bench.alone(lambda: compression_cost(bench))
    found["profiles"], jitters, ratios = [], [], []
    for path in settings.models:
        model = load_model(Path(path))
        bench.say(f"layers of {model.name}")
        profile, jitter, ratio = profile_model(bench, model, counter)
        found["profiles"].append(profile)
        jitters.append(jitter)
        ratios.append(ratio)
    if jitters:
        found["step_jitter_ratio"] = statistics.median(jitter[0] for jitter in jitters)
        found["task_jitter_ratio"] = statistics.median(jitter[1] for jitter in jitters)
        found["neighbour_slowdown_ratio"] = max(1.0, statistics.median(ratios))
    if bench.ranks > 1:
        bench.say("exchanges and collectives")
        found["communication"] = communication_cost(bench)
        bench.say("compute beside communication")
        found["communicating_slowdown_ratio"] = communicating_slowdown(bench)
        bench.say("sharding wrappers")
        found["sharded_unit"], found["sharded_tensor_s"] = sharded_unit_cost(bench)
        found["gradient_hook_s"] = gradient_hook_cost(bench)
    found["name"] = device_name(bench.device)
    found["ranks"] = bench.ranks
    found["memory_counter"] = counter.method
    found["provenance"] = provenance(bench.device)
    return found


# One device ----------------------------------------------------------------------------------------------------------


def device_rates(bench: Bench) -> dict[str, float]:
    """Return matrix and copy rates, and the time to issue one small operation."""
    side = 1024 if bench.device.type == "cpu" else 8192
    dtype = DTYPES[bench.settings.precision]
    a, b = (torch.randn(side, side, device=bench.device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    matmul_s = bench.time_s(lambda: torch.mm(a, b, out=product))
    count = 2**24 if bench.device.type == "cpu" else 2**28
    source = torch.ones(count, device=bench.device)
    target = torch.empty_like(source)
    copy_s = bench.time_s(lambda: target.copy_(source))
    small = torch.ones(8, device=bench.device)

    def issue() -> None:
        for _ in range(1000):
            small.add_(1.0)

    return {
        "peak_flop_per_s": 2 * side**3 / matmul_s,
        "memory_bandwidth_bytes_per_s": 2 * 4 * count / copy_s,
        "operation_overhead_s": bench.time_s(issue, repeats=7) / 1000,
        "memory_bytes": float(_memory_bytes(bench.device)),
    }


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    return int(text.split("MemTotal:")[1].split()[0]) * 1024


OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")


def _workload(optimizer: str) -> Workload:
    """Return a workload that stands for nothing but its optimizer."""
    module = {"factory": "torch.nn.Identity"}
    source = {"kind": "image", "shape": (1, 8, 8), "classes": 10}
    data = {"name": "none", "source": "none", "module": module, "input": source, "traced_batch_sizes": (1,), "layers": ()}
    return Workload(model=Model(**data), global_batch_size=1, optimizer=optimizer)  # type: ignore[arg-type]


def optimizer_cost(bench: Bench, name: str) -> dict[str, Any]:
    """Return the time of a tensor more, and of one tensor by its elements."""

    def step_s(tensors: int, elements: int) -> float:
        parameters = [nn.Parameter(torch.zeros(elements, device=bench.device)) for _ in range(tensors)]
        optimizer = make_optimizer(_workload(name), parameters, bench.device)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return bench.time_s(optimizer.step, repeats=9)

    tensor_s = (step_s(65, 64) - step_s(1, 64)) / 64
    largest = [elements for elements in OPTIMIZER_ELEMENTS if elements <= (2**24 if bench.ranks < 8 else 2**22)]
    values = [max(1e-9, step_s(1, elements) - tensor_s) for elements in largest]
    return {"tensor_s": max(0.0, tensor_s), "elements_s": {"sizes": largest, "values": values}}


def compression_cost(bench: Bench) -> dict[str, float]:
    """Return the costs of finding, packing and adding gradients over a threshold, per element and per call."""
    elements = COMPRESSION_ELEMENTS
    gradient = torch.rand(elements, device=bench.device)
    owned = torch.zeros(elements, device=bench.device)

    def find(density: float, part: Tensor) -> Tensor:
        return (part.abs() >= 1 - density).nonzero().view(-1)

    def pack(index: Tensor) -> Tensor:
        message = torch.empty(index.numel() * 8, dtype=torch.uint8, device=bench.device)
        torch.index_select(gradient, 0, index, out=message[: index.numel() * 4].view(torch.float32))
        message[index.numel() * 4 :].view(torch.int32).copy_(index)
        return message

    few, many = find(0.01, gradient), find(0.2, gradient)
    call_s = bench.time_s(lambda: find(0.5, gradient[:64]), repeats=51)
    find_few_s, find_many_s = (bench.time_s(lambda d=d: find(d, gradient)) for d in (0.01, 0.2))  # type: ignore[misc]
    sent = many.numel() - few.numel()
    listed_s = max(0.0, (find_many_s - find_few_s) / sent)
    packed_s = max(0.0, (bench.time_s(lambda: pack(many)) - bench.time_s(lambda: pack(few))) / sent)
    values = torch.ones(many.numel(), device=bench.device)
    index = many.to(torch.int32)
    added_s = bench.time_s(lambda: owned.index_add_(0, index, values, alpha=0.5)) / many.numel()
    return {
        "call_s": call_s,
        "threshold_element_s": max(0.0, (find_few_s - few.numel() * listed_s - call_s) / elements),
        "pack_element_s": listed_s + packed_s,
        "scatter_element_s": added_s,
    }


# Layers --------------------------------------------------------------------------------------------------------------


def profile_model(bench: Bench, model: Model, counter: MemoryCounter) -> tuple[dict[str, Any], tuple[float, float], float]:
    """Return (profile, (step jitter, task jitter), slow-down beside busy neighbours) of a model's layers.

    Steps alone and together take turns, so that a slow minute of the machine falls on both. The profile is of a
    device alone.
    """
    lengths = (bench.settings.sequence_length,) if model.input.kind == "tokens" else (1,)
    module = build_module(model.module, where=model.name).to(bench.device, DTYPES[bench.settings.precision])
    module.train()
    optimizer = make_optimizer(_workload("adamw"), module.parameters(), bench.device)
    names = [instance.layer.modules[instance.repetition] for instance in unrolled(model) if instance.layer.modules]
    times: dict[int, list[dict[tuple[int, str], float]]] = {}
    together: dict[int, list[float]] = defaultdict(list)
    peaks = {}
    for batch_size in bench.settings.batch_sizes:
        batch = _batch(bench, model, batch_size, lengths[0])
        found: list[dict[tuple[int, str], float]] = []
        for round_steps in (PROFILE_STEPS // 3,) * 3:
            steps = bench.alone(lambda n=round_steps: _timed(bench, module, optimizer, names, batch, n))
            found += steps or []
            if bench.ranks > 1:
                beside = bench.together(lambda n=round_steps: _timed(bench, module, optimizer, names, batch, n))
                together[batch_size] += [sum(step.values()) for step in beside]
        times[batch_size] = found
        peaks[batch_size] = bench.alone(lambda: _layer_peaks(bench, module, names, batch, counter)) or {}
    if bench.rank:
        return {}, (0.0, 0.0), 1.0
    profile = _profile(model, bench.settings, times, peaks)
    ratio = _ratio(times, together)
    return profile, _jitter(times), ratio


def _batch(bench: Bench, model: Model, batch_size: int, sequence_length: int) -> tuple[Tensor, Tensor]:
    inputs, targets = example_batch(model, batch_size=batch_size, sequence_length=sequence_length)
    if inputs.is_floating_point():
        inputs = torch.rand_like(inputs).to(DTYPES[bench.settings.precision])
    else:
        inputs = torch.randint_like(inputs, 200)
        targets = torch.randint_like(targets, 200)
    return inputs.to(bench.device), targets.to(bench.device)


def _timed(
    bench: Bench,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: list[str],
    batch: tuple[Tensor, Tensor],
    steps: int,
) -> list[dict[tuple[int, str], float]]:
    """Return seconds by (layer, phase) of each of `steps` steps, after a warm-up; an optimizer step lies between."""
    found = []
    for step in range(steps + 2):
        marks: list[tuple[tuple[int, str], Any]] = []

        def enter(layer: int, phase: str) -> None:
            marks.append(((layer, phase), _now(bench.device)))  # noqa: B023

        with layer_boundaries(module, names, enter=enter) as out:
            began = _now(bench.device)
            loss = loss_of(out(logits_of(module(batch[0]))), batch[1])
            enter(len(names), "b")
            loss.backward()
            ended = _now(bench.device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks[0] = (marks[0][0], began)
        bench.finish()
        seconds: dict[tuple[int, str], float] = defaultdict(float)
        for (place, start), (_, end) in pairwise([*marks, (None, ended)]):
            seconds[place] += _elapsed_s(start, end)  # type: ignore[index]
        if step >= 2:
            found.append(seconds)
    return found


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_s(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def _layer_peaks(
    bench: Bench, module: nn.Module, names: list[str], batch: tuple[Tensor, Tensor], counter: MemoryCounter
) -> dict[tuple[int, str], float]:
    """Return the most bytes alive in each layer's phase, above what was alive when it began."""
    if counter.method == "dispatch":
        return {}
    found: dict[tuple[int, str], float] = {}
    current: list[Any] = [None, 0]

    def enter(layer: int | None, phase: str) -> None:
        if current[0] is not None:
            found[current[0]] = max(found.get(current[0], 0.0), counter.peak() - current[1])
        current[:] = [(layer, phase), counter.alive()]
        counter.reset()

    module.zero_grad(set_to_none=True)
    with layer_boundaries(module, names, enter=enter) as out:
        loss = loss_of(out(logits_of(module(batch[0]))), batch[1])
        enter(len(names), "b")
        loss.backward()
        enter(None, "")
    module.zero_grad(set_to_none=True)
    return found


def _profile(
    model: Model,
    settings: Settings,
    times: dict[int, list[dict[tuple[int, str], float]]],
    peaks: dict[int, dict[tuple[int, str], float]],
) -> dict[str, Any]:
    """Return the profile: median times and largest peaks by layer entry of the model file."""
    members: dict[str, list[int]] = defaultdict(list)
    for instance in unrolled(model):
        members[instance.layer.name].append(instance.index)
    sizes = sorted(times)
    layers: dict[str, Any] = {}
    for name, indices in members.items():
        entry = {}
        for phase, key in (("f", "forward"), ("b", "backward")):
            values = [
                statistics.median(statistics.fmean(step.get((i, phase), 0.0) for i in indices) for step in times[b])
                for b in sizes
            ]
            entry[f"{key}_s"] = {"sizes": sizes, "values": values}
            if all(peaks[b] for b in sizes):
                held = [max(peaks[b].get((i, phase), 0.0) for i in indices) for b in sizes]
                entry[f"{key}_peak_bytes"] = {"sizes": sizes, "values": held}
        layers[name] = entry
    profile = {"model": model.name, "precision": settings.precision, "layers": layers}
    if model.input.kind == "tokens":
        profile["sequence_length"] = settings.sequence_length
    return profile


def _spread(values: Sequence[float]) -> float:
    """Return half the distance between the 16th and 84th percentile, over the median: a robust coefficient of variation."""
    low, middle, high = np.percentile(values, [16, 50, 84])
    return float((high - low) / 2 / middle) if middle > 0 else 0.0


def _jitter(times: dict[int, list[dict[tuple[int, str], float]]]) -> tuple[float, float]:
    """Return (step, task) jitter: the part of a step's variation that all its layers share, and each layer's own.

    var(step) = shared^2 T^2 + own^2 sum(t_i^2), with own from the layers' variation less the shared part.
    """
    shared, own = [], []
    for steps in times.values():
        totals = [sum(step.values()) for step in steps]
        middle = {place: statistics.median(step[place] for step in steps) for place in steps[0]}
        total = sum(middle.values())
        weights = {place: value / total for place, value in middle.items() if value > 0.02 * total}
        task = statistics.median(_spread([step[place] for step in steps]) for place in weights)
        step_variance = _spread(totals) ** 2
        square = sum(weight**2 for weight in weights.values())
        own_variance = max(0.0, (task**2 - step_variance) / (1 - square))
        own.append(own_variance**0.5)
        shared.append(max(0.0, step_variance - own_variance * square) ** 0.5)
    return statistics.median(shared), statistics.median(own)


def _ratio(times: dict[int, list[dict[tuple[int, str], float]]], together: dict[int, list[float]]) -> float:
    """Return the median over batch sizes of a step's time beside busy neighbours over its time alone."""
    if not together:
        return 1.0
    return statistics.median(
        statistics.median(together[b]) / statistics.median(sum(step.values()) for step in steps)
        for b, steps in times.items()
    )


# Several ranks -------------------------------------------------------------------------------------------------------


def communication_cost(bench: Bench) -> dict[str, Any]:
    """Return latency and bandwidth of an exchange, and each collective's fixed and per-byte cost beside it.

    A collective is taken as  t = overhead + rounds * latency + factor * carried / bandwidth,  the bytes carried over
    one link being those of the algorithm that the backend uses.
    """
    n = bench.ranks
    exchange = [_synchronised_s(bench, _exchange(bench, size)) for size in EXCHANGE_BYTES]
    latency_s, byte_s = _line(EXCHANGE_BYTES, exchange)
    found: dict[str, Any] = {"latency_s": latency_s, "bandwidth_bytes_per_s": 1 / byte_s, "overhead_s": {}}
    found["bytes_factor"] = {}
    for kind, (make, rounds, carried) in _collectives(bench).items():
        times = [_synchronised_s(bench, make(size)) for size in EXCHANGE_BYTES]
        fixed_s, slope_s = _line(EXCHANGE_BYTES, times)
        found["overhead_s"][kind] = max(0.0, fixed_s - rounds * latency_s)
        found["bytes_factor"][kind] = slope_s / (carried * byte_s)
    found["ranks"] = n
    return found


def _line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Return (fixed, per byte) of the line through the times, every point weighted by its own size of error."""
    x, y = np.array(sizes, dtype=float), np.array(times)
    slope, fixed = np.polyfit(x, y, 1, w=1 / y)
    return max(1e-7, float(fixed)), max(1e-13, float(slope))


def _synchronised_s(bench: Bench, call: Callable[[], object], repeats: int = 15) -> float:
    """Return the median time of a collective call that all ranks begin together, the slowest rank's."""
    times = []
    for step in range(repeats + 3):
        dist.barrier()
        began = time.perf_counter()
        call()
        bench.finish()
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if step >= 3:
            times.append(float(slowest))
    return statistics.median(times)


def _exchange(bench: Bench, size_bytes: int) -> Callable[[], object]:
    """Return a call in which every rank sends `size_bytes` to the next one."""
    outgoing, incoming = (torch.zeros(size_bytes // 4, device=bench.device) for _ in range(2))
    sends: list[Tensor | None] = [None] * bench.ranks
    receives: list[Tensor | None] = [None] * bench.ranks
    sends[(bench.rank + 1) % bench.ranks] = outgoing
    receives[(bench.rank - 1) % bench.ranks] = incoming
    group = dist.group.WORLD
    assert group is not None
    return lambda: all_to_all_v(sends, receives, group=group, declared_bytes=0).wait()


def _collectives(bench: Bench) -> dict[str, tuple[Callable[[int], Callable[[], object]], int, float]]:
    """Return, by kind: how to make a call of a size, its rounds, and the share of the size that each link carries."""
    n, device = bench.ranks, bench.device

    def buffers(size: int) -> tuple[Tensor, Tensor]:
        whole = torch.zeros(size // 4 // n * n, device=device)
        return whole, torch.zeros(whole.numel() // n, device=device)

    def all_reduce(size: int) -> Callable[[], object]:
        whole, _ = buffers(size)
        return lambda: dist.all_reduce(whole)

    def all_gather(size: int) -> Callable[[], object]:
        whole, part = buffers(size)
        return lambda: dist.all_gather_into_tensor(whole, part)

    def reduce_scatter(size: int) -> Callable[[], object]:
        whole, part = buffers(size)
        return lambda: dist.reduce_scatter_tensor(part, whole)

    def gather_unevenly(size: int) -> Callable[[], object]:
        whole, _ = buffers(size)
        group = dist.group.WORLD
        assert group is not None
        return lambda: all_gather_v(whole, ranges(whole.numel(), even(n)), group=group)

    share = (n - 1) / n
    return {
        "all-reduce": (all_reduce, 2 * (n - 1), 2 * share),
        "reduce-scatter": (reduce_scatter, 2 * (n - 1), 2 * share),  # gloo's is an all-reduce
        "all-gather": (all_gather, n - 1, share),
        "all-gather-v": (gather_unevenly, n - 1, share),
    }


def communicating_slowdown(bench: Bench) -> float:
    """Return compute time while all-reduces run on all ranks over compute time without them, taking turns."""
    a, b = (torch.randn(256, 256, device=bench.device) for _ in range(2))
    payload = torch.zeros(2**20, device=bench.device)

    def compute_s() -> float:
        bench.finish()
        began = time.perf_counter()
        for _ in range(20):
            torch.mm(a, b)
        bench.finish()
        return time.perf_counter() - began

    quiet, busy = [], []
    for _ in range(8):
        dist.barrier()
        quiet.append(compute_s())
        dist.barrier()
        works = [dist.all_reduce(payload, async_op=True) for _ in range(8)]
        while not works[-1].is_completed():
            took_s = compute_s()
            if not works[-1].is_completed():
                busy.append(took_s)
        for work in works:
            work.wait()
    ratio = torch.tensor([statistics.median(busy) / statistics.median(quiet) if busy else 1.0])
    dist.all_reduce(ratio, op=dist.ReduceOp.SUM)
    return max(1.0, float(ratio) / bench.ranks)


class _Stack(nn.Module):
    """Units of `tensors` tiny vectors: their compute is nothing beside the host time of what wraps them."""

    def __init__(self, units: int, tensors: int, elements: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Unit(tensors, elements) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


class _Unit(nn.Module):
    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        for value in self.values:
            x = x + value[:1]
        return x


def sharded_unit_cost(bench: Bench) -> tuple[dict[str, float], float]:
    """Return FSDP2's own time per unit, per tensor and per byte, and what a DTensor adds to an optimizer step.

    Differences between stacks of tiny units, wrapped and plain, with the time inside collectives left out.
    """
    units = 6
    few, many = (_wrapped_minus_plain(bench, units, tensors, 64) for tensors in (2, 12))
    large = _wrapped_minus_plain(bench, units, 2, 2**17)
    tensor = [(m - f) / 10 for m, f in zip(many, few, strict=True)]
    copied_byte_s = (large[0] + large[1] - few[0] - few[1]) / (2 * 2 * 2**17 * 4)
    unit = {
        "forward_unit_s": max(0.0, few[0] - 2 * tensor[0]),
        "forward_tensor_s": max(0.0, tensor[0]),
        "backward_unit_s": max(0.0, few[1] - 2 * tensor[1]),
        "backward_tensor_s": max(0.0, tensor[1]),
        "copied_byte_s": max(0.0, copied_byte_s),
    }
    return unit, max(0.0, tensor[2])


def _wrapped_minus_plain(bench: Bench, units: int, tensors: int, elements: int) -> tuple[float, float, float]:
    """Return what wrapping adds to (forward, backward, optimizer) of one unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    spent = [0.0]

    @contextmanager
    def left_out() -> Any:
        began = time.perf_counter()
        yield
        spent[0] += time.perf_counter() - began

    class AllGather(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with left_out():
                return super().__call__(*args, **kwargs)

    class ReduceScatter(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with left_out():
                return super().__call__(*args, **kwargs)

    plain, wrapped = (_Stack(units, tensors, elements).to(bench.device) for _ in range(2))
    mesh = init_device_mesh(bench.device.type, (bench.ranks,))
    for unit in wrapped.units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        unit.set_custom_all_gather(AllGather())
        unit.set_custom_reduce_scatter(ReduceScatter())
    fully_shard(wrapped, mesh=mesh, reshard_after_forward=False)
    found = []
    for module in (plain, wrapped):
        optimizer = make_optimizer(_workload("adamw"), module.parameters(), bench.device)
        parts: list[list[float]] = [[], [], []]
        for step in range(15):
            dist.barrier()
            times = _step_parts(bench, module, optimizer, spent)
            for part, seconds in zip(parts, times, strict=True):
                if step >= 5:
                    part.append(seconds)
        found.append([statistics.median(part) for part in parts])
    forward, backward, update = ((w - p) / units for p, w in zip(*found, strict=True))
    return forward, backward, update


def _step_parts(
    bench: Bench, module: nn.Module, optimizer: torch.optim.Optimizer, spent: list[float]
) -> tuple[float, float, float]:
    """Return the seconds of forward, backward and optimizer of one step, without what was spent in collectives."""

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        bench.finish()
        spent[0] = 0.0
        began = time.perf_counter()
        result = call()
        bench.finish()
        return time.perf_counter() - began - spent[0], result

    x = torch.ones(1, device=bench.device, requires_grad=True)
    forward_s, y = timed(lambda: module(x))
    backward_s, _ = timed(lambda: y.sum().backward())
    update_s, _ = timed(optimizer.step)
    optimizer.zero_grad(set_to_none=True)
    return forward_s, backward_s, update_s


def gradient_hook_cost(bench: Bench) -> float:
    """Return the time that collecting one gradient adds to the backward under Gradient Sharding, copying left out."""
    tensors = 48
    group = dist.new_group([0])  # every rank must call it; only rank 0 uses it

    def backward_s(sharded: bool) -> float:
        module = _Stack(1, tensors, 64).to(bench.device)
        optimizer = None
        if sharded:
            optimizer = shard_gradients(module, lambda shard: torch.optim.SGD(shard, lr=0.1), group=group)
        times = []
        for step in range(25):
            total = module(torch.ones(1, device=bench.device)).sum()
            bench.finish()
            began = time.perf_counter()
            total.backward()
            bench.finish()
            if step >= 5:
                times.append(time.perf_counter() - began)
            if optimizer is not None:
                optimizer.step()
            module.zero_grad(set_to_none=True)
        return statistics.median(times)

    found = bench.alone(lambda: max(0.0, (backward_s(True) - backward_s(False)) / tensors))
    return float(found or 0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
