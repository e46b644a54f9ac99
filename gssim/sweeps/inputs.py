"""Input files of sweep points: digests, by which finished rows are reused, and transfer to other machines."""

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

from gssim.execution import code_digest
from gssim.execution.cache import Shared
from gssim.execution.files import scratch_folder
from gssim.scenario import read_toml
from gssim.scenario.loading import IN_FILES
from gssim.scenario.overrides import parsed_override
from gssim.scenario.sweep import Point
from gssim.workload import shipped_models

SUFFIXES = (".toml", ".json")
"""Suffixes of files that predictions read."""


class Fingerprints:
    """Digests of points. Points with equal digests have equal inputs, and so equal predictions."""

    def __init__(self) -> None:
        self._digests: dict[Path, str] = {}
        self._overrides: dict[tuple[str, str], str] = {}
        """By override and the point's file: most points have the same few."""
        self._code = code_digest()

    def of_point(self, point: Point) -> str:
        """Return the digest of a point's name, overrides and files, and of the simulator's code."""
        overrides = [self._override(each, point.file) for each in point.overrides if not _names(each)]
        return digest_of([self._code, point.name, point.variant, point.values, overrides, self.of_file(point.file)])

    def of_file(self, file: Path) -> str:
        """Return the digest of a file, for TOML with all files that it names; a missing file counts as empty."""
        if file not in self._digests:
            self._digests[file] = ""  # for a file that names itself
            named = [(name, self.of_file(place)) for name, place in sorted(named_in(file))]
            content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
            self._digests[file] = digest_of([content, named])
        return self._digests[file]

    def _override(self, override: str, scenario: Path) -> str:
        """Return an override in which a file is identified by its content instead of its path."""
        place = (override, str(scenario))  # a path takes long to hash and to compare
        if place not in self._overrides:
            key, value = parsed_override(override)
            file = named_by(value, Path(), scenario.parent) or _shipped(value)
            self._overrides[place] = override if file is None else f"{key}={file.name} {self.of_file(file)}"
        return self._overrides[place]


def _names(override: str) -> bool:
    """Return whether an override only sets the point's name."""
    return override.startswith("name=")


def digest_of(data: object) -> str:
    """Return the digest of plain data."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def named_by(value: Any, *folders: Path) -> Path | None:
    """Return the file that a value names, looked up in these folders; None if it names none."""
    if not isinstance(value, str) or not value.endswith(SUFFIXES):
        return None
    return next((folder / value for folder in folders if (folder / value).is_file()), None)


def _shipped(value: Any) -> Path | None:
    """Return the file of a shipped model, if a value is its name.

    In a checkout these files lie outside the package, so that the digest of its code is not changed by a new trace.
    """
    return shipped_models().get(value) if isinstance(value, str) else None


def named_in(file: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that a TOML file names, beside it or as a shipped model, with their names there."""
    if file.suffix != ".toml" or not file.is_file():
        return
    try:
        data = read_toml(file)[1]
    except (ValueError, RecursionError):  # reported when it is loaded
        return
    for text in set(_texts(data)):
        path = named_by(text, file.parent) or _shipped(text)
        if path is not None:
            yield text, path


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, (dict, list)):
        for each in data.values() if isinstance(data, dict) else data:
            yield from _texts(each)


# On other machines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packed:
    """Files by their absolute paths, packed for a machine that cannot read them."""

    content: bytes
    """The files, compressed."""
    digest: str
    folder: str
    """Working directory; relative paths in points refer to it."""


REFERENCES: dict[str, tuple[str, ...]] = {
    "cluster": IN_FILES,
    **dict.fromkeys((f"cluster.{key}" for key in IN_FILES), ()),
    "workload.model": (),
    "workload.gradients": (),
    "search.study": (),
}
"""Keys by which a scenario refers to files, each with the keys by which such a file refers to further files. No other
key names a file."""


def packed(points: Iterable[Point]) -> Packed:
    """Return all files to which points refer by their scenarios' keys."""
    texts: dict[str, str] = {}
    seen: set[tuple[Path, str]] = set()
    for point in points:
        folder = point.file.parent
        if (point.file, "") not in seen:
            seen.add((point.file, ""))
            _collect(point.file, texts)
            _collect_references(_content(point.file), "", (folder,), texts)
        for override in point.overrides:
            if (folder, override) not in seen and not _names(override):
                seen.add((folder, override))
                key, value = parsed_override(override)
                _collect_references({key: value}, "", (Path(), folder), texts)
    content = zlib.compress(json.dumps(texts, sort_keys=True).encode())
    return Packed(content, hashlib.sha256(content).hexdigest(), os.getcwd())


def _collect_references(data: dict[str, Any], under: str, folders: Sequence[Path], found: dict[str, str]) -> None:
    """Collect the files to which a scenario's table, or an override, refers, and those to which these refer."""
    for key, value in data.items():
        path = f"{under}{key}"
        if isinstance(value, dict):
            _collect_references(value, f"{path}.", folders, found)
        elif isinstance(value, str) and path in REFERENCES:
            for file in (folder / value for folder in folders):
                if file.is_file():
                    _collect(file, found)
                    content = _content(file) if REFERENCES[path] else {}
                    named = [content[each] for each in REFERENCES[path] if isinstance(content.get(each), str)]
                    for name in named:
                        _collect(file.parent / name, found)
                    break


def _content(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file; empty if it is damaged, which its loader will report."""
    try:
        return read_toml(file)[1]
    except (OSError, ValueError, RecursionError):
        return {}


def _collect(file: Path, found: dict[str, str]) -> None:
    place = os.path.abspath(file)
    if place not in found and file.is_file():
        with file.open(**BYTE_EXACT) as stream:  # `read_text` takes no `newline` before Python 3.13
            found[place] = stream.read()


BYTE_EXACT: Any = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
"""Arguments of `open` that preserve the bytes of any file."""


class Unpacked:
    """Files of another machine in a temporary folder of this one, for the lifetime of the object."""

    def __init__(self, packed: Packed) -> None:
        with ExitStack() as stack:
            self.root, self.source_folder = str(stack.enter_context(scratch_folder("gssim-run-"))), packed.folder
            weakref.finalize(self, stack.pop_all().close)
        for path, text in json.loads(zlib.decompress(packed.content)).items():
            place = Path(self.root + path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, **BYTE_EXACT)
        Path(self.root + self.source_folder).mkdir(parents=True, exist_ok=True)

    def localised(self, point: Point) -> Point:
        """Return a point that refers to the unpacked files."""
        file = Path(self._local_path(str(point.file)))
        overrides = tuple(self._override(each) for each in point.overrides)
        return Point(point.name, file, overrides, point.variant, point.values)

    def original_text(self, text: str) -> str:
        """Return a message with the paths of the original machine."""
        return text.replace(f"{self.root}{self.source_folder}{os.sep}", "").replace(self.root, "")

    def _local_path(self, path: str) -> str:
        return self.root + (path if os.path.isabs(path) else os.path.join(self.source_folder, path))

    def _override(self, override: str) -> str:
        key, value = parsed_override(override)
        if key in REFERENCES and isinstance(value, str) and os.path.isfile(self._local_path(value)):
            return f"{key}={json.dumps(self._local_path(value), ensure_ascii=False)}"
        return override


def unpacked(files_of_points: Packed, shared: Shared) -> Unpacked:
    """Return the files of another machine, unpacked once into a folder of this one."""
    return shared.once("unpacked", files_of_points.digest, lambda: Unpacked(files_of_points), most=2)
