"""Executes a program in simulated time: each rank's streams run as SimPy processes, or faster, vectorised or by chunks,
where that gives the same result.

[Note: faster parts] A step may take slightly longer if one of its parts becomes faster, because something else then
happens at the same time (Graham 1969, "Bounds on multiprocessing timing anomalies"). Seen in random scenarios, and gone
without the cause: uneven exchanges that meet on links of a ring (0.02 %); communication of a faster rank that falls
into the compute of others, which `communicating_slowdown_ratio` slows down (0.06 %); a faster port, behind whose data
notices queue ([Note: queues] in `network.routes`); and messages of pairs that follow one another ([Note: pairs] in
`rendezvous`).
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import simpy

from gssim.cluster import Cluster, Conditions
from gssim.engine.fast_path import are_independent, can_run_ahead, run_ahead
from gssim.engine.memory_tracker import memory_after
from gssim.engine.outline_operations import can_walk_outlines
from gssim.engine.outline_walk import OutlineWalk, UnequalClassesError
from gssim.engine.rendezvous import RunningCollectives
from gssim.engine.state import MachineState, StreamTask, TaskSpan
from gssim.engine.vectorised_walk import VectorisedWalk, vectorised_walk_of
from gssim.errors import RunFailedError
from gssim.execution.cache import Shared
from gssim.program import Program, Task
from gssim.result import Span

STREAMS = ("compute", "communication", "replication")
"""Streams of every rank. `replication` runs all-reduces over replicas, which on nccl have a communicator and a stream
of their own (FSDP2). A pipeline's messages have further streams, one per peer and direction.
"""
MIN_CLASSES_VECTORISED = 3
"""Minimum number of rank classes for the vectorised walk, which is slower for fewer."""
Stop = Callable[[Sequence[Sequence[float]]], bool]
"""Function that is called with the ends of the steps so far, by class, and returns whether the rest is not needed."""
Work = Callable[[int, str, int], Generator[Any, Any, None]]
"""Function that executes a class's stream for a number of steps."""
DRAWN_TOGETHER = 64
"""Number of random variates of a class that are drawn at a time."""
SMALLEST_JITTER = 0.5
"""Smallest factor by which jitter scales a task's time (assumed: it cuts off the far tail of the normal
distribution)."""


class DeadlockError(RunFailedError):
    """The program can never end; the message names the waiting ranks and what each waits for."""


class Machine(MachineState):
    """All ranks of a program in simulated time: `run` executes it `steps` times and records spans and memory.

    Equal ranks are simulated once: lists have one entry per class, in the order of `classes`. `outlined`: whether
    outlines may be executed chunk by chunk.
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
        outlined: bool = True,
    ) -> None:
        super().__init__(cluster, program, conditions=conditions, seed=seed, unfolded=unfolded, shared=shared)
        self._outlined = outlined
        self.vectorised: VectorisedWalk | None = None
        """The vectorised walk over all classes; None if it is not used."""
        self.outline_walk: OutlineWalk | None = None
        """The chunk-by-chunk walk of outlines; None if it is not used."""
        self._collectives: RunningCollectives
        """Collectives of a run task by task, while it lasts."""
        self.steps = 0
        self.is_stopped = False
        """Whether the run was ended before all of its steps."""
        self._stop: Stop | None = None
        self._enough: simpy.Event
        """Ends a run task by task before all of its steps."""
        self.step_speed = [1.0 for _ in self.classes]
        self._refill_due_s = [0.0 for _ in self.classes]
        """For each class, the extra compute time of earlier pauses that is still to be added to tasks."""
        self._waited_s = [0.0 for _ in self.classes]
        """For each class, how long it has waited since its caches were last refilled."""
        self._compute_ended_s: dict[int, float] = {}
        """End of each class's latest compute."""

    @cached_property
    def random(self) -> list[Iterator[float]]:
        """Standard normal variates of each class."""
        return [_variates([self.seed, each.representative]) for each in self.classes]

    @cached_property
    def task_spans(self) -> list[TaskSpan]:
        """Busy intervals of the streams of each class. The walk of outlines records none: the program is run again by
        task.
        """
        if self.outline_walk is not None:
            return self._task_by_task().task_spans
        return self.vectorised.task_spans() if self.vectorised is not None else self.recorded

    @property
    def spans(self) -> list[Span]:
        """`task_spans` in the form in which they are shown."""
        return [each.span() for each in self.task_spans]

    def run(self, steps: int, *, peaks: bool = True, stop: Stop | None = None) -> None:
        """Execute the program `steps` times; raise DeadlockError if it cannot end.

        `peaks`: whether memory peaks are needed; else a vectorised walk, which computes them at its end, leaves them
        out. `stop`: asked whenever a class ends a step; the walks, which take few steps, do not ask.
        """
        self.steps, self._stop = steps, stop
        if stop is not None:
            self.env.keep_track()
        try:
            self._execute(steps, peaks=peaks)
        finally:
            self._stop = None
            self.env.drop()

    def _execute(self, steps: int, *, peaks: bool) -> None:
        if self._outlined and can_walk_outlines(self):
            self._run_outlines(steps)
            return
        if self._can_be_vectorised():
            self._run_vectorised(steps, peaks=peaks)
            return
        self._collectives = RunningCollectives(self)
        processes: list[simpy.Process] = []
        for rank_class in self.classes:
            tasks = self.program.tasks[self.roles[rank_class.index]]
            self.begin_events(rank_class.index, steps)
            streams = dict.fromkeys([*STREAMS, *(task.stream for task in tasks)])
            run_stream: Work = (
                partial(run_ahead, self, self._collectives) if can_run_ahead(self, rank_class.index) else self._stream
            )
            for stream in streams:
                processes.append(self.env.process(run_stream(rank_class.index, stream, steps)))
                self.streams[processes[-1]] = rank_class.index, stream
        everything, self._enough = self.env.all_of(processes), self.env.event()
        try:
            self.env.run(until=self.env.any_of([everything, self._enough]))
        except RuntimeError as error:
            if everything.triggered or not self.waiting:
                raise
            raise DeadlockError(f"deadlock: {'; '.join(self._blocked_ranks())}") from error
        # they refer to this machine: left for the garbage collector, they took it a fifth of the time of a simulation
        del self._collectives
        self.finished.clear()
        self.streams.clear()

    def _can_be_vectorised(self) -> bool:
        """Return whether there are enough classes, all independent between collectives, and messages need no
        notices.
        """
        if len(self.classes) < MIN_CLASSES_VECTORISED:
            return False
        has_notices = any(instance.schedule.notices for several in self.arranged.all for instance in several)
        return self.program.once(_all_compute) and not has_notices and are_independent(self)

    def _run_outlines(self, steps: int) -> None:
        """Execute the program chunk by chunk; see [Note: outline] in `outline_operations`."""
        self.outline_walk = OutlineWalk(self, steps)
        try:
            self.outline_walk.run()
        except UnequalClassesError:
            self.begin()
            self.outline_walk = OutlineWalk(self, steps, merges_classes=False)
            self.outline_walk.run()
        except RuntimeError:
            self._task_by_task()  # raises the error that names the ranks that wait for ever
            raise
        self.ends_s = list(self.outline_walk.ends_s())
        self.memory = [self.program.once(memory_after, role, steps) for role in self.roles]

    def _task_by_task(self) -> "Machine":
        """Return a machine that has executed the same steps task by task."""
        again = Machine(
            self.cluster,
            self.program,
            conditions=self.conditions,
            seed=self.seed,
            unfolded=self.unfolded,
            shared=self.shared,
            outlined=False,
        )
        again.run(self.steps)
        return again

    def _run_vectorised(self, steps: int, *, peaks: bool) -> None:
        """Execute the program for all classes at once; see [Note: vectorised walk] in `vectorised_walk`."""
        self.vectorised = vectorised_walk_of(self, steps)
        try:
            self.vectorised.run()
        except RuntimeError as error:
            waits = self.vectorised.blocked_ranks()
            if not waits:
                raise
            raise DeadlockError(f"deadlock: {'; '.join(waits)}") from error
        self.ends_s = self.vectorised.ends_s()
        for index, peak in self.vectorised.peaks() if peaks else ():
            self.memory[index].peak = peak

    def _blocked_ranks(self) -> list[str]:
        """Return the waiting ranks with stream, task and cause."""
        texts = []
        for index, stream in sorted(self.waiting):
            task, members = self.waiting[index, stream]
            if members is None:
                cause = f"after {', '.join(repr(each.label) for each in task.after)}"
            else:
                missing = sorted(self.classes[member].representative for member in members)
                cause = f"for rank {', '.join(map(str, missing))}"
            texts.append(f"rank {self.classes[index].representative} ({stream}) at {task.label!r}, {cause}")
        return texts

    def _stream(self, index: int, stream: str, steps: int) -> Generator[Any, Any, None]:
        """Execute a stream's tasks as a SimPy process."""
        tasks, env, memory, finished = self.tasks_of(index, stream), self.env, self.memory[index], self.finished
        jitter = self.devices[index].step_jitter_ratio if stream == "compute" else 0.0
        for step in range(steps):
            drawn: int | None = -1  # the step of the period whose speeds were drawn last; none yet
            for each in tasks:
                task = each.task
                if jitter and task.id.step != drawn:
                    drawn = task.id.step
                    self.step_speed[index] = 1 + jitter * next(self.random[index])
                if each.after and not all([finished[index, step, number].triggered for number in each.after]):
                    yield from self._await(index, stream, step, each)
                began_s = env.now
                memory.begin(stream, task.need)
                if task.communication is not None:
                    yield from self._collectives.join(index, stream, step, task)
                elif task.duration_s > 0 or task.issue is not None:
                    yield from self._compute(index, task)
                memory.end(stream)
                ended_s = env.now
                if ended_s > began_s:
                    self.record_span(index, task, began_s, ended_s)
                self.finish(index, step, each, ended_s)
            if stream == "compute":
                self.ends_s[index].append(env.now)
                if self._stop is not None and not self.is_stopped and self._stop(self.ends_s):
                    self.is_stopped = True
                    self._enough.succeed()

    def _await(self, index: int, stream: str, step: int, task: StreamTask) -> Generator[Any, Any, None]:
        """Wait for the tasks on other streams on which this one depends, some of which have not ended."""
        awaited = [
            name
            for name, number in zip(task.task.after, task.after, strict=True)
            if not self.finished[index, step, number].triggered
        ]
        began_s = self.env.now
        yield from self.ends_of(index, stream, step, task)
        if stream == "compute" and self.env.now > began_s:
            self.record_span(index, task.task, began_s, self.env.now, awaited=awaited[-1])

    def _compute(self, index: int, task: Task) -> Generator[Any, Any, None]:
        """Take the simulated time of some compute; longer if other devices of the host compute or communicate."""
        began_s = self.env.now
        self._waited_s[index] += began_s - self._compute_ended_s.get(index, began_s)
        refill_s = self._refill_s(index, task)
        jitter = self._jitter(index, task)
        host, alone_s = self.hosts[self.classes[index].host], (task.duration_s + refill_s) * jitter
        if host.coupled and task.id.op != "inner-steps":  # whose time has what other devices add to it already
            yield from host.compute(index, alone_s, self.devices[index], refill_s=refill_s * jitter)
        else:
            yield self.env.timeout(alone_s)
        if task.issue is not None:
            yield from self.until(self.issued_s(index, task.issue, began_s))
        self._compute_ended_s[index] = self.env.now

    def _refill_s(self, index: int, task: Task) -> float:
        """Return a task's extra time for refilling the caches after pauses.

        The extra time of a pause falls on the next tasks that are sensitive to it, and at most doubles each. Several
        pauses together add no more than the longest of them.
        """
        excess = task.after_pauses
        if excess is None:
            return 0.0
        pause_s, self._waited_s[index] = min(self._waited_s[index], excess.sizes[-1]), 0.0
        cold_s = min(self._refill_due_s[index] + excess.at(pause_s), max(excess.values))
        filled_s = min(cold_s, task.duration_s)
        self._refill_due_s[index] = cold_s - filled_s
        return filled_s

    def _jitter(self, index: int, task: Task) -> float:
        """Return the random factor on a task's compute time: the step's factor times the task's own.

        A task that stands for several steps varies like the sum of that many independent steps.
        """
        device = self.devices[index]
        own = device.task_jitter_ratio
        if not own and not device.step_jitter_ratio:
            return 1.0
        if task.id.op == "inner-steps":
            spread = device.step_jitter_ratio / math.sqrt(task.id.part or 1)
            return max(SMALLEST_JITTER, 1 + spread * next(self.random[index]))
        factor = self.step_speed[index] + (own * next(self.random[index]) if own else 0.0)
        return max(SMALLEST_JITTER, factor)


def _variates(seed: Sequence[int]) -> Iterator[float]:
    """Yield standard normal variates, drawn many at a time, which gives the same as one by one."""
    random = np.random.default_rng(seed)
    while True:
        yield from random.standard_normal(DRAWN_TOGETHER).tolist()


def _all_compute(program: Program) -> bool:
    """Return whether every rank has tasks on its compute stream."""
    return all(any(task.stream == "compute" for task in tasks) for tasks in program.tasks)
