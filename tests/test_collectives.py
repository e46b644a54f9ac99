import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import star

from gssim import collectives
from gssim.collectives import Communication, rounds

KINDS = ("all-reduce", "reduce-scatter", "all-gather")
GROUPS = st.integers(1, 8).flatmap(lambda n: st.permutations(range(8)).map(lambda ranks: tuple(sorted(ranks[:n]))))


def sent_bytes(communication: Communication, backend: str) -> dict[int, float]:
    sent = dict.fromkeys(communication.group, 0.0)
    for step in rounds(communication, backend):
        for message in step.messages:
            sent[message.source] += message.size_bytes
    return sent


@pytest.mark.parametrize(
    ("kind", "backend", "factor"),
    [
        ("all-reduce", "gloo", 2),
        ("all-reduce", "nccl", 2),
        ("reduce-scatter", "gloo", 2),  # an all-reduce on the wire: backend-facts 0.2
        ("reduce-scatter", "nccl", 1),
        ("all-gather", "gloo", 1),
        ("all-gather", "nccl", 1),
    ],
)
@given(GROUPS, st.integers(0, 10**9))
def test_every_rank_of_a_ring_sends_its_part_of_the_tensor(kind, backend, factor, group, size):
    members = len(group)
    for sent in sent_bytes(Communication(kind, group, size), backend).values():
        assert sent == pytest.approx(factor * (members - 1) / members * size)


def test_four_ranks_put_on_the_wire_what_was_measured_with_gloo():
    # backend-facts 1, as fractions of the tensor
    assert sent_bytes(Communication("all-reduce", (0, 1, 2, 3), 100), "gloo")[0] == pytest.approx(150)
    assert sent_bytes(Communication("all-gather", (0, 1, 2, 3), 100), "gloo")[0] == pytest.approx(75)
    assert sent_bytes(Communication("broadcast", (0, 1, 2, 3), 100), "gloo") == {0: 200, 1: 100, 2: 0, 3: 0}


@given(GROUPS, st.sampled_from(KINDS), st.sampled_from(["gloo", "nccl"]))
def test_in_every_round_of_a_ring_each_rank_sends_once_and_receives_once(group, kind, backend):
    for step in rounds(Communication(kind, group, 1000), backend):
        assert sorted(m.source for m in step.messages) == sorted(group)
        assert sorted(m.target for m in step.messages) == sorted(group)
        assert all(m.source != m.target for m in step.messages)


@given(st.integers(2, 9))
def test_gloo_reduces_to_the_rank_before_and_gathers_to_the_next(members):
    group = tuple(range(members))
    before = {(i, (i - 1) % members) for i in group}
    after = {(i, (i + 1) % members) for i in group}

    def steps(kind):
        return [
            {(m.source, m.target) for m in step.messages} for step in rounds(Communication(kind, group, 90), "gloo")
        ]

    assert steps("all-gather") == [after] * (members - 1)
    assert steps("all-reduce") == steps("reduce-scatter") == [before] * 2 * (members - 1)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=8))
def test_an_uneven_gather_brings_every_part_to_every_rank(parts):
    group = tuple(range(len(parts)))
    held = {rank: {rank} if parts[rank] else set() for rank in group}
    communication = Communication("all-gather-v", group, sum(parts), part_bytes=tuple(parts))
    for number, step in enumerate(rounds(communication, "gloo")):
        arriving = [(m.target, (m.source - number) % len(parts), m) for m in step.messages]
        for target, part, message in arriving:
            assert part in held[message.source], "a rank passes on only what it has"
            assert message.size_bytes == parts[part]
            held[target].add(part)
    assert all(held[rank] == {i for i in group if parts[i]} for rank in group)


@given(st.integers(1, 20))
def test_a_broadcast_reaches_everybody_once_from_ranks_that_have_it(members):
    reached = {0}
    found = rounds(Communication("broadcast", tuple(range(members)), 10), "gloo")
    for step in found:
        sources, targets = [m.source for m in step.messages], [m.target for m in step.messages]
        assert set(sources) <= reached
        assert len(set(sources)) == len(sources)
        assert not set(targets) & reached
        reached |= set(targets)
    assert reached == set(range(members))
    assert len(found) == max(0, (members - 1).bit_length())


def test_an_all_to_all_sends_everything_at_once_and_nothing_to_oneself():
    matrix = ((9.0, 1.0, 0.0), (2.0, 9.0, 3.0), (0.0, 4.0, 9.0))
    (step,) = rounds(Communication("all-to-all-v", (3, 5, 8), 0, pair_bytes=matrix), "gloo")
    assert {(m.source, m.target, m.size_bytes) for m in step.messages} == {(3, 5, 1), (5, 3, 2), (5, 8, 3), (8, 5, 4)}


@pytest.mark.parametrize("kind", [*KINDS, "broadcast", "all-to-all-v", "all-gather-v"])
def test_a_group_of_one_sends_nothing(kind):
    assert rounds(Communication(kind, (2,), 100, pair_bytes=((5.0,),), part_bytes=(100,)), "gloo") == ()


def test_only_reducing_rounds_reduce():
    found = rounds(Communication("all-reduce", (0, 1, 2, 3), 400), "gloo")
    assert [step.reduced_bytes for step in found] == [100, 100, 100, 0, 0, 0]
    assert all(step.reduced_bytes == 0 for step in rounds(Communication("all-gather", (0, 1), 8), "gloo"))


def test_an_unknown_kind_is_no_collective():
    with pytest.raises(ValueError, match="unknown collective 'gossip'"):
        rounds(Communication("gossip", (0, 1), 8), "gloo")


def test_costs_of_the_backend_default_to_nothing():
    bare = star(2)
    assert collectives.overhead_s(bare, "all-reduce") == 0
    assert collectives.bytes_factor(bare, "all-reduce") == 1
    assert collectives.reduction_s(bare, 1e9) == 0


def test_costs_of_the_backend_are_by_kind():
    priced = star(
        2,
        backend_cost={"overhead_s": {"default": "1 ms", "all-gather": 0}, "reduction_bytes_per_s": 1e9, "source": "s"},
    )
    assert collectives.overhead_s(priced, "all-reduce") == 1e-3
    assert collectives.overhead_s(priced, "all-gather") == 0
    assert collectives.reduction_s(priced, 1e9) == 1.0
