"""Trainings with all ranks in one process are those of real ranks, method by method."""

import json
from pathlib import Path

import pytest
from real_runs import quick, run_module, scenario_file, selected, star

import gssim

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

SMALL = [
    "workload.model=models/gpt-byte-150k.toml",
    "workload.sequence_length=16",
    "workload.global_batch_size=6",
    "workload.precision=fp64",
    "workload.learning_rate=1e-3",
    "plan.bucket_bytes=400000",
]
CASES = {
    "dense": ["plan.method=ddp"],
    "half": ["plan.method=half"],
    "powersgd": ["plan.method=powersgd"],
    "topk": ["plan.method=topk"],
    "local_sgd": ["plan.method=local_sgd", "plan.sync_every_steps=3"],
    "diloco": ["plan.method=diloco", "plan.sync_every_steps=3"],
    "diloco, int8": ["plan.method=diloco", "plan.sync_every_steps=3", "plan.outer.precision=int8"],
    "streaming_diloco": ["plan.method=streaming_diloco", "plan.sync_every_steps=4"],
    "pushed": ["plan.push.threshold=1e-3"],
    "with error feedback": ["plan.push.threshold=1e-3", "plan.push.error_feedback=true"],
    "thresholded publish": ["plan.push.threshold=1e-3", "plan.publish.threshold=5e-4"],
    "nothing pushed": ["plan.push.threshold=inf"],
}


QUICK = ("dense", "powersgd", "topk", "diloco, int8", "streaming_diloco", "with error feedback", "thresholded publish")


@pytest.fixture(scope="module")
def compared(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("together")
    cases = {
        name: {"scenario": scenario_file("demo.toml"), "overrides": [star(2), *SMALL, *changes]}
        for name, changes in CASES.items()
    }
    cases = selected(request, cases)
    (folder / "cases.json").write_text(json.dumps(cases))
    return run_module("together_ranks", [str(folder / "cases.json")], folder, ranks=2)


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_ranks_in_one_process_train_as_real_ones(compared, name):
    assert compared[name]["moved"] > 1e-4
    assert max(compared[name]["differences"]) < 1e-9


def test_sharded_replicas_are_refused():
    from gsreal.statistics.together import trainer_of

    plan = ["plan.method=diloco", "plan.dp_shard=2", "workload.global_batch_size=8"]
    scenario = gssim.load(scenario_file("demo.toml"), [star(4), *plan])
    with pytest.raises(gssim.UserError, match=r"plan\.dp_shard = 2: cannot be trained with all ranks"):
        trainer_of(scenario)
