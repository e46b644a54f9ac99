"""Workspace of torch's sums over rows on a GPU: laws of the formula, and its effect on predictions."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gssim.memory import reduction_buffer_bytes
from gssim.program import lower
from gssim.result import read_result
from gssim.scenario import Scenario, load_scenario
from gssim.units import validated

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = ROOT / "scenarios" / "demo.toml"
H200_THREADS = 132 * 2048


@pytest.mark.parametrize(
    ("rows", "columns", "mib"),
    [(8192, 384, 24), (2048, 144, 2.25), (32768, 128, 32), (16384, 384, 48), (16384, 1536, 132)],
)
def test_peaks_seen_on_an_h200_say_what_bias_gradients_took(rows, columns, mib):
    """The demo's model, BERT 1M and GPT 10M at two batch sizes; for the last, reserved memory is compared."""
    assert reduction_buffer_bytes(rows, columns, value_bytes=4, resident_threads=H200_THREADS) == mib * 2**20


@given(st.integers(1, 20), st.integers(1, 40))
def test_with_threads_enough_it_is_twice_what_is_summed(rows, columns):
    found = reduction_buffer_bytes(1024 * rows, 128 * columns, value_bytes=4, resident_threads=None)
    assert found == 2 * 4 * 1024 * rows * 128 * columns


@given(st.integers(1, 10**6), st.integers(1, 60000), st.sampled_from([4, 8]))
def test_a_device_bounds_it(rows, columns, value_bytes):
    """No more blocks than run at once, unless each thread would then sum more than 256 rows."""
    found = reduction_buffer_bytes(rows, columns, value_bytes=value_bytes, resident_threads=H200_THREADS)
    most = max(2 * H200_THREADS, rows * 128) * 4 + 128 * 512
    assert found <= most * value_bytes * max(1, columns // 32)
    assert found % (value_bytes * columns) == 0
    assert reduction_buffer_bytes(rows, columns, value_bytes=value_bytes, resident_threads=None) >= found


def test_few_rows_take_none():
    assert reduction_buffer_bytes(1000, 384, value_bytes=4, resident_threads=None) == 0


def taken_of(device: str) -> float:
    """Return the largest temporary of the backward of the demo's blocks, 16 x 128 tokens, on a device."""
    cluster = (
        f'{{name="one", backend="gloo", source="test", device_types={{it={device}}}, '
        'devices=[{name="d", type="it", host="h"}]}'
    )
    overrides = [f"cluster={cluster}", "plan={method='single'}", "workload.global_batch_size=16"]
    scenario = load_scenario(SCENARIO, overrides).scenario
    tasks = [task for task in lower(scenario).tasks[0] if "blocks" in task.label and task.phase == "backward"]
    return max(event.size_bytes for task in tasks for event in task.need.events if event.category == "temporaries")


RATES = 'memory_bytes=1e11, peak_flop_per_s={fp32=1e13}, memory_bandwidth_bytes_per_s=1e12, source="test"'


def test_gpus_alone_take_it():
    """The largest tensor is a gradient of 2,048 x 576; the sum of as many columns takes twice as much."""
    hidden_bytes = 4.0 * 16 * 128 * 576
    assert taken_of(f'{{kind="cpu", {RATES}}}') == hidden_bytes
    assert taken_of(f'{{kind="cuda", {RATES}}}') == 2 * hidden_bytes


def test_fewer_threads_share_what_they_are_enough_for():
    found = [taken_of(f'{{kind="cuda", resident_threads={threads}, {RATES}}}') for threads in (2**11, 2**14, 2**20)]
    assert found[0] < found[1] < found[2] == taken_of(f'{{kind="cuda", {RATES}}}')


def test_a_measured_profile_knows_better():
    """H200 profiles tell peaks: what is taken at an unknown moment is then only what these sums are not."""
    measured = read_result(next((ROOT / "scenarios/measured/h200").glob("gpt-byte-10m-b64*")))
    scenario = validated(Scenario, measured.scenario, file="stored")
    tasks = [task for task in lower(scenario).tasks[0] if task.label == "backward blocks.5"]
    taken = [event.size_bytes for task in tasks for event in task.need.events if event.category == "temporaries"]
    assert max(taken) == 2 * 4.0 * 64 * 256 * 1536  # of the wider sum, at the place of its own
    assert taken.count(2 * 4.0 * 64 * 256 * 384) == 2  # of those as wide as the model; of unknown moments there is none
