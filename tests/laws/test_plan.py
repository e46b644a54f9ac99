import pytest
from hypothesis import given
from hypothesis import strategies as st

from gssim.errors import UserError
from gssim.plan import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BUCKET_BYTES,
    METHODS,
    MIB,
    Plan,
    assign_buckets,
    bucket_limits,
    resolve,
)
from gssim.plan.policies import refuse_what_cannot_run


def buckets(sizes, first=MIB, cap=25 * MIB):
    return assign_buckets(sizes, first_bytes=first, cap_bytes=cap)


def test_pytorchs_default_buckets_are_1_and_25_mib():
    assert (DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES) == (1048576, 26214400)


def test_the_first_bucket_closes_early_and_the_others_at_the_cap():
    assert buckets([MIB // 2] * 54) == [[0, 1], list(range(2, 52)), [52, 53]]


def test_a_bucket_takes_the_tensor_that_carries_it_over_its_limit():
    assert buckets([3, 90, 20, 3], first=4, cap=100) == [[0, 1], [2, 3]]
    assert buckets([4, 99, 500, 1], first=4, cap=100) == [[0], [1, 2], [3]]


def test_a_bucket_that_reaches_its_limit_exactly_is_closed():
    assert buckets([2, 2, 50, 50, 1], first=4, cap=100) == [[0, 1], [2, 3], [4]]


def test_a_tensor_larger_than_the_limit_still_travels_whole():
    assert buckets([100 * MIB, 1, 100 * MIB]) == [[0], [1, 2]]


def test_no_tensors_make_no_buckets():
    assert buckets([]) == []


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 500), st.integers(1, 2000))
def test_buckets_hold_every_tensor_once_in_order_and_only_the_last_is_below_its_limit(sizes, first, cap):
    found = buckets(sizes, first, cap)
    assert [position for bucket in found for position in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(found):
        limit = cap if number else first
        held = [sizes[position] for position in bucket]
        assert sum(held[:-1]) < limit
        assert number == len(found) - 1 or sum(held) >= limit


@pytest.mark.parametrize(
    ("method", "axes"),
    [
        ("single", (1, 1, 1, 1)),
        ("ddp", (4, 1, 1, 1)),
        ("zero1", (4, 1, 1, 1)),
        ("zero2", (1, 4, 1, 1)),
        ("gs", (1, 4, 1, 1)),
        ("tensor", (1, 1, 4, 1)),
        ("pipeline", (1, 1, 1, 4)),
    ],
)
def test_axes_that_nobody_sizes_take_all_devices(method, axes):
    policies = resolve(Plan(method=method), devices=4)
    assert (policies.dp_replicate, policies.dp_shard, policies.tp, policies.pp) == axes


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        ({"method": "ddp", "tp": 2}, (4, 1, 2, 1)),
        ({"method": "ddp", "tp": 2, "pp": 2}, (2, 1, 2, 2)),
        ({"method": "ddp", "dp_shard": 1, "pp": 8}, (1, 1, 1, 8)),
        ({"method": "zero1", "pp": 2}, (4, 1, 1, 2)),
        ({"method": "zero2", "tp": 4}, (1, 2, 4, 1)),
        ({"method": "zero3", "dp_replicate": 2}, (2, 4, 1, 1)),
        ({"method": "fsdp", "dp_replicate": 2, "tp": 2}, (2, 2, 2, 1)),
        ({"method": "gs", "tp": 2}, (1, 4, 2, 1)),
        ({"method": "gs_z3", "ranks": 6, "tp": 2}, (1, 3, 2, 1)),
        ({"method": "gs_wgrad", "ranks": 3}, (1, 3, 1, 1)),
        ({"method": "tensor", "ranks": 2}, (1, 1, 2, 1)),
        ({"method": "tensor", "pp": 2}, (1, 1, 4, 2)),
        ({"method": "gs_tp", "tp": 2, "gradients": "all-reduce"}, (4, 1, 2, 1)),
        ({"method": "gs_tp", "gradients": "all-reduce"}, (1, 1, 8, 1)),
        ({"method": "pipeline", "tp": 2}, (1, 1, 2, 4)),
        ({"method": "hsdp"}, (2, 4, 1, 1)),
        ({"method": "hsdp", "tp": 2}, (2, 2, 2, 1)),
        ({"method": "hsdp", "dp_shard": 2}, (4, 2, 1, 1)),
        ({"method": "hsdp", "dp_replicate": 2, "tp": 2}, (2, 2, 2, 1)),
        ({"method": "hsdp", "ranks": 4}, (1, 4, 1, 1)),
        ({"method": "gs_hier", "dp_shard": 2, "tp": 4}, (1, 2, 4, 1)),
        ({"method": "single"}, (1, 1, 1, 1)),
        ({"method": "single", "ranks": 1}, (1, 1, 1, 1)),
        ({"method": "zero2", "ranks": 2, "dp_shard": 2}, (1, 2, 1, 1)),
        ({"method": "zero2", "dp_shard": 2}, (4, 2, 1, 1)),
        ({"method": "zero3", "dp_shard": 2, "tp": 2}, (2, 2, 2, 1)),
    ],
)
def test_the_methods_own_axis_takes_what_the_sized_axes_leave(plan, axes):
    policies = resolve(Plan(**plan), devices=8, hosts=["a"] * 4 + ["b"] * 4)
    assert (policies.dp_replicate, policies.dp_shard, policies.tp, policies.pp) == axes


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"method": "ddp", "tp": 3}, "plan.tp = 3: does not divide the 8 devices of the cluster, the rest of which "
         "plan.dp_replicate takes; allowed: a product that divides 8, or plan.ranks = 6, which leaves"),
        ({"method": "gs", "tp": 2, "ranks": 5}, "plan.tp = 2: does not divide plan.ranks = 5, .* or plan.ranks = 4,"),
        ({"method": "zero2", "dp_shard": 3}, "plan.dp_shard = 3: does not divide the 8 devices of the cluster, "
         "the rest of which plan.dp_replicate takes; allowed: a product that divides 8, or plan.ranks = 6"),
        ({"method": "gs", "dp_shard": 2}, "plan.dp_shard = 2: makes 2 of the 8 devices of the cluster; "
         "allowed: plan.dp_shard = 8, or plan.ranks = 2, which leaves the other devices out"),
        ({"method": "zero2", "dp_shard": 2, "dp_replicate": 2}, "makes 4 of the 8 devices of the cluster"),
        ({"method": "ddp", "dp_replicate": 3}, "plan.dp_replicate = 3: .*; allowed: a product of 8, or plan.ranks = 3"),
        ({"method": "ddp", "dp_replicate": 2, "tp": 2}, "plan.dp_replicate = 2 . plan.tp = 2: makes 4 of"),
        ({"method": "tensor", "tp": 2}, "plan.tp = 2: makes 2 .* plan.tp = 8, method 'ddp' or 'zero1' for replicas"),
        ({"method": "pipeline", "pp": 2, "tp": 2}, "allowed: plan.pp = 4, method 'ddp' or 'zero1' for replicas, or"),
        ({"method": "hsdp", "tp": 8}, "plan.tp = 8: does not divide the 4 devices of a host, on which method 'hsdp'"),
        ({"method": "hsdp", "ranks": 6}, "hosts have 4, 2 devices one after another"),
        ({"method": "gs", "dp_shard": 9}, "plan.dp_shard = 9: needs 9 ranks, but the cluster has 8 devices"),
        ({"method": "gs", "dp_shard": 4, "ranks": 2}, "plan.dp_shard = 4: needs 4 ranks, but plan.ranks = 2"),
        ({"method": "gs", "ranks": 9}, "plan.ranks = 9: the cluster has 8 devices; allowed: at most 8"),
        ({"method": "single", "ranks": 2}, "plan.ranks = 2: method 'single' takes one; allowed: 1, or leave it out"),
    ],
)  # fmt: skip
def test_sizes_that_leave_devices_idle_unasked_are_refused(plan, message):
    with pytest.raises(UserError, match=message) as told:
        resolve(Plan(**plan), devices=8, hosts=["a"] * 4 + ["b"] * 4)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("method", "policies"),
    [
        ("single", ("data", "replicated", "local", "step", "replicated")),
        ("ddp", ("data", "replicated", "all-reduce", "step", "replicated")),
        ("zero1", ("data", "replicated", "all-reduce", "step", "sharded")),
        ("zero2", ("data", "gathered", "reduce-scatter", "micro-batch", "sharded")),
        ("zero3", ("data", "sharded", "reduce-scatter", "micro-batch", "sharded")),
        ("fsdp", ("data", "sharded", "reduce-scatter", "micro-batch", "sharded")),
        ("gs", ("data", "replicated", "push", "step", "sharded")),
        ("gs_z3", ("data", "sharded", "push", "micro-batch", "sharded")),
        ("gs_wgrad", ("weight-gradient", "replicated", "local", "step", "sharded")),
    ],
)
def test_a_method_is_a_preset_over_policies(method, policies):
    found = resolve(Plan(method=method), devices=2)
    assert (found.partition, found.parameters, found.gradients, found.gradient_sync, found.optimizer_state) == policies


def test_a_policy_that_the_user_sets_overrides_the_methods():
    assert resolve(Plan(method="zero2", gradient_sync="step"), devices=2).gradient_sync == "step"
    assert resolve(Plan(method="ddp", optimizer_state="sharded"), devices=2).optimizer_state == "sharded"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs(method):
    plan = Plan(method=method)
    assert refuse_what_cannot_run(plan, resolve(plan, devices=2), file="f") is None


@pytest.mark.parametrize(
    "setting",
    [{"tp": 2, "partition": "weight-gradient"}, {"parameters": "sharded"}, {"partition": "weight-gradient"}],
)
def test_an_override_that_makes_a_plan_impossible_today_is_refused(setting):
    plan = Plan(method="ddp", **setting)
    with pytest.raises(UserError, match="cannot run yet"):
        refuse_what_cannot_run(plan, resolve(plan, devices=2), file="f")


def test_ddp_closes_its_first_bucket_early_only_at_the_default_cap():
    def limits(method, **settings):
        plan = Plan(method=method, **settings)
        return bucket_limits(plan, resolve(plan, devices=2))

    assert limits("ddp") == (MIB, 25 * MIB)
    assert limits("ddp", bucket_bytes="4 MiB") == (4 * MIB, 4 * MIB)
    assert limits("gs", bucket_bytes="4 MiB") == (MIB, 4 * MIB)
