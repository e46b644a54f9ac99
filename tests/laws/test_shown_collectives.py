"""Printed tables of a Result: the bottleneck of its step, its ranks, and its collectives, equal ones in one row."""

from dataclasses import replace
from pathlib import Path

import pytest

from gssim.result import Collective
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.terminal import SHOWN_GROUPS, print_result
from gssim.units import human_seconds

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


def test_a_step_without_collectives_has_no_table_of_them(result, capsys):
    print_result(replace(result, collectives=()))
    assert "collective" not in capsys.readouterr().out


def test_the_device_or_the_link_that_bounds_a_step_is_named(result, capsys):
    """The busiest link was called the bottleneck where a device computes for longer than the link is used."""
    print_result(result)
    assert f"bottleneck: {result.ranks[0].device} (rank 0) computes for " in capsys.readouterr().out
    slow = ["plan.method=ddp", f"cluster={SCENARIOS / 'clusters/lab-2-hosts-30-mbit.toml'}"]
    print_result(simulate(load_scenario(SCENARIOS / "demo.toml", slow)).result)
    assert "bottleneck: device0 -> switch is used for " in capsys.readouterr().out
    entry = replace(result.ranks[0], ranks=(0,), count=1)
    packing = replace(entry, phases_s=entry.phases_s | {"compression": 9 * sum(entry.phases_s.values())})
    print_result(replace(result, ranks=(packing,)))
    assert "(90% to compress); " in capsys.readouterr().out
    print_result(simulate(load_scenario(SCENARIOS / "demo.toml", ["plan.method=single"])).result)
    assert "bottleneck" not in capsys.readouterr().out  # nothing else could be


@pytest.mark.parametrize("columns", [80, 140])
def test_tables_of_ranks_break_no_word_at_the_usual_widths(columns, capsys, monkeypatch):
    overrides = ["cluster=" + str(SCENARIOS / "clusters" / "unequal-8-rented.toml"), "plan.method=gs"]
    shown = simulate(load_scenario(SCENARIOS / "gpt2-unequal-gpus.toml", overrides)).result
    monkeypatch.setattr("gssim.terminal.PIPE_WIDTH", columns)
    print_result(shown)
    words = capsys.readouterr().out
    assert max(map(len, words.splitlines())) <= columns
    assert all(name in words for name in ("peak allocated", "communicators", "exposed communication"))
    assert all(entry.device in words for entry in shown.ranks)
    for entry in shown.ranks:
        assert human_seconds(entry.phases_s["forward"]) in words


def test_ranks_of_equal_figures_are_shown_together(result, capsys):
    alone = [replace(result.ranks[0], ranks=(rank,), count=1) for rank in (0, 1)]
    print_result(replace(result, ranks=tuple(alone)))
    assert [line[:7] for line in capsys.readouterr().out.splitlines() if line.startswith("│ 0")] == ["│ 0-1  "]
