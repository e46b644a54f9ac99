"""Held-out data: no training draws from them; evaluating changes nothing of a run but adds its evaluation."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
import torch.distributed as dist
from data_files import global_batch
from real_runs import run_module, scenario_file, star
from test_build_and_data import BERT, GPT, RESNET, workload_of

from gsreal.data import sources as data
from gsreal.data.bundled import digits, digits_parts, held_out_part, standard_library_bytes, trained_part
from gsreal.measure import Timeline
from gsreal.model_files.build import loss_of
from gsreal.run.checkpoint import Progress
from gsreal.run.checks import check_predicted_only
from gsreal.run.feed import Feed, HeldOut
from gsreal.run.report import RunRecorder, refuse_divergence
from gsreal.run.worker import _timed_steps, build
from gssim.errors import UserError
from gssim.result import Evaluation
from gssim.scenario import load_scenario

CPU = torch.device("cpu")

# What is held out ----------------------------------------------------------------------------------------------------


def test_digits_are_trained_on_or_held_out_and_every_class_is_in_both():
    trained, held_out = digits_parts()
    assert sorted([*trained, *held_out]) == list(range(1797))
    assert len(held_out) == data.HELD_OUT_DIGITS == 540
    classes = digits()[1]
    for class_ in range(10):
        assert (classes[held_out] == class_).sum() == pytest.approx(0.3 * (classes == class_).sum(), abs=1)


def test_no_batch_of_digits_holds_one_that_is_held_out():
    images, _ = global_batch(workload_of(RESNET, global_batch_size=4000), seed=0, step=0)
    source, samples = data.open_held_out(workload_of(RESNET))
    kept, _ = source.batch(seed=0, step=0, rows=slice(0, samples))
    drawn = {image.numpy().tobytes() for image in images}
    assert len(drawn) > 1000
    assert not drawn & {image.numpy().tobytes() for image in kept}


@pytest.mark.parametrize("name", [GPT, BERT])
def test_no_window_of_text_reaches_into_the_part_that_is_held_out(name):
    corpus = standard_library_bytes()
    assert trained_part(corpus).tobytes() + held_out_part(corpus).tobytes() == corpus.tobytes()
    assert len(held_out_part(corpus)) == len(corpus) // 10
    workload = workload_of(name)
    source, samples = data.open_held_out(workload)
    trained, kept = trained_part(corpus).tobytes(), held_out_part(corpus).tobytes()
    for ours, (inputs, targets) in (
        (trained, global_batch(workload, seed=0, step=0)),
        (kept, source.batch(seed=0, step=0, rows=slice(0, samples))),
    ):
        windows = torch.where(targets == data.IGNORED, inputs, targets) if name == BERT else inputs
        assert all(bytes(window.tolist()) in ours for window in windows)


def test_held_out_data_are_the_same_whatever_the_batch_size():
    for name in (GPT, BERT, RESNET):
        found = [data.open_held_out(workload_of(name, global_batch_size=size)) for size in (4, 12)]
        batches = [source.batch(seed=0, step=0, rows=slice(0, 8)) for source, _ in found]
        assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


@pytest.mark.parametrize(
    ("check", "overrides", "message"),
    [
        (
            lambda scenario: check_predicted_only(scenario, where="here"),
            ["plan.method=pipeline"],
            "run.evaluate_every_steps = 2: no rank of a pipeline has the whole model",
        ),
        (
            lambda scenario: data.check_held_out(scenario.workload, where="here"),
            ["plan.method=ddp", 'workload.data={kind="text-folder", folder="texts"}'],
            "run.evaluate_every_steps: workload.data.kind = 'text-folder': nothing of it is held out",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_ranks_start(check, overrides, message):
    loaded = load_scenario(
        Path(scenario_file("demo.toml")), ["run.evaluate_every_steps=2", *overrides], gradients_needed=False
    )
    with pytest.raises(UserError) as refused:
        check(loaded.scenario)
    assert str(refused.value).startswith(f"here: {message}")


def test_glue_and_images_are_evaluated_on_their_own_split(tmp_path):
    from test_data_glue import tokens, workload_for

    rows = "sentence\tlabel\n" + "".join(f"good {i}\t{i % 2}\n" for i in range(5))
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text(rows.replace("good", "bad") if split == "dev" else rows)
    table = {"kind": "glue", "folder": str(tmp_path), "task": "SST-2"}
    workload = workload_for(tokens(2), table)
    source, samples = data.open_held_out(workload)
    ids, _ = source.batch(seed=0, step=0, rows=slice(0, samples))
    assert samples == 5
    assert all(b"bad" in bytes(byte for byte in row if byte > 2) for row in ids.tolist())
    with pytest.raises(UserError, match=r"workload.data.split = 'dev': is trained on"):
        data.open_held_out(replace(workload, data=replace(workload.data, split="dev")))


# Evaluating ----------------------------------------------------------------------------------------------------------

DIGITS = ["workload.learning_rate=0.01", "workload.global_batch_size=32", "run.steps=2", "run.warmup_steps=1", star(2)]


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank, which computes on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    torch.set_num_threads(threads)
    dist.destroy_process_group()


def course_of(overrides, *, name="resnet-digits.toml"):
    changes = [*DIGITS, "plan.method=single", *overrides]
    scenario = load_scenario(Path(scenario_file(name)), changes, gradients_needed=False).scenario
    training = build(scenario, Timeline(0, CPU), CPU)
    course = RunRecorder(scenario, training, 0, CPU)
    losses = _timed_steps(training, Feed(scenario, 0, CPU), course, Progress(), None)
    return training, course, losses


@pytest.mark.usefixtures("alone")
def test_evaluating_changes_no_loss_and_takes_no_time_of_a_step(monkeypatch):
    _, course, losses = course_of([])
    evaluate, took_s = HeldOut.evaluate, []

    def slowly(self, module, *, step):
        began = time.perf_counter()
        time.sleep(0.2)
        found = evaluate(self, module, step=step)
        took_s.append(time.perf_counter() - began)
        return found

    monkeypatch.setattr(HeldOut, "evaluate", slowly)
    began = time.perf_counter()
    training, evaluated, same = course_of(["run.evaluate_every_steps=1"])
    whole_s = time.perf_counter() - began
    spans, ends_s = training.timeline.read()
    assert same == losses
    assert course.evaluations == []
    assert [each.step for each in evaluated.evaluations] == [2, 3]  # the warm-up's step counts too
    assert len(took_s) == 2
    assert ends_s[-1] <= whole_s - sum(took_s)
    assert sorted(ends_s) == ends_s
    assert all(span.end_s <= ends_s[-1] for span in spans)


@pytest.mark.usefixtures("alone")
def test_the_evaluation_is_the_mean_loss_and_the_accuracy_on_all_held_out_samples():
    training, course, _ = course_of(["run.evaluate_every_steps=4"])
    source, samples = data.open_held_out(workload_of(RESNET))
    inputs, targets = source.batch(seed=0, step=0, rows=slice(0, samples))
    with torch.no_grad():
        logits = training.module(inputs)
    assert course.evaluations[-1].loss == pytest.approx(float(loss_of(logits, targets)), rel=1e-5)
    assert course.evaluations[-1].accuracy_ratio == float((logits.argmax(1) == targets).double().mean())


def test_no_forward_of_an_evaluation_is_empty_whoever_has_fewer_samples_than_others():
    """Modules of Hugging Face run no empty batch; of seven ranks, one has 77 held-out samples for 78 forwards."""
    overrides = [star(7), "workload.global_batch_size=7", "plan.method=ddp"]
    scenario = load_scenario(Path(scenario_file("resnet-digits.toml")), overrides, gradients_needed=False).scenario
    sizes = []

    def module(images):
        sizes.append(len(images))
        return images.new_zeros(len(images), 10)

    held_out = HeldOut(scenario, 6, CPU)
    sums = sum(held_out._sums(module, *batch) for batch in held_out._batches())
    assert sizes == [1] * 78
    assert sums.tolist()[1::2] == [77, 77]


@pytest.mark.parametrize(("losses", "first"), [([2.0, math.nan, math.nan], 2), ([2.0, 1.0, math.inf], 3)])
def test_a_training_that_diverged_is_refused_in_one_line(losses, first):
    refuse_divergence([3.0, 2.0], [Evaluation(step=2, loss=2.0)])
    with pytest.raises(UserError, match=f"training diverged: after {first} timed steps the loss is not finite"):
        refuse_divergence(losses, [])


CASES = {
    "ddp": ["plan.method=ddp", "plan.shares.batch=[0.75,0.25]"],
    "zero2": ["plan.method=zero2"],
    "gs": ["plan.method=gs", "plan.push.threshold=inf", "plan.shares.shards=[0.75,0.25]"],
    "tensor": ["plan.method=gs_tp"],
}


@pytest.mark.real
def test_every_method_evaluates_the_same_model_to_the_same_figures_and_steps_stay_what_they_are(tmp_path):
    scenario, small = scenario_file("resnet-digits.toml"), "workload.model=models/resnet-digits-20k.toml"
    cases = {
        name: {"scenario": scenario, "overrides": [*DIGITS, small, "run.evaluate_every_steps=1", *overrides]}
        for name, overrides in CASES.items()
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    found = run_module("evaluation_ranks", [str(tmp_path / "cases.json")], tmp_path, ranks=2)
    for name, case in found.items():
        assert case["before"] == pytest.approx(found["ddp"]["before"], rel=1e-5), name
        assert case["collectives"][0] == case["collectives"][1], name  # before an evaluation, and after it
        assert case["trains"], name
        if name != "gs":  # which keeps what it does not push
            (loss, accuracy), (expected_loss, expected_accuracy) = case["after"], found["ddp"]["after"]
            assert loss == pytest.approx(expected_loss, rel=1e-3), name
            # blocks that are cut are summed in another order, which on some processors turns one held-out sample
            turned = 1 / data.HELD_OUT_DIGITS if name == "tensor" else 0.0
            assert accuracy == pytest.approx(expected_accuracy, rel=1e-3, abs=1.01 * turned), name
    assert found["gs"]["after"][0] != found["ddp"]["after"][0]
