"""Memory footprint of ranks: replayed steps, constants, whether a plan fits, and advice where it does not."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from combinations import each_once
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import device_type, loaded_of, machine_of, scenario_of, star
from tasks import program_with, task_of

from gssim.memory import Event, footprint, gradient_events
from gssim.planner import suggested_changes, with_suggested_changes
from gssim.program import Program, lower, workspaces
from gssim.result import Result, read_result
from gssim.scenario import Scenario, load_model, load_scenario
from gssim.simulation import (
    AllocatorPeaks,
    allocator_replay,
    deciding_footprints,
    footprints_of,
    replay,
    reservation,
    simulate,
    tightest_margin,
    worst_misfit,
)
from gssim.simulation.allocator_replay import _LiveTensors
from gssim.simulation.footprint import MemoryFootprint
from gssim.units import validated
from gssim.workload import unrolled

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
GPU = {"kind": "cuda", "memory_bytes": 1e9, "context_bytes": 1000.0}


def gpus(ranks: int, **changes: object):
    return star(ranks, types={"gpu": device_type(**(GPU | changes))}, backend="nccl")


# The replay ----------------------------------------------------------------------------------------------------------

PLANS = [
    {"method": "single"},
    {"method": "single", "recompute": "full"},
    {"method": "single", "micro_batches": 8},
    {"method": "ddp"},
    {"method": "zero1"},
    {"method": "zero2", "micro_batches": 2},
    {"method": "zero3"},
    {"method": "hsdp", "dp_replicate": 2, "dp_shard": 2},
    {"method": "gs"},
    {"method": "gs", "micro_batches": 2, "gradient_sync": "micro-batch"},
    {"method": "gs_z3"},
    {"method": "pipeline", "pp": 2, "micro_batches": 8},
]


@pytest.mark.parametrize(("plan", "precision"), each_once(PLANS, ("fp32", "bf16")), ids=str)
def test_a_replay_asks_for_what_the_machine_holds(plan, precision):
    """Peaks are the same, but for Adam's step counters, which are on the host."""
    ranks = 1 if plan["method"] == "single" else plan.get("pp", 4)
    scenario = scenario_of(gpus(ranks), plan, global_batch_size=8 * ranks, precision=precision, optimizer="adamw")
    machine = machine_of(scenario, steps=2)[0]
    program = machine.program
    for each, memory in zip(machine.classes, machine.memory, strict=True):
        role = program.role_of[each.representative]
        assert replay(program, role).requested_bytes == pytest.approx(memory.peak_bytes, abs=200)
        found = reservation(scenario, program, each.representative, known_bytes=memory.peak_bytes)
        assert found.requested_bytes <= found.allocated_bytes <= found.reserved_bytes


def program_of(*needs: list[Event], persistent: dict[str, float], update: list[Event]) -> Program:
    tasks = [task_of(str(i), "forward", need=footprint(need)) for i, need in enumerate(needs)]
    return program_with(((*tasks, task_of("update", "optimizer", need=footprint(update))),), {}, (persistent,))


def test_states_are_made_in_the_first_update_where_there_is_room():
    activation = [Event(0, 40.0 * MIB, "activations")]
    gone = [Event(0, -40.0 * MIB, "activations")]
    found = replay(program_of(activation, gone, persistent={"optimizer": 30.0 * MIB}, update=[]), 0)
    assert found.requested_bytes == 70 * MIB
    assert found.reserved_bytes == 80 * MIB, "the states are in what the first step's activation left"


def test_workspaces_are_made_in_the_first_forward_and_backward_where_there_is_room():
    """Two of cuBLAS's, of 32 MiB, and 1 MiB of cuBLASLt's: the backward's takes the place of the first activation."""
    small = footprint([Event(0, 512.0, "temporaries"), Event(1, -512.0, "temporaries")])
    taken, gone = ([Event(0, sign * 40.0 * MIB, "activations")] for sign in (1, -1))
    tasks = (
        task_of("head", "forward", need=footprint(taken)),
        task_of("loss", "forward", need=footprint(gone)),
        task_of("backward loss", "backward", need=small),
        task_of("backward head", "backward", need=small),
    )
    program = program_with(
        (tasks,), {}, ({"workspace": 65.0 * MIB},), tensors=(lambda: {"workspace": workspaces(65 * MIB)},)
    )
    found = replay(program, 0)
    assert (found.allocated_bytes, found.reserved_bytes) == ((65 + 40) * MIB, (32 + 2 + 40 + 40) * MIB)


def test_a_free_that_tells_a_sum_alone_takes_what_there_is():
    taken = [Event(0, 4.0 * MIB, "gradients"), Event(1, 3.0 * MIB, "gradients")]
    freed = [Event(0, -5.0 * MIB, "gradients")]
    rest = [Event(0, -2.0 * MIB, "gradients")]
    found = replay(program_of(taken, freed, persistent={}, update=rest), 0)
    assert found.requested_bytes == 7 * MIB
    assert found.reserved_bytes == 20 * MIB


def test_a_sum_of_gradients_stays_where_the_first_one_was():
    """torch adds a further gradient in place: of 90 MiB that are free, 60 MiB in a row remain behind the first one."""
    room, no_room = ([Event(0, sign * 90.0 * MIB, "activations")] for sign in (1, -1))
    first = [Event(0, 30.0 * MIB, "gradients")]
    added = [*first, Event(1, -30.0 * MIB, "gradients", latest=True)]
    work = [Event(0, 60.0 * MIB, "temporaries"), Event(1, -60.0 * MIB, "temporaries")]
    update = [Event(0, -30.0 * MIB, "gradients")]
    assert replay(program_of(room, no_room, first, added, work, persistent={}, update=update), 0).reserved_bytes == (
        90 * MIB
    )


@pytest.mark.parametrize("given_back", [1, 2])
def test_a_new_gradient_is_released_before_a_sum(given_back):
    model = load_model(ROOT / "scenarios" / "models" / "gpt-byte-1m.toml")
    events = gradient_events(unrolled(model), value_bytes=4, given_back=given_back)
    released = [event.latest for several in events.values() for event in several if event.size_bytes < 0]
    assert released.count(True) * given_back == len(released)


def test_the_first_gradient_after_a_push_is_added_out_of_place_and_no_other():
    """It meets the placeholder of a pushed gradient, which is removed once the backward has shown itself by it."""
    layers = unrolled(load_model(ROOT / "scenarios" / "models" / "gpt-byte-1m.toml"))
    usual = gradient_events(layers, value_bytes=4, given_back=1)
    copied = gradient_events(layers, value_bytes=4, given_back=1, copies_first=True)
    changed = [place for place in usual if copied[place] != usual[place]]
    head = next(each for each in layers if each.module == "head")
    assert changed == [(head.index, "b")]
    size = 4.0 * head.layer.parameters[0].elements
    assert [(event.size_bytes, event.early) for event in copied[head.index, "b"]] == [
        (size, False),
        (size, False),  # the sum
        (-size, True),  # a bucket that is begun at that moment comes after this
        (-size, False),
    ]


@pytest.mark.parametrize("method", ["ddp", "zero1", "zero2", "zero3"])
def test_a_reduced_gradient_is_released_before_the_sum_to_which_it_is_added(method):
    plan = {"method": method, "micro_batches": 2, "gradient_sync": "micro-batch"}
    program = lower(scenario_of(gpus(4), plan, global_batch_size=32, precision="bf16", optimizer="adamw"))
    released = [
        (task.id.op, event.latest)
        for task in program.tasks[0]
        if task.id.micro_batch == 1 and task.id.op != "backward"
        for event in task.need.events
        if event.category == "gradients" and event.size_bytes < 0 and not event.tensors
    ]
    assert all(latest for _, latest in released), released
    assert released or method in ("ddp", "zero1")


KEPT = st.tuples(
    st.sampled_from(("activations", "gradients", "temporaries")), st.sampled_from((0.3, 0.7, 1.5, 4, 11, 30))
)
"""Category, and MiB, of a tensor."""


@st.composite
def micro_batches(draw: st.DrawFn) -> list[list[Event]]:
    """Draw what the tasks of a few micro-batches allocate and free, repeated; most free what they have allocated."""
    events: list[list[Event]] = []
    for _ in range(draw(st.integers(1, 2))):
        sizes = [(name, size * MIB) for name, size in draw(st.lists(KEPT, min_size=1, max_size=5))]
        freed = draw(st.permutations(sizes))[draw(st.sampled_from((0,) * 9 + (1,))) :]
        latest = draw(st.booleans())
        forward = [Event(place, size, name) for place, (name, size) in enumerate(sizes)]
        backward = [Event(place, -size, name, latest=latest) for place, (name, size) in enumerate(freed)]
        size = draw(KEPT)[1] * MIB
        work = [Event(0, size, "temporaries"), Event(1, -size, "temporaries")]
        events += [*draw(st.permutations([forward, work])), backward]
    return events


@settings(max_examples=examples(300), deadline=None)
@given(
    repeated=micro_batches(),
    count=st.integers(4, 16),
    in_flight=st.integers(0, 2),
    expandable=st.booleans(),
    limit=st.sampled_from((None, None, None, 150 * MIB)),
)
def test_repetitions_that_change_nothing_are_passed_over(repeated, count, in_flight, expandable, limit):
    needs = [footprint(events) for events in repeated]
    in_order = needs[:in_flight] * 2 + needs * count + needs[::-1]
    tasks = [task_of(str(i), "forward", need=need) for i, need in enumerate(in_order)]
    tasks.append(task_of("update", "optimizer", need=footprint([])))
    program = program_with((tasks,), {}, ({"parameters": 7.0 * MIB, "gradients": 4.0 * MIB, "optimizer": 9.0 * MIB},))
    several = [
        replay(program, 0, limit_bytes=limit, expandable_segments=expandable, pass_over=pass_over)
        for pass_over in (True, False)
    ]
    assert several[0] == several[1]


def test_parts_that_do_not_repeat_are_not_searched_for_repetitions():
    """Before, each of n parts was compared with all others, which took a fifth of the replay of 11,000 tasks."""
    needs = [
        footprint([Event(0, (1.0 + i) * MIB, "temporaries"), Event(1, -(1.0 + i) * MIB, "temporaries")])
        for i in range(50)
    ]
    tasks = [task_of(str(i), "forward", need=need) for i, need in enumerate(needs)]
    program = program_with((tasks,), {}, ({},))
    with patch.object(allocator_replay, "_repetitions", side_effect=AssertionError):
        assert replay(program, 0) == replay(program, 0, pass_over=False)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_pipeline_of_many_micro_batches_is_replayed_without_most_of_them(schedule, recompute):
    plan = {"method": "pipeline", "pp": 2, "micro_batches": 40, "schedule": schedule, "recompute": recompute}
    program = lower(scenario_of(gpus(2), plan, global_batch_size=80, precision="bf16", optimizer="adamw"))
    for role in range(len(program.tasks)):
        served = []
        for pass_over in (True, False):
            with patch.object(_LiveTensors, "serve", autospec=True, side_effect=_LiveTensors.serve) as serve:
                peaks = replay(program, role, pass_over=pass_over)
            served.append((peaks, serve.call_count))
        (found, few), (expected, every) = served
        assert found == expected
        assert few < every / 2 if schedule == "1f1b" else few <= every


def test_streams_keep_their_memory_apart():
    beside = [Event(0, 50.0 * MIB, "communication", stream="all-gather"), Event(1, -50.0 * MIB, "communication")]
    here = [Event(0, 50.0 * MIB, "communication"), Event(1, -50.0 * MIB, "communication")]
    found = replay(program_of(beside, here, persistent={}, update=[]), 0)
    assert (found.allocated_bytes, found.reserved_bytes) == (50 * MIB, 100 * MIB)


MEASURED = sorted((ROOT / "scenarios" / "measured" / "h200").glob("*.measured.json"))


H200_THREADS = 132 * 2048


def replayed_as(measured: Result) -> AllocatorPeaks:
    """Return the replay of a stored run, its model as it is traced today."""
    types = measured.scenario["cluster"]["device_types"]
    threads = {
        name: kind | {"resident_threads": H200_THREADS} for name, kind in types.items()
    }  # later calibrations tell
    stored = measured.scenario | {"cluster": measured.scenario["cluster"] | {"device_types": threads}}
    scenario = validated(Scenario, stored, file="stored")
    if scenario.push.selects:  # that run is older than the scratch of thresholds, which it held no memory for: as dense
        dense = replace(scenario.plan.push, threshold=None)
        scenario = replace(scenario, plan=replace(scenario.plan, push=dense))
    model = load_model(ROOT / "scenarios" / "models" / f"{scenario.workload.model.name}.toml")
    return replay(lower(replace(scenario, workload=replace(scenario.workload, model=model))), 0)


TRANSFORMERS = [path for path in MEASURED if not path.name.startswith("resnet")]
INEXACT = {"zero2": 2, "resnet": 10}
"""MiB more than predicted that an H200 reserved: a segment of small tensors (that run exchanged by gloo's own
collectives, which hold blocks until their streams are done with them; rings of messages, which carry such exchanges
now, do not); what cuDNN took (9.6 MiB more were allocated, in segments of 2)."""


@pytest.mark.parametrize("path", TRANSFORMERS, ids=lambda path: path.name.partition(".")[0])
def test_an_h200_allocated_as_much_to_one_block(path):
    """Sizes from 115 MiB to 14 GiB. (cuDNN's convolutions take more at batch sizes between those of the profile.)"""
    measured = read_result(path)
    assert abs(replayed_as(measured).allocated_bytes - measured.ranks[0].peak_allocated_bytes) <= 512


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name.partition(".")[0])
def test_an_h200_reserved_about_as_much(path):
    """Reserved peaks of runs on one H200 are as predicted, but for those that are named."""
    measured = read_result(path)
    seen = measured.ranks[0].peak_reserved_bytes
    missing_mib = next((size for name, size in INEXACT.items() if path.name.startswith(name)), 0)
    assert seen == replayed_as(measured).reserved_bytes + missing_mib * MIB


def test_segments_expand_where_the_device_type_says_so():
    """A tensor that is larger than the one before it finds no place in what that one left."""
    small = [Event(0, 50.0 * MIB, "activations"), Event(1, -50.0 * MIB, "activations")]
    large = [Event(0, 90.0 * MIB, "activations"), Event(1, -90.0 * MIB, "activations")]
    program = program_of(small, large, persistent={}, update=[])
    for expandable, reserved in ((False, 140 * MIB), (True, 100 * MIB)):  # five pages of 20 MiB
        scenario = scenario_of(gpus(1, expandable_segments=expandable), {"method": "single"})
        assert reservation(scenario, program, 0, known_bytes=90.0 * MIB).reserved_bytes == reserved


def test_a_cpu_has_no_segments_to_expand():
    with pytest.raises(ValueError, match="expandable_segments: kind 'cpu' has none; allowed: no"):
        star(2, types={"cpu": device_type(expandable_segments=True)})


# What ranks need -----------------------------------------------------------------------------------------------------


def test_a_gpu_reserves_more_than_is_allocated_and_a_cpu_as_much():
    for cluster in (gpus(2), star(2)):
        (found,) = simulate(loaded_of(scenario_of(cluster, {"method": "ddp"}))).result.ranks
        assert found.peak_allocated_bytes == sum(found.peak_by_category_bytes.values())
        assert found.peak_reserved_bytes is not None
        assert found.fragmentation_ratio == 1 - found.peak_allocated_bytes / found.peak_reserved_bytes
        gpu = cluster.backend == "nccl"
        assert (found.peak_reserved_bytes > found.peak_allocated_bytes) == gpu
        assert ("rounding" in found.peak_by_category_bytes) == gpu


def test_every_group_has_a_communicator_and_a_rank_its_context():
    cluster = gpus(4, communicator_bytes=7.0)
    (found,) = simulate(
        loaded_of(scenario_of(cluster, {"method": "hsdp", "dp_replicate": 2, "dp_shard": 2}))
    ).result.ranks
    assert found.outside_bytes == {"context": 1000.0, "communicators": 14.0}


def test_a_plan_fits_up_to_its_last_byte_and_says_what_is_left():
    plan = scenario_of(gpus(1), {"method": "single"})
    result = simulate(loaded_of(plan)).result
    needed = (result.ranks[0].peak_reserved_bytes or 0.0) + 1000
    for spare, fits in ((0, True), (5, True), (-needed + 1000 + 10_000, False)):
        cluster = gpus(1, memory_bytes=needed + spare)
        found = simulate(loaded_of(scenario_of(cluster, {"method": "single"}))).result
        assert found.fits == fits
        assert found.margin is not None
        if fits:
            assert found.margin.margin_bytes == spare
        else:
            assert found.does_not_fit is not None
            assert found.margin.margin_bytes == -found.does_not_fit.excess_bytes < 0


def test_what_is_cached_is_given_back_before_a_plan_fails():
    """More is reserved than the device has, but less is ever needed at once."""
    model_bytes = [Event(0, 50.0 * MIB, "activations"), Event(1, -50.0 * MIB, "activations")]
    other = [Event(0, 90.0 * MIB, "activations"), Event(1, -90.0 * MIB, "activations")]
    program = program_of(model_bytes, other, persistent={}, update=[])
    assert replay(program, 0).reserved_bytes == 140 * MIB
    limited = replay(program, 0, limit_bytes=100 * MIB)
    assert (limited.missing_bytes, limited.reserved_bytes) == (0, 90 * MIB)
    assert replay(program, 0, limit_bytes=80 * MIB).missing_bytes == 10 * MIB


# What to change ------------------------------------------------------------------------------------------------------


def test_what_fits_needs_no_remedy():
    loaded = loaded_of(scenario_of(gpus(2), {"method": "ddp"}))
    result = simulate(loaded).result
    assert with_suggested_changes(loaded, result) is result


def test_remedies_need_less_and_say_what_simulating_them_says():
    loaded = loaded_of(scenario_of(gpus(2, memory_bytes=50_000), {"method": "gs"}, global_batch_size=64))
    result = with_suggested_changes(loaded, simulate(loaded).result)
    assert not result.fits
    assert [each.saved_bytes for each in result.remedies] == sorted(
        (each.saved_bytes for each in result.remedies if each.saved_bytes > 0), reverse=True
    )
    found = {each.change: each for each in result.remedies}
    assert {"2 times the ranks", "plan.micro_batches=32"} <= found.keys()
    plan = replace(loaded.scenario.plan, micro_batches=32)
    again = simulate(replace(loaded, scenario=replace(loaded.scenario, plan=plan))).result
    assert again.margin is not None
    remedy = found["plan.micro_batches=32"]
    assert remedy.fits == again.fits
    assert remedy.margin.margin_bytes == pytest.approx(again.margin.margin_bytes, rel=1e-3)


def test_gs_on_gpt3_does_not_fit_and_gs_z3_does():
    """gradient-sharding: replicas of 350 GB are too much for any device; sharded at rest, 128 x 80 GB hold them."""
    loaded = load_scenario(ROOT / "scenarios" / "gpt3-gs.toml")
    at_rest = simulate(load_scenario(ROOT / "scenarios" / "gpt3-gs-z3.toml")).result
    assert at_rest.fits
    assert at_rest.margin is not None
    found = {each.change: each for each in suggested_changes(loaded)}
    remedy = found["plan.method=gs_z3"]
    assert remedy.fits
    assert remedy.margin.margin_bytes == pytest.approx(at_rest.margin.margin_bytes, rel=0.02)
    assert remedy.saved_bytes > 300e9, "the replica alone takes 350 GB"


@pytest.mark.parametrize("excess_bytes", [-MIB, MIB / 10, MIB, 200 * MIB, 2**40])
def test_replays_that_decide_nothing_are_left_out(excess_bytes):
    """One rank exceeds its device; the other's tensors fit, but not its blocks, so that it lacks up to a segment."""
    work = [Event(0, 40.0 * MIB, "activations"), Event(1, -40.0 * MIB, "activations"), Event(2, 65.0 * MIB, "buckets")]
    tasks = (task_of("work", "forward", need=footprint(work)), task_of("update", "optimizer"))
    kept: tuple[dict[str, float], ...] = ({"parameters": 1e10 + excess_bytes}, {"parameters": 30.0 * MIB})
    program = program_with((tasks, tasks), {}, kept)
    types = {
        "full": device_type(**(GPU | {"memory_bytes": 1e10 + 65.0 * MIB + 1000.0})),
        "tight": device_type(**(GPU | {"memory_bytes": 95.5 * MIB + 1000.0})),
    }
    scenario = scenario_of(star(2, types=types, type_names=["full", "tight"], backend="nccl"), {"method": "ddp"})
    peaks = [(rank, {**kept[rank], "buckets": 65.0 * MIB}) for rank in (0, 1)]
    with patch("gssim.simulation.footprint.replay", wraps=allocator_replay.replay) as replayed:
        found = deciding_footprints(scenario, program, peaks)
    whole = footprints_of(scenario, program, peaks)
    assert worst_misfit(found) == worst_misfit(whole)
    assert tightest_margin(found) == tightest_margin(whole)
    assert bool(replayed.call_count) == (excess_bytes < 100 * MIB), "the largest request needs 66 MiB"


@pytest.mark.parametrize("left_bytes", [-6e-11, 0.0, 6e-11])
def test_what_rounding_leaves_of_a_category_is_not_reported(left_bytes: float) -> None:
    """Sums of fractions in another order leave such sizes; equal ranks must not become two classes by them."""
    peak = {"parameters": 4096.0, "activations": left_bytes}
    footprint = MemoryFootprint(rank=0, memory_bytes=1e6, peak=peak, reserved_bytes=4096.0)
    assert footprint.reported_peak == {"parameters": 4096.0}


def test_ranks_that_share_a_footprint_have_the_one_of_each_by_itself() -> None:
    """Equal dictionaries that are not one object tell ranks apart, which then are gone through one by one."""
    work = [Event(0, 40.0 * MIB, "activations"), Event(1, -40.0 * MIB, "activations"), Event(2, 65.0 * MIB, "buckets")]
    tasks = (task_of("work", "forward", need=footprint(work)), task_of("update", "optimizer"))
    kept: tuple[dict[str, float], ...] = ({"parameters": 90.0 * MIB}, {"parameters": 30.0 * MIB})
    program = replace(program_with((tasks, tasks), {}, kept), roles=(0, 1, 0, 1, 1, 0))
    types = {name: device_type(**(GPU | {"memory_bytes": size * MIB})) for name, size in (("a", 900.0), ("b", 160.0))}
    names = ["a", "a", "b", "b", "a", "a"]
    cluster = star(6, types=types, type_names=names, backend="nccl")
    scenario = scenario_of(cluster, {"method": "ddp"}, global_batch_size=12)
    of_role = [{**each, "buckets": 65.0 * MIB} for each in kept]
    shared = footprints_of(scenario, program, [(rank, of_role[role]) for rank, role in enumerate(program.roles)])
    alone = footprints_of(scenario, program, [(rank, dict(of_role[role])) for rank, role in enumerate(program.roles)])
    assert len(set(map(id, shared))) == 4
    assert [replace(each, rank=rank) for rank, each in enumerate(shared)] == alone
    assert [each.reported for each in shared] == [each.reported for each in alone]
    assert worst_misfit(shared) == worst_misfit(alone)
    assert tightest_margin(shared) == tightest_margin(alone)


def test_of_many_replays_the_first_ones_are_kept_too(monkeypatch):
    """Each stage of a long pipeline is replayed, as all have different numbers of tasks; here one is, several times."""
    monkeypatch.setattr(allocator_replay, "MIN_REQUESTS", 2)
    plan = {"method": "pipeline", "pp": 4, "micro_batches": 16, "schedule": "1f1b", "recompute": "full"}
    scenario = scenario_of(gpus(4), plan, global_batch_size=16, precision="bf16", optimizer="adamw")

    def peaks(*, many):
        program = lower(scenario)
        return [replay(program, 1, many=many) for _ in range(4)], program.once(allocator_replay._Repeated).requests

    (found, kept), (expected, none) = peaks(many=True), peaks(many=False)
    assert found == expected
    assert kept
    assert not none
