"""Who waits for whom: streams of ranks, hosts whose devices slow each other down, and collectives as rendezvous.

State changes only here and in `network`, inside the SimPy environment.
"""

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from gssim import collectives
from gssim.cluster import Cluster
from gssim.collectives import Communication
from gssim.memory import Footprint
from gssim.network import Network
from gssim.program import Program, Task
from gssim.result import Span

STREAMS = ("compute", "communication")
SMALLEST_JITTER = 0.5
"""No task is ever faster than this by chance (assumed; it cuts off the normal distribution's far tail)."""


class DeadlockError(RuntimeError):
    """The program can never end: it names the ranks that wait, and for what."""


@dataclass
class Memory:
    """What one rank holds: by category, and at its worst moment."""

    held: dict[str, float]
    transient: dict[str, Footprint] = field(default_factory=dict)
    peak_bytes: float = 0.0
    peak: dict[str, float] = field(default_factory=dict)

    def begin(self, stream: str, need: Footprint) -> None:
        """Hold a task's worst moment while it runs."""
        self.transient[stream] = need
        total = sum(self.held.values()) + sum(part.peak_bytes for part in self.transient.values())
        if total > self.peak_bytes:
            self.peak_bytes = total
            self.peak = dict(self.held)
            for part in self.transient.values():
                for category, size in part.peak:
                    self.peak[category] = self.peak.get(category, 0.0) + size

    def end(self, stream: str) -> None:
        """Keep what the task leaves."""
        for category, size in self.transient.pop(stream).kept:
            self.held[category] = self.held.get(category, 0.0) + size


class Host:
    """Devices that share a host: each computes slower while the others compute, and while it communicates itself."""

    def __init__(self, env: simpy.Environment, devices: int) -> None:
        self.env, self.devices = env, devices
        self.computing: set[int] = set()
        self.communicating: dict[int, int] = defaultdict(int)
        self.changed = env.event()

    def _change(self) -> None:
        self.changed.succeed()
        self.changed = self.env.event()

    def compute(
        self, rank: int, alone_s: float, *, neighbour_ratio: float, communicating_ratio: float
    ) -> Generator[Any, Any, None]:
        """Take the simulated time of `alone_s` of compute under what else goes on at the host."""
        if alone_s <= 0:
            return
        self.computing.add(rank)
        self._change()
        remaining = alone_s
        ended = False
        while not ended:
            others = (len(self.computing) - 1) / max(1, self.devices - 1)
            slowdown = 1 + (neighbour_ratio - 1) * others
            if self.communicating[rank]:
                slowdown *= communicating_ratio
            began_s = self.env.now
            end = self.env.timeout(remaining * slowdown)
            yield end | self.changed
            remaining = max(0.0, remaining - (self.env.now - began_s) / slowdown)
            ended = end.processed  # the clock decides: late in a run `remaining` may never round to 0
        self.computing.discard(rank)
        self._change()

    def communicate(self, rank: int, change: int) -> None:
        """Note that the rank has `change` more collectives under way."""
        before = bool(self.communicating[rank])
        self.communicating[rank] += change
        if bool(self.communicating[rank]) != before:
            self._change()


class Rendezvous:
    """A collective that starts when its last member has come, and is done for all at once."""

    def __init__(self, machine: "Machine", communication: Communication) -> None:
        self.machine, self.communication = machine, communication
        self.missing = set(communication.group)
        self.done = machine.env.event()

    def arrive(self, rank: int) -> simpy.Event:
        """Return the event at which the collective is done; the last arrival starts it."""
        self.missing.discard(rank)
        if not self.missing:
            self.machine.env.process(self._run())
        return self.done

    def _run(self) -> Generator[Any, Any, None]:
        machine, communication = self.machine, self.communication
        cluster, env = machine.cluster, machine.env
        machine.note_communication(communication.group, +1)
        overhead_s = collectives.overhead_s(cluster, communication.kind)
        if overhead_s:
            yield env.timeout(overhead_s)
        factor = collectives.bytes_factor(cluster, communication.kind)
        for step in collectives.rounds(communication, cluster.backend):
            flows = []
            for message in step.messages:
                machine.sent[message.source] += message.size_bytes
                machine.received[message.target] += message.size_bytes
                transfer = machine.network.transfer(message.source, message.target, message.size_bytes, factor=factor)
                flows.append(env.process(transfer))
            yield env.all_of(flows)
            reduction_s = collectives.reduction_s(cluster, step.reduced_bytes)
            if reduction_s:
                yield env.timeout(reduction_s)
        machine.note_communication(communication.group, -1)
        self.done.succeed()


class Machine:
    """All ranks of a program in simulated time: `run` executes it `steps` times over and keeps what happened."""

    def __init__(self, cluster: Cluster, program: Program, *, seed: int = 0) -> None:
        self.env = simpy.Environment()
        self.cluster, self.program = cluster, program
        self.network = Network(self.env, cluster)
        self.ranks = range(len(program.tasks))
        self.hosts: dict[str, Host] = {}
        for rank in self.ranks:
            name = cluster.devices[rank].host
            if name not in self.hosts:
                ours = sum(1 for r in self.ranks if cluster.devices[r].host == name)
                self.hosts[name] = Host(self.env, max(ours, sum(d.host == name for d in cluster.devices)))
        self.memory = [Memory(dict(held)) for held in program.persistent]
        self.spans: list[Span] = []
        self.ends_s: list[list[float]] = [[] for _ in self.ranks]
        self.sent = [0.0 for _ in self.ranks]
        self.received = [0.0 for _ in self.ranks]
        self.meetings: dict[tuple[int, str], Rendezvous] = {}
        self.finished: dict[tuple[int, int, str], simpy.Event] = {}
        self.waiting: dict[tuple[int, str], tuple[Task, Rendezvous | None]] = {}
        self.random = [np.random.default_rng([seed, rank]) for rank in self.ranks]
        self.steps = 0
        self.step_speed = [1.0 for _ in self.ranks]

    def note_communication(self, group: Sequence[int], change: int) -> None:
        """Tell the hosts of `group` that its ranks begin or end a collective."""
        for rank in group:
            self._host(rank).communicate(rank, change)

    def _host(self, rank: int) -> Host:
        return self.hosts[self.cluster.devices[rank].host]

    def run(self, steps: int) -> None:
        """Execute the program `steps` times; raise DeadlockError where it cannot end."""
        done: list[simpy.Process] = []
        self.steps = steps
        for rank in self.ranks:
            for step in range(steps):
                for task in self.program.tasks[rank]:
                    self.finished[rank, step, task.label] = self.env.event()
            done.extend(self.env.process(self._stream(rank, stream, steps)) for stream in STREAMS)
        everything = self.env.all_of(done)
        try:
            self.env.run(until=everything)
        except RuntimeError as error:
            if everything.triggered or not self.waiting:
                raise
            raise DeadlockError(f"deadlock: {'; '.join(self._waits())}") from error

    def _waits(self) -> list[str]:
        """Return who waits, where, and for what."""
        found = []
        for rank, stream in sorted(self.waiting):
            task, meeting = self.waiting[rank, stream]
            if meeting is None:
                cause = f"after {', '.join(map(repr, task.after))}"
            else:
                cause = f"for rank {', '.join(map(str, sorted(meeting.missing)))}"
            found.append(f"rank {rank} ({stream}) at {task.label!r}, {cause}")
        return found

    def _stream(self, rank: int, stream: str, steps: int) -> Generator[Any, Any, None]:
        tasks = [task for task in self.program.tasks[rank] if task.stream == stream]
        jitter = self.cluster.type_of(rank).step_jitter_ratio
        for step in range(steps):
            if stream == "compute" and jitter:
                self.step_speed[rank] = 1 + jitter * float(self.random[rank].standard_normal())
            for task in tasks:
                yield from self._task(rank, stream, step, task)
            if stream == "compute":
                self.ends_s[rank].append(self.env.now)

    def _task(self, rank: int, stream: str, step: int, task: Task) -> Generator[Any, Any, None]:
        pending = [event for label in task.after if not (event := self.finished[rank, step, label]).triggered]
        if pending:
            began_s = self.env.now
            self.waiting[rank, stream] = (task, None)
            yield self.env.all_of(pending)
            del self.waiting[rank, stream]
            if stream == "compute":
                self._span(rank, stream, f"wait {task.label}", "exposed_communication", began_s)
        began_s = self.env.now
        self.memory[rank].begin(stream, task.need)
        if task.communication is not None:
            yield from self._communicate(rank, stream, step, task)
        else:
            device = self.cluster.type_of(rank)
            yield from self._host(rank).compute(
                rank,
                task.duration_s * self._jitter(rank),
                neighbour_ratio=device.neighbour_slowdown_ratio,
                communicating_ratio=device.communicating_slowdown_ratio,
            )
        self.memory[rank].end(stream)
        self._span(rank, stream, task.label, task.phase, began_s)
        self.finished[rank, step, task.label].succeed()

    def _jitter(self, rank: int) -> float:
        """Return the factor by which chance changes a task's compute: the step's, and the task's own."""
        own = self.cluster.type_of(rank).task_jitter_ratio
        factor = self.step_speed[rank] + (own * float(self.random[rank].standard_normal()) if own else 0.0)
        return max(SMALLEST_JITTER, factor)

    def _communicate(self, rank: int, stream: str, step: int, task: Task) -> Generator[Any, Any, None]:
        assert task.communication is not None
        communication = self.program.communications[task.communication]
        meeting = self.meetings.setdefault((step, task.communication), Rendezvous(self, communication))
        self.waiting[rank, stream] = (task, meeting)
        yield meeting.arrive(rank)
        del self.waiting[rank, stream]

    def _span(self, rank: int, stream: str, label: str, phase: str, began_s: float) -> None:
        if self.env.now > began_s:
            self.spans.append(Span(rank, stream, label, phase, began_s, self.env.now))
