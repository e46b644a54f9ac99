"""What the operations of one training step do, seen under fake tensors."""

import weakref
from collections import defaultdict
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsreal.recompute import COMPUTE_HEAVY
from gsreal.trace.flop import flop_of


@dataclass
class Alive:
    """One storage that an operation created, with the absolute moments (layer, phase, position) of its life."""

    size_bytes: int
    born: tuple[int, str, int]
    freed: tuple[int, str, int] | None = None
    unsaved: int | None = None
    """Position of its own layer's forward at which it would go if autograd did not save it."""


@dataclass(frozen=True)
class Work:
    """What operations do."""

    flop: int = 0
    bytes_moved: int = 0
    operations: int = 0
    streamed: int = 0
    """Of `bytes_moved`, those of operations without FLOP (all but matrix products, convolutions and attention) that
    move something: `_unsafe_view`, which torch does not call a view, is one."""

    def __add__(self, other: "Work") -> "Work":
        """Return what both do."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Work(*(one + another for one, another in pairs))

    def times(self, count: int) -> "Work":
        """Return what so many of them do."""
        return Work(*(count * one for one in astuple(self)))


@dataclass(frozen=True)
class Again:
    """What checkpointing runs again of a module's forward."""

    work: Work = Work()
    light: Work = Work()
    """Of that, what is not compute-heavy."""


@dataclass
class Record:
    """What one traced step showed, per layer index."""

    modules: list[str]
    blocks: set[str]
    flop: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes_moved: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    streamed: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    """Of `bytes_moved`, those of operations without FLOP that move something."""
    operations: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    saved: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    output: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    until_saved: dict[int, Again] = field(default_factory=dict)
    """What a module's forward does until autograd has saved the last of its tensors: checkpointing repeats that."""
    counted: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    """Positions at which operations (not views) run, by layer and phase."""
    names: dict[tuple[int, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    """Their names."""
    by_operation: dict[int, dict[str, Work]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Work)))
    """By layer: name of an operation -> its work, forward and backward."""
    heavy: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Those of compute-heavy operations."""
    overwritten: set[int] = field(default_factory=set)
    """Layers that change the output of a compute-heavy operation in place, so that it cannot be kept."""
    alive: list[Alive] = field(default_factory=list)
    parameters: dict[str, tuple[int, tuple[int, ...], tuple[int, str, int], tuple[int, str, int]]] = field(
        default_factory=dict
    )
    """Name -> (layer of first use, shape, gradient born, gradient ready)."""
    units: dict[int, int] = field(default_factory=dict)
    """Of blocks that are cut: into how many units they can be."""
    linear: dict[int, bool] = field(default_factory=dict)
    """Of blocks that are cut: whether all that is cut are linear maps."""
    reductions: dict[int, list[tuple[tuple[int, str, int], int]]] = field(default_factory=lambda: defaultdict(list))
    """Of blocks that are cut: moment and bytes of every sum over the ranks."""


class Recorder(TorchDispatchMode):
    """Sees every operation of a step and books it on the layer that runs."""

    def __init__(self, record: Record, known: set[int]) -> None:
        super().__init__()
        self.record, self.known = record, known
        self.layer, self.phase = 0, "f"
        self.position: dict[tuple[int, str], int] = defaultdict(lambda: -1)
        self.live: dict[int, Alive] = {}
        self.first_use: dict[int, int] = {}
        self.light: dict[tuple[int, str], Work] = defaultdict(Work)

    def enter(self, layer: int, phase: str) -> None:
        """Book what comes to a phase of a layer."""
        self.layer, self.phase = layer, phase

    def work(self) -> Work:
        """Return what the present phase of the present layer has done so far."""
        place, record = (self.layer, self.phase), self.record
        return Work(record.flop[place], record.bytes_moved[place], record.operations[place], record.streamed[place])

    def again(self) -> Again:
        """Return what is run again where the present layer's forward need not go on."""
        return Again(self.work(), self.light[self.layer, self.phase])

    def now(self) -> tuple[int, str, int]:
        """Return the moment: layer, phase, position."""
        place = (self.layer, self.phase)
        return (*place, max(0, self.position[place]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = (self.layer, self.phase)
        self.position[place] += 1
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in inputs:
            key = tensor.untyped_storage()._cdata
            if key in self.known:
                self.first_use.setdefault(key, self.layer)
        self._written(func, args)
        result = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not func.is_view and (outputs or func._schema.is_mutable):
            self._count(func, args, kwargs, result, inputs, outputs, place)
        for tensor in outputs:
            self._born(tensor)
        return result

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
        place: tuple[int, str],
    ) -> None:
        flop = flop_of(func, args, kwargs, result, [*inputs, *outputs])
        moved = sum({id(t): t.numel() * t.element_size() for t in [*inputs, *outputs]}.values())
        work = Work(flop, moved, 1, 0 if flop or _is_alias(func, inputs, outputs) else moved)
        self.record.flop[place] += work.flop
        self.record.bytes_moved[place] += work.bytes_moved
        self.record.streamed[place] += work.streamed
        self.record.operations[place] += 1
        self.record.by_operation[place[0]][str(func._overloadpacket)] += work
        heavy = func in COMPUTE_HEAVY
        if not heavy:
            self.light[place] += work if flop else replace(work, bytes_moved=work.streamed)
        self.record.counted[place].append(self.position[place])
        self.record.names[place].append(str(func))
        if heavy and place[1] == "f":
            self.record.heavy[place[0]].append(self.position[place])

    def _written(self, func: Any, args: Any) -> None:
        """Note the layer whose compute-heavy operation made what is now changed in place."""
        if self.phase != "f" or not func._schema.is_mutable:
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, Tensor):
                alive = self.live.get(value.untyped_storage()._cdata)
                if alive is not None and alive.born[2] in self.record.heavy[alive.born[0]]:
                    self.record.overwritten.add(alive.born[0])

    def reduce(self, tensor: Tensor) -> Tensor:
        """Stand in for a sum over ranks: what torch's functional all-reduce does on its own rank, which is a copy."""
        copy = tensor.clone(memory_format=torch.contiguous_format)
        self.record.reductions[self.layer].append((self.now(), copy.numel() * copy.element_size()))
        return copy

    def _born(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or key in self.known:
            return
        alive = Alive(storage.nbytes(), self.now())
        self.live[key] = alive
        self.record.alive.append(alive)
        weakref.finalize(storage, self._freed, key, alive)

    def _freed(self, key: int, alive: Alive) -> None:
        alive.freed = self.now()
        if self.live.get(key) is alive:
            del self.live[key]


def _is_alias(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return whether an operation writes nothing, and hands on what it reads."""
    if func._schema.is_mutable:
        return False
    there = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in there for tensor in outputs)
