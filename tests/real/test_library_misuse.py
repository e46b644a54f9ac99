"""Misuses of Gradient Sharding that its documentation invites are right, or an error that says what to do."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from misuse_ranks import CASES
from real_runs import run_module

pytestmark = pytest.mark.real
LAST = "without_a_process_group"
"""Fails the run itself."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> dict[str, str]:
    return run_module("misuse_ranks", [], tmp_path_factory.mktemp("misuse"), ranks=2)


@pytest.mark.parametrize("case", [case for case in CASES if case != LAST])
def test_a_misuse_is_right_or_says_what_to_do(shown, case: str):
    assert shown[case] == "ok"


def test_a_step_or_a_model_without_a_process_group_says_so(shown):
    assert LAST in CASES
    assert LAST not in shown  # ran after all others: an error there is an error of the run
