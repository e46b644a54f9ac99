"""The predictions of a sweep's points: several at a time, each kept as it ends."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from gssim.result import Result, file_name, read_result, write_text
from gssim.simulate import simulate
from gssim.sweep import Point, loaded_point
from gssim.units import RunFailedError, UserError

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Question:
    """What tells whether a prediction is of a point as it is now."""

    scenario_id: str
    calibration_id: str


@dataclass(frozen=True, slots=True)
class Task:
    """What a process is given."""

    point: Point
    sweep: Path


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

    A file of the same question and calibration stays as it is, unless `again`. All points are checked before the first
    is simulated: UserError names the sweep and the point. `told` hears (done, of how many).
    """
    tasks = [Task(point, sweep) for point in points]
    with _processes(min(jobs, len(tasks))) as run:
        questions = _asked(each for _, each in sorted(run(question_of, tasks), key=lambda each: each[0]))
        _warn_of_equal(points, questions)
        found: dict[int, Result] = {}
        if out is not None and not again:
            for i, (point, question) in enumerate(zip(points, questions, strict=True)):
                kept = kept_prediction(out, point, question)
                if kept is not None:
                    found[i] = kept
        told(len(found), len(points))
        missing = [i for i in range(len(points)) if i not in found]
        for place, result in run(predicted, [tasks[i] for i in missing]):
            found[missing[place]] = result
            if out is not None:
                write_text(out / prediction_name(points[missing[place]], result.scenario_id), result.to_json())
            told(len(found), len(points))
    return tuple(found[i] for i in range(len(points)))


def usable_cores() -> int:
    """Return how many of this machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prediction_name(point: Point, scenario_id: str) -> str:
    """Return the name of the file of a point's prediction."""
    return file_name(point.name, scenario_id, "simulated")


def kept_prediction(out: Path, point: Point, question: Question) -> Result | None:
    """Return the prediction that is in `out` already, if it is of this question and calibration."""
    try:
        found = read_result(out / prediction_name(point, question.scenario_id))
    except UserError:  # none, or a damaged one
        return None
    return found if found.calibration_id == question.calibration_id else None


def _warn_of_equal(points: Sequence[Point], questions: Sequence[Question]) -> None:
    """Say which points are one question under two names: what was varied changes nothing."""
    first: dict[Question, str] = {}
    for point, question in zip(points, questions, strict=True):
        other = first.setdefault(question, point.name)
        if other != point.name:
            print(f"gssim: sweep: {point.name} asks the same as {other}", file=sys.stderr)


def question_of(task: Task) -> Question | UserError:
    """Return which question a point asks, or why it asks none."""
    try:
        loaded = loaded_point(task.point, file=task.sweep)
        return Question(loaded.scenario.scenario_id, loaded.calibration_id)
    except UserError as error:
        return error


def _asked(questions: Iterable[Question | UserError]) -> list[Question]:
    """Return the questions; raise the first error, and say how many more there are."""
    found = list(questions)
    wrong = [each for each in found if isinstance(each, UserError)]
    if wrong:
        raise UserError(f"{wrong[0]}{f' (and {len(wrong) - 1} more points)' if len(wrong) > 1 else ''}")
    return [each for each in found if isinstance(each, Question)]


def predicted(task: Task) -> Result:
    """Return a point's prediction; raise RunFailedError that names the point where it has none."""
    try:
        return simulate(loaded_point(task.point, file=task.sweep)).result
    except RunFailedError as error:
        raise RunFailedError(f"{task.sweep}: {task.point.name}: {error}") from None


@contextmanager
def _processes(jobs: int) -> Iterator[Callable[[Callable[[Task], Made], Sequence[Task]], Iterator[tuple[int, Made]]]]:
    """Give a function that calls another with each task, and yields (place of the task, what it returned) as they end.

    What fails, or an interrupt, ends all that has not begun; those under way are waited for.
    """
    if jobs <= 1:
        yield lambda work, tasks: ((i, work(task)) for i, task in enumerate(tasks))
        return
    # not forked: the progress bar has a thread
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_ignore_interrupts) as pool:

        def run(work: Callable[[Task], Made], tasks: Sequence[Task]) -> Iterator[tuple[int, Made]]:
            places = {pool.submit(work, task): i for i, task in enumerate(tasks)}
            for future in as_completed(places):
                try:
                    made = future.result()
                except BrokenProcessPool:
                    raise RunFailedError("a process died, of too little memory perhaps: try fewer --jobs") from None
                yield places[future], made

        try:
            yield run
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _ignore_interrupts() -> None:
    """Leave the user's interrupt to the process that hands out the tasks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
