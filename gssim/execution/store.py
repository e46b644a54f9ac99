"""Stores of finished work, with which an interrupted command continues, and fingerprints of the code that did it.

A store has one file, or one line of a file, per item. Each item has a key made of everything that its value depends
on. An item with another key, or a damaged one, is computed again. Only one process at a time writes to a store: it
holds the output's lock (`gssim.execution.files.locked`).
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar
from uuid import uuid4

from gssim.errors import UserError
from gssim.execution.files import remove_partial, write_text

Item = TypeVar("Item")
Record = dict[str, Any]


@dataclass(frozen=True)
class FileStore(Generic[Item]):
    """Store with one file per item, by name, in a folder of the user's."""

    folder: Path
    read: Callable[[Path], Item]
    """Reads an item from its file; raises UserError if the file is missing or damaged."""
    text: Callable[[Item], str]
    """Gives the content of an item's file."""
    key: Callable[[Item], object]
    """Gives the key of an item that was read; may raise UserError for an item without one."""
    is_exact: bool = False
    """Whether a file is used only if it has exactly the text that would be written; for items cheap to redo."""

    def kept(self, name: str, key: object) -> Item | None:
        """Return the item in the file `name` if its key is `key`; else None."""
        file = self.folder / name
        remove_partial(file)
        try:
            item = self.read(file)
            is_wanted = self.key(item) == key
        except UserError:  # the file is missing or damaged
            return None
        if is_wanted and self.is_exact:
            is_wanted = file.read_text(encoding="utf-8") == self.text(item)
        return item if is_wanted else None

    def keep(self, name: str, item: Item) -> None:
        """Write an item whole or not at all; raise UserError where it cannot be written."""
        write_text(self.folder / name, self.text(item))


PATTERN = "gssim-*.jsonl"
"""Pattern of the names of files of records; nothing else in the folder is read or removed."""


class RecordStore:
    """Store of many small items until all are finished, in a temporary folder: one line each, with key and digest.

    Every process appends to a file of its own. Unfinished or damaged lines are ignored. Only the position of each
    record in its file is kept in memory.
    """

    def __init__(self, folder: Path, wanted: Collection[str]) -> None:
        self.folder = folder
        self._places: dict[str, tuple[Path, int]] = {}
        for file in sorted(folder.glob(PATTERN)):
            place = 0
            with file.open("rb") as stream:
                for line in stream:
                    entry = _read(line) if line.endswith(b"\n") else None
                    if entry is not None and entry[0] in wanted:
                        self._places[entry[0]] = (file, place)
                    place += len(line)
        self._stream: BinaryIO | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def keep(self, key: str, record: Record) -> None:
        """Append a record; raise UserError where it cannot be written."""
        known = {name: value for name, value in record.items() if value is not None}
        try:
            if self._stream is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = self.folder / PATTERN.replace("*", uuid4().hex)
                self._stream = self._file.open("xb")
            self._places[key] = (self._file, self._stream.tell())
            text = json.dumps([key, known])
            self._stream.write(f'{{"sha256": "{_digest(text)}", "row": {text}}}\n'.encode())
            self._stream.flush()
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror}") from None

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        """Yield the records of these keys, in this order."""
        streams: dict[Path, BinaryIO] = {}
        try:
            for key in keys:
                file, place = self._places[key]
                stream = streams.get(file) or streams.setdefault(file, file.open("rb"))
                stream.seek(place)
                yield json.loads(stream.readline())["row"][1]
        finally:
            for stream in streams.values():
                stream.close()

    def close(self) -> None:
        """Close the file to which records are appended."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def remove(self) -> None:
        """Remove all records, and the folder if it holds nothing else."""
        self.close()
        for file in self.folder.glob(PATTERN):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


def _read(line: bytes) -> tuple[str, Record] | None:
    """Return a key and its record; None for a damaged line."""
    try:
        stored = json.loads(line)
        key, record = stored["row"]
        is_whole = stored["sha256"] == _digest(json.dumps(stored["row"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (key, record) if is_whole and isinstance(key, str) and isinstance(record, dict) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SUFFIXES = (".py", ".toml", ".json", ".cpp")
"""Suffixes of the files that determine a package's behaviour."""
NUMERICS = ("simpy", "numpy", "scipy")
"""Packages whose version may change a prediction."""
SHOWN = 16
"""Number of digits of a digest that provenance shows."""


@cache
def package_digest(package: str) -> str:
    """Return the digest of a package's files: its sources and the data beside them. The package is not imported.

    Raises ModuleNotFoundError where it is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {package}", name=package)
    digest = hashlib.sha256()
    for root in spec.submodule_search_locations:
        for folder, inner, names in os.walk(root):
            inner.sort()
            for name in sorted(name for name in names if name.endswith(SUFFIXES)):
                place = os.path.join(folder, name)
                with open(place, "rb") as file:
                    content = file.read()
                digest.update(f"{os.path.relpath(place, root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@cache
def code_digest() -> str:
    """Return the digest of the simulator: its package, presets included, and the versions of its numerical packages."""
    versions = [f"{name} {installed_version(name)}" for name in NUMERICS]
    return hashlib.sha256("\n".join([package_digest("gssim"), *versions]).encode()).hexdigest()


@cache
def installed_version(package: str) -> str:
    """Return the version of an installed package, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
