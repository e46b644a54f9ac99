"""Golden: every shipped scenario gives the result that is kept in tests/golden, which changes on purpose only.

`GSSIM_UPDATE_GOLDEN=1 python -m pytest tests/golden/test_golden.py` rewrites them; the difference in review
is the discussion.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gssim.execution.files import write_text
from gssim.result import Result
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.terminal import rank_list
from gssim.units import validated

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("gpt3-1024-3d", "gpt3-65536", "llama3-70b-context", "mt-nlg-280-dgx")
"""Plans of thousands of GPUs, and of rings of many layers, each of which takes several seconds on a busy core."""
SCENARIOS = [
    pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else [], id=path.stem)
    for path in sorted((ROOT / "scenarios").glob("*.toml"))
]
GOLDEN = ROOT / "tests" / "golden"
UPDATE = bool(os.environ.get("GSSIM_UPDATE_GOLDEN"))
HINT = "if that is meant, rewrite it with GSSIM_UPDATE_GOLDEN=1"
TOLERANCE = 1e-9
"""Relative: sums in another order by another numpy are no change."""


def compact(result):
    """Return what a scenario's result says, without what depends on versions and without the scenario itself."""
    return {
        "scenario_id": result.scenario_id,
        "step_time_s": result.step_time_s,
        "phases_s": result.phases_s,
        "density": {"push": result.density.push, "publish": result.density.publish},
        "collectives": [[e.kind, ranks_of(e.group), e.bytes, e.count, e.payload_bytes] for e in result.collectives],
        "ranks": [
            {
                "ranks": ranks_of(entry.ranks),
                "peak_allocated_bytes": entry.peak_allocated_bytes,
                "peak_reserved_bytes": entry.peak_reserved_bytes,
                "batch_share": entry.batch_share,
                "shard_share": entry.shard_share,
            }
            for entry in result.ranks
        ],
        "links": {link.name: [link.bytes, link.utilisation_ratio] for link in result.links},
    } | ({} if result.periods is None else {"periods": json.loads(json.dumps(result.to_dict()["periods"]))})


def ranks_of(ranks):
    """Return few ranks as they are, many as runs."""
    return list(ranks) if len(ranks) <= 64 else rank_list(ranks)


def differences(now, before, path=""):
    """Return where two values differ, as lines."""
    if isinstance(now, dict) and isinstance(before, dict) and now.keys() == before.keys():
        return [line for key in now for line in differences(now[key], before[key], f"{path}.{key}".lstrip("."))]
    if isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        pairs = enumerate(zip(now, before, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}[{i}]")]
    if isinstance(now, float) and isinstance(before, (int, float)) and not isinstance(before, bool):
        return [] if math.isclose(now, before, rel_tol=TOLERANCE, abs_tol=0.0) else [f"{path}: {now!r}, was {before!r}"]
    return [] if now == before else [f"{path}: {now!r}, was {before!r}"]


@pytest.mark.parametrize("path", SCENARIOS)
def test_a_shipped_scenario_gives_the_kept_result(path):
    kept = GOLDEN / f"{path.stem}.json"
    result = simulate(load_scenario(path)).result
    written = result.to_json()
    again = validated(Result, json.loads(written), file="written").to_json()  # read back, it is the same
    assert again == written
    found = compact(result)
    if UPDATE:
        write_text(kept, json.dumps(found, indent=1) + "\n")
    assert kept.exists(), f"there is no {kept.name}; {HINT}"
    changed = differences(found, json.loads(kept.read_text(encoding="utf-8")))
    assert changed == [], HINT


def test_every_kept_result_is_of_a_shipped_scenario():
    known = {path.id for path in SCENARIOS}
    assert {path.stem for path in GOLDEN.glob("*.json")} <= known


def test_differences_are_told_apart_from_rounding():
    before = {"a": [1.0, {"b": 2.0}], "n": 3, "none": None}
    assert differences({"a": [1.0 + 1e-12, {"b": 2.0}], "n": 3, "none": None}, before) == []
    assert differences({"a": [1.0, {"b": 2.0 + 1e-8}], "n": 3, "none": None}, before) == ["a[1].b: 2.00000001, was 2.0"]
    assert differences({"a": [1.0, {"b": 2.0}], "n": 4, "none": None}, before) == ["n: 4, was 3"]
    assert differences({"a": [1.0], "n": 3, "none": 0.0}, before) == [
        "a: [1.0], was [1.0, {'b': 2.0}]",
        "none: 0.0, was None",
    ]


DEMO = str(ROOT / "scenarios" / "demo.toml")
TWICE = (("plan.push.threshold=3e-4",), ("plan.push.threshold=1e-3", "plan.shares.shards=[0.7,0.3]"), ())
PRINTS = f"""
from contextlib import suppress
import sys
from gssim.cli.commands import main
for changes in {TWICE}:
    sys.argv = ["gssim", "run", {DEMO!r}, "--json", *(f"--set={{change}}" for change in ("run.steps=8", *changes))]
    with suppress(SystemExit):
        main()
"""


@pytest.mark.slow  # tests/laws/test_cli.py compares one command
def test_two_processes_print_the_same_bytes(gssim):
    """Whatever order the processes' sets and hashes have: this one's is as it happens."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    other = subprocess.run(
        [sys.executable, "-c", PRINTS],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    settings = ([f"--set={change}" for change in ("run.steps=8", *changes)] for changes in TWICE)
    assert "".join(gssim("run", DEMO, "--json", *each)[1] for each in settings) == other
    assert other.count('"source": "simulated"') == len(TWICE)
