"""Memory footprints of ranks: allocated, reserved and outside the allocator; and whether they fit the devices.

A rank's reserved memory is found by replaying the tensors of its tasks through a model of PyTorch's caching allocator:
see `allocator_replay`.

[Note: fits] On a device with PyTorch's caching allocator (kind `cuda`), a plan fits if the reserved memory and the
memory outside the allocator do not exceed the device's memory. If they would, the plan still fits if the allocator can
release enough cached memory in time: the step is replayed with the device's memory as the limit. If the requested
bytes alone exceed the limit, nothing is replayed, since the step fails before its peak: the peak, and by how much it
exceeds the device, are then those of the requested bytes, without the rounding of blocks (1 % was seen). On other
devices the reserved memory is the allocated memory.

[Note: comparable ranks] Among ranks with equally many tasks and equal allocator settings, two are replayed: those with
the largest and the smallest peak (one, if these are nearly equal). The overhead of peaks in between is interpolated.

[Note: middle] With many micro-batches, those in the middle of the schedule start and end in the same state as the one
before, once the largest number is in flight. They are left out of the replay if the peak of requested bytes, which is
known exactly, stays the same without them.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from gssim.cluster import DeviceType
from gssim.engine import MEMORY_STEPS, MemoryTracker
from gssim.memory.allocator import LARGE_SEGMENT_BYTES, rounded_bytes, segment_bytes
from gssim.program import Chunk, Program, Task, distinct_tasks, template_tasks, without_messages
from gssim.result import CATEGORIES
from gssim.result.result import Fit, Margin
from gssim.scenario import Scenario
from gssim.simulation.allocator_replay import AllocatorPeaks, replay

TOLERANCE_RATIO = 1e-3
"""Largest relative difference between the known peak of requested bytes and the peak without the middle. It is not 0
because some micro-batches hold a tensor more, or free what the one before has gathered."""


def reservation(
    scenario: Scenario, program: Program, rank: int, *, known_bytes: float, many: bool = False
) -> AllocatorPeaks:
    """Return the allocator's peaks for a rank's step; `known_bytes`: the exact peak of requested bytes (see [Note:
    middle]); `many`: as of `replay`.
    """
    role = program.role_of[rank]
    expandable = scenario.cluster.type_of(rank).expandable_segments
    left_out = range(scenario.policies.pp + 2, scenario.plan.micro_batches - 2)
    without_bytes = program.once(_peak_without, role, left_out) if left_out else 0.0
    if abs(without_bytes - known_bytes) <= TOLERANCE_RATIO * known_bytes:
        return program.once(_replay, role, expandable, None, left_out, many)
    return program.once(_replay, role, expandable, None, range(0), many)


def _parts_without(program: Program, role: int, left_out: range) -> list[Task | Chunk]:
    """Return the parts of a role's tasks that belong to none of the micro-batches in `left_out`."""
    parts = without_messages(program.tasks[role])
    numbers = (part.id.micro_batch if isinstance(part, Task) else part.micro_batch for part in parts)
    return [part for part, number in zip(parts, numbers, strict=True) if number is None or number not in left_out]


def _peak_without(program: Program, role: int, left_out: range) -> float:
    """Return the peak of requested bytes without some micro-batches, computed from footprints instead of a replay."""
    memory = MemoryTracker(dict(program.persistent[role]))
    parts = _parts_without(program, role, left_out)
    memory.run([part.need if isinstance(part, Task) else part.template.need for part in parts] * MEMORY_STEPS)
    return memory.peak_bytes


def _replay(
    program: Program,
    role: int,
    expandable: bool,
    limit_bytes: float | None,
    left_out: range = range(0),
    many: bool = False,
) -> AllocatorPeaks:
    """Return the allocator's peaks over a role's steps, without the micro-batches in `left_out`; see [Note: middle]."""
    parts = _parts_without(program, role, left_out) if left_out else None
    return replay(program, role, parts=parts, limit_bytes=limit_bytes, expandable_segments=expandable, many=many)


SIZE_DIGITS = 3
"""Digits to which bytes are rounded. Expected sizes are fractions, whose sums differ by rounding between equal
ranks.
"""
EQUAL_PEAKS_RATIO = 0.02
"""Relative difference up to which peaks count as nearly equal."""
MANY_REPLAYS = 8
"""Fewest sets of comparable ranks from which replays look up what earlier ones did; see `replay`."""


@dataclass(frozen=True)
class MemoryFootprint:
    """Peak memory of a rank, and its device's memory."""

    rank: int
    """The rank; of ranks that share a footprint, the first."""
    memory_bytes: float
    peak: Mapping[str, float]
    """Allocated bytes by category."""
    reserved_bytes: float
    outside: Mapping[str, float] = field(default_factory=dict)
    """Bytes outside the allocator, by cause."""
    missing_bytes: float = 0.0
    """Bytes that the device lacked for a request that it could not serve; 0 if all were served."""

    @cached_property
    def allocated_bytes(self) -> float:
        """Peak of allocated bytes."""
        return sum(self.peak.values())

    @cached_property
    def reported_peak(self) -> dict[str, float]:
        """The peak as Results have it: categories in their order, rounded."""
        present = [category for category in CATEGORIES if category in self.peak]
        rounded = {category: float(round(self.peak[category], SIZE_DIGITS)) for category in present}
        return {category: size for category, size in rounded.items() if size}

    @cached_property
    def reported(self) -> dict[str, Any]:
        """The memory as Results have it; it must not be changed."""
        allocated = sum(self.reported_peak.values(), 0.0)
        reserved = None if self.excess_bytes else max(allocated, round(self.reserved_bytes, SIZE_DIGITS))
        return {
            "peak_allocated_bytes": allocated,
            "peak_reserved_bytes": reserved,
            "fragmentation_ratio": 1 - allocated / reserved if reserved else None,
            "outside_bytes": dict(self.outside),
            "peak_by_category_bytes": self.reported_peak,
        }

    @cached_property
    def reported_key(self) -> str:
        """`reported` as a text, equal for ranks with equal memory. A text keeps its hash, unlike a tuple."""
        return repr(self.reported)

    @cached_property
    def outside_bytes(self) -> float:
        """Total outside the allocator."""
        return sum(self.outside.values())

    @property
    def category(self) -> str:
        """The largest category at the peak."""
        return max(self.peak, key=lambda category: self.peak[category], default="")

    @cached_property
    def excess_bytes(self) -> float:
        """Bytes by which the device's memory is exceeded; 0 if the rank fits."""
        return max(0.0, self.allocated_bytes + self.outside_bytes - self.memory_bytes, self.missing_bytes)

    @cached_property
    def margin_bytes(self) -> float:
        """Bytes of the device that remain free beside all reserved memory; negative if the rank does not fit."""
        if self.excess_bytes:
            return -self.excess_bytes
        return self.memory_bytes - self.outside_bytes - self.reserved_bytes


Peak = Mapping[str, float]
"""Requested bytes by category."""
PeakOfRank = tuple[int, Peak]
"""A rank, and its peak."""


AllocatorOverhead = tuple[float, float, float]
"""A peak of requested bytes, how much the allocated blocks exceed it, and the reserved bytes beyond the blocks."""
Alike = tuple[int, bool]
"""What makes ranks comparable: number of tasks, and whether segments are expandable; see [Note: comparable ranks]."""
Overheads = Mapping[Alike, Sequence[AllocatorOverhead]]
"""Overheads of the largest and smallest peak among comparable ranks (one if these are nearly equal)."""


def footprints_of(
    scenario: Scenario,
    program: Program,
    peaks: Sequence[PeakOfRank],
    *,
    reserved: bool = True,
    overheads: Overheads | None = None,
    beside: Mapping[int, Peak] | None = None,
) -> list[MemoryFootprint]:
    """Return the memory footprints of ranks; see [Note: comparable ranks].

    `reserved`: whether to compute the allocator's overhead; if not, the reserved memory is the allocated memory.
    `overheads`: known overheads of a program that differs only in the sizes of its messages, so that no step is
    replayed. `beside`: bytes that ranks allocate at their peak in addition to the program, by role; the device has that
    much less for the program.

    Ranks of one role on equal devices whose peaks are one object share their footprint: nothing else tells them apart.
    """
    footprints: list[MemoryFootprint] = []
    kinds: dict[Hashable, MemoryFootprint] = {}
    for rank, peak in peaks:
        role, device = program.role_of[rank], scenario.cluster.type_of(rank)
        outside = outside_bytes(device, scenario, program, rank)
        kind = (role, id(device), id(peak), *outside.items())
        if kind not in kinds:
            room_bytes = device.memory_bytes - (sum(beside[role].values()) if beside else 0.0)
            kinds[kind] = MemoryFootprint(rank, room_bytes, peak, sum(peak.values()), outside)
        footprints.append(kinds[kind])
    comparable = _alike(scenario, program, footprints) if reserved else {}
    many = len(comparable) >= MANY_REPLAYS
    for alike, places in comparable.items():
        found = (overheads or {}).get(alike) or _overheads(scenario, program, footprints, places, many=many)
        whole: dict[int, MemoryFootprint] = {}
        for place in places:
            if id(footprints[place]) not in whole:
                with_overhead = _add_overhead(footprints[place], found)
                whole[id(footprints[place])] = _footprint_under_limit(scenario, with_overhead, program)
            footprints[place] = whole[id(footprints[place])]
    if beside:
        for place, footprint in enumerate(footprints):
            sizes = beside[program.role_of[footprint.rank]]
            more_bytes = sum(sizes.values())
            footprints[place] = replace(
                footprint,
                memory_bytes=footprint.memory_bytes + more_bytes,
                peak={**footprint.peak, **{name: footprint.peak.get(name, 0.0) + size for name, size in sizes.items()}},
                reserved_bytes=footprint.reserved_bytes + more_bytes,
            )
    return footprints


def deciding_footprints(scenario: Scenario, program: Program, peaks: Sequence[PeakOfRank]) -> Sequence[MemoryFootprint]:
    """Return footprints with the same `worst_misfit` and `tightest_margin` as those of `footprints_of`.

    Where a rank's allocated memory alone exceeds its device's by more than any request on another device could lack,
    the reserved memory of others decides nothing: no step is replayed.
    """
    allocated = footprints_of(scenario, program, peaks, reserved=False)
    worst = worst_misfit(allocated)
    if worst is not None:
        roles = {program.role_of[each.rank] for each in allocated if not each.excess_bytes}
        if all(program.once(_most_missing_bytes, role) < worst.excess_bytes for role in roles):
            return allocated
    return footprints_of(scenario, program, peaks)


def _most_missing_bytes(program: Program, role: int) -> int:
    """Return an upper bound of the bytes that a device can lack when a request of a role fails.

    That is the largest segment that a request reserves: what was reserved before fits the device.
    """
    needs = {id(task.need): task.need for task in template_tasks(program.tasks[role])}
    sizes = [size for need in needs.values() for event in need.events for size in event.tensors or (event.size_bytes,)]
    largest = max([*sizes, *program.persistent[role].values()], default=0.0)
    return max(LARGE_SEGMENT_BYTES, segment_bytes(rounded_bytes(largest)))


def allocator_overheads(scenario: Scenario, program: Program, peaks: Sequence[PeakOfRank]) -> Overheads:
    """Return the allocator's overheads, computed once for each set of ranks; see [Note: comparable ranks]."""
    footprints = footprints_of(scenario, program, peaks, reserved=False)
    comparable = _alike(scenario, program, footprints)
    many = len(comparable) >= MANY_REPLAYS
    return {alike: _overheads(scenario, program, footprints, places, many=many) for alike, places in comparable.items()}


def _alike(
    scenario: Scenario, program: Program, footprints: Sequence[MemoryFootprint]
) -> Mapping[Alike, Sequence[int]]:
    """Return the indices of the footprints on CUDA devices, grouped by what makes ranks comparable."""
    comparable: dict[Alike, list[int]] = defaultdict(list)
    for place, footprint in enumerate(footprints):
        device = scenario.cluster.type_of(footprint.rank)
        if device.kind == "cuda" and footprint.peak and not footprint.excess_bytes:
            tasks = len(program.tasks[program.role_of[footprint.rank]])
            comparable[tasks, device.expandable_segments].append(place)
    return comparable


def independent_peaks(
    scenario: Scenario, program: Program, peaks: Sequence[PeakOfRank]
) -> Sequence[Sequence[PeakOfRank]]:
    """Return the peaks in sets of comparable ranks, the fullest first; see [Note: comparable ranks]."""
    footprints = footprints_of(scenario, program, peaks, reserved=False)
    sets = list(_alike(scenario, program, footprints).values())
    compared = {place for places in sets for place in places}
    sets += [[place] for place in range(len(peaks)) if place not in compared]
    full = [(each.allocated_bytes + each.outside_bytes) / each.memory_bytes for each in footprints]
    sets.sort(key=lambda places: -max(full[place] for place in places))
    return [[peaks[place] for place in places] for places in sets]


def _overheads(
    scenario: Scenario, program: Program, footprints: Sequence[MemoryFootprint], places: Sequence[int], *, many: bool
) -> Sequence[AllocatorOverhead]:
    """Return the overhead of the largest peak among comparable ranks, and that of the smallest if it differs; `many`:
    as of `replay`.
    """
    by_peak = sorted(places, key=lambda place: (footprints[place].allocated_bytes, -place))
    ends = [footprints[by_peak[-1]], footprints[by_peak[0]]]
    if ends[0].allocated_bytes - ends[1].allocated_bytes <= EQUAL_PEAKS_RATIO * ends[0].allocated_bytes:
        del ends[1]
    found = []
    for end in ends:
        peaks = reservation(scenario, program, end.rank, known_bytes=end.allocated_bytes, many=many)
        rounding, unused = peaks.allocated_bytes - peaks.requested_bytes, peaks.reserved_bytes - peaks.allocated_bytes
        found.append((end.allocated_bytes, rounding, unused))
    return found


def _add_overhead(footprint: MemoryFootprint, overheads: Sequence[AllocatorOverhead]) -> MemoryFootprint:
    """Return a footprint with its allocator's overhead, interpolated between two known ones."""
    (largest_peak, *largest), (smallest_peak, *smallest) = overheads[0], overheads[-1]
    part = (
        min(1.0, max(0.0, (largest_peak - footprint.allocated_bytes) / (largest_peak - smallest_peak)))
        if largest_peak > smallest_peak
        else 0.0
    )
    rounding, unused = (max(0.0, a + part * (b - a)) for a, b in zip(largest, smallest, strict=True))
    peak = {**footprint.peak, "rounding": rounding} if rounding else footprint.peak
    return replace(footprint, peak=peak, reserved_bytes=sum(peak.values()) + unused)


def outside_bytes(device: DeviceType, scenario: Scenario, program: Program, rank: int) -> dict[str, float]:
    """Return a rank's memory outside the allocator: the context, a communicator for each of its groups, and buffers of
    exchanges that run beside products.
    """
    communicators = 0
    if scenario.cluster.backend == "nccl" and device.communicator_bytes:
        communicators = program.once(_communicators)[rank]
    sizes = {
        "context": device.context_bytes,
        "communicators": communicators * device.communicator_bytes,
        "exchange_buffers": _exchange_buffers_bytes(scenario, program, rank),
    }
    return {name: size for name, size in sizes.items() if size}


USERBUFFERS = 12
"""Buffers of a gathered sequence that Transformer Engine keeps on every rank, one for each product of a block that has
an exchange beside it: forward, and gradients of input and weight, of the maps of the attention and the perceptron.

Source: transformer_engine/pytorch/module/base.py, initialize_ub (10 before gradients of weights of the last maps had
their own), from the driver (common/comm_gemm_overlap/userbuffers/userbuffers-host.cpp).
"""
SYMMETRIC_CHUNKS = 2
"""Parts of a gathered sequence in the workspace of a group of torch's asynchronous tensor parallelism.

Source: torch/distributed/_symmetric_memory, _pipelined_produce_and_all2all; from the driver too.
"""


def _exchange_buffers_bytes(scenario: Scenario, program: Program, rank: int) -> float:
    """Return the bytes of the buffers by which exchanges run beside products (`plan.tp_overlap`).

    Megatron-LM, which gathers inputs again, keeps Transformer Engine's. A ring of messages has none.
    """
    if not scenario.plan.tp_overlap or scenario.multiplies_in_ring:
        return 0.0
    largest_bytes = program.once(_largest_sequence_bytes)
    if scenario.plan.gathered_inputs == "gathered-again":
        return USERBUFFERS * largest_bytes[rank]
    return SYMMETRIC_CHUNKS * largest_bytes[rank] / scenario.policies.tp


def _largest_sequence_bytes(program: Program) -> dict[int, float]:
    """Return the bytes of the largest gathered part of sequences of each rank; 0 for ranks that gather none."""
    size_bytes: dict[Sequence[Sequence[int]], float] = {}
    """Largest size by groups: very many layers gather in the same ones."""
    for task in chain.from_iterable(map(distinct_tasks, program.tasks)):  # chunks repeat them for every micro-batch
        gather = task.exchange
        if gather is not None and task.communication is not None and task.communication.op == "gather-sequence":
            size_bytes[gather.groups] = max(size_bytes.get(gather.groups, 0.0), gather.size_bytes)
    largest: dict[int, float] = dict.fromkeys(range(len(program.role_of)), 0.0)
    for groups, most_bytes in size_bytes.items():
        for rank in chain.from_iterable(groups):
            largest[rank] = max(largest[rank], most_bytes)
    return largest


def _communicators(program: Program) -> Counter[int]:
    """Return the number of communicators of each rank: one for each of its groups."""
    return Counter(chain.from_iterable(program.communicating_groups))


def _footprint_under_limit(scenario: Scenario, footprint: MemoryFootprint, program: Program) -> MemoryFootprint:
    """Return a rank's footprint if the allocator releases free segments once the device has no memory left."""
    room = footprint.memory_bytes - footprint.outside_bytes
    if footprint.reserved_bytes <= room or footprint.allocated_bytes > room:
        return footprint
    expandable = scenario.cluster.type_of(footprint.rank).expandable_segments
    role = program.role_of[footprint.rank]
    peaks = program.once(_replay, role, expandable, room)
    if peaks.missing_bytes:
        return replace(footprint, missing_bytes=peaks.missing_bytes)
    return replace(footprint, reserved_bytes=peaks.reserved_bytes)


def worst_misfit(footprints: Sequence[MemoryFootprint]) -> Fit | None:
    """Return the rank that exceeds its device's memory by the most bytes; None if all fit."""
    worst = max(footprints, key=lambda footprint: footprint.excess_bytes)
    if not worst.excess_bytes:
        return None
    return Fit(rank=worst.rank, category=worst.category, excess_bytes=worst.excess_bytes)


def host_misfit(scenario: Scenario, program: Program) -> Fit | None:
    """Return the host whose memory its ranks exceed by the most bytes, reported as its first rank; None if all fit."""
    least = host_margin(scenario, program)
    if least is None or least.margin_bytes >= 0:
        return None
    return Fit(rank=least.rank, category=least.category, excess_bytes=-least.margin_bytes, memory="host")


def host_margin(scenario: Scenario, program: Program) -> Margin | None:
    """Return the fullest host's memory to spare, reported as its first rank; None if ranks keep nothing on hosts."""
    host = scenario.cluster.host
    if host is None or not program.on_host:
        return None
    held: dict[str, Counter[str]] = defaultdict(Counter)
    first: dict[str, int] = {}
    for rank, role in enumerate(program.role_of):
        name = scenario.cluster.devices[rank].host
        first.setdefault(name, rank)
        held[name].update(program.on_host[role])
    name = max(held, key=lambda each: held[each].total())
    return Margin(
        rank=first[name],
        category=held[name].most_common(1)[0][0],
        margin_bytes=host.memory_bytes - held[name].total(),
        memory_bytes=host.memory_bytes,
    )


def tightest_margin(footprints: Sequence[MemoryFootprint]) -> Margin:
    """Return the rank whose device has the least memory to spare."""
    least = min(footprints, key=lambda footprint: footprint.margin_bytes)
    return Margin(
        rank=least.rank, category=least.category, margin_bytes=least.margin_bytes, memory_bytes=least.memory_bytes
    )
