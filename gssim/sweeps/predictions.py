"""Predicts the points of a sweep in parallel: hands out chunks of similar points, writes each Result at its end."""

import gc
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from gssim.errors import RunFailedError, UserError
from gssim.execution import SHOWN, FileStore, Workers, code_digest, processes
from gssim.execution.cache import Shared
from gssim.execution.files import locked
from gssim.execution.garbage import OBJECTS_PER_COLLECTION, no_collection
from gssim.result import Result, file_name, read_result
from gssim.scenario.identity import layers_id
from gssim.scenario.sweep import Point, is_rate
from gssim.simulation import simulate
from gssim.sweeps.inputs import Packed, unpacked

CHUNK_S = 1.0
"""Target duration of a chunk: long enough to pay for its transfer, short enough to respond to an interrupt."""
MAX_CHUNK_S = 2 * CHUNK_S
"""Longest duration of a chunk; its remaining points are then handed out again."""
MAX_CHUNK_POINTS = 128
"""Largest number of points in a chunk."""


Made = TypeVar("Made")
Work = Callable[[Point, Shared], Made]
"""Function that answers a point. UserError and RunFailedError count as answers too."""
Fault = UserError | RunFailedError


@dataclass(frozen=True, slots=True)
class Chunk(Generic[Made]):
    """Points that are submitted together."""

    points: tuple[Point, ...]
    work: Work[Made]
    files: Packed | None = None
    """Files that the points read, for a worker on another machine."""
    code: str = ""
    """Digest of the simulator's code that the worker must have; empty: any."""


@dataclass(frozen=True, slots=True)
class Answers(Generic[Made]):
    """Answers for the points of a chunk."""

    made: tuple[Made | Fault, ...]
    """Answers for the first points of the chunk: at least one, and not all of them if these took too long."""
    took_s: float


def by_likeness(points: Sequence[Point]) -> list[int]:
    """Return the indices of points sorted by similarity: by cluster first, then by model.

    Link rates are compared last, since programs and collective instances do not depend on them.
    """
    return sorted(
        range(len(points)), key=lambda place: (str(points[place].file), _weighted_overrides(points[place]), place)
    )


def _weighted_overrides(point: Point) -> list[tuple[int, str]]:
    """Return the overrides of a point, in order of falling influence on the work that points share."""
    return sorted((_rank(override), override) for override in point.overrides if not override.startswith("name="))


def _without_rates(point: Point) -> tuple[Any, ...]:
    """Return a key of a point that ignores link rates; points with equal keys have equal programs."""
    return (
        point.file,
        [override for rank, override in _weighted_overrides(point) if rank <= len(SIGNIFICANT_KEYS)],
    )


SIGNIFICANT_KEYS = ("cluster", "workload.", "plan.method", "plan.dp_", "plan.tp", "plan.pp")


@lru_cache(maxsize=4096)
def _rank(override: str) -> int:
    key = override.partition("=")[0]
    if is_rate(key):
        return len(SIGNIFICANT_KEYS) + 1
    return next((i for i, begin in enumerate(SIGNIFICANT_KEYS) if key.startswith(begin)), len(SIGNIFICANT_KEYS))


def answers(
    points: Sequence[Point],
    places: Sequence[int],
    work: Work[Made],
    workers: Workers,
    *,
    files: Packed | None = None,
) -> Iterator[tuple[int, Made | Fault]]:
    """Yield (index, answer of `work`) for the points at `places`, as the answers become available.

    After an interrupt nothing more is submitted; running chunks are awaited and yielded, then KeyboardInterrupt is
    raised. A second interrupt does not wait.
    """
    code = code_digest() if files is not None else ""
    waiting, point_s = deque(places), 0.0
    under_way: dict[Any, list[int]] = {}
    with _interrupts() as interrupted:
        while under_way or (waiting and not interrupted):
            while waiting and not interrupted and len(under_way) < workers.at_a_time:
                size = 1  # later, as many points as take CHUNK_S, or fewer if few are left
                if workers.in_chunks and point_s:
                    size = max(1, min(MAX_CHUNK_POINTS, int(CHUNK_S / point_s), -(-len(waiting) // workers.at_a_time)))
                taken = _take_places(points, waiting, size, workers)
                chunk = Chunk(tuple(points[place] for place in taken), work, files, code)
                under_way[workers.submit(answer, chunk)] = taken
            for ended in list(workers.ended(list(under_way))):
                taken = under_way.pop(ended)
                answered: Answers[Made] = workers.answer(ended)
                point_s = answered.took_s / len(answered.made)
                waiting.extendleft(reversed(taken[len(answered.made) :]))
                yield from zip(taken, answered.made, strict=False)
        if interrupted:
            raise KeyboardInterrupt


def _take_places(points: Sequence[Point], waiting: deque[int], size: int, workers: Workers) -> list[int]:
    """Take about `size` indices; points that differ only in link rates go to the same worker.

    Two workers would otherwise compute their common parts twice.
    """
    if not workers.in_chunks:
        return [waiting.popleft()]
    taken: list[int] = []
    while waiting and len(taken) < size:
        alike, like = 1, _without_rates(points[waiting[0]])
        while alike < min(MAX_CHUNK_POINTS, len(waiting)) and _without_rates(points[waiting[alike]]) == like:
            alike += 1
        if taken and len(taken) + alike > MAX_CHUNK_POINTS:
            break
        taken += [waiting.popleft() for _ in range(alike)]
    return taken


class _ThreadCache(threading.local):
    """Cache shared by the points of a thread, for the lifetime of the thread."""

    def __init__(self) -> None:
        self.shared = Shared()


_THREAD_CACHE = _ThreadCache()


def answer(chunk: Chunk[Made]) -> Answers[Made]:
    """Return the answers for the first points of a chunk, computed here until the time for a chunk is over."""
    if chunk.code and chunk.code != code_digest():
        raise RunFailedError(
            "dask: a worker has another version of gssim (or numpy, scipy, simpy) than this machine: install the same"
        )
    began_s, shared = time.perf_counter(), _THREAD_CACHE.shared
    made: list[Made | Fault] = []
    with no_collection():
        for point in chunk.points:
            local_files = unpacked(chunk.files, shared) if chunk.files is not None else None
            try:
                made.append(chunk.work(local_files.localised(point) if local_files is not None else point, shared))
            except (UserError, RunFailedError) as error:  # names the paths of the requesting machine
                text = local_files.original_text(str(error)) if local_files is not None else str(error)
                made.append(type(error)(text))
            if gc.get_count()[0] > OBJECTS_PER_COLLECTION:
                gc.collect(0)  # only the youngest generation: objects that points share are older
            if time.perf_counter() - began_s > MAX_CHUNK_S:
                break
    return Answers(tuple(made), time.perf_counter() - began_s)


class _Interrupted:
    """Flag of an interrupt by the user."""

    asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def _interrupts() -> Iterator[_Interrupted]:
    """Record the first interrupt instead of raising KeyboardInterrupt; the second one raises it."""
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
class PredictionKey:
    """Everything that a prediction depends on: the scenario with its run length, the calibration, the traced layers of
    the model, and gssim's code.
    """

    scenario_id: str
    calibration_id: str
    code: str
    layers_id: str
    """Digest of the traced layers. A model that is traced again keeps the identity of its scenarios."""


def predictions_in(folder: Path) -> FileStore[Result]:
    """Return the store of the predictions in a folder."""

    def key_of(result: Result) -> PredictionKey:
        layers = layers_id(result.scenario.get("workload", {}).get("model"))
        return PredictionKey(result.scenario_id, result.calibration_id, result.provenance.get("code", ""), layers)

    return FileStore(folder, read_result, Result.to_json, key_of, is_exact=True)


def key_of_point(point: Point, shared: Shared) -> PredictionKey:
    """Return the key of a point's prediction; raise UserError if the point is not a valid scenario."""
    loaded = point.load(shared=shared)
    scenario = loaded.scenario
    code, layers = code_digest()[:SHOWN], scenario.layers_id()
    return PredictionKey(scenario.identity(shared), loaded.calibration(shared), code, layers)


def predict(
    points: Sequence[Point],
    *,
    sweep: Path,
    out: Path | None,
    jobs: int,
    again: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, points: None,
) -> tuple[Result, ...]:
    """Return a prediction of every point, in order; with `out`, each is written there as soon as it is ready.

    Unless `again`, a file with the same scenario, calibration, traced layers and code is reused. All points are checked
    before the first is simulated: UserError names the sweep and the point, or the process that is writing there.
    `on_progress` is called with (done, total).
    """
    with locked(out / LOCK, place=str(out)) if out is not None else nullcontext():
        order, store = by_likeness(points), predictions_in(out) if out is not None else None
        with processes(min(jobs, len(points))) as workers:
            by_place = dict(answers(points, order, key_of_point, workers))
            wrong = [
                (point, by_place[place]) for place, point in enumerate(points) if isinstance(by_place[place], Fault)
            ]
            if wrong:
                more = f" (and {len(wrong) - 1} more points)" if len(wrong) > 1 else ""
                raise UserError(f"{sweep}: {wrong[0][0].name}: {wrong[0][1]}{more}")
            keys = [
                key for _, key in sorted(by_place.items(), key=lambda entry: entry[0]) if isinstance(key, PredictionKey)
            ]
            names: dict[PredictionKey, str] = {}
            for point, key in zip(points, keys, strict=True):
                other = names.setdefault(key, point.name)
                if other != point.name:
                    print(f"gssim: sweep: {point.name} asks the same as {other}", file=sys.stderr)
            results: dict[int, Result] = {}
            if store is not None and not again:
                for i, (point, key) in enumerate(zip(points, keys, strict=True)):
                    kept = store.kept(prediction_name(point, key.scenario_id), key)
                    if kept is not None:
                        results[i] = kept
            on_progress(len(results), len(points))
            left = [i for i in order if i not in results]
            with _background_writer(store) as keep:
                for place, result in answers(points, left, predicted, workers):
                    if isinstance(result, Fault):
                        raise type(result)(f"{sweep}: {points[place].name}: {result}")
                    results[place] = result
                    keep(prediction_name(points[place], result.scenario_id), result)
                    on_progress(len(results), len(points))
        return tuple(results[i] for i in range(len(points)))


WRITERS = 8
"""Number of threads that write Results: each mostly waits for the disk."""


@contextmanager
def _background_writer(store: FileStore[Result] | None) -> Iterator[Callable[[str, Result], None]]:
    """Yield a function that writes a Result to the store in another thread; without a store, it does nothing.

    When the context ends, all Results have been written to disk. If one cannot be written, a later call, or the end of
    the context, raises UserError.
    """
    if store is None:
        yield lambda name, result: None
        return
    written: deque[Future[None]] = deque()
    with ThreadPoolExecutor(WRITERS) as threads:

        def keep(name: str, result: Result) -> None:
            written.append(threads.submit(store.keep, name, result))
            while written and written[0].done():
                written.popleft().result()

        yield keep
        for each in written:
            each.result()


LOCK = ".gssim-sweep.lock"
"""Lock file in a folder of predictions, held by the process that writes them."""


def prediction_name(point: Point, scenario_id: str) -> str:
    """Return the name of the file of a point's prediction."""
    return file_name(point.name, scenario_id, "simulated")


def predicted(point: Point, shared: Shared, *, spread: bool = True, listed: bool = True) -> Result:
    """Return a point's prediction; raise UserError or RunFailedError if there is none.

    `spread`, `listed`: see `simulate`.
    """
    return simulate(point.load(shared=shared), shared=shared, spread=spread, listed=listed).result
