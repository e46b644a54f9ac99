"""Errors of predictions against published step times and memory, by source, with those of a naive baseline.

`score` predicts every row of some tables; `print_scores` and `as_json` report the errors.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from analysis.literature.platforms import calibration_rows
from analysis.literature.runs import Run
from analysis.literature.scenarios import INTERRUPTED, NoPrediction, Prediction, cluster_of_run, predict_runs
from analysis.literature.tables.frameworks import UNEVEN_STEPS
from analysis.literature.tables.reading import Record, read_table
from gssim.cluster.presets import PresetErrors, QuantityErrors, digest_of_figures, preset_of
from gssim.errors import UserError
from gssim.terminal import PIPE_WIDTH, plain_console

UTILISATION = 0.4
"""The baseline's assumption: 6 FLOP per parameter and token at this fraction of the peak, on every device."""
BYTES_PER_PARAMETER = 16
"""The baseline's assumption: states of mixed-precision Adam (Rajbhandari et al. 2019, ZeRO, section 3.1)."""
EQUAL_RATIO = 1.05
"""Measured times whose ratio is below this count as equal: they are not ranked."""


@dataclass(frozen=True, kw_only=True)
class ScoredRow:
    """A row of a table: measured figures, prediction and baseline."""

    identity: str
    run: Run
    prediction: Prediction
    calibration: bool
    """Whether numbers of the device were fitted to the row; such rows are left out of every score."""

    @property
    def step_errors(self) -> tuple[float, float] | None:
        """Relative errors of the step time: prediction and baseline; None where no time was measured."""
        measured = self.run.step_s
        if not measured:
            return None
        return abs(self.prediction.step_s / measured - 1), abs(baseline_step_s(self.run) / measured - 1)

    @property
    def memory_errors(self) -> tuple[float, float] | None:
        """Relative errors of memory, in the metric that was measured: prediction and baseline; None if not measured."""
        measured = self.run.memory_bytes
        if not measured or self.run.memory_metric is None:
            return None
        predicted = getattr(self.prediction, f"{self.run.memory_metric}_bytes")
        return abs(predicted / measured - 1), abs(baseline_bytes(self.run) / measured - 1)


def baseline_step_s(run: Run) -> float:
    """Return 6 * parameters * tokens / (the peaks of all GPUs * one utilisation)."""
    cluster = cluster_of_run(run)
    peaks = sum(cluster.type_of(rank).peak_flop_per_s[run.software.precision] for rank in range(run.ranks))
    return 6 * run.shape.parameters * run.tokens / (peaks * UTILISATION)


def baseline_bytes(run: Run) -> float:
    """Return 16 bytes for each parameter that a rank stores (under ZeRO-3: its shard)."""
    shards = run.dp * run.software.context_ranks if run.method == "zero3" else 1
    return BYTES_PER_PARAMETER * run.shape.parameters / (run.tp * run.pp * shards)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Summary of the relative errors of several rows, with the baseline's errors for the same rows."""

    n: int
    mean: float
    median: float
    maximum: float
    baseline_mean: float
    baseline_median: float
    baseline_maximum: float


def errors_of(pairs: Sequence[tuple[float, float]]) -> Errors | None:
    """Return the summary of (own, baseline) errors; None for an empty sequence.

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
    """Number of pairs of plans for one training, and of those predicted in their measured order."""

    pairs: int
    agreeing: int


def agreement_of(rows: Iterable[ScoredRow]) -> Agreement:
    """Return in how many pairs of plans for the same training the faster one is predicted to be faster."""
    trainings: dict[object, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        if row.run.step_s:
            trainings[row.run.shape, row.run.gpu, row.run.ranks, row.run.tokens].append(row)
    pairs = agreeing = 0
    for plans in trainings.values():
        for one, other in combinations(plans, 2):
            measured = (one.run.step_s or 0.0, other.run.step_s or 0.0)
            if max(measured) < EQUAL_RATIO * min(measured):
                continue
            pairs += 1
            agreeing += (measured[0] < measured[1]) == (one.prediction.step_s < other.prediction.step_s)
    return Agreement(pairs=pairs, agreeing=agreeing)


@dataclass(frozen=True, kw_only=True)
class SourceScore:
    """The predictions of one source's rows, and which of these count for its score."""

    source: str
    rows: tuple[ScoredRow, ...]
    """All predicted rows, including those used for calibration."""
    skipped_rows: Mapping[str, str]
    """Reason for each row without a prediction, by id."""

    @property
    def skipped(self) -> dict[str, int]:
        """Number of rows without a prediction, by reason."""
        return dict(Counter(self.skipped_rows.values()))

    @property
    def tested(self) -> tuple[ScoredRow, ...]:
        """The rows that are scored: nothing was fitted to them."""
        return tuple(row for row in self.rows if not row.calibration)

    @property
    def calibration(self) -> tuple[str, ...]:
        """Ids of the rows that are left out because numbers were fitted to them."""
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
        return {metric: errors for metric, rows in pairs.items() if (errors := errors_of(rows))}

    @property
    def agreement(self) -> Agreement:
        """Agreement of predicted and measured order among plans for the same training."""
        return agreement_of(self.rows)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of the rows of some tables."""

    sources: tuple[SourceScore, ...]
    unreadable: tuple[str, ...] = ()
    """Error message of each file that could not be read."""
    faults: tuple[str, ...] = ()
    """Tracebacks of rows for which the project's own code failed."""
    interrupted: bool = False


def score(
    files: Sequence[Path],
    *,
    jobs: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, rows: None,
    only: Callable[[str], bool] = lambda _: True,
) -> Scores:
    """Return the scores of the rows of some tables, by source.

    `on_progress` is called with the number of finished rows and of all rows; `only` selects rows by id. Raises
    UserError where none of the files can be read; otherwise unreadable files are reported in the scores.
    """
    tables, unreadable = _read(files)
    records = [record for table in tables for record in table if only(record[0])]
    runs = [(identity, source, run) for identity, source, run in records if isinstance(run, Run)]
    done = 0

    def count(_: int) -> None:
        nonlocal done
        done += 1
        on_progress(done, len(runs))

    on_progress(0, len(runs))
    outcomes = iter(predict_runs([run for _, _, run in runs], jobs=jobs, on_done=count))
    scored: dict[str, list[ScoredRow]] = defaultdict(list)
    skipped: dict[str, dict[str, str]] = defaultdict(dict)
    faults: list[str] = []
    for identity, source, run in records:
        outcome = next(outcomes) if isinstance(run, Run) else NoPrediction(str(run))
        if isinstance(outcome, NoPrediction):
            reasons, number, unique = skipped[source], 1, identity
            while unique in reasons:
                number += 1
                unique = f"{identity} ({number})"
            reasons[unique] = outcome.reason
            faults += [outcome.fault] if outcome.fault else []
        elif isinstance(run, Run):
            calibration = run.calibration or identity in calibration_rows()
            row = ScoredRow(identity=identity, run=run, prediction=outcome, calibration=calibration)
            scored[source].append(row)
    return Scores(
        sources=tuple(
            SourceScore(source=source, rows=tuple(scored[source]), skipped_rows=skipped[source])
            for source in dict.fromkeys(source for _, source, _ in records)
        ),
        unreadable=unreadable,
        faults=tuple(faults),
        interrupted=any(INTERRUPTED in reasons.values() for reasons in skipped.values()),
    )


def _read(files: Sequence[Path]) -> tuple[list[list[Record]], tuple[str, ...]]:
    """Return the readable tables and the errors of the others; raise UserError where none can be read."""
    tables, unreadable = [], []
    for file in files:
        try:
            tables.append(read_table(file))
        except UserError as error:
            unreadable.append(str(error))
    if not tables:
        raise UserError("; ".join(unreadable))
    return tables, tuple(unreadable)


def errors_by_preset(scores: Scores) -> dict[str, PresetErrors]:
    """Return the errors of scored rows by device preset.

    A row counts if all its devices have one preset, whose rates it uses unchanged. Rows with steps of uneven lengths
    are left out: something else slowed their hosts down. The software of some rows has a time of its own for an
    operation on the host, or another workspace.
    """
    steps: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    steady = (source for source in scores.sources if not source.source.endswith(UNEVEN_STEPS))
    for row in (row for source in steady for row in source.tested):
        cluster = cluster_of_run(row.run)
        names = {preset_of(cluster.type_of(rank).source) for rank in range(row.run.ranks)}
        name = names.pop() if len(names) == 1 else None
        for by_name, pair in ((steps, row.step_errors), (memory, row.memory_errors)):
            if name is not None and pair is not None:
                by_name[name].append(pair[0])
    return {
        name: PresetErrors(step=_quantiles(errors), memory=_quantiles(memory[name]) if name in memory else None)
        for name, errors in sorted(steps.items())
    }


def _quantiles(errors: Sequence[float]) -> QuantityErrors:
    nine_in_ten = sorted(errors)[ceil(0.9 * len(errors)) - 1]
    return QuantityErrors(
        runs=len(errors), median_ratio=round(median(errors), 4), nine_in_ten_ratio=round(nine_in_ten, 4)
    )


def preset_errors_toml(errors: Mapping[str, PresetErrors]) -> str:
    """Return the errors by device preset as the file that `gssim run` quotes.

    >>> some = QuantityErrors(runs=3, median_ratio=0.1, nine_in_ten_ratio=0.2)
    >>> print(preset_errors_toml({"t4": PresetErrors(step=some)}).splitlines()[-1])
    step = { runs = 3, median_ratio = 0.1, nine_in_ten_ratio = 0.2 }
    """
    lines = [
        "# Errors of the predictions of published runs by preset of their devices: median, and what nine in ten do not",
        "# exceed. Scored by `python -m analysis literature TABLE... --by-device gssim/cluster/preset_errors.toml`.",
        "# `figures`: a digest of the preset's figures; the errors are those of no others.",
    ]
    for name, preset in errors.items():
        lines += ["", f"[{name}]", f'figures = "{digest_of_figures(name)}"']
        for quantity, summary in (("step", preset.step), ("memory", preset.memory)):
            if summary is not None:
                values = ", ".join(f"{key} = {value}" for key, value in asdict(summary).items())
                lines.append(f"{quantity} = {{ {values} }}")
    return "\n".join(lines) + "\n"


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr; yield the callback that takes the number of finished rows and of all rows."""
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=None)
        yield lambda done, rows: bar.update(task, completed=done, total=rows)


def as_json(scores: Scores) -> dict[str, Any]:
    """Return all scores, with the figures of every row, as plain data for JSON."""
    return {
        "baseline": {"utilisation_ratio": UTILISATION, "bytes_per_parameter": BYTES_PER_PARAMETER},
        "sources": [
            {
                "source": each.source,
                "step_time": asdict(each.step) if each.step else None,
                "memory": {metric: asdict(errors) for metric, errors in each.memory.items()},
                "rank_agreement": asdict(each.agreement),
                "calibration_rows": list(each.calibration),
                "skipped": each.skipped,
                "skipped_rows": dict(each.skipped_rows),
                "rows": [_row(row) for row in each.rows],
            }
            for each in scores.sources
        ],
        "refused_files": list(scores.unreadable),
        "interrupted": scores.interrupted,
    }


def _row(row: ScoredRow) -> dict[str, Any]:
    metric = row.run.memory_metric
    return {
        "id": row.identity,
        "calibration": row.calibration,
        "measured_step_time_s": row.run.step_s,
        "predicted_step_time_s": row.prediction.step_s,
        "memory_metric": metric,
        "measured_memory_bytes": row.run.memory_bytes,
        "predicted_memory_bytes": getattr(row.prediction, f"{metric}_bytes") if metric else None,
    }


def print_scores(scores: Scores) -> None:
    """Print a line for each source and quantity, then the calibration rows and the skipped rows with reasons."""
    console = plain_console(PIPE_WIDTH)
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("source", overflow="fold", min_width=40)
    table.add_column("figure")
    for header in (
        "n",
        "mean\n%",
        "median\n%",
        "max\n%",
        "baseline's\nmedian %",
        "pairs in\norder",
        "calibrated\non rows",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for source in scores.sources:
        for cells in _lines(source):
            table.add_row(*cells)
    console.print(table)
    console.print(
        f"baseline: 6 x parameters x tokens / (GPUs x peak x {UTILISATION}); {BYTES_PER_PARAMETER} bytes a parameter",
    )
    for source in scores.sources:
        if source.calibration:
            rows = ", ".join(source.calibration)
            console.print(f"calibrated on, and not scored, of {source.source}: {rows}")
    for source in scores.sources:
        for reason, count in sorted(source.skipped.items(), key=lambda item: -item[1]):
            console.print(f"skipped {count} of {source.source}: {reason}")


def _lines(each: SourceScore) -> list[tuple[str, ...]]:
    order = f"{each.agreement.agreeing}/{each.agreement.pairs}" if each.agreement.pairs else "-"
    lines = [_cells(each.source, "step time", each.step, order, str(len(each.calibration)))] if each.step else []
    lines += [_cells(each.source, f"memory, {metric}", errors, "", "") for metric, errors in each.memory.items()]
    return lines


def _cells(source: str, figure: str, errors: Errors, order: str, calibrated: str) -> tuple[str, ...]:
    shown = (errors.mean, errors.median, errors.maximum, errors.baseline_median)
    return (source, figure, str(errors.n), *(f"{100 * value:.1f}" for value in shown), order, calibrated)
