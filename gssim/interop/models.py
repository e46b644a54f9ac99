"""Models by name: the shipped model files, and a Hugging Face config that one of them was traced from."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gssim.errors import MistakenNameError, UserError
from gssim.interop.model_match import sizes_in, sizes_of
from gssim.interop.reading import parsed_json, read_bounded
from gssim.scenario import load_model
from gssim.scenario.vocabulary_slices import shares_embedding
from gssim.workload import ImageInput, Model, shipped_models

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
    config: Any = parsed_json(read_bounded(path), file=str(path))
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{path}: model_type: missing; this is no config of a Hugging Face model")
    asked, kind = sizes_in(config), config["model_type"]
    lacking = [name for name in TOLD_BY_ALL if name not in asked]
    if lacking:
        raise UserError(f"{path}: names no number of {lacking[0]}; trace it: gsreal trace {path} --out FILE")
    found = []
    for name, place in shipped_models().items():
        model = load_model(place)
        source = model.module.hugging_face
        if source is None or source.model_type != kind or model.compiled:
            continue
        known = sizes_of(model)
        ties = config.get("tie_word_embeddings", shares_embedding(model))
        if all(known.get(size, value) == value for size, value in asked.items()) and ties == shares_embedding(model):
            found.append(ModelFile(model, place, name))
    longest = config.get("max_position_embeddings")
    if found:
        return min(found, key=lambda each: _distance(each.model, longest))
    sizes = ", ".join(f"{size} {value}" for size, value in asked.items())
    raise UserError(
        f"{path}: no shipped model is a {kind} of {sizes}; trace it (`gsreal trace {path} --out FILE`), and give that "
        "file in its place"
    )
