"""Keys of Hugging Face's Trainer that its own scripts, LLaMA-Factory, TRL and axolotl share: the base model, FSDP and
DeepSpeed, adapters and precision; and what `accelerate launch`, its options and its file, sets of such a training.
"""

from typing import Any

from gssim.cluster import Cluster
from gssim.interop.accelerate import SHARDINGS, UNITS, accelerate, read_fsdp, shard_by, under_autocast
from gssim.interop.deepspeed import OF_ENGINE, deepspeed_file
from gssim.interop.models import config_in, sizes_in
from gssim.interop.reading import Keys, Value, flattened, named_file, parsed_json, parsed_yaml, read_bounded
from gssim.interop.training import PRECISIONS, PURE_16_BIT, Training

LORA = "adapters of this kind, or other frozen weights, cannot be simulated"
ATTENTION = "attention is that of the model file"
FUSED_KERNELS = "fused kernels (Liger, cut cross-entropy, ...) are not modelled"
FACTORY, TRL, PLAIN, AXOLOTL = "LLaMA-Factory", "TRL", "transformers", "axolotl"
"""Programs that run the Trainer."""
OPTIONS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""How the Trainer's key `fsdp` shards."""
REPLICAS = "neither fsdp nor deepspeed"
UNPACKED = (
    "approximated: all samples are this long; without packing there are shorter ones, padded to a batch's longest"
)
NO_PREFETCH = "approximated: the next unit's parameters are gathered beside the backward; the Trainer prefetches none"
GATHERED_AGAIN = (
    "approximated: FSDP1 gathers parameters once more for what gradient_checkpointing recomputes; "
    "fsdp_config.activation_checkpointing does not"
)
CONFIG_FILE = "launcher: config_file"
OF_LAUNCHER = (*OF_ENGINE, "dp_replicate", "dp_shard", "tp", "cp", "context_exchange", "loss_scale")
"""Fields of a training that an Accelerate file decides."""


def base_model_in(keys: Keys, training: Training, key: str) -> None:
    """Read the name of the base model, and its sizes where it is a folder with a config."""
    name = keys.raw(key)
    if name is None:
        return
    line = keys.line(key)
    training.base_model = Value(name, line)
    config = named_file(keys, f"{name}/config.json")
    if config is None:
        keys.note(key, "the model is --model, of as many parameters where the name says how many")
        return
    stated = config_in(config)
    if stated.get("quantization_config"):
        reason = f"{config} has quantization_config: weights in few bits"
        keys.refuse(key, reason, replaced_by=["workload.frozen_precision"])
    for size, value in sizes_in(stated).items():
        training.architecture[size] = Value(value, line)


def hyperparameters_in(keys: Keys, training: Training) -> None:
    """Read the learning rate, the weight decay, the norm of clipping, and the seed."""
    for name in ("learning_rate", "weight_decay"):
        setattr(training, name, keys.number(name, sets=f"workload.{name}"))
    training.clip_norm = keys.number("max_grad_norm") or Value(1.0, "max_grad_norm = 1.0 (the Trainer's default)")
    training.seed = keys.seed("seed")


def sharding_in(keys: Keys, training: Training, cluster: Cluster, *, program: str) -> bool:
    """Read the sharding, and return whether FSDP is on."""
    file = keys.raw("deepspeed")
    on = _fsdp_options(keys.raw("fsdp"))
    if on and isinstance(keys.raw("fsdp_config"), str):
        _read_fsdp_file(keys)
    config = any(key.startswith("fsdp_config.") and keys.has(key) for key in keys.values)
    shards = bool(on) or (config and program == AXOLOTL)  # axolotl's key fsdp may be missing
    if file and shards:
        keys.refuse("deepspeed", "contradicts fsdp: it is one or the other")
    elif file:
        _deepspeed_in(keys, training, str(file), program)
    elif shards:
        _fsdp_in(keys, training, cluster, on, program)
        # the Trainer leaves gradients whole until the last micro-batch (accelerate's no_sync)
        each = keys.enabled("accelerator_config.gradient_accumulation_kwargs.sync_each_batch")
        if each is not None:
            training.gradient_sync = Value("micro-batch", each.origin)
        elif training.accumulation is not None and training.accumulation.value > 1:
            training.gradient_sync = Value("step", f"{training.accumulation.origin}: the Trainer's no_sync")
    else:
        training.sharding = Value("none", REPLICAS)
    return shards


def _fsdp_options(on: Any) -> list[str]:
    """Return the options of the key `fsdp`: a list, a text of words, or true.

    >>> _fsdp_options("full_shard auto_wrap"), _fsdp_options(["shard_grad_op"]), _fsdp_options(True), _fsdp_options("")
    (['full_shard', 'auto_wrap'], ['shard_grad_op'], ['full_shard'], [])
    """
    if on is True or str(on).lower() == "true":
        return ["full_shard"]
    words = on.replace(",", " ").split() if isinstance(on, str) else on if isinstance(on, list) else []
    return [str(word).lower() for word in words]


def _read_fsdp_file(keys: Keys) -> None:
    """Add the keys of the JSON file that `fsdp_config` names."""
    path = named_file(keys, str(keys.raw("fsdp_config")))
    if path is None:
        keys.refuse("fsdp_config", "no such file, beside the file, in a folder above, or in the working directory")
        return
    content = flattened(parsed_json(read_bounded(path), file=str(path)), file=str(path))
    keys.values = keys.values | {f"fsdp_config.{key}": value for key, value in content.items()}


def _fsdp_in(keys: Keys, training: Training, cluster: Cluster, on: list[str], program: str) -> None:
    """Read FSDP's keys, all of which may have a prefix; `on`: the options in `fsdp`."""
    prefixed = (key for key in keys.values if key.startswith("fsdp_config.fsdp_") and key != "fsdp_config.fsdp_version")
    prefix = "fsdp_config.fsdp_" if any(prefixed) else "fsdp_config."
    read_fsdp(keys, training, cluster, prefix=prefix)
    if program == AXOLOTL:  # which sets Accelerate's variables by the keys of the table
        options = [word for word in on if word in OPTIONS]
        names_sharding = any(keys.has(f"{prefix}{name}") for name in ("reshard_after_forward", "sharding_strategy"))
        if options and not names_sharding:
            shard_by(keys, training, cluster, Value(SHARDINGS[options[0]], keys.line("fsdp")), "fsdp")
    else:
        _units_in(keys, training, cluster, on, prefix)
    unknown = [word for word in on if word not in (*OPTIONS, "auto_wrap", "offload")]
    if unknown:
        keys.refuse("fsdp", f"what {unknown[0]} does is not known")
    if "offload" in on:
        training.offload = Value("parameters", keys.line("fsdp"))
    pinned = keys.flag(f"{prefix}cpu_offload_pin_memory")
    if pinned is not None and not pinned.value and training.offload is not None:
        keys.refuse(f"{prefix}cpu_offload_pin_memory", "copies are from and to pinned memory here")
    precision = keys.raw(f"{prefix}mixed_precision_policy")
    if precision is not None and keys.values.get(str(precision)) not in (True, "auto", "true"):
        keys.refuse(f"{prefix}mixed_precision_policy", "contradicts the recipe's own precision")


def _units_in(keys: Keys, training: Training, cluster: Cluster, on: list[str], prefix: str) -> None:
    """Read how the Trainer shards and wraps: by its own options, and in FSDP2 by `reshard_after_forward`.

    Source: transformers, training_args.py, _process_fsdp_args.
    """
    options = [word for word in on if word in OPTIONS]
    reshard, strategy = (f"{prefix}{name}" for name in ("reshard_after_forward", "sharding_strategy"))
    versions = [name for name in ("fsdp_config.version", "fsdp_config.fsdp_version") if keys.has(name)]
    if versions and str(keys.raw(versions[0])) == "2":
        if not keys.has(reshard):
            line = f"{keys.line(versions[0])}: reshard_after_forward is not given: false"
            shard_by(keys, training, cluster, Value(SHARDINGS["false"], line), "fsdp")
    else:
        shard_by(keys, training, cluster, Value(SHARDINGS[(*options, "full_shard")[0]], keys.line("fsdp")), "fsdp")
        for name in (reshard, strategy):
            if keys.has(name):
                keys.note(name, "the Trainer reads its key fsdp instead")
        gathers = training.sharding is not None and training.sharding.value == "zero3"  # in the backward too
        if gathers and not keys.has(f"{prefix}backward_prefetch"):
            keys.listed.append((keys.line("fsdp"), NO_PREFETCH))
        if gathers and training.recompute is not None and training.recompute.value == "full":
            keys.listed.append((training.recompute.origin, GATHERED_AGAIN))
    if "auto_wrap" not in on:
        keys.refuse("fsdp", f"without auto_wrap the whole model is one unit; {UNITS}")


def _deepspeed_in(keys: Keys, training: Training, file: str, program: str) -> None:
    """Read the DeepSpeed file; batch and precision are those of the recipe."""
    flags = ("bf16", "bfloat16", "fp16", "float16")
    on = [PRECISIONS[flag] for flag in flags if str(keys.values.get(flag)).lower() in ("true", "auto")]
    precision = (*on, "bf16" if program == TRL and not keys.has("bf16") else "")[0]
    inner = deepspeed_file(keys, "deepspeed", file, fills=program, precision=precision)
    if inner is None:
        return
    if inner.precision is not None and inner.precision.value not in ("fp32", precision):
        keys.refuse("deepspeed", f"its {inner.precision.origin} contradicts the recipe: {precision or 'fp32'}")
    _engine_in(keys, training, inner, file)
    for name in ("micro_batch", "accumulation", "cp"):
        ours, theirs = getattr(training, name), getattr(inner, name)
        if theirs is not None and theirs.value != (ours.value if ours is not None else 1):
            origin = ours.origin if ours is not None else "the recipe, which has none"
            keys.refuse("deepspeed", f"its {theirs.origin} contradicts {origin}")


def _engine_in(keys: Keys, training: Training, inner: Training, file: str) -> None:
    """Set what DeepSpeed's engine decides; `inner`: the training that DeepSpeed's own file describes."""
    for name in OF_ENGINE:
        setattr(training, name, getattr(inner, name))
    for name in ("dp_shard", "tp", "loss_scale"):
        setattr(training, name, getattr(training, name) or getattr(inner, name))
    if inner.clip_norm is not None:
        training.clip_norm = inner.clip_norm
    if inner.optimizer is not None:  # the Trainer makes none of its own then
        for name in ("optim", "optimizer"):
            if keys.has(name):
                keys.note(name, f"the optimizer of {file} takes its place")
        for name in ("optimizer", "optimizer_implementation", "optimizer_state_precision"):
            setattr(training, name, getattr(inner, name))


def add_adapters(
    keys: Keys, training: Training, key: str, *, rank: Value, alpha: Value | None, targets: str | list[str]
) -> None:
    """Set low-rank adapters; `key`: the key that turns them on."""
    dropout = keys.number("lora_dropout")
    if dropout is not None and dropout.value:
        keys.note("lora_dropout", "approximated: the masks of dropout in adapters are not counted")
    table: dict[str, object] = {"rank": rank.value}
    if alpha is not None:
        table["alpha"] = alpha.value
    training.adapters = Value(table | {"targets": targets}, keys.line(key))


def quantize_frozen(keys: Keys, training: Training, given: Value, *, bits: int, nested: bool, format_key: str) -> None:
    """Set the format of frozen weights in 4 or 8 bits.

    `given`: the key that asks for it. `nested`: whether the scales of 4 bits are quantized too. `format_key`: the key
    that names the format of 4 bits.
    """
    if bits == 4 and keys.raw(format_key) not in (None, "nf4"):
        keys.refuse(format_key, "4 bits are nf4 here")
    training.frozen_precision = Value("int8" if bits == 8 else "nf4-double" if nested else "nf4", given.origin)


def precision_in(keys: Keys, training: Training, on: Value | None, loaded: Value) -> None:
    """Set the precision.

    `on`: that of automatic mixed precision, if it is on. `loaded`: that of the trained weights as they are loaded;
    FSDP and DeepSpeed make fp32 copies of them beside mixed precision. A value of None: not in the file.
    """
    training.precision = on or loaded
    sharded = training.sharding is not None and training.sharding.value != "none"
    engine = keys.has("deepspeed") or (sharded and on is not None)
    if engine or "workload.precision" in keys.overridden:
        if on is None and loaded.value != "fp32" and keys.has("deepspeed"):
            keys.refuse(loaded.key, "DeepSpeed without bf16 or fp16 in its file cannot be simulated so")
        return
    half = on or loaded
    if loaded.value is None:
        keys.refuse(loaded.key, "the precision of a checkpoint is not in the file", replaced_by=["workload.precision"])
    elif half.value == "fp32":
        training.tf32 = keys.enabled("tf32")
    elif training.adapters is not None or training.trained is not None:
        beside = "approximated: beside frozen weights all weights are in this precision, and autocast casts none"
        keys.listed.append((half.origin, beside))
    elif loaded.value == "fp32":
        under_autocast(training, half)
    elif half.value == "fp16" or loaded.value == "fp16":
        keys.refuse(loaded.key, "the Trainer scales no loss of such weights", replaced_by=["workload.precision"])
    else:
        keys.listed.append((half.origin, PURE_16_BIT))


def launch_file(keys: Keys, cluster: Cluster) -> Training | None:
    """Return the training in the file of `accelerate launch --config_file`; None if no such file is named or found, or
    it is not Accelerate's, which is refused.
    """
    name = keys.values.get(CONFIG_FILE)
    if not isinstance(name, str):
        return None  # not given, or left open by the script, which is refused as every key that is not read
    path = named_file(keys, name)
    if path is None:
        why = "it says how the training is sharded; no such file, beside this one, above it, or in the working folder"
        keys.refuse(CONFIG_FILE, why, replaced_by=["plan.method"])
        return None
    parse = parsed_json if path.suffix == ".json" else parsed_yaml
    content = flattened(parse(read_bounded(path), file=str(path)), file=str(path))
    if "distributed_type" not in content:
        return None  # the key then counts as not read
    inner = Keys(str(path), content, keys.overridden, keys.ignored)
    launched = accelerate(inner, cluster)
    keys.raw(CONFIG_FILE)
    keys.add(inner, file=path.name)
    return launched


def shard_as_launched(keys: Keys, training: Training, launched: Training) -> None:
    """Set what the Accelerate file that starts the training decides; the Trainer's own keys come first."""
    training.world = training.world or launched.world
    own = training.sharding is not None and training.sharding.key != REPLICAS
    if launched.sharding is None or launched.sharding.value == "none":
        return
    if own:
        keys.refuse(CONFIG_FILE, f"its {launched.sharding.origin} contradicts the Trainer's own sharding")
        return
    theirs, ours = launched.accumulation, training.accumulation
    if theirs is not None and ours is not None and theirs.value != ours.value:
        reason = f"its {theirs.origin} contradicts {ours.origin}"
        keys.refuse(CONFIG_FILE, reason, replaced_by=["plan.micro_batches"])
    for name in OF_LAUNCHER:
        setattr(training, name, getattr(launched, name))
    training.clip_norm = launched.clip_norm or training.clip_norm
    if launched.recompute is not None and launched.recompute.value == "full":
        training.recompute = launched.recompute


def launch_precision(keys: Keys, launched: Training | None) -> Value | None:
    """Return the precision that the launcher's option says, or its file; it counts where the Trainer has none.

    `launched`: the training in the file.
    """
    why = "this precision cannot be simulated"
    precision = keys.choice(PRECISIONS, "launcher: mixed_precision", sets="workload.precision", why=why)
    if precision is None and launched is not None:
        precision = launched.autocast or launched.precision
    return precision if precision is not None and precision.value != "fp32" else None
