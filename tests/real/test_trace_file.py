"""Traces that Perfetto opens: valid by the format's documentation, of predictions and of a real run alike."""

import copy
import json
from functools import cache
from pathlib import Path

import forks
import pytest
import real_runs
from hypothesis import given
from hypothesis import strategies as st
from results import make_result
from trace_format import faults

from analysis.compare.timeline import read_step
from analysis.ingest.job import ingest
from gssim.result import PHASES, Arrow, Held, Span, Step, arrows_among, chrome_trace
from gssim.scenario import load_scenario
from gssim.simulation import record_steady_step, simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
CASES = {
    "demo": ("demo", []),
    "dense": ("demo", ["plan.method=ddp"]),
    "fsdp": ("demo", ["plan.method=fsdp"]),
    "pipeline": ("gpt-pipeline", []),
    "interleaved": ("gpt-pipeline", ["plan.schedule=interleaved"]),
    "tensor": ("demo", ["plan.method=tensor"]),
    "uneven": ("demo", ["plan.shares.shards=[0.7,0.3]", "plan.shares.batch=[0.75,0.25]"]),
    "z3": ("demo", ["plan.method=gs_z3"]),
    "wgrad": ("demo", ["plan.method=gs_wgrad"]),
    "sites": ("lab-two-sites", []),
    "unequal": ("gpt2-unequal-gpus", []),
    "nodes": ("lab-two-sites", ["plan.method=gs_hier", "plan.dp_replicate=2", "plan.dp_shard=2"]),
}


def traced_case(scenario, overrides):
    return _traced_case(scenario, tuple(overrides))


@cache
def _traced_case(scenario, overrides):
    loaded = load_scenario(SCENARIOS / f"{scenario}.toml", overrides)
    simulated = simulate(loaded)
    step = record_steady_step(simulated)
    return simulated, step, json.loads(chrome_trace(step, simulated.result))


def events_of(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


@pytest.fixture(scope="module")
def trace():
    return traced_case(*CASES["demo"])[2]


@pytest.mark.parametrize("case", real_runs.quick(CASES, ("demo", "tensor", "sites")))
def test_a_prediction_is_a_valid_trace(case):
    simulated, step, trace = traced_case(*CASES[case])
    assert faults(trace) == []
    about = trace["otherData"]
    assert (about["source"], about["scenario_id"]) == ("simulated", simulated.result.scenario_id)
    ranks = {event["pid"] - 1 for event in events_of(trace, "X")}
    named = [event["args"]["name"] for event in events_of(trace, "M") if event["name"] == "process_name"]
    assert {int(name.removeprefix("rank ").partition(":")[0]) for name in named} == ranks
    assert len(events_of(trace, "i")) == 2 * len(ranks)
    if len(ranks) > 1 and case != "wgrad":
        assert step.arrows
        assert len(events_of(trace, "s")) == len(events_of(trace, "f")) > 0


@pytest.mark.parametrize(
    "case", ["demo", "uneven", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fsdp", "pipeline"))]
)
def test_the_counters_rise_to_the_peak_that_the_result_states(case):
    simulated, step, trace = traced_case(*CASES[case])
    peaks = {rank: each.peak_allocated_bytes for each in simulated.result.ranks for rank in each.ranks}
    for rank in {held.rank for held in step.held}:
        counted = [e for e in events_of(trace, "C") if e["pid"] == rank + 1]
        total = [e["args"]["allocated_bytes"] for e in counted if e["name"] == "memory"]
        assert max(total) == pytest.approx(peaks[rank], rel=1e-12)
        parts = [sum(e["args"].values()) for e in counted if e["name"] == "memory by category"]
        assert parts == pytest.approx(total, rel=1e-12)


def test_the_spans_are_those_of_the_simulated_step(trace):
    simulated, step, _ = traced_case(*CASES["demo"])
    assert {(s.rank, s.label) for s in step.spans} == {(s.rank, s.label) for s in simulated.spans}
    end_s = max(ended_s for _, ended_s in step.bounds_s.values())
    assert end_s == pytest.approx(simulated.result.step_time_s, rel=1e-3)  # the median is between two steps


def test_a_pipelines_arrows_go_from_the_stage_that_sends_to_the_one_that_receives():
    _, _, trace = traced_case(*CASES["pipeline"])
    starts = {event["id"]: event for event in events_of(trace, "s")}
    for end in events_of(trace, "f"):
        way = (starts[end["id"]]["pid"], end["pid"])
        assert way == ((1, 2) if "activation" in end["name"] else (2, 1))
    assert {"send activation of stage 0 micro-batch 0", "send gradient of stage 1 micro-batch 0"} <= {
        event["name"] for event in starts.values()
    }


def test_the_compute_stream_comes_first(trace):
    placed = [event for event in events_of(trace, "M") if event["name"] == "thread_sort_index"]
    threads = sorted((event["pid"], event["args"]["sort_index"], event["tid"]) for event in placed)
    names = {e["tid"]: e["args"]["name"] for e in events_of(trace, "M") if e["name"] == "thread_name"}
    assert [names[tid] for _, _, tid in threads] == ["compute", "communication"] * 2


def test_of_ranks_that_are_alike_the_one_that_is_simulated_says_so():
    _, _, trace = traced_case("demo", ["plan.method=ddp", 'cluster="clusters/ring-8.toml"'])
    (name,) = [e["args"]["name"] for e in events_of(trace, "M") if e["name"] == "process_name"]
    assert name.startswith("rank 0: ")
    assert name.endswith("one of 8 alike")


SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 20), st.sampled_from(PHASES[:4])), max_size=12
)


@given(SPANS, st.floats(1e-7, 1e3))
def test_whatever_spans_overlap_the_trace_nests_and_its_arrows_are_bound(drawn, unit_s):
    spans = [
        Span(rank, "compute", phase, phase, (start - 9) * unit_s, (start + length - 9) * unit_s)
        for rank, start, length, phase in drawn
    ]
    arrows = arrows_among(spans, range(len(spans)), "x") if spans else []
    held = [Held(0, -9 * unit_s, 8.0), Held(0, unit_s, 16.0)]
    step = Step(spans, {0: (0.0, unit_s)}, arrows, held)
    assert faults(json.loads(chrome_trace(step, make_result("simulated")))) == []


@pytest.mark.parametrize(
    ("phase", "change"),
    [
        ("X", {"dur": -1.0}),
        ("X", {"ts": "1"}),
        ("X", {"tid": 0}),
        ("s", {"id": 99}),
        ("f", {"ts": 0.0}),
        ("f", {"bp": "x"}),
        ("f", {"cat": "other"}),
        ("C", {"args": {"allocated_bytes": "8"}}),
        ("C", {"args": {"other": 8}}),
        ("i", {"s": "x"}),
        ("M", {"args": {}}),
        ("M", {"name": "swapper"}),
    ],
)
def test_the_validator_sees_faults(trace, phase, change):
    spoilt = copy.deepcopy(trace)
    events_of(spoilt, phase)[-1 if phase == "C" else 0].update(change)
    assert faults(spoilt)


def test_the_validator_sees_spans_that_overlap(trace):
    spoilt = copy.deepcopy(trace)
    first, second = events_of(spoilt, "X")[:2]
    first["dur"] = second["ts"] - first["ts"] + second["dur"] / 2
    assert any("overlaps" in fault for fault in faults(spoilt))


def test_a_trace_has_a_process_for_each_rank_and_a_thread_for_each_stream():
    spans = [
        Span(0, "compute", "forward", "forward", 0.0, 1.0),
        Span(1, "communication", "x", "exposed_communication", 0.5, 2.0),
    ]
    written = json.loads(chrome_trace(Step(spans, {0: (0.0, 2.0), 1: (0.0, 2.0)}), make_result("simulated")))
    names = [event["args"]["name"] for event in events_of(written, "M") if event["name"].endswith("_name")]
    assert names == ["rank 0", "rank 1", "compute", "compute", "communication"]
    complete = [(event["name"], event["pid"], event["ts"], event["dur"]) for event in events_of(written, "X")]
    assert complete == [("forward", 1, 0, 1e6), ("x", 2, 5e5, 1.5e6)]
    assert len({event["tid"] for event in events_of(written, "X")}) == 2


def test_a_collectives_arrows_come_from_the_last_to_come_and_not_from_whom_nobody_waited():
    spans = [Span(rank, "compute", "x", "exposed_communication", *times) for rank, times in enumerate([(0, 3), (2, 3)])]
    assert arrows_among(spans, [0, 1], "x") == [Arrow("x", 1, 0)]
    gone = [Span(0, "compute", "x", "exposed_communication", 0, 1), spans[1]]
    assert arrows_among(gone, [0, 1], "x") == []


REAL = {
    "gs": ["plan.method=gs", "plan.push.threshold=1e-3"],
    "pipeline": ["plan.method=pipeline", "plan.micro_batches=2"],
}


@pytest.mark.real
def test_a_real_run_is_a_valid_trace_with_the_predictions_names(tmp_path):
    pytest.importorskip("torch")
    for name, overrides in REAL.items():
        scenario, file = real_runs.scenario_file("demo.toml"), tmp_path / f"{name}.json"
        settings = [*overrides, "run.steps=4", "run.warmup_steps=1", "workload.global_batch_size=4"]
        settings += ['workload.model="models/gpt-byte-150k.toml"', "workload.sequence_length=64"]
        made = tmp_path / "result.json"
        arguments = [scenario, json.dumps(settings), str(made), str(file), "", "1"]
        forks.launch("gsreal.run.worker", arguments, ranks=2)
        trace, result = json.loads(file.read_text()), json.loads(made.read_text())
        assert faults(trace) == []
        assert trace["otherData"]["scenario_id"] == result["scenario_id"]
        step = read_step(file)
        assert step.ranks == (0, 1)
        loaded = load_scenario(Path(scenario), settings, gradients_needed=False)
        assert ingest([file], loaded).result.to_json() == made.read_text()  # the trace alone gives back the Result
        assert events_of(trace, "s")
        if result["provenance"]["memory_counter"] == "allocator":
            for rank in result["ranks"]:
                held = [e["args"]["allocated_bytes"] for e in events_of(trace, "C") if e["pid"] == rank["ranks"][0] + 1]
                assert max(held) == pytest.approx(rank["peak_allocated_bytes"], rel=0.01)
        if name == "pipeline":
            predicted = traced_case("demo", settings)[2]
            both = [{event["name"] for event in events_of(each, "s")} for each in (trace, predicted)]
            assert both[0] == both[1]
