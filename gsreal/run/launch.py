"""Launcher of a real run: starts the ranks, watches them, and reports which rank failed and why.

Ranks find each other by a file in a folder that only this user can read: torchrun's store would listen on every address
of the machine, and answer anyone. gloo and NCCL listen on the loopback interface, or on the one that is named.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gsreal.machine import ENVIRONMENT
from gsreal.run.forked import Forked, module_run
from gsreal.run.progress import DEFAULT_TIMEOUT_S, REPORTS, Watch
from gsreal.run.rank import LAUNCHER, STORE, TIMEOUT
from gsreal.run.signals import signals_deferred, signals_ignored
from gssim.errors import RunFailedError, UserError
from gssim.execution.files import scratch_folder
from gssim.execution.parent import die_with_parent

GRACE_S = 10.0
"""Time that the other ranks get to end, and to report, after one has failed."""
LOOK_S = 0.05
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with the interface on which backends listen."""


@dataclass(frozen=True)
class Guard:
    """Settings of a launch beside its command: timeout, network interface and locks."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """Time without progress of any rank after which the run is ended."""
    interface: str | None = None
    """Network interface on which backends listen; None: the loopback."""
    locks: tuple[int, ...] = ()
    """File descriptors of locks that ranks inherit, so that these stay locked if only the launcher is killed."""


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    max_restarts: int = 0,
    guard: Guard | None = None,
    forked: bool = False,
) -> None:
    """Run `python -m module arguments...` on `ranks` ranks; raise RunFailedError if one of them fails.

    Up to `max_restarts` times, all of them are restarted instead. No process outlives the call, however it ends.
    `forked`: ranks are forks of this process (see gsreal/run/forked.py), and their progress is not printed.
    """
    guard = guard or Guard()
    for attempt in range(max_restarts + 1):
        starts = []
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            environment = {**listening_on(guard.interface), **{name: str(value) for name, value in own.items()}}
            command = [module, *arguments] if forked else [sys.executable, "-m", module, *arguments]
            starts.append(Start(command, environment, die_with_parent, forked))
        try:
            run_ranks(starts, guard)
            return
        except RunFailedError as error:
            if attempt == max_restarts:
                raise
            print(f"gsreal: {error}; all ranks are started again", file=sys.stderr, flush=True)


def listening_on(interface: str | None) -> dict[str, str]:
    """Return the environment that makes backends listen on one network interface.

    None: the loopback, or the user's choice.

    Raises UserError if there is no such interface.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface is not None and interface not in names:
        raise UserError(f"--interface {interface}: this machine has {', '.join(names)}")
    loopback = next((name for name in names if name in ("lo", "lo0")), None)
    if interface is None and loopback is None:
        return {}
    return {name: interface or os.environ.get(name) or str(loopback) for name in INTERFACES}


@dataclass(frozen=True)
class Start:
    """Command of a rank."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """Variables in addition to those common to all ranks."""
    before: Callable[[], None]
    """Called in the new process before it executes the command."""
    forked: bool = False
    """The command is a module and its arguments, which a fork of this process runs."""


class Rank:
    """A rank's process and its log."""

    def __init__(self, number: int, start: Start, environment: Mapping[str, str], log: Path, guard: Guard) -> None:
        self.number, self.log = number, log
        more = {**environment, **start.environment}
        self.process: Forked | subprocess.Popen[bytes]
        if start.forked:
            with signals_deferred():
                self.process = Forked(module_run(start.command[0], start.command[1:], more), log)
            return
        with log.open("wb") as stream, signals_deferred():
            self.process = subprocess.Popen(
                start.command,
                env={**os.environ, **ENVIRONMENT, **more},
                stdin=subprocess.DEVNULL,
                stdout=stream,  # a user's module may print; our stdout is for the Result alone
                stderr=subprocess.STDOUT,
                preexec_fn=start.before,
                pass_fds=guard.locks,
                start_new_session=True,
            )


def run_ranks(
    starts: Sequence[Start],
    guard: Guard,
    *,
    check: Callable[[], None] = lambda: None,
    explain: Callable[[], str | None] = lambda: None,
) -> None:
    """Run ranks to their end; raise RunFailedError if one of them fails, or none makes progress within the timeout.

    `check` is called periodically, to raise if the ranks' environment has failed; `explain` returns why ranks wait for
    one another, if known. No process outlives the call, however it ends.
    """
    with scratch_folder("gsreal-run-") as reports:
        ranks: list[Rank] = []
        environment = {REPORTS: str(reports), STORE: str(reports / "store"), LAUNCHER: str(os.getpid())}
        environment[TIMEOUT] = str(guard.timeout_s)
        try:
            for number, start in enumerate(starts):
                ranks.append(Rank(number, start, environment, reports / f"rank-{number}.log", guard))
            with ranks[0].log.open(encoding="utf-8", errors="replace") as progress:
                failed = _wait(ranks, reports, None if starts[0].forked else progress, guard.timeout_s, check, explain)
        finally:
            with signals_ignored():
                for rank in ranks:
                    with suppress(ProcessLookupError):
                        rank.process.kill()
                for rank in ranks:
                    rank.process.wait()
        if failed:
            # the exit of a rank that died without a report says more than reports of lost connections
            dead = min(failed, key=lambda rank: (Path(reports, f"rank-{rank.number}.json").exists(), rank.number))
            log = dead.log.read_text(encoding="utf-8", errors="replace")
            code = dead.process.returncode
            assert code is not None, "it has ended: it failed"
            raise RunFailedError(str(reason_of(reports, (dead.number, code), log)))


def _wait(
    ranks: Sequence[Rank],
    reports: Path,
    progress: IO[str] | None,
    timeout_s: float,
    check: Callable[[], None],
    explain: Callable[[], str | None],
) -> list[Rank]:
    """Wait until all ranks have ended, or for a grace time after one has failed; return those that failed.

    The grace time lets the others report their reasons. Rank 0's progress, if given, is passed on meanwhile.
    """
    watch = Watch({rank.number: rank.process.pid for rank in ranks}, reports)
    until_s = float("inf")
    while time.monotonic() < until_s:
        codes = [rank.process.poll() for rank in ranks]
        if progress is not None:
            for line in progress:  # other lines stay in the log for the reason of a failure
                if line.startswith("gsreal:"):
                    sys.stderr.write(line)
                    sys.stderr.flush()
        if None not in codes:
            break
        check()
        if any(codes):
            until_s = min(until_s, time.monotonic() + GRACE_S)
        elif watch.idle_s() > timeout_s:
            diagnosis = watch.finding()
            why = explain() if "wait for one another" in diagnosis else None
            raise RunFailedError(f"no rank has made progress for {timeout_s:g} s (--timeout): {why or diagnosis}")
        time.sleep(LOOK_S)
    return [rank for rank in ranks if rank.process.returncode]


def reason_of(reports: Path, dead: tuple[int, int] | None, log: str) -> str | None:
    """Return why a run failed, from the ranks' reports, or from (rank, exit code) of one that died; None if unknown.

    `log`: output of that rank. Raises UserError if a rank reported a user error.
    """
    reports_read = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(reports.glob("rank-*.json"))]
    if reports_read:
        # a rank that loses its peer fails too: a user's fault comes first, then failures that are no lost connections
        reports_read.sort(
            key=lambda report: (report["kind"] != "user", "onnection" in report["message"], report["rank"])
        )
        first = reports_read[0]
        if first["kind"] == "user":
            raise UserError(first["message"])
        if "onnection" not in first["message"] or dead is None:
            return f"rank {first['rank']} failed: {' '.join(first['message'].split())[:500]}"
    if dead is None:
        return None
    rank, exit_code = dead
    cause = f"exit code {exit_code}"
    if exit_code < 0:
        try:
            cause = signal.Signals(-exit_code).name
        except ValueError:  # of the real-time signals only the first and the last have a name
            cause = f"signal {-exit_code}"
    words = re.compile(r"terminate called|what\(\):|Fatal Python error|malloc\(\)|free\(\)|double free|corrupt")
    reasons = "; ".join(line.strip() for line in log.splitlines() if words.search(line))[:500]
    return f"rank {rank} died ({cause}{f': {reasons}' if reasons else ''})"
