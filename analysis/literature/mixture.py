"""Blocks of DeepSeek's models as Megatron-LM runs them: multi-head latent attention, and routed experts with capacity.

[Note: latent attention] Queries, and keys with values, are products of a narrow (latent) one of the input; a part of
each head's key, with rotary positions, is shared by all heads (DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section
2.1). For the attention, queries and keys are joined of their two parts and values are copied (Megatron-LM,
core/transformer/multi_latent_attention.py).

[Note: capacity] With `moe-pad-expert-input-to-capacity` every expert gets as many rows of each sequence, whatever the
router says: tokens beyond are dropped, places that are left hold zeros. Rows are permuted by expert, exchanged, and
joined by expert of what all ranks sent; and back (core/transformer/moe/token_dispatcher.py). The weights of a token's
experts are applied in the activation.
"""

from dataclasses import replace
from math import ceil

from analysis.literature.builder import OperationBuilder
from analysis.literature.operations import FLOAT, INPUT, Operation, Weight, total
from analysis.literature.runs import Experts, Latent, Shape
from gssim.workload import Layer, Moment, Polynomial, Reduction, sliced_layer


def latent_block(builder: OperationBuilder, *, routed: bool) -> tuple[Operation, ...]:
    """Return the operations of a block; `routed`: its perceptron is a mixture of experts."""
    shape = builder.shape
    assert shape.latent is not None
    maps = _routed_maps(builder) if routed else _gated_maps(builder, "map_norm", shape.ffn, "")
    return (
        builder.norm("attention_norm", INPUT),
        *_attention(builder, shape.latent),
        builder.linear("out", "context", shape.heads * shape.latent.value_width, shape.hidden, by_rows=True),
        builder.add("attended", ("out", INPUT)),
        builder.norm("map_norm", "attended"),
        *maps,
        builder.add("mapped", (maps[-1].name, "attended"), last=True),
    )


def _attention(builder: OperationBuilder, latent: Latent) -> list[Operation]:
    shape, size = builder.shape, builder.token_bytes
    head = latent.plain_width + latent.rotary_width
    queries, values = shape.heads * head, shape.heads * latent.value_width
    joined = builder.streamed(size(2 * queries), calls=2)
    copied = builder.streamed(size(2 * values))
    forward, backward = _attention_flop(builder, latent)
    return [
        builder.linear("query_down", "attention_norm", shape.hidden, latent.query_rank, by_rows=False),
        builder.norm("query_norm", "query_down", width=latent.query_rank),
        builder.linear("query_up", "query_norm", latent.query_rank, queries, by_rows=False),
        builder.linear("kv_down", "attention_norm", shape.hidden, latent.kv_rank + latent.rotary_width, by_rows=False),
        builder.norm("kv_norm", "kv_down", width=latent.kv_rank),
        builder.linear(
            "kv_up", "kv_norm", latent.kv_rank, shape.heads * (latent.plain_width + latent.value_width), by_rows=False
        ),
        Operation(name="queries", reads=("query_up",), output=size(queries), streamed=joined, backward_streamed=joined),
        Operation(
            name="keys", reads=("kv_up", "kv_down"), output=size(queries), streamed=joined, backward_streamed=joined
        ),
        Operation(name="values", reads=("kv_up",), output=size(values), streamed=copied, backward_streamed=copied),
        Operation(
            name="context",
            reads=("queries", "keys", "values"),
            output=size(values),
            flop=builder.score_bytes(forward),
            backward_flop=builder.score_bytes(backward),
            operands=size(2 * queries + 2 * values),
            saves=("queries", "keys", "values", "context"),
            also_saved=size(shape.heads, value=FLOAT),
            kept=True,
        ),
    ]


def _attention_flop(builder: OperationBuilder, latent: Latent) -> tuple[float, float]:
    """Return the FLOP for each score of a head, forward (2 products) and backward (5), at the device's own rate.

    Half of them are masked; measured rates count these too.
    """
    shape, use = builder.shape, builder.use
    widths = (latent.plain_width + latent.rotary_width, latent.value_width)
    products = 2.0 * sum(widths)
    flops = [products / 2, 2.5 * products / 2]
    if use is not None and builder.kernels is not None:
        for place, (phase, factor) in enumerate((("f", 1.0), ("b", 2.5))):
            rate = builder.kernels.attention_flop_per_s(
                phase, shape.heads, shape.heads, shape.sequence_length, widths=widths
            )
            if rate:
                flops[place] = factor * products * use.device_flop_per_s / rate
    return flops[0], flops[1]


def _gated_maps(builder: OperationBuilder, reads: str, width: int, prefix: str) -> list[Operation]:
    """Return a gated perceptron whose gate and other map are one product."""
    gates = f"{prefix}gate_up"
    return [
        builder.linear(gates, reads, builder.shape.hidden, 2 * width, by_rows=False),
        Operation(
            name=f"{prefix}swiglu",
            reads=(gates,),
            output=builder.token_bytes(width),
            streamed=builder.streamed(builder.token_bytes(3 * width)),
            backward_streamed=builder.streamed(builder.token_bytes(5 * width)),
            saves=(gates,),
        ),
        builder.linear(f"{prefix}down", f"{prefix}swiglu", width, builder.shape.hidden, by_rows=True),
    ]


def row_bytes(width: float, value: float) -> Polynomial:
    """Return the bytes of a tensor of `width` elements for each row that a rank's experts process."""
    return Polynomial((), (), (), ((ceil(width * value), 0, 0),))


def _routed_maps(builder: OperationBuilder) -> list[Operation]:
    shape, experts = builder.shape, builder.shape.experts
    assert experts is not None
    hidden, value = shape.hidden, builder.value
    tokens, rows = builder.token_bytes(hidden), row_bytes(hidden, value)

    def permuted(name: str, reads: str, moved: Polynomial, output: Polynomial) -> Operation:
        """Return a permutation, which moves so many bytes."""
        forward, backward = (builder.streamed(moved, f"permute_{each}") for each in ("fwd", "bwd"))
        return Operation(name=name, reads=(reads,), output=output, streamed=forward, backward_streamed=backward)

    scores = builder.token_bytes(experts.count, value=FLOAT)
    gates = _grouped(builder, experts, "expert_gate_up", "sorted", hidden, 2 * experts.width)
    width = row_bytes(experts.width, value)
    return [
        *_gated_maps(builder, "map_norm", experts.shared_width, "shared_"),
        builder.linear("router", "map_norm", hidden, experts.count, by_rows=False),
        Operation(  # softmax in float, and the experts that are chosen
            name="probabilities",
            reads=("router",),
            output=scores,
            streamed=builder.streamed(total([scores], 2)),
            backward_streamed=builder.streamed(total([scores], 3)),
            saves=("probabilities",),
            also_saved=builder.token_bytes(experts.count, value=1),
            kernels=6,
        ),
        replace(permuted("permuted", "map_norm", total([tokens, rows]), rows), reads=("map_norm", "probabilities")),
        Operation(name="dispatched", reads=("permuted",), output=rows),
        permuted("sorted", "dispatched", total([rows], 2), rows),
        gates,
        Operation(
            name="expert_swiglu",
            reads=("expert_gate_up",),
            output=width,
            streamed=builder.streamed(total([width], 3)),
            backward_streamed=builder.streamed(total([width], 5)),
            saves=("expert_gate_up",),
            also_saved=row_bytes(1, FLOAT),
        ),
        _grouped(builder, experts, "expert_down", "expert_swiglu", experts.width, hidden),
        permuted("by_rank", "expert_down", total([rows], 2), rows),
        Operation(name="combined", reads=("by_rank",), output=rows),
        permuted("unpermuted", "combined", total([tokens, rows]), tokens),
        replace(builder.add("joined", ("unpermuted", "shared_down")), passes_gradient=True),
    ]


def _grouped(
    builder: OperationBuilder, experts: Experts, name: str, reads: str, inputs: int, outputs: int
) -> Operation:
    """Return the products of all experts of a rank, each of its own rows."""
    slowdowns = (1.0, 1.0, 1.0)
    if builder.use is not None and builder.kernels is not None:
        use = builder.use
        held = experts.count // use.expert_ranks
        rows = ceil(use.micro_batch * builder.shape.sequence_length * experts.chosen / experts.count)
        size = (held, rows * use.expert_ranks, outputs, inputs)
        rates = (builder.kernels.grouped_flop_per_s(stage, size) for stage in ("fwd", "bwd_grad_act", "bwd_grad_w"))
        first, second, third = (use.device_flop_per_s / rate if rate else 1.0 for rate in rates)
        slowdowns = (first, second, third)
    matrix = Polynomial((), ((builder.value * inputs * outputs, 0, 0),))
    return Operation(
        name=name,
        reads=(reads,),
        output=row_bytes(outputs, builder.value),
        flop=row_bytes(2 * inputs * outputs, slowdowns[0]),
        backward_flop=row_bytes(2 * inputs * outputs, slowdowns[1] + slowdowns[2]),
        operands=total([matrix, row_bytes(inputs + outputs, builder.value)]),
        saves=(reads,),
        weights=(Weight(name="{}." + name + ".weight", shape=(1, outputs, inputs), per_expert=True),),
        kept=True,
        kernels=3,
    )


def with_exchanges(layer: Layer, operations: tuple[Operation, ...], experts: Experts, row: float) -> Layer:
    """Return a layer with the all-to-alls of its experts, which ranks divide; `row`: bytes of a row."""
    names = [operation.name for operation in operations]
    last, size = len(names) - 1, Polynomial(((round(row), 0, 0),))
    dispatch, combine = names.index("permuted"), names.index("by_rank")
    exchanges = (
        Reduction(Moment("f", dispatch), size, "dispatch"),
        Reduction(Moment("f", combine), size, "combine"),
        Reduction(Moment("b", last - names.index("unpermuted")), size, "dispatch"),
        Reduction(Moment("b", last - names.index("sorted")), size, "combine"),
    )
    return replace(
        layer,
        units=experts.count,
        experts_per_token=experts.chosen,
        expert_capacity_ratio=experts.capacity_ratio,
        reductions=exchanges,
    )


def weight_shapes(shape: Shape, *, dense: bool) -> set[tuple[int, int]]:
    """Return the distinct shapes of the weights of linear layers, of experts that of one; `dense`: of all blocks."""
    latent, experts, h = shape.latent, shape.experts, shape.hidden
    assert latent is not None
    assert experts is not None
    widths = [experts.width, experts.shared_width, *([shape.ffn] if dense else [])]
    of_heads = latent.plain_width + latent.value_width
    return {
        (latent.query_rank, h),
        (shape.heads * (latent.plain_width + latent.rotary_width), latent.query_rank),
        (latent.kv_rank + latent.rotary_width, h),
        (shape.heads * of_heads, latent.kv_rank),
        (h, shape.heads * latent.value_width),
        *((2 * width, h) for width in widths),
        *((h, width) for width in widths),
    }


def undivided(layer: Layer, tokens: int) -> Layer:
    """Return a layer with all of its experts on one rank, for sequences of so many tokens."""
    if layer.experts_per_token is None or layer.units is None:
        return layer
    rows = layer.units * ceil((layer.expert_capacity_ratio or 1.0) * tokens * layer.experts_per_token / layer.units)
    whole = sliced_layer(layer, layer.units, 0, rows)
    parameters = tuple(replace(parameter, sliced=False) for parameter in whole.parameters)
    return replace(
        whole, parameters=parameters, reductions=(), units=None, experts_per_token=None, expert_capacity_ratio=None
    )
