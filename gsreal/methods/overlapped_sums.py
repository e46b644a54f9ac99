"""Column-parallel linear maps whose input gradient is summed over the ranks while the weight's gradient is computed.

Otherwise the sum of an input gradient follows the whole backward of a map. With `plan.async_input_gradients` it begins
as soon as the input gradient is computed; the gradients of weight and bias follow, and then the wait for the sum.
Source: Megatron-LM, core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.

[Note: deferred weights] Where ranks divide sequences, several maps read one gathered tensor, and one reduce-scatter
sums its gradient, which is complete when all of these maps have added theirs. The gradients of their weights are
computed only then, one map after another, while the reduce-scatter runs: the autograd function of the gather takes the
weights as inputs too, and computes these gradients in its backward. Until then the gradients of the maps' outputs stay
in memory, as they do where one fused map replaces them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Started = Callable[[], Tensor]
"""Waits for a collective, and returns its result."""
Start = Callable[[Tensor], Started]
"""Begins the sum of a tensor over the ranks of a group; it may overwrite the tensor."""


@dataclass(frozen=True)
class MapLayout:
    """The layout of a linear map's weight: (outputs, inputs) in nn.Linear, transposed in Hugging Face's Conv1D."""

    transposed: bool

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the map's output for an input of shape (..., inputs), by the operations of the module itself."""
        if not self.transposed:
            return F.linear(x, weight, bias)
        assert bias is not None  # Conv1D always has one
        output = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
        return output.view(*x.shape[:-1], output.shape[-1])  # not -1, which is unknown where there are no samples

    def outputs(self, weight: Tensor) -> int:
        """Return the number of outputs, the last dimension of the map's output."""
        return weight.shape[1 if self.transposed else 0]

    def output_without_bias(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the map's output for an input of shape (..., inputs), without the bias."""
        return x @ (weight if self.transposed else weight.t())

    def add_input_gradient(self, total: Tensor | None, rows: Tensor, weight: Tensor) -> Tensor:
        """Return `total`, to which the gradient of the input is added in place; None: the gradient alone.

        `rows`: of the output's gradient, of shape (rows, outputs).
        """
        across = weight.t() if self.transposed else weight
        return rows @ across if total is None else total.addmm_(rows, across)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input, of shape (..., inputs)."""
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_input = flat @ (weight.t() if self.transposed else weight)
        return of_input.view(*gradient.shape[:-1], of_input.shape[-1])

    def weight_gradients(self, gradient: Tensor, x: Tensor, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of weight and bias."""
        flat, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        of_weight = rows.t() @ flat if self.transposed else flat.t() @ rows
        return of_weight, flat.sum(0) if has_bias else None


def can_overlap(module: nn.Module) -> bool:
    """Return whether a column-parallel module is a linear map (nn.Linear or Conv1D), as a convolution is not."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def layout_of(module: nn.Module) -> MapLayout:
    """Return the layout of a linear map's weight."""
    return MapLayout(transposed=not isinstance(module, nn.Linear))


def parameters_of(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return a linear map's weight, and its bias if it has one."""
    return module.weight, getattr(module, "bias", None)


class _SummedLinear(torch.autograd.Function):
    """A linear map that sums its input gradient over the ranks while it computes the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: MapLayout, start: Start) -> Tensor:
        """Return the map's output."""
        ctx.save_for_backward(x, weight)
        ctx.layout, ctx.start, ctx.has_bias = layout, start, bias is not None
        return layout.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        """Return the gradients of input, summed, and of weight and bias."""
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        wait = ctx.start(ctx.layout.input_gradient(gradient, weight))
        of_weight, of_bias = ctx.layout.weight_gradients(gradient, x, has_bias=ctx.has_bias)
        return wait(), of_weight, of_bias, None, None


def overlap_sum(module: nn.Module, start: Start) -> None:
    """Let a linear map start the sum of its input gradient by `start`, and overlap it with the weight's gradient."""

    def forward(x: Tensor) -> Tensor:
        output: Tensor = _SummedLinear.apply(x, *parameters_of(module), layout_of(module), start)
        return output

    module.forward = forward


@dataclass
class _Deferred:
    """Tensors that the maps which read one gathered tensor keep for the backward of its gather."""

    inputs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """The gradient of each map's output, and its input, by path of the map."""


class _DeferringLinear(torch.autograd.Function):
    """A linear map whose backward gives its input's gradient only; see [Note: deferred weights]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: MapLayout, path: str, deferred: _Deferred
    ) -> Tensor:
        """Return the map's output."""
        ctx.save_for_backward(x, weight)
        ctx.layout, ctx.path, ctx.deferred = layout, path, deferred
        return layout.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """Return the gradient of the input."""
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        ctx.deferred.inputs[ctx.path] = gradient, x
        return ctx.layout.input_gradient(gradient, weight), None, None, None, None, None


class _Gather(torch.autograd.Function):
    """The all-gather of parts of sequences; its backward also gives the gradients of the weights of its readers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        whole: Callable[[Tensor], Tensor],
        start: Start,
        layouts: dict[str, tuple[MapLayout, bool]],
        deferred: _Deferred,
        *_parameters: Tensor,
    ) -> Tensor:
        """Return the gathered tensor; `layouts`: layout of each map by its path, and whether it has a bias."""
        ctx.start, ctx.layouts, ctx.deferred = start, layouts, deferred
        return whole(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of this rank's part, summed, and of the maps' weights and biases."""
        wait = ctx.start(gradients[0])
        found: list[Tensor] = []
        for path, (layout, has_bias) in ctx.layouts.items():
            of_map = layout.weight_gradients(*ctx.deferred.inputs[path], has_bias=has_bias)
            found += [each for each in of_map if each is not None]
        result = wait()
        ctx.deferred.inputs.clear()
        return result, None, None, None, None, *found


def gather_with_overlapped_sum(
    owner: nn.Module, maps: dict[str, nn.Module], whole: Callable[[Tensor], Tensor], start: Start
) -> Callable[[Tensor], Tensor]:
    """Return the gather of the input of `owner`, whose backward computes the weights' gradients of `maps` (by path).

    `whole` gathers a tensor, `start` begins the reduce-scatter of its gradient. Changes the maps' forwards.
    """
    layouts = {path: (layout_of(module), parameters_of(module)[1] is not None) for path, module in maps.items()}
    for path, module in maps.items():
        module.forward = partial(_deferring_forward, module, path, owner)

    def gathered(x: Tensor) -> Tensor:
        deferred = _Deferred()
        owner.__dict__["_gsreal_deferred"] = deferred  # one for each forward, of a micro-batch or a recomputation
        result: Tensor = _Gather.apply(x, whole, start, layouts, deferred, *parameters_in_order(maps.values()))
        return result

    return gathered


def parameters_in_order(maps: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters of maps as views, made so that autograd accumulates their gradients in this order.

    Autograd runs the node first that was created last, and each view has a node. The nodes that accumulate gradients
    run in no defined order.
    """
    parameters = [each for module in maps for each in parameters_of(module) if each is not None]
    return [each.view_as(each) for each in reversed(parameters)][::-1]


def _deferring_forward(module: nn.Module, path: str, owner: nn.Module, x: Tensor) -> Tensor:
    weight, bias = parameters_of(module)
    constant = None if bias is None else bias.detach()
    output: Tensor = _DeferringLinear.apply(
        x, weight.detach(), constant, layout_of(module), path, owner.__dict__["_gsreal_deferred"]
    )
    return output
