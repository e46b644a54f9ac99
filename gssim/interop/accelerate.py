"""Importers of DeepSpeed's JSON, Hugging Face Accelerate's YAML, and axolotl's YAML, which builds on both.

Keys as of DeepSpeed 0.18, Accelerate 1.12 and axolotl 0.13. What FSDP does is FSDP2's: `fully_shard` on each block.
"""

from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from gssim.cluster import Cluster
from gssim.interop.reading import (
    Keys,
    Rule,
    Value,
    flattened,
    listed,
    parsed_json,
    read_bounded,
    refused,
)
from gssim.interop.training import PRECISIONS, Training, optimizer_in

METHODS = ("plan.method",)
NOT_COMPILED = "compilation is not modelled: operations run one by one"
LOGGING = "logging, data, checkpoints and evaluation are no part of a step"
LOSS_SCALE = "how the factor on the loss changes: steps that are skipped are not predicted"
NUMERICS = "changes numbers, not step time or memory"
LAUNCHER = "how processes are started, not what they do"

DEEPSPEED: dict[str, Rule] = {
    **refused("parameters alone cannot be offloaded here", "zero_optimization.cpu_offload_params"),
    **refused(
        "updates of part of the parameters on the host cannot be simulated",
        "zero_optimization.offload_*.ratio",
        neutral=(1, 1.0),
    ),
    **listed(
        "how copies to the host are made", "zero_optimization.offload_*", "zero_optimization.cpu_offload_use_pin*"
    ),
    **refused(
        "quantized or compressed communication of ZeRO++ cannot be simulated", "zero_optimization.zero_quantized*"
    ),
    **refused(
        "a second partition of parameters (hpZ) cannot be simulated",
        "zero_optimization.zero_hpz_partition_size",
        neutral=(1,),
    ),
    **refused("ZenFlow cannot be simulated", "zero_optimization.zenflow*"),
    **listed("all-reduced instead where false: approximated by reduce-scatters", "zero_optimization.reduce_scatter"),
    **listed(
        "approximated: shards and messages here are of whole layers (ZeRO-1: of 5e8 elements)",
        "zero_optimization.*bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_max_*",
        "zero_optimization.stage3_prefetch*",
        "zero_optimization.sub_group_size",
        "zero_optimization.max_*",
        "zero_optimization.param_persistence_threshold",
        "zero_optimization.model_persistence_threshold",
        "zero_optimization.prefetch_bucket_size",
    ),
    **listed("buffers of the same bytes", "zero_optimization.contiguous_gradients", "zero_optimization.round_robin*"),
    **listed(LOGGING, "zero_optimization.*gather_*", "zero_optimization.*load_from*", "zero_optimization.elastic*"),
    **listed("implementation", "zero_optimization.allgather_partitions", "zero_optimization.ignore_unused*"),
    **listed("implementation", "zero_optimization.memory_efficient_linear", "zero_optimization.use_multi_rank*"),
    **listed("implementation", "zero_optimization.use_all_reduce_for_fetch*", "zero_optimization.module_granularity*"),
    **listed("implementation", "zero_optimization.mics_hierarchical*", "zero_optimization.override_module_apply"),
    **listed("implementation", "zero_optimization.legacy_stage1", "zero_optimization.log_trace_cache_warnings"),
    **refused("autocast inside fp16 cannot be simulated", "fp16.auto_cast", "torch_autocast.enabled"),
    **refused(
        "parameters without an fp32 master copy cannot be simulated",
        "fp16.fp16_master_weights_and_grads*",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
    ),
    **listed(LOSS_SCALE, "fp16.*", "bf16.*", "bfloat16.*", "torch_autocast.*", "loss_scale"),
    **listed(NUMERICS, "optimizer.params.*", "optimizer.legacy_fusion", "prescale_gradients"),
    **listed(NUMERICS, "gradient_predivide_factor", "scheduler.*", "seed", "gradient_accumulation_dtype"),
    **refused("Apex's amp cannot be simulated", "amp.enabled"),
    **refused("sparse gradients or attention cannot be simulated", "sparse_gradients", "sparse_attention.*"),
    **refused(
        "another data type for communication cannot be simulated",
        "data_types.grad_accum_dtype",
        "seq_parallel_communication_data_type",
    ),
    **refused("what it would choose is not in the file", "autotuning.enabled", "elasticity.enabled"),
    **refused("compression during training cannot be simulated", "compression_training.*enabled"),
    **refused("compression during training cannot be simulated", "quantize_training.enabled"),
    **refused(
        "samples of changing length cannot be simulated", "curriculum_learning.enabled", "data_efficiency.enabled"
    ),
    **refused("layers that are dropped cannot be simulated", "progressive_layer_drop.enabled", "eigenvalue.enabled"),
    **refused("generation beside training cannot be simulated", "hybrid_engine.enabled"),
    **refused("sequence parallelism cannot be simulated", "sequence_parallel_size", neutral=(1,)),
    **refused(NOT_COMPILED, "compile.enabled", "compile.deepcompile"),
    **refused(
        "activations that are partitioned or offloaded cannot be simulated",
        "activation_checkpointing.partition_activations",
        "activation_checkpointing.cpu_checkpointing",
    ),
    **listed("takes effect where the user's code recomputes: set plan.recompute", "activation_checkpointing.*"),
    **listed("of a feature that is off, or refused above", "compression_training.*", "curriculum_learning.*", "aio.*"),
    **listed("of a feature that is off, or refused above", "data_efficiency.*", "autotuning.*", "elasticity.*"),
    **listed("of a feature that is off, or refused above", "compile.*", "amp.*", "progressive_layer_drop.*"),
    **listed("of a feature that is off, or refused above", "hybrid_engine.*", "eigenvalue.*", "quantize_training.*"),
    **listed(LOGGING, "wall_clock_breakdown", "steps_per_print", "tensorboard.*", "wandb.*", "csv_monitor.*"),
    **listed(
        LOGGING, "comet.*", "comms_logger.*", "flops_profiler.*", "dump_state", "checkpoint.*", "memory_breakdown"
    ),
    **listed(LOGGING, "monitor_config.*", "timers.*", "nebula.*", "dataloader_drop_last", "use_data_before_expert*"),
    **listed("implementation", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "pipeline.*"),
    **listed("implementation", "disable_allgather", "graph_harvesting", "communication_options.*", "tensor_parallel.*"),
    **listed(LAUNCHER, "cuda_visible_devices", "comm_backend_name", "*_comment*", "*comment"),
}
"""What becomes of DeepSpeed's keys that are not read; the first pattern counts."""


def _precision_of_deepspeed(keys: Keys, training: Training) -> None:
    on = []
    for table, precision in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        key = f"{table}.enabled"
        if keys.raw(key) == "auto":
            keys.refuse(key, "what it becomes is not in the file", replaced_by=["workload.precision"])
        elif (flag := keys.flag(key)) is not None and flag.value:
            on.append(Value(precision, flag.origin))
    if len(on) > 1:
        keys.refuse(on[1].origin.partition(" = ")[0], f"contradicts {on[0].origin}", replaced_by=["workload.precision"])
    training.precision = on[0] if on else Value("fp32", "neither bf16.enabled nor fp16.enabled")
    if keys.raw("fp16.loss_scale") != "auto":
        fixed = keys.number("fp16.loss_scale")
        training.loss_scale = fixed if fixed is not None and fixed.value else None  # 0: dynamic
    reduced = keys.choice(PRECISIONS, "communication_data_type", sets="workload.reduce_precision")
    if reduced is not None and reduced.value != training.precision.value:
        training.reduce_precision = reduced


def deepspeed(keys: Keys) -> Training:
    """Return the training in a DeepSpeed configuration."""
    training = Training()
    _batch_of_deepspeed(keys, training)
    _precision_of_deepspeed(keys, training)
    _stage_of_deepspeed(keys, training)
    _offload_of_deepspeed(keys, training)
    training.tp = keys.integer("tensor_parallel.autotp_size", "tensor_parallel.tp_size", sets="plan.tp", least=0)
    if training.tp is not None and training.tp.value == 0:
        training.tp = None
    _optimizer_of_deepspeed(keys, training)
    if keys.raw("gradient_clipping") == "auto":
        keys.note("gradient_clipping", '"auto": what it becomes is not in the file; clipping is not counted')
    else:
        training.clip_norm = keys.number("gradient_clipping")
    for key, value in keys.values.items():
        if value == "auto" and key not in keys.read and key.startswith(("zero_optimization.", "fp16.", "scheduler.")):
            keys.note(key, '"auto": a bucket, a threshold or a schedule, approximated or without effect here')
    keys.close(DEEPSPEED)
    return training


def _batch_of_deepspeed(keys: Keys, training: Training) -> None:
    for name, key, sets in (
        ("global_batch", "train_batch_size", "workload.global_batch_size"),
        ("micro_batch", "train_micro_batch_size_per_gpu", "workload.global_batch_size"),
        ("accumulation", "gradient_accumulation_steps", "plan.micro_batches"),
    ):
        if keys.raw(key) == "auto" and sets in keys.overridden:
            keys.note(key, f"replaced by --set {sets}")
        else:
            setattr(training, name, keys.integer(key, sets=sets))


def _stage_of_deepspeed(keys: Keys, training: Training) -> None:
    stage = keys.integer("zero_optimization.stage", sets="plan.method", least=0)
    training.zero1_implementation = "deepspeed"
    # runtime/pipe/engine.py keeps as many buffers as micro-batches are in flight, and one for a gradient
    training.receive_buffers = Value("in-flight", "DeepSpeed's pipelines have buffers for what is in flight")
    training.sharding = Value("none", "zero_optimization.stage is not given: 0")
    if stage is not None and stage.value > 3:
        keys.refuse("zero_optimization.stage", "must be from 0 to 3", replaced_by=METHODS)
    elif stage is not None:
        training.sharding = Value("none" if stage.value == 0 else f"zero{stage.value}", stage.origin)
    number = stage.value if stage else 0
    if stage is not None and number in (2, 3):  # gradients are reduced in every backward
        training.gradient_sync = Value("micro-batch", stage.origin)
    mics = keys.integer("zero_optimization.mics_shard_size", sets="plan.dp_shard", least=-1)
    if mics is not None and mics.value > 0:
        training.dp_shard = mics
        if number != 3:
            keys.refuse("zero_optimization.mics_shard_size", "needs zero_optimization.stage = 3", replaced_by=METHODS)
    usual = f"zero_optimization.overlap_comm is not given: {'true' if number == 3 else 'false'}"
    training.overlap = keys.flag("zero_optimization.overlap_comm") or Value(number == 3, usual)


OFFLOADED = {"none": False, "cpu": True}
OTHER_PLACE = "offloading to other places than the host's memory cannot be simulated"


def _offload_of_deepspeed(keys: Keys, training: Training) -> None:
    """Read what is offloaded; DeepSpeed copies parameters in the training's precision, FSDP2 in the optimizer's."""
    states, parameters = (
        keys.choice(OFFLOADED, f"zero_optimization.offload_{name}.device", sets="plan.offload", why=OTHER_PLACE)
        for name in ("optimizer", "param")
    )
    states = states or keys.flag("zero_optimization.cpu_offload")
    offloads, everything = (each is not None and each.value for each in (states, parameters))
    if everything and parameters is not None:
        key = parameters.origin.partition(" = ")[0]
        if not offloads:
            keys.refuse(key, "parameters alone cannot be offloaded here", replaced_by=["plan.offload"])
        elif training.precision is not None and training.precision.value != "fp32":
            keys.refuse(
                key,
                "copies of parameters in 16 bits cannot be simulated: FSDP2's are in 32",
                replaced_by=["plan.offload"],
            )
        training.offload = Value("parameters", parameters.origin)
    elif offloads and states is not None:
        training.offload = Value("optimizer", states.origin)
        if training.sharding is not None and training.sharding.value == "zero3":
            keys.note(states.origin.partition(" = ")[0], "approximated: updated parameters are copied in 32 bits here")


def _optimizer_of_deepspeed(keys: Keys, training: Training) -> None:
    kind = keys.raw("optimizer.type")
    if kind is not None:
        optimizer_in(keys, training, "optimizer.type")
        decoupled = keys.flag("optimizer.params.adam_w_mode")
        if str(kind).lower() in ("adam", "fusedadam") and training.optimizer is not None:
            # DeepSpeed's Adam is AdamW unless adam_w_mode says otherwise, and fused unless torch_adam does
            adamw = decoupled is None or decoupled.value
            training.optimizer = Value("adamw" if adamw else "adam", training.optimizer.origin)
        if str(kind).lower() in ("adam", "adamw", "fusedadam") and training.optimizer is not None:
            by_torch = keys.flag("optimizer.params.torch_adam")
            if by_torch is None or not by_torch.value:
                training.optimizer_implementation = Value("fused", f"{training.optimizer.origin}: FusedAdam")
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay"), ("momentum", "momentum")):
        path = f"optimizer.params.{key}"
        if keys.raw(path) == "auto":
            keys.note(path, '"auto": changes neither step time nor memory')
        else:
            setattr(training, name, keys.number(path, sets=f"workload.{name}"))


ACCELERATE: dict[str, Rule] = {
    **refused("Amazon SageMaker starts its own cluster", "compute_environment", neutral=("LOCAL_MACHINE",)),
    **refused(
        "compilation is not modelled: operations run one by one",
        "dynamo_config.dynamo_backend",
        "dynamo_backend",
        neutral=("NO", "no"),
    ),
    **listed("offloading to a disk, which is off", "deepspeed_config.offload_*_nvme_path"),
    **refused("modules that are left out cannot be simulated", "fsdp_config.fsdp_ignored_modules"),
    **refused("units by size cannot be simulated", "fsdp_config.fsdp_min_num_params"),
    **refused("sequence parallelism cannot be simulated", "parallelism_config.*sp_size", neutral=(1,)),
    **listed("of sequence or context parallelism, which is off, refused or read by its degree", "parallelism_config.*"),
    **listed("approximated: the next unit's parameters are gathered while this one computes", "fsdp_config.*prefetch*"),
    **listed(
        "approximated: the next unit's parameters are gathered while this one computes", "fsdp_config.*limit_all*"
    ),
    **listed("how the model is built and saved", "fsdp_config.*state_dict*", "fsdp_config.*cpu_ram_efficient*"),
    **listed("how the model is built and saved", "fsdp_config.*sync_module_states", "fsdp_config.*use_orig_params"),
    **listed("units are the model's blocks", "fsdp_config.*layer_cls_to_wrap"),
    **listed("how the model is built and saved", "deepspeed_config.zero3_*", "deepspeed_config.deepspeed_moe*"),
    **listed(LAUNCHER, "deepspeed_config.deepspeed_multinode*", "deepspeed_config.deepspeed_hostfile"),
    **listed(LAUNCHER, "deepspeed_config.deepspeed_in*", "deepspeed_config.deepspeed_ex*", "mpirun_config.*"),
    **listed("of a feature that is off, or refused above", "fp8_config.*", "dynamo_config.*", "ipex_config.*"),
    **listed("of a feature that is off, or refused above", "megatron_lm_config.*", "fsdp_config.fsdp_version"),
    **listed(LAUNCHER, "debug", "machine_rank", "main_*", "rdzv_*", "same_network", "tpu_*", "gpu_ids", "num_machines"),
    **listed(LAUNCHER, "downcast_bf16", "enable_cpu_affinity", "command*", "num_cpu_threads_per_process", "use_cpu"),
    **listed(LAUNCHER, "deepspeed_hostfile", "deepspeed_multinode_launcher", "max_restarts", "monitor_interval"),
}
"""What becomes of Accelerate's keys that are not read."""

SHARDINGS = {
    **dict.fromkeys(("full_shard", "1", "true", "full"), ("zero3", False)),
    **dict.fromkeys(("shard_grad_op", "2", "false"), ("zero2", False)),
    **dict.fromkeys(("no_shard", "3"), ("none", False)),
    **dict.fromkeys(("hybrid_shard", "4"), ("zero3", True)),
    **dict.fromkeys(("hybrid_shard_zero2", "_hybrid_shard_zero2", "5"), ("zero2", True)),
}
"""(sharding, whether inside hosts only) by FSDP1's strategy or FSDP2's reshard_after_forward, in lower case."""


def accelerate(keys: Keys, cluster: Cluster) -> Training:
    """Return the training in an Accelerate configuration, with that of the DeepSpeed file that it names."""
    kind = str(keys.raw("distributed_type") or "NO").upper()
    found = Training()
    if kind == "DEEPSPEED":
        found = _deepspeed_of_accelerate(keys)
    elif kind == "FSDP":
        read_fsdp(keys, found, cluster, prefix="fsdp_config.fsdp_")
    elif kind in ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "NO"):
        found.sharding = Value("none", keys.line("distributed_type"))
    else:
        keys.refuse("distributed_type", "cannot be imported; allowed: NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED")
    world = keys.integer("num_processes", sets="plan.ranks")
    found.world = Value(1, keys.line("distributed_type")) if kind == "NO" else world
    _parallelism_of_accelerate(keys, found, kind)
    _precision_of_accelerate(keys, found, kind)
    keys.close(ACCELERATE)
    return found


def _parallelism_of_accelerate(keys: Keys, found: Training, kind: str) -> None:
    """Read the sizes of the mesh, of which FSDP2 shards over dp_shard times cp: parallelism_config.py, fsdp_utils.py.

    A size that is not given is 1, except where all are: then FSDP shards over all processes.
    """
    sizes = {}
    for name in ("dp_replicate", "dp_shard", "tp", "cp"):
        key = f"parallelism_config.parallelism_config_{name}_size"
        if (size := keys.integer(key, f"parallelism_config.{name}_size", sets=f"plan.{name}", least=-1)) is not None:
            sizes[name] = size
    data = [sizes.pop(name, None) for name in ("dp_replicate", "dp_shard")]
    for name, size in sizes.items():
        setattr(found, name, size)
    used = kind == "FSDP" and any(size is not None and size.value != 1 for size in (*data, *sizes.values()))
    for size in data:
        if size is not None and not used:
            reason = "of 1: all processes share the data" if size.value == 1 else f"{kind} does not use it"
            keys.note(size.origin.partition(" = ")[0], reason)
    if not used:
        return
    for name, size in zip(("dp_replicate", "dp_shard"), data, strict=True):
        setattr(found, name, size or Value(1, f"parallelism_config_{name}_size is not given: 1"))
    replicas, shards = data
    if replicas is not None and replicas.value > 1 and (shards is None or shards.value == 1):
        reason = "FSDP takes no replicas without dp_shard_size > 1; distributed_type MULTI_GPU replicates"
        keys.refuse(replicas.origin.partition(" = ")[0], reason, replaced_by=("plan.dp_shard", "plan.method"))


def _precision_of_accelerate(keys: Keys, found: Training, kind: str) -> None:
    precision = keys.choice(
        PRECISIONS, "mixed_precision", sets="workload.precision", why="this precision cannot be simulated"
    )
    if precision is not None and (kind != "DEEPSPEED" or precision.value != "fp32"):
        found.precision = precision
    as_said = kind in ("FSDP", "DEEPSPEED") or "workload.precision" in keys.overridden
    if precision is not None and precision.value != "fp32" and not as_said:
        _autocast(found, precision)
    if not keys.has("mixed_precision") and kind != "DEEPSPEED":
        found.precision = Value("fp32", "mixed_precision is not given: no")


def _autocast(training: Training, precision: Value) -> None:
    """Set automatic mixed precision over fp32 parameters."""
    training.autocast = precision
    training.precision = Value("fp32", f"{precision.origin}: autocast over fp32 parameters")


def _deepspeed_of_accelerate(keys: Keys) -> Training:
    named = keys.raw("deepspeed_config.deepspeed_config_file")
    if named is not None:
        found = deepspeed_file(keys, "deepspeed_config.deepspeed_config_file", str(named))
        if found is None:
            return Training()
    else:
        table = {
            "zero_optimization.stage": "zero_stage",
            "gradient_accumulation_steps": "gradient_accumulation_steps",
            "gradient_clipping": "gradient_clipping",
            "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
            "zero_optimization.offload_param.device": "offload_param_device",
        }
        inner = Keys(keys.file, {}, keys.overridden, keys.ignored)
        renamed = {}
        for theirs, ours in table.items():
            key = f"deepspeed_config.{ours}"
            if keys.has(key):
                renamed[theirs], inner.values[theirs] = key, keys.raw(key)
        found = deepspeed(inner)
        found.zero1_implementation = "deepspeed"
        for name in ("sharding", "accumulation", "clip_norm", "offload"):
            value: Value | None = getattr(found, name)
            if value is not None and (theirs := value.origin.partition(" = ")[0]) in renamed:
                setattr(found, name, Value(value.value, keys.line(renamed[theirs])))
        keys.refused += inner.refused
        keys.listed += inner.listed
    return found


def deepspeed_file(keys: Keys, key: str, name: str) -> Training | None:
    """Return the training in a DeepSpeed file that a key names, beside the file or in the working directory."""
    places = [Path(keys.file).parent / name, Path(name)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        keys.refuse(key, "no such file, beside the file or in the working directory")
        return None
    content = flattened(parsed_json(read_bounded(path), file=str(path)), file=str(path))
    inner = Keys(str(path), content, keys.overridden, keys.ignored)
    found = deepspeed(inner)
    keys.listed += [(f"{path.name}: {line}", reason) for line, reason in inner.listed]
    keys.refused += [(f"{path.name}: {line}", reason) for line, reason in inner.refused]
    keys.read.add(key)
    return found


def read_fsdp(keys: Keys, training: Training, cluster: Cluster, *, prefix: str) -> None:
    """Read the keys of FSDP, in either generation, that begin with `prefix`."""
    version = keys.integer(f"{prefix}version", "fsdp_version")
    names = [f"{prefix}reshard_after_forward", f"{prefix}sharding_strategy"]
    strategy = keys.choice(
        SHARDINGS, *(names if version and version.value == 2 else reversed(names)), sets="plan.method"
    )
    for name in names:  # the other one has no effect in this generation
        if keys.has(name) and name not in keys.read:
            keys.note(name, "of the other generation of FSDP")
    sharding, inside = strategy.value if strategy is not None else ("zero3", False)
    origin = strategy.origin if strategy is not None else "FSDP shards all, where the file does not say"
    training.sharding = Value(sharding, origin)
    if inside:
        hosts = Counter(device.host for device in cluster.devices)
        if len(set(hosts.values())) > 1:
            keys.refuse(names[1], "the cluster's hosts have unequal numbers of devices", replaced_by=["plan.dp_shard"])
        training.dp_shard = Value(next(iter(hosts.values())), f"{origin}: the devices of a host")
    offload = keys.flag(f"{prefix}offload_params", "fsdp_config.fsdp_offload_params", "fsdp_config.offload_params")
    if offload is not None and offload.value:
        training.offload = Value("parameters", offload.origin)
    checkpointing = keys.flag(f"{prefix}activation_checkpointing")
    if checkpointing is not None:
        training.recompute = Value("full" if checkpointing.value else "none", checkpointing.origin)
    wrap = keys.raw(f"{prefix}auto_wrap_policy")
    if wrap is not None and str(wrap).upper() != "TRANSFORMER_BASED_WRAP":
        keys.refuse(f"{prefix}auto_wrap_policy", "units are the model's blocks: TRANSFORMER_BASED_WRAP")


LORA = "adapters of this kind, or other frozen weights, cannot be simulated"
AXOLOTL: dict[str, Rule] = {
    **refused(LORA, "lora_model_dir", "relora*", "unfrozen_parameters", "peft_*", "lisa_*"),
    **refused(LORA, "lora_modules_to_save", "lora_layers_to_transform", "peft.use_rslora"),
    **refused("quantized weights cannot be simulated", "load_in_8bit", "load_in_4bit", "gptq", "qat.*", "ptq.*"),
    **refused("quantized weights cannot be simulated", "quantization.*", "model_quantization_config", "use_onebitllms"),
    **refused(
        "reinforcement and preference training cannot be simulated", "rl", "reward_model", "process_reward_model"
    ),
    **refused("fp8 cannot be simulated", "fp8", "fp8_*"),
    **refused(NOT_COMPILED, "torch_compile"),
    **refused("fused kernels (Liger, cut cross-entropy, ...) are not modelled", "plugins", "cut_cross_entropy"),
    **refused(
        "fused kernels (Liger, cut cross-entropy, ...) are not modelled", "liger_*", "use_kernels", "lora_*_kernel"
    ),
    **refused(
        "fused kernels (Liger, cut cross-entropy, ...) are not modelled", "unsloth_*", "tiled_mlp", "flash_attn_*"
    ),
    **refused("activations that are offloaded cannot be simulated", "activation_offloading"),
    **refused("experts cannot be simulated", "expert_parallel_size", neutral=(1,)),
    **refused(
        "sharding inside the process (Ulysses, ring) cannot be simulated", "sequence_parallel_degree", neutral=(1,)
    ),
    **listed("attention is that of the model file", "*attention*", "attn_implementation", "sdp_*", "flex_attn_*"),
    **listed("of a feature that is off, or refused above", "lora_*", "gptq*", "trl.*", "ebft.*", "vllm.*", "bnb_*"),
    **listed("of a feature that is off, or refused above", "torch_compile_*", "adapter_*", "gdpo*", "kd_*", "dpo_*"),
    **listed("of FSDP, which is off", "fsdp_config.*", "fsdp_final_state_dict_type"),
    **listed(
        "samples are of sequence_len tokens here", "sample_packing*", "eval_sample_packing", "pad_to_sequence_len"
    ),
    **listed("samples are of sequence_len tokens here", "multipack_*", "group_by_length", "curriculum_sampling"),
    **listed(
        "samples are of sequence_len tokens here", "*packed_sequence*", "excess_length_strategy", "min_sample_len"
    ),
    **listed(
        "the model is --model", "base_model*", "model_type", "*tokenizer*", "processor_type", "is_*_derived_model"
    ),
    **listed("the model is --model", "trust_remote_code", "revision_of_model", "overrides_of_model*", "type_of_model"),
    **listed(
        "the model is --model", "special_tokens*", "tokens*", "added_tokens*", "resize_token*", "shrink_embeddings"
    ),
    **listed("the model is --model", "chat_template*", "eot_tokens*", "num_labels", "*embeddings_skip_upcast"),
    **listed(NUMERICS, "lr_*", "warmup_*", "cosine_*", "adam_*", "learning_rate_*", "tf32", "train_on_inputs"),
    **listed(NUMERICS, "noisy_embedding_alpha", "neftune*", "label_smoothing*", "loss_watchdog*", "embedding_lr*"),
    **listed(NUMERICS, "eta_min", "*early_stopping*", "roles_to_train*", "train_on_eos", "optim_args*", "seed*"),
    **listed(
        LOGGING, "dataset*", "val_set_size", "test_datasets*", "pretraining_dataset*", "shuffle_*", "skip_prepare*"
    ),
    **listed(LOGGING, "output_dir", "num_epochs", "max_steps", "logging_*", "save_*", "saves_*", "eval_*", "evals_*"),
    **listed(LOGGING, "wandb_*", "mlflow_*", "comet_*", "use_tensorboard", "swanlab_*", "use_swanlab", "trackio_*"),
    **listed(LOGGING, "hub_*", "hf_*", "push_*", "*resume_from*", "streaming*", "do_*_eval", "metric_*", "greater_*"),
    **listed(LOGGING, "dataloader_*", "remove_unused_columns", "profiler_*", "gc_steps", "include_*", "load_best*"),
    **listed(LAUNCHER, "ddp_timeout", "ddp_find_unused_parameters", "local_rank", "device*", "strict", "debug"),
    **listed(LAUNCHER, "use_ray", "ray_*", "resources_per_worker*", "low_cpu_mem_usage", "torchdistx_path", "secrets"),
    **listed(
        LAUNCHER, "experimental_*", "gpu_memory_limit", "max_memory", "project_name", "gradient_checkpointing_kwargs*"
    ),
}
"""What becomes of axolotl's keys that are not read."""


def axolotl(keys: Keys, cluster: Cluster) -> Training:
    """Return the training in an axolotl recipe; batches are of samples that are packed to `sequence_len` tokens."""
    training = Training()
    sizes = {
        "dp_replicate": ("dp_replicate_size", "plan.dp_replicate"),
        "dp_shard": ("dp_shard_size", "plan.dp_shard"),
        "tp": ("tensor_parallel_size", "plan.tp"),
        "cp": ("context_parallel_size", "plan.cp"),
        "sequence": ("sequence_len", "workload.sequence_length"),
        "micro_batch": ("micro_batch_size", "workload.global_batch_size"),
        "accumulation": ("gradient_accumulation_steps", "plan.micro_batches"),
    }
    for name, (key, sets) in sizes.items():
        setattr(training, name, keys.integer(key, sets=sets))
    if keys.has("batch_size"):
        whole = keys.integer("batch_size", sets="plan.micro_batches")
        micro = training.micro_batch
        if whole is not None and micro is not None and training.accumulation is None and not whole.value % micro.value:
            training.accumulation = Value(whole.value // micro.value, whole.origin)
        elif whole is not None and training.accumulation is None:
            keys.refuse("batch_size", "is no multiple of micro_batch_size", replaced_by=["plan.micro_batches"])
    optimizer_in(keys, training, "optimizer")
    for name, key in (("learning_rate", "learning_rate"), ("weight_decay", "weight_decay")):
        setattr(training, name, keys.number(key, sets=f"workload.{name}"))
    training.clip_norm = keys.number("max_grad_norm")
    training.seed = keys.integer("seed", least=0)
    if keys.raw("gradient_checkpointing") in ("offload", "offload_disk"):
        keys.refuse("gradient_checkpointing", "activations that are offloaded cannot be simulated")
    elif (checkpointing := keys.flag("gradient_checkpointing")) is not None:
        training.recompute = Value("full" if checkpointing.value else "none", checkpointing.origin)
    _axolotl_sharding(keys, training, cluster)
    _axolotl_adapters(keys, training)
    _axolotl_precision(keys, training)
    keys.close(AXOLOTL)
    return training


def _axolotl_adapters(keys: Keys, training: Training) -> None:
    """Read adapters of low rank: their rank, scale and maps."""
    kind = keys.raw("adapter")
    if not kind:
        return
    if kind != "lora":
        keys.refuse("adapter", LORA)
        return
    rank, alpha = keys.integer("lora_r"), keys.number("lora_alpha")
    linear, targets = keys.flag("lora_target_linear"), keys.raw("lora_target_modules")
    if rank is None or not (targets or (linear is not None and linear.value)):
        keys.refuse("adapter", "needs lora_r, and lora_target_modules or lora_target_linear")
        return
    dropout = keys.number("lora_dropout")
    if dropout is not None and dropout.value:
        keys.note("lora_dropout", "approximated: the masks of dropout in adapters are not counted")
    table: dict[str, object] = {"rank": rank.value}
    if alpha is not None:
        table["alpha"] = alpha.value
    if linear is not None and linear.value:
        table["targets"] = "all-linear"
    else:
        table["targets"] = [targets] if isinstance(targets, str) else list(targets)
    training.adapters = Value(table, keys.line("adapter"))


def _axolotl_sharding(keys: Keys, training: Training, cluster: Cluster) -> None:
    file = keys.raw("deepspeed")
    on = keys.raw("fsdp")
    shards = any(key.startswith("fsdp_config.") and keys.has(key) for key in keys.values) or bool(on)
    if file and shards:
        keys.refuse("deepspeed", "contradicts fsdp: it is one or the other")
    elif file:
        found = deepspeed_file(keys, "deepspeed", str(file))
        if found is not None:
            training.sharding, training.zero1_implementation = found.sharding, found.zero1_implementation
            training.overlap, training.gradient_sync = found.overlap, found.gradient_sync
            training.offload = found.offload
            training.dp_shard = training.dp_shard or found.dp_shard
    elif shards:
        prefix = (
            "fsdp_config.fsdp_" if any(key.startswith("fsdp_config.fsdp_") for key in keys.values) else "fsdp_config."
        )
        read_fsdp(keys, training, cluster, prefix=prefix)
        if isinstance(on, list) and "offload" in on:
            training.offload = Value("parameters", keys.line("fsdp"))
        _close_fsdp(keys)
        # the Trainer leaves gradients whole until the last micro-batch (accelerate's no_sync)
        if training.accumulation is not None and training.accumulation.value > 1:
            training.gradient_sync = Value("step", f"{training.accumulation.origin}: the Trainer's no_sync")
    else:
        training.sharding = Value("none", "neither fsdp nor deepspeed")


def _close_fsdp(keys: Keys) -> None:
    """Account for the other keys of FSDP as Accelerate does."""
    for key in keys.values:
        if key.startswith("fsdp_config.") and key not in keys.read:
            rule = next((rule for pattern, rule in ACCELERATE.items() if fnmatchcase(key, pattern)), None)
            if rule is not None and rule.harmless(keys.values[key]):
                keys.note(key, rule.reason if rule.no_effect else "off")
            elif rule is not None:
                keys.refuse(key, rule.reason)


def _axolotl_precision(keys: Keys, training: Training) -> None:
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
        training.precision = Value("fp32", "neither bf16 nor fp16")
        return
    key, flag = on[0]
    training.precision = Value(PRECISIONS[key], flag.origin)
    sharded = training.sharding is not None and training.sharding.value != "none"
    if sharded or "workload.precision" in keys.overridden:
        return
    if training.adapters is None:
        _autocast(training, training.precision)
    else:
        keys.note(key, "approximated beside adapters: all weights are in it, and autocast casts none")
