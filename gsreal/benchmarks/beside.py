"""How much slower a model's steps are beside communication, by how much of it there is."""

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from gsreal.benchmarks.bench import Bench
from gsreal.benchmarks.steps import batch_of, middle_batch_size, step_marks, trained, update
from gssim.workload import Model

ROUNDS = 4
STEPS_PER_ROUND = 3


def communicating_excess(bench: Bench, model: Model) -> tuple[float, float]:
    """Return (bytes/s that a rank sends and receives, by how much longer steps take meanwhile, over steps alone).

    All ranks compute, with and without all-reduces beside, in turns. Their threads and the kernel's share cores with
    the compute, and caches: it hangs on the layers, and on how much memory is sent, which is what the model's gradients
    have. Both were measured.
    """
    module, optimizer, _ = trained(bench, model)
    batch = batch_of(bench, model, middle_batch_size(bench))
    payload = torch.zeros(sum(each.numel() for each in module.parameters()), device=bench.device)

    def step_s() -> float:
        began_s = time.perf_counter()
        step_marks(bench, module, batch)
        took_s = time.perf_counter() - began_s
        update(bench, optimizer)
        return took_s

    one_s = bench.mean_over_ranks(_reduced_s(payload))
    quiet, busy = list[float](), list[float]()
    for turn in range(ROUNDS + 1):
        dist.barrier()
        alone = [step_s() for _ in range(STEPS_PER_ROUND)]
        works = math.ceil(bench.mean_over_ranks(2 * sum(alone)) / one_s)
        beside = _beside(payload, works, step_s)
        if turn:  # the first warms up
            quiet += alone
            busy += beside
    handled = 2 * 2 * (bench.ranks - 1) / bench.ranks * payload.nbytes
    excess = statistics.median(busy) / statistics.median(quiet) - 1 if busy else 0.0
    return handled / one_s, max(0.0, excess)


def _beside(payload: torch.Tensor, works: int, step_s: Callable[[], float]) -> list[float]:
    """Return what steps take while so many all-reduces go on; the last, which outlasts them, is left out."""
    dist.barrier()
    going = [dist.all_reduce(payload, async_op=True) for _ in range(works)]
    found = []
    while not going[-1].is_completed():
        took_s = step_s()
        if not going[-1].is_completed():
            found.append(took_s)
    for work in going:
        work.wait()
    return found


def _reduced_s(payload: torch.Tensor) -> float:
    """Return what an all-reduce takes, one after another."""
    dist.all_reduce(payload)
    began_s = time.perf_counter()
    for _ in range(2):
        dist.all_reduce(payload)
    return (time.perf_counter() - began_s) / 2
