"""Of which tensors it is made what a rank holds all the time."""

from collections.abc import Callable, Mapping, Sequence

from gssim.optimizers import COUNTS_STEPS, VALUES_KEPT, implementation_on
from gssim.program.lowering import Lowering
from gssim.program.optimizer import holds_shards, owned_tensors
from gssim.program.units import units

Tensors = dict[str, tuple[float, ...]]
"""Bytes of tensors, by category."""
LT_WORKSPACE_BYTES = 2**20
"""What torch gives cuBLASLt where nobody asks for another size (CUBLASLT_WORKSPACE_SIZE), and keeps."""


def persistent_tensors(low: Lowering, rank: int, held: Mapping[str, float]) -> Tensors:
    """Return the tensors of what a rank holds all the time (`held`), by category, each in the order of making.

    Of a category that is not known in more detail, one. Adam's step counters are on the host but where it is fused.
    """
    owned = owned_tensors(low, rank)
    workload = low.scenario.workload
    counters = workload.optimizer in COUNTS_STEPS
    fused = implementation_on(low.device(rank).kind, workload.optimizer_implementation) == "fused"
    on_device = [4.0] * len(owned) if counters and fused else []
    on_host = 4.0 * len(owned) if counters and not fused else 0.0
    values = VALUES_KEPT[workload.optimizer]
    each: dict[str, Callable[[], Sequence[float]]] = {  # each is worked out only where the rank holds some
        "parameters": lambda: _parameters(low, owned),
        "master_copy": lambda: [elements * low.master_bytes for elements in owned],
        "buckets": lambda: [bucket.elements * low.value_bytes for bucket in low.buckets],
        "buffers": lambda: workload.model.buffer_bytes,
        "workspace": lambda: workspaces(held["workspace"]),
        "optimizer": lambda: [elements * low.master_bytes for elements in owned for _ in range(values)] + on_device,
    }
    return {
        category: _parts(size - (on_host if category == "optimizer" else 0.0), each.get(category, tuple)())
        for category, size in held.items()
        if size
    }


def workspaces(size_bytes: float) -> tuple[float, ...]:
    """Return what libraries keep of the allocator's memory: cuBLAS's workspace of each of two threads, and cuBLASLt's.

    That of the thread that runs the forward comes first, that of the backward last. Too little for them is one.
    Source: torch 2.11, aten/src/ATen/cuda/CublasHandlePool.cpp: one workspace for each handle and stream.

    >>> [size / 2**20 for size in workspaces(65 * 2**20)]
    [32.0, 1.0, 32.0]
    """
    each = (size_bytes - LT_WORKSPACE_BYTES) / 2
    return (each, float(LT_WORKSPACE_BYTES), each) if each >= LT_WORKSPACE_BYTES else (size_bytes,)


def _parameters(low: Lowering, owned: Sequence[int]) -> Sequence[float]:
    """Return the bytes of the tensors that parameters are in: their own, GS's flat replicas, or shards."""
    pushes = low.policies.gradients == "push"
    if holds_shards(low):
        if pushes:
            return [elements * low.master_bytes for elements in owned]
        return [elements * low.master_bytes for unit in units(low) for elements in unit.shard_elements]
    if pushes:
        return [bucket.elements * low.value_bytes for bucket in low.buckets]
    if low.flat_part:
        return [low.flat_part * len(low.group) * low.value_bytes]
    return [parameter.elements * low.value_bytes for _, parameter in low.parameters]


def _parts(size: float, parts: Sequence[float]) -> tuple[float, ...]:
    """Return parts that add up to `size`, whatever is missing as one more.

    >>> _parts(10.0, [4.0, 4.0]), _parts(7.0, [4.0, 4.0])
    ((4.0, 4.0, 2.0), (4.0, 3.0))
    """
    found = []
    left = size
    for part in parts:
        part = min(part, left)
        if part > 0:
            found.append(float(part))
        left -= part
    return (*found, float(left)) if left > 0 else tuple(found)
