"""Support matrix: which methods and policies combine on a cluster and model, found by checking each combination."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.plan import METHODS, PREDICTED_ONLY, RUNS_WITH
from gssim.scenario.device_rates import check_rates
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

    The scenario's own plan is ignored; its cluster, workload and run length are kept. Raises UserError if the scenario
    itself cannot be read.
    """
    shared = Shared()
    base = load_scenario(path, overrides, gradients_needed=False, shared=shared)
    for method in METHODS:
        for feature, changes in FEATURES.items():
            asked = {"plan": {"method": method}} | dict(changes)
            try:
                changed = [*overrides, *overrides_of(asked)]
                scenario = load_scenario(path, changed, gradients_needed=False, shared=shared).scenario
                check_rates(scenario.cluster, scenario.workload, ranks=scenario.ranks)
            except UserError as error:
                reason = str(error).removeprefix(f"{base.file}: ")
                yield Support(method, feature, reason, reason)
                continue
            pp, unstaged = scenario.policies.pp, scenario.workload.model.unstaged_reason
            is_unstaged = pp > 1 and unstaged is not None
            real = f"plan.pp = {pp}: {unstaged}" if is_unstaged else predicted_only_reason(scenario)
            yield Support(method, feature, None, real)


def predicted_only_reason(scenario: Scenario) -> str | None:
    """Return the first value of a key that a real run refuses, with the reason; None if there is none."""

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
