"""Sweep files: a base scenario, axes of values (lists or ranges), linked axes, variants and groups of points."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gssim.errors import UserError
from gssim.scenario.loading import IN_FILES, RATES, check_kind, first_comment, read_toml
from gssim.scenario.overrides import toml
from gssim.scenario.sweep.conditions import condition
from gssim.units import PositiveInt, excess, parse_quantity, quantity_of, spec, validated
from gssim.workload import PATHS

FILES = (
    "cluster",
    *(f"cluster.{key}" for key in IN_FILES),
    "workload.model",
    "workload.gradients",
    *(f"workload.data.{key}" for key in PATHS),
)
"""Keys whose values may name files."""
Place = dict[str, Any]
"""Values by key path: one position on an axis, or on several linked axes."""
RANGE_KEYS = ("from", "to", "count", "scale")
DIGITS = 6
"""Significant digits of intermediate values of a range, to avoid 3.1622776601683795e-05."""


def axes_of(table: Mapping[str, Any], where: str = "axes") -> dict[str, list[Any]]:
    """Return lists of values by key path; raise UserError for values that are not a list or range, or are empty.

    >>> axes_of({"plan": {"push": {"threshold": [1e-4, 1e-3]}}, "plan.method": ["gs"]})
    {'plan.push.threshold': [0.0001, 0.001], 'plan.method': ['gs']}
    >>> axes_of({"workload.global_batch_size": {"from": 8, "to": 64, "count": 4, "scale": "log"}})
    {'workload.global_batch_size': [8, 16, 32, 64]}
    """
    axes: dict[str, list[Any]] = {}
    for key, value in flat(table):
        if isinstance(value, dict):
            axes[key] = values_between(key, value, f"{where}: {key}")
        elif isinstance(value, list) and value:
            axes[key] = value
        else:
            raise UserError(
                f"{where}: {key} = {value!r}: must be a list of values, one at least, or a range such as "
                '{ from = 1, to = 64, count = 7, scale = "log" }'
            )
    return axes


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of nested tables by key path; a range counts as a value."""
    for key, value in table.items():
        if isinstance(value, dict) and "from" not in value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def dimensions(axes: Mapping[str, Any], linked: Sequence[Mapping[str, Any]], where: str = "") -> list[list[Place]]:
    """Return the factors of the product of axes: the positions of each axis, and of each table of linked axes.

    >>> dimensions({"run.seed": [0, 1]}, [{"plan.dp_replicate": [2, 4], "plan.dp_shard": [4, 2]}])[1]
    [{'plan.dp_replicate': 2, 'plan.dp_shard': 4}, {'plan.dp_replicate': 4, 'plan.dp_shard': 2}]
    """
    factors = [[{key: value} for value in values] for key, values in axes_of(axes, f"{where}axes").items()]
    for i, table in enumerate(linked):
        lists = axes_of(table, f"{where}linked[{i}]")
        sizes = {key: len(values) for key, values in lists.items()}
        if len(set(sizes.values())) != 1:
            lengths = ", ".join(f"{key} has {size}" for key, size in sizes.items()) or "there is none"
            raise UserError(f"{where}linked[{i}]: lists of equal lengths are needed; {lengths}")
        factors.append([dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)])
    keys = [key for places in factors for key in places[0]]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"{where}linked: {key} is an axis already")
    return factors


def values_between(key: str, table: Mapping[str, Any], where: str) -> list[float]:
    """Return the `count` values of a range from `from` to `to`, evenly spaced or, by `scale`, in equal ratios.

    Quantities are numbers in the key's unit. Intermediate values have six significant digits; they are integers if all
    of them are, to that precision.

    >>> values_between("plan.push.threshold", {"from": 1e-4, "to": 1e-2, "count": 5, "scale": "log"}, "")
    [0.0001, 0.000316228, 0.001, 0.00316228, 0.01]
    >>> values_between("cluster.topology.link.latency_s", {"from": "0 us", "to": "10 us", "count": 3}, "")
    [0.0, 5e-06, 1e-05]
    """
    for name in table:
        if name not in RANGE_KEYS:
            raise UserError(f"{where}.{name}: unknown key; allowed in a range: {', '.join(RANGE_KEYS)}")
    first, last = (_end(key, table, name, where) for name in ("from", "to"))
    count, scale = table.get("count"), table.get("scale", "linear")
    if type(count) is not int or count < 2:
        raise UserError(f"{where}.count = {count!r}: must be a number of values, at least 2")
    if (why := excess("points", count)) is not None:
        raise UserError(f"{where}.count: {why}")
    if scale not in ("linear", "log"):
        raise UserError(f"{where}.scale = {scale!r}: allowed: 'linear', 'log'")
    if scale == "log" and not (first > 0 and last > 0):
        raise UserError(f"{where}: a logarithmic range begins and ends above 0")
    if not first < last:
        raise UserError(f"{where}: from = {table['from']!r} must be less than to = {table['to']!r}")
    values = [first, *(_between(first, last, i / (count - 1), scale) for i in range(1, count - 1)), last]
    whole = all(type(end) is int for end in (first, last)) and all(value == round(value) for value in values)
    return [round(value) for value in values] if whole else [float(value) for value in values]


def _end(key: str, table: Mapping[str, Any], name: str, where: str) -> float:
    value, kind = table.get(name), quantity_of(key)
    if isinstance(value, str) and kind is not None:
        try:
            return parse_quantity(value, kind)
        except ValueError as error:
            raise UserError(f"{where}.{name} = {value!r}: {error}") from None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"{where}.{name} = {value!r}: must be a number{f', or a quantity in {kind}' if kind else ''}")
    return value


def _between(first: float, last: float, part: float, scale: str) -> float:
    value = first * (last / first) ** part if scale == "log" else first + (last - first) * part
    whole = round(value)
    return float(whole) if math.isclose(value, whole, rel_tol=1e-9) else float(f"{value:.{DIGITS}g}")


def is_rate(key: str) -> bool:
    """Return whether a key sets the speed of links, which affects neither the devices nor the wiring.

    >>> is_rate("cluster.topology.link.bandwidth_bytes_per_s"), is_rate("cluster.topology.devices.0.count")
    (True, False)
    """
    return key.startswith("cluster.") and key.endswith(RATES)


def label(key: str, value: Any) -> str:
    """Return the text for an axis's value in a point's name.

    >>> label("plan.push.threshold", 1e-3), label("cluster", "clusters/two-sites.toml"), label("plan.tp", 2)
    ('threshold-0.001', 'two-sites', 'tp-2')
    """
    if isinstance(value, str):
        words = Path(value).stem if key in FILES else value
    else:
        words = f"{key.rpartition('.')[2]}-{value}"
    return "-".join(re.findall(r"[A-Za-z0-9._+]+", words)) or "none"


def shown(key: str, value: Any) -> Any:
    """Return a value in the form used by tables and conditions: quantities as numbers, files by name, arrays as text.

    >>> shown("cluster.topology.link.bandwidth_bytes_per_s", "1 Gb/s"), shown("cluster", "../clusters/two-sites.toml")
    (125000000.0, 'two-sites')
    """
    if isinstance(value, str):
        kind = quantity_of(key)
        try:
            return Path(value).stem if key in FILES else value if kind is None else parse_quantity(value, kind)
        except ValueError:  # an invalid quantity, reported when the point is loaded
            return value
    return value if value is None or isinstance(value, (bool, int, float)) else toml(value)


NAME = re.compile(r"[A-Za-z0-9._+]+(-[A-Za-z0-9._+]+)*")


Conditions = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""One or several conditions; see `gssim.scenario.sweep.conditions`."""


@spec
class Group:
    """Points that are compared with one another: usually on the same cluster, with the same model."""

    name: str
    """Name of the group; the names of its points begin with it, followed by `--`."""
    scenario: str | None = None
    """Another scenario file, beside this one, that the group uses as its base; absent: the sweep's."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides of the scenario's keys, for all points of the group."""
    variants: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of the variants that the group has; absent: all."""
    axes: dict[str, Any] = field(default_factory=dict)
    """Lists of values or ranges, by key, in addition to the sweep's axes; an axis of the same key is replaced."""
    linked: tuple[dict[str, Any], ...] = ()
    """Linked axes in addition to the sweep's."""
    keep: Conditions = ()
    """Conditions in addition to the sweep's."""
    skip: Conditions = ()
    """Conditions in addition to the sweep's."""


@spec
class Sweep:
    """A table of scenarios: every group has a point for each of its variants and each combination of axis values.

    If a key is overridden more than once, the last override counts, in the order sweep, group, variant, axes, linked
    axes.
    """

    scenario: str
    """The base scenario file, beside this one."""
    question: str = ""
    """Question that all points together answer; by default the comment on the file's first line."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides of keys, for all points. Files are searched beside the sweep, then beside the scenario."""
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Overrides by name of the variant. A variant may also have its own `axes` and `linked`, for example thresholds
    that other methods do not have."""
    axes: dict[str, Any] = field(default_factory=dict)
    """By key, a list of values or a range: `{ from = "1 Gb/s", to = "400 Gb/s", count = 9, scale = "log" }`; without
    `scale`, a range is linear. Quantities may have units. All axes are combined."""
    linked: tuple[dict[str, Any], ...] = ()
    """Tables of axes whose values change together; the axes of a table have equally many values."""
    keep: Conditions = ()
    """Conditions that must all hold for a point to be kept, such as `workload.global_batch_size >= ranks`. They use
    keys of the scenario, and the facts `group`, `variant`, `ranks` and `devices`."""
    skip: Conditions = ()
    """Conditions that exclude a point; none of them may hold."""
    groups: tuple[Group, ...] = ()
    """Groups of points. Absent: one group, named after the file."""
    repeats: PositiveInt = 1
    """Number of measurements of each measured point."""


def load_sweep(path: Path) -> Sweep:
    """Return the sweep in the TOML file `path`; raise UserError (one line: file, key path, what is allowed)."""
    text, data = read_toml(path)
    if not path.name.isprintable():
        raise UserError(f"{path}: points are named after the file: its name must be printable")
    check_kind(data, "sweep", str(path))
    data.setdefault("question", first_comment(text))
    sweep = validated(Sweep, data, file=str(path))
    _check_names(sweep, path)
    tables: list[tuple[Sweep | Group, str]] = [(sweep, "")]
    tables += [(group, f"groups[{i}].") for i, group in enumerate(sweep.groups)]
    for table, under in tables:
        dimensions(table.axes, table.linked, f"{path}: {under}")
        _check_conditions(table.keep, f"{path}: {under}keep")
        _check_conditions(table.skip, f"{path}: {under}skip")
    for name, variant in sweep.variants.items():
        _, axes, linked = parts_of_variant(variant, f"{path}: variants.{name}.")
        dimensions(axes, linked, f"{path}: variants.{name}.")
    return sweep


Parts = tuple[dict[str, Any], dict[str, Any], Sequence[dict[str, Any]]]


def parts_of_variant(variant: dict[str, Any], where: str = "") -> Parts:
    """Return a variant's overrides, axes and linked axes; raise UserError if these are invalid."""
    axes, linked = variant.get("axes", {}), variant.get("linked", [])
    if not isinstance(axes, dict):
        raise UserError(f"{where}axes = {axes!r}: must be a table of keys")
    if not isinstance(linked, list) or not all(isinstance(table, dict) for table in linked):
        raise UserError(f"{where}linked = {linked!r}: must be an array of tables")
    return {key: value for key, value in variant.items() if key not in ("axes", "linked")}, axes, linked


def _check_conditions(texts: Sequence[str], where: str) -> None:
    for text in texts:
        try:
            condition(text)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _check_names(sweep: Sweep, file: Path) -> None:
    """Raise UserError for names that cannot be part of file names, or refer to nothing."""
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
