"""Checks a trace against the Trace Event Format and Perfetto's importer: every fault is a line.

Rules are those of "Trace Event Format" (Google, in catapult's documentation), by phase of event, and two of Perfetto's
importer: nothing before 0, no spans of a thread that overlap without nesting (google/perfetto, issues 107 and 4280).
"""

import math
from collections import defaultdict
from numbers import Real

REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "M": {"name", "pid", "args"},
}
OPTIONAL = {"X": {"args"}, "s": {"args"}, "f": {"args"}, "C": {"tid", "id"}, "i": {"cat", "args"}, "M": {"tid"}}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
UNITS = ("ms", "ns")


def faults(trace):
    """Return what is wrong with a trace, a line each."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["not the object form of a trace"]
    found = [] if trace.get("displayTimeUnit") in UNITS else [f"displayTimeUnit: {trace.get('displayTimeUnit')!r}"]
    if not isinstance(trace.get("otherData", {}), dict):
        found.append("otherData is no object")
    events = trace["traceEvents"]
    bad = [fault for number, event in enumerate(events) for fault in _of_event(number, event)]
    if bad:
        return found + bad
    return [*found, *_of_names(events), *_of_nesting(events), *_of_flows(events), *_of_counters(events)]


def _is_time(value):
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _of_event(number, event):
    phase = event.get("ph") if isinstance(event, dict) else None
    if phase not in REQUIRED:
        yield f"event {number}: phase {phase!r}"
        return
    missing = REQUIRED[phase] - set(event)
    unknown = set(event) - REQUIRED[phase] - OPTIONAL[phase] - {"ph"}
    if missing or unknown:
        yield f"event {number} ({phase}): lacks {sorted(missing)}, has {sorted(unknown)}"
    yield from _of_values(number, event)
    if phase == "i" and event.get("s") not in ("g", "p", "t"):
        yield f"event {number}: scope {event.get('s')!r}"
    if phase == "f" and event.get("bp") != "e":
        yield f"event {number}: binding point {event.get('bp')!r}"
    if phase == "M":
        key, kind = METADATA.get(event.get("name"), (None, None))
        if key is None or type(event["args"].get(key)) is not kind or set(event["args"]) != {key}:
            yield f"event {number}: metadata {event}"


def _of_values(number, event):
    phase = event["ph"]
    for key in ("ts", "dur"):
        if key in event and not _is_time(event[key]):
            yield f"event {number} ({phase}): {key} = {event[key]!r}"
    for key in ("pid", "tid"):
        if key in event and (type(event[key]) is not int or event[key] < 1):  # 0 is the idle process
            yield f"event {number} ({phase}): {key} = {event[key]!r}"
    for key in ("name", "cat"):
        if key in event and (not isinstance(event[key], str) or not event[key]):
            yield f"event {number} ({phase}): {key} = {event[key]!r}"


def _of_names(events):
    """Every process and thread has one name and one place; threads of different processes have different numbers."""
    names, threads = defaultdict(list), defaultdict(set)
    for event in events:
        if event["ph"] == "M":
            names[event["name"], event["pid"], event.get("tid")].append(event["args"])
    for event in events:
        if "tid" in event:
            threads[event["tid"]].add(event["pid"])
    for key, given in names.items():
        if len(given) > 1:
            yield f"{key}: {len(given)} times"
    for tid, pids in threads.items():
        if len(pids) > 1:
            yield f"thread {tid} is of processes {sorted(pids)}"
        for pid in pids:
            wanted = [(kind, pid, None) for kind in ("process_name", "process_sort_index")]
            wanted += [(kind, pid, tid) for kind in ("thread_name", "thread_sort_index")]
            yield from (f"{key} is missing" for key in wanted if key not in names)
    processes = {pid for pids in threads.values() for pid in pids}
    yield from (f"thread {tid} has a process's number" for tid in threads if tid in processes)


def _slices(events):
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return {lane: sorted(found, key=lambda each: (each[0], -each[1])) for lane, found in lanes.items()}


def _of_nesting(events):
    for lane, found in _slices(events).items():
        around = []
        for start, end, name in found:
            while around and around[-1][1] <= start:
                around.pop()
            if around and end > around[-1][1]:
                yield f"{lane}: {name!r} at {start} overlaps {around[-1][2]!r}"
            around.append((start, end, name))


def _of_flows(events):
    """Each flow has a start and an end of one name and category, in this order, and in a slice of its thread each."""
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
    slices = _slices(events)
    for number, (first, *others) in ends.items():
        if [first["ph"], *(each["ph"] for each in others)] != ["s", "f"]:
            yield f"flow {number}: {[first, *others]}"
            continue
        (last,) = others
        if (first["name"], first["cat"]) != (last["name"], last["cat"]) or last["ts"] < first["ts"]:
            yield f"flow {number}: from {first} to {last}"
        if first["pid"] == last["pid"]:
            yield f"flow {number}: from a rank to itself"
        for event in (first, last):
            inside = [1 for start, end, _ in slices.get((event["pid"], event["tid"]), ()) if start <= event["ts"] < end]
            if not inside:
                yield f"flow {number}: {event} is in no slice"


def _of_counters(events):
    """Series are numbers; a counter always has the same ones, and its times go on."""
    series, latest = {}, {}
    for event in events:
        if event["ph"] != "C":
            continue
        place = (event["pid"], event["name"])
        values = event["args"]
        if not values or not all(_is_time(value) for value in values.values()):
            yield f"counter {event}: values"
        if series.setdefault(place, set(values)) != set(values):
            yield f"counter {place}: series {sorted(values)}, before {sorted(series[place])}"
        if event["ts"] < latest.get(place, 0):
            yield f"counter {place}: at {event['ts']} after {latest[place]}"
        latest[place] = event["ts"]
