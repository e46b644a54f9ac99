"""Megatron-LM's tests with mixtures of experts: ranks of tensor groups and of data divide them."""

from dataclasses import replace
from pathlib import Path

import pytest
from point_checks import carried
from published_rows import MEGATRON_ROW, fields, run_of_row

import gssim
from analysis.literature.runs import Run
from analysis.literature.scenarios import emit, scenario_of, servers_of_run, tables_of
from analysis.literature.tables.many_sources import MIXTURES
from gsreal.run.checks import check_predicted_only
from gssim.program import Lowering
from gssim.workload import Polynomial

ROW = MEGATRON_ROW | fields(
    "family=moe | test_case=gpt3_tp2_8experts | expert-model-parallel-size=2 | num-experts=8 | "
    "moe-router-topk=2 | moe-ffn-hidden-size=512 | sequence-parallel=True | disable-bias-linear=True"
)


def run_of(folder: Path, **change: str) -> Run:
    row = ROW | {name.replace("_", "-"): value for name, value in change.items()}
    named = {"test-case": "test_case", "n-gpus-source": "n_gpus_source"}
    row |= {named[name]: row.pop(name) for name in named if name in row}
    return run_of_row(folder, row)


def carried_by(run: Run, *kinds: str) -> dict[tuple[int, ...], int]:
    """Return the bytes of collectives of these kinds in a step, by their group."""
    return carried(gssim.simulate(scenario_of(run)), *kinds)


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
    """In Megatron-LM's order of ranks, those that divide an expert vary fastest, then experts, then replicas."""
    run = run_of(tmp_path, **change, test_case="a2a")
    exchanged = carried_by(run, "all-to-all-v", "all-to-all")
    assert min(exchanged) == experts_together
    assert sorted(rank for group in exchanged for rank in group) == list(range(8))
    reduced = {group for group in carried_by(run, "all-reduce") if len(group) == 2 and group[1] - group[0] > 1}
    assert min(reduced, default=None) == same_experts


@pytest.mark.parametrize("dispatcher", ["allgather", "a2a"])
@pytest.mark.parametrize("etp", ["1", "2"])
def test_bytes_of_a_dispatch_are_those_of_megatrons_dispatchers(tmp_path, dispatcher, etp):
    """`alltoall` sends each rank's tokens, a part of a sample's, once for each expert; `allgather` sends all of them.

    There are four exchanges of a block in a step: rows and results, and the gradients of both.
    """
    run = run_of(tmp_path, expert_tensor_parallel_size=etp, test_case=dispatcher)
    exchanged = carried_by(run, "all-to-all-v", "all-to-all")
    tokens = run.micro_batches * run.micro_batch * 128 // run.tp
    whole = tokens * 256 * 2 * (2 if dispatcher == "a2a" else run.ep)
    assert exchanged[min(exchanged)] == pytest.approx(4 * 4 * run.ep * whole, rel=1e-6)


def test_each_rank_holds_its_part_of_the_experts(tmp_path):
    """A rank of a 2 x 2 mesh holds a quarter of 8 experts of 2 x 256 x 512 elements in 4 blocks, on either axis."""
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
        ({"optimizer": "lion"}, "the optimizer lion"),
        ({"cuda_graph_impl": "transformer_engine"}, "CUDA graphs"),
        ({"fine_grained_activation_offloading": "True"}, "activations go to the host"),
    ],
    ids=str,
)
def test_what_cannot_be_said_of_a_test_is_named(tmp_path, change, reason):
    with pytest.raises(AssertionError, match=reason):
        run_of(tmp_path, **change)


MUON = {"optimizer": "muon", "tensor_model_parallel_size": "1", "use_distributed_optimizer": "True"}


def test_tests_of_muon_are_of_the_layer_wise_optimizer_which_has_every_expert_whole(tmp_path):
    """Each of 8 ranks has one of 8 experts, 2 matrices in each of 4 blocks, and at most 2 of the other 12 matrices."""
    asked = MUON | {"expert_model_parallel_size": "8", "test_case": "ep8_muon_param_layout"}
    run = run_of(tmp_path, **asked)
    ((path,), _) = emit([run], tmp_path / "out")
    assert 'optimizer = "muon"' in path.read_text()
    low = Lowering(gssim.load(path), None, 0, range(8))
    experts = [low.matrices(rank, of_experts=True) for rank in range(8)]
    assert experts == [((512, 256), (256, 512)) * 4] * 8
    others = [low.matrices(rank, of_experts=False) for rank in range(8)]
    assert sorted(map(len, others)) == [1, 1, 1, 1, 2, 2, 2, 2]


def test_a_test_of_muon_with_whole_embeddings_is_written_but_not_scored(tmp_path):
    asked = MUON | {"expert_model_parallel_size": "8", "test_case": "ep8_muon"}
    with pytest.raises(AssertionError, match="own whole tensors, the embedding too"):
        run_of(tmp_path, **asked)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"etp": 3}, r"plan\.etp = 3: must divide plan\.tp = 2"),
        ({"etp": 1, "ep": 3}, r"plan\.etp = 1: times 3 \(plan\.ep\) must be a multiple of plan\.tp = 2"),
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


LATENT = {"swiglu": "True", "untie_embeddings_and_output_weights": "True", "attention_backend": "unfused"}
NAME = "gpt3_tp2_pp2_ep4_etp1"
"""Name of tests with latent attention, a first block without experts, and a shared expert."""


def test_a_block_that_predicts_a_further_token_is_one_more_with_logits_of_its_own(tmp_path):
    plain, further = (run_of(tmp_path, **LATENT, test_case=NAME + end) for end in ("", "_memory_speed"))
    assert (plain.shape.further, further.shape.further) == (0, 1)
    names = [[layer["name"] for layer in tables_of(run)["workload"]["model"]["layers"]] for run in (plain, further)]
    assert names[1] == [*names[0][:-1], "further.0", "head"]
    head, more = (tables_of(run)["workload"]["model"]["layers"][-1] for run in (plain, further))
    tokens = Polynomial.parse(more["forward_flop"]).at(b=1, s=128) / Polynomial.parse(head["forward_flop"]).at(
        b=1, s=128
    )
    assert tokens == 2
    assert more["parameters"] == head["parameters"]


def test_a_further_block_on_another_stage_has_a_copy_of_the_embedding(tmp_path):
    asked = LATENT | {"expert_model_parallel_size": "2", "test_case": NAME + "_memory_speed"}
    run = run_of(tmp_path, **asked, pipeline_model_parallel_size="2")
    alone = run_of(tmp_path, **asked)
    copied = f"{run.shape.vocabulary}x256"
    found = [
        [each for each in layer["parameters"] if each.split()[1] == copied]
        for each_run in (run, alone)
        for layer in tables_of(each_run)["workload"]["model"]["layers"]
        if layer["name"] == "further.0"
    ]
    assert [len(each) for each in found] == [1, 0]


def test_unfused_latent_attention_keeps_its_scores(tmp_path):
    """The softmax of 8 heads on 128 x 128 positions, in place of flash attention's result and statistics."""
    saved = []
    for backend in ("unfused", "flash"):
        run = run_of(tmp_path, **(LATENT | {"attention_backend": backend}), test_case=NAME)
        layers = tables_of(run)["workload"]["model"]["layers"]
        block = next(each for each in layers if each["name"] == "blocks.0")
        saved.append(Polynomial.parse(block["saved_bytes"]).at(b=1, s=128))
    assert saved[0] - saved[1] == 8 * 128 * 128 * 2  # the context is saved in both, by the map behind it


def test_a_graphed_attention_is_one_launch_each_way(tmp_path):
    asked = LATENT | {"cuda_graph_impl": "transformer_engine"}
    graphed = run_of(tmp_path, **asked, test_case=NAME + "_attn_cudagraph")
    plain = run_of(tmp_path, **LATENT, test_case=NAME)
    layers = [
        next(each for each in tables_of(run)["workload"]["model"]["layers"] if each["name"] == "blocks.0")
        for run in (plain, graphed)
    ]
    assert layers[1]["forward_operations"] < layers[0]["forward_operations"] / 2
    assert {name for name in layers[0] if layers[0][name] != layers[1].get(name)} == {
        name for name in layers[0] if name.endswith("_operations")
    }


@pytest.mark.parametrize(
    ("name", "parameters_e9"), [("qwen3-30b-a3b", 30.5), ("gpt-oss-120b", 116.8), ("deepseekv3", 671.0)]
)
def test_models_with_experts_have_as_many_parameters_as_they_say(name, parameters_e9):
    """Model cards: 30.5, 116.8 and 671 billion parameters (without the multi-token prediction block)."""
    assert MIXTURES[name].parameters / 1e9 == pytest.approx(parameters_e9, abs=0.05)


def test_heads_wider_than_their_part_of_the_model_are_products_of_that_width(tmp_path):
    """32 heads of 128 in a model of width 2048: maps to queries of 4096, keys and values of 512, and back."""
    run = run_of(
        tmp_path, **LATENT, test_case="gpt3_llama", tensor_model_parallel_size="1", expert_model_parallel_size="1"
    )
    shape = replace(MIXTURES["qwen3-30b-a3b"], layers=1, experts=None, sequence_length=128)
    wide = replace(run, shape=shape, software=replace(run.software, flash_attention=True))
    block = next(each for each in tables_of(wide)["workload"]["model"]["layers"] if each["name"] == "blocks.0")
    shapes = [each.split()[1] for each in block["parameters"] if "x" in each.split()[1]]
    assert shapes == ["5120x2048", "2048x4096", "1536x2048", "2048x768"]


@pytest.mark.parametrize(("system", "servers"), [("DGX-GB200", [64, 64]), ("DGX-B200", [8] * 16)])
def test_a_rack_is_one_server_of_nvlink(tmp_path, system, servers):
    row = {
        "id": "a",
        "source": "NVIDIA-NeMo/Megatron-Bridge",
        "system": system,
        "gpu": system.removeprefix("DGX-"),
        "n_gpus": "128",
        "model": "GPT-OSS-120B",
        "seq": "4096",
        "micro_batch": "1",
        "global_batch": "1280",
        "dp": "128",
        "tp": "1",
        "pp": "1",
        "ep": "64",
        "sharding": "DDP+dist-opt",
        "precision": "BF16",
        "iter_time_s": "10",
        "note": "MoE",
    }
    run = run_of_row(tmp_path, row)
    assert [devices for _, devices in servers_of_run(run)] == servers
    assert (run.ep, run.flat_optimizer) == (64, True)
