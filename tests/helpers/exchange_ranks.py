"""Runs on every rank of a test: rings of messages beside torch's own collectives; rank 0 writes how far they differ.

Argument: the file to write.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rank_training import from_all_ranks, meet, write_found

from gsreal.gradient_sharding import point_to_point as exchanges
from gsreal.measure import MemoryCounter
from gsreal.measure.collectives import CollectiveRecorder, collectives_of
from gsreal.run.rank import run_on_rank

LARGE = 300_000
"""Elements of a part that goes in halves."""
REPEATS = 5
"""Calls whose median counts: gloo's threads release an earlier case's tensors only when they run next."""


def main(out: str) -> None:
    counter = MemoryCounter(torch.device("cpu"))
    meet()
    differences = dict(compared())
    write_found({"differences": differences, "taken": taken(counter), "seen": seen()}, out)


def compared() -> Iterator[tuple[str, float]]:
    """Yield each case with the largest difference on any rank from torch's own collective."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    for elements in (1, 7, LARGE):
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(rank)
            flat = torch.randn(ranks * elements, dtype=dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                theirs, ours = (torch.empty(elements, dtype=dtype) for _ in range(2))
                dist.reduce_scatter_tensor(theirs, flat.clone(), op=op)
                exchanges.reduce_scatter_tensor(ours, flat.clone(), group=group, op=op)
                yield f"reduce-scatter {elements} {dtype} {op}", worst(theirs, ours)
            whole, gathered = (torch.empty_like(flat) for _ in range(2))
            dist.all_gather_into_tensor(whole, theirs)
            exchanges.all_gather_into_tensor(gathered, theirs, group=group)
            yield f"all-gather {elements} {dtype}", worst(whole, gathered)
            parts = flat.view(ranks, elements)
            theirs = torch.empty(elements, dtype=dtype)
            dist.reduce_scatter_tensor(theirs, flat.clone())
            ours = exchanges.reduce_scatter_in_turn(lambda number, parts=parts: parts[number].clone(), group=group)
            yield f"reduce-scatter in turn {elements} {dtype}", worst(theirs, ours)
            every = torch.full((ranks, elements), torch.nan, dtype=dtype)
            every[rank] = parts[rank]
            copied = torch.empty_like(every)
            order = []
            for number in exchanges.all_gather_in_turn(every, group=group):
                copied[number] = every[number]
                order.append(number)
            dist.all_gather_into_tensor(whole, parts[rank].clone())
            yield f"all-gather in turn {elements} {dtype}", worst(whole, copied.view(-1))
            yield f"order {elements} {dtype}", float(order != [(rank - step) % ranks for step in range(ranks)])
    yield from unevenly(group, rank, ranks)


def unevenly(group: Any, rank: int, ranks: int) -> Iterator[tuple[str, float]]:
    """Return the same for parts of unequal sizes, one of them empty."""
    ends = [0, LARGE, *[LARGE] * (ranks - 2), 2 * LARGE + 17]
    ranges = list(pairwise(ends))
    own = slice(*ranges[rank])
    flat = torch.randn(ends[-1], dtype=torch.float64)
    whole = flat.clone()
    dist.all_reduce(whole)
    part = torch.empty(own.stop - own.start, dtype=torch.float64)
    exchanges.reduce_scatter_v(part, flat.clone(), ranges, group=group)
    yield "reduce-scatter-v", worst(whole[own], part)
    for gather in (exchanges.all_gather_v, exchanges.all_gather_by_broadcasts):
        found = torch.zeros_like(whole)
        found[own] = whole[own]
        gather(found, ranges, group=group)
        yield gather.__name__, worst(whole, found)
    for point_to_point in (True, False):
        sends = [torch.full((3 * other,), float(10 * rank + other)) for other in range(ranks)]
        receives = [torch.empty(3 * rank) for _ in range(ranks)]
        receives[rank] = sends[rank]
        exchanges.all_to_all_v(sends, receives, group=group, declared_bytes=0, point_to_point=point_to_point).wait()
        expected = [torch.full((3 * rank,), float(10 * other + rank)) for other in range(ranks)]
        yield f"all-to-all-v {point_to_point}", max(map(worst, expected, receives))


def worst(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    difference = torch.tensor(float((theirs - ours).abs().max()) if theirs.numel() else 0.0)
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return float(difference)


def taken(counter: MemoryCounter) -> dict[str, float] | None:
    """Return the bytes that each ring takes from the allocator beside its tensors; None where nothing counts them."""
    if counter.method != "allocator":
        return None
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    part, whole = torch.ones(LARGE), torch.ones(ranks * LARGE)
    calls = {
        "reduce-scatter": lambda: exchanges.reduce_scatter_tensor(part, whole, group=group),
        "all-gather": lambda: exchanges.all_gather_into_tensor(whole, part, group=group),
    }
    return {kind: median(taken_once(counter, call) for _ in range(REPEATS)) for kind, call in calls.items()}


def taken_once(counter: MemoryCounter, call: Callable[[], None]) -> int:
    before = counter.alive()
    return counter.peak_of(call, [])[0] - before


def seen() -> list[list[Any]]:
    """Return what an observer of the process group sees."""
    group = dist.group.WORLD
    assert group is not None
    part, whole = torch.ones(4), torch.ones(4 * dist.get_world_size())
    with CollectiveRecorder() as recorder:
        exchanges.reduce_scatter_tensor(part, whole, group=group)
        exchanges.all_gather_into_tensor(whole, part, group=group)
        exchanges.reduce_scatter_in_turn(lambda _: torch.ones(5), group=group)
        for _ in exchanges.all_gather_in_turn(torch.ones(dist.get_world_size(), 6), group=group):
            pass
    return [list(entry.key) for entry in collectives_of(from_all_ranks(recorder.seen))]


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
