"""Averaging of repeated layer measurements, and what the calibration's own arithmetic says of known data."""

import copy
from functools import partial
from itertools import product
from pathlib import Path
from timeit import timeit
from types import SimpleNamespace
from typing import Any

import pytest
from real_runs import run_module
from strategies import device_type, tiny_model

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch

from gsreal.calibrate import communication, kernels, wrappers
from gsreal.calibrate.bench import Bench
from gsreal.calibrate.cluster_file import averaged, write_all_reduces
from gsreal.calibrate.communication import _mean, line_through
from gsreal.calibrate.profile import _jitter, _layer_s, _spread, _Step, layer_operation_s
from gssim.cluster import DeviceType
from gssim.cluster.kernel_rates import KernelRates
from gssim.cluster.measured import CutBlockCost
from gssim.errors import UserError
from gssim.interop.nccl_tests import nccl_table
from gssim.units import validated


@pytest.mark.parametrize(
    ("ratio", "rank", "place", "warned"),
    [
        (0.4, 0, None, True),
        (0.1, 0, None, False),
        (None, 0, None, False),
        (0.4, 1, None, False),
        (0.4, 0, "lab", False),
    ],
)
def test_a_calibration_of_a_busy_machine_says_so(monkeypatch, capsys, ratio, rank, place, warned):
    """Cores were taken by others for most of a calibration: every step was predicted to take twice as long."""
    monkeypatch.setattr("gsreal.calibrate.bench.own_place", lambda: place)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_: None)
    bench = SimpleNamespace(rank=rank)
    Bench.warn_if_busy(bench, Bench.core_wait_ratio(bench, SimpleNamespace(ratio=lambda: ratio)))
    said = capsys.readouterr().err
    assert bool(said) == warned
    assert not warned or "for 40% of the time" in said


@pytest.mark.parametrize(
    ("device", "ranks", "place", "measured"),
    [("cpu", 2, None, True), ("cpu", 2, "lab", False), ("cuda", 2, None, False), ("cuda", 3, None, False)],
)
def test_collectives_that_follow_one_another_are_measured_on_cpus_outside_of_the_lab(
    monkeypatch, device, ranks, place, measured
):
    """Between two GPUs they were measured too, with tensors of the CPU beside those of the GPUs."""
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=object()))
    monkeypatch.setattr(torch.distributed, "new_group", lambda _ranks: object())
    monkeypatch.setattr(communication, "own_place", lambda: place)
    for name in ("_lines", "costs_of", "overheads_of", "_posting_cost", "_following_times"):
        monkeypatch.setattr(communication, name, lambda *_: {})
    costs = communication.communication_cost(SimpleNamespace(device=torch.device(device), ranks=ranks))
    assert ("following_saving_s" in costs) == measured


def curve(*values: float) -> dict:
    return {"sizes": [4, 8], "values": list(values)}


def cluster(*values: float) -> dict:
    profile = {
        "model": "m",
        "precision": "fp32",
        "layers": {"a": {"forward_s": curve(*values), "backward_s": curve(*values)}},
    }
    return {"device_types": {"cpu": {"profiles": [profile]}}}


def again(*values: float, name: str = "cpu", model: str = "m") -> dict:
    profiles = copy.deepcopy(cluster(*values)["device_types"]["cpu"]["profiles"])
    profiles[0]["model"] = model
    return {"name": name, "profiles": profiles}


def test_the_mean_weighs_every_measurement_alike():
    data = averaged(cluster(1.0, 2.0), again(3.0, 4.0), where="f")
    data = averaged(data, again(5.0, 6.0), where="f")
    profile = data["device_types"]["cpu"]["profiles"][0]
    assert profile["layers"]["a"]["forward_s"]["values"] == pytest.approx([3.0, 4.0])
    assert profile["measurements"] == 3


def test_memory_is_as_it_was_counted_last():
    before, new = cluster(1.0, 2.0), again(3.0, 4.0)
    before["device_types"]["cpu"]["profiles"][0]["layers"]["a"]["forward_peak_bytes"] = curve(10.0, 20.0)
    new["profiles"][0]["layers"]["a"]["scratch_bytes"] = {"whole": ["f0 4:10 8:20"]}
    layer = averaged(before, new, where="f")["device_types"]["cpu"]["profiles"][0]["layers"]["a"]
    assert layer["scratch_bytes"] == {"whole": ["f0 4:10 8:20"]}
    assert "forward_peak_bytes" not in layer
    assert averaged(before, again(5.0, 6.0), where="f")["device_types"]["cpu"]["profiles"][0]["layers"]["a"] == layer


@pytest.mark.parametrize("other", [again(1.0, 1.0, name="gpu"), again(1.0, 1.0, model="other")])
def test_a_file_of_another_device_or_model_is_refused(other: dict):
    with pytest.raises(UserError, match="f: "):
        averaged(cluster(1.0, 2.0), other, where="f")


def test_another_precision_is_kept_beside_the_first():
    other = again(3.0, 4.0) | {"peak_flop_per_s": {"bf16": 2e12}}
    other["profiles"][0]["precision"] = "bf16"
    before = cluster(1.0, 2.0)
    before["device_types"]["cpu"]["peak_flop_per_s"] = {"fp32": 1e12}
    device = averaged(before, other, where="f")["device_types"]["cpu"]
    assert device["peak_flop_per_s"] == {"fp32": 1e12, "bf16": 2e12}
    assert [(p["precision"], p["layers"]["a"]["forward_s"]["values"]) for p in device["profiles"]] == [
        ("fp32", [1.0, 2.0]),
        ("bf16", [3.0, 4.0]),
    ]
    other["peak_flop_per_s"] = {"fp32": 3e12}
    assert averaged(before, other, where="f")["device_types"]["cpu"]["peak_flop_per_s"]["fp32"] == 2e12


def test_another_choice_of_batch_sizes_is_refused():
    other = again(1.0, 2.0)
    other["profiles"][0]["layers"]["a"]["forward_s"]["sizes"] = [4, 16]
    with pytest.raises(UserError, match="batch sizes"):
        averaged(cluster(1.0, 2.0), other, where="f")


def test_a_line_is_found_again():
    sizes = [2**k for k in (12, 16, 20, 22)]
    line = line_through(sizes, [1e-3 + 2e-9 * size for size in sizes])
    assert (line.fixed_s, line.byte_s) == pytest.approx((1e-3, 2e-9))


def test_a_step_meets_both_kinds_of_times_but_not_the_outliers():
    assert _mean([1.0, 4.0] * 9 + [0.0, 1000.0]) == pytest.approx(2.5, rel=0.1)


def test_slow_drift_is_no_jitter():
    drift = [1.0 + 0.01 * k for k in range(50)]
    assert _spread(drift) < 0.01
    assert _spread([1.0, 1.2] * 25) > 0.1


def test_jitter_that_all_layers_share_is_told_from_their_own():
    shared = [1.0, 1.1, 0.9, 1.05, 0.95, 1.1, 0.9, 1.0] * 6
    steps = [
        _Step({(i, "f"): factor for i in range(10)}, {"f": 10 * factor}, 10 * factor, 10 * factor) for factor in shared
    ]
    step_jitter, task_jitter = _jitter({8: steps}, None)
    assert step_jitter == pytest.approx(_spread(shared), rel=0.05)
    assert task_jitter < 0.1 * step_jitter
    assert _jitter({8: steps}, 0.07)[0] == pytest.approx(0.07)  # how far ranks are apart says more than neighbours do


def test_what_observation_costs_is_taken_out():
    steps = [_Step({(0, "f"): 1.0, (0, "b"): 2.0}, {"f": 0.9, "b": 1.6}, 2.5, 2.5)] * 5
    assert _layer_s(steps, [0], "f") == pytest.approx(0.9)
    assert _layer_s(steps, [0], "b") == pytest.approx(1.6)


def test_a_hosts_time_for_an_operation_is_that_of_all_layers_over_their_operations():
    model = tiny_model()
    operations = sum(each.repeats * (each.forward_operations + each.backward_operations) for each in model.layers)
    layer = {"forward_host_s": curve(1.0, 2.0), "backward_host_s": curve(2.0, 3.0)}
    profile = {"layers": {each.name: layer for each in model.layers}}
    layers = sum(each.repeats for each in model.layers)
    assert layer_operation_s(model, profile, 8) == pytest.approx(layers * 5.0 / operations)


@pytest.fixture(scope="module")
def measured_on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_module("cut_ranks", [], tmp_path_factory.mktemp("calibrated"), ranks=2)


@pytest.mark.real
def test_dtensor_takes_many_operations_time_for_a_pair_of_maps(measured_on_two_ranks: dict[str, Any]):
    """It dispatches over thirty operations for a pair, each through Python and the propagation of shardings."""
    cost = validated(CutBlockCost, measured_on_two_ranks["cut_block"], file="measured")
    most_s = {}
    for kind in ("forward_pair_s", "backward_pair_s", "sum_s"):
        curve = getattr(cost, kind)
        assert curve.sizes == (8 * 128 * 4.0, 16 * 8 * 128 * 4.0)
        most_s[kind] = max(curve.values)  # a busy machine may lengthen one of the runs whose difference a value is
        assert 1e-5 < most_s[kind] < 0.1
    operation_s = timeit(partial(torch.ones(8).add_, 1.0), number=1000) / 1000
    assert most_s["forward_pair_s"] + most_s["backward_pair_s"] > 30 * operation_s


@pytest.mark.real
def test_rates_of_kernels_are_as_a_cluster_file_has_them(measured_on_two_ranks: dict[str, Any]):
    """Large products do more FLOP a second than tiny ones, which mostly wait for their launches."""
    rates = validated(KernelRates, measured_on_two_ranks["kernels"], file="measured")
    assert rates.precision == "fp32"
    for kind, products in rates.products.items():
        assert products.sizes == (16, 128), kind
        assert products.at(128, 128, 128) > 2 * products.at(16, 16, 16)
    assert [each.head_width for each in rates.attention] == [64, 128]
    for each in rates.attention:
        assert each.lengths == (16, 64)
        assert min(each.at(64, backward=backward, causal=causal) for backward in (0, 1) for causal in (0, 1)) > 1e6
    device = validated(DeviceType, device_type(kernels=[measured_on_two_ranks["kernels"]]), file="cluster")
    assert device.kernels == (rates,)


def test_a_pause_of_the_machine_does_not_make_a_kernels_time_that_of_a_single_call(monkeypatch: pytest.MonkeyPatch):
    """A pause in the one call by which calls are counted made each run one call, whose clock alone takes as long."""
    clock_s = [0.0]

    def call():
        clock_s[0] += 1e-5

    def now(_device):
        clock_s[0] += 1e-6  # reading it
        return clock_s[0]

    monkeypatch.setattr(kernels, "now", now)
    paused = SimpleNamespace(device=torch.device("cpu"), finish=lambda: None, time_s=lambda *_call, **_how: 0.01)
    assert kernels._call_s(paused, [call]) == pytest.approx(1e-5, rel=0.01)


def test_products_that_do_not_fit_have_the_rate_of_those_smaller_in_their_largest_size(monkeypatch):
    def rates(_bench, _dtype, m, k, n):
        return dict.fromkeys(("forward", "input_gradient", "weight_gradient"), n * 1e12) if k < 16384 else None

    monkeypatch.setattr(kernels, "linear_rates", rates)
    found = kernels._product_rates(SimpleNamespace(device=torch.device("cuda")), torch.float32)["forward"]
    sizes = found["sizes"]
    for (m, _, n), rate in zip(product(sizes, repeat=3), found["flop_per_s"], strict=True):
        assert rate == n * 1e12 or 16384 in (m, n)


def test_a_slow_gpu_measures_no_product_that_takes_long(monkeypatch: pytest.MonkeyPatch):
    measured = []

    def rates(_bench, _dtype, *sizes):
        measured.append(sizes)
        return dict.fromkeys(("forward", "input_gradient", "weight_gradient"), 1e12)

    monkeypatch.setattr(kernels, "linear_rates", rates)
    found = kernels._product_rates(SimpleNamespace(device=torch.device("cuda")), torch.float64)["forward"]
    assert found["flop_per_s"] == [1e12] * 64
    assert all(2 * m * k * n <= kernels.LONGEST_S * 1e12 for m, k, n in measured)
    assert len(measured) < 64 + 2


def test_attention_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch):
    def calls(longest, _bench, _dtype, shape, _count, *, causal):
        if shape[2] > longest:
            raise torch.OutOfMemoryError
        return [abs], [abs]

    monkeypatch.setattr(kernels, "_call_s", lambda _bench, _calls: 1.0)
    bench = SimpleNamespace(device=torch.device("cuda"))
    for longest, lengths in ((1024, [256.0, 1024.0]), (100, [])):
        monkeypatch.setattr(kernels, "_attention_calls", partial(calls, longest))
        assert kernels._attention_rates(bench, torch.float64, 64)["lengths"] == lengths


def test_measured_all_reduces_are_written_as_gssim_reads_them(tmp_path: Path):
    measured = {
        "name": "gpu",
        "ranks": 8,
        "memory_counter": "cuda",
        "provenance": dict.fromkeys(("date", "gpu", "processor", "system", "torch", "python"), "any"),
        "nccl_all_reduces": [[2**k, 3e-5 + 2**k * 5e-12] for k in range(10, 29)],
    }
    write_all_reduces(tmp_path / "here.all-reduce.csv", measured)
    found = nccl_table(tmp_path / "here.all-reduce.csv")
    assert [list(row) for row in found.rows] == [pytest.approx(row, rel=1e-4) for row in measured["nccl_all_reduces"]]
    assert found.ranks == 8


def test_a_gradient_hook_is_measured_after_compute_as_layers_do_it():
    """Measured on two cores: 25 us for each gradient without compute between them, 39 us with it."""
    memory = torch.ones(8)
    wrappers._Stack(1, 3, 4, memory)(torch.ones(1)).sum().backward()
    assert memory.tolist() == [4.0] * 8  # once for each gradient


def test_backwards_with_and_without_a_wrapper_take_turns(monkeypatch):
    """Each backward takes a second longer than the one before; what the wrapper leaves out does not count."""
    clock, order = [0.0], list[str]()

    def tick() -> float:
        clock[0] += len(order)
        return clock[0]

    def wrap(module):
        module.register_forward_pre_hook(lambda *_: order.append("wrapped"))
        return module, lambda: 0.25

    monkeypatch.setattr(wrappers, "device_time_s", tick)
    monkeypatch.setattr(wrappers, "COMPUTED_BYTES", 64)
    plain = wrappers._Stack.forward
    monkeypatch.setattr(wrappers._Stack, "forward", lambda self, x: (order.append("any"), plain(self, x))[1])
    bench = SimpleNamespace(device=torch.device("cpu"), displace=lambda: None, finish=lambda: None)
    added_s = wrappers._added_s_by_wrapper(bench, 2, wrap)
    assert order[:6] == ["any", "wrapped", "any"] * 2
    assert added_s == 2.0 - 0.25
