"""Traces a deep model with a few of its blocks, and repeats those in the middle.

Tracing takes longer the more blocks a model has, but equal blocks cost the same at any depth. Only the first and the
last may differ, because they are adjacent to other layers. So a sibling with a few blocks is traced, created by the
model's own factory or config. The layers in its middle are verified to be equal, and are then repeated.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from gsreal.model_files.fake_module import fake_module, without_values
from gsreal.model_files.fit import merge_key
from gsreal.model_files.layers import layer_modules
from gssim.errors import UserError
from gssim.workload import Buffer, Layer, Model, Module, Moment, Parameter, PartialBackward, Reduction, SplitBackward

KEPT = 5
"""Blocks of the sibling: the first, the last, and three between them, of which one has equal ones on both sides."""

T = TypeVar("T")


@dataclass(frozen=True)
class Stack:
    """The blocks of a model: the path of their container, and their number."""

    path: str
    count: int


def with_fewer_blocks(model: Model, where: str) -> tuple[Model, Stack] | None:
    """Return the model with `KEPT` of its blocks, and its full stack; None if no such sibling can be made.

    It can be made if one argument of the factory, or one key of the config, is the number of blocks.
    """
    with without_values(model):
        whole = fake_module(model, where)
        stack = _stack(whole)
        if stack is None or stack.count <= KEPT:
            return None
        blocks = [whole.get_submodule(f"{stack.path}.{i}") for i in range(stack.count)]
        if not all(_is_configured_like(block, blocks[0], i) for i, block in enumerate(blocks)):
            return None
        for module in _siblings(model.module, stack.count):
            short = replace(model, module=module)
            try:
                built = fake_module(short, where)
            except UserError:  # the number has another meaning
                continue
            if _stack(built) == Stack(stack.path, KEPT) and _is_sibling(built, whole, stack):
                return short, stack
    return None


def _stack(module: nn.Module) -> Stack | None:
    """Return the module's longest stack of blocks."""
    counts: dict[str, int] = defaultdict(int)
    for path, is_block in layer_modules(module).items():
        counts[path.rpartition(".")[0]] += is_block
    largest = max(counts, key=lambda path: counts[path], default="")
    return Stack(largest, counts[largest]) if counts.get(largest) else None


def _siblings(module: Module, count: int) -> Iterator[Module]:
    """Yield the module with one of its settings, which equals the number of blocks, reduced to `KEPT`."""
    source = module.hugging_face
    settings = module.arguments if source is None else source.config
    keys = [key for key, value in settings.items() if value == count and isinstance(value, int)]
    if source is None:
        yield from (replace(module, arguments={**settings, key: KEPT}) for key in keys)
        return
    for key in [*keys, "num_hidden_layers"]:  # every config has it, under this name or as an alias
        yield replace(module, hugging_face=replace(source, config={**settings, key: KEPT}))


def _is_configured_like(block: nn.Module, first: nn.Module, number: int) -> bool:
    """Return whether a block is configured like the stack's first, except for its own number."""
    modules, others = dict(block.named_modules()), dict(first.named_modules())
    if modules.keys() != others.keys() or _shapes(block) != _shapes(first):
        return False
    for name, module in modules.items():
        own, firsts = plain_settings(module), plain_settings(others[name])
        if type(module) is not type(others[name]) or own.keys() != firsts.keys():
            return False
        if not all(value == firsts[key] or (value == number and firsts[key] == 0) for key, value in own.items()):
            return False
    return True


def _shapes(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors}


def plain_settings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the module's own code may read.

    A container's keys and tensors are compared separately.
    """
    plain = (bool, int, float, str, tuple, type(None))
    return {key: value for key, value in vars(module).items() if key[0] != "_" and isinstance(value, plain)}


def _is_sibling(made: nn.Module, whole: nn.Module, stack: Stack) -> bool:
    """Return whether everything but the number of blocks is the same."""
    inside = f"{stack.path}."
    rest, other = ({k: v for k, v in _shapes(m).items() if not k.startswith(inside)} for m in (made, whole))
    block = whole.get_submodule(f"{stack.path}.0")
    return rest == other and all(
        _is_configured_like(made.get_submodule(f"{stack.path}.{i}"), block, i) for i in range(KEPT)
    )


def repeat_blocks(layers: Sequence[Layer], stack: Stack, *, neighbours_differ: bool = False) -> list[Layer] | None:
    """Return the layers (one for each module) of the whole model, from those of its sibling with `KEPT` blocks.

    None if the sibling's middle blocks differ, or use tensors of distant layers: then the whole model must be traced.
    `neighbours_differ`: the block next to the first or the last one may differ from the other middle blocks because of
    what that end block does; the last block gathers divided sequences, for example. Set it only for blocks that are
    known to be alike otherwise.
    """
    paths = [f"{stack.path}.{i}" for i in range(KEPT)]
    places = [i for i, layer in enumerate(layers) if layer.modules and layer.modules[0] in paths]
    if not layers:
        return []
    if [layers[i].modules[0] for i in places] != paths or places[-1] - places[0] != KEPT - 1:
        return None
    first, last = places[0], places[-1]
    middle = layers[first + 1 : last]
    keys = [merge_key(layer) for layer in middle]
    if keys[1] not in (keys[0], keys[2]) or (not neighbours_differ and keys[0] != keys[2]):
        return None
    gap = _Gap(after=first + KEPT // 2, before_last=last, more=stack.count - KEPT)
    try:
        ends = {i: _shift_moments(layer, i, gap) for i, layer in enumerate(layers) if not first < i < last}
        beside = [_shift_moments(layer, None, gap) for layer in middle]
    except _OutOfReachError:
        return None
    run = [beside[0], *[beside[1]] * (stack.count - 4), beside[2]]
    blocks = [ends[first], *run, ends[last]]
    for number, layer in enumerate(blocks):
        path = f"{stack.path}.{number}"
        blocks[number] = replace(layer, name=path, modules=(path,))
    return [
        *(ends[i] for i in range(first)),
        *blocks,
        *(ends[i] for i in range(last + 1, len(layers))),
    ]


class _OutOfReachError(Exception):
    """A moment in a middle block that is not adjacent to the layer that refers to it."""


@dataclass(frozen=True)
class _Gap:
    """Insertion point of the repeated layers: after the layer `after`; the stack ends with `before_last`."""

    after: int
    before_last: int
    more: int

    def offset(self, layer: int | None, offset: int) -> int:
        """Return an offset from `layer` in the whole model; `layer` None: a middle layer, at any depth."""
        if abs(offset) <= 1:
            return offset
        first = self.after - KEPT // 2
        if layer is None or first < layer + offset < self.before_last:
            raise _OutOfReachError
        crossed = (layer <= self.after) != (layer + offset <= self.after)
        return offset + (self.more if offset > 0 else -self.more) * crossed


def _shift_moments(value: T, layer: int | None, gap: _Gap) -> T:
    """Return a layer (or part of one) with its moments at their positions in the whole model."""
    if isinstance(value, Moment):
        return replace(value, layer_offset=gap.offset(layer, value.layer_offset))
    if isinstance(value, tuple):
        return tuple(_shift_moments(each, layer, gap) for each in value)  # type: ignore[return-value]
    if isinstance(value, (Layer, PartialBackward, SplitBackward, Parameter, Buffer, Reduction)):
        return replace(value, **{key: _shift_moments(each, layer, gap) for key, each in _fields(value).items()})
    return value


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields that may contain moments."""
    kinds = (Moment, tuple, PartialBackward, SplitBackward)
    return {key: each for key in value.__dataclass_fields__ if isinstance(each := getattr(value, key), kinds)}
