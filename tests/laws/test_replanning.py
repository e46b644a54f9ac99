"""Laws of the controller of batch shares: it ignores noise, reacts to slow-downs, and settles."""

import math
from dataclasses import replace

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gssim.plan.plan import Replanning
from gssim.plan.rebalancing import Watch, observe, worth_moving
from gssim.plan.shard_sizing import OwnerTimes, owner_time_s
from gssim.plan.splitting import balance_batch

DEFAULTS = Replanning()
ANSWER_STEPS = 4
"""Steps until the controller reacts to half speed: 3, and one more that noise of 10 % may hide."""


def batches(watch, sample_s_by_step, *, noise=0.0, seed=0, fixed_s=0.0, settings=DEFAULTS, **limits):
    """Return the batch after each step, and the last watch; noise: the largest change of a time, by chance."""
    random = np.random.default_rng(seed)
    found = []
    for sample_s in sample_s_by_step:
        times = [
            (fixed_s + n * each) * (1 + noise * random.uniform(-1, 1))
            for n, each in zip(watch.batch, sample_s, strict=True)
        ]
        watch = observe(watch, times, settings, **limits)
        found.append(watch.batch)
    return found, watch


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_noise_of_a_tenth_never_changes_a_balanced_division(data):
    """Whatever the noise is: not only what chance makes likely."""
    ranks = data.draw(st.integers(2, 6))
    batch = tuple(data.draw(st.lists(st.integers(1, 40), min_size=ranks, max_size=ranks)))
    watch = Watch(batch)
    noises = st.lists(st.floats(0.9, 1.1), min_size=ranks, max_size=ranks)
    for _ in range(data.draw(st.integers(5, 40))):
        watch = observe(watch, data.draw(noises), DEFAULTS)  # each rank takes as long: it is balanced
        assert watch.batch == batch


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_down_to_half_speed_is_answered_in_time_once_and_so_is_its_end(seed):
    ranks, slow = 2 + seed % 4, seed % 2
    normal = [1.0] * ranks
    slowed = [2.0 if rank == slow else 1.0 for rank in range(ranks)]
    start = (24,) * ranks
    steps = [normal] * 30 + [slowed] * 40 + [normal] * 40
    found, _ = batches(Watch(start), steps, noise=0.1, seed=seed)
    changes = [step for step in range(1, len(found)) if found[step] != found[step - 1]]
    assert set(found[:30]) == {start}
    assert 30 <= changes[0] < 30 + ANSWER_STEPS
    assert 70 <= changes[1] < 70 + ANSWER_STEPS
    assert len(changes) == 2  # nothing swings
    during, after = found[69], found[-1]
    assert during[slow] == pytest.approx(24 * ranks / (2 * ranks - 1), rel=0.15)
    assert max(after) - min(after) <= 0.2 * 24


def test_a_slow_down_by_a_factor_is_answered_when_the_drift_test_says():
    for factor in (1.6, 2.0, 4.0, 0.5):
        found, _ = batches(Watch((30, 30)), [[1, 1]] * 10 + [[factor, 1]] * 30)
        excess = abs(math.log(factor)) - math.log(DEFAULTS.drift_ratio)
        wanted = math.floor(DEFAULTS.drift_limit / excess) + 1
        changed = next(step for step in range(len(found)) if found[step] != (30, 30))
        assert changed - 10 + 1 == wanted, factor
        assert found[changed] == balance_batch(60, sample_s=[factor, 1])


def test_a_slow_down_below_what_counts_as_noise_is_let_be_and_a_single_late_step_too():
    found, _ = batches(Watch((30, 30)), [[1, 1]] * 10 + [[1.2, 1]] * 100)
    assert set(found) == {(30, 30)}
    late = [[1, 1]] * 10 + [[3, 1]] + [[1, 1]] * 9
    found, _ = batches(Watch((30, 30)), late * 5)
    assert set(found) == {(30, 30)}


def test_all_ranks_slow_alike_change_nothing():
    found, _ = batches(Watch((20, 40)), [[2, 1]] * 10 + [[4, 2]] * 20)
    assert set(found) == {(20, 40)}


@pytest.mark.parametrize("fixed_s", [0.0, 5.0, 50.0])
def test_a_wrong_division_is_mended_and_comes_to_rest_whatever_each_step_takes_beside_the_samples(fixed_s):
    found, watch = batches(Watch((50, 50)), [[3, 1]] * 100, fixed_s=fixed_s)
    assert len(set(found[60:])) == 1
    times = [fixed_s + n * each for n, each in zip(watch.batch, [3, 1], strict=True)]
    best = balance_batch(100, sample_s=[3, 1])
    least_s = max(fixed_s + n * each for n, each in zip(best, [3, 1], strict=True))
    assert max(times) <= 1.3 * least_s


def test_no_new_division_before_the_fewest_steps_have_passed():
    settings = Replanning(minimum_steps=12)
    paces = [[1, 1]] * 13 + [[9, 1]] * 13 + [[1, 9]] * 20
    found, _ = batches(Watch((30, 30)), paces, settings=settings)
    changes = [step for step in range(1, len(found)) if found[step] != found[step - 1]]
    assert changes
    assert all(later - earlier >= 12 for earlier, later in zip([0, *changes], changes, strict=False))


def test_a_rank_keeps_a_sample_however_slow_and_takes_no_more_than_it_may():
    found, _ = batches(Watch((30, 30)), [[1000, 1]] * 10)
    assert found[-1] == (1, 59)
    found, _ = batches(Watch((30, 30)), [[1000, 1]] * 10, least=4, most=(60, 40))
    assert found[-1] == (20, 40)


@given(st.lists(st.tuples(st.floats(0.1, 9), st.integers(1, 9)), min_size=1, max_size=5), st.integers(0, 1))
def test_limits_of_samples_hold_and_everything_is_given_away(ranks, least):
    sample_s, most = zip(*ranks, strict=True)
    for total in range(least * len(ranks), sum(most) + 1, 3):
        found = balance_batch(total, sample_s=sample_s, least=least, most=most)
        assert sum(found) == total
        assert all(least <= n <= limit for n, limit in zip(found, most, strict=True))


def test_the_order_of_ranks_does_not_matter():
    paces = [[1, 2, 4]] * 20
    found, _ = batches(Watch((20, 20, 20)), paces)
    turned, _ = batches(Watch((20, 20, 20)), [pace[::-1] for pace in paces])
    assert [batch[::-1] for batch in turned] == found


# Shards --------------------------------------------------------------------------------------------------------------

EQUAL = OwnerTimes(*[(1e-3, 1e-3)] * 5)
LATE = replace(EQUAL, update_s=(1e-3, 9e-3))
"""The second rank updates nine times as slowly."""


def moved(times=LATE, held=(0.5, 0.5), *, state_s=1.0, steps=10_000, settings=DEFAULTS):
    moving = ([state_s] * len(held), [state_s] * len(held))
    return worth_moving(times, held, most=(1.0,) * len(held), moving=moving, steps=steps, settings=settings)


def test_shards_move_to_where_they_cost_least_if_enough_steps_are_left_to_pay_for_the_move():
    better = moved()
    assert better == pytest.approx((0.9, 0.1))
    gain_s = owner_time_s(LATE, (0.5, 0.5)) - owner_time_s(LATE, better)
    needed = math.ceil(0.4 * 1.0 / gain_s)  # 0.4 of the state goes from the second rank to the first
    assert moved(steps=needed + 1) == better
    assert moved(steps=needed - 1) is None
    assert moved(steps=needed - 1, state_s=0.5) == better


def test_shards_stay_where_they_cost_least_already_or_little_would_be_gained():
    assert moved(EQUAL) is None
    assert moved(held=(0.9, 0.1)) is None
    little = replace(EQUAL, update_s=(1e-3, 5e-3))
    assert moved(little) is not None
    assert moved(little, settings=Replanning(hysteresis_ratio=0.9)) is None


def test_a_shift_of_ranges_moves_what_leaves_and_comes_to_each_rank():
    """Ranges follow one another: if the first rank gives a third to the last, the one between passes its own on."""
    third = 1 / 3
    times = OwnerTimes((1e-9,) * 3, (1e-9,) * 3, (2.0, 1.0, 0.5), (1e-9,) * 3, (1e-9,) * 3)
    better = worth_moving(
        times, (third,) * 3, most=(1.0,) * 3, moving=([1.0] * 3, [1.0] * 3), steps=3, settings=DEFAULTS
    )
    assert better == pytest.approx((1 / 7, 2 / 7, 4 / 7), abs=1e-4)
    # the second has [1/3, 2/3) and gets [1/7, 3/7): all but 2/21 of its own goes, and that takes longest
    gain_s = owner_time_s(times, (third,) * 3) - owner_time_s(times, better)
    dear = [1.01 * 3 * gain_s / (third - 2 / 21)] * 3
    assert (
        worth_moving(times, (third,) * 3, most=(1.0,) * 3, moving=(dear, [0.0] * 3), steps=3, settings=DEFAULTS) is None
    )
    cheap = [0.99 * each / 1.01 for each in dear]
    assert worth_moving(times, (third,) * 3, most=(1.0,) * 3, moving=(cheap, [0.0] * 3), steps=3, settings=DEFAULTS)
