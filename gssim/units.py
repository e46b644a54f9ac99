"""Quantities with units and limits: parsing of strings from files into SI floats, validated dataclasses, their errors.

A key's name has the unit (`bandwidth_bytes_per_s`); its value may be written as in data sheets (`"450 GB/s"`).
"""

import math
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import cache
from numbers import Integral
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_serializer,
)

from gssim.errors import MistakenNameError, UserError, field_name, nearest_name

DECIMAL_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
BINARY_PREFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

_BYTES: dict[str, Fraction] = {p + "B": Fraction(f) for p, f in (DECIMAL_PREFIXES | BINARY_PREFIXES).items()}
_BITS: dict[str, Fraction] = {p + b: Fraction(f, 8) for p, f in DECIMAL_PREFIXES.items() for b in ("b", "bit")}
_BITS_PER_S = {p + "bps": Fraction(f, 8) for p, f in DECIMAL_PREFIXES.items()}

UNITS: dict[str, dict[str, Fraction]] = {
    "bytes": _BYTES,
    "bytes/s": {unit + "/s": factor for unit, factor in (_BYTES | _BITS).items()} | _BITS_PER_S,
    "seconds": {
        "ns": Fraction(1, 10**9),
        "us": Fraction(1, 10**6),
        "ms": Fraction(1, 10**3),
        "s": Fraction(1),
        "min": Fraction(60),
        "h": Fraction(3600),
    },
    "FLOP/s": {p + "FLOP/s": Fraction(f) for p, f in DECIMAL_PREFIXES.items()},
    "watts": {"W": Fraction(1), "kW": Fraction(1000), "mW": Fraction(1, 1000)},
}
EXAMPLES = {
    "bytes": "80 GiB",
    "bytes/s": "450 GB/s",
    "seconds": "5 us",
    "FLOP/s": "312 TFLOP/s",
    "watts": "400 W",
}

T = TypeVar("T")
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Numbers = TypeVar("Numbers", Ints, Floats)
Number = TypeVar("Number", np.int64, np.uint64, np.float64)


def distinct(numbers: Numbers) -> Numbers:
    """Return the sorted distinct numbers.

    As `np.unique`, whose own time is several times that of sorting a few numbers.

    >>> distinct(np.array([3, 1, 3]))
    array([1, 3])
    """
    ordered = np.sort(numbers.ravel())
    return ordered[_is_new(ordered)]


def distinct_with_places(numbers: NDArray[Number]) -> tuple[NDArray[Number], Ints]:
    """Return the sorted distinct numbers, and the place of each number among them, as `np.unique` does with
    `return_inverse`.

    >>> distinct_with_places(np.array([30, 10, 30]))
    (array([10, 30]), array([1, 0, 1]))
    """
    order = numbers.argsort()
    ordered = numbers[order]
    is_new = _is_new(ordered)
    places = np.empty(len(numbers), np.int64)
    places[order] = is_new.cumsum() - 1
    return ordered[is_new], places


def _is_new(ordered: NDArray[Any]) -> Bools:
    """Return whether each of some sorted numbers differs from the one before."""
    is_new = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return is_new


def kinds_of_rows(rows: NDArray[Any]) -> tuple[Ints, Ints]:
    """Return the kind of each row, equal for equal rows and numbered as they come, and the first row of each kind.

    `np.unique` with an axis sorts rows, which takes ten times as long for a thousand of them.

    >>> kinds_of_rows(np.array([[5, 1], [2, 1], [5, 1]]))
    (array([0, 1, 0]), array([0, 1]))
    """
    whole = np.ascontiguousarray(rows + 0)  # where zeros have no sign
    as_bytes = whole.view(f"V{whole.itemsize * whole.shape[1]}").ravel().tolist()
    first: dict[bytes, int] = {}
    for place, row in enumerate(as_bytes):
        first.setdefault(row, place)
    numbers = {row: number for number, row in enumerate(first)}
    kinds = np.array([numbers[row] for row in as_bytes], dtype=np.int64)
    return kinds, np.array(list(first.values()), dtype=np.int64)


MICRO = {0xB5: "u", 0x3BC: "u"}
"""The micro sign and the Greek letter, for which units here have `u`."""
_QUANTITY = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z/]+)\s*$")
_MOST = 10**15
"""Largest count: derived numbers still fit into 64 bits."""


def parse_quantity(value: object, kind: str) -> float:
    """Return `value` in the base unit of `kind` (a key of `UNITS`); numbers are in that unit already.

    Raises ValueError where the unit belongs to another kind or is unknown.

    >>> parse_quantity("450 GB/s", "bytes/s")
    450000000000.0
    >>> parse_quantity("400 Gb/s", "bytes/s"), parse_quantity("400 Gbps", "bytes/s")
    (50000000000.0, 50000000000.0)
    >>> parse_quantity("5 us", "seconds")
    5e-06
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f'must be a quantity in {kind}, such as "{EXAMPLES[kind]}"')
    if not isinstance(value, str):
        return _finite(value)
    match = _QUANTITY.match(value.translate(MICRO))
    if match is None:
        raise ValueError(f'must be a number with a unit of {kind}, such as "{EXAMPLES[kind]}"')
    number, unit = match.groups()
    if unit in UNITS[kind]:
        return _finite(Fraction(number.replace("_", "")) * UNITS[kind][unit])
    for other, units in UNITS.items():
        if unit in units:
            raise ValueError(f'is in {other}, but {kind} is needed, such as "{EXAMPLES[kind]}"')
    raise ValueError(f'has the unknown unit "{unit}"; {kind} is needed, such as "{EXAMPLES[kind]}"')


UNIT_SUFFIXES = {"_flop_per_s": "FLOP/s", "_bytes_per_s": "bytes/s", "_bytes": "bytes", "_s": "seconds"}
"""Suffixes of keys whose values are quantities, by unit."""


def quantity_of(key: str) -> str | None:
    """Return the kind of quantity (a key of `UNITS`) that a key path's name implies, if any.

    >>> quantity_of("cluster.topology.link.bandwidth_bytes_per_s"), quantity_of("run.steps")
    ('bytes/s', None)
    """
    names = key.rsplit(".", 2)[:0:-1]  # also the table's: `peak_flop_per_s.fp32`
    return next((kind for name in names for suffix, kind in UNIT_SUFFIXES.items() if name.endswith(suffix)), None)


def _finite(number: int | float | Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError("is too large") from None


def _quantity(kind: str) -> tuple[BeforeValidator, WithJsonSchema]:
    schema = {"anyOf": [{"type": "number"}, {"type": "string"}], "description": f"{kind}, e.g. {EXAMPLES[kind]!r}"}
    return BeforeValidator(lambda value: parse_quantity(value, kind)), WithJsonSchema(schema)


RANGES: dict[str, tuple[float, float]] = {
    "bytes": (1, 1e18),
    "bytes/s": (1, 1e18),
    "seconds": (0, 1e9),
    "FLOP/s": (1, 1e24),
    "watts": (0, 1e9),
    "number": (1e-30, 1e30),
    "ratio of times": (1, 1e6),
    "variation": (0, 10),
}
"""Least and greatest value of each kind of number in a file, such that all derived numbers are finite. Where 0 makes
sense, it and all values between are allowed as well."""
UNSAID = frozenset({*RANGES["number"], RANGES["ratio of times"][1]})
"""Limits so wide that descriptions of keys omit them."""


def _at_most(kind: str) -> Any:
    return Field(ge=0, le=RANGES[kind][1], allow_inf_nan=False, strict=True)


def _positive(kind: str) -> Any:
    return Field(gt=0, ge=RANGES[kind][0], le=RANGES[kind][1], allow_inf_nan=False, strict=True)


Bytes = Annotated[float, *_quantity("bytes"), _at_most("bytes")]
PositiveBytes = Annotated[float, *_quantity("bytes"), _positive("bytes")]
BytesPerSecond = Annotated[float, *_quantity("bytes/s"), _positive("bytes/s")]
Seconds = Annotated[float, *_quantity("seconds"), _at_most("seconds")]
FlopPerSecond = Annotated[float, *_quantity("FLOP/s"), _positive("FLOP/s")]
Watts = Annotated[float, *_quantity("watts"), _at_most("watts")]
PositiveInt = Annotated[int, Field(gt=0, le=_MOST, strict=True)]
Count = Annotated[int, Field(ge=0, le=_MOST, strict=True)]
PositiveFloat = Annotated[float, _positive("number")]
NonNegativeFloat = Annotated[float, _at_most("number")]
TimeRatio = Annotated[
    float, Field(ge=RANGES["ratio of times"][0], le=RANGES["ratio of times"][1], allow_inf_nan=False, strict=True)
]
"""Time over the time without a slowdown."""
Variation = Annotated[float, _at_most("variation")]
"""Standard deviation over the median."""
Finite = Annotated[float, Field(ge=-1e60, le=1e60, allow_inf_nan=False)]
"""A computed or measured number."""
Amount = Annotated[float, Field(ge=0, le=1e60, allow_inf_nan=False)]
"""A non-negative computed or measured number: a time, bytes, a number of samples."""


# Limits of sizes, checked before anything of that size is built ------------------------------------------------------

LIMITS: dict[str, tuple[int, str]] = {
    "devices": (2**18, "devices of a cluster"),
    "links": (2**22, "directed links of a cluster; a fully connected one of n devices has n * (n - 1)"),
    "switches": (2**18, "switches, network cards and other nodes of a cluster that are no devices"),
    "samples": (2**24, "samples of a step (workload.global_batch_size)"),
    "sequence_length": (2**24, "tokens of a sample"),
    "layers": (10_000, "layers of a model, repetitions one by one"),
    "tensors": (200_000, "parameters of a model as tensors, repetitions one by one"),
    "elements": (10**14, "elements of a model's parameters"),
    "layer_passes": (2**18, "micro-batches times layers of a step"),
    "steps": (10**6, "steps of a run, the warm-up included"),
    "distinct_steps": (20_000, "steps of a run whose messages depend on the data: each is lowered by itself"),
    "processes": (1024, "processes at a time (--jobs)"),
    "points": (10**6, "points of a sweep, and values of an axis, before any is left out"),
    "file_bytes": (2**28, "bytes of a file that is read whole"),
    "expanded_bytes": (2**34, "bytes that a compressed file (.gz, .xz) expands to"),
}
"""By name: the largest allowed size, and its meaning."""
LIFTED = "GSSIM_NO_LIMITS"
"""Environment variable that passes `--no-limits` on to child processes."""


def excess(name: str, size: int) -> str | None:
    """Return the error message for a `size` over a limit; None where it is not, or limits are lifted.

    >>> excess("devices", 8), excess("devices", 10**7)
    (None, '10,000,000 devices: at most 262,144 are allowed (--no-limits lifts this)')
    """
    most = LIMITS[name][0]
    if size <= most or is_lifted():
        return None
    words = name.replace("_", " ")
    many = f"{size:,}" if size < 10**18 else f"more than {10**18:,}"
    return f"{many} {words}: at most {most:,} are allowed (--no-limits lifts this)"


def whole_number(value: Any, name: str) -> int:
    """Return a positive count that a caller gives, an integer of Python's or numpy's; raise UserError for others.

    `name`: what precedes the value in the message, such as `--jobs` or `jobs =`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UserError(f"{name} {shown_value(value)}: must be a whole number")
    if value < 1:
        raise UserError(f"{name} {shown_value(value)}: must be at least 1")
    return int(value)


def shown_value(value: object) -> str:
    """Return a value for a message: its beginning if it is long; a tuple as the array that files have.

    >>> shown_value(("blocks.0",))
    "['blocks.0']"
    """
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except Exception:  # an integer of thousands of digits, lists nested too deep, or a fault of its class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_lifted() -> bool:
    """Return whether limits are lifted."""
    return LIFTED in os.environ


def lift() -> None:
    """Lift all limits, in this process and those that it starts, until `restored` ends."""
    os.environ[LIFTED] = "1"


@contextmanager
def restored() -> Iterator[None]:
    """Restore the limits afterwards."""
    before = is_lifted()
    try:
        yield
    finally:
        if not before:
            os.environ.pop(LIFTED, None)


def key_among(*names: str) -> AfterValidator:
    """Return a validator of the keys of a table by name that refuses all other names."""

    def checked(key: str) -> str:
        if key not in names:
            raise ValueError(_unknown_key(names))
        return key

    return AfterValidator(checked)


def _unknown_key(names: Iterable[str]) -> str:
    return f"unknown key; allowed: {', '.join(names)}"


def limited(name: str) -> AfterValidator:
    """Return a validator that refuses integers over one of `LIMITS`."""

    def checked(size: int) -> int:
        if (why := excess(name, size)) is not None:
            raise ValueError(why)
        return size

    return AfterValidator(checked)


def _threshold(value: float) -> float:
    if value != math.inf and not (value == 0 or RANGES["number"][0] <= value <= RANGES["number"][1]):
        raise ValueError(f"must be 0, from {RANGES['number'][0]:g} to {RANGES['number'][1]:g}, or inf")
    return value


Threshold = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value == "inf" else value),
    Field(ge=0, strict=True),
    AfterValidator(_threshold),
    PlainSerializer(lambda value: "inf" if value == math.inf else value, when_used="json"),
]
"""A threshold of magnitudes; `inf`, which is a text in JSON, is reached by none."""

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Recompute = Literal["none", "selective", "every-second-product", "full"]
"""What a block's backward runs again of its forward; see `plan.recompute`."""
Rate = Precision | Literal["tf32"]
"""Precisions of matrix products: tf32 multiplies fp32 values with 10 bits of mantissa."""
PRECISION_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(cls: type[T]) -> type[T]:
    """Return `cls` as a frozen, keyword-only, validated dataclass that refuses unknown keys: a table of a file."""
    config = ConfigDict(extra="forbid")
    return typing.cast(
        type[T], pydantic.dataclasses.dataclass(frozen=True, kw_only=True, slots=True, config=config)(cls)
    )


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec_with_memory(cls: type[T]) -> type[T]:
    """Return `cls` as a `spec` that caches its cached properties, which are no part of the value."""
    config = ConfigDict(extra="forbid")
    return typing.cast(type[T], pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls))


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Return `cls` as a `spec` that is validated only where it is read from a file (see `validated`).

    For tables that the simulator makes by the thousand, of values that it knows to be valid.
    """
    made: Any = dataclass(frozen=True, kw_only=True, slots=True)(cls)
    made.__pydantic_config__ = ConfigDict(extra="forbid")
    return typing.cast(type[T], made)


def omits_defaults(*keys: str) -> Any:
    """Return a serializer for a table's class that leaves out those of `keys` that have their default.

    Without `keys`, it leaves out all that are absent (None).

    >>> @spec
    ... class Bucket:
    ...     elements: int
    ...     padding: int = 0
    ...     _serialized = omits_defaults("padding")
    >>> adapter(Bucket).dump_python(Bucket(elements=3)), adapter(Bucket).dump_python(Bucket(elements=3, padding=1))
    ({'elements': 3}, {'elements': 3, 'padding': 1})
    """

    @model_serializer(mode="wrap")
    def serialized(self: Any, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = inner(self)
        if not keys:
            return {key: value for key, value in data.items() if value is not None}
        for key in keys:
            known = self.__dataclass_fields__[key]
            usual = known.default if known.default_factory is MISSING else known.default_factory()
            if getattr(self, key) == usual:
                data.pop(key, None)
        return data

    return serialized


@cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter of a type, made once."""
    return TypeAdapter(cls)


def validated(cls: type[T], data: object, *, file: str, under: str = "") -> T:
    """Return `data` (as parsed from TOML) as a `cls`; raise UserError with the first error's file and key path."""
    if not isinstance(data, dict):
        raise UserError(f"{file}: {under or 'the whole file'} must be a table of keys")
    kind: Any = cls
    try:
        return typing.cast(T, adapter(kind).validate_python(data))
    except ValidationError as error:
        unknown = any(fault["type"] == "unexpected_keyword_argument" for fault in error.errors())
        kind = MistakenNameError if unknown else UserError
        raise kind(explain(error, cls, file=file, under=under)) from None


def _counted(others: int) -> str:
    return f" (and {others} more fault{'s' if others > 1 else ''})" if others else ""


_KEY_AND_VALUE = re.compile(r"[a-z]\w*(?:\.\w+)* = .*?: ")


def explain(error: ValidationError, cls: type, *, file: str, under: str = "") -> str:
    """Return one line for the first error: file, key path, value, what is allowed."""
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "unexpected_keyword_argument")
    same, others = _of_one_key(cls, faults)
    fault = same[0]
    place, table = _walked(cls, fault["loc"], ends_in_key=fault["type"] == "unexpected_keyword_argument")
    path = _path((under, *place) if under else place)
    more = _counted(others)
    if fault["type"] == "unexpected_keyword_argument":
        return f"{file}: {path}: unknown key; {_allowed(table, place, cls)}{more}"
    if fault["type"] == "missing":
        lacking = [_walked(cls, each["loc"], ends_in_key=False)[0] for each in faults if each["type"] == "missing"]
        paths = list(dict.fromkeys(_path((under, *place) if under else place) for place in lacking))
        if len(paths) > 1:  # a file that was begun lacks several: one after the other would be tedious
            further = paths[1:MOST_NAMES]
            others = len(faults) - 1 - len(further)
            more = _counted(others)
            return f"{file}: {path}: missing; so {'is' if len(further) == 1 else 'are'} {', '.join(further)}{more}"
        return f"{file}: {path}: missing{more}"
    if fault.get("ctx", {}).get("discriminator") == "'kind'":  # one of several tables, distinguished by the key `kind`
        if fault["type"] == "union_tag_not_found":
            return f"{file}: {path}.kind: missing{more}"
        tag, tags = shown_value(fault["ctx"]["tag"]), fault["ctx"]["expected_tags"].replace("'", "")
        return f"{file}: {path}.kind = {tag}: allowed: {tags}{more}"
    if "[key]" in fault["loc"]:  # a name in a table by name, whose value may be right
        names = re.findall("'([^']*)'", " ".join(each.get("ctx", {}).get("expected", "") for each in same))
        return f"{file}: {path}: {_unknown_key(names) if names else _said(fault)}{more}"
    message = ", or ".join(dict.fromkeys(map(_said, same))).replace(", or must be", ", or")
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        close = nearest_name(fault["input"], re.findall("'([^']*)'", fault["ctx"]["expected"]))
        message += f"; did you mean '{close}'?" if close else ""
    given, of_table = fault["input"], fault["type"] == "value_error" and isinstance(fault["input"], dict)
    key, colon, rest = message.partition(": ")
    if of_table and _KEY_AND_VALUE.match(message):  # "key.of.table = value: what is wrong", of a check of a whole table
        return f"{file}: {path + '.' if place or under else ''}{message}{more}"
    if of_table and colon and key.isidentifier():  # a check of a whole table names the key that is wrong
        path, given, message = _path((*([under] if under else []), *place, key)), given.get(key), rest
    shown = shown_value(given)
    value = "" if of_table and (given is None or shown.endswith("...")) else f" = {shown}"
    return f"{file}: {path}{value}: {message[0].lower()}{message[1:]}{more}"


def _of_one_key(cls: type, faults: Sequence[Any]) -> tuple[list[Any], int]:
    """Return the errors of the first key that has any, and the number of errors of other keys.

    A key whose value may have one of several types has an error for each type. If its value is an array, the errors of
    its entries are returned instead: they say more than that the array is none of the other types.
    """
    first = faults[0]
    if first["type"] in ("unexpected_keyword_argument", "missing"):
        return [first], len(faults) - 1
    places = [_walked(cls, fault["loc"], ends_in_key=False)[0] for fault in faults]
    key = places[0]
    inside = [i for i, place in enumerate(places) if place[: len(key)] == key and len(place) > len(key)]
    chosen = places[inside[0]] if inside else key
    same = [fault for fault, place in zip(faults, places, strict=True) if place == chosen]
    return same, sum(place not in (chosen, key) for place in places)


NOT_OF_THE_TYPE = {
    "dataclass_type": "must be a table of keys",
    "dict_type": "must be a table of keys",
    "model_attributes_type": "must be a table of keys",
    "tuple_type": "must be an array",
    "string_type": "must be a text",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
}
"""Messages for pydantic's type errors, in the terms of TOML."""
OUT_OF_RANGE = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
"""Words for pydantic's constraints on numbers."""


def _said(fault: Any) -> str:
    """Return what is allowed where pydantic has found an error, in the words of all other messages."""
    limits = {name: limit for name, limit in fault.get("ctx", {}).items() if name in OUT_OF_RANGE}
    for name, limit in limits.items():
        least = name == "ge" and limit == RANGES["number"][0]
        return f"must be {'more than 0' if least else f'{OUT_OF_RANGE[name]} {limit:g}'}"
    if fault["type"] == "literal_error":
        return f"must be {fault['ctx']['expected']}"
    return NOT_OF_THE_TYPE.get(fault["type"]) or str(fault["msg"]).removeprefix("Value error, ")


def _path(place: tuple[Any, ...]) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the whole file"


def _walked(cls: type, location: tuple[Any, ...], *, ends_in_key: bool) -> tuple[tuple[Any, ...], Any]:
    """Return the key path of an error, without the tags that pydantic adds for unions, and the last key's table.

    `ends_in_key`: the last part is a key of the user's, whatever it looks like.
    """
    place: list[Any] = []
    table, kind = cls, cls
    for number, part in enumerate(location, 1):
        if isinstance(part, str) and "[" in part and not (ends_in_key and number == len(location)):
            continue
        options = _options(kind)
        if len(options) > 1 and isinstance(part, str) and not any(map(is_dataclass, options)):
            continue  # a type's name, such as `float`
        tagged = [option for option in options if _tag(option) == part] if len(options) > 1 else []
        if tagged:
            kind = tagged[0]
            continue
        place.append(part)
        table, kind = kind, _inside(kind, part)
    return tuple(place), table


def _options(kind: Any) -> list[Any]:
    """Return the alternatives of the type `kind`, without None."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return [option for option in typing.get_args(kind) if option is not type(None)]
    return [kind]


def _tag(option: Any) -> object:
    """Return the value of the key `kind` that identifies the table type `option`, if any."""
    literal = typing.get_type_hints(option).get("kind") if is_dataclass(option) else None
    return next(iter(typing.get_args(literal)), None)


def _allowed(table: Any, place: tuple[Any, ...], cls: type) -> str:
    tables = [option for option in _options(table) if is_dataclass(option)]
    if len(tables) != 1:
        return "unknown here"
    (table,) = tables
    names = [field.name for field in fields(table) if not field.name.startswith("_")]
    key = str(place[-1])
    elsewhere = sorted(_paths_to(field_name(key), cls), key=lambda path: path.count("."))
    close = nearest_name(key, names, least_ratio=0.8) or next(iter(elsewhere), None) or nearest_name(key, names)
    hint = f"did you mean {close}? " if close else ""
    others = f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
    return f"{hint}allowed: {', '.join(names[:MOST_NAMES])}{others}"


def _paths_to(name: str, cls: Any, *, under: str = "", deepest: int = 3) -> Iterator[str]:
    """Yield the paths of a key inside a table type, as it may have been put into the wrong table."""
    options = [option for option in _options(cls) if is_dataclass(option)]
    if len(options) != 1 or deepest == 0:
        return
    kinds = typing.get_type_hints(options[0])
    if name in kinds and not name.startswith("_"):
        yield f"{under}{name}"
    for key, kind in kinds.items():
        yield from _paths_to(name, kind, under=f"{under}{key}.", deepest=deepest - 1)


MOST_NAMES = 30
"""Keys that a message lists; a table with more has them in `scenarios/README.md`."""


def _inside(table: Any, part: object) -> Any:
    """Return the type of `part` (a key or an index) inside the type `table`."""
    options = _options(table)
    table = next((option for option in options if is_dataclass(option)), options[0])
    if is_dataclass(table):
        return typing.get_type_hints(table, include_extras=False).get(str(part))
    return next((a for a in reversed(typing.get_args(table)) if a is not Ellipsis), None)


def human_bytes(size_bytes: float) -> str:
    """Return a size for people, in binary units.

    >>> human_bytes(3 * 2**20)
    '3.00 MiB'
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def counted(n: int, noun: str) -> str:
    """Return a number with its noun in singular or plural.

    >>> counted(1, "point"), counted(1200, "point")
    ('1 point', '1,200 points')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def signed_percent(ratio: float) -> str:
    """Return a ratio as a signed number of percent, without the unit. What rounds to zero has no sign.

    >>> signed_percent(0.042), signed_percent(-0.5), signed_percent(-1e-6)
    ('+4.2', '-50.0', '0.0')
    """
    rounded = round(100 * ratio, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def human_seconds(time_s: float) -> str:
    """Return a time for people.

    >>> human_seconds(0.0021), human_seconds(0.0)
    ('2.10 ms', '0 s')
    """
    if time_s == 0:
        return "0 s"
    for unit, factor in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(time_s) >= factor:
            return f"{time_s / factor:.2f} {unit}"
    return f"{time_s * 1e9:.2f} ns"
