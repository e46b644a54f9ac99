"""The members of a collective: ranks of a group with their hosts, torus shape and rings inside hosts."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from gssim.cache import MOST_LARGE, Recent
from gssim.collectives.stage import Hops
from gssim.units import Ints, distinct

cached_hops = lru_cache(maxsize=512)
"""Cache of the hops of recent simulations' groups."""


@dataclass(frozen=True, eq=False)
class Members:
    """A group of ranks and their placement. Compared by identity: one object for each group."""

    ranks: Ints
    hosts: Ints
    """Host of each member, as a number."""
    shape: tuple[int, ...] = ()
    """Shape of the torus that the group fills in row-major order; empty: none."""
    multirail: bool = False
    """Rings enter and leave a host by each of its devices in turn (NCCL's channels), not by one only."""
    inside: Hops | None = None
    """Rings inside the hosts, between positions, weights summing to 1 for each sender, where the links between devices
    favour some orders. Absent: in order of rank."""

    kept: Recent = field(default_factory=lambda: Recent(MOST_LARGE), repr=False)
    """Cache of the hops of the latest uneven exchanges."""

    @property
    def count(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @cached_property
    def blocks(self) -> tuple[Ints, Ints]:
        """First position and number of the members of each host, in order; one block each where hosts are mixed."""
        starts = np.flatnonzero(np.r_[True, self.hosts[1:] != self.hosts[:-1]])
        if len(starts) > len(distinct(self.hosts)):
            starts = np.arange(self.count)
        return starts, np.diff(np.r_[starts, self.count])
