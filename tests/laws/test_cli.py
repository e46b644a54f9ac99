import json
import subprocess
import sys
from pathlib import Path

import pytest
from strategies import SCENARIO_TOML, write_files

from gssim.result import read_result


def test_check_says_what_it_understood(gssim, tmp_path):
    path = write_files(tmp_path)
    code, out, err = gssim("check", path, path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{path}: ddp on 2 ranks, ")


def test_run_prints_a_table_for_people(gssim, tmp_path):
    code, out, err = gssim("run", write_files(tmp_path))
    assert (code, err) == (0, "")
    assert "On two equal hosts, does anything beat all-reduce?" in " ".join(out.split())
    assert "all-reduce" in out
    assert not list(tmp_path.glob("*.simulated.json"))


def test_run_json_prints_exactly_one_result(gssim, tmp_path):
    code, out, err = gssim("run", write_files(tmp_path), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["source"] == "simulated"


def test_out_writes_the_same_result_that_json_prints(gssim, tmp_path):
    code, out, _ = gssim("run", write_files(tmp_path), "--json", "--out", tmp_path / "results")
    assert code == 0
    (written,) = (tmp_path / "results").iterdir()
    assert written.read_text() == out
    result = read_result(written)
    assert written.name == f"scenario.{result.scenario_id}.simulated.json"


def test_the_same_command_twice_prints_the_same_bytes(gssim, tmp_path):
    path = write_files(tmp_path)
    command = ("run", path, "--json", "--set", "plan.method=gs", "--set", "plan.push.threshold=1e-3")
    first, second = gssim(*command), gssim(*command)
    assert first == second
    assert first[0] == 0


def test_another_process_prints_the_same_bytes(gssim, tmp_path):
    path = write_files(tmp_path)
    command = ["run", str(path), "--json", "--set", "plan.method=zero2"]
    call = [sys.executable, "-c", "from gssim.cli.commands import main; main()", *command]
    other = subprocess.run(call, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert other.stdout == gssim(*command)[1]


def test_set_changes_the_answer(gssim, tmp_path):
    path = write_files(tmp_path)
    scenario = json.loads(gssim("run", path, "--json", "--set", "plan.method=gs", "--set", "run.seed=3")[1])["scenario"]
    assert (scenario["plan"]["method"], scenario["run"]["seed"]) == ("gs", 3)


def test_unfolding_changes_nothing_that_is_printed_but_rounding(gssim, tmp_path):
    path = write_files(tmp_path)
    folded, unfolded = (json.loads(gssim("run", path, "--json", *more)[1]) for more in ((), ("--unfold",)))
    assert unfolded["step_time_s"] == pytest.approx(folded["step_time_s"], rel=1e-9)
    assert [entry["ranks"] for entry in unfolded["ranks"]] == [entry["ranks"] for entry in folded["ranks"]]


@pytest.mark.parametrize(("precision", "warns"), [("fp32", False), ("bf16", True)])
def test_bytes_that_are_scaled_to_another_precision_are_a_notice(gssim, precision, warns):
    llama = Path(__file__).parents[1] / "helpers" / "models" / "llama.toml"
    two_hosts = Path(__file__).parents[2] / "scenarios" / "gpt2-half.toml"
    changes = [f"workload.model={llama}", "workload.sequence_length=24", f"workload.precision={precision}"]
    said = [word for change in changes for word in ("--set", change)]
    code, out, _err = gssim("run", two_hosts, *said)
    assert code == 0
    assert ("'small-llama' is traced in fp32, not in bf16" in " ".join(out.split())) == warns
    provenance = json.loads(gssim("run", two_hosts, *said, "--json")[1])["provenance"]
    assert ("'small-llama' is traced in fp32" in provenance.get("scaled_bytes", "")) == warns


def test_timing_goes_to_stderr(gssim, tmp_path):
    code, out, err = gssim("run", write_files(tmp_path), "--json", "--timing")
    assert code == 0
    assert [part.partition("=")[0] for part in err.split()] == ["load_s", "simulate_s"]
    json.loads(out)


def test_trace_is_a_chrome_trace(gssim, tmp_path):
    code, out, _ = gssim("run", write_files(tmp_path), "--json", "--trace", tmp_path / "t.json")
    assert code == 0
    trace = json.loads((tmp_path / "t.json").read_text())
    assert {"forward h.0", "optimizer"} <= {event["name"] for event in trace["traceEvents"]}
    result = json.loads(out)
    keys = ("source", "scenario_id", "calibration_id", "step_time_s")
    about = {key: result[key] for key in keys} | {"name": result["scenario"]["name"]}
    assert {key: value for key, value in trace["otherData"].items() if key != "step_start_s"} == about


def test_a_plan_that_does_not_fit_is_answered(gssim, tmp_path):
    path = write_files(tmp_path)
    small = (tmp_path / "pair.toml").read_text().replace('"1 GiB"', '"1 kB"')
    (tmp_path / "pair.toml").write_text(small)
    code, out, _ = gssim("run", path)
    assert code == 0
    assert "does not fit: rank 0" in " ".join(out.split())
    assert json.loads(gssim("run", path, "--json")[1])["fits"] is False


@pytest.mark.parametrize("method", ["single", "ddp", "zero2", "gs"])
def test_every_method_answers(gssim, tmp_path, method):
    code, out, err = gssim("run", write_files(tmp_path, scenario=SCENARIO_TOML.replace("ddp", method)), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["step_time_s"] > 0


@pytest.mark.parametrize("package", ["gssim", "gsreal", "analysis"])
def test_an_interrupt_while_modules_are_imported_ends_without_a_traceback(package):
    code = f"""import runpy, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "{package}.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
runpy.run_module("{package}", run_name="__main__")"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
