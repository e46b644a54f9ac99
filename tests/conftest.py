"""Fixtures and settings of all tests. Hypothesis draws the same examples on every machine, and has no deadline."""

import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import forks
import pytest
from examples import examples
from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    max_examples=examples(50),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# tests run side by side, and models are small: torch's second thread would only wait for the first
os.environ.setdefault("OMP_NUM_THREADS", "1")

# ranks inherit it: one that is preempted by the rank that it wakes holds a lock which its own gloo thread tries again
# and again on the other core (see gsreal/machine.py)
with suppress(AttributeError, OSError):  # only Linux has it, and a sandbox may not
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# tests make modules of their own files; the command line takes this back for each of its commands
os.environ["GSREAL_TRUST_CODE"] = "1"

# a shell that starts tests in the background lets them, and what they start, ignore interrupts; some tests send them
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# a test process holds a million objects (torch, the tests); looking through them all for cycles again and again took a
# quarter of its time. Most files stay below this number of new objects, which are looked through once, at their end
gc.set_threshold(2**21, 20, 100)


def pytest_collection_modifyitems(items):
    """Spread the files of real runs over the first four fifths of all, but for the very first; the laws are last.

    Of two processes that share the files, then mostly one has ranks on the cores. A run of all ends with short files,
    which those of laws are, and not with the longest of torch's oracles. When the first real run begins, the process
    that its ranks are forked from has imported torch.
    """
    files = dict.fromkeys(item.path for item in items)
    place = {}
    for is_real, since, until in ((True, 0.04, 0.8), (False, 0.0, 1.0)):
        kind = [path for path in files if (path.parent.name == "real") == is_real]
        kind.sort(key=lambda path: path.parent.name == "laws")
        place |= {path: since + (until - since) * i / len(kind) for i, path in enumerate(kind)}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish(session):
    """Begin to import what ranks need, where there are many; exempt what lives as long as the process from collection.

    Only one of the processes that run tests side by side starts the process that imports.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0" and any(
        item.get_closest_marker("real") for item in session.items
    ):
        with suppress(ModuleNotFoundError):  # without torch these tests skip
            forks.start_server()
    gc.freeze()  # without a collection, which takes most of a second for few objects


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Exempt what a file's tests leave (caches) too: each full collection of the next ones took a second for it."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _shared_folder(tmp_path_factory):
    """Name the folder in which processes that run tests side by side find what one of them has measured."""
    own = tmp_path_factory.getbasetemp()
    os.environ["GSREAL_TESTS_SHARED"] = str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(autouse=True)
def _trusted_code():
    """Trust the factories of tests again, where a command of an earlier test did not."""
    os.environ["GSREAL_TRUST_CODE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _no_activity():
    """Let commands that run in this process say nothing of how long they take: tests compare all that they say."""
    from gssim import terminal  # not before the number of threads is set

    terminal.SILENT_S = 1e6


@pytest.fixture
def in_the_repository(monkeypatch):
    """Make the repository's root the working directory, so that a test's paths may begin there."""
    monkeypatch.chdir(Path(__file__).resolve().parents[1])


@pytest.fixture
def gssim(monkeypatch, capsys):
    """Return a function that runs the command line in this process: (exit code, stdout, stderr)."""
    from gssim.cli import commands as cli  # not before the number of threads is set

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gssim", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run
