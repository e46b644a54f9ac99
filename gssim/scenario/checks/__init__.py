"""Consistency checks of a scenario, by subject; `check` carries out all of them in order."""

from gssim.scenario.checks.consistency import check
from gssim.scenario.checks.training import check_adapters
