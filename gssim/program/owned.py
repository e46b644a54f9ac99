"""The layers as a rank runs them that trains only those it owns: weight gradients of its own, no others.

[Note: roles] From the loss down, a layer's backward passes gradients on (`frozen`) or makes weight gradients as well
(`whole`); that of the `deepest` owned layer makes weight gradients, but none for its input; below that there is no
backward, and autograd keeps nothing (`untrained`). Each role is traced on its own. Two buffers end in a neighbour,
whose role may be another than it was there: what a layer hands on to the next ends as the next's role has it, unless
the layer's own backward needs it longer, and what it hands back to the one before as that one's has it. What ends in
the forward of a later layer is held until that is over: the module's own variables and arguments refer to it.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from gssim.workload import (
    Buffer,
    Layer,
    LayerInstance,
    Moment,
    PartialBackward,
    Polynomial,
    layer_input_gradient,
    layer_output,
)

NO_COST = Polynomial(((0, 0, 0),))
LAST = 2**31
"""Position after every other of a phase."""


@dataclass(frozen=True)
class OwnedLayers:
    """All layers as a rank runs them, the index of the first that has a backward, and where they differ their roles."""

    layers: tuple[LayerInstance, ...]
    deepest: int = 0
    roles: tuple[str, ...] = ()


def owned_layers(layers: Sequence[LayerInstance], owned: AbstractSet[int]) -> OwnedLayers:
    """Return `layers` as a rank runs them that trains those in `owned` (indices; some have parameters) alone.

    Assumes that the model file says what is left of each layer where others are frozen.
    """
    roles = _roles(layers, owned)
    deepest = sum(1 for role in roles if role == "untrained")
    once: dict[tuple[object, ...], Layer] = {}
    found = []
    for instance, before, after in zip(layers, [None, *layers], [*layers[1:], None], strict=False):
        beside = [each.layer if each else None for each in (before, instance, after)]
        at = instance.index
        around = (roles[at - 1] if at else "", roles[at], roles[at + 1] if after else "")
        key = (*map(id, beside), around)
        if key not in once:  # repetitions stay one layer
            once[key] = _as_run(beside, around)
        found.append(replace(instance, layer=_cut_off(once[key], at - deepest)))
    return OwnedLayers(tuple(found), deepest, tuple(roles))


def _roles(layers: Sequence[LayerInstance], owned: AbstractSet[int]) -> list[str]:
    """Return every layer's role; see [Note: roles]."""
    deepest = min(instance.index for instance in layers if instance.index in owned and instance.layer.parameters)
    roles = ["untrained" if at < deepest else "whole" if at in owned else "frozen" for at in range(len(layers))]
    if deepest > 0:
        roles[deepest] = "deepest"
    return roles


def _as_run(beside: Sequence[Layer | None], around: tuple[str, str, str]) -> Layer:
    """Return a layer in its role, given the layers before and after it and theirs."""
    before, layer, after = beside
    assert layer is not None
    if set(around) <= {"whole", ""}:
        return layer
    run = _in_role(layer, around[1])
    buffers = list(run.buffers)
    handed, back = layer_output(buffers), layer_input_gradient(buffers)
    if handed and after:
        buffers[buffers.index(handed)] = _handed_to(handed, _input_freed(layer, after, around[2]))
    if back and before and (freed := _gradient_freed(layer, before, around[0])):
        buffers[buffers.index(back)] = replace(back, freed=replace(freed, layer_offset=-1))
    return replace(run, buffers=tuple(map(_held_through, buffers)))


def _handed_to(buffer: Buffer, freed: Moment | None) -> Buffer:
    """Return what a layer hands on, freed by the next at a moment of its own (None: not sooner than it is held)."""
    if freed is None:
        return buffer
    category = "activations" if freed.phase == "b" else "temporaries"
    return replace(buffer, freed=replace(freed, layer_offset=1), category=category)


def _held_through(buffer: Buffer) -> Buffer:
    freed = buffer.freed
    if freed.phase == "f" and freed.layer_offset > 0:
        return replace(buffer, freed=replace(freed, position=LAST))
    return buffer


def _in_role(layer: Layer, role: str) -> Layer:
    """Return the layer as it is traced in a role, among layers in the same."""
    if role == "whole":
        return layer
    if role == "untrained":
        part = PartialBackward(
            backward_flop=NO_COST,
            backward_bytes=NO_COST,
            backward_streamed_bytes=NO_COST,
            backward_operations=0,
            buffers=layer.untrained_buffers or (),
        )
    else:
        part = _part(layer, role)
    return replace(
        layer,
        parameters=part.parameters,
        backward_flop=part.backward_flop,
        backward_bytes=part.backward_bytes,
        backward_streamed_bytes=part.backward_streamed_bytes,
        backward_operations=part.backward_operations,
        buffers=part.buffers,
    )


def _part(layer: Layer, role: str) -> PartialBackward:
    part = layer.deepest if role == "deepest" else layer.frozen
    assert part is not None  # checked when the scenario was loaded
    return part


def _input_freed(layer: Layer, after: Layer, role: str) -> Moment | None:
    """Return when the layer `after`, in its role, lets go of what `layer` hands on to it."""
    if role == "untrained":
        return None
    if role != "whole":
        return _part(after, role).input_freed
    handed = layer_output(layer.buffers)
    return handed.freed if handed and handed.freed.layer_offset == 1 else None


def _gradient_freed(layer: Layer, before: Layer, role: str) -> Moment | None:
    """Return when the layer `before`, in its role, lets go of the gradient that `layer` hands back to it."""
    if role != "whole":
        return _part(before, role).gradient_freed
    back = layer_input_gradient(layer.buffers)
    return back.freed if back else None


def _cut_off(layer: Layer, above: int) -> Layer:
    """Return a layer, `above` that many that have a backward: what would end below them ends with the backward."""

    def ended(buffer: Buffer) -> Buffer:
        below = buffer.freed.phase == "b" and buffer.freed.layer_offset + above < 0
        return replace(buffer, freed=Moment("end")) if below else buffer

    buffers = tuple(map(ended, layer.buffers))
    return layer if buffers == layer.buffers else replace(layer, buffers=buffers)
