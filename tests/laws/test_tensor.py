"""Laws and closed forms: blocks cut among ranks, evenly or not; published forms of memory and communication."""

import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from point_checks import assert_same_as_unfolded
from strategies import MODEL_TOML, device_type, loaded_of, machine_of, scenario_of, star

from gssim.cluster import Curve, LayerProfile
from gssim.cluster.measured import Profile
from gssim.cost import layer_time_s
from gssim.errors import UserError
from gssim.plan import Plan, resolve
from gssim.program import lower
from gssim.result import Result
from gssim.scenario import Scenario, load_model, units_of_ranks
from gssim.scenario.tensor_slices import model_slice, native_tensors
from gssim.simulation import simulate
from gssim.units import validated
from gssim.workload import Layer, Model, Parameter, Polynomial, Reduction

# The tiny model's blocks in four units: weights are cut in their rows, the bias is whole; two sums over ranks in the
# forward, one in the backward, whose positions are those of buffers that are whole on every rank.
SLICED = {
    "parameters": ["{}.weight 1ux4 b0 b1", "{}.bias 4 b0 b1"],
    "forward_flop": "250000*b*s*u",
    "backward_flop": "500000*b*s*u",
    "forward_bytes": "200*b*s + 200*b*s*u",
    "backward_bytes": "400*b*s + 400*b*s*u",
    "saved_bytes": "4*b*s + 3*b*s*u",
    "buffers": [
        "f0 f2 temporaries 2*b*s*u",
        "f1 f3 temporaries 16*b*s",
        "f2 b2 activations 4*b*s*u",
        "f3 b2@+1 activations 16*b*s",
        "b0 b3@-1 temporaries 16*b*s",
    ],
    "units": 4,
    "reductions": ["f1 16*b*s", "f3 16*b*s", "b2 16*b*s"],
}
COST = {
    name: {"sizes": [1.0], "values": [value]}
    for name, value in (("forward_pair_s", 1.0), ("backward_pair_s", 2.0), ("sum_s", 10.0))
}
"""Costs of DTensor, in seconds."""
MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"


def sliced_model() -> Model:
    """Return the hand-made model with its blocks' slices."""
    data = tomllib.loads(MODEL_TOML)
    sliced = [layer | (SLICED if layer.get("block") else {}) for layer in data["layers"]]
    # what a layer leaves to the one before it is freed one position after the sum over ranks
    return validated(Model, data | {"sliced_layers": sliced}, file="sliced.toml")


def sliced_scenario(plan: dict, ranks: int = 2, **workload) -> Scenario:
    return scenario_of(star(ranks), plan, model=sliced_model(), **workload)


def tasks_of(scenario: Scenario, rank: int = 0) -> list:
    program = lower(scenario)
    return list(program.tasks[program.role_of[rank]])


# Words ---------------------------------------------------------------------------------------------------------------

TERMS = st.lists(st.tuples(st.integers(-99, 99), st.integers(0, 2), st.integers(0, 2)), max_size=3).map(tuple)


@given(whole=TERMS, by_unit=TERMS, units=st.integers(0, 9), b=st.integers(1, 9), s=st.integers(1, 9))
def test_a_polynomial_in_units_survives_its_text_and_counts_once_for_each(whole, by_unit, units, b, s):
    polynomial = Polynomial(whole, by_unit)
    again = Polynomial.parse(str(polynomial)) if whole or by_unit else polynomial
    value = Polynomial(whole).at(b=b, s=s) + units * Polynomial(by_unit).at(b=b, s=s)
    assert again.held(units).at(b=b, s=s) == polynomial.held(units).at(b=b, s=s) == value


@pytest.mark.parametrize(
    "text", ["{}.weight 8ux3 b1 b2", "{}.weight 3x8u b1 b2", "{}.bias 8u b0 end", "a scalar b0 b1"]
)
def test_a_cut_parameter_survives_its_text(text):
    assert str(Parameter.parse(text)) == text


@pytest.mark.parametrize(
    ("word", "text", "message"),
    [
        (Parameter, "{}.weight 8ux3u b1 b2", "one dimension at most"),
        (Parameter, "{}.weight u8x3 b1 b2", "NAME SHAPE BORN READY"),
        (Polynomial, "3*u^2", "polynomial"),
        (Polynomial, "3*u*u", "u up to 1"),
        (Reduction, "f1", "MOMENT BYTES"),
        (Reduction, "x1 3*b", "not a moment"),
    ],
)
def test_what_is_no_word_is_refused(word, text, message):
    with pytest.raises(ValueError, match=message):
        word.parse(text)


@given(units=st.integers(2, 64), weights=st.lists(st.floats(0.1, 1), min_size=2, max_size=8))
def test_ranks_hold_whole_units_and_together_all(units, weights):
    parts = [weight / sum(weights) for weight in weights]
    held = units_of_ranks(units, parts)
    assert sum(held) == units
    assert all(abs(n - units * part) < 1 for n, part in zip(held, parts, strict=True))


# What ranks hold -----------------------------------------------------------------------------------------------------

TRACED = sorted(path.stem for path in MODELS.glob("*.toml") if "[[sliced_layers]]" in path.read_text())
SMALL_TRANSFORMERS = ["gpt-byte-1m", "bert-byte-1m"]


@pytest.mark.parametrize("name", TRACED)
def test_ranks_together_hold_every_cut_parameter_once(name):
    model = load_model(MODELS / f"{name}.toml")
    parts = (0.6, 0.4)
    held = [model_slice(model, parts, position) for position in range(2)]
    for whole, sliced in zip(unrolled_layers(model), zip(*map(unrolled_layers, held), strict=True), strict=True):
        for number, parameter in enumerate(whole.parameters):
            own = [layer.parameters[number] for layer in sliced]
            assert {each.name for each in own} == {parameter.name}
            total = sum(each.elements for each in own)
            assert total in (parameter.elements, 2 * parameter.elements), "cut in one dimension, or whole on both"


def unrolled_layers(model: Model) -> list[Layer]:
    return [layer for layer in model.layers for _ in range(layer.repeats)]


@pytest.mark.parametrize("name", TRACED)
def test_a_rank_with_all_units_computes_what_one_device_does(name):
    """FLOP exactly; a rank on its own would sum with nobody."""
    model = load_model(MODELS / f"{name}.toml")
    for whole, sliced in zip(unrolled_layers(model), unrolled_layers(model_slice(model, (1.0,), 0)), strict=True):
        for phase in ("forward_flop", "backward_flop", "saved_bytes", "output_bytes"):
            shape = {"b": 2, "s": 64}
            assert getattr(sliced, phase).at(**shape) == getattr(whole, phase).at(**shape), (whole.name, phase)
        assert [p.shape for p in sliced.parameters] == [p.shape for p in whole.parameters]


@pytest.mark.parametrize(("name", "heads"), [("gpt-byte-1m", 4), ("bert-byte-1m", 4)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_block_saves_what_korthikanti_and_others_count(name, heads, ranks):
    """Korthikanti et al. 2022 (arXiv 2205.05198), section 4: s*b*h*(10 + 24/t + 5as/(ht)) bytes at 2 bytes a value.

    Without dropout its 10 is 8: the inputs of both norms and of both pairs of linear maps, whole on every rank. The
    24/t are query, key, value and the attention's output (8), and both sides of the activation (16). Flash attention
    keeps the logarithm of a sum for each row in place of 5as/(ht). Each norm keeps two statistics of each token.
    """
    model = load_model(MODELS / f"{name}.toml")
    width = next(
        p.shape[0] for layer in model.layers for p in layer.parameters if p.name.endswith("attention.out.bias")
    )
    value, b, s = 4, 3, 64
    for layer in model_slice(model, (1 / ranks,) * ranks, 0).layers:
        if not layer.block:
            continue
        whole_bytes = 4 * value * width + 4 * value
        cut_bytes = 12 * value * width + value * heads
        assert layer.saved_bytes.at(b=b, s=s) == b * s * (whole_bytes + cut_bytes / ranks)


@pytest.mark.parametrize("name", SMALL_TRANSFORMERS)
def test_a_transformers_block_sums_its_activations_four_times_a_step(name):
    """Megatron-LM (Shoeybi et al. 2019), section 3: two all-reduces of b*s*h in the forward, two in the backward."""
    for layer in load_model(MODELS / f"{name}.toml").sliced_layers:
        if layer.block:
            assert [each.moment.phase for each in layer.reductions] == ["f", "f", "b", "b"]
            assert {each.size_bytes for each in layer.reductions} == {layer.output_bytes}


# What ranks do -------------------------------------------------------------------------------------------------------


def test_a_block_is_done_in_parts_between_its_sums():
    labels = [task.label for task in tasks_of(sliced_scenario({"method": "tensor"}))]
    assert labels == [
        "forward embedding",
        "forward h.0",
        "all-reduce forward h.0",
        "forward h.0 part 1",
        "all-reduce forward h.0 part 1",
        "forward h.1",
        "all-reduce forward h.1",
        "forward h.1 part 1",
        "all-reduce forward h.1 part 1",
        "forward head",
        "forward loss",
        "backward loss",
        "backward head",
        "backward h.1",
        "all-reduce backward h.1",
        "backward h.1 part 1",
        "backward h.0",
        "all-reduce backward h.0",
        "backward h.0 part 1",
        "backward embedding",
        "backward end",
        "optimizer",
    ]


def test_all_ranks_meet_in_the_same_sums_of_the_same_size():
    result = simulate(loaded_of(sliced_scenario({"method": "gs_tp", "shares": {"shards": (0.75, 0.25)}}))).result
    assert [entry.key for entry in result.collectives] == [("all-reduce", (0, 1), 16 * 8 * 4, 6)]
    assert {entry.batch_share for entry in result.ranks} == {1.0}, "every rank takes all samples"
    assert [entry.shard_share for entry in sorted(result.ranks, key=lambda e: e.ranks)] == [0.75, 0.25]


def test_ranks_whose_shares_come_to_equally_many_units_are_told_with_their_own_shares():
    result = simulate(loaded_of(sliced_scenario({"method": "gs_tp", "shares": {"shards": (0.55, 0.45)}}))).result
    assert {entry.ranks: entry.shard_share for entry in result.ranks} == {(0,): 0.55, (1,): 0.45}


@given(units=st.integers(1, 3))
def test_the_parts_of_a_block_take_the_time_of_its_slice(units):
    scenario = sliced_scenario({"method": "gs_tp", "shares": {"shards": (units / 4, 1 - units / 4)}})
    for rank, held in ((0, units), (1, 4 - units)):
        parts = [task.duration_s for task in tasks_of(scenario, rank) if task.label.startswith("forward h.0")]
        assert sum(parts) == pytest.approx(held / 4 * 32e6 / 1e9)  # 1 MFLOP for each of 32 tokens at 1 GFLOP/s


def test_a_smaller_share_needs_less_memory_and_an_even_one_is_that_of_tensor():
    def peaks(plan: dict) -> dict[int, float]:
        classes = simulate(loaded_of(sliced_scenario(plan))).result.ranks
        return {rank: entry.peak_allocated_bytes for entry in classes for rank in entry.ranks}

    uneven = peaks({"method": "gs_tp", "shares": {"shards": (0.75, 0.25)}})
    even = peaks({"method": "gs_tp"})
    assert even == peaks({"method": "tensor"})
    assert uneven[1] < even[1] == even[0] < uneven[0]


def test_shares_by_compute_follow_the_devices():
    slow = device_type(peak_flop_per_s={"fp32": 1e9 / 3}, memory_bandwidth_bytes_per_s=1e9 / 3)
    types = {"fast": device_type(), "slow": slow}
    cluster = star(2, types=types, type_names=["fast", "slow"])
    scenario = scenario_of(cluster, {"method": "gs_tp", "shares": {"shards": "compute"}}, model=sliced_model())
    assert scenario.slice_shares == pytest.approx((0.75, 0.25))
    layers = [model_slice(sliced_model(), scenario.slice_shares, position).layers[1] for position in range(2)]
    assert [layer.parameters[0].shape for layer in layers] == [(3, 4), (1, 4)]


def test_checkpointing_sums_again_as_far_as_it_runs_again():
    """The second forward stops where the last buffer is saved (f2): the sum at f1 is repeated, that at f3 is not."""
    labels = [task.label for task in tasks_of(sliced_scenario({"method": "tensor", "recompute": "full"}))]
    assert [label for label in labels if "recompute h.1" in label] == [
        "recompute h.1",
        "all-reduce recompute h.1",
        "recompute h.1 part 1",
    ]


def test_a_profile_of_a_whole_block_is_shared_out_as_the_roofline_is():
    curve = Curve(sizes=(1.0, 8.0), values=(10.0, 80.0))
    profiled = LayerProfile(forward_s=curve, backward_s=curve)
    profile = Profile(model="tiny", precision="fp32", sequence_length=4, layers={"h": profiled})
    cluster = star(2, types={"fast": device_type(profiles=[profile])})
    scenario = scenario_of(cluster, {"method": "tensor"}, model=sliced_model())
    device, whole = cluster.type_of(0), sliced_model().layers[1]
    own = model_slice(sliced_model(), (0.5, 0.5), 0).layers[1]
    assert layer_time_s(device, scenario.workload, own, phase="f", batch_size=8, whole=whole) == pytest.approx(40.0)
    assert layer_time_s(device, scenario.workload, whole, phase="f", batch_size=8, whole=whole) == 80.0


def test_micro_batches_sum_each_for_itself():
    labels = [task.label for task in tasks_of(sliced_scenario({"method": "tensor", "micro_batches": 2}))]
    assert "all-reduce forward h.0 micro-batch 0" in labels
    result = simulate(loaded_of(sliced_scenario({"method": "tensor", "micro_batches": 2}))).result
    assert [entry.key for entry in result.collectives] == [("all-reduce", (0, 1), 16 * 4 * 4, 12)]


def test_a_question_is_the_same_whether_its_model_was_traced_with_slices():
    plan = {"method": "ddp"}
    assert sliced_scenario(plan).scenario_id == scenario_of(star(2), plan).scenario_id


def test_how_blocks_are_cut_is_told_by_the_method():
    assert resolve(Plan(method="tensor"), devices=4).slices == "even"
    assert resolve(Plan(method="gs_tp"), devices=4).slices == "shares"
    assert resolve(Plan(method="gs_tp"), devices=4).tp == 4


# What the host adds where blocks are cut ------------------------------------------------------------------------------


def native_scenario(plan: dict, ranks: int = 2, *, linear: bool | None = True, **device: Any) -> Scenario:
    """Return a scenario whose blocks are of linear maps (or not), where the host's time for them is known.

    A pair of maps takes 1 s in the forward, 2 s in the backward, a sum over ranks 10 s.
    """
    types = {"fast": device_type(**{"cut_block": COST} | device)}
    model = sliced_model()
    sliced = tuple(replace(layer, linear=linear) if layer.reductions else layer for layer in model.sliced_layers)
    return scenario_of(star(ranks, types=types), plan, model=replace(model, sliced_layers=sliced))


def seconds_of(scenario: Scenario, start: str) -> float:
    return sum(task.duration_s for task in tasks_of(scenario) if task.label.startswith(start))


@pytest.mark.parametrize(("start", "added_s"), [("forward h.0", 2.0), ("backward h.0", 4.0), ("forward head", 0.0)])
def test_dtensor_takes_its_time_for_each_pair_of_cut_maps(start, added_s):
    found, without = (seconds_of(native_scenario({"method": "tensor"}, cut_block=c), start) for c in (COST, None))
    assert found - without == pytest.approx(added_s)


def test_the_host_takes_its_time_before_each_sum_while_the_rank_waits():
    tasks = tasks_of(native_scenario({"method": "tensor"}))
    found = [(before, after) for before, after in pairwise(tasks) if before.label.startswith("issue")]
    assert [after.label for _, after in found] == [task.label for task in tasks if task.communication]
    assert {(before.duration_s, before.phase) for before, _ in found} == {(10.0, "exposed_communication")}
    again = tasks_of(native_scenario({"method": "tensor", "recompute": "full"}))
    assert sum(task.label.startswith("issue all-reduce recompute") for task in again) == 2


def test_a_gpus_kernels_hide_what_dtensor_takes_on_the_host():
    plan = {"method": "tensor"}
    slow = native_scenario(plan, kind="cuda")
    assert seconds_of(slow, "forward h.0") == pytest.approx(2 * 1.0 + 2 * 10.0)
    busy = native_scenario(plan, kind="cuda", peak_flop_per_s={"fp32": 1e3})
    assert seconds_of(busy, "forward h.0") == pytest.approx(2 * 250000 * 32 / 1e3)
    assert not [task for task in tasks_of(slow) if task.label.startswith("issue")]


@pytest.mark.parametrize(
    ("plan", "linear"),
    [
        ({"method": "gs_tp"}, True),
        ({"method": "tensor"}, False),
        ({"method": "ddp", "dp_replicate": 2, "tp": 2}, True),
        ({"method": "gs", "dp_shard": 2, "tp": 2}, True),
    ],
)
def test_slices_of_our_own_take_the_host_time_of_sums_alone(plan, linear):
    ranks = 4 if "tp" in plan else 2
    with_cost, without = (tasks_of(native_scenario(plan, ranks, linear=linear, cut_block=c)) for c in (COST, None))
    assert [task for task in with_cost if not task.label.startswith("issue")] == without
    assert len(with_cost) - len(without) == 2 * 3


def test_shards_of_cut_blocks_are_dtensors_too():
    plan = {"method": "zero3", "dp_shard": 2, "tp": 2}
    assert seconds_of(native_scenario(plan, 4), "issue") == 2 * 3 * 10.0


def test_what_is_not_known_of_dtensor_counts_as_nothing_and_the_result_says_so():
    def said(**settings: Any) -> Any:
        return simulate(loaded_of(native_scenario({"method": "tensor"}, **settings))).result.provenance.get("uncounted")

    assert said() is None
    assert said(cut_block=None) == ["host time in cut blocks: device_types.fast.cut_block is not measured"]
    (why,) = said(linear=None)
    assert "the model file does not tell" in why
    unknown, none = (
        seconds_of(native_scenario({"method": "tensor"}, linear=linear), "forward") for linear in (None, False)
    )
    assert unknown == none


def test_an_optimizer_takes_longer_for_each_dtensor():
    """The maps' biases, which every rank has whole, are DTensors as well; other layers' parameters are not."""
    optimizer = {"adamw": {"tensor_s": 0.0, "sharded_tensor_s": 5.0, "elements_s": {"sizes": [1.0], "values": [0.0]}}}
    found = [
        seconds_of(native_scenario({"method": "tensor"}, linear=linear, optimizers=optimizer), "optimizer")
        for linear in (True, False)
    ]
    assert native_tensors(native_scenario({"method": "tensor"}).workload.model) == 2 * 2
    assert found == [2 * 2 * 5.0, 0.0]


# Beside replicas and shards -------------------------------------------------------------------------------------------


def collectives_of(scenario: Scenario) -> set[tuple]:
    return {entry.key for entry in simulate(loaded_of(scenario)).result.collectives}


def test_tensor_groups_sum_for_themselves_and_parts_of_the_model_with_their_replicas():
    scenario = sliced_scenario({"method": "ddp", "dp_replicate": 2, "tp": 2, "shares": {"batch": (0.75, 0.25)}}, 4)
    local_bytes = 4 * (64 + 2 * (8 + 4) + 64)  # half of each block's weight, all of the rest
    assert collectives_of(scenario) == {
        ("all-reduce", (0, 1), 16 * 6 * 4, 6),
        ("all-reduce", (2, 3), 16 * 2 * 4, 6),
        ("all-reduce", (0, 2), local_bytes, 1),
        ("all-reduce", (1, 3), local_bytes, 1),
    }
    assert scenario.batch_sizes == (6, 6, 2, 2)


def test_parts_of_unequal_size_may_cut_their_backward_where_they_like():
    plan = {"method": "gs_tp", "gradients": "all-reduce", "dp_replicate": 2, "tp": 2, "bucket_bytes": 60}
    scenario = sliced_scenario(plan | {"shares": {"shards": (0.75, 0.25)}}, 4)
    counts = {group: sum(n for kind, g, _, n in collectives_of(scenario) if g == group) for group in ((0, 1), (0, 2))}
    assert counts[0, 1] == 6
    parts = [{task.label for task in tasks_of(scenario, rank) if "part" in task.label} for rank in (0, 1)]
    assert parts[0] != parts[1]


@pytest.mark.parametrize("batch", [(0.25,) * 4, (0.5, 0.25, 0.125, 0.125)], ids=["even", "uneven"])
@pytest.mark.parametrize("method", ["ddp", "zero3", "gs"])
def test_replicas_that_are_alike_are_simulated_once_with_the_same_result(method, batch):
    axis = "dp_replicate" if method == "ddp" else "dp_shard"
    scenario = sliced_scenario({"method": method, axis: 4, "tp": 2, "shares": {"batch": batch}}, 8)
    loaded = loaded_of(scenario)
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)
    if method == "ddp" and len(set(batch)) == 1:
        assert len(machine_of(scenario)[0].classes) == 1, "slices are alike too"


def test_shards_of_gs_are_among_the_ranks_that_hold_the_same_part():
    plan = {"method": "gs", "dp_shard": 2, "tp": 2, "shares": {"shards": (0.75, 0.25)}}
    assert sliced_scenario(plan, 4).shard_shares == (0.75, 0.75, 0.25, 0.25)
    cut = {"method": "gs_tp", "gradients": "all-reduce", "dp_replicate": 2, "tp": 2, "shares": {"shards": (0.75, 0.25)}}
    assert sliced_scenario(cut, 4).slice_shares == (0.75, 0.25)
    assert sliced_scenario(cut, 4).shard_shares == (0.5,) * 4


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "ranks", "message"),
    [
        ({"method": "tensor"}, 3, "plan.tp = 3: does not divide the 4 units of h "),
        ({"method": "tensor"}, 5, "plan.tp = 5: h has only 4 units"),
        ({"method": "gs_tp"}, 5, "plan.tp = 5: h has only 4 units"),
        ({"method": "gs_tp", "shares": {"shards": (0.95, 0.05)}}, 2, "leaves a rank none of the 4 units"),
        ({"method": "gs_tp", "shares": {"shards": (0.5, 0.25, 0.25)}}, 2, "3 shares for 2 ranks"),
        ({"method": "tensor", "shares": {"shards": (0.75, 0.25)}}, 2, "cannot shard unevenly"),
        ({"method": "gs_tp", "shares": {"batch": (0.5, 0.5)}}, 2, "2 shares for 1 ranks"),
        ({"method": "tensor", "tp": 2, "dp_replicate": 2}, 4, "the mesh axes make 2 replicas"),
    ],
)
def test_blocks_that_cannot_be_cut_so_are_refused(plan, ranks, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        sliced_scenario(plan, ranks)


def test_a_model_that_was_traced_without_slices_is_refused():
    with pytest.raises(UserError, match="trace it again with `gsreal trace`"):
        scenario_of(star(2), {"method": "tensor"})


def test_uneven_shares_of_three_ranks_run():
    scenario = sliced_scenario({"method": "gs_tp", "shares": {"shards": (0.5, 0.25, 0.25)}}, 3)
    assert simulate(loaded_of(scenario)).result.step_time_s > 0
    assert replace(scenario, plan=Plan(method="single")).policies.ranks == 1


def test_shares_of_what_is_pushed_are_of_those_that_hold_the_same_slice():
    types = {"fast": device_type(), "slow": device_type(peak_flop_per_s={"fp32": 5e8})}
    cluster = star(4, types=types, type_names=["fast", "fast", "slow", "slow"])
    for rule in ("compute", (0.75, 0.25)):
        plan = {"method": "gs", "dp_shard": 2, "tp": 2, "shares": {"shards": rule}}
        first, second, third, fourth = scenario_of(cluster, plan, model=sliced_model()).shard_shares
        assert (first, third) == (second, fourth)
        assert first + third == pytest.approx(1.0)
        assert first > third


def test_slices_by_shares_run_in_a_pipeline_as_even_ones_do():
    model = load_model(MODELS / "gpt-byte-1m.toml")

    def found(method: str, **shares: Any) -> Result:
        plan = {"method": method, "tp": 2, "pp": 2, "micro_batches": 4, "shares": shares}
        return simulate(loaded_of(scenario_of(star(4), plan, model=model, sequence_length=16))).result

    even, slices, uneven = found("tensor"), found("gs_tp"), found("gs_tp", shards=(0.75, 0.25))
    assert slices.collectives == even.collectives == uneven.collectives
    assert [entry.peak_allocated_bytes for entry in slices.ranks] == [e.peak_allocated_bytes for e in even.ranks]
    peaks = {rank: entry.peak_allocated_bytes for entry in uneven.ranks for rank in entry.ranks}
    assert all(peaks[first] > 1.5 * peaks[first + 1] for first in (0, 2))  # of each stage
    assert uneven.step_time_s > slices.step_time_s
