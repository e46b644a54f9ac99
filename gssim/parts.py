"""Rows of an unfinished table: kept in a folder beside it as they end, taken up by the next run, gone with the last.

Every run appends to a file of its own, a line a row, with a digest: a line that was not finished, or is not as it was
written, is no row. One run at a time does so: it holds the table's lock.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from gssim.table import Row, files_of
from gssim.units import UserError

PATTERN = "gssim-*.jsonl"
"""Names of the files of rows; nothing else in the folder is read or removed."""


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
        for file in sorted(folder.glob(PATTERN)):
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
                self._file = self.folder / PATTERN.replace("*", uuid4().hex)
                self._stream = self._file.open("xb")
            self._places[fingerprint] = (self._file, self._stream.tell())
            text = json.dumps([fingerprint, known])
            self._stream.write(f'{{"sha256": "{_digest(text)}", "row": {text}}}\n'.encode())
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
                yield json.loads(stream.readline())["row"][1]
        finally:
            for stream in streams.values():
                stream.close()

    def close(self) -> None:
        """Close the file that rows are added to."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def remove(self) -> None:
        """Remove all rows, and their folder where it holds nothing else."""
        self.close()
        for file in self.folder.glob(PATTERN):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


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
        said = json.loads(line)
        fingerprint, row = said["row"]
        is_whole = said["sha256"] == _digest(json.dumps(said["row"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (fingerprint, row) if is_whole and isinstance(fingerprint, str) and isinstance(row, dict) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
