import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from gssim.errors import UserError
from gssim.scenario import load_scenario
from gssim.units import (
    EXAMPLES,
    UNITS,
    Bytes,
    BytesPerSecond,
    PositiveInt,
    human_bytes,
    human_seconds,
    parse_quantity,
    spec,
    validated,
)

DEMO = Path(__file__).resolve().parents[2] / "scenarios/demo.toml"


@spec
class Round:
    kind: Literal["round"]
    radius: PositiveInt


@spec
class Square:
    kind: Literal["square"]
    side: PositiveInt


@spec
class Wire:
    speed: BytesPerSecond
    buffer: Bytes = 0.0


@spec
class Board:
    wires: tuple[Wire, ...] = ()
    named: dict[str, Wire] | None = None
    shape: Annotated[Round | Square, Field(discriminator="kind")] | None = None
    mode: Literal["auto"] | tuple[int, ...] = "auto"


def fault(data: object) -> str:
    with pytest.raises(UserError) as error:
        validated(Board, data, file="board.toml")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("450 GB/s", "bytes/s", 450e9),
        ("400 Gb/s", "bytes/s", 50e9),
        ("100 Gbit/s", "bytes/s", 12.5e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("80 GB", "bytes", 80e9),
        ("1_000 B", "bytes", 1000.0),
        ("1e3KiB", "bytes", 1024e3),
        ("5 us", "seconds", 5e-6),
        ("5 \u00b5s", "seconds", 5e-6),
        ("5 \u03bcs", "seconds", 5e-6),
        ("2 min", "seconds", 120.0),
        ("312 TFLOP/s", "FLOP/s", 312e12),
        (7, "seconds", 7.0),
    ],
)
def test_quantities_are_read_in_the_base_unit(text, kind, value):
    assert parse_quantity(text, kind) == value


@given(st.sampled_from(sorted(UNITS)), st.integers(0, 10**6), st.data())
def test_a_number_with_a_unit_is_the_number_times_the_unit(kind, number, data):
    unit = data.draw(st.sampled_from(sorted(UNITS[kind])))
    assert parse_quantity(f"{number} {unit}", kind) == pytest.approx(number * float(UNITS[kind][unit]), rel=1e-15)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_the_example_of_every_kind_is_allowed(kind):
    assert parse_quantity(EXAMPLES[kind], kind) > 0


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("450 GB", "bytes/s", 'is in bytes, but bytes/s is needed, such as "450 GB/s"'),
        ("5 us", "bytes", "is in seconds, but bytes is needed"),
        ("3 parsec", "seconds", 'has the unknown unit "parsec"'),
        ("450 GBps", "bytes/s", 'has the unknown unit "GBps"'),
        ("fast", "bytes/s", "must be a number with a unit of bytes/s"),
        ("5", "seconds", "must be a number with a unit"),
        ("-5 us", "seconds", "must be a number with a unit"),
        (True, "seconds", "must be a quantity in seconds"),
        (None, "bytes", "must be a quantity in bytes"),
        ([1], "bytes", "must be a quantity in bytes"),
    ],
)
def test_other_quantities_are_refused_with_an_example(text, kind, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_quantity(text, kind)


def test_a_fault_names_file_key_and_value():
    assert fault({"wires": [{"speed": 5}, {"speed": 0}]}) == ("board.toml: wires[1].speed = 0: must be more than 0")
    assert fault({"named": {"x": {"speed": 1, "buffer": -1}}}).startswith("board.toml: named.x.buffer = -1: ")
    assert fault({"wires": [{"buffer": 1}]}) == "board.toml: wires[0].speed: missing"
    several = fault({"wires": [{"buffer": 1}, {"buffer": 1}, {"speed": 0}]})
    assert several == "board.toml: wires[0].speed: missing; so is wires[1].speed (and 1 more fault)"


def test_an_unknown_key_is_refused_with_the_allowed_ones_at_every_depth():
    allowed = "allowed: wires, named, shape, mode"
    assert fault({"wire": []}) == f"board.toml: wire: unknown key; did you mean wires? {allowed}"
    assert fault({"zzz": 1}) == f"board.toml: zzz: unknown key; {allowed}"
    wire = "unknown key; did you mean speed? allowed: speed, buffer"
    assert fault({"wires": [{"speed": 1}, {"speed": 1, "sped": 2}]}) == f"board.toml: wires[1].sped: {wire}"
    assert fault({"named": {"x": {"speed": 1, "sped": 2}}}) == f"board.toml: named.x.sped: {wire}"


def test_an_unknown_key_in_a_table_of_several_kinds_names_the_keys_of_its_kind():
    assert fault({"shape": {"kind": "square", "side": 1, "radius": 2}}) == (
        "board.toml: shape.radius: unknown key; allowed: kind, side"
    )
    assert fault({"shape": {"kind": "round", "radius": 0}}).startswith("board.toml: shape.radius = 0: ")


def test_several_faults_are_counted_and_unknown_keys_come_first():
    assert fault({"wires": [{"speed": 0}, {"speed": 0}], "zzz": 1}) == (
        "board.toml: zzz: unknown key; allowed: wires, named, shape, mode (and 2 more faults)"
    )


def test_what_is_no_table_is_refused():
    assert fault([1]) == "board.toml: the whole file must be a table of keys"
    assert fault({"wires": [3]}).startswith("board.toml: wires[0] = 3: ")


def test_a_choice_of_words_or_numbers_names_the_key_alone():
    assert fault({"mode": "fast"}).startswith("board.toml: mode = 'fast': ")


def test_a_value_of_several_types_is_told_all_of_them_and_an_array_its_wrong_entry():
    """Before, the error for a key that takes a number or a word showed one type, and only counted the other."""

    def said(override):
        with pytest.raises(UserError) as error:
            load_scenario(DEMO, [override])
        return str(error.value).removeprefix(f"{DEMO}: ")

    expected = "workload.loss_scale = 'off': must be 'dynamic', or a number"
    assert said("workload.loss_scale=off") == expected
    assert said("workload.loss_scale=-1") == "workload.loss_scale = -1: must be 'dynamic', or more than 0"
    assert said("plan.shares.batch=fast") == ("plan.shares.batch = 'fast': must be 'even' or 'throughput', or an array")
    assert said("plan.shares.batch=[0.5, -1]") == ("plan.shares.batch[1] = -1: must be at least 0")


def test_specs_are_frozen_and_validate_when_constructed():
    wire = Wire(speed="1 kB/s")
    assert wire.speed == 1000.0
    with pytest.raises(AttributeError):
        wire.speed = 2.0
    with pytest.raises(ValueError, match="greater than 0"):
        Wire(speed=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinite_and_undefined_quantities_are_refused(value):
    assert fault({"wires": [{"speed": value}]}).startswith("board.toml: wires[0].speed")


def test_sizes_and_times_are_shown_in_fitting_units():
    assert [human_bytes(n) for n in (0, 1023, 1024, 3 * 2**30)] == ["0 B", "1023 B", "1.00 KiB", "3.00 GiB"]
    assert [human_seconds(t) for t in (7200, 1.5, 2e-3, 3e-6, 4e-9)] == [
        "2.00 h",
        "1.50 s",
        "2.00 ms",
        "3.00 us",
        "4.00 ns",
    ]
