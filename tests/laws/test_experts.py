"""Laws and closed forms: routed experts divided among ranks, beside replicated and sharded parameters."""

from dataclasses import replace
from math import ceil, prod
from pathlib import Path

import pytest
from point_checks import assert_same_as_unfolded, carried
from searching import assert_bounds_below_prediction
from strategies import device_type, loaded_of, scenario_of, star

from gssim import cost
from gssim.cluster.cluster import BackendCost
from gssim.errors import UserError
from gssim.scenario import load_model
from gssim.simulation import simulate
from gssim.workload import Model, unrolled

FOLDER = Path(__file__).resolve().parents[2]
MIXTURE = load_model(FOLDER / "scenarios" / "models" / "mixture-byte-1m.toml")
DENSE_FIRST = load_model(FOLDER / "scenarios" / "models" / "deepseek-moe-byte-240k.toml")
"""Its blocks are no stack of equal ones, so that FSDP2 has all in one unit."""
VALUE_BYTES = 4


def scenario(plan: dict, ranks: int = 4, **workload):
    asked = {"model": MIXTURE, "sequence_length": 32, "global_batch_size": 24} | workload
    return scenario_of(star(ranks), plan, **asked)


def shapes(*, experts: bool, model: Model = MIXTURE) -> list[tuple[int, ...]]:
    return [
        parameter.shape
        for layer in unrolled(model)
        for parameter, name in zip(layer.layer.parameters, layer.parameter_names, strict=True)
        if (".experts." in name) == experts
    ]


def padded_bytes(shape: tuple[int, ...], shards: int) -> int:
    size = 1
    for each in shape[1:]:
        size *= each
    return ceil(shape[0] / shards) * shards * size * VALUE_BYTES


def carried_by(plan: dict, kind: str, ranks: int = 4, **workload) -> dict[tuple[int, ...], int]:
    return carried(simulate(loaded_of(scenario(plan, ranks, **workload))).result, kind)


@pytest.mark.parametrize("method", ["zero2", "zero3"])
@pytest.mark.parametrize("model", [MIXTURE, DENSE_FIRST], ids=lambda model: model.name)
@pytest.mark.parametrize(
    ("ranks", "ep"), [(4, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 4), (8, 2)))]
)
def test_gradients_are_reduced_over_those_that_hold_them(method, model, ranks, ep):
    """Dense ones over all ranks; those of a rank's experts, a part of the whole, over the ranks that hold the same."""
    found = carried_by({"method": method, "ep": ep}, "reduce-scatter", ranks, model=model)
    dense = sum(padded_bytes(shape, ranks) for shape in shapes(experts=False, model=model))
    own = [(shape[0] // ep, *shape[1:]) for shape in shapes(experts=True, model=model)]
    replicas = ranks // ep
    groups = {tuple(range(first, ranks, ep)) for first in range(ep)} if replicas > 1 else set()
    assert found.pop(tuple(range(ranks))) == dense
    assert set(found) == groups
    assert set(found.values()) <= {sum(padded_bytes(shape, replicas) for shape in own)}


def test_each_expert_is_cut_where_more_ranks_hold_it_than_a_rank_has():
    """Otherwise one rank would hold all of an expert, and exchanges would be padded to one expert for each rank."""
    experts = shapes(experts=True)[0][0]
    ranks = 4 * experts
    found = carried_by({"method": "zero3", "ep": experts}, "reduce-scatter", ranks, global_batch_size=ranks)
    own = sum(prod(shape[1:]) for shape in shapes(experts=True)) * VALUE_BYTES
    assert {size for group, size in found.items() if len(group) == 4} == {own}


def test_state_of_experts_is_divided_and_of_the_rest_sharded():
    def held(plan: dict) -> float:
        return max(rank.peak_by_category_bytes["optimizer"] for rank in found(plan).ranks)

    def found(plan: dict):
        return simulate(loaded_of(scenario(plan))).result

    assert held({"method": "zero3", "ep": 2}) == pytest.approx(held({"method": "zero3"}), rel=0.01)
    assert held({"method": "ddp", "ep": 2}) > 1.5 * held({"method": "zero3", "ep": 2})


@pytest.mark.parametrize(("ranks", "ep"), [(4, 2), pytest.param(4, 4, marks=pytest.mark.slow), (8, 2)])
def test_updated_parameters_come_from_those_that_hold_them(ranks, ep):
    """ZeRO-1: dense tensors are broadcast among all ranks, those of experts among the ranks that hold the same ones."""
    found = carried_by({"method": "zero1", "ep": ep}, "broadcast", ranks)
    assert found.pop(tuple(range(ranks))) == sum(prod(shape) * VALUE_BYTES for shape in shapes(experts=False))
    of_experts = sum(prod(shape) * VALUE_BYTES for shape in shapes(experts=True)) // ep
    groups = [tuple(range(first, ranks, ep)) for first in range(ep)] if ranks > ep else []
    assert found == dict.fromkeys(groups, of_experts)


@pytest.mark.parametrize(
    ("ranks", "ep"), [(4, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 4), (8, 2)))]
)
def test_one_buffer_of_gradients_holds_dense_ones_and_a_second_those_of_experts(ranks, ep):
    """Megatron's optimizer: each is reduce-scattered, and gathered, over those that hold the same parameters."""
    plan = {"method": "zero1", "zero1_implementation": "megatron", "ep": ep}
    of_experts = sum(prod(shape) for shape in shapes(experts=True)) // ep
    dense = sum(prod(shape) for shape in shapes(experts=False))
    for kind in ("reduce-scatter", "all-gather"):
        found = carried_by(plan, kind, ranks)
        assert found.pop(tuple(range(ranks))) == pytest.approx(dense * VALUE_BYTES, abs=8 * ranks)
        groups = {tuple(range(first, ranks, ep)) for first in range(ep)} if ranks > ep else set()
        assert set(found) == groups
        assert all(size == pytest.approx(of_experts * VALUE_BYTES, abs=8 * ranks) for size in found.values())
    peak = simulate(loaded_of(scenario(plan, ranks))).result.ranks[0].peak_by_category_bytes
    assert peak["buckets"] == pytest.approx((dense + of_experts) * VALUE_BYTES, abs=8 * ranks)
    state = 2 * VALUE_BYTES * (dense / ranks + of_experts / (ranks // ep))  # two moments
    assert peak["optimizer"] == pytest.approx(state, rel=0.001)


@pytest.mark.parametrize(("cp", "dp", "ep"), [(2, 1, 2), (2, 2, 2), (4, 2, 2), (2, 2, 4)])
def test_experts_are_divided_among_all_ranks_that_hold_the_same_part_in_a_row(cp, dp, ep):
    """Those with parts of one sequence are side by side. A rank's rows are those of its part: all together send as many
    as whole sequences have, and as many as without parts; dense gradients are reduced over all.
    """
    ranks = cp * dp
    plan = {"method": "zero2", "cp": cp, "ep": ep}
    sent, whole = (carried_by(each, "all-to-all-v", ranks) for each in (plan, {"method": "zero2", "ep": ep}))
    rows = 4 * sum(each.layer.block for each in unrolled(MIXTURE)) * 32 * 24 * 2 * 96 * VALUE_BYTES
    assert sent == whole == {tuple(range(first, first + ep)): rows * ep // ranks for first in range(0, ranks, ep)}
    scattered = carried_by(plan, "reduce-scatter", ranks)
    assert scattered.pop(tuple(range(ranks))) == sum(padded_bytes(shape, ranks) for shape in shapes(experts=False))
    assert set(scattered) == ({tuple(range(first, ranks, ep)) for first in range(ep)} if ep < ranks else set())


def test_a_rank_holds_of_a_part_what_it_held_of_the_whole():
    """Two ranks with half a sequence each, of twice as many: as much of the linear maps, norms and experts."""
    half, whole = (
        simulate(loaded_of(scenario(plan, 4, sequence_length=length, global_batch_size=batch))).result
        for plan, length, batch in (
            ({"method": "ddp", "ep": 4, "cp": 2}, 64, 8),
            ({"method": "ddp", "ep": 4}, 32, 16),
        )
    )
    peaks = [each.ranks[0].peak_by_category_bytes["activations"] for each in (half, whole)]
    # what is exchanged is kept in place of what is sent for it, and outputs once more
    blocks, width, tokens = 4, 96, 4 * 32
    assert peaks[0] - peaks[1] == pytest.approx(blocks * tokens * width * VALUE_BYTES, rel=0.01)


def with_capacity(ratio: float):
    layers = [
        replace(each, expert_capacity_ratio=ratio) if each.experts_per_token else each for each in MIXTURE.expert_layers
    ]
    return replace(MIXTURE, expert_layers=tuple(layers))


@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_experts_with_a_capacity_get_as_many_rows_each(ratio):
    """Dispatches and combines carry experts * ceil(ratio * tokens * chosen / experts) rows of each sample."""
    result = simulate(loaded_of(scenario({"method": "ddp", "ep": 4}, model=with_capacity(ratio)))).result
    sent = sum(each.bytes * each.count for each in result.collectives if each.kind == "all-to-all-v")
    blocks = sum(each.layer.block for each in unrolled(MIXTURE))
    rows = 24 * 12 * ceil(ratio * 32 * 2 / 12)
    assert sent == 4 * blocks * rows * 96 * VALUE_BYTES


def test_a_capacity_leaves_no_other_load():
    with pytest.raises(UserError, match=r"expert_load: experts with a capacity have as many rows each; leave it out"):
        scenario({"method": "ddp", "ep": 4}, model=with_capacity(1.0), expert_load={"skew": 0.5})


def test_a_load_of_layers_that_the_model_has_not_is_refused():
    layers = dict.fromkeys([*(f"blocks.{number}" for number in range(4)), "blocks.7"], (1.0,) * 12)
    with pytest.raises(UserError, match=r"layers\['blocks\.7'\]: no such layer .* 4, from blocks\.0 to blocks\.3"):
        scenario({"method": "ddp", "ep": 4}, expert_load={"layers": layers})
    dense = replace(MIXTURE, expert_layers=())
    with pytest.raises(UserError, match=r"layers\['blocks\.0'\]: no such layer with experts; there are none"):
        scenario({"method": "ddp"}, model=dense, expert_load={"layers": layers}, expert_routing="load")


@pytest.mark.parametrize("ep", [1, 2])
def test_a_load_that_no_real_run_can_route_is_refused(ep):
    with pytest.raises(UserError, match=r"expert_load\.skew = 3: expert 0 .* allowed: at most 1/2 of the load"):
        scenario({"method": "ddp", "ep": ep}, expert_load={"skew": 3.0}, expert_routing="load")


PLANS = [
    {"method": "zero1", "micro_batches": 2},
    {"method": "zero2", "micro_batches": 3},
    {"method": "zero3", "recompute": "full"},
    {"method": "ddp", "pp": 2, "micro_batches": 2},
    {"method": "zero1", "zero1_implementation": "megatron", "pp": 2, "micro_batches": 2},
    {"method": "zero3", "pp": 2, "micro_batches": 3},
    {"method": "zero2", "cp": 2},
    {"method": "ddp", "cp": 2, "pp": 2, "micro_batches": 2, "context_exchange": "ring", "context_split": "plain"},
    {"method": "zero1", "cp": 2, "recompute": "full", "context_exchange": "ring"},
]


@pytest.mark.parametrize(
    ("ranks", "plan", "load"),
    [
        (4, {"method": "ddp", "ep": 4}, {"shares": [1.0] * 6 + [0.5] * 6}),
        (4, {"method": "ddp", "ep": 4, "cp": 2}, "balanced"),
        (6, {"method": "zero3", "ep": 6, "cp": 2}, "balanced"),
        (6, {"method": "gs", "ep": 6, "micro_batches": 2, "bucket_bytes": 50000}, "balanced"),
    ],
    ids=str,
)
def test_ranks_with_as_many_rows_are_not_equal_beside_others_with_fewer(ranks, plan, load):
    """Rows that twelve experts do not divide evenly are one more on some of the ranks, which each meets elsewhere."""
    loaded = loaded_of(scenario(plan, ranks, global_batch_size=48, sequence_length=32, expert_load=load))
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)


@pytest.mark.parametrize(
    ("plan", "ep"),
    [
        pytest.param(plan, ep, marks=[] if (place, ep) in ((2, 2), (4, 4), (7, 2)) else [pytest.mark.slow])
        for place, plan in enumerate(PLANS)
        for ep in (2, 4)
    ],
)
def test_equal_ranks_are_simulated_once_with_the_same_result(plan, ep):
    loaded = loaded_of(scenario(plan | {"ep": ep}, ranks=4 * plan.get("pp", 1), expert_load={"skew": 0.7}))
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)


@pytest.mark.parametrize("ep", [2, 4])
def test_a_stage_whose_experts_one_rank_has_alone_gathers_its_dense_parameters_beside_the_compute(ep):
    """Nothing is gathered of experts that no other rank has, and no gather waits for that."""
    plan = {"method": "zero3", "pp": 2, "ep": ep, "micro_batches": 2, "recompute": "full"}
    asked = {"model": MIXTURE, "sequence_length": 32, "global_batch_size": 24}
    overlapped = scenario_of(star(8, backend="nccl", nccl="ampere"), plan, **asked)
    found = simulate(loaded_of(overlapped)).result
    assert any(entry.kind == "all-gather" and len(entry.group) == 4 for entry in found.collectives)
    own = [entry for entry in found.collectives if entry.kind == "all-gather" and len(entry.group) == 4 // ep]
    assert bool(own) == (ep < 4)


@pytest.mark.parametrize(
    ("ep", "pp", "load", "method"),
    [
        pytest.param(*case, method, marks=[] if place == quick else pytest.mark.slow)
        for quick, method in enumerate(("ddp", "zero1", "zero2", "zero3"))
        for place, case in enumerate(
            (
                (2, 1, {"skew": 1.0}),
                (4, 1, "balanced"),
                (2, 2, {"skew": 1.0}),
                (2, 1, "balanced"),
                (4, 1, {"skew": 1.0}),
                (2, 2, "balanced"),
            )
        )
    ],
    ids=str,
)
def test_bounds_of_the_search_are_below_what_is_predicted(method, ep, pp, load):
    asked = scenario({"method": method, "ep": ep, "pp": pp, "micro_batches": pp}, expert_load=load)
    bound = assert_bounds_below_prediction(asked)
    assert bound.full_ratio > 0 or pp > 1  # of sharded stages nothing is known


@pytest.mark.parametrize(
    ("method", "pp", "exchange"),
    [("zero3", 1, "all-to-all"), pytest.param("ddp", 2, "ring", marks=pytest.mark.slow), ("zero1", 1, "ring")],
)
def test_bounds_are_below_what_is_predicted_on_parts_of_sequences(method, pp, exchange):
    plan = {"method": method, "ep": 2, "cp": 2, "pp": pp, "micro_batches": pp, "context_exchange": exchange}
    asked = scenario(plan, 4 * pp, expert_load={"skew": 1.0})
    assert_bounds_below_prediction(asked)


def test_experts_that_nobody_divides_cost_as_without_the_key():
    alone, plain = (simulate(loaded_of(scenario({"method": "ddp"} | each))).result for each in ({"ep": 1}, {}))
    assert (alone.scenario_id, alone.step_time_s, alone.ranks) == (plain.scenario_id, plain.step_time_s, plain.ranks)
    assert not [each for each in alone.collectives if each.kind.startswith("all-to-all")]


def test_uneven_loads_carry_as_many_bytes_and_wait_for_the_fullest_rank():
    """A dispatch or combine carries tokens * experts of a token * width * bytes over all ranks, whatever the load.

    There are two of each in a step and block. With all rows on the experts of one of two ranks, that one receives
    twice as many as under a balanced load, and the step takes longer.
    """
    tokens, chosen, width = 32 * 24, 2, 96
    blocks = sum(each.layer.block for each in unrolled(MIXTURE))
    step_s = {}
    for name, load in {"balanced": "balanced", "one rank": {"shares": [1.0] * 6 + [0.0] * 6}}.items():
        nccl = replace(scenario({"method": "ddp", "ep": 2}, 2, expert_load=load), cluster=star(2, backend="nccl"))
        result = simulate(loaded_of(nccl)).result  # over gloo the two ways follow one another where ranks differ
        rows = [each for each in result.collectives if each.kind == "all-to-all-v"]
        assert sum(each.bytes * each.count for each in rows) == 4 * blocks * tokens * chosen * width * VALUE_BYTES
        step_s[name] = result.step_time_s
    assert step_s["one rank"] > step_s["balanced"]


@pytest.mark.parametrize("plan", [{"method": "ddp", "ep": 4}, {"method": "zero2", "ep": 2, "micro_batches": 2}])
def test_no_load_is_faster_than_equal_ones_where_all_ranks_are_alike(plan):
    """Elsewhere one may be: expert n has rows in proportion to n^-skew, and the first experts may be on faster devices,
    on the side of a slow link with more of the others, or where fewer routes share a spine of a fabric. Over gloo,
    equal loads whose rows are rounded let the two messages of a pair follow one another as unequal ones do.
    """
    alike = star(4, backend="nccl")
    asked = [replace(scenario(plan, expert_load=load), cluster=alike) for load in ("balanced", {"skew": 1.0})]
    even_s, uneven_s = (simulate(loaded_of(each)).result.step_time_s for each in asked)
    assert uneven_s > even_s


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"method": "local_sgd"}, "cannot run yet with method 'local_sgd'"),
        ({"method": "zero1", "zero1_implementation": "deepspeed"}, r"plan\.zero1_implementation = 'deepspeed'"),
        ({"method": "zero3", "dp_replicate": 2, "dp_shard": 2, "ep": 4}, "shard a replica, of which there are 2"),
        ({"method": "zero3", "tp": 2}, r"plan\.tp = 2"),
        ({"method": "ddp", "cp": 2, "tp": 2}, r"plan\.cp = 2 beside plan\.tp = 2"),
        ({"method": "zero3", "cp": 2, "ep": 3}, r"parts of sequences \(plan\.cp\) in a row, of which there are 4"),
        ({"method": "zero3", "dp_replicate": 4, "dp_shard": 1}, "shard a replica, of which there are 1"),
        ({"method": "zero3", "ep": 3}, "a divisor of these"),
        ({"method": "ddp", "ep": 1, "etp": 2}, r"plan\.etp = 2: no experts are divided \(plan\.ep = 1\)"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(plan, message):
    with pytest.raises(UserError, match=message):
        scenario({"ep": 2} | plan)


@pytest.mark.parametrize(
    ("plan", "workload", "message"),
    [
        ({"method": "zero2"}, {"precision": "bf16", "gradient_precision": "fp32"}, r"workload\.gradient_precision"),
    ],
    ids=str,
)
def test_precisions_that_experts_gradients_would_not_have_are_refused(plan, workload, message):
    with pytest.raises(UserError, match=message):
        scenario({"ep": 2} | plan, **workload)


@pytest.mark.parametrize("method", ["ddp", "zero1"])
@pytest.mark.parametrize(
    ("asked", "value_bytes"),
    [
        ({"precision": "bf16"}, 2),
        ({"precision": "bf16", "reduce_precision": "fp32"}, 4),
        ({"precision": "bf16", "reduce_precision": "fp32", "gradient_precision": "fp32"}, 4),
        ({"reduce_precision": "fp64"}, 8),
    ],
    ids=str,
)
def test_gradients_of_experts_are_summed_in_the_precision_of_reductions(method, asked, value_bytes):
    """Among the ranks that hold the same experts, of which each group of two has half."""
    plan = {"method": method, "ep": 2}
    found = carried_by(plan, "all-reduce", **asked)
    for experts, groups in ((True, ((0, 2), (1, 3))), (False, ((0, 1, 2, 3),))):
        elements = sum(prod(shape) for shape in shapes(experts=experts)) / len(groups)
        assert {each: found[each] for each in groups} == dict.fromkeys(groups, elements * value_bytes)


@pytest.mark.parametrize(
    ("implementation", "flags"), [("torch", {(0, 1): 1, (2, 3): 1}), ("megatron", {(0, 1, 2, 3): 2})]
)
def test_flags_of_infinite_gradients_are_summed_where_ranks_hold_different_experts(implementation, flags):
    """Megatron-LM's optimizer of shards has them all: experts have one of their own, with a flag of its own."""
    plan = {"method": "zero1", "ep": 2, "zero1_implementation": implementation}
    gpus = star(4, types={"gpu": device_type(peak_flop_per_s={"fp16": 1e9})}, type_names=["gpu"] * 4)
    asked = replace(scenario(plan, precision="fp16", loss_scale=1024.0), cluster=gpus)
    found = {
        entry.group: entry.count
        for entry in simulate(loaded_of(asked)).result.collectives
        if entry.kind == "all-reduce" and entry.bytes == 4
    }
    assert found == flags


def test_casts_of_experts_gradients_take_copies_and_time_only_where_they_are_summed():
    """Copies of two bytes more an element, beside the gradients; experts that one rank alone holds are summed by none.

    Casts read one format and write the other, and a copy is divided: 2 * (2 + 4) + 2 * 4 bytes an element.
    """
    experts = sum(prod(shape) for shape in shapes(experts=True))
    casts_s = {}
    for ep in (2, 4):
        found = simulate(
            loaded_of(
                scenario({"method": "ddp", "ep": ep, "overlap": False}, 4, precision="bf16", reduce_precision="fp32")
            )
        )
        casts_s[ep] = found.result.phases_s["compression"]
    device = next(iter(star(4).device_types.values()))
    of_experts_s = cost.copy_time_s(device, (experts / 2) * (12 + 8) / 2)
    assert casts_s[2] - casts_s[4] == pytest.approx(of_experts_s, rel=1e-9)


@pytest.mark.parametrize(("precision", "times"), [("bf16", 3.0), ("fp16", 1.0)])
def test_sums_of_experts_in_16_bits_have_the_costs_that_were_measured_for_them(precision, times):
    """Without measured costs, those of fp32 apply, by bytes, to all gradients."""
    costs = {"all-reduce": 1e-4, "all-reduce bf16": 3e-4}  # beside which all other exchanges are short
    priced = replace(star(4), backend_cost=BackendCost(source="test", processor_byte_s=costs))
    waits_s = []
    for each in (precision, "fp32"):
        asked = scenario({"method": "ddp", "ep": 2, "overlap": False}, reduce_precision=each)
        found = simulate(loaded_of(replace(asked, cluster=priced))).result
        waits_s.append(found.phases_s["exposed_communication"])
    assert waits_s[0] == pytest.approx(times / 2 * waits_s[1], rel=0.01)


def test_models_of_one_length_are_refused_on_parts_of_sequences():
    with pytest.raises(UserError, match=r"plan\.cp = 2 beside plan\.ep = 2: .* is traced at one sequence length alone"):
        scenario({"method": "ddp", "cp": 2, "ep": 2}, model=replace(MIXTURE, exact_sequence=False))
    with pytest.raises(UserError, match=r"plan\.cp = 2: .* is not traced on parts of sequences"):
        scenario({"method": "ddp", "cp": 2, "ep": 2}, model=DENSE_FIRST)
