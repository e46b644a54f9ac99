"""Map of the fastest method to an equal loss: over bandwidth and latency, by model and for unequal devices."""

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from math import isinf

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle

from analysis.charts.drawing import (
    LABEL_POINTS,
    STYLE,
    Chart,
    add_axes,
    label_width_in,
    new_figure,
    plain,
    wrapped,
    write_findings,
)
from analysis.study.equal_loss import MapPoint
from analysis.sweep_tables import bit_rate
from gssim.units import human_seconds

CELL_IN, ROW_IN, LEFT_IN, GAP_IN, ABOVE_IN, BELOW_IN = 0.6, 0.34, 0.85, 0.25, 0.42, 0.75
"""Width and height of a cell; left of the panels, between them, above each, and below the last."""
CELL_POINTS = LABEL_POINTS - 0.5
LEGEND_ROW_IN = 0.24
OURS = "#D55E00"
OTHERS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#999999")
"""Colours of thresholded Gradient Sharding and of the others, the most frequent winner first (Okabe & Ito)."""
TINT = 0.6
"""Fraction of the colour in a cell."""
QUESTION = "Which method reaches the same loss first, on which network?"
OURS_NAME = "thresholded Gradient Sharding (GS)"


def equal_loss_map(points: Sequence[MapPoint], ours: Sequence[str], said: Sequence[str]) -> Chart:
    """Return the map: a row of panels for each model, a column for each set of devices, a cell for each network.

    Args:
        points: each is a cell.
        ours: variants of thresholded Gradient Sharding, whose best one each cell compares with the fastest.
        said: findings in sentences.
    """
    models = list(dict.fromkeys(point.model for point in points))
    slow_ratios = sorted({point.slow_ratio for point in points})
    bandwidths = sorted({point.bandwidth_bytes_per_s for point in points})
    latencies = sorted({point.latency_s for point in points})
    colour_of, legend = _colours(points, ours)

    panel_width_in, panel_height_in = len(bandwidths) * CELL_IN, len(latencies) * ROW_IN
    width_in = max(LEFT_IN + len(slow_ratios) * (panel_width_in + GAP_IN), 7.5)
    finding = wrapped(f"{said[0]}.", width_in - 0.4, 10.5) if said else []
    notes = wrapped(_note(models, has_bands=any(point.step_time_band_s for point in points)), width_in - 0.4)
    entry_in = 0.55 + max(label_width_in(str(each.get_label())) for each in legend)
    columns = max(1, min(len(legend), int((width_in - 0.3) / entry_in)))
    legend_in = LEGEND_ROW_IN * -(-len(legend) // columns)
    top_in = 0.5 + 0.21 * len(finding) + 0.19 * len(notes) + legend_in + 0.15
    height_in = top_in + len(models) * (panel_height_in + ABOVE_IN) + BELOW_IN
    with mpl.rc_context(STYLE):
        figure = new_figure(width_in, height_in)
        y_in = write_findings(figure, QUESTION, finding, notes)
        figure.legend(
            handles=legend,
            loc="upper left",
            bbox_to_anchor=(0.1 / width_in, (y_in + 0.1) / height_in),
            ncols=columns,
            frameon=False,
            borderaxespad=0,
            fontsize=LABEL_POINTS,
            handlelength=1.6,
        )
        for row, model in enumerate(models):
            for column, slow_ratio in enumerate(slow_ratios):
                left_in = LEFT_IN + column * (panel_width_in + GAP_IN)
                bottom_in = height_in - top_in - (row + 1) * (panel_height_in + ABOVE_IN)
                axes = add_axes(figure, (left_in, bottom_in, panel_width_in, panel_height_in))
                _draw_networks(axes, bandwidths, latencies, left=column == 0, bottom=row == len(models) - 1)
                devices = "equal devices" if slow_ratio == 1 else f"one device {slow_ratio:g} times slower"
                title = f"{model}: {devices}" if len(models) > 1 else devices.capitalize()
                axes.set_title(plain(title), loc="left", fontsize=10)
                for point in points:
                    if (point.model, point.slow_ratio) == (model, slow_ratio):
                        network = bandwidths.index(point.bandwidth_bytes_per_s), latencies.index(point.latency_s)
                        _draw_cell(axes, *network, point, ours, colour_of[point.fastest])
    return Chart("fastest_to_equal_loss", QUESTION, figure, f"Map over bandwidth and latency. {'. '.join(said)}.")


def _colours(points: Sequence[MapPoint], ours: Sequence[str]) -> tuple[dict[str, str], list[Patch]]:
    """Return the colour of each variant that is the fastest somewhere, and the legend's entries; ours share one."""
    winners = [name for name, _ in Counter(point.fastest for point in points).most_common()]
    others = [name for name in winners if name not in ours]
    colour_of = dict.fromkeys(ours, OURS) | dict(zip(others, cycle(OTHERS), strict=False))
    legend = [Patch(facecolor=_tinted(colour_of[name]), label=plain(name)) for name in others]
    if any(name in ours for name in winners):
        legend.append(Patch(facecolor=_tinted(OURS), label=OURS_NAME))
    return colour_of, legend


def _draw_networks(
    axes: Axes, bandwidths: Sequence[float], latencies: Sequence[float], *, left: bool, bottom: bool
) -> None:
    """Draw the axes of a panel, one unit for each cell; only panels at the `left` and the `bottom` have labels."""
    axes.set_xlim(0, len(bandwidths))
    axes.set_ylim(0, len(latencies))
    axes.set_xticks([i + 0.5 for i in range(len(bandwidths))])
    axes.set_yticks([i + 0.5 for i in range(len(latencies))])
    axes.tick_params(length=0, labelbottom=bottom, labelleft=left)
    axes.set_xticklabels([bit_rate(each).replace(" ", "\n") for each in bandwidths])
    axes.set_yticklabels([human_seconds(each).replace(".00", "") for each in latencies])
    if left:
        axes.set_ylabel("latency of a link")
    if bottom:
        axes.set_xlabel("bandwidth of a link")


def _note(models: Sequence[str], *, has_bands: bool) -> str:
    """Return what the figure says of its cells, and of what it assumes."""
    cells = (
        "Colour: the method that is the first, in predicted time, at the loss that dense training has after a third of "
        "the study's steps. Number: how many times as long the best thresholded Gradient Sharding (GS) takes; 'as "
        "fast': the paired 95 % interval over seeds includes 1; '-': it does not get there."
    )
    if len(models) == 1:
        return (
            f"{cells} Steps to that loss are measured on the study's small model, and taken to be the same everywhere."
        )
    band = " (bands: in the table)" if has_bands else ""
    return (
        f"{cells} Steps to that loss are measured on {models[0]} alone. For other models they are assumed to be the "
        "same, relative to dense's, where a threshold pushes the same fraction of the gradients; times are predicted "
        f"for that fraction, by gradient statistics transferred from smaller models{band}."
    )


def _tinted(colour: str) -> tuple[float, float, float]:
    red, green, blue = (1 - TINT * (1 - channel) for channel in to_rgb(colour))
    return red, green, blue


def _draw_cell(axes: Axes, column: int, row: int, point: MapPoint, ours: Sequence[str], colour: str) -> None:
    """Draw a cell in the fastest variant's colour, with what the best of ours takes beside it."""
    ratio = min(map(point.over_fastest, ours), default=None)
    is_level = any(point.is_level(name) for name in ours)
    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=_tinted(colour), edgecolor="white", linewidth=1.5))
    text = "" if ratio is None else "-" if isinf(ratio) else f"{ratio:.3g}" if ratio < 100 else f"{ratio:.0f}"
    if is_level:
        text = "GS" if point.fastest in ours else "as fast"
    weight = "bold" if is_level else "normal"
    axes.text(column + 0.5, row + 0.48, text, ha="center", va="center", fontsize=CELL_POINTS, fontweight=weight)
