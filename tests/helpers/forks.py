"""Starts the ranks of tests as forks of one process that has imported torch: importing takes longer than most steps.

`launch` does what `gsreal.run.launch.launch` does, but for restarts and time-outs: nobody watches the ranks but this
process. As a program, this file is the process that is forked. It reads a run a line, as JSON, and answers with
the rank that failed first and its exit code, or with null.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORTS = (
    *("gsreal.run.worker", "gsreal.models", "gsreal.statistics.collect", "torch.profiler", "torch._dynamo"),
    *("torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.parallel", "sklearn.model_selection", "sklearn.datasets"),
)
"""What ranks import at once or at their first step, and what takes seconds."""
GRACE_S = 1.0
"""How long ranks whose peer failed get to say why they fail too, before they are ended."""


def launch(module: str, arguments: Sequence[str], *, ranks: int, max_restarts: int = 0, guard: Any = None) -> None:
    """Run `python -m module arguments...` on `ranks` ranks; raise RunFailedError where one of them fails."""
    assert not max_restarts, "only gsreal's own launcher restarts ranks"
    from gsreal.machine import ENVIRONMENT
    from gsreal.run.launch import reason_of
    from gssim.errors import RunFailedError
    from gssim.execution.files import scratch_folder

    parent = forked_from()
    assert parent.stdin is not None
    assert parent.stdout is not None
    with scratch_folder("gsreal-") as reports:  # held: an empty one would be taken for what a killed process left
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GSREAL_REPORTS": str(reports)}
        run = {"module": module, "arguments": [*arguments], "ranks": ranks, "folder": os.getcwd()}
        run["environment"] = {**os.environ, **ENVIRONMENT, **meeting}
        try:
            parent.stdin.write(json.dumps(run) + "\n")
            parent.stdin.flush()
            answer = parent.stdout.readline()
        except BaseException:
            end(parent)
            raise
        if not answer:
            end(parent)
            raise RunFailedError("the process that ranks are forked from has died")
        dead = json.loads(answer)
        if dead is not None:
            log = Path(reports, f"log-{dead[0]}.txt").read_text(encoding="utf-8", errors="replace")
            raise RunFailedError(f"{reason_of(Path(reports), tuple(dead), log)}\n{log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@cache
def forked_from() -> "subprocess.Popen[str]":
    """Return the process that ranks are forked from: one for each process that runs tests."""
    from gsreal.machine import ENVIRONMENT, die_with_parent

    process = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
        start_new_session=True,
    )
    atexit.register(end, process)
    return process


def end(process: "subprocess.Popen[str]") -> None:
    """End the process that ranks are forked from; ranks that still run die with it."""
    forked_from.cache_clear()
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def serve() -> None:
    """Answer runs until nobody asks any more."""
    for module in IMPORTS:
        import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a rank must not copy all that is shared with this process
    for line in sys.stdin:
        run = json.loads(line)
        started = {start(run, rank): rank for rank in range(run["ranks"])}
        print(json.dumps(first_failure(started)), flush=True)


def start(run: dict[str, Any], rank: int) -> int:
    """Fork a rank; return its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        become(run, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(run: dict[str, Any], rank: int) -> None:
    """Do in this process what `python -m` does on a rank; it ends by itself (run_on_rank)."""
    from gsreal.machine import die_with_parent

    die_with_parent()
    ranks = str(run["ranks"])
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.clear()
    os.environ.update({**run["environment"], **numbers})
    os.chdir(run["folder"])
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    log = os.open(Path(os.environ["GSREAL_REPORTS"], f"log-{rank}.txt"), os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, descriptor in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, descriptor)
    sys.argv = [run["module"], *run["arguments"]]
    runpy.run_module(run["module"], run_name="__main__", alter_sys=True)


def first_failure(started: dict[int, int]) -> tuple[int, int] | None:
    """Wait for all ranks; return (rank, exit code) of the one that failed first: soon after it the others are ended."""
    failed: tuple[int, int] | None = None
    while started:
        process, status = os.wait()
        rank, code = started.pop(process), os.waitstatus_to_exitcode(status)
        if code and failed is None:
            failed = rank, code
            time.sleep(GRACE_S)
            for other in started:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    serve()
