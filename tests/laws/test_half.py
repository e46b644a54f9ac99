"""Laws of compressed all-reduces: half the bytes, the casts' time, a 16-bit copy of a bucket while it is reduced."""

from dataclasses import replace
from pathlib import Path

import pytest
from points import random_point
from strategies import built, loaded_of, scenario_of, star, topology

from gssim.cluster.cluster import BackendCost
from gssim.errors import UserError
from gssim.program import lower
from gssim.scenario import load_model
from gssim.simulation import simulate

BUCKETS = {"bucket_bytes": 80}
PLANS = {
    "overlapped": {},
    "blocking": {"overlap": False},
    "in one bucket": {"bucket_bytes": 10_000},
    "accumulated": {"micro_batches": 2},
    "in every micro-batch": {"micro_batches": 2, "gradient_sync": "micro-batch"},
    "unequal batches": {"shares": {"batch": [0.75, 0.25]}},
    "recomputed": {"recompute": "full"},
}
BANDWIDTH = 1e5


def result_of(method, *, cluster=None, precision="fp32", **plan):
    scenario = scenario_of(cluster or star(2, bandwidth=BANDWIDTH), {"method": method} | plan, precision=precision)
    return simulate(loaded_of(scenario)).result


def sizes(result, scale=1):
    return sorted((entry.group, scale * entry.bytes, entry.count) for entry in result.collectives)


@pytest.mark.parametrize("compress", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_its_collectives_are_those_of_ddp_with_half_the_bytes(plan, compress):
    plan = BUCKETS | plan
    assert sizes(result_of("half", compress=compress, **plan), scale=2) == sizes(result_of("ddp", **plan))


@pytest.mark.parametrize(("precision", "times"), [("fp32", 2), ("fp64", 4), ("bf16", 1)])
def test_a_compressed_element_has_two_bytes_whatever_the_workloads_precision(precision, times):
    half, ddp = (result_of(method, precision=precision, **BUCKETS) for method in ("half", "ddp"))
    assert sizes(half, scale=times) == sizes(ddp)


def test_over_several_nodes_every_link_carries_half():
    cluster = built(topology("switch", count=8) | {"devices_per_host": 4})
    half, ddp = (result_of(method, cluster=cluster, **BUCKETS) for method in ("half", "ddp"))
    carried = {link.name: link.bytes for link in ddp.links}
    assert {link.name: 2 * link.bytes for link in half.links} == pytest.approx(carried)


def test_ddp_and_zero1_are_compressed_by_the_key_of_the_plan():
    assert result_of("ddp", compress="bf16", **BUCKETS).step_time_s == result_of("half", **BUCKETS).step_time_s
    plain, compressed = (result_of("zero1", **settings).collectives for settings in ({}, {"compress": "bf16"}))
    for entry, half in zip(plain, compressed, strict=True):  # the parameters' broadcasts are as they are
        assert entry.kind == half.kind
        assert entry.bytes == half.bytes * (2 if entry.kind == "all-reduce" else 1)


def test_without_overlap_a_step_takes_half_the_transfer_and_three_passes_more():
    """The model has 672 bytes of gradients and its devices' memory moves 1e9 bytes/s: to cast reads four bytes of an
    element and writes two, to divide reads and writes two, to cast back reads two and writes four."""
    half, ddp = (result_of(method, overlap=False, **BUCKETS) for method in ("half", "ddp"))
    elements = 672 / 4
    saved_s = 672 / 2 / BANDWIDTH - elements * (6 + 4 + 6) / 1e9
    assert ddp.step_time_s - half.step_time_s == pytest.approx(saved_s, rel=1e-9)
    assert half.phases_s["compression"] == pytest.approx(elements * 16 / 1e9, rel=1e-9)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_a_step_allocates_for_compression_it_frees(plan):
    program = lower(scenario_of(star(2), {"method": "half"} | BUCKETS | plan))
    for tasks in program.tasks:
        kept = [size for task in tasks for category, size in task.need.kept if category == "communication"]
        assert kept.count(0) == 0
        assert len(kept) >= 2
        assert sum(kept) == 0


def test_a_blocking_all_reduce_holds_one_copy_at_a_time():
    """In one bucket, it is held when the whole backward is over; so is the gradient that completes the bucket, of 256
    bytes, which autograd holds until the hook has ended."""
    program = lower(scenario_of(star(2), {"method": "half", "overlap": False, "bucket_bytes": 10_000}))
    peaks = [task.need.peak_bytes for task in program.tasks[0] if task.label.startswith("compress")]
    assert peaks == [672 / 2 + 256]


def test_gradients_in_that_format_already_are_divided_in_place():
    program = lower(scenario_of(star(2), {"method": "half"} | BUCKETS, precision="bf16"))
    labels = [task.label for task in program.tasks[0]]
    assert "compress bucket 0" in labels
    assert "decompress bucket 0" not in labels
    assert not any(task.need.kept for task in program.tasks[0] if task.label.startswith("compress"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"method": "gs", "compress": "bf16"}, r"plan.compress = 'bf16': .*'push'.*allowed with ddp, zero1, half"),
        ({"method": "zero2", "compress": "fp16"}, "no buckets are all-reduced"),
        ({"method": "half", "pp": 2, "micro_batches": 2}, "plan.method = 'half': .*allowed with plan.pp = 1"),
        ({"method": "zero1", "zero1_implementation": "deepspeed", "compress": "bf16"}, "allowed with 'torch'"),
    ],
)
def test_what_does_not_combine_is_refused_in_one_line(plan, message):
    with pytest.raises(UserError, match=message) as refused:
        scenario_of(star(2), plan)
    assert "\n" not in str(refused.value)


def test_random_points_include_it():
    assert "half" in {random_point(seed)["plan"]["method"] for seed in range(200)}


@pytest.mark.parametrize(("compress", "times"), [("bf16", 3.0), ("fp16", 1.0)])
def test_sums_in_16_bits_have_the_costs_that_were_measured_for_them(compress, times):
    """Without measured costs, those of fp32 apply, by bytes."""
    byte_s = 1 / BANDWIDTH  # slower than the links
    costs = {"source": "test", "processor_byte_s": {"all-reduce": byte_s, "all-reduce bf16": 3 * byte_s}}
    priced = replace(star(2, bandwidth=BANDWIDTH), backend_cost=BackendCost(**costs))
    half = result_of("half", cluster=priced, compress=compress, overlap=False, **BUCKETS).phases_s
    ddp = result_of("ddp", cluster=priced, overlap=False, **BUCKETS).phases_s
    assert half["exposed_communication"] == pytest.approx(times / 2 * ddp["exposed_communication"], rel=1e-9)


@pytest.mark.parametrize(("precision", "floating"), [("fp32", 212_480), ("bf16", 106_240), ("fp64", 424_960)])
def test_module_buffers_are_broadcast_in_the_precision_of_the_training_and_integers_as_they_are(precision, floating):
    """ResNet-50 has 53,120 running means and variances, and 53 counts of batches."""
    model = load_model(Path(__file__).resolve().parents[2] / "scenarios/models/resnet-50.toml")
    scenario = scenario_of(star(2), {"method": "ddp"}, model=model, sequence_length=None, precision=precision)
    found = simulate(loaded_of(scenario)).result.collectives
    assert {entry.bytes for entry in found if entry.kind == "broadcast"} == {floating, 53 * 8}
