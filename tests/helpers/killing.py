"""Runs commands as forks of one process that has imported what they need, and ends them after so many seconds.

As a program, this file is that process: it reads a run a line, as JSON, and answers with the exit status and seconds
that it took. Starting Python takes longer than a small sweep or training, and there is nothing to see in it.
Ranks are forks too.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from contextlib import suppress
from pathlib import Path

LIMIT_S = 400
"""A command that takes longer hangs."""
HANGS = -99
"""Exit code that stands for a process that hangs."""


class Killer:
    """The process that runs commands, with a folder for temporary files of their own."""

    def __init__(self, temporary: Path, program: str = "gssim") -> None:
        self.marker = f"killed-{uuid.uuid4().hex}"
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, __file__, program],
            env={
                **os.environ,
                "TMPDIR": str(temporary),
                "MARKER": self.marker,
                "PYTHONPATH": paths,
                "KERNELS": f"{temporary}-kernels",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: object, after_s: float | None = None, number: int = signal.SIGKILL) -> tuple[int, float]:
        """Return how a command ends, and when; `after_s`: it is sent a signal then, if it still runs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        asked = {"words": [*map(str, words)], "folder": os.getcwd(), "after_s": after_s, "number": int(number)}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        code, took_s = json.loads(self.process.stdout.readline())
        return code, took_s

    def left(self) -> list[str]:
        """Return the processes that still run some seconds after a command has ended, beside this one."""
        until_s = time.monotonic() + 20
        while (found := marked(self.marker, {str(self.process.pid)})) and time.monotonic() < until_s:
            time.sleep(0.05)
        return found

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def marked(marker: str, but: set[str] = frozenset()) -> list[str]:
    """Return the ids of the processes that carry a marker in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or somebody else's
            if process.name not in but and marker.encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


NEEDED = {
    "gssim": ("polars",),
    "gsreal": ("gsreal.run.worker", "gsreal.models", "gsreal.run.launch", "gsreal.run.checkpoint"),
}


def serve(program: str) -> None:
    """Answer until nobody asks any more."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["KERNELS"]  # of this process; runs have their own
    for module in NEEDED[program]:
        importlib.import_module(module)
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    if program == "gsreal":
        import gsreal.run.launch

        gsreal.run.launch.Rank = ForkedRank
    main = importlib.import_module(f"{program}.cli").main
    tempfile.gettempdir()
    for line in sys.stdin:
        asked = json.loads(line)
        began_s = time.perf_counter()
        child = os.fork()
        if not child:
            os._exit(become(main, program, asked))
        if asked["after_s"] is not None:
            time.sleep(asked["after_s"])
            os.kill(child, asked["number"])  # it is not waited for yet, so that it is no other
        ended = Forked(child)
        while ended.poll() is None and time.perf_counter() - began_s < LIMIT_S:
            time.sleep(0.002)
        status = HANGS if ended.poll() is None else ended.returncode
        if status == HANGS:
            ended.kill()
            ended.wait()
        print(json.dumps([status, time.perf_counter() - began_s]), flush=True)


class Forked:
    """A fork, as `subprocess` shows its processes."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        """Return its exit code, once it has ended."""
        return self.wait(os.WNOHANG)

    def wait(self, how: int = 0) -> int | None:
        """Return its exit code when it has ended."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def kill(self) -> None:
        """Kill it."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedRank:
    """A rank of the launcher's that is forked."""

    def __init__(self, number, start, environment, log, guard) -> None:
        self.number, self.log = number, log
        from gsreal.run.signals import signals_deferred

        log.touch()
        with signals_deferred():
            child = os.fork()
            if not child:
                try:
                    become_rank(start, environment, log)
                except BaseException:
                    traceback.print_exc()
                os._exit(1)
        self.process = Forked(child)


def become_rank(start, environment, log) -> None:
    """Do in this process what the rank's command does; it ends by itself."""
    from gsreal.lab.network import enter
    from gsreal.machine import ENVIRONMENT

    for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)
    command = start.command
    start.before()
    if command[0] == "nsenter":  # of the lab
        enter(Path(command[1].removeprefix("--net=")))
        command = command[2:]
    os.setsid()
    os.environ.update({**ENVIRONMENT, **environment, **start.environment})
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(handle, descriptor)
    sys.argv = command[2:]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


def become(main, program, asked) -> int:
    """Do in this process what the command does; return its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["folder"])
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    sys.argv = [program, *asked["words"]]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    except KeyboardInterrupt:  # after all is done
        return 128 + signal.SIGINT
    except BaseException:
        Path(f"{os.environ['KERNELS']}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return 70
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
