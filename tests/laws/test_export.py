"""Export of plans: what comes back by import is the same scenario, and what a program cannot execute is refused."""

import ast
import json
from pathlib import Path

import pytest

from gssim.errors import UserError
from gssim.interop import EXPORTS, PROGRAMS, export_scenario, import_scenario
from gssim.plan import METHODS
from gssim.scenario import load_scenario
from gssim.scenario.overrides import toml

ROOT = Path(__file__).resolve().parents[2]
TWO_HOSTS = ROOT / "scenarios/clusters/two-dgx-h100.toml"


def scenario_with(changes):
    path = ROOT / "scenarios/llama3-8b-fsdp.toml"
    usual = {"cluster": str(TWO_HOSTS), "workload.global_batch_size": 64, "plan.recompute": "none"}
    return load_scenario(path, [f"{key}={toml(value)}" for key, value in (usual | changes).items()]).scenario


FP32 = {"workload.reduce_precision": "fp32"}  # which torchtitan's key allows alone
EMBEDDING = {"plan.embedding_parallel": True}
HOST = {"cluster": str(ROOT / "scenarios/clusters/dgx-h100.toml")}
ZERO2 = {"plan.method": "zero2", "plan.zero2_implementation": "deepspeed"}
ROUND = [
    ("deepspeed", {"plan.method": "ddp", "plan.micro_batches": 2}),
    ("deepspeed", {"plan.method": "zero1", "plan.zero1_implementation": "deepspeed", "workload.weight_decay": 0.1}),
    ("deepspeed", ZERO2 | {"plan.micro_batches": 2, "workload.learning_rate": 3e-4}),
    ("deepspeed", ZERO2 | {"workload.clip_norm": 0.5, "plan.bucket_bytes": 4 * 10**8}),
    ("deepspeed", {"plan.method": "zero3", "plan.overlap": False}),
    ("deepspeed", {"plan.method": "hsdp", "workload.precision": "fp32"}),
    ("deepspeed", {"plan.method": "ddp", "plan.tp": 4, "workload.optimizer": "adam"}),
    ("accelerate", {"plan.method": "zero3", "plan.recompute": "full"}),
    ("accelerate", {"plan.method": "zero2"}),
    ("accelerate", {"plan.method": "hsdp", "plan.dp_replicate": 4, "plan.dp_shard": 4}),
    ("accelerate", {"plan.method": "ddp", "workload.precision": "fp32"}),
    ("accelerate", {"plan.method": "zero3", "plan.tp": 2, "plan.ranks": 8}),
    ("torchtitan", {"plan.method": "zero3", "plan.micro_batches": 4, "plan.recompute": "full", "run.seed": 7} | FP32),
    ("accelerate", {"plan.method": "zero3", "plan.cp": 2, "plan.context_exchange": "ring", "plan.ranks": 8}),
    ("torchtitan", {"plan.method": "zero3", "plan.cp": 4, "plan.context_exchange": "ring"} | FP32),
    ("torchtitan", {"plan.method": "zero2", "workload.weight_decay": 0.1} | FP32),
    ("torchtitan", {"plan.method": "hsdp", "workload.clip_norm": 1.0} | FP32),
    ("torchtitan", {"plan.method": "ddp", "workload.precision": "fp32", "workload.optimizer": "adam"}),
    ("deepspeed", ZERO2 | {"plan.offload": "optimizer"} | HOST),
    ("accelerate", {"plan.method": "zero3", "plan.offload": "parameters"} | HOST),
    ("torchtitan", {"plan.method": "zero2", "plan.offload": "parameters"} | HOST | FP32),
    ("torchtitan", {"plan.method": "zero3", "plan.tp": 2, "plan.sequence_parallel": True} | EMBEDDING | FP32),
    (
        "torchtitan",
        {"plan.method": "zero3", "plan.tp": 2, "plan.cp": 4, "plan.context_exchange": "ring"}
        | {"plan.sequence_parallel": True}
        | EMBEDDING
        | FP32,
    ),
    ("deepspeed", {"plan.method": "zero3", "plan.cp": 4} | FP32),
    ("accelerate", {"plan.method": "ddp", "workload.precision": "fp32", "workload.autocast": "bf16"}),
    (
        "torchtitan",
        {"plan.method": "zero2", "plan.pp": 2, "plan.micro_batches": 4, "plan.schedule": "1f1b"}
        | {"plan.stages": [22, 14]}
        | FP32,
    ),
]


@pytest.mark.parametrize(("to", "changes"), ROUND, ids=lambda value: value if isinstance(value, str) else None)
def test_what_comes_back_is_the_same_scenario(tmp_path, to, changes):
    scenario = scenario_with(changes)
    path = tmp_path / {"deepspeed": "ds.json", "accelerate": "a.yaml", "torchtitan": "t.toml"}[to]
    path.write_text(export_scenario(scenario, to).text)
    # what the formats have no keys for
    given = {"deepspeed": ["workload.sequence_length"], "torchtitan": []}.get(
        to, ["workload.sequence_length", "workload.global_batch_size", "workload.optimizer_implementation"]
    )
    values = {name: getattr(scenario.workload, name.partition(".")[2]) for name in given}
    overrides = [f"{name}={value}" for name, value in values.items()]
    overrides += ["plan.micro_batches=1"] if to == "accelerate" else []
    cluster = Path(changes.get("cluster", TWO_HOSTS))
    found = import_scenario(path, model="llama3-8b", cluster=cluster, overrides=overrides, out=tmp_path / "x.toml")
    (tmp_path / "x.toml").write_text(found.text)
    assert load_scenario(tmp_path / "x.toml").scenario.scenario_id == scenario.scenario_id


def test_deepspeeds_mesh_needs_both_of_its_sizes():
    scenario = scenario_with({"plan.method": "zero3", "plan.cp": 4} | FP32)
    written = json.loads(export_scenario(scenario, "deepspeed").text)
    assert (written["data_parallel_size"], written["sequence_parallel_size"]) == (4, 4)


def test_all_programs_are_named():
    assert tuple(EXPORTS) == PROGRAMS


@pytest.mark.parametrize("to", EXPORTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_written_or_refused(to, method):
    more = {"plan.ranks": 1} if method == "single" else {"plan.pp": 16} if method == "pipeline" else {}
    try:
        scenario = scenario_with({"plan.method": method, "workload.precision": "fp32"} | more)
    except UserError:
        pytest.skip("no scenario of this model and cluster")
    try:
        written = export_scenario(scenario, to).text
    except UserError as error:
        written = ""
        said = str(error)
        assert said.startswith(("plan.", "workload.", "cluster"))
        assert "allowed" in said
    assert bool(written) == (method in EXPORTS[to][0]) or "_implementation" in said


def test_stage_2_is_read_back_as_stage_2():
    assert not any("plan.method" in note for note in export_scenario(scenario_with(ZERO2), "deepspeed").notes)


@pytest.mark.parametrize(
    ("to", "changes", "said"),
    [
        ("deepspeed", {"plan.method": "zero1"}, "zero1_implementation"),
        ("deepspeed", {"plan.method": "zero2"}, "zero2_implementation"),
        ("torchtitan", {"plan.method": "zero2", "plan.zero2_implementation": "deepspeed"} | FP32, "allowed: 'torch'"),
        ("deepspeed", {"plan.method": "zero3", "plan.micro_batches": 2, "plan.gradient_sync": "step"}, "gradient_sync"),
        ("accelerate", {"plan.method": "ddp"}, "autocast"),
        ("accelerate", {"plan.method": "ddp", "workload.precision": "fp32", "plan.tp": 2}, "tensor- nor context"),
        ("accelerate", {"plan.method": "hsdp", "plan.dp_replicate": 8, "plan.dp_shard": 1, "plan.cp": 2}, "dp_shard"),
        ("accelerate", {"plan.method": "zero3", "plan.recompute": "selective"}, "plan.recompute"),
        ("torchtitan", {"plan.method": "zero3", "plan.tp": 2} | EMBEDDING | FP32, "plan.sequence_parallel"),
        ("torchtitan", {"plan.method": "zero3", "plan.tp": 2} | FP32, "plan.embedding_parallel"),
        ("torchtitan", {"plan.method": "zero3"}, "workload.reduce_precision"),
        ("torchtitan", {"plan.method": "ddp", "plan.cp": 2}, "plan.cp"),  # it shards over these ranks
        ("torchtitan", {"plan.method": "zero3", "workload.tf32": True, "workload.precision": "fp32"}, "workload.tf32"),
        ("deepspeed", {"plan.method": "zero3", "plan.cp": 2, "plan.context_exchange": "ring"}, "context_exchange"),
        ("deepspeed", {"plan.method": "zero3", "plan.cp": 2, "plan.tp": 2}, "plan.tp"),
        (
            "torchtitan",
            {"plan.method": "zero3", "plan.cp": 2, "plan.context_exchange": "ring", "plan.context_overlap": False}
            | FP32,
            "plan.context_overlap = False: cannot be exported to torchtitan; allowed: leave it out",
        ),
        ("deepspeed", {"plan.method": "zero3", "plan.cp": 2}, "allowed: fp32"),
        ("deepspeed", {"plan.method": "hsdp", "plan.dp_replicate": 16, "plan.dp_shard": 1}, "plan.dp_shard"),
        ("deepspeed", {"plan.method": "ddp", "workload.gradient_precision": "fp32"}, "gradient_precision"),
        ("accelerate", {"plan.method": "zero3", "plan.overlap": False}, "plan.overlap"),
        ("torchrun", {"plan.method": "ddp", "workload.precision": "fp32", "workload.autocast": "bf16"}, "autocast"),
        ("torchrun", {"plan.method": "ddp", "workload.precision": "fp32", "workload.tf32": True}, "workload.tf32"),
        ("torchrun", {"plan.method": "gs", "plan.shares.shards": "memory"}, "plan.shares"),
        ("torchrun", {"plan.method": "ddp", "workload.optimizer": "muon"}, "'muon': cannot be exported to torchrun"),
        ("vllm", {}, "no such format"),
    ],
)
def test_what_a_program_cannot_execute_is_refused(to, changes, said):
    with pytest.raises(UserError, match=said):
        export_scenario(scenario_with(changes), to)


@pytest.mark.parametrize("method", ["single", "ddp", "zero2", "zero3", "hsdp", "gs"])
def test_scripts_for_torchrun_are_python(method):
    more = {"plan.ranks": 1} if method == "single" else {}
    scenario = scenario_with({"plan.method": method, "plan.recompute": "full", "workload.precision": "fp32"} | more)
    text = export_scenario(scenario, "torchrun").text
    ast.parse(text)
    assert ("--nnodes 2" in text) == (method != "single")
    assert '"model.layers.31",' in text


@pytest.mark.parametrize("sync", ["step", "micro-batch"])
def test_a_script_of_gradient_sharding_pushes_when_and_how_the_plan_does(sync):
    own = {"plan.method": "gs", "plan.micro_batches": 2, "plan.gradient_sync": sync, "workload.precision": "fp32"}
    texts = [
        export_scenario(scenario_with(own | {"plan.exchange": each}), "torchrun").text
        for each in ("point-to-point", "backend")
    ]
    for text in texts:
        ast.parse(text)
    assert [text.count("optimizer.no_sync()") for text in texts] == [sync == "step"] * 2
    assert ["point_to_point=False" in text for text in texts] == [False, True]


@pytest.mark.parametrize("exchange", ["point-to-point", "backend"])
def test_a_transport_on_gloo_that_no_file_holds_is_named(exchange):
    own = [f"plan.exchange={exchange}", "plan.method=zero3"]
    scenario = load_scenario(ROOT / "scenarios/demo.toml", own, gradients_needed=False).scenario
    for program in ("deepspeed", "accelerate", "torchrun"):
        said = [note for note in export_scenario(scenario, program).notes if note.startswith("plan.exchange")]
        assert [note.partition(":")[0] for note in said] == [f'plan.exchange = "{exchange}"']


@pytest.mark.parametrize("model", ["llama3-8b-compiled", "llama3-8b-compiled-every-second-product"])
def test_compiled_blocks_go_to_torchtitan_and_come_back(tmp_path, model):
    scenario = scenario_with({"workload.model": model, "plan.method": "zero3"} | FP32)
    file = tmp_path / "t.toml"
    file.write_text(export_scenario(scenario, "torchtitan").text)
    out = tmp_path / "back.toml"
    out.write_text(import_scenario(file, model=model, cluster=TWO_HOSTS, out=out).text)
    assert load_scenario(out).scenario.scenario_id == scenario.scenario_id


def test_compiled_blocks_go_to_no_other_program_than_torchtitan():
    scenario = scenario_with({"workload.model": "llama3-8b-compiled", "plan.method": "zero3"} | FP32)
    for program in sorted(set(EXPORTS) - {"torchtitan"}):
        with pytest.raises(UserError, match=r"workload\.model = 'llama3-8b-compiled': cannot be exported"):
            export_scenario(scenario, program)
    inside = {"workload.model": "llama3-8b-compiled-selective", "plan.method": "zero3"} | FP32
    with pytest.raises(UserError, match="cannot be exported to torchtitan"):
        export_scenario(scenario_with(inside), "torchtitan")
