"""Published tables: every row is a run or has a reason for being skipped; no row affects the others."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_rows import MEGATRON_ROW, fields

from analysis.literature import scenarios as outcomes_module
from analysis.literature.kernels import read_kernels
from analysis.literature.runs import Run, SkippedError, UnscoredError
from analysis.literature.scenarios import (
    INTERRUPTED,
    NoPrediction,
    Prediction,
    cluster_of_run,
    emit,
    predict,
    predict_or_explain,
    predict_runs,
    tables_of,
)
from analysis.literature.score import baseline_step_s, score
from analysis.literature.tables.reading import KINDS, read_table
from analysis.literature.transformer import TransformerBuilder
from gssim.cluster import Link, presets
from gssim.errors import UserError
from gssim.units import validated
from gssim.workload import Polynomial

ROWS: dict[str, dict[str, str]] = {
    "many": fields(
        "id=a | source=here | system= | gpu=A100-SXM-80GB | n_gpus=2 | gpus_per_node=8 | model=GPT-tiny | "
        "layers=4 | hidden=512 | heads=8 | kv_heads= | ffn= | vocab=1024 | seq=128 | micro_batch=2 | "
        "global_batch=16 | ga= | dp=2 | tp=1 | pp=1 | vpp= | cp= | ep= | sharding=none (DDP) | "
        "precision=fp16 | recompute=full | compile= | extras= | iter_time_s=0.05 | mem_gib=3 | "
        "mem_kind=nvidia-smi | note="
    ),
    "vtrain": fields(
        "# GPUs=8 | global batch=16 | micro batch=2 | hidden size=512 | attention heads=8 | # layers=4 | "
        "sequence length=128 | tensor parallelism=2 | data parallelism=2 | pipeline parallelism=2 | "
        "iteration time (ms)=20.5"
    ),
    "sailor": fields(
        "cluster=c | model=OPT-350 | nodes=2 | pp=2 | dp=1 | layers_per_stage=12/14 | "
        "stages=GH-96x4:tp4 ; GH-96x4:tp4 | mbs=1 | gbs=4 | measured_iter_s=0.6 | measured_max_mem_bytes=9e9"
    ),
    "megatron": MEGATRON_ROW
    | fields(
        "family=gpt | test_case=gpt_small | pipeline-model-parallel-size=2 | context-parallel-size= | "
        "sequence-parallel=True | use-distributed-optimizer=True | attention-backend=unfused"
    ),
    "amp": fields(
        "experiment=homogeneous | partition=[0, 15, 30] | micro_batch=2 | tp=1 | dp=8 | pp=2 | measured_iter_s=1.4"
    ),
    "diloco": fields(
        "run=localsgd-h8 | algorithm=localsgd | H=8 | world_size=4 | gpu=L40S, one per host | bandwidth=1g | "
        "n_params=30846720 | micro_batch=4 | seq=512 | outer_step_ms_median=1527 | sync_ms_median=1500 | "
        "compute_ms_median=25"
    ),
    "simumax": fields(
        "case=llama3_8b_tp2_pp1_dp4_l2_mbc2_cef | gpu=B200-SXM | n_gpus=8 | model=llama3_8b | layers=2 | "
        "tp=2 | pp=1 | dp=4 | ep=1 | cp=1 | seq=1024 | micro_batch=1 | micro_batches=2 | iter_time_ms=50 | "
        "peak_allocated_gib_max=12"
    ),
    "nemo": fields(
        "source=NeMo summary | release=24.07 | published=2024-09 | gpu=H100 | n_gpus=8 | model=llama2-7b | layers=4 | "
        "tuning= | precision=fp8 | seq=512 | gbs=16 | mbs=1 | tp=2 | pp=2 | cp=1 | vp=2 | recompute= | tp_overlap= | "
        "attention=cudnn | step_s= | tokens_per_s_per_gpu=20000 | note= | url=here"
    ),
    "foundry": fields(
        "Model=125m | SeqLen (T)=256 | # GPUs=8 | GPU=h100_80gb | MicroBatchSize=2 | GlobalBatchSize=32 | "
        "Throughput (T/s)=1000000 | Precision=amp_bf16 | Sharding Strategy=FULL_SHARD | "
        "Activation Checkpointing=False | Activation CPUOffload=False | NumParams="
    ),
}
ODD = [
    "",
    "?",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "8",
    "1e99",
    "inf",
    "nan",
    "2.5",
    "1,024",
    "none",
    "yes",
    "\u00fc",
    "[",
    "0/0",
]


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("name", ROWS)
def test_every_kind_of_table_is_read_and_predicted(tmp_path, name):
    ((_, _, run),) = read_table(table(tmp_path / f"{name}.csv", ROWS[name]))
    assert isinstance(run, Run), run
    found = predict(run)
    assert 0 < found.step_s < 60
    assert 0 < found.allocated_bytes <= found.reserved_bytes <= found.device_bytes


def test_every_kind_has_a_row_here():
    assert len({kind.name for kind in KINDS}) == len(ROWS)
    assert all(any(kind.columns <= set(row) for row in ROWS.values()) for kind in KINDS)


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_values_make_no_table_unreadable(tmp_path, name, data):
    row = dict(ROWS[name])
    for key in data.draw(st.lists(st.sampled_from(sorted(row)), min_size=1, max_size=4, unique=True)):
        row[key] = data.draw(st.sampled_from(ODD))
    ((_, _, found),) = read_table(table(tmp_path / "t.csv", row))
    assert isinstance(found, Run | SkippedError)
    if isinstance(found, SkippedError):
        assert str(found)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_end_early_or_lack_columns_are_skipped_with_a_reason(tmp_path, name):
    (kind,) = [kind for kind in KINDS if kind.columns <= set(ROWS[name])]
    path = tmp_path / "t.csv"
    path.write_text(",".join(sorted(kind.columns)) + "\n" + "1\n" + "\n" + ",".join(["1"] * 99) + "\n")
    for _, _, found in read_table(path):
        assert isinstance(found, SkippedError)
        assert str(found)


def test_the_network_of_rows_that_synchronize_periodically_is_known_from_one_of_their_rate(tmp_path):
    """The row that tells the rate is not scored; the others of that rate are. Without such a row, the rate is that to
    which links are shaped; those of no known rate are skipped."""
    told = ROWS["diloco"]
    changes = (
        {},
        {"run": "b", "algorithm": "diloco", "H": "32"},
        {"run": "c", "bandwidth": "50m", "sync_ms_median": ""},
        {"run": "d", "bandwidth": "unshaped", "sync_ms_median": ""},
    )
    path = tmp_path / "t.csv"
    rows = [told | change for change in changes]
    path.write_text("\n".join([",".join(told), *(",".join(f'"{v}"' for v in row.values()) for row in rows)]) + "\n")
    first, second, third, fourth = (found for _, _, found in read_table(path))
    assert first.calibration
    assert not second.calibration
    assert second.measured.link_bytes_per_s == pytest.approx(1.5 * 4 * 30846720 / 1.5)
    assert third.measured.link_bytes_per_s == 50e6 / 8
    assert not third.calibration
    assert isinstance(fourth, SkippedError)
    assert predict(first).step_s == pytest.approx(1.527, rel=0.01)
    # the outer optimizer passes over the parameters' 123 MB eleven times more than a mean, three of them before
    passes_s = (11 + 3) * 4 * 30846720 / 596e9
    assert predict(second).step_s - predict(first).step_s == pytest.approx(passes_s, rel=0.05)


def test_a_table_without_rows_has_no_scores(tmp_path):
    path = table(tmp_path / "t.csv", ROWS["many"])
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert score([path]).sources == ()


def test_a_byte_order_mark_and_spaces_in_the_header_change_nothing(tmp_path):
    path = table(tmp_path / "t.csv", ROWS["vtrain"])
    path.write_text("\ufeff" + path.read_text().replace(",", " ,"), encoding="utf-8")
    ((_, _, run),) = read_table(path)
    assert isinstance(run, Run)


@pytest.mark.parametrize(("tp", "vocabulary"), [(1, 50304), (8, 51200)])
def test_vtrains_vocabulary_is_that_of_its_configurations_as_megatron_pads_it(tmp_path, tp, vocabulary):
    """50257 (vTrain, src/config.py), padded to a multiple of 128 for each tensor rank."""
    axes = {"# GPUs": "8", "tensor parallelism": str(tp), "data parallelism": str(8 // tp)}
    change = axes | {"pipeline parallelism": "1", "global batch": "64", "micro batch": "1"}
    ((_, _, run),) = read_table(table(tmp_path / "t.csv", ROWS["vtrain"] | change))
    assert isinstance(run, Run)
    assert run.shape.vocabulary == vocabulary


# Variants ------------------------------------------------------------------------------------------------------------

VARIANTS = [
    {"hidden": "1024", "heads": "16"},
    {"layers": "7"},
    {"n_gpus": "16", "dp": "4", "tp": "4"},
    {"n_gpus": "16", "dp": "1", "tp": "2", "pp": "8", "layers": "8", "global_batch": "16"},
    {"n_gpus": "8", "dp": "2", "pp": "4", "layers": "8", "vpp": "2"},
    {"n_gpus": "1", "dp": "1"},
    {"micro_batch": "8"},
    {"micro_batch": "", "ga": ""},
    {"recompute": "none"},
    {"recompute": "selective-op"},
    {"dp": "", "n_gpus": "8"},
    {"sharding": "FSDP"},
    {"sharding": "FSDP SHARD_GRAD_OP"},
    {"sharding": "DDP+dist-opt", "source": "NVIDIA-NeMo/Megatron-Bridge", "recompute": ""},
    {"sharding": "DDP+dist-opt", "n_gpus": "8", "pp": "2", "tp": "2"},
    {"model": "llama3-tiny", "kv_heads": "2", "sharding": "FSDP", "source": "torchtitan", "compile": "yes"},
    {"model": "llama3-tiny", "sharding": "FSDP", "source": "torchtitan", "n_gpus": "16", "tp": "8"},
    {"model": "llama3-tiny", "sharding": "FSDP", "n_gpus": "8", "cp": "4", "precision": "bf16"},
    {"model": "BERT-large", "precision": "TF32", "recompute": "none"},
    {"gpu": "V100-SXM2-16GB"},
    {"gpu": "V100-SXM3-32GB", "gpus_per_node": "16"},
    {"gpu": "H100", "precision": "FP8-CS", "extras": "overlap-grad-reduce"},
    {"gpu": "B200", "gpus_per_node": ""},
    {"gpu": "GB200"},
    {"gpu": "H200-SXM-141GB"},
    {"gpu": "A100-40GB", "gpus_per_node": "1"},
]


@pytest.mark.parametrize("change", VARIANTS, ids=lambda change: " ".join(f"{k}={v}" for k, v in change.items()))
def test_variants_of_a_row_are_predicted(tmp_path, change):
    ((_, _, run),) = read_table(table(tmp_path / "t.csv", ROWS["many"] | change))
    assert isinstance(run, Run), run
    found = predict_or_explain(run)
    assert isinstance(found, Prediction), found
    assert 0 < found.step_s < 60


def run_of(tmp_path: Path, **change: str) -> Run:
    ((_, _, run),) = read_table(table(tmp_path / "t.csv", ROWS["many"] | change))
    assert isinstance(run, Run), run
    return run


def test_more_work_takes_longer_and_more_memory(tmp_path):
    plain = predict(run_of(tmp_path))
    for change in ({"layers": "8"}, {"hidden": "1024"}, {"seq": "512"}, {"micro_batch": "4", "global_batch": "32"}):
        more = predict(run_of(tmp_path, **change))
        assert more.step_s >= plain.step_s, change  # equal where the host bounds both
        assert more.allocated_bytes > plain.allocated_bytes, change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_gpus": "200000", "dp": "200000", "global_batch": "400000"}, "more GPUs or layers than any run has"),
        ({"heads": "7"}, "heads do not divide evenly"),
        ({"n_gpus": "16", "pp": "8"}, "more stages than layers"),
        ({"n_gpus": "8", "pp": "4", "vpp": "1", "layers": "8", "sharding": "FSDP"}, "FSDP over the stages"),
    ],
)
def test_what_there_cannot_have_been_or_is_not_modelled_says_so(tmp_path, change, reason):
    ((_, _, found),) = read_table(table(tmp_path / "t.csv", ROWS["many"] | change))
    text = str(found) if isinstance(found, SkippedError) else getattr(predict_or_explain(found), "reason", "")
    assert text.startswith(reason)


def sailor_run(tmp_path: Path, stages: str, pp: int) -> Run | SkippedError:
    layers = {1: "26", 2: "12/14"}[pp]
    change = {"stages": stages, "layers_per_stage": layers, "pp": str(pp), "gbs": "8"}
    ((_, _, found),) = read_table(table(tmp_path / "t.csv", ROWS["sailor"] | change))
    return found


def test_unlike_servers_are_as_slow_as_their_slower_stage_at_least(tmp_path):
    fast, mixed, slow = (
        sailor_run(tmp_path, f"{first}x4:tp2|{first}x4:tp2 ; {last}x4:tp2|{last}x4:tp2", 2)
        for first, last in (("A100-40", "A100-40"), ("A100-40", "V100-16"), ("V100-16", "V100-16"))
    )
    assert isinstance(fast, Run)
    assert isinstance(mixed, Run)
    assert isinstance(slow, Run)
    assert mixed.servers == (("A100-40", 4), ("V100-16", 4))
    assert mixed.source == "Sailor validation, OPT-350 on A100-40 and V100-16"
    times_s = [predict(each).step_s for each in (fast, mixed, slow)]
    assert times_s == sorted(times_s)
    assert baseline_step_s(fast) < baseline_step_s(mixed) < baseline_step_s(slow)


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ("GH-96x4:tp4 ; GH-96x4:tp2", "replicas with unequal numbers of tensor ranks"),
        ("GH-96x4:tp4|GH-96x4:tp4 ; GH-96x4:tp4", "stages with unequal numbers of replicas"),
        ("GH-96x4:tp4 ; GH-96x0:tp4", "stages that cannot be read"),
    ],
)
def test_stages_that_are_not_cut_or_copied_alike_are_skipped(tmp_path, stages, reason):
    assert str(sailor_run(tmp_path, stages, 2)) == reason


def test_a_gpu_that_is_not_known_among_others_is_skipped(tmp_path):
    run = sailor_run(tmp_path, "GH-96x4:tp4 ; abacusx4:tp4", 2)
    assert isinstance(run, Run)
    assert predict_or_explain(run) == NoPrediction("a GPU that platforms.toml does not know")


def test_fsdp_over_a_pipeline_keeps_what_a_sharded_optimizer_does(tmp_path):
    change = fields(
        "model=llama3-tiny | source=torchtitan | sharding=FSDP | n_gpus=8 | dp=2 | pp=4 | layers=8 | micro_batch=8"
    )
    run = run_of(tmp_path, **change)
    assert (run.method, run.micro_batch, run.micro_batches) == ("zero1", 2, 4)
    assert run.software.float_gradients
    ((_, _, found),) = read_table(table(tmp_path / "t.csv", ROWS["many"] | change | {"vpp": "?"}))
    assert str(found) == "the row does not say vpp"


@pytest.mark.parametrize(
    ("word", "method", "shards"),
    [
        ("none", "ddp", None),
        ("DDP (AMP)", "ddp", None),
        ("single GPU ga=4", "ddp", None),
        ("distributed optimizer? (not stated)", "zero1", None),
        ("ZeRO-1", "zero1", None),
        ("DeepSpeed ZeRO stage 2", "zero2", None),
        ("ZeRO-3", "zero3", None),
        ("FSDP FULL_SHARD", "zero3", None),
        ("HSDP", "zero3", 4),
        ("FSDP HYBRID_SHARD", "zero3", 4),
    ],
)
def test_words_for_sharding(tmp_path, word, method, shards):
    run = run_of(tmp_path, sharding=word, n_gpus="8", dp="8", gpus_per_node="4", global_batch="16")
    assert (run.method, run.shards) == (method, shards)
    plan = tables_of(run)["plan"]
    assert plan.get("dp_shard") == (shards or (8 if method in ("zero2", "zero3") else None))
    assert plan.get("dp_replicate") == (2 if shards else None if method in ("zero2", "zero3") else 8)
    assert isinstance(predict_or_explain(run), Prediction)


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("many", "model=OPT-125M | sharding=ZeRO-2", {"method": "zero2"}),
        ("many", "model=Qwen2.5-7B | kv_heads=4", {"method": "ddp"}),
        (
            "many",
            "model=Mixtral-8x7B | source=NVIDIA-NeMo/Megatron-Bridge | sharding=DDP+dist-opt | n_gpus=64 | dp=32 | "
            "tp=2 | global_batch=64 | ep=8",
            {"ep": 8, "etp": 1},
        ),
        (
            "many",
            "model=DeepSeek-V3 | source=NVIDIA-NeMo/Megatron-Bridge | sharding=DDP+dist-opt | n_gpus=256 | dp=32 | "
            "tp=2 | pp=4 | vpp=4 | global_batch=128 | ep=64 | gpu=H100 | precision=FP8-SC",
            {"ep": 64, "etp": 1},
        ),
        ("foundry", "Sharding Strategy=NO_SHARD", {"method": "ddp"}),
        ("foundry", "Sharding Strategy=HYBRID_SHARD | # GPUs=16", {"dp_shard": 8, "dp_replicate": 2}),
        ("simumax", "tp=4 | pp=2 | dp=1", {"method": "pipeline", "tp": 4, "pp": 2}),
        ("simumax", "model=deepseekv3 | tp=2 | dp=4 | ep=8", {"tp": 2, "ep": 8, "etp": 1}),
        ("simumax", "model=deepseekv2 | tp=1 | dp=8 | ep=1", {"method": "zero1", "ep": None}),
    ],
)
def test_rows_of_the_same_kinds_with_other_models_and_plans_are_predicted(tmp_path, kind, change, expected):
    ((_, _, run),) = read_table(table(tmp_path / "t.csv", ROWS[kind] | fields(change)))
    assert isinstance(run, Run), run
    plan = tables_of(run)["plan"]
    assert {key: plan.get(key) for key in expected} == expected
    assert isinstance(predict_or_explain(run), Prediction)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("DeepSeek-V2-Lite", "neither a GPT, a Llama nor a BERT"),
        ("DeepSeekV3-16B", "neither a GPT, a Llama nor a BERT"),
        ("Nemotron-H-8B", "neither a GPT, a Llama nor a BERT"),
        ("Nemotron Nano 9B v2", "neither a GPT, a Llama nor a BERT"),
        ("Qwen2-57B-A14B", "a mixture of experts"),
        ("GPT-OSS-20B", "a mixture of experts"),
        ("Mixtral-8x3B", "a mixture of experts"),
        ("Nemotron-4 15B", None),
        ("GPT-1536x16", None),
        ("Qwen3-30B-A3B", None),
    ],
)
def test_models_of_other_blocks_are_not_taken_for_those_whose_name_they_begin_with(tmp_path, model, reason):
    """DeepSeek-V2-Lite was predicted as DeepSeek-V2, a hybrid of Mamba as a GPT, a mixture as a dense Llama."""
    ((_, _, found),) = read_table(table(tmp_path / "t.csv", ROWS["many"] | {"model": model}))
    assert isinstance(found, Run) if reason is None else str(found) == reason


def test_a_rack_is_one_domain_of_nvlink_whatever_its_trays_hold(tmp_path):
    trays = run_of(tmp_path, system="DGX-GB200", gpu="GB200", gpus_per_node="4", n_gpus="8", dp="8")
    (server,) = tables_of(trays)["cluster"]["topology"]["servers"]
    assert (server["count"], server["devices"]) == (1, 8)


@pytest.mark.parametrize(
    ("gpu", "rate_gbit_per_s"), [("A100-SXM-80GB", 400), ("H100-SXM-80GB", 800), ("A100-SXM-40GB", 1600)]
)
def test_servers_of_ibm_have_its_network(tmp_path, gpu, rate_gbit_per_s):
    """400 and 800 Gbit/s (heads of fms-fsdp's table), less a tenth; others have their data sheet's."""
    run = run_of(tmp_path, system="IBM 16x GPUs", gpu=gpu, n_gpus="16", dp="16", global_batch="32")
    cluster = tables_of(run)["cluster"]
    (server,) = cluster["topology"]["servers"]
    network = validated(Link, {"between": ["a", "b"], **presets("links")[server["nic_link"]]}, file="links")
    rate = server["nics"] * 8 * network.bandwidth_bytes_per_s / 1e9
    assert rate_gbit_per_s * 0.85 < rate <= rate_gbit_per_s


@pytest.mark.parametrize(("gpu", "own", "of_cudnn"), [("H100", 0.58, 0.87), ("B200", 0.58, 0.73), ("A100", 0.74, 0.74)])
def test_megatron_bridge_has_the_attention_of_cudnn_where_its_rate_is_known(tmp_path, gpu, own, of_cudnn):
    change = {"model": "llama3-tiny", "gpu": gpu, "precision": "BF16", "sharding": "DDP+dist-opt", "recompute": "none"}
    others, bridge = (run_of(tmp_path, **change, source=source) for source in ("NeMo", "NVIDIA-NeMo/Megatron-Bridge"))
    assert (others.software.attention_ratio, bridge.software.attention_ratio) == (own, of_cudnn)


def test_rows_with_gpus_of_several_kinds_are_skipped_with_a_reason(tmp_path):
    change = {"gpu": "A100-SXM-80GB + V100-SXM2-16GB"}
    ((_, _, found),) = read_table(table(tmp_path / "t.csv", ROWS["many"] | change))
    assert str(found) == "GPUs of several kinds, of which the row does not say where they are"


def test_early_zero3_gathers_each_tensor_from_a_list_of_all_ranks_parts(tmp_path):
    """4 matrices a block are gathered and 12 tensors reduce-scattered, part by part: 16 copies more for each rank."""
    change = fields("source=Narayanan SC21 Table 2 | sharding=ZeRO-3 | micro_batch=1 | recompute=full")
    step_s = {}
    for ranks in (8, 16):
        run = run_of(tmp_path, **change, n_gpus=str(ranks), dp=str(ranks), global_batch=str(ranks))
        cost = tables_of(run)["cluster"]["backend_cost"]
        device = cluster_of_run(run).device_types["gpu"]
        assert cost["overhead_rank_s"]["all-gather"] == pytest.approx(4 * device.operation_overhead_s)
        assert cost["overhead_rank_s"]["reduce-scatter"] == pytest.approx(12 * device.operation_overhead_s)
        step_s[ranks] = predict(run).step_s
        others = replace(run, software=replace(run.software, lists_ranks=False))
        assert "backend_cost" not in tables_of(others)["cluster"]
        copies = ranks * 4 * (2 * 4 + 12)  # in each of four blocks, two gathers and a reduce-scatter
        assert step_s[ranks] > predict(others).step_s + copies * device.operation_overhead_s
    assert step_s[16] > step_s[8]


def test_an_unknown_word_for_sharding_is_named(tmp_path):
    ((_, _, found),) = read_table(table(tmp_path / "t.csv", ROWS["many"] | {"sharding": "gossip"}))
    assert str(found) == "sharding 'gossip' is not known"


def test_megatrons_selective_recomputation_reruns_attention_alone(tmp_path):
    """5as^2b bytes a layer go (Korthikanti et al. 2022, section 5), and only full recomputation takes the rest."""
    change = {"layers": "8", "hidden": "512", "heads": "8", "seq": "1024", "n_gpus": "2", "dp": "1", "tp": "2"}
    change |= {"source": "Korthikanti 2205.05198", "micro_batch": "1", "global_batch": "1", "precision": "fp16"}
    none, selective, full = (
        run_of(tmp_path, **change, recompute=word, extras="sequence parallel") for word in ("none", "selective", "full")
    )
    assert selective.software.recomputes_attention
    assert selective.software.sequence_parallel
    scores = 5 * 8 * 1024**2 / 2
    peaks = [predict(each).allocated_bytes for each in (none, selective, full)]
    assert (peaks[0] - peaks[1]) / 8 == pytest.approx(scores, rel=0.15)  # one layer's exist again
    assert peaks[1] > peaks[2]
    times_s = [predict(each).step_s for each in (none, selective, full)]
    assert times_s == sorted(times_s)


@pytest.mark.parametrize(("micro_batch", "fuses"), [("1", False), ("2", True)])
def test_megatrons_fused_softmax_takes_multiples_of_four_heads(tmp_path, micro_batch, fuses):
    change = {"# GPUs": "8", "tensor parallelism": "8", "data parallelism": "1", "pipeline parallelism": "1"}
    change |= {"attention heads": "16", "hidden size": "512", "micro batch": micro_batch, "global batch": "8"}
    ((_, _, run),) = read_table(table(tmp_path / "t.csv", ROWS["vtrain"] | change))
    assert isinstance(run, Run)
    assert run.software.fused_softmax is fuses
    every = TransformerBuilder(run.shape, run.software, ranks=1).block()
    (softmax,) = [each for each in every if each.name == "softmax"]
    length, heads = run.shape.sequence_length, run.shape.heads
    sizes = [size.at(b=1, s=length) / (heads * length**2) for size in (softmax.streamed, softmax.backward_streamed)]
    # a score in 16 bits is read and written by one kernel; or cast to float, scaled, masked, normalised and cast back
    assert (sizes, softmax.kernels) == (([4, 6], 1) if fuses else ([36, 40], 5))


def test_amps_unlike_machines_are_three_of_v100_and_a_last_one_of_t4(tmp_path):
    change = {"experiment": "het_cluster", "partition": "[0, 7, 14, 20, 30]", "dp": "4", "pp": "4", "micro_batch": "1"}
    ((_, _, run),) = read_table(table(tmp_path / "t.csv", ROWS["amp"] | change))
    assert isinstance(run, Run)
    assert run.source == "AMP, GPT-2 medium on 12 V100-16-AWS and 4 T4"
    assert [gpu for gpu, _ in run.servers] == ["V100-16-AWS"] * 3 + ["T4"]
    assert run.blocks_of_stages == (5, 7, 6, 6)


def test_stages_of_a_tied_model_sum_the_gradients_of_its_embedding(tmp_path):
    """Over 10 Gbit/s, four pairs of ranks sum 51.5 million gradients of 16 bits: 0.37 s of a step."""
    change = {"experiment": "het_cluster", "partition": "[0, 7, 14, 20, 30]", "dp": "4", "pp": "4", "micro_batch": "1"}
    ((_, _, run),) = read_table(table(tmp_path / "t.csv", ROWS["amp"] | change))
    assert isinstance(run, Run)
    apart = replace(run, sums_tied_gradients=False)
    seconds = 4 * 2 * run.shape.vocabulary * run.shape.hidden / 1.1e9
    assert predict(run).step_s - predict(apart).step_s == pytest.approx(seconds, rel=0.15)


def test_hosts_of_megatrons_tests_take_longer_to_launch_an_operation(tmp_path):
    ((_, _, run),) = read_table(table(tmp_path / "t.csv", ROWS["megatron"]))
    assert isinstance(run, Run)
    device = tables_of(run)["cluster"]["device_types"]["gpu"]
    assert device["operation_overhead_s"] == run.software.operation_overhead_s == 33e-6
    usual = replace(run, software=replace(run.software, operation_overhead_s=None))
    assert predict(usual).step_s < predict(run).step_s


def test_kernels_have_the_rates_of_a_measured_table(tmp_path):
    lines = [
        "op,shape,tflops_peak,efficiency",
        'matmul,"b=1, m=64, k=32, n=16, layout=TN, accumulate=False, out_dtype=bf16",100,0.5',
        'matmul,"b=1, m=16, k=64, n=32, layout=NT, accumulate=True, out_dtype=bf16",100,0.9',
        'matmul,"b=1, m=16, k=64, n=32, layout=NT, accumulate=True, out_dtype=fp32",100,0.25',
        'sdp_fwd,"batch=1, seq_len=64, head_num=8, kv_head_num=2, qk_head_dim=4, v_head_dim=4",100,0.1',
        "sdp_fwd,default,100,0.7",
    ]
    (tmp_path / "ops.csv").write_text("\n".join(lines))
    kernels = read_kernels(tmp_path / "ops.csv")
    assert kernels.product_flop_per_s("TN", 60, 32, 16) == 50e12
    assert kernels.product_flop_per_s("NT", 16, 64, 32) == 25e12  # added to one in float
    assert kernels.product_flop_per_s("NN", 1, 1, 1) is None
    assert kernels.attention_flop_per_s("f", 8, 2, 128) == 10e12
    assert kernels.streaming == {}
    (tmp_path / "b200_ops.csv").write_text("\n".join(lines))
    rates = ["name,efficient_factor,gbps,latency_us,value", "default,0.5,8000,30,", "network:intra,,,,false"]
    (tmp_path / "b200_bandwidth.csv").write_text("\n".join(rates))
    assert read_kernels(tmp_path / "b200_ops.csv").streaming == {"default": (4e12, 30 * 1e-6)}


def test_the_generator_of_a_gan_has_wide_blocks_and_then_narrow_ones_in_windows(tmp_path):
    """Attention within 256 windows of 324 places: scores of 4 heads, 2 bytes each, read or written 26 times."""
    plan = {"experiment": "het_model", "partition": "[0, 12, 44, 49, 56]", "dp": "4", "pp": "4", "micro_batch": "1"}
    ((_, _, run),) = read_table(table(tmp_path / "t.csv", ROWS["amp"] | plan))
    assert isinstance(run, Run)
    assert (run.blocks_of_stages, run.micro_batches, run.recompute) == ((9, 6, 5, 4), 16, "none")
    _, wide, narrow, _ = tables_of(run)["workload"]["model"]["layers"]
    assert (len(wide["modules"]), len(narrow["modules"])) == (12, 12)
    streamed = [Polynomial.parse(narrow[f"{phase}_streamed_bytes"]) for phase in ("forward", "backward")]
    of_scores = 26 * 256 * 4 * 324**2 * 2
    assert of_scores < sum(each.at(b=1, s=81) for each in streamed) < 1.3 * of_scores
    assert run.shape.parameters == pytest.approx(12 * 12 * (1024**2 + 16**2) + 512 * 81 * 1024 * 2, rel=0.01)


def test_rows_without_a_figure_are_written_but_not_scored(tmp_path):
    """Rows that leave out assumable details are also written but not scored; rows of unknown models are not written."""
    rows = [
        ROWS["many"] | {"id": "a", "iter_time_s": "", "mem_gib": ""},
        ROWS["many"] | {"id": "b", "tp": "", "pp": "", "extras": "model-parallel 2", "dp": "1"},
        ROWS["many"] | {"id": "c", "model": "ResNet"},
    ]
    records = [row for _, _, row in read_table(table(tmp_path / "t.csv", *rows))]
    assert [type(row) for row in records] == [UnscoredError, UnscoredError, SkippedError]
    reasons = [
        "the row has neither a time nor a memory",
        "the row does not say tp",
        "neither a GPT, a Llama nor a BERT",
    ]
    assert [str(row) for row in records] == reasons
    assert isinstance(records[1], UnscoredError)
    assert (records[1].run.tp, records[1].run.pp) == (2, 1)
    paths, skipped = emit(records, tmp_path / "out")
    assert [path.stem for path in paths] == ["a", "b"]
    assert skipped == {"neither a GPT, a Llama nor a BERT": 1}


# Many runs -----------------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_name_alone_are_predicted_once(tmp_path, monkeypatch):
    asked = []

    def counted(run: Run) -> Prediction:
        asked.append(run)
        return Prediction(1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(outcomes_module, "predict", counted)
    run = run_of(tmp_path)
    done: list[int] = []
    found = predict_runs(
        [run, replace(run, identity="b", step_s=9.0), replace(run, micro_batch=4)], on_done=done.append
    )
    assert len(asked) == 2
    assert found[0] is found[1]
    assert sorted(done) == [0, 1, 2]


def test_a_fault_of_ours_ends_its_row_alone_and_is_told(tmp_path, monkeypatch):
    def failing(run: Run) -> Prediction:
        if run.micro_batch == 2:
            raise ZeroDivisionError("oh")
        return Prediction(1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(outcomes_module, "predict", failing)
    rows = [ROWS["many"], ROWS["many"] | {"id": "b", "micro_batch": "4"}]
    found = score([table(tmp_path / "t.csv", *rows)])
    (source,) = found.sources
    assert [row.identity for row in source.rows] == ["b"]
    assert source.skipped == {"internal error (ZeroDivisionError)": 1}
    assert "oh" in found.faults[0]


def test_an_interrupt_leaves_what_is_finished(tmp_path, monkeypatch):
    def interrupted(run: Run) -> Prediction:
        if run.micro_batch == 2:
            raise KeyboardInterrupt
        return Prediction(1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(outcomes_module, "predict", interrupted)
    run = run_of(tmp_path)
    found = predict_runs([replace(run, micro_batch=4), run, replace(run, micro_batch=8)])
    assert isinstance(found[0], Prediction)
    assert found[1:] == [NoPrediction(INTERRUPTED)] * 2


def test_processes_find_what_one_finds(tmp_path):
    runs = [run_of(tmp_path), run_of(tmp_path, layers="2")]
    assert predict_runs(runs, jobs=2) == predict_runs(runs, jobs=1)


def test_files_that_cannot_be_read_are_told_beside_those_that_can(tmp_path):
    good, other = table(tmp_path / "t.csv", ROWS["amp"] | {"measured_iter_s": "inf"}), tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    found = score([good, other])
    assert found.sources[0].skipped == {"the row has no time (inf: it did not fit)": 1}
    assert "match no table of runs" in found.unreadable[0]
    with pytest.raises(UserError, match="match no table of runs"):
        score([other])
