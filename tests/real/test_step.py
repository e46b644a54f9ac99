"""One timed step as a trace shows it: ranks on one clock, whom they wait for, what they hold between marks."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch

from gsreal.measure import RankStep, Timeline, combine_ranks
from gsreal.measure.step import _held
from gssim.result import Arrow, Span


def rank_step(rank, spans, groups, *, start_s=0.0, clock="here", held=()):
    made = [Span(rank, "compute", label, "exposed_communication", *times) for label, *times in spans]
    end_s = max((span.end_s for span in made), default=start_s)
    return RankStep("cpu", start_s, end_s, made, list(groups), clock, list(held))


def test_ranks_of_one_clock_keep_their_distance_and_others_begin_together():
    ranks = [rank_step(0, [("x", 10, 12)], [()], start_s=10.0), rank_step(1, [("x", 11, 13)], [()], start_s=11.0)]
    step = combine_ranks([*ranks, rank_step(2, [("x", 501, 502)], [()], start_s=500.0, clock="elsewhere")])
    assert [(span.start_s, span.end_s) for span in step.spans] == [(-1, 1), (0, 2), (1, 2)]
    assert step.bounds_s == {0: (-1, 1), 1: (0, 2), 2: (0, 2)}
    assert step.names == dict.fromkeys(range(3), "cpu")


def test_arrows_stay_in_the_group_that_communicates_and_follow_its_order():
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    times = {0: [(0, 5), (6, 9)], 1: [(3, 5), (5, 9)], 2: [(1, 4), (4, 8)], 3: [(0, 4), (7, 8)]}
    ranks = [rank_step(rank, [("all-gather", *each) for each in times[rank]], [pairs[rank]] * 2) for rank in range(4)]
    step = combine_ranks(ranks)
    ways = [(step.spans[arrow.source], step.spans[arrow.target]) for arrow in step.arrows]
    assert sorted((a.rank, b.rank, a.start_s) for a, b in ways) == [(0, 1, 6), (1, 0, 3), (2, 3, 1), (3, 2, 7)]


def test_who_is_alone_or_misses_a_member_has_no_arrows():
    alone = rank_step(0, [("optimizer", 0, 1)], [()])
    assert combine_ranks([alone]).arrows == []
    assert combine_ranks([rank_step(0, [("x", 0, 1)], [(0, 1)]), rank_step(1, [], [])]).arrows == []


def test_stages_send_activations_on_and_gradients_back():
    def spans(stage, *times):
        return [
            (f"{phase} stage {stage} micro-batch 0", *each)
            for phase, each in zip(("forward", "backward"), times, strict=True)
        ]

    first = rank_step(0, spans(0, (0, 1), (5, 6)), [(0, 1)] * 2)
    last = rank_step(1, spans(1, (1, 2), (3, 4)), [(0, 1)] * 2)
    assert combine_ranks([first, last]).arrows == [
        Arrow("send activation of stage 0 micro-batch 0", 0, 2),
        Arrow("send gradient of stage 1 micro-batch 0", 3, 1),
    ]


@pytest.fixture
def timeline():
    moments = iter(float(number) for number in range(100))
    return Timeline(0, torch.device("cpu"), lambda: next(moments))


def test_a_step_is_on_the_clock_and_a_pause_before_it_is_no_part_of_it(timeline):
    timeline.restart()  # 0
    with timeline.span("a", "forward"):  # 1..2
        pass
    timeline.end_step()  # 3
    with timeline.pause(), timeline.span("evaluation", "forward"):  # 4..7
        pass
    with timeline.span("b", "backward", "group"):  # 8..9
        pass
    timeline.end_step()  # 10
    start_s, end_s, marks, spans = timeline.step(1)
    assert (start_s, end_s) == (7.0, 10.0)
    assert [(mark.label, mark.group) for mark in marks] == [("b", "group")]
    assert [(span.start_s, span.end_s) for span in spans] == [(8.0, 9.0)]


def test_what_another_step_held_between_two_marks_is_told_at_the_times_of_this_one(timeline):
    timeline.restart()
    for _ in range(2):
        with timeline.span("a", "forward"):
            timeline.mark()
        timeline.end_step()
    _, _, here, spans = timeline.step(0)
    _, _, there, _ = timeline.step(1)
    (a,) = there
    peaks = [(a.began, 5), (object(), 9), (a.ended, 7), (object(), 3)]
    assert _held(peaks, there, here, spans, 0.0) == [(0.0, 5), (1.0, 9), (3.0, 3)]
    assert _held(peaks, [], here, spans, 0.0) == []
