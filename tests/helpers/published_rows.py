"""Rows of published tables, as `analysis literature` reads them."""

import csv
from collections.abc import Mapping
from pathlib import Path

from analysis.literature.runs import Run
from analysis.literature.tables.reading import read_table


def fields(text: str) -> dict[str, str]:
    """Return the fields of a row that are written as `name=value | name=value`."""
    return dict(field.split("=", 1) for field in text.split(" | "))


MEGATRON_ROW = fields(
    "platform=dev_dgx_h100 | nodes=1 | gpus_per_node=8 | n_gpus_source=recipe | iter_time_median_s=0.1 | "
    "mem_max_allocated_bytes=4.6e9 | num-layers=4 | hidden-size=256 | num-attention-heads=8 | seq-length=128 | "
    "micro-batch-size=4 | global-batch-size=32 | tensor-model-parallel-size=2 | bf16=True | vocab-size=1000"
)
"""A small model on one server; a test adds its family, its name and what it is about."""


def run_of_row(folder: Path, row: Mapping[str, str]) -> Run:
    """Return the run that a table of one row describes; `folder`: for the table."""
    path = folder / "t.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([list(row), list(row.values())])
    ((_, _, run),) = read_table(path)
    assert isinstance(run, Run), run
    return run
