"""Runs on two ranks of a test: measures the host's overhead of cut blocks, on few tokens, and rates of kernels.

Argument: the file to write.
"""

import sys
import time

from rank_training import write_found

from gsreal.calibrate import bench as bench_module
from gsreal.calibrate import kernels
from gsreal.calibrate import wrappers as cut_blocks
from gsreal.calibrate.bench import Bench, Settings
from gsreal.run.rank import run_on_rank


def main(out: str) -> None:
    cut_blocks.TOKENS, cut_blocks.BLOCK_WARMUPS, cut_blocks.BLOCK_STEPS = (1, 16), 1, 5
    settings = Settings(models=(), batch_sizes=(), sequence_length=1, precision="fp32", kind="cpu")
    kernels.SIZES, kernels.LENGTHS, kernels.TOKENS = ({"cpu": each} for each in ((16, 128), (16, 64), 64))
    bench = Bench(settings)
    found = {"cut_block": cut_blocks.cut_block_cost(bench)}
    # these take milliseconds: on a busy machine, the wall clock would tell how long the rank waited for its core
    bench_module.device_time_s = time.thread_time
    write_found(found | {"kernels": bench.alone(lambda: kernels.kernel_rates(bench))}, out)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
