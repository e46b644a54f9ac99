"""Checks that a scenario can run on real hardware, in addition to being a valid scenario."""

from gsreal.data.sources import check_data
from gsreal.machine import check_machine
from gsreal.methods.pipeline_stages import check_stages
from gsreal.model_files.build import check_factory
from gsreal.run.evaluation import check_evaluation
from gssim.errors import UserError
from gssim.plan import PREDICTED_ONLY
from gssim.scenario import Loaded, Scenario


def check_real(loaded: Loaded) -> None:
    """Raise UserError if the scenario cannot run on this machine."""
    ours, where = loaded.scenario, loaded.file
    check_factory(ours.workload.model.module, where=where)
    check_predicted_only(ours, where=where)
    check_machine(ours.cluster, ours.ranks, where=where)
    check_data(ours.workload, where=where, seed=ours.run.seed, steps=ours.run.warmup_steps + ours.run.steps)
    check_stages(ours, where=where)
    check_evaluation(ours, where=where)
    check_overlap(ours, where=where)


def check_predicted_only(scenario: Scenario, *, where: str) -> None:
    """Raise UserError for values that can only be predicted."""
    for (key, value), why in PREDICTED_ONLY.items():
        table, _, name = key.partition(".")
        if getattr(getattr(scenario, table), name) == value:
            raise UserError(f"{where}: {key} = {value!r}: {why}")


def check_overlap(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if the plan disables overlap, but PyTorch overlaps collectives with compute in any case.

    FSDP2's collectives on gloo do not overlap (they are awaited where they start), and a plan need not say so.
    """
    policies = scenario.policies
    if scenario.plan.overlap or policies.data_ranks == 1:
        return
    said = f"{where}: plan.overlap = false"
    if policies.pp > 1:
        raise UserError(f"{said}: replicas of a pipeline's stages can be predicted so, but not run; allowed: true")
    if policies.gradients == "reduce-scatter" and scenario.cluster.backend == "nccl":
        raise UserError(f"{said}: FSDP2 overlaps on nccl in any case, so it cannot be run; allowed: true")
