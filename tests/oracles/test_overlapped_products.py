"""Linear maps that are computed part by part beside an exchange, compared with autograd: two equal ranks, in one."""

from collections.abc import Callable

import pytest
from test_overlapped_sums import KINDS

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
overlapped = pytest.importorskip("gsreal.methods.overlapped_maps")


class TwoEqualRanks(overlapped.PartsRing):
    """A ring whose other rank, the second, has the same part and the same weights; notes in which order parts come."""

    ranks = 2

    def __init__(self) -> None:
        object.__setattr__(self, "seen", [])

    def gather(self, part: torch.Tensor, use: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        every = torch.stack((part, part))
        for number in (0, 1):
            self.seen.append(f"part {number}")
            use(number, every[number].flatten(0, 1))
        return every

    def scatter(self, product: Callable[[int], torch.Tensor]) -> torch.Tensor:
        self.seen.append("sum")
        other, own = product(1), product(0)
        assert other.shape == own.shape
        return 2 * own  # of two equal ranks


def gradients(owner: torch.nn.Module, out: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    x.grad = None
    owner.zero_grad(set_to_none=True)
    (out**2).sum().backward()
    return [x.grad, *(each.grad for each in owner.parameters())]


def weighted(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor that depends otherwise on each output and position."""
    return sum((1 + number) * each * torch.arange(1.0, 7).view(1, 6, 1) for number, each in enumerate(outputs))


@pytest.mark.parametrize("kind", KINDS)
def test_maps_multiply_parts_as_they_arrive_and_sum_the_gradient_of_their_input(kind):
    torch.manual_seed(0)
    owner = torch.nn.ModuleList([KINDS[kind]() for _ in range(3)]).double()
    part, ring = torch.randn(2, 3, 6, dtype=torch.float64), TwoEqualRanks()
    whole = torch.cat((part, part), 1).requires_grad_()
    expected = weighted([module(whole) for module in owner])
    of_input, *of_weights = gradients(owner, expected, whole)
    gathered = overlapped.multiply_while_gathered(owner, dict(owner.named_children()), ring)
    part.requires_grad_()
    shown = gathered(part)
    out = weighted([module(shown) for module in owner])
    torch.testing.assert_close(out, expected)
    found, *others = gradients(owner, out, part)
    torch.testing.assert_close(found, 2 * of_input[:, :3])
    torch.testing.assert_close(others, of_weights)
    assert ring.seen == ["part 0", "part 1", "sum"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_sums_the_parts_of_its_output_and_adds_its_bias_once(kind):
    torch.manual_seed(0)
    owner, x = torch.nn.ModuleList([KINDS[kind]()]).double(), torch.randn(2, 6, 6, dtype=torch.float64).requires_grad_()
    (module,) = owner
    bias = getattr(module, "bias", None)
    whole = 2 * module(x) - (0 if bias is None else bias)  # of two equal ranks, each of which has this rank's part
    ring = TwoEqualRanks()
    overlapped.scatter_while_multiplied(module, ring)
    out = module(x)
    torch.testing.assert_close(out, whole[:, :3])
    assert ring.seen == ["sum"]
    out.retain_grad()
    found, *others = gradients(owner, out, x)
    assert ring.seen == ["sum", "part 0", "part 1"]
    # the gathered gradient is this part's, twice; each rank gives that of its own input
    per_position = out.grad
    assert per_position is not None
    both = per_position.repeat(1, 2, 1)
    weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.t()
    torch.testing.assert_close(found, both @ weight)
    of_weight = torch.einsum("bpo,bpi->oi", both, x)
    torch.testing.assert_close(others[0], of_weight if isinstance(module, torch.nn.Linear) else of_weight.t())
    if bias is not None:
        torch.testing.assert_close(others[1], both.sum((0, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_samples_has_gradients_of_zero(kind):
    owner = torch.nn.ModuleList([KINDS[kind](), KINDS[kind]()])
    first, last = owner
    ring, part = TwoEqualRanks(), torch.randn(0, 3, 6).requires_grad_()
    gathered = overlapped.multiply_while_gathered(owner, {"0": first}, ring)
    overlapped.scatter_while_multiplied(last, ring)
    shown = gathered(part)
    out = last(torch.nn.functional.pad(first(shown), (0, 2)))
    assert out.shape == (0, 3, 4)
    found, *of_weights = gradients(owner, out, part)
    assert found.shape == part.shape
    assert not any(each.count_nonzero() for each in of_weights)


def test_a_module_that_reads_the_gathered_input_itself_gets_no_numbers():
    owner = torch.nn.ModuleList([KINDS["bias"]()])
    gathered = overlapped.multiply_while_gathered(owner, dict(owner.named_children()), TwoEqualRanks())
    shown = gathered(torch.randn(2, 3, 6))
    assert shown.shape == (2, 6, 6)
    assert shown.isnan().all()
