"""Weight gradients divided among ranks: each runs the whole batch, makes those of its own layers, and publishes.

The models here are stacks of equal layers, forward F, gradient of the input D and weight gradient W, with the buffers
of a linear layer: its input is kept for its weight gradient alone.
"""

import tomllib
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import assert_bounds_below_prediction
from strategies import device_type, loaded_of, scenario_of, star, tiny_model, with_plan

from gssim import cost
from gssim.cluster import Cluster
from gssim.errors import UserError
from gssim.plan import splitting
from gssim.planner.bounds import Bounds
from gssim.program import Lowering, lower
from gssim.result import RankClass, Result
from gssim.scenario import Scenario, load_model
from gssim.simulation import simulate
from gssim.units import validated
from gssim.workload import Model, unrolled
from gssim.workload.owned import owned_layers, with_frozen_layers

FLOP = 1000
"""FLOP of a layer's forward, input gradient and weight gradient, each, for each sample and token."""
SAMPLES, TOKENS = 8, 4
ONE_S = FLOP * SAMPLES * TOKENS / 1e9
"""Each of them takes so long on the strategies' device of 1 GFLOP/s."""
HANDED_ON = 16 * SAMPLES * TOKENS

LAYER = """
[[layers]]
name = "h{first}"
modules = [{modules}]
parameters = ["{{}}.weight {rows}x4 b1 b1"]
forward_flop = "{flop}*b*s"
backward_flop = "{both}*b*s"
forward_bytes = 0
backward_bytes = 0
saved_bytes = "16*b*s"
output_bytes = "16*b*s"
forward_operations = 1
backward_operations = 2
buffers = ["f0 b1@+1 activations 16*b*s", "b0 b1@-1 temporaries 16*b*s"]
untrained_buffers = ["f0 f0@+1 temporaries 16*b*s"]

[layers.frozen]
backward_flop = "{flop}*b*s"
backward_bytes = 0
backward_operations = 1
buffers = ["f0 f0@+1 temporaries 16*b*s", "b0 b0@-1 temporaries 16*b*s"]
input_freed = "f0"
gradient_freed = "b0"

[layers.deepest]
backward_flop = "{flop}*b*s"
backward_bytes = 0
backward_operations = 1
parameters = ["{{}}.weight {rows}x4 b0 b0"]
buffers = ["f0 f0@+1 temporaries 16*b*s"]
input_freed = "b0"
gradient_freed = "b0"
"""

LOSS = """
[[layers]]
name = "loss"
modules = []
forward_flop = 0
backward_flop = 0
forward_bytes = 0
backward_bytes = 0
saved_bytes = "16*b*s"
output_bytes = 4
forward_operations = 1
backward_operations = 1
buffers = ["f0 end activations 4", "b0 b1@-1 temporaries 16*b*s"]
untrained_buffers = ["f0 f0 temporaries 4"]

[layers.frozen]
backward_flop = 0
backward_bytes = 0
backward_operations = 1
buffers = ["f0 b0@-1 activations 4", "b0 b1@-1 temporaries 16*b*s"]
input_freed = "b0"
"""


MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"


def stack(layers: int, *, rows: tuple[int, ...] = ()) -> Model:
    """Return a model of equal layers, or of one for each of `rows` (of 4 parameters each, in groups of equal ones)."""
    sizes = rows or (4,) * layers
    head = 'name = "stack"\nsource = "made by hand"\ntraced_batch_sizes = [1]\nmodule = { factory = "no.where" }\n'
    head += 'input = { kind = "tokens", vocabulary = 16, maximum_sequence_length = 64 }\n'
    entries, first = [], 0
    while first < len(sizes):
        last = next((i for i in range(max(1, first), len(sizes)) if not first or sizes[i] != sizes[first]), len(sizes))
        modules = ", ".join(f'"h.{i}"' for i in range(first, last))
        entry = LAYER.format(first=first, modules=modules, rows=sizes[first], flop=FLOP, both=2 * FLOP)
        entries.append(entry if first else entry.replace(', "b0 b1@-1 temporaries 16*b*s"]', "]", 1))
        first = last
    return validated(Model, tomllib.loads("\n".join([head, *entries, LOSS])), file="stack")


def dealt_out(ranks: int, model: Model, *, cluster: Cluster | None = None, **plan: Any) -> Scenario:
    return scenario_of(
        cluster or star(ranks, bandwidth=1e18),
        {"method": "gs_wgrad"} | plan,
        model=model,
        global_batch_size=SAMPLES,
        sequence_length=TOKENS,
    )


def result_of(scenario: Scenario) -> Result:
    return simulate(loaded_of(scenario)).result


def by_rank(result: Result) -> list[RankClass]:
    found = {rank: entry for entry in result.ranks for rank in entry.ranks}
    return [found[rank] for rank in sorted(found)]


# Who owns what -------------------------------------------------------------------------------------------------------


@st.composite
def sizes_and_shares(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
    parts = draw(st.integers(1, sum(1 for size in sizes if size)))
    weights = draw(st.lists(st.integers(1, 9), min_size=parts, max_size=parts))
    return sizes, [weight / sum(weights) for weight in weights]


@settings(max_examples=examples(200))
@given(sizes_and_shares())
def test_no_other_runs_of_layers_are_nearer_to_the_shares(given_):
    sizes, wanted = given_
    found = splitting.contiguous(tuple(sizes), tuple(wanted))
    assert [found[0][0], *(last for _, last in found)] == [first for first, _ in found] + [len(sizes)]

    def worst(ranges):
        return max(sum(sizes[slice(*each)]) / share for each, share in zip(ranges, wanted, strict=True))

    def all_own(ranges):
        return all(any(sizes[slice(*each)]) for each in ranges)

    cuts = combinations(range(1, len(sizes)), len(wanted) - 1)
    others = [ranges for each in cuts if all_own(ranges := list(pairwise((0, *each, len(sizes)))))]
    assert all_own(found)
    assert worst(found) == pytest.approx(min(map(worst, others)))


def test_ranks_own_runs_of_layers_in_the_models_order():
    scenario = dealt_out(3, stack(6), shares={"shards": [1 / 2, 1 / 3, 1 / 6]})
    assert scenario.owned_layers == ((0, 3), (3, 5), (5, 7))  # the loss has no parameters
    assert scenario.shard_shares == pytest.approx((1 / 2, 1 / 3, 1 / 6))
    assert scenario.batch_sizes == (SAMPLES,) * 3


def test_the_fastest_device_owns_the_first_layers_where_shares_follow_the_devices():
    types = {"slow": device_type(), "fast": device_type(peak_flop_per_s={"fp32": 2e9})}
    cluster = star(2, types=types, type_names=["slow", "fast"])
    scenario = dealt_out(2, stack(6), cluster=cluster, shares={"shards": "compute"})
    assert scenario.owned_layers == ((4, 7), (0, 4))


def test_what_a_rank_owns_is_part_of_who_the_scenario_is():
    even, uneven = (dealt_out(2, stack(6), shares={"shards": each}) for each in ("even", (2 / 3, 1 / 3)))
    assert even.scenario_id != uneven.scenario_id
    nearly = with_plan(even, shares=replace(even.plan.shares, shards=(0.51, 0.49)))
    assert nearly.scenario_id == even.scenario_id  # whole layers: the same


# How long ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_the_speed_up_of_equal_layers_on_equal_devices_is_the_bound(ranks):
    # forward, input and weight gradients take as long as each other: F + D + W / M is 3 / (2 + 1/M) times as fast
    alone = result_of(scenario_of(star(1), {"method": "single"}, model=stack(12)))
    assert alone.step_time_s == pytest.approx(12 * 3 * ONE_S + optimizer_s(12), rel=1e-6)
    found = result_of(dealt_out(ranks, stack(12)))
    work_s = found.step_time_s - optimizer_s(12 // ranks)
    assert 12 * 3 * ONE_S / work_s == pytest.approx(3 / (2 + 1 / ranks), rel=1e-6)


def optimizer_s(layers: int) -> float:
    scenario = dealt_out(1, stack(layers))
    device, elements = scenario.cluster.type_of(0), layers * 16
    return cost.optimizer_time_s(device, scenario.workload, elements=elements, tensors=layers)


@given(sizes_and_shares())
def test_a_rank_does_the_whole_forward_its_weight_gradients_and_what_leads_down_to_them(given_):
    sizes, wanted = given_
    rows = tuple(max(1, size) for size in sizes)
    scenario = dealt_out(len(wanted), stack(0, rows=rows), shares={"shards": tuple(wanted)})
    program, layers = lower(scenario), len(rows)
    for rank, (first, last) in enumerate(scenario.owned_layers):
        tasks = program.tasks[program.role_of[rank]]
        seconds = {
            phase: sum(task.duration_s for task in tasks if task.phase == phase) for phase in ("forward", "backward")
        }
        last = min(last, layers)
        gradients = layers - first - (0 if first == 0 else 1)  # of inputs: not of the deepest's, but the first's
        assert seconds["forward"] == pytest.approx(layers * ONE_S)
        assert seconds["backward"] == pytest.approx((gradients + last - first) * ONE_S)


# How much ------------------------------------------------------------------------------------------------------------


def test_activations_are_kept_from_the_deepest_owned_layer_up_and_only_for_weight_gradients():
    # of 6 layers, rank 0 owns 0 to 2: it keeps the inputs of 1 and 2 (the first reads tokens), and the logits;
    # rank 1 owns 3 to 5, and keeps the inputs of these, and the logits
    scenario = dealt_out(2, stack(6))
    low = Lowering(scenario, None, 0, range(2))
    program = lower(low.scenario)
    for rank, handed in ((0, 2 + 1), (1, 3 + 1)):
        forward = [task for task in program.tasks[program.role_of[rank]] if task.phase == "forward"]
        kept = sum(dict(task.need.kept).get("activations", 0) for task in forward)
        assert kept == handed * HANDED_ON + 4


def test_the_optimizers_states_are_divided_and_the_gradients_too():
    scenario = dealt_out(3, stack(6))
    alone = scenario_of(star(1), {"method": "single"}, model=stack(6))
    whole = lower(alone).persistent[0]["optimizer"]
    program = lower(scenario)
    assert sum(program.persistent[program.role_of[rank]]["optimizer"] for rank in range(3)) == whole
    freed = [dict(task.need.kept) for tasks in program.tasks for task in tasks if task.label == "optimizer"]
    assert sum(each["gradients"] for each in freed) == -4 * 16 * 6


def test_a_rank_that_owns_everything_trains_as_one_device_does():
    layers = unrolled(stack(6))
    run = owned_layers(layers, set(range(7)))
    assert run.deepest == 0
    assert all(ours.layer is theirs.layer for ours, theirs in zip(run.layers, layers, strict=True))
    alone, one = (result_of(scenario_of(star(1), {"method": m}, model=stack(6))) for m in ("single", "gs_wgrad"))
    assert one.step_time_s == alone.step_time_s
    assert by_rank(one)[0].peak_allocated_bytes == by_rank(alone)[0].peak_allocated_bytes


def test_every_layer_that_a_rank_owns_more_costs_it_its_input_its_gradient_and_its_states():
    peaks = []
    for owned in (2, 3, 4, 5):
        scenario = dealt_out(2, stack(6), shares={"shards": [1 - owned / 6, owned / 6]})
        peaks.append(by_rank(result_of(scenario))[1].peak_by_category_bytes)
    for less, more in pairwise(peaks):
        assert more["activations"] - less["activations"] == HANDED_ON
        assert more["optimizer"] - less["optimizer"] == 2 * 4 * 16 + 4  # two moments, one counter
        assert more["parameters"] == less["parameters"]


# What is sent --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_half_of_what_data_parallelism_moves_is_moved(ranks):
    published = result_of(dealt_out(ranks, stack(6)))
    (entry,) = published.collectives
    assert (entry.kind, entry.bytes, entry.count) == ("all-gather-v", 4 * 16 * 6, 1)
    plan = {"method": "ddp", "shares": {"batch": [1.0] + [0.0] * (ranks - 1)}}
    reduced = result_of(scenario_of(star(ranks), plan, model=stack(6)))
    ours, theirs = (sum(each.bytes_sent for each in by_rank(result)) for result in (published, reduced))
    assert ours == pytest.approx((ranks - 1) * 4 * 16 * 6)
    assert ours == pytest.approx(theirs / 2)


def test_folding_changes_nothing():
    # two ranks of each type; all own different layers, so that none are alike
    types = {"slow": device_type(), "fast": device_type(peak_flop_per_s={"fp32": 2e9})}
    cluster = star(4, types=types, type_names=["slow", "fast", "slow", "fast"])
    scenario = dealt_out(4, stack(8), cluster=cluster, shares={"shards": "compute"})
    folded, unfolded = (simulate(loaded_of(scenario), unfolded=each).result for each in (False, True))
    assert folded.step_time_s == pytest.approx(unfolded.step_time_s, rel=1e-9)
    for one, other in zip(by_rank(folded), by_rank(unfolded), strict=True):
        assert one.peak_by_category_bytes == other.peak_by_category_bytes
        assert one.phases_s == pytest.approx(other.phases_s)


# What does not go together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"shares": {"batch": [0.5, 0.5]}}, "plan.shares.batch"),
        ({"shares": {"batch": "throughput"}}, "runs the whole batch on every rank"),
        ({"push": {"threshold": 1e-3}}, "pushes no gradients"),
        ({"publish": {"threshold": 1e-3}}, "plan.publish.threshold = 0.001: cannot run yet"),
        ({"shares": {"shards": [1.0, 0.0]}}, "none may be 0"),
        ({"shares": {"shards": [0.5, 0.3, 0.2]}}, "3 shares for 2 ranks"),
        ({"dp_replicate": 2}, "uses dp_shard"),
        ({"gradients": "all-reduce"}, "cannot run yet"),
        ({"optimizer_state": "replicated"}, "cannot run yet"),
    ],
)
def test_what_does_not_go_with_it_is_refused_with_the_reason(plan, message):
    with pytest.raises(UserError, match=message):
        dealt_out(2, stack(6), **plan)


def test_checkpointed_convolutions_are_refused():
    digits = load_model(Path(__file__).resolve().parents[2] / "scenarios/models/resnet-digits.toml")
    plan = {"method": "gs_wgrad", "recompute": "full"}
    with pytest.raises(UserError, match=r"plan\.recompute = 'full': cannot run yet with method 'gs_wgrad' and a model"):
        scenario_of(star(2), plan, model=digits, global_batch_size=4, sequence_length=None)


def test_more_ranks_than_layers_with_parameters_are_refused():
    with pytest.raises(UserError, match="4 ranks for 3 layers with parameters"):
        dealt_out(4, stack(3))


def test_a_model_file_that_says_nothing_of_frozen_layers_is_refused():
    said = (
        r"lacks the costs of layers that a rank does not train, which method 'gs_wgrad' needs; add .* FILE --out NEW`"
    )
    with pytest.raises(UserError, match=said):
        dealt_out(2, tiny_model())
    # tracing again would not help: it was told to, with no word of why
    said = r"'llama3\.2-1b' cannot run yet with method 'gs_wgrad', .*: model\.embed_tokens shares a parameter .*; all"
    with pytest.raises(UserError, match=said):
        dealt_out(2, load_model(MODELS / "llama3.2-1b.toml"))


def test_a_batch_need_not_be_divided():
    scenario = scenario_of(star(3), {"method": "gs_wgrad"}, model=stack(6), global_batch_size=1)
    assert scenario.batch_sizes == (1, 1, 1)


# Frozen layers -------------------------------------------------------------------------------------------------------


def with_frozen(frozen: list[str], *, ranks: int = 1, **changes: Any) -> Scenario:
    """Return a training of four equal layers and a loss, of which those that match are frozen."""
    plan = {"method": "single" if ranks == 1 else "ddp"} | changes.pop("plan", {})
    sizes = {"global_batch_size": SAMPLES, "sequence_length": TOKENS}
    return scenario_of(star(ranks), plan, model=stack(4), frozen=tuple(frozen), **sizes, **changes)


@pytest.mark.parametrize(
    ("frozen", "backward"),
    [
        (["h.0"], 0 + 1 + 2 + 2),  # the deepest trained layer computes no gradient of its input
        (["h.[01]"], 0 + 0 + 1 + 2),
        (["h.1"], 2 + 1 + 2 + 2),  # a frozen layer between computes that alone
        (["h.1", "h.3"], 2 + 1 + 2 + 1),
    ],
)
def test_frozen_layers_compute_what_lower_layers_need(frozen, backward):
    (one,) = result_of(with_frozen(frozen)).ranks
    assert one.phases_s["forward"] == pytest.approx(4 * ONE_S)
    assert one.phases_s["backward"] == pytest.approx(backward * ONE_S)


def test_frozen_layers_have_parameters_and_neither_gradients_nor_optimizer_state():
    adam = {"optimizer": "adamw", "ranks": 2}
    whole, some = (result_of(with_frozen(names, **adam)) for names in (["h.0"], ["h.0", "h.2"]))
    held = [each.ranks[0].peak_by_category_bytes for each in (whole, some)]
    parameters, states, buckets = ([each[key] for each in held] for key in ("parameters", "optimizer", "buckets"))
    assert parameters[0] == parameters[1] == 4 * 16 * 4
    # two states of each of 16 elements, and a counter of 4 bytes
    assert states[0] - states[1] == 2 * 16 * 4 + 4
    assert buckets[0] - buckets[1] == 16 * 4
    sent = [sum(entry.bytes * entry.count for entry in each.collectives) for each in (whole, some)]
    assert sent == [3 * 16 * 4, 2 * 16 * 4]


def test_frozen_layers_are_part_of_the_question():
    ids = [with_frozen(names).scenario_id for names in (["h.0"], ["h.1"], ["h.[0]"])]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("frozen", "plan", "said"),
    [
        (
            ["h.9"],
            {},
            r"workload\.frozen = \['h.9'\]: 'h.9' matches no layer with parameters; they are h.0, h.1, h.2, h.3",
        ),
        (["*"], {}, r"workload\.frozen = \['\*'\]: all layers are; at least one must be trained"),
        (
            ["h.0"],
            {"method": "powersgd"},
            "cannot run yet with method 'powersgd': .* allowed: methods single, ddp, zero1, half, zero2, zero3, ",
        ),
        (["h.0"], {"method": "gs_z3", "push": {"threshold": 0.1}}, "plan.push.threshold = 0.1: gradient statistics"),
        (["h.0"], {"method": "gs", "push": {"threshold": 0.1}}, "plan.push.threshold = 0.1: gradient statistics are"),
        (["h.0"], {"method": "gs_wgrad"}, "cannot run yet with method 'gs_wgrad'"),
        (["h.0", "h.1"], {"method": "pipeline", "micro_batches": 2, "stages": [2, 2]}, "stage 0 would train nothing"),
        (["h.2", "h.3"], {"method": "pipeline", "micro_batches": 2, "stages": [2, 2]}, "stage 1 would train nothing"),
    ],
)
def test_frozen_layers_are_refused_where_they_are_not_modelled(frozen, plan, said):
    with pytest.raises((UserError, ValueError), match=said):
        with_frozen(frozen, ranks=2, plan=plan)


def test_a_stage_without_adapters_is_refused_with_what_the_user_can_change():
    """It advised fewer frozen layers, of which the user had named none."""
    plan = {"method": "pipeline", "pp": 2, "micro_batches": 2, "stages": [5, 2]}
    said = (
        r"workload\.adapters: .* stage 1 would train nothing; allowed: other plan\.stages or a smaller plan\.pp, so "
        r"that every stage has a map with an adapter; or workload\.adapters\.targets with maps of every stage"
    )
    with pytest.raises(UserError, match=said):
        scenario_of(
            star(2),
            plan,
            model=load_model(MODELS / "gpt-byte-1m.toml"),
            adapters={"rank": 4},
            global_batch_size=4,
            sequence_length=16,
            precision="fp32",
        )


def of_parts(model: Model, frozen: tuple[str, ...] | None, **plan: Any) -> Scenario:
    """Return a training of a model whose blocks or sequences two ranks divide."""
    sizes = {"global_batch_size": SAMPLES, "sequence_length": 16, "precision": "fp32"}
    return scenario_of(star(2), {"method": "ddp"} | plan, model=model, frozen=frozen, **sizes)


TRACED = load_model(MODELS / "gpt-byte-150k.toml")
"""Two blocks between an embedding and a norm, with a head of its own."""


@pytest.mark.parametrize(
    ("frozen", "sums"),
    [
        (None, 8),  # two of each block's results in the forward, and two of its inputs' gradients in the backward
        (("blocks.*",), 8),  # gradients pass through all of them
        (("tokens",), 8),  # so has the input of the deepest block's first map, for the weights of the norm before it
        (("tokens", "blocks.0"), 6),
        (("tokens", "blocks.*"), 4),  # the forward's alone
    ],
)
def test_ranks_with_slices_sum_the_gradients_of_inputs_that_have_one(frozen, sums):
    scenario = of_parts(TRACED, frozen, tp=2)
    found = simulate(loaded_of(scenario)).result.collectives
    assert [(each.kind, each.count) for each in found if len(each.key[1]) > 1] == [("all-reduce", sums)]


@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}])
def test_a_model_file_without_frozen_parts_is_refused_where_ranks_divide_it(plan):
    with pytest.raises(UserError, match=r"beside frozen layers.*gsreal trace FILE --frozen --out NEW`"):
        of_parts(replace(TRACED, partly_trained=None), ("blocks.0",), **plan)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt2-124m", r"'gpt2-124m' cannot run yet .* layers: lm_head shares a parameter \(tied embeddings\)"),
        ("llama3-8b-compiled", "blocks of 'llama3-8b-compiled' are compiled, .* take the model that is not compiled"),
        ("llama3-8b", "add them with `gsreal trace FILE --frozen --out NEW`, .* and set workload.model to NEW"),
    ],
)
def test_a_model_without_costs_of_frozen_layers_is_refused_with_what_to_do(name, said):
    model = replace(load_model(MODELS / f"{name}.toml"), partly_trained=None)
    with pytest.raises(ValueError, match=f"frozen: .*{said}"):
        with_frozen_layers(model, ("*.0",))


def test_a_shipped_llama_has_the_costs_of_frozen_layers():
    assert with_frozen_layers(load_model(MODELS / "llama3-8b.toml"), ("model.layers.0",)).frozen_elements > 0


def test_what_frozen_parts_cost_is_no_part_of_a_scenario_that_freezes_nothing():
    plans: list[dict[str, Any]] = [{"tp": 2}, {"cp": 2}]
    for plan in plans:
        ids = {of_parts(model, None, **plan).scenario_id for model in (TRACED, replace(TRACED, partly_trained=None))}
        assert len(ids) == 1


def test_owners_of_flat_units_hold_what_is_frozen_whole():
    """Parameters without gradients have no owner; of the others each rank holds its own half, and a unit at a time."""
    plan = {"method": "gs_z3"}
    whole, some = (result_of(with_frozen(names, ranks=2, plan=plan)) for names in (["h.0"], ["h.0", "h.2"]))
    held = [each.ranks[0].peak_by_category_bytes["parameters"] for each in (whole, some)]
    assert held == [(1 + 3 / 2) * 16 * 4, (2 + 2 / 2) * 16 * 4]
    sent = [sum(entry.bytes * entry.count for entry in each.collectives) for each in (whole, some)]
    assert sent[0] / sent[1] == pytest.approx(3 / 2)


@pytest.mark.parametrize("method", ["ddp", "zero1", "zero2", "zero3", "gs", "gs_z3"])
@pytest.mark.parametrize("frozen", [["h.0", "h.1"], ["h.1", "h.2"]])
def test_bounds_of_the_search_are_below_what_is_predicted_with_frozen_layers(method, frozen):
    asked = with_frozen(frozen, ranks=2, plan={"method": method})
    assert_bounds_below_prediction(asked)


def test_stages_with_frozen_layers_send_the_gradients_of_their_inputs_all_the_same():
    """A frozen layer at the begin of the second stage has a backward, one at the begin of the first has none."""
    plan = {"method": "pipeline", "micro_batches": 1, "stages": [2, 2]}
    first, second = (result_of(with_frozen([name], ranks=2, plan=plan)) for name in ("h.0", "h.2"))
    backward = [[rank.phases_s["backward"] for rank in each.ranks] for each in (first, second)]
    assert backward[0] == pytest.approx([1 * ONE_S, 4 * ONE_S])
    assert backward[1] == pytest.approx([4 * ONE_S, (1 + 2) * ONE_S])


GPT = load_model(Path(__file__).resolve().parents[2] / "scenarios/models/gpt-byte-1m.toml")


def test_bounds_of_the_search_know_that_blocks_without_a_backward_are_not_recomputed():
    plan = {"method": "gs_z3", "recompute": "full"}
    sizes = {"global_batch_size": 4, "sequence_length": 32}
    asked = scenario_of(star(2), plan, model=GPT, frozen=("tokens", "blocks.*", "norm"), **sizes)
    result, bounds = simulate(loaded_of(asked)).result, Bounds(asked)
    assert bounds.closer(asked.plan, bounds.of(asked.plan)).time_s <= result.step_time_s


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_frozen_blocks_below_the_first_trained_one_are_gathered_for_the_forward_alone(backend):
    """Except the block that FSDP2 prefetches. Frozen blocks above are gathered for both passes, and reduce nothing."""

    def counted(*frozen: str) -> Counter[str]:
        settings = {} if backend == "gloo" else {"backend": "nccl", "nccl": "ampere"}
        sizes = {"global_batch_size": 4, "sequence_length": 32}
        asked = scenario_of(star(2, **settings), {"method": "zero3"}, model=GPT, frozen=frozen, **sizes)
        found: Counter[str] = Counter()
        for entry in simulate(loaded_of(asked)).result.collectives:
            found[entry.kind] += entry.count
        return found

    def reduced_in_stages(*frozen: str) -> int:
        plan = {"method": "zero3", "pp": 2, "dp_shard": 2, "micro_batches": 2}
        sizes = {"global_batch_size": 8, "sequence_length": 32}
        asked = scenario_of(star(4), plan, model=GPT, frozen=frozen, **sizes)
        found = simulate(loaded_of(asked)).result.collectives
        return sum(entry.count for entry in found if entry.kind == "reduce-scatter")

    assert [reduced_in_stages(*frozen) for frozen in (["blocks.1"], ["tokens"], ["tokens", "blocks.1"])] == [5, 5, 4]
    with pytest.raises(UserError, match=r"gathers 'blocks\.0' for a backward that it does not have"):
        reduced_in_stages("tokens", "blocks.0")

    tokens, above, lowest = counted("tokens"), counted("blocks.1"), counted("tokens", "blocks.[0-2]")
    assert (tokens["all-gather"], tokens["reduce-scatter"]) == (9, 5)  # four blocks twice, and all else as one unit
    assert (above["all-gather"], above["reduce-scatter"]) == (9, 4)
    assert (lowest["all-gather"], lowest["reduce-scatter"]) == (5 + 1 + 1, 2)
