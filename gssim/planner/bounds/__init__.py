"""Lower bounds of a plan's step time, cost and memory, for branch and bound."""

from gssim.planner.bounds.bounds import Bound, Bounds, LoweredBounds
