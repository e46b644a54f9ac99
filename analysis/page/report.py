"""The whole report of a folder."""

from pathlib import Path

from analysis.charts import timeline
from analysis.charts.drawing import Chart
from analysis.page.comparison import comparison_parts
from analysis.page.comparison import summary as comparison_summary
from analysis.page.contents import Contents, Overlay, contents_of
from analysis.page.markup import Part, bullets, document, figure, paragraph
from analysis.page.provenance import provenance_part, told_part
from analysis.page.study import study_parts
from analysis.page.sweep import summary as sweep_summary
from analysis.page.sweep import sweep_parts
from analysis.page.words import percent, seconds
from analysis.timeline import named_alike

MOST_QUESTIONS = 8
TIMELINE = "Who does what in one step, when, and waits for what?"


def report(folder: Path) -> str:
    """Return the page as HTML, the same for the same folder; raise UserError where there is nothing to report."""
    found = contents_of(folder)
    questions = questions_of(found)
    title = questions[0] if len(questions) == 1 else f"What was asked of {folder.resolve().name}, and what came out"
    parts = [Part("In short", bullets(_short(found)))]
    for comparison in found.comparisons:
        parts += comparison_parts(comparison)
    for sweep in found.sweeps:
        parts += sweep_parts(sweep, several=len(found.sweeps) > 1)
    for study in found.studies:
        parts += study_parts(study)
    if found.overlays:
        parts.append(Part("One step, predicted above measured", "", tuple(map(_overlay, found.overlays))))
    parts += [told_part(found), provenance_part(found)]
    return document(title, _lead(questions), _named_once(parts))


def questions_of(found: Contents) -> list[str]:
    """Return what was asked: the questions of sweeps and scenarios, each once."""
    asked = [sweep.question for sweep in found.sweeps]
    results = [result for comparison in found.comparisons for result in comparison.measured]
    results += [file.result for file in (*found.only_measured, *found.only_predicted)]
    asked += [str(result.scenario.get("question") or "") for result in results]
    asked += [
        f"What do thresholds cost in quality, and gain in bytes and time? Study {each.place}" for each in found.studies
    ]
    return [question for question in dict.fromkeys(asked) if question]


def _lead(questions: list[str]) -> str:
    if len(questions) <= 1:
        return ""
    return paragraph("The questions:", "lead") + bullets(questions[:MOST_QUESTIONS])


def _short(found: Contents) -> list[str]:
    lines = [line for comparison in found.comparisons for line in comparison_summary(comparison)]
    lines += [line for sweep in found.sweeps for line in sweep_summary(sweep)]
    several = len(found.studies) > 1
    lines += [
        f"{each.place}: {each.findings[0]}" if several else each.findings[0] for each in found.studies if each.findings
    ]
    return lines or ["Results without their other side: nothing is compared."]


def _overlay(overlay: Overlay) -> Part:
    pair = (named_alike(overlay.predicted, overlay.measured), overlay.measured)
    drawn = timeline(*pair, names=overlay.files)
    ours, theirs = overlay.predicted.time_s, overlay.measured.time_s
    words = (
        f"Timeline of one step of {overlay.name}, rank by rank, predicted above measured. Predicted {seconds(ours)}, "
        "measured "
        f"{seconds(theirs)}{f', {percent(ours / theirs - 1)}' if theirs else ''}."
    )
    return Part(f"{overlay.name}: {TIMELINE}", figure(Chart("timeline", TIMELINE, drawn, words)))


def _named_once(parts: list[Part]) -> list[Part]:
    """Return parts whose titles differ: two comparisons, or studies, have parts of the same name."""
    seen: dict[str, int] = {}
    found = []
    for part in parts:
        seen[part.title] = seen.get(part.title, 0) + 1
        again = f" ({seen[part.title]})" if seen[part.title] > 1 else ""
        found.append(Part(f"{part.title}{again}", part.body, part.parts))
    return found
