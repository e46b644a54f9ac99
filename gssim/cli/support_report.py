"""Tables of methods, and of the features that they combine with, for the terminal."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gssim.plan import Method
from gssim.scenario import Support
from gssim.terminal import plain_console

WIDTH = 160


def print_methods(methods: Iterable[Method]) -> None:
    """Print each method with its policies and what executes it in a real run."""
    table = Table("method", "parameters", "gradients", "optimizer state", "real run", "description", box=SIMPLE_HEAD)
    for method in methods:
        policies = (method.parameters, method.gradients, method.optimizer_state)
        table.add_row(method.name, *policies, method.real, method.description)
    console = plain_console(WIDTH)
    console.print(table)
    console.print("`gssim support SCENARIO` checks every combination on its cluster and model.", highlight=False)


def print_support(combinations: Sequence[Support]) -> None:
    """Print which features combine with which methods: a row a feature, a column a method."""
    methods = list(dict.fromkeys(entry.method for entry in combinations))
    table = Table("with", *methods, box=SIMPLE_HEAD)
    cells = {(entry.feature, entry.method): _cell(entry) for entry in combinations}
    for feature in dict.fromkeys(entry.feature for entry in combinations):
        table.add_row(feature, *(cells[feature, method] for method in methods))
    console = plain_console(WIDTH)
    console.print(table)
    console.print("yes: predicted and real; sim: predicted only; -: refused. Reasons: --json", highlight=False)


def _cell(entry: Support) -> str:
    return "-" if entry.simulated else "sim" if entry.real else "yes"
