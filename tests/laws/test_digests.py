"""Digests of code: predictions by other code are repeated; measurements are kept, and name the code that made them."""

import hashlib
import json
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from results import make_result, run

from analysis.compare.comparison import differences, join
from analysis.compare.table import find_results
from gssim.execution import SHOWN, code_digest, package_digest
from gssim.execution import store as digests
from gssim.scenario import load_scenario
from gssim.scenario.sweep import Point
from gssim.simulation import simulate
from gssim.sweeps import PredictionKey, prediction_name, predictions_in

ROOT = Path(__file__).resolve().parents[2]


def written(folder: Path, text: str) -> Path:
    """Return a package of one module below a folder."""
    package = folder / "somebodys"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rates.py").write_text(text)
    return package


@pytest.fixture
def fresh():
    """Forget what was worked out, before and after."""
    package_digest.cache_clear()
    code_digest.cache_clear()
    yield
    package_digest.cache_clear()
    code_digest.cache_clear()


def test_a_digest_hangs_on_content_and_names_of_sources_and_data(tmp_path, monkeypatch, fresh):
    monkeypatch.syspath_prepend(tmp_path)
    package = written(tmp_path, "RATE = 1\n")

    def now() -> str:
        package_digest.cache_clear()
        return package_digest("somebodys")

    first = now()
    (package / "notes.md").write_text("no code")
    (package / "__pycache__").mkdir(exist_ok=True)
    assert now() == first
    (package / "presets.toml").write_text("a = 1\n")
    second = now()
    (package / "rates.py").write_text("RATE = 2\n")
    third = now()
    (package / "rates.py").rename(package / "speeds.py")
    assert len({first, second, third, now()}) == 4
    assert "somebodys" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        package_digest("nobodys")


@pytest.mark.parametrize("name", digests.NUMERICS)
def test_another_version_of_what_is_computed_with_is_another_code(name, monkeypatch, fresh):
    before = code_digest()
    code_digest.cache_clear()
    real = digests.installed_version
    monkeypatch.setattr(digests, "installed_version", lambda each: "0" if each == name else real(each))
    assert code_digest() != before


def test_a_digest_is_worked_out_once_in_a_few_times_what_reading_the_code_takes(fresh):
    began_s = time.process_time()
    for file in (ROOT / "gssim").rglob("*.py"):
        hashlib.sha256(file.read_bytes()).digest()
    reading_s = time.process_time() - began_s
    began_s = time.process_time()
    first = code_digest()
    took_s = time.process_time() - began_s
    began_s = time.process_time()
    assert all(code_digest() == first for _ in range(100))
    assert time.process_time() - began_s < took_s
    assert took_s < 10 * reading_s  # two to three times: other files are read too


def test_a_prediction_of_other_code_is_not_taken_up(tmp_path, monkeypatch):
    loaded = load_scenario(ROOT / "scenarios" / "table1-bert.toml")
    result = simulate(loaded).result
    assert result.provenance["code"] == code_digest()[:SHOWN]
    code, layers = code_digest()[:SHOWN], loaded.scenario.layers_id()
    key = PredictionKey(result.scenario_id, result.calibration_id, code, layers)
    point = Point("p", Path("p.toml"), (), "", ())
    name, store = prediction_name(point, result.scenario_id), predictions_in(tmp_path)
    store.keep(name, result)
    assert store.kept(name, key) == result
    for other in ("code", "scenario_id", "calibration_id", "layers_id"):
        assert store.kept(name, replace(key, **{other: "another"})) is None


def both_sides(folder: Path, **measured: str) -> None:
    """Write a prediction and a measurement of one scenario; of the latter, what it was made with."""
    folder.mkdir(exist_ok=True)
    for source, made in (("simulated", {"code": code_digest()[:SHOWN]}), ("measured", measured)):
        data = json.loads(make_result(source=source).to_json()) | {"provenance": made}
        (folder / f"{source}.json").write_text(json.dumps(data))


def said_of(folder: Path) -> list[str]:
    """Return what comparing a folder says of the code that made what is in it."""
    return differences(join(find_results([folder]).files).pairs)


def test_comparison_says_what_was_made_with_other_code(tmp_path):
    here = package_digest("gsreal")[:SHOWN]
    both_sides(tmp_path / "same", gsreal=here, torch="2.13")
    assert said_of(tmp_path / "same") == []
    both_sides(tmp_path / "other", gsreal="0123456789abcdef", torch="2.11")
    (said,) = said_of(tmp_path / "other")
    assert said.startswith("1 of 1 measured with another gsreal than this one")
    assert said.endswith("(ddp-even); run it again, with --again if a sweep or a study made it")


# Archives ------------------------------------------------------------------------------------------------------------


def packed(folder: Path, archive: Path, mode: str = "w:xz") -> None:
    """Pack what is in a folder."""
    with tarfile.open(archive, mode) as opened:
        for file in sorted(folder.iterdir()):
            opened.add(file, file.name)


@pytest.mark.parametrize(("ending", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tar.xz", "w:xz")])
def test_results_in_an_archive_are_found_as_in_a_folder(ending, mode, tmp_path):
    both_sides(tmp_path / "loose")
    (tmp_path / "loose" / "notes.json").write_text("{}")
    (tmp_path / "kept").mkdir()
    archive = tmp_path / "kept" / f"results.{ending}"
    packed(tmp_path / "loose", archive, mode)
    loose = find_results([tmp_path / "loose"])
    for named in ([tmp_path / "kept"], [archive], [archive, tmp_path / "kept"]):
        found = find_results(named)
        assert [file.result for file in found.files] == [file.result for file in loose.files]
        assert [file.path for file in found.files] == [archive / file.path.name for file in loose.files]
        assert found.skipped == loose.skipped == 1
    assert len(join(found.files).pairs) == 1
    assert list((tmp_path / "kept").iterdir()) == [archive]


def test_an_archive_that_is_cut_off_or_none_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    both_sides(tmp_path / "loose")
    whole = tmp_path / "whole.tar.xz"
    packed(tmp_path / "loose", whole)
    for name, content in (("cut.tar.xz", whole.read_bytes()[:-200]), ("foreign.tar.gz", b"no archive")):
        file = tmp_path / name
        file.write_bytes(content)
        assert run(monkeypatch, file, "--out", tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert said.startswith(f"analysis: {file}: cannot be read as an archive")
        assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_labs_packed_measurements_are_found():
    found = find_results([ROOT / "scenarios" / "measured" / "lab"])
    assert len(found.files) == 109
    assert {file.result.source for file in found.files} == {"measured"}
