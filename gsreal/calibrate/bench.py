"""Parts that all benchmarks of a calibration share, and those of a device: arithmetic, memory, optimizers."""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.gradient_sharding.messages import Encoding, Scratch, mark, mean_magnitudes, quantile
from gsreal.lab.throttle import device_time_s, own_place
from gsreal.machine import MATRIX_SIDE, CoreWait, settle, usable_cores
from gsreal.methods.blocks import compile_blocks
from gsreal.methods.compressed import orthogonalize, take_largest
from gsreal.methods.optimizers import make_optimizer
from gsreal.model_files.build import DTYPES, logits_of, loss_of, module_on, random_batch
from gsreal.run.progress import note_progress
from gsreal.run.rank import join
from gssim.cluster import Cluster, Device, DeviceType
from gssim.errors import one_line
from gssim.plan import SAMPLE_ELEMENTS
from gssim.result import BUSY_RATIO
from gssim.units import validated
from gssim.workload import Model, Workload, unrolled

DISPLACED_BYTES = 2**26
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")
ROUNDS = 6
"""Batch sizes, alone and together, alternate in rounds: slow periods of the machine affect all of them equally."""


@dataclass(frozen=True)
class Settings:
    """Arguments of `gsreal calibrate`."""

    models: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    sequence_length: int
    precision: str
    kind: str
    only: Literal["", "devices", "links", "layers", "neighbours", "communication"] = ""
    """Measure only the devices with the models' layers, only messages and wrappers, only the layers, only their
    slow-down while all ranks compute, or only that while ranks communicate. Empty: everything.
    """
    rounds: int = ROUNDS
    """Rounds in which layers are measured; several measurements of few rounds may be averaged."""
    link_repeats: int = 21
    """Times that each message and collective is measured, at each of its sizes, and steps of each wrapper."""
    summed_precisions: tuple[str, ...] = ("bf16", "fp16")
    """16-bit formats of which all-reduces are measured, beside those of fp32."""
    optimizers: tuple[str, ...] = OPTIMIZERS
    most_elements: int | None = None
    """Elements of the largest model, up to which optimizers are measured; None: up to the largest of their sizes."""
    low_rank: bool = True
    """Measure PowerSGD's products."""
    lasting: bool = True
    """Also measure what does not drift: the memory of layers, and the cost of pauses. Repeated measurements do not."""


class Bench:
    """One rank's benchmark context: its device, and the other ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        join("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        source = "not measured yet"  # this cluster only says how ranks are pinned
        unknown = DeviceType(
            kind=settings.kind,  # type: ignore[arg-type]
            memory_bytes=1,
            peak_flop_per_s={},
            memory_bandwidth_bytes_per_s=1,
            source=source,
        )
        cluster = Cluster(
            name="this machine",
            backend="gloo",
            device_types={"device": unknown},
            devices=tuple(Device(name=f"{rank}", type="device", host="this") for rank in range(self.ranks)),
            cores_per_rank=cores_per_rank(settings.kind, self.ranks),
            source=source,
        )
        self.device = settle(cluster, self.rank)
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
        """Print on stderr what is being calibrated, on rank 0."""
        if self.rank == 0:
            print(one_line(f"gsreal: calibrating {what}"), file=sys.stderr, flush=True)

    def core_wait_ratio(self, core_wait: CoreWait) -> float:
        """Return the part of the time since `core_wait` began for which a rank waited for its core, of any the most.

        Every rank must call it. 0 where it is unknown, and in the lab: there, devices wait for their part of a core,
        and time is that of their own thread.
        """
        ratio = torch.tensor([core_wait.ratio() or 0.0], dtype=torch.float64)
        dist.all_reduce(ratio, dist.ReduceOp.MAX)
        return float(ratio) if own_place() is None else 0.0

    def warn_if_busy(self, core_wait_ratio: float) -> None:
        """Print a warning on rank 0 if other work took the ranks' cores."""
        if self.rank == 0 and core_wait_ratio > BUSY_RATIO:
            print(f"gsreal: calibrate: {busy_text(core_wait_ratio)}", file=sys.stderr, flush=True)


def busy_text(core_wait_ratio: float) -> str:
    """Return the warning of a calibration while other work took the ranks' cores."""
    return (
        f"for {core_wait_ratio:.0%} of the time in which devices and layers were measured, ranks waited for cores that "
        "other work used: predictions will be too slow; repeat it while nothing else runs"
    )


def cores_per_rank(kind: str, ranks: int) -> int:
    """Return the number of cores to which each rank is pinned: one on a CPU; on a GPU's host, an even part of all.

    A rank on a GPU has several threads that issue operations, which would otherwise move among all cores.
    """
    return 1 if kind == "cpu" else len(usable_cores()) // ranks


def optimizer_alone(name: str, parameters: Any, device: torch.device) -> torch.optim.Optimizer:
    """Return an optimizer as for a workload with an optimizer of that name."""
    module = {"factory": "torch.nn.Identity"}
    source = {"kind": "image", "shape": (1, 8, 8), "classes": 10}
    model = {"name": "none", "source": "none", "module": module, "input": source}
    data = {"model": {**model, "traced_batch_sizes": (1,), "layers": ()}, "global_batch_size": 1, "optimizer": name}
    return make_optimizer(validated(Workload, data, file="gsreal calibrate"), parameters, device)


def trained(bench: Bench, model: Model) -> tuple[nn.Module, torch.optim.Optimizer, list[str]]:
    """Return the model as for training, its optimizer, and the names of the modules that are its layers."""
    module = module_on(bench.device, bench.settings.precision, model.module, where=model.name)
    module.train()
    compile_blocks(model, module)
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


def step_marks(
    bench: Bench, module: nn.Module, batch: tuple[Tensor, Tensor], *, on_host: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Return (start, end) marks of a forward and of its backward without hooks, of the device's or the host's time."""
    device = torch.device("cpu") if on_host else bench.device
    began = now(device)
    loss = loss_of(logits_of(module(batch[0])), batch[1])
    turned = now(device)
    loss.backward()
    ended = now(device)
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


CYCLES_PER_S = 3e9
"""Above the clocks of today's GPUs."""


def hold_device(seconds: float) -> None:
    """Keep the GPU busy for at least `seconds`, while the host issues what follows: no operation then waits for it.

    The host can be about a thousand operations ahead. In a longer step it waits, and times include these waits.
    """
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))


ELEMENTS = 2**20
REPEATS = 9
FEW, MANY = 0.01, 0.2
"""Densities whose difference gives the cost of an entry."""


def compression_cost(bench: Bench) -> dict[str, Any]:
    """Return the costs per element and per call, with cold caches, as after a backward."""
    gradient = torch.rand(ELEMENTS, device=bench.device)
    scratch = Scratch(ELEMENTS, ELEMENTS, gradient.dtype, bench.device)
    call_s = bench.time_s(lambda: mark(gradient[:64], [(slice(0, 64), 0.5)], scratch), repeats=51)
    calls = _message_calls(bench, gradient[:64], scratch, call_s) if bench.device.type == "cuda" else {}
    return {
        "call_s": call_s,
        **calls,
        **_sending(bench, gradient, scratch, call_s + calls.get("pack_call_s", call_s)),
        **_receiving(bench, gradient, scratch, calls.get("add_call_s", call_s)),
        **_largest(bench, gradient, call_s),
        **({"low_rank": _low_rank(bench)} if bench.settings.low_rank else {}),
    }


def _pack(gradient: Tensor, scratch: Scratch, kind: str, density: float, *, clear: bool = False) -> tuple[Tensor, int]:
    """Find and pack the elements above 1 - `density`, which is this fraction of those uniform in 0 to 1."""
    flags = mark(gradient, [(slice(0, gradient.numel()), 1 - density)], scratch)
    return Encoding(kind, gradient.dtype, scratch).pack(gradient, flags, clear=clear)


def _message_calls(bench: Bench, few: Tensor, scratch: Scratch, call_s: float) -> dict[str, float]:
    """Return the fixed times of packing and of adding a message on a GPU: the time to launch their operations."""
    encoding, owned = Encoding("coo", few.dtype, scratch), torch.zeros_like(few)
    message, entries = _pack(few, scratch, "coo", 0.5)
    pack_s = _cold_s(bench, lambda: _pack(few, scratch, "coo", 0.5))
    return {
        "pack_call_s": max(0.0, pack_s - call_s),
        "add_call_s": _cold_s(bench, lambda: encoding.add(owned, message, entries, 0.5)),
        "add_dense_call_s": _cold_s(bench, lambda: owned.add_(few.to(owned.dtype), alpha=0.5)),
    }


def _sending(bench: Bench, gradient: Tensor, scratch: Scratch, fixed_s: float) -> dict[str, float]:
    """Return the costs of finding and of writing entries, separated by densities and encodings."""

    def pack_s(kind: str, density: float, *, clear: bool = False) -> float:
        fresh = iter([gradient.clone() if clear else gradient for _ in range(REPEATS)])
        return _cold_s(bench, lambda: _pack(next(fresh), scratch, kind, density, clear=clear))

    few, many = FEW * ELEMENTS, MANY * ELEMENTS
    few_s, many_s = pack_s("coo", FEW), pack_s("coo", MANY)
    entry_s = max(0.0, (many_s - few_s) / (many - few))
    found_s = max(0.0, (few_s - few * entry_s - fixed_s) / ELEMENTS)
    select_s = _cold_s(bench, lambda: mark(gradient, [(slice(0, ELEMENTS), 1 - FEW)], scratch))
    residual = torch.zeros_like(gradient)
    return {
        "threshold_element_s": found_s,
        "pack_element_s": entry_s,
        "clear_element_s": max(0.0, (pack_s("coo", MANY, clear=True) - many_s) / many),
        "residual_element_s": _cold_s(bench, partial(scratch.add, residual, gradient)) / ELEMENTS,
        "mean_element_s": _cold_s(bench, lambda: mean_magnitudes([[gradient]], scratch)) / ELEMENTS,
        "estimate_element_s": _cold_s(bench, lambda: quantile([gradient], FEW, scratch)) / SAMPLE_ELEMENTS,
        "pack_bit_s": max(0.0, (pack_s("bitmap", FEW) - few_s) / ELEMENTS),
        "dense_element_s": max(0.0, (pack_s("dense", FEW) - select_s) / ELEMENTS),
    }


def _receiving(bench: Bench, gradient: Tensor, scratch: Scratch, fixed_s: float) -> dict[str, float]:
    """Return the owner's costs of adding entries, and of finding them in a bitmap."""
    owned = torch.zeros_like(gradient)

    def add_s(kind: str, density: float) -> float:
        message, entries = _pack(gradient, scratch, kind, density)
        encoding = Encoding(kind, gradient.dtype, scratch)
        return _cold_s(bench, lambda: encoding.add(owned, message, entries, 0.5))

    scatter_s = max(0.0, (add_s("coo", MANY) - fixed_s) / (MANY * ELEMENTS))
    found_s = add_s("bitmap", FEW) - fixed_s - FEW * ELEMENTS * scatter_s
    return {"scatter_element_s": scatter_s, "unpack_bit_s": max(0.0, found_s / ELEMENTS)}


def _largest(bench: Bench, gradient: Tensor, call_s: float) -> dict[str, float]:
    """Return the costs of top-k's selection by element and by entry."""

    def taken_s(density: float) -> float:
        fresh = iter([gradient.clone() for _ in range(REPEATS)])
        return _cold_s(bench, lambda: take_largest(next(fresh), round(density * ELEMENTS)))

    few_s, many_s = taken_s(FEW), taken_s(MANY)
    entry_s = max(0.0, (many_s - few_s) / ((MANY - FEW) * ELEMENTS))
    element_s = max(0.0, (few_s - call_s - FEW * ELEMENTS * entry_s) / ELEMENTS)
    return {"largest_element_s": element_s, "largest_entry_s": entry_s}


RANKS = (1, 2, 4, 8, 16, 32)
"""Ranks of PowerSGD's factors between which costs are interpolated."""
SIDE, SMALL_SIDE = 1024, 64
"""Sides of the matrices whose times give the cost of an element, and of a call."""


def _low_rank(bench: Bench) -> dict[str, Any]:
    """Return the costs of PowerSGD's products and orthogonalizations, by the rank of its factors."""

    def matrices(*shapes: tuple[int, int]) -> list[Tensor]:
        return [torch.randn(*shape, device=bench.device) for shape in shapes]

    def products_s(side: int, rank: int) -> list[float]:
        whole, left, right = matrices((side, side), (side, rank), (side, rank))
        calls = (
            partial(torch.mm, whole, right, out=left),
            partial(torch.mm, whole.t(), left, out=right),
            partial(torch.mm, left, right.t(), out=whole),
        )
        return [_cold_s(bench, call) for call in calls]

    def orthogonal_s(rows: int, rank: int) -> float:
        (factor,) = matrices((rows, rank))
        return _cold_s(bench, lambda: orthogonalize(factor))

    call_s = min(products_s(SMALL_SIDE, 1))
    by_rank = [products_s(SIDE, rank) for rank in RANKS]
    few_s, many_s = ([orthogonal_s(rows, rank) for rank in RANKS] for rows in (SIDE, 16 * SIDE))
    row_s = [max(0.0, (many - few) / (15 * SIDE)) for few, many in zip(few_s, many_s, strict=True)]
    curves = {
        f"{name}_element_s": [max(0.0, (each[number] - call_s) / SIDE**2) for each in by_rank]
        for number, name in enumerate(("project", "factor", "restore"))
    }
    curves["orthogonalize_call_s"] = [max(0.0, few - SIDE * row) for few, row in zip(few_s, row_s, strict=True)]
    curves["orthogonalize_row_s"] = row_s
    sizes = [float(rank) for rank in RANKS]
    return {"call_s": call_s, **{name: {"sizes": sizes, "values": values} for name, values in curves.items()}}


def _cold_s(bench: Bench, call: Callable[[], object]) -> float:
    return bench.cold_time_s(call, repeats=REPEATS)


OPTIMIZER_ELEMENTS = (2**14, 2**17, 2**20, 2**22, 2**24, 2**26)
"""Sizes at which optimizers are measured. The last is for GPUs alone: a cache of 50 MB still holds some of 2**24
elements when the update's next operation reads them.
"""


def device_rates(bench: Bench) -> dict[str, float]:
    """Return matrix and copy rates, the time to issue one small operation, and the device's memory."""
    workspace_bytes = _workspace_bytes(bench.device)  # before any other call of the libraries
    small = torch.ones(8, device=bench.device)

    def issue() -> None:  # operations with almost no work
        for _ in range(1000):
            small.add_(1.0)

    def issue_hundred() -> None:  # few enough for the device to be kept busy until all are issued
        for _ in range(100):
            small.add_(1.0)

    rates = {
        "peak_flop_per_s": matrix_rate(bench),
        "memory_bandwidth_bytes_per_s": _copy_rate(bench),
        "operation_overhead_s": bench.time_s(issue, repeats=7) / 1000,
        "workspace_bytes": workspace_bytes,
    }
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        rates["memory_bytes"] = int(properties.total_memory)
        threads = properties.max_threads_per_multi_processor
        rates["resident_threads"] = properties.multi_processor_count * threads
        rates["kernel_s"] = _issued_and_run_s(bench, issue_hundred)[0] / 100
    else:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        rates["memory_bytes"] = int(text.split("MemTotal:")[1].split()[0]) * 1024
    return rates


def matrix_rate(bench: Bench) -> float:
    """Return the FLOP/s of a large square matrix product."""
    side = MATRIX_SIDE if bench.device.type == "cpu" else 8192
    dtype = DTYPES[bench.settings.precision]
    a, b = (torch.randn(side, side, device=bench.device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    return 2 * side**3 / bench.time_s(partial(torch.mm, a, b, out=product))


def _copy_rate(bench: Bench) -> float:
    """Return the bytes per second, read and written, of copying an array larger than any cache."""
    count = 2**24 if bench.device.type == "cpu" else 2**28
    source = torch.ones(count, device=bench.device)
    target = torch.empty_like(source)
    return 2 * 4 * count / bench.time_s(partial(target.copy_, source))


def _workspace_bytes(device: torch.device) -> int:
    """Return the allocator memory that libraries keep after a forward and a backward.

    cuBLAS keeps a workspace for each thread that calls it: the program's own, and the one that runs the backward.
    """
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated()
    layer = nn.Linear(1024, 1024, device=device)
    layer(torch.ones(64, 1024, device=device)).sum().backward()
    del layer
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated()) - before


def optimizer_cost(bench: Bench, name: str) -> dict[str, Any]:
    """Return an update's time per additional tensor, and for one tensor by its number of elements.

    On a GPU, device and host time of an update are measured apart: the host usually issues it before the backward ends.
    """

    def step_s(tensors: int, elements: int) -> tuple[float, float]:
        parameters = [nn.Parameter(torch.zeros(elements, device=bench.device)) for _ in range(tensors)]
        gradients = [torch.ones_like(parameter) for parameter in parameters]
        optimizer = optimizer_alone(name, parameters, bench.device)

        def update() -> None:  # as in a training on a GPU, where it takes the host a while
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        update()  # the first one creates the optimizer's state
        if bench.device.type == "cuda":
            return _issued_and_run_s(bench, update)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return bench.cold_time_s(optimizer.step), 0.0

    (one_s, one_host_s), (many_s, many_host_s) = step_s(1, 64), step_s(65, 64)
    tensor_s, tensor_host_s = (max(0.0, value / 64) for value in (many_s - one_s, many_host_s - one_host_s))
    most = 2**26 if bench.device.type == "cuda" else 2**24 if bench.ranks < 8 else 2**22
    largest = bench.settings.most_elements or most
    reached = zip((0, *OPTIMIZER_ELEMENTS), OPTIMIZER_ELEMENTS, strict=False)
    sizes = [size for smaller, size in reached if smaller < largest and size <= most]
    values = [max(1e-9, step_s(1, elements)[0] - tensor_s) for elements in sizes]
    cost: dict[str, Any] = {"tensor_s": tensor_s, "elements_s": {"sizes": sizes, "values": values}}
    if bench.device.type == "cuda":
        cost |= {"host_s": max(0.0, one_host_s - tensor_host_s), "host_tensor_s": tensor_host_s}
    return cost


def _issued_and_run_s(bench: Bench, call: Callable[[], object]) -> tuple[float, float]:
    """Return the median time of a call on the GPU, and of its host to issue it, with cold caches."""
    times: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        bench.displace()
        bench.finish()
        began_s = time.perf_counter()
        call()
        host_s = time.perf_counter() - began_s
        bench.displace()
        hold_device(2 * host_s)
        began = now(bench.device)
        call()
        ended = now(bench.device)
        bench.finish()
        times.append((elapsed_s(began, ended), host_s))
    run_s, issued_s = (statistics.median(values) for values in zip(*times, strict=True))
    return run_s, issued_s
