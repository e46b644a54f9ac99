"""Real: low-rank adapters on sequences that context-parallel ranks divide, as on one device and as predicted."""

import pytest
from real_runs import (
    assert_losses_of_one_device,
    assert_parameters_of_one_device,
    assert_predicted_collectives,
    predicted_peaks,
    quick,
    run_cases,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

from test_real_adapters import traced

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12"]
SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05", "workload.weight_decay=0.01"]
ADAMW64 = ["workload.optimizer=adamw", "workload.precision=fp64", "workload.learning_rate=1e-3"]
ADAPTERS = {
    "query-value": "workload.adapters={rank=4, alpha=8}",
    "all": "workload.adapters={rank=3, targets='all-linear'}",
    "down": "workload.adapters={rank=4, targets=['down_proj']}",
}
"""Of Llama's first block keys get no gradient beside the first; none of the attention's inputs does beside the last."""
DDP, ZERO1, ZERO2, ZERO3, GS, GS_Z3, LEVELS = (
    f"plan.method={name}" for name in ("ddp", "zero1", "zero2", "zero3", "gs", "gs_z3", "gs_hier")
)
RING, PLAIN = ["plan.context_exchange=ring"], ["plan.context_exchange=ring", "plan.context_split=plain"]
TWO, FOUR = "plan.cp=2", "plan.cp=4"
REPLICAS = ["plan.dp_replicate=2", "plan.dp_shard=1"]
STAGES = ["plan.pp=2", "plan.micro_batches=2"]
FULL, SELECTIVE, TWICE = "plan.recompute=full", "plan.recompute=selective", "plan.micro_batches=2"
CLIPPED = "workload.clip_norm=0.01"

ON: dict[int, dict[str, list[str]]] = {
    2: {
        "gpt-query-value-ddp-sgd": [*SGD, DDP, TWO],
        "llama-query-value-full-zero3-sgd": [*SGD, ZERO3, TWO, FULL],
        "llama-query-value-selective-zero1-sgd": [*SGD, ZERO1, TWO, SELECTIVE],
        "llama-all-zero3-sgd": [*SGD, ZERO3, TWO],
        "llama-down-ddp-sgd": [*SGD, DDP, TWO],
        "gpt-query-value-selective-zero2-adamw": [*ADAMW64, ZERO2, TWO, SELECTIVE],
        "gpt-query-value-gs-adamw": [*ADAMW64, GS, TWO],
        "gpt-query-value-ring-ddp-sgd": [*SGD, DDP, TWO, *RING],
        "llama-query-value-ring-gs-z3-sgd": [*SGD, GS_Z3, TWO, *RING, CLIPPED],
        "llama-query-value-ring-selective-ddp-sgd": [*SGD, DDP, TWO, *RING, SELECTIVE],
        "llama-all-ring-zero3-sgd": [*SGD, ZERO3, TWO, *RING, TWICE],
        "llama-down-ring-full-zero3-sgd": [*SGD, ZERO3, TWO, *RING, FULL],
        "gpt-all-plain-ring-full-zero3-adamw": [*ADAMW64, ZERO3, TWO, *PLAIN, FULL],
    },
    3: {
        "llama-query-value-ring-ddp-sgd": [*SGD, DDP, "plan.cp=3", *RING],
        "llama-query-value-ring-zero3-sgd": [*SGD, ZERO3, "plan.cp=3", *RING, TWICE],
        "gpt-all-plain-ring-zero2-sgd": [*SGD, ZERO2, "plan.cp=3", *PLAIN],
        "gpt-query-value-ring-gs-sgd": [*SGD, GS, "plan.cp=3", *RING],
    },
    4: {
        "llama-query-value-ddp-sgd": [*SGD, DDP, TWO],
        "llama-query-value-zero1-sgd": [*SGD, ZERO1, TWO],
        "llama-query-value-clipped-zero3-sgd": [*SGD, ZERO3, TWO, CLIPPED],
        "gpt-query-value-hsdp-adamw": [*ADAMW64, ZERO3, TWO, *REPLICAS],
        "gpt-query-value-four-zero2-adamw": [*ADAMW64, ZERO2, FOUR],
        "gpt-query-value-uneven-ddp-adamw": [*ADAMW64, DDP, TWO, "plan.shares.batch=[0.75,0.25]"],
        "llama-query-value-ring-four-zero3-sgd": [*SGD, ZERO3, FOUR, *RING],
        "llama-all-ring-hsdp-sgd": [*SGD, ZERO3, TWO, *RING, *REPLICAS, TWICE],
        "gpt-query-value-plain-ring-full-four-zero3-adamw": [*ADAMW64, ZERO3, FOUR, *PLAIN, FULL],
        "gpt-query-value-hier-adamw": [*ADAMW64, LEVELS, TWO, *REPLICAS],
        "llama-query-value-ring-hier-sgd": [*SGD, LEVELS, TWO, *RING, *REPLICAS, "workload.clip_norm=0.05"],
        "llama-query-value-gs-z3-sgd": [*SGD, GS_Z3, TWO, CLIPPED, TWICE],
        "llama-query-value-staged-sgd": [*SGD, DDP, TWO, *STAGES],
        "gpt-query-value-ring-selective-staged-sgd": [*SGD, DDP, TWO, *RING, *STAGES, SELECTIVE],
        "llama-all-ring-staged-zero2-sgd": [*SGD, ZERO2, TWO, *RING, "plan.pp=2", "plan.micro_batches=3"],
    },
}
FEW = ("llama-query-value-full-zero3-sgd", "llama-down-ring-full-zero3-sgd")
"""Cases on two ranks that are not slow: each exchange, with and without gradients of all inputs of the attention."""
GROUPS = {
    "2": (2, {name: case for name, case in ON[2].items() if name in FEW}),
    "2-others": (2, {name: case for name, case in ON[2].items() if name not in FEW}),
    "3": (3, ON[3]),
    "4": (4, ON[4]),
}


@pytest.fixture(scope="module", params=quick(GROUPS, ["2"]))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run all cases of a group in one launch; return (cases, what they showed)."""
    (ranks, group), cases = GROUPS[request.param], {}
    for name, changes in group.items():
        model, kind = next((name.split("-")[0], each) for each in ADAPTERS if f"-{each}-" in name)
        overrides = [star(ranks), f"workload.model={traced(model)}", *USUAL, ADAPTERS[kind], *changes]
        cases[name] = {"scenario": scenario_file("small-demo.toml"), "overrides": overrides}
    return cases, run_cases(tmp_path_factory.mktemp(f"ranks{request.param}"), cases, ranks=ranks)


def test_parameters_after_five_steps_equal_those_of_one_device(world: tuple[dict, dict]) -> None:
    assert_parameters_of_one_device(world[1])
    for name, seen in world[1].items():
        assert seen["difference_ratio"] < 1e-3, name  # of the adapters, whose parameters are small


def test_losses_are_those_of_one_device(world: tuple[dict, dict]) -> None:
    assert_losses_of_one_device(world[1])


def test_the_predicted_collectives_are_the_ones_that_the_process_group_saw(world: tuple[dict, dict]) -> None:
    assert_predicted_collectives(*world)


def test_the_predicted_peak_of_every_rank_is_the_counted_one(world: tuple[dict, dict]) -> None:
    for name, case in world[0].items():
        assert predicted_peaks(case) == pytest.approx(world[1][name]["peaks"], rel=0.001), name
