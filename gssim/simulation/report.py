"""Reports a simulated step as the parts of a Result: ranks, links and collectives, price and energy.

Ranks with equal outcomes are reported together. Price and energy cover all devices of the scenario's ranks, whether
they compute or wait.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from gssim.collectives import COPIES, Communication
from gssim.engine import Machine, RankClass
from gssim.program import Program, StepTraffic
from gssim.result import WAITING_PHASES, Collective, LinkUse, merge_collectives
from gssim.result import RankClass as RankOutcome
from gssim.scenario import Scenario
from gssim.simulation.footprint import SIZE_DIGITS, MemoryFootprint
from gssim.units import Floats, Ints, kinds_of_rows


def cost_usd(scenario: Scenario, step_time_s: float) -> float | None:
    """Return the price of all devices for one step, in USD; None if the price of one is not known."""
    counts = Counter(device.type for device in scenario.cluster.devices[: scenario.ranks])
    prices = {name: scenario.cluster.device_types[name].price_usd_per_h for name in counts}
    known = [price * counts[name] for name, price in prices.items() if price is not None]
    return sum(known) * step_time_s / 3600 if len(known) == len(prices) else None


def energy_j(scenario: Scenario, step_time_s: float, ranks: Sequence[RankOutcome]) -> float | None:
    """Return the energy of all devices in a step, without hosts and network; None if the power of one is not known.

        E = T * sum over ranks of (idle power + (busy power - idle power) * part of the step in which it computes)

    Assumes the same power for all compute, the maximum of the data sheet. Nodes with eight H100 were measured at no
    more than 0.82 of their maximum in training (Latif et al. 2024, arXiv:2412.08602).
    """
    power_w = 0.0
    for each in ranks:
        device = scenario.cluster.device_types[each.device]
        if device.busy_power_w is None or device.idle_power_w is None:
            return None
        whole_s = sum(each.phases_s.values())
        waits_s = sum(each.phases_s[name] for name in WAITING_PHASES)
        busy_ratio = 1 - waits_s / whole_s if whole_s else 0.0
        power_w += each.count * (device.idle_power_w + (device.busy_power_w - device.idle_power_w) * busy_ratio)
    return power_w * step_time_s


def collectives_of(program: Program, traffic: Sequence[StepTraffic]) -> tuple[Collective, ...]:
    """Return one steady step's collectives; payloads of data-dependent ones are means over all steps."""
    counts: dict[tuple[str, Any, int], int] = defaultdict(int)
    payloads: dict[tuple[str, Any, int], float] = defaultdict(float)
    alike: dict[tuple[Any, ...], tuple[Communication, int]] = {}
    """A collective of each kind, size and groups, and how often such ones occur. Keys have `id`s of the other groups,
    as these are many, and slow to hash."""
    for communication, count in program.exchanges:
        if communication.kind not in COPIES:
            like = communication.kind, communication.group, id(communication.beside), int(communication.size_bytes)
            alike[like] = communication, alike.get(like, (None, 0))[1] + count
    for communication, count in alike.values():
        for key in _keys(communication):
            counts[key] += count
    for name, communication in program.uneven.items():
        if communication.data_dependent:
            for key in _keys(communication):
                payloads[key] += fmean(step.payload_bytes[name] for step in traffic)
    return merge_collectives(
        Collective(
            kind=kind, group=tuple(group), bytes=size, count=count, payload_bytes=payloads.get((kind, group, size))
        )
        for (kind, group, size), count in counts.items()
    )


def _keys(communication: Communication) -> Iterator[tuple[str, Any, int]]:
    """Yield kind, members and size of a collective for each of its groups."""
    for group in communication.groups:
        members = group if isinstance(group, range) else tuple(sorted(group))  # a send's group lists the sender first
        yield communication.kind, members, int(communication.size_bytes)


def mean_excess_bytes(program: Program, traffic: Sequence[StepTraffic], typical: StepTraffic) -> float:
    """Return by how many bytes the mean of the data-dependent messages over all steps exceeds the typical step's."""
    return sum(
        len(communication.groups) * (fmean(step.payload_bytes[name] for step in traffic) - typical.payload_bytes[name])
        for name, communication in program.uneven.items()
        if communication.data_dependent
    )


def mean_over_typical(whole_bytes: float, excess: float) -> float:
    """Return the ratio of bytes in the mean of all steps to those in the typical step.

    `whole_bytes`: bytes that all ranks send in the typical step; `excess`: see `mean_excess_bytes`. Assumes the same
    ratio for all ranks and links.
    """
    return 1 + excess / whole_bytes if whole_bytes else 1.0


MAX_LISTED_LINKS = 256
"""Largest number of links that the Result lists one by one; beyond it, each class of equal links has one line."""


class Carried(NamedTuple):
    """Bytes that one or several steps send, receive and carry over links."""

    sent: Floats
    """By rank."""
    received: Floats
    """By rank."""
    links: Floats
    """By link."""


def carried_by(machine: Machine) -> Carried:
    """Return the bytes of an average step of a machine."""
    of_link, carried = machine.network.folded.link_class, machine.network.carried
    links = np.where(of_link >= 0, carried[of_link] if len(carried) else 0.0, 0.0)
    sent, received = machine.carried_by_rank()
    return Carried(sent / machine.steps, received / machine.steps, links / machine.steps)


def links_of(
    machine: Machine, step_time_s: float, *, mean_ratio: float = 1.0, beside: Carried | None = None
) -> tuple[LinkUse, ...]:
    """Return the mean bytes of each link or class of links over all steps, and its utilisation in the typical step.

    `mean_ratio`: see `mean_over_typical`. `beside`: bytes to be added to those that the machine has simulated.
    """
    network, wiring = machine.network, machine.network.wiring
    of_link = network.folded.link_class
    shown = zip(*(column.tolist() for column in _reported_links(of_link)), strict=True)
    names, source, target = wiring.names, wiring.source.tolist(), wiring.target.tolist()
    carried_bytes, rates = network.carried.tolist(), wiring.bandwidth_bytes_per_s.tolist()
    uses = []
    for link, kind, equal in shown:
        size_bytes = carried_bytes[kind] / machine.steps if kind >= 0 else 0.0
        if beside is not None:
            size_bytes += float(beside.links[link] if equal == 1 else beside.links[of_link == kind].mean())
        name, busy_ratio = f"{names[source[link]]} -> {names[target[link]]}", size_bytes / rates[link] / step_time_s
        uses.append(LinkUse(name=name, count=equal, bytes=size_bytes * mean_ratio, utilisation_ratio=busy_ratio))
    return tuple(uses)


def _reported_links(of_link: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the links that a Result lists, their classes, and how many equal links each stands for.

    `of_link`: class of every link, -1 if nothing crosses it. Of many links only the first of each class is listed.
    """
    if len(of_link) <= MAX_LISTED_LINKS:
        return np.arange(len(of_link)), of_link, np.ones(len(of_link), np.int64)
    used, first, count = np.unique(of_link, return_index=True, return_counts=True)
    return first[used >= 0], used[used >= 0], count[used >= 0]


def busiest_of(machine: Machine, step_time_s: float, *, mean_ratio: float = 1.0) -> tuple[LinkUse, ...]:
    """Return, of what `links_of` lists, only the link with the highest utilisation; of equal ones the first by name.

    Empty if no link carries anything.
    """
    network, wiring = machine.network, machine.network.wiring
    links, classes, counts = _reported_links(network.folded.link_class)
    carried_bytes = network.carried[classes] if len(network.carried) else np.zeros(len(links))
    size_bytes = np.where(classes >= 0, carried_bytes, 0.0) / machine.steps
    busy_ratios = size_bytes / wiring.bandwidth_bytes_per_s[links] / step_time_s
    highest = float(busy_ratios.max(initial=0.0))
    if not highest:
        return ()
    places = np.flatnonzero(busy_ratios == highest)
    ends = (wiring.source[links[places]].tolist(), wiring.target[links[places]].tolist())
    names = [f"{wiring.names[source]} -> {wiring.names[target]}" for source, target in zip(*ends, strict=True)]
    name, place = min(zip(names, places.tolist(), strict=True))
    carried = float(size_bytes[place]) * mean_ratio
    return (LinkUse(name=name, count=int(counts[place]), bytes=carried, utilisation_ratio=highest),)


def scale_utilisation(links: Sequence[LinkUse], ratio: float) -> tuple[LinkUse, ...]:
    """Return the links with their utilisation in a step that takes `ratio` times as long, with the same bytes."""
    return tuple(replace(link, utilisation_ratio=link.utilisation_ratio / ratio) for link in links)


SHARE_DIGITS = 9


def _equal_members(
    machine: Machine, sent: Floats, received: Floats, shard_shares: Floats
) -> Iterator[tuple[RankClass, Ints]]:
    """Yield each class's members, grouped by equal traffic and shard size. These may differ between ranks of a class.

    (Shard sizes that round to the same slice of a block, or to the same elements of a bucket, lower to equal tasks.)
    """
    carried = np.round(np.column_stack([sent, received]), SIZE_DIGITS)
    kinds = kinds_of_rows(np.column_stack([carried, np.round(shard_shares, SHARE_DIGITS)]))[0]
    for rank_class in machine.classes:
        if len(rank_class.members) == 1:
            yield rank_class, rank_class.members
            continue
        own = kinds[rank_class.members]
        for kind in dict.fromkeys(own.tolist()):
            yield rank_class, rank_class.members[own == kind]


def _parts_of_step(phases_s: Mapping[str, float]) -> tuple[float, ...]:
    """Return phases as parts of the step, without the digits in which equal ranks differ: a phase is a sum of many."""
    whole_s = sum(phases_s.values()) or 1.0
    return tuple([round(phase_s / whole_s, SHARE_DIGITS) if phase_s else 0.0 for phase_s in phases_s.values()])


def rank_classes(
    scenario: Scenario,
    machine: Machine,
    phases: list[dict[str, float]],
    footprints: Sequence[MemoryFootprint],
    carried: tuple[Floats, Floats],
    *,
    mean_ratio: float = 1.0,
    beside: Carried | None = None,
) -> tuple[RankOutcome, ...]:
    """Return the outcomes of ranks; ranks with equal outcomes share one entry.

    `carried`: bytes that each rank has sent and received in all steps of the machine. `mean_ratio`: see
    `mean_over_typical`; `beside`: see `links_of`. Bytes of ranks are means over steps, so that they agree with the
    collectives' payloads.
    """
    found: dict[tuple[Any, ...], tuple[MemoryFootprint, dict[str, float], dict[str, float], list[int]]] = {}
    total, batch_sizes, shard_shares = scenario.workload.global_batch_size, scenario.batch_sizes, scenario.shard_shares
    devices = scenario.cluster.devices
    if beside is not None:
        carried = carried[0] + machine.steps * beside.sent, carried[1] + machine.steps * beside.received
    sent, received = (size_bytes.tolist() for size_bytes in carried)
    for each, same in _equal_members(machine, *carried, np.array(shard_shares)):
        footprint, rank, own_phases_s = footprints[each.index], int(same[0]), phases[each.index]
        on_host = dict(machine.program.on_host[machine.roles[each.index]]) if machine.program.on_host else {}
        key = (
            devices[rank].type,
            round(mean_ratio * sent[rank] / machine.steps, SIZE_DIGITS),
            round(mean_ratio * received[rank] / machine.steps, SIZE_DIGITS),
            batch_sizes[rank] / total,
            shard_shares[rank],
            footprint.reported_key,
            *_parts_of_step(own_phases_s),
            *on_host.items(),
        )
        found.setdefault(key, (footprint, own_phases_s, on_host, []))[-1].extend(same.tolist())
    outcomes = []
    for (device, sent_bytes, received_bytes, batch_share, shard_share, *_), own in found.items():
        footprint, phases_s, host_bytes, ranks = own
        outcome = RankOutcome(
            ranks=tuple(sorted(ranks)),
            count=len(ranks),
            device=device,
            bytes_sent=sent_bytes,
            bytes_received=received_bytes,
            batch_share=batch_share,
            shard_share=shard_share,
            phases_s=phases_s,
            host_bytes={category: float(size) for category, size in host_bytes.items()},
            **footprint.reported,
        )
        outcomes.append(outcome)
    return tuple(outcomes)


def with_phases_of(
    ranks: Sequence[RankOutcome], others: Sequence[RankOutcome], *, scale: float
) -> tuple[RankOutcome, ...]:
    """Return the outcomes of ranks with the phases that the same ranks have in another step, times `scale`.

    Ranks of one entry whose phases differ in that step (one of them is slow) have an entry each.
    """
    phases_of = {rank: each.phases_s for each in others for rank in each.ranks}
    found = []
    for each in ranks:
        by_phases: dict[tuple[float, ...], list[int]] = defaultdict(list)
        for rank in each.ranks:
            by_phases[_parts_of_step(phases_of[rank])].append(rank)
        for same in by_phases.values():
            phases_s = {name: value * scale for name, value in phases_of[same[0]].items()}
            found.append(replace(each, ranks=tuple(same), count=len(same), phases_s=phases_s))
    return tuple(found)
