"""Presets of devices and links, with their sources: names that cluster files may use in the place of numbers.

`devices.toml` and `links.toml` beside this file hold them. A name stands for the whole table; a table with a key
`preset` overrides values of it.
"""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from gssim.errors import nearest_name

Kind = Literal["devices", "links"]


@cache
def presets(kind: Kind) -> dict[str, dict[str, Any]]:
    """Return all presets of a kind, by name, in the form of a cluster file.

    >>> presets("links")["pcie4x16"]["bandwidth_bytes_per_s"]
    '24 GB/s'
    """
    return tomllib.loads(files("gssim.cluster").joinpath(f"{kind}.toml").read_text(encoding="utf-8"))


def expanded(kind: Kind, value: Any) -> Any:
    """Return a device type or link of a file with its preset filled in; a value without a preset is returned unchanged.

    A table's own keys override the preset's. They need a source of their own, which the preset's does not cover. Raises
    ValueError if there is no such preset.

    >>> link = expanded("links", {"preset": "pcie4x16", "latency_s": "9 us", "source": "timed here"})
    >>> link["latency_s"], link["bandwidth_bytes_per_s"], link["source"].split(": measured")[0]
    ('9 us', '24 GB/s', 'timed here; the rest: preset pcie4x16')
    """
    if isinstance(value, str):
        return _preset(kind, value)
    if not isinstance(value, dict) or "preset" not in value:
        return value
    name = value["preset"]
    if not isinstance(name, str):
        raise ValueError(f"preset = {name!r}: must be a name; {_allowed(kind)}")
    preset = _preset(kind, name)
    own = {key: value[key] for key in value if key != "preset"}
    replaced = [key for key in own if key in preset and key != "source"]
    if replaced and "source" not in own:
        raise ValueError(f"source: missing; name the source of {replaced[0]}, which overrides that of preset {name!r}")
    if "source" in own:
        own["source"] = f"{own['source']}; the rest: {preset['source']}"
    return {**preset, **own}


def _preset(kind: Kind, name: str) -> dict[str, Any]:
    known = presets(kind)
    if name not in known:
        close = nearest_name(name, known)
        hint = f"did you mean {close}? " if close else ""
        raise ValueError(f"there is no preset {name!r} of {kind}; {hint}{_allowed(kind)}")
    return {**known[name], "source": f"preset {name}: {known[name]['source']}"}


def _allowed(kind: Kind) -> str:
    return f"allowed: {', '.join(presets(kind))} (scenarios/README.md, Presets)"
