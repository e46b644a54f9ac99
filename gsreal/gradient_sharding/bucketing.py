"""Which parameters travel together: buckets of one type, one device and one group of the optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gssim.plan import assign_buckets

COMPILED = "_orig_mod."
"""What torch.compile puts before the names of a module's parameters."""


@dataclass(frozen=True)
class Togetherness:
    """One bucket to be: its parameters in the order in which their gradients become ready."""

    parameters: list[nn.Parameter]
    group: int
    """Which of the optimizer's groups they belong to."""


def trained_parameters(model: nn.Module, order: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters that gradients are taken of, by name, in the order in which those become ready.

    Tied parameters are one, under its first name. `order`: names; reversed registration by default.
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


def travelling_together(
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[Mapping[str, Any]] | None,
    *,
    first_bytes: float,
    cap_bytes: float,
) -> list[Togetherness]:
    """Return the buckets of the parameters, the one that is complete first before the others.

    As in DistributedDataParallel, every type and device fills buckets of its own, and so does every group here.
    """
    group_of = _groups_of(parameters, groups)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    found = list(parameters.values())
    for place, parameter in enumerate(found):
        kinds.setdefault((parameter.dtype, parameter.device, group_of[parameter]), []).append(place)
    buckets: list[list[int]] = []
    for places in kinds.values():
        sizes = [found[place].numel() * found[place].element_size() for place in places]
        assigned = assign_buckets(sizes, first_bytes=first_bytes, cap_bytes=cap_bytes)
        buckets += [[places[member] for member in members] for members in assigned]
    buckets.sort(key=max)
    return [Togetherness([found[place] for place in each], group_of[found[each[0]]]) for each in buckets]


def _groups_of(
    parameters: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]] | None
) -> dict[nn.Parameter, int]:
    """Return the number of each parameter's group; `groups` as torch's optimizers take them, by parameter or name."""
    if groups is None:
        return dict.fromkeys(parameters.values(), 0)
    found = _members_of(parameters, groups)
    for name, parameter in parameters.items():
        if parameter not in found:
            raise ValueError(f"'{name}' is in none of param_groups; freeze it, or put it into one")
    trained = set(parameters.values())
    for parameter, number in found.items():
        if parameter not in trained and parameter.requires_grad:
            raise ValueError(
                f"param_groups[{number}] has a parameter of {tuple(parameter.shape)} that the model has not"
            )
    return found


def _members_of(parameters: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]]) -> dict[nn.Parameter, int]:
    """Return the number of the group of each parameter that is in one; raise ValueError where one is in two."""
    found: dict[nn.Parameter, int] = {}
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
            if parameter in found:
                raise ValueError(f"a parameter is in param_groups[{found[parameter]}] and in param_groups[{number}]")
            found[parameter] = number
    return found
