"""Laws of compressors: PowerSGD's and top-k's bytes, memory and time by closed forms, and what they refuse."""

import math
from dataclasses import replace

import pytest
from points import random_point
from strategies import loaded_of, scenario_of, star, tiny_model

from gssim.cluster import Curve
from gssim.cluster.measured import CompressionCost, LowRankCost
from gssim.cost import low_rank_product_time_s, orthogonalization_time_s
from gssim.errors import UserError
from gssim.plan import largest_count
from gssim.plan.plan import TopK
from gssim.program import lower
from gssim.simulation import simulate
from gssim.workload import unrolled

METHODS = ("powersgd", "topk")
ALL_MATRICES = {"powersgd": {"rank": 1, "min_compression_ratio": 0.5}}
PLANS = {
    "overlapped": {},
    "blocking": {"overlap": False},
    "in small buckets": {"bucket_bytes": 80},
    "accumulated": {"micro_batches": 2},
    "unequal batches": {"shares": {"batch": [0.75, 0.25]}},
}


def scenario(method, *, cluster=None, precision="fp32", **plan):
    own = {method: ALL_MATRICES[method]} if method in ALL_MATRICES else {}
    cluster = cluster or star(2, bandwidth=1e5)
    return scenario_of(cluster, {"method": method} | own | plan, precision=precision, run={"warmup_steps": 2})


def result_of(method, **settings):
    return simulate(loaded_of(scenario(method, **settings))).result


def shapes():
    return [parameter.shape for each in unrolled(tiny_model()) for parameter in each.layer.parameters]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_powersgd_all_reduces_two_factors_of_every_matrix_and_the_other_tensors(plan):
    sent = 0
    for shape in shapes():
        elements, factors = math.prod(shape), shape[0] + math.prod(shape[1:])
        sent += factors if 0.5 * factors < elements else elements
    result = result_of("powersgd", **plan)
    assert {entry.kind for entry in result.collectives} == {"all-reduce"}
    assert sum(entry.bytes * entry.count for entry in result.collectives) == 4 * sent
    assert sent != tiny_model().elements


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_topk_gathers_values_and_indices_of_every_rank(plan):
    asked = scenario("topk", topk={"density_ratio": 0.25}, **plan)
    collectives = simulate(loaded_of(asked)).result.collectives
    assert {entry.kind for entry in collectives} == {"all-gather"}
    entries = sum(entry.bytes * entry.count for entry in collectives) / 2 / (4 + 4)
    buckets = [task.id.bucket for task in lower(asked).tasks[0] if task.id.op == "compress"]
    assert abs(entries - 0.25 * tiny_model().elements) <= len(buckets)
    assert largest_count(TopK(density_ratio=0.25), 10) == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_a_step_allocates_for_messages_it_frees(method, plan):
    for tasks in lower(scenario(method, **plan)).tasks:
        for category in ("communication", "temporaries"):
            assert sum(size for task in tasks for name, size in task.need.kept if name == category) == 0


@pytest.mark.parametrize(
    ("method", "options", "kept"),
    [
        ("powersgd", {"error_feedback": True, "warm_start": False}, {"residuals"}),
        ("powersgd", {"error_feedback": False, "warm_start": True}, {"low_rank_factors"}),
        ("powersgd", {"error_feedback": False, "warm_start": False}, set()),
        ("topk", {"error_feedback": True}, {"residuals"}),
        ("topk", {"error_feedback": False}, set()),
    ],
)
def test_residuals_and_factors_are_kept_where_they_are_asked_for(method, options, kept):
    asked = scenario(method, **{method: ALL_MATRICES.get(method, {}) | options})
    held = lower(asked).persistent[0]
    assert {name for name in ("residuals", "low_rank_factors") if held.get(name)} == kept
    if method == "topk" and kept:
        assert held["residuals"] == 4 * tiny_model().elements


@pytest.mark.parametrize("plan", [{}, {"overlap": False}], ids=["overlapped", "blocking"])
def test_gloo_stages_each_of_two_gathers_once(plan):
    asked = scenario("topk", topk={"density_ratio": 1.0}, **plan)
    sent = 2 * 4 * tiny_model().elements  # values and indices; gathered of two ranks, into a flat copy of the same size
    buckets = [task.id.bucket for task in lower(asked).tasks[0] if task.id.op == "compress"]
    assert len(buckets) == 1
    held = simulate(loaded_of(asked)).result.ranks[0].peak_by_category_bytes
    assert held["communication"] == sent + 2 * sent + 2 * sent


@pytest.mark.parametrize("method", METHODS)
def test_on_slow_links_a_step_gains_what_it_does_not_send(method):
    cluster = star(2, bandwidth=100.0)
    ddp = simulate(loaded_of(scenario_of(cluster, {"method": "ddp"}))).result
    result = result_of(method, cluster=cluster)
    assert result.step_time_s < 0.8 * ddp.step_time_s
    assert result.phases_s["compression"] > 0
    assert ddp.phases_s["compression"] == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ranks_in_classes_give_what_ranks_one_by_one_give(method, plan):
    loaded = loaded_of(scenario(method, **plan))
    folded, unfolded = (simulate(loaded, unfolded=each).result for each in (False, True))
    assert folded.step_time_s == pytest.approx(unfolded.step_time_s, rel=1e-9)
    assert folded.collectives == unfolded.collectives


def test_measured_costs_are_by_the_rank_of_the_factors():
    curve = Curve(sizes=(1.0, 3.0), values=(1e-9, 3e-9))
    curves = dict.fromkeys(("project_element_s", "factor_element_s", "restore_element_s"), curve)
    low_rank = LowRankCost(call_s=1e-6, orthogonalize_call_s=curve, orthogonalize_row_s=curve, **curves)
    elements = dict.fromkeys(("threshold_element_s", "pack_element_s", "scatter_element_s"), 1e-9)
    cost = CompressionCost(call_s=1e-6, low_rank=low_rank, **elements)
    device = replace(star(1).type_of(0), compression=cost)
    found = low_rank_product_time_s(device, "project", rows=10, columns=100, rank=2, value=4, precision="fp32")
    assert found == pytest.approx(1e-6 + 1000 * 2e-9)
    assert orthogonalization_time_s(device, rows=10, rank=2, value=4) == pytest.approx(2e-9 + 10 * 2e-9)


REFUSED = {
    "method 'powersgd' compresses gradients from step 2 on": ({"method": "powersgd"}, 1),
    "plan.topk: method 'ddp' does not compress": ({"method": "ddp", "topk": {"density_ratio": 0.5}}, 5),
    "plan.powersgd: method 'topk'": ({"method": "topk", "powersgd": {"rank": 3}}, 5),
    "plan.pp = 2: cannot run yet": ({"method": "topk", "pp": 2, "micro_batches": 2}, 5),
    "plan.compress = 'bf16': cannot run yet": ({"method": "powersgd", "compress": "bf16"}, 5),
    "summed already": ({"method": "powersgd", "micro_batches": 2, "gradient_sync": "micro-batch"}, 5),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_combine_is_refused_in_one_line(message):
    plan, warmup_steps = REFUSED[message]
    with pytest.raises(UserError) as refused:
        scenario_of(star(2), plan, run={"warmup_steps": warmup_steps})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("method", METHODS)
def test_random_points_include_them(method):
    assert method in {random_point(seed)["plan"]["method"] for seed in range(200)}
