"""Parameters sharded at rest: units that have values only from just before their use until just behind it.

What is gathered, freed and pushed when: [Note: flat units] in `gssim.program.flat_units`. A unit's parameters are views
of one flat tensor whose storage is given back while nobody uses it (autograd keeps views of it from forward to
backward, and finds the same values there once it has been gathered again). In the meantime they have their shapes,
but no values: every element is the same NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gsreal.gradient_sharding.bucket import Bucket, Partition
from gsreal.gradient_sharding.hierarchy import Levels
from gsreal.gradient_sharding.master import master_type
from gsreal.gradient_sharding.point_to_point import all_gather_v
from gsreal.gradient_sharding.protocol import Kind, every_rank
from gsreal.gradient_sharding.side_stream import Lane, Observer
from gssim.plan import Division


class Unit(Bucket):
    """Parameters that are gathered together, and whose gradients are collected together once all are there.

    The shard is the master copy, in at least fp32: gathering casts it. A rank alone keeps all of them.
    """

    is_replica = False

    def __init__(
        self,
        index: int,
        parameters: list[nn.Parameter],
        division: Division,
        *,
        name: str,
        module: nn.Module,
        levels: Levels,
        lane: Lane,
        observe: Observer,
    ) -> None:
        super().__init__(index, parameters, division, node=levels.node)
        self.name, self.module, self.group, self.observe = name, module, levels.across, observe
        self._protocol = levels.protocol
        self._lane = lane
        self.is_whole = True
        """Whether the parameters have their values now."""
        self._is_alone = levels.nodes == 1
        self._wait: Callable[[], None] | None = None
        """Waits for the gather that is under way, if one is."""
        self._nothing = self.flat.new_full((), torch.nan)
        self._shapes = [parameter.shape for parameter in parameters]
        self.check: Callable[[Unit], None] = lambda unit: None
        """Called before parameters get values, while they should have none."""

    def take_shard(self, *, master: bool = False) -> None:
        """Make what the owner keeps and updates, and free the rest."""
        if self._is_alone:
            super().take_shard(master=master)
            return
        own = self.flat[self.own]
        self.shard = nn.Parameter(own.to(master_type(own.dtype), copy=True))
        self.has_master = self.shard.dtype != own.dtype  # else the model's own state has the same values
        self.join()
        self.free()

    def gather(self, when: str = "") -> None:
        """Give the parameters their values, for which every rank must call this, if they have none.

        `when`: what the label of the gather ends in.
        """
        if self.is_whole:
            return
        if self._wait is None:
            self.issue(when, beside=False)
        else:
            with self.observe(f"take all-gather {self.name}{when}", "exposed_communication"):
                self._wait()
            self._wait = None
        self.check(self)
        for parameter, place in self.places.items():
            parameter.data = self.flat[place].view(parameter.shape)
        self.is_whole = True

    def issue(self, when: str = "", *, beside: bool = True) -> None:
        """Begin to gather, if that is not done or under way: the own part is copied, then all parts go round."""
        if self.is_whole or self._wait is not None:
            return
        label = f"all-gather {self.name}{when}"
        with self.observe(f"issue {label}", "backward" if when else "forward"):
            self.flat.untyped_storage().resize_(self.elements * self.flat.element_size())
            self.flat[self.own].copy_(self.shard.detach())

        def gather() -> None:
            tag = self._protocol.tag(Kind.GATHER, self.index)
            with self._protocol.exchange(label):
                all_gather_v(self.flat, self.ranges, group=self.group, tag=tag)

        if beside:
            self._wait = self._lane.begin(gather)
            return
        with self.observe(label, "exposed_communication"):
            gather()

    def free(self) -> None:
        """Take the parameters' values away until the next gather."""
        if self._is_alone:
            return
        if self._wait is not None:
            self.gather()
        if self.is_whole:
            for parameter in self.parameters:
                parameter.data = self._nothing.expand(parameter.shape)
            self.flat.untyped_storage().resize_(0)
            self.is_whole = False

    def take(self, parameter: nn.Parameter, *, leaves: bool) -> None:
        """Note that a gradient is there; once all are, nothing in the backward needs the parameters any more."""
        self.missing.discard(parameter)
        if not self.missing:
            self._complete(leaves=leaves)

    def end_backward(self, *, leaves: bool) -> None:
        """Do without what is missing still."""
        if self.missing:
            self._complete(leaves=leaves)

    def _complete(self, *, leaves: bool) -> None:
        """Free the parameters; collect all gradients that there are where they leave."""
        self.free()
        if leaves:
            for parameter in self.parameters:
                self.collect(parameter)
        self.missing.clear()

    def write_back(self) -> None:
        """Leave it to the next gather to bring what was updated to the parameters."""
        super().write_back() if self._is_alone else self.free()

    @property
    def holds_values(self) -> bool:
        """Whether parameters have their values between steps: those of a rank alone."""
        return self._is_alone

    def addresses(self) -> list[tuple[int, torch.Size]]:
        """Return where the values of every parameter must be, or the one element in their place, and in which shape."""
        if not self.is_whole:
            return [(self._nothing.data_ptr() if shape.numel() else 0, shape) for shape in self._shapes]
        size, start = self.flat.element_size(), self.flat.data_ptr()
        first = [start + size * place.start for place in self.places.values()]
        return [(at if shape.numel() else 0, shape) for at, shape in zip(first, self._shapes, strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to be copied or saved: a copied model would gather into the first one's parameters."""
        raise RuntimeError(
            "a model whose parameters are sharded can be neither copied nor saved as a whole: take model.state_dict() "
            "on all ranks"
        )


UNITS = "_gradient_sharding_units"
"""The attribute in which a sharded model keeps its units."""


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model sharded at rest; none of any other."""
    found: tuple[Unit, ...] = model.__dict__.get(UNITS, ())
    return found


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Give all parameters of a model sharded at rest their values inside: every rank must enter.

    What is written to them inside, on all ranks alike, their owners keep.
    """
    resting = [unit for unit in units_of(model) if not unit.is_whole]
    for unit in resting:
        unit.gather()
    versions = [(unit, [parameter._version for parameter in unit.parameters]) for unit in units_of(model)]
    try:
        yield
    finally:
        for unit, before in versions:
            if [parameter._version for parameter in unit.parameters] != before:
                unit.adopt(slice(None))
        for unit in resting:
            unit.free()


def divide_into_units(
    model: nn.Module, blocks: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Return (name, module, its parameters) of each unit: every block from the last on, then all the rest, the root.

    A block whose parameters have several types is as many units.
    What a block shares with another module is the root's. Raises ValueError where a block is no part of the model, or
    one is inside another.
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
    found = [(names[block], block, [p for p in parameters if home[p] == i]) for i, block in enumerate(blocks)][::-1]
    found.append(("root", model, [p for p in parameters if home[p] == -1]))
    return [part for each in found for part in _by_type(*each)]


def _by_type(
    name: str, module: nn.Module, parameters: Sequence[nn.Parameter]
) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Return a unit for each type and device of a module's parameters: one flat tensor has one."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    names = [name, *(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, _ in list(kinds)[1:])]
    return [(each, module, members) for each, members in zip(names, kinds.values(), strict=False)]


def make_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    parameters: Sequence[nn.Parameter],
    levels: Levels,
    partition: Partition,
    *,
    observe: Observer,
) -> list[Unit]:
    """Return the units of a model whose `parameters`, in the order in which gradients become ready, are sharded.

    Raises ValueError where nodes have several places: parameters are sharded among all ranks alike.
    """
    if levels.inside is not None:
        raise ValueError("parameters are sharded on one level: take a group, or a mesh of one axis")
    lane = Lane(parameters[0].device)
    units = []
    for index, (name, module, members) in enumerate(divide_into_units(model, blocks, parameters)):
        division = partition.divide([parameter.numel() for parameter in members])
        unit = Unit(index, members, division, name=name, module=module, levels=levels, lane=lane, observe=observe)
        units.append(unit)
    model.__dict__[UNITS] = tuple(units)
    return units


def gather_just_in_time(model: nn.Module, *, kept: bool, prefetch: bool) -> None:
    """Gather each unit before its module's forward, free it behind it, and gather it again before its backward.

    The root, and with `kept` every unit, stays until its backward is done. (That frees it: see `Unit.end_backward`.)
    `prefetch`: when a unit is taken, the gather of the one that comes next is issued. State dicts are read and written
    whole.
    """
    units = units_of(model)
    root = [unit for unit in units if unit.module is model]
    forward = dict(pairwise(reversed(units))) if prefetch else {}
    backward = dict(pairwise([*root, *units[: len(units) - len(root)]])) if prefetch else {}
    for unit in units:
        before = partial(_before_forward, unit, forward.get(unit))
        after = partial(_after_forward, unit, backward.get(unit), kept or unit in root)
        unit.module.register_forward_pre_hook(_UnitHook(unit, before))
        unit.module.register_forward_hook(_UnitHook(unit, after))
    if units:
        model.register_state_dict_pre_hook(_gather_all)
        model.register_state_dict_post_hook(_copied)
        model.register_load_state_dict_pre_hook(_gather_all)
        model.register_load_state_dict_post_hook(_adopted)
        of_parameter = {parameter: unit for unit in units for parameter in unit.parameters}
        for name, module in model.named_modules():
            used = {of_parameter[p] for p in module.parameters(recurse=False) if p in of_parameter}
            for unit in used:
                module.register_forward_pre_hook(partial(_refuse_outside, unit, name))
            if module is not model:
                module.register_state_dict_pre_hook(partial(_refuse_alone, of_parameter))


class _UnitHook:
    """A hook of a unit's module, which can be neither copied nor saved, as the unit cannot.

    What is compiled must not take storage that comes and goes, nor exchanges, into its graphs.
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
    """Raise RuntimeError where a module runs whose parameters have no values."""
    if not torch.compiler.is_compiling() and not unit.is_whole:
        raise RuntimeError(
            f"{name} was called outside of a forward of {'the model' if unit.name == 'root' else unit.name}, for which "
            "its parameters are gathered: call that, or give what you call to shard_gradients among units"
        )


def _after_forward(
    unit: Unit, following: Unit | None, stays: bool, _module: nn.Module, _inputs: Any, outputs: Any
) -> None:
    if _in_backward():
        return  # a checkpoint computes it once more: what is used next is its backward, and that frees it
    differentiable = [each for each in _tensors(outputs) if each.requires_grad]

    def before_backward(_gradient: Tensor) -> None:
        unit.gather(" backward")
        if following is not None:
            following.issue(" backward")

    for output in differentiable:
        output.register_hook(before_backward)
    if not (stays and differentiable):
        unit.free()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Give the tensors of a module's outputs, those in dataclasses and other plain objects too."""
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
    with every_rank("state_dict or load_state_dict of a model whose parameters are sharded"):
        for unit in units_of(model):
            unit.gather()


def _refuse_alone(of_parameter: Mapping[nn.Parameter, Unit], module: nn.Module, *_prefix_and_more: Any) -> None:
    """Raise RuntimeError where a part of a model is read whose parameters have no values; from the whole, they have."""
    for parameter in module.parameters(recurse=False):
        if parameter in of_parameter and not of_parameter[parameter].is_whole:
            raise RuntimeError(
                "a part of a model whose parameters are sharded has no values of its own: take state_dict() of the "
                "whole model, on all ranks"
            )


def _copied(model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Give a state dict values of its own, and the parameters' back."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.clone()
    for unit in units_of(model):
        unit.free()


def _adopted(model: nn.Module, _incompatible_keys: Any) -> None:
    for unit in units_of(model):
        unit.adopt(slice(None))
        unit.free()
