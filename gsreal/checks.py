"""What a scenario must be to run for real, beyond being a scenario."""

from gsreal.data import check_data
from gsreal.evaluation import check_evaluation
from gsreal.machine import check_machine
from gsreal.stages import check_stages
from gssim.scenario import Loaded


def check_real(loaded: Loaded) -> None:
    """Raise UserError for what cannot run on this machine."""
    ours, where = loaded.scenario, loaded.file
    check_machine(ours.cluster, ours.ranks, where=where)
    check_data(ours.workload, where=where, seed=ours.run.seed, steps=ours.run.warmup_steps + ours.run.steps)
    check_stages(ours, where=where)
    check_evaluation(ours, where=where)
