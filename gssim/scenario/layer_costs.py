"""Times of layers on one device, by which both executors split work: measured, else from a roofline.

They are of a layer by itself, without contention, collectives or hosts that launch ahead. `gssim.cost` predicts from
the same roofline.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from gssim.cluster import DeviceType
from gssim.cluster.kernel_rates import KernelRates, ProductKind
from gssim.execution.cache import cached_by_identity
from gssim.scenario.device_rates import (
    achieved_flop_per_s,
    is_of,
    layer_profile,
    product_precision,
    uncast_precision,
    value_bytes,
)
from gssim.units import PRECISION_BYTES, Rate, Recompute
from gssim.workload import Layer, LayerInstance, Model, Polynomial, TokenInput, Workload
from gssim.workload.layer import NO_COST


def sample_cost_s(device: DeviceType, workload: Workload, samples: float, *, name: str) -> float:
    """Return the time per sample of forward and backward on `device`: from its profile of the model, else a roofline.

    A profile is read at the largest batch that was measured. The roofline is used for devices without a profile, and
    for layers that the profile lacks, on batches of `samples`. `name`: of the device type, for errors.
    """
    layers, measured_s = workload.model.layers, 0.0
    for profile in device.profiles:
        if is_of(profile, workload):
            curves = [
                (entry.repeats, curve)
                for entry in layers
                if entry.name in profile.layers
                for curve in (profile.layers[entry.name].forward_s, profile.layers[entry.name].backward_s)
            ]
            largest = max((curve.sizes[-1] for _, curve in curves), default=0)
            measured_s = sum(n * curve.at(largest) for n, curve in curves) / largest if largest else 0.0
            if measured_s > 0:  # a profile may contain only memory
                layers = tuple(entry for entry in layers if entry.name not in profile.layers)
                break
    return (
        measured_s
        + sum(_training_s(device, workload, each, samples, name=name) * each.repeats for each in layers) / samples
    )


def layer_costs_s(
    device: DeviceType, workload: Workload, layers: Sequence[LayerInstance], samples: int, *, name: str
) -> list[float]:
    """Return the time of `samples` in each layer, forward and backward: from its profile, else from a roofline.

    `name`: as of `sample_cost_s`.
    """
    cost_s: dict[int, float] = {}
    for instance in layers:
        layer = instance.layer
        if id(layer) not in cost_s:
            profile = layer_profile(device, workload, layer)
            cost_s[id(layer)] = (
                _training_s(device, workload, layer, samples, name=name)
                if profile is None
                else profile.forward_s.at(samples) + profile.backward_s.at(samples)
            )
    return [cost_s[id(instance.layer)] for instance in layers]


def _training_s(device: DeviceType, workload: Workload, layer: Layer, samples: float, *, name: str) -> float:
    """Return the roofline's time of one repetition of a layer, forward and backward; `name`: as of `sample_cost_s`."""
    achieved_flop_per_s(device, product_precision(device, workload), name=name)  # refused with the type's name
    return _both_passes_s(device, workload, layer, samples)


@cached_by_identity(maxsize=512, objects=3)  # the plans of a search ask for the same ones
def _both_passes_s(device: DeviceType, workload: Workload, layer: Layer, samples: float) -> float:
    """Return the roofline's time of a layer's forward and backward."""
    own = device, workload, layer
    return sum(layer_roofline_s(*own, work_on(*own, phase), phase, samples) for phase in ("f", "b"))


class Work(NamedTuple):
    """FLOP, memory traffic and operations of a layer's phase."""

    flop: Polynomial
    moved_bytes: Polynomial
    operations: int
    streamed_bytes: Polynomial | None = None
    """The part of the moved bytes that belongs to operations with next to no arithmetic, if known."""


def work_of(layer: Layer, phase: str, *, recompute: Recompute = "full") -> Work:
    """Return the work of a phase; if the recomputed part was not traced, the whole forward's.

    Phases `i` and `w` are the parts of a split backward; a layer whose parts were not traced does nothing in them.
    """
    if phase in ("i", "w"):
        return _split_work(layer, phase)
    if phase == "b":
        return Work(layer.backward_flop, layer.backward_bytes, layer.backward_operations, layer.backward_streamed_bytes)
    forward = Work(layer.forward_flop, layer.forward_bytes, layer.forward_operations, layer.forward_streamed_bytes)
    if phase == "f":
        return forward
    flop, moved_bytes, operations = layer.recompute_flop, layer.recompute_bytes, layer.recompute_operations
    streamed = layer.recompute_streamed_bytes
    part = layer.every_second_product
    if recompute == "selective":
        flop, moved_bytes, operations = layer.selective_flop, layer.selective_bytes, layer.selective_operations
        streamed = layer.selective_streamed_bytes
    elif recompute == "every-second-product" and part is not None:
        flop, moved_bytes, operations, streamed = part.flop, part.bytes, part.operations, part.streamed_bytes
    return Work(
        forward.flop if flop is None else flop,
        forward.moved_bytes if moved_bytes is None else moved_bytes,
        forward.operations if operations is None else operations,
        forward.streamed_bytes if moved_bytes is None else streamed,
    )


def _split_work(layer: Layer, phase: str) -> Work:
    split = layer.split
    if split is None:
        return Work(NO_COST, NO_COST, 0, NO_COST)
    if phase == "i":
        return Work(split.input_flop, split.input_bytes, split.input_operations, split.input_streamed_bytes)
    return Work(split.weight_flop, split.weight_bytes, split.weight_operations, split.weight_streamed_bytes)


CAST_PASSES = {"f": 1.5, "r": 1.5, "b": 3.0}
"""Casts to 8 bits, for each input and output of a linear map: values read or written, in units of their bytes at
`precision`. A forward reads each and writes half as many bytes; a backward does so for the gradient and its transpose.
"""


def work_on(
    device: DeviceType,
    workload: Workload,
    layer: Layer,
    phase: str,
    *,
    recompute: Recompute = "full",
    whole: Layer | None = None,
    positions: int | None = None,
) -> Work:
    """Return the work of a phase. FLOP of linear maps in 8 bits are scaled so that they take as long at the device's
    rate.

    Each weight matrix of a block is a linear map of every token: 2 FLOP per element in a forward, 4 in a backward. If
    `layer` is a slice of `whole`, a rank casts only parts of inputs and outputs. Recomputation may skip some of the
    maps. `positions`: number of positions of each sequence, if the rank runs on parts of sequences.
    """
    work, ratio = work_of(layer, phase, recompute=recompute), device.float8_ratio
    flop: float
    if workload.map_precision is None or ratio is None or not layer.block:
        return work
    elements = sum(prod(shape) for shape in _maps(layer))
    flop = (4 if phase == "b" else 2) * elements
    widths = float(sum(sum(shape) for shape in _maps(whole or layer)) * elements)
    widths /= sum(prod(shape) for shape in _maps(whole or layer)) or 1
    if phase == "r":
        linear = _linear_flop(work.flop, positions) / (positions or 1)
        widths, flop = widths * linear / flop if flop else 0.0, linear
    cast = round(CAST_PASSES[phase] * PRECISION_BYTES[workload.model.traced_precision] * widths)
    moved, streamed = work.moved_bytes, work.streamed_bytes or NO_COST
    less = -round(flop * (1 - 1 / ratio))
    fewer, more = ((less * positions, 1, 0), (cast * positions, 1, 0)) if positions else ((less, 1, 1), (cast, 1, 1))
    return work._replace(
        flop=replace(work.flop, terms=(*work.flop.terms, fewer)),
        moved_bytes=replace(moved, terms=(*moved.terms, more)),
        streamed_bytes=replace(streamed, terms=(*streamed.terms, more)),
    )


def _linear_flop(flop: Polynomial, positions: int | None) -> int:
    """Return the FLOP of the linear maps that every token passes: per token, or per part on `positions`."""
    return sum(c for c, i, j in flop.terms if (i, j) == (1, 0 if positions else 1))


def _maps(layer: Layer) -> list[tuple[int, ...]]:
    return [parameter.shape for parameter in layer.parameters if len(parameter.shape) == 2]


def layer_roofline_s(
    device: DeviceType,
    workload: Workload,
    layer: Layer,
    work: Work,
    phase: str,
    batch_size: float,
    *,
    positions: int | None = None,
) -> float:
    """Return the roofline's time of `work`, a layer's phase, for `batch_size` samples (it may be a fraction).

    Products and attention run at measured rates by their sizes, where the device has these.
    """
    flop, moved_bytes, streamed_bytes = _amounts(device, workload, layer, work, phase, batch_size, positions)
    return roofline_s(
        device,
        product_precision(device, workload),
        flop=flop,
        moved_bytes=moved_bytes,
        operations=work.operations,
        streamed_bytes=streamed_bytes,
    )


def memory_bound_ratio(
    device: DeviceType,
    workload: Workload,
    layer: Layer,
    work: Work,
    phase: str,
    batch_size: float,
    *,
    positions: int | None = None,
) -> float:
    """Return the time of the products of `work` over their time at the device's FLOP/s: above 1 if the memory's
    bandwidth limits them, else 1.

    The time is that of `layer_roofline_s`, whose arguments these are.
    """
    flop, moved_bytes, streamed_bytes = _amounts(device, workload, layer, work, phase, batch_size, positions)
    at_rate_s = flop / achieved_flop_per_s(device, product_precision(device, workload))
    of_products = moved_bytes if device.kind == "tpu" else moved_bytes - streamed_bytes
    return max(1.0, of_products / device.memory_bandwidth_bytes_per_s / at_rate_s) if at_rate_s else 1.0


def _amounts(
    device: DeviceType,
    workload: Workload,
    layer: Layer,
    work: Work,
    phase: str,
    batch_size: float,
    positions: int | None,
) -> tuple[float, float, float]:
    """Return the FLOP, the moved bytes and the streamed bytes of `work`.

    Products that are slower than the device's achieved rate count as the FLOP that take as long at that rate.
    """
    shape: dict[str, Any] = {"b": batch_size, "s": workload.sequence_length or 1}
    scale = value_bytes(workload) / PRECISION_BYTES[workload.model.traced_precision]
    precision = product_precision(device, workload)
    flop = float(work.flop.at(**shape))
    uncast_flop = _uncast_flop(layer, phase, flop, **shape)
    rates = next((each for each in device.kernels if each.precision == precision), None)
    if rates is not None:
        own = achieved_flop_per_s(device, precision)
        settings: dict[str, Any] = {"phase": phase, "positions": positions} | shape
        flop += own * _kernels_excess_s(rates, own, workload.model, layer, work.flop, **settings)
    if uncast_flop:  # as many FLOP at the rate of the others as take equally long
        slower_ratio = achieved_flop_per_s(device, precision)
        slower_ratio /= achieved_flop_per_s(device, uncast_precision(device, workload))
        flop += uncast_flop * (slower_ratio - 1)
    streamed_bytes = work.streamed_bytes.at(**shape) * scale if work.streamed_bytes is not None else 0.0
    return flop, work.moved_bytes.at(**shape) * scale, streamed_bytes


def _uncast_flop(layer: Layer, phase: str, flop: float, *, b: float, s: int) -> float:
    """Return how many of a phase's `flop` run in fp32 under autocast. If the phase is a recomputation, the forward's
    fraction is taken for it.
    """
    uncast = layer.backward_uncast_flop if phase == "b" else layer.forward_uncast_flop
    if uncast is None:
        return 0.0
    whole = (layer.backward_flop if phase == "b" else layer.forward_flop).at(b=b, s=s)
    return uncast.at(b=b, s=s) * flop / whole if whole else 0.0


PRODUCTS_OF_PHASE: dict[str, tuple[ProductKind, ...]] = {
    "b": ("input_gradient", "weight_gradient"),
    "i": ("input_gradient",),
    "w": ("weight_gradient",),
}
"""Products of a linear map in the phases of a backward; other phases have the forward's."""


def _kernels_excess_s(
    rates: KernelRates,
    own_flop_per_s: float,
    model: Model,
    layer: Layer,
    flop: Polynomial,
    *,
    phase: str,
    positions: int | None,
    b: float,
    s: int,
) -> float:
    """Return the time of a layer's products and attention at measured rates, minus their time at the device's one rate.

    `flop`: of the phase, for b samples of s tokens. Terms in b*s are linear maps of every token. They run at the mean
    rate of the layer's weight matrices, weighted by FLOP; frozen matrices have no weight gradient, and a head without a
    matrix of its own multiplies by the embedding's. Terms in b*s^2 are attention. All other FLOP run at the device's
    rate, as do FLOP in b*s beyond those of the matrices (of experts, for example, which do not see every token). With
    `positions`, a rank runs on parts of sequences: linear maps are then terms in b, and attention, over all of the
    sequence, terms in b*s.
    """
    if not isinstance(model.input, TokenInput):
        return 0.0
    tokens = b * (positions or s)
    linear = _linear_flop(flop, positions) * (b if positions else tokens)
    power = 1 if positions else 2
    attention = sum(c for c, i, j in flop.terms if (i, j) == (1, power)) * b * s**power
    trained, frozen = (
        [parameter.shape for parameter in parameters if len(parameter.shape) == 2]
        for parameters in (layer.parameters, layer.frozen_parameters)
    )
    if not trained and not frozen:
        outputs = model.input.vocabulary
        inputs = _linear_flop(layer.forward_flop, positions) // (2 * outputs * (positions or 1))
        trained = [(outputs, inputs)] if inputs else []
    of_trained = PRODUCTS_OF_PHASE.get(phase, ("forward",))
    products = [
        (2.0 * tokens * n * k, rates.products[kind].at(tokens, k, n))
        for shapes, kinds in ((trained, of_trained), (frozen, of_trained[:1]))
        for n, k in shapes
        for kind in kinds
    ]
    excess_s = 0.0
    if linear and products:
        listed = sum(each for each, _ in products)
        mean_s = sum(each / flop_per_s for each, flop_per_s in products) / listed
        excess_s += min(linear, listed) * (mean_s - 1 / own_flop_per_s)
    if attention and rates.attention:
        causal = model.input.task == "next-token"
        named = [sliced for sliced in model.sliced_layers if sliced.name == layer.name]
        head_widths = [
            parameter.shape[parameter.cut]
            for sliced in (named or model.sliced_layers)  # parts of sequences are traced in groups of their own
            for parameter in (*sliced.frozen_parameters, *sliced.parameters)
            if parameter.cut is not None and len(parameter.shape) == 2
        ]  # matrices are cut by heads; the smallest part is one head wide
        head_width = min(head_widths, default=None)
        rate = rates.attention_flop_per_s(head_width, s, backward=phase in PRODUCTS_OF_PHASE, causal=causal)
        excess_s += attention * (1 / rate - 1 / own_flop_per_s)
    return excess_s


def roofline_s(
    device: DeviceType,
    precision: Rate,
    *,
    flop: float,
    moved_bytes: float,
    operations: int,
    streamed_bytes: float = 0.0,
) -> float:
    """Return the time of operations limited by arithmetic, memory bandwidth and launches.

    `streamed_bytes`: of the moved bytes, those of operations with next to no arithmetic. Operations run one after the
    other, so that no matrix product hides them.

        t = max(flop / (peak * efficiency), (bytes - streamed) / memory bandwidth) + streamed / memory bandwidth, and
        CPU:  t + operations * overhead      (operations run where they are launched)
        else: max(t, operations * overhead)  (the host launches ahead)

    On a TPU no operations are streamed: XLA fuses them with the products beside them.

    Source: Williams, Waterman, Patterson 2009, "Roofline".
    """
    rate, bandwidth = achieved_flop_per_s(device, precision), device.memory_bandwidth_bytes_per_s
    if device.kind == "tpu":
        streamed_bytes = 0.0
    busy_s = max(flop / rate, (moved_bytes - streamed_bytes) / bandwidth) + streamed_bytes / bandwidth
    issue_s = operations * device.operation_overhead_s
    return busy_s + issue_s if device.kind == "cpu" else max(busy_s, issue_s)
