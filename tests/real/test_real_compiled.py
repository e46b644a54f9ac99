"""Compiled blocks train as plain torch does, with the predicted collectives and exactly the predicted peaks."""

import pytest
from real_runs import SGD, assert_collectives, predicted_peaks, run_cases, scenario_file, selected, star

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

from gsreal.compiled import compiler

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,  # each kernel takes the C++ compiler seconds
    pytest.mark.skipif(compiler() is None, reason="nothing compiles kernels here"),
]

SOURCES = {
    "gpt": ("gsreal.models.gpt", ("width=48", "heads=4", "layers=3"), 256, "next-token"),
    "bert": ("gsreal.models.bert", ("width=48", "heads=4", "layers=3"), 257, "masked-token"),
    "llama": (
        "hf:llama",
        (
            *("num_hidden_layers=3", "hidden_size=48", "intermediate_size=96", "num_attention_heads=4"),
            *("num_key_value_heads=2", "vocab_size=256", "max_position_embeddings=64"),
        ),
        256,
        "next-token",
    ),
}
NAMES = [f"{method}-{model}-none" for model in SOURCES for method in ("ddp", "zero3", "gs")]
NAMES += ["zero1-gpt-none", "zero2-gpt-none", "gs_z3-llama-none", "ddp-gpt-full", "gs-llama-full"]
NAMES += ["ddp-gpt+selective-none", "zero3-gpt+full-none", "gs-llama+selective-none"]
NAMES += [f"pipeline-{model}-none" for model in SOURCES] + ["pipeline-llama+selective-none"]
ALONE = [f"single-{model}-none" for model in SOURCES]


def traced(kind: str) -> str:
    """Return the file of a small compiled model of that kind, `MODEL` or `MODEL+RECOMPUTE` inside of its graphs."""
    from small_models import Request, kept

    family, _, recompute = kind.partition("+")
    model, arguments, vocabulary, task = SOURCES[family]
    request = Request(
        model=model,
        arguments=arguments,
        name=f"compiled-{kind.replace('+', '-')}",
        vocabulary=vocabulary,
        maximum_sequence_length=64,
        task=task,
        compiled=True,
        recompute=recompute or "none",
    )
    return str(kept(request))


def case_of(name: str, *, ranks: int) -> dict[str, object]:
    """Return the case `METHOD-MODEL-RECOMPUTE`."""
    method, model, recompute = name.split("-")
    changes = [star(ranks), f"workload.model={traced(model)}", "workload.sequence_length=64", *SGD]
    changes += ["workload.global_batch_size=24", f"plan.method={method}", f"plan.recompute={recompute}"]
    changes += ["plan.pp=2", "plan.micro_batches=4"] if method == "pipeline" else []
    base = "bert-byte.toml" if model.startswith("bert") else "small-demo.toml"
    return {"scenario": scenario_file(base), "overrides": changes, "plant": False}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    seen = {}
    for ranks, names in ((1, ALONE), (2, NAMES)):
        cases = selected(request, {name: case_of(name, ranks=ranks) for name in names})
        if cases:
            seen |= run_cases(tmp_path_factory.mktemp(f"ranks{ranks}"), cases, ranks=ranks)
    return seen


@pytest.mark.parametrize("name", [*ALONE, *NAMES])
def test_compiled_blocks_train_as_plain_torch_does_with_the_predicted_collectives_and_peaks(found, name) -> None:
    case, seen = case_of(name, ranks=1 if name in ALONE else 2), found[name]
    assert seen["largest_parameter"] > 0.05
    assert seen["difference"] <= 1e-5 * seen["largest_parameter"]  # the reference is not compiled
    assert seen["replicas_equal"]
    assert_collectives(case, seen)
    assert predicted_peaks(case) == pytest.approx(seen["peaks"], rel=0.002)
