"""Progress files of a run's ranks, and diagnosis of the rank that blocks the others.

A rank overwrites a file of its own after each step. If none of them has been written for the timeout, the launcher
asks the kernel which rank is stopped, and each rank for its stack: `faulthandler` writes the stack of its main thread
on a signal, also while it waits in C++.
"""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

REPORTS = "GSREAL_REPORTS"
"""Environment variable with the folder of a rank's reports to the launcher."""
DEFAULT_TIMEOUT_S = 600.0
ANSWER_S = 3.0
"""Time that ranks get to write their stacks."""
WAITS = re.compile(
    r'File "[^"]*[/\\](torch[/\\]distributed|gsreal[/\\]gradient_sharding[/\\]point_to_point|concurrent)[^"]*", '
    r"line \d+ in (\w+)"
)
"""A stack line of a rank that waits for others."""


def note_progress(done: str) -> None:
    """Record this rank's progress; does nothing without a launcher."""
    handle = _progress_file()
    if handle is not None:
        os.pwrite(handle, done.ljust(80)[:80].encode(errors="replace"), 0)


@cache
def _progress_file() -> int | None:
    folder = os.environ.get(REPORTS)
    if not folder:
        return None
    with suppress(OSError):
        return os.open(Path(folder, f"progress-{_rank()}"), os.O_WRONLY | os.O_CREAT, 0o600)
    return None


def install_stack_dump() -> None:
    """Install the handler that writes the stack of this rank's main thread on the launcher's signal."""
    folder = os.environ.get(REPORTS)
    if folder and hasattr(faulthandler, "register"):
        stream = Path(folder, f"stack-{_rank()}").open("w", encoding="utf-8")  # noqa: SIM115 (open as long as the rank)
        faulthandler.register(signal.SIGUSR1, file=stream, all_threads=False)


def _rank() -> str:
    return os.environ.get("RANK", "0")


class Watch:
    """The launcher's view of the ranks' progress, by process id."""

    def __init__(self, processes: Mapping[int, int], reports: Path) -> None:
        self.processes, self.reports = processes, reports
        self._seen: dict[int, int] = {}
        self._since_s = time.monotonic()

    def idle_s(self) -> float:
        """Return the time since any rank last made progress."""
        now = {}
        for rank in self.processes:
            with suppress(OSError):
                now[rank] = (self.reports / f"progress-{rank}").stat().st_mtime_ns
        if now != self._seen:
            self._seen, self._since_s = now, time.monotonic()
        return time.monotonic() - self._since_s

    def finding(self) -> str:
        """Return a text that names the rank which blocks the others, and its position, as far as known."""
        stopped = [rank for rank, process in self.processes.items() if _is_stopped(process)]
        if stopped:
            return f"{_ranks(stopped)} stopped ({self._done(stopped[0])}); `kill -CONT` lets it go on"
        stacks = self._stacks()
        silent = [rank for rank in self.processes if rank not in stacks]
        if silent:
            return f"{_ranks(silent)} not responding ({self._done(silent[0])})"
        waiting = {rank: match[2] for rank, stack in stacks.items() if (match := WAITS.search(stack))}
        busy = [rank for rank in stacks if rank not in waiting]
        if busy:
            places = re.findall(r'File "([^"]*)", line (\d+) in (\w+)', stacks[busy[0]])
            where = f", in {places[0][2]} ({os.path.basename(places[0][0])}:{places[0][1]})" if places else ""
            return f"{_ranks(busy)} not done with it ({self._done(busy[0])}{where})"
        waits = ", ".join(f"rank {rank} in {where} ({self._done(rank)})" for rank, where in sorted(waiting.items())[:4])
        return f"all ranks wait for one another: {waits}; is a link between them down?"

    def _done(self, rank: int) -> str:
        """Return a rank's progress as text."""
        with suppress(OSError):
            return (self.reports / f"progress-{rank}").read_text(encoding="utf-8").strip() or "it has not started"
        return "it has not started"

    def _stacks(self) -> dict[int, str]:
        """Return the stacks of the ranks that respond."""
        files = {rank: self.reports / f"stack-{rank}" for rank in self.processes}
        for rank, process in self.processes.items():
            if files[rank].exists():  # others would die of the signal
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGUSR1)
        until_s = time.monotonic() + ANSWER_S
        stacks: dict[int, str] = {}
        while len(stacks) < len(files) and time.monotonic() < until_s:
            time.sleep(0.1)
            stacks = {rank: text for rank, file in files.items() if (text := _text(file))}
        return stacks


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def _is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger; False if the kernel does not say."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    return False


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"
