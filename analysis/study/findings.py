"""Findings of a study in sentences generated from its rows, also where thresholds gain nothing.

A difference is significant where its 95 % interval excludes zero (a ratio's: one); an insignificant one is not shown to
be zero. A variant is useful if it is significantly better than pushing nothing. No speed-up is stated without its
density, its change in loss, and the figures of the control that pushes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Column

from analysis.compare.report import console, figure_table, shown
from analysis.study.rows import Effect, Row
from analysis.study.study import HERE, Study
from gssim.units import human_bytes


@dataclass(frozen=True)
class Findings:
    """Sentences: the headline of each chart (without intervals), and all findings."""

    quality: str
    bytes: str
    time: str
    elsewhere: tuple[str, ...]
    """One sentence for each network that step times were predicted for."""
    density: str
    all: tuple[str, ...]


def findings_of(study: Study, rows: Sequence[Row]) -> Findings:
    """Return in sentences what the rows of a study show: the cost of thresholds in loss, and their gain in time.

    The rows must have those of the study's dense variant and of its control that pushes nothing.
    """
    dense = next(row for row in rows if row.name == study.dense)
    silent = next(row for row in rows if row.name == study.silent)
    tried = [row for row in rows if not row.control]
    quality, useless = _quality(tried, _cost), _no_better_than_silent(tried, silent)
    sent, density = _bytes(tried, dense), _drift(tried)
    here = _time(tried, silent)
    elsewhere = tuple(_predicted(tried, silent, name) for name in dense.predicted_s if name != HERE)
    controls = _controls(rows, study)
    sentences = [_verdict(tried, silent, _gain), quality, useless, sent, here, *elsewhere, density, *controls]
    return Findings(
        quality=_quality(tried, _mean_cost),
        bytes=sent,
        time=_verdict(tried, silent, _mean_gain),
        elsewhere=elsewhere,
        density=density,
        all=tuple(each for each in sentences if each),
    )


def loses(row: Row) -> bool:
    """Return whether a row's loss is significantly higher than dense's."""
    return row.loss_change is not None and row.loss_change.low > 0


def is_of_use(row: Row) -> bool:
    """Return whether a row's loss is significantly lower than that of pushing nothing."""
    return row.loss_over_silent is not None and row.loss_over_silent.high < 0


def is_faster(row: Row) -> bool:
    """Return whether a row trains significantly more samples per second than dense."""
    return row.speed_up is not None and row.speed_up.low > 1


def _quality(tried: Sequence[Row], words: Callable[[Row], str]) -> str:
    losing = [row for row in tried if loses(row)]
    same = [row for row in tried if not loses(row)]
    seeds = f"{tried[0].loss.n} seeds" if tried else ""
    if not losing:
        return f"No variant has a significantly higher loss ({seeds}): {_list(same, words)}"
    if not same:
        return f"Every variant raises the loss: {_list(losing, words)}"
    return f"The loss is significantly higher ({seeds}) with {_list(losing, words)}; not with {_list(same, words)}"


def _no_better_than_silent(tried: Sequence[Row], silent: Row) -> str:
    assert silent.loss_change is not None  # only dense has none
    nothing = f"pushing nothing changes the loss by {interval(silent.loss_change)}"
    useless = [row for row in tried if not is_of_use(row)]
    if not loses(silent):
        useful = [row for row in tried if is_of_use(row)]
        shown = f"only {_list(useful, _cost)} does better" if useful else "this study shows no benefit of pushing"
        return f"{nothing[0].upper()}{nothing[1:]}, which is not significant: {shown}"
    if not useless:
        return f"Every variant is better than that control: {nothing}"
    return f"Not significantly better than pushing nothing: {_list(useless, _density)} ({nothing})"


def _bytes(tried: Sequence[Row], dense: Row) -> str:
    less = [row for row in tried if row.sent_bytes < dense.sent_bytes]
    free = [row for row in less if not loses(row)]
    if not less:
        return "No variant sends fewer bytes than dense"
    if not free:
        return "Every variant that sends fewer bytes than dense loses by it"
    best = min(free, key=lambda row: row.sent_bytes)
    saved = 1 - best.sent_bytes / dense.sent_bytes
    return f"'{best.name}' sends {percentage(saved)} less than dense ({_cost(best)})"


def _time(tried: Sequence[Row], silent: Row) -> str:
    faster = [row for row in tried if is_faster(row)]
    timed = [row for row in tried if row.speed_up is not None]
    if not timed:
        return ""
    best = max(faster or timed, key=lambda row: row.speed_up.mean if row.speed_up else 0.0)
    none = "" if faster else "none is significantly faster than dense: "
    return f"Measured: {none}at most '{best.name}', {_gain(best)} (pushing nothing: {_gain(silent)})"


def _predicted(tried: Sequence[Row], silent: Row, network: str) -> str:
    best = _fastest(tried, network)
    at = best.predicted_speed_ups[network]
    free = [row for row in tried if not loses(row)]
    other = ""
    if loses(best) and free:
        second = _fastest(free, network)
        other = f"; without a significant loss {second.predicted_speed_ups[network]:.2f} times, '{second.name}'"
        other += f" ({_density(second)}, loss {_change(second)})"
    most = f"at most {at:.2f}" if at > 1 else f"none is faster, at best {at:.2f}"
    nothing = f"pushing nothing: {silent.predicted_speed_ups[network]:.2f} times, loss {_change(silent)}"
    return (
        f"Predicted for {network}: {most} times dense's speed, '{best.name}' ({_density(best)}, loss {_change(best)}; "
        f"{nothing}){other}"
    )


def _fastest(rows: Sequence[Row], network: str) -> Row:
    return max(rows, key=lambda row: row.predicted_speed_ups[network])


def _drift(tried: Sequence[Row]) -> str:
    """Return a sentence on the largest change of density during a run."""
    moving = [row for row in tried if row.densities and min(row.densities) > 0]
    if not moving:
        return ""
    row = max(moving, key=lambda row: max(row.densities) / min(row.densities))
    most, least = max(row.densities), min(row.densities)
    return (
        f"Density moves by a factor of up to {most / least:.3g} within a run "
        f"('{row.name}': {percentage(most)} to {percentage(least)})"
    )


def _controls(rows: Sequence[Row], study: Study) -> list[str]:
    others = [row for row in rows if row.control and row.name not in (study.dense, study.silent)]
    return [f"Control '{row.name}': loss {_change(row)}, {_density(row)}" for row in others]


def _verdict(tried: Sequence[Row], silent: Row, words: Callable[[Row], str]) -> str:
    control = f" (pushing nothing: {words(silent)})"
    gaining = [row for row in tried if is_faster(row) and not loses(row) and is_of_use(row)]
    if gaining:
        best = "Significantly faster than dense, without a significant loss, and better than pushing nothing"
        return f"{best}: {_list(gaining, words)}{control}"
    faster = [row for row in tried if is_faster(row)]
    if not faster:
        return "No gain: no variant is significantly faster than dense"
    why = "variants faster than dense lose by it, or are not significantly better than pushing nothing"
    return f"No gain: {why}: {_list(faster, words)}{control}"


# Words ---------------------------------------------------------------------------------------------------------------


def _list(rows: Sequence[Row], words: Callable[[Row], str]) -> str:
    return "; ".join(f"'{row.name}' ({words(row)})" for row in rows)


def _cost(row: Row) -> str:
    return f"{_change(row)} nats"


def _mean_cost(row: Row) -> str:
    return f"{row.loss_change.mean:+.3f}".replace("-", "\u2212") if row.loss_change else "0"


def _change(row: Row) -> str:
    return interval(row.loss_change) if row.loss_change else "dense's own"


def _density(row: Row) -> str:
    return "all pushed" if row.density is None else f"density {percentage(row.density)}"


def _gain(row: Row) -> str:
    assert row.speed_up is not None  # only dense has none
    e = row.speed_up
    times = f"{e.mean:.2f} times dense's speed [{e.low:.2f}, {e.high:.2f}]"
    return f"{times}, {_density(row)}, loss {_change(row)}"


def _mean_gain(row: Row) -> str:
    assert row.speed_up is not None  # only dense has none
    return f"{row.speed_up.mean:.2f} times dense's speed, {_density(row)}, loss {_mean_cost(row)}"


def interval(effect: Effect) -> str:
    """Return a difference and its interval as text.

    >>> interval(Effect(0.08, 0.05, 0.11, 5))
    '+0.080 [+0.050, +0.110]'
    """
    return f"{effect.mean:+.3f} [{effect.low:+.3f}, {effect.high:+.3f}]".replace("-", "\u2212")


def percentage(ratio: float) -> str:
    """Return a density in percent.

    >>> percentage(0.1234), percentage(0.000456), percentage(0.0), percentage(1.0)
    ('12 %', '0.046 %', '0 %', '100 %')
    """
    return f"{100 * ratio:.2g} %" if ratio < 0.995 else f"{100 * ratio:.0f} %"


# On a terminal --------------------------------------------------------------------------------------------------------


def print_study(rows: Sequence[Row], findings: tuple[str, ...]) -> None:
    """Print one line per variant, each speed-up with its density and loss, then the findings."""
    out = console()
    heads = (
        "density",
        "sent a\nstep",
        "held-out\nloss",
        "change from dense\n[95 % interval]",
        "speed\nmeasured",
        "\npredicted",
        "accuracy\n%",
    )
    table = figure_table([Column("variant", overflow="fold", min_width=16)], heads)
    for row in rows:
        table.add_row(*study_cells(row))
    out.print(table)
    for sentence in findings:
        out.print(f"{sentence}.")


def study_cells(row: Row) -> tuple[str, ...]:
    """Return the table cells of a variant; speeds are multiples of the dense variant's."""
    speed = row.speed_up
    return (
        f"{row.name} (control)" if row.control else row.name,
        "all" if row.density is None else percentage(row.density),
        shown(human_bytes(row.sent_bytes)),
        f"{row.loss.mean:.3f} \u00b1 {row.loss.sd:.3f}",
        "" if row.loss_change is None else interval(row.loss_change),
        "1" if speed is None else f"{speed.mean:.2f} [{speed.low:.2f}, {speed.high:.2f}]",
        f"{row.predicted_speed_ups[HERE]:.2f}",
        "" if row.accuracy is None else f"{100 * row.accuracy.mean:.1f} \u00b1 {100 * row.accuracy.sd:.1f}",
    )
