"""What an algorithm makes of a collective: stages, each a set of hops that are under way together."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gssim.units import Floats, Ints


@dataclass(frozen=True, eq=False)
class Hops:
    """Who sends to whom, and how much for each byte of the stage's size. Compared by identity."""

    source: Ints
    """Rank that sends."""
    target: Ints
    weight: Floats
    """Bytes carried for each byte of the stage's size."""
    group: Ints | None = None
    """Which of several groups a hop belongs to, where they carry out the same at once, each at its own pace."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.source)

    @property
    def elements(self) -> int:
        """How many numbers it takes to tell them."""
        return len(self.source)

    def carried_by_rank(self, ranks: int) -> tuple[Floats, Floats]:
        """Return what each rank sends and receives for each byte of the size."""
        sent = summed(self.source, self.weight, ranks)
        return sent, summed(self.target, self.weight, ranks)

    def in_every(self, groups: Ints) -> "Hops":
        """Return the hops of the first of several groups (rows of ranks), and the same ones in all others.

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
    def most_handled(self) -> float:
        """Bytes that the busiest rank sends and receives, for each byte of the stage's size.

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


@dataclass(frozen=True, slots=True)
class Stage:
    """Hops under way together; the next stage waits for all of them."""

    hops: Hops
    size_bytes: float
    steps: float = 1.0
    """How many times, one after another, the latency of a path is waited for."""
    notices: float | None = None
    """In how many of the steps receives are posted only then, so that senders wait for their notices, where the backend
    has such (see [Note: notices] in `backend`); absent: in all. Else they are posted ahead."""
    starts: int = 1
    """How many of the steps begin with nothing under way."""
    hidden_ratio: float = 0.0
    """Part of the transfer that goes on while later steps wait: several messages are under way at a time."""
    coupled: bool = True
    """All hops move at the pace of the slowest, as the rounds of a ring do; else each is a flow of its own."""
    stretch_ratio: float = 1.0
    """Time of the transfer over that of its bytes alone: a pipeline fills and drains."""
    queued_ratio: float = 0.0
    """How much longer the transfer takes where notices wait in queues of data; see [Note: queues] in `network`."""
    reduced_bytes: float = 0.0
    """Most bytes that any rank adds to its own."""

    def wait_s(
        self,
        latency_s: float,
        *,
        notice_s: float = 0.0,
        lead_s: float = 0.0,
        transfer_s: float = 0.0,
        head_start_s: float = 0.0,
    ) -> float:
        """Return the time that no transfer fills.

        `notice_s`: what a notice takes back; `lead_s`: how long ago the first receives were posted; `transfer_s`: of
        all bytes. Steps that begin with nothing under way wait for all of it, the others for what messages between do
        not hide:

            t = starts * (latency + notice) + max(0, (steps - starts) * latency + (notices - starts) * notice - hidden)

        `head_start_s`: by how much sooner bytes are through an idle link than over a wire: all steps but the first make
        up for as much of what they wait (see [Note: head start] in `cluster.emulated`).

        >>> stage = Stage(Hops.of([(0, 1, 1.0)]), 8.0, steps=3, notices=1)
        >>> stage.wait_s(1.0, notice_s=1.0, lead_s=0.25), stage.wait_s(1.0, head_start_s=0.75)
        (3.75, 1.5)
        """
        notices = self.steps if self.notices is None else self.notices
        noticed, begun = min(self.starts, notices), min(float(self.starts), self.steps)
        told_s = max(0.0, latency_s + notice_s - head_start_s)
        untold_s = max(0.0, latency_s - head_start_s)
        first_s = min(1.0, begun) * latency_s + min(1.0, noticed) * max(0.0, notice_s - lead_s)
        told = max(0.0, noticed - 1)
        again_s = told * told_s + (max(0.0, begun - 1) - told) * untold_s
        told = min(notices - noticed, self.steps - begun)
        later_s = told * told_s + (self.steps - begun - told) * untold_s
        return first_s + again_s + max(0.0, later_s - self.hidden_ratio * transfer_s)


def summed(owner: Ints, values: Floats, owners: int) -> Floats:
    """Return the sum of the values of each owner.

    >>> summed(np.array([0, 2, 0]), np.array([1.0, 2.0, 3.0]), 3).tolist()
    [4.0, 0.0, 2.0]
    """
    return np.asarray(np.bincount(owner, weights=values, minlength=owners), dtype=np.float64)
