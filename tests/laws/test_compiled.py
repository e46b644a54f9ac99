"""Laws of scenarios whose model is compiled: what they refuse, and what tells them from others."""

from dataclasses import replace
from pathlib import Path

import pytest

from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.scenario import load_scenario

ROOT = Path(__file__).resolve().parents[2]
COMPILED = "workload.model.compiled=true"
SHARED = Shared()
"""What the scenarios have in common: a changed model is read anew otherwise for each of them."""


def load(*overrides: str):
    path = ROOT / "scenarios" / "lab-2-hosts.toml"
    return load_scenario(path, list(overrides), gradients_needed=False, shared=SHARED).scenario


@pytest.mark.parametrize("method", ["single", "ddp", "zero1", "zero2", "zero3", "hsdp", "gs", "gs_z3", "diloco"])
def test_methods_that_keep_blocks_whole_take_compiled_models(method):
    assert load(COMPILED, f"plan.method={method}", "run.steps=500").workload.model.compiled


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["plan.method=gs_wgrad"], "method 'gs_wgrad'"),
        (["plan.method=ddp", "plan.tp=2"], "plan.tp = 2"),
        (["plan.method=ddp", "plan.cp=2"], "plan.cp = 2"),
        (["plan.method=pipeline", "plan.recompute=full"], "plan.recompute = 'full'"),
        (["plan.method=pipeline", "plan.schedule=interleaved"], "plan.schedule = 'interleaved'"),
        (["plan.method=ddp", "plan.recompute=selective"], "plan.recompute = 'selective'"),
        (["plan.method=gs", "plan.shares.replan=true"], "plan.shares.replan = True"),
        (["plan.method=ddp", 'workload.frozen=["tokens"]'], "workload.frozen"),
    ],
)
def test_what_changes_the_graph_of_a_compiled_block_is_refused_in_one_line(overrides, named):
    load(*overrides)
    with pytest.raises(UserError) as refused:
        load(COMPILED, *overrides)
    assert named in str(refused.value)
    assert "compiled" in str(refused.value)
    assert "\n" not in str(refused.value)


INSIDE = "workload.model.compiled_recompute=full"


def test_what_recomputes_inside_of_its_graphs_is_not_recomputed_outside():
    assert load(COMPILED, INSIDE, "plan.method=ddp").workload.model.compiled_recompute == "full"
    with pytest.raises(UserError, match=r"plan\.recompute = 'full' cannot run yet .* \(compiled_recompute = 'full'\)"):
        load(COMPILED, INSIDE, "plan.method=ddp", "plan.recompute=full")
    with pytest.raises(UserError, match=r"compiled_recompute = 'full': needs compiled = true"):
        load(INSIDE, "plan.method=ddp")


def test_a_compiled_model_is_another_scenario():
    assert load(COMPILED).scenario_id != load().scenario_id
    assert load("workload.model.compiled=false").scenario_id == load().scenario_id


def test_a_run_needs_a_compiler_and_a_step_before_those_that_count(monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.run import checks

    scenario = load(COMPILED)
    with pytest.raises(UserError, match=r"run\.warmup_steps = 0: .*at least 1"):
        checks.check_compiled(replace(scenario, run=replace(scenario.run, warmup_steps=0)), where="file")
    monkeypatch.setattr(checks, "compiler", lambda: None)
    with pytest.raises(UserError, match=r"file: workload\.model: .* C\+\+ compiler"):
        checks.check_compiled(scenario, where="file")
    checks.check_compiled(load(), where="file")
