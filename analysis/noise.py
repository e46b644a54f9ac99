"""How much a measurement varies when nothing was changed: the noise floor, under which no error can be told.

A run that was repeated has its noise from the repeats. One that was not has it from its own steps, in halves: what the
machine drifts within a run. Runs differ by more than that, so the noise of a run alone is a lower bound.
"""

from collections.abc import Sequence
from statistics import median

from gssim.result import Result

FEWEST_STEPS = 4
"""Of a run alone, of which half are in each half."""


def repeat_of(result: Result) -> int:
    """Return which repeat of its scenario a Result is (`provenance.repeat`); 0 where nothing was repeated."""
    repeat = result.provenance.get("repeat", 0)
    return repeat if isinstance(repeat, int) else 0


def step_time_of(repeats: Sequence[Result]) -> float:
    """Return the step time of a scenario that was measured several times, in s: the median of the repeats'."""
    return median(result.step_time_s for result in repeats)


def typical_repeat(repeats: Sequence[Result]) -> int:
    """Return the index of the repeat whose step time is nearest to the median, the first of several."""
    middle_s = step_time_of(repeats)
    return min(range(len(repeats)), key=lambda i: abs(repeats[i].step_time_s - middle_s))


def noise_ratio_of(repeats: Sequence[Result]) -> float | None:
    """Return half the range of the repeats' step times over their median; of one run alone, of its halves' medians.

    None where a run alone has fewer than `FEWEST_STEPS` steps.
    """
    if len(repeats) > 1:
        return half_range_ratio([result.step_time_s for result in repeats])
    steps_s = repeats[0].step_times_s
    if len(steps_s) < FEWEST_STEPS:
        return None
    half = len(steps_s) // 2
    return half_range_ratio([median(steps_s[:half]), median(steps_s[-half:])])


def half_range_ratio(times_s: Sequence[float]) -> float | None:
    """Return (largest - smallest) / 2 over the median: all times lie about within the median ± so much of it.

    >>> half_range_ratio([0.9, 1.0, 1.3])
    0.2
    """
    middle_s = median(times_s)
    return (max(times_s) - min(times_s)) / 2 / middle_s if middle_s > 0 else None
