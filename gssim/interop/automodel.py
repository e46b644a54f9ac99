"""Importer of NeMo Automodel's YAML."""

import re

from gssim.interop.reading import LAUNCHER, LOGGING, MODEL, NUMERICS, Keys, Rule, Value, listed, refused
from gssim.interop.torchtitan import RECOMPUTE, SCHEDULES
from gssim.interop.training import (
    AMSGRAD,
    PRECISIONS,
    PURE_16_BIT,
    WHOLE_MODEL_COMPILED,
    Training,
    bucket_in,
    optimizer_in,
    torchs_context_exchange,
)

LORA = "adapters of low rank and frozen weights cannot be simulated"
AUTOMODEL: dict[str, Rule] = {
    **refused(LORA, "peft.peft_fn peft.use_dora peft.lora_dtype peft.moe_rank_scaling"),
    **listed("of adapters, which are off or read", "peft.*"),
    **refused(
        "which of its parts are not trained cannot be told", "freeze_config.freeze_*", or_set=("workload.frozen",)
    ),
    **listed("of frozen weights, which are none or refused", "freeze_config.*"),
    **refused("autocast beside FSDP's own mixed precision cannot be simulated", "distributed.autocast_dtype"),
    **refused(WHOLE_MODEL_COMPILED, "distributed.enable_compile compile.enabled fsdp.enable_compile"),
    **refused(
        "tensor parallelism that overlaps its messages cannot be simulated", "distributed.enable_async_tensor_parallel"
    ),
    **refused("parts of a model of images cannot be simulated", "distributed.multimodal.*"),
    **listed("of compilation, which is off or refused", "compile.*"),
    **refused("maps in 8 bits are not read from the file", "fp8.enabled", or_set=("workload.map_precision",)),
    **refused(
        "maps in 8 bits are not read from the file",
        "model.backend.te_fp8.recipe model.backend.te_fp8",
        or_set=("workload.map_precision",),
    ),
    **refused("shards that are gathered in 8 bits cannot be simulated", "fp8.enable_fsdp_float8_all_gather"),
    **refused("quantization cannot be simulated", "quantization.* qat.enabled qat._target_"),
    **listed("of fp8, which is off or refused", "fp8.* qat.*"),
    **refused("samples that are packed into one sequence cannot be simulated", "packed_sequence.packed_sequence_size"),
    **listed("of packing, which is off or refused", "packed_sequence.*"),
    **refused("distillation and several models cannot be simulated", "teacher_model.* kd_* recipe_args.*"),
    **refused("diffusion cannot be simulated", "flow_matching.* diffusion* ema.*"),
    **refused("of a recipe of diffusion, which cannot be simulated", "ddp.* autocast.* fsdp.reduce_dtype"),
    **refused("distillation and several models cannot be simulated", "*distill* mse_loss* nce_*"),
    **listed(NUMERICS, "neftune.* embedding_row_repair.* longalign"),
    **listed(LOGGING, "_validation_* tool_call_eval.* prewarm.* _*_chat_template"),
    **listed("how replicas agree on what is reduced", "distributed.static_graph distributed.broadcast_buffers"),
    **refused("training from a benchmark of another model cannot be simulated", "mtp*"),
    **listed("which copies are pinned", "distributed.offload_policy.*"),
    **refused("two-level sharding of Megatron-FSDP cannot be simulated", "distributed.zero_dp_strategy", neutral=(3,)),
    **refused("what is kept cannot be told from the file", "distributed.activation_checkpointing_*"),
    **refused("CPU-resident or deferred weights cannot be simulated", "distributed.defer_rs_*"),
    **listed("of experts, which are off or refused", "distributed.moe.* parallelizer* distributed.*moe*"),
    **listed(
        "approximated: stages are balanced by time",
        "distributed.pipeline.layers_per_stage distributed.pipeline.round_virtual_stages*",
    ),
    **listed("how stages are made", "distributed.pipeline.* autopipeline.*"),
    **listed(
        "implementation of the shards",
        "distributed.mp_policy.* distributed.*_target_ distributed.backend distributed.use_hf_tp_plan "
        "distributed.tp_plan distributed.*prefetch* distributed.enable_* distributed.*find_unused* "
        "distributed.overlap_* distributed.*symm_mem* distributed.autocast* distributed.*grad*",
    ),
    **refused("offloading cannot be simulated", "fsdp.cpu_offload *offload_teacher*"),
    **refused("this kind of training cannot be simulated", "dllm.* dflash.* teacher_* separate_meshes"),
    **listed(
        "implementation of the shards",
        "fsdp.*prefetch* fsdp.use_hf_tp_plan distributed.patch_is* distributed.check_for_nan* distributed.average_in* "
        "distributed.keep_*",
    ),
    **listed("numbers, or how they are logged", "seed moe_metrics.* nvtx performance.* recipe.*"),
    **listed("attention and kernels are those of the model file", "model.*attn* model.backend* model.use_*"),
    **listed(MODEL, "model.* tokenizer* processor* model_type"),
    **refused(AMSGRAD, "optimizer.amsgrad"),
    **refused(
        "state of the optimizer in another precision cannot be simulated",
        "optimizer.exp_avg_dtype optimizer.exp_avg_sq_dtype optimizer.master_weight_dtype",
        neutral=("torch.float32", "float32", "fp32"),
    ),
    **listed(
        "approximated: master copies are whole, where parameters' own 16 bits are left out of them there",
        "optimizer.store_param_remainders",
    ),
    **listed(NUMERICS, "optimizer.* lr_scheduler.* rng.* loss_fn* loss.* clip_grad_norm.*"),
    **listed(
        LOGGING,
        "checkpoint* dataset* validation_* dataloader* packed_* wandb* mlflow* comet* step_scheduler.* ci.* recipe "
        "benchmark.* logging.* profil* nsys* data.* temperature train_n_passages eval_* output_dir num_epochs "
        "max_steps log_*",
    ),
    **listed(
        LAUNCHER,
        "dist_env.* slurm* launcher* skypilot* k8s* nproc_per_node nnodes device*",
    ),
}
"""How Automodel's keys are treated that are not read."""


PREDICTED_RECIPES = re.compile(
    r"(TrainFinetune|Benchmarking)RecipeFor(NextTokenPrediction|SequenceClassification)|FinetuneRecipeForVLM"
)
"""Recipes that train one model on its own samples; of others, a sample may be of several passages or models."""


SIZES = {
    "layers": ("n_layer", "num_hidden_layers", "config.num_hidden_layers", "config.n_layer"),
    "width": ("n_embd", "hidden_size", "config.hidden_size", "config.n_embd"),
}
"""Keys of a model's sizes in the table `model`, where it is built from sizes or its configuration is changed."""


def _recipe(keys: Keys, training: Training) -> None:
    """Read what the recipe trains: its kind, and the model's name, which may say how large it is."""
    for key in ("recipe", "recipe._target_"):
        name = str(keys.raw(key) or "").rpartition(".")[2]
        if name and not PREDICTED_RECIPES.fullmatch(name):
            keys.refuse(key, "trains otherwise than one model on its own samples, which cannot be simulated")
    for size, names in SIZES.items():
        if (value := keys.integer(*(f"model.{name}" for name in names))) is not None:
            training.architecture[size] = value
    for key in ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config"):
        if isinstance(keys.values.get(key), str):
            training.base_model = Value(keys.values[key], keys.line(key))
            return


def automodel(keys: Keys) -> Training:
    """Return the training in a NeMo Automodel recipe."""
    for key, value in list(keys.values.items()):
        if value in ("none", "None") and key.startswith(("distributed.", "fsdp.", "step_scheduler.")):
            keys.values[key] = None
            keys.read.add(key)
    training = Training()
    _recipe(keys, training)
    tables = {key.partition(".")[0] for key in keys.values}
    at = "distributed" if "distributed" in tables or "fsdp" not in tables else "fsdp"  # fsdp: of the diffusers' recipes
    for name, keyed in (
        ("dp", "dp_size"),
        ("dp_replicate", "dp_replicate_size"),
        ("tp", "tp_size"),
        ("pp", "pp_size"),
        ("cp", "cp_size"),
        ("ep", "ep_size"),
    ):
        sets = f"plan.{name}"
        setattr(training, name, keys.integer(f"{at}.{keyed}", sets=sets))
    training.context_exchange = torchs_context_exchange(keys)
    _sharding(keys, training, at)
    local = keys.integer("step_scheduler.local_batch_size", sets="plan.micro_batches")
    training.micro_batch = local
    training.global_batch = keys.integer("step_scheduler.global_batch_size", sets="workload.global_batch_size")
    accumulation = keys.integer("step_scheduler.grad_acc_steps", sets="plan.micro_batches")
    training.accumulation = accumulation
    names = ("dataset.seq_len", "dataset.seq_length", "dataset.sequence_length", "dataset.block_size")
    training.sequence = keys.integer(*names, sets="workload.sequence_length")
    _adapters(keys, training)
    _precision(keys, training)
    _memory(keys, training, f"{at}.activation_checkpointing")
    optimizer_in(keys, training, "optimizer._target_")
    for flag in ("foreach", "fused"):
        if (value := keys.enabled(f"optimizer.{flag}")) is not None:
            training.optimizer_implementation = Value(flag, value.origin)
    training.learning_rate = keys.number("optimizer.lr", sets="workload.learning_rate")
    training.weight_decay = keys.number("optimizer.weight_decay", sets="workload.weight_decay")
    training.momentum = keys.number("optimizer.momentum", sets="workload.momentum")
    training.clip_norm = keys.number("clip_grad_norm.max_norm") or Value(
        1.0, "clip_grad_norm.max_norm = 1.0 (its default)"
    )
    training.seed = keys.seed("rng.seed", "seed")
    if training.pp is not None and training.pp.value > 1:
        training.schedule = keys.choice(SCHEDULES, "distributed.pipeline.pp_schedule", sets="plan.schedule")
        key = "distributed.pipeline.pp_microbatch_size"
        training.pipeline_micro_batch = keys.integer(key, sets="plan.micro_batches")
    training.sequence_parallel = keys.flag("distributed.sequence_parallel")
    if training.tp is None or training.tp.value == 1:
        training.sequence_parallel = None
    keys.close(AUTOMODEL)
    return training


def _sharding(keys: Keys, training: Training, at: str) -> None:
    """Read the strategy from the table named `at`."""
    strategy = keys.choice(
        {"fsdp2": "zero3", "ddp": "none", "megatron_fsdp": "zero3"}, "distributed.strategy", sets="plan.method"
    )
    target = str(keys.values.get("distributed._target_", ""))
    if strategy is None and target:
        kind = "none" if "ddp" in target.lower() else "zero3"
        strategy = Value(kind, keys.line("distributed._target_"))
    training.sharding = strategy or Value("zero3", "distributed.strategy is not given: fsdp2")
    reshard = keys.flag(f"{at}.reshard_after_forward")
    if reshard is not None and training.sharding.value == "zero3" and not reshard.value:
        training.sharding = Value("zero2", reshard.origin)
    if training.pp is not None and training.pp.value > 1 and training.sharding.value == "zero3":
        training.sharding = Value("zero2", f"{training.pp.origin}: stages keep parameters gathered")
    defers = keys.flag(f"{at}.defer_fsdp_grad_sync")
    if training.sharding.value != "none":
        deferred = defers is None or defers.value
        origin = defers.origin if defers else "distributed.defer_fsdp_grad_sync = true (its default)"
        training.gradient_sync = Value("step" if deferred else "micro-batch", origin)


def _memory(keys: Keys, training: Training, recompute: str) -> None:
    """Read what is recomputed (by the key `recompute`), which state is kept in host memory, the size of buckets, and
    whether the loss makes logits whole.
    """
    if keys.raw(recompute) == "selective":
        why = "what it keeps is not this plan's 'selective'; nearest is selective"
        keys.refuse(recompute, why, replaced_by=RECOMPUTE)
    else:
        recomputes = Value(True, keys.line(recompute)) if keys.raw(recompute) == "full" else keys.flag(recompute)
        recomputes = recomputes or Value(False, f"{recompute} is not given")
        training.recompute = Value("full" if recomputes.value else "none", recomputes.origin)
    loss = str(keys.raw("loss_fn._target_") or keys.raw("loss_fn") or "").rpartition(".")[2]
    origin = "loss_fn._target_" if keys.has("loss_fn._target_") else "loss_fn"
    if loss == "FusedLinearCrossEntropy":
        training.fused_loss = Value(True, keys.line(origin))
    elif loss == "ChunkedCrossEntropy":
        keys.note(origin, "approximated: the loss of all tokens is computed at once")
    elif loss:
        keys.note(origin, "the loss is the model's, of whole logits")
    policy, on_host = "distributed.offload_policy._target_", keys.enabled("distributed.cpu_offload")
    if "CPUOffloadPolicy" in str(keys.raw(policy)):
        training.offload = Value("parameters", keys.line(policy))
    elif keys.has(policy):
        keys.refuse(policy, "no such policy here", replaced_by=["plan.offload"])
    elif on_host is not None:
        training.offload = Value("parameters", on_host.origin)
    bucket_in(keys, training, "distributed.bucket_cap_mb")


def _precision(keys: Keys, training: Training) -> None:
    """Read the precisions of weights and compute; FSDP2 casts by its policy, unless there are adapters.

    Source: NeMo Automodel, components/distributed/config.py: param_dtype = bfloat16 and reduce_dtype = float32 by
    default; before mid-2026 gradients were reduced in bfloat16.
    """
    names = ("model.torch_dtype", "model.config.torch_dtype", "model.dtype")
    given = [name for name in names if keys.has(name) and keys.values[name] != "auto"]
    kept = keys.choice(PRECISIONS, *given[:1], sets="workload.precision") if given else None
    for name in names:
        keys.raw(name)
    usual = Value("bf16", "model.torch_dtype is not given, or auto: bfloat16")
    kept = kept or usual
    policy = "distributed.mp_policy"
    computed = keys.choice(PRECISIONS, f"{policy}.param_dtype", sets="workload.precision")
    reduced = keys.choice(PRECISIONS, f"{policy}.reduce_dtype", sets="workload.reduce_precision")
    sharded = training.sharding is not None and training.sharding.value != "none"
    by_fsdp2 = sharded and not str(keys.values.get("distributed.strategy", "fsdp2")).startswith("megatron")
    training.precision = kept
    if str(keys.values.get("distributed.strategy")).startswith("megatron"):  # MegatronFSDPConfig's key, off by default
        wide = keys.enabled("distributed.grad_reduce_in_fp32")
        reduced = reduced or (Value("fp32", wide.origin) if wide is not None else None)
    autocast = keys.values.get("distributed.autocast_dtype")
    if autocast is not None and not sharded and kept.value == "fp32":
        training.autocast = keys.choice(
            {k: v for k, v in PRECISIONS.items() if v != "fp32"}, "distributed.autocast_dtype"
        )
    if by_fsdp2 and training.adapters is None:
        training.precision = computed or Value("bf16", f"{policy} is not given: param_dtype = bfloat16")
        if "distributed._target_" not in keys.values:
            reduced = reduced or Value("fp32", f"{policy} is not given: reduce_dtype = float32")
    if sharded and reduced is not None and reduced.value != training.precision.value:
        training.reduce_precision = reduced
    if kept.value != "fp32" and training.sharding is not None and training.adapters is None:
        keys.listed.append((kept.origin, PURE_16_BIT))


def _adapters(keys: Keys, training: Training) -> None:
    """Read low-rank adapters; patterns of their maps are resolved on the model (module_matcher.py)."""
    if not keys.has("peft._target_"):
        return
    if not str(keys.raw("peft._target_")).endswith("lora.PeftConfig"):
        keys.refuse("peft._target_", LORA, replaced_by=["workload.adapters"])
        return
    rank, alpha = keys.integer("peft.dim"), keys.number("peft.alpha")
    dropout, every = keys.number("peft.dropout"), keys.enabled("peft.match_all_linear")
    targets, others = (keys.raw(f"peft.{name}_modules") or [] for name in ("target", "exclude"))
    targets = [targets] if isinstance(targets, str) else [str(each) for each in targets]
    if dropout is not None and dropout.value:
        keys.note("peft.dropout", "approximated: the masks of dropout in adapters are not counted")
    table: dict[str, object] = {"rank": rank.value if rank else 8, "alpha": alpha.value if alpha else 32}
    if every is not None or (others and not targets):
        table["targets"] = "all-linear"
        parts = [others] if isinstance(others, str) else [str(each) for each in others]
        inside = [part for part in parts if not OUTSIDE_BLOCKS.search(part)]
        if inside:
            reason = "maps of the blocks that have no adapter: name those that have one"
            keys.refuse("peft.exclude_modules", reason, replaced_by=["workload.adapters"])
        if not any("head" in part for part in parts):
            key = "peft.exclude_modules" if others else "peft.match_all_linear"
            keys.note(key, "approximated: an adapter of the head is not counted")
    else:
        table["targets"] = targets or ["*_proj"]
    training.adapters = Value(table, keys.line("peft._target_"))


OUTSIDE_BLOCKS = re.compile("lm_head|vision|visual|image|audio|embed|projector")
"""Pattern of the names of modules that are not maps of a language model's blocks."""
