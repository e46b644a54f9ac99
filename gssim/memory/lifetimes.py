"""Lifetimes of a layer's buffers as memory events, their peak footprint, and workspaces of reductions on a GPU.

All are pure functions of the model file. torch's reductions over rows divide the rows among many thread blocks, which
combine their sums in a global buffer. Source: torch 2.11, aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig,
ReduceConfig.global_memory_size), for sums of contiguous rows. The peaks of nine runs of four models on an H200 agree to
512 bytes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from gssim.cluster import DeviceType
from gssim.scenario import layer_profile
from gssim.workload import (
    Buffer,
    ImageInput,
    Layer,
    LayerInstance,
    Model,
    Moment,
    Workload,
    for_samples,
    gradient_order,
)
from gssim.workload.layer import OPERAND_CASTS, REPLACED
from gssim.workload.owned import LAST

LARGEST_BLOCK_THREADS = 512
WARP_THREADS = 32
VECTOR = 4
"""Adjacent columns that one thread sums; fewer if the number of columns is not a multiple of it."""
LEAST_ROWS, MOST_ROWS = 16, 256
"""Rows that one thread sums: at least 16 if rows are divided among thread blocks; below 256 they are not divided."""


def reduction_buffer_bytes(rows: int, columns: int, *, value_bytes: int, resident_threads: int | None) -> int:
    """Return the bytes of the buffer for sums of all columns over rows; 0 if rows are not divided among thread blocks.

    `value_bytes`: bytes of the accumulation type, which is fp32 for half precisions. `resident_threads`: threads that
    the device runs at once; None: enough for all blocks. Each block has room for its own columns once for every column:
    with enough threads, and a number of columns that is a multiple of 128, the buffer is twice the size of the summed
    tensor.

    >>> reduction_buffer_bytes(8192, 384, value_bytes=4, resident_threads=None) // 2**20
    24
    """
    vector = next(size for size in (VECTOR, 2, 1) if columns % size == 0)
    # a block's threads along columns (vectors of them) and rows: powers of two, a warp wide if both allow
    threads = LARGEST_BLOCK_THREADS // vector
    most_wide, most_high = (min(threads, 1 << (count.bit_length() - 1)) for count in (columns // vector, rows))
    height = min(most_high, threads // min(most_wide, WARP_THREADS))
    width = min(most_wide, threads // height)
    rows_of_thread = -(-rows // height)
    blocks = -(-(columns // vector) // width)
    at_once = blocks * rows if resident_threads is None else resident_threads // (width * height)
    if rows_of_thread < MOST_ROWS or blocks > at_once:
        return 0
    shared_by = max(min(-(-at_once // blocks), -(-rows_of_thread // LEAST_ROWS)), -(-rows_of_thread // MOST_ROWS))
    return value_bytes * columns * shared_by * width * vector if shared_by > 1 else 0


Bytes = tuple[tuple[str, float], ...]
"""Bytes by category, sorted by category."""


class Event(NamedTuple):
    """An allocation or (negative) release of memory at a position of a layer's phase.

    Of events at one position, allocations come before releases, except for `early` releases.
    """

    position: float
    """Position of an operation, or a number between those of two operations."""
    size_bytes: float
    category: str
    tensors: Sequence[float] = ()
    """Bytes of each tensor, if the event stands for several."""
    stream: str = ""
    """Stream of the device; empty: the compute stream. The allocator keeps the memory of streams apart."""
    number: int = 0
    """Index of the buffer in its layer. A release frees an allocation with the same index."""
    early: bool = False
    """Whether a release comes before allocations at the same position that follow it in the list of events."""
    latest: bool = False
    """Whether a release frees the latest such allocation; the oldest otherwise."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a task: its peak, and the memory that it leaves allocated, both relative to its start."""

    peak: Bytes = ()
    kept: Bytes = ()
    events: tuple[Event, ...] = field(default=(), compare=False, repr=False)
    """The allocations and releases, in order."""
    peak_bytes: float = field(init=False, compare=False, repr=False)
    """Bytes at the peak, relative to the start."""

    def __post_init__(self) -> None:
        """Compute the total of the peak."""
        object.__setattr__(self, "peak_bytes", sum(size for _, size in self.peak))


NOTHING = Footprint()
FORWARD_END = Moment("forward-end")
"""The end of the forward, after the loss."""


def bytes_of(sizes: Mapping[str, float]) -> Bytes:
    """Return non-zero sizes by category, sorted."""
    return tuple(sorted((category, size) for category, size in sizes.items() if size))


def footprint(events: Iterable[Event]) -> Footprint:
    """Return the footprint of events, taken in order of position.

    >>> footprint([Event(0, 8.0, "activations"), Event(1, 4.0, "temporaries"), Event(1, -4.0, "temporaries")])
    Footprint(peak=(('activations', 8.0), ('temporaries', 4.0)), kept=(('activations', 8.0),))
    """
    allocated: dict[str, float] = defaultdict(float)
    total = worst = 0.0
    at_worst: dict[str, float] = {}
    ordered = sorted(events, key=lambda e: (e.position, e.size_bytes < 0 and not e.early))
    for event in ordered:
        allocated[event.category] += event.size_bytes
        total += event.size_bytes
        if total > worst:
            worst, at_worst = total, dict(allocated)
    return Footprint(bytes_of(at_worst), bytes_of(allocated), tuple(ordered))


def in_sequence(footprints: Iterable[Footprint]) -> Footprint:
    """Return the footprint of several footprints in sequence; it has no single events.

    >>> first, second = (footprint([Event(0, size, "activations")]) for size in (8.0, -4.0))
    >>> in_sequence([first, second, first])
    Footprint(peak=(('activations', 12.0),), kept=(('activations', 12.0),))
    """
    allocated: dict[str, float] = defaultdict(float)
    total = worst = 0.0
    at_worst: dict[str, float] = {}
    for each in footprints:
        if total + each.peak_bytes > worst:
            worst, at_worst = total + each.peak_bytes, dict(allocated)
            for category, size in each.peak:
                at_worst[category] = at_worst.get(category, 0.0) + size
        for category, size in each.kept:
            allocated[category] += size
            total += size
    return Footprint(bytes_of(at_worst), bytes_of(allocated))


def release_of(size_bytes: float, category: str) -> Footprint:
    """Return the footprint of the release of a tensor.

    >>> release_of(8.0, "activations")
    Footprint(peak=(), kept=(('activations', -8.0),))
    """
    return footprint([Event(0, -size_bytes, category)])


@dataclass(frozen=True)
class Timeline:
    """All memory events of one training step by (layer index, phase); `end` has the releases after the backward."""

    events: Mapping[tuple[int, str], Sequence[Event]]
    end: Sequence[Event]

    def at(self, layer: int, phase: str) -> Sequence[Event]:
        """Return the events of one layer's phase `f`, `b`, `i` or `w`, or `r` (its forward recomputed)."""
        return self.events.get((layer, phase), ())


Lives = Callable[[Layer, Layer | None, Sequence[Layer]], Sequence[Buffer]]
"""Function that returns a layer's buffers, given the layer, the one before it, and those after it up to the next
block."""


def traced_buffers(layer: Layer, before: Layer | None, following: Sequence[Layer]) -> Sequence[Buffer]:
    """Return the buffers of a layer as traced, without recomputation."""
    return layer.buffers


def split_backward_buffers(layer: Layer, before: Layer | None, following: Sequence[Layer]) -> Sequence[Buffer]:
    """Return the buffers of a layer whose backward is split.

    What a layer without a backward keeps for another's (rotary angles) is freed at the end of the second part.
    """
    if layer.split is not None:
        return layer.split.buffers
    return [replace(each, freed=Moment("end")) if each.freed.phase == "b" else each for each in layer.buffers]


def following(layers: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """Return, for each layer, the layers after it up to and including the next block."""
    found: list[tuple[Layer, ...]] = [()]
    for layer in reversed(layers[1:]):
        found.append((layer,) if layer.block else (layer, *found[-1]))
    return found[: len(layers)][::-1]


def activation_timeline(
    layers: Sequence[LayerInstance],
    *,
    batch_size: int,
    sequence_length: int,
    scale: float = 1.0,
    lives: Lives = traced_buffers,
) -> Timeline:
    """Return the lifetimes of activations and temporaries, without parameter gradients.

    `scale`: bytes of an element relative to the precision of the trace.
    """
    events: dict[tuple[int, str], list[Event]] = defaultdict(list)
    end: list[Event] = []
    by_layers: dict[tuple[int, ...], dict[tuple[int, str], list[Event]]] = {}
    own = {id(each.layer): for_samples(each.layer, batch_size) for each in layers}
    layers = [each if (now := own[id(each.layer)]) is each.layer else replace(each, layer=now) for each in layers]
    followers = following([instance.layer for instance in layers])
    for before, instance, after in zip([None, *layers], layers, followers, strict=False):
        layer, previous = instance.layer, before.layer if before else None
        key = (id(layer),) if lives is traced_buffers else tuple(map(id, (previous, layer, *after)))
        if key not in by_layers:  # repetitions share their events
            relative: dict[tuple[int, str], list[Event]] = defaultdict(list)
            for number, buffer in _with_joined_sums(lives(layer, previous, after)).items():
                if buffer.category == OPERAND_CASTS:  # a workspace of kernels
                    continue
                size = buffer.bytes_at(b=batch_size, s=sequence_length, scale=scale)
                is_replaced = buffer.category == REPLACED  # the one that the forward before has left is freed then
                category = "temporaries" if is_replaced else buffer.category
                ends = (buffer.born, buffer.born.position) if is_replaced else (buffer.freed, buffer.released_at)
                for moment, at, change in ((buffer.born, buffer.born.position, size), (*ends, -size)):
                    offset = 0 if moment.phase == "end" else moment.layer_offset
                    position = LAST if moment == FORWARD_END else at
                    event = Event(position, change, category, number=number)
                    relative[offset, moment.phase].append(event)
            by_layers[key] = relative
        for (layer_offset, phase), group in by_layers[key].items():
            if phase == FORWARD_END.phase:
                place = events[layers[-1].index, "f"]
            else:
                place = end if phase == "end" else events[instance.index + layer_offset, phase]
            place.extend(group)
    return Timeline(events, end)


def _with_joined_sums(buffers: Sequence[Buffer]) -> dict[int, Buffer]:
    """Return buffers by index, where a sum in place is the buffer of its first gradient, which lives as long as it.

    Where the sum is in another layer, the gradient's memory is released, and the sum's allocated.
    """
    joined = dict(enumerate(buffers))
    for index, first in reversed(tuple(enumerate(buffers))):  # a sum comes after what it adds to, and may be added to
        if first.summed_in_place:
            for other, its_sum in joined.items():
                if its_sum.born.position != first.freed.position:  # quickly compared, and most differ
                    continue
                alike = its_sum.category == first.category and its_sum.size_bytes == first.size_bytes
                if its_sum.born == first.freed and alike:
                    joined[index] = replace(first, freed=its_sum.freed, summed_in_place=its_sum.summed_in_place)
                    del joined[other]
                    break
    return joined


def replaced_bytes(layer: Layer, *, batch_size: int, sequence_length: int, scale: float = 1.0) -> float:
    """Return the bytes that a layer's module keeps from one forward to the next, outside of torch's buffers.

    Arguments as of `activation_timeline`.

    >>> from gssim.units import validated
    >>> none = ("forward_flop", "backward_flop", "forward_bytes", "backward_bytes", "saved_bytes", "output_bytes")
    >>> counts = {"forward_operations": 1, "backward_operations": 1, **dict.fromkeys(none, "0")}
    >>> buffers = ("f4 end replaced 64", "f5 b1 activations 8*b")
    >>> layer = validated(Layer, {"name": "map", "modules": ("map",), "buffers": buffers, **counts}, file="layer.toml")
    >>> replaced_bytes(layer, batch_size=2, sequence_length=1)
    64.0
    """
    kept = [buffer for buffer in layer.buffers if buffer.category == REPLACED]
    return sum((buffer.bytes_at(b=batch_size, s=sequence_length, scale=scale) for buffer in kept), 0.0)


def gradient_events(
    layers: Sequence[LayerInstance],
    *,
    value_bytes: int,
    given_back: int,
    given_back_of_experts: int | None = None,
    copies_first: bool = False,
    split: bool = False,
) -> dict[tuple[int, str], list[Event]]:
    """Return the allocations of parameter gradients, and their releases when they are ready.

    `given_back`: how many gradients are released when one is ready: 0: none; 1: the new one, which is copied elsewhere
    or added to an earlier one; 2: the sum, too. `given_back_of_experts`: the same for divided experts; None: as for
    all. `copies_first`: whether autograd adds the gradient that is ready first to a sparse one: it allocates the sum,
    and then frees the new one. `split`: whether the backward is split
    (zero bubble). What the last layer to run would free in a later layer is freed at its own end.
    """
    events: dict[tuple[int, str], list[Event]] = defaultdict(list)
    by_parameter: dict[int, tuple[Event, list[Event]]] = {}
    last = layers[-1].index if layers else 0
    first = next(iter(gradient_order(layers)), None) if copies_first else None
    for instance in layers:
        of_split = instance.layer.split if split else None
        for place, parameter in enumerate(of_split.parameters if of_split else instance.layer.parameters):
            born, ready = parameter.born, parameter.ready
            if id(parameter) not in by_parameter:  # repetitions share their events
                size = float(parameter.elements * value_bytes)
                times = given_back
                if parameter.of_experts and given_back_of_experts is not None:
                    times = given_back_of_experts
                # A gradient that is added to an earlier one is released before hooks see the sum. torch adds in place
                # (torch/csrc/autograd/functions/accumulate_grad.h): the sum stays where the first one was.
                freed = [
                    Event(ready.position, -size, "gradients", early=i + 1 < times, latest=i == 0) for i in range(times)
                ]
                by_parameter[id(parameter)] = Event(born.position, size, "gradients"), freed
            taken, freed = by_parameter[id(parameter)]
            if (instance.index, place) == first:
                size = taken.size_bytes
                copy = [Event(ready.position, size, "gradients"), Event(ready.position, -size, "gradients", early=True)]
                freed = [*copy, *freed]
            events[instance.index + born.layer_offset, born.phase].append(taken)
            if split and instance.index + ready.layer_offset > last:
                freed = [each._replace(position=LAST) for each in freed]
            events[min(instance.index + ready.layer_offset, last), ready.phase] += freed
    return events


def scratch_bytes(
    device: DeviceType,
    workload: Workload,
    instance: LayerInstance,
    *,
    phase: str,
    batch_size: int,
    traced: Sequence[Event],
) -> float:
    """Return the workspace of the layer's kernels: the measured peak minus the peak of the traced buffers.

    `traced`: the layer's events with its gradients kept, as in the profile. Without a profile the workspace is 0.
    """
    profile = layer_profile(device, workload, instance.layer)
    curve = (profile.backward_peak_bytes if phase == "b" else profile.forward_peak_bytes) if profile else None
    return max(0.0, curve.at(batch_size) - footprint(traced).peak_bytes) if curve else 0.0


def with_scratch(need: Footprint, scratch: float) -> Footprint:
    """Return `need` with kernel workspaces added at its peak."""
    if not scratch:
        return need
    peak = dict(need.peak)
    peak["temporaries"] = peak.get("temporaries", 0.0) + scratch
    totals = [0.0, *accumulate(event.size_bytes for event in need.events)]
    worst = max(range(len(totals)), key=totals.__getitem__)
    taken = [Event(0, size, "temporaries") for size in (scratch, -scratch)]
    return Footprint(bytes_of(peak), need.kept, (*need.events[:worst], *taken, *need.events[worst:]))


def input_bytes(
    model: Model,
    *,
    batch_size: int,
    sequence_length: int | None,
    value_bytes: int = 4,
    inputs: bool = True,
    targets: bool = True,
) -> float:
    """Return the bytes of a batch: int64 token ids (or images), and int64 targets (one per token, or a class per
    sample).

    `value_bytes`: bytes of an image's value; `inputs`, `targets`: whether each is included. Tensors derived from the
    input (a padding mask) are buffers of the layers.

    >>> from gssim.workload import Module, TokenInput
    >>> gpt = Model(name="m", source="doctest", module=Module(factory="m.m"), traced_batch_sizes=(1,), layers=(),
    ...     input=TokenInput(kind="tokens", vocabulary=256, maximum_sequence_length=128))
    >>> input_bytes(gpt, batch_size=2, sequence_length=100)
    3200.0
    """
    if isinstance(model.input, ImageInput):
        channels, height, width = model.input.shape
        return float(batch_size * (inputs * value_bytes * channels * height * width + targets * 8))
    length = sequence_length or 1
    return float(8 * batch_size * (inputs * length + targets * (length if model.input.classes is None else 1)))
