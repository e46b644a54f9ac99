"""Devices that a plan leaves out are left out on purpose, and named; measurements still answer the same questions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from strategies import cluster_of, loaded_of, scenario_of, write_files

from gssim.cli import main
from gssim.errors import UserError
from gssim.plan import METHODS
from gssim.planner import Search, suggested_changes
from gssim.scenario import SearchSpace, check
from gssim.simulation import simulate
from gssim.sweeps import outcome
from gssim.terminal import print_result

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


def star(ranks: int):
    return cluster_of([(f"d{i}", "sw") for i in range(ranks)], devices=ranks)


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(star(max(numbers) + 1).devices[number].name for number in numbers)


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("tensor", "gs_tp", "gs_wgrad")])
def test_every_device_of_the_cluster_is_used_or_named(method, capsys):
    """Those that need a model that can be cut are resolved in test_plan."""
    micro_batches = 4 if method == "pipeline" else 1
    for ranks in (None, 1 if method == "single" else 2):
        plan = {"method": method, "ranks": ranks, "micro_batches": micro_batches}
        scenario = scenario_of(star(4), plan, run={"steps": 8, "warmup_steps": 2})  # whole periods, compressed steps
        result = simulate(loaded_of(scenario)).result
        used = [rank for entry in result.ranks for rank in entry.ranks]
        assert len(used) + len(result.idle_devices) == 4
        assert result.idle_devices == names(0, 1, 2, 3)[len(used) :]
        assert len(used) == (1 if method == "single" else ranks or 4)
        assert outcome(result)["idle_devices"] == len(result.idle_devices)
        print_result(result)
        shown = capsys.readouterr().out
        assert ("idle: " in shown) == (len(used) < 4)
        assert all(name in shown for name in result.idle_devices)


def test_who_a_scenario_is_hangs_on_the_ranks_and_not_on_how_they_are_asked_for():
    whole, asked = (scenario_of(star(2), {"method": "ddp", "ranks": ranks}) for ranks in (None, 2))
    assert asked.scenario_id == whole.scenario_id
    fewer = [scenario_of(star(4), {"method": "gs", "ranks": ranks}) for ranks in (None, 2)]
    assert len({each.scenario_id for each in fewer}) == 2
    assert "ranks" not in whole.resolved()["plan"]
    assert asked.resolved()["plan"]["ranks"] == 2


def test_check_and_sweeps_say_how_many_of_the_devices_are_used(tmp_path, monkeypatch, capsys):
    path = write_files(tmp_path)
    monkeypatch.setattr("sys.argv", ["gssim", "check", str(path), "--set", "plan.ranks=1", "--set", "plan.method=gs"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "gs on 1 ranks (idle: b (1 device takes no part)), " in capsys.readouterr().out
    (tmp_path / "sweep.toml").write_text('scenario = "scenario.toml"\n[axes]\nplan.method = ["single", "ddp"]\n')
    monkeypatch.setattr("sys.argv", ["gssim", "sweep", str(tmp_path / "sweep.toml"), "--jobs", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    rows = [line.split("│")[2].strip() for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert rows == ["1 of 2", "2"]


def test_a_search_leaves_devices_out_by_the_same_key():
    loaded = loaded_of(scenario_of(star(4), {"method": "ddp"}))
    search = Search(loaded, SearchSpace(devices=(4, 2), methods=("ddp", "zero3", "single"), recompute=("none",)), top=1)
    search.prepare()
    plans = [candidate.plan for _, candidate in search.bounded]
    assert {(plan.method, plan.ranks) for plan in plans} == {
        ("ddp", None), ("ddp", 2), ("zero3", None), ("zero3", 2), ("single", None)
    }  # fmt: skip
    for plan in plans:
        check(replace(loaded.scenario, plan=plan), file="test")
    asked = loaded_of(scenario_of(star(4), {"method": "ddp", "ranks": 2}))
    few = Search(asked, SearchSpace(methods=("ddp", "zero3")), top=1)
    few.prepare()
    assert {candidate.plan.ranks for _, candidate in few.bounded} == {2}


def test_more_ranks_are_advised_of_those_that_take_part():
    scenario = scenario_of(star(4), {"method": "zero3", "ranks": 2})
    changes = {each.change: each for each in suggested_changes(loaded_of(scenario))}
    more = {each.change for each in suggested_changes(loaded_of(scenario_of(star(2), {"method": "zero3"})))}
    assert set(changes) == more
    assert "2 times the ranks" in changes


def test_a_plan_that_leaves_devices_idle_unasked_is_refused_in_one_line():
    with pytest.raises(UserError) as told:
        scenario_of(star(4), {"method": "gs", "dp_shard": 2})
    assert str(told.value) == (
        "made: plan.dp_shard = 2: makes 2 of the 4 devices of the cluster; allowed: plan.dp_shard = 4, "
        "or plan.ranks = 2, which leaves the other devices out"
    )


def test_results_keep_the_names_of_idle_devices():
    result = simulate(loaded_of(scenario_of(star(3), {"method": "gs", "ranks": 2}))).result
    assert json.loads(result.to_json())["idle_devices"] == list(names(2))
