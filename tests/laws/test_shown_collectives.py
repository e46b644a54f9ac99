"""The printed table of collectives: those that many groups carry out alike have one row."""

from dataclasses import replace
from pathlib import Path

import pytest

from gssim.result import Collective
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.terminal import SHOWN_GROUPS, print_result

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@pytest.fixture(scope="module")
def result():
    return simulate(load_scenario(SCENARIOS / "demo.toml", ["plan.method=ddp"])).result


def lines(result, capsys):
    print_result(result)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ send")]


def sends(pairs, size=1024):
    return tuple(Collective(kind="send", group=(i, i + 100), bytes=size, count=3) for i in range(pairs))


def test_few_groups_are_shown_each(result, capsys):
    shown = lines(replace(result, collectives=sends(SHOWN_GROUPS)), capsys)
    assert [f"{i}, {i + 100} " in line for i, line in enumerate(shown)] == [True] * SHOWN_GROUPS


def test_many_groups_have_a_row_for_each_size(result, capsys):
    shown = lines(replace(result, collectives=(*sends(1500), *sends(1, size=4096))), capsys)
    assert len(shown) == 2
    assert "0, 100; as do 1,499 other groups of 2 " in shown[0]
    assert "1.00 KiB" in shown[0]
    assert "4.00 KiB" in shown[1]


def test_what_a_call_carries_is_shown_beside_its_size(result, capsys):
    sent = replace(sends(1, size=4096)[0], payload_bytes=3 * 2048)
    (shown,) = lines(replace(result, collectives=(sent,)), capsys)
    assert "4.00 KiB" in shown
    assert "2.00 KiB" in shown


def test_phases_that_take_no_time_have_no_column(result, capsys):
    print_result(result)
    heads = capsys.readouterr().out
    assert "backward" in heads
    assert "compression" not in heads
