"""Reader of Megatron-LM's functional tests: step times and memory of the last rank, from their golden values.

Most run in deterministic mode, and models are small: step times are bound by the host, which issues the kernels.
"""

from collections.abc import Mapping
from typing import Literal

from analysis.literature.runs import Run, Shape, SkippedError, Software
from analysis.literature.tables.fields import count, divided, method_of, micro_batches_of, needed, padded, positive

GPUS = {"a100": "A100-SXM-80GB", "h100": "H100-SXM-80GB", "gb200": "GB200"}
"""GPU by the part of the platform's name that identifies it."""
VOCABULARIES = {"gpt": 50257, "bert": 30522}
"""Vocabularies of the tests' tokenisers, GPT-2's and BERT's, where a row states no other."""
NOT_PLAIN = {
    "num-experts": "a mixture of experts",
    "fp8-format": "float8 by Transformer Engine",
    "use-megatron-fsdp": "Megatron's own FSDP",
    "use-custom-fsdp": "Megatron's own FSDP",
    "optimizer-cpu-offload": "an optimizer on the host",
    "fine-grained-activation-offloading": "activations go to the host",
    "swiglu": "gated maps",
    "external-cuda-graph": "CUDA graphs",
    "cuda-graph-impl": "CUDA graphs",
}
"""Reason for skipping a row, by the column that then has a value."""


def megatron_tests(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing fields, or an unsupported kind of model."""
    _refuse(record)
    axes = ("tensor-model", "pipeline-model", "context")
    tp, pp, context = (count(record, f"{each}-parallel-size") or 1 for each in axes)
    ranks = needed(record, "nodes") * needed(record, "gpus_per_node")
    dp = divided(ranks, tp * pp * context, "GPUs")
    micro = needed(record, "micro-batch-size")
    shape = _shape(record, tp)
    return Run(
        identity=record["test_case"] + " " + record["platform"] if record["test_case"] else identity,
        source=f"Megatron-LM tests, {record['family']} on {_gpu(record['platform'])}",
        gpu=_gpu(record["platform"]),
        per_node=count(record, "gpus_per_node"),
        shape=shape,
        software=_software(record, tp, context),
        method=method_of(dp * context, tp, pp, "zero1" if record["use-distributed-optimizer"] == "True" else "ddp"),
        dp=dp,
        tp=tp,
        pp=pp,
        chunks=_chunks(record, shape.layers, pp),
        micro_batch=micro,
        micro_batches=micro_batches_of(needed(record, "global-batch-size"), dp, micro),
        recompute=_recompute(record),
        # in a pipeline, gradients are reduced after the schedule
        overlap=record["overlap-grad-reduce"] == "True" and pp == 1,
        step_s=positive(record, "iter_time_median_s"),
        memory_bytes=positive(record, "mem_max_allocated_bytes"),
        memory_metric="allocated",
        memory_of="last",
    )


def _refuse(record: Mapping[str, str]) -> None:
    if record["family"] not in VOCABULARIES:
        raise SkippedError(f"neither a plain GPT nor a BERT ({record['family'] or 'no family'})")
    if "grpo" in record["test_case"]:
        raise SkippedError("not plain training (GRPO)")
    if record["n_gpus_source"].startswith("unknown"):
        raise SkippedError("the row does not say on how many GPUs")
    for key, reason in NOT_PLAIN.items():
        if record[key] not in ("", "False"):
            raise SkippedError(reason)
    if record["optimizer"] not in ("", "adam"):
        raise SkippedError(f"the optimizer {record['optimizer']}")
    if positive(record, "iter_time_median_s") is None and positive(record, "mem_max_allocated_bytes") is None:
        raise SkippedError("the row has neither a time nor a memory")


def _gpu(platform: str) -> str:
    gpu = next((gpu for part, gpu in GPUS.items() if part in platform), None)
    if gpu is None:
        raise SkippedError("the row does not say on which GPU")
    return gpu


def _shape(record: Mapping[str, str], tp: int) -> Shape:
    hidden, heads = needed(record, "hidden-size"), needed(record, "num-attention-heads")
    vocabulary = count(record, "vocab-size") or VOCABULARIES[record["family"]]
    grouped = record["group-query-attention"] == "True"
    return Shape(
        kind="gpt",
        layers=count(record, "num-layers") or needed(record, "encoder-num-layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=(count(record, "num-query-groups") or heads) if grouped else heads,
        ffn=count(record, "ffn-hidden-size") or 4 * hidden,
        vocabulary=padded(vocabulary, tp),
        sequence_length=needed(record, "seq-length"),
        tied=record["untie-embeddings-and-output-weights"] != "True",
    )


def _software(record: Mapping[str, str], tp: int, context: int) -> Software:
    fused = record["attention-backend"] not in ("unfused", "local") and record["transformer-impl"] != "local"
    return Software(
        flash_attention=fused,
        early_stop=False,
        sequence_parallel=tp > 1 and record["sequence-parallel"] == "True",
        context_ranks=context,
        float_gradients=record["bf16"] == "True",
        in_place_loss=True,
    )


def _chunks(record: Mapping[str, str], layers: int, pp: int) -> int:
    each = count(record, "num-layers-per-virtual-pipeline-stage")
    if each is not None:
        return max(1, divided(layers, pp * each, "layers"))
    return count(record, "num-virtual-stages-per-pipeline-rank") or 1


def _recompute(record: Mapping[str, str]) -> Literal["none", "selective", "full"]:
    stated = record["recompute-granularity"]
    if stated not in ("", "selective", "full"):
        raise SkippedError(f"recomputation '{stated}' is not known")
    return stated or "none"  # type: ignore[return-value]
