"""Real: automatic mixed precision has the predicted collectives and peaks, and trains as on one device.

Products of 16 bits differ in the order of their sums where batches are split: what training changes agrees to a few
parts in a thousand, as bf16 has 8 bits of mantissa and fp16 11.
"""

import json
from pathlib import Path

import pytest
from real_runs import predicted, predicted_peaks, run_cases, scenario_file, star
from test_real_adapters import MODELS, USUAL

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

pytestmark = pytest.mark.real

SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05"]
FEW = ("gpt-ddp-bf16", "gpt-zero1-fp16", "llama-zero3-bf16", "gpt-zero2-fp16")


def traced(model: str) -> Path:
    """Return the file of a small model traced under autocast too."""
    from small_models import Request, kept

    source, arguments = MODELS[model]
    request = Request(
        model=source,
        arguments=tuple(f"{key}={value}" for key, value in arguments.items()),
        name=f"autocast-{model}",
        vocabulary=256,
        maximum_sequence_length=24,
        image=None,
        classes=None,
        auto_class=None,
        sequence_length=24,
        autocast=("bf16", "fp16"),
    )
    return kept(request)


def cases_of(ranks: int) -> dict[str, dict[str, object]]:
    cases = {}
    for model in MODELS:
        for method in ("ddp", "zero1", "zero2", "zero3"):
            for kind in ("bf16", "fp16"):
                changes = [f"workload.autocast={kind}"] + (["workload.loss_scale=512"] if kind == "fp16" else [])
                overrides = [star(ranks), f"workload.model={traced(model)}", *USUAL, f"plan.method={method}", *SGD]
                case = {"scenario": scenario_file("demo.toml"), "overrides": [*overrides, *changes], "onednn": False}
                cases[f"{model}-{method}-{kind}"] = case
    return cases


ALL = [pytest.param((ranks, False), marks=[pytest.mark.slow]) for ranks in (2, 3, 4)]


@pytest.fixture(scope="module", params=[(2, True), *ALL])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run the cases in one launch; return (cases, what they showed)."""
    ranks, few = request.param
    cases = {name: each for name, each in cases_of(ranks).items() if not few or name in FEW}
    return cases, run_cases(tmp_path_factory.mktemp("autocast"), cases, ranks=ranks)


def test_what_training_changes_is_that_of_one_device(world: tuple[dict, dict]) -> None:
    for name, seen in world[1].items():
        assert seen["difference_ratio"] < (0.02 if name.endswith("bf16") else 0.005), name
        assert seen["replicas_equal"], name


def test_the_predicted_collectives_are_the_ones_that_the_process_group_saw(world: tuple[dict, dict]) -> None:
    for name, each in world[0].items():
        entries = sorted([list(entry.key) for entry in predicted(each).collectives], key=str)
        assert json.loads(json.dumps(entries)) == sorted(world[1][name]["collectives"], key=str), name


def test_the_predicted_peak_of_every_rank_is_the_counted_one(world: tuple[dict, dict]) -> None:
    for name, each in world[0].items():
        assert predicted_peaks(each) == pytest.approx(world[1][name]["peaks"], rel=0.001), name
