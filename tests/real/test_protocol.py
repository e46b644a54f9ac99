"""What the exchanges of Gradient Sharding do where ranks differ, and where something goes wrong."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from protocol_ranks import CHECKS
from real_runs import run_module

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> dict[str, str]:
    return run_module("protocol_ranks", [], tmp_path_factory.mktemp("two"), ranks=2)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory) -> dict[str, str]:
    return run_module("protocol_ranks", [], tmp_path_factory.mktemp("three"), ranks=3)


@pytest.mark.parametrize("check", CHECKS)
def test_ranks_that_differ_and_exceptions_on_two_ranks(on_two, check: str):
    assert on_two[check] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_ranks_that_differ_and_exceptions_on_three_ranks(on_three, check: str):
    assert on_three[check] == "ok"
