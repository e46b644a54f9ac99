"""What a sweep's file says: a base scenario, and what points differ in."""

import re
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gssim.scenario import first_comment, read_toml
from gssim.sweep.axes import dimensions
from gssim.sweep.conditions import condition
from gssim.units import PositiveInt, UserError, spec, validated

NAME = re.compile(r"[A-Za-z0-9._+]+(-[A-Za-z0-9._+]+)*")


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Conditions = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""One or several, as `gssim.sweep.conditions` reads them."""


@spec
class Group:
    """Points that are compared with one another: on the same cluster, as a rule, with the same model."""

    name: str
    """What stands before `--` in the names of its points."""
    scenario: str | None = None
    """Another file whose keys are overridden, beside this one; absent: the sweep's."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides of the scenario's keys, for all of the group."""
    variants: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of those that it has; absent: all."""
    axes: dict[str, Any] = field(default_factory=dict)
    """Lists of values or ranges, by key; besides the sweep's own, or in the place of the same one."""
    linked: tuple[dict[str, Any], ...] = ()
    """As of the sweep, besides its own."""
    keep: Conditions = ()
    """As of the sweep, besides its own."""
    skip: Conditions = ()
    """The same."""


@spec
class Sweep:
    """A table of questions: every group has a point for each of its variants and each combination of axes' values.

    Where keys are overridden more than once the later counts: the sweep's, the group's, the variant's, the axes', those
    of linked ones.
    """

    scenario: str
    """The file whose keys are overridden, beside this one."""
    question: str = ""
    """What all points together answer; the first line's comment."""
    set: dict[str, Any] = field(default_factory=dict)
    """Overrides of the scenario's keys, for all points. Files are looked up beside the sweep, then the scenario."""
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Overrides, by name of the variant. Besides, a variant may have `axes` and `linked` of its own, such as thresholds
    that other methods do not have."""
    axes: dict[str, Any] = field(default_factory=dict)
    """By key, a list of values, or a range: `{ from = "1 Gb/s", to = "400 Gb/s", count = 9, scale = "log" }`, `linear`
    if `scale` is absent. Quantities may have units. All axes are multiplied."""
    linked: tuple[dict[str, Any], ...] = ()
    """Each a table of axes of equally many values, which change together: an axis of several keys."""
    keep: Conditions = ()
    """Conditions of which all must hold for a point to be there, such as `workload.global_batch_size >= ranks`: over
    keys of the scenario, and the facts `group`, `variant`, `ranks`, `devices`."""
    skip: Conditions = ()
    """Conditions of which none may hold."""
    groups: tuple[Group, ...] = ()
    """None: one, named after the file."""
    repeats: PositiveInt = 1
    """How often each point is measured, where it is."""


def load_sweep(path: Path) -> Sweep:
    """Return the sweep in the TOML file `path`; raise UserError (one line: file, key path, what is allowed)."""
    text, data = read_toml(path)
    data.setdefault("question", first_comment(text))
    sweep = validated(Sweep, data, file=str(path))
    _check_names(sweep, path)
    tables: list[tuple[Sweep | Group, str]] = [(sweep, "")]
    tables += [(group, f"groups[{i}].") for i, group in enumerate(sweep.groups)]
    for each, under in tables:
        dimensions(each.axes, each.linked, f"{path}: {under}")
        _check_conditions(each.keep, f"{path}: {under}keep")
        _check_conditions(each.skip, f"{path}: {under}skip")
    for name, variant in sweep.variants.items():
        _, axes, linked = parts_of_variant(variant, f"{path}: variants.{name}.")
        dimensions(axes, linked, f"{path}: variants.{name}.")
    return sweep


Parts = tuple[dict[str, Any], dict[str, Any], Sequence[dict[str, Any]]]


def parts_of_variant(variant: dict[str, Any], where: str = "") -> Parts:
    """Return what a variant overrides, its axes, and those that are linked; raise UserError where these are none."""
    axes, linked = variant.get("axes", {}), variant.get("linked", [])
    if not isinstance(axes, dict):
        raise UserError(f"{where}axes = {axes!r}: must be a table of keys")
    if not isinstance(linked, list) or not all(isinstance(each, dict) for each in linked):
        raise UserError(f"{where}linked = {linked!r}: must be an array of tables")
    return {key: value for key, value in variant.items() if key not in ("axes", "linked")}, axes, linked


def _check_conditions(texts: Sequence[str], where: str) -> None:
    for text in texts:
        try:
            condition(text)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


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
