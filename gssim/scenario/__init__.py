"""The question: Cluster x Workload x Plan and a run's length, loaded from one TOML file and checked whole."""

from gssim.scenario.checks import check
from gssim.scenario.following import Following, after_step, begin
from gssim.scenario.loading import first_comment, load_cluster, load_model, load_scenario, read_toml
from gssim.scenario.overrides import as_overrides, parsed_override, toml
from gssim.scenario.question import Loaded, Run, Scenario, single_device
from gssim.scenario.rates import (
    achieved_flop_per_s,
    as_it_runs,
    has_master_copy,
    layer_profile,
    master_bytes,
    pause_excess,
    sample_costs,
    takes_tokens,
    value_bytes,
)
from gssim.scenario.stages import schedule_of, stages_per_rank

__all__ = [
    "Following",
    "Loaded",
    "Run",
    "Scenario",
    "achieved_flop_per_s",
    "after_step",
    "as_it_runs",
    "as_overrides",
    "begin",
    "check",
    "first_comment",
    "has_master_copy",
    "layer_profile",
    "load_cluster",
    "load_model",
    "load_scenario",
    "master_bytes",
    "parsed_override",
    "pause_excess",
    "read_toml",
    "sample_costs",
    "schedule_of",
    "single_device",
    "stages_per_rank",
    "takes_tokens",
    "toml",
    "value_bytes",
]
