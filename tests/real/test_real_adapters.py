"""Low-rank adapters train as on one device, with the predicted collectives and peaks, on two to four ranks."""

from pathlib import Path

import pytest
from real_runs import SGD, TrainsAdapters, run_cases, scenario_file, star

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")


pytestmark = pytest.mark.real

LLAMA = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 24, "use_cache": "false"}
MODELS = {
    "gpt": ("gsreal.models.gpt", {"width": 48, "heads": 4, "layers": 3, "maximum_length": 24}),
    "llama": ("hf:llama", LLAMA),
}
NEOX = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 1}
NEOX |= {"vocab_size": 256, "max_position_embeddings": 24, "use_cache": "false"}
RECOMPUTED_ALONE = {"neox": ("hf:gpt_neox", NEOX)}
"""A model that holds its embeddings, which are frozen, to the end of its forward: checkpointed blocks keep them."""
METHODS = ("ddp", "zero1", "zero2", "zero3", "gs", "gs_z3")
STAGED = {"ddp": "dp_replicate", "zero1": "dp_replicate", "zero2": "dp_shard", "zero3": "dp_shard", "gs": "dp_shard"}
"""Methods that replicate or shard the stages of a pipeline, and along which axis."""
RECOMPUTED = (("gpt", "ddp"), ("llama", "zero3"), ("gpt", "gs"), ("llama", "ddp"), ("llama", "gs_z3"), ("neox", "ddp"))
USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12"]
QUERY_VALUE = "workload.adapters={rank=4, alpha=8}"


def traced(model: str) -> Path:
    """Return the file of a small model with its adapters of queries and values, and of all linear maps.

    Of Llama also with those of the perceptron's last map alone.
    """
    from small_models import Request, kept

    source, arguments = (MODELS | RECOMPUTED_ALONE)[model]
    request = Request(
        model=source,
        arguments=tuple(f"{key}={value}" for key, value in arguments.items()),
        name=f"adapters-{model}",
        vocabulary=256,
        maximum_sequence_length=24,
        sequence_length=24,
        adapters=("query-value", "all-linear", *(["down_proj"] if model == "llama" else [])),
    )
    return kept(request)


def case(model: str, method: str, ranks: int, *changes: str) -> dict[str, object]:
    overrides = [star(ranks), f"workload.model={traced(model)}", *USUAL, f"plan.method={method}", *SGD, *changes]
    return {"scenario": scenario_file("demo.toml"), "overrides": overrides}


def cases_of(ranks: int) -> dict[str, dict[str, object]]:
    cases = {f"{m}-{method}-sgd": case(m, method, ranks, QUERY_VALUE) for m in MODELS for method in METHODS}
    every = "workload.adapters={rank=3, targets='all-linear'}"
    cases |= {f"llama-{method}-all-sgd": case("llama", method, ranks, every) for method in ("ddp", "zero3")}
    both = (QUERY_VALUE, "plan.micro_batches=2")
    cases |= {f"gpt-{method}-micro-batches-sgd": case("gpt", method, ranks, *both) for method in ("ddp", "zero2")}
    for recompute in ("full", "selective"):
        again = (QUERY_VALUE, f"plan.recompute={recompute}")
        cases |= {f"{m}-{method}-{recompute}-sgd": case(m, method, ranks, *again) for m, method in RECOMPUTED}
    norm = (QUERY_VALUE, "workload.clip_norm=0.01")
    cases |= {f"gpt-{method}-clipped-sgd": case("gpt", method, ranks, *norm) for method in ("zero3", "gs", "gs_z3")}
    cases["llama-gs_z3-all-micro-batches-sgd"] = case("llama", "gs_z3", ranks, every, "plan.micro_batches=2")
    if ranks < 4:
        staged = ("plan.micro_batches=4", "workload.clip_norm=0.05")
        cases |= {f"{m}-pipeline-sgd": case(m, "pipeline", ranks, QUERY_VALUE, *staged) for m in MODELS}
        staged = ("plan.micro_batches=4", "plan.schedule=gpipe")
        for recompute in ("full", "selective"):
            again = (every, *staged, f"plan.recompute={recompute}")
            cases[f"llama-pipeline-all-{recompute}-sgd"] = case("llama", "pipeline", ranks, *again)
    if ranks == 4:
        for method, axis in STAGED.items():
            staged = (QUERY_VALUE, "plan.pp=2", f"plan.{axis}=2", "plan.micro_batches=3")
            cases[f"llama-pp-{method}-sgd"] = case("llama", method, ranks, *staged)
            cases[f"gpt-pp-{method}-full-sgd"] = case("gpt", method, ranks, *staged, "plan.recompute=full")
            if method != "gs":  # refused
                cases[f"gpt-pp-{method}-clipped-sgd"] = case("gpt", method, ranks, *staged, "workload.clip_norm=0.01")
        two = (QUERY_VALUE, "plan.dp_replicate=2", "plan.dp_shard=2")
        cases |= {f"{model}-gs_hier-sgd": case(model, "gs_hier", ranks, *two) for model in MODELS}
        again = (*two, "plan.recompute=full", "plan.micro_batches=2")
        cases["llama-gs_hier-full-sgd"] = case("llama", "gs_hier", ranks, *again)
    return cases


FEW = (
    "gpt-ddp-full-sgd",
    "gpt-gs_z3-clipped-sgd",
    "llama-zero3-selective-sgd",
    "llama-pipeline-all-full-sgd",
)
"""Cases on two ranks that are not slow: replicas, owners, shards and stages, every model and way to recompute once."""


@pytest.fixture(
    scope="module", params=[(2, True), *(pytest.param((n, False), marks=[pytest.mark.slow]) for n in (2, 3, 4))]
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run the cases in one launch; return (cases, what they showed)."""
    ranks, few = request.param
    cases = {name: each for name, each in cases_of(ranks).items() if not few or name in FEW}
    return cases, run_cases(tmp_path_factory.mktemp("adapters"), cases, ranks=ranks)


class TestAdapters(TrainsAdapters):
    def peak_error(self, name, case):
        # of a micro-batch, whose checkpointed blocks keep a few hundred bytes more, peaks are smaller
        return 0.003 if "plan.micro_batches=4" in str(case["overrides"]) else 0.001
