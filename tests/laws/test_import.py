"""Import of other programs' files: what each documented key becomes, what is refused, and hostile files."""

import io
import json
import random
import re
import tomllib
from pathlib import Path

import commands
import pytest
from combinations import each_once

from gssim.errors import UserError
from gssim.interop import RefusedError, import_scenario
from gssim.interop import reading as limits
from gssim.interop.arguments import arguments_in
from gssim.scenario import load_scenario
from gssim.simulation import simulate

ROOT = Path(__file__).resolve().parents[2]
EIGHT = "scenarios/clusters/dgx-h100.toml"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def imported(folder, text, *, name, model="llama3-8b", cluster=EIGHT, overrides=(), ignored=(), form=None):
    """Return the tables of the scenario that a file becomes, and the import."""
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    found = import_scenario(
        path, model=model, cluster=Path(cluster), overrides=overrides, ignored=ignored, form=form, out=folder / "x.toml"
    )
    (folder / "x.toml").write_text(found.text)
    load_scenario(folder / "x.toml")
    return tomllib.loads(found.text), found


def refused(folder, text, **options):
    with pytest.raises(RefusedError) as caught:
        imported(folder, text, **options)
    assert "\n" not in str(caught.value)
    return " | ".join(caught.value.refused)


DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e8},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
}


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


def test_a_flag_that_is_given_anyway_hangs_on_no_condition(tmp_path):
    """Scripts of Pai-Megatron-Patch: it was `given or not given, as it is given twice`."""
    text = "PR=$1\nif [ $PR = bf16 ]; then MORE=--bf16; fi\n"
    text += "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --seq-length 128 $MORE --bf16\n"
    tables, _ = imported(tmp_path, text, name="a.sh")
    assert tables["workload"]["precision"] == "bf16"


@pytest.mark.parametrize("program", ["tools/run_text_generation_server.py", "tools/checkpoint/convert.py"])
def test_a_program_that_trains_no_model_is_refused(tmp_path, program):
    """Scripts that serve a model were predicted as trainings of it."""
    arguments = "--micro-batch-size 1 --seq-length 128 --tensor-model-parallel-size 1 --num-layers 32 --bf16"
    with pytest.raises(UserError, match=rf"runs {program.rpartition('/')[2]}, which trains no model"):
        imported(tmp_path, f"torchrun --nproc_per_node 8 {program} {arguments}\n", name="a.sh")
    trains = f"torchrun {program} {arguments}\ntorchrun pretrain_gpt.py {arguments}\n"
    assert imported(tmp_path, trains, name="a.sh")[0]["workload"]["precision"] == "bf16"


def test_swifts_command_is_no_training_by_megatrons_defaults(tmp_path):
    """It was read with Megatron-LM's: in fp32, with whole optimizer states on every rank."""
    text = (
        "NPROC_PER_NODE=8 \\\nmegatron sft \\\n  --load mcore --micro_batch_size 1 --global_batch_size 16 --lr 1e-5\n"
    )
    with pytest.raises(UserError, match=r"runs ms-swift's `megatron sft`, whose options have other defaults"):
        imported(tmp_path, text, name="a.sh")


def test_an_open_value_of_a_refused_key_is_said_in_a_sentence(tmp_path):
    text = "torchrun pretrain_gpt.py --micro-batch-size 1 --seq-length 128 --bf16 --out-seq-length $1\n"
    said = refused(tmp_path, text.replace("--out", "$MORE --out"), name="a.sh")
    assert "$MORE: the file does not say what this variable is, which may hold arguments" in said
    assert "out-seq-length = $1: generation cannot be simulated; the file does not say what this variable is" in said


def test_options_behind_a_chain_of_eight_conditions_are_read(tmp_path):
    """They were one key named after the variable: `$AC = not given or not given or ...`."""
    sizes = "".join(f"elif [ $SIZE = {n} ]; then N={n}\n" for n in range(1, 7))
    text = f"AC=''\nif [ $SIZE = 0 ]; then N=0\n{sizes}elif [ $SIZE = 7 ]; then\nAC='--recompute-activations'\nfi\n"
    text += "torchrun pretrain_gpt.py --micro-batch-size 1 --seq-length 128 --bf16 $AC\n"
    said = refused(tmp_path, text, name="a.sh")
    assert said.startswith("recompute-activations = ")
    assert "$AC" not in said


@pytest.mark.parametrize(("more", "size"), [("", "1.00 GiB"), (" --context-parallel-size 2", "512.00 MiB")])
def test_large_masks_that_megatrons_loader_makes_are_noted(tmp_path, more, size):
    """pretrain_gpt.py, get_batch: a byte for each pair of positions, unless the loader is told not to make them."""
    text = f"torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --seq-length 32768 --bf16{more}\n"
    _, found = imported(tmp_path, text, name="a.sh", model="llama3.1-8b")
    noted = [line for line in found.listed if "dataloader is not given" in line]
    assert [f"approximated: a mask of {size}, " in line for line in noted] == [True]
    for other in ("--no-create-attention-mask-in-dataloader --bf16", "--bf16 --seq-length 8192"):
        text = f"torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 {other}{more}"
        text += "" if "seq" in other else " --seq-length 32768"
        _, found = imported(tmp_path, text + "\n", name="a.sh", model="llama3.1-8b")
        assert not any("dataloader is not given" in line for line in found.listed)


def test_deepeps_buffers_are_noted_as_not_counted(tmp_path):
    text = (
        "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --seq-length 1024 --bf16 --num-experts 8 "
    )
    text += "--moe-router-topk 2 --expert-model-parallel-size 8 --moe-token-dispatcher-type flex --moe-enable-deepep\n"
    _, found = imported(tmp_path, text, name="a.sh", model="mixtral-8x7b")
    (line,) = [line for line in found.listed if line.startswith("moe-enable-deepep")]
    assert "approximated: DeepEP's kernels send and permute in one, and keep buffers outside the allocator" in line


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


def test_overrides_of_other_keys(tmp_path):
    overrides = ["name=mine", "run.steps=5", "plan.method=gs", "plan.overlap=false"]
    tables, _ = imported(tmp_path, DEEPSPEED, name="ds.json", overrides=overrides)
    assert (tables["name"], tables["run"], tables["plan"]["method"]) == ("mine", {"steps": 5}, "gs")
    for override in ("cluster=x.toml", "workload.model=y.toml", "plan.methud=gs"):
        with pytest.raises(UserError, match=override.partition("=")[0]):
            imported(tmp_path, DEEPSPEED, name="ds.json", overrides=[override])


def test_a_refused_key_can_be_ignored(tmp_path):
    file = DEEPSPEED | {"invented": {"key": 1}}
    tables, found = imported(tmp_path, file, name="ds.json", ignored=["invented.*"])
    assert tables["plan"]["method"] == "zero3"
    assert any("ignored on request" in line for line in found.listed)


FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
{more}
"""


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


MEGATRON = """#!/bin/bash
GPUS=8
TP=${TP:-1}
GPT_ARGS=(
    --num-layers 24          # of gpt3-1.3b
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 1024
)
torchrun --nproc_per_node $GPUS --nnodes 1 pretrain_gpt.py "${GPT_ARGS[@]}" \\
    --micro-batch-size 2 --global-batch-size 64 --bf16 --lr 1.5e-4 --clip-grad 1.0 \\
    --use-distributed-optimizer --overlap-grad-reduce --recompute-granularity full \\
    --recompute-method uniform --recompute-num-layers 1 --log-interval 10
"""


def test_megatron_script(tmp_path):
    tables, found = imported(tmp_path, MEGATRON, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"] == {
        "method": "zero1",
        "zero1_implementation": "megatron",
        "micro_batches": 4,
        "recompute": "full",
        "bucket_bytes": 80_000_000,
    }
    assert tables["workload"]["gradient_precision"] == tables["workload"]["reduce_precision"] == "fp32"
    assert tables["workload"]["learning_rate"] == 1.5e-4
    assert not found.defaults


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--use-distributed-optimizer --overlap-grad-reduce", 2 * 40_000_000),
        ("--overlap-grad-reduce --ddp-bucket-size 1000000", 2 * 1_000_000),
        ("--overlap-grad-reduce --ddp-num-buckets 8", 2 * (1_315_723_264 // 8)),
        ("--use-distributed-optimizer", "1024 TiB"),
        ("", "1024 TiB"),
    ],
)
def test_megatrons_buckets_are_of_so_many_parameters_and_one_without_overlap(tmp_path, words, expected):
    text = MEGATRON.replace("--use-distributed-optimizer --overlap-grad-reduce", words)
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["bucket_bytes"] == expected
    assert ("overlap" in tables["plan"]) == (expected == "1024 TiB")
    many = text.replace("--nnodes 1", "--nnodes 8").replace("size 64", "size 128")
    tables, _ = imported(
        tmp_path, many, name="train.sh", model="gpt3-1.3b", cluster="scenarios/clusters/dgx-a100-128.toml"
    )
    assert tables["plan"]["bucket_bytes"] == (2 * 64_000_000 if expected == 2 * 40_000_000 else expected)


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        ("", True),
        ("--pipeline-model-parallel-size 2", "approximated: in a pipeline"),
        ("--optimizer muon", "approximated: beside Muon"),
    ],
)
def test_megatron_gathers_parameters_beside_the_next_forward(tmp_path, words, beside):
    text = f"{MEGATRON.rstrip()} --overlap-param-gather {words}"
    tables, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"].get("publish") == ({"overlap": True} if beside is True else None)
    for override in ("plan.overlap=false", "plan.zero1_implementation=torch", "plan.method=ddp"):  # take it along
        other, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b", overrides=[override])
        assert "publish" not in other["plan"]
    said = [line for line in found.listed if line.startswith("overlap-param-gather")]
    assert len(said) == (beside is not True)
    assert all(str(beside) in line for line in said)


@pytest.mark.parametrize(
    ("words", "plan"),
    [
        ("--optimizer muon --use-distributed-optimizer --muon-momentum 0.95", {"zero1_implementation": "megatron"}),
        ("--optimizer dist_muon --muon-momentum 0.95", {"zero1_implementation": "megatron"}),
        ("--optimizer muon --muon-momentum 0.95", None),
    ],
)
def test_megatrons_muon_is_read_with_the_plan_of_its_layer_wise_optimizer(tmp_path, words, plan):
    text = MEGATRON.replace("--use-distributed-optimizer", words)
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert (tables["workload"]["optimizer"], tables["workload"]["momentum"]) == ("muon", 0.95)
    assert tables["plan"]["method"] == ("ddp" if plan is None else "zero1")
    assert tables["plan"].get("zero1_implementation") == (plan or {}).get("zero1_implementation")


def test_megatron_yaml_is_the_script(tmp_path):
    arguments = {f"--{key}": value for key, value in arguments_in(MEGATRON, file="x").items()}
    table = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in arguments.items())
    by_yaml, _ = imported(tmp_path, f"ENV_VARS:\n  A: 1\nMODEL_ARGS:\n{table}", name="m.yaml", model="gpt3-1.3b")
    by_script, _ = imported(tmp_path, MEGATRON, name="train.sh", model="gpt3-1.3b")
    assert by_yaml == by_script


def test_pipelines_of_deepspeed_have_its_schedule_and_buffers_for_what_is_in_flight(tmp_path):
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4})
    plans = []
    for ranks in (1, 2):
        options = {"model": "gpt3-1.3b", "overrides": [f"plan.pp={ranks}", "workload.sequence_length=128"]}
        plans.append(imported(tmp_path, text, name="ds.json", **options)[0]["plan"])
    assert [plan.get("receive_buffers") for plan in plans] == [None, "in-flight"]
    assert [plan.get("schedule") for plan in plans] == [None, "deepspeed"]


def test_megatron_pipelines_of_few_micro_batches_are_gpipe(tmp_path):
    """Its 1f1b then runs all forwards first, for which the schedule is named gpipe here."""
    sizes = "--num-layers 6 --seq-length 128 --micro-batch-size 1 --pipeline-model-parallel-size 3 --nproc-per-node 3"
    for batch, schedule in ((2, "gpipe"), (3, "1f1b")):
        text = f"{sizes} --global-batch-size {batch}"
        tables, _ = imported(tmp_path, text, name="args.txt", model="gpt-byte-10m")
        assert tables["plan"]["schedule"] == schedule


def test_megatron_pipelines_have_equal_stages(tmp_path):
    sizes = "--num-layers 6 --seq-length 128 --micro-batch-size 1 --global-batch-size 16 --clip-grad 0"
    text = f"{sizes} --nproc-per-node 4 --pipeline-model-parallel-size 2"
    tables, _ = imported(tmp_path, text, name="args.txt", model="gpt-byte-10m")
    # the embedding before six blocks, a norm and a head behind
    assert tables["plan"]["stages"] == [4, 5]
    assert (tables["plan"]["method"], tables["plan"]["schedule"]) == ("ddp", "1f1b")
    assert tables["plan"]["receive_buffers"] == "in-flight"
    more = f"{text} --num-layers-per-virtual-pipeline-stage 1"
    tables, _ = imported(tmp_path, more, name="args.txt", model="gpt-byte-10m")
    assert (tables["plan"]["stages"], tables["plan"]["schedule"]) == ([2, 1, 1, 1, 1, 3], "interleaved")
    last = f"{text} --decoder-last-pipeline-num-layers 2"
    tables, _ = imported(tmp_path, last, name="args.txt", model="gpt-byte-10m")
    assert tables["plan"]["stages"] == [5, 4]


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*2|ttt,tL", [3, 6]),  # before six blocks the embedding, behind them a norm and a head
        ("E|t*6L", [1, 8]),
        ("Et|(t|)*4tL", [2, 1, 1, 1, 1, 3]),
        ("Et*5|t|L", None),  # three stages on two ranks
        ("Et*7|L", None),
        ("Et*3|t*3mL", None),
        ("Et*6||L|", None),
        ("E(t*9999)*9999|L", None),
    ],
)
def test_megatrons_stages_by_letters(tmp_path, layout, stages):
    text = "--num-layers 6 --seq-length 128 --micro-batch-size 1 --global-batch-size 16 --nproc-per-node 2 "
    text += f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout '{layout}'"
    if stages is None:
        assert "pipeline-model-parallel-layout" in refused(tmp_path, text, name="args.txt", model="gpt-byte-10m")
        return
    tables, _ = imported(tmp_path, text, name="args.txt", model="gpt-byte-10m")
    schedule = "interleaved" if len(stages) > 2 else "1f1b"
    assert (tables["plan"]["stages"], tables["plan"]["schedule"]) == (stages, schedule)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--fsdp-double-buffer", "keeps two buffers of gathered parameters and gradients all the time"),
        ("--use-nccl-ub", "buffers that are registered with NCCL take fewer of the GPU's multiprocessors"),
    ],
)
def test_megatron_names_what_permanent_and_registered_buffers_change(tmp_path, word, said):
    _, found = imported(tmp_path, f"{MEGATRON.rstrip()} {word}", name="train.sh", model="gpt3-1.3b")
    (line,) = [each for each in found.listed if word.removeprefix("--") in each]
    assert said in line


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--num-layers 32", "is given twice"),
        ("--context-parallel-size 3", "context ranks are"),
        ("--num-experts 8", "has no routed experts"),
        ("--num-moe-experts 8", "has no routed experts"),
        ("--activations-checkpoint-method block", "only the first layers"),
        ("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2", "units of several layers"),
        ("--activations-checkpoint-granularity full", "recomputation that is not known"),
        ("--moe-expert-capacity-factor 1.5", "a capacity, which drop tokens"),
        ("--moe-expert-rank-capacity-factor 1.5", "a capacity, which drop tokens"),
        ("--moe-dispatch-fwd-dtype fp8", "rows of experts in 8 bits"),
        ("--moe-latent-size 512", "another width"),
        ("--moe-paged-stash", "in pages"),
        ("--expert-tensor-parallel-num-weight-shards 2", "sharded further"),
        ("--fp32-residual-connection", "residuals and messages"),
        ("--optimizer muon --muon-num-ns-steps 6", "other numbers of Muon"),
        ("--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", "stages on ranks side by side"),
        ("--untie-embeddings-and-output-weights", "has the token embedding's weight"),
        ("--context-parallel-size 2 --cp-comm-type allgather", "allowed: p2p, a2a"),
        ("--tensor-model-parallel-size $TENSOR", "does not say what this variable is"),
        ("--tensor-model-parallel-size 3", "does not divide 8 ranks"),
        ("--recompute-activations --recompute-modules core_attn", "selective"),
        ("--fp8-format hybrid", "fp8"),
        ("--tensor-modle-parallel-size 2", "unknown key"),
    ],
)
def test_megatron_refusals(tmp_path, argument, said):
    text = MEGATRON.replace("--recompute-granularity full", "") if "activations" in argument else MEGATRON
    with pytest.raises(UserError, match=said):
        imported(tmp_path, f"{text.rstrip()} {argument}", name="train.sh", model="gpt3-1.3b")


@pytest.mark.parametrize(
    ("kind", "exchange"), [("p2p", "ring"), ("a2a", None), ("all_gather", "gather"), (None, "ring")]
)
def test_megatron_says_how_sequences_are_exchanged(tmp_path, kind, exchange):
    said = "--context-parallel-size 2" + (f" --cp-comm-type {kind}" if kind else "")
    tables, _ = imported(tmp_path, f"{MEGATRON.rstrip()} {said}", name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["cp"] == 2
    assert tables["plan"].get("context_exchange") == exchange


@pytest.mark.parametrize("stages", [1, 2])
def test_megatron_divides_sequences_beside_blocks_and_stages(tmp_path, stages):
    """Its ranks are in the order of the mesh's axes: tp within cp within dp within pp."""
    said = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    said += f" --pipeline-model-parallel-size {stages}" if stages > 1 else ""
    tables, _ = imported(tmp_path, f"{MEGATRON.rstrip()} {said}", name="train.sh", model="gpt3-1.3b")
    plan = {"method": "zero1", "cp": 2, "tp": 2, "sequence_parallel": True, "context_exchange": "ring"}
    assert plan.items() <= tables["plan"].items()
    mesh = load_scenario(tmp_path / "s.toml", tables=tables).scenario.policies.mesh
    assert mesh.sizes == (stages, 2 // stages, 1, 2, 2)


BRANCHES = """#!/bin/bash
usage() { echo "usage: $0 --tensor-model-parallel-size N  # of ranks"; exit 1; }
[ "$1" = "-h" ] && usage
SIZE=$1
TP=${TP:-2}
# --tensor-model-parallel-size 8
if [ $SIZE = 1.3B ]; then
    NUM_LAYERS=24; HIDDEN=2048
elif [ $SIZE = 6.7B ]; then
    NUM_LAYERS=32; HIDDEN=4096
fi
options="--bf16"
if [[ $FLASH == true ]]; then options="$options --use-flash-attn"; fi
if [ "${RECOMPUTE:-full}" = full ]; then
    options="$options --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
fi
case $SHARD in
    yes) options+=" --use-distributed-optimizer --overlap-grad-reduce" ;;
    *) ;;
esac
cat > notes.txt <<EOF
--micro-batch-size 16 is too large for $SIZE
EOF
nvidia-smi --query-gpu=name --format=csv
torchrun --nproc_per_node 8 --rdzv_backend c10d pretrain_gpt.py --num-layers $NUM_LAYERS --hidden-size $HIDDEN \\
    --num-attention-heads 16 --seq-length $((1024 * 2)) --micro-batch-size 2 --global-batch-size 64 \\
    --tensor-model-parallel-size $TP $options 2>&1 | tee log.txt
"""


def test_branches_of_a_script_are_asked_for_or_given(tmp_path):
    said = refused(tmp_path, BRANCHES, name="train.sh", model="gpt3-1.3b")
    assert "num-layers = 24 or 32 or not given: is 24, 32 or not given, by `if [ $SIZE = 1.3B ] in line 7`" in said
    assert "--variable SIZE=... decides" in said
    assert "use-distributed-optimizer" in said
    assert "by `case $SHARD in line 17`; --variable SHARD=... decides" in said
    assert "flash" not in said  # of no effect either way
    tables = {}
    for sharded in ("yes", "no"):
        (tmp_path / "train.sh").write_text(BRANCHES)
        found = import_scenario(
            tmp_path / "train.sh",
            model="gpt3-1.3b",
            cluster=Path(EIGHT),
            variables=["1=1.3B", f"SHARD={sharded}"],
        )
        tables[sharded] = tomllib.loads(found.text)
        assert any(line.startswith("launcher: rdzv-backend") for line in found.listed)
    assert [tables[each]["plan"]["method"] for each in ("yes", "no")] == ["zero1", "ddp"]
    plan = tables["yes"]["plan"]
    assert (plan["tp"], plan["micro_batches"], plan["recompute"]) == (2, 8, "full")
    assert tables["no"]["workload"]["sequence_length"] == 2048
    with pytest.raises(UserError, match=r"--variable 1\.3B: must be NAME=VALUE"):
        import_scenario(tmp_path / "train.sh", model="gpt3-1.3b", cluster=Path(EIGHT), variables=["1.3B"])
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    with pytest.raises(UserError, match="is for scripts"):
        import_scenario(tmp_path / "ds.json", model="llama3-8b", cluster=Path(EIGHT), variables=["A=1"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "torchrun pretrain_gpt.py --micro-batch-size 2 $MORE",
            r"\$MORE: the file does not say what this variable",
        ),
        ("pretrain_gpt.py --micro-batch-size 2 --seq-length 1024\npretrain_gpt.py --micro-batch-size 4", "lines 1, 2"),
        ("pretrain_gpt.py --micro-batch-size 2 --seq-length `cat x`", "seq-length = `cat x`"),
        (
            "pretrain_gpt.py --micro-batch-size 2 $tokenizer_moe_options",
            r"\$tokenizer_moe_options: the file does not say",
        ),
        ("pretrain_gpt.py --micro-batch-size 2 --moe-layer-recompute", "recomputed alone"),
        ("pretrain_gpt.py --micro-batch-size 2 --overlap-moe-expert-parallel-comm", "overlap their messages"),
        ("pretrain_gpt.py --micro-batch-size 2 --megatron-fsdp-main-params-dtype bf16", "in 16 bits"),
        ("pretrain_gpt.py --micro-batch-size 2 --use-mp-args-from-checkpoint-args", "parallel sizes of a checkpoint"),
        ("if true; then pretrain_gpt.py --micro-batch-size 2", "line 1: 'fi' is missing"),
        ("pretrain_gpt.py --micro-batch-size '2", "line 1: a quotation has no end"),
        ("f() { f; }\nf\npretrain_gpt.py --micro-batch-size 2", "nested too deep"),
        ("A=1\n" + "A=$A$A\n" * 60 + "pretrain_gpt.py --micro-batch-size $A", "micro-batch-size"),
        ("for i in 1 2 3; do " * 12 + "x;" + "done; " * 12 + "\npretrain_gpt.py --micro-batch-size 2", "too long"),
    ],
)
def test_scripts_that_cannot_be_followed_are_refused_in_a_line(tmp_path, text, said):
    with pytest.raises(UserError, match=said) as caught:
        imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        ("x.yaml", "parallelism: {dp: 2, tp: 2}\ntokens: {micro_batch_size: 2}\n", "nanotron"),
        ("x.yaml", "trainer: {devices: 8}\nmodel: {micro_batch_size: 4}\n", "NeMo"),
        (
            "x.yaml",
            "model_name_or_path: gpt2\npipeline_model_parallel_size: 2\nbf16: true\n",
            "LLaMA-Factory with Megatron-LM",
        ),
        ("x.yaml", "model: Qwen/Qwen3-4B\ntrain_dataset: d.yaml\nmicro_batch_size: 1\nbf16: true\n", "LLaMA-Factory"),
        ("x.yaml", "model: Qwen/Qwen3-4B\ntuner_type: lora\nper_device_train_batch_size: 1\n", "ms-swift"),
        ("x.yaml", "model_name_or_path: a/b\nwith_tracking: true\nlearning_rate: 1e-5\n", "open-instruct"),
        ("x.yaml", "checkpointer: {a: 1}\noptimizer: {b: 2}\nbatch_size: 2\ndtype: bf16\n", "torchtune"),
        ("x.yaml", "actor_rollout_ref: {model: {path: x}}\ntrainer: {nnodes: 1}\n", "verl"),
        ("x.yaml", "model: {tensor_model_parallel_size: 2}\ntrain: {a: 1}\nddp: {b: 2}\n", "Megatron-Bridge"),
        ("x.yaml", "model_name: Llama-3.1-8B\nout_dir: out\ntrain: {global_batch_size: 64}\n", "LitGPT"),
        ("x.toml", "[trainer.optim]\nlr = 1e-5\n[model]\nname = 'Qwen3-4B'\n[orchestrator]\n", "PRIME-RL"),
        ("x.toml", "max_steps = 9\n[model]\n[data]\n[optim]\nlr = 1e-5\n", "PRIME-RL's supervised fine-tuning"),
        ("x.yaml", "precision: amp_bf16\ndevice_train_microbatch_size: 4\n", "MosaicML Composer or OLMo"),
        ("x.yaml", "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {a: 1}\n", "Kubernetes"),
        ("x.yaml", "resources: {accelerators: 'H100:8'}\nrun: torchrun train.py\n", "SkyPilot"),
    ],
)
def test_files_of_other_programs_are_refused_by_the_program_s_name(tmp_path, name, text, program):
    """Before, they were read as torchtitan's or DeepSpeed's files, with errors about unknown keys."""
    with pytest.raises(UserError, match=f"is a configuration of {program}.*, which is not read; allowed: files of"):
        imported(tmp_path, text, name=name, model="gpt3-1.3b")


ARGUMENTS = b"torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --micro-batch-size 2 --global-batch-size 16\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "stdin is closed"),
        (b"--bf16 \xff", "stdin: is no UTF-8 text"),
        (ARGUMENTS + b"# " + b"x" * limits.MOST_BYTES, "stdin: is larger than"),
        (b"\xef\xbb\xbf" + ARGUMENTS.replace(b"\n", b"\r\n"), ""),
    ],
)
def test_stdin_is_read_like_a_file(monkeypatch, content, said):
    """A closed one ended in a traceback, and of a long one the first part was taken for the whole."""
    stream = None if content is None else io.TextIOWrapper(io.BytesIO(content), "utf-8")
    monkeypatch.setattr("sys.stdin", stream)
    ended = commands.run("gssim", "import", "-", "--model", "gpt3-1.3b", "--cluster", EIGHT)
    assert ended.returncode == (2 if said else 0)
    assert said in ended.stderr
    if said:
        assert len(ended.stderr.splitlines()) == 1
    else:
        assert tomllib.loads(ended.stdout)["workload"]["global_batch_size"] == 16


def test_the_switch_of_recomputation_up_to_megatron_3_0_is_read(tmp_path):
    """It was taken for a key of checkpoints on disks, and nothing was recomputed."""
    text = MEGATRON.replace("--recompute-granularity full", "--activations-checkpoint-method uniform")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["recompute"] == "full"


@pytest.mark.parametrize(
    "folder", ["`pwd`", "$(dirname $0)", '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', "$HERE", "."]
)
def test_a_script_beside_that_is_included_is_read(tmp_path, folder):
    arguments = "--num-layers 24 --micro-batch-size 2 --tensor-model-parallel-size $TP"
    (tmp_path / "config.sh").write_text(f'ARGS="{arguments}"\n')
    text = f'HERE=$(cd "$(dirname "$0")"; pwd)\nTP=4\nEXTRA="--bf16"\n. {folder}/config.sh\n. {folder}/submit.sh\n'
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["tp"] == 4
    assert tables["workload"]["precision"] == "bf16"


@pytest.mark.parametrize(
    ("folder", "samples"),
    [
        ("$(dirname $0)", 1),
        ('$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &> /dev/null && pwd -P)', 1),
        ("$(dirname `readlink -f $0`)", 1),
        ("$(dirname $0)/..", 2),
        (".", 4),
        ('$(dirname "$(dirname $0)")', None),
        ("$(cd $(dirname $0)/.. && pwd)", None),
        ("$(dirname $(pwd))", None),
        ("$(dirname $(which trainer))", None),
    ],
)
def test_only_the_file_that_a_script_names_is_included(tmp_path, monkeypatch, folder, samples):
    places = [tmp_path / "scripts", tmp_path, tmp_path / "elsewhere"]
    for number, place in enumerate(places):
        place.mkdir(exist_ok=True)
        (place / "config.sh").write_text(f'ARGS="--num-layers 24 --micro-batch-size {2**number}"\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = f". {folder}/config.sh\n"
    if samples is None:
        with pytest.raises(UserError, match="config\\.sh, which cannot be read"):
            arguments_in(text, file="train.sh", folder=places[0])
    else:
        assert arguments_in(text, file="train.sh", folder=places[0])["micro-batch-size"] == str(samples)


@pytest.mark.parametrize("include", ["`pwd`/config.sh", "$ELSEWHERE/config.sh", "config.sh"])
def test_variables_that_hold_a_part_of_the_arguments_alone_are_no_training(tmp_path, include):
    """They became replicas of the whole cluster in fp32, although the training was in a file that was not read."""
    text = f'EXTRA="--bf16 --recompute-granularity full"\nTP=8\n. {include}\n'
    with pytest.raises(UserError, match=r"no arguments of a training.* includes .*config\.sh, which cannot be read"):
        imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    with pytest.raises(UserError, match="holds no arguments such as --micro-batch-size 1"):
        imported(tmp_path, text.partition("\n. ")[0], name="train.sh", model="gpt3-1.3b")


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("torchrun --nproc_per_node 4 train.py --batch-size 8 --lr 1e-4 --epochs 3", "train.py"),
        ("srun torchrun --nnodes 2 src/main.py --data /data --amp", "main.py"),
        ("python3 -m verl.trainer.main_ppo data.train_batch_size=1024", "verl.trainer.main_ppo"),
        ("deepspeed --module openrlhf.cli.train_sft --micro_train_batch_size 4 --agent a.py", "openrlhf.cli.train_sft"),
        ("python prepare.py --split 9\npython main.py --workers 8", "prepare.py, main.py"),
        ("python -m torch.distributed.launch --nproc_per_node=8 finetune.py --plugin zero2", "finetune.py"),
    ],
)
def test_a_script_that_runs_a_program_of_its_own_is_refused_by_its_name(tmp_path, command, program):
    """Each option was refused as Megatron-LM's: `batch-size: a retired spelling: see Megatron's own message`."""
    with pytest.raises(UserError, match=f"runs {re.escape(program)}, and none of the options is read") as caught:
        imported(tmp_path, f"#!/bin/bash\nexport OMP_NUM_THREADS=1\n{command}\n", name="train.sh", model="gpt3-1.3b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("program", ["examples/reward_modeling.py", "dpo.py", "train_grpo.py", "scripts/run_dpo.py"])
def test_the_name_of_a_program_that_trains_by_preferences_is_enough(tmp_path, program):
    """LMFlow's reward model became a training of the next token: its options do not tell."""
    text = f"deepspeed {program} --per_device_train_batch_size 1 --block_size 512\n"
    with pytest.raises(UserError, match="trains by preferences or rewards"):
        imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    _, found = imported(tmp_path, text.replace(program, "finetune.py"), name="train.sh", model="gpt3-1.3b")
    assert found.listed


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("srun --gres=gpu:2 --ntasks=4 --ntasks-per-node=2 python -u finetune.py", 4),
        ("srun --ntasks 2 --ntasks-per-node 1 torchrun --nproc_per_node 2 finetune.py", 2),
        ("srun --ntasks 2 accelerate launch finetune.py", 8),
        ("srun --ntasks 4 python finetune.py", 4),
        ("torchrun --nproc_per_node 4 -m package.train", 4),
        ("python -m torch.distributed.run --nproc_per_node=4 -m package.train", 4),
        ("deepspeed --num_gpus 4 --module package.train", 4),
    ],
)
def test_srun_counts_ranks_where_it_starts_the_program_itself(tmp_path, command, ranks):
    """A training on 128 GPUs was one on the eight of the cluster: gradients were accumulated as on 128."""
    text = f"{command} --per_device_train_batch_size 1 --block_size 512\n"
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"].get("ranks", 8) == ranks
    assert tables["workload"]["global_batch_size"] == ranks
    many = text.replace("--ntasks=4", "--ntasks=16").replace("--nproc_per_node 2", "--nproc_per_node 16")
    if many != text:
        with pytest.raises(UserError, match="16"):
            imported(tmp_path, many, name="train.sh", model="gpt3-1.3b")


def test_srun_counts_the_ranks_of_megatron(tmp_path):
    text = (ROOT / "scenarios/imports/megatron.sh").read_text()
    text = text.replace("torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1", "srun --ntasks=4 python")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert (tables["plan"]["ranks"], tables["plan"]["tp"]) == (4, 4)


@pytest.mark.parametrize(
    "text",
    [
        "torchrun finetune.py --per_device_train_batch_size 1 --block_size 512 --seed $RANDOM\n",
        (ROOT / "scenarios/imports/megatron.sh").read_text().rstrip() + " --seed $RANDOM\n",
    ],
)
def test_a_seed_that_is_left_open_is_not_refused(tmp_path, text):
    _, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert any("seed" in line and "left open" in line for line in found.listed)


def test_a_readme_is_no_script(tmp_path):
    """A quotation in its prose had no end."""
    text = "# Fine-tuning\nIt's easy:\n```\ntorchrun train.py --per_device_train_batch_size 1\n```\n"
    with pytest.raises(UserError, match="is a text, no script; give the command line in it"):
        imported(tmp_path, text, name="README.md", model="gpt3-1.3b")


def test_a_variable_among_the_launchers_options_has_its_name(tmp_path):
    text = 'ARGS="--master_port=11000"\nif [ $# -ge 1 ]; then\n  ARGS="$1"\nfi\n'
    text += "deepspeed ${ARGS} finetune.py --per_device_train_batch_size 1 --block_size 512\n"
    _, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert not any("\x00" in line or "\\x00" in line for line in found.listed)
    assert any("$ARGS" in line for line in found.listed)


@pytest.mark.parametrize("precision", ["--bf16", ""])
def test_autocast_of_fp16_has_no_effect_where_fp16_is_off(tmp_path, precision):
    """InternVL's files have it beside "auto", and their scripts train in bf16: they were refused."""
    fp16 = {"enabled": "auto", "auto_cast": True, "loss_scale": 0}
    (tmp_path / "zero1.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "fp16": fp16}))
    text = f"torchrun finetune.py --per_device_train_batch_size 1 --block_size 512 {precision} --deepspeed zero1.json\n"
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["workload"]["precision"] == ("bf16" if precision else "fp32")
    with pytest.raises(UserError, match="autocast inside fp16"):
        imported(tmp_path, text.replace(f"512 {precision}", "512 --fp16"), name="train.sh", model="gpt3-1.3b")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ('{"pipe-parallel-size": 1, "model-parallel-size": 8, "zero_optimization": {"stage": 1}}', "GPT-NeoX"),
        ("pipe_parallel_size: 1\nmodel_parallel_size: 1\nzero_optimization: {stage: 1}\n", "GPT-NeoX"),
        ("model: {dim: 1}\noptim: {lr: 1}\ndata: {root_dir: a}\ndistributed: {fsdp_type: full_shard}\n", "Lingua"),
        ("actor_rollout_ref: {}\ndata: {}\ntrainer: {}\n", "verl"),
        ("data: {}\nmodel: {}\noptim: {}\ntrainer: {}\n", "verl's supervised"),
        ("system: {tensor_model_parallel_size: 2}\nmodel: {num_layers: 2}\n", "FlagScale"),
    ],
)
def test_files_of_other_programs_have_their_own_name(tmp_path, text, program):
    """GPT-NeoX's were DeepSpeed's, Lingua's PRIME-RL's, verl's NeMo's."""
    name = "config.json" if text.startswith("{") else "config.yaml"
    with pytest.raises(UserError, match=f"is a configuration of {program}"):
        imported(tmp_path, text, name=name, model="gpt3-1.3b")


def test_a_training_script_in_python_is_refused_with_what_is_read_instead(tmp_path):
    with pytest.raises(UserError, match="a Python script is not read; give the configuration"):
        imported(tmp_path, "trainer = Trainer(model, args)\n", name="train.py", model="gpt3-1.3b")


@pytest.mark.parametrize(
    ("model", "sizes", "said"),
    [
        ("llama2-7b", "--untie-embeddings-and-output-weights --swiglu", "ffn-hidden-size is not given: 10880"),
        ("llama2-7b", "--ffn-hidden-size 11008", "untie-embeddings-and-output-weights is not given"),
        ("llama3-8b", "--ffn-hidden-size 14336", "group-query-attention is not given: 32"),
        ("llama3-8b", "--ffn-hidden-size 14336 --group-query-attention", "num-query-groups is not given: 1"),
        ("llama3-8b", "--ffn-hidden-size 14336 --num-key-value-heads 8", ""),
    ],
)
def test_sizes_that_megatron_derives_must_be_the_models(tmp_path, model, sizes, said):
    untied = " --untie-embeddings-and-output-weights" * ("embeddings" not in f"{sizes} {said}")
    text = f"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --micro-batch-size 1 {sizes}{untied}"
    if said:
        assert said in refused(tmp_path, text, name="args.txt", model=model)
    else:
        imported(tmp_path, text, name="args.txt", model=model)


def test_a_schedule_of_batches_counts_at_its_end(tmp_path):
    batch = re.search(r"--global-batch-size (\d+)", MEGATRON).group(1)
    text = f"{MEGATRON.rstrip()} --step-batch-size-schedule '0:16 2.4B:32 4.8B:{batch}'"
    tables, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["workload"]["global_batch_size"] == int(batch)
    assert any("schedule's end" in line for line in found.listed)
    alone, _ = imported(tmp_path, text.replace(f"--global-batch-size {batch}", ""), name="train.sh", model="gpt3-1.3b")
    assert alone["workload"]["global_batch_size"] == int(batch)
    other = text.replace(f"4.8B:{batch}", "4.8B:17")
    assert "must end at --global-batch-size" in refused(tmp_path, other, name="train.sh", model="gpt3-1.3b")


ENGINE = """
CONFIG=ds_config.$SLURM_JOBID.json
STAGE=1
LAYERS=24
cat <<EOT > $CONFIG
{{"train_micro_batch_size_per_gpu": 2, "train_batch_size": {batch}, "gradient_clipping": 1.0,
  "zero_optimization": {{"stage": $STAGE}}, "fp16": {{"enabled": true, "loss_scale": 0, "hysteresis": 2}}}}
EOT
srun --jobid $SLURM_JOBID bash -c "python -m torch.distributed.run --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py \
    --num-layers $LAYERS --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 2 \
    --global-batch-size 64 --rampup-batch-size 16 16 1000 --train-samples 1000 --fp16 --loss-scale 12 \
    --checkpoint-activations --deepspeed-activation-checkpointing --partition-activations {more} \
    --deepspeed --deepspeed_config $CONFIG --zero-stage $STAGE --kill-switch-path /tmp/kill"
"""


def test_megatron_deepspeed(tmp_path):
    text = ENGINE.format(batch=64, more="")
    assert "partition-activations" in refused(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    text = text.replace("--partition-activations", "")
    tables, found = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    assert tables["plan"] == {
        "method": "zero1",
        "zero1_implementation": "deepspeed",
        "bucket_bytes": 10**9,
        "micro_batches": 4,
        "recompute": "full",
        "overlap": False,
    }
    workload = tables["workload"]
    assert (workload["precision"], workload["loss_scale"], workload["clip_norm"]) == ("fp16", "dynamic", 1.0)
    assert any("behind the ramp" in line for line in found.listed)
    assert any(line.startswith("nnodes = $NODES: left open") for line in found.listed)


def test_deepspeeds_pipelines_reduce_gradients_after_all_else(tmp_path):
    more = "--pipeline-model-parallel-size 2"
    text = ENGINE.format(batch=64, more=more).replace("--partition-activations", "")
    text = text.replace('{"stage": $STAGE}', '{"stage": 1, "overlap_comm": true}')
    tables, found = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    assert (tables["plan"]["method"], tables["plan"]["overlap"]) == ("zero1", False)
    assert tables["plan"]["bucket_bytes"] == 10**9  # of reduce_bucket_size, 5e8 elements if it is not given
    assert not any("5e8 elements at a time" in line for line in found.listed)


@pytest.mark.parametrize(("words", "method"), [("", "zero1"), ("--no-pipeline-parallel", "ddp")])
@pytest.mark.parametrize("stages", [1, 2])
def test_deepspeeds_pipelines_in_bf16_divide_the_optimizers_state_without_zero(tmp_path, stages, words, method):
    """Its BF16_Optimizer does; Megatron-DeepSpeed makes a pipeline of one stage too, unless told otherwise."""
    more = f"--pipeline-model-parallel-size {stages} {words}"
    text = ENGINE.format(batch=64, more=more).replace("--partition-activations", "").replace("STAGE=1", "STAGE=0")
    text = text.replace('"fp16": {"enabled": true, "loss_scale": 0, "hysteresis": 2}', '"bf16": {"enabled": true}')
    text = text.replace("--fp16 --loss-scale 12", "--bf16")
    tables, _ = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    expected = method if stages == 1 else "zero1"
    assert tables["plan"]["method"] == expected
    assert tables["plan"].get("zero1_implementation") == ("deepspeed" if expected == "zero1" else None)
    kept = [tables["workload"].get(f"{name}_precision") for name in ("gradient", "reduce")]
    assert kept == (["fp32", "fp32"] if stages == 2 else [None, None])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--zero-stage $STAGE", "--zero-stage 2"), 'zero-stage = "2": contradicts zero_optimization.stage = 1'),
        (("--fp16", "--bf16"), "fp16 in DeepSpeed's configuration contradicts bf16"),
        (('64, "gradient', '32, "gradient'), "32 in DeepSpeed's configuration contradicts global-batch-size"),
        (("--deepspeed_config $CONFIG", "--deepspeed_config lost.json"), "no such file"),
        (("--seq-length", "--num-experts 4 --seq-length"), "DeepSpeed's mixtures of experts"),
        (("--checkpoint-activations", "--checkpoint-activations --checkpoint-num-layers 2"), "units of several layers"),
    ],
)
def test_megatron_deepspeed_contradictions(tmp_path, change, said):
    text = ENGINE.format(batch=64, more="").replace("--partition-activations", "")
    assert change[0] in text
    assert said in refused(tmp_path, text.replace(*change), name="job.slurm", model="gpt3-1.3b")


@pytest.mark.parametrize(
    ("override", "plan"),
    [
        ("plan.sequence_parallel=false", {"sequence_parallel": False, "zero1_implementation": "megatron"}),
        ("plan.gathered_inputs=kept", {"sequence_parallel": True, "gathered_inputs": "kept"}),
        ("plan.method=zero3", {"method": "zero3", "sequence_parallel": True}),
        ("workload.precision=fp32", {"bucket_bytes": 4 * 40_000_000}),
    ],
)
def test_what_is_set_takes_along_what_megatrons_job_said_with_it(tmp_path, override, plan):
    more = "--tensor-model-parallel-size 2 --sequence-parallel --log-interval"
    text = MEGATRON.replace("--log-interval", more).replace("--bf16", "--bf16 --grad-reduce-in-bf16")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b", overrides=[override])
    assert tables["plan"].items() >= plan.items()
    assert ("gathered_inputs" in tables["plan"]) == tables["plan"]["sequence_parallel"]
    assert ("zero1_implementation" in tables["plan"]) == (tables["plan"]["method"] == "zero1")


@pytest.mark.parametrize(
    ("said", "overrides", "beside"),
    [
        ("", [], True),
        ("--no-async-tensor-model-parallel-allreduce", [], False),
        ("--sequence-parallel", [], False),  # what it hides, it loses to slower products
        ("--sequence-parallel", ["plan.sequence_parallel=false"], True),
    ],
)
def test_megatron_sums_gradients_of_inputs_beside_products(tmp_path, said, overrides, beside):
    text = MEGATRON.replace("--log-interval", f"--tensor-model-parallel-size 2 {said} --log-interval")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b", overrides=overrides)
    assert tables["plan"].get("async_input_gradients", False) is beside


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [("llama2-7b", "", True), ("llama2-7b", "--sequence-parallel", False), ("gpt3-1.3b", "", False)],
)
def test_megatrons_fused_maps_are_approximated_by_separate_ones_and_it_says_so(tmp_path, model, more, says):
    """Llama's five maps with a common input make five all-reduces a block in the backward; Megatron-LM has two."""
    text = MEGATRON.replace("--log-interval", f"--tensor-model-parallel-size 2 {more} --log-interval")
    if model == "llama2-7b":
        llama = {"num-layers 24": "num-layers 32", "hidden-size 2048": "hidden-size 4096", "heads 16": "heads 32"}
        for before, after in llama.items():
            text = text.replace(before, after)
        text = text.replace("--log-interval", "--swiglu --untie-embeddings-and-output-weights --log-interval")
        text = text.replace("--swiglu", "--swiglu --ffn-hidden-size 11008")
    _, found = imported(tmp_path, text, name="train.sh", model=model)
    assert any("5 sums of input gradients a block" in line for line in found.listed) is says


def test_deepspeeds_zero1_beside_megatrons_sequence_parallelism_is_approximated_and_says_so(tmp_path):
    more = "--tensor-model-parallel-size 2 --sequence-parallel"
    text = ENGINE.format(batch=64, more=more).replace("--partition-activations", "")
    tables, found = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    plan = tables["plan"]
    assert (plan["method"], plan["tp"], plan["sequence_parallel"]) == ("zero1", 2, True)
    assert "zero1_implementation" not in plan
    assert any("broadcasts of parameters, not gathers" in line for line in found.listed)


def test_megatron_deepspeeds_sequence_parallelism_is_ulysses(tmp_path):
    text = ENGINE.format(batch=64, more="--ds-sequence-parallel-size 2").replace("--partition-activations", "")
    tables, _ = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    assert (tables["plan"]["cp"], tables["plan"].get("context_exchange")) == (2, None)
    assert tables["plan"]["micro_batches"] == 8


@pytest.mark.parametrize(
    "more",
    [
        "--pp-partition-method 'type:transformer|embedding'",
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ],
)
def test_stages_that_count_embedding_and_loss(tmp_path, more):
    sizes = "--num-layers 6 --seq-length 128 --micro-batch-size 1 --global-batch-size 16 --clip-grad 0"
    text = f"{sizes} --nproc-per-node 4 --pipeline-model-parallel-size 4 {more}"
    tables, _ = imported(tmp_path, text, name="args.txt", model="gpt-byte-10m")
    assert tables["plan"]["stages"] == [2, 2, 2, 3]
    uneven = text.replace("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 3 --nproc-per-node 3")
    assert "does not divide so" in refused(tmp_path, uneven, name="args.txt", model="gpt-byte-10m")


def test_neutral_numbers_of_scripts_are_texts(tmp_path):
    said = "--expert-tensor-parallel-size 1 --num-distributed-optimizer-instances 1 --moe-layer-freq 1"
    said += " --moe-token-drop-policy probs --muon-num-ns-steps 5 --moe-router-dtype fp32"
    tables, _ = imported(tmp_path, f"{MEGATRON.rstrip()} {said}", name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["method"] == "zero1"
    other = f"{MEGATRON.rstrip()} --num-distributed-optimizer-instances 2"
    assert "beside the distributed one" in refused(tmp_path, other, name="train.sh", model="gpt3-1.3b")


@pytest.mark.parametrize(("dtype", "reduced"), [("bf16", None), ("fp32", "fp32"), ("auto", "fp32")])
def test_megatron_fsdp_says_in_what_gradients_are_reduced(tmp_path, dtype, reduced):
    said = f"--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --megatron-fsdp-grad-comm-dtype {dtype}"
    tables, _ = imported(tmp_path, f"{MEGATRON.rstrip()} {said}", name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["method"] == "zero2"
    assert tables["workload"].get("reduce_precision") in (reduced, "bf16" if reduced is None else reduced)
    text = f"{MEGATRON.rstrip()} --use-megatron-fsdp"
    _, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    said = [line for line in found.listed if line.startswith("use-megatron-fsdp")]
    assert all(any(each in line for line in said) for each in ("earlier releases take no_shard", "up to 0.18"))


def test_megatrons_torch_fsdp2_reduces_gradients_in_the_precision_of_the_parameters(tmp_path):
    """It passes no MixedPrecisionPolicy to fully_shard (core/distributed/torch_fully_sharded_data_parallel.py)."""
    text = MEGATRON.replace("--use-distributed-optimizer", "--use-torch-fsdp2")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["method"] == "zero3"
    assert not {"reduce_precision", "gradient_precision"} & tables["workload"].keys()


def test_megatrons_offloaded_optimizer(tmp_path):
    said = f"{MEGATRON.rstrip()} --optimizer-cpu-offload"
    tables, _ = imported(tmp_path, f"{said} --optimizer-offload-fraction 1.0", name="train.sh", model="gpt3-1.3b")
    assert (tables["plan"]["method"], tables["plan"]["offload"]) == ("zero1", "optimizer")
    half = f"{said} --optimizer-offload-fraction 0.5"
    assert "a part of the optimizer" in refused(tmp_path, half, name="train.sh", model="gpt3-1.3b")


def test_sizes_of_another_model_are_refused(tmp_path):
    assert "the model 'llama3-8b' has width = 4096" in refused(tmp_path, MEGATRON, name="train.sh")


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
global_batch_size = {batch}
seq_len = 8192
max_norm = 1.0
steps = 1000
[parallelism]
data_parallel_replicate_degree = {replicate}
data_parallel_shard_degree = {shard}
fsdp_reshard_after_forward = "{reshard}"
[activation_checkpoint]
mode = "{mode}"
"""


@pytest.mark.parametrize(
    ("replicate", "shard", "reshard", "method"),
    [
        (1, -1, "default", "zero3"),
        (1, 8, "always", "zero3"),
        (1, -1, "never", "zero2"),
        (2, -1, "default", "hsdp"),
        (8, 1, "default", "ddp"),
    ],
)
def test_torchtitan(tmp_path, replicate, shard, reshard, method):
    text = TITAN.format(batch=16, replicate=replicate, shard=shard, reshard=reshard, mode="full")
    tables, found = imported(tmp_path, text, name="t.toml")
    assert tables["plan"]["method"] == method
    assert (tables["plan"]["micro_batches"], tables["plan"]["recompute"]) == (2, "full")
    assert tables["workload"]["optimizer_implementation"] == "fused"
    assert tables["workload"].get("reduce_precision") == (None if method == "ddp" else "fp32")
    assert any("autocast" in line for line in found.listed) == (method == "ddp")


@pytest.mark.parametrize(
    ("name", "flavor"),
    [("deepseek_v3", "671B"), ("deepseek_v3", "16B"), ("llama4", "17bx16e"), ("llama2", "13B"), ("a_new_one", "70B")],
)
def test_torchtitans_flavor_must_be_of_the_models_size(tmp_path, name, flavor):
    """Sizes of Llama 3 and Qwen 3 were known alone: other files were predicted with the model of the command."""
    text = TITAN.format(batch=16, replicate=1, shard=-1, reshard="always", mode="full")
    text = text.replace('"8B"', f'"{flavor}"').replace('"llama3"', f'"{name}"')
    assert f'"{flavor}"' in text
    assert "give the right one by --model" in refused(tmp_path, text, name="train.toml")


@pytest.mark.parametrize(
    ("pp", "more", "stages"),
    [
        (4, "", [10, 9, 8, 9]),  # 32 blocks and two: 9, 9, 8, 8, of which embedding and head take one each
        (2, "pipeline_parallel_first_stage_less_layers = 0\n", [19, 17]),
        (2, "pipeline_parallel_last_stage_less_layers = 3\n", [19, 17]),
        (4, 'pipeline_parallel_schedule = "Interleaved1F1B"\n', [6, 5, 4, 4, 4, 4, 4, 5]),
        (2, 'pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 9\n', None),
    ],
)
def test_torchtitans_stages_count_embedding_and_head_as_blocks(tmp_path, pp, more, stages):
    """As its generate_llm_fqn_per_model_part divides 32 blocks, before and behind which are two layers each."""
    text = TITAN.format(batch=64, replicate=1, shard=-1, reshard="default", mode="none")
    text = text.replace("local_batch_size = 1", "local_batch_size = 8").replace("batch_size = 64", "batch_size = -1")
    text = text.replace("fsdp_reshard", f"pipeline_parallel_degree = {pp}\n{more}fsdp_reshard")
    tables, _ = imported(tmp_path, text, name="t.toml")
    assert tables["plan"]["stages"] == (stages or [10, 9, 8, 9])
    blocks = [f"layers.{number}" for number in range(32)]
    parts = [["tok_embeddings", *blocks[:20]], [*blocks[20:], "norm", "output"]]
    named = text.replace(f"_degree = {pp}\n{more}", f"_degree = 2\nmodule_fqns_per_model_part = {json.dumps(parts)}\n")
    assert imported(tmp_path, named, name="t.toml")[0]["plan"]["stages"] == [22, 14]
    other = named.replace('"norm", ', "")
    assert "must be the 32 blocks of 'llama3-8b'" in refused(tmp_path, other, name="t.toml")
    assert "the model 'llama3-8b' has width" in refused(tmp_path, text.replace('"8B"', '"70B"'), name="t.toml")


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "interleavedzerobubble"])
def test_torchtitans_zero_bubble_schedule_has_two_stages_a_rank(tmp_path, name):
    text = TITAN.format(batch=64, replicate=1, shard=-1, reshard="default", mode="none")
    text = text.replace("local_batch_size = 1", "local_batch_size = 8").replace("batch_size = 64", "batch_size = -1")
    schedule = f'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "{name}"\n'
    titan = text.replace("fsdp_reshard", f"{schedule}fsdp_reshard")
    same = ["workload.reduce_precision=bf16"]  # torchtitan's is fp32: when FSDP2 casts its gradients is not modelled
    tables, _ = imported(tmp_path, titan, name="t.toml", overrides=same)
    plan = tables["plan"]
    assert (plan["method"], plan["pp"], plan["schedule"]) == ("zero2", 4, "interleaved_zero_bubble")
    assert plan["stages"] == [6, 5, 4, 4, 4, 4, 4, 5]
    other = text.replace("fsdp_reshard", schedule.replace(name, "ZBVZeroBubble") + "fsdp_reshard")
    assert "allowed: 1f1b, gpipe, interleaved1f1b" in refused(tmp_path, other, name="t.toml")


@pytest.mark.parametrize(
    ("replicate", "context", "plan"),
    [
        (1, 8, {"method": "zero3", "cp": 8}),
        (4, 2, {"method": "hsdp", "dp_replicate": 4, "dp_shard": 1, "cp": 2}),
        (8, 1, {"method": "ddp"}),
    ],
)
@pytest.mark.parametrize("by_option", [False, True])
def test_torchtitan_shards_over_context_ranks(tmp_path, replicate, context, plan, by_option):
    """Its mesh for FSDP is that of data_parallel_shard_degree times context_parallel_degree."""
    text = TITAN.format(batch=16, replicate=replicate, shard=1, reshard="default", mode="full")
    if not by_option:
        text = text.replace("[parallelism]", f"[parallelism]\ncontext_parallel_degree = {context}")
    overrides = [f"plan.cp={context}"] if by_option else []
    tables, _ = imported(tmp_path, text, name="t.toml", overrides=overrides)
    assert {key: tables["plan"].get(key) for key in plan} == plan
    assert tables["workload"].get("reduce_precision") == (None if context == 1 and not by_option else "fp32")


@pytest.mark.parametrize(
    ("said", "split"),
    [
        ('"context_parallel_load_balancer": "headtail"', None),
        ('"context_parallel_load_balancer": null', "plain"),
        ('"context_parallel_load_balance": false', "plain"),
    ],
)
def test_torchtitan_says_how_sequences_are_divided(tmp_path, said, split):
    text = '{"training": {"local_batch_size": 1, "seq_len": 8192}, "parallelism": {"context_parallel_degree": 2, %s}}'
    tables, _ = imported(tmp_path, text % said, name="t.json")
    assert (tables["plan"]["cp"], tables["plan"].get("context_split")) == (2, split)


def test_torchtitans_compiled_context_parallelism_waits_for_each_exchange(tmp_path):
    """torch 2.6, distributed/_functional_collectives.py: a traced collective is followed by its wait."""
    saved = {"training": {"seq_len": 8192, "local_batch_size": 1}, "compile": COMPILED_TITAN}
    saved |= {"parallelism": {"context_parallel_degree": 2}, "activation_checkpoint": {"mode": "none"}}

    def overlap(said, *overrides):
        options = {"overrides": overrides, "ignored": ["compile.enable"]}
        return imported(tmp_path, said, name="t.json", **options)[0]["plan"].get("context_overlap")

    assert "compiled blocks that ranks divide" in refused(tmp_path, saved, name="t.json")
    assert overlap(saved) is False
    assert overlap(saved, "plan.context_overlap=true") is True
    assert overlap(saved, "plan.context_exchange=all-to-all") is None
    assert overlap(saved | {"compile": COMPILED_TITAN | {"components": ["loss"]}}) is None
    assert overlap(saved | {"compile": {"enable": False}}) is None
    assert overlap(saved | {"parallelism": {}}) is None


@pytest.mark.parametrize(("method", "exchange"), [("", "gather"), ("allgather", "gather"), ("alltoall", "ring")])
def test_torchtitans_context_parallelism_attends_in_blocks_beside_selective_recomputation_too(
    tmp_path, method, exchange
):
    text = TITAN.format(batch=16, replicate=1, shard=-1, reshard="default", mode="selective")
    said = f'\ncontext_parallel_rotate_method = "{method}"' if method else ""
    text = text.replace("[parallelism]", f"[parallelism]\ncontext_parallel_degree = 2{said}")
    tables, _ = imported(
        tmp_path, text.replace('mode = "selective"', 'mode = "selective"\nselective_ac_option = "op"'), name="t.toml"
    )
    plan = {"cp": 2, "context_exchange": exchange, "recompute": "every-second-product"}
    assert {key: tables["plan"].get(key) for key in plan} == plan


OLD_TITAN = """
[optimizer]
name = "AdamW"
lr = 3e-4
{fused}
[training]
batch_size = 4
seq_len = 8192
warmup_steps = 200
{degrees}
enable_loss_parallel = true
compile = false
fp8_linear = ""
checkpoint_interval = 3600
[experimental]
{experimental}
[activation_checkpoint]
mode = "full"
"""


@pytest.mark.parametrize(
    ("degrees", "experimental", "fused", "plan"),
    [
        ("data_parallel_degree = -1\nsequence_parallel_degree = 2", "", "", {"method": "zero3", "tp": 2}),
        ("data_parallel_degree = 1\ntensor_parallel_degree = 8", "", "", {"method": "tensor", "tp": 8}),
        (
            "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4",
            "",
            "fused = true",
            {"method": "hsdp", "dp_shard": 4},
        ),
        ("data_parallel_shard_degree = 1", "context_parallel_degree = 8", "", {"method": "zero3", "cp": 8}),
        (
            "data_parallel_shard_degree = -1",
            "pipeline_parallel_degree = 4\npipeline_parallel_schedule = '1f1b'",
            "",
            {"method": "zero2", "pp": 4, "micro_batches": 4},
        ),
        (
            "tensor_parallel_degree = 1",
            "pipeline_parallel_degree = 4\npipeline_parallel_microbatches = 2\npipeline_parallel_schedule = 'gpipe'",
            "",
            {"pp": 4, "micro_batches": 2},
        ),
        ("tensor_parallel_degree = 1", "pipeline_parallel_degree = 1\npipeline_parallel_microbatches = 2", "", {}),
    ],
)
def test_torchtitan_before_its_table_of_parallelism(tmp_path, degrees, experimental, fused, plan):
    text = OLD_TITAN.format(degrees=degrees, experimental=experimental, fused=fused)
    tables, _ = imported(tmp_path, text, name="t.toml")
    assert {key: tables["plan"].get(key) for key in plan} == plan
    assert tables["workload"]["optimizer_implementation"] == ("fused" if fused else "foreach")
    assert tables["plan"].get("loss_parallel") == (True if plan.get("tp") else None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("compile = false", "compile = true"), "training.compile"),
        (('fp8_linear = ""', 'fp8_linear = "dynamic"'), "training.fp8_linear"),
        (("[experimental]", "[float8]\nenable_float8_linear = true\n[experimental]"), "float8.enable_float8_linear"),
        (("[experimental]", "[experimental]\npipeline_parallel_split_points = ['layers.4']"), "plan.stages"),
        (("[experimental]", "[experimental]\nexpert_parallel_degree = 2"), "experimental.expert_parallel_degree"),
        (("[experimental]", "[parallelism]\ntensor_parallel_degree = 2\n[experimental]"), "training.tensor_parallel"),
    ],
)
def test_older_torchtitan_drops_nothing(tmp_path, change, said):
    text = OLD_TITAN.format(degrees="tensor_parallel_degree = 1", experimental="", fused="")
    assert said in refused(tmp_path, text.replace(*change), name="t.toml")


@pytest.mark.parametrize(
    ("model", "said", "divided"),
    [
        ("llama3-8b", "", (True, True)),
        ("llama3-8b", "disable_loss_parallel = true", (True, None)),
        ("gpt3-1.3b", "", (True, True)),
        ("gpt3-1.3b", "disable_loss_parallel = true", (None, None)),  # its head has the embedding's weight
    ],
)
def test_torchtitans_divided_vocabulary(tmp_path, model, said, divided):
    text = TITAN.format(batch=16, replicate=1, shard=-1, reshard="default", mode="full").replace("8192", "2048")
    text = text.replace("[parallelism]", f"[parallelism]\ntensor_parallel_degree = 2\n{said}")
    tables, found = imported(tmp_path, text, name="t.toml", model=model, ignored=["model.*"])
    assert (tables["plan"].get("embedding_parallel"), tables["plan"].get("loss_parallel")) == divided
    assert any("the token embedding of tensor-parallel ranks is whole" in line for line in found.listed) == (
        divided == (None, None)
    )


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


def test_maps_in_8_bits_are_said_by_an_option(tmp_path):
    """Programs choose which linear maps run in 8 bits, and how they scale; the scenario has one key for all."""
    said = f"{MEGATRON.rstrip()} --fp8-format hybrid --fp8-recipe delayed"
    assert "or --set workload.map_precision" in refused(tmp_path, said, name="train.sh", model="gpt3-1.3b")
    titan = TITAN.format(batch=16, replicate=1, shard=-1, reshard="default", mode="full")
    titan = titan.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8"]')
    files = {"train.sh": (said, "gpt3-1.3b"), "t.toml": (titan, "llama3-8b")}
    overrides = ["workload.map_precision=fp8"]
    for name, (text, model) in files.items():
        tables, found = imported(tmp_path, text, name=name, model=model, overrides=overrides)
        assert tables["workload"]["map_precision"] == "fp8"
        assert any("replaced by --set workload.map_precision" in line for line in found.listed)
    gathered = f"{titan}[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n"
    assert "gathered in 8 bits" in refused(tmp_path, gathered, name="t.toml", overrides=overrides)


def test_torchtitan_selects_by_operation_or_by_layer(tmp_path):
    text = TITAN.format(batch=-1, replicate=1, shard=-1, reshard="default", mode="selective")
    tables, _ = imported(tmp_path, f'{text}selective_ac_option = "op"', name="t.toml")
    assert (tables["plan"]["recompute"], tables["workload"]["global_batch_size"]) == ("every-second-product", 8)
    for by_layer in (text, f'{text}selective_ac_option = "2"'):
        said = refused(tmp_path, by_layer, name="t.toml")
        assert "every second layer" in said
        assert "--set plan.recompute" in said
    tables, _ = imported(tmp_path, text, name="t.toml", overrides=["plan.recompute=selective"])
    assert tables["plan"]["recompute"] == "selective"


def test_what_torchtitan_recomputes_in_compiled_blocks_is_the_compiled_models(tmp_path):
    text = TITAN.format(batch=-1, replicate=1, shard=-1, reshard="default", mode="selective")
    text = f'{text}selective_ac_option = "op"\n[compile]\nenable = true\n'
    tables, _ = imported(tmp_path, text, name="t.toml", model="llama3-8b-compiled-every-second-product")
    assert tables["plan"]["recompute"] == "none"
    for other in ("llama3-8b-compiled", "llama3-8b-compiled-selective"):
        said = refused(tmp_path, text, name="t.toml", model=other)
        assert "--compile --recompute every-second-product" in said
    tables, found = imported(tmp_path, text.replace("selective", "full"), name="t.toml", model="llama3-8b-compiled")
    assert tables["plan"]["recompute"] == "full"
    assert any("whole graphs are recomputed" in line for line in found.listed)


@pytest.mark.parametrize(
    ("checkpointing", "recompute"),
    [
        (None, "none"),
        ({"preserve_rng_state": True}, "full"),
        ({"force_recompute_mm_shapes_by_fqns": []}, "every-second-product"),
        ({"memory_budget": 0.5}, None),
    ],
)
def test_torchtitan_saved_json(tmp_path, checkpointing, recompute):
    training = {"num_tokens_per_microbatch_per_dp_rank": 16384, "num_tokens_per_train_step": 262144}
    saved = {
        "training": training | {"max_context_length": 8192, "mixed_precision_param": "bfloat16"},
        "parallelism": {"data_parallel_shard_degree": -1, "num_pp_microbatches": 1},
        "activation_checkpoint": checkpointing,
        "compile": {"enable": False, "backend": "inductor"},
    }
    if recompute is None:
        assert "memory_budget" in refused(tmp_path, saved, name="t.json")
        return
    tables, _ = imported(tmp_path, saved, name="t.json")
    assert tables["workload"]["global_batch_size"] == 32
    assert (tables["plan"]["micro_batches"], tables["plan"]["recompute"]) == (2, recompute)


COMPILED_TITAN = {"enable": True, "backend": "inductor", "components": ["model", "loss"]}


def test_torchtitan_compiled_blocks_take_a_compiled_model(tmp_path):
    saved = {"training": {"seq_len": 8192}, "activation_checkpoint": {"mode": "none"}, "compile": COMPILED_TITAN}
    tables, found = imported(tmp_path, saved, name="t.json", model="llama3-8b-compiled")
    assert tables["plan"]["method"] == "zero3"
    assert any("loss is not compiled" in each for each in found.listed)
    said = refused(tmp_path, saved, name="t.json")
    assert "compile.enable = true" in said
    assert "'llama3-8b-compiled'" in said
    assert "gsreal trace MODEL_FILE --compile" in said
    divided = refused(
        tmp_path, saved | {"parallelism": {"tensor_parallel_degree": 2}}, name="t.json", model="llama3-8b"
    )
    assert "compiled blocks that ranks divide (parallelism.tensor_parallel_degree = 2)" in divided
    assert "--ignore" in divided
    alone = saved | {"compile": COMPILED_TITAN | {"components": ["loss"]}}
    imported(tmp_path, alone, name="t.json")
    other = saved | {"compile": COMPILED_TITAN | {"backend": "aot_eager"}}
    assert "compile.backend" in refused(tmp_path, other, name="t.json", model="llama3-8b-compiled")
    off = saved | {"compile": {"enable": False}}
    assert "are compiled" in refused(tmp_path, off, name="t.json", model="llama3-8b-compiled")


def test_a_program_that_does_not_compile_takes_no_compiled_model(tmp_path):
    assert "are compiled" in refused(tmp_path, DEEPSPEED, name="ds.json", model="llama3-8b-compiled")


def test_accelerates_regional_compilation_takes_a_compiled_model(tmp_path):
    text = "distributed_type: MULTI_GPU\nmixed_precision: 'no'\nnum_processes: 8\ndynamo_config:\n"
    regions = text + "  dynamo_backend: INDUCTOR\n  dynamo_use_regional_compilation: true\n"
    batch = ["workload.global_batch_size=16", "workload.sequence_length=2048"]
    imported(tmp_path, regions, name="a.yaml", model="llama3-8b-compiled", overrides=batch)
    assert "dynamo_use_regional_compilation" in refused(tmp_path, regions, name="a.yaml", overrides=batch)
    whole = text + "  dynamo_backend: INDUCTOR\n"
    assert "whole model" in refused(tmp_path, whole, name="a.yaml", model="llama3-8b-compiled", overrides=batch)


AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2, num_epochs: 1}
dist_env: {backend: nccl, timeout_minutes: 1}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B
  torch_dtype: bf16
distributed: {strategy: fsdp2, dp_size: none, tp_size: 1, cp_size: 1, activation_checkpointing: true}
dataset: {_target_: x.y, seq_len: 4096}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-5, foreach: true}
"""


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("exp_avg_dtype: torch.bfloat16", "in another precision"),
        ("exp_avg_sq_dtype: torch.bfloat16", "in another precision"),
        ("amsgrad: true", "AMSGrad"),
    ],
)
def test_automodels_optimizers_with_other_state_are_not_taken_for_the_usual_ones(tmp_path, more, reason):
    """They were said to change numbers, not step time or memory."""
    text = AUTOMODEL.replace("foreach: true", more)
    assert reason in refused(tmp_path, text, name="r.yaml")
    off = more.replace("bfloat16", "float32").replace("true", "false")
    imported(tmp_path, AUTOMODEL.replace("foreach: true", f"{off}, store_param_remainders: true"), name="r.yaml")


def test_automodels_sgd_keeps_its_momentum(tmp_path):
    text = AUTOMODEL.replace("torch.optim.AdamW", "torch.optim.SGD").replace("foreach: true", "momentum: 0.8")
    tables, _ = imported(tmp_path, text, name="r.yaml")
    assert (tables["workload"]["optimizer"], tables["workload"]["momentum"]) == ("sgd-momentum", 0.8)


def test_deepspeeds_amsgrad_is_refused(tmp_path):
    optimizer = {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True, "amsgrad": True}}
    assert "AMSGrad" in refused(tmp_path, DEEPSPEED | {"optimizer": optimizer}, name="ds.json")


def test_automodel(tmp_path):
    tables, found = imported(tmp_path, AUTOMODEL, name="r.yaml")
    assert tables["plan"] == {"method": "zero3", "micro_batches": 4, "recompute": "full", "gradient_sync": "step"}
    assert tables["workload"]["sequence_length"] == 4096
    assert tables["workload"]["optimizer_implementation"] == "foreach"
    assert any("in 16 bits alone" in line for line in found.listed)
    with pytest.raises(UserError, match=r"plan\.ep = 8: .* from distributed\.ep_size = 8"):
        imported(tmp_path, AUTOMODEL.replace("cp_size: 1", "ep_size: 8"), name="r.yaml")
    tables, _ = imported(tmp_path, AUTOMODEL.replace("cp_size: 1", "cp_size: 4"), name="r.yaml")
    assert (tables["plan"]["method"], tables["plan"]["cp"]) == ("zero3", 4)


@pytest.mark.parametrize(
    ("said", "instead", "reason"),
    [
        ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.3-70B-Instruct", "give the right one by --model"),
        ("TrainFinetuneRecipeForNextTokenPrediction", "TrainBiEncoderRecipe", "trains otherwise than one model"),
        ("torch_dtype: bf16", "torch_dtype: bf16\n  backend: {te_fp8: {recipe: mxfp8}}", "maps in 8 bits"),
        ("torch_dtype: bf16", "torch_dtype: bf16\n  config: {num_hidden_layers: 16}", "give the right one by --model"),
    ],
)
def test_automodels_other_models_recipes_and_maps_are_not_predicted_as_these(tmp_path, said, instead, reason):
    """A recipe of 70B parameters was read as a training of 8B, and one in 8 bits as one in bf16."""
    assert reason in refused(tmp_path, AUTOMODEL.replace(said, instead), name="r.yaml")


@pytest.mark.parametrize(("loss", "fused"), [("masked_ce.MaskedCrossEntropy", None), ("linear_ce.Fused", True)])
def test_automodels_loss_that_is_fused_with_the_head_makes_no_logits(tmp_path, loss, fused):
    """It was taken for a matter of numbers: gigabytes of logits were counted that it saves."""
    loss = f"nemo_automodel.components.loss.{loss}{'LinearCrossEntropy' if fused else ''}"
    tables, _ = imported(tmp_path, f"{AUTOMODEL}loss_fn: {{_target_: {loss}}}\n", name="r.yaml")
    assert tables["workload"].get("fused_loss") is fused


@pytest.mark.parametrize(
    ("model", "policy", "workload"),
    [
        ("torch_dtype: bf16", "", {"precision": "bf16", "reduce_precision": "fp32"}),
        ("torch_dtype: float32", "", {"precision": "bf16", "reduce_precision": "fp32"}),  # FSDP2 casts
        ("torch_dtype: float32", "{param_dtype: float32}", {"precision": "fp32", "reduce_precision": None}),
        (
            "torch_dtype: bf16",
            "{param_dtype: bfloat16, reduce_dtype: bfloat16}",
            {"precision": "bf16", "reduce_precision": None},
        ),
    ],
)
def test_automodels_fsdp2_has_its_own_precisions(tmp_path, model, policy, workload):
    text = AUTOMODEL.replace("torch_dtype: bf16", model)
    text = text.replace("cp_size: 1,", f"cp_size: 1, {'mp_policy: ' + policy + ',' if policy else ''}")
    tables, found = imported(tmp_path, text, name="r.yaml")
    assert {key: tables["workload"].get(key) for key in workload} == workload
    assert any("in 16 bits alone" in line for line in found.listed) == ("bf16" in model)


@pytest.mark.parametrize(("more", "reduced"), [("", None), (", grad_reduce_in_fp32: true", "fp32")])
def test_automodels_megatron_fsdp_reduces_in_the_precision_of_parameters_unless_told(tmp_path, more, reduced):
    text = AUTOMODEL.replace("strategy: fsdp2", f"strategy: megatron_fsdp{more}")
    text = text.replace("activation_checkpointing: true", "activation_checkpointing: full")
    tables, _ = imported(tmp_path, text, name="r.yaml")
    assert (tables["plan"]["method"], tables["plan"]["recompute"]) == ("zero3", "full")
    assert tables["workload"].get("reduce_precision") == reduced
    assert tables["workload"]["clip_norm"] == 1.0


def test_automodels_replicas_under_autocast(tmp_path):
    replicas = "{strategy: ddp, bucket_cap_mb: 50, static_graph: true, autocast_dtype: bfloat16, tp_size: 1"
    text = AUTOMODEL.replace("{strategy: fsdp2, dp_size: none, tp_size: 1", replicas)
    text = text.replace("torch_dtype: bf16", "torch_dtype: float32")
    for said, recompute in (("true", "full"), ("false", "none")):
        recipe = text.replace("checkpointing: true", f"checkpointing: {said}")
        tables, _ = imported(tmp_path, recipe, name="r.yaml")
        assert (tables["workload"]["precision"], tables["workload"]["autocast"]) == ("fp32", "bf16")
        assert (tables["plan"]["method"], tables["plan"]["bucket_bytes"]) == ("ddp", 50 * 2**20)
        assert tables["plan"]["recompute"] == recompute
    sharded = AUTOMODEL.replace("strategy: fsdp2", "strategy: fsdp2, autocast_dtype: bfloat16")
    assert "distributed.autocast_dtype" in refused(tmp_path, sharded, name="r.yaml")
    for key in ("enable_compile", "enable_async_tensor_parallel"):
        assert key in refused(tmp_path, AUTOMODEL.replace("tp_size", f"{key}: true, tp_size"), name="r.yaml")


def test_automodels_offloaded_parameters(tmp_path):
    policy = "offload_policy: {_target_: torch.distributed.fsdp.CPUOffloadPolicy}, tp_size"
    tables, _ = imported(tmp_path, AUTOMODEL.replace("tp_size", policy), name="r.yaml")
    assert tables["plan"]["offload"] == "parameters"


PEFT = "\npeft:\n  _target_: nemo_automodel.components._peft.lora.PeftConfig\n  dim: 16\n  use_triton: true\n{}\n"


@pytest.mark.parametrize(
    ("said", "targets"),
    [
        ("  target_modules: '*_proj'", "all-linear"),
        ("", "all-linear"),  # its default is *_proj
        ("  target_modules: ['*.q_proj', '*.v_proj']", "query-value"),
        ("  exclude_modules: ['*vision*', '*lm_head*']", "all-linear"),
        ("  match_all_linear: true", "all-linear"),
        ("  exclude_modules: ['*.out_proj']", None),
        ("  target_modules: ['*.layers.0.*_proj']", None),
        ("  target_modules: ['*.to_q']", None),
        ("  use_dora: true", None),
    ],
)
def test_automodels_adapters(tmp_path, said, targets):
    text = AUTOMODEL + PEFT.format(said)
    if targets is None:
        assert "peft." in refused(tmp_path, text, name="r.yaml")
        return
    tables, found = imported(tmp_path, text, name="r.yaml")
    assert tables["workload"]["adapters"] == {"rank": 16, "alpha": 32, "targets": targets}
    assert (tables["workload"]["precision"], tables["workload"].get("reduce_precision")) == ("bf16", None)
    assert any("adapter of the head" in line for line in found.listed) == ("match_all" in said)


AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
sequence_len: 8192
micro_batch_size: 1
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
datasets: [{path: x, type: alpaca}]
fsdp_version: 2
fsdp_config:
  offload_params: false
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  reshard_after_forward: true
"""


def test_axolotls_base_model_must_be_of_the_models_size(tmp_path):
    """Before, it was not compared with --model: a recipe of 70B parameters was read as a training of 8B."""
    said = "the model 'llama3-8b' has 8.03e9 parameters; give the right one by --model"
    assert said in refused(tmp_path, AXOLOTL.replace("Llama-3-8B", "Llama-3-70B"), name="x.yml")
    imported(tmp_path, AXOLOTL.replace("NousResearch/Meta-Llama-3-8B", "mine/of-no-said-size"), name="x.yml")
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 31}))
    here = AXOLOTL.replace("NousResearch/Meta-Llama-3-8B", "own")
    assert "the model 'llama3-8b' has layers = 32" in refused(tmp_path, here, name="x.yml")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 32}))
    imported(tmp_path, here, name="x.yml")


@pytest.mark.parametrize(
    ("name", "is_mixture"),
    [
        ("Mixtral-8x22B-v0.1", True),
        ("Qwen3-8B-A1B", True),
        ("Llama-4-Scout-17B-16E", True),
        ("a-8B-a1", False),
        ("on-8x8b/Llama-3-8B", False),
    ],
)
def test_a_mixture_by_its_name_takes_a_model_with_experts(tmp_path, name, is_mixture):
    """Names such as 8x22B say no number of all parameters, so that any model was taken for them."""
    text = AXOLOTL.replace("Meta-Llama-3-8B", name)
    if is_mixture:
        assert "the model 'llama3-8b' has no routed experts" in refused(tmp_path, text, name="x.yml")
    else:
        imported(tmp_path, text, name="x.yml")


def test_axolotl_offloads_what_fsdp_shards(tmp_path):
    tables, _ = imported(tmp_path, AXOLOTL.replace("offload_params: false", "offload_params: true"), name="x.yml")
    assert (tables["plan"]["method"], tables["plan"]["offload"]) == ("zero3", "parameters")


@pytest.mark.parametrize(
    ("change", "workload"),
    [
        ("bf16: auto\ntf32: true", {"precision": "bf16"}),  # weights are loaded in it, and no fp32 copies are made
        ("bf16: auto\nmax_grad_norm: 0.5", {"precision": "bf16", "clip_norm": 0.5}),
        ("bf16: false\ntf32: true", {"precision": "fp32", "tf32": True}),
    ],
)
def test_axolotls_replicas_are_in_one_precision_and_the_trainer_clips(tmp_path, change, workload):
    text = AXOLOTL[: AXOLOTL.index("fsdp_version")].replace("bf16: auto", change)
    tables, found = imported(tmp_path, text, name="x.yml")
    assert tables["plan"]["method"] == "ddp"
    keys = ("precision", "autocast", "tf32", "clip_norm")
    said = {key: tables["workload"][key] for key in keys if key in tables["workload"]}
    assert said == {"clip_norm": 1.0} | workload
    assert any("in 16 bits alone" in line for line in found.listed) == (workload["precision"] == "bf16")


def test_axolotl(tmp_path):
    tables, _ = imported(tmp_path, AXOLOTL, name="x.yml")
    assert tables["plan"] == {"method": "zero3", "micro_batches": 2, "recompute": "full", "gradient_sync": "step"}
    assert tables["workload"]["global_batch_size"] == 16
    assert "adapter" in refused(tmp_path, AXOLOTL + "adapter: qlora\n", name="x.yml")
    assert "needs lora_r" in refused(tmp_path, AXOLOTL + "adapter: lora\n", name="x.yml")
    lora = "adapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05\n"
    tables, found = imported(tmp_path, AXOLOTL + lora + "lora_target_linear: true\n", name="x.yml")
    assert tables["workload"]["adapters"] == {"rank": 32, "alpha": 16, "targets": "all-linear"}
    assert any("masks of dropout" in line for line in found.listed)
    tables, _ = imported(tmp_path, AXOLOTL + lora + "lora_target_modules: [q_proj, v_proj]\n", name="x.yml")
    assert tables["workload"]["adapters"]["targets"] == ["q_proj", "v_proj"]
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    without = AXOLOTL[: AXOLOTL.index("fsdp_version")]
    tables, _ = imported(tmp_path, without + "deepspeed: ds.json\n", name="x.yml")
    assert tables["plan"]["method"] == "zero1"


QLORA = """
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
"""


@pytest.mark.parametrize(
    ("lines", "form"),
    [
        ("load_in_4bit: true", "nf4-double"),
        ("load_in_4bit: true\nbnb_config_kwargs:\n  bnb_4bit_use_double_quant: false", "nf4"),
        ("load_in_8bit: true\nload_in_4bit: false", "int8"),
        ("load_in_4bit: false", None),
    ],
)
def test_axolotls_quantized_weights_under_adapters(tmp_path, lines, form):
    tables, _ = imported(tmp_path, f"{AXOLOTL}{QLORA}{lines}", name="x.yml")
    assert tables["workload"].get("frozen_precision") == form
    assert tables["workload"]["adapters"] == {"rank": 32, "alpha": 16.0, "targets": "all-linear"}
    if form is not None:
        assert "without adapters" in refused(tmp_path, f"{AXOLOTL}{lines}", name="x.yml")


def test_another_format_of_4_bits_is_refused_in_axolotls_files(tmp_path):
    """It was listed as without effect, and predicted as nf4."""
    lines = "load_in_4bit: true\nbnb_config_kwargs:\n  bnb_4bit_quant_type: fp4\n"
    assert "4 bits are nf4 here" in refused(tmp_path, f"{AXOLOTL}{QLORA}{lines}", name="x.yml")
    imported(tmp_path, f"{AXOLOTL}{QLORA}{lines}".replace("fp4", "nf4"), name="x.yml")


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ("adamw_bnb_8bit", "8-bit"),
        ("adamw_torch_8bit", "8-bit"),
        ("adamw_torch_4bit", "4-bit"),
        ("paged_adamw_32bit", None),
    ],
)
def test_optimizers_of_bitsandbytes_and_torchao(tmp_path, optimizer, precision):
    text = AXOLOTL.replace("adamw_torch_fused", optimizer)
    tables, found = imported(tmp_path, text, name="x.yml")
    workload = tables["workload"]
    assert (workload["optimizer"], workload["optimizer_implementation"]) == ("adamw", "fused")
    assert workload.get("optimizer_state_precision") == precision
    assert any("paged state" in line for line in found.listed) == ("paged" in optimizer)
    tables, _ = imported(tmp_path, text, name="x.yml", overrides=["workload.optimizer=sgd"])
    assert "optimizer_state_precision" not in tables["workload"]


def test_a_loss_that_a_plugin_fuses(tmp_path):
    plugin = "\nplugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
    assert imported(tmp_path, AXOLOTL + plugin, name="x.yml")[0]["workload"]["fused_loss"]
    off = f"{AXOLOTL}{plugin}\ncut_cross_entropy: false"
    assert "fused_loss" not in imported(tmp_path, off, name="x.yml")[0]["workload"]
    liger = plugin.replace("cut_cross_entropy.CutCrossEntropyPlugin", "liger.LigerPlugin")
    fused = f"{AXOLOTL}{liger}\nliger_fused_linear_cross_entropy: true"
    assert imported(tmp_path, fused, name="x.yml")[0]["workload"]["fused_loss"]
    assert "liger_rms_norm" in refused(tmp_path, f"{fused}\nliger_rms_norm: true", name="x.yml")
    other = plugin.replace("axolotl.integrations.cut_cross_entropy", "my.own")
    assert "what my.own.CutCrossEntropyPlugin changes is not known" in refused(tmp_path, AXOLOTL + other, name="x.yml")


def test_axolotl_fills_in_its_deepspeed_file(tmp_path):
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    auto |= {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    file = auto | {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "communication_data_type": "fp32"}
    (tmp_path / "ds.json").write_text(json.dumps(file))
    text = AXOLOTL[: AXOLOTL.index("fsdp_version")] + "deepspeed: ds.json\nmax_grad_norm: 0.5\n"
    tables, found = imported(tmp_path, text, name="x.yml")
    assert (tables["plan"]["method"], tables["plan"]["micro_batches"]) == ("zero3", 2)
    workload = {"precision": "bf16", "reduce_precision": "fp32", "clip_norm": 0.5, "global_batch_size": 16}
    assert {key: tables["workload"].get(key) for key in workload} == workload
    assert any(line.startswith("ds.json: train_batch_size") for line in found.listed)
    (tmp_path / "ds.json").write_text(json.dumps(file | {"gradient_accumulation_steps": 4}))
    assert "contradicts gradient_accumulation_steps = 2" in refused(tmp_path, text, name="x.yml")
    (tmp_path / "ds.json").write_text(json.dumps(file | {"sequence_parallel_size": 2}))
    assert "sequence_parallel_size = 2 contradicts" in refused(tmp_path, text, name="x.yml")
    (tmp_path / "ds.json").write_text(json.dumps(file | {"zero_optimization": {"stage": 0}}))
    tables, _ = imported(tmp_path, text.replace("checkpointing: true", "checkpointing: false"), name="x.yml")
    assert (tables["plan"]["method"], tables["workload"]["precision"]) == ("ddp", "bf16")


@pytest.mark.parametrize("key", ["context_parallel_size: 4", "sequence_parallel_degree: 4"])
def test_axolotls_context_parallelism_is_a_ring(tmp_path, key):
    more = f"{key}\nring_attn_func: varlen_llama3\nheads_k_stride: 1\ndp_shard_size: 2\n"
    tables, found = imported(tmp_path, AXOLOTL + more, name="x.yml")
    plan = {"method": "zero3", "cp": 4, "context_exchange": "ring"}
    assert {name: tables["plan"].get(name) for name in plan} == plan
    assert any(line.startswith("ring_attn_func") and "approximated" in line for line in found.listed)
    adapters = "adapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n"
    tables, _ = imported(tmp_path, AXOLOTL + more + adapters, name="x.yml")
    assert {name: tables["plan"].get(name) for name in plan} == plan
    assert tables["workload"]["adapters"] == {"rank": 32, "alpha": 16, "targets": "all-linear"}


def test_axolotls_adapters_beside_tensor_parallelism(tmp_path):
    adapters = "adapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n"
    tables, found = imported(tmp_path, f"{AXOLOTL}{adapters}tensor_parallel_size: 2\n", name="x.yml")
    assert (tables["plan"]["tp"], tables["workload"]["adapters"]["rank"]) == (2, 32)
    assert any(line.startswith("tensor_parallel_size") and "slices" in line for line in found.listed)


def test_recipes_of_mixtures_with_adapters_divide_the_experts(tmp_path):
    recipe = AUTOMODEL.replace("cp_size: 1", "ep_size: 2").replace(
        "meta-llama/Meta-Llama-3-8B", "a/mixture"
    ) + PEFT.format("  target_modules: ['*.q_proj', '*.v_proj']")
    plugin = "plugins: [axolotl.integrations.expert_parallel.ExpertParallelPlugin]\n"
    lora = "adapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_target_modules: [q_proj, v_proj]\n"
    config = f"{AXOLOTL}{plugin}{lora}experts_implementation: grouped_mm\nexpert_parallel_size: 2\ndp_shard_size: 4\n"
    config = config.replace("NousResearch/Meta-Llama-3-8B", "a/mixture")
    for name, text in (("r.yaml", recipe), ("x.yml", config)):
        for model in ("qwen3-30b-a3b", "mixtral-8x7b"):
            tables, _ = imported(tmp_path, text, name=name, model=model)
            assert (tables["plan"]["method"], tables["plan"]["ep"]) == ("zero3", 2)
            adapters = dict(tables["workload"]["adapters"])
            assert adapters.pop("targets") in ("query-value", ["q_proj", "v_proj"])
            assert adapters == {"rank": 16, "alpha": 32}


def test_axolotls_experts_are_divided_beside_its_shards(tmp_path):
    plugin = (
        "plugins: [axolotl.integrations.expert_parallel.ExpertParallelPlugin]\nexperts_implementation: grouped_mm\n"
    )
    text = f"{AXOLOTL}{plugin}expert_parallel_size: 2\ndp_shard_size: 4\n"
    text = text.replace("NousResearch/Meta-Llama-3-8B", "Qwen/Qwen3-30B-A3B")
    tables, found = imported(tmp_path, text, name="x.yml", model="qwen3-30b-a3b")
    plan = {"method": "zero3", "ep": 2, "dp_replicate": None}  # all else is sharded over both axes
    assert {name: tables["plan"].get(name) for name in plan} == plan
    assert any(line.startswith("expert_parallel_size") and "DeepEP" in line for line in found.listed)
    for other in ("tensor_parallel_size", "context_parallel_size"):
        said = refused(tmp_path, f"{text}{other}: 2\n", name="x.yml", model="qwen3-30b-a3b")
        assert said.startswith(f"{other} = 2: ") or f": {other} = 2: " in said
    fused = text.replace("grouped_mm", "scattermoe")
    assert "kernels of experts" in refused(tmp_path, fused, name="x.yml", model="qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["head", "blocks.[45].", "norm"], ["tokens", *(f"blocks.{i}" for i in range(4))]),
        (["^tokens.weight$[:32]", "^positions.weight$[5]", "blocks", "^head.weight$"], ["norm"]),
        ([".+"], []),
        (["blocks.0.attention_norm"], None),  # a part of a block
        (["nothing"], None),
        (["blocks.(["], None),
    ],
)
def test_axolotls_unfrozen_parameters(tmp_path, patterns, frozen):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    text = (
        AXOLOTL[: AXOLOTL.index("fsdp_version")]
        .replace("8192", "128")
        .replace("checkpointing: true", "checkpointing: false")
        .replace("NousResearch/Meta-Llama-3-8B", "mine/gpt-byte-10m")
    )
    text += f"deepspeed: ds.json\nunfrozen_parameters: {json.dumps(patterns)}\n"
    if frozen is None:
        assert "unfrozen_parameters" in refused(tmp_path, text, name="x.yml", model="gpt-byte-10m")
        return
    tables, found = imported(tmp_path, text, name="x.yml", model="gpt-byte-10m")
    assert tables["workload"].get("frozen", []) == frozen
    assert any("freezes no parameter" in line for line in found.listed) == (not frozen)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("quantize_moe_experts: true", "quantized"),
        ("use_scattermoe: true", "kernels of experts"),
        ("fused_attn_kernel: true", "fused kernels"),
        (
            "adapter: lora\nlora_r: 8\nlora_target_linear: true\nlora_target_parameters: [mlp.experts]",
            "lora_target_par",
        ),
        ("freeze_mm_modules: true", "--set workload.frozen"),
        ("context_parapllel_size: 2", "unknown key"),
    ],
)
def test_axolotls_keys_that_change_the_answer_are_refused(tmp_path, line, said):
    assert said in refused(tmp_path, f"{AXOLOTL}{line}\n", name="x.yml")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ignored_modules: [lm_head]", "left out"),
        ("min_num_params: 1000", "units by size"),
        ("unheard: 5", "unknown key"),
        ("mixed_precision_policy: fp16", "contradicts"),
        ("offload_params: true\n  cpu_offload_pin_memory: false", "pinned"),
    ],
)
def test_axolotls_keys_of_fsdp_that_change_the_answer_are_refused(tmp_path, line, said):
    assert said in refused(tmp_path, AXOLOTL.replace("offload_params: false", line), name="x.yml")


def test_axolotls_other_keys_of_fsdp(tmp_path):
    more = "fsdp_version: 2\n  mixed_precision_policy: bf16\n  cpu_offload_pin_memory: true\n  final_state_dict_type: X"
    text = (
        AXOLOTL.replace("fsdp_version: 2\n", "")
        .replace("offload_params: false", more)
        .replace("reshard_after_forward: true", "reshard_after_forward: no")
    )
    tables, found = imported(tmp_path, text, name="x.yml")
    assert tables["plan"]["method"] == "zero2"  # read although a key beside it has a prefix
    assert not any("off" in line.rpartition(": ")[2] for line in found.listed if "fsdp_config" in line)
    without = AXOLOTL[: AXOLOTL.index("fsdp_version")]
    _, found = imported(tmp_path, without + "fsdp_config: {unheard: }\nfsdp_final_state_dict_type: X\n", name="x.yml")
    assert sum("fsdp" in line for line in found.listed) == 2


def test_axolotls_other_keys(tmp_path):
    more = "use_scattermoe: false\nmodel_config: {output_router_logits: true}\nloraplus_lr_ratio: 2\nuse_wandb: false\n"
    more += (
        "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\nddp: false\ntorch_dtype: bf16\n"
    )
    tables, _ = imported(tmp_path, AXOLOTL + more, name="x.yml")
    assert "gradient_sync" not in tables["plan"]  # the method's own: after each micro-batch
    without = AXOLOTL[: AXOLOTL.index("fsdp_version")].replace("checkpointing: true", "checkpointing: false")
    tables, _ = imported(tmp_path, without + "ddp_bucket_cap_mb: 10\n", name="x.yml")
    assert tables["plan"]["bucket_bytes"] == 10 * 2**20


FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
do_train: true
finetuning_type: full
cutoff_len: 4096
template: llama3
output_dir: saves/full
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
bf16: true
ddp_timeout: 180000000
"""
RECIPE = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
torch_dtype: bfloat16
dataset_name: a/b
max_length: 2048
bf16: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
per_device_train_batch_size: 4
max_grad_norm: 0.2
seed: 42
"""


def subset(table, keys):
    return {key: table.get(key) for key in keys}


def test_trainers_arguments_of_llama_factory(tmp_path):
    """Before, these files were refused with a pointer at the DeepSpeed file, which says neither batch nor method."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "recipes").mkdir()
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    auto |= {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
    (tmp_path / "configs" / "ds.json").write_text(json.dumps(auto))  # relative to the project, not to the file
    text = f"{FACTORY}deepspeed: configs/ds.json\n"
    tables, _ = imported(tmp_path / "recipes", text, name="x.yaml")
    assert tables["plan"] == {"method": "zero3", "micro_batches": 4, "recompute": "full"}
    workload = {"global_batch_size": 64, "sequence_length": 4096, "precision": "bf16", "clip_norm": 1.0}
    workload |= {"optimizer": "adamw", "optimizer_implementation": "fused", "autocast": None}
    assert subset(tables["workload"], workload) == workload
    (tmp_path / "configs" / "ds.json").write_text(json.dumps(auto | {"optimizer": {"type": "Adam"}}))
    tables, _ = imported(tmp_path / "recipes", f"{text}optim: sgd\n", name="x.yaml")
    assert tables["workload"]["optimizer"] == "adamw"  # the engine's own takes the place of the Trainer's
    (tmp_path / "configs" / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    tables, _ = imported(tmp_path / "recipes", text, name="x.yaml")
    assert "clip_norm" not in tables["workload"]  # the engine clips, and is not told to
    (tmp_path / "configs" / "ds.json").write_text(json.dumps(auto | {"bf16": {"enabled": True}}))
    other = text.replace("bf16: true", "bf16: false")
    assert "bf16.enabled = true contradicts the recipe: fp32" in refused(tmp_path / "recipes", other, name="x.yaml")
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "configs" / "ds.json").write_text(json.dumps(auto | {"zero_optimization": offload}))
    recipe = "dataset_num_proc: 4\nmodel_name_or_path: meta-llama/Meta-Llama-3-8B\ndeepspeed: configs/ds.json\n"
    tables, _ = imported(tmp_path / "recipes", recipe, name="x.yaml")  # TRL's default is bf16
    assert (tables["workload"]["precision"], tables["plan"]["offload"]) == ("bf16", "optimizer")
    assert "no such file" in refused(tmp_path, f"{FACTORY}deepspeed: none.json\n", name="x.yaml")


@pytest.mark.parametrize(
    ("change", "workload"),
    [
        ("", {"precision": "fp32", "autocast": "bf16"}),  # trained weights are cast to fp32
        ("pure_bf16: true", {"precision": "bf16", "autocast": None}),
        ("bf16: false\ntf32: true", {"precision": "fp32", "autocast": None, "tf32": True}),
    ],
)
def test_precision_of_llama_factorys_replicas(tmp_path, change, workload):
    text = FACTORY.replace("bf16: true", change) if "bf16: false" in change else f"{FACTORY}{change}\n"
    tables, found = imported(tmp_path, text, name="x.yaml")
    assert tables["plan"]["method"] == "ddp"
    assert subset(tables["workload"], workload) == workload
    assert any("Accelerate file" in line for line in found.listed)


@pytest.mark.parametrize(
    ("lines", "adapters", "form"),
    [
        ("", {"rank": 8, "alpha": 16, "targets": "all-linear"}, None),
        ("lora_rank: 4\nlora_target: q_proj,v_proj", {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}, None),
        ("lora_alpha: 4\nquantization_bit: 4", {"rank": 8, "alpha": 4, "targets": "all-linear"}, "nf4-double"),
        ("quantization_bit: 4\ndouble_quantization: false", {"rank": 8, "alpha": 16, "targets": "all-linear"}, "nf4"),
        ("quantization_bit: 8\nlora_target: all", {"rank": 8, "alpha": 16, "targets": "all-linear"}, "int8"),
    ],
)
def test_adapters_of_llama_factory(tmp_path, lines, adapters, form):
    text = FACTORY.replace("finetuning_type: full", "finetuning_type: lora")
    tables, _ = imported(tmp_path, f"{text}{lines}\n", name="x.yaml")
    assert (tables["workload"]["adapters"], tables["workload"].get("frozen_precision")) == (adapters, form)
    assert tables["workload"]["precision"] == "bf16"


@pytest.mark.parametrize(
    ("lines", "trained"),
    [
        ("", ["blocks.4", "blocks.5", "head"]),
        ("freeze_trainable_layers: -1\n", ["blocks.0", "head"]),
        ("freeze_trainable_layers: 1\nfreeze_trainable_modules: attention\n", None),  # a part of a block
    ],
)
def test_frozen_blocks_of_llama_factory(tmp_path, lines, trained):
    text = FACTORY.replace("finetuning_type: full", "finetuning_type: freeze").replace("4096", "128")
    text = text.replace("meta-llama/Meta-Llama-3-8B", "mine/gpt-byte-10m") + "disable_gradient_checkpointing: true\n"
    if trained is None:
        assert "of a layer some parameters alone" in refused(
            tmp_path, text + lines, name="x.yaml", model="gpt-byte-10m"
        )
        return
    tables, _ = imported(tmp_path, f"{text}{lines}freeze_extra_modules: head\n", name="x.yaml", model="gpt-byte-10m")
    layers = ["tokens", *(f"blocks.{number}" for number in range(6)), "norm", "head"]
    assert [each for each in layers if each not in tables["workload"]["frozen"]] == trained


def test_trainers_arguments_of_recipes(tmp_path):
    tables, found = imported(tmp_path, RECIPE, name="x.yaml")
    assert tables["plan"] == {"method": "ddp", "micro_batches": 1, "recompute": "full"}
    workload = {"global_batch_size": 32, "sequence_length": 2048, "precision": "bf16", "autocast": None}
    assert subset(tables["workload"], workload) == workload
    assert any("in 16 bits alone" in line for line in found.listed)
    tables, _ = imported(tmp_path, RECIPE.replace("torch_dtype: bfloat16", ""), name="x.yaml")
    assert subset(tables["workload"], ("precision", "autocast")) == {"precision": "fp32", "autocast": "bf16"}
    assert "torch_dtype" in refused(tmp_path, RECIPE.replace("bfloat16", "auto"), name="x.yaml")
    imported(tmp_path, RECIPE.replace("bfloat16", "auto"), name="x.yaml", overrides=["workload.precision=bf16"])
    few = "dataset_num_proc: 4\nmodel_name_or_path: meta-llama/Meta-Llama-3-8B\n"
    tables, _ = imported(tmp_path, few, name="x.yaml")  # TRL's defaults
    assert tables["plan"]["recompute"] == "full"
    assert subset(tables["workload"], ("global_batch_size", "sequence_length")) == {
        "global_batch_size": 64,
        "sequence_length": 1024,
    }
    assert tables["workload"]["autocast"] == "bf16"
    few = {"per_device_train_batch_size": 1, "model_name_or_path": "a/b", "block_size": 512}
    tables, _ = imported(tmp_path, few, name="x.json")  # those of the scripts of transformers
    assert tables["plan"]["recompute"] == "none"
    assert subset(tables["workload"], ("precision", "autocast")) == {"precision": "fp32", "autocast": None}
    lora = f"{RECIPE}use_peft: true\nload_in_4bit: true\n"
    assert "needs lora_target_modules" in refused(tmp_path, lora, name="x.yaml")
    tables, _ = imported(tmp_path, f"{lora}lora_target_modules: all-linear\nlora_r: 64\n", name="x.yaml")
    assert tables["workload"]["adapters"] == {"rank": 64, "alpha": 32, "targets": "all-linear"}
    assert tables["workload"]["frozen_precision"] == "nf4"


@pytest.mark.parametrize(
    ("fsdp", "method"),
    [
        ("fsdp: full_shard auto_wrap\n", "zero3"),
        ("fsdp: [shard_grad_op, auto_wrap]\nfsdp_config: {transformer_layer_cls_to_wrap: X}\n", "zero2"),
        ("fsdp: full_shard auto_wrap\nfsdp_config: {version: 2, reshard_after_forward: false}\n", "zero2"),
        ("fsdp: full_shard auto_wrap offload\nfsdp_config: f.json\n", "zero3"),
        ("fsdp: full_shard auto_wrap\nfsdp_config: {version: 2}\n", "zero2"),  # its own default of FSDP2
        ("fsdp: shard_grad_op auto_wrap\nfsdp_config: {reshard_after_forward: FULL_SHARD}\n", "zero2"),
        ("fsdp: full_shard\n", "the whole model is one unit"),
        ("fsdp: true\n", "the whole model is one unit"),
        ("fsdp: full_shard auto_wrap '3'\n", "what '3' does"),
        ("fsdp: full_shard auto_wrap\nfsdp_config: {xla: true}\n", "XLA"),
        ("fsdp: full_shard auto_wrap\nfsdp_config: g.json\n", "no such file"),
    ],
)
def test_the_trainers_fsdp(tmp_path, fsdp, method):
    (tmp_path / "f.json").write_text(json.dumps({"fsdp_transformer_layer_cls_to_wrap": ["X"]}))
    text = f"{RECIPE}{fsdp}gradient_accumulation_steps: 2\n"
    if not method.startswith("zero"):
        assert method in refused(tmp_path, text, name="x.yaml")
        return
    tables, found = imported(tmp_path, text, name="x.yaml")
    plan = {"method": method, "gradient_sync": "step", "offload": "parameters" if "offload" in fsdp else None}
    assert subset(tables["plan"], plan) == plan
    assert tables["workload"]["precision"] == "bf16"
    assert any("gathers parameters once more" in line for line in found.listed) == (method == "zero3")


def test_the_trainers_arguments_in_a_script(tmp_path):
    """Before, they were refused: only Megatron-LM's were read from scripts."""
    text = "B=2\ntorchrun --nproc_per_node=4 train.py --model_name_or_path a/b --per_device_train_batch_size $B \\\n"
    text += '  --bf16 True --fsdp "full_shard auto_wrap" --model_max_length 1024 --gradient_checkpointing True'
    tables, _ = imported(tmp_path, text, name="x.sh")
    assert subset(tables["plan"], ("method", "ranks", "recompute")) == {
        "method": "zero3",
        "ranks": 4,
        "recompute": "full",
    }
    workload = {"global_batch_size": 8, "sequence_length": 1024, "precision": "bf16"}
    assert subset(tables["workload"], workload) == workload
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}))
    text = "deepspeed train.py --deepspeed ds.json --per_device_train_batch_size 1 --bf16 --model_max_length 512"
    tables, _ = imported(tmp_path, text, name="x.sh")
    assert (tables["plan"]["method"], tables["workload"]["precision"]) == ("zero2", "bf16")
    text = "accelerate launch --config_file zero3.yaml train.py --per_device_train_batch_size 1 --bf16 True"
    assert "how the training is sharded" in refused(tmp_path, text, name="x.sh")
    text = "torchrun --nproc_per_node=$GPUS train.py --per_device_train_batch_size 1"
    assert "nproc_per_node" in refused(tmp_path, text, name="x.sh")


def test_axolotls_options_of_fsdp(tmp_path):
    """Before, `shard_grad_op` in the key fsdp was taken for `full_shard`."""
    without = AXOLOTL[: AXOLOTL.index("fsdp_version")]
    tables, _ = imported(tmp_path, f"{without}fsdp: [shard_grad_op, auto_wrap]\n", name="x.yml")
    assert tables["plan"]["method"] == "zero2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FACTORY.replace("stage: sft", "stage: dpo"), "a reference model"),
        (FACTORY.replace("stage: sft", "stage: ppo"), "reinforcement learning"),
        (FACTORY.replace("do_train: true", ""), "nothing is trained"),
        ("model_name_or_path: a/b\ntemplate: llama3\ninfer_backend: vllm\n", "nothing is trained"),
        (FACTORY.replace("finetuning_type: full", "finetuning_type: oft"), "adapters of this kind"),
        (f"{FACTORY}quantization_bit: 4\n", "under adapters"),
        (f"{FACTORY}flash_attn: disabled\n", "attention whose scores are kept"),
        (f"{FACTORY}enable_liger_kernel: true\n", "fused kernels"),
        (f"{FACTORY}optim: adafactor\n", "no such optimizer here"),
        (f"{FACTORY}use_galore: true\n", "no such optimizer here"),
        (f"{FACTORY}fp16: true\n", "contradicts bf16"),
        (f"{FACTORY}ddp_backend: gloo\n", "the backend of --cluster is nccl"),
        (f"{FACTORY}use_cpu: true\n", "trains on processors"),
        (f"{FACTORY}unheard_of: 3\n", "unknown key"),
        (f"{RECIPE}beta: 0.1\n", "a reference model"),
        (f"{RECIPE}num_generations: 8\n", "reinforcement learning"),
        (f"{RECIPE}torch_compile: true\n", "the whole model is compiled"),
        (f"{RECIPE}load_in_8bit: true\n", "without adapters"),
        (
            f"{RECIPE}use_peft: true\nlora_target_modules: all-linear\nload_in_8bit: true\nload_in_4bit: true\n",
            "contradicts",
        ),
        (f"{RECIPE}lora_r: 8\n", "up to use_peft"),
        (f"{RECIPE}auto_find_batch_size: true\n", "batch that it finds"),
        (RECIPE.replace("max_length: 2048", "max_length: null"), "of no limit"),
        (RECIPE.replace("bf16: true", "fp16: true").replace("bfloat16", "float16"), "scales no loss"),
        (RECIPE.replace("Meta-Llama-3-8B", "Meta-Llama-3-70B"), "give the right one by --model"),
    ],
)
def test_the_trainers_keys_that_change_the_answer_are_refused(tmp_path, text, said):
    assert said in refused(tmp_path, text, name="x.yaml")


@pytest.mark.parametrize("name", ["train.sh", "x.yaml"])
def test_hosts_without_their_processes_say_no_number_of_ranks(tmp_path, name):
    """A number of hosts alone was read, and neither used nor listed."""
    if name == "x.yaml":
        tables, found = imported(tmp_path, f"{RECIPE}nnodes: 2\n", name=name)
    else:
        text = (
            "torchrun --nnodes=2 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --seq-length 128 --bf16\n"
        )
        tables, found = imported(tmp_path, text, name=name)
    assert "ranks" not in tables["plan"]
    assert any(line.startswith("nnodes = ") and "the devices of --cluster" in line for line in found.listed)


def test_a_trainers_script_may_evaluate_too(tmp_path):
    """Only of Megatron-LM's programs some take a training's options and train nothing."""
    text = "torchrun train_and_evaluate.py --per_device_train_batch_size 1 --bf16 True --model_max_length 512\n"
    assert imported(tmp_path, text, name="x.sh")[0]["workload"]["global_batch_size"] == 8


def test_a_name_of_a_model_that_is_no_name_of_a_file_is_no_folder(tmp_path):
    """It was an error of the operating system: the name is too long."""
    imported(tmp_path, RECIPE.replace("meta-llama/Meta-Llama-3-8B", "a" * 300), name="x.yaml")


def test_the_trainers_ranks_and_loss(tmp_path):
    tables, _ = imported(tmp_path, f"{FACTORY}ray_num_workers: 4\n", name="x.yaml")
    assert (tables["plan"]["ranks"], tables["workload"]["global_batch_size"]) == (4, 32)
    tables, _ = imported(tmp_path, f"{RECIPE}loss_type: chunked_nll\n", name="x.yaml")
    assert tables["workload"]["fused_loss"]


def test_a_config_of_hugging_face_names_the_shipped_model(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tables, _ = imported(tmp_path, DEEPSPEED, name="ds.json", model=str(tmp_path / "config.json"))
    assert tables["workload"]["model"] == "llama3-8b"
    for longest, name in ((8192, "llama3-8b"), (131072, "llama3.1-8b"), (10**6, "llama3.1-8b")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
        tables, _ = imported(tmp_path, DEEPSPEED, name="ds.json", model=str(tmp_path / "config.json"))
        assert tables["workload"]["model"] == name
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match="no shipped model is a llama"):
        imported(tmp_path, DEEPSPEED, name="ds.json", model=str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 33}))
    with pytest.raises(UserError, match=r"gsreal trace \S*config\.json --out FILE"):
        imported(tmp_path, DEEPSPEED, name="ds.json", model=str(tmp_path / "config.json"))


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10))
HOSTILE = {
    "laughs.yaml": LAUGHS,
    "merges.yaml": MERGES,
    "itself.yaml": "distributed_type: &a [*a]\n",
    "class.yaml": "distributed_type: !!python/object/apply:os.system ['true']\n",
    "deep.yaml": "[" * 5000,
    "deep.json": "[" * 100_000,
    "deep.toml": "a = " + "[" * 5000,
    "truncated.json": json.dumps(DEEPSPEED)[:-9],
    "twice.json": '{"train_batch_size": 8, "train_batch_size": 16}',
    "list.json": "[1, 2]",
    "empty.yaml": "",
    "digits.json": '{"train_batch_size": ' + "9" * 6000 + "}",
    "infinite.json": '{"train_batch_size": Infinity, "zero_optimization": {"stage": NaN}}',
    "scenario.toml": '[plan]\nmethod = "ddp"\n[cluster]\n',
    "script.sh": "echo hello\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_one_line(tmp_path, name):
    with pytest.raises(UserError) as caught:
        imported(tmp_path, HOSTILE[name], name=name)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_large_files_are_not_read(tmp_path):
    for name in ("large.json", "large.yaml"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(100_000_000)
        with pytest.raises(UserError, match="larger than"):
            limits.read_bounded(tmp_path / name)
    with pytest.raises(UserError, match="larger than"):
        limits.parsed_yaml("#" * (limits.MOST_YAML_BYTES + 1), file="x")


def test_damaged_files_are_read_or_refused(tmp_path):
    """A small fuzz: bytes of good files are cut, doubled and replaced; none ends in another error."""
    random_ = random.Random(0)
    files = {"ds.json": json.dumps(DEEPSPEED, indent=1), "a.yaml": FSDP.format(reshard="true", more="")}
    files |= {
        "t.toml": TITAN.format(batch=16, replicate=1, shard=-1, reshard="never", mode="none"),
        "r.yaml": AUTOMODEL,
    }
    files |= {"train.sh": MEGATRON, "x.yml": AXOLOTL}
    outcomes = set()
    for turn in range(120):
        name = random_.choice(sorted(files))
        text = files[name]
        for _ in range(random_.randint(1, 3)):
            at, length = random_.randrange(len(text)), random_.randint(1, 12)
            piece = random_.choice(
                ["", text[at : at + length] * 2, "[", "{", "null", "-1", "1e400", "auto", ": ", "\x00"]
            )
            text = text[:at] + piece + text[at + length :]
        said = ""
        try:
            imported(tmp_path, text, name=name, model="gpt3-1.3b" if name == "train.sh" else "llama3-8b")
        except UserError as error:
            said = str(error)
        assert "\n" not in said, (turn, name)
        outcomes.add(bool(said))
    assert outcomes == {True, False}


def test_the_command_writes_nothing_where_a_key_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED | {"one": 1, "two": 2}))
    options = ("--model", "llama3-8b", "--cluster", str(ROOT / EIGHT), "--out", "made.toml")
    ended = commands.run("gssim", "import", "ds.json", *options, folder=tmp_path)
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    assert [line.split(": ")[2] for line in lines] == ["refused", "refused", "one = 1"]
    assert not (tmp_path / "made.toml").exists()
    ended = commands.run("gssim", "import", "ds.json", *options, "--ignore", "one", "--ignore", "two", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "default: workload.sequence_length" in ended.stderr
    ended = commands.run("gssim", "check", "made.toml", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_a_megatron_job_in_three_dimensions_is_imported_and_predicted(tmp_path):
    """Tensor with sequence parallelism, stages that share an embedding, the distributed optimizer: what people run."""
    words = """pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16 --lr 1.5e-4
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
    --tp-comm-overlap"""
    path = tmp_path / "job.sh"
    path.write_text(f"torchrun {' '.join(words.split())}\n")
    found = import_scenario(
        path,
        model="gpt3-1.3b",
        cluster=ROOT / "scenarios/clusters/two-dgx-h100.toml",
        overrides=[],
        out=tmp_path / "job.toml",
    )
    plan = tomllib.loads(found.text)["plan"]
    assert plan["method"] == "zero1"
    assert [plan[key] for key in ("tp", "pp", "micro_batches", "sequence_parallel")] == [2, 2, 8, True]
    assert (plan["zero1_implementation"], plan["gathered_inputs"]) == ("megatron", "gathered-again")
    assert plan["tp_overlap"] is True
    assert tomllib.loads(found.text)["workload"]["clip_norm"] == 1.0
    (tmp_path / "job.toml").write_text(found.text)
    result = simulate(load_scenario(tmp_path / "job.toml", ["plan.micro_batches=2"])).result
    kinds = {entry.kind for entry in result.collectives}
    assert {"all-gather", "reduce-scatter", "all-reduce", "send"} <= kinds


# Experts beside tensor ranks ------------------------------------------------------------------------------------------

TITAN_EXPERTS = """
[training]
local_batch_size = 2
seq_len = 4096
[activation_checkpoint]
mode = "none"
[parallelism]
tensor_parallel_degree = 2
expert_parallel_degree = 4
"""
MEGATRON_EXPERTS = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --num-experts 8 --moe-router-topk 2 --seq-length 4096 --micro-batch-size 1 "
    "--global-batch-size 16 --nproc-per-node 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
    "--sequence-parallel --bf16 --use-distributed-optimizer --moe-token-dispatcher-type alltoall "
    "--untie-embeddings-and-output-weights"
)


@pytest.mark.parametrize("said", ["", "expert_tensor_parallel_degree = 1\n"])
def test_torchtitans_experts_are_divided_among_tensor_ranks_too(tmp_path, said):
    tables, found = imported(tmp_path, TITAN_EXPERTS + said, name="t.toml", model="qwen3-30b-a3b")
    plan = {"method": "zero3", "tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True, "loss_parallel": True}
    assert plan.items() <= tables["plan"].items()
    assert "approximated: it gathers the tokens of tensor ranks for a router" in found.text
    other = TITAN_EXPERTS + "expert_tensor_parallel_degree = 2\n"
    assert "experts that tensor ranks cut too" in refused(tmp_path, other, name="t.toml", model="qwen3-30b-a3b")


def test_megatrons_experts_are_divided_among_tensor_ranks_too(tmp_path):
    given = {"name": "args.txt", "model": "mixtral-8x7b"}
    tables, _ = imported(tmp_path, f"{MEGATRON_EXPERTS} --expert-tensor-parallel-size 1", **given)
    plan = {"method": "zero1", "zero1_implementation": "megatron", "tp": 2, "ep": 4, "etp": 1}
    assert (plan | {"gathered_inputs": "gathered-again"}).items() <= tables["plan"].items()
    assert "expert-tensor-parallel-size, by default as many" in refused(tmp_path, MEGATRON_EXPERTS, **given)
    other = f"{MEGATRON_EXPERTS} --expert-tensor-parallel-size 2"
    assert "experts that tensor ranks cut too" in refused(tmp_path, other, **given)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_megatrons_experts_beside_whole_optimizers_have_gradients_that_are_summed_in_fp32(tmp_path, tensor_ranks):
    """Its DistributedDataParallel alone: bf16 parameters, and by default gradients kept and all-reduced in fp32."""
    text = MEGATRON_EXPERTS.replace("--use-distributed-optimizer ", "")
    text = text.replace("--tensor-model-parallel-size 2", f"--tensor-model-parallel-size {tensor_ranks}")
    text += " --expert-tensor-parallel-size 1" if tensor_ranks > 1 else ""
    tables, found = imported(tmp_path, text, name="args.txt", model="mixtral-8x7b")
    assert {"method": "ddp", "ep": 4}.items() <= tables["plan"].items()
    assert tables["workload"]["gradient_precision"] == tables["workload"]["reduce_precision"] == "fp32"
    (tmp_path / "job.toml").write_text(found.text)
    loaded = load_scenario(tmp_path / "job.toml", ["plan.micro_batches=1", "workload.global_batch_size=8"])
    of_experts = [
        entry.bytes
        for entry in simulate(loaded).result.collectives
        if entry.kind == "all-reduce" and entry.group in {(rank, rank + 4) for rank in range(4)}
    ]
    assert set(of_experts) == {2 * maps * 4096 * 14336 * 4 for maps in (1, 2)}  # of two experts, in fp32
