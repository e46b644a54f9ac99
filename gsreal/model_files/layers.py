"""Boundaries of the layers of any `nn.Module`, in the forward and in the backward.

A layer begins where a chosen module is entered, and ends where the next one is. Its backward begins when the gradient
of its output is complete, which is that of the next layer's input.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

CONTAINERS = (nn.ModuleList, nn.Sequential)
LOSS = "loss"
"""Name of the last layer, which runs outside any module."""


def layer_modules(model: nn.Module) -> dict[str, bool]:
    """Return the dotted paths of the modules at which layers begin -> whether it is a block of a repeated stack.

    Repeated stacks (a ModuleList or Sequential of one class) are opened at any depth; a module without one is a single
    layer.
    """
    is_block: dict[str, bool] = {}
    _collect(model, "", is_block)
    return is_block


def _collect(module: nn.Module, prefix: str, found: dict[str, bool]) -> None:
    for name, child in module.named_children():
        path = prefix + name
        if isinstance(child, CONTAINERS):
            for number, element in child.named_children():
                opened = _wrapped_stack(element) if _is_stack(child) else _holds_stack(element)
                if opened:
                    _collect(element, f"{path}.{number}.", found)
                else:
                    found[f"{path}.{number}"] = _is_stack(child)
        elif _holds_stack(child):
            _collect(child, path + ".", found)
        else:
            found[path] = False


def _is_stack(container: nn.Module) -> bool:
    kinds = {type(child) for child in container.children()}
    return len(list(container.children())) >= 2 and len(kinds) == 1 and any(True for _ in container.parameters())


def _holds_stack(module: nn.Module) -> bool:
    return any(isinstance(inner, CONTAINERS) and _is_stack(inner) for inner in module.modules())


def _wrapped_stack(module: nn.Module) -> bool:
    """Return whether a module only wraps a stack (a stage of a ResNet).

    One that also adds, activates or normalises (a block whose convolutions are a stack) is a layer itself.
    """
    children = [child for child in module.children() if not _is_identity(child)]
    return len(children) == 1 and isinstance(children[0], CONTAINERS) and _is_stack(children[0])


def _is_identity(module: nn.Module) -> bool:
    """Return whether a module is an identity that stands in place of another layer."""
    return isinstance(module, (nn.Identity, *CONTAINERS)) and not any(True for _ in module.modules() if _ is not module)


@contextmanager
def layer_boundaries(
    model: nn.Module, modules: list[str], *, enter: Callable[[int, str], None]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Call `enter(layer, "f")` and `enter(layer, "b")` where layers begin, for the duration of the context.

    Layer i begins at `modules[i]`; the last layer (index `len(modules)`) is the loss. Yields a function that marks the
    model's output as the loss's input: call the loss on its result.
    """
    handles: list[Any] = []
    inner = dict(model.named_modules())

    def mark(layer: int, tensors: list[Any]) -> None:
        enter(layer, "f")
        carrying = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        if layer > 0 and carrying and torch.is_grad_enabled():
            carrying[0].register_hook(lambda _gradient: enter(layer - 1, "b"))

    def before(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            mark(layer, tree_leaves((args, kwargs)))

        return hook

    def before_loss(output: Tensor) -> Tensor:
        mark(len(modules), [output])
        return output

    try:
        for layer, name in enumerate(modules):
            handles.append(inner[name].register_forward_pre_hook(before(layer), with_kwargs=True))
        yield before_loss
    finally:
        for handle in handles:
            handle.remove()
