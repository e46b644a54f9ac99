"""Published training runs: models, reading of tables, and bounds on the errors of predictions."""

import csv
import json
import os
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from published_rows import fields

import gssim as api
from analysis.cli import main
from analysis.literature.platforms import calibration_rows, cluster_of, platforms, servers_of
from analysis.literature.runs import Latent, Run, Shape, SkippedError, Software
from analysis.literature.scenarios import plan_of, predict, scenario_of, tables_of
from analysis.literature.score import SourceScore, agreement_of, baseline_step_s, score
from analysis.literature.tables.frameworks import DEEPSEEKS
from analysis.literature.tables.reading import read_table
from analysis.literature.transformer import layers_of, transformer
from gssim.errors import UserError
from gssim.program import Task, lower
from gssim.scenario import Loaded, Scenario
from gssim.scenario.context_slices import uncombined_reason
from gssim.scenario.tensor_slices import held_slice, model_slice
from gssim.simulation import simulate
from gssim.workload import Layer, Moment

GPT = Shape(
    kind="gpt", layers=4, hidden=512, heads=8, kv_heads=8, ffn=2048, vocabulary=1024, sequence_length=256
)  # fmt: skip
LLAMA_8B = Shape(
    kind="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, sequence_length=8192
)
RUN = Run(
    identity="made up",
    source="test",
    gpu="A100-SXM-80GB",
    per_node=8,
    shape=GPT,
    software=Software(),
    method="ddp",
    dp=2,
    micro_batch=2,
    micro_batches=8,
    recompute="full",
    overlap=False,
    step_s=1.0,
)


# Models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "published"), [(LLAMA_8B, 8.03e9)])
def test_parameters_are_the_published_ones(shape, published):
    assert shape.parameters == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize("shape", [GPT, LLAMA_8B])
def test_layers_have_the_parameters_of_the_shape(shape):
    layers = layers_of(shape, Software(), 1, tied=shape.kind == "gpt")
    assert sum(layer.repeats * layer.elements for layer in layers) == shape.parameters


def test_maps_have_two_flop_a_parameter_and_token_and_attention_four_a_score_and_width():
    block = layers_of(GPT, Software(), 1, tied=True)[1]
    b, s, h = 2, GPT.sequence_length, GPT.hidden
    assert block.forward_flop.at(b=b, s=s) == 2 * 12 * h * h * b * s + 4 * b * s * s * h
    assert block.backward_flop.at(b=b, s=s) == 2 * block.forward_flop.at(b=b, s=s)


@pytest.mark.parametrize("software", [Software(), Software(flash_attention=True, sequence_parallel=True)])
def test_ranks_that_cut_a_model_share_its_flop(software):
    run = replace(RUN, tp=4, software=software)
    model = scenario_of(run).workload.model
    held = model_slice(model, (0.25,) * 4, 0)
    assert held.elements < model.elements / 3
    for whole, part in zip(model.layers, held.layers, strict=True):
        assert 4 * part.forward_flop.at(b=1, s=256) == whole.forward_flop.at(b=1, s=256)


# Plans ---------------------------------------------------------------------------------------------------------------

CUT_STAGES = replace(RUN, tp=2, pp=2, micro_batches=4)


def test_stages_whose_blocks_are_cut_fold_to_what_all_ranks_do():
    scenario = scenario_of(CUT_STAGES)
    folded, unfolded = api.simulate(scenario), api.simulate(scenario, unfold=True)
    assert folded.step_time_s == pytest.approx(unfolded.step_time_s, rel=1e-9)
    assert folded.collectives == unfolded.collectives


def test_every_rank_of_a_cut_stage_passes_on_to_its_like():
    result = api.simulate(scenario_of(CUT_STAGES))
    sends = {each.group: each for each in result.collectives if each.kind == "send"}
    assert set(sends) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert {each.count for each in sends.values()} == {8}
    assert {each.bytes for each in sends.values()} == {2 * 2 * GPT.sequence_length * GPT.hidden}


def test_partitioned_activations_are_passed_on_in_parts():
    whole, parts = (
        api.simulate(scenario_of(replace(CUT_STAGES, software=software)))
        for software in (Software(), Software(partitioned=True))
    )
    sent = [{each.bytes for each in result.collectives if each.kind == "send"} for result in (whole, parts)]
    assert sent[0] == {2 * size for size in sent[1]}


def test_cut_stages_sum_over_their_own_ranks():
    result = api.simulate(scenario_of(CUT_STAGES))
    pairs = Counter()
    for each in result.collectives:
        if each.kind == "all-reduce" and each.bytes == 2 * 2 * GPT.sequence_length * GPT.hidden:
            pairs[each.group] += each.count
    # a block sums twice in its forward, its second forward and its backward; ends of the model once each
    per_stage = 2 * 3 * 2 + 1
    assert dict(pairs) == {(rank, rank + 1): 4 * per_stage for rank in range(0, 8, 2)}


@pytest.mark.parametrize("run", [RUN, replace(RUN, pp=2, method="ddp"), replace(RUN, pp=2, chunks=2, method="ddp")])
def test_what_is_not_simulated_of_many_micro_batches_repeats_itself(run):
    run = replace(run, micro_batches=16)
    whole = api.simulate(scenario_of(run).with_({"run.extrapolate_micro_batches": False}))
    assert predict(run).step_s == pytest.approx(whole.step_time_s, rel=5e-3)


def test_a_pipeline_has_the_blocks_evenly_and_the_ends_with_the_first_and_last():
    assert plan_of(replace(RUN, pp=2))["stages"] == [3, 3]
    assert plan_of(replace(RUN, pp=2, chunks=2))["stages"] == [2, 1, 1, 2]


# Hosts ---------------------------------------------------------------------------------------------------------------


def test_interleaved_stages_take_any_number_of_micro_batches_that_makes_equal_rounds():
    run = replace(RUN, pp=2, chunks=2, method="ddp")
    assert scenario_of(replace(run, micro_batches=3)).plan.schedule == "interleaved"
    with pytest.raises(SkippedError, match="5 micro-batches in 2 rounds, of unequal length"):
        scenario_of(replace(run, micro_batches=5))


CUT = replace(RUN, method="tensor", dp=1, tp=2, micro_batches=1)
OPERATIONS, SUMS = {"forward": 33, "recompute": 33, "backward": 66}, 2
"""Numbers of operations and sums in a block's phases."""


def issued_in(run: Run, overhead_s: float) -> Scenario:
    scenario = scenario_of(run)
    kinds = {
        name: replace(device, operation_overhead_s=overhead_s) for name, device in scenario.cluster.device_types.items()
    }
    return replace(scenario, cluster=replace(scenario.cluster, device_types=kinds))


def parts_of(tasks: Iterable[Task], phase: str) -> list[Task]:
    name = f"{phase} blocks.1"
    return [task for task in tasks if task.label == name or task.label.startswith(f"{name} part")]


@pytest.mark.parametrize("phase", OPERATIONS)
def test_a_host_issues_a_cut_block_and_its_sums_part_by_part(phase):
    parts = parts_of(lower(issued_in(CUT, 1e-3)).tasks[0], phase)
    issues = [part.issue for part in parts if part.issue]
    assert [each.goes_on for each in issues] == [False, True, True]
    assert sum(each.host_s for each in issues) == pytest.approx((OPERATIONS[phase] + SUMS) * 1e-3)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("phase", OPERATIONS)
def test_sums_over_ranks_add_nothing_to_a_host_that_takes_longer(phase, stages):
    run = replace(CUT, method="pipeline", pp=stages, micro_batches=stages) if stages > 1 else CUT
    spans = simulate(Loaded(file="test", scenario=issued_in(run, 1e-3))).spans
    own = [each for each in spans if each.stream == "compute" and f"{phase} blocks.1" in each.label]
    own.sort(key=lambda each: each.start_s)
    begins = next(place for place, each in enumerate(own) if each.label.startswith(phase) and "part" not in each.label)
    whole = own[begins : begins + 2 * SUMS + 1]  # of one micro-batch: parts, and sums between them
    assert sum(each.label.startswith("all-reduce") for each in whole) == SUMS
    taken_s = whole[-1].end_s - whole[0].start_s
    assert taken_s == pytest.approx((OPERATIONS[phase] + SUMS) * 1e-3, rel=1e-9)


def test_where_the_device_takes_longer_its_host_counts_for_nothing():
    scenario = issued_in(CUT, 0.0)
    assert not any(task.issue for tasks in lower(scenario).tasks for task in tasks)
    fast, slow = (simulate(Loaded(file="test", scenario=each)).result for each in (scenario, issued_in(CUT, 1e-9)))
    assert slow.step_time_s == pytest.approx(fast.step_time_s, rel=1e-3)


@pytest.mark.parametrize(("alone", "sums"), [(True, 4), (False, 6)], ids=["attention", "all but products"])
def test_a_second_forward_of_the_attention_alone_repeats_no_sum(alone, sums):
    run = replace(CUT, recompute="selective", software=Software(recomputes_attention=alone))
    tasks = [task for task in lower(scenario_of(run)).tasks[0] if task.exchange and task.id.layer == "blocks.1"]
    assert len(tasks) == sums


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pipeline_that_lets_nothing_overlap_reduces_gradients_behind_its_last_message(overlap):
    run = replace(RUN, dp=2, pp=2, micro_batches=4, overlap=overlap)
    labels = [task.label for task in lower(scenario_of(run)).tasks[-1]]
    sent = max(place for place, label in enumerate(labels) if label.startswith("send gradient"))
    reduced = [place for place, label in enumerate(labels) if label.startswith("all-reduce bucket")]
    assert reduced
    assert min(reduced) > sent if not overlap else max(reduced) < sent


@pytest.mark.parametrize("chunks", [1, 2])
def test_megatrons_optimizer_waits_for_overlapped_reductions_behind_the_schedule(chunks):
    """Neither messages nor the rank's other stages wait for them (Megatron-LM, finalize_model_grads)."""
    run = replace(RUN, method="zero1", flat_optimizer=True, dp=2, pp=2, chunks=chunks, micro_batches=4, overlap=True)
    tasks = lower(scenario_of(run)).tasks[-1]
    waits = [place for place, task in enumerate(tasks) if task.id.op == "all-reduce" and task.id.action == "wait"]
    reduced = [place for place, task in enumerate(tasks) if task.id.op == "all-reduce" and task.id.bucket is not None]
    computed = [place for place, task in enumerate(tasks) if task.id.op.startswith("backward")]
    sent = [place for place, task in enumerate(tasks) if task.label.startswith("send gradient")]
    assert len(waits) == chunks
    assert min(waits) > max(*computed, *sent) > min(reduced)


def test_hosts_and_their_calibration_rows_are_told_once():
    for gpu, overhead_s in (("T4", 23e-6), ("A100-SXM-80GB", 23e-6), ("GH-96", 28e-6)):
        assert cluster_of(((gpu, 1),), "bf16").type_of(0).operation_overhead_s == overhead_s
    assert "vtrain_ground_truth_single row 12" in calibration_rows()


# Software ------------------------------------------------------------------------------------------------------------


def test_attention_in_a_ring_merges_what_it_gets_of_the_others_in_float():
    def block(ranks: int, compiled: bool) -> Layer:
        software = Software(flash_attention=True, context_ranks=ranks, compiled=compiled)
        return layers_of(GPT, software, 1, tied=True)[1]

    own = 4 * 512 / 2 * 64 * 64  # a causal half; so are the other parts, of two halves each
    for compiled in (False, True):
        alone, pair, four = (block(ranks, compiled) for ranks in (1, 2, 4))
        assert four.forward_flop.at(b=1, s=64) == alone.forward_flop.at(b=1, s=64) + 3 * own
        for of in ("forward_streamed_bytes", "backward_streamed_bytes"):
            one, two, all_four = (getattr(each, of).at(b=1, s=64) for each in (alone, pair, four))
            assert all_four - one == pytest.approx(3 * (two - one))
    # compiled: sums read and written in float, what is added in 16 bits, three quarters of it; keys and values copied,
    # read, received
    added = block(2, True).forward_streamed_bytes.at(b=1, s=64) - block(1, True).forward_streamed_bytes.at(b=1, s=64)
    assert added == pytest.approx(64 * 512 * (2 * 4 + 0.75 * 2 + 4 * 2 * 2))


@pytest.mark.parametrize("tp", [1, 2])
def test_keys_of_a_compiled_ring_go_around_behind_the_attention(tp):
    """A rank's part of a model that states rings: its own positions, whole sequences in the attention, its own heads.

    Where collectives are traced, each is followed by its wait: torch 2.6, distributed/_functional_collectives.py.
    """
    software = Software(flash_attention=True, context_ranks=2, rings=True, compiled=True)
    run = replace(RUN, software=software, dp=1, tp=tp, micro_batches=1)
    scenario = scenario_of(run)
    block = held_slice(scenario, 0).layers[1]
    whole = scenario.workload.model.sliced_layers[1] if tp > 1 else scenario.workload.model.layers[1]
    length, parts = run.shape.sequence_length, software.context_ranks
    rings = {str(each.moment): each.size_bytes.at(b=1, s=length) for each in block.reductions if each.kind == "ring"}
    place = next(i for i in whole.selective_positions if sum(each.born == Moment("f", i) for each in whole.buffers) > 1)
    back = next(each.freed for each in whole.buffers if each.born == Moment("f", place) and each.freed.phase == "b")
    keys = 2 * 2 * (length // parts) * run.shape.hidden // tp
    assert rings == {f"f{place}": keys, str(back): keys}
    for of in ("forward_flop", "backward_flop", "saved_bytes"):
        held = [getattr(each, of).held(1) for each in (block, whole)]
        assert parts * held[0].at(b=3, s=length) == pytest.approx(held[1].at(b=3, s=length))


def test_an_attention_that_keeps_nothing_for_its_backward_cannot_be_cut_and_have_rings():
    software = Software(flash_attention=True, context_ranks=2, rings=True, compiled=True)
    model = scenario_of(replace(RUN, software=software, dp=1, tp=2, micro_batches=1)).workload.model
    assert uncombined_reason(model, model.sliced_layers) is None
    freed = [
        replace(each, buffers=tuple(replace(b, freed=replace(b.born)) for b in each.buffers if b.born.phase == "f"))
        for each in model.sliced_layers
    ]
    assert "keeps its sums" in (uncombined_reason(model, freed) or "")


def test_layers_that_state_rings_exchange_no_heads():
    software = Software(flash_attention=True, context_ranks=2, rings=True, compiled=True)
    tables = tables_of(replace(RUN, software=software, dp=1, micro_batches=1))
    tables["plan"] |= {"context_exchange": "all-to-all", "context_overlap": True}
    with pytest.raises(UserError, match="rings, not exchanges of heads; allowed: 'ring' or 'gather'"):
        api.load(tables)


@pytest.mark.parametrize(("tp", "link_bytes_per_s"), [(1, 450e9), (8, 50e9)])
def test_waits_of_a_compiled_ring_are_those_of_its_links(tp, link_bytes_per_s):
    """Two context ranks on NVLink, or, with eight tensor ranks in a node, on the network between nodes."""
    shape = replace(LLAMA_8B, layers=1)
    software = Software(flash_attention=True, context_ranks=2, compiled=True, sequence_parallel=tp > 1)
    run = replace(
        RUN, gpu="H100-SXM-96GB-HBM2e", shape=shape, software=software, method="zero3", dp=1, tp=tp, micro_batches=1
    )
    # without rings, exchanges of keys take no time
    beside, waiting = (
        api.simulate(scenario_of(replace(run, software=replace(software, rings=waits)))) for waits in (False, True)
    )
    waited_s = waiting.ranks[0].phases_s["exposed_communication"] - beside.ranks[0].phases_s["exposed_communication"]
    keys = 2 * 2 * 4096 * 4096 / tp  # keys and values of a rank's two parts of 4,096 positions, of all heads
    # gathered in three passes; their gradients, in float, go to the other rank and back
    sent_bytes = 3 * keys * 2 + 2 * keys * 4
    assert 1 < waited_s / (sent_bytes / link_bytes_per_s) < 1.5


def test_a_compiler_keeps_no_output_that_no_backward_needs():
    shape = replace(GPT, kind="llama")
    eager, compiled = (
        layers_of(shape, Software(flash_attention=True, compiled=each), 1, tied=False)[1] for each in (False, True)
    )
    kept, needed = (set(each.selective_positions or ()) for each in (eager, compiled))
    assert eager.recompute_positions is not None
    assert needed < kept
    # what is left over is behind all that a second forward makes
    assert {place >= eager.recompute_positions for place in kept - needed} == {True}
    assert eager.selective_flop == compiled.selective_flop


@pytest.mark.parametrize("identity", ["a/b", "two\nlines", ""])
def test_a_row_may_be_named_in_any_way(identity):
    assert predict(replace(RUN, identity=identity)) == predict(RUN)


def test_a_loss_in_place_holds_one_tensor_of_logits_in_float():
    run = replace(RUN, shape=replace(GPT, vocabulary=50304, sequence_length=2048))
    needed = [predict(replace(run, software=Software(in_place_loss=each))).allocated_bytes for each in (False, True)]
    assert needed[0] - needed[1] >= 2 * 2048 * 50304 * 4


def test_megatrons_batch_and_loss_are_launched_operation_by_operation():
    """12 for the batch and 4 for the embedding; 29 of the loss, beside the norm's 2, the map's 3 and the cast."""
    embedding, *_, head = layers_of(GPT, Software(in_place_loss=True), 1, tied=True)
    assert (embedding.forward_operations, embedding.backward_operations) == (16, 4)
    assert (head.forward_operations, head.backward_operations) == (2 + 3 + 1 + 29, 2 * (2 + 3 + 1) + 13)


def test_megatron_clips_gradients_and_scales_the_loss_of_fp16(tmp_path):
    """By its defaults (arguments.py, --clip-grad 1.0; optimizer/__init__.py, a scaler where --fp16)."""
    megatron = {"source": "Megatron-LM", "precision": "fp16"}
    rows = [megatron, megatron | {"precision": "bf16"}, {"source": "torchtitan", "model": "llama-tiny"}]
    found = [scenario_of(run) for _, _, run in read_table(table(tmp_path / "t.csv", *rows)) if isinstance(run, Run)]
    of = [(each.workload.precision, each.workload.clip_norm, each.workload.loss_scale) for each in found]
    assert of == [("fp16", 1.0, "dynamic"), ("bf16", 1.0, None), ("bf16", None, None)]


# Tables --------------------------------------------------------------------------------------------------------------

ROW = fields(
    "id=a | source=here | gpu=A100-SXM-80GB | n_gpus=2 | model=GPT-tiny | layers=4 | hidden=512 | heads=8 | "
    "vocab=1024 | seq=256 | micro_batch=2 | global_batch=32 | dp=2 | tp=1 | pp=1 | precision=fp16 | "
    "recompute=full | iter_time_s=0.05"
)


def table(path: Path, *changes: dict[str, str]) -> Path:
    rows = [ROW | change for change in changes]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "abacus"}, "a GPU that platforms.toml does not know"),
        ({"layers": ""}, "the row does not say layers"),
        ({"dp": "?"}, "the row does not say dp"),
        ({"n_gpus": "3"}, "dp x tp x pp x cp are not the GPUs"),
        ({"global_batch": "33"}, "samples do not divide evenly"),
        ({"precision": "int4"}, "precision 'int4' is not modelled"),
        ({"iter_time_s": ""}, "the row has neither a time nor a memory"),
        ({"model": "ResNet-50"}, "neither a GPT, a Llama nor a BERT"),
        ({"iter_time_s": "inf"}, "the row has neither a time nor a memory"),
    ],
)
def test_a_row_that_cannot_be_scored_says_why(tmp_path, change, reason):
    ((identity, source, found),) = read_table(table(tmp_path / "t.csv", change))
    assert (identity, source) == ("a", "here")
    assert isinstance(found, SkippedError)
    assert str(found) == reason


def test_columns_that_are_missing_are_empty(tmp_path):
    ((_, _, found),) = read_table(table(tmp_path / "t.csv", {}))
    assert isinstance(found, Run)
    assert (found.dp, found.micro_batches, found.memory_bytes) == (2, 8, None)


@pytest.mark.parametrize(("text", "fault"), [("a,b\n1,2\n", "match no table of runs"), (None, "no such file")])
def test_tables_of_another_kind_are_refused(tmp_path, text, fault):
    path = tmp_path / "t.csv"
    if text:
        path.write_text(text)
    with pytest.raises(UserError, match=fault):
        read_table(path)


def test_the_command_prints_scores_reasons_and_json(tmp_path, capsys, monkeypatch):
    path = table(tmp_path / "t.csv", {}, {"id": "b", "gpu": "abacus"}, {"id": "c", "micro_batch": "16"})
    errors = tmp_path / "errors.toml"
    words = ["analysis", "literature", str(path), "--json", "--jobs", "1", "--by-device", str(errors)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    step = tomllib.loads(errors.read_text())["a100-sxm-80"]["step"]
    assert step["runs"] == 2
    assert step["median_ratio"] <= step["nine_in_ten_ratio"]
    (found,) = json.loads(capsys.readouterr().out)["sources"]
    assert found["step_time"]["n"] == 2
    assert found["skipped"] == {"a GPU that platforms.toml does not know": 1}
    row = found["rows"][0]
    error = abs(row["predicted_step_time_s"] / row["measured_step_time_s"] - 1)
    assert found["step_time"]["maximum"] >= error


def test_the_baseline_is_six_flop_a_parameter_and_token():
    run = replace(RUN, dp=1, method="single")
    expected = 6 * GPT.parameters * 8 * 2 * GPT.sequence_length / (312e12 * 0.4)
    assert baseline_step_s(run) == pytest.approx(expected)


def test_agreement_counts_pairs_of_plans_that_differ():
    class Row:
        def __init__(self, measured: float, predicted: float) -> None:
            self.run = replace(RUN, step_s=measured)
            self.prediction = type("P", (), {"step_s": predicted})

    found = agreement_of([Row(1.0, 1.1), Row(2.0, 1.9), Row(2.01, 3.0)])
    assert (found.pairs, found.agreeing) == (2, 2)


def test_every_platform_makes_a_cluster_and_says_its_sources():
    for platform in platforms().values():
        cluster = cluster_of(servers_of(platform.names[0], 16, None), "bf16")
        assert len(cluster.devices) == 16
        assert cluster.device_types["gpu"].source


# Scenarios -----------------------------------------------------------------------------------------------------------

EMITTED = {
    "step": {"id": "a/b: c", "micro_batch": "1"},
    "pipeline, extrapolated": {"id": "p", "n_gpus": "8", "tp": "2", "pp": "2", "micro_batch": "1"},
    "pipeline, whole": {"id": "q", "n_gpus": "4", "pp": "2", "micro_batch": "8"},
    "interleaved": {"id": "i", "n_gpus": "4", "pp": "2", "vpp": "2", "micro_batch": "1"},
    "float gradients": fields(
        "id=t | source=torchtitan_h100 | gpu=H100-SXM-80GB | n_gpus=4 | model=Llama-tiny | ffn=1024 | pp=2 | "
        "micro_batch=1 | precision=bf16 | mem_gib=1.5 | mem_kind=max_reserved | sharding=FSDP"
    ),
    "context parallel": fields(
        "id=cp | source=torchtitan_h100 | gpu=H100-SXM-80GB | n_gpus=4 | model=Llama-tiny | ffn=1024 | cp=2 | "
        "micro_batch=16 | precision=bf16 | recompute=selective"
    ),
    "TF32": {"id": "f", "precision": "tf32"},
}


def run_emitted(capsys, monkeypatch, folder: Path, *tables: Path) -> dict[str, api.Result]:
    """Emit the scenarios of tables and predict their files as `gssim run` does; return Results by the file's name."""
    monkeypatch.setattr("sys.argv", ["analysis", "literature", *map(str, tables), "--emit", str(folder)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    return {Path(line).stem: api.simulate(api.load(line)) for line in capsys.readouterr().out.splitlines() if line}


def assert_same(run: Run, result: api.Result) -> None:
    """Assert that a scenario file's Result has the figures that `literature` predicts for the run."""
    prediction = predict(run)
    assert result.step_time_s == prediction.step_s
    ranks = [each for each in result.ranks if run.memory_of == "most" or run.ranks - 1 in each.ranks]
    assert max(each.peak_allocated_bytes for each in ranks) == prediction.allocated_bytes
    assert max(each.peak_reserved_bytes or each.peak_allocated_bytes for each in ranks) == prediction.reserved_bytes


def test_emitted_scenarios_are_predicted_as_their_rows(tmp_path, capsys, monkeypatch):
    path = table(tmp_path / "t.csv", *EMITTED.values(), {"id": "z", "gpu": "abacus"})
    runs = [run for _, _, run in read_table(path) if isinstance(run, Run)]
    results = run_emitted(capsys, monkeypatch, tmp_path / "out", path)
    assert list(results) == ["a-b-c", "p", "q", "i", "t", "cp", "f"]
    for run, result in zip(runs, results.values(), strict=True):
        assert_same(run, result)
    extrapolated = [name for name, result in results.items() if "simulated_micro_batches" in result.provenance]
    assert extrapolated == ["a-b-c", "p", "i", "t", "f"]
    assert "gradient_precision" in results["t"].scenario["workload"]


KORTHIKANTI = {
    # layers, hidden, heads; stages, chunks of each, micro-batch, batch; seconds: all recomputed, the attention alone
    "22B": (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    "175B": (96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
    "530B": (105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
    "1T": (128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49),
}
"""Korthikanti et al. 2022, arXiv 2205.05198, tables 3 and 5: GPT of 2,048 tokens over eight tensor-parallel ranks, on
A100 of 80 GB. Where the attention alone is recomputed, sequences are divided too."""


@pytest.mark.parametrize(
    "model", ["22B", *(pytest.param(each, marks=pytest.mark.slow) for each in KORTHIKANTI if each != "22B")]
)
def test_steps_of_korthikanti_and_others_are_predicted(tmp_path, model):
    layers, hidden, heads, stages, chunks, micro_batch, batch, *measured_s = KORTHIKANTI[model]
    change = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": 51200, "seq": 2048, "vpp": chunks}
    change |= {"n_gpus": 8 * stages, "dp": 1, "tp": 8, "pp": stages, "micro_batch": micro_batch, "global_batch": batch}
    both = ({"recompute": "full"}, {"recompute": "selective", "extras": "sequence parallel"})
    rows = [{"id": model, "source": "Korthikanti"} | {k: str(v) for k, v in change.items()} | each for each in both]
    for (_, _, run), step_s in zip(read_table(table(tmp_path / "t.csv", *rows)), measured_s, strict=True):
        assert isinstance(run, Run)
        assert predict(run).step_s == pytest.approx(step_s, rel=0.05)


def test_nothing_is_emitted_where_a_place_is_taken(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    (out / "a.toml").mkdir(parents=True)
    arguments = ["analysis", "literature", str(table(tmp_path / "t.csv", {})), "--emit", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "a.toml" in capsys.readouterr().err
    assert [each.name for each in out.iterdir()] == ["a.toml"]


# Figures -------------------------------------------------------------------------------------------------------------

REFERENCE = Path(os.environ.get("GSSIM_REFERENCE", Path(__file__).resolve().parents[3] / "shared" / "reference"))


@cache
def scores(name: str, begin: str | tuple[str, ...] = "") -> tuple[SourceScore, ...]:
    path = REFERENCE / "published" / name
    if not path.exists():
        pytest.skip(f"no reference figures ({path.name}): set GSSIM_REFERENCE")
    return score([path], only=lambda identity: identity.startswith(begin)).sources


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        pytest.param("amp_real_trials.csv", slice(20, None, 10), marks=pytest.mark.slow),
        pytest.param("examples_of_other_words.csv", slice(None), marks=pytest.mark.slow),
        pytest.param("examples_sailor_other.csv", slice(None), marks=pytest.mark.slow),
        pytest.param("simumax_b200.csv", slice(0, None, 5), marks=pytest.mark.slow),
        pytest.param("llm_foundry_fsdp.csv", slice(0, None, 25), marks=pytest.mark.slow),
        pytest.param("measured_master.csv", slice(2, None, 20), marks=pytest.mark.slow),
        pytest.param("megatron_ci_golden.csv", slice(0, None, 130), marks=pytest.mark.slow),
        ("sailor_validation.csv", slice(0, None, 5)),
        pytest.param("vtrain_ground_truth_multi.csv", slice(0, None, 9), marks=pytest.mark.slow),
        pytest.param("vtrain_ground_truth_single.csv", slice(0, None, 90), marks=pytest.mark.slow),
    ],
)
def test_scenarios_of_published_rows_are_predicted_as_the_rows(tmp_path, capsys, monkeypatch, name, chosen):
    path = REFERENCE / "published" / name
    if not path.exists():
        pytest.skip(f"no reference figures ({path.name}): set GSSIM_REFERENCE")
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file))
    runs = [run for _, _, run in read_table(path)]
    places = [place for place, run in enumerate(runs) if isinstance(run, Run)][chosen]
    part = tmp_path / name
    with part.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *(lines[place] for place in places)])
    results = run_emitted(capsys, monkeypatch, tmp_path / "out", part)
    assert len(results) == len(places) >= 3
    for place, result in zip(places, results.values(), strict=True):
        assert_same(runs[place], result)


BARS = [
    pytest.param("sailor_validation.csv", "", "Sailor", {"step": 0.12, "device": 0.10}, marks=pytest.mark.slow),
    ("measured_master.csv", ("tt-T1", "tt-T2", "tt-T3", "tt-T4"), "llama3_h100", {"step": 0.12, "reserved": 0.12}),
    pytest.param("measured_master.csv", "tt-T", "llama3_h100", {"step": 0.12}, marks=pytest.mark.slow),
    pytest.param("measured_master.csv", "nar21", "Narayanan", {"step": 0.12}, marks=pytest.mark.slow),
    pytest.param("vtrain_ground_truth_multi.csv", "", "several", {"step": 0.12}, marks=pytest.mark.slow),
]


def test_rows_of_experts_on_b200_by_measured_kernels():
    """DeepSeek-V2 and V3 with a few layers: divided experts with a capacity, in one of them beside a pipeline."""
    (found,) = scores("simumax_b200.csv", "deepseek")
    assert found.step is not None
    assert found.step.n == len(found.rows) == 6
    assert found.step.mean <= 0.07
    assert found.step.mean < found.step.baseline_mean / 4
    memory = found.memory["allocated"]
    assert memory.mean <= 0.008
    assert memory.mean < memory.baseline_mean / 4


def test_models_with_experts_have_the_parameters_that_they_are_named_for():
    """DeepSeek-V2 has 236 billion (DeepSeek-AI 2024, arXiv:2405.04434)."""
    model = DEEPSEEKS["deepseekv2"]
    sizes = {"layers": 60, "hidden": model[0], "heads": 128, "kv_heads": 128, "ffn": model[1], "vocabulary": model[2]}
    shape = Shape(kind="llama", **sizes, sequence_length=4096, latent=Latent(), experts=model[3])
    assert shape.parameters / 1e9 == pytest.approx(236, abs=1)
    software = Software(flash_attention=True, dropout=False, compiled=True, fused_projections=True)
    assert transformer(shape, software, tp=1, tied=False).elements == shape.parameters


@pytest.mark.slow
def test_dense_rows_on_b200_by_measured_kernels():
    """Mean errors; the baseline's constant rate happens to be that of most of these rows, but not of eight ranks'."""
    (found,) = scores("simumax_b200.csv", "llama3")
    assert found.step is not None
    assert found.step.n == len(found.rows) == 14
    assert found.step.mean <= 0.056  # SimuMax's own, over more rows
    assert found.step.mean < found.step.baseline_mean
    memory = found.memory["allocated"]
    assert memory.mean <= 0.005
    assert memory.mean < memory.baseline_mean / 4


@pytest.mark.parametrize(("name", "begin", "source", "bars"), BARS)
def test_within_the_bars_and_better_than_the_baseline(name, begin, source, bars):
    (found,) = (each for each in scores(name, begin) if source in each.source)
    for metric, bar in bars.items():
        errors = found.step if metric == "step" else found.memory[metric]
        assert errors is not None
        assert errors.n + len(found.calibration) == len(found.rows) >= 9
        assert errors.median <= bar
        assert errors.median < errors.baseline_median
