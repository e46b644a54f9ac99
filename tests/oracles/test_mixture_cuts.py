"""Parts of a mixture's blocks that tensor parallelism cuts beside routed experts, in Hugging Face's models, on meta."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

import torch
import transformers

from gsreal.methods.cuts import Cut, cut_beside_experts, cut_or_reason

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}


def last_block(family: str, **config: object) -> torch.nn.Module:
    settings = transformers.AutoConfig.for_model(family, **SIZES, **HEADS, **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    return model.get_submodule("model.layers.1")


ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}


@pytest.mark.parametrize(
    ("family", "config", "shared"),
    [
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, ""),
        ("qwen3_moe", EXPERTS, ""),
        ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}, ""),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}, "mlp.shared_expert"),
        ("glm4_moe", {**ROUTED, **GROUPS, "head_dim": 4}, "mlp.shared_experts"),
    ],
)
def test_attention_and_shared_experts_are_cut_and_routers_are_whole(family, config, shared):
    block = last_block(family, **config)
    assert isinstance(cut_or_reason(block), str)  # without divided experts it is not
    assert cut_beside_experts(block) is None
    cut = cut_or_reason(block)
    assert isinstance(cut, Cut)
    perceptron = {f"{shared}.{name}_proj" for name in ("gate", "up", "down")} if shared else set()
    assert {*cut.columns, *cut.rows} == ATTENTION | perceptron
    assert cut.gathered == (("self_attn", shared) if shared else ("self_attn",))
    assert cut.experts == ("mlp.experts",)
    assert cut.units(block) == 4
    whole = {name for name, _ in block.named_parameters() if name.rpartition(".")[0] not in (*cut.columns, *cut.rows)}
    assert "mlp.gate.weight" in whole


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("deepseek_v3", {**ROUTED, **GROUPS, **LATENT}, "DeepseekV3DecoderLayer.self_attn.q_a_proj: a linear map of"),
    ],
)
def test_what_is_not_known_to_be_cut_is_refused_with_the_modules_name(family, config, reason):
    assert (cut_beside_experts(last_block(family, **config)) or "").startswith(reason)


def test_norms_over_all_heads_are_cut_if_their_mean_can_be_taken_over_all_ranks():
    block = last_block("olmoe", num_experts=8, num_experts_per_tok=2)
    assert cut_beside_experts(block) is None
    cut = cut_or_reason(block)
    assert isinstance(cut, Cut)
    assert cut.over_heads == cut.between == ("self_attn.q_norm", "self_attn.k_norm")
    other = last_block("olmoe", num_experts=8, num_experts_per_tok=2)
    other.self_attn.q_norm = torch.nn.LayerNorm(32, device="meta")  # a function of torch's own
    assert "self_attn.q_norm: a norm over all heads" in (cut_beside_experts(other) or "")


class DeviationNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(32, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


def test_a_norm_over_all_heads_that_takes_more_than_means_is_refused():
    """Its deviation was that of a rank's heads alone."""
    block = last_block("olmoe", num_experts=8, num_experts_per_tok=2)
    block.self_attn.q_norm = DeviationNorm()
    assert "self_attn.q_norm: a norm over all heads" in (cut_beside_experts(block) or "")
