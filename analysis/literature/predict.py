"""Prediction of published training runs: the scenario of a run, and its simulation in one process or several."""

import signal
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Any

from analysis.literature.operations import FLOAT
from analysis.literature.platforms import cluster_of, platform_of, servers_of
from analysis.literature.runs import Run, SkippedError
from analysis.literature.transformer import transformer
from gssim.cache import Shared
from gssim.cluster import Cluster
from gssim.errors import UserError
from gssim.plan import DATA_AXES, METHODS, Plan
from gssim.result import Result
from gssim.scenario import Loaded, Scenario, check
from gssim.simulation import simulate
from gssim.units import PRECISION_BYTES
from gssim.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """Predicted step time and peak memory of a run (memory of the rank that needs most, or as `Run.memory_of`)."""

    step_s: float
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float


CACHED_ANSWERS = 8
"""Intermediate results of each kind that are cached across runs; equal ones are mostly of adjacent rows."""
MOST_RANKS, MOST_BLOCKS = 2**16, 2**10
"""Limits on the size of a run; a larger value is taken for a typing error in the table."""


def predict(run: Run, shared: Shared | None = None) -> Prediction:
    """Return the prediction for a run; raise SkippedError where the project cannot predict it.

    `shared`: cache of intermediate results of earlier runs. Only a few micro-batches are simulated: in steady state
    each further one takes the same time, so that the step time is extrapolated from two counts.
    """
    _check_consistency(run)
    few, more = _simulated_counts(run)
    shared = shared or Shared(CACHED_ANSWERS)
    results = [_simulated(run, count, shared) for count in dict.fromkeys((few, more))]
    first, last = results[0].step_time_s, results[-1].step_time_s
    step_s = last + (run.micro_batches - more) * (last - first) / max(1, more - few)
    ranks = results[-1].ranks
    if run.memory_of == "last":
        ranks = tuple(rank for rank in ranks if run.ranks - 1 in rank.ranks)
    float_gradient_bytes = 0.0  # beside the gradients in the parameters' own precision, which the plan accounts for
    if run.software.float_gradients:
        parameter_bytes = max(rank.peak_by_category_bytes.get("parameters", 0.0) for rank in ranks)
        float_gradient_bytes = parameter_bytes * (FLOAT / PRECISION_BYTES[run.software.precision] - 1)
    allocated = max(rank.peak_allocated_bytes for rank in ranks) + float_gradient_bytes
    reserved = max(rank.peak_reserved_bytes or rank.peak_allocated_bytes for rank in ranks) + float_gradient_bytes
    outside = max(sum(rank.outside_bytes.values()) for rank in ranks)
    return Prediction(step_s, allocated, reserved, reserved + outside)


def _check_consistency(run: Run) -> None:
    """Raise SkippedError for a run whose figures contradict each other, or are too large to be meant."""
    shape, software = run.shape, run.software
    if run.ranks > MOST_RANKS or shape.layers > MOST_BLOCKS:
        raise SkippedError("more GPUs or layers than any run has")
    if shape.heads % run.tp or shape.hidden % shape.heads or shape.heads % shape.kv_heads:
        raise SkippedError("heads do not divide evenly")
    if shape.sequence_length % software.context_ranks:
        raise SkippedError("sequences do not divide evenly")
    if run.pp * run.chunks > shape.layers:
        raise SkippedError("more stages than layers")
    if run.chunks > 1 and run.micro_batches % run.pp:
        raise SkippedError("interleaved stages need a multiple of pp micro-batches")


def _simulated_counts(run: Run) -> tuple[int, int]:
    """Return the two numbers of micro-batches to simulate, which differ by one period of the schedule.

    The schedule is periodic once the pipeline is filled: after `pp` micro-batches with a period of one micro-batch;
    interleaved, after 2 * `pp` with a period of `pp`. Runs that are hardly longer are simulated whole.
    """
    period, few = (run.pp, 2 * run.pp) if run.chunks > 1 else (1, max(2, run.pp))
    if run.micro_batches <= few + period or run.micro_batches % period:
        return run.micro_batches, run.micro_batches
    return few, few + period


def cluster_of_run(run: Run) -> Cluster:
    """Return the cluster of a run; raise SkippedError for an unknown GPU."""
    if any(platform_of(gpu) is None for gpu in (dict(run.servers) or (run.gpu,))):
        raise SkippedError("a GPU that platforms.toml does not know")
    servers = run.servers or servers_of(run.gpu, run.ranks, run.per_node)
    return cluster_of(servers, run.software.precision, run.software.tensor_float)


def scenario_of(run: Run, micro_batches: int) -> Scenario:
    """Return the scenario of a run with `micro_batches` micro-batches; raise SkippedError for an unknown GPU."""
    context = run.software.context_ranks
    model = transformer(run.shape, run.software, tp=run.tp, tied=run.pp == 1 and run.shape.ties)
    workload = Workload(
        model=model,
        global_batch_size=run.dp * context * run.micro_batch * micro_batches,
        sequence_length=run.shape.sequence_length // context,
        precision=run.software.precision,
        optimizer=run.optimizer,
        optimizer_implementation="fused",
    )
    # row ids may hold any character; files may be named after scenarios
    name = "".join(char if char.isprintable() and char != "/" else "-" for char in run.identity) or "row"
    return Scenario(name=name, cluster=cluster_of_run(run), workload=workload, plan=plan_of(run, micro_batches))


def plan_of(run: Run, micro_batches: int) -> Plan:
    """Return the parallel plan of a run."""
    data = run.dp * run.software.context_ranks
    axis = METHODS[run.method].axis
    settings: dict[str, Any] = {axis: data} if axis in DATA_AXES and run.method != "single" else {}
    if run.pp > 1:
        settings |= {
            "pp": run.pp,
            "stages": stages_of(run),
            "schedule": "interleaved" if run.chunks > 1 else "1f1b" if micro_batches >= run.pp else "gpipe",
        }
    if run.method == "ddp" and not run.overlap:
        settings["bucket_bytes"] = float(2**50)
    return Plan(
        method=run.method, tp=run.tp, micro_batches=micro_batches, recompute=run.recompute, overlap=run.overlap,
        **settings,
    )  # fmt: skip


def stages_of(run: Run) -> tuple[int, ...]:
    """Return the number of layers of every stage: blocks, the embedding in the first, the head in the last."""
    stages, blocks = run.pp * run.chunks, run.shape.layers
    counts = list(run.blocks_of_stages or (blocks * (i + 1) // stages - blocks * i // stages for i in range(stages)))
    counts[0] += 1
    counts[-1] += 1
    return tuple(counts)


def _simulated(run: Run, micro_batches: int, shared: Shared) -> Result:
    try:
        scenario = scenario_of(run, micro_batches)
        check(scenario, file=run.identity)
        return simulate(Loaded(file=run.identity, scenario=scenario), shared=shared).result
    except UserError as error:
        reason = str(error).partition(": ")[2] or str(error)  # without the row's own id
        raise SkippedError(f"gssim refuses the plan: {reason}") from None


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
        shared = Shared(CACHED_ANSWERS)
        yield from ((i, predict_or_explain(run, shared)) for i, run in enumerate(runs))
        return
    # workers ignore interrupts: the process that submits the runs handles them
    ignored = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=signal.signal, initargs=ignored
    ) as pool:
        try:
            # the longest first, so that no long run is left alone at the end
            order = sorted(range(len(runs)), key=lambda i: -runs[i].pp * runs[i].chunks)
            futures = {pool.submit(_predict_in_worker, runs[i]): i for i in order}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@cache
def _worker_cache() -> Shared:
    """Return this process's cache of intermediate results."""
    return Shared(CACHED_ANSWERS)


def _predict_in_worker(run: Run) -> Outcome:
    return predict_or_explain(run, _worker_cache())


def predict_or_explain(run: Run, shared: Shared | None = None) -> Outcome:
    """Return the prediction of a run, or the reason that there is none; no exception of one run ends the others."""
    try:
        return predict(run, shared)
    except SkippedError as reason:
        return NoPrediction(str(reason))
    except Exception as error:
        return NoPrediction(
            f"internal error ({type(error).__name__})", fault=f"{run.identity}: {traceback.format_exc()}"
        )
