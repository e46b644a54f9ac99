"""How plans look in the charts of a sweep: each has a mark, a line style and a colour, the same in all of them."""

from collections.abc import Sequence
from math import inf
from typing import Any

from analysis.charts.drawing import MARKS
from analysis.charts.sweeps.panels import COLOURS, LINES, MARKERS
from analysis.sweeps.settings import Layout, Place, by_plan
from analysis.sweeps.table import Row, SweepTable

Look = dict[str, Any]
CONTROL: Look = {"marker": (8, 2, 0), "color": "black", "linestyle": "", "markersize": 9, "markeredgewidth": 1.4}
"""An asterisk, which no method has."""


def looks_of(table: SweepTable, layout: Layout) -> dict[Place, Look]:
    """Return the look of each plan: methods as in all charts; several plans of one method are told apart."""
    plans = list(by_plan(table.answered, layout))
    methods = [place[0] for place in plans]
    if len(set(methods)) == len(methods) and all(method in MARKS for method in methods):
        pairs = [MARKS[str(method)] for method in methods]
    else:
        pairs = [(MARKERS[i % len(MARKERS)], COLOURS[i % len(COLOURS)]) for i in range(len(plans))]
    return {
        place: {"marker": marker, "color": colour, "linestyle": LINES[i % len(LINES)]}
        for i, (place, (marker, colour)) in enumerate(zip(plans, pairs, strict=True))
    }


def points_only(look: Look, **changes: Any) -> Look:
    """Return a look without its line."""
    size = 10 if look["marker"] == "*" else 7
    return {**look, "linestyle": "", "markersize": size, "markeredgewidth": 0.9} | changes


def density_words(row: Row) -> str:
    """Return what was pushed, and published where a threshold decides that too, for people."""
    pushed, published = row["push_density_ratio"], row.get("publish_density_ratio")
    words = "all pushed" if pushed is None else f"{percentage(pushed)} pushed"
    return words if published is None else f"{words}, {percentage(published)} published"


def percentage(ratio: float) -> str:
    """Return a density for people.

    >>> percentage(0.1234), percentage(0.0), percentage(1.0)
    ('12 %', '0 %', '100 %')
    """
    return f"{100 * ratio:.2g} %" if ratio < 0.995 else f"{100 * ratio:.0f} %"


def threshold_words(value: float) -> str:
    """Return a threshold for people.

    >>> threshold_words(2.5e-4), threshold_words(1e-3), threshold_words(inf)
    ('2.5e\u22124', '1e\u22123', '\u221e')
    """
    if value == inf:
        return "\u221e"
    if 0.1 <= value < 1000:
        return f"{value:g}"
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e\u2212").replace("e+0", "e")


def listed(words: Sequence[str], most: int = 4) -> str:
    """Return words as a list for people, a long one cut."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
