"""One figure that is stated somewhere, beside ours."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gssim.result import Result
from gssim.scenario import load_model, load_scenario
from gssim.simulate import simulate
from gssim.workload import Model

Verdict = Literal["consistent", "only if", "impossible"]


@dataclass(frozen=True)
class Line:
    """A stated figure, ours, how ours was obtained, and whether what is stated is physically consistent."""

    source: str
    figure: str
    stated: str
    ours: str
    how: str
    """The scenario that was simulated, or the formula with its numbers."""
    verdict: Verdict
    """`only if`: it may be so, but on a condition, which `because` says."""
    because: str
    values: dict[str, float] = field(default_factory=dict)
    """Our numbers, by name with unit."""


@dataclass(frozen=True)
class Simulations:
    """The scenarios that the lines are simulated with."""

    folder: Path

    def run(self, name: str, *overrides: str) -> Result:
        """Return the prediction for a scenario with some keys overridden."""
        return simulate(load_scenario(self.folder / f"{name}.toml", overrides)).result

    def model(self, name: str) -> Model:
        """Return a traced model."""
        return load_model(self.folder / "models" / f"{name}.toml")


def peak_bytes(result: Result) -> float:
    """Return the allocated peak of the rank that needs most."""
    return max(entry.peak_allocated_bytes for entry in result.ranks)
