"""ZeRO-3 (FSDP2): each block's parameters gathered just in time, twice; on nccl beside the compute."""

import gc
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from real_runs import run_module
from strategies import (
    communication_time_s,
    device_type,
    loaded_of,
    machine_of,
    scenario_of,
    scenarios,
    star,
)
from tasks import labels_of

from gssim.program import Task, Tensors, lower
from gssim.result import Result, Span
from gssim.scenario import Scenario, load_model
from gssim.simulation import simulate
from gssim.workload import unrolled

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
GPU = device_type(
    kind="cuda",
    memory_bytes=80e9,
    peak_flop_per_s={"fp32": 1e14},
    memory_bandwidth_bytes_per_s=2e12,
    operation_overhead_s=5e-6,
)
GPT3_PARAMETERS = 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288
"""Blocks (four matrices of d x 3d, d x d, d x 4d, 4d x d with biases, two norms), embeddings, the last norm."""


def on_gloo(method: str = "zero3", ranks: int = 2) -> Scenario:
    return scenario_of(star(ranks), {"method": method}, optimizer="sgd")


def on_nccl(method: str = "zero3", **plan: Any) -> Scenario:
    cluster = star(2, types={"gpu": GPU}, backend="nccl")
    return scenario_of(cluster, {"method": method} | plan, optimizer="sgd")


def gpt2_on_four_gpus(method: str, **plan: Any) -> Scenario:
    """Return GPT-2 124M on four GPUs behind a switch; about as long to compute as to communicate."""
    cluster = star(4, types={"gpu": GPU}, bandwidth=25e9, latency_s=5e-6, backend="nccl")
    model = load_model(MODELS / "gpt2-124m.toml")
    return scenario_of(cluster, {"method": method} | plan, model=model, sequence_length=1024, global_batch_size=16)


def tasks_of(scenario: Scenario) -> dict[str, Task]:
    return {task.label: task for task in lower(scenario).tasks[0]}


def labels(scenario: Scenario, *beginnings: str) -> list[str]:
    return [label for label in tasks_of(scenario) if label.startswith(beginnings)]


def test_blocks_are_gathered_before_their_forward_and_again_before_the_backward_of_the_block_behind_them():
    assert labels(on_gloo(), "all-gather", "copy out", "reduce", "forward", "free", "backward") == [
        "all-gather root",
        "copy out all-gather root",
        "forward embedding",
        "all-gather h.0",
        "copy out all-gather h.0",
        "forward h.0",
        "free h.0",
        "all-gather h.1",
        "copy out all-gather h.1",
        "forward h.1",
        "free h.1",
        "forward head",
        "forward end",
        "forward loss",
        "backward loss",
        "all-gather h.1 backward",
        "backward head",
        "copy out all-gather h.1 backward",
        "all-gather h.0 backward",
        "backward h.1",
        "reduce-scatter h.1",
        "copy out all-gather h.0 backward",
        "backward h.0",
        "reduce-scatter h.0",
        "backward embedding",
        "backward end",
        "reduce-scatter root",
        "backward callback",
    ]


def test_blocks_are_gathered_twice_and_the_root_once():
    # 20 elements of 4 bytes in each block, 128 in the root
    found = simulate(loaded_of(on_gloo())).result.collectives
    assert [(c.kind, c.bytes, c.count) for c in found] == [
        ("all-gather", 80, 4),
        ("all-gather", 512, 1),
        ("reduce-scatter", 80, 2),
        ("reduce-scatter", 512, 1),
    ]


def test_fsdp_is_another_name_for_zero3():
    assert lower(on_gloo("fsdp")) == lower(on_gloo("zero3"))


def test_on_gloo_every_collective_blocks_the_compute():
    assert {task.stream for task in lower(on_gloo()).tasks[0]} == {"compute"}
    assert {task.stream for task in lower(on_nccl(overlap=False)).tasks[0]} == {"compute"}


def test_on_nccl_collectives_run_beside_the_compute_in_the_order_in_which_the_host_issues_them():
    tasks = tasks_of(on_nccl())
    assert [(label, labels_of(task.after)) for label, task in tasks.items() if task.stream == "communication"] == [
        ("all-gather root", ("forward begin",)),
        ("all-gather h.0", ()),
        ("all-gather h.1", ("copy out all-gather root",)),
        ("all-gather h.1 backward", ("copy out all-gather h.1",)),
        ("all-gather h.0 backward", ("copy out all-gather h.1 backward",)),
        ("reduce-scatter h.1", ("copy in reduce-scatter h.1",)),
        ("reduce-scatter h.0", ("copy in reduce-scatter h.0",)),
        ("reduce-scatter root", ("copy in reduce-scatter root",)),
    ]
    waits = {label: labels_of(task.after) for label, task in tasks.items() if task.stream == "compute" and task.after}
    assert waits == {
        **{f"copy out {name}": (name,) for name in tasks if name.startswith("all-gather")},
        "copy in reduce-scatter h.0": ("reduce-scatter h.1",),
        "copy in reduce-scatter root": ("reduce-scatter h.0",),
        "backward callback": ("reduce-scatter root",),
    }


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("method", ["zero2", "zero3"])
def test_a_rank_alone_exchanges_nothing(backend: str, method: str):
    scenario = scenario_of(star(1, backend=backend), {"method": method}, optimizer="sgd")
    program = lower(scenario)
    assert program.communications == {}
    assert {task.stream for task in program.tasks[0]} == {"compute"}
    assert [name for name in labels(scenario, "copy out") if name.endswith("backward")] == [
        f"copy out all-gather h.{block} backward" for block in (1, 0) if method == "zero3"
    ]


@given(scenarios(methods=("zero3",)))
def test_every_rank_comes_by_the_same_collectives_in_the_same_order_and_the_step_ends(scenario: Scenario):
    machine, program = machine_of(scenario, steps=2)
    assert all(ends_s[-1] > 0 for ends_s in machine.ends_s)
    orders = {tuple((t.communication, t.stream) for t in tasks if t.communication) for tasks in program.tasks}
    assert len(orders) == 1


def test_zero2_on_nccl_overlaps_too():
    streams = {task.label: task.stream for task in lower(on_nccl("zero2")).tasks[0]}
    behind = {label for label, stream in streams.items() if stream == "communication"}
    assert behind == {f"{kind} {unit}" for kind in ("all-gather", "reduce-scatter") for unit in ("root", "h.0", "h.1")}


@given(scenarios(methods=("zero2", "zero3")))
def test_a_step_leaves_in_memory_what_it_found(scenario: Scenario):
    for tasks in lower(scenario).tasks:
        left: dict[str, float] = defaultdict(float)
        for task in tasks:
            for category, size in task.need.kept:
                left[category] += size
        assert {category: size for category, size in left.items() if abs(size) > 1e-6} == {}


def most_held(tasks: tuple[Task, ...], category: str) -> float:
    """Return the most of a category that tasks hold, in the order in which the host comes by them."""
    held = most = 0.0
    for task in tasks:
        most = max(most, held + dict(task.need.peak).get(category, 0.0))
        held += dict(task.need.kept).get(category, 0.0)
        most = max(most, held)
    return most


def test_two_blocks_are_held_at_most_with_the_root():
    scenario = gpt2_on_four_gpus("zero3")
    layers = unrolled(scenario.workload.model)
    (block,) = {layer.layer.elements for layer in layers if layer.layer.block}
    root = sum(layer.layer.elements for layer in layers if not layer.layer.block)
    padding = 4 * 4 * 768  # the vocabulary of 50257 rows is padded to a multiple of 4
    tasks = lower(scenario).tasks[0]
    assert most_held(tasks, "gathered_parameters") <= 4 * (root + block) + padding
    gathered_twice = lower(gpt2_on_four_gpus("zero2")).tasks[0]
    assert most_held(gathered_twice, "gathered_parameters") >= 4 * (root + 12 * block)


# Four GPUs behind a switch -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {name: simulate(loaded_of(gpt2_on_four_gpus(name))).result for name in ("ddp", "zero2", "zero3")}


def alone_s(scenario: Scenario) -> tuple[float, float]:
    """Return the time of all compute, and of all collectives one after another, each with nothing beside it."""
    program = lower(scenario)
    compute_s = sum(task.duration_s for task in program.tasks[0])
    return compute_s, sum(communication_time_s(scenario.cluster, c) for c in program.communications.values())


@pytest.mark.parametrize("method", ["zero2", "zero3"])
def test_a_step_hides_part_of_its_communication_and_no_more_than_there_is(method: str, results: dict[str, Result]):
    scenario = gpt2_on_four_gpus(method)
    compute_s, communication_s = alone_s(scenario)
    assert 0.3 < communication_s / compute_s < 3  # else there is little to hide
    assert max(compute_s, communication_s) <= results[method].step_time_s < 0.9 * (compute_s + communication_s)


@pytest.mark.parametrize("method", ["zero2", "zero3"])
def test_without_overlap_compute_and_communication_add_up(method: str):
    scenario = gpt2_on_four_gpus(method, overlap=False)
    assert simulate(loaded_of(scenario)).result.step_time_s == pytest.approx(sum(alone_s(scenario)), rel=1e-6)


def steady_spans(scenario: Scenario) -> dict[str, Span]:
    return {span.label: span for span in simulate(loaded_of(scenario)).spans if span.rank == 0}


def test_the_next_block_is_gathered_while_one_computes():
    spans = steady_spans(gpt2_on_four_gpus("zero3"))
    for block in range(1, 11):
        forward, backward = (spans[f"{phase} transformer.h.{block}"] for phase in ("forward", "backward"))
        assert spans[f"all-gather transformer.h.{block + 1}"].start_s < forward.end_s
        before = spans[f"all-gather transformer.h.{block - 1} backward"]
        assert backward.start_s <= before.start_s < backward.end_s
        assert spans[f"reduce-scatter transformer.h.{block}"].start_s >= backward.end_s


def test_memory_falls_from_ddp_over_zero2_to_zero3(results: dict[str, Result]):
    peaks = {method: result.ranks[0].peak_allocated_bytes for method, result in results.items()}
    assert peaks["zero3"] < peaks["zero2"] < peaks["ddp"]


def test_zero3_sends_half_as_much_again_as_zero2_less_the_root(results: dict[str, Result]):
    gathered = sum(c.bytes * c.count for c in results["zero2"].collectives if c.kind == "all-gather")
    again = sum(c.bytes * c.count for c in results["zero3"].collectives if c.kind == "all-gather") - gathered
    root = max(c.bytes for c in results["zero2"].collectives if c.kind == "all-gather")
    assert again == gathered - root
    sent = {method: result.ranks[0].bytes_sent for method, result in results.items()}
    assert sent["zero3"] - sent["zero2"] == pytest.approx(again * 3 / 4)


# Memory, counted by torch ---------------------------------------------------------------------------------------------

SAMPLES = (1, 2, 8)
"""Samples of each rank. Few: the peak is where parameters are gathered; many: where activations are."""


def trained_by_sixteen(method: str, samples: int) -> Scenario:
    """Return a small GPT on sixteen CPUs whose backend, like nccl, takes nothing from torch's allocator."""
    model = load_model(MODELS / "gpt-byte-1m.toml")
    batch = {"global_batch_size": 16 * samples, "sequence_length": 24}
    return scenario_of(star(16, backend="nccl"), {"method": method}, model=model, **batch)


def count_peaks() -> dict[str, list[int | None]]:
    """Return by method the peak bytes of a step on the first of sixteen ranks; torch's fake process group is the rest.

    The group exchanges nothing, so parameters are garbage; FSDP2's host code, which takes and returns memory, is the
    same on every device. None: not counted exactly (nothing here compiles the allocator).
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from gsreal.measure import MemoryCounter

    counter = MemoryCounter(torch.device("cpu"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    return {
        method: [count_peak(trained_by_sixteen(method, samples), counter) for samples in SAMPLES]
        for method in ("zero2", "zero3")
    }


def count_peak(scenario: Scenario, counter: Any) -> int | None:
    from gsreal.measure import Timeline
    from gsreal.run.feed import Feed
    from gsreal.run.worker import build

    gc.collect()
    counter._base += counter.alive()  # what an earlier scenario left is not this one's
    training = build(scenario, Timeline(0, counter.device), counter.device)
    inputs, targets, weights = Feed(scenario, 0, counter.device).at(0)
    found = [counter.peak_of(lambda: training.step(inputs, targets, weights, 0), [])[0] for _ in range(3)]
    return int(found[-1]) if counter.method == "allocator" else None


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int | None]]:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    peaks: dict[str, list[int | None]] = run_module("test_zero3", [], tmp_path_factory.mktemp("peaks"), ranks=1)
    if None in peaks["zero3"]:
        pytest.skip("nothing here compiles the counting allocator")
    return peaks


@pytest.mark.real
def test_a_cpu_pads_uneven_gradients_in_copies_of_their_own():
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.measure import MemoryCounter

    counter = MemoryCounter(torch.device("cpu"))
    if counter.method != "allocator":
        pytest.skip("nothing here compiles the counting allocator")
    layer = unrolled(load_model(MODELS / "resnet-digits.toml"))[0].layer
    shapes = [(64, 9), (66, 9), (5,)]
    parameters = tuple(replace(layer.parameters[0], shape=shape) for shape in shapes)
    tensors = Tensors(parameters, ranks=3, value_bytes=4, master_bytes=4, reduce_bytes=4)
    gradients = [torch.zeros(shape) for shape in shapes]
    out = torch.empty(3, sum(tensors.shard_elements))
    before = counter.alive()
    counter.reset()
    torch._chunk_cat(gradients, dim=0, num_chunks=3, out=out)
    assert counter.peak() - before == tensors.uneven_bytes == 4 * (66 * 9 + 6)


@pytest.mark.real
@pytest.mark.parametrize("method", ["zero2", "zero3"])
def test_memory_without_staging_is_what_torch_takes_in_the_order_of_the_host(
    method: str, counted: dict[str, list[int | None]]
):
    results = [simulate(loaded_of(trained_by_sixteen(method, samples))).result for samples in SAMPLES]
    predicted = [next(entry.peak_allocated_bytes for entry in each.ranks if 0 in entry.ranks) for each in results]
    assert predicted == pytest.approx(counted[method], rel=1e-3)


# GPT-3 ---------------------------------------------------------------------------------------------------------------


def test_gpt3_has_its_published_number_of_parameters():
    """Brown et al. 2020, table D.1: 174,600 million."""
    model = load_model(MODELS / "gpt3-175b.toml")
    assert model.elements == GPT3_PARAMETERS == 174_604_259_328
    assert sum(layer.repeats for layer in model.layers if layer.block) == 96
    assert len(model.layers) < 10


def test_gpt3_is_lowered_into_a_few_tasks_for_each_block():
    cluster = star(2, types={"gpu": GPU}, backend="nccl")
    model = load_model(MODELS / "gpt3-175b.toml")
    scenario = scenario_of(cluster, {"method": "zero3"}, model=model, sequence_length=2048, global_batch_size=2)
    assert len(lower(scenario).tasks[0]) < 13 * 98


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(count_peaks()), encoding="utf-8")
