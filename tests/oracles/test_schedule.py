"""Schedules of pipelines: their laws, and torch's own loops as oracle, statement by statement."""

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gssim.plan import Action
from gssim.plan.pipeline_schedule import Message, ScheduleName, schedule

SCHEDULES = get_args(ScheduleName)
GPIPE, ONE_FORWARD_ONE_BACKWARD, _, INTERLEAVED, ZERO_BUBBLE = SCHEDULES
OF_SEVERAL_STAGES = (INTERLEAVED, ZERO_BUBBLE)


def in_flight(actions: Sequence[Action]) -> int:
    """Return the maximum number of micro-batches in flight, over all stages: forward done, backward not yet."""
    most = now = 0
    for action in actions:
        now += {"forward": 1, "backward": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Give (name, ranks, stages, micro-batches) for which the schedule exists."""
    name, ranks = draw(st.sampled_from(SCHEDULES)), draw(st.integers(2, 5))
    local = draw(st.integers(1, 4)) if name in OF_SEVERAL_STAGES else 1
    least = ranks if name == ONE_FORWARD_ONE_BACKWARD else 1
    micro_batches = draw(st.integers(least, 12))
    if name in OF_SEVERAL_STAGES:
        micro_batches -= micro_batches % max(1, micro_batches // ranks)
    return name, ranks, ranks * local, micro_batches


def made(name: str, ranks: int, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    return schedule(name, ranks=ranks, stages=stages, micro_batches=micro_batches)


# Laws ----------------------------------------------------------------------------------------------------------------


@given(pipelines())
def test_every_stage_takes_every_micro_batch_forward_then_backward_once(pipeline):
    name, ranks, stages, micro_batches = pipeline
    kinds = ("forward", "backward", "weight") if name == ZERO_BUBBLE else ("forward", "backward")
    for rank, actions in enumerate(made(*pipeline)):
        computed = [(a.kind, a.stage, a.micro_batch) for a in actions if a.kind in ("forward", "backward", "weight")]
        wanted = {
            (kind, stage, i) for kind in kinds for stage in range(rank, stages, ranks) for i in range(micro_batches)
        }
        assert len(computed) == len(wanted)
        assert set(computed) == wanted
        for kind, stage, i in wanted:
            if kind == "forward":
                places = [computed.index((each, stage, i)) for each in kinds]
                assert places == sorted(places)


@given(pipelines(), st.booleans(), st.booleans())
def test_a_schedule_without_messages_has_all_other_actions(pipeline, sharded, frees_sent):
    name, ranks, stages, micro_batches = pipeline
    numbers = {"ranks": ranks, "stages": stages, "micro_batches": micro_batches}
    whole, alone = (
        schedule(name, **numbers, sharded=sharded, frees_sent=frees_sent, messages=each) for each in (True, False)
    )
    others = [tuple(each for each in actions if each.kind not in ("send", "receive", "wait")) for actions in whole]
    assert alone == tuple(others)


def needed(action: Action, stages: int) -> set[Message]:
    if action.kind == "forward" and action.stage > 0:
        return {Message("activation", action.stage - 1, action.micro_batch)}
    if action.kind == "backward" and action.stage < stages - 1:
        return {Message("gradient", action.stage + 1, action.micro_batch)}
    return set()


@given(pipelines())
def test_nothing_is_computed_before_what_it_needs_has_come_and_all_is_waited_for(pipeline):
    _, ranks, stages, _ = pipeline
    for rank, actions in enumerate(made(*pipeline)):
        posted: set[Message] = set()
        here: set[Message] = set()
        for action in actions:
            assert needed(action, stages) <= here
            if action.kind in ("send", "receive"):
                posted.update(action.messages)
            elif action.kind == "wait":
                assert posted.issuperset(action.messages)
                here.update(action.messages)
        assert posted == here
        assert all(rank in (m.source % ranks, m.target % ranks) for m in posted)


@given(pipelines())
def test_what_is_made_is_held_until_it_is_sent_and_released_once(pipeline):
    made_by = {"forward": "activation", "backward": "gradient"}
    for actions in made(*pipeline):
        held: set[Message] = set()
        for action in actions:
            if action.kind.startswith("release"):
                assert held.issuperset(action.messages)
                held.difference_update(action.messages)
            elif action.kind == "send":
                assert held.issuperset(action.messages)
            elif (action.kind, action.stage > 0) in (("forward", False), ("forward", True), ("backward", True)):
                held.add(Message(made_by[action.kind], action.stage, action.micro_batch))
        assert not held


@given(pipelines())
def test_no_schedule_can_deadlock_and_neighbours_see_messages_in_one_order(pipeline):
    """Messages go through once both ends have handed them over; between two ranks, in the order of handing over."""
    _, ranks, _, _ = pipeline
    orders = made(*pipeline)
    for a in range(ranks):
        for b in range(ranks):
            sent = [m for x in orders[a] if x.kind == "send" for m in x.messages if m.target % ranks == b]
            taken = [m for x in orders[b] if x.kind == "receive" for m in x.messages if m.source % ranks == a]
            assert a == b or sent == taken
    places = [0] * ranks
    sent_by: set[Message] = set()
    taken_by: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(orders):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                if action.kind == "wait" and not set(action.messages) <= sent_by & taken_by:
                    break
                sent_by.update(action.messages if action.kind == "send" else ())
                taken_by.update(action.messages if action.kind == "receive" else ())
                places[rank] += 1
                moved = True
    assert places == [len(actions) for actions in orders]


@given(st.integers(2, 6), st.integers(1, 12))
def test_gpipe_holds_all_micro_batches_and_1f1b_at_most_the_stages_that_are_left(stages, micro_batches):
    assert {in_flight(each) for each in made(GPIPE, stages, stages, micro_batches)} == {micro_batches}
    if micro_batches >= stages:
        orders = made(ONE_FORWARD_ONE_BACKWARD, stages, stages, micro_batches)
        assert [in_flight(each) for each in orders] == [stages - stage for stage in range(stages)]


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "micro_batches", "reason"),
    [
        (GPIPE, 2, 4, 4, "one stage on each of 2 ranks"),
        (ONE_FORWARD_ONE_BACKWARD, 4, 4, 3, "at least as many micro-batches as stages: 4, not 3"),
        (INTERLEAVED, 2, 3, 4, "cannot be divided evenly"),
        (INTERLEAVED, 4, 8, 9, "9 micro-batches in 2 rounds"),
        (ZERO_BUBBLE, 4, 4, 9, "'interleaved_zero_bubble' takes 9 micro-batches in 2 rounds"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused(name, ranks, stages, micro_batches, reason):
    with pytest.raises(ValueError, match=reason):
        made(name, ranks, stages, micro_batches)


# torch as oracle -----------------------------------------------------------------------------------------------------


class Tensor:
    """Stands for a tensor; tells when the last name for it goes."""

    def __init__(self, log: list[Action], message: Message) -> None:
        self.message = message
        weakref.finalize(self, log.append, Action("release", messages=(message,)))


class Stage:
    """Stands for a PipelineStage: the same caches, but it only writes down what is asked of it."""

    def __init__(self, index: int, ranks: int, stages: int, log: list[Action]) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, index % ranks
        self.is_first, self.is_last, self.submod = index == 0, index == stages - 1, None
        self.log = log
        self.fwd_cache: dict[int, Any] = {}
        self.bwd_cache: dict[int, Any] = {}

    def _op(self, kind: str, message: Message, tensor: object = None) -> list[Any]:
        return [SimpleNamespace(kind=kind, message=message, tensor=tensor, peer=0)]

    def get_fwd_recv_ops(self, i: int) -> list[Any]:
        return [] if self.is_first else self._op("receive", Message("activation", self.stage_index - 1, i))

    def get_bwd_recv_ops(self, i: int) -> list[Any]:
        return [] if self.is_last else self._op("receive", Message("gradient", self.stage_index + 1, i))

    def get_fwd_send_ops(self, i: int) -> list[Any]:
        tensor = self.fwd_cache[i]
        return [] if self.is_last else self._op("send", tensor.message, tensor)

    def get_bwd_send_ops(self, i: int) -> list[Any]:
        if self.is_first:
            return []
        tensor = self.bwd_cache.pop(i)
        return self._op("send", tensor.message, tensor)

    def forward_one_chunk(self, i: int, *_args: Any, **_settings: Any) -> Tensor:
        self.log.append(Action("forward", self.stage_index, i))
        self.fwd_cache[i] = Tensor(self.log, Message("activation", self.stage_index, i))
        return self.fwd_cache[i]

    def backward_weight_one_chunk(self, i: int, **_settings: Any) -> None:
        self.log.append(Action("weight", self.stage_index, i))

    def backward_one_chunk(self, i: int, **_settings: Any) -> None:
        self.log.append(Action("backward", self.stage_index, i))
        del self.fwd_cache[i]
        if not self.is_first:
            self.bwd_cache[i] = Tensor(self.log, Message("gradient", self.stage_index, i))

    def perform_reduce_grad(self, _factor: int) -> None:
        pass

    def set_local_fwd_input(self, _output: Any, _i: int) -> None:
        pass

    def get_local_bwd_output(self, i: int) -> Any:
        return self.bwd_cache.pop(i)

    def set_local_bwd_input(self, _gradient: Any, _i: int) -> None:
        pass


def in_batches(log: list[Action]) -> list[Action]:
    """Return actions with neighbouring waits put together, and those that follow one another in any order."""
    found: list[Action] = []
    for action in log:
        if found and action.kind == found[-1].kind and action.kind in ("wait", "release"):
            found[-1] = Action(action.kind, messages=(*found[-1].messages, *action.messages))
        else:
            found.append(action)
    return [a._replace(messages=tuple(sorted(a.messages))) if a.kind in ("wait", "release") else a for a in found]


def torchs_own(name: str, ranks: int, stages: int, micro_batches: int, monkeypatch: Any) -> list[list[Action]]:
    """Return what torch's schedule does on every rank, with stages that only write it down."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")
    log: list[Action] = []

    def hand_over(ops: list[Any], desc: str | None = None) -> list[Any]:
        for kind in ("send", "receive"):
            messages = tuple(op.message for op in ops if op.kind == kind)
            if messages:
                log.append(Action(kind, messages=messages))
        return list(ops)  # the works: they hold the tensors

    def wait(works: list[Any]) -> None:
        if works:
            log.append(Action("wait", messages=tuple(work.message for work in works)))

    monkeypatch.setattr(schedules, "_batch_p2p", hand_over)
    monkeypatch.setattr(schedules, "_sorted_batch_p2p", lambda ops, desc=None: {0: hand_over(ops)})
    monkeypatch.setattr(schedules, "_wait_batch_p2p", wait)
    kinds = {
        GPIPE: schedules.ScheduleGPipe,
        ONE_FORWARD_ONE_BACKWARD: schedules.Schedule1F1B,
        INTERLEAVED: schedules.ScheduleInterleaved1F1B,
        ZERO_BUBBLE: schedules.ScheduleInterleavedZeroBubble,
    }
    monkeypatch.setattr(schedules, "_check_torch_compile_compatibility", lambda *_args: None)
    found = []
    for rank in range(ranks):
        log.clear()
        mine = [Stage(index, ranks, stages, log) for index in range(rank, stages, ranks)]
        made = kinds[name](mine if name in OF_SEVERAL_STAGES else mine[0], micro_batches, scale_grads=False)
        monkeypatch.setattr(made, "_initialize_stage", lambda *_args: None, raising=False)
        monkeypatch.setattr(made, "_initialize_stages", lambda *_args: None, raising=False)
        monkeypatch.setattr(made, "_assert_unsharded", lambda _stage: None, raising=False)
        made._step_microbatches([()] * micro_batches, [{}] * micro_batches, return_outputs=False)
        found.append(list(log))
    return found


def replace_kind(action: Action) -> Action:
    """Return the action, as `release` if it is `release-after-step`."""
    return action._replace(kind="release") if action.kind == "release-after-step" else action


CASES = [(name, p, p, m) for name in (GPIPE, ONE_FORWARD_ONE_BACKWARD) for p in (2, 3, 4) for m in (4, 5, 9)]
CASES += [(GPIPE, 3, 3, 1), (GPIPE, 4, 4, 2)]
LOCAL = [(2, 2, 2), (2, 2, 6), (2, 3, 4), (4, 2, 8), (3, 4, 3), (4, 2, 10)]
CASES += [(INTERLEAVED, p, p * v, m) for p, v, m in LOCAL]
CASES += [(ZERO_BUBBLE, p, p * v, m) for p, v, m in [*LOCAL, (2, 1, 4), (3, 1, 2), (4, 1, 12)]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_each_rank_does_what_torchs_own_schedule_does(case, monkeypatch):
    """Forwards, backwards, what is handed over together, waited for, and when the last name of a tensor goes."""
    theirs = torchs_own(*case, monkeypatch)
    for rank, actions in enumerate(made(*case)):
        # what is released after the step has another name besides the stages' (the `grad` of a received tensor)
        ours = [replace_kind(each) for each in actions]
        assert in_batches(theirs[rank]) == in_batches(ours), rank
