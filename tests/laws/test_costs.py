from dataclasses import replace

import pytest
from strategies import device_type, tiny_model

from gssim import cost as costs
from gssim.cluster import Curve, DeviceType, LayerProfile
from gssim.cluster.measured import CompressionCost, CutBlockCost, OptimizerCost, Profile, ShardedUnitCost
from gssim.errors import UserError
from gssim.scenario import layer_costs
from gssim.units import validated
from gssim.workload import Layer, Polynomial, Workload
from gssim.workload.optimizers import optimizer_moved_bytes

MODEL = tiny_model()
WORKLOAD = Workload(model=MODEL, global_batch_size=4, sequence_length=8)
BLOCK = MODEL.layers[1]


def device(**changes) -> DeviceType:
    return validated(DeviceType, device_type(**changes), file="d")


def roofline_s(kind: str, *, flop: float, moved_bytes: float, operations: int) -> float:
    cost = device(kind=kind, operation_overhead_s=0.1, efficiency_ratio=0.5)
    return layer_costs.roofline_s(cost, "fp32", flop=flop, moved_bytes=moved_bytes, operations=operations)


def test_the_roofline_is_the_slower_of_arithmetic_and_memory():
    assert roofline_s("cpu", flop=1e9, moved_bytes=1e9, operations=0) == pytest.approx(2.0)
    assert roofline_s("cpu", flop=1e9, moved_bytes=3e9, operations=0) == pytest.approx(3.0)


def test_a_cpu_runs_operations_where_it_issues_them_and_a_gpu_issues_ahead():
    assert roofline_s("cpu", flop=1e9, moved_bytes=0, operations=5) == pytest.approx(2.5)
    assert roofline_s("cuda", flop=1e9, moved_bytes=0, operations=5) == pytest.approx(2.0)
    assert roofline_s("cuda", flop=1e9, moved_bytes=0, operations=30) == pytest.approx(3.0)


def test_what_streams_takes_its_time_beside_products_but_on_a_tpu_where_it_is_fused():
    def found_s(kind: str) -> float:
        works = {"flop": 1e9, "moved_bytes": 1e9, "operations": 0, "streamed_bytes": 5e8}
        return layer_costs.roofline_s(device(kind=kind, efficiency_ratio=0.5), "fp32", **works)

    assert [found_s(kind) for kind in ("cpu", "cuda", "tpu")] == pytest.approx([2.5, 2.5, 2.0])


def test_products_in_fp32_may_reach_another_part_of_their_peak():
    rates = {"peak_flop_per_s": {"fp32": 1e9, "fp16": 8e9}, "efficiency_ratio": 0.5}
    for ratio, expected_s in ((None, 2.0), (0.8, 1.25)):
        cost = device(kind="cuda", fp32_efficiency_ratio=ratio, **rates)
        work = {"flop": 1e9, "moved_bytes": 0.0, "operations": 0}
        assert layer_costs.roofline_s(cost, "fp32", **work) == pytest.approx(expected_s)
        assert layer_costs.roofline_s(cost, "fp16", **work) == pytest.approx(0.25)


def test_a_layer_takes_its_roofline_where_nothing_was_measured():
    found = [costs.layer_time_s(device(), WORKLOAD, BLOCK, phase=p, batch_size=2) for p in "fb"]
    assert found == pytest.approx([2 * 8 * 1e6 / 1e9, 2 * 8 * 2e6 / 1e9])


def test_a_layer_takes_its_measured_time_where_there_is_one():
    forward, backward = Curve(sizes=(1, 2), values=(1.0, 3.0)), Curve(sizes=(1,), values=(5.0,))
    layers = {"h": LayerProfile(forward_s=forward, backward_s=backward)}
    measured = replace(device(), profiles=(Profile(model="tiny", precision="fp32", layers=layers),))
    found = [costs.layer_time_s(measured, WORKLOAD, BLOCK, phase=p, batch_size=2) for p in "fb"]
    assert found == [3.0, 10.0]
    assert costs.layer_time_s(measured, WORKLOAD, MODEL.layers[0], phase="f", batch_size=2) < 1


def test_a_forward_that_runs_again_takes_its_part_of_the_roofline_or_of_the_measured_time():
    half = replace(BLOCK, recompute_flop=Polynomial.parse("500000*b*s"), recompute_operations=2)
    assert seconds(device(), BLOCK, "r") == seconds(device(), BLOCK, "f")
    assert seconds(device(), half, "r") == pytest.approx(seconds(device(), half, "f") / 2)
    curve = Curve(sizes=(2,), values=(8.0,))
    layers = {"h": LayerProfile(forward_s=curve, backward_s=curve)}
    measured = replace(device(), profiles=(Profile(model="tiny", precision="fp32", layers=layers),))
    assert seconds(measured, BLOCK, "r") == 8.0
    assert seconds(measured, half, "r") == pytest.approx(4.0)


def test_what_selective_checkpointing_runs_again_takes_its_part_of_the_measured_forward():
    light = replace(
        BLOCK,
        selective_flop=Polynomial.parse("0"),
        selective_bytes=Polynomial.parse("1000*b*s"),
        selective_operations=1,
    )
    again_s = seconds(device(), light, "r", recompute="selective")
    assert again_s == pytest.approx(1000 * 2 * 8 / 1e9)  # bytes over the memory's bandwidth
    whole_s = seconds(device(), light, "f")
    curve = Curve(sizes=(2,), values=(8.0,))
    layers = {"h": LayerProfile(forward_s=curve, backward_s=curve)}
    measured = replace(device(), profiles=(Profile(model="tiny", precision="fp32", layers=layers),))
    assert seconds(measured, light, "r", recompute="selective") == pytest.approx(8.0 * again_s / whole_s)
    assert seconds(measured, light, "r") == 8.0


def seconds(on: DeviceType, layer: Layer, phase: str, *, recompute: str = "full") -> float:
    return costs.layer_time_s(on, WORKLOAD, layer, phase=phase, batch_size=2, recompute=recompute)


def test_a_precision_without_peak_or_profile_is_the_users_to_mend():
    bare = device(peak_flop_per_s={"fp32": 1e9})
    with pytest.raises(UserError, match=r"no peak_flop_per_s.fp64 on a cpu device \(stated: fp32\)"):
        costs.layer_time_s(bare, replace(WORKLOAD, precision="fp64"), BLOCK, phase="f", batch_size=1)


@pytest.mark.parametrize(
    ("optimizer", "values", "operations"), [("sgd", 3, 1), ("sgd-momentum", 8, 3), ("adam", 18, 7), ("adamw", 18, 7)]
)
def test_an_optimizer_moves_every_value_and_issues_for_every_tensor(optimizer, values, operations):
    workload = replace(WORKLOAD, optimizer=optimizer)
    found = costs.optimizer_time_s(device(operation_overhead_s=1e-3), workload, elements=1000, tensors=3)
    assert found == pytest.approx(4 * values * 1000 / 1e9 + 3 * operations * 1e-3)


def test_an_optimizer_takes_its_measured_time_where_there_is_one():
    cost = OptimizerCost(tensor_s=1.0, sharded_tensor_s=0.5, elements_s=Curve(sizes=(10,), values=(100.0,)))
    measured = replace(device(), optimizers={"adamw": cost})
    assert costs.optimizer_time_s(measured, WORKLOAD, elements=20, tensors=3) == 203.0
    assert costs.optimizer_time_s(measured, WORKLOAD, elements=20, tensors=3, sharded_tensors=3) == 204.5


def test_a_gpus_update_of_more_than_was_measured_moves_its_bytes_through_the_memory():
    """Measured where its values fit in a cache: Llama 3.2 1B took 35.5 ms on an H100, 29.8 by the last slope."""
    curve = Curve(sizes=(1000, 2000), values=(1e-5, 2e-5))
    kind = {"optimizers": {"adamw": OptimizerCost(tensor_s=0.0, elements_s=curve)}}
    workload = replace(WORKLOAD, optimizer="adamw")
    gpu, cpu = (device(kind=each, **kind) for each in ("cuda", "cpu"))
    found = [costs.optimizer_time_s(gpu, workload, elements=size, tensors=1) for size in (2000, 10**6)]
    moved_bytes = optimizer_moved_bytes("adamw", implementation="foreach", value_bytes=4)
    assert found == pytest.approx([2e-5, moved_bytes * 10**6 / 1e9])
    assert costs.optimizer_time_s(cpu, workload, elements=10**6, tensors=1) == pytest.approx(1e-2)
    slower = replace(gpu, memory_bandwidth_bytes_per_s=1e12)
    assert costs.optimizer_time_s(slower, workload, elements=10**6, tensors=1) == pytest.approx(1e-2)


def test_an_optimizer_without_parameters_takes_no_time():
    assert costs.optimizer_time_s(device(operation_overhead_s=1.0), WORKLOAD, elements=0, tensors=3) == 0


def test_thresholding_costs_by_elements_looked_at_and_sent():
    assert costs.select_time_s(device(), elements=1000, parts=1, value=4) == pytest.approx(6000 / 1e9)
    sent = {"elements": 1000, "entries": 10.0, "value": 4}
    packed = [costs.pack_time_s(device(), encoding=e, clears=False, **sent) for e in ("coo", "bitmap", "dense")]
    assert packed == pytest.approx([120 / 1e9, 1120 / 1e9, 9000 / 1e9])
    added = [costs.unpack_time_s(device(), encoding=e, **sent) for e in ("coo", "bitmap", "dense")]
    assert added == pytest.approx([640 / 1e9, 2640 / 1e9, 12000 / 1e9])


def test_measured_costs_of_thresholding_take_the_place_of_the_bandwidth():
    cost = CompressionCost(
        call_s=1.0,
        threshold_element_s=0.1,
        pack_element_s=0.01,
        scatter_element_s=0.001,
        clear_element_s=0.02,
        residual_element_s=0.2,
        mean_element_s=0.3,
        estimate_element_s=0.4,
        pack_bit_s=0.5,
        unpack_bit_s=0.6,
        dense_element_s=0.7,
    )
    measured = replace(device(), compression=cost)
    sent = {"elements": 100, "entries": 10.0, "value": 4}
    found = [
        costs.select_time_s(measured, elements=100, parts=2, value=4),
        costs.pack_time_s(measured, encoding="coo", clears=False, **sent),
        costs.pack_time_s(measured, encoding="coo", clears=True, **sent),
        costs.pack_time_s(measured, encoding="bitmap", clears=False, **sent),
        costs.pack_time_s(measured, encoding="dense", clears=False, **sent),
        costs.unpack_time_s(measured, encoding="coo", **sent),
        costs.unpack_time_s(measured, encoding="bitmap", **sent),
        costs.residual_time_s(measured, elements=100, value=4, kept=4),
        costs.mean_time_s(measured, elements=100, tensors=3, value=4),
        costs.estimate_time_s(measured, samples=100, tensors=3),
    ]
    assert found == pytest.approx([12, 1.1, 1.3, 51.1, 71, 1.01, 61.01, 22, 33, 46])


@pytest.mark.parametrize("encoding", ["coo", "bitmap", "dense"])
def test_an_empty_range_takes_no_time(encoding):
    slow = device(operation_overhead_s=1.0)
    nothing = {"encoding": encoding, "elements": 0, "entries": 0.0, "value": 4}
    assert costs.select_time_s(slow, elements=0, parts=1, value=4) == 0
    assert costs.pack_time_s(slow, clears=True, **nothing) == costs.unpack_time_s(slow, **nothing) == 0


def test_a_sharded_unit_costs_by_phase():
    cost = ShardedUnitCost(
        forward_unit_s=1.0, forward_tensor_s=0.1, backward_unit_s=2.0, backward_tensor_s=0.2, copied_byte_s=0.001
    )
    measured = replace(device(), sharded_unit=cost)
    assert [costs.unit_host_s(measured.sharded_unit, phase=p, tensors=3) for p in "fb"] == pytest.approx([1.3, 2.6])
    assert costs.sharded_unit_copy_s(measured, 100) == pytest.approx(0.1)
    of_gpu = replace(measured, sharded_unit=replace(cost, copied_byte_s=None))
    assert costs.sharded_unit_copy_s(of_gpu, 100) == costs.copy_time_s(device(), 100)
    assert costs.unit_host_s(device().sharded_unit, phase="f", tensors=3) == 0
    assert costs.sharded_unit_copy_s(device(), 1e9) == pytest.approx(2.0)


def cut_block(*values: float) -> CutBlockCost:
    """Return costs at sums of 10 and of 30 bytes; the backward's are twice, a sum's ten times the forward's."""
    curves = [Curve(sizes=(10.0, 30.0), values=tuple(k * value for value in values)) for k in (1, 2, 10)]
    return CutBlockCost(forward_pair_s=curves[0], backward_pair_s=curves[1], sum_s=curves[2])


def test_cut_maps_cost_by_pairs_and_by_what_goes_through_the_caches():
    measured = replace(device(), cut_block=cut_block(1.0, 3.0))
    pairs = [costs.cut_pairs_time_s(measured, phase=phase, pairs=2, sum_bytes=20.0) for phase in ("f", "r", "b")]
    assert pairs == pytest.approx([4.0, 4.0, 8.0])
    sums = [costs.cut_sum_time_s(measured, sum_bytes=size) for size in (1.0, 10.0, 20.0, 30.0, 300.0)]
    assert sums == pytest.approx([10.0, 10.0, 20.0, 30.0, 30.0])
    assert costs.cut_pairs_time_s(device(), phase="f", pairs=2, sum_bytes=20.0) == 0
    assert costs.cut_sum_time_s(device(), sum_bytes=20.0) == 0


def test_host_time_comes_on_top_on_a_cpu_and_is_hidden_by_a_gpus_kernels():
    cpu, gpu = (device(kind=kind, operation_overhead_s=1.0) for kind in ("cpu", "cuda"))
    found = [[costs.with_host_time_s(on, 10.0, host_s=s, operations=4) for s in (0, 3.0, 8.0)] for on in (cpu, gpu)]
    assert found == [[10.0, 13.0, 18.0], [10.0, 10.0, 12.0]]


def test_a_gpus_host_launches_casts_ahead_and_passes_over_gradients_at_once():
    """A cast of 3 tensors moves 6 GB at 1 GB/s, or takes 3 launches; a pass over gradients has one for all."""
    for overhead_s, cast_s, pass_s in ((1.0, 6.0, 4.0), (3.0, 9.0, 4.0), (5.0, 15.0, 5.0)):
        cpu, gpu = (device(kind=kind, operation_overhead_s=overhead_s) for kind in ("cpu", "cuda"))
        cast = {"value_bytes": (2, 4), "elements": 10**9, "tensors": 3}
        assert costs.moving_time_s(cpu, **cast) == pytest.approx(6.0 + 3 * overhead_s)
        assert costs.moving_time_s(gpu, **cast) == pytest.approx(cast_s)
        read = {"value_bytes": 4, "elements": 10**9, "tensors": 3}
        assert costs.gradient_pass_s(cpu, **read) == pytest.approx(4.0 + 3 * overhead_s)
        assert costs.gradient_pass_s(gpu, **read) == pytest.approx(pass_s)
    assert costs.gradient_pass_s(gpu, value_bytes=4, elements=0, tensors=0) == 0
