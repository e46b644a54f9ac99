"""What ranks need of their devices' memory: allocated, reserved and outside of the allocator; and whether it is there.

[Note: fits] On a device with PyTorch's caching allocator (kind `cuda`), a plan fits where what the allocator reserves
and what is taken outside of it are no more than the memory; or, where it reserves more, if it can give enough of that
back in time: the step is then replayed with no more than there is. On other devices what is reserved is what is
allocated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gssim.cluster import DeviceType
from gssim.program import Program
from gssim.reservation import Reservation, Reservations, replay
from gssim.result import Fit, Margin
from gssim.scenario import Scenario

ALIKE_RATIO = 0.02
"""Ranks with as many tasks share what their allocators add to their peaks, where these differ by no more than this."""


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

    @property
    def allocated_bytes(self) -> float:
        """The most that is allocated."""
        return sum(self.peak.values())

    @property
    def outside_bytes(self) -> float:
        """All that is taken beside the allocator."""
        return sum(self.outside.values())

    @property
    def category(self) -> str:
        """The largest category at the peak."""
        return max(self.peak, key=lambda category: self.peak[category], default="")

    @property
    def excess_bytes(self) -> float:
        """What the device has too little; 0 where it fits."""
        return max(0.0, self.allocated_bytes + self.outside_bytes - self.memory_bytes, self.missing_bytes)

    @property
    def margin_bytes(self) -> float:
        """What the device has left, with all that is reserved; negative where it does not fit."""
        if self.excess_bytes:
            return -self.excess_bytes
        return self.memory_bytes - self.outside_bytes - self.reserved_bytes


Peak = tuple[int, Mapping[str, float]]
"""A rank, and what it asks for at its worst moment, by category."""


def occupancies(
    scenario: Scenario, program: Program, peaks: Sequence[Peak], *, whole: bool = False
) -> list[Occupancy]:
    """Return what ranks need; `whole`: nothing is extrapolated, and no rank's replay stands for another's."""
    reservations = Reservations(scenario, program, whole=whole)
    replayed: dict[int, list[tuple[float, Reservation]]] = {}
    found: dict[int, Occupancy] = {}
    for place, (rank, peak) in sorted(enumerate(peaks), key=lambda each: -sum(each[1][1].values())):
        device = scenario.cluster.type_of(rank)
        outside = outside_bytes(device, scenario, program, rank)
        occupied = Occupancy(rank, device.memory_bytes, peak, sum(peak.values()), outside)
        if device.kind == "cuda" and peak:
            alike = replayed.setdefault(len(program.tasks[program.role_of[rank]]), [])
            known = occupied.allocated_bytes
            near = [each for at, each in alike if abs(at - known) <= ALIKE_RATIO * at]
            if whole or not near:
                near = [reservations.of(rank, known_bytes=known)]
                alike.append((known, near[0]))
            occupied = _limited(_reserving(occupied, near[0]), program)
        found[place] = occupied
    return [found[place] for place in range(len(peaks))]


def outside_bytes(device: DeviceType, scenario: Scenario, program: Program, rank: int) -> dict[str, float]:
    """Return what a rank takes beside the allocator: the context, and a communicator for each group that it is in."""
    communicators = 0
    if scenario.cluster.backend == "nccl" and device.communicator_bytes:
        families = {each.groups for each in program.communications.values()}
        groups = {frozenset(group) for groups in families for group in groups if len(group) > 1 and rank in group}
        communicators = len(groups)
    sizes = {"context": device.context_bytes, "communicators": communicators * device.communicator_bytes}
    return {name: size for name, size in sizes.items() if size}


def _reserving(occupied: Occupancy, found: Reservation) -> Occupancy:
    """Return what a rank needs with what its allocator adds to what is asked of it."""
    rounding = max(0.0, found.allocated_bytes - found.requested_bytes)
    peak = {**occupied.peak, "rounding": rounding} if rounding else occupied.peak
    unused = max(0.0, found.reserved_bytes - found.allocated_bytes)
    return replace(occupied, peak=peak, reserved_bytes=sum(peak.values()) + unused)


def _limited(occupied: Occupancy, program: Program) -> Occupancy:
    """Return what a rank needs where its allocator would reserve more than there is, and must give back in time."""
    room = occupied.memory_bytes - occupied.outside_bytes
    if occupied.reserved_bytes <= room or occupied.allocated_bytes > room:
        return occupied
    found = replay(program, program.role_of[occupied.rank], limit_bytes=room)
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
