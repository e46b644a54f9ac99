"""What the ranks of a family hold at their worst moments, all of them at once; `held` does it for one rank.

What one rank holds while a program runs.

What one rank holds, as it changes: for a trace.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gssim.memory import NOTHING, Footprint

if TYPE_CHECKING:
    from gssim.program import Task
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gssim.program import Program
from gssim.units import Floats, Ints

if TYPE_CHECKING:
    from gssim.engine.vectorised_walk import Family

NOISE_BYTES = 1e-3
"""Expected sizes of messages are fractions, and what is taken and given back of these in another order leaves rounding
errors: less than this is nothing."""


class Memory:
    """What one rank holds: by category, and at its worst moment."""

    def __init__(self, held: dict[str, float]) -> None:
        self.held = held
        self.peak_bytes = 0.0
        self.peak: dict[str, float] = {}
        self._transient: dict[str, Footprint] = {}
        self._held_bytes = sum(held.values())

    def begin(self, stream: str, need: Footprint) -> None:
        """Hold a task's worst moment while it runs."""
        self._transient[stream] = need
        total = self._held_bytes + sum([part.peak_bytes for part in self._transient.values()])
        if total > self.peak_bytes:
            self.peak_bytes = total
            self.peak = dict(self.held)
            for part in self._transient.values():
                for category, size in part.peak:
                    self.peak[category] = self.peak.get(category, 0.0) + size

    def end(self, stream: str) -> None:
        """Keep what the task leaves."""
        need = self._transient[stream]
        self._transient[stream] = NOTHING
        for category, size in need.kept:
            self._keep(category, size)

    def _keep(self, category: str, size_bytes: float) -> None:
        held = self.held.get(category, 0.0) + size_bytes
        self.held[category] = held if abs(held) > NOISE_BYTES else 0.0
        self._held_bytes += size_bytes

    def through(self, tasks: "Iterable[Task]") -> "Memory":
        """Return itself after tasks of the compute stream, one after another."""
        beside = sum(part.peak_bytes for stream, part in self._transient.items() if stream != "compute")
        for task in tasks:
            need = task.need
            if self._held_bytes + beside + need.peak_bytes > self.peak_bytes:
                self.begin("compute", need)
            for category, size in need.kept:
                self._keep(category, size)
        self._transient["compute"] = NOTHING
        return self


class Recorded(Memory):
    """What one rank holds, and how it came to that."""

    def __init__(self, held: dict[str, float], now_s: Callable[[], float]) -> None:
        super().__init__(held)
        self.now_s = now_s
        self.log: list[tuple[float, dict[str, float]]] = [(now_s(), dict(held))]
        """From which time on it holds what, by category; while a task runs, what it holds at its worst moment."""

    def begin(self, stream: str, need: Footprint) -> None:
        """Hold a task's worst moment while it runs."""
        super().begin(stream, need)
        self._note()

    def end(self, stream: str) -> None:
        """Keep what the task leaves."""
        super().end(stream)
        self._note()

    def _note(self) -> None:
        level = dict(self.held)
        for part in self._transient.values():
            for category, size in part.peak:
                level[category] = level.get(category, 0.0) + size
        self.log.append((self.now_s(), level))


@dataclass(frozen=True, eq=False)
class _Needs:
    """What a family's roles need of memory: rows are tasks that need any, by category, columns roles."""

    tasks: tuple[int, ...]
    streams: tuple[int, ...]
    """Of each of these, as a number in the order in which they first need some."""
    categories: tuple[str, ...]
    peak: Floats
    """By task, category and role."""
    peak_bytes: Floats
    """By task and role."""
    kept: Floats
    """As `peak`."""


@dataclass(eq=False)
class Holding:
    """The peaks of a family's roles, for every order in which tasks of several streams began and ended."""

    persistent: tuple[Mapping[str, float], ...]
    needs: _Needs
    steps: int
    _known: dict[bytes, list[dict[str, float]]] = field(default_factory=dict)

    @property
    def in_one_stream(self) -> bool:
        """Whether but one stream takes memory: the order is then always the same."""
        return len(set(self.needs.streams)) <= 1

    def peaks(self, began_s: Floats, ended_s: Floats, columns: Sequence[int]) -> list[dict[str, float]]:
        """Return the peaks of ranks by category; times are by step, task of the family and rank.

        What begins or ends at the same time in two streams does so in the one beside the compute first.
        """
        if self.in_one_stream:
            return [self._of_order(np.arange(2 * self.steps * len(self.needs.tasks)))[role] for role in columns]
        rows = [place for number in sorted(set(self.needs.streams), reverse=True) for place in self._of_stream(number)]
        places = [self.needs.tasks[row] for row in rows]
        times_s = np.stack([began_s[:, places], ended_s[:, places]], axis=2)
        # events by stream, step, task, begin or end; `_of_order` has them by step, task, begin or end
        flat, numbers = self._by_stream(times_s, rows)
        orders = numbers[np.argsort(flat, axis=0, kind="stable")]
        return [self._of_order(orders[:, i])[role] for i, role in enumerate(columns)]

    def _of_stream(self, number: int) -> list[int]:
        return [row for row, stream in enumerate(self.needs.streams) if stream == number]

    def _by_stream(self, times_s: Floats, rows: Sequence[int]) -> tuple[Floats, Ints]:
        steps, tasks, ranks = self.steps, len(rows), times_s.shape[-1]
        streams = np.array([self.needs.streams[row] for row in rows])
        numbers = (np.arange(steps)[:, None, None] * tasks + np.array(rows)[None, :, None]) * 2 + np.arange(2)
        parts = [number for number in dict.fromkeys(streams.tolist())]
        flat = np.concatenate([times_s[:, streams == each].reshape(-1, ranks) for each in parts])
        return flat, np.concatenate([numbers[:, streams == each].reshape(-1) for each in parts])

    def _of_order(self, order: Ints) -> list[dict[str, float]]:
        """Return the peaks of all roles; events are numbered by step, task, begin or end."""
        key = order.tobytes()
        if key not in self._known:
            self._known[key] = self._worked_out(order)
        return self._known[key]

    def _worked_out(self, order: Ints) -> list[dict[str, float]]:
        needs, roles = self.needs, range(len(self.persistent))
        rows = [[each.get(name, 0.0) for each in self.persistent] for name in needs.categories]
        held = np.array(rows).reshape(len(needs.categories), len(roles))
        held_bytes = np.array([sum(each.values()) for each in self.persistent])
        worst_bytes, worst = held_bytes.copy(), held.copy()
        going: dict[int, int] = {}
        for event in order.tolist():
            row, ends = event // 2 % len(needs.tasks), event % 2
            if ends:
                del going[needs.streams[row]]
                for place in np.flatnonzero(needs.kept[row].any(axis=1)).tolist():
                    held[place] += needs.kept[row, place]
                    held_bytes = held_bytes + needs.kept[row, place]
                continue
            going[needs.streams[row]] = row
            ordered = [going[stream] for stream in sorted(going)]
            total_bytes = held_bytes + sum(needs.peak_bytes[each] for each in ordered)
            more = total_bytes > worst_bytes
            if more.any():
                worst_bytes = np.where(more, total_bytes, worst_bytes)
                now = held.copy()
                for each in ordered:
                    now += needs.peak[each]
                worst[:, more] = now[:, more]
        there = [set(each) | self._touched(role) for role, each in enumerate(self.persistent)]
        return [
            {
                name: value
                for name, value in zip(needs.categories, worst[:, role].tolist(), strict=True)
                if name in there[role]
            }
            for role in roles
        ]

    def _touched(self, role: int) -> set[str]:
        needs = self.needs
        used = needs.peak[:, :, role].any(axis=0) | needs.kept[:, :, role].any(axis=0)
        return {needs.categories[place] for place in np.flatnonzero(used).tolist()}


def holding_of(family: "Family", program: Program, steps: int) -> Holding:
    """Return what tells the peaks of a family's roles over so many steps."""
    some = [
        place
        for place in range(len(family.tasks))
        if any(
            program.tasks[role][place].need.peak_bytes or program.tasks[role][place].need.kept for role in family.roles
        )
    ]
    persistent = tuple(program.persistent[role] for role in family.roles)
    found = [name for each in persistent for name in each]
    for place in some:
        for role in family.roles:
            need = program.tasks[role][place].need
            found += [name for name, _ in (*need.peak, *need.kept)]
    categories = {name: number for number, name in enumerate(dict.fromkeys(found))}
    peak, kept = np.zeros((2, len(some), len(categories), len(family.roles)))
    for row, place in enumerate(some):
        for column, role in enumerate(family.roles):
            need = program.tasks[role][place].need
            for name, size in need.peak:
                peak[row, categories[name], column] = size
            for name, size in need.kept:
                kept[row, categories[name], column] = size
    numbers = {stream: number for number, stream in enumerate(family.streams)}
    peak_bytes = np.array([[program.tasks[role][place].need.peak_bytes for role in family.roles] for place in some])
    needs = _Needs(
        tuple(some),
        tuple(numbers[family.tasks[place].stream] for place in some),
        tuple(categories),
        peak,
        peak_bytes.reshape(len(some), len(family.roles)),
        kept,
    )
    return Holding(persistent, needs, steps)
