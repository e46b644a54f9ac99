"""Overrides of a scenario's keys, from mappings of Python values or from texts KEY=VALUE, and their application."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

import tomli

from gssim.cluster import presets
from gssim.errors import UserError, one_line
from gssim.units import shown_value


def as_overrides(table: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a TOML table as overrides for `--set`, one for each key.

    >>> as_overrides({"plan": {"push": {"threshold": 0.001}, "method": "gs"}, "run": {"steps": 30}})
    ['plan.push.threshold=0.001', 'plan.method="gs"', 'run.steps=30']
    """
    overrides = []
    for key, value in table.items():
        path = f"{prefix}{key}"
        overrides += as_overrides(value, f"{path}.") if isinstance(value, dict) else [f"{path}={toml(value)}"]
    return overrides


def overrides_of(changes: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Return changes of keys in the form of `--set`; raise UserError for a value that TOML cannot express.

    >>> overrides_of({"plan.method": "gs", "plan.shares.batch": (0.75, 0.25)})
    ['plan.method="gs"', 'plan.shares.batch=[0.75, 0.25]']
    """
    if isinstance(changes, (str, bytes)) or not isinstance(changes, Iterable):
        raise UserError(
            f"{shown_value(changes)}: changes must be a mapping of keys to values, or a list of texts KEY=VALUE"
        )
    if isinstance(changes, Mapping):
        return [f"{key}={_written(value, key)}" for key, value in changes.items()]
    overrides = list(changes)
    for override in overrides:
        if not isinstance(override, str):
            raise UserError(f"changes: {shown_value(override)}: must be a text KEY=VALUE")
    return overrides


def _written(value: Any, key: str) -> str:
    try:
        return toml(plain(value, key))
    except UserError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{key}: {error}") from None


def plain(value: Any, key: str, *, with_none: bool = False) -> Any:
    """Return a Python or numpy value as a TOML value; raise UserError if that is impossible.

    `with_none`: keep None, which stands for an absent key.
    """
    try:
        return _plain(value, key, with_none=with_none)
    except RecursionError:
        raise UserError(f"{key}: is nested too deep") from None


def _plain(value: Any, key: str, *, with_none: bool) -> Any:
    if isinstance(value, Mapping):
        wrong = [name for name in value if not isinstance(name, str)]
        if wrong:
            raise UserError(f"{key}: {shown_value(wrong[0])}: keys must be texts")
        return {str(name): _plain(part, f"{key}.{name}", with_none=with_none) for name, part in value.items()}
    if not isinstance(value, type) and hasattr(value, "tolist"):  # an array or a scalar of numpy, or alike
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(part, key, with_none=with_none) for part in value]
    if isinstance(value, bool) or (value is None and with_none):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (str, PurePath)):
        return str(value)
    raise UserError(f"{key} = {shown_value(value)}: must be a number, text, true or false, or a list or table of these")


BARE_KEYS = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
"""Pattern of a key, or path of keys, that TOML accepts without quotes."""


def toml(value: Any) -> str:
    """Return a value in TOML syntax.

    >>> toml([{"between": ["a", "b"], "bandwidth_ratio": 0.5}, True, float("inf")])
    '[{between = ["a", "b"], bandwidth_ratio = 0.5}, true, inf]'
    """
    if isinstance(value, dict):
        keys = (key if BARE_KEYS.fullmatch(key) else _toml_text(key) for key in value)
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in zip(keys, value.values(), strict=True)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return _toml_text(value) if isinstance(value, str) else repr(value)


def _toml_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON does not escape


def parsed_override(override: str) -> tuple[str, Any]:
    """Return the key and value of an override; the value is TOML, or a bare string.

    Indices of arrays may be written as they are in messages.

    >>> parsed_override("run.slowdowns[0].rank=1")
    ('run.slowdowns.0.rank', 1)
    >>> parsed_override("plan.shares.batch=[0.5, 0.5]"), parsed_override("plan.method=gs")
    (('plan.shares.batch', [0.5, 0.5]), ('plan.method', 'gs'))
    """
    key, value = _parsed(override)
    return key, deepcopy(value) if isinstance(value, (dict, list)) else value


PLAIN_TEXT = re.compile(r'"[ !#-\[\]-~]*"')
"""Pattern of a text in TOML that stands for itself. Every point of a sweep has one, its name."""


@lru_cache(maxsize=1024)
def _parsed(override: str) -> tuple[str, Any]:
    key, separator, value = override.partition("=")
    key = re.sub(r"\[(\d+)\]", r".\1", key.strip())
    if not separator or not key:
        raise UserError(f"--set {override}: must be KEY=VALUE, such as plan.push.threshold=1e-3")
    if not override.isascii() and any("\ud800" <= character <= "\udfff" for character in override):
        raise UserError(f"--set {override}: is no text in UTF-8")
    if PLAIN_TEXT.fullmatch(value):
        return key, value[1:-1]
    try:
        return key, tomli.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError) as error:
        text = value.strip()
        if text[:1] + text[-1:] in ("[]", "{}"):
            what = "array" if text[0] == "[" else "table"
            raise UserError(
                f'--set {override}: is no {what} as TOML writes it: texts in it need quotation marks, such as ["ddp"] '
                f"({one_line(str(error), 60)})"
            ) from None
        return key, text


def put(data: dict[str, Any], key: str, value: Any, *, under: str = "") -> None:
    """Set the value at a key path in nested TOML tables; `under`: the path of `data`, for messages.

    The parts of a path are keys of tables (created if missing), or indices of arrays, from 0. The name of a preset is
    replaced by a table with that preset and the difference from it.

    >>> data = {"servers": [{"count": 8, "nic_link": "ib-hdr-200"}]}
    >>> put(data, "servers.0.nic_link.latency_s", 1e-6)
    >>> data["servers"][0]["nic_link"]
    {'preset': 'ib-hdr-200', 'source': 'overridden', 'latency_s': 1e-06}
    """
    *parents, last = key.split(".")
    table: Any = data
    for i, part in enumerate([*parents, last]):
        if isinstance(table, list) and not (part.isdecimal() and int(part) < len(table)):
            where = f"{under}{'.'.join(parents[:i])}"
            raise UserError(f"--set {under}{key}: {where} has {len(table)} entries, counted from 0, and no '{part}'")
        if not isinstance(table, (dict, list)):
            where = f"{under}{'.'.join(parents[:i])}"
            raise UserError(f"--set {under}{key}: {where} names a file or a value, not a table")
        place: Any = int(part) if isinstance(table, list) else part
        if i == len(parents):
            table[place] = value
        elif isinstance(table, dict) and part not in table:
            table[part] = {}
        elif isinstance(table[place], str) and any(table[place] in presets(kind) for kind in ("devices", "links")):
            table[place] = {"preset": table[place], "source": "overridden"}
        table = table[place]
