"""Pipelines as predicted: the bubble's closed form, what is held, who gets which layers, and what is sent."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from point_checks import assert_same_as_unfolded
from strategies import clusters, device_type, loaded_of, machine_of, scenario_of, star

from gssim.cluster.cluster import BackendCost
from gssim.errors import UserError
from gssim.memory import LAST, split_backward_buffers
from gssim.program import lower
from gssim.program.stage_boundary import stage_timeline, stages_of
from gssim.result import CATEGORIES, Result
from gssim.scenario import Scenario, load_model
from gssim.scenario.ownership import activation_bytes, owners_of_stages
from gssim.simulation import simulate
from gssim.units import validated
from gssim.workload import Model, Polynomial, SplitBackward, unrolled

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
GPT, BERT, RESNET = (load_model(MODELS / f"{name}.toml") for name in ("gpt-byte-1m", "bert-byte-1m", "resnet-digits"))
MODELS_OF_TESTS = MODELS.parents[1] / "tests" / "helpers" / "models" / "of_tests"
AUTOCAST = load_model(MODELS_OF_TESTS / "divided-autocast-bert.toml")
FORWARD_S, BACKWARD_S = 0.001, 0.002
"""Times of one layer of the chain, for a micro-batch of one sample of one token, on a device of 1 GFLOP/s."""


def chain(layers: int) -> Model:
    """Return a model of equal layers without parameters; its loss costs nothing."""
    nothing = {"forward_operations": 0, "backward_operations": 0, "forward_bytes": 0, "backward_bytes": 0}
    layer = {
        "name": "h",
        "modules": [f"h.{i}" for i in range(layers)],
        "block": True,
        "forward_flop": "1000000*b*s",
        "backward_flop": "2000000*b*s",
        "saved_bytes": "8*b*s",
        "output_bytes": "16*b*s",
        "buffers": ["f0 b0 activations 8*b*s", "f0 b1@+1 activations 16*b*s", "b0 b1@-1 temporaries 16*b*s"],
    }
    loss = {"name": "loss", "modules": [], "forward_flop": 0, "backward_flop": 0, "saved_bytes": 0, "output_bytes": 4}
    data = {
        "name": "chain",
        "source": "made by hand for the tests",
        "traced_batch_sizes": [1],
        "module": {"factory": "nowhere.chain"},
        "input": {"kind": "tokens", "vocabulary": 16, "maximum_sequence_length": 4},
        "layers": [layer | nothing, loss | nothing],
    }
    return validated(Model, data, file="chain")


def split_chain(layers: int, input_s: float, weight_s: float) -> Model:
    """Return a model of equal layers whose backward can be split in parts that take so long."""
    model = chain(layers)
    flop = {"input": round(input_s * 1e9), "weight": round(weight_s * 1e9)}
    nothing = {f"{part}_{what}": 0 for part in flop for what in ("bytes", "streamed_bytes", "operations")}
    split = {f"{part}_flop": f"{each}*b*s" for part, each in flop.items()} | nothing
    made = validated(SplitBackward, split, file="split")
    block, loss = model.layers
    whole = Polynomial.parse(f"{sum(flop.values())}*b*s")
    of_loss = validated(SplitBackward, dict.fromkeys(split, 0), file="split")
    layers_of = (replace(block, backward_flop=whole, split=made), replace(loss, split=of_loss))
    return replace(model, layers=layers_of)


def pipelined(ranks: int, micro_batches: int, *, model: Model, samples: int = 1, **plan: Any) -> Scenario:
    """Return a pipeline over links that cost next to nothing."""
    return scenario_of(
        star(ranks, bandwidth=1e18),
        {"method": "pipeline", "micro_batches": micro_batches} | plan,
        model=model,
        global_batch_size=micro_batches * samples,
        sequence_length=None if model is RESNET else 24 if model is AUTOCAST else 1,  # which it was traced at
        autocast="bf16" if model is AUTOCAST else None,
        optimizer="sgd",
    )


def predicted(scenario: Scenario) -> Result:
    return simulate(loaded_of(scenario)).result


# The bubble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "deepspeed"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 7), (3, 4), (4, 4), (4, 16), (8, 9)])
def test_a_step_of_equal_stages_takes_as_many_turns_as_micro_batches_and_other_stages(schedule, ranks, micro_batches):
    """Huang et al. 2019 (GPipe), Narayanan et al. 2021, section 2.2: (m + p - 1)(tf + tb); bubble (p-1)/(m+p-1)."""
    result = predicted(pipelined(ranks, micro_batches, model=chain(ranks), schedule=schedule))
    turn_s = FORWARD_S + BACKWARD_S
    assert result.step_time_s == pytest.approx((micro_batches + ranks - 1) * turn_s, rel=1e-9)
    busy_s = result.phases_s["forward"] + result.phases_s["backward"]
    assert 1 - busy_s / result.step_time_s == pytest.approx((ranks - 1) / (micro_batches + ranks - 1), rel=1e-9)


@pytest.mark.parametrize(("ranks", "local", "micro_batches"), [(2, 2, 4), (2, 3, 8), (4, 2, 8), (4, 4, 4), (3, 2, 9)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(ranks, local, micro_batches):
    """Narayanan et al. 2021, section 2.2: bubble over ideal time (p-1)/(v m), so (p-1)/(v m + p - 1) of the step."""
    stages = ranks * local
    scenario = pipelined(ranks, micro_batches, model=chain(stages), schedule="interleaved", stages=[1] * stages)
    result = predicted(scenario)
    turn_s = FORWARD_S + BACKWARD_S
    assert result.step_time_s == pytest.approx((local * micro_batches + ranks - 1) * turn_s, rel=1e-9)
    busy_s = result.phases_s["forward"] + result.phases_s["backward"]
    bubble_ratio = (ranks - 1) / (local * micro_batches + ranks - 1)
    assert 1 - busy_s / result.step_time_s == pytest.approx(bubble_ratio, rel=1e-9)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize(("input_s", "weight_s"), [(0.001, 0.001), (0.002, 0.001), (0.002, 0.0005)])
def test_a_split_backward_shortens_the_bubble_by_two_weight_parts_for_each_other_rank(
    ranks, micro_batches, input_s, weight_s
):
    """Qi et al. 2023, "Zero Bubble Pipeline Parallelism", table 2: ZB-H1 waits (p - 1)(tf + tb - tw), 1F1B
    (p - 1)(tf + tb + tw), where tb is the input's part alone, and tw is at most tf. It computes for m (tf + tb + tw).
    """
    split, whole = (
        predicted(pipelined(ranks, micro_batches, model=split_chain(ranks, input_s, weight_s), **plan))
        for plan in ({"schedule": "interleaved_zero_bubble", "stages": [1] * ranks}, {"schedule": "1f1b"})
    )
    turn_s = FORWARD_S + input_s + weight_s
    bubble_s = (ranks - 1) * (FORWARD_S + input_s - weight_s)
    assert whole.step_time_s == pytest.approx((micro_batches + ranks - 1) * turn_s, rel=1e-9)
    assert split.step_time_s == pytest.approx(micro_batches * turn_s + bubble_s, rel=1e-9)


def test_what_is_no_compute_is_waiting():
    result = predicted(pipelined(4, 8, model=chain(4)))
    assert result.phases_s["exposed_communication"] == pytest.approx(3 * (FORWARD_S + BACKWARD_S), rel=1e-9)
    assert result.phases_s["idle"] == pytest.approx(0, abs=1e-12)


def test_a_slow_link_makes_the_step_longer_by_what_it_cannot_hide():
    """Two stages, one micro-batch: forward, activation, forward, backward, gradient, backward."""
    made = scenario_of(
        star(2, bandwidth=1e4, latency_s=1e-4),
        {"method": "pipeline"},
        model=chain(2),
        global_batch_size=1,
        sequence_length=1,
        optimizer="sgd",
    )
    message_s = 2 * 1e-4 + 16 / 1e4
    assert predicted(made).step_time_s == pytest.approx(2 * (FORWARD_S + BACKWARD_S) + 2 * message_s, rel=1e-9)


@pytest.mark.parametrize("unpacking_s", [0.0, 3e-4])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_messages_of_deepspeeds_schedule_go_one_at_a_time_and_are_unpacked(micro_batches, unpacking_s):
    """Two stages, m micro-batches: in each turn, one message there and one back, of which neither is hidden."""
    cluster = star(2, bandwidth=1e4, latency_s=0.0)  # so that gloo's notices take no time
    if unpacking_s:
        cost = BackendCost(unpacking_s=unpacking_s - 16 * 1e-5, unpacking_byte_s=1e-5, source="made by hand")
        cluster = replace(cluster, backend_cost=cost)
    made = scenario_of(
        cluster,
        {"method": "pipeline", "schedule": "deepspeed", "micro_batches": micro_batches},
        model=chain(2),
        global_batch_size=micro_batches,
        sequence_length=1,
        optimizer="sgd",
    )
    turn_s, message_s = FORWARD_S + BACKWARD_S + unpacking_s, 16 / 1e4
    expected_s = (micro_batches + 1) * turn_s + 2 * micro_batches * message_s
    assert predicted(made).step_time_s == pytest.approx(expected_s, rel=1e-9)


@settings(deadline=None, max_examples=examples(40))
@given(st.data())
def test_every_pipeline_ends_and_computes_everything_once(data):
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b", "deepspeed", "interleaved", "interleaved_zero_bubble"]))
    ranks = data.draw(st.integers(2, 4))
    local = data.draw(st.integers(1, 3)) if schedule.startswith("interleaved") else 1
    micro_batches = ranks * data.draw(st.integers(1, 3))
    counts = data.draw(st.lists(st.integers(1, 3), min_size=ranks * local, max_size=ranks * local))
    model = split_chain(sum(counts), BACKWARD_S / 2, BACKWARD_S / 2)
    made = pipelined(ranks, micro_batches, model=model, schedule=schedule, stages=counts)
    result = predicted(made)
    busy_s = result.phases_s["forward"] + result.phases_s["backward"]
    assert ranks * busy_s == pytest.approx(sum(counts) * micro_batches * (FORWARD_S + BACKWARD_S), rel=1e-9)
    messages = {(entry.kind, entry.bytes) for entry in result.collectives}
    assert messages == {("send", 16)}
    assert sum(entry.count for entry in result.collectives) == 2 * (ranks * local - 1) * micro_batches


@settings(deadline=None, max_examples=examples(40))
@given(st.data())
def test_the_second_step_on_unequal_devices_and_slow_links_is_like_every_later_one(data):
    """Ranks begin a step when they have done the one before, so that steps overlap between ranks."""
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b", "deepspeed", "interleaved"]))
    ranks = data.draw(st.integers(2, 4))
    plan = {"method": "pipeline", "micro_batches": 4, "schedule": schedule}
    plan |= {"stages": [1] * 4} if schedule == "interleaved" else {}
    ranks = 2 if schedule == "interleaved" else ranks
    scenario = scenario_of(data.draw(clusters(devices=ranks)), plan, optimizer="adamw")
    machine, _ = machine_of(scenario, steps=5)
    latest = [max(ends) for ends in zip(*machine.ends_s, strict=True)]
    lengths = [end - start for start, end in pairwise(latest)]
    assert lengths == pytest.approx([lengths[0]] * len(lengths), rel=1e-9)


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        pytest.param(schedule, model, marks=[] if place == number else pytest.mark.slow)
        for place, schedule in enumerate(("gpipe", "1f1b", "interleaved"))
        for number, model in enumerate((GPT, BERT, RESNET))
    ]
    + [("deepspeed", AUTOCAST)],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_all_that_a_step_takes_it_gives_back(model, schedule, recompute):
    scenario = pipelined(2, 4, model=model, schedule=schedule, recompute=recompute, samples=3)
    machine, program = machine_of(scenario, steps=2)
    for memory, held in zip(machine.memory, program.persistent, strict=True):
        assert set(memory.peak) <= set(CATEGORIES)
        left = {category: size for category, size in memory.current.items() if size}
        assert left == {category: size for category, size in held.items() if size}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("model", [GPT, BERT, RESNET], ids=lambda model: model.name)
def test_split_backwards_give_back_all_that_they_take(model, samples):
    scenario = pipelined(2, 4, model=model, schedule="interleaved_zero_bubble", samples=samples)
    machine, program = machine_of(scenario, steps=2)
    for memory, held in zip(machine.memory, program.persistent, strict=True):
        left = {category: size for category, size in memory.current.items() if size}
        assert left == {category: size for category, size in held.items() if size}


def test_what_only_gradients_of_inputs_need_is_freed_with_the_first_part_at_the_end_of_a_stage():
    """Torch detaches a stage's output then: what follows a mixture's last product was predicted to be kept."""
    block, *rest = unrolled(load_model(MODELS_OF_TESTS / "tiny-mixture.toml"))[3:]
    shape = {"batch_size": 2, "sequence_length": 24, "scale": 1.0, "lives": split_backward_buffers}
    timelines = [stage_timeline(stage, **shape) for stage in stages_of([[block], [block], [block, *rest]])[1:]]
    freed = [[-each.size_bytes / 2 for each in kept.at(0, "i") if each.position == LAST] for kept in timelines]
    assert freed[0] == [1152, 192, 384, 96, 192, 384, 9216]  # outputs of experts, weights and places of their rows
    assert not set(freed[0]) & set(freed[1])  # the loss's alone


@pytest.mark.parametrize("loss_parallel", [False, True])
def test_a_stage_keeps_as_much_of_one_sample_as_of_each_of_several(loss_parallel):
    """Of one sample, parts of sequences are joined without a copy, so that a trace shows the logits at another moment.
    The last stage was predicted to free them, and a whole copy of them where ranks divide the vocabulary.
    """
    model = load_model(MODELS_OF_TESTS / "sliced-adapters-llama.toml")
    workload = {"model": model, "adapters": {"rank": 1, "targets": "query-value"}, "optimizer": "sgd"}
    plan = {"method": "pipeline", "pp": 2, "tp": 2, "schedule": "gpipe", "stages": [3, 3]}
    plan |= {"sequence_parallel": True, "loss_parallel": loss_parallel}

    def peak_bytes(micro_batches: int, samples: int) -> float:
        sizes = {"global_batch_size": micro_batches * samples, "sequence_length": 24}
        asked = plan | {"micro_batches": micro_batches}
        return predicted(scenario_of(star(4), asked, **workload, **sizes)).ranks[-1].peak_allocated_bytes

    one, two = (peak_bytes(3, samples) - peak_bytes(2, samples) for samples in (1, 2))  # of one more micro-batch
    assert one == pytest.approx(two / 2, rel=0.02)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"method": "ddp", "dp_replicate": 2}, "all-reduces in autograd's hooks"),
        ({"method": "zero3", "dp_shard": 2}, "frees parameters after a forward"),
        ({"method": "hsdp", "dp_replicate": 2, "dp_shard": 1}, "frees parameters after a forward"),
        ({"recompute": "full"}, "cannot be split yet with plan.recompute"),
        ({"receive_buffers": "in-flight"}, "cannot be split yet with plan.receive_buffers"),
        ({"tp": 2}, "cannot be split yet with plan.tp"),
    ],
)
def test_what_cannot_run_beside_split_backwards_is_refused(plan, message):
    ranks = 4 if "recompute" not in plan and "receive_buffers" not in plan else 2
    asked = {"method": "pipeline", "pp": 2, "micro_batches": 4, "schedule": "interleaved_zero_bubble"} | plan
    with pytest.raises(UserError, match=re.escape(message)):
        scenario_of(star(ranks), asked, model=GPT, global_batch_size=8, sequence_length=32, optimizer="sgd")


def test_a_model_whose_backward_was_not_traced_in_parts_is_refused():
    with pytest.raises(
        UserError, match=re.escape("lacks the costs of a split backward of 'h.1': `gsreal trace` writes them only if")
    ):
        pipelined(2, 4, model=chain(4), schedule="interleaved_zero_bubble", stages=[1] * 4)


def most_activations(scenario: Scenario) -> list[float]:
    """Return the most bytes of activations that each rank holds between two tasks."""
    found = []
    for tasks in lower(scenario).tasks:
        held = most = 0.0
        for task in tasks:
            held += dict(task.need.kept).get("activations", 0.0)
            most = max(most, held)
        found.append(most)
    return found


def test_gpipe_holds_the_activations_of_all_micro_batches_and_1f1b_of_the_stages_that_are_left():
    """A layer keeps 8 bytes and its output of 16, of which torch's loop may hold up to two a little longer."""
    stages, micro_batches = 4, 12
    assert (
        most_activations(pipelined(stages, micro_batches, model=chain(stages), schedule="gpipe"))
        == [24.0 * micro_batches] * stages
    )
    few = most_activations(pipelined(stages, micro_batches, model=chain(stages), schedule="1f1b"))
    for stage, held in enumerate(few):
        assert 24 * (stages - stage) <= held <= 24 * (stages - stage) + 2 * 16


def test_a_stage_of_embeddings_alone_releases_the_output_that_it_made():
    """GPT-2's dropout behind them allocates nothing in a forward: the sum of both embeddings is what is passed on."""
    model = load_model(Path(__file__).resolve().parents[1] / "helpers/models/gpt2.toml")
    stages = [2, *[1] * (len(unrolled(model)) - 3)]  # the loss is part of the last
    plan = {"method": "pipeline", "micro_batches": 3, "stages": stages}
    cluster = star(len(stages), types={"fast": device_type(memory_bytes=2**40)})
    shape = {"model": model, "global_batch_size": 6, "sequence_length": 24}
    for entry in simulate(loaded_of(scenario_of(cluster, plan, **shape))).result.ranks:
        assert min(entry.peak_by_category_bytes.values()) >= 0
        assert sum(entry.peak_by_category_bytes.values()) == entry.peak_allocated_bytes


def test_a_rank_holds_parameters_states_and_inputs_of_its_own_stages_alone():
    scenario = pipelined(3, 3, model=GPT, stages=[2, 2, 3], samples=2)
    program = lower(scenario)
    layers = unrolled(GPT)
    for held, (start, end) in zip(program.persistent, [(0, 2), (2, 4), (4, 8)], strict=True):
        assert held["parameters"] == 4 * sum(instance.layer.elements for instance in layers[start:end])
    batch_bytes = 8 * 6
    assert [held["input"] for held in program.persistent] == [batch_bytes, 0, batch_bytes]
    # a buffer for each micro-batch from either neighbour
    border = 576 * 2
    assert [held["communication"] for held in program.persistent] == [3 * border, 6 * border, 3 * border]


# Who gets which layers -----------------------------------------------------------------------------------------------


def test_layers_are_balanced_over_unequal_devices():
    types = {"fast": device_type(), "slow": device_type(peak_flop_per_s={"fp32": 5e8})}
    cluster = star(2, types=types, type_names=["slow", "fast"], bandwidth=1e18)
    settings = {"model": chain(9), "global_batch_size": 4, "sequence_length": 1, "optimizer": "sgd"}
    scenario = scenario_of(cluster, {"method": "pipeline", "micro_batches": 4}, **settings)
    assert [sum(1 for each in stage if each.layer.modules) for stage in scenario.stages] == [3, 6]
    even = scenario_of(cluster, {"method": "pipeline", "micro_batches": 4, "stages": [5, 4]}, **settings)
    assert predicted(scenario).step_time_s < predicted(even).step_time_s
    assert scenario.scenario_id != even.scenario_id


def test_balanced_stages_are_the_same_question_as_the_same_stages_by_hand():
    balanced = pipelined(2, 4, model=GPT)
    by_hand = pipelined(2, 4, model=GPT, stages=[3, 4])
    assert [len(stage) for stage in balanced.stages] == [3, 5]  # with the loss
    assert balanced.scenario_id == by_hand.scenario_id


@pytest.mark.parametrize("name", ["gpt3-6.7b", "gpt2-124m"])
def test_a_model_whose_ends_share_a_weight_has_a_copy_at_each_end(name):
    model = load_model(MODELS / f"{name}.toml")
    ends = [{n for each in stage for n in each.parameter_names} for stage in pipelined(2, 2, model=model).stages]
    assert ends[0] & ends[1] == {tied for tied in ends[0] if tied in ("tokens.weight", "transformer.wte.weight")}
    assert len(ends[0] & ends[1]) == 1


# Replicas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_replicas_of_a_pipeline_reduce_each_stages_gradients_once(schedule):
    scenario = scenario_of(
        star(4),
        {"method": "ddp", "pp": 2, "dp_replicate": 2, "micro_batches": 4, "schedule": schedule},
        model=GPT,
        global_batch_size=8,
        sequence_length=8,
    )
    result = predicted(scenario)
    reduced = [entry for entry in result.collectives if entry.kind == "all-reduce"]
    assert sum(entry.bytes * entry.count for entry in reduced) == 4 * GPT.elements
    assert {entry.group for entry in reduced} == {(0, 1), (2, 3)}
    assert {entry.group for entry in result.collectives if entry.kind == "send"} == {(0, 2), (1, 3)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_replicas_of_a_pipeline_may_deal_out_their_stages_tensors(schedule):
    plan = {"pp": 2, "dp_replicate": 2, "micro_batches": 4, "schedule": schedule}
    settings = {"model": GPT, "global_batch_size": 8, "sequence_length": 8}
    whole, dealt = (scenario_of(star(4), {"method": method} | plan, **settings) for method in ("ddp", "zero1"))
    states = [sum(held["optimizer"] for held in lower(each, unfolded=True).persistent) for each in (whole, dealt)]
    assert states[1] == pytest.approx(states[0] / 2, rel=1e-3)
    sent = [entry for entry in predicted(dealt).collectives if entry.kind == "broadcast"]
    assert sum(entry.bytes * entry.count for entry in sent) == 4 * GPT.elements
    assert {entry.group for entry in sent} == {(0, 1), (2, 3)}


def unit_elements(layers, ranks: int) -> tuple[int, list[int]]:
    """Return the elements of FSDP2's root and of its blocks, padded so that rows are divided evenly."""
    padded = [
        (
            each.layer.block,
            sum(-(-p.shape[0] // ranks) * ranks * (p.elements // p.shape[0]) for p in each.layer.parameters),
        )
        for each in layers
    ]
    return sum(size for block, size in padded if not block), [size for block, size in padded if block]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("method", ["zero2", "zero3"])
@pytest.mark.parametrize("micro_batches", [2, 5])
def test_sharded_stages_gather_what_they_have_freed_and_reduce_once(method, schedule, micro_batches):
    """Root once; blocks once if kept, else in forwards that find them freed and in backwards after these."""
    scenario = scenario_of(
        star(4),
        {"method": method, "pp": 2, "dp_shard": 2, "micro_batches": micro_batches, "schedule": schedule},
        model=GPT,
        global_batch_size=2 * micro_batches,
        sequence_length=8,
    )
    result = predicted(scenario)
    for place, stage in enumerate(scenario.stages):
        root, blocks = unit_elements(stage, 2)
        group = (0, 1) if place == 0 else (2, 3)
        sent = {
            kind: sum(
                each.bytes * each.count for each in result.collectives if (each.kind, each.group) == (kind, group)
            )
            for kind in ("all-gather", "reduce-scatter")
        }
        ahead = micro_batches if schedule == "gpipe" else min(micro_batches, 2 - place)
        backwards = 1 if schedule == "gpipe" else micro_batches - ahead + 1  # those that follow a forward
        gathers = 1 if method == "zero2" else ahead + backwards
        assert sent["all-gather"] == 4 * (root + gathers * sum(blocks))
        assert sent["reduce-scatter"] == 4 * (root + sum(blocks))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "deepspeed"])
@pytest.mark.parametrize("parameters", ["gathered", "sharded"])
def test_stages_that_push_gather_what_every_backward_frees_and_push_once(schedule, parameters):
    """A backward frees all: what is kept until it is gathered once for each of them, and what is not, twice."""
    micro_batches = 5
    plan = {"pp": 2, "dp_shard": 2, "micro_batches": micro_batches, "schedule": schedule, "parameters": parameters}
    settings = {"model": GPT, "global_batch_size": 2 * micro_batches, "sequence_length": 8}
    scenario = scenario_of(star(4), {"method": "gs_z3"} | plan, **settings)
    result = predicted(scenario)
    for group, stage in zip([(0, 1), (2, 3)], scenario.stages, strict=True):
        root, blocks = unit_elements(stage, 1)
        sent = {
            kind: sum(
                each.bytes * each.count for each in result.collectives if (each.kind, each.group) == (kind, group)
            )
            for kind in ("all-gather-v", "all-to-all-v")
        }
        passes = 1 if parameters == "gathered" else 2
        assert sent["all-gather-v"] == 4 * micro_batches * (root + passes * sum(blocks))
        assert sent["all-to-all-v"] == 4 * (root + sum(blocks))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"schedule": "interleaved"}, "with plan.schedule = 'interleaved': gradients would be pushed after"),
        ({"schedule": "interleaved_zero_bubble"}, "with plan.schedule = 'interleaved_zero_bubble': gradients"),
        ({"tp": 2}, "beside plan.tp = 2; allowed: 1, or method gs"),
    ],
)
def test_sharded_stages_that_push_refuse_what_their_library_cannot_do_yet(plan, message):
    plan = {"method": "gs_z3", "pp": 2, "dp_shard": 8 // 2 // plan.get("tp", 1), "micro_batches": 2} | plan
    with pytest.raises(UserError, match=re.escape(message)):
        scenario_of(star(8), plan, model=GPT, global_batch_size=8, sequence_length=8)


@pytest.mark.parametrize(
    ("plan", "settings", "message"),
    [
        ({"gradient_sync": "micro-batch"}, {}, "plan.gradient_sync = 'micro-batch'"),
        ({"method": "gs", "publish": {"overlap": True}}, {}, "plan.publish.overlap"),
    ],
)
def test_what_sharded_stages_cannot_do_yet_is_refused(plan, settings, message):
    plan = {"method": "zero3", "pp": 2, "dp_shard": 2, "micro_batches": 4} | plan
    with pytest.raises(UserError, match=re.escape(message)):
        scenario_of(star(4), plan, model=GPT, global_batch_size=8, sequence_length=8, **settings)


def test_shards_in_proportion_to_compute_are_those_of_each_stages_devices():
    """The first stage has a fast device and one that is half as fast, the second two fast ones."""
    fast, slow = (device_type(peak_flop_per_s={"fp32": r}, memory_bandwidth_bytes_per_s=r) for r in (1e9, 5e8))
    cluster = star(4, types={"fast": fast, "slow": slow}, type_names=["fast", "slow", "fast", "fast"])
    plan = {"method": "gs", "pp": 2, "dp_shard": 2, "micro_batches": 2, "shares": {"shards": "compute"}}
    scenario = scenario_of(cluster, plan, model=GPT, global_batch_size=4, sequence_length=8)
    assert scenario.shard_shares == pytest.approx((2 / 3, 1 / 3, 1 / 2, 1 / 2))


@pytest.mark.parametrize("method", ["memory", "cost"])
def test_shards_by_memory_or_cost_are_those_of_each_stages_devices(method):
    """The first stage's devices have unequal memory and bandwidth, the second's are equal."""
    types = {"large": device_type(), "small": device_type(memory_bytes=2**28, memory_bandwidth_bytes_per_s=1e4)}
    cluster = star(4, types=types, type_names=["large", "small", "large", "large"])
    plan = {"method": "gs", "pp": 2, "dp_shard": 2, "micro_batches": 2, "shares": {"shards": method}}
    shares = scenario_of(cluster, plan, model=GPT, global_batch_size=4, sequence_length=8).shard_shares
    assert shares[2:] == pytest.approx((1 / 2, 1 / 2))
    assert shares[0] + shares[1] == pytest.approx(1)
    assert shares[0] > 0.7


def test_stages_state_their_owners_memory_with_all_micro_batches_under_way():
    """Under 1F1B the first of two stages keeps two micro-batches at once, the second one; under GPipe both keep all."""
    for schedule, kept in (("1f1b", (2, 1)), ("gpipe", (4, 4))):
        plan = {"method": "gs", "pp": 2, "dp_shard": 2, "micro_batches": 4, "schedule": schedule}
        scenario = scenario_of(star(4), plan, model=GPT, global_batch_size=8, sequence_length=8)
        parts = owners_of_stages(scenario.workload, scenario.plan, scenario.policies, scenario.stages)
        assert tuple(part.in_flight for part in parts) == kept
        assert [part.ranks for part in parts] == [(0, 1), (2, 3)]
        assert sum(part.workload.model.elements for part in parts) == scenario.workload.model.elements
        one, all_of_them = (
            activation_bytes(parts[0].workload, scenario.plan, samples=1, in_flight=count) for count in (1, kept[0])
        )
        assert one < all_of_them < kept[0] * one * 1.001


def test_stages_of_a_rank_that_run_the_same_layer_each_are_sized_too():
    """Every stage of a Llama makes the angles of its positions itself."""
    model = load_model(Path(__file__).parent.parent / "helpers/models/llama.toml")
    plan = {"method": "gs", "pp": 2, "dp_shard": 2, "micro_batches": 2, "schedule": "interleaved"}
    plan["shares"] = {"shards": "memory"}
    scenario = scenario_of(star(4), plan, model=model, global_batch_size=8, sequence_length=24)
    assert scenario.shard_shares == (0.5, 0.5, 0.5, 0.5)


def test_a_rank_with_several_stages_pushes_all_of_them_after_its_last_backward():
    plan = {"method": "gs", "pp": 2, "dp_shard": 2, "micro_batches": 4, "schedule": "interleaved"}
    scenario = scenario_of(star(4), plan, model=load_model(MODELS / "gpt2-124m.toml"), global_batch_size=8)
    program = lower(scenario)
    for rank in (0, 2):
        tasks = list(program.tasks[program.role_of[rank]])
        pushes = {task.communication: task.exchange for task in tasks if task.id.op == "push" and task.exchange}
        names = [task.id.op for task in tasks if not task.id.action]
        assert names.index("push") > len(names) - 1 - names[::-1].index("backward")
        held = [instance for stage in scenario.stages[rank // 2 :: 2] for instance in stage]
        elements = sum(parameter.elements for instance in held for parameter in instance.layer.parameters)
        pushed = sum(exchange.payload_bytes for exchange in pushes.values())
        assert pushed == pytest.approx(4 * elements, rel=1e-3)  # each owner's half, from the other rank


def test_copies_of_a_tied_parameter_are_summed_before_their_stages_push_anything():
    """The first and the last of three stages have a copy; the second pushes in its last backward, as without copies."""
    plan = {"method": "gs", "pp": 3, "dp_shard": 2, "micro_batches": 4, "bucket_bytes": 2**22}
    model = load_model(MODELS / "gpt2-124m.toml")
    scenario = scenario_of(star(6), plan, model=model, global_batch_size=8, sequence_length=8)
    program = lower(scenario)
    for stage, rank in enumerate(range(0, 6, 2)):
        tasks = list(program.tasks[program.role_of[rank]])
        ops = [task.id.op for task in tasks if not task.id.action]
        last_backward = len(ops) - 1 - ops[::-1].index("backward")
        sums = [place for place, task in enumerate(ops) if task == "all-reduce"]
        assert len(sums) == (0 if stage == 1 else 1)
        first_push = ops.index("push")
        assert first_push < last_backward if stage == 1 else last_backward < sums[0] < first_push
        elements = sum(p.elements for instance in scenario.stages[stage] for p in instance.layer.parameters)
        exchanges = {task.communication: task.exchange for task in tasks if task.id.op == "push" and task.exchange}
        pushed = sum(exchange.payload_bytes for exchange in exchanges.values())
        assert pushed == pytest.approx(4 * elements, rel=1e-3)  # each owner's half, from the other rank


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "plan",
    [
        {"method": "zero2"},
        {"method": "zero3"},
        {"method": "hsdp", "dp_replicate": 2},
        {"method": "gs"},
        {"method": "gs_z3"},
    ],
)
def test_sharded_stages_are_folded_and_change_nothing(plan, schedule):
    scenario = scenario_of(
        star(8, bandwidth=1e7),
        {"pp": 2, "micro_batches": 3, "schedule": schedule, "recompute": "full"} | plan,
        model=GPT,
        global_batch_size=24,
        sequence_length=8,
    )
    loaded = loaded_of(scenario)
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)
    assert len(machine_of(scenario, steps=1)[0].classes) < 8


@pytest.mark.parametrize("slow", [None, 0, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("schedule", "batch"),
    [
        ("1f1b", "even"),
        ("interleaved", [0.25, 0.25, 0.5]),
        pytest.param("interleaved", "even", marks=pytest.mark.slow),
        pytest.param("1f1b", [0.25, 0.25, 0.5], marks=pytest.mark.slow),
    ],
)
def test_replicas_that_are_alike_are_simulated_once_and_change_nothing(slow, schedule, batch):
    types = {"fast": device_type(), "slow": device_type(peak_flop_per_s={"fp32": 5e8})}
    names = ["slow" if rank == slow else "fast" for rank in range(6)]
    scenario = scenario_of(
        star(6, types=types, type_names=names, bandwidth=1e7),
        {
            "method": "ddp",
            "pp": 2,
            "dp_replicate": 3,
            "micro_batches": 2,
            "schedule": schedule,
            "shares": {"batch": batch},
        },
        model=GPT,
        global_batch_size=24,
        sequence_length=8,
    )
    loaded = loaded_of(scenario)
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)
    machine, _ = machine_of(scenario, steps=1)
    if slow is None:
        assert len(machine.classes) == (2 if batch == "even" else 4)


# Receive buffers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "inputs_in_flight"), [("gpipe", (5, 5)), ("1f1b", (2, 1))])
def test_stages_keep_buffers_for_every_micro_batch_or_for_what_is_in_flight(schedule, inputs_in_flight):
    """The later two of three stages receive inputs, the earlier two gradients, all of the same size in this chain."""
    sizes = {}
    for rule in ("micro-batch", "in-flight"):
        scenario = pipelined(3, 5, model=chain(6), schedule=schedule, receive_buffers=rule)
        sizes[rule] = [held["communication"] for held in lower(scenario, unfolded=True).persistent]
    size = sizes["micro-batch"][0] / 5  # a gradient of the first stage's output for each micro-batch
    assert sizes["micro-batch"] == [5 * size, 10 * size, 5 * size]
    middle, last = inputs_in_flight
    assert sizes["in-flight"] == [size, (middle + 1) * size, last * size]


def test_receive_buffers_are_of_pipelines():
    with pytest.raises(UserError, match=r"plan\.receive_buffers = 'in-flight': there is no pipeline"):
        scenario_of(star(2), {"method": "ddp", "receive_buffers": "in-flight"}, model=GPT, global_batch_size=2)
