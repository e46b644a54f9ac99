"""Scenarios (cluster, workload, plan and run length): loaded from a TOML file, overridden, validated and identified."""

from gssim.scenario.checks import check
from gssim.scenario.device_rates import (
    achieved_flop_per_s,
    has_master_copy,
    layer_profile,
    master_bytes,
    pause_excess,
    product_precision,
    reduce_precision,
    sample_costs,
    takes_tokens,
    value_bytes,
    with_profile_slowdowns,
)
from gssim.scenario.expert_load import expert_rows, layers_with_experts, routed_experts, rows_by_rank
from gssim.scenario.following import after_step, begin
from gssim.scenario.loading import (
    as_overrides,
    first_comment,
    load_cluster,
    load_model,
    load_scenario,
    overrides_of,
    parsed_override,
    read_toml,
    toml,
)
from gssim.scenario.ownership import USABLE_RATIO, activation_bytes, held_bytes, owned_bytes, rank_rates
from gssim.scenario.scenario import Loaded, Run, Scenario, Source, sequence_positions, single_device
from gssim.scenario.search_space import SEARCHED_METHODS, Objective, SearchSpace
from gssim.scenario.stages import (
    TiedParameter,
    held_layers,
    of_no_sample,
    schedule_of,
    stage_cut_error,
    tied_parameters,
)
from gssim.scenario.support import Support, supported
from gssim.scenario.tensor_slices import context_part, held_slice, model_slice, native_tensors, units_of_ranks

__all__ = [
    "SEARCHED_METHODS",
    "USABLE_RATIO",
    "Loaded",
    "Objective",
    "Run",
    "Scenario",
    "SearchSpace",
    "Source",
    "Support",
    "TiedParameter",
    "achieved_flop_per_s",
    "activation_bytes",
    "after_step",
    "as_overrides",
    "begin",
    "check",
    "context_part",
    "expert_rows",
    "first_comment",
    "has_master_copy",
    "held_bytes",
    "held_layers",
    "held_slice",
    "layer_profile",
    "layers_with_experts",
    "load_cluster",
    "load_model",
    "load_scenario",
    "master_bytes",
    "model_slice",
    "native_tensors",
    "of_no_sample",
    "overrides_of",
    "owned_bytes",
    "parsed_override",
    "pause_excess",
    "product_precision",
    "rank_rates",
    "read_toml",
    "reduce_precision",
    "routed_experts",
    "rows_by_rank",
    "sample_costs",
    "schedule_of",
    "sequence_positions",
    "single_device",
    "stage_cut_error",
    "supported",
    "takes_tokens",
    "tied_parameters",
    "toml",
    "units_of_ranks",
    "value_bytes",
    "with_profile_slowdowns",
]
