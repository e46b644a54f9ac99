"""State in the memory of hosts (`plan.offload`): closed forms of its copies, shared links, memory, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gssim
from gssim import simulate
from gssim.cost import copy_time_s
from gssim.planner.bounds.bounds import Bounds
from gssim.sweeps.table import outcome
from gssim.workload import optimizer_moved_bytes, unrolled

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
PCIE_BYTES_PER_S, HOST_BYTES_PER_S = 20e9, 100e9
TEXT = """
# How long do copies to the host take?
[cluster]
name = "one server"
backend = "nccl"
source = "test"
device_types.gpu = {{ preset = "a100-sxm-80", operation_overhead_s = 0.0, source = "test" }}
host = {{ memory_bytes = "{memory}", memory_bandwidth_bytes_per_s = "100 GB/s", source = "test" }}
[cluster.topology]
kind = "servers"
[[cluster.topology.servers]]
count = 1
device = "gpu"
devices = {devices}
inside = "nvswitch"
inside_link = "nvlink3-a100"
pcie_link = {{ bandwidth_bytes_per_s = "20 GB/s", latency_s = 0, source = "test" }}
host_memory = true
devices_per_memory_link = {shared}
[workload]
model = "gpt2-124m"
global_batch_size = 8
sequence_length = 1024
precision = "fp32"
optimizer = "adamw"
[plan]
method = "zero3"
"""


@pytest.fixture
def scenario_of(tmp_path: Path) -> Any:
    def make(changes: dict[str, Any], *, devices: int = 1, shared: int = 1, memory: str = "1 TB") -> gssim.Scenario:
        path = tmp_path / "offload.toml"
        path.write_text(TEXT.format(devices=devices, shared=shared, memory=memory).lstrip())
        return gssim.load(path, changes)

    return make


def elements_of(scenario: gssim.Scenario) -> int:
    return sum(instance.layer.elements for instance in unrolled(scenario.workload.model))


def update_s(elements: int, ranks: int) -> float:
    """Adam on a CPU reads and writes so many values of four bytes; a host's ranks share its bandwidth."""
    moved_bytes = optimizer_moved_bytes("adamw", implementation="for-loop", value_bytes=4)
    return moved_bytes * elements * ranks / HOST_BYTES_PER_S


@pytest.mark.parametrize("method", ["single", "ddp"])
def test_an_offloaded_optimizer_takes_a_copy_each_way_and_the_hosts_bandwidth(scenario_of, method):
    whole = simulate(scenario_of({"plan.method": method}))
    offloaded = simulate(scenario_of({"plan.method": method, "plan.offload": "optimizer"}))
    elements = elements_of(scenario_of({}))
    copies_s = 2 * 4 * elements / PCIE_BYTES_PER_S
    expected_s = whole.step_time_s - whole.phases_s["optimizer"] + copies_s + update_s(elements, 1)
    assert offloaded.step_time_s == pytest.approx(expected_s, rel=1e-9)
    assert offloaded.phases_s["optimizer"] == pytest.approx(update_s(elements, 1), rel=1e-9)
    assert offloaded.collectives == whole.collectives
    assert offloaded.ranks[0].bytes_sent == whole.ranks[0].bytes_sent


def test_gradients_that_are_kept_in_fp32_are_copied_as_they_are(scenario_of):
    plan = {"plan.method": "single", "plan.offload": "optimizer", "workload.precision": "bf16"}
    cast, kept = (simulate(scenario_of(plan | more)) for more in ({}, {"workload.gradient_precision": "fp32"}))
    casts_s = [each.phases_s["optimizer"] - update_s(elements_of(scenario_of({})), 1) for each in (cast, kept)]
    assert casts_s[0] == pytest.approx(2 * casts_s[1], rel=1e-6)  # of parameters alone


def test_megatrons_buffer_of_gradients_is_zeroed_on_the_device(scenario_of):
    """Before, the time to zero it was predicted from the bandwidth of the host's memory."""
    asked = scenario_of(
        {"plan.method": "zero1", "plan.zero1_implementation": "megatron", "plan.offload": "optimizer"}, devices=2
    )
    elements, gpu = elements_of(asked), asked.cluster.device_types["gpu"]
    expected_s = update_s(elements // 2, 2) + copy_time_s(gpu, 4 * elements) / 2
    assert simulate(asked).phases_s["optimizer"] == pytest.approx(expected_s, rel=1e-3)


def test_copies_that_share_a_link_take_turns_on_it(scenario_of):
    changes = {"plan.method": "ddp", "plan.offload": "optimizer"}
    own = simulate(scenario_of(changes, devices=4))
    for shared in (2, 4):
        slower = simulate(scenario_of(changes, devices=4, shared=shared))
        more_s = 2 * 4 * elements_of(scenario_of({})) * (shared - 1) / PCIE_BYTES_PER_S
        assert slower.step_time_s - own.step_time_s == pytest.approx(more_s, rel=1e-6)


def test_other_traffic_on_the_link_slows_copies_down(scenario_of):
    changes = {"plan.method": "single", "plan.offload": "optimizer"}
    alone = simulate(scenario_of(changes))
    traffic = {"between": ["server0/gpu0", "server0/memory"], "bytes_per_s": PCIE_BYTES_PER_S / 2}
    beside = simulate(scenario_of({**changes, "network.traffic": [traffic]}))
    copy_s = 4 * elements_of(scenario_of({})) / PCIE_BYTES_PER_S
    assert beside.step_time_s - alone.step_time_s == pytest.approx(copy_s, rel=1e-6)


def test_shards_are_copied_before_each_gather_and_gradients_after_each_reduction(scenario_of):
    result = simulate(scenario_of({"plan.offload": "parameters"}, devices=4))
    uses = {each.name: each.bytes for each in result.links}
    shard_bytes = 4 * elements_of(scenario_of({})) / 4
    assert uses["server0/port0 -> server0/memory"] == pytest.approx(shard_bytes, rel=1e-3)  # rows are padded
    down = uses["server0/memory -> server0/port0"]
    once = simulate(scenario_of({"plan.offload": "parameters", "plan.method": "zero2"}, devices=4))
    assert {each.name: each.bytes for each in once.links}["server0/memory -> server0/port0"] == pytest.approx(
        shard_bytes, rel=1e-3
    )
    assert shard_bytes < down < 2 * shard_bytes  # blocks twice, the rest once


@pytest.mark.parametrize(
    ("method", "offload"),
    [
        ("zero3", "parameters"),
        ("zero2", "parameters"),
        ("zero3", "optimizer"),
        ("ddp", "optimizer"),
        ("zero1", "optimizer"),
    ],
)
def test_what_the_host_keeps_is_not_on_the_device(scenario_of, method, offload):
    plan = {"plan.method": method, "plan.recompute": "full"}
    whole = simulate(scenario_of(plan, devices=2)).ranks[0]
    offloaded = simulate(scenario_of({**plan, "plan.offload": offload}, devices=2)).ranks[0]
    owned_bytes = whole.peak_by_category_bytes["optimizer"] / 2
    # two values of Adam for each element, itself, and its gradient
    assert sum(offloaded.host_bytes.values()) == pytest.approx(4 * owned_bytes, rel=1e-3)
    gone = {"optimizer", *(["parameters"] if offload == "parameters" else [])}
    assert gone.isdisjoint(offloaded.peak_by_category_bytes)
    assert offloaded.peak_allocated_bytes < whole.peak_allocated_bytes - 2 * owned_bytes * 0.99


def test_a_host_may_have_too_little_memory(scenario_of):
    changes = {"plan.offload": "parameters"}
    fits = simulate(scenario_of(changes, devices=2, memory="2 GB"))
    full = simulate(scenario_of(changes, devices=2, memory="1.9 GB"))
    assert fits.fits
    assert full.does_not_fit is not None
    assert (full.does_not_fit.memory, full.does_not_fit.category) == ("host", "optimizer")
    held_bytes = sum(sum(each.host_bytes.values()) * each.count for each in full.ranks)
    assert "of its host's memory" in str(outcome(full)["reason"])
    assert full.does_not_fit.excess_bytes == pytest.approx(held_bytes - 1.9e9)
    # changes save what is lacking, which is no device's memory
    assert {each.change for each in full.remedies} == {"2 times the ranks", "4 times the ranks"}
    twice = next(each for each in full.remedies if each.change == "2 times the ranks")
    assert twice.fits
    assert twice.saved_bytes == pytest.approx(held_bytes / 2, rel=1e-3)
    worse = simulate(scenario_of(changes, devices=2, memory="0.9 GB")).remedies[-1]
    assert (worse.fits, worse.margin.memory_bytes) == (False, 0.9e9)
    assert worse.margin.margin_bytes == pytest.approx(0.9e9 - held_bytes / 2, rel=1e-2)


@pytest.mark.parametrize(
    ("method", "offload"),
    [
        ("zero3", "parameters"),
        ("zero2", "optimizer"),
        ("hsdp", "parameters"),
        *(
            pytest.param(method, offload, marks=pytest.mark.slow)
            for method, offload in (("zero3", "optimizer"), ("zero2", "parameters"), ("hsdp", "optimizer"))
        ),
    ],
)
def test_equal_ranks_are_simulated_once(scenario_of, method, offload):
    axes = {"plan.dp_replicate": 2, "plan.dp_shard": 2} if method == "hsdp" else {}
    scenario = scenario_of({"plan.method": method, "plan.offload": offload, **axes}, devices=4, shared=2)
    assert simulate(scenario).step_time_s == pytest.approx(simulate(scenario, unfold=True).step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    "axes", [{"plan.pp": 2, "plan.dp_replicate": 2}, pytest.param({"plan.pp": 4}, marks=pytest.mark.slow)]
)
def test_stages_offload_their_own_optimizer(scenario_of, axes):
    changes = {"workload.model": "llama2-7b", "workload.precision": "bf16", "plan.micro_batches": 2, **axes}
    changes["plan.method"] = "ddp" if "plan.dp_replicate" in axes else "pipeline"
    whole, offloaded = (scenario_of({**changes, **more}, devices=4) for more in ({}, {"plan.offload": "optimizer"}))
    before, after = simulate(whole), simulate(offloaded)
    assert after.collectives == before.collectives
    held = sum(sum(each.host_bytes.values()) * each.count for each in after.ranks)
    copies = axes.get("plan.dp_replicate", 1)
    assert held == pytest.approx(copies * 4 * 4 * elements_of(whole), rel=1e-6)
    assert simulate(offloaded, unfold=True).step_time_s == pytest.approx(after.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("offload", "precision"),
    [
        ("parameters", "fp32"),
        ("optimizer", "bf16"),
        *(
            pytest.param(offload, precision, marks=pytest.mark.slow)
            for offload, precision in ((None, "fp32"), (None, "bf16"), ("parameters", "bf16"), ("optimizer", "fp32"))
        ),
    ],
)
def test_bounds_are_no_more_than_a_simulation(scenario_of, offload, precision):
    for method in ("zero2", "zero3") if offload == "parameters" else ("zero2", "zero3", "ddp", "zero1"):
        for micro_batches in (1, 2):
            changes = {"plan.method": method, "plan.micro_batches": micro_batches, "workload.precision": precision}
            scenario = scenario_of(changes, devices=4)
            scenario = replace(scenario, plan=replace(scenario.plan, offload=offload))
            result = simulate(scenario)
            bounds = Bounds(scenario)
            bound = bounds.closer(scenario.plan, bounds.of(scenario.plan))
            assert bound.time_s <= result.step_time_s
            assert bound.full_ratio * 80e9 <= max(
                each.peak_allocated_bytes + sum(each.outside_bytes.values()) for each in result.ranks
            )


def test_accumulated_gradients_are_added_by_the_host(scenario_of):
    changes = {"plan.offload": "parameters", "plan.micro_batches": 2}
    twice = simulate(scenario_of(changes, devices=2))
    at_end = simulate(scenario_of({**changes, "plan.gradient_sync": "step"}, devices=2))
    assert twice.step_time_s > at_end.step_time_s
    gradients = [each.ranks[0].peak_by_category_bytes.get("gradients", 0.0) for each in (twice, at_end)]
    assert gradients[0] < gradients[1]  # copied away in each micro-batch, or kept whole until the last


@pytest.mark.parametrize(("method", "copies"), [("zero1", (0, 1)), ("zero2", (2, 2))])
def test_deepspeed_accumulates_gradients_on_the_host(scenario_of, method, copies):
    """`copies`: of a part in the workload's precision, to the host and from it, beside those of each update in fp32."""
    plan = {"plan.method": method, f"plan.{method}_implementation": "deepspeed", "workload.precision": "bf16"}
    once, thrice, kept = (
        simulate(scenario_of(plan | more, devices=2))
        for more in (
            {"plan.offload": "optimizer"},
            {"plan.offload": "optimizer", "plan.micro_batches": 3, "workload.global_batch_size": 12},
            {},
        )
    )
    part, host = elements_of(scenario_of({})) / 2, "server0/memory"
    for result, (to_host, from_host) in ((once, (0, 0)), (thrice, copies)):
        links = {each.name: each.bytes for each in result.links}
        assert links[f"server0/port0 -> {host}"] == pytest.approx((4 + 2 * to_host) * part, rel=1e-6)
        assert links[f"{host} -> server0/port0"] == pytest.approx((4 + 2 * from_host) * part, rel=1e-6)
    largest = 50257 * 768
    (on_host,), (accumulating,) = ({each.host_bytes["gradients"] for each in r.ranks} for r in (once, thrice))
    assert on_host == pytest.approx(4 * part + 2 * largest, rel=1e-6)
    assert accumulating - on_host == pytest.approx(2 * part, rel=1e-6)
    copied = [result.ranks[0].peak_by_category_bytes.get("communication", 0.0) for result in (once, kept)]
    assert copied[0] - copied[1] == 2 * largest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plan.method": "ddp", "plan.offload": "parameters"}, "cannot run with method 'ddp'; allowed: zero2, zero3"),
        ({"plan.method": "gs", "plan.offload": "optimizer"}, "cannot run with method 'gs'"),
        (
            {"plan.pp": 2, "plan.dp_shard": 2, "plan.micro_batches": 2, "plan.offload": "parameters"},
            "cannot run yet with plan.pp = 2",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(scenario_of, changes, said):
    with pytest.raises(gssim.UserError, match=said):
        scenario_of(changes, devices=4)


def test_a_cluster_says_what_its_hosts_have():
    base = {"plan.offload": "parameters"}
    with pytest.raises(gssim.UserError, match=r"cluster\.host: needed"):
        gssim.load(f"{SCENARIOS}/llama3-8b-fsdp.toml", base)
    host = {
        f"cluster.host.{key}": value
        for key, value in (("memory_bytes", 1e12), ("memory_bandwidth_bytes_per_s", 1e11), ("source", "test"))
    }
    with pytest.raises(gssim.UserError, match=r"no node '.*/memory' to which state could be copied"):
        gssim.load(f"{SCENARIOS}/gpt2-unequal-gpus.toml", {**base, **host, "plan.method": "zero3"})
    with pytest.raises(gssim.UserError, match="a device of kind 'cpu' has no host with memory of its own"):
        gssim.load(f"{SCENARIOS}/demo.toml", {"plan.method": "ddp", "plan.offload": "optimizer"})


def test_a_cpu_is_its_own_host():
    zero3 = {"plan.method": "zero3"}
    offloaded = simulate(gssim.load(f"{SCENARIOS}/demo.toml", {**zero3, "plan.offload": "parameters"}))
    assert offloaded.ranks == simulate(gssim.load(f"{SCENARIOS}/demo.toml", zero3)).ranks
