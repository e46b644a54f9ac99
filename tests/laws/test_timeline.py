"""Timeline of one step, predicted above measured: blocks from traces, refused input, the drawing."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import assert_refused, make_result

from analysis.charts import timeline
from analysis.cli import main
from analysis.compare.timeline import Block, flattened, read_step, step_of, with_common_labels
from gssim.execution.files import write_text
from gssim.program import TaskId
from gssim.result import Span, Step, chrome_trace
from gssim.result.result import phases_of

PREDICTED = [
    Span(0, "compute", "forward a", "forward", -0.2, 1.0),
    Span(0, "compute", "forward b", "forward", 1.0, 2.0),
    Span(0, "compute", "backward b", "backward", 2.0, 4.0),
    Span(0, "compute", "wait for all-reduce", "exposed_communication", 4.0, 9.0),
    Span(0, "compute", "optimizer", "optimizer", 9.0, 10.0),
    Span(0, "compute", "forward a", "forward", 9.5, 11.0),
    Span(0, "communication", "all-reduce bucket 0", "exposed_communication", 3.0, 6.0),
    Span(0, "communication", "all-reduce bucket 1", "exposed_communication", 6.0, 9.0),
]
MEASURED = [
    Span(0, "compute", "forward", "forward", 0.0, 2.0),
    Span(0, "compute", "backward", "backward", 2.0, 9.5),
    Span(0, "compute", "wait for all-reduce", "exposed_communication", 4.0, 9.5),
    Span(0, "compute", "optimizer", "optimizer", 9.5, 10.5),
]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["analysis", "timeline", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_layers_become_phases_and_nested_waits_are_cut_out_so_that_both_sides_have_the_same_blocks() -> None:
    predicted, measured = step_of([*PREDICTED[:5], *PREDICTED[6:]], 10.0), step_of(MEASURED, 10.5)
    communication, compute = predicted.lanes_of(0)
    (real,) = measured.lanes_of(0)
    kinds = ["forward", "backward", "wait for all-reduce", "optimizer"]
    assert [block.label for block in compute.blocks] == [block.label for block in real.blocks] == kinds
    assert [block.phase for block in compute.blocks] == [block.phase for block in real.blocks]
    assert (compute.blocks[0], real.blocks[1]) == (
        Block("forward", "forward", 0.0, 2.0),
        Block("backward", "backward", 2.0, 4.0),
    )
    assert [block.label for block in communication.blocks] == ["all-reduce bucket 0", "all-reduce bucket 1"]


def test_a_step_ends_where_the_result_says_and_the_next_one_is_cut_off() -> None:
    step = step_of([*PREDICTED, Span(1, "compute", "late", "forward", 10.2, 10.4)], 10.0)
    assert step.ranks == (0,)
    assert max(block.end_s for lane in step.lanes for block in lane.blocks) == 10.0


def test_layers_that_the_other_side_does_not_tell_apart_have_its_name() -> None:
    def step(*labels: tuple[str, ...]) -> Any:
        spans = [
            Span(0, "compute", label, "exposed_communication", i, i + 1, tuple(general))
            for i, (label, *general) in enumerate(labels)
        ]
        return step_of(spans, 9)

    gather, publish, send = (
        TaskId("all-gather", layer="blocks.0"),
        TaskId("publish", bucket=1, micro_batch=3),
        TaskId("gradient", "send", stage=1),
    )
    known = [(each.label, *each.general_labels) for each in (gather, publish, send)]
    alike = with_common_labels(step(*known), step(("all-gather",), ("publish bucket 1",), ("publish",)))
    assert [block.label for block in alike.lanes[0].blocks] == ["all-gather", "publish bucket 1", send.label]


SPANS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 20), st.sampled_from(["forward", "backward", "optimizer"])), max_size=8
)


@given(SPANS)
def test_cut_spans_have_the_phases_of_the_whole(drawn: list[tuple[int, int, str]]) -> None:
    spans = [Span(0, "compute", phase, phase, start, start + length) for start, length, phase in drawn]
    # of two that begin together, which is the inner one is known by their lengths alone
    spans = list({span.start_s: span for span in spans}.values())
    cut = flattened(spans)
    assert all(before.end_s <= after.start_s for before, after in pairwise(cut))
    sums = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    for span in cut:
        sums[span.phase] += span.end_s - span.start_s
    whole = phases_of(spans, start_s=0.0, end_s=40.0)
    assert sums == {phase: whole[phase] for phase in sums}


def write_traces(folder: Path, *, other: str | None = None) -> tuple[Path, Path]:
    paths = folder / "p.json", folder / "m.json"
    for path, spans, time_s, source in (
        (paths[0], PREDICTED, 10.0, "simulated"),
        (paths[1], MEASURED, 10.5, "measured"),
    ):
        identity = {"scenario_id": other} if other and source == "measured" else {}
        step = Step(spans, {0: (0.0, time_s)})
        write_text(path, chrome_trace(step, make_result(source, step_time_s=time_s, **identity)))
    return paths


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    step = read_step(write_traces(tmp_path)[0])
    assert step.scenario_id == "a" * 16
    assert step.time_s == 10.0
    assert [lane.stream for lane in step.lanes_of(0)] == ["communication", "compute"]
    assert step.lanes_of(0)[1].blocks[1].end_s == pytest.approx(4.0)


def test_the_picture_has_both_sides_on_one_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.png"
    assert run(monkeypatch, *write_traces(tmp_path), "--out", out) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{out}\n"
    later = [Span(1, span.stream, span.label, span.phase, span.start_s, span.end_s) for span in MEASURED]
    steps = {"predicted": step_of(PREDICTED, 10.0), "measured": step_of(MEASURED + later, 10.5)}
    figure = timeline(steps, names={"predicted": "p", "measured": "m"})
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("wait for all-reduce") == 3  # predicted, and measured of both ranks
    assert {"rank 0", "rank 1", "10 s", "10.5 s"} <= set(texts)
    assert any("not in this trace" in text for text in texts)
    ends = {round(bar.get_x() + bar.get_width(), 3) for bar in axes.patches}
    assert max(ends) == 10.5


@pytest.mark.parametrize("side", ["predicted", "measured"])
def test_one_trace_is_drawn_alone(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a plan is run, there is a prediction only: the picture needed a measurement too."""
    path, out = write_traces(tmp_path)[side == "measured"], tmp_path / "t.png"
    assert run(monkeypatch, path, "--out", out) == 0
    assert capsys.readouterr().out == f"{out}\n"
    texts = [text.get_text() for text in timeline({side: read_step(path)}, names={side: "x.json"}).texts]
    assert texts[0] == f"One step, {side}: who does what, when, and waits for what?"
    assert texts[1].startswith(f"{side.capitalize()}{' (hatched)' if side == 'predicted' else ''}: x.json. ")


def test_traces_of_different_scenarios_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_traces(tmp_path, other="b" * 16)
    status = run(monkeypatch, *paths, "--out", tmp_path / "t.png")
    assert_refused(capsys, status, *map(str, paths), "different scenarios", "a" * 16, "b" * 16)


def test_traces_in_the_wrong_order_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted, measured = write_traces(tmp_path)
    status = run(monkeypatch, measured, predicted, "--out", tmp_path / "t.png")
    assert_refused(capsys, status, str(measured), "a measured step where the simulated one belongs")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file"),
        ("{", "not a JSON file"),
        ("[]", "not a trace"),
        ('{"traceEvents": 3}', "not a trace"),
        ('{"traceEvents": []}', "has no spans"),
        ('{"traceEvents": [{"ph": "X", "name": "x"}]}', "not a trace"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    content: str | None,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert_refused(
        capsys,
        run(monkeypatch, path, path, "--out", tmp_path / "t.png"),
        str(path),
        complaint,
    )


@pytest.mark.parametrize(("phase", "shown"), [("lunch", "'lunch'"), (["lunch"], "['lunch']"), (3, "'3'")])
def test_an_unknown_phase_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    phase: object,
    shown: str,
) -> None:
    path = write_traces(tmp_path)[0]
    data: dict[str, Any] = json.loads(path.read_text())
    next(event for event in data["traceEvents"] if event["ph"] == "X")["cat"] = phase
    path.write_text(json.dumps(data))
    assert_refused(capsys, run(monkeypatch, path, path, "--out", tmp_path / "t.png"), shown, "allowed: forward")


def test_a_stream_that_is_named_by_a_number_is_one(tmp_path: Path) -> None:
    path = write_traces(tmp_path)[0]
    data: dict[str, Any] = json.loads(path.read_text())
    next(event for event in data["traceEvents"] if event["name"] == "thread_name")["args"]["name"] = 7
    path.write_text(json.dumps(data))
    assert "7" in [lane.stream for lane in read_step(path).lanes]
