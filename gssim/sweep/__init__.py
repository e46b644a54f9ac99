"""Sweeps: a base scenario, and the points in which plans, clusters and models differ from it."""

from gssim.sweep.axes import is_rate
from gssim.sweep.file import Group, Sweep, load_sweep
from gssim.sweep.points import SEPARATOR, Point, axis_keys, chosen, loaded_point, points_of

__all__ = [
    "SEPARATOR",
    "Group",
    "Point",
    "Sweep",
    "axis_keys",
    "chosen",
    "is_rate",
    "load_sweep",
    "loaded_point",
    "points_of",
]
