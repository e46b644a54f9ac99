"""Folders of images, GLUE files and folders of text train on ranks as on one device, as predicted."""

from pathlib import Path

import commands
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'gssim[data]'")

from data_files import glue_folder, image_tree, text_folder, traced, word_tokeniser
from real_runs import assert_collectives, quick, run_cases, selected, star

from gsreal.cli import main
from gssim.result import read_result

pytestmark = pytest.mark.real

CLASSIFIER = {"task": "sequence-classification", "classes": 3, "vocabulary": 256}
SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05"]
ADAMW64 = ["workload.optimizer=adamw", "workload.precision=fp64"]
UNEVEN = ["plan.shares.batch=[0.75,0.25]"]


def write_scenarios(folder: Path) -> None:
    """Write a scenario for each kind of data, its model and its data beside it."""
    image_tree(folder / "images")
    glue_folder(folder / "MNLI", "MNLI", rows=30)
    text_folder(folder / "web")
    word_tokeniser(folder / "tokenizer.json")
    at = {"sequence_length": 48}  # traced there alone
    encoder = ("width=32", "heads=2", "layers=2")
    traced(folder / "bert.toml", "gsreal.models.bert_classifier", *encoder, "classes=3", **CLASSIFIER, **at)
    traced(
        folder / "gpt.toml", "gsreal.models.gpt", *encoder, "vocabulary=25", "maximum_length=64", vocabulary=25, **at
    )
    layers = ("channels=3", "widths=[8, 16]", "blocks=1", "classes=3")
    traced(folder / "resnet.toml", "gsreal.models.resnet", *layers, image="3x12x12", classes=3)
    hidden = ("vocab_size=256", "hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2")
    more = ("intermediate_size=64", "hidden_dropout_prob=0.0", "attention_probs_dropout_prob=0.0")
    traced(folder / "hf.toml", "hf:bert", *hidden, *more, **CLASSIFIER, **at)
    tables = {
        "bert": 'kind = "glue"\nfolder = "MNLI"\ntask = "MNLI"',
        "hf": 'kind = "glue"\nfolder = "MNLI"\ntask = "MNLI"',
        "gpt": 'kind = "text-folder"\nfolder = "web"\ntokenizer = "tokenizer.json"\ncache = "cache"',
        "resnet": 'kind = "image-folder"\nfolder = "images"\naugment = true',
    }
    for name, table in tables.items():
        length = "" if name == "resnet" else "sequence_length = 48\n"
        (folder / f"{name}-on-data.toml").write_text(
            f'{star(2)}\nrun = {{ steps = 2, warmup_steps = 1 }}\nplan.method = "ddp"\n[workload]\n'
            f'model = "{name}.toml"\nglobal_batch_size = 12\n{length}[workload.data]\n{table}\n'
        )


OVERRIDES = {
    "bert-zero2": [*SGD, "plan.method=zero2"],
    "bert-gs": [*ADAMW64, "plan.method=gs", *UNEVEN],
    "bert-ddp-recompute": [*SGD, "plan.recompute=full"],
    "hf-zero3": [*ADAMW64, "plan.method=zero3", *UNEVEN],
    "gpt-ddp": [*ADAMW64, *UNEVEN],
    "resnet-zero2": [*SGD, "plan.method=zero2", *UNEVEN],
}


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    """Run the selected cases in one launch; return (cases, what they showed)."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("data")
    write_scenarios(folder)
    cases = {
        name: {"scenario": str(folder / f"{name.partition('-')[0]}-on-data.toml"), "overrides": overrides}
        for name, overrides in OVERRIDES.items()
    }
    return cases, run_cases(folder, selected(request, cases), ranks=2)


@pytest.mark.parametrize("name", quick(OVERRIDES, ["bert-gs", "hf-zero3", "gpt-ddp", "resnet-zero2"]))
def test_parameters_equal_those_of_one_device(world, name):
    seen = world[1][name]
    tolerance = 1e-5 if "sgd-momentum" in OVERRIDES[name][0] else 1e-9
    assert seen["largest_parameter"] > 0.05
    assert seen["difference"] <= tolerance * seen["largest_parameter"]
    assert seen["replicas_equal"]


@pytest.mark.parametrize("name", quick(OVERRIDES, ["bert-gs", "hf-zero3", "gpt-ddp", "resnet-zero2"]))
def test_collectives_and_peaks_are_those_predicted(world, name):
    cases, found = world
    result = assert_collectives(cases[name], found[name])
    peaks = {rank: entry.peak_allocated_bytes for entry in result.ranks for rank in entry.ranks}
    low = 0.7 if name.startswith("resnet") else 0.98  # scratch of convolutions is in profiles alone
    for rank, measured in enumerate(found[name]["peaks"]):
        assert low <= peaks[rank] / measured <= 1.02, (rank, peaks[rank], measured)


def test_a_scenario_with_data_runs_from_the_command_line(world, tmp_path):
    ended = commands.run("gsreal", "run", world[0]["bert-gs"]["scenario"], "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    (made,) = tmp_path.iterdir()
    assert 0.8 < read_result(made).loss[0] < 1.5  # ln 3 for three classes


def test_data_that_are_missing_are_said_before_ranks_start(world, monkeypatch, capsys):
    scenario = world[0]["bert-gs"]["scenario"]
    monkeypatch.setattr("sys.argv", ["gsreal", "run", scenario, "--set", "workload.data.folder=nowhere"])
    monkeypatch.setattr("gsreal.run.launch.launch", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == f"gsreal: {scenario}: workload.data.folder: nowhere/train.tsv: no such file of a GLUE task\n"
