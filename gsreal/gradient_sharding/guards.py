"""Checks of the optimizer that owners update their shards with: elementwise, and of exactly the tensors it is given.

Owners have ranges of flat buckets, which need not begin or end with a parameter. An optimizer whose update of an
element depends on others (a norm of its layer, a matrix, all parameters) would train something else there without a
word. Names are not enough, so it is tried: on small matrices together and alone, and flat, in two pieces.

Watches whether the model still trains what its owners update: checked in every step, in one pass over references.

Moving, casting, replacing or assigning parameters leaves the buckets behind, and from then on nothing that is published
reaches the model. Writing into parameters is seen by torch's version counters, where owners keep master copies that the
next step would publish over it; writing through `.data` is not.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.gradient_sharding.bucket import Bucket

REMEDY = "move, cast and load (.to, .half, assign=True, to_empty) before shard_gradients, or call it again"


class Watch:
    """Where a model's parameters were when they were put into buckets."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> None:
        self.model, self.buckets, self.names = model, buckets, names
        self._versions: dict[nn.Parameter, int] = {}
        self._note_links()
        self.note_versions()

    def _note_links(self) -> None:
        """Note what every module has, by reference."""
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
        """Raise RuntimeError where a parameter is trained by nobody: it was replaced, or left its bucket."""
        if self._listed() != self._members:
            self._check_members()
            self._note_links()
        for bucket in self.buckets:
            self.check_places(bucket)

    def check_places(self, bucket: Bucket) -> None:
        """Raise RuntimeError where a parameter is not where its bucket has it."""
        addresses, now = bucket.addresses(), [(p.data_ptr(), p.shape) for p in bucket.parameters]
        if now != addresses:
            name = next(self.names[p] for p, a, b in zip(bucket.parameters, now, addresses, strict=True) if a != b)
            raise RuntimeError(f"{name} is no longer in its bucket and would not train: {REMEDY}")

    def _check_members(self) -> None:
        """Raise RuntimeError where the model has parameters to train that are in no bucket, or lacks some that are."""
        now = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, name in now.items():
            if parameter.requires_grad and parameter not in self.names:
                raise RuntimeError(f"{name} was put into the model after shard_gradients and would not train: {REMEDY}")
        for parameter, name in self.names.items():
            if parameter not in now:
                raise RuntimeError(f"{name} is no longer in the model, which would not train: {REMEDY}")

    # Master copies ----------------------------------------------------------------------------------------------------

    def note_versions(self) -> None:
        """Take what is in the parameters now as what owners have published."""
        self._versions = {
            parameter: parameter._version
            for bucket in self.buckets
            if bucket.has_master and bucket.holds_values
            for parameter in bucket.parameters
        }

    @torch.no_grad()
    def adopt_writes(self) -> None:
        """Bring what was written into parameters since to their owners' master copies."""
        written = {parameter for parameter, version in self._versions.items() if parameter._version != version}
        if not written:
            return
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if parameter in written:
                    bucket.adopt(bucket.owned(parameter)[1])
        self.note_versions()


OptimizerFactory = Callable[[list[Any]], torch.optim.Optimizer]
"""Makes an optimizer of parameters, or of groups of them, as torch's optimizers take them."""
NEVER = {
    "LBFGS": "it looks at all parameters at once, and at the loss several times a step",
    "SparseAdam": "gradients are dense when they reach their owners; take Adam or AdamW",
}
BY_TENSOR = {
    *("Adafactor", "Muon", "Shampoo", "DistributedShampoo", "SOAP", "CAME", "SM3", "Adahessian", "AdaHessian"),
    *("Lamb", "LAMB", "FusedLAMB", "LARS", "Lars", "LARC", "NovoGrad", "FusedNovoGrad", "AdamP", "SGDP", "Ranger"),
}
"""Known to look at whole tensors: named even where a trial is not made."""
SHAPES = ((6, 4), (3, 5))
STEPS = 3
TOLERANCE = 1e-3
"""Of the largest update: what is more than rounding."""
CUT = 13
"""Where the first tensor is cut: inside of a row."""


def check_factory(
    factory: OptimizerFactory,
    groups: Sequence[Mapping[str, Any]] | None,
    *,
    like: Tensor,
    whole_tensors: bool,
) -> None:
    """Raise ValueError where a factory's optimizer would not update shards as it updates parameters.

    `like`: a parameter; the optimizer is tried on small tensors of its device and of the precision of its update.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    with torch.random.fork_rng(devices=[]):
        for number in range(len(groups or ({},))):
            _check_group(_Trial(factory, groups, number, dtype, like.device), whole_tensors=whole_tensors)


class _Trial:
    """Trials of the optimizer that a factory makes, with tensors in one of its groups."""

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
        """Return an optimizer over copies of tensors, and these."""
        made = [nn.Parameter(tensor.clone()) for tensor in tensors]
        if self.groups is None:
            return self.factory(list(made)), made
        given = [{**group, "params": made if i == self.number else []} for i, group in enumerate(self.groups)]
        return self.factory(given), made

    def updates(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what a few steps add to tensors that one optimizer has, each flat."""
        torch.manual_seed(0)
        optimizer, made = self.make(tensors)
        for step in range(STEPS):
            for parameter, tensor in zip(made, tensors, strict=True):
                parameter.grad = (tensor * (5.0 + step)).cos() * tensor.mul(3.0).exp()
            optimizer.step()
        return [(p.detach() - t).reshape(-1) for p, t in zip(made, tensors, strict=True)]


def _check_group(trial: _Trial, *, whole_tensors: bool) -> None:
    try:
        optimizer, given = trial.make(trial.values)
    except Exception:  # the factory's own error, or a matter of these tensors: what it makes of the shards will tell
        return
    check_holds(optimizer, given)
    name = type(optimizer).__name__
    if name in NEVER:
        raise ValueError(f"{name} cannot update shards: {NEVER[name]}")
    if name in BY_TENSOR and not whole_tensors:
        raise ValueError(_needs_tensors(name))
    try:
        together = trial.updates(trial.values)
    except Exception as error:
        raise ValueError(f"{name} cannot update shards with dense gradients and without a closure: {error}") from error
    alone = [update for tensor in trial.values for update in trial.updates([tensor])]
    if not _alike(together, alone):
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
        raise ValueError(_needs_tensors(name)) from None
    if not _alike([cut], alone[:1]):
        raise ValueError(_needs_tensors(name))


def _needs_tensors(name: str) -> str:
    return (
        f"{name} updates an element by others of its parameter, but owners have ranges of flat buckets, which cut "
        "parameters: pass whole_tensors=True, or take an elementwise optimizer (SGD, Adam, AdamW)"
    )


def _alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        float((a - b).abs().max()) <= TOLERANCE * float(b.abs().max()) for a, b in zip(found, expected, strict=True)
    )


def check_holds(optimizer: torch.optim.Optimizer, given: Sequence[Any]) -> None:
    """Raise ValueError where an optimizer does not hold exactly the tensors that its factory was given."""
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
