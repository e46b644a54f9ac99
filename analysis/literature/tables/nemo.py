"""Reader of NVIDIA's tables of NeMo runs: the recipes of DGX Cloud, and NeMo's performance summary.

Plans, batches and times are in the table, with the address of each. Hyper-parameters and the software's features are
those of the recipes' own configurations (NVIDIA/dgxc-benchmarking, `*.yaml` and configure.sh of a release;
NVIDIA/NeMo-Framework-Launcher, launcher_scripts/conf/training of NeMo 24.07): Megatron-Core and Transformer Engine in
bf16, with gradients reduced in bf16 by a distributed optimizer that overlaps both of its collectives, sequence
parallelism, and tensor parallelism overlapped with products where `ub_tp_comm_overlap` is set.
"""

from collections.abc import Mapping
from typing import Literal

from analysis.literature.platforms import attention_ratio_of, fused_attention_ratio_of
from analysis.literature.runs import MEGATRON_CLIP_NORM, Run, Shape, SkippedError, Software, UnscoredError, gpt
from analysis.literature.tables.fields import count, divided, method_of, micro_batches_of, needed, padded, positive

LLAMAS = {
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": (126, 16384, 128, 16, 53248, 128256),
}
"""Layers, width, heads, heads of keys and values, width of the perceptron, vocabulary (405B has 16 query groups)."""
GPT3S = {"gpt3-5b": (24, 4096, 32), "gpt3-20b": (44, 6144, 48), "gpt3-175b": (96, 12288, 96)}
"""Layers, width, heads. Positions are learned, the output layer shares the embedding's weight."""
NEMOTRONS = {
    "nemotron-8b": (32, 4096, 32, 32),
    "nemotron-15b": (32, 6144, 48, 8),
    "nemotron-22b": (40, 6144, 48, 48),
    "nemotron-340b": (96, 18432, 96, 8),
}
"""Layers, width, heads, heads of keys and values. Positions are rotary, activations squared ReLU, nothing is biased."""
GPT2_VOCABULARY, NEMOTRON_VOCABULARY = 50257, 256000
GPT2_TOKENS = "tokenizer of GPT-2"
"""Value of the column `note` for recipes with synthetic data and GPT-2's vocabulary."""


def nemo(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row.

    Raises SkippedError for missing fields, or a run that no scenario describes; UnscoredError for fine-tuning.
    """
    model, tuning = record["model"], record["tuning"]
    if tuning == "lora":
        raise SkippedError("low-rank adapters beside fused projections")
    if model.startswith("maxtext"):
        raise SkippedError("not Megatron-Core (MaxText)")
    tp, pp, context = (count(record, key) or 1 for key in ("tp", "pp", "cp"))
    ranks, micro = needed(record, "n_gpus"), needed(record, "mbs")
    dp = divided(ranks, tp * pp * context, "GPUs")
    batch = needed(record, "gbs")
    shape = _shape(record, tp)
    method = method_of(dp * context, tp, pp, "zero1")
    rate = positive(record, "tokens_per_s_per_gpu")
    run = Run(
        identity=identity,
        source=f"NVIDIA, {record['source']} {record['release']}, {record['gpu']}, {record['precision']}"
        + (f", {tuning}" if tuning else ""),
        gpu=record["gpu"],
        per_node=None,
        shape=shape,
        software=_software(record, tp, context),
        method=method,
        flat_optimizer=method == "zero1",
        dp=dp,
        tp=tp,
        pp=pp,
        chunks=count(record, "vp") or 1,
        micro_batch=micro,
        micro_batches=micro_batches_of(batch, dp, micro),
        recompute=_recompute(record),
        overlap=True,
        gathers_beside_forward=method == "zero1",
        clip_norm=MEGATRON_CLIP_NORM,
        step_s=batch * shape.sequence_length / (rate * ranks) if rate else positive(record, "step_s"),
    )
    if tuning:
        raise UnscoredError("packed sequences, whose attention is within each", run)
    return run


def _shape(record: Mapping[str, str], tp: int) -> Shape:
    model, length = record["model"], needed(record, "seq")
    if model in LLAMAS:
        layers, hidden, heads, kv_heads, ffn, vocabulary = LLAMAS[model]
        kind: Literal["gpt", "llama"] = "llama"
    elif model in NEMOTRONS:
        layers, hidden, heads, kv_heads = NEMOTRONS[model]
        kind, ffn, vocabulary = "gpt", 4 * hidden, NEMOTRON_VOCABULARY
    elif model in GPT3S:
        layers, hidden, heads = GPT3S[model]
        return gpt(
            layers=layers, hidden=hidden, heads=heads, vocabulary=padded(GPT2_VOCABULARY, tp), sequence_length=length
        )
    else:
        raise SkippedError(f"the model {model} is not known")
    return Shape(
        kind=kind,
        layers=count(record, "layers") or layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=padded(GPT2_VOCABULARY if record["note"] == GPT2_TOKENS else vocabulary, tp),
        sequence_length=length,
        tied=False,
        biased=False,
    )


def _software(record: Mapping[str, str], tp: int, context: int) -> Software:
    of_gpt3 = record["model"] in GPT3S
    # FlashAttention-2 by the launcher's default, NVTE_FUSED_ATTN = 0 (conf/config.yaml), and where recipes set it
    ratio_of = attention_ratio_of if record["attention"] == "flash" else fused_attention_ratio_of
    return Software(
        flash_attention=True,
        attention_ratio=ratio_of(record["gpu"]),
        dropout=of_gpt3,
        compiled=True,
        separate_adds=True,
        early_stop=False,
        fused_projections=True,
        in_place_loss=True,
        compiled_loss=not of_gpt3,
        sequence_parallel=tp > 1,
        gathers_alone=tp > 1,
        pipelined_maps=tp > 1 and record["tp_overlap"] != "no",
        gathers_float8=True,
        rotary_calls=0 if of_gpt3 or record["model"] in LLAMAS else 1,
        recomputes_attention=record["recompute"] == "selective",
        dummy_gradients=True,
        receives_in_flight=True,
        context_ranks=context,
        rings=context > 1,
        overlaps_rings=True,
        rings_of_groups=True,
        float8_maps=record["precision"] == "fp8",
    )


def _recompute(record: Mapping[str, str]) -> Literal["none", "selective", "full"]:
    stated = record["recompute"] or "none"
    if stated not in ("none", "selective", "full"):
        raise SkippedError(f"recomputation '{stated}' is not known")
    return stated  # type: ignore[return-value]
