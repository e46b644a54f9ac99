"""Megatron-LM's tests with mixtures of experts: ranks of tensor groups and of data divide them."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

import gssim
from analysis.literature.runs import Run
from analysis.literature.scenarios import emit, scenario_of
from analysis.literature.tables.reading import read_table
from gsreal.run.launch import check_predicted_only

ROW = {
    "family": "moe",
    "test_case": "gpt3_tp2_8experts",
    "platform": "dev_dgx_h100",
    "nodes": "1",
    "gpus_per_node": "8",
    "n_gpus_source": "recipe",
    "iter_time_median_s": "0.1",
    "mem_max_allocated_bytes": "4.6e9",
    "num-layers": "4",
    "hidden-size": "256",
    "num-attention-heads": "8",
    "seq-length": "128",
    "micro-batch-size": "4",
    "global-batch-size": "32",
    "tensor-model-parallel-size": "2",
    "expert-model-parallel-size": "2",
    "num-experts": "8",
    "moe-router-topk": "2",
    "moe-ffn-hidden-size": "512",
    "sequence-parallel": "True",
    "bf16": "True",
    "disable-bias-linear": "True",
    "vocab-size": "1000",
}


def run_of(folder: Path, **change: str) -> Run:
    path, row = folder / "t.csv", ROW | {name.replace("_", "-"): value for name, value in change.items()}
    named = {"test-case": "test_case", "n-gpus-source": "n_gpus_source"}
    row |= {named[name]: row.pop(name) for name in named if name in row}
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([list(row), list(row.values())])
    ((_, _, run),) = read_table(path)
    assert isinstance(run, Run), run
    return run


def carried(run: Run, *kinds: str) -> dict[tuple[int, ...], int]:
    """Return the bytes of collectives of these kinds in a step, by their group."""
    found: dict[tuple[int, ...], int] = {}
    for entry in gssim.simulate(scenario_of(run)).collectives:
        if entry.kind in kinds:
            found[entry.group] = found.get(entry.group, 0) + entry.bytes * entry.count
    return found


@pytest.mark.parametrize(
    ("change", "experts_together", "same_experts"),
    [
        ({}, (0, 2), (0, 4)),
        ({"expert_model_parallel_size": "4", "expert_tensor_parallel_size": "1"}, (0, 1, 2, 3), (0, 4)),
        ({"expert_model_parallel_size": "4"}, (0, 2, 4, 6), None),
        ({"tensor_model_parallel_size": "4", "expert_tensor_parallel_size": "2"}, (0, 2), (0, 4)),
    ],
    ids=str,
)
def test_ranks_that_divide_experts_and_those_that_hold_the_same(tmp_path, change, experts_together, same_experts):
    """As Megatron-LM numbers ranks: those that divide an expert vary fastest, then experts, then replicas."""
    run = run_of(tmp_path, **change, test_case="a2a")
    exchanged = carried(run, "all-to-all-v", "all-to-all")
    assert min(exchanged) == experts_together
    assert sorted(rank for group in exchanged for rank in group) == list(range(8))
    reduced = {group for group in carried(run, "all-reduce") if len(group) == 2 and group[1] - group[0] > 1}
    assert min(reduced, default=None) == same_experts


@pytest.mark.parametrize("dispatcher", ["allgather", "a2a"])
@pytest.mark.parametrize("etp", ["1", "2"])
def test_bytes_of_a_dispatch_are_those_of_megatrons_dispatchers(tmp_path, dispatcher, etp):
    """`alltoall` sends each rank's tokens, a part of a sample's, once for each expert; `allgather` sends all of them.

    There are four exchanges of a block in a step: rows and results, and the gradients of both.
    """
    run = run_of(tmp_path, expert_tensor_parallel_size=etp, test_case=dispatcher)
    exchanged = carried(run, "all-to-all-v", "all-to-all")
    tokens = run.micro_batches * run.micro_batch * 128 // run.tp
    whole = tokens * 256 * 2 * (2 if dispatcher == "a2a" else run.ep)
    assert exchanged[min(exchanged)] == pytest.approx(4 * 4 * run.ep * whole, rel=1e-6)


def test_each_rank_holds_its_part_of_the_experts(tmp_path):
    """Of 8 experts of 2 x 256 x 512 elements in 4 blocks, a rank of 2 x 2 holds a quarter, whoever divides what."""
    held = {}
    for etp, ep in (("2", "2"), ("1", "4"), ("2", "4")):
        run = run_of(tmp_path, expert_tensor_parallel_size=etp, expert_model_parallel_size=ep)
        (rank, *_) = gssim.simulate(scenario_of(run)).ranks
        held[etp, ep] = rank.peak_by_category_bytes["parameters"]
    whole = 4 * 8 * 2 * 256 * 512 * 2
    assert held["2", "2"] == held["1", "4"]
    assert held["2", "2"] - held["2", "4"] == pytest.approx(whole / 4 - whole / 8, rel=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"expert_model_parallel_size": "4", "expert_tensor_parallel_size": "1"},
        {"use_distributed_optimizer": "True"},
        {"pipeline_model_parallel_size": "2", "expert_tensor_parallel_size": "1"},
        {"tensor_model_parallel_size": "4", "pipeline_model_parallel_size": "2", "expert_tensor_parallel_size": "2"},
    ],
    ids=str,
)
def test_equal_slices_are_simulated_once_with_the_same_result(tmp_path, change):
    run = run_of(tmp_path, **change)
    scenario = scenario_of(replace(run, micro_batches=2))
    folded, unfolded = (gssim.simulate(scenario, unfold=whole) for whole in (False, True))
    assert folded.step_time_s == pytest.approx(unfolded.step_time_s, rel=1e-9)
    peaks = [
        {rank: entry.peak_allocated_bytes for entry in result.ranks for rank in entry.ranks}
        for result in (folded, unfolded)
    ]
    assert peaks[0] == peaks[1]


def test_experts_one_after_another_and_unfused_sorting_cost_the_host_more(tmp_path):
    grouped, apart = (run_of(tmp_path, moe_grouped_gemm=word) for word in ("True", "False"))
    steps_s = [gssim.simulate(scenario_of(run)).step_time_s for run in (grouped, apart)]
    assert steps_s[0] < steps_s[1]


def test_tests_of_experts_are_written_and_read_again(tmp_path):
    run = run_of(tmp_path, expert_model_parallel_size="4", expert_tensor_parallel_size="1")
    ((path,), skipped) = emit([run], tmp_path / "out")
    assert not skipped
    again, direct = gssim.load(path), scenario_of(run)
    assert gssim.simulate(again).step_time_s == gssim.simulate(direct).step_time_s
    assert "etp = 1" in path.read_text()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"test_case": "gpt3_tp2_pp2_ep4_etp1_memory_speed"}, "a layer that predicts further tokens"),
        ({"optimizer": "muon"}, "the optimizer muon"),
    ],
    ids=str,
)
def test_what_cannot_be_said_of_a_test_is_named(tmp_path, change, reason):
    with pytest.raises(AssertionError, match=reason):
        run_of(tmp_path, **change)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"etp": 3}, r"plan\.etp = 3: must divide plan\.tp = 2"),
        ({"etp": 1, "ep": 3}, r"plan\.etp = 1: must divide"),
        ({"tp": 1, "dp_replicate": 8}, r"plan\.tp = 1: the layers with divided experts .* for 2 tensor ranks"),
        ({"method": "zero3", "dp_shard": 4, "dp_replicate": 1}, r"plan\.tp = 2 and method 'zero3'"),
    ],
    ids=str,
)
def test_plans_that_cannot_divide_experts_so_are_refused(tmp_path, plan, message):
    changes = {f"plan.{key}": value for key, value in plan.items()}
    ((path,), _) = emit([run_of(tmp_path)], tmp_path / "out")
    with pytest.raises(gssim.UserError, match=message):
        gssim.load(path, changes)


def test_experts_beside_tensor_ranks_are_predicted_only(tmp_path):
    with pytest.raises(gssim.UserError, match=r"plan\.ep = 2 beside plan\.tp = 2: can be predicted, but not run"):
        check_predicted_only(scenario_of(run_of(tmp_path)), where="t.toml")
