"""Sweeps: their format, the points that they stand for, and that finished predictions are kept."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from strategies import write_files

from gssim.errors import RunFailedError, UserError
from gssim.execution import processes
from gssim.result import read_result
from gssim.scenario.sweep import chosen, load_sweep, loaded_point, points_of
from gssim.sweeps import predict
from gssim.workload.gradient_statistics import read_gradients

SWEEPS = sorted((Path(__file__).resolve().parents[2] / "scenarios" / "sweeps").glob("*.toml"))

SWEEP_TOML = """# Which of two plans is faster, with one sequence length or another?
scenario = "scenario.toml"
repeats = 2

[set]
run.steps = 3

[variants]
ddp = { plan.method = "ddp" }
gs = { plan.method = "gs" }

[[groups]]
name = "short"
set = { workload.sequence_length = 2, run.steps = 2 }

[[groups]]
name = "long"
variants = ["gs"]
axes = { plan.push.threshold = [1e-3, 0.1] }
"""


def written(folder, text=SWEEP_TOML):
    write_files(folder)
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def traced_again(model):
    """Write a model file anew, with bytes that another trace has found and that no identity of a scenario contains."""
    text = model.read_text()
    model.write_text(text.replace("[[layers]]\n", "[[layers]]\nforward_streamed_bytes = 0\n"))
    assert model.read_text() != text


def points_in(path, overrides=()):
    return points_of(load_sweep(path), file=path, overrides=overrides)


def test_groups_have_a_point_for_each_variant_and_each_combination_of_values(tmp_path):
    points = points_in(written(tmp_path))
    assert [point.name for point in points] == [
        "short--ddp",
        "short--gs",
        "long--gs--threshold-0.001",
        "long--gs--threshold-0.1",
    ]
    assert [point.group for point in points] == ["short", "short", "long", "long"]


def test_the_later_override_counts(tmp_path):
    path = written(tmp_path)
    scenarios = [point.load().scenario for point in points_in(path)]
    assert [scenario.run.steps for scenario in scenarios] == [2, 2, 3, 3]
    assert [scenario.plan.push.threshold for scenario in scenarios] == [None, None, 1e-3, 0.1]
    assert [scenario.name for scenario in scenarios] == [point.name for point in points_in(path)]
    last = [point.load().scenario for point in points_in(path, ["run.steps=4", "name=other"])]
    assert [scenario.run.steps for scenario in last] == [4] * 4
    assert last[0].name == "short--ddp"  # its file's name says so


def test_axes_of_the_sweep_and_of_a_group_are_multiplied(tmp_path):
    text = 'scenario = "scenario.toml"\n[axes]\nrun.seed = [0, 1]\nplan.method = ["ddp", "zero1", "gs"]\n'
    points = points_in(written(tmp_path, text))
    assert len(points) == 6
    assert points[1].name == "sweep--seed-0--zero1"
    group = '[[groups]]\nname = "g"\naxes = { run.seed = [7], run.steps = [3, 4] }\n'
    points = points_in(written(tmp_path, text + group))
    assert len(points) == 6
    assert {point.load().scenario.run.seed for point in points} == {7}


def test_files_are_looked_up_beside_the_sweep_then_beside_the_scenario(tmp_path, monkeypatch):
    write_files(tmp_path / "base")
    sweeps = tmp_path / "base" / "sweeps"
    sweeps.mkdir()
    cluster = (tmp_path / "base" / "pair.toml").read_text()
    (sweeps / "mine.toml").write_text(cluster.replace("name =", 'name = "mine" #', 1))
    path = sweeps / "s.toml"
    path.write_text('scenario = "../scenario.toml"\n[axes]\ncluster = ["mine.toml", "pair.toml"]\n')
    monkeypatch.chdir(tmp_path)
    mine, pair = points_in(Path("base/sweeps/s.toml"))
    assert mine.name == "s--mine"
    assert mine.load().scenario.cluster.name == "mine"
    assert pair.load().scenario.cluster.name != "mine"
    assert mine.overrides[0] == 'cluster="base/sweeps/mine.toml"'  # from the working directory, for other processes


def test_a_group_may_have_a_scenario_of_its_own(tmp_path):
    path = written(tmp_path)
    other = (tmp_path / "scenario.toml").read_text().replace("global_batch_size = 8", "global_batch_size = 4")
    (tmp_path / "other.toml").write_text(other)
    path.write_text(SWEEP_TOML.replace('name = "long"', 'name = "long"\nscenario = "other.toml"'))
    sizes = [point.load(gradients_needed=False).scenario.workload.global_batch_size for point in points_in(path)]
    assert sizes == [8, 8, 4, 4]


def test_some_points_can_be_chosen(tmp_path):
    path = written(tmp_path)
    points = points_in(path)
    names = [point.name for point in chosen(points, ["short--*", "*-0.1"], file=path)]
    assert names == ["short--ddp", "short--gs", "long--gs--threshold-0.1"]
    assert chosen(points, [], file=path) == points
    with pytest.raises(UserError, match=r"--only nothing: no point of .*sweep\.toml matches; the first is short"):
        chosen(points, ["nothing"], file=path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("repeats = 2", "repeat = 2", r"repeat: unknown key; did you mean repeats\? allowed: scenario, question, set"),
        ("repeats = 2", "repeats = 0", r"repeats = 0: must be more than 0"),
        ("scenario.toml", "nowhere.toml", r"scenario = 'nowhere.toml': no such file beside it"),
        ('name = "long"', 'nam = "long"', r"groups\[1\]\.nam: unknown key; did you mean name\?"),
        (
            'variants = ["gs"]',
            'variants = ["fast"]',
            r"groups\[1\]\.variants: there is no variant 'fast'; there are ddp, gs",
        ),
        ('variants = ["gs"]', "variants = []", r"groups\[1\]\.variants = \[\]: .*at least 1"),
        ("[1e-3, 0.1]", "[]", r"groups\[1\]\.axes: plan.push.threshold = \[\]: must be a list of values, one at least"),
        ("[1e-3, 0.1]", "1e-3", r"axes: plan\.push\.threshold = 0\.001: must be a list of values"),
        ("[1e-3, 0.1]", "[1e-3, 1e-3]", r"two points are named 'long--gs--threshold-0.001'"),
        ("[1e-3, 0.1]", "[1, 1]", r"two points are named 'long--gs--threshold-1'; groups and values"),
        ('name = "long"', 'name = "a--b"', r"groups\[1\]\.name: 'a--b' names files: letters, digits"),
        ("[1e-3, 0.1]", str(list(range(2000))) + ", run.seed = " + str(list(range(2000))), r"has 4,000,002 points: at"),
    ],
)
def test_bad_sweeps_are_refused_in_one_line(tmp_path, gssim, old, new, message):
    path = written(tmp_path, SWEEP_TOML.replace(old, new))
    code, out, err = gssim("sweep", path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert re.search(message, err), err


def test_a_point_that_is_no_scenario_is_told_before_anything_is_simulated(tmp_path, gssim):
    path = written(tmp_path, SWEEP_TOML.replace('plan.method = "gs"', 'plan.method = "gs", plan.tp = 3'))
    code, out, err = gssim("sweep", path, "--out", tmp_path / "out", "--jobs", 1)
    assert (code, out) == (2, "")
    assert f"{path}: short--gs: {tmp_path / 'scenario.toml'}: plan" in err
    assert "(and 2 more points)" in err
    assert not (tmp_path / "out").exists()


def test_predictions_are_as_those_of_single_scenarios_and_kept(tmp_path, gssim):
    path, out = written(tmp_path), tmp_path / "out"
    code, said, _ = gssim("sweep", path, "--out", out, "--jobs", 1)
    assert code == 0
    assert "Which of two plans is faster" in said
    files = sorted(out.iterdir())
    assert len(files) == 4
    changes = [word for point in points_in(path)[2:3] for each in point.overrides for word in ("--set", each)]
    gssim("run", tmp_path / "scenario.toml", *changes, "--out", tmp_path / "alone")
    (alone,) = (tmp_path / "alone").iterdir()
    assert alone.read_bytes() == (out / alone.name).read_bytes()

    before = {file: file.stat().st_mtime_ns for file in files}
    files[0].write_text("{}")  # damaged: made again, as is what is no longer there
    files[1].unlink()
    assert gssim("sweep", path, "--out", out, "--jobs", 1)[1] == said
    after = {file: file.stat().st_mtime_ns for file in files}
    assert [after[file] == before[file] for file in files] == [False, False, True, True]
    gssim("sweep", path, "--out", out, "--jobs", 1, "--again")
    assert all(file.stat().st_mtime_ns > after[file] for file in files)


def test_a_model_that_was_traced_again_is_predicted_anew_though_it_asks_the_same(tmp_path, gssim):
    """Before, the predictions of the older trace were taken up silently."""
    path, out = written(tmp_path), tmp_path / "out"
    gssim("sweep", path, "--out", out, "--jobs", 1)
    before = {file.name for file in out.iterdir()}
    traced_again(tmp_path / "tiny.toml")
    gssim("sweep", path, "--out", out, "--jobs", 1)
    gssim("sweep", path, "--out", tmp_path / "anew", "--jobs", 1)
    for file in out.iterdir():
        assert read_result(file).scenario["workload"]["model"]["layers"][0]["forward_streamed_bytes"] == "0"
        assert file.read_bytes() == (tmp_path / "anew" / file.name).read_bytes()
    assert {file.name for file in out.iterdir()} == before  # named by the identity, which joins older measurements
    unchanged = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    gssim("sweep", path, "--out", out, "--jobs", 1)
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == unchanged


def test_other_rates_are_predicted_anew(tmp_path, gssim):
    path, out = written(tmp_path), tmp_path / "out"
    gssim("sweep", path, "--out", out, "--only", "short--ddp")
    cluster = tmp_path / "pair.toml"
    before = read_result(next(out.iterdir()))
    cluster.write_text(cluster.read_text().replace("1 MB/s", "1 kB/s"))
    gssim("sweep", path, "--out", out, "--only", "short--ddp")
    (file,) = out.iterdir()
    after = read_result(file)
    assert after.scenario_id == before.scenario_id
    assert after.step_time_s > before.step_time_s


def test_processes_give_the_same_results_in_the_same_order(tmp_path):
    path = written(tmp_path)
    points = points_in(path)
    alone = predict(points, sweep=path, out=None, jobs=1)
    assert predict(points, sweep=path, out=None, jobs=2) == alone
    assert [result.scenario["name"] for result in alone] == [point.name for point in points]


def test_an_interpreter_that_does_not_know_its_path_starts_no_processes(tmp_path):
    """As one that is embedded in another program: the start of workers ended in tracebacks of BrokenPipeError."""
    code = "import sys; sys.executable = ''; from gssim.cli.commands import main; main()"
    line = [sys.executable, "-c", code, "sweep", str(written(tmp_path)), "--jobs", "2", "--json"]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(json.loads(ended.stdout)) == 4


def test_a_result_that_cannot_be_written_ends_the_sweep(tmp_path, gssim):
    path, out = written(tmp_path), tmp_path / "out"
    gssim("sweep", path, "--out", out, "--jobs", 1)
    last = sorted(out.iterdir())[-1]
    last.unlink()
    last.mkdir()  # nothing can take the place of a folder
    code, _, err = gssim("sweep", path, "--out", out, "--jobs", 1)
    assert code == 2
    assert str(last) in err
    assert "cannot be written: it is a folder" in err


def test_points_that_ask_the_same_are_told(tmp_path, gssim):
    text = SWEEP_TOML.replace('gs = { plan.method = "gs" }', 'gs = { plan.method = "ddp", plan.overlap = true }')
    code, _, err = gssim("sweep", written(tmp_path, text), "--only", "short--*", "--jobs", 1)
    assert (code, "short--gs asks the same as short--ddp" in err) == (0, True), err


def test_json_is_a_list_of_results(tmp_path, gssim):
    code, out, _ = gssim("sweep", written(tmp_path), "--json", "--only", "short--*", "--jobs", 1)
    assert code == 0
    assert [each["scenario"]["name"] for each in json.loads(out)] == ["short--ddp", "short--gs"]


def test_an_interrupted_sweep_loses_nothing_and_goes_on(tmp_path):
    many = SWEEP_TOML.replace("[1e-3, 0.1]", f"[1e-3], run.seed = {list(range(200))}")
    path, out = written(tmp_path, many), tmp_path / "out"
    line = [sys.executable, "-c", "from gssim.cli.commands import main; main()", "sweep", str(path), "--out", str(out)]
    process = subprocess.Popen([*line, "--jobs", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 100
    while len(list(out.glob("*.json"))) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130, said
    assert f"gssim: sweep: interrupted; what is finished is in {out}" in said
    assert "Traceback" not in said
    kept = {file: file.stat().st_mtime_ns for file in out.glob("*.json")}
    assert 3 <= len(kept) < 202
    assert len(list(out.iterdir())) == len(kept)  # nothing half written
    points = [point for point in points_in(path) if any(file.name.startswith(f"{point.name}.") for file in kept)]
    predict(points, sweep=path, out=out, jobs=1)
    assert {file: file.stat().st_mtime_ns for file in out.glob("*.json")} == kept


INTERRUPTED_AT_ONCE = """
import os, signal
from gssim.execution import processes

heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append("heard"))
with processes(2) as workers:
    chunk = workers.submit(abs, -3)
    os.killpg(0, signal.SIGINT)
    while not workers.ended([chunk]):
        pass
    print(workers.answer(chunk), *heard)
"""


def test_an_interrupt_while_worker_processes_start_is_their_parents_alone():
    """A terminal sends it to all of them, when they have not yet come to ignore it."""
    line = [sys.executable, "-c", INTERRUPTED_AT_ONCE]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=100, start_new_session=True, check=False)
    assert (ended.stdout, ended.stderr) == ("3 heard\n", "")


TERMINATED_IN_A_START = """
import os
import signal
import threading
import time
from multiprocessing import popen_forkserver
from gssim.execution import processes
from gssim.terminal import unwinding

launch = popen_forkserver.Popen._launch

def launched(popen, process):
    launch(popen, process)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)  # until the other thread has got it
    print("started", flush=True)

popen_forkserver.Popen._launch = launched
threading.Thread(target=threading.Event().wait, daemon=True).start()  # as a progress bar's: it blocks no signal
with unwinding(), processes(2) as workers:
    workers.submit(abs, -3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are spawned there")
def test_a_termination_while_a_worker_process_starts_leaves_none_that_misses_its_queue():
    """Before, the signal was handled before the pool knew the process, which then printed a FileNotFoundError."""
    line = [sys.executable, "-c", TERMINATED_IN_A_START]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGTERM, "started\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="processes start in another way")
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("multiprocessing.popen_forkserver.forkserver.connect_to_new_process", ConnectionRefusedError(111, "refused")),
        ("gssim.execution.executor.ensure_running", BlockingIOError(11, "Resource temporarily unavailable")),
    ],
)
def test_processes_that_the_system_does_not_start_are_reported_in_a_line(monkeypatch, place, error):
    """Limits of containers and of users ended in a traceback of multiprocessing."""

    def fail(*arguments):
        raise error

    monkeypatch.setattr(place, fail)
    said = f"cannot be started .{error.strerror}.: --jobs 1 needs none"
    with pytest.raises(RunFailedError, match=said), processes(2) as workers:
        workers.submit(abs, -3)


UNGUARDED = """
from multiprocessing import spawn
from gssim.execution import processes

usual = spawn.get_preparation_data
with processes(2) as workers:
    chunk = workers.submit(abs, -3)
    while not workers.ended([chunk]):
        pass
    print(workers.answer(chunk), spawn.get_preparation_data is usual)
"""


@pytest.mark.parametrize("given", ["a file", "stdin", "a module"])
def test_a_script_without_a_guard_may_have_worker_processes(tmp_path, given):
    """Before, each worker ran the script again, and died: 'a worker process died, perhaps out of memory'."""
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    words = {"a file": ["unguarded.py"], "stdin": ["-"], "a module": ["-m", "unguarded"]}[given]
    ended = subprocess.run(
        [sys.executable, *words],
        input=UNGUARDED,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("3 True\n", "")


def environment_and_parent(name):
    return os.environ.get(name), os.getppid(), "gssim.simulation" in sys.modules


@pytest.mark.skipif(sys.platform != "linux", reason="workers are spawned there")
def test_workers_are_forks_of_one_process_that_has_imported_what_they_need_and_have_todays_environment(monkeypatch):
    found = []
    for value in ("first", "second"):
        monkeypatch.setenv("GSSIM_TEST_OF_WORKERS", value)
        with processes(2) as workers:
            chunk = workers.submit(environment_and_parent, "GSSIM_TEST_OF_WORKERS")
            while not workers.ended([chunk]):
                pass
            found.append(workers.answer(chunk))
    (first, parent, imported), second = found
    assert imported
    assert first == "first"
    assert second == ("second", parent, True)
    assert parent != os.getpid()


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_that_ship_say_what_they_ask(path):
    sweep = load_sweep(path)
    assert sweep.question.endswith("?")
    assert points_of(sweep, file=path)


def test_the_matrix_of_the_lab_is_what_it_should_be(monkeypatch):
    monkeypatch.setattr("gssim.workload.gradient_statistics.read_gradients", cache(read_gradients))
    path = next(path for path in SWEEPS if path.stem == "lab")
    points = points_of(load_sweep(path), file=path)
    loaded = [loaded_point(point, file=path).scenario for point in points]
    assert len(points) >= 60
    assert {scenario.ranks for scenario in loaded} >= {2, 3, 4}
    assert {scenario.workload.model.name for scenario in loaded} == {"gpt-byte-1m", "bert-byte-1m", "resnet-digits"}
    methods = "single ddp zero1 zero2 zero3 hsdp pipeline tensor gs gs_z3 gs_hier gs_wgrad gs_tp"
    assert {scenario.plan.method for scenario in loaded} == set(methods.split())
    sizes = [sum(other.group == group for other in points) for group in {point.group for point in points}]
    assert len(sizes) >= 8
    assert sum(size >= 8 for size in sizes) >= 8


def test_the_small_matrix_of_the_lab_is_small(monkeypatch):
    monkeypatch.setattr("gssim.workload.gradient_statistics.read_gradients", cache(read_gradients))
    path = next(path for path in SWEEPS if path.stem == "lab-small")
    points = points_of(load_sweep(path), file=path)
    assert len(points) <= 12
    for point in points:
        loaded_point(point, file=path)
