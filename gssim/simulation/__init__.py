"""Simulates a scenario: loads, lowers, executes, and reports a Result."""

from gssim.simulation.allocator_replay import AllocatorPeaks, replay
from gssim.simulation.footprint import (
    MemoryFootprint,
    deciding_footprints,
    footprints_of,
    host_margin,
    host_misfit,
    independent_peaks,
    outside_bytes,
    reservation,
    tightest_margin,
    worst_misfit,
)
from gssim.simulation.report import energy_j
from gssim.simulation.run import (
    Simulated,
    is_steady,
    program_of,
    push_density,
    record_steady_step,
    simulate,
    with_spread_and_band,
)
from gssim.simulation.steady_run import JITTERY_STEPS, TooSlowError
