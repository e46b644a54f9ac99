"""What may be asked of `shard_gradients`, and what it makes of that: shares, groups of shards, what nobody owns."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.gradient_sharding.bucket import Bucket
from gssim import shares as share_solver
from gssim.plan import Publish


def check_options(
    parameters: str,
    units: Sequence[nn.Module],
    publish: Publish,
    groups: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Raise ValueError where options exclude one another."""
    if units and parameters == "replicated":
        raise ValueError("units are gathered just in time: set parameters to 'sharded' or 'gathered'")
    if parameters != "replicated" and publish.threshold is not None:
        raise ValueError(f"parameters = '{parameters}': nothing is published, so that nothing can be thresholded")
    if parameters != "replicated" and groups is not None:
        raise ValueError(f"parameters = '{parameters}': a unit is updated as one, so that it cannot have param_groups")


def check_parameters(parameters: Mapping[str, nn.Parameter], *, thresholded: bool) -> None:
    """Raise ValueError where parameters have no values yet, or have no order by which they could be thresholded."""
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"{name} is on meta: give it values first (model.to_empty(device=...), and initialise)")
        if thresholded and parameter.is_complex():
            raise ValueError(f"{name} is complex: thresholds are for real gradients; push and publish it densely")


def checked_shares(
    shares: Sequence[float] | None, ranks: int, scaler: torch.amp.GradScaler | None
) -> tuple[float, ...]:
    """Return every rank's share, even where none are given; raise ValueError where they are none."""
    if shares is None:
        return share_solver.even(ranks)
    if len(shares) != ranks or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"shard_shares must be {ranks} fractions that sum to 1, not {list(shares)}")
    if scaler is not None and min(shares) == 0:
        raise ValueError("shard_shares: a scaler looks at its own rank's gradients, so every rank must own some")
    return tuple(shares)


def described_model(model: nn.Module, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> dict[str, str]:
    """Return what of a model and its buckets must be equal on all ranks, in words, by name."""
    said = {}
    for bucket in buckets:
        for parameter in bucket.parameters:
            said[f"parameter '{names[parameter]}'"] = (
                f"{_type_of(parameter)} in bucket {bucket.index} of group {bucket.group_index}"
            )
    said |= {f"frozen parameter '{n}'": _type_of(p) for n, p in model.named_parameters() if p not in names}
    return said | {f"buffer '{name}'": _type_of(buffer) for name, buffer in model.named_buffers()}


def _type_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def described_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what of an optimizer must be equal on all ranks: its class, and the options of its groups."""
    said = {"optimizer": type(optimizer).__name__, "param_groups": str(len(optimizer.param_groups))}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, int | float | str | None) or (isinstance(value, Tensor) and value.numel() == 1):
                said[f"{key} of group {number}"] = repr(value.item() if isinstance(value, Tensor) else value)
    return said


def unowned(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Return what every rank keeps for itself: buffers and frozen parameters."""
    trained = set(parameters.values())
    return [*(p.detach() for p in model.parameters() if p not in trained), *model.buffers()]


def find_groups(buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> None:
    """Note in which of the optimizer's groups each bucket's pieces are; raise ValueError where they are in several."""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for bucket in buckets:
        found = {group_of[id(piece.tensor)] for piece in bucket.pieces}
        if len(found) > 1:
            raise ValueError("optimizer_factory makes groups of its own: give them to shard_gradients as param_groups")
        bucket.group_index = next(iter(found), bucket.group_index)


def shards_in_groups(buckets: Sequence[Bucket], groups: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """Return what the optimizer is made of: this rank's shards, in groups where the user has groups."""
    if groups is None:
        return [piece.tensor for bucket in buckets for piece in bucket.pieces]
    return [
        {**group, "params": [piece.tensor for b in buckets if b.group_index == number for piece in b.pieces]}
        for number, group in enumerate(groups)
    ]
