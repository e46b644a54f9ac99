"""JSON with an indent, for which the standard library's encoder is written in Python and takes ten times as long."""

import json
from json.encoder import encode_basestring_ascii
from math import isfinite
from typing import Any

_encoded = json.JSONEncoder(allow_nan=False).encode


def indented_json(value: Any, line: str = "\n") -> str:
    """Return the text of `json.dumps(value, indent=2, allow_nan=False)`; `line`: begin of a line at this depth.

    >>> data = {"a": [1, 2.5, None], "b": {}, 3: "\u00e4", "c": [{"d": (True,)}, []]}
    >>> indented_json(data) == json.dumps(data, indent=2, allow_nan=False)
    True
    """
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, float) and isfinite(value):
        return float.__repr__(value)
    if type(value) is int:
        return repr(value)
    if not value or not isinstance(value, dict | list | tuple):
        return _encoded(value)
    inside = line + "  "
    if not isinstance(value, dict):
        return f"[{inside}{f',{inside}'.join([indented_json(each, inside) for each in value])}{line}]"
    entries = [
        f"{encode_basestring_ascii(key) if isinstance(key, str) else _quoted(key)}: {indented_json(each, inside)}"
        for key, each in value.items()
    ]
    return f"{{{inside}{f',{inside}'.join(entries)}{line}}}"


def _quoted(key: Any) -> str:
    """Return the text of a key that is a number, a truth value or None."""
    return f'"{_encoded(key)}"'
