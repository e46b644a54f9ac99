"""Laws and closed forms: routed experts divided among ranks that cut the rest of blocks, and others beside these."""

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from point_checks import assert_same_as_unfolded, carried
from searching import assert_bounds_below_prediction
from strategies import loaded_of, scenario_of, star

from gssim.errors import UserError
from gssim.planner.bounds import Bounds
from gssim.scenario import held_experts, load_model
from gssim.simulation import simulate
from gssim.workload import Model, unrolled

FOLDER = Path(__file__).resolve().parents[2]
MIXTURE, DENSE_FIRST, GPT = (
    load_model(FOLDER / "scenarios" / "models" / f"{name}.toml")
    for name in ("mixture-byte-1m", "deepseek-moe-byte-240k", "gpt-byte-150k")
)
SMALL = FOLDER / "tests" / "helpers" / "models" / "of_tests"
MIXTRAL, QWEN = (load_model(SMALL / f"small-{name}.toml") for name in ("heads-mixtral", "qwen3-moe"))
"""Without experts that all tokens take; the other's first block is dense, and its attention has norms of heads."""
VALUE_BYTES, LENGTH, BATCH, CHOSEN = 4, 24, 24, 2
WIDTH = {MIXTURE.name: 96, MIXTRAL.name: 48}
PARTS = {"method": "ddp", "tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}
SKEWED = {"skew": 0.7}


def name_of(value: object) -> str:
    """Return a test's parameter in short: models by their names."""
    return value.name if isinstance(value, Model) else re.sub(r"Model\(.*\)", "...", str(value))


def scenario(plan: dict, ranks: int = 4, **workload):
    asked = {"model": MIXTURE, "sequence_length": LENGTH, "global_batch_size": BATCH} | workload
    return scenario_of(star(ranks), PARTS | plan, **asked)


def result_of(plan: dict, ranks: int = 4, **workload):
    return simulate(loaded_of(scenario(plan, ranks, **workload))).result


def elements_of(model, named: str) -> int:
    """Return the elements of all parameters whose name has one of some words, separated by spaces."""
    return sum(
        prod(parameter.shape)
        for layer in unrolled(model)
        for parameter, name in zip(layer.layer.parameters, layer.parameter_names, strict=True)
        if any(word in name for word in named.split())
    )


@pytest.mark.parametrize("load", ["balanced", SKEWED], ids=str)
@pytest.mark.parametrize(
    ("tp", "cp", "dp", "ep"),
    [(2, 1, 2, 2), (2, 1, 2, 4), (2, 2, 1, 2), pytest.param(4, 1, 2, 4, marks=pytest.mark.slow)],
)
def test_each_token_is_sent_once_whatever_the_tensor_ranks(tp, cp, dp, ep, load):
    """A dispatch or combine carries tokens * experts of a token * width * bytes over all ranks, and there are two of
    each in a step and block: each rank of a tensor group sends those of its own part of the sequences.
    """
    ranks = tp * cp * dp
    sent = carried(result_of({"tp": tp, "cp": cp, "ep": ep}, ranks, expert_load=load), "all-to-all-v")
    blocks = sum(each.layer.block for each in unrolled(MIXTURE))
    rows = 4 * blocks * LENGTH * BATCH * CHOSEN * WIDTH[MIXTURE.name] * VALUE_BYTES
    assert sent == {tuple(range(first, first + ep)): rows * ep // ranks for first in range(0, ranks, ep)}
    (group,) = {each for each in sent if 0 in each}
    assert len({rank % tp for rank in group}) == tp  # ranks of a tensor group are the first to be taken


@pytest.mark.parametrize(("model", "ranks", "ep"), [(MIXTURE, 4, 2), (MIXTURE, 4, 4), (MIXTRAL, 8, 2), (MIXTRAL, 8, 4)])
def test_gradients_are_pushed_among_ranks_with_the_same_slices_and_those_with_the_same_experts(model, ranks, ep):
    """n ranks with the same N elements of a slice push (n-1) * N, and r ranks with the same E of experts (r-1) * E."""
    held = held_experts(scenario({"method": "gs", "ep": ep}, ranks, model=model), 0, 0)
    parameters = [parameter for each in held for parameter in each.layer.parameters]
    dense = sum(each.elements for each in parameters if not each.of_experts)
    experts = sum(each.elements for each in parameters if each.of_experts)
    assert experts == elements_of(model, ".experts.") // ep
    rows = carried(result_of({"method": "ddp", "ep": ep}, ranks, model=model), "all-to-all-v")
    pushed = carried(result_of({"method": "gs", "ep": ep}, ranks, model=model), "all-to-all-v")
    wanted: dict[tuple[int, ...], int] = {}
    for stride, size in ((2, dense), (ep, experts)):
        for first in range(stride if stride < ranks else 0):
            group = tuple(range(first, ranks, stride))
            wanted[group] = wanted.get(group, 0) + (len(group) - 1) * size * VALUE_BYTES
    assert {group: size - rows.get(group, 0) for group, size in pushed.items() if size != rows.get(group)} == wanted


@pytest.mark.parametrize(("model", "times"), [(MIXTURE, 2), (MIXTRAL, 1)], ids=name_of)
def test_tokens_of_a_part_are_gathered_for_attention_and_shared_experts_alone(model, times):
    """Each is gathered twice, and reduce-scattered twice; first and last of all, sequences are divided and joined."""
    maps = 2 * times * sum(each.layer.block for each in unrolled(model))
    size = LENGTH * BATCH // 2 * WIDTH[model.name] * VALUE_BYTES
    result = result_of({"ep": 4}, model=model)
    assert carried(result, "all-gather") == dict.fromkeys([(0, 1), (2, 3)], (maps + 2) * size)
    assert carried(result, "reduce-scatter") == dict.fromkeys([(0, 1), (2, 3)], maps * size)


@pytest.mark.parametrize(
    ("model", "names", "method"),
    [(MIXTURE, "norm router", "zero1"), (MIXTRAL, "norm mlp.gate.", "ddp"), (QWEN, "norm mlp.gate.", "ddp")],
    ids=name_of,
)
def test_gradients_of_routers_are_summed_over_tensor_ranks_as_those_of_norms(model, names, method):
    result = result_of({"method": method, "ep": 4}, model=model)
    size = elements_of(model, names) * VALUE_BYTES
    of_parts = {entry for entry in result.collectives if entry.kind == "all-reduce" and entry.group in {(0, 1), (2, 3)}}
    assert {(entry.group, entry.bytes, entry.count) for entry in of_parts} == {((0, 1), size, 1), ((2, 3), size, 1)}


@pytest.mark.parametrize(("ranks", "ep"), [(4, 2), (4, 4), pytest.param(8, 2, marks=pytest.mark.slow)])
def test_gradients_are_reduced_over_those_that_hold_them(ranks, ep):
    """Gradients of experts are reduced over ranks with the same experts, all others over ranks with the same slices."""
    found = carried(result_of({"ep": ep}, ranks, expert_load=SKEWED), "all-reduce")
    experts = elements_of(MIXTURE, ".experts.")
    slices = elements_of(MIXTURE, "attention.qkv attention.out.weight shared")
    whole = elements_of(MIXTURE, ".") - experts - slices
    replicas = {tuple(range(first, ranks, ep)) for first in range(ep)} if ep < ranks else set()
    dense = {tuple(range(first, ranks, 2)) for first in range(2)}
    wanted = dict.fromkeys(dense | replicas, 0)
    for group in dense:
        wanted[group] += (whole + slices // 2) * VALUE_BYTES
    for group in replicas:
        wanted[group] += experts // ep * VALUE_BYTES
    assert {group: size for group, size in found.items() if group[1] - group[0] > 1} == wanted  # no tensor groups


@pytest.mark.parametrize(
    ("method", "load", "pp", "cp"),
    [
        ("zero1", "balanced", 1, 1),
        ("zero3", SKEWED, 1, 2),
        ("gs", SKEWED, 1, 1),
        pytest.param("gs_z3", "balanced", 1, 2, marks=pytest.mark.slow),
        pytest.param("ddp", SKEWED, 2, 1, marks=pytest.mark.slow),
        pytest.param("zero2", "balanced", 2, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_that_are_alike_are_predicted_once_and_as_if_each_were_apart(method, load, pp, cp):
    plan = {"method": method, "ep": 4, "pp": pp, "cp": cp, "micro_batches": pp}
    plan |= {"embedding_parallel": True, "loss_parallel": True}
    norm = {} if method in ("gs", "gs_z3") else {"clip_norm": 1.0}
    loaded = loaded_of(scenario(plan, 8 * pp, expert_load=load, **norm))
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)


def test_a_rank_holds_its_experts_and_its_part_of_what_is_between_cut_blocks():
    """Two tensor ranks with four samples each hold as much of the experts as two replicas with two samples each, and
    half of the attention and of the shared experts.
    """
    tensor = result_of({"ep": 4, "embedding_parallel": True, "loss_parallel": True}).ranks[0]
    data = result_of({"tp": 1, "etp": None, "ep": 4, "sequence_parallel": False}).ranks[0]
    of_each = [each.peak_by_category_bytes["parameters"] for each in (data, tensor)]
    cut = elements_of(MIXTURE, "attention.qkv attention.out.weight shared tokens head")
    assert of_each[0] - of_each[1] == cut // 2 * VALUE_BYTES


@pytest.mark.parametrize("model", [MIXTURE, MIXTRAL], ids=name_of)
def test_inputs_that_are_gathered_again_are_not_kept(model):
    plan = {"ep": 4}
    kept, again = (result_of({**plan, **each}, model=model) for each in ({}, {"gathered_inputs": "gathered-again"}))
    blocks = 4 if model is MIXTURE else 3
    maps = blocks * (2 if model is MIXTURE else 1)
    gathers = [sum(e.count for e in each.collectives if e.kind == "all-gather") for each in (kept, again)]
    assert gathers[1] - gathers[0] == 2 * maps
    held = [each.ranks[0].peak_by_category_bytes["activations"] for each in (kept, again)]
    assert held[1] < held[0]


@pytest.mark.parametrize(
    ("plan", "workload", "message"),
    [
        ({"etp": None}, {}, r"plan\.etp = 2: .* allowed: 1"),
        ({"sequence_parallel": False}, {}, r"plan\.sequence_parallel = false: all tensor ranks would send the same"),
        ({"ep": 3}, {}, r"plan\.etp = 1: times 3 \(plan\.ep\) must .* allowed: plan\.ep = 2 or 4"),
        ({"ep": 1}, {}, r"plan\.etp = 1: no experts are divided"),
        ({"ep": 1, "etp": None}, {}, r"blocks of 'mixture-byte-1m' cannot be cut: "),
        ({"ep": 4, "tp": 4, "dp_replicate": 1}, {"model": replace(MIXTURE, expert_sequence_layers=())}, "trace is old"),
        ({}, {"model": DENSE_FIRST}, "'deepseek-moe-byte-240k' has .*: its layers are no blocks, or"),
        ({}, {"model": GPT}, r"plan\.ep = 2: 'gpt-byte-150k' has no routed experts to divide; allowed: 1"),
        ({"cp": 2, "ep": 4, "etp": None}, {}, "a divisor of these"),
        ({"cp": 2, "ep": 2, "etp": None}, {}, r"plan\.cp = 2 beside plan\.tp = 2: .* or plan\.etp = 1"),
        ({"cp": 2, "ep": 4}, {"sequence_length": 26}, r"parts of 13 positions cannot be divided evenly"),
        ({"cp": 2, "ep": 4}, {"model": MIXTRAL}, "is traced at one sequence length alone"),
        ({"tp_overlap": True}, {}, r"plan\.tp_overlap = true: exchanges beside products are not known yet"),
        ({"async_input_gradients": True}, {}, r"plan\.async_input_gradients = true"),
        (
            {"method": "gs", "shares": {"shards": "memory"}},
            {},
            r"plan\.shares\.shards = 'memory': what ranks that divide experts own is not weighed",
        ),
        (
            {"method": "gs"},
            {"clip_norm": 1.0},
            r"workload\.clip_norm = 1: cannot run yet with method 'gs' and plan\.tp",
        ),
        (
            {"method": "gs_tp", "tp": 4, "ep": 4, "shares": {"shards": [0.4, 0.2, 0.2, 0.2]}},
            {},
            r"plan\.shares\.shards = \[0\.4, .* slices of the same size; allowed: 'even'",
        ),
        ({"method": "zero3", "dp_replicate": 2, "dp_shard": 1, "ep": 4}, {}, "shard a replica, of which there are 2"),
        ({}, {"sequence_length": 23}, r"workload\.sequence_length = 23: cannot be divided evenly"),
    ],
    ids=name_of,
)
def test_what_cannot_run_is_refused(plan, workload, message):
    with pytest.raises(UserError, match=message):
        scenario(plan, **workload)


def test_tensor_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(UserError, match=r"plan\.tp = 3: .* does not divide the 4 units of blocks\.0"):
        scenario({"tp": 3, "ep": 3, "method": "tensor"}, 3)


@pytest.mark.parametrize("load", [SKEWED, {"shares": [1.0] * 6 + [0.0] * 6}], ids=str)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("tensor_ranks", "recompute"), [(1, "full"), (2, "none")])
def test_bounds_of_pipelines_know_the_rows_that_are_exchanged(backend, tensor_ranks, recompute, load):
    """On slow links stages wait for rows most of the time, and for gradients at the end."""
    plan = {
        "method": "ddp",
        "pp": 2,
        "dp_replicate": 4 // tensor_ranks,
        "tp": tensor_ranks,
        "ep": 4,
        "micro_batches": 4,
    }
    plan |= {"recompute": recompute} | ({} if tensor_ranks > 1 else {"etp": None, "sequence_parallel": False})
    asked = replace(
        scenario(plan, 8, expert_load=load, global_batch_size=16), cluster=star(8, backend=backend, bandwidth=1e5)
    )
    step_s, bounds = simulate(loaded_of(asked)).result.step_time_s, Bounds(asked)
    first = bounds.of(asked.plan)
    closer = bounds.closer(asked.plan, first)
    assert 0.2 * step_s < closer.time_s <= step_s
    assert first.time_s < 0.1 * closer.time_s


@pytest.mark.parametrize(
    ("method", "stages", "load"),
    [
        ("ddp", 1, SKEWED),
        ("zero3", 1, "balanced"),
        ("zero1", 2, SKEWED),
        ("ddp", 2, "balanced"),
        ("gs", 1, SKEWED),
        ("gs_z3", 1, "balanced"),
        ("gs", 2, SKEWED),
    ],
    ids=str,
)
def test_bounds_of_the_search_are_below_what_is_predicted(method, stages, load):
    replicas = "dp_shard" if method == "gs" else "dp_replicate"
    plan = {"pp": stages, replicas: 2, "micro_batches": 2} if stages > 1 else {}
    asked = scenario({"method": method, "ep": 4, **plan}, 8, expert_load=load)
    assert assert_bounds_below_prediction(asked).full_ratio > 0
