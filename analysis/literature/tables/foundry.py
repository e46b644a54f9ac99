"""LLM Foundry's table: MPT models under FSDP on A100 and H100.

Models by their names: llm-foundry, scripts/train/benchmarking and yamls of the MPT family; the parameters that a row
states check them.
"""

from collections.abc import Mapping

from analysis.literature.platforms import first_attention_ratio_of, float8_ratio_of
from analysis.literature.runs import Run, Shape, SkippedError, Software, gpt
from analysis.literature.tables.fields import micro_batches_of, needed, number, positive

GPUS = {"a100_40gb": "A100-SXM-40GB", "a100_80gb": "A100-SXM-80GB", "h100_80gb": "H100-SXM-80GB"}
MODELS = {
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
VOCABULARY = 50368
CLOSE_RATIO = 0.01
"""Between the parameters that a row states and those of the model that its name stands for."""
STRATEGIES = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2"}
PRECISIONS = ("bf16", "amp_bf16", "amp_fp16", "amp_fp8")


def llm_foundry(record: Mapping[str, str], identity: str) -> Run:
    """Return what a row says; raise SkippedError where it lacks something."""
    if record["Sharding Strategy"] not in STRATEGIES:
        raise SkippedError(f"sharding '{record['Sharding Strategy']}' is not known")
    if record["GPU"] not in GPUS:
        raise SkippedError("a GPU that platforms.toml does not know")
    ranks, micro, batch = (needed(record, key) for key in ("# GPUs", "MicroBatchSize", "GlobalBatchSize"))
    if record["Activation CPUOffload"] == "True":
        raise SkippedError("activations go to the host")
    shape, rate = _shape(record), positive(record, "Throughput (T/s)")
    if rate is None:
        raise SkippedError("the row has neither a time nor a memory")
    return Run(
        identity=_identity(record) or identity,
        source=f"LLM Foundry, {GPUS[record['GPU']]}",
        gpu=GPUS[record["GPU"]],
        per_node=8,
        shape=shape,
        software=_software(record),
        method=STRATEGIES[record["Sharding Strategy"]] if ranks > 1 else "single",
        dp=ranks,
        micro_batch=micro,
        micro_batches=micro_batches_of(batch, ranks, micro),
        recompute="full" if record["Activation Checkpointing"] == "True" else "none",
        overlap=True,
        step_s=batch * shape.sequence_length / rate,
    )


def _identity(record: Mapping[str, str]) -> str:
    keys = ("Model", "# GPUs", "GPU", "SeqLen (T)", "MicroBatchSize", "GlobalBatchSize", "Precision")
    return "foundry " + " ".join(record[key] for key in keys)


def _shape(record: Mapping[str, str]) -> Shape:
    name, stated = record["Model"].lower(), number(record, "NumParams")
    if name not in MODELS:
        raise SkippedError(f"the model {record['Model']} is not known")
    layers, hidden, heads = MODELS[name]
    shape = gpt(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=VOCABULARY,
        sequence_length=needed(record, "SeqLen (T)"),
    )
    if stated and abs(stated / shape.parameters - 1) > CLOSE_RATIO:
        raise SkippedError("the row's parameters are not those of a model of that name")
    return shape


def _software(record: Mapping[str, str]) -> Software:
    precision = record["Precision"]
    if precision not in PRECISIONS:
        raise SkippedError(f"precision '{precision}' is not modelled")
    float8 = precision == "amp_fp8"
    ratio = float8_ratio_of(GPUS[record["GPU"]]) if float8 else 1.0
    if ratio is None:
        raise SkippedError("a GPU whose rate in float8 platforms.toml does not know")
    return Software(
        flash_attention=True,
        attention_ratio=first_attention_ratio_of(GPUS[record["GPU"]]),
        dropout=False,
        map_speedup=ratio,
        float8_casts=float8,
    )
