"""Sailor's validation table: OPT-350M on nodes of four GH200, cut among the four of each node."""

import re
from collections.abc import Mapping
from dataclasses import replace

from analysis.published.runs import Run, SkippedError
from analysis.published.shape import Shape, Software
from analysis.published.tables.fields import divided, needed, padded, positive

SEQUENCE = 2048
MODELS = {
    "OPT-350": Shape(
        kind="gpt", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocabulary=50272, sequence_length=SEQUENCE
    ),
    "GPT-Neo-2.7": Shape(
        kind="gpt", layers=32, hidden=2560, heads=20, kv_heads=20, ffn=10240, vocabulary=50257, sequence_length=SEQUENCE
    ),
    "OPT-30": Shape(
        kind="gpt", layers=48, hidden=7168, heads=56, kv_heads=56, ffn=28672, vocabulary=50272, sequence_length=SEQUENCE
    ),
    "LLAMA-3-8": Shape(
        kind="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256,
        sequence_length=SEQUENCE,
    ),
}  # fmt: skip
"""Zhang et al. 2022, OPT, table 1; EleutherAI's GPT-Neo 2.7B; Llama 3 8B. Sequences and widths agree with Sailor's own
tables of layers, where vocabularies are padded as Megatron does."""


def sailor(record: Mapping[str, str], identity: str) -> Run:
    """Return what a row says; raise SkippedError where it lacks something, or stages are not alike."""
    if record["model"] not in MODELS:
        raise SkippedError(f"the model {record['model']} is not known")
    gpu, per_node, tp, pp, dp = _stages(record["stages"])
    micro, layers = needed(record, "mbs"), _blocks(record["layers_per_stage"], pp)
    shape = MODELS[record["model"]]
    if sum(layers) != shape.layers:
        raise SkippedError("stages of another number of layers")
    return Run(
        identity=identity,
        source=f"Sailor validation, {record['model']} on {gpu}",
        gpu=gpu,
        per_node=per_node,
        shape=replace(shape, vocabulary=padded(shape.vocabulary, tp)),
        software=Software(
            precision="fp32",
            tensor_float=True,
            dropout=False,
            fused_softmax=False,
            early_stop=False,
            partitioned=False,
        ),
        method="ddp" if dp > 1 else "pipeline" if pp > 1 else "tensor" if tp > 1 else "single",
        dp=dp,
        tp=tp,
        pp=pp,
        blocks_of_stages=layers if pp > 1 else None,
        micro_batch=micro,
        micro_batches=divided(divided(needed(record, "gbs"), dp, "samples"), micro, "micro-batches"),
        recompute="none",
        overlap=False,
        step_s=positive(record, "measured_iter_s"),
        memory_bytes=positive(record, "measured_max_mem_bytes"),
        memory_metric="device",
    )


def _stages(text: str) -> tuple[str, int, int, int, int]:
    """Return GPU, GPUs of a node, tp, pp and dp; raise SkippedError where stages are not alike."""
    stages = [stage.strip().split("|") for stage in text.split(";")]
    replicas = {replica.strip() for stage in stages for replica in stage}
    if len(replicas) > 1 or len({len(stage) for stage in stages}) > 1:
        raise SkippedError("stages on unequal devices")
    found = re.fullmatch(r"(.+)x(\d+):tp(\d+)", replicas.pop())
    if found is None:
        raise SkippedError("stages that cannot be read")
    return found.group(1), int(found.group(2)), int(found.group(3)), len(stages), len(stages[0])


def _blocks(text: str, pp: int) -> tuple[int, ...]:
    """Return the blocks of each stage.

    >>> _blocks("5/7/7/7", 4)
    (4, 7, 7, 6)
    """
    try:
        layers = [int(each) for each in text.split("/")]
    except ValueError:
        raise SkippedError("stages that cannot be read") from None
    layers[0] -= 1  # the embedding
    layers[-1] -= 1  # the head
    if len(layers) != pp or min(layers) < 0:
        raise SkippedError("stages that cannot be read")
    return tuple(layers)
