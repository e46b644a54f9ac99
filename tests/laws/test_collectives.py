from dataclasses import replace

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import KINDS, built, collectives_on, communicated, fabrics, stages_of, star, topology

from gssim import collectives
from gssim.collectives import BACKEND_ALGORITHMS, Communication, Pairs, Stage
from gssim.collectives.algorithms import ALGORITHMS, SINGLE_FLOWS, Members
from gssim.errors import UserError

RINGS = ("all-reduce", "reduce-scatter", "all-gather")
GROUPS = st.integers(2, 8).flatmap(lambda n: st.permutations(range(8)).map(lambda ranks: tuple(sorted(ranks[:n]))))


def members_of(group, *, backend="gloo", hosts=None, shape=()) -> Members:
    """Return members on hosts of their own, or as given."""
    ranks = np.array(group)
    found = ranks if hosts is None else np.array(hosts)
    return Members(ranks, found, shape=shape, multirail=backend == "nccl")


def stages(communication: Communication, backend: str, **where) -> tuple[Stage, ...]:
    name = BACKEND_ALGORITHMS[backend][communication.kind]
    return ALGORITHMS[name, communication.kind](
        members_of(communication.group, backend=backend, **where), communication
    )


def messages(stage: Stage) -> list[tuple[int, int, float]]:
    hops = stage.hops
    sizes = (hops.weight * stage.size_bytes).tolist()
    return list(zip(hops.source.tolist(), hops.target.tolist(), sizes, strict=True))


def sent_bytes(found: tuple[Stage, ...], group) -> dict[int, float]:
    sent = dict.fromkeys(group, 0.0)
    for stage in found:
        for source, _, size in messages(stage):
            sent[source] += size
    return sent


def received_bytes(found: tuple[Stage, ...], group) -> dict[int, float]:
    received = dict.fromkeys(group, 0.0)
    for stage in found:
        for _, target, size in messages(stage):
            received[target] += size
    return received


@pytest.mark.parametrize(
    ("kind", "backend", "factor"),
    [
        ("all-reduce", "gloo", 2),
        ("all-reduce", "nccl", 2),
        ("reduce-scatter", "gloo", 2),  # an all-reduce on the wire, as measured
        ("reduce-scatter", "nccl", 1),
        ("all-gather", "gloo", 1),
        ("all-gather", "nccl", 1),
    ],
)
@given(GROUPS, st.integers(0, 10**9))
def test_every_rank_of_a_ring_sends_its_part_of_the_tensor(kind, backend, factor, group, size):
    members = len(group)
    for sent in sent_bytes(stages(Communication(kind, group, size), backend), group).values():
        assert sent == pytest.approx(factor * (members - 1) / members * size)


def test_four_ranks_put_on_the_wire_what_was_measured_with_gloo():
    # counted on a loopback, as fractions of the tensor
    group = (0, 1, 2, 3)
    sent = {kind: sent_bytes(stages(Communication(kind, group, 100), "gloo"), group) for kind in KINDS[:4]}
    assert sent["all-reduce"][0] == sent["reduce-scatter"][0] == pytest.approx(150)
    assert sent["all-gather"][0] == pytest.approx(75)
    assert sent["broadcast"] == {0: 200, 1: 100, 2: 0, 3: 0}


@given(GROUPS, st.sampled_from(RINGS), st.sampled_from(["gloo", "nccl"]))
def test_in_a_ring_each_rank_sends_to_one_and_receives_from_one_all_at_one_pace(group, kind, backend):
    rounds = stages(Communication(kind, group, 1000), backend)
    for stage in rounds:
        found = messages(stage)
        assert sorted(source for source, _, _ in found) == sorted(target for _, target, _ in found) == list(group)
        assert all(source != target for source, target, _ in found)
        assert len({size for _, _, size in found}) == 1
        assert stage.coupled
    turns = {"all-reduce": 2, "reduce-scatter": 2 if backend == "gloo" else 1, "all-gather": 1}[kind]
    assert sum(stage.steps for stage in rounds) == turns * (len(group) - 1)


@given(st.integers(2, 9))
def test_gloo_reduces_to_the_rank_before_and_gathers_to_the_next_and_nccl_has_one_direction(count):
    group = tuple(range(count))
    before = {(i, (i - 1) % count) for i in group}
    after = {(i, (i + 1) % count) for i in group}

    def hops(kind, backend):
        found = [message for stage in stages(Communication(kind, group, 90), backend) for message in messages(stage)]
        return {(source, target) for source, target, _ in found}

    assert hops("all-gather", "gloo") == after
    assert hops("all-reduce", "gloo") == hops("reduce-scatter", "gloo") == before
    assert all(hops(kind, "nccl") == after for kind in RINGS)


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=5), st.sampled_from(RINGS))
def test_rings_of_several_rails_leave_a_host_by_every_device_alike(sizes, kind):
    hosts = np.repeat(np.arange(len(sizes)), sizes)
    group = tuple(range(len(hosts)))
    found = stages(Communication(kind, group, 1200), "nccl", hosts=hosts)
    turns = 2 if kind == "all-reduce" else 1
    total = turns * (len(group) - 1) / len(group) * 1200
    across = [(source, target, size) for source, target, size in messages(*found) if hosts[source] != hosts[target]]
    assert all(hosts[target] == (hosts[source] + 1) % len(sizes) for source, target, _ in across)
    for host, devices in enumerate(sizes):
        leaving = [sum(size for source, _, size in across if source == rank) for rank in np.flatnonzero(hosts == host)]
        assert sum(leaving) == pytest.approx(total)
        rails = max(sizes)
        assert max(leaving) <= np.ceil(rails / devices) / rails * total * (1 + 1e-9)
    # every ring visits every device, which passes on all that it gets
    assert sent_bytes(found, group) == pytest.approx(dict.fromkeys(group, total))
    assert sent_bytes(found, group) == pytest.approx(received_bytes(found, group))


@pytest.mark.parametrize("sizes", [(3, 4), (2, 3, 2)])
def test_rings_over_hosts_of_any_size_pass_on_what_they_get(sizes):
    hosts = np.repeat(np.arange(len(sizes)), sizes)
    group = tuple(range(len(hosts)))
    found = stages(Communication("all-gather", group, 1200), "nccl", hosts=hosts)
    assert sent_bytes(found, group) == pytest.approx(received_bytes(found, group))


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=8))
def test_an_uneven_gather_brings_every_part_to_every_rank(parts):
    group = tuple(range(len(parts)))
    held = {rank: {rank} if parts[rank] else set() for rank in group}
    communication = Communication("all-gather-v", group, sum(parts), part_bytes=tuple(parts))
    for number, stage in enumerate(stages(communication, "gloo")):
        arriving = [(source, target, (source - number) % len(parts), size) for source, target, size in messages(stage)]
        for source, target, part, size in arriving:
            assert part in held[source], "a rank passes on only what it has"
            assert size == parts[part]
            held[target].add(part)
    assert all(held[rank] == {i for i in group if parts[i]} for rank in group)


@given(st.integers(2, 20), st.sampled_from(["binomial", "binomial-at-once"]))
def test_a_broadcast_reaches_everybody_once_from_ranks_that_have_it(count, name):
    reached = {0}
    found = ALGORITHMS[name, "broadcast"](members_of(range(count)), Communication("broadcast", range(count), 10))
    for stage in found:
        sources, targets = [m[0] for m in messages(stage)], [m[1] for m in messages(stage)]
        assert set(sources) <= reached
        assert name == "binomial-at-once" or len(set(sources)) == len(sources)
        assert not set(targets) & reached
        reached |= set(targets)
    assert reached == set(range(count))
    depth = max(rank.bit_count() for rank in range(count))
    assert len(found) == {"binomial": (count - 1).bit_length(), "binomial-at-once": depth}[name]


@given(st.integers(2, 20), st.sampled_from(["binomial", "chain"]))
def test_a_reduce_is_a_broadcast_backwards(count, name):
    members = members_of(tuple(range(count)))
    there, back = (
        [messages(stage) for stage in ALGORITHMS[name, kind](members, Communication(kind, range(count), 10))]
        for kind in ("broadcast", "reduce")
    )
    assert back == [[(target, source, size) for source, target, size in stage] for stage in reversed(there)]


@given(st.integers(1, 5).map(lambda power: 2**power))
def test_halving_and_doubling_brings_every_part_of_every_rank_to_every_rank(count):
    group = tuple(range(count))
    contributions = {rank: {rank} for rank in group}
    for stage in ALGORITHMS["halving-doubling", "all-reduce"](
        members_of(group), Communication("all-reduce", group, 64)
    )[: count.bit_length() - 1]:
        pairs = {(source, target) for source, target, _ in messages(stage)}
        assert pairs == {(target, source) for source, target in pairs}
        contributions = {rank: contributions[rank] | contributions[dict(pairs)[rank]] for rank in group}
    assert all(found == set(group) for found in contributions.values())
    gathering = ALGORITHMS["halving-doubling", "all-gather"](members_of(group), Communication("all-gather", group, 64))
    assert [stage.size_bytes for stage in gathering] == [64 / count * 2**step for step in range(len(gathering))]


@given(st.integers(2, 40))
def test_who_is_inside_one_of_two_trees_is_a_leaf_of_the_other_and_both_reach_everybody(count):
    group = tuple(range(count))
    (stage,) = ALGORITHMS["double-tree", "all-reduce"](members_of(group), Communication("all-reduce", group, 100))
    found = messages(stage)
    assert sorted(found) == sorted((target, source, size) for source, target, size in found)
    assert sum(size for _, _, size in found) == pytest.approx(2 * 100 * (count - 1))
    sent = sent_bytes((stage,), group)
    assert max(sent.values()) <= 2 * 100 + 1e-9
    half = len(found) // 2
    trees = found[: half // 2], found[half // 2 : half]
    for tree in trees:
        parents = {source: target for source, target, _ in tree}
        (root,) = set(group) - set(parents)
        for rank in group:
            hops = 0
            while rank != root:
                rank, hops = parents[rank], hops + 1
            assert hops <= collectives.tree_depth(count)


def test_an_all_to_all_sends_everything_at_once_and_nothing_to_oneself():
    matrix = ((9.0, 1.0, 0.0), (2.0, 9.0, 3.0), (0.0, 4.0, 9.0))
    (stage,) = stages(Communication("all-to-all-v", (3, 5, 8), 0, pair_bytes=matrix), "gloo")
    assert set(messages(stage)) == {(3, 5, 1), (5, 3, 2), (5, 8, 3), (8, 5, 4)}
    assert not stage.coupled


@pytest.mark.parametrize("kinds", [1, 20])
def test_exchanges_of_several_groups_at_once_have_too_many_flows_together(kinds):
    rows = [tuple(float(1 + (sender + owner) % 7) for owner in range(20)) for sender in range(kinds)]
    matrix, most = Pairs(rows, [sender % kinds for sender in range(20)]), SINGLE_FLOWS // (20 * 19)
    found = {
        at_once: stages(Communication("all-to-all-v", tuple(range(20)), 0, pair_bytes=matrix, at_once=at_once), "gloo")
        for at_once in (1, most, most + 1)
    }
    assert [stage.coupled for (stage,) in found.values()] == [False, False, True]
    assert len({tuple(sorted(messages(stage))) for (stage,) in found.values()}) == 1


@pytest.mark.parametrize("kind", [*KINDS[:6], *KINDS[7:]])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_group_of_one_sends_nothing(kind, backend):
    machine = communicated(
        star(3, backend=backend), Communication(kind, (2,), 100, pair_bytes=((5.0,),), part_bytes=(100,))
    )
    assert stages_of(machine) == []
    assert machine.env.now == 0


def test_only_reducing_stages_reduce():
    group = (0, 1, 2, 3)
    reducing, gathering = stages(Communication("all-reduce", group, 400), "gloo")
    assert (reducing.reduced_bytes, gathering.reduced_bytes) == (300, 0)
    assert all(stage.reduced_bytes == 0 for stage in stages(Communication("all-gather", (0, 1), 8), "gloo"))
    reduce, exchange = ALGORITHMS["direct", "all-reduce"](members_of(group), Communication("all-reduce", group, 400))
    assert (reduce.reduced_bytes, exchange.reduced_bytes) == (300, 0)


# What everybody must get, whatever the algorithm ----------------------------------------------------------------------


def owned(communication: Communication) -> tuple[dict[int, float], dict[int, float]]:
    """Return by member the least that must come in and go out for the collective to be what it is."""
    group, size, n = communication.group, communication.size_bytes, len(communication.group)
    kind = communication.kind
    if kind == "all-to-all-v":
        matrix = np.array(communication.pair_bytes, dtype=float)
        np.fill_diagonal(matrix, 0.0)
        return dict(zip(group, matrix.sum(axis=0), strict=True)), dict(zip(group, matrix.sum(axis=1), strict=True))
    if kind == "all-gather-v":
        parts = np.array(communication.part_bytes, dtype=float)
        into = parts.sum() - parts
        return dict(zip(group, into, strict=True)), dict(zip(group, np.where(into.max() > 0, parts, 0), strict=True))
    if kind == "reduce-scatter-v":
        parts = np.array(communication.part_bytes, dtype=float)
        return dict(zip(group, parts, strict=True)), dict(zip(group, parts.sum() - parts, strict=True))
    each = {
        "all-reduce": ((n - 1) / n * size, (n - 1) / n * size),  # at least its part of the sum, and the rest of it
        "reduce-scatter": (size / n, (n - 1) / n * size),
        "all-gather": ((n - 1) / n * size, size / n),
        "all-to-all": ((n - 1) / n * size, (n - 1) / n * size),
    }
    if kind in each:
        into, out = each[kind]
        return dict.fromkeys(group, into), dict.fromkeys(group, out)
    root = group[communication.root]
    first, rest = {root: size}, {rank: size for rank in group if rank != root}
    nothing = dict.fromkeys(group, 0.0)
    if kind == "reduce":
        return nothing | first, nothing | rest
    return nothing | rest, nothing | first


EXACT = frozenset(
    {
        *((name, "all-gather") for name in ("ring", "direct", "torus")),
        *((name, kind) for name in ("ring", "pipelined-ring") for kind in ("all-gather-v",)),
        ("direct", "all-to-all"),
        ("direct", "all-to-all-v"),
        ("direct", "send"),
        ("binomial", "broadcast"),
        ("chain", "broadcast"),
    }
)
"""Algorithms in which each rank receives exactly the data that it lacks: none for others, and none twice."""


@settings(max_examples=examples(200))
@given(st.data())
def test_every_rank_gets_and_gives_what_the_collective_is_for_in_any_algorithm(data):
    cluster, communication = data.draw(collectives_on(data.draw(fabrics())))
    machine = communicated(cluster, communication)
    if len(communication.group) == 1:
        assert stages_of(machine) == []
        return
    (scheduled,) = machine.schedules.values()
    group = tuple(communication.group)
    came, went = received_bytes(scheduled.stages, group), sent_bytes(scheduled.stages, group)
    if scheduled.algorithm == "in-switch":  # the switch adds, and sends to all at once
        everything = (1 + 1 / len(group)) * communication.size_bytes
        assert sum(came.values()) == pytest.approx(len(group) * everything)
        return
    even = len(group).bit_count() == 1 or communication.kind == "all-reduce"
    if scheduled.algorithm == "halving-doubling" and not even:
        return  # see below
    into, out = owned(communication)
    slack = 1e-6 + 1e-9 * max(came.values(), default=0.0)
    for rank in group:
        assert came[rank] >= into[rank] - slack
        assert went[rank] >= out[rank] - slack
    if (scheduled.algorithm, communication.kind) in EXACT:
        assert came == pytest.approx(into, rel=1e-9, abs=1e-6)
    assert sum(came.values()) == pytest.approx(sum(went.values()))


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize("count", [3, 5, 9])
def test_halving_and_doubling_of_parts_is_for_powers_of_two(kind, count):
    with pytest.raises(ValueError, match="power of two"):
        ALGORITHMS["halving-doubling", kind](members_of(range(count)), Communication(kind, range(count), 900))


@pytest.mark.parametrize(("name", "kind"), ALGORITHMS)
def test_every_algorithm_scales_with_the_size_and_sends_only_inside_the_group(name, kind):
    group = (1, 2) if kind == "send" else (1, 2, 4, 7)
    small, large = (
        ALGORITHMS[name, kind](
            members_of(group, hosts=np.array([0, 0, 1, 1])[: len(group)], shape=(2, 2)),
            Communication(
                kind,
                group,
                size,
                part_bytes=tuple(size / 4 * np.array([1, 0, 2, 1])),
                pair_bytes=tuple(map(tuple, size / 16 * np.arange(16).reshape(4, 4))),
            ),
        )
        for size in (1600.0, 16000.0)
    )
    assert len(small) == len(large) > 0
    for one, other in zip(small, large, strict=True):
        assert [(a, b, pytest.approx(10 * size)) for a, b, size in messages(one)] == messages(other)
        assert {rank for a, b, _ in messages(one) for rank in (a, b)} <= set(group)
        assert (one.hops.weight > 0).all()


REDUCING = [each for each in ALGORITHMS if each[1] in ("all-reduce", "reduce-scatter") and each[0] != "in-switch"]
"""Algorithms by name and kind whose devices add; a switch that adds costs them nothing."""


@pytest.mark.parametrize(("name", "kind"), REDUCING)
def test_some_rank_adds_at_least_its_part_of_all_others_and_none_more_than_everything(name, kind):
    members = members_of(range(8), hosts=np.repeat([0, 1], 4), shape=(4, 2))
    found = ALGORITHMS[name, kind](members, Communication(kind, range(8), 800))
    assert sum(stage.reduced_bytes for stage in found) * (1 + 1e-9) >= 7 / 8 * 800
    assert sum(stage.reduced_bytes for stage in found) <= 2 * 800


def test_an_algorithm_that_does_not_carry_out_a_kind_is_the_users_to_mend():
    cluster = star(2, algorithms={"all-gather": "double-tree"})
    with pytest.raises(UserError, match=r"cluster.algorithms.all-gather = 'double-tree': .* allowed: ring, direct"):
        communicated(cluster, Communication("all-gather", (0, 1), 8))


@pytest.mark.parametrize("name", ["torus", "hierarchical"])
def test_an_algorithm_for_another_shape_of_group_is_the_users_to_mend(name):
    cluster = star(3, algorithms={"all-reduce": name})
    cluster = replace(cluster, devices=(*cluster.devices[:2], replace(cluster.devices[2], host="host1")))
    with pytest.raises(UserError, match=f"cluster.algorithms.all-reduce = '{name}': .* needs"):
        communicated(cluster, Communication("all-reduce", range(3), 8))


def test_best_is_never_slower_than_any_algorithm_and_is_one_of_them():
    specification = topology("switch", count=8, bandwidth=1e6, latency_s=1e-3)
    for size in (1, 1000, 10**6):
        times = {}
        for name in ("best", *collectives.algorithms_for("all-reduce")):
            if name in ("torus", "one-way-torus", "hierarchical", "in-switch"):
                continue
            cluster = built(specification, algorithms={"all-reduce": name})
            times[name] = communicated(cluster, Communication("all-reduce", range(8), size)).env.now
        fastest = times.pop("best")
        assert fastest <= min(times.values()) * (1 + 1e-9)


def test_costs_of_the_backend_default_to_nothing():
    bare = star(2)
    assert collectives.overhead_s(bare, "all-reduce") == 0
    assert collectives.processor_byte_s(bare, "all-reduce") == 0
    assert collectives.posting_s(bare, next(iter(bare.device_types.values())), 1e9) == 0
    assert collectives.reduction_s(bare, 1e9) == 0


def test_costs_of_the_backend_are_by_kind():
    priced = star(
        2,
        backend_cost={
            "overhead_s": {"default": "1 ms", "all-gather": 0},
            "processor_byte_s": {"default": 2e-9, "all-gather": 1e-9},
            "reduction_bytes_per_s": 1e9,
            "source": "s",
        },
    )
    assert collectives.overhead_s(priced, "all-reduce") == 1e-3
    assert collectives.overhead_s(priced, "all-gather") == 0
    assert collectives.processor_byte_s(priced, "all-reduce") == 2e-9
    assert collectives.processor_byte_s(priced, "all-gather") == 1e-9
    assert collectives.reduction_s(priced, 1e9) == 1.0
