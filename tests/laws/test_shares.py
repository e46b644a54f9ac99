from itertools import combinations, pairwise, product
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gssim.plan import ranges
from gssim.plan import splitting as division
from gssim.plan.splitting import balance_batch, balanced_stages, even, greedy, proportional, split

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda weights: sum(weights) > 1e-3)


@given(st.integers(0, 10**12), WEIGHTS)
def test_parts_are_whole_sum_to_the_total_and_follow_the_shares(total, weights):
    shares = proportional(weights)
    parts = split(total, shares)
    assert sum(parts) == total
    for part, share in zip(parts, shares, strict=True):
        assert part >= 0
        assert abs(part - share * total) < 1 + 1e-3


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_even_shares_differ_by_one_at_most_and_the_lower_ranks_have_more(total, parts):
    found = split(total, even(parts))
    assert max(found) - min(found) <= 1
    assert list(found) == sorted(found, reverse=True)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any))
def test_shares_of_whole_parts_give_back_the_parts(parts):
    assert split(sum(parts), proportional(parts)) == tuple(parts)


@given(st.integers(0, 10**9), WEIGHTS)
def test_ranges_follow_each_other_from_the_first_element_to_the_last(total, weights):
    shares = proportional(weights)
    found = ranges(total, shares)
    assert found[0][0] == 0
    assert found[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(found))
    assert tuple(b - a for a, b in found) == split(total, shares)


def test_the_largest_remainder_gets_the_odd_element():
    assert split(5, [0.5, 0.2, 0.3]) == (3, 1, 1)
    assert split(1, [0.2, 0.6, 0.2]) == (0, 1, 0)


TIMES = st.lists(st.floats(0.01, 10), min_size=1, max_size=3)


@given(st.integers(0, 7), TIMES)
def test_no_other_division_of_the_batch_is_faster(total, sample_s):
    samples = balance_batch(total, sample_s=sample_s)
    assert sum(samples) == total

    def slowest_s(division):
        return max(n * s for n, s in zip(division, sample_s, strict=True))

    others = (d for d in product(range(total + 1), repeat=len(sample_s)) if sum(d) == total)
    assert slowest_s(samples) <= min(map(slowest_s, others)) * (1 + 1e-12)


def test_equal_devices_get_equal_samples():
    assert balance_batch(12, sample_s=[0.1] * 4) == (3, 3, 3, 3)


def test_shares_of_nothing_are_a_mistake():
    with pytest.raises(ZeroDivisionError):
        proportional([0, 0])


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 12))
def test_greedy_gives_everything_away_once_the_largest_first_and_balances_to_the_largest(sizes, parts):
    found = greedy(sizes, parts)
    assert sorted(position for part in found for position in part) == list(range(len(sizes)))
    for part in found:
        assert list(part) == sorted(part, key=lambda position: (-sizes[position], position))
    held = [sum(sizes[position] for position in part) for part in found]
    assert max(held) - min(held) <= max(sizes, default=0)


def test_greedy_gives_the_next_to_the_first_of_the_emptiest():
    assert greedy([4, 4, 4, 1], 3) == ((0, 3), (1,), (2,))
    assert greedy([1], 3) == ((0,), (), ())


@given(st.data())
def test_no_cut_of_a_chain_is_faster_than_the_one_that_is_found(data):
    layers = data.draw(st.integers(1, 7))
    stages = data.draw(st.integers(1, min(4, layers)))
    row = st.lists(st.integers(0, 9), min_size=layers, max_size=layers)
    times_s = data.draw(st.lists(row, min_size=stages, max_size=stages))

    def slowest_s(counts):
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return max(sum(times_s[i][end - count : end]) for i, (count, end) in enumerate(zip(counts, ends, strict=True)))

    found = balanced_stages(times_s)
    assert sum(found) == layers
    assert min(found) >= 1
    cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    assert slowest_s(found) == min(slowest_s([b - a for a, b in pairwise(cut)]) for cut in cuts)


@given(st.data())
def test_a_large_batch_is_divided_as_sample_by_sample(data):
    ranks = data.draw(st.integers(1, 6))
    times_s = st.sampled_from([1e-4, 1 / 3, 1.0, 1.0, 7.0])
    sample_s = data.draw(st.lists(times_s, min_size=ranks, max_size=ranks))
    least = data.draw(st.integers(0, 2))
    most = data.draw(st.none() | st.lists(st.integers(300, 900), min_size=ranks, max_size=ranks))
    total = data.draw(st.integers(2 * ranks, min(900, sum(most or [900]))))
    with patch.object(division, "MANY_SAMPLES", 10**9):
        expected = balance_batch(total, sample_s=sample_s, least=least, most=most)
    with patch.object(division, "MANY_SAMPLES", 0):
        assert balance_batch(total, sample_s=sample_s, least=least, most=most) == expected


def test_a_batch_of_a_million_goes_evenly_to_equal_devices():
    assert balance_batch(2**20, sample_s=[0.1] * 1024) == (1024,) * 1024
