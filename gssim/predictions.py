"""The predictions of a sweep's points as Results: several at a time, each kept as it ends."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from gssim.chunks import Fault, answers, by_likeness
from gssim.digests import SHOWN, code_digest
from gssim.files import locked, remove_partial, write_text
from gssim.result import Result, file_name, read_result
from gssim.shared import Shared
from gssim.simulate import simulate
from gssim.sweep import Point
from gssim.units import UserError
from gssim.workers import processes


@dataclass(frozen=True, slots=True)
class Question:
    """What tells whether a prediction is of a point as it is now."""

    scenario_id: str
    calibration_id: str


def predict(
    points: Sequence[Point],
    *,
    sweep: Path,
    out: Path | None,
    jobs: int,
    again: bool = False,
    told: Callable[[int, int], None] = lambda done, points: None,
) -> tuple[Result, ...]:
    """Return a prediction of every point, in their order; with `out`, each is a file there as soon as it ends.

    A file of the same question, calibration and code stays as it is, unless `again`. All points are checked before the
    first is simulated: UserError names the sweep and the point, or the process that writes there. `told` hears (done,
    of how many).
    """
    with locked(out / LOCK, place=str(out)) if out is not None else nullcontext():
        return _predicted(points, sweep, out, jobs, again=again, told=told)


LOCK = ".gssim-sweep.lock"
"""In a folder of predictions; whoever writes them holds it."""


def _predicted(
    points: Sequence[Point],
    sweep: Path,
    out: Path | None,
    jobs: int,
    *,
    again: bool,
    told: Callable[[int, int], None],
) -> tuple[Result, ...]:
    """Return the predictions, after they are written; see `predict`."""
    order = by_likeness(points)
    with processes(min(jobs, len(points))) as workers:
        asked = dict(answers(points, order, question_of, workers))
        questions = _asked([(points[place], asked[place]) for place in range(len(points))], sweep)
        _warn_of_equal(points, questions)
        found: dict[int, Result] = {}
        if out is not None and not again:
            for i, (point, question) in enumerate(zip(points, questions, strict=True)):
                kept = kept_prediction(out, point, question)
                if kept is not None:
                    found[i] = kept
        told(len(found), len(points))
        for place, result in answers(points, [i for i in order if i not in found], predicted, workers):
            if isinstance(result, Fault):
                raise type(result)(f"{sweep}: {points[place].name}: {result}")
            found[place] = result
            if out is not None:
                write_text(out / prediction_name(points[place], result.scenario_id), result.to_json())
            told(len(found), len(points))
    return tuple(found[i] for i in range(len(points)))


def prediction_name(point: Point, scenario_id: str) -> str:
    """Return the name of the file of a point's prediction."""
    return file_name(point.name, scenario_id, "simulated")


def kept_prediction(out: Path, point: Point, question: Question) -> Result | None:
    """Return the prediction that is in `out` already, if it is of this question and calibration, and by this code.

    One that says anything in another way than it was written is none.
    """
    file = out / prediction_name(point, question.scenario_id)
    remove_partial(file)
    try:
        found = read_result(file)
    except UserError:  # none, or a damaged one
        return None
    same = found.calibration_id == question.calibration_id and found.provenance.get("code") == code_digest()[:SHOWN]
    return found if same and file.read_text(encoding="utf-8") == found.to_json() else None


def _warn_of_equal(points: Sequence[Point], questions: Sequence[Question]) -> None:
    """Say which points are one question under two names: what was varied changes nothing."""
    first: dict[Question, str] = {}
    for point, question in zip(points, questions, strict=True):
        other = first.setdefault(question, point.name)
        if other != point.name:
            print(f"gssim: sweep: {point.name} asks the same as {other}", file=sys.stderr)


def question_of(point: Point, shared: Shared) -> Question:
    """Return which question a point asks; raise UserError where it asks none."""
    loaded = point.load(shared=shared)
    return Question(loaded.scenario.scenario_id, loaded.calibration_id)


def predicted(point: Point, shared: Shared, *, spread: bool = True) -> Result:
    """Return a point's prediction; raise UserError or RunFailedError where it has none. `spread`: as of `simulate`."""
    return simulate(point.load(shared=shared), shared=shared, spread=spread).result


def _asked(found: Sequence[tuple[Point, Question | Fault]], sweep: Path) -> list[Question]:
    """Return the questions; raise the first error, and say how many more there are."""
    wrong = [(point, each) for point, each in found if isinstance(each, Fault)]
    for point, fault in wrong[:1]:
        more = f" (and {len(wrong) - 1} more points)" if len(wrong) > 1 else ""
        raise UserError(f"{sweep}: {point.name}: {fault}{more}")
    return [each for _, each in found if isinstance(each, Question)]
