"""Random scenarios come back from the files that they are exported to, but for what the export names."""

import tomllib
from pathlib import Path

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gssim.errors import UserError
from gssim.interop import export_scenario, import_scenario
from gssim.plan import METHODS
from gssim.scenario import load_scenario

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = {8: ROOT / "scenarios/clusters/dgx-h100.toml", 16: ROOT / "scenarios/clusters/two-dgx-h100.toml"}
FILES = {"deepspeed": "ds.json", "accelerate": "a.yaml", "torchtitan": "t.toml"}
CHOICES = {
    "workload.global_batch_size": [16, 128],
    "workload.sequence_length": [512, 4096],
    "workload.precision": ["fp32", "fp16"],
    "workload.optimizer": ["adam", "sgd", "sgd-momentum"],
    "workload.optimizer_implementation": ["for-loop", "foreach", "fused"],
    "workload.learning_rate": [1e-5, 3e-4],
    "workload.weight_decay": [0.1],
    "workload.momentum": [0.5],
    "workload.clip_norm": [0.5, 1.0],
    "workload.reduce_precision": ["bf16", "fp32"],
    "workload.gradient_precision": ["fp32"],
    "workload.autocast": ["bf16", "fp16"],
    "workload.loss_scale": ["dynamic", 1024.0],
    "workload.map_precision": ["fp8"],
    "workload.tf32": [True],
    "workload.fused_loss": [True],
    "workload.frozen_precision": ["nf4"],
    "workload.optimizer_state_precision": ["8-bit"],
    "workload.adapters": [{"rank": 4, "targets": "all-linear"}],
    "plan.tp": [2, 4],
    "plan.pp": [2, 4],
    "plan.cp": [2, 4],
    "plan.dp_replicate": [2, 4],
    "plan.dp_shard": [1, 2, 4],
    "plan.ranks": [2, 4, 8],
    "plan.micro_batches": [2, 4],
    "plan.recompute": ["full", "selective", "every-second-product"],
    "plan.gradient_sync": ["step", "micro-batch"],
    "plan.overlap": [False],
    "plan.offload": ["optimizer", "parameters"],
    "plan.bucket_bytes": [10**7],
    "plan.zero1_implementation": ["deepspeed", "megatron"],
    "plan.zero2_implementation": ["deepspeed"],
    "plan.context_exchange": ["ring", "gather"],
    "plan.context_split": ["plain"],
    "plan.context_overlap": [False],
    "plan.sequence_parallel": [True],
    "plan.tp_overlap": [True],
    "plan.async_input_gradients": [True],
    "plan.embedding_parallel": [True],
    "plan.loss_parallel": [True],
    "plan.receive_buffers": ["in-flight"],
    "plan.schedule": ["gpipe", "interleaved", "interleaved_zero_bubble"],
    "plan.stages": [[17, 17]],
    "plan.compress": ["bf16"],
    "plan.exchange": ["point-to-point"],
    "run.seed": [7],
}
"""Keys, and values that are not the base's."""


def loaded(tables):
    return load_scenario(ROOT / "drawn.toml", tables=tables, gradients_needed=False).scenario


@st.composite
def scenarios(draw, program):
    """Return the tables of a valid scenario of a method that the program executes: of drawn changes, those that fit."""
    methods = [name for name, method in METHODS.items() if program in method.programs]
    workload = {"model": "llama3-8b", "global_batch_size": 64, "sequence_length": 8192, "precision": "bf16"}
    tables = {"name": "drawn", "cluster": str(CLUSTERS[draw(st.sampled_from(list(CLUSTERS)))]), "workload": workload}
    tables |= {"plan": {"method": draw(st.sampled_from(methods))}, "run": {}}
    tables["plan"] |= {"ranks": 1} if tables["plan"]["method"] == "single" else {}
    tables["plan"] |= {"pp": 8} if tables["plan"]["method"] == "pipeline" else {}
    for key in draw(st.lists(st.sampled_from(list(CHOICES)), min_size=1, max_size=6, unique=True)):
        table, _, name = key.partition(".")
        changed = tables | {table: tables[table] | {name: draw(st.sampled_from(CHOICES[key]))}}
        try:
            loaded(changed)
        except UserError:
            continue
        tables = changed
    return tables


def named_in(notes):
    """Return what the notes name, as overrides of an import: each begins with a key and its value."""
    overrides = [note.partition(": ")[0] for note in notes]
    assert all(each.partition(" = ")[0].startswith(("workload.", "plan.", "run.")) for each in overrides), notes
    return [each.replace(" = ", "=", 1) for each in overrides]


@pytest.mark.parametrize("program", FILES)
def test_what_a_file_does_not_carry_is_named(tmp_path, program):
    outcomes = set()

    @settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(scenarios(program))
    def comes_back(tables):
        try:
            scenario = loaded(tables)
        except UserError:  # the base: pipelines on few devices
            return
        said = ""
        try:
            written = export_scenario(scenario, program)
        except UserError as error:
            said = str(error)
        outcomes.add(not said)
        if said:
            assert said.startswith(("plan.", "workload.", "cluster."))
            assert "allowed: " in said
            return
        path = tmp_path / FILES[program]
        path.write_text(written.text)
        cluster = Path(tables["cluster"])
        overrides = named_in(written.notes)
        found = import_scenario(path, model="llama3-8b", cluster=cluster, overrides=overrides)
        back = loaded(tomllib.loads(found.text))
        # a default that is named, such as that of plan.schedule, has an id of its own
        asked = load_scenario(ROOT / "drawn.toml", overrides, tables=tables, gradients_needed=False).scenario
        assert back.scenario_id == asked.scenario_id, (written.text, written.notes, found.text, tables)
        for override in overrides:
            table, _, name = override.partition("=")[0].partition(".")
            given = getattr(getattr(scenario, table), name)
            assert given in (None, getattr(getattr(asked, table), name)), override

    comes_back()
    assert outcomes == {True, False}
