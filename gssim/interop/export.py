"""Export of a scenario's plan to a configuration of DeepSpeed, Accelerate or torchtitan, or to a script for torchrun.

A plan that the program cannot execute is refused; settings for which its format has no key are returned as notes.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gssim.errors import UserError
from gssim.interop.script import DTYPES, OPTIMIZERS, training_script
from gssim.plan import METHODS, default_plan
from gssim.scenario import Scenario, reduce_precision, schedule_of
from gssim.scenario.overrides import toml
from gssim.scenario.run import Run
from gssim.units import PRECISION_BYTES, counted
from gssim.workload import Workload, unrolled

SHARDED = tuple(name for name, method in METHODS.items() if method.gradients == "reduce-scatter")
FLAVORS = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-8b-compiled": ("llama3", "8B"),
    "llama3-8b-compiled-every-second-product": ("llama3", "8B"),
}
"""Names of shipped models in torchtitan: (model.name, model.flavor)."""
OPTIMIZER_TYPES = {"adamw": "AdamW", "adam": "Adam"}


@dataclass
class Exported:
    """A file for another program, and notes on the settings that it cannot hold."""

    text: str
    notes: list[str] = field(default_factory=list)


def export_scenario(scenario: Scenario, to: str) -> Exported:
    """Return a scenario's plan as a file for the program `to`, one of `EXPORTS`.

    Raises UserError if that program cannot execute the plan.
    """
    if to not in EXPORTS:
        raise UserError(f"--to {to}: no such format; allowed: {', '.join(EXPORTS)}")
    methods, writer = EXPORTS[to]
    plan, policies = scenario.plan, scenario.policies
    _refuse(to, "plan.method", plan.method, plan.method in methods, ", ".join(methods))
    flat = to == "deepspeed" and plan.method in ("zero1", "zero2")
    if plan.method == "zero2":
        wanted = "deepspeed" if flat else "torch"
        chosen = plan.zero2_implementation
        _refuse(to, "plan.zero2_implementation", chosen, chosen == wanted, f"'{wanted}'")
    method = METHODS["zero1" if flat else plan.method]  # DeepSpeed's stage 2 has the policies of its stage 1
    for name in ("partition", "parameters", "gradients", "optimizer_state"):
        same = getattr(policies, name) == getattr(method, name)
        _refuse(to, f"plan.{name}", getattr(policies, name), same, "what the method sets itself")
    usual = default_plan(plan.method)
    for name in ("compress", "push", "publish", "shares", "first_bucket_bytes", *([] if flat else ["bucket_bytes"])):
        value = getattr(plan, name)
        shown = value if isinstance(value, (int, str)) else "..."
        _refuse(to, f"plan.{name}", shown, value == getattr(usual, name), "leave it out")
    _refuse(to, "plan.ep", policies.ep, policies.ep == 1, "1")
    model = scenario.workload.model
    as_there = not model.compiled or (to == "torchtitan" and model.compiled_recompute != "selective")
    _refuse(to, "workload.model", model.name, as_there, "a model whose blocks are not compiled")
    offloads = {"deepspeed": "optimizer", "torchrun": None}.get(to, "parameters")
    _refuse(to, "plan.offload", plan.offload, plan.offload in (None, offloads), "leave it out")
    own = scenario.cluster.backend == "gloo" or policies.exchange == "backend"
    _refuse(to, "plan.exchange", policies.exchange, own or method.gradients == "push", "'backend'")
    _refuse_contexts(scenario, to)
    _refuse_precisions(scenario, to)
    for key, default in ONE_KIND.items():
        value = getattr(plan if key.startswith("plan.") else scenario.workload, key.partition(".")[2])
        _refuse(to, key, value, value == default, "leave it out")
    return writer(scenario, _notes(scenario, to))


ONE_KIND: dict[str, Any] = {
    "workload.gradient_precision": None,
    "workload.expert_load": "balanced",
    "plan.receive_buffers": "micro-batch",
    "plan.context_split": "zigzag",
    "plan.context_overlap": True,
    "plan.gathered_inputs": "kept",
    "plan.tp_overlap": False,
    "plan.async_input_gradients": False,
}
"""Keys for which the other programs have only one value."""
IN_CODE: dict[str, tuple[Any, str]] = {
    "workload.adapters": (None, "add them to the model"),
    "workload.frozen": (None, "freeze them"),
    "workload.frozen_precision": (None, "load them so"),
    "workload.fused_loss": (False, "fuse the loss with the head"),
    "workload.optimizer_state_precision": (None, "make the optimizer"),
    "workload.map_precision": (None, "convert the linear maps"),
    "workload.tf32": (False, "set torch.backends.cuda.matmul.allow_tf32"),
    "workload.data": ("auto", "the data are your script's"),
}
"""Keys that are up to the user's code, with their defaults; files of DeepSpeed and Accelerate accompany such code."""


def note_of(key: str, value: Any, reason: str) -> str:
    """Return the line for a setting that a file does not hold: key and value as `--set` takes them, and the reason."""
    if hasattr(value, "__dataclass_fields__"):
        value = {name: each for name in value.__dataclass_fields__ if (each := getattr(value, name)) is not None}
    return f"{key} = {toml(list(value) if isinstance(value, tuple) else value)}: {reason}"


def _notes(scenario: Scenario, to: str) -> list[str]:
    """Return notes on what a file cannot hold; refuse what the program cannot do without the user's code."""
    plan, policies, workload = scenario.plan, scenario.policies, scenario.workload
    has_code = to in ("deepspeed", "accelerate")
    notes = []
    for key, (default, reason) in IN_CODE.items():
        value = getattr(workload, key.partition(".")[2])
        if value != default:
            _refuse(to, key, value if isinstance(value, (str, bool)) else "...", has_code, "leave it out")
            notes.append(note_of(key, value, f"{reason} in your own code"))
    if to == "deepspeed" and plan.recompute != "none":
        notes.append(note_of("plan.recompute", plan.recompute, "recompute in your own code"))
    if policies.cp > 1 and not policies.ring and to != "deepspeed":
        notes.append(note_of("plan.context_exchange", "all-to-all", f"{to} exchanges keys and values, not heads"))
    notes += _transport_notes(scenario, to)
    if (same := _read_back_method(scenario)) != plan.method:
        notes.append(note_of("plan.method", plan.method, f"reads back as '{same}', which is the same here"))
    if workload.momentum != Workload.__dataclass_fields__["momentum"].default and workload.optimizer not in (
        "sgd-momentum",
        "muon",
    ):
        notes.append(note_of("workload.momentum", workload.momentum, "makes no difference here"))
    if to in ("deepspeed", "torchtitan") and scenario.ranks < len(scenario.cluster.devices):
        notes.append(note_of("plan.ranks", scenario.ranks, "start so many processes"))
    for name, key in (("steps", "run.steps"), ("warmup_steps", "run.warmup_steps"), ("seed", "run.seed")):
        value = getattr(scenario.run, name)
        if value != getattr(Run(), name) and not (to == "torchtitan" and name == "seed"):
            notes.append(note_of(key, value, "is your script's" if has_code else "is not in the file"))
    return notes


def _transport_notes(scenario: Scenario, to: str) -> list[str]:
    """Return a note on how gloo carries the collectives of shards, which no file says."""
    policies = scenario.policies
    if policies.gradients != "reduce-scatter" or scenario.cluster.backend != "gloo":
        return []
    reason = "is what it does, and not in the file"
    if policies.point_to_point:
        reason = f"{to} has gloo's own reduce-scatter, which moves an all-reduce's bytes"
    return [note_of("plan.exchange", policies.exchange, reason)]


def _read_back_method(scenario: Scenario) -> str:
    """Return the method that an import of the exported file would give."""
    plan, policies = scenario.plan, scenario.policies
    if policies.dp_replicate * policies.dp_shard * policies.cp == 1:
        return "pipeline" if policies.pp > 1 else "tensor" if policies.tp > 1 else "single"
    if plan.method not in SHARDED or plan.zero2_implementation == "deepspeed":
        return plan.method
    if policies.shards == 1:
        return "ddp"
    if plan.method == "zero2":
        return plan.method
    return "hsdp" if policies.dp_replicate > 1 else "zero3"


def _refuse_contexts(scenario: Scenario, to: str) -> None:
    """Refuse tensor and context parallelism in forms that a program does not have."""
    plan, policies = scenario.plan, scenario.policies
    _refuse(to, "plan.cp", policies.cp, policies.cp == 1 or to != "torchrun", "1")
    if policies.cp > 1 and to == "deepspeed":
        _refuse(to, "plan.context_exchange", plan.context_exchange, not policies.ring, "'all-to-all'")
        _refuse(to, "plan.tp", policies.tp, policies.tp == 1, "1 beside plan.cp: its mesh has no third axis")
    if policies.gradients == "reduce-scatter":
        _refuse(to, "plan.dp_shard", policies.dp_shard, policies.shards > 1, "more than 1, or another method")
    divides = to == "torchtitan"
    for key in ("sequence_parallel", "embedding_parallel", "loss_parallel"):
        _refuse(to, f"plan.{key}", getattr(plan, key), divides or not getattr(plan, key), "leave it out")
    whole = policies.tp > 1 and not plan.embedding_parallel
    _refuse(to, "plan.embedding_parallel", False, not (divides and whole), "true")
    if to != "deepspeed":
        _refuse(to, "plan.overlap", plan.overlap, plan.overlap, "true")


def _refuse_precisions(scenario: Scenario, to: str) -> None:
    """Refuse precisions and loss scales that a program does not have in this form."""
    workload, shards = scenario.workload, METHODS[scenario.plan.method].gradients == "reduce-scatter"
    _refuse(to, "workload.precision", workload.precision, workload.precision in DTYPES, "fp32, bf16")
    casts = to == "accelerate" and not shards
    _refuse(to, "workload.autocast", workload.autocast, workload.autocast is None or casts, "leave it out")
    reduced = reduce_precision(workload)
    if to == "torchtitan" and shards:
        _refuse(to, "workload.reduce_precision", reduced, reduced == "fp32", "fp32")
    elif to == "deepspeed" and scenario.policies.cp > 1:  # no key of DeepSpeed changes that
        _refuse(to, "workload.reduce_precision", reduced, reduced == "fp32", "fp32 where ranks divide sequences")
    elif reduced != workload.precision:
        is_expressible = reduced in DTYPES and (to == "deepspeed" or (to == "torchrun" and shards))
        _refuse(to, "workload.reduce_precision", reduced, is_expressible, "leave it out")
    scale, half = workload.loss_scale, "fp16" in (workload.precision, workload.autocast)
    if half and to != "torchrun":
        _refuse(to, "workload.precision", "fp16", to != "torchtitan", "fp32, bf16")
        scales = scale is not None if to == "deepspeed" else scale == "dynamic"
        _refuse(to, "workload.loss_scale", scale, scales, "dynamic" if to == "accelerate" else "dynamic, a number")
    elif scale is not None:
        _refuse(to, "workload.loss_scale", scale, False, "leave it out")


def _refuse(to: str, key: str, value: Any, is_fine: bool, allowed: str) -> None:
    if not is_fine:
        raise UserError(f"{key} = {value!r}: cannot be exported to {to}; allowed: {allowed}")


def _batch(scenario: Scenario) -> tuple[int, int]:
    """Return a rank's samples in a micro-batch, and its micro-batches."""
    samples, many = scenario.data_batch_sizes[0], scenario.plan.micro_batches
    if samples % many:
        raise UserError(
            f"plan.micro_batches = {many}: micro-batches of {counted(samples, 'sample')} are unequal; "
            "allowed: a divisor"
        )
    return samples // many, many


def _sync(scenario: Scenario, to: str, wanted: str, notes: list[str]) -> None:
    """If gradients are synchronized at another time than the program's, refuse it, or note it if it does not matter."""
    policies, method = scenario.policies, METHODS[scenario.plan.method]
    matters = scenario.plan.micro_batches > 1 and policies.gradients == "reduce-scatter"
    _refuse(to, "plan.gradient_sync", policies.gradient_sync, not matters or policies.gradient_sync == wanted, wanted)
    if policies.gradient_sync != method.gradient_sync:
        reason = "is what it does, and not in the file" if matters else "makes no difference here"
        notes.append(note_of("plan.gradient_sync", policies.gradient_sync, reason))


def _deepspeed(scenario: Scenario, notes: list[str]) -> Exported:
    plan, workload, policies = scenario.plan, scenario.workload, scenario.policies
    _refuse("deepspeed", "plan.pp", policies.pp, policies.pp == 1, "1: its pipelines are made in code")
    if plan.method == "zero1":
        implementation = plan.zero1_implementation
        _refuse("deepspeed", "plan.zero1_implementation", implementation, implementation == "deepspeed", "'deepspeed'")
    _sync(scenario, "deepspeed", "micro-batch", notes)
    stage = {"zero1": 1, "zero2": 2}.get(plan.method, 3 if plan.method in SHARDED else 0)
    if (plan.dp_replicate or 1) > 1 and stage == 2:
        raise UserError(
            f"plan.dp_replicate = {plan.dp_replicate}: replicas of shards are stage 3 alone in deepspeed (MiCS); "
            "allowed: method 'hsdp'"
        )
    micro, many = _batch(scenario)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": plan.overlap}
    if stage in (1, 2):
        value_bytes = PRECISION_BYTES[workload.precision]
        whole = plan.bucket_bytes % value_bytes == 0
        _refuse("deepspeed", "plan.bucket_bytes", plan.bucket_bytes, whole, f"a multiple of {value_bytes}")
        zero["reduce_bucket_size"] = int(plan.bucket_bytes) // value_bytes
    if stage == 3 and policies.dp_replicate > 1:
        zero["mics_shard_size"] = policies.dp_shard
    if plan.offload is not None:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    data: dict[str, Any] = {
        "train_batch_size": workload.global_batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": many,
        "zero_optimization": zero,
    }
    if workload.clip_norm is not None:
        data["gradient_clipping"] = workload.clip_norm
    data |= _deepspeed_precision(workload, divides_sequences=policies.cp > 1)
    if policies.tp > 1:
        data["tensor_parallel"] = {"autotp_size": policies.tp}
    if policies.cp > 1:
        # both make the mesh; the model's attention has to be DeepSpeed's DistributedAttention over it: __init__.py
        data |= {"sequence_parallel_size": policies.cp, "data_parallel_size": policies.data_ranks}
    data |= _deepspeed_optimizer(workload, notes)
    if workload.sequence_length is not None:
        notes.append(note_of("workload.sequence_length", workload.sequence_length, "is the data's"))
    return Exported(json.dumps(data, indent=2) + "\n", notes)


def _deepspeed_optimizer(workload: Workload, notes: list[str]) -> dict[str, Any]:
    """Return DeepSpeed's table of the optimizer; of its optimizers, only Adam exists here."""
    implementation = workload.optimizer_implementation
    if implementation not in ("default", "fused"):
        notes.append(note_of("workload.optimizer_implementation", implementation, "the file says torch's own"))
    kind = OPTIMIZER_TYPES.get(workload.optimizer)
    if kind is None:
        notes += _optimizer_notes(workload, "give DeepSpeed the optimizer in your code", has_kind=True)
    else:
        params: dict[str, Any] = {"lr": workload.learning_rate, "weight_decay": workload.weight_decay}
        params["adam_w_mode"] = workload.optimizer == "adamw"
        if workload.optimizer_implementation != "fused":
            params["torch_adam"] = True
        return {"optimizer": {"type": kind, "params": params}}
    return {}


def _optimizer_notes(workload: Workload, reason: str, *, has_kind: bool) -> list[str]:
    """Return notes for an optimizer that is up to the script, with its implementation if no other note has it."""
    names = ["optimizer", "learning_rate", "weight_decay"]
    names += ["momentum"] if workload.optimizer in ("sgd-momentum", "muon") else []
    names += [] if has_kind and workload.optimizer_implementation != "fused" else ["optimizer_implementation"]
    return [note_of(f"workload.{name}", getattr(workload, name), reason) for name in names]


def _deepspeed_precision(workload: Workload, *, divides_sequences: bool) -> dict[str, Any]:
    """Return DeepSpeed's tables and keys of precisions; gradients of divided sequences are reduced in fp32 anyway."""
    data: dict[str, Any] = {}
    if workload.precision != "fp32":
        fixed = {"loss_scale": workload.loss_scale} if isinstance(workload.loss_scale, float) else {}
        data[workload.precision] = {"enabled": True} | fixed
    if reduce_precision(workload) != workload.precision and not divides_sequences:
        data["communication_data_type"] = reduce_precision(workload)
    return data


def _accelerate(scenario: Scenario, notes: list[str]) -> Exported:
    workload = scenario.workload
    _refuse_for_accelerate(scenario)
    _sync(scenario, "accelerate", "step", notes)
    notes.append(note_of("workload.global_batch_size", workload.global_batch_size, "is the script's"))
    notes.append(note_of("plan.micro_batches", _batch(scenario)[1], "is the script's"))
    if workload.sequence_length is not None:
        notes.append(note_of("workload.sequence_length", workload.sequence_length, "is the script's"))
    notes += _optimizer_notes(workload, "is the script's", has_kind=False)
    if workload.clip_norm is not None:
        notes.append(
            note_of("workload.clip_norm", workload.clip_norm, "call `accelerator.clip_grad_norm_` in your script")
        )
    return Exported("\n".join(_accelerate_lines(scenario)) + "\n", notes)


def _refuse_for_accelerate(scenario: Scenario) -> None:
    """Raise UserError for what Accelerate's files cannot say."""
    plan, workload, policies = scenario.plan, scenario.workload, scenario.policies
    _refuse("accelerate", "plan.pp", policies.pp, policies.pp == 1, "1")
    _refuse("accelerate", "plan.recompute", plan.recompute, plan.recompute in ("none", "full"), "none, full")
    sharded = plan.method in SHARDED
    if not sharded:
        fine = workload.precision == "fp32"
        _refuse("accelerate", "workload.precision", workload.precision, fine, "fp32: without FSDP it is autocast there")
        _refuse(
            "accelerate", "plan.recompute", plan.recompute, plan.recompute == "none", "none: FSDP alone has the key"
        )
        for key, ranks in (("plan.tp", policies.tp), ("plan.cp", policies.cp)):
            fine = ranks == 1 or plan.method == "tensor"
            _refuse("accelerate", key, ranks, fine, "1: its replicas are neither tensor- nor context-parallel")
    elif policies.dp_replicate > 1:  # it does not replicate shards that are over context ranks only
        _refuse("accelerate", "plan.dp_shard", policies.dp_shard, policies.dp_shard > 1, "more than 1")


def _accelerate_lines(scenario: Scenario) -> list[str]:
    """Return the lines of Accelerate's YAML."""
    plan, workload, policies = scenario.plan, scenario.workload, scenario.policies
    sharded = plan.method in SHARDED
    hosts = Counter(device.host for device in scenario.cluster.devices[: scenario.ranks])
    kind = "FSDP" if sharded else "MULTI_GPU" if scenario.ranks > 1 else "NO"
    cpus = scenario.cluster.backend == "gloo"
    mixed = workload.autocast or workload.precision
    micro, many = _batch(scenario)
    lines = [
        f"# In your script: {counted(micro, 'sample')} per device and micro-batch, {many} micro-batches, sequences of "
        f"{workload.sequence_length} tokens, {workload.optimizer}",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'MULTI_CPU' if cpus and kind == 'MULTI_GPU' else kind}",
        f"mixed_precision: '{mixed if mixed != 'fp32' else 'no'}'",
        f"num_machines: {len(hosts)}",
        f"num_processes: {scenario.ranks}",
        f"use_cpu: {str(cpus).lower()}",
    ]
    if sharded:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            *(["  fsdp_offload_params: true"] if plan.offload else []),
            f"  fsdp_reshard_after_forward: {str(plan.method != 'zero2').lower()}",
            f"  fsdp_activation_checkpointing: {str(plan.recompute == 'full').lower()}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    if policies.tp > 1 or policies.cp > 1 or (sharded and policies.dp_replicate > 1):
        sizes = {"dp_replicate": policies.dp_replicate, "dp_shard": policies.dp_shard, "tp": policies.tp}
        sizes |= {"cp": policies.cp} if policies.cp > 1 else {}
        lines += ["parallelism_config:", *(f"  parallelism_config_{name}_size: {n}" for name, n in sizes.items())]
        if policies.cp > 1:
            strategy = "allgather" if policies.gathers_keys else "alltoall"
            lines.append(f"  parallelism_config_cp_comm_strategy: {strategy}")
    if len(hosts) > 1:
        lines.insert(1, "# On each host: accelerate launch --machine_rank RANK --main_process_ip HOST")
    return lines


def _torchtitan(scenario: Scenario, notes: list[str]) -> Exported:
    plan, workload, policies = scenario.plan, scenario.workload, scenario.policies
    _refuse_for_torchtitan(scenario)
    _sync(scenario, "torchtitan", "micro-batch" if policies.pp == 1 else "step", notes)
    name, flavor = FLAVORS[workload.model.name]
    micro, many = _batch(scenario)
    implementation = workload.optimizer_implementation
    if implementation == "default":
        reason = "reads back as 'foreach', which it is on CUDA"
        notes.append(note_of("workload.optimizer_implementation", implementation, reason))
        implementation = "foreach"
    recompute = plan.recompute if plan.recompute != "none" else workload.model.compiled_recompute
    every_second = {"mode": "selective", "selective_ac_option": "op"}
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": name, "flavor": flavor},
        "optimizer": {
            "name": OPTIMIZER_TYPES[workload.optimizer],
            "lr": workload.learning_rate,
            "weight_decay": workload.weight_decay,
            "implementation": implementation,
        },
        "training": {
            "local_batch_size": micro * many if policies.pp > 1 else micro,
            "global_batch_size": workload.global_batch_size,
            "seq_len": workload.sequence_length,
            "max_norm": math.inf if workload.clip_norm is None else workload.clip_norm,
            "steps": scenario.run.warmup_steps + scenario.run.steps,
            "dtype": "float32",
            "mixed_precision_param": DTYPES[workload.precision],
            "mixed_precision_reduce": DTYPES[reduce_precision(workload)],
            **({"enable_cpu_offload": True} if plan.offload else {}),
        },
        "parallelism": _torchtitan_parallelism(scenario, micro, notes),
        "activation_checkpoint": every_second if recompute == "every-second-product" else {"mode": recompute},
    }
    if workload.model.compiled:
        tables["compile"] = {"enable": True, "components": ["model"]}
    if scenario.run.seed:
        tables["debug"] = {"seed": scenario.run.seed}
    lines = ["# for torchtitan 0.2: torchrun --nproc_per_node GPUS -m torchtitan.train --job.config_file FILE"]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {toml(value)}" for key, value in values.items())]
    return Exported("\n".join(lines) + "\n", notes)


def _refuse_for_torchtitan(scenario: Scenario) -> None:
    """Refuse models, recomputation, combinations of axes, and optimizers that torchtitan does not have."""
    plan, workload, policies = scenario.plan, scenario.workload, scenario.policies
    model = workload.model.name
    _refuse("torchtitan", "workload.model", model, model in FLAVORS, ", ".join(FLAVORS))
    allowed = "none, every-second-product, full"
    _refuse("torchtitan", "plan.recompute", plan.recompute, plan.recompute != "selective", allowed)
    if plan.method == "ddp":  # torchtitan has DDP on one axis only, and FSDP takes its place if there are context ranks
        for axis in ("tp", "pp", "cp"):
            ranks = getattr(policies, axis)
            _refuse("torchtitan", f"plan.{axis}", ranks, ranks == 1, "1 under method 'ddp'")
    if policies.tp > 1:
        _refuse("torchtitan", "plan.sequence_parallel", plan.sequence_parallel, plan.sequence_parallel, "true")
    adam = workload.optimizer in OPTIMIZER_TYPES
    _refuse("torchtitan", "workload.optimizer", workload.optimizer, adam, ", ".join(OPTIMIZER_TYPES))


def _torchtitan_parallelism(scenario: Scenario, micro: int, notes: list[str]) -> dict[str, Any]:
    """Return torchtitan's table of the parallel axes; `micro`: samples of a micro-batch."""
    plan, policies = scenario.plan, scenario.policies
    sharded = plan.method in SHARDED
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": policies.dp_replicate,
        "data_parallel_shard_degree": policies.dp_shard if sharded else 1,
        "fsdp_reshard_after_forward": "never" if plan.method == "zero2" else "always" if sharded else "default",
    }
    if policies.cp > 1:
        table["context_parallel_degree"] = policies.cp
        table["context_parallel_rotate_method"] = "allgather" if policies.gathers_keys else "alltoall"
    if policies.tp > 1:
        table["tensor_parallel_degree"] = policies.tp
        if not plan.loss_parallel:
            table["disable_loss_parallel"] = True
    if policies.pp > 1:
        schedules = {
            "gpipe": "GPipe",
            "1f1b": "1F1B",
            "interleaved": "Interleaved1F1B",
            "interleaved_zero_bubble": "InterleavedZeroBubble",
        }
        schedule = schedule_of(plan, policies.pp)
        if plan.schedule is None:
            notes.append(note_of("plan.schedule", schedule, "is the default, and in the file"))
        _refuse("torchtitan", "plan.schedule", schedule, schedule in schedules, ", ".join(schedules))
        stages = [len(layers) for layers in scenario.stage_ranges]
        if plan.stages is None:  # plan.stages does not count the loss, which is in the last stage
            notes.append(note_of("plan.stages", [*stages[:-1], stages[-1] - 1], "is the default, and in the file"))
        table["module_fqns_per_model_part"] = _modules_of_stages(scenario)
        table["pipeline_parallel_degree"] = policies.pp
        table["pipeline_parallel_schedule"] = schedules[schedule]
        table["pipeline_parallel_microbatch_size"] = micro
    return table


def _modules_of_stages(scenario: Scenario) -> list[list[str]]:
    """Return the names of torchtitan's modules in each stage; embeddings and head are not divided further there."""
    layers = unrolled(scenario.workload.model)
    blocks = [index for index, instance in enumerate(layers) if instance.layer.block]
    names = {0: "tok_embeddings", len(layers) - 3: "norm", len(layers) - 2: "output"}
    names |= {index: f"layers.{number}" for number, index in enumerate(blocks)}
    stages = [[names[index] for index in held if index in names] for held in scenario.stage_ranges]
    whole = all(stages) and not any(held.start in range(1, blocks[0]) for held in scenario.stage_ranges)
    shown = [len(held) for held in scenario.stage_ranges]
    _refuse("torchtitan", "plan.stages", shown, whole, "stages of whole modules")
    return stages


def _torchrun(scenario: Scenario, notes: list[str]) -> Exported:
    other = scenario.workload.optimizer
    _refuse(
        "torchrun", "workload.optimizer", other, other in OPTIMIZERS, f"{', '.join(OPTIMIZERS)}; `gsreal run` has it"
    )
    _refuse("torchrun", "plan.pp", scenario.policies.pp, scenario.policies.pp == 1, "1; `gsreal run` has pipelines")
    _refuse("torchrun", "plan.tp", scenario.policies.tp, scenario.policies.tp == 1, "1; `gsreal run` cuts blocks")
    fine = scenario.plan.recompute in ("none", "full")
    _refuse("torchrun", "plan.recompute", scenario.plan.recompute, fine, "none, full; `gsreal run` has the others")
    plain = scenario.workload.precision != "bf16" or scenario.plan.method in SHARDED
    _refuse("torchrun", "workload.precision", scenario.workload.precision, plain, "fp32, or bf16 under FSDP2")
    _refuse(
        "torchrun", "workload.precision", scenario.workload.precision, scenario.workload.precision != "fp16", "bf16"
    )
    _refuse(
        "torchrun", "workload.clip_norm", scenario.workload.clip_norm, scenario.workload.clip_norm is None, "absent"
    )
    return Exported(training_script(scenario, *_batch(scenario)), notes)


Writer = Callable[[Scenario, list[str]], Exported]
WRITERS: dict[str, Writer] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "torchtitan": _torchtitan,
    "torchrun": _torchrun,
}
EXPORTS: dict[str, tuple[Sequence[str], Writer]] = {
    program: (tuple(name for name, method in METHODS.items() if program in method.programs), writer)
    for program, writer in WRITERS.items()
}
"""Methods that each program executes, and the function that writes its file."""
