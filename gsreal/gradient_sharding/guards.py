"""Guards against silent training errors: unsuitable optimizers, and models whose parameters left their buckets.

`check_factory`: owners have ranges of flat buckets, which need not begin or end with a parameter. An optimizer whose
update of an element depends on others (a norm of its layer, a matrix, all parameters) would silently train something
else there. Names are not enough, so the optimizer is tried: on small matrices together and alone, and flat, in two
pieces.

`ModelGuard` checks in every step, in one pass over references, that the model still trains the parameters which its
owners update. After moving, casting, replacing or assigning parameters they are no longer in the buckets, and nothing
that is published reaches the model. Writes to parameters are detected by torch's version counters if owners keep master
copies that the next step would publish over them; writes through `.data` are not detected.

Checks of the arguments of `shard_gradients`, and the shares, parameter groups and descriptions derived from them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from gsreal.gradient_sharding.bucket import Bucket, plain_name
from gsreal.gradient_sharding.sharded_parameters import Unit
from gssim.plan import Publish, Push, splitting

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
        addresses, now = bucket.addresses(), [(p.data_ptr(), p.shape, p.stride()) for p in bucket.parameters]
        if now != addresses:
            name = next(self.names[p] for p, a, b in zip(bucket.parameters, now, addresses, strict=True) if a != b)
            raise RuntimeError(f"{name} is no longer in its bucket and would not train: {REMEDY}")
        if isinstance(bucket, Unit) and (written := bucket.written) is not None:
            raise RuntimeError(
                f"{self.names[written]} was written to where its parameters are sharded: between steps it has no "
                "values, and what a forward writes is freed. Change model.state_dict() on all ranks, and load it"
            )

    def _check_members(self) -> None:
        """Raise RuntimeError if the model has trainable parameters that are in no bucket, or lacks some that are."""
        now = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, name in now.items():
            if parameter.requires_grad and parameter not in self.names:
                raise RuntimeError(f"{name} was put into the model after shard_gradients and would not train: {REMEDY}")
        for parameter, name in self.names.items():
            if parameter not in now:
                raise RuntimeError(f"{name} is no longer in the model, which would not train: {REMEDY}")
        for unit in (bucket for bucket in self.buckets if not bucket.has_values_between_steps):
            for parameter in unit.parameters:
                if now[parameter] != self.names[parameter]:
                    raise RuntimeError(
                        f"{self.names[parameter]} became {now[parameter]} where its parameters are sharded: between "
                        "steps it has no values that pruning or a parametrization could read. Apply these before "
                        "shard_gradients"
                    )

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
    with torch.random.fork_rng(devices=[like.device] if _has_generator(like) else []):
        for number in range(len(groups or ({},))):
            _check_group(_Trial(factory, groups, number, dtype, like.device), whole_tensors=whole_tensors)


def _has_generator(tensor: Tensor) -> bool:
    """Return whether a tensor's device has a generator of its own: CUDA, unless something stands in for it."""
    return tensor.is_cuda and torch.cuda.is_initialized()


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

    def options(self, tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return the options that the factory gives to each tensor."""
        optimizer, copies = self.make(tensors)
        of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        return [{key: value for key, value in of[id(p)].items() if key != "params"} for p in copies]

    def updates(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the change of each tensor, flat, after a few steps of one optimizer over all of them."""
        # not torch.manual_seed: it seeds all other devices for good, and takes a millisecond for each one's stack trace
        torch.default_generator.manual_seed(0)
        if _has_generator(tensors[0]):
            torch.cuda.default_generators[tensors[0].get_device()].manual_seed(0)
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
    _check_options_agree(trial, [trial.values, trial.values[1:]])
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
        trial.make([flat])
    except Exception:  # takes matrices alone
        raise ValueError(_whole_tensors_message(name)) from None
    _check_options_agree(trial, [trial.values, [flat]])
    try:
        cut = torch.cat([update for part in (flat[:CUT], flat[CUT:]) for update in trial.updates([part])])
    except Exception:  # takes matrices alone
        raise ValueError(_whole_tensors_message(name)) from None
    if not _updates_agree([cut], alone[:1]):
        raise ValueError(_whole_tensors_message(name))


def _check_options_agree(trial: _Trial, kinds: Sequence[Sequence[Tensor]]) -> None:
    """Raise ValueError if a factory's options for the last tensor of each of `kinds` differ.

    Shards are flat, one for each bucket. A factory that decays matrices alone would decay no shard, and the updates of
    a trial are too few to show that.
    """
    first, *others = (trial.options(tensors)[-1] for tensors in kinds)
    for other in others:
        for key, value in first.items():
            if repr(other.get(key)) != repr(value):
                raise ValueError(
                    f"optimizer_factory chooses {key} by a tensor's shape or place, but it gets flat shards, one for "
                    "each bucket, not the model's parameters: give those of other options to shard_gradients as "
                    "param_groups"
                )


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


Parameters = Literal["replicated", "gathered", "sharded"]
"""Placement of the parameters on a rank."""


TYPES: Mapping[str, type] = {
    "model": nn.Module,
    "mesh": DeviceMesh,
    "push": Push,
    "publish": Publish,
    "scaler": torch.amp.GradScaler,
    "experts": Iterable,
    "expert_group": dist.ProcessGroup,
    "units": Iterable,
    "param_groups": Iterable,
    "parameter_order": Iterable,
}
"""Types of the arguments of `shard_gradients` that are an object of one type, or None."""


def check_types(**given: object) -> None:
    """Raise ValueError if an argument of `shard_gradients` is neither None nor of its type in `TYPES`."""
    for name, value in given.items():
        if value is not None and not isinstance(value, TYPES[name]):
            raise ValueError(f"{name} must be of type {TYPES[name].__name__}, not {value!r:.80}")


def check_flags(**given: object) -> None:
    """Raise ValueError if an argument is neither True nor False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r:.80}")  # any text counts as true


def check_callables(**given: object) -> None:
    """Raise ValueError if an argument cannot be called."""
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
    push: Push,
    publish: Publish,
    groups: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Raise ValueError if options exclude one another."""
    if push.kind == "target-density" and not 0 < (push.threshold or 1) <= 1:
        raise ValueError(f"push: a target density is a fraction to be sent, at most 1, not {push.threshold}")
    if parameters not in get_args(Parameters):
        raise ValueError(f"parameters must be one of {', '.join(get_args(Parameters))}, not {parameters!r}")
    for unit in units:
        if not isinstance(unit, nn.Module):
            raise ValueError(f"units must be modules of the model, not {unit!r:.80}")
        if getattr(unit.forward, "__func__", None) is nn.Module.forward:  # torch.compile gives a module its own
            raise ValueError(
                f"units has a {type(unit).__name__}, which is never called, so that its parameters would never be "
                "gathered: list the modules that are called, as in units=model.blocks, not [model.blocks]"
            )
    if units and parameters == "replicated":
        raise ValueError("units are gathered just in time: set parameters to 'sharded' or 'gathered'")
    if parameters != "replicated" and publish.threshold is not None:
        raise ValueError(f"parameters = '{parameters}': nothing is published, so that nothing can be thresholded")
    if parameters != "replicated" and groups is not None:
        raise ValueError(f"parameters = '{parameters}': a unit is updated as one, so that it cannot have param_groups")


def check_experts(
    model: nn.Module, experts: Iterable[str] | None, group: dist.ProcessGroup | None, *, whole_tensors: bool
) -> frozenset[str]:
    """Return the plain names of `experts`.

    Raise ValueError if these are no parameters of the model, or beside options that they cannot have.
    """
    given = list(experts or ())
    if bool(given) != (group is not None):
        raise ValueError("experts and expert_group: give both, the parameters and the ranks that hold the same ones")
    names = {plain_name(name) for name, _ in model.named_parameters()}
    odd = [name for name in given if not isinstance(name, str) or plain_name(name) not in names]
    if odd:
        raise ValueError(f"experts: {odd[0]!r:.80} is no parameter of the model: list names, as named_parameters does")
    if given and whole_tensors:
        raise ValueError("experts: cannot be divided beside whole_tensors yet; leave it out")
    return frozenset(plain_name(name) for name in given)


def check_model(model: Any, parameters: Mapping[str, nn.Parameter], *, thresholded: bool) -> None:
    """Raise ValueError if the model cannot be trained by owners of ranges of flat buckets.

    Cases: parameters without values (meta), without an order for thresholds (complex) or in shared memory; a model that
    is distributed already, or that writes to parameters in its forward, where every rank would write other rows.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("torch.inference_mode: buckets made in it could not be trained; call shard_gradients outside")
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(f"the model is wrapped in {type(module).__name__}: give shard_gradients what is inside")
        limited = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        if limited and any(p.requires_grad for p in module.parameters(False)):
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
    shares = check_fractions("shard_shares", shares, ranks)
    if scaler is not None and min(shares) == 0:
        raise ValueError("shard_shares: a scaler looks at its own rank's gradients, so every rank must own some")
    return shares


def check_fractions(name: str, values: Any, ranks: int) -> tuple[float, ...]:
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
            if isinstance(value, int | float | str | tuple | None) or (
                isinstance(value, Tensor) and value.numel() == 1
            ):
                descriptions[f"{key} of group {number}"] = repr(value.item() if isinstance(value, Tensor) else value)
    return descriptions


def frozen_parameters(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that are not trained, of which every rank keeps its own copy, by name."""
    known = set(trained.values())
    return {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter not in known}


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
