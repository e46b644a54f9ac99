"""torch's optimizers in their three implementations: what they hold, do and cost, with torch as the oracle."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_runs import predicted, scenario_file, star
from strategies import device_type, loaded_of, scenario_of
from strategies import star as small_star

from gssim import cost
from gssim.cluster import Curve, DeviceType
from gssim.cluster.measured import OptimizerCost
from gssim.errors import UserError
from gssim.scenario import load_model
from gssim.simulation import simulate
from gssim.workload import implementation_on, optimizer_moved_bytes, optimizer_state_bytes
from gssim.workload.optimizers import VALUES_KEPT, optimizer_operations, optimizer_temporary_bytes, state_tensor_bytes

OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw")
IMPLEMENTATIONS = ("for-loop", "foreach", "fused")
CASES = list(product(OPTIMIZERS, IMPLEMENTATIONS, (0.0, 0.01)))


def workload_of(optimizer: str, implementation: str = "default", **changes):
    scenario = scenario_of(small_star(1), {"method": "single"}, optimizer=optimizer, **changes)
    return replace(scenario.workload, optimizer_implementation=implementation)


# What they do --------------------------------------------------------------------------------------------------------


def test_the_default_is_a_loop_on_a_cpu_and_lists_elsewhere():
    kinds = ("cpu", "cuda", "tpu")  # on the last, XLA compiles the update
    assert [implementation_on(kind, "default") for kind in kinds] == ["for-loop", "foreach", "fused"]
    assert implementation_on("cpu", "foreach") == "foreach"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lists_save_launches_on_cuda_and_one_kernel_saves_most(optimizer: str):
    loop, lists, fused = (
        optimizer_operations(optimizer, implementation=each, tensors=100, device_kind="cuda")  # type: ignore[arg-type]
        for each in IMPLEMENTATIONS
    )
    assert fused <= lists < loop or optimizer == "sgd"
    assert fused == 3  # 36 tensors a launch
    on_cpu = [
        optimizer_operations(optimizer, implementation=each, tensors=100, device_kind="cpu")  # type: ignore[arg-type]
        for each in IMPLEMENTATIONS
    ]
    assert on_cpu == [loop, loop, 100]


@pytest.mark.parametrize(("optimizer", "implementation", "decay"), CASES)
def test_without_measurements_time_is_what_is_moved_and_issued(optimizer: str, implementation: str, decay: float):
    kind = DeviceType(**device_type(kind="cuda", operation_overhead_s=1e-6))
    workload = workload_of(optimizer, implementation, weight_decay=decay)
    moved_bytes = optimizer_moved_bytes(
        optimizer,
        implementation=implementation,  # type: ignore[arg-type]
        value_bytes=4,
        weight_decay=decay,
    )
    operations = optimizer_operations(
        optimizer,
        implementation=implementation,  # type: ignore[arg-type]
        tensors=5,
        device_kind="cuda",
        weight_decay=decay,
    )
    found = cost.optimizer_time_s(kind, workload, elements=1000, tensors=5)
    assert found == pytest.approx(moved_bytes * 1000 / 1e9 + operations * 1e-6)
    in_fp64 = cost.optimizer_time_s(kind, replace(workload, precision="fp64"), elements=1000, tensors=5)
    assert in_fp64 == pytest.approx(2 * moved_bytes * 1000 / 1e9 + operations * 1e-6)


def test_a_measured_cost_is_of_the_default_and_others_have_their_own():
    flat = {"default": Curve(sizes=(1.0,), values=(1.0,)), "fused": Curve(sizes=(1.0,), values=(0.5,))}
    measured = {
        "adamw": OptimizerCost(tensor_s=0.0, elements_s=flat["default"]),
        "adamw fused": OptimizerCost(tensor_s=0.0, elements_s=flat["fused"]),
    }
    kind = DeviceType(**device_type(optimizers=measured))
    times = {
        each: cost.optimizer_time_s(kind, workload_of("adamw", each), elements=10, tensors=1)
        for each in ("default", *IMPLEMENTATIONS)
    }
    assert times["default"] == times["for-loop"] == 10.0  # a CPU's default
    assert times["fused"] == 5.0
    assert times["foreach"] == pytest.approx(18 * 4 * 10 / 1e9)  # not measured: moved bytes


# What they hold ------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(OPTIMIZERS),
    st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.1]),
)
def test_fused_holds_nothing_and_lists_no_less_than_the_largest_tensor(optimizer: str, sizes: list[int], decay: float):
    loop, lists, fused = (
        optimizer_temporary_bytes(
            optimizer,
            implementation=each,  # type: ignore[arg-type]
            tensor_elements=sizes,
            value_bytes=4,
            weight_decay=decay,
        )
        for each in IMPLEMENTATIONS
    )
    assert fused == 0
    assert lists in (0, 4 * sum(sizes))
    assert (loop == 0) == (lists == 0)
    assert loop in (0, *(4 * k * max(sizes) for k in (1, 2, 3))) or optimizer in ("adam", "adamw")
    assert loop <= 4 * 4 * max(sizes)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_of_few_samples_peaks_in_the_optimizer_as_its_implementation_has_it(implementation: str):
    workload = {"global_batch_size": 1, "sequence_length": 1, "optimizer_implementation": implementation}
    result = simulate(loaded_of(scenario_of(small_star(1), {"method": "single"}, **workload))).result
    peak = result.ranks[0].peak_by_category_bytes
    held = {"for-loop": 2 * 256 + 16, "foreach": 4 * 168, "fused": 0}[implementation]
    if held:
        assert peak["temporaries"] == held
        assert peak["gradients"] == 4 * 168
    else:
        assert result.ranks[0].peak_allocated_bytes < 4 * (168 * 4 + 168)


ID_BEFORE = "2f137cd56436a15f"
"""Id of the scenario below without its choice of implementations, in version 1 of canonical data."""


def test_the_identity_of_a_scenario_tells_implementations_apart_but_keeps_that_of_earlier_results():
    scenario = scenario_of(small_star(1), {"method": "single"})
    assert scenario.scenario_id == ID_BEFORE
    fused = scenario_of(small_star(1), {"method": "single"}, optimizer_implementation="fused")
    assert scenario.scenario_id != fused.scenario_id


# Against torch -------------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from torch import nn  # noqa: E402

from gsreal.measure import MemoryCounter, Timeline  # noqa: E402
from gsreal.methods.optimizers import make_optimizer  # noqa: E402
from gsreal.model_files.build import DTYPES  # noqa: E402
from gsreal.run.feed import Feed  # noqa: E402
from gsreal.run.worker import build  # noqa: E402
from gssim.scenario import load_scenario  # noqa: E402

CPU = torch.device("cpu")
SIZES = (5000, 3000, 7000, 6000, 1000)
SCALARS_BYTES = 64
"""Numbers that torch wraps in tensors."""


@pytest.fixture(scope="module")
def counter() -> MemoryCounter:
    found = MemoryCounter(CPU)
    if found.method != "allocator":
        pytest.skip("nothing here compiles the counting allocator")
    return found


@pytest.mark.real
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize(("optimizer", "implementation", "decay"), CASES)
def test_states_and_temporaries_are_the_counted_ones(
    counter: MemoryCounter, optimizer: str, implementation: str, decay: float, precision: str
):
    workload = workload_of(optimizer, implementation, precision=precision, weight_decay=decay)
    parameters = [nn.Parameter(torch.randn(n).to(DTYPES[precision])) for n in SIZES]
    made = make_optimizer(workload, parameters, CPU)

    def stepped() -> tuple[int, int]:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        before = counter.alive()
        counter.reset()
        made.step()
        return counter.peak() - before, counter.alive() - before

    value_bytes = {"fp32": 4, "fp64": 8, "bf16": 4}[precision]
    _, kept = stepped()  # makes the state
    state = optimizer_state_bytes(optimizer, elements=sum(SIZES), tensors=len(SIZES), value_bytes=value_bytes)
    assert kept == state
    peak, kept = stepped()
    expected = optimizer_temporary_bytes(
        optimizer,
        implementation=implementation,  # type: ignore[arg-type]
        tensor_elements=SIZES,
        value_bytes=value_bytes,
        weight_decay=decay,
    )
    cast = 4 * sum(SIZES) if precision == "bf16" else 0
    assert kept == 0
    assert 0 <= peak - expected - cast <= SCALARS_BYTES


@pytest.mark.real
@pytest.mark.parametrize(
    ("optimizer", "implementation", "precision"),
    [
        ("adamw", "for-loop", "fp32"),
        ("adam", "foreach", "bf16"),
        ("sgd", "for-loop", "bf16"),
        ("adamw", "fused", "fp32"),
    ],
)
def test_the_peak_of_a_whole_step_is_the_counted_one(
    counter: MemoryCounter, optimizer: str, implementation: str, precision: str
):
    overrides = [star(1), "plan.method=single", "workload.sequence_length=8", "workload.global_batch_size=1"]
    overrides += [f"workload.optimizer={optimizer}", f"workload.optimizer_implementation={implementation}"]
    overrides += [f"workload.precision={precision}", "workload.weight_decay=0.01"]
    case = {"scenario": scenario_file("demo.toml"), "overrides": overrides}
    before = counter.alive()
    scenario = load_scenario(Path(scenario_file("demo.toml")), overrides, gradients_needed=False).scenario
    training, feed = build(scenario, Timeline(0, CPU), CPU), Feed(scenario, 0, CPU)
    peaks = []
    for step in range(3):
        inputs, targets, weights = feed.at(step)
        peaks.append(counter.peak_of(lambda: training.step(inputs, targets, weights, 0), [])[0] - before)  # noqa: B023
    (found,) = predicted(case).ranks
    assert found.peak_allocated_bytes == pytest.approx(peaks[-1], rel=2e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_implementations_train_alike(optimizer: str):
    def trained(implementation: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (5, 3)]
        workload = workload_of(optimizer, implementation, precision="fp64", weight_decay=0.1)
        made = make_optimizer(workload, parameters, CPU)
        for step in range(4):
            for parameter in parameters:
                parameter.grad = (parameter.detach() * (step + 1)).cos()
            made.step()
        return [parameter.detach() for parameter in parameters]

    loop, lists, fused = (trained(each) for each in IMPLEMENTATIONS)
    for a, b, c in zip(loop, lists, fused, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=0)
        assert torch.allclose(a, c, rtol=1e-12, atol=0)


def test_what_the_names_stand_for():
    assert set(VALUES_KEPT) == {*OPTIMIZERS, "muon"}  # the latter: test_muon.py
    parameter = [nn.Parameter(torch.zeros(1))]
    kinds = {name: type(make_optimizer(workload_of(name), parameter, CPU)) for name in OPTIMIZERS}
    sgd, adam, adamw = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
    assert kinds == {"sgd": sgd, "sgd-momentum": sgd, "adam": adam, "adamw": adamw}


# Moments in 8 bits ---------------------------------------------------------------------------------------------------

IN_8_BITS = {"optimizer_state_precision": "8-bit", "optimizer_implementation": "fused"}


def test_moments_in_8_bits_take_a_quarter_and_a_scale_for_each_block():
    """A bias of 1,000 values keeps fp32; of 5,000 values there are 20 blocks of 256, the last of them not full."""
    sizes = state_tensor_bytes("adamw", elements=1000, value_bytes=4, precision="8-bit")
    assert sizes == (4000.0, 4000.0)
    sizes = state_tensor_bytes("adamw", elements=5000, value_bytes=4, precision="8-bit")
    assert sizes == (5000.0, 5000.0, 80.0, 80.0)


def test_a_rank_holds_its_moments_in_8_bits_and_updates_them_in_less_time():
    gpt = load_model(Path(__file__).resolve().parents[2] / "scenarios/models/gpt-byte-1m.toml")

    def held(**settings: str) -> dict[str, float]:
        cluster = small_star(2, types={"fast": device_type(memory_bytes=2**40)})
        shape = {"model": gpt, "global_batch_size": 2, "sequence_length": 8}
        scenario = scenario_of(cluster, {"method": "zero1"}, optimizer="adamw", **shape, **settings)
        return simulate(loaded_of(scenario)).result.ranks[0].peak_by_category_bytes

    whole, less = held(optimizer_implementation="fused"), held(**IN_8_BITS)
    assert {name for name in whole if whole[name] != less[name]} == {"optimizer"}
    assert 0.25 < less["optimizer"] / whole["optimizer"] < 0.5  # norms and biases of this small model keep fp32
    kind = DeviceType(**device_type(kind="cuda", operation_overhead_s=0.0))
    fused = workload_of("adamw", "fused")
    fused_s, eight_s = (
        cost.optimizer_time_s(kind, each, elements=10**6, tensors=5)
        for each in (fused, replace(fused, optimizer_state_precision="8-bit"))
    )
    assert eight_s / fused_s == pytest.approx((12 + 4 * (1 + 4 / 256)) / 28)


def test_moments_in_8_bits_need_an_adam_in_one_kernel():
    for settings, said in (
        ({**IN_8_BITS, "optimizer": "sgd"}, "allowed: adam, adamw"),
        ({**IN_8_BITS, "optimizer_implementation": "foreach"}, "needs workload.optimizer_implementation = 'fused'"),
    ):
        with pytest.raises(UserError, match=said):
            scenario_of(small_star(1), {"method": "single"}, **settings)
