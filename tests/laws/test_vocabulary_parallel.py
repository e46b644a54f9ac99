"""A vocabulary that tensor-parallel ranks divide, in embedding and loss: collectives, memory, and refusals."""

from pathlib import Path

import pytest

import gssim
from gssim import simulate
from gssim.planner.bounds.bounds import Bounds

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
LLAMA = f"{SCENARIOS}/llama3-8b-fsdp.toml"
BERT = f"{SCENARIOS}/models/bert-base.toml"
VOCABULARY, WIDTH, TOKENS = 128256, 4096, 2 * 8192  # of a rank's two samples


def of(ranks, **changes):
    plan = {"plan.method": "zero2", "plan.tp": ranks, "plan.ranks": 8, "workload.global_batch_size": 2 * 8 // ranks}
    return gssim.load(LLAMA, plan | {f"plan.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_of_each_token_three_numbers_are_reduced_and_the_gradient_of_the_heads_input(ranks):
    whole, divided = (simulate(of(ranks, loss_parallel=each)) for each in (False, True))
    groups = {each.group for each in divided.collectives if each.kind == "all-reduce"}
    sums = {(group, size): 0 for group in groups for size in (4 * TOKENS, 8 * TOKENS, 2 * WIDTH * TOKENS)}
    for result, sign in ((divided, 1), (whole, -1)):
        for each in result.collectives:
            if (each.group, each.bytes) in sums and each.kind == "all-reduce":
                sums[each.group, each.bytes] += sign * each.count
    assert set(sums.values()) == {1}


def test_ranks_hold_their_part_of_the_logits_and_of_the_head():
    whole, divided = (simulate(of(4, loss_parallel=each)).ranks[0] for each in (False, True))
    # at the loss: logits in bf16, the softmax in it, and its gradient, or their parts with one of these in fp32
    logits = VOCABULARY * TOKENS
    least, most = 2 * (2 - 1 / 4) * logits, 2 * (3 - 2 / 4) * logits
    assert least < whole.peak_allocated_bytes - divided.peak_allocated_bytes < 2 * most


def test_the_last_stage_of_a_pipeline_divides_its_loss():
    changes = {"method": "zero1", "pp": 2, "dp_replicate": 2, "micro_batches": 2, "recompute": "full"}
    whole, divided = (simulate(of(2, loss_parallel=each, **changes)) for each in (False, True))
    sums = {each.group for each in divided.collectives if (each.kind, each.bytes) == ("all-reduce", 4 * TOKENS)}
    assert sums == {(4, 5), (6, 7)}
    before, after = ({rank: each for each in result.ranks for rank in each.ranks} for result in (whole, divided))
    assert before[0].peak_allocated_bytes == after[0].peak_allocated_bytes
    assert before[7].peak_allocated_bytes > after[7].peak_allocated_bytes + 2 * VOCABULARY * 8192
    unfolded = simulate(of(2, loss_parallel=True, **changes), unfold=True)
    assert unfolded.step_time_s == pytest.approx(divided.step_time_s, rel=1e-9)


@pytest.mark.parametrize(("file", "peaks"), [pytest.param("bert-byte", 2, marks=pytest.mark.slow), ("demo", 1)])
def test_parts_may_be_uneven(file, peaks):
    scenario = gssim.load(f"{SCENARIOS}/{file}.toml", {"plan.method": "tensor", "plan.loss_parallel": True})
    folded = simulate(scenario)
    peak_bytes = {each.peak_allocated_bytes for each in folded.ranks}
    assert len(peak_bytes) == peaks  # of 257 tokens one rank has one more
    assert folded.step_time_s == pytest.approx(simulate(scenario, unfold=True).step_time_s, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 8])
def test_bounds_are_no_more_than_a_simulation(ranks):
    scenario = of(ranks, loss_parallel=True)
    result, bounds = simulate(scenario), Bounds(scenario)
    bound = bounds.closer(scenario.plan, bounds.of(scenario.plan))
    assert bound.time_s <= result.step_time_s
    memory = scenario.cluster.type_of(0).memory_bytes
    assert bound.full_ratio * memory <= result.ranks[0].peak_allocated_bytes + sum(
        result.ranks[0].outside_bytes.values()
    )


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("demo", {"plan.method": "ddp"}, "there are no tensor-parallel ranks"),
        ("gpt2-unequal-gpus", {"plan.method": "zero2", "plan.tp": 2}, r"divided for both; set plan.embedding_parallel"),
        (
            "bert-byte",
            {"plan.method": "tensor", "workload.model": BERT},
            "cannot be divided: its last layer is no linear",
        ),
        ("resnet-digits", {"plan.method": "tensor"}, "cannot be divided: it predicts no tokens"),
    ],
)
def test_what_cannot_be_divided_is_refused(file, changes, said):
    with pytest.raises(gssim.UserError, match=said):
        gssim.load(f"{SCENARIOS}/{file}.toml", changes | {"plan.loss_parallel": True})


# The embedding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 8])
def test_an_embedding_is_looked_up_in_parts_that_are_added(ranks):
    whole, divided = (simulate(of(ranks, embedding_parallel=each)) for each in (False, True))
    size = 2 * WIDTH * TOKENS  # of what is looked up
    sums = [sum(e.count for e in r.collectives if (e.kind, e.bytes) == ("all-reduce", size)) for r in (whole, divided)]
    groups = len({each.group for each in divided.collectives if each.kind == "all-reduce" and each.bytes == size})
    assert sums[1] - sums[0] == groups
    table, shards = 2 * VOCABULARY * WIDTH, 8 // ranks
    saved = whole.ranks[0].peak_allocated_bytes - divided.ranks[0].peak_allocated_bytes
    assert saved > (1 - 1 / ranks) * table / shards * 3  # the shard's values and two moments, at least


def test_a_weight_of_both_ends_is_divided_once_and_both_ends_of_a_pipeline_hold_the_same_part():
    file = f"{SCENARIOS}/gpt3-1024-3d.toml"
    changes = {"plan.zero1_implementation": "torch", "plan.schedule": "1f1b", "plan.micro_batches": 4, "plan.tp": 2}
    changes |= {"plan.pp": 2, "plan.dp_replicate": 2, "plan.ranks": 8, "workload.global_batch_size": 8}
    changes |= {"workload.model": f"{SCENARIOS}/models/gpt3-1.3b.toml", "run.extrapolate_micro_batches": False}
    results = []
    for each in (False, True):
        both = {"plan.embedding_parallel": each, "plan.loss_parallel": each}
        results.append(simulate(gssim.load(file, changes | both)))
    table = 2 * 50257 * 2048
    sums = [
        {e.bytes for e in each.collectives if e.kind == "all-reduce" and set(e.group) == {0, 4}} for each in results
    ]
    assert table in sums[0]
    assert sums[1] == {2 * 25129 * 2048}  # of 50257 rows the first rank has one more
    whole, divided = ({rank: each.peak_allocated_bytes for each in r.ranks for rank in each.ranks} for r in results)
    saved = [whole[rank] - divided[rank] for rank in range(8)]
    assert min(saved) > 0.25 * table


def test_an_embedding_alone_is_refused_where_the_head_has_its_weight():
    changes = {"plan.method": "zero2", "plan.tp": 2, "plan.embedding_parallel": True}
    with pytest.raises(gssim.UserError, match=r"divided for both; set plan.loss_parallel = true too"):
        gssim.load(f"{SCENARIOS}/gpt2-unequal-gpus.toml", changes)
    with pytest.raises(gssim.UserError, match=r"head, which shares the embedding's weight, has other parameters"):
        gssim.load(
            f"{SCENARIOS}/bert-byte.toml",
            {"plan.method": "tensor", "workload.model": BERT, "plan.embedding_parallel": True},
        )
