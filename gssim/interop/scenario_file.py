"""Import of another program's file as a scenario: its format, the model and cluster, and the TOML that is written."""

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gssim.cluster import Cluster
from gssim.errors import UserError, one_line
from gssim.interop.accelerate import accelerate
from gssim.interop.arguments import OF_TRAINER, arguments_in, arguments_of
from gssim.interop.automodel import automodel
from gssim.interop.axolotl import axolotl
from gssim.interop.deepspeed import deepspeed
from gssim.interop.formats import FORMATS
from gssim.interop.launchers import RANKS_OF
from gssim.interop.megatron import megatron
from gssim.interop.models import check_model, find_model
from gssim.interop.plan_entries import plan_entries
from gssim.interop.reading import (
    Keys,
    flattened,
    parsed_json,
    parsed_toml,
    parsed_yaml,
    read_bounded,
)
from gssim.interop.torchtitan import torchtitan
from gssim.interop.trainer import trainer
from gssim.interop.training import Entry, Training
from gssim.interop.workload_entries import scale_loss, workload_entries
from gssim.scenario import load_cluster, load_scenario
from gssim.scenario.overrides import parsed_override, toml
from gssim.workload import Model


@dataclass(frozen=True)
class Imported:
    """A scenario made from another program's file."""

    text: str
    """The scenario's TOML."""
    listed: tuple[str, ...]
    """Lines on keys that have no effect, or that were approximated."""
    reasons: tuple[tuple[str, tuple[str, ...]], ...]
    """Why these are no part of the scenario, each with the keys and their values."""
    defaults: tuple[str, ...]
    """Lines on scenario keys that the file does not give."""


COUNTS = frozenset(("plan.ranks", "plan.tp", "plan.pp", "plan.cp", "plan.micro_batches", "workload.global_batch_size"))
"""Keys from which other counts of a file are derived; they are checked before the scenario is."""
MOST = 10**9


def import_scenario(
    path: Path,
    *,
    model: str,
    cluster: Path,
    overrides: Sequence[str] = (),
    form: str | None = None,
    ignored: Sequence[str] = (),
    out: Path | None = None,
    text: str | None = None,
    variables: Sequence[str] = (),
) -> Imported:
    """Return the scenario that a file of another program describes.

    `model`: a model file, a Hugging Face config.json, or the name of a shipped model. `form`: one of `FORMATS`; None:
    detected from the file. `ignored`: patterns of keys that are left out although they may change the answer. `out`:
    where the scenario will be, for relative paths. `text`: the content, if it is not to be read from the file.
    `variables`: NAME=VALUE for a script's variable, or 1=VALUE for its first argument. Raises RefusedError if keys
    cannot be read, and UserError for a file that is invalid or of an unknown format.
    """
    text = read_bounded(path) if text is None else text
    given: dict[str, str] = {}
    for each in variables:
        variable, sign, its_text = each.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*|[1-9]\d?", variable):
            raise UserError(f"--variable {one_line(each, 60)}: must be NAME=VALUE, or 1=VALUE for an argument")
        given[variable] = its_text
    name, values = _content(path, text, form, given)
    replaced = dict(parsed_override(override) for override in overrides)
    for key, option in (("cluster", "--cluster"), ("workload.model", "--model")):
        taken = next((each for each in replaced if each == key or each.startswith(f"{key}.")), None)
        if taken is not None:
            raise UserError(f"--set {taken}: give the file by {option}, and overrides of it to `gssim run`")
    for key in COUNTS & replaced.keys():
        value = replaced[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
            raise UserError(f"--set {key} = {value!r:.40}: allowed: a whole number from 1 to {MOST}")
    keys = Keys(str(path), values, frozenset(replaced), ignored)
    model_file = find_model(model)
    keys.listed += model_file.listed
    its_cluster = load_cluster(cluster)
    training = _read(name, keys, its_cluster, model_file.model)
    entries = _entries(training, keys, model_file.model, its_cluster, replaced)
    listed = tuple(f"{line}: {reason}" for line, reason in keys.listed)
    if keys.refused:
        raise RefusedError(str(path), tuple(f"{line}: {reason}" for line, reason in keys.refused), listed)
    entries = [entry for entry in entries if entry.key not in replaced]
    entries += [Entry(key, value, "--set") for key, value in replaced.items()]
    places = {"cluster": str(cluster), "model": model_file.written}
    written = _written(path, name, entries, places, keys, out)
    _check(written, path, cluster, model_file.path, entries)
    defaults = tuple(f"{entry.key} = {toml(entry.value)}: {entry.comment}" for entry in entries if entry.is_default)
    return Imported(written, listed, _by_reason(keys), defaults)


def _entries(training: Training, keys: Keys, model: Model, cluster: Cluster, overrides: dict[str, Any]) -> list[Entry]:
    """Return the scenario's entries in the order of the file; contradictions with model or cluster are refused in
    `keys`.

    `overrides`: values that `--set` gives, by scenario key; they replace those of the file.
    """
    check_model(training, keys, model)
    if {"workload.optimizer", "workload.optimizer_implementation"} & set(overrides):
        training.optimizer_state_precision = None
    if training.clip_norm is not None and not training.clip_norm.value:
        training.clip_norm = None  # it clips nothing
    if keys.refused:
        return []
    plan = plan_entries(training, keys, model, cluster, overrides)
    scale_loss(training, plan, overrides)
    entries = [*workload_entries(training, keys, model), *plan]
    if training.seed is not None:
        entries.append(Entry.of("run.seed", training.seed))
    return entries


class RefusedError(UserError):
    """A file with keys that cannot be read into a scenario; the message names the first and the number of others."""

    def __init__(self, file: str, refused: Sequence[str], listed: Sequence[str]) -> None:
        more = f" (and {len(refused) - 1} more keys, listed above)" if len(refused) > 1 else ""
        super().__init__(f"{file}: {refused[0]}{more}; nothing is written")
        self.refused = tuple(refused)
        self.listed = tuple(listed)


def _content(path: Path, text: str, form: str | None, variables: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the format of a file, and its keys."""
    file = str(path)
    if form is not None and form not in FORMATS:
        raise UserError(f"--format {form}: no such format; allowed: {', '.join(FORMATS)}")
    data: Any
    match path.suffix:
        case ".json":
            data = parsed_json(text, file=file)
        case ".toml":
            data = parsed_toml(text, file=file)
        case ".yaml" | ".yml":
            data = parsed_yaml(text, file=file)
        case ".py":
            raise UserError(
                f"{file}: a Python script is not read; give the configuration that it is started with, and its own "
                f"settings, such as the batch, by --set; {_allowed()}"
            )
        case ".md" | ".rst" | ".ipynb":
            raise UserError(
                f"{file}: is a document, not a script; give the command line in it on stdin (`-`); {_allowed()}"
            )
        case _ if text.lstrip().startswith("{"):
            data = parsed_json(text, file=file)
        case _:
            return _of_script(path, text, form, variables)
    if variables:
        raise UserError(f"{file}: --variable {next(iter(variables))}: is for scripts, and this is none")
    looks = _looks_like(data, file)
    name = form or looks
    if name is None:
        raise UserError(f"{file}: is of no known format; say --format; {_allowed()}")
    return name, arguments_of(data, file=file) if name == "megatron" else flattened(data, file=file)


def _of_script(path: Path, text: str, form: str | None, variables: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the format of a script's or command line's arguments, and these."""
    arguments = arguments_in(text, file=str(path), variables=variables, folder=path.parent)
    name = "trainer" if arguments.keys() & OF_TRAINER else "megatron"
    if not arguments or form not in (None, name):
        usual = "--per_device_train_batch_size" if form == "trainer" else "--micro-batch-size"
        raise UserError(f"{path}: holds no arguments such as {usual} 1; {_allowed()}")
    if name == "trainer":  # whose names have underscores
        arguments = {
            key if key.startswith(RANKS_OF) else key.replace("-", "_"): value for key, value in arguments.items()
        }
    return name, arguments


def _allowed() -> str:
    return f"allowed: files of {', '.join(FORMATS)}"


SIGNS: dict[str, tuple[str, ...]] = {
    "trainer": ("per_device_train_batch_size", "model_name_or_path", "finetuning_type"),
    "accelerate": ("distributed_type", "compute_environment", "fsdp_config.fsdp_version"),
    "axolotl": ("base_model",),
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16"),
    "megatron": ("MODEL_ARGS", "model_parallel", "language_model", "--micro-batch-size", "tensor_model_parallel_size"),
    "torchtitan": ("parallelism", "activation_checkpoint", "job"),
    "automodel": ("step_scheduler", "recipe", "dist_env"),
}
"""Top-level keys that identify a file's format; formats are tried in this order."""

NOT_READ: dict[str, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref",),
    "nanotron": ("parallelism", "tokens"),
    "GPT-NeoX": ("pipe_parallel_size", "model_parallel_size"),
    "Lingua": ("model", "optim", "data", "distributed"),
    "verl's supervised fine-tuning": ("trainer", "optim", "data"),
    "NeMo Automodel's diffusion": ("flow_matching", "step_scheduler"),
    "Weights & Biases (a record of a run: give the file that started it)": ("_wandb",),
    "PRIME-RL": ("trainer", "orchestrator"),
    "PRIME-RL's supervised fine-tuning": ("model", "optim", "data"),
    "NeMo, or of another program with the tables trainer and model": ("trainer", "model"),
    "LitGPT": ("out_dir", "train"),
    "LLaMA-Factory's version 1": ("model", "train_dataset"),
    "LLaMA-Factory with Megatron-LM (give Megatron-LM's arguments)": (
        "pipeline_model_parallel_size",
        "model_name_or_path",
    ),
    "open-instruct": ("with_tracking", "model_name_or_path"),
    "ms-swift": ("tuner_type", "model"),
    "torchtune": ("checkpointer", "optimizer"),
    "FlagScale (give its arguments as a command line of Megatron-LM)": ("system", "model"),
    "Megatron-Bridge (give its sizes and batch as Megatron-LM's arguments)": ("model", "train", "ddp"),
    "Megatron-Bridge's recipes (give their sizes and batch as Megatron-LM's arguments)": (
        "train",
        "optimizer",
        "scheduler",
        "checkpoint",
    ),
    "MosaicML Composer or OLMo": ("device_train_microbatch_size",),
    "Kubernetes (give the command that its containers run)": ("apiVersion", "kind"),
    "SkyPilot (give the command in its 'run')": ("resources", "run"),
}
"""Top-level keys, all of them, of files that would be taken for another program's, or for one's of unknown form."""


def _looks_like(data: Any, file: str) -> str | None:
    if not isinstance(data, dict):
        return None
    if "cluster" in data and "plan" in data:
        raise UserError(f"{file}: is a scenario already; give it to `gssim run`")
    if "model_type" in data and "architectures" in data and "_wandb" not in data:
        raise UserError(f"{file}: is the config of a model; give it by --model, and the training's file here")
    keys = {str(key).replace("-", "_") for key in data}
    for program, signs in NOT_READ.items():
        if keys.issuperset(signs):
            raise UserError(f"{file}: is a configuration of {program}, which is not read; {_allowed()}")
    if "trainer" in data and "data" in data:
        raise UserError(f"{file}: is a NeMo or Lightning recipe, which is Python's; {_allowed()}")
    return next((name for name, signs in SIGNS.items() if any(sign in data for sign in signs)), None)


def _read(name: str, keys: Keys, cluster: Cluster, model: Model) -> Training:
    match name:
        case "deepspeed":
            return deepspeed(keys)
        case "accelerate":
            return accelerate(keys, cluster)
        case "megatron":
            return megatron(keys)
        case "torchtitan":
            return torchtitan(keys)
        case "automodel":
            return automodel(keys)
        case "trainer":
            return trainer(keys, cluster, model)
        case _:
            return axolotl(keys, cluster)


def _written(
    path: Path, form: str, entries: Sequence[Entry], places: dict[str, str], keys: Keys, out: Path | None
) -> str:
    """Return the scenario's TOML, with comments on where each key comes from."""
    folder = out.parent if out is not None else Path()

    def place(name: str) -> str:
        if not Path(name).suffix or not Path(name).is_file():
            return name
        return os.path.relpath(name, folder) if not Path(name).is_absolute() else name

    lines = [
        f"# How long does a step of {one_line(path.name)} ({form}) take on this cluster, and does it fit?",
        "# Written by gssim import; behind each key what it was read from.",
        f"cluster = {toml(place(places['cluster']))}  # --cluster",
    ]
    tables: dict[str, list[Entry]] = {"workload": [], "plan": [], "run": []}
    for entry in entries:
        table, dot, _ = entry.key.partition(".")
        if dot:
            tables.setdefault(table, []).append(entry)
        else:
            lines.append(f"{entry.key} = {toml(entry.value)}  # {entry.comment}")
    for table, of_table in tables.items():
        if not of_table:
            continue
        lines += ["", f"[{table}]"]
        if table == "workload":
            lines.append(f"model = {toml(place(places['model']))}  # --model")
        for entry in of_table:
            word = "default: " if entry.is_default else ""
            key = entry.key.partition(".")[2]
            lines.append(f"{key} = {toml(entry.value)}  # {word}{one_line(entry.comment)}")
    lines += ["", "# Without effect here, or approximated:"] if keys.listed else []
    for reason, noted in _by_reason(keys):
        lines += [f"# {one_line(reason)}:", *(f"#   {one_line(line)}" for line in noted)]
    return "\n".join(lines) + "\n"


def _by_reason(keys: Keys) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the lines of listed keys by reason: a file of a program has dozens of keys, and few reasons."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for line, reason in sorted(keys.listed):
        by_reason[reason].append(line)
    return tuple((reason, tuple(lines)) for reason, lines in by_reason.items())


def _check(text: str, path: Path, cluster: Path, model: Path, entries: Sequence[Entry]) -> None:
    """Raise UserError if the scenario cannot run, with the origin of the key at fault."""
    tables = parsed_toml(text, file=str(path))
    tables["cluster"], tables["workload"]["model"] = str(cluster.resolve()), str(model.resolve())
    tables.setdefault("name", path.stem or "imported")
    try:
        load_scenario(path, tables=tables, gradients_needed=False)
    except UserError as error:
        from_file = next((entry for entry in entries if f" {entry.key} = " in str(error)), None)
        reason = f" ({from_file.key} is from {from_file.comment})" if from_file is not None else ""
        raise UserError(f"{error}{reason}") from None
