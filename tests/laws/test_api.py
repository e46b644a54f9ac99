"""The public Python API: what `import gssim` offers."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gssim
from gssim.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "scenarios" / "demo.toml"
SMALL = {"run.steps": 3, "run.warmup_steps": 1}


def test_the_names_of_the_package_are_those_that_the_documentation_gives():
    assert sorted(gssim.__all__) == gssim.__all__
    assert set(gssim.__all__) <= set(dir(gssim))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        gssim.simulat  # noqa: B018
    assert (ROOT / "gssim" / "py.typed").is_file()


def test_a_scenario_is_simulated_as_the_command_does(gssim):
    import json

    import gssim as api

    code, out, _ = gssim("run", DEMO, "--json", "--set", "plan.method=zero2")
    result = api.simulate(api.load(DEMO, {"plan.method": "zero2"}))
    assert code == 0
    assert result.to_json() == out
    assert json.loads(result.to_json()) == json.loads(json.dumps(result.to_dict()))


def test_changes_are_validated_like_a_file():
    scenario = gssim.load(DEMO)
    faster = scenario.with_({"plan.method": "zero2", "plan.shares.batch": (0.75, 0.25)})
    assert (faster.plan.method, faster.plan.shares.batch) == ("zero2", (0.75, 0.25))
    assert faster.with_(["run.steps=7"]).run.steps == 7
    assert faster.with_({"run.steps": 7}).plan.method == "zero2"
    assert scenario.plan.method != "zero2"
    with pytest.raises(gssim.UserError, match=r"demo\.toml: plan\.metod: unknown key"):
        scenario.with_({"plan.metod": "ddp"})
    with pytest.raises(gssim.UserError, match=r"plan\.shares\.batch .*sums to 1\.1"):
        scenario.with_({"plan.shares.batch": [0.85, 0.25]})
    with pytest.raises(gssim.UserError, match=r"run\.steps = <object object"):
        scenario.with_({"run.steps": object()})
    with pytest.raises(gssim.UserError, match="must be a mapping"):
        scenario.with_("run.steps=7")


def test_what_the_api_refuses_is_the_line_that_the_command_prints(gssim):
    import gssim as api

    code, _, err = gssim("run", DEMO, "--set", "plan.tp=3")
    with pytest.raises(api.UserError) as refused:
        api.load(DEMO, {"plan.tp": 3})
    assert code == 2
    assert str(refused.value) in err
    with pytest.raises(api.UserError, match=r"nowhere\.toml"):
        api.load("nowhere.toml")


def test_a_dense_scenario_becomes_a_thresholded_one():
    dense = gssim.load(DEMO, {**SMALL, "plan.method": "ddp"})
    thresholded = dense.with_(
        {"plan.method": "gs", "plan.push.threshold": 3e-3, "workload.gradients": "gradients/gpt-byte-1m.json"}
    )
    result = gssim.simulate(thresholded)
    assert 0 < result.density.push < 0.5
    assert gssim.simulate(dense).density.push is None


def test_a_mapping_of_the_same_keys_is_a_scenario(monkeypatch):
    import tomllib

    monkeypatch.chdir(DEMO.parent)  # the files that it names are looked up in the working directory
    tables = tomllib.loads(DEMO.read_text(encoding="utf-8"))
    scenario = gssim.load({"name": "demo", **tables}, {"plan.method": "zero2"})
    tables["plan"]["method"] = "nonsense"  # of no effect afterwards
    from_file = gssim.load(DEMO, {"plan.method": "zero2"})
    assert scenario.scenario_id == from_file.scenario_id
    assert gssim.simulate(scenario).step_time_s == gssim.simulate(from_file).step_time_s
    assert scenario.with_({"plan.method": "ddp"}).plan.method == "ddp"
    with pytest.raises(gssim.UserError, match=r"^demo: plan\.method = 'nonsense'"):
        gssim.load({"name": "demo", **tables})
    with pytest.raises(gssim.UserError, match="was not loaded from a file"):
        gssim.search(scenario)


def test_a_scenario_made_in_code_is_simulated_but_not_changed_by_keys():
    scenario = replace(gssim.load(DEMO), plan=Plan(method="single"))
    assert scenario.source is None
    assert gssim.simulate(scenario).step_time_s > 0
    with pytest.raises(gssim.UserError, match="was not loaded from a file"):
        scenario.with_({"run.steps": 3})
    with pytest.raises(gssim.UserError, match="was not loaded from a file"):
        gssim.search(scenario)


def test_a_result_is_a_table_of_ranks():
    pytest.importorskip("polars")
    frame = gssim.simulate(gssim.load(DEMO, SMALL)).to_frame()
    assert frame["count"].sum() == 2
    assert frame["phase_forward_s"].dtype.is_numeric()
    peaks = [name for name in frame.columns if re.fullmatch(r"peak_\w+_bytes", name)]
    assert {"peak_parameters_bytes", "peak_allocated_bytes"} <= set(peaks)


def test_a_sweep_is_a_table(tmp_path):
    pytest.importorskip("polars")
    file = tmp_path / "few.toml"
    file.write_text(f'scenario = "{DEMO}"\n[axes]\n"plan.method" = ["ddp", "zero2"]\n"plan.micro_batches" = [1, 3]\n')
    table = gssim.sweep(file, SMALL)
    assert table.height == 4
    assert set(table["status"]) <= {"fits", "invalid", "does-not-fit", "ok"}
    assert gssim.sweep(file, SMALL, out=tmp_path / "table.csv").equals(table)
    assert (tmp_path / "table.parquet").is_file()
    with pytest.raises(gssim.UserError, match="jobs = 0"):
        gssim.sweep(file, jobs=0)


def test_a_search_gives_the_best_plans_in_order():
    scenario = gssim.load(DEMO, {**SMALL, "search.methods": ["ddp", "zero2"], "search.micro_batches": [1]})
    best = gssim.search(scenario, top=2, jobs=1)
    ranked = [result for result in best if result.provenance["search"]["rank"]]
    assert [result.provenance["search"]["rank"] for result in ranked] == [1, 2]
    assert ranked[0].step_time_s <= ranked[1].step_time_s
    with pytest.raises(gssim.UserError, match="top = 0"):
        gssim.search(scenario, top=0)


def test_importing_the_package_loads_nothing_but_itself():
    code = (
        "import sys, gssim; print([n for n in sys.modules if n.startswith('gssim.')]);"
        "import gssim.plan; print([n for n in ('simpy', 'polars', 'torch', 'gssim.scenario', 'gssim.network')"
        " if n in sys.modules]); gssim.UserError; print('simpy' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.splitlines() == ["[]", "[]", "False"]
