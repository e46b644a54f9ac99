"""Overrides of a scenario's keys, as `--set` takes them, from tables of TOML and into them."""

import json
import tomllib
from copy import deepcopy
from functools import lru_cache
from typing import Any

from gssim.presets import presets
from gssim.units import UserError


def as_overrides(table: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a table of TOML as `--set` takes it, a key each.

    >>> as_overrides({"plan": {"push": {"threshold": 0.001}, "method": "gs"}, "run": {"steps": 30}})
    ['plan.push.threshold=0.001', 'plan.method="gs"', 'run.steps=30']
    """
    found = []
    for key, value in table.items():
        found += as_overrides(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}={toml(value)}"]
    return found


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
