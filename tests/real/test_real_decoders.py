"""Decoders of Hugging Face whose blocks are cut by the roles of their linear maps equal one device's training."""

from pathlib import Path

import pytest
from real_runs import SGD, TrainsAsOneDevice, run_cases, scenario_file, star

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

from gssim.errors import UserError
from gssim.scenario import load_scenario

pytestmark = pytest.mark.real

GROUPED = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
HEADS = GROUPED | {"head_dim": 4}
PLAIN = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
UNDROPPED = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
CONFIGS: dict[str, dict[str, object]] = {
    "qwen3": HEADS | {"intermediate_size": 48},
    "falcon": PLAIN | {"new_decoder_architecture": "true", "num_attention_heads": 8, "num_kv_heads": 4},
    "gpt_neox": PLAIN | {"intermediate_size": 64},
    "opt": PLAIN | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "mistral": HEADS | {"intermediate_size": 48},
    "gemma": HEADS | {"intermediate_size": 48},
    "olmo2": GROUPED | {"intermediate_size": 48},
    "qwen2": GROUPED | {"intermediate_size": 48},
    "phi": PLAIN | {"intermediate_size": 64, "resid_pdrop": 0.0},
    "gptj": {"n_layer": 2, "n_embd": 32, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "starcoder2": GROUPED | {"intermediate_size": 48} | dict.fromkeys(("residual_dropout", "embedding_dropout"), 0.0),
    "stablelm": GROUPED | {"intermediate_size": 48},
    "roberta": PLAIN | {"intermediate_size": 48} | UNDROPPED,
    "electra": PLAIN | {"intermediate_size": 48, "embedding_size": 32} | UNDROPPED,
    "distilbert": {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 48}
    | dict.fromkeys(("dropout", "attention_dropout"), 0.0),
}
"""By type of the model; queries share keys and values where they can."""
ENCODERS = ("roberta", "electra", "distilbert")
FEW = ("qwen3", "olmo2", "falcon", "gptj", "roberta", "distilbert")
DIVIDED = ("qwen3", "olmo2", "gpt_neox", "mistral", "phi", *ENCODERS)
"""Their sequences are divided too."""
OTHERS = tuple(kind for kind in CONFIGS if kind not in FEW)
USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12", "plan.method=tensor"]


def traced(kind: str) -> Path:
    """Return the file of a small model of that type, traced at one sequence length."""
    from small_models import Request, kept

    of_kind = {"vocab_size": 257} if kind in ENCODERS else {"vocab_size": 256, "use_cache": "false"}
    settings = CONFIGS.get(kind, PLAIN) | of_kind | {"max_position_embeddings": 64}
    request = Request(
        model=f"hf:{kind}",
        arguments=tuple(f"{key}={value}" for key, value in settings.items()),
        name=f"{'encoder' if kind in ENCODERS else 'decoder'}-{kind}",
        vocabulary=257 if kind in ENCODERS else 256,
        task="masked-token" if kind in ENCODERS else None,
        maximum_sequence_length=60 if kind in ENCODERS else 64,
        sequence_length=24,
    )
    return kept(request)


@pytest.fixture(scope="module", params=[FEW, pytest.param(OTHERS, marks=[pytest.mark.slow])])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run all cases of some types in one launch of two ranks; return (cases, what they showed)."""
    folder, cases = tmp_path_factory.mktemp("decoders"), {}
    for kind in request.param:
        overrides = [star(2), f"workload.model={traced(kind)}", *USUAL, *SGD]
        cases[f"{kind}-sgd"] = {"scenario": scenario_file("demo.toml"), "overrides": overrides}
        if kind in DIVIDED:
            divided = [*overrides, "plan.sequence_parallel=true"]
            cases[f"{kind}-divided-sgd"] = {"scenario": scenario_file("demo.toml"), "overrides": divided}
        if kind in ("gptj", "mistral"):  # whose checkpointed blocks keep a mask, and numbers of positions
            again = [*overrides, "plan.recompute=full"]
            cases[f"{kind}-full-sgd"] = {"scenario": scenario_file("demo.toml"), "overrides": again}
        if kind == "olmo2":  # its norms over all heads, of which ranks have unequal parts, or sum them again
            for name, more in (
                ("unequal", ["plan.method=gs_tp", "plan.shares.shards=[0.75,0.25]"]),
                ("full", ["plan.recompute=full"]),
                ("selective", ["plan.recompute=selective", "plan.sequence_parallel=true"]),
                ("clipped", ["workload.clip_norm=0.1"]),
                ("fp64", ["workload.precision=fp64"]),
            ):
                cases[f"{kind}-{name}-sgd"] = {"scenario": scenario_file("demo.toml"), "overrides": [*overrides, *more]}
        if kind == "qwen3":  # its norms of heads are summed once they are pushed
            owned = [*overrides, "plan.method=gs", "plan.tp=2"]
            cases[f"{kind}-owned-sgd"] = {"scenario": scenario_file("demo.toml"), "overrides": owned}
    return cases, run_cases(folder, cases, ranks=2)


class TestTraining(TrainsAsOneDevice):
    """Training equals one device's, with the predicted collectives and peaks."""

    def peak_error(self, name: str, case: dict) -> float | None:
        """Return the error of peaks; norms cast to fp32 in every precision, and their bytes are scaled to fp64."""
        return None if "fp64" in name else super().peak_error(name, case)


def test_no_step_holds_what_gloos_thread_lets_go_of_late(world: tuple[dict, dict]) -> None:
    for name, seen in world[1].items():
        if "divided" not in name:  # gloo's reduce-scatter has a copy inside, of which no other has a reference
            assert seen["usual_peaks"] == pytest.approx(seen["peaks"], rel=1e-5), name


def test_a_block_of_unknown_roles_is_refused_by_the_name_of_its_module(tmp_path: Path) -> None:
    overrides = [star(2), f"workload.model={traced('bloom')}", *USUAL]
    with pytest.raises(UserError, match=r"BloomBlock\.self_attention\.query_key_value: a linear map of unknown role"):
        load_scenario(Path(scenario_file("demo.toml")), overrides)
