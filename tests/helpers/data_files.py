"""Small data sets in the layouts in which the known ones are distributed, and models that read them."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import Request, kept
from torch import Tensor

from gsreal.data.sources import check_data, open_source
from gssim.errors import UserError
from gssim.scenario import load_model
from gssim.units import validated
from gssim.workload import Model, Workload

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "one",
    "dog",
    "ran",
    "home",
    "and",
    "nobody",
    "saw",
    "it",
    "go",
    "far",
    "away",
    "again",
]
CLASSES = ("n01440764", "n02102040", "n03000684")


def image_tree(folder: Path, *, images: int = 6, size: tuple[int, int] = (40, 30)) -> Path:
    """Make FOLDER/train/CLASS/NAME.JPEG and FOLDER/val; the classes differ in their brightness."""
    from PIL import Image

    random = np.random.default_rng(0)
    for split, count in (("train", images), ("val", 2)):
        for place, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(80 * place, 80 * place + 60, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{name}_{number}.JPEG")
    return folder


def sentence(random: np.random.Generator, *, most: int = 9) -> str:
    return " ".join(random.choice(WORDS, random.integers(2, most)))


def glue_rows(task: str, count: int, random: np.random.Generator) -> list[str]:
    """Return lines of a task's file as distributed: its columns, in its order."""
    rows = []
    for i in range(count):
        a, b, two = sentence(random), sentence(random), i % 2
        entails, three = ("entailment", "not_entailment")[two], ("entailment", "neutral", "contradiction")[i % 3]
        parses = [f"( {a} )", f"( {b} )", f"(ROOT {a})", f"(ROOT {b})"]
        rows.append(
            {
                "CoLA": ["gj04", str(two), "*" if two else "", a],
                "SST-2": [a + " ", str(two)],
                "MRPC": [str(two), str(i), str(i + 1), a, b],
                "QQP": [str(i), str(i), str(i + 1), a, b, str(two)],
                "MNLI": [str(i), str(i), f"{i}e", "fiction", *parses, a, b, three, three],
                "QNLI": [str(i), a, b, entails],
                "RTE": [str(i), a, b, entails],
                "WNLI": [str(i), a, b, str(two)],
            }[task]
        )
    return ["\t".join(row) for row in rows]


HEADERS = {
    "SST-2": "sentence\tlabel",
    "MRPC": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "QQP": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "MNLI": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
    "QNLI": "index\tquestion\tsentence\tlabel",
    "RTE": "index\tsentence1\tsentence2\tlabel",
    "WNLI": "index\tsentence1\tsentence2\tlabel",
}
"""First lines of the files; CoLA has none."""


def glue_folder(folder: Path, task: str, *, rows: int = 10, bom: bool = False) -> Path:
    """Make FOLDER/train.tsv and the evaluation files of a task."""
    random = np.random.default_rng(1)
    folder.mkdir(parents=True)
    for split in ("train", "dev_matched" if task == "MNLI" else "dev"):
        lines = [HEADERS[task]] if task in HEADERS else []
        text = "\n".join([*lines, *glue_rows(task, rows, random)]) + "\n"
        (folder / f"{split}.tsv").write_bytes((b"\xef\xbb\xbf" if bom else b"") + text.encode())
    return folder


def text_folder(folder: Path) -> tuple[Path, list[bytes]]:
    """Make a folder of text in every form; return it and its documents in the order of the stream."""
    random = np.random.default_rng(2)
    documents = [" ".join(sentence(random) for _ in range(20)) + "\n" for _ in range(6)]
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text(documents[0])
    (folder / "b" / "c.txt.gz").write_bytes(gzip.compress(documents[1].encode()))
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(documents[2:4])]
    (folder / "d.jsonl").write_text("\n".join(lines) + "\n\n")
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": documents[4]}).encode()))
    (folder / "f.txt").write_text(documents[5])
    (folder / "readme.md").write_text("not text of the corpus")
    return folder, [text.encode() for text in documents]


def word_tokeniser(path: Path) -> Path:
    """Make a tokenizer.json of whole words with BERT's special tokens and template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    inner.add_special_tokens(special)
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.enable_padding()  # a scenario decides on padding and truncation, not the file
    inner.save(str(path))
    return path


def untraced(source: dict[str, Any]) -> Model:
    """Return a model of nothing but its input: all that data are made for."""
    data = {"name": "m", "source": "made", "module": {"factory": "m.m"}, "traced_batch_sizes": (1,), "layers": ()}
    return validated(Model, {**data, "input": source}, file="made")


def workload_for(source: dict[str, Any], data: Any, **changes: Any) -> Workload:
    model = untraced(source)
    length = {} if source["kind"] == "image" else {"sequence_length": 24}
    settings = {"model": model, "global_batch_size": 8, "data": data} | length | changes
    return validated(Workload, settings, file="made")


def traced(path: Path, model: str, *arguments: str, **settings: Any) -> Path:
    """Write the model file of a module, as it was traced once."""
    asked: dict[str, Any] = {
        "vocabulary": None,
        "maximum_sequence_length": 64,
        "task": "next-token",
        "image": None,
        "classes": None,
        "auto_class": None,
        "sequence_length": None,
    }
    request = Request(model=model, arguments=arguments, name=f"data-{path.stem}", **{**asked, **settings})
    shutil.copy(kept(request), path)
    assert load_model(path).elements
    return path


def refused(workload):
    """Return why the data of a workload are refused, in one line."""
    with pytest.raises(UserError, match=r"^made: workload\.data") as caught:
        check_data(workload, where="made")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def global_batch(workload: Workload, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of the whole step's batch, of all ranks together."""
    return open_source(workload).batch(seed=seed, step=step, rows=slice(0, workload.global_batch_size))
