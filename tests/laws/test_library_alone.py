"""Gradient Sharding as a library: it trains where all else of the project cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """
import sys

ALLOWED = ("gssim.plan", "gssim.errors", "gssim.units", "gssim.execution.cache", "gssim.execution",
           "gsreal.gradient_sharding")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        ours = package in ("gssim", "gsreal", "analysis") and "." in name
        allowed = any(name == each or name.startswith(each + ".") for each in ALLOWED)
        if (ours and not allowed) or package in ("simpy", "typer", "rich", "polars", "matplotlib"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""
TRAINING = """
import torch
import torch.distributed as dist

from gsreal.gradient_sharding import Publish, Push, memory_and_traffic, shard_gradients

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
adamw = lambda shard: torch.optim.AdamW(shard, lr=1e-2)
print(memory_and_traffic(model, adamw, rank=0, ranks=1, push=Push(threshold=1e-3), density=0.2))
optimizer = shard_gradients(model, adamw, push=Push(threshold=1e-3), publish=Publish(threshold=1e-9))
inputs = torch.randn(32, 8)
targets = (inputs.sum(1) > 0).long()
losses = []
for _ in range(30):
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
blocked = {"simpy", "typer", "rich", "polars", "gssim.scenario", "gssim.workload", "gssim.cluster", "gsreal.run"}
assert not blocked & set(sys.modules)
dist.destroy_process_group()
print("trained")
"""


@pytest.mark.slow  # of its imports import-linter tells, and tests/real/test_library.py of its training
def test_the_library_trains_with_all_else_of_the_project_blocked():
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED + TRAINING],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1] == "trained"


LEAVING = """
import atexit, tempfile, weakref

import torch
import torch.distributed as dist

atexit.register(lambda: print("group", "alive" if group() is not None else "gone"))  # after what later imports register

from gsreal.gradient_sharding import Push, shard_gradients

file = tempfile.NamedTemporaryFile()
dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
model = torch.nn.Linear(8, 8)
optimizer = shard_gradients(model, lambda shard: torch.optim.AdamW(shard, lr=1e-3), push=Push(threshold=1e-3))
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
model(torch.randn(4, 8)).sum().backward()
optimizer.clip_grad_norm_(1.0)
optimizer.step()
dist.destroy_process_group()
"""


def test_a_destroyed_group_ends_before_the_interpreter():
    """One script in five aborted at its end: a thread of gloo's freed a tensor after the interpreter had ended."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVING],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "group gone\n"), ended.stderr
