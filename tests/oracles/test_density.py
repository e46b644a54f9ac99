import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import FEEDBACK_GRID, MULTIPLES, exponential_statistics, exponential_tensor

from gssim.plan import Publish, Push
from gssim.sparsity import (
    Ranges,
    Ratios,
    moment_of,
    movements,
    publish_ratios,
    push_ratios,
    staleness_steps,
    traces_of,
)
from gssim.workload.gradient_statistics import (
    EDGES_PER_DECADE,
    SKETCH_EDGES,
    BlockTrace,
    ChangeTrace,
    FeedbackDensity,
    RankTrace,
    Sketch,
    TensorTrace,
    read_gradients,
)

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
TENSOR = "head.weight"
RMS = 1e-3
MEAN = RMS / math.sqrt(2)


def density(statistics, threshold, *, samples=4, step=0, part=1.0, first=0.0, last=1.0, **policy):
    push = Push(threshold=threshold, **policy)
    return push_ratios(statistics, push, samples=samples, tensor=TENSOR, step=step, part=part).over(first, last)


def statistics_of(*tensors, thresholds=(0.0,), steps=(0,), feedback=False):
    """Return statistics of one tensor, trained under each of the thresholds."""
    traces = tuple(
        RankTrace(samples=4, threshold=threshold, error_feedback=feedback, tensors={TENSOR: tensor})
        for threshold, tensor in zip(thresholds, tensors, strict=True)
    )
    looked_at = tensors[0].blocks[0].feedback
    grids = {"feedback_thresholds": FEEDBACK_GRID, "multiples": MULTIPLES} if looked_at else {}
    none = {"feedback_thresholds": (), "multiples": ()}
    changes = {"sampled_steps": steps, "steps": steps[-1] + 1, "changes": {}} | none | grids
    return replace(exponential_statistics(), traces=traces, **changes)


def block(level: float) -> BlockTrace:
    """Return a gradient of which the same fraction reaches any threshold up to 100."""
    reached = tuple(level for edge in SKETCH_EDGES if edge <= 100)
    return BlockTrace(sketches=(Sketch(mean=1.0, rms=1.0, tail_ratios=reached),))


def flat(*levels: float) -> TensorTrace:
    return TensorTrace(blocks=tuple(block(level) for level in levels))


# Absolute thresholds --------------------------------------------------------------------------------------------------


@given(st.floats(0.02, 8), st.floats(1e-6, 1e2))
def test_the_tail_of_an_exponential_distribution_is_found_between_the_edges(ratio, rms):
    found = density(exponential_statistics(rms=rms), ratio * rms)
    assert found == pytest.approx(math.exp(-math.sqrt(2) * ratio), rel=0.02, abs=1e-5)


@pytest.mark.parametrize("threshold", [0.3, 1.0, 2.1, 3.3])
def test_between_the_edges_a_normal_distribution_is_found_exactly(threshold):
    sketch = Sketch(mean=0.8, rms=1.0, tail_ratios=tuple(math.erfc(edge / math.sqrt(2)) for edge in SKETCH_EDGES))
    statistics = statistics_of(TensorTrace(blocks=(BlockTrace(sketches=(sketch,)),)))
    assert density(statistics, threshold) == pytest.approx(math.erfc(threshold / math.sqrt(2)), rel=1e-4)


@pytest.mark.parametrize("edge", [edge for edge in SKETCH_EDGES[::EDGES_PER_DECADE] if 1e-4 < edge < 10])
def test_at_the_sketchs_edges_the_density_is_exact(edge):
    exact = math.exp(-math.sqrt(2) * edge)
    assert density(exponential_statistics(rms=1.0), edge) == pytest.approx(exact, rel=1e-6, abs=1e-9)


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e3), st.booleans())
def test_a_higher_threshold_never_sends_more(a, b, feedback):
    statistics = exponential_statistics(rms=0.1)
    low, high = (density(statistics, t, error_feedback=feedback) for t in sorted((a, b)))
    assert 0 <= high <= low * (1 + 1e-9) <= 1 + 1e-9


def test_threshold_zero_sends_everything_and_zero_gradients_and_infinite_thresholds_send_nothing():
    silent = exponential_statistics(rms=0.0)
    assert density(silent, 0.0) == density(exponential_statistics(), 0.0) == 1.0
    assert density(silent, 1e-30) == 0.0
    assert density(exponential_statistics(), 1e-9, samples=0) == 0.0
    assert push_ratios(silent, Push(), samples=4, tensor=TENSOR, step=0).over(0.0, 1.0) == 1.0


def test_the_first_steps_are_dense_where_the_plan_says_so():
    found = [density(exponential_statistics(), 1.0, step=step, warmup_steps=3) for step in (0, 2, 3)]
    assert found == [1.0, 1.0, 0.0]


def test_exact_zeros_are_never_sent():
    assert density(statistics_of(flat(0.5)), 1e-30) == 0.5


def test_a_part_of_a_gradient_is_as_much_smaller():
    statistics = exponential_statistics()
    assert density(statistics, RMS, part=0.25) == pytest.approx(density(statistics, 4 * RMS), rel=1e-9)


# Steps, samples, ranges -----------------------------------------------------------------------------------------------


def test_between_two_sampled_steps_the_scale_goes_with_the_logarithm_of_the_step():
    """Half the way from step 1 to step 49 is gone at step 9: (1 + 1) * (49 + 1) = (9 + 1)^2."""
    statistics = statistics_of(exponential_tensor(1e-2, 1e-4), steps=(1, 49))
    found = [density(statistics, 2e-3, step=step) for step in (0, 1, 9, 49)]
    exact = [math.exp(-math.sqrt(2) * 2e-3 / rms) for rms in (1e-2, 1e-2, 1e-3, 1e-4)]
    assert found == pytest.approx(exact, rel=0.02, abs=1e-9)


@given(st.lists(st.floats(1e-6, 1e3), min_size=6, max_size=6), st.integers(2, 31))
def test_scales_lie_on_scipys_monotone_cubic_of_logarithms(scales, step):
    """Scipy's ends are other ones: a step inside is meant."""
    from scipy.interpolate import PchipInterpolator

    sampled = (1, 2, 5, 18, 31, 44)
    curve = PchipInterpolator([math.log1p(each) for each in sampled], [math.log(each) for each in scales])
    moment = moment_of(sampled, step)
    found = moment.curved(moment.all_of(scales))
    assert found == pytest.approx(math.exp(float(curve(math.log1p(step)))), rel=1e-9)
    assert min(moment.of(scales)) * (1 - 1e-9) <= found <= max(moment.of(scales)) * (1 + 1e-9)


def test_a_scale_that_falls_ever_more_slowly_lies_below_straight_lines():
    """From 10^-2 at step 1 by a fifth to step 9, (9 + 1) / (1 + 1) = 5, then by a half to step 49."""
    statistics = statistics_of(exponential_tensor(1e-2, 2e-3, 1e-3), steps=(1, 9, 49))
    for step, straight in ((4, 1e-2 * (5 / 2) ** -1.0), (20, 2e-3 * (21 / 10) ** (-math.log(2) / math.log(5)))):
        found = math.sqrt(2) * 2e-3 / -math.log(density(statistics, 2e-3, step=step))
        assert 0.8 * straight < found < 0.98 * straight


def test_next_to_zeros_a_scale_goes_straight():
    """Half the way from step 3 to step 15 is gone at step 7: 2 * 10^-3 is halfway from 4 to 1."""
    statistics = statistics_of(exponential_tensor(0.0, 4e-3, 1e-3, 0.0), steps=(0, 3, 15, 20))
    assert density(statistics, 2e-3, step=7) == pytest.approx(math.exp(-math.sqrt(2)), rel=0.02)


@pytest.mark.parametrize(("samples", "nearest"), [(1, 1), (2, 1), (3, 4), (4, 4), (9, 16), (500, 16)])
def test_the_trace_nearest_in_ratio_is_used(samples, nearest):
    statistics = exponential_statistics(samples=(1, 4, 16))
    assert [trace.samples for trace in traces_of(statistics, samples)] == [nearest]


@pytest.mark.parametrize(("correlation", "factor"), [(0.0, 2.0), (1.0, 1.0), (0.2, math.sqrt(0.2 + 0.8 * 4))])
def test_over_a_fourth_of_the_samples_the_noise_is_twice_as_large_and_what_ranks_share_stays(correlation, factor):
    tensor = replace(exponential_tensor(RMS), correlations=(correlation,))
    statistics = statistics_of(tensor)
    for feedback in (False, True):
        whole = density(statistics, 2 * RMS / factor, error_feedback=feedback)
        assert density(statistics, 2 * RMS, samples=1, error_feedback=feedback) == pytest.approx(whole, rel=1e-9)


def test_an_owners_range_has_the_blocks_that_lie_in_it():
    statistics = statistics_of(flat(0.0, 0.2, 0.8, 1.0))
    ranges = [(0, 1), (0, 0.25), (0.25, 0.75), (0.5, 1), (0.2, 0.3), (0.3, 0.3)]
    found = [density(statistics, 1.0, first=first, last=last) for first, last in ranges[:-1]]
    assert found == pytest.approx([0.5, 0.0, 0.5, 0.9, 0.1])


# Trained under thresholds ---------------------------------------------------------------------------------------------


def under(*thresholds_and_levels, feedback=False):
    """Return statistics of runs under thresholds, each with the same density wherever it is below 100."""
    thresholds, levels = zip(*sorted(thresholds_and_levels), strict=True)
    return statistics_of(*map(flat, levels), thresholds=thresholds, feedback=feedback)


def test_under_a_threshold_that_was_trained_with_that_runs_density_counts():
    statistics = under((1.0, 0.4), (0.0, 0.1), (0.01, 0.2))
    assert [density(statistics, t) for t in (0.01, 1.0, 50.0)] == pytest.approx([0.2, 0.4, 0.4])


def test_between_two_trained_thresholds_the_density_lies_halfway_in_logarithm():
    assert density(under((0.01, 0.1), (1.0, 0.4)), 0.1) == pytest.approx(0.2)
    assert density(under((0.01, 0.0), (1.0, 0.4)), 0.1) == pytest.approx(0.2)


def test_dense_training_counts_as_a_decade_below_the_lowest_trained_threshold():
    statistics = under((0.0, 0.1), (1.0, 0.4))
    assert [density(statistics, t) for t in (0.01, 0.1, 10**-0.5)] == pytest.approx([0.1, 0.1, 0.2])


def test_runs_that_were_trained_with_error_feedback_are_for_pushes_with_it():
    plain, kept = under((0.0, 0.1), (1.0, 0.4)), under((1.0, 0.7), feedback=True)
    both = replace(plain, traces=(*plain.traces, *kept.traces))
    assert density(both, 1.0) == pytest.approx(0.4)
    assert [trace.threshold for trace in traces_of(both, 4, error_feedback=True)] == [0.0, 1.0]


# Error feedback -------------------------------------------------------------------------------------------------------


@given(st.floats(2e-5, 5e-3))
def test_with_error_feedback_the_rate_of_reaching_the_threshold_counts(threshold):
    found = density(exponential_statistics(rms=RMS), threshold, error_feedback=True)
    assert found == pytest.approx(MEAN / (MEAN + threshold), rel=0.08)


@pytest.mark.parametrize("threshold", FEEDBACK_GRID)
def test_where_error_feedback_was_looked_at_its_density_is_exact(threshold):
    found = density(exponential_statistics(rms=RMS), threshold, error_feedback=True)
    assert found == pytest.approx(MEAN / (MEAN + threshold), rel=1e-9)


@pytest.mark.parametrize("name", ["bert-byte-1m", "gpt-byte-1m", "gpt-byte-1m-1024", "resnet-digits"])
def test_below_the_measured_thresholds_the_density_is_about_what_would_have_been_measured(name):
    """The lowest is left out. Gradients that hardly reach the next one are not all sent at once just below it."""
    whole = read_gradients(SCENARIOS / "gradients" / f"{name}.json")
    left_out, *grid = whole.feedback_thresholds
    (trace,), errors = whole.traces, []
    for tensor, each in trace.tensors.items():
        blocks = tuple(
            replace(block, feedback=tuple(FeedbackDensity(sent_ratios=row.sent_ratios[1:]) for row in block.feedback))
            for block in each.blocks
        )
        traces = (replace(trace, tensors={tensor: TensorTrace(blocks=blocks)}),)
        rest = replace(whole, feedback_thresholds=tuple(grid), traces=traces)
        push = Push(threshold=left_out, error_feedback=True)
        step = whole.sampled_steps[-1]
        ratios = push_ratios(rest, push, samples=trace.samples, tensor=tensor, step=step).values
        measured = [block.feedback[-1].sent_ratios[0] for block in each.blocks]
        errors += [abs(found - real) for found, real in zip(ratios, measured, strict=True)]
    assert max(errors) < 0.15
    assert np.mean(errors) < 0.02


def test_under_a_low_threshold_error_feedback_changes_nothing():
    statistics = exponential_statistics(rms=RMS)
    found = [density(statistics, 1e-9, error_feedback=feedback) for feedback in (True, False)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


# Other kinds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_a_relative_threshold_is_times_the_mean_magnitude_whatever_the_scale(ratio):
    for rms in (1e-2, 1e-6):
        found = density(exponential_statistics(rms=rms), ratio, kind="relative", part=0.5)
        assert found == pytest.approx(math.exp(-ratio), rel=0.02)


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_where_error_feedback_was_looked_at_under_a_relative_threshold_its_density_is_exact(multiple):
    for rms in (1e-2, 1e-6):
        found = density(exponential_statistics(rms=rms), multiple, kind="relative", error_feedback=True, part=0.5)
        assert found == pytest.approx(1 / (1 + multiple), rel=1e-9)


@pytest.mark.parametrize("feedback", [False, True])
def test_a_target_density_is_met_in_every_step_wherever_the_scale_goes(feedback):
    statistics = statistics_of(exponential_tensor(1e-3, 2e-3), steps=(2, 6))
    policy = {"kind": "target-density", "reestimate_steps": 4, "warmup_steps": 2, "error_feedback": feedback}
    found = [density(statistics, 0.05, step=step, **policy) for step in range(7)]
    assert found[:2] == [1.0, 1.0]
    assert found[2:] == pytest.approx([0.05] * 5, rel=1e-3)
    assert density(statistics, 1.0, step=3, **policy) == 1.0


def test_under_a_target_density_zeros_are_not_sent_and_blocks_keep_their_differences():
    assert density(statistics_of(flat(0.02)), 0.05, kind="target-density") == pytest.approx(0.02)
    statistics = statistics_of(
        TensorTrace(blocks=tuple(exponential_tensor(rms).blocks[0] for rms in (RMS, 4 * RMS))), steps=(0,)
    )
    halves = [density(statistics, 0.1, kind="target-density", first=at, last=at + 0.5) for at in (0.0, 0.5)]
    assert sum(halves) / 2 == pytest.approx(0.1, rel=1e-3)
    assert halves[0] == pytest.approx(halves[1] ** 4, rel=0.05)


def test_with_error_feedback_nothing_has_gathered_at_the_first_step():
    """The tail of gradients that are large at first is sent there, and 1 / (1 + t / mean) where steps were sampled."""
    large, small = exponential_tensor(10 * RMS).blocks[0], exponential_tensor(RMS).blocks[0]
    statistics = statistics_of(TensorTrace(blocks=(replace(small, first=large.sketches[0]),)), steps=(3,))
    found = [density(statistics, MEAN, step=step, error_feedback=True) for step in (0, 1, 3, 9)]
    alone, gathered = math.exp(-0.1), 0.5
    assert found == pytest.approx([alone, math.sqrt(alone * gathered), gathered, gathered], rel=0.05)


# Publish --------------------------------------------------------------------------------------------------------------


def published(threshold):
    return publish_ratios(exponential_statistics(rms=RMS), Publish(threshold=threshold), tensor=TENSOR, step=2).over(
        0.0, 1.0
    )


@given(st.lists(st.floats(0, 1), max_size=20), st.floats(0, 4), st.floats(0, 4))
def test_parameters_lag_by_no_more_than_all_steps_and_the_more_the_higher_the_threshold(moved, low, high):
    low, high = sorted((low, high))
    assert 0 <= staleness_steps(moved, low) <= staleness_steps(moved, high) <= len(moved)


def test_what_moves_steadily_is_told_of_as_often_as_it_comes_to_the_threshold():
    # by 0.01 a step: at 0.1 every tenth step, at 0.001 in every step; the tensor that moves has a fourth of all
    statistics = replace(
        statistics_of(flat(1.0)),
        publish_thresholds=(0.001, 0.1, 1.0),
        changes={"moves": ChangeTrace(blocks=(((1.0, 0.1, 0.0),),)), "rests": ChangeTrace(blocks=(((0.0,) * 3,),))},
    )
    assert movements(statistics, {"moves": 10, "rests": 30}, steps=4) == pytest.approx([0.0025] * 4)


@pytest.mark.parametrize("feedback", [False, True])
def test_gradients_of_old_parameters_are_as_many_over_a_threshold_as_they_were_then(feedback):
    trace = RankTrace(samples=4, tensors={TENSOR: exponential_tensor(RMS, RMS / 8)})
    statistics = exponential_statistics(traces=(trace,), changes={}, sampled_steps=(1, 7))
    push = Push(threshold=RMS, error_feedback=feedback)

    def sent(step, lag_steps=0.0):
        where = {"samples": 4, "tensor": TENSOR, "step": step, "lag_steps": lag_steps}
        return push_ratios(statistics, push, **where).over(0.0, 1.0)

    assert sent(1) > sent(3) > sent(7)
    assert [sent(7, 6), sent(7, 4)] == pytest.approx([sent(1), sent(3)])


def test_changes_are_published_as_often_as_they_reach_the_threshold():
    assert published(None) == published(0.0) == 1.0
    assert [published(t) for t in FEEDBACK_GRID] == pytest.approx([RMS / (RMS + t) for t in FEEDBACK_GRID])
    assert published(3e-3) == pytest.approx(RMS / (RMS + 3e-3), rel=0.05)
    assert published(1e-2) > published(3e-2) > published(1.0)


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traces": ()}, "traces: at least one"),
        ({"sampled_steps": ()}, "sampled_steps"),
        ({"sampled_steps": (4, 0)}, "must increase"),
        ({"sampled_steps": (0, 8)}, "be less than steps"),
        ({"sampled_steps": (0,)}, r"sketches of .*: 1 "),
        ({"feedback_thresholds": (2.0, 1.0)}, "must increase"),
        ({"feedback_thresholds": (1.0, 2.0)}, r"feedback of .*: 2 rows"),
        ({"multiples": (1.0, 2.0)}, r"relative of .*: 2 rows"),
        ({"publish_thresholds": (1.0, 2.0)}, r"changes of .*: 2 rows"),
    ],
)
def test_statistics_with_holes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        exponential_statistics(**changes)


# All ranges of owners at once ----------------------------------------------------------------------------------------


@given(data=st.data(), blocks=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_densities_of_many_ranges_are_those_of_each_to_the_last_digit(data, blocks):
    fraction = st.floats(0.0, 1.0)
    ratios = []
    for count in blocks:
        values = data.draw(st.lists(fraction, min_size=count, max_size=count).map(tuple))
        below = data.draw(st.sampled_from([(), values[::-1]]))
        ratios.append(Ratios(values, below, data.draw(fraction) if below else 0.0))
    ranges = []
    for _ in range(data.draw(st.integers(1, 8))):
        tensor, cuts = data.draw(st.integers(0, len(blocks) - 1)), sorted(data.draw(st.tuples(fraction, fraction)))
        if cuts[0] < cuts[1] and cuts[1] - cuts[0] > 1e-9:
            ranges.append((tensor, *cuts))
    if ranges:
        tensors, first, last = (np.array(column) for column in zip(*ranges, strict=True))
        found = Ranges(tensors, first, last).densities(ratios).tolist()
        assert found == [ratios[tensor].over(begin, end) for tensor, begin, end in ranges]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("own", [(0.0, 0.05), (0.0, 0.82), (0.1, 0.999)], ids=str)
@pytest.mark.parametrize("model", ["gpt-byte-1m", "bert-byte-1m", "resnet-digits"])
def test_of_a_tensor_that_is_mostly_the_ranks_own_no_multiple_of_the_mean_is_no_number(model, own):
    """The own range has no residuals; what it lacked once exceeded the whole, and the logarithm was undefined."""
    statistics = read_gradients(SCENARIOS / "gradients" / f"{model}.json")
    for tensor in list(statistics.traces[0].tensors)[::3]:
        found = [
            push_ratios(
                statistics,
                Push(kind="relative", threshold=multiple, error_feedback=True),
                samples=6,
                tensor=tensor,
                step=9,
                own=own,
            ).over(0.0, 1.0)
            for multiple in (0.5, 4.0, 100.0, 1e4, 1e9)
        ]
        assert all(0 <= later <= ratio <= 1 for ratio, later in pairwise(found[:-1])), (tensor, found)
        assert 0 <= found[-1] < 1e-3, (tensor, found)
