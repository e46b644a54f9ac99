"""Times of layers, updates, compression and copies on one device, without contention: from a measured profile where
there is one, else from a roofline.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from gssim.cluster import Curve, DeviceType
from gssim.cluster.kernel_rates import ProductKind
from gssim.cluster.measured import CutBlockCost, ShardedUnitCost, UnitCost
from gssim.plan import INDEX_BYTES
from gssim.scenario import achieved_flop_per_s, has_master_copy, layer_profile, master_bytes, value_bytes
from gssim.scenario.device_rates import measured_optimizer, product_precision
from gssim.scenario.layer_costs import layer_roofline_s, memory_bound_ratio, work_of, work_on
from gssim.units import Floats, Precision, Recompute
from gssim.workload import (
    Layer,
    Workload,
    implementation_on,
    optimizer_moved_bytes,
)
from gssim.workload.optimizers import (
    NEWTON_SCHULZ_STEPS,
    OPERATIONS_PER_MATRIX,
    Matrix,
    elements_of,
    elementwise_bytes,
    newton_schulz_products,
    optimizer_operations,
)
from gssim.workload.quantized import quantized_weights, stored

Amount = TypeVar("Amount", float, Floats)
"""A number of elements or entries: of one message, or an array with those of many, with as many times."""


def layer_time_s(
    device: DeviceType,
    workload: Workload,
    layer: Layer,
    *,
    phase: str,
    batch_size: int,
    recompute: Recompute = "full",
    whole: Layer | None = None,
    positions: int | None = None,
    issued: bool = True,
) -> float:
    """Return the time of one repetition of `layer` for `batch_size` samples, in seconds.

    Assumes that nothing else runs on the device; the engine adds the slowdown by communication.

    `phase`: `f` (forward), `b` (backward), `i` or `w` (the parts of a split backward), or `r` (recomputation of as much
    of the forward as `recompute` says). A profile does not have parts of a backward, nor the recomputed one of a
    forward: its backward or forward is scaled in proportion to the roofline. `whole`: the whole
    layer, if `layer` is a slice of it or has only a part of the backward. Profiles are of whole layers. So the profile
    is read at that number of samples (it may be a fraction) n at which the whole layer has the FLOP of `layer`, which
    leaves times that do not depend on size undivided, and the result is scaled like the roofline:

        t = profile(n) * roofline(slice, batch_size) / roofline(whole, n),  n = batch_size * FLOP(slice) / FLOP(whole)

    `positions`: the number of positions of each sequence that this rank runs on, if context-parallel ranks divide
    sequences. `issued`: whether a GPU's host time to launch the operations is a lower bound. Copies of quantized
    weights run at the memory's bandwidth, and are added to measured and unmeasured times alike.
    """
    if not issued and device.kind != "cpu":
        device = replace(device, operation_overhead_s=0.0)
    copies_s = _copies_s(device, workload, layer, phase, batch_size, recompute) if workload.frozen_precision else 0.0
    return copies_s + _products_s(device, workload, layer, phase, batch_size, recompute, whole, positions)


def _copies_s(
    device: DeviceType, workload: Workload, layer: Layer, phase: str, batch_size: int, recompute: Recompute
) -> float:
    """Return the time to dequantize a layer's weights to the workload's precision, in each phase that multiplies by
    them.

    t = bytes read and written / memory bandwidth; for recomputation, scaled by its share of the forward's FLOP
    """
    precision = workload.frozen_precision
    moved_bytes: float = sum(
        sum(stored(weight, precision)) + weight.elements * value_bytes(workload)
        for weight in quantized_weights(layer, precision)
        if precision is not None
    )
    if phase == "r" and moved_bytes:
        shape = {"b": batch_size, "s": workload.sequence_length or 1}
        whole = layer.forward_flop.at(**shape)
        moved_bytes *= work_of(layer, phase, recompute=recompute).flop.at(**shape) / whole if whole else 0
    return moved_bytes / device.memory_bandwidth_bytes_per_s


def _products_s(
    device: DeviceType,
    workload: Workload,
    layer: Layer,
    phase: str,
    batch_size: float,
    recompute: Recompute,
    whole: Layer | None = None,
    positions: int | None = None,
) -> float:
    """Return the time of a layer's phase apart from copies of quantized weights; see `layer_time_s`."""
    if whole is not None and whole is not layer:
        own = work_on(device, workload, layer, phase, recompute=recompute, whole=whole, positions=positions)
        own_s = layer_roofline_s(device, workload, layer, own, phase, batch_size, positions=positions)
        if layer_profile(device, workload, whole) is None:
            return own_s
        uncut = work_on(device, workload, whole, phase, recompute=recompute, whole=whole)
        shape: dict[str, Any] = {"b": batch_size, "s": workload.sequence_length or 1}
        flop, uncut_flop = own.flop.at(**shape), uncut.flop.at(**shape)
        samples = batch_size * flop / uncut_flop if flop and uncut_flop else batch_size
        uncut_s = layer_roofline_s(device, workload, whole, uncut, phase, samples)
        measured_s = _products_s(device, workload, whole, phase, samples, recompute)
        return measured_s * own_s / uncut_s if uncut_s else measured_s
    profile = layer_profile(device, workload, layer)
    work = work_on(device, workload, layer, phase, recompute=recompute, positions=positions)
    if profile is None:
        return layer_roofline_s(device, workload, layer, work, phase, batch_size, positions=positions)
    if phase in ("b", "i", "w"):
        backward_s, whole_work = profile.backward_s.at(batch_size), work_on(device, workload, layer, "b")
        if work == whole_work:
            return backward_s
        part_s = layer_roofline_s(device, workload, layer, work, phase, batch_size)
        of_whole_s = layer_roofline_s(device, workload, layer, whole_work, "b", batch_size)
        return backward_s * part_s / of_whole_s if of_whole_s else 0.0
    forward_s = profile.forward_s.at(batch_size)
    forward = work_on(device, workload, layer, "f")
    if work == forward:
        return forward_s
    again_s, whole_s = (layer_roofline_s(device, workload, layer, part, "f", batch_size) for part in (work, forward))
    return forward_s * again_s / whole_s if whole_s else forward_s


def issue_time_s(
    device: DeviceType, workload: Workload, layer: Layer, *, phase: str, sums: int, recompute: Recompute = "full"
) -> float:
    """Return a GPU's host time to launch a layer's phase with `sums` all-reduces; 0 if it is included elsewhere.

    On a CPU, operations run where they are launched. A profile includes the launches, and so does DTensor's measured
    cost.
    """
    if device.kind == "cpu" or device.cut_block is not None or layer_profile(device, workload, layer) is not None:
        return 0.0
    return (work_of(layer, phase, recompute=recompute).operations + sums) * device.operation_overhead_s


def measured_issue_s(
    device: DeviceType,
    workload: Workload,
    layer: Layer,
    *,
    phase: str,
    batch_size: int,
    sums: int = 0,
    recompute: Recompute = "full",
) -> float | None:
    """Return a GPU's host time to issue a layer's phase, if measured apart from the device's; else None.

    A profile has it by layer; for recomputation, the forward's time is scaled by its share of the operations, and for
    the parts of a split backward, the backward's. Without a
    profile it is the number of operations, including the phase's `sums` over ranks, times `layer_operation_s`.
    """
    profile = layer_profile(device, workload, layer)
    work = work_of(layer, phase, recompute=recompute).operations
    if profile is None:
        return None if device.layer_operation_s is None else (work + sums) * device.layer_operation_s
    whole = "b" if phase in ("b", "i", "w") else "f"
    curve = profile.backward_host_s if whole == "b" else profile.forward_host_s
    if curve is None:
        return None
    operations = work_of(layer, whole, recompute=recompute).operations
    within = min(max(batch_size, curve.sizes[0]), curve.sizes[-1])  # host time hardly depends on the batch size
    return curve.at(within) * (work / operations if phase in ("r", "i", "w") and operations else 1.0)


def maps_time_s(
    device: DeviceType,
    workload: Workload,
    layer: Layer,
    shapes: Sequence[tuple[int, ...]],
    *,
    phase: str,
    batch_size: int,
    tokens: int,
    kind: ProductKind,
    recompute: Recompute = "full",
    whole: Layer | None = None,
    positions: int | None = None,
) -> float:
    """Return the seconds of multiplying tokens by some weight matrices of a layer, without any other operation.

    `shapes`: (outputs, inputs) of each matrix. `kind`: the forward's products, or the backward's for the gradient of
    the input or of the weights. All other arguments are those of `layer_time_s`. In 8 bits, the rate is `float8_ratio`
    times the device's in the precision. If the memory's bandwidth slows the layer's products down, then these by the
    same factor:

        t = 2 * tokens * elements / rate * time of the layer's products by the roofline / their time at the rate
    """
    precision = product_precision(device, workload)
    own = achieved_flop_per_s(device, precision)
    rates = next((each for each in device.kernels if each.precision == precision), None)
    times_s = (
        2.0 * tokens * n * k / (own if rates is None else rates.products[kind].at(tokens, k, n)) for n, k in shapes
    )
    ratio = device.float8_ratio if workload.map_precision is not None else None
    work = work_on(device, workload, layer, phase, recompute=recompute, whole=whole, positions=positions)
    bound_ratio = memory_bound_ratio(device, workload, layer, work, phase, batch_size, positions=positions)
    return bound_ratio * sum(times_s) / (ratio or 1.0)


def optimizer_time_s(
    device: DeviceType,
    workload: Workload,
    *,
    elements: int,
    tensors: int,
    sharded_tensors: int = 0,
    matrices: Sequence[Matrix] = (),
) -> float:
    """Return the time of an optimizer step over `elements` parameters in `tensors` tensors.

    `sharded_tensors`: number of DTensors, each of which costs more host time. `matrices`: the tensors that Muon
    updates, if it is the optimizer; AdamW updates the others. A measured cost is that of torch's default
    implementation; other implementations have their name in the key, such as `adamw fused`. Without a measured cost:

        t = bytes moved / memory bandwidth + operations * overhead

    If each operation goes through all tensors, as on a GPU, the first term is also a lower bound beyond the largest
    measured number of elements: with fewer elements, some are still in the cache when the next operation reads them.
    """
    if elements == 0:
        return 0.0
    optimizer, decay = workload.optimizer, workload.weight_decay
    if optimizer == "muon":
        others = elements - elements_of(matrices), tensors - len(matrices)
        adamw = replace(workload, optimizer="adamw")
        rest_s = optimizer_time_s(device, adamw, elements=others[0], tensors=others[1])
        return rest_s + _muon_time_s(device, workload, matrices)
    implementation = implementation_on(device.kind, workload.optimizer_implementation)
    precision, measured_s = workload.optimizer_state_precision, 0.0
    cost = measured_optimizer(device, workload.optimizer, workload.optimizer_implementation)
    if cost is not None and precision is None:
        of_tensors_s = tensors * cost.tensor_s
        if cost.host_s is None:
            of_tensors_s += sharded_tensors * cost.sharded_tensor_s
        measured_s = of_tensors_s + cost.elements_s.at(elements)
        goes_through_all = device.kind != "cpu" and implementation != "for-loop"
        if not goes_through_all or elements <= cost.elements_s.sizes[-1]:
            return measured_s
    of_element = optimizer_moved_bytes(
        optimizer,
        implementation=implementation,
        value_bytes=master_bytes(workload),
        weight_decay=decay,
        precision=precision,
    )
    operations = optimizer_operations(
        optimizer,
        implementation=implementation,
        tensors=tensors,
        device_kind=device.kind,
        weight_decay=decay,
        precision=precision,
    )
    moved_s = of_element * elements / device.memory_bandwidth_bytes_per_s
    return max(measured_s, moved_s) if measured_s else moved_s + operations * device.operation_overhead_s


def _muon_time_s(device: DeviceType, workload: Workload, matrices: Sequence[Matrix]) -> float:
    """Return the time in which Muon updates matrices, one after another; it is not measured.

        t = 5 sum of max(FLOP / rate in bf16, bytes / memory bandwidth) of three products
            + other bytes / memory bandwidth
        CPU:  t + operations * overhead      (operations run where they are launched)
        else: max(t, operations * overhead)  (the host launches ahead)

    If the device states no rate in bf16, the rate of fp32 is assumed for the products.
    """
    if not matrices:
        return 0.0
    rate = achieved_flop_per_s(device, "bf16" if "bf16" in device.peak_flop_per_s else "fp32")
    bandwidth, value = device.memory_bandwidth_bytes_per_s, master_bytes(workload)
    total_s = 0.0
    for (rows, columns), count in Counter(matrices).items():
        products = newton_schulz_products(rows, columns)
        steps_s = NEWTON_SCHULZ_STEPS * sum(max(flop / rate, moved / bandwidth) for flop, moved in products)
        total_s += count * (steps_s + elementwise_bytes(rows, columns, value_bytes=value) / bandwidth)
    issue_s = len(matrices) * OPERATIONS_PER_MATRIX * device.operation_overhead_s
    return total_s + issue_s if device.kind == "cpu" else max(total_s, issue_s)


def optimizer_issue_s(
    device: DeviceType, workload: Workload, *, tensors: int, sharded_tensors: int = 0, casts: int = 0
) -> float | None:
    """Return a GPU's host time to issue an update of `tensors` tensors; None if host times are not measured apart.

    `casts`: how often each tensor is cast from or to a master copy, see `master_copy_time_s`.
    """
    cost = measured_optimizer(device, workload.optimizer, workload.optimizer_implementation)
    if cost is None or cost.host_s is None or not tensors:
        return None
    update_s = cost.host_s + tensors * (cost.host_tensor_s or 0.0) + sharded_tensors * cost.sharded_tensor_s
    if device.kernel_s is None or not has_master_copy(workload):
        return update_s
    return update_s + casts * tensors * device.operation_overhead_s


def master_copy_time_s(device: DeviceType, workload: Workload, *, elements: int, tensors: int, casts: int) -> float:
    """Return the time to cast `elements` between the workload's precision and its master copy's, `casts` times.

    A cast reads one copy and writes the other, tensor by tensor. Without a master copy the time is 0. If the GPU's host
    times are measured apart, this is only the device's time; `optimizer_issue_s` includes the host's.
    """
    if not has_master_copy(workload):
        return 0.0
    sizes = (value_bytes(workload), master_bytes(workload))
    if device.kernel_s is not None and optimizer_issue_s(device, workload, tensors=tensors) is not None:
        moved_s = moving_time_s(device, value_bytes=sizes, elements=elements, tensors=0)
        return casts * (moved_s + tensors * device.kernel_s)
    return casts * moving_time_s(device, value_bytes=sizes, elements=elements, tensors=tensors)


def moving_time_s(device: DeviceType, *, value_bytes: Sequence[int], elements: int, tensors: int) -> float:
    """Return the time of an operation on `tensors` tensors that reads and writes values of the given sizes.

        CPU:  t = bytes / memory bandwidth + tensors * overhead        (operations run where they are launched)
        else: t = max(bytes / memory bandwidth, tensors * overhead)    (the host launches ahead)

    >>> from gssim.cluster import DeviceType
    >>> cpu = DeviceType(kind="cpu", memory_bytes=1e9, peak_flop_per_s={}, memory_bandwidth_bytes_per_s=6e9, source="")
    >>> moving_time_s(cpu, value_bytes=(2, 4), elements=10**9, tensors=1)  # a cast of bf16 to fp32
    1.0
    """
    moved_s = sum(value_bytes) * elements / device.memory_bandwidth_bytes_per_s
    issue_s = tensors * device.operation_overhead_s
    return moved_s + issue_s if device.kind == "cpu" else max(moved_s, issue_s)


def gradient_pass_s(device: DeviceType, *, elements: int, tensors: int, value_bytes: int) -> float:
    """Return the time to read gradients once.

    On a GPU one launch is for all tensors: torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler work on lists of
    tensors (torch._foreach_norm, _amp_foreach_non_finite_check_and_unscale_), Megatron-LM with apex's
    multi_tensor_applier.

    >>> from gssim.cluster import DeviceType
    >>> cpu = DeviceType(kind="cpu", memory_bytes=1e9, peak_flop_per_s={}, memory_bandwidth_bytes_per_s=4e9, source="")
    >>> gradient_pass_s(cpu, elements=10**9, tensors=2, value_bytes=4)
    1.0
    """
    launches = tensors if device.kind == "cpu" else min(tensors, 1)
    return moving_time_s(device, value_bytes=(value_bytes,), elements=elements, tensors=launches)


def copy_time_s(device: DeviceType, size_bytes: float) -> float:
    """Return the time to read `size_bytes` and write them elsewhere.

    >>> from gssim.cluster import DeviceType
    >>> cpu = DeviceType(kind="cpu", memory_bytes=1e9, peak_flop_per_s={}, memory_bandwidth_bytes_per_s=2e9, source="")
    >>> copy_time_s(cpu, 1e9)
    1.0
    """
    return 2 * size_bytes / device.memory_bandwidth_bytes_per_s


def accumulation_time_s(device: DeviceType, size_bytes: float, *, tensors: int) -> float:
    """Return the time to add gradients of `size_bytes` in `tensors` tensors to others: read both, write one."""
    return 3 * size_bytes / device.memory_bandwidth_bytes_per_s + tensors * device.operation_overhead_s


def residual_time_s(device: DeviceType, *, elements: int, value: int, kept: int) -> float:
    """Return the time to add `elements` gradients of `value` bytes to a residual of `kept` bytes each.

    Without a measured cost: the time to read both and write the sum.
    """
    cost = device.compression
    if cost is not None and cost.residual_element_s is not None:
        return 2 * cost.call_s + elements * cost.residual_element_s
    return _streamed_s(device, elements * (value + 2 * kept), operations=2)


def mean_time_s(device: DeviceType, *, elements: int, tensors: int, value: int) -> float:
    """Return the time to compute the mean magnitude of each of `tensors` tensors: if not measured, to read them."""
    cost = device.compression
    if cost is not None and cost.mean_element_s is not None:
        return tensors * cost.call_s + elements * cost.mean_element_s
    return _streamed_s(device, elements * value, operations=2 * tensors)


def estimate_time_s(device: DeviceType, *, samples: int, tensors: int) -> float:
    """Return the time to estimate a threshold for each of `tensors` tensors from `samples` sampled elements in all.

    Without a measured cost: about four passes over the samples, for a selection that repeatedly halves them.
    """
    cost = device.compression
    if cost is not None and cost.estimate_element_s is not None:
        return 2 * tensors * cost.call_s + samples * cost.estimate_element_s
    return _streamed_s(device, 4 * 8 * samples, operations=3 * tensors)


def select_time_s(device: DeviceType, *, elements: Amount, parts: Amount, value: int) -> Amount:
    """Return the time to select, of `elements` gradients in `parts` parts, those that reach the threshold of their
    part.

    Without a measured cost: read the gradients, and write and read a one-byte flag for each.
    """
    if not np.any(elements):
        return 0 * elements
    cost = device.compression
    if cost is not None:
        return parts * cost.call_s + elements * cost.threshold_element_s
    return _streamed_s(device, elements * (value + 2)) + 4 * parts * device.operation_overhead_s


def pack_time_s(
    device: DeviceType, *, encoding: str, elements: Amount, entries: Amount, value: int, clears: bool
) -> Amount:
    """Return the time to write `entries` of `elements` gradients into a message and, if `clears`, to zero them.

    Without measured costs: gather the values and write them with their indices; for a bitmap, read the flags; for a
    dense message, read and write all elements.
    """
    if not np.any(elements):
        return 0 * elements
    cost = device.compression
    written = clears * value
    if encoding == "dense":
        if cost is not None and cost.dense_element_s is not None:
            return cost.call_s + elements * cost.dense_element_s * (1.5 if clears else 1.0)
        return _streamed_s(device, elements * (2 * value + 1 + 2 * written), operations=2)
    bits = elements if encoding == "bitmap" else 0 * elements
    if cost is None:
        size = entries * (2 * value + INDEX_BYTES + written) + bits
        return _streamed_s(device, size, operations=4)
    pack_s = (cost.call_s if cost.pack_call_s is None else cost.pack_call_s) + entries * cost.pack_element_s
    if encoding == "bitmap":
        pack_s += bits * cost.pack_bit_s if cost.pack_bit_s is not None else _streamed_s(device, bits)
    if clears:
        pack_s += (
            entries * cost.clear_element_s if cost.clear_element_s is not None else _streamed_s(device, entries * value)
        )
    return pack_s


def unpack_time_s(device: DeviceType, *, encoding: str, elements: Amount, entries: Amount, value: int) -> Amount:
    """Return the time to add a message's `entries` to an owner's gradient of `elements`.

    Without measured costs: 64 bytes per entry, as a 32-byte sector is read and written. For a bitmap, also the
    flags that its bits expand to, written and read. For a dense message: read both and write one.
    """
    if not np.any(elements):
        return 0 * elements
    cost = device.compression
    if encoding == "dense":
        if cost is not None and cost.add_dense_call_s is not None:
            return cost.add_dense_call_s + _streamed_s(device, 3 * value * elements)
        return _streamed_s(device, 3 * value * elements, operations=1)
    bits = elements if encoding == "bitmap" else 0 * elements
    if cost is None:
        return _streamed_s(device, 64.0 * entries + 2 * bits, operations=1)
    unpack_s = (cost.call_s if cost.add_call_s is None else cost.add_call_s) + entries * cost.scatter_element_s
    if encoding == "bitmap":
        unpack_s += bits * cost.unpack_bit_s if cost.unpack_bit_s is not None else _streamed_s(device, 2 * bits)
    return unpack_s


def weight_time_s(device: DeviceType, *, encoding: str, elements: Amount, entries: Amount) -> Amount:
    """Return the time to add a sender's weight to that of every received element: one more scatter or pass."""
    if encoding == "dense":
        return _streamed_s(device, 12.0 * elements, operations=3)
    cost = device.compression
    if cost is not None:
        return cost.call_s + entries * cost.scatter_element_s
    return _streamed_s(device, 64.0 * entries, operations=1)


LOW_RANK_PRODUCTS = ("project", "factor", "restore")
"""Products of PowerSGD with a matrix M: P = M Q, Q = M^T P, and M = P Q^T."""


def low_rank_product_time_s(
    device: DeviceType, product: str, *, rows: int, columns: int, rank: int, value: int, precision: Precision
) -> float:
    """Return the time of one of `LOW_RANK_PRODUCTS` for a matrix of `rows` by `columns`.

    Without a measured cost: 2 * rows * columns * rank FLOP at the peak rate, or the time to read or write all three
    matrices if that is longer.

    >>> from gssim.cluster import DeviceType
    >>> cpu = DeviceType(kind="cpu", memory_bytes=1e9, peak_flop_per_s={}, memory_bandwidth_bytes_per_s=4e9, source="")
    >>> low_rank_product_time_s(cpu, "project", rows=998, columns=1000, rank=1, value=4, precision="fp32")
    0.000999998
    """
    elements, measured = rows * columns, device.compression and device.compression.low_rank
    if measured:
        by_rank: Curve = getattr(measured, f"{product}_element_s")
        return measured.call_s + elements * by_rank.at(rank)
    read_s = (elements + (rows + columns) * rank) * value / device.memory_bandwidth_bytes_per_s
    peak = device.peak_flop_per_s.get(precision)
    return max(read_s, 2 * elements * rank / peak if peak else 0.0) + device.operation_overhead_s


def orthogonalization_time_s(device: DeviceType, *, rows: int, rank: int, value: int) -> float:
    """Return the time of modified Gram-Schmidt on a matrix of `rows` by `rank`.

    Without a measured cost: each column is read for its norm, and read and written to be divided by it. Its products
    with the columns that follow are computed (reading them) and subtracted (reading and writing them).
    """
    measured = device.compression and device.compression.low_rank
    if measured:
        return measured.orthogonalize_call_s.at(rank) + rows * measured.orthogonalize_row_s.at(rank)
    passes = 4 * rank + 3 * rank * (rank - 1) / 2
    return _streamed_s(device, passes * rows * value, operations=5 * rank - 2)


def largest_time_s(device: DeviceType, *, elements: int, entries: int, value: int) -> float:
    """Return the time to find the `entries` largest of `elements` gradients, and to copy and clear them.

    Without a measured cost: magnitudes are written and read four times (a radix selection of eight bits at a time).
    """
    measured = device.compression
    if measured and measured.largest_element_s is not None and measured.largest_entry_s is not None:
        return measured.call_s + elements * measured.largest_element_s + entries * measured.largest_entry_s
    return _streamed_s(device, elements * 6 * value + entries * (4 * value + 12), operations=10)


def division_time_s(device: DeviceType, *, size_bytes: float) -> float:
    """Return the time to divide an owner's gradient by the received weights: the weights are written and read."""
    return _streamed_s(device, 6 * size_bytes, operations=3)


def _streamed_s(device: DeviceType, size_bytes: Amount, *, operations: int = 0) -> Amount:
    """Return the time of operations that only stream memory."""
    return size_bytes / device.memory_bandwidth_bytes_per_s + operations * device.operation_overhead_s


def sharded_unit_copy_s(device: DeviceType, copied_bytes: float) -> float:
    """Return the time of an FSDP2 unit's copies. Without a measured cost, ten operation launches are included."""
    cost: ShardedUnitCost | None = device.sharded_unit
    if cost is None:
        return copy_time_s(device, copied_bytes) + 10 * device.operation_overhead_s
    if cost.copied_byte_s is None:
        return copy_time_s(device, copied_bytes)
    return copied_bytes * cost.copied_byte_s


def unit_host_s(cost: UnitCost | None, *, phase: str, tensors: int) -> float:
    """Return the host time of a unit of gathered parameters in a forward (`f`) or backward (`b`); 0 if not measured.

    `cost`: the device's `sharded_unit` for FSDP2, its `flat_unit` for Gradient Sharding.
    """
    if cost is None:
        return 0.0
    if phase == "f":
        return cost.forward_unit_s + tensors * cost.forward_tensor_s
    return cost.backward_unit_s + tensors * cost.backward_tensor_s


def cut_pairs_time_s(device: DeviceType, *, phase: str, pairs: int, sum_bytes: float) -> float:
    """Return DTensor's host time in a forward (`f`, `r`) or backward (`b`) of `pairs` pairs of sliced linear maps.

    Without a measured cost: 0.
    """
    cost: CutBlockCost | None = device.cut_block
    if cost is None:
        return 0.0
    return pairs * cost.at("backward_pair_s" if phase == "b" else "forward_pair_s", sum_bytes)


def cut_sum_time_s(device: DeviceType, *, sum_bytes: float) -> float:
    """Return the host time of an all-reduce of slices beyond the collective itself; 0 without a measured cost."""
    cost: CutBlockCost | None = device.cut_block
    return 0.0 if cost is None else cost.at("sum_s", sum_bytes)


def with_host_time_s(device: DeviceType, alone_s: float, *, host_s: float, operations: int) -> float:
    """Return the time of `alone_s` seconds of compute whose operations take `host_s` of extra host time.

    As in `roofline_s`, on a CPU the two add up; the host of a GPU launches ahead.

    >>> from gssim.cluster import DeviceType
    >>> gpu = DeviceType(
    ...     kind="cuda", memory_bytes=1, peak_flop_per_s={}, memory_bandwidth_bytes_per_s=1, operation_overhead_s=1.0,
    ...     source=""
    ... )
    >>> [with_host_time_s(gpu, 5.0, host_s=host_s, operations=3) for host_s in (1.0, 4.0)]
    [5.0, 7.0]
    """
    if not host_s:
        return alone_s
    return alone_s + host_s if device.kind == "cpu" else max(alone_s, operations * device.operation_overhead_s + host_s)
