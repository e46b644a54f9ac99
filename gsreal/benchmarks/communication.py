"""What exchanges and collectives cost, and what they cost the compute beside them."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.benchmarks.bench import Bench
from gsreal.exchanges import all_gather_v, all_to_all_v, reduce_scatter_v
from gssim.shares import even, ranges

REPEATS = 15
EXCHANGE_BYTES = tuple(2**k for k in (12, 14, 16, 18, 20, 22))


def communication_cost(bench: Bench) -> dict[str, Any]:
    """Return latency and bandwidth of an exchange, and each collective's fixed and per-byte cost beside it.

    A collective is taken as  t = overhead + rounds * latency + factor * carried / bandwidth,  the bytes carried over
    one link being those of the algorithm that the backend uses.
    """
    lines = {"all-to-all-v": (*_line_of(bench, partial(_exchange, bench)), 1, 1.0)}
    for kind, (make, rounds, carried) in _collectives(bench).items():
        try:
            lines[kind] = (*_line_of(bench, make), rounds, carried)
        except RuntimeError as error:  # the same on every rank, before anything is sent
            bench.say(f"without {kind}: {str(error).splitlines()[0]}")
    byte_s = lines["all-to-all-v"][1]
    latency_s = min(fixed_s / rounds for fixed_s, _, rounds, _ in lines.values())
    posting = [_posting_s(bench, size) for size in EXCHANGE_BYTES]
    posting_fixed_s, posting_byte_s = _line(EXCHANGE_BYTES, posting)
    posting_byte_s = min(posting_byte_s, 0.95 * byte_s)
    found: dict[str, Any] = {
        "latency_s": latency_s,
        "bandwidth_bytes_per_s": 1 / byte_s,
        "posting_s": posting_fixed_s,
        "posting_byte_s": posting_byte_s,
        "overhead_s": {kind: max(0.0, fixed_s - rounds * latency_s) for kind, (fixed_s, _, rounds, _) in lines.items()},
        "bytes_factor": {kind: slope_s / (carried * byte_s) for kind, (_, slope_s, _, carried) in lines.items()},
    }
    # what is left of an exchange once it is posted
    found["bytes_factor"]["all-to-all-v"] = 1 - posting_byte_s / byte_s
    found["overhead_s"]["all-to-all-v"] = max(0.0, lines["all-to-all-v"][0] - latency_s - posting_fixed_s)
    return found


def _line_of(bench: Bench, make: Callable[[int], Callable[[], object]]) -> tuple[float, float]:
    """Return (fixed, per byte) of a call by its size."""
    return _line(EXCHANGE_BYTES, [_synchronised_s(bench, make(size)) for size in EXCHANGE_BYTES])


def _line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Return (fixed, per byte) of the line through the times, every point weighted by its own size of error."""
    x, y = np.array(sizes, dtype=float), np.array(times)
    slope, fixed = np.polyfit(x, y, 1, w=1 / y)
    return max(1e-7, float(fixed)), max(1e-13, float(slope))


def _synchronised_s(bench: Bench, call: Callable[[], object]) -> float:
    """Return the median time of a collective from its last rank's arrival to its last rank's end.

    Every rank computes before it comes, as it does in training: caches are cold for the message then, and the
    scheduler lets a thread that has long computed wait for the backend's threads. Times are of one host's clock.
    """
    times = []
    for step in range(REPEATS + 2):
        dist.barrier()
        _compute(bench)
        began = time.monotonic()
        call()
        bench.finish()
        moments = torch.tensor([began, time.monotonic()], dtype=torch.float64)
        dist.all_reduce(moments, op=dist.ReduceOp.MAX)
        if step >= 2:
            times.append(float(moments[1] - moments[0]))
    return statistics.median(times)


def _compute(bench: Bench) -> None:
    """Keep this rank busy for some milliseconds, over more memory than its caches hold."""
    a = torch.ones(512, 512, device=bench.device)
    for _ in range(4):
        torch.mm(a, a)
    bench.displace()
    bench.finish()


def _posting_s(bench: Bench, size_bytes: int) -> float:
    """Return the median time that posting an exchange takes, before it is waited for."""
    post = _exchange(bench, size_bytes, wait=False)
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        _compute(bench)
        began = time.perf_counter()
        pending = post()
        times.append(time.perf_counter() - began)
        pending.wait()  # type: ignore[attr-defined]
    return statistics.median(times)


def _exchange(bench: Bench, size_bytes: int, *, wait: bool = True) -> Callable[[], object]:
    """Return a call in which every rank sends `size_bytes` to the next one, and waits or returns what to wait for."""
    outgoing, incoming = (torch.zeros(size_bytes // 4, device=bench.device) for _ in range(2))
    sends: list[Tensor | None] = [None] * bench.ranks
    receives: list[Tensor | None] = [None] * bench.ranks
    sends[(bench.rank + 1) % bench.ranks] = outgoing
    receives[(bench.rank - 1) % bench.ranks] = incoming
    group = dist.group.WORLD
    assert group is not None

    def call() -> object:
        pending = all_to_all_v(sends, receives, group=group, declared_bytes=0)
        if wait:
            pending.wait()
        return pending

    return call


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

    def reduce_unevenly(size: int) -> Callable[[], object]:
        whole, part = buffers(size)
        group = dist.group.WORLD
        assert group is not None
        return lambda: reduce_scatter_v(part, whole, ranges(whole.numel(), even(n)), group=group)

    def exchange(size: int) -> Callable[[], object]:
        outgoing, incoming = (torch.zeros(size // 4, device=device) for _ in range(2))
        gone, come = ([size // 4 if i == (bench.rank + k) % n else 0 for i in range(n)] for k in (1, -1))
        return lambda: dist.all_to_all_single(incoming, outgoing, come, gone)

    share = (n - 1) / n
    return {
        "all-reduce": (all_reduce, 2 * (n - 1), 2 * share),
        "reduce-scatter": (reduce_scatter, 2 * (n - 1), 2 * share),  # gloo's is an all-reduce
        "all-gather": (all_gather, n - 1, share),
        "all-gather-v": (gather_unevenly, n - 1, share),
        "reduce-scatter-v": (reduce_unevenly, n - 1, share),
        "all-to-all": (exchange, 1, 1.0),
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
