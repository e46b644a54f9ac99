"""The Result: one schema for simulated and real runs, and one step as a Chrome trace."""

from gssim.result.bottleneck import bound_by, busiest_link, pace, pace_setter, waiting_ratio
from gssim.result.result import (
    BUSY_RATIO,
    CATEGORIES,
    COMPUTE_PHASES,
    DRIFT_RATIO,
    EXPOSED_COPIES,
    MEASURED_PHASES,
    PHASES,
    SCHEMA,
    UPDATE_PHASES,
    WAITING_PHASES,
    Collective,
    Density,
    Division,
    Evaluation,
    LinkUse,
    Periods,
    RankClass,
    Result,
    Span,
    file_name,
    fragment_periods,
    merge_collectives,
    read_result,
    typical_phases,
)
from gssim.result.trace import Arrow, Held, Step, arrows_among, chrome_trace
