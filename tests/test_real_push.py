"""Real: every policy of a push does what its definition says, on real ranks with known gradients."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from real_runs import TESTS

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

UNEVEN = [[0.5, 0.3, 0.2], [0.25, 0.25, 0.5], [0.0, 0.6, 0.4], [0.5, 0.3, 0.2]]
"""Parts of the loss terms, step by step; once a rank has none. Two ranks take the first two, whatever their sum."""
CASES: dict[str, dict[str, Any]] = {
    "dense": {"push": {}, "weights": UNEVEN},
    "zero": {"push": {"threshold": 0}, "weights": UNEVEN},
    "absolute": {"push": {"threshold": 0.3, "error_feedback": False}},
    "absolute-kept": {"push": {"threshold": 0.3, "error_feedback": True}, "weights": UNEVEN},
    "absolute-kept-bf16": {
        "push": {"threshold": 0.3, "error_feedback": True, "error_feedback_precision": "bf16"},
        "weights": UNEVEN,
    },
    "relative": {"push": {"threshold": 2, "kind": "relative", "error_feedback": False}, "weights": UNEVEN},
    "relative-kept": {"push": {"threshold": 2, "kind": "relative", "error_feedback": True, "encoding": "bitmap"}},
    "target": {
        "push": {"threshold": 0.1, "kind": "target-density", "error_feedback": False, "reestimate_steps": 2},
        "weights": UNEVEN,
    },
    "target-kept": {
        "push": {"threshold": 0.1, "kind": "target-density", "error_feedback": True, "reestimate_steps": 2},
    },
    "received": {
        "push": {"threshold": 0.3, "aggregate": "received-weight", "error_feedback": False},
        "weights": UNEVEN,
    },
    "received-kept-dense": {
        "push": {"threshold": 1, "aggregate": "received-weight", "error_feedback": True, "encoding": "dense"},
    },
    "received-bitmap": {"push": {"threshold": 1, "aggregate": "received-weight", "encoding": "bitmap"}},
    "warm": {
        "push": {
            "threshold": 0.1,
            "kind": "target-density",
            "warmup_steps": 2,
            "encoding": "coo",
            "error_feedback": True,
        },
    },
    "bfloat16-kept": {"push": {"threshold": 0.3, "error_feedback": True}, "dtype": "bfloat16"},
    "bfloat16-kept-bf16": {
        "push": {"threshold": 0.3, "error_feedback": True, "error_feedback_precision": "bf16", "encoding": "dense"},
        "dtype": "bfloat16",
    },
    "float64-received": {
        "push": {"threshold": 0.3, "aggregate": "received-weight", "error_feedback": True},
        "dtype": "float64",
        "weights": UNEVEN,
    },
}


@pytest.fixture(scope="module", params=[2, 3])
def everybodys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run all cases of one number of ranks in one launch; return what each rank found."""
    from gsreal.launch import launch

    folder: Path = tmp_path_factory.mktemp(f"push{request.param}")
    (folder / "cases.json").write_text(json.dumps(CASES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
        launch("push_ranks", [str(folder / "cases.json"), str(folder / "found.json")], ranks=request.param)
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_owners_get_what_the_definition_says(everybodys: list[dict[str, Any]], name: str) -> None:
    for found in (each[name] for each in everybodys):
        assert found["largest"] > 0.5
        assert found["difference"] <= 1e-6 * found["largest"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["push"].get("error_feedback")])
def test_what_is_not_sent_is_kept(everybodys: list[dict[str, Any]], name: str) -> None:
    for found in (each[name] for each in everybodys):
        assert found["kept"] > 0.1
        assert found["residual_difference"] <= 1e-6


@pytest.mark.parametrize("name", CASES)
def test_two_runs_are_bit_identical(everybodys: list[dict[str, Any]], name: str) -> None:
    assert all(each[name]["identical"] for each in everybodys)


def test_realised_densities_are_those_asked_for(everybodys: list[dict[str, Any]]) -> None:
    for found in everybodys:
        assert found["dense"]["density"] == 1
        assert 0.07 < found["target"]["density"] < 0.13
        assert 2 / 5 < found["warm"]["density"] < 2 / 5 + 0.1
        assert 0.02 < found["absolute"]["density"] < 0.6
