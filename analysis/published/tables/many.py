"""The table of many sources: training throughput and memory by torchtitan, Megatron-LM and others."""

from collections.abc import Mapping
from typing import Literal

from analysis.published.platforms import platform_of
from analysis.published.runs import Metric, Run, SkippedError
from analysis.published.tables.fields import count, divided, needed, number
from analysis.published.transformer import Shape, Software

GIB = 2**30
Method = Literal["single", "ddp", "zero2", "zero3", "pipeline", "tensor"]
UNTRUSTED = ("LOW TRUST", "ColossalAI", "MI100", "nanoGPT")
"""The table's own remarks: of these, details are missing."""
METRICS: dict[str, Metric] = {
    "max_reserved": "reserved",
    "max_memory_reserved": "reserved",
    "max CUDA memory allocated": "allocated",
    "nvidia-smi": "device",
}
"""By what the kind of a memory figure begins with."""
SIXTEEN_BITS = ("fp16", "bf16", "BF16", "fp16 AMP", "bf16/fp16")
FLOAT8 = ("bf16+float8", "bf16+float8 linear, fp8 all-gather", "float8 tensorwise", "FP8-CS")
METHODS: dict[str, Method] = {
    "": "ddp",
    "none (DDP)": "ddp",
    "DDP": "ddp",
    "DeepSpeed 3D": "ddp",
    "DDP+dist-opt": "zero2",
    "FSDP2 full-shard (ZeRO-3) over dp*cp": "zero3",
    "FSDP": "zero3",
    "FSDP FULL_SHARD": "zero3",
    "FSDP SHARD_GRAD_OP": "zero2",
    "DeepSpeed ZeRO-3": "zero3",
}


def many_sources(record: Mapping[str, str], identity: str) -> Run:
    """Return what a row says; raise SkippedError where it lacks something, or is of a kind that is not scored."""
    _refuse(record)
    dp, tp, pp = (needed(record, key) for key in ("dp", "tp", "pp"))
    context = count(record, "cp") or 1
    if dp * tp * pp * context != needed(record, "n_gpus"):
        raise SkippedError("dp x tp x pp x cp are not the GPUs")
    micro, micro_batches = _batches(record, dp, pp)
    memory = number(record, "mem_gib")
    metric = next((name for start, name in METRICS.items() if record["mem_kind"].startswith(start)), None)
    return Run(
        identity=identity,
        source=record["source"],
        gpu=record["gpu"],
        per_node=count(record, "gpus_per_node"),
        shape=_shape(record),
        software=_software(record, tp, context),
        method=_method(record, dp * context, pp, tp),
        dp=dp,
        tp=tp,
        pp=pp,
        chunks=count(record, "vpp") or 1,
        micro_batch=micro,
        micro_batches=micro_batches,
        recompute=_recompute(record),
        overlap=not _is_early_megatron(record),
        step_s=number(record, "iter_time_s"),
        memory_bytes=memory * GIB if memory is not None and metric else None,
        memory_metric=metric if memory is not None else None,
    )


def _is_early_megatron(record: Mapping[str, str]) -> bool:
    """Return whether gradients are reduced after the backward, and scores are written: no option of 2023 is on."""
    known = ("Megatron", "Narayanan", "MT-NLG", "DLPerf")
    return any(name in record["source"] for name in known) and "overlap-grad-reduce" not in record["extras"]


def _refuse(record: Mapping[str, str]) -> None:
    """Raise SkippedError for rows that are not to be scored, or whose model is of another kind."""
    remarks = " ".join(record.get(key, "") for key in ("source", "system", "gpu", "note"))
    if any(each in remarks for each in UNTRUSTED):
        raise SkippedError("the table says that details are missing")
    if number(record, "iter_time_s") is None and number(record, "mem_gib") is None:
        raise SkippedError("the row has neither a time nor a memory")
    if "MoE" in record["note"] or (count(record, "ep") or 1) > 1:
        raise SkippedError("a mixture of experts")
    if not record["model"].lower().startswith(("gpt", "llama", "mt-nlg")):
        raise SkippedError("neither a GPT nor a Llama")
    if platform_of(record["gpu"]) is None:
        raise SkippedError("a GPU that platforms.toml does not know")


def _shape(record: Mapping[str, str]) -> Shape:
    hidden, heads = needed(record, "hidden"), needed(record, "heads")
    return Shape(
        kind="llama" if record["model"].lower().startswith("llama") else "gpt",
        layers=needed(record, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count(record, "kv_heads") or heads,
        ffn=count(record, "ffn") or 4 * hidden,
        vocabulary=needed(record, "vocab"),
        sequence_length=needed(record, "seq"),
    )


def _software(record: Mapping[str, str], tp: int, context: int) -> Software:
    precision = record["precision"]
    if precision not in (*SIXTEEN_BITS, *FLOAT8):
        raise SkippedError(f"precision '{precision}' is not modelled")
    if _is_early_megatron(record):
        return Software(early_stop=False, partitioned=tp > 1 and (count(record, "pp") or 1) > 1)
    platform = platform_of(record["gpu"])
    ratio = platform.float8_ratio if platform else None
    if precision in FLOAT8 and ratio is None:
        raise SkippedError("a GPU whose rate in float8 platforms.toml does not know")
    return Software(
        flash_attention=True,
        dropout=False,
        attention_ratio=platform.attention_ratio if platform else 1.0,
        compiled=record["compile"] == "yes",
        sequence_parallel=tp > 1,
        context_ranks=context,
        map_speedup=(ratio or 1.0) if precision in FLOAT8 else 1.0,
        float8_casts=precision in FLOAT8,
    )


def _method(record: Mapping[str, str], data: int, pp: int, tp: int) -> Method:
    if record["sharding"] not in METHODS:
        raise SkippedError(f"sharding '{record['sharding']}' is not known")
    method = METHODS[record["sharding"]]
    if method == "ddp" and data == 1:
        return "pipeline" if pp > 1 else "tensor" if tp > 1 else "single"
    return method


def _batches(record: Mapping[str, str], dp: int, pp: int) -> tuple[int, int]:
    """Return samples of a micro-batch and how many there are; of a pipeline, a rank's batch may be given instead."""
    samples = divided(needed(record, "global_batch"), dp, "samples")
    micro = count(record, "micro_batch")
    if micro is None and pp == 1:
        return samples, 1
    if micro is None:
        raise SkippedError("the row does not say micro_batch")
    return micro, divided(samples, micro, "micro-batches")


def _recompute(record: Mapping[str, str]) -> Literal["none", "selective", "full"]:
    said = record["recompute"]
    if said.startswith(("full", "yes")):
        return "full"
    if said.startswith("selective"):
        return "selective"
    if said == "none":
        return "none"
    raise SkippedError("the row does not say what is recomputed")
