"""Directed links of a cluster as arrays, made from a topology or from a list of links."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from gssim.units import Floats, Ints


@dataclass(frozen=True, eq=False)
class Wiring:
    """The directed links of a cluster as arrays, one row each; at most one link from a node to another."""

    names: tuple[str, ...]
    """Names of the nodes: devices in rank order, then switches."""
    source: Ints
    """Index of the node where each link begins."""
    target: Ints
    """Index of the node where it ends."""
    bandwidth_bytes_per_s: Floats
    latency_s: Floats

    @property
    def nodes(self) -> int:
        """Number of devices and switches."""
        return len(self.names)

    @property
    def links(self) -> int:
        """Number of directed links."""
        return len(self.source)


@dataclass(frozen=True, eq=False)
class BuiltTopology:
    """A topology as devices, switches and links."""

    devices: tuple[tuple[str, str, str], ...]
    """Name, type and host of each device, in rank order."""
    switches: tuple[str, ...]
    wire: Callable[[], Wiring]
    """Function that creates the links, on demand: there may be a million, and callers may need only the devices."""
    tops: tuple[str, ...] = ()
    """The uppermost switches; a site's gateway is linked to these."""

    @cached_property
    def wiring(self) -> Wiring:
        """The links."""
        return self.wire()


@dataclass(frozen=True)
class Links:
    """Links in both directions between the nodes `a[i]` and `b[i]`."""

    a: Ints
    b: Ints
    bandwidth_bytes_per_s: Floats | float
    latency_s: float


class Connection(Protocol):
    """An explicit link, such as `gssim.cluster.cluster.Link`."""

    @property
    def between(self) -> tuple[str, str]: ...  # noqa: D102
    @property
    def bandwidth_bytes_per_s(self) -> float: ...  # noqa: D102
    @property
    def latency_s(self) -> float: ...  # noqa: D102
    @property
    def directed(self) -> bool: ...  # noqa: D102


def wiring_of_links(names: Sequence[str], links: Iterable[Connection]) -> Wiring:
    """Return explicit links as a wiring: in both directions unless directed, parallel links merged.

    Parallel links are merged into one, with the sum of their bandwidths and the latency of the fastest.
    """
    place = {name: i for i, name in enumerate(names)}
    edges: dict[tuple[int, int], tuple[float, float]] = {}
    for link in links:
        source, target = place[link.between[0]], place[link.between[1]]
        for edge in [(source, target)] if link.directed else [(source, target), (target, source)]:
            bandwidth, latency_s = edges.get(edge, (0.0, link.latency_s))
            edges[edge] = (bandwidth + link.bandwidth_bytes_per_s, min(latency_s, link.latency_s))
    ends = np.array(list(edges), dtype=np.int64).reshape(-1, 2)
    rates = np.array(list(edges.values()), dtype=np.float64).reshape(-1, 2)
    return _frozen(tuple(names), ends[:, 0], ends[:, 1], rates[:, 0], rates[:, 1])


def wired(names: tuple[str, ...], parts: Sequence[Links]) -> Wiring:
    """Return the wiring of links in both directions: for each part, all links one way, then the other."""

    def joined(arrays: list[Any], dtype: type) -> Any:
        return np.concatenate([np.empty(0, dtype), *arrays])

    def spread(values: Floats | float, links: int) -> Floats:
        return np.tile(np.broadcast_to(np.asarray(values, dtype=np.float64), (links,)), 2)

    return _frozen(
        names,
        joined([end for part in parts for end in (part.a, part.b)], np.int64),
        joined([end for part in parts for end in (part.b, part.a)], np.int64),
        joined([spread(part.bandwidth_bytes_per_s, len(part.a)) for part in parts], np.float64),
        joined([spread(part.latency_s, len(part.a)) for part in parts], np.float64),
    )


def _frozen(names: tuple[str, ...], *columns: Any) -> Wiring:
    arrays = [np.ascontiguousarray(column) for column in columns]
    for array in arrays:
        array.flags.writeable = False  # shared by all users of the cluster
    return Wiring(names, *arrays)
