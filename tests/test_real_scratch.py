"""Real: what convolutions take for themselves, measured operation by operation, makes the peaks of any plan exact."""

from pathlib import Path

import pytest
from real_runs import predicted, run_cases, scenario_file

from gssim.scenario import load_model

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

MODEL = Path(scenario_file("models/resnet-digits.toml"))
PLANS = {
    "pipeline": ["plan.method=pipeline", "plan.micro_batches=4"],
    "tensor": ["plan.method=tensor", "plan.micro_batches=2"],
    "gs_tp": ["plan.method=gs_tp", "plan.micro_batches=2", "plan.shares.shards=[0.625,0.375]"],
    "gs_wgrad": ["plan.method=gs_wgrad"],
}
SAMPLES = 12


def measured_scratch() -> dict[str, dict[str, list[str]]]:
    import torch

    from gsreal.benchmarks.scratch import layer_scratch
    from gsreal.build import example_batch
    from gsreal.measure import MemoryCounter

    counter = MemoryCounter(torch.device("cpu"))
    if counter.method != "allocator":
        pytest.skip("needs a C++ compiler to count bytes exactly")
    model, threads = load_model(MODEL), torch.get_num_threads()
    batches = {b: example_batch(model, batch_size=b, sequence_length=None) for b in (3, 6, 12)}
    torch.set_num_threads(1)  # as ranks have
    try:
        return layer_scratch(model, batches, counter, torch.float32)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def scratch() -> dict[str, dict[str, list[str]]]:
    return measured_scratch()


def cluster_file(folder: Path, scratch: dict[str, dict[str, list[str]]]) -> Path:
    """Write a cluster of two ranks with a profile of no time."""
    import tomli_w

    flat = {"sizes": [1.0], "values": [0.0]}
    layers = {name: {"forward_s": flat, "backward_s": flat, "scratch_bytes": ways} for name, ways in scratch.items()}
    cpu = {
        "kind": "cpu",
        "memory_bytes": 1e10,
        "peak_flop_per_s": {"fp32": 1e11},
        "memory_bandwidth_bytes_per_s": 1e10,
        "source": "test",
        "profiles": [{"model": "resnet-digits", "precision": "fp32", "layers": layers}],
    }
    data = {
        "name": "two",
        "backend": "gloo",
        "source": "test",
        "device_types": {"cpu": cpu},
        "devices": [{"name": name, "type": "cpu", "host": "h"} for name in "ab"],
        "links": [{"between": ["a", "b"], "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5, "source": "test"}],
    }
    path = folder / "two.toml"
    path.write_text(tomli_w.dumps(data))
    return path


def test_peaks_are_exact_whatever_is_alive_beside_the_scratch(scratch, tmp_path):
    cluster = cluster_file(tmp_path, scratch)
    common = [f"cluster={cluster}", f"workload.global_batch_size={SAMPLES}", "workload.optimizer=sgd-momentum"]
    cases = {
        name: {"scenario": scenario_file("resnet-digits.toml"), "overrides": [*common, *plan]}
        for name, plan in PLANS.items()
    }
    found = run_cases(tmp_path, cases, ranks=2)
    errors = {
        (name, rank): entry.peak_allocated_bytes / found[name]["peaks"][rank] - 1
        for name, case in cases.items()
        for entry in predicted(case).ranks
        for rank in entry.ranks
    }
    print({key: f"{error:+.3%}" for key, error in errors.items()})
    assert {key: error for key, error in errors.items() if abs(error) > 0.01} == {}


def test_scratch_is_at_operations_of_the_trace(scratch):
    model = load_model(MODEL)
    convolutions = {layer.name: layer.selective_positions for layer in model.layers if layer.block}
    for name, positions in convolutions.items():
        forward = [line.split()[0] for line in scratch[name]["whole"] if line.startswith("f")]
        assert set(forward) >= {f"f{position}" for position in positions}


def test_only_what_runs_takes_scratch(scratch):
    for ways in scratch.values():
        assert not any(line.startswith("b") for line in ways.get("untrained", ()))
        assert set(ways) <= {"whole", "frozen", "deepest", "untrained", *(f"units-{n}" for n in range(1, 8))}
    assert "units-1" in scratch["blocks"]
    assert "units-1" not in scratch["stem"]  # is not cut
