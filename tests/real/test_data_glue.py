"""GLUE's files as distributed: every task's columns, pairs of sentences, labels, padding."""

import gc
import weakref
from collections import Counter

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
from data_files import HEADERS, WORDS, global_batch, glue_folder, glue_rows, refused, word_tokeniser, workload_for
from numpy.random import default_rng
from real_runs import HELPERS, SGD, predicted, scenario_file, star, trained_alone

from gsreal.data import sources as data
from gsreal.data.text import TASKS
from gsreal.model_files.build import build_module, logits_of
from gssim.errors import UserError
from gssim.units import validated
from gssim.workload import Module

SINGLE = ("CoLA", "SST-2")


def tokens(classes=2, **changes):
    source = {"kind": "tokens", "vocabulary": 256, "maximum_sequence_length": 512, "task": "sequence-classification"}
    return source | {"classes": classes, "padding": 0} | changes


def table(folder, task, **changes):
    return {"kind": "glue", "folder": str(folder), "task": task} | changes


def workload_of(folder, task, *, model=None, **changes):
    return workload_for(model or tokens(len(TASKS[task].labels)), table(folder, task), **changes)


@pytest.mark.parametrize("bom", [False, True])
@pytest.mark.parametrize("task", list(TASKS))
def test_every_task_is_read_from_its_own_columns(tmp_path, task, bom):
    if bom and task == "CoLA":
        pytest.skip("has no line of names")
    folder = glue_folder(tmp_path / task, task, bom=bom)
    workload = workload_of(folder, task, global_batch_size=10, sequence_length=200)
    data.check_data(workload, where="made")
    ids, classes = global_batch(workload, seed=0, step=0)
    read = []
    for row, class_ in zip(ids.tolist(), classes.tolist(), strict=True):
        text = bytes(row).rstrip(b"\0")
        assert text[0] == 2
        assert text[-1] == 3
        parts = text[1:-1].split(b"\x03")
        assert len(parts) == (1 if task in SINGLE else 2)
        read.append((*[part.decode().strip() for part in parts], class_))
    expected = []
    for line in glue_rows(task, 10, default_rng(1)):
        fields = line.split("\t")
        names = HEADERS[task].split("\t") if task in HEADERS else []
        places = [each if isinstance(each, int) else names.index(each) for each in TASKS[task].sentences]
        label = TASKS[task].label
        label = fields[label if isinstance(label, int) else names.index(label)]
        expected.append((*[fields[place].strip() for place in places], TASKS[task].labels.index(label.encode())))
    assert sorted(read) == sorted(expected)


def test_splits_are_files(tmp_path):
    folder = glue_folder(tmp_path / "m", "MNLI", rows=7)
    source = data.open_source(workload_for(tokens(3), table(folder, "MNLI", split="dev_matched")))
    assert len(source.table) == 7
    with pytest.raises(UserError, match=r"dev\.tsv: no such file"):
        data.open_source(workload_for(tokens(3), table(folder, "MNLI", split="dev")))


def test_the_rows_of_any_division_are_the_whole_batch_and_epochs_have_every_row_once(tmp_path):
    workload = workload_of(glue_folder(tmp_path / "r", "RTE"), "RTE", sequence_length=200)
    source = data.open_source(workload)
    ids, classes = global_batch(workload, seed=2, step=3)
    parts = [source.batch(seed=2, step=3, rows=rows) for rows in (slice(0, 3), slice(3, 3), slice(3, 8))]
    assert torch.equal(torch.cat([part for part, _ in parts]), ids)
    assert torch.equal(torch.cat([part for _, part in parts]), classes)
    assert source.loss_terms(seed=2, step=3, rows=[slice(0, 3), slice(3, 8)]) == [3, 5]
    drawn = [source.batch(seed=2, step=step, rows=slice(0, 8))[0] for step in range(5)]  # 4 epochs of 10
    rows = [tuple(row) for row in torch.cat(drawn).tolist()]
    assert set(Counter(rows).values()) == {4}
    assert len(set(rows[:10])) == 10


def test_long_pairs_are_cut_longest_first_and_short_ones_filled_up(tmp_path):
    (tmp_path / "train.tsv").write_text(HEADERS["RTE"] + "\n0\tabcdefghijklmnop\txyz\tentailment\n")
    ids, _ = global_batch(workload_of(tmp_path, "RTE", global_batch_size=1, sequence_length=12), seed=0, step=0)
    assert bytes(ids[0].tolist()) == b"\x02abcdef\x03xyz\x03"
    ids, _ = global_batch(workload_of(tmp_path, "RTE", global_batch_size=1, sequence_length=24), seed=0, step=0)
    assert bytes(ids[0].tolist()) == b"\x02abcdefghijklmnop\x03xyz\x03\0\0"


def test_a_tokeniser_brings_its_template_and_special_tokens(tmp_path):
    pytest.importorskip("tokenizers")
    file = word_tokeniser(tmp_path / "tokenizer.json")
    (tmp_path / "train.tsv").write_text(HEADERS["RTE"] + "\n0\tthe cat sat\ta zebra\tnot_entailment\n")
    model = tokens(vocabulary=5 + len(WORDS))
    workload = workload_for(model, table(tmp_path, "RTE", tokenizer=str(file)), global_batch_size=1, sequence_length=10)
    data.check_data(workload, where="made")
    ids, classes = global_batch(workload, seed=0, step=0)
    assert ids.tolist() == [[2, 5, 6, 7, 3, 9, 1, 3, 0, 0]]  # [CLS] the cat sat [SEP] a [UNK] [SEP] [PAD] [PAD]
    assert classes.tolist() == [1]
    short = workload_for(model, table(tmp_path, "RTE", tokenizer=str(file)), global_batch_size=1, sequence_length=6)
    assert len(global_batch(short, seed=0, step=0)[0][0]) == 6


def test_rows_of_qqp_that_are_cut_are_left_out_and_of_others_refused(tmp_path):
    folder = glue_folder(tmp_path / "q", "QQP")
    with (folder / "train.tsv").open("a") as file:
        file.write("11\t3\t4\twhat is\nthis?\tand that?\t1\n")
    assert len(data.open_source(workload_of(folder, "QQP")).table) == 10
    folder = glue_folder(tmp_path / "r", "RTE")
    with (folder / "train.tsv").open("a") as file:
        file.write("11\twhat is\n")
    assert "train.tsv: line 12 has 2 columns, 4 are needed" in refused(workload_of(folder, "RTE"))


def test_faults_of_files_are_said_in_one_line(tmp_path):
    folder = glue_folder(tmp_path / "s", "SST-2")
    assert "train.tsv: no such file" in refused(workload_of(tmp_path, "SST-2"))
    assert "lacks the column 'sentence1'; has sentence, label" in refused(workload_of(folder, "RTE"))
    assert "has 3 classes, the model 2" in refused(workload_of(folder, "MNLI", model=tokens(2)))
    assert "makes 256 kinds of token, the model's vocabulary is 100" in refused(
        workload_of(folder, "SST-2", model=tokens(vocabulary=100))
    )
    assert "fills up with token 0, but the model leaves out token 7" in refused(
        workload_of(folder, "SST-2", model=tokens(padding=7))
    )
    (folder / "train.tsv").write_text("sentence\tlabel\nfine\tgood\n")
    assert "line 2: the label is 'good'; allowed: 0, 1" in refused(workload_of(folder, "SST-2"))
    (folder / "train.tsv").write_text("sentence\tlabel\n")
    assert "has no rows" in refused(workload_of(folder, "SST-2"))


def test_faults_of_tokenisers_are_said_in_one_line(tmp_path, monkeypatch):
    folder = glue_folder(tmp_path / "s", "SST-2")

    def with_tokeniser(path):
        return workload_for(tokens(), table(folder, "SST-2", tokenizer=str(path)))

    assert "no such file" in refused(with_tokeniser(tmp_path / "nowhere.json"))
    (tmp_path / "broken.json").write_text("{}")
    assert "no tokenizer.json: " in refused(with_tokeniser(tmp_path / "broken.json"))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert "pip install 'gssim[data]'" in refused(with_tokeniser(tmp_path / "broken.json"))


MODELS = {
    "ours": {"factory": "gsreal.models.bert_classifier", "arguments": {"width": 16, "heads": 2, "layers": 2}},
    "bert": ("bert", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}),
    "gpt2": ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_what_fills_sequences_up_changes_no_answer(name):
    module = MODELS[name]
    if isinstance(module, tuple):
        pytest.importorskip("transformers")
        config = {**module[1], "vocab_size": 256, "pad_token_id": 0, "num_labels": 2}
        auto = "AutoModelForSequenceClassification"
        module = {"hugging_face": {"model_type": module[0], "auto_class": auto, "config": config}}
    torch.manual_seed(0)
    built = build_module(validated(Module, module, file="made"), where="made").eval()
    ids = torch.randint(1, 256, (3, 10))
    ids[1, 6:] = 0
    longer = torch.cat([ids, torch.zeros(3, 7, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        short, long = logits_of(built(ids)), logits_of(built(longer))
        ids[1, 3] += 1 if ids[1, 3] < 255 else -1
        other = logits_of(built(ids))
    assert short.shape == (3, 2)
    assert torch.allclose(short, long, atol=1e-6)
    assert not torch.allclose(short[1], other[1], atol=1e-6)
    assert torch.allclose(short[0], other[0], atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_batch_without_padding_runs_the_operations_that_were_traced(kind):
    """transformers drops a mask that leaves nothing out where it sees values, and cannot see them in a trace."""
    pytest.importorskip("transformers")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func).startswith("aten."):  # fake tensors ask for devices
                self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def names_of(padded):
        built = build_module(module, where="made")
        with Operations() as found:
            logits = built(torch.tensor([[5, 6, 7, 0 if padded else 8]] * 2)).logits
        forward = list(found.names)
        with found:
            logits.sum().backward()
        return forward, found.names

    _, config = MODELS[kind]
    config = config | {"vocab_size": 256, "pad_token_id": 0, "num_labels": 2}
    source = {"model_type": kind, "auto_class": "AutoModelForSequenceClassification", "config": config}
    module = validated(Module, {"hugging_face": source}, file="made")
    whole = names_of(False)
    assert whole == names_of(True)
    with FakeTensorMode():
        assert names_of(False)[0] == whole[0]


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_mask_of_padding_is_freed_with_its_step(kind):
    """What replaces transformers' test kept the masks until a garbage collection, and a trace of one failed."""
    pytest.importorskip("transformers")
    from torch.utils._python_dispatch import TorchDispatchMode

    masks = []

    class Masks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.ne.Scalar:
                masks.append(weakref.ref(result))
            return result

    _, config = MODELS[kind]
    config = config | {"vocab_size": 256, "pad_token_id": 0, "num_labels": 2}
    source = {"model_type": kind, "auto_class": "AutoModelForSequenceClassification", "config": config}
    built = build_module(validated(Module, {"hugging_face": source}, file="made"), where="made")
    gc.disable()
    try:
        with Masks():
            built(torch.tensor([[5, 6, 7, 0]] * 2)).logits.sum().backward()
        assert masks
        assert all(mask() is None for mask in masks)
    finally:
        gc.enable()


def test_the_peak_of_a_classifier_on_bundled_data_is_the_predicted_one():
    """Before, transformers dropped the mask of these data, which have no padding: predictions were 10 % above."""
    pytest.importorskip("transformers")
    case = {
        "scenario": scenario_file("small-demo.toml"),
        "overrides": [
            star(1),
            f"workload.model={HELPERS}/models/of_tests/data-hf.toml",
            "workload.sequence_length=48",
            "workload.global_batch_size=12",
            "plan.method=single",
            *SGD,
        ],
    }
    (entry,) = predicted(case).ranks
    assert entry.peak_allocated_bytes == pytest.approx(trained_alone(case)[0], rel=0.001)


def test_without_data_sequences_are_classified_by_the_module_that_they_are_from():
    workload = workload_for(tokens(5), "auto", global_batch_size=400)
    data.check_data(workload, where="made")
    ids, classes = global_batch(workload, seed=0, step=0)
    assert (ids[:, 0] == 2).all()
    counts = Counter(classes.tolist())
    assert set(counts) == set(range(5))
    assert min(counts.values()) > 50  # 80 expected, standard deviation 8
    corpus = data.standard_library_bytes().tobytes()
    assert all(bytes(row[1:]) in corpus for row in ids[:20].tolist())
