"""A training of somebody else: plain DistributedDataParallel under torch.profiler, with a stop-watch around each pass.

Arguments: the folder for the traces. The last step, which is not profiled, is recorded by `gsreal`'s own counter.
"""

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from gsreal.measure.collectives import CollectiveRecorder, ObservedCollective, collectives_of
from gsreal.models import gpt

SAMPLES, LENGTH, WAITED, PROFILED = 8, 128, 1, 4


def main(folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(gpt(width=144, heads=4, layers=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(256, (SAMPLES, LENGTH + 1))

    def step() -> list[float]:
        """Train a step; return when it began, and when its forward, its backward and its update ended."""
        times_s = [time.perf_counter()]
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, -2), tokens[:, 1:].flatten())
        times_s.append(time.perf_counter())
        loss.backward()
        times_s.append(time.perf_counter())
        optimizer.step()
        return [*times_s, time.perf_counter()]

    passes_s = []
    path = Path(folder) / f"rank{rank}.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=WAITED, warmup=1, active=PROFILED),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for _ in range(WAITED + 1 + PROFILED):
            passes_s.append([end_s - began_s for began_s, end_s in pairwise(step())])
            profiler.step()
    with CollectiveRecorder() as recorder:
        step()
    found: list[tuple[list[list[float]], list[ObservedCollective]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(found, (passes_s[WAITED + 1 :], recorder.seen))
    if rank == 0:
        own = [entry.key for entry in collectives_of([seen for _, seen in found])]
        Path(folder, "own.json").write_text(
            json.dumps({"passes_s": [passes for passes, _ in found], "collectives": own})
        )
    dist.barrier()
    os._exit(0)  # gloo's threads may keep a process from ending


if __name__ == "__main__":
    main(sys.argv[1])
