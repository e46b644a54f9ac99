"""What it costs to find, keep, pack and add gradients over a threshold: the very functions that a push runs."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gsreal.benchmarks.bench import Bench
from gsreal.gradient_sharding.messages import Encoding
from gsreal.gradient_sharding.scratch import Scratch
from gsreal.gradient_sharding.thresholds import mark, mean_magnitudes, quantile
from gssim.encodings import SAMPLE_ELEMENTS

ELEMENTS = 2**20
REPEATS = 9
FEW, MANY = 0.01, 0.2
"""Densities between which the cost of an entry shows."""


def compression_cost(bench: Bench) -> dict[str, float]:
    """Return the costs per element and per call; caches hold something else before each, as after a backward."""
    gradient = torch.rand(ELEMENTS, device=bench.device)
    scratch = Scratch(ELEMENTS, ELEMENTS, gradient.dtype, bench.device)
    call_s = bench.time_s(lambda: mark(gradient[:64], [(slice(0, 64), 0.5)], scratch), repeats=51)
    return {
        "call_s": call_s,
        **_sending(bench, gradient, scratch, call_s),
        **_receiving(bench, gradient, scratch, call_s),
    }


def _pack(gradient: Tensor, scratch: Scratch, kind: str, density: float, *, clear: bool = False) -> tuple[Tensor, int]:
    """Find and pack the elements above 1 - `density`, which are so many of those between 0 and 1."""
    flags = mark(gradient, [(slice(0, gradient.numel()), 1 - density)], scratch)
    return Encoding(kind, gradient.dtype, scratch).pack(gradient, flags, clear=clear)


def _sending(bench: Bench, gradient: Tensor, scratch: Scratch, call_s: float) -> dict[str, float]:
    """Return what it costs to find entries and to write them; they are told apart by densities and encodings."""

    def pack_s(kind: str, density: float, *, clear: bool = False) -> float:
        fresh = iter([gradient.clone() if clear else gradient for _ in range(REPEATS)])
        return _cold_s(bench, lambda: _pack(next(fresh), scratch, kind, density, clear=clear))

    few, many = FEW * ELEMENTS, MANY * ELEMENTS
    few_s, many_s = pack_s("coo", FEW), pack_s("coo", MANY)
    entry_s = max(0.0, (many_s - few_s) / (many - few))
    found_s = max(0.0, (few_s - few * entry_s - 2 * call_s) / ELEMENTS)
    select_s = _cold_s(bench, lambda: mark(gradient, [(slice(0, ELEMENTS), 1 - FEW)], scratch))
    kept = torch.zeros_like(gradient)
    return {
        "threshold_element_s": found_s,
        "pack_element_s": entry_s,
        "clear_element_s": max(0.0, (pack_s("coo", MANY, clear=True) - many_s) / many),
        "residual_element_s": _cold_s(bench, partial(scratch.add, kept, gradient)) / ELEMENTS,
        "mean_element_s": _cold_s(bench, lambda: mean_magnitudes([[gradient]])) / ELEMENTS,
        "estimate_element_s": _cold_s(bench, lambda: quantile([gradient], FEW, scratch)) / SAMPLE_ELEMENTS,
        "pack_bit_s": max(0.0, (pack_s("bitmap", FEW) - few_s) / ELEMENTS),
        "dense_element_s": max(0.0, (pack_s("dense", FEW) - select_s) / ELEMENTS),
    }


def _receiving(bench: Bench, gradient: Tensor, scratch: Scratch, call_s: float) -> dict[str, float]:
    """Return what it costs an owner to add entries, and to find them in a bitmap."""
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
