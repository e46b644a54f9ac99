"""Experts divided among ranks; training equals one device's, and predictions what the process group saw."""

from pathlib import Path

import pytest
from real_runs import (
    ADAMW64,
    HELPERS,
    SCENARIOS,
    SGD,
    assert_parameters_of_one_device,
    assert_predicted_collectives,
    predicted,
    predicted_peaks,
    run_cases,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12", "workload.expert_routing=load"]
SKEWED = ["workload.expert_load.skew=0.7"]
MIXTRAL = [f"workload.model={HELPERS}/models/mixtral.toml"]
DENSE = [f"workload.model={SCENARIOS}/models/deepseek-moe-byte-240k.toml"]
"""A small DeepSeekMoE: a shared expert beside routed ones, and a first block without."""
TINY = {"width": 48, "heads": 4, "layers": 3, "experts": 12, "experts_per_token": 2, "expert_width": 32}
SELECTIVE, CLIPPED = ["plan.recompute=selective"], ["workload.clip_norm=0.05"]
STAGED = ["plan.pp=2", "plan.micro_batches=2"]
"""A pipeline of two stages, whose replicas divide the experts of a stage."""
REPLICAS_OF_TWO = ["plan.method=hsdp", "plan.dp_replicate=2", "plan.dp_shard=2"]
REPLICAS_OF_FOUR = ["plan.method=hsdp", "plan.dp_replicate=2", "plan.dp_shard=4", "workload.global_batch_size=16"]
LEVELS = ["plan.method=gs_hier", *REPLICAS_OF_TWO[1:]]
PUSHED, SHARDED, UNEVEN = ["plan.method=gs"], ["plan.method=gs_z3"], "plan.shares.shards=[0.4,0.1,0.2,0.3]"
CASES = {
    "all-balanced-sgd": (0, SGD),
    "all-skewed-adamw": (0, [*ADAMW64, *SKEWED]),
    "all-accumulated-recomputed-sgd": (0, [*SGD, *SKEWED, "plan.micro_batches=2", "plan.recompute=full"]),
    "all-without-overlap-sgd": (0, [*SGD, "plan.overlap=false"]),
    "all-sharded-skewed-sgd": (0, [*SGD, *SKEWED, "plan.method=zero3"]),
    "all-sharded-skewed-adamw": (0, [*ADAMW64, *SKEWED, "plan.method=zero3", "plan.recompute=full"]),
    "all-kept-accumulated-sgd": (0, [*SGD, "plan.method=zero2", "plan.micro_batches=2"]),
    "all-mixtral-sharded-sgd": (0, [*SGD, *SKEWED, *MIXTRAL, "plan.method=zero3"]),
    "two-dense-first-sgd": (2, [*SGD, *SKEWED, *DENSE]),
    "all-dense-first-sharded-state-sgd": (0, [*SGD, *SKEWED, *DENSE, "plan.method=zero1"]),
    "two-dense-first-sharded-skewed-sgd": (2, [*SGD, *SKEWED, *DENSE, "plan.method=zero3"]),
    "all-dense-first-kept-sgd": (0, [*SGD, *SKEWED, *DENSE, "plan.method=zero2"]),
    "two-sharded-skewed-sgd": (2, [*SGD, *SKEWED, "plan.method=zero3", "plan.micro_batches=2"]),
    "two-kept-recomputed-sgd": (2, [*SGD, *SKEWED, "plan.method=zero2", "plan.recompute=full"]),
    "two-sharded-adamw": (2, [*ADAMW64, *SKEWED, "plan.method=zero3"]),
    "all-sharded-state-skewed-sgd": (0, [*SGD, *SKEWED, "plan.method=zero1"]),
    "two-sharded-state-skewed-sgd": (2, [*SGD, *SKEWED, "plan.method=zero1", "plan.micro_batches=2"]),
    "two-sharded-state-adamw": (2, [*ADAMW64, *SKEWED, "plan.method=zero1"]),
    "two-skewed-adamw": (2, [*ADAMW64, *SKEWED]),
    "two-without-overlap-accumulated-sgd": (2, [*SGD, "plan.overlap=false", "plan.micro_batches=3"]),
    "two-staged-skewed-sgd": (2, [*SGD, *SKEWED, *STAGED]),
    "two-staged-dense-first-adamw": (2, [*ADAMW64, *SKEWED, *DENSE, *STAGED, "plan.recompute=full"]),
    "two-staged-gpipe-sharded-state-sgd": (2, [*SGD, *SKEWED, *STAGED, "plan.method=zero1", "plan.schedule=gpipe"]),
    "two-staged-interleaved-sgd": (2, [*SGD, *SKEWED, *STAGED, "plan.schedule=interleaved"]),
    "two-staged-interleaved-sharded-sgd": (
        2,
        [*SGD, *SKEWED, *STAGED, "plan.method=zero3", "plan.schedule=interleaved", "plan.recompute=full"],
    ),
    "two-staged-kept-sgd": (2, [*SGD, *SKEWED, *STAGED, "plan.method=zero2"]),
    "four-cut-sharded-sgd": (4, [*SGD, *SKEWED, *MIXTRAL, "workload.global_batch_size=16", "plan.method=zero3"]),
    "four-cut-sharded-accumulated-sgd": (
        4,
        [*SGD, *SKEWED, *MIXTRAL, "workload.global_batch_size=16", "plan.method=zero3", "plan.micro_batches=2"],
    ),
    "four-cut-kept-sgd": (4, [*SGD, *SKEWED, *MIXTRAL, "workload.global_batch_size=16", "plan.method=zero2"]),
    "all-selective-accumulated-sgd": (0, [*SGD, *SKEWED, *SELECTIVE, "plan.micro_batches=2"]),
    "all-mixtral-selective-sharded-sgd": (0, [*SGD, *SKEWED, *SELECTIVE, *MIXTRAL, "plan.method=zero3"]),
    "all-clipped-adamw": (0, [*ADAMW64, *SKEWED, *CLIPPED]),
    "all-clipped-sharded-sgd": (0, [*SGD, *SKEWED, *CLIPPED, "plan.method=zero3", "plan.micro_batches=2"]),
    "all-clipped-sharded-state-adamw": (0, [*ADAMW64, *SKEWED, *CLIPPED, "plan.method=zero1"]),
    "two-clipped-sgd": (2, [*SGD, *SKEWED, *CLIPPED]),
    "two-clipped-sharded-adamw": (2, [*ADAMW64, *SKEWED, *CLIPPED, "plan.method=zero3"]),
    "two-staged-clipped-dense-first-adamw": (2, [*ADAMW64, *SKEWED, *CLIPPED, *DENSE, *STAGED, "plan.method=zero1"]),
    "two-staged-clipped-kept-sgd": (2, [*SGD, *SKEWED, *CLIPPED, *STAGED, "plan.method=zero2"]),
    "four-cut-clipped-sharded-sgd": (
        4,
        [*SGD, *SKEWED, *CLIPPED, *MIXTRAL, "workload.global_batch_size=16", "plan.method=zero3"],
    ),
    "two-sharded-replicas-sgd": (2, [*SGD, *SKEWED, *REPLICAS_OF_TWO]),
    "two-sharded-replicas-clipped-adamw": (
        2,
        [*ADAMW64, *SKEWED, *CLIPPED, *REPLICAS_OF_TWO, "plan.micro_batches=2"],
    ),
    "two-kept-replicas-recomputed-sgd": (
        2,
        [*SGD, *SKEWED, *MIXTRAL, *REPLICAS_OF_TWO, "plan.method=zero2", "plan.recompute=full"],
    ),
    "four-sharded-replicas-sgd": (4, [*SGD, *SKEWED, *REPLICAS_OF_FOUR]),
    "two-of-four-sharded-replicas-sgd": (4, [*SGD, *SKEWED, *REPLICAS_OF_FOUR, "plan.ep=2"]),
    "all-selective-adamw": (0, [*ADAMW64, *SKEWED, *SELECTIVE]),
    "two-dense-first-selective-sgd": (2, [*SGD, *SKEWED, *SELECTIVE, *DENSE]),
    "two-kept-every-second-product-sgd": (
        2,
        [*SGD, *SKEWED, "plan.method=zero2", "plan.recompute=every-second-product"],
    ),
    "two-staged-selective-sgd": (2, [*SGD, *SKEWED, *SELECTIVE, *STAGED]),
    "two-staged-sharded-recomputed-sgd": (2, [*SGD, *STAGED, "plan.method=zero3", "plan.recompute=full"]),
    "all-pushed-skewed-sgd": (0, [*SGD, *SKEWED, *PUSHED, "plan.micro_batches=2"]),
    "all-pushed-clipped-adamw": (0, [*ADAMW64, *SKEWED, *PUSHED, *CLIPPED]),
    "all-pushed-dense-first-published-beside-sgd": (
        0,
        [*SGD, *SKEWED, *PUSHED, *DENSE, "plan.publish.overlap=true", "plan.recompute=full"],
    ),
    "two-pushed-skewed-sgd": (2, [*SGD, *SKEWED, *PUSHED]),
    "two-pushed-mixtral-each-micro-batch-sgd": (
        2,
        [*SGD, *SKEWED, *PUSHED, *MIXTRAL, "plan.micro_batches=2", "plan.gradient_sync=micro-batch"],
    ),
    "two-pushed-uneven-clipped-adamw": (2, [*ADAMW64, *SKEWED, *PUSHED, *CLIPPED, UNEVEN]),
    "two-pushed-uneven-published-beside-sgd": (2, [*SGD, *SKEWED, *PUSHED, UNEVEN, "plan.publish.overlap=true"]),
    "two-pushed-by-the-backend-sgd": (2, [*SGD, *SKEWED, *PUSHED, "plan.exchange=backend", "plan.overlap=false"]),
    "four-pushed-few-a-bucket-sgd": (
        4,
        [*SGD, *PUSHED, "workload.global_batch_size=16", "plan.bucket_bytes=50000", "plan.first_bucket_bytes=1000"],
    ),
    "all-pushed-sharded-sgd": (0, [*SGD, *SKEWED, *SHARDED]),
    "all-pushed-sharded-clipped-accumulated-sgd": (0, [*SGD, *SKEWED, *SHARDED, *CLIPPED, "plan.micro_batches=2"]),
    "all-pushed-sharded-adamw": (0, [*ADAMW64, *SKEWED, *SHARDED, "plan.recompute=full"]),
    "two-pushed-sharded-each-micro-batch-sgd": (
        2,
        [*SGD, *SKEWED, *SHARDED, "plan.micro_batches=2", "plan.gradient_sync=micro-batch"],
    ),
    "two-pushed-sharded-recomputed-sgd": (
        2,
        [*SGD, *SKEWED, *SHARDED, "plan.micro_batches=2", "plan.recompute=full"],
    ),
    "two-staged-pushed-sgd": (2, [*SGD, *SKEWED, *STAGED, *PUSHED]),
    "two-staged-pushed-clipped-adamw": (2, [*ADAMW64, *SKEWED, *STAGED, *PUSHED, *CLIPPED, "plan.recompute=full"]),
    "two-staged-pushed-dense-first-gpipe-sgd": (2, [*SGD, *SKEWED, *STAGED, *PUSHED, *DENSE, "plan.schedule=gpipe"]),
    "two-staged-pushed-interleaved-sgd": (2, [*SGD, *SKEWED, *STAGED, *PUSHED, "plan.schedule=interleaved"]),
    "two-pushed-sharded-dense-first-sgd": (2, [*SGD, *SKEWED, *SHARDED, *DENSE, "plan.micro_batches=2"]),
    "all-pushed-sharded-dense-first-sgd": (0, [*SGD, *SKEWED, *SHARDED, *DENSE]),
    "two-pushed-sharded-selective-sgd": (2, [*SGD, *SKEWED, *SHARDED, *SELECTIVE, *MIXTRAL]),
    "two-pushed-sharded-uneven-clipped-adamw": (2, [*ADAMW64, *SKEWED, *SHARDED, *CLIPPED, UNEVEN]),
    "two-pushed-on-levels-skewed-sgd": (2, [*SGD, *SKEWED, *LEVELS]),
    "two-pushed-on-levels-uneven-clipped-adamw": (
        2,
        [*ADAMW64, *SKEWED, *LEVELS, *CLIPPED, UNEVEN, "plan.micro_batches=2"],
    ),
    "two-pushed-on-levels-mixtral-each-micro-batch-sgd": (
        2,
        [*SGD, *SKEWED, *LEVELS, *MIXTRAL, "plan.micro_batches=2", "plan.gradient_sync=micro-batch"],
    ),
    "all-pushed-on-levels-dense-first-sgd": (0, [*SGD, *SKEWED, *LEVELS, *DENSE, "plan.recompute=full"]),
    "four-pushed-on-levels-few-a-bucket-sgd": (
        4,
        [
            *(*SGD, "plan.method=gs_hier", "plan.dp_replicate=2", "plan.dp_shard=4", "workload.global_batch_size=16"),
            *("plan.bucket_bytes=50000", "plan.first_bucket_bytes=1000"),
        ],
    ),
    "two-of-four-pushed-on-levels-sgd": (
        4,
        [
            *(*SGD, *SKEWED, "plan.method=gs_hier", "plan.dp_replicate=2", "plan.dp_shard=4"),
            *("workload.global_batch_size=16", "plan.ep=2"),
        ],
    ),
    "two-pushed-kept-uneven-sgd": (2, [*SGD, *SKEWED, *SHARDED, UNEVEN, "plan.parameters=gathered"]),
}
"""By name: the number of ranks that divide the experts (0: all), and overrides."""


def tiny() -> Path:
    """Return the file of a small model of experts."""
    from small_models import Request, kept

    request = Request(
        model="gsreal.models.mixture",
        arguments=tuple(f"{key}={value}" for key, value in (TINY | {"shared_experts": 1}).items()),
        name="tiny-mixture",
        vocabulary=256,
        maximum_sequence_length=24,
        task="next-token",
        sequence_length=24,
    )
    return kept(request)


FEW = (
    "all-accumulated-recomputed-sgd",
    "all-selective-accumulated-sgd",
    "all-clipped-sharded-sgd",
    "all-clipped-sharded-state-adamw",
    "all-mixtral-sharded-sgd",
    "all-dense-first-sharded-state-sgd",
    "all-pushed-skewed-sgd",
    "all-pushed-sharded-sgd",
)
"""Cases on two ranks that are not slow: every method and model once."""


@pytest.fixture(
    scope="module",
    params=[(2, FEW), *(pytest.param((n, tuple(CASES)), marks=[pytest.mark.slow]) for n in (2, 3, 4, 8))],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run all cases of one number of ranks in one launch; return (cases, what they showed)."""
    ranks, names = request.param
    # few cases on two ranks; where more are compared, what a rank holds inside a block weighs too much in a tiny model
    small = [f"workload.model={tiny()}"] if names == FEW else []
    cases = {
        name: {
            "scenario": scenario_file("moe-experts.toml"),
            "overrides": [star(ranks), *small, *USUAL, f"plan.ep={divided or ranks}", *overrides],
        }
        for name, (divided, overrides) in CASES.items()
        if name in names
        and divided in ((0, ranks // 2) if ranks < 8 else (4,))
        and (ranks == 4 or not {STAGED[0], REPLICAS_OF_TWO[2], UNEVEN} & {*overrides})
        and not (ranks == 3 and {*MIXTRAL, *DENSE} & {*overrides})  # of four and of eight experts
    }
    return cases, run_cases(tmp_path_factory.mktemp(f"ranks{ranks}"), cases, ranks=ranks)


def test_parameters_after_five_steps_equal_those_of_one_device(world: tuple[dict, dict]) -> None:
    assert_parameters_of_one_device(world[1])


def test_the_predicted_collectives_are_the_ones_that_the_process_group_saw(world: tuple[dict, dict]) -> None:
    assert_predicted_collectives(*world)


def test_the_predicted_rows_are_the_ones_that_were_sent(world: tuple[dict, dict]) -> None:
    for name, case in world[0].items():
        exchanges = [each for each in predicted(case).collectives if each.kind == "all-to-all-v"]
        rows = [each for each in exchanges if each.payload_bytes is not None]  # dense pushes do not depend on the data
        sent = zip(world[1][name]["collectives"], world[1][name]["payloads"], strict=True)
        payloads = [payload for key, payload in sent if key[0] == "all-to-all-v" and payload is not None]
        assert sorted(each.payload_bytes for each in rows) == sorted(payloads), name
        assert sum(payloads) > 0


def test_the_predicted_peak_of_every_rank_is_the_counted_one(world: tuple[dict, dict]) -> None:
    # torch has no grouped product in fp64: there the products of experts are other operations than those traced
    compared = {name: case for name, case in world[0].items() if not name.endswith("adamw")}
    assert len(compared) >= 3
    for name, case in compared.items():
        # cases that are not slow show each mechanism closely; not all others were compared since backwards were exact
        closely = name in FEW or not any(each in name for each in ("staged", "recomputed", "selective"))
        most = 0.02 if "plan.method=zero3" in case["overrides"] and name not in FEW else 0.001 if closely else 0.003
        assert predicted_peaks(case) == pytest.approx(world[1][name]["peaks"], rel=most), name


# 16 bits -------------------------------------------------------------------------------------------------------------

LIKE_TORCHTITAN = ["workload.precision=bf16", "workload.reduce_precision=fp32", "workload.clip_norm=0.05", *SELECTIVE]
FP16 = ["workload.precision=fp16", "workload.loss_scale=1024"]
LONG = ["workload.global_batch_size=64"]
"""Of many tokens: the router's indices and the order of rows, integers of 8 bytes, are more of what is held."""
IN_16_BITS = {
    2: {
        "sharded-bf16": [*LIKE_TORCHTITAN, "plan.method=zero3"],
        "replicated-fp16": [*FP16, "plan.method=ddp", *CLIPPED],
        "pushed-bf16": [*PUSHED, "workload.precision=bf16", "workload.clip_norm=0.05", *SELECTIVE],
        "pushed-sharded-bf16": [*SHARDED, "workload.precision=bf16"],
        "long-replicated-bf16": [*LONG, "workload.precision=bf16", "plan.method=ddp"],
    },
    4: {
        "two-sharded-accumulated-bf16": [*LIKE_TORCHTITAN, "plan.method=zero3", "plan.ep=2", "plan.micro_batches=2"],
        "two-staged-sharded-bf16": [*LIKE_TORCHTITAN, *STAGED, "plan.method=zero3", "plan.ep=2"],
        "two-staged-kept-bf16": [*LIKE_TORCHTITAN, *STAGED, "plan.method=zero2", "plan.ep=2"],
        "two-replicated-fp16": [*FP16, "plan.method=ddp", "plan.ep=2"],
        "two-pushed-bf16": [*PUSHED, "workload.precision=bf16", "plan.ep=2", "plan.micro_batches=2"],
        "two-pushed-sharded-bf16": [*SHARDED, "workload.precision=bf16", "plan.ep=2", "plan.micro_batches=2"],
        "two-kept-fp16": [*FP16, "plan.method=zero2", "plan.ep=2", "workload.clip_norm=0.05"],
        "two-staged-fp16": [*FP16, *STAGED, "plan.method=ddp", "plan.ep=2", *CLIPPED],
    },
}
TRAINED_RATIO = 2**-6
"""How far parameters may be from one device's, of the largest: bf16 rounds a gradient to one part in 2^9; five steps'
worth reach a few times that (seen: 2^-8)."""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_divided_experts_train_in_16_bits_with_the_predicted_collectives_and_peaks(ranks, tmp_path):
    # small where ranks are few: without oneDNN a product in 16 bits takes longest. As above, not on four
    model = [f"workload.model={tiny()}"] if ranks == 2 else []
    cases = {
        name: {
            "scenario": scenario_file("moe-experts.toml"),
            "overrides": [star(ranks), *model, *USUAL, *SGD, *SKEWED, f"plan.ep={ranks}", *overrides],
            "onednn": False,  # whose 16-bit products take scratch that no profile here has
        }
        for name, overrides in IN_16_BITS[ranks].items()
    }
    found = run_cases(tmp_path, cases, ranks=ranks)
    assert_predicted_collectives(cases, found)
    for name, case in cases.items():
        assert found[name]["replicas_equal"], name
        assert found[name]["difference"] <= TRAINED_RATIO * found[name]["largest_parameter"], name
        # of bf16, which is not traced apart: parts that compute in fp32 whatever the precision, the router's
        closely = 0.01 if "staged" in name or "kept" in name or "fp16" in name else 0.003
        assert predicted_peaks(case) == pytest.approx(found[name]["peaks"], rel=closely), name


def test_a_rank_without_samples_runs_its_experts_on_no_tokens():
    import torch

    from gsreal.models import mixture

    module = mixture(**TINY, shared_experts=1)
    logits = module(torch.zeros(0, 24, dtype=torch.long))
    logits.sum().backward()
    assert logits.shape[:2] == (0, 24)
    assert all(p.grad is not None and not p.grad.any() for name, p in module.named_parameters() if "expert" in name)
