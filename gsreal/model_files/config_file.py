"""Reads from a Hugging Face config.json what is to be traced: the architecture, its sizes, the form of its input."""

import difflib
import inspect
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gsreal.model_files.build import IMPLEMENTATIONS, training_config
from gssim.errors import UserError, one_line
from gssim.interop.reading import parsed_json, read_bounded
from gssim.workload import HuggingFace

OF_ROTATIONS = frozenset({"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base", "partial_rotary_factor"})
"""Keys of earlier versions that transformers moves to `rope_parameters`."""
TASKS = {
    "ForCausalLM": "next-token",
    "LMHeadModel": "next-token",
    "ForMaskedLM": "masked-token",
    "ForSequenceClassification": "sequence-classification",
    "ForImageClassification": "image",
}
"""Task by the ending of the transformers class that a config names under `architectures`."""
WITHOUT_EFFECT = frozenset(
    [
        *("model_type", "architectures", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"),
        *("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id"),
        *("id2label", "label2id", "problem_type", "task_specific_params", "return_dict"),
        *("output_attentions", "output_hidden_states", "_attn_implementation_autoset"),
    ]
)
"""Keys that change neither a training's operations nor its tensors; the run's precision is the scenario's."""


def settings_in(path: Path, *, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `request.Request` that a config.json states.

    `given`: entries that replace the file's. Raises UserError if the file is no such config, or states what a model
    file cannot express.
    """
    data = parsed_json(read_bounded(path), file=str(path))
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise UserError(f"{path}: model_type: missing; this is no config of a Hugging Face model")
    kind = data["model_type"]
    config = _entries(data, training_config(HuggingFace(model_type=kind), str(path)).to_dict(), given, path)
    merged = config | dict(given)
    present = {key: value for key, value in merged.items() if value is not None}
    absent = tuple(key for key, value in merged.items() if value is None)
    resolved = training_config(HuggingFace(model_type=kind, config=present, null=absent), str(path))
    settings: dict[str, Any] = {"model": f"hf:{kind}", "config": config}
    names = data.get("architectures") or [""]
    task = next((task for end, task in TASKS.items() if str(names[0]).endswith(end)), "next-token")
    if task in ("image", "sequence-classification"):
        labels = data.get("id2label")
        settings["classes"] = len(labels) if isinstance(labels, dict) else resolved.num_labels
    text = resolved.get_text_config()
    if task != "image" and (vocabulary := getattr(text, "vocab_size", None)) is not None:
        settings |= {"task": task, "vocabulary": vocabulary}
        longest = getattr(text, "max_position_embeddings", None)
        if isinstance(longest, int) and longest > 0:  # XLNet says -1: it has no limit
            settings["maximum_sequence_length"] = longest
    elif isinstance(side := getattr(resolved, "image_size", None), int):
        settings["image"] = f"{getattr(resolved, 'num_channels', 3)}x{side}x{side}"
    return settings


def _entries(data: Mapping[str, Any], usual: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the entries of a config that change a training."""
    if data.get("quantization_config") and "quantization_config" not in given:
        without = "--argument quantization_config=null traces the model without"
        raise UserError(f"{path}: quantization_config: quantized weights are not trained; {without}")
    config = {}
    for key, value in data.items():
        if key in WITHOUT_EFFECT or key in given or (key == "auto_map" and _names_transformers_own(value)):
            continue
        if value is not None:
            config[key] = _without_null(value, f"{path}: {key}")
        elif usual.get(key) is not None:
            config[key] = None
    return config


def _names_transformers_own(auto_map: Any) -> bool:
    """Return whether code of a hub is named only for classes that transformers has too, which are then built.

    Files of models that came to transformers later still name the code that they were published with (Phi-3, DeepSeek).
    """
    import transformers

    names = list(auto_map.values()) if isinstance(auto_map, dict) else []
    classes = [name.rpartition(".")[2] for name in names if isinstance(name, str)]
    return 0 < len(classes) == len(names) and all(hasattr(transformers, name) for name in classes)


def unused_keys(path: Path) -> list[str]:
    """Return the keys of a config.json that its architecture does not know, each with the one that may be meant.

    transformers takes any key, and keeps the default of the one that was meant.
    """
    data = parsed_json(read_bounded(path), file=str(path))
    unknown = unknown_keys(data["model_type"], data, where=str(path))
    return [
        one_line(key, 60)
        + (" (its code is not run)" if key == "auto_map" else f" (did you mean {meant}?)" if meant else "")
        for key, meant in unknown.items()
    ]


def unknown_keys(model_type: str, keys: Collection[str], *, where: str) -> dict[str, str | None]:
    """Return those of these keys of a config that the architecture does not know, each with the one that may be meant.

    `where`: names the config where the architecture is not known.
    """
    usual = training_config(HuggingFace(model_type=model_type), where)
    known = set(usual.to_dict()) | set(usual.attribute_map) | WITHOUT_EFFECT | OF_ROTATIONS | set(IMPLEMENTATIONS)
    others = sorted(known - set(keys))
    return {
        key: next(iter(difflib.get_close_matches(key, others, n=1, cutoff=0.8)), None)
        for key in keys
        if key not in known and not hasattr(usual, key) and not _is_read(key, usual)
    }


def _is_read(key: str, config: Any) -> bool:
    """Return whether the architecture's code reads an entry that its config does not declare.

    So DeBERTa-v2 does: `getattr(config, "position_buckets", -1)`.
    """
    use = re.compile(rf"""\bgetattr\(\s*(?:self\.)?config,\s*["']{re.escape(key)}["']|\bconfig\.{re.escape(key)}\b""")
    folder = Path(inspect.getfile(type(config))).parent
    return any(use.search(path.read_text(encoding="utf-8")) for path in folder.glob("modeling_*.py"))


def _without_null(value: Any, where: str) -> Any:
    """Return a value without the entries of its tables that are null; raise UserError for a null in a list."""
    if isinstance(value, dict):
        return {key: _without_null(inner, where) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        if None in value:
            raise UserError(f"{where}: has a null in a list, which a model file cannot say; give it by --argument")
        return [_without_null(inner, where) for inner in value]
    return value
