"""Reader of the table of many sources: training throughput and memory of torchtitan, Megatron-LM and others."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from analysis.literature.platforms import (
    attention_ratio_of,
    float8_ratio_of,
    fused_attention_ratio_of,
    platform_of,
    sixteen_bits_of,
)
from analysis.literature.runs import (
    MEGATRON_CLIP_NORM,
    MEGATRON_MESSAGE_CALLS,
    Experts,
    Latent,
    Metric,
    Run,
    Shape,
    SkippedError,
    Software,
    UnscoredError,
)
from analysis.literature.tables.fields import count, divided, method_of, needed, positive
from gssim.plan import MethodName

GIB = 2**30
UNTRUSTED = ("LOW TRUST", "ColossalAI", "MI100", "nanoGPT")
"""Remarks of the table that mark rows with missing details."""
METRICS: dict[str, Metric] = {
    "max_reserved": "reserved",
    "max_memory_reserved": "reserved",
    "max CUDA memory allocated": "allocated",
    "nvidia-smi": "device",
}
"""Metric by the beginning of the memory figure's description."""
SIXTEEN_BITS = ("fp16", "bf16", "bf16/fp16", "fp16 amp", "amp fp16", "amp", "mixed")
FLOAT8 = ("bf16+float8", "float8", "fp8-cs", "fp8-mx", "fp8-sc", "mxfp8")
"""Beginnings of the precision, in lower case: linear layers in float8, everything else in 16 bits."""
LLAMAS = ("llama", "codellama", "mistral", "qwen", "yi-")
"""Beginnings of the names of models with Llama's blocks. Qwen's biases of queries and keys are left out."""
MODELS = ("gpt", *LLAMAS, "mt-nlg", "opt", "bloom", "nemotron", "bert")
"""Beginnings of the names of models that consist of equal blocks; those that are no `LLAMAS` have a GPT's."""
MIXTURES = {
    "qwen3-30b-a3b": Shape(
        kind="llama",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_width=128,
        ffn=768,
        vocabulary=151936,
        sequence_length=4096,
        experts=Experts(count=128, chosen=8, width=768, dense_blocks=0),
    ),
    "qwen3-235b-a22b": Shape(
        kind="llama",
        layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_width=128,
        ffn=1536,
        vocabulary=151936,
        sequence_length=4096,
        experts=Experts(count=128, chosen=8, width=1536, dense_blocks=0),
    ),
    "mixtral-8x7b": Shape(
        kind="llama",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocabulary=32000,
        sequence_length=4096,
        experts=Experts(count=8, chosen=2, width=14336, dense_blocks=0),
    ),
    "mixtral-8x22b": Shape(
        kind="llama",
        layers=56,
        hidden=6144,
        heads=48,
        kv_heads=8,
        ffn=16384,
        vocabulary=32000,
        sequence_length=4096,
        experts=Experts(count=8, chosen=2, width=16384, dense_blocks=0),
    ),
    "gpt-oss-120b": Shape(
        kind="llama",
        layers=36,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_width=64,
        ffn=2880,
        vocabulary=201088,
        sequence_length=4096,
        experts=Experts(count=128, chosen=4, width=2880, dense_blocks=0),
    ),
    "deepseekv3": Shape(
        kind="llama",
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        ffn=18432,
        vocabulary=129280,
        sequence_length=4096,
        latent=Latent(),
        experts=Experts(count=256, chosen=8, width=2048, shared_width=2048, dense_blocks=3),
    ),
    "deepseekv2": Shape(
        kind="llama",
        layers=60,
        hidden=5120,
        heads=128,
        kv_heads=128,
        ffn=12288,
        vocabulary=102400,
        sequence_length=4096,
        latent=Latent(),
        experts=Experts(count=160, chosen=6, width=1536, shared_width=3072, dense_blocks=1),
    ),
}
"""Models with experts, of which the table has the name alone: config.json of Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B,
mistralai/Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1, openai/gpt-oss-120b, deepseek-ai/DeepSeek-V3 and DeepSeek-V2 (Hugging
Face). Biases, attention sinks and the block that predicts a further token are left out."""
OF_THAT_SIZE = re.compile(r"(671b|236b)?(a\d+b)?(base|instruct|chat)?(v\d\.\d)?")
"""What may follow the name of one of `MIXTURES`; others are models of their own, as DeepSeek-V2-Lite."""
OTHER_MIXTURE = re.compile(r"moe|\dx\d+(\.\d+)?b|-a\d+(\.\d+)?b|gpt-oss|llama-?4")
"""In the name of a model: it has experts."""
OTHER_BLOCKS = re.compile(r"nemotron[ -]?\d?[ -]?(h\b|nano|super)")
"""In the name of a model: most of its blocks have no attention (Mamba)."""
RACKS = ("DGX-GB200", "DGX-GB300")
"""Systems that are a platform of their own: racks in which NVLink joins 72 GPUs."""
HALF_WINDOWED = ("gpt-oss",)
"""Beginnings of the names of models in which every other block attends to a short window alone."""
RECTIFIED = ("opt", "nemotron")
"""Beginnings of the names of models whose activation is ReLU, or its square."""
MASKED_TOKENS = {128: 20, 512: 80}
"""BERT's predicted tokens, which have logits, by sequence length (NVIDIA, DeepLearningExamples: BERT)."""
SHARDING: tuple[tuple[MethodName, str], ...] = (
    ("ddp", r"|none|ddp|dp|data parallel|deepspeed 3d|ptd-p|single gpu|zero-0|no_shard"),
    ("zero1", r"(ddp\+)?dist-opt|distributed optimizer|zero-1"),
    ("zero2", r"zero-2|shard_grad_op|_hybrid_shard_zero2"),
    ("zero3", r"zero-3|fsdp|full[_-]shard|hsdp|hybrid_shard"),
)
"""Methods, and the words that tables have for their sharding."""
SEQUENCE_PARALLEL = r"seq(uence)?[ _-]?par|seq(uence)?[ _+-]?sel|\bsp\b"
"""How tables mention sequence parallelism."""
HYBRID = ("hsdp", "hybrid_shard", "_hybrid_shard_zero2")
"""Words for shards inside a server, which are replicated across servers."""


def _sharding(text: str) -> tuple[MethodName, bool]:
    """Return the method for what a table says of sharding, and whether its shards are replicated across servers.

    Remarks in brackets and the software's name do not count.

    >>> [_sharding(text)[0] for text in ("FSDP2 full-shard (ZeRO-3) over dp*cp", "DeepSpeed ZeRO-2", "none (DDP)")]
    ['zero3', 'zero2', 'ddp']
    >>> _sharding("HSDP")
    ('zero3', True)
    """
    word = re.sub(r"[(?].*|\bga=\d+", "", text.lower()).strip()
    word = re.sub(r"^(fsdp2?|deepspeed)\s+(?=\S)(?!3d)", "", word)
    word = re.sub(r"^zero[-_ ]?(stage[-_ ]?)?(?=[0-3]$)", "zero-", word)
    for method, words in SHARDING:
        if re.fullmatch(words, word):
            return method, word in HYBRID
    raise SkippedError(f"sharding '{text}' is not known")


def _model_of(record: Mapping[str, str]) -> str:
    """Return the name of a row's model in lower case, that of a known mixture of experts as in `MIXTURES`.

    >>> [_model_of({"model": name}) for name in ("DeepSeek-V3 671B", "DeepSeek-V2-Lite", "GPT-22B")]
    ['deepseekv3', 'deepseek-v2-lite', 'gpt-22b']
    """
    name = record["model"].lower()
    plain = re.sub(r"[ _-]", "", name)
    for known in MIXTURES:
        beginning = known.replace("-", "")
        if plain.startswith(beginning) and OF_THAT_SIZE.fullmatch(plain, len(beginning)):
            return known
    return name


def many_sources(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing fields, or a kind of run that is not scored."""
    remarks = " ".join(record.get(key, "") for key in ("source", "system", "gpu", "note"))
    unscored = [
        *(["the table says that details are missing"] if any(remark in remarks for remark in UNTRUSTED) else []),
        *(["a GPU whose power is limited, by how much is not said"] if "power limited" in remarks else []),
    ]
    if record["model"].lower().startswith("bert") and count(record, "seq") not in (None, 128):
        unscored.append("a BERT on long sequences, of which padding was removed")
    try:
        run = _run(record, identity)
    except SkippedError as reason:
        unscored.append(str(reason))
        try:
            run = _run(_assumed(record), identity)
        except SkippedError:
            raise SkippedError(unscored[0]) from None
    if unscored:
        raise UnscoredError(unscored[0], run)
    return run


def _assumed(record: Mapping[str, str]) -> Mapping[str, str]:
    """Return a row with assumptions for what it does not state, so that it can be written, though not scored.

    Ranks of model parallelism are tensor ranks as far as a server has them (Narayanan et al. 2021, section 3.2); a
    batch is one sample a replica, of 1024 tokens (of BERT, 512), in 16 bits; nothing is recomputed.
    """
    filled = defaultdict(str, record)
    stated = re.search(r"model-parallel (\d+)", record["extras"])
    if stated and not record["tp"] and not record["pp"]:
        ranks = int(stated.group(1))
        filled["tp"] = str(math.gcd(ranks, 8))
        filled["pp"] = str(ranks // int(filled["tp"]))
    bert = record["model"].lower().startswith("bert")
    replicas = count(filled, "dp") or count(filled, "n_gpus") or 1
    assumed = {"micro_batch": "1", "recompute": "none", "tp": "1", "pp": "1", "seq": "512" if bert else "1024"}
    for key, value in assumed.items():
        if count(filled, key) is None and (key != "recompute" or filled[key] in ("", "?", "? (not stated)")):
            filled[key] = value
    if filled["precision"] in ("", "?", "mixed?"):
        filled["precision"] = "bf16"
    filled["kv_heads"] = filled["kv_heads"] or filled["heads"]
    filled["vpp"] = "" if count(filled, "vpp") is None else filled["vpp"]
    filled["vocab"] = filled["vocab"] or ("30528" if bert else "50304")
    filled["global_batch"] = filled["global_batch"] or str(replicas * int(filled["micro_batch"]))
    return filled


def _run(record: Mapping[str, str], identity: str) -> Run:
    _refuse(record)
    dp, tp, pp, context = _axes(record)
    software = _software(record, tp, pp, context)
    if software.precision == "bf16":
        software = replace(software, precision=sixteen_bits_of(record["gpu"]))
    megatron = _is_early_megatron(record) and not record["model"].lower().startswith("bert")
    micro, micro_batches = _batches(record, dp, pp)
    shape, method = _shape(record), _method(record, dp * context, pp, tp)
    memory = positive(record, "mem_gib")
    metric = next((name for start, name in METRICS.items() if record["mem_kind"].startswith(start)), None)
    of_maker = f"{record['system'].partition(' ')[0]} {record['gpu']}"
    gpu = record["gpu"] if platform_of(of_maker) is None else of_maker
    return Run(
        identity=identity,
        source=record["source"],
        gpu=record["system"] if record["system"] in RACKS else gpu,
        # a rack's trays are no servers of their own: NVLink joins them
        per_node=None if record["system"] in RACKS else count(record, "gpus_per_node"),
        shape=shape,
        software=software,
        method=method,
        flat_optimizer=method == "zero1" and shape.experts is not None,
        ep=(count(record, "ep") or 1) if shape.experts is not None else 1,
        etp=1 if shape.experts is not None and tp > 1 else None,  # the default of Megatron Bridge's recipes
        dp=dp,
        tp=tp,
        pp=pp,
        chunks=_chunks(record),
        micro_batch=micro,
        micro_batches=micro_batches,
        recompute=_recompute(record),
        overlap=not _is_early_megatron(record) and (pp == 1 or _is_torchtitan(record)),
        shards=_shards(record, dp * context),
        clip_norm=MEGATRON_CLIP_NORM if megatron else None,
        scales_loss=megatron and software.precision == "fp16",
        step_s=positive(record, "iter_time_s"),
        memory_bytes=memory * GIB if memory is not None and metric else None,
        memory_metric=metric if memory is not None else None,
    )


def _axes(record: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return dp, tp, pp and cp; one missing value of the first three follows from the others and the GPUs."""
    ranks, context = needed(record, "n_gpus"), count(record, "cp") or 1
    stated = {key: count(record, key) for key in ("dp", "tp", "pp")}
    missing = [key for key, value in stated.items() if value is None]
    if len(missing) > 1:
        raise SkippedError(f"the row does not say {missing[0]}")
    product = context
    for value in stated.values():
        product *= value or 1
    if missing and not ranks % product and record[missing[0]] == "":
        stated[missing[0]], product = ranks // product, ranks
    if None in stated.values():
        raise SkippedError(f"the row does not say {missing[0]}")
    if product != ranks:
        raise SkippedError("dp x tp x pp x cp are not the GPUs")
    return stated["dp"] or 1, stated["tp"] or 1, stated["pp"] or 1, context


def _is_early_megatron(record: Mapping[str, str]) -> bool:
    """Return whether a row is of Megatron-LM before 2023: no overlapped reduction, no flash attention."""
    known = ("Megatron", "Narayanan", "MT-NLG", "DLPerf", "Korthikanti")
    if _is_bridge(record):
        return False
    return any(name in record["source"] for name in known) and "overlap-grad-reduce" not in record["extras"]


def _refuse(record: Mapping[str, str]) -> None:
    """Raise SkippedError for rows with an unsupported kind of model."""
    model = _model_of(record)
    if model not in MIXTURES:
        if "MoE" in record["note"] or (count(record, "ep") or 1) > 1 or OTHER_MIXTURE.search(model):
            raise SkippedError("a mixture of experts")
        if not model.startswith(MODELS) or OTHER_BLOCKS.search(model):
            raise SkippedError("neither a GPT, a Llama nor a BERT")
    if platform_of(record["gpu"]) is None:
        raise SkippedError("a GPU that platforms.toml does not know")
    named = re.split(r" \+ | and | & ", record["gpu"])
    if len({platform.device for gpu in named if (platform := platform_of(gpu))}) > 1:
        raise SkippedError("GPUs of several kinds, of which the row does not say where they are")


def _shape(record: Mapping[str, str]) -> Shape:
    model = _model_of(record)
    if model in MIXTURES:
        return replace(MIXTURES[model], sequence_length=needed(record, "seq"))
    hidden, heads = needed(record, "hidden"), needed(record, "heads")
    return Shape(
        kind="llama" if model.startswith(LLAMAS) else "gpt",
        layers=needed(record, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count(record, "kv_heads") or heads,
        ffn=count(record, "ffn") or 4 * hidden,
        vocabulary=needed(record, "vocab"),
        sequence_length=needed(record, "seq"),
        predicted=MASKED_TOKENS.get(needed(record, "seq")) if model.startswith("bert") else None,
        rectified=model.startswith(RECTIFIED),
        tied=False if model.startswith("nemotron") else None,
        biased=not model.startswith("nemotron"),
    )


def _software(record: Mapping[str, str], tp: int, pp: int, context: int) -> Software:
    precision = record["precision"].lower()
    float8 = precision.startswith(FLOAT8)
    if not float8 and precision not in (*SIXTEEN_BITS, "tf32", "fp32"):
        raise SkippedError(f"precision '{record['precision']}' is not modelled")
    if record["model"].lower().startswith("bert"):
        full = precision in ("tf32", "fp32")
        return Software(precision="fp32" if full else "bf16", tensor_float=precision == "tf32", fused_softmax=False)
    if _is_early_megatron(record):
        remarks = " ".join(record[key] for key in ("id", "recompute", "extras", "note")).lower()
        sequence_parallel = tp > 1 and re.search(SEQUENCE_PARALLEL, remarks) is not None
        return Software(
            precision="bf16" if precision == "bf16" or precision.startswith("bf16/") else "fp16",
            early_stop=False,
            partitioned=tp > 1 and pp > 1,
            receives_in_flight=True,
            message_calls=MEGATRON_MESSAGE_CALLS,
            in_place_loss=True,
            recomputes_attention=True,
            sequence_parallel=sequence_parallel,
            # ZeRO-3 of early 2021, by DeepSpeed's library (Narayanan et al. 2021, section 5.2)
            lists_ranks=_sharding(record["sharding"])[0] == "zero3",
            # since 2022; before, it waited for them
            sums_beside_products=tp > 1 and not sequence_parallel and "Korthikanti" in record["source"],
        )
    if precision in ("tf32", "fp32"):
        return Software(precision="fp32", tensor_float=precision == "tf32", flash_attention=False, dropout=False)
    # recipes of Megatron Bridge overlap the exchanges of dense models' tensor-parallel ranks (CommOverlapConfig)
    dense = _model_of(record) not in MIXTURES
    overlaps = tp > 1 and ("AsyncTP" in record["extras"] or (_is_bridge(record) and dense))
    ratio, model = float8_ratio_of(record["gpu"]), _model_of(record)
    if float8 and ratio is None:
        raise SkippedError("a GPU whose rate in float8 platforms.toml does not know")
    # Transformer Engine prefers cuDNN's kernels from Hopper on (pytorch/attention/dot_product_attention/utils.py,
    # get_attention_backend, which disables FlashAttention for performance)
    attention_ratio = (fused_attention_ratio_of if _is_bridge(record) else attention_ratio_of)(record["gpu"])
    return Software(
        flash_attention=True,
        dropout=False,
        # attention within a short window counts as none
        attention_ratio=attention_ratio * (1 + model.startswith(HALF_WINDOWED)),
        compiled=record["compile"] == "yes" or _is_bridge(record),
        fused_projections=_is_bridge(record),
        sequence_parallel=tp > 1,
        gathers_inputs=_is_torchtitan(record) and tp > 1,
        gathers_alone=overlaps,
        pipelined_maps=overlaps,
        parallel_loss=_is_torchtitan(record) and tp > 1,
        fused_loss=record["compile"] == "yes" and "_2024" not in record["source"],  # before 2025, it was not compiled
        context_ranks=context,
        rings=context > 1 and record["compile"] == "yes" and _is_torchtitan(record),
        float8_maps=float8,
        float_gradients=_is_torchtitan(record) and pp > 1,  # reduced and accumulated in float
    )


def _is_bridge(record: Mapping[str, str]) -> bool:
    """Return whether a row is of Megatron Bridge, whose norms, rotations and activations are fused kernels."""
    return "Megatron-Bridge" in record["source"]


def _method(record: Mapping[str, str], data: int, pp: int, tp: int) -> MethodName:
    """Return the method; FSDP2 over pipeline stages communicates and stores the same as a sharded optimizer.

    FSDP2 keeps the parameters gathered for the first micro-batch until the last one's backward, where it reduces
    gradients (torch 2.6, distributed/pipelining/stage.py, backward_maybe_with_nosync; torchtitan,
    models/llama/parallelize.py: it reshards after a forward only without a pipeline).
    """
    method, _ = _sharding(record["sharding"])
    if method in ("zero2", "zero3") and pp > 1:
        if not _is_torchtitan(record):
            raise SkippedError("FSDP over the stages of a pipeline")
        method = "zero1"
    return method_of(data, tp, pp, method)


def _shards(record: Mapping[str, str], data: int) -> int | None:
    """Return the size of a shard group where shards are replicated: the ranks of a server, as far as they divide.

    None where all ranks shard, or none does.
    """
    _, is_replicated = _sharding(record["sharding"])
    if not is_replicated:
        return None
    platform = platform_of(record["gpu"])
    return math.gcd(data, count(record, "gpus_per_node") or (platform.devices if platform else 8))


def _is_torchtitan(record: Mapping[str, str]) -> bool:
    return "torchtitan" in record["source"]


def _batches(record: Mapping[str, str], dp: int, pp: int) -> tuple[int, int]:
    """Return the samples of a micro-batch and the number of micro-batches.

    In a pipeline, torchtitan's rows state a rank's batch, which is split into `pp` micro-batches by default.
    """
    samples = divided(needed(record, "global_batch"), dp, "samples")
    micro = count(record, "micro_batch")
    if micro is None and pp == 1:
        return samples, 1
    if micro is None:
        raise SkippedError("the row does not say micro_batch")
    if _is_torchtitan(record) and pp > 1 and micro == samples:
        return divided(samples, pp, "micro-batches"), pp
    return micro, divided(samples, micro, "micro-batches")


def _chunks(record: Mapping[str, str]) -> int:
    """Return the pipeline stages per rank (virtual stages)."""
    if record["vpp"] and count(record, "vpp") is None:
        raise SkippedError("the row does not say vpp")
    return count(record, "vpp") or 1


def _recompute(record: Mapping[str, str]) -> Literal["none", "selective", "full"]:
    stated = record["recompute"].lower()
    if stated.startswith(("full", "yes")):
        return "full"
    if stated.startswith("selective"):
        return "selective"
    if stated in ("none", "no") or (
        not stated and _is_bridge(record)
    ):  # its recipes recompute only where they state it
        return "none"
    raise SkippedError("the row does not say what is recomputed")
