"""From text to token ids: bytes, or a tokeniser trained with the `tokenizers` library."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gssim.units import Ints, UserError

# ASCII's control codes have these very meanings, and text has them not
PADDING, START, SEPARATOR, END, SUBSTITUTE = 0x00, 0x02, 0x03, 0x04, 0x1A
"""NUL, start of text, end of text (a sentence), end of transmission (a document), substitute."""
_CONTROL = bytes.maketrans(bytes([PADDING, START, SEPARATOR, END]), bytes([SUBSTITUTE]) * 4)


class Tokeniser(Protocol):
    """Text to token ids; `size`: ids are below it."""

    size: int
    mask: int | None
    """The token that stands for masked ones, if there is one."""

    @property
    def padding(self) -> int:
        """The token that fills sequences up; raises UserError where there is none."""

    @property
    def end(self) -> int:
        """The token between documents; raises UserError where there is none."""

    def ids(self, text: bytes) -> Ints:
        """Return the ids of a piece of a document, nothing added."""

    def sequence(self, sentences: tuple[bytes, ...], length: int) -> Ints:
        """Return the ids of one or two sentences, marked as the tokeniser does it, cut to at most `length`."""


class ByteTokeniser:
    """A token is a byte of UTF-8: start, sentence, separator, sentence, separator."""

    size, padding, end = 256, PADDING, END
    mask: int | None = None

    def ids(self, text: bytes) -> Ints:
        """Return the bytes; control codes that mark something become substitutes."""
        return np.frombuffer(text.translate(_CONTROL), dtype=np.uint8).astype(np.int64)

    def sequence(self, sentences: tuple[bytes, ...], length: int) -> Ints:
        """Return a start, and each sentence with a separator after it; the longest sentences are cut."""
        room = max(0, length - 1 - len(sentences))
        parts = [np.array([START])]
        for size, sentence in zip(_cut([len(each) for each in sentences], room), sentences, strict=True):
            parts += [self.ids(sentence[:size]), np.array([SEPARATOR])]
        return np.concatenate(parts)[:length]


def _cut(sizes: list[int], room: int) -> list[int]:
    """Return how much of each there is room for, the longest cut first.

    >>> _cut([10, 3], 8), _cut([10, 7], 8), _cut([2, 3], 8)
    ([5, 3], [4, 4], [2, 3])
    """
    left, found = room, [0] * len(sizes)
    for place, index in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        found[index] = min(sizes[index], left // (len(sizes) - place))
        left -= found[index]
    return found


class TrainedTokeniser:
    """A `tokenizer.json` of the `tokenizers` library; its special tokens are known by their usual names."""

    def __init__(self, path: Path) -> None:
        self._path, self._inner = path, _loaded(path)
        self.size = 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=0)
        self.mask = self._special("[MASK]", "<mask>")

    @property
    def padding(self) -> int:
        """The token that fills sequences up: one of padding, else the end of text, as GPT-2's users do."""
        return self._needed("[PAD]", "<pad>", "<|endoftext|>", "</s>")

    @property
    def end(self) -> int:
        """The token between documents."""
        return self._needed("<|endoftext|>", "</s>", "<eos>", "[SEP]")

    def ids(self, text: bytes) -> Ints:
        """Return the ids of a piece of a document, nothing added."""
        found = self._inner.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.array(found.ids, dtype=np.int64)

    def sequence(self, sentences: tuple[bytes, ...], length: int) -> Ints:
        """Return the ids of one or two sentences by the tokeniser's own template, the longest cut first."""
        texts = [each.decode("utf-8", errors="replace") for each in sentences]
        self._inner.enable_truncation(max_length=length)
        try:
            return np.array(self._inner.encode(*texts).ids, dtype=np.int64)
        finally:
            self._inner.no_truncation()

    def _special(self, *names: str) -> int | None:
        found = [self._inner.token_to_id(name) for name in names]
        return next((each for each in found if each is not None), None)

    def _needed(self, *names: str) -> int:
        found = self._special(*names)
        if found is None:
            raise UserError(f"workload.data.tokenizer = '{self._path}': has none of the tokens {', '.join(names)}")
        return found


def _loaded(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("workload.data.tokenizer: needs the tokenizers library: pip install 'gssim[data]'") from None
    if not path.is_file():
        raise UserError(f"workload.data.tokenizer = '{path}': no such file")
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(
            f"workload.data.tokenizer = '{path}': no tokenizer.json: {str(error).splitlines()[0]}"
        ) from None
    found.no_padding()
    found.no_truncation()
    return found


def tokeniser(path: str | None) -> Tokeniser:
    """Return the tokeniser in a file, or that of bytes."""
    return ByteTokeniser() if path is None else TrainedTokeniser(Path(path))
