"""Reader of vTrain's tables: GPT plans on A100 of 80 GB by Megatron-DeepSpeed, fp16, full recomputation."""

from collections.abc import Mapping

from analysis.literature.runs import Run, SkippedError, Software, gpt
from analysis.literature.tables.fields import method_of, micro_batches_of, needed, positive

GPU = "A100-SXM-80GB, 4 cards"
NODE = 8
VOCABULARY = 51200
"""Megatron's own vocabulary, padded; the tables do not state it."""


def vtrain(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing or contradictory fields."""
    dp, micro = needed(record, "data parallelism"), needed(record, "micro batch")
    hidden, heads = needed(record, "hidden size"), needed(record, "attention heads")
    pp, milliseconds = needed(record, "pipeline parallelism"), positive(record, "iteration time (ms)")
    tp, ranks = needed(record, "tensor parallelism"), needed(record, "# GPUs")
    if dp * tp * pp != ranks:
        raise SkippedError("dp x tp x pp are not the GPUs")
    if milliseconds is None:
        raise SkippedError("the row has neither a time nor a memory")
    shape = gpt(
        layers=needed(record, "# layers"),
        hidden=hidden,
        heads=heads,
        vocabulary=VOCABULARY,
        sequence_length=needed(record, "sequence length"),
    )
    return Run(
        identity=identity,
        source=f"vTrain, {'several nodes' if ranks > NODE else 'one node'}",
        gpu=GPU,
        per_node=8,
        shape=shape,
        software=Software(early_stop=False, partitioned=tp > 1 and pp > 1, in_place_loss=True),
        method=method_of(dp, tp, pp),
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch=micro,
        micro_batches=micro_batches_of(needed(record, "global batch"), dp, micro),
        recompute="full",
        overlap=False,
        step_s=milliseconds / 1e3,
    )
