"""Model files: the trace request of the command line, and the traced model as TOML."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import tomli_w
import torch
from pydantic import TypeAdapter

from gsreal.model_files.build import DTYPES
from gsreal.model_files.recorder import Work
from gsreal.model_files.trace import OperationCounts, trace, trace_at_length
from gssim.errors import UserError
from gssim.execution.files import write_text
from gssim.scenario import load_model
from gssim.units import Precision, validated
from gssim.workload import Model, TokenInput

CLASSIFICATION = "sequence-classification"
AUTO_CLASSES = {
    "next-token": "AutoModelForCausalLM",
    "masked-token": "AutoModelForMaskedLM",
    CLASSIFICATION: "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
}
"""Hugging Face's auto class for each task."""


@dataclass(frozen=True)
class Request:
    """A model to trace, as the user asked for it."""

    model: str
    arguments: tuple[str, ...]
    name: str
    vocabulary: int | None
    maximum_sequence_length: int
    image: str | None
    classes: int | None
    auto_class: str | None
    sequence_length: int | None
    task: str = "next-token"
    padding: int = 0
    precision: str | None = None
    """Precision of the trace; None: that of the model file, or fp32."""
    source: str | None = None
    """Publication of the model's numbers."""


def traced_model(request: Request, *, on_counted: Callable[[OperationCounts], None] = lambda _counted: None) -> Model:
    """Return the traced model for a `request`; raise UserError if it cannot be traced.

    `on_counted` is called with the operations of the largest step that was traced.
    """
    where = f"gsreal trace {request.model}"
    model = load_model(Path(request.model)) if request.model.endswith(".toml") else _untraced(request, where)
    if request.precision is not None:
        if request.precision not in DTYPES:
            raise UserError(f"{where}: --precision {request.precision}: allowed: {', '.join(DTYPES)}")
        model = replace(model, traced_precision=cast(Precision, request.precision))
    if model.traced_precision not in DTYPES:
        raise UserError(f"{where}: traced_precision = {model.traced_precision!r}: allowed: {', '.join(DTYPES)}")
    if request.sequence_length is not None:
        _check_length(model, request.sequence_length, where)
        return trace_at_length(model, request.sequence_length, where=where, on_counted=on_counted)
    return trace(model, where=where, on_counted=on_counted)


def check_options(request: Request) -> None:
    """Raise UserError for an option of the command line that does not apply to such a model."""
    is_file, is_image = request.model.endswith(".toml"), request.image is not None
    is_text_classifier = request.task == CLASSIFICATION and not is_image
    without_effect = {
        "--argument": is_file and request.arguments,
        "--vocabulary": is_file and request.vocabulary is not None,
        "--image": is_file and is_image,
        "--task": request.task != Request.task and (is_file or is_image),
        "--classes": request.classes is not None and (is_file or not (is_image or is_text_classifier)),
        "--padding": request.padding != Request.padding and (is_file or not is_text_classifier),
        "--auto-class": request.auto_class is not None and not request.model.startswith("hf:"),
    }
    for option in (option for option, found in without_effect.items() if found):
        raise UserError(f"gsreal trace {request.model}: {option}: has no effect on this model; leave it out")


def _check_length(model: Model, length: int, where: str) -> None:
    longest = model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else 0
    if not 1 <= length <= longest:
        allowed = f"at least 1 and at most {longest}" if longest else "left out: the input is images"
        raise UserError(f"{where}: --sequence-length {length}: must be {allowed}")


def _untraced(request: Request, where: str) -> Model:
    arguments = dict(_argument(text, where) for text in request.arguments)
    if request.model.startswith("hf:"):
        if request.image is not None:
            arguments = {"num_labels": _classes(request, 10), **arguments}
        elif request.task == CLASSIFICATION:
            arguments = {"num_labels": _classes(request, 2), "pad_token_id": request.padding, **arguments}
        module: dict[str, Any] = {
            "hugging_face": {
                "model_type": request.model.removeprefix("hf:"),
                "auto_class": request.auto_class
                or AUTO_CLASSES.get("image" if request.image else request.task, "AutoModel"),
                "config": arguments,
            }
        }
    else:
        module = {"factory": request.model, "arguments": arguments}
    traced = f"traced from {request.model} by gsreal trace, torch {torch.__version__.partition('+')[0]}"
    data = {
        "name": request.name,
        "source": f"{request.source}; {traced}" if request.source else traced,
        "module": module,
        "input": _input(request, where),
        "traced_batch_sizes": (1,),
        "layers": (),
    }
    return validated(Model, data, file=where)


def _argument(text: str, where: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise UserError(f"{where}: --argument {text}: must be NAME=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _input(request: Request, where: str) -> dict[str, Any]:
    if (request.image is None) == (request.vocabulary is None):
        raise UserError(f"{where}: exactly one of --vocabulary (tokens) and --image is needed")
    if request.image is None:
        length = request.maximum_sequence_length
        tokens = {
            "kind": "tokens",
            "vocabulary": request.vocabulary,
            "task": request.task,
            "maximum_sequence_length": length,
        }
        if request.task == CLASSIFICATION:
            tokens |= {"classes": _classes(request, 2), "padding": request.padding}
        return tokens
    try:
        shape = tuple(int(size) for size in request.image.split("x"))
    except ValueError:
        shape = ()
    if len(shape) != 3:
        raise UserError(f"{where}: --image {request.image}: must be CHANNELSxHEIGHTxWIDTH, such as 1x8x8")
    return {"kind": "image", "shape": shape, "classes": _classes(request, 10)}


def _classes(request: Request, default: int) -> int:
    return default if request.classes is None else request.classes


LISTED = 8
"""Number of operations without FLOP in a table of counts: those that move the most bytes."""


def counted_table(counted: OperationCounts) -> str:
    """Return the counts as lines: operation, calls, FLOP, bytes; all with FLOP, of the others the largest."""
    works = counted.operations
    rows = [(name, work) for name, work in works.items() if work.flop]
    others = sorted(((n, w) for n, w in works.items() if not w.flop), key=lambda row: -row[1].bytes_moved)
    rows = [*sorted(rows, key=lambda row: -row[1].flop), *others[:LISTED]]
    if others[LISTED:]:
        rows.append((f"{len(others) - LISTED} others", sum((work for _, work in others[LISTED:]), Work())))
    rows.append(("all", sum(works.values(), Work())))
    width = max(len(name) for name, _ in rows)
    tokens = "" if counted.sequence_length is None else f" of {counted.sequence_length} tokens"
    return "\n".join(
        [
            f"gsreal: counted in one step of {counted.batch_size} samples{tokens}, forward and backward:",
            f"  {'operation':{width}}  {'calls':>7}  {'FLOP':>9}  {'bytes':>9}",
            *(
                f"  {name:{width}}  {work.operations:>7}  {work.flop:>9.3g}  {work.bytes_moved:>9.3g}"
                for name, work in rows
            ),
        ]
    )


def write_model(path: Path, model: Model) -> None:
    """Write the model file, or nothing."""
    data = TypeAdapter(Model).dump_python(model, mode="json", exclude_none=True)
    write_text(path, tomli_w.dumps(data, multiline_strings=False, indent=2))
