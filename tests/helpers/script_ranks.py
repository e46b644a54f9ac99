"""Runs a user's script as torchrun does, by the launcher that torchrun calls, whose ranks are forks of this process.

Arguments: the script, how many ranks, and the folder for what each prints (out-RANK.txt).
"""

import os
import runpy
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gsreal.run.rank import run_on_rank


def main(script: str, ranks: str, folder: str) -> None:
    standalone = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "test", "max_restarts": 0}
    asked = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=int(ranks), start_method="fork", **standalone)
    elastic_launch(asked, run)(script, folder)


def run(script: str, folder: str) -> None:
    """Run the script in this rank."""
    with Path(folder, f"out-{os.environ['RANK']}.txt").open("w", encoding="utf-8") as said:
        usual, sys.stdout = sys.stdout, said
        runpy.run_path(script, run_name="__main__")
        sys.stdout = usual


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
