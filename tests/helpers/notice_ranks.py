"""Runs on every rank of a lab: rank 0 writes how long collectives take that all ranks begin at the same moment.

Arguments: the file to write, and the bytes of a tensor.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from rank_training import meet, write_found

from gsreal.gradient_sharding.point_to_point import all_gather_v, reduce_scatter_v
from gsreal.run.rank import run_on_rank
from gssim.plan import ranges
from gssim.plan.splitting import even

REPEATS, WARMUPS = 10, 4
PAUSE_S = 0.4
"""More than any of them takes; TCP's windows open in the warm-ups."""


def main(out: str, size: str) -> None:
    meet()
    preempt_others(os.getpid())
    write_found({kind: took_s(call) for kind, call in calls(int(size) // 4).items()}, out)


def preempt_others(process: int) -> None:
    """Let all threads of a process run as soon as they have work, whatever else runs on the machine, if this may.

    They wait for messages nearly all the time. On a busy machine each of them would otherwise wait for a core too.
    """
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(OSError):  # it has just ended, or this process has no right to do so
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


def calls(elements: int) -> dict[str, Callable[[], object]]:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    parts = ranges(elements, even(ranks))
    whole, part = torch.zeros(elements), torch.zeros(parts[rank][1] - parts[rank][0])

    def send() -> None:
        if rank < 2:
            dist.recv(whole, 0) if rank else dist.send(whole, 1)

    return {
        "send": send,
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all-gather-v": lambda: all_gather_v(whole, parts, group=group),
        "reduce-scatter-v": lambda: reduce_scatter_v(part, whole, parts, group=group),
    }


def took_s(call: Callable[[], object]) -> float:
    """Return the least time until the last rank is done: others' work on the machine only adds to it."""
    now = torch.tensor([time.monotonic()], dtype=torch.float64)  # one clock for all namespaces of a machine
    dist.all_reduce(now, op=dist.ReduceOp.MAX)
    times = torch.zeros(WARMUPS + REPEATS, dtype=torch.float64)
    for repeat in range(len(times)):
        at_s = float(now) + PAUSE_S * (1 + repeat)
        time.sleep(max(0.0, at_s - time.monotonic()))
        call()
        times[repeat] = time.monotonic() - at_s
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times[WARMUPS:].min())


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
