"""A measured Result from the profiler traces of all ranks of a job, and one step of it as a trace.

A collective's transfer is the shortest time that any of its ranks spent in it: the last rank to arrive waits for none.
What another rank spent beyond that is lateness: its wait for the last one. Clocks of hosts differ, so ranks are aligned
by the median difference of the ends of the collectives they share, which all members leave together.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from analysis.ingest.kineto import Call, RankTrace, read_document, read_rank
from gssim.errors import UserError
from gssim.execution import SHOWN, code_digest
from gssim.result import (
    EXPOSED_COPIES,
    MEASURED_PHASES,
    PHASES,
    Collective,
    Density,
    Held,
    Periods,
    RankClass,
    Result,
    Span,
    Step,
    chrome_trace,
    merge_collectives,
    typical_phases,
)
from gssim.scenario import Loaded, Scenario
from gssim.terminal import PIPE_WIDTH, plain_console, rank_list
from gssim.units import human_bytes, human_seconds, validated

ENDING_TOGETHER = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier")
"""Kinds of collectives that no member leaves before all have arrived."""


@dataclass(frozen=True)
class Meeting:
    """One collective of a step, as its ranks saw it."""

    kind: str
    group: tuple[int, ...]
    size_bytes: int
    step: int
    """Index of the step."""
    calls: dict[int, Call]
    """Calls by rank; of a message, the sender's alone."""

    @property
    def transfer_s(self) -> float:
        """The shortest time of a rank."""
        return min(call.end_s - call.start_s for call in self.calls.values())

    @property
    def lateness_s(self) -> float:
        """How much longer than that the rank that arrived first spent in it."""
        return max(call.end_s - call.start_s for call in self.calls.values()) - self.transfer_s


@dataclass(frozen=True)
class Ingested:
    """A Result that was read from a job's traces."""

    result: Result
    trace: str | None
    """The step of median length, as `analysis timeline` reads it; None where the file was such a trace itself."""
    notes: tuple[str, ...] = ()
    """What the traces lack, a line each."""


def ingest(paths: Sequence[Path], loaded: Loaded) -> Ingested:
    """Return the measured Result of a job's traces, one file a rank, which ran the scenario.

    A trace of `gsreal run --trace` gives back the Result of its run. Raises UserError where a file is no trace, ranks
    or steps are missing, or the traces are of another job than the scenario.
    """
    documents = [(path, read_document(path)) for path in paths]
    own = [
        path for path, data in documents if isinstance(data.get("otherData"), dict) and "source" in data["otherData"]
    ]
    if own:
        if len(documents) > 1:
            raise UserError(f"{own[0]}: a trace of `gsreal run --trace` has all ranks: name it alone")
        return Ingested(_own_result(own[0], documents[0][1]["otherData"], loaded), None)
    traces = sorted((read_rank(path, data) for path, data in documents), key=lambda trace: trace.rank)
    del documents
    _check(traces, loaded)
    return _of_ranks(traces, loaded)


def _own_result(path: Path, about: dict[str, Any], loaded: Loaded) -> Result:
    if about["source"] != "measured":
        raise UserError(f"{path}: a {about['source']!r:.20} step where a measured one belongs")
    if "result" not in about:
        raise UserError(f"{path}: otherData.result: missing; trace again with this gsreal")
    result = validated(Result, about["result"], file=f"{path}: otherData.result")
    if result.scenario_id != loaded.scenario.scenario_id:
        raise UserError(
            f"{path}: a trace of scenario {result.scenario_id} ({result.scenario.get('name')!r:.60}), "
            f"but {loaded.file} is {loaded.scenario.scenario_id}; give the same --set"
        )
    return result


def _check(traces: Sequence[RankTrace], loaded: Loaded) -> None:
    """Raise UserError where ranks or steps are missing, or differ from the scenario's."""
    wanted, first = loaded.scenario.ranks, traces[0]
    by_rank: dict[int, RankTrace] = {}
    for trace in traces:
        if not trace.tells_rank and wanted > 1:
            raise UserError(
                f"{trace.path}: does not tell its rank (no distributedInfo): no process group when "
                f"it was written, or another program wrote it; {loaded.file} has {wanted} ranks"
            )
        if trace.rank in by_rank:
            raise UserError(f"{trace.path}: rank {trace.rank} again, as in {by_rank[trace.rank].path}")
        by_rank[trace.rank] = trace
        if trace.ranks != wanted:
            raise UserError(
                f"{trace.path}: of a job of {trace.ranks} rank{'s' * (trace.ranks > 1)}; {loaded.file} has {wanted}"
            )
        if trace.numbers != first.numbers:
            raise UserError(
                f"{trace.path}: steps {_shown(trace.numbers)}, but {first.path} has {_shown(first.numbers)}; "
                "record the same steps on every rank"
            )
        backend = loaded.scenario.cluster.backend
        if trace.backend not in ("", backend):
            raise UserError(
                f"{trace.path}: collectives of {trace.backend}, but {loaded.file} has cluster.backend = {backend!r}"
            )
    missing = [rank for rank in range(wanted) if rank not in by_rank]
    if missing:
        raise UserError(f"no trace of rank {', '.join(map(str, missing[:5]))}; needed: one of each of {wanted} ranks")


def _shown(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"


def _of_ranks(traces: Sequence[RankTrace], loaded: Loaded) -> Ingested:
    """Return the Result of the steps after the first, and the step of median length as a trace."""
    scenario, counted = loaded.scenario, range(1, len(traces[0].bounds_s))
    partial = sum((trace.partial for trace in traces), Counter[str]())
    meetings, unequal = _meetings(traces, counted)
    if unequal:
        partial["collectives that some of their ranks lack"] += unequal
    rank_times = [[trace.bounds_s[step][1] - trace.bounds_s[step][0] for step in counted] for trace in traces]
    times = [fmean(step) for step in zip(*rank_times, strict=True)]
    if min(times) <= 0:
        raise UserError(f"{traces[0].path}: a step of no length")
    outer = _outer_steps(traces[0].path, scenario, meetings, counted)
    phases = [_phases(trace, counted, outer, scenario.policies.sync_every_steps or 1) for trace in traces]
    mean = {
        name: fmean(each.get(name, 0.0) for each in phases)
        for name in MEASURED_PHASES
        if name in PHASES or any(name in each for each in phases)
    }
    compared = outer or list(counted)
    collectives, steady = _collectives(meetings, compared)
    if steady < len(compared):
        partial["steps with other collectives than most"] += len(compared) - steady
    periods = _periods(scenario, times, counted, outer, collectives)
    notes = tuple(f"{count} x {what}" for what, count in partial.items())
    offsets_s = _offsets(traces, meetings)
    provenance = {
        "code": code_digest()[:SHOWN],
        "backend": scenario.cluster.backend,
        "memory_counter": "profiler" if any(trace.memory for trace in traces) else "none",
        "ingested": {
            "traces": [trace.path.name for trace in traces],
            "steps": [traces[0].numbers[step] for step in counted],
            "clock_offsets_s": [round(offset_s, 9) for offset_s in offsets_s],
            "collectives": _times(meetings, len(counted)),
            "partial": list(notes),
        },
    }
    result = loaded.measured(
        times,
        mean,
        step_time_s=None if periods is None else periods.step_time_s,
        periods=periods,
        density=Density(),
        collectives=collectives,
        ranks=tuple(_rank_class(trace, own, scenario) for trace, own in zip(traces, phases, strict=True)),
        provenance=provenance,
    )
    typical = counted[sorted(range(len(times)), key=lambda step: (times[step], step))[len(times) // 2]]
    return Ingested(result, chrome_trace(_step(traces, typical, offsets_s, result), result), notes)


def _rank_class(trace: RankTrace, phases_s: dict[str, float], scenario: Scenario) -> RankClass:
    """Return the entry of a rank, with its peaks of memory after the first step."""
    sizes = [each for time_s, *each in trace.memory if time_s >= trace.bounds_s[1][0]]
    return RankClass(
        ranks=(trace.rank,),
        count=1,
        device=scenario.cluster.devices[trace.rank].type,
        peak_allocated_bytes=float(max((allocated for allocated, _ in sizes), default=0)),
        peak_reserved_bytes=max((float(reserved) for _, reserved in sizes), default=None),
        peak_by_category_bytes={},
        phases_s=phases_s,
        batch_share=scenario.batch_sizes[trace.rank] / scenario.workload.global_batch_size,
        shard_share=scenario.shard_shares[trace.rank],
    )


# Periods --------------------------------------------------------------------------------------------------------------


def _outer_steps(path: Path, scenario: Scenario, meetings: Sequence[Meeting], counted: range) -> list[int]:
    """Return the steps in which replicas exchange parameters; none where ranks synchronize in every step.

    A recording does not tell the number of a step in the training, so they are recognized by what is sent. Raises
    UserError where inner or outer steps are missing, or if fragments are exchanged in several steps of a period.
    """
    every = scenario.policies.sync_every_steps
    if every is None:
        return []
    if scenario.policies.in_fragments:
        raise UserError(
            f"{path}: method {scenario.plan.method!r} exchanges fragments in several steps of a period, which a "
            "recording does not tell apart; methods that synchronize all parameters at once can be ingested"
        )
    outer = sorted({each.step for each in meetings if scenario.policies.joins_replicas(each.group)})
    if not outer or (every > 1 and len(outer) == len(counted)):
        raise UserError(
            f"{path}: in {'none' if not outer else 'all'} of {len(counted)} steps after the first are parameters "
            f"exchanged between replicas, but plan.sync_every_steps = {every}; record a whole period: {every + 1} steps"
        )
    return outer


def _periods(
    scenario: Scenario,
    times_s: Sequence[float],
    counted: range,
    outer: Sequence[int],
    collectives: Sequence[Collective],
) -> Periods | None:
    """Return the times of inner and outer steps; None where ranks synchronize in every step."""
    if not outer:
        return None
    inner_s = [time_s for step, time_s in zip(counted, times_s, strict=True) if step not in outer]
    joining = [each for each in collectives if scenario.policies.joins_replicas(each.group)]
    return Periods(
        every_steps=scenario.policies.sync_every_steps or 1,
        inner_step_time_s=median(inner_s) if inner_s else None,
        outer_step_time_s=median(time_s for step, time_s in zip(counted, times_s, strict=True) if step in outer),
        outer_bytes=float(sum(each.bytes * each.count for each in joining)),
    )


# Phases ---------------------------------------------------------------------------------------------------------------


def _phases(trace: RankTrace, counted: range, outer: Sequence[int], every: int) -> dict[str, float]:
    """Return a rank's seconds by phase in a typical step (see `gssim.result.typical_phases`) or, where some steps are
    outer ones, in the mean step of a period of `every`.

    Steps are laid end to end, so that the time between recorded steps belongs to none.
    """
    lengths_s = [trace.bounds_s[step][1] - trace.bounds_s[step][0] for step in counted]
    ends_s = list(accumulate(lengths_s, initial=0.0))
    spans = [
        Span(trace.rank, "compute", piece.phase, piece.phase, start_s - began_s + at_s, end_s - began_s + at_s)
        for step, at_s in zip(counted, ends_s, strict=False)
        for began_s, ended_s in (trace.bounds_s[step],)
        for piece in trace.pieces
        if (start_s := max(piece.start_s, began_s)) < (end_s := min(piece.end_s, ended_s))
    ]
    if not outer or every == 1:
        return typical_phases(spans, ends_s)
    inner_s, outer_s = (
        typical_phases(spans, ends_s, [(step in outer) is kind for step in counted]) for kind in (False, True)
    )
    names = dict.fromkeys((*inner_s, *outer_s))
    return {name: ((every - 1) * inner_s.get(name, 0.0) + outer_s.get(name, 0.0)) / every for name in names}


# Collectives ----------------------------------------------------------------------------------------------------------


def _meetings(traces: Sequence[RankTrace], counted: range) -> tuple[list[Meeting], int]:
    """Return the collectives of the counted steps, and the number of those that some of their ranks lack.

    Within a step, the k-th call of a kind, group and size on one rank belongs to the k-th on the others. Calls of
    unknown group or size are left out.
    """
    met: dict[tuple[Any, ...], dict[int, Call]] = defaultdict(dict)
    for trace in traces:
        seen: Counter[tuple[Any, ...]] = Counter()
        for call in trace.calls:
            step = next((step for step in counted if _inside(call.start_s, trace.bounds_s[step])), None)
            if step is None or call.group is None or call.size_bytes is None:
                continue
            sender = trace.rank if call.kind == "send" else None
            key = (step, call.kind, call.group, call.size_bytes, sender)
            met[(*key, seen[key])][trace.rank] = call
            seen[key] += 1
    meetings = [
        Meeting(kind, group, size, step, calls)
        for (step, kind, group, size, _, _), calls in sorted(met.items(), key=str)
    ]
    unequal = sum(len(each.calls) < len(each.group) for each in meetings if each.kind != "send")
    return meetings, unequal


def _inside(time_s: float, bounds_s: tuple[float, float]) -> bool:
    return bounds_s[0] <= time_s < bounds_s[1]


def _collectives(meetings: Sequence[Meeting], counted: Sequence[int]) -> tuple[tuple[Collective, ...], int]:
    """Return the collectives of most of these steps, and the number of steps that have just these."""
    by_step: dict[int, list[Collective]] = {step: [] for step in counted}
    for meeting in meetings:
        if meeting.step not in by_step:
            continue
        entry = Collective(kind=meeting.kind, group=meeting.group, bytes=meeting.size_bytes, count=1)
        by_step[meeting.step].append(entry)
    steps = Counter(merge_collectives(entries) for entries in by_step.values())
    return steps.most_common(1)[0]


def _times(meetings: Sequence[Meeting], steps: int) -> list[dict[str, Any]]:
    """Return transfer and lateness by kind, group and size: sums of a step, means over the counted steps."""
    kinds: dict[tuple[str, tuple[int, ...], int], list[Meeting]] = defaultdict(list)
    for meeting in meetings:
        kinds[meeting.kind, meeting.group, meeting.size_bytes].append(meeting)
    return [
        {
            "kind": kind,
            "group": list(group),
            "bytes": size,
            "count": len(same) / steps,
            "transfer_s": sum(each.transfer_s for each in same) / steps,
            "lateness_s": sum(each.lateness_s for each in same) / steps,
        }
        for (kind, group, size), same in sorted(kinds.items())
    ]


# Clocks, and one step as a trace --------------------------------------------------------------------------------------


def _offsets(traces: Sequence[RankTrace], meetings: Sequence[Meeting]) -> list[float]:
    """Return by how much each rank's host clock is ahead of the first rank's, by the ends of shared collectives.

    Ranks that share none, directly or through others, keep their host's clock.
    """
    ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    for meeting in meetings:
        if meeting.kind in ENDING_TOGETHER:
            first = min(meeting.calls)
            for rank, call in meeting.calls.items():
                if rank != first:
                    ahead_s = call.end_s - meeting.calls[first].end_s
                    ahead_s += traces[rank].origin_s - traces[first].origin_s
                    ends[first, rank].append(ahead_s)
                    ends[rank, first].append(-ahead_s)
    offsets_s: dict[int, float] = {}
    for root in range(len(traces)):
        reached = [] if root in offsets_s else [root]
        offsets_s.setdefault(root, 0.0)
        for rank in reached:
            others = [other for one, other in ends if one == rank and other not in offsets_s]
            offsets_s |= {other: offsets_s[rank] + median(ends[rank, other]) for other in others}
            reached += others
    return [offsets_s[trace.rank] for trace in traces]


def _step(traces: Sequence[RankTrace], step: int, offsets_s: Sequence[float], result: Result) -> Step:
    """Return one step of all ranks on one clock, in seconds since the last rank began it.

    `offsets_s`: by how much each rank's clock is ahead of the first one's, by place in `traces`.
    """
    zeros_s = [
        trace.origin_s - traces[0].origin_s - offset_s for trace, offset_s in zip(traces, offsets_s, strict=True)
    ]
    began_s = max(trace.bounds_s[step][0] + zero_s for trace, zero_s in zip(traces, zeros_s, strict=True))
    spans, held, bounds_s = [], [], {}
    for trace, zero_s in zip(traces, zeros_s, strict=True):
        move_s, own = zero_s - began_s, trace.bounds_s[step]
        bounds_s[trace.rank] = (own[0] + move_s, own[1] + move_s)
        for piece in trace.pieces:
            if (start_s := max(own[0], piece.start_s)) < (end_s := min(own[1], piece.end_s)):
                label = piece.phase.replace("_", " ")
                spans.append(Span(trace.rank, "compute", label, piece.phase, start_s + move_s, end_s + move_s))
        for call in trace.calls:
            if _inside(call.start_s, own):
                times_s = (call.start_s + move_s, call.end_s + move_s)
                spans.append(Span(trace.rank, "communication", call.kind, "exposed_communication", *times_s))
        held += [
            Held(trace.rank, time_s + move_s, float(allocated))
            for time_s, allocated, _ in trace.memory
            if _inside(time_s, own)
        ]
    names = {rank: entry.device for entry in result.ranks for rank in entry.ranks}
    return Step(spans=spans, bounds_s=bounds_s, held=held, names=names)


WAITING = ("exposed_communication", EXPOSED_COPIES, "idle")


def print_ingested(result: Result) -> None:
    """Print step, time by rank, and collectives with transfer and lateness."""
    console = plain_console(PIPE_WIDTH)
    about = result.provenance.get("ingested", {})
    steps = about.get("steps", ())
    which = f", median of {len(steps)} steps ({steps[0]} to {steps[-1]})" if steps else ""
    console.print(f"{result.scenario['name']}: measured step {human_seconds(result.step_time_s)}{which}")
    table = Table("rank", "computation", "exposed communication", "exposed copies", "busy", "idle", "peak allocated")
    for entry in result.ranks:
        whole_s = sum(entry.phases_s.values())
        waits_s = [entry.phases_s.get(name, 0.0) for name in WAITING]
        peak = human_bytes(entry.peak_allocated_bytes) if entry.peak_allocated_bytes else "not recorded"
        times_s = (whole_s - sum(waits_s), *waits_s[:2], whole_s - waits_s[2], waits_s[2])
        table.add_row(rank_list(entry.ranks), *map(human_seconds, times_s), peak)
    console.print(table)
    if about.get("collectives"):
        table = Table("collective", "ranks", "count", "size", "transfer", "lateness", title="one step, mean")
        for entry in about["collectives"]:
            figures = (f"{entry['count']:.4g}", human_bytes(entry["bytes"]))
            times = (human_seconds(entry["transfer_s"]), human_seconds(entry["lateness_s"]))
            table.add_row(entry["kind"], rank_list(entry["group"]), *figures, *times)
        console.print(table)
