"""Reader of AMP's trials: GPT-2 medium on 16 T4, four to a machine.

A row gives the plan and the stages; the rest is from the paper (Li et al. 2022, "AMP: Automatically Finding Model
Parallel Strategies with Heterogeneity Awareness", section 5.1) and DeepSpeed's pipelined GPT-2.
"""

from collections.abc import Mapping
from itertools import pairwise

from analysis.literature.platforms import sixteen_bits_of
from analysis.literature.runs import Run, SkippedError, Software, gpt
from analysis.literature.tables.fields import method_of, micro_batches_of, needed, padded, positive

GPU = "T4"
RANKS, MACHINE = 16, 4
LAYERS, HIDDEN, HEADS, SEQUENCE = 24, 1024, 16, 1024
GLOBAL_BATCH = 32
VOCABULARY = 50257
BEFORE, AFTER = 2, 4
"""Layers of DeepSpeed's pipeline before the blocks (embedding, transposition) and after them (transposition, norm,
logits, loss)."""


def amp(record: Mapping[str, str], identity: str) -> Run:
    """Return the run of a row; raise SkippedError for missing fields, or another experiment."""
    if record["experiment"] != "homogeneous":
        raise SkippedError(f"the experiment '{record['experiment']}' is not known")
    dp, tp, pp = (needed(record, key) for key in ("dp", "tp", "pp"))
    micro = needed(record, "micro_batch")
    if dp * tp * pp != RANKS:
        raise SkippedError("dp x tp x pp are not the 16 GPUs")
    step_s = positive(record, "measured_iter_s")
    if step_s is None:
        raise SkippedError("the row has no time (inf: it did not fit)")
    blocks = _blocks(record["partition"], pp)
    return Run(
        identity=identity,
        source="AMP, GPT-2 medium on 16 T4",
        gpu=GPU,
        per_node=MACHINE,
        shape=gpt(
            layers=LAYERS,
            hidden=HIDDEN,
            heads=HEADS,
            vocabulary=padded(VOCABULARY, tp),
            sequence_length=SEQUENCE,
        ),
        software=Software(
            precision=sixteen_bits_of(GPU), early_stop=False, partitioned=tp > 1 and pp > 1, in_place_loss=True
        ),
        method=method_of(dp, tp, pp),
        dp=dp,
        tp=tp,
        pp=pp,
        blocks_of_stages=blocks if pp > 1 else None,
        micro_batch=micro,
        micro_batches=micro_batches_of(GLOBAL_BATCH, dp, micro),
        recompute="full",
        overlap=False,
        step_s=step_s,
    )


def _blocks(partition: str, pp: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage; the partition's bounds also count DeepSpeed's other layers.

    >>> _blocks("[0, 15, 30]", 2)
    (13, 11)
    """
    try:
        bounds = [int(each) for each in partition.strip("[] ").split(",")]
    except ValueError:
        raise SkippedError("a partition that cannot be read") from None
    if len(bounds) != pp + 1 or (bounds[0], bounds[-1]) != (0, LAYERS + BEFORE + AFTER):
        raise SkippedError("a partition of another model, or into other stages than pp")
    inside = [min(max(bound - BEFORE, 0), LAYERS) for bound in bounds]
    blocks = tuple(end - start for start, end in pairwise(inside))
    if min(blocks) < 0:
        raise SkippedError("a partition that cannot be read")
    return blocks
