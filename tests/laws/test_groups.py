"""Comparisons of a whole matrix: repeats and noise, groups and rank agreement, naive predictions, targets."""

import csv
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import in_file, make_result, run, write

from analysis.charts import comparison_charts, exposed_communication, predicted_vs_measured, rivals
from analysis.charts.accuracy import WORST_LABELLED
from analysis.compare.comparison import Pair, compare, join, naive, noise_ratio_of, step_time_of, typical_repeat
from analysis.compare.groups import (
    GROUP_COLUMNS,
    errors_of,
    group_of,
    group_table,
    order_of,
    spearman,
    targets,
    worst_of,
)
from analysis.compare.rivals import rival_table
from gssim.result import Result

LINKED = {
    "name": "two hosts",
    "backend": "gloo",
    "device_types": {
        "cpu-core": {
            "kind": "cpu",
            "memory_bytes": 1e9,
            "peak_flop_per_s": {"fp32": 1e9},
            "memory_bandwidth_bytes_per_s": 1e9,
            "source": "made up",
        }
    },
    "devices": [{"name": f"d{i}", "type": "cpu-core", "host": f"h{i}"} for i in range(2)],
    "switches": ["s"],
    "links": [
        {"between": [f"d{i}", "s"], "bandwidth_bytes_per_s": rate, "latency_s": 0.0, "source": "made up"}
        for i, rate in enumerate((4e6, 10e6))
    ],
    "source": "made up",
}


def cells(times_s: dict[str, tuple[float, ...]], group: str = "g", **changes: Any) -> list[Result]:
    """Return Results of a group: by variant the predicted time, then those of the repeats."""
    made = []
    for variant, (predicted_s, *repeats_s) in times_s.items():
        same = {"scenario_id": f"{group}{variant}", "name": f"{group}--{variant}", **changes}
        made.append(make_result("simulated", **same, step_time_s=predicted_s))
        made += [
            make_result("measured", **same, step_time_s=time_s, repeat=repeat)
            for repeat, time_s in enumerate(repeats_s)
        ]
    return made


def rows_of(results: list[Result]) -> list[dict[str, Any]]:
    return list(compare(join(map(in_file, results)).pairs).iter_rows(named=True))


# Noise ---------------------------------------------------------------------------------------------------------------


def test_the_step_time_of_repeats_is_their_median_and_all_else_that_of_the_repeat_nearest_to_it() -> None:
    files = [
        in_file(make_result("simulated", step_time_s=1.1), "s"),
        in_file(make_result("measured", step_time_s=1.3, repeat=2, peaks_bytes=(3e6, 3e6)), "m2"),
        in_file(make_result("measured", step_time_s=0.9, peaks_bytes=(1e6, 1e6)), "m0"),  # absent: the first
        in_file(make_result("measured", step_time_s=1.0, repeat=1, peaks_bytes=(2e6, 2e6)), "m1"),
    ]
    joined = join(files)
    assert [str(file.path) for file in joined.pairs[0].repeats] == ["m0", "m1", "m2"]
    assert str(joined.pairs[0].measured.path) == "m1"
    assert joined.superseded == ()
    row = compare(joined.pairs).row(0, named=True)
    assert (row["repeats"], row["step_time_measured_s"], row["peak_measured_bytes"]) == (3, 1.0, 2e6)
    assert row["step_time_error_ratio"] == pytest.approx(0.1)
    assert row["noise_ratio"] == pytest.approx(0.2)  # (1.3 - 0.9) / 1.0 / 2


def test_of_two_repeats_the_time_is_between_them_and_the_first_stands_for_both() -> None:
    repeats = [make_result("measured", step_time_s=time_s, repeat=i) for i, time_s in enumerate((1.0, 1.5))]
    assert step_time_of(repeats) == 1.25
    assert typical_repeat(repeats) == 0
    assert noise_ratio_of(repeats) == pytest.approx(0.2)


def test_the_newer_of_two_files_of_one_repeat_counts() -> None:
    old = in_file(make_result("measured", step_time_s=9.0, repeat=1), "old", modified_ns=1)
    new = in_file(make_result("measured", step_time_s=0.2, repeat=1), "new", modified_ns=2)
    joined = join([new, old, in_file(make_result("measured"), "first"), in_file(make_result("simulated"), "s")])
    assert [str(file.path) for file in joined.pairs[0].repeats] == ["first", "new"]
    assert joined.superseded == ((old, new),)


def test_a_run_alone_has_the_noise_of_its_halves() -> None:
    # medians of the halves: 1.0 and 1.2, of which 1.1 is the middle
    steps_s = (1.0, 1.0, 5.0, 1.2, 1.2, 0.1)
    assert noise_ratio_of([make_result("measured", step_times_s=steps_s)]) == pytest.approx(0.1 / 1.1)
    assert noise_ratio_of([make_result("measured", step_times_s=(1.0, 2.0, 3.0))]) is None


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
def test_noise_is_the_same_in_any_order_and_unit(times_s: list[float]) -> None:
    def noise(values_s: list[float]) -> float | None:
        return noise_ratio_of([make_result("measured", step_time_s=value_s) for value_s in values_s])

    assert noise(times_s) == noise(times_s[::-1]) == pytest.approx(noise([7 * time_s for time_s in times_s]))
    assert noise(times_s) >= 0  # type: ignore[operator]
    assert noise(times_s[:1] * 3) == 0


# Order ---------------------------------------------------------------------------------------------------------------


def test_a_group_is_named_before_two_dashes_else_by_cluster_and_model() -> None:
    assert group_of(make_result("measured", name="two-sites--gs--z3")) == "two-sites"
    scenario = {"cluster": {"name": "lab"}, "workload": {"model": {"name": "gpt"}}}
    assert group_of(make_result("measured", name="gs", scenario=scenario)) == "lab, gpt"
    assert group_of(make_result("measured", name="--gs")) == "unnamed"


def test_errors_are_summed_up_by_size() -> None:
    found = errors_of([0.1 * i * (-1) ** i for i in range(11)])
    assert (found.median, found.p90, found.max) == (pytest.approx(0.5), pytest.approx(0.9), pytest.approx(1.0))
    assert errors_of([0.0, 0.1]).p90 == pytest.approx(0.09)  # linear between neighbours
    assert errors_of([None]).median is None


@pytest.mark.parametrize(
    ("predicted", "measured", "correlation"),
    [
        ((1, 2, 3, 4), (10, 20, 30, 40), 1.0),
        ((1, 2, 3, 4), (40, 30, 20, 10), -1.0),
        ((1, 2, 3, 4, 5), (2, 1, 4, 3, 5), 0.8),  # 1 - 6 * 4 / (5 * 24)
        ((1, 2), (1, 2), None),
        ((1, 1, 1), (1, 2, 3), None),
    ],
)
def test_spearman_is_one_less_six_times_the_squared_distances(
    predicted: tuple[float, ...], measured: tuple[float, ...], correlation: float | None
) -> None:
    assert spearman(list(zip(predicted, measured, strict=True))) == correlation


def test_pairs_within_the_noise_have_no_order() -> None:
    # a and b overlap (1.05 + 0.05, 1.15 - 0.06), c is far from both; predicted: c before b
    rows = rows_of(cells({"a": (1.0, 1.0, 1.1), "b": (3.0, 1.09, 1.21), "c": (2.0, 2.0)}))
    order = order_of(rows)
    assert (order.pairs, order.pairs_right) == (2, 1)
    assert order.spearman == 0.5


def test_a_tie_of_predictions_is_no_order() -> None:
    order = order_of(rows_of(cells({"a": (1.0, 1.0), "b": (1.0, 2.0)})))
    assert (order.pairs, order.pairs_right) == (1, 0)


@pytest.mark.parametrize(
    ("slower_s", "right"),
    [((1.2, 1.2), False), ((0.99, 1.1), True)],  # 1.045 - 0.055 is less than 1.0
)
def test_the_best_plan_is_right_where_it_is_as_fast_but_for_noise(slower_s: tuple[float, ...], right: bool) -> None:
    order = order_of(rows_of(cells({"fast": (1.0, 1.0), "slow": (0.9, *slower_s)})))
    assert (order.predicted_best, order.measured_best, order.best_right) == ("g--slow", "g--fast", right)


def test_a_control_that_pushes_nothing_is_no_plan_to_choose() -> None:
    results = cells({"dense": (1.0, 1.0), "other": (1.2, 1.3)})
    results += cells({"silent": (0.1, 0.1)}, threshold=math.inf)
    order = order_of(rows_of(results))
    assert (order.predicted_best, order.best_right) == ("g--dense", True)
    assert order.pairs == 3  # its time is predicted all the same
    alone = order_of(rows_of(cells({"dense": (1.0, 1.0)})))
    assert alone.best_right is None


# Naive predictions ---------------------------------------------------------------------------------------------------


def test_naive_predictions_are_compute_and_bytes_over_the_slowest_link() -> None:
    # of 0.2 s forward, backward and optimizer are 0.3, 0.4 and 0.1; 2 MB over 4 MB/s
    result = make_result("simulated", bytes_sent=2e6, scenario={"cluster": LINKED})
    assert naive(result).compute_s == pytest.approx(0.16)
    assert naive(result).link_s == pytest.approx(0.16 + 0.5)


@pytest.mark.parametrize(
    ("sent", "cluster", "link_s"),
    [(0.0, None, 0.16), (2e6, None, None), (None, LINKED, None), (2e6, {**LINKED, "links": []}, None)],
)
def test_where_bytes_or_links_are_unknown_there_is_no_naive_prediction_of_them(
    sent: float | None, cluster: dict[str, Any] | None, link_s: float | None
) -> None:
    scenario = {} if cluster is None else {"cluster": cluster}
    found = naive(make_result("simulated", bytes_sent=sent, scenario=scenario)).link_s
    assert found == (None if link_s is None else pytest.approx(link_s))


def test_naive_errors_stand_beside_ours() -> None:
    scenario = {"cluster": LINKED}
    files = [
        in_file(make_result("simulated", step_time_s=0.2, bytes_sent=0.4e6, scenario=scenario)),
        in_file(make_result("measured", step_time_s=0.25, phase_shares=(0.3, 0.4, 0.0, 0.1, 0.1, 0.1))),
    ]
    row = compare(join(files).pairs).row(0, named=True)
    assert row["naive_compute_error_ratio"] == pytest.approx(0.16 / 0.25 - 1)
    assert row["naive_link_error_ratio"] == pytest.approx(0.26 / 0.25 - 1)
    # waiting: predicted 0.15 of 0.2 s, measured 0.1 of 0.25 s
    assert row["exposed_communication_error_of_step_ratio"] == pytest.approx((0.03 - 0.025) / 0.25)


# Table and targets ---------------------------------------------------------------------------------------------------


def matrix() -> list[Result]:
    """Return two groups: one of eight predicted exactly, one of two that is off by 50 %, in the wrong order."""
    right = cells({f"v{i}": (1.0 + i, 1.0 + i) for i in range(8)}, "right")
    return right + cells({"x": (1.5, 1.0), "y": (1.0, 2.0)}, "wrong")


def test_the_last_row_sums_up_all_groups() -> None:
    table = group_table(compare(join(map(in_file, matrix())).pairs))
    assert table["group"].to_list() == ["right", "wrong", "all"]
    first, second, whole = table.iter_rows(named=True)
    assert (first["spearman"], first["pairs"], first["pairs_right"], first["best_right"]) == (1.0, 28, 28, 1)
    assert (second["spearman"], second["pairs"], second["pairs_right"], second["best_right"]) == (None, 1, 0, 0)
    assert second["step_time_error_median_ratio"] == pytest.approx(0.5)
    assert (whole["n"], whole["pairs"], whole["pairs_right"]) == (10, 29, 28)
    assert (whole["choices"], whole["best_right"]) == (2, 1)
    assert whole["step_time_error_median_ratio"] == 0
    assert whole["step_time_error_p90_ratio"] == pytest.approx(0.5)  # of 0 x 8, 0.5, 0.5 at place 8.1
    assert whole["collectives_equal"] == 10


def test_what_is_asked_is_met_or_not_and_says_of_how_many() -> None:
    found = {target.what: target for target in targets(group_table(compare(join(map(in_file, matrix())).pairs)))}
    assert found["collectives equal"].met is True
    assert found["step time error, median"].met is True
    assert found["step time error, 90th percentile"].met is False
    assert found["step time error, largest"].found == pytest.approx(0.5)
    assert found["pairs in the measured order"].met is True  # 28 of 29: 96.6 %
    assert found["pairs in the measured order"].n == 29
    assert found["least Spearman of groups of 8 or more"].met is True
    assert found["best plan predicted, but for noise"].met is False  # in one of two groups
    alone = targets(group_table(compare(join(map(in_file, cells({"a": (1.0, 1.0)}))).pairs)))
    assert {target.what: target.met for target in alone}["pairs in the measured order"] is None


def test_a_large_matrix_prints_its_worst_lines_groups_and_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # variant i of each group is predicted i % too high; times 10 % apart
    for group in ("one", "two", "six"):
        times = {f"v{i}": ((1 + i / 10) * (1 + i / 100), 1 + i / 10, 1 + i / 10) for i in range(9)}
        for number, result in enumerate(cells(times, group)):
            write(tmp_path / "r", f"{group}-{number}.json", result)
    assert run(monkeypatch, tmp_path / "r", "--out", tmp_path / "out", drawn=False) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    shown = [line.split()[0] for line in lines if "--v" in line and "MiB" in line]
    assert len(shown) == 10
    assert {name.partition("--")[2] for name in shown} == {"v8", "v7", "v6", "v5"}
    assert next(line for line in lines if line.startswith("six ")).split()[:3] == ["six", "9", "equal"]
    assert next(line for line in lines if line.startswith("all ")).split()[-2:] == ["in", "3/3"]
    assert sum("not met" in line for line in lines) == 0
    assert "27 scenarios" in printed
    with (tmp_path / "out" / "groups.csv").open(newline="") as stream:
        header, *rows = csv.reader(stream)
    assert tuple(header) == tuple(GROUP_COLUMNS)
    assert [row[0] for row in rows] == ["one", "six", "two", "all"]


def test_few_scenarios_of_one_group_print_no_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, result in enumerate(cells({"a": (1.0, 1.0), "b": (1.0, 1.0)})):
        write(tmp_path / "r", f"{number}.json", result)
    assert run(monkeypatch, tmp_path / "r", "--out", tmp_path / "out", drawn=False) == 0
    printed = capsys.readouterr().out
    assert "asked of" not in printed
    assert "noise" not in printed


def test_the_worst_are_told_by_the_size_of_their_errors() -> None:
    rows = rows_of(cells({"a": (1.1, 1.0), "b": (0.7, 1.0), "c": (1.2, 1.0)}))
    assert [row["name"] for row in worst_of(rows, most=2)] == ["g--b", "g--c"]


# Gradient Sharding and its rivals ------------------------------------------------------------------------------------


def measured_pairs(*results: Result) -> tuple[Pair, ...]:
    return join(map(in_file, results)).pairs


def both(name: str, method: str, predicted_s: float, measured_s: float, **changes: Any) -> list[Result]:
    same = {"scenario_id": name, "name": f"g--{name}", "method": method, **changes}
    return [
        make_result("simulated", **same, step_time_s=predicted_s),
        make_result("measured", **same, step_time_s=measured_s),
    ]


def test_gs_stands_beside_ddp_and_zero2_with_its_density_and_loss() -> None:
    table = rival_table(
        measured_pairs(
            *both("ddp", "ddp", 1.0, 2.0, losses=(2.0,)),
            *both("zero2", "zero2", 2.0, 2.5, losses=(2.0,)),
            *both("zero3", "zero3", 9.0, 9.0),
            *both("gs", "gs", 0.5, 0.5, threshold=1e-3, push_density=0.01, losses=(2.5,)),
            *both("silent", "gs", 0.5, 0.4, threshold=math.inf),
        )
    )
    rows = {(row["name"], row["rival_method"]): row for row in table.iter_rows(named=True)}
    assert list(rows) == [(f"g--{name}", rival) for name in ("gs", "silent") for rival in ("ddp", "zero2")]
    row = rows["g--gs", "ddp"]
    assert (row["step_time_ratio_predicted"], row["step_time_ratio_measured"]) == (0.5, 0.25)
    assert (row["push_density_measured"], row["control"]) == (0.01, False)
    assert row["loss_change_measured_ratio"] == pytest.approx(0.25)
    assert rows["g--gs", "zero2"]["step_time_ratio_measured"] == pytest.approx(0.2)
    assert rows["g--silent", "ddp"]["control"] is True
    assert rows["g--silent", "ddp"]["loss_change_measured_ratio"] is None


def with_plan(results: list[Result], **plan: Any) -> list[Result]:
    for result in results:
        result.scenario["plan"].update(plan)
    return results


def test_of_several_rivals_that_with_the_likest_plan_counts_and_none_of_another_training() -> None:
    pairs = measured_pairs(
        *with_plan(both("a", "ddp", 1.0, 1.0), micro_batches=4),
        *with_plan(both("b", "ddp", 1.0, 1.0), micro_batches=1, recompute="full"),
        *both("other", "zero2", 1.0, 1.0, steps=99),
        *with_plan(both("gs", "gs", 1.0, 1.0), micro_batches=4, recompute="full"),
        *with_plan(both("gs4", "gs", 1.0, 1.0), micro_batches=4),
    )
    found = {row["name"]: row["rival"] for row in rival_table(pairs).iter_rows(named=True)}
    assert found == {"g--gs": "g--a", "g--gs4": "g--a"}  # of two that differ equally, the first by name
    assert rival_table(pairs[:1]).is_empty()


def test_the_chart_of_rivals_says_which_control_is_missing() -> None:
    results = [*both("ddp", "ddp", 1.0, 1.0), *both("gs", "gs", 0.5, 0.6, threshold=1e-3, push_density=0.1)]
    figure = rivals(rival_table(measured_pairs(*results)))
    assert figure is not None
    assert any("No control" in text.get_text() for text in figure.texts)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["g", "gs"]
    texts = [text.get_text() for text in axes.texts]
    assert "10 %" in texts
    marks = sorted(float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "s")
    assert marks == [0.5, 0.6]
    silent = both("silent", "gs", 0.5, 0.6, threshold=math.inf)
    figure = rivals(rival_table(measured_pairs(*results, *silent)))
    assert figure is not None
    assert not any("No control" in text.get_text() for text in figure.texts)
    assert rivals(rival_table(())) is None


# Charts of many ------------------------------------------------------------------------------------------------------


def crowd(groups: int, each: int) -> list[Result]:
    made = []
    for group in range(groups):
        times = {f"v{i}": ((1 + i / 10) * (1.3 if i == 3 else 1.01), 1 + i / 10, 1.02 + i / 10) for i in range(each)}
        made += cells(times, f"group{group}")
    return made


def test_of_many_points_only_the_worst_have_labels_and_bars_show_the_noise() -> None:
    comparison = compare(join(map(in_file, crowd(3, 10))).pairs)
    time_axes, _ = predicted_vs_measured(comparison).axes
    labels = [text.get_text() for text in time_axes.texts]
    assert len(labels) == WORST_LABELLED
    assert sum("--v3" in label for label in labels) == 3
    _, names = time_axes.get_legend_handles_labels()
    assert {"within \u00b15 %", "within \u00b120 %", "range of the repeats"} <= set(names)


@pytest.mark.parametrize(("each", "panels"), [(10, 2), (1, 1)])
def test_notes_of_a_matrix_stay_within_its_picture(each: int, panels: int) -> None:
    """A comparison without a measured memory, as of a profiler's trace, had a titled panel with nothing in it."""
    comparison = compare(join(map(in_file, crowd(3, each))).pairs)
    if panels == 1:
        comparison = comparison.with_columns(peak_measured_bytes=pl.lit(None, pl.Float64))
    figure = predicted_vs_measured(comparison)
    figure.canvas.draw()
    assert len(figure.axes) == panels
    assert any("No peak memory was measured." in text.get_text() for text in figure.texts) == (panels == 1)
    for text in figure.texts:
        assert text.get_window_extent().x1 <= figure.bbox.x1, text.get_text()


def test_naive_marks_that_are_outside_are_counted() -> None:
    comparison = compare(join(map(in_file, cells({"a": (1.0, 1.0), "b": (2.0, 2.0)}))).pairs)
    time_axes, _ = predicted_vs_measured(comparison).axes
    _, names = time_axes.get_legend_handles_labels()
    assert "naive: compute only (1 outside)" in names  # 0.8 s is below the panel's lower end, 1.6 s is not
    assert "naive: compute, then bytes over the slowest link" not in names  # bytes are not known


@pytest.mark.slow
def test_a_large_matrix_has_phases_of_the_worst_and_of_each_group() -> None:
    pairs = join(map(in_file, crowd(3, 10))).pairs
    figures = {chart.name: chart.figure for chart in comparison_charts(compare(pairs), rival_table(pairs))}
    assert [name for name in figures if name.startswith("phases")] == [
        "phases", "phases-group0", "phases-group1", "phases-group2",
    ]  # fmt: skip
    worst = [label.get_text() for axes in figures["phases"].axes for label in axes.get_yticklabels()]
    assert len(worst) == 10
    assert {"group0--v3", "group1--v3", "group2--v3"} <= set(worst)
    group = [label.get_text() for axes in figures["phases-group1"].axes for label in axes.get_yticklabels()]
    assert group == [f"group1--v{i}" for i in range(10)]
    assert "gs_against_dense" not in figures


def test_exposed_communication_has_a_panel_for_each_group_of_several() -> None:
    comparison = compare(join(map(in_file, crowd(2, 4))).pairs)
    figure = exposed_communication(comparison)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["group0", "group1"]
    figure.canvas.draw()
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in figure.texts)
    pair = exposed_communication(compare(join(map(in_file, crowd(4, 1))).pairs))
    assert pair is not None
    assert [axes.get_title(loc="left") for axes in pair.axes] == ["all"]
    busy = [make_result(source, phase_shares=(0.3, 0.4, 0.1, 0.1, 0.0, 0.1)) for source in ("simulated", "measured")]
    assert exposed_communication(compare(join(map(in_file, busy)).pairs)) is None
