"""What is wrong with a network during a run, and what else goes on in it."""

from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from gssim.cluster.topology import Wiring
from gssim.errors import UserError
from gssim.units import BytesPerSecond, Seconds, spec


@spec
class LinkFault:
    """A link, in both directions, that is not what the cluster file says."""

    between: tuple[str, str]
    """Names of devices or switches."""
    bandwidth_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """What is left of its bandwidth; 0: it is down, and routes go round it."""
    added_latency_s: Seconds = 0.0
    """On top of its own."""


@spec
class Traffic:
    """A constant stream of others: it takes its rate of every link on its way, or its fair share where that is less."""

    between: tuple[str, str]
    """Sender, then receiver."""
    bytes_per_s: BytesPerSecond
    """What it would take if it had the way to itself."""


@spec
class Conditions:
    """The state of the network during the whole run."""

    faults: tuple[LinkFault, ...] = ()
    """Links that are worse than the cluster file says."""
    traffic: tuple[Traffic, ...] = ()
    """What others send over the same links."""

    def __bool__(self) -> bool:
        """Return whether anything is out of the ordinary."""
        return bool(self.faults or self.traffic)


def applied(wiring: Wiring, conditions: Conditions) -> Wiring:
    """Return the wiring under the conditions' faults; broken links are left out.

    Raises UserError where a fault names a link that there is not.
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
    """Return the nodes between which the other traffic goes; raises UserError for names that are nowhere."""
    return [
        (
            _node(wiring, stream.between[0], f"network.traffic[{number}].between"),
            _node(wiring, stream.between[1], f"network.traffic[{number}].between"),
        )
        for number, stream in enumerate(conditions.traffic)
    ]


def _node(wiring: Wiring, name: str, key: str) -> int:
    if name not in wiring.names:
        raise UserError(f"{key} = {name!r}: neither a device nor a switch of the cluster")
    return wiring.names.index(name)
