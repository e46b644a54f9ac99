import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import exponential_statistics

from gssim.density import push_density, traces_of
from gssim.gradients import EDGES_PER_DECADE, SKETCH_EDGES, RankTrace, TensorTrace
from gssim.plan import Push

TENSOR = "head.weight"


def density(statistics, threshold, *, samples=4, step=0):
    return push_density(statistics, Push(threshold=threshold), samples=samples, tensor=TENSOR, step=step)


def exponential(threshold: float, rms: float) -> float:
    return math.exp(-math.sqrt(2) * threshold / rms)


@given(st.floats(1e-4, 20), st.floats(1e-6, 1e3))
def test_the_tail_of_an_exponential_distribution_is_found_to_interpolation_error(ratio, rms):
    found = density(exponential_statistics(rms=rms), ratio * rms)
    # linear in x = log |g| between edges h apart: the error is at most h^2/8 * max |f''(x)|, and that is 0.31
    bound = (math.log(10) / EDGES_PER_DECADE) ** 2 / 8 * 0.31
    assert found == pytest.approx(exponential(ratio * rms, rms), abs=bound)


@pytest.mark.parametrize("edge", SKETCH_EDGES[::7])
def test_at_the_sketchs_edges_the_density_is_exact(edge):
    assert density(exponential_statistics(rms=1.0), edge) == pytest.approx(exponential(edge, 1.0), rel=1e-9, abs=1e-12)


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e3))
def test_a_higher_threshold_never_sends_more(a, b):
    statistics = exponential_statistics(rms=0.1)
    low, high = sorted((a, b))
    assert 0 <= density(statistics, high) <= density(statistics, low) <= 1


@given(st.floats(1e-6, 1e2), st.floats(1e-3, 1e3))
def test_scaling_gradients_and_threshold_alike_changes_nothing(threshold, k):
    one, scaled = exponential_statistics(rms=0.1), exponential_statistics(rms=0.1 * k)
    assert density(scaled, threshold * k) == pytest.approx(density(one, threshold), rel=1e-6, abs=1e-12)


def test_threshold_zero_sends_everything_and_zero_gradients_send_nothing():
    silent = exponential_statistics(rms=0.0)
    assert density(silent, 0.0) == 1.0
    assert density(silent, 1e-30) == 0.0
    assert density(exponential_statistics(), 0.0) == 1.0


def test_a_rank_without_samples_sends_nothing_over_a_threshold():
    assert density(exponential_statistics(), 1e-9, samples=0) == 0.0


def test_the_scale_is_that_of_the_very_step_and_the_shape_lies_between_the_sampled_ones():
    wide, narrow = (tuple(level if edge <= 1 else 0.0 for edge in SKETCH_EDGES) for level in (0.8, 0.4))
    tensor = TensorTrace(rms=(1.0, 1.0, 1.0, 1.0, 1.0, 50.0), tail_ratios=(wide, narrow))
    trace = RankTrace(samples=4, tensors={TENSOR: tensor})
    statistics = replace(exponential_statistics(), sampled_steps=(0, 4), traces=(trace,))
    assert [density(statistics, 0.5, step=step) for step in range(6)] == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4, 0.4])
    assert density(statistics, 20.0, step=4) == 0.0
    assert density(statistics, 20.0, step=5) == pytest.approx(0.4)


def test_exact_zeros_are_never_sent():
    half_zero = tuple(0.5 if edge <= 1 else 0.0 for edge in SKETCH_EDGES)
    trace = RankTrace(samples=4, tensors={TENSOR: TensorTrace(rms=(1.0,), tail_ratios=(half_zero,))})
    statistics = replace(exponential_statistics(), sampled_steps=(0,), traces=(trace,))
    assert density(statistics, 1e-30) == 0.5


@pytest.mark.parametrize(("samples", "nearest"), [(1, 1), (2, 1), (3, 4), (4, 4), (9, 16), (500, 16)])
def test_the_trace_nearest_in_ratio_is_used(samples, nearest):
    statistics = exponential_statistics(samples=(1, 4, 16))
    assert [trace.samples for trace in traces_of(statistics, samples)] == [nearest]


def under(*thresholds_and_levels: tuple[float, float]):
    """Return statistics of runs under thresholds, each with the same density wherever it is below 100 rms."""
    traces = tuple(
        RankTrace(samples=4, threshold=threshold, tensors={TENSOR: TensorTrace(rms=(1.0,), tail_ratios=(flat(level),))})
        for threshold, level in thresholds_and_levels
    )
    return replace(exponential_statistics(), sampled_steps=(0,), traces=traces)


def flat(level: float) -> tuple[float, ...]:
    return (level,) * len(SKETCH_EDGES)


def test_under_a_threshold_that_was_trained_with_that_runs_density_counts():
    statistics = under((1.0, 0.4), (0.0, 0.1), (0.01, 0.2))
    assert [density(statistics, t) for t in (0.01, 1.0, 50.0)] == pytest.approx([0.2, 0.4, 0.4])


def test_between_two_trained_thresholds_the_density_lies_halfway_in_logarithm():
    statistics = under((0.01, 0.1), (1.0, 0.4))
    assert density(statistics, 0.1) == pytest.approx(0.2)
    assert density(under((0.01, 0.0), (1.0, 0.4)), 0.1) == pytest.approx(0.2)


def test_dense_training_counts_as_a_decade_below_the_lowest_trained_threshold():
    statistics = under((0.0, 0.1), (1.0, 0.4))
    assert [density(statistics, t) for t in (0.01, 0.1, 10**-0.5)] == pytest.approx([0.1, 0.1, 0.2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traces": ()}, "traces: at least one"),
        ({"sampled_steps": ()}, "sampled_steps"),
        ({"sampled_steps": (4, 0)}, "must increase"),
        ({"sampled_steps": (0,)}, r"tail_ratios of .*: 1 rows"),
    ],
)
def test_statistics_with_holes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        exponential_statistics(**changes)
