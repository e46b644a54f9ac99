"""Rates of the kernels that do a model's FLOP, by their sizes: matrix products, and attention.

Models without a profile are predicted from them. A linear layer y = x W^T of m tokens, k inputs and n outputs runs
three products in a training: its forward, the gradient of its input, and that of its weight. They read their matrices
in different layouts, which have kernels of different rates.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gsreal.calibrate.bench import Bench, elapsed_s, hold_device, now
from gsreal.model_files.build import DTYPES

SIZES = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096, 16384)}
"""Sizes of m, k and n between which rates are interpolated."""
LENGTHS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096, 16384)}
"""Lengths of sequences."""
HEAD_WIDTHS = (64, 128)
TOKENS, WIDTH = {"cpu": 1024, "cuda": 16384}, {"cpu": 256, "cuda": 2048}
"""Tokens, and elements of all heads, of the attention that is measured."""
ROTATED_BYTES = {"cpu": 2**24, "cuda": 2**27}
"""Memory from which timed calls take their operands in turn, so that no cache holds them from an earlier call."""
MOST_SETS = 16
"""Largest number of sets of operands, where they are small."""
TIMED_S = {"cpu": 0.002, "cuda": 0.003}
"""Duration of the calls that are timed together."""
REPEATS = 3
MEMORY_RATIO = 0.25
"""A product is measured if twice its operands and result fit into this part of a GPU's memory."""
LONGEST_S = 0.25
"""A product is measured if it takes no longer than this at the rate of the next smaller one: that rate hardly grows."""

Calls = Sequence[Callable[[], object]]


def kernel_rates(bench: Bench) -> dict[str, Any]:
    """Return the FLOP/s of products and attention at the calibration's precision, as `kernels` of a device type.

    FLOP of causal attention are counted as if all positions attended to all, as in model files.
    """
    precision = bench.settings.precision
    attention = [_attention_rates(bench, DTYPES[precision], width) for width in HEAD_WIDTHS]
    return {
        "precision": precision,
        "products": _product_rates(bench, DTYPES[precision]),
        "attention": [each for each in attention if each["lengths"]],
    }


def _product_rates(bench: Bench, dtype: torch.dtype) -> dict[str, Any]:
    """Return the rates of the three products at all combinations of sizes (m, k, n), the last of which varies fastest.

    A product that does not fit into the memory, or takes too long, has the rate of the one that is a step smaller in
    its largest size.
    """
    sizes = SIZES[bench.device.type]
    rates: dict[str, list[float]] = {"forward": [], "input_gradient": [], "weight_gradient": []}
    for m, k, n in product(sizes, repeat=3):
        smaller = len(sizes) ** (n, k, m).index(max(m, k, n))  # places before this one
        before = [values[-smaller] for values in rates.values() if values]
        is_slow = any(2.0 * m * k * n / rate > LONGEST_S for rate in before)
        measured = None if is_slow else linear_rates(bench, dtype, m, k, n)
        for name, values in rates.items():
            values.append(measured[name] if measured else values[-smaller])
    middle = sizes[-2]
    even, odd = (linear_rates(bench, dtype, middle, middle, n) or {} for n in (middle, middle + 1))
    return {
        name: {
            "sizes": [float(size) for size in sizes],
            "flop_per_s": values,
            "odd_ratio": min(1.0, odd[name] / even[name]),
        }
        for name, values in rates.items()
    }


def linear_rates(bench: Bench, dtype: torch.dtype, m: int, k: int, n: int) -> dict[str, float] | None:
    """Return the FLOP/s of a linear layer's products of m tokens, k inputs and n outputs; None if they do not fit."""
    held_bytes = dtype.itemsize * (m * k + n * k + m * n)
    if bench.device.type == "cuda":
        total = torch.cuda.get_device_properties(bench.device).total_memory
        if 2 * held_bytes > MEMORY_RATIO * total:
            return None
    count = max(1, min(MOST_SETS, ROTATED_BYTES[bench.device.type] // held_bytes))

    def values(rows: int, columns: int) -> list[Tensor]:
        return [torch.randn(rows, columns, device=bench.device, dtype=dtype) for _ in range(count)]

    inputs, weights, outputs = values(m, k), values(n, k), values(m, n)
    operands = {
        "forward": [(x, w.t()) for x, w in zip(inputs, weights, strict=True)],
        "input_gradient": list(zip(outputs, weights, strict=True)),
        "weight_gradient": [(y.t(), x) for y, x in zip(outputs, inputs, strict=True)],
    }
    flop = 2.0 * m * k * n
    rates = {}
    for name, pairs in operands.items():
        results = [torch.empty(a.shape[0], b.shape[1], device=bench.device, dtype=dtype) for a, b in pairs[:2]]
        calls = [partial(torch.mm, a, b, out=results[i % len(results)]) for i, (a, b) in enumerate(pairs)]
        rates[name] = flop / _call_s(bench, calls)
    return rates


def _attention_rates(bench: Bench, dtype: torch.dtype, width: int) -> dict[str, Any]:
    """Return the rates of torch's attention by sequence length for heads of a width, with a causal mask and without.

    Lengths go up to the longest that fits into the memory: kernels that are not fused hold the scores of all pairs of
    positions.
    """
    kind = bench.device.type
    by_length: dict[float, dict[str, float]] = {}
    for length in (each for each in LENGTHS[kind] if each <= TOKENS[kind]):
        shape = (TOKENS[kind] // length, WIDTH[kind] // width, length, width)
        count = max(1, min(4, ROTATED_BYTES[kind] // (4 * dtype.itemsize * TOKENS[kind] * WIDTH[kind])))
        flop = 4.0 * TOKENS[kind] * length * WIDTH[kind]
        rates = {}
        try:
            for mask in ("causal_", ""):
                forward, backward = _attention_calls(bench, dtype, shape, count, causal=bool(mask))
                rates[f"{mask}forward"] = flop / _call_s(bench, forward)
                # a fused kernel computes the scores again: five products instead of two
                rates[f"{mask}backward"] = 2.5 * flop / _call_s(bench, backward)
        except torch.OutOfMemoryError:
            break
        by_length[float(length)] = rates
    curves = {name: [each[name] for each in by_length.values()] for name in next(iter(by_length.values()), {})}
    return {"head_width": width, "lengths": list(by_length), **curves}


def _attention_calls(
    bench: Bench, dtype: torch.dtype, shape: tuple[int, ...], count: int, *, causal: bool
) -> tuple[Calls, Calls]:
    """Return calls of a forward and of its backward on `count` sets of queries, keys and values."""
    forward: list[Callable[[], object]] = []
    backward: list[Callable[[], object]] = []
    for _ in range(count):
        queries, keys, values = (
            torch.randn(shape, device=bench.device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        gradient = torch.randn(shape, device=bench.device, dtype=dtype)
        result = _attend(queries, keys, values, causal)
        operands = (queries, keys, values)
        forward.append(partial(_attend, queries.detach(), keys.detach(), values.detach(), causal))
        backward.append(partial(torch.autograd.grad, result, operands, gradient, retain_graph=True))
    return forward, backward


def _attend(queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal)


def _call_s(bench: Bench, calls: Calls) -> float:
    """Return the device time of one call, if all are run in turn: the median over several runs of many calls.

    A GPU is held until the host has issued them all, so that none waits for the host.
    """
    kind = bench.device.type
    for call in calls:
        call()
    bench.finish()
    least_s = bench.time_s(calls[0], repeats=1, warmups=0)
    times = []
    for _ in range(REPEATS):
        count = max(1, min(100, round(TIMED_S[kind] / least_s)))  # more in the next run, if a pause fell into this one
        if kind == "cuda":
            hold_device(min(0.01, count * 3e-5))
        began = now(bench.device)
        for number in range(count):
            calls[number % len(calls)]()
        ended = now(bench.device)
        bench.finish()
        times.append(elapsed_s(began, ended) / count)
        least_s = min(least_s, times[-1])
    return statistics.median(times)
