"""How much memory a layer needs, from the lives of its buffers: pure functions from a model file to footprints.

What torch's sums over rows take on a GPU: many blocks of threads share the rows, and meet in a buffer.

Source: torch 2.11, aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, ReduceConfig.global_memory_size), for sums of
contiguous rows. The peaks of nine runs of four models on an H200 agree to 512 bytes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from gssim.cluster import DeviceType
from gssim.scenario import layer_profile
from gssim.workload import Buffer, ImageInput, Layer, LayerInstance, Model, Workload

LARGEST_BLOCK_THREADS = 512
WARP_THREADS = 32
VECTOR = 4
"""Of neighbouring columns, a thread adds up as many, or fewer where their number is no multiple of it."""
LEAST_ROWS, MOST_ROWS = 16, 256
"""That a thread adds up: at least so many where rows are shared among blocks, and at most where these suffice."""


def reduction_buffer_bytes(rows: int, columns: int, *, value_bytes: int, resident_threads: int | None) -> int:
    """Return the bytes of the buffer for the sums of all columns over rows; 0 where no rows are shared among blocks.

    `value_bytes`: of what is added up in, which is fp32 for half precisions; `resident_threads`: that the device runs
    at once; None: enough for all blocks. Each block has room for its own columns once for every column there is: with
    threads enough, and columns a multiple of 128, the buffer is twice the bytes of what is summed.

    >>> reduction_buffer_bytes(8192, 384, value_bytes=4, resident_threads=None) // 2**20
    24
    """
    vector = next(size for size in (VECTOR, 2, 1) if columns % size == 0)
    width, height = _block(columns // vector, rows, LARGEST_BLOCK_THREADS // vector)
    rows_of_thread = -(-rows // height)
    blocks = -(-(columns // vector) // width)
    at_once = blocks * rows if resident_threads is None else resident_threads // (width * height)
    if rows_of_thread < MOST_ROWS or blocks > at_once:
        return 0
    shared_by = max(min(-(-at_once // blocks), -(-rows_of_thread // LEAST_ROWS)), -(-rows_of_thread // MOST_ROWS))
    return value_bytes * columns * shared_by * width * vector if shared_by > 1 else 0


def _block(columns: int, rows: int, threads: int) -> tuple[int, int]:
    """Return a block's threads along columns (vectors of them) and rows: powers of two, a warp wide if both allow."""
    most_wide, most_high = (min(threads, 1 << (count.bit_length() - 1)) for count in (columns, rows))
    height = min(most_high, threads // min(most_wide, WARP_THREADS))
    return min(most_wide, threads // height), height


Bytes = tuple[tuple[str, float], ...]
"""Bytes by category, sorted by category."""


class Event(NamedTuple):
    """Memory taken (or, where negative, given back) at a position of a layer's phase; frees come after allocations."""

    position: int
    size_bytes: float
    category: str
    tensors: tuple[float, ...] = ()
    """Bytes of each of the tensors that it is made of; none: it is one."""
    stream: str = ""
    """Of the device, where it is not the one that computes: an allocator keeps the memory of each apart."""
    number: int = 0
    """Which of the buffers of its layer: what is given back is then the last of these that was taken."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a task needs: what it holds at its worst moment, and what it leaves, both above what it found."""

    peak: Bytes = ()
    kept: Bytes = ()
    events: tuple[Event, ...] = field(default=(), compare=False, repr=False)
    """What it is made of, in the order in which it happens."""
    peak_bytes: float = field(init=False, compare=False, repr=False)
    """Bytes above entry at the worst moment."""

    def __post_init__(self) -> None:
        """Add up the worst moment."""
        object.__setattr__(self, "peak_bytes", sum(size for _, size in self.peak))


NOTHING = Footprint()


def bytes_of(sizes: Mapping[str, float]) -> Bytes:
    """Return non-zero sizes by category, sorted."""
    return tuple(sorted((category, size) for category, size in sizes.items() if size))


def footprint(events: Iterable[Event]) -> Footprint:
    """Return the footprint of events in order of position.

    >>> footprint([Event(0, 8.0, "activations"), Event(1, 4.0, "temporaries"), Event(1, -4.0, "temporaries")])
    Footprint(peak=(('activations', 8.0), ('temporaries', 4.0)), kept=(('activations', 8.0),))
    """
    held: dict[str, float] = defaultdict(float)
    total = worst = 0.0
    at_worst: dict[str, float] = {}
    ordered = sorted(events, key=lambda e: (e.position, e.size_bytes < 0))
    for event in ordered:
        held[event.category] += event.size_bytes
        total += event.size_bytes
        if total > worst:
            worst, at_worst = total, dict(held)
    return Footprint(bytes_of(at_worst), bytes_of(held), tuple(ordered))


def let_go(size_bytes: float, category: str) -> Footprint:
    """Return the footprint of a tensor that is let go of.

    >>> let_go(8.0, "activations")
    Footprint(peak=(), kept=(('activations', -8.0),))
    """
    return footprint([Event(0, -size_bytes, category)])


@dataclass(frozen=True)
class Timeline:
    """All memory events of one training step by (layer index, phase); `end` holds what is freed after the backward."""

    events: Mapping[tuple[int, str], Sequence[Event]]
    end: Sequence[Event]

    def at(self, layer: int, phase: str) -> Sequence[Event]:
        """Return the events of one layer's phase `f`, `b` or `r` (its forward run again)."""
        return self.events.get((layer, phase), ())


Lives = Callable[[Layer, Layer | None, Layer | None], Sequence[Buffer]]
"""The buffers of a layer, given the layers before and after it."""


def as_traced(layer: Layer, before: Layer | None, after: Layer | None) -> Sequence[Buffer]:
    """Return the buffers of a layer whose activations are kept from forward to backward."""
    return layer.buffers


def activation_timeline(
    layers: Sequence[LayerInstance],
    *,
    batch_size: int,
    sequence_length: int,
    scale: float = 1.0,
    lives: Lives = as_traced,
) -> Timeline:
    """Return when activations and temporaries live, parameter gradients left out.

    `scale`: bytes of an element over those of the traced precision (the few integer buffers are scaled too).
    """
    events: dict[tuple[int, str], list[Event]] = defaultdict(list)
    end: list[Event] = []
    made: dict[tuple[int, ...], dict[tuple[int, str], list[Event]]] = {}
    for before, instance, after in zip([None, *layers], layers, [*layers[1:], None], strict=False):
        beside = [each.layer if each else None for each in (before, instance, after)]
        key = (id(instance.layer),) if lives is as_traced else tuple(map(id, beside))
        if key not in made:  # repetitions share their events
            buffers = lives(instance.layer, beside[0], beside[2])
            made[key] = _buffer_events(buffers, batch_size, sequence_length, scale)
        for (layer_offset, phase), group in made[key].items():
            place = end if phase == "end" else events[instance.index + layer_offset, phase]
            place.extend(group)
    return Timeline(events, end)


def _buffer_events(
    buffers: Sequence[Buffer], batch_size: int, sequence_length: int, scale: float
) -> dict[tuple[int, str], list[Event]]:
    """Return when the buffers that a layer makes are born and freed, by layer offset and phase."""
    found: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for number, buffer in enumerate(buffers):
        size = scale * buffer.size_bytes.at(b=batch_size, s=sequence_length)
        for moment, change in ((buffer.born, size), (buffer.freed, -size)):
            offset = 0 if moment.phase == "end" else moment.layer_offset
            found[offset, moment.phase].append(Event(moment.position, change, buffer.category, number=number))
    return found


def gradient_events(
    layers: Sequence[LayerInstance], *, value_bytes: int, given_back: int
) -> dict[tuple[int, str], list[Event]]:
    """Return when parameter gradients are born, and when ready given back.

    `given_back`: 0: it is kept; 1: it is copied elsewhere, or added to one that is there already; 2: that goes too.
    """
    events: dict[tuple[int, str], list[Event]] = defaultdict(list)
    made: dict[int, tuple[Event, Event]] = {}
    for instance in layers:
        for parameter in instance.layer.parameters:
            born, ready = parameter.born, parameter.ready
            if id(parameter) not in made:  # repetitions share their events
                size = float(parameter.elements * value_bytes)
                made[id(parameter)] = (
                    Event(born.position, size, "gradients"),
                    Event(ready.position, -given_back * size, "gradients"),
                )
            taken, freed = made[id(parameter)]
            events[instance.index + born.layer_offset, "b"].append(taken)
            if given_back:
                events[instance.index + ready.layer_offset, "b"].append(freed)
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
    """Return what the layer's kernels allocate for themselves: measured peak less the peak of the traced buffers.

    `traced` are the layer's events with its gradients kept, as in the profile. Without a profile: 0.
    """
    profile = layer_profile(device, workload, instance.layer)
    curve = (profile.backward_peak_bytes if phase == "b" else profile.forward_peak_bytes) if profile else None
    return max(0.0, curve.at(batch_size) - footprint(traced).peak_bytes) if curve else 0.0


def with_scratch(need: Footprint, scratch: float) -> Footprint:
    """Return `need` with kernel scratch added to its worst moment."""
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
    """Return the bytes of one batch: token ids and targets (a class for each sample, else a token) as int64, images.

    `value_bytes`: of an image's value; `inputs`, `targets`: what of both there is. What a model makes of its input (a
    mask of padding) is in its layers' buffers.

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
