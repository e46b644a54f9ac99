"""Search for Results in folders and archives, and a table with one row per Result."""

import lzma
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import polars as pl

from gssim.errors import UserError
from gssim.execution.files import parsed_json, read_json
from gssim.result import MEASURED_PHASES, SCHEMA, Result
from gssim.scenario.sweep import SEPARATOR
from gssim.units import excess, validated

RESULT_COLUMNS = {
    "scenario_id": pl.String,
    "source": pl.String,
    "name": pl.String,
    "method": pl.String,
    "threshold": pl.Float64,
    "device": pl.String,
    "ranks": pl.Int64,
    "step_time_s": pl.Float64,
    "step_time_p10_s": pl.Float64,
    "peak_allocated_bytes": pl.Float64,
    "fits": pl.Boolean,
    "throughput_samples_per_s": pl.Float64,
    "push_density": pl.Float64,
    "publish_density": pl.Float64,
    "calibration_id": pl.String,
}


ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
"""Endings of archives in which Results may be packed."""


@dataclass(frozen=True)
class ResultFile:
    """A Result and its file."""

    path: Path
    """Path of the file; of a file in an archive, the path of the archive, then the name in it."""
    modified_ns: int
    result: Result


@dataclass(frozen=True)
class Found:
    """The Results found below some paths."""

    files: tuple[ResultFile, ...]
    skipped: int
    """JSON files in folders and archives that are no Results (cluster files, gradient statistics, ...)."""


def find_results(paths: Sequence[Path]) -> Found:
    """Return the Results named by `paths`, each once: files as they are, folders and archives searched for JSON that is
    a Result.

    Raises UserError for a missing path, a named file that is no Result, an archive that cannot be read completely, and
    a damaged Result: it must not silently be missing from a comparison.
    """
    files: dict[Path, ResultFile] = {}
    skipped: set[Path] = set()
    for path in paths:
        inside = path.is_dir()
        searched = sorted(file for file in path.rglob("*") if file.name.endswith((".json", *ARCHIVES)))
        for candidate in searched if inside else [path]:
            resolved = candidate.resolve()
            if resolved in files or (inside and not candidate.is_file()):
                continue
            if candidate.name.endswith(ARCHIVES):
                for member, modified_ns, content in _archived_json(candidate):
                    _add(resolved / member, candidate / member, modified_ns, content, files, skipped)
                continue
            try:
                data = read_json(candidate)
            except UserError:
                if not inside:
                    raise
                data = None  # unreadable or no JSON, so no Result
            if inside and not _is_result(data):
                skipped.add(resolved)
            else:
                files[resolved] = _read(data, candidate)
    return Found(tuple(files.values()), len(skipped))


def _archived_json(archive: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield name, time of modification and content of each JSON file of an archive, without unpacking it to disk.

    Raises UserError where it is no archive, or is truncated.
    """
    expanded_bytes = 0
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                expanded_bytes += member.size
                for limit, size in (("file_bytes", member.size), ("expanded_bytes", expanded_bytes)):
                    if (why := excess(limit, size)) is not None:
                        raise UserError(f"{archive}: {member.name!r}: {why}")
                stream = opened.extractfile(member) if member.isfile() and member.name.endswith(".json") else None
                if stream is not None:
                    yield member.name, int(member.mtime * 1e9), stream.read()
    except FileNotFoundError:
        raise UserError(f"{archive}: no such file") from None
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise UserError(f"{archive}: cannot be read as an archive: {error}") from None


def _add(
    place: Path,
    path: Path,
    modified_ns: int,
    content: bytes,
    files: dict[Path, ResultFile],
    skipped: set[Path],
) -> None:
    """Add a JSON file of an archive to the Results, or to the skipped files."""
    if place in files:
        return
    try:
        data = parsed_json(content, file=str(path))
    except UserError:  # no JSON, so no Result
        data = None
    if not _is_result(data):
        skipped.add(place)
        return
    result = validated(Result, data, file=str(path))
    _check(result, path)
    files[place] = ResultFile(path, modified_ns, result)


def _is_result(data: Any) -> bool:
    return isinstance(data, dict) and data.get("schema") == SCHEMA


def _read(data: Any, path: Path) -> ResultFile:
    result = validated(Result, data, file=str(path))
    try:
        modified_ns = path.stat().st_mtime_ns
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    _check(result, path)
    return ResultFile(path, modified_ns, result)


TABLES = (
    *("workload", "workload.model", "cluster", "run", "network"),
    *("plan.push", "plan.publish", "plan.shares", "plan.shares.replanning"),
)
"""Keys of a resolved scenario that must be tables where they exist."""


def _check(result: Result, path: Path) -> None:
    """Raise UserError for invalid parts of a Result that its type does not check: `scenario`, phases, numbers."""
    plan = result.scenario.get("plan")
    if not isinstance(result.scenario.get("name"), str):
        raise UserError(f"{path}: scenario.name: missing")
    if not isinstance(plan, dict) or not isinstance(plan.get("method"), str):
        raise UserError(f"{path}: scenario.plan.method: missing")
    _check_tables(result, path)
    threshold = threshold_of(result)
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, (int, float))):
        raise UserError(f"{path}: scenario.plan.push.threshold = {threshold!r}: must be a number")
    for key, values in (
        ("step_time_s", [result.step_time_s]),
        ("phases_s", result.phases_s.values()),
        ("ranks: peak_allocated_bytes", peaks_by_rank(result).values()),
    ):
        for value in values:
            if not (isfinite(value) and value >= 0):  # JSON as Python reads it has NaN
                raise UserError(f"{path}: {key} = {value}: must be finite and not negative")
    unknown = sorted(result.phases_s.keys() - set(MEASURED_PHASES))
    if unknown:
        raise UserError(f"{path}: phases_s.{unknown[0]}: unknown phase; allowed: {', '.join(MEASURED_PHASES)}")


def _check_tables(result: Result, path: Path) -> None:
    """Raise UserError where a table of the scenario is another value, or a figure refers to a rank that is missing."""
    for key in TABLES:
        inner: Any = result.scenario
        for part in key.split("."):
            inner = inner.get(part) if isinstance(inner, dict) else None
        if inner is not None and not isinstance(inner, dict):
            raise UserError(f"{path}: scenario.{key} = {inner!r:.60}: must be a table")
    if not result.ranks:
        raise UserError(f"{path}: ranks: there is none")
    for name, figure in (("margin", result.margin), ("does_not_fit", result.does_not_fit)):
        if figure is not None and not any(figure.rank in entry.ranks for entry in result.ranks):
            raise UserError(f"{path}: {name}.rank = {figure.rank}: is none of the ranks")


def name_of(result: Result) -> str:
    """Return the scenario's name."""
    return str(result.scenario["name"])


def told_apart(names: Sequence[str], *words: Sequence[str]) -> list[str]:
    """Return names in which equal ones are followed by those of their words that differ.

    >>> told_apart(["demo", "demo", "mine"], ["ddp", "gs", "gs"], ["dense", "dense", "dense"])
    ['demo, ddp', 'demo, gs', 'mine']
    """
    told = list(names)
    for column in words:
        words_of: dict[str, set[str]] = defaultdict(set)
        for name, word in zip(told, column, strict=True):
            words_of[name].add(word)
        told = [f"{name}, {word}" if len(words_of[name]) > 1 else name for name, word in zip(told, column, strict=True)]
    return told


def threshold_words(thresholds: Iterable[float | None]) -> list[str]:
    """Return a label for each threshold."""
    return ["dense" if threshold is None else f"threshold {threshold:g}" for threshold in thresholds]


def short_ids(ids: Sequence[str]) -> list[str]:
    """Return six characters of each id, or as many more as make them unique."""
    length = next((n for n in range(6, 64) if len({identity[:n] for identity in ids}) == len(set(ids))), 64)
    return [identity[:length] for identity in ids]


def sweep_group(result: Result) -> str:
    """Return the group of a sweep's Result: the part of its name before `--`; empty outside of sweeps.

    Clusters of two groups may differ only in rates, which are no part of a scenario_id.
    """
    group, separator, _ = name_of(result).partition(SEPARATOR)
    return group if separator else ""


def method_of(result: Result) -> str:
    """Return the plan's method."""
    return str(result.scenario["plan"]["method"])


def threshold_of(result: Result) -> Any:
    """Return the push threshold (inf: nothing is pushed), or None where there is none."""
    push = result.scenario["plan"].get("push") or {}
    threshold: Any = push.get("threshold") if isinstance(push, dict) else None
    return inf if threshold == "inf" else threshold  # JSON has no such number


def devices_by_rank(result: Result) -> dict[int, str]:
    """Return the device of each rank, in order of rank."""
    return dict(sorted((rank, entry.device) for entry in result.ranks for rank in entry.ranks))


def peaks_by_rank(result: Result) -> dict[int, float]:
    """Return the peak of allocated bytes of each rank, in order of rank."""
    return dict(sorted((rank, entry.peak_allocated_bytes) for entry in result.ranks for rank in entry.ranks))


def result_table(results: Iterable[Result]) -> pl.DataFrame:
    """Return one row per result; `peak_allocated_bytes` is of the rank that needs most."""
    rows = []
    for result in results:
        threshold, devices = threshold_of(result), devices_by_rank(result)
        row = {
            "scenario_id": result.scenario_id,
            "source": result.source,
            "name": name_of(result),
            "method": method_of(result),
            "threshold": None if threshold is None else float(threshold),
            "device": "; ".join(dict.fromkeys(devices.values())),
            "ranks": len(devices),
            "step_time_s": result.step_time_s,
            "step_time_p10_s": result.step_time_p10_s,
            "peak_allocated_bytes": max(peaks_by_rank(result).values(), default=None),
            "fits": result.fits,
            "throughput_samples_per_s": result.throughput_samples_per_s,
            "push_density": result.density.push,
            "publish_density": result.density.publish,
            "calibration_id": result.calibration_id,
        }
        rows.append(row)
    return pl.DataFrame(rows, schema=RESULT_COLUMNS)
