"""Starts the ranks of a real run with torchrun, and says which rank failed and why."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from gsreal.machine import ENVIRONMENT, die_with_parent
from gsreal.rank import LAUNCHER
from gssim.units import RunFailedError, UserError

GRACE_S = 15.0
"""How long ranks get to end after an interrupt, before they are killed."""


def launch(module: str, arguments: Sequence[str], *, ranks: int, max_restarts: int = 0) -> None:
    """Run `python -m module arguments...` on `ranks` ranks; raise RunFailedError where one of them fails.

    Up to `max_restarts` times, all of them are started again instead. No process outlives the call, whatever ends it.
    """
    with tempfile.TemporaryDirectory(prefix="gsreal-") as reports:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        command += ["--max-restarts", str(max_restarts), "-m", module, *arguments]
        environment = {**os.environ, **ENVIRONMENT, LAUNCHER: str(os.getpid()), "GSREAL_REPORTS": reports}
        log = Path(reports, "torchrun.log")
        with log.open("w") as stream:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,  # a user's module may print; our stdout is for the Result alone
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
                start_new_session=True,
            )
            try:
                _pass_on(process, stream)
                code = process.wait()
            except BaseException:
                _end(process)
                raise
            finally:
                assert process.stdout is not None
                process.stdout.close()
        if code:
            raise RunFailedError(_reason(Path(reports), log.read_text(encoding="utf-8"), code))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pass_on(process: "subprocess.Popen[bytes]", log: IO[str]) -> None:
    """Show our own lines of progress; keep all else for the reason of a failure."""
    assert process.stdout is not None
    for raw in process.stdout:
        line = raw.decode(errors="replace")
        if line.startswith("gsreal:"):
            sys.stderr.write(line)
            sys.stderr.flush()
        log.write(line)
    log.flush()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop torchrun, which stops its ranks; kill them all where it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # ranks die with their parent
        process.wait()


def _reason(reports: Path, log: str, code: int) -> str:
    """Return the first failure that a rank reported; without a report, what torchrun says of the rank that died."""
    dead = _dead_rank(log)
    said = reason_of(reports, dead, log)
    if said is not None:
        return said
    last = [line for line in log.splitlines() if line.strip()]
    return f"torchrun failed (exit code {code}): {last[-1] if last else 'no output'}"


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


def _dead_rank(log: str) -> tuple[int, int] | None:
    """Return (rank, exit code) of the rank that took the others with it, if torchrun names one.

    That is one that a signal ended (torchrun ends the others by SIGTERM), else torchrun's root cause: it looks at all
    ranks now and then, and of those that ended meanwhile takes the first by number.
    """
    pairs = re.findall(r"^ *rank +: (\d+)[^\n]*\n *exitcode +: (-?\d+)", log, re.MULTILINE)
    failures = [(int(rank), int(code)) for rank, code in pairs]
    killed = [failure for failure in failures if failure[1] < 0 and failure[1] != -signal.SIGTERM]
    return next(iter(killed or failures[-1:]), None)
