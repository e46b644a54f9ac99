"""Max-min fair shares of links."""

import numpy as np

from gssim.units import Floats, Ints

NOWHERE = -1


def max_min_rates(session: Ints, link: Ints, load: Floats, capacity: Floats, *, sessions: int) -> Floats:
    """Return the max-min fair rate of each session over links of the given capacities; see `limited_rates`.

    >>> entries = np.array([0, 1, 1]), np.array([0, 0, 1]), np.ones(3)
    >>> max_min_rates(*entries, np.array([10.0, 2.0]), sessions=2).tolist()
    [8.0, 2.0]
    """
    return limited_rates(session, link, load, capacity, sessions=sessions)[0]


def limited_rates(session: Ints, link: Ints, load: Floats, capacity: Floats, *, sessions: int) -> tuple[Floats, Ints]:
    """Return the max-min fair rate of each session over links of the given capacities, and the link that limits it.

    Entry e says that a session at rate r takes `load[e] * r` of link `link[e]`: 1 for a flow, less where it is split
    over equal paths, more where several messages that keep pace cross the same link. Sessions on no link at all have
    an infinite rate. Progressive filling: all rates grow together; where a link is full, its sessions stop growing.
    Source: Bertsekas & Gallager 1992, "Data Networks", section 6.5.2.

    A session is limited by a link that is full, on which none is faster; `NOWHERE`: it crosses none.

    >>> entries = np.array([0, 1, 1]), np.array([0, 0, 1]), np.ones(3)
    >>> [found.tolist() for found in limited_rates(*entries, np.array([10.0, 2.0]), sessions=2)]
    [[8.0, 2.0], [0, 1]]
    """
    rates = np.zeros(sessions)
    limit = np.full(sessions, NOWHERE)
    growing = np.zeros(sessions, dtype=bool)
    growing[session[load > 0]] = True
    rates[~growing] = np.inf
    left = capacity.astype(float)
    while growing.any():
        active = growing[session]
        demand = np.bincount(link[active], weights=load[active], minlength=len(left))
        used = demand > 0
        share = np.full(len(left), np.inf)
        share[used] = np.maximum(0.0, left[used]) / demand[used]
        step = share.min()
        rates[growing] += step
        left[used] -= step * demand[used]
        full = share <= step * (1 + 1e-12)
        stopped = np.flatnonzero(active & full[link] & (load > 0))
        growing[session[stopped]] = False
        limit[session[stopped]] = link[stopped]
    return rates, limit
