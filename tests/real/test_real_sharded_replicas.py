"""Replicas that synchronize periodically, sharded by FSDP2 or cut by tensor parallelism: they train as whole ones
do, in less memory.
"""

import json
from pathlib import Path

import pytest
from real_runs import (
    HELPERS,
    assert_collectives,
    by_ranks,
    predicted_peaks,
    run_module,
    scenario_file,
    selected,
    slow_where,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

GPT = ["workload.sequence_length=24", "workload.global_batch_size=12"]
RESNET = ["workload.global_batch_size=24"]
LOCAL, DILOCO, SPARSE = (
    [f"plan.method={method}", "plan.sync_every_steps=3", "plan.dp_shard=2"]
    for method in ("local_sgd", "diloco", "sparse_loco")
)
STREAMING = ["plan.method=streaming_diloco", "plan.sync_every_steps=4", "plan.dp_shard=2"]
CUT = ["plan.dp_shard=1", "plan.tp=2"]
BOTH = ["plan.dp_shard=2", "plan.tp=2"]
SEQUENCE = ["plan.sequence_parallel=true"]
ACCUMULATED = ["plan.micro_batches=2", "workload.global_batch_size=16"]
CASES = {
    "diloco": DILOCO,
    "local": LOCAL,
    "int8": [*DILOCO, "plan.outer.precision=int8"],
    "sparse": SPARSE,
    "streaming": STREAMING,
    "streaming, int8": [*STREAMING, "plan.outer.precision=int8"],
    "in small buckets": [*DILOCO, "plan.bucket_bytes=100000"],
    "accumulated": [*DILOCO, *ACCUMULATED],
    "accumulated, reduced at the end": [*DILOCO, *ACCUMULATED, "plan.gradient_sync=step"],
    "gathered once": [*LOCAL, "plan.parameters=gathered"],
    "recomputed": [*DILOCO, "plan.recompute=full"],
    "by the backend": [*DILOCO, "plan.exchange=backend"],
    "clipped": [*DILOCO, "workload.clip_norm=0.1"],
    "unequal batches": [*DILOCO, "plan.shares.batch=[0.5,0.25,0.0833333333333333,0.1666666666666667]"],
    "uneven shards": [*DILOCO, "plan.dp_shard=3"],
    "uneven shards, int8": [*DILOCO, "plan.dp_shard=3", "plan.outer.precision=int8"],
    "one replica": [*DILOCO, "plan.dp_shard=4"],
    "bf16": [*DILOCO, "workload.precision=bf16"],
    "cut": [*DILOCO, *CUT],
    "cut, local, recomputed": [*LOCAL, *CUT, "plan.recompute=full"],
    "cut, streaming, accumulated": [*STREAMING, *CUT, *ACCUMULATED],
    "cut, sequences, clipped": [*DILOCO, *CUT, *SEQUENCE, "workload.clip_norm=0.1"],
    "cut, unequal batches": [*DILOCO, *CUT, "plan.shares.batch=[0.75,0.25]"],
    "cut, bf16": [*DILOCO, *CUT, "workload.precision=bf16"],
    "cut, Gemma": [*DILOCO, *CUT, *SEQUENCE, f"workload.model={HELPERS}/models/of_tests/decoder-gemma.toml"],
    "cut and sharded": [*DILOCO, *BOTH],
    "cut and sharded, local, sequences, clipped": [*LOCAL, *BOTH, *SEQUENCE, "workload.clip_norm=0.1"],
    "cut and sharded, streaming, recomputed": [*STREAMING, *BOTH, "plan.recompute=selective"],
    "residual network": DILOCO,
    "residual network, streaming, int8": [*STREAMING, "plan.outer.precision=int8"],
    "bert": [*DILOCO, "plan.outer.precision=int8"],
}
"""Overrides of the demo by case, with AdamW, on two replicas of two ranks or more."""
OF_SIX = ("uneven shards", "uneven shards, int8")
OF_EIGHT = tuple(name for name in CASES if name.startswith("cut and sharded"))
RANKS = {name: 6 if name in OF_SIX else 8 if name in OF_EIGHT else 4 for name in CASES}
FILES = {"residual network": "resnet-digits.toml", "bert": "small-bert.toml"}
MEMORY_ALONE = (
    *("bf16", "one replica", "cut, bf16", "cut, Gemma"),
    *(name for name in CASES if name.startswith("residual")),
)
"""In fp64, what is in bf16 is others'; a Gemma's norms are in fp32, and a convolution's sums are rounded; and one
replica is not compared with another."""
WRITTEN_OUT = [
    slow_where(ranks, name, slow=(6, 8), few=["sparse"])  # what DiLoCo's outer step does, test_real_periodic.py shows
    for name, ranks in RANKS.items()
    if name not in MEMORY_ALONE
]
SHOWN = [
    slow_where(ranks, name, slow=(6, 8), few=["diloco", "cut, sequences, clipped"])  # the sparse form is written out
    for name, ranks in RANKS.items()
]
MEDIAN_PEAK, LARGEST_PEAK = 0.01, 0.04


def cases_for(ranks):
    return {
        name: {
            "scenario": scenario_file(FILES.get(name.split(",")[0], "small-demo.toml")),
            "overrides": [star(ranks), *(RESNET if name.startswith("residual") else GPT), *changes],
        }
        for name, changes in CASES.items()
        if RANKS[name] == ranks
    }


FOUND = {}


@pytest.fixture(scope="module")
def compared(request, tmp_path_factory):
    ranks = request.param
    if ranks not in FOUND:
        folder: Path = tmp_path_factory.mktemp("written-out")
        cases = selected(request, cases_for(ranks), by="written_out", compared=ranks)
        exact = {n: case | {"overrides": [*case["overrides"], "workload.precision=fp64"]} for n, case in cases.items()}
        (folder / "cases.json").write_text(json.dumps(exact))
        FOUND[ranks] = run_module("periodic_ranks", [str(folder / "cases.json")], folder, ranks=ranks)
    return FOUND[ranks]


@pytest.mark.parametrize(("compared", "written_out"), WRITTEN_OUT, indirect=["compared"])
def test_replicas_train_as_one_device_each_and_synchronize_their_shards(compared, written_out):
    assert max(compared[written_out]["differences"]) < 1e-9
    assert min(compared[written_out]["apart"]) > 1e-6  # the last of seven steps is an inner one


world = by_ranks(cases_for)


@pytest.mark.parametrize(("world", "name"), SHOWN, indirect=["world"])
def test_collectives_and_peaks_are_the_predicted_ones(world, name):
    cases, seen = world[0], world[1][name]
    assert_collectives(cases[name], seen)
    assert seen["replicas_equal"]
    errors = [abs(p / m - 1) for p, m in zip(predicted_peaks(cases[name], products=True), seen["peaks"], strict=True)]
    assert max(errors) < (LARGEST_PEAK if name.startswith("residual") else MEDIAN_PEAK)
