"""Assignment of a model's parameters to buckets: one data type, one device and one optimizer group per bucket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gssim.plan import assign_buckets

COMPILED = "_orig_mod."
"""Prefix that torch.compile puts before the names of a module's parameters."""


@dataclass(frozen=True)
class BucketPlan:
    """The parameters of one future bucket, in the order in which their gradients become ready."""

    parameters: list[nn.Parameter]
    group: int
    """Index of the optimizer's group that they belong to."""


def trained_parameters(model: nn.Module, order: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name, in the order in which their gradients become ready.

    Tied parameters appear once, under their first name. `order`: names; reversed registration by default.
    """
    named = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no parameters that require gradients: there is nothing to shard")
    names = list(reversed(named)) if order is None else [plain_name(name) for name in order]
    if sorted(names) != sorted(named):
        odd = sorted(set(names) ^ set(named)) or names
        raise ValueError(f"parameter_order must name every parameter that requires gradients once; see '{odd[0]}'")
    return {name: named[name] for name in names}


def plain_name(name: str) -> str:
    """Return a parameter's name without what torch.compile adds to it.

    >>> plain_name("_orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    return name.replace(COMPILED, "")


def plan_buckets(
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[Mapping[str, Any]] | None,
    *,
    first_bytes: float,
    cap_bytes: float,
) -> list[BucketPlan]:
    """Return the buckets of the parameters, ordered by when their gradients are complete.

    As in DistributedDataParallel, every data type and device fills buckets of its own, and here every group as well.
    """
    group_of = _groups_of(parameters, groups)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    ordered = list(parameters.values())
    for place, parameter in enumerate(ordered):
        kinds.setdefault((parameter.dtype, parameter.device, group_of[parameter]), []).append(place)
    buckets: list[list[int]] = []
    for places in kinds.values():
        sizes = [ordered[place].numel() * ordered[place].element_size() for place in places]
        assigned = assign_buckets(sizes, first_bytes=first_bytes, cap_bytes=cap_bytes)
        buckets += [[places[member] for member in members] for members in assigned]
    buckets.sort(key=max)
    return [BucketPlan([ordered[place] for place in each], group_of[ordered[each[0]]]) for each in buckets]


def _groups_of(
    parameters: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]] | None
) -> dict[nn.Parameter, int]:
    """Return the group number of each parameter; `groups` as torch's optimizers take them, by parameter or name."""
    if groups is None:
        return dict.fromkeys(parameters.values(), 0)
    group_of = _members_of(parameters, groups)
    for name, parameter in parameters.items():
        if parameter not in group_of:
            raise ValueError(f"'{name}' is in none of param_groups; freeze it, or put it into one")
    trained = set(parameters.values())
    for parameter, number in group_of.items():
        if parameter not in trained and parameter.requires_grad:
            raise ValueError(
                f"param_groups[{number}] has a parameter of {tuple(parameter.shape)} that is not in the model"
            )
    return group_of


def _members_of(parameters: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]]) -> dict[nn.Parameter, int]:
    """Return the group number of each parameter that is in a group; raise ValueError if one is in two."""
    group_of: dict[nn.Parameter, int] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f"param_groups[{number}] must be a dict with parameters under 'params', not {group!r:.80}")
        members = group["params"]
        for given in [members] if isinstance(members, nn.Parameter | str) else members:
            member = given[1] if isinstance(given, tuple) and len(given) == 2 else given  # as named_parameters gives
            parameter = parameters.get(plain_name(member)) if isinstance(member, str) else member
            if parameter is None:
                raise ValueError(f"param_groups[{number}] names '{member}', which is no parameter that is trained")
            if not isinstance(parameter, nn.Parameter):
                raise ValueError(f"param_groups[{number}] has {parameter!r:.80}, which is no parameter of the model")
            if parameter in group_of:
                raise ValueError(f"a parameter is in param_groups[{group_of[parameter]}] and in param_groups[{number}]")
            group_of[parameter] = number
    return group_of
