"""Predictions of many runs, several at a time: each ends in one, or in the reason why there is none."""

import signal
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context

from analysis.published.predict import MOST_KEPT, Prediction, predict
from analysis.published.runs import Run, SkippedError
from gssim.shared import Shared

INTERRUPTED = "not reached before the interrupt"


@dataclass(frozen=True)
class Missing:
    """Why a run has no prediction."""

    reason: str
    fault: str = ""
    """What went wrong in the project's own code, where that is the reason."""


Outcome = Prediction | Missing


def outcomes(runs: Sequence[Run], *, jobs: int = 1, told: Callable[[int], None] = lambda _: None) -> list[Outcome]:
    """Return what becomes of each run; runs that differ in name and measured figures alone are predicted once.

    `told` hears the place of each run as it ends. An interrupt ends the work, not the answer: what is finished by then
    is returned, the rest as missing.
    """
    alike: dict[Run, list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        alike[_asked(run)].append(place)
    distinct = [runs[places[0]] for places in alike.values()]
    places_of = list(alike.values())
    found: list[Outcome] = [Missing(INTERRUPTED)] * len(runs)
    try:
        for number, outcome in _ended(distinct, min(jobs, len(distinct))):
            for place in places_of[number]:
                found[place] = outcome
                told(place)
    except KeyboardInterrupt:
        pass
    return found


def _asked(run: Run) -> Run:
    """Return what is asked of a run: all but its name and what was measured."""
    return replace(run, identity="", source="", step_s=None, memory_bytes=None, memory_metric=None)


def _ended(runs: Sequence[Run], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Yield each run's place and outcome as they end."""
    if jobs <= 1:
        shared = Shared(MOST_KEPT)
        yield from ((place, outcome_of(run, shared)) for place, run in enumerate(runs))
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_ignore_interrupts) as pool:
        try:
            # the longest first, so that none is alone at the end
            order = sorted(range(len(runs)), key=lambda place: -runs[place].pp * runs[place].chunks)
            places = {pool.submit(_outcome_here, runs[place]): place for place in order}
            for future in as_completed(places):
                yield places[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _ignore_interrupts() -> None:
    """Leave the user's interrupt to the process that hands out the runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@cache
def _shared_here() -> Shared:
    """Return what the runs of this process share."""
    return Shared(MOST_KEPT)


def _outcome_here(run: Run) -> Outcome:
    return outcome_of(run, _shared_here())


def outcome_of(run: Run, shared: Shared | None = None) -> Outcome:
    """Return the prediction of a run, or why there is none; no run's fault keeps the others from being predicted."""
    try:
        return predict(run, shared)
    except SkippedError as reason:
        return Missing(str(reason))
    except Exception as error:
        return Missing(f"a fault of ours ({type(error).__name__})", fault=f"{run.identity}: {traceback.format_exc()}")
