"""What a scenario must be to run for real, beyond being a scenario."""

from gsreal.data.sources import check_data
from gsreal.machine import check_machine
from gsreal.methods.pipeline_stages import check_stages
from gsreal.model_files.build import check_factory
from gsreal.run.evaluation import check_evaluation
from gssim.errors import UserError
from gssim.plan import PREDICTED_ONLY
from gssim.scenario import Loaded, Scenario


def check_real(loaded: Loaded) -> None:
    """Raise UserError for what cannot run on this machine."""
    ours, where = loaded.scenario, loaded.file
    check_factory(ours.workload.model.module, where=where)
    check_predicted_only(ours, where=where)
    check_machine(ours.cluster, ours.ranks, where=where)
    check_data(ours.workload, where=where, seed=ours.run.seed, steps=ours.run.warmup_steps + ours.run.steps)
    check_stages(ours, where=where)
    check_evaluation(ours, where=where)
    check_overlap(ours, where=where)


def check_predicted_only(scenario: Scenario, *, where: str) -> None:
    """Raise UserError for values that can be predicted, but not run."""
    for (key, value), why in PREDICTED_ONLY.items():
        table, _, name = key.partition(".")
        if getattr(getattr(scenario, table), name) == value:
            raise UserError(f"{where}: {key} = {value!r}: {why}")


def check_overlap(scenario: Scenario, *, where: str) -> None:
    """Raise UserError where nothing shall overlap, but PyTorch lets collectives run beside the compute in any case.

    On gloo, FSDP2's collectives do not (they are waited for where they begin), and a plan need not say so.
    """
    policies = scenario.policies
    if scenario.plan.overlap or policies.data_ranks == 1:
        return
    said = f"{where}: plan.overlap = false"
    if policies.pp > 1:
        raise UserError(f"{said}: replicas of a pipeline's stages can be predicted so, but not run; allowed: true")
    if policies.gradients == "reduce-scatter" and scenario.cluster.backend == "nccl":
        raise UserError(f"{said}: FSDP2 overlaps on nccl in any case, so it cannot be run; allowed: true")
