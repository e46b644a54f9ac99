"""Importer of the arguments of Hugging Face's Trainer, in YAML, JSON or a script.

These are arguments of LLaMA-Factory, of TRL's supervised fine-tuning (and so of alignment-handbook and open-r1), and of
scripts of transformers.

Keys and defaults are those of transformers 5, TRL 1 and LLaMA-Factory 0.9.5; names of earlier releases are read too.
What axolotl, which runs this Trainer, reads in the same way is in `trainer_keys`.
"""

from typing import Any

from gssim.cluster import Cluster
from gssim.interop.accelerate import FSDP_KEYS
from gssim.interop.launchers import launched_ranks
from gssim.interop.reading import LAUNCHER, LOGGING, MODEL, NUMERICS, Keys, Rule, Value, listed, refused
from gssim.interop.trainer_keys import (
    ATTENTION,
    FACTORY,
    FUSED_KERNELS,
    LORA,
    PLAIN,
    REPLICAS,
    TRL,
    UNPACKED,
    add_adapters,
    base_model_in,
    hyperparameters_in,
    launch_file,
    launch_precision,
    precision_in,
    quantize_frozen,
    shard_as_launched,
    sharding_in,
)
from gssim.interop.training import (
    OTHER_OPTIMIZER,
    PRECISIONS,
    WHOLE_MODEL_COMPILED,
    Training,
    bucket_in,
    optimizer_in,
)
from gssim.workload import Model

PREFERENCES = "pairs of answers, or a reference model beside the trained one, cannot be simulated"
GENERATION = "reinforcement learning, which generates text beside training, cannot be simulated"

DATA = "dataset* eval_dataset* data_* *_file val_size max_samples max_*_samples formatting messages *_tag lazy_*"
TRAINER: dict[str, Rule] = {
    **refused(GENERATION, "num_generations reward_* use_vllm vllm_mode max_completion_length num_iterations ppo_*"),
    **refused(
        GENERATION, "temperature top_p top_k min_p scale_rewards mask_truncated_completions code_* e2b_* epsilon*"
    ),
    **refused(PREFERENCES, "beta rpo_alpha ref_model* reference_* precompute_ref* max_prompt_length use_asft_loss"),
    **refused(PREFERENCES, "desirable_weight undesirable_weight simpo_gamma gamma_beta_ratio cpo_alpha"),
    **refused(WHOLE_MODEL_COMPILED, "torch_compile torch_compile_backend torch_compile_mode torchdynamo"),
    **refused(FUSED_KERNELS, "use_liger_kernel enable_liger_kernel use_liger use_unsloth use_v1_kernels use_ipex"),
    **refused("activations that are offloaded cannot be simulated", "activation_offloading use_unsloth_gc"),
    **refused(LORA, "use_dora lora_target_parameters lora_modules_to_save additional_target adapter_name_or_path"),
    **refused("blocks that are added to the model cannot be simulated", "use_llama_pro"),
    **refused("layers that tokens leave out cannot be simulated", "mixture_of_depths"),
    **refused("other attention than that of the model file cannot be simulated", "shift_attn"),
    **refused(OTHER_OPTIMIZER, "use_galore use_apollo use_badam use_adam_mini use_muon adafactor"),
    **refused("experts on the processors of the host cannot be simulated", "use_kt"),
    **refused("its keys are not read: give Megatron-LM's arguments", "use_mca use_megatron_* megatron_*"),
    **refused("the sizes of its mesh are not read from here", "parallelism_config* use_hyper_* hyper_parallel_*"),
    **refused("maps in 8 bits are not read from the file", "fp8", or_set=("workload.map_precision",)),
    **refused("shards that are gathered in 8 bits cannot be simulated", "fp8_enable_fsdp_float8_all_gather"),
    **refused("parts of the model in another precision cannot be simulated", "upcast_*"),
    **refused(
        "weights that are quantized otherwise cannot be simulated", "bnb_4bit_quant_storage quantization_device*"
    ),
    **refused("the batch that it finds is not in the file", "auto_find_batch_size"),
    **refused("the batch is then that of all devices: give it so", "accelerator_config.split_batches"),
    **refused("when the allocator is emptied cannot be simulated", "torch_empty_cache_steps"),
    **refused("kernels that are chosen to be deterministic cannot be simulated", "full_determinism"),
    **refused("Apex's amp cannot be simulated", "half_precision_backend fp16_backend", neutral=("auto", "cuda_amp")),
    **refused("this sharding of FairScale's cannot be simulated", "sharded_ddp"),
    **refused("several GPUs of a process (DataParallel) cannot be simulated", "_n_gpu", neutral=(1,)),
    **refused("give it as a file that the key names", "deepspeed.*"),
    **refused("units by size cannot be simulated", "fsdp_min_num_params"),
    **refused(
        "it says how the training is sharded, and is not read",
        "launcher:*config_file launcher:*use_deepspeed launcher:*use_fsdp launcher:*zero* launcher:*fsdp_*",
        or_set=("plan.method",),
    ),
    **refused("PyTorch/XLA cannot be simulated", "fsdp_config.xla* tpu_*"),
    **refused("inputs of images, videos or sounds cannot be simulated", "image_* video_* audio_* media_dir crop_to_*"),
    **refused(
        "whose adapters, and beside which maps, is up to the program", "lora_enable", or_set=("workload.adapters",)
    ),
    **listed("only matters to models with inputs of images", "freeze_vision_tower freeze_multi_modal_projector"),
    **listed("of a feature that is off, or refused above", "freeze_trainable_* freeze_extra_modules"),
    **refused("which of its parts are not trained cannot be told", "freeze_*", or_set=("workload.frozen",)),
    **listed("approximated: one number more is summed over the ranks", "average_tokens_across_devices"),
    **listed(
        "units are the model's blocks, whichever way their activations are recomputed",
        "gradient_checkpointing_kwargs* use_reentrant_gc fsdp_transformer_layer_cls_to_wrap",
    ),
    **listed(
        "samples are of the longest length here, packed or not",
        "packing packing_strategy eval_packing neat_packing padding_free pad_to_multiple_of group_by_length "
        "length_column_name truncation_mode pad_to_max_length train_sampling_strategy",
    ),
    **listed(
        MODEL,
        "model_revision trust_remote_code *tokenizer* config_name config_overrides cache_dir template chat_template* "
        "resize_vocab add_tokens add_special_tokens new_special_tokens* init_special_tokens split_special_tokens "
        "pad_token eos_token rope_scaling train_from_scratch low_cpu_mem_usage model_type device_map use_kv_cache "
        "use_cache moe_aux_loss_coef router_aux_loss_coef output_router_logits response_template instruction_template",
    ),
    **listed(
        NUMERICS,
        "lr_* warmup_* adam_* tf32 optim_args optim_target_modules label_smoothing_factor neftune_noise_alpha seed_* "
        "num_cycles use_rslora pissa_* loraplus_* lora_task_type use_dft_loss use_eaft_loss eaft_alpha asft_alpha "
        "train_on_prompt mask_history completion_only_loss assistant_only_loss train_on_inputs "
        "ignore_pad_token_for_loss early_stopping_steps enable_thinking preserve_thinking",
    ),
    **listed(
        LOGGING,
        f"{DATA} output_dir overwrite_* num_train_epochs max_steps logging_* log_* save_* eval_* evaluation_strategy "
        "per_device_eval_batch_size per_gpu_eval_batch_size *_full_eval do_* report_to run_name project plot_loss "
        "compute_accuracy include_* disable_tqdm skip_memory_metrics prediction_loss_only remove_unused_columns "
        "label_names load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip resume_* "
        "push_to_hub* hub_* hf_* ms_hub_* om_hub_* wandb_* trackio_* swanlab_* use_swanlab dataloader_* streaming "
        "buffer_size mix_strategy interleave_probs preprocessing_* tokenized_path disable_shuffling shuffle_* "
        "profiler_* profile_modules predict_with_generate generation_* batch_eval_metrics use_legacy_* past_index "
        "text_column* validation_split* system_prompt default_system tool_format callbacks benchmarks "
        "print_param_status restore_callback_* enable_jit_checkpoint max_new_tokens num_proc export_* "
        "accelerator_config.dispatch_batches accelerator_config.even_batches accelerator_config.use_seedable_sampler "
        "accelerator_config.non_blocking accelerator_config.use_configured_state",
    ),
    **listed(
        LAUNCHER,
        "launcher:* ddp_timeout ddp_find_unused_parameters ddp_broadcast_buffers local_rank debug ray_* "
        "resources_per_worker* "
        "placement_strategy no_cuda use_mps_device log_on_each_node jit_mode_eval xpu_backend env.* mp_parameters "
        "fp8_backend fp16_opt_level infer_backend infer_dtype offload_folder vllm_*",
    ),
    **listed(
        "of a feature that is off, or refused above",
        "lora_* quantization_* double_quantization bnb_4bit_* use_bnb_nested_quant galore_* apollo_* badam_* "
        "kt_* liger_kernel_config* oft_* module_dropout create_new_adapter pref_* kto_* dpo_* parallelism_config.*",
    ),
}
"""How the Trainer's keys are treated that are not read."""
FSDP = {
    **listed("of Accelerate: the key fsdp says it", "fsdp_config.*sharding_strategy fsdp_config.*auto_wrap_policy"),
    **FSDP_KEYS,
}
"""How FSDP's keys are treated if FSDP is on."""
NO_FSDP = listed("of FSDP, which is off", "fsdp_config*")

SIGNS = {
    FACTORY: ("finetuning_type", "stage", "cutoff_len", "infer_backend", "export_dir"),
    TRL: (
        *("max_length", "max_seq_length", "use_peft", "dataset_mixture", "dataset_mixer", "dataset_num_proc"),
        *("dataset_text_field", "completion_only_loss", "assistant_only_loss", "attn_implementation"),
    ),
}
"""Keys that only one of the programs has."""
WITH_ACCELERATE = (
    "approximated: replicas; if an Accelerate file starts the training, give its sharding by --set plan.method=zero3 "
    "(or zero1, zero2) and --set workload.precision=bf16"
)
LOADED_IN_FP32 = (
    "approximated: weights are loaded in fp32, as by transformers before 5; later ones keep the checkpoint's "
    "precision: if that is bf16, --set workload.precision=bf16"
)
STAGES = {
    **dict.fromkeys(("pt", "sft"), None),
    **dict.fromkeys(("dpo", "kto", "rm"), PREFERENCES),
    "ppo": GENERATION,
}
LENGTHS: dict[str, tuple[tuple[str, ...], int | None]] = {
    FACTORY: (("cutoff_len",), 2048),
    TRL: (("max_length", "max_seq_length"), 1024),
    PLAIN: (("block_size", "model_max_length", "max_seq_length"), None),
}
"""Keys of the length of samples, and its default."""


def trainer(keys: Keys, cluster: Cluster, model: Model) -> Training:
    """Return the training in arguments of the Trainer; `model`: the model that --model gives."""
    program = next((name for name, signs in SIGNS.items() if any(sign in keys.values for sign in signs)), PLAIN)
    training = Training()
    _batch_in(keys, training, program)
    base_model_in(keys, training, "model_name_or_path")
    optimizer_in(keys, training, "optim")
    if not keys.has("optim"):
        origin = "optim is not given: adamw_torch_fused (the Trainer's default)"
        training.optimizer, training.optimizer_implementation = Value("adamw", origin), Value("fused", origin)
    hyperparameters_in(keys, training)
    bucket_in(keys, training, "ddp_bucket_cap_mb")
    _devices_in(keys, training, cluster)
    _task_in(keys, program)
    _computation_in(keys, training, program)
    shards = sharding_in(keys, training, cluster, program=program)
    launched = launch_file(keys, cluster)
    if launched is not None:
        shard_as_launched(keys, training, launched)
    unsharded = training.sharding is not None and training.sharding.key == REPLICAS
    if unsharded and not {"plan.method", "workload.precision"} <= keys.overridden:
        keys.listed.append((REPLICAS, WITH_ACCELERATE))
    if program == FACTORY:
        _factory_in(keys, training, model)
    else:
        _peft_in(keys, training)
    _precision_in(keys, training, program, launched)
    keys.close((FSDP if shards else NO_FSDP) | TRAINER)
    return training


def _batch_in(keys: Keys, training: Training, program: str) -> None:
    """Read the batch of a device, and the length of its samples."""
    name, batch = "per_device_train_batch_size", "workload.global_batch_size"
    training.micro_batch = keys.integer(name, "per_gpu_train_batch_size", sets=batch)
    if training.micro_batch is None:
        training.micro_batch = Value(8, f"{name} is not given: 8")
    accumulation = "gradient_accumulation_steps"
    training.accumulation = keys.integer(accumulation, sets="plan.micro_batches")
    if training.accumulation is None:
        training.accumulation = Value(1, f"{accumulation} is not given: 1")
    _length_in(keys, training, program)


def _length_in(keys: Keys, training: Training, program: str) -> None:
    """Read the length of samples, and list whether all have it."""
    packs = any([keys.enabled(name) is not None for name in ("packing", "neat_packing")])
    names, usual = LENGTHS[program]
    training.sequence = keys.integer(*names, sets="workload.sequence_length")
    no_limit = next((each for each in names if each in keys.values and not keys.has(each)), None)
    if training.sequence is None and no_limit is not None:
        reason = "of no limit: the length of samples is not in the file"
        keys.refuse(no_limit, reason, replaced_by=["workload.sequence_length"])
    elif training.sequence is None and usual is not None:
        training.sequence = Value(usual, f"{names[0]} is not given: {usual} ({program}'s default)")
    packs_itself = program == FACTORY and keys.values.get("stage") == "pt"
    if training.sequence is not None and not packs and not packs_itself:
        keys.listed.append((training.sequence.origin, UNPACKED))


def _devices_in(keys: Keys, training: Training, cluster: Cluster) -> None:
    """Read the number of ranks; refuse another backend, or other devices, than the cluster's."""
    workers = keys.integer("ray_num_workers", sets="plan.ranks")
    training.world = launched_ranks(keys, "nproc_per_node") or workers
    backend = keys.raw("ddp_backend")
    if backend is not None and backend != cluster.backend:
        keys.refuse("ddp_backend", f"the backend of --cluster is {cluster.backend}")
    on_cores = keys.enabled("use_cpu", "no_cuda")
    if on_cores is not None and cluster.backend == "nccl":
        keys.refuse(on_cores.key, "trains on processors, but --cluster has GPUs: give one of cores")


def _computation_in(keys: Keys, training: Training, program: str) -> None:
    """Read what a step computes besides the model: recomputation, and other attention and losses than its own."""
    key = "gradient_checkpointing"
    recomputes = keys.flag(key)
    if program == FACTORY and (recomputes is None or not recomputes.value):
        off = keys.enabled("disable_gradient_checkpointing")
        usual = "LLaMA-Factory recomputes unless disable_gradient_checkpointing = true"
        recomputes = Value(off is None, usual if off is None else off.origin)
    elif recomputes is None:
        recomputes = Value(
            program == TRL, f"{key} is not given: {str(program == TRL).lower()} (the default of {program})"
        )
    training.recompute = Value("full" if recomputes.value else "none", recomputes.origin)
    for name in ("attn_implementation", "flash_attn", "use_flash_attention_2"):
        if keys.raw(name) in ("eager", "disabled", "off"):
            keys.refuse(name, "attention whose scores are kept is not what shipped models have: see --model")
        elif keys.has(name):
            keys.note(name, ATTENTION)
    loss = keys.raw("loss_type")
    if loss == "chunked_nll":
        training.fused_loss = Value(True, keys.line("loss_type"))
        keys.note("loss_type", "approximated: the loss of all tokens, and logits are multiplied again in the backward")
    elif loss is not None and loss not in ("nll", "dft"):
        keys.refuse("loss_type", PREFERENCES)
    elif loss is None and program == TRL and "workload.fused_loss" not in keys.overridden:
        usual = "absent, so taken as nll; newer releases of TRL take chunked_nll: --set workload.fused_loss=true"
        keys.listed.append(("loss_type", f"approximated: {usual}"))


def _task_in(keys: Keys, program: str) -> None:
    """Refuse LLaMA-Factory's tasks other than training by the loss of the next token."""
    if program != FACTORY:
        return
    stage = keys.raw("stage")
    reason = None if stage is None else STAGES.get(str(stage), "no such stage is known here")
    if reason is not None:
        keys.refuse("stage", reason)
    if keys.enabled("do_train") is None:
        keys.refuse("do_train", "is not true: nothing is trained")
    for name in ("temperature", "top_p", "top_k", "do_sample", "num_beams", "repetition_penalty"):
        if keys.has(name):
            keys.note(name, LOGGING)


def _targets(given: Any) -> str | list[str]:
    """Return the linear maps that get adapters: `all-linear`, or a list of their names.

    >>> _targets("all"), _targets(["all-linear"]), _targets("q_proj,v_proj")
    ('all-linear', 'all-linear', ['q_proj', 'v_proj'])
    """
    names = given.replace(",", " ").split() if isinstance(given, str) else given if isinstance(given, list) else [given]
    targets = [str(each).strip() for each in names]
    return "all-linear" if targets in (["all"], ["all-linear"]) else targets


def _factory_in(keys: Keys, training: Training, model: Model) -> None:
    """Read LLaMA-Factory's method: all parameters, some blocks, or adapters, which are beside quantized weights."""
    kind = keys.raw("finetuning_type") or "lora"
    bits = keys.integer("quantization_bit")
    if kind == "lora":
        rank = keys.integer("lora_rank") or Value(8, "lora_rank is not given: 8")
        alpha = keys.number("lora_alpha") or Value(2 * rank.value, f"{rank.origin}: twice as much")
        targets = _targets(keys.raw("lora_target") or "all")
        add_adapters(keys, training, "finetuning_type", rank=rank, alpha=alpha, targets=targets)
    elif kind == "freeze":
        _frozen_in(keys, training, model)
    elif kind != "full":
        keys.refuse("finetuning_type", LORA)
    if bits is None:
        return
    method = str(keys.raw("quantization_method") or "bnb").lower()
    if kind != "lora" or bits.value not in (4, 8) or method not in ("bnb", "bitsandbytes"):
        keys.refuse("quantization_bit", "only 4 and 8 bits of bitsandbytes, under adapters, can be simulated")
        return
    nested = keys.flag("double_quantization")
    quantize_frozen(
        keys, training, bits, bits=bits.value, nested=nested is None or nested.value, format_key="quantization_type"
    )


def _frozen_in(keys: Keys, training: Training, model: Model) -> None:
    """Read which blocks are trained: the last ones, or the first ones if their number is negative."""
    count = keys.integer("freeze_trainable_layers", least=-(10**6)) or Value(2, "freeze_trainable_layers is 2")
    blocks = sum(layer.repeats for layer in model.layers if layer.block)
    chosen = range(max(0, blocks - count.value), blocks) if count.value > 0 else range(min(-count.value, blocks))
    numbers = "|".join(map(str, chosen))
    names = _targets(keys.raw("freeze_trainable_modules") or "all")
    modules = [""] if names == "all-linear" else list(names)
    patterns = [f".+.({numbers}).{name}" for name in modules] if chosen else []
    extra = keys.raw("freeze_extra_modules")
    patterns += [f"(.+)?{name}" for name in (_targets(extra) if extra else [])]
    training.trained = Value(patterns, keys.line("finetuning_type"))


def _peft_in(keys: Keys, training: Training) -> None:
    """Read TRL's adapters, and the quantized weights below them."""
    few = {bits: keys.enabled(f"load_in_{bits}bit") for bits in (4, 8)}
    on = [(bits, flag) for bits, flag in few.items() if flag is not None]
    if keys.enabled("use_peft") is None:
        for _, flag in on:
            keys.refuse(flag.key, "quantized weights without adapters cannot be simulated")
        ranks = [] if "use_peft" in keys.values else ["lora_r", "lora_rank", "lora_dim"]
        for name in ranks:  # the last: DeepSpeed-Chat's, which is on where it is positive
            if not keys.is_off(name):
                reason = "whether there are adapters is up to use_peft, which is not in the file: add it"
                keys.refuse(name, reason, replaced_by=["workload.adapters"])
        return
    if not keys.has("lora_target_modules"):
        reason = "needs lora_target_modules here: PEFT's own choice is not in the file"
        keys.refuse("use_peft", reason, replaced_by=["workload.adapters"])
        return
    rank = keys.integer("lora_r") or Value(16, "lora_r is not given: 16")
    alpha = keys.number("lora_alpha") or Value(32, "lora_alpha is not given: 32")
    targets = _targets(keys.raw("lora_target_modules"))
    add_adapters(keys, training, "use_peft", rank=rank, alpha=alpha, targets=targets)
    if len(on) > 1:
        keys.refuse("load_in_8bit", f"contradicts {on[0][1].origin}")
    for bits, flag in on:
        nested = keys.enabled("use_bnb_nested_quant") is not None
        quantize_frozen(keys, training, flag, bits=bits, nested=nested, format_key="bnb_4bit_quant_type")


def _precision_in(keys: Keys, training: Training, program: str, launched: Training | None) -> None:
    """Read the precision; `launched`: the training in the Accelerate file that starts it."""
    flags = [Value(PRECISIONS[key], flag.origin) for key in ("bf16", "fp16") if (flag := keys.enabled(key)) is not None]
    if len(flags) > 1:
        keys.refuse("fp16", f"contradicts {flags[0].origin}", replaced_by=["workload.precision"])
    on = flags[0] if flags else launch_precision(keys, launched)
    if on is None and program == TRL and not keys.has("bf16"):
        on = Value("bf16", "bf16 is not given: true (the default of TRL)")
    loaded = Value("fp32", "neither bf16 nor fp16") if on is None else Value("fp32", on.origin)
    if program == FACTORY:
        if (pure := keys.enabled("pure_bf16")) is not None:
            loaded = Value("bf16", pure.origin)
    elif keys.has("torch_dtype") or keys.has("dtype"):
        kinds: dict[str, str | None] = {**PRECISIONS, "auto": None}
        chosen = keys.choice(kinds, "dtype", "torch_dtype", sets="workload.precision", why="no such precision here")
        loaded = chosen or loaded
    elif program == PLAIN and on is not None and training.sharding is not None and training.sharding.origin == REPLICAS:
        keys.listed.append((on.origin, LOADED_IN_FP32))
    precision_in(keys, training, on, loaded)
