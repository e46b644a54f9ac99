"""Reader of published tables of training runs; the kind of a table is recognised by its columns."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.literature.runs import Run, SkippedError, UnscoredError
from analysis.literature.tables.frameworks import llm_foundry, megatron_tests, simumax
from analysis.literature.tables.many_sources import many_sources
from analysis.literature.tables.nemo import nemo
from analysis.literature.tables.periodic import periodic
from analysis.literature.tables.planners import amp, sailor, vtrain
from gssim.errors import UserError
from gssim.execution.files import read_rows

Row = Mapping[str, str]
Record = tuple[str, str, Run | SkippedError]
"""Id, source and run of a row; instead of the run, the error that says why the row is skipped."""


@dataclass(frozen=True)
class Kind:
    """A kind of table: the columns that identify it, and the function that reads a row."""

    name: str
    columns: frozenset[str]
    read: Callable[[Row, str], Run] | None = None
    read_in_table: Callable[[Row, str, Sequence[Row]], Run] | None = None
    """The same where a row needs others of its table."""

    def run_of(self, row: Row, identity: str, table: Sequence[Row]) -> Run:
        """Return the run of a row; raise SkippedError where there is none."""
        if self.read_in_table is not None:
            return self.read_in_table(row, identity, table)
        assert self.read is not None
        return self.read(row, identity)


KINDS = (
    Kind("runs of many sources", frozenset({"id", "source", "gpu", "n_gpus", "model", "iter_time_s"}), many_sources),
    Kind("vTrain", frozenset({"# GPUs", "hidden size", "tensor parallelism", "iteration time (ms)"}), vtrain),
    Kind("Sailor's validation", frozenset({"layers_per_stage", "stages", "mbs", "gbs", "measured_iter_s"}), sailor),
    Kind("Megatron's tests", frozenset({"test_case", "platform", "iter_time_median_s", "hidden-size"}), megatron_tests),
    Kind("AMP's trials", frozenset({"experiment", "partition", "micro_batch", "measured_iter_s"}), amp),
    Kind(
        "DiLoCo measured",
        frozenset({"run", "algorithm", "H", "world_size", "bandwidth", "sync_ms_median", "compute_ms_median"}),
        read_in_table=periodic,
    ),
    Kind("SimuMax's B200", frozenset({"case", "iter_time_ms", "peak_allocated_gib_max", "micro_batches"}), simumax),
    Kind("NVIDIA's NeMo", frozenset({"release", "model", "tuning", "gbs", "mbs", "vp", "tokens_per_s_per_gpu"}), nemo),
    Kind("LLM Foundry", frozenset({"Model", "SeqLen (T)", "# GPUs", "GPU", "Throughput (T/s)"}), llm_foundry),
)


def read_table(path: Path) -> list[Record]:
    """Return (id, source, run) of every row of a table; instead of the run of a skipped row, the reason.

    Raises UserError where the file is missing, or its columns match no known kind of table.
    """
    names, rows = read_rows(path)
    columns = set(names)
    kind = next((each for each in KINDS if each.columns <= columns), None)
    if kind is None:
        nearest = max(KINDS, key=lambda each: len(each.columns & columns))
        missing = ", ".join(sorted(nearest.columns - columns))
        known = ", ".join(each.name for each in KINDS)
        raise UserError(
            f"{path}: unknown kind of table: its columns match no table of runs ({known}); "
            f"nearest is {nearest.name}, which also needs {missing}"
        )
    return list(_read(rows, kind, path.stem))


def _read(rows: list[dict[str, str]], kind: Kind, name: str) -> Iterator[Record]:
    table = [
        defaultdict(str, {key: (value or "").strip() for key, value in row.items() if key is not None}) for row in rows
    ]
    for number, filled in enumerate(table, start=1):
        identity = filled.get("id") or f"{name} row {number}"
        try:
            run = kind.run_of(filled, identity, table)
            if run.step_s is None and run.memory_bytes is None:
                raise UnscoredError("the row has neither a time nor a memory", run)
            yield run.identity, run.source, run
        except SkippedError as reason:
            yield identity, (filled.get("source") if kind is KINDS[0] else kind.name) or name, reason
