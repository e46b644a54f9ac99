"""Real: gloo's threads stay on their rank's core, and its loops take it from nobody; see [Note: gloo's threads]."""

import os
import platform

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from real_runs import run_module, scenario_file, star

from gsreal.machine import LOOP, WORKER, usable_cores

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(platform.system() != "Linux", reason="only Linux has SCHED_BATCH, and threads' names"),
]


def test_gloos_threads_stay_on_the_ranks_core_and_its_loops_take_it_from_nobody(tmp_path):
    pinned = star(2).replace("{", "{cores_per_rank=1, ", 1)
    found = run_module("loop_ranks", [scenario_file("demo.toml"), pinned], tmp_path, ranks=2)
    own = usable_cores()[:1]
    assert found["main"] == [[os.SCHED_OTHER, own]]
    assert found[LOOP] == [[os.SCHED_BATCH, own]] * 2, "of two groups; or gloo names its threads otherwise now"
    assert found[WORKER] == [[os.SCHED_OTHER, own]] * len(found[WORKER])
    assert len(found[WORKER]) >= 2
