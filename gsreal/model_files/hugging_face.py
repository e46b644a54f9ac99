"""Hugging Face models from plain configs, without weights, code or a network, and their use under fake tensors.

transformers reads tensor values in one place: whether several sequences are packed into one sample, by the position
ids. Fake tensors have no values, and transformers then assumes packed sequences and creates a mask for them, which a
real run of whole sequences does not.
"""

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from gssim.errors import UserError
from gssim.workload import HuggingFace

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


def first_line(error: Exception) -> str:
    """Return an error's message, in one line of bounded length."""
    message = str(error).strip() or type(error).__name__
    return textwrap.shorten(message.splitlines()[0], width=300, placeholder=" ...")


def training_config(source: HuggingFace, where: str) -> Any:
    """Return the transformers config of a model for training; raise UserError for one that cannot be trained.

    Training needs no keys and values of earlier tokens: with a cache, checkpointed blocks would keep tensors that they
    should free, and find their own cache when recomputed.
    """
    transformers = _transformers(where)
    place = f"{where}: module.hugging_face"
    for key, reason in _refused(source.config):
        raise UserError(f"{place}.config.{key}: {reason}")
    try:
        config = transformers.AutoConfig.for_model(source.model_type, **source.config)
    except Exception as error:
        raise UserError(f"{place}: {first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{place}.model_type = '{source.model_type}': an encoder-decoder takes two sequences; only models of one "
            "input are trained and traced"
        )
    for each in _with_inner_configs(config):
        each.dtype = None  # the run's precision decides
        if hasattr(each, "use_cache"):
            each.use_cache = False
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


def _refused(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a config, and of nested ones, that would load code or weights, or cannot be trained."""
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
            yield from _refused(value, f"{prefix}{key}.")


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
    if original is None:  # versions before it looked for no packed sequences
        yield
        return
    with mock.patch.object(masking_utils, PACKED, _finding_none(original)):
        yield


def _finding_none(original: Callable[[Tensor], Tensor | None]) -> Callable[..., None]:
    def find(position_ids: Tensor, *_args: Any, **_settings: Any) -> None:
        indices = original(position_ids)
        if indices is not None:
            (indices[:, -1] == 0).all()  # the value that it would read

    return find
