"""The workload of an imported scenario: sequences, precisions, the optimizer, adapters, and what is not trained."""

import re
from fnmatch import fnmatchcase
from typing import Any

from gssim.interop.reading import Keys, Value
from gssim.interop.training import Entry, Training
from gssim.plan import METHODS
from gssim.workload import ImageInput, Model, unrolled

WORKLOAD_KEYS = (
    *("precision", "gradient_precision", "reduce_precision", "autocast", "tf32"),
    *("adapters", "frozen_precision", "fused_loss"),
    *("loss_scale", "optimizer", "optimizer_implementation", "optimizer_state_precision", "learning_rate"),
    *("weight_decay", "momentum", "clip_norm"),
)
"""Fields of `Training` that are keys of the workload as they are, in the order of the file."""
WORKLOAD_DEFAULTS = {
    "precision": ("fp32", "the program's own, as the file does not say"),
    "optimizer": ("adamw", "as the file does not say"),
}


def workload_entries(training: Training, keys: Keys, model: Model) -> list[Entry]:
    """Return the entries of the workload, besides the model."""
    _resolve_targets(training, keys, model)
    entries = []
    if not isinstance(model.input, ImageInput):
        longest = model.input.maximum_sequence_length
        sequence = training.sequence
        if sequence is None:
            reason = f"the longest of '{model.name}', as the file does not say"
            entries.append(Entry("workload.sequence_length", longest, reason, True))
        elif sequence.value > longest:
            keys.refuse_value(sequence, f"the model '{model.name}' takes at most {longest}", "workload.sequence_length")
        else:
            entries.append(Entry.of("workload.sequence_length", sequence))
    if training.learning_rate is not None and not training.learning_rate.value:
        keys.note(training.learning_rate.key, "a rate of 0 is replaced by the scenario's default")
        training.learning_rate = None
    _resolve_momentum(training)
    for name in WORKLOAD_KEYS:
        value: Value | None = getattr(training, name)
        if value is not None:
            entries.append(Entry.of(f"workload.{name}", value))
        elif name in WORKLOAD_DEFAULTS:
            entries.append(Entry(f"workload.{name}", *WORKLOAD_DEFAULTS[name], is_default=True))
    if training.adapters is not None and training.tp is not None and training.tp.value > 1:
        key = training.tp.key
        keys.note(key, "approximated beside adapters: ranks hold slices of these, as of the maps beside them")
    return [*entries, *_frozen(training, keys, model)]


def scale_loss(training: Training, plan: list[Entry], overrides: dict[str, Any]) -> None:
    """Set the loss scale of a training in fp16, unless the scenario is to have another precision or cannot scale."""
    precision = training.autocast or training.precision
    asked = overrides.get("workload.precision", precision.value if precision else "fp32")
    methods = [entry.value for entry in plan if entry.key == "plan.method"]
    rules = METHODS.get(str(overrides.get("plan.method") or (methods[0] if methods else "")))
    if asked != "fp16" or precision is None or (rules is not None and rules.partition == "weight-gradient"):
        training.loss_scale = None
    else:
        training.loss_scale = training.loss_scale or Value("dynamic", precision.origin)


def _resolve_momentum(training: Training) -> None:
    """Name SGD with a momentum, which keeps a value for each parameter; leave a momentum out that has no effect."""
    optimizer, momentum = training.optimizer, training.momentum
    if optimizer is not None and optimizer.value == "sgd" and momentum is not None and momentum.value:
        training.optimizer = Value("sgd-momentum", f"{optimizer.origin}; {momentum.origin}")
    elif optimizer is None or optimizer.value not in ("sgd-momentum", "muon"):
        training.momentum = None


def _resolve_targets(training: Training, keys: Keys, model: Model) -> None:
    """Replace patterns of adapters' targets by the maps of the model's blocks that they match."""
    adapters = training.adapters
    targets = adapters.value["targets"] if adapters is not None else ""
    known = {each.role: each.maps for each in model.adapted if each.role is not None}
    if adapters is None or isinstance(targets, str) or not any(set("*?[(\\|.") & set(each) for each in targets):
        return
    maps = known.get("all-linear", ())
    patterns = [each.rpartition(".")[2] or each for each in targets]
    if any(re.search(r"\d|[(\\|\[]", each) for each in targets) or not maps:
        keys.refuse_value(
            adapters, "adapters in only some blocks, or by such a pattern, cannot be simulated", "workload.adapters"
        )
        return
    matching = tuple(name for name in maps if any(fnmatchcase(name, pattern) for pattern in patterns))
    if not matching:
        keys.refuse_value(
            adapters, f"match no linear map of the blocks; they are {', '.join(maps)}", "workload.adapters"
        )
        return
    role = next((role for role, names in known.items() if set(names) == set(matching)), None)
    training.adapters = Value(adapters.value | {"targets": role or sorted(matching)}, adapters.origin)


def _frozen(training: Training, keys: Keys, model: Model) -> list[Entry]:
    """Return the entry of layers that are not trained; refuse patterns that freeze only parts of a layer."""
    given = training.trained
    if given is None or "workload.frozen" in keys.overridden:
        return []
    try:
        # axolotl (freeze.py): a dot is literal unless `+` follows, and row ranges at the end are ignored
        names = [re.sub(r"(?<=.)\[[0-9]*(:[0-9]*)?\]$", "", each) for each in given.value]
        expressions = [re.compile(re.sub(r"\.(?!\+)", r"\\.", each)) for each in names]
    except re.error as error:
        keys.refuse_value(given, f"not a regular expression: {error}", "workload.frozen")
        return []
    frozen, every = [], [each for each in unrolled(model) if each.layer.parameters]
    for instance in every:
        matched = [any(each.match(name) for each in expressions) for name in instance.parameter_names]
        if any(matched) != all(matched):
            name = instance.parameter_names[matched.index(True)]
            reason = f"of a layer some parameters alone, such as {name}, cannot be trained here"
            keys.refuse_value(given, reason, "workload.frozen")
            return []
        if not matched[0]:
            frozen.append(instance.module)
    if len(frozen) == len(every):
        keys.refuse_value(given, f"trains no parameter of '{model.name}'", "workload.frozen")
    elif frozen:
        return [Entry("workload.frozen", frozen, given.origin)]
    else:
        keys.note(given.key, f"freezes no parameter of '{model.name}'")
    return []
