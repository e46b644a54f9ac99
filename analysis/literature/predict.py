"""Prediction of published training runs by their scenarios, in one process or several."""

import signal
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context

import gssim
from analysis.literature.runs import Run, SkippedError
from analysis.literature.scenarios import refused, scenario_of


@dataclass(frozen=True)
class Prediction:
    """Predicted step time and peak memory of a run (memory of the rank that needs most, or as `Run.memory_of`)."""

    step_s: float
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float


def predict(run: Run) -> Prediction:
    """Return the prediction for a run; raise SkippedError where the project cannot predict it."""
    try:
        result = gssim.simulate(scenario_of(run))
    except gssim.UserError as error:
        raise refused(error) from None
    ranks = result.ranks
    if run.memory_of == "last":
        ranks = tuple(rank for rank in ranks if run.ranks - 1 in rank.ranks)
    reserved = max(rank.peak_reserved_bytes or rank.peak_allocated_bytes for rank in ranks)
    return Prediction(
        step_s=result.step_time_s,
        allocated_bytes=max(rank.peak_allocated_bytes for rank in ranks),
        reserved_bytes=reserved,
        device_bytes=reserved + max(sum(rank.outside_bytes.values()) for rank in ranks),
    )


INTERRUPTED = "not reached before the interrupt"


@dataclass(frozen=True)
class NoPrediction:
    """The reason for a run's missing prediction."""

    reason: str
    fault: str = ""
    """Traceback, where the project's own code failed."""


Outcome = Prediction | NoPrediction


def predict_runs(
    runs: Sequence[Run], *, jobs: int = 1, on_done: Callable[[int], None] = lambda _: None
) -> list[Outcome]:
    """Return the outcome of each run; runs that differ only in id and measured figures are predicted once.

    `on_done` is called with the index of each run as it ends. After an interrupt the finished outcomes are returned,
    the others as missing.
    """
    indices: dict[Run, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        question = replace(run, identity="", source="", step_s=None, memory_bytes=None, memory_metric=None)
        indices[question].append(i)
    duplicates = list(indices.values())
    distinct = [runs[same[0]] for same in duplicates]
    outcomes: list[Outcome] = [NoPrediction(INTERRUPTED)] * len(runs)
    try:
        for number, outcome in _completed(distinct, min(jobs, len(distinct))):
            for i in duplicates[number]:
                outcomes[i] = outcome
                on_done(i)
    except KeyboardInterrupt:
        pass
    return outcomes


def _completed(runs: Sequence[Run], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Yield the index and outcome of each run as it ends."""
    if jobs <= 1:
        yield from ((i, predict_or_explain(run)) for i, run in enumerate(runs))
        return
    # workers ignore interrupts: the process that submits the runs handles them
    ignored = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=signal.signal, initargs=ignored
    ) as pool:
        try:
            # the longest first, so that no long run is left alone at the end
            order = sorted(range(len(runs)), key=lambda i: -runs[i].pp * runs[i].chunks)
            futures = {pool.submit(predict_or_explain, runs[i]): i for i in order}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def predict_or_explain(run: Run) -> Outcome:
    """Return the prediction of a run, or the reason that there is none; no exception of one run ends the others."""
    try:
        return predict(run)
    except SkippedError as reason:
        return NoPrediction(str(reason))
    except Exception as error:
        return NoPrediction(
            f"internal error ({type(error).__name__})", fault=f"{run.identity}: {traceback.format_exc()}"
        )
