"""Importer of Hugging Face Accelerate's YAML, with FSDP's keys, which other programs have too.

Keys are those of Accelerate 1.12. FSDP is simulated as FSDP2, with `fully_shard` on each block.
"""

from collections import Counter
from fnmatch import fnmatchcase

from gssim.cluster import Cluster
from gssim.interop.deepspeed import deepspeed, deepspeed_file, read_ulysses
from gssim.interop.reading import LAUNCHER, Keys, Rule, Value, listed, refused
from gssim.interop.training import PRECISIONS, WHOLE_MODEL_COMPILED, Training, torchs_context_exchange

ACCELERATE: dict[str, Rule] = {
    **refused("Amazon SageMaker starts its own cluster", "compute_environment", neutral=("LOCAL_MACHINE",)),
    **refused(WHOLE_MODEL_COMPILED, "dynamo_config.dynamo_backend dynamo_backend", neutral=("NO", "no")),
    **listed("offloading to a disk, which is off", "deepspeed_config.offload_*_nvme_path"),
    **refused("modules that are left out cannot be simulated", "fsdp_config.*ignored_modules"),
    **refused("units by size cannot be simulated", "fsdp_config.*min_num_params"),
    **listed(
        "commands/launch.py passes no such key on; a DeepSpeed file that deepspeed_config_file names can say it",
        "deepspeed_config.seq_parallel_communication_data_type",
    ),
    **listed("attention is that of the model file", "parallelism_config.*sp_attn_implementation"),
    **listed("of sequence or context parallelism, which is off or read by its degree", "parallelism_config.*"),
    **listed(
        "approximated: the next unit's parameters are gathered while this one computes",
        "fsdp_config.*prefetch* fsdp_config.*limit_all*",
    ),
    **listed(
        "how the model is built and saved",
        "fsdp_config.*state_dict* fsdp_config.*cpu_ram_efficient* fsdp_config.*sync_module_states "
        "fsdp_config.*use_orig_params deepspeed_config.zero3_* deepspeed_config.deepspeed_moe*",
    ),
    **listed("units are the model's blocks", "fsdp_config.*layer_cls_to_wrap"),
    **listed(
        LAUNCHER,
        "deepspeed_config.deepspeed_multinode* deepspeed_config.deepspeed_hostfile deepspeed_config.deepspeed_in* "
        "deepspeed_config.deepspeed_ex* mpirun_config.* debug machine_rank main_* rdzv_* same_network tpu_* gpu_ids "
        "num_machines downcast_bf16 enable_cpu_affinity command* num_cpu_threads_per_process use_cpu "
        "deepspeed_hostfile deepspeed_multinode_launcher max_restarts monitor_interval",
    ),
    **listed(
        "of a feature that is off, or refused above",
        "fp8_config.* dynamo_config.* ipex_config.* megatron_lm_config.* fsdp_config.fsdp_version",
    ),
}
"""How Accelerate's keys are treated that are not read."""
FSDP_KEYS = {pattern: rule for pattern, rule in ACCELERATE.items() if pattern.startswith("fsdp_config.")}
"""Those of them that are FSDP's."""

UNITS = "units are the model's blocks: TRANSFORMER_BASED_WRAP"
SHARDINGS = {
    **dict.fromkeys(("full_shard", "1", "true", "full"), ("zero3", False)),
    **dict.fromkeys(("shard_grad_op", "2", "false"), ("zero2", False)),
    **dict.fromkeys(("no_shard", "3"), ("none", False)),
    **dict.fromkeys(("hybrid_shard", "4"), ("zero3", True)),
    **dict.fromkeys(("hybrid_shard_zero2", "_hybrid_shard_zero2", "5"), ("zero2", True)),
}
"""(sharding, whether inside hosts only) by FSDP1's strategy or FSDP2's reshard_after_forward, in lower case."""


def accelerate(keys: Keys, cluster: Cluster) -> Training:
    """Return the training in an Accelerate configuration, including the DeepSpeed file that it may name."""
    kind = str(keys.raw("distributed_type") or "NO").upper()
    training = Training()
    if kind == "DEEPSPEED":
        training = _deepspeed(keys)
    elif kind == "FSDP":
        read_fsdp(keys, training, cluster, prefix="fsdp_config.fsdp_")
        training.gradient_sync = Value("step", "Accelerate's no_sync: gradients are whole until the last micro-batch")
        wrap = "fsdp_config.fsdp_auto_wrap_policy"
        if not keys.has(wrap) and training.sharding is not None and training.sharding.value != "none":
            keys.refuse(wrap, f"is not given: NO_WRAP, the whole model as one unit; {UNITS}")
    elif kind in ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "NO"):
        training.sharding = Value("none", keys.line("distributed_type"))
    else:
        keys.refuse("distributed_type", "cannot be imported; allowed: NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED")
    on_cores = keys.line("distributed_type") if kind == "MULTI_CPU" else getattr(keys.enabled("use_cpu"), "origin", "")
    if on_cores and cluster.backend == "nccl":
        reason = (
            "trains on processors, but --cluster has GPUs: give one of cores (gssim cluster --detect describes these)"
        )
        keys.refuse(on_cores.partition(" = ")[0], reason)
    off = {"deepspeed_config.": kind != "DEEPSPEED", "fsdp_config.": kind != "FSDP"}
    for key in keys.values:
        if any(key.startswith(table) and is_off for table, is_off in off.items()) and key not in keys.read:
            keys.note(key, f"of another distributed_type than {kind}")
    world = keys.integer("num_processes", sets="plan.ranks")
    training.world = Value(1, keys.line("distributed_type")) if kind == "NO" else world
    _parallelism(keys, training, kind)
    _precision(keys, training, kind)
    regional = keys.enabled("dynamo_config.dynamo_use_regional_compilation")
    if regional is not None and str(keys.raw("dynamo_config.dynamo_backend")).lower() == "inductor":
        training.compiled = regional
        keys.note("dynamo_config.dynamo_backend", "approximated: what is outside of blocks runs one by one here")
    keys.close(ACCELERATE)
    return training


def _parallelism(keys: Keys, found: Training, kind: str) -> None:
    """Read the sizes of the mesh; FSDP2 shards over dp_shard times cp (parallelism_config.py, fsdp_utils.py).

    A size that is not given is 1; if none is given, FSDP shards over all processes.
    """
    sizes = {}
    for name in ("dp_replicate", "dp_shard", "tp", "cp"):
        key = f"parallelism_config.parallelism_config_{name}_size"
        if (size := keys.integer(key, f"parallelism_config.{name}_size", sets=f"plan.{name}", least=-1)) is not None:
            sizes[name] = size
    strategies = ("parallelism_config_cp_comm_strategy", "cp_comm_strategy")
    found.context_exchange = torchs_context_exchange(keys, *(f"parallelism_config.{each}" for each in strategies))
    _sequences(keys, found, kind)
    data = [sizes.pop(name, None) for name in ("dp_replicate", "dp_shard")]
    for name, size in sizes.items():
        setattr(found, name, size)
    used = kind == "FSDP" and any(size is not None and size.value != 1 for size in (*data, *sizes.values()))
    for size in data:
        if size is not None and not used:
            reason = "of 1: all processes share the data" if size.value == 1 else f"{kind} does not use it"
            keys.note(size.key, reason)
    if not used:
        return
    for name, size in zip(("dp_replicate", "dp_shard"), data, strict=True):
        setattr(found, name, size or Value(1, f"parallelism_config_{name}_size is not given: 1"))
    replicas, shards = data
    if replicas is not None and replicas.value > 1 and (shards is None or shards.value == 1):
        reason = "FSDP takes no replicas without dp_shard_size > 1; distributed_type MULTI_GPU replicates"
        keys.refuse(replicas.key, reason, replaced_by=("plan.dp_shard", "plan.method"))


def _sequences(keys: Keys, found: Training, kind: str) -> None:
    """Read DeepSpeed's sequence parallelism, and the length of sequences if all have the same."""
    key = "parallelism_config.parallelism_config_sp"
    sizes = [f"{key}_size", "parallelism_config.sp_size"]
    if kind == "DEEPSPEED":
        read_ulysses(keys, found, *sizes)
    elif (ranks := keys.integer(*sizes)) is not None and ranks.value > 1:
        keys.refuse(ranks.key, "sequences are divided so with distributed_type DEEPSPEED alone")
    varies = keys.flag(f"{key}_seq_length_is_variable")
    if varies is not None and not varies.value:
        found.sequence = keys.integer(f"{key}_seq_length", sets="workload.sequence_length")


def _precision(keys: Keys, found: Training, kind: str) -> None:
    precision = keys.choice(
        PRECISIONS, "mixed_precision", sets="workload.precision", why="this precision cannot be simulated"
    )
    if precision is not None and (kind != "DEEPSPEED" or precision.value != "fp32"):
        found.precision = precision
    as_said = kind in ("FSDP", "DEEPSPEED") or "workload.precision" in keys.overridden
    if precision is not None and precision.value != "fp32" and not as_said:
        under_autocast(found, precision)
    if not keys.has("mixed_precision") and kind != "DEEPSPEED":
        found.precision = Value("fp32", "mixed_precision is not given: no")


def under_autocast(training: Training, precision: Value) -> None:
    """Set automatic mixed precision over fp32 parameters."""
    training.autocast = precision
    training.precision = Value("fp32", f"{precision.origin}: autocast over fp32 parameters")


def _deepspeed(keys: Keys) -> Training:
    named = keys.raw("deepspeed_config.deepspeed_config_file")
    if named is not None:
        for name in (
            "gradient_accumulation_steps",
            "gradient_clipping",
            "zero_stage",
            "offload_*_device",
            "zero3_save_*",
        ):
            for key in keys.values:
                if fnmatchcase(key, f"deepspeed_config.{name}"):
                    keys.refuse(key, "Accelerate takes no such key beside deepspeed_config_file, which says it")
        training = deepspeed_file(keys, "deepspeed_config.deepspeed_config_file", str(named))
        if training is None:
            return Training()
    else:
        table = {
            "zero_optimization.stage": "zero_stage",
            "gradient_accumulation_steps": "gradient_accumulation_steps",
            "gradient_clipping": "gradient_clipping",
            "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
            "zero_optimization.offload_param.device": "offload_param_device",
        }
        renamed = {theirs: f"deepspeed_config.{ours}" for theirs, ours in table.items()}
        ignored = [each for each, key in renamed.items() if any(fnmatchcase(key, name) for name in keys.ignored)]
        # stage 2 unless it is given: utils/dataclasses.py, DeepSpeedPlugin
        inner = Keys(keys.file, {"zero_optimization.stage": 2}, keys.overridden, [*keys.ignored, *ignored])
        inner.values |= {theirs: keys.raw(key) for theirs, key in renamed.items() if keys.has(key)}
        training = deepspeed(inner)
        training.zero1_implementation = "deepspeed"
        for name in ("sharding", "accumulation", "clip_norm", "offload"):
            value: Value | None = getattr(training, name)
            if value is not None and (theirs := value.key) in renamed:
                setattr(training, name, Value(value.value, keys.line(renamed[theirs])))
        lines = {inner.line(theirs): keys.line(key) for theirs, key in renamed.items() if keys.has(key)}
        keys.refused += [(lines.get(line, line), reason) for line, reason in inner.refused]
        keys.listed += [(lines.get(line, line), reason) for line, reason in inner.listed]
    return training


def read_fsdp(keys: Keys, training: Training, cluster: Cluster, *, prefix: str) -> None:
    """Read the keys of FSDP, in either generation, that begin with `prefix`."""
    version = keys.integer(f"{prefix}version", "fsdp_config.fsdp_version", "fsdp_version")
    names = [f"{prefix}reshard_after_forward", f"{prefix}sharding_strategy"]
    strategy = keys.choice(
        SHARDINGS, *(names if version and version.value == 2 else reversed(names)), sets="plan.method"
    )
    for name in names:  # the other name has no effect in this generation of FSDP
        if keys.has(name) and name not in keys.read:
            keys.note(name, "of the other generation of FSDP")
    shard_by(keys, training, cluster, strategy, names[1])
    offload_keys = (f"{prefix}offload_params", "fsdp_config.fsdp_offload_params", "fsdp_config.offload_params")
    if (offload := keys.enabled(*offload_keys)) is not None:
        training.offload = Value("parameters", offload.origin)
    checkpointing = keys.flag(f"{prefix}activation_checkpointing")
    if checkpointing is not None:
        training.recompute = Value("full" if checkpointing.value else "none", checkpointing.origin)
    wrap = keys.raw(f"{prefix}auto_wrap_policy")
    if wrap is not None and str(wrap).upper() != "TRANSFORMER_BASED_WRAP":
        keys.refuse(f"{prefix}auto_wrap_policy", UNITS)


def shard_by(keys: Keys, training: Training, cluster: Cluster, strategy: Value | None, blamed: str) -> None:
    """Set the sharding by one of `SHARDINGS`, if the file says one; `blamed`: the key that it is read from."""
    sharding, inside = strategy.value if strategy is not None else ("zero3", False)
    origin = strategy.origin if strategy is not None else "FSDP shards all, where the file does not say"
    training.sharding = Value(sharding, origin)
    if inside:
        hosts = Counter(device.host for device in cluster.devices)
        if len(set(hosts.values())) > 1:
            keys.refuse(blamed, "the cluster's hosts have unequal numbers of devices", replaced_by=["plan.dp_shard"])
        training.dp_shard = Value(next(iter(hosts.values())), f"{origin}: the devices of a host")
