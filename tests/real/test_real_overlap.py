"""Plans that let nothing overlap wait for what they send where it begins, as their programs say."""

import json
from pathlib import Path

import pytest
from real_runs import SGD, predicted, predicted_peaks, quick, run_cases, scenario_file, selected, star

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from gsreal.run.checks import check_real
from gssim.errors import UserError
from gssim.program import lower
from gssim.scenario import load_scenario

pytestmark = pytest.mark.real

GPT = ["workload.sequence_length=24", "workload.global_batch_size=8", "plan.bucket_bytes=100000"]
UNEVEN = "plan.shares.batch=[0.75, 0.25]"
PLANS = {
    "ddp": ["plan.method=ddp", UNEVEN],
    "ddp-micro-batches": ["plan.method=ddp", "plan.micro_batches=2"],
    "zero1": ["plan.method=zero1", UNEVEN],
    "gs": ["plan.method=gs", UNEVEN, "plan.shares.shards=[0.6, 0.4]"],
    "gs_z3": ["plan.method=gs_z3", "plan.micro_batches=2"],
    "gs_z3-of-one": ["plan.method=gs_z3", "plan.shares.shards=[0, 1]", "workload.sequence_length=3"],
    "zero2": ["plan.method=zero2"],
}
CASES = {
    f"{name}-{'overlap' if overlap else 'alone'}": {
        "scenario": scenario_file("small-demo.toml"),
        "overrides": [star(2), *GPT, *SGD, *plan, f"plan.overlap={str(overlap).lower()}"],
    }
    for name, plan in PLANS.items()
    for overlap in (False, True)
    if not overlap or name in ("ddp", "gs", "gs_z3-of-one")
}
ALONE = [name for name in CASES if name.endswith("-alone")]
each_alone = pytest.mark.parametrize("name", quick(ALONE, set(ALONE) - {"zero1-alone", "zero2-alone"}))
SENT = ("all-reduce bucket", "push ", "post push ", "add ")


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return run_cases(tmp_path_factory.mktemp("overlap"), selected(request, CASES), ranks=2)


def computed(name: str) -> list[str]:
    """Return what the first rank sends and takes in on its compute stream, in the order of its program."""
    case = CASES[name]
    program = lower(load_scenario(Path(case["scenario"]), case["overrides"]).scenario)
    tasks = program.tasks[program.role_of[0]]
    return [task.label for task in tasks if task.stream == "compute" and task.label.startswith(SENT)]


@each_alone
def test_what_overlaps_nothing_trains_the_same_and_sends_the_same(seen: dict[str, dict], name: str) -> None:
    found, expected = seen[name], predicted(CASES[name])
    assert found["replicas_equal"]
    assert found["difference"] <= 1e-5 * found["largest_parameter"]
    assert found["collectives"] == json.loads(json.dumps([entry.key for entry in expected.collectives]))
    peaks = {rank: each.peak_allocated_bytes for each in expected.ranks for rank in each.ranks}
    assert found["peaks"] == pytest.approx([peaks[0], peaks[1]], rel=0.01)


@pytest.mark.parametrize("name", ["gs_z3-of-one-overlap", "gs_z3-of-one-alone"])
def test_who_owns_all_sends_nothing_and_frees_gradients_once_their_push_is_posted(
    seen: dict[str, dict], name: str
) -> None:
    """A prediction kept a whole unit of them until others' gradients had come: of one GPT 12 % of a rank's peak."""
    assert predicted_peaks(CASES[name]) == pytest.approx(seen[name]["peaks"], rel=0.001)


@pytest.mark.parametrize(
    "name",
    quick(
        ["ddp-alone", "ddp-micro-batches-alone", "zero1-alone", "gs-alone"],
        ["ddp-alone", "ddp-micro-batches-alone", "gs-alone"],
    ),
)
def test_it_is_waited_for_where_its_program_says(seen: dict[str, dict], name: str) -> None:
    labels = [label for label in seen[name]["labels"] if label.startswith(SENT)]
    assert len(labels) > 2
    assert labels == [label.partition(" micro-batch")[0] for label in computed(name)]


@pytest.mark.parametrize("name", ["ddp-overlap", "gs-overlap"])
def test_what_overlaps_is_not_waited_for_there(seen: dict[str, dict], name: str) -> None:
    assert not [label for label in seen[name]["labels"] if label.startswith(("all-reduce bucket", "push "))]


def test_what_nothing_stops_from_overlapping_is_refused() -> None:
    case = ["plan.overlap=false", "plan.method=ddp", "plan.pp=2", "plan.dp_replicate=2", "plan.micro_batches=2"]
    loaded = load_scenario(Path(scenario_file("demo.toml")), [star(4), *GPT, *SGD, *case])
    with pytest.raises(UserError, match=r"demo.toml: plan.overlap = false: replicas of a pipeline's stages"):
        check_real(loaded)
