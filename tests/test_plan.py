import pytest
from hypothesis import given
from hypothesis import strategies as st

from gssim.buckets import assign_buckets, bucket_limits
from gssim.plan import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES, MIB, Plan
from gssim.policies import PRESETS, refuse_what_cannot_run, resolve
from gssim.units import UserError


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


def test_axes_that_are_sized_are_kept():
    policies = resolve(Plan(method="zero2", dp_shard=2), devices=4)
    assert (policies.ranks, policies.data_ranks) == (2, 2)


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


@pytest.mark.parametrize("method", PRESETS)
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
