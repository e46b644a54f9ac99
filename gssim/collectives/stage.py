"""Stages of a collective: sets of hops between the members of a group, in flight at the same time."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from gssim.execution.cache import MOST_LARGE, Recent
from gssim.units import Floats, Ints, distinct


@dataclass(frozen=True, eq=False)
class Hops:
    """Messages as arrays of senders, receivers and relative bytes. Compared by identity."""

    source: Ints
    """Rank that sends."""
    target: Ints
    weight: Floats
    """Bytes carried per byte of the stage's size."""
    group: Ints | None = None
    """For each hop, the index of its group, if several groups run a collective at once, each at its own speed."""

    @property
    def count(self) -> int:
        """Number of hops."""
        return len(self.source)

    @property
    def elements(self) -> int:
        """Number of stored values."""
        return len(self.source)

    @cached_property
    def are_mutual(self) -> bool:
        """Whether two ranks send to each other, and nobody else sends.

        >>> Hops.of([(0, 1, 1.0), (1, 0, 1.0)]).are_mutual, Hops.of([(0, 1, 1.0), (1, 2, 1.0)]).are_mutual
        (True, False)
        """
        return len(self.source) == 2 and bool((self.source == self.target[::-1]).all())

    @cached_property
    def largest_weight(self) -> float:
        """Bytes that the largest of the messages carries per byte of the stage's size."""
        return float(self.weight.max())

    def carried_by_rank(self, ranks: int) -> tuple[Floats, Floats]:
        """Return the bytes that each rank sends and receives, per byte of the stage's size."""
        sent = summed(self.source, self.weight, ranks)
        return sent, summed(self.target, self.weight, ranks)

    def in_every(self, groups: Ints) -> "Hops":
        """Return the hops, given for the first of several groups (rows of ranks), repeated for all of the groups.

        >>> Hops.of([(4, 6, 1.0)]).in_every(np.array([[4, 6], [5, 7]])).target.tolist()
        [6, 7]
        """
        order = np.argsort(groups[0])
        source = order[np.searchsorted(groups[0], self.source, sorter=order)]
        target = order[np.searchsorted(groups[0], self.target, sorter=order)]
        count, hops = len(groups), len(self.source)
        return Hops(
            groups[:, source].ravel(),
            groups[:, target].ravel(),
            np.tile(self.weight, count),
            np.repeat(np.arange(count), hops),
        )

    @cached_property
    def receivers(self) -> int:
        """Number of ranks that receive.

        >>> Hops.of([(0, 1, 1.0), (2, 1, 1.0)]).receivers
        1
        """
        return len(distinct(self.target))

    @cached_property
    def most_handled(self) -> float:
        """Bytes that the busiest rank sends and receives, per byte of the stage's size.

        >>> Hops.of([(0, 1, 1.0), (0, 2, 1.0), (2, 0, 0.5)]).most_handled
        2.5
        """
        if not len(self.source):
            return 0.0
        ranks = int(max(self.source.max(), self.target.max())) + 1
        handled = summed(self.source, self.weight, ranks) + summed(self.target, self.weight, ranks)
        return float(handled.max())

    @classmethod
    def of(cls, pairs: list[tuple[int, int, float]]) -> "Hops":
        """Return hops from (source, target, weight)."""
        if not pairs:
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
        source, target, weight = zip(*pairs, strict=True)
        return cls(np.array(source, np.int64), np.array(target, np.int64), np.array(weight, float))


@dataclass(frozen=True, eq=False)
class HostCopies(Hops):
    """Copies between ranks and the memory of their hosts; one end of each copy is not a rank."""

    memory: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """For every rank, the node of its host's memory."""
    to_host: bool = True

    @classmethod
    def between(cls, ranks: Ints, memory: Ints, *, to_host: bool) -> "HostCopies":
        """Return the copies of `ranks`; `memory` has the memory node of every rank.

        >>> copies = HostCopies.between(np.array([0]), np.array([7, 7, 8]), to_host=False)
        >>> copies.source.tolist(), copies.in_every(np.array([[0], [2]])).source.tolist()
        ([7], [7, 8])
        """
        ends = (ranks, memory[ranks]) if to_host else (memory[ranks], ranks)
        return cls(*ends, np.ones(len(ranks)), np.arange(len(ranks)), memory, to_host)

    def in_every(self, groups: Ints) -> "HostCopies":
        """Return the copies of all groups, each of which is a single rank."""
        return HostCopies.between(groups[:, 0], self.memory, to_host=self.to_host)

    def carried_by_rank(self, ranks: int) -> tuple[Floats, Floats]:
        """Return zeros: copies send nothing to other ranks."""
        return np.zeros(ranks), np.zeros(ranks)


@dataclass(frozen=True, slots=True)
class Stage:
    """Hops in flight at the same time; the next stage waits for all of them."""

    hops: Hops
    size_bytes: float
    steps: float = 1.0
    """How often the latency of a path is waited for in sequence."""
    notices: float | None = None
    """Number of steps whose receives are posted only in that step, so that senders wait for their notices (if the
    backend has them, see [Note: notices] in `backend`). In other steps, receives are posted in advance. None: all steps
    wait.
    """
    starts: int = 1
    """Number of steps that begin with no message in flight."""
    hidden_ratio: float = 0.0
    """Fraction of the transfer that hides waits of later steps, because several messages are in flight."""
    coupled: bool = True
    """Whether all hops move at the rate of the slowest, as in the rounds of a ring. If not, each is its own flow."""
    stretch_ratio: float = 1.0
    """Time of the transfer relative to that of its bytes alone; more than 1 for filling and draining a pipeline."""
    queued_ratio: float = 0.0
    """Relative increase of the transfer time where notices wait for a whole message; see [Note: queues] in
    `network.routes`.
    """
    reduced_bytes: float = 0.0
    """Bytes that a rank adds to its own data, for the rank that adds the most."""

    def wait_s(
        self,
        latency_s: float,
        *,
        notice_s: float = 0.0,
        lead_s: float = 0.0,
        transfer_s: float = 0.0,
        head_start_s: float = 0.0,
    ) -> float:
        """Return the time that a stage waits without transferring, in seconds.

        `notice_s`: time of a notice; `lead_s`: time since the first receives were posted; `transfer_s`: time of all
        bytes. Steps that begin with nothing in flight wait for latency and notice in full. The other steps wait only
        for the part that messages in flight do not hide:

            t = starts * (latency + notice) + max(0, (steps - starts) * latency + (notices - starts) * notice - hidden)

        `head_start_s`: time that bytes gain over a wire on an idle shaped link. All steps but the first make up for
        that much of their waiting (see [Note: head start] in `cluster.lab_links`).

        >>> stage = Stage(Hops.of([(0, 1, 1.0)]), 8.0, steps=3, notices=1)
        >>> stage.wait_s(1.0, notice_s=1.0, lead_s=0.25), stage.wait_s(1.0, head_start_s=0.75)
        (3.75, 1.5)
        """
        notices = self.steps if self.notices is None else self.notices
        noticed, begun = min(self.starts, notices), min(float(self.starts), self.steps)
        with_notice_s = max(0.0, latency_s + notice_s - head_start_s)
        without_s = max(0.0, latency_s - head_start_s)
        first_s = min(1.0, begun) * latency_s + min(1.0, noticed) * max(0.0, notice_s - lead_s)
        noticed_again = max(0.0, noticed - 1)
        again_s = noticed_again * with_notice_s + (max(0.0, begun - 1) - noticed_again) * without_s
        noticed_later = min(notices - noticed, self.steps - begun)
        later_s = noticed_later * with_notice_s + (self.steps - begun - noticed_later) * without_s
        return first_s + again_s + max(0.0, later_s - self.hidden_ratio * transfer_s)


def summed(owner: Ints, values: Floats, owners: int) -> Floats:
    """Return the sum of the values of each owner.

    >>> summed(np.array([0, 2, 0]), np.array([1.0, 2.0, 3.0]), 3).tolist()
    [4.0, 0.0, 2.0]
    """
    return np.asarray(np.bincount(owner, weights=values, minlength=owners), dtype=np.float64)


cached_hops = lru_cache(maxsize=512)
"""Cache of the hops of recent simulations' groups."""


@dataclass(frozen=True, eq=False)
class Members:
    """A group of ranks and their placement. Compared by identity: there is one object for each group."""

    ranks: Ints
    hosts: Ints
    """Number of each member's host."""
    shape: tuple[int, ...] = ()
    """Shape of the torus that the group fills in row-major order; empty if it does not fill one."""
    multirail: bool = False
    """Whether rings enter and leave a host by each of its devices in turn (NCCL's channels) instead of by one only."""
    inside: Hops | None = None
    """Rings inside the hosts, between positions, with weights that sum to 1 for each sender; given if the links between
    devices favour some orders. None: rings are in rank order."""

    kept: Recent = field(default_factory=lambda: Recent(MOST_LARGE), repr=False)
    """Cache of the hops of the latest uneven exchanges."""

    @property
    def count(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @cached_property
    def blocks(self) -> tuple[Ints, Ints]:
        """First position and size of each host's block of members. If hosts interleave, each member is a block."""
        starts = np.flatnonzero(np.r_[True, self.hosts[1:] != self.hosts[:-1]])
        if len(starts) > len(distinct(self.hosts)):
            starts = np.arange(self.count)
        return starts, np.diff(np.r_[starts, self.count])
