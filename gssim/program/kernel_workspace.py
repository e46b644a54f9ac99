"""What the kernels of a layer take for themselves, and when: as it was measured of the layer run in the same way."""

from collections.abc import Sequence

from gssim.cluster import LayerProfile
from gssim.memory import Event, last_saved, reduction_buffer_bytes, scratch_bytes
from gssim.program.lowering import Lowering
from gssim.scenario import layer_profile, units_of_ranks
from gssim.units import PRECISION_BYTES
from gssim.workload import LayerInstance


def scratch_events(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, traced: Sequence[Event]
) -> tuple[list[Event], float]:
    """Return when a phase's kernels take scratch and give it back, and what is taken at an unknown moment besides.

    `traced`: the layer's events as in a profile that knows no more than peaks. Without a profile: what sums over rows
    take on a GPU alone.
    """
    profile = layer_profile(low.device(rank), low.scenario.workload, low.whole(instance) or instance.layer)
    if not samples:
        return [], 0.0
    if profile is not None and profile.scratch_bytes is not None:
        return _measured(low, rank, instance, phase, samples, profile), 0.0
    summed = _summed(low, rank, instance, samples) if phase == "b" else []
    rest = 0.0 if profile is None else _at_worst(low, rank, instance, phase, samples, [*traced, *summed])
    return summed, rest


def _summed(low: Lowering, rank: int, instance: LayerInstance, samples: int) -> list[Event]:
    """Return what the gradients of linear layers' biases take, which are sums over rows.

    Assumes that these are called `bias` beside a weight of two dimensions, and are of tokens where the layer's
    operations grow with the sequence; else of samples.
    """
    layer, workload, device = instance.layer, low.scenario.workload, low.device(rank)
    if device.kind != "cuda":
        return []
    of_tokens = any(power for _, _, power in layer.forward_flop.terms)
    rows = samples * (workload.sequence_length or 1) if of_tokens else samples
    summed_bytes = max(PRECISION_BYTES["fp32"], low.value_bytes)
    weights = {each.name.removesuffix("weight") for each in layer.parameters if len(each.shape) == 2}
    found = []
    for each in layer.parameters:
        if each.name.endswith("bias") and each.name.removesuffix("bias") in weights:
            size = reduction_buffer_bytes(
                rows, each.elements, value_bytes=summed_bytes, resident_threads=device.resident_threads
            )
            found += [Event(each.born.position, sign * float(size), "temporaries") for sign in (1, -1) if size]
    return found


def _measured(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, profile: LayerProfile
) -> list[Event]:
    layer = instance.layer
    again, traced_phase = phase == "r", "f" if phase == "r" else phase
    kept = (layer.selective_positions or ()) if again and low.selective else ()
    found = []
    for scratch in (profile.scratch_bytes or {}).get(_way(low, rank, instance), ()):
        runs = not again or (scratch.position <= last_saved(layer) and scratch.position not in kept)
        if scratch.phase == traced_phase and runs and (size := scratch.at(samples)):
            found += [Event(scratch.position, sign * size, "temporaries") for sign in (1, -1)]
    return found


def _way(low: Lowering, rank: int, instance: LayerInstance) -> str:
    """Return the way in which a rank runs a layer, as profiles call it."""
    units = instance.layer.units
    if low.policies.tp > 1 and units:
        return f"units-{units_of_ranks(units, low.scenario.slice_shares)[low.tensor_part]}"
    roles = low.layers_of(rank).roles
    return roles[instance.index] if roles else "whole"


def _at_worst(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, traced: Sequence[Event]
) -> float:
    if phase == "r" and low.selective:
        return 0.0  # the kernels that need scratch are those of compute-heavy operations
    if instance.layer.reductions:
        return 0.0  # such profiles are of whole blocks
    device, workload = low.device(rank), low.scenario.workload
    return scratch_bytes(device, workload, instance, phase=phase, batch_size=samples, traced=traced)
