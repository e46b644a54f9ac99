"""Pipeline stages: their layers, their inputs and outputs, and the lifetimes of buffers that cross a stage boundary.

[Note: stage boundaries] A trace shows the lifetime of a buffer in a whole model, where it may end in a neighbouring
layer. At the boundary of two stages the neighbour is on another device, and torch.distributed.pipelining holds three
tensors: the stage's input, received into a buffer that is allocated once for each micro-batch and kept; the stage's
output; and the gradient of its input. The latter two live until the schedule drops the last reference
(`gssim.plan.pipeline_schedule`, "release"). The last stage's logits are such an output as well. Every other buffer that
would be freed in a layer beyond the boundary is freed when the stage's forward or backward returns. The parts of a
split backward are no exception: what outlives the second part is freed when that returns.

[Note: cast once] torch.autocast keeps the 16-bit casts of leaves of autograd's graph that require gradients until its
context ends (aten/src/ATen/autocast_mode.cpp, cached_cast). Parameters are such leaves, and so is the input that a
stage receives, but not the input of a layer within a model. A layer that casts its input for several products (BERT's
queries, keys and values) therefore casts it once if it is the first of a stage, and all products save the same cast.
Its backward sums their gradients in 16 bits; those are counted as traced, one by one and in fp32. FSDP2 passes a
layer's input through an operation of its own (RegisterPostBackwardFunction), after which it is no leaf.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gssim.execution.cache import Same
from gssim.memory import FORWARD_END, Event, Lives, Timeline, following
from gssim.scenario import of_no_sample
from gssim.workload import Buffer, Layer, LayerInstance, Moment, Polynomial, for_samples, layer_input_gradient
from gssim.workload.layer import OPERAND_CASTS

LAST = 2**31
"""A position in a phase after all others."""
RELEASED = Moment("released")
"""Freed by an action of the schedule."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Consecutive layers of a model, in the model's order."""

    number: int
    layers: tuple[LayerInstance, ...]
    before: LayerInstance | None
    """The layer before the first; None for the first stage."""
    after: LayerInstance | None
    """The layer after the last; None for the last stage."""
    received: Polynomial | None = None
    """Size of the stage's input, whose gradient it sends back; None for the first stage."""

    @cached_property
    def shared(self) -> int:
        """Number of layers at the stage's start that other stages run too, because they do not read a sample's data.

        The division of the first block's input, which has the number of the layer before it, is none of them.
        """
        if self.before is None:
            return 0
        return sum(e.index <= self.before.index and not e.layer.backward_operations for e in self.layers)

    def output_place(self, samples: float) -> tuple[int, Buffer | None]:
        """Index of the layer that computes the stage's output (in the last stage, the logits), and the output's buffer,
        for a micro-batch of so many samples.

        Layers whose forward allocates nothing (a dropout of probability zero, a flattening), or nothing that depends on
        a sample, pass on the output of an earlier layer.
        """
        return self._output_places[samples == 1]

    @cached_property
    def _output_places(self) -> tuple[tuple[int, Buffer | None], ...]:
        """Results of `output_place`: for several samples, and for one."""
        return tuple(self._place_of_output(samples) for samples in (2, 1))

    def _place_of_output(self, samples: int) -> tuple[int, Buffer | None]:
        last = place = max(i for i, instance in enumerate(self.layers) if instance.layer.modules)
        layers = [for_samples(instance.layer, samples) for instance in self.layers]
        allocates = [any(buffer.born.phase == "f" for buffer in each.buffers) for each in layers]
        while place > self.shared and (of_no_sample(layers[place]) or not allocates[place]):
            place -= 1
        buffer = output_buffer(layers[place])
        if place < last and (buffer is None or place + buffer.freed.layer_offset < last):
            return last, None
        return place, buffer

    @cached_property
    def structure_key(self) -> tuple[object, ...]:
        """Key of stages that are equal but for names: equal layers, and equal layers next to them."""
        beside = (None if each is None else Same(each.layer) for each in (self.before, self.after))
        layers = (Same(each.layer) for each in self.layers)
        return (*layers, *beside, self.received, self.shared, *self._output_places)

    @cached_property
    def passed_part(self) -> Polynomial | None:
        """Size of what the stage passes on if that is a part of its last layer's output, such as one token of it.

        None where it is all. The stage passes on a copy of that part, and the output is freed when its forward returns.
        """
        output = self.output_place(2)[1]
        if output is None or self.after is None or self.after.layer.block:
            return None
        gradient = layer_input_gradient(self.after.layer.buffers)
        whole = self.layers[-1].layer.output_bytes
        if gradient is None or output.size_bytes != whole or gradient.size_bytes == whole:
            return None
        return gradient.size_bytes

    @property
    def output_bytes(self) -> Polynomial:
        """Size of the stage's output."""
        if self.passed_part is not None:
            return self.passed_part
        place, buffer = self.output_place(2)
        return self.layers[place].layer.output_bytes if buffer is None else buffer.size_bytes


def stages_of(layers: Sequence[Sequence[LayerInstance]]) -> tuple[Stage, ...]:
    """Return the stages of a model, given the layers of each."""
    befores = [None, *(stage[-1] for stage in layers[:-1])]
    afters = [*(stage[0] for stage in layers[1:]), None]
    stages: list[Stage] = []
    for number, (stage, before, after) in enumerate(zip(layers, befores, afters, strict=True)):
        received = stages[-1].output_bytes if stages else None
        stages.append(Stage(number, tuple(stage), before, after, received))
    return tuple(stages)


def output_buffer(layer: Layer) -> Buffer | None:
    """Return the buffer that holds a layer's output for the next layer; None where the trace does not show it.

    The buffer outlives the layer, or it is an output that the layer's own backward needs as well (a ReLU's). Operations
    outside any module may follow the module's output, so the buffer can be another tensor than `output_bytes` says.
    """
    forward_buffers = [buffer for buffer in layer.buffers if buffer.born.phase == "f"]
    crossing = [buffer for buffer in forward_buffers if buffer.freed.layer_offset >= 1]
    of_output_size = [buffer for buffer in crossing if buffer.size_bytes == layer.output_bytes]
    saved = [
        buffer for buffer in forward_buffers if buffer.freed.phase == "b" and buffer.size_bytes == layer.output_bytes
    ]
    candidates = of_output_size or crossing or saved
    return max(candidates, key=lambda buffer: (buffer.freed.phase == "b", buffer.born.position), default=None)


def stage_timeline(
    stage: Stage, *, batch_size: int, sequence_length: int, scale: float, lives: Lives, input_is_leaf: bool = True
) -> Timeline:
    """Return the memory events of a stage, by the number of the layer in the stage; see [Note: stage boundaries].

    The stage's output and the gradient of its input are released by the schedule, so only their allocations are
    included. `input_is_leaf`: whether the first layer is given the received tensor itself; see [Note: cast once].
    """
    events: dict[tuple[int, str], list[Event]] = defaultdict(list)
    end: list[Event] = []
    cached: dict[tuple[object, ...], tuple[Event, Event]] = {}
    place_of_output, its_buffer = stage.output_place(batch_size)
    around = [for_samples(each.layer, batch_size) for each in (*stage.layers, stage.after) if each]
    befores = [for_samples(stage.before.layer, batch_size) if stage.before else None, *around]
    for number, (layer, before, after) in enumerate(
        zip(around[: len(stage.layers)], befores, following(around), strict=False)
    ):
        output = its_buffer if number == place_of_output else None
        receives = input_is_leaf and number == stage.shared and stage.before is not None
        context = receives, *map(id, (before, layer, *after))
        buffers = lives(layer, before, after)
        if number == len(stage.layers) - 1 and stage.after is not None:
            buffers = _of_last(layer, buffers)
        if receives:
            buffers = _with_input_cast_once(buffers)
        for place, buffer in _without_casts(buffers):
            freed = _release_moment(stage, number, buffer, output)
            # repetitions share their events; a moment's fields are hashed in a third of the time of its own hash
            key = (context, place, freed.phase, freed.position, freed.layer_offset)
            if key not in cached:
                size = buffer.bytes_at(b=batch_size, s=sequence_length, scale=scale)
                born = buffer.born.position
                category = buffer.category
                if freed is RELEASED:
                    # a trace may show the output as freed by the next layer's forward, a temporary, and the gradient of
                    # the input as kept for the weights of the layer before: the schedule keeps the one, and sends both
                    category = "activations" if buffer.born.phase == "f" else "temporaries"
                position = buffer.released_at if freed is buffer.freed else freed.position
                cached[key] = Event(born, size, category), Event(position, -size, category)
            events[number, buffer.born.phase].append(cached[key][0])
            if freed.phase == "end":
                end.append(cached[key][1])
            elif freed.phase != RELEASED.phase:
                events[number + freed.layer_offset, freed.phase].append(cached[key][1])
    if stage.passed_part is not None:
        size = scale * stage.passed_part.at(b=batch_size, s=sequence_length)
        events[len(stage.layers) - 1, "f"].append(Event(LAST, size, "activations"))
    return Timeline(events, end)


def _without_casts(buffers: Sequence[Buffer]) -> Iterator[tuple[int, Buffer]]:
    """Yield the buffers with their numbers, without copies of operands, which are a workspace of kernels."""
    return ((n, each) for n, each in enumerate(buffers) if each.category != OPERAND_CASTS)


def _of_last(layer: Layer, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return the buffers of a layer as those of the last layer of a stage that sends its output."""
    if layer.split is None or buffers is not layer.split.buffers:
        return buffers
    freed = layer.split.freed_as_last
    return [replace(e, freed=Moment("input-end")) if n in freed else e for n, e in enumerate(buffers)]


def _with_input_cast_once(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return a layer's buffers with one cast of its input in place of several, in the forward and in its recomputation;
    see [Note: cast once].
    """
    found: list[Buffer] = []
    for place, buffer in enumerate(buffers):
        if not buffer.casts_input:
            found.append(buffer)
            continue
        phase = buffer.born.phase
        casts = [(i, each) for i, each in enumerate(buffers) if each.casts_input and each.born.phase == phase]
        if place == casts[0][0]:
            freed = max((each.freed for _, each in casts), key=lambda moment: (moment.phase != phase, moment.position))
            found.append(replace(buffer, freed=FORWARD_END if freed.phase == "f" else freed))
    return found


def _release_moment(stage: Stage, number: int, buffer: Buffer, output: Buffer | None) -> Moment:
    """Return the moment at which a buffer of the stage's layer `number` is freed."""
    freed, target = buffer.freed, number + buffer.freed.layer_offset
    if output is not None and (buffer.born, buffer.size_bytes) == (output.born, output.size_bytes):  # also recomputed
        return RELEASED if stage.passed_part is None else Moment("f", LAST, len(stage.layers) - 1 - number)
    backward = ("b", "i", "w")
    to_stage_before = buffer.born.phase in backward and freed.phase in backward and number >= stage.shared > target
    if to_stage_before:
        return RELEASED if buffer.size_bytes == stage.received else Moment("end")
    if freed == FORWARD_END:  # the torch.autocast context covers the stage's forward, without the loss
        return Moment("f", LAST, max(i for i, each in enumerate(stage.layers) if each.layer.modules) - number)
    if freed.phase == "input-end":
        return Moment("i", LAST, -number)
    if freed.phase == "end" or 0 <= target < len(stage.layers):
        return freed
    if target >= len(stage.layers) and buffer.born.phase == "f":  # no layer of this stage saves it for its backward
        return Moment("f", LAST, len(stage.layers) - 1 - number)
    return Moment("end")
