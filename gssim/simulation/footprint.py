"""What ranks need of their devices' memory: allocated, reserved and outside of the allocator; and whether it is there.

[Note: fits] On a device with PyTorch's caching allocator (kind `cuda`), a plan fits where what the allocator reserves
and what is taken outside of it are no more than the memory; or, where it reserves more, if it can give enough of that
back in time: the step is then replayed with no more than there is. Where what is allocated is too much already, nothing
is replayed: the step ends before its peak. On other devices what is reserved is what is allocated.

[Note: alike] Of ranks with as many tasks and segments of the same kind, the two whose peaks are largest and smallest
are replayed, or one where these are nearly equal. What the allocator adds to the peaks between them is taken to grow in
proportion.

What a rank's step makes PyTorch's caching allocator reserve: its tasks' tensors, replayed in the order of the host.

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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from gssim.cluster import DeviceType
from gssim.memory import Block, CachingAllocator, Event, Footprint, NoMemoryLeftError, Request, rounded_bytes
from gssim.program import Program, Task
from gssim.result import Fit, Margin
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


ALIKE_RATIO = 0.02
"""Peaks that differ by no more than this are nearly equal."""


@dataclass(frozen=True)
class Occupancy:
    """What a rank needs at its worst moments, and what its device has."""

    rank: int
    memory_bytes: float
    peak: Mapping[str, float]
    """What is allocated, by category."""
    reserved_bytes: float
    outside: Mapping[str, float] = field(default_factory=dict)
    """What is taken beside the allocator, by what takes it."""
    missing_bytes: float = 0.0
    """What a request lacked that the device could not serve."""

    @cached_property
    def allocated_bytes(self) -> float:
        """The most that is allocated."""
        return sum(self.peak.values())

    @cached_property
    def outside_bytes(self) -> float:
        """All that is taken beside the allocator."""
        return sum(self.outside.values())

    @property
    def category(self) -> str:
        """The largest category at the peak."""
        return max(self.peak, key=lambda category: self.peak[category], default="")

    @cached_property
    def excess_bytes(self) -> float:
        """What the device has too little; 0 where it fits."""
        return max(0.0, self.allocated_bytes + self.outside_bytes - self.memory_bytes, self.missing_bytes)

    @cached_property
    def margin_bytes(self) -> float:
        """What the device has left, with all that is reserved; negative where it does not fit."""
        if self.excess_bytes:
            return -self.excess_bytes
        return self.memory_bytes - self.outside_bytes - self.reserved_bytes


Peak = tuple[int, Mapping[str, float]]
"""A rank, and what it asks for at its worst moment, by category."""


def occupancies(scenario: Scenario, program: Program, peaks: Sequence[Peak]) -> list[Occupancy]:
    """Return what ranks need; see [Note: alike]."""
    found = []
    for rank, peak in peaks:
        device = scenario.cluster.type_of(rank)
        outside = outside_bytes(device, scenario, program, rank)
        found.append(Occupancy(rank, device.memory_bytes, peak, sum(peak.values()), outside))
    alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for place, each in enumerate(found):
        device = scenario.cluster.type_of(each.rank)
        if device.kind == "cuda" and each.peak and not each.excess_bytes:
            tasks = len(program.tasks[program.role_of[each.rank]])
            alike[tasks, device.expandable_segments].append(place)
    for places in alike.values():
        by_peak = sorted(places, key=lambda place: (found[place].allocated_bytes, -place))
        ends = [found[by_peak[-1]], found[by_peak[0]]]
        if ends[0].allocated_bytes - ends[1].allocated_bytes <= ALIKE_RATIO * ends[0].allocated_bytes:
            del ends[1]
        added = [_added(scenario, program, end) for end in ends]
        for place in places:
            found[place] = _limited(scenario, _with_added(found[place], added), program)
    return found


Added = tuple[float, float, float]
"""A peak, what the allocator's blocks are larger than that, and what it then reserves beside them, in bytes."""


def _added(scenario: Scenario, program: Program, occupied: Occupancy) -> Added:
    """Return what a rank's allocator adds to its peak."""
    peak_bytes = occupied.allocated_bytes
    found = reservation(scenario, program, occupied.rank, known_bytes=peak_bytes)
    return peak_bytes, found.allocated_bytes - found.requested_bytes, found.reserved_bytes - found.allocated_bytes


def _with_added(occupied: Occupancy, added: Sequence[Added]) -> Occupancy:
    """Return what a rank needs with what its allocator adds, which is in proportion between two that are known."""
    (most, *largest), (least, *smallest) = added[0], added[-1]
    part = (most - occupied.allocated_bytes) / (most - least) if most > least else 0.0
    rounding, unused = (max(0.0, a + part * (b - a)) for a, b in zip(largest, smallest, strict=True))
    peak = {**occupied.peak, "rounding": rounding} if rounding else occupied.peak
    return replace(occupied, peak=peak, reserved_bytes=sum(peak.values()) + unused)


def outside_bytes(device: DeviceType, scenario: Scenario, program: Program, rank: int) -> dict[str, float]:
    """Return what a rank takes beside the allocator: the context, and a communicator for each group that it is in."""
    communicators = 0
    if scenario.cluster.backend == "nccl" and device.communicator_bytes:
        families = {each.groups for each in program.communications.values()}
        groups = {frozenset(group) for groups in families for group in groups if len(group) > 1 and rank in group}
        communicators = len(groups)
    sizes = {"context": device.context_bytes, "communicators": communicators * device.communicator_bytes}
    return {name: size for name, size in sizes.items() if size}


def _limited(scenario: Scenario, occupied: Occupancy, program: Program) -> Occupancy:
    """Return what a rank needs where its allocator would reserve more than there is, and must give back in time."""
    room = occupied.memory_bytes - occupied.outside_bytes
    if occupied.reserved_bytes <= room or occupied.allocated_bytes > room:
        return occupied
    expandable = scenario.cluster.type_of(occupied.rank).expandable_segments
    role = program.role_of[occupied.rank]

    def made() -> Reservation:
        return replay(program, role, limit_bytes=room, expandable_segments=expandable)

    found = program.once(("limited replay", role, room, expandable), made)
    if found.missing_bytes:
        return replace(occupied, missing_bytes=found.missing_bytes)
    return replace(occupied, reserved_bytes=found.reserved_bytes)


def misfit(found: Sequence[Occupancy]) -> Fit | None:
    """Return where memory is exceeded most, if anywhere."""
    worst = max(found, key=lambda each: each.excess_bytes)
    if not worst.excess_bytes:
        return None
    return Fit(rank=worst.rank, category=worst.category, excess_bytes=worst.excess_bytes)


def tightest(found: Sequence[Occupancy]) -> Margin:
    """Return the rank whose device has least to spare."""
    least = min(found, key=lambda each: each.margin_bytes)
    return Margin(
        rank=least.rank, category=least.category, margin_bytes=least.margin_bytes, memory_bytes=least.memory_bytes
    )
