"""Pipeline parallelism: forwards and backwards of a rank's stages in schedule order, and messages between stages."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Literal, NamedTuple

from gssim import collectives
from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.execution.cache import Same
from gssim.memory import input_bytes, release_of
from gssim.plan import Action
from gssim.plan.pipeline_schedule import Message
from gssim.program.collective_names import Named
from gssim.program.compressed import HALF_BYTES
from gssim.program.compute import forward_id
from gssim.program.lowering import Lowering, once_a_run
from gssim.program.parameter_gathers import Waits, aligned_starts, gather_ahead, gather_before_reads
from gssim.program.push import push_accumulated
from gssim.program.replicated import is_reduction
from gssim.program.sharded import Gathered, insert_beside, reduce_stage_gradients, reshard_stage, unshard_stage
from gssim.program.task import (
    BACKWARD,
    ELEMENTS_PER_TASK,
    Awaited,
    Chunk,
    MicroBatch,
    Part,
    Posted,
    Route,
    Task,
    TaskId,
    Template,
    can_be_template,
    collective_task,
    with_ids,
)
from gssim.scenario import tied_parameters
from gssim.units import PRECISION_BYTES

COMPUTES = ("forward", "backward", "weight")
StageTasks = Callable[[Lowering, MicroBatch, Gathered | None], Sequence[Task]]
"""Function that returns a stage's forward and backward for one micro-batch, with the policies' collectives but without
the micro-batch's number. The last argument says which sharded parameters are already gathered."""


class Scheduled(NamedTuple):
    """The parts of a pipeline rank's step, but for its update."""

    before_update: Sequence[Part]
    after_update: Sequence[Part]


def pipeline(low: Lowering, rank: int, stage_tasks: StageTasks, named: Named, *, chunked: bool) -> Scheduled:
    """Return the tasks of a pipeline rank but for its update; `chunked`: as parts of an outline.

    `named`: gives collectives their identities.

    Messages run in the background; those to (or from) one peer run in the order in which they are posted. The rank
    waits for them where torch's schedule does. The backend starts a message when both ends have posted it (gloo's
    sender waits for the receiver's notice, NCCL's kernel for its peer). Gradients are reduced in the last backward, as
    in DDP, whose backward ends when all are reduced; without overlap, after the schedule (Megatron-LM,
    finalize_model_grads), so that a stage's last message does not wait for the reduction. Megatron-LM's optimizer
    begins reductions in the last backward of each stage, but waits for all of them after the schedule, in the same
    function: neither messages nor a rank's other stages wait. Sharded gradients are always reduced after the schedule;
    see [Note: stages] in `sharded`. A rank that pushes, and has a copy of a tied parameter or several stages, pushes
    all gradients after the schedule: thresholds apply to the sum over the copies, and a bucket may have parameters of
    several stages. So does one whose backwards are split: torch computes gradients of weights without autograd's hooks
    then. Megatron-LM's optimizer may gather parameters beside the next forwards; see [Note: gathers of stages] in
    `parameter_gathers`.
    """
    mesh = low.scenario.policies.mesh
    if len(low.stages) == 1:
        stages = {low.stages[0].number: low}
    else:  # lowerings of stages are shared by all replicas
        stages = {stage.number: low.of_stage(stage) for stage in low.stages}
    sizes = _output_bytes(low, low.samples(rank, low.micro_batches[0]))
    replicas = replicas_of(low, low.batch_sizes[rank])
    sums = _sum_tied_gradients(low, rank, replicas)
    after_schedule = bool(sums) or len(low.stages) > 1 or low.splits_schedule
    pushes_last = low.policies.gradients == "push" and after_schedule
    writer = _ScheduleWriter(low, rank, named, replicas, stages, sizes, low.device(rank), pushes_last)
    writer.add(Task(TaskId("step-begin"), "idle"))
    actions = low.schedule[mesh.place(rank).pp]
    if low.policies.publish_overlaps:
        writer.gather_beside(actions)
    for place, action in enumerate(actions):
        if writer.repeat(action):
            continue
        if action.kind == "unshard":
            uses = (each for each in actions[place:] if each.kind in COMPUTES and each.stage == action.stage)
            writer.unshard(next(uses))
        else:
            writer.add_action(action, stage_tasks, chunked=chunked)
    writer.add(*writer.deferred, *sums)
    if pushes_last:
        last = low.micro_batches[-1]
        writer.add(*with_ids(push_accumulated(low, rank, last), partial(TaskId.at, micro_batch=last.number)))
    return Scheduled(tuple(writer.parts), tuple(writer.after_step))


def _sum_tied_gradients(low: Lowering, rank: int, replicas: Sequence[Sequence[int]]) -> list[Task]:
    """Return the all-reduces of the gradients of tied parameters over the ranks that hold a copy, one after another.

    They follow the reductions over replicas and precede pushes; see [Note: tied] in `gssim.scenario.stages`. Where
    parameters are sharded, the gradients are those of equal shards, in the shards' precision.
    """
    tasks, count = [], len(replicas[0])
    scenario, mesh = low.scenario, low.policies.mesh
    sharded, precision = low.reduces_after_schedule, scenario.workload.precision
    summed = precision if PRECISION_BYTES[precision] == HALF_BYTES and not sharded else ""
    for tied in low.shared.once(
        "tied",
        (Same(scenario), low.tensor_part),
        lambda: tied_parameters(low.part_layers, scenario.stage_ranges),
    ):
        places = sorted({stage % count for stage in tied.stages})
        if mesh.place(rank).pp not in places or len(places) == 1:
            continue
        elements, alike = tied.elements, replicas
        if sharded:
            rows = low.part_layers[tied.layer].layer.parameters[tied.place].shape[0]
            chunk = math.ceil(rows / low.shards)
            held = [max(0, min(chunk, rows - i * chunk)) * (elements // rows) for i in range(low.shards)]
            elements = held[mesh.replica_rank(rank) % low.shards]
            alike = [ranks for ranks in replicas if held[mesh.replica_rank(ranks[0]) % low.shards] == elements]
        if not elements:
            continue
        holders = (tuple(ranks[place] for place in places) for ranks in alike)
        size = elements * (low.master_bytes if sharded else low.value_bytes)
        exchange = Communication.among(holders, "all-reduce", size, half_precision=summed)
        tasks.append(collective_task(TaskId("all-reduce", layer=tied.name), exchange))
    return tasks


class _Computed(NamedTuple):
    """The forward or the backward of a stage, without the number of the micro-batch."""

    own: Template | Sequence[Task]
    reductions: Sequence[Task]
    """Reductions of its gradients, where they run after the schedule."""


@dataclass
class _ScheduleWriter:
    """Translates actions of the schedule into tasks."""

    low: Lowering
    rank: int
    named: Named
    replicas: Sequence[Sequence[int]]
    """Ranks of each replica of the pipeline with as many samples as this one, in order of their pp coordinate."""
    stages: dict[int, Lowering]
    """Lowerings of the rank's stages, by stage number."""
    output_bytes: Sequence[float]
    """Size of every stage's output for one micro-batch; all micro-batches have the same size."""
    device: DeviceType
    pushes_last: bool
    """Whether gradients are pushed after the schedule instead of in the last backward."""
    parts: list[Part] = field(default_factory=list)
    deferred: list[Task] = field(default_factory=list)
    """Tasks that run after the schedule."""
    computed: dict[tuple[int, str, int, Gathered | None], _Computed] = field(default_factory=dict)
    """Forwards and backwards, by stage, direction, and what micro-batches with equal ones have in common."""
    repeated: dict[tuple[str, int, int], tuple[Template, int | None]] = field(default_factory=dict)
    """Template, and stage in identities, of forwards and backwards that need no more than a chunk; by direction, stage,
    and class of micro-batches."""
    routes: dict[tuple[str, int], tuple[Route, float]] = field(default_factory=dict)
    """What messages have in common, and the host time to post one; by kind of message and source stage."""
    posted: dict[Message, Posted] = field(default_factory=dict)
    """The rank's ends of messages."""
    releases: dict[tuple[str, int], Template] = field(default_factory=dict)
    """Releases of messages' tensors, by kind of message and source stage."""
    gathered: dict[int, Gathered] = field(default_factory=dict)
    """Units of each stage that are gathered at this point of the schedule, by stage number."""
    copies: dict[int, list[Task]] = field(default_factory=dict)
    """Copies out of the buffers into which stages' units were gathered ahead of use, by stage number."""
    after_step: list[Chunk] = field(default_factory=list)
    """What follows the update."""
    gathers: dict[int, list[Task]] = field(default_factory=partial(defaultdict, list))
    """Gathers of updated parameters, by the number of the compute (forward or backward) of the rank before which they
    begin."""
    awaited: dict[int, Waits] = field(default_factory=dict)
    """Tasks that precede forwards of a stage's first micro-batch: waits for these gathers; by stage number."""
    micro_batches: Sequence[tuple[MicroBatch, int, int | None]] = field(init=False)
    """Each micro-batch, the number of what it has in common with those of equal tasks, and its number in identities."""
    gathers_parameters: bool = field(init=False)
    """`Lowering.gathers_in_stages`, which is the same for all stages."""
    computes: int = 0
    """How many forwards and backwards have been appended."""
    resharded: int = 0
    """How many times a stage's parameters were freed between two uses."""
    latest: TaskId | Chunk | Awaited = TaskId("step-begin")  # noqa: RUF009 -- immutable
    """What the compute stream does last; messages are posted after it."""

    def __post_init__(self) -> None:
        """Look up once what every action needs: a step has thousands."""
        every = self.low.micro_batches
        if self.pushes_last:
            every = tuple([replace(each, sends_gradients=False) for each in every])
        # all micro-batches have the same size; those whose gradients are pushed may have messages of their own
        pushes = self.low.policies.gradients == "push"
        alike: dict[Hashable, int] = {}
        kinds = (each if pushes and each.sends_gradients else (each.first, each.sends_gradients) for each in every)
        self.micro_batches = [
            (each, alike.setdefault(kind, len(alike)), each.number) for each, kind in zip(every, kinds, strict=True)
        ]
        self.gathers_parameters = self.low.gathers_in_stages

    def add(self, *tasks: Task) -> None:
        """Append tasks."""
        self.parts += map(self.named.task, tasks)
        for task in reversed(tasks):
            if task.stream == "compute":
                self.latest = task.id
                return

    def add_part(self, part: Chunk | Awaited) -> None:
        """Append tasks of the compute stream."""
        self.parts.append(part)
        self.latest = part

    def repeat(self, action: Action) -> bool:
        """Append a forward or backward that needs no more than a chunk of a template that is there; return whether.

        Nearly all of a schedule's thousands of actions are such.
        """
        kind, stage, micro_batch, _ = action
        if kind not in COMPUTES or self.gathers or self.copies:
            return False
        _, like, number = self.micro_batches[micro_batch]
        known = self.repeated.get((kind, stage, like))
        if known is None:
            return False
        self.computes += 1
        self.latest = chunk = Chunk(known[0], number, known[1])
        self.parts.append(chunk)
        return True

    def add_action(self, action: Action, stage_tasks: StageTasks, *, chunked: bool) -> None:
        """Append the tasks of an action."""
        if action.kind in COMPUTES:
            if self.computes in self.gathers:
                self.add(*self.gathers.pop(self.computes))
            self.computes += 1
            self.add_compute(action, stage_tasks, chunked=chunked)
        elif action.kind == "wait":
            self.add_part(Awaited(tuple([self.posted[message] for message in action.messages])))
        elif action.kind in ("release", "release-after-step"):
            add = self.add_part if action.kind == "release" else self.after_step.append
            for message in action.messages:
                number = self.micro_batches[message.micro_batch][2]
                template = self.releases.get((message.kind, message.source)) or self.release(message)
                add(Chunk(template, number, message.source))
        elif action.kind == "reshard":
            stage = self.stages[action.stage]
            freed = reshard_stage(stage, self.gathered.pop(action.stage, Gathered()), self.resharded)
            self.add(*with_ids(freed, partial(TaskId.at, stage=self.stage_in_ids(action.stage))))
            self.resharded += 1
        elif action.kind == "reduce":
            reduced = reduce_stage_gradients(self.stages[action.stage], self.rank)
            self.add(*with_ids(reduced, partial(TaskId.at, stage=self.stage_in_ids(action.stage))))
            self.gathered.pop(action.stage, None)
        else:
            for message in action.messages:
                self.post(message, sends=action.kind == "send")

    def gather_beside(self, actions: Sequence[Action]) -> None:
        """Plan the gathers of updated parameters beside the forwards; see [Note: gathers of stages] in
        `parameter_gathers`.
        """
        place, first = self.low.policies.mesh.place(self.rank).pp, self.low.micro_batches[0]
        aligned = dict(aligned_starts(actions, place)) if self.low.scenario.plan.schedule == "interleaved" else {}
        for number, stage in self.stages.items():
            forwards = [forward_id(layer) for layer in stage.layers]
            if number in aligned:
                gathers, self.awaited[number] = gather_ahead(stage, forwards, at_once=number > 0)
                self.gathers[aligned[number]] += self.numbered(gathers, first, self.stage_in_ids(number))
            else:
                self.awaited[number] = gather_before_reads(stage, forwards, at_once=number > 0)
        self.add(*self.gathers.pop(0, ()))

    def add_compute(self, action: Action, stage_tasks: StageTasks, *, chunked: bool) -> None:
        """Append the forward or the backward of a stage, or a part of the backward."""
        low, (micro_batch, like, number) = self.stages[action.stage], self.micro_batches[action.micro_batch]
        if self.unpacks:
            self.unpack(action)
        if action.stage in self.copies:
            self.add(*self.copies.pop(action.stage))
        gathered = self.gathered_for(action) if self.gathers_parameters else None
        key = (action.stage, action.kind, like, gathered)
        computed = self.computed.get(key)
        if computed is None:
            both, as_chunk = stage_tasks(low, micro_batch, gathered), chunked and gathered is None
            made = partial(self.computed_of, both, action.kind, as_chunk=as_chunk)
            if low.shares_stages:
                weight = ELEMENTS_PER_TASK * len(both)
                place = ("forward or backward", Same(both), action.kind, Same(self.named), as_chunk)
                computed = low.shared.large.once(place, made, weight=lambda _: weight)
            else:
                computed = made()
            self.computed[key] = computed
        own, reductions = computed
        if action.kind == "forward" and action.stage in self.awaited:
            plain = self.computed_of(stage_tasks(low, micro_batch, gathered), action.kind, as_chunk=False).own
            assert not isinstance(plain, Template)
            own = insert_beside(plain, before=self.awaited.pop(action.stage), behind={})
        if not own:  # the first part of the first stage's split backward
            return
        stage = None if low is self.low else action.stage
        if reductions:
            self.deferred += self.numbered(reductions, micro_batch, stage)
        if isinstance(own, Template):
            self.add_part(Chunk(own, number, stage))
            if not (self.unpacks or self.gathers_parameters or reductions):
                self.repeated[action.kind, action.stage, like] = own, stage
        else:
            self.add(*self.numbered(own, micro_batch, stage))

    @staticmethod
    def numbered(tasks: Sequence[Task], micro_batch: MicroBatch, stage: int | None) -> list[Task]:
        """Return tasks with the micro-batch and the stage in their identities."""
        return with_ids(tasks, partial(TaskId.at, micro_batch=micro_batch.number, stage=stage))

    def computed_of(self, both: Sequence[Task], kind: str, *, as_chunk: bool) -> _Computed:
        """Return the forward or the backward (`kind`) of a stage's tasks; `as_chunk`: as a template, if possible.

        Where the schedule splits the backward, `backward` is its first part (input gradients) and `weight` its second
        part (weight gradients). A stage whose backward is not split runs all of it as `weight`.
        """
        forward_count = next(
            place for place, task in enumerate(both) if task.id.op in BACKWARD or task.id.during == "backward"
        )
        own, reductions = both[:forward_count] if kind == "forward" else both[forward_count:], list[Task]()
        if self.low.splits_schedule and kind != "forward":
            second = next((place for place, task in enumerate(own) if task.id.op == "backward-weights"), 0)
            own = own[:second] if kind == "backward" else own[second:]
            if not own:
                return _Computed((), ())
        is_deferred = self._is_deferred
        reductions = [task for task in own if is_deferred(task)]
        own = [task for task in own if not is_deferred(task)]
        if as_chunk and not any(map(is_reduction, own)) and can_be_template(own):
            return _Computed(Template(tuple(map(self.named.task, own))), reductions)
        return _Computed(own, reductions)

    def _is_deferred(self, task: Task) -> bool:
        """Return whether a task of a backward runs after the schedule; see `pipeline`."""
        if not self.low.scenario.plan.overlap:
            return is_reduction(task)
        return self.low.has_one_gradient_buffer and is_reduction(task) and task.id.action == "wait"

    @cached_property
    def unpacks(self) -> bool:
        """Whether the host unpacks messages."""
        return self.low.scenario.cluster.backend_cost is not None and not self.low.for_memory

    def unpack(self, action: Action) -> None:
        """Append the host's unpacking of the message that a forward or backward needs, if it was received."""
        cost, source = self.low.scenario.cluster.backend_cost, action.stage - 1
        if action.kind == "weight":
            return
        if action.kind == "backward":
            source = action.stage + 1
        if cost is None or source in self.stages or not 0 <= source < len(self.low.all_stages):
            return
        kind = "activation" if action.kind == "forward" else "gradient"
        message = Message(kind, source, action.micro_batch)
        duration_s = cost.unpacking_s + cost.unpacking_byte_s * self.size_bytes(message)
        if duration_s:
            own = self.posted[message].message.serving("unpack")
            self.add(Task(own, "exposed_communication", duration_s=duration_s))

    def stage_in_ids(self, number: int) -> int | None:
        """Return the stage number for identities of tasks: None if the rank has only one stage."""
        return None if self.stages[number] is self.low else number

    def unshard(self, use: Action) -> None:
        """Append the gathers of a stage ahead of a forward or backward."""
        number = self.low.micro_batches[use.micro_batch].number
        now = self.gathered.get(use.stage, Gathered())
        at = partial(TaskId.at, micro_batch=number, stage=self.stage_in_ids(use.stage))
        phase = "forward" if use.kind == "forward" else "backward"
        gathers, copies = unshard_stage(self.stages[use.stage], self.rank, phase, now)
        self.add(*with_ids(gathers, at))
        self.copies[use.stage] = with_ids([*gathers, *copies], at)[len(gathers) :]
        self.gathered[use.stage] = Gathered(root=True, before_forward=True, before_backward=True)

    def gathered_for(self, action: Action) -> Gathered:
        """Return which units of a stage are gathered before an action, and record which are after it."""
        now = self.gathered.get(action.stage, Gathered())
        if self.low.policies.gradients == "push":  # see [Note: flat units in stages] in `flat_units`
            kept = action.kind == "forward"
            blocks = kept and self.low.policies.parameters == "gathered"
            self.gathered[action.stage] = Gathered(root=kept, before_forward=blocks, before_backward=blocks)
            return now
        blocks = now.before_forward
        stay = action.kind == "backward" or self.low.policies.parameters == "gathered"
        self.gathered[action.stage] = Gathered(root=True, before_forward=stay, before_backward=stay)
        return Gathered(now.root, blocks, blocks)

    def post(self, message: Message, *, sends: bool) -> None:
        """Append a message that starts once posted, on a stream of its own per peer and direction."""
        key = (message.kind, message.source)
        if key not in self.routes:
            self.routes[key] = self.route(message, sends=sends)
        route, posting_s = self.routes[key]
        posted = self.posted[message] = Posted(route, self.micro_batches[message.micro_batch][2], (self.latest,))
        self.parts.append(posted)
        if posting_s:  # the message is sent as it is posted
            self.add(Task(posted.message.serving("post"), "exposed_communication", duration_s=posting_s))

    def route(self, message: Message, *, sends: bool) -> tuple[Route, float]:
        """Return the route of a message (stream, group, size), and the seconds of the host to post it."""
        count, size = len(self.replicas[0]), self.size_bytes(message)
        source, target = message.source % count, message.target % count
        exchange = Communication.among(((ranks[source], ranks[target]) for ranks in self.replicas), "send", size)
        kind: Literal["activation", "gradient"] = "activation" if message.kind == "activation" else "gradient"
        stream = f"send to {target} on pp" if sends else f"receive from {source} on pp"
        repeated, group = self.named.repeated(exchange), self.named.group(exchange)
        route = Route(kind, message.source, repeated, stream, sends, group)
        return route, collectives.posting_s(self.low.scenario.cluster, self.device, size) if sends else 0.0

    def release(self, message: Message) -> Template:
        """Return the release of a tensor that a stage has sent."""
        key = (message.kind, message.source)
        if key not in self.releases:
            own = TaskId("activation" if message.kind == "activation" else "gradient", "release")
            category = "activations" if message.kind == "activation" else "temporaries"
            need = release_of(self.size_bytes(message), category)
            self.releases[key] = Template((Task(own, "idle", need=need),))
        return self.releases[key]

    def size_bytes(self, message: Message) -> float:
        """Return the size of a message: the source stage's output, or the gradient of the target stage's output."""
        return self.output_bytes[message.source if message.kind == "activation" else message.target]


@once_a_run
def replicas_of(low: Lowering, samples: int) -> Sequence[Sequence[int]]:
    """Return the ranks of every pipeline replica that has `samples` samples."""
    mesh = low.scenario.policies.mesh
    return [mesh.group(rank, "pp") for rank in low.group if low.batch_sizes[rank] == samples]


@once_a_run
def _output_bytes(low: Lowering, samples: int) -> Sequence[float]:
    """Return the size of every stage's output, in bytes, for a micro-batch of `samples` samples."""
    length = low.scenario.workload.sequence_length or 1
    return [low.traced_scale * stage.output_bytes.at(b=samples, s=length) for stage in low.all_stages]


def stage_buffers(low: Lowering, rank: int) -> dict[str, float]:
    """Return the persistent input, target and receive buffers of a pipeline rank, by category.

    Inputs are on the first stage, targets on the last. In the first step PipelineStage allocates a receive buffer for
    each micro-batch's input, and for each gradient of its output, and keeps it; see `plan.receive_buffers`.
    """
    last = len(low.all_stages) - 1
    numbers = {stage.number for stage in low.stages}
    sizes = _output_bytes(low, low.samples(rank, low.micro_batches[0]))
    in_flight = low.scenario.plan.receive_buffers == "in-flight"
    actions, every = low.schedule[low.policies.mesh.place(rank).pp], len(low.micro_batches)
    received_bytes = sum(
        sizes[number - 1] * (_most_in_flight(actions, number) if in_flight else every)
        for number in numbers
        if number > 0
    )
    received_bytes += sum(sizes[number] * (1 if in_flight else every) for number in numbers if number < last)
    workload = low.scenario.workload
    return {
        "input": input_bytes(
            workload.model,
            batch_size=low.batch_sizes[rank],
            sequence_length=low.scenario.sequence_positions if low.policies.cp > 1 else workload.sequence_length,
            value_bytes=low.value_bytes,
            inputs=0 in numbers,
            targets=last in numbers,
        ),
        "communication": received_bytes,
    }


def _most_in_flight(actions: Sequence[Action], stage: int) -> int:
    """Return the largest number of a stage's micro-batches whose forward has begun and whose backward has not ended.

    >>> from gssim.plan.pipeline_schedule import schedule
    >>> [_most_in_flight(schedule("1f1b", ranks=3, stages=3, micro_batches=8)[stage], stage) for stage in range(3)]
    [3, 2, 1]
    """
    change = {"forward": 1, "backward": -1}
    now = [change.get(each.kind, 0) for each in actions if each.stage == stage]
    return max(accumulate(now), default=0)
