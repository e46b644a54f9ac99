"""One figure that is stated somewhere, beside ours.

The lines for people.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.padding import Padding

from analysis.compare.report import console
from gssim.result import Result
from gssim.scenario import load_model, load_scenario
from gssim.simulation import simulate
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


def print_lines(lines: Sequence[Line]) -> None:
    """Print what is stated, ours, how it was obtained, the verdict, source by source."""
    out = console()
    source = ""
    for line in lines:
        if line.source != source:
            source = line.source
            out.print()
            out.print(source, style="bold")
        out.print(f"{line.figure}: stated {line.stated}")
        verdict = line.verdict if line.verdict != "only if" else "consistent only if"
        reason = f": {line.because}" if line.because else ""
        for text in (f"ours: {line.ours}", f"how: {line.how}", f"{verdict}{reason}"):
            out.print(Padding(text, (0, 0, 0, 4), expand=False))
