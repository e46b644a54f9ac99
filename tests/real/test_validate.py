"""`gsreal validate` calibrates, runs, predicts and compares the points of a sweep, and goes on where it ended."""

import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import commands
import forks
import pytest
from killing import marked
from results import make_result

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch

from gsreal import validate
from gsreal.calibrate.cluster_file import COMMUNICATING, DRIFTING, LINK_KEYS, cluster_data, rounded
from gsreal.machine import ENVIRONMENT, device_name
from gsreal.run import rank_speed
from gsreal.run.forked import Forked, check_environment, module_run
from gssim.cluster.cluster import Emulation
from gssim.errors import RunFailedError
from gssim.result import read_result
from gssim.scenario import load_cluster, load_scenario, read_toml

pytestmark = pytest.mark.real

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SWEEP = f"""# Are two plans as predicted?
scenario = "{SCENARIOS / "demo.toml"}"
set = {{ run.steps = 2, run.warmup_steps = 1, workload.global_batch_size = 16, workload.sequence_length = 128 }}
variants.ddp = {{ plan.method = "ddp" }}
variants.gs-3e-3 = {{ plan.method = "gs", plan.push.threshold = 3e-3 }}
"""


def calibrated(folder):
    """Write the shipped calibration as if it were this machine's, of as many measurements as are taken."""
    name = device_name(torch.device("cpu"))
    text = (SCENARIOS / "clusters" / "two-cores.toml").read_text(encoding="utf-8")
    theirs = re.search(r"^\[device_types\.([^.\]]+)\]$", text, re.M)[1]
    folder.mkdir(parents=True)
    text = text.replace(theirs, name)
    text, count = re.subn(r"^measurements = \d+$", f"measurements = {validate.ROUNDS}", text, flags=re.M)
    assert count
    (folder / "cluster.toml").write_text(text, encoding="utf-8")


def started(*words, direct=True, **environment):
    """Start the command, with its messages in a pipe; `direct`: in the environment that ranks need, which it else makes
    for a process of its own."""
    needed = {**ENVIRONMENT, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    others = {name: value for name, value in os.environ.items() if name not in needed}
    command = [sys.executable, "-m", "gsreal", "validate", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=others | environment | (needed if direct else {}), **pipes)


def ended(*words):
    """Run the command to its end; return (exit code, table, messages)."""
    process = started(*words)
    table, messages = process.communicate(timeout=600)
    return process.returncode, table, messages


def pairs_in(out):
    """Return {name: (predicted, measured)} of a folder."""
    found = {}
    for file in (out / "results").glob("*.json"):
        result = read_result(file)
        found.setdefault(result.scenario["name"], {})[result.source] = result
    return {name: (sides.get("simulated"), sides.get("measured")) for name, sides in found.items()}


def test_a_call_that_is_ended_keeps_what_is_finished_and_the_next_compares_all_points(tmp_path, monkeypatch):
    sweep, out = tmp_path / "two.toml", tmp_path / "out"
    sweep.write_text(SWEEP)
    calibrated(out)
    line = (sweep, "--device", "cpu", "--out", out)
    words, nvml = ["validate", *map(str, line)], {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    short = {"gsreal.validate.COURSES": 1}  # of the training for gradient statistics: a second one takes as long again
    (early,) = forks.run_commands(forks.Command(words, nvml, values=short, terminated_at="1 of 2 runs done"))
    assert early.returncode, early.stderr
    assert "1 of 2 runs done" in early.stderr
    assert "2 of 2 runs done" not in early.stderr
    (kept,) = (out / "results").glob("*.measured.json")
    before = kept.stat().st_mtime_ns

    with monkeypatch.context() as patched:  # of a call that has no time but for the comparison, and compares nothing
        for name, value in {**ENVIRONMENT, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}.items():
            patched.setenv(name, value)
        patched.setattr(validate, "run_modules", lambda *_words: None)
        nothing = SimpleNamespace(returncode=0, communicate=lambda: (None, None))
        patched.setattr(validate.subprocess, "Popen", lambda *_words, **_how: nothing)
        over = commands.run("gsreal", "validate", *line, "--seconds", 10)
    assert over.returncode == 0, over.stderr
    assert "1 of 2 are there already" in over.stderr
    assert "not run for lack of time: " in over.stderr
    assert kept.stat().st_mtime_ns == before

    (whole,) = forks.run_commands(
        forks.Command(
            words,
            nvml,
            values={"gsreal.validate.BUSY_RATIO": 1.0},  # no run is repeated, however busy the machine is
        )
    )
    table, said = whole.stdout, whole.stderr
    assert whole.returncode == 0, said
    assert "calibrating" not in said  # there already
    assert "1 of 2 are there already" in said
    assert re.search(r"step predicted .*, measured .*; peak memory .*; collectives equal", said)
    assert "collectives equal in 2 of 2" in table
    for name in ("comparison.csv", "report.html", "predicted_vs_measured.png"):
        assert (out / name).stat().st_size > 0
    pairs = pairs_in(out)
    assert sorted(pairs) == ["ddp", "gs-3e-3"]
    for predicted, measured in pairs.values():
        assert measured.scenario_id == predicted.scenario_id
        assert [entry.key for entry in measured.collectives] == [entry.key for entry in predicted.collectives]
        assert 0 <= measured.provenance["core_wait_ratio"] < 1


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (SWEEP, ("--only", "nothing"), "--only nothing: no point of"),
        (SWEEP + 'variants.far = { cluster = "x.toml" }\n', (), "validate runs points on this machine's cluster"),
        (SWEEP + "variants.short = { workload.sequence_length = 64 }\n", (), "workload.sequence_length = 64, 128"),
        (SWEEP, ("--device", "tpu"), "--device tpu: allowed: auto, cpu, cuda"),
        (SWEEP, ("--seconds", "-1"), "--seconds -1: must be more than 0"),
        (SWEEP, ("--ranks", "0"), "--ranks 0: must be at least 1"),
        (SWEEP, ("--ranks", "2147483648"), "--ranks 2147483648: this machine has"),
    ],
)
def test_what_cannot_be_validated_is_refused_in_one_line(tmp_path, monkeypatch, text, options, message):
    for name, value in {**ENVIRONMENT, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "s.toml").write_text(text)
    refused = commands.run("gsreal", "validate", tmp_path / "s.toml", "--out", tmp_path / "o", *options)
    assert refused.returncode == 2, refused.stderr
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not list((tmp_path / "o").glob("results/*"))


def test_a_calibration_that_lacks_what_points_need_is_made_anew(tmp_path, monkeypatch, capsys):
    """Predictions of a model without a profile would be of another kind, and nothing would say so.

    Nor did anything say that other work took the cores meanwhile: what forked ranks print is not shown.
    """
    calibrated(tmp_path / "out")
    monkeypatch.setattr(validate, "measure", lambda settings, **_how: {"core_wait_ratio": waits.pop()})
    monkeypatch.setattr(validate, "cluster_data", lambda _measured, settings: settings)
    written, waits = [], [0.4, 0.1]
    monkeypatch.setattr(validate, "write_cluster", lambda _file, settings: written.append(settings))
    sweeps = {
        "there.toml": SWEEP,
        "model.toml": SWEEP.replace("run.steps = 2", f'workload.model = "{SCENARIOS / "models/bert-byte-1m.toml"}"'),
        "optimizer.toml": SWEEP.replace("run.steps = 2", 'workload.optimizer = "adam"'),
    }
    for name, text in sweeps.items():
        (tmp_path / name).write_text(text)
        request = validate.Request(tmp_path / name, tmp_path / "out", "cpu", 2, only=("ddp",))
        validate.Session(request, time.monotonic()).calibrate()
    assert [settings.models[0].rpartition("/")[2] for settings in written] == ["bert-byte-1m.toml", "gpt-byte-1m.toml"]
    assert written[1].optimizers == ("adam",)
    said = capsys.readouterr().err
    assert said.count("ranks waited for cores") == 1
    assert "for 40% of the time" in said


@pytest.mark.parametrize(("batch_size", "anew"), [(16, False), (64, True)])
def test_other_points_take_a_calibration_and_its_batch_sizes_where_theirs_lie_between(
    tmp_path, monkeypatch, batch_size, anew
):
    """Repeated measurements of layers were refused: those of a call with `--only` have fewer batch sizes."""
    calibrated(tmp_path / "out")
    measured = []
    monkeypatch.setattr(validate, "measure", lambda settings, **_how: measured.append(settings) or {})
    monkeypatch.setattr(validate, "cluster_data", lambda _measured, settings: settings)
    monkeypatch.setattr(validate, "write_cluster", lambda _file, _settings: None)
    (tmp_path / "s.toml").write_text(SWEEP.replace("batch_size = 16", f"batch_size = {batch_size}"))
    request = validate.Request(tmp_path / "s.toml", tmp_path / "out", "cpu", 2, only=("ddp",))
    session = validate.Session(request, time.monotonic())
    assert session.settings.batch_sizes == (batch_size // 2,)
    session.calibrate()
    assert len(measured) == anew
    sizes = load_cluster(SCENARIOS / "clusters" / "two-cores.toml")
    (profile,) = (each for kind in sizes.device_types.values() for each in kind.profiles if each.model == "gpt-byte-1m")
    of_file = next(iter(profile.layers.values())).forward_s.sizes
    assert session.settings.batch_sizes == ((32,) if anew else of_file)


def test_batch_sizes_of_a_calibration_are_those_that_ranks_train():
    scenarios = [
        load_scenario(SCENARIOS / "demo.toml", [f"plan.method={method}", *more], gradients_needed=False)
        for method, more in (("ddp", []), ("single", []), ("pipeline", ["plan.micro_batches=4"]))
    ]
    settings = validate.settings_of(scenarios, "cpu", Path("out"))
    assert settings.batch_sizes == (4, 8, 16)


def test_a_forked_process_reports_its_end_and_runs_nothing_of_its_parent(tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("threading.active_count", lambda: 1)
    log = tmp_path / "log.txt"
    good = Forked(lambda: os.write(1, f"{os.getpid()}".encode()), log)
    assert good.wait() == 0
    assert log.read_text() == str(good.pid)
    assert Forked(module_run("platform", ["--terse"], {}), log).wait() == 0

    def fails():
        raise RuntimeError("no more")

    bad = Forked(fails, log)
    assert bad.wait() == bad.poll() == 1
    assert "RuntimeError: no more" in log.read_text()
    endless = Forked(lambda: time.sleep(600), log)
    assert endless.poll() is None
    endless.kill()
    assert endless.wait() == -signal.SIGKILL


def test_a_forked_process_whose_launcher_has_gone_ends_without_a_word(tmp_path, monkeypatch, capfd):
    """An interrupted launcher removes the folder of the logs, at times before the new process has opened its own."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("threading.active_count", lambda: 1)
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr("os.setsid", lambda: shutil.rmtree(folder))  # the last that it does before
    assert Forked(lambda: None, folder / "log.txt").wait() == 1
    assert capfd.readouterr() == ("", "")


def test_ranks_are_not_forked_from_a_process_that_would_make_them_otherwise(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("threading.active_count", lambda: 2)
    with pytest.raises(RunFailedError, match="several threads"):
        check_environment()
    monkeypatch.delenv("OMP_NUM_THREADS")
    with pytest.raises(RunFailedError, match="started without OMP_NUM_THREADS"):
        check_environment()


@pytest.mark.parametrize("survives", [True, False, None], ids=["yes", "no", "no-fork-at-all"])
def test_ranks_of_a_gpu_are_forked_where_a_fork_can_use_it(monkeypatch, survives):
    """torch may have initialised CUDA to count devices: then the process asks for the device itself, and forks none."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    this, asked = os.getpid(), []

    def name_of(_device):
        if os.getpid() != this and not survives:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        asked.append(os.getpid())
        return "a-gpu"

    monkeypatch.setattr("threading.active_count", lambda: 1)  # an earlier test may have left one
    monkeypatch.setattr(validate, "device_name", name_of)
    if survives is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(validate.torch, "ones", lambda *size, **_device: torch.zeros(*size, requires_grad=True))
    assert validate.device_and_forks("cuda") == ("a-gpu", bool(survives))
    assert asked == ([] if survives else [this])


def test_of_two_measurements_the_one_with_less_waiting_for_cores_is_kept_at_every_moment(tmp_path, monkeypatch):
    waits = iter((0.5, 0.7, 0.2))

    def launch(_module, arguments, **_how):
        measured = replace(make_result("measured"), provenance={"core_wait_ratio": next(waits)})
        Path(arguments[2]).write_text(measured.to_json())

    calibrated(tmp_path / "out")
    monkeypatch.setattr(validate, "launch", launch)
    monkeypatch.setattr(validate.Session, "predict", lambda _self, _row: None)
    (tmp_path / "s.toml").write_text(SWEEP)
    session = validate.Session(validate.Request(tmp_path / "s.toml", tmp_path / "out", "cpu", 2, only=("ddp",)), 0.0)
    (row,) = session.load_rows()
    kept = []
    for _ in range(3):
        session.measure(row)
        kept.append(read_result(tmp_path / "out" / "results" / session.file_of(row)).provenance["core_wait_ratio"])
        assert row.busy_ratio == kept[-1]
    assert kept == [0.5, 0.5, 0.2]


@pytest.mark.parametrize(
    ("ago_s", "expected"),
    [(10.0, ["ddp", "gs-3e-3", "layers"]), (200.0, ["ddp", "layers", "gs-3e-3", "layers"])],
    ids=["just before", "minutes ago"],
)
def test_layers_are_measured_again_after_the_runs_and_between_them_where_that_is_long_ago(
    tmp_path, monkeypatch, ago_s, expected
):
    happened = []
    calibrated(tmp_path / "out")
    monkeypatch.setattr(validate.Session, "measure", lambda _self, row: happened.append(row.name))
    monkeypatch.setattr(validate.Session, "calibrate_again", lambda _self: happened.append("layers"))
    (tmp_path / "s.toml").write_text(SWEEP)
    session = validate.Session(validate.Request(tmp_path / "s.toml", tmp_path / "out", "cpu", 2), time.monotonic())
    session.layers_measured_s = time.monotonic() - ago_s
    session.run_all()
    assert happened == expected


def test_a_run_that_waited_for_cores_is_repeated_once_all_have_run(tmp_path, monkeypatch):
    waits, ran = {"ddp": [0.5, 0.4], "gs-3e-3": [0.1]}, []

    def launch(_module, arguments, **_how):
        ran.append(next(name for name in waits if f'name="{name}"' in arguments[1].replace("\\", "")))
        measured = replace(make_result("measured"), provenance={"core_wait_ratio": waits[ran[-1]].pop(0)})
        Path(arguments[2]).write_text(measured.to_json())

    calibrated(tmp_path / "out")
    monkeypatch.setattr(validate, "launch", launch)
    monkeypatch.setattr(validate.Session, "predict", lambda _self, _row: None)
    (tmp_path / "s.toml").write_text(SWEEP)
    session = validate.Session(validate.Request(tmp_path / "s.toml", tmp_path / "out", "cpu", 2), time.monotonic())
    session.run_all()
    assert ran == ["ddp", "gs-3e-3", "ddp"]
    assert [row.busy_ratio for row in session.rows] == [0.4, 0.1]


def test_a_calibrated_cores_rate_is_measured_again_after_a_run_of_many_steps(monkeypatch):
    monkeypatch.setattr(rank_speed, "dist", SimpleNamespace(get_world_size=lambda: 2, barrier=int))
    cores = load_cluster(SCENARIOS / "clusters" / "two-cores.toml")
    ((name, stated),) = cores.device_types.items()

    def ratio(steps: int, **changes) -> float | None:
        cluster = replace(cores, device_types={name: replace(stated, **changes)})
        return rank_speed.device_speed_ratio(cluster, 1, torch.device("cpu"), steps=steps)

    assert ratio(2) is None
    assert ratio(20, profiles=()) is None
    assert ratio(20, peak_flop_per_s={"fp32": 2e9}) > 1.0


def test_where_other_devices_are_emulated_a_core_does_not_wait_for_its_turn(monkeypatch):
    """An emulated device takes no turn: ranks that waited for it would wait for ever."""
    monkeypatch.setattr(rank_speed, "dist", SimpleNamespace(get_world_size=lambda: 2))  # has no barrier
    cores = load_cluster(SCENARIOS / "clusters" / "two-cores.toml")
    ((name, stated),) = cores.device_types.items()
    half = replace(stated, lab=Emulation(cpu_share_ratio=0.5))
    devices = [replace(cores.devices[0], type="half"), cores.devices[1]]
    mixed = replace(cores, device_types={name: stated, "half": half}, devices=tuple(devices))
    ratios = [rank_speed.device_speed_ratio(mixed, rank, torch.device("cpu"), steps=20) for rank in (0, 1)]
    assert ratios[0] > 0
    assert ratios[1] is None


def test_a_machine_that_computes_at_another_rate_than_calibrated_is_told_with_the_row():
    for ratio, told in ((0.7, True), (1.2, True), (0.95, False)):
        measured = replace(make_result("measured"), provenance={"device_speed_ratio": ratio})
        line = validate.pair_line(make_result("simulated"), measured)
        assert (f"the machine computed at {ratio:.0%} of the calibrated rate" in line) == told


def test_a_plan_of_one_device_runs_before_communication_is_measured(tmp_path, monkeypatch):
    """The two parts of a calibration give the same file as the whole."""
    whole = recorded_calibration()
    communicating = ("communication", "sharded_tensor_s", *COMMUNICATING)
    parts = {"devices": {key: value for key, value in whole.items() if key not in communicating}}
    of_links = (*communicating, "name", "ranks", "memory_counter", "provenance")
    parts["links"] = {key: whole[key] for key in of_links if key in whole}
    happened = []

    def measure(settings, **_how):
        happened.append(settings.only)
        return copy.deepcopy(parts[settings.only])

    monkeypatch.setattr(validate, "measure", measure)
    monkeypatch.setattr(validate.Session, "measure", lambda _self, row: happened.append(row.name))
    monkeypatch.setattr(validate.Session, "calibrate_again", lambda _self: None)
    (tmp_path / "s.toml").write_text(
        SWEEP.replace("variants.ddp", 'variants.one = { plan.method = "single" }\nvariants.ddp')
    )
    request = validate.Request(tmp_path / "s.toml", tmp_path / "out", "cpu", 2, only=("one", "ddp"))
    session = validate.Session(request, time.monotonic())
    session.run_all()
    assert happened == ["devices", "one", "links", "ddp"]
    written = read_toml(tmp_path / "out" / "cluster.toml")[1]
    assert written == rounded(cluster_data(whole, session.settings))
    assert "not measured" not in str(written)


def recorded_calibration():
    """Return what `gsreal calibrate` measured for the shipped cluster file, as this machine's."""
    tables = read_toml(SCENARIOS / "clusters" / "two-cores.toml")[1]
    (costs,) = tables["device_types"].values()
    link = {key: tables["links"][0][key] for key in LINK_KEYS}
    backend = {key: value for key, value in tables["backend_cost"].items() if key != "source"}
    sharded = {name: cost.pop("sharded_tensor_s") for name, cost in costs["optimizers"].items()}
    device = {key: costs[key] for key in ("memory_bytes", "memory_bandwidth_bytes_per_s", "operation_overhead_s")}
    device |= {"peak_flop_per_s": costs["peak_flop_per_s"]["fp32"], "workspace_bytes": costs["workspace_bytes"]}
    keys = (*COMMUNICATING, *DRIFTING, "optimizers", "compression", "profiles")
    found = {key: costs[key] for key in keys if key in costs}
    return found | {
        "name": device_name(torch.device("cpu")),
        "ranks": 2,
        "memory_counter": "allocator",
        "provenance": dict.fromkeys(("date", "processor", "system", "torch", "python"), "any"),
        "device": device,
        "communication": link | backend,
        "sharded_tensor_s": sharded,
    }


@pytest.mark.slow
def test_the_demonstration_is_complete_with_a_calibration_of_its_own(tmp_path):
    """Errors of step times depend on the machine and are not asserted; collectives and peaks are."""
    code, _, said = ended(SCENARIOS / "sweeps" / "demo.toml", "--device", "cpu", "--out", tmp_path)
    assert code == 0, said
    pairs = pairs_in(tmp_path)
    assert len(pairs) == 10
    for name, (predicted, measured) in pairs.items():
        assert [entry.key for entry in measured.collectives] == [entry.key for entry in predicted.collectives], name
        peaks = [max(entry.peak_allocated_bytes for entry in each.ranks) for each in (predicted, measured)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.01), name


KILLS = 10
ENDINGS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.mark.slow
def test_a_validation_that_is_killed_at_any_moment_keeps_what_is_finished_and_goes_on(tmp_path):
    """No process and no partial file is left, the lock is free, and a repeated call succeeds."""
    sweep, out, temporary = tmp_path / "two.toml", tmp_path / "out", tmp_path / "temporary"
    sweep.write_text(SWEEP)
    temporary.mkdir()
    marker = f"validate-test-{uuid.uuid4().hex}"

    def run(after_s=None, number=signal.SIGKILL, direct=True):
        began_s = time.monotonic()
        words = (sweep, "--device", "cpu", "--out", out)
        process = started(*words, direct=direct, MARKER=marker, TMPDIR=str(temporary))
        try:
            _, said = process.communicate(timeout=600 if after_s is None else after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            _, said = process.communicate(timeout=120)
        until_s = time.monotonic() + 20
        while marked(marker) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert marked(marker) == []
        assert "Traceback" not in said
        for file in out.rglob("*.toml"):
            read_toml(file)
        return process.returncode, said, time.monotonic() - began_s

    calibrated(out)
    code, said, whole_s = run()
    assert code == 0, said
    names = sorted(file.relative_to(out) for file in out.rglob("*"))
    draw, done, ends = random.Random(23), 0, {}
    while done < KILLS:
        before = {name for name, (_, measured) in pairs_in(out).items() if measured}
        code, *_ = run(draw.uniform(0, whole_s), draw.choice(ENDINGS), draw.random() < 0.5)
        assert before <= {name for name, (_, measured) in pairs_in(out).items() if measured}
        done, ends[code] = done + (code != 0), ends.get(code, 0) + 1
        if draw.random() < 0.3 or done == KILLS:
            code, said, _ = run()
            assert code == 0, said
            assert sorted(file.relative_to(out) for file in out.rglob("*")) == names
            assert list(temporary.iterdir()) == []
            shutil.rmtree(out)
            calibrated(out)
    print(f"{done} kills of a validation of {whole_s:.0f} s, by exit status: {ends}")
