"""Labels beside points: where they hide neither marks nor each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from analysis.charts.drawing import LABEL_POINTS, label_width_in, plain

MARK_IN = 0.1
"""Half the width of a mark, with some room."""
LINE_IN = 0.125
"""Height of a label's text at `LABEL_POINTS`."""
SIDES = tuple(
    (x, y * step)
    for step in (1.0, 2.0, 3.2)
    for x, y in ((1, 0.35), (1, -0.35), (-1, 0.35), (-1, -0.35), (0, 1), (0, -1))
)
"""Places tried in turn: right, left, above or below of the point, then further off."""


@dataclass(frozen=True)
class Box:
    """A rectangle in inches from the panel's lower left corner."""

    x: float
    y: float
    wide: float
    high: float

    def hides(self, other: "Box") -> bool:
        """Return whether two overlap."""
        return (
            self.x < other.x + other.wide
            and other.x < self.x + self.wide
            and self.y < other.y + other.high
            and other.y < self.y + self.high
        )


def place_labels(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    marks: Sequence[tuple[float, float]],
    **look: Any,
) -> None:
    """Write each text beside its point, where it hides no mark and no other label, else where it hides fewest."""
    wide_in, high_in = _size_in(axes)
    look = {"fontsize": LABEL_POINTS - 1} | look
    taken = [_around(*_inches(axes, mark)) for mark in marks]
    for point, text in zip(points, texts, strict=True):
        x, y = _inches(axes, point)
        size = (label_width_in(text) * look["fontsize"] / LABEL_POINTS, LINE_IN * look["fontsize"] / LABEL_POINTS)
        boxes = [_beside(x, y, size, side) for side in SIDES]
        inside = [
            box
            for box in boxes
            if box.x > 0 and box.y > 0 and box.x + box.wide < wide_in and box.y + box.high < high_in
        ]
        best = min(inside or boxes, key=lambda box: sum(box.hides(other) for other in taken))
        taken.append(best)
        axes.annotate(
            plain(text),
            point,
            ((best.x + best.wide / 2) / wide_in, (best.y + best.high / 2) / high_in),
            textcoords="axes fraction",
            ha="center",
            va="center",
            annotation_clip=False,
            zorder=6,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.4},
            **look,
        )


def _around(x: float, y: float) -> Box:
    return Box(x - MARK_IN, y - MARK_IN, 2 * MARK_IN, 2 * MARK_IN)


def _beside(x: float, y: float, size: tuple[float, float], side: tuple[float, float]) -> Box:
    wide, high = size
    across, up = side
    left = x + MARK_IN if across > 0 else x - MARK_IN - wide if across < 0 else x - wide / 2
    return Box(left, y + up * (MARK_IN + high / 2) - high / 2, wide, high)


def _size_in(axes: Axes) -> tuple[float, float]:
    figure: Any = axes.figure
    box, (wide_in, high_in) = axes.get_position(), figure.get_size_inches()
    return box.width * wide_in, box.height * high_in


def _inches(axes: Axes, point: tuple[float, float]) -> tuple[float, float]:
    """Return a point in inches from the panel's lower left corner."""
    across, up = axes.transAxes.inverted().transform(axes.transData.transform(point))
    wide_in, high_in = _size_in(axes)
    return across * wide_in, up * high_in
