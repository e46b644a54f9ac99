"""Tables of TOML as overrides of a scenario's keys, as `--set` takes them."""

import json
from typing import Any


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
