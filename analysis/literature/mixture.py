"""Routed experts as Megatron-LM runs them, and blocks of DeepSeek's models: multi-head latent attention with experts.

[Note: latent attention] Queries, and keys with values, are products of a narrow (latent) projection of the input. A
part of each head's key, with rotary positions, is shared by all heads (DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434,
section 2.1). For the attention, queries and keys are joined from their two parts, and values are copied (Megatron-LM,
core/transformer/multi_latent_attention.py).

[Note: capacity] With `moe-pad-expert-input-to-capacity` every expert gets the same number of rows of each sequence,
whatever the router chooses: tokens beyond it are dropped, and unused places hold zeros. Rows are permuted by expert,
exchanged, and the rows from all ranks are joined by expert; results take the same way back
(core/transformer/moe/token_dispatcher.py). The weights of a token's experts are applied in the activation, if that is
gated, else by a product behind it, for which both factors are saved (core/transformer/mlp.py, `per_token_scale`).

[Note: dispatchers] `alltoall` sends each token to the ranks of its experts; there, the ranks that divide these experts
gather each other's tokens. `allgather`, Megatron-LM's default, gathers all tokens among all of these ranks: each rank
sends all of its tokens to every other one, as many bytes as an all-to-all in which every token goes to every rank.
Each rank then picks the rows of its experts, and the results are reduce-scattered. If there are t tensor ranks, e of
which divide an expert, each has one t-th of a sample's tokens (sequence parallelism, which Megatron-LM requires). So a
row of a sample counts as 1 / t of a row in what is sent, and as e / t of a row in what is computed, of which each rank
has one e-th.
"""

from dataclasses import dataclass, replace
from math import ceil

from analysis.literature.builder import OperationBuilder
from analysis.literature.operations import FLOAT, INPUT, Operation, Weight, total
from analysis.literature.runs import Experts, Latent, Shape
from gssim.workload import Layer, Moment, Polynomial, Reduction, sliced_layer
from gssim.workload.layer import EXPERT_EXCHANGES


@dataclass(frozen=True)
class ExpertRanks:
    """How ranks divide experts."""

    ranks: int = 1
    """Groups of ranks, each with experts of its own."""
    each: int | None = None
    """Tensor ranks that divide each expert; None: all."""


def latent_block(builder: OperationBuilder, *, routed: bool) -> tuple[Operation, ...]:
    """Return the operations of a block; `routed`: its perceptron is a mixture of experts."""
    shape = builder.shape
    assert shape.latent is not None
    maps = routed_maps(builder) if routed else _gated_maps(builder, "map_norm", shape.ffn, "")
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
    flash = Operation(
        name="context",
        reads=("queries", "keys", "values"),
        output=size(values),
        flop=builder.score_bytes(forward),
        backward_flop=builder.score_bytes(backward),
        operands=size(2 * queries + 2 * values),
        saves=("queries", "keys", "values", "context"),
        also_saved=size(shape.heads, value=FLOAT),
        kept=True,
        kernels=builder.software.flash_calls,
    )
    return [
        builder.whole_linear("query_down", "attention_norm", shape.hidden, latent.query_rank),
        builder.norm("query_norm", "query_down", width=latent.query_rank),
        builder.linear("query_up", "query_norm", latent.query_rank, queries, by_rows=False),
        builder.whole_linear("kv_down", "attention_norm", shape.hidden, latent.kv_rank + latent.rotary_width),
        builder.norm("kv_norm", "kv_down", width=latent.kv_rank),
        builder.linear(
            "kv_up", "kv_norm", latent.kv_rank, shape.heads * (latent.plain_width + latent.value_width), by_rows=False
        ),
        Operation(name="queries", reads=("query_up",), output=size(queries), streamed=joined, backward_streamed=joined),
        Operation(
            name="keys", reads=("kv_up", "kv_down"), output=size(queries), streamed=joined, backward_streamed=joined
        ),
        Operation(name="values", reads=("kv_up",), output=size(values), streamed=copied, backward_streamed=copied),
        *([flash] if builder.software.flash_attention else _unfused(builder, latent)),
    ]


def _unfused(builder: OperationBuilder, latent: Latent) -> list[Operation]:
    """Return attention whose scores are written to memory, without dropout."""
    shape, scores = builder.shape, builder.score_bytes(builder.value)
    head, values = latent.plain_width + latent.rotary_width, shape.heads * latent.value_width
    return [
        Operation(
            name="scores",
            reads=("queries", "keys"),
            output=scores,
            flop=builder.score_bytes(2 * head),
            streamed=scores,
            backward_streamed=total([scores], 2),
            saves=("queries", "keys"),
            kept=True,
            kernels=4,
        ),
        Operation(
            name="softmax",
            reads=("scores",),
            output=scores,
            streamed=total([scores], 2),
            backward_streamed=total([scores], 3),
            saves=("softmax",),
        ),
        Operation(
            name="context",
            reads=("softmax", "values"),
            output=builder.token_bytes(values),
            flop=builder.score_bytes(2 * latent.value_width),
            streamed=total([builder.token_bytes(2 * values), scores]),
            backward_streamed=total([builder.token_bytes(2 * values), scores], 2),
            saves=("softmax", "values"),
            kept=True,
            kernels=4,
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


def routed_maps(builder: OperationBuilder) -> list[Operation]:
    """Return the operations from a block's second norm to the sum of what a token's experts return."""
    shape, experts = builder.shape, builder.shape.experts
    assert experts is not None
    hidden, value, tensor_ranks = shape.hidden, builder.value, builder.split.ranks
    of_rows = builder.expert_tensor_ranks / tensor_ranks
    tokens, rows = builder.unsplit_bytes(hidden), row_bytes(of_rows * hidden, value)

    def permuted(name: str, reads: str, moved: Polynomial, output: Polynomial) -> Operation:
        """Return a permutation, which moves `moved` bytes."""
        forward, backward = (builder.streamed(moved, f"permute_{each}") for each in ("fwd", "bwd"))
        return Operation(name=name, reads=(reads,), output=output, streamed=forward, backward_streamed=backward)

    scores = builder.unsplit_bytes(experts.count, value=FLOAT)
    processed = _processed(builder, experts, "permuted" if experts.gathers_tokens else "sorted")
    sorting, returning = (1, 1) if experts.fused_permutation else UNFUSED_PERMUTATION
    if experts.gathers_tokens:
        gathered = builder.token_bytes(hidden * builder.expert_ranks * of_rows, shared=False)
        moved = total([rows], 2)
        exchanged = [
            Operation(name="dispatched", reads=("map_norm", "probabilities"), output=gathered, kernels=3),
            replace(permuted("permuted", "dispatched", moved, rows), kernels=sorting, backward_kernels=2),
            *processed,
            replace(
                permuted("unpermuted", "expert_down", total([moved, gathered]), gathered),
                kernels=returning,
                backward_kernels=2,
            ),
            Operation(name="combined", reads=("unpermuted",), output=tokens),
        ]
    else:
        sent = row_bytes(hidden / tensor_ranks, value)
        first = permuted("permuted", "map_norm", total([tokens, sent]), sent)
        exchanged = [
            replace(first, reads=("map_norm", "probabilities"), kernels=sorting, backward_kernels=2),
            Operation(name="dispatched", reads=("permuted",), output=rows),
            permuted("sorted", "dispatched", total([rows], 2), rows),
            *processed,
            permuted("by_rank", "expert_down", total([rows], 2), rows),
            Operation(name="combined", reads=("by_rank",), output=sent),
            replace(
                permuted("unpermuted", "combined", total([tokens, sent]), tokens),
                kernels=returning,
                backward_kernels=2,
            ),
        ]
    shared = _gated_maps(builder, "map_norm", experts.shared_width, "shared_") if experts.shared_width else []
    joined = [replace(builder.add("joined", (exchanged[-1].name, "shared_down")), passes_gradient=True)]
    return [
        *shared,
        builder.whole_linear("router", "map_norm", hidden, experts.count),
        Operation(  # softmax in float, and the experts that are chosen
            name="probabilities",
            reads=("router",),
            output=scores,
            streamed=builder.streamed(total([scores], 2)),
            backward_streamed=builder.streamed(total([scores], 3)),
            saves=("probabilities",),
            also_saved=builder.unsplit_bytes(experts.count, value=1),
            kernels=6,
        ),
        *exchanged,
        *(joined if shared else []),
    ]


def _processed(builder: OperationBuilder, experts: Experts, reads: str) -> list[Operation]:
    """Return what a rank's experts do with the rows that an operation returns."""
    hidden, gated = builder.shape.hidden, builder.shape.kind == "llama" or builder.shape.gated
    of_rows = builder.expert_tensor_ranks / builder.split.ranks
    own_width, widening = experts.width // builder.expert_tensor_ranks, 2 if gated else 1
    width = row_bytes(of_rows * own_width, builder.value)
    calls = 1 if experts.grouped else experts.count // builder.expert_ranks
    activated = Operation(
        name="expert_swiglu",
        reads=("expert_gate_up",),
        output=width,
        streamed=builder.streamed(total([width], 1 + widening)),
        backward_streamed=builder.streamed(total([width], 1 + 2 * widening)),
        saves=("expert_gate_up",),
        also_saved=row_bytes(of_rows, FLOAT),
        kernels=calls,
    )
    weighted = Operation(
        name="expert_weighted",
        reads=("expert_swiglu",),
        output=width,
        streamed=builder.streamed(total([width], 2)),
        backward_streamed=builder.streamed(total([width], 4)),
        saves=("expert_swiglu",),
        kernels=calls,
    )
    between = [activated] if gated else [activated, weighted]
    return [
        _grouped(builder, experts, "expert_gate_up", reads, hidden, widening * own_width),
        *between,
        _grouped(builder, experts, "expert_down", between[-1].name, own_width, hidden),
    ]


UNFUSED_PERMUTATION = (10, 5)
"""Operations that sort rows by expert without a kernel of its own, and those that put results back.

Megatron-LM, core/transformer/moe: `permute` and `unpermute` of moe_utils.py, and `dispatch_postprocess` of
token_dispatcher.py: parts of mask and probabilities are copied, counted, transposed and selected, and then the rows.
"""


def _grouped(
    builder: OperationBuilder, experts: Experts, name: str, reads: str, inputs: int, outputs: int
) -> Operation:
    """Return the products of all experts of a rank, each of its own rows; widths are those of the rank."""
    slowdowns = (1.0, 1.0, 1.0)
    of_rows = builder.expert_tensor_ranks / builder.split.ranks
    held = experts.count // builder.expert_ranks
    if builder.use is not None and builder.kernels is not None:
        use = builder.use
        rows = ceil(use.micro_batch * builder.shape.sequence_length * experts.chosen / experts.count)
        size = (held, rows * use.expert_ranks, outputs, inputs)
        rates = (builder.kernels.grouped_flop_per_s(stage, size) for stage in ("fwd", "bwd_grad_act", "bwd_grad_w"))
        first, second, third = (use.device_flop_per_s / rate if rate else 1.0 for rate in rates)
        slowdowns = (first, second, third)
    matrix = Polynomial((), ((builder.value * inputs * outputs, 0, 0),))
    return Operation(
        name=name,
        reads=(reads,),
        output=row_bytes(of_rows * outputs, builder.value),
        flop=row_bytes(of_rows * 2 * inputs * outputs, slowdowns[0]),
        backward_flop=row_bytes(of_rows * 2 * inputs * outputs, slowdowns[1] + slowdowns[2]),
        operands=total([matrix, row_bytes(of_rows * (inputs + outputs), builder.value)]),
        saves=(reads,),
        weights=(Weight(name="{}." + name + ".weight", shape=(1, outputs, inputs), per_expert=True),),
        kept=True,
        # a call of cuBLAS for each expert all the same (Transformer Engine, common/gemm, multi_stream_cublas_gemm)
        kernels=2 + held if experts.grouped else 3 * held,
    )


def with_exchanges(layer: Layer, operations: tuple[Operation, ...], builder: OperationBuilder) -> Layer:
    """Return a layer with the exchanges of its experts, which ranks divide; see [Note: dispatchers]."""
    experts = builder.shape.experts
    assert experts is not None
    tensor_ranks, divides_each = builder.split.ranks, builder.expert_tensor_ranks
    names = [operation.name for operation in operations]
    last = len(names) - 1
    row = builder.value * builder.shape.hidden / tensor_ranks
    sent = ("probabilities", "unpermuted") if experts.gathers_tokens else ("permuted", "by_rank")
    back = ("combined", "permuted") if experts.gathers_tokens else ("unpermuted", "sorted")
    wide, tokens = 1.0, float(experts.chosen)
    if experts.gathers_tokens:
        wide, tokens = builder.expert_ranks / experts.chosen, float(builder.expert_ranks)
    size = Polynomial(((round(row * wide), 0, 0),))
    exchanges = [
        Reduction(Moment("f", names.index(sent[0])), size, "dispatch"),
        Reduction(Moment("f", names.index(sent[1])), size, "combine"),
        Reduction(Moment("b", last - names.index(back[0])), size, "dispatch"),
        Reduction(Moment("b", last - names.index(back[1])), size, "combine"),
    ]
    if divides_each > 1:
        # a tensor group's call, of as many bytes to each rank as those that divide an expert send each other
        among = (divides_each - 1) / (tensor_ranks - 1) * tensor_ranks
        joined = builder.split.size(bs=row * tokens * among, shared=False)
        exchanges = [
            each
            for exchange in exchanges
            for each in (
                [exchange, Reduction(exchange.moment, joined, "all-gather")]
                if exchange.kind == "dispatch"
                else [Reduction(exchange.moment, joined, "reduce-scatter"), exchange]
            )
        ]
    every = sorted([*layer.reductions, *exchanges], key=lambda each: (each.moment.phase == "b", each.moment.position))
    return replace(
        layer,
        units=experts.count,
        experts_per_token=experts.chosen,
        expert_capacity_ratio=experts.capacity_ratio,
        reductions=tuple(every),
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
    """Return a layer with all of its experts on one rank, for sequences of `tokens` tokens."""
    if layer.experts_per_token is None or layer.units is None:
        return layer
    rows = layer.units * ceil((layer.expert_capacity_ratio or 1.0) * tokens * layer.experts_per_token / layer.units)
    whole = sliced_layer(layer, layer.units, 0, rows)
    parameters = tuple(replace(parameter, sliced_dimension=None) for parameter in whole.parameters)
    own = tuple(each for each in whole.reductions if each.kind not in EXPERT_EXCHANGES)
    return replace(
        whole, parameters=parameters, reductions=own, units=None, experts_per_token=None, expert_capacity_ratio=None
    )
