"""Where queues stand in a network, and whether small messages must pass them.

[Note: queues] A sender's own port holds back what its link does not take at once, and lets small messages through (the
kernel's limits on what a connection may queue). A slower link farther on has no such means: all that the sender's fast
port lets out waits in the switch before it, in the order in which it came. A receiver's notice that goes the same way
waits for the data ahead of it, where a notice that goes from switch to switch on idle links takes no time to speak of.
"""

import numpy as np

from gssim.collectives import Hops, summed
from gssim.network.routes import Router
from gssim.units import Bools, Floats, Ints

AS_BUSY = 0.99
"""Links that are as busy as the busiest, but for rounding."""


def notices_queue(router: Router, hops: Hops) -> bool:
    """Return whether notices of hops that keep pace wait in queues of what others of these hops carry.

    That is where a link holds up hops whose senders have faster ports, and the notice of another hop that is held up as
    much goes over that link too.
    """
    on = router.of(hops)
    slow = _busiest(router, hops)
    own = router.wiring.source[on.link] == hops.source[on.flow]
    held_at_port = _any(on.flow, slow[on.link] & own, hops.count)
    in_network = slow[on.link] & ~held_at_port[on.flow]
    if not in_network.any():
        return False
    held = _any(on.flow, slow[on.link], hops.count)
    back = router.of(Hops(hops.target, hops.source, hops.weight))
    queues = _any(on.link, in_network, router.wiring.links)
    return bool((queues[back.link] & held[back.flow]).any())


def _busiest(router: Router, hops: Hops) -> Bools:
    """Return of every link whether it takes longest for what the hops carry."""
    on, rates = router.of(hops), router.wiring.bandwidth_bytes_per_s
    took: Floats = summed(on.link, on.share * hops.weight[on.flow], router.wiring.links) / rates
    return np.asarray(took >= AS_BUSY * took.max(initial=0.0)) & (took > 0)


def _any(owner: Ints, marks: Bools, owners: int) -> Bools:
    """Return of every owner whether one of its entries is marked."""
    found = np.zeros(owners, dtype=bool)
    found[owner[marks]] = True
    return found
