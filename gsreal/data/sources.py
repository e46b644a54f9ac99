"""Opens the data source that a scenario names, or the bundled default, for training or evaluation.

Every rank creates its own rows of a step's batch from (seed, step), so that ranks need not communicate about data.
Held-out data for evaluation are a source too, with one batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from gsreal.data.bundled import (
    HELD_OUT_DIGITS,
    Digits,
    HeldOutDigits,
    ModuleClassification,
    held_out_part,
    longest_modules,
    standard_library_bytes,
    trained_part,
)
from gsreal.data.source import IGNORED, Source
from gsreal.data.text import Windows
from gssim.errors import UserError
from gssim.workload import Glue, ImageFolder, ImageInput, Model, TextFolder, TokenInput, Workload

if TYPE_CHECKING:
    from gsreal.data.images import Images
    from gsreal.data.text import Sentences


CHECKED_SAMPLES = 256
"""Samples of a run that are read before ranks start; a fault in a later one ends the run, in one line too."""


def open_source(workload: Workload) -> Source:
    """Return the workload's data; raise UserError if they are missing or the model cannot be trained on them.

    Hugging Face's `tokenizers`, Pillow and scikit-learn are imported only if needed.
    """
    named = workload.data if isinstance(workload.data, str) else workload.data.kind
    opening: dict[str, Callable[[Workload], Source]] = {
        "stdlib-bytes": _standard_library,
        "digits": _digits,
        "image-folder": _images,
        "glue": _glue,
        "text-folder": _text,
    }
    return opening[default_data(workload.model) if named == "auto" else named](workload)


HELD_OUT_WINDOWS, MOST_HELD_OUT = 256, 1024
"""Windows of text, and samples of other data, for the evaluation of a model; drawn once."""


def open_held_out(workload: Workload) -> tuple[Source, int]:
    """Return data that no training draws from, and the number of samples of its one batch (of seed 0, step 0).

    Held out are the last tenth of the standard library, three in ten of the digits, GLUE's split `dev` (MNLI's
    `dev_matched`), and the split `val` of a folder of images. Raises UserError if nothing is held out.
    """
    data = workload.data
    if isinstance(data, TextFolder):
        raise UserError("workload.data.kind = 'text-folder': nothing of it is held out to be evaluated on")
    if isinstance(data, Glue):
        _refuse_trained_on(data, split := "dev_matched" if data.task == "MNLI" else "dev")
        sentences = _glue(replace(workload, data=replace(data, split=split)))
        return sentences, min(len(sentences.table), MOST_HELD_OUT)
    if isinstance(data, ImageFolder):
        _refuse_trained_on(data, "val")
        if not (Path(data.folder) / "val").is_dir():
            raise UserError(f"workload.data.folder = '{data.folder}': has no folder 'val' to be evaluated on")
        images = _images(replace(workload, data=replace(data, split="val", augment=False)))
        _refuse_other_classes(data, images.index.classes)
        return images, min(len(images.index), MOST_HELD_OUT)
    if default_data(workload.model) == "digits":
        _digits(workload)
        return HeldOutDigits(), HELD_OUT_DIGITS
    return _standard_library(replace(workload, global_batch_size=HELD_OUT_WINDOWS), held_out=True), HELD_OUT_WINDOWS


def _refuse_trained_on(data: Glue | ImageFolder, split: str) -> None:
    if data.split == split:
        raise UserError(f"workload.data.split = '{split}': is trained on, so that it cannot be evaluated on")


def _refuse_other_classes(data: ImageFolder, held_out: Sequence[str]) -> None:
    """Raise UserError if the split `val` has other classes than are trained: a class's number is its folder's place."""
    from gsreal.data.images import class_folders

    _, trained = class_folders(data)
    unknown, missing = ([each for each in a if each not in b] for a, b in ((held_out, trained), (trained, held_out)))
    if unknown or missing:
        raise UserError(
            f"workload.data.folder = '{data.folder}': the folders of classes in 'val' are not those that are trained: "
            f"'{(unknown or missing)[0]}' is in {'val' if unknown else data.split} alone"
        )


def check_held_out(workload: Workload, *, where: str) -> None:
    """Raise UserError if there are no data to evaluate the model on."""
    try:
        source, _ = open_held_out(workload)
        source.batch(seed=0, step=0, rows=slice(0, 1))
    except UserError as error:
        raise UserError(f"{where}: run.evaluate_every_steps: {error}") from None


def default_data(model: Model) -> str:
    """Return the name of the data that `auto` resolves to."""
    return "stdlib-bytes" if isinstance(model.input, TokenInput) else "digits"


def check_data(workload: Workload, *, where: str, seed: int = 0, steps: int = 1) -> None:
    """Raise UserError if the model cannot be trained on the available data; reads a run's first samples."""
    try:
        source = open_source(workload)
        size = workload.global_batch_size
        for step in range(min(steps, -(-CHECKED_SAMPLES // size))):
            source.batch(seed=seed, step=step, rows=slice(0, min(size, CHECKED_SAMPLES - step * size)))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def loss_terms(targets: Tensor) -> int:
    """Return the number of targets that the loss is a mean over."""
    return int((targets != IGNORED).sum())


NO_DIGITS = (
    "workload.data: the digits are 1x8x8 images of 10 classes, which are not what the model takes; name images of your "
    "own (kind = 'image-folder')"
)


def _digits(workload: Workload) -> Source:
    source = workload.model.input
    if isinstance(source, TokenInput):
        raise _cannot_read(source, "digits")
    if source.shape != (1, 8, 8) or source.classes < 10:
        raise UserError(NO_DIGITS)
    return Digits(workload.global_batch_size)


def _standard_library(workload: Workload, *, held_out: bool = False) -> Source:
    source, length = workload.model.input, workload.sequence_length or 1
    if isinstance(source, ImageInput):
        raise UserError(NO_DIGITS)
    if source.vocabulary < _bytes_needed(source):
        raise _cannot_read(source, "stdlib-bytes")
    part = held_out_part if held_out else trained_part
    if source.classes is not None:
        modules = tuple(part(module) for module in longest_modules(source.classes))
        if len(modules) < source.classes or len(modules[-1]) < length:
            raise UserError(
                f"workload.data: the standard library has fewer than {source.classes} modules of {length} bytes"
            )
        return ModuleClassification(modules, length, workload.global_batch_size)
    return Windows(part(standard_library_bytes()), length, workload.global_batch_size, _mask(source, None))


def _bytes_needed(source: TokenInput) -> int:
    return 257 if source.task == "masked-token" else 256


def _cannot_read(source: TokenInput, data: str) -> UserError:
    return UserError(
        f"workload.data: a model with a vocabulary of {source.vocabulary} cannot read '{data}'; "
        f"bytes need a vocabulary of {_bytes_needed(source)}"
    )


def _mask(source: TokenInput, known: int | None) -> int | None:
    """Return the mask token for masked language modelling, else None.

    `known`: that of the tokeniser; if it has none, the vocabulary's last token is used.
    """
    if source.task != "masked-token":
        return None
    return source.vocabulary - 1 if known is None else known


def _images(workload: Workload) -> "Images":
    from gsreal.data.images import Images

    assert isinstance(workload.data, ImageFolder)
    assert isinstance(workload.model.input, ImageInput)  # a Workload refuses others
    return Images(workload.data, workload.model.input, workload.global_batch_size)


def _glue(workload: Workload) -> "Sentences":
    from gsreal.data.text import Sentences

    assert isinstance(workload.data, Glue)
    assert isinstance(workload.model.input, TokenInput)
    length = workload.sequence_length or 1
    return Sentences(workload.data, workload.model.input, length, workload.global_batch_size)


def _text(workload: Workload) -> Source:
    from gsreal.data.text import token_stream, tokeniser

    data, source, length = workload.data, workload.model.input, workload.sequence_length or 1
    assert isinstance(data, TextFolder)
    assert isinstance(source, TokenInput)
    chosen = tokeniser(data.tokenizer)
    needed = chosen.size + (source.task == "masked-token" and chosen.mask is None)
    if source.vocabulary < needed:
        raise UserError(
            f"workload.data.tokenizer = {data.tokenizer or 'bytes'}: needs a vocabulary of {needed}, "
            f"the model's is {source.vocabulary}"
        )
    tokens = token_stream(data, chosen)
    if len(tokens) <= length:
        raise UserError(
            f"workload.data.folder = '{data.folder}': holds {len(tokens)} tokens, "
            f"workload.sequence_length = {length} needs more"
        )
    return Windows(tokens, length, workload.global_batch_size, _mask(source, chosen.mask))
