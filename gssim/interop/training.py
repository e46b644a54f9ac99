"""A training as other programs' files describe it, and the scenario that it becomes on a model and a cluster.

Importers fill in a `Training`. `scenario_of` checks its sizes against model and cluster, resolves what the file leaves
open, and returns the scenario's entries, each with the key from which it was read. Everything that the file does not
give has a default, which is marked as such.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from gssim.cluster import Cluster
from gssim.errors import UserError
from gssim.interop.reading import Keys, Value
from gssim.plan import METHODS
from gssim.plan.pipeline_schedule import INTERLEAVED
from gssim.scenario.vocabulary_slices import (
    shares_embedding,
    token_embedding,
    undivided_embedding_reason,
    undivided_loss_reason,
)
from gssim.units import PRECISION_BYTES, Precision, counted
from gssim.workload import HuggingFace, ImageInput, Model, unrolled

OPTIMIZERS: dict[str, tuple[str, str, str | None]] = {
    "adam": ("adam", "default", None),
    "adamw": ("adamw", "default", None),
    "sgd": ("sgd", "default", None),
    "momentum": ("sgd-momentum", "default", None),
    "fusedadam": ("adamw", "fused", None),
    "adamw_torch": ("adamw", "default", None),
    "adamw_hf": ("adamw", "for-loop", None),
    "adamw_torch_fused": ("adamw", "fused", None),
    "adamw_apex_fused": ("adamw", "fused", None),
    "torch.optim.adam": ("adam", "default", None),
    "torch.optim.adamw": ("adamw", "default", None),
    "torch.optim.sgd": ("sgd", "default", None),
    "transformer_engine.pytorch.optimizers.fused_adam.fusedadam": ("adamw", "fused", None),
    **dict.fromkeys(
        (
            *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit"),
            *("bitsandbytes.optim.adamw8bit", "torchao.optim.adamw8bit"),
        ),
        ("adamw", "fused", "8-bit"),
    ),
    **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit", "torchao.optim.adamw4bit"), ("adamw", "fused", "4-bit")),
    "muon": ("muon", "default", None),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), ("adamw", "fused", None)),
}
"""(optimizer, implementation, precision of its moments) by other programs' names in lower case."""
OTHER_OPTIMIZER = "no such optimizer here: its state and its update are not modelled"

AMSGRAD = "a third value for each parameter, which AMSGrad keeps, is not modelled"

WHOLE_MODEL_COMPILED = (
    "the whole model is compiled there; modelled are blocks that are compiled one by one, as by torchtitan and by "
    "Accelerate's regional compilation"
)

PURE_16_BIT = (
    "approximated: parameters and optimizer state there are in 16 bits alone; here the optimizer updates fp32 copies"
)

PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "no", "false", "torch.float32"), "fp32"),
}

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


@dataclass
class Training:
    """Everything that a file says about a training; None where it says nothing."""

    world: Value | None = None
    """Number of ranks; absent: all devices of the cluster."""
    dp: Value | None = None
    """Number of data-parallel ranks over both axes."""
    dp_replicate: Value | None = None
    dp_shard: Value | None = None
    """Size of the axis; -1: all remaining ranks."""
    tp: Value | None = None
    pp: Value | None = None
    cp: Value | None = None
    context_exchange: Value | None = None
    """ring, gather or all-to-all; None: a ring."""
    context_split: Value | None = None
    """plain, if sequences are cut in one part a rank; None: in balanced parts."""
    ep: Value | None = None
    etp: Value | None = None
    """Number of tensor ranks that cut each divided expert; None: all of them."""
    sharding: Value | None = None
    """none, zero1, zero2 or zero3."""
    sharding_in_stages: Value | None = None
    """Sharding in a pipeline, if `sharding` is none; None: none too."""
    zero1_implementation: str = "torch"
    sequence_parallel: Value | None = None
    clip_norm: Value | None = None
    embedding_parallel: Value | None = None
    """Whether tensor-parallel ranks divide the token embedding, if it can be divided here."""
    loss_parallel: Value | None = None
    """Whether tensor-parallel ranks divide the vocabulary of head and loss, if it can be divided here."""
    micro_batch: Value | None = None
    """Samples of one forward on a rank."""
    accumulation: Value | None = None
    """Number of micro-batches of a rank in a step."""
    global_batch: Value | None = None
    pipeline_micro_batch: Value | None = None
    """Samples of a pipeline's micro-batch, if the pipeline divides `micro_batch` further."""
    sequence: Value | None = None
    precision: Value | None = None
    gradient_precision: Value | None = None
    reduce_precision: Value | None = None
    divided_reduce_precision: Value | None = None
    """DeepSpeed's precision of reductions where ranks divide sequences; absent: fp32."""
    autocast: Value | None = None
    tf32: Value | None = None
    adapters: Value | None = None
    """The table of `workload.adapters`; its targets are names of maps, or patterns of their paths."""
    fused_loss: Value | None = None
    frozen_precision: Value | None = None
    """`nf4-double` and so on; None: frozen weights have the training precision."""
    trained: Value | None = None
    """Regular expressions (in axolotl's form) for the names of the only trained parameters."""
    loss_scale: Value | None = None
    """Loss scale in fp16; absent: dynamic."""
    optimizer: Value | None = None
    optimizer_implementation: Value | None = None
    optimizer_state_precision: Value | None = None
    learning_rate: Value | None = None
    weight_decay: Value | None = None
    momentum: Value | None = None
    recompute: Value | None = None
    schedule: Value | None = None
    short_schedules: bool = False
    """Whether the program runs 1f1b with fewer micro-batches than stages."""
    even_stages: bool = False
    """Whether every stage has equally many blocks, except as the next two fields say; if not, stages are balanced."""
    ends_in_blocks: tuple[Value, Value] | None = None
    """How many blocks embedding and head count as where torchtitan divides blocks into stages."""
    most_blocks_per_stage: Value | None = None
    """With `ends_in_blocks`, the size of stages from which their number follows."""
    stage_modules: Value | None = None
    """Names of the modules in each stage, as torchtitan has them."""
    first_stage_blocks: Value | None = None
    last_stage_blocks: Value | None = None
    stages_per_rank: Value | None = None
    blocks_per_stage: Value | None = None
    offload: Value | None = None
    """optimizer or parameters, as in `plan.offload`."""
    receive_buffers: Value | None = None
    """Receive buffers of a pipeline's stages, if there is a pipeline."""
    gradient_sync: Value | None = None
    bucket_bytes: Value | None = None
    bucket_elements: Value | None = None
    """Largest number of elements in a gradient bucket of DeepSpeed's stages 1 and 2."""
    bucket_parameters: Value | None = None
    """Least number of parameters in a gradient bucket of Megatron-LM; 0: its default; None: another program's file."""
    bucket_count: Value | None = None
    """Number of gradient buckets of Megatron-LM, all of which have so many of the rank's parameters."""
    overlap: Value | None = None
    gathers_beside_forward: Value | None = None
    """Whether parameters that Megatron-LM's distributed optimizer updated are gathered beside the next forward."""
    gathered_inputs: Value | None = None
    """Whether inputs are gathered again in the backward, with sequence parallelism; None: they are kept for it."""
    tp_overlap: Value | None = None
    """Whether exchanges of sequence parallelism overlap with matrix products."""
    async_input_gradients: Value | None = None
    """Whether all-reduces of input gradients over tensor-parallel ranks overlap with weight-gradient products."""
    fused_maps: bool = False
    """Whether queries, keys and values are one map of a block, and gate and up another."""
    compiled: Value | None = None
    """Whether each block is compiled by itself; None if the program does not compile."""
    seed: Value | None = None
    architecture: dict[str, Value] = field(default_factory=dict)
    """Sizes of the model, by the names of `ARCHITECTURE`."""
    base_model: Value | None = None
    """Name of the model, which may say how many parameters it has; see `stated_elements`."""
    shares_embedding: Value | None = None
    """Whether the model's head has the token embedding's weight; None if the file does not describe the model."""

    def has_context_ranks(self, keys: Keys) -> bool:
        """Return whether the file or `--set` divides sequences among ranks; these then shard state too."""
        return "plan.cp" in keys.overridden or (self.cp is not None and self.cp.value != 1)


BATCH = "workload.global_batch_size"


@dataclass(frozen=True)
class Entry:
    """One key of the scenario to be written."""

    key: str
    value: Any
    comment: str
    is_default: bool = False

    @classmethod
    def of(cls, key: str, value: Value) -> "Entry":
        """Return the entry of a value as it was read."""
        return cls(key, value.value, value.origin)


def scenario_of(
    training: Training, keys: Keys, model: Model, cluster: Cluster, overrides: dict[str, Any]
) -> list[Entry]:
    """Return the scenario's entries in the order of the file; contradictions with model or cluster are refused in
    `keys`.

    `overrides`: values that `--set` gives, by scenario key; they replace those of the file.
    """
    known = sizes_of(model)  # sizes in the file must equal the model's
    for name, value in training.architecture.items():
        if name in known and known[name] != value.value:
            _refuse(keys, value, f"the model '{model.name}' has {name} = {known[name]}; give the right one by --model")
        elif name not in known and name.startswith("experts") and not model.expert_layers:
            _refuse(keys, value, f"the model '{model.name}' has no routed experts; give the right one by --model")
        elif name not in known and value.key in keys.values:
            keys.note(value.key, f"the model is --model ('{model.name}')")
    _check_shared_embedding(training, keys, model)
    _check_base_model(training, keys, model)
    if {"workload.optimizer", "workload.optimizer_implementation"} & set(overrides):
        training.optimizer_state_precision = None
    _check_compiled(training, keys, model)
    _recompute_inside(training, keys, model)
    if training.clip_norm is not None and not training.clip_norm.value:
        training.clip_norm = None  # it clips nothing
    if keys.refused:
        return []
    plan = _plan(training, keys, model, cluster, overrides)
    _scale_loss(training, plan, overrides)
    workload = _workload(training, keys, model)
    if keys.refused:
        return []
    entries = [*workload, *plan]
    if training.seed is not None:
        entries.append(Entry.of("run.seed", training.seed))
    return entries


STATED_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z\d])(?!-\d+e\b)", re.IGNORECASE)
"""A number of parameters in a model's name; where a number of experts follows it, it is of those that a token meets."""
ROUNDED_RATIO = 1.5
"""By how much names round: Gemma-2B has 2.5e9 parameters, Llama-3.2-1B 1.24e9."""


def stated_elements(name: str) -> float | None:
    """Return the number of parameters that a model's name says, in billions (B) or millions (M); None if it says none.

    >>> stated_elements("NousResearch/Meta-Llama-3-8B"), stated_elements("Qwen/Qwen3-30B-A3B-4bit")
    (8000000000.0, 30000000000.0)
    >>> stated_elements("mistralai/Mixtral-8x7B-v0.1"), stated_elements("meta-llama/Llama-4-Scout-17B-16E")
    (None, None)
    """
    found = STATED_SIZE.search(_last_part(name))
    return None if found is None else float(found[1]) * (1e9 if found[2].lower() == "b" else 1e6)


def _last_part(name: str) -> str:
    """Return a model's name without the organization or folders before it."""
    return name.rstrip("/").rpartition("/")[2]


STATED_MIXTURE = re.compile(r"(?<![\w.])\d+x\d+(\.\d+)?b|b-a\d+(\.\d+)?b(?![a-z])|b-\d+e(?![a-z\d])", re.IGNORECASE)
"""A number of experts, or of the parameters that a token meets: `8x7B`, `30B-A3B`, `17B-16E`."""


def _check_base_model(training: Training, keys: Keys, model: Model) -> None:
    """Refuse a model of another size than the name in the file says, and one without the experts that it says."""
    named = training.base_model
    if named is not None and STATED_MIXTURE.search(_last_part(str(named.value))) and not model.expert_layers:
        _refuse(keys, named, f"the model '{model.name}' has no routed experts; give the right one by --model")
        return
    stated = None if named is None else stated_elements(str(named.value))
    if named is None or stated is None:
        return
    held = model.elements + model.frozen_elements
    if not held / ROUNDED_RATIO <= stated <= held * ROUNDED_RATIO:
        reason = f"the model '{model.name}' has {held / 1e9:.3g}e9 parameters; give the right one by --model"
        _refuse(keys, named, reason)


def _check_shared_embedding(training: Training, keys: Keys, model: Model) -> None:
    """Refuse a model whose head has a weight of its own if the file's has the token embedding's, and the reverse."""
    shares = training.shares_embedding
    if shares is not None and token_embedding(model) is not None and shares.value != shares_embedding(model):
        said = "has the token embedding's weight" if shares_embedding(model) else "has a weight of its own"
        _refuse(keys, shares, f"the head of the model '{model.name}' {said}; give the right one by --model")


def _refuse(keys: Keys, value: Value, reason: str, *replaced_by: str) -> None:
    """Refuse the key from which a value was read; a value from an option is named by that option."""
    key = value.origin if value.origin.startswith("--set ") else value.key
    keys.refuse(key, reason, replaced_by=replaced_by)


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
        _refuse(
            keys,
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
    _refuse(keys, compiled, reason)


def _scale_loss(training: Training, plan: list[Entry], overrides: dict[str, Any]) -> None:
    """Set the loss scale of a training in fp16, unless the scenario is to have another precision or cannot scale."""
    precision = training.autocast or training.precision
    asked = overrides.get("workload.precision", precision.value if precision else "fp32")
    methods = [entry.value for entry in plan if entry.key == "plan.method"]
    rules = METHODS.get(str(overrides.get("plan.method") or (methods[0] if methods else "")))
    if asked != "fp16" or precision is None or (rules is not None and rules.partition == "weight-gradient"):
        training.loss_scale = None
    else:
        training.loss_scale = training.loss_scale or Value("dynamic", precision.origin)


def sizes_of(model: Model) -> dict[str, int]:
    """Return the sizes of a model that its file gives, by the names of `ARCHITECTURE`."""
    module = model.module
    blocks = sum(layer.repeats for layer in model.layers if layer.block)
    config: dict[str, Any] = dict(module.arguments)
    if isinstance(module.hugging_face, HuggingFace):
        config = DEFAULTS_OF_TYPES.get(module.hugging_face.model_type, {}) | module.hugging_face.config
    found = sizes_in(config)
    if blocks:
        found["layers"] = blocks
    if not isinstance(model.input, ImageInput):
        found["vocabulary"] = model.input.vocabulary
    return found


def sizes_in(config: dict[str, Any]) -> dict[str, int]:
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


def _plan(training: Training, keys: Keys, model: Model, cluster: Cluster, overrides: dict[str, Any]) -> list[Entry]:
    sizes = _axes(training, keys, cluster, overrides)
    if sizes is None:
        return []
    ranks, dp, tp, pp, entries = sizes
    method = next(entry.value for entry in entries if entry.key == "plan.method")
    if not METHODS[method].can_replicate:
        training.reduce_precision = None  # nothing is reduced
    else:
        _reduce_divided_sequences(training, keys, overrides)
    if tp.value > 1 and method != "single":
        entries.append(Entry.of("plan.tp", tp))
    if pp.value > 1:
        entries.append(Entry.of("plan.pp", pp))
        entries += _pipeline(training, keys, model, pp.value)
        if training.receive_buffers is not None:
            entries.append(Entry.of("plan.receive_buffers", training.receive_buffers))
    asked = overrides.get("plan.method", method)
    if asked in ("zero1", "zero2") and training.sharding is not None:
        entries += _zero_implementation(training, keys, asked, training.sharding, tp.value, pp.value, overrides)
    if asked == "ddp" and training.zero1_implementation != "torch":
        keys.listed.append((entries[0].comment, COPIED_GRADIENTS))
    batch = _batch(training, keys, dp, pp.value, overrides)
    _shorten(training, entries, batch, pp.value)
    accumulates = any(entry.key == "plan.micro_batches" and entry.value > 1 for entry in batch)
    entries += _options(training, keys, method, tp.value, pp.value, accumulates=accumulates)
    entries += _sums_beside_products(training, tp.value, cluster, overrides)
    _note_separate_sums(training, keys, model, tp, overrides)
    entries += _megatron_bucket(training, asked, dp, model.elements // (tp.value * pp.value), overrides)
    entries += _gathers_beside_forward(training, keys, asked, pp.value, cluster, overrides)
    if not overrides.get("plan.sequence_parallel", True):
        entries = [entry for entry in entries if entry.key not in ("plan.gathered_inputs", "plan.tp_overlap")]
    entries += [*_offload(training, keys, cluster), *_vocabulary(training, keys, model, tp.value)]
    if ranks < len(cluster.devices) and method != "single":
        origin = training.world.origin if training.world else "what the file says"
        entries.append(Entry("plan.ranks", ranks, f"{origin}; the cluster has {len(cluster.devices)} devices"))
    return [*batch, *entries]


def _reduce_divided_sequences(training: Training, keys: Keys, overrides: dict[str, Any]) -> None:
    """Set the precision in which DeepSpeed reduces gradients where ranks divide sequences, by a key of its own.

    Source: DeepSpeed, runtime/engine.py: seq_parallel_communication_data_type.
    """
    cp, said = training.cp, training.divided_reduce_precision
    is_divided = cp is not None and overrides.get("plan.cp", cp.value) > 1
    is_engine = training.zero1_implementation == "deepspeed"
    if said is not None and not (is_engine and is_divided):
        keys.note(said.key, "no effect, as no sequence is divided")
    precision = _precision_of(training, overrides)
    if not is_engine or cp is None or not is_divided or precision == "fp32":
        return
    found = said or Value("fp32", f"{cp.origin}: seq_parallel_communication_data_type is not given: fp32")
    given = training.reduce_precision
    if given is not None and given.value != found.value:
        keys.note(given.key, f"no effect beside divided sequences, whose gradients are reduced in {found.value}")
    training.reduce_precision = found if found.value != precision else None


def _zero_implementation(
    training: Training, keys: Keys, method: str, sharding: Value, tp: int, pp: int, overrides: dict[str, Any]
) -> list[Entry]:
    """Return the entries for the implementation of ZeRO-1 or ZeRO-2, unless it is torch's, and for its buckets."""
    implementation, sequences = training.zero1_implementation, training.sequence_parallel
    if implementation == "torch" or (implementation == "megatron" and method == "zero2"):
        return []
    entry = Entry(f"plan.{method}_implementation", implementation, sharding.origin)
    if implementation == "megatron":
        return [entry]
    instead = "broadcasts of parameters, not gathers"
    several = {"sequence parallelism": tp > 1 and sequences is not None and sequences.value}
    if method == "zero2":
        instead = "parameters are gathered and gradients reduce-scattered in every micro-batch, as FSDP2 does"
        several |= {"pipelines": pp > 1, "divided experts": training.ep is not None and training.ep.value > 1}
    beside = next((name for name, is_there in several.items() if is_there), None)
    if beside is not None:
        keys.note(sharding.key, f"approximated beside {beside}: {instead}")
        return []
    elements = training.bucket_elements
    if elements is None or (pp > 1 and training.gradient_precision is not None):  # which stages reduce by themselves
        return [entry]
    size_bytes = elements.value * PRECISION_BYTES[_precision_of(training, overrides)]
    return [entry, Entry("plan.bucket_bytes", size_bytes, elements.origin)]


def _precision_of(training: Training, overrides: dict[str, Any]) -> Precision:
    asked: Precision | None = overrides.get("workload.precision")
    return asked or (training.precision.value if training.precision else "fp32")


COPIED_GRADIENTS = (
    "approximated: gradients are copied into buckets that exist beside them, as by torch; Megatron-LM's are these "
    "buckets alone, and DeepSpeed copies 5e8 elements at a time"
)
MEGATRON_BUCKET_PARAMETERS, MEGATRON_RANK_PARAMETERS = 40_000_000, 1_000_000
"""Least number of parameters in Megatron-LM's buckets; and parameters per data-parallel rank, which count instead if
that is more (core/distributed/distributed_data_parallel.py)."""
ONE_BUCKET = "1024 TiB"
"""Larger than all gradients together, so that they are reduced in one message after the backward."""


def _megatron_bucket(training: Training, method: str, dp: int, elements: int, overrides: dict[str, Any]) -> list[Entry]:
    """Return the size of Megatron-LM's gradient buckets, if it has any; without overlap it has a single bucket.

    `elements`: number of a rank's parameters, where stages and slices are taken for equal. Later stages of a pipeline
    have one bucket in any case, which is not modelled.
    """
    parameters = training.bucket_parameters
    if parameters is None or method not in ("ddp", "zero1"):
        return []
    if training.overlap is not None and not training.overlap.value:
        return [Entry("plan.bucket_bytes", ONE_BUCKET, f"{training.overlap.origin}: one bucket, after the backward")]
    count = parameters.value or max(MEGATRON_BUCKET_PARAMETERS, MEGATRON_RANK_PARAMETERS * dp)
    origin = parameters.origin
    if training.bucket_count is not None:
        count, origin = max(1, elements // training.bucket_count.value), training.bucket_count.origin
    size_bytes = count * PRECISION_BYTES[_precision_of(training, overrides)]
    return [Entry("plan.bucket_bytes", size_bytes, f"{origin}: {count} parameters")]


def _gathers_beside_forward(
    training: Training, keys: Keys, method: str, pp: int, cluster: Cluster, overrides: dict[str, Any]
) -> list[Entry]:
    """Return the entry for gathers of updated parameters beside the next forward; note why they are not."""
    asked = training.gathers_beside_forward
    if asked is None:
        return []
    optimizer = overrides.get("workload.optimizer", training.optimizer.value if training.optimizer else "")
    overlaps = overrides.get("plan.overlap", training.overlap is not None and training.overlap.value)
    gathers = method == "zero1" and overrides.get("plan.zero1_implementation", "megatron") == "megatron"
    reasons = {
        "the shards are those of the method, which gathers without it": not gathers or not overlaps,
        "approximated: in a pipeline each stage gathers after its update": pp > 1,
        "approximated: beside Muon matrices are gathered after the update": optimizer == "muon",
        "of no effect on this cluster, whose backend is gloo": cluster.backend != "nccl",
    }
    reason = next((text for text, is_so in reasons.items() if is_so), None)
    if reason is not None:
        keys.note(asked.key, reason)
        return []
    return [Entry.of("plan.publish.overlap", asked)]


def _shorten(training: Training, entries: list[Entry], batch: list[Entry], pp: int) -> None:
    """Rename a schedule of fewer micro-batches than stages: all forwards come first, as in gpipe."""
    many = next((entry.value for entry in batch if entry.key == "plan.micro_batches"), pp)
    for position, entry in enumerate(entries):
        if entry.key == "plan.schedule" and entry.value == "1f1b" and many < pp and training.short_schedules:
            comment = f"{entry.comment}; {many} micro-batches in {pp} stages run as in gpipe"
            entries[position] = Entry(entry.key, "gpipe", comment)


def _offload(training: Training, keys: Keys, cluster: Cluster) -> list[Entry]:
    """Return the entry of state kept in host memory; refuse it if the cluster does not describe that memory."""
    offload = training.offload
    if offload is None:
        return []
    if cluster.host is None:
        unknown = f"the cluster '{cluster.name}' does not say what its hosts' memory holds"
        reason = f"{unknown}: give one that has 'host', or --ignore the key"
        _refuse(keys, offload, reason, "plan.offload", "cluster.host")
        if "cluster.host" not in keys.overridden:  # ignored, replaced, or nothing is written
            return []
    return [Entry.of("plan.offload", offload)]


def _vocabulary(training: Training, keys: Keys, model: Model, tp: int) -> list[Entry]:
    """Return the entries of a vocabulary divided among tensor-parallel ranks, if this model's can be divided here."""
    whole = {
        "embedding_parallel": (training.embedding_parallel, undivided_embedding_reason, "the token embedding of"),
        "loss_parallel": (training.loss_parallel, undivided_loss_reason, "the loss of"),
    }
    asked = {key: value for key, (value, _, _) in whole.items() if value is not None and value.value and tp > 1}
    divided = {key: value for key, value in asked.items() if whole[key][1](model) is None}
    if len(divided) == 1 and shares_embedding(model):
        divided = {}
    for key in (key for key in asked if key not in divided):
        what = f"approximated: {whole[key][2]} tensor-parallel ranks is whole"
        keys.listed.append((asked[key].origin, what))
    return [Entry(f"plan.{key}", True, value.origin) for key, value in divided.items()]


def _options(training: Training, keys: Keys, method: str, tp: int, pp: int, *, accumulates: bool) -> list[Entry]:
    """Return the entries of recomputation, synchronization, buckets and overlap."""
    entries = []
    recompute, sync = training.recompute, training.gradient_sync
    if recompute is not None:
        entries.append(Entry.of("plan.recompute", recompute))
    else:
        entries.append(Entry("plan.recompute", "none", "as the file does not say: the user's code decides", True))
    rules = METHODS[method]
    differs = sync is not None and sync.value != rules.gradient_sync
    if sync is not None and differs and pp == 1 and accumulates and rules.gradients == "reduce-scatter":
        entries.append(Entry.of("plan.gradient_sync", sync))
    buckets = training.bucket_bytes
    if buckets is not None:
        if method == "ddp" and pp == 1:
            entries.append(Entry.of("plan.bucket_bytes", buckets))
        else:
            keys.note(buckets.key, f"method '{method}' has no buckets of this size here")
    if training.overlap is not None and training.overlap.value is False:
        entries.append(Entry("plan.overlap", False, training.overlap.origin))
    if training.sequence_parallel is not None and training.sequence_parallel.value and tp > 1:
        entries.append(Entry("plan.sequence_parallel", True, training.sequence_parallel.origin))
        if training.gathered_inputs is not None:
            entries.append(Entry.of("plan.gathered_inputs", training.gathered_inputs))
        if training.tp_overlap is not None and training.tp_overlap.value:
            entries.append(Entry("plan.tp_overlap", True, training.tp_overlap.origin))
    return entries


def _note_separate_sums(training: Training, keys: Keys, model: Model, tp: Value, overrides: dict[str, Any]) -> None:
    """List that tensor-parallel ranks sum the gradient of an input more often than Megatron-LM does.

    Its queries, keys and values are one map, and so are gate and up: a block has two all-reduces in the backward. Maps
    of their own, as in Hugging Face's Llama, each have an all-reduce here, as under DTensor. With sequence parallelism
    their common input is gathered once, and its gradient scattered once.
    """
    sequences = training.sequence_parallel
    divides = overrides.get("plan.sequence_parallel", sequences is not None and sequences.value)
    if not training.fused_maps or tp.value == 1 or divides:
        return
    blocks = [[each.moment.phase for each in layer.reductions] for layer in model.sliced_layers or () if layer.block]
    most = max((phases.count("b") for phases in blocks), default=0)
    if most > 2:
        what = f"approximated: {most} sums of input gradients a block, one a map; Megatron-LM, which fuses these, has 2"
        keys.listed.append((tp.origin, what))


def _sums_beside_products(training: Training, tp: int, cluster: Cluster, overrides: dict[str, Any]) -> list[Entry]:
    """Return the entry for sums of input gradients that overlap with products, which gloo cannot do.

    There is none with sequence parallelism: there, Megatron-LM's reduce-scatters and second gathers slow down the
    products beside them by about as much as they are hidden, and this slowdown is not modelled (Korthikanti et al.
    2022, table 4).
    """
    asked, sequences = training.async_input_gradients, training.sequence_parallel
    divides = overrides.get("plan.sequence_parallel", sequences is not None and sequences.value)
    if asked is None or not asked.value or tp == 1 or cluster.backend != "nccl" or divides:
        return []
    return [Entry("plan.async_input_gradients", True, asked.origin)]


def _axes(
    training: Training, keys: Keys, cluster: Cluster, overrides: dict[str, Any]
) -> tuple[int, int, Value, Value, list[Entry]] | None:
    """Return ranks, data-parallel ranks, tp, pp, and the entries of the method and of its own axes."""
    devices = len(cluster.devices)
    world = training.world
    ranks: int = overrides.get("plan.ranks") or (world.value if world else devices)
    if ranks > devices:
        if world is not None:
            what = f"{ranks} ranks in all, and the cluster '{cluster.name}' has {devices} devices"
            _refuse(keys, world, what, "plan.ranks")
        return None
    one = Value(1, "not in the file: 1")
    tp, pp, cp = (
        Value(overrides[key], f"--set {key} = {overrides[key]}")
        if (key := f"plan.{axis}") in overrides
        else given or one
        for axis, given in (("tp", training.tp), ("pp", training.pp), ("cp", training.cp))
    )
    cut = tp.value * pp.value * cp.value
    if ranks % cut:
        blamed = next((axis for axis in (pp, tp) if axis.value > 1), cp)
        product = "tensor times pipeline ranks" if cp.value == 1 else "tensor times pipeline times context ranks"
        _refuse(keys, blamed, f"{product} are {cut}, which does not divide {ranks} ranks")
        return None
    dp = ranks // cut
    if training.dp is not None and training.dp.value not in (-1, dp):
        _refuse(keys, training.dp, f"{ranks} ranks of which {cut} share a replica leave {dp}")
        return None
    if pp.value > 1 and training.zero1_implementation == "deepspeed":
        _in_deepspeeds_stages(training, keys)
    entries = _method(training, keys, dp, tp.value, pp.value, cp.value)
    if entries is None:
        return None
    if cp.value > 1:
        entries.append(Entry.of("plan.cp", cp))
        exchange = training.context_exchange or Value("ring", f"{cp.origin}: keys and values in a ring")
        if exchange.value != "all-to-all":
            entries.append(Entry.of("plan.context_exchange", exchange))
        if overrides.get("plan.context_exchange", exchange.value) != "all-to-all":
            entries += _of_ring(training)
    return ranks, dp, tp, pp, [*entries, *_experts(training, keys, tp)]


def _of_ring(training: Training) -> Iterator[Entry]:
    """Yield the entries of an attention in blocks; torch's, where blocks are compiled, waits for its exchanges.

    Source: torch 2.6, distributed/_functional_collectives.py, _maybe_wrap_tensor: a traced collective is followed by
    its wait, which inductor does not move (_inductor/config.py, reorder_for_compute_comm_overlap = False).
    """
    if training.context_split is not None:
        yield Entry.of("plan.context_split", training.context_split)
    if training.compiled is not None and training.compiled.value:
        yield Entry("plan.context_overlap", False, f"{training.compiled.origin}: compiled blocks wait for exchanges")


def _in_deepspeeds_stages(training: Training, keys: Keys) -> None:
    """Set what differs in DeepSpeed's pipelines: BF16_Optimizer, and reductions that overlap with nothing.

    Source: DeepSpeed, runtime/engine.py, _configure_zero_optimizer; runtime/pipe/engine.py, _exec_reduce_grads.
    """
    overlap, whole = training.overlap, training.sharding is None or training.sharding.value == "none"
    in_stages = training.sharding_in_stages
    if in_stages is not None and (whole or training.sharding is in_stages):
        training.sharding = in_stages
        # runtime/bf16_optimizer.py adds gradients up in fp32, and sums these over replicas, in 5e8 elements at a time
        in_fp32 = Value("fp32", in_stages.origin)
        training.gradient_precision, training.reduce_precision = in_fp32, training.reduce_precision or in_fp32
        keys.listed.append((in_stages.origin, COPIED_GRADIENTS))
    if overlap is not None and overlap.value:
        training.overlap = Value(False, f"{overlap.origin}: of no effect in a pipeline")


def _experts(training: Training, keys: Keys, tp: Value) -> Iterator[Entry]:
    """Yield the entries of divided experts; refuse experts that tensor ranks cut too."""
    if training.ep is None or training.ep.value == 1:
        return
    yield Entry.of("plan.ep", training.ep)
    if tp.value == 1:
        return
    etp = training.etp or Value(tp.value, f"{tp.origin}: experts are cut among as many")
    if etp.value != 1:
        unsaid = " (expert-tensor-parallel-size, by default as many)" if training.etp is None else ""
        why = f"experts that tensor ranks cut too cannot be simulated; allowed: 1{unsaid}"
        _refuse(keys, etp, why, "plan.etp")
    yield Entry.of("plan.etp", etp)


def _method(training: Training, keys: Keys, dp: int, tp: int, pp: int, cp: int) -> list[Entry] | None:
    """Return entries of the method and of the data axes that it sets; state is sharded over `cp` ranks too."""
    sharding = training.sharding or Value("none", "not in the file: no sharding")
    split = _data_axes(training, keys, dp, sharding)
    if split is None:
        return None
    replicas, shards = split
    if dp * cp == 1 or sharding.value == "none" or (shards * cp == 1 and sharding.value != "zero1"):
        why = sharding.origin if sharding.value == "none" else f"{sharding.origin}, but one rank has nothing to share"
        method = "ddp" if dp * cp > 1 else "pipeline" if pp > 1 else "tensor" if tp > 1 else "single"
        return [Entry("plan.method", method, why)]
    method = "hsdp" if sharding.value == "zero3" and replicas > 1 else sharding.value
    if pp > 1 and not METHODS[method].in_pipelines:
        _refuse(keys, sharding, f"method '{method}' cannot run in a pipeline yet", "plan.method")
        return None
    entries = [Entry("plan.method", method, sharding.origin)]
    if replicas > 1 and method != "zero1":
        for name, size in (("dp_replicate", replicas), ("dp_shard", shards)):
            value: Value | None = getattr(training, name)
            entries.append(Entry(f"plan.{name}", size, value.origin if value else "the rest of the ranks"))
    return entries


def _data_axes(training: Training, keys: Keys, dp: int, sharding: Value) -> tuple[int, int] | None:
    """Return the sizes of dp_replicate and dp_shard; one of them may be all remaining ranks."""
    replicate, shard = training.dp_replicate, training.dp_shard
    replicas = replicate.value if replicate else -1
    shards = shard.value if shard else -1
    if replicas == -1 and shards == -1:
        replicas = 1 if sharding.value != "none" else dp
    for mine, other in ((replicas, shards), (shards, replicas)):
        if mine == -1 and (other < 1 or dp % other):
            blamed = shard or replicate
            if blamed is not None:
                _refuse(keys, blamed, f"does not divide the {dp} data-parallel ranks")
            return None
    replicas = dp // shards if replicas == -1 else replicas
    shards = dp // replicas if shards == -1 else shards
    if replicas * shards != dp:
        blamed = shard or replicate
        if blamed is not None:
            _refuse(keys, blamed, f"replicas times shards are {replicas * shards}, the data-parallel ranks {dp}")
        return None
    return replicas, shards


def _pipeline(training: Training, keys: Keys, model: Model, ranks: int) -> list[Entry]:
    schedule, per_rank = training.schedule, training.stages_per_rank
    entries = [Entry.of("plan.schedule", schedule)] if schedule is not None else []
    layers = unrolled(model)
    blocks = [index for index, instance in enumerate(layers) if instance.layer.block]
    if training.stage_modules is not None:
        return [*entries, *_named_stages(training.stage_modules, keys, model, ranks)]
    if training.ends_in_blocks is not None:
        return [*entries, *_weighted_stages(training, keys, model, ranks)]
    if training.blocks_per_stage is not None:
        of = training.blocks_per_stage
        if len(blocks) % (of.value * ranks):
            _refuse(keys, of, f"stages of {of.value} blocks on {ranks} ranks do not divide the {len(blocks)} blocks")
            return []
        per_rank = Value(len(blocks) // (of.value * ranks), of.origin)
    count = ranks * (per_rank.value if per_rank is not None else 1)
    if not training.even_stages and (per_rank is None or per_rank.value <= 2):
        return entries
    stages = [len(blocks) // count] * count
    first, last = training.first_stage_blocks, training.last_stage_blocks
    if first is not None or last is not None:
        ends = [end for end in (first, last) if end is not None]
        rest, inner = len(blocks) - sum(end.value for end in ends), count - len(ends)
        stages = [rest // inner if inner > 0 else 0] * count
        stages[0] = first.value if first is not None else stages[0]
        stages[-1] = last.value if last is not None else stages[-1]
    origin = ", ".join(each.origin for each in (per_rank, first, last, training.pp) if each is not None)
    if sum(stages) != len(blocks) or min(stages) < 1:
        blamed = first or last or per_rank or training.pp
        if blamed is not None:
            _refuse(keys, blamed, f"the {len(blocks)} blocks of '{model.name}' do not divide so among {count} stages")
        return []
    return [*entries, Entry("plan.stages", _with_ends(stages, model), f"{origin}: as many blocks each")]


def _with_ends(stages: list[int], model: Model) -> list[int]:
    """Return the layers of stages of so many blocks: embeddings are the first stage's, final norm and head the last's.

    The loss is not counted.
    """
    layers = unrolled(model)
    blocks = [index for index, instance in enumerate(layers) if instance.layer.block]
    return [stages[0] + blocks[0], *stages[1:-1], stages[-1] + len(layers) - 2 - blocks[-1]]


def _named_stages(named: Value, keys: Keys, model: Model, ranks: int) -> list[Entry]:
    """Return the entry of stages whose modules a file names in the order of the model, as torchtitan has them."""
    layers = unrolled(model)
    blocks = [index for index, instance in enumerate(layers) if instance.layer.block]
    sizes = {"tok_embeddings": blocks[0], "norm": len(layers) - 3 - blocks[-1], "output": 1}
    names = [str(name) for part in named.value for name in part]
    order = ["tok_embeddings", *(f"layers.{number}" for number in range(len(blocks))), "norm", "output"]
    if names != order or len(named.value) % ranks or not all(named.value):
        what = f"must be the {len(blocks)} blocks of '{model.name}' in their order, in as many stages for each rank"
        _refuse(keys, named, what, "plan.stages")
        return []
    stages = [sum(sizes.get(str(name), 1) for name in part) for part in named.value]
    return [Entry.of("plan.stages", Value(stages, named.origin))]


def _weighted_stages(training: Training, keys: Keys, model: Model, ranks: int) -> list[Entry]:
    """Return the entry of torchtitan's stages: embedding and head count as blocks, and what is left over goes to the
    first stages.

    Source: torchtitan 0.2, distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part.
    """
    assert training.ends_in_blocks is not None
    assert training.pp is not None
    first, last = training.ends_in_blocks
    most, schedule = training.most_blocks_per_stage, training.schedule
    weighted = sum(instance.layer.block for instance in unrolled(model)) + first.value + last.value
    count = ranks * (2 if schedule is not None and schedule.value in INTERLEAVED else 1)
    origin = training.pp.origin
    if most is not None:
        count, origin = math.ceil(weighted / most.value), most.origin
    each, more = divmod(weighted, count)
    stages = [each + (number < more) for number in range(count)]
    stages[0] -= first.value
    stages[-1] -= last.value
    interleaves = schedule is not None and schedule.value in INTERLEAVED
    if min(stages) < 1 or count % ranks or (count > ranks) != interleaves:
        what = f"{count} stages of the blocks of '{model.name}' on {ranks} ranks cannot be made"
        _refuse(keys, most or training.pp, what, "plan.stages")
        return []
    comment = f"{origin}; embedding and head count as {first.value} and {last.value} blocks"
    return [Entry("plan.stages", _with_ends(stages, model), comment)]


def _batch(training: Training, keys: Keys, dp: int, pp: int, overrides: dict[str, Any]) -> list[Entry]:
    """Return the entries of the global batch and of the micro-batches; see `Training`.

    global = micro-batch * accumulation * data-parallel ranks; any two of these determine the third.
    """
    micro, many, total = training.micro_batch, training.accumulation, training.global_batch
    if "workload.global_batch_size" in overrides:
        total = Value(overrides["workload.global_batch_size"], "--set workload.global_batch_size")
    if "plan.micro_batches" in overrides:
        many = Value(overrides["plan.micro_batches"], "--set plan.micro_batches")
        micro = micro if total is None else None
    open_keys = set()
    if micro is None and (total is None or many is None):
        micro = Value(1, "one sample a micro-batch, as the file does not say")
        open_keys.add("plan.micro_batches")
    if total is None and many is None:
        many = Value(1, "no accumulation, as the file does not say")
        open_keys.add("plan.micro_batches")
    if total is None and micro is not None and many is not None:
        origin = f"{micro.origin}; {many.origin}; on {dp} data-parallel ranks"
        total = Value(micro.value * many.value * dp, origin)
        open_keys |= {"workload.global_batch_size"} if open_keys else set()
    elif total is not None:
        known = micro or many
        share = known.value * dp if known is not None else dp
        if not isinstance(total.value, int) or total.value % share:
            _refuse(keys, total, f"is no multiple of {share}: {known.origin if known else ''} on {dp} ranks", BATCH)
            return []
        rest = Value(total.value // share, f"{total.origin}; {known.origin if known else ''}; {dp} data-parallel ranks")
        micro, many = micro or rest, many or rest
    if micro is None or many is None or total is None:
        raise UserError(f"{keys.file}: says nothing of its batch")  # cannot happen: each format has a default
    if total.value != micro.value * many.value * dp:
        reason = (
            f"{counted(micro.value, 'sample')} times {many.value} micro-batches times {dp} data-parallel ranks are "
        )
        _refuse(keys, total, f"{reason}{micro.value * many.value * dp}", BATCH)
        return []
    pieces = _pieces(training, keys, micro, many, pp)
    return [
        Entry(BATCH, total.value, total.origin, BATCH in open_keys),
        Entry("plan.micro_batches", pieces.value, pieces.origin, "plan.micro_batches" in open_keys),
    ]


def _pieces(training: Training, keys: Keys, micro: Value, many: Value, pp: int) -> Value:
    """Return the number of micro-batches of a rank; a pipeline may divide them further."""
    piece = training.pipeline_micro_batch
    if piece is None or pp == 1:
        return many
    if many.value > 1:
        _refuse(keys, many, "a pipeline that is run several times for one update cannot be simulated; allowed: once")
    elif micro.value % piece.value:
        _refuse(keys, piece, f"does not divide the {counted(micro.value, 'sample')} of {micro.origin}")
    return Value(micro.value // piece.value, f"{micro.origin} in parts of {piece.origin}")


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


def _workload(training: Training, keys: Keys, model: Model) -> list[Entry]:
    _resolve_targets(training, keys, model)
    entries = []
    if not isinstance(model.input, ImageInput):
        longest = model.input.maximum_sequence_length
        sequence = training.sequence
        if sequence is None:
            reason = f"the longest of '{model.name}', as the file does not say"
            entries.append(Entry("workload.sequence_length", longest, reason, True))
        elif sequence.value > longest:
            _refuse(keys, sequence, f"the model '{model.name}' takes at most {longest}", "workload.sequence_length")
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
        _refuse(
            keys, adapters, "adapters in some blocks alone, or by such a pattern, cannot be told", "workload.adapters"
        )
        return
    found = tuple(name for name in maps if any(fnmatchcase(name, pattern) for pattern in patterns))
    if not found:
        _refuse(keys, adapters, f"match no linear map of the blocks; they are {', '.join(maps)}", "workload.adapters")
        return
    role = next((role for role, names in known.items() if set(names) == set(found)), None)
    training.adapters = Value(adapters.value | {"targets": role or sorted(found)}, adapters.origin)


def _frozen(training: Training, keys: Keys, model: Model) -> list[Entry]:
    """Return the entry of layers that are not trained; refuse patterns that freeze only parts of a layer."""
    given = training.trained
    if given is None or "workload.frozen" in keys.overridden:
        return []
    try:
        expressions = [_expression_of(each) for each in given.value]
    except re.error as error:
        _refuse(keys, given, f"not a regular expression: {error}", "workload.frozen")
        return []
    frozen, every = [], [each for each in unrolled(model) if each.layer.parameters]
    for instance in every:
        matched = [any(each.match(name) for each in expressions) for name in instance.parameter_names]
        if any(matched) != all(matched):
            name = instance.parameter_names[matched.index(True)]
            reason = f"of a layer some parameters alone, such as {name}, cannot be trained here"
            _refuse(keys, given, reason, "workload.frozen")
            return []
        if not matched[0]:
            frozen.append(instance.module)
    if len(frozen) == len(every):
        _refuse(keys, given, f"trains no parameter of '{model.name}'", "workload.frozen")
    elif frozen:
        return [Entry("workload.frozen", frozen, given.origin)]
    else:
        keys.note(given.key, f"freezes no parameter of '{model.name}'")
    return []


def _expression_of(pattern: str) -> re.Pattern[str]:
    r"""Return axolotl's expression: a dot is literal unless `+` follows, and row ranges at the end are ignored
    (freeze.py).

    >>> _expression_of("layers.4[4-9]+.mlp[:32]").pattern
    'layers\\.4[4-9]+\\.mlp'
    """
    return re.compile(re.sub(r"\.(?!\+)", r"\\.", re.sub(r"(?<=.)\[[0-9]*(:[0-9]*)?\]$", "", pattern)))


def optimizer_in(keys: Keys, training: Training, *names: str) -> None:
    """Read an optimizer and its implementation from the first of these keys that the file holds."""
    found = keys.choice(OPTIMIZERS, *names, sets="workload.optimizer", why=OTHER_OPTIMIZER)
    if found is not None:
        kind, implementation, state = found.value
        training.optimizer = Value(kind, found.origin)
        if implementation != "default":
            training.optimizer_implementation = Value(implementation, found.origin)
        if state is not None:
            training.optimizer_state_precision = Value(state, found.origin)
        if "paged" in found.origin:
            keys.listed.append((found.origin, "approximated: its paged state stays in the device's memory"))


def torchs_context_exchange(keys: Keys, *names: str) -> Value:
    """Return how torch's context parallelism exchanges keys and values, which a key may say; gathered by default."""
    said = keys.choice({"allgather": "gather", "alltoall": "ring"}, *names, sets="plan.context_exchange")
    return said or Value("gather", "torch's context parallelism gathers keys and values (its default)")


def launched(keys: Keys, processes: Value | None, hosts: Value | None) -> Value | None:
    """Return the number of ranks that torchrun or DeepSpeed starts: processes of each host, times hosts (absent: one).

    None if the processes of a host are not given.
    """
    if processes is None:
        if hosts is not None:
            keys.note(hosts.key, "without the processes of each: the ranks are the devices of --cluster")
        return None
    if hosts is None:
        return processes
    return Value(processes.value * hosts.value, f"{processes.origin}, {hosts.origin}")


def bucket_in(keys: Keys, training: Training, name: str) -> None:
    """Read the size of DDP's buckets, which a key gives in MiB; 0: the default."""
    bucket = keys.number(name, sets="plan.bucket_bytes")
    if bucket is not None and bucket.value:
        training.bucket_bytes = Value(int(bucket.value * 2**20), bucket.origin)
