"""Host time and memory of Megatron-LM's own tests, as their names and columns describe them."""

from dataclasses import replace
from pathlib import Path

import pytest
from published_rows import MEGATRON_ROW, fields, run_of_row

from analysis.literature.runs import Run
from analysis.literature.scenarios import predict, stages_of, tables_of
from gssim.workload import Polynomial

ROW = MEGATRON_ROW | fields(
    "family=gpt | test_case=gpt_small | iter_time_min_s=0.099 | global-batch-size=64 | "
    "pipeline-model-parallel-size=1 | context-parallel-size= | transformer-impl=transformer_engine | "
    "attention-backend="
)
OVERHEAD_S = 33e-6
"""Overhead of an operation on the H100 of the tests."""


def run_of(folder: Path, change: dict[str, str] | None = None, **named: str) -> Run:
    return run_of_row(folder, ROW | (change or {}) | named)


def host_s(run: Run, **software: object) -> float:
    """Return the time of a step, which the host bounds, over that without some of the software's operations."""
    without = replace(run, software=replace(run.software, **software))
    return predict(run).step_s - predict(without).step_s


def passes(run: Run) -> float:
    """Return the number of a block's forwards in a step; each has a backward of twice as many operations."""
    return run.micro_batches * run.shape.layers


def test_fused_attention_of_transformer_engine_is_more_than_one_operation(tmp_path):
    """It issues up to 8 more operations in each forward: copies in and out, and the generator's state."""
    run = run_of(tmp_path)
    assert run.software.flash_attention
    assert host_s(run, flash_calls=1) == pytest.approx(8 * 3 * passes(run) * OVERHEAD_S, rel=1e-6)
    assert run_of(tmp_path, {"attention-backend": "unfused"}).software.flash_calls == 1


@pytest.mark.parametrize(("test", "steps"), [("gpt_cp4", 3), ("gpt_cp4_a2a_p2p", 1)])
def test_a_ring_has_operations_in_each_of_its_steps(tmp_path, test, steps):
    change = {"context-parallel-size": "4", "attention-backend": "flash", "tensor-model-parallel-size": "1"}
    run = run_of(tmp_path, change, test_case=test)
    assert run.software.flash_calls == 9 + 3 + 7 * steps


@pytest.mark.parametrize(
    ("platform", "backend", "fused"),
    [
        ("lts_dgxa100_dracooci", "", False),
        ("lts_dgxa100_dracooci-ord", "auto", False),
        ("lts_dgxa100_dracooci", "flash", True),
        ("dev_dgxa100_dracooci", "", True),
        ("lts_dgx_a100", "", True),
    ],
)
def test_the_old_container_found_no_deterministic_fused_attention(tmp_path, platform, backend, fused):
    run = run_of(tmp_path, {"attention-backend": backend}, platform=platform)
    assert run.software.flash_attention == fused


def test_rotary_positions_are_operations_of_their_own(tmp_path):
    change = {"position-embedding-type": "rope"}
    fused, eager = (run_of(tmp_path, change, test_case=name) for name in ("gpt_rope", "gpt_rope_no_fusion"))
    assert host_s(fused, rotary_calls=0) == pytest.approx(2 * 3 * passes(fused) * OVERHEAD_S, rel=1e-6)
    assert predict(eager).step_s - predict(fused).step_s == pytest.approx(4 * 3 * passes(eager) * OVERHEAD_S, rel=1e-6)


def test_compared_norms_wait_for_each_rank_they_are_compared_with(tmp_path):
    """Four tensors with those of 2 tensor ranks and 4 replicas, in the forward alone; two norms in both passes."""
    run = run_of(tmp_path, test_case="gpt_qk_layernorm_test_mode")
    assert run.software.checks_norms_over == 2 + 4
    operations = (4 + 4 + 4 * 6) + 2 * 4
    assert host_s(run, checks_norms_over=None) == pytest.approx(operations * passes(run) * OVERHEAD_S, rel=1e-6)


ON_CLOUD = "gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings"


@pytest.mark.parametrize(
    ("platform", "test", "overhead_s"),
    [
        ("dev_dgx_h100", "gpt_small", OVERHEAD_S),
        ("dev_dgx_h100", ON_CLOUD, 56e-6),
        ("dev_dgx_h100_2nd", ON_CLOUD, OVERHEAD_S),
        ("dev_dgx_h100", f"{ON_CLOUD}_interleaved", OVERHEAD_S),
        ("dev_dgxh100_dgxc", "gpt_small", 56e-6),
        ("dev_dgx_a100", ON_CLOUD, 57e-6),
    ],
)
def test_hosts_in_the_cloud_launch_operations_more_slowly(tmp_path, platform, test, overhead_s):
    run = run_of(tmp_path, test_case=test, platform=platform)
    assert run.software.operation_overhead_s == overhead_s


def test_fused_attention_has_its_own_rate(tmp_path):
    """A block's attention takes 1 / 0.58 times as long on an H100 as its FLOP would at the rate of products."""
    run = run_of(tmp_path)
    flop = {}
    for ratio in (1.0, 0.58):
        model = tables_of(replace(run, software=replace(run.software, attention_ratio=ratio)))["workload"]["model"]
        block = next(layer for layer in model["layers"] if layer["name"] == "blocks.0")
        flop[ratio] = Polynomial.parse(block["forward_flop"]).at(b=1, s=run.shape.sequence_length)
    assert run.software.attention_ratio == 0.58
    attention = 2 * run.shape.sequence_length**2 * run.shape.hidden  # half of 2 products
    assert flop[0.58] - flop[1.0] == pytest.approx(attention * (1 / 0.58 - 1), rel=1e-3)  # whole FLOP a score


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_gradients_are_clipped_and_in_fp16_checked(tmp_path, half):
    """--clip-grad is 1 by default; every test with fp16 scales its loss dynamically."""
    run = run_of(tmp_path, {"bf16": "", "fp16": "", half: "True"})
    workload = tables_of(run)["workload"]
    assert workload["precision"] == half
    assert workload["clip_norm"] == 1.0
    assert workload.get("loss_scale") == ("dynamic" if half == "fp16" else None)


def test_a_compiled_loss_has_a_second_tensor_of_exponentials(tmp_path):
    change = {"seq-length": "512", "num-layers": "1", "vocab-size": "8000"}
    plain, compiled = (run_of(tmp_path, change, test_case=name) for name in ("gpt", "gpt_cross_entropy_loss_fusion"))
    logits = 4 * 512 * compiled.shape.vocabulary // 2 * 4
    assert predict(compiled).allocated_bytes - predict(plain).allocated_bytes == pytest.approx(logits, rel=0.05)


@pytest.mark.parametrize(
    ("test", "dropout", "compiled"),
    [
        ("gpt3_mcore_te_tp2_pp1_cp2", True, False),
        ("gpt3_mcore_te_tp2_pp1_cp2_nondeterministic", False, False),
        ("gpt3_mcore_te_tp2_pp2_cp2_calculate_per_token_loss", False, False),
        ("gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion", True, True),
        ("gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed", False, True),
    ],
)
def test_names_tell_of_dropout_and_of_a_compiled_loss(tmp_path, test, dropout, compiled):
    software = run_of(tmp_path, test_case=test).software
    assert (software.dropout, software.compiled_loss) == (dropout, compiled)


def test_no_mask_is_kept_without_dropout(tmp_path):
    """Of a block: one byte for each element of what two residual sums drop, and none for what attention drops."""
    kept, plain = (run_of(tmp_path, test_case=test) for test in ("gpt", "gpt_nondeterministic"))
    masks = 2 * kept.shape.layers * kept.micro_batch * kept.shape.sequence_length * kept.shape.hidden
    assert predict(kept).allocated_bytes - predict(plain).allocated_bytes == pytest.approx(masks, rel=0.05)


def test_recomputed_modules_other_than_the_attention_are_kept(tmp_path):
    change = {"recompute-granularity": "selective", "recompute-modules": "[layernorm moe_act]"}
    assert run_of(tmp_path, change).recompute == "none"
    for modules in ("", "[core_attn mlp]"):
        assert run_of(tmp_path, change | {"recompute-modules": modules}).recompute == "selective"


def test_a_layout_of_stages_tells_of_their_blocks(tmp_path):
    change = {"num-layers": "16", "pipeline-model-parallel-size": "2"}
    run = run_of(tmp_path, change, test_case="gpt_selective_recompute_experimental")
    assert (run.chunks, stages_of(run)) == (4, (4, 2, 2, 2, 2, 2, 2, 3))  # embedding, and head with another block


def test_deferred_gradients_of_the_output_layer_keep_two_micro_batches(tmp_path):
    plain, deferred = (run_of(tmp_path, test_case=name) for name in ("gpt", "gpt_defer_embedding_wgrad_compute"))
    kept = 2 * 2 * 4 * 128 * (deferred.shape.vocabulary // 2 + 256)
    assert predict(deferred).allocated_bytes - predict(plain).allocated_bytes == pytest.approx(kept, rel=1e-3)


def test_messages_between_stages_cost_the_host_at_both_ends(tmp_path):
    run = run_of(tmp_path, {"pipeline-model-parallel-size": "2"})
    assert tables_of(run)["cluster"]["backend_cost"]["posting_s"] == pytest.approx(9 * OVERHEAD_S)
    # of a rank, one each way for each micro-batch; some overlap with the other stage's work
    assert 0 < host_s(run, message_calls=0) <= 2 * (run.micro_batches + 1) * 9 * OVERHEAD_S
    assert "backend_cost" not in tables_of(run_of(tmp_path))["cluster"]


def test_a_gated_perceptron_of_a_gpt_has_no_other_norms_or_positions(tmp_path):
    plain, gated = (run_of(tmp_path, {"swiglu": word}) for word in ("", "True"))
    assert (gated.shape.kind, gated.shape.gated) == ("gpt", True)
    assert gated.shape.ffn == 640  # two thirds of 1024, in steps of 64
    assert gated.shape.parameters - plain.shape.parameters == 4 * 256 * (3 * 640 - 2 * 1024) + 4 * (640 - 1024)
    assert predict(gated).step_s == pytest.approx(predict(plain).step_s, rel=1e-3)  # as many operations


@pytest.mark.parametrize(("least_s", "steady"), [("0.099", True), ("0.081", True), ("0.079", False), ("", True)])
def test_tests_whose_steps_differ_much_are_scored_apart(tmp_path, least_s, steady):
    run = run_of(tmp_path, iter_time_min_s=least_s)
    assert run.source.endswith("H100-SXM-80GB") == steady


def test_a_decoder_behind_an_encoder_attends_to_both(tmp_path):
    """T5: an encoder's block has 12 h^2 parameters, a decoder's 16 h^2 and more operations.

    There are three products, a norm, an attention and an addition more than in an encoder's.
    """
    change = {"encoder-num-layers": "3", "decoder-num-layers": "2", "num-layers": "", "decoder-seq-length": "128"}
    run = run_of(tmp_path, change | {"attention-backend": "unfused", "seq-length": ""}, family="t5")
    assert run.shape.decoder is not None
    h, vocabulary = run.shape.hidden, run.shape.vocabulary
    assert run.shape.parameters == pytest.approx((3 * 12 + 2 * 16) * h * h + (vocabulary + 512) * h, rel=0.01)
    model = tables_of(run)["workload"]["model"]
    encoder, decoder = (
        next(each for each in model["layers"] if each["name"] == f"{name}.0") for name in ("blocks", "decoder")
    )
    more = 2 + 3 * 3 + 10 + 3
    assert decoder["forward_operations"] - encoder["forward_operations"] == more
    assert len(decoder["modules"]) == 2


def test_attention_to_an_encoder_grows_with_both_sequences(tmp_path):
    change = {"encoder-num-layers": "1", "decoder-num-layers": "2", "num-layers": "", "attention-backend": "unfused"}
    flop = {}
    for length in (64, 128):
        run = run_of(tmp_path, change | {"decoder-seq-length": str(length)}, family="t5")
        model = tables_of(run)["workload"]["model"]
        decoder = next(each for each in model["layers"] if each["name"] == "decoder.0")
        flop[length] = Polynomial.parse(decoder["forward_flop"]).at(b=1, s=512)
    h, maps = 256, 2 * 256 * 1024
    of_keys = 512 * 2 * 256 * 512  # of the encoder's output, whatever reads them
    for length, found in flop.items():
        products = length * 2 * (6 * h * h + maps)
        assert found == pytest.approx(of_keys + products + 4 * h * length * (length + 512), rel=1e-6)


@pytest.mark.parametrize(("test", "ranks"), [("gpt_small", 8), ("gpt_small_1node", 4)])
def test_recipes_tell_the_nodes_of_a_tests_second_half(tmp_path, test, ranks):
    change = {"nodes": "", "gpus_per_node": "", "n_gpus_source": "unknown"}
    run = run_of(tmp_path, change, test_case=test, platform="dev_dgx_gb200_2nd")
    assert (run.ranks, run.per_node) == (ranks, 4)


def test_release_tests_do_not_say_on_how_many_gpus(tmp_path):
    change = {"nodes": "", "gpus_per_node": "", "n_gpus_source": "unknown"}
    with pytest.raises(AssertionError, match="on how many GPUs"):
        run_of(tmp_path, change, test_case="gpt_release", platform="dev_dgx_gb200")


@pytest.mark.parametrize("part", ["mla", "gdn", "dsa", "modelopt_distill"])
def test_models_of_other_kinds_are_known_by_name_alone(tmp_path, part):
    for end in ("", "_1node"):
        with pytest.raises(AssertionError, match=r"attention|teaches"):
            run_of(tmp_path, test_case=f"gpt3_te_tp2_{part}{end}")


def test_products_in_float8_are_cast_before_them(tmp_path):
    """Inputs of a block's four products and their gradients are cast, in three operations each."""
    plain, float8 = (run_of(tmp_path, {"fp8-format": word}) for word in ("", "hybrid"))
    difference_s = predict(float8).step_s - predict(plain).step_s
    assert difference_s == pytest.approx(4 * 2 * 3 * passes(float8) * OVERHEAD_S, rel=0.01)


def test_stages_receive_into_buffers_of_what_is_in_flight(tmp_path):
    change = {"pipeline-model-parallel-size": "2", "num-layers-per-virtual-pipeline-stage": "1"}
    run = run_of(tmp_path, change)
    assert tables_of(run)["plan"]["receive_buffers"] == "in-flight"
    of_micro_batches = replace(run, software=replace(run.software, receives_in_flight=False))
    assert predict(run).allocated_bytes < predict(of_micro_batches).allocated_bytes
