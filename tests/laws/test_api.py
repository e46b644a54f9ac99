"""The public Python API: what `import gssim` offers."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import gssim
from gssim.plan import Plan
from gssim.units import LIMITS

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "scenarios" / "demo.toml"
GPT2 = ROOT / "scenarios" / "gpt2-unequal-gpus.toml"
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
    assert json.loads(result.to_json()) == result.to_dict()  # lists, where fields are tuples


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


def test_scenarios_and_results_are_keys():
    """They are frozen and compare by value, but a set of them failed: unhashable type: 'dict'."""
    scenario = gssim.load(DEMO)
    other = scenario.with_({"plan.method": "ddp"})
    assert len({scenario, gssim.load(DEMO), other}) == 2
    results = [gssim.simulate(each) for each in (scenario, gssim.load(DEMO), other)]
    assert len(set(results)) == 2


def test_a_scenario_made_in_code_is_simulated_but_not_changed_by_keys():
    scenario = replace(gssim.load(DEMO), plan=Plan(method="single"))
    assert scenario.source is None
    assert gssim.simulate(scenario).step_time_s > 0
    with pytest.raises(gssim.UserError, match="was not loaded from a file"):
        scenario.with_({"run.steps": 3})
    with pytest.raises(gssim.UserError, match="was not loaded from a file"):
        gssim.search(scenario)
    apart = replace(scenario, plan=Plan(method="ddp", pp=2, micro_batches=3))  # each key is fine, together they are not
    with pytest.raises(gssim.UserError, match=r"demo: plan\.pp = 2: method 'ddp' for 1 replica"):
        gssim.simulate(apart)


def test_a_result_is_a_table_of_ranks():
    pytest.importorskip("polars")
    frame = gssim.simulate(gssim.load(DEMO, SMALL)).to_frame()
    assert frame["count"].sum() == 2
    assert frame["phase_forward_s"].dtype.is_numeric()
    peaks = [name for name in frame.columns if re.fullmatch(r"peak_\w+_bytes", name)]
    assert {"peak_parameters_bytes", "peak_allocated_bytes"} <= set(peaks)


def test_a_rank_is_named_by_its_number_or_its_class():
    """A number raised AttributeError."""
    changes = SMALL | {"plan.method": "ddp", "plan.shares.batch": [0.25, 0.75]}
    result = gssim.simulate(gssim.load(DEMO, changes))
    numbered = [result.imbalance_s(rank) for rank in (0, np.int64(1))]
    assert numbered == [result.imbalance_s(each) for each in result.ranks]
    assert result.imbalance_s(0) > 0 == result.imbalance_s(1)
    for wrong in (2, -1, 0.0, True, "0", {}):
        with pytest.raises(gssim.UserError, match=r"^rank = .*: must be a number from 0 to 1, or an entry of `ranks`$"):
            result.imbalance_s(wrong)


@pytest.mark.parametrize(
    ("samples", "shards", "message"),
    [
        ([16], [1.0], "samples = [16]: 1 of them for 2 ranks"),
        ([-8, 24], [0.5, 0.5], "samples = [-8, 24]: must be whole numbers of at least 0"),
        ([7.5, 8.5], [0.5, 0.5], "samples = [7.5, 8.5]: must be whole numbers of at least 0"),
        ([8, 9], [0.5, 0.5], "samples = [8, 9]: sum to 17, workload.global_batch_size is 16"),
        ([8, 8], [math.nan, 0.5], "shards = [nan, 0.5]: must be from 0 to 1 and sum to 1"),
        ([8, 8], [0.5], "shards = [0.5]: 1 of them for 2 ranks"),
        ([8, 8], [0.5, 0.6], "shards = [0.5, 0.6]: must be from 0 to 1 and sum to 1"),
    ],
)
def test_shares_that_no_ranks_can_have_are_refused(samples, shards, message):
    """Before, they gave a scenario for other ranks, with NaN or another batch, or pydantic's ValidationError."""
    scenario = gssim.load(DEMO, {"plan.shares.shards": "compute"})
    with pytest.raises(gssim.UserError, match=re.escape(message)):
        scenario.with_shares(samples, shards)


def test_tables_of_results_are_stacked_and_written_whatever_memory_they_tell_of(tmp_path):
    polars = pytest.importorskip("polars")
    offload = DEMO.with_name("llama2-13b-offload.toml")
    asked = [(DEMO, SMALL), (offload, {}), (offload, {"cluster.host.memory_bytes": "1 TB", "plan.recompute": "none"})]
    results = [gssim.simulate(gssim.load(*each)) for each in asked]
    assert [each.fits for each in results] == [True, True, False]
    frames = [each.to_frame() for each in results]
    for number, frame in enumerate(frames):
        frame.write_parquet(tmp_path / f"{number}.parquet")
    stacked = polars.concat(frames, how="diagonal")
    assert stacked.height == sum(frame.height for frame in frames)
    assert stacked["host_optimizer_bytes"].to_list()[-1] == results[-1].ranks[-1].host_bytes["optimizer"]
    assert stacked["outside_context_bytes"].to_list()[-1] == results[-1].ranks[-1].outside_bytes["context"]


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


def test_the_version_is_that_of_the_installed_package():
    from importlib.metadata import version

    assert gssim.__version__ == version("gssim")
    assert "__version__" in dir(gssim)


def test_importing_the_package_loads_nothing_but_itself():
    code = (
        "import sys, gssim; print([n for n in sys.modules if n.startswith('gssim.')]);"
        "import gssim.plan; print([n for n in ('simpy', 'polars', 'torch', 'gssim.scenario', 'gssim.network')"
        " if n in sys.modules]); gssim.UserError; gssim.__version__; print('simpy' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.splitlines() == ["[]", "[]", "False"]


# Misuse ---------------------------------------------------------------------------------------------------------------

CYCLE: dict[str, object] = {}
CYCLE["plan"] = CYCLE


class Hostile:
    """A value that cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no text")


NO_CHANGES = "changes must be a mapping of keys to values, or a list of texts KEY=VALUE"
WRONG_CHANGES = [
    (None, NO_CHANGES),
    (3, NO_CHANGES),
    ("run.steps=3", NO_CHANGES),
    (b"run.steps=3", NO_CHANGES),
    ([3], "changes: 3: must be a text KEY=VALUE"),
    ([b"run.steps=3"], "must be a text KEY=VALUE"),
    ([("run.steps", 3)], "must be a text KEY=VALUE"),
    (["run.steps"], "--set run.steps: must be KEY=VALUE"),
    (["plan.method=\udcff"], r"--set plan.method=\udcff: is no text in UTF-8"),
    ({None: 3}, "None: unknown key; allowed: name, question"),
    ({"": 3}, "must be KEY=VALUE"),
    ({"a\nb": 3}, r"a\nb: unknown key; allowed: name, question"),
    ({"run.steps": None}, "run.steps = None: must be a number, text, true or false"),
    ({"run.steps": 1j}, "run.steps = 1j: must be a number"),
    ({"run.steps": 10**5000}, "run.steps: Exceeds the limit"),
    ({"run.steps": Hostile()}, "run.steps = <Hostile>: must be a number"),
    ({"plan.method": "x" * 5000}, "plan.method = 'xxx"),
    ({"plan.shares.batch": []}, "plan.shares.batch: 0 shares for 2 ranks"),
    ({"plan": {3: "ddp"}}, "plan: 3: keys must be texts"),
    ({"plan": {"a b": 3}}, "plan.a b: unknown key"),
    ({"plan": CYCLE}, "plan: is nested too deep"),
]


def refusal(call, *arguments, **named):
    """Return the line of a call that is refused."""
    with pytest.raises(gssim.UserError) as refused:
        call(*arguments, **named)
    line = str(refused.value)
    assert line.isprintable()
    assert len(line.replace(str(DEMO), "demo.toml")) < 500
    return line


@pytest.mark.parametrize(("changes", "message"), WRONG_CHANGES)
def test_changes_that_are_none_are_refused_in_one_line(changes, message):
    assert message in refusal(gssim.load, DEMO, changes)
    assert message in refusal(gssim.load(DEMO).with_, changes)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        *(
            (value, "must be a path, or a mapping of keys to values")
            for value in (None, 3, b"x.toml", [DEMO], np.ones(2))
        ),
        ({}, "scenario: cluster: missing"),
        ({3: 4}, "scenario: 3: keys must be texts"),
        ({"name": "a/b", "cluster": "none.toml"}, "a-b: cluster = 'none.toml': no such file"),
        ({"plan": {"method": {"ddp"}}}, "scenario.plan.method = {'ddp'}: must be a number"),
        (CYCLE, "is nested too deep"),
        ("", ".: is a folder, not a file"),
        ("a\nb.toml", r"a\nb.toml: no such file"),
        ("a\0b.toml", r"a\x00b.toml: cannot be read: embedded null byte"),
        ("\ud800.toml", "cannot be read"),
    ],
)
def test_what_is_no_scenario_is_refused_in_one_line(scenario, message):
    assert message in refusal(gssim.load, scenario)


def test_a_device_without_an_end_is_read_up_to_the_limit(monkeypatch):
    monkeypatch.setitem(LIMITS, "file_bytes", (1000, "bytes"))
    assert "/dev/zero: 1,001 file bytes: at most 1,000 are allowed" in refusal(gssim.load, "/dev/zero")


def test_the_scenario_of_a_result_is_a_scenario(monkeypatch):
    monkeypatch.chdir(DEMO.parent)
    tables = {"name": "demo", "cluster": "clusters/two-cores.toml", "workload": {}}
    tables["workload"] = {"model": "models/gpt-byte-1m.toml", "global_batch_size": 8, "sequence_length": 128}
    scenario = gssim.load(tables, {"plan.method": "ddp"})
    assert gssim.load(gssim.simulate(scenario).scenario).scenario_id == scenario.scenario_id


def test_numbers_of_numpy_and_paths_are_values(monkeypatch):
    monkeypatch.chdir(DEMO.parent)
    changes = {
        "run.steps": np.int64(3),
        "plan.push.threshold": np.float64(1e-3),
        "plan.overlap": np.bool_(True),
        "plan.shares.batch": np.array([0.75, 0.25]),
        "cluster": Path("clusters/two-cores.toml"),
    }
    scenario = gssim.load(DEMO).with_(changes)
    assert (scenario.run.steps, scenario.plan.push.threshold, scenario.plan.overlap) == (3, 1e-3, True)
    assert scenario.plan.shares.batch == (0.75, 0.25)


@pytest.mark.parametrize("value", [None, str(DEMO), DEMO, {}, 3, gssim.Scenario, Hostile()])
def test_only_a_scenario_is_simulated_or_searched(value):
    for call in (gssim.simulate, gssim.search):
        assert "must be a Scenario, as gssim.load returns it" in refusal(call, value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, "must be a whole number") for value in ("2", 1.5, float("nan"), True, [1], np.float64(1))),
        *((value, "must be at least 1") for value in (0, -1, np.int64(0), -(10**5000))),
        (10**400, "processes: at most 1,024 are allowed"),
    ],
    ids=lambda value: type(value).__name__,  # some numbers have too many digits for a name
)
def test_counts_are_whole_positive_numbers(tmp_path, value, message):
    file = tmp_path / "few.toml"
    file.write_text(f'scenario = "{DEMO}"\n[axes]\n"plan.method" = ["ddp", "zero2"]\n')
    scenario = gssim.load(DEMO, SMALL)
    assert message in refusal(gssim.sweep, file, jobs=value)
    assert message in refusal(gssim.search, scenario, jobs=value)
    if "processes" not in message:
        assert message in refusal(gssim.search, scenario, top=value)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (3, "out = 3: must be a path that ends in .parquet or .csv"),
        (b"t.csv", "must be a path that ends in .parquet or .csv"),
        ("", "must end in .parquet or .csv"),
        ("folder", "out = 'folder': must end in .parquet or .csv"),
        ("t.xlsx", "out = 't.xlsx': must end in .parquet or .csv"),
        ("a\0.csv", "cannot be written: embedded null byte"),
        ("few.toml/t.csv", "few.toml is no folder"),
        ("ours.parquet", "ours.csv: is no table of gssim's, and --out ours.parquet would replace it"),
    ],
)
def test_a_sweep_s_table_is_written_to_a_place_for_one(tmp_path, monkeypatch, out, message):
    pytest.importorskip("polars")
    monkeypatch.chdir(tmp_path)
    Path("few.toml").write_text(f'scenario = "{DEMO}"\n[axes]\n"plan.method" = ["ddp", "zero2"]\n')
    Path("ours.csv").write_text("my,notes\n")
    assert message in refusal(gssim.sweep, "few.toml", SMALL, out=out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few.toml", "ours.csv"]


@pytest.mark.parametrize("path", [None, 3, ["few.toml"], b"few.toml", {}])
def test_a_sweep_is_named_by_its_path(path):
    assert "must be the path of a sweep file" in refusal(gssim.sweep, path)


FEW_PLANS = SMALL | {"search.methods": ["ddp", "zero2"], "search.recompute": ["none"], "search.batch": ["even"]}


def in_a_daemon(what, arguments):
    try:
        found = getattr(gssim, what)(gssim.load(DEMO, FEW_PLANS) if what == "search" else arguments[0], **arguments[1])
    except gssim.UserError as error:
        return str(error)
    return len(found)


def test_processes_of_a_pool_may_search_and_sweep(tmp_path):
    """'AssertionError: daemonic processes are not allowed to have children', whatever `jobs` was in a search."""
    pytest.importorskip("polars")
    sweep = tmp_path / "few.toml"
    sweep.write_text(f'scenario = "{DEMO}"\n[axes]\n"plan.method" = ["ddp", "zero2"]\n')
    asked = [("search", (None, {"top": 2})), ("sweep", (sweep, {"jobs": None})), ("sweep", (sweep, {"jobs": 2}))]
    with get_context("spawn").Pool(1) as pool:
        plans, points, refused = pool.starmap(in_a_daemon, asked)
    assert plans == len(gssim.search(gssim.load(DEMO, FEW_PLANS), top=2))
    assert points == 2
    assert refused == "jobs = 2: a daemonic process, as of multiprocessing.Pool, may start none; allowed: 1"


def test_changes_of_a_plan_that_does_not_fit_are_found_only_if_asked_for(monkeypatch):
    """They took ten times as long as the plan itself, in a loop over batches of which half do not fit."""
    scenario = gssim.load(GPT2, {"workload.global_batch_size": 228, "plan.method": "ddp"})
    advised = gssim.simulate(scenario)
    assert advised.does_not_fit is not None
    assert advised.remedies
    monkeypatch.setattr("gssim.api.with_suggested_changes", None)
    plain = gssim.simulate(scenario, remedies=False)
    assert plain.remedies == ()
    assert (plain.does_not_fit, plain.step_time_s) == (advised.does_not_fit, advised.step_time_s)


def test_scenarios_and_results_are_one_short_line_on_a_console():
    """All their values are megabytes."""
    scenario = gssim.load(DEMO, SMALL)
    assert repr(scenario).startswith("<Scenario 'demo': gs on 2 devices of ")
    assert repr(gssim.simulate(scenario)).startswith("<Result 'demo': gs, simulated step ")
    assert all(len(repr(each)) < 200 for each in (scenario, gssim.simulate(scenario)))
