"""Sweeps: a base scenario, and the points in which plans, clusters and models differ from it."""

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gssim.data import PATHS
from gssim.scenario import Loaded, as_overrides, first_comment, load_scenario, read_toml
from gssim.shared import Shared
from gssim.units import PositiveInt, UserError, spec, validated

MOST_POINTS = 1_000_000
"""More than anybody waits for; a product of axes grows beyond it unawares."""
FILES = ("cluster", "workload.model", "workload.gradients", *(f"workload.data.{key}" for key in PATHS))
"""Keys whose values may name files."""
SEPARATOR = "--"
"""Between the parts of a point's name; what stands before the first one is its group."""
NAME = re.compile(r"[A-Za-z0-9._+]+(-[A-Za-z0-9._+]+)*")


@spec
class Group:
    """Points that are compared with one another: on the same cluster, as a rule, with the same model."""

    name: str
    scenario: str | None = None
    """Another file whose keys are overridden, beside this one; absent: the sweep's."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides of the scenario's keys, for all of the group."""
    variants: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of those that it has; absent: all."""
    axes: dict[str, Any] = field(default_factory=dict)
    """Lists of values, by key; besides the sweep's own, or in the place of the same one."""


@spec
class Sweep:
    """A table of questions: every group has a point for each of its variants and each combination of axes' values.

    Where keys are overridden more than once the later counts: the sweep's, the group's, the variant's, the axes'.
    """

    scenario: str
    """The file whose keys are overridden, beside this one."""
    question: str = ""
    """What all points together answer; the first line's comment."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides of the scenario's keys, for all points. Files are looked up beside the sweep, then the scenario."""
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Overrides, by name of the variant."""
    axes: dict[str, Any] = field(default_factory=dict)
    """Lists of values, by key."""
    groups: tuple[Group, ...] = ()
    """None: one, named after the file."""
    repeats: PositiveInt = 1
    """How often each point is measured, where it is."""


@dataclass(frozen=True, slots=True)
class Point:
    """One question of a sweep: a scenario file, and what is overridden in it."""

    name: str
    """`GROUP--VARIANT`, and the axes' values behind it."""
    file: Path
    overrides: tuple[str, ...]

    @property
    def group(self) -> str:
        """Name of the group.

        >>> Point("two-hosts--ddp", Path("a.toml"), ()).group
        'two-hosts'
        """
        return self.name.partition(SEPARATOR)[0]

    def load(self, *, gradients_needed: bool = True, shared: Shared | None = None) -> Loaded:
        """Return its scenario; raise UserError where it is none."""
        return load_scenario(self.file, self.overrides, gradients_needed=gradients_needed, shared=shared)


def load_sweep(path: Path) -> Sweep:
    """Return the sweep in the TOML file `path`; raise UserError (one line: file, key path, what is allowed)."""
    text, data = read_toml(path)
    data.setdefault("question", first_comment(text))
    sweep = validated(Sweep, data, file=str(path))
    _check_names(sweep, path)
    for place, axes in (("axes", sweep.axes), *((f"groups[{i}].axes", g.axes) for i, g in enumerate(sweep.groups))):
        axes_of(axes, f"{path}: {place}")
    return sweep


def _check_names(sweep: Sweep, file: Path) -> None:
    """Raise UserError for names that cannot name files, or name nothing."""
    named = [(f"groups[{i}].name", group.name) for i, group in enumerate(sweep.groups)]
    for place, name in (*((f"variants.{name}", name) for name in sweep.variants), *named):
        if not NAME.fullmatch(name):
            raise UserError(f"{file}: {place}: '{name}' names files: letters, digits, '.', '_', '+' and single '-'")
    for i, group in enumerate(sweep.groups):
        for name in group.variants or ():
            if name not in sweep.variants:
                known = ", ".join(sweep.variants) or "none"
                raise UserError(f"{file}: groups[{i}].variants: there is no variant '{name}'; there are {known}")
    for name in (sweep.scenario, *(group.scenario for group in sweep.groups if group.scenario)):
        if not (file.parent / name).is_file():
            raise UserError(f"{file}: scenario = '{name}': no such file beside it")


def points_of(sweep: Sweep, *, file: Path, overrides: Sequence[str] = ()) -> tuple[Point, ...]:
    """Return the points of the sweep in `file`, group by group; `overrides`: of the command line, which have the last
    word.

    Raises UserError where there are too many, or two have the same name.
    """
    groups = sweep.groups or (Group(name=file.stem),)
    count = sum(_size(sweep, group) for group in groups)
    if count > MOST_POINTS:
        raise UserError(f"{file}: has {count:,} points; at most {MOST_POINTS:,} are allowed")
    points = tuple(
        Point(name, _beside(group.scenario or sweep.scenario, file), (*own, *overrides, f'name="{name}"'))
        for group in groups
        for name, own in _named(sweep, group, file)
    )
    twice = [name for name, times in Counter(point.name for point in points).items() if times > 1]
    if twice:
        raise UserError(f"{file}: two points are named '{twice[0]}'; groups and values of axes must differ in name")
    return points


def chosen(points: Sequence[Point], patterns: Sequence[str], *, file: Path) -> tuple[Point, ...]:
    """Return the points whose names match one of the patterns (`*`, `?`), all where there is no pattern.

    Raises UserError for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(point.name, pattern) for point in points):
            raise UserError(f"--only {pattern}: no point of {file} is so named; the first is {points[0].name}")
    return tuple(p for p in points if not patterns or any(fnmatchcase(p.name, pattern) for pattern in patterns))


def loaded_point(point: Point, *, file: Path, gradients_needed: bool = True, shared: Shared | None = None) -> Loaded:
    """Return the point's scenario; raise UserError that names the sweep and the point where it is none."""
    try:
        return point.load(gradients_needed=gradients_needed, shared=shared)
    except UserError as error:
        raise UserError(f"{file}: {point.name}: {error}") from None


def axes_of(table: Mapping[str, Any], where: str = "axes", prefix: str = "") -> dict[str, list[Any]]:
    """Return lists of values by their keys' whole paths; raise UserError for what is no list, or empty.

    >>> axes_of({"plan": {"push": {"threshold": [1e-4, 1e-3]}}, "plan.method": ["gs"]})
    {'plan.push.threshold': [0.0001, 0.001], 'plan.method': ['gs']}
    """
    found: dict[str, list[Any]] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= axes_of(value, where, f"{prefix}{key}.")
        elif isinstance(value, list) and value:
            found[f"{prefix}{key}"] = value
        else:
            raise UserError(f"{where}: {prefix}{key} = {value!r}: must be a list of values, one at least")
    return found


def _size(sweep: Sweep, group: Group) -> int:
    """Return how many points a group has, without making them."""
    variants = len(sweep.variants) if group.variants is None else len(group.variants)
    return max(1, variants) * math.prod(map(len, (axes_of(sweep.axes) | axes_of(group.axes)).values()))


def _named(sweep: Sweep, group: Group, file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the names of a group's points, and what each overrides."""
    axes = axes_of(sweep.axes) | axes_of(group.axes)
    names: Iterable[str | None] = tuple(sweep.variants) if group.variants is None else group.variants
    for variant in names or (None,):
        tables = (sweep.set, group.set, sweep.variants[variant] if variant else {})
        for values in itertools.product(*axes.values()):
            place = dict(zip(axes, values, strict=True))
            words = [group.name, *([variant] if variant else []), *(_label(*each) for each in place.items())]
            overrides = (override for table in (*tables, place) for override in as_overrides(table))
            yield SEPARATOR.join(words), [_located(override, file) for override in overrides]


def _label(key: str, value: Any) -> str:
    """Return a value of an axis as part of a name.

    >>> _label("plan.push.threshold", 1e-3), _label("cluster", "clusters/two-sites.toml"), _label("plan.tp", 2)
    ('threshold-0.001', 'two-sites', 'tp-2')
    """
    if isinstance(value, str):
        words = Path(value).stem if key in FILES else value
    else:
        words = f"{key.rpartition('.')[2]}-{value}"
    return "-".join(re.findall(r"[A-Za-z0-9._+]+", words)) or "none"


def _located(override: str, file: Path) -> str:
    """Return an override, a file that is beside the sweep named by where it is."""
    key, _, value = override.partition("=")
    if key not in FILES or not value.startswith('"'):
        return override
    found = _beside(value.strip('"'), file)
    return f'{key}="{found}"' if found.exists() else override


def _beside(name: str, file: Path) -> Path:
    return Path(os.path.normpath(file.parent / name))
