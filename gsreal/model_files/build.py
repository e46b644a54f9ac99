"""Builds the real module of a model file, its inputs and its loss, and refuses untrusted factories.

Scenario, sweep and model files are data, but a model file names the factory of its module, and `gsreal` calls it.
Factories of `gsreal.models` and modules of `transformers.models` are trusted: with plain data they only create a
module. Any other code runs only if the command line allows it (--trust-code), or names it itself.

Hugging Face models are built from plain configs: no weights or code are loaded, and no network is used.

transformers reads tensor values in two places. It looks at the position ids to detect several sequences packed into one
sample. Fake tensors have no values. transformers would then assume packed sequences and create a mask for them, which a
real run of whole sequences does not do; `sequences_not_packed` prevents that. It also looks for padding
tokens; see `_mask_padding`.
"""

import importlib
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsreal.methods.adapters import adapt
from gssim.errors import UserError
from gssim.workload import HuggingFace, ImageInput, Model, Module, TokenInput

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


def first_line(error: Exception) -> str:
    """Return an error's message, in one line of bounded length: its first line, and what that announces by a colon."""
    message = str(error).strip() or type(error).__name__
    lines = [line.strip() for line in message.splitlines()]
    announcing = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return textwrap.shorten(" ".join(lines[: announcing + 1]), width=300, placeholder=" ...")


def training_config(source: HuggingFace, where: str) -> Any:
    """Return the transformers config of a model for training; raise UserError for one that cannot be trained.

    Training needs no key-value cache: with one, checkpointed blocks would keep tensors that they should free, and would
    find their own entries in it when recomputed.
    """
    transformers = _transformers(where)
    place = f"{where}: module.hugging_face"
    for key, reason in _refusals(source.settings):
        raise UserError(f"{place}.config.{key}: {reason}")
    try:
        config = transformers.AutoConfig.for_model(source.model_type, **source.settings)
    except Exception as error:
        raise UserError(f"{place}: {first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{place}.model_type = '{source.model_type}': an encoder-decoder takes two sequences; only models of one "
            "input are trained and traced"
        )
    for inner in _with_inner_configs(config):
        inner.dtype = None  # the run's precision decides
        if hasattr(inner, "use_cache"):
            inner.use_cache = False
    return config


def auto_class(source: HuggingFace, where: str) -> Any:
    """Return the class of transformers that creates a model of a config."""
    transformers = _transformers(where)
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    kind = getattr(transformers, source.auto_class, None)
    if not (isinstance(kind, type) and issubclass(kind, _BaseAutoModelClass)):
        raise UserError(
            f"{where}: module.hugging_face.auto_class = '{source.auto_class}': is no AutoModel class of transformers, "
            "such as AutoModelForCausalLM"
        )
    return kind


def _transformers(where: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError(f"{where}: a Hugging Face model needs transformers: pip install 'gssim[models]'") from None
    return transformers


def _refusals(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of a config and its nested ones that would load code or weights, or cannot be trained."""
    for key, value in config.items():
        if key in ("auto_map", "trust_remote_code"):
            yield prefix + key, "names code outside of transformers, which is not run; use a factory of your own"
        elif key.lstrip("_").endswith(IMPLEMENTATIONS) and "/" in repr(value):
            yield prefix + key, f"{value!r}: kernels are not loaded from a hub; name one that transformers has"
        elif key == "use_pretrained_backbone" and value:
            yield prefix + key, "no weights are loaded; leave it out"
        elif key == "backbone" and isinstance(value, str):
            yield prefix + key, "nothing is loaded from a hub; give a backbone_config"
        elif key == "use_cache" and value:
            yield prefix + key, "training keeps no keys and values of earlier tokens; leave it out"
        elif isinstance(value, dict):
            yield from _refusals(value, f"{prefix}{key}.")


def _with_inner_configs(config: Any) -> Iterator[Any]:
    """Yield a config and its nested ones (a text model, a vision model)."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _with_inner_configs(inner)


PACKED = "find_packed_sequence_indices"


@contextmanager
def sequences_not_packed() -> Iterator[None]:
    """Make transformers treat every sample as one sequence, by the same operations as in a real run."""
    try:
        from transformers import masking_utils
    except ImportError:  # not installed: there is no such model
        yield
        return
    original = getattr(masking_utils, PACKED, None)
    if original is None:  # an older version, which does not look for packed sequences
        yield
        return

    def find_none(position_ids: Tensor, *_args: Any, **_settings: Any) -> None:
        indices = original(position_ids)
        if indices is not None:
            (indices[:, -1] == 0).all()  # the operation whose value transformers would read

    with mock.patch.object(masking_utils, PACKED, find_none):
        yield


VARIABLE = "GSREAL_TRUST_CODE"
"""Environment variable that tells ranks whether --trust-code was given; every command sets or removes it."""
OURS = "gsreal.models"
TRANSFORMERS = "transformers.models"


def set_trust(trusted: bool) -> None:
    """Allow or forbid code named by files to run in this process and in those that it starts."""
    if trusted:
        os.environ[VARIABLE] = "1"
    else:
        os.environ.pop(VARIABLE, None)


def check_factory(module: Module, *, where: str) -> None:
    """Raise UserError if a model file names code that is not trusted; nothing is imported for the check."""
    if module.factory is None or os.environ.get(VARIABLE) == "1":
        return
    inside, _, name = _parts(module.factory)
    ours = inside == OURS and not name.startswith("_")
    if not (ours or f"{inside}.".startswith(f"{TRANSFORMERS}.")):
        raise _refusal(module.factory, where)


def import_factory(module: Module, *, where: str) -> Any:
    """Return a module's factory, if it may run here; raise UserError otherwise."""
    check_factory(module, where=where)
    assert module.factory is not None
    inside, _, name = _parts(module.factory)
    if not inside or "/" in module.factory or name == "py":
        raise UserError(
            f"{where}: module.factory = '{module.factory}': must be the dotted path of a factory, as of mymodule.py: "
            "mymodule.MyModel"
        )
    try:
        factory = getattr(importlib.import_module(inside), name)
    except Exception as error:  # importing runs the user's code
        from gsreal.model_files.build import first_line

        missing = isinstance(error, ModuleNotFoundError) and error.name in (inside, inside.partition(".")[0])
        hint = "; PYTHONPATH names the folders in which your own modules are found" if missing else ""
        raise UserError(
            f"{where}: module.factory = '{module.factory}': cannot be imported: {first_line(error)}{hint}"
        ) from error
    if os.environ.get(VARIABLE) != "1" and not _makes_modules(factory, inside):
        raise _refusal(module.factory, where)
    return factory


def _makes_modules(found: Any, inside: str) -> bool:
    """Return whether `found`, an attribute of a trusted module, is a factory that is defined, not imported there."""
    from torch import nn

    defined = str(getattr(found, "__module__", ""))
    if inside == OURS:
        return callable(found) and defined == OURS
    return isinstance(found, type) and issubclass(found, nn.Module) and f"{defined}.".startswith(f"{TRANSFORMERS}.")


def _parts(path: str) -> tuple[str, str, str]:
    """Return (module, separator, name) of the dotted path `package.module.name` (or `package.module:name`)."""
    return path.replace(":", ".").rpartition(".")


def _refusal(path: str, where: str) -> UserError:
    return UserError(
        f"{where}: module.factory = '{path}': neither a factory of {OURS} nor a module of {TRANSFORMERS}; if you trust "
        "its code, give --trust-code"
    )


DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def autocast(precision: str | None, kind: str = "cpu") -> AbstractContextManager[Any]:
    """Return the context manager for a forward under torch.autocast in `precision`; with None it does nothing."""
    return nullcontext() if precision is None else torch.autocast(kind, DTYPES[precision])


def build_module(module: Module, *, where: str) -> nn.Module:
    """Return the real module with freshly initialised parameters; `where` names the file in error messages.

    Runs the module's factory, which must therefore be trusted, see `set_trust`.
    """
    built = _without_adapters(module, where)
    if module.adapters is not None:
        adapt(built, module.adapters, where=where)
    for name in module.frozen or ():
        built.get_parameter(name).requires_grad_(False)
    return built


def module_on(device: torch.device, precision: str, module: Module, *, where: str) -> nn.Module:
    """Return the real module with freshly initialised parameters on a device, in a precision.

    For a GPU, parameters are initialised on the device, because a CPU core takes a minute for 1.2 billion of them. They
    are then moved to the host's memory and back, so that the initialisation leaves no blocks in the GPU's caching
    allocator.
    """
    if device.type == "cuda":
        with device:
            built = build_module(module, where=where)
        built.to(DTYPES[precision]).to("cpu")
        torch.cuda.empty_cache()
    else:
        built = build_module(module, where=where)
    return built.to(device, DTYPES[precision])


def _without_adapters(module: Module, where: str) -> nn.Module:
    if module.hugging_face is not None:
        return _build_hugging_face(module.hugging_face, where)
    factory = import_factory(module, where=where)
    try:
        built = factory(**module.arguments)
    except Exception as error:
        raise UserError(f"{where}: module.arguments = {module.arguments!r}: {first_line(error)}") from error
    if not isinstance(built, nn.Module):
        raise UserError(f"{where}: module.factory = '{module.factory}': returns {type(built).__name__}, no nn.Module")
    return built


def _build_hugging_face(source: HuggingFace, where: str) -> nn.Module:
    config = training_config(source, where)
    auto = auto_class(source, where)
    if config.architectures is None:  # of a type with several classes for a task, such as DeiT's, this names one
        config.architectures = []
    try:
        built = auto.from_config(config)
    except Exception as error:
        raise UserError(f"{where}: module.hugging_face: {first_line(error)}") from error
    assert isinstance(built, nn.Module)
    if source.auto_class.endswith("ForSequenceClassification") and config.pad_token_id is not None:
        _mask_padding(built, config.pad_token_id)
    return built


def _mask_padding(built: nn.Module, padding: int) -> None:
    """Pass a transformers model the mask of padding tokens, which it does not derive itself, in each of its forwards.

    transformers drops a mask of a batch without padding, which it can tell of real tensors and not of a trace's. It is
    kept, so that a step runs the same operations whatever its tokens are: those that were traced.
    """
    from transformers import masking_utils

    kept: list[ExitStack] = []
    """Of each forward that is running: what ends the replacement of transformers' test."""

    def is_traced(*_given: Any, **_named: Any) -> bool:  # a Mock would keep the arguments of its calls: the masks
        return True

    def with_mask(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stack = ExitStack()
        if hasattr(masking_utils, "is_tracing"):  # since transformers 5
            stack.enter_context(mock.patch.object(masking_utils, "is_tracing", is_traced))
        kept.append(stack)
        if "attention_mask" in kwargs:
            return args, kwargs
        return args, {**kwargs, "attention_mask": args[0] != padding}

    def after(*_given: Any) -> None:
        kept.pop().close()

    built.register_forward_pre_hook(with_mask, with_kwargs=True)
    built.register_forward_hook(after, always_call=True)


def example_batch(model: Model, *, batch_size: int, sequence_length: int | None) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the right shape and type: zeros, for tracing (ones, if zero is padding)."""
    source = model.input
    if isinstance(source, TokenInput):
        shape = (batch_size, sequence_length or 1)
        inputs = torch.full(shape, int(source.padding == 0), dtype=torch.int64)
        return inputs, torch.zeros(shape if source.classes is None else batch_size, dtype=torch.int64)
    assert isinstance(source, ImageInput)
    return torch.zeros((batch_size, *source.shape)), torch.zeros(batch_size, dtype=torch.int64)


def random_batch(
    model: Model, batch_size: int, sequence_length: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets of the right shape and type, for timing."""
    inputs, targets = example_batch(model, batch_size=batch_size, sequence_length=sequence_length)
    if inputs.is_floating_point():
        return torch.rand_like(inputs).to(dtype), targets
    source = model.input
    assert isinstance(source, TokenInput)  # its inputs are whole numbers
    return torch.randint_like(inputs, 1, 200), torch.randint_like(targets, source.classes or 200)


def logits_of(output: Any) -> Tensor:
    """Return the logits in a module's output.

    They are the output itself, what it has under `logits` as an attribute or a key, or the first of a tuple. Raises
    TypeError if none of these is a tensor.
    """
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if logits is None and isinstance(output, Sequence) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"its output is of type {type(output).__name__}, in which logits are not found: return a tensor, a tuple "
            "that begins with it, or an object or dict that has it as 'logits'"
        )
    return logits


def loss_of(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all targets that are not masked out (-100)."""
    logits = logits_of(output)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
