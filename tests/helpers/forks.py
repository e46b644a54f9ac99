"""Starts the ranks of tests as forks of one process that has imported torch: importing takes longer than most steps.

`launch` does what `gsreal.run.launch.launch` does, but for restarts and time-outs: nobody watches the ranks but this
process. `run_commands` runs whole command lines of gsreal as forks, side by side; ranks that its launcher starts are
forks too.

Run as a program, this file is the process that is forked. There is one for all processes that run tests side by side;
it ends with the process that started them. Each of these has a fork of it for itself, which reads one run a line, as
JSON, and answers with the rank that failed first and its exit code, or with null. It reads commands in the same way,
and answers with their exit codes.
"""

import atexit
import ctypes
import gc
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from killing import ForkedRank

IMPORTS = (
    *("gsreal.cli", "gsreal.run.launch", "gsreal.run.worker", "gsreal.run.checkpoint"),
    *("gsreal.models", "gsreal.statistics.collect", "torch.profiler", "torch._dynamo"),
    *("torch._functorch.partitioners", "torch._inductor.pattern_matcher"),  # of torch.compile, whatever its backend
    *("torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.parallel", "sklearn.model_selection", "sklearn.datasets"),
    *("transformers.models.auto.auto_factory", "transformers.models.llama.modeling_llama"),
    *(f"transformers.models.{each}.modeling_{each}" for each in ("bert", "gpt2", "mixtral", "qwen3", "qwen3_moe")),
    *(f"transformers.models.{each}.modeling_{each}" for each in ("distilbert", "falcon", "gptj", "olmo2", "resnet")),
)
"""Modules that ranks import at their start or first step, and others that take seconds to import."""
GRACE_S = 1.0
"""Time for ranks whose peer failed to report their own failure before they are ended."""


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    max_restarts: int = 0,
    guard: Any = None,
    forked: bool = False,
) -> None:
    """Run `python -m module arguments...` on `ranks` ranks; raise RunFailedError where one of them fails.

    The options are those of gsreal's own launcher; ranks are forks whether or not they are `forked`.
    """
    assert not max_restarts, "only gsreal's own launcher restarts ranks"
    from gsreal.machine import ENVIRONMENT
    from gsreal.run.launch import reason_of
    from gssim.errors import RunFailedError
    from gssim.execution.files import scratch_folder

    parent = forked_from()
    with scratch_folder("gsreal-") as reports:  # held: an empty one would be taken for what a killed process left
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GSREAL_REPORTS": str(reports)}
        run = {"module": module, "arguments": [*arguments], "ranks": ranks, "folder": os.getcwd()}
        run["environment"] = {**os.environ, **ENVIRONMENT, **meeting}
        try:
            answer = parent.answer(run)
        except BaseException:
            parent.end()
            raise
        if not answer:
            parent.end()
            raise RunFailedError("the process that ranks are forked from has died")
        dead = json.loads(answer)
        if dead is not None:
            log = Path(reports, f"log-{dead[0]}.txt").read_text(encoding="utf-8", errors="replace")
            raise RunFailedError(f"{reason_of(Path(reports), tuple(dead), log)}\n{log}")


@dataclass(frozen=True)
class Command:
    """A command line of gsreal."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to this process's."""
    network: str | None = None
    """File of the network namespace in which it runs."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Values of modules' constants (`module.NAME`) that are replaced in it."""
    terminated_at: str | None = None
    """Text on stderr after which it is asked to end."""
    times: int = 1
    """How often that text must have appeared."""
    slow_ranks_forked: bool = False
    """Whether ranks that are slowed down by LD_PRELOAD are forks too: the process that is forked has loaded it."""
    ended_by: int = signal.SIGTERM
    """Signal that asks it to end."""


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a finished command."""

    returncode: int
    stdout: str
    stderr: str


LOADED = os.environ.get("LD_PRELOAD")
"""LD_PRELOAD with which this process was started."""
LIMIT_S = 120
"""Commands that take longer hang, and are killed."""
CLONE_NEWNET = 0x40000000


def run_commands(*asked: Command) -> list[Ended]:
    """Run command lines at the same time, in this folder; return what each left, once no process of theirs runs."""
    from gsreal.machine import ENVIRONMENT
    from gssim.execution.files import scratch_folder

    parent = forked_from()
    base = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | ENVIRONMENT
    with scratch_folder("gsreal-") as output:
        lines = [asdict(each) | {"environment": base | {**each.environment}} for each in asked]
        asked_for = {"commands": lines, "folder": os.getcwd(), "output": str(output)}
        codes, running = json.loads(parent.answer(asked_for))
        assert running == [], "processes of these command lines still run"
        texts = [[Path(output, f"{name}-{i}.txt").read_text() for name in ("out", "err")] for i in range(len(asked))]
    return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Parent:
    """The fork from which this process's ranks are forked."""

    def __init__(self, connection: socket.socket) -> None:
        self.requests, self.answers = connection.makefile("w"), connection.makefile("r")
        connection.close()  # the files hold it
        self.pid = int(self.answers.readline())

    def answer(self, asked: Mapping[str, Any]) -> str:
        """Return the line that is answered; an empty one where the process has died."""
        self.requests.write(json.dumps(asked) + "\n")
        self.requests.flush()
        return self.answers.readline()

    def end(self) -> None:
        """End it; ranks that still run die with it."""
        forked_from.cache_clear()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for stream in (self.requests, self.answers):
            with suppress(OSError):  # what was not sent is lost
                stream.close()


SERVERS: list["subprocess.Popen[bytes]"] = []
"""Processes that this process started; held, so that nothing warns of one that still runs."""
ALONE = uuid.uuid4().hex
"""Name of this run of tests where it has no other processes."""
PATIENCE_S = 120


def run_of_tests() -> tuple[str, int]:
    """Return the address of the process that ranks are forked from, and the process whose end is its end.

    Processes that run tests side by side share one, which ends with their parent.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", ALONE)
    return f"\0gsreal-forks-{run}", os.getpid() if run == ALONE else os.getppid()


def start_server() -> None:
    """Start the process that has imported torch, which takes it seconds.

    If several are started, those that find the socket bound end at once.
    """
    from gsreal.lab.throttle import throttle_library
    from gsreal.machine import ENVIRONMENT
    from gssim.errors import UserError

    address, owner = run_of_tests()
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    with suppress(UserError):
        if (throttle := throttle_library()) is not None:  # does nothing until a rank asks it
            environment["LD_PRELOAD"] = str(throttle)
    line, nothing = [sys.executable, __file__, address[1:], str(owner)], subprocess.DEVNULL
    SERVERS.append(subprocess.Popen(line, env=environment, stdin=nothing, stdout=nothing, start_new_session=True))


@cache
def forked_from() -> Parent:
    """Return the fork that this process's ranks are forked from.

    The process that has imported torch is started by whoever needs it first, unless it was before (`start_server`).
    """
    address, _ = run_of_tests()
    until_s = time.monotonic() + PATIENCE_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            parent = Parent(connection)
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > until_s:
                raise
        else:
            atexit.register(parent.end)
            return parent
        if all(server.poll() is not None for server in SERVERS):
            start_server()
        time.sleep(0.05)


def serve(name: str, owner: int) -> None:
    """Fork a process for each that connects, until the process that owns the run of tests has ended."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(f"\0{name}")
    except OSError:  # there is one
        return
    listening.listen()
    gc.disable()  # nearly all that modules make stays: collections took a seventh of the time
    for module in IMPORTS:
        with suppress(ModuleNotFoundError):  # tests that need it skip
            import_module(module)
    read_common_files()
    from gssim.execution.parent import die_with_parent

    gc.collect()
    gc.enable()
    gc.freeze()  # a collection in a rank must not copy all that is shared with this process
    while Path(f"/proc/{owner}").exists():
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not select.select([listening], [], [], 1.0)[0]:
            continue
        connection, _ = listening.accept()
        if not os.fork():
            die_with_parent()
            os.setsid()
            listening.close()
            for descriptor in (0, 1):
                os.dup2(connection.fileno(), descriptor)
            connection.close()
            answer_all()
            os._exit(0)
        connection.close()


def read_common_files() -> None:
    """Read the data and the model that most ranks use: every fork finds them in memory."""
    from gssim.scenario import load_scenario

    load_scenario(Path(__file__).parents[2] / "scenarios/demo.toml", gradients_needed=False)
    with suppress(ModuleNotFoundError):  # tests that need it skip
        from gsreal.data.bundled import digits_parts, standard_library_bytes

        standard_library_bytes()
        digits_parts()


def answer_all() -> None:
    """Answer runs and commands until nobody asks any more."""
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        if "commands" in run:
            print(json.dumps(codes_of(run)), flush=True)
            continue
        load_cases(run)
        started = {start(run, rank): rank for rank in range(run["ranks"])}
        print(json.dumps(first_failure(started)), flush=True)


def load_cases(run: dict[str, Any]) -> None:
    """Load the scenarios of a run's file `cases.json`, if it has one: ranks find the files of their models parsed."""
    from gssim.errors import UserError
    from gssim.scenario import load_scenario

    file = Path(run["folder"], run["arguments"][0])
    cases = json.loads(file.read_text(encoding="utf-8")) if file.name == "cases.json" else {}
    with chdir(run["folder"]):
        for case in cases.values():
            with suppress(UserError):  # which ranks raise too
                if "scenario" in case:
                    load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False)


def start(run: dict[str, Any], rank: int) -> int:
    """Fork a rank; return its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        become(run, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(run: dict[str, Any], rank: int) -> None:
    """Do in this process what `python -m` does on a rank; it ends by itself (run_on_rank)."""
    ranks = str(run["ranks"])
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    enter({**run["environment"], **numbers}, run["folder"])
    log = os.open(Path(os.environ["GSREAL_REPORTS"], f"log-{rank}.txt"), os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, descriptor in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, descriptor)
    if not run["module"].startswith("gsreal.") and hasattr(os, "sched_setaffinity"):  # those settle by themselves
        cores = sorted(os.sched_getaffinity(0))  # a rank's gloo threads must not ask for a lock beside its main thread
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    sys.argv = [run["module"], *run["arguments"]]
    runpy.run_module(run["module"], run_name="__main__", alter_sys=True)


def enter(environment: Mapping[str, str], folder: str) -> None:
    """Take the environment and the folder that a new process would have, and end with the process that forks.

    What that one has loaded since it was forked (model files) is exempt from this process's collections too: to look
    through it before every case took a tenth of the time of ranks.
    """
    from gssim.execution.parent import die_with_parent

    die_with_parent()
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # of another environment
    os.chdir(folder)
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]


def codes_of(run: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Run commands to their end; return their exit codes, and the ids of processes of theirs that do not end."""
    holder = Path(run["output"], "held")  # open in every fork of a command
    holder.touch()
    started = {}
    for number, command in enumerate(run["commands"]):
        process = os.fork()
        if not process:
            os._exit(command_code(command, run["folder"], Path(run["output"]), number))
        started[process] = number
    codes, until_s = [-1] * len(started), time.monotonic() + LIMIT_S
    while started:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            codes[started.pop(process)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until_s:
            for process in started:
                os.kill(process, signal.SIGKILL)
        else:
            for process, number in started.items():
                command, file = run["commands"][number], Path(run["output"], f"err-{number}.txt")
                said = command["terminated_at"]
                if (
                    said is not None
                    and file.exists()
                    and file.read_text(errors="replace").count(said) >= command["times"]
                ):
                    os.kill(process, command["ended_by"])
                    command["terminated_at"] = None
            time.sleep(0.01)
    until_s = time.monotonic() + 10
    while (running := having_open(holder)) and time.monotonic() < until_s:
        time.sleep(0.05)
    return codes, running


def having_open(file: Path) -> list[str]:
    """Return the ids of the processes that have a file open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or somebody else's
            if any(os.readlink(handle) == str(file) for handle in (process / "fd").iterdir()):
                found.append(process.name)
    return found


def command_code(command: dict[str, Any], folder: str, output: Path, number: int) -> int:
    """Do in this process what gsreal's command line does; return its exit code."""
    import gsreal.cli
    import gsreal.run.launch

    code = 70
    try:
        enter(command["environment"], folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.open(output / "held", os.O_RDONLY)
        files = [os.open(output / f"{name}-{number}.txt", os.O_WRONLY | os.O_CREAT) for name in ("out", "err")]
        for file, descriptor in ((os.open(os.devnull, os.O_RDONLY), 0), (files[0], 1), (files[1], 2)):
            os.dup2(file, descriptor)
        if command["network"] is not None:
            place = os.open(command["network"], os.O_RDONLY)
            assert not ctypes.CDLL(None, use_errno=True).setns(place, CLONE_NEWNET), os.strerror(ctypes.get_errno())
        usual = gsreal.run.launch.Rank

        def may_fork(start: Any) -> bool:
            wanted = start.environment.get("LD_PRELOAD")
            return wanted is None or (command["slow_ranks_forked"] and wanted == LOADED)

        gsreal.run.launch.Rank = lambda number, start, *more: (  # type: ignore[assignment, misc]
            (usual if start.forked or not may_fork(start) else ForkedRank)(number, start, *more)
        )
        for name, value in command["values"].items():
            module, _, constant = name.rpartition(".")
            setattr(import_module(module), constant, value)
        sys.argv = ["gsreal", *command["arguments"]]
        gsreal.cli.main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def first_failure(started: dict[int, int]) -> tuple[int, int] | None:
    """Wait for all ranks; return (rank, exit code) of the one that failed first: soon after it the others are ended."""
    failed: tuple[int, int] | None = None
    until_s = math.inf
    while started:
        process, status = os.waitpid(-1, 0 if failed is None else os.WNOHANG)
        if not process:
            if time.monotonic() > until_s:
                for other in started:
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.01)
            continue
        rank, code = started.pop(process), os.waitstatus_to_exitcode(status)
        if code and failed is None:
            failed, until_s = (rank, code), time.monotonic() + GRACE_S
    return failed


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
