"""Points of a sweep: the combinations of groups, variants and axis values that its conditions keep."""

import difflib
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.scenario.loading import load_scenario, read_toml
from gssim.scenario.overrides import as_overrides, parsed_override
from gssim.scenario.scenario import Loaded
from gssim.scenario.sweep.conditions import Condition, condition
from gssim.scenario.sweep.file import (
    FILES,
    Group,
    Place,
    Sweep,
    dimensions,
    flat,
    is_rate,
    label,
    parts_of_variant,
    shown,
)
from gssim.units import excess

OF_THE_CLUSTER = ("ranks", "devices")
"""Facts that require loading the point's scenario."""
FACTS = ("group", "variant", *OF_THE_CLUSTER)
DECIDING = (
    *("cluster", "workload=", "workload.model", "workload.global_batch_size"),
    *("plan=", "plan.method", "plan.ranks", "plan.dp_", "plan.tp", "plan.pp"),
)
"""Beginnings of the overrides that determine the number of ranks; they alone give a valid scenario."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a point that conditions may use besides its keys."""

    group: str
    variant: str | None
    file: Path
    overrides: tuple[str, ...]
    shared: Shared

    def sizes(self) -> dict[str, int] | None:
        """Return the point's numbers of ranks and devices; None if it is not a valid scenario."""
        deciding = tuple(e for e in self.overrides if e.startswith(DECIDING) and not is_rate(e.partition("=")[0]))
        sizes = self.shared.once("sizes", (self.file, deciding), lambda: self._sizes(deciding), most=4096)
        return sizes if sizes is not None else self._sizes(self.overrides)

    def _sizes(self, overrides: Sequence[str]) -> dict[str, int] | None:
        try:
            scenario = load_scenario(self.file, overrides, gradients_needed=False, shared=self.shared).scenario
            return {"ranks": scenario.ranks, "devices": len(scenario.cluster.devices)}
        except UserError:
            return None


class Choice:
    """The conditions of a sweep or group, which keep or skip points."""

    def __init__(self, keep: Sequence[str], skip: Sequence[str], file: Path) -> None:
        self.keep, self.skip = tuple(map(condition, keep)), tuple(map(condition, skip))
        self.file = file

    def takes(self, values: Mapping[str, Any], facts: Facts) -> bool:
        """Return whether a point is kept; raise UserError if a condition cannot be evaluated.

        For a point that is not a valid scenario, conditions on facts are skipped: it is kept, so that its error is
        shown.
        """
        for tested, wanted in (*((c, True) for c in self.keep), *((c, False) for c in self.skip)):
            known = self._known(tested, values, facts)
            if known is not None and self._holds(tested, known) != wanted:
                return False
        return True

    def _holds(self, tested: Condition, known: Mapping[str, Any]) -> bool:
        try:
            return tested.holds(known)
        except UserError as error:
            raise UserError(f"{self.file}: {error}") from None

    def _known(self, tested: Condition, values: Mapping[str, Any], facts: Facts) -> dict[str, Any] | None:
        """Return the values of a condition's names; None if it uses facts that are not known."""
        known: dict[str, Any] = {key: shown(key, values[key]) for key in tested.names if key in values}
        known |= {name: getattr(facts, name) for name in ("group", "variant") if name in tested.names}
        if not tested.names.isdisjoint(OF_THE_CLUSTER):
            sizes = facts.sizes()
            if sizes is None:
                return None
            known |= sizes
        return known


SEPARATOR = "--"
"""Separator of the parts of a point's name; the first part is its group."""


@dataclass(frozen=True, slots=True)
class Point:
    """One scenario of a sweep: a file and overrides."""

    name: str
    """`GROUP--VARIANT`, followed by the axes' values."""
    file: Path
    overrides: tuple[str, ...]
    variant: str | None = None
    values: tuple[Any, ...] = ()
    """Values of the sweep's `axis_keys`, as tables show them."""

    @property
    def group(self) -> str:
        """Name of the group.

        >>> Point("two-hosts--ddp", Path("a.toml"), ()).group
        'two-hosts'
        """
        return self.name.partition(SEPARATOR)[0]

    def load(self, *, gradients_needed: bool = True, shared: Shared | None = None) -> Loaded:
        """Return its scenario; raise UserError where it is invalid."""
        return load_scenario(self.file, self.overrides, gradients_needed=gradients_needed, shared=shared)


def points_of(sweep: Sweep, *, file: Path, overrides: Sequence[str] = ()) -> tuple[Point, ...]:
    """Return the points of the sweep in `file`, group by group; `overrides`: those of the command line, applied last.

    Raises UserError if there are too many points, if none is kept, or if two have the same name.
    """
    groups = sweep.groups or (Group(name=file.stem),)
    count = sum(variant.size for group in groups for variant in _variants(sweep, group))
    if (why := excess("points", count)) is not None:
        raise UserError(f"{file}: has {why}")
    _check_conditions(sweep, groups, file, overrides)
    keys, shared = axis_keys(sweep), Shared()
    _check_axes(sweep, groups, file, overrides)
    points = tuple(point for group in groups for point in _points(sweep, group, file, overrides, keys, shared))
    if not points:
        raise UserError(f"{file}: keep and skip leave out all of {count:,} points")
    twice = [name for name, times in Counter(point.name for point in points).items() if times > 1]
    if twice:
        raise UserError(f"{file}: two points are named '{twice[0]}'; groups and values of axes must differ in name")
    return points


def axis_keys(sweep: Sweep) -> tuple[str, ...]:
    """Return the keys of all axes, linked ones too, in the order of their first occurrence."""
    tables: list[tuple[dict[str, Any], Sequence[dict[str, Any]]]] = [(sweep.axes, sweep.linked)]
    tables += [(group.axes, group.linked) for group in sweep.groups]
    tables += [parts_of_variant(variant)[1:] for variant in sweep.variants.values()]
    return tuple(dict.fromkeys(key for axes, linked in tables for each in dimensions(axes, linked) for key in each[0]))


def chosen(points: Sequence[Point], patterns: Sequence[str], *, file: Path) -> tuple[Point, ...]:
    """Return the points whose names match one of the patterns (`*`, `?`); without patterns, all points.

    Raises UserError for a pattern that matches no point.
    """
    for pattern in patterns:
        if not any(fnmatchcase(point.name, pattern) for point in points):
            raise UserError(f"--only {pattern}: no point of {file} matches; the first is {points[0].name}")
    return tuple(p for p in points if not patterns or any(fnmatchcase(p.name, pattern) for pattern in patterns))


def loaded_point(point: Point, *, file: Path, gradients_needed: bool = True) -> Loaded:
    """Return the point's scenario; if it is invalid, raise UserError that names the sweep and the point."""
    try:
        return point.load(gradients_needed=gradients_needed)
    except UserError as error:
        raise UserError(f"{file}: {point.name}: {error}") from None


def _check_conditions(sweep: Sweep, groups: Sequence[Group], file: Path, overrides: Sequence[str]) -> None:
    """Raise UserError for a condition on a key that nothing sets."""
    variants = [parts_of_variant(variant)[0] for variant in sweep.variants.values()]
    files = {_beside(group.scenario or sweep.scenario, file) for group in groups}
    tables = (sweep.set, *variants, *(group.set for group in groups), *(read_toml(scenario)[1] for scenario in files))
    keys = {key for table in tables for key, _ in flat(table)}
    keys |= {*axis_keys(sweep), *(parsed_override(override)[0] for override in overrides)}
    texts = [*sweep.keep, *sweep.skip, *(text for group in groups for text in (*group.keep, *group.skip))]
    for text in texts:
        for name in sorted(condition(text).names - keys - set(FACTS)):
            close = difflib.get_close_matches(name, [*keys, *FACTS], n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(
                f"{file}: '{text}': nothing sets {name}; {hint}allowed: keys that the scenario, set, variants or axes "
                f"set, and {', '.join(FACTS)}"
            )


def _check_axes(sweep: Sweep, groups: Sequence[Group], file: Path, overrides: Sequence[str]) -> None:
    """Raise UserError for an override that takes the place of an axis of several values, or of a table around one.

    Points are named by these values: their names would coincide, and a table would show values that no point has.
    """
    several: dict[str, bool] = {}
    for dimension in (each for group in groups for variant in _variants(sweep, group) for each in variant.dimensions):
        for key in dimension[0]:
            several[key] = several.get(key, False) or len(dimension) > 1
    for key in (parsed_override(override)[0] for override in overrides):
        around = (axis for axis in several if axis.startswith(f"{key}.") or (axis == key and several[axis]))
        if axis := next(around, None):
            raise UserError(
                f"{file}: {key}: takes the place of the sweep's axis {axis}, by whose values its points are named; "
                "choose points with --only, or change the axis in a copy of the file"
            )


@dataclass(frozen=True, slots=True)
class _Variant:
    """A variant of a group: overrides, and axes to combine."""

    name: str | None
    tables: tuple[dict[str, Any], ...]
    dimensions: list[list[Place]]

    @property
    def size(self) -> int:
        """Number of points before conditions are applied."""
        return math.prod(map(len, self.dimensions))


def _variants(sweep: Sweep, group: Group) -> list[_Variant]:
    """Return a group's variants, or one without a name if there are none."""
    names = tuple(sweep.variants) if group.variants is None else group.variants
    common = _replaced(dimensions(sweep.axes, sweep.linked), dimensions(group.axes, group.linked), group.name)
    variants = []
    for name in names:
        table, axes, linked = parts_of_variant(sweep.variants[name])
        own = _replaced(common, dimensions(axes, linked), f"{group.name}, variants.{name}")
        variants.append(_Variant(name, (sweep.set, group.set, table), own))
    return variants or [_Variant(None, (sweep.set, group.set), common)]


def _replaced(common: list[list[Place]], own: list[list[Place]], where: str) -> list[list[Place]]:
    """Return `common` axes, each replaced by the one of `own` with the same keys, if any; then the others of `own`."""
    by_keys = {tuple(places[0]): places for places in own}
    axes = [by_keys.pop(tuple(places[0]), places) for places in common]
    axes += by_keys.values()
    for key, times in Counter(key for places in axes for key in places[0]).items():
        if times > 1:
            raise UserError(f"groups.{where}: {key} is linked with others in one place, and not in another")
    return axes


def _points(
    sweep: Sweep, group: Group, file: Path, overrides: Sequence[str], keys: Sequence[str], shared: Shared
) -> Iterator[Point]:
    """Yield a group's points that the conditions keep."""
    scenario = _beside(group.scenario or sweep.scenario, file)
    written = dict(flat(read_toml(scenario)[1]))
    last = [dict([parsed_override(override)]) for override in overrides]
    choice = Choice((*sweep.keep, *group.keep), (*sweep.skip, *group.skip), file)
    for variant in _variants(sweep, group):
        fixed = [override for table in variant.tables for override in _located(table, file)]
        values = reduce(_replacing, (dict(flat(table)) for table in variant.tables), written)
        stem = SEPARATOR.join([group.name, *([variant.name] if variant.name else [])])
        places = [[_NamedPlace(place, file) for place in dimension] for dimension in variant.dimensions]
        for combined in itertools.product(*places):
            name = SEPARATOR.join([stem, *(place.label for place in combined)])
            own = [override for place in combined for override in place.overrides]
            known = reduce(_replacing, (*(place.values for place in combined), *last), values)
            point = Point(
                name,
                scenario,
                (*fixed, *own, *overrides, f'name="{name}"'),
                variant.name,
                tuple(shown(key, known.get(key)) for key in keys),
            )
            facts = Facts(group.name, variant.name, point.file, point.overrides, shared)
            if choice.takes(known, facts):
                yield point


def _replacing(values: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key with further ones in their place; a table or file replaces all that is set inside of it."""
    inside = tuple(f"{key}." for key in further)
    return {key: value for key, value in values.items() if not key.startswith(inside)} | dict(flat(further))


class _NamedPlace:
    """A position on an axis, with its text for points' names and its overrides."""

    def __init__(self, place: Place, file: Path) -> None:
        key, value = next(iter(place.items()))
        self.label = label(key, value)  # of linked axes, the first one gives the name
        self.overrides = _located(place, file)
        self.values = place


def _located(table: dict[str, Any], file: Path) -> list[str]:
    """Return a table as overrides, with the paths of files beside the sweep resolved."""
    overrides = []
    for override in as_overrides(table):
        key, _, value = override.partition("=")
        place = _beside(value.strip('"'), file) if key in FILES and value.startswith('"') else None
        overrides.append(f'{key}="{place}"' if place is not None and place.exists() else override)
    return overrides


def _beside(name: str, file: Path) -> Path:
    return Path(os.path.normpath(file.parent / name))
