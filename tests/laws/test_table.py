"""A sweep's table: what a row says, and the files that it becomes."""

import builtins
import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from strategies import write_files

from gssim.errors import UserError
from gssim.result import CATEGORIES, PHASES
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.sweeps import (
    POINT_COLUMNS,
    RESULT_COLUMNS,
    check_table_place,
    columns_of,
    outcome,
    table_of,
    without_outcome,
    write_table,
)
from gssim.terminal import print_result, print_results, print_table


@pytest.fixture
def result(tmp_path):
    write_files(tmp_path)
    return simulate(load_scenario(tmp_path / "scenario.toml", ["plan.method=gs", "plan.push.threshold=1e-3"])).result


def test_a_row_says_what_the_result_does(result):
    row = outcome(result)
    assert row.keys() == RESULT_COLUMNS.keys()
    assert row["step_time_s"] == result.step_time_s
    assert sum(row[f"{phase}_s"] for phase in PHASES) == pytest.approx(result.step_time_s)
    assert row["status"] == ("fits" if result.fits else "does not fit")
    assert row["peak_allocated_bytes"] == max(each.peak_allocated_bytes for each in result.ranks)
    assert row["bytes_sent_per_step"] == sum(each.bytes_sent * each.count for each in result.ranks)
    assert row["push_density_ratio"] == result.density.push
    assert row["ranks"] == 2
    assert (row["global_batch_size"], row["sequence_length"]) == (
        result.scenario["workload"]["global_batch_size"],
        result.scenario["workload"]["sequence_length"],
    )
    lacking = {**result.scenario, "workload": {"model": {"name": "of another program"}}}
    assert outcome(replace(result, scenario=lacking))["sequence_length"] is None


FAST = [f"cluster.links.{link}.{key}" for link in range(4) for key in ("bandwidth_bytes_per_s=1e15", "latency_s=0")]


@pytest.mark.parametrize("changes", [[], ["cluster.topology.devices.0.count=256"], ["plan.method=single"]])
@pytest.mark.parametrize("method", ["zero2", "gs"])
def test_a_prediction_that_lists_no_links_has_the_row_of_one_that_does(method, changes):
    of_hosts = ["cluster=scenarios/clusters/t4-hosts.toml", "workload.global_batch_size=256", f"plan.method={method}"]
    loaded = load_scenario(Path("scenarios/demo.toml"), [*of_hosts, *changes])
    listed, short = (simulate(loaded, listed=listed).result for listed in (True, False))
    assert outcome(short) == outcome(listed)
    assert len(short.links) == (loaded.scenario.ranks > 1)
    assert not short.collectives


@pytest.mark.parametrize("method", ["ddp", "zero3"])
def test_what_a_rank_waits_on_an_infinitely_fast_network_is_for_slower_ranks(method, capsys):
    """Exposed communication of unequal devices was one figure, most of which no network would take away."""
    scenario = Path(__file__).parents[2] / "scenarios" / "gpt2-unequal-gpus.toml"
    shares = [f"plan.method={method}", "plan.shares.batch=even", "run.steps=2", "run.warmup_steps=1"]
    slow, fast = (simulate(load_scenario(scenario, [*shares, *links])).result for links in ([], FAST))
    row = outcome(fast)
    assert row["imbalance_s"] == pytest.approx(row["exposed_communication_s"], rel=0.02)
    a100, v100 = fast.ranks[0], fast.ranks[-1]
    assert fast.imbalance_s(a100) == pytest.approx(v100.compute_s - a100.compute_s, rel=1e-4)
    assert fast.imbalance_s(v100) == pytest.approx(0, abs=1e-6)
    assert outcome(slow)["imbalance_s"] == pytest.approx(row["imbalance_s"], rel=0.05)
    assert slow.to_frame()["imbalance_s"].to_list() == [slow.imbalance_s(each) for each in slow.ranks]
    print_result(slow)
    said = capsys.readouterr().out.splitlines()
    (row,) = [line for line in said if "of which for slower ranks" in line]
    assert row.split("│")[3].strip() == "< 1%"
    assert not any("samples" in line and "│" in line for line in said)  # all ranks have as many
    assert sum(line.startswith("errors on published runs") for line in said) == 1
    ranks = tuple(replace(each, device="this machine's") for each in slow.ranks)
    print_result(replace(slow, source="measured", ranks=ranks))
    assert "errors on published runs" not in capsys.readouterr().out


def test_rates_that_were_assumed_are_named(capsys):
    """A cluster of `gssim cluster --detect` was predicted four times too fast, and its rates seemed to be known."""
    scenario = Path(__file__).parents[2] / "scenarios" / "gpt2-unequal-gpus.toml"
    asked = ["run.steps=1", "run.warmup_steps=0"]
    source = "cluster.device_types.v100-sxm2-32.source='assumed from its clock'"
    for changes, times in ((asked, 0), ([*asked, source], 1)):
        print_result(simulate(load_scenario(scenario, changes)).result)
        assert capsys.readouterr().out.count("rates of v100-sxm2-32: assumed from its clock") == times


def test_samples_and_shards_that_differ_between_ranks_are_printed(capsys):
    """The shares that a plan resolves to were in the JSON alone, though they are what an unequal cluster asks for."""
    scenario = Path(__file__).parents[2] / "scenarios" / "gpt2-unequal-gpus.toml"
    asked = ["plan.shares.batch=[0.375, 0.375, 0.125, 0.125]", "run.steps=2", "run.warmup_steps=1"]
    print_result(simulate(load_scenario(scenario, asked)).result)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    (samples,) = [row[1:] for row in cells if row and row[0] == "samples"]
    assert samples == ["12", "4"]


def test_memory_by_category_is_of_the_tightest_rank_and_fills_its_device(result):
    row = outcome(result)
    allocated = sum(row[f"tightest_{category}_bytes"] for category in CATEGORIES)
    assert allocated + row["tightest_outside_bytes"] + row["margin_bytes"] == pytest.approx(row["capacity_bytes"])
    assert row["tightest_rank"] == result.margin.rank


def test_what_does_not_fit_says_so(tmp_path):
    write_files(tmp_path)
    cluster = tmp_path / "pair.toml"
    text = cluster.read_text()
    assert "memory_bytes" in text
    lines = ["memory_bytes = 1000" if line.startswith("memory_bytes") else line for line in text.splitlines()]
    cluster.write_text("\n".join(lines))
    row = outcome(simulate(load_scenario(tmp_path / "scenario.toml")).result)
    assert row["status"] == "does not fit"
    assert row["reason"].startswith(f"rank {row['tightest_rank']} lacks ")
    assert row["margin_bytes"] < 0


def test_both_files_hold_the_same_table_with_nothing_where_nothing_is_known(tmp_path, result):
    columns = columns_of({"plan.push.threshold": float, "cluster": str})
    point = {"point": "a--b", "group": "a", "variant": None, "plan.push.threshold": float("inf")}
    rows = [point | outcome(result), point | without_outcome("invalid", "plan.tp = 3: is no divisor")]
    table = table_of(rows, columns)
    write_table(table, tmp_path / "t.csv", metadata={"question": "Which?"})
    assert list(columns) == [*POINT_COLUMNS, "plan.push.threshold", *RESULT_COLUMNS]
    parquet = pl.read_parquet(tmp_path / "t.parquet")
    assert parquet.equals(table)
    assert pl.read_csv(tmp_path / "t.csv", schema=parquet.schema).equals(table)
    assert pl.read_parquet_metadata(tmp_path / "t.parquet")["question"] == "Which?"
    assert parquet["step_time_s"].to_list() == [result.step_time_s, None]


def test_without_polars_there_is_an_instruction(tmp_path, monkeypatch, result):
    usual = builtins.__import__

    def imported(name, *rest):
        if name == "polars":
            raise ImportError(name)
        return usual(name, *rest)

    monkeypatch.setattr(builtins, "__import__", imported)
    monkeypatch.delitem(sys.modules, "polars", raising=False)
    with pytest.raises(UserError, match=r"a table needs polars: pip install 'gssim\[analysis\]'"):
        check_table_place(Path(tmp_path / "t.parquet"))
    with pytest.raises(UserError, match="a table needs polars"):
        result.to_frame()


@pytest.mark.parametrize("columns", [30, 44, 60, 80])
def test_no_figure_of_a_point_is_cut_off_in_a_narrow_terminal(columns, result, capsys, monkeypatch):
    """If the columns do not fit beside one another, the table is transposed: each point is a column."""
    monkeypatch.setattr("gssim.terminal.PIPE_WIDTH", columns)
    rows = [{"point": f"a--{n}", "group": "a", "variant": f"{n}"} | outcome(result) for n in range(3)]
    print_table(table_of(rows, columns_of({})), "")
    print_results([result] * 3, "")
    print_result(result)
    said = capsys.readouterr().out
    assert "…" not in said
    assert all(len(line) <= columns for line in said.splitlines())
    assert f"{result.throughput_samples_per_s:.4g}" in said


def test_of_many_points_those_of_the_highest_throughput_are_shown(result, capsys):
    """The step of the smallest batch is the shortest, and says little."""
    rows = [
        {"point": f"a--{n}", "group": "a", "variant": f"{n}"}
        | outcome(replace(result, step_time_s=1.0 + n, throughput_samples_per_s=10.0 + n))
        for n in range(60)
    ]
    print_table(table_of(rows, columns_of({})), "")
    said = capsys.readouterr().out
    assert "60 points: 60 fit; the fastest of those that fit" in said
    shown = [line.split("│")[1].strip() for line in said.splitlines() if line.startswith("│")]
    assert shown == [f"a--{n}" for n in range(59, 47, -1)]


def test_why_points_have_no_prediction_is_printed_once_for_each_reason(result, capsys):
    columns = columns_of({})
    reasons = ["plan.tp = 3: is no divisor"] * 2 + ["no such file"]
    rows = [{"point": "a--b", "group": "a", "variant": "b"} | outcome(result)]
    rows += [
        {"point": f"a--{n}", "group": "a", "variant": "c"} | without_outcome("invalid", r)
        for n, r in enumerate(reasons)
    ]
    print_table(table_of(rows, columns), "Which?")
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["invalid: 2 points: plan.tp = 3: is no divisor", "invalid: 1 point: no such file"]


def test_names_of_points_are_whole_in_a_narrow_terminal(result, capsys, monkeypatch):
    monkeypatch.setattr("gssim.terminal.PIPE_WIDTH", 80)
    points = [f"network--zero3--ib-ndr-400--count-{n}" for n in (2, 4)]
    rows = [{"point": point, "group": "network", "variant": "zero3"} | outcome(result) for point in points]
    for _ in range(2):  # a second table begins anew
        print_table(table_of(rows, columns_of({})), "Which?")
        said = capsys.readouterr().out
        names = "".join(line.split("│")[1].strip() for line in said.splitlines() if line.startswith("│"))
        assert names == "".join(points)
