"""Kernels' scratch: its text, its size by samples, and that it counts where its operation is."""

from dataclasses import replace
from pathlib import Path

import pytest
from real_runs import scenario_file, star
from strategies import device_type, machine_of, scenario_of
from strategies import star as tiny_star

from gssim.cluster import LayerProfile
from gssim.cluster.measured import Profile, Scratch
from gssim.errors import UserError
from gssim.program import lower
from gssim.scenario import Scenario, load_scenario
from gssim.units import validated

FLAT = {"sizes": [1.0], "values": [0.0]}


def profiled(model: str, layer: str, scratch: dict[str, list[str]], *, sequence_length: int | None = None) -> Profile:
    """Return a profile of one layer, all of whose time is nothing."""
    data = {"forward_s": FLAT, "backward_s": FLAT, "scratch_bytes": scratch}
    entry = validated(LayerProfile, data, file="profile")
    return Profile(model=model, precision="fp32", sequence_length=sequence_length, layers={layer: entry})


@pytest.mark.parametrize("text", ["", "f0", "f0 4", "r0 4:1", "f0 4:1.5", "f0 8:1 4:2", "f0 4:1 4:2", "f0@+1 4:1"])
def test_what_is_no_scratch_is_refused(text):
    with pytest.raises(ValueError, match=r"must be|samples"):
        Scratch.parse(text)


def test_scratch_is_on_lines_through_its_points_and_never_less_than_nothing():
    scratch = Scratch.parse("f3 4:400 8:1200 16:1200")
    assert [scratch.at(samples) for samples in (1, 3, 4, 6, 8, 12, 100)] == [0, 200, 400, 800, 1200, 1200, 1200]
    assert Scratch.parse("f3 4:400").at(9) == 400
    assert str(scratch) == "f3 4:400 8:1200 16:1200"


def test_a_way_that_no_plan_runs_a_layer_in_is_refused():
    with pytest.raises(UserError, match="scratch_bytes"):
        profiled("tiny", "loss", {"cut": ["f0 1:1"]})


# In the tiny model's loss, with 2 samples of 4 tokens, two buffers of 512 bytes are alive at b0 and b1, and one at b2:
# the step's worst moment.


def peak_bytes(*scratch: str) -> float:
    types = {"fast": device_type(profiles=[profiled("tiny", "loss", {"whole": list(scratch)})])}
    scenario = scenario_of(tiny_star(1, types=types), {"method": "single"}, global_batch_size=2)
    machine, _ = machine_of(scenario)
    return machine.memory[0].peak_bytes


def test_scratch_counts_beside_what_is_alive_at_its_operation():
    nothing = peak_bytes()
    assert peak_bytes("b0 1:300") == nothing + 300
    assert peak_bytes("b1 1:300") == nothing + 300
    assert peak_bytes("b2 1:300") == nothing
    assert peak_bytes("b2 1:600") == nothing + 600 - 512
    assert peak_bytes("f0 1:100") == nothing


def test_scratch_of_one_operation_is_gone_at_the_next():
    assert peak_bytes("b0 1:300", "b1 1:200") == peak_bytes("b0 1:300")


# Ways: what each task of a residual block needs, with scratch that is measured of one way of running it --------------


def residual(ranks: int, *overrides: str) -> Scenario:
    return load_scenario(Path(scenario_file("resnet-digits.toml")), [star(ranks), *overrides]).scenario


def needs(scenario: Scenario, scratch: dict[str, list[str]] | None) -> dict[str, float]:
    """Return by label the peak of rank 0's tasks; the scratch is that of the entry `blocks`, the first two blocks."""
    cluster = scenario.cluster
    profiles = () if scratch is None else (profiled("resnet-digits", "blocks", scratch),)
    types = {name: replace(each, profiles=profiles) for name, each in cluster.device_types.items()}
    program = lower(replace(scenario, cluster=replace(cluster, device_types=types)))
    return {task.label: task.need.peak_bytes for task in program.tasks[0]}


def more(scenario: Scenario, scratch: dict[str, list[str]]) -> set[str]:
    """Return the labels of the tasks that need more with the scratch."""
    without, found = needs(scenario, None), needs(scenario, scratch)
    return {label.removesuffix(" part 1") for label, size in found.items() if size > without[label]}


BLOCKS = {"blocks.0", "blocks.1"}
HUGE = "1:100000000"


def labels(phase: str, blocks: set[str] = BLOCKS) -> set[str]:
    return {f"{phase} {block}" for block in blocks}


def test_a_forward_that_is_run_again_takes_scratch_again_but_for_operations_that_are_not():
    first = residual(1, "plan.method=single", "plan.recompute=full")
    selective = residual(1, "plan.method=single", "plan.recompute=selective")
    convolution, norm = {"whole": [f"f12 {HUGE}"]}, {"whole": [f"f15 {HUGE}"]}
    assert more(first, convolution) == labels("forward") | labels("recompute")
    assert more(selective, convolution) == labels("forward")
    assert more(selective, norm) == labels("forward") | labels("recompute")


def test_a_slice_takes_the_scratch_of_as_many_units():
    even = residual(2, "plan.method=tensor")
    assert more(even, {"units-4": [f"b31 {HUGE}"]}) == labels("backward")
    assert more(even, {"whole": [f"b31 {HUGE}"], "units-3": [f"b31 {HUGE}"]}) == set()
    uneven = residual(2, "plan.method=gs_tp", "plan.shares.shards=[0.375,0.625]")
    assert more(uneven, {"units-3": [f"f17 {HUGE}"]}) == labels("forward")


def test_a_layer_takes_the_scratch_of_its_role_where_each_rank_trains_its_own():
    scenario = residual(2, "plan.method=gs_wgrad")
    (first, last), _ = scenario.owned_layers
    assert first == 0
    assert last >= 3  # rank 0 trains both blocks
    assert more(scenario, {"whole": [f"b28 {HUGE}"]}) == labels("backward")
    assert more(scenario, {"frozen": [f"b20 {HUGE}"], "untrained": [f"f4 {HUGE}"]}) == set()


@pytest.mark.parametrize("plan", [["plan.method=single"], ["plan.method=pipeline", "plan.stages=[4,4]"]])
def test_a_layer_takes_the_scratch_of_its_role_where_some_are_frozen(plan):
    def frozen(*modules: str) -> Scenario:
        return residual(len(plan), *plan, f"workload.frozen={list(modules)}")

    def blocks(phase: str, scenario: Scenario, way: str, position: str) -> set[str]:
        found = more(scenario, {way: [f"{position} {HUGE}"]})
        return {block for block in BLOCKS if any(label.startswith(f"{phase} {block}") for label in found)}

    assert blocks("backward", frozen("blocks.1"), "frozen", "b20") == {"blocks.1"}
    assert blocks("backward", frozen("blocks.1"), "whole", "b28") == {"blocks.0"}
    lowest = frozen("stem", "blocks.0")
    assert blocks("forward", lowest, "untrained", "f4") == {"blocks.0"}
    assert blocks("backward", lowest, "deepest", "b26") == {"blocks.1"}


def test_a_rank_without_samples_takes_none():
    scenario = residual(2, "plan.method=ddp", "plan.shares.batch=[0,1]")
    assert needs(scenario, {"whole": [f"f0 {HUGE} 2:{2 * 10**8}"]})["forward blocks.0"] == 0
