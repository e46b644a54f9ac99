"""Benchmarks of one device: arithmetic, memory, optimizers, and the compression functions of a thresholded push."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.calibrate.bench import Bench, optimizer_alone
from gsreal.gradient_sharding.messages import Encoding, Scratch
from gsreal.gradient_sharding.thresholds import mark, mean_magnitudes, quantile
from gsreal.model_files.build import DTYPES
from gssim.plan import SAMPLE_ELEMENTS

ELEMENTS = 2**20
REPEATS = 9
FEW, MANY = 0.01, 0.2
"""Densities whose difference gives the cost of an entry."""


def compression_cost(bench: Bench) -> dict[str, float]:
    """Return the costs per element and per call, with cold caches, as after a backward."""
    gradient = torch.rand(ELEMENTS, device=bench.device)
    scratch = Scratch(ELEMENTS, ELEMENTS, gradient.dtype, bench.device)
    call_s = bench.time_s(lambda: mark(gradient[:64], [(slice(0, 64), 0.5)], scratch), repeats=51)
    return {
        "call_s": call_s,
        **_sending(bench, gradient, scratch, call_s),
        **_receiving(bench, gradient, scratch, call_s),
    }


def _pack(gradient: Tensor, scratch: Scratch, kind: str, density: float, *, clear: bool = False) -> tuple[Tensor, int]:
    """Find and pack the elements above 1 - `density`, which is this fraction of those uniform in 0 to 1."""
    flags = mark(gradient, [(slice(0, gradient.numel()), 1 - density)], scratch)
    return Encoding(kind, gradient.dtype, scratch).pack(gradient, flags, clear=clear)


def _sending(bench: Bench, gradient: Tensor, scratch: Scratch, call_s: float) -> dict[str, float]:
    """Return the costs of finding and of writing entries, separated by densities and encodings."""

    def pack_s(kind: str, density: float, *, clear: bool = False) -> float:
        fresh = iter([gradient.clone() if clear else gradient for _ in range(REPEATS)])
        return _cold_s(bench, lambda: _pack(next(fresh), scratch, kind, density, clear=clear))

    few, many = FEW * ELEMENTS, MANY * ELEMENTS
    few_s, many_s = pack_s("coo", FEW), pack_s("coo", MANY)
    entry_s = max(0.0, (many_s - few_s) / (many - few))
    found_s = max(0.0, (few_s - few * entry_s - 2 * call_s) / ELEMENTS)
    select_s = _cold_s(bench, lambda: mark(gradient, [(slice(0, ELEMENTS), 1 - FEW)], scratch))
    residual = torch.zeros_like(gradient)
    return {
        "threshold_element_s": found_s,
        "pack_element_s": entry_s,
        "clear_element_s": max(0.0, (pack_s("coo", MANY, clear=True) - many_s) / many),
        "residual_element_s": _cold_s(bench, partial(scratch.add, residual, gradient)) / ELEMENTS,
        "mean_element_s": _cold_s(bench, lambda: mean_magnitudes([[gradient]])) / ELEMENTS,
        "estimate_element_s": _cold_s(bench, lambda: quantile([gradient], FEW, scratch)) / SAMPLE_ELEMENTS,
        "pack_bit_s": max(0.0, (pack_s("bitmap", FEW) - few_s) / ELEMENTS),
        "dense_element_s": max(0.0, (pack_s("dense", FEW) - select_s) / ELEMENTS),
    }


def _receiving(bench: Bench, gradient: Tensor, scratch: Scratch, call_s: float) -> dict[str, float]:
    """Return the owner's costs of adding entries, and of finding them in a bitmap."""
    owned = torch.zeros_like(gradient)

    def add_s(kind: str, density: float) -> float:
        message, entries = _pack(gradient, scratch, kind, density)
        encoding = Encoding(kind, gradient.dtype, scratch)
        return _cold_s(bench, lambda: encoding.add(owned, message, entries, 0.5))

    scatter_s = max(0.0, (add_s("coo", MANY) - call_s) / (MANY * ELEMENTS))
    found_s = add_s("bitmap", FEW) - call_s - FEW * ELEMENTS * scatter_s
    return {"scatter_element_s": scatter_s, "unpack_bit_s": max(0.0, found_s / ELEMENTS)}


def _cold_s(bench: Bench, call: Callable[[], object]) -> float:
    return bench.cold_time_s(call, repeats=REPEATS)


OPTIMIZER_ELEMENTS = (2**14, 2**17, 2**20, 2**22, 2**24)


def device_rates(bench: Bench) -> dict[str, float]:
    """Return matrix and copy rates, the time to issue one small operation, and the device's memory."""
    rates = {
        "peak_flop_per_s": matrix_rate(bench),
        "memory_bandwidth_bytes_per_s": _copy_rate(bench),
        "operation_overhead_s": _issue_s(bench),
        "workspace_bytes": float(_workspace_bytes(bench.device)),
        "memory_bytes": float(_memory_bytes(bench.device)),
    }
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        each = properties.max_threads_per_multi_processor
        rates["resident_threads"] = properties.multi_processor_count * each
    return rates


def matrix_rate(bench: Bench) -> float:
    """Return the FLOP/s of a large square matrix product."""
    side = 1024 if bench.device.type == "cpu" else 8192
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


def _issue_s(bench: Bench) -> float:
    """Return the time to issue one operation with almost no work."""
    small = torch.ones(8, device=bench.device)

    def issue() -> None:
        for _ in range(1000):
            small.add_(1.0)

    return bench.time_s(issue, repeats=7) / 1000


def _workspace_bytes(device: torch.device) -> int:
    """Return the allocator memory that libraries keep after a forward and a backward.

    cuBLAS keeps a workspace for each thread that calls it: the program's own, and the one that runs the backward.
    """
    if device.type != "cuda":
        return 0
    layer = nn.Linear(1024, 1024, device=device)
    layer(torch.ones(64, 1024, device=device)).sum().backward()
    del layer
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    return int(text.split("MemTotal:")[1].split()[0]) * 1024


OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")


def optimizer_cost(bench: Bench, name: str) -> dict[str, Any]:
    """Return the time per additional tensor, and of one tensor by its elements."""

    def step_s(tensors: int, elements: int) -> float:
        parameters = [nn.Parameter(torch.zeros(elements, device=bench.device)) for _ in range(tensors)]
        optimizer = optimizer_alone(name, parameters, bench.device)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # makes its state
        return bench.cold_time_s(optimizer.step)

    tensor_s = (step_s(65, 64) - step_s(1, 64)) / 64
    largest = [elements for elements in OPTIMIZER_ELEMENTS if elements <= (2**24 if bench.ranks < 8 else 2**22)]
    values = [max(1e-9, step_s(1, elements) - tensor_s) for elements in largest]
    return {"tensor_s": max(0.0, tensor_s), "elements_s": {"sizes": largest, "values": values}}
