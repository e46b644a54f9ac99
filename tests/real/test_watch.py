"""Detection of the rank that blocks the others: it is stopped, does not respond, or computes while the others wait."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from gsreal.run import progress as watch
from gsreal.run.launch import Guard, Start, run_ranks
from gsreal.run.progress import Watch
from gssim.errors import RunFailedError

RANK = """
import sys, time
from gsreal.run.progress import install_stack_dump, note_progress
note_progress("step 3 done")
if sys.argv[1] == "answers":
    install_stack_dump()

def lingers():
    print("ready", flush=True)
    time.sleep(60)

lingers()
"""
WAITING = """Current thread 0x1 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce
"""


@pytest.fixture
def ranks(tmp_path):
    """Return a function that starts ranks, which answer or are silent, and gives what watches them."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("a stopped process is known by /proc")
    started = []

    def start(*kinds):
        for number, kind in enumerate(kinds):
            environment = {**os.environ, "GSREAL_REPORTS": str(tmp_path), "RANK": str(number)}
            line = [sys.executable, "-c", RANK, kind]
            started.append(subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True))
        for each in started:
            assert each.stdout.readline() == "ready\n"
        return Watch({number: each.pid for number, each in enumerate(started)}, tmp_path), started

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


def test_the_rank_that_holds_up_the_others_is_named_with_where_it_is(ranks, monkeypatch):
    seen, processes = ranks("answers", "answers")
    stacks = seen._stacks()
    assert set(stacks) == {0, 1}
    monkeypatch.setattr(seen, "_stacks", lambda: {0: WAITING, 1: stacks[1]})
    assert re.fullmatch(r"rank 1 is not done with it \(step 3 done, in lingers \(<string>:(9|10)\)\)", seen.finding())
    monkeypatch.setattr(seen, "_stacks", lambda: {0: WAITING, 1: WAITING})
    assert "all ranks wait for one another: rank 0 in all_reduce (step 3 done), rank 1 in" in seen.finding()
    processes[0].send_signal(signal.SIGSTOP)
    until_s = time.monotonic() + 10
    while not watch._is_stopped(processes[0].pid) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert seen.finding() == "rank 0 is stopped (step 3 done); `kill -CONT` lets it go on"


def test_a_rank_that_says_nothing_is_named_and_not_harmed(ranks, monkeypatch):
    monkeypatch.setattr(watch, "ANSWER_S", 0.5)
    seen, processes = ranks("answers", "silent")
    assert seen.finding() == "rank 1 is not responding (step 3 done)"
    assert processes[1].poll() is None


def test_a_rank_that_is_stopped_ends_the_run_within_the_time_out_by_its_name(tmp_path):
    """The second one stops itself; the first waits for it, as in a collective."""
    program = (
        "import os, signal, sys, time; from gsreal.run.progress import note_progress; note_progress('step 1 done')\n"
    )
    program += "print('gsreal: begun', flush=True); "
    ends = ("time.sleep(600)", "os.kill(os.getpid(), signal.SIGSTOP)")
    starts = [
        Start([sys.executable, "-c", program + end], {"RANK": str(rank)}, lambda: None) for rank, end in enumerate(ends)
    ]
    began_s = time.monotonic()
    with pytest.raises(RunFailedError) as told:
        run_ranks(starts, Guard(timeout_s=2.0))
    assert str(told.value) == (
        "no rank has made progress for 2 s (--timeout): rank 1 is stopped (step 1 done); `kill -CONT` lets it go on"
    )
    assert time.monotonic() - began_s < 300  # half of what the first rank waits


def test_idle_is_the_time_since_any_rank_has_come_further(tmp_path):
    seen = Watch({0: 1, 1: 2}, tmp_path)
    time.sleep(0.2)
    assert seen.idle_s() >= 0.2
    (tmp_path / "progress-1").write_text("step 1 done")
    assert seen.idle_s() < 0.2
