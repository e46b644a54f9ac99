"""The table `workload.data` of a scenario: paths, identity, and bytes of the input."""

import pytest
from strategies import MODEL_TOML

from gssim.errors import UserError
from gssim.memory import input_bytes
from gssim.scenario import load_scenario
from gssim.workload import Glue, ImageFolder, TextFolder

CLUSTER = """
cluster = { name = "one", backend = "gloo", source = "made", devices = [{ name = "a", type = "t", host = "h" }], \
device_types.t = { kind = "cpu", memory_bytes = 1e9, memory_bandwidth_bytes_per_s = 1e9, source = "made", \
peak_flop_per_s.fp32 = 1e9 } }
plan.method = "single"
"""
TOKENS = 'input = { kind = "tokens", vocabulary = 16, maximum_sequence_length = 64 }'
INPUTS = {
    "text-folder": TOKENS,
    "glue": TOKENS.replace(" }", ', task = "sequence-classification", classes = 2, padding = 0 }'),
    "image-folder": 'input = { kind = "image", shape = [3, 8, 8], classes = 3 }',
}
TABLES = {
    "text-folder": 'kind = "text-folder"\nfolder = "web"\ntokenizer = "t.json"',
    "glue": 'kind = "glue"\nfolder = "glue"\ntask = "RTE"',
    "image-folder": 'kind = "image-folder"\nfolder = "imagenet"',
}


def scenario(folder, kind="text-folder", table=None, overrides=()):
    """Load a scenario whose model takes `kind` and whose data are `table`."""
    (folder / "m.toml").write_text(MODEL_TOML.replace(TOKENS, INPUTS[kind]))
    length = "" if kind == "image-folder" else "sequence_length = 8\n"
    text = f'{CLUSTER}\n[workload]\nmodel = "m.toml"\nglobal_batch_size = 4\n{length}'
    text += f"[workload.data]\n{table or TABLES[kind]}\n" if table != "" else ""
    (folder / "s.toml").write_text(text)
    return load_scenario(folder / "s.toml", overrides).scenario


@pytest.mark.parametrize(("kind", "cls"), [("text-folder", TextFolder), ("glue", Glue), ("image-folder", ImageFolder)])
def test_a_table_names_the_data(tmp_path, kind, cls):
    found = scenario(tmp_path, kind).workload.data
    assert isinstance(found, cls)
    assert found.kind == kind


def test_paths_are_found_beside_the_scenario_and_those_of_overrides_from_here(tmp_path, monkeypatch):
    (tmp_path / "web").mkdir()
    (tmp_path / "here" / "other").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    found = scenario(tmp_path).workload.data
    assert (found.folder, found.tokenizer) == (str(tmp_path / "web"), str(tmp_path / "t.json"))
    assert scenario(tmp_path, overrides=["workload.data.folder=other"]).workload.data.folder == "other"
    assert scenario(tmp_path, overrides=["workload.data.folder=web"]).workload.data.folder == str(tmp_path / "web")
    whole = 'workload.data={kind="text-folder", folder="/data/web"}'
    assert scenario(tmp_path, overrides=[whole]).workload.data.folder == "/data/web"


@pytest.mark.parametrize("kind", list(TABLES))
def test_the_question_does_not_depend_on_where_data_are(tmp_path, kind):
    named = scenario(tmp_path, kind)
    assert named.scenario_id == scenario(tmp_path, kind, table="").scenario_id  # auto
    assert named.resolved()["workload"]["data"]["folder"].startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "table", "message"),
    [
        ("text-folder", 'kind = "text-folder"', "workload.data.folder: missing"),
        ("text-folder", 'kind = "text-folder"\nfolder = "x"\ntokeniser = "t"', "did you mean tokenizer?"),
        ("text-folder", 'kind = "webtext"\nfolder = "x"', "kind = 'image-folder', 'glue' or 'text-folder'"),
        ("text-folder", 'folder = "x"', "kind = 'image-folder', 'glue' or 'text-folder'"),
        ("text-folder", TABLES["glue"], "data.kind = 'glue': is for sequence-classification, the model's task is next"),
        ("glue", TABLES["text-folder"], "'text-folder': is for next-token or masked-token, the model's task is seq"),
        ("image-folder", TABLES["glue"], "is for sequence-classification, the model's task is classification"),
        ("glue", 'kind = "glue"\nfolder = "x"\ntask = "STS-B"', "task = 'STS-B': its labels are scores"),
        ("glue", 'kind = "glue"\nfolder = "x"\ntask = "SST"', "workload.data.task = 'SST': "),
        ("image-folder", TABLES["image-folder"] + "\nstd = [0.0]", "workload.data.std[0] = 0.0: "),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, kind, table, message):
    with pytest.raises(UserError) as refused:
        scenario(tmp_path, kind, table)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_names_of_other_data_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"workload\.data = 'imagenet': must be 'auto', 'stdlib-bytes' or 'digits'"):
        scenario(tmp_path, table="", overrides=["workload.data=imagenet"])
    assert scenario(tmp_path, table="", overrides=["workload.data=stdlib-bytes"]).workload.data == "stdlib-bytes"


@pytest.mark.parametrize(
    "change",
    [
        ', task = "sequence-classification" }',
        ", classes = 2 }",
        ", padding = 0 }",
        ', task = "sequence-classification", classes = 2, padding = 16 }',
    ],
)
def test_classes_and_padding_are_of_classifiers_of_sequences(tmp_path, monkeypatch, change):
    monkeypatch.setitem(INPUTS, "text-folder", TOKENS.replace(" }", change))
    with pytest.raises(UserError, match=r"m\.toml: input\.(classes: needed|(classes|padding) = )"):
        scenario(tmp_path)


def test_bytes_of_a_batch_are_its_ids_images_and_targets(tmp_path):
    sizes = {
        kind: input_bytes(scenario(tmp_path, kind).workload.model, batch_size=4, sequence_length=10) for kind in TABLES
    }
    assert sizes == {
        "text-folder": 4 * 10 * 8 + 4 * 10 * 8,
        "glue": 4 * 10 * 8 + 4 * 8,
        "image-folder": 4 * 3 * 8 * 8 * 4 + 4 * 8,
    }
    images = scenario(tmp_path, "image-folder").workload.model
    assert input_bytes(images, batch_size=4, sequence_length=None, value_bytes=8) == 4 * 3 * 8 * 8 * 8 + 4 * 8
