"""The set of charts of a sweep's table; which charts exist depends on the axes of the sweep."""

from analysis.charts.drawing import Chart
from analysis.charts.sweeps.fronts import fronts
from analysis.charts.sweeps.memory import memory_by_category
from analysis.charts.sweeps.scaling import scaling
from analysis.charts.sweeps.steps import steps
from analysis.charts.sweeps.thresholds import step_time_by_threshold
from analysis.charts.sweeps.winners import who_wins
from analysis.sweep_tables import SweepTable


def sweep_charts(table: SweepTable) -> list[Chart]:
    """Return the charts of a sweep's table that its axes allow."""
    if not table.answered:
        return []
    phases, memory, scaled = steps(table), memory_by_category(table), scaling(table)
    return [
        *step_time_by_threshold(table),
        *who_wins(table),
        *([phases] if phases is not None else []),
        *fronts(table),
        *([memory] if memory is not None else []),
        *([scaled] if scaled is not None else []),
    ]
