"""A model to trace as a user asks for it: a factory, a Hugging Face config or a model file, and its input."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

import tomli
import torch

from gsreal.model_files import config_file
from gsreal.model_files.build import DTYPES
from gsreal.model_files.fused_kernels import cuda_kernels
from gsreal.model_files.trace import (
    OperationCounts,
    maps_of_adapters,
    runs_other_kernels,
    targets_of,
    trace,
    trace_at_length,
    with_traced_adapters,
    with_traced_autocast,
    with_traced_frozen,
)
from gssim.errors import UserError
from gssim.scenario import load_model
from gssim.units import Precision, Recompute, validated
from gssim.workload import Model, TokenInput
from gssim.workload.model import LAYER_LISTS, FusedKernels, OtherPrecision

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
    vocabulary: int | None = None
    maximum_sequence_length: int | None = None
    """None: as a config.json states, else 256."""
    image: str | None = None
    classes: int | None = None
    auto_class: str | None = None
    sequence_length: int | None = None
    task: str | None = None
    """None: as a config.json states, else next-token."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Entries of a Hugging Face config; those of `arguments` replace them."""
    padding: int = 0
    states_padding: bool = field(default=False, repr=False)
    """Whether the user stated `padding`. If not, and it is 0, the config's padding token is used, if there is one."""
    precision: str | None = None
    """Precision of the trace; None: that of the model file, or fp32."""
    other_precisions: tuple[str, ...] = field(default=(), repr=False)
    """Precisions in which the model is traced besides, see [Note: precisions] in `gssim.workload.model`."""
    only_where_possible: bool = field(default=False, repr=False)
    """Whether `other_precisions` in which the module cannot be traced are left out with a note, instead of refused."""
    source: str | None = None
    """Publication of the model's numbers."""
    autocast: tuple[str, ...] = field(default=(), repr=False)
    """Precisions of torch.autocast under which the model is traced too."""
    compiled: bool = field(default=False, repr=False)
    """Whether the model's blocks are compiled; False: only if the model file says so."""
    recompute: str = field(default="none", repr=False)
    """What compiled blocks recompute inside of their graphs."""
    adapters: tuple[str, ...] = field(default=(), repr=False)
    """Linear maps that get adapters. The model is traced once for each entry: a role, or names joined by commas."""
    frozen: bool = field(default=False, repr=False)
    """Whether the layers are traced with some of them frozen too, in each way in which ranks divide the model."""


def fill_in_defaults(request: Request) -> Request:
    """Return a request in which its config.json, or else a default, fills in what the user left out.

    Raises UserError if the file cannot be read, or describes a model that cannot be traced.
    """
    if request.model.endswith(".json"):
        given = _arguments(request, f"gsreal trace {request.model}")
        settings = config_file.settings_in(Path(request.model), given=given)
        if request.image is not None or request.vocabulary is not None:  # the user states the form of the input
            settings = {key: settings[key] for key in ("model", "config")}
        settings = {key: value for key, value in settings.items() if key == "model" or not getattr(request, key)}
        request = replace(request, **settings)
    unstated = not (request.padding or request.states_padding)
    if request.task == CLASSIFICATION and unstated and not request.model.endswith(".toml"):
        stated = {**request.config, **_arguments(request, f"gsreal trace {request.model}")}.get("pad_token_id")
        request = replace(request, padding=stated if isinstance(stated, int) else 0)
    return replace(
        request,
        task=request.task or "next-token",
        maximum_sequence_length=request.maximum_sequence_length or MAXIMUM_SEQUENCE_LENGTH,
    )


MAXIMUM_SEQUENCE_LENGTH = 256
"""Longest sequence of a model of which neither the user nor a config.json states one."""


def traced_model(
    request: Request,
    *,
    on_counted: Callable[[OperationCounts], None] = lambda _counted: None,
    on_note: Callable[[str], None] = lambda _line: None,
) -> Model:
    """Return the traced model for a `request`; raise UserError if it cannot be traced.

    If it names a model file, everything that the file holds (adapters, frozen layers, autocast, other precisions) is
    traced again, beside what the request asks for. `on_counted` is called with the operations of the largest step that
    was traced, `on_note` with a line about costs of the file that the new one does not have.
    """
    where = f"gsreal trace {request.model}"
    request = fill_in_defaults(request)
    model = load_model(Path(request.model)) if request.model.endswith(".toml") else _model_to_trace(request, where)
    unknown = {request.precision, *request.other_precisions} - {None, *DTYPES}
    if unknown:
        raise UserError(f"{where}: --precision {unknown.pop()}: allowed: {', '.join(DTYPES)}")
    if request.precision is not None:
        model = replace(model, traced_precision=cast(Precision, request.precision))
    if request.compiled and (without := _variant_names(model)):
        on_note(f"{where}: --compile: left out, as compiled blocks are traced without: {', '.join(without)}")
    model = _with_compile_options(model, request, where)
    if model.traced_precision not in DTYPES:
        raise UserError(f"{where}: traced_precision = {model.traced_precision!r}: allowed: {', '.join(DTYPES)}")
    if set(request.autocast) - {"bf16", "fp16"}:
        raise UserError(f"{where}: --autocast {' '.join(request.autocast)}: allowed: bf16, fp16")
    for each in request.adapters:  # a name that the module lacks is said before minutes of tracing
        maps_of_adapters(model, targets_of(each), where=where)
    _check_length(model, request, where)
    traced = _trace_request(model, request, where, on_counted, on_note)
    kinds = dict.fromkeys([*(each.precision for each in model.other_precisions), *request.other_precisions])
    kinds.pop(model.traced_precision, None)
    others = _trace_other_precisions(model, list(kinds), request, where, on_note)
    traced = replace(traced, other_precisions=tuple(others))
    return replace(traced, fused_kernels=_trace_fused_kernels(model, traced, request, where))


def _trace_fused_kernels(model: Model, traced: Model, request: Request, where: str) -> FusedKernels | None:
    """Return the layers as a CUDA GPU runs them, in those ways in which `traced`, the CPU's trace, has others.

    Without any if a GPU runs the same ones, with attention as separate operations. None if it runs the same ones
    without such attention, or if blocks are compiled: inductor fuses what it finds, on each device.
    """
    if traced.compiled:
        return None

    def differs(**kind: Any) -> bool:
        return runs_other_kernels(replace(model, **kind), request.sequence_length, where=where)

    own = differs(traced_precision=model.traced_precision)
    autocast = [
        each.precision for each in traced.autocast if differs(traced_precision="fp32", traced_autocast=each.precision)
    ]
    kinds = [each.precision for each in traced.other_precisions if differs(traced_precision=each.precision)]
    if not (own or autocast or kinds):
        return FusedKernels() if traced.has_unfused_attention else None

    def silent(_ignored: object) -> None:
        """Print nothing: the CPU's trace has printed it."""

    fields: dict[str, Any] = {}
    with cuda_kernels():
        if own:
            without = replace(model, autocast=()), replace(request, autocast=())
            gpu = _trace_request(*without, where, silent, silent)
            fields = {name: getattr(gpu, name) for name in (*LAYER_LISTS, "adapted", "partly_trained")}
        under = with_traced_autocast(replace(traced, autocast=()), autocast, where=where).autocast
        others = tuple(_trace_other_precisions(model, kinds, request, where, silent))
    return FusedKernels(autocast=under, other_precisions=others, **fields)


def _trace_other_precisions(
    model: Model, kinds: Sequence[str], request: Request, where: str, on_note: Callable[[str], None]
) -> Iterator[OtherPrecision]:
    """Yield the model's layers as traced in each of the precisions `kinds`."""
    for kind in kinds:
        twin = replace(model, traced_precision=cast(Precision, kind), autocast=())
        try:
            traced = _trace_request(
                twin, replace(request, autocast=()), where, lambda _counted: None, lambda _line: None
            )
        except UserError as error:
            if not request.only_where_possible:
                raise
            on_note(f"{where}: left out: its layers in {kind}: {error}")
            continue
        lists: dict[str, Any] = {name: getattr(traced, name) for name in (*LAYER_LISTS, "adapted", "partly_trained")}
        yield OtherPrecision(precision=traced.traced_precision, **lists)


def _check_length(model: Model, request: Request, where: str) -> None:
    """Raise UserError for a single sequence length that the model does not take."""
    if request.sequence_length is None:
        return
    longest = model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else 0
    if not 1 <= request.sequence_length <= longest:
        allowed = f"at least 1 and at most {longest}" if longest else "left out: the input is images"
        if longest and not request.model.endswith(".toml"):
            allowed += " (--maximum-sequence-length allows others)"
        raise UserError(f"{where}: --sequence-length {request.sequence_length}: must be {allowed}")


def _trace_request(
    model: Model,
    request: Request,
    where: str,
    on_counted: Callable[[OperationCounts], None],
    on_note: Callable[[str], None],
) -> Model:
    """Return the model traced in its `traced_precision`, with what it held before and what the request asks for."""
    if request.sequence_length is not None:
        traced = trace_at_length(model, request.sequence_length, where=where, on_counted=on_counted)
    else:
        traced = trace(model, where=where, on_counted=on_counted)
    return _with_variants(model, traced, request, where, on_note)


def _variant_names(model: Model) -> list[str]:
    """Return the names, for messages, of a file's further traces: adapters, frozen layers, autocast and precisions."""
    return [
        *(f"adapters at {each.role or ','.join(each.maps)}" for each in model.adapted),
        *(["frozen layers"] if model.partly_trained is not None else []),
        *(f"autocast in {each.precision}" for each in model.autocast),
        *(f"layers in {each.precision}" for each in model.other_precisions),
    ]


def _with_variants(before: Model, traced: Model, request: Request, where: str, on_note: Callable[[str], None]) -> Model:
    """Return a traced model with its layers also traced under autocast, with frozen layers, and with adapters.

    They are traced so if the request says it, or if the model had such costs `before`. `on_note` is called with a line
    about costs with frozen layers that the model had and that cannot be traced again.
    """

    def left_out(why: str) -> None:
        on_note(f"{where}: left out: costs with frozen layers, which the file had: {why}")

    autocast = dict.fromkeys([*(each.precision for each in before.autocast), *request.autocast])
    traced = with_traced_autocast(replace(traced, autocast=()), list(autocast), where=where)
    traced = replace(traced, partly_trained=None)
    if request.frozen or before.partly_trained is not None:
        traced = with_traced_frozen(traced, where=where, on_impossible=None if request.frozen else left_out)
    adapters = dict.fromkeys([*(each.role or ",".join(each.maps) for each in before.adapted), *request.adapters])
    return with_traced_adapters(replace(traced, adapted=()), list(adapters), where=where)


def _with_compile_options(model: Model, request: Request, where: str) -> Model:
    """Return the model with the request's compile options; raise UserError for options that exclude each other."""
    kind: Any = request.recompute
    if kind != "none" and (kind not in get_args(Recompute) or not request.compiled):
        allowed = ", ".join(get_args(Recompute)) if request.compiled else "with --compile alone"
        raise UserError(f"{where}: --recompute {kind}: allowed: {allowed}")
    if request.compiled:
        name = model.name  # a profile of the uncompiled model has another name
        if request.model.endswith(".toml") and not model.compiled:
            name = f"{name}-compiled" + (f"-{kind}" if kind != "none" else "")
        without: dict[str, Any] = {"autocast": (), "adapted": (), "partly_trained": None, "other_precisions": ()}
        model = replace(model, name=name, compiled=True, compiled_recompute=kind, **without)
    if model.compiled and (request.autocast or request.adapters or request.frozen):
        option = "--autocast" if request.autocast else "--adapters" if request.adapters else "--frozen"
        raise UserError(f"{where}: {option}: compiled blocks are traced without it; leave out one of the two")
    return model


def check_options(request: Request) -> None:
    """Raise UserError for an option of the command line that does not apply to such a model."""
    states_longest, request = request.maximum_sequence_length is not None, fill_in_defaults(request)
    is_file, is_image = request.model.endswith(".toml"), request.image is not None
    is_text_classifier = request.task == CLASSIFICATION and not is_image
    without_effect = {
        "--argument": is_file and request.arguments,
        "--vocabulary": is_file and request.vocabulary is not None,
        "--maximum-sequence-length": states_longest and (is_file or is_image),
        "--source": is_file and request.source is not None,
        "--image": is_file and is_image,
        "--task": request.task != "next-token" and (is_file or is_image),
        "--classes": request.classes is not None and (is_file or not (is_image or is_text_classifier)),
        "--padding": (request.states_padding or request.padding) and (is_file or not is_text_classifier),
        "--auto-class": request.auto_class is not None and not request.model.startswith("hf:"),
    }
    for option in (option for option, given in without_effect.items() if given):
        raise UserError(f"gsreal trace {request.model}: {option}: has no effect on this model; leave it out")


def _arguments(request: Request, where: str) -> dict[str, Any]:
    """Return the values of the command line's `--argument`, as TOML reads them."""
    arguments: dict[str, Any] = {}
    for text in request.arguments:
        key, separator, value = text.partition("=")
        if not separator:
            raise UserError(f"{where}: --argument {text}: must be NAME=VALUE")
        try:
            arguments[key] = tomli.loads(f"value = {value}")["value"]
        except tomli.TOMLDecodeError:  # a string without quotes
            arguments[key] = value
        if value == "null" and request.model.endswith(".json") | request.model.startswith("hf:"):
            arguments[key] = None  # as in a config.json; TOML has none
    return arguments


def _model_to_trace(request: Request, where: str) -> Model:
    """Return the model that a request describes, without layers; raise UserError for unknown arguments."""
    given = _arguments(request, where)
    arguments = {**request.config, **given}
    if request.model.startswith("hf:"):
        unknown = config_file.unknown_keys(request.model.removeprefix("hf:"), given, where=where)
        for key, meant in unknown.items():
            if meant is not None:  # transformers would take it, and keep the default of the one that was meant
                raise UserError(f"{where}: --argument {key}: unknown to the architecture; did you mean {meant}?")
        if request.image is not None:
            arguments = {"num_labels": _classes(request, 10), **arguments}
        elif request.task == CLASSIFICATION:
            masks = arguments.get("pad_token_id", 0) is not None
            # the data are padded with the token that the model leaves out
            padding = {"pad_token_id": request.padding} if masks else {}
            arguments = {"num_labels": _classes(request, 2), **arguments, **padding}
        module: dict[str, Any] = {
            "hugging_face": {
                "model_type": request.model.removeprefix("hf:"),
                "auto_class": request.auto_class
                or AUTO_CLASSES.get("image" if request.image else str(request.task), "AutoModel"),
                "config": {key: value for key, value in arguments.items() if value is not None},
                "null": tuple(key for key, value in arguments.items() if value is None),
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
