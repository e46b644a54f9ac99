"""Reads Kineto traces (Chrome JSON of `torch.profiler`), one of each rank: steps, work, collectives, copies and memory.

[Note: facts of the format] Read from torch 2.13 and its libkineto:
- Steps are annotations `ProfilerStep#N` of the thread that calls `profiler.step()`. On a GPU the host runs ahead: a
  step begins there when the kernels that were launched before it have ended.
- Every kernel has the `correlation` of the runtime call that launched it, whose thread and time tell the phase.
- NCCL: kernels have the fields of `record_param_comms` (in older traces only that operator has them, under the same
  `External id`). `Process Group Ranks` is cut short after 30 ranks; `distributedInfo.pg_config` is not.
- gloo: the operator `c10d::...` is the call, with shapes where `record_shapes=True`, and the annotation `gloo:...` of a
  worker thread is its transfer. Neither names the group. There is no record of waiting: the thread has no operator.
- `[memory]` counts a GPU's memory as its allocator does, but on a CPU only from the profiler's start on.
"""

import gzip
import math
import re
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gssim.errors import UserError
from gssim.execution.files import parsed_json
from gssim.result import EXPOSED_COPIES
from gssim.result.result import LARGER_SIDE

MOST_BYTES = 100_000_000
"""Largest trace, uncompressed: some ten steps of a GPU without Python's stacks."""
GZIP = b"\x1f\x8b"
OTHER_FILES = {
    b"SQLite format 3": "a database, as Nsight Systems exports it",
    b".nsys-rep": "a report of Nsight Systems",
    b".qdrep": "a report of Nsight Systems",
    b".et": "an execution trace (Chakra)",
}
"""Files of other profilers, by their first bytes or by the suffix of their name."""
NO_TRACE = "not a trace of torch.profiler (export_chrome_trace)"
STEP = "ProfilerStep#"
WAITING = "exposed_communication"

HOST_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
IGNORED_CATEGORIES = frozenset(
    {"Trace", "python_function", "gpu_user_annotation", "cuda_sync", "overhead", "cuda_profiler_range", "cuda_event"}
)
"""Categories of spans that repeat other spans, or tell nothing of a step."""
OLD_CATEGORIES = ("Operator", "Kernel", "Runtime", "Memcpy", "Memset")
PHASES_OF_EVENTS = frozenset("XMCibensftPNODRcBEv")
"""Kinds of events (`ph`) of the Trace Event Format; only spans (`X`) and instants (`i`) are used."""

KINDS = {
    "all-reduce": "allreduce all_reduce allreduce_coalesced",
    "all-gather": "allgather all_gather allgather_base all_gather_base all_gather_into_tensor allgather_coalesced "
    "allgather_into_tensor_coalesced",
    "reduce-scatter": "reduce_scatter reduce_scatter_base reduce_scatter_tensor reduce_scatter_tensor_coalesced",
    "broadcast": "broadcast broadcast_oop",
    "all-to-all": "all_to_all alltoall alltoall_base all_to_allv",
    "reduce": "reduce reduce_oop",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "receive": "recv recv_any_source",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
NO_CALLS = ("wait", "init", "coalesced")
"""Records of `record_param_comms` that transfer nothing themselves."""
ELEMENT_BYTES = {
    **dict.fromkeys(("float", "int", "unsigned int", "float32", "int32"), 4),
    **dict.fromkeys(("double", "long", "long int", "float64", "int64", "unsigned long", "complexfloat"), 8),
    **dict.fromkeys(("half", "bfloat16", "short", "c10::half", "c10::bfloat16", "float16", "int16", "short int"), 2),
    **dict.fromkeys(("byte", "char", "bool", "unsigned char", "signed char", "int8", "uint8"), 1),
}
BACKWARD = "autograd::engine::evaluate_function"
REDUCER = ("torch.distributed.ddp.reducer", "torch::distributed::reducer")
"""DDP copies reduced buckets back at the end of `backward()`, outside of autograd's functions."""
OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
LOADING = "enumerate(DataLoader)"
CALLS = ("c10d::", "_c10d_functional::", "c10d_functional::")


Memory = tuple[float, int, int]
"""Time in s, allocated and reserved bytes."""


class Piece(NamedTuple):
    """An interval in which a rank did one kind of work."""

    start_s: float
    end_s: float
    phase: str


@dataclass(frozen=True)
class Call:
    """One collective or message of a rank."""

    kind: str
    group: tuple[int, ...] | None
    """Its ranks, sorted; None where the trace does not tell."""
    size_bytes: int | None
    """Size of the full tensor; None where the trace does not tell."""
    start_s: float
    end_s: float


@dataclass
class RankTrace:
    """One rank's trace, in seconds since its first step began."""

    path: Path
    rank: int
    ranks: int
    tells_rank: bool
    """Whether the trace says which rank it is of."""
    backend: str
    """`nccl`, `gloo`; empty where it does not communicate."""
    on_gpu: bool
    origin_s: float
    """The first step's beginning on the host's clock."""
    numbers: tuple[int, ...]
    """Numbers of the steps, ascending."""
    bounds_s: tuple[tuple[float, float], ...]
    """Beginning and end of each step."""
    pieces: list[Piece]
    """Compute, exposed copies and exposed communication, disjoint, in order of time; between them the rank is idle."""
    calls: list[Call]
    """Its collectives and messages, in order of time."""
    memory: list[Memory]
    """(Time, allocated bytes, reserved bytes) of the GPU's allocator."""
    partial: Counter[str] = field(default_factory=Counter)
    """What the trace lacks, each with the number of events without it."""


@dataclass(frozen=True)
class _Event:
    name: str
    category: str
    thread: Any
    start_s: float
    end_s: float
    args: Mapping[str, Any]


def read_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a trace, compressed by gzip or not; raise UserError if it has none, or is too large."""
    try:
        with path.open("rb") as stream:
            packed = path.name.endswith(".gz") or stream.read(len(GZIP)) == GZIP
        with gzip.open(path) if packed else path.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder; name its files, one for each rank ({path}/*.json.gz)") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MOST_BYTES:
        raise UserError(
            f"{path}: larger than {MOST_BYTES // 10**6} MB uncompressed; "
            "record fewer steps (torch.profiler.schedule(active=5)), without with_stack"
        )
    for beginning, what in OTHER_FILES.items():
        if content.startswith(beginning) or path.suffix.encode() == beginning:
            raise UserError(f"{path}: {what}; record the job with torch.profiler (export_chrome_trace)")
    data = parsed_json(content, file=str(path))
    if isinstance(data, dict) and isinstance(data.get("nodes"), list) and "traceEvents" not in data:
        raise UserError(f"{path}: an execution trace (ExecutionTraceObserver), without times; {NO_TRACE}")
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise UserError(f"{path}: {NO_TRACE}: no list traceEvents")
    return data


def read_rank(path: Path, data: dict[str, Any]) -> RankTrace:
    """Return the trace of one rank; raise UserError where it has no steps, or events that are not understood."""
    about = data.get("distributedInfo", {})
    tells_rank = "distributedInfo" in data
    if not isinstance(about, dict):
        raise UserError(f"{path}: distributedInfo: must be an object")
    rank = _integer(about.get("rank", 0), f"{path}: distributedInfo.rank")
    ranks = _integer(about.get("world_size", 1), f"{path}: distributedInfo.world_size")
    if not 0 <= rank < ranks:
        raise UserError(f"{path}: distributedInfo.rank = {rank}: must be below world_size = {ranks}")
    events, memory, zero_us = _events(path, data["traceEvents"])
    steps = _steps(path, events)
    origin_s = steps[min(steps)][0]
    base_ns = data.get("baseTimeNanoseconds", 0)
    base_s = base_ns / 1e9 if isinstance(base_ns, int) and abs(base_ns) < 1e3 * MOST_US else 0.0
    trace = RankTrace(
        path=path,
        rank=rank,
        ranks=ranks,
        tells_rank=tells_rank,
        backend="",
        on_gpu=any(event.category in DEVICE_CATEGORIES for event in events),
        origin_s=origin_s + zero_us / 1e6 + base_s,
        numbers=tuple(sorted(steps)),
        bounds_s=(),
        pieces=[],
        calls=[],
        memory=[(time_s - origin_s, allocated, reserved) for time_s, allocated, reserved in memory],
    )
    events = [replace(event, start_s=event.start_s - origin_s, end_s=event.end_s - origin_s) for event in events]
    bounds = [steps[number] for number in trace.numbers]
    trace.bounds_s = tuple((start_s - origin_s, end_s - origin_s) for start_s, end_s in bounds)
    groups = _Groups(about, rank, ranks)
    phases = _Phases(events, trace.bounds_s)
    if trace.on_gpu:
        _read_gpu(trace, events, groups, phases)
    else:
        _read_cpu(trace, events, groups, phases)
    if any(call.size_bytes is None for call in trace.calls):
        unsized = sum(call.size_bytes is None for call in trace.calls)
        trace.partial["collectives without sizes (record with record_shapes=True)"] += unsized
    if any(call.group is None for call in trace.calls):
        ungrouped = sum(call.group is None for call in trace.calls)
        trace.partial["collectives of which the trace does not tell the group"] += ungrouped
    return trace


# Events ---------------------------------------------------------------------------------------------------------------


def _integer(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{where} = {value!r:.40}: must be an integer")
    return value


def _events(path: Path, found: list[Any]) -> tuple[list[_Event], list[Memory], float]:
    """Return the spans, in order of time, a GPU's memory, and the time in us from which both are counted.

    Raises UserError for events that are not understood.
    """
    spans, memory = [], []
    zero_us = math.nan
    for number, event in enumerate(found):
        where = f"{path}: traceEvents[{number}]"
        kind = event.get("ph") if isinstance(event, dict) else None
        if not isinstance(kind, str) or kind not in PHASES_OF_EVENTS:
            raise UserError(f"{where}: unknown event: {event!r:.60}; {NO_TRACE}")
        counts_memory = kind == "i" and event.get("name") == "[memory]"
        name, args, category = event.get("name"), event.get("args", {}), str(event.get("cat"))
        if (kind != "X" and not counts_memory) or category in IGNORED_CATEGORIES:
            continue
        if not isinstance(name, str) or not isinstance(args, dict):
            raise UserError(f"{where}: an event needs a name, and args that are an object")
        start_us = _time_us(event, "ts", where)
        zero_us = start_us if math.isnan(zero_us) else zero_us
        start_s = (start_us - zero_us) * 1e-6  # times since 1970 would lose digits
        if counts_memory:
            if args.get("Device Type") == GPU:
                allocated, reserved = (_integer(args.get(f"Total {key}"), f"{where}: Total {key}") for key in COUNTERS)
                memory.append((start_s, allocated, reserved))
            continue
        if category in OLD_CATEGORIES:
            raise UserError(
                f"{where}: cat = {category!r}: a category of PyTorch before 2023; record with a newer release"
            )
        if category not in (*HOST_CATEGORIES, *DEVICE_CATEGORIES):
            raise UserError(
                f"{where}: cat = {category!r:.40}: unknown event; "
                f"understood: {', '.join((*HOST_CATEGORIES, *DEVICE_CATEGORIES))}"
            )
        end_s = start_s + _time_us(event, "dur", where) * 1e-6
        thread = (str(event.get("pid")), str(event.get("tid")))
        spans.append(_Event(name, category, thread, start_s, end_s, args))
    spans.sort(key=lambda event: (event.start_s, -event.end_s))
    return spans, sorted(memory), zero_us


GPU = 1
"""`Device Type` of memory on a GPU."""
COUNTERS = ("Allocated", "Reserved")


MOST_US = 1e18
"""Times above are no times: thirty thousand years."""


def _time_us(event: dict[str, Any], key: str, where: str) -> float:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MOST_US:
        raise UserError(f"{where}: {key} = {value!r:.40}: must be a finite number of microseconds")
    if key == "dur" and value < 0:
        raise UserError(f"{where}: dur = {value!r:.40}: must not be negative")
    return float(value)


def _steps(path: Path, events: Sequence[_Event]) -> dict[int, tuple[float, float]]:
    """Return start and end of each step on the host, by number; one ends where the next begins."""
    starts: dict[int, tuple[float, float]] = {}
    for event in events:
        if event.category == "user_annotation" and event.name.startswith(STEP):
            number = event.name.removeprefix(STEP)
            if not number.isdecimal() or len(number) > MOST_DIGITS:
                raise UserError(f"{path}: {event.name!r:.60}: a step needs a number")
            if int(number) in starts:
                raise UserError(f"{path}: {event.name} is there twice: traces of several recordings in one file")
            starts[int(number)] = (event.start_s, event.end_s)
    if not starts:
        raise UserError(
            f"{path}: a trace without steps ({STEP}N); call profiler.step() after each step of the training"
        )
    if len(starts) < FEWEST_STEPS:
        raise UserError(
            f"{path}: {len(starts)} step; at least {FEWEST_STEPS} are needed, since the first is left out: "
            "record more (torch.profiler.schedule(active=5))"
        )
    return {
        number: (start_s, starts[number + 1][0] if number + 1 in starts else end_s)
        for number, (start_s, end_s) in starts.items()
    }


FEWEST_STEPS = 2
MOST_DIGITS = 9


OF_LIBRARIES = ("nccl", "rccl", "msccl")
"""Beginnings of the names of kernels that communicate: NCCL's, also those of AMD's RCCL, and of MSCCL inside of it."""


class _Phases:
    """Looks up the phase of work that a host thread did or launched at some time."""

    def __init__(self, events: Iterable[_Event], bounds_s: Sequence[tuple[float, float]]) -> None:
        self._bounds_s = bounds_s
        self._backward: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        self._optimizer: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        self._last_backward_s = [math.inf] * len(bounds_s)
        for event in events:
            if event.name.startswith((BACKWARD, *REDUCER)):
                _extend(self._backward[event.thread], event)
                step = self._step(event.start_s)
                if step is not None:
                    self._last_backward_s[step] = event.end_s
            elif event.name.startswith(OPTIMIZER):
                _extend(self._optimizer[event.thread], event)

    def _step(self, time_s: float) -> int | None:
        step = bisect_right(self._bounds_s, (time_s, math.inf)) - 1
        return step if step >= 0 and time_s < self._bounds_s[step][1] else None

    def at(self, thread: Any, time_s: float) -> str:
        """Return the phase; between the last backward of a step and its end, gradients are clipped and applied."""
        if _covered(self._backward.get(thread, ()), time_s):
            return "backward"
        if _covered(self._optimizer.get(thread, ()), time_s):
            return "optimizer"
        step = self._step(time_s)
        return "optimizer" if step is not None and time_s >= self._last_backward_s[step] else "forward"


def _extend(intervals: list[tuple[float, float]], event: _Event) -> None:
    """Add a span to disjoint intervals, which are in order of time."""
    if intervals and event.start_s <= intervals[-1][1]:
        intervals[-1] = (intervals[-1][0], max(intervals[-1][1], event.end_s))
    else:
        intervals.append((event.start_s, event.end_s))


def _covered(intervals: Sequence[tuple[float, float]], time_s: float) -> bool:
    place = bisect_right(intervals, (time_s, math.inf)) - 1
    return place >= 0 and time_s < intervals[place][1]


class _Groups:
    """The process groups of a rank: from a call's own fields, else from `distributedInfo`."""

    def __init__(self, about: Mapping[str, Any], rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._by_name: dict[str, tuple[int, ...]] = {}
        groups = about.get("pg_config", [])
        for group in groups if isinstance(groups, list) else []:
            members = group.get("ranks") if isinstance(group, dict) else None
            if isinstance(members, list) and all(isinstance(member, int) for member in members):
                if not members and group.get("pg_size") == ranks:
                    members = list(range(ranks))
                self._by_name[str(group.get("pg_name"))] = tuple(sorted(members))
        own = {members for members in self._by_name.values() if rank in members and len(members) > 1}
        whole = tuple(range(ranks))
        self.only = whole if not self._by_name else (own.pop() if len(own) == 1 else None)
        """The group of all calls, where there is but one."""

    def of(self, args: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the group that the fields of an NCCL call name; None where they do not."""
        size, listed = args.get("Group size"), str(args.get("Process Group Ranks", ""))
        members = tuple(sorted(map(int, re.findall(r"\d+", listed))))
        if members and "..." not in listed and size in (None, len(members)):
            return members
        named = self._by_name.get(str(args.get("Process Group Name")))
        if named is not None and size in (None, len(named)):
            return named
        return tuple(range(self.ranks)) if size == self.ranks else None


def _kind(name: str) -> str | None:
    """Return the kind of a collective by the name that torch or NCCL gives it.

    >>> _kind("_allgather_base"), _kind("allreduce_"), _kind("all_reduce"), _kind("shuffle")
    ('all-gather', 'all-reduce', 'all-reduce', None)
    """
    return KIND_OF.get(name.strip("_").lower())


def _element_bytes(dtype: Any) -> int | None:
    word = str(dtype).lower()
    return 1 if word.startswith("float8") else ELEMENT_BYTES.get(word)


# A GPU's kernels ------------------------------------------------------------------------------------------------------


def _read_gpu(trace: RankTrace, events: Sequence[_Event], groups: _Groups, phases: _Phases) -> None:
    """Fill in bounds, pieces and calls from kernels, copies and the host's calls that launched them."""
    launches: dict[Any, _Event] = {}
    records: dict[Any, _Event] = {}
    for event in events:
        if event.category in ("cuda_runtime", "cuda_driver"):
            launches.setdefault(_number(event, "correlation"), event)
        elif event.name == "record_param_comms":
            records[_number(event, "External id")] = event
    launches.pop(None, None)
    records.pop(None, None)
    device = [event for event in events if event.category in DEVICE_CATEGORIES]
    unlaunched = of_graphs = 0
    launched_s = []
    work: list[tuple[float, float, int, str]] = []
    for event in device:
        launch = launches.get(_number(event, "correlation"))
        launched_s.append((launch.start_s if launch else event.start_s, event.end_s))
        if event.category == "gpu_memcpy":
            work.append((event.start_s, event.end_s, COPIES, EXPOSED_COPIES))
        elif event.name.lower().removeprefix("void ").startswith(OF_LIBRARIES) or "Collective name" in event.args:
            work.append((event.start_s, event.end_s, COMMUNICATION, WAITING))
            trace.backend = "nccl"
            trace.calls += _nccl_call(trace, event, records, groups)
        else:
            unlaunched += launch is None
            of_graphs += launch is not None and launch.name.endswith("GraphLaunch")
            phase = phases.at(launch.thread, launch.start_s) if launch else "forward"
            work.append((event.start_s, event.end_s, COMPUTE, phase))
    if unlaunched:
        trace.partial["kernels without a launch, taken as of the forward"] += unlaunched
    if of_graphs:
        trace.partial["kernels of CUDA graphs, taken as of the phase in which their graph is launched"] += of_graphs
    trace.bounds_s = _device_bounds(trace.bounds_s, launched_s)
    trace.pieces = list(_by_precedence(work))


def _number(event: _Event, key: str) -> int | None:
    value = event.args.get(key)
    return value if isinstance(value, int) else None


def _device_bounds(
    bounds_s: Sequence[tuple[float, float]], launched_s: Sequence[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """Return the steps' bounds on the device: none begins before what was launched earlier has ended."""
    ordered = sorted(launched_s)
    bounds: list[tuple[float, float]] = []
    latest_s, upcoming = -math.inf, 0

    def moved(time_s: float) -> float:
        nonlocal latest_s, upcoming
        while upcoming < len(ordered) and ordered[upcoming][0] < time_s:
            latest_s = max(latest_s, ordered[upcoming][1])
            upcoming += 1
        return max(time_s, latest_s)

    for start_s, end_s in bounds_s:
        began_s = moved(start_s)
        bounds.append((began_s, moved(end_s)))
    return tuple(bounds)


COMPUTE, COMMUNICATION, COPIES = range(3)
"""Kinds of work on a GPU; while several are active, the first counts: the others are hidden by it."""


def _by_precedence(work: Sequence[tuple[float, float, int, str]]) -> Iterator[Piece]:
    """Yield disjoint pieces of (start, end, kind, phase): at every time the first kind that is active."""
    edges = sorted(
        edge
        for number, (start_s, end_s, _, _) in enumerate(work)
        if end_s > start_s
        for edge in ((start_s, 1, number), (end_s, 0, number))
    )
    active: tuple[dict[int, str], ...] = ({}, {}, {})
    before: Piece | None = None
    since_s = 0.0
    for time_s, begins, number in edges:
        phase = next((kind[next(reversed(kind))] for kind in active if kind), None)
        if phase is not None and time_s > since_s:
            if before and before.phase == phase and before.end_s == since_s:
                before = before._replace(end_s=time_s)
            else:
                if before:
                    yield before
                before = Piece(since_s, time_s, phase)
        since_s = time_s
        _, _, kind, phase = work[number]
        if begins:
            active[kind][number] = phase
        else:
            del active[kind][number]
    if before:
        yield before


def _nccl_call(trace: RankTrace, event: _Event, records: Mapping[Any, _Event], groups: _Groups) -> list[Call]:
    """Return the call of an NCCL kernel; none for the receiving half of a message, or what has no record."""
    args = event.args
    if "Collective name" not in args and (record := records.get(_number(event, "External id"))) is not None:
        args = record.args
    name = args.get("Collective name")
    kind = _kind(str(name)) if name is not None else None
    if kind is None:
        lacking = f"collectives named {name!r:.40}"
        if str(name) in NO_CALLS or (name is None and "SendRecv" in event.name):  # older traces name neither of the two
            lacking = "messages of a batch of isend and irecv (or an all-to-all), which have no record"
        elif name is None:
            lacking = "NCCL's kernels without the fields of record_param_comms"
        trace.partial[lacking] += 1
        return []
    if kind == "receive":
        return []
    group = groups.of(args)
    sides = [args.get(f"{side} msg nelems") for side in ("In", "Out")]
    counts = [count for count in sides if isinstance(count, int) and not isinstance(count, bool)]
    element = _element_bytes(args.get("dtype"))
    size: int | None = None
    if kind == "barrier":
        size = 0
    elif counts and element is not None:
        size = element * (max(counts) if kind in LARGER_SIDE else counts[0])
    if kind == "send":
        target = args.get("Dst Rank")
        group = tuple(sorted((groups.rank, target))) if isinstance(target, int) and target >= 0 else None
    return [Call(kind, group, size, event.start_s, event.end_s)]


# A CPU's operators ----------------------------------------------------------------------------------------------------


def _read_cpu(trace: RankTrace, events: Sequence[_Event], groups: _Groups, phases: _Phases) -> None:
    """Fill in pieces and calls from operators, and from gloo's annotations."""
    transfers = [event for event in events if event.name.startswith("gloo:")]
    if transfers:
        trace.backend = "gloo"
    leaves, posts = _leaves(event for event in events if event.category == "cpu_op")
    trace.calls = _gloo_calls(trace, posts, transfers, groups)
    work = [Piece(leaf.start_s, leaf.end_s, phases.at(leaf.thread, leaf.start_s)) for leaf in leaves]
    loading = [(event.start_s, event.end_s) for event in events if event.name.startswith(LOADING)]
    ends_s = sorted(event.end_s for event in transfers)
    for start_s, end_s in trace.bounds_s:
        inside = [
            Piece(max(start_s, piece.start_s), min(end_s, piece.end_s), piece.phase)
            for piece in work
            if piece.end_s > start_s and piece.start_s < end_s
        ]
        trace.pieces += _with_gaps(inside, ends_s, loading, end_s)


def _leaves(operators: Iterable[_Event]) -> tuple[list[_Event], list[_Event]]:
    """Return the operators that call no other, and the outermost ones that call a collective, both in order of time."""
    leaves: list[_Event] = []
    posts: list[_Event] = []
    open_ones: dict[Any, list[list[Any]]] = defaultdict(list)  # by thread: (operator, whether it calls another)
    for event in operators:
        stack = open_ones[event.thread]
        while stack and stack[-1][0].end_s <= event.start_s:
            ended, calls_others = stack.pop()
            if not calls_others:
                leaves.append(ended)
        if event.name.startswith(CALLS[0]) and not any(outer.name.startswith(CALLS[0]) for outer, _ in stack):
            posts.append(event)
        if stack:
            stack[-1][1] = True
        stack.append([event, False])
    leaves += [event for stack in open_ones.values() for event, calls_others in stack if not calls_others]
    leaves = [event for event in leaves if not event.name.startswith(CALLS)]
    return sorted(leaves, key=lambda event: event.start_s), posts


def _with_gaps(
    work: Sequence[Piece], ends_s: Sequence[float], loading: Sequence[tuple[float, float]], step_end_s: float
) -> Iterator[Piece]:
    """Yield a step's work and what happens between its operators.

    If a transfer ends within a gap, the gap up to that end is waiting; a thread that goes on before that end has not
    waited for the transfer. (The annotation may end a little after the thread was woken: by less than the thread
    waited.) The rest of a gap between two operators of one phase is the interpreter's part of that phase, unless
    batches are loaded.
    """
    before: Piece | None = None
    for piece in (*work, Piece(step_end_s, step_end_s, "idle")):
        if before is None:
            before = piece
            yield piece
            continue
        begin_s, end_s = before.end_s, piece.start_s
        if end_s > begin_s:
            last = bisect_right(ends_s, 2 * end_s - begin_s) - 1
            resumed_s = min(end_s, max(begin_s, ends_s[last])) if last >= 0 else begin_s
            if resumed_s > begin_s:
                yield Piece(begin_s, resumed_s, WAITING)
            if piece.phase == before.phase and end_s > resumed_s and not _covered(loading, (resumed_s + end_s) / 2):
                yield Piece(resumed_s, end_s, before.phase)
        if piece.end_s > begin_s:  # operators of several threads may overlap
            before = piece._replace(start_s=max(begin_s, end_s))
            yield before


def _gloo_calls(trace: RankTrace, posts: Sequence[_Event], transfers: Sequence[_Event], groups: _Groups) -> list[Call]:
    """Return the calls, each with its transfer: the first one of the same size that begins after the call is posted."""
    rest = deque(transfers)
    calls = []
    for post in posts:
        kind = _kind(post.name.removeprefix(CALLS[0]))
        if kind is None:
            trace.partial[f"collectives named {post.name!r:.40}"] += 1
            continue
        while rest and rest[0].start_s < post.start_s:
            rest.popleft()  # of a call that began before the recording
        if not rest:
            trace.partial["calls without an annotation of gloo"] += 1
            continue
        counts = _element_counts(post.args)
        place = next((i for i, each in enumerate(rest) if set(_element_counts(each.args)) & set(counts)), 0)
        transfer = rest[place]
        del rest[place]
        if kind == "receive":
            continue
        types = transfer.args.get("Input type")  # the post does not tell that of a list of tensors
        element = _element_bytes(types[0]) if isinstance(types, list) and types else None
        size = 0 if kind == "barrier" else None
        if size is None and counts and element is not None:
            size = element * (max(counts) if kind in LARGER_SIDE else counts[0])
        group = groups.only if kind != "send" else _ends_of_message(post.args, groups)
        calls.append(Call(kind, group, size, transfer.start_s, transfer.end_s))
    return calls


def _element_counts(args: Mapping[str, Any]) -> list[int]:
    """Return the number of elements of each argument of an operator that is a tensor or a list of tensors.

    >>> _element_counts({"Input Dims": [[[8], [2, 2]], [], [16]], "Input type": ["TensorList", "Scalar", "float"]})
    [12, 16]
    """
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return []
    counts = []
    for shape, dtype in zip(dims, types, strict=False):
        tensors = shape if dtype == "TensorList" else [shape]
        if isinstance(shape, list) and shape and all(isinstance(tensor, list) for tensor in tensors):
            sizes = [size for tensor in tensors for size in tensor]
            if all(isinstance(size, int) for size in sizes):
                counts.append(sum(math.prod(tensor) for tensor in tensors))
    return counts


def _ends_of_message(args: Mapping[str, Any], groups: _Groups) -> tuple[int, ...] | None:
    """Return the two ranks of a message: this one, and the one whose index in the group it names."""
    inputs = args.get("Concrete Inputs")
    if groups.only is None or not isinstance(inputs, list) or len(inputs) < MESSAGE_ARGUMENTS:
        return None
    index = str(inputs[2])
    if not index.isdecimal() or int(index) >= len(groups.only):
        return None
    return tuple(sorted((groups.rank, groups.only[int(index)])))


MESSAGE_ARGUMENTS = 4
"""Number of arguments of `c10d::send`: tensors, group, index of the receiver, tag."""
