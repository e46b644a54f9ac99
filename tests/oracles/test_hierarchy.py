"""Two levels of data parallelism (hsdp, gs_hier), and Gradient Sharding with parameters sharded at rest (gs_z3)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    PARAMETER_BYTES,
    built,
    cluster_of,
    compositions,
    device_type,
    exponential_statistics,
    fabrics,
    link_type,
    loaded_of,
    machine_of,
    scenario_of,
    star,
)
from tasks import labels_of
from test_folding import assert_folding_changes_nothing
from test_zero3 import most_held

from gssim.cluster import Cluster
from gssim.errors import UserError
from gssim.memory import Footprint
from gssim.plan import Plan, Push, divide, resolve
from gssim.program import Program, Steps, Task, TaskId, lower
from gssim.result import Result
from gssim.scenario import Scenario
from gssim.simulation import simulate
from gssim.sparsity import push_ratios

ELEMENTS = PARAMETER_BYTES // 4
ROOT, BLOCK = 128, 20
"""Elements of the tiny model's root and of each of its two blocks."""


def grid(
    method: str, nodes: int, devices: int, *, cluster: Cluster | None = None, global_batch_size: int = 8, **plan: Any
) -> Scenario:
    """Return a scenario on nodes of so many devices each."""
    plan |= {"method": method, "ranks": nodes * devices, "dp_replicate": nodes, "dp_shard": devices}
    return scenario_of(cluster or servers(nodes, devices), plan, optimizer="sgd", global_batch_size=global_batch_size)


def servers(count: int, devices: int, **changes: Any) -> Cluster:
    """Return servers whose devices have a card each, all behind one switch."""
    kind = {"count": count, "device": "fast", "devices": devices, "nics": devices, "nic_link": link_type(1e6)}
    inside = {"inside": "nvswitch", "inside_link": link_type(1e7), "pcie_link": link_type(1e7)}
    return built({"kind": "servers", "servers": [kind | inside], "fabric": {"kind": "switch"}}, **changes)


def result_of(scenario: Scenario) -> Result:
    return simulate(loaded_of(scenario)).result


def entries(result: Result) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [(each.kind, each.group, each.bytes, each.count) for each in result.collectives]


def held_after(tasks: Sequence[Task]) -> dict[str, float]:
    """Return what tasks leave, by category."""
    left: dict[str, float] = defaultdict(float)
    for task in tasks:
        for category, size in task.need.kept:
            left[category] += size
    return left


# The plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hsdp", "gs_hier"])
def test_axes_that_nobody_sizes_are_the_devices_of_a_host_and_the_hosts(method):
    policies = resolve(Plan(method=method), devices=6, hosts=["a", "a", "b", "b", "c", "c"])
    assert (policies.dp_replicate, policies.dp_shard) == (3, 2)
    found = scenario_of(servers(2, 4), {"method": method}).policies
    assert (found.dp_replicate, found.dp_shard) == (2, 4)


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "a", "b"]])
def test_hosts_that_are_not_alike_need_sizes(hosts):
    with pytest.raises(UserError, match=r"hosts have .* set plan\.dp_replicate or plan\.dp_shard"):
        resolve(Plan(method="hsdp"), devices=len(hosts), hosts=hosts)


def test_of_one_size_alone_the_other_follows_whatever_the_hosts_are():
    policies = resolve(Plan(method="gs_hier", dp_shard=2), devices=4, hosts=["a", "b", "a", "b"])
    assert (policies.dp_replicate, policies.dp_shard) == (2, 2)


# Groups that are alike -----------------------------------------------------------------------------------------------


@st.composite
def equals(draw: st.DrawFn) -> Cluster:
    """Draw equal devices behind one switch or two, some of whose links are slower or longer than the others."""
    devices = draw(st.sampled_from([4, 6, 8]))
    pairs = [(f"d{i}", "sw" if i % 2 else draw(st.sampled_from(["sw", "other"]))) for i in range(devices)]
    cluster = cluster_of([*pairs, ("sw", "other")], devices=devices, switches=["sw", "other"], bandwidth=1e6)
    changes = st.sampled_from([{"bandwidth_bytes_per_s": 2.5e5}, {"latency_s": 5e-4}])
    odd = draw(st.dictionaries(st.integers(0, devices - 1), changes, max_size=3))
    links = tuple(replace(link, **odd.get(i, {})) for i, link in enumerate(cluster.links))
    return replace(cluster, links=links, backend=draw(st.sampled_from(["gloo", "nccl"])))


@st.composite
def grids(draw: st.DrawFn, *, methods: tuple[str, ...]) -> Scenario:
    """Draw a plan on two axes, on a cluster wired in any way; shares even, or uneven in steps."""
    cluster = draw(st.one_of(equals(), equals(), fabrics(most=8)))
    nodes = draw(st.integers(1, len(cluster.devices) // 2 or 1))
    devices = len(cluster.devices) // nodes
    ranks, method = nodes * devices, draw(st.sampled_from(methods))
    plan: dict[str, Any] = {
        "method": method,
        "overlap": draw(st.booleans()),
        "bucket_bytes": draw(st.sampled_from([64, 100, 300, 25 * 2**20])),
        "recompute": draw(st.sampled_from(["none", "full"])),
        "micro_batches": draw(st.sampled_from([1, 1, 2])),
        "gradient_sync": draw(st.sampled_from(["step", "micro-batch"])),
        "parameters": draw(st.sampled_from(["gathered", "sharded"])) if method in ("hsdp", "gs_z3") else None,
    }
    plan |= {"ranks": ranks}
    plan |= {"dp_shard": ranks} if method == "gs_z3" else {"dp_replicate": nodes, "dp_shard": devices}
    samples = draw(compositions(total=3 * ranks, parts=ranks, least=2)) if draw(st.booleans()) else (3,) * ranks
    plan["shares"] = {"batch": tuple(each / (3 * ranks) for each in samples)}
    if method != "hsdp":
        shards = draw(st.lists(st.sampled_from([0, 1, 1, 2]), min_size=ranks, max_size=ranks).filter(any))
        if draw(st.booleans()):
            plan["shares"]["shards"] = tuple(each / sum(shards) for each in shards)
        plan["push"] = {"threshold": draw(st.sampled_from([None, None, 0.0, 1e-3]))}
    run = {"steps": 2, "warmup_steps": 1}
    optimizer = draw(st.sampled_from(["sgd", "adamw"]))
    return scenario_of(cluster, plan, run=run, optimizer=optimizer, global_batch_size=3 * ranks)


@pytest.mark.parametrize("method", ["hsdp", "gs_hier", "gs_z3"])
@settings(max_examples=examples(15))
@given(st.data())
def test_folding_changes_nothing_whatever_the_cluster_and_plan(method, data):
    assert_folding_changes_nothing(data.draw(grids(methods=(method,))))


def work_and_memory(program: Program, rank: int) -> list[tuple[float, Footprint]]:
    """Return duration and memory of a rank's tasks."""
    return [(task.duration_s, task.need) for task in program.tasks[program.role_of[rank]]]


def assert_roles_are_of_equal_ranks(scenario: Scenario) -> None:
    """Compare the tasks of every rank with those that are lowered for it alone."""
    statistics = loaded_of(scenario).gradients
    folded, alone = (Steps(scenario, statistics, unfolded=unfolded).program(0) for unfolded in (False, True))
    for rank in range(scenario.ranks):
        assert work_and_memory(folded, rank) == work_and_memory(alone, rank), rank


@pytest.mark.parametrize("method", ["hsdp", "gs_hier", "gs_z3"])
@settings(max_examples=examples(15))
@given(st.data())
def test_ranks_of_one_role_do_the_same_in_the_same_memory(method, data):
    assert_roles_are_of_equal_ranks(data.draw(grids(methods=(method,))))


@pytest.mark.parametrize("bucket_bytes", [25 * 2**20, 64, 100, 300])
@pytest.mark.parametrize("devices", [3, 4, 5, 8])
def test_places_that_own_as_much_but_forward_other_parts_have_roles_of_their_own(devices, bucket_bytes):
    shards = [1 + (place % 3 == 0) for place in range(devices)]
    shares = {"shards": tuple(share / sum(shards) for share in shards)}
    batch = 2 * devices
    assert_roles_are_of_equal_ranks(
        grid("gs_hier", 1, devices, global_batch_size=batch, shares=shares, bucket_bytes=bucket_bytes)
    )


@given(grids(methods=("hsdp", "gs_hier", "gs_z3")))
def test_a_step_leaves_in_memory_what_it_found(scenario):
    for tasks in lower(scenario, loaded_of(scenario).gradients, step=1).tasks:
        left = held_after(tasks)
        assert {category: size for category, size in left.items() if abs(size) > 1e-6} == {}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("method", ["hsdp", "gs_hier"])
def test_256_equal_ranks_on_two_levels_are_two_classes_by_what_they_own(method, backend):
    scenario = grid(method, 32, 8, cluster=servers(32, 8, backend=backend), global_batch_size=256)
    machine, program = machine_of(scenario)
    assert len(program.tasks) == len(machine.classes) == 2  # 4 rows for 8 ranks, 21 elements for 32
    assert max(map(len, machine.instances.values())) == 2


def test_groups_with_a_slower_link_meet_apart():
    cluster = star(8)
    slow = replace(cluster.links[3], bandwidth_bytes_per_s=5e5)
    cluster = replace(cluster, links=(*cluster.links[:3], slow, *cluster.links[4:]))
    scenario = grid("hsdp", 4, 2, cluster=cluster)
    machine, _ = machine_of(scenario)
    gathers = [each.communication.groups for each in machine.instances[TaskId("all-gather", layer="root")]]
    assert [set(map(tuple, groups)) for groups in gathers] == [{(0, 1), (4, 5), (6, 7)}, {(2, 3)}]
    assert_folding_changes_nothing(scenario)


# hsdp: sharded in a node, replicated across --------------------------------------------------------------------------


def test_shards_are_gathered_and_reduced_in_the_node_and_then_reduced_over_the_replicas():
    # 20 elements of 4 bytes in each block, 128 in the root
    found = entries(result_of(grid("hsdp", 2, 2)))
    inside = [("all-gather", 80, 4), ("all-gather", 512, 1), ("reduce-scatter", 80, 2), ("reduce-scatter", 512, 1)]
    expected = [(kind, group, size, count) for kind, size, count in inside for group in ((0, 1), (2, 3))]
    expected += [
        ("all-reduce", group, size, count) for size, count in ((40, 2), (256, 1)) for group in ((0, 2), (1, 3))
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_one_replica_is_zero3(backend):
    cluster = star(4, backend=backend)
    assert lower(grid("hsdp", 1, 4, cluster=cluster)) == lower(
        scenario_of(cluster, {"method": "zero3"}, optimizer="sgd")
    )


def test_on_nccl_all_reduces_run_beside_all_else_and_only_the_end_waits_for_them():
    tasks = {task.label: task for task in lower(grid("hsdp", 2, 2, cluster=star(4, backend="nccl"))).tasks[0]}
    beside = {label: labels_of(task.after) for label, task in tasks.items() if task.stream == "replication"}
    assert beside == {f"all-reduce {unit}": (f"reduce-scatter {unit}",) for unit in ("h.1", "h.0", "root")}
    waits = {label: labels_of(task.after) for label, task in tasks.items() if set(labels_of(task.after)) & set(beside)}
    assert waits == {"backward callback": ("reduce-scatter root", "all-reduce root")}


def test_on_gloo_every_collective_blocks_the_compute():
    tasks = lower(grid("hsdp", 2, 2, cluster=star(4))).tasks[0]
    assert {task.stream for task in tasks} == {"compute"}
    labels = [task.label for task in tasks]
    for unit in ("h.1", "h.0", "root"):
        assert labels.index(f"all-reduce {unit}") == labels.index(f"reduce-scatter {unit}") + 1


@pytest.mark.parametrize(("method", "beside_it"), [("hsdp", 2), ("zero3", 1)])
def test_all_reduced_gradients_of_later_micro_batches_stay_beside_the_sum_until_the_end(method, beside_it):
    nodes = 2 if method == "hsdp" else 1
    sizes = {"dp_replicate": nodes, "dp_shard": 2}
    scenario = scenario_of(star(2 * nodes), {"method": method, "micro_batches": 2} | sizes, optimizer="sgd")
    tasks = lower(scenario).tasks[0]
    end = next(i for i, task in enumerate(tasks) if task.label == "backward callback micro-batch 1")
    assert held_after(tasks[:end])["gradients"] == beside_it * PARAMETER_BYTES / 2
    assert held_after(tasks[: end + 1])["gradients"] == PARAMETER_BYTES / 2


@pytest.mark.parametrize(("nodes", "devices"), [(2, 4), (3, 2), (4, 1)])
def test_a_rank_sends_three_volumes_in_the_node_and_its_shard_twice_across(nodes, devices):
    cluster = servers(nodes, devices, backend="nccl")
    (ranks,) = result_of(grid("hsdp", nodes, devices, cluster=cluster, global_batch_size=24)).ranks
    inside = (devices - 1) / devices * (2 * (ROOT + 2 * BLOCK) + 2 * BLOCK)  # the root is gathered once
    across = 2 * (nodes - 1) / nodes * ELEMENTS / devices
    assert ranks.bytes_sent == pytest.approx(4 * (inside + across))


# gs_hier: reduced in a node, pushed across ---------------------------------------------------------------------------


def nic_bytes(result: Result) -> float:
    """Return what the network card of every device sends."""
    (found,) = {round(link.bytes, 6) for link in result.links if "nic" in link.name and link.name.endswith("-> switch")}
    return found


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (3, 2), (2, 4), (7, 1)])
def test_a_card_carries_a_nodes_part_of_the_place_to_push_and_as_much_to_publish(nodes, devices):
    scenario = grid("gs_hier", nodes, devices, global_batch_size=nodes * devices)
    assert nic_bytes(result_of(scenario)) == pytest.approx(2 * 4 * ELEMENTS / devices * (1 - 1 / nodes))


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_threshold_lowers_what_is_pushed_across_and_sees_the_mean_over_the_node(nodes):
    low_noise, high_noise = (exponential_statistics(rms=rms, samples=(n,)) for rms, n in ((5e-4, 4), (1e-3, 2)))
    statistics = replace(low_noise, traces=(*low_noise.traces, *high_noise.traces))
    push = {"threshold": 1e-3, "encoding": "coo", "error_feedback": False}
    scenario = grid("gs_hier", nodes, 2, push=push, global_batch_size=4 * nodes)
    ratio = push_ratios(statistics, Push(threshold=1e-3), samples=4, tensor="h.0.weight", step=1).over(0.0, 1.0)
    assert (
        ratio < push_ratios(statistics, Push(threshold=1e-3), samples=2, tensor="h.0.weight", step=1).over(0.0, 1.0) / 2
    )
    result = simulate(loaded_of(scenario, statistics)).result
    assert result.density.push == pytest.approx(ratio)
    part = ELEMENTS / 2 * (1 - 1 / nodes)
    counts = 8 * (nodes - 1)
    assert nic_bytes(result) == pytest.approx((4 + 4) * ratio * part + 4 * part + counts)


def test_one_node_reduces_and_publishes_inside_and_pushes_nothing():
    found = result_of(grid("gs_hier", 1, 4, push={"threshold": 1e-3}))
    everyone = (0, 1, 2, 3)
    assert entries(found) == [
        ("all-gather-v", everyone, PARAMETER_BYTES, 1),
        ("reduce-scatter-v", everyone, PARAMETER_BYTES, 1),
    ]
    assert found.density.push == 0


@pytest.mark.parametrize("threshold", [None, 0.0, 1e-3])
def test_one_device_in_each_node_is_gs(threshold):
    plan: dict[str, Any] = {"push": {"threshold": threshold}, "bucket_bytes": 100}
    gs = scenario_of(star(4), {"method": "gs"} | plan, optimizer="sgd")
    statistics = exponential_statistics()
    assert lower(grid("gs_hier", 4, 1, cluster=star(4), **plan), statistics) == lower(gs, statistics)


def test_on_gloo_a_bucket_is_reduced_thresholded_and_pushed_before_the_backward_goes_on():
    scenario = grid("gs_hier", 2, 2, push={"threshold": 0.0}, first_bucket_bytes=256, bucket_bytes=1000)
    labels = [task.label for task in lower(scenario).tasks[0] if "bucket" in task.label]
    assert labels[:7] == [
        "reduce-scatter bucket 0",
        "threshold bucket 0",
        "counts bucket 0",
        "post push bucket 0",
        "push bucket 0",
        "reduce-scatter bucket 1",
        "add bucket 0",  # with the next push
    ]


def test_on_nccl_a_bucket_is_reduced_behind_the_backward_and_pushed_once_the_next_is_complete():
    cluster = servers(2, 2, backend="nccl")
    tasks = lower(grid("gs_hier", 2, 2, cluster=cluster, first_bucket_bytes=80, bucket_bytes=80)).tasks[0]
    labels = [task.label for task in tasks]
    streams = {task.label: task.stream for task in tasks}
    assert streams["reduce-scatter bucket 0"] == streams["push bucket 0"] == "communication"
    threshold = labels.index("threshold bucket 0")
    assert labels_of(tasks[threshold].after) == ("reduce-scatter bucket 0",)
    assert labels.index("reduce-scatter bucket 0") < labels.index("backward h.1") < threshold
    assert threshold < labels.index("reduce-scatter bucket 1") < labels.index("add bucket 0")


@given(st.data())
def test_every_rank_owns_its_share_of_a_bucket_and_all_of_it_is_owned(data):
    nodes, places = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    weights = data.draw(st.lists(st.integers(0, 5), min_size=nodes * places, max_size=nodes * places).filter(any))
    elements = data.draw(st.integers(0, 10_000))
    by_node = [[weights[node * places + place] / sum(weights) for place in range(places)] for node in range(nodes)]
    division = divide(elements, by_node=by_node)
    ranges = [each for place in range(places) for each in division.ranges(place)]
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == sum(division.places) == elements
    for node in range(nodes):
        for place in range(places):
            assert abs(division.owned[place][node] - by_node[node][place] * elements) < 2


# gs_z3: parameters sharded at rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("threshold", [None, 1e-3])
def test_parameters_go_round_twice_and_gradients_once_to_their_owners(threshold, backend):
    push = {"threshold": threshold, "encoding": "coo"}
    scenario = scenario_of(star(4, backend=backend), {"method": "gs_z3", "push": push})
    (ranks,) = {each.bytes_sent: each for each in result_of(scenario).ranks}.values()
    statistics = exponential_statistics()
    ratio = threshold and push_ratios(statistics, Push(threshold=threshold), samples=2, tensor="h.0.bias", step=1).over(
        0.0, 1.0
    )
    pushed = 4 if threshold is None else 8 * ratio
    counts = 0 if threshold is None else 3 * 3 * 8  # three units, three owners
    gathered = 4 * (2 * ELEMENTS - ROOT)  # the root is gathered once
    assert ranks.bytes_sent == pytest.approx(3 / 4 * (gathered + pushed * ELEMENTS) + counts)


@pytest.mark.parametrize(("backend", "blocks"), [("gloo", 1), ("nccl", 2)])
def test_a_rank_holds_its_share_of_everything_and_gathered_the_root_and_blocks_in_use(backend, blocks):
    shares = (0.5, 0.25, 0.25, 0.0)
    plan = {"method": "gs_z3", "shares": {"shards": shares}}
    program = lower(scenario_of(star(4, backend=backend), plan, optimizer="adamw"))
    for share, role in zip(shares, program.role_of, strict=True):
        held, tasks = program.persistent[role], program.tasks[role]
        assert held["parameters"] == 4 * share * ELEMENTS
        assert held["optimizer"] == 8 * share * ELEMENTS + 3 * 4  # a step counter for each unit
        assert most_held(tasks, "gathered_parameters") == 4 * (ROOT + blocks * BLOCK)
        update = next(i for i, task in enumerate(tasks) if task.label == "optimizer")
        assert held_after(tasks[:update])["gradients"] == 4 * share * ELEMENTS


def test_in_bf16_a_shard_is_kept_as_master_copy_alone_and_added_up_in_its_precision():
    types = {"fast": device_type(peak_flop_per_s={"fp32": 1e9, "bf16": 2e9})}
    program = lower(scenario_of(star(4, types=types), {"method": "gs_z3"}, optimizer="adamw", precision="bf16"))
    (held,), (tasks,) = program.persistent, program.tasks
    assert held["parameters"] == 4 * ELEMENTS / 4
    assert "master_copy" not in held
    assert held["optimizer"] == 8 * ELEMENTS / 4 + 3 * 4
    assert most_held(tasks, "gathered_parameters") == 2 * (ROOT + BLOCK)
    update = next(i for i, task in enumerate(tasks) if task.label == "optimizer")
    assert held_after(tasks[:update])["gradients"] == 4 * ELEMENTS / 4


def test_parameters_that_are_kept_are_gathered_once():
    scenario = scenario_of(star(4), {"method": "gs", "parameters": "gathered"})
    gathers = [(kind, size, count) for kind, _, size, count in entries(result_of(scenario)) if kind == "all-gather-v"]
    assert gathers == [("all-gather-v", 4 * BLOCK, 2), ("all-gather-v", 4 * ROOT, 1)]
    assert most_held(lower(scenario).tasks[0], "gathered_parameters") == PARAMETER_BYTES


def test_one_rank_alone_is_a_single_device():
    alone, single = (result_of(scenario_of(star(1), {"method": method})) for method in ("gs_z3", "single"))
    assert alone.collectives == single.collectives == ()
    programs = [lower(scenario_of(star(1), {"method": method}, optimizer="sgd")) for method in ("gs_z3", "single")]
    assert programs[0].persistent == programs[1].persistent
    assert alone.phases_s["forward"] == pytest.approx(single.phases_s["forward"])


def test_every_gather_comes_before_its_use_and_runs_beside_the_use_of_the_one_before():
    tasks = lower(scenario_of(star(4, backend="nccl"), {"method": "gs_z3"}, optimizer="sgd")).tasks[0]
    labels = [task.label for task in tasks if task.label.startswith(("issue", "take", "forward h", "backward h"))]
    assert labels == [
        "issue all-gather root",
        "take all-gather root",
        "issue all-gather h.0",
        "take all-gather h.0",
        "issue all-gather h.1",
        "forward h.0",
        "take all-gather h.1",
        "forward h.1",
        "forward head",
        "issue all-gather h.1 backward",
        "backward head",
        "take all-gather h.1 backward",
        "issue all-gather h.0 backward",
        "backward h.1",
        "take all-gather h.0 backward",
        "backward h.0",
    ]
