"""Pipeline schedules: each rank's order of forwards, backwards, sends, receives and waits.

They reproduce torch.distributed.pipelining (torch 2.13, schedules.py: ScheduleGPipe, Schedule1F1B,
ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble) statement by statement; tests compare them to torch's own
loops. DeepSpeed's 1F1B is a fifth. Stage i is on rank i modulo the ranks. The first stage receives no activations; the
last sends none.

[Note: zero bubble] Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (ZB-H1): a backward is split. Its first part, the
gradient of the stage's input, is what the stage before waits for; the second, the gradients of the weights, fills the
time in which a rank would wait. Rank r is r second parts behind its first parts, and does the rest at the end. In the
first stage, whose input has no gradient, the first part does nothing.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "deepspeed", "interleaved", "interleaved_zero_bubble"]
INTERLEAVED = ("interleaved", "interleaved_zero_bubble")
"""Schedules in which a rank may have several stages."""
SPLITTING = ("interleaved_zero_bubble",)
"""Schedules that split backwards; see [Note: zero bubble]."""


class Message(NamedTuple):
    """A tensor sent between adjacent stages: an activation goes forward, a gradient backward."""

    kind: str
    """`activation` or `gradient`."""
    source: int
    """The stage that produces it."""
    micro_batch: int

    @property
    def target(self) -> int:
        """The stage that receives it (for the last stage's output: one that does not exist)."""
        return self.source + (1 if self.kind == "activation" else -1)


class Action(NamedTuple):
    """One action of a rank.

    `forward`, `backward`: compute; in schedules that split it, `backward` is the first part of one, and `weight` the
    second. `send`, `receive`: post messages to the backend, those of one action in one batch, without waiting. `wait`:
    block until the messages are complete. `release`: the last reference of the schedule to a tensor is dropped, and its
    memory freed; `release-after-step`: the same, once the step's update is done. Where parameters are sharded (FSDP2),
    `unshard` starts to gather all of a stage, `reshard` frees what is gathered, and `reduce` reduces the stage's
    gradients.
    """

    kind: str
    stage: int = -1
    micro_batch: int = -1
    messages: tuple[Message, ...] = ()


def _on_messages(kind: str, messages: tuple[Message, ...]) -> Action:
    """Return an action on messages alone; keyword arguments would take twice as long, of thousands in a schedule."""
    return Action(kind, -1, -1, messages)


@lru_cache(maxsize=64)
def schedule(
    name: str,
    *,
    ranks: int,
    stages: int,
    micro_batches: int,
    sharded: bool = False,
    frees_sent: bool = False,
    messages: bool = True,
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank in a step; `sharded`: those on sharded parameters and gradients too.

    `frees_sent`: interleaved stages refer to an output until its backward, and to a gradient until the next, as
    Megatron-LM's; torch's refer to all to the end. GPipe and 1F1B leave gathering to the stages' own forwards and
    backwards. `messages`: whether to send, receive and wait, which takes no memory. Raises ValueError, with the reason,
    where the schedule does not exist for these numbers.

    >>> [action.kind for action in schedule("1f1b", ranks=2, stages=2, micro_batches=2)[1]][:4]
    ['receive', 'wait', 'forward', 'backward']
    """
    refuse(name, ranks=ranks, stages=stages, micro_batches=micro_batches)
    if name in INTERLEAVED:
        local, splits = stages // ranks, name in SPLITTING
        orders = [_compute_order(rank, ranks, local, micro_batches, splits=splits) for rank in range(ranks)]
        return _interleaved(orders, stages, sharded=sharded, frees_sent=frees_sent, messages=messages)
    single = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "deepspeed": _deepspeed}[name]
    reduced = [(Action("reduce", stage),) if sharded else () for stage in range(stages)]
    recorders = [_Recorder(stage, stages, messages=messages) for stage in range(stages)]
    return tuple((*single(each, micro_batches), *reduced[each.stage]) for each in recorders)


def refuse(name: str, *, ranks: int, stages: int, micro_batches: int) -> None:
    """Raise ValueError, with the reason, where a schedule does not exist for these numbers."""
    if name not in INTERLEAVED and stages != ranks:
        raise ValueError(f"'{name}' takes one stage on each of {ranks} ranks, not {stages} stages")
    if stages % ranks:
        raise ValueError(f"{stages} stages cannot be divided evenly among {ranks} ranks")
    if name == "1f1b" and micro_batches < stages:
        raise ValueError(f"'1f1b' needs at least as many micro-batches as stages: {stages}, not {micro_batches}")
    rounds = max(1, micro_batches // ranks)
    if name in INTERLEAVED and micro_batches % rounds:
        raise ValueError(f"'{name}' takes {micro_batches} micro-batches in {rounds} rounds, of unequal length")


class _Recorder:
    """Records a rank's actions, and releases a tensor once none of torch's local variables refers to it."""

    def __init__(self, stage: int, stages: int, *, messages: bool) -> None:
        self.stage, self.stages, self.records_messages = stage, stages, messages
        self.first, self.last = stage == 0, stage == stages - 1
        self.actions: list[Action] = []
        self.variables: dict[str, tuple[Message, ...]] = {}
        self.references: dict[Message, int] = defaultdict(int)
        """How many variables refer to each tensor."""

    def assign(self, variable: str, *messages: Message) -> None:
        """Bind a variable to tensors; those that it was bound to are released if no other variable refers to them."""
        before = self.variables.pop(variable, ())
        if messages:
            self.variables[variable] = messages
        for message in messages:
            self.references[message] += 1
        for message in before:
            self.references[message] -= 1
            if not self.references[message]:
                self.actions.append(_on_messages("release", (message,)))

    def unbind_all(self) -> None:
        """Unbind all variables, as when the function returns."""
        for variable in list(self.variables):
            self.assign(variable)

    def post(self, kind: str, *messages: Message) -> None:
        """Post messages to be sent or received, if there are any, and if messages are recorded."""
        if messages and self.records_messages:
            self.actions.append(_on_messages(kind, messages))

    def wait(self, *messages: Message) -> None:
        """Wait for messages, if there are any."""
        self.post("wait", *messages)

    def received(self, kind: str, micro_batch: int) -> tuple[Message, ...]:
        """Return the message that a forward (`activation`) or backward (`gradient`) of the stage needs, if any."""
        if kind == "activation":
            return () if self.first else (Message(kind, self.stage - 1, micro_batch),)
        return () if self.last else (Message(kind, self.stage + 1, micro_batch),)

    def forward(self, micro_batch: int) -> tuple[Message, ...]:
        """Compute; return the messages to send next. The stage's cache and the loop's `output` refer to the output."""
        self.actions.append(Action("forward", self.stage, micro_batch))
        output = Message("activation", self.stage, micro_batch)
        self.assign(f"cache {micro_batch}", output)
        self.assign("output", output)
        return () if self.last else (output,)

    def backward(self, micro_batch: int) -> tuple[Message, ...]:
        """Compute; return the messages to send next."""
        self.actions.append(Action("backward", self.stage, micro_batch))
        self.assign(f"cache {micro_batch}")
        return () if self.first else (Message("gradient", self.stage, micro_batch),)


def _gpipe(do: _Recorder, micro_batches: int) -> Iterator[Action]:
    """GPipe: all forwards, then all backwards; sent tensors stay referenced to the end."""
    for kind, compute in (("activation", do.forward), ("gradient", do.backward)):
        sent: list[Message] = []
        for i in range(micro_batches):
            _receive(do, kind, i)
            outputs = compute(i)
            do.post("send", *outputs)
            do.assign(f"sent {kind} {i}", *outputs)
            sent += outputs
        do.wait(*sent)
    do.unbind_all()
    yield from do.actions


def _one_forward_one_backward(do: _Recorder, micro_batches: int) -> Iterator[Action]:
    """1F1B: warm-up forwards, then a backward and a forward in turn, then the remaining backwards."""
    warmup = min(micro_batches, do.stages - do.stage)
    in_work: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()
    for i in range(warmup):
        _receive(do, "activation", i)
        sends = do.forward(i)
        do.wait(*in_work)
        do.assign("fwd_sends", *sends)
        if i < warmup - 1:
            do.post("send", *sends)
            in_work = sends
            do.assign("send_work", *in_work)
    forwards, backwards = warmup, 0
    while True:
        _exchange(do, sends, do.received("gradient", backwards))
        sends = do.backward(backwards)
        do.assign("bwd_sends", *sends)
        backwards += 1
        if forwards == micro_batches:
            break
        _exchange(do, sends, do.received("activation", forwards))
        sends = do.forward(forwards)
        do.assign("fwd_sends", *sends)
        forwards += 1
    do.post("send", *sends)
    do.assign("send_work", *sends)
    for i in range(backwards, micro_batches):
        _receive(do, "gradient", i)
        before, sends = sends, do.backward(i)
        do.wait(*before)
        do.assign("bwd_sends", *sends)
        do.post("send", *sends)
        do.assign("send_work", *sends)
    do.wait(*sends)
    do.unbind_all()
    yield from do.actions


def _deepspeed(do: _Recorder, micro_batches: int) -> Iterator[Action]:
    """1F1B of DeepSpeed's PipelineEngine (runtime/pipe/schedule.py, TrainSchedule): one message at a time.

    In even steps the even stages run forward and the odd ones backward, in odd steps the reverse, so that the stages of
    a pair exchange what they made in the step before: first the gradient goes back, then the activation forward. A rank
    waits for each message, the sent ones too, before the next and before it computes.
    """
    sends: tuple[Message, ...] = ()
    stage, stages = do.stage, do.stages
    for step in range(2 * (micro_batches + stages - 1)):
        forward = (step - stage) % 2 == 0
        micro_batch = (step - stage) // 2 if forward else (step + stage + 1) // 2 - stages
        computes = 0 <= micro_batch < micro_batches
        received = do.received("activation" if forward else "gradient", micro_batch) if computes else ()
        exchanged = (("send", sends), ("receive", received))
        for kind, messages in exchanged if forward else reversed(exchanged):
            do.post(kind, *messages)
            do.wait(*messages)
        do.assign("sent")
        sends = ()
        if computes and forward:
            sends = do.forward(micro_batch)
            do.assign("output")
        elif computes:
            sends = do.backward(micro_batch)
            do.assign("sent", *sends)
    do.unbind_all()
    yield from do.actions


def _receive(do: _Recorder, kind: str, micro_batch: int) -> None:
    needed = do.received(kind, micro_batch)
    do.post("receive", *needed)
    do.wait(*needed)


def _exchange(do: _Recorder, sends: tuple[Message, ...], receives: tuple[Message, ...]) -> None:
    """Post both in one batch, sends first, and wait for all."""
    do.post("send", *sends)
    do.post("receive", *receives)
    do.wait(*sends, *receives)


# Interleaved ---------------------------------------------------------------------------------------------------------


def _interleaved(
    orders: list[list[Action]], stages: int, *, sharded: bool, frees_sent: bool, messages: bool
) -> tuple[tuple[Action, ...], ...]:
    """Return the ranks' actions from what each computes, in order: those of torch's runtime of several stages.

    Messages are in flight while the rank computes, and are waited for at the end; all sent tensors stay referenced
    until then, unless `frees_sent`.
    """
    ranks = len(orders)
    if sharded or messages:  # the order of messages depends on shard actions, which torch inserts in any case
        orders = [_with_shard_actions(order) for order in orders]
    if messages:
        orders = _with_messages(orders, stages)
    if not sharded:
        orders = [[action for action in order if action.kind not in SHARD_ACTIONS] for order in orders]
    return tuple(tuple(_with_waits(order, stages, ranks, frees_sent=frees_sent, messages=messages)) for order in orders)


def _compute_order(rank: int, ranks: int, local: int, micro_batches: int, *, splits: bool) -> list[Action]:
    """Return a rank's forwards and backwards, or both parts of each backward (torch: _get_1f1b_rank_ops).

    Interleaved 1F1B (Narayanan et al. 2021, section 2.2): a rank has `local` stages, and runs the earliest first. With
    `splits` (see [Note: zero bubble]) the warm-up is shorter by `ranks - 1 - rank` forwards, and a second part follows
    `rank` steps after its first.
    """
    in_round = micro_batches // max(1, micro_batches // ranks)
    total = local * micro_batches
    warmup = min((local - 1) * in_round + (1 if splits else 2) * (ranks - 1 - rank), total)
    second = warmup + (rank if splits else 0)
    done: dict[tuple[str, int], int] = defaultdict(int)
    order: list[Action] = []

    def add(kind: str, local_stage: int) -> None:
        stage = local_stage * ranks + rank
        order.append(Action(kind, stage, done[kind, stage]))
        done[kind, stage] += 1

    for step in range(second + total):
        if step < total:
            add("forward", step // in_round % local)
        if warmup <= step < warmup + total:
            add("backward", local - 1 - (step - warmup) // in_round % local)
        if splits and step >= second:
            add("weight", local - 1 - (step - second) // in_round % local)
    return order


ACTIVE_STAGES = 3
"""Stages whose parameters torch gathers ahead, where they are sharded (_add_unshard_reshard)."""
SHARD_ACTIONS = ("unshard", "reshard", "reduce")
"""Actions on sharded parameters and gradients; elsewhere they do nothing, but shift the points at which messages are
posted."""


def _with_shard_actions(order: list[Action]) -> list[Action]:
    """Return the order with the actions that torch schedules for sharded stages and their gradients."""
    active: set[int] = set()
    last = "weight" if any(action.kind == "weight" for action in order) else "backward"
    backwards_left: dict[int, int] = defaultdict(int)
    for action in order:
        backwards_left[action.stage] += action.kind == last
    following: list[list[int]] = [[]]
    """From each action on, the stages in the order in which they come next; the last action first."""
    for action in reversed(order):
        following.append([action.stage, *[stage for stage in following[-1] if stage != action.stage]])
    slots: list[Action] = []
    for action, stages in zip(order, reversed(following), strict=False):
        upcoming = stages[:ACTIVE_STAGES]
        if active != set(upcoming):
            slots += [Action("reshard", stage) for stage in sorted(active.difference(upcoming))]
            slots += [Action("unshard", stage) for stage in upcoming if stage not in active]
            active = set(upcoming)
        slots.append(action)
        backwards_left[action.stage] -= action.kind == last
        if action.kind == last and not backwards_left[action.stage]:
            slots.append(Action("reduce", action.stage))
    return [*slots, *(Action("reshard", stage) for stage in sorted(active))]


def _with_messages(orders: list[list[Action]], stages: int) -> list[list[Action]]:
    """Return the orders with sends and receives (torch: _add_send_recv).

    Rank after rank takes its next action once the messages that it needs have been posted; a sender also inserts the
    receive into the peer's order, so that both see messages in the same order.
    """
    ranks = len(orders)
    actions: list[list[Action]] = [[] for _ in orders]
    available: list[set[Message]] = [set() for _ in orders]
    upcoming = [deque((action, _inputs(action, stages)) for action in order) for order in orders]
    while any(upcoming):
        for rank, queue in enumerate(upcoming):
            if not queue or not available[rank].issuperset(queue[0][1]):
                continue
            action, _ = queue.popleft()
            actions[rank].append(action)
            for message in _outputs(action, stages):
                peer = message.target % ranks
                available[rank].add(message)
                available[peer].add(message)
                if peer != rank:
                    actions[rank].append(_on_messages("send", (message,)))
                    actions[peer].append(_on_messages("receive", (message,)))
    return actions


def _inputs(action: Action, stages: int) -> tuple[Message, ...]:
    if action.kind == "forward":
        return (Message("activation", action.stage - 1, action.micro_batch),) if action.stage else ()
    last = action.stage == stages - 1
    return () if last or action.kind != "backward" else (Message("gradient", action.stage + 1, action.micro_batch),)


def _outputs(action: Action, stages: int) -> tuple[Message, ...]:
    if action.kind == "forward":
        last = action.stage == stages - 1
        return () if last else (Message("activation", action.stage, action.micro_batch),)
    is_sent = action.stage > 0 and action.kind == "backward"
    return (Message("gradient", action.stage, action.micro_batch),) if is_sent else ()


def _with_waits(order: list[Action], stages: int, ranks: int, *, frees_sent: bool, messages: bool) -> list[Action]:
    """Return the order with releases, and waits if it has `messages`, inserted where torch's runtime has them.

    After a split backward the input's gradient is also the `grad` of the buffer in which the input was received, which
    the next step's begin clears (torch: stage_backward_input, clear_runtime_states).
    """
    splits = any(action.kind == "weight" for action in order)
    sent: list[Message] = []
    freed: set[Message] = set()
    gradient: tuple[Message, ...] = ()
    received = {message for action in order if action.kind == "receive" for message in action.messages}
    found: list[Action] = []
    for action in order:
        kind, stage, micro_batch, _ = action
        if kind not in ("forward", "backward"):
            found.append(action)
            continue
        needed = _inputs(action, stages) if received else ()
        if needed and needed[0] in received:
            found.append(_on_messages("wait", needed))
        found.append(action)
        outputs = _outputs(action, stages)
        if ranks > 1:
            sent += outputs
        if kind == "backward":
            stays = ranks > 1 and stage < stages - 1 and not frees_sent
            unused = [] if stays else [Message("activation", stage, micro_batch)]
            if frees_sent:
                unused += gradient
                gradient = outputs
            freed.update(unused)
            found += [_on_messages("release", (message,)) for message in unused]
    found += _with_last_waits(sent, freed, waits=messages, splits=splits)
    return found


def _with_last_waits(sent: list[Message], freed: set[Message], *, waits: bool, splits: bool) -> Iterator[Action]:
    """Yield the waits, if there are any, for the messages `sent`, and the releases of those that are not in `freed`."""
    for message in reversed(sent):
        if waits:
            yield _on_messages("wait", (message,))
        if message not in freed:
            stays = splits and message.kind == "gradient"
            yield _on_messages("release-after-step" if stays else "release", (message,))
