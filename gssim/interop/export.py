"""Export of a scenario's plan to a configuration of DeepSpeed, Accelerate or torchtitan, or to a script for torchrun.

A plan that a program cannot execute is refused; what its format has no key for is returned as notes.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gssim.errors import UserError
from gssim.interop.script import DTYPES, training_script
from gssim.plan import METHODS, Plan
from gssim.scenario import Scenario, reduce_precision
from gssim.scenario.loading import toml
from gssim.workload import Workload

SHARDED = tuple(name for name, method in METHODS.items() if method.gradients == "reduce-scatter")
FLAVORS = {"llama3-8b": ("llama3", "8B"), "llama3-70b": ("llama3", "70B")}
"""Names of shipped models in torchtitan: (model.name, model.flavor)."""
OPTIMIZER_TYPES = {"adamw": "AdamW", "adam": "Adam"}


@dataclass
class Exported:
    """A file for another program, and what it cannot hold."""

    text: str
    notes: list[str] = field(default_factory=list)


def export_scenario(scenario: Scenario, to: str) -> Exported:
    """Return a scenario's plan as a file for the program `to`, one of `EXPORTS`.

    Raises UserError where that program cannot execute the plan.
    """
    if to not in EXPORTS:
        raise UserError(f"--to {to}: no such format; allowed: {', '.join(EXPORTS)}")
    methods, writer = EXPORTS[to]
    plan, policies = scenario.plan, scenario.policies
    _refuse(to, "plan.method", plan.method, plan.method in methods, ", ".join(methods))
    method = METHODS[plan.method]
    for name in ("partition", "parameters", "gradients", "optimizer_state"):
        same = getattr(policies, name) == getattr(method, name)
        _refuse(to, f"plan.{name}", getattr(policies, name), same, "what the method sets itself")
    usual = Plan(method=plan.method)
    for name in ("compress", "push", "publish", "shares", "bucket_bytes", "first_bucket_bytes"):
        value = getattr(plan, name)
        shown = value if isinstance(value, (int, str)) else "..."
        _refuse(to, f"plan.{name}", shown, value == getattr(usual, name), "leave it out")
    _refuse(to, "plan.cp", policies.cp, policies.cp == 1 or to in ("torchtitan", "accelerate"), "1")
    _refuse(to, "plan.ep", policies.ep, policies.ep == 1, "1")
    offloads = {"deepspeed": "optimizer", "torchrun": None}.get(to, "parameters")
    _refuse(to, "plan.offload", plan.offload, plan.offload in (None, offloads), "leave it out")
    own = scenario.cluster.backend == "gloo" or policies.exchange == "backend"
    _refuse(to, "plan.exchange", policies.exchange, own or method.gradients == "push", "'backend'")
    _refuse(to, "workload.precision", scenario.workload.precision, scenario.workload.precision in DTYPES, "fp32, bf16")
    reduced, shards = reduce_precision(scenario.workload), method.gradients == "reduce-scatter"
    usual_reduction = reduced == scenario.workload.precision
    said = usual_reduction or (reduced in DTYPES and (to == "deepspeed" or (to != "accelerate" and shards)))
    _refuse(to, "workload.reduce_precision", reduced, said, "leave it out")
    notes = [f"plan.recompute = '{plan.recompute}': recompute in your own code"] if _left_to_code(plan, to) else []
    if policies.cp > 1 and not policies.ring:
        notes.append(f"plan.cp = {policies.cp}: {to} passes keys and values in a ring, not heads by all-to-alls")
    if plan.method == "fsdp":
        notes.append("plan.method = 'fsdp': reads back as 'zero3', which is the same")
    scale = scenario.workload.loss_scale
    scales = scale is None or to == "deepspeed" or (to == "accelerate" and scale == "dynamic")
    _refuse(to, "workload.loss_scale", scale, scales, "dynamic" if to == "accelerate" else "leave it out")
    return writer(scenario, notes)


def _left_to_code(plan: Plan, to: str) -> bool:
    return to == "deepspeed" and plan.recompute != "none"


def _refuse(to: str, key: str, value: Any, is_fine: bool, allowed: str) -> None:
    if not is_fine:
        raise UserError(f"{key} = {value!r}: cannot be exported to {to}; allowed: {allowed}")


def _batch(scenario: Scenario) -> tuple[int, int]:
    """Return a rank's samples in a micro-batch, and its micro-batches."""
    samples, many = scenario.data_batch_sizes[0], scenario.plan.micro_batches
    if samples % many:
        raise UserError(
            f"plan.micro_batches = {many}: micro-batches of {samples} samples are unequal; allowed: a divisor"
        )
    return samples // many, many


def _sync(scenario: Scenario, to: str, wanted: str) -> None:
    """Refuse another synchronization of gradients than the program's, where it makes a difference."""
    policies = scenario.policies
    matters = scenario.plan.micro_batches > 1 and policies.gradients == "reduce-scatter"
    _refuse(to, "plan.gradient_sync", policies.gradient_sync, not matters or policies.gradient_sync == wanted, wanted)


def _deepspeed(scenario: Scenario, notes: list[str]) -> Exported:
    plan, workload, policies = scenario.plan, scenario.workload, scenario.policies
    _refuse("deepspeed", "plan.pp", policies.pp, policies.pp == 1, "1: its pipelines are made in code")
    if plan.method == "zero1":
        flat = plan.zero1_implementation == "deepspeed"
        _refuse("deepspeed", "plan.zero1_implementation", plan.zero1_implementation, flat, "'deepspeed'")
    _sync(scenario, "deepspeed", "micro-batch")
    stage = {"zero1": 1, "zero2": 2}.get(plan.method, 3 if plan.method in SHARDED else 0)
    if policies.dp_replicate > 1 and stage == 2:
        raise UserError(
            f"plan.dp_replicate = {policies.dp_replicate}: replicas of shards are stage 3 alone in deepspeed (MiCS); "
            "allowed: method 'hsdp'"
        )
    micro, many = _batch(scenario)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": plan.overlap}
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
    data |= _deepspeed_precision(workload)
    if policies.tp > 1:
        data["tensor_parallel"] = {"autotp_size": policies.tp}
    kind = OPTIMIZER_TYPES.get(workload.optimizer)
    if kind is None:
        notes.append(f"workload.optimizer = '{workload.optimizer}': give DeepSpeed the optimizer in your code")
    else:
        params: dict[str, Any] = {"lr": workload.learning_rate, "weight_decay": workload.weight_decay}
        params["adam_w_mode"] = workload.optimizer == "adamw"
        if workload.optimizer_implementation != "fused":
            params["torch_adam"] = True
        data["optimizer"] = {"type": kind, "params": params}
    notes.append(
        f"workload.sequence_length = {workload.sequence_length}: is the data's; `gssim import` takes it by --set"
    )
    return Exported(json.dumps(data, indent=2) + "\n", notes)


def _deepspeed_precision(workload: Workload) -> dict[str, Any]:
    """Return DeepSpeed's tables and keys of precisions."""
    data: dict[str, Any] = {}
    if workload.precision != "fp32":
        fixed = {"loss_scale": workload.loss_scale} if isinstance(workload.loss_scale, float) else {}
        data[workload.precision] = {"enabled": True} | fixed
    if reduce_precision(workload) != workload.precision:
        data["communication_data_type"] = reduce_precision(workload)
    return data


def _accelerate(scenario: Scenario, notes: list[str]) -> Exported:
    plan, workload, policies = scenario.plan, scenario.workload, scenario.policies
    _refuse("accelerate", "plan.pp", policies.pp, policies.pp == 1, "1")
    _refuse("accelerate", "plan.recompute", plan.recompute, plan.recompute != "selective", "none, full")
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
    elif policies.dp_replicate > 1:
        _refuse("accelerate", "plan.dp_shard", policies.dp_shard, policies.dp_shard > 1, "more than 1")
    _sync(scenario, "accelerate", "step")
    hosts = Counter(device.host for device in scenario.cluster.devices[: scenario.ranks])
    kind = "FSDP" if sharded else "MULTI_GPU" if scenario.ranks > 1 else "NO"
    cpus = scenario.cluster.backend == "gloo"
    micro, many = _batch(scenario)
    lines = [
        f"# In your script: {micro} samples per device and micro-batch, {many} micro-batches, sequences of "
        f"{workload.sequence_length} tokens, {workload.optimizer}",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'MULTI_CPU' if cpus and kind == 'MULTI_GPU' else kind}",
        f"mixed_precision: '{workload.precision if workload.precision != 'fp32' else 'no'}'",
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
    if len(hosts) > 1:
        notes.append("machine_rank and main_process_ip: give them to `accelerate launch` on each host")
    notes.append("batch, sequence length and optimizer are the script's; `gssim import` takes them by --set")
    if workload.clip_norm is not None:
        notes.append(f"workload.clip_norm = {workload.clip_norm:g}: call `accelerator.clip_grad_norm_` in your script")
    return Exported("\n".join(lines) + "\n", notes)


def _torchtitan(scenario: Scenario, notes: list[str]) -> Exported:
    plan, workload, policies = scenario.plan, scenario.workload, scenario.policies
    named = FLAVORS.get(workload.model.name)
    _refuse("torchtitan", "workload.model", workload.model.name, named is not None, ", ".join(FLAVORS))
    name, flavor = named or ("", "")
    _refuse("torchtitan", "plan.recompute", plan.recompute, plan.recompute != "selective", "none, full")
    _refuse("torchtitan", "plan.tp", policies.tp, policies.tp == 1, "1: its own is sequence-parallel beside")
    adam = workload.optimizer in OPTIMIZER_TYPES
    _refuse("torchtitan", "workload.optimizer", workload.optimizer, adam, ", ".join(OPTIMIZER_TYPES))
    _sync(scenario, "torchtitan", "micro-batch")
    micro, many = _batch(scenario)
    sharded = plan.method in SHARDED
    implementation = workload.optimizer_implementation
    if implementation == "default":
        notes.append("workload.optimizer_implementation = 'default': reads back as 'foreach', which it is on CUDA")
        implementation = "foreach"
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
        "parallelism": {
            "data_parallel_replicate_degree": policies.dp_replicate,
            "data_parallel_shard_degree": policies.dp_shard if sharded else 1,
            "fsdp_reshard_after_forward": "never" if plan.method == "zero2" else "always" if sharded else "default",
            **({"context_parallel_degree": policies.cp} if policies.cp > 1 else {}),
        },
        "activation_checkpoint": {"mode": plan.recompute},
    }
    if policies.pp > 1:
        schedules = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", None: "1F1B"}
        tables["parallelism"] |= {
            "pipeline_parallel_degree": policies.pp,
            "pipeline_parallel_schedule": schedules[plan.schedule],
            "pipeline_parallel_microbatch_size": micro,
        }
    if scenario.run.seed:
        tables["debug"] = {"seed": scenario.run.seed}
    lines = ["# for torchtitan 0.2: torchrun --nproc_per_node GPUS -m torchtitan.train --job.config_file FILE"]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {toml(value)}" for key, value in values.items())]
    return Exported("\n".join(lines) + "\n", notes)


def _torchrun(scenario: Scenario, notes: list[str]) -> Exported:
    _refuse("torchrun", "plan.pp", scenario.policies.pp, scenario.policies.pp == 1, "1; `gsreal run` has pipelines")
    _refuse("torchrun", "plan.tp", scenario.policies.tp, scenario.policies.tp == 1, "1; `gsreal run` cuts blocks")
    fine = scenario.plan.recompute != "selective"
    _refuse("torchrun", "plan.recompute", scenario.plan.recompute, fine, "none, full; `gsreal run` has 'selective'")
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
