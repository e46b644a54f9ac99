"""`gsreal run` from the command line to the Result, and what is left when ranks die or the user interrupts."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import commands
import forks
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
from real_runs import HELPERS, scenario_file, star
from small_models import kept

from gsreal import cli
from gsreal.machine import device_name, usable_cores
from gsreal.model_files.build import build_module
from gsreal.model_files.request import Request
from gsreal.model_files.trace import write_model
from gsreal.run.checks import check_module, check_norms, check_predicted_only
from gsreal.run.launch import reason_of
from gssim.errors import UserError
from gssim.plan import Plan
from gssim.result import PHASES, Result, read_result
from gssim.result.trace import process_of
from gssim.scenario import load_model, load_scenario
from gssim.units import validated
from gssim.workload import Module

pytestmark = pytest.mark.real

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
DEVICE = device_name(torch.device("cpu"))
PROGRAM = "from {0}.cli import main; main()"
LIMIT_S = 120

SCENARIO = """# Does a small GPT train on two ranks?
cluster = "pair.toml"

[workload]
model = "model.toml"
gradients = "gradients.json"
global_batch_size = 12
sequence_length = 16
learning_rate = 3e-3

[plan]
method = "gs"
push.threshold = 3e-3
shares.batch = [0.75, 0.25]
shares.shards = [0.6, 0.4]

[run]
steps = 3
warmup_steps = 1
"""
CLUSTER = f"""name = "two ranks of this machine"
backend = "gloo"
source = "made by hand for the tests"
device_types.{DEVICE} = {{ kind = "cpu", memory_bytes = "1 GiB", memory_bandwidth_bytes_per_s = "10 GB/s", \
peak_flop_per_s = {{ fp32 = "10 GFLOP/s" }}, source = "assumed" }}
devices = [
  {{ name = "a", type = "{DEVICE}", host = "here" }},
  {{ name = "b", type = "{DEVICE}", host = "here" }},
]
links = [{{ between = ["a", "b"], bandwidth_bytes_per_s = "1 GB/s", latency_s = "50 us", source = "assumed" }}]
"""
# What a user's own module may do; every factory makes the model of the scenario.
USER_MODULE = """
import os
import signal
import time
from pathlib import Path

from gsreal.models import gpt


def with_hook(action, settings):
    module = gpt(**settings)
    if os.environ.get("RANK") == "1":
        module.register_forward_pre_hook(lambda *_: action())
    return module


def fail():
    raise ValueError("the second rank has had enough")


def raises(**settings):
    return with_hook(fail, settings)


def dies(**settings):
    return with_hook(lambda: os.kill(os.getpid(), signal.SIGKILL), settings)


def lingers(**settings):
    def wait():
        started = Path(os.environ["STARTED"])
        if not started.exists():
            begun = started.with_suffix(".begun")
            begun.write_text(str(os.getppid()))  # the launcher
            begun.rename(started)
        time.sleep(0.05)

    return with_hook(wait, settings)


def prints(**settings):
    print("what a module of the user's prints")
    return gpt(**settings)


def stranger(**settings):
    return gpt(**settings | {"layers": 3})
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with scenario, cluster, a model traced here, and its variants in a module of the user's."""
    folder = tmp_path_factory.mktemp("scenario")
    settings = ("width=32", "heads=2", "layers=2", "maximum_length=32")
    file = kept(
        Request(
            model="gsreal.models.gpt",
            arguments=settings,
            name="tiny-gpt",
            vocabulary=256,
            maximum_sequence_length=32,
            task="next-token",
            classes=10,
            auto_class="",
        )
    )
    shutil.copy(file, folder / "model.toml")
    model = load_model(file)
    for factory in ("raises", "dies", "lingers", "prints", "stranger"):
        module = Module(factory=f"module_of_a_user.{factory}", arguments=model.module.arguments)
        write_model(folder / f"{factory}.toml", replace(model, module=module))
    (folder / "module_of_a_user.py").write_text(USER_MODULE)
    (folder / "pair.toml").write_text(CLUSTER)
    (folder / "scenario.toml").write_text(SCENARIO)
    return folder


def command(files, program, *arguments):
    """Return the command line, an environment that all its processes inherit, and the marker in it."""
    marker = f"gsreal-test-{uuid.uuid4().hex}"
    paths = [str(files), str(SCENARIOS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "MARKER": marker}
    return [sys.executable, "-c", PROGRAM.format(program), *map(str, arguments)], environment, marker


def left_over(marker, patience_s=10.0):
    """Return the processes that carry the marker in their environment, after those that are ending have ended."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes can only be looked up where there is /proc")
    until = time.monotonic() + patience_s
    while (found := marked(marker)) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def marked(marker):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return found


def without_progress(stderr):
    return [line for line in stderr.splitlines() if not line.startswith("gsreal: step ")]


# One Result ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(files):
    """Return the Result that `gsreal run` prints, writes and traces, with the statistics taken before."""
    scenario = files / "scenario.toml"
    taken = commands.run(
        "gsreal",
        "gradients",
        scenario,
        "--out",
        files / "gradients.json",
        "--thresholds",
        "0,3e-3",
        "--every",
        "1",
        "--batches",
        "1",
        "--courses",
        "1",
    )
    assert taken.returncode == 0, taken.stderr
    out, trace = files / "results", files / "trace.json"
    ended = commands.run("gsreal", "run", scenario, "--json", "--out", out, "--trace", trace)
    assert ended.returncode == 0, ended.stderr
    assert without_progress(ended.stderr) == []
    (written,) = (files / "results").iterdir()
    assert written.read_text() == ended.stdout
    result = read_result(written)
    assert written.name == f"scenario.{result.scenario_id}.measured.json"
    return result


@pytest.fixture(scope="module")
def predicted(files, measured):
    """Return the prediction for the same file."""
    ended = commands.run("gssim", "run", files / "scenario.toml", "--json")
    assert ended.returncode == 0, ended.stderr
    (files / "predicted.json").write_text(ended.stdout)
    return read_result(files / "predicted.json")


def test_a_run_is_measured(measured: Result):
    assert measured.source == "measured"
    assert measured.fits
    assert len(measured.step_times_s) == 3
    assert measured.step_time_s == sorted(measured.step_times_s)[1]
    assert 0 < measured.step_time_p10_s <= measured.step_time_s
    assert measured.throughput_samples_per_s == pytest.approx(12 / measured.step_time_s)
    assert measured.provenance["torch"] == torch.__version__
    assert measured.provenance["backend"] == "gloo"
    assert measured.provenance["seed"] == 0


def test_phases_of_a_run_sum_to_its_step(measured: Result):
    assert set(measured.phases_s) == set(PHASES)
    assert sum(measured.phases_s.values()) == pytest.approx(measured.step_time_s, rel=1e-9)
    for rank in measured.ranks:
        assert min(rank.phases_s.values()) >= 0
        for phase in ("forward", "backward", "compression", "optimizer", "exposed_communication"):
            assert rank.phases_s[phase] > 0, phase


def test_a_run_says_what_it_really_ran_on(measured: Result):
    assert [rank.ranks for rank in measured.ranks] == [(0,), (1,)]
    assert [rank.device for rank in measured.ranks] == [DEVICE] * 2
    assert [rank.batch_share for rank in measured.ranks] == [0.75, 0.25]
    assert [rank.shard_share for rank in measured.ranks] == pytest.approx([0.6, 0.4])
    parameter_bytes = 4 * measured_elements(measured)
    for rank in measured.ranks:
        assert rank.peak_allocated_bytes > parameter_bytes


def measured_elements(measured):
    layers = measured.scenario["workload"]["model"]["layers"]
    assert layers
    return sum(
        max(1, len(layer["modules"])) * elements(parameter) for layer in layers for parameter in layer["parameters"]
    )


def elements(parameter):
    product = 1
    for size in parameter.split()[1].split("x"):
        product *= int(size)
    return product


def test_a_run_trains(measured: Result):
    assert len(measured.loss) == 3
    assert all(0 < loss < 6 for loss in measured.loss)  # log(256) = 5.5 at the start
    assert measured.loss[-1] < measured.loss[0]


def test_a_run_is_joined_to_its_prediction_by_the_scenarios_identity(measured: Result, predicted: Result):
    assert predicted.scenario_id == measured.scenario_id
    assert predicted.calibration_id != ""
    assert {rank.device for rank in predicted.ranks} == {DEVICE}


def test_the_collectives_of_a_run_are_the_predicted_ones(measured: Result, predicted: Result):
    assert measured.collectives
    assert sorted(entry.key for entry in measured.collectives) == sorted(entry.key for entry in predicted.collectives)


def test_the_density_of_a_run_is_the_predicted_one(measured: Result, predicted: Result):
    """The statistics were taken over the very same training, so that interpolation alone is between the two."""
    assert 0.001 < measured.density.push < 0.999
    assert predicted.density.push == pytest.approx(measured.density.push, rel=0.05)


def test_a_trace_holds_one_step_of_every_rank(files, measured: Result):
    events = json.loads((files / "trace.json").read_text())
    spans = [e for e in (events["traceEvents"] if isinstance(events, dict) else events) if e.get("ph") == "X"]
    assert {span["pid"] for span in spans} == {process_of(rank) for rank in (0, 1)}
    assert {"forward", "backward", "optimizer"} <= {span["name"] for span in spans}


def test_a_rank_without_samples_trains_along_and_a_module_may_print(files, measured: Result):
    """The same training: all samples on one rank. stdout holds the Result alone, whatever the module prints."""
    changes = ["workload.model=prints.toml", "plan.shares.batch=[1.0,0.0]", "plan.push.threshold=0"]
    line = ("run", files / "scenario.toml", "--json", "--trust-code", *overrides(changes))
    (ended,) = forks.run_commands(forks.Command([*map(str, line)], {"PYTHONPATH": str(files)}))
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert [rank["batch_share"] for rank in result["ranks"]] == [1.0, 0.0]
    assert result["loss"] == pytest.approx(measured.loss, rel=0.05)


def overrides(changes):
    return [part for change in changes for part in ("--set", change)]


@pytest.mark.slow  # tests of the README run a program under torchrun
def test_a_run_works_under_torchrun_too(files):
    line, environment, marker = command(files, "gsreal", "run", files / "scenario.toml", "--json", *overrides(DENSE))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    ended = subprocess.run(
        [*launcher, *line], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["source"] == "measured"
    assert left_over(marker) == []


DENSE = ("plan.method=ddp", "plan.push={}", "plan.shares={}")

# Ranks that die ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        pytest.param(
            "raises", "gsreal: rank 1 failed: ValueError: the second rank has had enough", marks=pytest.mark.slow
        ),
        ("dies", "gsreal: rank 1 died (SIGKILL)"),
    ],
)
def test_a_rank_that_dies_is_named_in_one_line_and_nothing_is_written(files, tmp_path, factory, message):
    changes = [f"workload.model={files / factory}.toml", *DENSE]
    line = ("run", files / "scenario.toml", "--trust-code", "--json", "--out", tmp_path / "out", *overrides(changes))
    (ended,) = forks.run_commands(forks.Command([*map(str, line)], {"PYTHONPATH": str(files)}))
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.splitlines() == [message]
    assert not (tmp_path / "out").exists()


def test_a_fault_of_the_users_that_ranks_find_is_exit_2(files, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(files))  # where ranks find the module
    changes = [f"workload.model={files / 'stranger'}.toml", *DENSE]
    line = ("gsreal", "run", files / "scenario.toml", "--trust-code", "--out", tmp_path / "out")
    ended = commands.run(*line, *overrides(changes))
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("gsreal: workload.model: the file lists ")
    assert not (tmp_path / "out").exists()


ORPHAN = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
from pathlib import Path
import gsreal.run.rank
Path(sys.argv[2], "adopted").write_text(str(os.getppid()))
gsreal.run.rank.run_on_rank(Path(sys.argv[2], "worked").touch, [])
"""


def test_a_rank_whose_launcher_was_killed_before_it_had_begun_does_nothing(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    line = f"{shlex.quote(sys.executable)} {tmp_path}/orphan.py $$ {tmp_path} & kill -9 $$"
    subprocess.run(["sh", "-c", line], env={**os.environ, "GSREAL_LAUNCHER": str(os.getpid())}, check=False)
    until = time.monotonic() + 60
    while not (tmp_path / "adopted").exists() and time.monotonic() < until:
        time.sleep(0.05)
    if (tmp_path / "adopted").read_text() != "1":
        pytest.skip("here another process than the first adopts orphans")
    time.sleep(0.5)
    assert not (tmp_path / "worked").exists()


@pytest.fixture(params=["forked", pytest.param("started", marks=pytest.mark.slow)])
def interrupted(request, files, tmp_path):
    """Return (exit code, stdout, stderr) of an interrupted run, and what its processes and its files were before.

    Its launcher and ranks are forks of a process that has imported torch; started anew, importing takes far longer.
    """
    changes = [f"workload.model={files / 'lingers'}.toml", "run.steps=900000", *DENSE]
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    asked = ("run", files / "scenario.toml", "--trust-code", "--out", tmp_path / "out", *overrides(changes))
    line, environment, marker = command(files, "gsreal", *asked)
    temporary.mkdir()
    environment |= {"STARTED": str(started), "TMPDIR": str(temporary)}
    with ThreadPoolExecutor(1) as thread:
        if request.param == "forked":
            ends = thread.submit(lambda: forks.run_commands(forks.Command(line[3:], environment))[0])
        else:
            ends = thread.submit(subprocess.run, line, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        until = time.monotonic() + LIMIT_S
        while not started.exists() and not ends.done() and time.monotonic() < until:
            time.sleep(0.1)
        launcher = int(started.read_text())
        processes = [launcher, *children(launcher)]
        seen = {"processes": len(processes), "listening": listening(processes), "files": list(temporary.iterdir())}
        os.kill(launcher, signal.SIGINT)
        ended = ends.result(timeout=LIMIT_S)
    assert left_over(marker) == []
    return (ended.returncode, ended.stdout, without_progress(ended.stderr)), seen


def test_a_run_listens_on_the_loopback_alone_and_an_interrupt_stops_every_rank(interrupted, tmp_path):
    ended, seen = interrupted
    assert seen["processes"] == 3  # the launcher and two ranks
    assert seen["listening"]  # gloo's
    assert set(seen["listening"]) <= LOOPBACK
    assert seen["files"]
    assert ended == (130, "", ["gsreal: interrupted; all ranks are stopped"])
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "out").exists()


def children(process):
    """Return the ids of a process's children."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            if int((each / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(each.name))
    return found


def listening(processes):
    """Return the addresses, as the kernel writes them, on which processes listen."""
    inodes = set()
    for process in processes:
        with suppress(OSError):  # a handle is closed meanwhile
            inodes |= {os.readlink(handle) for handle in Path("/proc", str(process), "fd").iterdir()}
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    return [words[1].rpartition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in inodes]


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
STOPPED_AFTER_S = 30


@pytest.mark.slow
def test_a_stopped_rank_is_named_within_the_time_out(files, tmp_path):
    """tests/real/test_watch.py has the same test for ranks that do not train."""
    (tmp_path / "temporary").mkdir()
    changes = [f"workload.model={files / 'lingers'}.toml", "run.steps=900000", *DENSE]
    options = ("--trust-code", "--timeout", STOPPED_AFTER_S, *overrides(changes))
    line, environment, marker = command(files, "gsreal", "run", files / "scenario.toml", *options)
    started = tmp_path / "started"
    environment |= {"STARTED": str(started), "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + LIMIT_S
        while not started.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        (second,) = (int(each.name) for each in Path("/proc").glob("[0-9]*") if is_rank(each, 1, marker))
        os.kill(second, signal.SIGSTOP)
        stopped_s = time.monotonic()
        _, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, stderr
    assert time.monotonic() - stopped_s < STOPPED_AFTER_S + 10
    (told,) = without_progress(stderr)
    assert told.startswith(
        f"gsreal: no rank has made progress for {STOPPED_AFTER_S} s (--timeout): rank 1 is stopped ("
    )
    assert left_over(marker) == []
    assert list((tmp_path / "temporary").iterdir()) == []


def is_rank(process, rank, marker):
    try:
        environment = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"RANK={rank}".encode() in environment and f"MARKER={marker}".encode() in environment


# What the user can mend ----------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder


class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, path, target)


sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
from gsreal.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "s.toml"),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (("trace", "m", "--out", "o"), ("calibrate", "--out", "o"))
        ),
    ],
)
def test_without_torch_there_is_an_instruction(arguments, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SCENARIOS.parent)}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr == "gsreal: torch is missing: pip install 'gssim[real]'\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def refusal(monkeypatch, capsys, tmp_path):
    """Return a function that runs a command that must be refused, and returns the line that says why."""

    def refused(*arguments):
        monkeypatch.setattr(sys, "argv", ["gsreal", *map(str, arguments), "--out", str(tmp_path / "out")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        stdout, stderr = capsys.readouterr()
        assert ended.value.code == 2, stderr
        assert stdout == ""
        assert stderr.startswith("gsreal: ")
        assert stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()
        return stderr.removeprefix("gsreal: ").rstrip("\n")

    return refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--timeout", "0"), "--timeout 0: must be seconds, more than 0"),
        (("--every", "3"), "--every 3: nothing is saved; name a folder with --checkpoint, or leave it out"),
        (("--timeout", "nan"), "--timeout nan: must be seconds, more than 0"),
        (("--interface", "nowhere0"), "--interface nowhere0: this machine has "),
    ],
)
def test_bad_options_of_run(refusal, files, options, message):
    assert refusal("run", files / "scenario.toml", *options).startswith(message)


def test_more_ranks_than_devices(refusal, files):
    scenario = files / "scenario.toml"
    line = refusal("run", scenario, *overrides(["plan.method=ddp", "plan.dp_replicate=4", *DENSE[1:]]))
    assert line == f"{scenario}: plan.dp_replicate = 4: needs 4 ranks, but the cluster has 2 devices"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_cluster_of_gpus_on_a_machine_without(refusal):
    path = SCENARIOS / "gpt2-unequal-gpus.toml"
    assert refusal("run", path).startswith(f"{path}: cluster: its devices are GPUs, but this machine has none; use")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"method": "pipeline", "micro_batches": 2}, "plan.pp = 2: pipelines on GPUs can be predicted, but not run"),
        ({"method": "tensor", "sequence_parallel": True}, "plan.sequence_parallel = true: on GPUs it can be predicted"),
        ({"method": "tensor"}, ""),
    ],
    ids=str,
)
def test_what_gloo_does_not_carry_between_gpus(plan, said):
    """torch hands gloo the addresses of a GPU's tensors, which it reads as the host's: a run ends in a crash (seen)."""
    scenario = load_scenario(SCENARIOS / "demo.toml", gradients_needed=False).scenario
    (core,) = scenario.cluster.device_types.values()
    gpu = replace(core, kind="cuda")
    cluster = replace(scenario.cluster, device_types=dict.fromkeys(scenario.cluster.device_types, gpu))
    on_gpus = replace(scenario, cluster=cluster, plan=validated(Plan, plan, file="plan"))
    for each, message in ((on_gpus, said), (replace(on_gpus, cluster=replace(cluster, backend="nccl")), "")):
        with pytest.raises(UserError, match=re.escape(message)) if message else nullcontext():
            check_predicted_only(each, where="file")


def test_exchanges_beside_products_of_nccl_cannot_run():
    plan = {"method": "tensor", "sequence_parallel": True, "tp_overlap": True}
    scenario = load_scenario(SCENARIOS / "demo.toml", gradients_needed=False).scenario
    asked = replace(scenario, plan=validated(Plan, plan, file="plan"))
    check_predicted_only(asked, where="file")
    said = "file: plan.tp_overlap = True: can be predicted, but is run with cluster.backend = 'gloo' only"
    with pytest.raises(UserError, match=re.escape(said)):
        check_predicted_only(replace(asked, cluster=replace(scenario.cluster, backend="nccl")), where="file")


@pytest.mark.parametrize(("method", "those"), [("zero2", "FSDP2's shards"), ("tensor", "slices of blocks (DTensors)")])
def test_a_fused_sgd_on_dtensors(refusal, files, method, those):
    changes = (f"plan.method={method}", "workload.optimizer=sgd", "workload.optimizer_implementation=fused")
    said = refusal("run", files / "scenario.toml", *overrides([*DENSE[1:], *changes]))
    assert f"torch has no fused SGD for {those}" in said


def test_a_module_of_hugging_face_on_a_rank_without_samples(refusal, files):
    model = SCENARIOS.parent / "tests/helpers/models/llama.toml"
    changes = (f"workload.model={model}", "workload.sequence_length=24", "plan.shares.batch=[1.0,0.0]")
    said = refusal("run", files / "scenario.toml", *overrides([*DENSE[1:], *changes]))
    assert "rank 1 has no samples" in said
    assert "modules of Hugging Face ('llama') run no empty batch" in said


def test_a_batch_norm_of_one_value_per_channel():
    """Ranks ended in torch's own error: after all halvings images of 8x8 have one pixel."""

    def loaded_with(*changes):
        model = f"workload.model={HELPERS}/models/resnet.toml"
        return load_scenario(Path(scenario_file("resnet-digits.toml")), [star(2), model, *changes]).scenario

    check_norms(loaded_with("plan.method=ddp", "workload.global_batch_size=4"), where="file")
    for change in ("workload.global_batch_size=2", "plan.micro_batches=2"):
        scenario = loaded_with("plan.method=ddp", "workload.global_batch_size=4", change)
        with pytest.raises(
            UserError, match=r"file: rank 0 has micro-batches of one sample: .* at least two samples in a mi"
        ):
            check_norms(scenario, where="file")


def check_demo(plan: dict[str, str], module: torch.nn.Module, *, ranks: int = 2) -> None:
    changes = [star(ranks), *(f"plan.{key}={value}" for key, value in plan.items())]
    check_module(load_scenario(SCENARIOS / "demo.toml", changes, gradients_needed=False).scenario, module)


@pytest.fixture
def module() -> torch.nn.Module:
    """The demo's module, without values."""
    demo = load_scenario(SCENARIOS / "demo.toml", [], gradients_needed=False).scenario
    with torch.device("meta"):
        return build_module(demo.workload.model.module, where="file")


@pytest.mark.parametrize(("method", "runs"), [("zero2", False), ("zero3", False), ("gs_z3", False), ("gs", True)])
def test_blocks_that_share_a_layer(module, method, runs):
    """FSDP2 ended ranks with an invariant of its own, and gs_z3 with a ValueError."""
    module.unused = module.blocks[1].up
    module.blocks[1].up = module.blocks[0].up
    said = "shards 'blocks.0' and 'blocks.1' one by one, but they share 'up.weight'"
    with nullcontext() if runs else pytest.raises(UserError, match=said):
        check_demo({"method": method}, module)


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        ({"method": "ddp"}, None),
        ({"method": "gs"}, None),
        ({"method": "zero3"}, "method = 'zero3'"),
        ({"method": "ddp", "tp": "2"}, "tp = 2"),
    ],
)
def test_hooks_of_parameters(module, plan, key):
    """FSDP2 dropped them: with one that halves a gradient, parameters were 3e-2 off one device's after five steps."""
    module.head.weight.register_hook(lambda gradient: gradient / 2)
    said = f"plan.{key}: replaces parameters by parts of them, which do not have the hook (register_hook) of 'head"
    with nullcontext() if key is None else pytest.raises(UserError, match=re.escape(said)):
        check_demo(plan, module)


@pytest.mark.parametrize(("method", "runs"), [("ddp", True), ("zero3", False)])
def test_parameters_in_another_memory_format(module, method, runs):
    """A rank ended with an error of FSDP2's own."""
    module.head.weight = torch.nn.Parameter(module.head.weight.data.t().contiguous().t())
    said = "'head.weight' is not contiguous, and FSDP2 shards no such parameter"
    with nullcontext() if runs else pytest.raises(UserError, match=said):
        check_demo({"method": method}, module)


@pytest.mark.parametrize(("method", "runs"), [("single", True), ("ddp", False), ("zero3", False), ("gs", False)])
def test_an_embedding_that_its_forward_changes(module, method, runs):
    """Replicas of DDP had other parameters each, FSDP2's were 3 off one device's, and gs ended in a traceback."""
    module.head.max_norm = 1.0  # an attribute of a module's own means nothing
    check_demo({"method": method}, module, ranks=1 if runs else 2)
    module.tokens.max_norm = 1.0
    with nullcontext() if runs else pytest.raises(UserError, match="'tokens' has max_norm: its forward changes"):
        check_demo({"method": method}, module, ranks=1 if runs else 2)


def test_experts_of_hugging_face_in_fp64(refusal, files):
    """A rank failed in its first step: torch has no such product."""
    model = SCENARIOS.parent / "tests/helpers/models/mixtral.toml"
    changes = (f"workload.model={model}", "workload.sequence_length=24", "workload.precision=fp64", "plan.method=ddp")
    said = refusal("run", files / "scenario.toml", *overrides([*DENSE[1:], *changes]))
    assert "workload.precision = 'fp64': torch has no grouped product in fp64" in said


def test_data_that_the_model_cannot_read(refusal, files):
    for command_name in ("run", "gradients"):
        line = refusal(command_name, files / "scenario.toml", "--set", "workload.data=digits")
        assert line.startswith(
            f"{files / 'scenario.toml'}: workload.data: a model with a vocabulary of 256 cannot read 'digits'"
        )


@pytest.mark.parametrize("thresholds", ["-1", "none", "", "0,0", "0,nan", "inf", "1e-3,"])
def test_thresholds_that_are_none(refusal, files, thresholds):
    line = refusal("gradients", files / "scenario.toml", "--thresholds", thresholds)
    assert line == f"--thresholds {thresholds}: must be distinct numbers of at least 0, separated by commas"


@pytest.mark.parametrize("option", [("--thresholds", "1e-3"), ("--every", "5"), ("--courses", "1"), ("--batches", "4")])
def test_options_that_a_ladder_would_not_heed_are_refused(refusal, option):
    line = refusal("gradients", "--ladder", "gpt", *option)
    assert line == "gradients --ladder gpt: takes no scenario, --set, --thresholds, --every, --courses or --batches"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--precision", "fp8"), "--precision fp8: allowed: fp32, bf16, fp16, fp64"),
        (("--ranks", "0"), "--ranks 0: must be at least 1"),
        (("--ranks", "-3"), "--ranks -3: must be at least 1"),
        (("--batch-sizes", "some"), "--batch-sizes some: must be distinct whole numbers of at least 1"),
        (("--batch-sizes", "4,4"), "--batch-sizes 4,4: must be distinct whole numbers of at least 1"),
        (("--batch-sizes", "nan"), "--batch-sizes nan: must be distinct whole numbers of at least 1"),
        (("--batch-sizes", "0,4"), "must be distinct whole numbers of at least 1"),
        (("--batch-sizes", "1.5"), "must be distinct whole numbers of at least 1"),
        (("--sequence-length", "0"), "--sequence-length 0: must be at least 1"),
        (("nowhere.toml",), "nowhere.toml: no such file"),
    ],
)
def test_bad_options_of_calibrate(refusal, options, message):
    assert message in refusal("calibrate", *options)


def test_a_longer_sequence_than_the_model_takes_is_not_calibrated(refusal, files):
    assert load_model(files / "model.toml").input.maximum_sequence_length == 32
    line = refusal("calibrate", files / "model.toml", "--sequence-length", "33")
    assert line == f"--sequence-length 33: {files / 'model.toml'} takes at most 32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks may share a GPU")
def test_more_ranks_than_cores_are_not_calibrated(refusal):
    cores = len(usable_cores())
    line = refusal("calibrate", "--ranks", cores + 1)
    assert line == f"--ranks {cores + 1}: this machine has {cores} cores that may be used"


@pytest.mark.parametrize(("code", "name"), [(-9, "SIGKILL"), (-36, "signal 36"), (3, "exit code 3")])
def test_a_rank_that_died_of_any_signal_is_told(tmp_path, code, name):
    assert reason_of(tmp_path, (1, code), "") == f"rank 1 died ({name})"
