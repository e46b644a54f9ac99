"""scenarios/README.md: made from the classes that read the files, up to date, and complete."""

import inspect
import tomllib
from pathlib import Path

import pytest

import gssim
from analysis.api_page import api_page, definition_of
from analysis.reference_page import ROOTS, default_in_words, meanings_of, page, tables_of, value_in_words
from gssim.plan import Plan, Push
from gssim.workload import Workload

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@pytest.fixture(scope="module")
def made():
    return page(SCENARIOS)


def test_the_page_that_ships_is_what_the_code_says(made):
    shipped = (SCENARIOS / "README.md").read_text(encoding="utf-8")
    assert shipped == made, "make it anew: python -m analysis keys > scenarios/README.md"


def test_the_page_of_the_python_api_is_what_the_docstrings_say():
    shipped = (SCENARIOS.parent / "gssim" / "API.md").read_text(encoding="utf-8")
    assert shipped == api_page(), "make it anew: python -m analysis.api_page > gssim/API.md"
    assert "- ` " not in shipped  # a further line of an argument's description with a colon was taken for an argument
    for name in (*gssim.__all__, "shard_gradients", "memory_and_traffic", "GradientSharding"):
        assert f"\n### `{name}`" in shipped


@pytest.mark.parametrize("name", ["load", "search", "simulate", "sweep"])
def test_the_page_has_the_functions_that_are_called(name):
    """Not those that they call by the same name inside of the package."""
    documented = definition_of(SCENARIOS.parent, "gssim", name).args
    called = inspect.signature(getattr(gssim, name)).parameters
    assert [each.arg for each in (*documented.args, *documented.kwonlyargs)] == list(called)


def test_where_a_table_stands_can_be_read_at_a_glance(made):
    """A layer's tables listed up to ninety paths, in lines of five thousand characters."""
    places = [line.partition(". ")[0] for line in made.splitlines() if line.startswith("At `")]
    assert max(map(len, places)) < 700
    assert "At `frozen`, `deepest` of [Layer](#layer), [LayerRoles](#layerroles)" in places
    assert "At `topology.link`" in [place.partition(",")[0] for place in places]


def test_every_key_says_what_it_means():
    for root in ROOTS:
        for table in (root, *tables_of(root)):
            meanings = meanings_of(table)
            assert [name for name in table.__pydantic_fields__ if not meanings.get(name)] == [], table


def test_every_key_of_every_table_is_there_and_so_is_every_file_with_its_question(made):
    for root in ROOTS:
        for table in (root, *tables_of(root)):
            for name in table.__pydantic_fields__:
                is_key = not name.startswith("_")  # a private field, which no file can set, must not be there
                assert (f"| `{name}` |" in made) is is_key
    for file in (*SCENARIOS.glob("*.toml"), *SCENARIOS.glob("sweeps/*.toml"), *SCENARIOS.glob("studies/*.toml")):
        assert f"]({file.relative_to(SCENARIOS)}) | " in made


def test_keys_that_files_use_are_keys_that_the_page_has(made):
    for file in SCENARIOS.glob("*.toml"):
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        for key in (*data, *data["workload"], *data["plan"], *data.get("run", {})):
            assert f"| `{key}` |" in made, f"{file}: {key}"


@pytest.mark.parametrize(
    ("table", "key", "value", "default"),
    [
        (Plan, "tp", "whole number > 0", "`1`"),
        (Plan, "recompute", '`"none"`, `"selective"`, `"every-second-product"`, `"full"`', '`"none"`'),
        (Plan, "bucket_bytes", 'bytes, such as `"80 GiB"`', "`26214400` (25.00 MiB)"),
        (Plan, "push", "table Push", "its keys' own"),
        (Plan, "stages", "array: whole number > 0", "absent"),
        (Push, "threshold", "number >= 0", "absent"),
        (Workload, "global_batch_size", "whole number > 0", "**needed**"),
        (Workload, "momentum", "number >= 0 and < 1", "`0.9`"),
    ],
)
def test_values_limits_and_defaults_are_said_as_files_have_them(table, key, value, default):
    import typing

    kind = typing.get_type_hints(table, include_extras=True)[key]
    assert value_in_words(kind, lambda each: each.__name__) == value
    assert default_in_words(key, table.__pydantic_fields__[key]) == default
