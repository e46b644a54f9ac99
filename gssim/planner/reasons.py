"""Explains a plan's step time and memory in words: what bounds it, the tightest memory, and how it compares."""

from collections import Counter

from gssim.result import Result, busiest_link, pace, pace_setter, waiting_ratio
from gssim.units import human_bytes, human_seconds


def reason(result: Result) -> str:
    """Return the bottleneck of a plan and its tightest memory, in one line."""
    return "; ".join(part for part in (pace(result), memory_reason(result)) if part)


def why_worse(best: Result, other: Result) -> str:
    """Return in one line why another plan is worse than the best: the additional time of its slowest rank.

    The slowest rank is the one that waits least in the other plan; it is compared with the same rank in the best plan.
    """
    if other.does_not_fit is not None:
        return memory_lack(other)
    if other.step_time_s <= best.step_time_s:
        return f"it takes {_used(other)} for {human_seconds(other.step_time_s)}; the first takes {_used(best)}"
    pace = pace_setter(other)
    name = f"{pace.device} (rank {pace.ranks[0]})"
    same = next((each for each in best.ranks if pace.ranks[0] in each.ranks), None)
    works_s = (1 - waiting_ratio(pace)) * other.step_time_s
    if same is None:
        return f"{name} computes for {human_seconds(works_s)}; the first does without it"
    worked_s = (1 - waiting_ratio(same)) * best.step_time_s
    waits_s, waited_s = other.step_time_s - works_s, best.step_time_s - worked_s
    if works_s - worked_s >= waits_s - waited_s:
        computes = f"{name} computes for {human_seconds(works_s)}, in the first for {human_seconds(worked_s)}"
        return f"{computes} ({pace.batch_share:.1%} of the batch, in the first {same.batch_share:.1%})"
    waits = f"{name} waits for {human_seconds(waits_s)}, in the first for {human_seconds(waited_s)}"
    link = busiest_link(other)
    if link is None:
        return waits
    carried = sum(each.bytes for each in best.links if each.name == link.name)
    return f"{waits}; {link.name} carries {human_bytes(link.bytes)}, in the first {human_bytes(carried)}"


def memory_lack(result: Result) -> str:
    """Return where a plan does not fit, and which category of memory is the largest there; or that it fits."""
    fit = result.does_not_fit
    if fit is None:
        return "it fits"
    device = next(each.device for each in result.ranks if fit.rank in each.ranks)
    lacks, category = human_bytes(fit.excess_bytes), fit.category.replace("_", " ")
    device = f"the host of {device}" if fit.memory == "host" else device
    return f"does not fit: {device} (rank {fit.rank}) lacks {lacks}, mostly for {category}"


def _used(result: Result) -> str:
    """Return how many devices of each type a plan uses."""
    counts = Counter[str]()
    for each in result.ranks:
        counts[each.device] += each.count
    return " + ".join(f"{count} {name}" for name, count in counts.items())


def memory_reason(result: Result) -> str:
    """Return the free memory of the tightest device, and its largest category."""
    least = result.margin
    if least is None:
        return ""
    device = next(each.device for each in result.ranks if least.rank in each.ranks)
    left = f"{human_bytes(least.margin_bytes)} of {human_bytes(least.memory_bytes)} left"
    return f"memory: {device} (rank {least.rank}) has {left}, mostly {least.category.replace('_', ' ')}"


def full_ratio(result: Result, memory_bytes: dict[str, float]) -> float:
    """Return the fraction of memory used on the fullest device; `memory_bytes`: by device type."""
    return max(
        (max(each.peak_allocated_bytes, each.peak_reserved_bytes or 0.0) + sum(each.outside_bytes.values()))
        / memory_bytes[each.device]
        for each in result.ranks
    )
