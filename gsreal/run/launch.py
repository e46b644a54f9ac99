"""Starts the ranks of a real run, watches them, and says which rank failed and why.

Ranks find each other by a file in a folder that only this user can read: torchrun's store would listen on every address
of the machine, and answer whoever asks. gloo and NCCL listen on the loopback interface, or on one that is named.

Signals that end a lab: its network is taken down first, and that is not interrupted.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gsreal.machine import ENVIRONMENT, die_with_parent
from gsreal.run.progress import DEFAULT_TIMEOUT_S, REPORTS, Watch
from gsreal.run.rank import LAUNCHER, STORE, TIMEOUT
from gssim.errors import RunFailedError, UserError
from gssim.files import scratch_folder
from gssim.terminal import ENDING


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore those signals and the user's interrupt meanwhile."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (*ENDING, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Let those signals and the user's interrupt wait meanwhile.

    Raised in what Python calls around a fork, where it can but say that it ignores them, they would be lost.
    """
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda each, frame: noted.append(each)) for number in (*ENDING, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            signal.raise_signal(noted[0])


GRACE_S = 10.0
"""How long the other ranks get to end, and to report, after one has failed."""
LOOK_S = 0.05
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that say where backends listen."""


@dataclass(frozen=True)
class Guard:
    """What ends a run that hangs, where its ranks listen, and what they keep others from."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """For how long no rank may have finished a step."""
    interface: str | None = None
    """Of the network, on which backends listen; None: the loopback's."""
    locks: tuple[int, ...] = ()
    """Handles of locks that ranks hold too: a launcher that is killed leaves none open while a rank still writes."""


def launch(
    module: str, arguments: Sequence[str], *, ranks: int, max_restarts: int = 0, guard: Guard | None = None
) -> None:
    """Run `python -m module arguments...` on `ranks` ranks; raise RunFailedError where one of them fails.

    Up to `max_restarts` times, all of them are started again instead. No process outlives the call, whatever ends it.
    """
    guard = guard or Guard()
    for attempt in range(max_restarts + 1):
        starts = []
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            environment = {**listening_on(guard.interface), **{name: str(value) for name, value in own.items()}}
            starts.append(Start([sys.executable, "-m", module, *arguments], environment, die_with_parent))
        try:
            run_ranks(starts, guard)
            return
        except RunFailedError as error:
            if attempt == max_restarts:
                raise
            print(f"gsreal: {error}; all ranks are started again", file=sys.stderr, flush=True)


def listening_on(interface: str | None) -> dict[str, str]:
    """Return what lets backends listen on a network interface alone; None: on the loopback, or where the user says.

    Raises UserError where there is no such interface.
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
    """How a rank is started."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """Beside what all ranks have."""
    before: Callable[[], None]
    """Called in the new process before it becomes the command."""


class Rank:
    """A rank's process and what it says."""

    def __init__(self, number: int, start: Start, environment: Mapping[str, str], log: Path, guard: Guard) -> None:
        self.number, self.log = number, log
        with log.open("wb") as stream, deferred():
            self.process = subprocess.Popen(
                start.command,
                env={**os.environ, **ENVIRONMENT, **environment, **start.environment},
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
    """Run ranks to their end; raise RunFailedError where one of them fails, or none comes any further in time.

    `check` is called now and then, to raise where what the ranks stand on has failed; `explain` says why ranks wait for
    one another, if it knows. No process outlives the call, whatever ends it.
    """
    with scratch_folder("gsreal-run-") as reports:
        ranks: list[Rank] = []
        told = {REPORTS: str(reports), STORE: str(reports / "store"), LAUNCHER: str(os.getpid())}
        told[TIMEOUT] = str(guard.timeout_s)
        try:
            for number, start in enumerate(starts):
                ranks.append(Rank(number, start, told, reports / f"rank-{number}.log", guard))
            with ranks[0].log.open(encoding="utf-8", errors="replace") as progress:
                failed = _wait(ranks, reports, progress, guard.timeout_s, check, explain)
        finally:
            with uninterrupted():
                _end(ranks)
        if failed:
            raise RunFailedError(_reason(reports, failed))


def _wait(
    ranks: Sequence[Rank],
    reports: Path,
    progress: IO[str],
    timeout_s: float,
    check: Callable[[], None],
    explain: Callable[[], str | None],
) -> list[Rank]:
    """Wait until all ranks have ended, or some time after one has failed; return those that failed.

    The time is for the others, to report why they fail then. Rank 0's progress is passed on meanwhile.
    """
    watch = Watch({rank.number: rank.process.pid for rank in ranks}, reports)
    until_s = float("inf")
    while time.monotonic() < until_s:
        codes = [rank.process.poll() for rank in ranks]
        _pass_on(progress)
        if None not in codes:
            break
        check()
        if any(codes):
            until_s = min(until_s, time.monotonic() + GRACE_S)
        elif watch.idle_s() > timeout_s:
            found = watch.finding()
            why = explain() if "wait for one another" in found else None
            raise RunFailedError(f"no rank has come any further for {timeout_s:g} s (--timeout): {why or found}")
        time.sleep(LOOK_S)
    return [rank for rank in ranks if rank.process.returncode]


def _pass_on(log: IO[str]) -> None:
    """Show our own lines of progress; all else is kept for the reason of a failure."""
    for line in log:
        if line.startswith("gsreal:"):
            sys.stderr.write(line)
            sys.stderr.flush()


def _end(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()


def _reason(reports: Path, failed: Sequence[Rank]) -> str:
    """Return why ranks failed: what one reported, or how one died that had no time to."""
    dead = min(failed, key=lambda rank: (Path(reports, f"rank-{rank.number}.json").exists(), rank.number))
    log = dead.log.read_text(encoding="utf-8", errors="replace")
    return str(reason_of(reports, (dead.number, dead.process.returncode), log))


def reason_of(reports: Path, dead: tuple[int, int] | None, log: str) -> str | None:
    """Return why a run failed, from what ranks reported, or from (rank, exit code) of one that died; None if unknown.

    `log`: what that rank said. Raises UserError where a rank reported a fault of the user's.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(reports.glob("rank-*.json"))]
    if found:
        # a rank that loses its peer fails too: a user's fault, or anything else than a lost connection, comes first
        found.sort(key=lambda report: (report["kind"] != "user", "onnection" in report["message"], report["rank"]))
        first = found[0]
        if first["kind"] == "user":
            raise UserError(first["message"])
        if "onnection" not in first["message"] or dead is None:
            return f"rank {first['rank']} failed: {' '.join(first['message'].split())[:500]}"
    if dead is None:
        return None
    rank, exit_code = dead
    cause = _signal(-exit_code) if exit_code < 0 else f"exit code {exit_code}"
    said = _last_words(log)
    return f"rank {rank} died ({cause}{f': {said}' if said else ''})"


def _signal(number: int) -> str:
    """Return a signal's name; of the real-time ones only the first and the last have one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(log: str) -> str:
    """Return what C++ or Python's interpreter said as it gave up, or nothing: a signal alone tells nobody why."""
    words = re.compile(r"terminate called|what\(\):|Fatal Python error|malloc\(\)|free\(\)|double free|corrupt")
    return "; ".join(line.strip() for line in log.splitlines() if words.search(line))[:500]
