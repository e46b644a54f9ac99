"""Published: headline figures of the two starting texts against formulas and simulations."""

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("polars", reason="polars is not installed: pip install 'gssim[analysis]'")

from analysis.literature.headlines import all_headlines, efficient_training, table1
from analysis.literature.headlines.headline import Simulations, print_headlines
from gssim.errors import UserError

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@pytest.fixture(scope="module")
def headlines():
    return {line.figure: line for line in all_headlines(SCENARIOS)}


# Table 1: memory -----------------------------------------------------------------------------------------------------


def test_the_memory_column_comes_out_of_a_simulation_of_bert_large():
    """To 4 % of each ratio: chosen were the scenario's batch and number of ranks, nothing else."""
    simulations = Simulations(SCENARIOS)
    peaks = {row: table1.peak_bytes(simulations.run(table1.SCENARIO, *plan)) for row, plan in table1.ROWS.items()}
    assert table1.scaled_to(peaks, table1.MEMORY_GB) == pytest.approx(table1.MEMORY_GB, rel=0.04)


def test_only_some_counts_of_bytes_give_what_zero_and_gs_save():
    """In 24 combinations, bytes saved by ZeRO / bytes saved by GS must be (12 - 8) / (12 - 6)."""
    assert table1.matching_conventions() == [
        "fp32, Adam: ZeRO-1 and gs",
        "fp32, SGD with momentum: ZeRO-2 and gs_z3",
        "mixed, Adam, 18 B: ZeRO-1 and gs",
        "mixed, Adam, 18 B: ZeRO-2 and gs_z3",
    ]


def test_the_absolute_column_comes_out_of_a_formula_to_two_digits():
    assert {row: round(size, 1) for row, size in table1.mixed_instance_gb().items()} == table1.MEMORY_GB
    assert round(table1.mixed_instance_gb(ranks=2)["gs"], 1) != table1.MEMORY_GB["gs"]


# Table 1: time -------------------------------------------------------------------------------------------------------


def test_no_fixed_cost_makes_recomputation_at_the_same_batch_faster():
    for again in (1.0, 1.02, 4 / 3):
        assert table1.fixed_cost(1, again_ratio=again, time_ratio=22 / 24) is None


@pytest.mark.parametrize("batch_ratio", [1.2, 2, 4, 7, 1e9])
def test_the_fixed_cost_gives_the_stated_ratio_of_times(batch_ratio):
    found = table1.fixed_cost(batch_ratio, again_ratio=4 / 3, time_ratio=22 / 24)
    plain, checkpointed = 1 + found.fixed_ratio, 4 / 3 + found.fixed_ratio / batch_ratio
    assert checkpointed / plain == pytest.approx(22 / 24)


def test_the_region_of_fixed_costs_ends_where_the_batch_is_without_bound():
    """u = (4/3 - 11/12) / (11/12 - 1/k): 1.0 at twice the batch, never below 0.4545."""
    at = [table1.fixed_cost(k, again_ratio=4 / 3, time_ratio=22 / 24).fixed_ratio for k in (2, 4, 7, 1e9)]
    assert at == pytest.approx([1.0, 0.625, 0.5385, 0.4545], abs=1e-4)


def test_a_simulation_agrees_that_checkpointing_at_the_same_batch_is_slower(headlines):
    line = headlines["time of checkpointing beside standard, same batch"]
    assert line.verdict == "impossible"
    assert line.values["checkpointing_h"] > 24
    assert 1.25 < line.values["again_ratio"] < 1.40  # a third more, less what no gradient needs


# Table 1: the average ------------------------------------------------------------------------------------------------


def test_gpt_3_alone_makes_the_average_impossible(headlines):
    memory = headlines["12 GB as the average over ResNet-50, BERT, GPT-3"].values
    assert memory["least_mean_bytes"] == pytest.approx(116.4e9, rel=1e-3)  # two bytes a parameter, / 3
    assert memory["mean_bytes"] > 2.7e12 / 3  # 16 B a parameter, / 3
    rate = headlines["24 h as the average over ResNet-50, BERT, GPT-3"].values["flop_per_s"]
    assert rate == pytest.approx(1.21e18, rel=0.01)


# What models cost ----------------------------------------------------------------------------------------------------


def test_the_cost_of_bert_large_is_rent(headlines):
    assert headlines["cost of BERT-large"].values["cost_usd"] == pytest.approx(16 * 4.50 * 96)


def test_four_days_of_bert_large_are_a_low_utilisation(headlines):
    """Arithmetic: 6 x 302 M parameters of blocks, attention and the head, over 42.6 G tokens: 8.2e19 FLOP."""
    values = headlines["time of BERT-large on 64 TPU v2 chips"].values
    assert values["work_flop"] == pytest.approx(8.2e19, rel=0.15)
    assert values["utilisation_ratio"] == pytest.approx(values["work_flop"] / (16 * 180e12 * 96 * 3600))
    assert values["simulated_h"] < efficient_training.BERT_HOURS


def test_the_cost_of_gpt_3_is_within_what_is_stated(headlines):
    values = headlines["cost of GPT-3"].values
    assert values["v100_cost_usd"] == pytest.approx(4.67e6, rel=0.01)
    low, high = efficient_training.GPT3_STATED_USD
    assert 0.9 * low < values["v100_cost_usd"] < high


def test_megatron_turing_nlg_computes_at_the_published_rates(headlines):
    """126, 121, 113 TFLOP/s on each GPU, from the traced model; Megatron-LM's own formula to 1 %."""
    model = Simulations(SCENARIOS).model("mt-nlg-530b")
    flop = efficient_training.recomputed_step_flop(
        model, efficient_training.MEGATRON_BATCH, efficient_training.MEGATRON_LENGTH
    )
    layers, width, vocabulary, s = 105, 20480, 51200, efficient_training.MEGATRON_LENGTH
    formula = (
        96
        * efficient_training.MEGATRON_BATCH
        * s
        * layers
        * width**2
        * (1 + s / (6 * width) + vocabulary / (16 * layers * width))
    )
    assert flop == pytest.approx(formula, rel=0.01)
    stated_flop_per_s = {2240: 126e12, 2800: 121e12, 3360: 113e12}
    for gpus, step_s in efficient_training.STEPS_S.items():
        assert flop / gpus / step_s == pytest.approx(stated_flop_per_s[gpus], rel=0.01)


def test_a_pipelines_bubble_is_part_of_what_scaling_loses():
    for gpus, scaled_s in efficient_training.scaled_steps_s().items():
        assert scaled_s <= efficient_training.STEPS_S[gpus] <= 1.05 * scaled_s
    assert all(0 < share < 1 for share in efficient_training.explained_by_bubble().values())


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True,
    reason="22 % too fast: a micro-batch is predicted at 0.171 s, the published steps differ by 0.18 to 0.21 s each",
)
def test_simulated_steps_of_megatron_turing_nlg_are_near_the_published_ones():
    """To 7 %, on devices whose two fitted numbers come from two other rows (Narayanan et al. 2021)."""
    for gpus, step_s in efficient_training.STEPS_S.items():
        found = efficient_training.simulated(gpus)
        assert found.step_s == pytest.approx(step_s, rel=0.07)
        assert found.device_bytes < 80e9


# The command ---------------------------------------------------------------------------------------------------------


def test_the_verb_prints_every_line_and_json(headlines, monkeypatch, capsys):
    from analysis import cli as command

    monkeypatch.setattr("analysis.literature.headlines.all_headlines", lambda _folder, slow: list(headlines.values()))
    monkeypatch.setattr(sys, "argv", ["analysis", "literature", "--headlines", "--json"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code
    printed = json.loads(capsys.readouterr().out)
    assert [each["figure"] for each in printed] == list(headlines)
    assert all(math.isfinite(value) for each in printed for value in each["values"].values())
    print_headlines(list(headlines.values()))
    text = " ".join(capsys.readouterr().out.split())
    assert all(line.figure in text for line in headlines.values())


def test_a_folder_without_scenarios_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        all_headlines(tmp_path)
