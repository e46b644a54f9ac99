"""The optimizer's state by parameter name: whole on every rank, or every rank's own part for torch's checkpoints.

Both say nothing of buckets, ranks or shares, so that any number of ranks with any shares takes them up again.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.frozen import elementwise
from gsreal.gradient_sharding.part import Part

if TYPE_CHECKING:
    from gsreal.gradient_sharding.sharding import GradientSharding

MASTER = "master"
"""Under this key is the owner's master copy of a parameter, where it keeps one."""


def whole(sharding: "GradientSharding") -> dict[str, Any]:
    """Return every owner's state by parameter name (a collective: the owners' parts are all-reduced)."""
    found: dict[str, dict[str, Any]] = {}
    for bucket in sharding.buckets:
        values, others = _states(sharding, bucket)
        gathered = {key: _gathered(sharding, bucket, value) for key, value in values.items()}
        for parameter in bucket.parameters:
            state = {key: flat[bucket.slots[parameter]].view(parameter.shape) for key, flat in gathered.items()}
            state |= {key: value.clone() if isinstance(value, Tensor) else value for key, value in others.items()}
            if state:
                found[sharding.names[parameter]] = {key: _own_memory(value) for key, value in state.items()}
    return {"state": found, "param_groups": _groups(sharding), "updates": sharding.pusher.steps}


def load_whole(sharding: "GradientSharding", saved: dict[str, Any]) -> None:
    """Take the own part of what `whole` returned; raise ValueError where it is another optimizer's or model's."""
    load_groups(sharding, saved["param_groups"])
    sharding.pusher.steps = saved.get("updates", 0)
    if not saved["state"]:
        sharding.state.clear()
        sharding.take_parameters()
        return
    initialise(sharding.optimizer)
    for bucket in sharding.buckets:
        values, others = _states(sharding, bucket)
        for parameter in bucket.parameters:
            state = _saved_state(saved["state"], sharding.names[parameter], {*values, *others} - {MASTER})
            start, part = bucket.owned(parameter)
            for key, value in values.items():
                if key not in state and not bucket.is_replica:
                    continue  # the model's state has brought it
                source = parameter.detach() if key not in state else state[key]  # without a master: the parameter
                value[part] = source.reshape(-1)[start : start + part.stop - part.start].to(value.device, value.dtype)
            for key, value in others.items():
                _replace(sharding, bucket, key, value, state[key])


def load_groups(sharding: "GradientSharding", saved: list[dict[str, Any]]) -> None:
    """Take the options of saved groups, such as their learning rates; raise ValueError where there are more or less."""
    if len(saved) != len(sharding.param_groups):
        raise ValueError(f"saved with {len(saved)} param_groups, but there are {len(sharding.param_groups)}")
    for group, options in zip(sharding.param_groups, saved, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})


def initialise(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first step makes, of zeros, where there is none yet.

    By a step with zero gradients and a learning rate of zero, as torch.distributed.checkpoint.state_dict does. Assumes
    an optimizer whose state begins with zeros, as that of SGD, Adam and AdamW does; loading overwrites it.
    """
    if optimizer.state:
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    kept = [(each.detach().clone(), each.grad) for each in trained]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for each in trained:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for each, (values, gradient) in zip(trained, kept, strict=True):
        each.detach().copy_(values)
        each.grad = gradient
        for value in optimizer.state[each].values():
            if isinstance(value, Tensor):
                value.zero_()


class Sharded:
    """What torch.distributed.checkpoint saves and loads of a GradientSharding: each rank's own part, by element.

    dcp.save({"model": model, "optimizer": optimizer.sharded()}, checkpoint_id=folder), and dcp.load alike.
    """

    def __init__(self, sharding: "GradientSharding") -> None:
        self.sharding = sharding

    def state_dict(self) -> dict[str, Any]:
        """Return the own part: views of it, so that what is loaded into it is loaded in place."""
        initialise(self.sharding.optimizer)
        found: dict[str, Any] = {}
        for bucket in self.sharding.buckets:
            values, others = _states(self.sharding, bucket)
            for parameter in bucket.parameters:
                start, part = bucket.owned(parameter)
                owned = {key: Part({(start,): value[part]}, (parameter.numel(),)) for key, value in values.items()}
                found[self.sharding.names[parameter]] = owned | others
        # a tuple is saved as one object: its lists and numbers are replaced as a whole when it is loaded
        updates = torch.tensor(self.sharding.pusher.steps)
        return {"state": found, "param_groups": tuple(_groups(self.sharding)), "updates": updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what was loaded: the tensors of the state are in place already."""
        load_groups(self.sharding, list(state_dict["param_groups"]))
        self.sharding.pusher.steps = int(state_dict["updates"])
        for bucket in self.sharding.buckets:
            loaded = state_dict["state"][self.sharding.names[bucket.parameters[0]]]
            for key, value in _states(self.sharding, bucket)[1].items():
                _replace(self.sharding, bucket, key, value, loaded[key])


def _states(sharding: "GradientSharding", bucket: Bucket) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a bucket's states that have a value for each element of the shard, the master copy too, and the others."""
    state = sharding.optimizer.state.get(bucket.shard, {})
    values = elementwise(state, bucket)
    others = {key: value for key, value in state.items() if key not in values and value is not None}
    if bucket.has_master:
        values[MASTER] = bucket.shard.detach()
    return values, others


def _gathered(sharding: "GradientSharding", bucket: Bucket, value: Tensor) -> Tensor:
    """Return all owners' values of a bucket: each adds its own to zeros."""
    flat = torch.zeros(bucket.whole.numel(), dtype=value.dtype, device=value.device)
    for parameter in bucket.parameters:
        start, part = bucket.owned(parameter)
        first = bucket.slots[parameter].start + start
        flat[first : first + part.stop - part.start] = value[part]
    sharding.levels.all_reduce(flat)
    return flat


def _own_memory(value: Any) -> Any:
    """Return a tensor that keeps no larger one alive."""
    return value.clone() if isinstance(value, Tensor) else value


def _groups(sharding: "GradientSharding") -> list[dict[str, Any]]:
    """Return the options of the groups, with the names of their parameters."""
    names = {id(bucket.shard): [sharding.names[p] for p in bucket.parameters] for bucket in sharding.buckets}
    return [
        {**group, "params": sorted(name for shard in group["params"] for name in names[id(shard)])}
        for group in sharding.param_groups
    ]


def _saved_state(saved: dict[str, Any], name: str, keys: set[str]) -> dict[str, Any]:
    """Return what was saved of a parameter; raise ValueError where something is missing."""
    state: dict[str, Any] = saved.get(name, {})
    missing = sorted(keys - set(state))
    if missing:
        raise ValueError(f"nothing was saved of '{missing[0]}' of parameter '{name}': another optimizer or model")
    return state


def _replace(sharding: "GradientSharding", bucket: Bucket, key: str, value: Any, saved: Any) -> None:
    """Give a bucket a state that is no tensor of its elements, such as the number of steps."""
    if isinstance(value, Tensor):
        value.copy_(torch.as_tensor(saved))
    else:
        sharding.optimizer.state[bucket.shard][key] = saved
