"""The plan as the user writes it, and its options; `gssim.plan.policies` resolves it to policies on a cluster."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from math import prod
from typing import Annotated, Literal

from pydantic import Field

from gssim.plan.methods import MethodName
from gssim.plan.pipeline_schedule import ScheduleName
from gssim.units import (
    RANGES,
    Count,
    NonNegativeFloat,
    PositiveBytes,
    PositiveFloat,
    PositiveInt,
    Recompute,
    Threshold,
    spec,
)

Partition = Literal["data", "weight-gradient"]
ParameterPolicy = Literal["replicated", "gathered", "sharded"]
GradientPolicy = Literal["local", "all-reduce", "reduce-scatter", "push", "periodic"]
OptimizerPolicy = Literal["replicated", "sharded"]
ExchangePolicy = Literal["point-to-point", "backend"]
Shares = tuple[Annotated[float, Field(ge=0, le=1, strict=True)], ...]

MIB = 2**20
DDP_FIRST_BUCKET_BYTES = 1 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
DDP_BUCKET_BYTES = 25 * MIB  # DistributedDataParallel(bucket_cap_mb=25)


@spec
class Push:
    """Push of gradients to the owners of their shards. All options but `encoding` need a threshold."""

    threshold: Threshold | None = None
    """Gradients of smaller magnitude are not sent; absent: all are sent, densely; inf: none, the control of studies."""
    kind: Literal["absolute", "relative", "target-density"] = "absolute"
    """`relative`: the threshold is multiplied by the mean magnitude of the tensor, as a rank has accumulated it.
    `target-density`: it is the fraction to be sent of those of a tensor's elements that other ranks own; the magnitude
    that this fraction reaches is estimated on each rank every `reestimate_steps`, and scaled in between to follow a
    sample of each step's gradients.
    """
    error_feedback: bool | None = None
    """Keep the gradients that were not sent and add them to the next step's. Absent: on for SGD, with or without
    momentum, where dropped contributions shorten the step; off where `aggregate` corrects that, and for Adam, whose
    step does not depend on the gradient's scale and whose second moment suffers from the bursts of late
    contributions."""
    error_feedback_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the residual."""
    aggregate: Literal["batch-weight", "received-weight"] = "batch-weight"
    """The owner weights each rank's contribution by its part of the batch. `received-weight`: and divides the sum by
    the total weight of the contributions that arrived for an element, its own included."""
    encoding: Literal["auto", "coo", "bitmap", "dense"] = "auto"
    """`auto`: per message, whichever has the fewest bytes of `coo` (a value and an int32 index for each entry),
    `bitmap` (a value for each entry, a bit for each element) and `dense`; see `gssim.plan.encodings`."""
    warmup_steps: Count = 0
    """Steps at the start that are pushed densely, as if there were no threshold."""
    reestimate_steps: PositiveInt = 32
    """For `target-density`: number of steps between two estimates of each tensor's threshold; in between the thresholds
    of a bucket are scaled together."""

    @property
    def selects(self) -> bool:
        """Whether the messages depend on the gradients: some may stay under a threshold."""
        everything = 1.0 if self.kind == "target-density" else 0.0
        return self.threshold is not None and self.threshold != everything


def resolved_push(push: Push, *, sgd: bool) -> Push:
    """Return the push with the default that depends on the optimizer filled in; `sgd`: whether it is SGD.

    >>> [resolved_push(Push(threshold=1e-3), sgd=sgd).error_feedback for sgd in (True, False)]
    [True, False]
    """
    if push.error_feedback is not None:
        return push
    drops = push.threshold is not None and push.aggregate == "batch-weight"
    return replace(push, error_feedback=sgd and drops)


@spec
class Publish:
    """Publication of updated parameters to the replicas."""

    threshold: NonNegativeFloat | None = None
    """Send only parameters that differ by at least this much from their last published value; absent: all, densely.
    Unsent changes stay in that difference: owners keep a master copy of their shard, whatever the precision."""
    kind: Literal["absolute", "relative"] = "absolute"
    """`relative`: the threshold is times the learning rate, which is about the change of a parameter by a step of Adam.
    """
    encoding: Literal["auto", "coo", "bitmap", "dense"] = "auto"
    """As for a push; a dense message holds the whole range, unchanged parameters as well."""
    overlap: bool | None = None
    """Let the next forward begin while published parameters are in flight, each layer waiting for its own. Absent:
    false, because other code that reads parameters after a step (a moving average, say) would read old values: it has
    to wait first. On gloo it gains nothing where every rank has only one core, which its threads share with the compute
    (measured on loopback: 1.02 times the step without, median of 20 pairs). For `zero1` with `zero1_implementation =
    "megatron"`, on nccl: Megatron-LM's `--overlap-param-gather`, which gathers a bucket while the layers before it run
    forward. Stages after a pipeline's first gather all of theirs at once: with `schedule = "interleaved"` from the
    step's begin on, one stage ahead of use; else only when the first activations arrive, so that steps may take longer
    than without (predicted only)."""

    @property
    def selects(self) -> bool:
        """Whether the messages depend on the parameters: some may stay under a threshold."""
        return bool(self.threshold)


def absolute_threshold(publish: Publish, learning_rate: float) -> float | None:
    """Return the absolute change from which on a parameter is published, or None where all are.

    >>> absolute_threshold(Publish(threshold=0.5, kind="relative"), learning_rate=0.25)
    0.125
    """
    if publish.threshold is None or publish.kind == "absolute":
        return publish.threshold
    return publish.threshold * learning_rate


@spec
class Outer:
    """Outer optimizer of `diloco`: SGD with Nesterov momentum (Douillard et al. 2023, arXiv:2311.08105)."""

    learning_rate: PositiveFloat = 0.7
    """Factor on the mean change of the parameters and its momentum; 1 without momentum is `local_sgd`."""
    momentum: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.9
    """Momentum of the mean changes."""
    precision: Literal["fp32", "int8"] = "fp32"
    """Precision of what ranks send. `int8`: in blocks of 1024 elements, a bucket's last one padded with zeros, each
    rank sends its weighted changes divided by a fp32 scale (the block's largest magnitude / 127) and rounded to the
    nearest integer, and the scales; all ranks gather all messages, and add them up in fp32. `fp32`: an all-reduce in
    the optimizer's precision."""


@spec
class Streaming:
    """Fragments of `streaming_diloco` (Douillard et al. 2025, arXiv:2501.18512).

    The i-th layer with parameters belongs to fragment i modulo `fragments` (their strided pattern). Each fragment is
    synchronized once every `sync_every_steps` = H steps: of n fragments the k-th, from 1, sends its changes after step
    k * H // n - `delay_steps` of a period, and is updated after step k * H // n.
    """

    fragments: PositiveInt = 2
    """At most as many as the model has layers with parameters."""
    delay_steps: Annotated[int, Field(ge=0, strict=True)] = 1
    """Steps behind which a fragment's exchange goes on. Fewer than `sync_every_steps` // `fragments`, so that one
    fragment at a time is under way, and none at the end of a period. 0: ranks wait for it."""
    local_ratio: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.5
    """Part a of a rank's own parameters after an update: a * its own + (1 - a) * outer parameters. 0: the outer ones
    alone, without the steps that were trained during the exchange."""


INT8_BLOCK_ELEMENTS, INT8_SCALE_BYTES = 1024, 4
"""Elements that share a scale in `Outer.precision = "int8"`, and its size."""


def int8_blocks(elements: int) -> int:
    """Return the number of blocks of a bucket whose changes are sent as 8-bit integers.

    >>> int8_blocks(1024), int8_blocks(1025)
    (1, 2)
    """
    return -(-elements // INT8_BLOCK_ELEMENTS)


ChunkElements = Annotated[int, Field(gt=0, le=32768, strict=True)]
"""Elements of a chunk, so few that 16-bit integers number them."""


@spec
class SparseOuter:
    """Outer step of `sparse_loco`: largest changes, with error feedback (Sarfi et al. 2025, arXiv:2508.15706)."""

    learning_rate: PositiveFloat = 1.0
    """Factor on the sum of what all ranks have sent."""
    decay: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.95
    """Factor on what a rank has not sent yet, before its new changes are added; takes the place of a momentum."""
    chunk_elements: ChunkElements = 4096
    """Elements of a bucket among which the largest are chosen; its last chunk is padded with zeros."""
    chunk_entries: PositiveInt = 64
    """Number of elements of each chunk that a rank sends: those of largest magnitude."""
    precision: Literal["fp32", "int2"] = "int2"
    """Precision of the values that ranks send, each with a 16-bit index. `int2`: two bits, for the sign and for one of
    two magnitudes of a chunk, which are the means of the magnitudes over and not over their mean, in fp32. `fp32`: the
    optimizer's precision."""


FirstCompressed = Annotated[int, Field(ge=2, strict=True)]
"""A step from which on gradients are compressed: DistributedDataParallel rebuilds its buckets after the first."""


@spec
class PowerSGD:
    """Low-rank compression of gradients under `powersgd` (Vogels et al. 2019, arXiv:1905.13727)."""

    rank: PositiveInt = 2
    """Columns of the factors P and Q of every matrix, or its smaller side where that is less."""
    error_feedback: bool = True
    """Add what the product of the factors left out of a rank's gradients to those of its next step."""
    warm_start: bool = True
    """Begin each step with the factors Q of the one before; else with random ones, equal on all ranks."""
    min_compression_ratio: PositiveFloat = 2.0
    """Tensors whose factors have more than an n-th of their elements, such as vectors, are all-reduced as they are
    (torch's min_compression_rate)."""
    start_step: FirstCompressed = 2
    """Steps at the start of a training in which gradients are all-reduced whole; they belong to the warm-up."""


@spec
class TopK:
    """Sparsification of gradients under `topk` (Aji and Heafield 2017, arXiv:1704.05021)."""

    density_ratio: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.01
    """Fraction of the elements of every bucket that each rank sends: the largest by magnitude, at least one."""
    error_feedback: bool = True
    """Add what a rank did not send to its gradients of the next step."""
    start_step: FirstCompressed = 2
    """Steps at the start of a training in which gradients are all-reduced whole; they belong to the warm-up."""


def chunks_of(options: SparseOuter, elements: int) -> int:
    """Return the number of chunks of a bucket.

    >>> chunks_of(SparseOuter(), 4096), chunks_of(SparseOuter(), 4097)
    (1, 2)
    """
    return -(-elements // options.chunk_elements)


def sparse_message_bytes(options: SparseOuter, elements: int, value_bytes: int) -> int:
    """Return the size of the message that a rank sends of a bucket: indices, values, and magnitudes of the chunks.

    In each chunk of 4096 elements, with 64 entries: 128 bytes of indices, and 16 of signs and 8 of magnitudes, or 256
    of values. The message is padded to whole groups of 8 bytes, so that its parts are aligned.

    >>> sparse_message_bytes(SparseOuter(), 8192, 4), sparse_message_bytes(SparseOuter(precision="fp32"), 8192, 4)
    (304, 768)
    """
    entries = options.chunk_entries
    values = -(-entries // 4) + 2 * 4 if options.precision == "int2" else entries * value_bytes
    return 8 * -(-chunks_of(options, elements) * (2 * entries + values) // 8)


def low_rank_of(options: PowerSGD, shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Return rows, columns and rank of a tensor under PowerSGD; None where it is all-reduced as it is.

    Rows are its first dimension, columns all others. It is compressed where (rows + columns) * rank *
    `min_compression_ratio` < rows * columns: torch 2.13, powerSGD_hook.py, _should_compress.

    >>> low_rank_of(PowerSGD(rank=2), (8, 4, 4)), low_rank_of(PowerSGD(rank=2), (16,))
    ((8, 16, 2), None)
    """
    rows, columns = (shape[0] if shape else 1), prod(shape[1:])
    rank = min(rows, columns, options.rank)
    worth = (rows + columns) * rank * options.min_compression_ratio < rows * columns
    return (rows, columns, rank) if worth else None


def largest_count(options: TopK, elements: int) -> int:
    """Return how many of a bucket's elements each rank sends.

    >>> largest_count(TopK(density_ratio=0.01), 1000), largest_count(TopK(density_ratio=0.01), 10)
    (10, 1)
    """
    return min(elements, max(1, round(options.density_ratio * elements)))


@spec
class Replanning:
    """Rebalancing of the batch at run time; `gssim.plan.rebalancing` describes how these options work together."""

    ewma_weight: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.2
    """Weight of the newest observation of a rank's speed in its running mean."""
    drift_ratio: Annotated[float, Field(gt=1, le=RANGES["ratio of times"][1], strict=True)] = 1.25
    """Changes of a rank's speed by less than this are noise."""
    drift_limit: PositiveFloat = 1.0
    """Drift is detected where the excess changes of a rank's speed, natural logarithms summed over steps, exceed this.
    """
    hysteresis_ratio: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.05
    """Least expected gain of a new batch split, as a fraction of the slowest rank's time."""
    minimum_steps: PositiveInt = 5
    """Least number of steps between two batch splits, and before the first."""


@spec
class ShareRules:
    """Sizes of the ranks' parts of the batch, and of the shards of the parameters."""

    batch: Literal["even", "throughput"] | Shares = "even"
    """`even`, `throughput` (in proportion to the ranks' speeds: samples per second of forward and backward, by the
    device's profile of the model or by a roofline), or each part's fraction."""
    shards: Literal["even", "compute", "memory", "cost"] | Shares = "even"
    """Shard sizes: `even`, in proportion to `compute` (speeds as of `throughput`), `memory` (all devices
    equally full), `cost` (least time of pushes, updates and publications, within memory), or each rank's fraction."""
    replan: bool = False
    """Rebalance the batch at run time as measured speeds change."""
    replanning: Replanning = Replanning()
    """Options of `replan`."""


@spec
class Plan:
    """The parallelization of a training: a method, and any policy that overrides the method's."""

    method: MethodName
    """A preset of the policies below, each of which overrides it."""
    ranks: PositiveInt | None = None
    """Number of the cluster's devices that take part: its first ones. Absent: all of them (`single`: one). The Result
    names the others, as `idle_devices`."""
    dp_replicate: PositiveInt | None = None
    """Replicas of the shards, or of the whole model. Absent: the ranks that the other axes leave, for methods that
    replicate, and for `zero2` and `zero3` where `dp_shard` is given; else 1. The sizes of all axes multiply to the
    number of ranks."""
    dp_shard: PositiveInt | None = None
    """Ranks among which state is sharded. Absent: the ranks that the other axes leave, for methods that shard; else 1.
    With `local_sgd`, `diloco`, `streaming_diloco` and `sparse_loco`: ranks of a replica, among which it is sharded as
    under `zero3`; ranks with the same shard of all replicas synchronize it."""
    tp: PositiveInt = 1
    """Ranks that share each block's tensors; for `tensor` and `gs_tp`, 1 means the ranks that the other axes leave."""
    cp: PositiveInt = 1
    """Context parallelism: ranks that divide every sequence among them, from the embedding to the loss. For the
    attention, queries, keys, values and outputs are exchanged by all-to-alls, so that each rank attends to whole
    sequences with its part of the heads (DeepSpeed Ulysses). Gradients are reduced or pushed, and state is sharded,
    over these ranks too. What is pushed over a threshold is predicted by a rank's tokens. Beside `tp`, each rank runs
    its slices of blocks on its part of the sequences, and exchanges the heads that it has; stages of a pipeline
    (`pp`) pass on their parts; experts (`ep`) are divided among these ranks too. Ranks are numbered with `tp` inside
    `cp`, `cp` inside the data axes, and these inside `pp`."""
    context_exchange: Literal["all-to-all", "ring", "gather"] = "all-to-all"
    """How context-parallel ranks attend to each other's positions. `all-to-all`: each to whole sequences, with its part
    of the heads, which their number must allow. `ring`: keys and values of a rank's positions go around, and each rank
    attends to a block at a time, with all heads (ring attention). `gather`: the same blocks, but all keys and values
    are all-gathered at once, while a rank attends to its own; their gradients go around (torch's default)."""
    context_split: Literal["zigzag", "plain"] = "zigzag"
    """Positions of context-parallel ranks with `ring` or `gather`. `zigzag`: of 2n parts of a sequence, the i-th rank
    has the i-th and the i-th from the end, so that all have as much to do under a causal mask. `plain`: the i-th of n
    parts."""
    context_overlap: bool = True
    """With `ring` or `gather`, run the exchanges of keys and values, and of their gradients, beside the attention to a
    block. `false`: each exchange is waited for as soon as it has begun, as where torch's context parallelism is
    compiled: a traced collective is followed by its wait, which inductor does not move. On more than two GPUs that
    gather keys and recompute everything, without `tp_overlap`, a rank then attends to all blocks of a backward before
    it sends gradients, and the others wait for it: inductor gives ranks different orders."""
    pp: PositiveInt = 1
    """Ranks in a pipeline of stages; for `pipeline`, 1 means the ranks that the other axes leave."""
    ep: PositiveInt = 1
    """Ranks that divide the routed experts of each mixture-of-experts layer: so many data ranks in a row, of which
    those that divide sequences (`cp`) are the innermost. Tokens are sent to the ranks of their experts and back by
    all-to-alls; gradients of experts are reduced, and their parameters and optimizer states sharded where the method
    shards these, among the ranks that hold the same ones: expert by expert, or, where these ranks are more than the
    experts that they hold, inside each expert. Under `gs`, `gs_z3` and `gs_hier` these ranks alone own them, in
    proportion to their shares (`shares.shards`), and push gradients of them to one another (under `gs_hier` too without
    a reduction inside a node); of experts that a rank holds alone nothing is sent."""
    etp: PositiveInt | None = None
    """Ranks of a tensor group that divide each expert, where `ep` divides experts too; absent: all. With fewer, the
    others hold experts of their own, and `ep` counts them too, as the innermost: Megatron-LM's
    `expert-tensor-parallel-size`. With 1 and `sequence_parallel`, each of them routes the tokens of its own part of a
    sequence. Other values are predicted only, of models that are cut so (`workload.model.expert_tensor_ranks`)."""
    partition: Partition | None = None
    """Split by samples, or of the weight gradients of the same samples. Absent: the method's."""
    parameters: ParameterPolicy | None = None
    """Whole on every rank; sharded at rest and gathered for a step; or gathered just in time. Absent: the method's."""
    gradients: GradientPolicy | None = None
    """Synchronization of the gradients; `periodic`: of the parameters instead, every `sync_every_steps`. Absent: the
    method's."""
    sync_every_steps: PositiveInt | None = None
    """Steps from one synchronization of the parameters to the next, under `local_sgd`, `diloco`, `streaming_diloco` and
    `sparse_loco`: step n of a training, the warm-up's included, ends with one where it divides n (`streaming_diloco`:
    with that of the last fragment). Absent: 8 for these, else none."""
    outer: Outer = Outer()
    """Outer optimizer of `diloco` and `streaming_diloco`."""
    streaming: Streaming = Streaming()
    """Fragments of `streaming_diloco`."""
    sparse_outer: SparseOuter = SparseOuter()
    """Outer step of `sparse_loco`."""
    compress: Literal["bf16", "fp16"] | None = None
    """Format in which buckets of gradients are all-reduced: they are cast to it, divided by the number of replicas,
    summed, and cast back (torch's bf16_compress_hook and fp16_compress_hook). Absent: bf16 for `half`, else none."""
    powersgd: PowerSGD = PowerSGD()
    """Low-rank compression of `powersgd`."""
    topk: TopK = TopK()
    """Sparsification of `topk`."""
    gradient_sync: Literal["step", "micro-batch"] | None = None
    """Whether gradients are synchronized once a step or after every micro-batch. Absent: the method's."""
    optimizer_state: OptimizerPolicy | None = None
    """Whole on every rank, or sharded among the owners. Absent: the method's."""
    zero1_implementation: Literal["torch", "deepspeed", "megatron"] = "torch"
    """For `zero1`. `torch`: ZeroRedundancyOptimizer updates whole tensors, each broadcast by the rank that updates it.
    `deepspeed`: all parameters lie in one flat buffer, padded, of which each rank updates an even part, with a master
    copy of it whatever the precision; parts are all-gathered in buckets of 5e8 elements. Gradients are all-reduced in
    buckets of at most `bucket_bytes`, without `overlap` and in pipelines only after the backward, and then freed: a
    rank keeps those of its part (predicted only). `megatron`: Megatron-LM's distributed optimizer: the same parts, with
    a master copy only where parameters are in 16 bits; gradients exist in one buffer alone, to which the products that
    compute them add, and which is reduce-scattered, not all-reduced (predicted only)."""
    zero2_implementation: Literal["torch", "deepspeed"] = "torch"
    """For `zero2`. `torch`: FSDP2 gathers the parameters of each block in every micro-batch, and reduce-scatters its
    gradients. `deepspeed`: as `zero1_implementation = "deepspeed"`, but gradients are all-reduced and freed in the
    backward of every micro-batch, with `overlap` or without (predicted only)."""
    offload: Literal["optimizer", "parameters"] | None = None
    """State that each rank keeps in its host's memory, where the host's cores update it. `parameters`: FSDP2's
    CPUOffloadPolicy: shards of parameters, their gradients and the optimizer's state; a shard is copied to the device
    before each gather, its gradients are copied back after each reduction. `optimizer`: the optimizer's state and the
    master copy, as DeepSpeed's `offload_optimizer`: gradients of what a rank updates are copied to the host, updated
    parameters back; with `zero1_implementation` or `zero2_implementation = "deepspeed"`, gradients of several
    micro-batches are added up on the device, and copied to the host and back between micro-batches (predicted only).
    On a CPU, which is its own host, `parameters` changes nothing. Absent: none."""
    receive_buffers: Literal["micro-batch", "in-flight"] = "micro-batch"
    """For pipelines. `micro-batch`: a stage keeps a buffer for every micro-batch's input, and for every gradient of its
    output, all step (torch's PipelineStage). `in-flight`: it has buffers for inputs whose backward is still to come,
    and for one gradient, and interleaved stages free what they have sent (Megatron-LM, DeepSpeed; predicted only)."""
    push: Push = Push()
    """Push of gradients to owners."""
    publish: Publish = Publish()
    """Publication of parameters by owners."""
    shares: ShareRules = ShareRules()
    """Batch split and shard sizes."""
    sequence_parallel: bool = False
    """Divide sequences among the ranks of the axis tp between the cut parts of blocks: norms, dropouts and residuals
    then run on parts of the sequence, and all-gathers and reduce-scatters take the place of all-reduces."""
    gathered_inputs: Literal["kept", "gathered-again"] = "kept"
    """With `sequence_parallel`, the gathered inputs of linear maps. `kept`: for the backward, as torch does.
    `gathered-again`: each rank keeps its part, and a second all-gather runs beside the map's backward, as Megatron-LM
    does (predicted only)."""
    tp_overlap: bool = False
    """With `sequence_parallel`, run all-gathers beside the matrix products that read what they bring, and
    reduce-scatters beside those that make what they send, in as many parts as there are ranks (Megatron-LM's
    tp-comm-overlap, torch's asynchronous tensor parallelism). On gloo, on CPUs, they are rings of messages, and real.
    On nccl they are predicted only: memory outside the allocator is that of Transformer Engine's buffers with
    `gathered_inputs = "gathered-again"`, else of torch's workspace."""
    async_input_gradients: bool = False
    """Overlap the sum of a linear map's input gradient over the ranks of the axis tp with the product that gives the
    weight's gradient, as Megatron-LM does. The sum is an all-reduce; with `sequence_parallel`, a reduce-scatter for
    each gathered tensor, which overlaps with the products of all maps that read it. Real runs then cut blocks without
    DTensor. On gloo, the threads that sum share the rank's cores with the products."""
    embedding_parallel: bool = False
    """Divide the rows of the token embedding among the ranks of the axis tp: each looks up the tokens whose rows it
    has, and one all-reduce adds the ranks' results (Megatron-LM, torchtitan). A head that shares the embedding's weight
    needs `loss_parallel` too."""
    loss_parallel: bool = False
    """Divide the vocabulary among the ranks of the axis tp: each has its rows of the head, and its logits alone; the
    loss takes two small all-reduces, and the gradient of the head's input one. The head must be a linear map without
    bias; one that shares the token embedding's weight needs `embedding_parallel` too."""
    recompute: Recompute = "none"
    """`full`: each block keeps only its input, and its backward runs its forward again (gradient checkpointing).
    `selective`: it keeps the outputs of compute-heavy operations too (matrix products, convolutions, attention), and
    only the others run again: torch's selective activation checkpointing. `every-second-product`: as `selective`, but
    of a block's matrix products the second, the fourth, ... run again too: torchtitan's selective checkpointing by
    operation."""
    micro_batches: PositiveInt = 1
    """Parts in which each rank processes its samples, one after another, before an update (gradient accumulation)."""
    schedule: ScheduleName | None = None
    """Schedule of a pipeline. `deepspeed`: the 1F1B of DeepSpeed's PipelineEngine, in which a stage sends or receives
    one message at a time; there may be fewer micro-batches than stages. `interleaved_zero_bubble`: torch's
    ScheduleInterleavedZeroBubble (ZB-H1 of Qi et al. 2023), which sends a stage's input gradient first, and computes
    the gradients of its weights where the rank would else wait; with methods `pipeline`, `zero2` and `gs`. Absent:
    1f1b, or gpipe where there are fewer micro-batches than stages."""
    stages: tuple[PositiveInt, ...] | None = None
    """Layers of each pipeline stage; the loss is part of the last and is not counted. Absent: balanced, one stage a
    rank, two where interleaved (also without bubbles). Interleaved plans may give each rank more."""
    bucket_bytes: PositiveBytes = DDP_BUCKET_BYTES
    """Size of gradient buckets (DDP, Gradient Sharding)."""
    first_bucket_bytes: PositiveBytes = DDP_FIRST_BUCKET_BYTES
    """Size of the bucket that is ready first."""
    overlap: bool = True
    """Overlap communication with compute where the method and backend can."""
    exchange: ExchangePolicy | None = None
    """Transport of reduce-scatters, all-gathers and pushes: point-to-point messages, in rings and exchanges of our own,
    or the backend's collectives. Absent: `point-to-point` on gloo (whose reduce-scatter moves an all-reduce's bytes)
    and for every push; else `backend`. All-reduces and broadcasts are always the backend's."""

    @property
    def zero_implementation_key(self) -> str:
        """The key that says whose ZeRO with replicated parameters it is."""
        return f"plan.zero{1 if self.zero2_implementation == 'torch' else 2}_implementation"

    @property
    def sends_by_data(self) -> bool:
        """Whether message sizes depend on the data (a threshold is set), so that a prediction needs statistics."""
        return self.push.selects or self.publish.selects


@cache
def default_plan(method: MethodName) -> Plan:
    """Return the plan of a method without any other key, as it stands in a file: what absent keys say."""
    return Plan(method=method)


def in_words(plan: Plan) -> str:
    """Return a plan in short; given parts of the batch in percent, equal ones in a row once.

    >>> in_words(Plan(method="zero3", dp_shard=8, micro_batches=4, recompute="full"))
    'zero3, dp_shard 8, 4 micro-batches, recompute full, batch even'
    >>> in_words(Plan(method="pipeline", pp=4, schedule="interleaved", micro_batches=8))
    'pipeline, pp 4, interleaved, 8 micro-batches, batch even'
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
