"""Gloo's threads stay on their rank's core, and its loops take it from nobody; see [Note: gloo's threads]."""

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


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return policy and cores of rank 0's threads, by name."""
    pinned = star(2).replace("{", "{cores_per_rank=1, ", 1)
    return run_module("loop_ranks", [scenario_file("demo.toml"), pinned], tmp_path_factory.mktemp("loops"), ranks=2)


def test_gloos_threads_stay_on_the_ranks_core_and_its_loops_take_it_from_nobody(found):
    settled, own = found["settled"], usable_cores()[:1]
    assert settled["main"] == [[os.SCHED_OTHER, own]]
    assert settled[LOOP] == [[os.SCHED_BATCH, own]] * 3, "of three groups; or gloo names its threads otherwise now"
    assert settled[WORKER] == [[os.SCHED_OTHER, own]] * len(settled[WORKER])
    assert len(settled[WORKER]) >= 3


def test_threads_of_a_process_that_is_not_settled_are_left_as_they_come(found):
    everywhere = [os.SCHED_OTHER, usable_cores()]
    threads = [thread for kind in found["unsettled"].values() for thread in kind]
    assert threads == [everywhere] * len(threads)
    assert len(found["unsettled"][LOOP]) == 2
