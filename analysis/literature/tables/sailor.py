"""Reader of Sailor's validation table: plans that name the GPUs of every stage and replica."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

from analysis.literature.platforms import Server
from analysis.literature.runs import Run, Shape, SkippedError, Software, gpt
from analysis.literature.tables.fields import method_of, micro_batches_of, needed, padded, positive

SEQUENCE = 2048
MODELS = {
    "OPT-350": gpt(layers=24, hidden=1024, heads=16, vocabulary=50272, sequence_length=SEQUENCE),
    "GPT-Neo-2.7": gpt(layers=32, hidden=2560, heads=20, vocabulary=50257, sequence_length=SEQUENCE),
    "OPT-30": gpt(layers=48, hidden=7168, heads=56, vocabulary=50272, sequence_length=SEQUENCE),
    "LLAMA-3-8": Shape(
        kind="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256,
        sequence_length=SEQUENCE,
    ),
}  # fmt: skip
"""Zhang et al. 2022, OPT, table 1; EleutherAI's GPT-Neo 2.7B; Llama 3 8B. Sequences and widths agree with Sailor's own
tables of layers, where vocabularies are padded as Megatron does."""


def sailor(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing fields, or stages that are split differently."""
    if record["model"] not in MODELS:
        raise SkippedError(f"the model {record['model']} is not known")
    servers, tp, pp, dp = _stages(record["stages"])
    gpus = " and ".join(dict(servers))
    micro, layers = needed(record, "mbs"), _blocks(record["layers_per_stage"], pp)
    shape = MODELS[record["model"]]
    if sum(layers) != shape.layers:
        raise SkippedError("stages of another number of layers")
    return Run(
        identity=identity,
        source=f"Sailor validation, {record['model']} on {gpus}",
        gpu=gpus,
        per_node=servers[0][1],
        servers=servers if len(set(servers)) > 1 else (),
        shape=replace(shape, vocabulary=padded(shape.vocabulary, tp)),
        software=Software(
            precision="fp32",
            tensor_float=True,
            dropout=False,
            fused_softmax=False,
            early_stop=False,
            in_place_loss=True,
            partitioned=tp > 1 and pp > 1,
        ),
        method=method_of(dp, tp, pp),
        dp=dp,
        tp=tp,
        pp=pp,
        blocks_of_stages=layers if pp > 1 else None,
        micro_batch=micro,
        micro_batches=micro_batches_of(needed(record, "gbs"), dp, micro),
        recompute="none",
        overlap=False,
        step_s=positive(record, "measured_iter_s"),
        memory_bytes=positive(record, "measured_max_mem_bytes"),
        memory_metric="device",
    )


def _stages(text: str) -> tuple[tuple[Server, ...], int, int, int]:
    """Return servers in rank order, tp, pp and dp; raise SkippedError where stages differ in tp or dp.

    >>> _stages("A100-40x2:tp2|V100-16x4:tp2;V100-16x4:tp2|V100-16x4:tp2")
    ((('A100-40', 2), ('V100-16', 4), ('V100-16', 2)), 2, 2, 2)
    """
    stages = [stage.split("|") for stage in text.split(";")]
    replicas = [replica.strip() for stage in stages for replica in stage]
    matches = [re.fullmatch(r"(.+)x([1-9]\d{0,3}):tp([1-9]\d{0,3})", replica) for replica in replicas]
    if None in matches:
        raise SkippedError("stages that cannot be read")
    parsed = [(match.group(1), int(match.group(2)), int(match.group(3))) for match in matches if match]
    tensor_ranks, replica_counts = {tp for _, _, tp in parsed}, {len(stage) for stage in stages}
    if len(tensor_ranks) > 1:
        raise SkippedError("replicas with unequal numbers of tensor ranks")
    if len(replica_counts) > 1:
        raise SkippedError("stages with unequal numbers of replicas")
    (tp,) = tensor_ranks
    servers: list[Server] = []
    for (gpu, devices), same in groupby(parsed, key=lambda replica: replica[:2]):
        ranks = tp * len(list(same))
        servers += [(gpu, devices)] * (ranks // devices) + ([(gpu, ranks % devices)] if ranks % devices else [])
    return tuple(servers), tp, len(stages), len(stages[0])


def _blocks(text: str, pp: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, without the embedding and the head.

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
