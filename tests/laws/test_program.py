from dataclasses import replace

import pytest
from hypothesis import given
from strategies import (
    bytes_by_rank,
    device_type,
    exponential_statistics,
    loaded_of,
    machine_of,
    scenario_of,
    scenarios,
    star,
)
from tasks import communications_by_label, labels_of

from gssim.plan import Push
from gssim.program import Lowering, lower
from gssim.result import merge_collectives
from gssim.scenario import Scenario
from gssim.simulation import simulate
from gssim.sparsity import push_ratios
from gssim.workload import Parameter


def labels(scenario: Scenario, rank: int = 0, stream: str | None = None) -> list[str]:
    program = lower(scenario, loaded_of(scenario).gradients)
    return [task.label for task in program.tasks[rank] if stream in (None, task.stream)]


def bucket_names(scenario: Scenario) -> list[list[str]]:
    buckets = Lowering(scenario, None, 0, range(scenario.ranks)).buckets
    return [[p.name.replace("{}", layer.module) for layer, p in bucket.members] for bucket in buckets]


def collectives(scenario: Scenario, gradients=None) -> list[tuple[str, int, int]]:
    result = simulate(loaded_of(scenario, gradients)).result
    assert all(c.group == tuple(range(scenario.ranks)) for c in result.collectives)
    return [(c.kind, c.bytes, c.count) for c in result.collectives]


def test_one_device_goes_forward_then_back_then_updates():
    assert labels(scenario_of(star(1), {"method": "single"})) == [
        "forward embedding",
        "forward h.0",
        "forward h.1",
        "forward head",
        "forward loss",
        "backward loss",
        "backward head",
        "backward h.1",
        "backward h.0",
        "backward embedding",
        "backward end",
        "optimizer",
    ]


def test_buckets_are_cut_in_the_order_in_which_gradients_become_ready():
    plan = {"method": "gs", "first_bucket_bytes": 256, "bucket_bytes": 80}
    assert bucket_names(scenario_of(star(2), plan)) == [
        ["head.weight"],
        ["h.1.weight", "h.1.bias"],
        ["h.0.weight", "h.0.bias"],
        ["embedding.weight"],
    ]


def test_a_layers_backward_is_cut_where_a_bucket_is_complete():
    plan = {"method": "gs", "first_bucket_bytes": 256, "bucket_bytes": 80, "overlap": False}
    assert labels(scenario_of(star(2), plan, optimizer="sgd"))[5:] == [
        "backward loss",
        "backward head",
        "threshold bucket 0",
        "post push bucket 0",
        "push bucket 0",
        "backward head part 1",
        "backward h.1",
        "add bucket 0",
        "threshold bucket 1",
        "post push bucket 1",
        "push bucket 1",
        "backward h.1 part 1",
        "backward h.0",
        "add bucket 1",
        "threshold bucket 2",
        "post push bucket 2",
        "push bucket 2",
        "backward h.0 part 1",
        "backward embedding",
        "add bucket 2",
        "threshold bucket 3",
        "post push bucket 3",
        "push bucket 3",
        "backward end",
        "add bucket 3",
        "optimizer",
        "publish bucket 0",
        "publish bucket 1",
        "publish bucket 2",
        "publish bucket 3",
    ]


def test_cutting_a_layers_backward_keeps_its_time():
    whole = scenario_of(star(2), {"method": "ddp"})
    cut = scenario_of(star(2), {"method": "ddp", "bucket_bytes": 64})

    def backward_s(scenario):
        return sum(task.duration_s for task in lower(scenario).tasks[0] if task.label.startswith("backward"))

    assert backward_s(cut) == pytest.approx(backward_s(whole))


@pytest.mark.parametrize("plan", [{"method": "ddp"}, {"method": "gs", "first_bucket_bytes": 1}], ids=str)
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_that_are_complete_at_the_same_moment_travel_in_order(plan, overlap):
    # weight and bias of a block are ready at once, and every tensor is a bucket of its own
    scenario = scenario_of(star(2), plan | {"bucket_bytes": 1, "overlap": overlap})
    kind = "all-reduce" if plan["method"] == "ddp" else "push"
    names = [label for label in labels(scenario) if label.startswith(kind)]
    assert names == [f"{kind} bucket {i}" for i in range(6)]
    machine, _ = machine_of(scenario, steps=2)
    assert all(ends_s[-1] > 0 for ends_s in machine.ends_s)


@pytest.mark.parametrize(("method", "hooked"), [("single", 0), ("ddp", 6), ("zero2", 0), ("gs", 6)])
def test_gradient_hooks_take_time_in_the_methods_that_have_them(method, hooked):
    def backward_s(hook_s):
        cluster = star(2, types={"fast": device_type(gradient_hook_s=hook_s)})
        tasks = lower(scenario_of(cluster, {"method": method})).tasks[0]
        return sum(task.duration_s for task in tasks if task.label.startswith("backward"))

    assert backward_s(1.0) - backward_s(0.0) == pytest.approx(hooked)


def test_communication_waits_for_the_part_that_completes_its_bucket():
    scenario = scenario_of(star(2), {"method": "ddp", "bucket_bytes": 80})
    after = {task.label: labels_of(task.after) for task in lower(scenario).tasks[0] if task.communication}
    assert after == {
        "all-reduce bucket 0": ("backward head",),
        "all-reduce bucket 1": ("backward h.1",),
        "all-reduce bucket 2": ("backward h.0",),
        "all-reduce bucket 3": ("backward embedding",),
    }


def test_zero2_gathers_the_root_first_and_reduces_it_last():
    names = labels(scenario_of(star(2), {"method": "zero2"}))
    assert [name for name in names if name.startswith(("all-gather", "reduce-scatter", "forward", "backward"))] == [
        "all-gather root",
        "forward embedding",
        "all-gather h.0",
        "forward h.0",
        "all-gather h.1",
        "forward h.1",
        "forward head",
        "forward end",
        "forward loss",
        "backward loss",
        "backward head",
        "backward h.1",
        "reduce-scatter h.1",
        "backward h.0",
        "reduce-scatter h.0",
        "backward embedding",
        "backward end",
        "reduce-scatter root",
        "backward callback",
    ]


def test_collectives_of_every_method_counted_by_hand():
    # 168 elements of 4 bytes: embedding and head 64 each, two blocks 20 each
    assert collectives(scenario_of(star(2), {"method": "single"})) == []
    assert collectives(scenario_of(star(2), {"method": "ddp"})) == [("all-reduce", 672, 1)]
    assert collectives(scenario_of(star(2), {"method": "ddp", "bucket_bytes": 80})) == [
        ("all-reduce", 80, 2),
        ("all-reduce", 256, 2),
    ]
    assert collectives(scenario_of(star(2), {"method": "zero2"})) == [
        ("all-gather", 80, 2),
        ("all-gather", 512, 1),
        ("reduce-scatter", 80, 2),
        ("reduce-scatter", 512, 1),
    ]
    padded = scenario_of(star(3), {"method": "zero2"}, global_batch_size=9)
    assert collectives(padded)[:2] == [("all-gather", 120, 2), ("all-gather", 576, 1)]
    assert collectives(scenario_of(star(4), {"method": "gs"})) == [
        ("all-gather-v", 672, 1),
        ("all-to-all-v", 3 * 672, 1),
    ]
    assert collectives(scenario_of(star(4), {"method": "gs", "push": {"threshold": 1e-3}})) == [
        ("all-gather-v", 672, 1),
        ("all-to-all-v", 4 * 3 * 8, 1),  # how many entries come
        ("all-to-all-v", 3 * 672, 1),
    ]


def test_precision_doubles_the_bytes():
    assert collectives(scenario_of(star(2), {"method": "ddp"}, precision="fp64")) == [("all-reduce", 1344, 1)]


def test_only_thresholded_pushes_have_a_payload():
    found = simulate(loaded_of(scenario_of(star(2), {"method": "gs", "push": {"threshold": 1e-3}}))).result.collectives
    assert [(c.kind, c.bytes) for c in found if c.payload_bytes is not None] == [("all-to-all-v", 672)]
    dense = simulate(loaded_of(scenario_of(star(2), {"method": "gs"}))).result
    assert all(c.payload_bytes is None for c in dense.collectives)
    assert dense.density.push is None


@pytest.mark.parametrize("shards", [(0.5, 0.5), (0.75, 0.25), (1.0, 0.0)])
def test_each_rank_sends_what_it_does_not_own_and_publishes_what_it_does(shards):
    scenario = scenario_of(star(2), {"method": "gs", "shares": {"shards": shards}})
    machine, program = machine_of(scenario)
    push = communications_by_label(program)["push bucket 0"].pair_bytes
    assert push == ((0.0, 672 * shards[1]), (672 * shards[0], 0.0))
    assert communications_by_label(program)["publish bucket 0"].part_bytes == (672 * shards[0], 672 * shards[1])
    assert bytes_by_rank(machine)[0] == pytest.approx([672 * shards[1] + 672 * shards[0]] * 2)


def test_the_payload_of_a_push_is_the_density_times_entries_of_index_and_value():
    plan = {"method": "gs", "push": {"threshold": 2e-3, "encoding": "coo"}}
    scenario = scenario_of(star(4), plan)
    gradients = exponential_statistics(rms=1e-3)
    density = push_ratios(gradients, Push(threshold=2e-3), samples=2, tensor="head.weight", step=1).over(0.0, 1.0)
    result = simulate(loaded_of(scenario, gradients)).result
    assert result.density.push == pytest.approx(density)
    (payload,) = [c.payload_bytes for c in result.collectives if c.payload_bytes is not None]
    assert payload == pytest.approx(3 * 168 * density * (4 + 4))


def test_threshold_zero_sends_everything_and_auto_sends_it_densely():
    for encoding, factor in (("auto", 1), ("dense", 1), ("coo", 2)):
        scenario = scenario_of(star(2), {"method": "gs", "push": {"threshold": 0.0, "encoding": encoding}})
        result = simulate(loaded_of(scenario)).result
        assert result.density.push == 1.0
        (payload,) = [c.payload_bytes for c in result.collectives if c.payload_bytes is not None]
        assert payload == 672 * factor


def test_a_rank_without_samples_pushes_nothing_over_a_threshold():
    plan = {"method": "gs", "push": {"threshold": 1e-6, "encoding": "coo"}, "shares": {"batch": (1.0, 0.0)}}
    _, program = machine_of(scenario_of(star(2), plan))
    push = communications_by_label(program)["push bucket 0"].pair_bytes
    assert push[1] == (0.0, 0.0)
    assert push[0][1] > 0


def test_a_gradient_that_is_ready_in_another_layers_backward_keeps_its_bucket_open_until_then():
    scenario = scenario_of(star(2), {"method": "ddp", "bucket_bytes": 256})
    model = scenario.workload.model
    late = Parameter.parse("{}.weight 16x4 b0 b3@-3")
    layers = tuple(replace(la, parameters=(late,)) if la.name == "head" else la for la in model.layers)
    tied = replace(scenario, workload=replace(scenario.workload, model=replace(model, layers=layers)))
    assert bucket_names(tied)[-1][-1] == "head.weight"
    last = [task for task in lower(tied).tasks[0] if task.communication][-1]
    assert labels_of(last.after) == ("backward embedding",)


@given(scenarios())
def test_labels_are_unique_on_a_rank_and_name_only_tasks_that_exist(scenario):
    program = lower(scenario, loaded_of(scenario).gradients)
    for tasks in program.tasks:
        names = [task.id for task in tasks]
        assert len(set(names)) == len(names)
        assert {each for task in tasks for each in task.after} <= set(names)
        assert {task.communication for task in tasks} - {None} == set(program.communications)


@given(scenarios(methods=("ddp", "zero1", "zero2", "gs")))
def test_all_ranks_meet_the_same_collectives_in_the_same_order(scenario):
    program = lower(scenario, loaded_of(scenario).gradients)
    orders = {tuple((t.communication, t.stream) for t in tasks if t.communication) for tasks in program.tasks}
    assert len(orders) == 1


@given(scenarios(methods=("ddp", "gs")))
def test_buckets_carry_every_gradient_once(scenario):
    low = Lowering(scenario, None, 0, range(scenario.ranks))
    assert sum(bucket.elements for bucket in low.buckets) == scenario.workload.model.elements
    total = scenario.workload.model.elements * 4
    program = lower(scenario, loaded_of(scenario).gradients)
    kinds = {"ddp": ["all-reduce"], "gs": ["all-gather-v", "broadcast"]}[scenario.plan.method]
    assert sum(c.size_bytes for c in program.communications.values() if c.kind in kinds) == total


def test_merged_collectives_do_not_depend_on_the_order_of_lowering():
    result = simulate(loaded_of(scenario_of(star(2), {"method": "ddp", "bucket_bytes": 80}))).result
    assert merge_collectives(reversed(result.collectives)) == result.collectives
