"""What points are predicted from: the files that they name, and what tells whether these are as they were."""

import hashlib
import json
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gssim.cache import Shared
from gssim.execution import code_digest
from gssim.files import scratch_folder
from gssim.scenario import parsed_override, read_toml
from gssim.scenario.sweep import Point

SUFFIXES = (".toml", ".json")
"""Of files that predictions read."""


class Fingerprints:
    """Digests of points: equal ones have the same prediction, for all that it is made from is equal."""

    def __init__(self) -> None:
        self._kept: dict[Path, str] = {}
        self._overrides: dict[tuple[str, Path], str] = {}
        self._code = code_digest()

    def of_point(self, point: Point) -> str:
        """Return the digest of a point's name, its overrides, the files that are read, and of this simulator."""
        overrides = [self._override(each, point.file.parent) for each in point.overrides if not _names(each)]
        return digest_of([self._code, point.name, point.variant, point.values, overrides, self.of_file(point.file)])

    def of_file(self, file: Path) -> str:
        """Return the digest of a file and, of TOML, all that it names; of one that is not there, of nothing."""
        if file not in self._kept:
            self._kept[file] = ""  # a file that names itself
            named = [(name, self.of_file(place)) for name, place in sorted(named_in(file))]
            content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
            self._kept[file] = digest_of([content, named])
        return self._kept[file]

    def _override(self, override: str, folder: Path) -> str:
        """Return an override with the file that it names, if any, told by its content, not by its place."""
        if (override, folder) not in self._overrides:
            key, value = parsed_override(override)
            found = named_by(value, Path(), folder)
            told = override if found is None else f"{key}={found.name} {self.of_file(found)}"
            self._overrides[override, folder] = told
        return self._overrides[override, folder]


def _names(override: str) -> bool:
    """Return whether an override is but the point's name."""
    return override.startswith("name=")


def digest_of(data: object) -> str:
    """Return the digest of plain data."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def named_by(value: Any, *folders: Path) -> Path | None:
    """Return the file that a value names, looked up in these folders, if it names one."""
    if not isinstance(value, str) or not value.endswith(SUFFIXES):
        return None
    return next((folder / value for folder in folders if (folder / value).is_file()), None)


def named_in(file: Path) -> Iterator[tuple[str, Path]]:
    """Yield all files that a TOML file names beside it, with their names there."""
    if file.suffix != ".toml" or not file.is_file():
        return
    try:
        data = read_toml(file)[1]
    except (ValueError, RecursionError):  # whoever loads it is told
        return
    for text in set(_texts(data)):
        found = named_by(text, file.parent)
        if found is not None:
            yield text, found


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, (dict, list)):
        for each in data.values() if isinstance(data, dict) else data:
            yield from _texts(each)


# On other machines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packed:
    """Files by their absolute paths, for a machine that does not see them."""

    content: bytes
    """Compressed."""
    digest: str
    folder: str
    """The working directory, from which points name files."""


REFERENCES: dict[str, tuple[str, ...]] = {
    "cluster": ("device_types", "backend_cost"),
    "workload.model": (),
    "workload.gradients": (),
    "search.study": (),
}
"""Keys by which a scenario refers to files, and those by which these refer to others; no other text names a file."""


def packed(points: Iterable[Point]) -> Packed:
    """Return all files that points refer to by their scenario's keys."""
    found: dict[str, str] = {}
    seen: set[tuple[Path, str]] = set()
    for point in points:
        folder = point.file.parent
        if (point.file, "") not in seen:
            seen.add((point.file, ""))
            _gather(point.file, found)
            _gather_references(_content(point.file), "", (folder,), found)
        for override in point.overrides:
            if (folder, override) not in seen and not _names(override):
                seen.add((folder, override))
                key, value = parsed_override(override)
                _gather_references({key: value}, "", (Path(), folder), found)
    content = zlib.compress(json.dumps(found, sort_keys=True).encode())
    return Packed(content, hashlib.sha256(content).hexdigest(), os.getcwd())


def _gather_references(data: dict[str, Any], under: str, folders: Sequence[Path], found: dict[str, str]) -> None:
    """Gather the files that a scenario's table, or an override, refers to, and what these refer to."""
    for key, value in data.items():
        path = f"{under}{key}"
        if isinstance(value, dict):
            _gather_references(value, f"{path}.", folders, found)
        elif isinstance(value, str) and path in REFERENCES:
            for file in (folder / value for folder in folders):
                if file.is_file():
                    _gather(file, found)
                    said = _content(file) if REFERENCES[path] else {}
                    named = [said[each] for each in REFERENCES[path] if isinstance(said.get(each), str)]
                    for name in named:
                        _gather(file.parent / name, found)
                    break


def _content(file: Path) -> dict[str, Any]:
    """Return what a TOML file holds; nothing where it is none, of which whoever loads it is told."""
    try:
        return read_toml(file)[1]
    except (OSError, ValueError, RecursionError):
        return {}


def _gather(file: Path, found: dict[str, str]) -> None:
    place = os.path.abspath(file)
    if place not in found and file.is_file():
        with file.open(**AS_IT_IS) as stream:  # `read_text` takes no `newline` before Python 3.13
            found[place] = stream.read()


AS_IT_IS: Any = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
"""How files are read here and written there, with the same bytes whatever they hold."""


class Unpacked:
    """Files of another machine in a folder of this one, as long as this object lives."""

    def __init__(self, packed: Packed) -> None:
        with ExitStack() as stack:
            self.root, self.there = str(stack.enter_context(scratch_folder("gssim-run-"))), packed.folder
            weakref.finalize(self, stack.pop_all().close)
        for path, text in json.loads(zlib.decompress(packed.content)).items():
            place = Path(self.root + path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, **AS_IT_IS)
        Path(self.root + self.there).mkdir(parents=True, exist_ok=True)

    def here(self, point: Point) -> Point:
        """Return a point that names these files."""
        file = Path(self._here(str(point.file)))
        overrides = tuple(self._override(each) for each in point.overrides)
        return Point(point.name, file, overrides, point.variant, point.values)

    def told(self, text: str) -> str:
        """Return a message as the other machine would have said it."""
        return text.replace(f"{self.root}{self.there}{os.sep}", "").replace(self.root, "")

    def _here(self, path: str) -> str:
        return self.root + (path if os.path.isabs(path) else os.path.join(self.there, path))

    def _override(self, override: str) -> str:
        key, value = parsed_override(override)
        if key in REFERENCES and isinstance(value, str) and os.path.isfile(self._here(value)):
            return f"{key}={json.dumps(self._here(value), ensure_ascii=False)}"
        return override


def unpacked(files_of_points: Packed, shared: Shared) -> Unpacked:
    """Return files of another machine, in a folder of this one that is made once."""
    return shared.once("unpacked", files_of_points.digest, lambda: Unpacked(files_of_points), most=2)
