"""Shards cut into pieces where the parameters in them have different histories: those that got no gradient in a step.

torch's optimizers pass over a parameter without a gradient: no decay, no momentum, no step counted. A shard is updated
as one tensor, so it is cut, once and for good, where such a parameter begins and ends; values and state stay in place.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.gradient_sharding.bucket import Bucket, Piece


def pass_over_absent(bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer pass over the parameters of a bucket that got a gradient on no rank in this step."""
    absent = bucket.absent()
    bucket.updated = {parameter for parameter in bucket.parameters if parameter not in absent}
    if not absent:
        return
    cut_where(bucket, optimizer, lambda parameter: parameter in absent)
    for parameter in absent:
        found = bucket.piece_of(parameter)
        assert found is not None
        found[0].tensor.grad = None


def cut_where(bucket: Bucket, optimizer: torch.optim.Optimizer, kind: Callable[[nn.Parameter], Any]) -> None:
    """Cut a shard's pieces wherever the parameters on both sides are of different kinds."""
    found: list[Piece] = []
    for piece in bucket.pieces:
        runs: list[slice] = []
        last: Any = None
        for parameter in bucket.parameters:
            held, part = bucket.piece_of(parameter), bucket.owned(parameter)[1]
            if held is None or held[0] is not piece:
                continue
            if runs and kind(parameter) == last:
                runs[-1] = slice(runs[-1].start, part.stop)
            else:
                runs.append(part)
            last = kind(parameter)
        found += [piece] if len(runs) < 2 else _cut(bucket, piece, runs, optimizer)
    bucket.pieces = found
    bucket.show_gradients()


def _cut(bucket: Bucket, piece: Piece, places: list[slice], optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Give the optimizer several pieces in the place of one, with their parts of its state."""
    values = bucket.shard.detach()
    pieces = [Piece(nn.Parameter(values[place]), place) for place in places]
    members = next(g["params"] for g in optimizer.param_groups if any(p is piece.tensor for p in g["params"]))
    at = next(i for i, member in enumerate(members) if member is piece.tensor)
    members[at : at + 1] = [each.tensor for each in pieces]
    state = optimizer.state.pop(piece.tensor, None)
    for each in pieces if state else ():
        first = each.place.start - piece.place.start
        part = slice(first, first + each.tensor.numel())
        flat = elementwise(state, piece)
        optimizer.state[each.tensor] = {key: flat[key][part] if key in flat else _copy(state[key]) for key in state}
    return pieces


def elementwise(state: Mapping[str, Any], piece: Piece) -> dict[str, Tensor]:
    """Return those of an optimizer's states that have a value for every element of a piece, as flat views."""
    shape = piece.tensor.shape  # of at least one dimension, unlike numbers of steps
    return {key: value.view(-1) for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
