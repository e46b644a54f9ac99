"""State of a simulated machine: its clock, classes of ranks, hosts and network, and what is recorded as it executes.

[Note: no cycles] What a machine holds refers to the machine weakly or not at all, and events that are left in its
clock are dropped. So a machine and the program that it executed are freed as soon as nobody needs them. In a reference
cycle they would stay until Python's garbage collector runs, which is off while points are simulated: some 70 MB for
each threshold of a model with 1.3 billion parameters on 1,024 devices.
"""

import weakref
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import simpy

from gssim import collectives
from gssim.cluster import Cluster, Conditions, DeviceType, contention_groups, has_contention
from gssim.cluster.contention import core_shares
from gssim.collectives.stage import summed
from gssim.engine.collective_instances import CollectiveInstance, arrange, router_of
from gssim.engine.host import Host, Load
from gssim.engine.memory_tracker import MemoryTracker
from gssim.engine.selection import CollectiveSchedule
from gssim.engine.shared_core import SharedCore
from gssim.engine.symmetry import is_jittery
from gssim.execution.cache import Shared
from gssim.network import Clock
from gssim.program import Issue, Program, Task, TaskId
from gssim.result import Span
from gssim.units import Floats, Ints


class TaskSpan(NamedTuple):
    """A busy interval of a stream: the execution of a task, or its wait for another task."""

    rank: int
    stream: str
    task: TaskId
    phase: str
    start_s: float
    end_s: float
    awaited: TaskId | None = None
    """The task that was waited for, if the interval is a wait."""

    def span(self, zero_s: float = 0.0) -> Span:
        """Return the interval as shown, in seconds since `zero_s`."""
        if self.awaited is None or self.task.action == "wait":
            label, general = self.task.label, self.task.general_labels
        else:
            label = f"wait {self.awaited.label}"
            general = tuple(f"wait {each}" for each in self.awaited.general_labels)
        start_s, end_s = self.start_s - zero_s, self.end_s - zero_s
        return Span(self.rank, self.stream, label, self.phase, start_s, end_s, general)


class StreamTask(NamedTuple):
    """A task with its dependencies on other streams, as numbers."""

    task: Task
    number: int | None
    """Its number, if other streams wait for it."""
    after: tuple[int, ...]
    """Numbers of the tasks on which it depends."""


class MachineState:
    """The ranks of a program in simulated time, by class of equal ranks in the order of `classes`.

    The different ways to execute the program (task by task, ahead of the clock, vectorised, by chunks) share this
    state.
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
        self.cluster, self.program, self.conditions, self.seed = cluster, program, conditions or Conditions(), seed
        self.unfolded, self.shared = unfolded, shared or Shared()
        self.begin()

    def begin(self) -> None:
        """Set the clock to 0 and every rank to its first task; what an earlier execution recorded is dropped."""
        cluster, program = self.cluster, self.program
        self.env = Clock()
        self.arranged = arrange(
            self.env,
            cluster,
            program,
            router=router_of(cluster, self.conditions, self.shared),
            conditions=self.conditions,
            shared=self.shared,
            unfolded=self.unfolded,
        )
        self.__dict__.pop("instances", None)
        self.classes, self.network = self.arranged.classes, self.arranged.network
        self.hosts = self._hosts()
        self.is_coupled = any(host.coupled for host in self.hosts.values())
        self.roles = [program.role_of[each.representative] for each in self.classes]
        self.devices = [self._device(each.index) for each in self.classes]
        self.memory = [MemoryTracker(dict(program.persistent[role])) for role in self.roles]
        self.ends_s: list[list[float]] = [[] for _ in self.classes]
        """For each class, the end times of its steps."""
        self.finished: dict[tuple[int, int, int], simpy.Event] = {}
        """Events at the ends of tasks that other streams of the class wait for, by class, step and number of the
        task.
        """
        self.waiting: dict[tuple[int, str], tuple[Task, Set[int] | None]] = {}
        """By class and stream: the waiting task, and the classes that its collective waits for (None: it waits for
        tasks of its own class).
        """
        self.streams: dict[object, tuple[int, str]] = {}
        """Class and stream that each process executes."""
        self.recorded: list[TaskSpan] = []
        self._volumes: dict[int, float] = defaultdict(float)
        self._hops: dict[int, collectives.Hops] = {}
        self._loads: dict[CollectiveInstance, Load] = {}
        self.notices_s: dict[CollectiveInstance, float] = {}
        """Travel times of the notices of receives on idle links."""
        self._issued_s = [0.0 for _ in self.classes]
        """For each class, the time at which its host finished issuing the latest task that has an `issue`."""

    @cached_property
    def instances(self) -> Mapping[TaskId, tuple[CollectiveInstance, ...]]:
        """Instances of each collective of the program, by identity; one for each class of groups."""
        return {name: self.arranged.of(each) for name, each in self.program.communications.items()}

    @property
    def schedules(self) -> dict[str, CollectiveSchedule]:
        """Schedule of each collective by label; if it has several instances, by label and instance number."""
        return {
            collective.label if len(instances) == 1 else f"{collective.label} ({number})": instance.schedule
            for collective, instances in self.instances.items()
            for number, instance in enumerate(instances)
        }

    @cached_property
    def class_of_rank(self) -> Ints:
        """Index of the class of every rank."""
        found = np.zeros(len(self.program.role_of), np.int64)
        for rank_class in self.classes:
            found[rank_class.members] = rank_class.index
        return found

    def _hosts(self) -> dict[str, Host]:
        """Return the hosts, or cores, of the classes' representatives."""
        names = {rank_class.host for rank_class in self.classes}
        slowed = {name for name, kind in self.cluster.device_types.items() if has_contention(kind)}
        shares = core_shares(self.cluster)
        if not slowed and shares is None:
            return dict.fromkeys(
                names, Host(self.env, 0, {}, coupled=False)
            )  # loads are not recorded: one stands for all
        devices: dict[str, int] = dict.fromkeys(names, 0)
        coupled: dict[str, bool] = dict.fromkeys(names, False)
        for device, host in zip(self.cluster.devices, contention_groups(self.cluster), strict=True):
            if host in names:
                devices[host] += 1
                coupled[host] |= device.type in slowed
        members: dict[str, dict[int, int]] = {name: {} for name in names}
        for rank_class in self.classes:
            members[rank_class.host][rank_class.index] = rank_class.on_host
        if shares is None:
            return {name: Host(self.env, devices[name], members[name], coupled=coupled[name]) for name in sorted(names)}
        own = {rank_class.index: shares[rank_class.representative] for rank_class in self.classes}
        return {
            name: SharedCore(self.env, members[name], core_share=own, seed=self.seed)
            if all(own[index] < 1 and is_jittery(self._device(index)) for index in members[name])
            else Host(self.env, devices[name], members[name], coupled=coupled[name], core_share=own)
            for name in sorted(names)
        }

    def _device(self, index: int) -> DeviceType:
        """Return the device type of a class."""
        return self.cluster.type_of(self.classes[index].representative)

    def set_communicating(self, instance: CollectiveInstance, change: int, *, only: int | None = None) -> None:
        """Tell the hosts of a collective's members (of class `only`, if given) that it begins (+1) or ends (-1)."""
        if instance.communication.kind in collectives.COPIES:  # done by copy engines of the devices
            return
        if not self.is_coupled or not any(self.hosts[rank_class.host].coupled for rank_class in instance.classes):
            return
        if instance not in self._loads:
            self._loads[instance] = instance.schedule.load(self.network)
        for rank_class in instance.classes:
            if only in (None, rank_class.index):
                self.hosts[rank_class.host].communicate(rank_class.index, self._loads[instance], change)

    def count_bytes(self, stage: collectives.Stage, times: int = 1) -> None:
        """Count the bytes that a stage sends over its hops."""
        self._hops[id(stage.hops)] = stage.hops
        self._volumes[id(stage.hops)] += times * stage.size_bytes

    def carried_by_rank(self) -> tuple[Floats, Floats]:
        """Return the bytes sent and the bytes received by each rank."""
        ranks = len(self.program.role_of)
        total_sent, total_received = np.zeros(ranks), np.zeros(ranks)
        for key, hops in self._hops.items():
            sent, received = collectives.carried_by_rank(hops, ranks)
            total_sent += self._volumes[key] * sent
            total_received += self._volumes[key] * received
        return total_sent, total_received

    def sent_across(self, size: int) -> Floats:
        """Return the bytes that each rank sends outside its block of `size` consecutive ranks."""
        total = np.zeros(len(self.program.role_of))
        for key, hops in self._hops.items():
            outward = hops.source // size != hops.target // size
            total += self._volumes[key] * summed(hops.source[outward], hops.weight[outward], len(total))
        return total

    def tasks_of(self, index: int, stream: str) -> Sequence[StreamTask]:
        """Return the tasks of a class on a stream."""
        return self.program.once(_tasks_by_stream, self.roles[index]).get(stream, ())

    def begin_events(self, index: int, steps: int) -> None:
        """Create the events at the ends of a class's tasks that others wait for."""
        awaited = self.program.once(_awaited_numbers, self.roles[index])
        for step in range(steps):
            for number in awaited.values():
                self.finished[index, step, number] = self.env.event()

    def ends_of(self, index: int, stream: str, step: int, task: StreamTask) -> Generator[Any, Any, None]:
        """Wait for the tasks on which one depends, each by itself: `finish` sorts the streams that wait for a task."""
        for each in task.after:
            event = self.finished[index, step, each]
            if not event.triggered:
                self.waiting[index, stream] = (task.task, None)
                yield event
                del self.waiting[index, stream]

    def finish(self, index: int, step: int, task: StreamTask, end_s: float) -> None:
        """Report the end of a task to the streams that wait for it, which go on in the order of the program.

        A rank's thread posts what it may post at one instant in that order: a pipeline's batch of messages, say.
        """
        if task.number is None:
            return
        event = self.finished[index, step, task.number]
        assert event.callbacks is not None
        if len(event.callbacks) > 1:
            places = self.program.once(_places, self.roles[index])

            def place(resume: Any) -> int:
                return places[id(self.waiting[self.streams[resume.__self__]][0])]

            event.callbacks.sort(key=place)
        event.succeed(end_s)

    def until(self, now_s: float) -> Generator[Any, Any, None]:
        """Wait until the simulated clock has reached a time."""
        if self.env.now < now_s:
            yield self.env.at(now_s)

    def issued_s(self, index: int, issue: Issue, began_s: float) -> float:
        """Return the time at which the host has issued a task whose device part begins at `began_s`."""
        self._issued_s[index] = (self._issued_s[index] if issue.goes_on else began_s) + issue.host_s
        return self._issued_s[index]

    def record_span(
        self, index: int, task: Task, began_s: float, end_s: float, *, awaited: TaskId | None = None
    ) -> None:
        """Record a busy interval of a stream: a task's, or that of its wait for another one."""
        phase = task.phase if awaited is None else "exposed_communication"
        rank = self.classes[index].representative
        self.recorded.append(TaskSpan(rank, task.stream, task.id, phase, began_s, end_s, awaited))


class PartOfMachine:
    """Object that a machine holds, and that refers to the machine weakly; see [Note: no cycles]."""

    def __init__(self, machine: MachineState) -> None:
        self._machine = weakref.ref(machine)

    @property
    def machine(self) -> MachineState:
        """The machine, which lives as long as its parts are used."""
        machine = self._machine()
        assert machine is not None
        return machine


def _places(program: Program, role: int) -> dict[int, int]:
    """Return the place of each task of a role, by identity."""
    return {id(task): place for place, task in enumerate(program.tasks[role])}


def _awaited_numbers(program: Program, role: int) -> Mapping[TaskId, int]:
    """Return, by identity, a consecutive number for each task of a role that other tasks wait for."""
    awaited = dict.fromkeys(each for task in program.tasks[role] for each in task.after)
    return {each: number for number, each in enumerate(awaited)}


def _tasks_by_stream(program: Program, role: int) -> Mapping[str, Sequence[StreamTask]]:
    """Return the tasks of a role by stream."""
    numbers, streams = program.once(_awaited_numbers, role), defaultdict[str, list[StreamTask]](list)
    for task in program.tasks[role]:
        after = tuple([numbers[each] for each in task.after])
        streams[task.stream].append(StreamTask(task, numbers.get(task.id), after))
    return streams
