"""Checks of the arguments of `shard_gradients`, and the shares, parameter groups and descriptions derived from them."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from gsreal.gradient_sharding.bucket import Bucket
from gssim.plan import Publish, splitting

Parameters = Literal["replicated", "gathered", "sharded"]
"""Placement of the parameters on a rank."""


def check_types(**given: tuple[Any, type | tuple[type, ...]]) -> None:
    """Raise ValueError if an option that is not None is not an instance of its type; `given`: values and types."""
    for name, (value, kind) in given.items():
        if value is not None and not isinstance(value, kind):
            kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise ValueError(f"{name} must be of type {kinds}, not {value!r:.80}")


def check_callable(**given: Any) -> None:
    """Raise ValueError if an option is not callable."""
    for name, value in given.items():
        if not callable(value):
            raise ValueError(f"{name} must be a function or class, not {value!r:.80}")


def check_sizes(**bytes_of: float) -> None:
    """Raise ValueError if a size in bytes is not a positive number."""
    for name, size in bytes_of.items():
        if isinstance(size, bool) or not isinstance(size, Real) or not float(size) > 0:
            raise ValueError(f"{name} must be a number of bytes above 0, not {size!r}")


def check_options(
    parameters: str,
    units: Sequence[nn.Module],
    publish: Publish,
    groups: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Raise ValueError if options exclude one another."""
    if parameters not in get_args(Parameters):
        raise ValueError(f"parameters must be one of {', '.join(get_args(Parameters))}, not {parameters!r}")
    for unit in units:
        if not isinstance(unit, nn.Module):
            raise ValueError(f"units must be modules of the model, not {unit!r:.80}")
    if units and parameters == "replicated":
        raise ValueError("units are gathered just in time: set parameters to 'sharded' or 'gathered'")
    if parameters != "replicated" and publish.threshold is not None:
        raise ValueError(f"parameters = '{parameters}': nothing is published, so that nothing can be thresholded")
    if parameters != "replicated" and groups is not None:
        raise ValueError(f"parameters = '{parameters}': a unit is updated as one, so that it cannot have param_groups")


def check_model(model: Any, parameters: Mapping[str, nn.Parameter], *, thresholded: bool) -> None:
    """Raise ValueError if the model cannot be trained by owners of ranges of flat buckets.

    Cases: parameters without values (meta), without an order for thresholds (complex) or in shared memory; a model that
    is distributed already, or that writes to parameters in its forward, where every rank would write other rows.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(f"the model is wrapped in {type(module).__name__}: give shard_gradients what is inside")
        if getattr(module, "max_norm", None) is not None and any(p.requires_grad for p in module.parameters(False)):
            raise ValueError(
                f"{name or 'the model'}: max_norm changes parameters in the forward, on every rank others: clamp them "
                "after the step (and call take_parameters), or freeze them"
            )
    _check_memory(dict(model.named_parameters()))
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor: give shard_gradients a model before fully_shard or tensor parallelism"
            )
        if parameter.is_meta:
            raise ValueError(f"{name} is on meta: give it values first (model.to_empty(device=...), and initialise)")
        if thresholded and parameter.is_complex():
            raise ValueError(f"{name} is complex: thresholds are for real gradients; push and publish it densely")


def _check_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if parameters share elements, which buckets would separate."""
    in_storage: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in parameters.items():
        if parameter.is_meta or isinstance(parameter, DTensor | UninitializedParameter) or not parameter.numel():
            continue
        if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
            raise ValueError(f"{name} is expanded: several of its elements are one; make it contiguous")
        extent = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
        first = parameter.data_ptr()
        place = (first, first + extent * parameter.element_size(), name)
        in_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(place)
    for places in in_storage.values():
        for (_, end, one), (first, _, other) in pairwise(sorted(places)):
            if first < end and _overlap(parameters[one], parameters[other]):
                raise ValueError(
                    f"{one} and {other} are different parameters in the same memory: to tie them, let both modules "
                    "have the same Parameter (a.weight = b.weight)"
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two views of one storage share an element."""
    if one.dtype != other.dtype:
        return True
    size = one.untyped_storage().nbytes() // one.element_size()
    used = torch.zeros(size, dtype=torch.bool, device=one.device)
    used.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def check_shares(shares: Sequence[float] | None, ranks: int, scaler: torch.amp.GradScaler | None) -> tuple[float, ...]:
    """Return every rank's share (even if none are given); raise ValueError if they are not valid fractions."""
    if shares is None:
        return splitting.even(ranks)
    shares = _fractions("shard_shares", shares, ranks)
    if scaler is not None and min(shares) == 0:
        raise ValueError("shard_shares: a scaler looks at its own rank's gradients, so every rank must own some")
    return shares


def _fractions(name: str, values: Any, ranks: int) -> tuple[float, ...]:
    """Return one fraction for each rank; raise ValueError if `values` are not that."""
    try:
        fractions = () if isinstance(values, str | Mapping) else tuple(float(value) for value in values)
    except (TypeError, ValueError):
        fractions = ()
    if (
        len(fractions) != ranks
        or not all(each >= 0 for each in fractions)
        or not math.isclose(sum(fractions), 1, abs_tol=1e-6)
    ):
        raise ValueError(f"{name} must be {ranks} fractions that sum to 1, one for each rank, not {values!r:.80}")
    return fractions


def describe_model(model: nn.Module, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> dict[str, str]:
    """Return a text for each property of a model and its buckets that must be equal on all ranks, by name."""
    descriptions = {}
    for bucket in buckets:
        for parameter in bucket.parameters:
            descriptions[f"parameter '{names[parameter]}'"] = (
                f"{_type_of(parameter)} in bucket {bucket.index} of group {bucket.group_index}"
            )
    descriptions |= {f"frozen parameter '{n}'": _type_of(p) for n, p in model.named_parameters() if p not in names}
    return descriptions | {f"buffer '{name}'": _type_of(buffer) for name, buffer in model.named_buffers()}


def _type_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return a text for each property of an optimizer that must be equal on all ranks.

    Class and options of its groups.
    """
    descriptions = {"optimizer": type(optimizer).__name__, "param_groups": str(len(optimizer.param_groups))}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, int | float | str | None) or (isinstance(value, Tensor) and value.numel() == 1):
                descriptions[f"{key} of group {number}"] = repr(value.item() if isinstance(value, Tensor) else value)
    return descriptions


def unsharded_tensors(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Return the tensors of which every rank keeps its own copy: buffers and frozen parameters."""
    trained = set(parameters.values())
    return [*(p.detach() for p in model.parameters() if p not in trained), *model.buffers()]


def assign_param_groups(buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> None:
    """Set each bucket's index of the optimizer's group that has its pieces; raise ValueError if there are several."""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for bucket in buckets:
        numbers = {group_of[id(piece.tensor)] for piece in bucket.pieces}
        if len(numbers) > 1:
            raise ValueError("optimizer_factory makes groups of its own: give them to shard_gradients as param_groups")
        bucket.group_index = next(iter(numbers), bucket.group_index)


def shards_by_group(buckets: Sequence[Bucket], groups: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """Return the optimizer's input: this rank's shards, in groups if the user gave param_groups."""
    if groups is None:
        return [piece.tensor for bucket in buckets for piece in bucket.pieces]
    return [
        {**group, "params": [piece.tensor for b in buckets if b.group_index == number for piece in b.pieces]}
        for number, group in enumerate(groups)
    ]
