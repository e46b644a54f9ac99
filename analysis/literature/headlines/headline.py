"""Headline figures of publications: the scenarios that predict them, and the printed comparison with a prediction."""

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
class Headline:
    """A stated figure, ours, how ours was obtained, and whether the stated one is physically consistent."""

    source: str
    figure: str
    stated: str
    ours: str
    how: str
    """The scenario that was simulated, or the formula with its numbers."""
    verdict: Verdict
    """`only if`: consistent on a condition, which `because` states."""
    because: str
    values: dict[str, float] = field(default_factory=dict)
    """Our numbers, by name with unit."""


@dataclass(frozen=True)
class Simulations:
    """The folder of the scenarios that the headline figures are simulated with."""

    folder: Path

    def run(self, name: str, *overrides: str) -> Result:
        """Return the prediction for a scenario with some keys overridden."""
        return simulate(load_scenario(self.folder / f"{name}.toml", overrides)).result

    def model(self, name: str) -> Model:
        """Return a traced model."""
        return load_model(self.folder / "models" / f"{name}.toml")


def peak_bytes(result: Result) -> float:
    """Return the largest peak of allocated bytes over the ranks."""
    return max(entry.peak_allocated_bytes for entry in result.ranks)


def print_headlines(headlines: Sequence[Headline]) -> None:
    """Print the stated figure, ours, how it was obtained and the verdict, source by source."""
    out = console()
    source = ""
    for line in headlines:
        if line.source != source:
            source = line.source
            out.print()
            out.print(source, style="bold")
        out.print(f"{line.figure}: stated {line.stated}")
        verdict = line.verdict if line.verdict != "only if" else "consistent only if"
        reason = f": {line.because}" if line.because else ""
        for text in (f"ours: {line.ours}", f"how: {line.how}", f"{verdict}{reason}"):
            out.print(Padding(text, (0, 0, 0, 4), expand=False))
