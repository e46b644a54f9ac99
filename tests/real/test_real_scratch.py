"""What convolutions take for themselves, measured operation by operation, makes the peaks of any plan exact."""

import pytest
from kernel_scratch import MODEL, measured_scratch
from real_runs import predicted_peaks, run_cases, scenario_file, star

from gssim.scenario import load_model

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

PLANS = {
    "pipeline": ["plan.method=pipeline", "plan.micro_batches=4", "plan.stages=[4,4]"],
    "tensor": ["plan.method=tensor", "plan.micro_batches=2"],
    "gs_tp": ["plan.method=gs_tp", "plan.micro_batches=2", "plan.shares.shards=[0.625,0.375]"],
    "gs_wgrad": ["plan.method=gs_wgrad"],
}
SAMPLES = 12


@pytest.fixture(scope="module")
def scratch() -> dict[str, dict[str, list[str]]]:
    return measured_scratch("fp32")


@pytest.mark.parametrize(
    "names",
    [
        ("pipeline", "gs_wgrad"),
        # convolutions that are cut: test_real_tensor.py has one case of them
        pytest.param(("tensor", "gs_tp"), marks=pytest.mark.slow),
    ],
)
def test_peaks_are_exact_whatever_is_alive_beside_the_scratch(tmp_path, names):
    common = [star(2), f"workload.global_batch_size={SAMPLES}", "workload.optimizer=sgd-momentum"]
    cases = {
        name: {"scenario": scenario_file("resnet-digits.toml"), "overrides": [*common, *PLANS[name]]} for name in names
    }
    found = run_cases(tmp_path, cases, ranks=2)
    errors = {
        (name, rank): peak / found[name]["peaks"][rank] - 1
        for name, case in cases.items()
        for rank, peak in enumerate(predicted_peaks(case))
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
