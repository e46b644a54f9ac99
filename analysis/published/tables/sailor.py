"""Sailor's validation table: OPT-350M on nodes of four GH200, cut among the four of each node."""

import re
from collections.abc import Mapping

from analysis.published.runs import Run, SkippedError
from analysis.published.tables.fields import divided, needed, number
from analysis.published.transformer import Shape, Software

MODELS = {
    "OPT-350": Shape(
        kind="gpt",
        layers=24,
        hidden=1024,
        heads=16,
        kv_heads=16,
        ffn=4096,
        vocabulary=50272,
        sequence_length=2048,
    )
}
"""Zhang et al. 2022, OPT, table 1; sequence and widths agree with Sailor's own table of layers."""


def sailor(record: Mapping[str, str], identity: str) -> Run:
    """Return what a row says; raise SkippedError where it lacks something, or stages are not alike."""
    if record["model"] not in MODELS:
        raise SkippedError(f"the model {record['model']} is not known")
    stages = [stage.strip().split("|") for stage in record["stages"].split(";")]
    replicas = {replica.strip() for stage in stages for replica in stage}
    if len(replicas) > 1 or len({len(stage) for stage in stages}) > 1:
        raise SkippedError("stages on unequal devices")
    found = re.fullmatch(r"(.+)x(\d+):tp(\d+)", replicas.pop())
    if found is None:
        raise SkippedError("stages that cannot be read")
    gpu, per_node, tp = found.group(1), int(found.group(2)), int(found.group(3))
    dp, pp, micro = len(stages[0]), len(stages), needed(record, "mbs")
    layers = [int(each) for each in record["layers_per_stage"].split("/")]
    layers[0] -= 1  # the embedding
    layers[-1] -= 1  # the head
    return Run(
        identity=identity,
        source=f"Sailor validation, {record['model']} on {gpu}",
        gpu=gpu,
        per_node=per_node,
        shape=MODELS[record["model"]],
        software=Software(
            precision="fp32", dropout=False, fused_softmax=False, early_stop=False, partitioned=tp > 1 and pp > 1
        ),
        method="ddp" if dp > 1 else "pipeline" if pp > 1 else "tensor",
        dp=dp,
        tp=tp,
        pp=pp,
        blocks_of_stages=tuple(layers) if pp > 1 else None,
        micro_batch=micro,
        micro_batches=divided(divided(needed(record, "gbs"), dp, "samples"), micro, "micro-batches"),
        recompute="none",
        overlap=False,
        step_s=number(record, "measured_iter_s"),
        memory_bytes=number(record, "measured_max_mem_bytes"),
        memory_metric="device",
    )
