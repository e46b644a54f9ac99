"""Sweeps: a base scenario, and the points in which plans, clusters and models differ from it."""

from gssim.scenario.sweep.conditions import condition
from gssim.scenario.sweep.file import Sweep, is_rate, load_sweep, values_between
from gssim.scenario.sweep.points import SEPARATOR, Facts, Point, axis_keys, chosen, loaded_point, points_of
