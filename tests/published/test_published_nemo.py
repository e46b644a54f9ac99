"""NVIDIA's figures of NeMo, which the project has itself: every row has its source, and is a run or says why not."""

from collections import Counter
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from analysis.literature.runs import Run, SkippedError, UnscoredError
from analysis.literature.scenarios import plan_of, scenario_of
from analysis.literature.tables.nemo import GPT2_TOKENS, GPT3S, LLAMAS, NEMOTRONS
from analysis.literature.tables.reading import read_table
from analysis.literature.transformer import transformer
from gssim.execution.files import read_rows
from gssim.scenario.tensor_slices import held_slice

FILE = Path(str(files("analysis.literature"))) / "figures" / "nemo.csv"
_, ROWS = read_rows(FILE)
READ = [found for _, _, found in read_table(FILE)]
RUNS = [found.run if isinstance(found, UnscoredError) else found for found in READ]


def run_where(**wanted: str) -> Run:
    return next(
        run
        for row, run in zip(ROWS, RUNS, strict=True)
        if isinstance(run, Run) and all(row[key] == value for key, value in wanted.items())
    )


def test_every_figure_has_an_address_and_a_date():
    assert all(row["url"].startswith("https://") and row["published"] for row in ROWS)
    assert all(bool(row["step_s"]) != bool(row["tokens_per_s_per_gpu"]) for row in ROWS)


def test_rows_are_runs_or_say_why_not():
    reasons = Counter(str(found) for found in READ if isinstance(found, SkippedError))
    assert set(reasons) == {
        "low-rank adapters beside fused projections",
        "not Megatron-Core (MaxText)",
        "packed sequences, whose attention is within each",
    }
    assert sum(reasons.values()) < len(ROWS) / 3


@pytest.mark.parametrize("model", [*LLAMAS, *GPT3S, *NEMOTRONS])
def test_models_have_about_the_parameters_of_their_names(model):
    billions = float(model.rpartition("-")[2].removesuffix("b"))
    run = run_where(model=model, layers="")
    assert run.shape.parameters == pytest.approx(billions * 1e9, rel=0.15)


def test_the_figures_of_one_row_agree_with_each_other():
    """12,273 tokens a second on each of 8 GPUs are 10.7 s for 128 sequences of 8,192."""
    run = run_where(release="24.07", model="llama3-8b")
    assert run.step_s == pytest.approx(128 * 8192 / (8 * 12273))
    assert (run.dp, run.micro_batches, run.tokens) == (4, 32, 128 * 8192)


def test_recipes_with_the_tokens_of_gpt2_have_its_vocabulary():
    made_up = run_where(model="llama3-405b", release="v25.02.02", layers="126", note=GPT2_TOKENS)
    assert made_up.shape.vocabulary == 51200
    assert run_where(model="llama3-405b", release="v25.05.05", tp="4").shape.vocabulary == 128512


def test_plans_are_those_of_the_recipes():
    plan = plan_of(run_where(model="nemotron-15b", release="v25.02.02"))
    assert plan["tp_overlap"] is True
    assert plan["overlap"] is True
    assert plan["publish"] == {"overlap": True}
    assert plan["zero1_implementation"] == "megatron"
    stages = plan_of(run_where(model="gpt3-175b", release="24.07"))
    assert "tp_overlap" not in stages  # ub_tp_comm_overlap is false in NeMo 24.07
    assert stages["publish"] == {"overlap": True}
    assert (stages["schedule"], len(stages["stages"])) == ("interleaved", 8 * 6)


def test_gathers_of_float8_products_carry_half_the_bytes():
    """Transformer Engine casts before it gathers; reduce-scatters stay in 16 bits, and so does the output layer."""
    run = run_where(model="gpt3-20b", release="24.07")
    carried: dict[bool, Counter[str]] = {}
    for in_float8 in (True, False):
        software = replace(run.software, float8_maps=in_float8)
        layers = transformer(run.shape, software, tp=run.tp, tied=True).sliced_layers
        block = next(layer for layer in layers if layer.block)
        carried[in_float8] = Counter()
        for each in block.reductions:
            carried[in_float8][each.kind] += each.size_bytes.at(b=1, s=2048)
        head = layers[-1].reductions
        carried[in_float8]["head"] = sum(each.size_bytes.at(b=1, s=2048) for each in head)
    assert carried[True]["all-gather"] * 2 == carried[False]["all-gather"]
    assert carried[True]["reduce-scatter"] == carried[False]["reduce-scatter"]
    assert carried[True]["head"] == carried[False]["head"]


def test_context_ranks_beside_tensor_ranks_go_around_in_rings():
    run = run_where(model="llama3-70b", release="v25.02.02")
    scenario = scenario_of(run)
    assert (scenario.policies.cp, scenario.policies.tp) == (2, 4)
    assert plan_of(run)["context_overlap"] is True


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
def test_rings_carry_the_keys_of_groups_of_queries(model):
    """Of eight heads of keys and values, not of 32 or 64 of queries (Transformer Engine, AttnFuncWithCP)."""
    run = run_where(model=model, release="v25.02.02", precision="bf16")
    block = held_slice(scenario_of(run), 0).layers[1]
    carried = [each.size_bytes.at(b=1, s=8192) for each in block.reductions if each.kind == "ring"]
    assert carried == [2 * 2 * 4096 * 8 * 128 // run.tp] * 2  # keys and values in bf16, of a rank's 4,096 positions
