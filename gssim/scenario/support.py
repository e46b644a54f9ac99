"""Support matrix: which methods and policies combine on a cluster and model, found by checking each combination."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.plan import METHODS, PREDICTED_ONLY, RUNS_WITH
from gssim.scenario.device_rates import check_rates
from gssim.scenario.expert_load import routes_parts
from gssim.scenario.loading import load_scenario
from gssim.scenario.overrides import overrides_of
from gssim.scenario.scenario import Scenario
from gssim.units import shown_value

FEATURES: dict[str, Mapping[str, Any]] = {
    "alone": {},
    "tp 2": {"plan.tp": 2},
    "sequence parallelism": {"plan.tp": 2, "plan.sequence_parallel": True},
    "divided embedding": {"plan.tp": 2, "plan.embedding_parallel": True},
    "parallel loss": {"plan.tp": 2, "plan.loss_parallel": True},
    "divided embedding and loss": {"plan.tp": 2, "plan.embedding_parallel": True, "plan.loss_parallel": True},
    "cp 2": {"plan.cp": 2},
    "cp 2, tp 2": {"plan.cp": 2, "plan.tp": 2},
    "cp 2, exchanges waited for": {"plan.cp": 2, "plan.context_exchange": "ring", "plan.context_overlap": False},
    "ep 2": {"plan.ep": 2},
    "ep 2, bf16 summed in fp32": {
        "plan.ep": 2,
        "workload.precision": "bf16",
        "workload.reduce_precision": "fp32",
    },
    "cp 2, ep 2": {"plan.cp": 2, "plan.ep": 2},
    "tp 2, ep 2": {"plan.tp": 2, "plan.ep": 2, "plan.etp": 1, "plan.sequence_parallel": True},
    "cp 2, low-rank adapters": {"plan.cp": 2, "workload.adapters.rank": 8},
    "cp 2, tp 2, low-rank adapters": {"plan.cp": 2, "plan.tp": 2, "workload.adapters.rank": 8},
    "cp 2, ep 2, low-rank adapters": {"plan.cp": 2, "plan.ep": 2, "workload.adapters.rank": 8},
    "divided embedding and loss, low-rank adapters": {
        "plan.tp": 2,
        "plan.embedding_parallel": True,
        "plan.loss_parallel": True,
        "workload.adapters.rank": 8,
    },
    "tp 2, exchanges beside products": {"plan.tp": 2, "plan.sequence_parallel": True, "plan.tp_overlap": True},
    "tp 2, exchanges beside products, full recomputation": {
        "plan.tp": 2,
        "plan.sequence_parallel": True,
        "plan.tp_overlap": True,
        "plan.recompute": "full",
    },
    "pp 2, tp 2, exchanges beside products": {
        "plan.pp": 2,
        "plan.tp": 2,
        "plan.micro_batches": 2,
        "plan.sequence_parallel": True,
        "plan.tp_overlap": True,
    },
    "tp 2, sums of input gradients overlapped": {"plan.tp": 2, "plan.async_input_gradients": True},
    "tp 2, sums of input gradients overlapped, autocast in bf16": {
        "plan.tp": 2,
        "plan.async_input_gradients": True,
        "workload.autocast": "bf16",
    },
    "ep 2, low-rank adapters": {"plan.ep": 2, "workload.adapters.rank": 8},
    "pp 2": {"plan.pp": 2, "plan.micro_batches": 2},
    "pp 2, interleaved": {"plan.pp": 2, "plan.schedule": "interleaved", "plan.micro_batches": 2},
    "pp 2, zero bubble": {"plan.pp": 2, "plan.schedule": "interleaved_zero_bubble", "plan.micro_batches": 2},
    "pp 2, tp 2": {"plan.pp": 2, "plan.tp": 2, "plan.micro_batches": 2},
    "2 micro-batches": {"plan.micro_batches": 2},
    "full recomputation": {"plan.recompute": "full"},
    "selective recomputation": {"plan.recompute": "selective"},
    "every second product recomputed": {"plan.recompute": "every-second-product"},
    "batch by throughput": {"plan.shares.batch": "throughput"},
    "shards by compute": {"plan.shares.shards": "compute"},
    "shards by memory": {"plan.shares.shards": "memory"},
    "shards by cost": {"plan.shares.shards": "cost"},
    "rebalancing": {"plan.shares.replan": True},
    "push threshold": {"plan.push.threshold": 1e-3},
    "publish threshold": {"plan.publish.threshold": 1e-6},
    "bf16": {"workload.precision": "bf16"},
    "fp16": {"workload.precision": "fp16"},
    "fp16, scaled loss": {"workload.precision": "fp16", "workload.loss_scale": "dynamic"},
    "fp16, scaled loss, push threshold": {
        "workload.precision": "fp16",
        "workload.loss_scale": "dynamic",
        "plan.push.threshold": 1e-3,
    },
    "autocast in bf16": {"workload.autocast": "bf16"},
    "tp 2, autocast in bf16": {"plan.tp": 2, "workload.autocast": "bf16"},
    "cp 2, autocast in bf16": {"plan.cp": 2, "workload.autocast": "bf16"},
    "ep 2, autocast in bf16": {"plan.ep": 2, "workload.autocast": "bf16"},
    "frozen layers": {"workload.frozen": ("*.0",)},
    "tp 2, frozen layers": {"plan.tp": 2, "workload.frozen": ("*.0",)},
    "sequence parallelism, frozen layers": {
        "plan.tp": 2,
        "plan.sequence_parallel": True,
        "workload.frozen": ("*.0",),
    },
    "cp 2, frozen layers": {"plan.cp": 2, "workload.frozen": ("*.0",)},
    "ep 2, frozen layers": {"plan.ep": 2, "workload.frozen": ("*.0",)},
    "low-rank adapters": {"workload.adapters.rank": 8},
    "adapters, weights in 4 bits": {"workload.adapters.rank": 8, "workload.frozen_precision": "nf4"},
    "moments in 8 bits": {
        "workload.optimizer_implementation": "fused",
        "workload.optimizer_state_precision": "8-bit",
    },
    "fused loss": {"workload.fused_loss": True},
    "autocast in bf16, full recomputation": {"workload.autocast": "bf16", "plan.recompute": "full"},
    "frozen layers, full recomputation": {"workload.frozen": ("*.0",), "plan.recompute": "full"},
    "low-rank adapters, full recomputation": {"workload.adapters.rank": 8, "plan.recompute": "full"},
    "Muon": {"workload.optimizer": "muon"},
    "offloaded parameters": {"plan.offload": "parameters"},
    "offloaded optimizer": {"plan.offload": "optimizer"},
    "DeepSpeed's ZeRO-1": {"plan.zero1_implementation": "deepspeed"},
    "DeepSpeed's ZeRO-2": {"plan.zero2_implementation": "deepspeed"},
    "Megatron-LM's distributed optimizer": {"plan.zero1_implementation": "megatron"},
    "dp_shard 2": {"plan.dp_shard": 2},
}
"""Features that may be combined with a method, each as changes to a scenario's keys."""


@dataclass(frozen=True)
class Support:
    """Whether a method combines with a feature, simulated and in a real run: None if it does, else the reason."""

    method: str
    feature: str
    simulated: str | None
    real: str | None


def supported(path: Path, overrides: tuple[str, ...] = ()) -> Iterator[Support]:
    """Yield the support of every method with every feature on a scenario's cluster and model.

    The scenario's own plan is ignored; its cluster, workload and run length are kept. What only this machine decides
    (its devices, its data, how the module is written) is not looked at. Raises UserError if the scenario itself cannot
    be read.
    """
    shared = Shared()
    base = load_scenario(path, overrides, gradients_needed=False, shared=shared)
    for method in METHODS:
        for feature, changes in FEATURES.items():
            asked = {"plan": {"method": method}} | dict(changes)
            try:
                changed = [*overrides, *overrides_of(asked)]
                scenario = load_scenario(path, changed, gradients_needed=False, shared=shared).scenario
            except UserError as error:
                reason = str(error).removeprefix(f"{base.file}: ")
                yield Support(method, feature, reason, reason)
                continue
            simulated = None
            try:  # a real run needs no rates, unless work is divided by them
                check_rates(scenario.cluster, scenario.workload, ranks=scenario.ranks)
            except UserError as error:
                simulated = str(error).removeprefix(f"{base.file}: ")
            yield Support(method, feature, simulated, _unreal_reason(scenario))


def _unreal_reason(scenario: Scenario) -> str | None:
    pp, unstaged = scenario.policies.pp, scenario.workload.model.unstaged_reason
    if pp > 1 and unstaged is not None:
        return f"plan.pp = {pp}: {unstaged}"
    try:
        return predicted_only_reason(scenario)
    except UserError as error:
        return str(error)


def predicted_only_reason(scenario: Scenario) -> str | None:
    """Return why a scenario can be predicted, but not run, from its first value that a real run refuses; else None.

    Raises UserError where work is divided by rates that are not known.
    """
    return next((reason for reason_of in REASONS if (reason := reason_of(scenario)) is not None), None)


def _of_experts(scenario: Scenario) -> str | None:
    policies, model = scenario.policies, scenario.workload.model
    if policies.ep > 1 and policies.tp > 1 and not routes_parts(model, policies):
        return (
            f"plan.ep = {policies.ep} beside plan.tp = {policies.tp}: can be predicted, but not run, with layers that "
            "are cut already (workload.model.expert_tensor_ranks); allowed: one of them"
        )
    for layer in model.expert_layers:
        if layer.expert_capacity_ratio is not None:
            return (
                f"workload.model: experts of '{layer.name}' have a capacity (expert_capacity_ratio): it can be "
                "predicted, but not run, which drops no tokens; leave it out"
            )
    # this project's own modules, and experts that ranks divide, are multiplied one by one
    routed = any(layer.experts_per_token for layer in model.expert_layers)
    if scenario.workload.precision == "fp64" and policies.ep == 1 and routed and model.module.hugging_face is not None:
        return (
            "workload.precision = 'fp64': torch has no grouped product in fp64, by which Hugging Face's experts are "
            "multiplied; allowed: another precision, or plan.ep of at least 2"
        )
    return None


def _of_listed_values(scenario: Scenario) -> str | None:
    """Look up the values of single keys."""

    def value_of(key: str) -> object:
        table, _, name = key.partition(".")
        return getattr(getattr(scenario, table), name)

    for (key, value), why in PREDICTED_ONLY.items():
        if value_of(key) != value:
            continue
        if (exception := RUNS_WITH.get((key, value))) is not None:
            other, allowed = exception
            if value_of(other) in allowed or (not allowed and value_of(other) is not None):
                continue
        return f"{key} = {shown_value(value)}: {why}"
    return None


def _of_evaluations(scenario: Scenario) -> str | None:
    steps = scenario.run.evaluate_every_steps
    if steps is not None and scenario.policies.pp > 1:
        return (
            f"run.evaluate_every_steps = {steps}: no rank of a pipeline has the whole model, and its schedule only "
            "trains; leave it out"
        )
    if steps is not None and scenario.plan.loss_parallel:
        return (
            f"run.evaluate_every_steps = {steps}: no rank has whole logits (plan.loss_parallel); leave one of them out"
        )
    return None


def _of_overlap(scenario: Scenario) -> str | None:
    """Look for disabled overlap where PyTorch overlaps collectives with compute in any case.

    FSDP2's collectives on gloo do not overlap (they are awaited where they start), and a plan need not say so.
    """
    policies = scenario.policies
    if scenario.plan.overlap or policies.data_ranks == 1:
        return None
    if policies.pp > 1:
        return "plan.overlap = false: replicas of a pipeline's stages can be predicted so, but not run; allowed: true"
    if policies.gradients == "reduce-scatter" and scenario.cluster.backend == "nccl":
        return "plan.overlap = false: FSDP2 overlaps on nccl in any case, so it cannot be run; allowed: true"
    return None


def _of_optimizers(scenario: Scenario) -> str | None:
    """Look for a fused SGD on FSDP2's shards (torch 2.13 has no such operation on DTensors), and for gradients in the
    hosts' memory that must be summed over ranks (NCCL has no collectives for them).
    """
    workload, plan = scenario.workload, scenario.plan
    fused = workload.optimizer.startswith("sgd") and workload.optimizer_implementation == "fused"
    if fused and scenario.policies.gradients == "reduce-scatter":
        return (
            "workload.optimizer_implementation = 'fused': torch has no fused SGD for FSDP2's shards: it can be "
            "predicted, but not run; allowed: default, for-loop, foreach"
        )
    if plan.offload is not None and scenario.cluster.backend == "nccl":
        for key in ("clip_norm", "loss_scale"):
            if getattr(workload, key) is not None:
                return (
                    f"workload.{key} = {getattr(workload, key)!r}: gradients in the hosts' memory (plan.offload = "
                    f"'{plan.offload}') are summed by no NCCL collective: it can be predicted, but not run; leave it "
                    "out"
                )
    return None


def _of_gloo_on_gpus(scenario: Scenario) -> str | None:
    """Look for messages between GPUs that torch hands to gloo uncopied, which ends in a crash.

    gloo reads a pipeline's messages, and those of functional all-gathers, as if they were in the host's memory.
    """
    cluster, policies = scenario.cluster, scenario.policies
    if cluster.backend != "gloo" or cluster.type_of(0).kind != "cuda":
        return None
    if policies.pp > 1:
        return (
            f"plan.pp = {policies.pp}: pipelines on GPUs can be predicted, but not run, with cluster.backend = 'gloo'; "
            "allowed: 1, or backend 'nccl' with a GPU for each rank"
        )
    if scenario.plan.sequence_parallel and policies.tp > 1:
        return (
            "plan.sequence_parallel = true: on GPUs it can be predicted, but not run, with cluster.backend = 'gloo'; "
            "allowed: false, or backend 'nccl' with a GPU for each rank"
        )
    return None


def _of_empty_batches(scenario: Scenario) -> str | None:
    module = scenario.workload.model.module
    idle = [rank for rank, samples in enumerate(scenario.batch_sizes) if not samples]
    if module.hugging_face is not None and idle:
        return (
            f"plan.shares.batch = {scenario.plan.shares.batch!r}: rank {idle[0]} has no samples: it can be predicted, "
            f"but modules of Hugging Face ('{module.hugging_face.model_type}') run no empty batch; give each rank at "
            "least one"
        )
    return None


REASONS: tuple[Callable[[Scenario], str | None], ...] = (
    _of_experts,
    _of_listed_values,
    _of_evaluations,
    _of_overlap,
    _of_optimizers,
    _of_gloo_on_gpus,
    _of_empty_batches,
)
"""What a scenario alone tells of why it can be predicted, but not run."""
