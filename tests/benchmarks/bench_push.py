"""Time of a push relative to the operations that it is compared with, in one run: `make benchmark` prints the ratios.

Nothing is asserted: times are this machine's.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from gsreal.gradient_sharding.messages import (  # noqa: E402
    Encoding,
    Scratch,
    mark,
)

HERE = Path(__file__).resolve().parent
ELEMENTS = 25 * 2**20 // 8
"""Elements of a bucket of 25 MiB that one of two owners gets."""


def medians_s(calls: list[Callable[[], object]], repeats: int = 15) -> list[float]:
    """Return the median processor time of each call; they take turns, and find the caches full of something else."""
    displaced = torch.ones(2**24)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for found, call in zip(times, calls, strict=True):
            displaced.add_(1.0)
            began = time.thread_time()
            call()
            found.append(time.thread_time() - began)
    return [statistics.median(each) for each in times]


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_threshold_pass_and_pack_over_their_four_operations(benchmark, density):
    """Absolute value, compare, nonzero and index_select of the whole range, in buffers that are there already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    part = torch.randn(ELEMENTS)
    threshold = float(part.abs().kthvalue(int(ELEMENTS * (1 - density))).values)
    magnitudes, flags, values = torch.empty_like(part), torch.empty(ELEMENTS, dtype=torch.bool), torch.empty_like(part)
    index = torch.empty((ELEMENTS, 1), dtype=torch.int64)

    def four_operations() -> None:
        torch.abs(part, out=magnitudes)
        torch.ge(magnitudes, threshold, out=flags)
        index.resize_(0, 1)
        torch.nonzero(flags, out=index)
        torch.index_select(part, 0, index.view(-1), out=values[: len(index)])

    scratch = Scratch(ELEMENTS, ELEMENTS, part.dtype, part.device)

    def pack(kind: str) -> None:
        flagged = mark(part, [(slice(0, ELEMENTS), threshold)], scratch)
        Encoding(kind, part.dtype, scratch).pack(part, flagged)

    base_s, coo_s, auto_s = medians_s([four_operations, lambda: pack("coo"), lambda: pack("auto")])
    print(f"\ndensity {density}: coo {coo_s / base_s:.2f}, auto {auto_s / base_s:.2f} of the four operations")
    benchmark.pedantic(lambda: pack("auto"), rounds=3)
    torch.set_num_threads(threads)


def test_a_dense_step_over_that_of_fsdp2s_zero2(benchmark, tmp_path):
    from gsreal.run.launch import launch

    with pytest.MonkeyPatch.context() as patch:
        paths = (str(HERE), os.environ.get("PYTHONPATH"))
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        out = tmp_path / "found.json"
        scenario = HERE.parents[1] / "scenarios/demo.toml"
        benchmark.pedantic(lambda: launch("step_ranks", [str(scenario), str(out)], ranks=2), rounds=1)
    for name, ratio in json.loads(out.read_text()).items():
        print(f"\n{name}: {ratio:.3f} of ZeRO-2's step")
