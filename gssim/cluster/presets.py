"""Presets of devices and links, with their sources: names that cluster files may use in the place of numbers.

`devices.toml` and `links.toml` beside this file hold them. A name stands for the whole table; a table with a key
`preset` overrides values of it.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import tomli

from gssim.errors import nearest_name

Kind = Literal["devices", "links"]


@cache
def presets(kind: Kind) -> dict[str, dict[str, Any]]:
    """Return all presets of a kind, by name, in the form of a cluster file.

    >>> presets("links")["pcie4x16"]["bandwidth_bytes_per_s"]
    '24 GB/s'
    """
    return tomli.loads(files("gssim.cluster").joinpath(f"{kind}.toml").read_text(encoding="utf-8"))


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
        own["source"] = f"{own['source']}{THE_REST}{preset['source']}"
    elif own:  # keys that the preset lacks
        own["source"] = f"{', '.join(own)} of the file{THE_REST}{preset['source']}"
    return {**preset, **own}


THE_REST = "; the rest: "
"""Between the source of a table's own keys and that of its preset."""


def _preset(kind: Kind, name: str) -> dict[str, Any]:
    known = presets(kind)
    if name not in known:
        close = nearest_name(name, known)
        hint = f"did you mean {close}? " if close else ""
        raise ValueError(f"there is no preset {name!r} of {kind}; {hint}{_allowed(kind)}")
    return {**known[name], "source": f"preset {name}: {known[name]['source']}"}


def preset_of(source: str) -> str | None:
    """Return the device preset that a device type with this source is, unchanged; None if it is none.

    >>> preset_of("preset t4: datasheet"), preset_of("timed here; the rest: preset t4: datasheet")
    ('t4', None)
    """
    name = source.removeprefix("preset ").partition(":")[0]
    unchanged = source.startswith("preset ") and THE_REST not in source
    return name if unchanged and name in presets("devices") else None


@dataclass(frozen=True, kw_only=True)
class QuantityErrors:
    """Relative errors of the predictions of published runs, in one quantity."""

    runs: int
    median_ratio: float
    nine_in_ten_ratio: float
    """The error that nine in ten of them do not exceed."""


@dataclass(frozen=True, kw_only=True)
class PresetErrors:
    """Errors of the predictions of published runs on one kind of device, as its preset describes it."""

    step: QuantityErrors
    memory: QuantityErrors | None = None


@cache
def preset_errors() -> dict[str, PresetErrors]:
    """Return the errors of published runs by device preset, as `python -m analysis literature --by-device` found them.

    A preset whose figures have changed since is left out: the errors are those of other figures.
    """
    data = tomli.loads(files("gssim.cluster").joinpath("preset_errors.toml").read_text(encoding="utf-8"))
    return {
        name: PresetErrors(**{kind: QuantityErrors(**errors) for kind, errors in each.items() if kind != "figures"})
        for name, each in data.items()
        if name in presets("devices") and each["figures"] == digest_of_figures(name)
    }


def digest_of_figures(name: str) -> str:
    """Return a digest of the figures of a device preset that predictions of time and memory use."""
    others = ("source", "price_usd_per_h", "busy_power_w", "idle_power_w")
    figures = {key: value for key, value in presets("devices")[name].items() if key not in others}
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()[:12]


def expected_errors(sources: Iterable[str]) -> str | None:
    """Return in a line how well published runs on devices with these sources were predicted; None if not all are known.

    >>> expected_errors(["measured here by gsreal calibrate"])
    """
    names = [preset_of(source) for source in dict.fromkeys(sources)]
    known = {name: preset_errors().get(name) for name in names if name is not None}
    if len(known) < len(names) or not known:
        return None
    listed = "; ".join(f"{name}: {_in_words(errors)}" for name, errors in known.items())
    return f"errors on published runs, median and 90th percentile: {listed}"


FEWEST_RUNS = 10
"""Least number of runs of which the 90th percentile is shown."""


def _in_words(errors: PresetErrors | None) -> str:
    """Return the errors of a preset as text; without a preset's errors, that no published runs on it are known."""
    if errors is None:
        return "no such runs"
    words = []
    for quantity, error in (("step", errors.step), ("memory", errors.memory)):
        if error is not None:
            tail = f", {error.nine_in_ten_ratio:.1%}" if error.runs >= FEWEST_RUNS else ""
            words.append(f"{quantity} {error.median_ratio:.1%}{tail} ({error.runs} runs)")
    return ", ".join(words)


def _allowed(kind: Kind) -> str:
    return f"allowed: {', '.join(presets(kind))} (scenarios/README.md, Presets)"
