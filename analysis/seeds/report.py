"""The lines for people."""

from collections.abc import Sequence

from rich.padding import Padding

from analysis.report import console
from analysis.seeds.line import Line


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
