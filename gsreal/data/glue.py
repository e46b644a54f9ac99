"""Tasks of the GLUE benchmark, from its distributed files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gsreal.data.source import samples_at, sizes_of
from gsreal.data.text import Tokeniser, tokeniser
from gssim.errors import UserError
from gssim.units import Ints
from gssim.workload import Glue, TokenInput


@dataclass(frozen=True)
class Columns:
    """Columns of a task's sentences and label; by number if the file has no header line."""

    sentences: tuple[str | int, ...]
    label: str | int
    labels: tuple[bytes, ...] = (b"0", b"1")
    """Text of class 0, 1, ..."""
    broken_rows: bool = False
    """Some rows of the distributed file are broken by line ends in their text: they are left out, as is common."""


ENTAILMENT = (b"entailment", b"not_entailment")
TASKS: dict[str, Columns] = {
    "CoLA": Columns((3,), 1),
    "SST-2": Columns(("sentence",), "label"),
    "MRPC": Columns(("#1 String", "#2 String"), "Quality"),
    "QQP": Columns(("question1", "question2"), "is_duplicate", broken_rows=True),
    "MNLI": Columns(("sentence1", "sentence2"), "gold_label", (b"entailment", b"neutral", b"contradiction")),
    "QNLI": Columns(("question", "sentence"), "label", ENTAILMENT),
    "RTE": Columns(("sentence1", "sentence2"), "label", ENTAILMENT),
    "WNLI": Columns(("sentence1", "sentence2"), "label"),
}
"""Wang et al. 2019, "GLUE"; files of the benchmark's own archives. Classes are in the order of its data sets' hub."""


class Sentences:
    """The rows of a task's file, each once an epoch; text is read and tokenised when it is drawn."""

    def __init__(self, data: Glue, model: TokenInput, length: int, batch_size: int) -> None:
        self.length, self.batch_size = length, batch_size
        self.tokeniser: Tokeniser = tokeniser(data.tokenizer)
        self._check(data, model)
        self.table = Table(Path(data.folder) / f"{data.split}.tsv", TASKS[data.task])

    def _check(self, data: Glue, model: TokenInput) -> None:
        classes = len(TASKS[data.task].labels)
        if model.classes != classes:
            raise UserError(f"workload.data.task = '{data.task}': has {classes} classes, the model {model.classes}")
        if self.tokeniser.size > model.vocabulary:
            raise UserError(
                f"workload.data.tokenizer = {data.tokenizer or 'bytes'}: makes {self.tokeniser.size} kinds of token, "
                f"the model's vocabulary is {model.vocabulary}"
            )
        if model.padding is not None and model.padding != self.tokeniser.padding:
            raise UserError(
                f"workload.data.tokenizer = {data.tokenizer or 'bytes'}: fills up with token {self.tokeniser.padding}, "
                f"but the model leaves out token {model.padding} (gsreal trace --padding)"
            )

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return token ids, padded to the sequence length, and classes of these rows."""
        samples = samples_at(len(self.table), seed=seed, step=step, batch_size=self.batch_size, rows=rows)
        ids = np.full((len(samples), self.length), self.tokeniser.padding, dtype=np.int64)
        for row, sentences in enumerate(self.table.sentences(samples)):
            found = self.tokeniser.sequence(sentences, self.length)
            ids[row, : len(found)] = found
        return torch.from_numpy(ids), torch.from_numpy(self.table.classes[samples])

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return the number of rows of each part."""
        return sizes_of(rows)


class Table:
    """A file of tab-separated rows (no quoting): the start of each row, and its class; text stays in the file."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self.path, self._columns = path, columns
        self._places: tuple[int, ...] = ()
        begins, classes = self._scanned()
        if not begins:
            raise UserError(f"workload.data.folder: {path}: has no rows")
        self._begins: Ints = np.array(begins, dtype=np.int64)
        self.classes: Ints = np.array(classes, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.classes)

    def sentences(self, samples: Ints) -> list[tuple[bytes, ...]]:
        """Return the sentences of these rows."""
        rows = []
        with self.path.open("rb") as file:
            for sample in samples:
                file.seek(self._begins[sample])
                fields = _fields(file.readline())
                rows.append(tuple(fields[place] for place in self._places))
        return rows

    def _scanned(self) -> tuple[list[int], list[int]]:
        """Return the starts of the rows, and their classes."""
        begins, classes = [], []
        try:
            with self.path.open("rb") as file:
                label, width, position = self._header(file.readline())
                file.seek(position)
                for number, line in enumerate(file, start=2 if position else 1):
                    class_ = self._class(_fields(line), label, width, number)
                    if class_ is not None:
                        begins.append(position)
                        classes.append(class_)
                    position += len(line)
        except FileNotFoundError:
            raise UserError(f"workload.data.folder: {self.path}: no such file of a GLUE task") from None
        except OSError as error:
            raise UserError(f"workload.data.folder: {self.path}: cannot be read: {error}") from None
        return begins, classes

    def _header(self, first: bytes) -> tuple[int, int, int]:
        """Return the label's column, the number of columns of a row, and the start of the rows.

        Store the sentences' columns.
        """
        wanted = (*self._columns.sentences, self._columns.label)
        numbers = [each for each in wanted if isinstance(each, int)]
        if len(numbers) < len(wanted):
            names = [each.decode("utf-8", errors="replace") for each in _fields(first.removeprefix(b"\xef\xbb\xbf"))]
            missing = [each for each in wanted if each not in names]
            if missing:
                raise UserError(
                    f"workload.data.folder: {self.path}: lacks the column '{missing[0]}'; has {', '.join(names)[:200]}"
                )
            numbers = [names.index(str(each)) for each in wanted]
        *sentences, label = numbers
        self._places = tuple(sentences)
        return label, max(numbers) + 1, 0 if isinstance(self._columns.label, int) else len(first)

    def _class(self, fields: list[bytes], label: int, width: int, number: int) -> int | None:
        """Return a row's class; None if the row is empty, or known to be broken."""
        if len(fields) >= width and fields[label] in self._columns.labels:
            return self._columns.labels.index(fields[label])
        if self._columns.broken_rows or fields == [b""]:
            return None
        if len(fields) < width:
            raise UserError(
                f"workload.data.folder: {self.path}: line {number} has {len(fields)} columns, {width} are needed"
            )
        text = fields[label].decode("utf-8", errors="replace")[:40]
        allowed = ", ".join(each.decode() for each in self._columns.labels)
        raise UserError(f"workload.data.folder: {self.path}: line {number}: the label is {text!r}; allowed: {allowed}")


def _fields(line: bytes) -> list[bytes]:
    return line.rstrip(b"\r\n").split(b"\t")
