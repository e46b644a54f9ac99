"""Points of a sweep that the lab measures, and their order, tested with simulated measurements."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from strategies import write_files

from gsreal.lab.lab import cells_of, kept, measure_cells, median_results
from gsreal.run.signals import signals_deferred
from gssim.errors import RunFailedError
from gssim.execution.files import write_text
from gssim.result import read_result
from gssim.scenario.sweep import load_sweep, points_of
from gssim.simulation import simulate
from gssim.terminal import EndedError, unwinding

SWEEPS = sorted((Path(__file__).resolve().parents[2] / "scenarios" / "sweeps").glob("lab*.toml"))
SWEEP_TOML = """# Which plan is faster?
scenario = "scenario.toml"
[variants]
ddp = { plan.method = "ddp" }
gs = { plan.method = "gs" }
zero1 = { plan.method = "zero1" }
"""


def cells_in(folder, *, repeats=2):
    path = folder / "sweep.toml"
    if not path.exists():
        write_files(folder)
        path.write_text(SWEEP_TOML)
    points = points_of(load_sweep(path), file=path)
    return cells_of(points, [point.load() for point in points], repeats=repeats, out=folder / "out")


class Measured:
    """Stands for the lab: says what it was asked to measure, and fails or is interrupted where told to."""

    def __init__(self, **failures):
        self.asked, self.failures = [], failures

    def __call__(self, cell):
        self.asked.append(cell.file.name)
        failure = self.failures.get(cell.point.name.rpartition("-")[2])
        if failure is not None:
            raise failure
        result = simulate(cell.loaded).result
        return replace(result, source="measured", step_time_s=result.step_time_s * (1 + cell.repeat))


def test_every_point_is_measured_once_then_every_point_again(tmp_path):
    cells = cells_in(tmp_path)
    run = Measured()
    results = measure_cells(cells, run)
    names = [name.split(".")[0] + name.rpartition("measured")[2] for name in run.asked]
    assert names == [f"sweep--{plan}{end}" for end in (".json", "-1.json") for plan in ("ddp", "gs", "zero1")]
    assert [result.provenance["repeat"] for result in results] == [0, 0, 0, 1, 1, 1]
    assert [read_result(cell.file) for cell in cells] == results
    assert [result.provenance["repeat"] for result in median_results(cells, results)] == [0, 0, 0]


def test_what_is_there_is_not_measured_again(tmp_path, capsys):
    cells = cells_in(tmp_path)
    before = measure_cells(cells, Measured())
    cells[1].file.unlink()
    cells[5].file.write_text("{}")
    run = Measured()
    assert measure_cells(cells, run) == before
    assert run.asked == [cells[1].file.name, cells[5].file.name]
    assert "gsreal: lab: 4 of 6 are there already" in capsys.readouterr().err


def test_again_measures_what_is_there_too_and_other_code_does_not(tmp_path):
    """A measurement is kept if the code has changed since; its provenance names the code that made it."""
    cells = cells_in(tmp_path)
    by_other_code = Measured()
    measure_cells(cells, lambda cell: replace(by_other_code(cell), provenance={"gsreal": "0123456789abcdef"}))
    run = Measured()
    results = measure_cells(cells, run)
    assert not run.asked
    assert {result.provenance["gsreal"] for result in results} == {"0123456789abcdef"}
    results = measure_cells(cells, run, again=True)
    assert len(run.asked) == len(cells)
    assert "gsreal" not in results[0].provenance


def test_an_interrupt_loses_nothing_that_is_finished(tmp_path):
    cells = cells_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        measure_cells(cells, Measured(gs=KeyboardInterrupt()))
    assert [cell.file.exists() for cell in cells] == [True, False, False, False, False, False]
    run = Measured()
    measure_cells(cells, run)
    assert run.asked == [cell.file.name for cell in cells[1:]]


def test_a_point_that_fails_is_told_and_tried_again_by_the_next_call(tmp_path, capsys):
    cells = cells_in(tmp_path)
    with pytest.raises(RunFailedError, match=r"2 of 6 failed \(sweep--gs, sweep--gs, again \(1\)\); the same command"):
        measure_cells(cells, Measured(gs=RunFailedError("rank 1: out of luck")))
    lines = capsys.readouterr().err.splitlines()
    assert "gsreal: lab: sweep--gs: failed: rank 1: out of luck" in lines
    assert sum("; 6 of 6 done" in line for line in lines) == 1
    assert [cell.file.exists() for cell in cells] == [True, False, True] * 2
    run = Measured()
    assert len(measure_cells(cells, run)) == 6
    assert run.asked == [cells[1].file.name, cells[4].file.name]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem == "lab-small" else [pytest.mark.slow]) for path in SWEEPS],
    ids=lambda path: path.stem,
)
def test_what_was_measured_in_the_shipped_labs_is_known_again(path, tmp_path):
    first = {point.group: point for point in reversed(points_of(load_sweep(path), file=path))}
    loaded = [point.load(gradients_needed=False) for point in first.values()]
    result = replace(simulate(loaded[0]).result, source="measured")
    for cell in cells_of(tuple(first.values()), loaded, repeats=1, out=tmp_path):
        scenario = cell.loaded.scenario
        measured = replace(result, scenario_id=scenario.scenario_id, scenario=scenario.resolved())
        write_text(cell.file, measured.to_json())
        assert kept(cell) == measured


def test_another_network_is_measured_anew_and_another_calibration_is_not(tmp_path):
    measure_cells(cells_in(tmp_path), Measured())
    cluster = tmp_path / "pair.toml"
    text = cluster.read_text()
    cluster.write_text(text.replace("1 GFLOP/s", "2 GFLOP/s"))
    assert all(kept(cell) for cell in cells_in(tmp_path))
    slower = text.replace("1 MB/s", "2 MB/s")
    assert slower != text
    cluster.write_text(slower)
    assert not any(kept(cell) for cell in cells_in(tmp_path))
    shared = text.replace('kind = "cpu"', 'kind = "cpu"\nlab = { cpu_share_ratio = 0.5 }')
    cluster.write_text(shared)
    assert not any(kept(cell) for cell in cells_in(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_the_middle_of_a_fork_waits_for_its_end(number):
    reached = []

    def forked():
        with unwinding():
            with signals_deferred():
                signal.raise_signal(number)
                reached.append("the end of what is not interrupted")
            reached.append("what comes after it")

    with pytest.raises((KeyboardInterrupt, EndedError)):
        forked()
    assert reached == ["the end of what is not interrupted"]
