"""Models with frozen layers train as on one device, with predicted collectives and peaks, checkpointed or not."""

from itertools import product
from pathlib import Path

import pytest
from real_runs import SGD, TrainsAsOneDevice, run_cases, scenario_file, star
from test_real_adapters import STAGED

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

MODEL = Path(__file__).resolve().parents[2] / "scenarios" / "models" / "gpt-byte-150k.toml"
DEEPER = MODEL.with_name("gpt-byte-1m.toml")
MASKED = MODEL.parents[2] / "tests" / "helpers" / "models" / "of_tests" / "data-bert.toml"
FROZEN = {
    "lowest": '["tokens", "blocks.0"]',  # no backward below the second block
    "between": '["blocks.0"]',  # gradients pass through it
    "embedding": '["tokens"]',
    "highest": '["blocks.1", "norm"]',
    "all-but-the-head": '["tokens", "blocks.*", "norm"]',
}
SHARES = {
    2: ["plan.shares.shards=[0.7,0.3]", "plan.shares.batch=[0.75,0.25]"],
    3: ["plan.shares.shards=[0.6,0.3,0.1]", "plan.shares.batch=[0.5,0.25,0.25]"],
    4: ["plan.shares.shards=[0.4,0.3,0.1,0.2]", "plan.shares.batch=[0.5,0.25,0.25,0.0]"],
}
"""Unequal ones; of four ranks one has no samples."""
USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12", *SGD]


def case(method: str, ranks: int, frozen: str, *changes: str) -> dict[str, object]:
    named = [f"plan.method={method}", f"workload.frozen={FROZEN[frozen]}"]
    overrides = [star(ranks), f"workload.model={MODEL}", *USUAL, *named, *changes]
    return {"scenario": scenario_file("demo.toml"), "overrides": overrides}


def cases_of(ranks: int) -> dict[str, dict[str, object]]:
    cases = {
        f"{m}-{name}-sgd": case(m, ranks, name)
        for m in ("ddp", "zero1", "zero2", "zero3", "gs", "gs_z3")
        for name in FROZEN
    }
    cases["ddp-micro-batches-sgd"] = case("ddp", ranks, "lowest", "plan.micro_batches=2")
    cases["zero3-micro-batches-sgd"] = case("zero3", ranks, "lowest", "plan.micro_batches=2")
    gs = ["plan.micro_batches=2", "plan.gradient_sync=step", "plan.push.threshold=0", "plan.shares.shards=compute"]
    cases["gs-micro-batches-sgd"] = case("gs", ranks, "lowest", *gs)
    cases["zero3-each-micro-batch-sgd"] = case(
        "zero3", ranks, "between", "plan.micro_batches=2", "plan.gradient_sync=micro-batch"
    )
    deeper = [
        f"workload.model={DEEPER}",
        'workload.frozen=["tokens", "blocks.[01]"]',
    ]  # one block is not even prefetched
    cases["zero3-deeper-sgd"] = case("zero3", ranks, "lowest", *deeper)
    if ranks == 4:
        two = ["plan.dp_replicate=2", "plan.dp_shard=2"]
        cases |= {f"hsdp-{name}-sgd": case("hsdp", ranks, name, *two) for name in FROZEN}
        cases |= {f"gs_hier-{name}-sgd": case("gs_hier", ranks, name, *two) for name in FROZEN}
    cases["zero1-clipped-sgd"] = case("zero1", ranks, "between", "workload.clip_norm=0.01")
    cases["gs_z3-clipped-sgd"] = case("gs_z3", ranks, "between", "workload.clip_norm=0.01", *SHARES[ranks])
    cases["gs_z3-gathered-sgd"] = case("gs_z3", ranks, "between", "plan.parameters=gathered")
    cases["gs_z3-deeper-sgd"] = case("gs_z3", ranks, "lowest", *deeper)
    cases["gs_z3-micro-batches-sgd"] = case("gs_z3", ranks, "lowest", "plan.micro_batches=2")
    once = ("plan.micro_batches=2", "plan.gradient_sync=step", "plan.recompute=full")
    cases["gs_z3-micro-batches-full-sgd"] = case("gs_z3", ranks, "between", *once)
    return cases | recomputed_cases(ranks) | staged_cases(ranks) | masked_cases(ranks)


def masked_cases(ranks: int) -> dict[str, dict[str, object]]:
    """A classifier whose layer `norm` makes a mask for all blocks, after its output."""
    model = [f"workload.model={MASKED}", "workload.sequence_length=48"]
    named = {"norm": '["norm"]', "blocks": '["blocks.*", "pooler", "head"]'}
    cases = {
        f"ddp-masked-{k}-sgd": case("ddp", ranks, "lowest", *model, f"workload.frozen={v}") for k, v in named.items()
    }
    full = [*model, f"workload.frozen={named['blocks']}", "plan.recompute=full"]
    return cases | {"gs-masked-blocks-full-sgd": case("gs", ranks, "lowest", *full)}


STAGED_FROZEN = {
    "lowest": '["tokens", "blocks.0"]',
    "between": '["blocks.1", "blocks.3"]',
    "roots": '["tokens", "norm"]',
    "second-stage": '["blocks.2", "norm", "head"]',  # its first layer passes on a gradient all the same
}
"""Layers of the deeper model, whose pipeline of two stages is cut behind its second block or its third."""


def staged_cases(ranks: int) -> dict[str, dict[str, object]]:
    """Stages of a pipeline with frozen layers; of four ranks in two replicas, or in shards."""
    cases = {}
    for name, frozen in STAGED_FROZEN.items():
        named = [f"workload.model={DEEPER}", f"workload.frozen={frozen}"]
        if ranks < 4:
            cases[f"pipeline-{name}-sgd"] = case("pipeline", ranks, "lowest", *named, "plan.micro_batches=4")
            continue
        for method, axis in STAGED.items():
            staged = [*named, "plan.pp=2", f"plan.{axis}=2", "plan.micro_batches=3"]
            if (method, name) != ("zero3", "lowest"):  # refused
                cases[f"pp-{method}-{name}-sgd"] = case(method, ranks, "lowest", *staged)
                again = [*staged, "plan.recompute=full", "plan.schedule=gpipe"]
                cases[f"pp-{method}-{name}-full-sgd"] = case(method, ranks, "lowest", *again)
    if ranks == 2:
        staged = [f"workload.model={DEEPER}", 'workload.frozen=["tokens", "norm"]', "plan.micro_batches=4"]
        staged += ["plan.schedule=interleaved", "plan.stages=[2,1,2,2]"]
        cases["pipeline-interleaved-sgd"] = case("pipeline", ranks, "lowest", *staged)
    return cases


RECOMPUTED = {
    "full": (
        *(("ddp", "lowest"), ("zero1", "between"), ("zero3", "lowest"), ("gs", "embedding"), ("zero2", "highest")),
        *(("gs_z3", "lowest"), ("gs_z3", "all-but-the-head")),
    ),
    "selective": (
        *(("ddp", "between"), ("zero3", "all-but-the-head"), ("gs", "lowest"), ("zero2", "lowest")),
        *(("gs_z3", "lowest"), ("gs_z3", "between")),
    ),
}
"""Checkpointing where a block has no backward, only gradients of its input, or none of its input."""


def recomputed_cases(ranks: int) -> dict[str, dict[str, object]]:
    cases = {
        f"{method}-{name}-{recompute}-sgd": case(method, ranks, name, f"plan.recompute={recompute}")
        for recompute, pairs in RECOMPUTED.items()
        for method, name in pairs
    }
    micro = ("plan.recompute=full", "plan.micro_batches=2")
    cases["zero3-micro-batches-full-sgd"] = case("zero3", ranks, "lowest", *micro)
    bert = [f"workload.model={DEEPER.with_name('bert-byte-1m.toml')}", 'workload.frozen=["tokens", "blocks.[01]"]']
    cases["zero3-bert-full-sgd"] = case("zero3", ranks, "lowest", "plan.recompute=full", *bert)
    if ranks == 4:
        two = ("plan.dp_replicate=2", "plan.dp_shard=2", "plan.recompute=full")
        pairs = product(("hsdp", "gs_hier"), ("lowest", "between"))
        cases |= {f"{method}-{name}-full-sgd": case(method, ranks, name, *two) for method, name in pairs}
    return cases


FEW = (
    "zero1-between-sgd",
    "gs-micro-batches-sgd",
    "zero3-bert-full-sgd",
    "pipeline-lowest-sgd",
    "gs_z3-lowest-full-sgd",
    "ddp-between-selective-sgd",
)
"""Cases on two ranks that are not slow: replicas, owners, shards and stages, and every way to recompute once."""


@pytest.fixture(
    scope="module", params=[(2, FEW), *(pytest.param((n, ()), marks=[pytest.mark.slow]) for n in (2, 3, 4))]
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run the cases in one launch; return (cases, what they showed)."""
    ranks, few = request.param
    every = cases_of(ranks)
    cases = {name: every[name] for name in few or every}
    return cases, run_cases(tmp_path_factory.mktemp("frozen"), cases, ranks=ranks)


class TestTraining(TrainsAsOneDevice):
    """Training equals one device's, with the predicted collectives and peaks."""
