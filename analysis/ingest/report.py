"""Prints an ingested Result in the columns of trace analyses: computation, exposed communication and copies, idle."""

from rich.table import Table

from gssim.result import EXPOSED_COPIES, Result
from gssim.terminal import PIPE_WIDTH, plain_console, rank_list
from gssim.units import human_bytes, human_seconds

WAITING = ("exposed_communication", EXPOSED_COPIES, "idle")


def print_ingested(result: Result) -> None:
    """Print step, time by rank, and collectives with transfer and lateness."""
    console = plain_console(PIPE_WIDTH)
    about = result.provenance.get("ingested", {})
    steps = about.get("steps", ())
    which = f", median of {len(steps)} steps ({steps[0]} to {steps[-1]})" if steps else ""
    console.print(f"{result.scenario['name']}: measured step {human_seconds(result.step_time_s)}{which}")
    table = Table("rank", "computation", "exposed communication", "exposed copies", "busy", "idle", "peak allocated")
    for entry in result.ranks:
        whole_s = sum(entry.phases_s.values())
        waits_s = [entry.phases_s.get(name, 0.0) for name in WAITING]
        peak = human_bytes(entry.peak_allocated_bytes) if entry.peak_allocated_bytes else "not recorded"
        times_s = (whole_s - sum(waits_s), *waits_s[:2], whole_s - waits_s[2], waits_s[2])
        table.add_row(rank_list(entry.ranks), *map(human_seconds, times_s), peak)
    console.print(table)
    if about.get("collectives"):
        table = Table("collective", "ranks", "count", "size", "transfer", "lateness", title="one step, mean")
        for entry in about["collectives"]:
            figures = (f"{entry['count']:.4g}", human_bytes(entry["bytes"]))
            times = (human_seconds(entry["transfer_s"]), human_seconds(entry["lateness_s"]))
            table.add_row(entry["kind"], rank_list(entry["group"]), *figures, *times)
        console.print(table)
