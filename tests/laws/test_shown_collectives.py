"""Printed tables of a Result: the bottleneck of its step, its ranks, and its collectives, equal ones in one row."""

from dataclasses import replace
from pathlib import Path

import pytest

from gssim.result import Collective, LinkUse
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.terminal import print_result
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


def test_many_groups_have_a_row_for_each_size(result, capsys):
    pairs = (*sends(1500), *sends(1, size=4096), *sends(2, size=8192))
    shown = lines(replace(result, collectives=pairs), capsys)
    assert len(shown) == 3
    assert "0, 100; as do 1,499 other groups of 2 " in shown[0]
    assert "1.00 KiB" in shown[0]
    assert "4.00 KiB" in shown[1]
    assert "0, 100; as does 1 other group of 2 " in shown[2]


def test_links_of_equal_figures_have_one_row(result, capsys):
    """Five rows of the eight equal links of a server's GPUs left no room for the links that differ."""
    equal = [LinkUse(name=f"gpu{i} -> switch", count=2, bytes=1e9, utilisation_ratio=0.5) for i in range(8)]
    other = LinkUse(name="switch -> nic", count=1, bytes=1e6, utilisation_ratio=0.1)
    print_result(replace(result, links=(*equal, other)))
    rows = [line for line in capsys.readouterr().out.splitlines() if " -> " in line and line.startswith("│")]
    assert len(rows) == 2
    assert "gpu0 -> switch" in rows[0]
    assert " 16 " in rows[0]
    assert "switch -> nic" in rows[1]


def test_a_step_is_given_in_tokens_in_money_and_as_a_part_of_the_peak(result, capsys):
    """`gssim/README.md` promised cost and energy, which `run` did not print."""
    print_result(result, changed=["plan.method=ddp"], utilisation_ratio=0.4)
    shown = capsys.readouterr().out
    per_s = result.throughput_samples_per_s * result.scenario["workload"]["sequence_length"]
    assert "\nwith plan.method=ddp\n" in shown
    assert f"{per_s:,.0f} tokens/s ({per_s / 2:,.0f} a device), MFU 40.0%\n" in shown
    assert "a step costs" not in shown
    print_result(replace(result, cost_usd_per_step=0.25, energy_j_per_step=2000.0))
    assert "a step costs 0.25 USD and 2 kJ (devices only)\n" in capsys.readouterr().out


def test_the_model_flop_utilisation_is_three_forwards_over_the_peaks():
    """Of GPT-2's products and attention by hand: 6 FLOP of a weight and token, 12 of a position, layer and width."""
    scenario = load_scenario(SCENARIOS / "gpt2-half.toml").scenario
    length = scenario.workload.sequence_length
    weights = 12 * 12 * 768**2 + 50257 * 768  # of the blocks' products, and of the head
    flop = scenario.workload.global_batch_size * length * (6 * weights + 12 * 12 * 768 * length)
    assert scenario.model_flop_utilisation(2.0) == pytest.approx(flop / (2.0 * 16 * 67e12), rel=1e-3)
    assert load_scenario(SCENARIOS / "demo.toml").scenario.model_flop_utilisation(1.0) is None


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
