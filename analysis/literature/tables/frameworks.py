"""Readers of the tables that frameworks keep of themselves: LLM Foundry's benchmarks, Megatron-LM's functional tests.

LLM Foundry: MPT models under FSDP on A100 and H100. Hyper-parameters follow from the models' names (llm-foundry,
scripts/train/benchmarking and yamls of the MPT family); they are checked against the number of parameters that a row
states.

Megatron-LM: step times and memory of the last rank, from the tests' golden values. Most run in deterministic mode, and
models are small: step times are bound by the host, which issues the kernels.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from analysis.literature.platforms import attention_ratio_of, first_attention_ratio_of, float8_ratio_of
from analysis.literature.runs import (
    MEGATRON_CLIP_NORM,
    MEGATRON_MESSAGE_CALLS,
    Decoder,
    Experts,
    Latent,
    Run,
    Shape,
    SkippedError,
    Software,
    UnscoredError,
    gpt,
)
from analysis.literature.tables.fields import (
    count,
    divided,
    method_of,
    micro_batches_of,
    needed,
    number,
    padded,
    positive,
)
from gssim.plan import MethodName

FOUNDRY_GPUS = {"a100_40gb": "A100-SXM-40GB", "a100_80gb": "A100-SXM-80GB", "h100_80gb": "H100-SXM-80GB"}
MPT_MODELS = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, width, heads."""
MPT_VOCABULARY = 50368
CLOSE_RATIO = 0.01
"""Allowed deviation of the stated number of parameters from that of the named model."""
ID_KEYS = ("Model", "# GPUs", "GPU", "SeqLen (T)", "MicroBatchSize", "GlobalBatchSize", "Precision")
"""Columns that identify a row."""
STRATEGIES: dict[str, MethodName] = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "zero3",
    "_HYBRID_SHARD_ZERO2": "zero2",
}
"""Method by FSDP's strategy; the hybrid ones shard inside a server."""
FOUNDRY_NODE = 8
PRECISIONS = ("bf16", "amp_bf16", "amp_fp16", "amp_fp8")


def llm_foundry(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing or unsupported fields."""
    if record["Sharding Strategy"] not in STRATEGIES:
        raise SkippedError(f"sharding '{record['Sharding Strategy']}' is not known")
    if record["GPU"] not in FOUNDRY_GPUS:
        raise SkippedError("a GPU that platforms.toml does not know")
    ranks, micro, batch = (needed(record, key) for key in ("# GPUs", "MicroBatchSize", "GlobalBatchSize"))
    if record["Activation CPUOffload"] == "True":
        raise SkippedError("activations go to the host")
    shape, rate = _mpt_shape(record), positive(record, "Throughput (T/s)")
    return Run(
        identity="foundry " + " ".join(record[key] for key in ID_KEYS),
        source=f"LLM Foundry, {FOUNDRY_GPUS[record['GPU']]}",
        gpu=FOUNDRY_GPUS[record["GPU"]],
        per_node=FOUNDRY_NODE,
        shape=shape,
        software=_mpt_software(record),
        method=STRATEGIES[record["Sharding Strategy"]] if ranks > 1 else "single",
        shards=math.gcd(ranks, FOUNDRY_NODE) if "HYBRID" in record["Sharding Strategy"] and ranks > 1 else None,
        dp=ranks,
        micro_batch=micro,
        micro_batches=micro_batches_of(batch, ranks, micro),
        recompute="full" if record["Activation Checkpointing"] == "True" else "none",
        overlap=True,
        step_s=batch * shape.sequence_length / rate if rate else None,
    )


def _mpt_shape(record: Mapping[str, str]) -> Shape:
    name, stated = record["Model"].lower(), number(record, "NumParams")
    if name not in MPT_MODELS:
        raise SkippedError(f"the model {record['Model']} is not known")
    layers, hidden, heads = MPT_MODELS[name]
    shape = gpt(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=MPT_VOCABULARY,
        sequence_length=needed(record, "SeqLen (T)"),
    )
    if stated and abs(stated / shape.parameters - 1) > CLOSE_RATIO:
        raise SkippedError("the row's parameters are not those of a model of that name")
    return shape


def _mpt_software(record: Mapping[str, str]) -> Software:
    precision = record["Precision"]
    if precision not in PRECISIONS:
        raise SkippedError(f"precision '{precision}' is not modelled")
    float8 = precision == "amp_fp8"
    if float8 and float8_ratio_of(FOUNDRY_GPUS[record["GPU"]]) is None:
        raise SkippedError("a GPU whose rate in float8 platforms.toml does not know")
    return Software(
        flash_attention=True,
        attention_ratio=first_attention_ratio_of(FOUNDRY_GPUS[record["GPU"]]),
        dropout=False,
        float8_maps=float8,
    )


# Megatron-LM ----------------------------------------------------------------------------------------------------------

GPUS = {"a100": "A100-SXM-80GB", "h100": "H100-SXM-80GB", "gb200": "GB200"}
"""GPU by the part of the platform's name that identifies it."""
VOCABULARIES = {"gpt": 50257, "moe": 50257, "bert": 30522, "t5": 28996 + 100, "mixtral": 32000}
"""Vocabularies of the tests' tokenisers, GPT-2's, BERT's (for T5 that with cases, and 100 more) and Mixtral's, where a
row states no other."""
ENCODER_LENGTH = 512
"""`encoder-seq-length` of the tests of T5, of which the table has no column (Megatron-LM, model_config.yaml)."""
NOT_PLAIN = {
    "optimizer-cpu-offload": "an optimizer on the host",
    "fine-grained-activation-offloading": "activations go to the host",
    "external-cuda-graph": "CUDA graphs",
    "cuda-graph-impl": "CUDA graphs",
}
"""Reason for skipping a row, by the column that then has a value."""


GRAPHED_TEST = "attn_cudagraph"
"""Part of the name of the test with CUDA graphs of the attention alone (model_config.yaml, `cuda-graph-modules`)."""
OPERATION_OVERHEADS_S = {"A100-SXM-80GB": 57e-6, "H100-SXM-80GB": 33e-6, "GB200": 45e-6}
"""Host time to launch an operation on the machines of the tests, by GPU: each set by hand to one test."""
CLOUD_TESTS = frozenset(
    {
        "te_tp1_pp1_dist_optimizer_fim_dataset",
        "te_tp1_pp1_dist_optimizer_no_mmap_bin_files",
        "te_tp1_pp1_resume_torch_dist_uniform_full_recompute",
        "te_tp1_pp2_resume_torch_dist_rope_embeddings",
        "te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion",
        "te_tp1_pp4_resume_torch_dist_disable_bias_linear",
        "te_tp1_pp4_resume_torch_dist_persistent_disable_bias_linear",
        "te_tp1_pp4_resume_torch_dist_untie_embeddings_and_outputs",
        "te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather_overlap_optimizer",
        "te_tp1_pp4_vp1_resume_torch_decoupled_lr",
        "te_tp1_pp4_vp1_resume_torch_dist_calculate_per_token_loss",
        "te_tp1_pp4_vp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce",
        "te_tp1_pp4_vp1_uneven_pipeline",
        "te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split",
        "te_tp2_pp1_resume_torch_dist_multi_dist_optimizer_instances",
        "te_tp2_pp2_mla",
        "te_tp2_pp2_resume_torch_dist",
        "te_tp2_pp2_resume_torch_dist_ddp_average_in_collective",
        "te_tp4_pp1_dist_optimizer_overlap_grad_reduce_param_gather",
        "te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather",
        "te_tp4_pp1_resume_torch_dist_qk_layernorm_test_mode",
        "te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer",
        "te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances",
        "te_tp2_pp1_te_8experts2parallel_ddp_average_in_collective",
        "te_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM",
        "te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4",
        "moe_mcore_te_ep8_resume_torch_dist_dist_muon",
        "moe_mcore_te_ep8_resume_torch_dist_dist_optimizer",
        "moe_mcore_te_ep8_resume_torch_dist_muon",
        "moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer",
        "moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph",
    }
)
"""Tests, by their names without `gpt3_` and `mcore_`, whose figures for an H100 are evidently of the cloud machines
that test pull requests. Platforms of other figures from there have `dgxc` in their names. These figures were renewed by
Megatron-LM's commits 5fe3f06658 and cd4afffa64 (May and July 2026) under the usual platform's name, but steps take 1.36
to 1.60 times as long as in the month before, as on `dgxc`. One more test of the first commit was measured again by a
nightly run three weeks later, and was as fast as before.
"""
CLOUD_OVERHEAD_S = 56e-6
"""Host time to launch an operation on these cloud machines: set by hand to one test."""
OVERHEAD_TESTS = (
    *(
        f"gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather dev_dgx_{gpu}"
        for gpu in GPUS
    ),
    "gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files dev_dgx_h100",
)
"""Tests, with their platforms, to which these overheads were set: they are not scored."""


def megatron_tests(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing fields, or an unsupported kind of model.

    A row that does not state its GPUs can still be written: for eight A100, or as many as its plan needs.
    """
    _refuse(record)
    record = _by_recipe(record)
    unscored = []
    if record["n_gpus_source"].startswith("unknown") or not count(record, "nodes"):
        unscored.append("the row does not say on how many GPUs")
    if record["optimizer"] == "muon" and LAYOUT_TEST not in record["test_case"]:
        unscored.append("its ranks own whole tensors, the embedding too, in an order that is not modelled")
    if not any(part in record["platform"] for part in GPUS):
        unscored.append("the row does not say on which GPU")
    run = _megatron_run(_assumed(record) if unscored else record, identity)
    if unscored:
        raise UnscoredError(unscored[0], run)
    return run


def _by_recipe(record: Mapping[str, str]) -> Mapping[str, str]:
    """Return a row with the GPUs that the recipes of GB200 name: two nodes of four, or one where the test says so.

    Source: Megatron-LM, tests/test_utils/recipes/gb200/gpt.yaml, moe.yaml, and those that end in -1node. The table
    lacks them for the second half of a test, which resumes from a checkpoint.
    """
    known = not record["n_gpus_source"].startswith("unknown") and count(record, "nodes")
    named = (
        record["family"] in ("gpt", "moe") and "gb200" in record["platform"] and "release" not in record["test_case"]
    )
    if known or not named:
        return record
    nodes = "1" if "_1node" in record["test_case"] else "2"
    return defaultdict(str, record) | {"nodes": nodes, "gpus_per_node": "4", "n_gpus_source": "recipe"}


def _assumed(record: Mapping[str, str]) -> Mapping[str, str]:
    filled = defaultdict(str, record)
    if not any(part in record["platform"] for part in GPUS):
        filled["platform"] += " a100"
    if record["n_gpus_source"].startswith("unknown") or not count(record, "nodes"):
        sizes = {axis: count(record, f"{axis}-parallel-size") or 1 for axis in (*AXES, "expert-model")}
        of_experts = sizes["expert-model"] * (count(record, "expert-tensor-parallel-size") or sizes["tensor-model"])
        ranks = math.lcm(8, math.prod(sizes[axis] for axis in AXES), sizes["pipeline-model"] * of_experts)
        filled["global-batch-size"] = filled["global-batch-size"] or str(ranks * needed(filled, "micro-batch-size"))
        filled |= {"nodes": str(ranks // 8), "gpus_per_node": "8"}
    return filled


LAYOUT_TEST = "param_layout"
"""Part of the names of tests of Muon without `no-use-layer-wise-param-layout`: in them each matrix belongs to one rank,
and all else is divided evenly (model_config.yaml; core/optimizer/layer_wise_optimizer.py)."""
AXES = ("tensor-model", "pipeline-model", "context")
"""Beginnings of the columns that end in -parallel-size."""


def _megatron_run(record: Mapping[str, str], identity: str) -> Run:
    tp, pp, context = (count(record, f"{axis}-parallel-size") or 1 for axis in AXES)
    ranks = needed(record, "nodes") * needed(record, "gpus_per_node")
    dp = divided(ranks, tp * pp * context, "GPUs")
    micro = needed(record, "micro-batch-size")
    shape = _shape(record, tp)
    layout = next((blocks for part, blocks in LAYOUTS.items() if part in record["test_case"]), None)
    ep = count(record, "expert-model-parallel-size") or 1
    method = method_of(dp * context, tp, pp, _replicas(record, pp))
    median_s, least_s = positive(record, "iter_time_median_s"), positive(record, "iter_time_min_s")
    # some steps took far longer: others used the host, or it had too few cores. That holds for nearly all tests on one
    # node of GB200; what their steps would have taken alone is not known
    is_uneven = median_s and least_s and least_s < STEADY_RATIO * median_s
    uneven = UNEVEN_STEPS if is_uneven else ""
    return Run(
        identity=record["test_case"] + " " + record["platform"] if record["test_case"] else identity,
        source=f"Megatron-LM tests, {record['family']} on {_gpu(record['platform'])}{uneven}",
        gpu=_gpu(record["platform"]),
        per_node=count(record, "gpus_per_node"),
        shape=shape,
        software=_software(record, tp, context),
        method=method,
        optimizer="muon" if record["optimizer"] == "muon" else "adamw",
        flat_optimizer=method == "zero1" and (shape.experts is not None or record["optimizer"] == "muon"),
        dp=dp,
        tp=tp,
        pp=pp,
        ep=ep if shape.experts is not None else 1,
        etp=count(record, "expert-tensor-parallel-size"),
        chunks=len(layout) // pp if layout else _chunks(record, shape.layers, pp),
        blocks_of_stages=layout,
        micro_batch=micro,
        micro_batches=micro_batches_of(needed(record, "global-batch-size"), dp, micro),
        recompute=_recompute(record),
        deferred_outputs=DEFERRED_OUTPUTS if "defer_embedding_wgrad" in record["test_case"] else 0,
        # in a pipeline, gradients are reduced after the schedule
        overlap=record["overlap-grad-reduce"] == "True" and pp == 1,
        step_s=median_s,
        memory_bytes=positive(record, "mem_max_allocated_bytes"),
        memory_metric="allocated",
        memory_of="last",
        # `workload.clip_norm` is refused for experts beside tensor slices, unless the optimizer is sharded
        clip_norm=None if tp > 1 and ep > 1 and shape.experts is not None and method != "zero1" else MEGATRON_CLIP_NORM,
        scales_loss=record["fp16"] == "True",
        calibration=f"{record['test_case']} {record['platform']}" in OVERHEAD_TESTS,
    )


DEFERRED_OUTPUTS = 2
"""`wgrad-deferral-limit` of the tests with `defer-embedding-wgrad-compute` (Megatron-LM, model_config.yaml)."""
STEADY_RATIO = 0.8
"""Least ratio of the shortest step to the median one; steps of a test alone on its machine differ by a tenth."""
UNEVEN_STEPS = ", steps of uneven lengths"
"""End of the source of tests below that ratio, whose hosts something else slowed down."""


def _refuse(record: Mapping[str, str]) -> None:
    if record["family"] not in VOCABULARIES:
        raise SkippedError(f"neither a GPT, a BERT nor a T5 ({record['family'] or 'no family'})")
    if "grpo" in record["test_case"]:
        raise SkippedError("not plain training (GRPO)")
    for part, reason in OTHER_TESTS.items():
        if part in f"{record['test_case']}_":
            raise SkippedError(reason)
    for key, reason in NOT_PLAIN.items():
        if record[key] not in ("", "False") and not (key == "cuda-graph-impl" and GRAPHED_TEST in record["test_case"]):
            raise SkippedError(reason)
    if record["optimizer"] not in ("", "adam", "muon"):
        raise SkippedError(f"the optimizer {record['optimizer']}")


def _replicas(record: Mapping[str, str], pp: int) -> MethodName:
    """Return the method of the data-parallel ranks; Megatron's own FSDP shards parameters, gradients and states."""
    own = any(record[key] == "True" for key in ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2"))
    if own and record["data-parallel-sharding-strategy"] in ("", "optim_grads_params"):
        if pp > 1:
            raise SkippedError("FSDP over the stages of a pipeline")
        return "zero3"
    return "zero1" if record["use-distributed-optimizer"] == "True" or own else "ddp"


OTHER_TESTS = {
    "_mla_": "latent attention in blocks whose other parts the row does not say",
    "_gdn_": "an attention that is not modelled (gated delta nets)",
    "_dsa_": "an attention that is not modelled (sparse)",
    "_distill_": "a second model that teaches",
}
"""Reason for skipping tests of which the table has no column, by a part of their names (model_config.yaml)."""
LATENT_TESTS = {
    "deepseek_proxy_fsdp_ep2_fsdp2_": (Latent(query_rank=256, kv_rank=128), 1, 1024),
    "deepseek_proxy_fsdp_ep2_fsdp2": (Latent(query_rank=256, kv_rank=128), 3, 1024),
    "selective_recompute_experimental": (Latent(), 3, 1024),
    "tp2_pp2_ep4_etp1": (Latent(), 1, 1024),
    "deepseekv3_proxy": (Latent(), 3, 2048),
    "tp4_ep2_etp2_pp2": (None, 0, 512),
}
"""Features of tests that the table does not state, by a part of their names: attention, blocks without experts, width
of the shared expert (Megatron-LM, tests/functional_tests/test_cases/moe, model_config.yaml).
"""
LAYOUTS = {"selective_recompute_experimental": (3, 2, 2, 2, 2, 2, 2, 1)}
"""Number of blocks in each pipeline stage (virtual stages are stages too), by a part of the test's name: the key
`pipeline-model-parallel-layout` of its model_config.yaml."""
PREDICT_SEVERAL_TOKENS = ("ep4_etp1_memory_speed", "mtp_resume", "selective_recompute_experimental", "deepseekv3_proxy")
"""Parts of names of tests with `mtp-num-layers` of 1, of which the table has no column (model_config.yaml)."""
NO_DROPOUT = ("nondeterministic", "pp2_cp2", "ep4_etp1", "deepseek", "reruns", "scoped_cudagraph", "15b_8t_release")
"""Parts of names of tests with `hidden-dropout` and `attention-dropout` of 0 (model_config.yaml)."""
COMPILED_LOSS = ("cross_entropy_loss_fusion", "ep4_etp1", "deepseekv3_proxy", "15b_8t_release_sm_gb200")
"""Parts of names of tests with `cross-entropy-loss-fusion`, whose implementation is `native` (model_config.yaml)."""
SEND_TOKENS = ("a2a", "alltoall", "etp2_pp2", "mixtral", "deepseek", "tp2_pp2_ep4_etp1")
"""Parts of names of tests whose `moe-token-dispatcher-type` is not the default, `allgather` (model_config.yaml)."""


def _experts(record: Mapping[str, str]) -> tuple[Experts | None, Latent | None]:
    """Return the experts of a test and its latent attention; None where it has none."""
    several = count(record, "num-experts")
    if several is None:
        return None, None
    test = record["test_case"]
    latent, dense, shared = next((known for part, known in LATENT_TESTS.items() if part in test), (None, 0, 0))
    width = count(record, "moe-ffn-hidden-size") or count(record, "ffn-hidden-size")
    experts = Experts(
        count=several,
        chosen=count(record, "moe-router-topk") or 2,
        width=width or 4 * needed(record, "hidden-size"),
        shared_width=shared,
        dense_blocks=dense,
        grouped=record["moe-grouped-gemm"] == "True",
        gathers_tokens=not any(part in test for part in SEND_TOKENS),
        fused_permutation=latent is not None,
    )
    return experts, latent


def _gpu(platform: str) -> str:
    gpu = next((gpu for part, gpu in GPUS.items() if part in platform), None)
    if gpu is None:
        raise SkippedError("the row does not say on which GPU")
    return gpu


def _shape(record: Mapping[str, str], tp: int) -> Shape:
    hidden, heads = needed(record, "hidden-size"), needed(record, "num-attention-heads")
    vocabulary = count(record, "vocab-size") or VOCABULARIES[record["family"]]
    grouped = record["group-query-attention"] == "True"
    experts, latent = _experts(record)
    further = int(any(part in record["test_case"] for part in PREDICT_SEVERAL_TOKENS))
    gated = record["swiglu"] == "True"
    decoder = None
    if record["family"] == "t5":
        lengths = needed(record, "decoder-num-layers"), needed(record, "decoder-seq-length")
        decoder = Decoder(layers=lengths[0], sequence_length=lengths[1])
    return Shape(
        kind="llama" if gated and count(record, "num-experts") else "gpt",  # those with experts have RMS norms too
        gated=gated,
        layers=count(record, "num-layers") or needed(record, "encoder-num-layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=(count(record, "num-query-groups") or heads) if grouped else heads,
        # a gated perceptron is as large as another by default (Megatron-LM, training/arguments.py, --swiglu)
        ffn=count(record, "ffn-hidden-size") or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden),
        vocabulary=padded(vocabulary, tp),
        sequence_length=ENCODER_LENGTH if decoder else needed(record, "seq-length"),
        decoder=decoder,
        tied=record["untie-embeddings-and-output-weights"] != "True",
        latent=latent,
        experts=experts,
        further=further,
        embeds_again=further > 0 and (count(record, "pipeline-model-parallel-size") or 1) > 1,
        biased=record["disable-bias-linear"] != "True",
    )


FLASH_CALLS = 9
"""Operations of Transformer Engine's flash attention: copies of queries, keys and values to the kernel's layout, the
kernel, and a copy of its result (pytorch/attention/dot_product_attention/backends.py, FlashAttention.forward); and four
of the generator's state, which is read and set before and behind it for the dropout (Megatron-LM,
core/tensor_parallel/random.py, CudaRNGStatesTracker.fork)."""
RING_CALLS, RING_STEP_CALLS = 3, 7
"""Additional operations in a ring: before it, parts are put in order and joined; each of its further steps has a
message each way, copies of halves, a kernel, and corrections of the sums and of the result (context_parallel.py).
"""


def _software(record: Mapping[str, str], tp: int, context: int) -> Software:
    if record["fp8-format"] and float8_ratio_of(_gpu(record["platform"])) is None:
        raise SkippedError("a GPU whose rate in float8 platforms.toml does not know")
    test = record["test_case"]
    backend = record["attention-backend"]
    fused = backend not in ("unfused", "local") and record["transformer-impl"] != "local"
    # Chosen automatically, attention was not fused in deterministic mode in the long-term container before November
    # 2025: all figures of the cluster named dracooci date from then (Megatron-LM, 23a1dcaf74, the container;
    # adc69dba2d, names).
    if backend in ("", "auto") and "lts" in record["platform"] and "dracooci" in record["platform"]:
        fused = False
    rotary = 0
    if record["position-embedding-type"] == "rope":
        rotary = 6 if "no_fusion" in test else 2  # of eager operations, as in a Llama's block; a kernel each
    compared = None
    if "qk_layernorm_test_mode" in test:
        ranks = needed(record, "nodes") * needed(record, "gpus_per_node")
        compared = tp + ranks // (tp * (count(record, "pipeline-model-parallel-size") or 1))
    ring = 2 if "a2a_p2p" in test else context  # two levels, one of which exchanges heads
    in_cloud = "dgxc" in record["platform"] or (
        record["platform"] == "dev_dgx_h100" and test.removeprefix("gpt3_").removeprefix("mcore_") in CLOUD_TESTS
    )
    return Software(
        precision="fp16" if record["fp16"] == "True" else "bf16",
        flash_attention=fused,
        attention_ratio=attention_ratio_of(_gpu(record["platform"])),
        graphs_attention=GRAPHED_TEST in test,
        flash_calls=FLASH_CALLS + (RING_CALLS + RING_STEP_CALLS * (ring - 1) if context > 1 else 0) if fused else 1,
        receives_in_flight=True,
        message_calls=MEGATRON_MESSAGE_CALLS,
        rotary_calls=rotary,
        checks_norms_over=compared,
        compiled_loss=any(part in test for part in COMPILED_LOSS),
        dropout=not any(part in test for part in NO_DROPOUT),
        early_stop=False,
        float8_maps=bool(record["fp8-format"]),
        sequence_parallel=tp > 1 and record["sequence-parallel"] == "True",
        sums_beside_products=tp > 1 and record["sequence-parallel"] != "True",
        context_ranks=context,
        # FSDP keeps no whole gradients
        float_gradients=record["bf16"] == "True" and _replicas(record, 1) != "zero3",
        in_place_loss=True,
        recomputes_attention=True,
        fused_projections=True,
        operation_overhead_s=CLOUD_OVERHEAD_S if in_cloud else OPERATION_OVERHEADS_S[_gpu(record["platform"])],
    )


def _chunks(record: Mapping[str, str], layers: int, pp: int) -> int:
    each = count(record, "num-layers-per-virtual-pipeline-stage")
    if each is not None:
        return max(1, divided(layers, pp * each, "layers"))
    return count(record, "num-virtual-stages-per-pipeline-rank") or 1


def _recompute(record: Mapping[str, str]) -> Literal["none", "selective", "full"]:
    """Return what is recomputed; selective recomputation of other modules than the attention counts as none."""
    stated, modules = record["recompute-granularity"], record["recompute-modules"]
    if stated not in ("", "selective", "full"):
        raise SkippedError(f"recomputation '{stated}' is not known")
    if stated == "selective" and modules and "core_attn" not in modules:
        return "none"
    return stated or "none"  # type: ignore[return-value]


# SimuMax's B200 -------------------------------------------------------------------------------------------------------

LLAMAS = {
    "llama3_8b": (4096, 32, 8, 14336),
    "llama3_70b": (8192, 64, 8, 28672),
    "llama3_405b": (16384, 128, 16, 53248),
}
"""Width, heads, heads of keys and values, width of the maps (SimuMax, run_pretrain_llama3.sh)."""
SIMUMAX_VOCABULARY = 128256


DEEPSEEKS = {
    "deepseekv2": (5120, 12288, 102400, Experts(count=160, chosen=6, width=1536, shared_width=3072)),
    "deepseekv3": (7168, 18432, 129280, Experts(count=256, chosen=8, width=2048, shared_width=2048)),
}
"""Width, width of the maps of dense blocks, vocabulary, experts (run_pretrain_deepseekv2.sh); all have 128 heads."""


def simumax(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing fields, or a plan that cannot be predicted.

    Megatron-Core with Transformer Engine in bf16 (SimuMax, simu_tools/megatron_scripts): a distributed optimizer that
    reduces in float after the backward, sequence parallelism, clipping, nothing recomputed.
    """
    tp, pp, dp, context = (count(record, key) or 1 for key in ("tp", "pp", "dp", "cp"))
    ep = count(record, "ep") or 1
    model, length, layers = record["model"], count(record, "seq") or 4096, needed(record, "layers")
    if model in DEEPSEEKS:
        hidden, ffn, vocabulary, mixture = DEEPSEEKS[model]
        experts: Experts | None = replace(mixture, capacity_ratio=1.0)  # moe-pad-expert-input-to-capacity
        heads = kv_heads = 128
        latent: Latent | None = Latent()
    elif model in LLAMAS:
        (hidden, heads, kv_heads, ffn), vocabulary = LLAMAS[model], SIMUMAX_VOCABULARY
        experts = latent = None
    else:
        raise SkippedError(f"the model {model}")
    shape = Shape(
        kind="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=padded(vocabulary, tp),
        sequence_length=length,
        latent=latent,
        experts=experts,
    )
    if shape.experts is not None and context > 1:
        raise SkippedError("a mixture of experts beside context parallelism")
    if tp * pp * dp * context != needed(record, "n_gpus"):
        raise SkippedError("dp x tp x pp x cp are not the GPUs")
    milliseconds, memory = positive(record, "iter_time_ms"), positive(record, "peak_allocated_gib_max")
    return Run(
        identity=record["case"] or identity,
        source=f"SimuMax's {record['gpu']}",
        gpu=record["gpu"],
        per_node=8,
        shape=shape,
        software=Software(
            flash_attention=True,
            dropout=False,
            compiled=True,
            early_stop=False,
            sequence_parallel=tp > 1,
            fused_loss="_cef" in record["case"],
            in_place_loss="_cef" not in record["case"],
            float_gradients=True,
            fused_projections=True,
            gathers_alone=tp > 1,
            dummy_gradients=True,
            loss_gradient_in_place="_cef" in record["case"],
            separate_adds=True,
            copies_keys=context > 1,
            context_ranks=context,
            receives_in_flight=True,
            message_calls=MEGATRON_MESSAGE_CALLS,
            kernels="b200",
        ),
        method="zero1" if dp * context > 1 or pp == 1 else "pipeline",
        flat_optimizer=True,
        float_reduction=True,
        clip_norm=1.0,
        dp=dp,
        tp=tp,
        pp=pp,
        ep=ep if shape.experts is not None else 1,
        etp=1 if shape.experts is not None and tp > 1 and ep > 1 else None,  # SimuMax's default (recalled)
        chunks=count(record, "vpp") or 1,
        micro_batch=needed(record, "micro_batch"),
        micro_batches=needed(record, "micro_batches"),
        recompute="none",
        overlap=False,
        step_s=milliseconds / 1e3 if milliseconds else None,
        memory_bytes=memory * 2**30 if memory else None,
        memory_metric="allocated",
    )
