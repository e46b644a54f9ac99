"""Gradient Sharding in a user's own loop equals training on one device, with the estimated memory and traffic."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from library_ranks import CHECKS, LONG, ON_THREE
from needs_ranks import CASES
from real_runs import quick, run_module, selected

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def on_two(request, tmp_path_factory) -> dict[str, str]:
    names = selected(request, CHECKS, by="check")
    return run_module("library_ranks", [*names], tmp_path_factory.mktemp("two"), ranks=2)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory) -> dict[str, str]:
    return run_module("library_ranks", list(ON_THREE), tmp_path_factory.mktemp("three"), ranks=3)


@pytest.fixture(scope="module")
def needs(tmp_path_factory) -> dict:
    return run_module("needs_ranks", [], tmp_path_factory.mktemp("needs"), ranks=2)


@pytest.mark.parametrize("check", quick(CHECKS, CHECKS.keys() - LONG))
def test_a_strangers_loop_on_two_ranks(on_two, check: str):
    assert on_two[check] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("check", ON_THREE)
def test_a_strangers_loop_on_three_ranks(on_three, check: str):
    assert on_three[check] == "ok"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_what_was_said(needs, case: str, rank: int):
    found = needs["ranks"][rank][case]
    assert found["counted"][2:] == found["said"][2:]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_what_is_held_is_what_was_said(needs, case: str, rank: int):
    if needs["counter"] == "dispatch":
        pytest.skip("nothing compiles the allocator that counts")
    found = needs["ranks"][rank][case]
    assert found["counted"][0] == pytest.approx(found["said"][0], rel=1e-4)
    if case in ("sgd-fp32", "adamw-fp32", "adamw-bf16"):  # pushed densely: packing takes no scratch
        assert found["counted"][1] == pytest.approx(found["said"][1], rel=1e-4)
