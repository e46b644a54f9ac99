"""Replays the tensors of a rank's steps through a model of PyTorch's caching allocator.

[Note: order of tensors] Persistent tensors are allocated first, with two exceptions. torch allocates the optimizer's
states in the first update, once the gradients are cast for it. The workspaces of libraries are allocated where a thread
first multiplies: assumed to be the beginning of the first forward, and the end of the first task of the first backward
(the loss). Then two steps are replayed; the second one finds all of these allocated, and further ones would reserve no
more. A free releases the oldest tensor of its category and size, but the latest for activations, which the backward
frees in reverse order, and for a gradient that is added to an earlier one or copied elsewhere. A free of which only the
sum is known takes any tensors of the category.

[Note: cycles] The parts of a pipeline rank's step repeat. If all blocks, allocated and free, are the same after some
repetitions as before, the next ones change nothing either: they are passed over. A replay that is in the same state
serves the same requests in the same way, so peaks are those of a replay of everything.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import NamedTuple

from gssim.engine import MEMORY_STEPS
from gssim.memory import (
    Block,
    CachingAllocator,
    Event,
    Footprint,
    Kind,
    KnownRequests,
    NoMemoryLeftError,
    RepeatedRequests,
    Request,
    rounded_bytes,
)
from gssim.program import Chunk, Program, Task, without_messages

LATEST_FIRST = ("activations",)
FIRST_REPEATING, FIRST_OF_MANY = 5, 3
"""Number of the first replay of a program that looks up effects of its requests, see [Note: known effects] in
`gssim.memory.known_effects`, in general and if many follow: with fewer replays, describing the blocks takes longer than
it saves."""
MIN_REQUESTS = 20
"""Fewest requests of a part whose effect is looked up instead of serving them."""
MIN_REPETITIONS = 3
"""Fewest repetitions in which cycles are looked for: one to compare, and some to pass over."""
MAX_STATES = 512
"""Most states of repetitions that are kept for comparison, each with a few hundred blocks."""


@dataclass(frozen=True)
class AllocatorPeaks:
    """Peaks of a replay, in bytes."""

    requested_bytes: float
    allocated_bytes: float
    """Bytes in allocated blocks: sizes are rounded up, and include remainders too small to be split off."""
    reserved_bytes: float
    missing_bytes: float = 0.0
    """Bytes that the device lacked when a request failed, which ended the replay."""


def replay(
    program: Program,
    role: int,
    *,
    parts: Sequence[Task | Chunk] | None = None,
    limit_bytes: float | None = None,
    expandable_segments: bool = False,
    pass_over: bool = True,
    many: bool = False,
) -> AllocatorPeaks:
    """Return the allocator's peaks over a role's steps; see [Note: order of tensors].

    `parts`: replaces the role's own. `limit_bytes`: memory of the device available to the allocator. `pass_over`:
    whether to pass over repetitions that change nothing; see [Note: cycles]. `many`: whether many roles of the program
    are replayed.
    """
    allocator = CachingAllocator(limit_bytes=limit_bytes, expandable_segments=expandable_segments)
    can_repeat = limit_bytes is None and not expandable_segments and pass_over
    live = _LiveTensors(allocator, program.once(_Repeated).of_replay(many=many) if can_repeat else None)
    missing = 0
    try:
        _run(program, role, without_messages(program.tasks[role]) if parts is None else parts, live, pass_over)
    except NoMemoryLeftError as error:
        missing = error.missing_bytes
    return AllocatorPeaks(
        allocator.peak_requested_bytes, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, missing
    )


class _Repeated:
    """Requests that a program's replays have in common."""

    def __init__(self, _program: Program) -> None:
        self.replays = 0
        self.requests: dict[tuple[int, ...], RepeatedRequests] = {}
        """Requests of a part of a step, by `_Part.identities`."""

    def of_replay(self, *, many: bool) -> dict[tuple[int, ...], RepeatedRequests] | None:
        """Count a replay, and return the requests that it shares with others; None for the first replays."""
        self.replays += 1
        return self.requests if self.replays >= (FIRST_OF_MANY if many else FIRST_REPEATING) else None


Kept = tuple[str, Sequence[float]]
"""Tensors that stay: their category, and the bytes of each."""


class _Part(NamedTuple):
    """A task, or the tasks of a chunk."""

    number: int
    """Equal for parts with the same requests; negative if there are no others."""
    needs: Sequence[tuple[Footprint, Kept | None]]
    """Memory of its tasks, and tensors that stay, allocated at the beginning of a task."""

    @property
    def identities(self) -> tuple[int, ...]:
        """The `id` of the memory of each task."""
        return tuple([id(need) for need, _ in self.needs])


def _run(program: Program, role: int, parts: Sequence[Task | Chunk], live: "_LiveTensors", pass_over: bool) -> None:
    whole = {category: (size,) for category, size in program.persistent[role].items() if size}
    tensors: Mapping[str, Sequence[float]] = program.tensors[role]() if program.tensors else whole
    for category, sizes in tensors.items():
        if category not in ("optimizer", "workspace"):
            live.carry_out(iter(live.kept(category, sizes)))
    in_order = list(_in_order(parts, tensors))
    numbers, latest = [part.number for part in in_order], dict[int, int]()
    place = 0
    while place < len(in_order):
        number = numbers[place]
        period = place - latest[number] if number in latest and pass_over else 0
        has_room = 0 < MIN_REPETITIONS * period <= len(numbers) - place
        count = _repetitions(numbers, place, period) if has_room else 0
        if count >= MIN_REPETITIONS:
            _serve_repetitions(in_order[place : place + period], count, live)
        else:
            period = count = 1
            live.serve(in_order[place])
        place += count * period
        latest.update((numbers[each], each) for each in range(place - period, place))


def _in_order(parts: Sequence[Task | Chunk], tensors: Mapping[str, Sequence[float]]) -> Iterator[_Part]:
    """Yield what is replayed after the first persistent tensors; see [Note: order of tensors]."""
    workspaces = tensors.get("workspace", ())
    waiting: dict[str, tuple[int, Kept]] = {
        "optimizer": (1, ("optimizer", tensors.get("optimizer", ()))),
        "forward": (1, ("workspace", workspaces[:2])),
        "backward": (2, ("workspace", workspaces[2:])),
    }
    """By phase: at the beginning of which of its tasks further tensors are allocated, and these."""
    begun: Counter[str] = Counter()
    made: dict[int, tuple[_Part, Counter[str]]] = {}
    for _ in range(MEMORY_STEPS):
        for part in parts:
            number = id(part) if isinstance(part, Task) else id(part.template)
            if number not in made:
                tasks = [part] if isinstance(part, Task) else part.template.tasks
                own = [task for task in tasks if task.need.events or task.phase == "optimizer"]
                alike = id(part.need) if isinstance(part, Task) else number
                made[number] = _Part(alike, [(task.need, None) for task in own]), Counter(task.phase for task in own)
            found, phases = made[number]
            if not found.needs:
                continue
            if waiting:
                due = [name for name, (count, _) in waiting.items() if begun[name] + phases[name] >= count]
                if due:
                    tasks = [part] if isinstance(part, Task) else part.template.tasks
                    found = _Part(-1 - begun.total(), list(_with_kept(tasks, begun, waiting)))
                    waiting = {name: kept for name, kept in waiting.items() if name not in due}
                for phase, count in phases.items():  # many times faster than `Counter.update`
                    begun[phase] += count
            yield found


def _with_kept(
    tasks: Sequence[Task], begun: Counter[str], waiting: Mapping[str, tuple[int, Kept]]
) -> Iterator[tuple[Footprint, Kept | None]]:
    now = Counter(begun)
    for task in tasks:
        if task.need.events or task.phase == "optimizer":
            now[task.phase] += 1
            count, kept = waiting.get(task.phase, (0, None))
            yield task.need, kept if count == now[task.phase] else None


def _repetitions(numbers: Sequence[int], place: int, period: int) -> int:
    """Return how often the last `period` parts before a place are repeated from there on.

    >>> _repetitions([1, 2, 3, 2, 3, 2, 3, 2], 3, 2)
    2
    """
    count = 0
    repeated = numbers[place - period : place]
    while period and numbers[place + count * period : place + (count + 1) * period] == repeated:
        count += 1
    return count


def _serve_repetitions(parts: Sequence[_Part], count: int, live: "_LiveTensors") -> None:
    """Serve equal requests `count` times, or until the rest is known to change nothing; see [Note: cycles].

    Each state is compared with all those before it (with the latest `MAX_STATES`): blocks of equal size often take
    turns, so that a state comes back after two to six repetitions.
    """
    requested = live.allocator.requested_bytes
    numbers: dict[Hashable, int] = {}
    """Number of repetitions left, by the state in which they begin."""
    is_open = True
    while count:
        for part in parts:
            live.serve(part)
        count -= 1
        is_open = is_open and live.allocator.requested_bytes == requested
        if not is_open:
            continue
        before = numbers.setdefault(live.state(), count)
        if before != count:
            is_open, count = False, count % (before - count)
        elif len(numbers) == MAX_STATES:
            numbers.clear()


class _LiveTensors:
    """The live tensors of a replay."""

    def __init__(self, allocator: CachingAllocator, repeated: dict[tuple[int, ...], RepeatedRequests] | None) -> None:
        self.allocator, self._repeated = allocator, repeated
        self.alive: dict[Kind, list[Block]] = {}
        self._kinds: dict[int, Kind] = {}
        """Kind of tensor by identity of the list of live blocks."""
        self._made: dict[tuple[Kind, str], tuple[Request, Request, Request]] = {}
        """Allocation of a tensor on a stream, its free, and its free as the latest of its kind."""
        self._needed: dict[int, list[Request]] = {}
        self._of_part: dict[int, list[Request]] = {}
        self._known: dict[int, KnownRequests] = {}
        """Repeated requests of parts, by number."""

    def carry_out(self, requests: Iterator[Request]) -> None:
        """Serve allocations and frees. A free without a tensor of its key takes other tensors of the category."""
        while (unknown := self.allocator.serve(requests)) is not None:
            alike, _, _, size, *_ = unknown
            self._give_back(self._kinds[id(alike)][0], size)

    def kept(self, category: str, sizes: Sequence[float]) -> list[Request]:
        """Return the allocations of tensors that stay."""
        return self.requests_of([Event(0, sum(sizes), category, tuple(sizes))])

    def serve(self, part: _Part) -> None:
        """Serve the allocations and frees of a part of the step, which are worked out once for equal parts."""
        known = self._known_requests(part)
        if known is not None and known.serve():
            return
        requests = self._of_part.get(part.number)
        if requests is not None:
            self.carry_out(iter(requests))
            return
        made: list[Request] = []

        def in_turn() -> Iterator[Request]:
            for need, kept in part.needs:
                own = self.requests_of_task(need) if kept is None else self._with_kept(need, kept)
                made.extend(own)
                yield from own

        self.carry_out(in_turn())
        self._of_part[part.number] = made
        if self._repeated is not None and part.number >= 0 and len(made) >= MIN_REQUESTS:
            self._repeated[part.identities] = RepeatedRequests(made, self._kinds, self.allocator.pools)

    def _known_requests(self, part: _Part) -> KnownRequests | None:
        """Return the requests of a part, if an earlier replay has served the same ones."""
        known = self._known.get(part.number)
        if known is None and self._repeated and part.number >= 0 and len(part.needs) > 1:
            repeated = self._repeated.get(part.identities)
            if repeated is not None and repeated.case([self.alive.get(kind, ()) for kind in repeated.kinds]):
                lists = [self._blocks_of(kind) for kind in repeated.kinds]
                known = self._known[part.number] = KnownRequests(repeated, lists, self.allocator)
        return known

    def _with_kept(self, need: Footprint, kept: Kept) -> list[Request]:
        category, sizes = kept
        # an update's first events are the gradients cast to the type of the master copies
        before = [event for event in need.events if category == "optimizer" and event.position == 0]
        return [
            *self.requests_of(before),
            *self.kept(category, sizes),
            *self.requests_of(need.events[len(before) :]),
        ]

    def state(self) -> Hashable:
        """Return all blocks, allocated and free: equal requests have equal effects in equal states."""
        return self.allocator.state(), tuple(map(tuple, self.alive.values()))

    def requests_of_task(self, need: Footprint) -> list[Request]:
        """Return the allocations and frees of a task, cached by its footprint."""
        requests = self._needed.get(id(need))
        if requests is None:
            requests = self._needed[id(need)] = self.requests_of(need.events)
        return requests

    def requests_of(self, events: Sequence[Event]) -> list[Request]:
        """Return the allocations and frees of events, in their order."""
        requests: list[Request] = []
        for _, change, category, tensors, stream, number, _, latest in events:
            frees, sizes = change < 0, [(abs(change), 1)]
            if tensors:
                sizes = [(size, len(list(several))) for size, several in groupby(tensors)]
            for size, count in sizes if change else ():
                if size < 1:
                    continue
                key = (category, number, size), stream
                made = self._made.get(key)
                if made is None:
                    made = self._made[key] = self._requests_for(*key)
                request = made[frees + latest]
                if count == 1:
                    requests.append(request)
                elif frees:
                    requests.extend(repeat(request, count))
                else:
                    requests.append((*request[:-1], count))
        return requests

    def _requests_for(self, key: Kind, stream: str) -> tuple[Request, Request, Request]:
        category, _, size = key
        rounded = rounded_bytes(size)
        pool, alike = self.allocator.pool_of(rounded, stream), self._blocks_of(key)
        place = -1 if category in LATEST_FIRST else 0
        allocation = (alike, pool, rounded, int(size), place, 1)
        return allocation, (alike, pool, 0, int(size), place, 1), (alike, pool, 0, int(size), -1, 1)

    def _blocks_of(self, key: Kind) -> list[Block]:
        """Return the list of live blocks of tensors with that key."""
        if key not in self.alive:
            self.alive[key] = []
            self._kinds[id(self.alive[key])] = key
        return self.alive[key]

    def _give_back(self, category: str, size_bytes: int) -> None:
        """Free `size_bytes` of a category: the latest kinds of tensors first, and only a part of the last tensor."""
        left = size_bytes
        for key in [key for key in reversed(self.alive) if key[0] == category]:
            alike = self.alive[key]
            if alike and left > 0:
                _, _, requested, pool = alike[-1]  # all blocks of this list have the same size and pool
                count = min(len(alike), -(-left // requested))
                self.allocator.serve(iter([(alike, pool, 0, requested, -1, count)]))
                left -= count * requested
                if left < 0:
                    kept = self.allocator.allocate(-left)
                    assert kept is not None
                    self._blocks_of((category, key[1], float(-left))).append(kept)
