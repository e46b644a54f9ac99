"""The simulation: a scenario in, a Result out."""

from gssim.simulation.footprint import (
    Occupancy,
    Reservation,
    misfit,
    occupancies,
    outside_bytes,
    replay,
    reservation,
    tightest,
)
from gssim.simulation.report import WAITING_PHASES, energy_j
from gssim.simulation.run import Simulated, no_collection, program_of, simulate, traced

__all__ = [
    "WAITING_PHASES",
    "Occupancy",
    "Reservation",
    "Simulated",
    "energy_j",
    "misfit",
    "no_collection",
    "occupancies",
    "outside_bytes",
    "program_of",
    "replay",
    "reservation",
    "simulate",
    "tightest",
    "traced",
]
