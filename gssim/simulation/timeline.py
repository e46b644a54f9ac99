"""The timeline of a step that a machine has executed: spans, arrows between collectives, and memory, for a trace."""

from collections import defaultdict
from collections.abc import Sequence

from gssim.engine import CollectiveInstance, Machine, RecordingTracker, TaskSpan
from gssim.program import TaskId
from gssim.result import Arrow, Held, Span, Step, arrows_among


def step_of(machine: Machine, number: int) -> Step:
    """Return step `number` of a machine that has run. Each class is shown by its first rank.

    Memory is included if the machine records it (`RecordingTracker`).
    """
    bounds_s = {each.representative: machine.ends_s[each.index][number : number + 2] for each in machine.classes}
    start_s = max(began_s for began_s, _ in bounds_s.values())
    last_s = max(ended_s for _, ended_s in bounds_s.values())
    task_spans = [span for span in machine.task_spans if span.end_s > bounds_s[span.rank][0] and span.start_s < last_s]
    spans = [span.span(start_s) for span in task_spans]
    logs = {
        each.representative: memory.log
        for each, memory in zip(machine.classes, machine.memory, strict=True)
        if isinstance(memory, RecordingTracker)
    }
    names = {}
    for each in machine.classes:
        device, count = machine.cluster.devices[each.representative].type, len(each.members)
        names[each.representative] = f"{device}, one of {count} alike" if count > 1 else device
    return Step(
        spans=spans,
        bounds_s={rank: (began_s - start_s, ended_s - start_s) for rank, (began_s, ended_s) in bounds_s.items()},
        arrows=_arrows(machine, task_spans, spans),
        held=[
            level
            for rank, log in logs.items()
            for level in _memory_levels(rank, log, bounds_s[rank][0], last_s, start_s)
        ],
        names=names,
    )


def _arrows(machine: Machine, task_spans: Sequence[TaskSpan], spans: Sequence[Span]) -> list[Arrow]:
    """Return arrows between the spans of each communication, which are recognized by exactly equal end times."""
    by_end: dict[tuple[TaskId, int, float], list[int]] = defaultdict(list)
    places = {
        (each.index, collective): (collective, number)
        for collective, instances in machine.instances.items()
        for number, instance in enumerate(instances)
        for each in instance.classes
    }
    instances = {
        (each.representative, task.id): places[each.index, task.communication]
        for each in machine.classes
        for task in machine.program.tasks[machine.roles[each.index]]
        if task.communication is not None
    }
    for number, span in enumerate(task_spans):
        place = instances.get((span.rank, span.task))
        if place is not None and span.awaited is None:
            by_end[*place, spans[number].end_s].append(number)
    arrows = []
    for (collective, which, _), members in by_end.items():
        instance = machine.instances[collective][which]
        arrows += _message_arrows(machine, instance, spans, members) or arrows_among(spans, members, collective.label)
    return arrows


def _message_arrows(
    machine: Machine, instance: CollectiveInstance, spans: Sequence[Span], members: Sequence[int]
) -> list[Arrow]:
    """Return arrows from senders to receivers, if it is known which is which."""
    receiving = {machine.classes[index].representative for index in instance.receivers}
    senders = [number for number in members if spans[number].rank not in receiving]
    if not receiving or not senders:
        return []
    label = spans[senders[0]].label
    return [Arrow(label, senders[0], number) for number in members if spans[number].rank in receiving]


def _memory_levels(
    rank: int, log: Sequence[tuple[float, dict[str, float]]], began_s: float, last_s: float, zero_s: float
) -> list[Held]:
    """Return a rank's memory over its step. Of levels at one time, the highest is kept, and then the last."""
    levels = [(time_s, sum(level.values()), level) for time_s, level in log if time_s < last_s]
    before = max((place for place, (time_s, _, _) in enumerate(levels) if time_s <= began_s), default=0)
    found: list[tuple[float, float, dict[str, float]]] = []
    for time_s, total, level in levels[before:]:
        now = (max(time_s, began_s), total, level)
        if len(found) > 1 and found[-1][0] == found[-2][0] == now[0]:
            highest = max(found[-2:], key=lambda each: each[1])
            found[-2:] = [highest, now] if highest[1] > total else [now]
        elif found and found[-1][0] == now[0] and found[-1][1] <= total:
            found[-1] = now
        else:
            found.append(now)
    return [Held(rank, time_s - zero_s, total, level) for time_s, total, level in found]
