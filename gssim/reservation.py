"""What a rank's step makes PyTorch's caching allocator reserve: its tasks' tensors, replayed in the order of the host.

[Note: order of tensors] First comes what is held all the time but the optimizer's states, which torch makes in the
first update, and the workspaces of libraries, which are made where a thread first multiplies: taken to be the beginning
of the first forward, and what follows the first task of the first backward (the loss). Then come two steps, of which
the second finds all that. (More take nothing more of the device.) What is given back is the oldest of the tensors of
its category and size; of activations, which the backward frees in the reverse order, the latest. Frees that tell a sum
alone take whatever is there of the category.

[Note: middle] Of many micro-batches, those in the middle find and leave what the one before them did, once as many are
under way as ever are. They are left out, where the peak of what is asked for, of which the exact value is known, stays
what it is without them.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from gssim.allocator import Block, CachingAllocator, NoMemoryLeftError, Request, rounded_bytes
from gssim.memory import Event, Footprint
from gssim.program import Program, Task
from gssim.scenario import Scenario

STEPS = 2
TOLERANCE_RATIO = 1e-3
"""Between the replay's peak of what is asked for and the known one."""
LATEST_FIRST = ("activations",)
MICRO_BATCH = re.compile(r" micro-batch (\d+)")


@dataclass(frozen=True)
class Reservation:
    """Peaks of a replay, in bytes."""

    requested_bytes: float
    allocated_bytes: float
    """In blocks: rounded up, and with what was too little to be split off."""
    reserved_bytes: float
    missing_bytes: float = 0.0
    """What the device lacked when a request failed; the replay then ended."""


def reservation(scenario: Scenario, program: Program, rank: int, *, known_bytes: float) -> Reservation:
    """Return what a rank's step reserves; `known_bytes`: the exact peak of what it asks for; see [Note: middle]."""
    role = program.role_of[rank]
    expandable = scenario.cluster.type_of(rank).expandable_segments
    short = _without_middle(scenario, program.tasks[role])

    def replayed(tasks: Sequence[Task]) -> Reservation:
        key = ("replay", role, len(tasks), expandable)
        return program.once(key, lambda: replay(program, role, tasks=tasks, expandable_segments=expandable))

    if len(short) < len(program.tasks[role]):
        found = replayed(short)
        if abs(found.requested_bytes - known_bytes) <= TOLERANCE_RATIO * known_bytes:
            return found
    return replayed(program.tasks[role])


def _without_middle(scenario: Scenario, tasks: Sequence[Task]) -> Sequence[Task]:
    """Return tasks without those of micro-batches that find and leave what the one before them did."""
    count, ranks = scenario.plan.micro_batches, scenario.policies.pp
    first, last = ranks + 2, count - 2
    if last <= first:
        return tasks
    return [task for task in tasks if not (m := MICRO_BATCH.search(task.label)) or not first <= int(m[1]) < last]


# The replay ----------------------------------------------------------------------------------------------------------


def replay(
    program: Program,
    role: int,
    *,
    tasks: Sequence[Task] | None = None,
    limit_bytes: float | None = None,
    expandable_segments: bool = False,
) -> Reservation:
    """Return the peaks of a role's steps; see [Note: order of tensors].

    `tasks`: in the place of all that the role has. `limit_bytes`: what the device has for the allocator.
    """
    allocator = CachingAllocator(limit_bytes=limit_bytes, expandable_segments=expandable_segments)
    held = _Held(allocator)
    missing = 0
    try:
        _run(program, role, program.tasks[role] if tasks is None else tasks, held)
    except NoMemoryLeftError as error:
        missing = error.missing_bytes
    return Reservation(
        allocator.peak_requested_bytes, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, missing
    )


def _run(program: Program, role: int, tasks: Sequence[Task], held: "_Held") -> None:
    whole = {category: (size,) for category, size in program.persistent[role].items() if size}
    tensors: Mapping[str, Sequence[float]] = program.tensors[role]() if program.tensors else whole
    needs = [(task.need, task.phase) for task in tasks if task.need.events or task.phase == "optimizer"]
    workspaces = tensors.get("workspace", ())
    late = {
        ("optimizer", 1): ("optimizer", tensors.get("optimizer", ())),
        ("forward", 1): ("workspace", workspaces[:2]),
        ("backward", 2): ("workspace", workspaces[2:]),
    }

    def requests() -> Iterator[Sequence[Request]]:
        for category, sizes in tensors.items():
            if category not in ("optimizer", "workspace"):
                yield held.kept(category, sizes)
        begun: Counter[str] = Counter()
        for _ in range(STEPS):
            for need, phase in needs:
                begun[phase] += 1
                if (phase, begun[phase]) in late:
                    yield held.kept(*late[phase, begun[phase]])
                yield held.needed(need)

    held.carry_out(chain.from_iterable(requests()))


Key = tuple[str, int, float]
"""Category, number in the layer, and bytes of a tensor: what it is found by when it is given back."""


class _Held:
    """The tensors of a replay that are there."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.alive: dict[Key, list[Block]] = {}
        self._categories: dict[int, str] = {}
        """By (the identity of) the lists of blocks that are alive."""
        self._made: dict[tuple[Key, str], tuple[Request, Request]] = {}
        """What takes a tensor on a stream, and what gives it back."""
        self._needed: dict[int, list[Request]] = {}

    def carry_out(self, requests: Iterator[Request]) -> None:
        """Take and give back."""
        while (unknown := self.allocator.serve(requests)) is not None:
            alike, _, _, size, _ = unknown
            self._give_back(self._categories[id(alike)], size)

    def kept(self, category: str, sizes: Sequence[float]) -> list[Request]:
        """Return what takes tensors that stay."""
        return self._requests_of([Event(0, sum(sizes), category, tuple(sizes))])

    def needed(self, need: Footprint) -> list[Request]:
        """Return what takes and gives back what a task does."""
        requests = self._needed.get(id(need))
        if requests is None:
            requests = self._needed[id(need)] = self._requests_of(need.events)
        return requests

    def _requests_of(self, events: Sequence[Event]) -> list[Request]:
        found: list[Request] = []
        for event in events:
            gives = event.size_bytes < 0
            sizes = event.tensors or (abs(event.size_bytes),)
            for size in sizes if event.size_bytes else ():
                if size >= 1:
                    key = ((event.category, event.number, size), event.stream)
                    if key not in self._made:
                        self._made[key] = self._requests_for(*key)
                    found.append(self._made[key][gives])
        return found

    def _requests_for(self, key: Key, stream: str) -> tuple[Request, Request]:
        category, _, size = key
        rounded = rounded_bytes(size)
        pool, alike = self.allocator.pool_of(rounded, stream), self._alike(key)
        place = -1 if category in LATEST_FIRST else 0
        return (alike, pool, rounded, int(size), place), (alike, pool, 0, int(size), place)

    def _alike(self, key: Key) -> list[Block]:
        """Return where blocks of tensors of a kind are kept."""
        if key not in self.alive:
            self.alive[key] = []
            self._categories[id(self.alive[key])] = key[0]
        return self.alive[key]

    def _give_back(self, category: str, size_bytes: int) -> None:
        """Give back as many bytes of a category as there are, the latest kinds of tensors first; of one, a part."""
        left = size_bytes
        for key in [key for key in reversed(self.alive) if key[0] == category]:
            alike = self.alive[key]
            while alike and left > 0:
                block = alike.pop()
                self.allocator.free(block)
                _, _, requested, _ = block
                rest = requested - left
                left -= requested
                if rest > 0:
                    kept = self.allocator.allocate(rest)
                    assert kept is not None
                    self._alike((category, key[1], float(rest))).append(kept)
