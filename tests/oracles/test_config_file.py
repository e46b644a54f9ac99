"""A Hugging Face config.json as transformers writes it is traced as the model that transformers makes of it."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

from gsreal.model_files.build import build_module, training_config  # noqa: E402
from gsreal.model_files.config_file import unused_keys  # noqa: E402
from gsreal.model_files.request import Request, check_options, fill_in_defaults, traced_model  # noqa: E402
from gsreal.model_files.trace import write_model  # noqa: E402
from gssim.errors import UserError  # noqa: E402
from gssim.scenario import load_model  # noqa: E402

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = SMALL | {"vocab_size": 60, "max_position_embeddings": 128}
IMAGES = SMALL | {"image_size": 16, "patch_size": 4, "num_channels": 1}
MODELS = {
    "llama": ("LlamaForCausalLM", TEXT | {"num_key_value_heads": 2, "rope_theta": 5e5, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 128, "vocab_size": 60}),
    "bert": ("BertForMaskedLM", TEXT),
    "vit": ("ViTForImageClassification", IMAGES),
}


def written(folder, kind, changes=None, **more):
    """Return the file that transformers writes of a small config, with changes to it."""
    name, sizes = MODELS[kind]
    config = transformers.AutoConfig.for_model(kind, **sizes, **more)
    path = folder / "config.json"
    config.to_json_file(path, use_diff=False)
    data = json.loads(path.read_text()) | {"architectures": [name], "torch_dtype": "bfloat16"} | (changes or {})
    path.write_text(json.dumps(data))
    return path


def asked(path, **settings):
    usual = {"name": "small", "arguments": (), "vocabulary": None, "maximum_sequence_length": None, "image": None}
    return Request(model=str(path), **usual | {"classes": None, "auto_class": None, "sequence_length": None} | settings)


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_class_that_it_names_of_its_sizes(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("gsreal.model_files.request.trace", lambda model, **_: model)  # tracing has tests of its own
    labels = {"num_labels": 5} if kind == "vit" else {}
    path = written(tmp_path, kind, **labels)
    check_options(asked(path))
    model = traced_model(asked(path))
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind][1], **labels)
    real = getattr(transformers, MODELS[kind][0])(config)
    built = build_module(model.module, where="test")
    assert type(built) is type(real)
    assert [tuple(each.shape) for each in built.parameters()] == [tuple(each.shape) for each in real.parameters()]
    if kind == "vit":
        assert (model.input.shape, model.input.classes) == ((1, 16, 16), 5)
    else:
        assert (model.input.vocabulary, model.input.maximum_sequence_length) == (60, 128)
        assert model.input.task == ("masked-token" if kind == "bert" else "next-token")
    kept = model.module.hugging_face.config
    assert not {"transformers_version", "torch_dtype", "architectures"} & set(kept)
    assert set(MODELS[kind][1]) - {"rope_theta"} <= set(kept)  # which transformers writes as a table


def test_what_the_user_gives_goes_before_the_file(tmp_path):
    path = written(tmp_path, "llama")
    found = fill_in_defaults(
        asked(path, arguments=("hidden_size=64",), maximum_sequence_length=64, task="masked-token")
    )
    assert (found.maximum_sequence_length, found.vocabulary, found.task) == (64, 60, "masked-token")
    assert "hidden_size" not in found.config
    assert fill_in_defaults(asked(path, vocabulary=50)).vocabulary == 50
    assert fill_in_defaults(found) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "config.json: model_type: missing"),
        ({"model_type": "lama"}, "config.json: module.hugging_face: .*lama"),
        ({"quantization_config": {"bits": 4}}, "config.json: quantization_config: quantized weights are not trained"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map: names code outside of transformers"),
        ({"layer_types": ["full_attention", None]}, "config.json: layer_types: has a null in a list"),
        ({"num_attention_heads": 3}, r"module.hugging_face: .*hidden size \(32\) is not a multiple"),
    ],
    ids=str,
)
def test_what_cannot_be_traced_is_refused_by_its_key(tmp_path, changes, message):
    path = written(tmp_path, "llama", changes)
    with pytest.raises(UserError, match=message):
        traced_model(asked(path))


def test_null_is_none_where_the_default_is_another(tmp_path, monkeypatch):
    """DeepSeek-V2-Lite projects its queries at once: `q_lora_rank` is null, and 1536 by default."""
    monkeypatch.setattr("gsreal.model_files.request.trace", lambda model, **_: model)
    path = written(tmp_path, "llama", {"bos_token_id": None, "pretraining_tp": None})
    model = traced_model(asked(path))
    assert model.module.hugging_face.null == ("pretraining_tp",)
    assert training_config(model.module.hugging_face, "test").pretraining_tp is None
    given = traced_model(asked(written(tmp_path, "llama"), arguments=("pretraining_tp=null",)))
    assert given.module == model.module
    write_model(tmp_path / "model.toml", model)
    assert load_model(tmp_path / "model.toml").module == model.module


def test_code_of_a_hub_is_left_out_where_transformers_has_its_classes(tmp_path):
    """Files of Phi-3 and DeepSeek have such code. Classes that transformers lacks are refused."""
    own = {"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    assert "auto_map" not in fill_in_defaults(asked(written(tmp_path, "llama", {"auto_map": own}))).config
    assert unused_keys(written(tmp_path, "llama", {"auto_map": own})) == ["auto_map (its code is not run)"]


def test_keys_that_the_architecture_lacks_are_named(tmp_path):
    """transformers takes any key, so that a misspelt one would leave the default in place."""
    path = written(tmp_path, "llama")
    assert unused_keys(path) == []
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"hidden_sise": data.pop("hidden_size"), "prefix_of_mine": 1, "rope_theta": 1e4}))
    assert unused_keys(path) == ["hidden_sise (did you mean hidden_size?)", "prefix_of_mine"]
    given = asked(written(tmp_path, "llama"), arguments=("hidden_sise=64",))
    with pytest.raises(UserError, match=r"--argument hidden_sise: .*did you mean hidden_size\?"):
        traced_model(given)


def test_keys_that_only_the_code_of_the_architecture_reads_have_an_effect(tmp_path):
    """DeBERTa-v2 reads them by getattr; its config does not declare them."""
    keys = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "prefix_of_mine": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deberta-v2", **keys}))
    assert unused_keys(path) == ["prefix_of_mine"]


def test_a_null_that_the_user_replaces_is_no_longer_one(tmp_path):
    path = written(tmp_path, "llama", {"rms_norm_eps": None})
    assert "rms_norm_eps" not in fill_in_defaults(asked(path, arguments=("rms_norm_eps=1e-5",))).config


@pytest.mark.parametrize(
    ("options", "padding"),
    [
        ({}, 7),
        ({"padding": 3}, 3),
        ({"padding": 0, "states_padding": True}, 0),
        ({"arguments": ("pad_token_id=5",)}, 5),
    ],
)
def test_a_classifier_of_sequences_leaves_out_the_padding_of_its_config(tmp_path, monkeypatch, options, padding):
    """The data were filled up with token 0 and the model left out another: RoBERTa's config states 1."""
    monkeypatch.setattr("gsreal.model_files.request.trace", lambda model, **_: model)
    changes = {"architectures": ["BertForSequenceClassification"], "pad_token_id": 7}
    path = written(tmp_path, "bert", changes)
    model = traced_model(asked(path, **options))
    assert model.input.padding == padding
    assert model.module.hugging_face.config["pad_token_id"] == padding


def test_a_config_without_a_limit_of_its_sequences_has_the_usual_one(tmp_path, monkeypatch):
    """XLNet's says -1, which was refused as the longest sequence."""
    monkeypatch.setattr("gsreal.model_files.request.trace", lambda model, **_: model)
    monkeypatch.setattr("gsreal.model_files.request.runs_other_kernels", lambda *_, **__: False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "xlnet", "architectures": ["XLNetLMHeadModel"], "vocab_size": 60}))
    assert traced_model(asked(path)).input.maximum_sequence_length == 256
