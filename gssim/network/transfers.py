"""Transfers: sessions that began together on links of the network, and what is called at their end.

[Note: joint transfers] Classes of ranks that do the same at the same times (see [Note: merged classes] in
`engine.merged_classes`) start equal sessions at once, each on links of its own, or on links that groups of them share
equally. As long as nothing else crosses any of these links, they all end at the same time: one `JointTransfer` stands
for them. As soon as anything else does, it is split into transfers, one for each of the sessions, as if it had been
these from the beginning.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gssim.network.folding import Sessions
from gssim.units import Bools, Floats, Ints

NO_LINKS = np.zeros(0, dtype=np.int64)
NEGLIGIBLE_BYTES = 1e-9


@dataclass(frozen=True, eq=False)
class Prepared:
    """A stage whose sessions start together, and its costs on idle links, which do not depend on when it begins."""

    wait_s: float
    """Seconds that it waits before its bytes are sent."""
    sessions: Sessions | None
    """The sessions; None if no bytes cross any links."""
    sizes: Floats | None
    processor_s: float
    """Processor time of the ends for the bytes, counted from the end of the wait."""
    stage_bytes: float = 0.0
    """Size of the stage, including its stretch and the backend's factor; multiplies `Sessions.unit_bytes`."""
    handled_by: Sessions | None = None
    """The sessions whose ends handle the bytes, whether these cross links or not."""


class Transfer:
    """Sessions that began together: remaining bytes and rate of each, and what is called once all have ended."""

    __slots__ = (
        "going",
        "last_s",
        "limit",
        "link_bits",
        "links",
        "number",
        "rate",
        "remaining",
        "sessions",
        "single",
        "then",
        "version",
    )

    def __init__(
        self, sessions: Sessions, sizes: Floats, then: Callable[[], object], now_s: float, number: int
    ) -> None:
        self.sessions, self.then, self.last_s = sessions, then, now_s
        self.number = number
        """Its place in the order in which transfers start."""
        self.single = len(sizes) == 1
        """Whether there is only one session; values of sessions are then lists, as plain numbers are faster than
        arrays.
        """
        self.remaining: Any = sizes.tolist() if self.single else sizes.copy()
        self.rate: Any
        self.limit: Any
        """The link that limits each session's rate."""
        self.going: Bools
        """Which of several sessions have not ended."""
        if not self.single:
            self.going = sizes > 0
        self.links, self.link_bits = sessions.links, sessions.link_bits
        self.version = 0

    def share(self, rates: Floats, limit: Ints) -> None:
        """Set the rate of each session, and the link that limits it."""
        self.rate, self.limit = (rates.tolist(), limit.tolist()) if self.single else (rates, limit)

    def share_alone(self, rate: float, limit: int) -> None:
        """Set the rate of the only session, and the link that limits it."""
        self.rate, self.limit = [rate], [limit]

    def advance(self, now_s: float) -> None:
        """Reduce the remaining bytes by those carried since the last change."""
        if now_s > self.last_s:
            if self.single:
                self.remaining[0] = max(self.remaining[0] - self.rate[0] * (now_s - self.last_s), 0.0)
                self.last_s = now_s
                return
            going = self.remaining > 0
            left = self.remaining[going] - self.rate[going] * (now_s - self.last_s)
            self.remaining[going] = np.maximum(left, 0.0)  # a session may have ended since
            self.last_s = now_s

    def settle(self, now_s: float) -> Ints:
        """End the sessions whose rest is below the clock's resolution; return the links that they free."""
        slack_s = 1e-12 + 2 * math.ulp(now_s)
        if self.single:
            if self.remaining[0] > self.rate[0] * slack_s + NEGLIGIBLE_BYTES:
                return NO_LINKS
            self.remaining[0] = 0.0
            return self.sessions.link
        ended = self.going & (self.remaining <= self.rate * slack_s + NEGLIGIBLE_BYTES)
        if not ended.any():
            return NO_LINKS
        self.remaining[ended] = 0.0
        self.going = self.going & ~ended
        freed: Ints = self.sessions.link[ended[self.sessions.session]]
        return freed

    @property
    def unfinished(self) -> Bools:
        """Whether each session has bytes left."""
        return np.asarray(self.remaining) > 0

    def lasts_s(self) -> Floats:
        """Return the remaining time of each session at its rate; 0 for those that have ended."""
        times_s = np.zeros(len(self.remaining))
        np.divide(self.remaining, self.rate, out=times_s, where=self.unfinished)
        return times_s

    def lasts_alone_s(self) -> float:
        """Return the remaining time of the only session; 0 if it has ended."""
        left_bytes, rate = self.remaining[0], self.rate[0]
        return (left_bytes / rate if rate else math.inf) if left_bytes > 0 else 0.0

    @property
    def is_over(self) -> bool:
        """Whether no bytes are left."""
        return not (self.remaining[0] if self.single else self.remaining.any())

    def is_limited_by(self, links: Bools) -> bool:
        """Return whether one of the marked links limits an unfinished session; the last mark is for `NOWHERE`."""
        if self.single:
            return bool(links[self.limit[0]]) and not self.is_over
        return bool(links[self.limit[self.remaining > 0]].any())


class JointSessions(NamedTuple):
    """Stages that begin together, of which most are equal single sessions; see [Note: joint transfers]."""

    several: Sequence[Prepared]
    groups: Sequence[Sequence[int]]
    """Places of those that are equal, by groups that share links. No other of the stages crosses these."""
    limits: Sequence[Sequence[int]]
    """The link that limits each of them, while nothing else crosses its links."""
    size_bytes: float
    rate: float
    """That of each session meanwhile."""
    links: frozenset[int]
    """Links of all of them."""
    sessions: int
    """Number of all of them."""

    @classmethod
    def of(
        cls, several: Sequence[Prepared], rates_of: Callable[[tuple[Sessions, ...]], Sequence[tuple[float, int]]]
    ) -> "JointSessions | None":
        """Return prepared stages that begin together; None if less than two are equal and on links of their own.

        `rates_of`: gives the rates of single sessions on links that nothing else crosses, and the links that limit
        these.
        """
        sessions = [each.sessions for each in several if each.sessions is not None and not each.processor_s]
        if len(sessions) < len(several):
            return None  # a stage is not over when its bytes are
        sizes_bytes = [float(each.sizes[0]) if each.sizes is not None else 0.0 for each in several]
        link_bits = [each.link_bits for each in sessions]
        equal: dict[tuple[float, float], list[tuple[Sequence[int], Sequence[int]]]] = defaultdict(list)
        left = list(range(len(several)))
        while left:
            group = touching(left[-1], left, link_bits)
            left = [place for place in left if place not in group]
            if any([len(sessions[place].unit_bytes) > 1 for place in group]):
                continue
            rates = rates_of(tuple([sessions[place] for place in group]))
            kinds = {(sizes_bytes[place], rate) for place, (rate, _) in zip(group, rates, strict=True)}
            if len(kinds) == 1:
                equal[kinds.pop()].append((group, [limit for _, limit in rates]))
        most = max(equal.items(), key=lambda item: sum(len(group) for group, _ in item[1]), default=((0.0, 0.0), []))
        (size_bytes, rate), found = most
        places = [place for group, _ in found for place in group]
        if len(places) < 2 or not rate:
            return None
        links = frozenset[int]().union(*(sessions[place].links for place in places))
        groups, limits = zip(*found, strict=True)
        return cls(several, groups, limits, size_bytes, rate, links, len(places))


def touching(first: int, places: Sequence[int], link_bits: Sequence[int]) -> list[int]:
    """Return which of some transfers share links with the first one, or with others that do, itself before them.

    `link_bits`: links of each, as in `Sessions`.

    >>> touching(2, [0, 1, 2, 3], [0b1000, 0b0110, 0b0011, 0b0100])
    [2, 1, 3]
    """
    found, rest, links = [first], places, link_bits[first]
    while near := [each for each in rest if link_bits[each] & links and each != first]:
        found += near
        rest = [each for each in rest if each not in near]
        for each in near:
            links |= link_bits[each]
    return found


class JointTransfer:
    """Equal sessions that began together, of which none shares links with anything else; see [Note: joint transfers].

    `ended`: is called with how many have ended. `first_number`: start order of the first of the stages.
    """

    __slots__ = ("ended", "first_number", "joint", "links", "now_s", "number", "parts")

    def __init__(self, joint: JointSessions, ended: Callable[[int], object], now_s: float, first_number: int) -> None:
        self.joint, self.ended, self.now_s, self.first_number = joint, ended, now_s, first_number
        self.links, self.number = joint.links, first_number
        self.parts: Sequence[Sequence[Transfer]] = ()
        """The transfers into which it was split, by groups that share links."""

    @property
    def lasts_s(self) -> float:
        """Time that it takes if it is not split."""
        return self.joint.size_bytes / self.joint.rate

    def split(self, *, version: int) -> Sequence[Transfer]:
        """Return a transfer for each of the sessions, as it was at the beginning; `version`: of each."""
        joint = self.joint
        self.parts = [
            [
                transfer_of(joint.several[place], partial(self.ended, 1), self.now_s, self.first_number + place)
                for place in group
            ]
            for group in joint.groups
        ]
        parts, limits = list(chain(*self.parts)), chain(*joint.limits)
        for part, limit in zip(parts, limits, strict=True):
            part.share_alone(joint.rate, limit)
            part.version = version
        return parts


def transfer_of(prepared: Prepared, then: Callable[[], object], now_s: float, number: int) -> Transfer:
    """Return the transfer of a prepared stage whose bytes cross links."""
    assert prepared.sessions is not None
    assert prepared.sizes is not None
    return Transfer(prepared.sessions, prepared.sizes, then, now_s, number)
