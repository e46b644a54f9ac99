"""A rank of a pipeline: the forwards and backwards of its stages in the schedule's order, and the messages between."""

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
"""Gives the forward and the backward of one stage for one micro-batch, with the collectives of the plan's policies."""


def pipeline(low: Lowering, rank: int, chunk: Chunk) -> list[Task]:
    """Return what a rank of a pipeline does until its gradients are there.

    Messages go in the background, those to and from a peer in the order in which they are handed over; the rank waits
    where torch's schedule does. The backend starts a message when both ends have handed it over (gloo's sender waits
    for the receiver's note, NCCL's kernel for its peer). Gradients are reduced in the last backward, as DDP does it;
    where the plan lets nothing overlap, once the schedule is through (Megatron-LM, finalize_model_grads): a stage's
    last message does not wait for them.
    """
    mesh = low.scenario.policies.mesh
    stages = {stage.number: _of_stage(low, stage) for stage in low.stages}
    writer = _Writer(low, _replicas(low, rank), stages, _output_bytes(low, rank), low.device(rank))
    writer.add(Task("begin", "idle"))
    for action in low.schedule[mesh.place(rank).pp]:
        writer.write(action, chunk)
    return [*writer.tasks, *writer.later]


def _of_stage(low: Lowering, stage: Stage) -> Lowering:
    """Return the lowering of one of a rank's stages, the same for all replicas: they share the collectives in it."""
    if len(low.stages) == 1:
        return low
    key = ("stage", stage.number)
    if key not in low.found:
        low.found[key] = replace(low, stages=(stage,), communications={}, found={})
    found: Lowering = low.found[key]
    return found


@dataclass
class _Writer:
    """Writes actions of the schedule down as tasks."""

    low: Lowering
    replicas: Sequence[Sequence[int]]
    """The ranks of every replica of the pipeline that takes as many samples, by the place on the pipeline's axis."""
    stages: dict[int, Lowering]
    """The rank's, by number."""
    output_bytes: Sequence[float]
    """Size of every stage's output for a micro-batch; micro-batches are equal."""
    device: DeviceType
    tasks: list[Task] = field(default_factory=list)
    later: list[Task] = field(default_factory=list)
    """What comes behind the schedule."""
    latest: str = ""
    """The latest task of the compute stream: what is handed over now is handed over after it."""

    def add(self, *tasks: Task) -> None:
        """Write tasks down."""
        self.tasks += tasks
        self.latest = next((task.label for task in reversed(tasks) if task.stream == "compute"), self.latest)

    def write(self, action: Action, chunk: Chunk) -> None:
        """Write an action down."""
        if action.kind in ("forward", "backward"):
            self.compute(action, chunk)
        elif action.kind == "wait":
            label = f"for {', '.join(self.name(message) for message in action.messages)}"
            after = tuple(self.label(message) for message in action.messages)
            self.add(Task(label, "exposed_communication", after=after))
        elif action.kind == "release":
            for message in action.messages:
                self.release(message)
        else:
            for message in action.messages:
                self.hand_over(message, sends=action.kind == "send")

    def compute(self, action: Action, chunk: Chunk) -> None:
        """Write the forward or the backward of a stage down."""
        low = self.stages[action.stage]
        found = chunk(low, self.low.micro_batches[action.micro_batch])
        count = next(place for place, task in enumerate(found) if task.label.startswith(("recompute ", "backward ")))
        part = found[:count] if action.kind == "forward" else found[count:]
        if low is not self.low:
            part = [self.of_stage(task, low, action.stage) for task in part]
        if not self.low.scenario.plan.overlap:
            self.later += [task for task in part if is_reduction(task)]
            part = [task for task in part if not is_reduction(task)]
        self.add(*part)

    def of_stage(self, task: Task, low: Lowering, stage: int) -> Task:
        """Return a task with its stage in its name, where a rank has several."""
        suffix = f" stage {stage}"
        name = task.communication and task.communication + suffix
        if name and task.communication:
            self.low.communications[name] = low.communications[task.communication]
        after = tuple(label + suffix for label in task.after)
        return replace(task, label=task.label + suffix, communication=name, after=after)

    def name(self, message: Message) -> str:
        """Return what a message is called on both sides."""
        return f"{message.kind} of stage {message.source}{self.low.micro_batches[message.micro_batch].suffix}"

    def label(self, message: Message) -> str:
        """Return the label of the task that carries a message."""
        return ("send " if message.source in self.stages else "receive ") + self.name(message)

    def hand_over(self, message: Message, *, sends: bool) -> None:
        """Let a message begin once the rank is here, on a stream of its peer's."""
        count = len(self.replicas[0])
        source, target = message.source % count, message.target % count
        first, *others = ((ranks[source], ranks[target]) for ranks in self.replicas)
        size = self.size_bytes(message)
        name = self.name(message)
        self.low.communications[name] = Communication("send", first, size, beside=tuple(others))
        stream = f"send to {target} on pp" if sends else f"receive from {source} on pp"
        self.add(Task(self.label(message), "exposed_communication", stream, communication=name, after=(self.latest,)))
        posting_s = collectives.posting_s(self.low.scenario.cluster, self.device, size) if sends else 0.0
        if posting_s:  # it goes as it is posted
            self.add(Task(f"post {name}", "exposed_communication", duration_s=posting_s))

    def release(self, message: Message) -> None:
        """Give back the tensor that a stage has made."""
        stage = self.stages[message.source].stages[0]
        category = stage.output[1] if message.kind == "activation" else "temporaries"
        gone = release_of(self.size_bytes(message), category)
        self.add(Task(f"release {self.name(message)}", "idle", need=gone))

    def size_bytes(self, message: Message) -> float:
        """Return the size of a message: of the output of its source, or of the input of which it is the gradient."""
        return self.output_bytes[message.source if message.kind == "activation" else message.target]


def _replicas(low: Lowering, rank: int) -> Sequence[Sequence[int]]:
    """Return the ranks of every replica of the pipeline that takes as many samples as a rank's own does."""
    samples = low.batch_sizes[rank]
    if ("replicas", samples) not in low.found:
        mesh = low.scenario.policies.mesh
        low.found["replicas", samples] = [mesh.group(r, "pp") for r in low.group if low.batch_sizes[r] == samples]
    found: Sequence[Sequence[int]] = low.found["replicas", samples]
    return found


def _output_bytes(low: Lowering, rank: int) -> Sequence[float]:
    """Return the size of every stage's output for one of a rank's micro-batches."""
    samples, length = low.samples(rank, low.micro_batches[0]), low.scenario.workload.sequence_length or 1
    key = ("output bytes", samples)
    if key not in low.found:
        low.found[key] = [low.traced_scale * stage.output[0].at(b=samples, s=length) for stage in low.all_stages]
    found: Sequence[float] = low.found[key]
    return found


def held_by_stages(low: Lowering, rank: int) -> dict[str, float]:
    """Return what a rank of a pipeline holds all the time for its stages' ends, by category.

    Inputs are with the first stage, targets with the last. PipelineStage makes a buffer for each micro-batch's input,
    and for each gradient of its output, in the first step, and keeps it.
    """
    last = len(low.all_stages) - 1
    numbers = {stage.number for stage in low.stages}
    received = [number - 1 for number in numbers if number > 0] + [number for number in numbers if number < last]
    sizes = _output_bytes(low, rank)
    each = sum(sizes[number] for number in received)
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
        "communication": each * len(low.micro_batches),
    }
