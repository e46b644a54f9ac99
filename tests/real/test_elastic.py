"""Training saved by some ranks goes on with others, and after a rank was killed, as if nothing had happened."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace

import commands
import forks
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
from real_runs import HELPERS, SCENARIOS, slow_where, star
from torch.distributed.checkpoint.api import CheckpointException

from gsreal.measure import Timeline
from gsreal.methods.training import LossScaler
from gsreal.run import rank
from gsreal.run.checkpoint import (
    FORMAT,
    LOCK,
    Checkpoints,
    _complete,
    _raise_with_reason,
    _read_loss_scale,
    _write_own,
    check_checkpoints,
    identity,
    last_undamaged,
    read_progress,
    remove_leftovers,
)
from gsreal.run.feed import Feed
from gsreal.run.worker import build
from gssim.errors import RunFailedError, UserError
from gssim.execution.files import locked
from gssim.result import read_result
from gssim.scenario import load_scenario, single_device

pytestmark = pytest.mark.real

DEMO = HELPERS / "small-demo.toml"
RESNET = SCENARIOS / "resnet-digits.toml"
STEPS, SAVED = 8, 4
OF_TEXT = ["workload.sequence_length=16"]
COMMON = [
    *OF_TEXT,
    "workload.global_batch_size=12",
    "workload.optimizer=adamw",
    "workload.precision=fp64",
    "workload.learning_rate=1e-3",
    "run.warmup_steps=1",
]
BUCKETS = ["plan.bucket_bytes=300000", "plan.first_bucket_bytes=100000"]
SHARES = {4: "[0.4,0.3,0.2,0.1]", 3: "[0.2,0.5,0.3]", 2: "[0.6,0.4]"}
EXACT = 1e-9
"""Relative tolerance of a loss in fp64."""


def overrides(ranks: int, steps: int, *changes: str) -> list[str]:
    shards = (
        [f"plan.shares.shards={SHARES[ranks]}", *BUCKETS]
        if {"plan.method=gs", "plan.method=gs_z3"} & {*changes} and "plan.shares.shards=even" not in changes
        else []
    )
    return [star(ranks), *COMMON, f"run.steps={steps - 1}", *changes, *shards]


def train(
    folder: Path, checkpoints: Path, ranks: int, steps: int, *changes: str, scenario: Path = DEMO
) -> tuple[float, ...]:
    """Train for `steps` steps in all, from the last checkpoint on; return the losses."""
    made = folder / f"{ranks}-{steps}.json"
    asked = json.dumps([each for each in overrides(ranks, steps, *changes) if scenario == DEMO or each not in OF_TEXT])
    arguments = [str(scenario), asked, str(made), "", str(checkpoints), str(SAVED)]
    forks.launch("gsreal.run.worker", arguments, ranks=ranks)
    return read_result(made).loss


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """Return the losses of the same training on one device, after the warm-up."""
    scenario = single_device(load_scenario(DEMO, overrides(2, STEPS), gradients_needed=False).scenario)
    torch.set_num_threads(1)
    training = build(scenario, Timeline(0, torch.device("cpu")), torch.device("cpu"))
    feed = Feed(scenario, 0, torch.device("cpu"))
    losses = [float(training.step(*feed.at(step), 0)) for step in range(STEPS)]
    return losses[1:]


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory) -> Path:
    """Return a folder with what four ranks saved half way, and what a fifth attempt left unfinished."""
    folder = tmp_path_factory.mktemp("four")
    train(folder, folder / "saved", 4, SAVED, "plan.method=gs")
    (folder / "saved" / f"step-{SAVED + 2:08d}.partial").mkdir()
    return folder / "saved"


@pytest.mark.parametrize("ranks", [3, slow_where(2, slow=[2])])
def test_what_four_ranks_saved_goes_on_with_fewer(saved_by_four: Path, undisturbed, tmp_path: Path, ranks: int):
    shutil.copytree(saved_by_four, tmp_path / "saved")
    losses = train(tmp_path, tmp_path / "saved", ranks, STEPS, "plan.method=gs")
    assert losses == pytest.approx(undisturbed, rel=EXACT)
    assert losses[-1] < losses[0]
    progress = read_progress(_complete(tmp_path / "saved")[-1])
    assert (progress.step, progress.ranks) == (STEPS, ranks)
    assert progress.losses == pytest.approx(undisturbed, rel=EXACT)
    assert not list((tmp_path / "saved").glob("*.partial"))


SAMPLES_TWICE = ["plan.dp_replicate=1", "plan.dp_shard=2", "plan.tp=2"]
UNEVEN = "plan.shares.shards=[0.75,0.25]"
"""Uneven shares of heads and columns, for this project's own slices."""
EVEN = "plan.shares.shards=even"
PLANS: dict[str, tuple[int, list[str]]] = {
    "pipeline": (2, ["plan.method=pipeline", "plan.micro_batches=3"]),
    "interleaved": (2, ["plan.method=pipeline", "plan.schedule=interleaved", "plan.micro_batches=4"]),
    "pipeline-of-three": (3, ["plan.method=pipeline", "plan.micro_batches=3"]),
    "pipelines": (4, ["plan.method=zero1", "plan.pp=2", "plan.dp_replicate=2", "plan.micro_batches=3"]),
    "tensor": (2, ["plan.method=tensor"]),
    "tensor-of-four": (4, ["plan.method=tensor"]),
    "gs_tp": (2, ["plan.method=gs_tp", UNEVEN]),
    "ddp-tp": (4, ["plan.method=ddp", "plan.dp_replicate=2", "plan.tp=2"]),
    "zero2-tp": (4, ["plan.method=zero2", *SAMPLES_TWICE]),
    "zero3-tp": (4, ["plan.method=zero3", *SAMPLES_TWICE]),
    "hsdp-tp": (4, ["plan.method=hsdp", "plan.dp_replicate=2", "plan.dp_shard=1", "plan.tp=2"]),
    "cut-stages": (4, ["plan.method=tensor", "plan.pp=2", "plan.tp=2", "plan.micro_batches=3"]),
    "divided-stages": (4, ["plan.method=zero3", "plan.pp=2", "plan.cp=2", "plan.micro_batches=3"]),
    "gs_z3-stages": (4, ["plan.method=gs_z3", "plan.pp=2", "plan.dp_shard=2", "plan.micro_batches=3", EVEN]),
    "gs-divided-stages": (4, ["plan.method=gs", "plan.pp=2", "plan.cp=2", "plan.micro_batches=3", EVEN]),
    "gs-stages": (4, ["plan.method=gs", "plan.pp=2", "plan.dp_shard=2", "plan.micro_batches=3", EVEN]),
    "gs": (2, ["plan.method=gs", EVEN]),
    "gs_z3": (3, ["plan.method=gs_z3", EVEN]),
    "gs_wgrad": (2, ["plan.method=gs_wgrad"]),
    "gs_wgrad-of-three": (3, ["plan.method=gs_wgrad"]),
    "zero3": (3, ["plan.method=zero3"]),
    "ddp": (2, ["plan.method=ddp"]),
}
"""How many ranks train, and how."""


@pytest.mark.slow
def test_a_model_cut_by_layers_goes_on_cut_inside_of_blocks(undisturbed, tmp_path: Path):
    """Checkpoints are stored by the names and elements of the whole model."""
    go_on(tmp_path, ("pipeline", "gs_tp"), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("tensor", "tensor-of-four"),
        ("tensor-of-four", "pipeline-of-three"),
        ("pipelines", "tensor"),
        ("interleaved", "pipelines"),
        ("gs_tp", "ddp-tp"),
        ("ddp-tp", "zero3-tp"),
        ("zero3-tp", "gs_tp"),
        ("zero2-tp", "zero2-tp"),
        ("hsdp-tp", "zero3"),
        ("gs_wgrad", "gs_wgrad-of-three"),
        ("zero3", "gs_wgrad"),
        ("ddp", "zero2-tp"),
        ("cut-stages", "gs_tp"),
        ("zero3-tp", "cut-stages"),
        ("divided-stages", "cut-stages"),
        ("gs-divided-stages", "gs"),
        ("gs", "gs-stages"),
        ("gs", "gs_z3"),
        ("gs_z3", "gs_z3-stages"),
        ("gs_z3-stages", "gs"),
    ],
    ids="-then-".join,
)
def test_what_is_saved_goes_on_however_it_is_divided_then(undisturbed, tmp_path: Path, names: tuple[str, str]):
    go_on(tmp_path, names, undisturbed)


def go_on(folder: Path, names: tuple[str, ...], expected: list[float]) -> None:
    """Train to half under the first plan and to the end under the second; check all losses."""
    for name, steps in zip(names, (SAVED, STEPS), strict=True):
        ranks, plan = PLANS[name]
        losses = train(folder, folder / "saved", ranks, steps, *plan)
    assert losses == pytest.approx(expected, rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ddp", "zero1", "gs_wgrad", "tensor", "pipeline", "zero3", "gs"])
def test_with_a_master_copy_it_goes_on_as_if_nothing_had_happened(tmp_path: Path, method: str):
    """In bf16 a step is not the same to rounding on other ranks; on the same ones it is the very same."""
    plan = [f"plan.method={method}", "workload.precision=bf16", "workload.learning_rate=1e-2", "plan.micro_batches=2"]
    expected = train(tmp_path, tmp_path / "whole", 2, STEPS, *plan)
    train(tmp_path, tmp_path / "saved", 2, SAVED, *plan)
    assert train(tmp_path, tmp_path / "saved", 2, STEPS, *plan) == expected


@pytest.mark.slow
def test_convolutions_that_are_cut_go_on_whole(tmp_path: Path):
    """The residual network's norms are cut with its convolutions; after resuming, each rank has all of both."""
    found = []
    for number, method in enumerate(("ddp", "tensor", "ddp")):
        folder, steps = tmp_path / ("saved" if number else "whole"), SAVED if number == 1 else STEPS
        found.append(train(tmp_path, folder, 2, steps, f"plan.method={method}", scenario=RESNET))
    assert found[2] == pytest.approx(found[0], rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ddp", "zero1", "zero2", "zero3", "hsdp", "gs_z3", "gs_hier"])
def test_what_three_ranks_saved_goes_on_with_two_in_every_method(undisturbed, tmp_path: Path, method: str):
    levels = method in ("hsdp", "gs_hier")
    for ranks, steps in ((3, SAVED), (2, STEPS)):
        mesh = [f"plan.dp_replicate={ranks}", "plan.dp_shard=1"] if levels else []
        losses = train(tmp_path, tmp_path / "saved", ranks, steps, f"plan.method={method}", *mesh)
    assert losses == pytest.approx(undisturbed, rel=EXACT)


@pytest.mark.slow
def test_four_ranks_then_three_then_two(saved_by_four: Path, undisturbed, tmp_path: Path):
    """Every resumption from the one before, each with shares of its own."""
    shutil.copytree(saved_by_four, tmp_path / "saved")
    train(tmp_path, tmp_path / "saved", 3, SAVED + 2, "plan.method=gs")
    losses = train(tmp_path, tmp_path / "saved", 2, STEPS, "plan.method=gs")
    assert losses == pytest.approx(undisturbed, rel=EXACT)


REPLAN = ["plan.shares.replan=true", "plan.shares.batch=[0.75,0.25]"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, slow_where(3, slow=[3])])
def test_shares_that_follow_the_ranks_paces_go_on_as_they_were(undisturbed, tmp_path: Path, ranks: int):
    """The same number of ranks resumes with the saved shares; another number begins with the plan's."""
    train(tmp_path, tmp_path / "saved", 2, SAVED, "plan.method=gs", *REPLAN)
    path = _complete(tmp_path / "saved")[-1] / "progress.json"
    saved = json.loads(path.read_text())
    assert sum(saved["samples"]) == 12
    path.write_text(json.dumps(saved | {"samples": [5, 7], "shard_shares": [0.25, 0.75]}))  # as if paces had changed
    losses = train(tmp_path, tmp_path / "saved", ranks, STEPS, "plan.method=gs", *REPLAN[: 4 - ranks])
    assert losses == pytest.approx(undisturbed, rel=EXACT)
    divisions = read_result(tmp_path / f"{ranks}-{STEPS}.json").divisions
    if ranks == 2:
        first = divisions[0]
        assert (first.first_step, first.samples, first.shard_shares) == (SAVED - 1, (5, 7), (0.25, 0.75))
    else:
        assert all(each.first_step > SAVED - 1 for each in divisions)


# A rank that is killed -----------------------------------------------------------------------------------------------

USER_MODULE = """
import os
import signal
from pathlib import Path

from gsreal.models import gpt

calls = []


def dies_once(**settings):
    module = gpt(**settings)
    if os.environ.get("RANK") == "1":
        module.register_forward_pre_hook(count)
    return module


def count(*_):
    calls.append(1)
    if len(calls) == 6 and not Path(os.environ["DIED"]).exists():
        Path(os.environ["DIED"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_changes_nothing(undisturbed, tmp_path: Path):
    """The second rank kills itself in the sixth step, once; both are started again from what they saved after four."""
    (tmp_path / "module_of_a_user.py").write_text(USER_MODULE)
    model = (SCENARIOS / "models" / "gpt-byte-150k.toml").read_text()
    assert '"gsreal.models.gpt"' in model
    (tmp_path / "model.toml").write_text(model.replace('"gsreal.models.gpt"', '"module_of_a_user.dies_once"'))
    paths = [str(tmp_path), str(SCENARIOS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "DIED": str(tmp_path / "died")}
    changes = [*overrides(2, STEPS, "plan.method=gs"), f"workload.model={tmp_path / 'model.toml'}"]
    line = ["run", str(DEMO), "--json"]
    line += ["--trust-code", "--checkpoint", str(tmp_path / "saved"), "--every", str(SAVED), "--max-restarts", "1"]
    line += [part for change in changes for part in ("--set", change)]
    (ended,) = forks.run_commands(forks.Command(line, environment))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "died").exists()
    assert f"gsreal: resumed at step {SAVED}" in ended.stderr.splitlines()
    assert json.loads(ended.stdout)["loss"] == pytest.approx(undisturbed, rel=EXACT)


# What can be mended --------------------------------------------------------------------------------------------------


def refusal(*changes: str, folder: Path, every: int = 1, steps: int = STEPS) -> str:
    scenario = load_scenario(DEMO, overrides(2, steps, *changes), gradients_needed=False).scenario
    with pytest.raises(UserError) as found:
        check_checkpoints(scenario, folder, every, where="scenario.toml")
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_cannot_be_saved_is_refused_before_ranks_start(tmp_path: Path):
    cut = ["plan.method=gs", "plan.tp=2", "plan.shares.shards=even"]
    assert "not saved yet" in refusal(*cut, folder=tmp_path)
    several = ["plan.method=gs", "plan.pp=2", "plan.schedule=interleaved", "plan.micro_batches=2"]
    assert "several stages of a rank" in refusal(star(4), *several, "plan.shares.shards=even", folder=tmp_path)


def test_what_is_saved_needs_no_rates_of_devices(tmp_path: Path):
    changes = ["workload.precision=fp64", "plan.method=gs"]  # its cluster states no rate in fp64
    scenario = load_scenario(SCENARIOS / "demo.toml", changes, gradients_needed=False).scenario
    check_checkpoints(scenario, tmp_path, 1, where="scenario.toml")


def written(folder: Path, scenario, step: int) -> Path:
    """Write what is read of a checkpoint before ranks start."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "__1_0.distcp").write_bytes(b"abcdefgh")
    files = {"__1_0.distcp": hashlib.sha256(b"abcdefgh").hexdigest()}
    progress = {
        "step": step,
        "losses": [],
        "ranks": 2,
        "training": identity(scenario),
        "format": FORMAT,
        "files": files,
    }
    (path / "progress.json").write_text(json.dumps(progress))
    return path


def test_another_trainings_checkpoint_is_refused(tmp_path: Path):
    scenario = load_scenario(DEMO, overrides(2, STEPS, "plan.method=gs"), gradients_needed=False).scenario
    written(tmp_path, scenario, 4)
    check_checkpoints(scenario, tmp_path, 1, where="scenario.toml")  # its own is none
    message = refusal("plan.method=gs", "workload.learning_rate=5e-3", folder=tmp_path)
    assert "workload.learning_rate = 0.001 there, 0.005 in scenario.toml" in message
    assert "form of the optimizer's state = 'gradient-sharding' there, 'torch'" in refusal(
        "plan.method=ddp", folder=tmp_path
    )
    clipped = refusal("plan.method=gs", "workload.clip_norm=0.5", folder=tmp_path)
    assert "workload.clip_norm = None there, 0.5 in scenario.toml" in clipped
    scaled = ["workload.precision=fp16", "workload.loss_scale=1024"]
    scenario = load_scenario(DEMO, overrides(2, STEPS, "plan.method=gs", *scaled), gradients_needed=False).scenario
    written(tmp_path / "scaled", scenario, 4)
    check_checkpoints(scenario, tmp_path / "scaled", 1, where="scenario.toml")
    assert "raise run.steps" in refusal("plan.method=gs", folder=tmp_path, steps=4)
    assert "--every 0" in refusal("plan.method=gs", folder=tmp_path, every=0)


@pytest.mark.parametrize("change", ["workload.clip_norm=0.5", "workload.autocast=bf16"])
def test_a_checkpoint_of_a_training_without_a_setting_is_refused_with_it(change, tmp_path: Path):
    """And the other way round; the same scenario goes on."""
    file = Path(__file__).parents[1] / "helpers/models/of_tests/autocast-gpt.toml"
    same = ["plan.method=ddp", f'workload.model="{file}"', "workload.sequence_length=24", "workload.precision=fp32"]
    loaded = [
        load_scenario(DEMO, overrides(2, STEPS, *same, *changes), gradients_needed=False).scenario
        for changes in ((), (change,))
    ]
    for number, scenario in enumerate(loaded):
        written(tmp_path / str(number), scenario, 4)
        check_checkpoints(scenario, tmp_path / str(number), 1, where="scenario.toml")
        with pytest.raises(UserError, match=f"was saved by another training: {change.partition('=')[0]} = "):
            check_checkpoints(loaded[1 - number], tmp_path / str(number), 1, where="scenario.toml")


def test_stages_with_copies_of_a_tied_parameter_save_a_state_for_each(tmp_path: Path):
    file = Path(__file__).parents[1] / "helpers/models/gpt-tied.toml"
    tied = [f'workload.model="{file}"', "workload.sequence_length=24"]
    plan = ["plan.method=gs", "plan.pp=2", "plan.dp_shard=2", "plan.micro_batches=3", EVEN, *tied]
    scenario = load_scenario(DEMO, overrides(4, STEPS, *plan), gradients_needed=False).scenario
    written(tmp_path, scenario, 4)
    check_checkpoints(scenario, tmp_path, 1, where="scenario.toml")
    message = refusal("plan.method=gs", *tied, folder=tmp_path)
    assert "state = 'gradient-sharding, a state for each copy of tied parameters' there" in message


def test_what_updates_a_master_copy_is_saved_with_it(tmp_path: Path):
    bf16 = ["workload.precision=bf16"]
    scenario = load_scenario(DEMO, overrides(2, STEPS, "plan.method=ddp", *bf16), gradients_needed=False).scenario
    written(tmp_path, scenario, 4)
    check_checkpoints(scenario, tmp_path, 1, where="scenario.toml")
    message = refusal("plan.method=zero3", *bf16, folder=tmp_path)
    assert "state = 'torch, master copies' there, 'torch' in scenario.toml" in message


def test_shards_of_parameters_have_no_master_copies_beside_them_but_in_16_bits(tmp_path: Path):
    """What replicas have saved goes on sharded at rest, and the other way round; a threshold's copies are not there."""
    for precision in ("fp64", "bf16"):
        changes, folder = [f"workload.precision={precision}"], tmp_path / precision
        plan = overrides(2, STEPS, "plan.method=gs_z3", *changes)
        written(folder, load_scenario(DEMO, plan, gradients_needed=False).scenario, 4)
        replicas = load_scenario(DEMO, overrides(2, STEPS, "plan.method=gs", *changes), gradients_needed=False).scenario
        check_checkpoints(replicas, folder, 1, where="scenario.toml")
    progress = tmp_path / "fp64" / "step-00000004" / "progress.json"
    by_this_version = progress.read_text()
    progress.write_text(by_this_version.replace('"gradient-sharding"', '"gradient-sharding, master copies"'))
    sharded = load_scenario(
        DEMO, overrides(2, STEPS, "plan.method=gs_z3", "workload.precision=fp64"), gradients_needed=False
    )
    check_checkpoints(sharded.scenario, tmp_path / "fp64", 1, where="scenario.toml")  # as earlier versions called it
    assert "master copies' there, 'gradient-sharding' in" in refusal(
        "plan.method=gs", "workload.precision=fp64", folder=tmp_path / "fp64"
    )
    progress.write_text(by_this_version)
    thresholded = refusal("plan.method=gs", "plan.publish.threshold=0", folder=tmp_path / "fp64")
    assert "state = 'gradient-sharding' there, 'gradient-sharding, master copies' in scenario.toml" in thresholded


def test_a_factor_on_the_loss_goes_on_with_any_number_of_ranks(tmp_path: Path, monkeypatch):
    """Each rank reads the first one's file: a factor at its start would skip steps until it is small enough again."""
    saved, resumed = (SimpleNamespace(scaler=LossScaler("dynamic", []), optimizer=None) for _ in range(2))
    saved.scaler.scale, saved.scaler.clean_steps = 512.0, 7
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    _write_own(saved, tmp_path)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    _read_loss_scale(resumed, tmp_path)
    assert (resumed.scaler.scale, resumed.scaler.clean_steps) == (512.0, 7)


def test_a_broken_checkpoint_is_refused(tmp_path: Path):
    (tmp_path / "step-00000004").mkdir()
    assert "is not a checkpoint of gsreal" in refusal("plan.method=gs", folder=tmp_path)


PROGRESSES = {
    "nothing": "",
    "no JSON": "{",
    "a list": "[]",
    "a number": "7",
    "deep nesting": "[" * 100_000,
    "an unknown key": '{"step": 8, "format": 4, "colour": 1}',
    "a text for a number": '{"step": "eight", "format": 4}',
    "a number for a list": '{"step": 8, "losses": 3, "format": 4}',
    "another step": '{"step": 7, "format": 4}',
    "no format": '{"step": 8}',
    "another format": '{"step": 8, "format": 2}',
    "bytes": "\x00",
}


@pytest.fixture(scope="module")
def plain_scenario():
    return load_scenario(DEMO, overrides(2, STEPS, "plan.method=gs"), gradients_needed=False).scenario


@pytest.mark.parametrize("text", PROGRESSES.values(), ids=PROGRESSES)
def test_a_malformed_progress_is_passed_over_for_the_checkpoint_before(tmp_path: Path, plain_scenario, text: str):
    before, last = (written(tmp_path, plain_scenario, step) for step in (4, 8))
    (last / "progress.json").write_text(text)
    told: list[str] = []
    found = last_undamaged(tmp_path, tell=told.append)
    assert found is not None
    assert found[0] == before
    (line,) = told
    assert line.startswith(f"{last}: ")
    assert line.endswith("; skipped for the one before it")
    assert "\n" not in line
    (before / "progress.json").write_text(text)
    assert "all checkpoints there are damaged: remove them to start anew" in refusal("plan.method=gs", folder=tmp_path)


@pytest.mark.parametrize("damage", ["cut off", "one byte", "gone"])
def test_a_checkpoint_whose_files_are_not_as_they_were_written_is_passed_over(tmp_path: Path, plain_scenario, damage):
    before, last = (written(tmp_path, plain_scenario, step) for step in (4, 8))
    file = last / "__1_0.distcp"
    assert last_undamaged(tmp_path)[0] == last
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(b"abc" if damage == "cut off" else b"abcdefgH")
    told: list[str] = []
    assert last_undamaged(tmp_path, tell=told.append)[0] == before
    reason = "is missing" if damage == "gone" else "does not match its digest"
    assert f"{last}: is damaged: __1_0.distcp {reason}" in told[0]


def test_only_what_is_a_part_of_a_checkpoint_is_removed(tmp_path: Path, plain_scenario):
    mine = tmp_path / "thesis.partial"
    mine.mkdir()
    (mine / "chapter.txt").touch()
    left = written(tmp_path, plain_scenario, 4).rename(tmp_path / "step-00000004.partial")
    mixed = tmp_path / "step-00000005.partial"
    mixed.mkdir()
    for name in ("rank-0.pt", "notes.txt"):
        (mixed / name).touch()
    (tmp_path / "step-00000006.partial").symlink_to(mine)
    remove_leftovers(tmp_path)
    assert not left.exists()
    assert [path.name for path in mixed.iterdir()] == ["notes.txt"]
    assert (mine / "chapter.txt").exists()
    assert (tmp_path / "step-00000006.partial").is_symlink()


def test_checkpoints_that_a_killed_run_had_no_time_to_remove_are_removed_by_the_next(tmp_path: Path, plain_scenario):
    for step in (2, 4, 6, 8):
        written(tmp_path, plain_scenario, step)
    (tmp_path / "step-00000002" / "progress.json").unlink()  # its removal had begun
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


def test_a_second_run_that_would_save_in_the_same_folder_is_refused_by_the_name_of_the_first(tmp_path: Path):
    changes = [part for change in overrides(2, STEPS, "plan.method=gs") for part in ("--set", change)]
    with locked(tmp_path / "saved" / LOCK, place="x"):
        ended = commands.run("gsreal", "run", DEMO, "--checkpoint", tmp_path / "saved", *changes)
    assert ended.returncode == 2
    assert f"saved: is in use by process {os.getpid()} on " in ended.stderr
    assert not (tmp_path / "saved").exists()


def test_what_torch_raises_of_a_checkpoint_is_told_though_it_is_no_exception(tmp_path: Path, monkeypatch):
    fault = OSError(28, "No space left on device")
    error = CheckpointException("save", {1: (fault, StackSummary())})
    assert not isinstance(error, Exception)
    told = r"step-4: cannot be saved: rank 1: OSError: .* No space left"
    with pytest.raises(RunFailedError, match=told), _raise_with_reason(Path("step-4"), "saved"):
        raise error

    def ends(code):
        raise SystemExit(code)

    def fails():
        raise error

    monkeypatch.setattr(rank, "die_with_parent", lambda: None)
    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setenv("GSREAL_REPORTS", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        rank.run_on_rank(fails, [])
    assert ended.value.code == 1
    assert "No space left" in json.loads((tmp_path / "rank-1.json").read_text())["message"]


def test_one_that_is_not_complete_is_never_taken(tmp_path: Path):
    for name in ("step-00000004", "step-00000008.partial", "other"):
        (tmp_path / name).mkdir()
    assert _complete(tmp_path) == [tmp_path / "step-00000004"]
    assert [step for step in range(1, 9) if Checkpoints(tmp_path, 3).is_due(step, 8)] == [3, 6, 8]
