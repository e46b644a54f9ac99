"""Modules cut into pipeline stages: by their own method, as a chain of children, or a Hugging Face model by its layers.

[Note: stages of Hugging Face models] A stage runs the model's own forward, in which the layers of other stages return
what they are given. A stage after the first takes its input where its first layer would have received it. Up to there
the forward runs on a placeholder tensor of that shape, which takes no memory (for token models, `inputs_embeds`, from
which masks and rotary angles follow as from the real one). A stage before the last ends where the first layer of the
next stage would begin, and passes on that layer's input. What the forward does between two layers thus belongs to the
stage of the earlier layer, as in a trace. Parameters keep their names.
"""

import copy
import inspect
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.model_files.build import build_module, example_batch, first_line, logits_of
from gsreal.model_files.layers import layer_modules
from gssim.errors import UserError
from gssim.scenario import Scenario, of_no_sample
from gssim.workload import LayerInstance, Model, TokenInput, unrolled


def check_stages(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if the plan is a pipeline, but the real module cannot be split into stages."""
    pp, model = scenario.policies.pp, scenario.workload.model
    if pp == 1:
        return
    with torch.device("meta"):
        module = build_module(model.module, where=where)
    reason = unstaged_reason(model, module)
    if reason is not None:
        raise UserError(f"{where}: plan.pp = {pp}: {reason}")
    if model.module.hugging_face is None:
        return
    # without values a model of tokens may fail where it reads some: of its faults, only those of kinds say something
    length = scenario.workload.sequence_length if isinstance(model.input, TokenInput) else None
    # layers may return more than one tensor: Swin's embeddings return the height and width too, RWKV's blocks states
    with torch.device("meta"), torch.no_grad():
        # batch norms need more than one sample, and a batch of two or three would be taken for so many values
        passed, _ = example_batch(model, batch_size=5, sequence_length=length)
        for number, layers in enumerate(scenario.stages):
            try:
                passed = stage_module(module, layers, shared=True, model=model)(passed)
            except Exception as error:  # raised by the model's own forward
                if length is not None and not isinstance(error, AttributeError | TypeError | ValueError):
                    return
                raise UserError(
                    f"{where}: plan.pp = {pp}: {type(module).__name__} cannot be cut into stages: "
                    f"stage {number} does not run on the one tensor that it is passed ({first_line(error)}); "
                    "allowed: models whose layers return one tensor, such as hf:vit or hf:gpt2"
                ) from error


def unstaged_reason(model: Model, module: nn.Module) -> str | None:
    """Return why a model's real module cannot be cut into pipeline stages, with its class; None if nothing is known."""
    kind = type(module).__name__
    if model.module.hugging_face is None:
        sequences = {path for path, inner in module.named_modules() if isinstance(inner, nn.Sequential)}
        is_chain = "" in sequences and all(path.rpartition(".")[0] in sequences for path in layer_modules(module))
        if is_chain or callable(getattr(module, "keep_layers", None)):
            return None
        return (
            f"{kind} cannot be cut into stages; allowed: Hugging Face models, modules with a method keep_layers, such "
            "as those of gsreal.models, and nn.Sequential whose layers are children of it or of an nn.Sequential in it"
        )
    if isinstance(model.input, TokenInput) and "inputs_embeds" not in inspect.signature(module.forward).parameters:
        return (
            f"{kind} takes no inputs_embeds, on which stages but the first run; allowed: models whose forward has this "
            "parameter"
        )
    if model.module.hugging_face.auto_class.endswith("ForSequenceClassification"):
        return (
            f"{kind} needs the tokens in its last layers too, which the first stage alone has; allowed: models of "
            "tokens or images without padding"
        )
    return None


def stage_module(
    module: nn.Module,
    layers: Sequence[LayerInstance],
    *,
    shared: bool,
    model: Model | None = None,
    sequence_parts: int = 1,
) -> nn.Module:
    """Return the module with these layers only; `shared`: copy it first, as other stages need `module` unchanged.

    `model`: the model file, needed for Hugging Face models and chains. `sequence_parts`: number of equal parts into
    which sequences are divided; the stage is given one.
    """
    part = copy.deepcopy(module) if shared else module
    names = {instance.module for instance in layers if instance.layer.modules}
    if model is not None and model.module.hugging_face is not None:
        _keep_hugging_face_layers(part, layers, model, sequence_parts)
    elif isinstance(part, nn.Sequential) and not hasattr(part, "keep_layers"):
        others = {each.module for each in unrolled(model)} - names if model is not None else set()
        held = {each for instance in layers for each in instance.held_names}
        _keep_children(part, "", names, others, held, is_kept=False)
    else:
        part.keep_layers(names)  # type: ignore[operator]
    return part


def _keep_children(
    chain: nn.Sequential, prefix: str, names: Set[str], others: Set[str], held: Set[str], *, is_kept: bool
) -> bool:
    """Replace the children of other stages by identities; return whether the last child was kept.

    `names`, `others`: layers of this stage and of the others. A child that is no layer, as it runs no operation,
    belongs to the layer before it (before the first: `is_kept`). After a child without operations, such as a flattening
    of the inputs, a layer may bear that child's name: its parameters are among those `held`.
    """
    for name, child in list(chain.named_children()):
        path = prefix + name
        if isinstance(child, nn.Sequential) and any(each.startswith(f"{path}.") for each in names):
            is_kept = _keep_children(child, f"{path}.", names, others, held, is_kept=is_kept)
            continue
        parameters = [f"{path}.{each}" for each, _ in child.named_parameters()]
        if parameters or path in names or path in others:
            is_kept = path in names or not held.isdisjoint(parameters)
        if not is_kept:
            setattr(chain, name, nn.Identity())
    return is_kept


def tied_names(module: nn.Module) -> dict[str, frozenset[str]]:
    """Return all names of every tied parameter, by each of its names."""
    by_parameter: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(parameter, set()).add(name)
    return {name: frozenset(names) for names in by_parameter.values() if len(names) > 1 for name in names}


# Hugging Face models --------------------------------------------------------------------------------------------------


class _OtherLayer(nn.Module):
    """Stands for a layer of another stage; it has that layer's plain attributes, which a forward may read.

    It also has that layer's modules, without memory: a vision transformer reads the type of its patch embeddings'
    weight.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        plain.pop("forward", None)  # a compiled block has its forward as an attribute
        self.__dict__ |= plain
        self.__dict__ |= {name: child.to("meta") for name, child in layer.named_children()}


class _PassOn(_OtherLayer):
    """Returns the tensor that it is given."""

    def forward(self, *tensors: Any, **named: Any) -> Any:
        """Return the first tensor, or the embeddings that are passed by name."""
        embedded = named.get("inputs_embeds")
        return tensors[0] if embedded is None else embedded


class _Nothing(Tensor):
    """A tensor without effect: added to another, it returns the other, without a copy."""

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), _named: Any = None) -> Any:
        """Return the other tensor, or itself where there is none (a copy to another device)."""
        return next((each for each in args if isinstance(each, Tensor) and not isinstance(each, _Nothing)), args[0])


class _NoEmbedding(_OtherLayer):
    """Stands for an embedding of another stage."""

    def forward(self, _ids: Tensor, *_others: Any, **_named: Any) -> Tensor:
        """Return a tensor that changes nothing it is added to."""
        return torch.zeros(()).as_subclass(_Nothing)


class _EndError(Exception):
    """Ends a forward at the end of a stage."""


class _End(_OtherLayer):
    """Stands for the first layer of the next stage: keeps what it is given, and ends the forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.given: list[Any] = []

    def forward(self, *tensors: Any, **named: Any) -> Any:
        """Keep the first tensor."""
        self.given.append(tensors[0] if tensors else named["hidden_states"])
        raise _EndError


def _keep_hugging_face_layers(
    module: nn.Module, layers: Sequence[LayerInstance], model: Model, sequence_parts: int
) -> None:
    """Take all layers of other stages out of a module; see [Note: stages of Hugging Face models]."""
    chain = [instance for instance in unrolled(model) if instance.layer.modules]
    own = [instance for instance in layers if instance.layer.modules]
    last = own[-1].index
    first = next(each.index for each in own if not of_no_sample(each.layer))
    aliases = tied_names(module)
    parameters = {name for each in own for listed in each.held_names for name in aliases.get(listed, {listed})}
    end = _End(module.get_submodule(chain[last + 1].module)) if last < chain[-1].index else None
    names = {instance.module for instance in own}
    for instance in chain:
        if instance.module not in names:
            goes_on = end is None or instance.index != last + 1
            _replace(module, instance.module, _PassOn(module.get_submodule(instance.module)) if goes_on else end)
    for path, inner in list(module.named_modules()):
        held = [f"{path}.{name}" for name, _ in inner.named_parameters(recurse=False)]
        if held and not parameters.intersection(held):  # it is listed with another module's layer (position embeddings)
            _replace(module, path, _NoEmbedding(inner) if isinstance(inner, nn.Embedding) else _PassOn(inner))
    received: list[Tensor] = []
    if first > 0:

        def take_input(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return ((received.pop(), *args[1:]), named) if args else (args, named | {"hidden_states": received.pop()})

        module.get_submodule(chain[first].module).register_forward_pre_hook(take_input, with_kwargs=True)
    tokens = isinstance(model.input, TokenInput)
    parts = sequence_parts if tokens else 0
    run = partial(_run_stage, module.forward, received if first > 0 else None, end, parts)
    run.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]  # it takes the same arguments
    module.forward = run


def _run_stage(
    whole: Callable[..., Any],
    received: list[Tensor] | None,
    end: _End | None,
    sequence_parts: int,
    x: Tensor,
    **settings: Any,
) -> Tensor:
    """Return the output of a stage for its input; `whole`: the forward of the model without other stages' layers.

    `sequence_parts`: number of equal parts of a token sequence, of which `x` is one; 0: `x` is of images. `settings`:
    further arguments of the model's forward.
    """
    output = None
    try:
        if received is None:
            output = whole(x, **settings)
        else:
            received.append(x)
            # a placeholder for the layers of other stages takes no memory; a vision transformer indexes its positions
            if sequence_parts:  # masks and rotary angles cover whole sequences
                shape = (x.shape[0], x.shape[1] * sequence_parts, *x.shape[2:])
                output = whole(inputs_embeds=x.new_zeros(()).expand(shape), **settings)
            else:
                output = whole(x.new_zeros(()).expand(*x.shape, *[1] * (4 - x.dim())))
    except _EndError:
        assert end is not None
    # a part of a tensor (the class token) is sent as a copy
    return logits_of(output) if end is None else end.given.pop().contiguous()


def _replace(module: nn.Module, path: str, by: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent)._modules[name] = by
