"""Ring algorithms: every member forwards to the next one the part that it received from the previous one."""

import math
from dataclasses import replace

import numpy as np

from gssim.collectives.communication import Communication
from gssim.collectives.stage import Hops, Members, Stage, cached_hops
from gssim.execution.cache import Same
from gssim.units import Ints


@cached_hops
def ring_hops(members: Members, direction: int) -> Hops:
    """Return a ring over all members, in rank order; with several rails, one ring per rail, each with a part of the
    data.

    Ring c enters host k at its device c-k, visits all devices in turn, and leaves by the rail of the last one. So every
    device of a host sends on every rail, and each local hop carries all rings except those that leave from its device.
    """
    n = members.count
    starts, sizes = members.blocks
    if not members.multirail or len(starts) == n or (len(starts) == 1 and members.inside is None):
        order = np.arange(n)
        return Hops(members.ranks[order], members.ranks[(order + direction) % n], np.ones(n))
    local = members.inside or _in_rank_order(starts, sizes)
    rings = int(sizes.max())
    exits, entries = _crossings(starts, sizes, rings)
    stays = 1 - np.bincount(exits, minlength=n) / rings
    source = np.r_[local.source, exits]
    target = np.r_[local.target, entries]
    weight = np.r_[local.weight * stays[local.source], np.full(len(exits), 1 / rings)]
    if direction < 0:
        source, target = target, source
    return Hops(members.ranks[source], members.ranks[target], weight)


def _in_rank_order(starts: Ints, sizes: Ints) -> Hops:
    """Return a ring inside every host, between positions."""
    block = np.repeat(np.arange(len(starts)), sizes)
    source = np.flatnonzero(sizes[block] > 1)
    inside = block[source]
    target = starts[inside] + (source - starts[inside] + 1) % sizes[inside]
    return Hops(source, target, np.ones(len(source)))


def _crossings(starts: Ints, sizes: Ints, rings: int) -> tuple[Ints, Ints]:
    """Return the positions at which every ring leaves a host, and the positions at which it enters the next host."""
    none = np.zeros(0, np.int64)
    if len(starts) == 1:
        return none, none
    hosts = np.repeat(np.arange(len(starts)), rings)
    ring = np.tile(np.arange(rings), len(starts))
    following = (hosts + 1) % len(starts)
    turn = ring - hosts - 1
    entering = turn % sizes[following]
    if rings % sizes[0]:  # rings that return on another rail would otherwise enter host 0 unevenly
        entering = np.where(following == 0, ring % sizes[0], entering)
    return starts[hosts] + turn % sizes[hosts], starts[following] + entering


def _ring(members: Members, size_bytes: float, *, turns: int, reduces: bool = False) -> Stage:
    """Return `turns` (1 or 2) rounds of the ring, each of n - 1 steps that send 1/n of the size.

    gloo reduces towards lower ranks and gathers towards higher ones (measured); NCCL's rings have one direction.
    """
    n = members.count
    direction = -1 if reduces and not members.multirail else 1
    return Stage(
        ring_hops(members, direction),
        turns * (n - 1) / n * size_bytes,
        steps=turns * (n - 1),
        reduced_bytes=(n - 1) / n * size_bytes if reduces else 0.0,
    )


def ring_all_reduce(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Reduce-scatter, then all-gather in the same ring (Patarasuk & Yuan 2009)."""
    return (_ring(members, communication.size_bytes, turns=2, reduces=True),)


def ring_reduce_scatter(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Each part goes once round the ring and is added to on its way."""
    return (_ring(members, communication.size_bytes, turns=1, reduces=True),)


def ring_all_gather(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Each part goes once round the ring."""
    return (_ring(members, communication.size_bytes, turns=1),)


SEGMENT_BYTES = 2**20
"""Largest message of gloo's all-reduce (kMaxSegmentSize)."""


def _segmented(ring: Stage, members: Members, segments: int) -> Stage:
    """Return a round of a ring whose steps consist of `segments` messages each, two of which are in flight at a time.

    The receive of a message is posted when the second-last message has arrived. Two ranks share one connection for both
    directions: the notice of a receive queues behind the message in flight the other way, and arrives with its end.

    Where a notice queues behind other ranks' messages inside the network, later steps fall into step with that queue.
    So this delay occurs only once, and is at most as long as one message. (Simulated rings of 3 to 8 ranks, with 4 to
    56 messages each, that begin at random moments lose 0.6 to 1.3 messages on average.)
    """
    if members.count == 1:
        return ring
    if members.count == 2:
        return replace(ring, steps=segments - 1, notices=1, starts=1)
    messages = (members.count - 1) * segments
    pairs = messages / 2
    return replace(ring, steps=pairs, starts=1, hidden_ratio=(pairs - 1) / messages, queued_ratio=1 / messages)


def segmented_all_reduce(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Ring all-reduce whose chunks are sent in at least two segments (pytorch/gloo, gloo/allreduce.cc, ring).

    The second round goes the same way as the first. It begins with no message in flight, but in step with the queues.
    """
    segments = max(2, math.ceil(communication.size_bytes / SEGMENT_BYTES / members.count))
    reducing = _segmented(_ring(members, communication.size_bytes, turns=1, reduces=True), members, segments)
    return reducing, replace(reducing, reduced_bytes=0.0, queued_ratio=0.0)


def segmented_all_gather(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Ring all-gather whose parts are sent in two halves (pytorch/gloo, gloo/allgather.cc)."""
    (ring,) = ring_all_gather(members, communication)
    return (_segmented(ring, members, 2),)


def ring_all_to_all(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Every message is forwarded by the ranks between its ends: n(n-1)/2 steps that send 1/n of the size."""
    n = members.count
    steps = n * (n - 1) / 2
    return (Stage(ring_hops(members, 1), steps / n * communication.size_bytes, steps=steps),)


WHOLE_BYTES = 2**20
"""Larger parts of a reduce-scatter are sent in two halves, one of which is in flight while the other is added."""


def store_and_forward(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Ring of unequal parts, each forwarded once it is complete: in step r, member i sends the part of member i-r.

    This is gsreal's ring of point-to-point messages; a reduce-scatter runs backwards. Without parts they are equal, and
    all steps form one stage, also those of a reduce-scatter of equal parts. Receives are posted in advance. The
    exception is a reduce-scatter of unequal parts among more than three members, whose output has no room for the parts
    to forward.
    """
    n = members.count
    backwards = communication.carried_kind == "reduce-scatter-v"
    if not communication.part_bytes or (backwards and len(set(communication.part_bytes)) == 1):
        size = sum(communication.part_bytes) or communication.size_bytes
        ring = _ring(members, size, turns=1, reduces=backwards)
        halved = backwards and size / n > WHOLE_BYTES
        return (replace(ring, notices=1, hidden_ratio=(n - 2) / (2 * (n - 1)) if halved else 0.0),)
    parts = np.array(communication.part_bytes, dtype=float)

    def forwarded() -> tuple[Hops, ...]:
        positions, steps = np.arange(n), []
        for step in range(n - 1):
            sent = parts[(positions + step + 1 if backwards else positions - step) % n]
            senders = np.flatnonzero(sent)
            targets = (senders + (-1 if backwards else 1)) % n
            steps.append(Hops(members.ranks[senders], members.ranks[targets], sent[senders]))
        return tuple(steps)

    key = ("forwarded", Same(members), backwards, parts.tobytes())
    in_advance = not backwards or n == 3
    stages = []
    hops_of_steps = members.kept.once(key, forwarded, weight=lambda steps: sum(hops.count for hops in steps))
    for step, hops in enumerate(hops_of_steps):
        reduced = float(hops.weight.max(initial=0.0)) if backwards else 0.0
        notices = 0 if step and in_advance else None
        stages.append(Stage(hops, 1.0, notices=notices, coupled=False, reduced_bytes=reduced))
    return tuple(stages)


def pipelined_ring(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Ring of unequal parts in small pieces: every link carries all parts but its receiver's."""
    parts = np.array(communication.part_bytes, dtype=float)
    backwards = communication.kind == "reduce-scatter-v"

    def one_round() -> Hops:
        receivers = (np.arange(members.count) + 1) % members.count
        carried = parts.sum() - parts[receivers]
        some = np.flatnonzero(carried)
        source, target = members.ranks[some], members.ranks[receivers[some]]
        return Hops(target, source, carried[some]) if backwards else Hops(source, target, carried[some])

    key = ("one round", Same(members), backwards, parts.tobytes())
    hops = members.kept.once(key, one_round, weight=lambda hops: hops.count)
    reduced = float(hops.weight.max(initial=0.0)) if backwards else 0.0
    return (Stage(hops, 1.0, steps=members.count - 1, reduced_bytes=reduced),)


def in_switch(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """All-reduce inside the switch (NVLink SHARP): tensors go up, then each sends its part of the sum to all."""
    return (Stage(ring_hops(members, 1), (1 + 1 / members.count) * communication.size_bytes, steps=2),)
