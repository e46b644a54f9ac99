"""GPUs whose profile has the host's time to issue operations apart from the device's own: the slower sets the pace."""

from dataclasses import replace
from pathlib import Path

import pytest
from strategies import device_type, loaded_of, scenario_of, star, tiny_model

from gssim import collectives
from gssim.program.passes import lower
from gssim.scenario import load_model
from gssim.simulation import simulate

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
OF_TESTS = Path(__file__).resolve().parents[1] / "helpers" / "models" / "of_tests"

PASSES = 10
"""Forwards and backwards of the hand-made model's five layers."""
TENSORS = 6
OPTIMIZER = {
    "tensor_s": 0.0,
    "elements_s": {"sizes": [1], "values": [0.25 / 168]},
    "host_s": 3.0,
    "host_tensor_s": 0.5,
}
UPDATE_S, UPDATE_HOST_S = 0.25, 3.0 + TENSORS * 0.5
"""Times to update all 168 elements."""


def curve(seconds: float) -> dict[str, list[float]]:
    return {"sizes": [1, 8], "values": [seconds, seconds]}


def gpus(ranks: int, *, run_s: float, issue_s: float, backend: str = "nccl", **changes):
    layer = {
        "forward_s": curve(run_s),
        "backward_s": curve(run_s),
        "forward_host_s": curve(issue_s),
        "backward_host_s": curve(issue_s),
    }
    profile = {"model": "tiny", "precision": changes.pop("precision", "fp32"), "sequence_length": 4}
    profile["layers"] = dict.fromkeys(("embedding", "h", "head", "loss"), layer)
    of_gpu = {"kind": "cuda", "profiles": [profile], "optimizers": {"adamw": OPTIMIZER}, "operation_overhead_s": 1e-3}
    cluster = {"bandwidth": changes.pop("bandwidth", 1e12)}
    return star(ranks, types={"gpu": device_type(**(of_gpu | changes))}, backend=backend, **cluster)


def step_s(cluster, plan=None, **workload) -> float:
    return simulate(loaded_of(scenario_of(cluster, plan or {"method": "single"}, **workload))).result.step_time_s


def test_the_slower_of_device_and_host_sets_the_pace():
    assert step_s(gpus(1, run_s=4.0, issue_s=1.0)) == pytest.approx(PASSES * 4.0 + UPDATE_S)
    assert step_s(gpus(1, run_s=1.0, issue_s=4.0)) == pytest.approx(PASSES * 4.0 + UPDATE_HOST_S)


def test_without_a_profile_a_host_issues_each_operation_of_the_layers():
    operations = sum(
        each.repeats * (each.forward_operations + each.backward_operations) for each in tiny_model().layers
    )
    slow_host = gpus(1, run_s=0.0, issue_s=0.0, profiles=[], layer_operation_s=1.0)
    assert step_s(slow_host) == pytest.approx(operations * 1.0 + UPDATE_HOST_S)
    slow_device = gpus(1, run_s=0.0, issue_s=0.0, profiles=[], layer_operation_s=1e-6, operation_overhead_s=0.0)
    bare = gpus(1, run_s=0.0, issue_s=0.0, profiles=[], operation_overhead_s=0.0)
    assert step_s(slow_device) == pytest.approx(step_s(bare), rel=1e-3)


def test_a_host_that_was_ahead_may_fall_behind():
    """The update is issued while the device still runs the backward, as far as the host got ahead."""
    assert step_s(gpus(1, run_s=1.5, issue_s=1.0)) == pytest.approx(max(PASSES * 1.0 + UPDATE_HOST_S, 15.0 + UPDATE_S))


def test_what_a_loop_does_besides_is_hidden_behind_a_slow_device():
    assert step_s(gpus(1, run_s=4.0, issue_s=1.0, step_host_s=2.0)) == pytest.approx(PASSES * 4.0 + UPDATE_S)
    assert step_s(gpus(1, run_s=1.0, issue_s=4.0, step_host_s=2.0)) == pytest.approx(PASSES * 4.0 + UPDATE_HOST_S + 2.0)
    pipeline = {"method": "pipeline", "micro_batches": 2}
    for ranks, plan in ((1, None), (2, pipeline)):
        cores = [star(ranks, types={"core": device_type(step_host_s=seconds)}) for seconds in (0.0, 2.0)]
        assert step_s(cores[1], plan) - step_s(cores[0], plan) == pytest.approx(2.0)


def test_hooks_of_replicas_take_the_hosts_time():
    hooked = {"gradient_hook_s": 0.1, "replica_hook_s": 0.2}
    slow, fast = ({"run_s": 4.0, "issue_s": 1.0}, {"run_s": 1.0, "issue_s": 4.0})
    plans = {"ddp": TENSORS * 0.2, "gs": TENSORS * 0.1}
    for method, hooks_s in plans.items():
        added = [step_s(gpus(2, **each, **hooked), {"method": method}) for each in (slow, fast)]
        bare = [step_s(gpus(2, **each), {"method": method}) for each in (slow, fast)]
        assert added[0] == pytest.approx(bare[0])
        assert added[1] - bare[1] == pytest.approx(hooks_s)


def test_what_a_replicas_wrapper_adds_to_each_forward_is_the_hosts():
    for method, micro_batches, added_s in (("ddp", 1, 0.5), ("ddp", 2, 1.0), ("gs", 1, 0.0)):
        plan = {"method": method, "micro_batches": micro_batches}
        for speeds, expected_s in (({"run_s": 9.0, "issue_s": 1.0}, 0.0), ({"run_s": 1.0, "issue_s": 9.0}, added_s)):
            bare_s, wrapped_s = (step_s(gpus(2, **speeds, replica_forward_s=each), plan) for each in (None, 0.5))
            assert wrapped_s - bare_s == pytest.approx(expected_s)


@pytest.mark.parametrize("key", ["layer_operation_s", "kernel_s"])
def test_a_cpu_whose_host_would_be_ahead_of_it_is_refused(key):
    with pytest.raises(ValueError, match=f"device_types.cpu.{key} = 1.0: it is of a GPU, not of kind 'cpu'"):
        star(1, types={"cpu": device_type(**{key: 1.0})})


def host_s(cluster, plan, *ops: str, **workload) -> list[float]:
    """Return what the host issues in each rank's step for tasks of these kinds; on CPUs, their duration."""
    program = lower(scenario_of(cluster, plan, **workload), unfolded=True)
    chosen = ([task for task in tasks if task.id.op in ops] for tasks in program.tasks)
    return [sum(task.issue.host_s if task.issue else task.duration_s for task in tasks) for tasks in chosen]


def test_each_stage_of_a_pipeline_has_one_wrapper_also_where_it_begins_with_equal_blocks():
    plan = {"method": "ddp", "pp": 2, "dp_replicate": 2, "micro_batches": 4, "schedule": "interleaved"}
    model = load_model(MODELS / "gpt2-124m.toml")
    clusters = (star(4, types={"cpu": device_type(memory_bytes=2**36, replica_forward_s=s)}) for s in (None, 0.5))
    bare, wrapped = (host_s(cluster, plan, "forward", model=model, sequence_length=8) for cluster in clusters)
    stages, micro_batches = 2, 4
    assert [b - a for a, b in zip(bare, wrapped, strict=True)] == pytest.approx([stages * micro_batches * 0.5] * 4)


@pytest.mark.parametrize(
    "changes", [{"frozen": ["blocks.0"]}, {"adapters": {"rank": 4, "alpha": 4.0, "targets": "all-linear"}}]
)
def test_without_a_profile_a_host_issues_what_a_model_with_frozen_layers_or_adapters_runs(changes):
    model = load_model(OF_TESTS / "adapters-gpt.toml")
    gpu, plan = gpus(1, run_s=0.0, issue_s=0.0, profiles=[], layer_operation_s=1.0), {"method": "single"}
    workload = {"model": model, "sequence_length": 24} | changes
    layers = scenario_of(gpu, plan, **workload).workload.model.layers
    operations = sum(each.repeats * (each.forward_operations + each.backward_operations) for each in layers)
    assert host_s(gpu, plan, "forward", "backward", **workload) == pytest.approx([operations * 1.0], rel=1e-4)


def test_without_a_profile_a_host_issues_the_sums_of_cut_blocks_too():
    """A cut block has two sums over ranks in its forward, and two in its backward."""
    model = load_model(OF_TESTS.parent / "gpt2.toml")
    gpu = gpus(2, run_s=0.0, issue_s=0.0, profiles=[], layer_operation_s=1.0)
    found = host_s(gpu, {"method": "tensor"}, "forward", "backward", model=model, sequence_length=24)
    issued = sum(
        each.repeats * (each.forward_operations + each.backward_operations + 4 * each.block)
        for each in model.sliced_layers
    )
    assert found == pytest.approx([issued] * len(found), rel=1e-4)


def test_a_host_issues_a_backward_around_the_forward_that_runs_again_in_its_turn():
    """Its first operations are issued before the second forward, and the rest behind that, at no earlier time."""
    model = load_model(OF_TESTS / "divided-autocast-llama.toml")
    gpu = gpus(2, run_s=0.0, issue_s=0.0, profiles=[], operation_overhead_s=1.0)
    plan = {"method": "ddp", "cp": 2, "context_exchange": "ring"}
    workload = {"model": model, "sequence_length": 48, "autocast": "bf16"}
    (once_s, again_s) = (
        step_s(gpu, plan | {"recompute": recompute}, **workload) for recompute in ("none", "selective")
    )
    (recomputed_s, _) = host_s(gpu, plan | {"recompute": "selective"}, "recompute", **workload)
    assert recomputed_s > 0
    assert again_s - once_s == pytest.approx(recomputed_s, rel=1e-3)


def test_casts_of_master_copies_are_issued_ahead_where_both_times_are_known():
    """Two casts of 168 elements in six tensors, of which each moves 6 bytes at 1 GB/s."""
    casts_s, issue_s = 2 * (168 * 6 / 1e9 + TENSORS * 1e-4), 2 * TENSORS * 1e-3
    known = {"kernel_s": 1e-4, "precision": "bf16"}
    slow = step_s(gpus(1, run_s=4.0, issue_s=1.0, **known), precision="bf16")
    assert slow == pytest.approx(PASSES * 4.0 + UPDATE_S + casts_s, rel=1e-6)
    fast = step_s(gpus(1, run_s=1.0, issue_s=4.0, **known), precision="bf16")
    assert fast == pytest.approx(PASSES * 4.0 + UPDATE_HOST_S + issue_s, rel=1e-6)


UNIT = {
    "forward_unit_s": 1.0,
    "forward_tensor_s": 0.0,
    "backward_unit_s": 2.0,
    "backward_tensor_s": 0.0,
}
COPIES = {"sharded_unit": {"copied_byte_s": 0.0}, "flat_unit": {}}


@pytest.mark.parametrize(("method", "key"), [("zero2", "sharded_unit"), ("gs_z3", "flat_unit")])
def test_a_units_own_work_is_the_hosts(method, key):
    """There are three units: two blocks and the root."""
    costs = {key: UNIT | COPIES[key]}
    slow, fast = (
        [step_s(gpus(2, run_s=run_s, issue_s=issue_s, **unit), {"method": method}) for unit in ({}, costs)]
        for run_s, issue_s in ((100.0, 1.0), (1.0, 100.0))
    )
    assert slow[1] == pytest.approx(slow[0], rel=1e-3)
    assert fast[1] - fast[0] == pytest.approx(3 * (1.0 + 2.0), rel=1e-2)


def issued(backend: str, method: str) -> list[tuple[str, bool]]:
    """Return the labels of the first rank's issued tasks, and whether each goes on after the one before."""
    cluster = gpus(2, run_s=1.0, issue_s=1.0, backend=backend)
    return [
        (task.label, task.issue.goes_on)
        for task in lower(scenario_of(cluster, {"method": method})).tasks[0]
        if task.issue is not None
    ]


def test_a_host_waits_for_exchanges_on_gloo_alone():
    assert all(goes_on for _, goes_on in issued("nccl", "ddp"))
    waiting = [label for label, goes_on in issued("gloo", "ddp") if not goes_on]
    assert waiting == ["optimizer"]


def test_what_ends_a_step_on_gloo_delays_the_next_ones_first_task():
    """Updated parameters are published after the update."""
    found = issued("gloo", "gs")
    assert found[0] == ("forward embedding", False)
    assert ("optimizer", False) in found


@pytest.mark.parametrize("method", ["ddp", "zero3", "gs", "gs_z3"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_equal_ranks_stand_for_one_another(method, backend):
    cluster = gpus(4, run_s=2e-3, issue_s=3e-3, backend=backend, bandwidth=1e5, step_host_s=1e-3, flat_unit=UNIT)
    loaded = loaded_of(scenario_of(cluster, {"method": method}))
    folded, unfolded = (simulate(loaded, unfolded=each).result for each in (False, True))
    assert folded.step_time_s == pytest.approx(unfolded.step_time_s)


def test_a_profile_without_the_hosts_times_says_nothing_of_them():
    cluster = gpus(1, run_s=1.0, issue_s=1.0)
    (device,) = cluster.device_types.values()
    (profile,) = device.profiles
    bare = replace(profile.layers["h"], forward_host_s=None, backward_host_s=None)
    assert not {"forward_host_s", "backward_host_s"} & set(type(bare).__pydantic_serializer__.to_python(bare))


def test_each_rank_beyond_two_adds_to_a_calls_overhead():
    cost = {"overhead_s": {"all-gather-v": 1.0}, "overhead_rank_s": {"all-gather-v": 0.5}, "source": "-"}
    cluster = star(4, backend_cost=cost)
    assert [collectives.overhead_s(cluster, "all-gather-v", ranks=n) for n in (1, 2, 4)] == [1.0, 1.0, 2.0]
