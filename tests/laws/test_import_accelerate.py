"""Import of Accelerate's files: what each key becomes, and what is refused."""

import json

import pytest
from importing import DEEPSPEED, FSDP, imported, refused

pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.mark.parametrize("said", ["distributed_type: MULTI_CPU", "distributed_type: MULTI_GPU\nuse_cpu: true"])
def test_accelerates_training_on_processors_takes_a_cluster_of_them(tmp_path, said):
    """It was predicted on the cluster's GPUs."""
    text = f"{said}\nnum_processes: 2\nmixed_precision: 'no'\n"
    assert "trains on processors, but --cluster has GPUs" in refused(tmp_path, text, name="a.yaml")
    tables, _ = imported(
        tmp_path, text, name="a.yaml", cluster="scenarios/clusters/two-cores.toml", model="gpt-byte-1m"
    )
    assert tables["plan"]["method"] == "ddp"


def test_accelerates_sequence_parallelism_is_ulysses_under_deepspeed(tmp_path):
    sizes = "parallelism_config:\n  parallelism_config_sp_size: 4\n  parallelism_config_dp_shard_size: 2\n"
    sizes += "  parallelism_config_sp_backend: deepspeed\n  parallelism_config_sp_seq_length: 4096\n"
    sizes += "  parallelism_config_sp_seq_length_is_variable: {}\n"
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n"
    text += "  zero_stage: 3\n  gradient_accumulation_steps: 2\nfsdp_config: {{fsdp_unheard: 1}}\n" + sizes
    tables, found = imported(tmp_path, text.format("false"), name="a.yaml")
    assert (tables["plan"]["method"], tables["plan"]["cp"]) == ("zero3", 4)
    assert tables["plan"].get("context_exchange") is None
    assert tables["workload"]["sequence_length"] == 4096
    assert any("fsdp_unheard" in line and "another distributed_type" in line for line in found.listed)
    tables, _ = imported(tmp_path, text.format("true"), name="a.yaml")
    assert tables["workload"]["sequence_length"] == 8192  # the model's
    said = refused(tmp_path, FSDP.format(reshard="true", more=sizes.format("true")), name="a.yaml")
    assert "distributed_type DEEPSPEED alone" in said


@pytest.mark.parametrize(("reshard", "method"), [("true", "zero3"), ("false", "zero2")])
def test_accelerate_fsdp2(tmp_path, reshard, method):
    tables, found = imported(tmp_path, FSDP.format(reshard=reshard, more=""), name="a.yaml")
    assert tables["plan"] == {"method": method, "micro_batches": 1, "recompute": "full"}
    assert tables["workload"]["precision"] == "bf16"
    assert any(line.startswith("plan.micro_batches = 1") for line in found.defaults)


def test_accelerates_fsdp_reduces_gradients_after_the_last_micro_batch(tmp_path):
    overrides = ["plan.micro_batches=4", "workload.global_batch_size=32"]
    tables, _ = imported(tmp_path, FSDP.format(reshard="true", more=""), name="a.yaml", overrides=overrides)
    assert (tables["plan"]["method"], tables["plan"]["gradient_sync"]) == ("zero3", "step")


def test_accelerate_parallelism_config(tmp_path):
    sizes = "parallelism_config:\n" + "".join(
        f"  parallelism_config_{name}_size: {size}\n"
        for name, size in (("dp_replicate", 2), ("dp_shard", 4), ("tp", 1))
    )
    tables, _ = imported(tmp_path, FSDP.format(reshard="true", more=sizes), name="a.yaml")
    assert (tables["plan"]["method"], tables["plan"]["dp_shard"]) == ("hsdp", 4)
    divided = sizes.replace("tp_size: 1", "cp_size: 2").replace("dp_shard_size: 4", "dp_shard_size: 2")
    tables, _ = imported(tmp_path, FSDP.format(reshard="true", more=divided), name="a.yaml")
    assert {"method": "hsdp", "dp_replicate": 2, "dp_shard": 2, "cp": 2}.items() <= tables["plan"].items()
    assert tables["plan"]["context_exchange"] == "gather"
    said = f"{divided}  parallelism_config_cp_comm_strategy: alltoall\n"
    tables, _ = imported(tmp_path, FSDP.format(reshard="true", more=said), name="a.yaml")
    assert tables["plan"]["context_exchange"] == "ring"


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        ({"dp_shard": 1, "cp": 8}, {"method": "zero3", "cp": 8}),  # shards over dp_shard times cp
        ({"cp": 8}, {"method": "zero3", "cp": 8}),
        ({"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}, {"method": "zero3"}),  # no mesh: over all processes
        ({"dp_shard": 8}, {"method": "zero3"}),
        ({"cp": 2}, None),  # 2 of 8 processes, which Accelerate refuses
        ({"dp_replicate": 8}, None),
        ({"dp_replicate": 4, "dp_shard": 1, "cp": 2}, None),
    ],
)
def test_accelerates_mesh_shards_over_context_ranks(tmp_path, sizes, plan):
    table = "".join(f"  parallelism_config_{name}_size: {size}\n" for name, size in sizes.items())
    text = FSDP.format(reshard="true", more=f"parallelism_config:\n{table}")
    if plan is None:
        assert "parallelism_config" in refused(tmp_path, text, name="a.yaml")
        return
    tables, found = imported(tmp_path, text, name="a.yaml")
    assert {key: tables["plan"].get(key) for key in ("method", "cp", "dp_shard") if key in plan} == plan
    unused = [line for line in found.listed if "dp_shard_size" in line]
    assert bool(unused) == (sizes.get("dp_shard") == sizes.get("dp_replicate") == 1)


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("FULL_SHARD", "zero3"),
        ("SHARD_GRAD_OP", "zero2"),
        ("NO_SHARD", "ddp"),
        ("HYBRID_SHARD", "hsdp"),
        ("1", "zero3"),
    ],
)
def test_accelerate_fsdp1(tmp_path, strategy, method):
    text = "distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 16\n"
    text += f"fsdp_config:\n  fsdp_sharding_strategy: {strategy}\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    if method != "ddp":
        assert "NO_WRAP, the whole model" in refused(
            tmp_path, text.replace("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", ""), name="a.yaml"
        )
    tables, _ = imported(tmp_path, text, name="a.yaml", cluster="scenarios/clusters/two-dgx-h100.toml")
    assert tables["plan"]["method"] == method
    assert (tables["plan"].get("dp_shard") == 8) == (strategy == "HYBRID_SHARD")


@pytest.mark.parametrize(("stage", "method"), [("", "zero2"), ("  zero_stage: 3\n", "zero3")])
def test_accelerates_deepspeed_is_of_stage_2_unless_it_says_otherwise(tmp_path, stage, method):
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n"
    tables, _ = imported(tmp_path, f"{text}  gradient_accumulation_steps: 2\n{stage}", name="a.yaml")
    assert (tables["plan"]["method"], tables["plan"]["micro_batches"]) == (method, 2)


def test_accelerate_names_a_deepspeed_file(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: {}\n"
    tables, _ = imported(tmp_path, text.format("ds.json"), name="a.yaml")
    assert (tables["plan"]["method"], tables["plan"]["micro_batches"]) == ("zero3", 4)
    assert "no such file" in refused(tmp_path, text.format("lost.json"), name="a.yaml")
    said = refused(tmp_path, text.format("ds.json") + "  zero_stage: 2\n", name="a.yaml")
    assert "zero_stage = 2: Accelerate takes no such key beside deepspeed_config_file" in said


def test_accelerate_ranks_and_autocast(tmp_path):
    text = "distributed_type: MULTI_GPU\nnum_processes: {}\nmixed_precision: {}\n"
    tables, _ = imported(tmp_path, text.format(4, "'no'"), name="a.yaml")
    assert tables["plan"] == {"method": "ddp", "ranks": 4, "micro_batches": 1, "recompute": "none"}
    assert "the cluster 'DGX H100' has 8 devices" in refused(tmp_path, text.format(16, "no"), name="a.yaml")
    tables, _ = imported(tmp_path, text.format(4, "bf16"), name="a.yaml")
    assert (tables["workload"]["precision"], tables["workload"]["autocast"]) == ("fp32", "bf16")
    tables, _ = imported(tmp_path, text.format(4, "fp16"), name="a.yaml", model="gpt2-124m")
    assert (tables["workload"]["autocast"], tables["workload"]["loss_scale"]) == ("fp16", "dynamic")


def test_accelerates_regional_compilation_takes_a_compiled_model(tmp_path):
    text = "distributed_type: MULTI_GPU\nmixed_precision: 'no'\nnum_processes: 8\ndynamo_config:\n"
    regions = text + "  dynamo_backend: INDUCTOR\n  dynamo_use_regional_compilation: true\n"
    batch = ["workload.global_batch_size=16", "workload.sequence_length=2048"]
    imported(tmp_path, regions, name="a.yaml", model="llama3-8b-compiled", overrides=batch)
    assert "dynamo_use_regional_compilation" in refused(tmp_path, regions, name="a.yaml", overrides=batch)
    whole = text + "  dynamo_backend: INDUCTOR\n"
    assert "whole model" in refused(tmp_path, whole, name="a.yaml", model="llama3-8b-compiled", overrides=batch)


DEEPSPEED_INSIDE = """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  zero_stage: {stage}
  offload_optimizer_device: none
  offload_param_device: cpu
"""


def test_parameters_are_offloaded_in_stage_3_alone(tmp_path):
    """A ZeRO-2 file whose parameters DeepSpeed leaves on the devices was refused, by a key that it does not hold."""
    tables, found = imported(tmp_path, DEEPSPEED_INSIDE.format(stage=2), name="x.yaml")
    assert (tables["plan"]["method"], tables["plan"].get("offload")) == ("zero2", None)
    line = 'deepspeed_config.offload_param_device = "cpu": of stage 3: DeepSpeed\'s engine passes it to no other'
    assert line in found.listed


def test_a_key_for_deepspeed_is_refused_and_ignored_by_the_name_in_the_file(tmp_path):
    text = DEEPSPEED_INSIDE.format(stage=3)
    assert refused(tmp_path, text, name="x.yaml").startswith("deepspeed_config.offload_param_device = ")
    tables, _ = imported(tmp_path, text, name="x.yaml", ignored=["deepspeed_config.offload_param_device"])
    assert (tables["plan"]["method"], tables["plan"].get("offload")) == ("zero3", None)
