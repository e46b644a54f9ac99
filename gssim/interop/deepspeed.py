"""Importer of DeepSpeed's JSON, on its own or named by another program's file.

Keys are those of DeepSpeed 0.18.
"""

from fnmatch import fnmatchcase

from gssim.interop.reading import (
    LAUNCHER,
    LOGGING,
    NUMERICS,
    Keys,
    Rule,
    Value,
    flattened,
    listed,
    named_file,
    parsed_json,
    read_bounded,
    refused,
)
from gssim.interop.training import AMSGRAD, PRECISIONS, WHOLE_MODEL_COMPILED, Training, optimizer_in

METHODS = ("plan.method",)
LOSS_SCALE = "how the factor on the loss changes: steps that are skipped are not predicted"

DEEPSPEED: dict[str, Rule] = {
    **refused("parameters alone cannot be offloaded here", "zero_optimization.cpu_offload_params"),
    **refused("SuperOffload cannot be simulated", "zero_optimization.offload_*.super_offload"),
    **refused(
        "recomputed units of several layers are up to plan.recompute",
        "pipeline.activation_checkpoint_interval",
        or_set=("plan.recompute",),
    ),
    **refused(
        "updates of part of the parameters on the host cannot be simulated",
        "zero_optimization.offload_*.ratio",
        neutral=(1, 1.0),
    ),
    **listed("how copies to the host are made", "zero_optimization.offload_* zero_optimization.cpu_offload_use_pin*"),
    **refused(
        "quantized or compressed communication of ZeRO++ cannot be simulated", "zero_optimization.zero_quantized*"
    ),
    **refused(
        "a second partition of parameters (hpZ) cannot be simulated",
        "zero_optimization.zero_hpz_partition_size",
        neutral=(1,),
    ),
    **refused("ZenFlow cannot be simulated", "zero_optimization.zenflow*"),
    **listed("gradients are all-reduced either way", "zero_optimization.reduce_scatter"),
    **listed(
        "where false, gradients are reduced to their owners, with half the bytes; approximated by all-reduces",
        "zero_optimization.use_multi_rank*",
    ),
    **listed(
        "approximated: shards and messages here are of whole layers (ZeRO-1 and ZeRO-2: of 5e8 elements)",
        "zero_optimization.allgather_bucket_size zero_optimization.stage3_param_persistence_threshold "
        "zero_optimization.stage3_max_* zero_optimization.stage3_prefetch* zero_optimization.sub_group_size "
        "zero_optimization.max_* zero_optimization.param_persistence_threshold "
        "zero_optimization.*model_persistence_threshold zero_optimization.prefetch_bucket_size",
    ),
    **listed("buffers of the same bytes", "zero_optimization.contiguous_gradients zero_optimization.round_robin*"),
    **listed(
        LOGGING,
        "zero_optimization.*gather_* zero_optimization.*load_from* zero_optimization.elastic* wall_clock_breakdown "
        "steps_per_print tensorboard.* wandb.* csv_monitor.* comet.* comms_logger.* flops_profiler.* dump_state "
        "checkpoint.* memory_breakdown comms_config.* monitor_config.* timers.* nebula.* dataloader_drop_last "
        "use_data_before_expert*",
    ),
    **listed(
        "implementation",
        "zero_optimization.allgather_partitions zero_optimization.ignore_unused* "
        "zero_optimization.memory_efficient_linear "
        "zero_optimization.use_all_reduce_for_fetch* zero_optimization.module_granularity* "
        "zero_optimization.override_module_apply zero_optimization.legacy_stage1 "
        "zero_optimization.log_trace_cache_warnings zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "zero_optimization.enable_sanity_checks zero_optimization.pipeline_loading_checkpoint "
        "disable_allgather graph_harvesting communication_options.* tensor_parallel.tp.tp_grain_size "
        "tensor_parallel.tensor_parallel.tp_grain_size",
    ),
    **listed(
        "approximated: parameters of a shard group are gathered in one step, not inside hosts first",
        "zero_optimization.mics_hierarchical*",
    ),
    **listed("stages are those of the user's PipelineModule: set plan.pp (and plan.stages)", "pipeline.*"),
    **listed(
        "approximated: maps are cut as Megatron-LM cuts them",
        "tensor_parallel.preset_model tensor_parallel.partition_config.* tensor_parallel.injection_policy_tuple",
    ),
    **listed("how the model is loaded", "tensor_parallel.dtype tensor_parallel.keep_module_on_host"),
    **refused(
        "kernels of inference in training cannot be simulated",
        "tensor_parallel.replace_with_kernel_inject tensor_parallel.kernel_inject",
    ),
    **refused("autocast inside fp16 cannot be simulated", "fp16.auto_cast torch_autocast.enabled"),
    **refused(
        "parameters without an fp32 master copy cannot be simulated",
        "fp16.fp16_master_weights_and_grads* bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states",
    ),
    **listed(LOSS_SCALE, "fp16.* bf16.* bfloat16.* torch_autocast.* loss_scale"),
    **refused(AMSGRAD, "optimizer.params.amsgrad"),
    **listed(
        NUMERICS,
        "optimizer.params.* optimizer.legacy_fusion prescale_gradients gradient_predivide_factor scheduler.* seed "
        "gradient_accumulation_dtype",
    ),
    **refused("Apex's amp cannot be simulated", "amp.enabled"),
    **refused("sparse gradients or attention cannot be simulated", "sparse_gradients sparse_attention.*"),
    **refused("gradients that are added up in another precision cannot be simulated", "data_types.grad_accum_dtype"),
    **refused("what it would choose is not in the file", "autotuning.enabled elasticity.enabled"),
    **refused(
        "compression during training cannot be simulated", "compression_training.*enabled quantize_training.enabled"
    ),
    **refused("samples of changing length cannot be simulated", "curriculum_learning.enabled data_efficiency.enabled"),
    **refused("layers that are dropped cannot be simulated", "progressive_layer_drop.enabled eigenvalue.enabled"),
    **refused("generation beside training cannot be simulated", "hybrid_engine.enabled"),
    **refused(WHOLE_MODEL_COMPILED, "compile.enabled compile.deepcompile"),
    **refused(
        "activations that are partitioned or offloaded cannot be simulated",
        "activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing",
    ),
    **listed("takes effect where the user's code recomputes: set plan.recompute", "activation_checkpointing.*"),
    **listed(
        "of a feature that is off, or refused above",
        "compression_training.* curriculum_learning.* aio.* data_efficiency.* autotuning.* elasticity.* compile.* "
        "amp.* progressive_layer_drop.* hybrid_engine.* eigenvalue.* quantize_training.*",
    ),
    **listed(LAUNCHER, "cuda_visible_devices comm_backend_name *_comment* *comment _*"),
}
"""How DeepSpeed's keys are treated that are not read; the first matching pattern counts."""


OF_FP16 = ("fp16.auto_cast", "fp16.fp16_master_weights_and_grads")
"""Keys that have no effect outside fp16, whatever their value."""


def _precision(keys: Keys, training: Training) -> None:
    on = []
    for table, precision in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        key = f"{table}.enabled"
        if keys.raw(key) == "auto":
            keys.refuse(key, "what it becomes is not in the file", replaced_by=["workload.precision"])
        elif (flag := keys.enabled(key)) is not None:
            on.append(Value(precision, flag.origin))
    if len(on) > 1:
        keys.refuse(on[1].origin.partition(" = ")[0], f"contradicts {on[0].origin}", replaced_by=["workload.precision"])
    training.precision = on[0] if on else Value("fp32", "neither bf16.enabled nor fp16.enabled")
    if training.precision.value != "fp16" and keys.values.get("fp16.enabled") != "auto":
        for key in keys.values.keys() & set(OF_FP16):
            keys.note(key, "of fp16, which is off")
    if keys.raw("fp16.loss_scale") != "auto":
        fixed = keys.number("fp16.loss_scale")
        training.loss_scale = fixed if fixed is not None and fixed.value else None  # 0: dynamic
    added = keys.values.get("data_types.grad_accum_dtype")
    if PRECISIONS.get(str(added).lower()) == training.precision.value:
        keys.note("data_types.grad_accum_dtype", "the precision of gradients anyway")
    reduced = keys.choice(PRECISIONS, "communication_data_type", sets="workload.reduce_precision")
    if reduced is not None and reduced.value != training.precision.value:
        training.reduce_precision = reduced
    key = "seq_parallel_communication_data_type"
    training.divided_reduce_precision = keys.choice(PRECISIONS, key, sets="workload.reduce_precision")


def deepspeed(keys: Keys) -> Training:
    """Return the training in a DeepSpeed configuration."""
    training = Training()
    batch = (
        ("global_batch", "train_batch_size", "workload.global_batch_size"),
        ("micro_batch", "train_micro_batch_size_per_gpu", "workload.global_batch_size"),
        ("accumulation", "gradient_accumulation_steps", "plan.micro_batches"),
    )
    numbers = sum(isinstance(keys.raw(key), int) for _, key, _ in batch)
    for name, key, sets in batch:
        if keys.raw(key) == "auto" and sets in keys.overridden:
            keys.note(key, f"replaced by --set {sets}")
        elif keys.raw(key) == "auto" and numbers == len(batch) - 1:
            keys.note(key, "follows from the other two sizes and the number of ranks")
        else:
            setattr(training, name, keys.integer(key, sets=sets))
    if training.global_batch is not None and training.micro_batch is None and training.accumulation is None:
        training.accumulation = Value(1, "gradient_accumulation_steps = 1 (its default)")
    _precision(keys, training)
    _stage(keys, training)
    _offload(keys, training)
    _tensor_slices(keys, training)
    training.dp = keys.integer("data_parallel_size")
    read_ulysses(keys, training, "sequence_parallel_size")
    _optimizer(keys, training)
    if keys.raw("gradient_clipping") == "auto":
        keys.note("gradient_clipping", '"auto": what it becomes is not in the file; clipping is not counted')
    else:
        training.clip_norm = keys.number("gradient_clipping")
    for key, value in keys.values.items():
        if value == "auto" and key not in keys.read and key.startswith(("zero_optimization.", "fp16.", "scheduler.")):
            keys.note(key, '"auto": a bucket, a threshold or a schedule, approximated or without effect here')
    keys.close(DEEPSPEED)
    return training


def _tensor_slices(keys: Keys, training: Training) -> None:
    """Read automatic tensor parallelism, which `autotp_size` alone turns on (DeepSpeed 0.18, runtime/engine.py)."""
    training.tp = keys.integer("tensor_parallel.autotp_size", "tensor_parallel.tp_size", sets="plan.tp", least=0)
    if training.tp is not None and training.tp.value == 0:
        training.tp = None
    ranks = training.tp.value if training.tp is not None else 1
    inner = keys.integer("tensor_parallel.tp.tp_size", "tensor_parallel.tensor_parallel.tp_size", sets="plan.tp")
    if inner is not None and inner.value not in (1, ranks):
        reason = f"tensor_parallel.autotp_size, which decides, is {ranks}; allowed: as many, or 1"
        keys.refuse(inner.key, reason, replaced_by=["plan.tp"])
    # module_inject/layers.py: only all-reduces of input gradients overlap
    training.async_input_gradients = keys.flag("tensor_parallel.tp_overlap_comm")


def read_ulysses(keys: Keys, training: Training, *names: str) -> None:
    """Read DeepSpeed's sequence parallelism: all-to-alls in attention; its ranks shard state too (engine.py)."""
    ranks = keys.integer(*names, sets="plan.cp")
    if ranks is not None and ranks.value > 1:
        training.cp, training.context_exchange = ranks, Value("all-to-all", ranks.origin)


REDUCE_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default for `reduce_bucket_size`."""


def _stage(keys: Keys, training: Training) -> None:
    stage = keys.integer("zero_optimization.stage", sets="plan.method", least=0)
    training.zero1_implementation = "deepspeed"
    # runtime/pipe/engine.py keeps a buffer for each micro-batch in flight, and one for a gradient
    training.receive_buffers = Value("in-flight", "DeepSpeed's pipelines have buffers for what is in flight")
    training.schedule = Value("deepspeed", "DeepSpeed's PipelineEngine")
    training.sharding = Value("none", "zero_optimization.stage is not given: 0")
    if stage is not None and stage.value > 3:
        keys.refuse("zero_optimization.stage", "must be from 0 to 3", replaced_by=METHODS)
    elif stage is not None:
        training.sharding = Value("none" if stage.value == 0 else f"zero{stage.value}", stage.origin)
    number = stage.value if stage else 0
    if number == 0 and training.precision is not None and training.precision.value == "bf16":
        # runtime/engine.py, _do_optimizer_sanity_check; runtime/bf16_optimizer.py
        origin = (
            f"{training.sharding.origin}: in stages BF16_Optimizer, which divides the optimizer's state all the same"
        )
        training.sharding_in_stages = Value("zero1", origin)
    if stage is not None and number in (2, 3):  # these reduce gradients in every backward
        training.gradient_sync = Value("micro-batch", stage.origin)
    bucket = "zero_optimization.reduce_bucket_size"
    if number in (0, 3) and keys.has(bucket):
        keys.note(bucket, "approximated: messages here are of whole layers (stage 3), or of DDP's buckets (stage 0)")
    elif keys.raw(bucket) != "auto":  # "auto" is noted below
        training.bucket_elements = keys.integer(bucket, sets="plan.bucket_bytes") or Value(
            REDUCE_BUCKET_ELEMENTS, f"{bucket} is not given: {REDUCE_BUCKET_ELEMENTS}"
        )
    mics = keys.integer("zero_optimization.mics_shard_size", sets="plan.dp_shard", least=-1)
    if mics is not None and mics.value > 0:
        training.dp_shard = mics
        if number != 3:
            keys.refuse("zero_optimization.mics_shard_size", "needs zero_optimization.stage = 3", replaced_by=METHODS)
    usual = f"zero_optimization.overlap_comm is not given: {'true' if number == 3 else 'false'}"
    training.overlap = keys.flag("zero_optimization.overlap_comm") or Value(number == 3, usual)


OFFLOADED = {"none": False, "cpu": True}
OTHER_PLACE = "offloading to other places than the host's memory cannot be simulated"


def _offload(keys: Keys, training: Training) -> None:
    """Read what is offloaded. DeepSpeed copies parameters in the training precision, FSDP2 in the optimizer's."""
    states, parameters = (
        keys.choice(OFFLOADED, f"zero_optimization.offload_{name}.device", sets="plan.offload", why=OTHER_PLACE)
        for name in ("optimizer", "param")
    )
    states = states or keys.flag("zero_optimization.cpu_offload")
    offloads, everything = (each is not None and each.value for each in (states, parameters))
    if everything and parameters is not None and training.sharding is not None and training.sharding.value != "zero3":
        keys.note(parameters.key, "of stage 3: DeepSpeed's engine passes it to no other")  # runtime/engine.py
        everything = False
    if everything and parameters is not None:
        key = parameters.key
        if not offloads:
            keys.refuse(key, "parameters alone cannot be offloaded here", replaced_by=["plan.offload"])
            return
        if training.precision is not None and training.precision.value != "fp32":
            keys.refuse(
                key,
                "copies of parameters in 16 bits cannot be simulated: FSDP2's are in 32",
                replaced_by=["plan.offload"],
            )
        training.offload = Value("parameters", parameters.origin)
    elif offloads and states is not None:
        training.offload = Value("optimizer", states.origin)
        if training.sharding is not None and training.sharding.value == "zero3":
            keys.note(states.key, "approximated: updated parameters are copied in 32 bits here")


def _optimizer(keys: Keys, training: Training) -> None:
    kind = keys.raw("optimizer.type")
    if kind is not None:
        optimizer_in(keys, training, "optimizer.type")
        decoupled = keys.flag("optimizer.params.adam_w_mode")
        if str(kind).lower() in ("adam", "fusedadam") and training.optimizer is not None:
            # DeepSpeed's Adam is AdamW unless adam_w_mode says otherwise, and fused unless torch_adam does
            adamw = decoupled is None or decoupled.value
            training.optimizer = Value("adamw" if adamw else "adam", training.optimizer.origin)
        is_adam = str(kind).lower() in ("adam", "adamw", "fusedadam")
        if is_adam and training.optimizer is not None and keys.enabled("optimizer.params.torch_adam") is None:
            training.optimizer_implementation = Value("fused", f"{training.optimizer.origin}: FusedAdam")
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay"), ("momentum", "momentum")):
        path = f"optimizer.params.{key}"
        open_state = key == "momentum" and training.optimizer is not None and training.optimizer.value == "sgd"
        if open_state and keys.raw(path) == "auto":
            why = "what it becomes is not in the file, and SGD with momentum keeps one more value for each parameter"
            keys.refuse(path, why, replaced_by=["workload.optimizer"])
        elif keys.raw(path) == "auto":
            keys.note(path, '"auto": changes neither step time nor memory')
        else:
            setattr(training, name, keys.number(path, sets=f"workload.{name}"))


FILLED = ("train_*batch_size*", "gradient_accumulation_steps", "gradient_clipping", "bf16.enabled", "fp16.enabled")
"""Keys of a DeepSpeed file that Hugging Face's Trainer fills in if they are "auto"."""


OF_ENGINE = (
    *("sharding", "zero1_implementation", "bucket_elements", "overlap", "gradient_sync"),
    *("offload", "reduce_precision", "divided_reduce_precision", "schedule"),
)
"""Fields of a training that a DeepSpeed file decides, whatever the program's own file says."""


def deepspeed_file(keys: Keys, key: str, name: str, *, fills: str = "", precision: str = "") -> Training | None:
    """Return the training in a DeepSpeed file that a key names, searched by `named_file`.

    `fills`: the program whose own keys replace "auto" in it. `precision`: the precision that these keys give.
    """
    path = named_file(keys, name)
    if path is None:
        keys.refuse(key, "no such file, beside the file, in a folder above it, or in the working directory")
        return None
    content = flattened(parsed_json(read_bounded(path), file=str(path)), file=str(path))
    inner = Keys(str(path), content, keys.overridden, keys.ignored)
    for each, value in content.items():
        if fills and value == "auto" and any(fnmatchcase(each, pattern) for pattern in FILLED):
            inner.note(each, f"as the keys of {fills} say")
    inner.values = {each: value for each, value in content.items() if each not in inner.read}
    if fills and precision and not inner.values.keys() & {"bf16.enabled", "fp16.enabled"}:
        inner.values[f"{precision}.enabled"] = True
    training = deepspeed(inner)
    if fills and training.clip_norm is None and content.get("gradient_clipping") != "auto":
        training.clip_norm = Value(0.0, f"{path.name}: gradient_clipping is not given: none")  # the engine clips
    keys.add(inner, file=path.name)
    keys.read.add(key)
    return training
