"""Scenarios (cluster, workload, plan and run length): loaded from a TOML file, overridden, validated and identified."""

from gssim.scenario.checks import check
from gssim.scenario.device_rates import (
    achieved_flop_per_s,
    has_master_copy,
    layer_profile,
    master_bytes,
    reduce_precision,
    value_bytes,
)
from gssim.scenario.expert_load import (
    divided_expert_layers,
    parts_routed_apart,
    routes_parts,
    rows_by_rank,
    rows_of_ranks,
)
from gssim.scenario.loading import check_kind, load_cluster, load_model, load_scenario, read_toml
from gssim.scenario.rebalancing import after_step, begin
from gssim.scenario.scenario import Loaded, Scenario, single_device
from gssim.scenario.search_space import Objective, SearchSpace
from gssim.scenario.stages import held_layers, of_no_sample, schedule_of, tied_parameters
from gssim.scenario.tensor_slices import held_experts, held_slice
from gssim.scenario.vocabulary_slices import divided_entries, shares_embedding, token_embedding, units_of_ranks
