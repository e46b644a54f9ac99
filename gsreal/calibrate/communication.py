"""Benchmarks of messages and collectives, and of the slow-down of compute that overlaps them."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.calibrate.bench import Bench, batch_of, middle_batch_size, step_marks, trained, update
from gsreal.gradient_sharding.point_to_point import all_gather_v, all_to_all_v, reduce_scatter_v
from gsreal.lab.throttle import own_place
from gsreal.model_files.build import DTYPES
from gsreal.run.rank import gather_json
from gssim.plan import ranges
from gssim.plan.splitting import even
from gssim.workload import Model

ROUNDS = 4
STEPS_PER_ROUND = 3


def communicating_excess(bench: Bench, model: Model) -> tuple[float, float]:
    """Return (bytes/s that a rank sends and receives, relative excess of step time meanwhile).

    All ranks compute, with and without concurrent all-reduces, in turns. The all-reduces' threads and the kernel share
    cores and caches with the compute: the excess depends on the layers, and on the amount of memory sent, which here is
    that of the model's gradients. Both were measured.
    """
    module, optimizer, _ = trained(bench, model)
    batch = batch_of(bench, model, middle_batch_size(bench))
    payload = torch.zeros(sum(each.numel() for each in module.parameters()), device=bench.device)

    def step_s() -> float:
        began_s = time.perf_counter()
        step_marks(bench, module, batch)
        took_s = time.perf_counter() - began_s
        update(bench, optimizer)
        return took_s

    one_s = bench.mean_over_ranks(_reduced_s(payload))
    quiet, busy = list[float](), list[float]()
    for turn in range(ROUNDS + 1):
        dist.barrier()
        alone = [step_s() for _ in range(STEPS_PER_ROUND)]
        works = math.ceil(bench.mean_over_ranks(2 * sum(alone)) / one_s)
        beside = _beside(payload, works, step_s)
        if turn:  # the first warms up
            quiet += alone
            busy += beside
    handled = 2 * 2 * (bench.ranks - 1) / bench.ranks * payload.nbytes
    excess = statistics.median(busy) / statistics.median(quiet) - 1 if busy else 0.0
    return handled / one_s, max(0.0, excess)


def _beside(payload: torch.Tensor, works: int, step_s: Callable[[], float]) -> list[float]:
    """Return the duration of steps during this many all-reduces; the last step, which outlasts them, is left out."""
    dist.barrier()
    going = [dist.all_reduce(payload, async_op=True) for _ in range(works)]
    times_s = []
    while not going[-1].is_completed():
        took_s = step_s()
        if not going[-1].is_completed():
            times_s.append(took_s)
    for work in going:
        work.wait()
    return times_s


def _reduced_s(payload: torch.Tensor) -> float:
    """Return the duration of an all-reduce in a sequence."""
    dist.all_reduce(payload)
    began_s = time.perf_counter()
    for _ in range(2):
        dist.all_reduce(payload)
    return (time.perf_counter() - began_s) / 2


WARMUPS = 2
EXCHANGE_BYTES = tuple(2**k for k in (12, 14, 16, 18, 20, 22))
STAGED_BYTES = (*EXCHANGE_BYTES, 2**25)
"""Sizes for GPUs, whose messages are copied through host memory: at a lower rate once they outgrow its caches."""
SMALL_BYTES = EXCHANGE_BYTES[:3]
"""Sizes that give a call's fixed time."""
POSTED_BYTES = tuple(2**k for k in (12, 14, 16, 18, 20))
"""Sizes that sockets accept at once on any current system."""
OVERFLOWING_BYTES = 2**24
MANY_MESSAGES = 4
"""Number of messages whose posting is timed."""
OUTLIERS = 0.1
"""Fraction of the repeats that is left out at either end: interference on a shared machine."""


@dataclass(frozen=True)
class Shape:
    """Coefficients of a collective's algorithm, relative to its size."""

    rounds: int
    """Latencies in sequence, including those of receivers' notifications."""
    carried: float
    """Fraction of the size that crosses each link."""
    handled: float
    """Fraction of the size that the busiest rank sends and receives, in total."""


@dataclass(frozen=True)
class Line:
    """Time as a linear function of size: a fixed part, and seconds per byte."""

    fixed_s: float
    byte_s: float


def communication_cost(bench: Bench) -> dict[str, Any]:
    """Return the costs of messages on links and processors, and each collective's fixed cost.

    A collective is modelled as  t = overhead + rounds * latency + max(carried / bandwidth, handled * processor_byte).
    On a loopback the processors are the limit; the bandwidth is the highest of any kind.
    """
    group = dist.group.WORLD
    assert group is not None
    on_gpu = bench.device.type == "cuda"
    lines = _lines(bench, group, STAGED_BYTES if on_gpu else EXCHANGE_BYTES)
    costs = costs_of(lines, bench.ranks)
    if on_gpu:
        if bench.ranks > 2:
            costs |= overheads_of(_lines(bench, dist.new_group([0, 1]), SMALL_BYTES), lines, bench.ranks)
    elif own_place() is None:
        costs |= following_of(_following_times(bench, group), lines)
    return costs | _posting_cost(bench)


FOLLOWING, QUEUED = 8, 16
"""Numbers of collectives that follow a first one: started one after another; all posted at once."""


@dataclass(frozen=True)
class FollowingTimes:
    """Times of one small collective after compute, and of it with others that follow it."""

    one_s: float
    in_turn_s: float
    """It and `FOLLOWING` more, each called when the one before has ended."""
    queued_s: float | None
    """It and `QUEUED` more, all posted at once; None for kinds that the caller's thread carries out."""


def following_of(times: Mapping[str, FollowingTimes], lines: Mapping[str, Line]) -> dict[str, dict[str, float]]:
    """Return the keys `following_saving_s` and `queued_s` of a backend's cost, by kind.

    The time that a collective adds to a queue counts without the part that is proportional to its bytes.
    """
    savings_s, queued_s = {}, {}
    for kind, following in times.items():
        following_s = (following.in_turn_s - following.one_s) / FOLLOWING
        savings_s[kind] = max(0.0, following.one_s - following_s)
        if following.queued_s is not None:
            added_s = (following.queued_s - following.one_s) / QUEUED - lines[kind].byte_s * SMALL_BYTES[0]
            queued_s[kind] = min(max(0.0, added_s), max(0.0, following_s))
    return {"following_saving_s": savings_s, "queued_s": queued_s}


def _following_times(bench: Bench, group: dist.ProcessGroup) -> dict[str, FollowingTimes]:
    """Return the times of small collectives that follow one another, by kind, between all ranks.

    Messages and all-to-alls are left out: they start pair by pair.
    """
    times = {}
    whole = torch.zeros(SMALL_BYTES[0] // 4 // bench.ranks * bench.ranks)
    part = torch.zeros(whole.numel() // bench.ranks)
    posts: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(whole, 0, async_op=True),
        "all-reduce": lambda: dist.all_reduce(whole, async_op=True),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, async_op=True),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, async_op=True),
        "all-to-all-v": _exchange(bench, SMALL_BYTES[0], wait=False),
    }
    calls = _calls(bench, group)
    for kind in (*posts, "all-gather-v", "reduce-scatter-v"):
        call, post = calls[kind](SMALL_BYTES[0]), posts.get(kind)
        times[kind] = FollowingTimes(
            _synchronised_s(bench, call),
            _synchronised_s(bench, call, in_turn=1 + FOLLOWING),
            _synchronised_s(bench, partial(_call_in_queue, post, 1 + QUEUED)) if post else None,
        )
    return times


def _call_in_queue(post: Callable[[], Any], count: int) -> None:
    """Post `count` collectives, then wait for all of them."""
    for work in [post() for _ in range(count)]:
        work.wait()


def _lines(bench: Bench, group: dist.ProcessGroup, sizes: Sequence[int]) -> dict[str, Line]:
    """Return the time of each kind of call among a group, by its size (a collective of all ranks)."""
    lines = {}
    makers: Makers = {kind: lambda _size: lambda: ABSENT for kind in _kinds(bench)}
    if bench.rank in dist.get_process_group_ranks(group):
        makers = _calls(bench, group)
    for kind, make in makers.items():
        try:
            lines[kind] = line_through(sizes, [_synchronised_s(bench, make(size)) for size in sizes])
        except RuntimeError as error:  # the same on every rank
            bench.say(f"without {kind}: {str(error).splitlines()[0]}")
    return lines


def all_reduce_kind(precision: str) -> str:
    """Return the kind of an all-reduce of elements in a 16-bit format."""
    return f"all-reduce {precision}"


ALL_REDUCES = {"all-reduce": torch.float32, **{all_reduce_kind(name): DTYPES[name] for name in ("bf16", "fp16")}}
"""Type of the elements of each kind of all-reduce: gloo adds some of them slower."""


def shapes(n: int) -> dict[str, Shape]:
    """Return the shape of each kind that is measured, among n ranks.

    All ranks arrive at once, so that a message waits for its receive's notification, except where receives are posted
    in advance: below the first level of a broadcast's tree, and after the first step of rings of messages.
    """
    share = (n - 1) / n
    depths = [rank.bit_count() for rank in range(n)]
    busiest = [
        max(sum(rank < 2**i and rank + 2**i < n for i in range(n)) for rank in range(n) if depths[rank] == depth)
        for depth in range(max(depths))
    ]
    return {
        "all-to-all-v": Shape(2, 1.0, 2.0),  # every rank to the next one
        "send": Shape(2, 1.0, 1.0),
        "broadcast": Shape(1 + max(depths), sum(busiest), sum(busiest)),
        **dict.fromkeys(ALL_REDUCES, Shape(4 * (n - 1), 2 * share, 4 * share)),
        "reduce-scatter": Shape(4 * (n - 1), 2 * share, 4 * share),  # gloo's is an all-reduce
        "all-gather": Shape(2 * (n - 1), share, 2 * share),
        "all-gather-v": Shape(n, share, 2 * share),
        "reduce-scatter-v": Shape(n, share, 2 * share),
        "all-to-all": Shape(2, 1.0, 2.0),
    }


def costs_of(lines: dict[str, Line], ranks: int) -> dict[str, Any]:
    """Return latency and bandwidth of a link, and overheads and processor times by kind, from measured lines."""
    of = shapes(ranks)
    latency_s = min(line.fixed_s / of[kind].rounds for kind, line in lines.items())
    processor_byte_s = {kind: line.byte_s / of[kind].handled for kind, line in lines.items()}
    return {
        "latency_s": latency_s,
        "bandwidth_bytes_per_s": max(of[kind].carried / line.byte_s for kind, line in lines.items()),
        "overhead_s": {kind: max(0.0, line.fixed_s - of[kind].rounds * latency_s) for kind, line in lines.items()},
        "processor_byte_s": {"default": processor_byte_s["all-to-all-v"], **processor_byte_s},
    }


def overheads_of(of_two: dict[str, Line], of_all: dict[str, Line], ranks: int) -> dict[str, Any]:
    """Return a link's latency, the overheads of calls between two ranks, and those that each further rank adds.

    A GPU's messages over gloo are copied to and from the host's memory one by one, so that those of a ring take longer
    the more ranks it has.
    """
    measured = ((2, of_two), (ranks, of_all))
    latency_s = min(line.fixed_s / shapes(n)[kind].rounds for n, lines in measured for kind, line in lines.items())
    two, whole = (
        {kind: max(0.0, line.fixed_s - shapes(n)[kind].rounds * latency_s) for kind, line in lines.items()}
        for n, lines in measured
    )
    added = {kind: max(0.0, whole[kind] - two[kind]) / (ranks - 2) for kind in of_two if kind in whole}
    return {"latency_s": latency_s, "overhead_s": whole | two, "overhead_rank_s": added}


def line_through(sizes: Sequence[int], times: Sequence[float]) -> Line:
    """Return the line through the times, each point weighted by its own size of error."""
    x, y = np.array(sizes, dtype=float), np.array(times)
    slope, fixed = np.polyfit(x, y, 1, w=1 / y)
    return Line(max(1e-7, float(fixed)), max(1e-13, float(slope)))


def _mean(times: Sequence[float]) -> float:
    """Return the mean of all but the outliers.

    Not the median: in the lab, times have two modes, depending on whether a thread of the backend finds a free core,
    and a step meets both.
    """
    cut = round(OUTLIERS * len(times))
    return statistics.fmean(sorted(times)[cut : len(times) - cut])


def _synchronised_s(bench: Bench, call: Callable[[], object], *, in_turn: int = 1) -> float:
    """Return the mean time of a collective from its last rank's arrival to its last rank's end.

    `in_turn`: how many are called, each when the one before has ended.

    As in training, ranks compute before the collective and continue immediately after it; nothing synchronises them. So
    caches are cold for the message. In the lab, the rank that is done first then computes on a core that threads need
    which still carry another rank's bytes, until the scheduler's next tick. If all ranks waited for each other
    afterwards, these threads would find free cores, and a collective would take about half the time. Times are of one
    host's clock.
    """
    repeats = bench.settings.link_repeats
    moments = torch.zeros(2, repeats + WARMUPS, dtype=torch.float64)
    refusal = None
    dist.barrier()
    for repeat in range(repeats + WARMUPS):
        _compute(bench)
        began = time.monotonic()
        try:
            for _ in range(in_turn):
                took_part = call() is not ABSENT
        except RuntimeError as error:  # before anything is sent: the backend does not take such tensors
            refusal = error
            break
        if took_part:
            bench.finish()
            moments[:, repeat] = torch.tensor([began, time.monotonic()], dtype=torch.float64)
    refusals = gather_json(str(refusal) if refusal else "")  # ranks that are absent from the call do not see it
    if any(refusals):
        raise RuntimeError(next(filter(None, refusals)))
    dist.all_reduce(moments, op=dist.ReduceOp.MAX)
    return _mean((moments[1] - moments[0])[WARMUPS:].tolist())


def _compute(bench: Bench) -> None:
    """Keep this rank busy for some milliseconds, over more memory than its caches hold."""
    a = torch.ones(512, 512, device=bench.device)
    for _ in range(2):
        torch.mm(a, a)
    bench.displace()
    bench.finish()


def _posting_cost(bench: Bench) -> dict[str, float]:
    """Return the costs of posting an exchange: fixed, for each message, for each byte up to the number of bytes that
    sockets accept at once, and that number.
    """
    # a GPU's messages are copied to the host's memory before they are posted, whatever their size
    sizes = (*POSTED_BYTES, OVERFLOWING_BYTES) if bench.device.type == "cuda" else POSTED_BYTES
    line = line_through(sizes, [_posting_s(bench, size) for size in sizes])
    limit_bytes = (_posting_s(bench, OVERFLOWING_BYTES) - line.fixed_s) / line.byte_s
    # each additional message: sent and received, all by the next rank
    few, many = (
        _mean([_posted_s(bench, count) for _ in range(bench.settings.link_repeats)]) for count in (1, MANY_MESSAGES)
    )
    return {
        "posting_s": line.fixed_s,
        "posting_message_s": max(0.0, (many - few) / (MANY_MESSAGES - 1)),
        "posting_byte_s": line.byte_s,
        "posting_limit_bytes": min(max(limit_bytes, float(POSTED_BYTES[-1])), float(OVERFLOWING_BYTES)),
    }


def _posting_s(bench: Bench, size_bytes: int) -> float:
    """Return the mean time to post an exchange, before it is awaited."""
    post = _exchange(bench, size_bytes, wait=False)
    times = []
    for _ in range(bench.settings.link_repeats):
        dist.barrier()
        _compute(bench)
        began = time.perf_counter()
        pending = post()
        times.append(time.perf_counter() - began)
        pending.wait()  # type: ignore[attr-defined]
    return _mean(times)


def _posted_s(bench: Bench, count: int) -> float:
    """Return the time to post this many small messages, to the next rank and from the last, after some compute."""
    following, before = (bench.rank + 1) % bench.ranks, (bench.rank - 1) % bench.ranks
    outgoing, incoming = (torch.zeros(count, POSTED_BYTES[0] // 4) for _ in range(2))
    dist.barrier()
    _compute(bench)
    began_s = time.perf_counter()
    works = [dist.irecv(part, before, tag=tag) for tag, part in enumerate(incoming)]
    works += [dist.isend(part, following, tag=tag) for tag, part in enumerate(outgoing)]
    took_s = time.perf_counter() - began_s
    for work in works:
        if work is not None:
            work.wait()
    return took_s


def _exchange(
    bench: Bench, size_bytes: int, *, group: dist.ProcessGroup | None = None, wait: bool = True
) -> Callable[[], object]:
    """Return a call in which every rank of a group, by default of all, sends `size_bytes` to the next one.

    The call waits for the exchange, or, without `wait`, returns it while it is pending.
    """
    outgoing, incoming = (torch.zeros(size_bytes // 4, device=bench.device) for _ in range(2))
    group = group or dist.group.WORLD
    assert group is not None
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sends: list[Tensor | None] = [None] * ranks
    receives: list[Tensor | None] = [None] * ranks
    sends[(rank + 1) % ranks] = outgoing
    receives[(rank - 1) % ranks] = incoming

    def call() -> object:
        pending = all_to_all_v(sends, receives, group=group, declared_bytes=0)
        if wait:
            pending.wait()
        return pending

    return call


ABSENT = object()
"""Result of a call on a rank that takes no part in it."""
Makers = dict[str, Callable[[int], Callable[[], object]]]
"""By kind: function that returns a call for a size in bytes."""


def _kinds(bench: Bench) -> tuple[str, ...]:
    """Return the kinds of calls that are measured, in order.

    gloo reads a point-to-point message as host memory, and fails if it is a GPU's.
    """
    left_out = {*ALL_REDUCES} - {"all-reduce", *map(all_reduce_kind, bench.settings.summed_precisions)}
    if bench.device.type != "cpu":
        left_out.add("send")
    return tuple(kind for kind in shapes(2) if kind not in left_out)


def _one_way_calls(bench: Bench, group: dist.ProcessGroup) -> Makers:
    """Return the makers of calls in which one rank sends.

    The sender alternates: a rank that never waits for the others would run ahead of them.
    """
    ranks = dist.get_process_group_ranks(group)

    def send(size: int) -> Callable[[], object]:
        message = torch.zeros(size // 4, device=bench.device)
        ways = itertools.cycle(((ranks[0], ranks[1]), (ranks[1], ranks[0])))

        def call() -> object:
            source, target = next(ways)
            if bench.rank not in (source, target):
                return ABSENT
            return dist.send(message, target) if bench.rank == source else dist.recv(message, source)

        return call

    def broadcast(size: int) -> Callable[[], object]:
        message = torch.zeros(size // 4, device=bench.device)
        roots = itertools.cycle(ranks)
        return lambda: dist.broadcast(message, next(roots), group=group)

    return {"send": send, "broadcast": broadcast}


def _calls(bench: Bench, group: dist.ProcessGroup) -> Makers:
    """Return the makers of calls of a size among a group of which this rank is a member, by kind."""
    n, rank, device = dist.get_world_size(group), dist.get_rank(group), bench.device

    def buffers(size: int) -> tuple[Tensor, Tensor]:
        whole = torch.zeros(size // 4 // n * n, device=device)
        return whole, torch.zeros(whole.numel() // n, device=device)

    def all_reduce(size: int, dtype: torch.dtype) -> Callable[[], object]:
        whole = torch.zeros(size // dtype.itemsize // n * n, dtype=dtype, device=device)
        return lambda: dist.all_reduce(whole, group=group)

    def all_gather(size: int) -> Callable[[], object]:
        whole, part = buffers(size)
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)

    def reduce_scatter(size: int) -> Callable[[], object]:
        whole, part = buffers(size)
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)

    def gather_unevenly(size: int) -> Callable[[], object]:
        whole, _ = buffers(size)
        return lambda: all_gather_v(whole, ranges(whole.numel(), even(n)), group=group)

    def reduce_unevenly(size: int) -> Callable[[], object]:
        whole, part = buffers(size)
        return lambda: reduce_scatter_v(part, whole, ranges(whole.numel(), even(n)), group=group)

    def exchange(size: int) -> Callable[[], object]:
        outgoing, incoming = (torch.zeros(size // 4, device=device) for _ in range(2))
        gone, come = ([size // 4 if i == (rank + k) % n else 0 for i in range(n)] for k in (1, -1))
        return lambda: dist.all_to_all_single(incoming, outgoing, come, gone, group=group)

    makers: Makers = {
        "all-to-all-v": lambda size: _exchange(bench, size, group=group),
        **_one_way_calls(bench, group),
        **{kind: partial(all_reduce, dtype=dtype) for kind, dtype in ALL_REDUCES.items()},
        "reduce-scatter": reduce_scatter,
        "all-gather": all_gather,
        "all-gather-v": gather_unevenly,
        "reduce-scatter-v": reduce_unevenly,
        "all-to-all": exchange,
    }
    return {kind: makers[kind] for kind in _kinds(bench)}


NCCL_BYTES = tuple(2**k for k in range(10, 29))
"""Sizes of the all-reduces to which NCCL's constants are fitted: 1 KiB to 256 MiB."""


def all_reduce_table(bench: Bench, backend: str, sizes: Sequence[int] = NCCL_BYTES) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of all-reduces among all ranks by a backend, as nccl-tests measures them: out of many in
    a row, on the slowest rank.
    """
    group = dist.new_group(backend=backend)
    table = []
    for size in sizes:
        payload = torch.zeros(size // 4, device=bench.device)
        repeats = 20 if size <= 2**22 else 5
        for count in (3, repeats):  # the first warm up
            bench.finish()
            dist.barrier()
            began_s = time.perf_counter()
            for _ in range(count):
                dist.all_reduce(payload, group=group)
            bench.finish()
            took_s = torch.tensor([(time.perf_counter() - began_s) / count], dtype=torch.float64)
        dist.all_reduce(took_s, op=dist.ReduceOp.MAX)
        table.append((size, float(took_s)))
    return table


def communicating_slowdown(bench: Bench) -> float:
    """Return compute time during all-reduces on all ranks over compute time without them, measured in turns."""
    a, b = (torch.randn(256, 256, device=bench.device) for _ in range(2))
    payload = torch.zeros(2**20, device=bench.device)

    def compute_s() -> float:
        bench.finish()
        began = time.perf_counter()
        for _ in range(20):
            torch.mm(a, b)
        bench.finish()
        return time.perf_counter() - began

    quiet, busy = [], []
    for _ in range(8):
        dist.barrier()
        quiet.append(compute_s())
        dist.barrier()
        works = [dist.all_reduce(payload, async_op=True) for _ in range(8)]
        while not works[-1].is_completed():
            took_s = compute_s()
            if not works[-1].is_completed():
                busy.append(took_s)
        for work in works:
            work.wait()
    ratio = statistics.median(busy) / statistics.median(quiet) if busy else 1.0
    return max(1.0, bench.mean_over_ranks(ratio))
