"""Starts a rank in every device's namespace, and says which failed and why.

They find each other by `env://`: in namespaces, torchrun's agents wait for each other in vain when all is done
(measured with torch 2.13).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from gsreal.lab.interrupts import deferred, uninterrupted
from gsreal.lab.namespaces import FOLDER
from gsreal.lab.network import ADDRESS_DEVICE, Network
from gsreal.lab.processes import before_first
from gsreal.lab.throttle import Place, as_variable
from gsreal.launch import reason_of
from gsreal.machine import ENVIRONMENT
from gsreal.rank import LAUNCHER
from gssim.units import RunFailedError

PORT = 29500
"""Of the first rank's store: in its own namespace no port is taken."""
GRACE_S = 10.0
"""How long the other ranks get to end, and to report, after one has failed."""
LOOK_S = 0.05


class Rank:
    """A rank's process and what it says."""

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.number, self.log = number, log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                preexec_fn=before_first,
                start_new_session=True,
            )


def run_ranks(
    network: Network, places: Sequence[Place], module: str, arguments: Sequence[str], *, check: Callable[[], None]
) -> None:
    """Run `python -m module arguments...` on a rank in each place; raise RunFailedError where one of them fails.

    `check` is called now and then, to raise where what the ranks stand on has failed. No process outlives the call,
    whatever ends it.
    """
    with tempfile.TemporaryDirectory(prefix="gsreal-") as folder:
        reports, ranks = Path(folder), list[Rank]()
        try:
            for number, place in enumerate(places):
                command = rank_command(network, number, module, arguments)
                environment = {**os.environ, **ENVIRONMENT, **rank_environment(network, places, number)}
                environment |= {"GSREAL_REPORTS": folder, LAUNCHER: str(os.getpid()), **as_variable(place)}
                with deferred():
                    ranks.append(Rank(number, command, environment, reports / f"rank-{number}.log"))
            with ranks[0].log.open(encoding="utf-8", errors="replace") as progress:
                failed = _wait(ranks, progress, check)
        finally:
            with uninterrupted():
                _end(ranks)
        if failed:
            raise RunFailedError(_reason(reports, failed))


def rank_command(network: Network, number: int, module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a rank inside its namespace.

    `ip netns exec` would mount /sys anew and hide what is below it.
    """
    inside = f"--net={FOLDER / network.nodes[number].namespace}"
    return ["nsenter", inside, sys.executable, "-m", module, *arguments]


def rank_environment(network: Network, places: Sequence[Place], number: int) -> dict[str, str]:
    """Return what tells a rank who it is and where the others are."""
    first = network.nodes[0].address
    assert first is not None, "rank 0 runs on a device"
    return {
        "RANK": str(number),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": ADDRESS_DEVICE,
    }


def _wait(ranks: Sequence[Rank], progress: IO[str], check: Callable[[], None]) -> list[Rank]:
    """Wait until all ranks have ended, or some time after one has failed; return those that failed.

    The time is for the others, to report why they fail then. Rank 0's progress is passed on meanwhile.
    """
    until_s = float("inf")
    while time.monotonic() < until_s:
        codes = [rank.process.poll() for rank in ranks]
        _pass_on(progress)
        if None not in codes:
            break
        check()
        if any(codes):
            until_s = min(until_s, time.monotonic() + GRACE_S)
        time.sleep(LOOK_S)
    return [rank for rank in ranks if rank.process.returncode]


def _reason(reports: Path, failed: Sequence[Rank]) -> str:
    """Return why ranks failed: what one reported, or how one died that had no time to."""
    dead = min(failed, key=lambda rank: (Path(reports, f"rank-{rank.number}.json").exists(), rank.number))
    log = dead.log.read_text(encoding="utf-8", errors="replace")
    return str(reason_of(reports, (dead.number, dead.process.returncode), log))


def _pass_on(log: IO[str]) -> None:
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
