"""Linear maps whose input's gradient is summed beside the products of weights' gradients, compared with autograd."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
overlapped = pytest.importorskip("gsreal.methods.overlapped_maps")


class Conv1D(torch.nn.Module):
    """The linear map of Hugging Face's GPT-2, whose weight is (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs))
        self.bias = torch.nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.weight.shape[1])


KINDS = {
    "bias": lambda: torch.nn.Linear(6, 4),
    "no-bias": lambda: torch.nn.Linear(6, 4, bias=False),
    "transposed": lambda: Conv1D(4, 6),
}


def gradients(owner: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x.grad = None
    owner.zero_grad(set_to_none=True)
    (sum(module(x) for module in owner.children()) ** 2).sum().backward()
    return [x.grad, *(each.grad for each in owner.parameters())]


def noting_start(events: list[str]):
    """Return the start of a sum that doubles a tensor, as over two equal ranks, and notes its begin and its wait."""

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        events.append("wait")
        return 2 * tensor

    def start(tensor: torch.Tensor):
        events.append("start")
        return partial(wait, tensor.clone())

    return start


@pytest.fixture
def products(monkeypatch):
    """The list of events, to which products of weights' gradients are added as they are computed."""
    events: list[str] = []
    computed = overlapped.MapLayout.weight_gradients

    def noted(self, *args, **settings):
        events.append("weight")
        return computed(self, *args, **settings)

    monkeypatch.setattr(overlapped.MapLayout, "weight_gradients", noted)
    return events


@pytest.mark.parametrize("samples", [2, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_map_sums_its_input_gradient_while_it_computes_that_of_its_weight(kind, samples, products):
    torch.manual_seed(0)
    owner, x = torch.nn.ModuleList([KINDS[kind]()]), torch.randn(samples, 3, 6, requires_grad=True)
    of_input, *of_weights = gradients(owner, x)
    overlapped.overlap_sum(owner[0], noting_start(products))
    found, *others = gradients(owner, x)
    torch.testing.assert_close(found, 2 * of_input)
    torch.testing.assert_close(others, of_weights)
    assert products == ["start", "weight", "wait"]


@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_one_gathered_tensor_compute_their_weights_gradients_in_order_beside_its_sum(kind, products):
    """Gradients are accumulated in the order of the maps and, in each, of weight and bias: as model files list them."""
    torch.manual_seed(0)
    owner = torch.nn.ModuleList([KINDS[kind]() for _ in range(5)])
    x = torch.randn(2, 3, 6, requires_grad=True)
    of_input, *of_weights = gradients(owner, x)
    maps = dict(owner.named_children())
    gather = overlapped.gather_with_overlapped_sum(owner, maps, lambda part: part.clone(), noting_start(products))
    ready: list[str] = []
    for name, parameter in owner.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    x.grad = None
    owner.zero_grad(set_to_none=True)
    gathered = gather(x)
    (sum(module(gathered) for module in owner.children()) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * of_input)
    torch.testing.assert_close([each.grad for each in owner.parameters()], of_weights)
    assert products == ["start", *["weight"] * 5, "wait"]
    assert ready == [name for name, _ in owner.named_parameters()]
