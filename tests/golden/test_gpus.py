"""What an H200 and two H100 measured in November 2026 (scenarios/measured): collectives and peaks of memory, and steps
of models that were not profiled.
"""

import tarfile
import tomllib
from functools import cache
from pathlib import Path

import pytest

from gssim.result import Result, read_result
from gssim.scenario import Loaded, Scenario, load_model
from gssim.simulation import simulate
from gssim.units import validated
from gssim.workload.gradient_statistics import read_gradients

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
MEASURED = SCENARIOS / "measured"
BOUNDS = 0.01, 0.03
"""Largest relative errors of allocated and of reserved peaks, but for those below."""
PADDED_HEADS = 0.032, 0.08
"""In 16 bits torch's attention pads heads of 36 elements to 40, which a trace on a CPU does not see: 12 bytes for each
token and element of the width, at the peak."""
OTHERWISE = {
    "2-gs_wgrad": (0.017, 0.03),
    "2-gs-thr-ef": (0.0125, 0.03),
    "2-powersgd": (0.0115, 0.03),
    "2-topk": (0.0115, 0.03),
    "2-cp-ulysses": (0.016, 0.03),
    "2-zero3-sel": (0.017, 0.03),
    "1-single-full": (0.013, 0.03),
    "1-single-sel": (0.014, 0.03),
    "1-single-resnet": (0.021, 0.2),  # no profile of it: cuDNN's workspace is unknown
    "large-four-ranks--gs": (0.01, 0.045),  # a segment of 20 MiB
}
"""By name, of peaks of 81 to 470 MiB: a block that is not split may be 1 MiB larger than what is in it."""


CLUSTERS = {
    "h200-2026-11/results": "cluster",
    "h200-2026-11/plans": "cluster",
    "h100-2026-11/results": "cluster",
    "h100-2026-11/results-first": "cluster-first",
}
"""Calibration in the same folder, by archive of measured Results; that of 16 bits has a name that ends in `-bf16`."""


def packed(archive: str) -> list[str]:
    """Return the names of an archive's files."""
    with tarfile.open(MEASURED / f"{archive}.tar.xz") as files:
        return [f"{archive}/{name}" for name in sorted(files.getnames())]


FILES = [file for archive in CLUSTERS for file in packed(archive)]
FEW = 9
"""Each ninth is looked at in every run of the tests."""


def measured_in(file: str, folder: Path) -> Result:
    archive, _, name = file.rpartition("/")
    with tarfile.open(MEASURED / f"{archive}.tar.xz") as files:
        files.extract(name, folder, filter="data")
    return read_result(folder / name)


@cache
def calibrated(archive: str, *, halves: bool) -> dict:
    """Return the device types of the calibration for an archive's Results."""
    file = f"{CLUSTERS[archive]}{'-bf16' if halves else ''}.toml"
    return tomllib.loads((MEASURED / archive).with_name(file).read_text(encoding="utf-8"))["device_types"]


def predicted(result: Result, archive: str, types: dict) -> Result:
    """Return the prediction of a measurement with these device types, for the model as it is traced today."""
    rates = {"bf16": 7.9e14, "fp16": 7.6e14}  # where they are not measured, memory alone is looked at
    of_gpu = {name: kind | {"peak_flop_per_s": rates | kind["peak_flop_per_s"]} for name, kind in types.items()}
    stored = result.scenario | {"cluster": result.scenario["cluster"] | {"device_types": of_gpu}}
    model = load_model(SCENARIOS / "models" / f"{stored['workload']['model']['name']}.toml")
    stored["workload"] = stored["workload"] | {"model": model}
    scenario = validated(Scenario, stored, file="stored")
    own = scenario.run.steps + scenario.run.warmup_steps > 45
    taken = (MEASURED / archive).with_name("gradients-gpt-byte-1m-16.json")
    file = taken if own else SCENARIOS / "gradients" / "gpt-byte-1m.json"
    needed = scenario.push.selects or scenario.plan.publish.selects
    return simulate(Loaded(file="stored", scenario=scenario, gradients=read_gradients(file) if needed else None)).result


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=() if place % FEW == 0 else pytest.mark.slow, id=file.removesuffix(".measured.json"))
        for place, file in enumerate(FILES)
    ],
)
def test_collectives_and_peaks_are_as_measured(file, tmp_path):
    archive, _, name = file.rpartition("/")
    measured = measured_in(file, tmp_path)
    found = predicted(
        measured, archive, calibrated(archive, halves="gpt2" in measured.scenario["workload"]["model"]["name"])
    )
    assert [each.key for each in found.collectives] == [each.key for each in measured.collectives]
    workload, plan = measured.scenario["workload"], name.partition(".")[0]
    halves = workload["precision"] != "fp32" or workload.get("autocast")
    padded = halves and workload["model"]["name"] == "gpt-byte-1m"
    most_allocated, most_reserved = OTHERWISE.get(plan, PADDED_HEADS if padded else BOUNDS)
    for ours, theirs in ((a, b) for a in found.ranks for b in measured.ranks if {*a.ranks} & {*b.ranks}):
        assert ours.peak_allocated_bytes == pytest.approx(theirs.peak_allocated_bytes, rel=most_allocated)
        assert ours.peak_reserved_bytes == pytest.approx(theirs.peak_reserved_bytes, rel=most_reserved)


SINGLE = [file for file in FILES if file.startswith("h100") and "--single." in file]
"""Others depend on how far the host is ahead: a forward of Hugging Face's GPT-2 waits for the device once, which is not
traced, so that a step with recomputation takes 13 and 27 % longer than predicted, one of two micro-batches 28 and 24 %.
"""


@pytest.mark.parametrize("file", SINGLE)
def test_a_model_without_a_profile_is_predicted_from_rates_of_kernels(file, tmp_path):
    """At the device's rate for large products alone, GPT-2's step is 40 % too short: its vocabulary is odd.

    The pace of these hosts, which bounds the small model, differs by a quarter from one run to the next.
    """
    archive, _, _ = file.rpartition("/")
    measured = measured_in(file, tmp_path)
    halves = measured.scenario["workload"]["precision"] == "bf16"
    bare = {name: kind | {"profiles": []} for name, kind in calibrated(archive, halves=halves).items()}
    step_s = predicted(measured, archive, bare).step_time_s
    assert step_s == pytest.approx(measured.step_time_s, rel=0.2)
    if halves:
        absent = {"kernels": [], "layer_operation_s": None}
        without = {name: kind | absent for name, kind in bare.items()}
        assert predicted(measured, archive, without).step_time_s < 0.65 * measured.step_time_s
