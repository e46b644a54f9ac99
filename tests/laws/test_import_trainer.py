"""Import of the arguments of Hugging Face's Trainer, of LLaMA-Factory and TRL too: what each becomes."""

import json

import pytest
from importing import imported, refused

pytestmark = pytest.mark.usefixtures("in_the_repository")


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


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--lora_enable True --lora_r 128", "lora_enable"),
        ("--lora_dim 128", "lora_dim"),
        ("--freeze_backbone True", "freeze_backbone"),
        ("--freeze_llm True", "freeze_llm"),
    ],
)
def test_a_program_of_its_own_that_freezes_weights_is_refused_by_its_key(tmp_path, option, said):
    """Those of LLaVA and of many after it: listed as of a feature that is off, and all weights were trained."""
    text = "deepspeed train.py --per_device_train_batch_size 1 --model_max_length 512 --bf16 True "
    message = refused(tmp_path, f"{text}{option}\n", name="x.sh")
    assert f'{said} = "{"128" if said == "lora_dim" else "True"}"' in message
    off = option.replace("True", "False").replace("128", "0")
    tables, _ = imported(tmp_path, f"{text}{off}\n", name="x.sh")
    assert "frozen" not in tables["workload"]
