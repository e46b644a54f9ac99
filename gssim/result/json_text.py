"""JSON with an indent, for which the standard library's encoder is written in Python and takes thrice as long."""

import json
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Any

_encoded = json.JSONEncoder(allow_nan=False).encode
_SCALARS: dict[type, Callable[[Any], str]] = {
    str: encode_basestring_ascii,
    int: int.__repr__,
    bool: {False: "false", True: "true"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}
"""Encoders of values that do not depend on the depth, without those of numbers that JSON lacks."""


def indented_json(value: Any, line: str = "\n") -> str:
    """Return the text of `json.dumps(value, indent=2, allow_nan=False)`; `line`: begin of a line at this depth.

    >>> data = {"a": [1, 2.5, None], "b": {}, 3: "\u00e4", "c": [{"d": (True,)}, [], "e"]}
    >>> indented_json(data) == json.dumps(data, indent=2, allow_nan=False)
    True
    """
    if type(value) is float and value - value == 0:  # it is finite
        return repr(value)
    if not value or not isinstance(value, dict | list | tuple):
        return _encoded(value)
    inside = line + "  "
    if isinstance(value, dict):
        entries = [
            f"{encode_basestring_ascii(key) if isinstance(key, str) else _quoted(key)}: "
            f"{scalar(each) if (scalar := _SCALARS.get(type(each))) else indented_json(each, inside)}"
            for key, each in value.items()
        ]
        return f"{{{inside}{f',{inside}'.join(entries)}{line}}}"
    entries = [scalar(each) if (scalar := _SCALARS.get(type(each))) else indented_json(each, inside) for each in value]
    return f"[{inside}{f',{inside}'.join(entries)}{line}]"


def _quoted(key: Any) -> str:
    """Return the text of a key that is a number, a truth value or None."""
    return f'"{_encoded(key)}"'
