"""Level by level: inside hosts and between them, or one dimension of a torus after another."""

import math

import numpy as np

from gssim.collectives.algorithms.members import Members, made_once
from gssim.collectives.communication import Communication
from gssim.collectives.stage import Hops, Stage


def hierarchical(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Reduce-scatter inside every host, all-reduce of each part between hosts, all-gather inside (D.1)."""
    inside, between = _levels(members)
    size = communication.size_bytes
    g, k = len(inside.target) // max(1, len(members.blocks[0])), len(members.blocks[0])
    reduce = Stage(inside, (g - 1) / g * size, steps=g - 1, reduced_bytes=(g - 1) / g * size)
    gather = Stage(inside, (g - 1) / g * size, steps=g - 1)
    turns = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}[communication.kind]
    added = 0.0 if communication.kind == "all-gather" else (k - 1) / k * size / g
    across = Stage(between, turns * (k - 1) / k * size / g, steps=turns * (k - 1), reduced_bytes=added)
    stages = {
        "all-reduce": (reduce, across, gather),
        "reduce-scatter": (reduce, across),
        "all-gather": (across, gather),
    }
    return tuple(stage for stage in stages[communication.kind] if len(stage.hops.source) and stage.size_bytes)


@made_once
def _levels(members: Members) -> tuple[Hops, Hops]:
    """Return a ring inside every host, and a ring over the hosts for each place inside them."""
    starts, sizes = members.blocks
    if len(set(sizes.tolist())) != 1:
        raise ValueError("a hierarchical collective needs as many members on every host")
    g, k = int(sizes[0]), len(starts)
    grid = np.arange(g * k).reshape(k, g)
    return (
        Hops(members.ranks[grid.ravel()], members.ranks[np.roll(grid, -1, axis=1).ravel()], np.ones(g * k)),
        Hops(members.ranks[grid.ravel()], members.ranks[np.roll(grid, -1, axis=0).ravel()], np.ones(g * k)),
    )


def torus(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Dimension by dimension, round rings in both directions at once, each with half (Jouppi et al. 2020)."""
    return _by_dimension(members, communication, both=True)


def one_way_torus(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Dimension by dimension, round rings in one direction."""
    return _by_dimension(members, communication, both=False)


def _by_dimension(members: Members, communication: Communication, *, both: bool) -> tuple[Stage, ...]:
    scattering: list[Stage] = []
    gathering: list[Stage] = []
    part = communication.size_bytes
    for size, hops in _dimension_hops(members, both):
        carried = (size - 1) / size * part
        scattering.append(Stage(hops, carried, steps=size - 1, reduced_bytes=carried))
        gathering.insert(0, Stage(hops, carried, steps=size - 1))
        part /= size
    stages = {"all-reduce": [*scattering, *gathering], "reduce-scatter": scattering, "all-gather": gathering}
    return tuple(stages[communication.kind])


@made_once
def _dimension_hops(members: Members, both: bool) -> tuple[tuple[int, Hops], ...]:
    if math.prod(members.shape) != members.count:
        raise ValueError("a torus algorithm needs a group that fills a torus")
    grid = np.arange(members.count).reshape(members.shape)
    found = []
    for axis, size in enumerate(members.shape):
        if size == 1:
            continue
        ahead, behind = np.roll(grid, -1, axis=axis).ravel(), np.roll(grid, 1, axis=axis).ravel()
        targets = (ahead, behind) if both else (ahead,)
        source = members.ranks[np.tile(grid.ravel(), len(targets))]
        target = members.ranks[np.concatenate(targets)]
        found.append((size, Hops(source, target, np.full(len(source), 1 / len(targets)))))
    return tuple(found)
