"""Linear maps of tensor-parallel ranks that are computed while the sums or exchanges around them run.

[Note: overlapped sums] Otherwise the sum of an input gradient follows the whole backward of a column-parallel map. With
`plan.async_input_gradients` it begins as soon as the input gradient is computed; the gradients of weight and bias
follow, and then the wait for the sum. Source: Megatron-LM, core/tensor_parallel/layers.py,
LinearWithGradAccumulationAndAsyncCommunication.

[Note: deferred weights] Where ranks divide sequences, several maps read one gathered tensor, and one reduce-scatter
sums its gradient, which is complete when all of these maps have added theirs. The gradients of their weights are
computed only then, one map after another, while the reduce-scatter runs: the autograd function of the gather takes the
weights as inputs too, and computes these gradients in its backward. Until then the gradients of the maps' outputs stay
in memory, as they do where one fused map replaces them.

[Note: overlapped products] Otherwise a rank gathers the parts of all ranks before the column-parallel maps that read
them, and reduce-scatters the output of a row-parallel map after it. With `plan.tp_overlap` the parts travel around a
ring, in one step less than there are ranks, and a rank multiplies one part while it sends and receives others (Wang et
al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS;
Megatron-LM's `--tp-comm-overlap` does so by Transformer Engine's userbuffers):

- The inputs of column-parallel maps are gathered: a rank multiplies its own part first, and passes on what it has.
- The output of a row-parallel map is summed: a rank computes its term of one part while the partial sum of another
  travels, and adds it when both are there.
- In the backward the same is done with the products that give gradients of inputs: those of column-parallel maps are
  summed, those of row-parallel maps follow the gather of the output's gradient. The gradients of weights follow.

A part is the same positions of all samples. What is received is in the order of the ranks; the rows of a part of a
tensor in the order of positions are copied together before a product, or its result is copied to its places.

[Note: one function for all readers] All maps that read one gathered tensor are one autograd function, at the place of
the gather: each part is multiplied by all of their weights when it arrives. Their modules then only hand on its
outputs. The gathered input is kept in the order in which it came, rank after rank.

[Note: two functions for a sum] A row-parallel map is two autograd functions: the first saves its input and weight, the
second multiplies and sums. Activation checkpointing thus runs no product and no exchange of a block's last map again:
it stops once all saved tensors exist. The second one's backward takes what the first has saved, so that a block's
forward runs again before the gradient of its output is gathered.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gsreal.gradient_sharding.point_to_point import all_gather_in_turn, reduce_scatter_in_turn
from gsreal.measure import Timeline

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
        of_maps: list[Tensor] = []
        for path, (layout, has_bias) in ctx.layouts.items():
            of_map = layout.weight_gradients(*ctx.deferred.inputs[path], has_bias=has_bias)
            of_maps += [each for each in of_map if each is not None]
        result = wait()
        ctx.deferred.inputs.clear()
        return result, None, None, None, None, *of_maps


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


@dataclass(frozen=True)
class PartsRing:
    """The tensor-parallel ranks of a group, which exchange parts of sequences of shape (batch, positions, width)."""

    group: dist.ProcessGroup
    timeline: Timeline

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    def gather(self, part: Tensor, use: Callable[[int, Tensor], None]) -> Tensor:
        """Return the parts of all ranks (ranks, batch, positions, width), and call `use` with each as it arrives.

        `use` is given a part's number and its rows (batch * positions, width).
        """
        every = part.new_empty((self.ranks, *part.shape))
        every[dist.get_rank(self.group)].copy_(part)
        for number in all_gather_in_turn(every, group=self.group, waiting=self._span("all-gather sequence")):
            use(number, every[number].flatten(0, 1))
        return every

    def scatter(self, product: Callable[[int], Tensor]) -> Tensor:
        """Return the sum over the ranks of this rank's part; `product` computes this rank's term of a part."""
        return reduce_scatter_in_turn(product, group=self.group, waiting=self._span("reduce-scatter sequence"))

    def places(self, whole: Tensor, number: int) -> Tensor:
        """Return a view (batch, positions, width) of whole sequences: the places of a part."""
        return whole.unflatten(1, (self.ranks, -1)).select(1, number)

    def part(self, whole: Tensor, number: int) -> Tensor:
        """Return a copy (batch, positions, width) of a part of whole sequences."""
        return self.places(whole, number).clone(memory_format=torch.contiguous_format)

    def _span(self, label: str) -> Callable[[], AbstractContextManager[None]]:
        return lambda: self.timeline.span(label, "exposed_communication", self.group)


class _GatheredLinears(torch.autograd.Function):
    """Linear maps of whole sequences, from a rank's part of them; see [Note: one function for all readers]."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, ring: PartsRing, layouts: list[tuple[MapLayout, bool]], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the maps' outputs; `layouts`: of each map, and whether it has a bias after its weight."""
        given = iter(parameters)
        maps = [(layout, next(given), next(given) if has_bias else None) for layout, has_bias in layouts]
        batch, positions = part.shape[0], ring.ranks * part.shape[1]
        outputs = [part.new_empty((batch, positions, layout.outputs(weight))) for layout, weight, _ in maps]

        def multiply(number: int, rows: Tensor) -> None:
            for output, (layout, weight, bias) in zip(outputs, maps, strict=True):
                place = ring.places(output, number)
                place.copy_(layout.output(rows, weight, bias).view(place.shape))

        every = ring.gather(part, multiply)
        ctx.save_for_backward(every, *(weight for _, weight, _ in maps))
        ctx.ring, ctx.layouts = ring, layouts
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of this rank's part, summed, and of the maps' weights and biases."""
        every, *weights = ctx.saved_tensors
        ring: PartsRing = ctx.ring

        def product(number: int) -> Tensor:
            total: Tensor | None = None
            for (layout, _), weight, gradient in zip(ctx.layouts, weights, gradients, strict=True):
                total = layout.add_input_gradient(total, ring.part(gradient, number).flatten(0, 1), weight)
            assert total is not None
            return total

        of_part = ring.scatter(product).view(every.shape[1:])
        of_parameters: list[Tensor] = []
        for (layout, has_bias), gradient in zip(ctx.layouts, gradients, strict=True):
            by_rank = gradient.unflatten(1, (ring.ranks, -1)).transpose(0, 1)
            rows = by_rank.clone(memory_format=torch.contiguous_format).flatten(0, 2)
            of_parameters += [
                each for each in layout.weight_gradients(rows, every, has_bias=has_bias) if each is not None
            ]
            del rows
        return of_part, None, None, *of_parameters


def multiply_while_gathered(
    owner: nn.Module, maps: dict[str, nn.Module], ring: PartsRing
) -> Callable[[Tensor], Tensor]:
    """Return the change of the input of `owner` that computes the outputs of `maps` (by path), which read that input.

    It maps a rank's part to a tensor in the shape of whole sequences without data (all NaN). The maps' forwards, which
    are replaced, return the computed outputs without reading it.
    """
    layouts = [(layout_of(module), parameters_of(module)[1] is not None) for module in maps.values()]
    for path, module in maps.items():
        module.forward = partial(_take_output, owner, path)

    def gathered(part: Tensor) -> Tensor:
        outputs = _GatheredLinears.apply(part, ring, layouts, *parameters_in_order(maps.values()))
        owner.__dict__["_gsreal_outputs"] = dict(zip(maps, outputs, strict=True))
        batch, positions, width = part.shape
        return part.new_full((), torch.nan).expand(batch, ring.ranks * positions, width)

    return gathered


def _take_output(owner: nn.Module, path: str, _x: Tensor) -> Tensor:
    """Return the output of a map (at `path`), which was computed when the input of `owner` was gathered."""
    output: Tensor = owner.__dict__["_gsreal_outputs"].pop(path)
    return output


class _SavedInput(torch.autograd.Function):
    """The input of a row-parallel map, saved with its weight; see [Note: two functions for a sum]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: MapLayout, contexts: list[Any]
    ) -> Tensor:
        """Return the input; adds the context, whose saved tensors the other function's backward takes, to a list."""
        ctx.save_for_backward(x, weight)
        ctx.layout, ctx.has_bias = layout, bias is not None
        contexts.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        """Return the gradient of the input as it came in, and those of weight and bias."""
        of_output, x = ctx.given.pop()
        of_weight, of_bias = ctx.layout.weight_gradients(of_output, x, has_bias=ctx.has_bias)
        return gradients[0], of_weight, of_bias, None, None


class _ScatteredLinear(torch.autograd.Function):
    """The sum over the ranks of a rank's part of a row-parallel map's output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: MapLayout, ring: PartsRing, saved: Any
    ) -> Tensor:
        """Return the sum, with the bias added once; `saved`: the context of the input."""
        ctx.layout, ctx.ring, ctx.saved = layout, ring, saved
        total = ring.scatter(lambda number: layout.output_without_bias(ring.part(x, number), weight))
        return total if bias is None else total.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """Return the gradient of the input.

        The gathered gradient of the output is stored in `ctx.saved`, whose backward computes the weight's gradient.
        """
        x, weight = ctx.saved.saved_tensors
        ring: PartsRing = ctx.ring
        of_input = x.new_empty(x.shape)

        def multiply(number: int, rows: Tensor) -> None:
            place = ring.places(of_input, number)
            place.copy_(ctx.layout.input_gradient(rows, weight).view(place.shape))

        every = ring.gather(gradients[0], multiply)
        ctx.saved.given = [(every.transpose(0, 1).flatten(1, 2), x)]
        return of_input, None, None, None, None, None


def scatter_while_multiplied(module: nn.Module, ring: PartsRing) -> None:
    """Let a row-parallel map return this rank's part of the sum over the ranks of its outputs.

    The bias is added once; every rank has its whole gradient.
    """
    module.forward = partial(_scatter_output, module, layout_of(module), ring)


def _scatter_output(module: nn.Module, layout: MapLayout, ring: PartsRing, x: Tensor) -> Tensor:
    """Return this rank's part of the sum over the ranks of a row-parallel map's outputs."""
    weight, bias = parameters_of(module)
    contexts: list[Any] = []
    saved = _SavedInput.apply(x, weight, bias, layout, contexts)
    constant = None if bias is None else bias.detach()
    output: Tensor = _ScatteredLinear.apply(saved, weight.detach(), constant, layout, ring, contexts.pop())
    return output
