"""Rendezvous of collectives: a collective starts when its last member arrives, and ends for all members at once.

[Note: pairs] gloo's all-to-alls are an exception: they consist of messages between all pairs of ranks. For i from 1 to
n - 1, a rank posts a send to the i-th rank after it and a receive from the i-th rank before it (pytorch/gloo,
gloo/alltoall.cc, alltoallv.cc). So the messages of two ranks begin when both have arrived, whoever else is missing. Let
the later of the two find the notice of the other's receive (it is later by more than a notice travels), and post its
send before its receive. Then its own notice queues behind the bytes that it sends (see [Note: notices] in
`collectives.backend`), and the two messages follow one another. A rank leaves when it has received everything, because
sockets buffer what it sends. Measured with torch 2.13 between two ranks at 100 Mbit/s that exchange 515 and 271 kB (41
and 22 ms): one was done after 22 or 41 ms, the other after 62, the sum, in 23 of 24 exchanges (55 in one).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import simpy

from gssim import collectives
from gssim.engine.collective_instances import CollectiveInstance
from gssim.engine.state import MachineState
from gssim.engine.task_groups import TaskShape, task_groups_of
from gssim.network import Prepared
from gssim.program import Task, TaskId


class Rendezvous:
    """One execution of a collective: starts when its last member arrives, and ends for all at once."""

    def __init__(self, machine: MachineState, instance: CollectiveInstance) -> None:
        self.machine, self.instance = machine, instance
        self.missing = {each.index for each in instance.classes}
        self.arrived_s: dict[int, float] = {}
        self.first_byte_s = math.inf
        """Time at which the first byte is sent: then the notices of the first receives have arrived."""
        self.follows = True
        """Whether all members that have arrived did so as soon as their stream's last collective had ended."""
        self.done = machine.env.event()

    def post(self, rank_class: int) -> None:
        """Record the time at which a member posts its part. If its notice is delayed, it arrives later than that."""
        self.arrived_s[rank_class] = self.machine.env.now

    def arrive(self, rank_class: int) -> simpy.Event:
        """Return the event at which the collective is done; the last arrival starts it."""
        self.missing.discard(rank_class)
        self.arrived_s.setdefault(rank_class, self.machine.env.now)
        if not self.missing:
            self.first_byte_s = self.machine.env.now + max(0.0, self._notice_s() - self._lead_s())
            self.machine.env.process(self._run())
        return self.done

    def _notice_s(self) -> float:
        """Return the travel time of the notice of a message's receive; 0 without notices."""
        scheduled = self.instance.schedule
        if not scheduled.notices or not self.instance.receivers:
            return 0.0
        known_s = self.machine.notices_s
        if self.instance not in known_s:
            empty = replace(scheduled.stages[0], size_bytes=0.0)
            pace = scheduled.pace(empty)._replace(notices=False)
            known_s[self.instance] = self.machine.network.alone_s(empty, pace)
        return known_s[self.instance]

    def _lead_s(self) -> float:
        """Return the time since all receivers of the first stage posted their receives."""
        receivers = self.instance.receivers
        return self.machine.env.now - max(self.arrived_s[each] for each in receivers) if receivers else 0.0

    def _run(self) -> Generator[Any, Any, None]:
        yield from carry_out(self.machine, self.instance, lead_s=self._lead_s(), follows=self.follows)
        self.done.succeed()


class PairwiseRendezvous(Rendezvous):
    """One execution of an all-to-all whose messages start pair by pair; see [Note: pairs]."""

    def __init__(self, machine: MachineState, instance: CollectiveInstance) -> None:
        super().__init__(machine, instance)
        self._received = {key: machine.env.event() for key in instance.pairs}
        self._is_complete = machine.env.event()
        self._busy_until_s = dict.fromkeys(self.missing, 0.0)
        """By class: the time until which its thread handles the bytes of messages that have begun."""
        self._running = dict.fromkeys(self.missing, 0)
        """By class: number of its messages in flight."""

    def arrive(self, rank_class: int) -> simpy.Event:
        """Start the messages between a class and the classes that have arrived; return the event at which it
        may leave.
        """
        env = self.machine.env
        self.arrived_s[rank_class] = env.now
        self.missing.discard(rank_class)
        for key in self._received:
            if rank_class in key[:2] and self.missing.isdisjoint(key[:2]):
                env.process(self._carry(key))
        if not self.missing:
            self._is_complete.succeed()
        limit_bytes = math.inf  # no limit on what a socket buffers
        if (cost := self.machine.cluster.backend_cost) is not None and cost.posting_limit_bytes is not None:
            limit_bytes = cost.posting_limit_bytes
        awaited = [
            received
            for (source, target, places), received in self._received.items()
            if target == rank_class or (source == rank_class and self._bytes_of((source, target, places)) > limit_bytes)
        ]
        return env.all_of([self._is_complete, *awaited])

    def _bytes_of(self, key: tuple[int, int, int]) -> float:
        stage = self.instance.pairs[key]
        return stage.size_bytes * stage.hops.largest_weight

    def _carry(self, key: tuple[int, int, int]) -> Generator[Any, Any, None]:
        """Take the simulated time of the messages from one class to another."""
        machine, schedule, stage = self.machine, self.instance.schedule, self.instance.pairs[key]
        source, target, places = key
        for each in {source, target}:
            self._running[each] += 1
            if self._running[each] == 1:
                machine.set_communicating(self.instance, +1, only=each)
        if schedule.fixed_s:
            yield machine.env.timeout(schedule.fixed_s)
        ranks, lead_s = len(self.instance.communication.group), self.arrived_s[source] - self.arrived_s[target]
        other_way = self._received.get((target, source, ranks - places))
        sends_first = 2 * places >= ranks  # the receiver posts its send to the sender before its receive
        notice_s = machine.network.latency_s(stage) + schedule.message_s
        if other_way and sends_first and lead_s < 0 and -lead_s >= notice_s:
            yield other_way
            lead_s = math.inf
        pace = schedule.pace(stage, lead_s=max(0.0, lead_s))._replace(processor_s=0.0)
        if wait_s := machine.network.wait_s(stage, pace):
            yield machine.env.timeout(wait_s)  # a rank handles bytes once they come, not while notices travel
        now_s, handled_s = machine.env.now, self._bytes_of(key) * schedule.processor_byte_s
        for each in (source, target):
            self._busy_until_s[each] = max(now_s, self._busy_until_s[each]) + handled_s
        busy_until_s = max(self._busy_until_s[source], self._busy_until_s[target])
        yield from machine.network.carry(stage, pace._replace(latency=False))
        yield from machine.until(busy_until_s)
        machine.count_bytes(stage)
        for each in {source, target}:
            self._running[each] -= 1
            if not self._running[each]:
                machine.set_communicating(self.instance, -1, only=each)
        self._received[key].succeed()


class RunningCollectives:
    """The collectives of a machine that is executed task by task; the first member to join one creates its
    rendezvous.
    """

    def __init__(self, machine: MachineState) -> None:
        self.machine = machine
        self._begun: dict[tuple[int, int], Rendezvous] = {}
        """Rendezvous for which members are missing, by step and number of the instance."""
        self._messages: dict[tuple[int, int], Rendezvous] = {}
        """The latest message between two classes, by sender and receiver."""
        self._ended_s: dict[tuple[int, str], float] = {}
        """End of the latest collective of each class's streams."""

    @cached_property
    def _instance_of(self) -> dict[tuple[int, TaskId], tuple[int, CollectiveInstance]]:
        """Number and instance by (class index, identity of the collective); instances of all collectives are numbered
        in a row.
        """
        every = chain.from_iterable(
            [(collective, instance) for instance in instances]
            for collective, instances in self.machine.instances.items()
        )
        return {
            (rank_class.index, collective): (number, instance)
            for number, (collective, instance) in enumerate(every)
            for rank_class in instance.classes
        }

    def join(self, index: int, stream: str, step: int, task: Task) -> Generator[Any, Any, None]:
        """Join a collective, and wait until it is done."""
        collective = task.communication
        assert collective is not None
        number, instance = self._instance_of[index, collective]
        rendezvous = self._begun.get((step, number))
        if rendezvous is None:
            kind = PairwiseRendezvous if instance.pairs else Rendezvous
            rendezvous = self._begun[step, number] = kind(self.machine, instance)
        rendezvous.follows &= self._ended_s.get((index, stream)) == self.machine.env.now
        self.machine.waiting[index, stream] = (task, rendezvous.missing)
        if instance.is_message and instance.schedule.notices:
            yield from self._queue_notice(index, rendezvous)
        done = rendezvous.arrive(index)
        if not rendezvous.missing:
            del self._begun[step, number]
        yield done
        del self.machine.waiting[index, stream]
        if instance.schedule.notices and instance.schedule.stages:
            self._ended_s[index, stream] = self.machine.env.now

    def _queue_notice(self, index: int, rendezvous: Rendezvous) -> Generator[Any, Any, None]:
        """Delay a receive's notice behind the bytes of an earlier message to the same peer, if these are still in
        flight.

        Both use the same connection: see [Note: notices] in `collectives.backend`.
        """
        rendezvous.post(index)
        instance = rendezvous.instance
        peer = next((each.index for each in instance.classes if each.index != index), index)
        if index not in instance.receivers:
            self._messages[index, peer] = rendezvous
            return
        before = self._messages.get((index, peer))
        if before is not None and before.first_byte_s <= self.machine.env.now and not before.done.triggered:
            yield before.done


def carry_out(
    machine: MachineState, instance: CollectiveInstance, *, lead_s: float = 0.0, follows: bool = False
) -> Generator[Any, Any, None]:
    """Take the simulated time of a collective.

    `lead_s`: time since its first receives were posted; `follows`: it starts as soon as another of its stream has ended
    (see [Note: following] in `collectives.backend`).
    """
    scheduled, env = instance.schedule, machine.env
    machine.set_communicating(instance, +1)
    saved_s = occupied_s = 0.0
    if follows:  # processor time is spent with the bytes, so that other collectives wait for it
        saved_s, occupied_s = scheduled.following_saving_s + scheduled.queued_s, scheduled.queued_s
    fixed_s = max(0.0, scheduled.fixed_s - saved_s)
    saved_s = max(0.0, saved_s - scheduled.fixed_s)
    if fixed_s:
        yield env.timeout(fixed_s)
    for stage in scheduled.stages:
        if scheduled.measured:
            machine.network.count(stage)
            continue
        pace = scheduled.pace(stage, lead_s=lead_s)
        if saved_s or occupied_s:
            wait_s, pace = machine.network.wait_s(stage, pace), pace._replace(saved_s=saved_s, occupied_s=occupied_s)
            saved_s, occupied_s = max(0.0, saved_s - wait_s), 0.0
        yield from machine.network.carry(stage, pace)
        lead_s = 0.0
        reduction_s = collectives.reduction_s(machine.cluster, stage.reduced_bytes)
        if reduction_s:
            yield env.timeout(reduction_s)
    for stage in scheduled.stages:
        machine.count_bytes(stage)
    machine.set_communicating(instance, -1)


# Times that are known beforehand --------------------------------------------------------------------------------------

PreparedTransfer = tuple[tuple[float, ...], Prepared, float]
"""The delays before a collective's bytes are sent, the prepared transfer of the bytes, and the reduction time after."""


def prepared_transfer(machine: MachineState, instance: CollectiveInstance) -> PreparedTransfer | None:
    """Return a collective's transfer on idle links; None if it has several stages or groups of sessions."""
    schedule, network = instance.schedule, machine.network
    first = (schedule.fixed_s,) if schedule.fixed_s else ()
    if schedule.measured or not schedule.stages:
        return first, Prepared(0.0, None, None, 0.0), 0.0
    if len(schedule.stages) > 1:
        return None
    (stage,) = schedule.stages
    prepared = network.prepared(stage, schedule.pace(stage))
    if prepared is None:
        return None
    reduction_s = collectives.reduction_s(machine.cluster, stage.reduced_bytes)
    return (*first, prepared.wait_s) if prepared.wait_s else first, prepared, reduction_s


def carry_prepared(machine: MachineState, prepared: Prepared, reduction_s: float, ended: Callable[[], None]) -> None:
    """Carry the bytes of a prepared collective from now on, by callbacks instead of a process; `ended` is called at its
    end.
    """
    if prepared.processor_s or reduction_s:
        handled_after_s = 0.0
        if prepared.processor_s and prepared.handled_by is not None:
            handled_after_s = machine.network.handled_after_s(prepared.handled_by, prepared.processor_s)
        ended = partial(_handle, machine, machine.env.now + handled_after_s, reduction_s, ended)
    if prepared.sessions is None:
        ended()
    else:
        machine.network.start(prepared, ended)


def _handle(machine: MachineState, busy_until_s: float, reduction_s: float, ended: Callable[[], None]) -> None:
    """Call `ended` once processors have handled a collective's bytes (at `busy_until_s`) and reduced them."""
    end_s = max(machine.env.now, busy_until_s) + reduction_s
    if end_s > machine.env.now:
        machine.env.call(end_s, lambda _event: ended())
    else:
        ended()


def delays_of_collective(
    machine: MachineState, instance: CollectiveInstance, idle: Set[int]
) -> tuple[float, ...] | None:
    """Return the delays of a collective's stages, in the order in which the clock would add them.

    None if one of the links that it crosses is not in `idle`, or if earlier traffic matters (notices, segments of
    shaped links).
    """
    schedule, network = instance.schedule, machine.network
    delays = [schedule.fixed_s] if schedule.fixed_s else []
    for stage in () if schedule.measured else schedule.stages:
        pace = schedule.pace(stage)
        if pace.notices or pace.group_bytes or not network.folded.of(stage).links <= idle:
            return None
        prepared = network.prepared(stage, pace)
        if prepared is None:  # its sessions begin at different times
            delays.append(network.stage_on_idle_links_s(stage, pace))
        else:
            delays += [prepared.wait_s, max(network.on_idle_links_s(prepared), prepared.processor_s)]
        delays.append(collectives.reduction_s(machine.cluster, stage.reduced_bytes))
    return tuple(each for each in delays if each)


def links_used_in_turn(machine: MachineState) -> frozenset[int]:
    """Return the classes of links whose uses never overlap, so that each finds its link idle.

    That holds if a single class of ranks takes part in all collectives that cross a link, and its streams join these
    one after another.
    """
    names: dict[tuple[CollectiveInstance, ...], list[TaskId]] = defaultdict(list)
    for name, instances in machine.instances.items():
        names[instances].append(name)
    users: dict[frozenset[int], list[tuple[Sequence[TaskId], CollectiveInstance]]] = defaultdict(list)
    for instances, alike in names.items():
        for instance in instances:
            crossed = [machine.network.folded.of(stage).links for stage in instance.schedule.stages]
            users[crossed[0] if len(crossed) == 1 else frozenset().union(*crossed)].append((alike, instance))
    crossing: dict[int, list[int]] = defaultdict(list)
    for number, links in enumerate(users):
        for link in links:
            crossing[link].append(number)
    by_users: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for link, crossed_by in crossing.items():
        by_users[tuple(crossed_by)].append(link)
    several = list(users.values())
    in_all = [frozenset.intersection(*{instance.class_numbers for _, instance in alike}) for alike in several]
    """For each set of users, the classes that take part in all of its collectives."""
    groups = machine.program.once(task_groups_of, machine.shared)
    shapes = {role: group.shape for group in groups for role in group.roles}
    in_turn: set[int] = set()
    for numbers, equal in by_users.items():
        common = frozenset.intersection(*{in_all[number] for number in numbers})
        if not common:
            continue
        shape = shapes[machine.roles[min(common)]]
        joined = (alike for number in numbers for alike, _ in several[number])
        if shape.once(joins_all_in_turn) or shape.once(joins_in_turn, frozenset(chain.from_iterable(joined))):
            in_turn.update(equal)
    return frozenset(in_turn - machine.network.busy_links)


def joins_all_in_turn(shape: TaskShape) -> bool:
    """Return whether a rank always joins all of its collectives, and so any of them, one after another."""
    return joins_in_turn(shape, frozenset(name for name in shape.joined if name is not None))


def joins_in_turn(shape: TaskShape, names: Set[TaskId]) -> bool:
    """Return whether a rank joins the collectives `names` in the same order whatever the times of its tasks.

    It does if they are on one stream, or if each is joined by a task that depends on the one that joins the previous.
    """
    if len({stream for stream, name in zip(shape.stream_of, shape.joined, strict=True) if name in names}) <= 1:
        return True  # as a stream does all of its tasks
    before: tuple[int, int] | None = None  # stream and place of the previously joined collective
    for name, stream, place, behind in shape.once(_joins):
        if name in names:
            if before is not None and behind[before[0]] < before[1]:
                return False
            before = (stream, place)
    return True


def _joins(shape: TaskShape) -> Sequence[tuple[TaskId, int, int, tuple[int, ...]]]:
    """Return the collectives that a rank joins in two steps: each with the stream and the place of the task that joins
    it, and for every stream the place of the last task that this one follows; -1: none.

    A task follows the tasks before it on its stream, the tasks that it waits for, and, transitively, what these follow.
    The second step shows whether its first collective follows the last one of the first.
    """
    streams = {stream: number for number, stream in enumerate(dict.fromkeys(shape.stream_of))}
    awaited = set(chain.from_iterable(shape.after))
    latest: dict[str, tuple[int, ...]] = dict.fromkeys(streams, (-1,) * len(streams))
    """By stream: for every stream, the place of the last task that this stream's latest task follows (or is)."""
    joins = []
    place = 0
    for _ in range(2):
        known: dict[TaskId, tuple[int, ...]] = {}
        for own_id, stream, joined, after in zip(shape.ids, shape.stream_of, shape.joined, shape.after, strict=True):
            own, behind = streams[stream], latest[stream]
            for each in after:
                if each in known:
                    behind = tuple(map(max, behind, known[each]))
            if joined is not None:
                joins.append((joined, own, place, behind))
            latest[stream] = behind = (*behind[:own], place, *behind[own + 1 :])
            if own_id in awaited:
                known[own_id] = behind
            place += 1
    return joins
