"""A Result for people, on the console."""

from rich.console import Console
from rich.table import Table

from gssim.result import Result
from gssim.units import human_bytes, human_seconds


def print_result(result: Result) -> None:
    """Print a Result for people."""
    console = Console()
    scenario = result.scenario
    console.print(f"[bold]{scenario['name']}[/bold]: {scenario['question']}", highlight=False)
    word = "predicted" if result.source == "simulated" else "measured"
    density = f", push density {result.density.push:.3%}" if result.density.push is not None else ""
    console.print(
        f"{word} step {human_seconds(result.step_time_s)}, {result.throughput_samples_per_s:.4g} samples/s{density}",
        highlight=False,
    )
    if result.does_not_fit is not None:
        fit = result.does_not_fit
        console.print(
            f"does not fit: rank {fit.rank} exceeds its memory by {human_bytes(fit.excess_bytes)}; "
            f"largest at the peak: {fit.category}",
            style="bold",
        )
    console.print(_rank_table(result))
    console.print(_collective_table(result))


def _rank_table(result: Result) -> Table:
    table = Table("ranks", "device", "peak allocated", *(name.replace("_", " ") for name in result.phases_s))
    for entry in result.ranks:
        table.add_row(
            ", ".join(map(str, entry.ranks)),
            entry.device,
            human_bytes(entry.peak_allocated_bytes),
            *(human_seconds(value) for value in entry.phases_s.values()),
        )
    return table


def _collective_table(result: Result) -> Table:
    table = Table("collective", "ranks", "count", "size", "carried", title="one step")
    for entry in result.collectives:
        carried = "all" if entry.payload_bytes is None else human_bytes(entry.payload_bytes)
        group = ", ".join(map(str, entry.group[:8])) + (" ..." if len(entry.group) > 8 else "")
        table.add_row(entry.kind, group, str(entry.count), human_bytes(entry.bytes), carried)
    return table
