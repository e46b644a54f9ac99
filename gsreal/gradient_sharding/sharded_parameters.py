"""Parameters sharded at rest: units of parameters that are gathered just before their use and freed after it.

Order of gathers, frees and pushes: [Note: flat units] in `gssim.program.flat_units`. A unit's parameters are views of
one flat tensor whose storage is freed while it is not in use (autograd keeps views of it from forward to backward, and
finds the same values there once it has been gathered again). In the meantime they have their shapes, but no values:
every element is the same NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gsreal.gradient_sharding.bucket import Address, Bucket, Owners, Partition
from gsreal.gradient_sharding.hierarchy import Hierarchy
from gsreal.gradient_sharding.master import master_type
from gsreal.gradient_sharding.point_to_point import all_gather_v
from gsreal.gradient_sharding.protocol import ExchangeProtocol, MessageKind, collective_call
from gsreal.gradient_sharding.side_stream import Observer, SideStream
from gssim.plan import Division


class Unit(Bucket):
    """Parameters that are gathered together, and whose gradients are collected together once all are complete.

    The shard is the master copy, in at least fp32: gathering casts it. A single rank keeps all parameters.
    """

    is_replica = False
    is_published = False

    def __init__(
        self,
        index: int,
        parameters: list[nn.Parameter],
        division: Division,
        *,
        name: str,
        module: nn.Module,
        owners: Owners,
        protocol: ExchangeProtocol,
        side_stream: SideStream,
        observe: Observer,
    ) -> None:
        super().__init__(index, parameters, division, owners=owners)
        self.name, self.module, self.group, self.observe = name, module, owners.group, observe
        self._protocol = protocol
        self._side_stream = side_stream
        self.is_whole = True
        """Whether the parameters have their values now."""
        self._is_alone = owners.ranks == 1
        self._wait: Callable[[], None] | None = None
        """Waits for the gather in flight, if any."""
        self._nothing = self.flat.new_full((), torch.nan)
        self._shapes = [parameter.shape for parameter in parameters]
        self._versions: list[int] = []
        self.check: Callable[[Unit], None] = lambda unit: None
        """Called before parameters get values, while they should have none."""

    def create_shard(self, *, master: bool = False) -> None:
        """Create the shard that the owner keeps and updates, and free the rest."""
        if self._is_alone:
            super().create_shard(master=master)
            return
        own = self.flat[self.own]
        self.shard = nn.Parameter(own.to(master_type(own.dtype), copy=True))
        self.has_master = self.shard.dtype != own.dtype  # else the model's own state has the same values
        self.merge_pieces()
        self.free()
        self.record_versions()

    def record_versions(self) -> None:
        """Record that what has been written to the parameters so far is in the shards."""
        if not self._is_alone:
            self._versions = [parameter._version for parameter in self.parameters]

    @property
    def written(self) -> nn.Parameter | None:
        """A parameter that has been written to since `record_versions`, if any; what was written is lost."""
        pairs = zip(self.parameters, self._versions, strict=False)  # a single rank has none recorded
        return next((parameter for parameter, version in pairs if parameter._version != version), None)

    def gather(self, when: str = "") -> None:
        """Gather the parameters' values, if they have none; every rank must call this.

        `when`: suffix of the gather's label.
        """
        if self.is_whole:
            return
        if self._wait is None:
            self.issue(when, beside=False)
        else:
            with self.observe(f"take all-gather {self.name}{when}", "exposed_communication", group=self.group):
                self._wait()
            self._wait = None
        self.check(self)
        for parameter, place in self.places.items():
            parameter.data = self.flat[place].view(parameter.shape)
        self.is_whole = True

    def issue(self, when: str = "", *, beside: bool = True) -> None:
        """Start the gather, unless it is complete or in flight.

        The own part is copied, then all parts are all-gathered.
        """
        if self.is_whole or self._wait is not None:
            return
        label = f"all-gather {self.name}{when}"
        with self.observe(f"issue {label}", "backward" if when else "forward"):
            self.flat.untyped_storage().resize_(self.elements * self.flat.element_size())
            self.flat[self.own].copy_(self.shard.detach())

        def gather() -> None:
            tag = self._protocol.tag(MessageKind.GATHER, self.index)
            with self._protocol.exchange(label):
                all_gather_v(self.flat, self.ranges, group=self.group, tag=tag)

        if beside:
            self._wait = self._side_stream.begin(gather)
            return
        with self.observe(label, "exposed_communication", group=self.group):
            gather()

    def free(self) -> None:
        """Free the parameters' values until the next gather."""
        if self._is_alone:
            return
        if self._wait is not None:
            self.gather()
        if self.is_whole:
            for parameter in self.parameters:
                parameter.data = self._nothing.expand(parameter.shape)
            self.flat.untyped_storage().resize_(0)
            self.is_whole = False

    def on_gradient(self, parameter: nn.Parameter, *, pushes: bool) -> None:
        """Note that a gradient is complete; once all are, the backward no longer needs the parameters."""
        self.pending_parameters.discard(parameter)
        if not self.pending_parameters:
            self._complete(pushes=pushes)

    def end_backward(self, *, pushes: bool) -> None:
        """Complete the unit without the gradients that are still missing."""
        if self.pending_parameters:
            self._complete(pushes=pushes)

    def _complete(self, *, pushes: bool) -> None:
        """Free the parameters; collect all existing gradients if they are pushed."""
        self.free()
        if pushes:
            for parameter in self.parameters:
                self.collect_gradient(parameter)
        self.pending_parameters.clear()

    def write_back(self) -> None:
        """Free the parameters: the next gather reads the updated shard."""
        super().write_back() if self._is_alone else self.free()

    @property
    def has_values_between_steps(self) -> bool:
        """Whether parameters have their values between steps: only those of a single rank."""
        return self._is_alone

    def addresses(self) -> list[Address]:
        """Return address, shape and strides that every parameter must have; between steps, those of its placeholder."""
        views = [
            self.flat[place].view(shape) if self.is_whole else self._nothing.expand(shape)
            for place, shape in zip(self.places.values(), self._shapes, strict=True)
        ]
        return [(view.data_ptr(), view.shape, view.stride()) for view in views]

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to be copied or saved: a copied model would gather into the first one's parameters."""
        raise RuntimeError(
            "a model whose parameters are sharded can be neither copied nor saved as a whole: take model.state_dict() "
            "on all ranks"
        )


NO_BACKWARD = -1
"""Autograd's id outside of any backward, as torch.utils.checkpoint tests it."""
UNITS = "_gradient_sharding_units"
"""Attribute in which a sharded model keeps its units."""


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model sharded at rest; none of any other."""
    units: tuple[Unit, ...] = model.__dict__.get(UNITS, ())
    return units


UnitPlan = tuple[str, nn.Module, list[nn.Parameter]]
"""Name of a unit, its module, and its parameters."""


def divide_into_units(
    model: nn.Module, blocks: Sequence[nn.Module], parameters: Sequence[nn.Parameter], experts: Set[nn.Parameter]
) -> list[UnitPlan]:
    """Return the units: every block from the last on, then the root with all the rest.

    A block whose parameters have several types becomes as many units, and `experts` units of their own. Parameters that
    a block shares with another module are the root's. Raises ValueError if a block is no part of the model, or is
    inside another.
    """
    names = {module: name for name, module in model.named_modules()}
    inside = [set(block.modules()) for block in blocks]
    if any(block not in names or block is model for block in blocks) or len(set().union(*inside)) < sum(
        map(len, inside)
    ):
        raise ValueError("units must be distinct parts of the model, none inside another")
    owners: dict[nn.Parameter, set[int]] = {}
    for module in names:
        unit = next((i for i, modules in enumerate(inside) if module in modules), -1)
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(unit)
    home = {parameter: next(iter(units)) if len(units) == 1 else -1 for parameter, units in owners.items()}
    members = [(names[block], block, [p for p in parameters if home[p] == i]) for i, block in enumerate(blocks)][::-1]
    members.append(("root", model, [p for p in parameters if home[p] == -1]))
    units = []
    for name, module, own in members:  # gradients of experts are complete first
        units += _by_type(f"{name} (experts)", module, [each for each in own if each in experts])
        units += _by_type(name, module, [each for each in own if each not in experts])
    return units


def _by_type(name: str, module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[UnitPlan]:
    """Return a unit for each type and device of a module's parameters: a flat tensor has only one."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    names = [name, *(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, _ in list(kinds)[1:])]
    return [(each, module, members) for each, members in zip(names, kinds.values(), strict=False)]


def make_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    parameters: Sequence[nn.Parameter],
    hierarchy: Hierarchy,
    partitions: Mapping[bool, Partition],
    *,
    experts: Set[nn.Parameter],
    observe: Observer,
) -> list[Unit]:
    """Return the units of a model whose `parameters`, in the order in which gradients become ready, are sharded.

    `experts`: those that fewer ranks hold; `partitions`: of units of them, and of others.
    Raises ValueError if nodes have several ranks: parameters are sharded among all ranks alike.
    """
    if hierarchy.intra_node is not None:
        raise ValueError("parameters are sharded on one level: take a group, or a mesh of one axis")
    side_stream = SideStream(parameters[0].device)
    units = []
    for index, (name, module, members) in enumerate(divide_into_units(model, blocks, parameters, experts)):
        of_experts = members[0] in experts
        owners = hierarchy.expert_owners if of_experts else hierarchy.owners
        assert owners is not None  # checked before
        division = partitions[of_experts].divide([parameter.numel() for parameter in members])
        unit = Unit(
            index,
            members,
            division,
            name=name,
            module=module,
            owners=owners,
            protocol=hierarchy.protocol,
            side_stream=side_stream,
            observe=observe,
        )
        units.append(unit)
    model.__dict__[UNITS] = tuple(units)
    return units


def register_gather_hooks(model: nn.Module, *, kept: bool, prefetch: bool) -> None:
    """Gather each unit before its module's forward, free it after it, and gather it again before its backward.

    The root, and with `kept` every unit, stays gathered until its backward is done (`Unit.end_backward` frees it).
    `prefetch`: when a unit is used, the gather of the next one is started. State dicts are read and written whole.
    Gathers come before hooks of the module that are there already, which may read parameters (weight and spectral
    normalisation).
    """
    units = units_of(model)
    root = [unit for unit in units if unit.module is model]
    forward = dict(pairwise(reversed(units))) if prefetch else {}
    backward = dict(pairwise([*root, *units[: len(units) - len(root)]])) if prefetch else {}
    for unit in units:  # of units of one module, the last is gathered first: the unit before prefetches it
        before = partial(_before_forward, unit, forward.get(unit))
        unit.module.register_forward_pre_hook(_UnitHook(unit, before), prepend=True)
    for unit in units:
        after = partial(_after_forward, unit, backward.get(unit), kept or unit in root)
        unit.module.register_forward_hook(_UnitHook(unit, after))
    if units:
        model.register_state_dict_pre_hook(_gather_all)
        model.register_state_dict_post_hook(_detach_state_dict)
        model.register_load_state_dict_pre_hook(_gather_all)
        model.register_load_state_dict_post_hook(_update_masters_after_load)
        of_parameter = {parameter: unit for unit in units for parameter in unit.parameters}
        for name, module in model.named_modules():
            used = {of_parameter[p] for p in module.parameters(recurse=False) if p in of_parameter}
            for unit in used:
                module.register_forward_pre_hook(partial(_refuse_outside, unit, name))
            if module is not model:
                module.register_state_dict_pre_hook(partial(_refuse_partial_state, of_parameter))


class _UnitHook:
    """A hook of a unit's module, which can be neither copied nor saved, as the unit cannot.

    Its work (freeing storage, exchanges) stays out of compiled graphs.
    """

    def __init__(self, unit: Unit, call: Callable[..., None]) -> None:
        self._unit, self._call = unit, torch.compiler.disable(call)

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._unit.__reduce__()


def _before_forward(unit: Unit, following: Unit | None, _module: nn.Module, _inputs: Any) -> None:
    unit.gather()
    if following is not None:
        following.issue()


def _refuse_outside(unit: Unit, name: str, _module: nn.Module, _inputs: Any) -> None:
    """Raise RuntimeError if a module runs whose parameters have no values."""
    if not torch.compiler.is_compiling() and not unit.is_whole:
        raise RuntimeError(
            f"{name} was called outside of a forward of {'the model' if unit.name == 'root' else unit.name}, for which "
            "its parameters are gathered: call that, or give what you call to shard_gradients among units"
        )


def _after_forward(
    unit: Unit, following: Unit | None, stays: bool, _module: nn.Module, _inputs: Any, outputs: Any
) -> None:
    if torch._C._current_graph_task_id() != NO_BACKWARD:
        return  # recomputed by a checkpoint: its backward follows immediately, and frees the parameters
    differentiable = [each for each in _tensors(outputs) if each.requires_grad]

    def before_backward(_gradient: Tensor) -> None:
        unit.gather(" backward")
        if following is not None:
            following.issue(" backward")

    for output in differentiable:
        output.register_hook(before_backward)
    if not (stays and differentiable):
        unit.free()


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Give the tensors of a module's outputs, including those in dataclasses and other plain objects."""
    seen: set[int] = set()
    left = [outputs]
    while left:
        for leaf in tree_leaves(left.pop()):
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen and hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
                seen.add(id(leaf))
                left.append(list(vars(leaf).values()))
            elif is_dataclass(leaf) and id(leaf) not in seen:  # with slots
                seen.add(id(leaf))
                left.append([getattr(leaf, each.name) for each in fields(leaf)])


def _gather_all(model: nn.Module, *_state_dict_and_more: Any) -> None:
    with collective_call("state_dict or load_state_dict of a model whose parameters are sharded"):
        for unit in units_of(model):
            unit.gather()


def _refuse_partial_state(of_parameter: Mapping[nn.Parameter, Unit], module: nn.Module, *_prefix_and_more: Any) -> None:
    """Raise RuntimeError if part of a model is read whose parameters have no values.

    The whole model's state has them.
    """
    for parameter in module.parameters(recurse=False):
        if parameter in of_parameter and not of_parameter[parameter].is_whole:
            raise RuntimeError(
                "a part of a model whose parameters are sharded has no values of its own: take state_dict() of the "
                "whole model, on all ranks"
            )


def _detach_state_dict(model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Clone the values of a state dict, and free the gathered parameters."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.clone()
    for unit in units_of(model):
        unit.free()


def _update_masters_after_load(model: nn.Module, _incompatible_keys: Any) -> None:
    """Copy loaded values into the owners' master copies, and free the gathered parameters."""
    for unit in units_of(model):
        unit.update_master(slice(None))
        unit.record_versions()
        unit.free()
