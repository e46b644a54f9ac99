"""Plans in short, for tables and charts."""

from itertools import groupby

from gssim.plan.plan import Plan


def in_words(plan: Plan) -> str:
    """Return a plan in short; given parts of the batch in percent, equal ones in a row once.

    >>> in_words(Plan(method="zero3", dp_shard=8, micro_batches=4, recompute="full"))
    'zero3, dp_shard 8, 4 micro-batches, recompute full, batch even'
    >>> in_words(Plan(method="pipeline", pp=4, schedule="interleaved", micro_batches=8))
    'pipeline, pp 4, interleaved, 8 micro-batches, batch even'
    >>> from gssim.plan.plan import ShareRules
    >>> in_words(Plan(method="ddp", shares=ShareRules(batch=(0.3125, 0.3125, 0.3125, 0.0625))))
    'ddp, batch 3 x 31.2 % + 6.25 %'
    """
    axes = [(name, getattr(plan, name)) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")]
    words = [plan.method, *(f"{name} {size}" for name, size in axes if size and size > 1)]
    if plan.sequence_parallel and plan.tp > 1:
        words.append("sequence parallel")
    if plan.schedule is not None:
        words.append(plan.schedule)
    if plan.micro_batches > 1:
        words.append(f"{plan.micro_batches} micro-batches")
    if plan.recompute != "none":
        words.append(f"recompute {plan.recompute}")
    if plan.offload is not None:
        words.append(f"offload {plan.offload}")
    if plan.push.threshold is not None:
        words.append(f"threshold {plan.push.threshold:g}")
    batch, shards = plan.shares.batch, plan.shares.shards
    if isinstance(batch, str):
        words.append(f"batch {batch}")
    else:
        runs = [(share, sum(1 for _ in equal)) for share, equal in groupby(batch)]
        parts = " + ".join((f"{ranks} x " if ranks > 1 else "") + f"{100 * share:.3g} %" for share, ranks in runs)
        words.append(f"batch {parts}")
    if shards != "even":
        words.append(f"shards {shards if isinstance(shards, str) else 'given'}")
    return ", ".join(words)
