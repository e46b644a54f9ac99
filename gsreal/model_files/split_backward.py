"""Costs of every layer when a pipeline splits its backward: first the gradient of the input, later those of weights.

Zero-bubble schedules do so. One step is traced in which all layers but the first are a stage of a pipeline, whose
backward is torch's own (torch.distributed.pipelining._backward: `stage_backward_input`, then `stage_backward_weight`).

[Note: split backward] The first part keeps autograd's graph, and with it nearly all that the forward saved. Of each
operation with parameters it also keeps the gradient of the output. The second part runs these operations once more, for
their parameters alone, in the order in which the module lists its parameters. It frees what only they saved; all else
is freed at its end. A gradient that is added to an earlier one is freed once those of the next operation are computed.
The first stage of a pipeline sends no gradient: its whole backward is the second part.

[Note: ends of stages] At the end of the first part torch detaches the stage's output from autograd's graph. Nodes that
follow the last operation with parameters, and with them what only they saved, are then freed: in a block of routed
experts, for example, the outputs of the experts, which are weighted after their last product. Within a stage, the nodes
of the next block keep them to the end. So the first part of each block's backward is also traced as the last of a
stage, at one shape.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward
from torch.utils._pytree import tree_flatten, tree_unflatten

from gsreal.methods.mapped import Mapped
from gsreal.model_files.build import example_batch, logits_of, loss_of
from gsreal.model_files.fake_module import fake_module, without_values
from gsreal.model_files.fit import TERMS, Shape, fit_buffers, fit_polynomial, parameters_of
from gsreal.model_files.recorder import NoPolynomialError, Record, Recorder, StorageLife
from gsreal.model_files.step import known_storages, layer_boundaries
from gssim.scenario import of_no_sample
from gssim.workload import Buffer, Layer, Model, Parameter, SplitBackward

Records = Mapping[Shape, Record]
WHOLE = TERMS["layers"]


def with_split_costs(
    model: Model, layers: Sequence[Layer], shapes: Sequence[Shape], checked: Shape, *, where: str
) -> list[Layer]:
    """Return `layers` (one for each module) with the costs of a split backward.

    They are unchanged if a layer does not follow from the output of the one before it alone, or if what is done depends
    on the shape: the file then has no such costs, and a plan that needs them is refused.
    """
    first = next((k for k, each in enumerate(layers) if k and each.modules and not of_no_sample(each)), None)
    if first is None or any(layer.frozen_parameters for layer in layers):
        return list(layers)
    try:
        records = {shape: record_stage_step(model, layers, first, shape, where) for shape in (*shapes, checked)}
        ending = _released_at_ends(model, layers, first, records, where)
        parts = [_part(records, ending, checked, layers, index) for index in range(first, len(layers))]
    except (NoPolynomialError, RuntimeError):  # the latter from torch, of a module that it cannot split so
        return list(layers)
    return [*layers[:first], *(replace(each, split=part) for each, part in zip(layers[first:], parts, strict=True))]


def record_stage_step(
    model: Model, layers: Sequence[Layer], first: int, shape: Shape, where: str, *, last: int | None = None
) -> Record:
    """Return the record of a step at one shape whose stage begins with layer number `first`.

    `last`: the layer that the stage ends with, of whose backward only the first part is recorded; None: the loss.
    """
    names = [layer.name for layer in layers if layer.modules]
    before = {each.name.replace("{}", layer.name) for layer in layers[:first] for each in layer.parameters}
    with without_values(model):
        module = fake_module(model, where)
        module.train()
        inputs, targets = example_batch(model, batch_size=shape.b, sequence_length=shape.s)
        if last is not None:
            return record_first_part(module, names, first, last, inputs, targets)
        return record_split(module, names, first, before, inputs, targets)


def _released_at_ends(
    model: Model, layers: Sequence[Layer], first: int, records: Records, where: str
) -> Mapping[int, AbstractSet[int]]:
    """Return the numbers of the storages, of those that a block's forward and first part create, that are freed when
    the first part ends if the block is the last of a stage, by the block's index; see [Note: ends of stages].
    """
    shape, record = next(iter(records.items()))
    released: dict[int, AbstractSet[int]] = {}
    for index in (index for index in range(first, len(layers) - 1) if layers[index].block):
        ended = record_stage_step(model, layers, first, shape, where, last=index)
        alone, within = (_of_first_part(each, index) for each in (ended, record))
        if [each.size_bytes for each in alone] != [each.size_bytes for each in within]:
            raise NoPolynomialError("a block allocates other tensors as the last of a stage")
        at_end = (each.freed is not None and each.freed[1:] == ("input-end", 0) for each in alone)
        released[index] = {number for number, is_released in enumerate(at_end) if is_released}
    return released


def _of_first_part(record: Record, index: int) -> list[StorageLife]:
    return [life for life in record.alive if life.born[0] == index and life.born[1] in ("f", "i")]


@dataclass
class _Groups:
    """Parameters whose operations the second part runs together, and the layer of each such group."""

    recorder: Recorder
    layers: dict[int, int] = field(default_factory=dict)
    """Layer in which the first part reaches a group, by the group's identity."""
    order: list[int] = field(default_factory=list)
    """Layers in the order in which the second part runs them."""
    removable: list[Any] = field(default_factory=list)

    def watch(self, outputs: Any, parameters: Any, graph: Any) -> list[dict[str, Any]]:
        """Return torch's groups of parameters; hooks record the layer in which the first part reaches each."""
        groups = _GROUPS_OF(outputs, parameters, graph)
        for group in groups:
            for node in group["intermediates"]:

                def note(_gradients: Any, key: int = id(group)) -> None:
                    self.layers.setdefault(key, self.recorder.layer)

                self.removable.append(node.register_prehook(note))
        return groups

    def one_by_one(self, groups: list[dict[str, Any]], parameters: Sequence[nn.Parameter]) -> Iterator[dict[str, Any]]:
        """Yield the groups to torch's loop, which has dropped the one before except for its gradients.

        No parameter keeps a gradient, as if it were added to an earlier one.
        """
        for group in groups:
            for parameter in parameters:
                parameter.grad = None
            if not self.order or self.order[-1] != self.layers[id(group)]:
                self.order.append(self.layers[id(group)])
            self.recorder.enter(self.order[-1], "w")
            yield group
        self.recorder.enter(len(self.recorder.record.modules), "end")


_GROUPS_OF = _backward.get_param_groups


def record_split(
    module: nn.Module, names: list[str], first: int, before: AbstractSet[str], inputs: Tensor, targets: Tensor
) -> Record:
    """Return the record of a step with a split backward, in phases `f`, `i` and `w`.

    To be called under fake tensors. `names`: the modules at which layers begin. `first`: the layer whose input the
    stage receives. `before`: the parameters of the layers before it. A head that shares one of them has a copy in its
    stage, which lists it with the head.
    """
    record = Record(names, blocks=set())
    recorder = Recorder(record, known_storages(module, inputs, targets))
    groups, trained = _Groups(recorder), [each for each in module.named_parameters() if each[1].requires_grad]
    parameters = [parameter for _, parameter in sorted(trained, key=lambda each: each[0] in before)]
    in_second = False

    def enter(layer: int, phase: str) -> None:
        if not in_second:  # operations that run again run their outputs' hooks again
            recorder.enter(layer, "i" if phase == "b" else phase)

    with (
        _receive_first_input(module, names[first]) as received,
        recorder,
        layer_boundaries(module, names, enter=enter) as out,
    ):
        loss = loss_of(out(logits_of(module(inputs))), targets)
        recorder.enter(len(names), "i")
        with mock.patch.object(_backward, "get_param_groups", groups.watch):
            _, param_groups = _backward.stage_backward_input([loss], None, received, iter(parameters))
        for handle in groups.removable:
            handle.remove()
        gradients = [each.grad for each in received if each.grad is not None]
        if len(groups.layers) != len(param_groups) or not param_groups or len(gradients) != 1:
            raise NoPolynomialError("a stage would need more than the output of the layer before it")
        of_input = recorder.live[gradients.pop().untyped_storage()._cdata]
        in_second = True
        lives = _parameter_lives(module, record, recorder, groups.one_by_one(param_groups, parameters), parameters)
    _tidy(recorder, groups.order, of_input, lives)
    return record


def record_first_part(
    module: nn.Module, names: list[str], first: int, last: int, inputs: Tensor, targets: Tensor
) -> Record:
    """Return the record of a forward, and of the first part of the backward of the layers from `first` to `last`.

    Other arguments as of `record_split`. What is freed as the part ends has the moment `input-end`.
    """
    record = Record(names, blocks=set())
    recorder = Recorder(record, known_storages(module, inputs, targets))
    outputs: list[Tensor] = []
    boundaries = layer_boundaries(
        module, names, enter=lambda layer, phase: recorder.enter(layer, "i" if phase == "b" else phase),
        take=lambda given: outputs.append(given) if recorder.layer == last + 1 else None,
    )  # fmt: skip
    with _receive_first_input(module, names[first]) as received, recorder, boundaries as out:
        out(logits_of(module(inputs)))
        recorder.enter(len(names), "i")
        if outputs[0]._is_view():  # which torch does not detach in place
            outputs[0] = Mapped.apply(outputs[0], Tensor.detach, lambda gradient: gradient)
        gradients = [torch.ones_like(outputs[0])]
        recorder.enter(last, "i")
        parameters = [each for each in module.parameters() if each.requires_grad]
        _, kept = _backward.stage_backward_input(outputs, gradients, received, iter(parameters))
    for life in record.alive:
        if life.freed is not None and life.freed[1] == "i" and life.freed[0] < first:
            life.freed = (life.born[0], "input-end", 0)
    record.alive = [replace(life) for life in record.alive]  # copies: what is still held is freed on return
    del kept
    return record


@contextmanager
def _receive_first_input(module: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """Let a layer's first input with a gradient be received from another device; yield the list that it is put in."""
    received: list[Tensor] = []

    def detach(_module: nn.Module, args: Any, named: Any) -> Any:
        values, form = tree_flatten((args, named))
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.requires_grad:
                values[place] = value.detach().requires_grad_(True)
                received.append(values[place])
                break
        return tree_unflatten(values, form)

    handle = module.get_submodule(name).register_forward_pre_hook(detach, with_kwargs=True)
    try:
        yield received
    finally:
        handle.remove()


def _parameter_lives(
    module: nn.Module,
    record: Record,
    recorder: Recorder,
    groups: Iterator[dict[str, Any]],
    parameters: Sequence[nn.Parameter],
) -> dict[int, str]:
    """Run the second part; return the names of the parameters whose gradients it creates, by the gradients' lives."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    lives: dict[int, str] = {}

    def noted() -> Iterator[dict[str, Any]]:
        for group in groups:
            yield group
            for parameter in parameters:
                if parameter.grad is not None:
                    life = recorder.live[parameter.grad.untyped_storage()._cdata]
                    lives[id(life)] = names[parameter]
                    shape = tuple(parameter.shape)
                    record.parameters[names[parameter]] = (life.born[0], shape, life.born, life.born)

    _backward.stage_backward_weight(iter(parameters), noted())  # type: ignore[arg-type]
    return lives


def _tidy(recorder: Recorder, order: Sequence[int], of_input: StorageLife, lives: Mapping[int, str]) -> None:
    """Express the lives of storages relative to layers that a stage has, wherever it begins and ends.

    What is freed when the second part turns to a layer is freed at the end of the layer that it ran before. What is
    freed when a part returns is freed at its end. The gradient of the stage's input is freed like that of any other
    layer: by the layer before it.
    """
    record, before, alive = recorder.record, dict(zip(order[1:], order, strict=False)), []
    ends = {layer: (layer, "w", max(0, recorder.position[layer, "w"])) for layer in range(len(record.modules) + 1)}
    for life in record.alive:
        freed = life.freed
        if life is of_input:
            freed = ends[life.born[0] - 1]  # a layer that passes its gradient on creates none
        elif life.casts_operand:
            pass
        elif freed is None or freed[1] == "end":
            freed = None
        elif freed[1] == "w" and freed[2] == 0 and freed[0] in before:
            freed = ends[before[freed[0]]]
        elif freed[1] == "i" and freed[0] < order[0]:
            freed = (life.born[0], "input-end", 0)
        if id(life) in lives:
            layer, shape, born, _ = record.parameters[lives[id(life)]]
            record.parameters[lives[id(life)]] = (layer, shape, born, freed or ends[layer])
        else:
            alive.append(replace(life, freed=freed))  # a copy: this function's caller still refers to some storages
    record.alive = alive


def _part(
    records: Records, ending: Mapping[int, AbstractSet[int]], checked: Shape, layers: Sequence[Layer], index: int
) -> SplitBackward:
    """Return one layer's split backward from the records of the steps; `ending`: see `_released_at_ends`."""
    first, name = next(iter(records.values())), layers[index].name
    if any(len(record.alive) != len(first.alive) for record in records.values()):
        raise NoPolynomialError("the operations depend on batch size or sequence length")
    costs: dict[str, Any] = {}
    for part, place in (("input", (index, "i")), ("weight", (index, "w"))):
        for what, amounts in (("flop", "flop"), ("bytes", "bytes_moved"), ("streamed_bytes", "streamed")):
            values = {shape: getattr(record, amounts)[place] for shape, record in records.items()}
            costs[f"{part}_{what}"] = fit_polynomial(values, checked, f"{name}: {what}", WHOLE)
        costs[f"{part}_operations"] = first.operations[place]
    parameters: tuple[Parameter, ...] = parameters_of(records, index, name)
    if not {each.name for each in layers[index].parameters} <= {each.name for each in parameters}:
        raise NoPolynomialError("a parameter gets no gradient")
    fitted = fit_buffers(records, checked, index, name, WHOLE)
    ended = fit_buffers(_as_last(records, index, ending.get(index, ())), checked, index, name, WHOLE)
    buffers = tuple(  # a tensor of the forward, or of the first part, that a later part frees is kept for that part
        replace(buffer, category="activations")
        if buffer.born.phase in ("f", "i") and buffer.freed.phase != buffer.born.phase
        else buffer
        for buffer in _with_forward_of(layers[index], fitted)
    )
    moments = [moment for each in buffers for moment in (each.born, each.freed)]
    if any(abs(moment.layer_offset) > 1 for moment in moments):
        raise NoPolynomialError("a buffer lives from one layer to a distant one")
    freed = tuple(n for n, (a, b) in enumerate(zip(fitted, ended, strict=True)) if a.freed != b.freed)
    return SplitBackward(parameters=parameters, buffers=buffers, freed_as_last=freed, **costs)


def _as_last(records: Records, index: int, released: Collection[int]) -> Records:
    """Return the records with those storages of a layer's forward and first part freed as that part ends."""
    changed = {}
    for shape, record in records.items():
        lives = _of_first_part(record, index)
        ending = {id(lives[number]) for number in released}
        alive = [replace(e, freed=(index, "input-end", 0)) if id(e) in ending else e for e in record.alive]
        changed[shape] = replace(record, alive=alive)
    return changed


def _with_forward_of(layer: Layer, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers of a step in which those of the forward have the layer's own positions.

    Both forwards do the same, but do not always read as many attributes of tensors, which count as positions.
    """
    forward = [each for each in layer.buffers if each.born.phase == "f"]
    if [each.size_bytes for each in forward] != [each.size_bytes for each in buffers if each.born.phase == "f"]:
        raise NoPolynomialError("the forward allocates other tensors before a split backward")
    merged, places = [], iter(forward)
    for buffer in buffers:
        if buffer.born.phase == "f":
            own = next(places)
            freed = own.freed if buffer.freed.phase == "f" and own.freed.phase == "f" else buffer.freed
            buffer = replace(buffer, born=own.born, freed=freed)
        merged.append(buffer)
    return merged
