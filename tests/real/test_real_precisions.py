"""Peaks in bf16, and of micro-batches of one sample, are those of steps that were traced so: nothing is scaled."""

from dataclasses import replace
from pathlib import Path

import pytest
from real_runs import SGD, AsPredicted, predicted_peaks, run_cases, scenario_file, star

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

from gsreal.model_files.trace import write_model
from gssim.scenario import load_model
from gssim.workload import Layer, Model
from gssim.workload.layer import ONE_SAMPLE

pytestmark = pytest.mark.real

CONFIGS = {
    "olmo2": "num_hidden_layers=2 hidden_size=64 num_attention_heads=8 num_key_value_heads=4 intermediate_size=96",
    "gpt2": "n_layer=2 n_embd=64 n_head=4",
}
"""The first has norms that compute in fp32 whatever the precision, the second dropout of attention's weights."""
USUAL = ["workload.sequence_length=24", *SGD]
ALONE, TWO = "workload.global_batch_size=2", "workload.global_batch_size=4"
CASES = {
    "olmo2-zero3-bf16": ["workload.global_batch_size=8", "plan.method=zero3", "workload.precision=bf16"],
    "olmo2-tensor-bf16": ["workload.global_batch_size=1", "plan.method=tensor", "workload.precision=bf16"],
    "gpt2-ddp-bf16": [ALONE, "plan.method=ddp", "workload.precision=bf16"],
    "gpt2-zero3": [ALONE, "plan.method=zero3"],
    "gpt2-micro": [TWO, "plan.method=ddp", "plan.micro_batches=2"],
    "gpt2-uneven": ["workload.global_batch_size=4", "plan.method=ddp", "plan.shares.batch=[0.25,0.75]"],
    "gpt2-full": [ALONE, "plan.method=ddp", "plan.recompute=full"],
    "gpt2-selective": [ALONE, "plan.method=ddp", "plan.recompute=selective"],
    "gpt2-stages": [TWO, "plan.method=pipeline", "plan.micro_batches=4"],
}
"""All but the first have one sample per micro-batch, on at least one rank."""


def traced(kind: str) -> Path:
    """Return the file of a small model of that type, traced in fp32 and bf16 at one sequence length."""
    from small_models import Request, kept

    settings = f"{CONFIGS[kind]} vocab_size=256 max_position_embeddings=64 use_cache=false"
    request = Request(
        model=f"hf:{kind}",
        arguments=tuple(settings.split()),
        name=f"precisions-{kind}",
        vocabulary=256,
        maximum_sequence_length=64,
        sequence_length=24,
        other_precisions=("bf16",),
    )
    return kept(request)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run all cases in one launch of two ranks; return (cases, what they showed)."""
    cases = {
        name: {
            "scenario": scenario_file("demo.toml"),
            "overrides": [star(2), f"workload.model={traced(name.split('-')[0])}", *USUAL, *changes],
        }
        for name, changes in CASES.items()
    }
    return cases, run_cases(tmp_path_factory.mktemp("precisions"), cases, ranks=2)


class TestPeaks(AsPredicted):
    """Collectives and peaks are as predicted."""

    def peak_error(self, name: str, case: dict) -> float:
        """Return the error of peaks; the workspace of products in bf16, which is not measured here, takes 4.8 %."""
        return 0.05 if name == "olmo2-zero3-bf16" else 0.001


def of_several_samples(model: Model) -> Model:
    """Return a model as it was traced before: in one precision, and with at least two samples."""

    def without(layer: Layer) -> Layer:
        kept = [each for each in layer.buffers if each.samples != ONE_SAMPLE]
        return replace(layer, buffers=tuple(replace(each, samples="") for each in kept))

    return replace(model, other_precisions=(), layers=tuple(map(without, model.layers)))


def test_scaled_bytes_and_polynomials_alone_are_off(world: tuple[dict, dict], tmp_path: Path) -> None:
    """The cases can show what they are for: with an older file, peaks were 1 to 21 % too low."""
    errors = {}
    for name in ("olmo2-zero3-bf16", "gpt2-zero3", "gpt2-uneven"):
        case, file = world[0][name], tmp_path / f"{name}.toml"
        write_model(file, of_several_samples(load_model(traced(name.split("-")[0]))))
        before = predicted_peaks(case | {"overrides": [*case["overrides"], f"workload.model={file}"]})
        errors[name] = max(abs(a / b - 1) for a, b in zip(before, world[1][name]["peaks"], strict=True))
    assert errors["olmo2-zero3-bf16"] > 0.2
    assert min(errors.values()) > 0.01, errors
