"""Laws of studies that train all ranks in one process: readings at equal samples, bytes and time."""

import pytest

from analysis import charts
from analysis.study.rivals import Course, _after, findings, readings_of, winners_table, write_table
from analysis.study.study import Study, Variant

NETWORK = "a slow link"


def course(name, *, ends, step_bytes, step_time_s, density=None, control=False):
    """Return a course whose loss falls in a straight line from 5 to its end, seed by seed."""
    steps = (0, 50, 100)
    losses = tuple((5.0, (5.0 + end) / 2, end) for end in ends)
    variant = Variant(name=name, control=control)
    return Course(variant, steps, losses, (), density, step_bytes, {NETWORK: step_time_s}, density)


DENSE = course("dense", ends=(1.0, 1.1, 0.9), step_bytes=1000.0, step_time_s=1.0, control=True)
SMALL = course("small", ends=(2.0, 2.1, 1.9), step_bytes=10.0, step_time_s=0.1)
PUSHED = course("pushed", ends=(3.0, 3.1, 2.9), step_bytes=500.0, step_time_s=0.5, density=0.1)
SILENT = course("silent", ends=(4.0, 4.1, 3.9), step_bytes=400.0, step_time_s=0.4, density=0.0, control=True)
ALL = [DENSE, SMALL, PUSHED, SILENT]


def test_a_loss_is_read_where_the_budget_ends():
    samples, sizes, times = readings_of(ALL, "dense")
    assert samples.losses["dense"] == [1.0, 1.1, 0.9]
    # dense has sent a quarter of its own bytes after 25 steps, pushed after 50, small after its last
    assert sizes.losses["dense"][0] == pytest.approx(5.0 - 4.0 * 25 / 100)
    assert sizes.losses["pushed"][0] == pytest.approx(4.0)
    assert sizes.losses["small"] == [2.0, 2.1, 1.9]
    # the quickest takes 10 s: ten steps of dense
    assert times.losses["dense"][0] == pytest.approx(5.0 - 4.0 * 10 / 100)
    assert [each.best for each in (samples, sizes, times)] == ["dense", "small", "small"]


def test_what_the_seeds_do_not_tell_from_the_best_is_said():
    near = course("near", ends=(1.05, 1.0, 1.0), step_bytes=1000.0, step_time_s=1.0)
    assert readings_of([*ALL, near], "dense")[0].level == ("near",)
    assert "**1.000**" in winners_table([*ALL, near], "dense")
    assert "1.017 ≈" in winners_table([*ALL, near], "dense")


def test_findings_also_say_where_gradient_sharding_loses():
    said = findings(ALL, "dense", "silent")
    assert "worse than the best at equal samples, equal bytes, equal time, a slow link" in said[-1]
    assert any("pushes are of use" in each for each in said)
    useless = course("pushed", ends=(4.0, 4.2, 3.8), step_bytes=500.0, step_time_s=0.5, density=0.1)
    said = findings([DENSE, SMALL, useless, SILENT], "dense", "silent")
    assert any("not told from pushing nothing" in each for each in said)


def test_the_table_and_the_charts_have_every_variant():
    table = write_table(ALL, "dense")
    assert [line.split(",")[0] for line in table.splitlines()[1:]] == ["dense", "small", "pushed", "silent"]
    drawn = charts.rivals_charts(ALL, "dense", findings(ALL, "dense", "silent"))
    assert [len(each.figure.axes) for each in drawn] == [1, 1]
    labels = [text.get_text() for text in drawn[0].figure.legends[0].get_texts()]
    assert labels == ["dense (control)", "small", "pushed: 10 %", "silent (control): 0 %"]


def test_steps_that_are_not_compressed_count_as_denses():
    mean = _after(10, SMALL, DENSE)
    assert mean.step_bytes == pytest.approx((90 * 10.0 + 10 * 1000.0) / 100)
    assert mean.step_time_s[NETWORK] == pytest.approx((90 * 0.1 + 10 * 1.0) / 100)
    assert mean.losses == SMALL.losses


ELSEWHERE = {"name": NETWORK, "bandwidth_bytes_per_s": 1e6, "latency_s": 0.0}
VARIANTS = ({"name": "dense", "control": True}, {"name": "other"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unequal_ratio": 0.5}, "needs together = true"),
        ({"together": True}, "list `elsewhere`"),
        ({"together": True, "calibrate": True, "elsewhere": (ELSEWHERE,)}, "leave out calibrate"),
    ],
)
def test_a_study_that_cannot_be_is_refused(changes, message):
    variants = tuple(Variant(**each) for each in VARIANTS)
    given = {"scenario": "x", "seeds": (0, 1), "dense": "dense", "silent": "other", "variants": variants}
    with pytest.raises(ValueError, match=message):
        Study(**given | changes)
