"""A ladder of small models, trained for real, becomes a family file that reads back the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from gsreal.statistics import ladder
from gssim.workload.gradient_family import read_family


@pytest.mark.slow
def test_a_ladder_is_trained_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resnet = ladder.LADDERS["resnet"]
    rungs = tuple(
        replace(rung, model={"widths": [8, 8], "blocks": 1}, steps=rung.steps if rung.whole else 9, courses=1)
        for rung in resnet.rungs
        if rung.name in ("first", "batch-128")
    )
    monkeypatch.setattr(ladder, "LADDERS", {"resnet": replace(resnet, rungs=rungs)})
    monkeypatch.setattr(ladder, "EXPONENTS", {"learning rate": (1.0,), "width": (1.0,), "layers": (0.0,)})
    family = ladder.take_family("resnet", tmp_path / "trainings")
    ladder.write_family(tmp_path / "resnet.json", family)
    assert read_family(tmp_path / "resnet.json") == family
    assert {path.name for path in (tmp_path / "trainings").iterdir()} == {
        "resnet.first.json",
        "resnet.batch-128.json",
    }
