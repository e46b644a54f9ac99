"""Import of axolotl's recipes: what each key becomes, and what is refused."""

import json

import pytest
from importing import AXOLOTL, ROOT, imported, refused

from gssim.errors import UserError

pytestmark = pytest.mark.usefixtures("in_the_repository")


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


@pytest.mark.parametrize("program", ["axolotl", "trainer"])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[1]", r"own/config\.json: must hold a table of keys and values"),  # an AttributeError
        ("null", r"own/config\.json: must hold a table of keys and values"),
        ('{"model_type": "llama", "quantization_config": {"load_in_4bit": true}}', "has quantization_config: weights"),
    ],
)
def test_a_base_models_config_that_is_none_or_of_few_bits_is_refused(tmp_path, program, config, said):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/config.json").write_text(config)
    text = AXOLOTL if program == "axolotl" else (ROOT / "scenarios/imports/trainer.yaml").read_text()
    with pytest.raises(UserError, match=said):
        imported(tmp_path, text.replace("NousResearch/Meta-Llama-3-8B", "own"), name="x.yml")


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


def test_axolotls_options_of_fsdp(tmp_path):
    """Before, `shard_grad_op` in the key fsdp was taken for `full_shard`."""
    without = AXOLOTL[: AXOLOTL.index("fsdp_version")]
    tables, _ = imported(tmp_path, f"{without}fsdp: [shard_grad_op, auto_wrap]\n", name="x.yml")
    assert tables["plan"]["method"] == "zero2"


def test_samples_that_are_not_packed_are_said_to_be_shorter(tmp_path):
    """A recipe without sample_packing was predicted at sequence_len, without a word."""
    for more, says in (("", True), ("pad_to_sequence_len: true\n", False), ("sample_packing: true\n", False)):
        kept = [line for line in AXOLOTL.splitlines() if "sample_packing" not in line and "pad_to" not in line]
        _, found = imported(tmp_path, "\n".join(kept) + f"\n{more}", name="x.yml")
        assert any("all samples are this long" in line for line in found.listed) == says
