import gc
from dataclasses import replace
from unittest.mock import patch
from weakref import ref

import pytest
from strategies import device_type, machine_for, star
from tasks import program_with, task_of

from gssim.collectives import Communication
from gssim.engine import DeadlockError, Machine, MemoryTracker
from gssim.engine.rendezvous import Rendezvous, RunningCollectives
from gssim.memory import Event, Footprint, footprint
from gssim.network import Network
from gssim.program import Task

PAIR = {"x": Communication("all-reduce", (0, 1), 1000), "y": Communication("all-reduce", (0, 1), 1000)}


def together(label: str, **settings) -> Task:
    return task_of(label, "exposed_communication", communication=label, **settings)


def work(label: str, duration_s: float, **settings) -> Task:
    return task_of(label, "forward", duration_s=duration_s, **settings)


def test_ranks_that_meet_different_collectives_are_a_deadlock_that_names_them():
    machine = machine_for(star(2), [together("x"), together("y")], [together("y"), together("x")], communications=PAIR)
    with pytest.raises(DeadlockError) as error:
        machine.run(1)
    assert str(error.value) == ("deadlock: rank 0 (compute) at 'x', for rank 1; rank 1 (compute) at 'y', for rank 0")


def test_a_deadlock_names_only_ranks_that_never_came():
    everyone = {"x": Communication("all-reduce", (0, 1, 2), 1000)}
    machine = machine_for(star(3), [together("x")], [together("x")], [work("home", 1.0)], communications=everyone)
    with pytest.raises(
        DeadlockError, match=r"rank 0 \(compute\) at 'x', for rank 2; rank 1 \(compute\) at 'x', for rank 2$"
    ):
        machine.run(1)


def test_a_deadlock_between_streams_names_the_task_that_is_waited_for():
    tasks = [work("early", 1.0, after=("late",)), together("late", stream="communication", after=("early",))]
    alone = {"late": Communication("all-reduce", (0,), 8)}
    with pytest.raises(DeadlockError, match=r"rank 0 \(communication\) at 'late', after 'early'"):
        machine_for(star(1), tasks, communications=alone).run(1)


def test_a_collective_starts_when_its_last_member_arrives():
    cluster = star(2, bandwidth=1e3)
    machine = machine_for(
        cluster, [work("short", 1.0), together("x")], [work("long", 5.0), together("x")], communications=PAIR
    )
    machine.run(1)
    assert machine.env.now == pytest.approx(5.0 + 1.0)
    waited = {span.rank: (span.start_s, span.end_s) for span in machine.spans if span.label == "x"}
    assert waited == {0: (pytest.approx(1.0), pytest.approx(6.0)), 1: (pytest.approx(5.0), pytest.approx(6.0))}


def test_what_a_run_made_for_its_collectives_is_freed_with_its_end():
    """It lived until the garbage collector came, to which it left most objects of a simulation."""
    made = []

    def noted(rendezvous, *given):
        begin(rendezvous, *given)
        made.append(ref(rendezvous))

    begin = Rendezvous.__init__
    machine = machine_for(star(2), [together("x")], [work("long", 5.0), together("x")], communications=PAIR)
    gc.disable()
    try:
        with patch.object(Rendezvous, "__init__", noted):
            machine.run(3)
        assert [each() for each in made] == [None] * 3
    finally:
        gc.enable()


def test_the_time_of_a_notice_is_found_once_for_all_steps():
    message = {"x": Communication("send", (0, 1), 1000)}
    machine = machine_for(star(2), [together("x")], [together("x")], communications=message)
    with patch.object(Network, "alone_s", autospec=True, side_effect=Network.alone_s) as found:
        machine.run(4)
    assert found.call_count == 1


def test_a_collective_of_some_ranks_does_not_wait_for_the_others():
    some = {"x": Communication("all-reduce", (0, 1), 1000)}
    machine = machine_for(
        star(3, bandwidth=1e3), [together("x")], [together("x")], [work("long", 50.0)], communications=some
    )
    machine.run(1)
    assert [ends[0] for ends in machine.ends_s] == pytest.approx([1.0, 1.0, 50.0])


def test_steps_meet_step_by_step():
    machine = machine_for(
        star(2, bandwidth=1e3), [work("w", 1.0), together("x")], [work("w", 2.0), together("x")], communications=PAIR
    )
    machine.run(3)
    assert machine.ends_s[0] == pytest.approx([3.0, 6.0, 9.0])
    assert machine.carried_by_rank()[0].tolist() == pytest.approx([3000.0, 3000.0])


def test_two_collectives_of_different_streams_share_the_links():
    both = [together("x"), together("y", stream="communication")]
    machine = machine_for(star(2, bandwidth=1e3), both, both, communications=PAIR)
    machine.run(1)
    assert machine.env.now == pytest.approx(2.0)


def test_compute_is_slowed_down_while_its_device_communicates():
    cluster = star(2, bandwidth=1e3, types={"fast": device_type(communicating_slowdown_ratio=2.0)})
    tasks = [work("w", 3.0), together("x", stream="communication")]
    machine = machine_for(cluster, tasks, tasks, communications=PAIR)
    machine.run(1)
    assert machine.env.now == pytest.approx(3.5)  # half a second of work in the first second


@pytest.mark.parametrize(("busy", "expected_s"), [(1, 1.0), (2, 1.25), (3, 1.5)])
def test_compute_is_slowed_down_by_neighbours_of_the_same_host(busy, expected_s):
    tasks = [[work("w", 1.0)] if rank < busy else [] for rank in range(3)]
    machine = machine_for(hosted(3, neighbour_slowdown_ratio=1.5), *tasks)
    machine.run(1)
    assert machine.env.now == pytest.approx(expected_s)


def hosted(devices: int, **changes):
    """Return a cluster whose devices are all on one host."""
    cluster = star(devices, types={"fast": device_type(**changes)})
    return replace(cluster, devices=tuple(replace(device, host="one") for device in cluster.devices))


def test_neighbours_slow_each_other_only_while_both_compute():
    machine = machine_for(hosted(2, neighbour_slowdown_ratio=2.0), [work("w", 1.0)], [work("w", 3.0)])
    machine.run(1)
    # both at half speed until the shorter ends at 2 s; the longer then has 2 s of work left
    assert [ends[0] for ends in machine.ends_s] == pytest.approx([2.0, 4.0])


def test_devices_of_different_hosts_do_not_slow_each_other():
    cluster = star(2, types={"fast": device_type(neighbour_slowdown_ratio=2.0)})
    machine = machine_for(cluster, [work("w", 1.0)], [work("w", 1.0)])
    machine.run(1)
    assert machine.env.now == pytest.approx(1.0)


def test_a_device_that_computes_on_two_streams_is_one_of_its_host_until_both_have_ended():
    both = [work("w", 4.0), task_of("copy", "forward", "communication", duration_s=1.0)]
    alone = machine_for(hosted(1, neighbour_slowdown_ratio=2.0), both)
    alone.run(1)
    assert alone.env.now == 4.0
    # of three on a host, one other computes all the time: half as much slower as both others would make it
    machine = machine_for(hosted(3, neighbour_slowdown_ratio=2.0), both, [work("w", 9.0)], [])
    machine.run(1)
    assert machine.ends_s[0] == [pytest.approx(6.0)]


def test_short_tasks_late_in_a_long_run_come_to_an_end():
    tasks = [work("long", 5e4), *(work(f"short {i}", 1.3e-6 * (1 + i % 7)) for i in range(300))]
    machine = machine_for(hosted(2, neighbour_slowdown_ratio=1.37), tasks, tasks)
    machine.run(1)
    assert machine.ends_s[0] == pytest.approx([1.37 * (5e4 + sum(1.3e-6 * (1 + i % 7) for i in range(300)))])


def test_small_messages_late_in_a_long_run_come_to_an_end():
    sizes = [100 + 37 * i for i in range(30)]
    found = {f"m{i}": Communication("all-reduce", (0, 1), size) for i, size in enumerate(sizes)}
    tasks = [work("long", 3e5), *(together(name) for name in found)]
    machine = machine_for(star(2, bandwidth=3e9), tasks, tasks, communications=found)
    machine.run(1)
    assert machine.env.now == pytest.approx(3e5)


def test_memory_counts_both_streams_at_their_worst_and_keeps_what_they_leave():
    memory = MemoryTracker({"parameters": 100.0})
    memory.begin("compute", Footprint(peak=(("temporaries", 50.0),), kept=(("activations", 10.0),)))
    memory.begin("communication", Footprint(peak=(("communication", 30.0),), kept=(("communication", 30.0),)))
    assert memory.peak_bytes == 180.0
    assert memory.peak == {"parameters": 100.0, "temporaries": 50.0, "communication": 30.0}
    memory.end("compute")
    memory.end("communication")
    assert memory.current == {"parameters": 100.0, "activations": 10.0, "communication": 30.0}
    memory.begin("compute", Footprint(kept=(("communication", -30.0),)))
    memory.end("compute")
    assert memory.peak_bytes == 180.0


def test_what_a_stream_needed_before_does_not_count_while_another_one_works():
    memory = MemoryTracker({})
    memory.begin("communication", Footprint(peak=(("communication", 30.0),)))
    memory.end("communication")
    memory.begin("compute", Footprint(peak=(("temporaries", 40.0),)))
    assert memory.peak_bytes == 40.0


def test_memory_of_consecutive_tasks_is_not_added_up():
    tasks = tuple(
        task_of(f"t{i}", "forward", duration_s=1.0, need=Footprint(peak=(("temporaries", 64.0),))) for i in range(4)
    )
    machine = Machine(star(1), program_with((tasks,), {}, ({"parameters": 8.0},)))
    machine.run(2)
    assert machine.memory[0].peak_bytes == 72.0


def test_a_rank_records_its_waits_as_spans_that_do_not_overlap_on_a_stream():
    tasks = [work("w", 1.0), together("x", stream="communication", after=("w",)), work("v", 1.0, after=("x",))]
    machine = machine_for(star(2, bandwidth=1e3), tasks, tasks, communications=PAIR)
    machine.run(1)
    spans = [(s.label, s.start_s, s.end_s) for s in machine.spans if s.rank == 0 and s.stream == "compute"]
    assert spans == [("w", 0.0, 1.0), ("wait x", 1.0, 2.0), ("v", 2.0, 3.0)]


def test_what_is_given_back_in_another_order_leaves_nothing():
    """Sizes of messages are expected values: fractions, whose sums hang on their order."""
    sizes = (333333.1, 0.7, 123456.3)
    taken = [footprint([Event(0, size, "communication")]) for size in sizes]
    given = [footprint([Event(0, -size, "communication")]) for size in (sizes[1], sizes[0], sizes[2])]
    assert sum([*sizes, *(-size for size in (sizes[1], sizes[0], sizes[2]))]) != 0
    memory = MemoryTracker({})
    for need in (*taken, *given):
        memory.begin("compute", need)
        memory.end("compute")
    assert memory.current == {"communication": 0.0}
    assert memory.peak["communication"] == pytest.approx(sum(sizes))


@pytest.mark.parametrize("waits", [("work",), ("a", "b", "work")])
@pytest.mark.parametrize("longer", ["a", "b"])
@pytest.mark.parametrize("order", [("send", "receive"), ("receive", "send")])
def test_what_a_rank_posts_at_one_instant_it_posts_in_the_order_of_its_program(longer, order, waits):
    """Whichever of its streams has waited for that instant for longer, and for however many tasks its first waits."""

    def message(label, stream, *after):
        return task_of(label, "exposed_communication", stream, communication=label, after=after)

    def tasks(*streams):
        to_peer = dict(zip(("a", "b"), streams, strict=True))
        after = {order[0]: waits, order[1]: ("work",)}
        later = {
            "send": message("c", to_peer["a"], *after["send"]),
            "receive": message("d", to_peer["b"], *after["receive"]),
        }
        return [
            message("a", to_peer["a"]),
            message("b", to_peer["b"]),
            task_of("work", "forward", duration_s=1.0, after=("a", "b")),
            *(later[each] for each in order),
        ]

    sizes = dict.fromkeys("abcd", 1000.0) | {longer: 5000.0}
    exchanges = {name: Communication("send", (0, 1) if name in "ac" else (1, 0), size) for name, size in sizes.items()}
    found = machine_for(star(2), tasks("send", "receive"), tasks("receive", "send"), communications=exchanges)
    posted = []

    def join(self, index, stream, step, task):
        posted.append((index, task.communication.label))
        yield from joins(self, index, stream, step, task)

    joins = RunningCollectives.join
    with patch.object(RunningCollectives, "join", join):
        found.run(1)
    labels = ["c", "d"] if order == ("send", "receive") else ["d", "c"]
    assert [label for index, label in posted if index == 0][2:] == labels
    assert [label for index, label in posted if index == 1][2:] == labels
