"""Import of other programs' files, whichever they are: options, models by their config, and hostile files."""

import json
import random

import commands
import pytest
from importing import AUTOMODEL, AXOLOTL, DEEPSPEED, EIGHT, FSDP, MEGATRON, ROOT, TITAN, imported, refused

from gssim.errors import UserError
from gssim.interop import find_model
from gssim.interop import reading as limits

pytestmark = pytest.mark.usefixtures("in_the_repository")


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


def test_a_program_that_does_not_compile_takes_no_compiled_model(tmp_path):
    assert "are compiled" in refused(tmp_path, DEEPSPEED, name="ds.json", model="llama3-8b-compiled")


def test_a_config_of_hugging_face_names_the_shipped_model(tmp_path):
    config = LLAMA3_8B
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


LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA3_8B | {"num_key_value_heads": None}, "key-value heads 32"),  # as many as heads, says transformers
        ({key: value for key, value in LLAMA3_8B.items() if key != "num_key_value_heads"}, "key-value heads 32"),
        ({key: value for key, value in LLAMA3_8B.items() if key != "intermediate_size"}, "perceptron 11008"),
        (LLAMA3_8B | {"attention_bias": True}, "attention_bias = true"),
        (LLAMA3_8B | {"mlp_bias": True}, "mlp_bias = true"),
        (LLAMA3_8B | {"head_dim": 64}, "head_dim = 64"),
        (LLAMA3_8B | {"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        (LLAMA3_8B | {"quantization_config": {"load_in_4bit": True}}, "quantization_config: weights in few bits"),
        (GPT2 | {"n_positions": 2048}, "n_positions = 2048"),
    ],
)
def test_a_config_of_another_model_than_the_shipped_one_is_refused(tmp_path, config, said):
    """They were taken for Llama 3 8B and GPT-2: with a quarter of the keys and values, or without the biases."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said) as caught:
        find_model(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)


def test_what_a_config_says_of_its_shipped_model_is_compared_and_dropout_listed(tmp_path):
    path = tmp_path / "config.json"
    stated = {"head_dim": 128, "attention_bias": False, "hidden_act": "silu", "quantization_config": None}
    path.write_text(json.dumps(LLAMA3_8B | stated | {"attention_dropout": 0.0}))
    assert find_model(str(path)).written == "llama3-8b"
    assert find_model(str(path)).listed == ()
    path.write_text(json.dumps(GPT2 | {"n_positions": 1024, "activation_function": "gelu_new", "resid_pdrop": 0.1}))
    reason = "approximated: the model was traced without dropout"
    assert find_model(str(path)).listed == (("config.json: resid_pdrop = 0.1", reason),)


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


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ds.json", '{"train_batch_size": 8, "train_batch_size": 16}', "ds.json: train_batch_size: is given twice in"),
        ("a.yaml", FSDP.format(reshard="true", more="num_processes: 2\n"), "a.yaml: num_processes: is given twice in"),
        (
            "a.yaml",
            FSDP.format(reshard="true\n  fsdp_reshard_after_forward: false", more=""),
            "forward: is given twice",
        ),
    ],
)
def test_a_key_that_is_given_twice_in_one_table_is_refused(tmp_path, name, text, said):
    with pytest.raises(UserError, match=said) as caught:
        imported(tmp_path, text, name=name)
    assert "not valid" not in str(caught.value)


def test_keys_that_yaml_merges_are_replaced_by_own_ones_however_often_they_are_merged():
    text = "a: &a {k: 1, m: 0}\nb: &b {<<: *a, k: 2}\nc: {<<: *b, k: 3}\nd: {<<: [*b, *a], m: 4}\n"
    found = limits.parsed_yaml(text, file="x")
    assert found["b"] == {"k": 2, "m": 0}
    assert found["c"] == {"k": 3, "m": 0}
    assert found["d"] == {"k": 2, "m": 4}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train_batch_size": -64}, "train_batch_size = -64: must be a whole number of at least 1, and at most 1e15"),
        ({"train_batch_size": 10**30}, "000: must be a whole number of at least 1, and at most 1e15"),
        ({"train_batch_size": True}, "train_batch_size = true: must be a whole number of at least 1"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1: must be a number from 0 to 1e18"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping = Infinity: must be a number from 0 to 1e18"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(tmp_path, change, said):
    with pytest.raises(UserError, match=said):
        imported(tmp_path, DEEPSPEED | change, name="ds.json")


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
