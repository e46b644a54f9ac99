"""Tree and chain algorithms: broadcast, reduce and all-reduce over binomial and double binary trees, or a chain."""

import math

import numpy as np

from gssim.collectives.communication import Communication
from gssim.collectives.stage import Hops, Members, Stage, cached_hops

CHUNK_BYTES = 2**19
"""Chunk that a pipelined chain forwards before it receives the next (NCCL's 512 KiB slices)."""


def binomial(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Broadcast in which, in each step, every rank that has the data sends it to one more; a reduce runs backwards."""
    backwards, size = communication.kind == "reduce", communication.size_bytes
    reduced = size if backwards else 0.0
    return tuple(Stage(hops, size, reduced_bytes=reduced) for hops in _binomial_hops(members, backwards))


@cached_hops
def _binomial_hops(members: Members, backwards: bool) -> tuple[Hops, ...]:
    if backwards:
        return tuple(Hops(hops.target, hops.source, hops.weight) for hops in reversed(_binomial_hops(members, False)))
    steps, reach = [], 1
    while reach < members.count:
        senders = np.arange(min(reach, members.count - reach))
        steps.append(Hops(members.ranks[senders], members.ranks[senders + reach], np.ones(len(senders))))
        reach *= 2
    return tuple(steps)


def binomial_at_once(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Broadcast over the binomial tree in which a node sends to all its children at once (gloo/broadcast.cc).

    The children share the node's link, so this takes longer than one child after another. All ranks but the root post
    their receives at the start.
    """
    size = communication.size_bytes
    first, *later = _levels(members)
    return (Stage(first, size, coupled=False), *(Stage(hops, size, notices=0, coupled=False) for hops in later))


@cached_hops
def _levels(members: Members) -> tuple[Hops, ...]:
    """Return the tree's hops by the depth of their senders: the number of ones in a sender's position."""
    steps = _binomial_hops(members, False)
    senders = np.concatenate([np.arange(len(hops.source)) for hops in steps])
    source, target = (np.concatenate([getattr(hops, end) for hops in steps]) for end in ("source", "target"))
    depth = np.array([int(sender).bit_count() for sender in senders])
    by_level = [np.flatnonzero(depth == level) for level in range(int(depth.max()) + 1)]
    return tuple(Hops(source[hops], target[hops], np.ones(len(hops))) for hops in by_level)


def chain(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Broadcast (or reduce) along all members in chunks: each member forwards a chunk while it receives the next.

    t = (n - 2 + k) * (latency + chunk / bandwidth), for k chunks (a pipelined broadcast).
    """
    n, size = members.count, communication.size_bytes
    chunks = max(1, math.ceil(size / CHUNK_BYTES))
    steps = n - 2 + chunks
    backwards = communication.kind == "reduce"
    reduced = size if backwards else 0.0
    stretch = steps / chunks
    return (Stage(_chain_hops(members, backwards), size, steps=steps, stretch_ratio=stretch, reduced_bytes=reduced),)


@cached_hops
def _chain_hops(members: Members, backwards: bool) -> Hops:
    first, second = members.ranks[:-1], members.ranks[1:]
    source, target = (second, first) if backwards else (first, second)
    return Hops(source, target, np.ones(len(first)))


def double_tree(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """All-reduce up and down two binary trees at once, each with half: inner nodes of one tree are leaves of the other.

    Source: Sanders, Speck, Traff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan". Within a
    host, the devices form a chain to the device that is in the tree; with rails, each ring has a different one, as in
    NCCL.
    """
    hops, depth = _tree_hops(members)
    size = communication.size_bytes
    return (Stage(hops, size, steps=2 * depth, reduced_bytes=2 * size),)


def tree_depth(n: int) -> int:
    """Return the depth of the binary tree over n nodes, in hops.

    >>> tree_depth(8), tree_depth(5), tree_depth(1)
    (3, 3, 0)
    """
    return math.ceil(math.log2(n)) if n > 1 else 0


@cached_hops
def _tree_hops(members: Members) -> tuple[Hops, int]:
    starts, sizes = members.blocks
    hosts = len(starts)
    parents = [-1]  # of each node of a binary tree whose odd nodes are leaves; -1 at the root, node 0
    for node in range(1, hosts):
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        parents.append(up if up < hosts else node ^ bit)
    mirrored = [hosts - 1 - i if hosts % 2 == 0 else (i + 1) % hosts for i in range(hosts)]
    back = [mirrored.index(i) for i in range(hosts)] if hosts < 64 else list(np.argsort(mirrored))
    edges = [(i, up) for i, up in enumerate(parents) if up >= 0]
    edges += [(int(back[i]), int(back[up])) for i, up in edges]
    rails = int(sizes.max()) if members.multirail and hosts > 1 else 1
    pairs: list[tuple[int, int, float]] = []
    for rail in range(rails):
        heads = [int(start + rail % size) for start, size in zip(starts, sizes, strict=True)]
        pairs += [(heads[i], heads[up], 0.5 / rails) for i, up in edges]
        for start, size, head in zip(starts, sizes, heads, strict=True):
            order = [int(start + (head - start + j) % size) for j in range(size)]
            pairs += [(order[j + 1], order[j], 1 / rails) for j in range(size - 1)]
    upwards = Hops.of([(int(members.ranks[a]), int(members.ranks[b]), w) for a, b, w in pairs])
    both = Hops(
        np.r_[upwards.source, upwards.target], np.r_[upwards.target, upwards.source], np.tile(upwards.weight, 2)
    )
    return both, tree_depth(hosts) + int(sizes.max()) - 1
