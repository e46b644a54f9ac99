"""Runs on every rank of a test: rank 0 writes how and where its threads are scheduled, before it is settled and after.

Arguments: a scenario, the cluster that it is to have, and the file to write.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rank_training import write_found

from gsreal.machine import group_threads, settle
from gsreal.run.rank import run_on_rank
from gssim.scenario import load_scenario


def main(scenario: str, cluster: str, out: str) -> None:
    # as a process begins that no test has started
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    dist.init_process_group("gloo")
    found = {"unsettled": a_group_more()}
    settle(load_scenario(Path(scenario), [cluster], gradients_needed=False).scenario.cluster, dist.get_rank())
    found["settled"] = a_group_more()
    write_found(found, out)


def a_group_more() -> dict[str, list[Any]]:
    """Make a process group, and return the threads."""
    with group_threads():
        dist.new_group()
    return threads()


def threads() -> dict[str, list[Any]]:
    """Return the policy and cores of each thread, by its name."""
    found = defaultdict(list)
    for name in Path("/proc/self/task").glob("*/comm"):
        thread = int(name.parent.name)
        kind = "main" if thread == os.getpid() else name.read_text(encoding="utf-8").strip()
        found[kind].append([os.sched_getscheduler(thread), sorted(os.sched_getaffinity(thread))])
    return found


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
