import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import loaded_of, scenario_of, star

from gssim.errors import UserError
from gssim.execution.files import write_text
from gssim.result import PHASES, Collective, Density, Span, merge_collectives, read_result
from gssim.result.json_text import indented_json
from gssim.result.result import phases_of
from gssim.simulation import simulate

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.none()
DATA = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner))


@given(DATA)
def test_indented_json_is_that_of_the_standard_library(data):
    assert indented_json(data) == json.dumps(data, indent=2, allow_nan=False)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        indented_json({"step_time_s": [number]})


def span(phase: str, start_s: float, end_s: float, stream: str = "compute") -> Span:
    return Span(0, stream, phase, phase, start_s, end_s)


def test_phases_count_the_innermost_span_and_leave_the_rest_idle():
    spans = [span("backward", 1, 6), span("exposed_communication", 2, 4), span("optimizer", 7, 8)]
    phases = phases_of(spans, start_s=0, end_s=10)
    assert phases == {
        "forward": 0,
        "backward": 3,
        "compression": 0,
        "optimizer": 1,
        "exposed_communication": 2,
        "idle": 4,
    }


def test_phases_count_only_the_compute_stream():
    phases = phases_of([span("exposed_communication", 0, 5, "communication")], start_s=0, end_s=5)
    assert phases["idle"] == 5


def test_phases_are_clipped_to_the_step():
    phases = phases_of([span("forward", 0, 3), span("backward", 3, 9)], start_s=2, end_s=5)
    assert (phases["forward"], phases["backward"]) == (1, 2)


@given(
    st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 10), st.floats(0, 10)), max_size=12),
    st.floats(0, 5),
    st.floats(5.5, 10),
)
def test_phases_always_sum_to_the_step(drawn, start_s, end_s):
    spans = [span(phase, min(a, b), max(a, b)) for phase, a, b in drawn]
    phases = phases_of(spans, start_s=start_s, end_s=end_s)
    assert sum(phases.values()) == pytest.approx(end_s - start_s)
    assert min(phases.values()) >= 0
    assert tuple(phases) == PHASES


def test_equal_collectives_are_merged_and_their_payloads_added():
    one = Collective(kind="all-to-all-v", group=(0, 1), bytes=8, count=1, payload_bytes=3.0)
    merged = merge_collectives(
        [
            one,
            replace(one, payload_bytes=4.0),
            replace(one, bytes=9),
            Collective(kind="all-gather", group=(0, 1), bytes=8, count=2),
        ]
    )
    assert [(c.kind, c.bytes, c.count, c.payload_bytes) for c in merged] == [
        ("all-gather", 8, 2, None),
        ("all-to-all-v", 8, 2, 7.0),
        ("all-to-all-v", 9, 1, 3.0),
    ]


def test_a_result_survives_being_written_and_read(tmp_path):
    result = simulate(loaded_of(scenario_of(star(2), {"method": "ddp"}))).result
    write_text(tmp_path / "new" / "r.json", result.to_json())
    assert read_result(tmp_path / "new" / "r.json") == result
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["r.json"]


def test_a_result_says_everything_that_the_design_promises():
    data = json.loads(simulate(loaded_of(scenario_of(star(2), {"method": "ddp"}))).result.to_json())
    assert list(data)[:2] == ["schema", "source"]
    assert data["schema"] == "gssim.result/1"
    assert set(data) >= {
        "scenario_id",
        "calibration_id",
        "scenario",
        "step_time_s",
        "step_time_p10_s",
        "step_times_s",
        "phases_s",
        "fits",
        "density",
        "loss",
        "links",
        "throughput_samples_per_s",
        "collectives",
        "ranks",
        "cost_usd_per_step",
        "provenance",
    }
    assert set(data["ranks"][0]) == {
        "ranks",
        "count",
        "device",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "fragmentation_ratio",
        "outside_bytes",
        "peak_by_category_bytes",
        "phases_s",
        "bytes_sent",
        "bytes_received",
        "batch_share",
        "shard_share",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("{", "not a JSON file"), ("{}", "missing"), ('{"zzz": 1}', "zzz: unknown key")],
)
def test_a_file_that_is_no_result_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_result(path)
    assert str(path) in str(error.value)


def test_a_place_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_text(tmp_path / "file" / "r.json", "{}")


@pytest.mark.parametrize(("known", "step_time_s"), [({}, 2.0), ({"step_time_s": 2.5}, 2.5)])
def test_a_measured_step_is_the_median_unless_it_is_given_and_its_phases_sum_to_it(known, step_time_s):
    loaded = loaded_of(scenario_of(star(2), {"method": "ddp"}))
    result = loaded.measured(
        (9.0, 1.0, 2.0), {"forward": 1.0, "idle": 3.0}, **known, density=Density(), collectives=(), ranks=()
    )
    assert (result.source, result.scenario_id) == ("measured", loaded.scenario.scenario_id)
    assert (result.step_time_s, result.step_time_p10_s, result.step_times_s) == (step_time_s, 1.0, (9.0, 1.0, 2.0))
    assert result.phases_s == {"forward": step_time_s / 4, "idle": step_time_s * 3 / 4}
    assert result.throughput_samples_per_s == loaded.scenario.workload.global_batch_size / step_time_s
