"""Import of NeMo Automodel's recipes: what each key becomes, and what is refused."""

import pytest
from importing import AUTOMODEL, AXOLOTL, imported, refused

from gssim.errors import UserError

pytestmark = pytest.mark.usefixtures("in_the_repository")


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
        ("  moe_rank_scaling: true", None),  # smaller adapters beside experts
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
