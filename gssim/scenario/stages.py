"""Cut of a model's layers into pipeline stages, given by the user or balanced over unequal devices.

Also what stages have in common: copies of tied parameters, and layers that every stage runs itself.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gssim.cluster import DeviceType
from gssim.errors import UserError
from gssim.plan import Plan, splitting
from gssim.plan.pipeline_schedule import INTERLEAVED
from gssim.scenario.layer_costs import layer_costs_s
from gssim.units import PRECISION_BYTES
from gssim.workload import Buffer, Layer, LayerInstance, Moment, Polynomial, Workload, unrolled
from gssim.workload.layer import NO_COST

INTERLEAVED_STAGES_PER_RANK = 2
"""Default number of stages per rank of an interleaved plan."""


def schedule_of(plan: Plan, ranks: int) -> str:
    """Return the schedule of a pipeline of `ranks` ranks: the plan's, else 1F1B if there are enough micro-batches."""
    return plan.schedule or ("1f1b" if plan.micro_batches >= ranks else "gpipe")


def stages_per_rank(plan: Plan, ranks: int) -> int:
    """Return the number of stages on each of a pipeline's ranks."""
    if plan.stages is not None:
        return max(1, len(plan.stages) // ranks)
    return INTERLEAVED_STAGES_PER_RANK if plan.schedule in INTERLEAVED else 1


def cut_layers(
    plan: Plan, workload: Workload, devices: Sequence[Mapping[str, DeviceType]], *, samples: int
) -> tuple[range, ...]:
    """Return the numbers of the layers of each stage; stage i is on the pipeline's rank i modulo the number of ranks.

    `devices`: for each pipeline rank, its replicas' types of devices by name; the slowest counts. `samples`: samples of
    a micro-batch. Counts are of the unrolled model's layers. The loss, which is in no module, is part of the last stage
    and is not counted. Raises UserError if there are too few layers, or the plan's counts do not fit the model.
    """
    layers = unrolled(workload.model)
    chain = [instance for instance in layers if instance.layer.modules]
    stages = len(devices) * stages_per_rank(plan, len(devices))
    if plan.stages is not None:
        where = f"plan.stages = {list(plan.stages)}"
        if len(plan.stages) % len(devices):
            raise UserError(
                f"{where}: {len(plan.stages)} stages cannot be divided evenly among {len(devices)} ranks (plan.pp)"
            )
        if sum(plan.stages) != len(chain):
            raise UserError(
                f"{where}: sums to {sum(plan.stages)}, but the model has {len(chain)} layers "
                "(every module of the model file, repetitions one by one; the loss is part of the last stage)"
            )
        counts: Sequence[int] = plan.stages
    else:
        units = _inseparable(chain)
        if stages > len(units):
            raise UserError(
                f"plan.pp = {len(devices)}: {stages} stages, but the model has {len(units)} layers (no loss)"
            )
        rows = []
        for types in devices:
            costs_s = (layer_costs_s(device, workload, chain, samples, name=name) for name, device in types.items())
            slowest_s = [max(layer) for layer in zip(*costs_s, strict=True)]
            rows.append([sum(slowest_s[unit.start : unit.stop]) for unit in units])
        unit_counts = splitting.balanced_stages([rows[stage % len(rows)] for stage in range(stages)])
        ends = [sum(unit_counts[: i + 1]) for i in range(len(unit_counts))]
        starts = [units[i].start for i in (0, *ends[:-1])]
        counts = [stop - start for start, stop in zip(starts, [*starts[1:], len(chain)], strict=True)]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    ends[-1] = len(layers)
    return tuple(range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _inseparable(layers: Sequence[LayerInstance]) -> list[range]:
    """Return ranges of layers that must be on one stage, because gradients of one's parameters arise in another's
    backward.

    Traces ascribe operations between two modules to the module before them, in the forward and in the backward.
    """
    units: list[range] = []
    for instance in layers:
        last = max((instance.index + p.ready.layer_offset for p in instance.layer.parameters), default=instance.index)
        if units and instance.index < units[-1].stop:
            units[-1] = range(units[-1].start, max(units[-1].stop, last + 1))
        else:
            units.append(range(instance.index, max(instance.index, last) + 1))
    return units


# Parameters and tensors that stages have in common --------------------------------------------------------------------


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that layers of several stages use: each such stage holds a copy, and their gradients are summed.

    [Note: tied] In one process, autograd adds the gradients of all uses in the backward of the layer that lists the
    parameter. Across stages, each copy accumulates only the gradient of its own use. After the schedule and the
    reductions over replicas, these gradients are all-reduced over the stages that hold a copy, so that equal copies get
    equal updates. Source: Megatron-LM, core/distributed/finalize_model_grads.py, _allreduce_word_embedding_grads.
    Gradients that are pushed to owners are summed before the push, because the owners of other stages own other ranges,
    and thresholds apply to the sum.
    """

    name: str
    """Its name in the model."""
    layer: int
    """Number of the layer that lists it."""
    place: int
    """Index among that layer's parameters."""
    uses: tuple[tuple[int, Buffer], ...]
    """For every other use: the number of its layer, and the buffer of its gradient in the whole model's backward."""
    stages: tuple[int, ...]
    """Stages that hold a copy."""
    elements: int
    """Number of its elements."""


def tied_parameters(layers: Sequence[LayerInstance], stages: Sequence[range]) -> tuple[TiedParameter, ...]:
    """Return the parameters that layers of several stages use, as the whole model's trace shows them.

    The gradient of another use is a buffer that the backward of the parameter's own layer frees when it allocates the
    sum. (Older model files, which do not mark sums in place, have it freed one operation earlier at such a sum.)
    """
    home = {number: stage for stage, numbers in enumerate(stages) for number in numbers}
    uses: dict[tuple[int, int], list[tuple[int, Buffer]]] = defaultdict(list)
    candidates: dict[int, list[Buffer]] = {}  # by layer object, which repetitions share
    for instance in layers:
        layer = instance.layer
        if id(layer) not in candidates:
            candidates[id(layer)] = [  # gradients passed to the layer before, of a size independent of the batch
                each
                for each in layer.buffers
                if each.born.phase == each.freed.phase == "b" and each.freed.layer_offset < 0
                if all(i == j == 0 for _, i, j in each.size_bytes.terms)
            ]
        for buffer in candidates[id(layer)]:
            freed_in = instance.index + buffer.freed.layer_offset
            if home.get(freed_in, home[instance.index]) != home[instance.index]:
                uses[freed_in, buffer.freed.position].append((instance.index, buffer))
    parameters = []
    for instance in layers if uses else ():
        for place, parameter in enumerate(instance.layer.parameters):
            sizes = _gradient_sizes(parameter.elements)
            layer_of_sum, position = instance.index + parameter.born.layer_offset, parameter.born.position
            freed = [use for at in (position - 1, position) for use in uses.get((layer_of_sum, at), ())]
            tied = tuple(use for use in freed if use[1].size_bytes.at(b=0, s=0) in sizes)
            if tied:
                holders = sorted({home[instance.index], *(home[number] for number, _ in tied)})
                name, elements = instance.parameter_names[place], parameter.elements
                parameters.append(TiedParameter(name, instance.index, place, tied, tuple(holders), elements))
    return tuple(parameters)


def held_layers(layers: Sequence[LayerInstance], stages: Sequence[range]) -> tuple[tuple[LayerInstance, ...], ...]:
    """Return the layers that each stage runs, given all layers and the numbers of each stage's own layers.

    Layers that use a tied parameter list a copy of it, see [Note: tied]. Some layers before the blocks have no
    parameters, and no output that depends on the batch size (rotary angles). They hold nothing of a sample, so every
    stage with blocks runs them itself, without a backward. Where tensor ranks divide sequences, the stage of the first
    block divides its input, see [Note: divided input].
    """
    changed = {instance.index: instance for instance in layers}
    for tied in tied_parameters(layers, stages):
        for number, untied in _untied(changed, tied).items():
            changed[number] = replace(changed[number], layer=untied)
    source, divided, undivided = _divided_input(list(changed.values())), None, list(layers)
    if source is not None:
        divided = changed[source]
        undivided[source] = replace(divided, layer=_without_division(divided.layer, changed[source + 1].layer))
    shared = []
    for number in _shared(undivided):
        layer = undivided[number].layer
        forward_only = replace(
            layer,
            backward_flop=NO_COST,
            backward_bytes=NO_COST,
            backward_streamed_bytes=layer.backward_streamed_bytes and NO_COST,
            backward_operations=0,
            buffers=tuple(buffer for buffer in layer.buffers if buffer.born.phase == "f"),
            split=None,
        )
        shared.append(replace(layers[number], layer=forward_only))
    held = []
    for numbers in stages:
        own = [changed[number] for number in numbers]
        before = [each for each in shared if each.index < numbers.start] if any(e.layer.block for e in own) else []
        if divided is not None and numbers.stop == divided.index + 1:
            own[-1] = undivided[divided.index]
        elif divided is not None and numbers.start == divided.index + 1:
            if before and before[-1].index == divided.index:  # what it runs besides
                before[-1] = divided
            else:
                before.append(replace(divided, layer=_division(divided.layer, own[0].layer)))
        held.append((*before, *own))
    return tuple(held)


def _divided_input(layers: Sequence[LayerInstance]) -> int | None:
    """Return the number of the layer after which tensor ranks divide sequences; None if they do not.

    [Note: divided input] The first block's input is divided: each tensor rank copies its part, and gathers the gradient
    of the whole in the backward. The trace ascribes both, which run between two modules, to the layer before the block.
    A stage that begins with that block is given whole sequences, divides them, and sends back the gradient of whole
    ones (gsreal.methods.tensor_slices.divide_sequences, a hook of the block).
    """
    first = next((place for place, each in enumerate(layers) if each.layer.block), 0)
    if not first or not any(each.kind == "all-gather" for each in layers[first].layer.reductions):
        return None
    return first - 1 if _part_of_input(layers[first - 1].layer, layers[first].layer) is not None else None


def _part_of_input(layer: Layer, block: Layer) -> Buffer | None:
    """Return the rank's part of a block's input, which is as large as the block's output; None if it is not divided.

    `layer`: the layer before the block.
    """
    crossing = [each for each in layer.buffers if each.born.phase == "f" and each.freed.layer_offset > 0]
    parts = [each for each in crossing if each.size_bytes == block.output_bytes != layer.output_bytes]
    return max(parts, key=lambda each: each.born.position, default=None)


def _gathered_gradient(layer: Layer) -> tuple[Buffer, ...]:
    """Return the buffers of the gradient of a block's whole input: as gathered from the ranks, then in sequence order.

    `layer`: the layer before the block. Empty if the input has no gradient.
    """
    begin = next((e.moment for e in layer.reductions if (e.kind, e.moment.phase) == ("all-gather", "b")), None)
    gathered = next((each for each in layer.buffers if each.born == begin), None)
    if gathered is None:
        return ()
    ordered = [
        each
        for each in layer.buffers
        if each.born.phase == "b" and gathered.born.position < each.born.position <= gathered.freed.position
        if each.size_bytes == gathered.size_bytes
    ]
    return (gathered, *ordered[:1])


def _without_division(layer: Layer, block: Layer) -> Layer:
    """Return the layer before a block, in a stage that ends there and passes on whole sequences."""
    part, gradient = _part_of_input(layer, block), _gathered_gradient(layer)
    cost = _division(layer, block)
    moved: dict[str, Any] = {}
    for name in ("forward_bytes", "backward_bytes", "forward_streamed_bytes", "backward_streamed_bytes"):
        quantity, less = getattr(layer, name), getattr(cost, name)
        if quantity is not None:
            moved[name] = quantity.plus(_times(less, -1))
    begin = gradient[0].born if gradient else None
    return replace(
        layer,
        forward_operations=layer.forward_operations - cost.forward_operations,
        backward_operations=layer.backward_operations - cost.backward_operations,
        buffers=tuple(each for each in layer.buffers if each is not part and each not in gradient),
        reductions=tuple(each for each in layer.reductions if each.moment != begin),
        **moved,
    )


def _division(layer: Layer, block: Layer) -> Layer:
    """Return the layer that divides a block's input among tensor ranks, with which the block's stage begins.

    A copy reads and writes what it copies; gathering the gradient does so too, and so does putting it in order.
    """
    part, gradient = _part_of_input(layer, block), _gathered_gradient(layer)
    assert part is not None  # `_divided_input` has found it
    buffers = [part, *gradient[:-1]]
    if gradient:  # the last one is that of the whole input, which is sent to the stage before
        buffers.append(replace(gradient[-1], freed=Moment("b", 0, -1)))
    backward, ordered = NO_COST, NO_COST
    for buffer in gradient:
        backward = backward.plus(_times(buffer.size_bytes, 2))
    for buffer in gradient[1:]:
        ordered = ordered.plus(_times(buffer.size_bytes, 2))
    streams = layer.forward_streamed_bytes is not None
    return Layer(
        name=layer.name,
        modules=layer.modules,
        forward_flop=NO_COST,
        backward_flop=NO_COST,
        forward_bytes=_times(part.size_bytes, 2),
        backward_bytes=backward,
        forward_streamed_bytes=_times(part.size_bytes, 2) if streams else None,
        backward_streamed_bytes=ordered if streams else None,
        saved_bytes=NO_COST,
        output_bytes=part.size_bytes,
        forward_operations=1,
        backward_operations=len(gradient),
        buffers=tuple(buffers),
        reductions=tuple(each for each in layer.reductions if gradient and each.moment == gradient[0].born),
    )


def _times(quantity: Polynomial, factor: int) -> Polynomial:
    """Return a polynomial of whole layers, or of layers on a rank's parts, times a number."""
    return Polynomial(tuple((factor * c, i, j) for c, i, j in quantity.terms))


def _untied(layers: Mapping[int, LayerInstance], tied: TiedParameter) -> dict[int, Layer]:
    """Return the layers that use a tied parameter, changed so that each use has a copy of its own."""
    own = layers[tied.layer].layer
    parameter = own.parameters[tied.place]
    name, offset = tied.name, parameter.born.layer_offset
    changed: dict[int, Layer] = {}
    size = Polynomial(((0, 0, 0),))
    for number, buffer in tied.uses:
        layer = changed.get(number, layers[number].layer)
        last = max((m.position for b in layer.buffers for m in (b.born, b.freed) if m.phase == "b"), default=0)
        copied = replace(parameter, name=name, born=buffer.born, ready=Moment("b", last + 1))
        kept = tuple(each for each in layer.buffers if each is not buffer)
        changed[number] = replace(layer, parameters=(*layer.parameters, copied), buffers=kept)
        size = buffer.size_bytes
    # the gradient of the own use is now the gradient itself, instead of a buffer that is added and freed
    adds = tied.layer + offset
    layer = changed.get(adds, layers[adds].layer)
    summed = next(
        (
            buffer
            for buffer in layer.buffers
            if (buffer.freed, buffer.size_bytes) == (Moment("b", parameter.born.position), size)
            and buffer.born.phase == "b"
        ),
        None,
    )
    if summed is None:
        return changed
    sums = len(tied.uses)
    moved = 3 * sums * size.at(b=0, s=0)  # each sum reads two gradients and writes one
    changed[adds] = replace(
        layer,
        buffers=tuple(buffer for buffer in layer.buffers if buffer is not summed),
        backward_bytes=_less(layer.backward_bytes, moved),
        backward_streamed_bytes=layer.backward_streamed_bytes and _less(layer.backward_streamed_bytes, moved),
        backward_operations=max(0, layer.backward_operations - sums),
    )
    home = changed.get(tied.layer, own)
    born = Moment("b", summed.born.position, offset)
    parameters = list(home.parameters)
    parameters[tied.place] = replace(parameter, born=born)
    changed[tied.layer] = replace(home, parameters=tuple(parameters))
    return changed


def _less(quantity: Polynomial, constant: int) -> Polynomial:
    """Return a quantity minus a constant."""
    return replace(quantity, terms=tuple((c - constant * (i == j == 0), i, j) for c, i, j in quantity.terms))


def _shared(layers: Sequence[LayerInstance]) -> tuple[int, ...]:
    """Return the numbers of the layers that every stage with blocks runs itself; see `held_layers`."""
    indices = []
    for instance in layers:
        if instance.layer.block or not instance.layer.modules:
            break
        if of_no_sample(instance.layer):
            indices.append(instance.index)
    return tuple(indices)


def of_no_sample(layer: Layer) -> bool:
    """Return whether a layer without parameters has outputs, none of which depends on the batch size."""
    outputs = [buffer for buffer in layer.buffers if buffer.born.phase == "f" and buffer.freed.layer_offset > 0]
    constant = all(power == 0 for output in outputs for _, power, _ in output.size_bytes.terms)
    return bool(outputs) and constant and not layer.parameters and not layer.block


def stage_cut_error(layers: Sequence[LayerInstance], stages: Sequence[range]) -> str | None:
    """Return why a model cannot be cut at these stage boundaries, or None if it can: a stage may pass on only one
    tensor.

    Traces show tensors that several layers use: a second tensor outlives the stage boundary, or the gradient of a
    parameter, allocated in one layer, is added to in another layer and not known to be tied (see [Note: tied]).
    """
    home = {number: stage for stage, numbers in enumerate(stages) for number in numbers}
    sums: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for instance in layers:
        for parameter, name in zip(instance.layer.parameters, instance.parameter_names, strict=True):
            ready_in = instance.index + parameter.ready.layer_offset
            sums[ready_in].append((parameter.elements, parameter.born.position, name))
            if home[ready_in] != home[instance.index]:
                beside = layers[ready_in].module
                return f"the gradient of '{name}' arises in the backward of '{beside}': both must be in one stage"
    ties = {id(buffer) for tied in tied_parameters(layers, stages) for _, buffer in tied.uses}
    shared = _shared(layers)
    for number, numbers in enumerate(stages):
        passed = 0
        for instance in (layers[each] for each in numbers):
            for buffer in instance.layer.buffers:
                freed_in = instance.index + buffer.freed.layer_offset
                if buffer.freed.phase != "b" or home.get(freed_in, number) == number or id(buffer) in ties:
                    continue
                passed += buffer.born.phase == "f" and freed_in > instance.index and instance.index not in shared
                size = buffer.size_bytes.at(b=0, s=0)
                alike = [(born, name) for elements, born, name in sums[freed_in] if size in _gradient_sizes(elements)]
                if buffer.born.phase == "b" and alike:
                    between = (instance.module, layers[freed_in].module)
                    return _gradient_between(buffer, alike, between, f"stages {home[freed_in]} and {number}")
        if passed > 1:
            return f"{passed} tensors, not one, go from '{layers[numbers[-1]].module}' to later layers"
    return None


def _gradient_between(buffer: Buffer, alike: Sequence[tuple[int, str]], between: tuple[str, str], stages: str) -> str:
    """Return why a tensor that goes from one layer's backward to another's, `between` stages, prevents the cut.

    `alike`: of parameters as large, the positions at which their gradients are allocated, and their names.
    """
    # both parts of a shared parameter's gradient end as their sum begins
    names = [name for born, name in alike if abs(born - buffer.freed.position) <= 1]
    if names:
        return f"{stages} would share the parameter '{names[0]}'"
    kind = "" if buffer.samples else ", whatever the batch,"
    return (
        f"in the backward, a tensor of {buffer.size_bytes.at(b=0, s=0)} bytes{kind} goes from '{between[0]}' to "
        f"'{between[1]}', and is not known to be the gradient of the output between them (both may use a tensor or a "
        "parameter of an earlier layer)"
    )


def _gradient_sizes(elements: int) -> list[int]:
    """Return the bytes of a gradient in any precision."""
    return [elements * value_bytes for value_bytes in PRECISION_BYTES.values()]
