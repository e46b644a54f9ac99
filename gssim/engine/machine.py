"""A program on a cluster in simulated time."""

from collections import defaultdict
from collections.abc import Callable, Generator
from functools import cached_property, partial
from typing import Any

import numpy as np
import simpy

from gssim import collectives
from gssim.cache import Shared
from gssim.cluster import Cluster, Conditions, contention_groups, core_shares, has_contention
from gssim.engine.collective_instances import Meeting, arrange, router_of
from gssim.engine.fast_path import ahead, is_alone, may_go_ahead
from gssim.engine.host import Clock, Host, Load
from gssim.engine.memory_tracker import Memory
from gssim.engine.rendezvous import Rendezvous, carry_out
from gssim.engine.selection import Scheduled
from gssim.engine.vectorised_walk import Lockstep, lockstep_of
from gssim.errors import RunFailedError
from gssim.program import Issue, Program, Task
from gssim.result import Span
from gssim.units import Floats

STREAMS = ("compute", "communication", "replication")
"""Of every rank. `replication`: all-reduces over replicas, which on nccl have a communicator and a stream of their own
(FSDP2). A pipeline's messages have streams of their own, by peer and direction."""
LEAST_IN_LOCKSTEP = 3
"""Classes from which on it pays to carry them out together."""
Work = Callable[[int, str, int], Generator[Any, Any, None]]
"""What carries out a class's stream so many times."""
SMALLEST_JITTER = 0.5
"""No task is ever faster than this by chance (assumed; it cuts off the normal distribution's far tail)."""


class DeadlockError(RunFailedError):
    """The program can never end: it names the ranks that wait, and for what."""


class Machine:
    """All ranks of a program in simulated time: `run` executes it `steps` times over and keeps what happened.

    Equal ranks are simulated once: everything by rank is by class here, in the order of `classes`.
    """

    def __init__(
        self,
        cluster: Cluster,
        program: Program,
        *,
        conditions: Conditions | None = None,
        seed: int = 0,
        unfolded: bool = False,
        shared: Shared | None = None,
    ) -> None:
        self.env = Clock()
        self.cluster, self.program, self.seed = cluster, program, seed
        conditions = conditions or Conditions()
        shared = shared or Shared()
        router = router_of(cluster, conditions, shared)
        arranged = arrange(
            self.env, cluster, program, router=router, conditions=conditions, shared=shared, unfolded=unfolded
        )
        self.classes, self.meetings, self.network = arranged.classes, arranged.meetings, arranged.network
        self.hosts = self._hosts()
        self._is_coupled = any(host.coupled for host in self.hosts.values())
        self.roles = [program.role_of[each.representative] for each in self.classes]
        self.devices = [cluster.type_of(each.representative) for each in self.classes]
        self.memory = [Memory(dict(program.persistent[role])) for role in self.roles]
        self.lockstep: Lockstep | None = None
        """Carries out all classes at once, where that is possible."""
        self.ends_s: list[list[float]] = [[] for _ in self.classes]
        self.begun: dict[tuple[int, str, int], Rendezvous] = {}
        self.messages: dict[tuple[int, int], Rendezvous] = {}
        """The latest message from class to class."""
        self.finished: dict[tuple[int, int, str], simpy.Event] = {}
        self.waiting: dict[tuple[int, str], tuple[Task, Rendezvous | None]] = {}
        self.steps = 0
        self.step_speed = [1.0 for _ in self.classes]
        self._volumes: dict[int, float] = defaultdict(float)
        self._hops: dict[int, collectives.Hops] = {}
        self._loads: dict[Meeting, Load] = {}
        self._cold_s = [0.0 for _ in self.classes]
        """How much longer each class will compute for the pauses before."""
        self._paused_s = [0.0 for _ in self.classes]
        """How long each class has waited since its caches were filled again for that."""
        self._computed_s: dict[int, float] = {}
        """When each class last computed."""
        self._issued_s = [0.0 for _ in self.classes]
        """When each class's host had issued the last piece that tells of it."""

    @cached_property
    def random(self) -> list[np.random.Generator]:
        """What draws chance for each class."""
        return [np.random.default_rng([self.seed, each.representative]) for each in self.classes]

    @cached_property
    def _meeting_of(self) -> dict[tuple[int, str], tuple[int, Meeting]]:
        """In which of a collective's meetings a class takes part, and its number."""
        return {
            (each.index, label): (number, meeting)
            for label, found in self.meetings.items()
            for number, meeting in enumerate(found)
            for each in meeting.classes
        }

    @cached_property
    def spans(self) -> list[Span]:
        """What occupied the streams of each class."""
        return self.lockstep.spans() if self.lockstep is not None else []

    @property
    def scheduled(self) -> dict[str, Scheduled]:
        """How each collective is carried out, by label; of groups that are not alike, by label and number."""
        return {
            label if len(found) == 1 else f"{label} ({number})": meeting.scheduled
            for label, found in self.meetings.items()
            for number, meeting in enumerate(found)
        }

    def _hosts(self) -> dict[str, Host]:
        """Return the hosts, or cores, of the classes' representatives."""
        names = {each.host for each in self.classes}
        devices: dict[str, int] = dict.fromkeys(names, 0)
        coupled: dict[str, bool] = dict.fromkeys(names, False)
        for device, host in zip(self.cluster.devices, contention_groups(self.cluster), strict=True):
            if host in names:
                devices[host] += 1
                coupled[host] |= has_contention(self.cluster.device_types[device.type])
        members = {name: {each.index: each.on_host for each in self.classes if each.host == name} for name in names}
        shares = core_shares(self.cluster)
        by_class = None if shares is None else {each.index: shares[each.representative] for each in self.classes}
        return {
            name: Host(self.env, devices[name], members[name], coupled=coupled[name], core_share=by_class)
            for name in sorted(names)
        }

    def note_communication(self, meeting: Meeting, change: int) -> None:
        """Tell the hosts of a collective's members that it begins or ends."""
        if not self._is_coupled or not any(self.hosts[each.host].coupled for each in meeting.classes):
            return
        if meeting not in self._loads:
            self._loads[meeting] = meeting.scheduled.load(self.network)
        for each in meeting.classes:
            self.hosts[each.host].communicate(each.index, self._loads[meeting], change)

    def note_bytes(self, stage: collectives.Stage) -> None:
        """Count what goes over the hops of a stage."""
        self._hops[id(stage.hops)] = stage.hops
        self._volumes[id(stage.hops)] += stage.size_bytes

    def carried_by_rank(self) -> tuple[Floats, Floats]:
        """Return the bytes that each rank sent and received, of all ranks."""
        ranks = len(self.program.role_of)
        total_sent, total_received = np.zeros(ranks), np.zeros(ranks)
        for key, hops in self._hops.items():
            sent, received = collectives.carried_by_rank(hops, ranks)
            total_sent += self._volumes[key] * sent
            total_received += self._volumes[key] * received
        return total_sent, total_received

    def run(self, steps: int) -> None:
        """Execute the program `steps` times; raise DeadlockError where it cannot end."""
        self.steps = steps
        if self._may_go_in_lockstep():
            self._in_lockstep(steps)
            return
        done: list[simpy.Process] = []
        for each in self.classes:
            tasks = self.program.tasks[self.roles[each.index]]
            awaited = {label for task in tasks for label in task.after}
            for step in range(steps):
                for label in awaited:
                    self.finished[each.index, step, label] = self.env.event()
            streams = dict.fromkeys([*STREAMS, *(task.stream for task in tasks)])
            work: Work = partial(ahead, self) if may_go_ahead(self, each.index) else self._stream
            done.extend(self.env.process(work(each.index, stream, steps)) for stream in streams)
        everything = self.env.all_of(done)
        try:
            self.env.run(until=everything)
        except RuntimeError as error:
            if everything.triggered or not self.waiting:
                raise
            raise DeadlockError(f"deadlock: {'; '.join(self._waits())}") from error

    def carry_out(self, meeting: Meeting) -> Generator[Any, Any, None]:
        """Take the simulated time of a collective, of which nobody waits for notices."""
        return carry_out(self, meeting)

    def _may_go_in_lockstep(self) -> bool:
        """Return whether there are many classes, of which each may go ahead and none waits for notices."""
        if len(self.classes) < LEAST_IN_LOCKSTEP:
            return False
        waits = any(meeting.scheduled.notices for found in self.meetings.values() for meeting in found)
        computes = self.program.once("all compute", self._all_compute)
        return computes and not waits and all(is_alone(self, each.index) for each in self.classes)

    def _all_compute(self) -> bool:
        return all(any(task.stream == "compute" for task in tasks) for tasks in self.program.tasks)

    def _in_lockstep(self, steps: int) -> None:
        """Execute the program for all classes at once; see [Note: lockstep]."""
        self.lockstep = lockstep_of(self, steps)
        try:
            self.lockstep.run()
        except RuntimeError as error:
            waits = self.lockstep.waits()
            if not waits:
                raise
            raise DeadlockError(f"deadlock: {'; '.join(waits)}") from error
        self.ends_s = self.lockstep.ends_s()
        for index, peak in self.lockstep.peaks():
            self.memory[index].peak = peak

    def _waits(self) -> list[str]:
        """Return who waits, where, and for what."""
        found = []
        for index, stream in sorted(self.waiting):
            task, meeting = self.waiting[index, stream]
            if meeting is None:
                cause = f"after {', '.join(map(repr, task.after))}"
            else:
                missing = sorted(self.classes[each].representative for each in meeting.missing)
                cause = f"for rank {', '.join(map(str, missing))}"
            found.append(f"rank {self.classes[index].representative} ({stream}) at {task.label!r}, {cause}")
        return found

    def _stream(self, index: int, stream: str, steps: int) -> Generator[Any, Any, None]:
        """Carry out a stream's tasks as the clock goes on."""
        tasks = self.tasks_of(index, stream)
        jitter, memory = self.devices[index].step_jitter_ratio, self.memory[index]
        for step in range(steps):
            if stream == "compute" and jitter:
                self.step_speed[index] = 1 + jitter * float(self.random[index].standard_normal())
            for task in tasks:
                if task.after:
                    yield from self._await(index, stream, step, task)
                began_s = self.env.now
                memory.begin(stream, task.need)
                if task.communication is not None:
                    yield from self.communicate(index, stream, step, task)
                elif task.duration_s > 0 or task.issue is not None:
                    yield from self._compute(index, task)
                memory.end(stream)
                if self.env.now > began_s:
                    self.note_span(index, stream, task.label, task.phase, began_s, self.env.now)
                finished = self.finished.get((index, step, task.label))
                if finished is not None:
                    finished.succeed(self.env.now)
            if stream == "compute":
                self.ends_s[index].append(self.env.now)

    def tasks_of(self, index: int, stream: str) -> list[Task]:
        """Return the tasks of a class on a stream."""
        return [task for task in self.program.tasks[self.roles[index]] if task.stream == stream]

    def until(self, now_s: float) -> Generator[Any, Any, None]:
        """Wait until the clock has come to a stream's own time."""
        if self.env.now < now_s:
            yield self.env.at(now_s)

    def _await(self, index: int, stream: str, step: int, task: Task) -> Generator[Any, Any, None]:
        """Wait for the tasks that come before this one on other streams."""
        awaited = [label for label in task.after if not self.finished[index, step, label].triggered]
        if not awaited:
            return
        pending = [self.finished[index, step, label] for label in awaited]
        began_s = self.env.now
        self.waiting[index, stream] = (task, None)
        yield self.env.all_of(pending) if len(pending) > 1 else pending[0]
        del self.waiting[index, stream]
        if stream == "compute" and self.env.now > began_s:
            self.note_wait(index, stream, task, awaited[-1], began_s, self.env.now)

    def note_wait(self, index: int, stream: str, task: Task, awaited: str, began_s: float, end_s: float) -> None:
        """Note that a task waited for another one."""
        label = task.label if task.label.startswith("wait") else f"wait {awaited}"
        self.note_span(index, stream, label, "exposed_communication", began_s, end_s)

    def _compute(self, index: int, task: Task) -> Generator[Any, Any, None]:
        began_s = self.env.now
        self._paused_s[index] += began_s - self._computed_s.get(index, began_s)
        refill_s = self._refill_s(index, task)
        yield from self._taking(index, (task.duration_s + refill_s) * self._jitter(index))
        if task.issue is not None:
            yield from self.until(self.issued_s(index, task.issue, began_s))
        self._computed_s[index] = self.env.now

    def issued_s(self, index: int, issue: Issue, began_s: float) -> float:
        """Return when the host has issued a piece that the device begins at a time."""
        self._issued_s[index] = (self._issued_s[index] if issue.goes_on else began_s) + issue.host_s
        return self._issued_s[index]

    def _taking(self, index: int, alone_s: float) -> Generator[Any, Any, None]:
        """Take the time of a piece of compute, longer where others share its host."""
        host, device = self.hosts[self.classes[index].host], self.devices[index]
        if not host.coupled:
            yield self.env.timeout(alone_s)
            return
        yield from host.compute(index, alone_s, device)

    def _refill_s(self, index: int, task: Task) -> float:
        """Return how much longer a task takes for filling the caches again after pauses.

        What pauses add falls on what is computed next that tells of it, where nothing takes more than twice its time;
        all of them add no more than the longest.
        """
        excess = task.after_pauses
        if excess is None:
            return 0.0
        pause_s, self._paused_s[index] = min(self._paused_s[index], excess.sizes[-1]), 0.0
        cold_s = min(self._cold_s[index] + excess.at(pause_s), max(excess.values))
        filled_s = min(cold_s, task.duration_s)
        self._cold_s[index] = cold_s - filled_s
        return filled_s

    def _jitter(self, index: int) -> float:
        """Return the factor by which chance changes a task's compute: the step's, and the task's own."""
        device = self.devices[index]
        own = device.task_jitter_ratio
        if not own and not device.step_jitter_ratio:
            return 1.0
        factor = self.step_speed[index] + (own * float(self.random[index].standard_normal()) if own else 0.0)
        return max(SMALLEST_JITTER, factor)

    def communicate(self, index: int, stream: str, step: int, task: Task) -> Generator[Any, Any, None]:
        """Join a collective, and wait until it is done."""
        label = task.communication
        assert label is not None
        number, meeting = self._meeting_of[index, label]
        rendezvous = self.begun.get((step, label, number))
        if rendezvous is None:
            rendezvous = self.begun[step, label, number] = Rendezvous(self, meeting)
        self.waiting[index, stream] = (task, rendezvous)
        if meeting.is_message and meeting.scheduled.notices:
            yield from self._behind(index, rendezvous)
        yield rendezvous.arrive(index)
        del self.waiting[index, stream]

    def _behind(self, index: int, rendezvous: Rendezvous) -> Generator[Any, Any, None]:
        """Let a receive's notice go behind the bytes of an earlier message to the same peer, if those are on their way.

        Both take the same connection: see [Note: notices] in `collectives.backend`.
        """
        rendezvous.post(index)
        meeting = rendezvous.meeting
        peer = next((each.index for each in meeting.classes if each.index != index), index)
        if index not in meeting.receivers:
            self.messages[index, peer] = rendezvous
            return
        before = self.messages.get((index, peer))
        if before is not None and before.leaves_s <= self.env.now and not before.done.triggered:
            yield before.done

    def note_span(self, index: int, stream: str, label: str, phase: str, began_s: float, end_s: float) -> None:
        """Note what occupied a stream, from when to when."""
        self.spans.append(Span(self.classes[index].representative, stream, label, phase, began_s, end_s))
