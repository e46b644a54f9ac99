"""Gradient Sharding on a machine with GPUs that are not there: what reaches their backend is on the device."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from fake_device_ranks import CHECKS
from real_runs import quick, run_module, selected

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def on_two(request, tmp_path_factory) -> dict[str, str]:
    names = selected(request, CHECKS, by="check")
    return run_module("fake_device_ranks", [*names], tmp_path_factory.mktemp("two"), ranks=2)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory) -> dict[str, str]:
    return run_module("fake_device_ranks", [], tmp_path_factory.mktemp("three"), ranks=3)


@pytest.mark.parametrize("check", quick(CHECKS, CHECKS.keys() - {"the_loop_of_the_readme_runs"}))
def test_loops_on_two_devices(on_two, check: str):
    assert on_two[check] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_loops_on_three_devices(on_three, check: str):
    assert on_three[check] == "ok"
