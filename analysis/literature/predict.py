"""The scenario of a published run, and its prediction.

Predictions of many runs, several at a time: each ends in one, or in the reason why there is none.
"""

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
from gssim.result import RankClass, Result
from gssim.scenario import Loaded, Scenario, check
from gssim.simulation import simulate
from gssim.units import PRECISION_BYTES
from gssim.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a run; memory of the rank that needs most."""

    step_s: float
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float


MOST_KEPT = 8
"""Answers of each kind that runs share: neighbours in a table are alike, if any are."""
MOST_RANKS, MOST_BLOCKS = 2**16, 2**10
"""Of more, no row is simulated: a slip of the pen rather than a run."""


def predict(run: Run, shared: Shared | None = None) -> Prediction:
    """Return the prediction for a run; raise SkippedError where the project cannot predict it.

    `shared`: what runs before it have in common with it. Of many micro-batches not all are simulated: in its steady
    state, each more takes as long as the one before it.
    """
    _refuse(run)
    few, more = _counts(run)
    shared = shared or Shared(MOST_KEPT)
    results = [_result(run, count, shared) for count in dict.fromkeys((few, more))]
    first, last = results[0].step_time_s, results[-1].step_time_s
    step_s = last + (run.micro_batches - more) * (last - first) / max(1, more - few)
    ranks = results[-1].ranks
    if run.memory_of == "last":
        ranks = tuple(each for each in ranks if run.ranks - 1 in each.ranks)
    added = _float_gradient_bytes(run, ranks)
    allocated = max(rank.peak_allocated_bytes for rank in ranks) + added
    reserved = max(rank.peak_reserved_bytes or rank.peak_allocated_bytes for rank in ranks) + added
    outside = max(sum(rank.outside_bytes.values()) for rank in ranks)
    return Prediction(step_s, allocated, reserved, reserved + outside)


def _float_gradient_bytes(run: Run, ranks: Sequence[RankClass]) -> float:
    """Return what gradients in float take beside those of the parameters' own precision, which the plan tells."""
    if not run.software.float_gradients:
        return 0.0
    held = max(rank.peak_by_category_bytes.get("parameters", 0.0) for rank in ranks)
    return held * (FLOAT / PRECISION_BYTES[run.software.precision] - 1)


def _refuse(run: Run) -> None:
    """Raise SkippedError for runs that there cannot have been."""
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


def _counts(run: Run) -> tuple[int, int]:
    """Return how many micro-batches are simulated, twice: the numbers are as far apart as the schedule repeats.

    It does from the micro-batch on that finds a pipeline filled, with each micro-batch; interleaved, that takes two
    rounds of its ranks, and as many micro-batches as it has ranks.
    """
    every, few = (run.pp, 2 * run.pp) if run.chunks > 1 else (1, max(2, run.pp))
    if run.micro_batches <= few + every or run.micro_batches % every:
        return run.micro_batches, run.micro_batches
    return few, few + every


def cluster_of_run(run: Run) -> Cluster:
    """Return the cluster that a run was on; raise SkippedError for a GPU that is not known."""
    if any(platform_of(gpu) is None for gpu in (dict(run.servers) or (run.gpu,))):
        raise SkippedError("a GPU that platforms.toml does not know")
    servers = run.servers or servers_of(run.gpu, run.ranks, run.per_node)
    return cluster_of(servers, run.software.precision, run.software.tensor_float)


def scenario_of(run: Run, micro_batches: int) -> Scenario:
    """Return the scenario of a run with so many micro-batches; raise SkippedError for a GPU that is not known."""
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
    # tables name their rows as they like; files may be named after scenarios
    name = "".join(each if each.isprintable() and each != "/" else "-" for each in run.identity) or "row"
    return Scenario(name=name, cluster=cluster_of_run(run), workload=workload, plan=plan_of(run, micro_batches))


def plan_of(run: Run, micro_batches: int) -> Plan:
    """Return how a run divides the work."""
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
    """Return the layers of every stage: blocks, the embedding with the first, the head with the last."""
    stages, blocks = run.pp * run.chunks, run.shape.layers
    counts = list(run.blocks_of_stages or (blocks * (i + 1) // stages - blocks * i // stages for i in range(stages)))
    counts[0] += 1
    counts[-1] += 1
    return tuple(counts)


def _result(run: Run, micro_batches: int, shared: Shared) -> Result:
    try:
        scenario = scenario_of(run, micro_batches)
        check(scenario, file=run.identity)
        return simulate(Loaded(file=run.identity, scenario=scenario), shared=shared).result
    except UserError as error:
        raise SkippedError(f"gssim refuses the plan: {_reason(str(error))}") from None


def _reason(text: str) -> str:
    """Return a refusal without the row's own name and numbers' places."""
    return text.partition(": ")[2] or text


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
