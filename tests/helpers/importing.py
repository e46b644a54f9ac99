"""Other programs' files that tests import, and functions that import or refuse one."""

import json
import tomllib
from pathlib import Path

import pytest

from gssim.interop import RefusedError, import_scenario
from gssim.scenario import load_scenario

ROOT = Path(__file__).resolve().parents[2]
EIGHT = "scenarios/clusters/dgx-h100.toml"


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
