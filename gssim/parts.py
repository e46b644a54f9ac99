"""Rows of an unfinished table: kept in a folder beside it as they end, taken up by the next run, gone with the last.

Every run appends to a file of its own, a line a row: a line that was not finished is no row.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from gssim.table import Row, files_of
from gssim.units import UserError

SUFFIX = ".jsonl"


def parts_folder(file: Path) -> Path:
    """Return where the rows of a table are kept until it is whole.

    >>> str(parts_folder(Path("out/table.csv")))
    'out/table.parquet.parts'
    """
    parquet = files_of(file)[0]
    return parquet.with_name(f"{parquet.name}.parts")


class Parts:
    """Rows by the fingerprints of their points. Of a row only its place in a file is held in memory."""

    def __init__(self, folder: Path, wanted: Collection[str]) -> None:
        self.folder = folder
        self._places: dict[str, tuple[Path, int]] = {}
        for file in sorted(folder.glob(f"*{SUFFIX}")):
            for place, line in _lines(file):
                found = _read(line)
                if found is not None and found[0] in wanted:
                    self._places[found[0]] = (file, place)
        self._stream: BinaryIO | None = None

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._places

    def __len__(self) -> int:
        return len(self._places)

    def keep(self, fingerprint: str, row: Row) -> None:
        """Add a row; raise UserError where that cannot be."""
        known = {name: value for name, value in row.items() if value is not None}
        try:
            if self._stream is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(dir=self.folder, suffix=SUFFIX)
                self._file, self._stream = Path(name), os.fdopen(handle, "wb")
            self._places[fingerprint] = (self._file, self._stream.tell())
            self._stream.write(json.dumps([fingerprint, known]).encode() + b"\n")
            self._stream.flush()
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror}") from None

    def rows(self, fingerprints: Sequence[str]) -> Iterator[Row]:
        """Yield rows in the order of these fingerprints."""
        streams: dict[Path, BinaryIO] = {}
        try:
            for each in fingerprints:
                file, place = self._places[each]
                stream = streams.get(file) or streams.setdefault(file, file.open("rb"))
                stream.seek(place)
                yield json.loads(stream.readline())[1]
        finally:
            for stream in streams.values():
                stream.close()

    def close(self) -> None:
        """Close the file that rows are added to."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def remove(self) -> None:
        """Remove all rows."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the finished lines of a file, with their places."""
    place = 0
    with file.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield place, line
            place += len(line)


def _read(line: bytes) -> tuple[str, Row] | None:
    """Return a row and its fingerprint; None where a line is damaged."""
    try:
        fingerprint, row = json.loads(line)
    except ValueError:
        return None
    return (fingerprint, row) if isinstance(fingerprint, str) and isinstance(row, dict) else None
