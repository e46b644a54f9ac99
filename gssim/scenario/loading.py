"""Loading of scenarios, models and clusters from TOML files, and overrides of their keys as `--set` writes them."""

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import tomli

from gssim.cluster import Cluster, Conditions
from gssim.errors import MistakenNameError, UserError, nearest_name
from gssim.execution.cache import Same, Shared, cached_by_identity
from gssim.execution.files import is_nested_too_deep, read_json, read_text
from gssim.plan import Plan
from gssim.scenario.checks import check
from gssim.scenario.overrides import parsed_override, put
from gssim.scenario.run import Run
from gssim.scenario.scenario import Loaded, Scenario, Source
from gssim.scenario.search_space import SearchSpace
from gssim.units import PRECISION_BYTES, validated
from gssim.workload import PATHS, Model, Workload, shipped_models, unrolled
from gssim.workload.gradient_family import read_family, shipped_families
from gssim.workload.gradient_rungs import family_of
from gssim.workload.gradient_statistics import GradientStatistics, read_gradients
from gssim.workload.gradient_transfer import transferred_statistics
from gssim.workload.model import OWN_LAYERS, with_fused_kernels


def load_scenario(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    tables: Mapping[str, Any] | None = None,
    gradients_needed: bool = True,
    searched: bool = False,
    shared: Shared | None = None,
) -> Loaded:
    """Return the scenario in the TOML file `path`, with `overrides` like `plan.push.threshold=1e-3` applied.

    Files that the scenario names are searched beside it; files that an override names, first in the working directory.
    `tables`: keys and values that replace the file, which is then not read. `searched`: also read gradient statistics
    that only the thresholds of its search need. `shared`: cache of the parts that loaded scenarios have in common.
    Raises UserError (one line: file, key path, value, what is allowed) for every error that the user can fix.
    """
    shared = shared or Shared()
    asked = tuple(overrides)

    def load() -> _CachedScenario:
        return _load(path, asked, tables, shared, gradients_needed=gradients_needed, searched=searched)

    if tables is not None:
        return load().loaded
    key = (os.fspath(path), tuple(map(_without_rate, asked)), gradients_needed, searched)
    cached = shared.once("alike scenarios", key, load)
    if cached.overrides == asked:  # it was loaded just now, or is asked for again
        return cached.loaded if cached.is_current else load().loaded
    return (cached.with_rates(asked, shared) if cached.is_current else None) or load().loaded


class _Folders(dict[str, Path]):
    """Folders in which named files are searched, by the key of the override that names them; "": beside the scenario.

    `tried`: the files that were looked for, also those that do not exist: a file that appears there is read instead.
    """

    def __init__(self, beside: Path) -> None:
        super().__init__({"": beside})
        self.tried: set[Path] = set()


@dataclass(frozen=True, slots=True)
class _CachedScenario:
    """A loaded scenario, from which those are derived that differ from it only in name or in the rates of links."""

    loaded: Loaded
    path: Path
    overrides: tuple[str, ...]
    folders: _Folders
    cluster: Path | None
    """The cluster's file; None if the scenario has its table."""
    versions: tuple[tuple[Path, Hashable], ...]
    """The files that were looked for, each with its version."""

    @property
    def is_current(self) -> bool:
        """Whether all files are as they were."""
        return all(_file_version(path) == version for path, version in self.versions)

    def with_rates(self, overrides: tuple[str, ...], shared: Shared) -> Loaded | None:
        """Return the scenario under overrides that set other rates of links; None if more than these may differ.

        Checks, and what the plan resolves to, depend on rates only where shards are sized by costs, or where conditions
        of the network change links: all else is this scenario's.
        """
        first, file = self.loaded.scenario, self.loaded.file
        if self.cluster is None or first.network or first.plan.shares.shards == "cost":
            return None
        parsed = [parsed_override(override) for override in overrides]
        changes = tuple((key.removeprefix("cluster."), value) for key, value in parsed if key.startswith("cluster."))
        tables: dict[str, Any] = {each.name: getattr(first, each.name) for each in fields(first)}
        tables |= {key: value for key, value in parsed if key == "name"}
        tables["cluster"] = _cluster(self.cluster, changes, file, self.folders, shared)
        scenario = validated(Scenario, tables, file=file)
        resolved = vars(first)
        vars(scenario).update({name: resolved[name] for name in RESOLVED if name in resolved})
        vars(scenario)["source"] = Source(self.path, overrides, None, load=_load_source)
        return Loaded(file=file, scenario=scenario, gradients=self.loaded.gradients)


RESOLVED = ("policies", "push", "ranks", "idle_devices", "data_batch_sizes", "batch_sizes", "shard_shares")
"""What a scenario resolves to whatever the rates of its links are, unless shards are sized by costs."""
LINKS = ("cluster.topology.", "cluster.links.")
"""Beginnings of the keys of links."""
RATES = ("_per_s", "latency_s", "oversubscription")
"""Suffixes of the keys that are rates of links."""


@lru_cache(maxsize=1024)
def _without_rate(override: str) -> str:
    """Return an override without its value if it sets a rate of a link, or the scenario's name.

    >>> _without_rate("cluster.topology.link.latency_s=1e-6"), _without_rate("plan.tp=2")
    ('cluster.topology.link.latency_s', 'plan.tp=2')
    """
    key = override.partition("=")[0]
    return key if key == "name" or (key.startswith(LINKS) and key.endswith(RATES)) else override


def _load(
    path: Path,
    overrides: tuple[str, ...],
    tables: Mapping[str, Any] | None,
    shared: Shared,
    *,
    gradients_needed: bool,
    searched: bool,
) -> _CachedScenario:
    """Load a scenario and return it with the files that were read; see `load_scenario`."""
    folders = _Folders(path.parent)
    if tables is None and str(path) in shipped_models() and not path.exists():
        usage = f"`gssim fits {path} --gpu h100 --count 8`, or `--set workload.model={path}` with a scenario"
        raise MistakenNameError(f"{path}: no such file; it is the name of a model: {usage}")
    text, content = _content(path, shared) if tables is None else ("", _with_own_layers(tables, shared))
    data = _copy_of_tables(content)
    file = str(path)
    check_kind(data, "scenario", file)
    data.setdefault("name", path.stem)
    data.setdefault("question", first_comment(text))
    changes = _with_overrides(data, overrides, folders)
    named = data.get("cluster")
    data["cluster"] = _load_part(data, "cluster", changes, file, folders, shared)
    cluster = _find_file(named, "cluster", file, folders) if isinstance(named, str) else None
    workload = data.get("workload")
    if isinstance(workload, dict):
        # under autocast, layers are those of a file that is traced in fp32
        use = _Use(str(workload.get("precision", "fp32")), "autocast" in workload, _has_only_gpus(data["cluster"]))
        workload["model"] = _load_part(workload, "workload.model", changes, file, folders, shared, use=use)
        if isinstance(workload["model"], Model):
            workload["model"] = _as_run_on_devices(workload["model"], data["cluster"], file)
        load = workload.get("expert_load")
        if isinstance(load, str) and load != "balanced":
            workload["expert_load"] = _table(_find_file(load, "workload.expert_load", file, folders))
        if isinstance(workload.get("data"), dict):
            workload["data"] = _with_paths(workload["data"], folders)
    if isinstance(data.get("search"), dict) and isinstance(data["search"].get("study"), str):
        study = _find_file(data["search"]["study"], "search.study", file, folders)
        data["search"] = data["search"] | {"study": str(study)}
    scenario = validated(Scenario, _with_known_tables(data, shared), file=file)
    vars(scenario)["source"] = Source(path, tuple(overrides), tables, load=_load_source)
    check(scenario, file=file)
    wanted = scenario.plan.sends_by_data or (searched and scenario.search.searches_thresholds)
    statistics = _statistics(scenario, file, folders, shared) if gradients_needed and wanted else None
    versions = tuple((each, _file_version(each)) for each in (path, *folders.tried))
    loaded = Loaded(file=file, scenario=scenario, gradients=statistics)
    return _CachedScenario(loaded, path, overrides, folders, cluster, versions)


def _as_run_on_devices(model: Model, cluster: Any, file: str) -> Model:
    """Return a model with the layers that all devices of a cluster run, see [Note: fused kernels] in `workload.model`.

    A Result of GPUs holds the layers of these and of its model's file, which are taken if the cluster is another one.
    """
    if model.fused_kernels is None and not model.runs_fused_kernels:
        return model
    if not _has_only_gpus(cluster):
        return model.in_file_precision if isinstance(cluster, Cluster) and model.runs_fused_kernels else model
    try:
        return with_fused_kernels(model)
    except ValueError as error:
        raise UserError(f"{file}: workload.model.{error}") from None


def _has_only_gpus(cluster: Any) -> bool:
    """Return whether all devices of a valid cluster are CUDA GPUs."""
    if not isinstance(cluster, Cluster):
        return False
    return all(cluster.device_types[name].kind == "cuda" for name in {device.type for device in cluster.devices})


def _with_own_layers(tables: Mapping[str, Any], shared: Shared) -> Mapping[str, Any]:
    """Return a scenario's tables, from a Result, with the layers of the model's file validated, if it has any.

    It has them beside the layers with which it was predicted; see `Model.in_file_precision`. Invalid ones stay as they
    are, to be refused with the other keys.
    """
    workload = tables.get("workload")
    if not isinstance(workload, Mapping):
        return tables
    model: Any = workload.get("model")
    own = model.get(OWN_LAYERS) if isinstance(model, Mapping) else None
    if not isinstance(own, Mapping):
        return tables
    with suppress(UserError):
        valid = shared.once("inline Model", repr(own), lambda: validated(Model, dict(own), file=""))
        return {**tables, "workload": {**workload, "model": {**model, OWN_LAYERS: valid}}}
    return tables


KINDS: dict[str, tuple[frozenset[str], str]] = {
    "study": (frozenset({"scenario", "seeds", "dense", "silent"}), "python -m analysis convergence {file}"),
    "sweep": (frozenset({"scenario"}), "gssim sweep {file}"),
    "scenario": (frozenset({"cluster", "workload"}), "gssim run {file}"),
    "cluster": (frozenset({"device_types"}), "gssim run SCENARIO --set cluster={file}"),
    "model": (frozenset({"input", "layers"}), "gssim run SCENARIO --set workload.model={file}"),
}
"""Keys that identify each kind of TOML file, and a command that reads it. A file that fits several is of the first."""


def check_kind(data: Mapping[str, Any], wanted: str, file: str) -> None:
    """Raise UserError if a file is of another kind than the one that is `wanted` (a key of `KINDS`).

    A file that has a key of the wanted kind alone is of this kind, even if it lacks others.
    """
    others = frozenset[str]().union(*(keys for kind, (keys, _) in KINDS.items() if kind != wanted))
    if data.keys() & (KINDS[wanted][0] - others):
        return
    kinds = [kind for kind, (keys, _) in KINDS.items() if keys <= data.keys()]
    if kinds and kinds[0] != wanted:
        command = KINDS[kinds[0]][1].format(file=file)
        raise UserError(f"{file}: is a {kinds[0]}, not a {wanted}; use it with `{command}`")


TABLES: dict[str, type] = {
    "workload": Workload,
    "plan": Plan,
    "network": Conditions,
    "run": Run,
    "search": SearchSpace,
}
"""Tables of a scenario that are validated separately."""


def _with_known_tables(data: dict[str, Any], shared: Shared) -> dict[str, Any]:
    """Return a scenario's data in which every valid table is replaced by its validated object; equal tables share one.

    Values derived from them can then be cached by identity. Invalid tables are left as they are, so that all errors are
    reported together.
    """
    known = dict(data)
    for name, cls in TABLES.items():
        table = data.get(name, {})  # an absent table has the defaults of all keys
        if not isinstance(table, dict):
            continue
        parts = tuple(Same(value) for value in table.values() if is_dataclass(value))
        key = (name, parts, repr({key: None if is_dataclass(value) else value for key, value in table.items()}))
        with suppress(UserError):
            known[name] = shared.once("tables", key, partial(validated, cls, table, file=""))
    return known


def _load_source(source: Source) -> Scenario:
    return load_scenario(source.path, source.overrides, tables=source.tables, gradients_needed=False).scenario


def load_model(path: Path) -> Model:
    """Return the model in the TOML file `path`."""
    return _model(path, (), Shared())


def load_cluster(path: Path) -> Cluster:
    """Return the cluster in the TOML file `path`."""
    return _cluster(path, (), str(path), _Folders(path.parent), Shared())


MOST_READ = 128
"""Number of file contents, and of the models in them, that a process caches for later scenarios. They are cached by
text, because parsing and validating a traced model takes longer than most simulations."""

Changes = tuple[tuple[str, Any], ...]
"""Overrides inside a file that the scenario names: key paths in that file, and values."""


class _Use(NamedTuple):
    """A scenario's use of a model file: what decides which of its layers are needed."""

    precision: str
    """Of the workload."""
    autocast: bool
    """Whether the forward runs under torch.autocast."""
    only_gpus: bool
    """Whether all devices are CUDA GPUs."""


def _model(path: Path, changes: Changes, shared: Shared, *, use: _Use | None = None) -> Model:
    """Return the model in a file, with changes to its keys.

    `use`: the only use for which it is needed, if there is one; None: the whole model.
    """
    if not changes:
        data = _model_tables(shared.once("text", _file_version(path), lambda: read_text(path)), path, use)
        check_kind(data, "model", str(path))
        return _unchanged_model(data, path)
    data = _content(path, shared)[1]
    check_kind(data, "model", str(path))
    key = (path, Same(data), repr(changes))
    return shared.once(
        "model", key, lambda: validated(Model, _with_changes(data, "workload.model", changes), file=str(path))
    )


SECTION = re.compile(r"^\[\[?(other_precisions|fused_kernels(?:\.autocast|\.other_precisions)?)(?=[].])", re.M)
"""Header of a table at the end of a model file: its layers in other precisions than its own, and those of GPUs."""
OTHER_HEADER = re.compile(r"^[ \t]*\[(?!\[?(?:other_precisions|fused_kernels)[].])", re.M)
"""A header of another table, or a line of an array that may be one."""
OWN_PRECISION = re.compile(r'^traced_precision = "(\w+)"$', re.M)


@lru_cache(maxsize=MOST_READ)
def _model_tables(text: str, path: Path, use: _Use | None) -> dict[str, Any]:
    """Return the tables of a model file, without layers that a `use` of it does not need.

    Those in other precisions, and of these and under autocast those of GPUs, are up to half of a file, and reading it
    takes longer than most simulations. If the lines do not show that these tables end the file, all of it is read.
    Errors in what is left out are found once it is needed.
    """
    first = SECTION.search(text)
    if use is None or first is None:
        return _tables_of(text, path)
    head, end = text[: first.start()], text[first.start() :]
    stated = OWN_PRECISION.search(head)
    uncertain = (
        any(each in text for each in ('"""', "'''"))
        or OTHER_HEADER.search(end)
        or any(each in head for each in ("other_precisions", "fused_kernels"))
        or ("traced_precision" in head and stated is None)
    )
    if uncertain:
        return _tables_of(text, path)
    own = (stated.group(1) if stated else "fp32") in SAME_LAYERS.get(use.precision, ())
    needed = {
        "other_precisions": not own,
        "fused_kernels.other_precisions": use.only_gpus and not own,
        "fused_kernels.autocast": use.only_gpus and use.autocast,
    }
    return _tables_without(text, path, tuple(name for name, is_needed in needed.items() if not is_needed))


@lru_cache(maxsize=MOST_READ)
def _tables_without(text: str, path: Path, left_out: tuple[str, ...]) -> dict[str, Any]:
    """Return the tables of a model file without some of its sections; the lines of the others keep their numbers.

    Where layers of GPUs are left out, an empty table of theirs says that GPUs run the model's own in its precision.
    """
    headers = list(SECTION.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    kept = [text[: headers[0].start()]]
    for header, end in zip(headers, ends, strict=True):
        section = text[header.start() : end]
        kept.append("\n" * section.count("\n") if header.group(1) in left_out else section)
    if not left_out:
        return _tables_of(text, path)
    of_gpus = any(header.group(1).startswith("fused_kernels") for header in headers)
    return ({"fused_kernels": {}} if of_gpus else {}) | _tables_of("".join(kept), path)


SAME_LAYERS = {
    precision: [each for each, size in PRECISION_BYTES.items() if size == of_own]
    for precision, of_own in PRECISION_BYTES.items()
}
"""By precision of a workload: precisions of layers that are taken as they are."""


@cached_by_identity(maxsize=MOST_READ)
def _unchanged_model(data: dict[str, Any], path: Path) -> Model:
    return validated(Model, data, file=str(path))


def _cluster(path: Path, changes: Changes, file: str, folders: _Folders, shared: Shared) -> Cluster:
    """Return the cluster in a file; some of its tables may be in files of their own, which overrides may name."""
    data = _content(path, shared)[1]
    check_kind(data, "cluster", str(path))
    own = _Folders(path.parent)
    files = {key: _find_file(data[key], key, str(path), own) for key in IN_FILES if isinstance(data.get(key), str)}
    folders.tried |= own.tried
    named = {key: value for key, value in changes if key in IN_FILES and isinstance(value, str)}
    files |= {key: _find_file(value, f"cluster.{key}", file, folders) for key, value in named.items()}
    tables = {key: _content(each, shared)[1] for key, each in files.items()}
    changes = tuple((key, value) for key, value in changes if key not in named)
    _check_device_types(data | tables, changes, str(path))
    key = (str(path), Same(data), *map(Same, tables.values()), repr(changes))
    return shared.once(
        "cluster", key, lambda: validated(Cluster, _with_changes(data | tables, "cluster", changes), file=str(path))
    )


def _check_device_types(data: dict[str, Any], changes: Changes, file: str) -> None:
    """Raise MistakenNameError if an override sets a value of a device type that neither the cluster nor they define."""
    types = None if "device_types" in dict(changes) else data.get("device_types")  # it may be replaced as a whole
    parts = [key.split(".") for key, _ in changes if key.startswith("device_types.")]
    new = {name for _, name, *rest in parts if rest[:1] in ([], ["preset"], ["kind"])}
    for _, name, *_ in parts:
        if isinstance(types, dict) and name not in types and name not in new:
            # no mistaken name, which would end a sweep over clusters of which only some have the type
            raise UserError(f"{file}: device_types.{name}: the cluster has no such type; it has {', '.join(types)}")


def _with_changes(data: dict[str, Any], under: str, changes: Changes) -> dict[str, Any]:
    """Return the content of a file with overrides applied."""
    changed: dict[str, Any] = _copy_of_tables(data) if changes else data
    for key, value in changes:
        put(changed, key, _copy_of_tables(value), under=f"{under}.")
    return changed


IN_FILES = ("device_types", "backend_cost")
"""Tables of a cluster file that may be in separate files, which several clusters share."""


def _file_version(path: Path) -> tuple[str, int, int, int] | None:
    """Return a cache key for the content of a file: path, number, modification time and size; None where there is no
    file. The number differs where a relative path is that of another file in another working directory.
    """
    try:
        name = os.fspath(path)  # a path takes long to hash and to compare
        status = os.stat(name)
    except (OSError, ValueError):  # also for a name that no file system allows
        return None
    return (name, status.st_ino, status.st_mtime_ns, status.st_size)


def _content(path: Path, shared: Shared) -> tuple[str, dict[str, Any]]:
    """Return the result of `read_toml`, cached by the version of the file; it must not be changed."""

    def read() -> tuple[str, dict[str, Any]]:
        text = read_text(path)
        return text, _tables_of(text, path)

    return shared.once("file", _file_version(path), read)


@lru_cache(maxsize=MOST_READ)
def _tables_of(text: str, path: Path) -> dict[str, Any]:
    try:
        tables = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of thousands of digits, brackets nested too deep
        if path.suffix == ".json":
            hint = f"of a Hugging Face config.json, `gsreal trace {path} --out FILE.toml` makes a model file"
            raise UserError(f"{path}: is no TOML file; {hint}") from None
        raise UserError(f"{path}: not valid TOML: {error}") from None
    if is_nested_too_deep(tables):
        raise UserError(f"{path}: its keys are nested too deep")
    return tables


def _copy_of_tables(value: Any) -> Any:
    """Return a deep copy of the tables and arrays of a TOML value."""
    if isinstance(value, Mapping):
        return {key: _copy_of_tables(item) for key, item in value.items()}
    return [_copy_of_tables(item) for item in value] if isinstance(value, list) else value


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text and the parsed content of a TOML file; raise UserError where it is missing or invalid."""
    text = read_text(path)
    return text, _copy_of_tables(_tables_of(text, path))


def first_comment(text: str) -> str:
    """Return the comment on the first line of a TOML file (the scenario's question), or an empty text."""
    first = text.splitlines()[0] if text else ""
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _with_overrides(data: dict[str, Any], overrides: Sequence[str], folders: _Folders) -> dict[str, Changes]:
    """Set overrides in a scenario's tables; return those for its cluster and model, which may be in other files.

    The latter are applied to the file that is named once all overrides are set. If an override names a file, the folder
    in which it is searched is added to `folders`.
    """
    changes: dict[str, Changes] = dict.fromkeys(PARTS, ())
    working_folder = Path()
    for override in overrides:
        key, value = parsed_override(override)
        part = next((part for part in PARTS if key.startswith(f"{part}.")), None)
        folders[key] = working_folder
        if part is None:
            put(data, key, value)
        else:
            changes[part] += ((key.removeprefix(f"{part}."), value),)
    return changes


def _table(path: Path) -> dict[str, Any]:
    """Return the table in a TOML or JSON file."""
    content = read_json(path, by_hand=True) if path.suffix == ".json" else read_toml(path)[1]
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a table of keys")
    return content


PARTS = ("cluster", "workload.model")
"""Parts of a scenario that may be in files of their own."""


def _load_part(
    data: dict[str, Any],
    part: str,
    changes: Mapping[str, Changes],
    file: str,
    folders: _Folders,
    shared: Shared,
    *,
    use: _Use | None = None,
) -> object:
    """Return one of `PARTS`, validated and with overrides applied: the inline table, or the content of the named file.

    An invalid inline table is returned as it is; its errors are reported together with the scenario's. `use`: what of
    a model file is needed; see `_model`.
    """
    value = data.get(part.rpartition(".")[2])
    if isinstance(value, dict):
        cls, table = Cluster if part == "cluster" else Model, _with_changes(value, part, changes[part])
        try:
            return shared.once(f"inline {cls.__name__}", repr(table), lambda: validated(cls, table, file=""))
        except UserError:
            return table
    if value is None:
        raise UserError(f"{file}: {part}: missing; name a file or give the table")
    if not isinstance(value, str):
        return value
    path = _find_file(value, part, file, folders)
    if part == "cluster":
        return _cluster(path, changes[part], file, folders, shared)
    return _model(path, changes[part], shared, use=use)


def _find_file(name: str, key: str, file: str, folders: _Folders) -> Path:
    candidates = []
    for folder in (folders.get(key), folders[""]):
        if folder is not None:
            candidates.append(folder / name)
            folders.tried.add(candidates[-1])
            if os.path.isfile(candidates[-1]):  # false for a name that is too long, for which pathlib raises
                return candidates[-1]
    if key == "workload.model" and name in shipped_models():
        folders.tried.add(shipped_models()[name])
        return shipped_models()[name]
    if any(os.path.isdir(candidate) for candidate in candidates):
        raise UserError(f"{file}: {key} = '{name}': is a folder, not a file")
    folder = candidates[-1].parent
    known = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    if key == "workload.model":
        known += shipped_models()
    close = nearest_name(Path(name).name, known)
    if close is None and Path(name).name == name:  # or it lies one folder below, as `clusters/` does
        below = {path.name: str(path.relative_to(folder)) for path in sorted(folder.glob("*/*.toml"))}
        close = below.get(nearest_name(name, below) or "")
    looked_in = ", ".join(dict.fromkeys(str(candidate.parent) for candidate in candidates))
    hint = f"; did you mean {close}?" if close else "" if Path(name).is_absolute() else f"; looked for in {looked_in}"
    raise MistakenNameError(f"{file}: {key} = '{name}': no such file{hint}")


def _with_paths(table: dict[str, Any], folders: _Folders) -> dict[str, Any]:
    """Return the table of data with its paths resolved; a missing file is looked for beside the scenario (or override).

    Predictions do not read the data, so a missing file is not an error here.
    """
    resolved = dict(table)
    for key in PATHS:
        if isinstance(name := table.get(key), str):
            override = folders.get(f"workload.data.{key}", folders.get("workload.data"))
            candidates = [folder / name for folder in (override, folders[""]) if folder is not None]
            folders.tried.update(candidates)
            resolved[key] = str(next((path for path in candidates if path.exists()), candidates[0]))
    return resolved


def _statistics(scenario: Scenario, file: str, folders: _Folders, shared: Shared) -> GradientStatistics | None:
    name = scenario.workload.gradients
    if name is None and not scenario.plan.sends_by_data:
        return None  # the search will report it
    if name is None or name == TRANSFERRED:
        return _transferred_statistics(scenario, shared)
    path = _find_file(name, "workload.gradients", file, folders)
    statistics = shared.once("gradients", _file_version(path), lambda: read_gradients(path), most=8)
    workload, run = scenario.workload, scenario.run
    publishes = scenario.plan.publish.threshold is not None
    key = (Same(workload), Same(statistics), run.warmup_steps + run.steps, scenario.push.error_feedback, publishes)
    shared.once("checked gradients", key, lambda: _check_statistics(scenario, statistics, file, name))
    return statistics


def _transferred_statistics(scenario: Scenario, shared: Shared) -> GradientStatistics:
    """Return a scenario's gradient statistics as transferred from a family of small models shipped with the package."""
    workload, steps = scenario.workload, scenario.run.warmup_steps + scenario.run.steps

    def transferred() -> GradientStatistics:
        path = shipped_families()[family_of(workload.model)]
        family = shared.once("gradient families", path, lambda: read_family(path), most=8)
        return transferred_statistics(family, workload, steps=steps)

    asked = (workload.global_batch_size, workload.sequence_length, workload.learning_rate, workload.optimizer)
    key = (Same(workload.model), *asked, workload.precision, steps)
    return shared.once("transferred gradients", key, transferred, most=8)


TRANSFERRED = "transferred"
"""Value of `workload.gradients` that asks for transferred statistics, as does an absent key."""


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
            raise UserError(
                f"{file}: workload.gradients = '{name}': was taken with {key} = {theirs!r}, not {ours!r}; take it "
                f"again with `gsreal gradients`, or set '{TRANSFERRED}' for an estimate"
            )
    if statistics.steps < run.warmup_steps + run.steps:
        raise UserError(
            f"{file}: workload.gradients = '{name}': covers {statistics.steps} steps, "
            f"but the run has {run.warmup_steps + run.steps} (run.warmup_steps + run.steps)"
        )
    if scenario.push.error_feedback and not statistics.feedback_thresholds:
        raise UserError(
            f"{file}: workload.gradients = '{name}': has no statistics with error feedback, which "
            "plan.push.error_feedback needs; take it again with `gsreal gradients`"
        )
    names = {name for layer in unrolled(workload.model) for name in layer.parameter_names}
    missing = sorted({name for trace in statistics.traces for name in names - set(trace.tensors)})
    if missing:
        raise UserError(f"{file}: workload.gradients = '{name}': lacks the parameter {missing[0]}")
    unchanged = sorted(names - set(statistics.changes))
    if unchanged and scenario.plan.publish.threshold is not None:
        raise UserError(
            f"{file}: workload.gradients = '{name}': has no changes of {unchanged[0]}, which plan.publish.threshold "
            "needs; take it again with `gsreal gradients`"
        )
