"""Charts of a sweep: selection of settings, drawn values, and readability without colour."""

import io
from collections import Counter
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from PIL import Image
from results import assert_refused, run
from sweep_tables import AXES, DENSITIES, GIB, LINK, grid, made, make_row, write

from analysis.charts import png, svg
from analysis.charts.drawing import Chart, place_labels
from analysis.charts.sweeps import sweep_charts
from analysis.charts.sweeps.memory import LOOKS, layout_by_memory, memory_by_category, parts_of
from analysis.charts.sweeps.scaling import lines_of
from analysis.charts.sweeps.steps import MOST_BARS, steps
from analysis.charts.sweeps.thresholds import ENDS_OF_BANDS, draw_band
from analysis.charts.sweeps.winners import who_wins
from analysis.html_report.report import report
from analysis.html_report.sweep import summary
from analysis.sweep_tables import (
    THRESHOLD,
    SweepTable,
    best_gain,
    bit_rate,
    by_setting,
    evenly_spaced,
    family,
    follows,
    front,
    is_control,
    is_dense,
    is_table,
    layout_of,
    read_table,
    representative,
    shown,
    winner,
)
from gssim.errors import UserError


@pytest.fixture(scope="module")
def charts(tmp_path_factory):
    return {chart.name: chart for chart in sweep_charts(made(grid(), tmp_path_factory.mktemp("grid")))}


# Tables and settings -------------------------------------------------------------------------------------------------


def test_both_files_of_a_table_say_the_same_but_for_the_question(tmp_path: Path) -> None:
    parquet = read_table(write(grid(), tmp_path / "t.parquet"))
    csv = read_table(tmp_path / "t.csv")
    assert csv.rows == parquet.rows
    assert csv.axes == parquet.axes == (THRESHOLD, LINK)
    assert csv.question == parquet.question == "Who is fastest on which network?"
    (tmp_path / "t.parquet").unlink()
    assert read_table(tmp_path / "t.csv").question == ""


def test_other_files_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("point,group\na,b\n")
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    for name, reason in (("x.csv", "no column"), ("x.parquet", "cannot be read"), ("none.csv", "no such file")):
        assert not is_table(tmp_path / name)
        with pytest.raises(UserError, match=reason):
            read_table(tmp_path / name)


def test_a_folder_of_results_is_no_table(tmp_path: Path) -> None:
    """It was said to be no such file; `gssim sweep --out FOLDER` writes one."""
    with pytest.raises(UserError, match=r"is a folder; give a table, .*--out FILE.parquet.*analysis report"):
        read_table(tmp_path)


def test_a_time_that_is_none_is_refused_with_its_point(tmp_path: Path) -> None:
    file = write([make_row("ddp", step_time_s=-1.0)], tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"1e\+09--ddp: step_time_s = -1.0"):
        read_table(file)


@pytest.mark.parametrize(
    ("column", "value"),
    [("margin_bytes", None), ("tightest_device", None), ("ranks", 0), ("throughput_samples_per_s", None)],
)
def test_a_row_that_lacks_what_charts_need_is_refused_with_its_point(tmp_path: Path, column, value) -> None:
    file = write([make_row("ddp", **{column: value})], tmp_path / "t.parquet")
    with pytest.raises(UserError, match=rf"1e\+09--ddp: {column}"):
        read_table(file)


def test_control_characters_of_a_question_do_not_reach_the_terminal(tmp_path, monkeypatch, capsys) -> None:
    file = write(grid(), tmp_path / "t.parquet")
    pl.read_parquet(file).write_parquet(file, metadata={"schema": "gssim.table/1", "question": "\x1b[31mred"})
    assert run_sweep(monkeypatch, file, "--out", tmp_path / "out", drawn=False) == 0
    assert capsys.readouterr().out.startswith("\\x1b[31mred\n")


def test_columns_that_are_absent_have_no_values_and_the_report_is_written(tmp_path: Path) -> None:
    file = write(grid(), tmp_path / "t.parquet")
    few = pl.read_parquet(file).drop("energy_j_per_step", "cost_usd_per_step", "exposed_communication_s")
    few.write_parquet(file)
    table = read_table(file)
    assert {row["energy_j_per_step"] for row in table.rows} == {None}
    assert "Explore the sweep" in report(tmp_path)


def test_settings_are_told_apart_by_what_varies_and_plans_by_their_policies(tmp_path: Path) -> None:
    table = made(grid(), tmp_path)
    layout = layout_of(table)
    assert (layout.settings, layout.plans) == ((LINK,), ("method",))
    assert [layout.setting_label(place) for place in by_setting(table.rows, layout)] == [
        "800 Mbit/s", "8 Gbit/s", "80 Gbit/s",
    ]  # fmt: skip
    one = layout_of(made([row for row in grid() if row[LINK] == 1e9], tmp_path))
    assert one.settings == ()


def test_steps_of_other_batches_are_settings_of_their_own_where_no_axis_says_so(tmp_path: Path) -> None:
    """A group or variant may change the batch; its step is no faster for having fewer samples."""
    small = make_row("ddp", variant="small", point="small", step_time_s=0.1, throughput_samples_per_s=80.0)
    table = made([make_row("ddp"), make_row("gs", 1e-3), small], tmp_path)
    layout = layout_of(table)
    assert layout.settings == ("workload.global_batch_size",)
    labels = [layout.setting_label(place) for place in by_setting(table.rows, layout)]
    assert labels == ["global_batch_size 32", "global_batch_size 8"]
    assert layout_of(made(grid(), tmp_path)).settings == (LINK,)


def test_variants_that_differ_in_more_than_the_threshold_are_plans_of_their_own(tmp_path: Path) -> None:
    rows = [make_row("gs", 1e-3), make_row("gs", 1e-3, variant="gs-ef", point="ef")]
    assert layout_of(made(rows, tmp_path)).plans == ("method", "variant")


def test_a_group_that_says_what_an_axis_says_is_not_said_twice(tmp_path: Path) -> None:
    rows = [make_row("ddp", bandwidth=rate, group=f"g{rate:g}", cluster=f"c{rate:g}") for rate in (1e8, 1e9)]
    assert layout_of(made(rows, tmp_path)).settings == (LINK,)
    assert follows(rows, ["group"], LINK)
    assert not follows(grid(), ["method"], "point")


def test_settings_of_clusters_with_other_keys_are_named_by_their_group(tmp_path: Path) -> None:
    table = many_clusters(tmp_path)
    layout = layout_of(table)
    assert layout.settings == ("group", COUNT, LINK)
    labels = {layout.setting_label(place) for place in by_setting(table.rows, layout)}
    assert {"stars, 2 devices, 800 Mbit/s", "trees, 800 Mbit/s"} < labels


COUNT = "cluster.topology.devices.0.count"
RATE = "throughput_samples_per_s"


def many_clusters(folder: Path) -> SweepTable:
    """Return stars of several sizes on 40 rates, and a tree on three of them."""
    rates = tuple(1e8 * 1.2**i for i in range(40))
    stars = [
        row | {COUNT: n, "ranks": n, "group": "stars", "cluster": "star"} | {RATE: n / 2 * row[RATE]}
        for n in (2, 4, 8)
        for row in grid(rates)
    ]
    trees = [row | {COUNT: None, "group": "trees", "cluster": "tree"} for row in grid(rates[:3])]
    rows = [row | {"point": f"{i}"} for i, row in enumerate([*stars, *trees])]
    return made(rows, folder, {THRESHOLD: float, COUNT: int, LINK: float})


def test_rates_and_families_are_written_as_people_do() -> None:
    assert [bit_rate(8e9 / 8), bit_rate(1.5e6 / 8)] == ["8 Gbit/s", "1.5 Mbit/s"]
    assert family("torus-4x4x4") == family("torus-8x8x8")


# Choice --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_every_plan_is_on_the_front_or_beaten_by_one_on_it(points) -> None:
    rows = [{"x": x, "y": y} for x, y in points]
    best = front(rows, lambda row: row["x"], lambda row: row["y"])
    for row in rows:
        assert any(other["x"] <= row["x"] and other["y"] <= row["y"] for other in best)
    for row in best:
        others = [other for other in rows if (other["x"], other["y"]) != (row["x"], row["y"])]
        assert not any(other["x"] <= row["x"] and other["y"] <= row["y"] for other in others)


def test_the_winner_is_the_fastest_of_each_kind_and_controls_win_nothing() -> None:
    rows = [row for row in grid() if row[LINK] == 1e8]
    won = winner(rows, 1e-3)
    assert won is not None
    assert won.speed_up_ratio == pytest.approx((0.1 + 1.0) / (0.1 + 0.01 + 0.6))
    gain = best_gain(rows)
    assert gain is not None
    assert gain.thresholded[THRESHOLD] == 1e-2  # the control is faster still
    assert winner(rows, 5.0) is None
    assert [is_control(row) for row in rows if not is_dense(row)] == [False, False, False, True]


def test_plans_that_compress_gradients_or_seldom_synchronize_are_not_dense(tmp_path: Path) -> None:
    """Top-k of a hundredth of the gradients is no dense plan that beats thresholds."""
    rivals = [
        make_row(method, bandwidth=rate, step_time_s=0.01, exposed_communication_s=0.0)
        for method in ("topk", "powersgd", "local_sgd", "diloco")
        for rate in (1e8, 1e9, 1e10)
    ]
    alone, beside = made(grid(), tmp_path / "alone"), made([*grid(), *rivals], tmp_path / "beside")
    with_rivals = [row for row in beside.rows if row[LINK] == 1e8]
    for find in (best_gain, lambda rows: winner(rows, 1e-3)):
        assert find(with_rivals) == find([row for row in alone.rows if row[LINK] == 1e8])
    (before,), (after,) = (who_wins(table) for table in (alone, beside))
    words = [[text.get_text() for axes in chart.figure.axes for text in axes.texts] for chart in (before, after)]
    assert words[0] == words[1]
    said = " ".join(text.get_text() for text in after.figure.texts).replace("\n", " ")
    assert "Left out: compressed and periodic plans" in said
    page = report(tmp_path / "beside")
    assert "fastest compressed or periodic plan" in page
    assert "dense topk" not in page
    for chart in sweep_charts(beside):
        if chart.name == "time_and_memory":
            assert "thresholded, compressed or periodic" in legend(chart)


def test_a_plan_that_has_a_threshold_of_publish_alone_may_be_the_fastest(tmp_path: Path) -> None:
    """It has no push threshold, so it has no place on an axis of thresholds, with a band or without."""
    changes = {"step_time_low_s": 0.005, "step_time_high_s": 0.02} | dict.fromkeys(ENDS_OF_BANDS["push_density"])
    rows = [
        make_row("gs", bandwidth=rate, step_time_s=0.01, publish_density_ratio=0.02, point=f"published-{rate:g}")
        for rate in (1e8, 1e9, 1e10)
    ]
    table = made([*({"publish_density_ratio": None} | row for row in grid()), *rows], tmp_path)
    words = {chart.name: chart.words for chart in sweep_charts(table)}["step_time_by_threshold"]
    assert "by gs with all pushed, 2 % published" in words
    named = [row | {"variant": "published"} for row in rows]
    slower = [row | {"point": f"{row['point']}-slower", "variant": "slower", "step_time_s": 1.0} for row in rows]
    several = made([*({"publish_density_ratio": None} | row for row in grid()), *named, *slower], tmp_path)
    words = {chart.name: chart.words for chart in sweep_charts(several)}["step_time_by_threshold"]
    assert "by published with all pushed" in words  # two plans of one method
    banded = [row | changes for row in rows]
    axes = Figure().add_subplot()
    draw_band(axes, banded, {"color": "red"}, (1e-4, 1e-1), "step_time", float)
    assert not axes.collections[0].get_paths()


values = st.one_of(st.none(), st.sampled_from(["ring", "star"]), st.integers(0, 30), st.floats(0, 1e9))


@given(st.lists(st.tuples(values, values), unique=True), st.integers(1, 12))
def test_what_is_spread_is_so_many_of_the_settings_in_their_order(places, most) -> None:
    chosen = representative(places, most)
    assert len(chosen) == min(most, len(places))
    assert [place for place in places if place in chosen] == chosen
    assert chosen[:1] == places[:1]


SETTINGS: list[tuple[object, ...]] = [
    *(
        ("hosts", kind, 8 * 2**i, 1e7 * 1.3**k, None)
        for kind in ("switch", "ring")
        for i in range(4)
        for k in range(50)
    ),
    *(("many-hosts", None, 8 * 2**i, 1e7 * 1.3**k, None) for i in (5, 6, 7) for k in range(16)),
    *(("fat-tree", None, None, None, oversubscription) for oversubscription in (1, 2, 4, 8)),
]
"""Group, topology, devices, bandwidth, oversubscription: many settings of one cluster before few of others."""


@pytest.mark.parametrize("most", [4, 8, 9, 40])
def test_every_cluster_and_topology_is_among_what_is_spread(most: int) -> None:
    chosen = representative(SETTINGS, most)
    counts = Counter(place[:2] for place in chosen)
    assert set(counts) == {place[:2] for place in SETTINGS}
    few = min(most // 4, 4)  # there are four with a fat tree
    assert min(counts.values()) == few
    assert max(counts.values()) <= most - 3 * few


def test_every_size_and_rates_from_end_to_end_are_among_what_is_spread() -> None:
    chosen = representative(SETTINGS, 24)
    assert {place[2] for place in chosen} == {place[2] for place in SETTINGS}
    assert {place[4] for place in chosen} == {None, 1, 2, 4, 8}
    rates = sorted({float(str(place[3])) for place in SETTINGS if place[3] is not None})
    ranks = sorted({rates.index(float(str(place[3]))) for place in chosen if place[3] is not None})
    assert ranks[0] <= 3
    assert ranks[-1] >= len(rates) - 4
    assert max(b - a for a, b in pairwise(ranks)) <= len(rates) / 3


@given(st.lists(st.integers(), unique=True), st.integers(2, 20))
def test_what_is_evenly_apart_has_both_ends_and_gaps_of_like_size(numbers, most) -> None:
    places = evenly_spaced(range(len(numbers)), most)
    assert evenly_spaced(numbers, most) == [numbers[place] for place in places]
    assert len(places) == min(most, len(numbers))
    if numbers:
        assert (places[0], places[-1]) == (0, len(numbers) - 1)
    gaps = {after - before for before, after in pairwise(places)}
    assert not gaps or max(gaps) - min(gaps) <= 1


# Charts --------------------------------------------------------------------------------------------------------------


def test_a_sweep_has_the_charts_that_its_axes_allow(charts, tmp_path: Path) -> None:
    assert list(charts) == [
        "step_time_by_threshold",
        "who_wins",
        "step_time_by_plan",
        "time_and_memory",
        "memory_by_category",
    ]
    dense = [row for row in grid() if is_dense(row)]
    names = [chart.name for chart in sweep_charts(made([row | {"cost_usd_per_step": None} for row in dense], tmp_path))]
    assert names == ["step_time_by_plan", "time_and_memory", "memory_by_category"]
    priced = [row | {"cost_usd_per_step": n * row["step_time_s"]} for n, row in enumerate(dense, 1)]
    assert "time_and_cost" in [chart.name for chart in sweep_charts(made(priced, tmp_path))]  # else a straight line
    sizes = [
        make_row(
            "ddp", ranks=n, cluster=f"star-{n}", group=f"{n}", point=f"{n}", throughput_samples_per_s=10.0 * n**0.9
        )
        for n in (2, 4, 8)
    ]
    assert [chart.name for chart in sweep_charts(made(sizes, tmp_path))][-1] == "scaling"
    assert sweep_charts(made([make_row("ddp", status="invalid", step_time_s=None)], tmp_path)) == []


def test_steps_of_all_settings_are_bars_on_one_axis_in_their_phases(tmp_path: Path) -> None:
    """Before, only tables and charts with one axis for each panel showed the effect of another link."""
    phases = {"forward_s": 0.2, "backward_s": 0.4, "optimizer_s": 0.1, "compression_s": 0.0, "idle_s": 0.0}
    rows = [
        make_row(method, bandwidth=link, step_time_s=0.7 + waits_s, exposed_communication_s=waits_s, **phases)
        for link, waits in ((1e9, (9.0, 4.0)), (1e10, (1.5, 1.6)))
        for method, waits_s in zip(("ddp", "zero3"), waits, strict=True)
    ]
    table = made(rows, tmp_path)
    chart = steps(table)
    slow, fast = chart.figure.axes
    assert slow.get_xlim() == fast.get_xlim()
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in (slow, fast)]
    assert labels == [["zero3", "ddp"], ["ddp", "zero3"]]
    ends = [max(bar.get_x() + bar.get_width() for bar in axes.patches) for axes in (slow, fast)]
    assert ends == pytest.approx([9.7, 2.3])
    assert "zero3, 4.70 s, of which 85% is exposed communication" in chart.words
    assert "not measured" not in " ".join(text.get_text() for text in chart.figure.texts)
    slower = [row | {"step_time_s": 100 * row["step_time_s"], "point": f"far-{n}"} for n, row in enumerate(rows[:2])]
    slower = [row | {LINK: 1e7, "exposed_communication_s": row["step_time_s"] - 0.7} for row in slower]
    # a plan that takes a hundred times as long made slivers of the fast ones
    far = [*rows, make_row("gs", bandwidth=1e9, step_time_s=470.0, exposed_communication_s=469.3, **phases), *slower]
    apart = steps(made(far, tmp_path))
    slow, fast, far_away = apart.figure.axes
    assert slow.get_xlim() == fast.get_xlim()
    assert 3 * 4.7 < slow.get_xlim()[1] < 1.02 * 3 * 4.7
    assert far_away.get_xlim()[1] == pytest.approx(970, rel=0.02)
    assert [text.get_text() for text in slow.texts] == ["4.70 s", "9.70 s", "470.00 s"]
    notes = " ".join(text.get_text() for text in apart.figure.texts)
    assert "Bars with a gap are cut" in notes
    assert "Mind the different time axes" in notes
    assert outside(apart.figure) == []
    assert "waiting for slower ranks" not in legend(apart)
    unequal = steps(made([row | {"imbalance_s": 0.3} for row in rows], tmp_path))
    assert "exposed communication" in legend(unequal)
    assert "waiting for slower ranks" in legend(unequal)
    assert "zero3, 4.70 s, of which 79% is exposed communication, and 6% is waiting for slower ranks" in unequal.words
    many = [make_row("ddp", variant=f"v{n}", point=f"v{n}", step_time_s=1.0 + n) for n in range(20)]
    assert len(steps(made(many, tmp_path)).figure.axes[0].get_yticklabels()) == MOST_BARS
    bare = [row | dict.fromkeys((*phases, "exposed_communication_s")) for row in rows]
    assert steps(made(bare, tmp_path)) is None


def test_every_chart_asks_a_question_has_units_and_words(charts) -> None:
    for chart in charts.values():
        said = [text.get_text() for text in chart.figure.texts]
        assert chart.title.endswith("?")
        assert any(text in chart.title and text for text in said)
        assert len(chart.words) > 80
        for axes in chart.figure.axes:
            labels = [axes.get_ylabel(), axes.get_xlabel()]
            assert any(labels)
            for label in labels:
                assert not label or "(" in label or label in NO_UNIT, label


NO_UNIT = ("threshold on |gradient|", "threshold: gradients pushed", "bandwidth of the links", "setting", "ranks")


def test_a_speed_up_stands_beside_density_loss_and_control(charts, tmp_path: Path) -> None:
    for name in ("step_time_by_threshold", "who_wins", "time_and_memory", "step_time_by_plan"):
        note = " ".join(text.get_text() for text in charts[name].figure.texts)
        assert "not measured" in note
        assert "No control" not in note
    times, densities = charts["step_time_by_threshold"].figure.axes[:2]
    assert densities.get_ylabel() == "pushed (%)"
    assert times.get_xlim() == densities.get_xlim()
    assert "% pushed" in charts["step_time_by_threshold"].words
    bare = {chart.name: chart for chart in sweep_charts(made(grid(control=False), tmp_path))}
    for name in ("step_time_by_threshold", "who_wins", "time_and_memory"):
        assert "No control" in " ".join(text.get_text() for text in bare[name].figure.texts)


@pytest.mark.parametrize(
    ("densities", "scale", "labels"),
    [
        # the logarithmic axis had the labels 0 and 100 alone, so that 14 % was read as 33 %
        ((0.9, 0.61, 0.14), "linear", ["0", "50", "100"]),
        ((0.9, 0.2, 0.004), "log", ["1", "10", "100"]),  # 0.16 % was labelled 0, though each plan pushes more
        ((0.9, 0.004, 0.0), "log", ["0", "1", "10", "100"]),
    ],
)
def test_densities_can_be_read_off_their_axis(tmp_path: Path, densities, scale, labels) -> None:
    rows = [
        make_row("gs", threshold, push_density_ratio=density, point=f"gs-{threshold}")
        for threshold, density in zip(list(DENSITIES)[:3], densities, strict=True)
    ]
    rows.append(make_row("ddp"))
    below = next(
        chart.figure.axes[1] for chart in sweep_charts(made(rows, tmp_path)) if chart.name == "step_time_by_threshold"
    )
    assert below.get_yscale() == scale
    assert sorted((text.get_text() for text in below.get_yticklabels()), key=float) == labels


def test_dense_plans_are_lines_across_and_thresholds_points_at_their_densities(charts) -> None:
    times, densities = charts["step_time_by_threshold"].figure.axes[:2]
    across = [line for line in times.lines if line.get_linestyle() != "None" and list(line.get_xdata()) == [0, 1]]
    assert [float(line.get_ydata()[0]) for line in across] == pytest.approx([1.1] * 3)
    (line,) = [line for line in densities.lines if len(line.get_xdata()) == 3]
    assert list(line.get_xdata()) == [1e-4, 1e-3, 1e-2]
    assert list(line.get_ydata()) == pytest.approx([50, 10, 0.2])


def test_plans_differ_in_marks_and_lines_not_in_colour_alone(charts) -> None:
    for name in ("step_time_by_threshold", "time_and_memory"):
        looks = []
        for legend in charts[name].figure.legends:
            (handle,) = legend.legend_handles
            looks.append((str(handle.get_marker()), str(handle.get_linestyle()), str(handle.get_markerfacecolor())))
        shapes = [(marker, line, face == "white") for marker, line, face in looks]
        assert len(set(shapes)) == len(shapes), shapes
    bars = {(hatch, round(lightness(colour), 1)) for colour, hatch in LOOKS.values()}
    assert len(bars) == len(LOOKS)


def lightness(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_winners_can_be_told_apart_in_grey(charts) -> None:
    """A cell that a dense plan wins is hatched: in grey its pixels vary, those of the others do not."""
    figure = charts["who_wins"].figure
    (axes,) = figure.axes
    grey = np.asarray(Image.open(io.BytesIO(png(figure))).convert("L"))
    spread = {}
    for x, y in ((0, 2), (2, 0)):  # a slow link and a high threshold; a fast link and a low one
        left, top = axes.transData.transform((x + 0.04, y + 0.06))
        right, bottom = axes.transData.transform((x + 0.2, y + 0.25))
        rows = slice(int(grey.shape[0] - top) + 1, int(grey.shape[0] - bottom))
        spread[x, y] = float(grey[rows, int(left) : int(right)].std())
    assert spread[0, 2] < 0.5
    assert spread[2, 0] > 3


def test_a_map_names_the_winner_of_each_cell_with_its_speed(charts) -> None:
    (axes,) = charts["who_wins"].figure.axes
    cells = [text.get_text() for text in axes.texts]
    assert cells[2] == "gs\n1.80 \u00d7"  # 1.1 s beside 0.612 s
    assert cells[8] == "ddp\n1.09 \u00d7"  # 0.11 s beside 0.12 s
    assert [label.get_text() for label in axes.get_xticklabels()] == ["800 Mbit/s", "8 Gbit/s", "80 Gbit/s"]
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == "\u221e (control): 0 %"


def test_what_fills_a_device_sums_to_its_memory_less_what_is_left() -> None:
    row = make_row("ddp")
    parts = parts_of(row)
    assert sum(parts.values()) == row["capacity_bytes"] - row["margin_bytes"]
    assert (parts["outside"], parts["unused"]) == (GIB, GIB)


def test_what_does_not_fit_is_bold_and_its_device_is_drawn(tmp_path: Path) -> None:
    rows = [make_row("ddp", margin_bytes=-2 * GIB, capacity_bytes=11 * GIB, status="does not fit"), make_row("zero2")]
    chart = memory_by_category(made(rows, tmp_path))
    (axes,) = chart.figure.axes
    texts = {text.get_text(): text.get_fontweight() for text in axes.texts}
    assert texts == {"10.00 GiB of 13.00 GiB, gpu": "normal", "13.00 GiB of 11.00 GiB, gpu": "bold"}
    assert {float(line.get_xdata()[0]) for line in axes.lines} == {11.0, 13.0}
    assert "1 plan does not fit: ddp." in chart.words


def test_scaling_takes_the_fastest_point_of_each_size(tmp_path: Path) -> None:
    rows = [
        make_row("ddp", ranks=n, point=f"{n}-{i}", throughput_samples_per_s=n * (1.0 + i))
        for n in (2, 4)
        for i in (0, 1)
    ]
    table = made(rows, tmp_path)
    (line,) = lines_of(table.rows, layout_of(table)).values()
    assert [row["throughput_samples_per_s"] for row in line] == [4.0, 8.0]


def test_micro_batches_that_go_with_a_number_of_servers_make_no_plan_of_their_own(tmp_path: Path) -> None:
    servers, batches = "cluster.topology.servers.0.count", "plan.micro_batches"
    rows = [
        make_row(method, ranks=8 * n, point=f"{method}-{n}", **{servers: n, batches: 16 // n})
        for method in ("ddp", "zero3")
        for n in (2, 4, 8)
    ]
    table = made(rows, tmp_path, {servers: int, batches: int})
    layout = layout_of(table)
    assert (layout.settings, layout.plans) == ((servers,), ("method",))
    assert [len(line) for line in lines_of(table.rows, layout).values()] == [3, 3]
    apart = [row | {batches: 1, "point": f"{row['point']}-1"} for row in rows]
    assert layout_of(made([*rows, *apart], tmp_path, {servers: int, batches: int})).plans == ("method", batches)


def test_ticks_of_times_that_differ_little_do_not_touch(tmp_path: Path) -> None:
    rows = [make_row("ddp", step_time_s=20.512), make_row("hsdp", step_time_s=20.69, peak_allocated_bytes=9 * GIB)]
    drawn = {chart.name: chart for chart in sweep_charts(made(rows, tmp_path))}
    figure = drawn["time_and_memory"].figure
    figure.canvas.draw()
    labels = [label.get_window_extent() for label in figure.axes[0].get_xticklabels() if label.get_text()]
    shown = [box for box in labels if figure.axes[0].bbox.x0 - 1 <= (box.x0 + box.x1) / 2 <= figure.axes[0].bbox.x1 + 1]
    assert len(shown) > 1
    assert all(left.x1 < right.x0 for left, right in pairwise(shown))


def test_nothing_leaves_the_picture(charts) -> None:
    for chart in charts.values():
        assert outside(chart.figure) == []


@pytest.mark.slow  # test_analysis.py looks at the bytes of other charts
def test_the_same_table_gives_the_same_bytes(charts, tmp_path: Path) -> None:
    (again,) = who_wins(made(grid(), tmp_path))
    assert png(again.figure) == png(charts["who_wins"].figure)
    assert svg(again.figure) == svg(charts["who_wins"].figure)


def outside(figure: Figure) -> list[str]:
    """Return the texts that do not lie within the picture."""
    figure.canvas.draw()
    texts = [
        *figure.texts,
        *(text for axes in figure.axes for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label)),
    ]
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts if text.get_text()]
    whole = figure.bbox
    return [
        words
        for words, box in boxes
        if box.x0 < whole.x0 - 1 or box.x1 > whole.x1 + 1 or box.y0 < whole.y0 - 1 or box.y1 > whole.y1 + 1
    ]


def test_many_settings_go_onto_several_pages(tmp_path: Path) -> None:
    rates = tuple(1e8 * 1.5**i for i in range(14))
    rows = [row | {"group": f"g{row[LINK]:g}", "point": f"{i}"} for i, row in enumerate(grid(rates))]
    bare = made(
        [{key: value for key, value in row.items() if key != LINK} for row in rows], tmp_path, {THRESHOLD: float}
    )
    assert layout_of(bare).settings == ("group",)
    assert [len(chart.figure.axes) for chart in who_wins(bare)] == [2]


@pytest.mark.slow
def test_of_many_settings_those_that_are_drawn_are_spread_over_the_sweep_and_the_note_says_so(tmp_path: Path) -> None:
    table = many_clusters(tmp_path)
    found = {chart.name: [text.get_text() for text in chart.figure.texts] for chart in sweep_charts(table)}
    notes = {name: " ".join(texts) for name, texts in found.items()}
    pages = [name for name in found if name.startswith("step_time_by_threshold")]
    assert len(pages) == 4
    for number, name in enumerate(pages):
        assert f"48 of 123 settings, spread over the sweep. Page {number + 1} of 4." in notes[name]
    titles = [text for name in pages for text in found[name] if text.startswith(("stars", "trees"))]
    assert len(titles) == 48
    assert len([title for title in titles if title.startswith("trees")]) == 3
    assert {title.split(", ")[1] for title in titles if title.startswith("stars")} == {
        f"{n} devices" for n in (2, 4, 8)
    }
    assert "9 of 123 settings, spread over the sweep." in notes["time_and_memory"]
    assert "At most 12 of 40 bandwidths, evenly spaced." in notes["who_wins"]
    ratios = [
        row | {LINK: None, "point": f"{i}", "group": f"oversubscription {i // 7}"} for i, row in enumerate(grid())
    ]
    (map_of_words,) = who_wins(made(ratios, tmp_path))
    assert overlapping(map_of_words.figure) == []
    assert "6 of 40 networks, spread over the sweep." in notes["scaling"]


def overlapping(figure: Figure) -> list[str]:
    """Return the heads of columns that reach into the next one's."""
    figure.canvas.draw()
    found = []
    for axes in figure.axes:
        boxes = [(label.get_text(), label.get_window_extent()) for label in axes.get_xticklabels()]
        found += [text for (text, box), (_, after) in pairwise(boxes) if box.x1 >= after.x0]
    return found


def test_the_heading_of_a_single_row_leaves_the_note_alone(tmp_path: Path) -> None:
    """The label of the axis was longer than the axis, and ran through the note."""
    rates = (1e8, 1e9)
    rows = [row for row in grid(rates) if row.get(THRESHOLD) in (None, 1e-3)]
    (map_of_one,) = who_wins(made(rows, tmp_path))
    figure = map_of_one.figure
    figure.canvas.draw()
    (heading,) = [text for text in figure.axes[0].texts if text.get_text().startswith("threshold:")]
    box = heading.get_window_extent()
    assert box.x0 >= 0
    assert not [text.get_text() for text in figure.texts if text.get_window_extent().overlaps(box)]


def test_settings_that_take_the_same_memory_are_one_panel(tmp_path: Path) -> None:
    table = many_clusters(tmp_path)
    chart = memory_by_category(table)
    assert {"stars", "trees"} <= {text.get_text() for text in chart.figure.texts}
    assert len(chart.figure.axes) == 2
    more = [row | ({"margin_bytes": GIB} if row[COUNT] == 8 else {}) for row in table.rows]
    assert layout_by_memory(more, layout_of(table)).settings == ("group", COUNT)


def test_legends_name_only_what_occurs(charts, tmp_path: Path) -> None:
    who = ["a thresholded plan is faster", "a dense plan is faster", "even: within 2 %"]
    assert legend(charts["who_wins"]) == who
    (slow,) = who_wins(made(grid((1e8, 1.1e8)), tmp_path))
    assert legend(slow) == [who[0], who[2]]
    far = [row | {"capacity_bytes": 900 * GIB, "margin_bytes": 888 * GIB} for row in grid()]
    memory = memory_by_category(made(far, tmp_path))
    assert "memory of the device" in legend(charts["memory_by_category"])
    # a legend with a line for each of a search's plans was longer than its chart
    names = [f"zero{n % 3 + 1}, plan {n}" for n in range(23)]
    times = [{"step_time_s": 1.0 + n / 10, "peak_reserved_bytes": (30 - min(n, 4)) * GIB} for n in range(23)]
    rows = [
        make_row(name.partition(",")[0], variant=name, point=name, **time)
        for name, time in zip(names, times, strict=True)
    ]
    drawn = {chart.name: chart for chart in sweep_charts(made(rows, tmp_path))}["time_and_memory"]
    on_the_line = names[:5]
    assert legend(drawn) == ["zero1", "zero2", "zero3", "best of the dense plans", *on_the_line]
    numbers = [text.get_text() for text in drawn.figure.axes[0].texts]
    assert numbers == [str(n + 1) for n in range(len(on_the_line))]
    assert outside(drawn.figure) == []
    assert legend(memory) == [name for name in legend(charts["memory_by_category"]) if name != "memory of the device"]


def legend(chart: Chart) -> list[str]:
    return [text.get_text() for each in chart.figure.legends for text in each.get_texts()]


@pytest.mark.slow
def test_clusters_whose_links_have_other_names_have_maps_of_their_own(tmp_path: Path) -> None:
    nic = "cluster.topology.servers.0.nic_link.bandwidth_bytes_per_s"
    stars = [row | {nic: None} for row in grid()]
    servers = [row | {nic: row[LINK], LINK: None, "point": f"servers {i}"} for i, row in enumerate(grid())]
    table = made([*stars, *servers], tmp_path, {**AXES, nic: float})
    found = who_wins(table)
    assert [chart.name for chart in found] == ["who_wins", "who_wins-2"]
    assert len(sweep_charts(table)) >= 2
    for chart in found:
        heads = [label.get_text() for axes in chart.figure.axes for label in axes.get_xticklabels()]
        assert len(heads) == 3
        assert not [text for text in heads if "none" in text]
        assert "none" not in chart.words


# Command -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/real/test_readme.py runs the command
def test_the_command_writes_every_chart_twice_and_says_what_was_found(tmp_path, monkeypatch, capsys) -> None:
    table = write([row for row in grid() if row[LINK] == 1e8], tmp_path / "t.parquet")
    assert run_sweep(monkeypatch, table, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Who is fastest on which network?"
    assert "7 points: 7 fit" in said[1]
    assert (
        said[2] == "The fastest dense plan that fits is ddp, 1.10 s a step; the slowest, gs, takes 1.00 times as long."
    )
    assert "1.80 times the speed" in said[3]
    assert "Change of loss: not measured. 1 control (nothing pushed) among the points." in said[3]
    assert sorted(map(Path, said[4:])) == sorted((tmp_path / "out").iterdir())
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".png", ".svg"}


def run_sweep(monkeypatch: pytest.MonkeyPatch, *arguments: object, drawn: bool = True) -> int:
    return run(monkeypatch, *arguments, verb="sweep", drawn=drawn)


def test_what_is_no_table_or_has_no_answer_is_refused_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    status = run_sweep(monkeypatch, tmp_path / "none.parquet", "--out", tmp_path)
    assert_refused(capsys, status, "none.parquet: no such file")
    empty = write([make_row("ddp", status="invalid", reason="no", step_time_s=None)], tmp_path / "t.parquet")
    assert_refused(capsys, run_sweep(monkeypatch, empty, "--out", tmp_path), "none of its 1 points has a prediction")


def test_axes_are_the_columns_between_the_point_and_its_outcome() -> None:
    assert list(AXES) == [THRESHOLD, LINK]
    assert inf not in [row[THRESHOLD] for row in grid(control=False)]


# Words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("plan.recompute", "none", "recompute none"),
        ("plan.shares.batch", "even", "batch even"),
        ("plan.tp_overlap", True, "tp_overlap true"),
        ("workload.precision", "bf16", "bf16"),
        ("cluster.topology.link", "tcp-25g", "tcp-25g"),
    ],
)
def test_values_that_do_not_tell_what_they_are_of_have_their_key(column: str, value: object, text: str) -> None:
    """A plan was `zero2, micro_batches 1, none`."""
    assert shown(column, value) == text


def test_of_many_settings_the_summary_counts_who_is_the_fastest(tmp_path: Path) -> None:
    """With more than six settings it said nothing of them."""
    few, many = (tuple(1e8 * 2**i for i in range(count)) for count in (6, 9))
    assert any("the fastest dense plan that fits is" in each for each in summary(made(grid(few), tmp_path)))
    table = made(grid(many), tmp_path)
    wins = next(each for each in summary(table) if "that fits, in 9 settings" in each)
    rows = by_setting(table.fitting, layout_of(table)).values()
    fastest = Counter(
        str(min((row for row in each if is_dense(row)), key=lambda row: row["step_time_s"])["method"]) for each in rows
    )
    for method, count in fastest.items():
        assert f"{method} in {count}" in wins


def test_a_line_leads_to_a_label_that_is_off_its_point() -> None:
    axes = Figure(figsize=(4, 3)).add_subplot()
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    points = [(5 + 0.05 * i, 5.0) for i in range(12)]
    place_labels(axes, points, [str(i) for i in range(12)], points)
    arrows = [text.arrow_patch is not None for text in axes.texts if isinstance(text, Annotation)]
    assert len(arrows) == 12
    assert any(arrows)
    assert not arrows[0]


def test_a_front_says_which_memory_it_is_of(tmp_path: Path) -> None:
    """The terminal's table has allocated bytes, the chart's axis the reserved ones, where they are known."""
    for reserved, says in ((2 * GIB, True), (None, False)):
        rows = [row | {"peak_reserved_bytes": reserved} for row in grid()]
        (chart,) = (each for each in sweep_charts(made(rows, tmp_path)) if each.name == "time_and_memory")
        words = " ".join(text.get_text() for text in chart.figure.findobj(Text)).replace("\n", " ")
        assert ("allocator reserves" in words) is says
