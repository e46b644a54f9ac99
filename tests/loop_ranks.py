"""Runs on every rank of a test: rank 0 writes how the kernel schedules its threads, by name, once it is settled.

Arguments: a scenario, the cluster that it is to have, and the file to write.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist

from gsreal.machine import settle, unsettled
from gsreal.rank import run_on_rank
from gssim.scenario import load_scenario


def main(scenario: str, cluster: str, out: str) -> None:
    dist.init_process_group("gloo")
    settle(load_scenario(Path(scenario), [cluster], gradients_needed=False).scenario.cluster, dist.get_rank())
    with unsettled():
        dist.new_group()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(policies()), encoding="utf-8")
    dist.barrier()


def policies() -> dict[str, list[int]]:
    found = defaultdict(list)
    for name in Path("/proc/self/task").glob("*/comm"):
        found[name.read_text(encoding="utf-8").strip()].append(os.sched_getscheduler(int(name.parent.name)))
    main_thread = os.sched_getscheduler(os.getpid())
    return found | {"main": [main_thread]}


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
