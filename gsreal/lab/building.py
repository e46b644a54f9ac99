"""Builds a lab's network and takes it down in any case; checks what it needs, and removes what killed labs left."""

import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from gsreal.compiled import compiled, compiler
from gsreal.lab.network import (
    ADDRESS_DEVICE,
    FOLDER,
    PREFIX,
    Command,
    Network,
    Wire,
    can_create_namespaces,
    in_namespace,
    prepare_process,
    shape,
)
from gsreal.run.signals import signals_deferred, signals_ignored
from gssim.cluster.lab_links import group_bytes
from gssim.errors import RunFailedError, UserError
from gssim.execution.files import held_lock, release_lock

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
"""Debian's package of each program."""


def missing() -> str | None:
    """Return the prerequisites that this machine lacks, with how to install them, in one line; None if it has all."""
    if platform.system() != "Linux":
        return f"needs Linux (network namespaces), but this is {platform.system()}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces and shape their links: run it with sudo"
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            return f"needs the program {program}: apt-get install {package}"
    if not can_create_namespaces():
        return "root may not make network namespaces here (in a container: it needs CAP_SYS_ADMIN and CAP_NET_ADMIN)"
    return None


def check_tools() -> None:
    """Raise UserError if this machine cannot run a lab."""
    lacks = missing()
    if lacks:
        raise UserError(f"lab: {lacks}")


def check_compiler(network: Network, shares: Sequence[float]) -> None:
    """Raise UserError if this lab needs a compiler, and there is none."""
    if compiler() is not None:
        return
    for needed, reason in (
        (any(share < 1 for share in shares), "to slow devices down (lab.cpu_share_ratio)"),
        (any(wire.is_delayed for wire in network.wires), "to delay links where the kernel has no netem"),
    ):
        if needed:
            raise UserError(f"lab: needs a C++ compiler {reason}: apt-get install g++")


LOCKS = Path("/run/gsreal-lab")


def run_of(namespace: str) -> str | None:
    """Return the id of the run to which a namespace belongs; None for one that is not the lab's.

    >>> run_of("gsreal-lab-1f2e3d-4"), run_of("gsreal-lab-"), run_of("mine")
    ('1f2e3d', None, None)
    """
    run_id, _, number = namespace.removeprefix(PREFIX).rpartition("-")
    return run_id if namespace.startswith(PREFIX) and run_id and number.isdigit() else None


def namespaces_of(run_id: str) -> list[str]:
    """Return the names of a run's existing namespaces."""
    return sorted(name for name in _names(FOLDER) if run_of(name) == run_id)


def runs() -> list[str]:
    """Return the ids of all runs that have left anything, or are alive."""
    locks = {Path(name).stem for name in _names(LOCKS)}
    return sorted(locks | {run for name in _names(FOLDER) if (run := run_of(name)) is not None})


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


@contextmanager
def claimed(run_id: str) -> Iterator[bool]:
    """Acquire a run's lock, which is released when the run ends; False if another process holds it."""
    path = LOCKS / f"{run_id}.lock"
    while True:
        LOCKS.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the last one that ended meanwhile took the folder away
            handle = held_lock(path)
            break
    if handle is None:
        yield False
        return
    try:
        yield True
    finally:
        release_lock(path, handle)
        with suppress(OSError):
            LOCKS.rmdir()  # the last one


def take_down(run_id: str) -> list[str]:
    """Kill the processes in a run's namespaces and remove these; return their names."""
    namespaces = namespaces_of(run_id)
    for name in namespaces:
        processes = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in processes.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return namespaces


def clean() -> tuple[list[str], list[str]]:
    """Remove the remains of dead runs; return their ids, and those of the runs that are alive."""
    removed: list[str] = []
    alive: list[str] = []
    for run_id in runs():
        with claimed(run_id) as is_dead:
            if is_dead:
                take_down(run_id)
            (removed if is_dead else alive).append(run_id)
    return removed, alive


SETTINGS = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/tcp_congestion_control": "reno",  # without losses it is as good as any, and every kernel has it
    "ipv4/tcp_slow_start_after_idle": "0",  # a step's first message finds the link as the step before left it
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_wmem": "4096 4194304 4194304",  # buffers of the size that they grow to, from the first message on
    "ipv4/tcp_rmem": "4096 4194304 33554432",
    "ipv6/conf/all/disable_ipv6": "1",  # nothing but the ranks sends packets
    "ipv6/conf/default/disable_ipv6": "1",
}
"""Kernel settings of every namespace, under /proc/sys/net."""


@dataclass(frozen=True)
class Line:
    """The process that delays packets of wires in a kernel without netem."""

    process: "subprocess.Popen[str]"

    def end(self) -> None:
        """Stop it; its devices are removed with it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def node_commands(network: Network) -> list[Command]:
    """Return the commands that create the namespaces."""
    return [("ip", "netns", "add", node.namespace) for node in network.nodes]


def wire_commands(wires: Iterable[Wire]) -> list[Command]:
    """Return the commands that create wires without a delay of their own."""
    commands: list[Command] = []
    for wire in wires:
        a, b = wire.ends
        place = ("peer", "name", b.interface, "netns", b.namespace)
        commands.append(("ip", "-n", a.namespace, "link", "add", a.interface, "type", "veth", *place))
    return commands


def address_commands(network: Network) -> list[Command]:
    """Return the commands that set every interface's address, and bring it up."""
    commands: list[Command] = []
    for node in network.nodes:
        ip: Command = ("ip", "-n", node.namespace)
        commands.append((*ip, "link", "set", "lo", "up"))
        if node.address:  # a bridge without ports is never down, whichever wires are there
            commands.append((*ip, "link", "add", ADDRESS_DEVICE, "type", "bridge"))
            commands.append((*ip, "addr", "add", f"{node.address}/32", "dev", ADDRESS_DEVICE))
            commands.append((*ip, "link", "set", ADDRESS_DEVICE, "up"))
    size = str(group_bytes(network.slowest_bytes_per_s))
    for end in (end for wire in network.wires for end in wire.ends):
        ip = ("ip", "-n", end.namespace)
        commands.append((*ip, "addr", "add", f"{end.address}/30", "dev", end.interface))
        commands.append((*ip, "link", "set", end.interface, "gso_max_size", size, "up"))
    return sorted(commands, key=lambda command: command[2])


def route_commands(network: Network) -> list[Command]:
    """Return the commands that set every node's routes to every device."""
    commands = []
    for route in network.routes:
        source = ("src", route.source) if route.source else ()
        where = ("via", route.via, "dev", route.interface, *source)
        commands.append(("ip", "-n", route.namespace, "route", "add", f"{route.destination}/32", *where))
    return sorted(commands, key=lambda command: command[2])


@dataclass(frozen=True)
class BuiltNetwork:
    """A network that has been built."""

    netem: bool
    """Whether the kernel implements the delays."""
    line: Line | None
    """The process that implements them, if the kernel does not."""

    def check(self) -> None:
        """Raise RunFailedError if a part of it has died."""
        if self.line is not None and self.line.process.poll() is not None:
            raise RunFailedError(f"lab: the process that delays links died (exit code {self.line.process.returncode})")


@contextmanager
def built(network: Network, *, shaped: bool = True) -> Iterator[BuiltNetwork]:
    """Build the network for the duration of the context; raise RunFailedError if a command fails.

    Not `shaped`: links are as fast as this machine.
    """
    with ExitStack() as stack:
        if not stack.enter_context(claimed(network.run_id)):
            raise RunFailedError(f"lab: run id {network.run_id} is taken")
        stack.callback(_without_signals, take_down, network.run_id)
        execute(node_commands(network))
        netem = has_netem(network.nodes[0].namespace)
        for node in network.nodes:
            in_namespace(node.namespace, _settle)
        delayed = [wire for wire in network.wires if wire.is_delayed and not netem]
        execute(wire_commands(wire for wire in network.wires if wire not in delayed))
        line = delay_line(delayed) if delayed else None
        if line is not None:
            stack.callback(_without_signals, line.end)
        execute(address_commands(network))
        execute(route_commands(network))
        ends = [end for wire in network.wires for end in wire.ends]
        if shaped:
            execute([command for end in ends for command in shape(end, netem=netem)])
        yield BuiltNetwork(netem, line)


def _without_signals(call: Callable[..., object], *arguments: object) -> None:
    """Call a function that no signal interrupts."""
    with signals_ignored():
        call(*arguments)


def _settle() -> None:
    """Write the settings of the current network namespace, as far as its kernel has them."""
    for name, value in SETTINGS.items():
        path = Path("/proc/sys/net", name)
        if path.exists():
            path.write_text(value, encoding="ascii")


def has_netem(namespace: str) -> bool:
    """Return whether the kernel has the queueing discipline for delays."""
    tc = ("tc", "-n", namespace, "qdisc")
    tried = subprocess.run([*tc, "add", "dev", "lo", "root", "netem", "delay", "1ms"], capture_output=True, check=False)
    if tried.returncode:
        return False
    execute([(*tc, "del", "dev", "lo", "root")])
    return True


def delay_line(wires: Sequence[Wire]) -> Line:
    """Start the process that creates wires with delay; return when their ends exist."""
    program = compiled(Path(__file__).with_name("delay_line.cpp"))
    if program is None:
        raise RunFailedError("lab: delay_line.cpp cannot be compiled")
    ends = [end for wire in wires for end in wire.ends]
    words = [word for end in ends for word in (end.namespace, end.interface, str(round(end.delay_s * 1e9)))]
    with signals_deferred():
        process = subprocess.Popen(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare_process,
            start_new_session=True,
        )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stderr:
        if process.stdout.readline() != "ready\n":
            reason = process.stderr.read().strip()
            Line(process).end()
            raise RunFailedError(f"lab: links cannot be delayed: {reason}")
    return Line(process)


def execute(commands: Iterable[Command]) -> None:
    """Run commands, each of them the words of a command line; raise RunFailedError with the message of one that fails.

    Consecutive commands of `ip` or `tc` in one network namespace are run in one batch.
    """
    for start, group in groupby(commands, key=lambda command: command[:3] if command[1] == "-n" else command):
        rest = [command[3:] for command in group]
        batch = rest if start[1] == "-n" else []
        words = [*start, "-batch", "-"] if batch else list(start)
        lines = "".join(" ".join(each) + "\n" for each in batch)
        try:
            done = subprocess.run(words, input=lines, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise RunFailedError(f"lab: {start[0]} is gone") from None
        if done.returncode:
            reason = " ".join(done.stderr.split())
            number = reason.rpartition("-:")[2] if batch else ""
            failing = batch[int(number) - 1] if number.isdigit() and int(number) <= len(batch) else ()
            raise RunFailedError(f"lab: {' '.join([*start, *failing])}: {reason or f'exit code {done.returncode}'}")
