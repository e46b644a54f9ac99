"""How far predictions are from published figures, source by source, beside a naive baseline."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from analysis.published.platforms import calibration_rows, cluster_of
from analysis.published.predict import Prediction, predict
from analysis.published.runs import Run, SkippedError
from analysis.published.tables import read_table

UTILISATION = 0.4
"""Of the baseline: the share of the peak that 6 FLOP a parameter and token are done at, on every device."""
BYTES_PER_PARAMETER = 16
"""Of the baseline: mixed-precision Adam's states (Rajbhandari et al. 2019, ZeRO, section 3.1)."""
EQUAL_RATIO = 1.05
"""Measured times closer than this have no order."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A row: what was measured of it, what is predicted, and what the baseline says."""

    identity: str
    run: Run
    prediction: Prediction
    calibration: bool
    """Whether numbers of the device were fitted to it; such rows are in no score."""

    @property
    def step_errors(self) -> tuple[float, float] | None:
        """Relative error of the step, and that of the baseline; None where no time was measured."""
        measured = self.run.step_s
        if not measured:
            return None
        return abs(self.prediction.step_s / measured - 1), abs(baseline_step_s(self.run) / measured - 1)

    @property
    def memory_errors(self) -> tuple[float, float] | None:
        """The same of memory, in the metric that was measured."""
        measured = self.run.memory_bytes
        if not measured or self.run.memory_metric is None:
            return None
        predicted = getattr(self.prediction, f"{self.run.memory_metric}_bytes")
        return abs(predicted / measured - 1), abs(baseline_bytes(self.run) / measured - 1)


def baseline_step_s(run: Run) -> float:
    """Return 6 * parameters * tokens / (GPUs * peak * one utilisation)."""
    device = cluster_of(run.gpu, run.ranks, run.per_node).type_of(0)
    peak = device.peak_flop_per_s[run.software.precision]
    return 6 * run.shape.parameters * run.tokens / (run.ranks * peak * UTILISATION)


def baseline_bytes(run: Run) -> float:
    """Return 16 bytes for each parameter that a rank holds, if each data rank of ZeRO-3 holds its part."""
    shards = run.dp * run.software.context_ranks if run.method == "zero3" else 1
    return BYTES_PER_PARAMETER * run.shape.parameters / (run.tp * run.pp * shards)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of several rows, and of the baseline for the same rows."""

    n: int
    mean: float
    median: float
    maximum: float
    baseline_mean: float
    baseline_median: float
    baseline_maximum: float


def errors_of(pairs: Sequence[tuple[float, float]]) -> Errors | None:
    """Return the summary of (own, baseline) errors; None where there are none.

    >>> errors_of([(0.1, 0.5), (0.3, 0.1)]).median
    0.2
    """
    if not pairs:
        return None
    own, naive = ([pair[i] for pair in pairs] for i in (0, 1))
    return Errors(
        n=len(pairs),
        mean=fmean(own),
        median=median(own),
        maximum=max(own),
        baseline_mean=fmean(naive),
        baseline_median=median(naive),
        baseline_maximum=max(naive),
    )


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Of pairs of plans for one model on as many GPUs, how many are predicted in the order that was measured."""

    pairs: int
    agreeing: int


def agreement_of(rows: Iterable[Scored]) -> Agreement:
    """Return in how many pairs of plans for the same training the faster one is predicted to be faster."""
    same: dict[object, list[Scored]] = defaultdict(list)
    for row in rows:
        if row.run.step_s:
            same[row.run.shape, row.run.gpu, row.run.ranks, row.run.tokens].append(row)
    pairs = agreeing = 0
    for alike in same.values():
        for one, other in combinations(alike, 2):
            measured = (one.run.step_s or 0.0, other.run.step_s or 0.0)
            if max(measured) < EQUAL_RATIO * min(measured):
                continue
            pairs += 1
            agreeing += (measured[0] < measured[1]) == (one.prediction.step_s < other.prediction.step_s)
    return Agreement(pairs=pairs, agreeing=agreeing)


@dataclass(frozen=True, kw_only=True)
class SourceScore:
    """The score of one source of figures."""

    source: str
    rows: tuple[Scored, ...]
    """All that are predicted, those of the calibration too."""
    skipped: dict[str, int]
    """How many rows are not predicted, by the reason."""
    tested: tuple[Scored, ...]

    @property
    def calibration(self) -> tuple[str, ...]:
        """Ids of the rows that are left out as calibrated on."""
        return tuple(row.identity for row in self.rows if row.calibration)

    @property
    def step(self) -> Errors | None:
        """Errors of step times."""
        return errors_of([row.step_errors for row in self.tested if row.step_errors])

    @property
    def memory(self) -> dict[str, Errors]:
        """Errors of memory, by metric."""
        pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in self.tested:
            if row.memory_errors and row.run.memory_metric:
                pairs[row.run.memory_metric].append(row.memory_errors)
        return {metric: found for metric, each in pairs.items() if (found := errors_of(each))}

    @property
    def agreement(self) -> Agreement:
        """Order of plans."""
        return agreement_of(self.rows)


def score(
    files: Sequence[Path],
    *,
    told: Callable[[str], None] = lambda _: None,
    only: Callable[[str], bool] = lambda _: True,
) -> list[SourceScore]:
    """Return the scores of the rows of some tables, by source.

    `told` hears of every row, by id, as it is predicted; `only`: which rows, by id.
    """
    found: dict[str, list[Scored]] = defaultdict(list)
    skipped: dict[str, Counter[str]] = defaultdict(Counter)
    for file in files:
        for identity, source, run in (each for each in read_table(file) if only(each[0])):
            try:
                row = _scored(identity, run)
            except SkippedError as reason:
                skipped[source][str(reason)] += 1
            else:
                found[source].append(row)
                told(identity)
    return [
        SourceScore(
            source=source,
            rows=tuple(found[source]),
            skipped=dict(skipped[source]),
            tested=tuple(row for row in found[source] if not row.calibration),
        )
        for source in dict.fromkeys([*found, *skipped])
    ]


def _scored(identity: str, run: Run | SkippedError) -> Scored:
    if isinstance(run, SkippedError):
        raise run
    if run.step_s is None and run.memory_bytes is None:
        raise SkippedError("the row has neither a time nor a memory")
    return Scored(
        identity=identity, run=run, prediction=predict(run), calibration=identity in calibration_rows()
    )  # fmt: skip
