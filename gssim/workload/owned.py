"""The layers of a model in which only some layers are trained: those that a rank owns, or all that are not frozen.

[Note: roles] A layer's backward depends on its role, from the loss downwards. A `frozen` layer only propagates
gradients; a `whole` layer computes weight gradients as well. The `deepest` owned layer computes weight gradients, but
none for its input. Layers below that are `untrained`: they have no backward, and autograd saves nothing. Each role is
traced separately. Two buffers of a layer end in a neighbouring layer, whose role may differ from the traced one. The
output that a layer passes on is freed as the next layer's role says, unless the layer's own backward needs it longer.
The gradient that it passes back is freed as the role of the layer before says. A buffer that is freed in the forward of
a later layer is held until that forward ends, because the module's variables and arguments refer to it.

[Note: recomputed roles] Gradient checkpointing runs a block's forward again up to the last tensor that autograd saves,
parameters included. For the gradient of the input, a frozen weight is saved where a trained weight is saved with its
input, so all roles with a backward stop at the same operation. Only the positions differ, because roles dispatch
different views. The operations that allocate memory are the same, in the same order, and identify corresponding
positions. A block without a backward is not run again, and keeps nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from gssim.execution.cache import cached_by_identity
from gssim.workload.layer import (
    NO_COST,
    NO_ROLES,
    Buffer,
    Layer,
    Moment,
    PartialBackward,
    Polynomial,
    for_samples,
    layer_input_gradient,
    layer_output,
    passed_bytes,
)
from gssim.workload.model import DIVIDED_LISTS, LayerInstance, Model, UntracedLayersError, unrolled

LAST = 2**31
"""A position in a phase after all others."""


@dataclass(frozen=True)
class OwnedLayers:
    """All layers as a rank runs them; the index of the first with a backward; and the roles, if these differ."""

    layers: tuple[LayerInstance, ...]
    deepest: int = 0
    roles: tuple[str, ...] = ()


def owned_layers(layers: Sequence[LayerInstance], owned: AbstractSet[int]) -> OwnedLayers:
    """Return `layers` as run by a rank that trains only those in `owned` (indices; some of these have parameters).

    Assumes that the model file has each layer's partial backward, traced among frozen neighbours.
    """
    roles = _roles(layers, owned)
    deepest = sum(1 for role in roles if role == "untrained")
    once: dict[tuple[object, ...], Layer] = {}
    adapted = []
    for instance, before in zip(layers, [None, *layers], strict=False):
        index = instance.index
        following = layers[index + 1].layer if index + 1 < len(layers) else None
        handed = layer_output(instance.layer.buffers, passed_bytes(instance.layer, following))
        passed_to = index + 1
        if handed is not None and handed.freed.phase == "b":  # by its user, which may be behind modules between the two
            passed_to = index + max(1, handed.freed.layer_offset)
        after = layers[passed_to] if passed_to < len(layers) else None
        layer_and_neighbours = [each.layer if each else None for each in (before, instance, after)]
        roles_around = (roles[index - 1] if index else "", roles[index], roles[passed_to] if after else "")
        key = (*map(id, layer_and_neighbours), roles_around)
        if key not in once:  # repetitions stay one layer
            once[key] = _adapted_to_neighbours(layer_and_neighbours, roles_around, passed_to - index)
        layer, above = once[key], index - deepest
        if above < 0 and not instance.layer.parameters:
            trained = (each.index for each in layers[index:] if each.layer.block and roles[each.index] != "untrained")
            first_use = next(trained, index)  # by the first block with a backward
            output_bytes = passed_bytes(instance.layer, following)
            layer = _held_for_backward(instance.layer, layer, first_use - index, output_bytes)
        buffers = tuple(  # what an untrained layer's backward would free is freed at the end
            replace(each, freed=Moment("end"))
            if each.freed.phase == "b" and each.freed.layer_offset + above < 0
            else each
            for each in layer.buffers
        )
        adapted.append(replace(instance, layer=layer if buffers == layer.buffers else replace(layer, buffers=buffers)))
    return OwnedLayers(tuple(adapted), deepest, tuple(roles))


def with_frozen_layers(model: Model, patterns: tuple[str, ...]) -> Model:
    """Return the model with those layers frozen whose modules match a pattern, or itself if they are frozen already.

    Raises ValueError if a pattern matches nothing, if nothing is left to train, or if the model is not traced so or
    cannot be.
    """
    if model.module.frozen is None:
        return _with_frozen_layers(model, patterns)
    whole = unrolled(replace(model, layers=model.whole_layers))
    if _frozen_names(whole, _frozen_layers(whole, patterns)) != model.module.frozen:
        raise ValueError(f"frozen = {list(patterns)}: other layers of the model are frozen already")
    return model


def frozen_roles(model: Model) -> tuple[str, ...]:
    """Return the role of every layer of a model with frozen layers; empty if none are frozen."""
    if model.module.frozen is None:
        return ()
    layers = unrolled(model)
    return tuple(_roles(layers, {instance.index for instance in layers if not instance.layer.frozen_parameters}))


def _frozen_layers(layers: Sequence[LayerInstance], patterns: Sequence[str]) -> frozenset[int]:
    """Return the indices of the layers with parameters whose modules match a pattern."""
    trained = [instance for instance in layers if instance.layer.parameters]
    return frozenset(each.index for each in trained if any(fnmatchcase(each.module, name) for name in patterns))


def _frozen_names(layers: Sequence[LayerInstance], frozen: AbstractSet[int]) -> tuple[str, ...]:
    return tuple(name for index in sorted(frozen) for name in layers[index].parameter_names)


@cached_by_identity(maxsize=64)
def _with_frozen_layers(model: Model, patterns: tuple[str, ...]) -> Model:
    layers = unrolled(model)
    with_parameters = [instance for instance in layers if instance.layer.parameters]
    modules = [instance.module for instance in with_parameters]
    for pattern in patterns:
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise ValueError(f"frozen: '{pattern}' matches no layer with parameters; they are {', '.join(modules)}")
    frozen = _frozen_layers(layers, patterns)
    if len(frozen) == len(with_parameters):
        raise ValueError("frozen: all layers are; at least one must be trained")
    if model.compiled:
        raise ValueError(
            f"frozen: the blocks of '{model.name}' are compiled, with all of them trained; take the model that is not "
            "compiled"
        )
    divided: dict[str, Any] = {name: _in_roles(model, name, frozen) for name in DIVIDED_LISTS}
    undivided = _in_roles(model, "layers", frozen)
    if not undivided:  # the model has no costs of layers that are frozen
        if (why := unchained([instance.layer for instance in layers], side_modules=True)) is not None:
            raise UntracedLayersError(
                f"frozen: '{model.name}' cannot run yet with frozen layers: {why}, and what that costs beside frozen "
                "layers is not modelled; allowed: all layers trained, or workload.adapters"
            )
        raise UntracedLayersError(
            f"frozen: the file of '{model.name}' lacks the costs of layers that are frozen; add them with `gsreal "
            "trace FILE --frozen --out NEW`, where FILE is the model's, and set workload.model to NEW"
        )
    return replace(
        model,
        module=replace(model.module, frozen=_frozen_names(layers, frozen)),
        layers=undivided,
        whole_layers=model.layers,
        adapted=(),
        autocast=(),
        other_precisions=(),
        partly_trained=None,
        **divided,
    )


def unchained(layers: Sequence[Layer], *, side_modules: bool) -> str | None:
    """Return why a layer uses more than the output of the one before it and parameters of its own; None if none does.

    The gradient of a parameter that two layers use (tied embeddings) would be a buffer between distant layers.
    `layers`: one for each module. `side_modules`: whether layers without parameters may lie between the two, and
    whether what ends in the forward may be held longer, as a mask is.
    """
    if not layers[0].parameters:
        return f"its first layer, {layers[0].name}, has no parameters"
    for index, layer in enumerate(layers):
        shared = f"{layer.name} shares a parameter (tied embeddings) or a tensor with a layer that is not beside it"
        lives = [moment for each in layer.buffers if layer.modules for moment in (each.born, each.freed)]
        if side_modules:
            lives = [each.freed for each in layer.buffers if layer.modules and each.freed.phase == "b"]
        born = [each.born for each in layer.parameters]
        for moment in (*lives, *born):
            reach = range(min(index, index + moment.layer_offset) + 1, max(index, index + moment.layer_offset))
            if any(layers[each].parameters or not side_modules for each in reach):
                return shared
        if any(moment.layer_offset > side_modules for moment in born):
            return shared
    return None


def _in_roles(model: Model, field: str, frozen: AbstractSet[int]) -> tuple[Layer, ...]:
    """Return the layers in a field of the model with those at the indices `frozen` frozen; empty if not traced so."""
    listed: tuple[Layer, ...] = getattr(model, field)
    roles = getattr(model.partly_trained, field) if model.partly_trained is not None else ()
    if roles:
        listed = tuple(
            replace(layer, **{name: getattr(role, name) for name in NO_ROLES})
            for layer, role in zip(listed, roles, strict=True)
        )
    if not listed or any(layer.untrained_buffers is None for layer in listed):
        return ()
    layers = unrolled(replace(model, layers=listed))
    trained = owned_layers(layers, {instance.index for instance in layers} - frozen).layers
    entries: list[Layer] = []
    for before, (whole, instance) in zip([None, *trained], zip(layers, trained, strict=True), strict=False):
        if before and before.layer is instance.layer and entries[-1].modules:
            entries[-1] = replace(entries[-1], modules=(*entries[-1].modules, instance.module))
            continue
        layer = instance.layer
        if instance.index in frozen:
            end = Moment("end")
            at_rest = tuple(replace(each, born=end, ready=end, summed=False) for each in whole.layer.parameters)
            layer = replace(layer, frozen_parameters=at_rest)
        again = any(entry.name == layer.name for entry in entries)
        name = f"{layer.name} of {instance.module}" if again else layer.name
        entries.append(replace(layer, name=name, modules=(instance.module,) if layer.modules else ()))
    return tuple(entries) if field == "layers" else tuple(replace(entry, **NO_ROLES) for entry in entries)


def _roles(layers: Sequence[LayerInstance], owned: AbstractSet[int]) -> list[str]:
    """Return every layer's role; see [Note: roles]."""
    deepest = min(instance.index for instance in layers if instance.index in owned and instance.layer.parameters)
    roles = ["untrained" if at < deepest else "whole" if at in owned else "frozen" for at in range(len(layers))]
    if deepest > 0:
        roles[deepest] = "deepest"
    return roles


def _held_for_backward(whole: Layer, untrained: Layer, offset: int, output_bytes: Polynomial) -> Layer:
    """Return a layer that is not trained, but whose results are kept until a later layer's backward.

    Angles of rotary embeddings are such results: every block saves them for its own backward. They are freed in the
    last backward that needs them, that of the first trained block, `offset` layers later. `whole`: the layer as traced
    where all layers are trained, which tells what is saved. `output_bytes`: size of the next layer's input, which is no
    such result: whether that layer saves it depends on its role (`_input_freed`). It is made here where ranks take
    their parts of sequences after the angles.
    """
    passed, saved = (
        [n for n, each in enumerate(layer.buffers) if each.born.phase == "f" and each.freed.layer_offset > 0]
        for layer in (untrained, whole)
    )
    same = [untrained.buffers[n].size_bytes for n in passed] == [whole.buffers[n].size_bytes for n in saved]
    if not (offset and same):
        return untrained
    buffers = list(untrained.buffers)
    for number, other in zip(passed, saved, strict=True):
        if buffers[number].size_bytes == output_bytes:
            continue
        freed = buffers[number].freed
        if whole.buffers[other].freed.phase == "b" and freed.phase == "f" and freed.layer_offset >= offset:
            buffers[number] = replace(buffers[number], freed=Moment("b", LAST, offset), category="activations")
    return replace(untrained, buffers=tuple(buffers))


def source_of_input(layers: Sequence[Layer], index: int) -> int:
    """Return the index of the layer whose output the layer at `index` uses.

    That is the one before, except where modules without parameters lie between that return nothing of its size.
    """
    for source in range(index - 1, -1, -1):
        layer = layers[source]
        size = passed_bytes(layer, layers[index])
        crossing = (each for each in layer.buffers if each.born.phase == "f" and each.freed.layer_offset > 0)
        if any(each.size_bytes == size for each in crossing):
            return source
        if layer.parameters:
            break
    return index - 1


def _adapted_to_neighbours(beside: Sequence[Layer | None], around: tuple[str, str, str], offset: int) -> Layer:
    """Return a layer in its role, with the lives of its buffers as its neighbours' roles make them.

    `beside`: the layer before it, the layer, and the one that uses its output; `around`: their roles; `offset`: how
    many layers after it the one that uses its output comes.
    """
    before, layer, after = beside
    assert layer is not None
    if set(around) <= {"whole", ""}:
        return layer
    run = _in_role(layer, around[1])
    buffers = list(run.buffers)
    handed, back = layer_output(buffers, passed_bytes(layer, after)), layer_input_gradient(buffers)
    if handed and after:
        freed = _input_freed(layer, after, around[2], offset)  # None: not sooner than its own life
        if freed is not None:
            category = "activations" if freed.phase == "b" else "temporaries"
            passed = replace(handed, freed=replace(freed, layer_offset=offset), category=category)
            buffers[buffers.index(handed)] = passed
    if back and before:
        freed = _gradient_freed(layer, before, around[0])
        if freed:
            buffers[buffers.index(back)] = replace(back, freed=replace(freed, layer_offset=-1))
    for number, buffer in enumerate(buffers):
        if buffer.freed.phase == "f" and buffer.freed.layer_offset > 0:
            buffers[number] = replace(buffer, freed=replace(buffer.freed, position=LAST))
    return replace(run, buffers=tuple(buffers))


def _in_role(layer: Layer, role: str) -> Layer:
    """Return the layer as it is traced in a role, among layers of the same role."""
    if role == "whole":
        return layer
    if role == "untrained":
        part = PartialBackward(
            backward_flop=NO_COST,
            backward_bytes=NO_COST,
            backward_streamed_bytes=NO_COST,
            backward_operations=0,
            buffers=layer.untrained_buffers or (),
            reductions=layer.untrained_reductions,
        )
    else:
        part = _partial_backward(layer, role)
    return replace(
        _recomputed_in_role(layer, part.buffers),
        parameters=part.parameters,
        backward_flop=part.backward_flop,
        backward_bytes=part.backward_bytes,
        backward_streamed_bytes=part.backward_streamed_bytes,
        backward_operations=part.backward_operations,
        buffers=part.buffers,
        reductions=part.reductions,
    )


def _recomputed_in_role(layer: Layer, buffers: Sequence[Buffer]) -> Layer:
    """Return a block with its recomputation expressed in the positions of a role's buffers.

    See [Note: recomputed roles]. If the role does not allocate the same tensors, the recomputation's positions are left
    out. Roles are traced with several samples.
    """
    layer = replace(for_samples(layer, 2), recompute_after=None)  # its backward has other positions
    if layer.recompute_positions is None:
        return layer
    own, traced = ([each for each in them if each.born.phase == "f"] for them in (buffers, layer.buffers))
    same = [each.size_bytes for each in own] == [each.size_bytes for each in traced]
    born = [each.born.position for each in traced]

    def in_role(position: int) -> int:
        return own[max(0, bisect_right(born, position) - 1)].born.position

    if not same:
        untraced: dict[str, Any] = dict.fromkeys(("selective_positions", "selective_rerun", "every_second_product"))
        return replace(layer, recompute_positions=None, recompute_releases=None, **untraced)
    released = dict(zip((id(each) for each in traced if each.is_saved), layer.recompute_releases or (), strict=False))
    releases = [
        released.get(id(whole), whole.freed.position)
        for each, whole in zip(own, traced, strict=True)
        if each.is_saved and (id(whole) in released or whole.freed.phase == "f")
    ]
    again = layer.every_second_product
    complete = layer.recompute_releases is not None and len(releases) == sum(each.is_saved for each in own)
    return replace(
        layer,
        recompute_positions=in_role(layer.recompute_positions - 1) + 1,
        recompute_releases=tuple(map(in_role, releases)) if complete else None,
        selective_positions=layer.selective_positions and tuple(map(in_role, layer.selective_positions)),
        selective_rerun=layer.selective_rerun
        and (in_role(layer.selective_rerun[0]), in_role(layer.selective_rerun[1])),
        every_second_product=again and replace(again, positions=tuple(map(in_role, again.positions))),
    )


def _partial_backward(layer: Layer, role: str) -> PartialBackward:
    part = layer.deepest if role == "deepest" else layer.frozen
    assert part is not None  # checked when the scenario was loaded
    return part


def _input_freed(layer: Layer, after: Layer, role: str, offset: int) -> Moment | None:
    """Return the moment at which the layer `after`, in its role, frees the output of `layer`; None: not before the
    traced moment.
    """
    if role == "untrained":
        return None
    if role != "whole":
        return _partial_backward(after, role).input_freed
    handed = layer_output(layer.buffers, passed_bytes(layer, after))
    return handed.freed if handed and handed.freed.layer_offset == offset else None


def _gradient_freed(layer: Layer, before: Layer, role: str) -> Moment | None:
    """Return the moment at which the layer `before`, in its role, frees the gradient that `layer` passes back."""
    if role != "whole":
        return _partial_backward(before, role).gradient_freed
    back = layer_input_gradient(layer.buffers)
    return back.freed if back else None
