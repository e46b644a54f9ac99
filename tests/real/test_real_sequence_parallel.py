"""Sequences divided among tensor-parallel ranks; training equals one device's, predictions what was counted."""

from pathlib import Path

import pytest
from real_runs import ADAMW64, HELPERS, SGD, PushesAsPredicted, in_groups, planted, scenario_file, star

from gssim.program.lowering import Lowering
from gssim.scenario import load_scenario
from gssim.workload import gradient_order, unrolled

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pushing = pytest.importorskip("gsreal.methods.gradient_sharding")
Timeline = pytest.importorskip("gsreal.measure").Timeline
CPU = torch.device("cpu")

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12", "plan.sequence_parallel=true"]
TENSOR = ["plan.method=tensor"]
LLAMA = [f"workload.model={HELPERS}/models/of_tests/tiny-llama.toml"]
GS, Z3, LEVELS = (["plan.tp=2", f"plan.method={name}"] for name in ("gs", "gs_z3", "gs_hier"))
ALL = ["plan.push.threshold=0", "plan.push.error_feedback=true", "plan.push.encoding=bitmap"]
PUBLISHED = ["plan.publish.threshold=0", "plan.publish.encoding=coo"]
SOME = ["plan.push.threshold=0.3", "plan.push.kind=target-density", "plan.push.reestimate_steps=1"]
UNEVEN = ["plan.method=gs_tp", "plan.shares.shards=[0.7,0.3]"]
ON_TWO = {
    "gpt-sgd": ("small-demo.toml", [*SGD, *TENSOR]),
    "gpt-full-adamw": ("small-demo.toml", [*ADAMW64, *TENSOR, "plan.recompute=full", "plan.micro_batches=2"]),
    "gpt-uneven-selective-adamw": ("small-demo.toml", [*ADAMW64, *UNEVEN, "plan.recompute=selective"]),
    "bert-adamw": ("small-bert.toml", [*ADAMW64, *TENSOR]),
    "gpt-owned-adamw": ("small-demo.toml", [*ADAMW64, *GS]),
    "llama-full-sgd": ("small-demo.toml", [*SGD, *TENSOR, *LLAMA, "plan.recompute=full"]),
    "llama-selective-sgd": ("small-demo.toml", [*SGD, *TENSOR, *LLAMA, "plan.recompute=selective"]),
}
FEW = {2: ("gpt-full-adamw", "gpt-uneven-selective-adamw", "gpt-owned-adamw", "llama-full-sgd")}
"""Cases that are not slow: blocks are cut evenly and not, and run again in both ways; owners sum; what the
first block takes is not what the embedding makes."""
ON_FOUR = {
    "gpt-ddp-sgd": ("small-demo.toml", [*SGD, "plan.method=ddp", "plan.tp=2", "plan.dp_replicate=2"]),
    "gpt-zero1-adamw": ("small-demo.toml", [*ADAMW64, "plan.method=zero1", "plan.tp=2", "plan.dp_replicate=2"]),
    "gpt-zero3-adamw": ("small-demo.toml", [*ADAMW64, "plan.method=zero3", "plan.tp=2", "plan.dp_shard=2"]),
    "bert-four-sgd": ("small-bert.toml", [*SGD, *TENSOR]),
    "gpt-gs-adamw": ("small-demo.toml", [*ADAMW64, *GS, "plan.shares.shards=[0.7,0.3]", "plan.micro_batches=2"]),
    "gpt-gs-all-each-adamw": (
        "small-demo.toml",
        [*ADAMW64, *GS, *ALL, *PUBLISHED, "plan.micro_batches=2", "plan.gradient_sync=micro-batch"],
    ),
    "gpt-gs-some-sgd": ("demo.toml", [*SGD, *GS, *SOME]),
    "bert-gs-buckets-sgd": ("small-bert.toml", [*SGD, *GS, "plan.bucket_bytes=20000", "plan.first_bucket_bytes=5000"]),
    "gpt-z3-full-adamw": ("small-demo.toml", [*ADAMW64, *Z3, "plan.recompute=full"]),
    "bert-z3-all-sgd": ("small-bert.toml", [*SGD, *Z3, *ALL, "plan.shares.batch=[0.75,0.25]"]),
    "gpt-hier-adamw": ("small-demo.toml", [*ADAMW64, *LEVELS, "plan.dp_replicate=2", "plan.dp_shard=1"]),
}


def case_of(ranks: int, name: str, changed: tuple[str, list[str]], folder: Path) -> dict[str, object]:
    scenario, changes = changed
    file, overrides = scenario_file(scenario), [star(ranks), *USUAL, *changes]
    if any("push.threshold" in each for each in changes):
        density = 0.3 if "-some-" in name else 1
        overrides.append(f"workload.gradients={planted(folder, file, overrides, density, name=name)}")
    return {"scenario": file, "overrides": overrides, "same_peak_ratio": 0.003 if "-some-" in name else 1e-5}


world = in_groups({2: ON_TWO, 4: ON_FOUR}, FEW, case_of)


class TestTraining(PushesAsPredicted):
    def peak_error(self, name, case):
        return 0.01 if "-some-" in name else 0.001


def test_buckets_of_slices_follow_the_order_of_their_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """That order differs from whole blocks': gradients of BERT's norms are ready earlier if their inputs are summed
    over ranks."""
    scenario = load_scenario(Path(scenario_file("small-bert.toml")), [star(4), *USUAL, *SGD, *GS]).scenario
    asked = []
    monkeypatch.setattr(pushing, "pushing_optimizer", lambda _scenario, _module, layers, *_: asked.append(layers))
    pushing.push_gradients(scenario, torch.nn.Identity(), Timeline(0, CPU), CPU)
    order = gradient_order(asked[0])
    low = Lowering(scenario, None, 0, scenario.policies.mesh.group(0, "dp_shard"))
    members = [member for bucket in low.buckets for member in bucket.members]
    assert [(each.index, each.layer.parameters.index(parameter)) for each, parameter in members] == list(order)
    assert order != gradient_order(unrolled(scenario.workload.model))
