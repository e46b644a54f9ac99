"""The figures that the project's two starting texts print, each beside ours: what is physically consistent.

`Optimizing Deep Learning Training Through Gradient Sharding` states a table of memory, time and accuracy; `Efficient
distributed training in deep learning` states what some models cost to train.
"""

from collections.abc import Callable
from pathlib import Path

from analysis.literature.headlines import bert, gpt3, megatron, table1
from analysis.literature.headlines.line import Line, Simulations

__all__ = ["Line", "all_lines"]

PARTS: tuple[Callable[[Simulations], list[Line]], ...] = (table1.lines, bert.lines, gpt3.lines, megatron.lines)


def all_lines(scenarios: Path, *, slow: bool = False) -> list[Line]:
    """Return a line for every figure, simulated with the scenarios of that folder; UserError where one is missing.

    `slow`: also those that take minutes.
    """
    simulations = Simulations(scenarios)
    return [line for part in PARTS for line in part(simulations)] + (megatron.slow_lines() if slow else [])
