"""Training in fp16 with a scaled loss (`workload.loss_scale`), its collectives and peaks; the factor's course."""

from pathlib import Path
from typing import Any

import pytest
from real_runs import (
    HELPERS,
    SCENARIOS,
    assert_collectives,
    predicted_peaks,
    quick,
    run_cases,
    scenario_file,
    selected,
    star,
)

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from gsreal.gradient_sharding.master import MasterCopy  # noqa: E402
from gsreal.measure import Timeline  # noqa: E402
from gsreal.methods.training import FIRST_SCALE, GROWTH_STEPS, LossScaler, loss_of  # noqa: E402
from gsreal.run.checks import check_real  # noqa: E402
from gsreal.run.feed import Feed  # noqa: E402
from gsreal.run.worker import build  # noqa: E402
from gssim.errors import UserError  # noqa: E402
from gssim.scenario import load_scenario  # noqa: E402

pytestmark = pytest.mark.real

FP16 = [
    *("workload.sequence_length=24", "workload.global_batch_size=12", "workload.precision=fp16"),
    *("workload.loss_scale=1024", "workload.optimizer=sgd-momentum", "workload.learning_rate=0.05"),
]
TIED = f'workload.model="{HELPERS / "models" / "gpt-tied"}.toml"'
CAST = f'workload.model="{HELPERS / "models" / "of_tests" / "divided-autocast-gpt"}.toml"'
CLIPPED = "workload.clip_norm=0.1"
CASES = {
    "ddp": ["plan.method=ddp"],
    "zero1": ["plan.method=zero1"],
    "zero2": ["plan.method=zero2", "plan.micro_batches=2"],
    "zero3": ["plan.method=zero3", "workload.reduce_precision=fp32"],
    "tensor": ["plan.method=tensor"],
    "pipeline": ["plan.method=pipeline", "plan.micro_batches=3", TIED],
    "dynamic": ["plan.method=zero3", "workload.loss_scale=dynamic"],
    "gs": ["plan.method=gs", "workload.loss_scale=dynamic"],
    "gs-all-reach": ["plan.method=gs", "plan.push.threshold=0", "plan.shares.shards=[0.7,0.3]"],
    "gs-residual-in-bf16": [
        "plan.method=gs",
        "plan.push.threshold=0",
        "plan.push.error_feedback=true",
        "plan.push.error_feedback_precision=bf16",
    ],
    "gs-relative-to-means": [
        *("plan.method=gs_hier", "plan.dp_shard=2", "plan.dp_replicate=1", "workload.sequence_length=8"),
        *("plan.push.kind=relative", "plan.push.threshold=0", f"workload.model={SCENARIOS}/models/gpt-byte-1m.toml"),
    ],
    "gs_z3": ["plan.method=gs_z3", "plan.micro_batches=2"],
    "gs-tensor": ["plan.method=gs", "plan.tp=2"],
    "zero2-clipped": ["plan.method=zero2", CLIPPED],
    "zero3-clipped": ["plan.method=zero3", "plan.micro_batches=2", CLIPPED],
    "ddp-clipped": ["plan.method=ddp", CLIPPED],
    "zero1-clipped": ["plan.method=zero1", "plan.micro_batches=2", CLIPPED],
    "tensor-clipped": ["plan.method=tensor", CLIPPED],
    "pipeline-clipped": ["plan.method=pipeline", "plan.micro_batches=3", TIED, CLIPPED],
    "gs-clipped": ["plan.method=gs", CLIPPED],
    "gs-autocast": [
        "plan.method=gs",
        "workload.precision=fp32",
        "workload.autocast=fp16",
        CLIPPED,
        CAST,
    ],
}
FLAGS = dict.fromkeys(["ddp", "zero1", "ddp-clipped", "zero1-clipped"], 0)
"""All-reduces of the flag of infinite gradients: one, except where all ranks hold all gradients."""
TRAINED_RATIO = 2**-8
"""How far parameters may be from one device's, of the largest: fp16 rounds every partial sum of a gradient to one part
in 2^11, in another order; five steps at rate 0.05 with momentum end within some of these (seen: 1e-4 to 5e-4)."""


def case_of(overrides: list[str], ranks: int = 2) -> dict[str, Any]:
    # without oneDNN, whose 16-bit products take scratch that no profile here has
    return {
        "scenario": scenario_file("small-demo.toml"),
        "overrides": [star(ranks), *FP16, *overrides],
        "onednn": False,
    }


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = selected(request, {name: case_of(each) for name, each in CASES.items()})
    return run_cases(tmp_path_factory.mktemp("fp16"), cases, ranks=2)


@pytest.mark.parametrize("name", quick(CASES, ["ddp", "zero3", "pipeline", "gs", "gs-all-reach", "zero2-clipped"]))
def test_training_in_fp16_is_that_of_one_device_with_the_predicted_collectives_and_peaks(seen, name):
    case, found = case_of(CASES[name]), seen[name]
    expected = assert_collectives(case, found).collectives
    flags = [entry for entry in expected if (entry.kind, entry.bytes) == ("all-reduce", 4)]
    assert sum(entry.count for entry in flags) == FLAGS.get(name, 1)
    assert predicted_peaks(case) == pytest.approx(found["peaks"], rel=0.005)
    assert found["replicas_equal"]
    assert found["difference"] <= TRAINED_RATIO * found["largest_parameter"]
    assert found["losses"][-1] < found["losses"][0]


def test_a_dynamic_factor_halves_where_gradients_are_infinite_and_doubles_after_clean_steps():
    module = torch.nn.Linear(3, 1, bias=False).half()
    optimizer = MasterCopy(module.parameters(), torch.optim.SGD, lr=1.0)
    scaler, timeline = LossScaler("dynamic", []), Timeline(0, torch.device("cpu"))
    before = module.weight.detach().clone()
    module.weight.grad = torch.tensor([[1.0, float("inf"), 0.0]], dtype=torch.float16)
    assert not scaler.unscale(module, optimizer, timeline)
    scaler.update(finite=False)
    assert scaler.scale == FIRST_SCALE / 2
    module.weight.grad = torch.full((1, 3), 2.0**-9 * scaler.scale, dtype=torch.float16)
    assert scaler.unscale(module, optimizer, timeline)
    optimizer.step()  # the update of 2^-9, of fp32 masters
    assert next(master for _, master in optimizer.pairs()).tolist() == [
        [pytest.approx(value - 2**-9, abs=1e-7) for value in before.float().tolist()[0]]
    ]
    for _ in range(GROWTH_STEPS):
        scaler.update(finite=True)
    assert scaler.scale == FIRST_SCALE


def losses_and_factors_of_torch(scenario: Any, *, micro_batches: int, steps: int) -> list[tuple[float, float]]:
    """Return each step's loss and the factor after it, trained with torch's GradScaler over fp32 copies, whose
    gradients are clipped as torch clips.
    """
    device, feed = torch.device("cpu"), Feed(scenario, 0, torch.device("cpu"))
    module = build(scenario, Timeline(0, device), device).module
    parameters = list(module.parameters())
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
    workload = scenario.workload
    optimizer = torch.optim.SGD(masters, lr=workload.learning_rate, momentum=0.9, weight_decay=workload.weight_decay)
    scaler, course = torch.amp.GradScaler("cpu"), []
    for step in range(steps):
        inputs, targets, _ = feed.at(step)
        losses = []
        for part, targets_of_part in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            loss = loss_of(module(part), targets_of_part)
            (scaler.scale(loss) / micro_batches).backward()
            losses.append(float(loss.detach()))
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        if workload.clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(masters, workload.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        course.append((sum(losses) / micro_batches, scaler.get_scale()))
    return course


def courses_here_and_in_torch(
    overrides: list[str], *, micro_batches: int, steps: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the loss and the next factor of each step of one device, trained here and with torch's GradScaler."""
    file = Path(scenario_file("small-demo.toml"))
    scenario = load_scenario(file, [star(1), *overrides], gradients_needed=False).scenario
    device, feed = torch.device("cpu"), Feed(scenario, 0, torch.device("cpu"))
    with torch.backends.mkldnn.flags(enabled=False):
        training = build(scenario, Timeline(0, device), device)
        course = [(float(training.step(*feed.at(step), 0)), training.scaler.scale) for step in range(steps)]
        return course, losses_and_factors_of_torch(scenario, micro_batches=micro_batches, steps=steps)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_dynamic_factor_and_the_steps_it_skips_are_those_of_torchs_scaler(micro_batches):
    """The first factor, 2^16, is infinite in fp16: a step of one micro-batch is skipped; half of it is finite."""
    overrides = [*FP16, "workload.loss_scale=dynamic", "plan.method=single", f"plan.micro_batches={micro_batches}"]
    course, expected = courses_here_and_in_torch(overrides, micro_batches=micro_batches, steps=3)
    assert [factor for _, factor in course] == [factor for _, factor in expected]
    assert [loss for loss, _ in course] == pytest.approx([loss for loss, _ in expected], rel=1e-3)
    assert course[0][1] == {1: FIRST_SCALE / 2, 2: FIRST_SCALE}[micro_batches]


@pytest.mark.parametrize("norm", [0.1, 4.5, 100.0])
def test_one_device_clips_what_the_factor_is_taken_out_of_as_torch_does(norm):
    """It clipped gradients that were still multiplied by the factor, in fp16: of 1024, to a thousandth of the norm."""
    overrides = [*FP16, "plan.method=single", "workload.loss_scale=dynamic", f"workload.clip_norm={norm}"]
    course, expected = courses_here_and_in_torch(overrides, micro_batches=1, steps=6)
    losses = [loss for loss, _ in course]
    assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-3)
    assert losses[-1] < losses[0] - 0.1


def test_fp16_runs_with_a_scaled_loss_alone():
    def loaded_with(*overrides: str) -> Any:
        case = case_of([*overrides])
        return load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False)

    check_real(loaded_with("plan.method=ddp", "workload.clip_norm=1"))
    with pytest.raises(UserError, match=r"loss_scale = 1024.0: cannot run yet with method 'gs_wgrad'"):
        loaded_with("plan.method=gs_wgrad")
    with pytest.raises(UserError, match=r"workload.precision = 'bf16' need no scaled loss"):
        loaded_with("plan.method=ddp", "workload.precision=bf16")
