"""Modules at which the layers of any `nn.Module` begin."""

from torch import nn

CONTAINERS = (nn.ModuleList, nn.Sequential)


def layer_modules(model: nn.Module) -> dict[str, bool]:
    """Map the dotted path of each module at which a layer begins to whether it is a block of a repeated stack.

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
            _collect_elements(child, path, found)
        elif _holds_stack(child):
            _collect(child, path + ".", found)
        else:
            found[path] = False


def _collect_elements(container: nn.Module, path: str, found: dict[str, bool]) -> None:
    is_stack = _is_stack(container)
    for number, element in container.named_children():
        inner = f"{path}.{number}"
        if is_stack and isinstance(element, nn.ModuleList):  # it has no forward: its elements are the blocks
            found.update((f"{inner}.{name}", True) for name, _ in element.named_children())
        elif _wrapped_stack(element) if is_stack else _holds_stack(element):
            _collect(element, f"{inner}.", found)
        else:
            found[inner] = is_stack


def _is_stack(container: nn.Module) -> bool:
    kinds = {type(child) for child in container.children()}
    return len(list(container.children())) >= 2 and len(kinds) == 1 and any(True for _ in container.parameters())


def _holds_stack(module: nn.Module) -> bool:
    return any(isinstance(inner, CONTAINERS) and _is_stack(inner) for inner in module.modules())


def _wrapped_stack(module: nn.Module) -> bool:
    """Return whether a module only wraps a stack (a stage of a ResNet).

    One that also adds, activates or normalises (a block whose convolutions are a stack) is a layer itself.
    """
    skipped = (nn.Identity, *CONTAINERS)  # if empty, they are placeholders for a layer
    children = [child for child in module.children() if not isinstance(child, skipped) or any(child.children())]
    return len(children) == 1 and isinstance(children[0], CONTAINERS) and _is_stack(children[0])
