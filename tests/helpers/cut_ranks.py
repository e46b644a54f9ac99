"""Runs on two ranks of a test: what the host adds where blocks are cut, measured on blocks of few tokens.

Argument: the file to write.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from gsreal.calibrate import wrappers as cut_blocks
from gsreal.calibrate.bench import Bench, Settings
from gsreal.run.rank import run_on_rank


def main(out: str) -> None:
    cut_blocks.TOKENS, cut_blocks.STEPS = (1, 16), 5
    settings = Settings(models=(), batch_sizes=(), sequence_length=1, precision="fp32", kind="cpu")
    found = cut_blocks.cut_block_cost(Bench(settings))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
