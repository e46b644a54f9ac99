"""Shards that end at the edges of parameters: laws of the division, and what they need."""

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")


from gsreal.gradient_sharding import memory_and_traffic  # noqa: E402
from gsreal.gradient_sharding.bucket import Partition  # noqa: E402
from gsreal.gradient_sharding.guards import check_factory  # noqa: E402

SIZES = st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=12), min_size=1, max_size=6)
WEIGHTS = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)


@settings(max_examples=examples(200), deadline=None)
@given(SIZES, WEIGHTS)
def test_whole_tensors_have_one_owner_and_shares_are_met_to_the_largest_of_them(buckets, weights):
    shares = [weight / sum(weights) for weight in weights]
    partition = Partition([[share] for share in shares], whole_tensors=True)
    owned = [0] * len(shares)
    for sizes in buckets:
        edges = {sum(sizes[:i]) for i in range(len(sizes) + 1)}
        (parts,) = partition.divide(sizes).owned
        assert sum(parts) == sum(sizes)
        assert min(parts) >= 0
        assert {sum(parts[:i]) for i in range(len(parts) + 1)} <= edges
        owned = [before + part for before, part in zip(owned, parts, strict=True)]
    largest, total = max(map(max, buckets)), sum(map(sum, buckets))
    assert all(found <= share * total + 2 * largest * len(shares) for found, share in zip(owned, shares, strict=True))
    assert all(found == 0 for found, share in zip(owned, shares, strict=True) if share == 0)


def test_whole_tensors_on_nodes_are_cut_by_place_and_then_by_node():
    partition = Partition([[0.25, 0.25], [0.25, 0.25]], whole_tensors=True)
    assert partition.divide([4, 4, 4, 4]).owned == ((4, 4), (4, 4))
    assert not partition.idle_owners


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_what_owners_of_whole_tensors_need_sums_to_what_one_device_needs(kind):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(7)))
    plain = kind(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain.step()
    held = sum(v.numel() * v.element_size() for state in plain.state.values() for v in state.values())
    said = [
        memory_and_traffic(model, lambda p: kind(p, lr=1e-3), rank=rank, ranks=3, whole_tensors=True, bucket_bytes=1e5)
        for rank in range(3)
    ]
    assert sum(each.optimizer_state_bytes for each in said) == held
    assert sorted(each.gradient_bytes // (64 * 64 * 4) for each in said) == [2, 2, 3]


def test_a_trial_of_an_optimizer_leaves_random_numbers_as_they_were():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_factory(lambda p: torch.optim.Adam(p, lr=1e-3), None, like=torch.zeros(1), whole_tensors=False)
    assert torch.equal(torch.rand(1), expected)


def test_a_trial_of_an_optimizer_seeds_no_device_but_its_own(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)  # seeds every device, which nothing takes back
    check_factory(torch.optim.AdamW, None, like=torch.zeros(3), whole_tensors=False)
    assert seeded == []
