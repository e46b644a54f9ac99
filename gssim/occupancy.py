"""What ranks need of their devices' memory: allocated, reserved and outside of the allocator; and whether it is there.

[Note: fits] On a device with PyTorch's caching allocator (kind `cuda`), a plan fits where what the allocator reserves
and what is taken outside of it are no more than the memory; or, where it reserves more, if it can give enough of that
back in time: the step is then replayed with no more than there is. Where what is allocated is too much already, nothing
is replayed: the step ends before its peak. On other devices what is reserved is what is allocated.

[Note: alike] Of ranks with as many tasks and segments of the same kind, the two whose peaks are largest and smallest
are replayed, or one where these are nearly equal. What the allocator adds to the peaks between them is taken to grow in
proportion.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gssim.cluster import DeviceType
from gssim.program import Program
from gssim.reservation import Reservation, replay, reservation
from gssim.result import Fit, Margin
from gssim.scenario import Scenario

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
