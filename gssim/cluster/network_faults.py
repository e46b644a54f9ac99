"""Network conditions of a run: degraded or broken links, and background traffic."""

import difflib
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from gssim.cluster.topology import Wiring
from gssim.errors import UserError
from gssim.units import BytesPerSecond, Seconds, spec


@spec
class LinkFault:
    """A degraded link, in both directions."""

    between: tuple[str, str]
    """Names of devices or switches."""
    bandwidth_ratio: Annotated[float, Field(ge=0, le=1, strict=True)] = 1.0
    """Remaining fraction of the link's bandwidth; 0: the link is down, and routes avoid it."""
    added_latency_s: Seconds = 0.0
    """Latency that is added to the link's own."""


@spec
class Traffic:
    """A constant background stream. It takes its rate on every link of its route, or its fair share if that is less."""

    between: tuple[str, str]
    """Sender, then receiver."""
    bytes_per_s: BytesPerSecond
    """The stream's rate on idle links."""


@spec
class Conditions:
    """The state of the network during the whole run."""

    faults: tuple[LinkFault, ...] = ()
    """Degraded links."""
    traffic: tuple[Traffic, ...] = ()
    """Background traffic on the same links."""

    def __bool__(self) -> bool:
        return bool(self.faults or self.traffic)


def applied(wiring: Wiring, conditions: Conditions) -> Wiring:
    """Return the wiring with the conditions' faults applied; links that are down are left out.

    Raises UserError if a fault names a link that does not exist.
    """
    bandwidth, latency = wiring.bandwidth_bytes_per_s.copy(), wiring.latency_s.copy()
    for number, fault in enumerate(conditions.faults):
        ends = [_node(wiring, name, f"network.faults[{number}].between") for name in fault.between]
        hit = np.isin(wiring.source, ends) & np.isin(wiring.target, ends)
        if not hit.any():
            raise UserError(f"network.faults[{number}].between = {list(fault.between)}: there is no such link")
        bandwidth[hit] *= fault.bandwidth_ratio
        latency[hit] += fault.added_latency_s
    up = bandwidth > 0
    return replace(
        wiring,
        source=wiring.source[up],
        target=wiring.target[up],
        bandwidth_bytes_per_s=bandwidth[up],
        latency_s=latency[up],
    )


def ends_of(wiring: Wiring, conditions: Conditions) -> list[tuple[int, int]]:
    """Return the (source, target) nodes of the background traffic; raises UserError for unknown names."""
    return [
        (_node(wiring, sender, key), _node(wiring, receiver, key))
        for number, stream in enumerate(conditions.traffic)
        for key, (sender, receiver) in [(f"network.traffic[{number}].between", stream.between)]
    ]


MOST_NAMES = 8
"""Largest number of nodes whose names messages list in full."""


def _node(wiring: Wiring, name: str, key: str) -> int:
    if name not in wiring.names:
        shown = [*wiring.names[:MOST_NAMES], "..."] if len(wiring.names) > MOST_NAMES else wiring.names
        some = ", ".join(shown)
        close = difflib.get_close_matches(name, wiring.names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"{key} = {name!r}: neither a device nor a switch; {hint}there are {some}")
    return wiring.names.index(name)
