"""The bottleneck of a step: the device that sets the pace, or the busiest link."""

from gssim.result.result import WAITING_PHASES, LinkUse, RankClass, Result

COMPUTES_RATIO = 0.5
"""If some rank computes for at least this fraction of the step, the plan counts as compute-bound."""
SHOWN_COMPRESSION_RATIO = 0.1
"""Smallest fraction of a step for which the time to select, encode and decode gradients is shown separately."""


def pace(result: Result) -> str:
    """Return the bottleneck of a step, in one line.

    The rank that waits least sets the pace. If even that rank waits for most of the step, links are the bottleneck, and
    the busiest one is named first.
    """
    first = pace_setter(result)
    works = 1 - waiting_ratio(first)
    link = busiest_link(result)
    compresses = first.phases_s["compression"] / (sum(first.phases_s.values()) or 1.0)
    of_it = f" ({compresses:.0%} to compress)" if compresses >= SHOWN_COMPRESSION_RATIO else ""
    parts = [f"{first.device} (rank {first.ranks[0]}) computes for {works:.0%} of the step{of_it}"]
    if link is not None:
        parts.append(f"{link.name} is used for {link.utilisation_ratio:.0%}")
    if works < COMPUTES_RATIO:
        parts.reverse()
    waits = max(result.ranks, key=waiting_ratio)
    if waiting_ratio(waits) > waiting_ratio(first) + 0.05:
        parts.append(f"{waits.device} (rank {waits.ranks[0]}) waits for {waiting_ratio(waits):.0%}")
    return "; ".join(parts)


def bound_by(result: Result) -> str:
    """Return the bottleneck of a step in a word or two: a device's compute, or a link."""
    first, link = pace_setter(result), busiest_link(result)
    if link is None or waiting_ratio(first) <= 1 - COMPUTES_RATIO:
        return f"compute of {first.device}"
    return f"link {link.name}"


def pace_setter(result: Result) -> RankClass:
    """Return the class of ranks that wait least."""
    return min(result.ranks, key=waiting_ratio)


def waiting_ratio(ranks: RankClass) -> float:
    """Return the fraction of a step in which ranks wait, for others or for communication."""
    whole_s = sum(ranks.phases_s.values())
    return sum(ranks.phases_s[name] for name in WAITING_PHASES) / whole_s if whole_s else 0.0


def busiest_link(result: Result) -> LinkUse | None:
    """Return the link with the highest utilisation, of equal ones the first by name; None without communication."""
    used = (link for link in result.links if link.bytes)
    return min(used, key=lambda link: (-link.utilisation_ratio, link.name), default=None)
