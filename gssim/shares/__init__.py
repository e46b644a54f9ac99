"""Who gets how much: pure solvers over given numbers, used alike by the simulator and the real backend."""

from gssim.shares.division import balance_batch, balanced_stages, contiguous, even, greedy, proportional, ranges, split
from gssim.shares.owners import InfeasibleError, OwnerTimes, cost_shares, memory_shares, owner_time_s
from gssim.shares.replanning import Watch, observe, worth_moving

__all__ = [
    "InfeasibleError",
    "OwnerTimes",
    "Watch",
    "balance_batch",
    "balanced_stages",
    "contiguous",
    "cost_shares",
    "even",
    "greedy",
    "memory_shares",
    "observe",
    "owner_time_s",
    "proportional",
    "ranges",
    "split",
    "worth_moving",
]
