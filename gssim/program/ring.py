"""Ring attention: keys and values rotate among context-parallel ranks beside the blocks of attention.

Each of n ranks attends to n blocks of keys and values, its own first. While it attends to one block, it sends these
keys and values to the next rank and receives those of the following block: n - 1 rotations in a forward. In the
backward keys and values rotate again, and their gradients follow them: each rank adds its own to those received, and
sends the sum on while it works at the next block. A last shift returns the gradients to their owner, so gradients take
n shifts. A rank thus sends

    (n - 1) * 2 * b * p * width_of_keys * bytes        in a forward, and
    (2 n - 1) * 2 * b * p * width_of_keys * bytes      in a backward (n of them in float32 on GPUs),

where p is the number of positions of a rank (Liu et al. 2023, arXiv:2310.01889).

With `plan.context_exchange = "gather"` a single all-gather of the same bytes takes the place of the rotations of keys
and values, while a rank attends to its own block; it keeps them all until the attention ends. Gradients are shifted as
in a ring (torch 2.13, torch.distributed.tensor.experimental, _AllGatherRotater).

With `plan.context_overlap = false` nothing runs beside an exchange: each is waited for as soon as it has begun. Keys
and values of the next block then arrive before the attention to the present one, and gradients that were sent are
freed before the next block. Source: torch 2.6, distributed/_functional_collectives.py, _maybe_wrap_tensor: a traced
collective is followed by its wait, which the compiler does not move (_inductor/config.py,
reorder_for_compute_comm_overlap = False).

[Note: uneven order] Compiled ranks of a ring may run the same backward in different orders. Each rank is compiled on
its own, and inductor chooses one of several orders by its estimate of peak memory (torch 2.6, _inductor/config.py,
reorder_for_peak_memory = True). The ranks' blocks have different halves of queries and keys, and so the choices may
differ: some ranks attend to one block at a time, and send its gradients before the next; others attend to all of their
n blocks first. The former then wait at their first shift until the latter have attended to all, and have n - 1 blocks
left: the backward of an attention takes the time of 2n - 1 blocks instead of n. Found by compiling a block of Llama 3
with 32,768 positions a rank with torch 2.6 for GPUs, without running it, rank by rank. 8B in bf16 and in float8, and
405B in float8 on 8 tensor ranks: on 4 ranks, ranks 0 and 2 attend first; on 8, rank 4 does, but not 0 and 7. On 2 ranks
both have one order in float8, though not in bf16, which is not modelled. One order have also, on 4 ranks, 405B with
exchanges beside products (`plan.tp_overlap`), and 8B where blocks recompute nothing. Here rank n/2 alone attends first;
with more such ranks it would take as long. Where keys rotate instead of being gathered, ranks in different orders would
wait for each other forever.

Let the attention's time be that on whole sequences with the rank's part of the heads. With a balanced division a block
takes 1/n of it; otherwise its share of the work: see `gssim.plan.context_blocks`. The attention's part of a layer's
time is its part of the layer's FLOP; only the attention's FLOP grow with the square of the sequence length.
`gsreal.methods.ring_attention` works in this way; memory is that of its tensors, in order. Selective recomputation
keeps the output of all blocks together, so it rotates nothing again.

[Note: merging] Each block after the first is merged into the output, weighted by the logarithms of its sums, and its
gradients are added to those of the blocks before. Both are element-wise, at the rate of the memory. Counted are the
bytes read and written of outputs (and queries) and of keys and values; the logarithms, one per row of a head, are left
out. On CPUs the operations are those of `gsreal.methods.ring_attention`; on GPUs those of torch's context parallelism
(torch 2.13, torch.distributed.tensor.experimental: _SDPAMerger, _partial_update,
_templated_ring_attention_backward), which merges in float32, copies a whole tensor where only half of its rows change,
and concatenates what it sends: gradients of keys and values go around in float32. Where exchanges are waited for
(`plan.context_overlap = false`), the block is compiled: one kernel then reads and writes the sums in float32, reads
what it adds, and copies nothing.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from gssim.collectives import Communication, Pairs
from gssim.memory import Event, footprint
from gssim.plan import Block, ring_blocks
from gssim.program.lowering import Lowering, layer_groups, once_a_run
from gssim.program.task import PASSES, Task, TaskId, collective_task
from gssim.units import PRECISION_BYTES
from gssim.workload import LayerInstance, Reduction, TokenInput

BLOCK_OPERATIONS = ("gather-keys", "rotate", "attend")
PRODUCTS = {"f": 2, "r": 2, "b": 5}
"""Matrix products of an attention, each of 2 * b * p * s * width FLOP, by pass."""


def attention_ratio(low: Lowering, instance: LayerInstance, phase: str, reduction: Reduction, samples: int) -> float:
    """Return the fraction of a layer's FLOP in a pass that belongs to its attention."""
    layer, length = instance.layer, low.scenario.workload.sequence_length or 1
    born = _allocated_tensor_bytes(low, instance, reduction, samples)  # outputs, or gradients of queries, and others
    elements = max(born) / attention_value_bytes(low)
    flop = layer.backward_flop if phase == "b" else layer.forward_flop
    whole = flop.at(b=samples, s=length)
    return min(1.0, PRODUCTS[phase] * 2 * elements * length / whole) if whole else 0.0


def attention_value_bytes(low: Lowering) -> int:
    """Return the bytes of an element of queries, keys and values: autocast has them in its own precision."""
    autocast = low.scenario.workload.autocast
    return low.value_bytes if autocast is None else PRECISION_BYTES[autocast]


def ring_attention(
    low: Lowering,
    rank: int,
    instance: LayerInstance,
    phase: str,
    samples: int,
    *,
    reduction: Reduction,
    alone_s: float,
    before: TaskId,
    samples_of_group: int | None,
) -> list[Task]:
    """Return the blocks and exchanges of a ring, or of the attention to gathered keys. They follow the part of the
    layer's pass that ends where attention begins.

    `alone_s`: time of the attention where a rank has whole sequences and a part of the heads. `before`: identity of the
    preceding part. `samples_of_group`: the rank's number of samples if rings differ in it, else None.
    """
    policies, source = low.policies, low.scenario.workload.model.input
    causal = isinstance(source, TokenInput) and source.task == "next-token"
    blocks = ring_blocks(low.ring_position(rank), ranks=policies.cp, causal=causal, zigzag=policies.zigzag)
    # however the work is divided, all ranks together do that of whole sequences
    mean_work = policies.cp * (0.5 if causal else 1.0)
    size = low.traced_scale * reduction.size_bytes.at(b=samples, s=1)
    out, *others = sorted(_allocated_tensor_bytes(low, instance, reduction, samples), reverse=True)
    exchange = ring_exchange(low, low.batch_sizes[rank], policies.cp * size)
    device = low.device(rank)
    gradient_bytes = size * gradient_width(device.kind, attention_value_bytes(low))
    returning = ring_exchange(low, low.batch_sizes[rank], policies.cp * gradient_bytes)
    copies_rows = device.kind == "cpu" and samples > 1
    value_bytes, waits = attention_value_bytes(low), not policies.ring_overlaps
    moved_bytes = (
        merge_bytes if device.kind == "cpu" else partial(float_merge_bytes, value_bytes=value_bytes, compiled=waits)
    )
    attends_first = phase == "b" and waits and _attends_first(low, rank)
    tasks: list[Task] = []
    last = len(blocks) - 1
    own = TaskId("attend", layer=instance.module, during=PASSES[phase])
    turn = own._replace(op="rotate", samples=samples_of_group)
    keys_of = partial(_keys_from_ring, exchange, turn, last=last, size=size)
    if policies.gathers_keys:
        gathering = gathering_exchange(low, low.batch_sizes[rank], policies.cp * size)
        keys_of = partial(_keys_from_gather, gathering, turn._replace(op="gather-keys"), last=last, size=size)

    def returned(step: int, *, before: TaskId) -> list[Task]:
        """Return how the rank adds its gradients of a block to those received, and sends the sums on."""
        back, added = turn._replace(part=step or None).serving("return"), list[Task]()
        if step and not waits:
            added.append(
                Task(back.serving("await"), "exposed_communication", after=(back._replace(part=step - 1 or None),))
            )
        sent = _shift(returning, back, after=added[-1].id if added else before)
        if not waits and step < last:
            return [*added, sent]
        changes = [-gradient_bytes]
        if attends_first and step < last:
            changes += [-_found_bytes(blocks[step + 1], size, out), gradient_bytes]
        if step == last and gradient_bytes != size:
            changes += [size, -gradient_bytes]
        events = [Event(place, change, "communication") for place, change in enumerate(changes)]
        release = Task(back.serving("release"), "exposed_communication", after=(back,), need=footprint(events))
        return [*added, sent, release]

    for step, block in enumerate(blocks):
        attend = own._replace(part=step or None)
        keys = keys_of(step, before=before)
        tasks += keys.posted
        own_changes = (
            _backward_changes(
                step,
                block,
                size,
                out,
                gradient_bytes,
                copies_rows=copies_rows,
                is_sent_there=not waits,
                is_added_there=not attends_first,
            )
            if phase == "b"
            else _forward_changes(step, block, out, others[-1])
        )
        changes = [*keys.allocated, *own_changes, *keys.freed]
        events = [Event(place, change, "communication") for place, change in enumerate(changes)]
        duration_s = alone_s * (block.work if block else 0.0) / mean_work
        duration_s += moved_bytes(phase, step, last, block, size, out) / device.memory_bandwidth_bytes_per_s
        name = "forward" if phase == "f" else "backward"
        awaited = tuple(task.id for task in keys.posted) if waits else keys.awaited
        tasks.append(Task(attend, name, duration_s=duration_s, after=awaited, need=footprint(events)))
        before = attend
        if phase == "b" and not attends_first:
            tasks += returned(step, before=before)
            before = next(task.id for task in reversed(tasks) if task.exchange is None)
    for step in range(len(blocks) if attends_first else 0):
        tasks += returned(step, before=before)
        before = tasks[-1].id
    return tasks


def _attends_first(low: Lowering, rank: int) -> bool:
    """Return whether a rank's compiled backward attends to all blocks before it sends gradients: [Note: uneven order].

    Assumed where exchanges are waited for.
    """
    policies, plan = low.policies, low.scenario.plan
    if policies.cp <= 2 or not policies.gathers_keys or low.device(rank).kind == "cpu":
        return False
    if plan.recompute != "full" or plan.tp_overlap:
        return False
    return low.ring_position(rank) == policies.cp // 2


class _Keys(NamedTuple):
    """How a rank has the keys and values of one step of its attention."""

    posted: tuple[Task, ...]
    """The exchange that begins with the step."""
    awaited: tuple[TaskId, ...]
    """The exchange that the step waits for, if exchanges overlap; else it waits for `posted`."""
    allocated: Sequence[float]
    """Bytes allocated at its beginning."""
    freed: Sequence[float]
    """Bytes freed at its end, negative."""


def _keys_from_ring(
    exchange: Communication, turn: TaskId, step: int, *, last: int, size: float, before: TaskId
) -> _Keys:
    """Return the keys and values of a step of a ring: the next step's arrive meanwhile; its own are then freed."""
    posted = (_shift(exchange, turn._replace(part=step or None), after=before),) if step < last else ()
    awaited = (turn._replace(part=step - 1 or None),) if step else ()
    return _Keys(posted, awaited, [size] if step < last else [], [-size] if step else [])


def _keys_from_gather(
    gathering: Communication, gather: TaskId, step: int, *, last: int, size: float, before: TaskId
) -> _Keys:
    """Return the keys and values of a step where all are gathered during the first step, and freed after the last."""
    held = gathering.size_bytes
    posted = (_shift(gathering, gather, after=before),) if not step else ()
    return _Keys(posted, (gather,) if step == 1 else (), [] if step else [held], [-held] if step == last else [])


def merge_bytes(phase: str, step: int, last: int, block: Block | None, keys_bytes: float, output_bytes: float) -> float:
    """Return the bytes read and written to merge a block of a ring on CPUs; see [Note: merging].

    `keys_bytes`: bytes of a rank's keys and values; `output_bytes`: bytes of its output, or of its queries. The first
    step copies the keys and values that it sends, and in a forward the queries. A merge of outputs weighs and adds
    both; a merge of gradients only adds them.

    >>> block = Block(1, 2, causal=False)  # of the second half of the queries
    >>> merge_bytes("f", 0, 1, None, 10, 100), merge_bytes("f", 1, 1, block, 10, 100)
    (220, 350.0)
    >>> merge_bytes("b", 0, 1, None, 10, 100), merge_bytes("b", 1, 1, block, 10, 100)
    (20, 180.0)
    """
    if step == 0:
        return 2 * keys_bytes + (0 if phase == "b" else 2 * output_bytes)
    if block is None:
        return 0.0
    of_queries, of_keys = (2 - block.first_half) / 2 * output_bytes, block.key_halves / 2 * keys_bytes
    return 3 * (of_queries + of_keys) if phase == "b" else 7 * of_queries


def float_merge_bytes(
    phase: str,
    step: int,
    last: int,
    block: Block | None,
    keys_bytes: float,
    output_bytes: float,
    *,
    value_bytes: int,
    compiled: bool = False,
) -> float:
    """Return the bytes read and written to merge a block of a ring on GPUs; see [Note: merging].

    `value_bytes`: bytes of an element of `keys_bytes` and `output_bytes`. `compiled`: whether one kernel merges a
    block.

    >>> block = Block(0, 1, causal=False)  # to the first half of the keys
    >>> float_merge_bytes("f", 1, 2, block, 10, 100, value_bytes=2)
    1900.0
    >>> float_merge_bytes("b", 1, 2, block, 10, 100, value_bytes=2)
    605.0
    >>> float_merge_bytes("f", 1, 2, block, 10, 100, value_bytes=2, compiled=True)
    500.0
    """
    wide = PRECISION_BYTES["fp32"] / value_bytes
    cast = 1 + wide if wide > 1 else 0.0
    sent = 2 * keys_bytes if step == 0 < last else 0.0
    of_queries, of_keys = (
        ((2 - block.first_half) / 2 * output_bytes, block.key_halves / 2 * keys_bytes) if block else (0.0, 0.0)
    )
    halves_queries, halves_keys = (block.first_half == 1, block.key_halves == 1) if block else (False, False)
    if compiled:
        if phase != "b":
            merged = 2 * wide * output_bytes + of_queries if step and block else 0.0
            return sent + merged + cast * output_bytes * (step == last)
        merged = (2 if step else 1) * wide * (output_bytes + keys_bytes) + of_queries + of_keys if block else 0.0
        return sent + merged + cast * (output_bytes + keys_bytes) * (step == last)
    if phase != "b":
        merged = 8 * wide * of_queries + 2 * wide * output_bytes * halves_queries if step else 0.0
        return sent + cast * of_queries + merged + cast * output_bytes * (step == last)
    merged = (1 + 2 * wide) * (of_queries + of_keys) + 2 * wide * (
        output_bytes * halves_queries + keys_bytes * halves_keys
    )
    zeros = wide * (output_bytes + keys_bytes) if step == 0 else 0.0
    return sent + zeros + merged + 2 * wide * keys_bytes + cast * (output_bytes + keys_bytes) * (step == last)


def _allocated_tensor_bytes(low: Lowering, instance: LayerInstance, reduction: Reduction, samples: int) -> list[float]:
    """Return the bytes of each tensor that an attention allocates: output and logarithms, or its inputs' gradients."""
    length = low.scenario.workload.sequence_length or 1
    buffers = [buffer for buffer in instance.layer.buffers if buffer.born == reduction.moment]
    return [buffer.bytes_at(b=samples, s=length, scale=low.traced_scale) for buffer in buffers]


@once_a_run
def ring_exchange(low: Lowering, samples: int, size_bytes: float) -> Communication:
    """Return the exchange in which each rank of a ring sends to the next one; `size_bytes`: sent by all of them
    together.

    One object represents all exchanges of this size, in all rings whose ranks have `samples` samples, because uneven
    exchanges are told apart by object identity.
    """
    groups = layer_groups(low, samples, "cp")
    ranks = len(groups[0])
    sent = size_bytes / ranks
    rows = [tuple(sent if to == (rank + 1) % ranks else 0.0 for to in range(ranks)) for rank in range(ranks)]
    pairs = Pairs(rows, tuple(range(ranks)))
    return Communication.among(groups, "all-to-all-v", size_bytes, pair_bytes=pairs)


@once_a_run
def gathering_exchange(low: Lowering, samples: int, size_bytes: float) -> Communication:
    """Return the all-gather of keys and values; arguments, and why there is one object, as of `ring_exchange`.

    gloo's own goes through a flat copy: each rank sends its keys and values to all others instead.
    """
    groups = layer_groups(low, samples, "cp")
    if low.scenario.cluster.backend != "gloo":
        return Communication.among(groups, "all-gather", size_bytes)
    ranks = range(len(groups[0]))
    rows = [tuple(size_bytes / len(ranks) * (to != rank) for to in ranks) for rank in ranks]
    pairs = Pairs(rows, tuple(ranks))
    return Communication.among(groups, "all-gather", size_bytes, pair_bytes=pairs, carried_as="all-to-all-v")


def _shift(exchange: Communication, own: TaskId, *, after: TaskId) -> Task:
    """Return a rank's part in an exchange beside the attention."""
    return collective_task(own, exchange, "ring", after=(after,))


def _forward_changes(step: int, block: Block | None, out: float, sums: float) -> Iterator[float]:
    """Yield the bytes that one step of a forward allocates and frees, in order, besides keys and values.

    These are the block's output and logarithms, and two tensors like them that weigh both outputs. The first step's
    output is the layer's own.
    """
    if step and block is not None:
        of_rows = (2 - block.first_half) / 2
        yield from (of_rows * (out + 3 * sums), -of_rows * (out + 3 * sums))


def gradient_width(kind: str, value: int) -> float:
    """Return the bytes of an element of travelling gradients over the `value` bytes of an element of keys and values.

    On GPUs they are added up and sent in fp32; see [Note: merging].

    >>> gradient_width("cuda", 2), gradient_width("cpu", 2)
    (2.0, 1.0)
    """
    return 1.0 if kind == "cpu" else max(1.0, PRECISION_BYTES["fp32"] / value)


def _backward_changes(
    step: int,
    block: Block | None,
    size: float,
    out: float,
    gradient_bytes: float,
    *,
    copies_rows: bool,
    is_sent_there: bool,
    is_added_there: bool,
) -> Iterator[float]:
    """Yield the bytes that one step of a backward allocates and frees, in order, besides keys and values.

    These are the block's gradients; the gradients of keys and values that were sent on, of `gradient_bytes`, unless
    freed before (`is_sent_there`); and the receive tensor for the next, unless the block's gradients are added later
    (`is_added_there`). The first are the layer's own. `copies_rows`:
    whether the kernel copies the gradient of the output where a block has only the second half of the rows. torch's
    kernel on CPUs does so for several samples, because these rows are not contiguous in memory (torch 2.13,
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, `grad_out.contiguous()`).
    """
    if not step:
        yield from (gradient_bytes, -size, gradient_bytes)
        return
    found = _found_bytes(block, size, out)
    if copies_rows and block is not None and block.first_half:
        yield from (found, out / 2, -out / 2)
    else:
        yield found
    if is_added_there:
        yield from (-gradient_bytes * is_sent_there, -found, gradient_bytes)


def _found_bytes(block: Block | None, size: float, out: float) -> float:
    """Return the bytes of the gradients that a block of attention finds: of its queries, keys and values."""
    return 0.0 if block is None else (2 - block.first_half) / 2 * out + block.key_halves / 2 * size
