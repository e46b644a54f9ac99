"""Importer of torchtitan's configurations: TOML up to 0.2, and the JSON that a run saves."""

import math

from gssim.interop.reading import LOGGING, MODEL, NUMERICS, Keys, Rule, Value, listed, refused
from gssim.interop.training import PRECISIONS, PURE_16_BIT, Training, optimizer_in, torchs_context_exchange
from gssim.plan.pipeline_schedule import INTERLEAVED

RECOMPUTE = ("plan.recompute",)

GATHERED_ROUTERS = (
    "approximated: it gathers the tokens of tensor ranks for a router, and scatters what experts return; here each "
    "rank routes those of its own part of the sequence, which no layer of experts gathers"
)
"""Source: torchtitan, models/llama4/infra/parallelize.py, apply_moe_ep_tp (ReordererSequenceParallel)."""

TORCHTITAN: dict[str, Rule] = {
    **listed("of compilation, see above", "compile.*"),
    **listed(
        "of tensor parallelism beside compilation, which is refused",
        "parallelism.enable_async_tensor_parallel experimental.enable_async_tensor_parallel",
    ),
    **refused(
        "maps in 8 bits are not read from the file",
        "model.converters model_converters* *.enable_float8_linear training.*fp8_linear",
        or_set=("workload.map_precision",),
    ),
    **refused("shards that are gathered in 8 bits cannot be simulated", "*.enable_fsdp_float8_all_gather"),
    **listed("of maps in 8 bits, which are off or refused", "quantize.* float8.* mx.*"),
    **refused("updates during the backward cannot be simulated", "optimizer.early_step_in_backward"),
    **refused("fault-tolerant replicas cannot be simulated", "fault_tolerance.enable"),
    **listed("of fault tolerance, which is off or refused", "fault_tolerance.*"),
    **refused(
        "schedules from a file cannot be simulated",
        "parallelism.pipeline_parallel_schedule_csv experimental.pipeline_parallel_schedule_csv",
    ),
    **refused(
        "experts that tensor ranks cut cannot be simulated", "parallelism.expert_tensor_parallel_degree", neutral=(1,)
    ),
    **listed(
        "approximated: rows go by all-to-alls, not by DeepEP's kernels", "parallelism.expert_parallel_comm_backend"
    ),
    **listed("of experts, which are off or refused", "parallelism.*expert*"),
    **listed(
        "of context parallelism, which is off, or approximated: sequences are divided in balanced parts",
        "parallelism.context_parallel_* experimental.context_parallel_rotate_method",
    ),
    **refused(
        "stages by names of modules: say plan.stages", "*.pipeline_parallel_split_points", or_set=("plan.stages",)
    ),
    **refused(
        "stages that a tracer cuts are not known", "experimental.pipeline_parallel_split_mode", neutral=("manual",)
    ),
    **listed(
        "there is no pipeline, or its stages are given",
        "parallelism.pipeline_parallel_*layers* parallelism.module_fqns*",
    ),
    **refused("a backward that is compiled whole cannot be simulated", "*.enable_compiled_autograd"),
    **refused("diffusion models cannot be simulated", "training.img_size"),
    **listed("implementation", "parallelism.spmd_backend parallelism.enable_fsdp_symm_mem"),
    **listed("approximated: CUDA graphs are not modelled", "training.disable_cuda_graphs"),
    **refused("parts of the model that are not trained cannot be simulated", "lora* peft*"),
    **listed(MODEL, "model.* model_spec* hf_transformers.* encoder.* tokenizer* hf_assets_path loss.*"),
    **listed(
        NUMERICS,
        "lr_scheduler.* optimizer.* training.class*_free* debug.* loss training.warmup_steps "
        "training.data_parallel_type",
    ),
    **listed(
        LOGGING,
        "job.* profiling.* profiler.* metrics.* checkpoint.* validation.* validator.* training.dataset* training.steps "
        "training.gc_* training.dataloader.* dataloader.* dump_folder memory_estimation.* inference.* eval.* comm.* "
        "experimental.custom_* training.checkpoint_* training.enable_checkpoint training.seed training.deterministic "
        "override.* activation_checkpoint.preserve_rng* activation_checkpoint.determinism_check "
        "activation_checkpoint.debug data.*",
    ),
    **listed("of recomputation, see above", "activation_checkpoint.*"),
}
"""How torchtitan's keys are treated that are not read."""

SIZES_BY_FLAVOR = {
    "llama2": (("7B", 32, 4096), ("13B", 40, 5120), ("26B", 80, 5120), ("70B", 80, 8192)),
    "llama3": (("debugmodel", 6, 256), ("8B", 32, 4096), ("70B", 80, 8192), ("405B", 126, 16384)),
    "llama4": (("debugmodel", 6, 256), ("17bx16e", 48, 5120), ("17bx128e", 48, 5120)),
    "qwen3": (
        *(("0.6B", 28, 1024), ("1.7B", 28, 2048), ("4B", 36, 2560), ("8B", 36, 4096), ("14B", 40, 5120)),
        *(("32B", 64, 5120), ("30B-A3B", 48, 2048), ("235B-A22B", 94, 4096), ("debugmodel", 8, 256)),
    ),
    "deepseek_v3": (("debugmodel", 6, 256), ("16B", 27, 2048), ("236B", 60, 5120), ("671B", 61, 7168)),
    "gpt_oss": (("debugmodel", 4, 256), ("20b", 24, 2880), ("120b", 36, 2880)),
}
FLAVORS: dict[tuple[str, str], dict[str, int]] = {
    (name, flavor): {"layers": layers, "width": width}
    for name, flavors in SIZES_BY_FLAVOR.items()
    for flavor, layers, width in flavors
}
"""Sizes of torchtitan's models, by name and flavor (models/*/__init__.py)."""
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    **dict.fromkeys(("interleaved1f1b", "interleaved_1f1b"), "interleaved"),
    "interleavedzerobubble": "interleaved_zero_bubble",
}
"""Schedules of torch.distributed.pipelining by lower-case name, as `plan.schedule` has them."""
RESHARD = {"default": "default", "always": "zero3", "never": "zero2"}


DEGREES: dict[str, tuple[str, ...]] = {
    "tp": ("tensor_parallel_degree", "training.tensor_parallel_degree", "training.sequence_parallel_degree"),
    "pp": ("pipeline_parallel_degree", "experimental.pipeline_parallel_degree", "training.pipeline_parallel_degree"),
    "cp": ("context_parallel_degree", "experimental.context_parallel_degree"),
    "ep": ("expert_parallel_degree",),
    "dp_replicate": ("data_parallel_replicate_degree", "training.data_parallel_replicate_degree"),
    "dp_shard": ("data_parallel_shard_degree", "training.data_parallel_shard_degree", "training.data_parallel_degree"),
}
"""Keys in the table `parallelism`, and where the degrees were before 0.1 (2024 to March 2025)."""


def _flavor(keys: Keys, training: Training) -> None:
    """Read the sizes of the model; those of one that is not in the table may be in its flavor's name."""
    name, flavor = (str(keys.values.get(f"model.{key}", "")) for key in ("name", "flavor"))
    if name == "flux":
        keys.refuse("model.name", "diffusion models cannot be simulated")
    sizes = FLAVORS.get((name, flavor.partition("_")[0]))
    for size, value in (sizes or {}).items():
        training.architecture[size] = Value(value, keys.line("model.flavor"))
    if sizes is None and flavor:
        training.base_model = Value(flavor.partition("_")[0], keys.line("model.flavor"))


def _context_split(keys: Keys) -> Value | None:
    """Return how sequences are divided; None for balanced parts. The key's name depends on the release."""
    older, newer = (f"parallelism.context_parallel_load_balance{end}" for end in ("", "r"))
    balances = keys.flag(older)
    if balances is not None and not balances.value:
        return Value("plain", balances.origin)
    if newer in keys.values and keys.raw(newer) is None:  # given as null, which is not left out
        return Value("plain", keys.line(newer))
    if keys.has(newer) and str(keys.values[newer]).lower() != "headtail":
        keys.note(newer, "approximated: sequences are divided in balanced parts, the i-th and the i-th from the end")
    return None


def torchtitan(keys: Keys) -> Training:
    """Return the training in a torchtitan configuration of any generation; absent keys have its defaults."""
    training = Training()
    degrees = {}
    for name, (key, *older) in DEGREES.items():
        least = -1 if name == "dp_shard" else 1
        degrees[name] = keys.integer(f"parallelism.{key}", *older, sets=f"plan.{name}", least=least)
        setattr(training, name, degrees[name])
    training.context_exchange = torchs_context_exchange(
        keys, *(f"{table}.context_parallel_rotate_method" for table in ("parallelism", "experimental"))
    )
    training.context_split = _context_split(keys)
    replicate, shard = degrees["dp_replicate"], degrees["dp_shard"]
    is_older = any(keys.has(key) for _, *older in DEGREES.values() for key in older)
    training.dp_replicate = replicate or Value(1, "data_parallel_replicate_degree = 1 (its default)")
    training.dp_shard = shard or Value(-1, "data_parallel_shard_degree = -1 (its default)")
    _sharding(keys, training)
    _batch(keys, training)
    _precision(keys, training)
    _recompute(keys, training)
    _compilation(keys, training)
    name, implementation = "optimizer.name", "optimizer.implementation"
    optimizer_in(keys, training, name)
    if training.optimizer is None and not keys.has(name):
        training.optimizer = Value("adamw", "optimizer.name = AdamW (its default)")
    choice = keys.choice({each: each for each in ("for-loop", "foreach", "fused")}, implementation)
    fused = keys.flag("optimizer.fused")
    if choice is None and fused is not None:
        choice = Value("fused" if fused.value else "foreach", fused.origin)
    elif choice is None and is_older:
        choice = Value("foreach", "optimizer.fused = false (its default before 0.1)")
    training.optimizer_implementation = choice or Value("fused", "optimizer.implementation = fused (its default)")
    training.learning_rate = keys.number("optimizer.lr") or Value(8e-4, "optimizer.lr = 8e-4 (its default)")
    weight_decay = keys.number("optimizer.weight_decay")
    training.weight_decay = weight_decay or Value(0.1, "optimizer.weight_decay = 0.1 (its default)")
    if keys.raw("training.max_norm") != math.inf:  # an infinite norm clips nothing
        training.clip_norm = keys.number("training.max_norm") or Value(1.0, "training.max_norm = 1.0 (its default)")
    training.seed = keys.integer("debug.seed", "training.seed", least=0)
    _flavor(keys, training)
    _pipeline(keys, training)
    sequence_parallel = keys.flag("parallelism.enable_sequence_parallel")
    tp = training.tp.value if training.tp else 1
    if training.ep is not None and training.ep.value > 1:
        key = "expert_tensor_parallel_degree"
        training.etp = keys.integer(f"parallelism.{key}", sets="plan.etp") or Value(1, f"{key} = 1 (its default)")
        if tp > 1:
            keys.listed.append((training.ep.origin, GATHERED_ROUTERS))
    if tp > 1:  # 0.2 has no key for it: its tensor parallelism is always sequence-parallel beside
        origin = f"{training.tp.origin}, with sequence parallelism" if training.tp else ""
        training.sequence_parallel = sequence_parallel or Value(True, origin)
    keys.close(TORCHTITAN)
    return training


def _pipeline(keys: Keys, training: Training) -> None:
    """Read the schedule and the micro-batches, by number or size; by default, releases before 0.1 have one a stage."""
    tables = ("parallelism", "experimental")
    number, numbers = "parallelism.num_pp_microbatches", [f"{table}.pipeline_parallel_microbatches" for table in tables]
    names = [f"{table}.pipeline_parallel_{key}" for table in tables for key in ("schedule", "microbatch_size")]
    if training.pp is None or training.pp.value == 1:
        for key in (number, *numbers, *names):
            if keys.has(key):
                keys.note(key, "there is no pipeline")
        return
    schedule = keys.choice(SCHEDULES, *names[::2], sets="plan.schedule")
    training.schedule = schedule or Value("1f1b", "pipeline_parallel_schedule = 1F1B (its default)")
    if training.pp.origin.startswith("parallelism.") and "plan.stages" not in keys.overridden:
        _stages(keys, training)
    else:
        keys.listed.append((training.pp.origin, "approximated: stages are balanced by time"))
    if keys.has(number):
        training.accumulation = keys.integer(number, sets="plan.micro_batches")
        return
    piece = keys.integer(*names[1::2], sets="plan.micro_batches")
    if piece is None and (any(map(keys.has, numbers)) or not training.pp.origin.startswith("parallelism.")):
        parts = keys.integer(*numbers, sets="plan.micro_batches")
        virtual = 2 if training.schedule.value in INTERLEAVED else 1
        parts = parts or Value(training.pp.value * virtual, f"{training.pp.origin}: as many micro-batches as stages")
        micro = training.micro_batch
        if micro is not None and micro.value % parts.value:
            keys.refuse(parts.key, f"does not divide {micro.origin}")
        elif micro is not None:
            piece = Value(micro.value // parts.value, f"{micro.origin} in {parts.value} parts: {parts.origin}")
    training.pipeline_micro_batch = piece or Value(1, "pipeline_parallel_microbatch_size = 1 (its default)")


def _stages(keys: Keys, training: Training) -> None:
    """Read how blocks are divided into stages."""
    named = "parallelism.module_fqns_per_model_part"
    if isinstance(parts := keys.raw(named, sets="plan.stages"), list) and all(isinstance(each, list) for each in parts):
        training.stage_modules = Value(parts, keys.line(named))
    elif parts is not None:
        keys.refuse(named, "must be a list of lists of names", replaced_by=["plan.stages"])
    ends = [f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    first, last = (
        keys.integer(f"parallelism.{end}", sets="plan.stages", least=0) or Value(1, f"{end} = 1 (its default)")
        for end in ends
    )
    training.ends_in_blocks = first, last
    training.most_blocks_per_stage = keys.integer("parallelism.pipeline_parallel_layers_per_stage", sets="plan.stages")


def _sharding(keys: Keys, training: Training) -> None:
    places = [f"{table}.fsdp_reshard_after_forward" for table in ("parallelism", "training")]
    reshard = keys.choice(RESHARD, *places, sets="plan.method")
    pipelined = training.pp is not None and training.pp.value > 1
    # its mesh for fully_shard is that of dp_shard times cp: distributed/parallel_dims.py
    if training.dp_shard is not None and training.dp_shard.value == 1 and not training.has_context_ranks(keys):
        training.sharding = Value("none", training.dp_shard.origin)
    elif reshard is not None and reshard.value != "default":
        training.sharding = reshard
    else:
        origin = reshard.origin if reshard else "fsdp_reshard_after_forward = default"
        training.sharding = Value("zero2" if pipelined else "zero3", origin)


def _batch(keys: Keys, training: Training) -> None:
    """Read the batch in samples (older generations) or in tokens (newer ones)."""
    whole = keys.flag("parallelism.disable_loss_parallel", "training.disable_loss_parallel")
    divided = keys.flag("training.enable_loss_parallel")
    origin = whole.origin if whole is not None else "parallelism.disable_loss_parallel = false (its default)"
    training.loss_parallel = divided or Value(whole is None or not whole.value, origin)
    training.embedding_parallel = Value(True, "torchtitan divides the token embedding among tensor-parallel ranks")
    if (offload := keys.enabled("training.enable_cpu_offload")) is not None:
        training.offload = Value("parameters", offload.origin)
    if any(keys.has(f"training.{key}") for key in ("num_tokens_per_microbatch_per_dp_rank", "max_context_length")):
        longest = keys.integer("training.max_context_length", sets="workload.sequence_length")
        tokens = keys.integer("training.num_tokens_per_microbatch_per_dp_rank", sets="workload.global_batch_size")
        whole = keys.integer("training.num_tokens_per_train_step", sets="workload.global_batch_size", least=-1)
        training.sequence = longest or Value(2048, "training.max_context_length = 2048 (its default)")
        for name, value in (("micro_batch", tokens), ("global_batch", whole)):
            if value is None or value.value == -1:
                continue
            samples, rest = divmod(value.value, training.sequence.value)
            if rest or not samples:
                keys.refuse(value.key, f"is no multiple of {training.sequence.origin}")
            setattr(training, name, Value(samples, f"{value.origin} of {training.sequence.origin}"))
        return
    training.sequence = keys.integer("training.seq_len", sets="workload.sequence_length")
    training.micro_batch = keys.integer("training.local_batch_size", "training.batch_size", sets="plan.micro_batches")
    whole = keys.integer("training.global_batch_size", sets="workload.global_batch_size", least=-1)
    training.global_batch = whole if whole is not None and whole.value > 0 else None
    training.sequence = training.sequence or Value(2048, "training.seq_len = 2048 (its default)")
    training.micro_batch = training.micro_batch or Value(8, "training.local_batch_size = 8 (its default)")


def _precision(keys: Keys, training: Training) -> None:
    """Read the precision; under FSDP2 shards are kept in `training.dtype` and computed in `mixed_precision_param`."""
    why = "this precision cannot be simulated"
    kept = keys.choice(PRECISIONS, "training.dtype", sets="workload.precision", why=why)
    computed = keys.choice(PRECISIONS, "training.mixed_precision_param", sets="workload.precision", why=why)
    reduced = keys.choice(PRECISIONS, "training.mixed_precision_reduce", sets="workload.reduce_precision", why=why)
    training.precision = computed or Value("bf16", "training.mixed_precision_param = bfloat16 (its default)")
    if training.sharding is not None and training.sharding.value == "none" and training.precision.value != "fp32":
        keys.listed.append((training.precision.origin, "approximated: autocast beside fp32 gradients and messages"))
    if kept is not None and kept.value != "fp32":
        keys.note("training.dtype", PURE_16_BIT)
    reduced = reduced or Value("fp32", "training.mixed_precision_reduce = float32 (its default)")
    shards = training.sharding is not None and training.sharding.value != "none"
    if shards and reduced.value != training.precision.value:
        training.reduce_precision = reduced


def _compilation(keys: Keys, training: Training) -> None:
    """Read whether blocks are compiled, each by itself, and say what differs here."""
    compiled = keys.flag("compile.enable", "training.compile")
    training.compiled = compiled
    if compiled is None or not compiled.value:
        return
    components = keys.raw("compile.components")
    if components is not None and "model" not in components:
        training.compiled = Value(False, f"{keys.line('compile.components')}: without the model's blocks")
    backend = keys.raw("compile.backend")
    if backend not in (None, "inductor"):
        keys.refuse("compile.backend", "fuses operations in a way that is not known; allowed: inductor")
    if components is None or "loss" in components:
        keys.listed.append((compiled.origin, "approximated: the loss is not compiled here"))


def _recompute(keys: Keys, training: Training) -> None:
    """Read the recomputation: from `mode` or, in newer generations, from the fields of a policy.

    In newer generations selective recomputation is by operation; before, `selective_ac_option` is `op` or selects
    layers.
    """
    mode_key, option_key = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    by_operation = True
    fields = {key.partition(".")[2] for key in keys.values if key.startswith("activation_checkpoint.")}
    if keys.has(mode_key):
        mode = str(keys.raw(mode_key)).lower()
        by_operation = keys.raw(option_key) == "op"
    elif "activation_checkpoint" in keys.values:  # the table is null
        mode, mode_key = "none", "activation_checkpoint"
        keys.raw(mode_key)
    elif "memory_budget" in fields:
        mode, mode_key = "memory_budget", "activation_checkpoint.memory_budget"
    elif "force_recompute_mm_shapes_by_fqns" in fields:
        mode, mode_key = "selective", "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    elif fields:
        mode, mode_key = "full", f"activation_checkpoint.{min(fields)}"
    elif keys.file.endswith(".toml"):  # up to 0.2 the default is every second layer
        mode, mode_key, by_operation = "selective", "activation_checkpoint.mode is not given: selective", False
    else:
        mode, mode_key = "selective", "activation_checkpoint"
    if mode in ("none", "full") or (mode == "selective" and by_operation):
        training.recompute = Value("every-second-product" if mode == "selective" else mode, keys.line(mode_key))
        keys.read.add(mode_key)
    elif mode == "selective":
        reason = "recomputes every second layer (its default), or every n-th: recomputed are all blocks, or none"
        keys.refuse(option_key if keys.has(option_key) else mode_key, reason, replaced_by=RECOMPUTE)
    elif mode == "memory_budget":
        keys.refuse(mode_key, "what the compiler would recompute within a budget is not known", replaced_by=RECOMPUTE)
    else:
        keys.refuse(mode_key, "must be none, full, selective or memory_budget", replaced_by=RECOMPUTE)
