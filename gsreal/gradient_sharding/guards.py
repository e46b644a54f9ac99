"""Guards against silent training errors: unsuitable optimizers, and models whose parameters left their buckets.

`check_factory`: owners have ranges of flat buckets, which need not begin or end with a parameter. An optimizer whose
update of an element depends on others (a norm of its layer, a matrix, all parameters) would silently train something
else there. Names are not enough, so the optimizer is tried: on small matrices together and alone, and flat, in two
pieces.

`ModelGuard` checks in every step, in one pass over references, that the model still trains the parameters which its
owners update. After moving, casting, replacing or assigning parameters they are no longer in the buckets, and nothing
that is published reaches the model. Writes to parameters are detected by torch's version counters if owners keep master
copies that the next step would publish over them; writes through `.data` are not detected.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.gradient_sharding.bucket import Bucket

REMEDY = "move, cast and load (.to, .half, assign=True, to_empty) before shard_gradients, or call it again"


class ModelGuard:
    """Records the addresses and versions of a model's parameters when they were put into buckets, and checks them."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> None:
        self.model, self.buckets, self.names = model, buckets, names
        self._versions: dict[nn.Parameter, int] = {}
        self._note_links()
        self.record_versions()

    def _note_links(self) -> None:
        """Record references to every module's parameters and submodules."""
        self._registries: list[dict[str, Any]] = [
            registry for module in self.model.modules() for registry in (module._parameters, module._modules)
        ]
        self._members = self._listed()
        self._kept = [
            each for registry in self._registries for each in registry.values()
        ]  # so that no id is used again

    def _listed(self) -> list[int]:
        return [id(each) for registry in self._registries for each in registry.values()]

    def check(self) -> None:
        """Raise RuntimeError if a parameter would not be trained: it was replaced, or left its bucket."""
        if self._listed() != self._members:
            self._check_members()
            self._note_links()
        for bucket in self.buckets:
            self.check_places(bucket)

    def check_places(self, bucket: Bucket) -> None:
        """Raise RuntimeError if a parameter is not at its address in the bucket."""
        addresses, now = bucket.addresses(), [(p.data_ptr(), p.shape) for p in bucket.parameters]
        if now != addresses:
            name = next(self.names[p] for p, a, b in zip(bucket.parameters, now, addresses, strict=True) if a != b)
            raise RuntimeError(f"{name} is no longer in its bucket and would not train: {REMEDY}")

    def _check_members(self) -> None:
        """Raise RuntimeError if the model has trainable parameters that are in no bucket, or lacks some that are."""
        now = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, name in now.items():
            if parameter.requires_grad and parameter not in self.names:
                raise RuntimeError(f"{name} was put into the model after shard_gradients and would not train: {REMEDY}")
        for parameter, name in self.names.items():
            if parameter not in now:
                raise RuntimeError(f"{name} is no longer in the model, which would not train: {REMEDY}")

    # Master copies ----------------------------------------------------------------------------------------------------

    def record_versions(self) -> None:
        """Record the parameters' current values as those that owners have published."""
        self._versions = {
            parameter: parameter._version
            for bucket in self.buckets
            if bucket.has_master and bucket.has_values_between_steps
            for parameter in bucket.parameters
        }

    @torch.no_grad()
    def update_masters_from_writes(self) -> None:
        """Copy values written to parameters since the last record into their owners' master copies."""
        written = {parameter for parameter, version in self._versions.items() if parameter._version != version}
        if not written:
            return
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if parameter in written:
                    bucket.update_master(bucket.owned(parameter)[1])
        self.record_versions()


OptimizerFactory = Callable[[list[Any]], torch.optim.Optimizer]
"""Creates an optimizer of parameters, or of groups of them, as torch's optimizers take them."""
UNSUPPORTED_OPTIMIZERS = {
    "LBFGS": "it looks at all parameters at once, and at the loss several times a step",
    "SparseAdam": "gradients are dense when they reach their owners; take Adam or AdamW",
}
WHOLE_TENSOR_OPTIMIZERS = {
    *("Adafactor", "Muon", "Shampoo", "DistributedShampoo", "SOAP", "CAME", "SM3", "Adahessian", "AdaHessian"),
    *("Lamb", "LAMB", "FusedLAMB", "LARS", "Lars", "LARC", "NovoGrad", "FusedNovoGrad", "AdamP", "SGDP", "Ranger"),
}
"""Optimizers known to use whole tensors: refused by name even without a trial."""
SHAPES = ((6, 4), (3, 5))
STEPS = 3
TOLERANCE = 1e-3
"""Relative to the largest update: a difference beyond rounding."""
CUT = 13
"""Index at which the first tensor is cut: inside a row."""


def check_factory(
    factory: OptimizerFactory,
    groups: Sequence[Mapping[str, Any]] | None,
    *,
    like: Tensor,
    whole_tensors: bool,
) -> None:
    """Raise ValueError if a factory's optimizer would update shards differently from parameters.

    `like`: a parameter; the optimizer is tried on small tensors of its device and of the precision of its update.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    with torch.random.fork_rng(devices=[]):
        for number in range(len(groups or ({},))):
            _check_group(_Trial(factory, groups, number, dtype, like.device), whole_tensors=whole_tensors)


class _Trial:
    """Trials of the optimizer that a factory creates, with tensors in one of its groups."""

    def __init__(
        self,
        factory: OptimizerFactory,
        groups: Sequence[Mapping[str, Any]] | None,
        number: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.factory, self.groups, self.number = factory, groups, number
        real = dtype.to_real()
        grids = [torch.linspace(1.0, 2.0 + i, rows * columns) for i, (rows, columns) in enumerate(SHAPES)]
        self.values = [grid.sin().view(shape).to(device, real) for grid, shape in zip(grids, SHAPES, strict=True)]

    def make(self, tensors: Sequence[Tensor]) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        """Return an optimizer over copies of tensors, and the copies."""
        copies = [nn.Parameter(tensor.clone()) for tensor in tensors]
        if self.groups is None:
            return self.factory(list(copies)), copies
        given = [{**group, "params": copies if i == self.number else []} for i, group in enumerate(self.groups)]
        return self.factory(given), copies

    def updates(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the change of each tensor, flat, after a few steps of one optimizer over all of them."""
        torch.manual_seed(0)
        optimizer, copies = self.make(tensors)
        for step in range(STEPS):
            for parameter, tensor in zip(copies, tensors, strict=True):
                parameter.grad = (tensor * (5.0 + step)).cos() * tensor.mul(3.0).exp()
            optimizer.step()
        return [(p.detach() - t).reshape(-1) for p, t in zip(copies, tensors, strict=True)]


def _check_group(trial: _Trial, *, whole_tensors: bool) -> None:
    try:
        optimizer, given = trial.make(trial.values)
    except Exception:  # the factory's own error, or one of these tensors: the call with the shards will show
        return
    check_optimizer_tensors(optimizer, given)
    name = type(optimizer).__name__
    if name in UNSUPPORTED_OPTIMIZERS:
        raise ValueError(f"{name} cannot update shards: {UNSUPPORTED_OPTIMIZERS[name]}")
    if name in WHOLE_TENSOR_OPTIMIZERS and not whole_tensors:
        raise ValueError(_whole_tensors_message(name))
    try:
        together = trial.updates(trial.values)
    except Exception as error:
        raise ValueError(f"{name} cannot update shards with dense gradients and without a closure: {error}") from error
    alone = [update for tensor in trial.values for update in trial.updates([tensor])]
    if not _updates_agree(together, alone):
        raise ValueError(
            f"{name} updates a parameter by what others are, or at random, but each rank has only its shard: "
            "take an optimizer that updates every parameter for itself"
        )
    if whole_tensors:
        return
    flat = trial.values[0].reshape(-1)
    try:
        cut = torch.cat([update for part in (flat[:CUT], flat[CUT:]) for update in trial.updates([part])])
    except Exception:  # takes matrices alone
        raise ValueError(_whole_tensors_message(name)) from None
    if not _updates_agree([cut], alone[:1]):
        raise ValueError(_whole_tensors_message(name))


def _whole_tensors_message(name: str) -> str:
    return (
        f"{name} updates an element by others of its parameter, but owners have ranges of flat buckets, which cut "
        "parameters: pass whole_tensors=True, or take an elementwise optimizer (SGD, Adam, AdamW)"
    )


def _updates_agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        float((a - b).abs().max()) <= TOLERANCE * float(b.abs().max()) for a, b in zip(found, expected, strict=True)
    )


def check_optimizer_tensors(optimizer: torch.optim.Optimizer, given: Sequence[Any]) -> None:
    """Raise ValueError if an optimizer does not hold exactly the tensors that its factory was given."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer_factory must return one of torch's optimizers, not {type(optimizer).__name__}")
    tensors = [p for each in given for p in (each["params"] if isinstance(each, dict) else [each])]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    missing = len({id(p) for p in tensors} - set(held))
    others = len(set(held) - {id(p) for p in tensors})
    if missing or others or len(held) != len(tensors):
        raise ValueError(
            f"optimizer_factory must make an optimizer of the tensors that it is given, all of them and no others: of "
            f"{len(tensors)} it lacks {missing}, and has {others} others (the model's own parameters belong to no "
            "owner's optimizer)"
        )
