"""Kineto traces with known sums, made of the documented fields of a GPU's training with NCCL."""

import json
from pathlib import Path
from typing import Any

STEP_US = 10_000
HOST, AUTOGRAD, STREAM, NCCL = 100, 101, 7, 20


class Writer:
    """Collects a rank's events; times in us since the first step, shifted by the host's clock."""

    def __init__(self, rank: int = 0, ranks: int = 2, ahead_us: float = 0.0) -> None:
        self.rank, self.ranks, self.ahead_us = rank, ranks, ahead_us
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def span(self, category: str, name: str, thread: int, start_us: float, end_us: float, **args: Any) -> None:
        place = {"pid": 0 if category in ("kernel", "gpu_memcpy") else 99, "tid": thread}
        times = {"ts": 5_000_000 + start_us + self.ahead_us, "dur": end_us - start_us}
        self.events.append({"ph": "X", "cat": category, "name": name, **place, **times, "args": args})

    def step(self, number: int, start_us: float, end_us: float) -> None:
        self.span("user_annotation", f"ProfilerStep#{number}", HOST, start_us, end_us)

    def kernel(
        self,
        start_us: float,
        end_us: float,
        *,
        launched_us: float,
        thread: int = HOST,
        category: str = "kernel",
        name: str = "sm90_gemm",
        **args: Any,
    ) -> None:
        self.correlation += 1
        same = {"correlation": self.correlation}
        self.span("cuda_runtime", "cudaLaunchKernel", thread, launched_us, launched_us + 5, **same)
        self.span(category, name, NCCL if "Collective name" in args else STREAM, start_us, end_us, **same, **args)

    def nccl(self, start_us: float, end_us: float, *, launched_us: float, **fields: Any) -> None:
        known = {
            "Collective name": "allreduce",
            "In msg nelems": 1000,
            "Out msg nelems": 1000,
            "dtype": "BFloat16",
            "Group size": self.ranks,
            "Process Group Name": "0",
            "Process Group Ranks": str(list(range(self.ranks))),
        }
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self.kernel(start_us, end_us, launched_us=launched_us, thread=AUTOGRAD, name=name, **known | fields)

    def memory(self, time_us: float, allocated: int, reserved: int) -> None:
        args = {"Total Allocated": allocated, "Total Reserved": reserved, "Bytes": 1, "Device Type": 1, "Device Id": 0}
        place = {"pid": 99, "tid": HOST, "ts": 5_000_000 + time_us + self.ahead_us}
        self.events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "s": "t", **place, "args": args})

    def data(self) -> dict[str, Any]:
        about: dict[str, Any] = {"backend": "nccl", "rank": self.rank, "world_size": self.ranks, "pg_count": 1}
        about["pg_config"] = [{"pg_name": "0", "pg_size": self.ranks, "ranks": list(range(self.ranks))}]
        return {"schemaVersion": 1, "distributedInfo": about, "baseTimeNanoseconds": 0, "traceEvents": self.events}

    def write(self, folder: Path) -> Path:
        path = folder / f"rank{self.rank}.json"
        path.write_text(json.dumps(self.data()), encoding="utf-8")
        return path


def training(rank: int, *, steps: int = 4, arrives_us: float = 5000, ahead_us: float = 0.0, first: int = 10) -> Writer:
    """Return a rank's steps of 10 ms: forward 3, backward 3, optimizer 1, exposed all-reduce 1, exposed copy 0.5 ms.

    The all-reduce begins at `arrives_us`, beside the backward's kernel until 7 ms, and ends at 8 ms; of two copies one
    is hidden by the forward. 1.5 ms are idle. The first step takes twice the time.
    """
    made = Writer(rank, ahead_us=ahead_us)
    made.step(first - 1, -2 * STEP_US, 0)
    for index in range(steps - 1):
        t = index * STEP_US
        made.step(first + index, t, t + STEP_US)
        made.span("user_annotation", "Optimizer.step#AdamW.step", HOST, t + 8000, t + 8900)
        made.span("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", AUTOGRAD, t + 3500, t + 4500)
        made.kernel(t, t + 500, launched_us=t + 10, category="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)")
        made.kernel(
            t + 2000, t + 2500, launched_us=t + 20, category="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)"
        )
        made.kernel(t + 1000, t + 4000, launched_us=t + 100)
        made.kernel(t + 4000, t + 7000, launched_us=t + 3600, thread=AUTOGRAD)
        made.nccl(t + arrives_us, t + 8000, launched_us=t + 3700)
        made.kernel(t + 8000, t + 9000, launched_us=t + 8100, name="multi_tensor_apply_kernel")
        made.memory(t + 3000, 5_000_000 + index + rank, 9_000_000)
        made.memory(t + 9500, 1_000_000, 9_000_000)
    return made
