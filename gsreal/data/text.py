"""A folder of text as one stream of tokens, kept in a file that is mapped: no corpus is in memory as a whole."""

import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gsreal.compiled import cache_folder
from gsreal.data.tokenisers import Tokeniser
from gsreal.watch import note_progress
from gssim.data import TextFolder
from gssim.files import writing
from gssim.limits import excess
from gssim.units import UserError

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
PIECE_BYTES = 2**20
"""Long documents are tokenised in pieces of about this size, which end with a line."""
LONGEST_LINE_BYTES = 2**28
"""A document of `.jsonl` is a line, which is read whole."""


def token_stream(data: TextFolder, chosen: Tokeniser) -> NDArray[np.unsignedinteger]:
    """Return all tokens of a folder, an end token after each document; made once, then mapped.

    The file of tokens is found again by the texts' names, sizes and times of change, and by the tokeniser's content.
    """
    files = text_files(Path(data.folder))
    made = _cache_folder(data) / f"{_identity(data, files)}.tokens"
    dtype = _dtype(chosen.size)
    if not made.exists():
        print(f"gsreal: makes tokens of {len(files)} files in {data.folder}, once: {made}", file=sys.stderr, flush=True)
        _write(made, files, chosen, dtype)
    if not made.stat().st_size:
        raise UserError(f"workload.data.folder = '{data.folder}': its files hold no text")
    return np.memmap(made, dtype=dtype, mode="r")


def text_files(folder: Path) -> list[Path]:
    """Return the files of text below a folder, by path."""
    if not folder.is_dir():
        raise UserError(f"workload.data.folder = '{folder}': no such folder")
    found = sorted(path for path in folder.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file())
    if not found:
        raise UserError(f"workload.data.folder = '{folder}': holds no files of text ({', '.join(SUFFIXES)})")
    return found


def _dtype(vocabulary: int) -> Any:
    return np.uint8 if vocabulary <= 2**8 else np.uint16 if vocabulary <= 2**16 else np.uint32


def _cache_folder(data: TextFolder) -> Path:
    if data.cache is not None:
        return Path(data.cache)
    return cache_folder()


def _identity(data: TextFolder, files: list[Path]) -> str:
    """Return what tells these texts, read by this tokeniser, from all others."""
    digest = hashlib.sha256(Path(data.tokenizer).read_bytes() if data.tokenizer else b"bytes")
    for path in files:
        state = path.stat()
        digest.update(f"{path.absolute()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _write(made: Path, files: list[Path], chosen: Tokeniser, dtype: Any) -> None:
    """Write the file of tokens, or nothing; of ranks that need it at the same time one does, and the others wait."""
    end = np.array([chosen.end], dtype=dtype)
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), writing(made) as out:
            if made.exists():  # another rank has made it, for which `writing` waited
                raise FileExistsError
            for path in files:
                for piece in _pieces(path):
                    note_progress("it makes tokens")
                    out.write((end if piece is None else chosen.ids(piece).astype(dtype)).tobytes())
    except OSError as error:
        raise UserError(f"workload.data.cache = '{made.parent}': cannot be written: {error}") from None


def _pieces(path: Path) -> Iterator[bytes | None]:
    """Yield a file's text in pieces, None after each document."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            for piece in _json_lines(file, path) if ".jsonl" in path.suffixes else _whole(file):
                if (why := excess("expanded_bytes", file.tell())) is not None:
                    raise UserError(f"workload.data.folder: {path}: {why}")
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"workload.data.folder: {path}: cannot be read: {error}") from None


def _whole(file: BinaryIO | gzip.GzipFile) -> Iterator[bytes | None]:
    empty = True
    while piece := file.read(PIECE_BYTES):
        empty = False
        yield piece + file.readline(PIECE_BYTES)
    if not empty:
        yield None


def _json_lines(file: BinaryIO | gzip.GzipFile, path: Path) -> Iterator[bytes | None]:
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
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"workload.data.folder: {path}: line {number} is no JSON object with a field 'text'"
            ) from None
        yield None
