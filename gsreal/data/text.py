"""Text folders as one memory-mapped stream of tokens: tokenisers, windows for next-token and masked-token prediction.

The tokens are kept in a file, so that no corpus is in memory as a whole. A token is a byte, or that of a tokeniser
trained with the `tokenizers` library.

Tasks of the GLUE benchmark are read from its distributed files.
"""

import codecs
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gsreal.compiled import cache_folder
from gsreal.data.source import IGNORED, samples_at, sizes_of
from gsreal.run.progress import note_progress
from gssim.errors import UserError
from gssim.execution.files import writing
from gssim.units import Ints, excess
from gssim.workload import Glue, TextFolder, TokenInput

MASKED_RATIO = 0.15
"""BERT's fraction of masked tokens (Devlin et al. 2018, section 3.1)."""


@dataclass(frozen=True)
class Windows:
    """Windows of `length` tokens and the one after them, with every start equally likely."""

    tokens: NDArray[np.unsignedinteger]
    """The stream; may be a mapped file: only the drawn windows are read."""
    length: int
    batch_size: int
    mask: int | None
    """The token that replaces masked ones; None: the next token is predicted."""

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return token ids and targets of these rows."""
        starts, masked = self._draw(seed, step)
        windows = self.tokens[starts[rows, None] + np.arange(self.length + 1)].astype(np.int64)
        tokens = windows[:, :-1].copy()
        if masked is None:
            return torch.from_numpy(tokens), torch.from_numpy(windows[:, 1:].copy())
        hidden = masked[rows]
        inputs, targets = np.where(hidden, self.mask, tokens), np.where(hidden, tokens, IGNORED)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return the number of predicted tokens of each part."""
        if self.mask is None:
            return [size * self.length for size in sizes_of(rows)]
        _, masked = self._draw(seed, step)
        assert masked is not None  # as self.mask is not None
        return [int(masked[each].sum()) for each in rows]

    def _draw(self, seed: int, step: int) -> tuple[Ints, NDArray[np.bool_] | None]:
        """Return the start of every row of the step's batch, and its masked positions."""
        random = np.random.default_rng([seed, step])
        starts = random.integers(0, len(self.tokens) - self.length, self.batch_size)
        if self.mask is None:
            return starts, None
        masked = random.random((self.batch_size, self.length)) < MASKED_RATIO
        masked[:, 0] = True  # every sample has a loss term
        return starts, masked


# ASCII control codes with these meanings, which do not occur in text
PADDING, START, SEPARATOR, END, SUBSTITUTE = 0x00, 0x02, 0x03, 0x04, 0x1A
"""NUL, start of text, end of text (a sentence), end of transmission (a document), substitute."""
_CONTROL = bytes.maketrans(bytes([PADDING, START, SEPARATOR, END]), bytes([SUBSTITUTE]) * 4)


class Tokeniser(Protocol):
    """Converts text to token ids below `size`."""

    size: int
    mask: int | None
    """The token that replaces masked ones, if there is one."""

    @property
    def padding(self) -> int:
        """The padding token; raises UserError if there is none."""

    @property
    def end(self) -> int:
        """The token between documents; raises UserError if there is none."""

    def ids(self, text: bytes) -> Ints:
        """Return the ids of a piece of a document, without special tokens."""

    def sequence(self, sentences: tuple[bytes, ...], length: int) -> Ints:
        """Return the ids of one or two sentences with the tokeniser's special tokens, truncated to `length`."""


class ByteTokeniser:
    """A token is a byte of UTF-8: start, sentence, separator, sentence, separator."""

    size, padding, end = 256, PADDING, END
    mask: int | None = None

    def ids(self, text: bytes) -> Ints:
        """Return the bytes; control codes used as special tokens become substitutes."""
        return np.frombuffer(text.translate(_CONTROL), dtype=np.uint8).astype(np.int64)

    def sequence(self, sentences: tuple[bytes, ...], length: int) -> Ints:
        """Return a start, and each sentence with a separator after it; the longest sentences are truncated."""
        room = max(0, length - 1 - len(sentences))
        parts = [np.array([START])]
        for size, sentence in zip(_cut([len(each) for each in sentences], room), sentences, strict=True):
            parts += [self.ids(sentence[:size]), np.array([SEPARATOR])]
        return np.concatenate(parts)[:length]


def _cut(sizes: list[int], room: int) -> list[int]:
    """Return the truncated size of each, the longest truncated first.

    >>> _cut([10, 3], 8), _cut([10, 7], 8), _cut([2, 3], 8)
    ([5, 3], [4, 4], [2, 3])
    """
    left, sizes_left = room, [0] * len(sizes)
    for place, index in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        sizes_left[index] = min(sizes[index], left // (len(sizes) - place))
        left -= sizes_left[index]
    return sizes_left


class TrainedTokeniser:
    """A `tokenizer.json` of the `tokenizers` library; special tokens are recognised by their usual names."""

    def __init__(self, path: Path) -> None:
        self._path, self._inner = path, _loaded(path)
        self.size = 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=0)
        self.mask = self._special("[MASK]", "<mask>")

    @property
    def padding(self) -> int:
        """The padding token: one for padding, else the end of text, as common for GPT-2."""
        return self._needed("[PAD]", "<pad>", "<|endoftext|>", "</s>")

    @property
    def end(self) -> int:
        """The token between documents."""
        return self._needed("<|endoftext|>", "</s>", "<eos>", "[SEP]")

    def ids(self, text: bytes) -> Ints:
        """Return the ids of a piece of a document, without special tokens."""
        encoding = self._inner.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)

    def sequence(self, sentences: tuple[bytes, ...], length: int) -> Ints:
        """Return the ids of one or two sentences by the tokeniser's own template, the longest truncated first."""
        texts = [each.decode("utf-8", errors="replace") for each in sentences]
        self._inner.enable_truncation(max_length=length)
        try:
            return np.array(self._inner.encode(*texts).ids, dtype=np.int64)
        finally:
            self._inner.no_truncation()

    def _special(self, *names: str) -> int | None:
        ids = [self._inner.token_to_id(name) for name in names]
        return next((each for each in ids if each is not None), None)

    def _needed(self, *names: str) -> int:
        token = self._special(*names)
        if token is None:
            raise UserError(f"workload.data.tokenizer = '{self._path}': has none of the tokens {', '.join(names)}")
        return token


def _loaded(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("workload.data.tokenizer: needs the tokenizers library: pip install 'gssim[data]'") from None
    if not path.is_file():
        raise UserError(f"workload.data.tokenizer = '{path}': no such file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(
            f"workload.data.tokenizer = '{path}': no tokenizer.json: {str(error).splitlines()[0]}"
        ) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokeniser(path: str | None) -> Tokeniser:
    """Return the tokeniser in a file, or that of bytes."""
    return ByteTokeniser() if path is None else TrainedTokeniser(Path(path))


SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
PIECE_BYTES = 2**20
"""Long documents are tokenised in pieces of about this size, which end with a line."""
LONGEST_LINE_BYTES = 2**28
"""A document of `.jsonl` is a line, which is read whole."""


def token_stream(data: TextFolder, chosen: Tokeniser) -> NDArray[np.unsignedinteger]:
    """Return all tokens of a folder, an end token after each document; created once, then memory-mapped.

    The file of tokens is identified by the texts' names, sizes and modification times, and by the tokeniser's content.
    """
    files = text_files(Path(data.folder))
    digest = hashlib.sha256(Path(data.tokenizer).read_bytes() if data.tokenizer else b"bytes")
    for path in files:
        state = path.stat()
        digest.update(f"{path.absolute()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode(errors="surrogateescape"))
    file = (cache_folder() if data.cache is None else Path(data.cache)) / f"{digest.hexdigest()[:32]}.tokens"
    dtype: Any = np.uint8 if chosen.size <= 2**8 else np.uint16 if chosen.size <= 2**16 else np.uint32
    if not file.exists():
        print(f"gsreal: makes tokens of {len(files)} files in {data.folder}, once: {file}", file=sys.stderr, flush=True)
        end = np.array([chosen.end], dtype=dtype)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError), writing(file) as out:
                if file.exists():  # another rank has made it, for which `writing` waited
                    raise FileExistsError
                for piece in chain.from_iterable(map(_pieces, files)):
                    note_progress("it makes tokens")
                    out.write((end if piece is None else chosen.ids(piece).astype(dtype)).tobytes())
        except OSError as error:
            raise UserError(f"workload.data.cache = '{file.parent}': cannot be written: {error}") from None
    if not file.stat().st_size:
        raise UserError(f"workload.data.folder = '{data.folder}': its files hold no text")
    return np.memmap(file, dtype=dtype, mode="r")


def text_files(folder: Path) -> list[Path]:
    """Return the files of text below a folder, by path."""
    if not folder.is_dir():
        raise UserError(f"workload.data.folder = '{folder}': no such folder")
    files = sorted(path for path in folder.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file())
    if not files:
        raise UserError(f"workload.data.folder = '{folder}': holds no files of text ({', '.join(SUFFIXES)})")
    return files


def _pieces(path: Path) -> Iterator[bytes | None]:
    """Yield a file's text in pieces, None after each document."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            for piece in _json_lines(file, path) if path.name.endswith((".jsonl", ".jsonl.gz")) else _whole(file, path):
                if (why := excess("expanded_bytes", file.tell())) is not None:
                    raise UserError(f"workload.data.folder: {path}: {why}")
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"workload.data.folder: {path}: cannot be read: {error}") from None


def _whole(file: BinaryIO | gzip.GzipFile, path: Path) -> Iterator[bytes | None]:
    """Yield a file's text in pieces that end with a line, where lines are no longer than a piece, then None.

    Without the byte order mark of UTF-8; raises UserError at another one.
    """
    start = file.read(len(codecs.BOM_UTF8))
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # the first two bytes of UTF-32's, too
        raise UserError(f"workload.data.folder: {path}: is in UTF-16 or UTF-32; allowed: UTF-8")
    if start != codecs.BOM_UTF8:
        file.seek(0)
    empty = True
    while piece := file.read(PIECE_BYTES):
        empty = False
        yield piece + file.readline(PIECE_BYTES)
    if not empty:
        yield None


def _json_lines(file: BinaryIO | gzip.GzipFile, path: Path) -> Iterator[bytes | None]:
    """Yield the field 'text' of each line that is not empty, and None after each: a line is a document."""
    for number in count(1):
        line = file.readline(LONGEST_LINE_BYTES)
        if not line:
            return
        if len(line) == LONGEST_LINE_BYTES:
            raise UserError(f"workload.data.folder: {path}: line {number} has {LONGEST_LINE_BYTES:,} bytes or more")
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            yield text.encode("utf-8", errors="replace")
        except UnicodeDecodeError:
            raise UserError(f"workload.data.folder: {path}: line {number} is not in UTF-8") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"workload.data.folder: {path}: line {number} is no JSON object with a field 'text'"
            ) from None
        yield None


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
            tokens = self.tokeniser.sequence(sentences, self.length)
            ids[row, : len(tokens)] = tokens
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
