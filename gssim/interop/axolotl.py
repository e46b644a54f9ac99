"""Importer of axolotl's YAML, which builds on Accelerate and DeepSpeed; keys as of axolotl 0.13."""

from gssim.cluster import Cluster
from gssim.interop.accelerate import FSDP_KEYS
from gssim.interop.reading import (
    LAUNCHER,
    LOGGING,
    MODEL,
    NUMERICS,
    Keys,
    Rule,
    Value,
    listed,
    refused,
)
from gssim.interop.trainer_keys import (
    ATTENTION,
    AXOLOTL,
    FUSED_KERNELS,
    LORA,
    UNPACKED,
    add_adapters,
    base_model_in,
    hyperparameters_in,
    precision_in,
    quantize_frozen,
    sharding_in,
)
from gssim.interop.training import PRECISIONS, WHOLE_MODEL_COMPILED, Training, bucket_in, optimizer_in

DEEP_EP = "approximated: rows of experts are exchanged by all-to-alls, not by the kernels of DeepEP"
OTHER_KEYS: dict[str, Rule] = {
    **refused(
        LORA,
        "lora_model_dir relora* peft_* peft.loftq_config.* lisa_* lora_modules_to_save lora_layers_to_transform "
        "peft.use_rslora",
    ),
    **refused("which of its parts are not trained cannot be told", "freeze_mm_modules", or_set=("workload.frozen",)),
    **refused(
        "quantized weights cannot be simulated",
        "gptq qat.* ptq.* quantization.* model_quantization_config* use_onebitllms quantize_moe_experts *nvfp4* "
        "*_fp4_*",
    ),
    **refused("reinforcement and preference training cannot be simulated", "rl reward_model process_reward_model"),
    **refused("maps in 8 bits are not read from the file", "fp8", or_set=("workload.map_precision",)),
    **refused("shards that are gathered in 8 bits cannot be simulated", "fp8_*"),
    **refused(WHOLE_MODEL_COMPILED, "torch_compile"),
    **refused(
        FUSED_KERNELS,
        "liger_* use_kernels lora_*_kernel unsloth_* tiled_mlp flash_attn_* fused_attn_kernel flash_optimum",
    ),
    **refused("activations that are offloaded cannot be simulated", "activation_offloading"),
    **refused(
        "fused kernels of experts are not modelled",
        "use_scattermoe use_sonicmoe llama4_linearized_experts use_*_kernels",
    ),
    **listed(DEEP_EP, "expert_parallel_*"),
    **refused(
        "diffusion, pruning and reinforcement learning cannot be simulated",
        "diffusion.* llmcompressor.* nemo_gym_* hatchery.*",
    ),
    **listed(
        "approximated: keys and values pass in a ring of shifts, whichever function does it",
        "ring_attn_func heads_k_stride",
    ),
    **listed(ATTENTION, "gemma4_hybrid_attn_impl *multipack_attn"),
    **listed(MODEL, "model_config.* cls_model_config torch_dtype reinit_weights"),
    **listed(NUMERICS, "loraplus_* use_eaft eaft_* jagged_* default_system_message optim_target_mod*"),
    **listed(LOGGING, "total_num_tokens evaluation_strategy use_otel* otel_* use_wandb use_comet"),
    **listed(
        LAUNCHER,
        "ddp ddp_broadcast_buffers full_finetune batch_flattening ddp_timeout ddp_find_unused_parameters local_rank",
    ),
    **listed(ATTENTION, "*attention* attn_implementation sdp_* flex_attn_*"),
    **listed(
        "of a feature that is off, or refused above",
        "lora_* gptq* trl.* ebft.* vllm.* bnb_* torch_compile_* adapter_* gdpo* kd_* dpo_*",
    ),
    **listed(
        "samples are of sequence_len tokens here",
        "sample_packing* eval_sample_packing pad_to_sequence_len multipack_* group_by_length curriculum_sampling "
        "*packed_sequence* excess_length_strategy min_sample_len",
    ),
    **listed(
        MODEL,
        "base_model_* model_type *tokenizer* processor_type is_*_derived_model trust_remote_code revision_of_model "
        "overrides_of_model* type_of_model special_tokens* tokens* added_tokens* resize_token* shrink_embeddings "
        "chat_template* eot_tokens* num_labels *embeddings_skip_upcast",
    ),
    **listed(
        NUMERICS,
        "lr_* warmup_* cosine_* adam_* learning_rate_* tf32 train_on_inputs noisy_embedding_alpha neftune* "
        "label_smoothing* loss_watchdog* embedding_lr* eta_min *early_stopping* roles_to_train* train_on_eos "
        "optim_args* seed*",
    ),
    **listed(
        LOGGING,
        "dataset* val_set_size test_datasets* pretraining_dataset* shuffle_* skip_prepare* output_dir num_epochs "
        "max_steps logging_* save_* saves_* eval_* evals_* wandb_* mlflow_* comet_* use_tensorboard swanlab_* "
        "use_swanlab trackio_* hub_* hf_* push_* *resume_from* streaming* do_*_eval metric_* greater_* dataloader_* "
        "remove_unused_columns profiler_* gc_steps include_* load_best*",
    ),
    **listed(
        LAUNCHER,
        "device* strict debug use_ray ray_* resources_per_worker* low_cpu_mem_usage torchdistx_path secrets "
        "experimental_* gpu_memory_limit max_memory project_name gradient_checkpointing_kwargs*",
    ),
}
"""How axolotl's keys are treated that are not read."""
FSDP = {
    **FSDP_KEYS,
    **listed("how the model is built and saved", "fsdp_final_state_dict_type"),
}
"""How FSDP's keys are treated if FSDP is on."""
NO_FSDP = listed("of FSDP, which is off", "fsdp_config.* fsdp_final_state_dict_type")


CONTEXT, EXPERTS = "context_parallel_size", "expert_parallel_size"


def axolotl(keys: Keys, cluster: Cluster) -> Training:
    """Return the training in an axolotl recipe; a sample is a sequence of `sequence_len` packed tokens."""
    training = Training()
    sizes = {
        "dp_replicate": ("dp_replicate_size", "plan.dp_replicate"),
        "dp_shard": ("dp_shard_size", "plan.dp_shard"),
        "tp": ("tensor_parallel_size", "plan.tp"),
        "sequence": ("sequence_len", "workload.sequence_length"),
        "micro_batch": ("micro_batch_size", "workload.global_batch_size"),
        "accumulation": ("gradient_accumulation_steps", "plan.micro_batches"),
    }
    for name, (key, sets) in sizes.items():
        setattr(training, name, keys.integer(key, sets=sets))
    if training.sequence is not None and keys.is_off("sample_packing") and keys.is_off("pad_to_sequence_len"):
        keys.listed.append((training.sequence.origin, UNPACKED))
    base_model_in(keys, training, "base_model")
    _parts(keys, training)
    _experts(keys, training)
    _batch(keys, training)
    optimizer_in(keys, training, "optimizer")
    hyperparameters_in(keys, training)
    if keys.raw("gradient_checkpointing") in ("offload", "offload_disk"):
        keys.refuse("gradient_checkpointing", "activations that are offloaded cannot be simulated")
    elif (checkpointing := keys.flag("gradient_checkpointing")) is not None:
        training.recompute = Value("full" if checkpointing.value else "none", checkpointing.origin)
    shards = sharding_in(keys, training, cluster, program=AXOLOTL)
    if keys.has("deepspeed") and training.cp is not None and training.cp.value > 1:
        heads = "approximated: a ring; newer releases exchange heads under DeepSpeed: plan.context_exchange=all-to-all"
        keys.note(training.cp.key, heads)
    _adapters(keys, training)
    _loss(keys, training)
    _precision(keys, training)
    keys.close((FSDP if shards else NO_FSDP) | OTHER_KEYS)
    return training


def _parts(keys: Keys, training: Training) -> None:
    """Read context parallelism, the parameters that are trained, and buckets."""
    # the older name counts if the newer one is not given: utils/schemas/validation.py
    older, newer = (keys.integer(each, sets="plan.cp") for each in ("sequence_parallel_degree", CONTEXT))
    training.cp = newer or older
    if older is not None and newer is not None and older.value != newer.value:
        keys.note("sequence_parallel_degree", f"the older name of {CONTEXT}, which counts")
    trained = keys.raw("unfrozen_parameters")
    if trained:
        patterns = [trained] if isinstance(trained, str) else list(trained)
        training.trained = Value([str(each) for each in patterns], keys.line("unfrozen_parameters"))
    bucket_in(keys, training, "ddp_bucket_cap_mb")


def _experts(keys: Keys, training: Training) -> None:
    """Read expert parallelism, an axis of its own over which everything else is sharded too."""
    training.ep = keys.integer(EXPERTS, sets="plan.ep")
    implementation = keys.raw("experts_implementation")
    if implementation == "grouped_mm":
        keys.note("experts_implementation", "as the experts of the model file are multiplied")
    elif implementation:
        keys.refuse("experts_implementation", "other kernels of experts than grouped products are not modelled")
    if training.ep is None or training.ep.value == 1:
        return
    keys.listed.append((training.ep.origin, DEEP_EP))
    if training.cp is not None and training.cp.value > 1:
        keys.refuse(CONTEXT, f"beside {EXPERTS}, experts that are divided apart from sequences cannot be simulated")
    if training.tp is not None and training.tp.value > 1:
        keys.refuse("tensor_parallel_size", f"axolotl has none beside {EXPERTS}")
    shards = training.dp_shard
    if shards is not None:
        both = f"{shards.origin}, times {training.ep.origin}: an axis of its own"
        training.dp_shard = Value(shards.value * training.ep.value, both)


def _batch(keys: Keys, training: Training) -> None:
    if not keys.has("batch_size"):
        return
    whole = keys.integer("batch_size", sets="plan.micro_batches")
    micro = training.micro_batch
    if whole is not None and micro is not None and training.accumulation is None and not whole.value % micro.value:
        training.accumulation = Value(whole.value // micro.value, whole.origin)
    elif whole is not None and training.accumulation is None:
        keys.refuse("batch_size", "is no multiple of micro_batch_size", replaced_by=["plan.micro_batches"])


def _adapters(keys: Keys, training: Training) -> None:
    """Read low-rank adapters: their rank, scale and maps."""
    kind = keys.raw("adapter")
    in_4_bits, in_8_bits = keys.enabled("load_in_4bit"), keys.enabled("load_in_8bit")
    few = in_4_bits or in_8_bits
    if not kind:
        if few is not None:
            keys.refuse(few.key, "quantized weights without adapters cannot be simulated")
        return
    if kind not in ("lora", "qlora"):
        keys.refuse("adapter", LORA)
        return
    if few is not None:
        double = keys.raw("bnb_config_kwargs.bnb_4bit_use_double_quant") is not False  # its default is true
        bits, format_key = 8 if few is in_8_bits else 4, "bnb_config_kwargs.bnb_4bit_quant_type"
        quantize_frozen(keys, training, few, bits=bits, nested=double, format_key=format_key)
    rank, alpha = keys.integer("lora_r"), keys.number("lora_alpha")
    linear, targets = keys.enabled("lora_target_linear"), keys.raw("lora_target_modules")
    if rank is None or not (targets or linear):
        keys.refuse("adapter", "needs lora_r, and lora_target_modules or lora_target_linear")
        return
    names = [targets] if isinstance(targets, str) else [str(each) for each in targets or ()]
    chosen = "all-linear" if linear is not None else names
    add_adapters(keys, training, "adapter", rank=rank, alpha=alpha, targets=chosen)
    if keys.raw("lora_target_parameters"):
        keys.refuse("lora_target_parameters", LORA)


PLUGINS = {
    "axolotl.integrations.liger.": "it does what its own keys say",
    "axolotl.integrations.kernels.": "it does what its own keys say",
    "axolotl.integrations.expert_parallel.": "it does what its own keys say",
    "axolotl.integrations.swanlab.": LOGGING,
    "axolotl.integrations.spectrum.": "it does what its own keys say",
}
"""Why plugins are accepted that change nothing by themselves."""


def _loss(keys: Keys, training: Training) -> None:
    """Read the plugins, and whether one of them fuses the loss with the head."""
    plugins = keys.raw("plugins")
    wanted = keys.flag("cut_cross_entropy")
    for plugin in [plugins] if isinstance(plugins, str) else plugins or ():
        if str(plugin).startswith("axolotl.integrations.cut_cross_entropy."):
            if wanted is None or wanted.value:
                training.fused_loss = Value(True, f"plugins: {plugin}")
        elif (reason := next((PLUGINS[each] for each in PLUGINS if str(plugin).startswith(each)), None)) is not None:
            keys.note("plugins", f"{plugin}: {reason}")
        else:
            keys.refuse("plugins", f"what {plugin} changes is not known")
    fused = keys.enabled("liger_fused_linear_cross_entropy")
    if fused is not None and training.fused_loss is None:
        training.fused_loss = fused
        keys.note("liger_fused_linear_cross_entropy", "approximated: logits are multiplied again in the backward")


def _precision(keys: Keys, training: Training) -> None:
    flags = {}
    for key in ("bf16", "fp16", "bfloat16", "float16"):
        value = keys.raw(key)
        if value == "auto":
            flags[key] = Value(True, f"{keys.line(key)}: on GPUs that have it")
        elif value == "full":
            keys.refuse(
                key, "parameters without an fp32 master copy cannot be simulated", replaced_by=["workload.precision"]
            )
        elif (flag := keys.flag(key)) is not None:
            flags[key] = flag
    on = [(key, flag) for key, flag in flags.items() if flag.value]
    if len({PRECISIONS[key] for key, _ in on}) > 1:
        keys.refuse(on[1][0], f"contradicts {on[0][1].origin}", replaced_by=["workload.precision"])
    if not on:
        precision_in(keys, training, None, Value("fp32", "neither bf16 nor fp16"))
        return
    key, flag = on[0]
    precision = Value(PRECISIONS[key], flag.origin)
    # the model is loaded in bf16: utils/config, resolve_dtype
    precision_in(keys, training, precision, precision if precision.value == "bf16" else Value("fp32", flag.origin))
