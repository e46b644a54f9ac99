"""Real: gloo's threads that read and write sockets take the core from nobody; see [Note: gloo's loops]."""

import os
import platform

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from real_runs import run_module, scenario_file, star

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(platform.system() != "Linux", reason="only Linux has SCHED_BATCH, and threads' names"),
]


def test_the_loops_of_every_group_and_no_other_thread_wait_for_those_that_run(tmp_path):
    found = run_module("loop_ranks", [scenario_file("demo.toml"), star(2)], tmp_path, ranks=2)
    assert found.pop("gloo_tcp_loop") == [os.SCHED_BATCH] * 2, "gloo names its threads otherwise: gsreal.machine.LOOP"
    assert {policy for policies in found.values() for policy in policies} == {os.SCHED_OTHER}
