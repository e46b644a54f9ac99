"""Tables of published figures, each kind known by its columns."""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.published.runs import Run, SkippedError
from analysis.published.tables.many import many_sources
from analysis.published.tables.sailor import sailor
from analysis.published.tables.vtrain import vtrain
from gssim.units import UserError

Record = Mapping[str, str]


@dataclass(frozen=True)
class Kind:
    """A kind of table: the columns that tell it, and how a row of it is read."""

    columns: frozenset[str]
    read: Callable[[Record, str], Run]


KINDS = (
    Kind(frozenset({"id", "source", "gpu", "n_gpus", "model", "layers", "tp", "pp", "iter_time_s"}), many_sources),
    Kind(frozenset({"# GPUs", "hidden size", "tensor parallelism", "iteration time (ms)"}), vtrain),
    Kind(frozenset({"layers_per_stage", "stages", "mbs", "gbs", "measured_iter_s"}), sailor),
)


def read_table(path: Path) -> list[tuple[str, str, Run | SkippedError]]:
    """Return (id, source, run) of every row of a table; instead of a run, why it cannot be told.

    Raises UserError where there is no such file, or its columns are of no kind that is known.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            records = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    columns = set(records[0]) if records else set()
    kind = next((each for each in KINDS if each.columns <= columns), None)
    if kind is None:
        known = "; ".join(", ".join(sorted(each.columns)) for each in KINDS)
        raise UserError(f"{path}: no such columns are known; allowed: {known}")
    return list(_read(records, kind, path.stem))


def _read(records: list[dict[str, str]], kind: Kind, name: str) -> Iterator[tuple[str, str, Run | SkippedError]]:
    for number, record in enumerate(records, start=1):
        filled = defaultdict(str, {key: (value or "").strip() for key, value in record.items() if key is not None})
        identity = filled.get("id") or f"{name} row {number}"
        try:
            run = kind.read(filled, identity)
            yield identity, run.source, run
        except SkippedError as reason:
            yield identity, filled.get("source") or name, reason
