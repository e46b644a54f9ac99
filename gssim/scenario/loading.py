"""Scenarios, models and clusters from TOML files, with overrides.

Overrides of a scenario's keys, as `--set` takes them, from tables of TOML and into them.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from gssim.cache import Same, Shared
from gssim.cluster import Cluster, presets
from gssim.errors import MistakenNameError, UserError
from gssim.files import read_text
from gssim.gradient_statistics import GradientStatistics, read_gradients
from gssim.scenario.checks import check
from gssim.scenario.scenario import Loaded, Scenario, Source
from gssim.units import validated
from gssim.workload import PATHS, Model, unrolled


def as_overrides(table: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a table of TOML as `--set` takes it, a key each.

    >>> as_overrides({"plan": {"push": {"threshold": 0.001}, "method": "gs"}, "run": {"steps": 30}})
    ['plan.push.threshold=0.001', 'plan.method="gs"', 'run.steps=30']
    """
    found = []
    for key, value in table.items():
        found += as_overrides(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}={toml(value)}"]
    return found


def overrides_of(changes: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Return changes of keys as `--set` takes them; raise UserError for a value that TOML does not have.

    >>> overrides_of({"plan.method": "gs", "plan.shares.batch": (0.75, 0.25)})
    ['plan.method="gs"', 'plan.shares.batch=[0.75, 0.25]']
    """
    if isinstance(changes, str):
        raise UserError(f"{changes}: must be a mapping of keys to values, or a list of texts KEY=VALUE")
    if not isinstance(changes, Mapping):
        return list(changes)
    return [f"{key}={toml(_plain(value, key))}" for key, value in changes.items()]


def _plain(value: Any, key: str) -> Any:
    """Return a value of Python as one of TOML."""
    if isinstance(value, Mapping):
        return {name: _plain(part, f"{key}.{name}") for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, key) for part in value]
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, PurePath):
        return str(value)
    raise UserError(f"{key} = {value!r}: must be a number, text, true or false, or a list or table of these")


def changed(scenario: Scenario, changes: Mapping[str, Any] | Sequence[str]) -> Scenario:
    """Return a scenario that was loaded from a file, loaded again with more overrides."""
    if scenario.source is None:
        raise UserError(f"{scenario.name}: was not loaded from a file; change what gssim.load returns")
    overrides = [*scenario.source.overrides, *overrides_of(changes)]
    return load_scenario(scenario.source.path, overrides, gradients_needed=False).scenario


def toml(value: Any) -> str:
    """Return a value as TOML writes it.

    >>> toml([{"between": ["a", "b"], "bandwidth_ratio": 0.5}, True, float("inf")])
    '[{between = ["a", "b"], bandwidth_ratio = 0.5}, true, inf]'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def parsed_override(override: str) -> tuple[str, Any]:
    """Return the key and the value of an override; the value is TOML, or a bare text.

    >>> parsed_override("plan.shares.batch=[0.5, 0.5]"), parsed_override("plan.method=gs")
    (('plan.shares.batch', [0.5, 0.5]), ('plan.method', 'gs'))
    """
    key, value = _parsed(override)
    return key, deepcopy(value) if isinstance(value, (dict, list)) else value


@lru_cache(maxsize=1024)
def _parsed(override: str) -> tuple[str, Any]:
    key, separator, value = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise UserError(f"--set {override}: must be KEY=VALUE, such as plan.push.threshold=1e-3")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return key, value.strip()


def put(data: dict[str, Any], key: str, value: Any, *, under: str = "") -> None:
    """Set what is at a key path in tables of TOML; `under`: where they are, for messages.

    Parts of the path name keys of tables, which are made where there are none, or count in arrays, from 0. What names a
    preset becomes a table that says what differs from it.

    >>> data = {"servers": [{"count": 8, "nic_link": "ib-hdr-200"}]}
    >>> put(data, "servers.0.nic_link.latency_s", 1e-6)
    >>> data["servers"][0]["nic_link"]
    {'preset': 'ib-hdr-200', 'source': 'overridden', 'latency_s': 1e-06}
    """
    *parents, last = key.split(".")
    table: Any = data
    for i, part in enumerate([*parents, last]):
        where = f"{under}{'.'.join(parents[:i])}"
        if isinstance(table, list) and not (part.isdecimal() and int(part) < len(table)):
            raise UserError(f"--set {under}{key}: {where} has {len(table)} entries, counted from 0; '{part}' is none")
        if not isinstance(table, (dict, list)):
            raise UserError(f"--set {under}{key}: {where} names a file or a value, not a table")
        place: Any = int(part) if isinstance(table, list) else part
        if i == len(parents):
            table[place] = value
        elif isinstance(table, dict) and part not in table:
            table[part] = {}
        elif isinstance(table[place], str) and any(table[place] in presets(kind) for kind in ("devices", "links")):
            table[place] = {"preset": table[place], "source": "overridden"}
        table = table[place]


def load_scenario(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    gradients_needed: bool = True,
    searched: bool = False,
    shared: Shared | None = None,
) -> Loaded:
    """Return the scenario in the TOML file `path`, with `overrides` like `plan.push.threshold=1e-3` applied.

    Files that it names are looked up beside it, files that an override names first from the working directory.
    `searched`: gradient statistics are read for the thresholds of its search too, not for its own plan's alone.
    `shared`: what other scenarios that were loaded have in common with it. Raises UserError (one line: file, key path,
    value, what is allowed) for whatever the user can mend.
    """
    shared = shared or Shared()
    text, content = _content(path, shared)
    data = _copied(content)
    data.setdefault("name", path.stem)
    data.setdefault("question", first_comment(text))
    folders = {"": path.parent}
    changes = _apply(data, overrides, folders)
    file = str(path)
    data["cluster"] = _part(data, "cluster", changes, file, folders, shared)
    workload = data.get("workload")
    if isinstance(workload, dict):
        workload["model"] = _part(workload, "workload.model", changes, file, folders, shared)
        if isinstance(workload.get("data"), dict):
            workload["data"] = _with_paths(workload["data"], folders)
    if isinstance(data.get("search"), dict) and isinstance(data["search"].get("study"), str):
        study = _find(data["search"]["study"], "search.study", file, folders)
        data["search"] = data["search"] | {"study": str(study)}
    scenario = validated(Scenario, data, file=file)
    vars(scenario)["source"] = Source(path, tuple(overrides))
    check(scenario, file=file)
    wanted = scenario.plan.sends_by_data or (searched and scenario.search.searches_thresholds)
    statistics = _statistics(scenario, file, folders, shared) if gradients_needed and wanted else None
    return Loaded(file=file, scenario=scenario, gradients=statistics)


def load_model(path: Path) -> Model:
    """Return the model in the TOML file `path`."""
    return _model(path, (), Shared())


def load_cluster(path: Path) -> Cluster:
    """Return the cluster in the TOML file `path`."""
    return _cluster(path, (), Shared())


Changes = tuple[tuple[str, Any], ...]
"""What is overridden in a file that the scenario names: keys' paths in it, and values."""


def _model(path: Path, changes: Changes, shared: Shared) -> Model:
    data = _content(path, shared)[1]
    key = (path, Same(data), repr(changes))
    return shared.once(
        "model", key, lambda: validated(Model, _changed(data, "workload.model", changes), file=str(path))
    )


def _cluster(path: Path, changes: Changes, shared: Shared) -> Cluster:
    """Return the cluster in a file, with the tables that it names by their files."""
    data = _content(path, shared)[1]
    tables = {
        key: _content(_find(data[key], key, str(path), {"": path.parent}), shared)[1]
        for key in IN_FILES
        if isinstance(data.get(key), str)
    }
    key = (path, Same(data), *map(Same, tables.values()), repr(changes))
    return shared.once(
        "cluster", key, lambda: validated(Cluster, _changed(data | tables, "cluster", changes), file=str(path))
    )


def _changed(data: dict[str, Any], under: str, changes: Changes) -> dict[str, Any]:
    """Return the content of a file with what is overridden in it."""
    found: dict[str, Any] = _copied(data) if changes else data
    for key, value in changes:
        put(found, key, _copied(value), under=f"{under}.")
    return found


IN_FILES = ("device_types", "backend_cost")
"""Tables of a cluster file that may be in files of their own, which several clusters share."""


def _version(path: Path) -> tuple[Path, int, int] | None:
    """Return what tells the content of a file from what it was before; None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (path, found.st_mtime_ns, found.st_size)


def _content(path: Path, shared: Shared) -> tuple[str, dict[str, Any]]:
    """Return what `read_toml` does, once for each version of a file; nobody may change it."""
    return shared.once("file", _version(path), lambda: read_toml(path))


def _copied(value: Any) -> Any:
    """Return a value of TOML of which every table and array may be changed."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text and the parsed content of a TOML file; raise UserError where there is none or it is broken."""
    text = read_text(path)
    try:
        return text, tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of thousands of digits, brackets without end
        raise UserError(f"{path}: not valid TOML: {error}") from None


def first_comment(text: str) -> str:
    """Return what the first line of a TOML file says, if it is a comment: the question."""
    first = text.splitlines()[0] if text else ""
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _apply(data: dict[str, Any], overrides: Sequence[str], folders: dict[str, Path]) -> dict[str, Changes]:
    """Set overrides in a scenario's tables; return those in its cluster and model, which may have files of their own.

    They are made in whatever file is named in the end. `folders` is told where files are looked up that overrides name.
    """
    changes: dict[str, Changes] = dict.fromkeys(PARTS, ())
    for override in overrides:
        key, value = parsed_override(override)
        part = next((part for part in PARTS if key.startswith(f"{part}.")), None)
        if part is None:
            put(data, key, value)
            folders[key] = Path()
        else:
            changes[part] += ((key.removeprefix(f"{part}."), value),)
    return changes


PARTS = ("cluster", "workload.model")
"""What may be in files of their own."""


def _part(
    data: dict[str, Any],
    part: str,
    changes: Mapping[str, Changes],
    file: str,
    folders: dict[str, Path],
    shared: Shared,
) -> object:
    """Return one of `PARTS`: the table given inline, or what is in the file that it names, checked.

    What is overridden in it, is.
    """
    value = data.get(part.rpartition(".")[2])
    if isinstance(value, dict):
        return _inline(Cluster if part == "cluster" else Model, _changed(value, part, changes[part]), shared)
    if value is None:
        raise UserError(f"{file}: {part}: missing; name a file or give the table")
    if not isinstance(value, str):
        return value
    found = _find(value, part, file, folders)
    return (_cluster if part == "cluster" else _model)(found, changes[part], shared)


def _inline(cls: type[object], table: object, shared: Shared) -> object:
    """Return a table that is given inline as a `cls`, the same for equal tables; one that is none as it is.

    What is wrong with that is said together with all else.
    """
    try:
        return shared.once(f"inline {cls.__name__}", repr(table), lambda: validated(cls, table, file=""))
    except UserError:
        return table


def _find(name: str, key: str, file: str, folders: dict[str, Path]) -> Path:
    candidates = [folder / name for folder in (folders.get(key), folders[""]) if folder is not None]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if any(candidate.is_dir() for candidate in candidates):
        raise UserError(f"{file}: {key} = '{name}': is a folder, not a file")
    folder = candidates[-1].parent
    known = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    close = difflib.get_close_matches(Path(name).name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise MistakenNameError(f"{file}: {key} = '{name}': no such file{hint}")


def _with_paths(table: dict[str, Any], folders: dict[str, Path]) -> dict[str, Any]:
    """Return the table of data with its paths found; one that is nowhere stays beside the scenario (or the override).

    Predictions need no data, so nothing is refused here.
    """
    found = dict(table)
    for key in PATHS:
        if isinstance(name := table.get(key), str):
            override = folders.get(f"workload.data.{key}", folders.get("workload.data"))
            candidates = [folder / name for folder in (override, folders[""]) if folder is not None]
            found[key] = str(next((path for path in candidates if path.exists()), candidates[0]))
    return found


def _statistics(scenario: Scenario, file: str, folders: dict[str, Path], shared: Shared) -> GradientStatistics | None:
    name = scenario.workload.gradients
    if name is None and not scenario.plan.sends_by_data:
        return None  # the search says so
    if name is None:
        table = "push" if scenario.plan.push.selects else "publish"
        raise UserError(
            f"{file}: workload.gradients: missing; plan.{table}.threshold needs the model's gradient statistics "
            "(write them with `gsreal gradients`)"
        )
    found = _find(name, "workload.gradients", file, folders)
    statistics = shared.once("gradients", _version(found), lambda: read_gradients(found), most=8)
    _check_statistics(scenario, statistics, file, name)
    return statistics


def _check_statistics(scenario: Scenario, statistics: GradientStatistics, file: str, name: str) -> None:
    workload, run = scenario.workload, scenario.run
    for key, ours, theirs in (
        ("model", workload.model.name, statistics.model),
        ("optimizer", workload.optimizer, statistics.optimizer),
        ("learning_rate", workload.learning_rate, statistics.learning_rate),
        ("global_batch_size", workload.global_batch_size, statistics.global_batch_size),
        ("sequence_length", workload.sequence_length, statistics.sequence_length),
    ):
        if ours != theirs:
            raise UserError(f"{file}: workload.gradients = '{name}': was taken with {key} = {theirs!r}, not {ours!r}")
    if statistics.steps < run.warmup_steps + run.steps:
        raise UserError(
            f"{file}: workload.gradients = '{name}': covers {statistics.steps} steps, "
            f"but the run has {run.warmup_steps + run.steps} (run.warmup_steps + run.steps)"
        )
    if scenario.push.error_feedback and not statistics.feedback_thresholds:
        raise UserError(
            f"{file}: workload.gradients = '{name}': was taken without a look at error feedback, which "
            "plan.push.error_feedback asks for; take it again with `gsreal gradients`"
        )
    names = {name for layer in unrolled(workload.model) for name in layer.parameter_names}
    missing = sorted({name for trace in statistics.traces for name in names - set(trace.tensors)})
    if missing:
        raise UserError(f"{file}: workload.gradients = '{name}': lacks the parameter {missing[0]}")


# Checking ------------------------------------------------------------------------------------------------------------
