"""Costs of every layer when a rank trains only some, from traced steps with all other parameters frozen.

Three kinds of steps are traced. In the first, no layer is trained, and autograd saves nothing. In the second, only the
first layer is trained, and all others pass gradients on. In the third, one layer is trained alone: its weights get
gradients, its input gets none. `gssim.workload.owned` combines them for any range of layers that a rank owns.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from gsreal.model_files.divided_steps import Steps
from gsreal.model_files.fit import TERMS, Shape, Terms, fit_buffers, fit_polynomial, fit_reductions, parameters_of
from gsreal.model_files.recorder import NoPolynomialError, Record
from gsreal.model_files.step import Step, record_partial_steps
from gssim.workload import Layer, Model, Moment, PartialBackward, layer_input_gradient, layer_output, passed_bytes
from gssim.workload.owned import source_of_input, unchained

Records = dict[Shape, Record]
NOTHING, FIRST = -1, 0
"""Steps in which no layer, and only the first layer, is trained; any other number stands for that layer alone."""


def with_partial_costs(
    model: Model,
    layers: Sequence[Layer],
    steps: Steps,
    *,
    where: str,
    terms: Terms = TERMS["layers"],
    side_modules: bool = False,
) -> list[Layer]:
    """Return `layers` (one for each module) with the partial costs of ranks that train only some.

    `steps`, `terms`: the steps to which the layers were fitted, whole or as one rank has a part of them, and the terms
    of their quantities. `side_modules`: whether modules without parameters may lie between a layer and the one before,
    as those of rotary embeddings do. The layers are unchanged if one of them uses more than the output of the one
    before it, or if its operations depend on the shape: the file then has no partial costs, and a plan that needs them
    is refused.
    """
    if unchained(layers, side_modules=side_modules) is not None:
        return list(layers)
    kinds: dict[int, Records] = {kind: {} for kind in (NOTHING, FIRST, *_representatives(layers).values())}
    likes: dict[int | None, Record] = {}
    for step in (*steps.traced, steps.checked):
        for kind, record in record_partial_step(
            model, layers, list(kinds), step, where, like=likes.get(step.context)
        ).items():
            likes.setdefault(step.context, record)
            kinds[kind][step.shape] = record
    try:
        return _fit_partial_costs(layers, kinds, steps.checked.shape, terms)
    except NoPolynomialError:
        return list(layers)


def _representatives(layers: Sequence[Layer]) -> dict[int, int]:
    """Map each layer that may be the deepest trained one to the first layer with the same operations.

    Their adjacent layers may differ. That changes only where buffers end that are passed to other layers, so the
    positions of these ends are not compared.
    """
    first_of: dict[str, int] = {}
    representatives = {}
    for index, layer in enumerate(layers):
        if index > 0 and layer.parameters:
            buffers = tuple(
                replace(buffer, freed=Moment(buffer.freed.phase, 0, buffer.freed.layer_offset))
                if buffer.freed.layer_offset
                else buffer
                for buffer in layer.buffers
            )
            operations = repr(replace(layer, name="", modules=(), buffers=buffers))
            representatives[index] = first_of.setdefault(operations, index)
    return representatives


def record_partial_step(
    model: Model, layers: Sequence[Layer], kinds: Sequence[int], step: Step, where: str, like: Record | None = None
) -> dict[int, Record]:
    """Return the record of `step` in each of the `kinds` of which layers are trained; `layers`: one for each module."""

    def trained(kind: int) -> AbstractSet[str]:
        layer = layers[kind]
        place = layer.modules[0] if layer.modules else layer.name
        return {p.name.replace("{}", place) for p in layer.parameters} if kind != NOTHING else set()

    every = [trained(kind) for kind in kinds]
    records = record_partial_steps(model, step, where=where, like=like, trained=every)
    return dict(zip(kinds, records, strict=True))


def _fit_partial_costs(
    layers: Sequence[Layer], kinds: Mapping[int, Records], checked: Shape, terms: Terms
) -> list[Layer]:
    """Return the layers with their partial costs, as functions of the shape."""
    likes = _representatives(layers)
    frozen = [None, *(_part(kinds[FIRST], checked, layers, k, terms) for k in range(1, len(layers)))]
    alone = {k: _part(kinds[k], checked, layers, k, terms) for k in set(likes.values())}
    fitted = []
    for index, layer in enumerate(layers):
        untrained = fit_buffers(kinds[NOTHING], checked, index, layer.name, terms)
        fitted.append(
            replace(
                layer,
                untrained_buffers=untrained,
                untrained_reductions=fit_reductions(kinds[NOTHING], checked, index, terms),
                frozen=frozen[index],
                deepest=alone.get(likes.get(index, -1)),
            )
        )
    return fitted


def _part(records: Records, checked: Shape, layers: Sequence[Layer], index: int, terms: Terms) -> PartialBackward:
    """Return one layer's partial backward from the steps' records."""
    first = next(iter(records.values()))
    if any(len(record.alive) != len(first.alive) for record in records.values()):
        raise NoPolynomialError("the operations depend on batch size or sequence length")
    name, place = layers[index].name, (index, "b")
    flop = {shape: record.flop[place] for shape, record in records.items()}
    moved = {shape: record.bytes_moved[place] for shape, record in records.items()}
    streamed = {shape: record.streamed[place] for shape, record in records.items()}
    source = source_of_input(layers, index)
    handed = layer_output(
        fit_buffers(records, checked, source, name, terms), passed_bytes(layers[source], layers[index])
    )
    back = layer_input_gradient(fit_buffers(records, checked, index + 1, name, terms))
    freed_here = handed and handed.freed.layer_offset == index - source
    return PartialBackward(
        backward_flop=fit_polynomial(flop, checked, f"{name}: FLOP", terms),
        backward_bytes=fit_polynomial(moved, checked, f"{name}: bytes", terms),
        backward_streamed_bytes=fit_polynomial(streamed, checked, f"{name}: streamed bytes", terms),
        backward_operations=first.operations[place],
        parameters=parameters_of(records, index, name),
        buffers=fit_buffers(records, checked, index, name, terms),
        reductions=fit_reductions(records, checked, index, terms),
        input_freed=replace(handed.freed, layer_offset=0) if handed and freed_here else None,
        gradient_freed=replace(back.freed, layer_offset=0) if back else None,
    )
