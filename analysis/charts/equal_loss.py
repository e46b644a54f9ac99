"""Map of the fastest method to an equal loss, over bandwidth and latency, for equal and for unequal devices."""

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from math import isinf

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from analysis.charts.drawing import LABEL_POINTS, STYLE, Chart, label_width_in, new_figure, plain, wrapped
from analysis.study.equal_loss import MapPoint
from analysis.sweep_tables import bit_rate
from gssim.units import human_seconds

CELL_IN, ROW_IN, LEFT_IN, GAP_IN, BELOW_IN = 0.98, 0.5, 0.95, 0.62, 0.45
CELL_POINTS = LABEL_POINTS - 1.5
OURS = "#D55E00"
OTHERS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#999999")
"""Colours of thresholded Gradient Sharding and of the others, the most frequent winner first (Okabe & Ito)."""
LEAST_TINT, MOST_TINT = 0.35, 0.75
"""Fraction of the colour in a cell: where thresholded Gradient Sharding is slower, and where it is as fast."""
QUESTION = "Which method reaches the same loss first, on which network?"


def equal_loss_map(points: Sequence[MapPoint], ours: Sequence[str], said: Sequence[str]) -> Chart:
    """Return the map: a panel for each set of devices, a cell for each network with the variant that is fastest there.

    Args:
        points: of which each is a cell.
        ours: variants of thresholded Gradient Sharding, whose best one each cell compares with the fastest.
        said: findings in sentences.
    """
    winners = [name for name, _ in Counter(point.fastest for point in points).most_common()]
    others = [name for name in winners if name not in ours]
    colour_of = dict.fromkeys(ours, OURS) | dict(zip(others, cycle(OTHERS), strict=False))
    ratios = sorted({point.slow_ratio for point in points})
    bandwidths = sorted({point.bandwidth_bytes_per_s for point in points})
    latencies = sorted({point.latency_s for point in points})
    panel_in, high_in = len(bandwidths) * CELL_IN, len(latencies) * ROW_IN
    width_in = max(LEFT_IN + panel_in + 0.2, 7.5)
    note = (
        "Cell: the variant that is the first, in predicted time, at the loss that dense training has after a third of "
        "the study's steps, and how many times as long the best thresholded Gradient Sharding (GS) takes ('as fast': "
        "the paired 95 % interval over seeds includes 1). Steps to that loss are measured on the study's small model, "
        "and taken to be the same everywhere."
    )
    finding = wrapped(f"{said[0]}.", width_in - 0.4, 10.5) if said else []
    notes = wrapped(note, width_in - 0.4)
    top_in = 0.5 + 0.21 * len(finding) + 0.19 * len(notes) + 0.2
    height_in = top_in + len(ratios) * (high_in + GAP_IN) + BELOW_IN
    with mpl.rc_context(STYLE):
        figure = new_figure(width_in, height_in)
        y_in = height_in - 0.25
        figure.text(0.15 / width_in, y_in / height_in, QUESTION, fontsize=14, fontweight="bold", va="center")
        y_in -= 0.26
        for lines, points_high, colour, gap_in in ((finding, 10.5, "black", 0.21), (notes, 9.5, "0.3", 0.19)):
            for line in lines:
                figure.text(
                    0.15 / width_in, y_in / height_in, plain(line), fontsize=points_high, color=colour, va="center"
                )
                y_in -= gap_in
        for number, slow_ratio in enumerate(ratios):
            bottom_in = height_in - top_in - (number + 1) * (high_in + GAP_IN) + 0.25
            box = (LEFT_IN / width_in, bottom_in / height_in, panel_in / width_in, high_in / height_in)
            axes = figure.add_axes(box)
            for point in points:
                if point.slow_ratio == slow_ratio:
                    column, row = bandwidths.index(point.bandwidth_bytes_per_s), latencies.index(point.latency_s)
                    _draw_cell(axes, column, row, point, ours, colour_of[point.fastest])
            axes.set_xlim(0, len(bandwidths))
            axes.set_ylim(0, len(latencies))
            axes.set_xticks([i + 0.5 for i in range(len(bandwidths))], [bit_rate(each) for each in bandwidths])
            times = [human_seconds(each).replace(".00", "") for each in latencies]
            axes.set_yticks([i + 0.5 for i in range(len(latencies))], times)
            axes.tick_params(length=0)
            axes.set_ylabel("latency of a link")
            devices = "Equal devices" if slow_ratio == 1 else f"One device {slow_ratio:g} times slower than the others"
            axes.set_title(devices, loc="left", fontsize=10.5)
            if number == len(ratios) - 1:
                axes.set_xlabel("bandwidth of a link")
    return Chart("fastest_to_equal_loss", QUESTION, figure, f"Map over bandwidth and latency. {'. '.join(said)}.")


def _draw_cell(axes: Axes, column: int, row: int, point: MapPoint, ours: Sequence[str], colour: str) -> None:
    """Draw a cell in the fastest variant's colour: the variant, and what the best of ours takes beside it."""
    fastest = point.fastest
    ratio = min(map(point.over_fastest, ours), default=None)
    is_level = any(point.is_level(name) for name in ours)
    tint = MOST_TINT if is_level else LEAST_TINT
    tinted = [1 - tint * (1 - channel) for channel in to_rgb(colour)]
    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=tinted, edgecolor="white", linewidth=1.5))
    name = fastest.split(", ")[0] if label_width_in(fastest) * CELL_POINTS / LABEL_POINTS > CELL_IN - 0.1 else fastest
    below = "" if ratio is None else "GS: not reached" if isinf(ratio) else f"GS: {ratio:.3g} times"
    if is_level:
        below = "GS is fastest" if fastest in ours else "GS is as fast"
    axes.text(column + 0.5, row + 0.64, plain(name), ha="center", va="center", fontsize=CELL_POINTS, fontweight="bold")
    axes.text(column + 0.5, row + 0.3, below, ha="center", va="center", fontsize=CELL_POINTS)
