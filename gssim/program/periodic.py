"""Periodic synchronization of replicas' parameters: local SGD, DiLoCo, Streaming DiLoCo and SparseLoCo.

[Note: periods] Ranks train independently: inner steps communicate nothing, not even module buffers. An outer step is an
inner step that ends with a synchronization. Buckets are synchronized one after another; each consists of whole tensors
in the optimizer's precision (the master copies, where there are any):

    local_sgd:  parameters = sum over ranks of w * parameters
    diloco:     g = sum over ranks of w * (outer - parameters);  m = mu * m + g;  outer -= lr * (g + mu * m);
                parameters = outer
    sparse_loco: e = decay * e + w * (outer - parameters);  message = largest of each chunk of e;  e -= message;
                outer -= lr * sum over ranks of message;  parameters = outer

With `outer.precision = "int8"` each rank quantizes w * (outer - parameters) and sends it to all others (an all-gather
of integers and scales); g is the sum of all ranks' messages, its own included. Rounding errors are not fed back.
Messages of `sparse_loco` are gathered and added in the same way; whatever is left out or rounded stays in e.

   streaming_diloco: after the step that begins a fragment's exchange, g as above, of the fragment's parameters; after
               the step that ends it, m and outer as above, and parameters = a * parameters + (1 - a) * outer

Streaming DiLoCo cuts the parameters into fragments (`Streaming`). Each fragment is synchronized as `diloco`
synchronizes all parameters, but at a step of its own. Its buckets are copied in after the step that begins its
exchange. The exchange runs on the communication streams, concurrently with the following steps; the step that ends it
waits for each bucket in turn and updates it. Messages stay allocated all that time. A program covers a whole period,
because steps differ in which exchanges they begin and end, and exchanges in flight slow down the steps that run
meanwhile.

With `plan.dp_shard` = S above 1, replicas of S ranks train independently, each sharded by FSDP2 (`sharded`). Gathers
and reduce-scatters stay inside a replica, and gradients are not reduced over replicas. The ranks that hold the same
shard synchronize it among themselves. Buckets, outer parameters, momentum, blocks of quantized changes and chunks of
sparse ones are those of a rank's own rows of all tensors, without FSDP2's padding, so a rank sends 1/S of the
parameters. The shards are the master copy. OpenDiLoCo and INTELLECT-1 train so: Jaghouar et al. 2024, arXiv:2407.07852,
arXiv:2412.01152.

Where tensor-parallel ranks cut the blocks of a replica, a rank synchronizes its slices, and its own copies of the
parameters that are not cut. The copies stay equal because their changes are not rounded. (Rounded in blocks of 1024,
they would be rounded together with the slices next to them, which differ by rank.)

w is a replica's fraction of the batch. With one step per period and without momentum, SGD then trains as under `ddp`.
The state of the inner optimizer stays on its ranks; gradients are clipped by the norm of the replica's own gradients.
Module buffers are those of the first rank afterwards. Sources: Stich 2018, arXiv:1805.09767; Douillard et al. 2023,
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
from gssim.program.task import Action, Collectives, Program, Task, TaskId, collective_task, with_ids
from gssim.units import Floats

MEAN_PASSES, OUTER_PASSES = 4, 7
"""Reads and writes of a bucket's bytes before its all-reduce. `local_sgd` (4): copied together and weighted. `diloco`
(7): copied together, subtracted from the outer parameters, and weighted."""
UPDATE_PASSES = 11
"""Reads and writes of the outer optimizer: momentum is scaled and added to twice, the outer parameters are updated."""
UNSENT_PASSES = 5
"""Reads and writes of the changes not sent yet (e): they are decayed, and new changes are added."""


FOUND_BYTES = 8
"""An index as torch finds and uses it."""
CODING = {"fp32": (4, 2, 4, 2), "int2": (20, 9, 24, 13)}
"""By precision of sparse values: reads and writes of the entries when a message is written, the same when it is read,
and the number of operations of each of the two."""


def synchronize_parameters(low: Lowering, rank: int) -> list[Task]:
    """Return the tasks at the end of a rank's step: those of the buckets whose exchange the step begins or ends.

    Empty in an inner step. See [Note: periods].
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
                    if low.policies.shards_replicas and low.overlaps:  # FSDP2's gathers use the communication stream
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
    copied_in_s = (OUTER_PASSES if outer else MEAN_PASSES) * pass_s + 2 * device.operation_overhead_s
    return [
        _copy(own, "copy-in", copied_in_s, Event(0, size, "communication")),
        _exchange(low, rank, own, "all-reduce", size),
        _copy(own, "copy-out", back_s, Event(1, -size, "communication")),
    ]


def _copy(own: TaskId, action: Action, duration_s: float, *events: Event) -> Task:
    """Return the task that copies a bucket in before its exchange, or out after it."""
    return Task(own.serving(action), "optimizer", duration_s=duration_s, need=footprint(events))


def _mixing_passes(low: Lowering) -> int:
    """Return 1 if the rank's own parameters are mixed with the outer ones, which reads them; 0 if overwritten."""
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
        _copy(
            own,
            "copy-in",
            (OUTER_PASSES * size + 9 * padded + message) * byte_s + 10 * call_s,
            Event(0, size, "communication"),
            Event(1, padded, "temporaries"),
            Event(2, message, "communication"),
            Event(2, 2 * scales, "temporaries"),
            Event(3, -2 * scales - padded, "temporaries"),
            Event(3, -size, "communication"),
            Event(4, ranks * message, "communication"),
        ),
        _exchange(low, rank, own, "all-gather", ranks * message),
        _copy(
            own,
            "copy-out",
            ((1 + 6 * ranks) * padded + ranks * message) * byte_s
            + (2 + UPDATE_PASSES + _mixing_passes(low)) * size * byte_s
            + (5 + 3 * ranks + len(tensors)) * call_s
            + _cast_s(low, rank, tensors),
            Event(0, -message, "communication"),
            Event(1, 2 * padded, "temporaries"),
            Event(2, -2 * padded, "temporaries"),
            Event(3, -ranks * message, "communication"),
        ),
    ]


def _largest(low: Lowering, rank: int, number: int, tensors: tuple[int, ...]) -> list[Task]:
    """Return the tasks of a bucket of which only the largest changes are sent; see [Note: periods]."""
    device, options, value = low.device(rank), low.scenario.plan.sparse_outer, low.master_bytes
    elements, ranks = sum(tensors), low.policies.dp_replicate
    padded = chunks_of(options, elements) * options.chunk_elements
    entries = chunks_of(options, elements) * options.chunk_entries
    message = float(sparse_message_bytes(options, elements, value))
    size, padded_bytes, found = float(elements * value), float(padded * value), float(entries * (value + FOUND_BYTES))
    byte_s, call_s = 1 / device.memory_bandwidth_bytes_per_s, device.operation_overhead_s
    padded_codes = chunks_of(options, elements) * 4 * -(-options.chunk_entries // 4)
    write_passes, read_passes, write_calls, read_calls = CODING[options.precision]
    # signs, magnitudes and codes are made beside indices and values; they are held while the message is read back
    coding = float(entries * (value + 1) + padded_codes) if options.precision == "int2" else 0.0
    # codes, and the signs that they are made into, are held beside the values
    read = float(entries * (FOUND_BYTES + (1 + 3 * value if options.precision == "int2" else value)))
    read_s = read_passes * entries * value * byte_s + read_calls * call_s
    unpack_s = cost.unpack_time_s(device, encoding="coo", elements=padded, entries=entries, value=value)
    own = TaskId("outer", bucket=number)
    return [
        _copy(
            own,
            "copy-in",
            (OUTER_PASSES + UNSENT_PASSES) * size * byte_s
            + 5 * call_s
            + cost.largest_time_s(device, elements=padded, entries=entries, value=value)
            + write_passes * entries * value * byte_s
            + write_calls * call_s
            + read_s
            + unpack_s,
            Event(0, size, "communication"),
            Event(1, -size, "communication"),
            Event(2, padded_bytes, "temporaries"),  # magnitudes
            Event(3, found, "temporaries"),
            Event(4, -padded_bytes, "temporaries"),
            Event(5, message, "communication"),
            Event(6, coding + read, "temporaries"),
            Event(7, -coding - read - found, "temporaries"),
            Event(8, ranks * message, "communication"),
        ),
        _exchange(low, rank, own, "all-gather", ranks * message),
        _copy(
            own,
            "copy-out",
            (padded_bytes + 5 * size) * byte_s
            + ranks * (read_s + unpack_s)
            + (2 + len(tensors)) * call_s
            + _cast_s(low, rank, tensors),
            Event(0, -message, "communication"),
            Event(1, padded_bytes, "temporaries"),
            Event(2, read, "temporaries"),
            Event(3, -read - padded_bytes, "temporaries"),
            Event(4, -ranks * message, "communication"),
        ),
    ]


def _exchange(low: Lowering, rank: int, own: TaskId, kind: str, size_bytes: float) -> Task:
    """Return a rank's part in the collective of the ranks with the same shard; equal shards share one identity."""
    alike = _equal_shards(low, low.shard_position(rank))
    groups = (group for group in low.groups_along("dp_replicate") if low.shard_position(group[0]) in alike)
    exchange = Communication.among(groups, kind, size_bytes)
    name = own if len(alike) == low.policies.dp_shard else own._replace(place=alike[0])
    staged = low.staging(low.device(rank), exchange) if kind == "all-gather" else ()
    return collective_task(own, exchange, communication=name, need=footprint(staged))


def _cast_s(low: Lowering, rank: int, tensors: Sequence[int]) -> float:
    """Return the time to cast updated master copies to the workload's precision; 0 if shards are the master copy."""
    if low.policies.shards_replicas:
        return 0.0
    device, workload = low.device(rank), low.scenario.workload
    return cost.master_copy_time_s(device, workload, elements=sum(tensors), tensors=len(tensors), casts=1)


@once_a_run
def _equal_shards(low: Lowering, position: int) -> tuple[int, ...]:
    """Return the positions in a replica whose shards have as many elements of each tensor as the one at `position`."""
    own = _own_elements(low, position)
    return tuple(each for each in range(low.policies.dp_shard) if _own_elements(low, each) == own)


@once_a_run
def _own_elements(low: Lowering, position: int) -> Sequence[int]:
    """Return the elements of every parameter that the rank at a position in a replica holds, in the model's order."""
    if low.policies.shards_replicas:
        return owned_rows(low, position)
    return [parameter.elements for _, parameter in low.parameters]


@once_a_run
def _fragments(low: Lowering, position: int) -> tuple[Fragment, ...]:
    """Return the fragments that a position in a replica synchronizes, with their buckets and steps."""
    layers = [instance.index for instance, _ in low.parameters]
    sizes = [elements * low.master_bytes for elements in _own_elements(low, position)]
    return fragments_of(low.scenario.plan, low.policies, layers=layers, sizes_bytes=sizes)


def _elements(low: Lowering, position: int, fragment: Fragment) -> list[tuple[int, ...]]:
    """Return, for every bucket of a fragment, the elements of each of its tensors."""
    own = _own_elements(low, position)
    return [tuple(own[place] for place in bucket) for bucket in fragment.buckets]


@once_a_run
def _buckets(low: Lowering, position: int) -> tuple[tuple[int, ...], ...]:
    """Return, for every bucket of all fragments in turn, the elements of each of its tensors."""
    return tuple(bucket for fragment in _fragments(low, position) for bucket in _elements(low, position, fragment))


def outer_tensors(low: Lowering, rank: int) -> list[float]:
    """Return the bytes of a rank's outer parameters in each bucket; its momentum has the same sizes."""
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
    """Return the bytes of the changes that a rank has not sent yet, by bucket, rounded up to whole chunks."""
    if low.policies.outer_optimizer != "sparse" or low.policies.dp_replicate == 1:
        return []
    options = low.scenario.plan.sparse_outer
    buckets = _buckets(low, low.shard_position(rank))
    return [float(chunks_of(options, sum(each)) * options.chunk_elements * low.master_bytes) for each in buckets]


def after_inner_steps(program: Program, alone_s: Floats, *, count: int, shown: Program | None = None) -> Program:
    """Return the program of an outer step in which each rank starts late, after its own inner steps.

    `alone_s`: seconds that each rank takes for all `count` inner steps. Ranks that start at different times get
    different roles. `shown`: program of one inner step; if given, the last inner step is not part of `alone_s` but is
    included as tasks.
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
