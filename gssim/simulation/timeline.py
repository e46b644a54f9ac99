"""What a machine has done, as the step that a trace shows."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gssim.engine import CollectiveInstance, Machine, RecordingTracker
from gssim.result import Arrow, Held, Span, Step, arrows_among


def step_of(machine: Machine, number: int) -> Step:
    """Return step `number` of a machine that has run; of ranks that are alike, one stands for all.

    Memory is in it where the machine records it (`RecordingTracker`).
    """
    bounds_s = {each.representative: machine.ends_s[each.index][number : number + 2] for each in machine.classes}
    start_s = max(began_s for began_s, _ in bounds_s.values())
    last_s = max(ended_s for _, ended_s in bounds_s.values())
    spans = [
        span._replace(start_s=span.start_s - start_s, end_s=span.end_s - start_s)
        for span in machine.spans
        if span.end_s > bounds_s[span.rank][0] and span.start_s < last_s
    ]
    return Step(
        spans=spans,
        bounds_s={rank: (began_s - start_s, ended_s - start_s) for rank, (began_s, ended_s) in bounds_s.items()},
        arrows=_arrows(machine, spans),
        held=[held for rank, log in _logs(machine) for held in _held(rank, log, bounds_s[rank][0], last_s, start_s)],
        names={each.representative: _name(machine, each.representative, len(each.members)) for each in machine.classes},
    )


def _name(machine: Machine, rank: int, count: int) -> str:
    device = machine.cluster.devices[rank].type
    return f"{device}, one of {count} alike" if count > 1 else device


def _arrows(machine: Machine, spans: Sequence[Span]) -> list[Arrow]:
    """Return arrows of all that took part in the same communication: they end at the same time, to the last bit."""
    met: dict[tuple[str, int, float], list[int]] = defaultdict(list)
    meetings = _meetings(machine)
    for number, span in enumerate(spans):
        place = meetings.get((span.rank, span.stream, span.label))
        if place is not None:
            met[*place, span.end_s].append(number)
    found = []
    for (label, which, _), members in met.items():
        meeting = machine.instances[label][which]
        found += _of_message(machine, meeting, spans, members) or arrows_among(spans, members, label)
    return found


def _meetings(machine: Machine) -> dict[tuple[int, str, str], tuple[str, int]]:
    """Return in which communication, and which of its meetings, a rank takes part in a span of a stream and label."""
    places = {
        (each.index, label): (label, number)
        for label, found in machine.instances.items()
        for number, meeting in enumerate(found)
        for each in meeting.classes
    }
    return {
        (each.representative, task.stream, task.label): places[each.index, task.communication]
        for each in machine.classes
        for task in machine.program.tasks[machine.roles[each.index]]
        if task.communication is not None
    }


def _of_message(
    machine: Machine, meeting: CollectiveInstance, spans: Sequence[Span], members: Sequence[int]
) -> list[Arrow]:
    """Return arrows from those that send to those that receive, where that is said."""
    receiving = {machine.classes[index].representative for index in meeting.receivers}
    senders = [number for number in members if spans[number].rank not in receiving]
    if not receiving or not senders:
        return []
    label = spans[senders[0]].label
    return [Arrow(label, senders[0], number) for number in members if spans[number].rank in receiving]


def _logs(machine: Machine) -> Iterable[tuple[int, list[tuple[float, dict[str, float]]]]]:
    for each, memory in zip(machine.classes, machine.memory, strict=True):
        if isinstance(memory, RecordingTracker):
            yield each.representative, memory.log


def _held(
    rank: int, log: Sequence[tuple[float, dict[str, float]]], began_s: float, last_s: float, zero_s: float
) -> list[Held]:
    """Return what a rank holds from when it begins the step; of several levels at a time the highest, then the last."""
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
