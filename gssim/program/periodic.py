"""Periodic synchronization of replicas' parameters: local SGD, DiLoCo, Streaming DiLoCo and SparseLoCo.

[Note: periods] Ranks train apart: inner steps communicate nothing, not even module buffers. An outer step is an inner
one that ends with a synchronization, bucket by bucket and one after another, each bucket of whole tensors in the
optimizer's precision (the master copies, where there are any):

    local_sgd:  parameters = sum over ranks of w * parameters
    diloco:     g = sum over ranks of w * (outer - parameters);  m = mu * m + g;  outer -= lr * (g + mu * m);
                parameters = outer
    sparse_loco: e = decay * e + w * (outer - parameters);  message = largest of each chunk of e;  e -= message;
                outer -= lr * sum over ranks of message;  parameters = outer

With `outer.precision = "int8"` each rank quantizes w * (outer - parameters) and sends it to all others (an all-gather
of integers and scales); g is the sum of what all have sent, its own included. Errors of rounding are not fed back.
Messages of `sparse_loco` are gathered and added in the same way; what is left out or rounded stays in e.

    streaming_diloco: after the step that begins a fragment's exchange, g as above, of these parameters; after the step
                that ends it, m and outer as above, and parameters = a * parameters + (1 - a) * outer

Streaming DiLoCo cuts the parameters in fragments (`Streaming`): each is synchronized as all are under `diloco`, at a
step of its own. Its buckets are copied in after the step that begins its exchange, which goes on on the communication
streams behind the steps that follow; the step that ends it waits for each bucket in turn and updates it. Messages live
all that time. A program of such ranks is a whole period: steps differ in what they begin and end, and exchanges in
flight slow down the steps behind which they go on.

With `plan.dp_shard` = S above 1, replicas of S ranks train apart, each sharded by FSDP2 (`sharded`): gathers and
reduce-scatters stay inside of a replica, and gradients are not reduced over replicas. Each shard is synchronized by
itself among the ranks that hold it: buckets, outer parameters, momentum, blocks of quantized changes and chunks of
sparse ones are those of a rank's own rows of all tensors, without FSDP2's padding, so that it sends an S-th. Shards are
the master copy. OpenDiLoCo and INTELLECT-1 train so: Jaghouar et al. 2024, arXiv:2407.07852, arXiv:2412.01152.

Where tensor-parallel ranks cut the blocks of a replica, a rank synchronizes its slices, and its own copies of what is
not cut. These stay equal, as changes are not rounded: in blocks of 1024 they would be with the slices beside them.

w is a replica's part of the batch, so that with one step in a period, and without momentum, SGD trains as under `ddp`.
The state of the inner optimizer stays on its ranks; gradients are clipped by the norm of a replica's own. Module
buffers are those of the first rank afterwards. Sources: Stich 2018, arXiv:1805.09767; Douillard et al. 2023,
arXiv:2311.08105, whose outer optimizer is torch's SGD with `nesterov`; Douillard et al. 2025, arXiv:2501.18512,
algorithm 2 (torchft's local_sgd.py has the same steps); Sarfi et al. 2025, arXiv:2508.15706, where e is each rank's own
too and takes the place of the momentum, but w, there 1 / ranks, is a factor on the sum.
"""

from collections.abc import Sequence
from dataclasses import replace

from gssim import cost
from gssim.collectives import Communication
from gssim.memory import Event, footprint
from gssim.plan.buckets import Fragment, fragments_of
from gssim.plan.plan import INT8_BLOCK_ELEMENTS, INT8_SCALE_BYTES, chunks_of, int8_blocks, sparse_message_bytes
from gssim.program.lowering import Lowering, once_a_run
from gssim.program.replicated import broadcast_buffers
from gssim.program.sharded import owned_rows
from gssim.program.task import Collectives, Program, Task, TaskId, collective_task, with_ids
from gssim.units import Floats

MEAN_PASSES, OUTER_PASSES = 4, 7
"""Reads and writes of a bucket's bytes before its all-reduce: copied together and weighted (`local_sgd`); copied
together, subtracted from the outer parameters, and weighted (`diloco`)."""
UPDATE_PASSES = 11
"""Reads and writes of the outer optimizer: momentum scaled, added to twice, and the outer parameters updated."""
UNSENT_PASSES = 5
"""Reads and writes of changes that are not sent yet: they decay, and new ones are added."""


FOUND_BYTES = 8
"""An index as torch finds and uses it."""
CODING = {"fp32": (4, 2, 4, 2), "int2": (20, 9, 24, 13)}
"""By precision of sparse values: reads and writes of the entries that a message is written from, those that it is read
into, and the numbers of operations of each."""


def synchronize_parameters(low: Lowering, rank: int) -> list[Task]:
    """Return the tasks with which a step ends on a rank: those of the buckets whose exchange it begins or ends.

    None in an inner step. See [Note: periods].
    """
    every = low.policies.sync_every_steps
    if every is None or low.policies.dp_replicate == 1:
        return []
    step = low.step % every + 1
    tasks: list[Task] = []
    number = 0
    position = low.shard_position(rank)
    for fragment in _fragments(low, position):
        for tensors in _elements(low, position, fragment):
            if step in (fragment.begin_step, fragment.end_step) and any(tensors):
                copied_in, exchange, copied_out = _bucket_tasks(low, rank, number, tensors)
                if fragment.begin_step == fragment.end_step:
                    tasks += [copied_in, exchange, copied_out]
                elif step == fragment.begin_step:
                    stream = low.communication_stream(number)
                    if low.policies.shards_replicas and low.overlaps:  # FSDP2's own gathers are on that one
                        stream = "replication"
                    posted = replace(exchange, stream=stream, after=(copied_in.id,))
                    tasks += [copied_in, posted]
                else:
                    waited = Task(exchange.id.serving("wait"), "exposed_communication", after=(exchange.id,))
                    tasks += [waited, copied_out]
            number += 1
    return [*tasks, *broadcast_buffers(low)] if step == every else tasks


def _bucket_tasks(low: Lowering, rank: int, number: int, tensors: tuple[int, ...]) -> list[Task]:
    """Return the tasks of a bucket: copy in, exchange, and update and copy out; see [Note: periods]."""
    device, outer = low.device(rank), low.policies.outer_optimizer
    if outer == "sparse":
        return _largest(low, rank, number, tensors)
    if outer and low.scenario.plan.outer.precision == "int8":
        return _quantized(low, rank, number, tensors)
    elements = sum(tensors)
    size = float(elements * low.master_bytes)
    pass_s = size / device.memory_bandwidth_bytes_per_s
    back_s = (2 + _mixing_passes(low)) * pass_s + len(tensors) * device.operation_overhead_s
    if outer:
        back_s += UPDATE_PASSES * pass_s + 4 * device.operation_overhead_s
    back_s += _cast_s(low, rank, tensors)
    own = TaskId("outer", bucket=number)
    return [
        Task(
            own.serving("copy-in"),
            "optimizer",
            duration_s=(OUTER_PASSES if outer else MEAN_PASSES) * pass_s + 2 * device.operation_overhead_s,
            need=footprint([Event(0, size, "communication")]),
        ),
        _exchange(low, rank, own, "all-reduce", size),
        Task(
            own.serving("copy-out"),
            "optimizer",
            duration_s=back_s,
            need=footprint([Event(1, -size, "communication")]),
        ),
    ]


def _mixing_passes(low: Lowering) -> int:
    """Return the reads of a rank's own parameters, where outer ones are mixed with them and not copied over them."""
    return 1 if low.policies.in_fragments and low.scenario.plan.streaming.local_ratio else 0


def _quantized(low: Lowering, rank: int, number: int, tensors: tuple[int, ...]) -> list[Task]:
    """Return the tasks of a bucket whose changes are sent as 8-bit integers; see [Note: periods]."""
    device, elements, ranks = low.device(rank), sum(tensors), low.policies.dp_replicate
    blocks = int8_blocks(elements)
    size, padded = float(elements * low.master_bytes), float(blocks * INT8_BLOCK_ELEMENTS * low.master_bytes)
    scales, message = (
        float(blocks * low.master_bytes),
        float(blocks * (INT8_BLOCK_ELEMENTS + INT8_SCALE_BYTES)),
    )
    byte_s, call_s = 1 / device.memory_bandwidth_bytes_per_s, device.operation_overhead_s
    own = TaskId("outer", bucket=number)
    return [
        Task(
            own.serving("copy-in"),
            "optimizer",
            duration_s=(OUTER_PASSES * size + 9 * padded + message) * byte_s + 10 * call_s,
            need=footprint(
                [
                    Event(0, size, "communication"),
                    Event(1, padded, "temporaries"),
                    Event(2, message, "communication"),
                    Event(2, 2 * scales, "temporaries"),
                    Event(3, -2 * scales - padded, "temporaries"),
                    Event(3, -size, "communication"),
                    Event(4, ranks * message, "communication"),
                ]
            ),
        ),
        _exchange(low, rank, own, "all-gather", ranks * message),
        Task(
            own.serving("copy-out"),
            "optimizer",
            duration_s=((1 + 6 * ranks) * padded + ranks * message) * byte_s
            + (2 + UPDATE_PASSES + _mixing_passes(low)) * size * byte_s
            + (5 + 3 * ranks + len(tensors)) * call_s
            + _cast_s(low, rank, tensors),
            need=footprint(
                [
                    Event(0, -message, "communication"),
                    Event(1, 2 * padded, "temporaries"),
                    Event(2, -2 * padded, "temporaries"),
                    Event(3, -ranks * message, "communication"),
                ]
            ),
        ),
    ]


def _largest(low: Lowering, rank: int, number: int, tensors: tuple[int, ...]) -> list[Task]:
    """Return the tasks of a bucket whose largest changes alone are sent; see [Note: periods]."""
    device, options, value = low.device(rank), low.scenario.plan.sparse_outer, low.master_bytes
    elements, ranks = sum(tensors), low.policies.dp_replicate
    padded = chunks_of(options, elements) * options.chunk_elements
    entries = chunks_of(options, elements) * options.chunk_entries
    message = float(sparse_message_bytes(options, elements, value))
    size, padded_bytes, found = float(elements * value), float(padded * value), float(entries * (value + FOUND_BYTES))
    byte_s, call_s = 1 / device.memory_bandwidth_bytes_per_s, device.operation_overhead_s
    padded_codes = chunks_of(options, elements) * 4 * -(-options.chunk_entries // 4)
    write_passes, read_passes, write_calls, read_calls = CODING[options.precision]
    # signs, magnitudes and codes are made beside indices and values, and are held while the message is read back
    coding = float(entries * (value + 1) + padded_codes) if options.precision == "int2" else 0.0
    # codes, and the signs that they are made into, are held beside the values
    read = float(entries * (FOUND_BYTES + (1 + 3 * value if options.precision == "int2" else value)))
    read_s = read_passes * entries * value * byte_s + read_calls * call_s
    own = TaskId("outer", bucket=number)
    return [
        Task(
            own.serving("copy-in"),
            "optimizer",
            duration_s=(OUTER_PASSES + UNSENT_PASSES) * size * byte_s
            + 5 * call_s
            + cost.largest_time_s(device, elements=padded, entries=entries, value=value)
            + write_passes * entries * value * byte_s
            + write_calls * call_s
            + read_s
            + cost.unpack_time_s(device, encoding="coo", elements=padded, entries=entries, value=value),
            need=footprint(
                [
                    Event(0, size, "communication"),
                    Event(1, -size, "communication"),
                    Event(2, padded_bytes, "temporaries"),  # magnitudes
                    Event(3, found, "temporaries"),
                    Event(4, -padded_bytes, "temporaries"),
                    Event(5, message, "communication"),
                    Event(6, coding + read, "temporaries"),
                    Event(7, -coding - read - found, "temporaries"),
                    Event(8, ranks * message, "communication"),
                ]
            ),
        ),
        _exchange(low, rank, own, "all-gather", ranks * message),
        Task(
            own.serving("copy-out"),
            "optimizer",
            duration_s=(padded_bytes + 5 * size) * byte_s
            + ranks
            * (read_s + cost.unpack_time_s(device, encoding="coo", elements=padded, entries=entries, value=value))
            + (2 + len(tensors)) * call_s
            + _cast_s(low, rank, tensors),
            need=footprint(
                [
                    Event(0, -message, "communication"),
                    Event(1, padded_bytes, "temporaries"),
                    Event(2, read, "temporaries"),
                    Event(3, -read - padded_bytes, "temporaries"),
                    Event(4, -ranks * message, "communication"),
                ]
            ),
        ),
    ]


def _exchange(low: Lowering, rank: int, own: TaskId, kind: str, size_bytes: float) -> Task:
    """Return a rank's part in the collective of those that hold the same, and of other shards of equal sizes."""
    alike = _equal_shards(low, low.shard_position(rank))
    group, *beside = (group for group in low.groups_along("dp_replicate") if low.shard_position(group[0]) in alike)
    exchange = Communication(kind, group, size_bytes, beside=tuple(beside))
    name = own if len(alike) == low.policies.dp_shard else own._replace(place=alike[0])
    staged = low.staging(low.device(rank), exchange) if kind == "all-gather" else ()
    return collective_task(own, exchange, communication=name, need=footprint(staged))


def _cast_s(low: Lowering, rank: int, tensors: Sequence[int]) -> float:
    """Return the time to cast updated master copies of tensors to the workload's precision; shards are the master."""
    if low.policies.shards_replicas:
        return 0.0
    device, workload = low.device(rank), low.scenario.workload
    return cost.master_copy_time_s(device, workload, elements=sum(tensors), tensors=len(tensors), casts=1)


@once_a_run
def _equal_shards(low: Lowering, position: int) -> tuple[int, ...]:
    """Return the positions in a replica whose shards have as many elements of each tensor as that at `position`."""
    own = _own_elements(low, position)
    return tuple(each for each in range(low.policies.dp_shard) if _own_elements(low, each) == own)


@once_a_run
def _own_elements(low: Lowering, position: int) -> Sequence[int]:
    """Return the elements of every parameter at a position in a replica, in the model's order."""
    if low.policies.shards_replicas:
        return owned_rows(low, position)
    return [parameter.elements for _, parameter in low.parameters]


@once_a_run
def _fragments(low: Lowering, position: int) -> tuple[Fragment, ...]:
    """Return what is synchronized together, and when, at a position in a replica."""
    layers = [instance.index for instance, _ in low.parameters]
    sizes = [elements * low.master_bytes for elements in _own_elements(low, position)]
    return fragments_of(low.scenario.plan, low.policies, layers=layers, sizes_bytes=sizes)


def _elements(low: Lowering, position: int, fragment: Fragment) -> list[tuple[int, ...]]:
    """Return the elements of each tensor of every bucket of a fragment."""
    own = _own_elements(low, position)
    return [tuple(own[place] for place in bucket) for bucket in fragment.buckets]


@once_a_run
def _buckets(low: Lowering, position: int) -> tuple[tuple[int, ...], ...]:
    """Return the elements of each tensor of every bucket, fragment after fragment."""
    return tuple(bucket for fragment in _fragments(low, position) for bucket in _elements(low, position, fragment))


def outer_tensors(low: Lowering, rank: int) -> list[float]:
    """Return the bytes of a rank's outer parameters of every bucket, which are those of its momentum."""
    return [float(sum(tensors) * low.master_bytes) for tensors in _buckets(low, low.shard_position(rank))]


def outer_memory(low: Lowering, rank: int) -> dict[str, float]:
    """Return what the outer optimizer keeps on a rank, by category; see [Note: periods]."""
    if not low.policies.outer_optimizer or low.policies.dp_replicate == 1:
        return {}
    size = sum(outer_tensors(low, rank))
    if low.policies.outer_optimizer == "sparse":
        return {"outer_parameters": size, "residuals": sum(unsent_tensors(low, rank))}
    return {"outer_parameters": size, "outer_momentum": size}


def unsent_tensors(low: Lowering, rank: int) -> list[float]:
    """Return the bytes of each bucket's changes that a rank has not sent yet, in whole chunks."""
    if low.policies.outer_optimizer != "sparse" or low.policies.dp_replicate == 1:
        return []
    options = low.scenario.plan.sparse_outer
    buckets = _buckets(low, low.shard_position(rank))
    return [float(chunks_of(options, sum(each)) * options.chunk_elements * low.master_bytes) for each in buckets]


def after_inner_steps(program: Program, alone_s: Floats, *, count: int, shown: Program | None = None) -> Program:
    """Return the program of an outer step that ranks begin after so many seconds of inner steps, each on its own.

    `alone_s`: by rank, of all `count` inner steps together. Ranks that begin at other times get roles of their own.
    `shown`: program of an inner step, the last of which is then not part of these seconds, but has its own tasks.
    """
    kinds: dict[tuple[int, int, float], int] = {}
    inner_of = shown.role_of if shown else program.role_of
    keys = list(zip(program.role_of, inner_of, alone_s.tolist(), strict=True))
    roles = tuple(kinds.setdefault(key, len(kinds)) for key in keys)
    tasks = []
    for role, inner, seconds in kinds:
        idle_steps = count - (shown is not None)
        before = [Task(TaskId("inner-steps", part=idle_steps), "idle", duration_s=seconds)] if idle_steps else []
        if shown:
            before += with_ids(shown.tasks[inner], lambda task: task._replace(inner=True))
        tasks.append((*before, *program.tasks[role]))
    return replace(
        program,
        tasks=tuple(tasks),
        communications=Collectives(tasks) if shown else program.communications,
        persistent=tuple(program.persistent[role] for role, _, _ in kinds),
        roles=roles,
        tensors=tuple(program.tensors[role] for role, _, _ in kinds) if program.tensors else (),
    )
