"""Workspace that a layer's kernels allocate, and at which operation, as profiled for the same way of running it."""

from collections.abc import Iterable, Iterator, Sequence

from gssim.cluster import LayerProfile
from gssim.cluster.measured import Scratch
from gssim.memory import Event, reduction_buffer_bytes, rerun_positions, scratch_bytes
from gssim.program.lowering import Lowering
from gssim.scenario import Scenario, units_of_ranks
from gssim.scenario.device_rates import scratch_profile
from gssim.units import PRECISION_BYTES
from gssim.workload import ImageInput, Layer, LayerInstance, Moment, for_samples
from gssim.workload.layer import OPERAND_CASTS
from gssim.workload.quantized import quantized_weights


def scratch_events(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, traced: Sequence[Event]
) -> tuple[list[Event], float]:
    """Return the allocations of workspace in a phase, and the bytes that are allocated at an unknown moment besides.

    `traced`: the layer's memory events; they place the peak of a profile that records peaks only. Without a profile,
    only the buffers of reductions over rows on a GPU are known, and a CPU's copies of operands. The dequantized copy of
    the largest quantized weight is always among the bytes of unknown moment.
    """
    profile = scratch_profile(low.device(rank), low.scenario.workload, low.whole_layer(instance) or instance.layer)
    if not samples:
        return [], 0.0
    casts = list(_operand_casts(low, rank, instance, phase, samples))
    if phase in ("i", "w"):  # profiles are of whole backwards, at other positions: at most what one of these takes
        whole = None if profile is None else _measured_events(low, rank, instance, "b", samples, profile)
        return (casts, 0.0) if whole is None else ([], max((size for _, size, *_ in whole), default=0.0))
    weights = quantized_weights(instance.layer, low.scenario.workload.frozen_precision)
    copied_bytes = float(max((each.elements for each in weights), default=0) * low.value_bytes)
    if profile is not None and profile.scratch_bytes is not None:
        measured = _measured_events(low, rank, instance, phase, samples, profile)
        return casts if measured is None else measured, copied_bytes
    events = [*casts, *(_bias_gradient_events(low, rank, instance, samples) if phase == "b" else [])]
    unplaced_bytes = (
        0.0 if profile is None else _worst_case_bytes(low, rank, instance, phase, samples, [*traced, *events])
    )
    return events, unplaced_bytes + copied_bytes


def unmeasured_workspace(scenario: Scenario) -> tuple[str, ...]:
    """Return a line for each type of CPU whose kernels take workspace that is in no profile, and so counts as 0.

    On a CPU, convolutions and LSTMs take workspace, and products in 16 bits. What operations on tensors of two data
    types take is in the trace.
    """
    workload = scenario.workload
    precision = workload.autocast or workload.precision
    kernels = ["convolutions"] if isinstance(workload.model.input, ImageInput) else []
    # oneDNN keeps parts that are rounded up to pages of LSTMs alone
    kernels += ["LSTMs"] if any(each.pages for layer in workload.model.layers for each in layer.buffers) else []
    kernels += [f"products in {precision}"] if PRECISION_BYTES[precision] == 2 else []
    messages = []
    for name in dict.fromkeys(scenario.cluster.devices[rank].type for rank in range(scenario.ranks)):
        device = scenario.cluster.device_types[name]
        profiles = (scratch_profile(device, workload, layer) for layer in workload.model.layers)
        measured = any(each is not None and each.scratch_bytes is not None for each in profiles)
        if device.kind == "cpu" and kernels and not measured:
            messages.append(
                f"workspaces of kernels ({', '.join(kernels)}): device_types.{name} has no profile of them for this "
                "workload (measure one with `gsreal calibrate`); real peaks are higher, in small models by several per "
                "cent or more"
            )
    return tuple(messages)


def _bias_gradient_events(low: Lowering, rank: int, instance: LayerInstance, samples: int) -> list[Event]:
    """Return the workspace for the gradients of linear layers' biases, which are sums over rows.

    Assumes that a bias is a parameter named `bias` beside a two-dimensional weight. Rows are tokens if the layer's FLOP
    scale with the sequence length, else samples.
    """
    layer, workload, device = instance.layer, low.scenario.workload, low.device(rank)
    if device.kind != "cuda":
        return []
    of_tokens = any(power for _, _, power in layer.forward_flop.terms)
    length = low.scenario.sequence_positions if low.policies.cp > 1 else workload.sequence_length
    rows = samples * (length or 1) if of_tokens else samples
    summed_bytes = max(PRECISION_BYTES["fp32"], low.value_bytes)
    weights = {parameter.name.removesuffix("weight") for parameter in layer.parameters if len(parameter.shape) == 2}
    events = []
    for parameter in layer.parameters:
        if parameter.name.endswith("bias") and parameter.name.removesuffix("bias") in weights:
            size = reduction_buffer_bytes(
                rows, parameter.elements, value_bytes=summed_bytes, resident_threads=device.resident_threads
            )
            events += [Event(parameter.born.position, sign * float(size), "temporaries") for sign in (1, -1) if size]
    return events


def _operand_casts(low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int) -> Iterator[Event]:
    """Yield the copies that a CPU makes of operands, at the operations in which it does; none on another device."""
    layer, length = instance.layer, low.scenario.workload.sequence_length or 1
    if low.device(rank).kind != "cpu":
        return
    buffers = layer.split.buffers if layer.split and phase in ("i", "w") else for_samples(layer, samples).buffers
    casts = [each for each in buffers if each.category == OPERAND_CASTS]
    sizes = (each.bytes_at(b=samples, s=length, scale=low.traced_scale) for each in casts)
    yield from _events_of(low, layer, phase, zip((each.born for each in casts), sizes, strict=True))


def _measured_events(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, profile: LayerProfile
) -> list[Event] | None:
    """Return the measured workspaces of a layer's phase; None where it was not measured as this rank runs it."""
    measured = (profile.scratch_bytes or {}).get(_profile_key(low, rank, instance))
    if measured is None:
        return None
    return list(_events_of(low, instance.layer, phase, ((each, each.at(samples)) for each in measured)))


def _events_of(
    low: Lowering, layer: Layer, phase: str, workspaces: Iterable[tuple[Moment | Scratch, float]]
) -> Iterator[Event]:
    """Yield the events of those workspaces of a layer, with their sizes, that operations of a phase take."""
    again, traced_phase = phase == "r", "f" if phase == "r" else phase
    recompute = low.scenario.plan.recompute
    kept = (layer.kept_positions(recompute) or ()) if again else ()
    first, last = rerun_positions(layer, recompute)
    for at, size in workspaces:
        runs = not again or (first <= at.position <= last and at.position not in kept)
        if at.phase == traced_phase and runs and size:
            yield Event(at.position, size, "temporaries")
            yield Event(at.position, -size, "temporaries")


def _profile_key(low: Lowering, rank: int, instance: LayerInstance) -> str:
    """Return the profile key for the way in which this rank runs a layer (its role, slice, or part of the sequence)."""
    units, autocast = instance.layer.units, low.scenario.workload.autocast
    key = [f"autocast-{autocast}"] if autocast else []
    if low.policies.cp > 1:
        key.append(f"context-{low.policies.cp}")
    if low.policies.tp > 1 and units:
        key.append(f"units-{units_of_ranks(units, low.scenario.slice_shares)[low.tensor_part]}")
        key += ["of-parts"] if low.policies.sequence_parallel else []
    elif low.policies.cp == 1:
        key.append(low.role(rank, instance))
    return "-".join(key)


def _worst_case_bytes(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, traced: Sequence[Event]
) -> float:
    if phase == "r" and low.scenario.plan.recompute == "selective":
        return 0.0  # the kernels that need scratch are those of compute-heavy operations
    if instance.layer.reductions:
        return 0.0  # such profiles are of whole blocks
    device, workload = low.device(rank), low.scenario.workload
    return scratch_bytes(device, workload, instance, phase=phase, batch_size=samples, traced=traced)
