"""Rates of devices for a workload: measured profiles, achieved and peak FLOP/s; bytes of an element."""

from collections import Counter
from dataclasses import replace

from gssim.cluster import Cluster, Curve, DeviceType, LayerProfile
from gssim.cluster.measured import OptimizerCost, Profile
from gssim.errors import UserError
from gssim.units import PRECISION_BYTES, Precision, Rate
from gssim.workload import Layer, Workload, implementation_on, unrolled


def layer_profile(device: DeviceType, workload: Workload, layer: Layer) -> LayerProfile | None:
    """Return the measured cost of `layer` on `device` at this precision and sequence length, if there is one."""
    for profile in device.profiles:
        if is_of(profile, workload) and layer.name in profile.layers:
            return profile.layers[layer.name]
    return None


def scratch_profile(device: DeviceType, workload: Workload, layer: Layer) -> LayerProfile | None:
    """Return the layer's profile that has its kernel workspaces, if there is one.

    Under torch.autocast that is the profile of training without autocast, if it has workspaces under this autocast.
    """
    if workload.autocast is None:
        return layer_profile(device, workload, layer)
    kind = f"autocast-{workload.autocast}-"
    for profile in device.profiles:
        if _is_like(profile, workload) and layer.name in profile.layers:
            of_layer = profile.layers[layer.name]
            return of_layer if any(way.startswith(kind) for way in of_layer.scratch_bytes or ()) else None
    return None


def check_rates(cluster: Cluster, workload: Workload, *, ranks: int) -> None:
    """Raise UserError, with its name, for a device type of the first ranks if the time of some layer is not known.

    That is so if no profile has the layer, and no rate is stated for the workload's precision.
    """
    for name in dict.fromkeys(device.type for device in cluster.devices[:ranks]):
        device = cluster.device_types[name]
        if all(layer_profile(device, workload, layer) is not None for layer in workload.model.layers):
            continue
        peak_flop_per_s(device, product_precision(device, workload), name=name)
        if any(layer.forward_uncast_flop is not None for layer in workload.model.layers):
            peak_flop_per_s(device, uncast_precision(device, workload), name=name)


def has_host_times(device: DeviceType, workload: Workload) -> bool:
    """Return whether a GPU's host time to issue a workload is known separately from the device's own time."""
    profile = profile_of(device, workload)
    if profile is None:
        return device.layer_operation_s is not None
    return all(each.forward_host_s is not None for each in profile.layers.values())


def pause_excess(device: DeviceType, workload: Workload) -> Curve | None:
    """Return the slowdown of compute after a pause, by the pause's length in seconds; None if not measured."""
    profile = profile_of(device, workload)
    return profile.pause_excess_s if profile else None


def with_profile_slowdowns(cluster: Cluster, workload: Workload) -> Cluster:
    """Return the cluster with the contention slowdowns of its devices replaced by those of this workload's profiles."""
    types = {name: _as_it_runs(device, workload) for name, device in cluster.device_types.items()}
    changed = any(types[name] is not device for name, device in cluster.device_types.items())
    return replace(cluster, device_types=types) if changed else cluster


def _as_it_runs(device: DeviceType, workload: Workload) -> DeviceType:
    profile = profile_of(device, workload)
    own = {key: getattr(profile, key, None) for key in ("neighbour_slowdown_ratio", "communicating_excess_ratio")}
    changes = {key: value for key, value in own.items() if value is not None and value != getattr(device, key)}
    return replace(device, **changes) if changes else device


def profile_of(device: DeviceType, workload: Workload) -> Profile | None:
    """Return the first of a device's profiles that matches a workload; None if none does."""
    return next((profile for profile in device.profiles if is_of(profile, workload)), None)


def is_of(profile: Profile, workload: Workload) -> bool:
    """Return whether a profile has the costs of the workload's layers: these run in one precision, which it states."""
    return workload.autocast is None and not workload.tf32 and _is_like(profile, workload)


def _is_like(profile: Profile, workload: Workload) -> bool:
    """Return whether a profile is of the workload's model, precision and sequence length."""
    same = profile.model == workload.model.name and profile.precision == workload.precision
    return same and profile.sequence_length in (None, workload.sequence_length)


def product_precision(device: DeviceType, workload: Workload) -> Rate:
    """Return the precision of matrix products: that of autocast, else `uncast_precision`."""
    return workload.autocast or uncast_precision(device, workload)


def uncast_precision(device: DeviceType, workload: Workload) -> Rate:
    """Return the precision of products that autocast does not cast: TF32 if asked for and there, or the workload's."""
    return "tf32" if workload.tf32 and _tf32_flop_per_s(device) is not None else workload.precision


def _tf32_flop_per_s(device: DeviceType) -> float | None:
    """Return a device's peak in TF32, if it has TF32; if the peak is not stated, half of that in bf16.

    Source: NVIDIA's data sheets of A100 (156 of 312 TFLOP/s), H100 (494 of 989), L40S (183 of 362); GPUs before Ampere
    have neither.
    """
    stated, half = device.peak_flop_per_s.get("tf32"), device.peak_flop_per_s.get("bf16")
    return half / 2 if stated is None and half is not None and device.kind == "cuda" else stated


def achieved_flop_per_s(device: DeviceType, precision: Rate, *, name: str = "") -> float:
    """Return the rate of matrix products; raise UserError as `peak_flop_per_s` does."""
    own_ratio = device.fp32_efficiency_ratio if precision == "fp32" else None
    return peak_flop_per_s(device, precision, name=name) * (device.efficiency_ratio if own_ratio is None else own_ratio)


def peak_flop_per_s(device: DeviceType, precision: Rate, *, name: str = "") -> float:
    """Return the device's peak rate. Raise UserError if it is not stated, though no profile covers a layer.

    `name`: name of the type in the cluster, if known.
    """
    peak = _tf32_flop_per_s(device) if precision == "tf32" else device.peak_flop_per_s.get(precision)
    if peak is None:
        stated = ", ".join(device.peak_flop_per_s) or "none"
        raise UserError(
            f"cluster: device_types{name and '.' + name}: no peak_flop_per_s.{precision} on a {device.kind} device "
            f"(stated: {stated}), nor a profile of every layer at this precision and sequence length; "
            "another workload.precision, or a plan.ranks that leaves out such devices"
        )
    return peak


# Model FLOP ----------------------------------------------------------------------------------------------------------


def model_flop_utilisation(cluster: Cluster, workload: Workload, *, ranks: int, step_time_s: float) -> float | None:
    """Return the fraction of its devices' peak rates that a training's model FLOP reach (MFU).

        MFU = 3 * FLOP of the forward over the batch / (step time * sum of the devices' peak FLOP/s)

    A backward counts as twice its forward, whatever it recomputes, and attention as if it were not causal. The peak is
    that of matrix products in the workload's precision; of `workload.map_precision` too, though 8 bits are faster. None
    where the model is trained in part only, where no peak is stated, and on CPUs, whose stated rates are measured ones.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    if workload.adapters or workload.frozen:
        return None
    peak_flop_per_s = 0.0
    for name, count in Counter(device.type for device in cluster.devices[:ranks]).items():
        device = cluster.device_types[name]
        peak = device.peak_flop_per_s.get(product_precision(device, workload))
        if device.kind == "cpu" or peak is None:
            return None
        peak_flop_per_s += count * peak
    shape = {"b": workload.global_batch_size, "s": workload.sequence_length or 0}
    forward_flop = sum(instance.layer.forward_flop.at(**shape) for instance in unrolled(workload.model))
    return 3 * forward_flop / (step_time_s * peak_flop_per_s) if step_time_s else None


# Bytes of an element -------------------------------------------------------------------------------------------------


def value_bytes(workload: Workload) -> int:
    """Return the bytes of one parameter, gradient or activation element."""
    return PRECISION_BYTES[workload.precision]


def has_master_copy(workload: Workload) -> bool:
    """Return whether the optimizer updates a copy of the parameters in a higher precision."""
    return master_bytes(workload) > value_bytes(workload)


def master_bytes(workload: Workload) -> int:
    """Return the bytes of one element of the optimizer's state and master copy.

    Source: Rajbhandari et al. 2019, "ZeRO", section 3.1: fp16 parameters and gradients, an fp32 copy and moments.
    """
    return max(value_bytes(workload), PRECISION_BYTES["fp32"])


def reduce_precision(workload: Workload) -> Precision:
    """Return the precision in which gradients are reduced over replicas or shards."""
    return workload.reduce_precision or workload.precision


def measured_optimizer(device: DeviceType, optimizer: str, implementation: str) -> OptimizerCost | None:
    """Return the measured cost of an optimizer's implementation on a device; None if it was not measured."""
    own = implementation_on(device.kind, implementation)
    is_default = own == implementation_on(device.kind, "default")
    return device.optimizers.get(optimizer if is_default else f"{optimizer} {own}")
