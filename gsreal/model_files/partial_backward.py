"""Costs of every layer when a rank trains only some, from traced steps with all other parameters frozen.

Three kinds of steps are traced. In the first, no layer is trained, and autograd saves nothing. In the second, only the
first layer is trained, and all others pass gradients on. In the third, one layer is trained alone: its weights get
gradients, its input gets none. `gssim.workload.owned` combines them for any range of layers that a rank owns.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from torch import Tensor, nn

from gsreal.model_files.build import example_batch
from gsreal.model_files.fit import TERMS, Shape, fit_buffers, fit_polynomial, parameters_of
from gsreal.model_files.recorder import NoPolynomialError, Record, Recorder
from gsreal.model_files.step import fake_module, known_storages, record_backward, without_values
from gssim.workload import Layer, Model, Moment, PartialBackward, layer_input_gradient, layer_output, passed_bytes

Records = dict[Shape, Record]
WHOLE = TERMS["layers"]
NOTHING, FIRST = -1, 0
"""Steps in which no layer, and only the first layer, is trained; any other number stands for that layer alone."""


def with_partial_costs(
    model: Model, layers: Sequence[Layer], shapes: Sequence[Shape], checked: Shape, *, where: str
) -> list[Layer]:
    """Return `layers` (one for each module) with the partial costs of ranks that train only some.

    The layers are unchanged if one of them uses more than the output of the one before it, or if its operations depend
    on the shape: the file then has no partial costs, and a plan that needs them is refused.
    """
    if not _is_chain(layers):
        return list(layers)
    steps: dict[int, Records] = {step: {} for step in (NOTHING, FIRST, *_representatives(layers).values())}
    for shape in (*shapes, checked):
        for step, record in recorded(model, layers, list(steps), shape, where).items():
            steps[step][shape] = record
    try:
        return _fitted(layers, steps, checked)
    except NoPolynomialError:
        return list(layers)


def _is_chain(layers: Sequence[Layer]) -> bool:
    """Return whether each layer uses only the output of the one before it, and parameters of its own.

    The gradient of a parameter that two layers use (tied embeddings) would be a buffer between distant layers.
    """
    buffers = [buffer for layer in layers if layer.modules for buffer in layer.buffers]
    parameters = [parameter for layer in layers for parameter in layer.parameters]
    moments = [moment for buffer in buffers for moment in (buffer.born, buffer.freed)]
    near = all(abs(moment.layer_offset) <= 1 for moment in moments)
    return near and bool(layers[0].parameters) and not any(p.born.layer_offset for p in parameters)


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


def recorded(
    model: Model, layers: Sequence[Layer], steps: Sequence[int], shape: Shape, where: str
) -> dict[int, Record]:
    """Return the record of each of the steps at one shape; `layers`: one for each module."""
    records = {}
    names = [layer.name for layer in layers if layer.modules]
    with without_values(model):
        module = fake_module(model, where)
        module.train()
        inputs, targets = example_batch(model, batch_size=shape.b, sequence_length=shape.s)
        for step in steps:
            layer = layers[step]
            place = layer.modules[0] if layer.modules else layer.name
            trained = {p.name.replace("{}", place) for p in layer.parameters} if step != NOTHING else set()
            records[step] = record_trained(module, names, trained, inputs, targets)
    return records


def record_trained(
    module: nn.Module, names: list[str], trained: AbstractSet[str], inputs: Tensor, targets: Tensor
) -> Record:
    """Return the record of a step that trains only the `trained` parameters.

    `names`: the modules at which layers begin.

    To be called under fake tensors; it freezes the module's other parameters.
    """
    record = Record(names, blocks=set())
    for name, parameter in module.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in trained)
    record_backward(Recorder(record, known_storages(module, inputs, targets)), module, inputs, targets)
    return record


def _fitted(layers: Sequence[Layer], steps: Mapping[int, Records], checked: Shape) -> list[Layer]:
    """Return the layers with their partial costs, as functions of the shape."""
    likes = _representatives(layers)
    frozen = [None, *(_part(steps[FIRST], checked, layers, k) for k in range(1, len(layers)))]
    alone = {k: _part(steps[k], checked, layers, k) for k in set(likes.values())}
    fitted = []
    for index, layer in enumerate(layers):
        part = alone.get(likes.get(index, -1))
        untrained = fit_buffers(steps[NOTHING], checked, index, layer.name, WHOLE)
        fitted.append(replace(layer, untrained_buffers=untrained, frozen=frozen[index], deepest=part))
    return fitted


def _part(records: Records, checked: Shape, layers: Sequence[Layer], index: int) -> PartialBackward:
    """Return one layer's partial backward from the steps' records."""
    first = next(iter(records.values()))
    if any(len(record.alive) != len(first.alive) for record in records.values()):
        raise NoPolynomialError("the operations depend on batch size or sequence length")
    name, place = layers[index].name, (index, "b")
    flop = {shape: record.flop[place] for shape, record in records.items()}
    moved = {shape: record.bytes_moved[place] for shape, record in records.items()}
    streamed = {shape: record.streamed[place] for shape, record in records.items()}
    handed = layer_output(
        fit_buffers(records, checked, index - 1, name, WHOLE), passed_bytes(layers[index - 1], layers[index])
    )
    back = layer_input_gradient(fit_buffers(records, checked, index + 1, name, WHOLE))
    return PartialBackward(
        backward_flop=fit_polynomial(flop, checked, f"{name}: FLOP", WHOLE),
        backward_bytes=fit_polynomial(moved, checked, f"{name}: bytes", WHOLE),
        backward_streamed_bytes=fit_polynomial(streamed, checked, f"{name}: streamed bytes", WHOLE),
        backward_operations=first.operations[place],
        parameters=parameters_of(records, index, name),
        buffers=fit_buffers(records, checked, index, name, WHOLE),
        input_freed=replace(handed.freed, layer_offset=0) if handed and handed.freed.layer_offset == 1 else None,
        gradient_freed=replace(back.freed, layer_offset=0) if back else None,
    )
