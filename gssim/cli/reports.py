"""Reports on the terminal: a search's best plans, front and comparisons; methods, and the features that they allow."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tomli
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from gssim import interop
from gssim.errors import one_line
from gssim.plan.methods import Method
from gssim.plan.plan import in_words
from gssim.planner import PLAN, Found, Outcome, memory_lack, reason
from gssim.result import bound_by
from gssim.scenario.support import Support
from gssim.terminal import PIPE_WIDTH, expected_errors_of, fits_width, folding, plain_console
from gssim.units import human_bytes, human_seconds, signed_percent

UNITS = {"cost": ("USD/step", 1.0), "energy": ("kJ/step", 1e-3)}
"""Unit of the column that an objective adds, and the factor that converts to this unit, by objective."""


def print_found(found: Found, question: str, run: Sequence[str]) -> None:
    """Print the best plans and their bottlenecks, the front of time and memory, and comparisons.

    `run`: the words of the command that predicts the scenario.
    """
    console = plain_console(PIPE_WIDTH)
    if question:
        console.print(one_line(question), style="bold")
    left = f"; ended with {found.counts.left} of them still open" if found.counts.left else ""
    console.print(f"{found.plans} plans{left}")  # not the simulated ones, as many as time allows
    if not found.best:
        for line in nothing_fits(found):
            console.print(line)
        return
    console.print(_plan_table(found, found.best, f"best {len(found.best)} by {found.space.objective}"))
    for rank, each in enumerate(found.best, start=1):
        console.print(f"{rank}: {reason(each.result)}")
    for line in expected_errors_of(found.best[0].result):
        console.print(line)
    console.print(_plan_table(found, found.front, "front of time and memory"))
    for name, rival in found.comparisons(found.best[0]):
        console.print(f"{name}: {_compared(rival)}")
    if found.space.study is not None:
        caveat = f"thresholds: what they cost in loss is what {found.space.study} says of its own model and training"
        console.print(caveat)
    for line in left_out(found):
        console.print(line)
    first = shlex.join([*run, "--set", found.best[0].candidate.override])
    console.print(f"the first: {first}", soft_wrap=True)


def nothing_fits(found: Found) -> list[str]:
    """Return lines for a search in which no plan fits: the plan that needs least memory, and changes that help."""
    if found.nearest is None:
        return ["no plan so far that fits" if found.counts.left else "no plan of the space can run", *left_out(found)]
    candidate, result = found.nearest
    lines = ["no plan of the space fits", f"the nearest: {in_words(candidate.plan)}: {memory_lack(result)}"]
    for remedy in result.remedies:
        margin = remedy.margin.margin_bytes
        then = f"{human_bytes(margin)} to spare" if remedy.fits else f"{human_bytes(-margin)} too much"
        lines.append(f"  with {remedy.change}: {then}")
    return [*lines, *left_out(found)]


SHOWN_REASONS = 12
"""Largest number of reasons for refused plans that is shown."""


def left_out(found: Found) -> list[str]:
    """Return lines on refused plans, by reason, the largest groups first."""
    lines = found.counts.left_out.lines()
    more = len(lines) - SHOWN_REASONS
    return [*lines[:SHOWN_REASONS], *([f"left out for {more} other reasons: see --json"] if more > 0 else [])]


def _plan_table(found: Found, outcomes: Sequence[Outcome], title: str) -> Table:
    more = UNITS.get(found.space.objective)
    table = folding(("", "plan", "step", *([more[0]] if more else []), "fullest", "left", "bound by"), title=title)
    for number, outcome in enumerate(outcomes, start=1):
        left = "" if outcome.result.margin is None else human_bytes(outcome.result.margin.margin_bytes)
        table.add_row(
            str(number),
            in_words(outcome.candidate.plan),
            human_seconds(outcome.result.step_time_s),
            *([f"{outcome.objective * more[1]:.4g}"] if more else []),
            f"{outcome.full_ratio:.1%}",
            left,
            bound_by(outcome.result),
        )
    return table


def _compared(rival: Mapping[str, Any]) -> str:
    """Return how much worse a plan is than the best, and why."""
    if rival.get("step_time_s") is None:
        return str(rival["why"])
    plan = in_words(PLAN.validate_python(tomli.loads(rival["plan"])["plan"]))
    difference = "" if rival["more_ratio"] is None else f", {signed_percent(rival['more_ratio'])}%"
    return f"{human_seconds(rival['step_time_s'])}{difference}: {plan}\n  {rival['why']}"


WIDTH = 160
SUPPORT_WIDTH = 200
"""Width of output into a file or pipe: all methods fit side by side."""


def print_methods(methods: Iterable[Method]) -> None:
    """Print each method with its policies and what executes it in a real run."""
    table = Table("method", "parameters", "gradients", "optimizer state", "real run", "description", box=SIMPLE_HEAD)
    for method in methods:
        policies = (method.parameters, method.gradients, method.optimizer_state)
        table.add_row(method.name, *policies, method.real, method.description)
    console = plain_console(WIDTH)
    console.print(table)
    console.print("`gssim support SCENARIO` checks every combination on its cluster and model.")
    console.print(f"`gssim import` reads configurations of {', '.join(interop.FORMATS)}; `gssim export` writes")
    for program, (names, _) in interop.EXPORTS.items():
        console.print(f"  {program}: {', '.join(names)}")


def print_support(combinations: Sequence[Support]) -> None:
    """Print which features combine with which methods: a row a feature, a column a method."""
    words = {(True, True): "yes", (True, False): "sim", (False, True): "real", (False, False): "-"}
    cells = {
        (entry.feature, entry.method): words[entry.simulated is None, entry.real is None] for entry in combinations
    }
    features = list(dict.fromkeys(entry.feature for entry in combinations))
    methods = list(dict.fromkeys(entry.method for entry in combinations))
    console = plain_console(SUPPORT_WIDTH)

    def table_of(some: Sequence[str]) -> Table:
        table = Table(Column("with", no_wrap=True), *some, box=SIMPLE_HEAD, padding=0, collapse_padding=True)
        for feature in features:
            table.add_row(feature, *(cells[feature, method] for method in some))
        return table

    while methods:  # as many side by side as there is room for their names
        count = len(methods)
        while not fits_width(console, table := table_of(methods[:count])) and count > 1:
            count -= 1
        console.print(table)
        methods = methods[count:]
    console.print("yes: predicted and real; sim: predicted only; real: run only; -: refused. Reasons: --json")
