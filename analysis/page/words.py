"""Figures of the report for people."""

from gssim.units import human_bytes, human_seconds


def percent(ratio: float | None, *, signed: bool = True) -> str:
    """Return a ratio in percent; empty where it is not known.

    >>> percent(0.042), percent(0.042, signed=False), percent(None)
    ('+4.2 %', '4.2 %', '')
    """
    if ratio is None:
        return ""
    return (f"{100 * ratio:+.1f} %" if signed else f"{100 * ratio:.1f} %").replace("-", "\u2212")


def seconds(time_s: float | None) -> str:
    """Return a time; empty where it is not known."""
    return "" if time_s is None else human_seconds(time_s)


def size(size_bytes: float | None) -> str:
    """Return a size; empty where it is not known."""
    return "" if size_bytes is None else human_bytes(size_bytes)


def counted(n: int, noun: str) -> str:
    """Return a number of things.

    >>> counted(1, "point"), counted(1200, "point")
    ('1 point', '1,200 points')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def density(ratio: float | None) -> str:
    """Return a density; all, where no threshold decides.

    >>> density(None), density(0.0123)
    ('all', '1.2 %')
    """
    return "all" if ratio is None else f"{100 * ratio:.2g} %" if ratio < 0.995 else "100 %"
