"""Comparisons of Results: joining, error columns, refused input, charts."""

import csv
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from results import ALL_REDUCE, PUSH, assert_refused, in_file, make_result, run, write

from analysis.charts import phases, point_labels, predicted_vs_measured, spread
from analysis.charts.drawing import LABEL_POINTS, label_width_in, plain
from analysis.compare.comparison import COLUMNS, compare, differences, join
from analysis.compare.groups import group_table
from analysis.compare.report import print_comparison, worst_explained
from analysis.compare.rivals import rival_table
from analysis.compare.table import ResultFile, find_results
from gssim.result import PHASES, Collective, Result
from gssim.terminal import plain_console

TABLES = ("comparison.csv", "groups.csv", "gs_against_dense.csv")
CHARTS = tuple(
    f"{name}.{suffix}"
    for name in ("predicted_vs_measured", "phases", "exposed_communication", "gs_against_dense")
    for suffix in ("png", "svg")
)


def compared(predicted: Result, measured: Result) -> dict[str, Any]:
    joined = join([in_file(predicted, "p.json"), in_file(measured, "m.json")])
    return compare(joined.pairs).row(0, named=True)


# Thresholds ----------------------------------------------------------------------------------------------------------


def thresholded_and_dense(**changes: Any) -> list[dict[str, Any]]:
    """Return the rows of a dense run of 0.2 s and of another, made with `changes`, of 0.1 s (predicted: 0.16 s)."""
    dense = {"scenario_id": "d", "name": "dense", "method": "gs", "losses": (9.0,) * 8 + (1.0, 3.0)}
    other = {"scenario_id": "t", "name": "other", "method": "gs", "losses": (9.0,) * 8 + (2.0, 3.0)} | changes
    files = [
        in_file(make_result(source, **case, step_time_s=times[source]))
        for case, times in (
            (dense, {"simulated": 0.2, "measured": 0.2}),
            (other, {"simulated": 0.16, "measured": 0.1}),
        )
        for source in ("simulated", "measured")
    ]
    return list(compare(join(files).pairs).iter_rows(named=True))


@pytest.mark.parametrize("how", [{"threshold": 1e-3}, {"publish": {"threshold": 1e-4}}, {"threshold": math.inf}])
def test_a_thresholds_speed_stands_beside_what_it_did_to_the_loss(how: dict[str, Any]) -> None:
    dense, other = thresholded_and_dense(**how)
    assert dense["speed_up_over"] is None
    assert other["speed_up_over"] == "dense"
    assert other["speed_up_predicted_ratio"] == pytest.approx(1.25)
    assert other["speed_up_measured_ratio"] == pytest.approx(2)
    assert other["loss_change_measured_ratio"] == pytest.approx(0.25)  # of the last fifth: 2.5 to 2


def test_plans_are_ranked_among_those_of_their_own_batch_and_model() -> None:
    def workload(samples: int, model: str) -> dict[str, Any]:
        return {"cluster": {"name": "pair"}, "workload": {"global_batch_size": samples, "model": {"name": model}}}

    cases = [(8, "gpt", 0.1), (8, "gpt", 0.11), (32, "gpt", 0.4), (32, "gpt", 0.44), (32, "bert", 0.2)]
    files = [
        in_file(make_result(source, scenario_id=str(n), name=f"{n}", step_time_s=time_s, scenario=workload(*of)))
        for n, (*of, time_s) in enumerate(cases)
        for source in ("simulated", "measured")
    ]
    groups = group_table(compare(join(files).pairs))
    names = ["pair, bert", "pair, gpt, batch 32", "pair, gpt, batch 8", "all"]
    assert groups.select("group", "n", "pairs").rows() == list(zip(names, (1, 2, 2, 5), (0, 1, 1, 2), strict=True))


def test_a_speed_up_is_that_of_the_step_times_beside_it_where_runs_were_repeated() -> None:
    runs = [("simulated", None, 0.1, 0.1), ("measured", 0, 0.1, 0.1), ("measured", 1, 0.3, 0.1)]
    files = [
        in_file(make_result(source, scenario_id=name, name=name, repeat=repeat, threshold=at, step_time_s=time_s))
        for source, repeat, *times_s in runs
        for name, at, time_s in zip(("dense", "other"), (None, 1e-3), times_s, strict=True)
    ]
    dense, other = compare(join(files).pairs).iter_rows(named=True)
    assert dense["step_time_measured_s"] == pytest.approx(0.2)
    assert other["speed_up_measured_ratio"] == pytest.approx(2)


@pytest.mark.parametrize("how", [{"steps": 11}, {"devices": ("gpu", "gpu")}])
def test_runs_of_another_training_or_machine_are_no_measure_of_a_threshold(how: dict[str, Any]) -> None:
    assert thresholded_and_dense(threshold=1e-3, **how)[1]["speed_up_over"] is None


def last_compared(cases: list[tuple[str, float | None, float]]) -> dict[str, Any]:
    """Return the last row of a comparison of runs by method, threshold and step time."""
    files = [
        in_file(make_result(source, scenario_id=str(i), name=f"{i}", method=method, threshold=at, step_time_s=time_s))
        for i, (method, at, time_s) in enumerate(cases)
        for source in ("simulated", "measured")
    ]
    return compare(join(files).pairs).row(len(cases) - 1, named=True)


def test_of_several_dense_runs_that_of_the_same_method_counts() -> None:
    last = last_compared([("ddp", None, 0.1), ("gs", None, 0.2), ("gs", 1e-3, 0.1)])
    assert (last["speed_up_over"], last["speed_up_measured_ratio"]) == ("1", pytest.approx(2))
    assert last["loss_change_measured_ratio"] is None  # nothing was trained


@pytest.mark.parametrize("method", ["topk", "powersgd", "local_sgd", "diloco", "streaming_diloco", "sparse_loco"])
def test_what_compresses_gradients_or_seldom_synchronizes_is_no_dense_run(method: str) -> None:
    last = last_compared([(method, None, 0.05), ("ddp", None, 0.2), ("gs", 1e-3, 0.1)])
    assert (last["speed_up_over"], last["speed_up_measured_ratio"]) == ("1", pytest.approx(2))


@pytest.mark.parametrize(("threshold", "says"), [(1e-3, "no control"), (math.inf, "other (control)")])
def test_the_table_names_the_control_or_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], threshold: float, says: str
) -> None:
    for source in ("simulated", "measured"):
        plain = make_result(source, scenario_id="d", name="dense", method="gs", losses=(1.0,))
        other = make_result(
            source, scenario_id="t", name="other", method="gs", threshold=threshold, push_density=0.0, losses=(1.5,)
        )
        write(tmp_path, f"d.{source}.json", plain)
        write(tmp_path, f"t.{source}.json", other)
    assert run(monkeypatch, tmp_path, "--out", tmp_path / "out", drawn=False) == 0
    printed = capsys.readouterr().out
    assert says in printed
    assert "+50.0 %" in printed


# Join ----------------------------------------------------------------------------------------------------------------


def test_results_join_by_scenario_id_and_not_by_name() -> None:
    files = [
        in_file(make_result("simulated", scenario_id="1", name="x", step_time_s=0.1), "1s"),
        in_file(make_result("simulated", scenario_id="2", name="x", step_time_s=0.2), "2s"),
        in_file(make_result("measured", scenario_id="2", name="y", step_time_s=0.3), "2m"),
        in_file(make_result("measured", scenario_id="3", name="x", step_time_s=0.4), "3m"),
    ]
    joined = join(files)
    assert [(str(pair.predicted.path), str(pair.measured.path)) for pair in joined.pairs] == [("2s", "2m")]
    assert [str(file.path) for file in joined.unmatched] == ["1s", "3m"]


def test_the_newest_of_several_results_counts_whatever_their_order() -> None:
    old = in_file(make_result("simulated", step_time_s=0.1), "old", modified_ns=1)
    new = in_file(make_result("simulated", step_time_s=0.2), "new", modified_ns=2)
    measured = in_file(make_result("measured"), "m", modified_ns=0)
    for files in ([old, new, measured], [measured, new, old]):
        joined = join(files)
        assert joined.pairs[0].predicted is new
        assert joined.superseded == ((old, new),)


def test_folders_are_searched_and_each_file_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path / "deep" / "er", "a.json", make_result("simulated"))
    (tmp_path / "gradients.json").write_text('{"schema": "gssim.gradients/1"}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "broken.json").write_text("{")
    found = find_results([tmp_path, path, tmp_path / "deep"])
    assert [file.path for file in found.files] == [path]
    assert found.skipped == 3


# Errors --------------------------------------------------------------------------------------------------------------


def test_error_ratios_are_positive_where_the_prediction_is_too_large() -> None:
    row = compared(
        make_result("simulated", step_time_s=0.22, peaks_bytes=(90e6, 90e6)),
        make_result("measured", step_time_s=0.2, peaks_bytes=(100e6, 100e6)),
    )
    assert row["step_time_error_ratio"] == pytest.approx(0.1)
    assert row["peak_error_ratio"] == pytest.approx(-0.1)
    assert (row["step_time_predicted_s"], row["step_time_measured_s"]) == (0.22, 0.2)
    assert row["step_time_p10_measured_s"] == pytest.approx(0.18)


def test_the_peak_is_of_the_rank_that_is_predicted_worst_not_of_the_largest() -> None:
    row = compared(
        make_result("simulated", peaks_bytes=(101e6, 30e6, 50e6)),
        make_result("measured", peaks_bytes=(100e6, 40e6, 50e6)),
    )
    assert (row["peak_rank"], row["peak_predicted_bytes"], row["peak_measured_bytes"]) == (1, 30e6, 40e6)
    assert row["peak_error_ratio"] == pytest.approx(-0.25)


def test_phases_stand_beside_each_other_on_the_right_side() -> None:
    row = compared(
        make_result("simulated", step_time_s=1.0, phase_shares=(0.1, 0.2, 0.3, 0.05, 0.15, 0.2)),
        make_result("measured", step_time_s=2.0, phase_shares=(0.2, 0.1, 0.05, 0.3, 0.2, 0.15)),
    )
    assert [row[f"{phase}_predicted_s"] for phase in PHASES] == pytest.approx([0.1, 0.2, 0.3, 0.05, 0.15, 0.2])
    assert [row[f"{phase}_measured_s"] for phase in PHASES] == pytest.approx([0.4, 0.2, 0.1, 0.6, 0.4, 0.3])


def test_the_worst_step_is_explained_by_what_is_sent_and_by_phases() -> None:
    near = compared(make_result("simulated", step_time_s=1.0), make_result("measured", step_time_s=1.01))
    assert worst_explained([near]) == worst_explained([]) == ""
    far = compared(
        make_result("simulated", step_time_s=1.0, phase_shares=(0.4, 0.3, 0.0, 0.1, 0.2, 0.0)),
        make_result("measured", step_time_s=1.25, phase_shares=(0.32, 0.24, 0.0, 0.08, 0.36, 0.0)),
    )
    said = worst_explained([near, far])
    assert ", step -20.0 %: the collectives are equal, the peak is 0.0 % off" in said
    assert said.endswith("predicted less measured: exposed communication -250.0 ms")


def test_measurements_on_a_busy_machine_are_named() -> None:
    provenance = {"core_wait_ratio": 0.4}
    busy = replace(make_result("measured", name="slow"), provenance=provenance)
    quiet = replace(make_result("measured", name="calm"), provenance={"core_wait_ratio": 0.02})
    predicted = [in_file(make_result("simulated", name=each.scenario["name"])) for each in (busy, quiet)]
    for each, wanted in ((busy, True), (quiet, False)):
        pairs = join([predicted[0], in_file(each)]).pairs
        assert any("waited for cores" in line and "slow (40%)" in line for line in differences(pairs)) == wanted


def test_measurements_at_another_speed_than_the_devices_file_states_are_named() -> None:
    for ratio, wanted in ((0.72, True), (1.25, True), (0.95, False)):
        measured = replace(make_result("measured", name="drifted"), provenance={"device_speed_ratio": ratio})
        pairs = join([in_file(make_result("simulated", name="drifted")), in_file(measured)]).pairs
        assert any(f"drifted ({ratio:.0%})" in line for line in differences(pairs)) == wanted


def test_one_planted_collective_makes_them_unequal_and_is_named() -> None:
    planted = Collective(kind="broadcast", group=(0, 1), bytes=8, count=1)
    same = compared(make_result("simulated"), make_result("measured"))
    assert same["collectives_equal"] is True
    assert same["collectives_difference"] is None
    row = compared(make_result("simulated"), make_result("measured", collectives=(ALL_REDUCE, planted)))
    assert row["collectives_equal"] is False
    assert row["collectives_difference"] == "only measured: 1 x broadcast of 8 bytes among ranks 0 1"


@pytest.mark.parametrize("change", [{"count": 4}, {"bytes": 4_000_004}, {"group": (0, 2)}, {"kind": "all-gather"}])
def test_collectives_differ_in_each_part_of_their_key(change: dict[str, Any]) -> None:
    other = replace(ALL_REDUCE, **change)
    row = compared(make_result("simulated"), make_result("measured", collectives=(other,)))
    assert row["collectives_equal"] is False


def test_the_same_entry_twice_is_not_the_same_as_once() -> None:
    row = compared(make_result("simulated"), make_result("measured", collectives=(ALL_REDUCE, ALL_REDUCE)))
    assert row["collectives_equal"] is False


def test_the_payload_error_is_over_data_dependent_entries_only() -> None:
    row = compared(
        make_result("simulated", collectives=(ALL_REDUCE, replace(PUSH, payload_bytes=1_200_000.0))),
        make_result("measured", collectives=(ALL_REDUCE, PUSH)),
    )
    assert row["payload_error_ratio"] == pytest.approx(0.2)
    assert row["collectives_equal"] is True
    assert compared(make_result("simulated"), make_result("measured"))["payload_error_ratio"] is None


def test_a_side_that_names_no_payload_carried_the_full_tensors() -> None:
    row = compared(
        make_result("simulated", collectives=(PUSH,)),
        make_result("measured", collectives=(replace(PUSH, payload_bytes=None),)),
    )
    assert row["payload_error_ratio"] == pytest.approx(1_000_000 / 16_000_000 - 1)


# Command -------------------------------------------------------------------------------------------------------------


def test_compare_writes_a_csv_of_exact_columns_charts_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "results", tmp_path / "charts"
    gs = {"scenario_id": "b" * 16, "name": "gs [bold] $x$ $y$", "method": "gs", "threshold": 1e-3}
    write(results, "1s.json", make_result("simulated", step_time_s=0.21))
    write(results, "1m.json", make_result("measured"))
    write(results, "2s.json", make_result("simulated", **gs, collectives=(PUSH,), push_density=0.1, step_time_s=1.8))
    write(results, "2m.json", make_result("measured", **gs, collectives=(PUSH,), push_density=0.2, step_time_s=2.0))
    assert run(monkeypatch, results, "--out", out) == 0

    with (out / "comparison.csv").open(newline="") as stream:
        header, *rows = csv.reader(stream)
    assert tuple(header) == COLUMNS
    assert header[:12] == [
        "scenario_id", "name", "method", "threshold",
        "step_time_predicted_s", "step_time_measured_s", "step_time_error_ratio",
        "peak_predicted_bytes", "peak_measured_bytes", "peak_error_ratio",
        "collectives_equal", "payload_error_ratio",
    ]  # fmt: skip
    first, second = (dict(zip(header, row, strict=True)) for row in rows)
    assert (first["name"], first["threshold"], first["payload_error_ratio"]) == ("ddp-even", "", "")
    assert (second["threshold"], second["collectives_equal"], second["payload_error_ratio"]) == ("0.001", "true", "0.0")
    assert (second["push_density_predicted"], second["push_density_measured"]) == ("0.1", "0.2")

    for chart in ("predicted_vs_measured.png", "phases.png"):
        content = (out / chart).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 20_000
    said = capsys.readouterr()
    line = next(line for line in said.out.splitlines() if "gs [bold] $x$ $y$" in line)
    assert re.findall(r"1\.800 s|2\.000 s|-10\.0|equal", line) == ["1.800 s", "2.000 s", "-10.0", "equal"]
    assert "median |error|: step time 7.5 % (n = 2)" in said.out
    assert "payload 0.0 % (n = 1); collectives equal in 2 of 2" in said.out
    assert [line for line in said.out.splitlines() if line.startswith(str(out))] == [
        str(out / name) for name in (*TABLES, *CHARTS)
    ]
    assert sorted(path.name for path in out.iterdir()) == sorted([*TABLES, *CHARTS])


def test_the_same_results_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    write(results, "s.json", make_result("simulated"))
    write(results, "m.json", make_result("measured"))
    contents = []
    for out in (tmp_path / "a", tmp_path / "b"):
        assert run(monkeypatch, results, "--out", out) == 0
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert contents[0] == contents[1]


def test_unmatched_and_superseded_results_are_named_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "s.json", make_result("simulated"))
    newer = write(tmp_path, "m-new.json", make_result("measured", step_time_s=0.4), modified_s=2_000_000)
    older = write(tmp_path, "m-old.json", make_result("measured", step_time_s=0.1))
    alone = write(tmp_path, "alone.json", make_result("simulated", scenario_id="d" * 16))
    assert run(monkeypatch, tmp_path, "--out", tmp_path / "out", drawn=False) == 0
    said = capsys.readouterr()
    assert f"{alone}: unmatched: no measurement of scenario {'d' * 16}" in said.err
    assert f"{older}: superseded by the newer {newer}" in said.err
    assert "-50.0" in said.out
    assert str(alone) not in said.out


def test_a_prediction_for_another_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = write(tmp_path, "s.json", make_result("simulated", devices=("a100", "a100")))
    measured = write(tmp_path, "m.json", make_result("measured", devices=("a100", "h200")))
    status = run(monkeypatch, predicted, measured, "--out", tmp_path / "out")
    assert_refused(capsys, status, str(predicted), str(measured), "'a100'", "rank 1", "'h200'", "--set cluster=FILE")
    assert not (tmp_path / "out").exists()


def test_a_run_with_other_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "s.json", make_result("simulated"))
    write(tmp_path, "m.json", make_result("measured", peaks_bytes=(1e6,)))
    assert_refused(capsys, run(monkeypatch, tmp_path, "--out", tmp_path / "out"), "rank 1", "no device")


def test_a_place_that_cannot_be_written_is_refused_before_results_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "p.json", make_result("simulated"))  # it would be named as unmatched
    (tmp_path / "taken").touch()
    for place, reason in (("taken/out", "is no folder"), ("x" * 300, "File name too long")):
        assert run(monkeypatch, tmp_path, "--out", tmp_path / place) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be written" in line
        assert reason in line


def test_nothing_to_join_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "s.json", make_result("simulated"))
    status = run(monkeypatch, tmp_path, "--out", tmp_path / "out")
    assert_refused(capsys, status, str(tmp_path), "nothing to compare: 1 simulated and 0 measured")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file"),
        ("{", "not a JSON file"),
        ('{"schema": "gssim.gradients/1"}', "x.json: "),
        ("[]", "must be a table"),
    ],
)
def test_a_named_file_that_is_no_result_is_refused(
    content: str | None,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert_refused(capsys, run(monkeypatch, path, "--out", tmp_path / "out"), str(path), complaint)


def test_a_damaged_result_in_a_folder_is_refused_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text('{"schema": "gssim.result/1", "source": "measured"}')
    assert_refused(capsys, run(monkeypatch, tmp_path, "--out", tmp_path / "out"), "x.json", "missing")


@pytest.mark.parametrize("scenario", [{}, {"name": "x"}, {"name": "x", "plan": {"push": {}}}])
def test_a_result_without_name_or_method_is_refused(
    scenario: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "s.json", replace(make_result("simulated"), scenario=scenario))
    assert_refused(capsys, run(monkeypatch, tmp_path, "--out", tmp_path / "out"), f"{path}: scenario.")


def test_a_result_that_is_not_a_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "s.json", make_result("simulated"))
    path.write_text(path.read_text().replace('"step_time_s": 0.2', '"step_time_s": NaN'))
    assert_refused(capsys, run(monkeypatch, tmp_path, "--out", tmp_path / "out"), f"{path}: step_time_s = nan")


def test_an_output_folder_that_is_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "r", "s.json", make_result("simulated"))
    write(tmp_path / "r", "m.json", make_result("measured"))
    (tmp_path / "out").write_text("mine")
    assert_refused(
        capsys, run(monkeypatch, tmp_path / "r", "--out", tmp_path / "out"), str(tmp_path / "out"), "cannot be written"
    )
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("package", [pytest.param("polars", marks=pytest.mark.slow), "matplotlib"])
def test_a_missing_extra_gives_an_instruction(package: str, tmp_path: Path) -> None:
    code = (
        f"import sys, runpy; sys.modules[{package!r}] = None; "
        f"sys.argv = ['analysis', 'compare', {str(tmp_path)!r}, '--out', 'o']; "
        "runpy.run_module('analysis', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"analysis: needs {package}, which is not installed: pip install 'gssim[analysis]'\n"


# Charts --------------------------------------------------------------------------------------------------------------


def crowd(n: int, name: str = "scenario {i}", spread_s: float = 1e-4) -> list[ResultFile]:
    files = []
    for i in range(n):
        same = {"scenario_id": f"{i:016d}", "name": name.format(i=i)}
        files.append(in_file(make_result("simulated", **same, step_time_s=0.2 + i * spread_s), f"{i}s"))
        files.append(in_file(make_result("measured", **same, step_time_s=0.2), f"{i}m"))
    return files


@pytest.mark.parametrize("text", ["n n", "gs_z3, 32 ranks", "$3 (+4.2 %) \u2212 O&Q@8", "l"])
def test_labels_are_as_wide_as_matplotlib_draws_them(text: str) -> None:
    drawn = TextPath((0, 0), plain(text), LABEL_POINTS, prop=FontProperties(weight="bold"))
    assert label_width_in(text) == pytest.approx(drawn.get_extents().width / 72, rel=1e-12)


@pytest.mark.parametrize(
    ("n", "spread_s"),
    [(2, 0.5), (25, 0.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 0.0), (25, 0.5)))],
)
def test_labels_never_overlap_nor_leave_the_picture(n: int, spread_s: float) -> None:
    figure = predicted_vs_measured(compare(join(crowd(n, spread_s=spread_s)).pairs))
    figure.canvas.draw()
    for axes in figure.axes:
        # the text alone: an annotation's own extent includes its leader line
        texts = [text for text in axes.texts if text.get_text().startswith("scenario")]
        boxes = [Text.get_window_extent(text) for text in texts]
        bottoms = sorted((box.y0, box.y1) for box in boxes)
        assert len(boxes) == n
        assert all(lower[1] <= upper[0] for lower, upper in pairwise(bottoms))
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
        assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_labels_of_one_name_are_told_apart() -> None:
    files = crowd(3, name="gs")
    for file in files[4:]:
        file.result.scenario["plan"]["push"]["threshold"] = 1e-3
    labels = point_labels(compare(join(files).pairs))
    # these ids differ in their last character only; others are cut to six
    assert sorted(labels) == ["gs, dense, 0000000000000000", "gs, dense, 0000000000000001", "gs, threshold 0.001"]


def test_runs_of_one_file_with_several_overrides_are_named_apart_in_tables_charts_and_sentences() -> None:
    files = crowd(3, name="demo")
    for file in files[:2]:
        file.result.scenario["plan"]["method"] = "gs"
    for file in files:
        file.result.provenance["core_wait_ratio"] = 0.5
    pairs = join(files).pairs
    table = compare(pairs)
    assert table["name"].to_list() == ["demo, ddp, 0000000000000001", "demo, ddp, 0000000000000002", "demo, gs"]
    assert rival_table(pairs)["name"].to_list() == ["demo, gs"]
    (busy,) = [each for each in differences(pairs) if "waited for cores" in each]
    assert busy.endswith("demo, gs (50%); demo, ddp, 0000000000000001 (50%); demo, ddp, 0000000000000002 (50%)")
    assert [file.result.scenario["name"] for file in files] == ["demo"] * 6  # the Results stay as they were


def test_in_a_narrow_terminal_times_and_memory_are_two_tables_that_name_every_scenario(capsys, monkeypatch) -> None:
    table = compare(join(crowd(3, name="scenario-{i}")).pairs)
    monkeypatch.setattr("analysis.compare.report.console", lambda: plain_console(80))
    print_comparison(table, group_table(table))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert [said.count(f"scenario-{i} ") for i in range(3)] == [2, 2, 2]
    assert said.count("predicted  measured") == 1
    assert "payload" in said


def test_spread_keeps_order_and_distance() -> None:
    placed = spread([0.0, 0.0, 0.01, 0.5, 0.99, 1.0], 0.1)
    assert all(after - before > 0.1 - 1e-9 for before, after in pairwise(placed))
    assert placed[0] == 0.0
    assert placed[3] == 0.5
    assert placed[-1] == pytest.approx(1.0)


def test_bars_end_where_the_phases_sum_to_and_only_predicted_ones_are_hatched() -> None:
    pair = [in_file(make_result("simulated", step_time_s=0.3)), in_file(make_result("measured", step_time_s=0.2))]
    figure = phases(compare(join(pair).pairs))
    (axes,) = figure.axes
    named = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    drawn = {phase for file in pair for phase, time_s in file.result.phases_s.items() if time_s}
    assert named == {phase.replace("_", " ") for phase in drawn}
    upper = [bar for bar in axes.patches if bar.get_y() + bar.get_height() / 2 < 0]
    lower = [bar for bar in axes.patches if bar.get_y() + bar.get_height() / 2 > 0]
    assert max(bar.get_x() + bar.get_width() for bar in upper) == pytest.approx(300)
    assert max(bar.get_x() + bar.get_width() for bar in lower) == pytest.approx(200)
    assert any(bar.get_hatch() for bar in upper)
    assert not any(bar.get_hatch() for bar in lower)
    assert [text.get_text() for text in axes.texts] == ["predicted 300 ms", "measured 200 ms"]


def test_steps_of_seconds_do_not_squash_steps_of_milliseconds() -> None:
    files = crowd(2)
    for source in ("simulated", "measured"):
        files.append(in_file(make_result(source, scenario_id="e" * 16, name="slow", step_time_s=2.5)))
    figure = phases(compare(join(files).pairs))
    assert [axes.get_xlabel() for axes in figure.axes] == ["time of one step (s)", "time of one step (ms)"]
    assert [len(axes.get_yticks()) for axes in figure.axes] == [1, 2]
