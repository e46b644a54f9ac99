"""FSDP2's units: layers that are gathered and reduced together, and how their parameters are cut among the ranks."""

import math
from dataclasses import dataclass
from functools import cached_property

from gssim.memory import Event
from gssim.program.lowering import Lowering
from gssim.workload import LayerInstance, Parameter


@dataclass(frozen=True)
class Tensors:
    """The parameters of a unit, and how they are cut among the ranks; repeated blocks share one."""

    parameters: tuple[Parameter, ...]
    ranks: int
    value_bytes: int
    master_bytes: int
    """Bytes of an element of a shard: FSDP2 keeps it, and its gradient, in the precision of the optimizer."""

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(Rows, elements of a row) of each parameter; a scalar has one row."""
        rows = [parameter.shape[0] if parameter.shape else 1 for parameter in self.parameters]
        return tuple((n, parameter.elements // n) for n, parameter in zip(rows, self.parameters, strict=True))

    @cached_property
    def shard_elements(self) -> tuple[int, ...]:
        """Elements of each parameter on one rank, padding included (torch.chunk on dim 0)."""
        return tuple(math.ceil(rows / self.ranks) * each for rows, each in self.rows)

    @cached_property
    def padded_bytes(self) -> int:
        """Bytes of the gathered parameters: each padded in its first dimension to a multiple of the ranks."""
        return self.ranks * sum(self.shard_elements) * self.value_bytes

    @cached_property
    def padded_tensors(self) -> tuple[float, ...]:
        """The same of each of them."""
        return tuple(float(self.ranks * elements * self.value_bytes) for elements in self.shard_elements)

    @cached_property
    def gradient_tensors(self) -> tuple[float, ...]:
        """Bytes of each unsharded gradient."""
        return tuple(float(rows * each * self.value_bytes) for rows, each in self.rows)

    @cached_property
    def uneven_bytes(self) -> int:
        """Bytes of those of the gathered parameters that have padding."""
        pairs = zip(self.rows, self.shard_elements, strict=True)
        return self.ranks * sum(elements for (rows, _), elements in pairs if rows % self.ranks) * self.value_bytes

    @cached_property
    def shard_bytes(self) -> int:
        """Bytes of the parameters, or of their gradients, that one rank keeps, padding included."""
        return sum(self.shard_elements) * self.master_bytes

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients."""
        return sum(rows * each for rows, each in self.rows) * self.value_bytes

    def own_elements(self, position: int) -> tuple[int, ...]:
        """Return elements of each parameter on the group's rank at `position`, padding left out."""
        found = []
        for rows, each in self.rows:
            chunk = math.ceil(rows / self.ranks)
            found.append(max(0, min(chunk, rows - position * chunk)) * each)
        return tuple(found)


@dataclass(frozen=True)
class Unit:
    """Layers that FSDP2 shards together: a block, or all that is no block (the root)."""

    name: str
    layers: tuple[LayerInstance, ...]
    tensors: Tensors

    @property
    def ranks(self) -> int:
        """Number of ranks that share the unit."""
        return self.tensors.ranks

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the unit."""
        return self.tensors.parameters

    @property
    def shard_elements(self) -> tuple[int, ...]:
        """Elements of each parameter on one rank, padding included."""
        return self.tensors.shard_elements

    def gathered(self, position: int, *, sign: int) -> Event:
        """Return where the parameters that were copied out of a gather are taken (`sign` 1), or given back (-1)."""
        return Event(position, sign * self.padded_bytes, "gathered_parameters", self.tensors.padded_tensors)

    @property
    def padded_bytes(self) -> int:
        """Bytes of the gathered parameters, padding included."""
        return self.tensors.padded_bytes

    @property
    def uneven_bytes(self) -> int:
        """Bytes of those of the gathered parameters that have padding."""
        return self.tensors.uneven_bytes

    @property
    def flat_bytes(self) -> int:
        """Bytes of the buffer into which the unit is gathered; a rank alone copies its parameters without one."""
        return self.padded_bytes if self.ranks > 1 else 0

    @property
    def shard_bytes(self) -> int:
        """Bytes of the parameters, or of their gradients, that one rank keeps."""
        return self.tensors.shard_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's part of what travels."""
        return self.padded_bytes // self.ranks

    @property
    def casts(self) -> bool:
        """Whether what travels is of another precision than what is kept."""
        return self.tensors.value_bytes != self.tensors.master_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients."""
        return self.tensors.gradient_bytes

    def own_elements(self, position: int) -> tuple[int, ...]:
        """Return elements of each parameter on the group's rank at `position`, padding left out."""
        return self.tensors.own_elements(position)

    @property
    def is_root(self) -> bool:
        """Whether this is what no block holds."""
        return not self.layers[0].layer.block


def units(low: Lowering) -> tuple[Unit, ...]:
    """Return FSDP2's units in the order in which they are gathered: the root first, then each block."""
    ranks, sizes = low.shards, (low.value_bytes, low.master_bytes)
    root = tuple(instance for instance in low.layers if not instance.layer.block)
    whole = tuple(parameter for instance in root for parameter in instance.layer.parameters)
    found = [Unit("root", root, Tensors(whole, ranks, *sizes))] if whole else []
    repeated: dict[int, Tensors] = {}
    for instance in low.layers:
        layer = instance.layer
        if layer.block and layer.parameters:
            if id(layer) not in repeated:
                repeated[id(layer)] = Tensors(layer.parameters, ranks, *sizes)
            found.append(Unit(instance.module, (instance,), repeated[id(layer)]))
    return tuple(found)


def owned_rows(low: Lowering, rank: int) -> list[int]:
    """Return the elements that `rank` keeps of each parameter, in the model's order, which is the optimizer's."""
    position = low.shard_position(rank)
    key = ("owned rows", position)
    if key not in low.found:
        own: dict[int, int] = {}
        for unit in units(low):
            own |= zip(map(id, unit.parameters), unit.own_elements(position), strict=True)
        low.found[key] = [own[id(parameter)] for _, parameter in low.parameters]
    found: list[int] = low.found[key]
    return found
