"""Measurements count bytes exactly, spans on a clock, and every collective once."""

import threading
import time
from itertools import pairwise

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
import torch.distributed as dist

from gsreal import measure
from gsreal.gradient_sharding.point_to_point import all_gather_v, all_to_all_v
from gsreal.measure import MemoryCounter, Timeline, memory
from gsreal.measure.collectives import CollectiveRecorder, ObservedCollective, collectives_of
from gsreal.model_files.build import loss_of
from gsreal.models import bert, gpt
from gssim.result.result import phases_of

CPU = torch.device("cpu")
KIB = 1024


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counter():
    """Return an exact counter."""
    made = MemoryCounter(CPU)
    if made.method != "allocator":
        pytest.skip("no C++ compiler here: bytes are not counted exactly")
    return made


def test_the_counter_counts_what_tensors_take(counter):
    before = counter.alive()
    one = torch.empty(1000, dtype=torch.float32)
    assert counter.alive() - before == 4000
    two = torch.empty((3, 7), dtype=torch.float64)
    assert counter.alive() - before == 4000 + 168
    del one
    assert counter.alive() - before == 168
    view = two[1:]
    del two
    assert counter.alive() - before == 168
    del view
    assert counter.alive() == before


def test_the_peak_is_the_most_that_was_alive_since_the_reset(counter):
    held = [torch.empty(100 * KIB, dtype=torch.uint8)]
    counter.reset()
    before = counter.alive()
    held.append(torch.empty(10 * KIB, dtype=torch.uint8))
    for _ in range(3):
        held[0] = None
        held[0] = torch.empty(30 * KIB, dtype=torch.uint8)
    assert counter.peak() - before == 10 * KIB  # the first was alive at the reset, the others are smaller
    assert counter.alive() - before == (10 + 30 - 100) * KIB
    counter.reset()
    assert counter.peak() == counter.alive()


def test_a_counter_counts_from_when_it_was_made(counter):
    held = torch.empty(64 * KIB, dtype=torch.uint8)
    later = MemoryCounter(CPU)
    assert later.alive() == 0
    more = torch.empty(KIB, dtype=torch.uint8)
    assert later.alive() == KIB
    assert counter.alive() >= 65 * KIB - 64  # the first still counts both
    del held, more


def test_the_peak_of_a_step_is_allocated_bytes_and_nothing_reserved_on_a_cpu(counter):
    kept = torch.empty(16 * KIB, dtype=torch.uint8)
    base = counter.alive()

    def step():
        torch.empty(5 * KIB, dtype=torch.uint8)

    allocated, reserved = counter.peak_of(step, [kept])
    assert allocated - base == 5 * KIB
    assert reserved is None


def uncounted(monkeypatch):
    """Return a counter as on a machine without a compiler."""
    monkeypatch.setattr(measure.memory, "counting_allocator", lambda: None)
    return MemoryCounter(CPU)


def test_a_peak_waits_until_another_thread_has_let_go_of_a_tensor(monkeypatch):
    leaf, result = torch.zeros(3, requires_grad=True), torch.ones(3)
    leaf.grad = result  # a reference of torch's own, as gloo's thread has
    monkeypatch.setattr(memory, "RELEASE_S", 60.0)
    memory.wait_for_release(result)  # at once: no peak is counted
    assert result._use_count() == 2

    def let_go():
        time.sleep(0.02)
        leaf.grad = None

    with memory.counting():
        memory.wait_for_release(result, holders=2)
        assert result._use_count() == 2
        thread = threading.Thread(target=let_go)
        thread.start()
        memory.wait_for_release(result)
        assert result._use_count() == 1
        thread.join()
        leaf.grad = result
        monkeypatch.setattr(memory, "RELEASE_S", 0.01)
        memory.wait_for_release(result)  # not for ever
        assert result._use_count() == 2


def test_without_a_compiler_operations_are_counted_instead(monkeypatch):
    counter = uncounted(monkeypatch)
    assert counter.method == "dispatch"
    kept = torch.empty(1000)
    allocated, reserved = counter.peak_of(lambda: torch.ones(500) + torch.ones(500), [kept])
    assert (allocated, reserved) == (4000 + 3 * 2000, None)


@pytest.mark.parametrize("make", [gpt, bert])
def test_counting_operations_agrees_with_counting_allocations_on_a_transformer(make, counter, monkeypatch):
    torch.manual_seed(0)
    module = make(width=64, heads=4, layers=3)
    inputs, targets = torch.randint(200, (4, 48)), torch.randint(200, (4, 48))
    kept = [*module.parameters(), inputs, targets]
    kept_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def step():
        module.zero_grad(set_to_none=True)
        loss_of(module(inputs), targets).backward()

    step()
    module.zero_grad(set_to_none=True)
    base = counter.alive() - kept_bytes
    exact = counter.peak_of(step, kept)[0] - base
    module.zero_grad(set_to_none=True)
    dispatched, _ = uncounted(monkeypatch).peak_of(step, kept)
    assert dispatched == pytest.approx(exact, rel=0.01)
    assert exact > 2 * kept_bytes


def test_what_kernels_allocate_for_themselves_is_counted_by_the_allocator_alone(counter, monkeypatch):
    module = torch.nn.Conv2d(8, 8, 3, padding=1)
    images = torch.zeros(4, 8, 16, 16)
    kept = [*module.parameters(), images]
    base = counter.alive() - sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def step():
        module.zero_grad(set_to_none=True)
        module(images).sum().backward()

    exact = counter.peak_of(step, kept)[0] - base
    module.zero_grad(set_to_none=True)
    assert uncounted(monkeypatch).peak_of(step, kept)[0] <= exact


# Time ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Return a list of times that the next looks at the clock show."""
    times = []
    monkeypatch.setattr(measure.step.time, "perf_counter", lambda: times.pop(0))
    return times


def test_spans_and_ends_are_seconds_from_the_restart(clock):
    clock.extend([1.0, 2.0, 10.0, 11.0, 12.5, 13.0, 14.0, 15.5])
    timeline = Timeline(3, CPU)
    with timeline.span("warm-up", "forward"):
        pass
    timeline.restart()
    with timeline.span("one", "forward"):
        pass
    timeline.end_step()
    with timeline.span("two", "backward"):
        pass
    clock.append(16.0)
    timeline.end_step()
    spans, ends_s = timeline.read()
    assert ends_s == [0.0, 3.0, 6.0]
    assert [(s.rank, s.stream, s.label, s.phase, s.start_s, s.end_s) for s in spans] == [
        (3, "compute", "one", "forward", 1.0, 2.5),
        (3, "compute", "two", "backward", 4.0, 5.5),
    ]


def test_a_span_from_a_mark_lasts_until_now_or_another_mark(clock):
    clock.extend([0.0, 1.0, 2.0, 5.0])
    timeline = Timeline(0, CPU)
    timeline.restart()
    began, ended = timeline.mark(), timeline.mark()
    timeline.between("wait", "exposed_communication", began)
    timeline.between("other", "idle", began, ended)
    spans, _ = timeline.read()
    assert [(s.label, s.start_s, s.end_s) for s in spans] == [("wait", 1.0, 5.0), ("other", 1.0, 2.0)]


def test_a_span_inside_another_takes_its_time_from_it(clock):
    """Predictions and measurements count so: a wait within the backward is communication, not backward."""
    clock.extend([0.0, 1.0, 2.0, 4.0, 7.0, 10.0])
    timeline = Timeline(0, CPU)
    timeline.restart()
    with timeline.span("backward", "backward"), timeline.span("wait", "exposed_communication"):
        pass
    timeline.end_step()
    spans, ends_s = timeline.read()
    phases = phases_of(spans, start_s=ends_s[0], end_s=ends_s[1])
    assert (phases["backward"], phases["exposed_communication"], phases["idle"]) == (4.0, 2.0, 4.0)


def test_a_real_clock_only_moves_on():
    timeline = Timeline(0, CPU)
    timeline.restart()
    for _ in range(5):
        with timeline.span("work", "forward"):
            torch.ones(10).sum()
        timeline.end_step()
    spans, ends_s = timeline.read()
    assert ends_s[0] == 0.0
    assert len(spans) == len(ends_s) - 1 == 5
    assert all(before <= after for before, after in pairwise(ends_s))
    for span, (start_s, end_s) in zip(spans, pairwise(ends_s), strict=True):
        assert start_s <= span.start_s <= span.end_s <= end_s


# Collectives ---------------------------------------------------------------------------------------------------------


def keys(observed_by_rank):
    return [entry.key for entry in collectives_of(observed_by_rank)]


def test_a_collective_that_all_members_saw_is_one():
    every = [ObservedCollective("all-reduce", (0, 1, 2), 100)]
    assert keys([every, every, every]) == [("all-reduce", (0, 1, 2), 100, 1)]


def test_equal_collectives_are_counted_and_others_are_entries_of_their_own():
    every = [
        ObservedCollective("all-reduce", (0, 1), 100),
        ObservedCollective("all-gather", (0, 1), 100),
        ObservedCollective("all-reduce", (0, 1), 60),
        ObservedCollective("all-reduce", (0, 1), 100),
    ]
    assert sorted(keys([every, every])) == [
        ("all-gather", (0, 1), 100, 1),
        ("all-reduce", (0, 1), 60, 1),
        ("all-reduce", (0, 1), 100, 2),
    ]


def test_groups_are_told_apart():
    first, second = [ObservedCollective("all-reduce", (0, 1), 8)], [ObservedCollective("all-reduce", (2, 3), 8)]
    assert sorted(keys([first, first, second, second])) == [
        ("all-reduce", (0, 1), 8, 1),
        ("all-reduce", (2, 3), 8, 1),
    ]


def test_ranks_that_disagree_on_a_size_give_an_entry_each():
    """The k-th of one rank is the k-th of the others: a prediction cannot equal what ranks disagree on."""
    assert sorted(
        keys([[ObservedCollective("all-reduce", (0, 1), 100)], [ObservedCollective("all-reduce", (0, 1), 104)]])
    ) == [
        ("all-reduce", (0, 1), 100, 1),
        ("all-reduce", (0, 1), 104, 1),
    ]
    crossed = [
        [ObservedCollective("broadcast", (0, 1), a), ObservedCollective("broadcast", (0, 1), b)]
        for a, b in ((8, 16), (16, 8))
    ]
    assert sorted(keys(crossed)) == [("broadcast", (0, 1), 8, 2), ("broadcast", (0, 1), 16, 2)]


def test_a_collective_that_one_rank_alone_saw_is_not_lost():
    extra = ObservedCollective("all-reduce", (0, 1), 28)
    every = [ObservedCollective("all-reduce", (0, 1), 100)]
    assert sorted(keys([[*every, extra], every])) == [("all-reduce", (0, 1), 28, 1), ("all-reduce", (0, 1), 100, 1)]


def test_all_to_all_v_adds_up_over_the_ranks():
    seen = [[ObservedCollective("all-to-all-v", (0, 1, 2), size, sent_bytes=size)] * 2 for size in (30, 20, 10)]
    (entry,) = collectives_of(seen)
    assert entry.key == ("all-to-all-v", (0, 1, 2), 60, 2)
    assert entry.payload_bytes is None


def test_payloads_of_data_dependent_messages_add_up_over_ranks_and_counts():
    seen = [
        [ObservedCollective("all-to-all-v", (0, 1), 1000, data_dependent=True, sent_bytes=5)],
        [ObservedCollective("all-to-all-v", (0, 1), 500, data_dependent=True, sent_bytes=7.5)],
    ]
    (entry,) = collectives_of(seen)
    assert entry.key == ("all-to-all-v", (0, 1), 1500, 1)
    assert entry.payload_bytes == 12.5
    twice = collectives_of([rank * 2 for rank in seen])
    assert [(e.key, e.payload_bytes) for e in twice] == [(("all-to-all-v", (0, 1), 1500, 2), 25.0)]


def test_plain_sends_are_every_ranks_own():
    """Two ranks that send eight bytes each are two sends."""
    seen = [
        [ObservedCollective("send", (0, 1), 8)],
        [ObservedCollective("send", (0, 1), 8), ObservedCollective("send", (0, 1), 4)],
    ]
    assert sorted(keys(seen)) == [("send", (0, 1), 4, 1), ("send", (0, 1), 8, 2)]


def test_nothing_seen_is_nothing():
    assert collectives_of([[], []]) == ()


# The process group ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """Join a process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_are_seen_at_the_process_group_with_the_full_tensors_size(alone):
    values = torch.zeros(8)
    with CollectiveRecorder() as recorder:
        dist.all_reduce(values)
        dist.broadcast(values[:2], 0)
        dist.all_gather_into_tensor(torch.zeros(8), values)
        dist.reduce_scatter_tensor(torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64))
        dist.barrier()
        values.add_(1)
    dist.all_reduce(values)  # nobody looks any more
    assert [(seen.kind, seen.group, seen.size_bytes) for seen in recorder.seen] == [
        ("all-reduce", (0,), 32),
        ("broadcast", (0,), 8),
        ("all-gather", (0,), 32),
        ("reduce-scatter", (0,), 64),
        ("barrier", (0,), 0),
    ]


def test_logical_collectives_are_announced_and_observers_leave(alone):
    flat = torch.arange(6.0)
    with CollectiveRecorder() as recorder:
        all_gather_v(flat, [(0, 6)], group=dist.group.WORLD)
        all_to_all_v([None], [None], group=dist.group.WORLD, declared_bytes=0, data_dependent=True).wait()
    assert [(seen.kind, seen.size_bytes, seen.data_dependent) for seen in recorder.seen] == [
        ("all-gather-v", 24, False),
        ("all-to-all-v", 0, True),
    ]
    assert measure.collectives.observers == []
