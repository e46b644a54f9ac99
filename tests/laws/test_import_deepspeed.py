"""Import of DeepSpeed's files: what each key becomes, and what is refused."""

import json

import commands
import pytest
from combinations import each_once
from importing import DEEPSPEED, EIGHT, imported, refused

from gssim.errors import UserError

pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.mark.parametrize(
    ("key", "value"),
    each_once(
        ("plan.ranks", "plan.tp", "plan.pp", "plan.cp", "plan.micro_batches"),
        ("a - b", 0, -1, 2.5, True, [2], 10**400, "x" * 5000),
    ),
)
def test_counts_that_are_none_are_refused_in_a_line(tmp_path, key, value):
    with pytest.raises(UserError, match="a whole number") as caught:
        imported(tmp_path, DEEPSPEED, name="ds.json", overrides=[f"{key}={json.dumps(value)}"])
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_an_axis_that_does_not_fit_is_blamed_on_the_option_that_sets_it(tmp_path, axis):
    with pytest.raises(UserError, match=f"--set plan.{axis} = 3: .* are 3, which does not divide 8 ranks") as caught:
        imported(tmp_path, DEEPSPEED, name="ds.json", overrides=[f"plan.{axis}=3"])
    assert "not in the file" not in str(caught.value)


def test_deepspeed(tmp_path):
    tables, found = imported(tmp_path, DEEPSPEED, name="ds.json")
    assert tables["workload"] == {
        "model": "llama3-8b",
        "sequence_length": 8192,
        "precision": "bf16",
        "optimizer": "adamw",
        "optimizer_implementation": "fused",
        "learning_rate": 1e-4,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "global_batch_size": 64,
    }
    assert tables["plan"] == {"method": "zero3", "micro_batches": 4, "recompute": "none"}
    assert {line.split(" = ")[0] for line in found.defaults} == {"workload.sequence_length", "plan.recompute"}
    assert any(line.startswith("steps_per_print = 10") for line in found.listed)
    assert any("reduce_bucket_size" in line and "approximated" in line for line in found.listed)
    assert "# zero_optimization.stage = 3" in found.text
    assert "# default: the longest of 'llama3-8b'" in found.text


@pytest.mark.parametrize(
    ("more", "size_bytes"),
    [({}, 2 * 500_000_000), ({"reduce_bucket_size": 2e8}, 2 * 200_000_000), ({"reduce_bucket_size": "auto"}, None)],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_of_deepspeeds_first_two_stages_are_as_large_as_there(tmp_path, stage, more, size_bytes):
    tables, _ = imported(tmp_path, DEEPSPEED | {"zero_optimization": {"stage": stage} | more}, name="ds.json")
    assert tables["plan"][f"zero{stage}_implementation"] == "deepspeed"
    assert tables["plan"].get("bucket_bytes") == size_bytes


def test_keys_without_an_effect_are_told_by_reason(tmp_path):
    """DeepSpeed files have dozens, and few reasons."""
    said = {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1}
    file = tmp_path / "deepspeed.json"
    told = DEEPSPEED | {"flops_profiler": said, "wall_clock_breakdown": False}
    file.write_text(json.dumps(told | {"seq_parallel_communication_data_type": "fp32"}))
    asked = [str(file), "--model", "llama3-8b", "--cluster", EIGHT, "--set", "workload.sequence_length=1024"]
    run = commands.run("gssim", "import", *asked)
    (logged,) = [line for line in run.stderr.splitlines() if "wall_clock_breakdown" in line]
    assert all(key in logged for key in ("steps_per_print = 10", *(f"flops_profiler.{key} = " for key in said)))
    assert logged.startswith("gssim: import: without effect: ")
    assert logged.endswith(": logging, data, checkpoints and evaluation are no part of a step")


@pytest.mark.parametrize(
    ("stage", "method", "more"),
    [
        (0, "ddp", {"overlap": False}),
        (1, "zero1", {"overlap": False, "zero1_implementation": "deepspeed", "bucket_bytes": 10**9}),
        (2, "zero2", {"overlap": False, "zero2_implementation": "deepspeed", "bucket_bytes": 10**9}),
        (3, "zero3", {}),
    ],
)
def test_stages_of_zero(tmp_path, stage, method, more):
    tables, found = imported(tmp_path, DEEPSPEED | {"zero_optimization": {"stage": stage}}, name="ds.json")
    assert tables["plan"] == {"method": method, "micro_batches": 4, "recompute": "none"} | more
    assert any("5e8 elements at a time" in line for line in found.listed) == (stage == 0)


TENSOR_SLICES = DEEPSPEED | {"train_batch_size": 16, "zero_optimization": {"stage": 1}}


@pytest.mark.parametrize("overlaps", [False, True])
def test_deepspeeds_automatic_tensor_parallelism_overlaps_sums_if_it_says_so(tmp_path, overlaps):
    """Its maps are the model's own, each with an all-reduce of its input's gradient, as here."""
    said = {"autotp_size": 4, "preset_model": "llama", "tp_overlap_comm": overlaps}
    tables, found = imported(tmp_path, TENSOR_SLICES | {"tensor_parallel": said}, name="ds.json")
    assert tables["plan"]["tp"] == 4
    assert tables["plan"].get("async_input_gradients", False) == overlaps
    assert not any("Megatron-LM, which fuses these" in line for line in found.listed)
    assert any("preset_model" in line and "approximated" in line for line in found.listed)


@pytest.mark.parametrize("more", [{}, {"autotp_size": 2}])
def test_deepspeeds_other_size_of_tensor_parallelism_is_not_ignored(tmp_path, more):
    for name in ("tp", "tensor_parallel"):  # its alias, and its name in DeepSpeed's configuration
        said = more | {name: {"tp_size": 4, "tp_grain_size": 64}}
        assert f"tensor_parallel.{name}.tp_size = 4: tensor_parallel.autotp_size, which decides, is" in refused(
            tmp_path, TENSOR_SLICES | {"tensor_parallel": said}, name="ds.json"
        )


def test_all_keys_of_deepspeeds_tensor_parallelism_are_known(tmp_path):
    said = {
        "autotp_size": 4,
        "dtype": "torch.bfloat16",
        "keep_module_on_host": True,
        "kernel_inject": False,
        "tensor_parallel": {"tp_size": 4, "tp_grain_size": 64},
        "injection_policy_tuple": ["o_proj", "down_proj"],
        "partition_config": {
            "use_default_specs": True,
            "layer_specs": [{"patterns": ["q"], "partition_type": "column"}],
        },
    }
    tables, found = imported(tmp_path, TENSOR_SLICES | {"tensor_parallel": said}, name="ds.json")
    assert tables["plan"]["tp"] == 4
    assert any("injection_policy_tuple" in line and "approximated" in line for line in found.listed)


def test_sgd_with_momentum_keeps_it(tmp_path):
    """A value in fp32 for each parameter, which torch's and DeepSpeed's SGD do not have without momentum."""
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8}}
    tables, _ = imported(tmp_path, DEEPSPEED | {"optimizer": optimizer}, name="ds.json")
    assert (tables["workload"]["optimizer"], tables["workload"]["momentum"]) == ("sgd-momentum", 0.8)
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0}}
    tables, _ = imported(tmp_path, DEEPSPEED | {"optimizer": optimizer}, name="ds.json")
    assert tables["workload"]["optimizer"] == "sgd"
    assert "momentum" not in tables["workload"]


def test_a_momentum_that_decides_the_memory_of_sgd_is_not_left_open(tmp_path):
    """It was listed as without effect, and SGD then kept nothing."""
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": "auto"}}
    said = refused(tmp_path, DEEPSPEED | {"optimizer": optimizer}, name="ds.json")
    assert said.startswith('optimizer.params.momentum = "auto": what it becomes is not in the file')
    assert said.endswith("; or --set workload.optimizer=...")
    chosen = ["workload.optimizer=sgd-momentum"]
    tables, _ = imported(tmp_path, DEEPSPEED | {"optimizer": optimizer}, name="ds.json", overrides=chosen)
    assert tables["workload"]["optimizer"] == "sgd-momentum"
    of_muon = {"type": "Muon", "params": {"lr": 0.1, "momentum": "auto"}}  # which has a momentum anyway
    imported(tmp_path, DEEPSPEED | {"optimizer": of_muon, "zero_optimization": {"stage": 0}}, name="ds.json")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}}, "inside"),
        ({"pipeline": {"stages": 4}}, "set plan.pp"),
    ],
)
def test_keys_of_deepspeed_that_change_the_time_are_named_as_approximated(tmp_path, more, said):
    _, found = imported(tmp_path, DEEPSPEED | more, name="ds.json")
    assert any(said in line for line in found.listed)


def test_mics_is_hybrid_sharding(tmp_path):
    zero = {"stage": 3, "mics_shard_size": 4}
    tables, _ = imported(tmp_path, DEEPSPEED | {"zero_optimization": zero}, name="ds.json")
    assert {key: tables["plan"][key] for key in ("method", "dp_replicate", "dp_shard")} == {
        "method": "hsdp",
        "dp_replicate": 2,
        "dp_shard": 4,
    }


def test_auto_is_named_and_replaced(tmp_path):
    file = DEEPSPEED | {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    said = refused(tmp_path, file, name="ds.json")
    assert 'train_batch_size = "auto"' in said
    assert "--set workload.global_batch_size" in said
    tables, _ = imported(tmp_path, file, name="ds.json", overrides=["workload.global_batch_size=128"])
    assert (tables["workload"]["global_batch_size"], tables["plan"]["micro_batches"]) == (128, 4)


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_one_auto_of_a_batch_follows_from_the_other_two_sizes(tmp_path, key):
    """It was refused, though the sizes of micro-batches and their number say what the Trainer would put there."""
    tables, found = imported(tmp_path, DEEPSPEED | {key: "auto"}, name="ds.json")
    assert (tables["workload"]["global_batch_size"], tables["plan"]["micro_batches"]) == (64, 4)
    assert f'{key} = "auto": follows from the other two sizes and the number of ranks' in found.listed


OFFLOADS = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_offloaded_optimizer(tmp_path, stage):
    file = DEEPSPEED | {"zero_optimization": {"stage": stage, **OFFLOADS}}
    tables, found = imported(tmp_path, file, name="ds.json")
    assert tables["plan"]["offload"] == "optimizer"
    assert ("updated parameters are copied in 32 bits here" in found.text) == (stage == 3)
    everything = {**OFFLOADS, "offload_param": {"device": "cpu"}}
    if stage == 3:
        file = DEEPSPEED | {"zero_optimization": {"stage": 3, **everything}}
        assert "copies of parameters in 16 bits" in refused(tmp_path, file, name="ds.json")
        tables, _ = imported(tmp_path, file | {"bf16": {"enabled": False}}, name="ds.json")
        assert tables["plan"]["offload"] == "parameters"


def test_offloading_needs_a_cluster_whose_hosts_are_known(tmp_path):
    file = DEEPSPEED | {"zero_optimization": {"stage": 2, **OFFLOADS}}
    said = refused(tmp_path, file, name="ds.json", cluster="scenarios/clusters/two-dgx-h100.toml")
    assert "does not say what its hosts' memory holds" in said
    key = "zero_optimization.offload_optimizer.device"
    without = {
        "cluster": "scenarios/clusters/two-dgx-h100.toml",
        "ignored": [key],
        "overrides": ["workload.global_batch_size=128"],
    }
    tables, found = imported(tmp_path, file, name="ds.json", **without)
    assert "offload" not in tables["plan"]
    assert any("ignored on request" in line for line in found.listed if line.startswith(key))
    nvme = DEEPSPEED | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    assert "other places than the host's memory" in refused(tmp_path, nvme, name="ds.json")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param.device"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "super_offload",
        ),
        ({"pipeline": {"activation_checkpoint_interval": 2}}, "activation_checkpoint_interval"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type"),
        ({"train_batch_size": 65}, "train_batch_size"),
        ({"sequence_parallel_size": 3}, "sequence_parallel_size"),
        ({"data_parallel_size": 4}, "data_parallel_size"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation.stage"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"train_micro_batch_size_per_gpu": True}, "train_micro_batch_size_per_gpu"),
    ],
)
def test_what_changes_the_answer_is_refused_by_its_key(tmp_path, change, key):
    assert key in refused(tmp_path, DEEPSPEED | change, name="ds.json")


@pytest.mark.parametrize(
    ("given", "micro_batches"),
    [
        ({"train_batch_size": 64}, 1),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 2),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 4),
    ],
)
def test_deepspeed_derives_the_rest_of_a_batch_and_accumulates_nothing_unasked(tmp_path, given, micro_batches):
    rest = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    tables, _ = imported(tmp_path, given | rest, name="ds.json")
    assert (tables["workload"]["global_batch_size"], tables["plan"]["micro_batches"]) == (64, micro_batches)


def test_deepspeeds_sequence_parallelism_is_ulysses(tmp_path):
    file = DEEPSPEED | {"sequence_parallel_size": 4, "data_parallel_size": 2, "train_batch_size": 16}
    tables, _ = imported(tmp_path, file, name="ds.json")
    assert (tables["plan"]["cp"], tables["plan"].get("context_exchange")) == (4, None)
    assert (tables["plan"]["method"], tables["plan"]["micro_batches"]) == ("zero3", 4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("given", [None, "fp16", "fp32"])
def test_deepspeed_reduces_gradients_of_divided_sequences_in_fp32(tmp_path, stage, given):
    """runtime/engine.py: seq_parallel_communication_data_type takes the place of communication_data_type."""
    file = DEEPSPEED | {"zero_optimization": {"stage": stage}}
    file |= {"communication_data_type": given} if given else {}
    divided = {"sequence_parallel_size": 4, "data_parallel_size": 2, "train_batch_size": 16}
    tables, found = imported(tmp_path, file | divided, name="ds.json")
    assert (tables["workload"]["precision"], tables["workload"]["reduce_precision"]) == ("bf16", "fp32")
    assert any("no effect beside divided sequences" in line for line in found.listed) == (given == "fp16")
    tables, _ = imported(tmp_path, file, name="ds.json")
    assert tables["workload"].get("reduce_precision") == given


@pytest.mark.parametrize("said", ["bf16", "fp32", "fp16"])
def test_deepspeed_reduces_gradients_of_divided_sequences_as_their_own_key_says(tmp_path, said):
    """Other values than fp32 were refused, also in a file of Accelerate, which does not pass them on."""
    key = {"seq_parallel_communication_data_type": said}
    divided = {"sequence_parallel_size": 4, "data_parallel_size": 2, "train_batch_size": 16}
    tables, _ = imported(tmp_path, DEEPSPEED | key | divided, name="ds.json")
    assert tables["workload"].get("reduce_precision") == (None if said == "bf16" else said)
    tables, found = imported(tmp_path, DEEPSPEED | key, name="ds.json")
    assert "reduce_precision" not in tables["workload"]
    assert any("no effect, as no sequence is divided" in line for line in found.listed)
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
    text += f"  seq_parallel_communication_data_type: {said}\nparallelism_config:\n  parallelism_config_sp_size: 4\n"
    tables, found = imported(tmp_path, text, name="a.yaml")
    assert any("passes no such key on" in line for line in found.listed)
    assert tables["workload"]["reduce_precision"] == "fp32"


def test_pipelines_of_deepspeed_have_its_schedule_and_buffers_for_what_is_in_flight(tmp_path):
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4})
    plans = []
    for ranks in (1, 2):
        options = {"model": "gpt3-1.3b", "overrides": [f"plan.pp={ranks}", "workload.sequence_length=128"]}
        plans.append(imported(tmp_path, text, name="ds.json", **options)[0]["plan"])
    assert [plan.get("receive_buffers") for plan in plans] == [None, "in-flight"]
    assert [plan.get("schedule") for plan in plans] == [None, "deepspeed"]


@pytest.mark.parametrize(
    ("said", "scale"), [({}, "dynamic"), ({"loss_scale": 0}, "dynamic"), ({"loss_scale": 128}, 128)]
)
def test_deepspeed_in_fp16_scales_its_loss(tmp_path, said, scale):
    data = DEEPSPEED | {"fp16": {"enabled": True} | said, "communication_data_type": "fp32"}
    data.pop("bf16", None)
    workload = imported(tmp_path, data, name="ds.json")[0]["workload"]
    assert (workload["precision"], workload["loss_scale"], workload["reduce_precision"]) == ("fp16", scale, "fp32")
    workload = imported(tmp_path, data, name="ds.json", overrides=["workload.precision=bf16"])[0]["workload"]
    assert "loss_scale" not in workload


def test_deepspeeds_amsgrad_is_refused(tmp_path):
    optimizer = {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True, "amsgrad": True}}
    assert "AMSGrad" in refused(tmp_path, DEEPSPEED | {"optimizer": optimizer}, name="ds.json")
