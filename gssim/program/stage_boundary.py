"""A stage of a pipeline: its layers, what it passes to its neighbours, and how buffers live that cross a border.

[Note: borders] A trace shows the life of a buffer in a whole model, where it may end in a neighbouring layer. At the
border of two stages, the neighbour is on another device, and torch.distributed.pipelining holds three tensors: the
stage's input, received into a buffer that is made once for each micro-batch and kept; its output, and the gradient of
its input, each until the schedule's last name for it goes (`gssim.plan.pipeline_schedule`, "release"). The last stage's
logits are such an output as well. All else that would die beyond a border dies when the stage's forward or backward
returns.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gssim.memory import Event, Lives, Timeline
from gssim.workload import Buffer, Layer, LayerInstance, Moment, Polynomial

LAST = 2**31
"""Position after every other of a phase."""
RELEASED = Moment("released")
"""When the schedule says so."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Consecutive layers of a model, in the order of the model's own numbers."""

    number: int
    layers: tuple[LayerInstance, ...]
    before: LayerInstance | None
    """The layer before the first; none for the first stage."""
    after: LayerInstance | None
    """The layer after the last; none for the last stage."""
    received: Polynomial | None = None
    """Size of its input, whose gradient it makes; none for the first stage."""

    @property
    def maker(self) -> LayerInstance:
        """The layer that makes what the stage passes on; of the last stage, the logits."""
        modules = [instance for instance in self.layers if instance.layer.modules]
        return modules[-1]

    @property
    def output(self) -> tuple[Polynomial, str]:
        """Size and category of what it passes on."""
        buffer = passed_on(self.maker.layer)
        return (buffer.size_bytes, buffer.category) if buffer else (self.maker.layer.output_bytes, "activations")


def stages_of(layers: Sequence[Sequence[LayerInstance]]) -> tuple[Stage, ...]:
    """Return the stages of a model that is cut into such layers."""
    befores = [None, *(stage[-1] for stage in layers[:-1])]
    afters = [*(stage[0] for stage in layers[1:]), None]
    found: list[Stage] = []
    for number, (stage, before, after) in enumerate(zip(layers, befores, afters, strict=True)):
        received = found[-1].output[0] if found else None
        found.append(Stage(number, tuple(stage), before, after, received))
    return tuple(found)


def passed_on(layer: Layer) -> Buffer | None:
    """Return the buffer that holds what a layer passes to the next; None where the trace does not show it.

    It outlives the layer, or it is the layer's output that its own backward needs as well (a ReLU's). After the
    module's output there may come operations outside any module, so that it is another tensor than `output_bytes`.
    """
    made = [buffer for buffer in layer.buffers if buffer.born.phase == "f"]
    crossing = [buffer for buffer in made if buffer.freed.layer_offset >= 1]
    same = [buffer for buffer in crossing if buffer.size_bytes == layer.output_bytes]
    kept = [buffer for buffer in made if buffer.freed.phase == "b" and buffer.size_bytes == layer.output_bytes]
    found = same or crossing or kept
    return max(found, key=lambda buffer: (buffer.freed.phase == "b", buffer.born.position), default=None)


def stage_timeline(stage: Stage, *, batch_size: int, sequence_length: int, scale: float, lives: Lives) -> Timeline:
    """Return when a stage's buffers live, by the number of the layer in the stage; see [Note: borders].

    Of its output and of the gradient of its input, which the schedule releases, only the births are there.
    """
    events: dict[tuple[int, str], list[Event]] = defaultdict(list)
    end: list[Event] = []
    made: dict[tuple[object, ...], tuple[Event, Event]] = {}
    around = [stage.before, *stage.layers, stage.after]
    for number, instance in enumerate(stage.layers):
        beside = [each.layer if each else None for each in around[number : number + 3]]
        output = passed_on(instance.layer) if instance is stage.maker else None
        for place, buffer in enumerate(lives(instance.layer, beside[0], beside[2])):
            freed = _freed(stage, number, buffer, output)
            key = (*map(id, beside), place, freed)
            if key not in made:  # repetitions share their events
                size = scale * buffer.size_bytes.at(b=batch_size, s=sequence_length)
                born = buffer.born.position
                made[key] = Event(born, size, buffer.category), Event(freed.position, -size, buffer.category)
            events[number, buffer.born.phase].append(made[key][0])
            if freed.phase == "end":
                end.append(made[key][1])
            elif freed.phase != RELEASED.phase:
                events[number + freed.layer_offset, freed.phase].append(made[key][1])
    return Timeline(events, end)


def _freed(stage: Stage, number: int, buffer: Buffer, output: Buffer | None) -> Moment:
    """Return when a buffer of the stage's layer of that number is freed."""
    freed, target = buffer.freed, number + buffer.freed.layer_offset
    if output is not None and _is_output(buffer, output):
        return RELEASED
    if freed.phase == "end" or 0 <= target < len(stage.layers):
        return freed
    if target >= len(stage.layers):
        if freed.phase == "f":
            return Moment("f", LAST, len(stage.layers) - 1 - number)
        return Moment("end")
    own = number == 0 and freed.layer_offset == -1 and buffer.born.phase == "b"
    return RELEASED if own and buffer.size_bytes == stage.received else Moment("end")


def _is_output(buffer: Buffer, output: Buffer) -> bool:
    """Return whether a buffer is the output, whatever checkpointing has made of its life."""
    return buffer.born == output.born and buffer.size_bytes == output.size_bytes
