"""Points of a sweep grouped into plans by setting (cluster, model, batch, ...): labels, Pareto fronts, fastest plans.

The columns that distinguish settings and plans are those that vary and do not follow from others.

A thresholded plan trains with other gradients than a dense one, so the two are not simply ranked: they have separate
fronts, and a speed-up over dense training is always given with its density.

Of many settings, `representative` selects a few in which every value of every column appears.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp
from typing import TypeVar

from analysis.sweep_tables.table import BANDWIDTH, METHOD, THRESHOLD, Row, SweepTable, is_control, is_dense
from gssim.units import human_bytes, human_seconds

PLAN = "plan."

Place = tuple[object, ...]
"""Values of the columns that identify a setting (or a plan)."""


@dataclass(frozen=True)
class Layout:
    """The columns that identify settings, and those that identify plans within a setting, without the threshold."""

    settings: tuple[str, ...]
    plans: tuple[str, ...]

    def setting_of(self, row: Row) -> Place:
        """Return the setting of a point."""
        return tuple(row[column] for column in self.settings)

    def plan_of(self, row: Row) -> Place:
        """Return the plan of a point, whatever its threshold."""
        return tuple(row[column] for column in self.plans)

    def setting_label(self, place: Place) -> str:
        """Return the label of a setting; empty where there is only one. Keys that its cluster lacks are left out.

        >>> Layout(("cluster.topology.servers.0.count", "cluster.topology.link.latency_s"), ()).setting_label((4, None))
        '4 servers'
        """
        known = [(column, value) for column, value in zip(self.settings, place, strict=True) if value is not None]
        return ", ".join(shown(column, value) for column, value in known)

    def plan_label(self, place: Place) -> str:
        """Return the label of a plan: its method and other distinguishing values."""
        named = dict(zip(self.plans, place, strict=True))
        if "variant" in named:
            return str(named["variant"])
        return ", ".join(shown(column, value) for column, value in named.items())


def layout_of(table: SweepTable, *, without: Sequence[str] = ()) -> Layout:
    """Return the layout of the predicted points of a table; `without`: columns that are the axis of a chart."""
    rows = table.answered
    axes = [axis for axis in table.axes if not axis.startswith(PLAN)]
    candidates = [column for column in (*axes, "group", "cluster", "model") if column not in without]
    settings = distinguishing_columns(rows, candidates)
    if _is_headed(rows, settings):
        settings.insert(0, "group")
    policies = [axis for axis in table.axes if axis.startswith(PLAN) and axis not in (THRESHOLD, METHOD, *without)]
    plans = ["method", *(axis for axis in policies if _varies(rows, axis))]
    apart = [*settings, *without, *plans, *([THRESHOLD] if THRESHOLD in table.axes else [])]
    if not follows(rows, apart, "point"):
        plans.append("variant")
    return Layout(tuple(settings), tuple(plans))


def distinguishing_columns(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    """Return the columns that vary, without those whose value follows from the others."""
    kept: list[str] = []
    for column in columns:
        if _varies(rows, column) and not follows(rows, kept, column):
            kept.append(column)
    # an earlier column may follow from later ones: a group determines its rates and latencies
    for column in list(kept):
        rest = [other for other in kept if other != column]
        if rest and not column.endswith(BANDWIDTH) and follows(rows, rest, column):
            kept = rest
    return kept


def _is_headed(rows: Sequence[Row], settings: Sequence[str]) -> bool:
    """Return whether labels of settings need the group: where groups differ in the keys that they have.

    Four servers belong to one cluster in one group, and to another in the next.
    """
    return (
        "group" not in settings
        and _varies(rows, "group")
        and any({row.get(column) is None for row in rows} == {True, False} for column in settings)
        and follows(rows, settings, "group")
    )


def _varies(rows: Sequence[Row], column: str) -> bool:
    return len({row.get(column) for row in rows}) > 1


def follows(rows: Iterable[Row], columns: Sequence[str], column: str) -> bool:
    """Return whether `column` is a function of `columns`: rows that are equal in these are equal in it."""
    values: dict[Place, object] = {}
    return all(
        values.setdefault(tuple(row.get(each) for each in columns), row.get(column)) == row.get(column) for row in rows
    )


def by_setting(rows: Iterable[Row], layout: Layout) -> dict[Place, list[Row]]:
    """Return rows by setting, in the order in which settings first appear."""
    grouped: dict[Place, list[Row]] = {}
    for row in rows:
        grouped.setdefault(layout.setting_of(row), []).append(row)
    return grouped


def by_plan(rows: Iterable[Row], layout: Layout) -> dict[Place, list[Row]]:
    """Return rows by plan, in the order in which plans first appear."""
    grouped: dict[Place, list[Row]] = {}
    for row in rows:
        grouped.setdefault(layout.plan_of(row), []).append(row)
    return grouped


def family(name: object) -> str:
    """Return a name without its numbers, the same for clusters of one kind and different sizes.

    >>> family("a100-leaf-spine-64"), family("1,024 GPUs in a ring")
    ('a100-leaf-spine', 'GPUs in a ring')
    """
    words = re.split(r"[\s-]+", re.sub(r"(?<![A-Za-z\d,.])\d[\d,.]*(x\d+)*(?![A-Za-z\d])", " ", str(name)))
    return ("-" if "-" in str(name) and " " not in str(name) else " ").join(word for word in words if word)


def shown(column: str, value: object) -> str:
    """Return a column's value as text, with the last word of its key where the value alone is unclear.

    >>> shown("cluster.topology.link.bandwidth_bytes_per_s", 1.25e8), shown("plan.micro_batches", 4)
    ('1 Gbit/s', 'micro_batches 4')
    >>> shown("cluster.topology.devices.0.count", 8), shown("cluster.topology.sites.1.topology.servers.0.count", 2)
    ('8 devices', '2 servers (site 1)')
    >>> shown("cluster.topology.link.latency_s", 0.01), shown("cluster.topology.servers.0.count", 1)
    ('latency 10 ms', '1 server')
    """
    if value is None:
        return "default" if column.startswith(PLAN) else "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    word = column.rpartition(".")[2]
    counted = re.search(r"(?:\.sites\.(\d+)\..*)?\.(devices|servers)\.\d+\.count$", column)
    if counted:
        things = counted[2] if value != 1 else counted[2].removesuffix("s")
        return f"{value:g} {things}" + (f" (site {counted[1]})" if counted[1] else "")
    if word.endswith("bytes_per_s"):
        return bit_rate(value)
    if word.endswith("_bytes"):
        return f"{word.removesuffix('_bytes')} {human_bytes(value)}"
    if word.endswith("_s"):
        return f"{word.removesuffix('_s')} {human_seconds(value)}".replace(".00 ", " ")
    return f"{word} {value:g}"


def bit_rate(bytes_per_s: float) -> str:
    """Return a link's rate as text, in bits per second.

    >>> bit_rate(1.25e7), bit_rate(3e11)
    ('100 Mbit/s', '2.4 Tbit/s')
    """
    bits = 8 * bytes_per_s
    unit, factor = next(
        ((unit, factor) for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)) if bits >= factor),
        ("kbit/s", 1e3),
    )
    return f"{bits / factor:.3g} {unit}"


def front(rows: Sequence[Row], x: Callable[[Row], float], y: Callable[[Row], float]) -> list[Row]:
    """Return the Pareto front (both axes: less is better), by ascending x; of equal rows the first.

    >>> [row["n"] for row in front([{"n": 1}, {"n": 2}], lambda row: row["n"], lambda row: row["n"])]
    [1]
    """
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (x(row), y(row))):
        if not best or y(row) < y(best[-1]):
            best.append(row)
    return best


def fastest(rows: Iterable[Row]) -> Row | None:
    """Return the row with the shortest step; None where there is none."""
    return min(rows, key=lambda row: row["step_time_s"], default=None)


@dataclass(frozen=True)
class Winner:
    """The fastest thresholded plan and the fastest dense plan of one setting."""

    thresholded: Row
    dense: Row

    @property
    def speed_up_ratio(self) -> float:
        """Speed of the thresholded plan relative to the dense one; above 1 the thresholded one is faster."""
        return float(self.dense["step_time_s"] / self.thresholded["step_time_s"])


def winner(rows: Sequence[Row], threshold: float) -> Winner | None:
    """Return the fastest plans with this threshold and without any, of one setting; None where one is missing."""
    sparse = fastest(row for row in rows if not is_dense(row) and row.get(THRESHOLD) == threshold)
    dense = fastest(row for row in rows if is_dense(row))
    return Winner(sparse, dense) if sparse is not None and dense is not None else None


def best_gain(rows: Sequence[Row]) -> Winner | None:
    """Return the fastest thresholded plan (controls left out) and the fastest dense plan of one setting."""
    sparse = fastest(row for row in rows if not is_dense(row) and not is_control(row))
    dense = fastest(row for row in rows if is_dense(row))
    return Winner(sparse, dense) if sparse is not None and dense is not None else None


def thresholds(rows: Iterable[Row]) -> list[float]:
    """Return the thresholds of thresholded rows, ascending."""
    return sorted({row[THRESHOLD] for row in rows if not is_dense(row) and row.get(THRESHOLD) is not None})


T = TypeVar("T")
FAR = 8.0
"""Distance of the ends of a column of numbers; similarity falls to 1/e at distance 1."""


def evenly_spaced(values: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the values, evenly spaced and with both ends.

    >>> evenly_spaced([0, 1, 2, 3, 4, 5, 6], 3), evenly_spaced("ab", 3)
    ([0, 3, 6], ['a', 'b'])
    """
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / max(1, most - 1)
    return [values[round(i * step)] for i in range(most)]


def representative(places: Sequence[Place], most: int) -> list[Place]:
    """Return at most `most` places, in their order, which cover the values of every column.

    Places are of one kind where they have equal names and the same keys (None: a missing key). Starting with the first
    place, the next is of the kind that was taken least, and among these the one least similar to those taken: numbers
    are compared by their rank, so that ends and middle of a column appear.

    >>> representative([("ring", 1), ("ring", 2), ("ring", 4), ("star", 1), ("star", 4)], 2)
    [('ring', 1), ('star', 4)]
    """
    if len(places) <= most:
        return list(places)
    columns = [_coordinates(values) for values in zip(*places, strict=True)]
    kinds = [tuple(0.0 if isinstance(each, float) else each for each in place) for place in zip(*columns, strict=True)]
    taken_of, likeness = Counter[Place](), [0.0] * len(places)
    left, taken = list(range(len(places))), list[int]()
    while len(taken) < most:
        new = min(left, key=lambda i: (taken_of[kinds[i]], round(likeness[i], 9)))
        left.remove(new)
        taken.append(new)
        taken_of[kinds[new]] += 1
        for i in left:
            likeness[i] += sum(_likeness(column[i], column[new]) for column in columns)
    return [places[i] for i in sorted(taken)]


Coordinate = float | str | None


def _coordinates(values: Sequence[object]) -> list[Coordinate]:
    """Return a coordinate for each value: numbers by their rank, from 0 to `FAR`; other values as text."""
    numbers = sorted({value for value in values if isinstance(value, (int, float))})
    rank = {number: FAR * i / max(1, len(numbers) - 1) for i, number in enumerate(numbers)}
    return [
        None if value is None else rank[value] if isinstance(value, (int, float)) else str(value) for value in values
    ]


def _likeness(one: Coordinate, other: Coordinate) -> float:
    """Return the similarity of two values, from 0 to 1."""
    if isinstance(one, float) and isinstance(other, float):
        return exp(-abs(one - other))
    return float(one is not None and one == other)
