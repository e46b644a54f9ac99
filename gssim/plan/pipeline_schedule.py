"""Who does what when in a pipeline: each rank's order of forwards, backwards, messages, and waits for them.

What torch.distributed.pipelining does (torch 2.13, schedules.py: ScheduleGPipe, Schedule1F1B and
ScheduleInterleaved1F1B), statement by statement; tests compare it to torch's own loops. Stage i is on rank i modulo
the ranks. The first stage receives nothing; the last sends no activations.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Message(NamedTuple):
    """A tensor from one stage to a neighbour: an activation goes forward, a gradient backward."""

    kind: str
    """`activation` or `gradient`."""
    source: int
    """The stage that makes it."""
    micro_batch: int

    @property
    def target(self) -> int:
        """The stage that takes it; the last stage's output goes to nobody."""
        return self.source + (1 if self.kind == "activation" else -1)


class Action(NamedTuple):
    """One thing that a rank does.

    `forward`, `backward`: compute. `send`, `receive`: hand messages over to the backend, those of one action together,
    and go on. `wait`: until the messages are through. `release`: the last name that the schedule has for a tensor
    goes, and its memory.
    """

    kind: str
    stage: int = -1
    micro_batch: int = -1
    messages: tuple[Message, ...] = ()


@lru_cache(maxsize=64)
def schedule(name: str, *, ranks: int, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank does in a step.

    Raises ValueError, with the reason, where the schedule does not exist for these numbers.

    >>> [action.kind for action in schedule("1f1b", ranks=2, stages=2, micro_batches=2)[1]][:4]
    ['receive', 'wait', 'forward', 'backward']
    """
    refuse(name, ranks=ranks, stages=stages, micro_batches=micro_batches)
    if name == "interleaved":
        return _interleaved(ranks, stages // ranks, micro_batches)
    single = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}[name]
    return tuple(tuple(single(stage, stages, micro_batches)) for stage in range(stages))


def refuse(name: str, *, ranks: int, stages: int, micro_batches: int) -> None:
    """Raise ValueError, with the reason, where a schedule does not exist for these numbers."""
    if name != "interleaved" and stages != ranks:
        raise ValueError(f"'{name}' takes one stage on each of {ranks} ranks, not {stages} stages")
    if stages % ranks:
        raise ValueError(f"{stages} stages cannot be dealt out evenly to {ranks} ranks")
    if name == "1f1b" and micro_batches < stages:
        raise ValueError(f"'1f1b' needs at least as many micro-batches as stages: {stages}, not {micro_batches}")
    rounds = max(1, micro_batches // ranks)
    if name == "interleaved" and micro_batches % rounds:
        raise ValueError(f"'interleaved' takes {micro_batches} micro-batches in {rounds} rounds, of unequal length")


def in_flight(actions: Sequence[Action]) -> int:
    """Return the most micro-batches, of all stages, whose forward a rank has done and whose backward it has not.

    >>> [in_flight(each) for each in schedule("1f1b", ranks=3, stages=3, micro_batches=8)]
    [3, 2, 1]
    """
    most = now = 0
    for action in actions:
        now += {"forward": 1, "backward": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


class _Writer:
    """Writes down what a rank does; knows which of torch's names hold which tensors, and so when a tensor goes."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.first, self.last = stage, stage == 0, stage == stages - 1
        self.actions: list[Action] = []
        self.names: dict[str, tuple[Message, ...]] = {}

    def hold(self, name: str, *messages: Message) -> None:
        """Let a name stand for tensors; those that it stood for go where no other name holds them."""
        before = self.names.pop(name, ())
        if messages:
            self.names[name] = messages
        for message in before:
            if not any(message in held for held in self.names.values()):
                self.actions.append(Action("release", messages=(message,)))

    def hold_nothing(self) -> None:
        """Let all names go: the function returns."""
        for name in list(self.names):
            self.hold(name)

    def hand_over(self, kind: str, *messages: Message) -> None:
        """Send or receive."""
        if messages:
            self.actions.append(Action(kind, messages=messages))

    def wait(self, *messages: Message) -> None:
        """Wait for messages."""
        if messages:
            self.actions.append(Action("wait", messages=messages))

    def received(self, kind: str, micro_batch: int) -> tuple[Message, ...]:
        """Return the message that a forward (`activation`) or backward (`gradient`) of the stage needs, if any."""
        if kind == "activation":
            return () if self.first else (Message(kind, self.stage - 1, micro_batch),)
        return () if self.last else (Message(kind, self.stage + 1, micro_batch),)

    def forward(self, micro_batch: int) -> tuple[Message, ...]:
        """Compute; return what is then to be sent. The cache of the stage, and the loop's `output`, hold the output."""
        self.actions.append(Action("forward", self.stage, micro_batch))
        output = Message("activation", self.stage, micro_batch)
        self.hold(f"cache {micro_batch}", output)
        self.hold("output", output)
        return () if self.last else (output,)

    def backward(self, micro_batch: int) -> tuple[Message, ...]:
        """Compute; return what is then to be sent."""
        self.actions.append(Action("backward", self.stage, micro_batch))
        self.hold(f"cache {micro_batch}")
        return () if self.first else (Message("gradient", self.stage, micro_batch),)


def _gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards; what was sent is held to the end."""
    do = _Writer(stage, stages)
    for kind, compute in (("activation", do.forward), ("gradient", do.backward)):
        sent: list[Message] = []
        for i in range(micro_batches):
            needed = do.received(kind, i)
            do.hand_over("receive", *needed)
            do.wait(*needed)
            made = compute(i)
            do.hand_over("send", *made)
            do.hold(f"sent {kind} {i}", *made)
            sent += made
        do.wait(*sent)
    do.hold_nothing()
    yield from do.actions


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Some forwards, then a backward and a forward in turn, then the rest of the backwards."""
    do = _Writer(stage, stages)
    warmup = min(micro_batches, stages - stage)
    in_work: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()
    for i in range(warmup):
        _receive(do, "activation", i)
        sends = do.forward(i)
        do.wait(*in_work)
        do.hold("fwd_sends", *sends)
        if i < warmup - 1:
            do.hand_over("send", *sends)
            in_work = sends
            do.hold("send_work", *in_work)
    forwards, backwards = warmup, 0
    while True:
        _exchange(do, sends, do.received("gradient", backwards))
        sends = do.backward(backwards)
        do.hold("bwd_sends", *sends)
        backwards += 1
        if forwards == micro_batches:
            break
        _exchange(do, sends, do.received("activation", forwards))
        sends = do.forward(forwards)
        do.hold("fwd_sends", *sends)
        forwards += 1
    do.hand_over("send", *sends)
    do.hold("send_work", *sends)
    for i in range(backwards, micro_batches):
        _receive(do, "gradient", i)
        before, sends = sends, do.backward(i)
        do.wait(*before)
        do.hold("bwd_sends", *sends)
        do.hand_over("send", *sends)
        do.hold("send_work", *sends)
    do.wait(*sends)
    do.hold_nothing()
    yield from do.actions


def _receive(do: _Writer, kind: str, micro_batch: int) -> None:
    needed = do.received(kind, micro_batch)
    do.hand_over("receive", *needed)
    do.wait(*needed)


def _exchange(do: _Writer, sends: tuple[Message, ...], receives: tuple[Message, ...]) -> None:
    """Hand over both in one batch, sends first, and wait for all."""
    do.hand_over("send", *sends)
    do.hand_over("receive", *receives)
    do.wait(*sends, *receives)


# Interleaved ---------------------------------------------------------------------------------------------------------


def _interleaved(ranks: int, local: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2): a rank has `local` stages; the earliest comes first.

    Messages are under way while the rank computes; all that was sent is held, and waited for, to the end.
    """
    stages = ranks * local
    orders = [_with_idle_slots(_compute_order(rank, ranks, local, micro_batches)) for rank in range(ranks)]
    return tuple(tuple(_with_waits(order, stages)) for order in _with_messages(orders, stages))


def _compute_order(rank: int, ranks: int, local: int, micro_batches: int) -> list[Action]:
    """Return a rank's forwards and backwards (torch: _get_1f1b_rank_ops)."""
    in_round = micro_batches // max(1, micro_batches // ranks)
    total = local * micro_batches
    warmup = min((local - 1) * in_round + 2 * (ranks - 1 - rank), total)
    done: dict[tuple[str, int], int] = defaultdict(int)
    found: list[Action] = []

    def add(kind: str, part: int) -> None:
        stage = part * ranks + rank
        found.append(Action(kind, stage, done[kind, stage]))
        done[kind, stage] += 1

    for step in range(total + warmup):
        if step < total:
            add("forward", step // in_round % local)
        if step >= warmup:
            add("backward", local - 1 - (step - warmup) // in_round % local)
    return found


ACTIVE_STAGES = 3
"""Stages whose parameters torch would gather ahead, were they sharded (_add_unshard_reshard)."""


def _with_idle_slots(order: list[Action]) -> list[Action | None]:
    """Return the order with a None for everything that torch schedules for sharded stages and their gradients.

    Nothing is done in these slots, but they shift where messages are handed over.
    """
    active: set[int] = set()
    left: dict[int, int] = defaultdict(int)
    for action in order:
        left[action.stage] += action.kind == "backward"
    found: list[Action | None] = []
    for i, action in enumerate(order):
        coming = list(dict.fromkeys(later.stage for later in order[i:]))[:ACTIVE_STAGES]
        found += [None] * (len(active - set(coming)) + len(set(coming) - active))
        active = set(coming)
        found.append(action)
        left[action.stage] -= action.kind == "backward"
        if action.kind == "backward" and not left[action.stage]:
            found.append(None)  # torch: REDUCE_GRAD
    return [*found, *[None] * len(active)]


def _with_messages(orders: list[list[Action | None]], stages: int) -> list[list[Action]]:
    """Return the orders with sends and receives (torch: _add_send_recv).

    Rank after rank takes its next action, if what it needs has been handed over; a sender puts the receive into its
    neighbour's order, so that both see messages in the same order.
    """
    ranks = len(orders)
    found: list[list[Action]] = [[] for _ in orders]
    known: list[set[Message]] = [set() for _ in orders]
    places = [0] * ranks
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for rank, order in enumerate(orders):
            if places[rank] == len(order):
                continue
            action = order[places[rank]]
            if action is not None:
                if not known[rank].issuperset(_needed(action, stages)):
                    continue
                found[rank].append(action)
                for message in _made(action, stages):
                    other = message.target % ranks
                    known[rank].add(message)
                    known[other].add(message)
                    if other != rank:
                        found[rank].append(Action("send", messages=(message,)))
                        found[other].append(Action("receive", messages=(message,)))
            places[rank] += 1
    return found


def _needed(action: Action, stages: int) -> tuple[Message, ...]:
    if action.kind == "forward":
        return (Message("activation", action.stage - 1, action.micro_batch),) if action.stage else ()
    last = action.stage == stages - 1
    return () if last else (Message("gradient", action.stage + 1, action.micro_batch),)


def _made(action: Action, stages: int) -> tuple[Message, ...]:
    if action.kind == "forward":
        last = action.stage == stages - 1
        return () if last else (Message("activation", action.stage, action.micro_batch),)
    return (Message("gradient", action.stage, action.micro_batch),) if action.stage else ()


def _with_waits(order: list[Action], stages: int) -> Iterator[Action]:
    """Give an order with what is waited for, and released, where torch's runtime does that."""
    sent: list[Message] = []
    received = {message for action in order if action.kind == "receive" for message in action.messages}
    for action in order:
        needed = [] if action.messages else [m for m in _needed(action, stages) if m in received]
        if needed:
            yield Action("wait", messages=tuple(needed))
        yield action
        if action.kind == "send":
            sent += action.messages
        if action.kind == "backward":
            output = Message("activation", action.stage, action.micro_batch)
            if output not in sent:
                yield Action("release", messages=(output,))
    for message in reversed(sent):
        yield Action("wait", messages=(message,))
        yield Action("release", messages=(message,))
