"""Naive predictions that ours must beat: what anybody would reckon on the back of an envelope.

Both take what the simulated Result says of compute and bytes, and leave out what a simulation is for: who waits for
whom, what links and messages cost beside their bytes, and what overlaps.
"""

from dataclasses import dataclass
from typing import Any

from gssim.cluster import Cluster
from gssim.result import COMPUTE_PHASES, UPDATE_PHASES, RankClass, Result
from gssim.units import UserError, validated

COMPUTED = (*COMPUTE_PHASES, *UPDATE_PHASES)


@dataclass(frozen=True)
class Naive:
    """Step times in s that two naive predictions give."""

    compute_s: float
    """Of the slowest rank: forward, backward and optimizer, as if nothing were sent."""
    link_s: float | None
    """The same, then all bytes of the busiest rank over the cluster's slowest link; None where either is unknown."""


def naive(predicted: Result) -> Naive:
    """Return the naive predictions of what a simulated Result predicts."""
    compute_s = max((_compute_s(rank) for rank in predicted.ranks), default=0.0)
    busiest = [size for rank in predicted.ranks for size in (rank.bytes_sent, rank.bytes_received) if size is not None]
    if not busiest:
        return Naive(compute_s, None)
    if max(busiest) == 0:
        return Naive(compute_s, compute_s)
    slowest = slowest_link_bytes_per_s(predicted.scenario)
    return Naive(compute_s, None if slowest is None else compute_s + max(busiest) / slowest)


def _compute_s(rank: RankClass) -> float:
    return sum(rank.phases_s.get(phase, 0.0) for phase in COMPUTED)


def slowest_link_bytes_per_s(scenario: dict[str, Any]) -> float | None:
    """Return the rate of the slowest link of a resolved scenario's cluster; None where it has no links."""
    try:
        wiring = validated(Cluster, scenario["cluster"], file="scenario.cluster").wiring
    except (KeyError, UserError):
        return None  # a Result of another version: its cluster cannot be read, all else can
    return float(wiring.bandwidth_bytes_per_s.min()) if wiring.links else None
