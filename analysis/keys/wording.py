"""What a key takes, in words: its type, unit, limits and default."""

import typing
from dataclasses import MISSING, is_dataclass
from inspect import isclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gssim.units import UNITS, UNSAID, human_bytes

PLAIN = {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "any value"}
LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
MOST = 10**15
"""Counts have this limit, which nobody meets."""


def is_table(kind: Any) -> bool:
    """Return whether a type is a table of keys."""
    return isclass(kind) and hasattr(kind, "__pydantic_fields__")


def tables_in(kind: Any) -> list[type]:
    """Return the tables that are somewhere in a type, in order."""
    if is_table(kind):
        return [kind]
    return [table for part in _parts(kind) for table in tables_in(part)]


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind)[:1] if get_origin(kind) is typing.Annotated else get_args(kind)


def value_in_words(kind: Any, link: Any) -> str:
    """Return what a value of a type is; `link`: turns a table into what refers to its section.

    >>> from gssim.units import PositiveInt, Seconds
    >>> value_in_words(Seconds | None, str), value_in_words(tuple[PositiveInt, ...], str)
    ('seconds, such as `"5 us"`', 'array: whole number > 0')
    """
    origin = get_origin(kind)
    if origin is typing.Annotated:
        return _annotated(*get_args(kind), link=link)
    if origin in (Union, UnionType):
        options = [option for option in get_args(kind) if option is not NoneType]
        return ", or ".join(dict.fromkeys(value_in_words(option, link) for option in options))
    if origin is Literal:
        return ", ".join(f"`{_toml(option)}`" for option in get_args(kind))
    if origin is tuple:
        return _array(get_args(kind), link)
    if origin is dict:
        key, value = get_args(kind)
        names = f"each of {value_in_words(key, link)}" if get_origin(key) is Literal else "name"
        return f"table, by {names}: {value_in_words(value, link)}"
    if is_table(kind):
        return f"table {link(kind)}"
    return PLAIN.get(kind) or f"text ({kind.__name__.lower()})"


def _array(parts: tuple[Any, ...], link: Any) -> str:
    inner = [value_in_words(part, link) for part in parts if part is not Ellipsis]
    if Ellipsis in parts or len(set(inner)) > 1:
        return f"array: {', '.join(inner)}"
    return f"array of {len(inner)}: {inner[0]}"


def _annotated(base: Any, *notes: Any, link: Any) -> str:
    for note in notes:
        described = (
            note.json_schema.get("description", "") if isinstance(note, WithJsonSchema) and note.json_schema else ""
        )
        unit, _, example = described.partition(", e.g. ")
        if unit in UNITS:
            return f'{unit}, such as `"{example.strip(chr(39))}"`'
        if described and base is not float and not is_dataclass(base):
            return f"text: {described}"
    limits = [limit for note in notes if isinstance(note, FieldInfo) for limit in _field_limits(note)]
    return " ".join([value_in_words(base, link), " and ".join(limits)]).strip()


def _field_limits(note: FieldInfo) -> list[str]:
    found = []
    for each in note.metadata:
        for name, sign in LIMITS.items():
            limit = getattr(each, name, None)
            if limit is not None and limit not in (MOST, *UNSAID):
                found.append(f"{sign} {limit:g}")
        if (fewest := getattr(each, "min_length", None)) is not None:
            found.append(f"(at least {fewest})")
    return found


def default_in_words(name: str, field: FieldInfo) -> str:
    """Return what holds where a key is absent."""
    if field.default_factory is not None:
        made = field.default_factory()  # type: ignore[call-arg]  # none of ours takes the data
        return "its keys' own" if is_dataclass(made) else f"`{_toml(made)}`"
    if field.default in (PydanticUndefined, MISSING):
        return "**needed**"
    if field.default is None:
        return "absent"
    shown = f"`{_toml(field.default)}`"
    if name.endswith("_bytes") and field.default:
        return f"{shown} ({human_bytes(field.default)})"
    return shown


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return f"{value:g}" if not value.is_integer() or abs(value) >= 1e6 else f"{value:.0f}"
    return str(value)
