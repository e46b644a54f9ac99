"""Models by name or Hugging Face config, and the comparison of a file's model with that of --model: by its sizes, the
size in its name, and its compilation.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gssim.errors import MistakenNameError, UserError
from gssim.interop.reading import Keys, Value, parsed_json, read_bounded, shown
from gssim.interop.training import Training
from gssim.scenario import load_model
from gssim.scenario.vocabulary_slices import (
    shares_embedding,
    token_embedding,
)
from gssim.workload import HuggingFace, ImageInput, Model, shipped_models

TOLD_BY_ALL = ("layers", "width", "heads", "vocabulary")
"""Sizes that a config must give to be recognised."""


HUGGING_FACE_IDS = {
    "bert-base": ("google-bert/bert-base-uncased", "bert-base-uncased"),
    "bert-large": ("google-bert/bert-large-uncased", "bert-large-uncased"),
    "gpt2-124m": ("openai-community/gpt2", "gpt2"),
    "gpt2-355m": ("openai-community/gpt2-medium", "gpt2-medium"),
    "gpt2-774m": ("openai-community/gpt2-large", "gpt2-large"),
    "gpt2-1.5b": ("openai-community/gpt2-xl", "gpt2-xl"),
    "llama2-7b": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
    "llama2-13b": ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b-chat-hf"),
    "llama2-70b": ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-chat-hf"),
    "llama3-8b": ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct"),
    "llama3-70b": ("meta-llama/Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B-Instruct"),
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
    "llama3.1-70b": ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B"),
    "llama3.2-1b": ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base"),
    "resnet-50": ("microsoft/resnet-50",),
}
"""Shipped models, and the ids at Hugging Face of models of the same sizes."""


@dataclass(frozen=True)
class ModelFile:
    """A model, its file, and how a scenario names it."""

    model: Model
    path: Path
    written: str
    listed: tuple[tuple[str, str], ...] = ()
    """Keys of a config without an effect on the model, each with the reason."""


def find_model(name: str) -> ModelFile:
    """Return a model, named by its file, its Hugging Face config.json, or a shipped model's name or Hugging Face id.

    Raises UserError if there is none, or if no shipped model has the config's sizes.
    """
    path = Path(name)
    if path.suffix == ".json":
        return _of_config(path)
    if path.is_file():
        return ModelFile(load_model(path), path, name)
    known = shipped_models()
    name = next((own for own, ids in HUGGING_FACE_IDS.items() if name.lower() in map(str.lower, ids)), name)
    if name in known:
        return ModelFile(load_model(known[name]), known[name], name)
    last = name.rpartition("/")[2].lower()  # of an id at Hugging Face, without its owner
    close = difflib.get_close_matches(path.stem if path.suffix == ".toml" else last, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise MistakenNameError(f"--model {name}: no such file or shipped model (`gssim models` lists them){hint}")


def _distance(model: Model, longest: Any) -> tuple[bool, int]:
    """Return a key that orders models by how well their longest sequence fits that of a config."""
    own = 0 if isinstance(model.input, ImageInput) else model.input.maximum_sequence_length
    fits = not isinstance(longest, int) or own >= longest
    return not fits, own if fits else -own


def _of_config(path: Path) -> ModelFile:
    """Return the shipped model (not a compiled one) that was traced from a config of these sizes.

    Of models that differ in their longest sequence alone, it is the shortest that takes the config's, or the longest.
    """
    config = config_in(path)
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{path}: model_type: missing; this is no config of a Hugging Face model")
    asked, kind = _sizes_asked(config), config["model_type"]
    if config.get("quantization_config"):
        raise UserError(
            f"{path}: quantization_config: weights in few bits are a frozen model's: say workload.frozen_precision and "
            "workload.adapters by --set, and give the config of the model that was quantized"
        )
    lacking = [name for name in TOLD_BY_ALL if name not in asked]
    if lacking:
        raise UserError(f"{path}: names no number of {lacking[0]}; trace it: gsreal trace {path} --out FILE")
    fitting, others = [], []
    for name, place in shipped_models().items():
        model = load_model(place)
        source = model.module.hugging_face
        if source is None or source.model_type != kind or model.compiled:
            continue
        known = sizes_of(model)
        ties = config.get("tie_word_embeddings", shares_embedding(model))
        if any(known.get(size, value) != value for size, value in asked.items()) or ties != shares_embedding(model):
            continue
        others = _differing_keys(config, source.config, kind)
        if not others:
            fitting.append(ModelFile(model, place, name, tuple(_dropouts(config, source.config, path))))
    longest = config.get("max_position_embeddings")
    if fitting:
        return min(fitting, key=lambda each: _distance(each.model, longest))
    sizes = ", ".join([*(f"{size} {value}" for size, value in asked.items()), *others])
    raise UserError(
        f"{path}: no shipped model is a {kind} of {sizes}; trace it (`gsreal trace {path} --out FILE`), and give that "
        "file in its place"
    )


def config_in(path: Path) -> dict[str, Any]:
    """Return the keys of a model's config.json; raise UserError where it is no JSON file of a table."""
    config = parsed_json(read_bounded(path), file=str(path))
    if not isinstance(config, dict):
        raise UserError(f"{path}: must hold a table of keys and values; this is no config of a Hugging Face model")
    return config


def _sizes_asked(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a config, with transformers' defaults where it leaves them out."""
    kind = config["model_type"]
    given = {key: value for key, value in config.items() if value is not None or key == "num_key_value_heads"}
    sizes = sizes_in(SIZES_LEFT_OUT.get(kind, {}) | given)
    if kind in SIZES_LEFT_OUT and "heads" in sizes:
        sizes.setdefault("key-value heads", sizes["heads"])
    return sizes


def _differing_keys(config: Mapping[str, Any], traced: Mapping[str, Any], kind: str) -> list[str]:
    """Return the keys in which a config differs from that of a traced model, beside its sizes, with their values."""
    differing = []
    for key, default in OTHER_KEYS.get(kind, {}).items():
        asked, known = (default if (value := each.get(key)) is None else value for each in (config, traced))
        if key == "head_dim" and isinstance(asked, int):  # absent: the heads together are as wide as the model
            known = known or traced["hidden_size"] // traced["num_attention_heads"]
        elif key == "head_dim":
            continue
        if asked != known:
            differing.append(f"{key} = {shown(config.get(key))}")
    return differing


def _dropouts(config: Mapping[str, Any], traced: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str]]:
    """Yield the dropouts of a config that the traced model does not have."""
    for key, value in config.items():
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float) and value and not traced.get(key):
            yield f"{path.name}: {key} = {shown(value)}", "approximated: the model was traced without dropout"


SIZES_LEFT_OUT: dict[str, dict[str, int]] = {
    "llama": {"intermediate_size": 11008},
    "mixtral": {"intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
}
"""Sizes that configs of these types may leave out, as transformers then has them; of a null number of key-value heads,
or one that a llama leaves out, it has as many as heads."""
OTHER_KEYS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "head_dim": None},
    "mixtral": {"hidden_act": "silu", "sliding_window": None, "head_dim": None},
    "qwen3_moe": {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "head_dim": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt2": {"activation_function": "gelu_new", "n_positions": 1024, "add_cross_attention": False},
    "bert": {
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "is_decoder": False,
        "add_cross_attention": False,
    },
}
"""Keys of configs that change parameters or operations, beside sizes, with transformers' defaults."""
ARCHITECTURE: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "layers"),
    "width": ("hidden_size", "n_embd", "d_model", "width"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "heads"),
    "key-value heads": ("num_key_value_heads",),
    "perceptron": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "experts"),
    "experts per token": ("num_experts_per_tok", "experts_per_token"),
    "experts' perceptrons": ("moe_intermediate_size",),
}
"""Sizes of a transformer, with their names in Hugging Face configs and in factories."""
DEFAULTS_OF_TYPES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "bert": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
    },
}
"""Default sizes of configs in transformers, for model files that hold only the differences from them."""
WITHOUT_GROUPS = ("gpt2", "bert", "gsreal.models.gpt", "gsreal.models.bert")
"""Types and factories of models in which every head has keys of its own, and whose perceptrons are four times as wide
as the model, unless they say another size."""
STATED_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z\d])(?!-\d+e\b)", re.IGNORECASE)
"""A number of parameters in a model's name; where a number of experts follows it, it is of those that a token meets."""
STATED_MIXTURE = re.compile(r"(?<![\w.])\d+x\d+(\.\d+)?b|b-a\d+(\.\d+)?b(?![a-z])|b-\d+e(?![a-z\d])", re.IGNORECASE)
"""A number of experts, or of the parameters that a token meets: `8x7B`, `30B-A3B`, `17B-16E`."""
ROUNDED_RATIO = 1.5
"""By how much names round: Gemma-2B has 2.5e9 parameters, Llama-3.2-1B 1.24e9."""


def check_model(training: Training, keys: Keys, model: Model) -> None:
    """Refuse what a file says of its model where the model of --model differs."""
    known = sizes_of(model)
    for name, value in training.architecture.items():
        if name in known and known[name] != value.value:
            keys.refuse_value(
                value, f"the model '{model.name}' has {name} = {known[name]}; give the right one by --model"
            )
        elif name not in known and name.startswith("experts") and not model.expert_layers:
            keys.refuse_value(value, f"the model '{model.name}' has no routed experts; give the right one by --model")
        elif name not in known and value.key in keys.values:
            keys.note(value.key, f"the model is --model ('{model.name}')")
    shares = training.shares_embedding
    if shares is not None and token_embedding(model) is not None and shares.value != shares_embedding(model):
        head = "has the token embedding's weight" if shares_embedding(model) else "has a weight of its own"
        keys.refuse_value(shares, f"the head of the model '{model.name}' {head}; give the right one by --model")
    _check_base_model(training, keys, model)
    _check_compiled(training, keys, model)
    _recompute_inside(training, keys, model)


def stated_elements(name: str) -> float | None:
    """Return the number of parameters that a model's name says, in billions (B) or millions (M); None if it says none.

    >>> stated_elements("NousResearch/Meta-Llama-3-8B"), stated_elements("Qwen/Qwen3-30B-A3B-4bit")
    (8000000000.0, 30000000000.0)
    >>> stated_elements("mistralai/Mixtral-8x7B-v0.1"), stated_elements("meta-llama/Llama-4-Scout-17B-16E")
    (None, None)
    """
    size = STATED_SIZE.search(_last_part(name))
    return None if size is None else float(size[1]) * (1e9 if size[2].lower() == "b" else 1e6)


def _last_part(name: str) -> str:
    """Return a model's name without the organization or folders before it."""
    return name.rstrip("/").rpartition("/")[2]


def _check_base_model(training: Training, keys: Keys, model: Model) -> None:
    """Refuse a model of another size than the name in the file says, and one without the experts that it says."""
    named = training.base_model
    if named is not None and STATED_MIXTURE.search(_last_part(str(named.value))) and not model.expert_layers:
        keys.refuse_value(named, f"the model '{model.name}' has no routed experts; give the right one by --model")
        return
    stated = None if named is None else stated_elements(str(named.value))
    if named is None or stated is None:
        return
    held = model.elements + model.frozen_elements
    if not held / ROUNDED_RATIO <= stated <= held * ROUNDED_RATIO:
        reason = f"the model '{model.name}' has {held / 1e9:.3g}e9 parameters; give the right one by --model"
        keys.refuse_value(named, reason)


def _recompute_inside(training: Training, keys: Keys, model: Model) -> None:
    """Leave recomputation to compiled blocks that recompute inside their graphs; note where they do not."""
    recompute = training.recompute
    if not model.compiled or recompute is None or recompute.value == "none":
        return
    if recompute.value == model.compiled_recompute:
        inside = f"{recompute.origin}: inside of the graphs of '{model.name}'"
        training.recompute = Value("none", inside)
        return
    made = f"`gsreal trace MODEL_FILE --compile --recompute {recompute.value} --out FILE` makes one that does"
    if recompute.value == "full" and model.compiled_recompute == "none":
        keys.listed.append(
            (recompute.origin, f"approximated: whole graphs are recomputed, and not inside of compiled blocks; {made}")
        )
    else:
        keys.refuse_value(
            recompute,
            f"the compiled blocks of '{model.name}' recompute '{model.compiled_recompute}' inside of their graphs; "
            f"{made}, for --model",
            "plan.recompute",
        )


def _check_compiled(training: Training, keys: Keys, model: Model) -> None:
    """Refuse a model whose blocks are compiled if the file's are not, and the reverse; say which model to take."""
    compiled = training.compiled or Value(False, "compilation = false (not in the file)")
    if compiled.value == model.compiled:
        return
    dividing = [each for each in (training.tp, training.cp, training.ep) if each is not None and each.value != 1]
    if model.compiled:
        reason = f"the blocks of the model '{model.name}' are compiled; give the one that is not by --model"
    elif dividing:
        reason = (
            f"compiled blocks that ranks divide ({dividing[0].origin}) are not traced yet; leave it out "
            "by --ignore: operations then run one by one, which takes longer"
        )
    else:
        reason = (
            f"operations of the model '{model.name}' run one by one; give a compiled one by --model: what "
            "`gsreal trace MODEL_FILE --compile --out FILE` makes, or "
            f"'{model.name}-compiled', where it is shipped (`gssim models`)"
        )
    keys.refuse_value(compiled, reason)


def sizes_of(model: Model) -> dict[str, int]:
    """Return the sizes of a model that its file gives, by the names of `ARCHITECTURE`."""
    module = model.module
    blocks = sum(layer.repeats for layer in model.layers if layer.block)
    config: dict[str, Any] = dict(module.arguments)
    if isinstance(module.hugging_face, HuggingFace):
        config = DEFAULTS_OF_TYPES.get(module.hugging_face.model_type, {}) | module.hugging_face.config
    sizes = sizes_in(config)
    kind = module.hugging_face.model_type if isinstance(module.hugging_face, HuggingFace) else module.factory
    if kind in WITHOUT_GROUPS and {"width", "heads"} <= sizes.keys():
        sizes.setdefault("key-value heads", sizes["heads"])
        sizes.setdefault("perceptron", 4 * sizes["width"])
    if blocks:
        sizes["layers"] = blocks
    if not isinstance(model.input, ImageInput):
        sizes["vocabulary"] = model.input.vocabulary
    return sizes


def sizes_in(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that a config names.

    >>> sizes_in({"n_embd": 768, "n_layer": 12})
    {'layers': 12, 'width': 768}
    """
    return {
        size: config[name]
        for size, names in ARCHITECTURE.items()
        for name in names
        if isinstance(config.get(name), int) and not isinstance(config[name], bool)
    }
