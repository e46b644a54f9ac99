"""Estimates of `memory_and_traffic` and the counted values, for every rank. Argument: the file to write."""

import gc
import sys

import torch
import torch.distributed as dist
from rank_training import from_all_ranks, meet, write_found
from torch import nn

from gsreal.gradient_sharding import memory_and_traffic, shard_gradients
from gsreal.measure import MemoryCounter
from gsreal.measure.collectives import CollectiveRecorder
from gsreal.run.rank import run_on_rank
from gssim.plan import Push

SHARES = [0.7, 0.3]
BUCKETS = {"first_bucket_bytes": 300_000, "bucket_bytes": 700_000}
CASES = {
    "sgd-fp32": (torch.float32, lambda shard: torch.optim.SGD(shard, lr=1e-3, momentum=0.9, foreach=False), None),
    "adamw-fp32": (torch.float32, lambda shard: torch.optim.AdamW(shard, lr=1e-3, foreach=False), None),
    "adamw-bf16": (torch.bfloat16, lambda shard: torch.optim.AdamW(shard, lr=1e-3, foreach=False), None),
    "all-sparse": (torch.float32, lambda shard: torch.optim.SGD(shard, lr=1e-3), Push(threshold=0, encoding="coo")),
    "none": (torch.float32, lambda shard: torch.optim.SGD(shard, lr=1e-3), Push(threshold=1e9)),
}


class Scales(nn.Module):
    """Parameters that are large beside what a forward keeps of them: a mean over parts of each."""

    def __init__(self, dtype):
        super().__init__()
        sizes = (60_001, 120_000, 90_000, 150_003, 40_000)
        self.parts = nn.ParameterList(nn.Parameter(torch.full((n,), 0.5, dtype=dtype)) for n in sizes)

    def forward(self):
        # the gradient of a mean is one value, spread out where it reaches the parameter
        return sum(part.mean() for part in self.parts)


def counted(dtype, factory, push, counter):
    gc.collect()
    before = counter.alive()
    model = Scales(dtype)
    said = memory_and_traffic(
        model,
        factory,
        rank=dist.get_rank(),
        ranks=2,
        shard_shares=SHARES,
        push=push,
        density=0.0 if push and push.threshold else 1.0,
        **BUCKETS,
    )
    optimizer = shard_gradients(model, factory, shard_shares=SHARES, push=push, **BUCKETS)

    def backward():
        model().backward()

    backward()
    optimizer.step()
    held = counter.alive() - before
    peaks = []
    for _ in range(4):
        dist.barrier()
        peaks.append(counter.peak_of(backward, [])[0] - before)
        optimizer.step()
    with CollectiveRecorder() as recorder:
        backward()
        optimizer.step()
    pushed = sum(entry.sent_bytes for entry in recorder.seen if entry.kind == "all-to-all-v")
    published = sum(entry.sent_bytes for entry in recorder.seen if entry.kind == "all-gather-v")
    return {
        "said": [said.held_bytes, said.peak_bytes, said.push_bytes, said.publish_bytes],
        "counted": [held, min(peaks), pushed, published],
        "text": str(said),
    }


def main(out):
    counter = MemoryCounter(torch.device("cpu"))
    meet()
    found = {name: counted(*case, counter) for name, case in CASES.items()}
    write_found({"ranks": from_all_ranks(found), "counter": counter.method}, out)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
