"""Pipeline parallelism: forwards and backwards of a rank's stages in schedule order, and the messages between
stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gssim import collectives
from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.memory import input_bytes, release_of
from gssim.plan import Action, Message
from gssim.program.lowering import Lowering
from gssim.program.replicated import is_reduction
from gssim.program.stage_boundary import Stage
from gssim.program.task import MicroBatch, Task

Chunk = Callable[[Lowering, MicroBatch], Sequence[Task]]
"""Function that returns forward and backward of one stage for one micro-batch, with the policies' collectives."""


def pipeline(low: Lowering, rank: int, chunk: Chunk) -> list[Task]:
    """Return the tasks of a rank of a pipeline up to its reduced gradients.

    Messages run in the background, those to and from a peer in the order in which they are posted; the rank waits where
    torch's schedule does. The backend starts a message when both ends have posted it (gloo's sender waits for the
    receiver's notice, NCCL's kernel for its peer). Gradients are reduced in the last backward, as in DDP; without
    overlap, after the schedule (Megatron-LM, finalize_model_grads): a stage's last message does not wait for them.
    """
    mesh = low.scenario.policies.mesh
    stages = {stage.number: _stage_lowering(low, stage) for stage in low.stages}
    writer = _ScheduleWriter(low, _replicas(low, rank), stages, _output_bytes(low, rank), low.device(rank))
    writer.add(Task("begin", "idle"))
    for action in low.schedule[mesh.place(rank).pp]:
        writer.add_action(action, chunk)
    return [*writer.tasks, *writer.deferred]


def _stage_lowering(low: Lowering, stage: Stage) -> Lowering:
    """Return the lowering of one of a rank's stages, shared by all replicas and with it the recorded collectives."""
    if len(low.stages) == 1:
        return low
    key = ("stage", stage.number)
    if key not in low.step_memo:
        low.step_memo[key] = replace(low, stages=(stage,), communications={}, step_memo={})
    lowering: Lowering = low.step_memo[key]
    return lowering


@dataclass
class _ScheduleWriter:
    """Translates actions of the schedule into tasks."""

    low: Lowering
    replicas: Sequence[Sequence[int]]
    """Ranks of every replica of the pipeline with as many samples, by position on the axis pp."""
    stages: dict[int, Lowering]
    """Lowerings of the rank's stages, by stage number."""
    output_bytes: Sequence[float]
    """Size of every stage's output for a micro-batch; micro-batches are equal."""
    device: DeviceType
    tasks: list[Task] = field(default_factory=list)
    deferred: list[Task] = field(default_factory=list)
    """Tasks that run after the schedule."""
    latest: str = ""
    """Label of the latest task of the compute stream, after which messages are posted."""

    def add(self, *tasks: Task) -> None:
        """Append tasks."""
        self.tasks += tasks
        self.latest = next((task.label for task in reversed(tasks) if task.stream == "compute"), self.latest)

    def add_action(self, action: Action, chunk: Chunk) -> None:
        """Append the tasks of an action."""
        if action.kind in ("forward", "backward"):
            self.add_compute(action, chunk)
        elif action.kind == "wait":
            label = f"for {', '.join(self.message_name(message) for message in action.messages)}"
            after = tuple(self.message_label(message) for message in action.messages)
            self.add(Task(label, "exposed_communication", after=after))
        elif action.kind == "release":
            for message in action.messages:
                self.free(message)
        else:
            for message in action.messages:
                self.post(message, sends=action.kind == "send")

    def add_compute(self, action: Action, chunk: Chunk) -> None:
        """Append the forward or the backward of a stage."""
        low = self.stages[action.stage]
        tasks = chunk(low, self.low.micro_batches[action.micro_batch])
        forward_count = next(
            place for place, task in enumerate(tasks) if task.label.startswith(("recompute ", "backward "))
        )
        part = tasks[:forward_count] if action.kind == "forward" else tasks[forward_count:]
        if low is not self.low:
            part = [self.with_stage(task, low, action.stage) for task in part]
        if not self.low.scenario.plan.overlap:
            self.deferred += [task for task in part if is_reduction(task)]
            part = [task for task in part if not is_reduction(task)]
        self.add(*part)

    def with_stage(self, task: Task, low: Lowering, stage: int) -> Task:
        """Return a task with its stage in its label, for a rank with several stages."""
        suffix = f" stage {stage}"
        name = task.communication and task.communication + suffix
        if name and task.communication:
            self.low.communications[name] = low.communications[task.communication]
        after = tuple(label + suffix for label in task.after)
        return replace(task, label=task.label + suffix, communication=name, after=after)

    def message_name(self, message: Message) -> str:
        """Return the name of a message, the same on both sides."""
        return f"{message.kind} of stage {message.source}{self.low.micro_batches[message.micro_batch].suffix}"

    def message_label(self, message: Message) -> str:
        """Return the label of the task that carries a message."""
        return ("send " if message.source in self.stages else "receive ") + self.message_name(message)

    def post(self, message: Message, *, sends: bool) -> None:
        """Append a message that starts once posted, on a stream of its own per peer and direction."""
        count = len(self.replicas[0])
        source, target = message.source % count, message.target % count
        first, *others = ((ranks[source], ranks[target]) for ranks in self.replicas)
        size = self.size_bytes(message)
        name = self.message_name(message)
        self.low.communications[name] = Communication("send", first, size, beside=tuple(others))
        stream = f"send to {target} on pp" if sends else f"receive from {source} on pp"
        self.add(
            Task(self.message_label(message), "exposed_communication", stream, communication=name, after=(self.latest,))
        )
        posting_s = collectives.posting_s(self.low.scenario.cluster, self.device, size) if sends else 0.0
        if posting_s:  # the message is sent as it is posted
            self.add(Task(f"post {name}", "exposed_communication", duration_s=posting_s))

    def free(self, message: Message) -> None:
        """Append the release of a tensor that a stage has sent."""
        stage = self.stages[message.source].stages[0]
        category = stage.output[1] if message.kind == "activation" else "temporaries"
        gone = release_of(self.size_bytes(message), category)
        self.add(Task(f"release {self.message_name(message)}", "idle", need=gone))

    def size_bytes(self, message: Message) -> float:
        """Return the size of a message: that of the output of its source, or of the input whose gradient it carries."""
        return self.output_bytes[message.source if message.kind == "activation" else message.target]


def _replicas(low: Lowering, rank: int) -> Sequence[Sequence[int]]:
    """Return the ranks of every replica of the pipeline with as many samples as the rank's own."""
    samples = low.batch_sizes[rank]
    if ("replicas", samples) not in low.step_memo:
        mesh = low.scenario.policies.mesh
        low.step_memo["replicas", samples] = [mesh.group(r, "pp") for r in low.group if low.batch_sizes[r] == samples]
    replicas: Sequence[Sequence[int]] = low.step_memo["replicas", samples]
    return replicas


def _output_bytes(low: Lowering, rank: int) -> Sequence[float]:
    """Return the size of every stage's output for one of a rank's micro-batches."""
    samples, length = low.samples(rank, low.micro_batches[0]), low.scenario.workload.sequence_length or 1
    key = ("output bytes", samples)
    if key not in low.step_memo:
        low.step_memo[key] = [low.traced_scale * stage.output[0].at(b=samples, s=length) for stage in low.all_stages]
    sizes: Sequence[float] = low.step_memo[key]
    return sizes


def stage_buffers(low: Lowering, rank: int) -> dict[str, float]:
    """Return the persistent buffers of a pipeline rank at the ends of its stages, by category.

    Inputs are on the first stage, targets on the last. PipelineStage allocates a receive buffer for each micro-batch's
    input, and for each gradient of its output, in the first step, and keeps it.
    """
    last = len(low.all_stages) - 1
    numbers = {stage.number for stage in low.stages}
    received = [number - 1 for number in numbers if number > 0] + [number for number in numbers if number < last]
    sizes = _output_bytes(low, rank)
    received_bytes = sum(sizes[number] for number in received)
    workload = low.scenario.workload
    return {
        "input": input_bytes(
            workload.model,
            batch_size=low.batch_sizes[rank],
            sequence_length=workload.sequence_length,
            value_bytes=low.value_bytes,
            inputs=0 in numbers,
            targets=last in numbers,
        ),
        "communication": received_bytes * len(low.micro_batches),
    }
