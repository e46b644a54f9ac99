"""ZeRO-1: replicas and all-reduced gradients as in DDP, but each tensor is updated by one rank, which broadcasts it."""

import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from point_checks import assert_same_as_unfolded
from strategies import (
    bytes_by_rank,
    communication_time_s,
    device_type,
    loaded_of,
    machine_of,
    scenario_of,
    scenarios,
    star,
    wired_scenarios,
    with_plan,
)
from tasks import communications_by_label

from gssim import cost
from gssim.cluster import Cluster
from gssim.collectives import Communication
from gssim.engine import Machine
from gssim.errors import UserError
from gssim.plan import splitting
from gssim.program import Lowering, lower
from gssim.result import Result
from gssim.scenario import Scenario, load_model, load_scenario
from gssim.simulation import simulate
from gssim.units import validated

ROOT = Path(__file__).resolve().parents[2]
GPU = device_type(
    kind="cuda", memory_bytes=80e9, peak_flop_per_s={"fp32": 1e14}, memory_bandwidth_bytes_per_s=2e12
)  # fmt: skip
PARAMETERS = 4 * 168
MODEL = load_model(ROOT / "scenarios" / "models" / "gpt-byte-1m.toml")


def tiny(ranks: int, *, cluster: dict[str, Any] | None = None, **workload: Any) -> Scenario:
    workload = {"global_batch_size": 2 * ranks} | workload
    return scenario_of(star(ranks, **cluster or {}), {"method": "zero1"}, **workload)


# Who updates what ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=40),
    st.integers(1, 9),
)
def test_tensors_are_dealt_out_as_zero_redundancy_optimizer_does_it(shapes: list[list[int]], ranks: int):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)  # its constructor needs a process group
    optimizer.world_size, optimizer.param_groups = ranks, [{"params": tensors}]
    optimizer._partition_parameters_cache = []
    place = {id(tensor): position for position, tensor in enumerate(tensors)}
    expected = tuple(
        tuple(place[id(tensor)] for group in of_rank for tensor in group["params"])
        for of_rank in optimizer._partition_parameters()
    )
    assert splitting.greedy([math.prod(shape) for shape in shapes], ranks) == expected


def test_the_largest_tensors_are_dealt_out_first_and_each_is_broadcast_by_its_owner():
    # 64 and 64, then 16 and 16, then 4 and 4 elements go to ranks 0 and 1 in turn
    program = lower(tiny(2))
    broadcasts = [each for task in program.tasks[0] if (each := task.communication) and each.op.startswith("broadcast")]
    assert [each.label for each in broadcasts] == [
        f"broadcast parameters {name}"
        for name in ("embedding.weight", "h.0.weight", "h.0.bias", "head.weight", "h.1.weight", "h.1.bias")
    ]
    found = [program.communications[each] for each in broadcasts]
    assert [(c.kind, c.root, c.size_bytes) for c in found] == [
        ("broadcast", rank, 4 * elements) for rank in (0, 1) for elements in (64, 16, 4)
    ]


@given(scenarios(methods=("zero1",)))
def test_every_tensor_is_updated_by_one_rank_and_broadcast_once(scenario: Scenario):
    low = Lowering(scenario, None, 0, range(scenario.ranks))
    owned = sorted(position for of_rank in low.owned_parameters for position in of_rank)
    assert owned == list(range(len(low.parameters)))
    found = [c for c in lower(scenario).communications.values() if c.kind == "broadcast"]
    assert sorted(c.size_bytes for c in found) == sorted(4 * p.elements for _, p in low.parameters)


def test_ranks_of_equal_tensors_have_one_role_and_others_their_own():
    assert lower(tiny(2)).role_of == (0, 0)
    # 64, 64, 16 + 4 and 16 + 4 elements; then 64, 64, 16, 16, 4 and 4; then nothing is left for two
    assert lower(tiny(4)).role_of == (0, 0, 1, 1)
    assert lower(tiny(6)).role_of == (0, 0, 1, 1, 2, 2)
    assert lower(tiny(8)).role_of == (0, 0, 1, 1, 2, 2, 3, 3)


def test_each_owner_sends_what_it_updates():
    machine, _ = machine_of(tiny(4))
    ring = 2 * 3 / 4 * PARAMETERS
    sent, received = bytes_by_rank(machine)
    # the root of a binomial tree over four sends twice, and the first that it sends to once
    owned = [4 * 64, 4 * 64, 4 * 20, 4 * 20]
    assert sent == pytest.approx([ring + 2 * owned[rank] + owned[rank - 1] for rank in range(4)])
    assert received == pytest.approx([ring + PARAMETERS - each for each in owned])


# Time ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_of_one_bucket_is_compute_all_reduce_the_largest_share_and_a_tree_for_every_tensor(
    ranks: int, optimizer: str
):
    rate, latency_s = 1e6, 1e-4
    settings = {"bandwidth": rate, "latency_s": latency_s, "types": {"fast": device_type(operation_overhead_s=1e-5)}}
    scenario = tiny(ranks, cluster=settings | {"backend": "nccl"}, optimizer=optimizer)  # one after another
    low = Lowering(scenario, None, 0, range(scenario.ranks))
    (bucket,) = low.buckets
    device = low.device(0)
    compute_s = sum(
        cost.layer_time_s(device, scenario.workload, each.layer, phase=phase, batch_size=2)
        for each in low.layers
        for phase in "fb"
    )
    copy_s = cost.copy_time_s(device, bucket.elements * 4)
    alone_s = partial(communication_time_s, scenario.cluster)
    reduce_s = alone_s(Communication("all-reduce", tuple(range(ranks)), PARAMETERS))  # nothing hides it: the bucket is
    # complete with the last gradient
    owned = [low.owned_elements(rank) for rank in range(ranks)]
    update_s = max(cost.optimizer_time_s(device, scenario.workload, elements=sum(e), tensors=len(e)) for e in owned)
    tensors = [each.elements * 4 for _, each in bucket.members]
    broadcast_s = sum(alone_s(Communication("broadcast", tuple(range(ranks)), size)) for size in tensors)
    step_s = simulate(loaded_of(scenario)).result.step_time_s
    assert step_s == pytest.approx(compute_s + copy_s + reduce_s + update_s + broadcast_s, rel=1e-9)


def test_what_is_broadcast_hides_behind_nothing_and_the_last_owner_is_waited_for():
    machine, _ = machine_of(tiny(3, cluster={"latency_s": 1e-4}))
    spans = sorted((s for s in machine.spans if s.rank == 0), key=lambda s: s.start_s)
    broadcasts = [s for s in spans if s.label.startswith("broadcast")]
    updated_s = max(s.end_s for s in machine.spans if s.label == "optimizer")
    assert len(broadcasts) == 6
    assert {s.stream for s in broadcasts} == {"communication 0", "communication 1"}  # gloo's threads
    assert broadcasts[0].end_s > updated_s
    (waits,) = (s for s in spans if s.stream == "compute" and s.start_s >= updated_s)
    assert (waits.phase, waits.end_s) == ("exposed_communication", machine.env.now)
    assert max(s.end_s for s in broadcasts) == machine.env.now


def test_gloo_broadcasts_two_tensors_at_once():
    """Measured in the lab: BERT on two ranks 10 ms apart took 1.1 s a step; one after another they make it 1.8 s."""
    cluster = {"bandwidth": 1e15, "latency_s": 1e-1}
    tasks = {each.label: each for each in machine_of(tiny(2, cluster=cluster))[0].spans if each.rank == 0}
    tensors = [each for label, each in tasks.items() if label.startswith("broadcast")]
    one_s = tensors[0].end_s - tensors[0].start_s
    assert len(tensors) == 6
    assert max(t.end_s for t in tensors) - min(t.start_s for t in tensors) == pytest.approx(3 * one_s, rel=1e-6)


def test_a_rank_alone_broadcasts_to_nobody_in_no_time():
    scenario = tiny(1)
    alone = with_plan(scenario, method="ddp")
    assert simulate(loaded_of(scenario)).result.step_time_s == simulate(loaded_of(alone)).result.step_time_s


@given(wired_scenarios(methods=("zero1",)))
def test_a_step_ends_on_any_cluster(scenario: Scenario):
    machine, program = machine_of(scenario, steps=2)
    assert all(ends_s[-1] > 0 for ends_s in machine.ends_s)
    orders = {tuple((t.communication, t.stream) for t in tasks if t.communication) for tasks in program.tasks}
    assert len(orders) == 1


def test_nccl_prices_a_broadcast_by_its_group_whatever_rank_is_the_root():
    scenario = tiny(4, cluster={"types": {"gpu": GPU}, "backend": "nccl", "bandwidth": 25e9})
    machine = Machine(scenario.cluster, lower(scenario))
    alone_s: dict[float, set[float]] = {}
    for name, each in machine.schedules.items():
        communication = communications_by_label(machine.program)[name]
        if communication.kind == "broadcast":
            alone_s.setdefault(communication.size_bytes, set()).add(round(each.alone_s(machine.network), 15))
    assert {size: len(found) for size, found in alone_s.items()} == {256: 1, 64: 1, 16: 1}


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_optimizer_state_is_held_by_owners_alone(ranks: int):
    scenario = tiny(ranks)
    low = Lowering(scenario, None, 0, range(scenario.ranks))
    program = lower(scenario)
    held = [program.persistent[role] for role in program.role_of]
    states = [8 * sum(owned) + 4 * len(owned) for owned in map(low.owned_elements, range(ranks))]
    assert [each["optimizer"] for each in held] == states
    assert sum(states) == 2 * PARAMETERS + 6 * 4
    assert {each["parameters"] for each in held} == {each["buckets"] for each in held} == {PARAMETERS}


def peaks_by_rank(result: Result) -> list[float]:
    found = {rank: each.peak_allocated_bytes for each in result.ranks for rank in each.ranks}
    return [found[rank] for rank in sorted(found)]


@given(scenarios(methods=("ddp",)))
def test_no_rank_holds_more_than_with_ddp_and_with_adamw_every_rank_less(scenario: Scenario):
    assume(scenario.ranks > 1)
    whole, dealt_out = (
        peaks_by_rank(simulate(loaded_of(with_plan(scenario, method=method))).result) for method in ("ddp", "zero1")
    )
    for before, after in zip(whole, dealt_out, strict=True):
        assert after <= before
        assert after < before or scenario.workload.optimizer != "adamw"


def gpt2_on_four_gpus(method: str) -> Result:
    cluster = star(4, types={"gpu": GPU}, bandwidth=25e9, latency_s=5e-6, backend="nccl")
    model = load_model(ROOT / "scenarios/models/gpt2-124m.toml")
    workload = {"model": model, "sequence_length": 1024, "global_batch_size": 32}
    return simulate(loaded_of(scenario_of(cluster, {"method": method}, **workload))).result


def test_gpt2_on_four_gpus_takes_less_than_ddp_and_more_than_zero2():
    ddp, zero1, zero2 = (peaks_by_rank(gpt2_on_four_gpus(method)) for method in ("ddp", "zero1", "zero2"))
    assert all(a > b > c for a, b, c in zip(ddp, zero1, zero2, strict=True))


def test_the_demo_takes_less_than_ddp_and_more_than_zero2():
    ddp, zero1, zero2 = (
        peaks_by_rank(simulate(load_scenario(ROOT / "scenarios/demo.toml", [f"plan.method={method}"])).result)
        for method in ("ddp", "zero1", "zero2")
    )
    assert all(a > b > c for a, b, c in zip(ddp, zero1, zero2, strict=True))


def test_replicas_whose_optimizer_is_sharded_are_zero1_by_another_name():
    by_policy = scenario_of(star(3), {"method": "ddp", "optimizer_state": "sharded"}, global_batch_size=6)
    assert lower(by_policy) == lower(tiny(3))


# DeepSpeed: even parts of a flat buffer ------------------------------------------------------------------------------

FLAT = {"method": "zero1", "zero1_implementation": "deepspeed"}


@pytest.mark.parametrize(("ranks", "part"), [(2, 84), (3, 56), (4, 42), (5, 34)])
def test_deepspeed_gives_each_rank_an_even_part_and_gathers_them_without_a_broadcast(ranks: int, part: int):
    scenario = scenario_of(star(ranks), FLAT, global_batch_size=2 * ranks)
    program = lower(scenario)
    found = [each for each in program.communications.values() if each.kind != "all-reduce"]
    assert [(each.kind, each.size_bytes) for each in found] == [("all-gather", 4 * ranks * part)]
    assert set(program.role_of) == {0}
    (held,) = program.persistent
    assert (held["parameters"], held["master_copy"]) == (4 * ranks * part, 4 * part)  # 168 elements, padded
    assert held["optimizer"] == pytest.approx(2 * 4 * part, abs=8)  # and a counter
    assert "buckets" not in held  # they exist in the backward only
    alone, whole = (simulate(loaded_of(each)).result for each in (scenario, tiny(ranks)))
    assert [e.key for e in alone.collectives if e.kind == "all-reduce"] == [
        e.key for e in whole.collectives if e.kind == "all-reduce"
    ]


def test_deepspeed_gathers_large_parts_in_buckets_of_5e8_elements():
    model = load_model(ROOT / "scenarios" / "models" / "llama3-8b.toml")
    cluster = star(8, types={"fast": GPU}, backend="nccl")
    scenario = scenario_of(cluster, FLAT, model=model, global_batch_size=8, sequence_length=64, precision="fp32")
    low = Lowering(scenario, None, 0, range(8))
    found = [each for each in lower(scenario).communications.values() if each.kind == "all-gather"]
    assert len(found) == 8 * low.flat_part // 500_000_000
    assert sum(each.size_bytes for each in found) == 4 * 8 * low.flat_part
    assert model.elements <= 8 * low.flat_part < model.elements + 16


FLAT2 = {"method": "zero2", "zero2_implementation": "deepspeed"}


def peak_of(plan: dict[str, Any], **workload: Any) -> dict[str, float]:
    scenario = scenario_of(star(4), plan, global_batch_size=8, **workload)
    return dict(simulate(loaded_of(scenario)).result.ranks[0].peak_by_category_bytes)


def test_deepspeeds_first_stage_reduces_after_the_backward_unless_it_overlaps():
    """DeepSpeed's default: all gradients exist at once. Its stage 2 reduces them in the backward even then."""
    of = {"bucket_bytes": 4 * 60, "overlap": False}
    for plan, after in ((FLAT, True), (FLAT2, False)):
        scenario = scenario_of(star(2), plan | of, global_batch_size=4)
        tasks = lower(scenario).tasks[0]
        end = next(place for place, task in enumerate(tasks) if task.id.op == "backward-end")
        gradients_bytes = sum(dict(task.need.kept).get("gradients", 0.0) for task in tasks[:end])
        assert gradients_bytes == (PARAMETERS if after else PARAMETERS / 2)
        assert all((place > end) == after for place, task in enumerate(tasks) if task.id.bucket is not None)
        low = Lowering(scenario, None, 0, range(2))
        assert (low.buckets[0].members[0] == low.parameters[0]) == after


STAGED = FLAT | {"pp": 2, "dp_replicate": 2, "micro_batches": 2}


@pytest.mark.parametrize("overlap", [False, True])
def test_deepspeeds_stages_reduce_in_their_order_after_the_last_backward_and_free_what_they_allocate(overlap: bool):
    """Whatever overlap_comm says: runtime/engine.py turns it off in pipelines. Their buffer is as large as a bucket,
    and exists while they reduce; they had DDP's buckets, beside the last backward, as large as all gradients."""
    limit = 4 * 60
    scenario = scenario_of(star(4), STAGED | {"overlap": overlap, "bucket_bytes": limit}, global_batch_size=8)
    program = lower(scenario)
    assert {"buckets"}.isdisjoint({name for held in program.persistent for name in held})
    for tasks in program.tasks:
        ops = [task.id.op for task in tasks]
        last = max(place for place, op in enumerate(ops) if op == "backward-end")
        reduced = [
            place for place, task in enumerate(tasks) if task.id.op == "all-reduce" and task.id.bucket is not None
        ]
        assert reduced
        assert min(reduced) > last
        assert dict(tasks[min(reduced)].need.peak)["buckets"] == limit
        left: dict[str, float] = {}
        for task in tasks:
            for category, size in task.need.kept:
                left[category] = left.get(category, 0.0) + size
                assert left[category] >= 0
        assert not any(left.values()), left


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [FLAT, FLAT2])
@pytest.mark.parametrize("limit", [4 * 40, 8 * 2**10])
def test_deepspeeds_steps_free_all_that_they_allocate(stage, overlap, micro_batches, limit):
    """With sums in another precision too: the gradients of a rank's part were freed, but not allocated."""
    plan = stage | {"overlap": overlap, "micro_batches": micro_batches, "bucket_bytes": limit}
    for precision in ("bf16", "fp32"):
        program = lower(scenario_of(star(2), plan, global_batch_size=8, precision="bf16", reduce_precision=precision))
        left: dict[str, float] = {}
        for task in program.tasks[0]:
            for category, size in task.need.kept:
                left[category] = left.get(category, 0.0) + size
                assert left[category] >= 0
        assert not any(left.values())


def test_deepspeeds_sums_in_another_precision_are_of_one_bucket_at_a_time():
    limit = 2 * 60
    plan = FLAT2 | {"bucket_bytes": limit}
    of = {"precision": "bf16", "reduce_precision": "fp32"}
    program = lower(scenario_of(star(2), plan, global_batch_size=4, **of))
    reduced = [each.size_bytes for each in program.communications.values() if each.kind == "all-reduce"]
    assert sum(reduced) == PARAMETERS
    copies = [task for task in program.tasks[0] if task.id.action == "copy-in" and task.id.op == "all-reduce"]
    assert len(copies) == len(reduced) > 1
    for copy, size in zip(copies, reduced, strict=True):
        assert dict(copy.need.peak)["communication"] == size + size / 2
        assert "communication" not in dict(copy.need.kept)


def test_deepspeeds_two_stages_are_the_same_in_a_single_micro_batch():
    one, two = (lower(scenario_of(star(4), plan, global_batch_size=8)) for plan in (FLAT, FLAT2))
    assert one == two


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_deepspeeds_second_stage_all_reduces_in_every_micro_batch_and_gathers_once_a_step(micro_batches: int):
    """DeepSpeed's default, use_multi_rank_bucket_allreduce: the bytes of an all-reduce, not of a reduce-scatter."""
    program = lower(scenario_of(star(4), FLAT2 | {"micro_batches": micro_batches}, global_batch_size=8))
    found = sorted((each.kind, each.size_bytes) for each in program.communications.values())
    assert found == [("all-gather", PARAMETERS), *[("all-reduce", PARAMETERS)] * micro_batches]


def test_deepspeeds_first_stage_accumulates_whole_gradients_and_its_second_one_a_part():
    """Rank of four: 42 of 168 elements; a second micro-batch's part exists until it is added to the first one's."""
    buffers, elements = 8 * 2**10, 168
    of = {"micro_batches": 2, "bucket_bytes": buffers, "overlap": False}
    first, second = peak_of(FLAT | of), peak_of(FLAT2 | of)
    assert (first["buckets"], second["buckets"]) == (buffers, buffers)
    assert first["gradients"] >= 4 * elements > second["gradients"] >= 4 * elements / 4
    assert peak_of(FLAT2 | of | {"overlap": True})["buckets"] == 2 * buffers


def test_deepspeeds_buckets_hold_no_more_than_their_limit_and_a_larger_tensor_is_alone():
    limit = 4 * 40
    low = Lowering(scenario_of(star(2), FLAT2 | {"bucket_bytes": limit}, global_batch_size=4), None, 0, range(2))
    sizes = [4 * bucket.elements for bucket in low.buckets]
    assert sum(sizes) == PARAMETERS
    assert all(size <= limit or len(bucket.members) == 1 for size, bucket in zip(sizes, low.buckets, strict=True))
    assert any(size > limit for size in sizes)
    assert any(len(bucket.members) > 1 for bucket in low.buckets)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"method": "zero3"}, "method 'zero3' is not 'zero2'; leave it out"),
        ({"pp": 2, "micro_batches": 2}, r"plan.pp = 2: DeepSpeed's pipelines take no ZeRO-2"),
        ({"gradient_sync": "step"}, "gradients are freed after every micro-batch"),
        ({"compress": "bf16"}, r"plan.zero2_implementation = 'deepspeed'; allowed with 'torch'"),
        ({"zero1_implementation": "megatron"}, "plan.zero1_implementation = 'megatron' is for 'zero1'"),
        ({"optimizer_state": "replicated"}, "each rank updates a part; allowed: 'sharded'"),
    ],
)
def test_deepspeeds_second_stage_is_refused_where_there_is_none(more: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        scenario_of(star(4), FLAT2 | more, global_batch_size=8)


@pytest.mark.parametrize("plan", [FLAT, FLAT2])
def test_deepspeeds_stages_keep_no_gradients_in_another_precision(plan: dict[str, Any]):
    with pytest.raises(UserError, match="keeps no whole gradients until the update"):
        scenario_of(star(4), plan, global_batch_size=8, precision="bf16", gradient_precision="fp32")


MEGATRON = {"method": "zero1", "zero1_implementation": "megatron"}


@pytest.mark.parametrize(("ranks", "part"), [(2, 84), (3, 56), (4, 42)])
def test_megatron_reduce_scatters_the_only_gradients_and_gathers_even_parts(ranks: int, part: int):
    scenario = scenario_of(star(ranks), MEGATRON, global_batch_size=2 * ranks)
    program = lower(scenario)
    found = sorted((each.kind, each.size_bytes) for each in program.communications.values())
    assert found == [("all-gather", 4 * ranks * part), ("reduce-scatter", PARAMETERS)]
    (held,) = program.persistent
    assert (held["parameters"], held["buckets"]) == (4 * ranks * part, PARAMETERS)
    assert "master_copy" not in held  # a part of fp32 parameters is a view of them
    peak = simulate(loaded_of(scenario)).result.ranks[0].peak_by_category_bytes
    assert "gradients" not in peak


def test_megatrons_float_gradients_take_4_bytes_an_element_beside_2_of_a_parameter():
    """Megatron-LM's documents: 6 + 12/d bytes a parameter with bf16 parameters and fp32 gradients."""
    more = {"precision": "bf16", "gradient_precision": "fp32", "reduce_precision": "fp32"}
    program = lower(scenario_of(star(4), MEGATRON, global_batch_size=8, **more))
    (held,) = program.persistent
    sizes = {key: held[key] for key in ("parameters", "buckets", "master_copy")}
    assert sizes == {"parameters": 2 * 168, "buckets": PARAMETERS, "master_copy": 4 * 42}
    assert {each.size_bytes for each in program.communications.values()} == {PARAMETERS, 2 * 168}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("bucket_bytes", "gathered"),
    [(80, [256, 80, 80, 256]), ("1 MB", [672]), (1, [256, 16, 64, 16, 64, 256])],
)
def test_of_megatrons_gathers_beside_the_next_forward_the_first_alone_is_exposed(
    bucket_bytes: Any, gathered: list[int], micro_batches: int
):
    """Each further one is issued when the layer before it begins, and layers take longer than gathers here."""
    slow = device_type(kind="cuda", memory_bytes=1e9, peak_flop_per_s={"fp32": 1e7}, memory_bandwidth_bytes_per_s=1e7)
    cluster = star(4, types={"gpu": slow}, bandwidth=25e9, latency_s=5e-6, backend="nccl")
    plan = MEGATRON | {"bucket_bytes": bucket_bytes, "micro_batches": micro_batches}
    after, beside = (
        scenario_of(cluster, plan | {"publish": {"overlap": overlap}}, global_batch_size=8 * micro_batches)
        for overlap in (False, True)
    )
    assert after.scenario_id != beside.scenario_id
    (whole,), gathers = (
        [each for each in lower(scenario).communications.values() if each.kind == "all-gather"]
        for scenario in (after, beside)
    )
    assert [each.size_bytes for each in gathers] == gathered
    results = [simulate(loaded_of(each)).result for each in (after, beside)]
    hidden_s = communication_time_s(cluster, whole) - communication_time_s(cluster, gathers[0])
    assert results[0].step_time_s - results[1].step_time_s == pytest.approx(hidden_s, abs=1e-12)
    assert results[0].ranks[0].peak_by_category_bytes == results[1].ranks[0].peak_by_category_bytes


def both_gathers(cluster: Cluster, *, samples: int = 16, clip_norm: float | None = None, **plan: Any) -> list[Scenario]:
    """Return a pipeline whose gathers follow the update, and one whose gathers are beside the next forwards."""
    settings: dict[str, Any] = {"model": MODEL, "global_batch_size": samples, "clip_norm": clip_norm}
    return [
        scenario_of(cluster, MEGATRON | plan | {"publish": {"overlap": overlap}}, **settings)
        for overlap in (False, True)
    ]


def slow_gpus(ranks: int, **network: Any) -> Cluster:
    gpu = device_type(kind="cuda", memory_bytes=1e9, peak_flop_per_s={"fp32": 1e9}, memory_bandwidth_bytes_per_s=1e8)
    return star(ranks, types={"gpu": gpu}, backend="nccl", **network)


def gathers_of(scenario: Scenario) -> list[Communication]:
    return [each for each in lower(scenario).communications.values() if each.kind == "all-gather"]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_without_virtual_stages_all_stages_but_megatrons_first_gather_one_after_another(micro_batches: int):
    """Each begins when activations arrive. After the update they gather at once, and the first is the last to end."""
    cluster = slow_gpus(6, bandwidth=25e9, latency_s=5e-6)
    after, beside = both_gathers(cluster, pp=3, micro_batches=micro_batches, bucket_bytes=400_000)
    at_end_s = {each.group[0]: communication_time_s(cluster, each) for each in gathers_of(after)}
    gathers_s = defaultdict(list)
    for each in gathers_of(beside):
        gathers_s[each.group[0]].append(communication_time_s(cluster, each))
    assert {first: len(each) for first, each in gathers_s.items()} == {0: 3, 2: 1, 4: 1}  # the first stage's buckets
    results = [simulate(loaded_of(each)).result for each in (after, beside)]
    exposed_s = gathers_s[0][0] + gathers_s[2][0] + gathers_s[4][0]
    longer_s, most_s = results[1].step_time_s - results[0].step_time_s, exposed_s - at_end_s[0]
    if micro_batches == 1:
        assert longer_s == pytest.approx(most_s, abs=1e-9)
    assert 0 < longer_s <= most_s + 1e-9  # stages are uneven: of several micro-batches, some wait less for a later one
    assert results[0].ranks[0].peak_by_category_bytes == results[1].ranks[0].peak_by_category_bytes


def test_of_virtual_stages_megatrons_gathers_the_very_first_alone_is_exposed():
    """The rank's next is issued with it, and runs beside the forwards; other ranks wait for activations meanwhile."""
    cluster = slow_gpus(4, bandwidth=25e9, latency_s=5e-6)
    after, beside = both_gathers(cluster, pp=2, micro_batches=4, schedule="interleaved", bucket_bytes="100 MB")
    at_end_s, gathers = communication_time_s(cluster, gathers_of(after)[0]), gathers_of(beside)
    assert [tuple(each.group) for each in gathers] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    results = [simulate(loaded_of(each)).result for each in (after, beside)]
    hidden_s = at_end_s - communication_time_s(cluster, gathers[0])
    assert hidden_s > 0
    assert results[0].step_time_s - results[1].step_time_s == pytest.approx(hidden_s, abs=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_on_a_network_without_delay_it_does_not_matter_when_stages_gather(schedule: str):
    """All that is left is the fixed time of each gather."""
    cluster = slow_gpus(4, bandwidth=1e18, latency_s=0)
    scenarios = both_gathers(cluster, pp=2, micro_batches=4, schedule=schedule)
    fixed_s = sum(communication_time_s(cluster, each) for each in gathers_of(scenarios[1]))
    steps_s = [simulate(loaded_of(each)).result.step_time_s for each in scenarios]
    assert fixed_s < 1e-4 * steps_s[0]
    assert steps_s[0] == pytest.approx(steps_s[1], abs=fixed_s)


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e10])
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_aligned_gathers_beside_forwards_never_make_a_step_longer(pp: int, bandwidth: float, clip_norm: float | None):
    cluster = slow_gpus(2 * pp, bandwidth=bandwidth, latency_s=0)
    plan = {"pp": pp, "micro_batches": 2 * pp, "schedule": "interleaved"}
    scenarios = both_gathers(cluster, samples=4 * pp, clip_norm=clip_norm, **plan)
    steps_s = [simulate(loaded_of(each)).result.step_time_s for each in scenarios]
    assert steps_s[1] <= steps_s[0] * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("bucket_bytes", [1, "100 MB"])
def test_gathers_of_stages_are_the_same_on_every_rank_and_folded(schedule: str, bucket_bytes: Any):
    """Buckets of a tensor each: the last layer of a stage has several."""
    plan = {"pp": 2, "micro_batches": 4, "schedule": schedule, "bucket_bytes": bucket_bytes}
    loaded = loaded_of(both_gathers(slow_gpus(4), **plan)[1])
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)
    gathered = sum(each.size_bytes for each in gathers_of(loaded.scenario))
    assert gathered == 4 * sum(
        p.elements for stage in loaded.scenario.stages for i in stage for p in i.layer.parameters
    )


@pytest.mark.parametrize(
    ("plan", "workload", "said"),
    [
        ({"overlap": False}, {}, "plan.overlap = false"),
        ({}, {"optimizer": "muon"}, "with workload.optimizer = 'muon'"),
        ({"zero1_implementation": "torch"}, {}, "'zero1' publishes no parameters.*, or zero1 with .* 'megatron'"),
    ],
)
def test_where_megatrons_gathers_beside_the_forward_are_not_modelled_they_are_refused(
    plan: dict[str, Any], workload: dict[str, Any], said: str
):
    cluster = star(4, types={"gpu": GPU}, backend="nccl")
    with pytest.raises(UserError, match=said):
        scenario_of(cluster, MEGATRON | {"publish": {"overlap": True}} | plan, global_batch_size=8, **workload)
    with pytest.raises(UserError, match="with the backend 'nccl' alone"):
        scenario_of(star(4), MEGATRON | {"publish": {"overlap": True}}, global_batch_size=8)


def test_which_zero1_it_is_makes_another_question_only_where_it_is_not_torchs():
    usual, said, other = (
        scenario_of(star(2), {"method": "zero1"} | more)
        for more in ({}, {"zero1_implementation": "torch"}, {"zero1_implementation": "deepspeed"})
    )
    assert usual.scenario_id == said.scenario_id != other.scenario_id
    assert "zero1_implementation" not in said.resolved()["plan"]
    assert validated(Scenario, other.resolved(), file="made").scenario_id == other.scenario_id


def test_deepspeeds_zero1_is_refused_where_there_is_none_and_where_it_would_run():
    with pytest.raises(UserError, match=r"zero1_implementation = .deepspeed.: method .ddp. is no ZeRO-1; allowed"):
        scenario_of(star(2), FLAT | {"method": "ddp"})
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.run.checks import check_real

    loaded = load_scenario(ROOT / "scenarios" / "demo.toml", [f"plan.{key}={value}" for key, value in FLAT.items()])
    with pytest.raises(UserError, match="'deepspeed': can be predicted, but not run; allowed: 'torch'"):
        check_real(loaded)
