"""Files that hold data run no code: model files, Hugging Face configs, tokenisers and checkpoints of others."""

import json
import os
import pickle
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import commands
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gsreal.model_files.build import build_module, check_factory, set_trust, training_config
from gsreal.run.checkpoint import Planner, Reader, _digest
from gssim.errors import UserError
from gssim.scenario import load_model
from gssim.workload import HuggingFace, Module

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
GPT = load_model(SCENARIOS / "models" / "gpt-byte-1m.toml").module.arguments


@pytest.fixture
def marker(tmp_path):
    """Return the path of a file that code would make if it ran."""
    return tmp_path / "ran"


def malicious_model(folder: Path, marker: Path) -> Path:
    """Write a model file whose factory is a function that runs commands."""
    path = folder / "model.toml"
    text = (SCENARIOS / "models" / "gpt-byte-1m.toml").read_text(encoding="utf-8")
    before, _, rest = text.partition("[module]")
    after = rest[rest.index("\n[input]") :]
    module = f'[module]\nfactory = "os.system"\narguments = {{ command = "touch {marker}" }}\n'
    path.write_text(before + module + after, encoding="utf-8")
    return path


class Evil:
    """Unpickled without restrictions, it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


# Factories -----------------------------------------------------------------------------------------------------------

SWEEP = """
question = "what a sweep executes"
scenario = "{demo}"
variants.dense = {{ "plan.method" = "ddp" }}
"""
VERBS = {
    "run": ("run", "{demo}", "--set", "workload.model={model}"),
    "lab": ("lab", "{lab}", "--set", "workload.model={model}"),
    "lab-sweep": ("lab", "--sweep", "{sweep}", "--out", "{out}", "--set", "workload.model={model}"),
    "gradients": ("gradients", "{demo}", "--out", "{out}", "--set", "workload.model={model}"),
    "calibrate": ("calibrate", "{model}", "--out", "{out}"),
    "trace": ("trace", "{model}", "--out", "{out}"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_runs_what_a_model_file_names_unless_it_is_trusted(verb, marker, tmp_path, monkeypatch):
    monkeypatch.setattr("gsreal.lab.building.check_tools", lambda: None)
    (tmp_path / "sweep.toml").write_text(SWEEP.format(demo=SCENARIOS / "lab-two-sites.toml"), encoding="utf-8")
    places = {
        "demo": SCENARIOS / "demo.toml",
        "lab": SCENARIOS / "lab-two-sites.toml",
        "sweep": tmp_path / "sweep.toml",
        "model": malicious_model(tmp_path, marker),
        "out": tmp_path / "out",
    }
    ended = commands.run("gsreal", *(part.format(**places) for part in VERBS[verb]))
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.endswith("nor a module of transformers.models; if you trust its code, give --trust-code")
    assert not marker.exists()


def test_what_is_trusted_by_the_command_line_does_run(marker, tmp_path):
    """Shows that the tests above can fail."""
    model = malicious_model(tmp_path, marker)
    ended = commands.run("gsreal", "trace", model, "--trust-code", "--out", tmp_path / "out")
    assert "returns int, no nn.Module" in ended.stderr
    assert marker.exists()


FACTORIES = {
    "gsreal.models": ("gsreal", "neither a factory of gsreal.models"),
    "gsreal.models.torch.os.system": ("command", "neither a factory"),
    "gsreal.models:torch.os.system": ("command", "neither a factory"),
    "gsreal.models_of_others.gpt": ("command", "neither a factory"),
    "gsreal.models._initialise": ("module", "neither a factory"),
    "gsreal.models.nn": ("command", "neither a factory"),
    "gsreal.models.Tensor": ("command", "neither a factory"),
    "gsreal.run.launch.launch": ("module", "neither a factory"),
    "transformers.utils.import_utils.os.system": ("command", "neither a factory"),
    "transformers.pipeline": ("model", "neither a factory"),
    "transformers.models_evil.make": ("command", "neither a factory"),
    "transformers.models.bert.modeling_bert.Callable": ("command", "neither a factory"),
    "transformers.models.bert.modeling_bert.logger": ("command", "neither a factory"),
    "transformers.models.auto.modeling_auto.AutoModelForCausalLM": ("config", "neither a factory"),
}


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_factory_is_defined_in_a_trusted_module_and_makes_modules(factory, marker):
    if factory.startswith("transformers"):
        pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")
    argument, message = FACTORIES[factory]
    set_trust(False)
    with pytest.raises(UserError, match=message):
        build_module(Module(factory=factory, arguments={argument: f"touch {marker}"}), where="file")
    assert not marker.exists()


def test_ours_and_those_of_transformers_need_no_trust():
    set_trust(False)
    assert isinstance(build_module(Module(factory="gsreal.models.gpt", arguments=GPT), where="file"), nn.Module)
    check_factory(Module(factory="transformers.models.bert.modeling_bert.BertPooler"), where="file")


@pytest.mark.parametrize("value", ["os.system", {"factory": "os.system"}, {"_target_": "os.system", "command": "x"}])
def test_arguments_that_name_factories_are_but_values(value):
    set_trust(False)
    with pytest.raises(UserError, match=r"module\.arguments = "):
        build_module(Module(factory="gsreal.models.gpt", arguments={**GPT, "width": value}), where="file")


@pytest.mark.real
def test_ranks_hear_of_the_trust(tmp_path, monkeypatch):
    """A module of the user's own, which only --trust-code lets run, through torchrun."""
    source = "from gsreal.models import gpt\ndef make(**settings):\n    return gpt(**settings)\n"
    (tmp_path / "own_module_of_a_user.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = (SCENARIOS / "models" / "gpt-byte-1m.toml").read_text(encoding="utf-8")
    model = tmp_path / "model.toml"
    model.write_text(text.replace('factory = "gsreal.models.gpt"', 'factory = "own_module_of_a_user.make"'))
    line = ["gsreal", "run", SCENARIOS / "demo.toml", "--json", "--set", f"workload.model={model}"]
    line += ["--set", "run.steps=1", "--set", "run.warmup_steps=1"]
    assert commands.run(*line).returncode == 2
    ended = commands.run(*line, "--trust-code")
    assert ended.returncode == 0, ended.stderr


# Hugging Face configs ------------------------------------------------------------------------------------------------

CONFIGS = {
    "auto_map": ({"auto_map": {"AutoModelForCausalLM": "evil--model.Evil"}}, "auto_map: names code outside"),
    "inner": ({"text_config": {"auto_map": {"AutoModel": "evil--model.Evil"}}}, "text_config.auto_map: names code"),
    "remote": ({"trust_remote_code": True}, "trust_remote_code: names code outside"),
    "attention": ({"attn_implementation": "evil/kernels"}, "attn_implementation: 'evil/kernels': kernels are not"),
    "experts": ({"_experts_implementation": "evil/kernels"}, "kernels are not loaded from a hub"),
    "weights": ({"use_pretrained_backbone": True}, "no weights are loaded"),
    "backbone": ({"backbone": "evil/backbone"}, "nothing is loaded from a hub"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_names_code_of_a_hub_is_refused(name):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")
    config, message = CONFIGS[name]
    with pytest.raises(UserError, match=message):
        training_config(HuggingFace(model_type="llama", config=config), "file")


# Tokenisers ----------------------------------------------------------------------------------------------------------


def test_a_tokeniser_that_is_a_pickle_is_refused_and_not_run(marker, tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'gssim[data]'")
    from gsreal.data.text import tokeniser

    path = tmp_path / "tokenizer.json"
    path.write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        tokeniser(str(path))
    assert not marker.exists()


# Checkpoints ---------------------------------------------------------------------------------------------------------


def trained(seed: int) -> dict:
    torch.manual_seed(seed)
    module = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "note": ["plain", 1, {"a": None}]}


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(trained(1), checkpoint_id=folder)
    return folder


def load(folder: Path, state: dict) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=Reader(folder), planner=Planner())


def test_an_ordinary_checkpoint_is_read_as_torch_reads_it(saved):
    state, expected = trained(2), trained(1)
    state["note"] = ["", 0, {"a": 1}]
    load(saved, state)
    assert state["note"] == expected["note"]
    torch.testing.assert_close(state["model"], expected["model"])
    torch.testing.assert_close(state["optimizer"]["state"], expected["optimizer"]["state"])
    assert state["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


def test_a_pickle_in_a_checkpoints_description_is_not_run(saved, marker):
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(UserError, match=r"\.metadata: names posix\.system, which is no part of a checkpoint"):
        Reader(saved)
    assert not marker.exists()
    with pytest.warns(UserWarning, match="single process"), pytest.raises(BaseException, match="storage_meta"):
        dcp.load(trained(2), checkpoint_id=saved)
    assert marker.exists()  # torch's own reader runs it


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(torch.float32)])
def test_a_description_of_something_else_is_refused(saved, content):
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match="does not describe a checkpoint"):
        Reader(saved)


def test_names_inside_of_names_that_are_allowed_are_not_reached(saved, marker):
    """Protocol 4 lets a pickle name attributes of attributes."""
    text = textwrap.dedent("""\
        ctorch.serialization
        os.system
        (S'touch {marker}'
        tR.""").format(marker=marker)
    for content in (text.encode(), b"\x80\x04" + text.encode(), text.replace("torch.serialization", "torch").encode()):
        (saved / ".metadata").write_bytes(content)
        with pytest.raises(UserError, match=r"os\.system, which is no part of a checkpoint"):
            Reader(saved)
    assert not marker.exists()


def test_a_pickle_in_a_checkpoints_values_is_not_run(tmp_path, marker):
    folder = tmp_path / "saved"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"note": Evil(marker)}, checkpoint_id=folder)
    with pytest.raises(BaseException, match="weights_only"):
        load(folder, {"note": None})
    assert not marker.exists()
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"note": None}, checkpoint_id=folder)
    assert marker.exists()  # torch's own planner runs it


@pytest.mark.real
@pytest.mark.slow
def test_a_run_that_goes_on_from_a_malicious_checkpoint_is_refused(tmp_path, marker):
    line = ["gsreal", "run", SCENARIOS / "demo.toml", "--set", "plan.method=single", "--set", "run.warmup_steps=1"]
    line += ["--checkpoint", tmp_path / "saved", "--every", 1, "--set"]
    assert commands.run(*line, "run.steps=1").returncode == 0
    for folder in (tmp_path / "saved").glob("step-*"):
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
        progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        progress["files"][".metadata"] = _digest(folder / ".metadata")  # its author would do that too
        (folder / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
    ended = commands.run(*line, "run.steps=3")
    assert (ended.returncode, marker.exists()) == (2, False), ended.stderr
    assert "names posix.system, which is no part of a checkpoint" in ended.stderr
