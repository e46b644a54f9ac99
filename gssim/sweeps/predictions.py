"""The predictions of a sweep's points as Results: several at a time, each kept as it ends.

Handing out points: in chunks, those that have much in common together, until all have ended or the user stops it.
"""

import gc
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from gssim.cache import Shared
from gssim.errors import RunFailedError, UserError
from gssim.execution import SHOWN, Workers, code_digest, processes
from gssim.files import locked, remove_partial, write_text
from gssim.result import Result, file_name, read_result
from gssim.scenario.sweep import Point, is_rate
from gssim.simulation import simulate
from gssim.sweeps.inputs import Packed, unpacked

CHUNK_S = 1.0
"""How long a chunk shall take: long enough for its way to pay, short enough for an interrupt to be heard."""
LONGEST_S = 2 * CHUNK_S
"""How long a chunk may take; what is left of it by then is handed out again."""
MOST_TOGETHER = 128
"""Points of a chunk."""


Made = TypeVar("Made")
Work = Callable[[Point, Shared], Made]
"""What is made of a point; UserError and RunFailedError are answers too."""
Fault = UserError | RunFailedError


@dataclass(frozen=True, slots=True)
class Chunk(Generic[Made]):
    """Points that are handed out together."""

    points: tuple[Point, ...]
    work: Work[Made]
    files: Packed | None = None
    """What they read, for who does not see it."""
    code: str = ""
    """Digest of the simulator that shall answer; empty: whichever is there."""


@dataclass(frozen=True, slots=True)
class Answers(Generic[Made]):
    """What was made of a chunk."""

    made: tuple[Made | Fault, ...]
    """Of its first points: at least of one, of fewer than all where these took too long."""
    took_s: float


def by_likeness(points: Sequence[Point]) -> list[int]:
    """Return the places of points, those with more in common nearer to one another: clusters first, then models.

    What rates links have comes last: programs, and who meets whom, do not hang on it.
    """
    return sorted(range(len(points)), key=lambda place: (str(points[place].file), _ranked(points[place]), place))


def _ranked(point: Point) -> list[tuple[int, str]]:
    """Return what is overridden, what weighs more before what weighs less."""
    return sorted((_rank(override), override) for override in point.overrides if not override.startswith("name="))


def _but_rates(point: Point) -> tuple[Any, ...]:
    """Return what a point is beside links' rates: programs of equal ones are the same."""
    return (point.file, [override for rank, override in _ranked(point) if rank <= len(WEIGHTY)])


WEIGHTY = ("cluster", "workload.", "plan.method", "plan.dp_", "plan.tp", "plan.pp")


@lru_cache(maxsize=4096)
def _rank(override: str) -> int:
    key = override.partition("=")[0]
    if is_rate(key):
        return len(WEIGHTY) + 1
    return next((i for i, begin in enumerate(WEIGHTY) if key.startswith(begin)), len(WEIGHTY))


def answers(
    points: Sequence[Point],
    places: Sequence[int],
    work: Work[Made],
    workers: Workers,
    *,
    files: Packed | None = None,
) -> Iterator[tuple[int, Made | Fault]]:
    """Yield (place, what `work` makes of the point), as they end, for the points at `places`.

    The user's interrupt: nothing more is handed out, what is under way is waited for and yielded, then
    KeyboardInterrupt is raised; a second one does not wait.
    """
    code = code_digest() if files is not None else ""
    waiting, pace_s = deque(places), 0.0
    under_way: dict[Any, list[int]] = {}
    with _interrupts() as interrupted:
        while under_way or (waiting and not interrupted):
            while waiting and not interrupted and len(under_way) < workers.at_a_time:
                taken = _taken(points, waiting, _size(workers, pace_s, len(waiting)), workers)
                chunk = Chunk(tuple(points[place] for place in taken), work, files, code)
                under_way[workers.submit(answer, chunk)] = taken
            for ended in list(workers.ended(list(under_way))):
                taken = under_way.pop(ended)
                found: Answers[Made] = workers.answer(ended)
                pace_s = found.took_s / len(found.made)
                waiting.extendleft(reversed(taken[len(found.made) :]))
                yield from zip(taken, found.made, strict=False)
        if interrupted:
            raise KeyboardInterrupt


def _size(workers: Workers, pace_s: float, waiting: int) -> int:
    """Return how many points are handed out together: by how long those before took; fewer, where few are left."""
    if not workers.in_chunks or not pace_s:
        return 1
    return max(1, min(MOST_TOGETHER, int(CHUNK_S / pace_s), -(-waiting // workers.at_a_time)))


def _taken(points: Sequence[Point], waiting: deque[int], size: int, workers: Workers) -> list[int]:
    """Take about as many places as `size` says: all that differ in links' rates alone together, for one worker.

    What they have in common would else be worked out by two.
    """
    if not workers.in_chunks:
        return [waiting.popleft()]
    taken: list[int] = []
    while waiting and len(taken) < size:
        alike, like = 1, _but_rates(points[waiting[0]])
        while alike < min(MOST_TOGETHER, len(waiting)) and _but_rates(points[waiting[alike]]) == like:
            alike += 1
        if taken and len(taken) + alike > MOST_TOGETHER:
            break
        taken += [waiting.popleft() for _ in range(alike)]
    return taken


class _OfThread(threading.local):
    """What a thread's points have in common; it lives as long as the thread, and is seen by no other."""

    def __init__(self) -> None:
        self.shared = Shared()


_OF_THREAD = _OfThread()


def answer(chunk: Chunk[Made]) -> Answers[Made]:
    """Return what is made of a chunk's first points, in this process, until it has taken long enough."""
    if chunk.code and chunk.code != code_digest():
        raise RunFailedError(
            "dask: a worker has another version of gssim (or numpy, scipy, simpy) than this machine: install the same"
        )
    began_s, shared = time.perf_counter(), _OF_THREAD.shared
    made: list[Made | Fault] = []
    with _rare_collection() as collect:
        for number, point in enumerate(chunk.points):
            made.append(_made(point, chunk.work, chunk.files, shared))
            if number % TOGETHER_COLLECTED == TOGETHER_COLLECTED - 1:
                collect()
            if time.perf_counter() - began_s > LONGEST_S:
                break
    return Answers(tuple(made), time.perf_counter() - began_s)


TOGETHER_COLLECTED = 16
"""Points whose garbage is looked for together."""


@contextmanager
def _rare_collection() -> Iterator[Callable[[], object]]:
    """Keep Python from looking for garbage among all that points have in common; give what looks among the rest."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield lambda: gc.collect(0)
    finally:
        if collecting:
            gc.enable()


def _made(point: Point, work: Work[Made], files: Packed | None, shared: Shared) -> Made | Fault:
    """Return what is made of a point, or why nothing is, in the words of the machine that asked."""
    here = unpacked(files, shared) if files is not None else None
    try:
        return work(here.here(point) if here is not None else point, shared)
    except (UserError, RunFailedError) as error:
        return type(error)(here.told(str(error)) if here is not None else str(error))


class _Interrupted:
    """Whether the user has interrupted."""

    asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def _interrupts() -> Iterator[_Interrupted]:
    """Note the first interrupt instead of raising KeyboardInterrupt; the second one raises it."""
    interrupted = _Interrupted()
    usual = signal.getsignal(signal.SIGINT)

    def noted(*_: Any) -> None:
        interrupted.asked = True
        signal.signal(signal.SIGINT, usual)
        print("gssim: waiting for points that are under way; interrupt again to leave them", file=sys.stderr)

    if usual is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    signal.signal(signal.SIGINT, noted)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, usual)


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
